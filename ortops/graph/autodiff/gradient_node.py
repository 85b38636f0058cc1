"""The Gradient node: binding of names to values, evaluation at other values, and lowering.

A Gradient node refers to tensors by name, in its attributes. `bind` converts these names to inputs
of a node in a private domain, so that they stay correct under inlining, renaming and opset
conversion. `Bound` reads such a node, and `lower_gradient` replaces it with the backward graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortops.errors import ModelError, did_you_mean
from ortops.graph.autodiff.backward import backward
from ortops.graph.autodiff.registry import Rules
from ortops.graph.constants import VARIABLE
from ortops.graph.edit import (
    all_nodes,
    ancestor_nodes,
    copy_node,
    dependent_values,
    describe,
    is_float,
    mapped_tensor,
    nodes_between,
    read_inputs,
    remove_node,
    replace_value,
    take_place,
)
from ortops.graph.files.messages import DOMAINS
from ortops.graph.files.serialization import BOUND_DOMAIN, map_types
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs, subgraphs
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tape, Tensor, ones_like, op, zeros_like

GRADIENT_DOMAINS = DOMAINS
"""The domain in the specification, and the one that some exporters write instead."""


@dataclass(frozen=True)
class Bound:
    """A bound Gradient node.

    Its inputs are the fed values, then the tensors that they replace, then y.

    Attributes:
        node: The node.
        fed: The values at which to evaluate the gradient: first for xs, then for zs.
        xs: The tensors to differentiate with respect to.
        zs: Further tensors that y is a function of.
        y: The tensor to differentiate.
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
        """Returns a new node that belongs to no graph.

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
        """The xs for whose gradients the node has outputs."""
        return self.xs[: len(self.node.outputs)]

    def forget(self, values: Collection[ir.Value]) -> bool:
        """Removes values from the zs, in place, as if y did not depend on them.

        Returns:
            Whether it was possible: not if one of them is among the xs, or another value is fed for
            it, or it for another one. Then nothing has changed.
        """
        pairs = list(zip(self.fed, self.named, strict=True))
        concerned = [(fed, named) for fed, named in pairs if fed in values or named in values]
        if any(fed is not named or named in self.xs for fed, named in concerned):
            return False
        kept = [named for _, named in pairs if named not in values]
        fed = [other for other, named in pairs if named not in values]
        inputs = [*fed, *kept, self.y]
        for index, value in enumerate(inputs if concerned else ()):
            self.node.replace_input_with(index, value)
        self.node.resize_inputs(len(inputs))
        for attribute in name_attributes(self.xs, kept[len(self.xs) :], self.y):
            self.node.attributes[attribute.name] = attribute
        return True

    def path(self, nodes: Iterable[ir.Node], rules: Rules | None = None) -> list[ir.Node]:
        """Returns the nodes between xs and y.

        Args:
            nodes: The nodes of the graph, in topological order.
            rules: If given, only nodes through which a cotangent flows are included.
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
    """Returns the bound Gradient nodes of a graph and its subgraphs."""
    return [node for node in all_nodes(graph) if is_bound(node)]


def is_gradient(node: ir.Node) -> bool:
    """Whether a node is a Gradient node in the form of the specification."""
    return node.op_type == "Gradient" and node.domain in GRADIENT_DOMAINS


def are_of_first_order(graph: ir.Graph) -> bool:
    """Whether all Gradient nodes are in the main graph, and none is differentiated again."""
    nodes = bound_nodes(graph)
    return all(node.graph is graph for node in nodes) and not any(
        is_bound(other) for node in nodes for other in ancestor_nodes(Bound.of(node).y, set())
    )


def mark_variables(graph: ir.Graph) -> None:
    """Marks the tensors that Gradient nodes differentiate with respect to.

    Otherwise a rule might treat such a tensor as a constant, and higher orders would miss it.
    """
    for node in bound_nodes(graph):
        for value in Bound.of(node).xs:
            value.meta[VARIABLE] = True


