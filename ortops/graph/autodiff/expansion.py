"""Expansion of operators that have no gradient rule.

Fused operators, and operators that ONNX defines as functions, are differentiated through their
definitions: a node that a gradient passes through is replaced with the nodes of its definition, so
that the forward pass computes the intermediate results for the backward pass. A definition is
written with `op`, for operators of any domain, or is the function body in the ONNX schema. If a
definition is only equal up to rounding, or slower than the operator, the forward pass keeps the
operator, and the backward pass computes the definition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.autodiff.backward import emit_definition
from ortops.graph.autodiff.gradient_node import Bound, bound_nodes, infer_outputs, is_bound
from ortops.graph.autodiff.registry import Definition, Function, Rules
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import (
    all_nodes,
    attribute_values,
    describe,
    remove_unread,
    replace_value,
    tape_before,
)
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs, subgraphs
from ortops.graph.shapes import is_unknown
from ortops.graph.tensor import Tape, Tensor

EXPANDED_DOMAIN = "ortops.expanded"
"""The private domain of nodes that are about to be replaced by a schema's function body."""


PREVIEW_DOMAIN = "ai.onnx.preview"
"""ONNX's domain of operators that no version of onnxruntime has yet."""


def is_preview(node: ir.Node) -> bool:
    """Whether a node has an operator of ONNX's preview domain, such as FlexAttention.

    Its function body is the only implementation. Optimizers and Gradient are not meant: exporters
    write them into the same domain.
    """
    return node.domain == PREVIEW_DOMAIN and onnx.defs.has(node.op_type, PREVIEW_DOMAIN)


def can_be_expanded(node: ir.Node, rules: Rules) -> bool:
    """Whether a node can be replaced with a definition, or with its function body in ONNX.

    This is False for nodes with a gradient rule.
    """
    if is_bound(node):
        return False
    rule = rules.find(node)
    if rule is not None:
        return isinstance(rule, Definition) and not rule.keep(node)
    assert node.graph is not None
    try:
        schema = _schema(node.op_type, node.domain, node.graph.opset_imports.get(node.domain))
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _schema(op_type: str, domain: str, opset: int | None) -> Any:  # onnx's type lacks has_function
    if opset is None:
        return onnx.defs.get_schema(op_type, domain=domain)
    return onnx.defs.get_schema(op_type, opset, domain)


def expand(model: ir.Model, rules: Rules, *, everywhere: bool = False) -> bool:
    """Expands, in place, the nodes without a gradient rule that gradients pass through.

    So are all nodes of ONNX's preview domain, which runtimes do not know. It also infers types and
    shapes for operators that onnx does not know.

    Args:
        model: A model with bound Gradient nodes, in topological order, with types inferred.
        rules: The rules.
        everywhere: Whether to assume that gradients pass through all nodes.

    Returns:
        Whether anything was changed, so that types must be inferred again.

    Raises:
        UnsupportedError: If a definition does not support an attribute or output of such a node.
    """
    graph = model.graph
    nodes = list(all_nodes(graph) if everywhere else _nodes_on_paths(graph))
    chosen = {node for node in nodes if can_be_expanded(node, rules)}
    chosen |= {node for node in all_nodes(graph) if is_preview(node)}
    kept = set(nodes) - chosen
    unknown = any(
        rules.definition(node) is not None or rules.refusal(node) is not None
        for node in all_nodes(graph)
    )
    if not chosen and not unknown:
        return False
    names = Names(graph)
    for node in list(all_nodes(graph)):
        known = rules.definition(node)
        if node in chosen and known is not None:
            replace_by_definition(node, known, names)
        elif is_bound(node):
            infer_outputs(node)
        elif not all(map(_is_known, node.outputs)):
            _infer(node, known, names)
        if known is not None and known.after is not None and node in kept:
            _continue(node, known.after, names)
    called = [node for node in chosen if node.graph is not None and _call_body(model, node)]
    _inline(model, called)
    return True


def expand_nodes(model: ir.Model, nodes: Iterable[ir.Node], rules: Rules) -> bool:
    """Replaces nodes, in place, with their definitions, whether gradients pass through them or not.

    Nodes that `can_be_expanded` is not true of stay, and so do those of which the definition does
    not support an attribute or output.

    Returns:
        Whether anything was changed, so that types must be inferred again.
    """
    names, called, replaced = Names(model.graph), [], False
    for node in nodes:
        known = rules.definition(node)
        with contextlib.suppress(UnsupportedError):
            if not can_be_expanded(node, rules):
                continue
            if known is not None:
                replace_by_definition(node, known, names)
                replaced = True
            elif _call_body(model, node):
                called.append(node)
    _inline(model, called)
    return bool(called) or replaced


def _inline(model: ir.Model, called: Collection[ir.Node]) -> None:
    """Inlines the function bodies that nodes were made to call."""
    if called:
        passes.InlinePass()(model)
        model.graph.opset_imports.pop(EXPANDED_DOMAIN, None)
        for graph in subgraphs(model.graph):
            graph.opset_imports.update(model.graph.opset_imports)


