"""The optimizers of the specification once more: its pseudo-code on single numbers, in float64.

Nothing of ortops is used. Next to each result stands a bound of the rounding errors that a correct
implementation in a given precision may make: each result is a sum, and what is rounded is in
proportion to the magnitudes of its terms, which may cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = list[tuple[float, float]]  # each result with the sum of the magnitudes of its terms

ROUNDINGS = 16  # more than any result goes through


@dataclass(frozen=True)
class Expected:
    value: Array
    magnitude: Array

    def assert_close(self, actual: npt.NDArray[np.generic], conditioning: float = 0.0) -> None:
        """Asserts equality up to rounding in the dtype of ``actual``."""
        assert isinstance(actual, np.ndarray)
        assert actual.shape == self.value.shape
        relative = np.finfo(actual.dtype).eps + np.finfo(np.float64).eps * conditioning
        error = np.abs(actual.astype(np.float64) - self.value)
        allowed = ROUNDINGS * relative * self.magnitude + np.finfo(actual.dtype).tiny
        worst = np.max(error / allowed, initial=0.0)
        assert worst <= 1, f"error of {worst:.3g} times what rounding allows"


def _one_adagrad(r, t, x, g, h, *, norm_coefficient, decay_factor, epsilon) -> Numbers:
    r = r / (1 + t * decay_factor)
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    h_new = h + g_regularized * g_regularized
    h_adaptive = math.sqrt(h_new) + epsilon
    x_new = x - r * g_regularized / h_adaptive
    return [(x_new, abs(x) + r * g_terms / h_adaptive), (h_new, h + g_terms**2)]


def _corrected(r, t, h, alpha, beta, epsilon) -> tuple[float, float]:
    """What a step of Adam is multiplied with and divided by, as algorithm 1 of the paper says."""
    return r / (1 - alpha**t), math.sqrt(h / (1 - beta**t)) + epsilon


def _one_adam(
    r,
    t,
    x,
    g,
    v,
    h,
    *,
    norm_coefficient,
    norm_coefficient_post,
    alpha,
    beta,
    epsilon,
    epsilon_after_correction=False,
) -> Numbers:
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    v_new = alpha * v + (1 - alpha) * g_regularized
    v_terms = abs(alpha * v) + (1 - alpha) * g_terms
    h_new = beta * h + (1 - beta) * g_regularized * g_regularized
    h_terms = beta * h + (1 - beta) * g_terms**2
    h_sqrt = math.sqrt(h_new) + epsilon
    r_adjusted = r
    if t > 0:
        r_adjusted = r * math.sqrt(1 - beta**t) / (1 - alpha**t)
    if epsilon_after_correction:
        r_adjusted, h_sqrt = _corrected(r, t, h_new, alpha, beta, epsilon)
    x_new = x - r_adjusted * v_new / h_sqrt
    x_terms = abs(x) + r_adjusted * v_terms / h_sqrt
    post = 1 - norm_coefficient_post
    return [(post * x_new, abs(post) * x_terms), (v_new, v_terms), (h_new, h_terms)]


def _one_momentum(r, t, x, g, v, *, norm_coefficient, alpha, beta, mode) -> Numbers:
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    beta_adjusted = beta if t > 0 else 1.0
    v_new = alpha * v + beta_adjusted * g_regularized
    v_terms = abs(alpha * v) + beta_adjusted * g_terms
    if mode == "nesterov":
        x_new = x - r * (g_regularized + alpha * v_new)
        x_terms = abs(x) + r * (g_terms + alpha * v_terms)
    else:
        x_new = x - r * v_new
        x_terms = abs(x) + r * v_terms
    return [(x_new, x_terms), (v_new, v_terms)]


def _one_sgd(r, t, x, g, *, norm_coefficient) -> Numbers:
    del t
    terms = abs(norm_coefficient * x) + abs(g)
    return [(x - r * (norm_coefficient * x + g), abs(x) + r * terms)]


def _one_adamw(
    r, t, x, g, v, h, *, alpha, beta, epsilon, weight_decay, epsilon_after_correction=False
) -> Numbers:
    v_new = alpha * v + (1 - alpha) * g
    v_terms = abs(alpha * v) + (1 - alpha) * abs(g)
    h_new = beta * h + (1 - beta) * g * g
    step = r
    if t > 0:
        step = r * math.sqrt(1 - beta**t) / (1 - alpha**t)
    divisor = math.sqrt(h_new) + epsilon
    if epsilon_after_correction:
        step, divisor = _corrected(r, t, h_new, alpha, beta, epsilon)
    x_new = x - r * weight_decay * x - step * v_new / divisor
    x_terms = abs(x) + r * weight_decay * abs(x) + step * v_terms / divisor
    return [(x_new, x_terms), (v_new, v_terms), (h_new, h_new)]


_ORACLES: dict[str, Callable[..., Numbers]] = {
    "Adagrad": _one_adagrad,
    "Adam": _one_adam,
    "AdamW": _one_adamw,
    "Momentum": _one_momentum,
    "SGD": _one_sgd,
}


def expected(
    name: str,
    r: npt.NDArray[np.generic],
    t: npt.NDArray[np.generic],
    tensors: Sequence[npt.NDArray[np.generic]],
    attributes: dict[str, float | str],
) -> list[Expected]:
    """Returns what an update gives, one entry for X_new and each new state."""
    shape, size = tensors[0].shape, tensors[0].size
    columns = [[float(number) for number in array.reshape(-1)] for array in tensors]
    outputs = len(tensors) - 1
    values = [np.zeros(size) for _ in range(outputs)]
    magnitudes = [np.zeros(size) for _ in range(outputs)]
    for index in range(size):
        row = [column[index] for column in columns]
        results = _ORACLES[name](float(r), int(t), *row, **attributes)
        for output, (value, magnitude) in enumerate(results):
            values[output][index] = value
            magnitudes[output][index] = magnitude
    return [
        Expected(value.reshape(shape), magnitude.reshape(shape))
        for value, magnitude in zip(values, magnitudes, strict=True)
    ]


def conditioning(t: int, attributes: dict[str, float | str]) -> float:
    """Returns how much 1 - alpha^T and 1 - beta^T enlarge the rounding of the power."""
    if t <= 0:
        return 0.0
    decays = [float(attributes.get(name, 0.0)) for name in ("alpha", "beta")]
    powers = [decay**t for decay in decays if decay < 1]
    return sum(power / (1 - power) for power in powers)
