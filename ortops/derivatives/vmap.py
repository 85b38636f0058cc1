"""Applies a model to all entries along a new axis of its inputs."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import onnx_ir as ir

from ortops._common.arguments import whole_number
from ortops.derivatives.batching import Same, apply, expand_axis, is_supported, moved
from ortops.engine.lowering import infer_types
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.autodiff.expansion import expand_nodes
from ortops.graph.autodiff.rules import RULES
from ortops.graph.constants import Dim
from ortops.graph.edit import copy_node, disconnect, read_inputs, remove_unread
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.tensor import Tape, Tensor, op

Axes: TypeAlias = int | Sequence[int | None] | Mapping[str, int | None] | None
"""An axis for all tensors, one for each, or axes by name; None for tensors without the axis."""

_SYMBOL = "mapped"


def add_axis(model: ir.Model, in_axes: Axes = 0, out_axes: Axes = 0, length: Dim = None) -> None:
    """Adds an axis to inputs and outputs of a model, in place; see `ortops.derivatives.vmap`.

    Args:
        model: A normalized model with inferred types and without Gradient nodes.
        in_axes: See `ortops.derivatives.vmap`.
        out_axes: See `ortops.derivatives.vmap`.
        length: The length of the axis; by default, a new symbol.

    Raises:
        ArgumentError: If the axes are invalid.
        ModelError: If an input or output cannot have the axis.
    """
    graph = model.graph
    inputs = {value.name or "": value for value in graph.inputs}
    required = [name for name in inputs if name not in graph.initializers]
    of_inputs = _axes("in_axes", in_axes, required, None, list(inputs))
    mapped = {inputs[name]: axis for name, axis in of_inputs.items() if axis is not None}
    if not mapped:
        raise ArgumentError(f"in_axes must map at least one input, got {in_axes!r}")
    while expand_nodes(model, list(_without_rule(graph, mapped)), RULES):
        infer_types(model)
    names = [value.name or "" for value in graph.outputs]
    of_outputs = _axes("out_axes", out_axes, names, 0)
    work = _Mapping(graph, Names(graph), _symbol(graph) if length is None else length)
    work.add_inputs(mapped)
    work.apply()
    work.put_out([of_outputs[name] for name in names])
    work.clean()


def _without_rule(graph: ir.Graph, mapped: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """Yields the nodes that no batching rule supports, in order."""
    reached = set(mapped)
    for node in graph:
        places = {place for place, value in enumerate(node.inputs) if value in reached}
        if not reached.isdisjoint(read_inputs(node)):
            reached.update(node.outputs)
        tensors = (value for value in (*node.inputs, *node.outputs) if value is not None)
        if places and not is_supported(node, places) and all(map(_is_tensor, tensors)):
            yield node


class _Mapping:
    """A graph that gets an axis.

    Values of the graph are those of one entry. Nodes for all entries are appended; then the nodes
    of one entry are not read anymore. A node without a batching rule runs in a Scan: its outputs
    for all entries are values without a producer until the Scans are emitted. Nodes are in one Scan
    unless nodes with rules are between them.

    Attributes:
        graph: The graph.
        tape: The tape for new nodes.
        length: The length of the axis.
        size: The length of the axis at run time, a vector of one element.
        mapped: The tensors of all entries, with the axis in front, by the values of one entry.
        same: Tensors without the axis that replace values of one entry.
    """

    size: Tensor

    def __init__(
        self, graph: ir.Graph, names: Names, length: Dim, outer: _Mapping | None = None
    ) -> None:
        self.graph = graph
        self.tape = Tape(graph, names=names)
        self.length = length
        self.mapped: MutableMapping[ir.Value, Tensor] = {}
        self.same: MutableMapping[ir.Value, Tensor] = {}
        if outer is not None:
            self.size = self.tape.tensor(outer.size.value)
            self.mapped, self.same = ChainMap({}, outer.mapped), ChainMap({}, outer.same)
        self._nodes = list(graph)
        self._outputs = [value.name for value in graph.outputs]
        self._scans: dict[int, list[ir.Node]] = {}
        self._scan_of: dict[ir.Value, int] = {}
        self._ready: dict[ir.Value, int] = {}

    def add_inputs(self, axes: Mapping[ir.Value, int]) -> None:
        """Gives inputs the axis."""
        with self.tape:
            given = {value: self._replaced(value, axis) for value, axis in axes.items()}
            (value, first), *_ = given.items()
            axis = axes[value] % (len(first.shape) if first.shape is not None else 1)
            self.size = op.Shape(first, start=axis, end=axis + 1).with_shape([1])
            for value, tensor in given.items():
                self.mapped[value] = _moved(tensor, axes[value], 0)

    def _replaced(self, value: ir.Value, axis: int) -> Tensor:
        """Replaces an input by one with the axis."""
        if not isinstance(value.type, ir.TensorType):
            raise ModelError(
                f"in_axes: input '{value.name}' must be a tensor to be mapped, got type "
                f"{value.type}; use None for it"
            )
        name, shape = value.name or "", None
        if value.shape is not None:
            dims = list(value.shape)
            dims.insert(_checked("in_axes", name, axis, len(dims) + 1), _dim(self.length))
            shape = ir.Shape(dims)
        elif axis:
            raise ModelError(
                f"in_axes: the rank of input '{name}' is unknown, so its axis must be 0, got {axis}"
            )
        if name in self.graph.initializers:
            self.graph.initializers.pop(name).const_value = None
        new = ir.Value(name=name, type=value.type, shape=shape)
        value.name = self.tape.names.unique(f"{name}_entry")
        self.graph.inputs[self.graph.inputs.index(value)] = new
        return self.tape.tensor(new)

    # ------------------------------------------------------------------------------------ nodes

    def apply(self) -> None:
        """Appends the nodes of all entries."""
        with self.tape:
            for node in self._nodes:
                read = [v for v in read_inputs(node) if v in self.mapped or v in self.same]
                if read:
                    self._apply(node, read)
            for number in sorted(self._scans, reverse=True):  # those that read others first
                self._emit_scan(self._scans[number])

    def _apply(self, node: ir.Node, read: Sequence[ir.Value]) -> None:
        start = len(self.tape.nodes)
        self.tape.scope = f"{node.name or node.op_type}/"
        ready = max(self._ready.get(v, 0) + (v in self._scan_of) for v in read)
        found: Sequence[Tensor | Same] | None
        if not any(value in self.mapped for value in read):
            found = [Same(self.tape.tensor(v)) for v in self._copied(node, self.tape, {}).outputs]
        else:
            given = [None if v is None or v.name == "" else self._tensor(v) for v in node.inputs]
            is_mapped = [value in self.mapped for value in node.inputs]
            found = apply(self.tape, node, given, is_mapped, self.size) or self._in_graphs(node)
        if found is None:
            ready = max(self._ready.get(v, 0) for v in read)
            self._scans.setdefault(ready, []).append(node)
            found = [self._tensor_of_scan(value, ready) for value in node.outputs]
        for value, result in zip(node.outputs, found, strict=False):
            self._ready[value] = ready
            if isinstance(result, Same):
                self.same[value] = result.tensor
            else:
                self.mapped[value] = self._shaped(result, value)
        for new in self.tape.nodes[start:]:
            new.metadata_props.update(node.metadata_props)

    def _tensor(self, value: ir.Value) -> Tensor:
        """Returns the tensor that nodes for all entries read for a value of one entry."""
        found = self.mapped.get(value, self.same.get(value))
        return self.tape.tensor(value if found is None else found.value)

    def _tensor_of_scan(self, value: ir.Value, number: int) -> Tensor:
        """Returns a tensor that a Scan will compute."""
        self._scan_of[value] = number
        name = self.tape.names.unique(f"{value.name}_mapped") if value.name else ""
        return self.tape.tensor(ir.Value(name=name, type=value.type))

    def _shaped(self, tensor: Tensor, value: ir.Value) -> Tensor:
        """Records the shape that follows from that of one entry."""
        if value.shape is None:
            return tensor
        dims: list[Dim | ir.SymbolicDim] = [_dim(self.length), *value.shape]
        if tensor.shape is not None and len(tensor.shape) == len(dims):
            pairs = zip(tensor.shape, dims, strict=True)
            dims = [a if isinstance(a, int) and not isinstance(b, int) else b for a, b in pairs]
        tensor.value.shape = ir.Shape(dims)
        tensor.value.type = tensor.value.type or value.type
        return tensor

    def _copied(self, node: ir.Node, tape: Tape, local: Mapping[ir.Value, ir.Value]) -> ir.Node:
        """Appends a copy of a node to a tape."""
        same = {value: tensor.value for value, tensor in self.same.items()}
        copy = copy_node(node, {**same, **local})
        copy.metadata_props.update(node.metadata_props)
        tape.append(copy)
        return copy

    def _in_graphs(self, node: ir.Node) -> Sequence[Tensor] | None:
        """Appends an If or Scan whose graphs compute all entries at once, if they need no Scan.

        The condition of the If must be the same for all entries.
        """
        is_scan = node.op_type == "Scan"
        if node.domain or not (is_scan or node.op_type == "If"):
            return None
        if not is_scan and node.inputs[0] in self.mapped:
            return None
        copy = copy_node(node, {value: tensor.value for value, tensor in self.same.items()})
        sequences = copy.attributes.get_int("num_scan_inputs", 0)
        states = len(node.inputs) - sequences
        takes = [is_scan and (i < states or v in self.mapped) for i, v in enumerate(node.inputs)]
        for graph in inner_graphs(copy):
            inner = _Mapping(graph, self.tape.names, self.length, self)
            chosen = [value for value, taken in zip(graph.inputs, takes, strict=False) if taken]
            if not inner.map_graph(chosen):
                disconnect(copy)
                return None
        for index, value in enumerate(node.inputs):
            if takes[index] and value is not None:
                tensor = self._tensor(value)
                if value not in self.mapped:
                    if tensor.shape is None:
                        disconnect(copy)
                        return None
                    tensor = expand_axis(tensor, self.size)
                copy.replace_input_with(index, tensor.value)
        if is_scan:
            _shift_scan_axes(copy, takes[states:], states)
        self.tape.append(copy)
        return [self.tape.tensor(value) for value in copy.outputs]

    def map_graph(self, inputs: Sequence[ir.Value]) -> bool:
        """Maps a subgraph with given mapped inputs; returns False if that needs a Scan."""
        for value in inputs:
            if not isinstance(value.type, ir.TensorType) or value.shape is None:
                return False
            self.mapped[value] = self._replaced(value, 0)
        self.apply()
        values = list(self.graph.outputs)
        if self._scans or not all(
            _is_tensor(v) and self._tensor(v).shape is not None for v in values
        ):
            return False
        self.graph.outputs.clear()
        with self.tape:
            for value in values:
                self.graph.outputs.append(op.Identity(self._output(value, 0)).value)
        self.clean()
        return True

    # ------------------------------------------------------------------------------------ scans

    def _emit_scan(self, nodes: Sequence[ir.Node]) -> None:
        """Appends a Scan that runs nodes for each entry."""
        nodes = self._with_sequences(nodes)
        self.tape.scope = ""
        body = self.tape.subgraph(self.tape.names.unique("entry"))
        copies: dict[ir.Value, ir.Value] = {}
        inputs: list[ir.Value] = []
        outputs: list[ir.Value] = []
        for node in nodes:
            for value in read_inputs(node):
                if value in self.mapped and value not in copies:
                    name = self.tape.names.unique(f"{value.name}_entry")
                    copies[value] = ir.Value(name=name, type=value.type, shape=value.shape)
                    body.graph.inputs.append(copies[value])
                    inputs.append(self.mapped[value].value)
            copy = self._copied(node, body, copies)
            copies.update(zip(node.outputs, copy.outputs, strict=True))
        for node in nodes:
            for value in node.outputs:
                result = self.mapped[value].value
                wanted = result.uses() or value.is_graph_output()
                if wanted and result.producer() is None and _is_tensor(value):
                    body.graph.outputs.append(copies[value])
                    outputs.append(result)
        attributes = [ir.AttrGraph("body", body.graph)]
        attributes.append(ir.AttrInt64("num_scan_inputs", len(inputs)))
        self.tape.append(ir.Node("", "Scan", inputs, attributes, outputs=outputs))

    def _with_sequences(self, nodes: Sequence[ir.Node]) -> list[ir.Node]:
        """Adds the nodes of other Scans that compute sequences, which a Scan cannot return."""
        found, pending = set(nodes), list(nodes)
        while pending:
            for value in read_inputs(pending.pop()):
                node = value.producer()
                if value in self._scan_of and not _is_tensor(value) and node not in found:
                    assert node is not None
                    found.add(node)
                    pending.append(node)
        return [node for node in self._nodes if node in found]

    # ---------------------------------------------------------------------------------- outputs

    def put_out(self, axes: Sequence[int | None]) -> None:
        """Makes the tensors of all entries the outputs."""
        self.tape.scope = ""
        old = list(self.graph.outputs)
        self.graph.outputs.clear()
        with self.tape:
            for value, axis, name in zip(old, axes, self._outputs, strict=True):
                tensor = self._output(value, axis)
                if tensor.value is value or tensor.value.name == name:
                    self.graph.outputs.append(tensor.value)
                    continue
                if value.producer() is not None:
                    value.name = self.tape.names.unique(f"{name}_entry")
                if tensor.value.producer() is None or tensor.value.is_graph_output():
                    tensor = op.Identity(tensor).with_shape_of(tensor)
                held = (*self.graph.inputs, *self.graph.initializers.values())
                taken = any(given.name == name for given in held)
                tensor.value.name = self.tape.names.unique(name or "") if taken else name
                self.graph.outputs.append(tensor.value)

    def _output(self, value: ir.Value, axis: int | None) -> Tensor:
        """Returns an output with the axis."""
        tensor = self._tensor(value)
        if not _is_tensor(value) and (axis is not None or value in self.mapped):
            raise ModelError(
                f"out_axes: output '{value.name}' must be a tensor, got type {value.type}; select "
                "other outputs"
            )
        if axis is None:
            if value in self.mapped:
                raise ModelError(
                    f"out_axes: output '{value.name}' depends on mapped inputs, so it needs an "
                    "axis, got None"
                )
            return tensor
        if value not in self.mapped:
            if tensor.shape is None:
                raise ModelError(
                    f"out_axes: output '{value.name}' does not depend on mapped inputs and has an "
                    "unknown rank; use None for it"
                )
            tensor = self._shaped(expand_axis(tensor, self.size), value)
        if tensor.shape is None:
            if axis:
                raise ModelError(
                    f"out_axes: the rank of output '{value.name}' is unknown, so its axis must be "
                    f"0, got {axis}"
                )
            return tensor
        return _moved(tensor, 0, _checked("out_axes", value.name, axis, len(tensor.shape)))

    def clean(self) -> None:
        """Removes the nodes of one entry, and sorts the others."""
        self.graph.sort()
        remove_unread(list(self.graph))


def _shift_scan_axes(node: ir.Node, mapped: Sequence[bool], states: int) -> None:
    """Sets the axes of a Scan so that slices have the new axis in front."""
    given = node.attributes
    inputs = given.get_ints("scan_input_axes") or [0] * len(mapped)
    outputs = given.get_ints("scan_output_axes") or [0] * (len(node.outputs) - states)
    shifted = [a + (on and a >= 0) for a, on in zip(inputs, mapped, strict=True)]
    given.add(ir.AttrInt64s("scan_input_axes", shifted))
    given.add(ir.AttrInt64s("scan_output_axes", [a + (a >= 0) for a in outputs]))


def _axes(
    what: str,
    given: Axes,
    required: Sequence[str],
    default: int | None,
    known: Sequence[str] | None = None,
) -> dict[str, int | None]:
    """Returns the axes by name.

    Args:
        what: What messages call the argument.
        given: The argument.
        required: The tensors in their order.
        default: The axis of tensors that a dict lacks.
        known: The tensors that a dict may name; by default, ``required``.
    """
    found: dict[str, Any]
    if isinstance(given, Mapping):
        known = required if known is None else known
        for name in given:
            if name not in known:
                raise ArgumentError(f"{what}: no tensor '{name}'; {did_you_mean(str(name), known)}")
        found = {**dict.fromkeys(required, default), **given}
    elif isinstance(given, tuple | list):
        if len(given) != len(required):
            raise ArgumentError(
                f"{what} must have one axis for each of {', '.join(required)}, got {len(given)}"
            )
        found = dict(zip(required, given, strict=True))
    else:
        found = dict.fromkeys(required, given)
    return {
        name: None if axis is None else whole_number(f"{what}: the axis of '{name}'", axis)
        for name, axis in found.items()
    }


def _checked(what: str, name: str | None, axis: int, rank: int) -> int:
    """Returns an axis of a tensor as a number from the front."""
    if not -rank <= axis < rank:
        raise ArgumentError(
            f"{what}: the axis of '{name}' must be between {-rank} and {rank - 1}, because it has "
            f"{rank} axes including the mapped one, got {axis}"
        )
    return axis % rank


def _moved(tensor: Tensor, axis: int, place: int) -> Tensor:
    """Moves one axis of a tensor."""
    if tensor.shape is None:
        return tensor
    return moved(tensor, axis % tensor.ndim, place)


def _symbol(graph: ir.Graph) -> str:
    """Returns a name for the axis that no dimension has."""
    taken = Names()
    for value in (*graph.inputs, *(value for node in graph for value in node.outputs)):
        for dim in value.shape or ():
            taken.take(str(dim))
    return taken.unique(_SYMBOL)


def _dim(length: Dim) -> int | ir.SymbolicDim:
    return length if isinstance(length, int) else ir.SymbolicDim(length)


def _is_tensor(value: ir.Value) -> bool:
    return isinstance(value.type, ir.TensorType | None)
