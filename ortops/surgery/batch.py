"""Gives a model a dynamic batch size, and verifies it by running the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import (
    ArgumentError,
    ModelError,
    UnsupportedError,
    did_you_mean,
)
from ortops.graph.edit import describe, read_inputs
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.names import Names
from ortops.graph.nesting import subgraphs
from ortops.graph.row_axes import RowAxes, row_axes_of_model
from ortops.graph.tensor import Tape, Tensor, op
from ortops.surgery.reading import (
    Array,
    constant,
    dimensions,
    drop_unread,
    logger,
    model_of,
    read,
    refuse_training,
)
from ortops.surgery.trial_runs import (
    MORE_ROWS,
    CannotRunError,
    Run,
    cause_of,
    drawn,
    drawn_for_hidden_batch,
    opened,
)

_STATES = {"GRU": 2, "LSTM": 2, "RNN": 2}
"""Recurrent operators: their inputs from the fourth on have one entry per row, unlike weights."""

_SMALL = 2**24  # bytes; smaller constants become initializers, which some operators require

_RunNode: TypeAlias = Callable[[Mapping[ir.Value, Array]], list[Array]]


@loading.blame_model
def free_batch(
    model: ModelLike,
    *,
    dimension: str = "batch",
    inputs: Iterable[str] | Mapping[str, int] | None = None,
) -> onnx.ModelProto:
    """Returns a model with a dynamic batch size, made from one with a fixed batch size.

    Random rows are run through the model node by node, each row alone and all rows as one batch. If
    the outputs of a node differ, a constant of the node that depends on the batch size is replaced:
    the shape of Reshape, Expand and Resize, or a constant repeated for each row, such as an initial
    state. If the outputs still differ, the model is rejected with an error that names the node.
    Finally, the outputs of the new model for a larger batch are compared with those of its rows, so
    the returned model is known to work.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        dimension: The name of the batch axis in the shapes of inputs and outputs.
        inputs: The inputs with the batch on axis 0, or a mapping from inputs to their batch axes.
            By default, those along which `ortops.TrainingSession.fit` cuts rows: the inputs whose
            axis 0 has the size of the first input's axis 0, or a name. A named axis counts as size
            1, as nodes may still have been exported for this size, or as the size with which the
            model runs.

    Returns:
        A new model of the same opset. External data stay external, relative to the folder of the
        given file.

    Raises:
        ArgumentError: If ``inputs`` is empty.
        ModelError: If there is no such input, the batch sizes differ, or the model has
            training_info.
        UnsupportedError: If onnxruntime cannot run the model on random inputs, or the outputs for
            a batch differ from those of its rows.

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
    refuse_training(proto, "free the batch before build_training_model")
    axes, batch = _batched(work.graph, inputs, row_axes_of_model(proto))
    for value in work.graph.inputs:
        for place, dim in enumerate(value.shape or ()):
            if getattr(dim, "value", None) == dimension and axes.get(value) != place:
                raise ModelError(
                    f"dimension '{dimension}' is already the name of axis {place} of input "
                    f"'{value.name}'; give another name, or all inputs with their batch axes "
                    "(inputs=)"
                )
    original = opened(proto, folder)
    try:
        alone, fixed = drawn(work.graph, axes, batch, original)
    except CannotRunError:
        batch, alone, fixed = drawn_for_hidden_batch(work.graph, axes, original)
    freeing = _Freeing(work, axes, batch, alone, fixed)
    for node in list(work.graph):
        freeing.follow(node)
    freeing.name_axes(dimension)
    result: onnx.ModelProto = ir.to_proto(work)
    freeing.compare(original, opened(result, folder), alone, fixed)
    return result


def _batched(
    graph: ir.Graph, inputs: Iterable[str] | Mapping[str, int] | None, rows: RowAxes
) -> tuple[dict[ir.Value, int], int]:
    """Returns the batch axes of the inputs, and the batch size."""
    fed = {v.name or "": v for v in graph.inputs if v.name not in graph.initializers}
    if not fed:
        raise ModelError("model: it has no inputs; free_batch needs one with a batch axis")
    for value in fed.values():
        if not isinstance(value.type, ir.TensorType) or value.shape is None:
            raise UnsupportedError(
                f"input '{value.name}' must be a tensor of known rank, got {value.type} of shape "
                f"{value.shape}"
            )
    if inputs is None:
        axes = {fed[name]: axis for name, axis in rows.axes.items()}
        axes = axes or {next(iter(fed.values())): 0}
        size = _axis_size(*next(iter(axes.items())))
    else:
        given = {inputs: 0} if isinstance(inputs, str) else inputs
        places = given if isinstance(given, Mapping) else dict.fromkeys(given, 0)
        for name in places:
            if name not in fed:
                raise ModelError(f"the model has no input '{name}'; {did_you_mean(name, fed)}")
        if not places:
            raise ArgumentError("inputs must name at least one input with a batch axis, got none")
        axes = {fed[name]: place for name, place in places.items()}
        size = _axis_size(*next(iter(axes.items())))
    for value, place in axes.items():
        if _axis_size(value, place) != size:
            raise ModelError(
                f"input '{value.name}': its axis {place} has size {_axis_size(value, place)}, but "
                f"the batch axis of '{next(iter(axes)).name}' has size {size}; name inputs with "
                "the same batch size (inputs=)"
            )
    return axes, size


