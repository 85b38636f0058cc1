"""Mean squares of matrices kept as a row and a column: Adafactor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    norm,
    shrunk,
)
from ortops.schedules import Schedule

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
    """One Adafactor update of matrices, as PyTorch makes it.

    The running mean H of the squared gradient is known by its means along the last two axes only.
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
        beta2_decay: Power of ``t`` that a new square is weighted with.
        epsilon1: The least mean of a matrix, and the least root.
        epsilon2: The least root mean square of the parameter.
        clipping_threshold: The largest root mean square of the step before the learning rate.
        weight_decay: Decay per unit of learning rate.
        relative_step: Whether the learning rate is at most 1 / √T.
        scale_parameter: Whether steps are in proportion to the parameter.

    Returns:
        ``(x_new, row_new, column_new)``, like their old values.

    Source:
        Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018
        (algorithms 4 to 6), without momentum. The domain has no operator for it.

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
    """One Adafactor update of anything else: `adafactor`, but the mean square is kept as it is.

    ::

        H_new = (1 - w) · H + w · G²

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter of static shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        beta2_decay: See `adafactor`, as for all that follow.
        epsilon1: The least root.
        epsilon2: The least root mean square of the parameter.
        clipping_threshold: The largest root mean square of the step before the learning rate.
        weight_decay: Decay per unit of learning rate.
        relative_step: Whether the learning rate is at most 1 / √T.
        scale_parameter: Whether steps are in proportion to the parameter.

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
    """Returns the root of the mean of squares, 0-d float64; 0 where there are none."""
    return norm(x) / math.sqrt(max(math.prod(x.shape), 1))


def _averaged(t: Any, mean: Any, new: Any, beta2_decay: float) -> Any:
    """Returns the running mean with a new value, which weighs less and less."""
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
    """Returns the next value of a parameter by the mean square of its gradient."""
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

    Parameters of rank 2 and more keep the squares of their gradients as means of rows and columns
    (`adafactor`), others as they are (`adafactor_unfactored`). Without ``relative_step`` and
    ``scale_parameter`` the learning rate is a given one, as for other optimizers.

    Args:
        learning_rate: R, with ``relative_step`` the largest rate; finite, not negative.
        beta2_decay: Power of T that a new square is weighted with; not positive.
        epsilon1: The least mean of a matrix, and the least root; positive, and its square too.
        epsilon2: The least root mean square of a parameter; positive.
        clipping_threshold: The largest root mean square of a step before the learning rate;
            positive (PyTorch's ``d``).
        weight_decay: Decay per unit of learning rate; not negative.
        relative_step: Whether the learning rate is at most 1 / √T.
        scale_parameter: Whether steps are in proportion to the root mean square of the parameter.
        factored: Whether parameters of rank 2 and more are factored.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.

    Example:
        >>> optimizer = Adafactor()
        >>> optimizer.of((5, 3, 2)).state_shapes((5, 3, 2))
        {'ROW': (5, 3, 1), 'COLUMN': (5, 1, 2)}
        >>> optimizer.of((3,)).state_shapes((3,))
        {'H': (3,)}
    """

    learning_rate: float | Schedule = 0.01
    beta2_decay: float = -0.8
    epsilon1: float = _EPSILON
    epsilon2: float = 1e-3
    clipping_threshold: float = 1.0
    weight_decay: float = 0.0
    relative_step: bool = True
    scale_parameter: bool = True
    factored: bool = True

    first_step: ClassVar[int] = 1

    def of(self, shape: Sequence[int]) -> Adafactor:
        """Returns the optimizer of a parameter: one that is not factored if it is no matrix.

        Nor is one that is empty.
        """
        return self if len(shape) > 1 and 0 not in shape else replace(self, factored=False)

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor of a parameter of that shape."""
        if not self.factored:
            return super().state_shapes(shape)
        *outer, rows, columns = shape
        return {"ROW": (*outer, rows, 1), "COLUMN": (*outer, 1, columns)}

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adafactor` or `adafactor_unfactored`."""
        return adafactor if self.factored else adafactor_unfactored

    def _check(self) -> None:
        self._require("beta2_decay", self.beta2_decay <= 0, "a number <= 0")
        self._require_float32("epsilon1", 2.0**-63, 2.0**63, "a number in [2^-63, 2^63)")
        self._require_positive("epsilon2", "clipping_threshold")
        self._require_not_negative("weight_decay")
