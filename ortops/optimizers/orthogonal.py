"""Orthogonal steps for matrices: Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ortops.optimizers.moments import AdamW
from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    norm,
    shrunk,
)
from ortops.schedules import Schedule

__all__ = ["Muon", "muon"]

Adjustment: TypeAlias = Literal["match_rms_adamw", "original"]

_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""Of the quintic polynomial that brings singular values from 0 to 1 near 1 in a few steps."""


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
    """One Muon update of a matrix: the momentum with all its singular values brought near 1.

    With ``a, b, c = 3.4445, -4.775, 2.0315``::

        V_new = momentum · V + (1 - momentum) · G
        O     = nesterov ? momentum · V_new + (1 - momentum) · G : V_new
        O     = O / max(‖O‖, epsilon), transposed if it has more rows than columns
        O     = a · O + (b · O Oᵀ + c · (O Oᵀ)²) O                  ``steps`` times
        X_new = (1 - R · weight_decay) · X - R · s · O              O as it lay before

    where ``s`` is ``0.2 · √max(rows, columns)`` for ``"match_rms_adamw"``, which makes steps about
    as long as those of AdamW, and ``√max(1, rows / columns)`` for ``"original"``. These are
    PyTorch's formulae, computed in the dtype of ``x``; PyTorch rounds ``O`` to bfloat16.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; not looked at.
        x: Parameter, a matrix of static shape that is not empty, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        momentum: Decay of ``v``.
        nesterov: Whether the present gradient counts once more.
        weight_decay: Decay per unit of learning rate.
        steps: How often the polynomial is applied.
        adjustment: How steps are scaled by the shape.
        epsilon: The least norm that is brought to 1.

    Returns:
        ``(x_new, v_new)``, like ``x``.

    Source:
        Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; the
        scale ``"match_rms_adamw"``: Liu and others, "Muon is Scalable for LLM Training", 2025. The
        domain has no operator for it.

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
    """Returns the orthogonal matrix near one, by Newton and Schulz's iteration."""
    xp = x.__array_namespace__()
    a, b, c = _NEWTON_SCHULZ
    rows, columns = x.shape
    y = x.mT if rows > columns else x  # so that products are of the smaller size
    y = y / xp.maximum(norm(y), epsilon).astype(y.dtype)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if rows > columns else y


@dataclass(frozen=True)
class Muon(Optimizer):
    """Muon for matrices, AdamW for every other parameter; see `muon` for the formulae.

    The defaults are PyTorch's, but for ``adjustment``: here one learning rate serves both. AdamW is
    PyTorch's, too (`adamw_after_correction`). Embeddings and the last layer are matrices, which
    those who proposed Muon leave to AdamW.

    Args:
        learning_rate: R of both; finite, not negative.
        weight_decay: Decay per unit of learning rate, of both; not negative.
        momentum: Decay of the mean gradient of a matrix, in [0, 1).
        nesterov: Whether the present gradient counts once more.
        steps: How often the polynomial is applied, from 1 to 99.
        adjustment: How steps of a matrix are scaled by its shape, ``"match_rms_adamw"`` or
            ``"original"``.
        epsilon: The least norm of a matrix that is brought to 1; positive.
        beta1: AdamW's decay of the mean gradient, in [0, 1).
        beta2: AdamW's decay of the mean squared gradient, in [0, 1).
        adamw_epsilon: AdamW's epsilon; positive.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.

    Example:
        >>> optimizer = Muon()
        >>> optimizer.of((3, 2)).state_shapes((3, 2))
        {'V': (3, 2)}
        >>> optimizer.of((3,)).name
        'AdamW'
    """

    learning_rate: float | Schedule = 1e-3
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
        """Returns the optimizer of a parameter: this one for a matrix that is not empty."""
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

    @property
    def rule(self) -> UpdateRule:
        """The update rule of matrices, `muon`."""
        return muon

    def _check(self) -> None:
        self._require_decays("momentum", "beta1", "beta2")
        self._require_positive("epsilon", "adamw_epsilon")
        self._require_not_negative("weight_decay")
        is_count = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        self._require("steps", is_count and 1 <= self.steps <= 99, "an integer from 1 to 99")
        accepted = ("match_rms_adamw", "original")
        self._require("adjustment", self.adjustment in accepted, "'match_rms_adamw' or 'original'")