def _axis_size(value: ir.Value, axis: int) -> int:
    shape = value.shape
    if shape is None or not 0 <= axis < len(shape):
        raise ModelError(
            f"input '{value.name}': its shape {dimensions(value)} has no axis {axis}; name the "
            "inputs with a batch, and their batch axes (inputs=)"
        )
    size = shape[axis]
    return size if isinstance(size, int) else 1


@dataclass
class _Traced:
    """A value in the runs of each row alone, and in the run of all rows as one batch.

    Attributes:
        rows: Its array for each row; a single array if it does not depend on the row.
        new: Its array for all rows together.
        axis: The axis along which ``new`` concatenates the rows, or None.
        outer: If that axis merges the batch with others, the size of those before the batch.
        sizes: Whether it depends on the batch size in another way, such as the output of Shape.
        source: For a value that does not depend on the batch, an input that it depends on.
    """

    rows: list[Array]
    new: Array
    axis: int | None = None
    outer: int = 1
    sizes: bool = False
    source: str = ""

    @property
    def same(self) -> bool:
        """Whether it does not depend on the batch."""
        return self.axis is None and not self.sizes


@dataclass
class _Repair:
    """A replacement for constants of a node that depend on the old batch size.

    Attributes:
        arrays: The replacements in the run of all rows.
        write: Writes the replacement to the graph, and returns a description of it.
    """

    arrays: dict[ir.Value, Array] = field(default_factory=dict)
    write: Callable[[], str] | None = None


