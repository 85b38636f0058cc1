"""Layer-wise adaptive learning rates: LAMB."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    norm,
)
from ortops.schedules import LearningRate

__all__ = ["LAMB", "lamb"]


def lamb(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-6,
    weight_decay: float = 0.0,
) -> Arrays:
    """One LAMB update: Adam's direction, scaled by the norm of the parameter.

    ::

        V_new = beta1 · V + (1 - beta1) · G
        H_new = beta2 · H + (1 - beta2) · G²
        S     = V_new / (1 - beta1^T) / (√(H_new / (1 - beta2^T)) + epsilon) + weight_decay · X
        X_new = X - R · ‖X‖ / ‖S‖ · S                X - R · S if ‖X‖ or ‖S‖ is 0

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        beta1: Decay of ``v``.
        beta2: Decay of ``h``.
        epsilon: Added to the bias-corrected root for numerical stability.
        weight_decay: Weight of the parameter in the direction (decoupled weight decay).

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        You and others, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes",
        2020 (algorithm 2), as in optax. There is no ONNX operator for it.

    Example:
        >>> x, g, zero = np.float64([3, 4]), np.float64([1, -1]), np.zeros(2)
        >>> x_new, *_ = lamb(np.float64(0.2), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # moves by 0.2 · ‖x‖, that is 1
        [2.2929, 4.7071]
    """
    xp = x.__array_namespace__()
    count = xp.maximum(t, 1).astype(np.float64)
    root = xp.sqrt(1.0 - beta2**count)
    v_new = beta1 * v + (1.0 - beta1) * g
    h_new = beta2 * h + (1.0 - beta2) * g * g
    scale, floor = (root / (1.0 - beta1**count)).astype(x.dtype), (epsilon * root).astype(x.dtype)
    step = scale * v_new / (xp.sqrt(h_new) + floor)
    if weight_decay:
        step = step + weight_decay * x
    length, step_length = norm(x), norm(step)
    moves = xp.logical_and(length > 0.0, step_length > 0.0)
    trust = xp.where(moves, length / xp.where(moves, step_length, 1.0), 1.0)
    return arrays(x - (r.astype(np.float64) * trust).astype(x.dtype) * step, v_new, h_new)


@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB as in optax; see `lamb` for the formulae. T is 1 in the first update.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        beta1: Decay of the mean gradient, in [0, 1).
        beta2: Decay of the mean squared gradient, in [0, 1).
        epsilon: Added to the corrected root; positive.
        weight_decay: Weight of the parameter in the direction; non-negative.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> optimizer = LAMB(weight_decay=0.0)
        >>> x_new, *_ = optimizer.update(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · |1| / |1| · 1
        [0.9]
    """

    learning_rate: LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = lamb
