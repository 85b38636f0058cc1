"""The update rules of the specification, line by line, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ortops.conformance.case import Array


def adagrad(
    r: float,
    t: int,
    x: Array,
    g: Array,
    h: Array,
    *,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> Sequence[Array]:
    """Returns ``X_new`` and ``H_new``."""
    r = r / (1 + t * decay_factor)
    g_regularized = norm_coefficient * x + g
    h_new = h + g_regularized * g_regularized
    h_adaptive = np.sqrt(h_new) + epsilon
    return x - r * g_regularized / h_adaptive, h_new


def adam(
    r: float,
    t: int,
    x: Array,
    g: Array,
    v: Array,
    h: Array,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> Sequence[Array]:
    """Returns ``X_final``, ``V_new`` and ``H_new``."""
    g_regularized = norm_coefficient * x + g
    v_new = alpha * v + (1 - alpha) * g_regularized
    h_new = beta * h + (1 - beta) * g_regularized * g_regularized
    h_sqrt = np.sqrt(h_new) + epsilon
    r_adjusted = r * np.sqrt(1 - beta**t) / (1 - alpha**t) if t > 0 else r
    x_new = x - r_adjusted * v_new / h_sqrt
    return (1 - norm_coefficient_post) * x_new, v_new, h_new


def momentum(
    r: float,
    t: int,
    x: Array,
    g: Array,
    v: Array,
    *,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> Sequence[Array]:
    """Returns ``X_new`` and ``V_new``."""
    g_regularized = norm_coefficient * x + g
    beta_adjusted = beta if t > 0 else 1
    v_new = alpha * v + beta_adjusted * g_regularized
    if mode == "standard":
        return x - r * v_new, v_new
    return x - r * (g_regularized + alpha * v_new), v_new


FORMULAS: dict[str, Callable[..., Sequence[Array]]] = {
    "Adagrad": adagrad,
    "Adam": adam,
    "Momentum": momentum,
}
