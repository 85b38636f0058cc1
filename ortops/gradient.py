"""The Gradient node: names to values, replay at other values, and its lowering.

A Gradient node names the tensors that it differentiates in attributes. `bind` turns the names into
inputs of a node of a private domain, so that inlining, renaming and opset conversion keep them
right; `lower_gradient` replaces that node with the backward graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence

import onnx_ir as ir

from ortops.autodiff import (
    ancestor_nodes,
    backward,
    dependent_values,
    describe,
    inner_graphs,
    is_float,
)
from ortops.errors import ModelError, did_you_mean
from ortops.tensor import BOUND_DOMAIN, Names, Tape, Tensor, ones_like, op, zeros_like

__all__ = [
    "BOUND_DOMAIN",
    "GRADIENT_DOMAINS",
    "bind",
    "is_gradient",
    "is_of_higher_order",
    "lower_gradient",
    "name_attributes",
    "unbind",
]

GRADIENT_DOMAINS = ("ai.onnx.preview.training", "ai.onnx.preview")
"""The specification's domain, and the one that an exporter writes for it."""


def is_gradient(node: ir.Node) -> bool:
    """Whether a node is a Gradient node as the specification writes it."""
    return node.op_type == "Gradient" and node.domain in GRADIENT_DOMAINS


def is_of_higher_order(graph: ir.Graph) -> bool:
    """Whether a gradient is taken of what another gradient is part of."""
    return any(
        other.domain == BOUND_DOMAIN
        for node in ir.traversal.RecursiveGraphIterator(graph)
        if node.domain == BOUND_DOMAIN and node.inputs[-1] is not None
        for other in ancestor_nodes(node.inputs[-1], set())
    )


def bind(graph: ir.Graph, outer: Mapping[str, ir.Value] | None = None) -> bool:
    """Turns the names in the Gradient nodes of a graph and its sub-graphs into inputs.

    Args:
        graph: The graph; changed in place.
        outer: The values of the graphs around it.

    Returns:
        Whether there was one.

    Raises:
        ModelError: If a Gradient node is not legal.
    """
    scope = dict(outer or {})
    scope.update({value.name: value for value in graph.inputs if value.name})
    scope.update(graph.initializers)
    for node in graph:
        scope.update({value.name: value for value in node.outputs if value.name})
    found = False
    for node in list(graph):
        if is_gradient(node):
            _bind_node(node, scope)
            found = True
        for inner in inner_graphs(node):
            found |= bind(inner, scope)
    return found


