"""Which axis of each array has the rows of a batch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ortops.numbers import Array

__all__ = ["Dims", "RowAxes", "along", "row_axes", "rows_first", "rows_to"]

Dims: TypeAlias = Sequence[int | str | None] | None
"""A shape: sizes, symbols, or None for unknown sizes; None if the rank is unknown."""

_BATCH = re.compile(r"batch.*|n_?batch.*|bs|bsz", re.IGNORECASE)
_SHORT = re.compile(r"[bn]", re.IGNORECASE)
_TIME = re.compile(r"t|l|s|time.*|seq.*|len.*|length.*|frames?|.*_len(gth)?|steps?", re.IGNORECASE)


@dataclass(frozen=True)
class RowAxes:
    """The axes of the rows.

    Attributes:
        axes: The axis of each input that has rows. The other inputs are the same in every batch.
        batch: The symbols of the batch dimension, or its static size; empty if unknown.
        others: The other symbols of inputs.
        doubt: What is uncertain, a sentence for the log; "" if nothing is.
    """

    axes: Mapping[str, int]
    batch: frozenset[int | str]
    others: frozenset[str]
    doubt: str = ""

    def of_output(self, dims: Dims) -> int | None:
        """Returns the axis of an output that has the rows, or None if it has none.

        It is axis 0 if the shape does not tell.

        Args:
            dims: The shape of the output that the model declares, or that was inferred.
        """
        if not dims:
            return 0 if dims is None else None
        found = [axis for axis, dim in enumerate(dims) if dim in self.batch]
        if found:  # two static sizes may be equal by chance
            return found[0] if found[0] == 0 or len(found) == 1 or self.others else None
        return None if dims[0] in self.others else 0


def row_axes(shapes: Mapping[str, Dims]) -> RowAxes:
    """Finds the axis that has the rows, in each input of a training step.

    Rows are along the batch dimension: a symbol that is called ``batch…``, or the symbol of the
    first axis of the inputs, or the only one that all inputs with symbols share. In an input
    without this symbol, rows are along axis 0 if its size is not static. If the sizes of all
    inputs are static, the batch size is the first size of the first input.

    Args:
        shapes: The shape of each input, those of the model first.
    """
    symbolic = [[d for d in dims if isinstance(d, str)] for dims in shapes.values() if dims]
    symbolic = [symbols for symbols in symbolic if symbols]
    batch, doubt = _symbols(shapes, symbolic)
    others = frozenset(symbol for symbols in symbolic for symbol in symbols) - batch
    beside = {symbol for symbols in symbolic if batch & set(symbols) for symbol in symbols} - batch
    axes = {}
    for name, dims in shapes.items():
        if dims is None:
            axes[name] = 0
        elif along_axes := [axis for axis, dim in enumerate(dims) if dim in batch]:
            axes[name] = along_axes[0]
        elif dims and not isinstance(dims[0], int) and dims[0] not in beside:
            axes[name] = 0
    if batch:  # labels may have symbols of their own, which outputs share
        found = (shapes[name] for name, axis in axes.items() if axis == 0)
        batch |= {dims[0] for dims in found if dims and isinstance(dims[0], str)}
    if axes:
        return RowAxes(axes, batch, others - batch, doubt)
    return _static({name: dims for name, dims in shapes.items() if dims})


def _symbols(
    shapes: Mapping[str, Dims], symbolic: Sequence[Sequence[str]]
) -> tuple[frozenset[int | str], str]:
    """Returns the symbols of the batch dimension, and what is uncertain."""
    every = dict.fromkeys(symbol for symbols in symbolic for symbol in symbols)
    if named := [symbol for symbol in every if _BATCH.fullmatch(symbol)]:
        return frozenset(named), ""
    shared = [symbol for symbol in every if all(symbol in symbols for symbols in symbolic)]
    firsts = (dims[0] for dims in shapes.values() if dims)
    first = next((dim for dim in firsts if isinstance(dim, str)), None)
    if first in shared:
        short = [symbol for symbol in shared if _SHORT.fullmatch(symbol)]
        if len(shared) == 1 or not _TIME.fullmatch(first):
            return frozenset([first]), ""
        if len(short) == 1:
            return frozenset(short), ""
    elif len(shared) == 1:
        return frozenset(shared), ""
    if len(shared) < 2:
        return frozenset(), ""
    chosen = first if first in shared else shared[0]
    rest = ", ".join(f"'{symbol}'" for symbol in shared if symbol != chosen)
    return frozenset([chosen]), (
        f"the rows of a batch are taken along the dimension '{chosen}', although all inputs also "
        f"have {rest}; call the dimension of the rows 'batch' in the model if that is wrong"
    )


def _static(shapes: Mapping[str, Sequence[int | str | None]]) -> RowAxes:
    """Returns the axes in a model whose sizes are static."""
    size = next((dims[0] for dims in shapes.values()), None)
    if size is None or not all(size in dims for dims in shapes.values()):
        return RowAxes(dict.fromkeys(shapes, 0), frozenset(), frozenset())
    axes = {name: list(dims).index(size) for name, dims in shapes.items()}
    return RowAxes(axes, frozenset([size]), frozenset())


def along(axis: int, rows: Any) -> tuple[Any, ...]:
    """Returns the index that takes rows along an axis of an array."""
    return (*[slice(None)] * axis, rows)


def rows_first(array: Array, axis: int) -> Array:
    """Returns an array with the axis of its rows in front."""
    return np.moveaxis(array, axis, 0) if axis else array


def rows_to(array: Array, axis: int) -> Array:
    """Returns an array of which the rows are in front, with the rows along an axis."""
    return np.moveaxis(array, 0, axis) if axis and array.ndim > axis else array
