"""Which axis of each array has the rows of a batch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.errors import OrtopsError

Dims: TypeAlias = Sequence[int | str | None] | None
"""A shape: sizes, symbols, or None for unknown sizes; None if the rank is unknown."""

_BATCH = re.compile(r"batch.*|n_?batch.*|bs|bsz", re.IGNORECASE)
_SHORT = re.compile(r"[bn]", re.IGNORECASE)
_TIME = re.compile(r"t|l|s|time.*|seq.*|len.*|length.*|frames?|.*_len(gth)?|steps?", re.IGNORECASE)

_KEEPING = re.compile("Add|Cast|Dropout|Identity|LayerNormalization|MatMul|Mul|Slice|Split")
"""Operators whose result has the rows along the axis of the one input that is not constant."""


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

    @property
    def fixed(self) -> int | None:
        """The number of rows of every batch, if it is static."""
        return next((size for size in self.batch if isinstance(size, int)), None)

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
        own = [axis for axis, d in enumerate(dims) if isinstance(d, str) and d not in self.others]
        if isinstance(dims[0], int) and len(own) == 1 and self.fixed is None:
            return own[0]  # a state, of which the exporter names the batch in its own way
        return None if dims[0] in self.others else 0

    def of_target(self, dims: Dims) -> int | None:
        """Returns the axis of a target that has the rows, or None if it is the same in every batch.

        Args:
            dims: Its shape, which is read as that of an output, but has to show the rows.
        """
        axis = self.of_output(dims)
        is_guess = axis == 0 and dims and dims[0] not in self.batch
        return None if is_guess and dims and (self.fixed == 1 or _is_size(dims[0])) else axis


def row_axes_of_model(model: onnx.ModelProto) -> RowAxes:
    """Finds the axis that has the rows, in each input of a model and of its losses.

    Args:
        model: A model, trainable or not.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    shapes = {v.name: _dims(v) for v in model.graph.input if v.name not in given}
    of_loss = {v.name: _dims(v) for info in model.training_info for v in info.algorithm.input}
    targets = [name for name in of_loss if name not in shapes]
    outputs = [_dims(value) for value in model.graph.output]
    every = {**shapes, **of_loss, **shapes}  # in this order, with the shapes of the model
    return row_axes(every, targets, _recurrent_axes(model.graph), outputs)


def _dims(value: onnx.ValueInfoProto) -> Dims:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value or dim.dim_param or None for dim in tensor.shape.dim)


def row_axes(
    shapes: Mapping[str, Dims],
    targets: Collection[str] = (),
    known: Mapping[str, int] | None = None,
    outputs: Iterable[Dims] = (),
) -> RowAxes:
    """Finds the axis that has the rows, in each input of a training step.

    Rows are along axis 0 of the first input of the model, whatever its symbol is, along the
    dimension with the same symbol elsewhere, and along axis 0 of inputs that have another symbol
    there. A symbol that is called ``batch…``, or that recurrent layers have at the place of the
    batch, is that of the rows on any axis; so is one that targets or outputs have in front, if none
    of them has that of axis 0. If axis 0 of the first input has a static size, this is the batch
    size; inputs without it, such as targets of shape [time] for an input of shape [1, time], are
    the same in every batch. Targets are read as outputs of the model are.

    Args:
        shapes: The shape of each input.
        targets: Those that the model does not have.
        known: The axes of inputs that recurrent layers read as rows.
        outputs: The shapes of outputs.
    """
    own = {name: dims for name, dims in shapes.items() if name not in targets}
    known = {n: a for n, a in (known or {}).items() if a < len(own.get(n) or ())}
    results = [*outputs, *(shapes[name] for name in targets)]
    batch, doubt = _batch({name: dims for name, dims in own.items() if dims}, known, results)
    sized, every = any(map(_is_size, batch)), _symbols(own.values())
    beside = _symbols(dims for dims in own.values() if batch & set(dims or ())) - batch
    axes = {}
    for name, dims in own.items():
        places = [axis for axis, dim in enumerate(dims or ()) if dim in batch]
        axis = known.get(name)
        if axis is not None and dims and (axis in places or not _is_size(dims[axis])):
            axes[name] = axis
        elif places and (places[0] == 0 or batch != {1} or len(places) == 1):
            axes[name] = places[0]
        elif dims is None or (
            dims and not sized and not _is_size(dims[0]) and dims[0] not in beside
        ):
            axes[name] = 0
    rows = RowAxes(axes, _with_firsts(batch, own, axes), every - batch, doubt)
    for name in targets:
        axis = rows.of_target(shapes[name])
        if axis is not None:
            axes[name] = axis
    batch = _with_firsts(batch, shapes, axes)
    return RowAxes(axes, batch, _symbols(shapes.values()) - batch, doubt)


def _with_firsts(
    batch: frozenset[int | str], shapes: Mapping[str, Dims], axes: Mapping[str, int]
) -> frozenset[int | str]:
    """Adds the symbols that inputs have at the axis of the rows to those of the batch."""
    if any(map(_is_size, batch)):
        return batch
    found = ((shapes[name] or (None,))[axis] for name, axis in axes.items() if name in shapes)
    return batch | {dim for dim in found if isinstance(dim, str)}


def _is_size(dim: object) -> bool:
    return isinstance(dim, int)


def _symbols(shapes: Iterable[Dims]) -> frozenset[str]:
    return frozenset(dim for dims in shapes for dim in dims or () if isinstance(dim, str))


