"""Analyzes and rewrites graphs: dependencies, copies, replacement, removal."""

from __future__ import annotations

from collections.abc import Collection, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import onnx_ir as ir

from ortops.graph.files.messages import MICROSOFT
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs, nodes_of, subgraphs
from ortops.graph.operators import is_random
from ortops.graph.tensor import Tape, Tensor, op

_T = TypeVar("_T")

_PLACE = "ortops.place"
"""The key in ``value.meta`` of outputs of a graph of where they were last, in its ``outputs``."""

Steps: TypeAlias = Generator["Steps[Any]", Any, _T]
"""A function that yields calls of such functions in place of calling them; see `unrolled`."""

# ---------------------------------------------------------------------------------------- reading


def unrolled(call: Steps[_T]) -> _T:
    """Runs a recursive function without Python's recursion: graphs may be deeper than its limit.

    Example:
        >>> def depth(value: ir.Value) -> Steps[int]:
        ...     node = value.producer()
        ...     return 0 if node is None else 1 + (yield depth(node.inputs[0]))
        >>> value = ir.Value()
        >>> for _ in range(5000):
        ...     (value,) = ir.Node("", "Neg", [value]).outputs
        >>> unrolled(depth(value))
        5000
    """
    stack: list[Steps[Any]] = [call]
    result: Any = None
    while stack:
        try:
            inner = stack[-1].send(result)
        except StopIteration as end:
            stack.pop()
            result = end.value
        else:
            stack.append(inner)
            result = None
    returned: _T = result
    return returned


def describe(node: ir.Node) -> str:
    """Returns ``<op> node '<name>'``; the first output replaces a missing name."""
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"{node.op_type} node '{name}'"


def producer_of(value: ir.Value | None, *op_types: str, domain: str = "") -> ir.Node | None:
    """Returns the node that computes a value.

    Args:
        value: The value; there is no node if it is None.
        op_types: The operators that the node may have; any if none are given.
        domain: Their domain.

    Returns:
        The node; None if another operator computes the value, or no node does.
    """
    node = None if value is None else value.producer()
    if node is None or node.domain != domain or (op_types and node.op_type not in op_types):
        return None
    return node


def mapped_tensor(value: ir.Value) -> ir.Value | None:
    """Returns the tensor that a ZipMap makes maps from; None for other values."""
    node = producer_of(value, "ZipMap", domain="ai.onnx.ml")
    return None if node is None else node.inputs[0]


def is_float(value: ir.Value) -> bool:
    """Whether a value is floating-point or of unknown type."""
    return value.dtype is None or value.dtype.is_floating_point()


def rank_of(value: ir.Value | None) -> int | None:
    """Returns the number of axes of a value; None if it is unknown, or if there is no value."""
    return None if value is None or value.shape is None else len(value.shape)


def permutation_of(node: ir.Node) -> tuple[int, ...] | None:
    """Returns the order of axes of a Transpose; None if its rank is unknown, or of other nodes."""
    if node.op_type != "Transpose" or node.domain:
        return None
    rank = rank_of(node.inputs[0])
    reverse = None if rank is None else range(rank)[::-1]
    perm = node.attributes.get_ints("perm", reverse)
    return None if perm is None else tuple(perm)


def node_after(node: ir.Node) -> ir.Node | None:
    """Returns the next node in the graph, or None."""
    graph = node.graph
    assert graph is not None
    following = iter(graph)
    for other in following:
        if other is node:
            return next(following, None)
    return None


def has_one_reader(value: ir.Value) -> bool:
    """Whether a value has exactly one use and is not an output of its graph."""
    return len(value.uses()) == 1 and not value.is_graph_output()


def attribute_value(attribute: ir.Attr) -> Any:
    """Returns an attribute as a Python value; a tensor as a numpy array."""
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    return attribute.value


def attribute_values(node: ir.Node) -> dict[str, Any]:
    """Returns the attributes of a node as Python values, by name."""
    return {name: attribute_value(attribute) for name, attribute in node.attributes.items()}


