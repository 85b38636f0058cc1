"""Orthogonalized updates for matrices: Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from ortops._common.arguments import choice, whole_number
from ortops.optimizers.moments import AdamW
from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    norm,
    shrunk,
)
from ortops.schedules import LearningRate

__all__ = ["Muon", "muon"]

Adjustment: TypeAlias = Literal["match_rms_adamw", "original"]

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Coefficients of the quintic polynomial that moves singular values in (0, 1] close to 1."""


def muon(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    steps: int = 5,
    adjustment: Adjustment = "match_rms_adamw",
    epsilon: float = 1e-7,
) -> Arrays:
    """One Muon update of a matrix: the momentum with all singular values close to 1.

    With ``a, b, c = 3.4445, -4.775, 2.0315``::

        V_new = momentum · V + (1 - momentum) · G
        O     = nesterov ? momentum · V_new + (1 - momentum) · G : V_new
        O     = O / max(‖O‖, epsilon), transposed if it has more rows than columns
        O     = a · O + (b · O Oᵀ + c · (O Oᵀ)²) O                  ``steps`` times
        X_new = (1 - R · weight_decay) · X - R · s · O              O transposed back

    where ``s`` is ``0.2 · √max(rows, columns)`` for ``"match_rms_adamw"``, which gives updates
    about the same size as AdamW's, and ``√max(1, rows / columns)`` for ``"original"``. These are
    PyTorch's formulae, computed in the dtype of ``x``; PyTorch rounds ``O`` to bfloat16.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; ignored.
        x: Parameter, a matrix of static shape that is not empty, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        momentum: Decay of ``v``.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decay per unit of learning rate.
        steps: Number of Newton-Schulz iterations.
        adjustment: How updates are scaled according to the shape.
        epsilon: Lower bound of the norm that ``O`` is divided by.

    Returns:
        ``(x_new, v_new)``, like ``x``.

    Source:
        Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; the
        scale ``"match_rms_adamw"``: Liu and others, "Muon is Scalable for LLM Training", 2025.
        There is no ONNX operator for it.

    Example:
        >>> x, g = np.zeros((2, 2)), np.float64([[0, 3], [-2, 0]])
        >>> x_new, _ = muon(np.float64(1), np.int64(0), x, g, x, steps=20, adjustment="original")
        >>> np.sign(x_new).tolist(), bool((abs(np.linalg.norm(x_new, axis=1) - 1) < 0.35).all())
        ([[0.0, -1.0], [1.0, 0.0]], True)
    """
    v_new = momentum * v + (1.0 - momentum) * g
    direction = momentum * v_new + (1.0 - momentum) * g if nesterov else v_new
    rows, columns = x.shape
    scale = math.sqrt(max(1.0, rows / columns))
    if adjustment == "match_rms_adamw":
        scale = 0.2 * math.sqrt(max(rows, columns))
    rate = (r.astype(np.float64) * scale).astype(x.dtype)
    step = _orthogonalized(direction, steps, epsilon)
    return arrays(shrunk(r, x, weight_decay) - rate * step, v_new)


def _orthogonalized(x: Any, steps: int, epsilon: float) -> Any:
    """Returns the nearest (semi-)orthogonal matrix, approximated by Newton-Schulz iterations."""
    xp = x.__array_namespace__()
    a, b, c = _NEWTON_SCHULZ
    rows, columns = x.shape
    y = x.mT if rows > columns else x  # makes the Gram matrix the smaller one
    y = y / xp.maximum(norm(y), epsilon).astype(y.dtype)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if rows > columns else y


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for matrices, AdamW for all other parameters; see `muon` for the formulae.

    The defaults are PyTorch's, except for ``adjustment``, so that one learning rate suits both.
    AdamW is PyTorch's, too (`adamw_after_correction`). The authors of Muon recommend AdamW for
    embeddings and the last layer, which are matrices, too.

    Args:
        learning_rate: Learning rate (R) of both; finite, non-negative.
        weight_decay: Decay per unit of learning rate, of both; non-negative.
        momentum: Decay of the mean gradient of a matrix, in [0, 1).
        nesterov: Whether to use Nesterov momentum.
        steps: Number of Newton-Schulz iterations, 1 to 99.
        adjustment: How the update of a matrix is scaled according to its shape,
            ``"match_rms_adamw"`` or ``"original"``.
        epsilon: Lower bound of the norm that the momentum is divided by; positive.
        beta1: AdamW's decay of the mean gradient, in [0, 1).
        beta2: AdamW's decay of the mean squared gradient, in [0, 1).
        adamw_epsilon: AdamW's epsilon; positive.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> optimizer = Muon()
        >>> optimizer.of((3, 2)).state_shapes((3, 2))
        {'V': (3, 2)}
        >>> optimizer.of((3,)).name
        'AdamW'
    """

    learning_rate: LearningRate = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    adjustment: Adjustment = "match_rms_adamw"
    epsilon: float = 1e-7
    beta1: float = 0.9
    beta2: float = 0.999
    adamw_epsilon: float = 1e-8

    first_step: ClassVar[int] = 1

    def of(self, shape: Sequence[int]) -> Optimizer:
        """Returns the optimizer for a parameter: this one for non-empty matrices, else AdamW."""
        if len(shape) == 2 and 0 not in shape:
            return self
        return AdamW(
            self.learning_rate,
            alpha=self.beta1,
            beta=self.beta2,
            epsilon=self.adamw_epsilon,
            weight_decay=self.weight_decay,
            epsilon_after_correction=True,
        )

    _rule: ClassVar[UpdateRule] = muon

    def _check(self) -> None:
        object.__setattr__(self, "steps", whole_number(self._shown("steps"), self.steps, 1, 99))
        choice(self._shown("adjustment"), self.adjustment, get_args(Adjustment))
