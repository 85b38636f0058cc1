"""Taking operators apart that have no gradient rule of their own.

Fused operators and those that ONNX itself defines as functions are differentiated by what they
stand for: where a gradient passes through such a node, the nodes of its definition come in its
place. The forward pass then computes, once, just what the backward pass reads. A definition is
written with `op`, for operators of any domain, or is the function body of ONNX's schema. One that
holds only up to rounding, or is slower than the operator, leaves the forward pass alone: the
backward pass computes it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.autodiff import (
    ZERO_GRADIENT,
    ancestor_nodes,
    attribute_value,
    backward,
    carries_cotangent,
    dependent_values,
    describe,
    find_rule,
    inner_graphs,
    vjp,
)
from ortops.errors import ModelError, UnsupportedError
from ortops.gradient import BOUND_DOMAIN, infer_outputs, replace_value
from ortops.tensor import Names, Tape, Tensor, constant_tensor, remove_unread

__all__ = ["Definition", "definition", "definitions", "expand", "has_definition"]

EXPANDED_DOMAIN = "ortops.expanded"
"""The private domain of nodes that are about to be replaced by a schema's function body."""

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Definition:
    """What an operator stands for.

    Attributes:
        function: ``(*inputs, **attributes)`` → the outputs, None for those that it cannot give.
        attributes: The names of the attributes that the definition takes into account.
        limits: What it does not do, for the table of operators.
    """

    function: Callable[..., Any]
    attributes: frozenset[str]
    limits: str = ""


_definitions: dict[tuple[str, str], Definition] = {}


def definition(
    *op_types: str,
    domain: str = "",
    keep: bool = False,
    quantizes: bool = False,
    limits: str = "",
) -> Callable[[_F], _F]:
    """Registers what one or more operators stand for.

    The decorated function gets the inputs as Tensors in ONNX order (None where absent) and the
    attributes as keywords, and returns the output, or a tuple of outputs with None for those that
    it cannot give. It may raise `UnsupportedError` with a reason; the node's name is put before it.

    Args:
        *op_types: The operators.
        domain: Their domain.
        keep: Whether the operator stays in the forward pass, and only the backward pass computes
            what the definition says. The definition is then the operator's rule.
        quantizes: With ``keep``, whether the first output carries a cotangent though it is of
            integers; see `ortops.autodiff.Rule`.
        limits: What it does not do, for the table of operators.

    Example:
        >>> from ortops.tensor import op
        >>> @definition("ScaledTanh", domain="com.example")
        ... def scaled_tanh(x, *, alpha=1.0):
        ...     return op.Tanh(x * alpha)
        >>> sorted(definitions()["com.example", "ScaledTanh"].attributes)
        ['alpha']
    """

    def register(function: _F) -> _F:
        parameters = inspect.signature(function).parameters.values()
        names = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        for op_type in op_types:
            _definitions[domain, op_type] = Definition(function, names, limits)
        if keep:
            vjp(*op_types, domain=domain, quantizes=quantizes, limits=limits)(_as_rule(function))
        return function

    return register