def _nodes_on_paths(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yields the nodes between xs and y of Gradient nodes, including those in subgraphs."""
    gradients = bound_nodes(graph)
    nodes = list(all_nodes(graph)) if gradients else []
    path = {node for each in gradients for node in Bound.of(each).path(nodes)}
    for node in path:
        yield node
        for inner in inner_graphs(node):
            yield from all_nodes(inner)


def replace_by_definition(node: ir.Node, known: Definition, names: Names) -> None:
    """Replaces a node with the nodes of its definition.

    Raises:
        UnsupportedError: If the definition does not support an attribute or output of the node.
    """
    tape = tape_before(node, names)
    inputs = [None if value is None else tape.tensor(value) for value in node.inputs]
    results = _apply(tape, node, known, inputs)
    for index, output in enumerate(node.outputs):
        if not (output.uses() or output.is_graph_output()):
            continue
        result = results[index] if index < len(results) else None
        if result is None:
            raise UnsupportedError(
                f"{describe(node)}: output {index} '{output.name}' is not available if a gradient "
                "passes through the node; cut the graph there by using another tensor in xs"
            )
        result.value.shape = _together(output.shape, result.value.shape)
        replace_value(tape, output, result)
    tape.graph.remove(node, safe=True)
    remove_unread(tape.nodes)


def _continue(node: ir.Node, after: Function, names: Names) -> None:
    """Lets the readers of a kept node's first output read a function of it."""
    tape, y = tape_before(node, names), node.outputs[0]
    readers = [(use.node, use.idx) for use in y.uses()]
    inputs = [None if value is None else tape.tensor(value) for value in node.inputs]
    with tape:
        result = after(tape.tensor(y), *inputs, **attribute_values(node)).value
    for made in tape.nodes:
        tape.graph.remove(made)
    tape.graph.insert_after(node, tape.nodes)
    for reader, index in readers:
        reader.replace_input_with(index, result)


def _is_known(value: ir.Value) -> bool:
    """Whether the type and the shape of a value are known, apart from symbolic sizes of inputs."""
    shape = value.shape
    return value.type is not None and shape is not None and not any(map(is_unknown, shape))


def _together(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """Merges two descriptions of a shape; sizes take precedence over symbols."""
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
    attributes = attribute_values(node)
    if unknown := sorted(set(attributes) - known.attributes):
        raise UnsupportedError(
            f"{describe(node)}: there is no gradient for attribute '{unknown[0]}' = "
            f"{attributes[unknown[0]]!r}; remove the attribute, or add a rule with @ortops.vjp"
        )
    return emit_definition(tape, node, known, inputs, attributes)


def _infer(node: ir.Node, known: Definition | None, names: Names) -> None:
    """Infers the types and shapes of a node's outputs, if possible."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if known is None:
        before = [output.shape for output in node.outputs]
        for output in node.outputs:
            output.shape = None  # `infer` would keep it, although it may contain unknown sizes
        with contextlib.suppress(ModelError):  # an unknown operator
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
    except (ModelError, UnsupportedError):  # matters only if a gradient passes through the node
        return
    for output, result in zip(node.outputs, results, strict=False):
        if result is not None and output.name:
            output.type = output.type or result.value.type
            output.shape = output.shape or result.value.shape


def _call_body(model: ir.Model, node: ir.Node) -> bool:
    """Converts a node to a call of a function with the body from its schema.

    Raises:
        UnsupportedError: If the body is for another opset, in which one of its operators differs.
    """
    assert node.graph is not None
    opset = node.graph.opset_imports[""]
    preview = is_preview(node)
    schema = _schema(node.op_type, node.domain, None if preview else opset)
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
    if preview:  # the body contains the graphs of its attributes, and is for any opset
        del proto.attribute[:]
        node.attributes.clear()
    function = ir.serde.deserialize_function(proto)
    function.opset_imports.setdefault("", opset)
    _check_same(node, function, opset)
    function.opset_imports[""] = opset  # a model can have only one version of the operators
    model.functions[function.identifier()] = function
    model.graph.opset_imports[EXPANDED_DOMAIN] = 1
    node.domain, node.overload = EXPANDED_DOMAIN, proto.overload
    return True


def _check_same(node: ir.Node, body: ir.Function, opset: int) -> None:
    """Checks that the operators of a body are the same in the model's opset, except for types."""
    written = body.opset_imports[""]
    for op_type in sorted({inner.op_type for inner in body.all_nodes()}):
        if _signature(op_type, written) != _signature(op_type, opset):
            raise UnsupportedError(
                f"{describe(node)}: its function body uses {op_type} of opset {written}, which "
                f"differs from that of the model's opset {opset}; convert the model to opset "
                f"{written} with onnx.version_converter"
            )


def _signature(op_type: str, opset: int) -> Any:
    """Returns the names of an operator's inputs and outputs, and its attributes."""
    schema = _schema(op_type, "", opset)
    attributes = {
        name: each.default_value.SerializeToString() for name, each in schema.attributes.items()
    }
    return [x.name for x in schema.inputs], [y.name for y in schema.outputs], attributes
