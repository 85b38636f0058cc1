"""Prodigy: Adam that estimates its learning rate from how far the parameters have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import RANGES, Arrays, Optimizer, Ranges, UpdateRule, arrays
from ortops.schedules import LearningRate

__all__ = ["Prodigy", "prodigy"]


def prodigy(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    s: Any,
    p: Any,
    n: Any,
    d: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    start: float = 1e-6,
    coefficient: float = 1.0,
    bias_correction: bool = False,
    safeguard_warmup: bool = False,
    sums: tuple[Any, Any] | None = None,
) -> Arrays:
    """One Prodigy update.

    With ``beta3 = √beta2`` and the estimated distance to the solution, ``E = max(D, start)``, which
    is the same for all parameters::

        R'    = E · R          (with bias_correction times √(1 - beta2^T) / (1 - beta1^T))
        S_new = beta3 · S + E / start · R' · G       (with safeguard_warmup E / start · E · G)
        N_new = beta3 · N + sum(E / start · R' · G · (P - X))
        D_new = max(E, coefficient · N_new / sum(|S_new|))
        V_new = beta1 · V + (1 - beta1) · E · G
        H_new = beta2 · H + (1 - beta2) · E² · G²
        X_new = (1 - R' · weight_decay) · X - R' · V_new / (√H_new + D_new · epsilon)

    The two sums are over all parameters that are trained together.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        s: Running sum of gradients, like ``x``.
        p: First value of the parameter, like ``x``.
        n: Numerator of the estimate, 0-d of the type of ``x``.
        d: Estimated distance, 0-d of the type of ``x``; 0 before the first update.
        beta1: Decay of ``v``.
        beta2: Decay of ``h``; its root is that of ``s`` and ``n``.
        epsilon: Added to the root, times the estimate.
        weight_decay: Decay per unit of learning rate, decoupled from the gradient.
        start: First estimate (``d0`` of the authors).
        coefficient: Factor of the estimate (``d_coef``).
        bias_correction: Whether the step is corrected as that of Adam.
        safeguard_warmup: Whether ``s`` leaves out the learning rate, as a long warmup needs it.
        sums: The two sums; by default those of this parameter alone (see `Prodigy.summands`).

    Returns:
        ``(x_new, v_new, h_new, s_new, p, n_new, d_new)``, each like the argument.

    Source:
        Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", 2024
        (algorithm 4), as in the authors' package ``prodigyopt``. There is no ONNX operator for it.

    Example:
        >>> x, g, zero = np.float64([1, 2]), np.float64([3, -4]), np.float64(0)
        >>> x_new, *_, d_new = prodigy(
        ...     np.float64(1), np.int64(1), x, g, 0 * x, 0 * x, 0 * x, x, zero, zero, start=0.01)
        >>> (x - x_new).round(4).tolist(), d_new.item()  # 0.1 / √0.001 times 0.01
        ([0.0316, -0.0316], 0.01)
    """
    x, n, d = arrays(x, n, d)
    xp = x.__array_namespace__()
    settings = (beta1, beta2, start, bias_correction, safeguard_warmup)
    distance, rate, s_new = _measured(r, t, x, g, s, d, *settings)
    numerator, denominator = sums or _summands(x, g, p, s_new, distance, rate, start)
    total = math.sqrt(beta2) * n.astype(np.float64) + numerator
    positive = denominator > 0.0
    estimate = coefficient * total / xp.where(positive, denominator, 1.0)
    d_new = xp.where(positive, xp.maximum(distance, estimate), distance)
    v_new = beta1 * v + ((1.0 - beta1) * distance).astype(x.dtype) * g
    h_new = beta2 * h + ((1.0 - beta2) * distance * distance).astype(x.dtype) * g * g
    divisor = xp.sqrt(h_new) + (d_new * epsilon).astype(x.dtype)
    if weight_decay:
        x = arrays((1.0 - rate * weight_decay).astype(x.dtype) * x)[0]
    x_new = x - rate.astype(x.dtype) * v_new / divisor
    scalars = total.astype(x.dtype), d_new.astype(x.dtype)
    return arrays(x_new, v_new, h_new, s_new, p, *scalars)


def _measured(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    s: Any,
    d: Any,
    beta1: float,
    beta2: float,
    start: float,
    bias_correction: bool,
    safeguard_warmup: bool,
) -> tuple[Any, Any, Any]:
    """Returns the present estimate, the learning rate of the step, and the sum of gradients."""
    xp = x.__array_namespace__()
    distance = xp.maximum(d.astype(np.float64), start)
    rate = distance * r.astype(np.float64)
    if bias_correction:
        count = xp.maximum(t, 1).astype(np.float64)
        rate = rate * xp.sqrt(1.0 - beta2**count) / (1.0 - beta1**count)
    share = distance / start * (distance if safeguard_warmup else rate)
    return distance, rate, math.sqrt(beta2) * s + share.astype(x.dtype) * g


def _summands(
    x: Any, g: Any, p: Any, s_new: Any, distance: Any, rate: Any, start: float
) -> tuple[Any, Any]:
    """Returns the parts of the two sums that a parameter has, 0-d float64."""
    xp = x.__array_namespace__()
    (moved, size) = arrays(g * (p - x), xp.abs(s_new))
    along = xp.sum(moved).astype(np.float64)
    return distance / start * rate * along, xp.sum(size).astype(np.float64)


@dataclass(frozen=True)
class Prodigy(Optimizer):
    """Prodigy; see `prodigy` for the formulae. T is 1 in the first update.

    It estimates the learning rate; the given one is a factor of the estimate, usually 1. The
    estimate is one for all parameters, so all groups must have the same learning rate. A cosine
    schedule is recommended.

    Args:
        learning_rate: Factor of the estimated learning rate (R); finite, non-negative.
        beta1: Decay of the mean gradient, in [0, 1).
        beta2: Decay of the mean squared gradient, in [0, 1).
        epsilon: Added to the root, times the estimate; positive.
        weight_decay: Decay per unit of learning rate; non-negative.
        start: First estimate; positive (``d0`` of the authors).
        coefficient: Factor of the estimate; positive (``d_coef``).
        bias_correction: Whether the step is corrected as that of Adam.
        safeguard_warmup: Whether the estimate leaves out the learning rate in its denominator, as
            a long warmup needs it.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> Prodigy().state_shapes((3, 2))
        {'V': (3, 2), 'H': (3, 2), 'S': (3, 2), 'P': (3, 2), 'N': (), 'D': ()}
    """

    learning_rate: LearningRate = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    start: float = 1e-6
    coefficient: float = 1.0
    bias_correction: bool = False
    safeguard_warmup: bool = False

    first_step: ClassVar[int] = 1
    copies: ClassVar[tuple[str, ...]] = ("P",)
    is_shared: ClassVar[bool] = True
    sums: ClassVar[None] = None
    ranges: ClassVar[Ranges] = {**RANGES, "start": {"above": 0}, "coefficient": {"above": 0}}
    _rule: ClassVar[UpdateRule] = prodigy

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor: numerator and estimate are scalars."""
        own = tuple(shape)
        return {"V": own, "H": own, "S": own, "P": own, "N": (), "D": ()}

    def summands(self, r: Any, t: Any, x: Any, g: Any, *state: Any) -> tuple[Any, Any]:
        """Returns the parts of the two sums that a parameter has."""
        _, _, s, p, _, d = state
        own = self.attributes
        names = ("beta1", "beta2", "start", "bias_correction", "safeguard_warmup")
        distance, rate, s_new = _measured(r, t, x, g, s, d, *(own[name] for name in names))
        return _summands(x, g, p, s_new, distance, rate, own["start"])