def all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yields the nodes of a graph, each followed by the nodes of its subgraphs."""
    for node in graph:
        yield node
        for inner in inner_graphs(node):
            yield from all_nodes(inner)


def read_inputs(node: ir.Node) -> list[ir.Value]:
    """Returns all values that a node reads, including those that its subgraphs capture."""
    values = [value for value in node.inputs if value is not None]
    for graph in inner_graphs(node):
        inner: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
        for child in graph:
            values += [value for value in read_inputs(child) if value not in inner]
            inner.update(child.outputs)
        values += [value for value in graph.outputs if value not in inner]
    return values


def dependent_values(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """Returns the values that depend on given ones, including those.

    Args:
        nodes: Nodes in topological order.
        sources: The given values.
    """
    reached = set(sources)
    for node in nodes:
        if any(value in reached for value in read_inputs(node)):
            reached.update(node.outputs)
    return reached


def ancestor_nodes(values: ir.Value | Iterable[ir.Value], stop: set[ir.Value]) -> set[ir.Node]:
    """Returns the nodes that compute values, without the ancestors of the values in ``stop``."""
    found: set[ir.Node] = set()
    pending = [values] if isinstance(values, ir.Value) else list(values)
    while pending:
        current = pending.pop()
        node = None if current in stop else current.producer()
        if node is not None and node not in found:
            found.add(node)
            pending += read_inputs(node)
    return found


def values_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Returns the inputs, the initializers and the outputs of nodes of a graph by name."""
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    return {value.name: value for value in values if value.name}


def nodes_between(
    nodes: Iterable[ir.Node], cut: Iterable[ir.Value], ends: ir.Value | Iterable[ir.Value]
) -> list[ir.Node]:
    """Returns the nodes that compute values from others, in topological order.

    Args:
        nodes: Nodes in topological order.
        cut: The values to start from; the nodes that compute them are not included.
        ends: The values to compute.
    """
    wanted = ancestor_nodes(ends, set(cut))
    return [node for node in nodes if node in wanted]


# -------------------------------------------------------------------------------------- rewriting


def tape_before(node: ir.Node, names: Names) -> Tape:
    """Returns a tape that inserts nodes before a node of a graph, and names them after it."""
    assert isinstance(node.graph, ir.Graph)
    tape = Tape(node.graph, before=node, names=names)
    tape.scope = f"{node.name or node.op_type}/"
    return tape


