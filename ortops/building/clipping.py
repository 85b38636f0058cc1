"""Gradients between the Gradient node and the updates: unscaled, and clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortops.errors import ModelError
from ortops.graph.tensor import Tensor, op
from ortops.numbers import real

__all__ = ["Clipping", "times"]

_EPSILON = 1e-6


@dataclass(frozen=True)
class Clipping:
    """How gradients are kept from being large.

    Attributes:
        norm: The largest norm of all gradients together; they are scaled down to it. The formula is
            that of ``torch.nn.utils.clip_grad_norm_``: ``g · min(1, norm / (‖g‖ + 1e-6))``, after
            Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks",
            2013, section 3.2.
        value: The largest magnitude of an element; before the norm is taken.

    Raises:
        ModelError: If one is no finite number > 0, also when only its float32 value is not.
    """

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Refuses what is out of range."""
        for name, given in (("clip_norm", self.norm), ("clip_value", self.value)):
            if given is not None and not _is_positive(given):
                raise ModelError(f"{name} is {given!r}; a finite number > 0 is accepted")

    def __str__(self) -> str:
        given = (("clip_value", self.value), ("clip_norm", self.norm))
        return ", ".join(f"{name}={value!r}" for name, value in given if value is not None)

    def emit(
        self, gradients: Sequence[Tensor], scale: Tensor | None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Emits the clipped gradients.

        Args:
            gradients: All gradients, in float32 or float64.
            scale: What they are to be multiplied by first, 0-d; None for 1.

        Returns:
            Gradients, and what each is still to be multiplied by, 0-d; None for 1.
        """
        result = list(gradients)
        if self.value is not None:
            result = [self._clipped(times(gradient, scale)) for gradient in result]
            scale = None
        if self.norm is not None:
            # In float64, in which neither large squares nor the order of summands count.
            squares = [op.ReduceSumSquare(g.astype(np.float64), keepdims=0) for g in result]
            # A stack: what reads a chain of sums would have to go through all of it.
            total = op.ReduceSum(squares[0].__array_namespace__().stack(squares), keepdims=0)
            norm = op.Sqrt(total)
            if scale is not None:
                norm = norm * scale.astype(np.float64)
            factor = op.Min(float(self.norm) / (norm + _EPSILON), np.float64(1.0))
            scale = factor if scale is None else factor * scale.astype(np.float64)
        return result, scale

    def _clipped(self, gradient: Tensor) -> Tensor:
        assert self.value is not None
        most = np.asarray(self.value, gradient.dtype)
        clipped: Tensor = op.Clip(gradient, -most, most)
        return clipped


def times(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Returns a gradient times a scalar, in its own type."""
    return gradient if scale is None else gradient * scale.astype(gradient.dtype)


def _is_positive(value: object) -> bool:
    with np.errstate(over="ignore", under="ignore"):
        return bool(0 < np.float32(real(value)) < np.inf)
