"""Checks the structure of an untrusted model before it is processed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import onnx

from ortops.errors import ModelError, did_you_mean
from ortops.graph.files.messages import (
    ITEM_SIZES,
    attribute_graphs,
    describe_node,
    external_file,
    is_light,
)
from ortops.graph.limits import LIMITS

_SIX_BITS = 0.75

_TYPED_DATA: dict[int, tuple[str, int]] = {
    onnx.TensorProto.FLOAT: ("float_data", 1),
    onnx.TensorProto.COMPLEX64: ("float_data", 2),
    onnx.TensorProto.DOUBLE: ("double_data", 1),
    onnx.TensorProto.COMPLEX128: ("double_data", 2),
    onnx.TensorProto.INT64: ("int64_data", 1),
    onnx.TensorProto.UINT32: ("uint64_data", 1),
    onnx.TensorProto.UINT64: ("uint64_data", 1),
    onnx.TensorProto.STRING: ("string_data", 1),
}
"""For each data type, the field of its elements, and the number of entries per element."""


def validate(proto: onnx.ModelProto, folder: Path | None = None, *, is_built: bool = False) -> None:
    """Rejects a well-formed message that cannot be processed as a model.

    Checked are the encoding of names, the nesting depth of graphs, the size of tensor data, the
    location of external data, whether there are the tensors that are read, and the types of inputs.
    The semantics of nodes are not checked.

    Args:
        proto: The model.
        folder: The folder of its file, if there is one.
        is_built: Whether the inference graph and the algorithms are as ortops has written them, so
            that only the rest is checked.

    Raises:
        ModelError: If a check fails.
    """
    about = (proto.producer_name, proto.producer_version, proto.domain, proto.doc_string)
    _check_text("model", about)
    for entry in proto.metadata_props:
        _check_text("metadata_props", (entry.key, entry.value))
    for opset in proto.opset_import:
        _check_text("opset_import", (opset.domain,))
    main = _check_graph(proto.graph, folder, 1, is_built=is_built)
    for value in proto.graph.input:
        _check_type(value.type, f"input '{value.name}'", required=True)
    for entry, info in enumerate(proto.training_info):
        scope = main._replace(place=f"training_info entry {entry}: ")
        _check_graph(info.algorithm, folder, 1, scope, is_built=is_built)
        _check_graph(info.initialization, folder, 1, scope)
        for binding in (*info.update_binding, *info.initialization_binding):
            _check_text("training_info binding", (binding.key, binding.value))
    for function in proto.functions:
        where = f"function {function.name!r}"
        _check_text(where, (function.domain, function.name, function.overload))
        _check_text(where, (*function.input, *function.output, *function.attribute))
        declared = {*function.attribute, *(each.name for each in function.attribute_proto)}
        scope = _Scope((_computed(function.node) | {*function.input},), declared)
        for default in function.attribute_proto:
            _check_attribute(default, where, folder, 1, scope)
        _check_nodes(function.node, folder, 1, scope)
        _check_known(function.output, scope, f"{where}: output '", "'")


class _Scope(NamedTuple):
    """What nodes may read.

    Attributes:
        tensors: Tensors of the graph, in any order of the nodes, and of those around it.
        attributes: Attributes of the function that the nodes are in; None outside functions.
        place: What messages begin with.
    """

    tensors: tuple[AbstractSet[str], ...] = ()
    attributes: AbstractSet[str] | None = None
    place: str = ""


_NOTHING = _Scope()
_ELEMENT_TYPES = frozenset(onnx.TensorProto.DataType.values())


def _computed(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output}


def _check_known(names: Iterable[str], scope: _Scope, before: str, after: str) -> None:
    for name in names:
        if name and not any(name in tensors for tensors in scope.tensors):
            raise ModelError(
                f"{scope.place}{before}{name}{after} is not defined; "
                + did_you_mean(name, sorted(set().union(*scope.tensors)))
            )


def _check_graph(
    graph: onnx.GraphProto,
    folder: Path | None,
    depth: int,
    outer: _Scope = _NOTHING,
    *,
    is_built: bool = False,
) -> _Scope:
    if depth > LIMITS.nested_graphs:
        raise ModelError(
            f"graph '{graph.name}': nesting depth {depth} exceeds the limit of "
            f"{LIMITS.nested_graphs} (ortops.graph.limits.LIMITS.nested_graphs)"
        )
    _check_text("graph", (graph.name, graph.doc_string))
    own = _computed(graph.node)
    own.update(each.name for each in (*graph.input, *graph.initializer))
    own.update(each.values.name for each in graph.sparse_initializer)
    scope = outer._replace(tensors=(own, *outer.tensors))
    if is_built:
        return scope
    values = (*graph.input, *graph.output, *graph.value_info)
    _check_text("graph", [value.name for value in values])
    for value in values:
        _check_type(value.type, f"value '{value.name}'")
    for tensor in graph.initializer:
        _check_tensor(tensor, folder)
    for sparse in graph.sparse_initializer:
        _check_tensor(sparse.values, folder)
        _check_tensor(sparse.indices, folder)
    _check_nodes(graph.node, folder, depth, scope)
    _check_known((value.name for value in graph.output), scope, "output '", "'")
    return scope


def _check_nodes(
    nodes: Iterable[onnx.NodeProto], folder: Path | None, depth: int, scope: _Scope
) -> None:
    for node in nodes:
        where = describe_node(node)
        _check_text(where, (node.op_type, node.domain, node.name, node.overload, node.doc_string))
        _check_text(where, (*node.input, *node.output))
        _check_known(node.input, scope, f"{where} reads '", "', which")
        seen: set[str] = set()
        for attribute in node.attribute:
            _check_attribute(attribute, where, folder, depth, scope)
            if attribute.name in seen:
                raise ModelError(
                    f"{where}: attribute '{attribute.name}' occurs twice; remove one of them"
                )
            seen.add(attribute.name)


def _check_attribute(
    attribute: onnx.AttributeProto, where: str, folder: Path | None, depth: int, scope: _Scope
) -> None:
    reference = attribute.ref_attr_name
    _check_text(where, (attribute.name, reference))
    if reference and reference not in (scope.attributes or ()):
        at = "outside a function" if scope.attributes is None else "in a function without it"
        raise ModelError(
            f"{where}: attribute '{attribute.name}' refers to the attribute '{reference}' {at}; "
            "write its value"
        )
    if attribute.type == onnx.AttributeProto.STRING:
        _check_text(where, _decoded((attribute.s,)))
    elif attribute.type == onnx.AttributeProto.STRINGS:
        _check_text(where, _decoded(attribute.strings))
    tensors = (*attribute.tensors, *([attribute.t] if attribute.HasField("t") else []))
    for tensor in tensors:
        _check_tensor(tensor, folder)
    for graph in attribute_graphs(attribute):
        _check_graph(graph, folder, depth + 1, scope)


def _check_type(kind: onnx.TypeProto, where: str, *, required: bool = False) -> None:
    """Rejects unknown types and deeply nested ones, which protobuf accepts up to depth 100."""
    for _ in range(LIMITS.nested_graphs):
        match kind.WhichOneof("value"):
            case "sequence_type":
                kind = kind.sequence_type.elem_type
            case "optional_type":
                kind = kind.optional_type.elem_type
            case "map_type":
                kind = kind.map_type.value_type
            case found:
                if required and (found is None or _is_undefined(getattr(kind, found))):
                    raise ModelError(f"{where}: it has no type; declare one, such as FLOAT[batch]")
                elements = getattr(getattr(kind, found or "", None), "elem_type", 0)
                if elements not in _ELEMENT_TYPES:
                    raise ModelError(
                        f"{where}: its element type {elements} does not exist; declare another"
                    )
                return
    raise ModelError(
        f"{where}: the nesting depth of its type must be less than {LIMITS.nested_graphs} "
        "(ortops.graph.limits.LIMITS.nested_graphs)"
    )


def _is_undefined(kind: object) -> bool:
    return getattr(kind, "elem_type", None) == onnx.TensorProto.UNDEFINED


def _decoded(texts: Iterable[bytes]) -> Iterator[str | bytes]:
    """Yields string attributes as text, unless they are not UTF-8; protobuf has them as bytes."""
    for text in texts:
        try:
            yield text.decode()
        except UnicodeDecodeError:
            yield text


def _check_text(where: str, texts: Iterable[str | bytes]) -> None:
    """Rejects names that are not UTF-8, which protobuf returns as bytes."""
    for text in texts:
        if isinstance(text, bytes):
            raise ModelError(f"{where}: {text[:80]!r} is not UTF-8; encode names as UTF-8")


def _check_tensor(tensor: onnx.TensorProto, folder: Path | None) -> None:
    """Rejects a tensor whose data do not have the size that its dimensions require."""
    _check_text("initializer", (tensor.name, tensor.doc_string))
    where = f"initializer '{tensor.name}'"
    if any(dim < 0 for dim in tensor.dims):
        raise ModelError(f"{where}: dimensions must be >= 0, got {list(tensor.dims)}")
    if tensor.data_type != onnx.TensorProto.STRING and tensor.data_type not in ITEM_SIZES:
        raise ModelError(
            f"{where}: data_type must be a value of onnx.TensorProto.DataType, got "
            f"{tensor.data_type}"
        )
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if not is_light(tensor):
            external_file(tensor, folder)
        return
    count = math.prod(tensor.dims)
    if tensor.data_type == onnx.TensorProto.STRING or not tensor.HasField("raw_data"):
        field, numbers = _TYPED_DATA.get(tensor.data_type, ("int32_data", 1))
        given = len(getattr(tensor, field))
        size = ITEM_SIZES.get(tensor.data_type, 1)
        wanted = math.ceil(count * size) if size < 1 else count * numbers  # small types are packed
        unit = "elements"
        if size == _SIX_BITS:  # the standard does not define their packing
            return
    else:
        given, unit = len(tensor.raw_data), "bytes"
        wanted = math.ceil(count * ITEM_SIZES[tensor.data_type])
    if given != wanted:
        raise ModelError(
            f"{where}: dimensions {list(tensor.dims)} require {wanted} {unit} of data, got {given}"
        )