def _batch(
    shapes: Mapping[str, Sequence[int | str | None]],
    known: Mapping[str, int],
    results: Sequence[Dims],
) -> tuple[frozenset[int | str], str]:
    """Returns the symbols of the batch dimension, or its size, and what is uncertain."""
    if named := {symbol for symbol in _symbols(shapes.values()) if _BATCH.fullmatch(symbol)}:
        return frozenset(named), ""
    found = {shapes[name][axis] for name, axis in known.items() if name in shapes}
    if batch := _symbols([list(found)]) or {dim for dim in found if isinstance(dim, int)}:
        return frozenset(batch), ""
    first = next(iter(shapes.values()), (None,))
    chosen, rest = first[0], list(shapes.values())[1:]
    if isinstance(chosen, int) and chosen != 1:  # as in the edges of a graph, [2, edges]
        others = (dims[0] for dims in rest if isinstance(dims[0], str) and dims[0] not in first)
        chosen = next(others, chosen)
    if isinstance(chosen, str) and chosen not in _symbols(results):  # as after a mean over time
        told = _symbols([first]) & {dims[0] for dims in results if dims}
        chosen = next(iter(told)) if len(told) == 1 else chosen
    if not isinstance(chosen, str) or not _TIME.fullmatch(chosen):
        return frozenset() if chosen is None else frozenset([chosen]), ""
    with_symbols = [dims for dims in shapes.values() if _symbols([dims])]
    shared = [d for d in dict.fromkeys(first) if isinstance(d, str) and d != chosen]
    shared = [symbol for symbol in shared if all(symbol in dims for dims in with_symbols)]
    short = [symbol for symbol in shared if _SHORT.fullmatch(symbol)]
    if len(short) == 1:
        return frozenset(short), ""
    listed = ", ".join(f"'{symbol}'" for symbol in shared)
    return frozenset([chosen]), listed and (
        f"the rows of a batch are taken along the dimension '{chosen}', although all inputs also "
        f"have {listed}; call the dimension of the rows 'batch' in the model if that is wrong"
    )


def _recurrent_axes(graph: onnx.GraphProto) -> dict[str, int]:
    """Returns the axes of inputs that recurrent layers read as rows, if they agree."""
    made = {name: node for node in graph.node for name in node.output}
    fixed = {tensor.name for tensor in graph.initializer} | {""}
    fixed |= {name for name, node in made.items() if node.op_type == "Constant"}
    layers = [node for node in graph.node if node.op_type in ("GRU", "LSTM", "RNN")]
    todo = []
    for node in layers:
        axis = 1 - next((a.i for a in node.attribute if a.name == "layout"), 0)
        todo += [(node.input[n], axis) for n in (0, 5, 6) if n < len(node.input)]
    seen, found = set(todo), dict[str, set[int]]()
    while todo:
        name, axis = todo.pop()
        if name not in made:
            found.setdefault(name, set()).add(axis)
            continue
        node = made[name]
        read = [each for each in node.input if each not in fixed]
        if node.op_type == "Transpose":
            axes = next((list(a.ints) for a in node.attribute), [])
            axis = axes[axis] if axis < len(axes) else -1
        elif node.op_type == "Gather":  # of an embedding
            if node.input[0] not in fixed or any(a.i for a in node.attribute):
                continue
        elif not _KEEPING.fullmatch(node.op_type):
            continue
        if len(read) == 1 and axis >= 0 and (read[0], axis) not in seen:
            seen.add((read[0], axis))
            todo.append((read[0], axis))
    return {name: axes.pop() for name, axes in found.items() if len(axes) == 1}


@dataclass
class Pieces:
    """What batches compute of a tensor, to be joined along the axis of the rows.

    Attributes:
        name: The name of the tensor.
        axis: The axis of its rows; None if its shape has none.
        is_one: Whether one batch is the whole, also without rows.
        where: How messages begin.
        remedy: What to do about a tensor without rows.
    """

    name: str
    axis: int | None
    is_one: bool
    where: str
    remedy: str
    _arrays: list[Array] = field(default_factory=list)

    def add(self, array: Any, rows: int) -> None:
        """Adds what a batch has computed.

        Args:
            array: The tensor.
            rows: The number of rows of the batch.

        Raises:
            OrtopsError: If it does not have the rows of the batch, or another shape than before.
        """
        shape, before = np.shape(array), [np.shape(each) for each in self._arrays]
        alone = self.is_one and rows == 1 and not before
        for each in [] if alone else [*before[:1] * self.is_one, shape]:
            self._check(each, rows)
        axis = self.axis or 0
        if before and np.delete(before[0], axis).tolist() != np.delete(shape, axis).tolist():
            raise OrtopsError(
                f"{self.where}: '{self.name}' has shape {list(before[0])} for one batch and "
                f"{list(shape)} for another, and cannot be concatenated; give batches of one "
                "shape, or predict them separately"
            )
        self._arrays.append(array)

    def _check(self, shape: tuple[int, ...], rows: int) -> None:
        axis = self.axis
        if axis is None or len(shape) <= axis or shape[axis] != rows:
            what = "one axis" if axis is None else f"axis {axis}"
            raise OrtopsError(
                f"{self.where}: {what} of '{self.name}' must have the rows of the batch, got shape "
                f"{list(shape)} for a batch of {rows} rows; {self.remedy}"
            )

    def joined(self) -> Array:
        """Returns the tensor for all rows."""
        if len(self._arrays) == 1:
            return self._arrays[0]
        return np.concatenate(self._arrays, self.axis or 0)


def along(axis: int, rows: Any) -> tuple[Any, ...]:
    """Returns the index that takes rows along an axis of an array."""
    return (*[slice(None)] * axis, rows)


def rows_first(array: Array, axis: int) -> Array:
    """Returns an array with the axis of its rows in front."""
    return np.moveaxis(array, axis, 0) if axis else array


def rows_to(array: Array, axis: int) -> Array:
    """Returns an array of which the rows are in front, with the rows along an axis."""
    return np.moveaxis(array, 0, axis) if axis and array.ndim > axis else array
