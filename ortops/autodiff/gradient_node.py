"""The Gradient node: names to values, replay at other values, and its lowering.

A Gradient node names the tensors that it differentiates in attributes. `bind` turns the names into
inputs of a node of a private domain, so that inlining, renaming and opset conversion keep them
right; `Bound` reads such a node, and `lower_gradient` replaces it with the backward graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortops.autodiff.backward import backward
from ortops.autodiff.registry import Rules
from ortops.errors import ModelError, did_you_mean
from ortops.graph.edit import (
    all_nodes,
    ancestor_nodes,
    copy_node,
    dependent_values,
    describe,
    inner_graphs,
    is_float,
    nodes_between,
    read_inputs,
    remove_node,
    replace_value,
    take_place,
)
from ortops.graph.serialization import BOUND_DOMAIN, GRADIENT_DOMAIN, map_types
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import VARIABLE, Names, Tape, Tensor, ones_like, op, zeros_like

__all__ = [
    "GRADIENT_DOMAINS",
    "Bound",
    "bind",
    "bound_nodes",
    "check",
    "is_bound",
    "is_gradient",
    "is_of_higher_order",
    "lower_gradient",
    "mark_variables",
    "name_attributes",
]

GRADIENT_DOMAINS = (GRADIENT_DOMAIN, "ai.onnx.preview")
"""The specification's domain, and the one that an exporter writes for it."""


@dataclass(frozen=True)
class Bound:
    """What a bound Gradient node says.

    Its inputs are the values that it is fed, then the tensors that they are fed for, then y.

    Attributes:
        node: The node.
        fed: The values at which it differentiates: those for xs, then those for zs.
        xs: The tensors that it differentiates with respect to.
        zs: Further tensors that y is a function of.
        y: What it differentiates.
    """

    node: ir.Node
    fed: tuple[ir.Value, ...]
    xs: tuple[ir.Value, ...]
    zs: tuple[ir.Value, ...]
    y: ir.Value

    @classmethod
    def of(cls, node: ir.Node) -> Bound:
        """Reads a bound Gradient node."""
        values = tuple(value for value in node.inputs if value is not None)
        assert is_bound(node)
        assert len(values) == len(node.inputs)
        count, xs = len(values) // 2, len(node.attributes["xs"].as_strings())
        return cls(
            node, values[:count], values[count : count + xs], values[count + xs : -1], values[-1]
        )

    @classmethod
    def make(
        cls,
        fed: Sequence[ir.Value],
        xs: Sequence[ir.Value],
        zs: Sequence[ir.Value],
        y: ir.Value,
        **arguments: Any,
    ) -> Bound:
        """Returns a new node, without a place.

        Args:
            fed: See `Bound`.
            xs: See `Bound`.
            zs: See `Bound`.
            y: See `Bound`.
            **arguments: Further arguments of `onnx_ir.Node`.
        """
        node = ir.Node(
            BOUND_DOMAIN, "Gradient", [*fed, *xs, *zs, y], name_attributes(xs, zs, y), **arguments
        )
        return cls.of(node)

    @property
    def named(self) -> tuple[ir.Value, ...]:
        """The tensors named in xs and zs."""
        return (*self.xs, *self.zs)

    @property
    def wanted(self) -> tuple[ir.Value, ...]:
        """The xs whose gradients the node has outputs for."""
        return self.xs[: len(self.node.outputs)]

    def path(self, nodes: Iterable[ir.Node], rules: Rules | None = None) -> list[ir.Node]:
        """Returns the nodes between xs and y.

        Args:
            nodes: The nodes of the graph, in topological order.
            rules: Where they are given, only nodes count through which a cotangent flows.
        """
        between = nodes_between(nodes, self.named, self.y)
        if rules is None:
            reached = dependent_values(between, self.wanted)
        else:
            reached = rules.active_values(between, self.wanted)
        return [node for node in between if not reached.isdisjoint(node.outputs)]


