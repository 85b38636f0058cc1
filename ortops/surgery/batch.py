"""A batch of any size, shown to work by runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from ortops.errors import ModelError, UnsupportedError, did_you_mean, is_raised_by
from ortops.graph import convert, external
from ortops.graph.convert import ModelLike
from ortops.graph.edit import describe, read_inputs
from ortops.graph.tensor import Names, Tape, Tensor, op
from ortops.surgery.reading import (
    Array,
    constant,
    dimensions,
    drop_unread,
    logger,
    read,
    refuse_training,
)

__all__ = ["free_batch"]

_ROWS, _MORE_ROWS = 3, 2
"""How many rows run through the nodes one by one, and how many more through the whole model."""

_UNKNOWN_SIZES = (32, 16, 64, 8, 128, 224, 640, 2)
"""What axes of unknown size are tried with, until the model runs."""

_STATES = {"GRU": 2, "LSTM": 2, "RNN": 2}
"""Recurrent operators: their inputs from the fourth on are one for each row, weights are not."""

_FOLDER_KEY = "session.model_external_initializers_file_folder_path"

_SMALL = 2**24  # bytes of constants that onnxruntime is told as such: some operators want that

Run: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]


@convert.blame_model
def free_batch(
    model: ModelLike,
    *,
    dimension: str = "batch",
    inputs: Iterable[str] | Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Returns a model that takes batches of any size where it took one of a fixed size.

    Random rows are run through the model, node by node: each alone, as the model is, and all
    together. Where a node then does not give what it gave for each row, a constant in it that holds
    the batch is replaced: the shape of Reshape, Expand and Resize, and what the rows meet that is
    there once for each of the old batch, such as initial states. If that does not help, the model
    is refused and the node named. In the end the new model's outputs of more rows are compared with
    those of each row alone, so what is returned is known to work.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        dimension: The name of the batch's axis in the shapes of inputs and outputs.
        inputs: The inputs that have the batch on axis 0, or on which axis each has it. By default
            those whose axis 0 is as long as the first input's or, where that has a name, that have
            an axis of this name. Such an axis counts as 1: nodes may still be written for that.

    Returns:
        A new model, of the same opset. External data stay external, relative to the folder of the
        given file.

    Raises:
        ModelError: If there is no such input, the sizes of the batch differ, or the model has
            training_info.
        UnsupportedError: If onnxruntime does not run the model on random inputs, or the outputs for
            a batch are not those of its rows.

    Example:
        >>> from ortops import Tape
        >>> with Tape(name="mean") as tape:
        ...     x = tape.input("x", np.float32, [1, 6])
        ...     y = op.Reshape(x, [1, 2, 3])
        ...     mean = tape.output(op.ReduceMean(y, [1], keepdims=0), "mean")
        >>> freed = free_batch(tape.model())
        >>> freed.graph.output[0].type.tensor_type.shape.dim[0].dim_param
        'batch'
    """
    work, proto, folder = read(model)
    refuse_training(proto, "free the batch")
    axes, batch = _batched(work.graph, inputs)
    for value in work.graph.inputs:
        for place, dim in enumerate(value.shape or ()):
            if getattr(dim, "value", None) == dimension and axes.get(value) != place:
                raise ModelError(
                    f"dimension '{dimension}': axis {place} of input '{value.name}' has that name; "
                    "give another, or name all inputs that have the batch, each with its axis "
                    "(inputs=)"
                )
    original = _open(proto, folder)
    alone, fixed = _drawn(work.graph, axes, batch, original)
    freeing = _Freeing(work, axes, batch, alone, fixed)
    for node in list(work.graph):
        freeing.follow(node)
    freeing.name_axes(dimension)
    result: onnx.ModelProto = ir.to_proto(work)
    freeing.compare(original, _open(result, folder), alone, fixed)
    return result