class _Freeing:
    """Runs rows through a model, alone and as one batch, and repairs nodes where these differ.

    Args:
        work: The model, changed in place.
        axes: The batch axes of the inputs.
        batch: The fixed batch size.
        alone: The inputs of each row, repeated to a batch.
        fixed: The inputs without a batch.
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
        self._count = len(alone) - MORE_ROWS
        self._told: list[str] = []
        self._names = Names(work.graph)
        self._size: ir.Value | None = None
        self._values: dict[ir.Value, _Traced] = {}
        self._merged: dict[ir.Value, tuple[int, int, int]] = {}  # axis, `outer`, size of the axis
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
        """Returns the concatenation of the rows: the first row of each repeated batch."""
        shape = rows[0].shape
        parts = (*shape[:axis], outer, self._batch, shape[axis] // outer // self._batch)
        parts += shape[axis + 1 :]
        firsts = [row.reshape(parts).take([0], axis + 1) for row in rows]
        new = np.concatenate(firsts, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
        return _Traced(rows, new, axis, outer)

    def _related(self, rows: list[Array], new: Array) -> _Traced | None:
        """Relates the result for all rows to those of each row; returns None if they differ."""
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
                    f"value '{value.name}' is read before a node computes it; sort the nodes "
                    "topologically"
                )
            return _Traced([array], array)
        return self._values[value]

    def _keep(self, value: ir.Value, traced: _Traced) -> None:
        """Records a value; its arrays are freed after the last node has read them."""
        self._values[value] = traced
        if traced.axis is not None:
            self._merged[value] = (traced.axis, traced.outer, traced.rows[0].shape[traced.axis])
        elif traced.sizes and traced.new.ndim == traced.rows[0].ndim:
            sizes = zip(traced.new.shape, traced.rows[0].shape, strict=True)
            self._uneven[value] = [a != b for a, b in sizes]
        elif traced.sizes:
            self._uneven[value] = []

    def follow(self, node: ir.Node) -> None:
        """Runs a node on each row and on all rows, and repairs it if the results differ.

        Raises:
            UnsupportedError: If it cannot be run or repaired.
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
            *found, again = (run(each) for each in (*feeds, feeds[0]))
        except CannotRunError as error:
            raise UnsupportedError(
                f"{describe(node)}: onnxruntime cannot run it alone ({cause_of(error)}), so a "
                "dynamic batch cannot be verified; export the model with a dynamic batch"
            ) from error
        pairs = zip(found[0], again, strict=True)
        if any(isinstance(a, np.ndarray) and not _equal(a, b) for a, b in pairs):
            raise UnsupportedError(
                f"{describe(node)}: its output is random, so a dynamic batch cannot be verified; "
                "replace it with its expected value, or remove it"
            )
        return found

    def _session(self, node: ir.Node, arrays: Mapping[ir.Value, Array]) -> _RunNode:
        """Opens a session of one node."""
        inputs, constants = [], []
        for value, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
                raise UnsupportedError(
                    f"{describe(node)}: its input '{value.name}' is not a numeric tensor, so a "
                    "dynamic batch cannot be verified; export the model with a dynamic batch"
                )
            if constant(value) is not None and array.nbytes <= _SMALL:
                constants.append(onnx.numpy_helper.from_array(array, value.name))
            else:
                kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                inputs.append(onnx.helper.make_tensor_value_info(value.name or "", kind, None))
        outputs = [onnx.helper.make_empty_tensor_value_info(v.name) for v in node.outputs if v.name]
        nodes = [ir.serde.serialize_node(node)]
        graph = onnx.helper.make_graph(nodes, "node", inputs, outputs, constants)
        run = opened(model_of(self._work, graph, self._functions))
        return lambda given: run({value.name or "": array for value, array in given.items()})

    # ----------------------------------------------------------------------------------- repairing

    def _repaired(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], rows: list[list[Array]]
    ) -> list[_Traced]:
        """Returns the outputs of a node, repaired so that a batch gives the results of its rows."""
        why = ""
        found: list[tuple[tuple[bool, int, bool], _Repair, list[_Traced]]] = []
        for repair in (_Repair(), *self._repairs(node, given, rows)):
            arrays = {v: t.new for v, t in given.items()} | repair.arrays
            try:
                new = self._session(node, arrays)(arrays)
            except CannotRunError as error:
                why = why or f"onnxruntime rejects it ({cause_of(error)})"
                continue
            outputs = [
                self._judged(node, given, [each[place] for each in rows], array)
                for place, array in enumerate(new)
            ]
            traced = [each for each in outputs if each is not None]
            if len(traced) == len(outputs):
                found.append((_order(node, given, traced[0]), repair, traced))
                if node.op_type != "Reshape":  # only Reshape may have several interpretations
                    break
            shapes = [(each.shape, rows[0][place].shape) for place, each in enumerate(new)]
            parted = next((i for i, each in enumerate(outputs) if each is None), 0)
            why = why or (
                f"its result {list(shapes[parted][0])} does not match the results of the rows, "
                f"{list(shapes[parted][1])} each"
            )
        if not found:
            fed = next((traced.source for traced in given.values() if traced.source), "")
            if fed:
                why += f" (it also depends on input '{fed}', which has no batch: see inputs=)"
            raise UnsupportedError(
                f"{describe(node)}: with a batch of {self._count} rows instead of {self._batch}, "
                f"{why}; only shapes of Reshape, Expand and Resize and constant states can be "
                "repaired, so export the model with a dynamic batch"
            )
        _, repair, outputs_of_it = min(found, key=lambda each: each[0])
        if repair.write is not None:
            self._told.append(f"{describe(node)} {repair.write()}")
        return outputs_of_it

    def _judged(
        self, node: ir.Node, given: Mapping[ir.Value, _Traced], rows: list[Array], new: Any
    ) -> _Traced | None:
        if not isinstance(new, np.ndarray):
            raise UnsupportedError(
                f"{describe(node)}: its output is a sequence, so a dynamic batch cannot be "
                "verified; export the model with a dynamic batch"
            )
        related = self._related(rows, new)
        by_size = any(traced.sizes for traced in given.values()) and new.dtype.kind in "biu"
        by_rows = any(traced.axis is not None for traced in given.values())
        if related is None and (node.op_type in ("Shape", "Size") or by_size or not by_rows):
            return _Traced(rows, new, sizes=True)
        return related

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
                    write = functools.partial(self._write_shape, node, index, place, size, given)
                    yield _Repair({shape: grown}, write)
            return
        own = [v for v in node.inputs if v is not None and given[v].same and not given[v].source]
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
        if not places:  # a repeated constant meets only a size, as in Expand
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
        """Yields constants repeated to the new batch size, if all their rows are equal."""
        firsts = {value: given[value].new.take([0], axis) for value, axis in axes.items()}
        if axes and all(
            given[value].new.shape[axis] == self._batch
            and bool((given[value].new == firsts[value]).all())
            for value, axis in axes.items()
        ):
            arrays = {v: np.repeat(firsts[v], self._count, axis) for v, axis in axes.items()}
            yield _Repair(arrays, lambda: self._write_expansions(node, axes, firsts))

    # ------------------------------------------------------------------------------------- writing

    def _tape(self, before: ir.Node) -> Tape:
        tape = Tape(self._graph, before=before, names=self._names)
        tape.scope = "free_batch/"
        return tape

    def _batch_size(self) -> ir.Value:
        """Returns the batch size as a vector of one element."""
        if self._size is None:
            value, axis = next(iter(self._axes.items()))
            tape = self._tape(next(iter(self._graph)))
            self._size = op.Gather(op.Shape(tape.tensor(value)), [axis]).value
        return self._size

    def _sizes(
        self, tape: Tape, before: Sequence[int], factor: int, behind: Sequence[int]
    ) -> Tensor:
        """Returns a shape with a multiple of the batch size in it."""
        size = tape.tensor(self._batch_size())
        parts: list[object] = [list(before)] if before else []
        parts.append(size * factor if factor > 1 else size)
        parts += [list(behind)] if behind else []
        return op.Concat(*parts, axis=0) if len(parts) > 1 else size

    def _write_shape(
        self, node: ir.Node, index: int, place: int, size: int, given: Mapping[ir.Value, _Traced]
    ) -> str:
        replaced = node.inputs[index]
        assert replaced is not None
        shape = [int(each) for each in given[replaced].new]
        tape = self._tape(node)
        source = None if node.inputs[0] is None else given[node.inputs[0]]
        fixed = node.op_type == "Reshape" and not node.attributes.get_int("allowzero", 0)
        copied = None if source is None or source.axis != place else source.rows[0].shape[place]
        factor = size // self._batch
        if fixed and (copied == size or -1 not in shape):
            marked = [*shape[:place], 0 if -1 in shape else -1, *shape[place + 1 :]]
            new = tape.constant(np.array(marked, np.int64))
        else:
            new = self._sizes(tape, shape[:place], factor, shape[place + 1 :])
        node.replace_input_with(index, new.value)
        drop_unread(replaced)
        sizes_shown = [str(each) for each in shape]
        sizes_shown[place] = f"{factor} × batch" if factor > 1 else "batch"
        return f"{shape} → [{', '.join(sizes_shown)}]"

    def _write_expansions(
        self, node: ir.Node, axes: Mapping[ir.Value, int], firsts: Mapping[ir.Value, Array]
    ) -> str:
        written = []
        for value, axis in axes.items():
            tape = self._tape(node)
            first = firsts[value]
            one = tape.tensor(value) if self._batch == 1 else tape.constant(first)
            shape = self._sizes(tape, [1] * axis, 1, [1] * (first.ndim - axis - 1))
            expanded = op.Expand(one, shape).value
            for index, each in enumerate(node.inputs):
                if each is value:
                    node.replace_input_with(index, expanded)
            drop_unread(value)
            written.append(f"'{value.name}' is repeated along axis {axis}")
        return ", ".join(written)

    def name_axes(self, dimension: str) -> None:
        """Writes the batch to the shapes of values.

        Raises:
            UnsupportedError: If an output depends on the batch size, but has no batch axis.
        """
        for value in self._graph.outputs:
            if not value.is_graph_input() and value in self._uneven:
                raise UnsupportedError(
                    f"output '{value.name}' depends on the batch size but has no batch axis; "
                    "remove it"
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
        for graph in subgraphs(self._graph):
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
        """Compares the outputs of the original and the new model.

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
                    f"output '{value.name}' of a batch of {len(alone)} rows differs from those of "
                    f"the rows, although every node agreed for {self._count} rows; export the "
                    "model with a dynamic batch"
                )
        logger.warning(
            "made the batch size of %d dynamic, verified with %d rows: %s",
            self._batch,
            len(alone),
            "; ".join(self._told),
        )


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


def _order(
    node: ir.Node, given: Mapping[ir.Value, _Traced], traced: _Traced
) -> tuple[bool, int, bool]:
    """Returns a sort key of an interpretation of Reshape, the most likely one first.

    A batch is hardly ever merged with the last axis, which has the features, is rarely the
    inner part of a merged axis, and mostly stays on its axis.
    """
    if traced.axis is None or node.inputs[0] is None:
        return (False, 0, False)
    last = traced.axis == traced.new.ndim - 1 and traced.new.ndim > 1
    return (last, traced.outer, traced.axis != given[node.inputs[0]].axis)
