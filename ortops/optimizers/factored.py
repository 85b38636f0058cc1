"""Factored second moments, kept as row and column means: Adafactor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import (
    RANGES,
    Arrays,
    Optimizer,
    Ranges,
    UpdateRule,
    arrays,
    norm,
    shrunk,
)
from ortops.schedules import LearningRate

__all__ = ["Adafactor", "adafactor", "adafactor_unfactored"]

_EPSILON = 2.0**-23  # of float32, as in PyTorch


def adafactor(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    row: Any,
    column: Any,
    *,
    beta2_decay: float = -0.8,
    epsilon1: float = _EPSILON,
    epsilon2: float = 1e-3,
    clipping_threshold: float = 1.0,
    weight_decay: float = 0.0,
    relative_step: bool = True,
    scale_parameter: bool = True,
) -> Arrays:
    """One Adafactor update of a matrix, as in PyTorch.

    Of the running mean H of the squared gradient, only the means along the last two axes are kept.
    With ``w = T^beta2_decay`` and the root mean square ``RMS``::

        ROW_new    = (1 - w) · ROW + w · mean(G², axis -1)
        COLUMN_new = (1 - w) · COLUMN + w · mean(G², axis -2)
        H          = ROW_new · COLUMN_new / max(mean(ROW_new, axis -2), epsilon1)
        U          = G / √max(H, epsilon1²)
        P          = relative_step ? min(R, 1 / √T) : R
        A          = scale_parameter ? max(epsilon2, RMS(X)) · P : P
        X_new      = (1 - R · weight_decay) · X - A · U / max(1, RMS(U) / clipping_threshold)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter of static shape and rank 2 or more, not empty, float32 or float64.
        g: Gradient, like ``x``.
        row: Means of each row, like ``x`` with a last axis of 1.
        column: Means of each column, like ``x`` with 1 in the axis before the last.
        beta2_decay: Exponent of ``t`` in the weight of a new squared gradient.
        epsilon1: Lower bound of the mean square and of the root.
        epsilon2: Lower bound of the parameter's root mean square.
        clipping_threshold: Upper bound of the update's root mean square, before the learning rate.
        weight_decay: Decay per unit of learning rate.
        relative_step: Whether to limit the learning rate to 1 / √T.
        scale_parameter: Whether to scale updates by the parameter's root mean square.

    Returns:
        ``(x_new, row_new, column_new)``, each like its old value.

    Source:
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018
        (algorithms 4 to 6), without momentum. There is no ONNX operator for it.

    Example:
        >>> x, g = np.float64([[1, 1], [1, 1]]), np.float64([[1, 2], [2, 4]])
        >>> x_new, row, column = adafactor(
        ...     np.float64(0.1), np.int64(1), x, g, np.zeros((2, 1)), np.zeros((1, 2)))
        >>> row.tolist(), column.tolist()
        ([[2.5], [10.0]], [[2.5, 10.0]])
        >>> x_new.round(4).tolist()
        [[0.9, 0.9], [0.9, 0.9]]
    """
    xp = x.__array_namespace__()
    squares = g * g
    row_new = _averaged(t, row, xp.mean(squares, axis=-1, keepdims=True), beta2_decay)
    column_new = _averaged(t, column, xp.mean(squares, axis=-2, keepdims=True), beta2_decay)
    total = xp.mean(row_new, axis=-2, keepdims=True)
    square = row_new * column_new / xp.maximum(total, epsilon1)
    options = (epsilon1, epsilon2, clipping_threshold, weight_decay)
    x_new = _stepped(r, t, x, g, square, *options, relative_step, scale_parameter)
    return arrays(x_new, row_new, column_new)


def adafactor_unfactored(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    h: Any,
    *,
    beta2_decay: float = -0.8,
    epsilon1: float = _EPSILON,
    epsilon2: float = 1e-3,
    clipping_threshold: float = 1.0,
    weight_decay: float = 0.0,
    relative_step: bool = True,
    scale_parameter: bool = True,
) -> Arrays:
    """One Adafactor update of any other parameter: `adafactor` with an unfactored mean square.

    ::

        H_new = (1 - w) · H + w · G²

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter of static shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        beta2_decay: Exponent of ``t`` in the weight of a new squared gradient.
        epsilon1: Lower bound of the root.
        epsilon2: Lower bound of the parameter's root mean square.
        clipping_threshold: Upper bound of the update's root mean square, before the learning rate.
        weight_decay: Decay per unit of learning rate.
        relative_step: Whether to limit the learning rate to 1 / √T.
        scale_parameter: Whether to scale updates by the parameter's root mean square.

    Returns:
        ``(x_new, h_new)``, like ``x``.

    Source:
        See `adafactor`.

    Example:
        >>> x, g = np.float64([3, 4]), np.float64([1, -2])
        >>> x_new, h_new = adafactor_unfactored(
        ...     np.float64(0.1), np.int64(1), x, g, np.zeros(2), scale_parameter=False)
        >>> x_new.tolist(), h_new.tolist()
        ([2.9, 4.1], [1.0, 4.0])
    """
    h_new = _averaged(t, h, g * g, beta2_decay)
    options = (epsilon1, epsilon2, clipping_threshold, weight_decay)
    return arrays(_stepped(r, t, x, g, h_new, *options, relative_step, scale_parameter), h_new)


def _root_mean_square(x: Any) -> Any:
    """Returns the root mean square, 0-d float64; 0 for an empty tensor."""
    return norm(x) / math.sqrt(max(math.prod(x.shape), 1))


def _averaged(t: Any, mean: Any, new: Any, beta2_decay: float) -> Any:
    """Returns the running mean updated with a new value, whose weight decreases with ``t``."""
    (t,) = arrays(t)  # scalars of numpy 2.0 have no __array_namespace__
    weight = t.__array_namespace__().maximum(t, 1).astype(np.float64) ** beta2_decay
    return (1.0 - weight).astype(mean.dtype) * mean + weight.astype(mean.dtype) * new


def _stepped(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    square: Any,
    epsilon1: float,
    epsilon2: float,
    clipping_threshold: float,
    weight_decay: float,
    relative_step: bool,
    scale_parameter: bool,
) -> Any:
    """Returns the updated parameter, given the running mean of its squared gradient."""
    xp = x.__array_namespace__()
    step = g / xp.sqrt(xp.maximum(square, epsilon1 * epsilon1))
    rate = r.astype(np.float64)
    if relative_step:
        rate = xp.minimum(rate, 1.0 / xp.sqrt(xp.maximum(t, 1).astype(np.float64)))
    if scale_parameter:
        rate = rate * xp.maximum(_root_mean_square(x), epsilon2)
    rate = rate / xp.maximum(_root_mean_square(step) / clipping_threshold, 1.0)
    return shrunk(r, x, weight_decay) - rate.astype(x.dtype) * step


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor as in PyTorch; see `adafactor` for the formulae. T is 1 in the first update.

    For parameters of rank 2 or more it keeps row and column means of the squared gradients
    (`adafactor`), for others the squared gradients themselves (`adafactor_unfactored`). Without
    ``relative_step`` and ``scale_parameter`` the learning rate is absolute, as in other optimizers.

    Args:
        learning_rate: Learning rate (R), the upper bound with ``relative_step``; finite,
            non-negative.
        beta2_decay: Exponent of T in the weight of a new squared gradient; non-positive.
        epsilon1: Lower bound of the mean square and of the root; in [2⁻⁶³, 2⁶³).
        epsilon2: Lower bound of the parameter's root mean square; positive.
        clipping_threshold: Upper bound of the update's root mean square, before the learning rate;
            positive (PyTorch's ``d``).
        weight_decay: Decay per unit of learning rate; non-negative.
        relative_step: Whether to limit the learning rate to 1 / √T.
        scale_parameter: Whether to scale updates by the parameter's root mean square.
        factored: Whether to factor the second moments of parameters of rank 2 or more.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> optimizer = Adafactor()
        >>> optimizer.of((5, 3, 2)).state_shapes((5, 3, 2))
        {'ROW': (5, 3, 1), 'COLUMN': (5, 1, 2)}
        >>> optimizer.of((3,)).state_shapes((3,))
        {'H': (3,)}
    """

    learning_rate: LearningRate = 0.01
    beta2_decay: float = -0.8
    epsilon1: float = _EPSILON
    epsilon2: float = 1e-3
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    relative_step: bool = True
    scale_parameter: bool = True
    factored: bool = True

    first_step: ClassVar[int] = 1
    ranges: ClassVar[Ranges] = RANGES | {
        "beta2_decay": {"maximum": 0},
        "epsilon1": {"minimum": 2.0**-63, "below": 2.0**63},  # its square must be a float32, too
        "epsilon2": {"above": 0},
        "clipping_threshold": {"above": 0},
    }

    def of(self, shape: Sequence[int]) -> Adafactor:
        """Returns the optimizer for a parameter: unfactored for vectors and empty tensors."""
        return self if len(shape) > 1 and 0 not in shape else replace(self, factored=False)

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor of a parameter with the given shape."""
        if not self.factored:
            return super().state_shapes(shape)
        *outer, rows, columns = shape
        return {"ROW": (*outer, rows, 1), "COLUMN": (*outer, 1, columns)}

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adafactor` or `adafactor_unfactored`."""
        return adafactor if self.factored else adafactor_unfactored
