"""Updates by the sign of the momentum: Lion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    shrunk,
)
from ortops.schedules import LearningRate

__all__ = ["Lion", "lion"]


def lion(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 1e-3,
) -> Arrays:
    """One Lion update: every element changes by plus or minus the learning rate.

    ::

        X_new = (1 - R · weight_decay) · X - R · sign(beta1 · V + (1 - beta1) · G)
        V_new = beta2 · V + (1 - beta2) · G

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; ignored.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Momentum, like ``x``.
        beta1: Weight of the momentum in the update; the gradient has ``1 - beta1``.
        beta2: Decay of the momentum.
        weight_decay: Decay per unit of learning rate.

    Returns:
        ``(x_new, v_new)``, like ``x``.

    Source:
        Chen and others, "Symbolic Discovery of Optimization Algorithms", 2023 (algorithm 2), as in
        optax. There is no ONNX operator for it.

    Example:
        >>> import numpy as np
        >>> x, g, v = np.float64([[1, 1], [2, -2], [-1, 0]])
        >>> x_new, v_new = lion(np.float64(0.5), np.int64(0), x, g, v, beta1=0.5, weight_decay=0.0)
        >>> x_new.tolist(), v_new.round(2).tolist()
        ([0.5, 1.5], [-0.97, -0.02])
    """
    xp = x.__array_namespace__()
    direction = xp.sign(beta1 * v + (1.0 - beta1) * g)
    v_new = beta2 * v + (1.0 - beta2) * g
    return arrays(shrunk(r, x, weight_decay) - r.astype(x.dtype) * direction, v_new)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion as in optax; see `lion` for the formulae.

    Every element moves by the learning rate. Use one 3 to 10 times smaller than for AdamW, and a
    ``weight_decay`` larger by the same factor.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        beta1: Weight of the momentum in the update, in [0, 1).
        beta2: Decay of the momentum, in [0, 1).
        weight_decay: Decay per unit of learning rate; non-negative.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> import numpy as np
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = Lion(weight_decay=0.0).update(np.float64(0.1), np.int64(0), x, g, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · sign(0.5)
        [0.9]
    """

    learning_rate: LearningRate = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 1e-3

    _rule: ClassVar[UpdateRule] = lion
