"""Schedule-free AdamW: an average of iterates in place of a learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import RANGES, Arrays, Optimizer, Ranges, UpdateRule, arrays
from ortops.schedules import LearningRate

__all__ = ["ScheduleFreeAdamW", "schedule_free_adamw"]


def schedule_free_adamw(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    z: Any,
    a: Any,
    h: Any,
    w: Any,
    m: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    count_power: float = 0.0,
    rate_power: float = 2.0,
) -> Arrays:
    """One update of schedule-free AdamW.

    The gradient is taken at ``X``, which is between the iterate ``Z`` and its average ``A``; the
    trained model is ``A``. ``Z`` and ``A`` start as the parameter::

        M_new = max(M, R)
        c     = T^count_power · M_new^rate_power
        W_new = W + c
        H_new = beta2 · H + (1 - beta2) · G²
        D     = G / (√(H_new / (1 - beta2^T)) + epsilon) + weight_decay · X
        Z_new = Z - R · D
        A_new = A + c / W_new · (Z_new - A)
        X_new = Z_new + beta1 · (A_new - Z_new)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64 (y in the paper).
        g: Gradient, like ``x``.
        z: Iterate, like ``x``.
        a: Average of the iterates, like ``x`` (x in the paper).
        h: Running mean of the squared gradient, like ``x``.
        w: Sum of the weights of the average, 0-d of the type of ``x``.
        m: Largest learning rate, 0-d of the type of ``x``.
        beta1: How near to the average gradients are taken.
        beta2: Decay of ``h``.
        epsilon: Added to the bias-corrected root for numerical stability.
        weight_decay: Decay per unit of learning rate, of ``x``.
        count_power: Power of the update count in the weight of an iterate.
        rate_power: Power of the largest learning rate in the weight of an iterate.

    Returns:
        ``(x_new, z_new, a_new, h_new, w_new, m_new)``, each like the argument.

    Source:
        Defazio, Yang, Mehta, Mishchenko, Khaled and Cutkosky, "The Road Less Scheduled", 2024
        (algorithm 1), with the weights of the authors' package ``schedulefree``. There is no ONNX
        operator for it.

    Example:
        >>> x, g, zero = np.float64([1, 2]), np.float64([3, -4]), np.float64(0)
        >>> x_new, z_new, a_new, *_ = schedule_free_adamw(
        ...     np.float64(0.1), np.int64(1), x, g, x, x, 0 * x, zero, zero)
        >>> x_new.round(4).tolist()  # the first average is the first iterate
        [0.9, 2.1]
    """
    x, w, m = arrays(x, w, m)
    xp = x.__array_namespace__()
    rate = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)
    largest = xp.maximum(m.astype(np.float64), rate)
    weight = largest**rate_power
    if count_power:
        weight = weight * count**count_power
    total = w.astype(np.float64) + weight
    share = (xp.where(total > 0.0, weight, 1.0) / xp.where(total > 0.0, total, 1.0)).astype(x.dtype)
    h_new = beta2 * h + (1.0 - beta2) * g * g
    root = xp.sqrt(1.0 - beta2**count)
    # g / (√h / root + epsilon), with one division of tensors
    step = root.astype(x.dtype) * g / (xp.sqrt(h_new) + (epsilon * root).astype(x.dtype))
    if weight_decay:
        step = step + weight_decay * x
    z_new = z - rate.astype(x.dtype) * step
    a_new = a + share * (z_new - a)
    x_new = z_new + beta1 * (a_new - z_new)
    return arrays(x_new, z_new, a_new, h_new, total.astype(x.dtype), largest.astype(x.dtype))


@dataclass(frozen=True)
class ScheduleFreeAdamW(Optimizer):
    """Schedule-free AdamW; see `schedule_free_adamw` for the formulae. T is 1 in the first update.

    The learning rate stays constant, after a warmup if a schedule has one, and training may end at
    any step. The trained weights are the averages, as those of ``ema_decay=``: evaluate and export
    them with ``ema=True``. Without it, the weights are those at which gradients are taken.

    BatchNormalization: running statistics are those of the weights at which gradients are taken.

    Args:
        learning_rate: Learning rate (R); finite, non-negative. Good rates are 1 to 10 times those
            of AdamW.
        beta1: How near to the average gradients are taken, in [0, 1).
        beta2: Decay of the mean squared gradient, in [0, 1).
        epsilon: Added to the corrected root; positive.
        weight_decay: Decay per unit of learning rate; non-negative.
        count_power: Power of the update count in the weight of an iterate; non-negative (``r`` of
            the package ``schedulefree``).
        rate_power: Power of the largest learning rate in the weight of an iterate; non-negative
            (``weight_lr_power`` of the package).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> optimizer = ScheduleFreeAdamW()
        >>> optimizer.state_shapes((3, 2))
        {'Z': (3, 2), 'A': (3, 2), 'H': (3, 2), 'W': (), 'M': ()}
        >>> optimizer.copies, optimizer.average
        (('Z', 'A'), 'A')
    """

    learning_rate: LearningRate = 2.5e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    count_power: float = 0.0
    rate_power: float = 2.0

    first_step: ClassVar[int] = 1
    copies: ClassVar[tuple[str, ...]] = ("Z", "A")
    average: ClassVar[str] = "A"
    ranges: ClassVar[Ranges] = {
        **RANGES,
        "count_power": {"minimum": 0},
        "rate_power": {"minimum": 0},
    }
    _rule: ClassVar[UpdateRule] = schedule_free_adamw

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor: the weights of the average are scalars."""
        own = tuple(shape)
        return {"Z": own, "A": own, "H": own, "W": (), "M": ()}
