"""Reverse-mode differentiation of a graph.

It traverses a graph backwards and applies the gradient rule of each node. The rules are an
argument; this module does not refer to any operator by name.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from ortops.errors import ModelError, OrtopsError, UnsupportedError
from ortops.graph.autodiff.guards import guarded_values, without_nan
from ortops.graph.autodiff.registry import (
    Cotangents,
    Definition,
    NestedRule,
    Rule,
    Rules,
    StructuralRule,
    ZeroRule,
    rearranges,
)
from ortops.graph.edit import attribute_values, describe, nodes_between, read_inputs
from ortops.graph.shapes import map_sequences, unbroadcast
from ortops.graph.tensor import Tape, Tensor


@dataclass(frozen=True)
class Site:
    """A node to propagate cotangents through, with the context that its rule may need.

    Attributes:
        tape: The tape for the nodes of the backward pass.
        node: The node.
        g: The cotangents of its outputs, or None.
        active: The values whose cotangents are needed.
        asked_by: The node that requests the gradient, for messages.
        rules: The rules.
        guarded: The values whose NaN the model replaces.
    """

    tape: Tape
    node: ir.Node
    g: tuple[Tensor | None, ...]
    active: set[ir.Value]
    asked_by: str
    rules: Rules
    guarded: Container[ir.Value] = ()


def backward(
    tape: Tape,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Tensor],
    xs: Sequence[ir.Value],
    rules: Rules,
    *,
    cut: Iterable[ir.Value] = (),
    chained: bool = False,
    asked_by: str,
) -> list[Tensor | None]:
    """Emits the nodes that propagate cotangents back through a graph.

    Args:
        tape: The tape for the nodes.
        nodes: The nodes of the graph before the tape's position, in topological order.
        seeds: The values to differentiate, with their cotangents.
        xs: The values whose cotangents to compute; the graph is cut there.
        rules: The gradient rules.
        cut: Further values at which to cut the graph, that is, to treat as constant.
        chained: Whether the graph is not cut at xs that depend on others of them, so that the
            cotangents of those include what flows through these.
        asked_by: The node that requests the gradient, for names and messages.

    Returns:
        A cotangent for each of ``xs``, or None if y does not depend on it.

    Raises:
        UnsupportedError: If a node between ``xs`` and ``y`` has no rule, or has an attribute that
            its rule does not support.
        OrtopsError: If a rule returns the wrong number or types of cotangents.
    """
    stops = {*xs, *cut}
    if chained:
        stops -= _dependent(nodes_between(nodes, cut, seeds), xs, rules)
    path = nodes_between(nodes, stops, seeds)
    active = rules.active_values(path, xs)
    guarded = guarded_values(path)
    cotangents = {y: [seed] for y, seed in seeds.items() if y in active}

    @functools.cache
    def total(value: ir.Value) -> Tensor | None:
        parts = cotangents.get(value)
        return functools.reduce(add_cotangents, parts) if parts else None

    outer = tape.scope
    for node in reversed(path):
        tape.scope = f"{outer}{node.name or node.op_type}/"
        g = tuple(None if value in stops else total(value) for value in node.outputs)
        if any(part is not None for part in g):
            for value, cotangent in _pass(Site(tape, node, g, active, asked_by, rules, guarded)):
                cotangents.setdefault(value, []).append(cotangent)
    tape.scope = outer
    return [total(value) for value in xs]


def _dependent(nodes: Sequence[ir.Node], xs: Sequence[ir.Value], rules: Rules) -> set[ir.Value]:
    """Returns those of some values to which cotangents flow that go on to others of them."""
    active = rules.active_values(nodes, xs)
    return {
        value
        for node in nodes
        if not rules.is_zero(node) and any(each in active for each in read_inputs(node))
        for value in node.outputs
    }.intersection(xs)


def add_cotangents(a: Tensor, b: Tensor) -> Tensor:
    """Adds two cotangents of one value; the cotangents of a sequence are sequences."""
    if isinstance(a.value.type, ir.SequenceType):
        return map_sequences(operator.add, a, b)
    return a + b


def _pass(at: Site) -> list[tuple[ir.Value, Tensor]]:
    """Returns the cotangents of those inputs of a node that are active."""
    node = at.node
    rule = at.rules.find(node)
    match rule:
        case None:
            reason = at.rules.refusal(node)
            if reason is not None:
                raise UnsupportedError(f"{describe(node)}: {reason} (asked for by {at.asked_by})")
            where = f" of domain '{node.domain}'" if node.domain else ""
            raise UnsupportedError(
                f"{describe(node)}: there is no gradient rule for {node.op_type}{where}, which is "
                f"between xs and y of {at.asked_by}; add a rule with @ortops.vjp, or cut the graph "
                "there by using another tensor in xs"
            )
        case ZeroRule():
            return []
        case StructuralRule():
            given = rule.function(at)
            return [(value, cotangent) for value, cotangent in given.items() if value in at.active]
    attributes = _attributes(at, rule)
    if isinstance(rule, Definition) and rule.gradient is not None and rule.keep(node):
        with _named(node):
            returned = _through_rule(at, NestedRule(rule.gradient), attributes)
    elif isinstance(rule, Definition):
        returned = _through_definition(at, rule, attributes)
    else:
        returned = _through_rule(at, rule, attributes)
    return [
        (value, _fit(cotangent, value, rule, at))
        for value, cotangent in zip(node.inputs, _one_each(returned, at), strict=True)
        if value is not None and cotangent is not None and value in at.active
    ]


def _attributes(at: Site, rule: Rule | Definition) -> dict[str, Any]:
    """Returns the attributes of a node, all of which the rule must support."""
    attributes = attribute_values(at.node)
    if unknown := sorted(set(attributes) - rule.attributes):
        raise UnsupportedError(
            f"{describe(at.node)}: the gradient rule does not support attribute '{unknown[0]}' = "
            f"{attributes[unknown[0]]!r} (asked for by {at.asked_by}); remove the attribute, or "
            "replace the rule with @ortops.vjp"
        )
    return attributes


def _through_rule(at: Site, rule: Rule, attributes: Mapping[str, Any]) -> Cotangents:
    """Applies a gradient rule."""
    tape, node, g = at.tape, at.node, at.g
    for index in rule.needs:
        _require_output(tape, node, index)
    outputs = tuple(_read(at, value) for value in node.outputs)
    inputs = tuple(_read(at, value) for value in node.inputs)
    if rearranges(node):  # quantized tensors have floating-point cotangents
        outputs, inputs = (
            tuple(None if x is None else _real(x, at) for x in some) for some in (outputs, inputs)
        )
    first: tuple[Any, ...] = (g[0], outputs[0])
    if _several_outputs(node):
        first = ((*g, *(None,) * (len(outputs) - len(g))), outputs)
    if isinstance(rule, NestedRule):
        first = (at.rules, *first)
    returned: Cotangents = rule.function(*first, *inputs, **attributes)
    return returned


def _read(at: Site, value: ir.Value | None) -> Tensor | None:
    """Returns what a rule reads in place of a value of the forward pass."""
    x = _tensor(at.tape, value)
    return without_nan(x) if x is not None and value in at.guarded else x


def _through_definition(at: Site, rule: Definition, attributes: Mapping[str, Any]) -> Cotangents:
    """Emits the definition of a node, and differentiates that."""
    tape, node = at.tape, at.node
    start = len(tape.nodes)
    inputs = [_tensor(tape, value) for value in node.inputs]
    results = emit_definition(tape, node, rule, inputs, attributes)
    seeds = {
        result.value: cotangent
        for result, cotangent in zip(results, at.g, strict=False)
        if result is not None and cotangent is not None
    }
    given = [value for value in node.inputs if value is not None]
    wanted = [
        value if value is not None and at.rules.carries_cotangent(value) else None
        for value in node.inputs
    ]
    made = tape.nodes[start:]
    return backward_to_inputs(
        tape, made, seeds, wanted, at.rules, cut=given, asked_by=describe(node)
    )


def backward_to_inputs(
    tape: Tape,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Tensor],
    inputs: Sequence[ir.Value | None],
    rules: Rules,
    *,
    cut: Iterable[ir.Value],
    asked_by: str,
) -> tuple[Tensor | None, ...]:
    """Propagates cotangents to the inputs of a node, through nodes that compute the same.

    Args:
        tape: See `backward`.
        nodes: See `backward`.
        seeds: See `backward`.
        inputs: The inputs; None for those that need no cotangent.
        rules: See `backward`.
        cut: See `backward`.
        asked_by: See `backward`.

    Returns:
        A cotangent or None for each input.
    """
    xs = list(dict.fromkeys(value for value in inputs if value is not None))
    found = backward(tape, nodes, seeds, xs, rules, cut=cut, asked_by=asked_by)
    # `pop`, because a tensor that is an input twice must get its cotangent once.
    left = dict(zip(xs, found, strict=True))
    return tuple(None if value is None else left.pop(value, None) for value in inputs)


def emit_definition(
    tape: Tape,
    node: ir.Node,
    definition: Definition,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
) -> tuple[Tensor | None, ...]:
    """Emits the definition of a node; errors name the node.

    Args:
        tape: The tape for the nodes.
        node: The node.
        definition: Its definition.
        inputs: Its inputs, or replacements for them.
        attributes: Its attributes.

    Returns:
        Its outputs, with None for those that the definition does not support.
    """
    with _named(node), tape:
        results = definition.function(*inputs, **attributes)
    return results if isinstance(results, tuple) else (results,)


@contextlib.contextmanager
def _named(node: ir.Node) -> Iterator[None]:
    """Lets errors name a node."""
    try:
        yield
    except (ModelError, UnsupportedError) as error:
        raise type(error)(f"{describe(node)}: {error}") from error


def _one_each(returned: Cotangents, at: Site) -> list[Tensor | None]:
    """Returns a cotangent for each input; rejects extra ones, and missing ones that are needed."""
    given = list(returned) if isinstance(returned, tuple | list) else [returned]
    node = at.node
    count = len(node.inputs)
    left = [value for value in node.inputs[len(given) :] if value is not None]
    forgotten = next((value for value in left if value in at.active), None)
    if forgotten is not None or any(cotangent is not None for cotangent in given[count:]):
        reason = f", but '{forgotten.name}' needs one" if forgotten is not None else ""
        raise OrtopsError(
            f"{describe(node)}: gradient rule {_name(at)} returned {len(given)} cotangents for "
            f"{count} inputs{reason}; it must return one for each input, None for no gradient"
        )
    return (given + [None] * count)[:count]


def _name(at: Site) -> str:
    function = getattr(at.rules.find(at.node), "function", None)
    return f"'{getattr(function, '__name__', function)}'"


def _real(x: Tensor, at: Site) -> Tensor:
    """Returns x, converted to the type of its cotangent if it is a quantized tensor."""
    if not at.rules.is_quantized(x.value):
        return x
    return x.astype(next(part.dtype for part in at.g if part is not None))


def _fit(cotangent: Tensor, value: ir.Value, rule: Rule | Definition, at: Site) -> Tensor:
    """Sets the shape of a cotangent to that of its primal, and checks its type."""
    primal = at.tape.tensor(value)
    dtypes = (cotangent.value.dtype, value.dtype)
    if dtypes[0] != dtypes[1] and None not in dtypes and not at.rules.is_quantized(value):
        raise OrtopsError(
            f"{describe(at.node)}: gradient rule {_name(at)} returned {cotangent.dtype} for "
            f"input '{primal.name}'; its cotangent must have the input's type {primal.dtype}"
        )
    if cotangent.value.type is None:  # computed by an operator that onnx does not know
        cotangent.value.type = value.type
    if isinstance(rule, Rule) and rule.elementwise:
        return unbroadcast(cotangent, primal)
    shape = cotangent.shape
    if shape is None or any(not isinstance(dim, int) for dim in shape):
        cotangent = cotangent.with_shape_of(primal)
    return cotangent


def _require_output(tape: Tape, node: ir.Node, index: int) -> None:
    """Adds an optional output to a forward node that was exported without it."""
    if len(node.outputs) <= index:
        node.resize_outputs(index + 1)
    value = node.outputs[index]
    if not value.name:
        value.name = tape.names.unique(f"{node.name or node.op_type}_output_{index}")
        tape.infer(node)


def _several_outputs(node: ir.Node) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return len(node.outputs) > 1
    return bool(schema.max_output > 1)


def _tensor(tape: Tape, value: ir.Value | None) -> Tensor | None:
    return None if value is None or value.name == "" else tape.tensor(value)