def _batched(
    graph: ir.Graph, inputs: Iterable[str] | Mapping[str, int] | None
) -> tuple[dict[ir.Value, int], int]:
    """Returns which axis of which inputs is the batch, and how long it is."""
    fed = {v.name or "": v for v in graph.inputs if v.name not in graph.initializers}
    if not fed:
        raise ModelError("model: it has no inputs; free_batch needs one that has the batch")
    for value in fed.values():
        if not isinstance(value.type, ir.TensorType) or value.shape is None:
            raise UnsupportedError(
                f"input '{value.name}': it is {value.type} of shape {value.shape}; tensors with a "
                "known number of axes are accepted"
            )
    if inputs is None:
        first = next(iter(fed.values()))
        size = _axis_size(first, 0)
        axes = {v: place for v in fed.values() if (place := _batch_axis(v, first)) is not None}
    else:
        given = {inputs: 0} if isinstance(inputs, str) else inputs
        places = given if isinstance(given, Mapping) else dict.fromkeys(given, 0)
        for name in places:
            if name not in fed:
                raise ModelError(f"input '{name}': the model has none; {did_you_mean(name, fed)}")
        if not places:
            raise ModelError("inputs is empty; name those that have the batch")
        axes = {fed[name]: place for name, place in places.items()}
        size = _axis_size(*next(iter(axes.items())))
    for value, place in axes.items():
        if _axis_size(value, place) != size:
            raise ModelError(
                f"input '{value.name}': its axis {place} is {_axis_size(value, place)} and that of "
                f"'{next(iter(axes)).name}' is {size}; name inputs with one batch (inputs=)"
            )
    return axes, size


def _batch_axis(value: ir.Value, first: ir.Value) -> int | None:
    """Returns where an input has the batch of the first one: on axis 0, or where its name is."""
    assert first.shape is not None
    assert value.shape is not None
    batch, dims = first.shape[0], list(value.shape)
    if isinstance(batch, ir.SymbolicDim) and batch.value is not None:
        return dims.index(batch) if batch in dims else None
    return 0 if dims and dims[0] == batch else None


def _axis_size(value: ir.Value, axis: int) -> int:
    shape = value.shape
    if shape is None or not 0 <= axis < len(shape):
        raise ModelError(
            f"input '{value.name}': its shape {dimensions(value)} has no axis {axis}; name the "
            "inputs that have the batch, and its axis in each (inputs=)"
        )
    size = shape[axis]
    return size if isinstance(size, int) else 1