def emit(
    tape: Tape,
    domain: str,
    op_type: str,
    inputs: Sequence[Tensor | None],
    shapes: Sequence[Iterable[int | ir.SymbolicDim] | None],
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """Appends a float32 node of an operator that onnx does not know, and imports its domain.

    Args:
        tape: The tape.
        domain: The operator's domain.
        op_type: The operator.
        inputs: Its inputs; None for absent ones.
        shapes: The shapes of its outputs; None for one that is unknown.
        **attributes: Its attributes; None for absent ones.
    """
    node = ir.Node(
        domain,
        op_type,
        [None if tensor is None else tensor.value for tensor in inputs],
        [_attribute(name, value) for name, value in attributes.items() if value is not None],
        num_outputs=len(shapes),
    )
    tape.append(node)
    if domain.startswith(MICROSOFT):  # private domains are gone when the graph runs
        tape.graph.opset_imports.setdefault(domain, 1)
    for value, shape in zip(node.outputs, shapes, strict=True):
        value.type = ir.TensorType(ir.DataType.FLOAT)
        value.shape = None if shape is None else ir.Shape(shape)
    return tuple(tape.tensor(value) for value in node.outputs)


def _attribute(name: str, value: float | str | Sequence[int]) -> ir.Attr:
    """Returns an attribute; `ir.convenience` takes as long as all else of a new node together."""
    match value:
        case int():
            return ir.AttrInt64(name, value)
        case float():
            return ir.AttrFloat32(name, value)
        case str():
            return ir.AttrString(name, value)
        case _:
            return ir.AttrInt64s(name, value)


def emit_one(
    domain: str,
    op_type: str,
    inputs: Sequence[Tensor | None],
    shape: Iterable[int | ir.SymbolicDim] | None,
    **attributes: Any,
) -> Tensor:
    """Appends such a node with one output; see `emit`."""
    tape = next(x.tape for x in inputs if x is not None)
    return emit(tape, domain, op_type, inputs, [shape], **attributes)[0]


def replace_value(tape: Tape, old: ir.Value, new: Tensor) -> None:
    """Replaces a node's output by a new tensor, which gets its name.

    Args:
        tape: The tape of the new tensor.
        old: The output to replace.
        new: The new tensor.
    """
    value = new.value
    renamable = tape.emitted(value) and value not in tape.put_out
    if not renamable or value.const_value is not None:
        value = op.Identity(new).with_shape_of(new).value
    tape.put_out.add(value)
    take_place(old, value)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Replaces a value by another one, which gets its name."""
    name, old.name = old.name, None
    new.name = name
    while old.is_graph_output():
        assert old.graph is not None
        place = _place(old.graph.outputs, old)
        old.graph.outputs[place] = new
        new.meta[_PLACE] = place
    old.replace_all_uses_with(new)


def _place(outputs: Sequence[ir.Value], value: ir.Value) -> int:
    """Returns the index of an output; a search for each of thousands would take quadratic time."""
    place: int = value.meta.get(_PLACE, 0)
    if place >= len(outputs) or outputs[place] is not value:
        for index, each in enumerate(outputs):
            each.meta[_PLACE] = index
        place = value.meta[_PLACE]
    return place


def copy_node(node: ir.Node, copies: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """Returns a copy of a node that reads ``copies[v]`` in place of ``v``.

    The copy and its outputs have no names, except absent outputs, whose name is empty.
    """
    copy = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else copies.get(value, value) for value in node.inputs],
        [_copy_attribute(attribute, copies) for attribute in node.attributes.values()],
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
    )
    for old, new in zip(node.outputs, copy.outputs, strict=True):
        new.type = old.type
        new.shape = None if old.shape is None else old.shape.copy()
        new.const_value = old.const_value
        if old.name == "":
            new.name = ""
    return copy


def _copy_attribute(attribute: ir.Attr, copies: Mapping[ir.Value, ir.Value]) -> ir.Attr:
    match attribute.type:
        case ir.AttributeType.GRAPH:
            graph = _copy_graph(attribute.as_graph(), copies)
            return ir.Attr(attribute.name, attribute.type, graph)
        case ir.AttributeType.GRAPHS:
            graphs = [_copy_graph(graph, copies) for graph in attribute.as_graphs()]
            return ir.Attr(attribute.name, attribute.type, graphs)
        case _:
            return attribute


def _copy_graph(graph: ir.Graph, copies: Mapping[ir.Value, ir.Value]) -> ir.Graph:
    copy = graph.clone(allow_outer_scope_values=True)
    for inner in (copy, *subgraphs(copy)):
        for node in inner:
            for index, value in enumerate(node.inputs):
                if value is not None and value in copies:
                    node.replace_input_with(index, copies[value])
        for index, value in enumerate(inner.outputs):
            if value in copies:
                inner.outputs[index] = copies[value]
    return copy


def rename_within(graph: ir.Graph, names: Names, prefix: str = "") -> None:
    """Gives the values of a copied subgraph names of their own, as a file requires.

    Args:
        graph: The subgraph.
        names: The names used in the model.
        prefix: What the new names begin with.
    """
    for each in (graph, *subgraphs(graph)):
        outputs = (value for node in each for value in node.outputs if value.name)
        for value in (*each.inputs, *each.initializers.values(), *outputs):
            value.name = names.unique(f"{prefix}{value.name}")


# --------------------------------------------------------------------------------------- removing


def remove_node(node: ir.Node) -> None:
    """Removes a node whose outputs are unused."""
    assert isinstance(node.graph, ir.Graph)
    disconnect(node)
    node.graph.remove(node, safe=True)


def remove_unread(nodes: Collection[ir.Node]) -> None:
    """Removes those of some nodes whose outputs are unused, and thereby those that they alone read.

    Uses by nodes in the subgraphs of removed nodes do not count.
    """
    pending = [node for node in nodes if not _is_read(node)]
    removable = set(nodes) if pending else set()
    while pending:
        node = pending.pop()
        graph = node.graph
        if graph is None:
            continue
        sources = {value.producer() for value in read_inputs(node)}
        disconnect(node)
        node.graph = None  # onnx-ir's own function scans all outputs of the graph each time
        graph._nodes.remove(node)
        pending += [each for each in sources if each in removable and not _is_read(each)]


def _is_read(node: ir.Node) -> bool:
    """Whether an output of a node is used; onnx-ir's own function copies all uses."""
    for value in node.outputs:  # noqa: SIM110 - a hot path
        if value._uses or value.is_graph_output():
            return True
    return False


def sort(graph: ir.Graph) -> None:
    """Puts the nodes of a graph and of its subgraphs in topological order, a stable one.

    onnx-ir's own function takes long even if they are in order already.

    Raises:
        ValueError: If a tensor is computed from itself.
    """
    seen: set[ir.Node | None] = {None}
    for node in graph:
        if inner_graphs(node) or any(
            v is not None and v.producer() not in seen for v in node.inputs
        ):
            graph.sort()
            return
        seen.add(node)


def disconnect(node: ir.Node) -> None:
    """Disconnects a node and its subgraphs from what they read, as if it were removed.

    For each input, onnx-ir's own function copies all of them.
    """
    for index, value in enumerate(node.inputs):
        if value is not None:
            value._remove_usage(node, index)
    node._inputs = ()
    for graph in inner_graphs(node):
        for child in graph:
            disconnect(child)
        graph.outputs.clear()


def prune(graph: ir.Graph) -> None:
    """Removes nodes, inputs and initializers on which no output depends."""
    remove_unread(nodes_of(graph))
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
    remove_unread_inputs(graph)


def set_outputs(graph: ir.Graph, values: Sequence[ir.Value]) -> None:
    """Makes tensors the only outputs; removes what they do not need, except inputs."""
    inputs = list(graph.inputs)
    graph.outputs[:] = values
    prune(graph)
    graph.inputs[:] = inputs


def remove_unread_inputs(graph: ir.Graph, names: Container[str | None] | None = None) -> None:
    """Removes inputs that nothing reads: those with given names, or all."""
    kept = [
        value
        for value in graph.inputs
        if value.uses() or value.is_graph_output() or not (names is None or value.name in names)
    ]
    graph.inputs[:] = kept


def merge_equal_nodes(graph: ir.Graph) -> None:
    """Eliminates common subexpressions; nodes that compute outputs of the graph stay.

    Args:
        graph: A graph in topological order; its subgraphs are not modified.
    """
    known: dict[object, ir.Node] = {}
    equal: list[ir.Node] = []
    for node in nodes_of(graph):
        if (
            is_random(node.op_type)
            or inner_graphs(node)
            or any(v.is_graph_output() for v in node.outputs)
        ):
            continue
        key = (
            *node.op_identifier(),
            node.inputs,
            tuple([value.name == "" for value in node.outputs]),
            *[(name, _content(each)) for name, each in sorted(node.attributes.data.items())],
        )
        first = known.setdefault(key, node)
        if first is not node:
            for old, new in zip(node.outputs, first.outputs, strict=True):
                old.replace_all_uses_with(new)
            equal.append(node)
    remove_unread(equal)


_PLAIN = {
    getattr(ir.AttributeType, kind + many)
    for kind in ("INT", "FLOAT", "STRING")
    for many in ("", "S")
}


def _content(attribute: ir.Attr) -> object:
    """Returns what is equal for equal attributes only, unlike numbers: -0.0 is not 0.0."""
    if attribute.is_ref():
        return attribute.type, attribute.ref_attr_name
    if attribute.type in _PLAIN:
        return attribute.type, repr(attribute.value)
    # `ir.to_proto` takes ten times as long to find out what it is given.
    return ir.serde.serialize_attribute(attribute).SerializeToString()


def remove_defaults(graph: ir.Graph, variables: Sequence[str]) -> None:
    """Removes the default values of graph inputs, so that they must be fed."""
    for name in variables:
        if name in graph.initializers:
            graph.initializers.pop(name).const_value = None
