"""Reverse-mode differentiation of a graph: the registry of rules and the sweep.

A rule is a vector-Jacobian product: it gets the cotangents of a node's outputs, its outputs, its
inputs and its attributes, and returns the cotangents of its inputs. The sweep walks a graph
backwards and applies them. It knows no operator by name.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import onnx_ir as ir

from ortops.errors import OrtopsError, UnsupportedError
from ortops.tensor import Tape, Tensor, map_sequences, unbroadcast

__all__ = ["ZERO_GRADIENT", "Rule", "backward", "find_rule", "is_float", "rules", "vjp"]

ZERO_GRADIENT = frozenset(
    {
        "And",
        "ArgMax",
        "ArgMin",
        "Bernoulli",
        "BitCast",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "BlackmanWindow",
        "Ceil",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "EyeLike",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "HammingWindow",
        "HannWindow",
        "ImageDecoder",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "MelWeightMatrix",
        "Multinomial",
        "NonMaxSuppression",
        "NonZero",
        "Not",
        "OptionalHasElement",
        "Or",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "RegexFullMatch",
        "Round",
        "SequenceEmpty",
        "SequenceLength",
        "Shape",
        "Sign",
        "Size",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "TfIdfVectorizer",
        "Xor",
    }
)
"""Operators of the standard domain through which nothing flows: their derivative is exactly zero
wherever it exists."""

_REARRANGE = frozenset(
    {
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "MaxPool",
        "Pad",
        "Reshape",
        "Resize",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
        "Where",
    }
)
"""Operators that quantized numbers may pass through and still carry a cotangent."""

_NEVER_QUANTIZED = frozenset(
    {
        ir.DataType.BFLOAT16,
        ir.DataType.BOOL,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.INT64,
        ir.DataType.STRING,
    }
)

RuleFunction = Callable[..., Any]
_F = TypeVar("_F", bound=RuleFunction)


@dataclass(frozen=True)
class Rule:
    """How cotangents pass through one operator.

    Attributes:
        function: ``(g, y, *inputs, **attributes)`` → cotangents of the inputs.
        elementwise: Whether each input was broadcast to the output's shape, so that its cotangent
            is to be summed back.
        needs: Indices of optional outputs that the rule reads; the forward node gets them.
        attributes: The names of the attributes that the rule takes into account.
        structural: Whether the function works on the node itself, because it has graphs inside:
            ``(tape, node, g, active, asked_by)`` → {value that the node reads: cotangent}.
        quantizes: Whether the first output, though of integers, carries a cotangent: that of the
            real numbers before rounding.
        limits: What it does not do, for the table of operators.
    """

    function: RuleFunction
    elementwise: bool
    needs: tuple[int, ...]
    attributes: frozenset[str]
    structural: bool = False
    quantizes: bool = False
    limits: str = ""


_rules: dict[tuple[str, str], Rule] = {}


def vjp(
    *op_types: str,
    domain: str = "",
    elementwise: bool = False,
    needs: Sequence[int] = (),
    structural: bool = False,
    quantizes: bool = False,
    limits: str = "",
) -> Callable[[_F], _F]:
    """Registers the vector-Jacobian product of one or more operators.

    The decorated function gets the cotangent ``g`` of the output and the output ``y`` (tuples of
    them for an operator that can have several outputs, with None for those that are absent), then
    the inputs in ONNX order (None where absent), and the attributes as keywords, whose defaults
    are ONNX's own. It returns a cotangent for each input, None where none flows.

    Args:
        *op_types: The operators.
        domain: Their domain.
        elementwise: Whether cotangents are to be summed over the axes of broadcasting.
        needs: Indices of optional outputs that the forward node must have.
        structural: Whether the function is one on nodes with graphs inside; see `Rule`.
        quantizes: Whether the first output carries a cotangent though it is of integers.
        limits: What the rule does not do, for the table of operators.

    Example:
        >>> @vjp("Cube", domain="com.example")
        ... def cube(g, y, x):
        ...     return 3 * x * x * g
        >>> find_rule("Cube", "com.example").attributes
        frozenset()
    """

    def register(function: _F) -> _F:
        parameters = inspect.signature(function).parameters.values()
        names = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        rule = Rule(function, elementwise, tuple(needs), names, structural, quantizes, limits)
        for op_type in op_types:
            _rules[domain, op_type] = rule
        return function

    return register


def rules() -> Mapping[tuple[str, str], Rule]:
    """Returns the registered rules by (domain, operator)."""
    import ortops.rules  # noqa: F401  registers the rules on first use

    return _rules


def find_rule(op_type: str, domain: str = "") -> Rule | None:
    """Returns the rule of an operator, or None."""
    return rules().get((domain, op_type))


def is_float(value: ir.Value) -> bool:
    """Whether a value carries floating-point numbers, as far as is known."""
    return value.dtype is None or value.dtype.is_floating_point()


def is_quantized(value: ir.Value) -> bool:
    """Whether a value is what a rule with ``quantizes`` made, possibly in another arrangement."""
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or value.dtype in _NEVER_QUANTIZED:
            continue
        rule = find_rule(node.op_type, node.domain)
        if rule is not None and rule.quantizes and value is node.outputs[0]:
            return True
        if _rearranges(node):
            new = {part for part in node.inputs if part is not None} - seen
            seen |= new
            pending += new
    return False


def _rearranges(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in _REARRANGE


def carries_cotangent(value: ir.Value) -> bool:
    """Whether a cotangent can flow through a value, as far as is known."""
    return is_float(value) or is_quantized(value)


def describe(node: ir.Node) -> str:
    """Returns ``<op> node '<name>'``; a node without a name goes by its first output."""
    name = node.name or next((value.name for value in node.outputs if value.name), "")
    return f"{node.op_type} node '{name}'"


def inner_graphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the graphs inside a node: branches, or the body of a loop."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def read_inputs(node: ir.Node) -> list[ir.Value]:
    """Returns every value that a node reads, those that its sub-graphs capture included."""
    values = [value for value in node.inputs if value is not None]
    for graph in inner_graphs(node):
        inner: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
        for child in graph:
            values += [value for value in read_inputs(child) if value not in inner]
            inner.update(child.outputs)
        values += [value for value in graph.outputs if value not in inner]
    return values


def dependent_values(
    nodes: Iterable[ir.Node], sources: Iterable[ir.Value], *, differentiably: bool = False
) -> set[ir.Value]:
    """Returns the values that depend on some others, the others included.

    Args:
        nodes: Nodes in topological order.
        sources: The values to start from; what computes them is not followed.
        differentiably: Whether to follow only paths along which a cotangent can flow.
    """
    start = set(sources)
    reached = set(start)
    for node in nodes:
        if differentiably and node.domain == "" and node.op_type in ZERO_GRADIENT:
            continue
        if any(value in reached for value in read_inputs(node)):
            reached.update(
                value for value in node.outputs if not differentiably or carries_cotangent(value)
            )
    return reached


def ancestor_nodes(values: ir.Value | Iterable[ir.Value], stop: set[ir.Value]) -> set[ir.Node]:
    """Returns the nodes that values are computed by, not looking behind those in ``stop``."""
    found: set[ir.Node] = set()
    pending = [values] if isinstance(values, ir.Value) else list(values)
    while pending:
        current = pending.pop()
        node = None if current in stop else current.producer()
        if node is not None and node not in found:
            found.add(node)
            pending += read_inputs(node)
    return found


def differentiable_ancestors(y: ir.Value) -> set[ir.Value]:
    """Returns the values from which a path leads to ``y`` along which a cotangent can flow."""
    found = {y}
    pending = [y]
    while pending:
        node = pending.pop().producer()
        if node is None or (node.domain == "" and node.op_type in ZERO_GRADIENT):
            continue
        new = [
            value for value in read_inputs(node) if carries_cotangent(value) and value not in found
        ]
        found.update(new)
        pending += new
    return found


def backward(
    tape: Tape,
    nodes: Sequence[ir.Node],
    seeds: Mapping[ir.Value, Tensor],
    xs: Sequence[ir.Value],
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
        cut: Further values at which the graph is cut, that is held constant.
        asked_by: What wants them, for names and messages.

    Returns:
        A cotangent for each of ``xs``; None where none flows.

    Raises:
        UnsupportedError: If a node between ``xs`` and ``y`` has no rule, or an attribute that its
            rule does not know.
    """
    stops = {*xs, *cut}
    wanted = ancestor_nodes(seeds, stops)
    path = [node for node in nodes if node in wanted]
    active = dependent_values(path, xs, differentiably=True)
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
            for value, cotangent in _apply(tape, node, g, active, asked_by):
                cotangents.setdefault(value, []).append(cotangent)
    tape.scope = outer
    return [total(value) for value in xs]


