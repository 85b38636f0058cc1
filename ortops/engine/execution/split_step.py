"""A step in two parts, computing gradients and applying them, on the memory of the variables."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortops._common.numbers import Array
from ortops.engine.execution.memory import Memory
from ortops.engine.execution.packed import Variable
from ortops.engine.execution.shape_cache import ShapeCache
from ortops.engine.execution.split_step_graphs import Cut

_ALIGNMENT = 16  # elements


class Layout:
    """The memory layout of gradients: one array for each dtype, with zeros for alignment.

    Args:
        parameters: The parameters by name. Gradients of 16-bit parameters are float32.
    """

    def __init__(self, parameters: Mapping[str, Memory]) -> None:
        self._positions: dict[str, tuple[np.dtype[Any], int, tuple[int, ...]]] = {}
        self._sizes: dict[np.dtype[Any], int] = {}
        for name, memory in parameters.items():
            dtype = np.dtype(np.float32) if memory.dtype.itemsize == 2 else memory.dtype
            begin = self._sizes.get(dtype, 0)
            self._positions[name] = dtype, begin, memory.shape
            self._sizes[dtype] = begin + -(-memory.size // _ALIGNMENT) * _ALIGNMENT

    def zeros(self) -> tuple[list[Array], dict[str, Array]]:
        """Returns new arrays, one for each dtype, and the gradients as views of them by name."""
        flat = {dtype: np.zeros(size, dtype) for dtype, size in self._sizes.items()}
        return list(flat.values()), {
            name: flat[dtype][begin : begin + math.prod(shape)].reshape(shape)
            for name, (dtype, begin, shape) in self._positions.items()
        }

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters."""
        return self._positions

    def like(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Returns the dtype and the shape of a gradient."""
        dtype, _, shape = self._positions[name]
        return dtype, shape


@dataclass(frozen=True)
class SplitStep:
    """A step in two parts.

    Attributes:
        names: The names of the tensors that go from the first part to the second.
        gradients: The gradient part.
        apply: The update part.
        variables: The variables by name.
    """

    names: Cut
    gradients: ShapeCache
    apply: ShapeCache
    variables: Mapping[str, Variable]

    @functools.cached_property
    def layout(self) -> Layout:
        """The memory layout of gradients."""
        return Layout({name: self.variables[name].buffers[0] for name in self.names.given})

    @property
    def passed(self) -> list[str]:
        """The outputs of the first part that the second one reads.

        They begin with those that `Execution.gradients` writes into arrays of its own.
        """
        carried = self.names.carried
        updated = [name for label, name in carried.items() if label in self.variables]
        others = [name for label, name in carried.items() if label not in self.variables]
        return [*self.names.given.values(), *updated, *others]

    @property
    def carried(self) -> Sequence[str]:
        """The public names of the tensors other than gradients that the update part reads."""
        return [*self.names.carried, *self.names.fed]


@dataclass(frozen=True)
class Differentiated:
    """The results of the gradient part.

    Attributes:
        outputs: The outputs of the step.
        gradients: The gradients by parameter.
        flat: The arrays that the gradients are views of.
        carried: The other tensors that the update part reads.
    """

    outputs: dict[str, Array]
    gradients: dict[str, Array]
    flat: list[Array]
    carried: dict[str, Array]