def _as_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the rule that computes a definition and differentiates it."""

    @functools.wraps(function)
    def rule(g: Any, y: Any, *inputs: Tensor | None, **attributes: Any) -> Any:
        outputs, cotangents = (x if isinstance(x, tuple) else (x,) for x in (y, g))
        output = next(output for output in outputs if output is not None)
        node, tape = output.value.producer(), output.tape
        assert node is not None
        start = len(tape.nodes)
        results = _call(tape, node, function, inputs, attributes)
        seeds = {
            result.value: cotangent
            for result, cotangent in zip(results, cotangents, strict=False)
            if result is not None and cotangent is not None
        }
        values = [None if x is None else x.value for x in inputs]
        given = dict.fromkeys(value for value in values if value is not None)
        xs = [value for value in given if carries_cotangent(value)]
        made = tape.nodes[start:]
        found = backward(tape, made, seeds, xs, cut=given, asked_by=describe(node))
        # A tensor that is an input twice gets its cotangent once: pop.
        left = dict(zip(xs, found, strict=True))
        return tuple(None if value is None else left.pop(value, None) for value in values)

    signature = inspect.signature(function)
    places = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in "gy"]
    rule.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*places, *signature.parameters.values()]
    )
    return rule


def definitions() -> Mapping[tuple[str, str], Definition]:
    """Returns the registered definitions by (domain, operator)."""
    import ortops.rules  # noqa: F401  registers them on first use

    return _definitions


def has_definition(op_type: str, domain: str = "", opset: int | None = None) -> bool:
    """Whether an operator can be taken apart: it has a definition, or a function body in ONNX.

    Args:
        op_type: The operator.
        domain: Its domain.
        opset: The version of the domain's operator set; the newest by default.
    """
    if (domain, op_type) in definitions():
        return True
    try:
        schema = _schema(op_type, domain, opset)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(op_type: str, domain: str, opset: int | None) -> Any:  # onnx's type lacks has_function
    if opset is None:
        return onnx.defs.get_schema(op_type, domain=domain)
    return onnx.defs.get_schema(op_type, opset, domain)


def expand(model: ir.Model, *, everywhere: bool = False) -> bool:
    """Takes apart, in place, the nodes without a rule that gradients are to pass through.

    Types and shapes behind operators that onnx does not know are found at the same time.

    Args:
        model: A model with bound Gradient nodes, in topological order, with types inferred.
        everywhere: Whether gradients are taken to pass through all nodes.

    Returns:
        Whether anything was changed, so that types are to be inferred again.

    Raises:
        UnsupportedError: If a definition does not cover what such a node asks for.
    """
    graph = model.graph
    nodes = _all_nodes(graph) if everywhere else _nodes_on_paths(graph)
    chosen = {node for node in nodes if _needs_expansion(node)}
    unknown = any((node.domain, node.op_type) in definitions() for node in _all_nodes(graph))
    if not chosen and not unknown:
        return False
    names = Names(graph)
    for node in list(_all_nodes(graph)):
        known = definitions().get((node.domain, node.op_type))
        if node in chosen and known is not None:
            _replace(node, known, names)
        elif node.domain == BOUND_DOMAIN:
            infer_outputs(node)
        elif not all(map(_is_known, node.outputs)):
            _infer(node, known, names)
    bodies = False
    for node in chosen:
        if node.graph is not None:
            bodies |= _call_body(model, node)
    if bodies:
        passes.InlinePass()(model)
    return True


def _nodes_on_paths(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yields the nodes between xs and y of a Gradient node, those in graphs inside included."""
    nodes = list(_all_nodes(graph))
    path: set[ir.Node] = set()
    for node in nodes:
        if node.domain != BOUND_DOMAIN:
            continue
        named, y = node.inputs[len(node.inputs) // 2 : -1], node.inputs[-1]
        stops = {value for value in named if value is not None}
        if y is None:
            continue
        wanted = ancestor_nodes(y, stops)
        between = [other for other in nodes if other in wanted]
        xs = [value for value in named[: len(node.outputs)] if value is not None]
        reached = dependent_values(between, xs)
        path.update(other for other in between if not reached.isdisjoint(other.outputs))
    for node in path:
        if node.domain != BOUND_DOMAIN:
            yield node
            for inner in inner_graphs(node):
                yield from _all_nodes(inner)


def _needs_expansion(node: ir.Node) -> bool:
    if node.domain == BOUND_DOMAIN or find_rule(node.op_type, node.domain) is not None:
        return False
    if node.domain == "" and node.op_type in ZERO_GRADIENT:
        return False
    assert node.graph is not None
    opset = node.graph.opset_imports.get(node.domain)
    return has_definition(node.op_type, node.domain, opset)


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return ir.traversal.RecursiveGraphIterator(graph)


def _replace(node: ir.Node, known: Definition, names: Names) -> None:
    """Puts the nodes of a definition in the place of a node."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or node.op_type}/"
    inputs = [None if value is None else tape.tensor(value) for value in node.inputs]
    results = _apply(tape, node, known, inputs)
    put_out: set[ir.Value] = set()
    for index, output in enumerate(node.outputs):
        if not (output.uses() or output.is_graph_output()):
            continue
        result = results[index] if index < len(results) else None
        if result is None:
            raise UnsupportedError(
                f"{describe(node)}: output {index} '{output.name}' cannot be given where a "
                "gradient passes through the node; cut the graph there by naming another tensor "
                "in xs"
            )
        result.value.shape = _together(output.shape, result.value.shape)
        replace_value(tape, output, result, put_out)
    graph.remove(node, safe=True)
    remove_unread(tape.nodes)


def _is_known(value: ir.Value) -> bool:
    """Whether type and shape of a value are known, apart from what the sizes of inputs are."""
    shape = value.shape
    return value.type is not None and shape is not None and not any(map(_is_unknown, shape))


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension is unknown, or has a symbol that onnx made up for want of more."""
    return not isinstance(dim, int) and (dim.value is None or dim.value.startswith("unk__"))


def _together(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """Returns what two descriptions of a shape say together; sizes go before symbols."""
    if a is None or b is None:
        return a if b is None else b
    if len(a) != len(b):
        return b
    return ir.Shape(
        [
            q if not isinstance(p, int) and (isinstance(q, int) or p.value is None) else p
            for p, q in zip(a, b, strict=True)
        ]
    )


def _apply(
    tape: Tape, node: ir.Node, known: Definition, inputs: list[Tensor | None]
) -> tuple[Tensor | None, ...]:
    attributes = {name: attribute_value(attr) for name, attr in node.attributes.items()}
    if unknown := sorted(set(attributes) - known.attributes):
        raise UnsupportedError(
            f"{describe(node)}: there is no gradient for attribute '{unknown[0]}' = "
            f"{attributes[unknown[0]]!r}; remove it, or add a rule with @ortops.vjp"
        )
    return _call(tape, node, known.function, inputs, attributes)


def _call(
    tape: Tape,
    node: ir.Node,
    function: Callable[..., Any],
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
) -> tuple[Tensor | None, ...]:
    """Emits what a definition says; its errors name the node."""
    try:
        with tape:
            results = function(*inputs, **attributes)
    except (ModelError, UnsupportedError) as error:
        raise type(error)(f"{describe(node)}: {error}") from error
    return results if isinstance(results, tuple) else (results,)


def _infer(node: ir.Node, known: Definition | None, names: Names) -> None:
    """Gives the outputs of a node types and shapes, where they can be told."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if known is None:
        before = [output.shape for output in node.outputs]
        for output in node.outputs:
            output.shape = None
        with contextlib.suppress(ModelError):  # an operator that nothing is known of
            Tape(graph, before=node, names=names).infer(node)
        for output, shape in zip(node.outputs, before, strict=True):
            output.shape = _together(shape, output.shape)
        return
    scratch = Tape(opset=graph.opset_imports[""])
    scratch.graph.opset_imports.update(graph.opset_imports)
    inputs: list[Tensor | None] = []
    for value in node.inputs:
        if value is None:
            inputs.append(None)
            continue
        constant = constant_tensor(value)
        copy = ir.Value(
            name=scratch.names.unique(value.name or "input"),
            type=value.type,
            shape=value.shape,
            const_value=constant,
        )
        if constant is not None:
            scratch.graph.register_initializer(copy)
        else:
            scratch.graph.inputs.append(copy)
        inputs.append(scratch.tensor(copy))
    try:
        results = _apply(scratch, node, known, inputs)
    except (ModelError, UnsupportedError):  # not on a path that a gradient takes
        return
    for output, result in zip(node.outputs, results, strict=False):
        if result is not None and output.name:
            output.type = output.type or result.value.type
            output.shape = output.shape or result.value.shape


def _call_body(model: ir.Model, node: ir.Node) -> bool:
    """Turns a node into a call of a function that has the body from its schema."""
    assert node.graph is not None
    opset = node.graph.opset_imports[""]
    schema = _schema(node.op_type, "", opset)
    for name, attribute in schema.attributes.items():
        if name not in node.attributes and attribute.default_value.name:
            node.attributes[name] = ir.serde.deserialize_attribute(attribute.default_value)
    proto = onnx.FunctionProto()
    if schema.has_context_dependent_function:
        types = []
        for value in node.inputs:
            kind = onnx.TypeProto()
            if value is not None:
                if value.type is None:
                    return False
                ir.serde.serialize_type_into(kind, value.type)
                if value.shape is not None:
                    ir.serde.serialize_shape_into(kind, value.shape)
            types.append(kind.SerializeToString())
        versions = schema.context_dependent_function_opset_versions
        version = max((v for v in versions if v <= opset), default=versions[0])
        proto.ParseFromString(
            schema.get_context_dependent_function_with_opset_version(
                version, ir.serde.serialize_node(node).SerializeToString(), types
            )
        )
    else:
        proto.CopyFrom(schema.function_body)
    proto.domain, proto.name = EXPANDED_DOMAIN, node.op_type
    proto.overload = str(len(model.functions))
    function = ir.serde.deserialize_function(proto)
    model.functions[function.identifier()] = function
    model.graph.opset_imports[EXPANDED_DOMAIN] = 1
    node.domain, node.overload = EXPANDED_DOMAIN, proto.overload
    return True
