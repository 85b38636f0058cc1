"""Reverse-mode differentiation of a graph: the sweep.

It walks a graph backwards and applies the rule of each node, which is an argument: it knows no
operator by name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from ortops.autodiff.registry import (
    Cotangents,
    Definition,
    NestedRule,
    Rule,
    Rules,
    StructuralRule,
    ZeroRule,
)
from ortops.errors import ModelError, OrtopsError, UnsupportedError
from ortops.graph.edit import attribute_values, describe, nodes_between
from ortops.graph.shapes import map_sequences, unbroadcast
from ortops.graph.tensor import Tape, Tensor

__all__ = ["Site", "add_cotangents", "backward", "emit_definition"]


@dataclass(frozen=True)
class Site:
    """A node that cotangents are to pass through, and what a rule may need there.

    Attributes:
        tape: Where the nodes of the backward pass go.
        node: The node.
        g: The cotangents of its outputs, None where none flows.
        active: The values whose cotangents are wanted, or lead to such.
        asked_by: What wants them, for messages.
        rules: The rules.
    """

    tape: Tape
    node: ir.Node
    g: tuple[Tensor | None, ...]
    active: set[ir.Value]
    asked_by: str
    rules: Rules


def backward(
    tape: Tape,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Tensor],
    xs: Sequence[ir.Value],
    rules: Rules,
    *,
    cut: Iterable[ir.Value] = (),
    asked_by: str,
) -> list[Tensor | None]:
    """Emits the nodes that carry cotangents of some values back to others.

    Args:
        tape: Where the nodes go.
        nodes: The nodes of the graph, in topological order, that come before the tape's place.
        seeds: The differentiated values, with their cotangents.
        xs: The values whose cotangents are wanted; the graph is cut there.
        rules: How they pass through nodes.
        cut: Further values at which the graph is cut, that is held constant.
        asked_by: What wants them, for names and messages.

    Returns:
        A cotangent for each of ``xs``; None where none flows.

    Raises:
        UnsupportedError: If a node between ``xs`` and ``y`` has no rule, or an attribute that its
            rule does not know.
        OrtopsError: If a rule does not return what it should.
    """
    stops = {*xs, *cut}
    path = nodes_between(nodes, stops, seeds)
    active = rules.active_values(path, xs)
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
            for value, cotangent in _pass(Site(tape, node, g, active, asked_by, rules)):
                cotangents.setdefault(value, []).append(cotangent)
    tape.scope = outer
    return [total(value) for value in xs]


def add_cotangents(a: Tensor, b: Tensor) -> Tensor:
    """Adds two cotangents of one value; those of a sequence are sequences."""
    if isinstance(a.value.type, ir.SequenceType):
        return map_sequences(operator.add, a, b)
    return a + b


def _pass(at: Site) -> list[tuple[ir.Value, Tensor]]:
    """Returns the cotangents that a node passes to the active ones of the values that it reads."""
    node = at.node
    rule = at.rules.find(node)
    match rule:
        case None:
            reason = at.rules.refusal(node)
            if reason is not None:
                raise UnsupportedError(f"{describe(node)}: {reason} (asked for by {at.asked_by})")
            where = f" of domain '{node.domain}'" if node.domain else ""
            raise UnsupportedError(
                f"{describe(node)}: there is no gradient rule for {node.op_type}{where}, which "
                f"lies between xs and y of {at.asked_by}; add one with @ortops.vjp, or cut the "
                "graph there by naming another tensor in xs"
            )
        case ZeroRule():
            return []
        case StructuralRule():
            given = rule.function(at)
            return [(value, cotangent) for value, cotangent in given.items() if value in at.active]
    attributes = _attributes(at, rule)
    if isinstance(rule, Definition):
        returned = _through_definition(at, rule, attributes)
    else:
        returned = _through_rule(at, rule, attributes)
    return [
        (value, _fit(cotangent, value, rule, at))
        for value, cotangent in zip(node.inputs, _one_each(returned, at), strict=True)
        if value is not None and cotangent is not None and value in at.active
    ]


def _attributes(at: Site, rule: Rule | Definition) -> dict[str, Any]:
    """Returns the attributes of a node, or refuses one that the rule does not know."""
    attributes = attribute_values(at.node)
    if unknown := sorted(set(attributes) - rule.attributes):
        raise UnsupportedError(
            f"{describe(at.node)}: the gradient rule does not take attribute '{unknown[0]}' = "
            f"{attributes[unknown[0]]!r} into account (asked for by {at.asked_by}); remove it, or "
            "replace the rule with @ortops.vjp"
        )
    return attributes


def _through_rule(at: Site, rule: Rule, attributes: Mapping[str, Any]) -> Cotangents:
    """Applies a formula."""
    tape, node, g = at.tape, at.node, at.g
    for index in rule.needs:
        _require_output(tape, node, index)
    outputs = tuple(_tensor(tape, value) for value in node.outputs)
    inputs = tuple(_tensor(tape, value) for value in node.inputs)
    if at.rules.rearranges(node):
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


def _through_definition(at: Site, rule: Definition, attributes: Mapping[str, Any]) -> Cotangents:
    """Computes what a node stands for, and differentiates that."""
    tape, node = at.tape, at.node
    start = len(tape.nodes)
    inputs = [_tensor(tape, value) for value in node.inputs]
    results = emit_definition(tape, node, rule, inputs, attributes)
    seeds = {
        result.value: cotangent
        for result, cotangent in zip(results, at.g, strict=False)
        if result is not None and cotangent is not None
    }
    given = list(dict.fromkeys(value for value in node.inputs if value is not None))
    xs = [value for value in given if at.rules.carries_cotangent(value)]
    made = tape.nodes[start:]
    found = backward(tape, made, seeds, xs, at.rules, cut=given, asked_by=describe(node))
    # A tensor that is an input twice gets its cotangent once: pop.
    left = dict(zip(xs, found, strict=True))
    return tuple(None if value is None else left.pop(value, None) for value in node.inputs)


def emit_definition(
    tape: Tape,
    node: ir.Node,
    definition: Definition,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
) -> tuple[Tensor | None, ...]:
    """Emits what a node stands for; errors name the node.

    Args:
        tape: Where to.
        node: The node.
        definition: Its definition.
        inputs: Its inputs, or what stands for them.
        attributes: Its attributes.

    Returns:
        Its outputs, None for those that the definition cannot give.
    """
    try:
        with tape:
            results = definition.function(*inputs, **attributes)
    except (ModelError, UnsupportedError) as error:
        raise type(error)(f"{describe(node)}: {error}") from error
    return results if isinstance(results, tuple) else (results,)


def _one_each(returned: Cotangents, at: Site) -> list[Tensor | None]:
    """Returns a cotangent for each input of a node; refuses one too many, or an active one left."""
    given = list(returned) if isinstance(returned, tuple | list) else [returned]
    node = at.node
    count = len(node.inputs)
    left = [value for value in node.inputs[len(given) :] if value is not None]
    forgotten = next((value for value in left if value in at.active), None)
    if forgotten is not None or any(cotangent is not None for cotangent in given[count:]):
        reason = f", and '{forgotten.name}' has one" if forgotten is not None else ""
        raise OrtopsError(
            f"{describe(node)}: its gradient rule {_name(at)} returned {len(given)} cotangents for "
            f"{count} inputs{reason}; it must return one for each, None where none flows"
        )
    return (given + [None] * count)[:count]


def _name(at: Site) -> str:
    function = getattr(at.rules.find(at.node), "function", None)
    return f"'{getattr(function, '__name__', function)}'"


def _real(x: Tensor, at: Site) -> Tensor:
    """Returns x, in the type of its cotangent where it is a quantized tensor."""
    if not at.rules.is_quantized(x.value):
        return x
    return x.astype(next(part.dtype for part in at.g if part is not None))


def _fit(cotangent: Tensor, value: ir.Value, rule: Rule | Definition, at: Site) -> Tensor:
    """Gives a cotangent its primal's shape, and checks its type."""
    primal = at.tape.tensor(value)
    dtypes = (cotangent.value.dtype, value.dtype)
    if dtypes[0] != dtypes[1] and None not in dtypes and not at.rules.is_quantized(value):
        raise OrtopsError(
            f"{describe(at.node)}: its gradient rule {_name(at)} returned {cotangent.dtype} for "
            f"the {primal.dtype} input '{primal.name}'; a cotangent has the type of its input"
        )
    if cotangent.value.type is None:  # behind an operator that onnx does not know
        cotangent.value.type = value.type
    if isinstance(rule, Rule) and rule.elementwise:
        return unbroadcast(cotangent, primal)
    shape = cotangent.shape
    if shape is None or any(not isinstance(dim, int) for dim in shape):
        cotangent = cotangent.with_shape_of(primal)
    return cotangent


def _require_output(tape: Tape, node: ir.Node, index: int) -> None:
    """Gives a forward node an optional output that it was written without."""
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
