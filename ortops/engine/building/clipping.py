"""Gradient clipping, between the Gradient node and the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortops._common.arguments import number
from ortops.graph.tensor import Tensor, op
from ortops.optimizers.optimizer import as_float32

_EPSILON = 1e-6


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping by value and by global norm.

    Attributes:
        norm: The maximum norm of all gradients together. As in ``torch.nn.utils.clip_grad_norm_``,
            gradients become ``g · min(1, norm / (‖g‖ + 1e-6))``. Source: Pascanu, Mikolov and
            Bengio, "On the difficulty of training recurrent neural networks", 2013, section 3.2.
        value: The maximum absolute value of an element. It is applied before the norm is computed.

    Raises:
        ArgumentError: If one is not a finite number > 0, in float32 as well.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Raises an ArgumentError if a number is out of range."""
        for name, given in (("clip_norm", self.norm), ("clip_value", self.value)):
            if given is not None:
                value = as_float32(number(name, given, above=0))
                number(f"{name}={given!r:.80} in float32", value, above=0)

    def __str__(self) -> str:
        given = (("clip_value", self.value), ("clip_norm", self.norm))
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None)

    def emit(
        self, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        """Emits the clipped gradients.

        Args:
            gradients: All gradients, in float32 or float64.
            scale: The factor to multiply them by first, 0-d; None for 1.

        Returns:
            The gradients, the factor that each of them has yet to be multiplied by, 0-d (None for
            1), and the norm of all of them times ``scale``, 0-d; None if it is not limited.
        """
        result, norm = list(gradients), None
        if self.value is not None:
            result = [_clipped(times(gradient, scale), self.value) for gradient in result]
            scale = None
        if self.norm is not None:
            # In float64, large squares do not overflow, and the order of summands hardly matters.
            squares = [op.ReduceSumSquare(g.astype(np.float64), keepdims=0) for g in result]
            # One sum of a stack, because a chain of sums would be as deep as there are gradients.
            total = op.ReduceSum(squares[0].__array_namespace__().stack(squares), keepdims=0)
            norm = op.Sqrt(total)
            if scale is not None:
                norm = norm * scale.astype(np.float64)
            factor = op.Min(float(self.norm) / (norm + _EPSILON), np.float64(1.0))
            scale = factor if scale is None else factor * scale.astype(np.float64)
        return result, scale, norm


def _clipped(gradient: Tensor, value: float) -> Tensor:
    maximum = np.asarray(value, gradient.dtype)
    clipped: Tensor = op.Clip(gradient, -maximum, maximum)
    return clipped


def times(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Returns a gradient times a scalar, in the type of the gradient."""
    return gradient if scale is None else gradient * scale.astype(gradient.dtype)