def _bind_node(node: ir.Node, scope: MutableMapping[str, ir.Value]) -> None:
    where = describe(node)
    xs, zs, y = _read_attributes(node)
    names = [*xs, *zs]
    fed = list(node.inputs)
    if not xs:
        raise ModelError(f"{where}: xs is empty; name at least one tensor in it")
    if len(fed) != len(names):
        raise ModelError(
            f"{where}: {len(fed)} inputs for {len(xs)} names in xs and {len(zs)} in zs; the inputs "
            "are the values of xs, then those of zs, in that order"
        )
    if any(value is None for value in fed):
        raise ModelError(f"{where}: an input is absent (''); every x and z needs a value")
    if len(node.outputs) > len(xs):
        raise ModelError(
            f"{where}: {len(node.outputs)} outputs for {len(xs)} names in xs; there is one output "
            "for each x"
        )
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(
                f"{where}: '{name}' is listed {count} times in xs and zs; list it once"
            )
    own = {value.name for value in node.outputs}
    for kind, listed in (("xs", xs), ("zs", zs), ("y", [y])):
        for name in listed:
            if name not in scope or (name in own and name):
                raise ModelError(
                    f"{where}: {kind} names '{name}', which is no tensor of the graph; "
                    + did_you_mean(name, [n for n in scope if n not in own])
                )
    assert isinstance(node.graph, ir.Graph)
    # A new node: replacing inputs one by one takes time quadratic in their number.
    bound = ir.Node(
        BOUND_DOMAIN,
        node.op_type,
        [*fed, *(scope[name] for name in (*names, y))],
        node.attributes.values(),
        num_outputs=len(node.outputs),
        name=node.name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )
    node.graph.insert_before(node, bound)
    for old, new in zip(node.outputs, bound.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
        _take_place(old, new)
        if new.name:
            scope[new.name] = new
    _remove(node)


def unbind(node: ir.Node) -> None:
    """Turns a bound Gradient node back into one that names its tensors, in place."""
    count = len(node.inputs) // 2
    named, y = node.inputs[count:-1], node.inputs[-1]
    assert y is not None
    xs = len(node.attributes["xs"].as_strings())
    for attribute in name_attributes(named[:xs], named[xs:], y):
        node.attributes[attribute.name] = attribute
    node.resize_inputs(count)
    node.domain = GRADIENT_DOMAINS[0]


def name_attributes(
    xs: Sequence[ir.Value | None], zs: Sequence[ir.Value | None], y: ir.Value
) -> list[ir.Attr]:
    """Returns the attributes of a Gradient node."""
    attributes: list[ir.Attr] = [ir.AttrStrings("xs", [v.name or "" for v in xs if v])]
    if zs:
        attributes.append(ir.AttrStrings("zs", [v.name or "" for v in zs if v]))
    return [*attributes, ir.AttrString("y", y.name or "")]


def _read_attributes(node: ir.Node) -> tuple[list[str], list[str], str]:
    where = describe(node)
    kinds = {
        "xs": ir.AttributeType.STRINGS,
        "zs": ir.AttributeType.STRINGS,
        "y": ir.AttributeType.STRING,
    }
    for name, attribute in node.attributes.items():
        if name not in kinds:
            raise ModelError(f"{where}: unknown attribute '{name}'; it has xs, zs and y")
        empty = name == "zs" and not attribute.value
        if attribute.type != kinds[name] and not empty:
            raise ModelError(
                f"{where}: attribute '{name}' is of type {attribute.type.name}; it is of type "
                f"{kinds[name].name}"
            )
    for name in ("xs", "y"):
        if name not in node.attributes:
            raise ModelError(f"{where}: attribute '{name}' is missing; it is required")
    zs = node.attributes["zs"].value if "zs" in node.attributes else ()
    return list(node.attributes["xs"].as_strings()), list(zs), node.attributes["y"].as_string()


def infer_outputs(node: ir.Node) -> bool:
    """Gives the outputs of a bound Gradient node the types and shapes of its xs.

    Returns:
        Whether that told anything new.
    """
    named = node.inputs[len(node.inputs) // 2 : -1]
    changed = False
    for x, output in zip(named, node.outputs, strict=False):
        if x is not None and x.type is not None and output.type is None:
            output.type, output.shape = x.type, x.shape
            changed = True
    return changed


def lower_gradient(node: ir.Node, names: Names) -> list[ir.Node]:
    """Replaces a bound Gradient node with the nodes that compute its outputs.

    Where the inputs are the tensors named in xs and zs, the forward pass is shared; where they are
    others, the part of the graph that depends on them is repeated at their values.

    Args:
        node: A node that `bind` has seen; it is removed.
        names: The names taken in the model.

    Returns:
        The nodes that were emitted.

    Raises:
        ModelError: If the node is not legal.
        UnsupportedError: If a node between xs and y has no rule.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    where = describe(node)
    xs, zs, _ = _read_attributes(node)
    count = len(xs) + len(zs)
    values = [value for value in node.inputs if value is not None]
    fed, named, y = values[:count], values[count : 2 * count], values[2 * count]
    _check(where, xs, fed, named)

    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or 'Gradient'}/"
    nodes = _before(graph, node, y)
    replaced = {
        old: op.Identity(tape.tensor(new)).with_shape_of(tape.tensor(old)).value
        for old, new in zip(named, fed, strict=True)
        if old is not new
    }
    if replaced:
        copies = _replay(tape, nodes, y, named, replaced)
        y = copies.get(y, y)
        named = [copies.get(value, value) for value in named]
        nodes = _before(graph, node, y)

    wanted = [index for index, output in enumerate(node.outputs) if output.name]
    cotangents = backward(
        tape,
        nodes,
        {y: ones_like(tape.tensor(y))} if is_float(y) else {},
        [named[index] for index in wanted],
        cut=named,
        asked_by=where,
    )
    put_out: set[ir.Value] = set()
    for index, cotangent in zip(wanted, cotangents, strict=True):
        x = tape.tensor(named[index])
        if cotangent is None:
            cotangent = zeros_like(x)
        replace_value(tape, node.outputs[index], cotangent.with_shape_of(x), put_out)
    _remove(node)
    return tape.nodes


def replace_value(tape: Tape, old: ir.Value, new: Tensor, put_out: set[ir.Value]) -> None:
    """Lets a new tensor stand, name and all, where a node's output stood.

    Args:
        tape: The tape that the new tensor was emitted on.
        old: The output that goes.
        new: What comes in its place.
        put_out: The values that have replaced an output so far; extended.
    """
    value = new.value
    renamable = tape.emitted(value) and value not in put_out
    if not renamable or value.const_value is not None:
        value = op.Identity(new).with_shape_of(new).value
    put_out.add(value)
    _take_place(old, value)


def _take_place(old: ir.Value, new: ir.Value) -> None:
    """Lets a value stand, name and all, where another one stood."""
    name, old.name = old.name, None
    new.name = name
    while old.is_graph_output():
        assert old.graph is not None
        old.graph.outputs[old.graph.outputs.index(old)] = new
    old.replace_all_uses_with(new)


def _remove(node: ir.Node) -> None:
    """Removes a node whose outputs nobody reads, from the last input on: it may have thousands."""
    assert isinstance(node.graph, ir.Graph)
    while node.inputs:
        node.resize_inputs(len(node.inputs) - 1)
    node.graph.remove(node, safe=True)


def _before(graph: ir.Graph, node: ir.Node, y: ir.Value) -> Sequence[ir.Node]:
    """Returns the nodes before one, those of the graphs around that y is computed by included."""
    ancestors = ancestor_nodes(y, set())
    graphs = {other.graph for other in ancestors}
    around = [outer for outer in graphs if isinstance(outer, ir.Graph) and outer is not graph]
    outermost_first = sorted(around, key=lambda g: sum(g in outer.subgraphs() for outer in around))
    nodes = [other for outer in outermost_first for other in outer if other in ancestors]
    for other in graph:
        if other is node:
            break
        nodes.append(other)
    return nodes


def _check(
    where: str, xs: Sequence[str], fed: Sequence[ir.Value], named: Sequence[ir.Value]
) -> None:
    """Checks what can be told once types and shapes are known."""
    for value in named[: len(xs)]:
        if not is_float(value):
            raise ModelError(
                f"{where}: x '{value.name}' is a tensor of {value.dtype}; only floating-point "
                "tensors can be in xs (put it in zs)"
            )
    for old, new in zip(named, fed, strict=True):
        if None not in (old.dtype, new.dtype) and old.dtype != new.dtype:
            raise ModelError(
                f"{where}: '{new.name}' of type {new.dtype} is fed for '{old.name}' of type "
                f"{old.dtype}; the types must be equal"
            )
        if not may_be_equal(old.shape, new.shape):
            raise ModelError(
                f"{where}: '{new.name}' of shape {new.shape} is fed for '{old.name}' of shape "
                f"{old.shape}; the shapes must be equal"
            )
    for value in named:
        nodes = ancestor_nodes(value, set())
        read = {source for node in nodes for source in node.inputs}
        for other in named if nodes else ():
            if other in read and other is not value:
                raise ModelError(
                    f"{where}: '{value.name}' is computed from '{other.name}', and both are in xs "
                    "and zs; the tensors named there must be independent of each other"
                )


def may_be_equal(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(
        p == q or not (isinstance(p, int) and isinstance(q, int)) for p, q in zip(a, b, strict=True)
    )


def _replay(
    tape: Tape,
    nodes: Sequence[ir.Node],
    y: ir.Value,
    cut: Sequence[ir.Value],
    replaced: Mapping[ir.Value, ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Repeats the nodes between replaced values and y; returns old values → new ones."""
    wanted = ancestor_nodes(y, set(cut))
    path = [node for node in nodes if node in wanted]
    changed = dependent_values(path, replaced)
    copies = dict(replaced)
    for node in path:
        if changed.isdisjoint(node.outputs):
            continue
        copy = copy_node(node, copies)
        tape.append(copy)
        pairs = zip(node.outputs, copy.outputs, strict=True)
        copies.update((old, new) for old, new in pairs if old not in cut)
    return copies


def copy_node(node: ir.Node, copies: Mapping[ir.Value, ir.Value]) -> ir.Node:
    """Returns a copy of a node that reads ``copies[v]`` where the node reads ``v``.

    The copy has no name and its outputs have none, except those that are absent.
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