def bind(graph: ir.Graph, outer: Mapping[str, ir.Value] | None = None) -> bool:
    """Converts the names in the Gradient nodes of a graph and its subgraphs to inputs.

    Args:
        graph: The graph; it is modified in place.
        outer: The values of the outer graphs.

    Returns:
        Whether there were any Gradient nodes.

    Raises:
        ModelError: If a Gradient node is invalid.
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
    xs, zs, y = _read_attributes(node)
    _check_names(node, xs, zs, y, scope)
    fed = [value for value in node.inputs if value is not None]
    bound = _replaced(
        node, fed, [scope[name] for name in xs], [scope[name] for name in zs], scope[y]
    )
    scope.update({value.name: value for value in bound.outputs if value.name})


def bind_anew(node: ir.Node) -> None:
    """Replaces a bound Gradient node by one as `bind` makes it, with the present names."""
    bound = Bound.of(node)
    _replaced(node, bound.fed, bound.xs, bound.zs, bound.y)


def _replaced(
    node: ir.Node,
    fed: Sequence[ir.Value],
    xs: Sequence[ir.Value],
    zs: Sequence[ir.Value],
    y: ir.Value,
) -> ir.Node:
    """Replaces a Gradient node by a bound one."""
    assert isinstance(node.graph, ir.Graph)
    # A new node: replacing inputs one by one takes time quadratic in their number.
    bound = Bound.make(
        *(fed, xs, zs, y),
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
    remove_node(node)
    return bound


def _check_names(
    node: ir.Node, xs: Sequence[str], zs: Sequence[str], y: str, scope: Mapping[str, ir.Value]
) -> None:
    """Checks the inputs, outputs and names of a Gradient node in the form of the specification."""
    where = describe(node)
    names = [*xs, *zs]
    fed = list(node.inputs)
    if not xs:
        raise ModelError(f"{where}: xs is empty; name at least one tensor")
    if len(fed) != len(names):
        raise ModelError(
            f"{where}: expected one input for each of the {len(xs)} names in xs, then for each of "
            f"the {len(zs)} names in zs, got {len(fed)} inputs"
        )
    if any(value is None for value in fed):
        raise ModelError(f"{where}: an input is missing (''); every x and z needs a value")
    if len(node.outputs) > len(xs):
        raise ModelError(
            f"{where}: expected at most one output for each of the {len(xs)} names in xs, got "
            f"{len(node.outputs)} outputs"
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
                    f"{where}: the graph has no tensor '{name}', which is listed in {kind}; "
                    + did_you_mean(name, [n for n in scope if n not in own])
                )


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
            raise ModelError(f"{where}: unknown attribute '{name}'; Gradient has xs, zs and y")
        empty = name == "zs" and not attribute.value
        if attribute.type != kinds[name] and not empty:
            raise ModelError(
                f"{where}: attribute '{name}' must be of type {kinds[name].name}, got "
                f"{attribute.type.name}"
            )
    for name in ("xs", "y"):
        if name not in node.attributes:
            raise ModelError(f"{where}: missing required attribute '{name}'")
    zs = node.attributes["zs"].value if "zs" in node.attributes else ()
    return list(node.attributes["xs"].as_strings()), list(zs), node.attributes["y"].as_string()


def infer_outputs(node: ir.Node) -> bool:
    """Sets the types and shapes of the outputs of a bound Gradient node to those of its xs.

    Returns:
        Whether any of them was unknown before.
    """
    changed = False
    for x, output in zip(Bound.of(node).wanted, node.outputs, strict=True):
        if x.type is not None and output.type is None:
            output.type, output.shape = x.type, x.shape
            changed = True
    return changed


def of_one_pass(node: ir.Node, others: Iterable[ir.Node]) -> list[ir.Node]:
    """Returns a bound Gradient node and those of others that one backward pass computes with it.

    They differentiate the same tensor at the values of the run. The tensors named in one may depend
    on those named in another, unlike those in one node.
    """
    bound = Bound.of(node)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if bound.fed != bound.named:
        return [node]
    found = [(each, Bound.of(each)) for each in others if each.graph is graph]
    found = [(each, b) for each, b in found if b.y is bound.y and b.fed == b.named]
    before = {None, *_before(graph, node, bound.y)} if found else set()
    return [node, *(each for each, b in found if all(x.producer() in before for x in b.wanted))]


def lower_gradient(together: Sequence[ir.Node], names: Names, rules: Rules) -> list[ir.Node]:
    """Replaces bound Gradient nodes with the nodes that compute their outputs, in one pass.

    If the inputs are the tensors named in xs and zs, the forward pass is shared. If they are
    others, the dependent part of the graph is evaluated again at their values.

    Args:
        together: A bound node, or several that `of_one_pass` returned; they are removed.
        names: The names used in the model.
        rules: The gradient rules.

    Returns:
        The nodes that were emitted.

    Raises:
        ModelError: If a node is invalid.
        UnsupportedError: If a node between xs and y has no rule.
    """
    node = together[0]
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    bounds = [Bound.of(each) for each in together]
    for bound in bounds:
        check(describe(bound.node), bound)

    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or 'Gradient'}/"
    first = bounds[0]
    y, cut = first.y, first.named if len(bounds) == 1 else ()
    nodes = _before(graph, node, y)
    replaced = {
        old: op.Identity(tape.tensor(new)).with_shape_of(tape.tensor(old)).value
        for old, new in zip(first.named, first.fed, strict=True)
        if old is not new
    }
    copies: Mapping[ir.Value, ir.Value] = {}
    if replaced:
        copies = _replay(tape, nodes, first, replaced)
        y = copies.get(y, y)
        cut = tuple(copies.get(value, value) for value in cut)
        nodes = _before(graph, node, y)

    pairs = [pair for b in bounds for pair in zip(b.node.outputs, b.wanted, strict=True)]
    sources = {output: copies.get(x, x) for output, x in pairs if output.name}
    xs = list(dict.fromkeys(sources.values()))
    known = [copies.get(x, x) for _, x in pairs]
    seeds = _seeds(tape, nodes, y, known, {*cut, *known}, rules) if is_float(y) else {}
    where = describe(node)
    chained = len(bounds) > 1
    found = backward(tape, nodes, seeds, xs, rules, cut=cut, chained=chained, asked_by=where)
    cotangents = dict(zip(xs, found, strict=True))
    for output, value in sources.items():
        x = tape.tensor(value)
        cotangent = cotangents[value]
        if cotangent is None:
            cotangent = zeros_like(x)
        replace_value(tape, output, cotangent.with_shape_of(x))
    for each in together:
        remove_node(each)
    return tape.nodes


def _seeds(
    tape: Tape,
    nodes: Sequence[ir.Node],
    y: ir.Value,
    xs: Sequence[ir.Value],
    cut: Collection[ir.Value],
    rules: Rules,
) -> dict[ir.Value, Tensor]:
    """Returns the tensors from which the backward pass starts, with their cotangents.

    That is y with a cotangent of ones. The pass skips sums, and continues with cotangent b at a
    for a · b if b is constant. So vector-Jacobian products, which are written in this form, have no
    overhead, and a weighted sum does not need the value of the weighted tensor. Tensors with
    several consumers are not skipped, because the number of paths could grow exponentially.
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
    """Returns the nodes before a node, including those of outer graphs that y depends on."""
    ancestors = ancestor_nodes(y, set())
    graphs = {other.graph for other in ancestors}
    around = [outer for outer in graphs if isinstance(outer, ir.Graph) and outer is not graph]
    outermost_first = sorted(around, key=lambda g: sum(g in subgraphs(other) for other in around))
    nodes = [other for outer in outermost_first for other in outer if other in ancestors]
    for other in graph:
        if other is node:
            break
        nodes.append(other)
    return nodes


