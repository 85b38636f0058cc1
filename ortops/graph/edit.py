"""Analyzes and rewrites graphs: dependencies, copies, replacement, removal."""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import onnx_ir as ir

from ortops.graph.operators import is_random
from ortops.graph.tensor import Tape, Tensor, op

_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS

_T = TypeVar("_T")

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


def inner_graphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the subgraphs of a node: its branches, or the body of a loop."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.data.values():  # a hot path: the inner dict is faster
        kind = attribute.type
        if kind == _GRAPH:
            graphs.append(attribute.as_graph())
        elif kind == _GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


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
        old.graph.outputs[old.graph.outputs.index(old)] = new
    old.replace_all_uses_with(new)


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
    for inner in (copy, *copy.subgraphs()):
        for node in inner:
            for index, value in enumerate(node.inputs):
                if value is not None and value in copies:
                    node.replace_input_with(index, copies[value])
        for index, value in enumerate(inner.outputs):
            if value in copies:
                inner.outputs[index] = copies[value]
    return copy


# --------------------------------------------------------------------------------------- removing


def remove_node(node: ir.Node) -> None:
    """Removes a node whose outputs are unused."""
    assert isinstance(node.graph, ir.Graph)
    disconnect(node)
    node.graph.remove(node, safe=True)


def remove_unread(nodes: Sequence[ir.Node]) -> None:
    """Removes those of some nodes, given in topological order, whose outputs are unused.

    Uses by nodes in the subgraphs of removed nodes do not count.
    """
    unread: dict[ir.Node, None] = {}
    gone: set[ir.Node] = set()  # the unread nodes, and the nodes in their subgraphs
    for node in reversed(nodes):
        if node.graph is not None and not any(
            value.is_graph_output() or any(user not in gone for user, _ in value.uses())
            for value in node.outputs
        ):
            unread[node] = None
            gone.add(node)
            for inner in inner_graphs(node):
                gone.update(all_nodes(inner))
    by_graph: dict[Any, list[ir.Node]] = {}
    for node in unread:  # subgraphs first, because they read values of outer graphs
        members = by_graph.pop(node.graph, [])
        members.append(node)
        by_graph[node.graph] = members
    for graph, members in by_graph.items():
        for node in members:
            disconnect(node)
        graph.remove(members, safe=True)  # in one call, because each scans all outputs of the graph


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
    remove_unread(list(graph))
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)
    remove_unread_inputs(graph)


def remove_unread_inputs(graph: ir.Graph, names: Container[str | None] | None = None) -> None:
    """Removes inputs that nothing reads: those with given names, or all."""
    kept = [
        value
        for value in graph.inputs
        if value.uses() or value.is_graph_output() or not (names is None or value.name in names)
    ]
    graph.inputs.clear()
    graph.inputs.extend(kept)


def merge_equal_nodes(graph: ir.Graph) -> None:
    """Eliminates common subexpressions; nodes that compute outputs of the graph stay.

    Args:
        graph: A graph in topological order; its subgraphs are not modified.
    """
    known: dict[object, ir.Node] = {}
    equal: list[ir.Node] = []
    for node in graph:
        if (
            is_random(node.op_type)
            or inner_graphs(node)
            or any(v.is_graph_output() for v in node.outputs)
        ):
            continue
        key = (
            *node.op_identifier(),
            tuple(node.inputs),
            tuple(value.name == "" for value in node.outputs),
            *sorted(ir.to_proto(a).SerializeToString() for a in node.attributes.values()),
        )
        first = known.setdefault(key, node)
        if first is not node:
            for old, new in zip(node.outputs, first.outputs, strict=True):
                old.replace_all_uses_with(new)
            equal.append(node)
    remove_unread(equal)


def remove_defaults(graph: ir.Graph, variables: Sequence[str]) -> None:
    """Removes the default values of graph inputs, so that they must be fed."""
    for name in variables:
        if name in graph.initializers:
            graph.initializers.pop(name).const_value = None