def is_bound(node: ir.Node) -> bool:
    """Whether a node is a bound Gradient node."""
    return node.domain == BOUND_DOMAIN


def bound_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Returns the bound Gradient nodes of a graph and of the graphs inside it."""
    return [node for node in all_nodes(graph) if is_bound(node)]


def is_gradient(node: ir.Node) -> bool:
    """Whether a node is a Gradient node as the specification writes it."""
    return node.op_type == "Gradient" and node.domain in GRADIENT_DOMAINS


def is_of_higher_order(graph: ir.Graph) -> bool:
    """Whether a gradient is taken of what another gradient is part of."""
    return any(
        is_bound(other)
        for node in bound_nodes(graph)
        for other in ancestor_nodes(Bound.of(node).y, set())
    )


def mark_variables(graph: ir.Graph) -> None:
    """Marks what Gradient nodes differentiate with respect to.

    Built into a rule as the constant that it is now, it would be missing from the next order.
    """
    for node in bound_nodes(graph):
        for value in Bound.of(node).xs:
            value.meta[VARIABLE] = True


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
    bound = Bound.make(
        [value for value in fed if value is not None],
        [scope[name] for name in xs],
        [scope[name] for name in zs],
        scope[y],
        num_outputs=len(node.outputs),
        name=node.name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    ).node
    node.graph.insert_before(node, bound)
    for old, new in zip(node.outputs, bound.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
        take_place(old, new)
        if new.name:
            scope[new.name] = new
    remove_node(node)


def name_attributes(xs: Sequence[ir.Value], zs: Sequence[ir.Value], y: ir.Value) -> list[ir.Attr]:
    """Returns the attributes of a Gradient node."""
    attributes: list[ir.Attr] = [ir.AttrStrings("xs", [value.name or "" for value in xs])]
    if zs:
        attributes.append(ir.AttrStrings("zs", [value.name or "" for value in zs]))
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
    changed = False
    for x, output in zip(Bound.of(node).wanted, node.outputs, strict=True):
        if x.type is not None and output.type is None:
            output.type, output.shape = x.type, x.shape
            changed = True
    return changed


def lower_gradient(node: ir.Node, names: Names, rules: Rules) -> list[ir.Node]:
    """Replaces a bound Gradient node with the nodes that compute its outputs.

    Where the inputs are the tensors named in xs and zs, the forward pass is shared; where they are
    others, the part of the graph that depends on them is repeated at their values.

    Args:
        node: A node that `bind` has seen; it is removed.
        names: The names taken in the model.
        rules: How cotangents pass through nodes.

    Returns:
        The nodes that were emitted.

    Raises:
        ModelError: If the node is not legal.
        UnsupportedError: If a node between xs and y has no rule.
    """
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    where = describe(node)
    bound = Bound.of(node)
    check(where, bound)

    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or 'Gradient'}/"
    xs, cut, y = bound.wanted, bound.named, bound.y
    nodes = _before(graph, node, y)
    replaced = {
        old: op.Identity(tape.tensor(new)).with_shape_of(tape.tensor(old)).value
        for old, new in zip(bound.named, bound.fed, strict=True)
        if old is not new
    }
    if replaced:
        copies = _replay(tape, nodes, bound, replaced)
        y = copies.get(y, y)
        xs, cut = (tuple(copies.get(value, value) for value in some) for some in (xs, cut))
        nodes = _before(graph, node, y)

    wanted = [index for index, output in enumerate(node.outputs) if output.name]
    cotangents = backward(
        tape,
        nodes,
        _seeds(tape, nodes, y, xs, cut, rules) if is_float(y) else {},
        [xs[index] for index in wanted],
        rules,
        cut=cut,
        asked_by=where,
    )
    for index, cotangent in zip(wanted, cotangents, strict=True):
        x = tape.tensor(xs[index])
        if cotangent is None:
            cotangent = zeros_like(x)
        replace_value(tape, node.outputs[index], cotangent.with_shape_of(x))
    remove_node(node)
    return tape.nodes


def _seeds(
    tape: Tape,
    nodes: Sequence[ir.Node],
    y: ir.Value,
    xs: Sequence[ir.Value],
    cut: Collection[ir.Value],
    rules: Rules,
) -> dict[ir.Value, Tensor]:
    """Returns the tensors that the backward pass starts from, with their cotangents.

    These are ones for y, but it begins behind sums, and at a for a · b where b is held constant:
    so that vector-Jacobian products, which are written like that, cost nothing more, and a sum of
    products with a tensor does not need that tensor. It goes back along no tensor that several
    nodes read, or the ways through them could be very many.
    """
    seeds: dict[ir.Value, Tensor] = {}
    active: set[ir.Value] | None = None
    pending = [y]
    while pending:
        value = pending.pop()
        shared = value is not y and len(value.uses()) > 1
        node = None if value in cut or shared else value.producer()
        kind = None if node is None or node.domain else node.op_type
        seed = None
        if node is not None and kind == "ReduceSum" and node.inputs[0] is not None:
            pending.append(node.inputs[0])
            continue
        if node is not None and kind in ("Add", "Mul") and _have_one_shape(node):
            a, b = node.inputs
            assert a is not None
            assert b is not None
            if kind == "Add":
                pending += [a, b]
                continue
            if active is None:
                active = rules.active_values(nodes_between(nodes, cut, y), xs)
            if b not in active:
                value, seed = a, tape.tensor(b)
            elif a not in active:
                value, seed = b, tape.tensor(a)
        seed = ones_like(tape.tensor(value)) if seed is None else seed
        seeds[value] = seeds[value] + seed if value in seeds else seed
    return seeds


def _have_one_shape(node: ir.Node) -> bool:
    """Whether the inputs and the output of a node are known to have one shape."""
    shapes = [value.shape for value in (*node.inputs, *node.outputs) if value is not None]
    first = shapes[0]
    if first is None or any(dim is None or dim == ir.SymbolicDim(None) for dim in first):
        return False
    return all(shape == first for shape in shapes)


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


def check(where: str, bound: Bound) -> None:
    """Checks what can be told of a Gradient node once types and shapes are known.

    Args:
        where: The node, for messages.
        bound: What it says.

    Raises:
        ModelError: If y is a sequence of maps, an x has no floating-point numbers, what is fed for
            a tensor has another type or shape, or a named tensor is computed from another.
    """
    maker = bound.y.producer()
    if maker is not None and (maker.domain, maker.op_type) == ("ai.onnx.ml", "ZipMap"):
        (tensor,) = read_inputs(maker)
        raise ModelError(
            f"{where}: y '{bound.y.name}' is a sequence of maps, which {describe(maker)} makes; "
            f"name the tensor that it makes them of, '{tensor.name}'"
        )
    for value in bound.xs:
        is_map = value.graph is not None and value.name in map_types(value.graph)
        if is_map or not is_float(value):
            kind = "map" if is_map else f"tensor of {value.dtype}"
            raise ModelError(
                f"{where}: x '{value.name}' is a {kind}; only floating-point tensors can be in xs "
                "(put it in zs)"
            )
    named = bound.named
    for old, new in zip(named, bound.fed, strict=True):
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


def _replay(
    tape: Tape, nodes: Sequence[ir.Node], bound: Bound, replaced: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Repeats the nodes between replaced values and y; returns old values → new ones."""
    path = nodes_between(nodes, bound.named, bound.y)
    changed = dependent_values(path, replaced)
    copies = dict(replaced)
    for node in path:
        if changed.isdisjoint(node.outputs):
            continue
        copy = copy_node(node, copies)
        tape.append(copy)
        pairs = zip(node.outputs, copy.outputs, strict=True)
        copies.update((old, new) for old, new in pairs if old not in bound.named)
    return copies