def check(where: str, bound: Bound) -> None:
    """Checks a Gradient node once types and shapes are known.

    Args:
        where: The node, for messages.
        bound: The bound node.

    Raises:
        ModelError: If y is a sequence of maps, if an x is not floating-point, if a fed value has a
            different type or shape than its tensor, or if a named tensor depends on another.
    """
    tensor, maker = mapped_tensor(bound.y), bound.y.producer()
    if tensor is not None and maker is not None:
        raise ModelError(
            f"{where}: y '{bound.y.name}' is a sequence of maps, created by {describe(maker)}; use "
            f"the tensor '{tensor.name}', which the maps are created from, instead"
        )
    for value in bound.xs:
        is_map = value.graph is not None and value.name in map_types(value.graph)
        if is_map or not is_float(value):
            kind = "map" if is_map else f"tensor of {value.dtype}"
            raise ModelError(
                f"{where}: x '{value.name}' must be a floating-point tensor, got a {kind}; list it "
                "in zs instead"
            )
    named = bound.named
    for old, new in zip(named, bound.fed, strict=True):
        if None not in (old.dtype, new.dtype) and old.dtype != new.dtype:
            raise ModelError(
                f"{where}: '{new.name}' is fed for '{old.name}' and must have its type "
                f"{old.dtype}, got {new.dtype}"
            )
        if not may_be_equal(old.shape, new.shape):
            raise ModelError(
                f"{where}: '{new.name}' is fed for '{old.name}' and must have its shape "
                f"{old.shape}, got {new.shape}"
            )
    for value in named:
        nodes = ancestor_nodes(value, set())
        read = {source for node in nodes for source in read_inputs(node)}
        for other in named if nodes else ():
            if other in read and other is not value:
                raise ModelError(
                    f"{where}: '{value.name}' is computed from '{other.name}', and both are listed "
                    "in xs and zs; these tensors must not depend on each other"
                )


def _replay(
    tape: Tape, nodes: Sequence[ir.Node], bound: Bound, replaced: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Copies the nodes between replaced values and y; returns a map from old to new values."""
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
