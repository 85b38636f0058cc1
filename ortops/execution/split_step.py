"""The two halves of a step: gradients, and what applies them, on the memory of the variables."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.execution.cut import Cut
from ortops.execution.memory import Memory
from ortops.execution.shape_cache import ShapeCache

__all__ = ["Differentiated", "Layout", "SplitStep"]

Array: TypeAlias = npt.NDArray[Any]

_ALIGNMENT = 16  # elements


class Layout:
    """Where gradients lie: side by side, those of a type in one array, zeros between them.

    Args:
        parameters: The parameters. Gradients of those of 16 bits are float32.
    """

    def __init__(self, parameters: Mapping[str, Memory]) -> None:
        self._places: dict[str, tuple[np.dtype[Any], int, tuple[int, ...]]] = {}
        self._sizes: dict[np.dtype[Any], int] = {}
        for name, memory in parameters.items():
            dtype = np.dtype(np.float32) if memory.dtype.itemsize == 2 else memory.dtype
            begin = self._sizes.get(dtype, 0)
            self._places[name] = dtype, begin, memory.shape
            self._sizes[dtype] = begin + -(-memory.size // _ALIGNMENT) * _ALIGNMENT

    def zeros(self) -> tuple[list[Array], dict[str, Array]]:
        """Returns new arrays, one for each type, and the gradients that are views of them."""
        flat = {dtype: np.zeros(size, dtype) for dtype, size in self._sizes.items()}
        return list(flat.values()), {
            name: flat[dtype][begin : begin + math.prod(shape)].reshape(shape)
            for name, (dtype, begin, shape) in self._places.items()
        }

    @property
    def names(self) -> Collection[str]:
        """The parameters."""
        return self._places

    def like(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Returns the type and the shape of a gradient."""
        dtype, _, shape = self._places[name]
        return dtype, shape


@dataclass(frozen=True)
class SplitStep:
    """The two halves of a step.

    Attributes:
        names: What the values are called that go from one to the other.
        layout: Where gradients lie.
        gradients: Runs the first half.
        apply: Runs the second half.
    """

    names: Cut
    layout: Layout
    gradients: ShapeCache
    apply: ShapeCache

    @property
    def carried(self) -> Sequence[str]:
        """What goes to the second half besides gradients, as people call it."""
        return [*self.names.carried, *self.names.fed]


@dataclass(frozen=True)
class Differentiated:
    """What the first half gives.

    Attributes:
        outputs: Outputs for people.
        gradients: The gradients by parameter.
        flat: The arrays that they are views of.
        carried: What else the second half takes.
    """

    outputs: dict[str, Array]
    gradients: dict[str, Array]
    flat: list[Array]
    carried: dict[str, Array]