def add_cotangents(a: Tensor, b: Tensor) -> Tensor:
    """Adds two cotangents of one value; those of a sequence are sequences."""
    if isinstance(a.value.type, ir.SequenceType):
        return map_sequences(operator.add, a, b)
    return a + b


def _apply(
    tape: Tape,
    node: ir.Node,
    g: tuple[Tensor | None, ...],
    active: set[ir.Value],
    asked_by: str,
) -> list[tuple[ir.Value, Tensor]]:
    """Returns the cotangents that a node passes to its inputs."""
    rule = find_rule(node.op_type, node.domain)
    if rule is None:
        where = f" of domain '{node.domain}'" if node.domain else ""
        raise UnsupportedError(
            f"{describe(node)}: there is no gradient rule for {node.op_type}{where}, which lies "
            f"between xs and y of {asked_by}; add one with @ortops.vjp, or cut the graph there by "
            "naming another tensor in xs"
        )
    if rule.structural:
        given = rule.function(tape, node, g, active, asked_by)
        return [(value, cotangent) for value, cotangent in given.items() if value in active]
    attributes = {name: attribute_value(attr) for name, attr in node.attributes.items()}
    if unknown := sorted(set(attributes) - rule.attributes):
        raise UnsupportedError(
            f"{describe(node)}: the gradient rule does not take attribute '{unknown[0]}' = "
            f"{attributes[unknown[0]]!r} into account (asked for by {asked_by}); remove it, or "
            "replace the rule with @ortops.vjp"
        )
    for index in rule.needs:
        _require_output(tape, node, index)
    outputs = tuple(_tensor(tape, value) for value in node.outputs)
    inputs = tuple(_tensor(tape, value) for value in node.inputs)
    if _rearranges(node):
        outputs, inputs = (
            tuple(None if x is None else _real(x, g) for x in some) for some in (outputs, inputs)
        )
    if _several_outputs(node):
        padding = (None,) * (len(outputs) - len(g))
        returned = rule.function((*g, *padding), outputs, *inputs, **attributes)
    else:
        returned = rule.function(g[0], outputs[0], *inputs, **attributes)
    if not isinstance(returned, tuple | list):
        returned = (returned,)
    if len(returned) > len(node.inputs) and any(
        c is not None for c in returned[len(node.inputs) :]
    ):
        raise OrtopsError(
            f"{describe(node)}: its gradient rule returned {len(returned)} cotangents for "
            f"{len(node.inputs)} inputs; it must return one for each"
        )
    passed = []
    for value, cotangent in zip(node.inputs, returned, strict=False):
        if value is None or cotangent is None or value not in active:
            continue
        passed.append((value, _fit(cotangent, tape.tensor(value), rule, node)))
    return passed


def _real(x: Tensor, g: Sequence[Tensor | None]) -> Tensor:
    """Returns x, in the type of its cotangent where it is a quantized tensor."""
    if not is_quantized(x.value):
        return x
    return x.astype(next(part.dtype for part in g if part is not None))


def _fit(cotangent: Tensor, primal: Tensor, rule: Rule, node: ir.Node) -> Tensor:
    """Gives a cotangent its primal's shape, and checks its type."""
    dtypes = (cotangent.value.dtype, primal.value.dtype)
    if dtypes[0] != dtypes[1] and None not in dtypes and not is_quantized(primal.value):
        raise OrtopsError(
            f"{describe(node)}: its gradient rule returned {cotangent.dtype} for the "
            f"{primal.dtype} input '{primal.name}'; a cotangent has the type of its input"
        )
    if cotangent.value.type is None:  # behind an operator that onnx does not know
        cotangent.value.type = primal.value.type
    if rule.elementwise:
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


def attribute_value(attribute: ir.Attr) -> Any:
    """Returns an attribute as a Python value; tensors as numpy arrays."""
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    return attribute.value