def _open(proto: onnx.ModelProto, folder: Path | None = None) -> Run:
    """Returns a function that runs a model in stock onnxruntime.

    Raises:
        _CannotRunError: If onnxruntime does not load it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))
    with _Refusals():
        session = onnxruntime.InferenceSession(
            external.serialize(proto), options, providers=["CPUExecutionProvider"]
        )
    names = {value.name for value in session.get_inputs()}

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        with _Refusals():
            found: list[Array] = session.run(
                None, {name: array for name, array in feeds.items() if name in names}
            )
        return found

    return run


class _CannotRunError(UnsupportedError):
    """onnxruntime refuses a model or its inputs."""


class _Refusals:
    """Makes what onnxruntime raises a `_CannotRunError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and is_raised_by(error, "onnxruntime"):
            text = " ".join(str(error).split())
            raise _CannotRunError(
                f"model: onnxruntime does not run it ({text[:300]}), and what cannot be run cannot "
                "be shown to work with another batch; give a model that runs"
            ) from error


def _drawn(
    graph: ir.Graph, axes: Mapping[ir.Value, int], batch: int, run: Run
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Returns random rows, each repeated to a batch, and inputs that have none; the model runs."""
    refusal: _CannotRunError | None = None
    for size, numbers in itertools.product(_UNKNOWN_SIZES, ((0, 2), (1, 2))):
        generator = np.random.default_rng(0)
        symbols = {
            dim: size for v in graph.inputs for dim in v.shape or () if not isinstance(dim, int)
        }
        alone: list[dict[str, Array]] = [{} for _ in range(_ROWS + _MORE_ROWS + (batch == _ROWS))]
        fixed: dict[str, Array] = {}
        for value in graph.inputs:
            if value.name in graph.initializers:
                continue
            assert value.shape is not None
            shape = [dim if isinstance(dim, int) else symbols[dim] for dim in value.shape]
            if value not in axes:
                fixed[value.name or ""] = _random(value, shape, generator, numbers)
                continue
            shape[axes[value]] = 1
            for feeds in alone:
                row = _random(value, shape, generator, numbers)
                feeds[value.name or ""] = np.repeat(row, batch, axis=axes[value])
        try:
            for feeds in alone:
                run({**feeds, **fixed})
            return alone, fixed
        except _CannotRunError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _random(
    value: ir.Value, shape: Sequence[int], generator: np.random.Generator, numbers: tuple[int, int]
) -> Array:
    """Returns numbers for an input: normal ones, or whole ones that are legal in most places."""
    if value.dtype is None or value.dtype.numpy().kind not in "biuf":
        raise UnsupportedError(
            f"input '{value.name}': random values of {value.dtype} cannot be drawn, so a free "
            "batch cannot be verified; numbers and booleans are accepted"
        )
    dtype = value.dtype.numpy()
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    drawn: Array = generator.integers(*((0, 256) if dtype == np.uint8 else numbers), size=shape)
    return drawn.astype(dtype)


@dataclass
class _Traced:
    """A value in the runs of each row alone, and in that of all rows.

    Attributes:
        rows: What it is for each row; one array where that does not depend on the row.
        new: What it is for all rows together.
        axis: The axis on which ``new`` has the rows one behind the other, or None.
        outer: How many numbers of what is merged with the batch on that axis lie before it.
        sizes: Whether it depends on the size of the batch otherwise, as what Shape gives.
        source: An input without a batch that it depends on, though not on the batch.
    """

    rows: list[Array]
    new: Array
    axis: int | None = None
    outer: int = 1
    sizes: bool = False
    source: str = ""

    @property
    def same(self) -> bool:
        """Whether it has nothing to do with the batch."""
        return self.axis is None and not self.sizes


@dataclass
class _Repair:
    """What a node may read in place of what holds the old batch.

    Attributes:
        arrays: The values in the run of all rows.
        write: Writes it into the graph, and tells what.
    """

    arrays: dict[ir.Value, Array] = field(default_factory=dict)
    write: Callable[[], str] | None = None


class _Freeing:
    """Runs rows through a model, alone and together, and repairs what parts them.

    Args:
        work: The model, changed in place.
        axes: Which axis of which inputs is the batch.
        batch: How long it is.
        alone: The inputs of rows, each repeated to a batch.
        fixed: The inputs that have no batch.
    """

    def __init__(
        self,
        work: ir.Model,
        axes: Mapping[ir.Value, int],
        batch: int,
        alone: Sequence[Mapping[str, Array]],
        fixed: Mapping[str, Array],
    ) -> None:
        self._work, self._graph, self._axes, self._batch = work, work.graph, axes, batch
        self._count = len(alone) - _MORE_ROWS
        self._told: list[str] = []
        self._names = Names(work.graph)
        self._size: ir.Value | None = None
        self._values: dict[ir.Value, _Traced] = {}
        self._merged: dict[ir.Value, tuple[int, int, int]] = {}  # axis, what is before, its length
        self._uneven: dict[ir.Value, list[bool]] = {}
        self._functions = list(ir.to_proto(work).functions) if work.functions else []
        self._unread = {
            value: sum(1 for _ in value.uses())
            for value in (*work.graph.inputs, *(v for node in work.graph for v in node.outputs))
        }
        for value in work.graph.inputs:
            if value in axes:
                rows = [feeds[value.name or ""] for feeds in alone[: self._count]]
                self._keep(value, self._stacked(rows, axes[value], 1))
            elif value.name not in work.graph.initializers:
                array = fixed[value.name or ""]
                self._keep(value, _Traced([array], array, source=value.name or ""))

    # ------------------------------------------------------------------------------------- tracing

    def _stacked(self, rows: list[Array], axis: int, outer: int) -> _Traced:
        """Returns the rows behind each other: the first of each repeated batch."""
        shape = rows[0].shape
        parts = (*shape[:axis], outer, self._batch, shape[axis] // outer // self._batch)
        parts += shape[axis + 1 :]
        firsts = [row.reshape(parts).take([0], axis + 1) for row in rows]
        new = np.concatenate(firsts, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
        return _Traced(rows, new, axis, outer)

    def _related(self, rows: list[Array], new: Array) -> _Traced | None:
        """Returns how what all rows give follows from what each gives, or None if it does not."""
        first = rows[0]
        if any(row.shape != first.shape for row in rows) or new.dtype != first.dtype:
            return None
        if new.shape == first.shape and all(_equal(row, new) for row in rows):
            return _Traced([new], new)
        if new.ndim != first.ndim or not new.size:
            return None
        for axis, (size, grown) in enumerate(zip(first.shape, new.shape, strict=True)):
            others = new.shape[:axis] + new.shape[axis + 1 :]
            kept = first.shape[:axis] + first.shape[axis + 1 :]
            if size % self._batch or size // self._batch * len(rows) != grown or others != kept:
                continue
            length = size // self._batch
            for outer in (each for each in range(1, length + 1) if length % each == 0):
                found = self._stacked(rows, axis, outer)
                if _equal(found.new, new):
                    return found
        return None

    def _get(self, value: ir.Value) -> _Traced:
        if value not in self._values:
            array = constant(value)
            if array is None:
                raise UnsupportedError(
                    f"value '{value.name}': no node before its readers computes it; nodes must be "
                    "in topological order"
                )
            return _Traced([array], array)
        return self._values[value]

    def _keep(self, value: ir.Value, traced: _Traced) -> None:
        """Records a value; its arrays are dropped when it has been read for the last time."""
        self._values[value] = traced
        if traced.axis is not None:
            self._merged[value] = (traced.axis, traced.outer, traced.rows[0].shape[traced.axis])
        elif traced.sizes and traced.new.ndim == traced.rows[0].ndim:
            sizes = zip(traced.new.shape, traced.rows[0].shape, strict=True)
            self._uneven[value] = [a != b for a, b in sizes]
        elif traced.sizes:
            self._uneven[value] = []

    def follow(self, node: ir.Node) -> None:
        """Runs a node on each row and on all, and repairs it where these part.

        Raises:
            UnsupportedError: If it cannot be run, or repaired.
        """
        taken = dict.fromkeys(read_inputs(node))
        outputs = [value for value in node.outputs if value.name]
        if node.op_type == "Constant" and constant(node.outputs[0]) is not None:
            return
        given = {value: self._get(value) for value in taken}
        arrays = {value: traced.new for value, traced in given.items()}
        if all(traced.same for traced in given.values()):
            source = next((traced.source for traced in given.values() if traced.source), "")
            for value, array in zip(outputs, self._run_alone(node, [arrays])[0], strict=True):
                self._keep(value, _Traced([array], array, source=source))
        else:
            each = [
                {v: t.rows[row if len(t.rows) > 1 else 0] for v, t in given.items()}
                for row in range(self._count)
            ]
            rows = self._run_alone(node, each)
            for value, traced in zip(outputs, self._repaired(node, given, rows), strict=True):
                self._keep(value, traced)
        for reads in node.inputs:
            if reads is not None and reads in self._unread:
                self._unread[reads] -= 1
                if not self._unread[reads] and not reads.is_graph_output():
                    self._values.pop(reads, None)

    def _run_alone(self, node: ir.Node, feeds: list[dict[ir.Value, Array]]) -> list[list[Array]]:
        try:
            run = self._session(node, feeds[0])
            found = [run({v.name or "": a for v, a in each.items()}) for each in feeds]
            again = run({v.name or "": a for v, a in feeds[0].items()})
        except _CannotRunError as error:
            raise UnsupportedError(
                f"{describe(node)}: onnxruntime does not run it alone ({_cause(error)}), so a free "
                "batch cannot be verified; export the model with a dynamic batch"
            ) from error
        pairs = zip(found[0], again, strict=True)
        if any(isinstance(a, np.ndarray) and not _equal(a, b) for a, b in pairs):
            raise UnsupportedError(
                f"{describe(node)}: it gives other numbers in each run, so a free batch cannot be "
                "verified; replace it by its expected value, or leave it out"
            )
        return found

    def _session(self, node: ir.Node, arrays: Mapping[ir.Value, Array]) -> Run:
        """Opens a session of one node."""
        inputs, constants = [], []
        for value, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
                raise UnsupportedError(
                    f"{describe(node)}: it reads '{value.name}', which is no tensor of numbers, so "
                    "a free batch cannot be verified; export the model with a dynamic batch"
                )
            if constant(value) is not None and array.nbytes <= _SMALL:
                constants.append(onnx.numpy_helper.from_array(array, value.name))
            else:
                kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                inputs.append(onnx.helper.make_tensor_value_info(value.name or "", kind, None))
        outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in node.outputs if v.name]
        graph = onnx.helper.make_graph(
            [ir.serde.serialize_node(node)], "node", inputs, outputs, constants
        )
        imports = self._graph.opset_imports.items()
        model = onnx.helper.make_model(
            graph,
            opset_imports=[onnx.helper.make_opsetid(domain, number) for domain, number in imports],
            functions=self._functions,
            ir_version=max(self._work.ir_version, 4),
        )
        return _open(model)

    # ----------------------------------------------------------------------------------- repairing

    def _repaired(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], rows: list[list[Array]]
    ) -> list[_Traced]:
        """Returns the outputs of a node that gives for all rows what it gives for each."""
        why = ""
        found: list[tuple[tuple[bool, int, bool], _Repair, list[_Traced]]] = []
        for repair in (_Repair(), *self._repairs(node, given, rows)):
            arrays = {v: t.new for v, t in given.items()} | repair.arrays
            try:
                new = self._session(node, arrays)({v.name or "": a for v, a in arrays.items()})
            except _CannotRunError as error:
                why = why or f"onnxruntime refuses them ({_cause(error)})"
                continue
            outputs = [
                self._judged(node, given, [each[place] for each in rows], array)
                for place, array in enumerate(new)
            ]
            traced = [each for each in outputs if each is not None]
            if len(traced) == len(outputs):
                found.append((self._order(node, given, traced[0]), repair, traced))
                if node.op_type != "Reshape":  # others have one meaning that fits
                    break
            shapes = [(each.shape, rows[0][place].shape) for place, each in enumerate(new)]
            parted = next((i for i, each in enumerate(outputs) if each is None), 0)
            why = why or (
                f"it gives {list(shapes[parted][0])} which is not what it gives for each row, "
                f"{list(shapes[parted][1])}"
            )
        if not found:
            fed = next((traced.source for traced in given.values() if traced.source), "")
            if fed:
                why += f" (input '{fed}', which it depends on too, has no batch: see inputs=)"
            raise UnsupportedError(
                f"{describe(node)}: of {self._count} rows in place of a batch of {self._batch}, "
                f"{why}; shapes of Reshape, Expand and Resize and constant states are repaired, "
                "for others export the model with a dynamic batch"
            )
        _, repair, outputs_of_it = min(found, key=lambda each: each[0])
        if repair.write is not None:
            self._told.append(f"{describe(node)} {repair.write()}")
        return outputs_of_it

    def _judged(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], rows: list[Array], new: Any
    ) -> _Traced | None:
        if not isinstance(new, np.ndarray):  # a sequence
            return None
        related = self._related(rows, new)
        by_size = any(traced.sizes for traced in given.values()) and new.dtype.kind in "biu"
        by_rows = any(traced.axis is not None for traced in given.values())
        if related is None and (node.op_type in ("Shape", "Size") or by_size or not by_rows):
            return _Traced(rows, new, sizes=True)
        return related

    def _order(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], traced: _Traced
    ) -> tuple[bool, int, bool]:
        """Returns what makes a meaning of a Reshape less likely, the worst first.

        A batch is hardly ever merged with the last axis, which has the features, seldom lies
        behind something else on its axis, and mostly stays on the axis where it was.
        """
        if traced.axis is None or node.inputs[0] is None:
            return (False, 0, False)
        last = traced.axis == traced.new.ndim - 1 and traced.new.ndim > 1
        return (last, traced.outer, traced.axis != given[node.inputs[0]].axis)

    def _repairs(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], rows: list[list[Array]]
    ) -> Iterator[_Repair]:
        index = {"Expand": 1, "Reshape": 1, "Resize": 3}.get(node.op_type, len(node.inputs))
        shape = node.inputs[index] if index < len(node.inputs) and not node.domain else None
        if shape is not None and given[shape].same and given[shape].new.size:
            sizes = given[shape].new
            for place, entry in enumerate(sizes.tolist()):
                size = rows[0][0].shape[place]
                if entry > 0 and size % self._batch == 0:
                    grown = sizes.copy()
                    grown[place] = size // self._batch * self._count
                    yield _Repair(
                        {shape: grown}, self._writing_shape(node, index, sizes, place, size, given)
                    )
            return
        own = [
            value
            for value in node.inputs
            if value is not None and given[value].same and not given[value].source
        ]
        if node.op_type in _STATES and not node.domain:
            layout = node.attributes.get_int("layout", 0)
            wanted = {
                value: 0 if place == 4 or layout else 1
                for place, value in enumerate(node.inputs)
                if value in own and value is not None and place in (4, 5, 6)
            }
            yield from self._expansions(node, wanted, given)
            return
        places = dict.fromkeys(t.axis for t in given.values() if t.axis is not None)
        if not places:  # what is repeated meets a size only, as in Expand
            places = dict.fromkeys(range(max((given[v].new.ndim for v in own), default=0)))
        for axis in places:
            fitting = {
                value: axis
                for value in own
                if given[value].new.ndim > axis and given[value].new.shape[axis] == self._batch
            }
            yield from self._expansions(node, fitting, given)
            for value in fitting if len(fitting) > 1 else ():
                yield from self._expansions(node, {value: axis}, given)

    def _expansions(
        self, node: ir.Node, axes: dict[ir.Value, int], given: Mapping[ir.Value, _Traced]
    ) -> Iterator[_Repair]:
        """Yields, if all rows of constants are one, constants with as many of it as are needed."""
        firsts = {value: given[value].new.take([0], axis) for value, axis in axes.items()}
        if axes and all(
            given[value].new.shape[axis] == self._batch
            and bool((given[value].new == firsts[value]).all())
            for value, axis in axes.items()
        ):
            arrays = {v: np.repeat(firsts[v], self._count, axis) for v, axis in axes.items()}
            yield _Repair(arrays, lambda: self._write_expansions(node, axes, firsts))

    # ------------------------------------------------------------------------------------- writing

    def _batch_size(self) -> ir.Value:
        """Returns the size of the batch, as a vector of one number."""
        if self._size is None:
            value, axis = next(iter(self._axes.items()))
            tape = Tape(self._graph, before=next(iter(self._graph)), names=self._names)
            tape.scope = "free_batch/"
            self._size = op.Gather(op.Shape(tape.tensor(value)), [axis]).value
        return self._size

    def _sizes(
        self, tape: Tape, before: Sequence[int], factor: int, behind: Sequence[int]
    ) -> Tensor:
        """Returns a shape with a multiple of the batch in it."""
        size = tape.tensor(self._batch_size())
        parts: list[object] = [list(before)] if before else []
        parts.append(size * factor if factor > 1 else size)
        parts += [list(behind)] if behind else []
        return op.Concat(*parts, axis=0) if len(parts) > 1 else size

    def _writing_shape(
        self,
        node: ir.Node,
        index: int,
        sizes: Array,
        place: int,
        size: int,
        given: Mapping[ir.Value, _Traced],
    ) -> Callable[[], str]:
        def write() -> str:
            shape = [int(each) for each in sizes]
            tape = Tape(self._graph, before=node, names=self._names)
            tape.scope = "free_batch/"
            replaced = node.inputs[index]
            source = None if node.inputs[0] is None else given[node.inputs[0]]
            fixed = node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0)
            known = [*shape]
            if fixed and -1 not in shape:
                known[place] = -1
            elif (
                fixed
                and source is not None
                and source.axis == place
                and (source.rows[0].shape[place] == size)
            ):
                known[place] = 0
            if known != shape:
                new = tape.constant(np.array(known, np.int64))
            else:
                new = self._sizes(tape, shape[:place], size // self._batch, shape[place + 1 :])
            node.replace_input_with(index, new.value)
            assert replaced is not None
            drop_unread(replaced)
            factor = size // self._batch
            told = [str(each) for each in shape]
            told[place] = f"{factor} × batch" if factor > 1 else "batch"
            return f"{shape} → [{', '.join(told)}]"

        return write

    def _write_expansions(
        self, node: ir.Node, axes: Mapping[ir.Value, int], firsts: Mapping[ir.Value, Array]
    ) -> str:
        told = []
        for value, axis in axes.items():
            tape = Tape(self._graph, before=node, names=self._names)
            tape.scope = "free_batch/"
            first = firsts[value]
            one = tape.tensor(value) if self._batch == 1 else tape.constant(first)
            shape = self._sizes(tape, [1] * axis, 1, [1] * (first.ndim - axis - 1))
            expanded = op.Expand(one, shape).value
            for index, each in enumerate(node.inputs):
                if each is value:
                    node.replace_input_with(index, expanded)
            drop_unread(value)
            told.append(f"'{value.name}' is repeated along axis {axis}")
        return ", ".join(told)

    def name_axes(self, dimension: str) -> None:
        """Writes the batch into the shapes of values, and refuses outputs that have none."""
        for value in self._graph.outputs:
            if not value.is_graph_input() and value in self._uneven:
                raise UnsupportedError(
                    f"output '{value.name}': it depends on the size of the batch and has no row "
                    "for each; leave it out"
                )
        for value, (axis, outer, size) in self._merged.items():
            whole = outer == 1 and size == self._batch
            before = dimensions(value)
            if value.shape is not None:
                dims = list(value.shape)
                dims[axis] = ir.SymbolicDim(dimension if whole else None)
                value.shape = ir.Shape(dims)
            if value in self._axes or value.is_graph_output():
                kind = "input" if value in self._axes else "output"
                self._told.append(f"{kind} '{value.name}' {before} → {dimensions(value)}")
        for value, uneven in self._uneven.items():
            if value.shape is not None:
                known = zip(value.shape, uneven, strict=False)
                dims = [ir.SymbolicDim(None) if grown else dim for dim, grown in known]
                value.shape = ir.Shape(dims) if len(dims) == len(value.shape) else None
        for graph in self._graph.subgraphs():
            for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
                if value.shape is not None and value.const_value is None:
                    value.shape = ir.Shape([None if d == self._batch else d for d in value.shape])

    def compare(
        self,
        original: Run,
        freed: Run,
        alone: Sequence[Mapping[str, Array]],
        fixed: Mapping[str, Array],
    ) -> None:
        """Runs the whole models, and refuses the new one if it does not agree with the old one.

        Raises:
            UnsupportedError: If an output differs.
        """
        rows = [original({**feeds, **fixed}) for feeds in alone]
        together = {
            value.name or "": self._stacked([f[value.name or ""] for f in alone], axis, 1).new
            for value, axis in self._axes.items()
        }
        new = freed({**together, **fixed})
        for place, value in enumerate(self._graph.outputs):
            expected = [each[place] for each in rows]
            if value in self._merged:
                axis, outer, _ = self._merged[value]
                wanted = self._stacked(expected, axis, outer).new
            else:
                wanted = expected[0]
            if not _equal(wanted, new[place], 1e-3):
                raise UnsupportedError(
                    f"output '{value.name}': of {len(alone)} rows it is not what it is of each, "
                    f"although every node agreed with {self._count}; export the model with a "
                    "dynamic batch"
                )
        logger.warning(
            "the batch of %d is free, and %d rows give what each gives alone: %s",
            self._batch,
            len(alone),
            "; ".join(self._told),
        )


def _cause(error: _CannotRunError) -> str:
    return " ".join(str(error.__cause__).split())[:200]


def _equal(a: Array, b: Array, tolerance: float = 1e-4) -> bool:
    """Whether arrays are equal up to rounding, relative to the largest number."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.kind != "f" or not a.size:
        return bool(np.array_equal(a, b))
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    p, q = a[finite].astype(np.float64), b[finite].astype(np.float64)
    bound = (1e-2 if a.dtype == np.float16 else tolerance) * float(np.abs(p).max(initial=0))
    return bool((np.abs(p - q) <= bound).all())
