"""Schemas of operators, and inference of types and shapes from them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.constants import (
    DIGEST_SIZE,
    IR_VERSION,
    Dim,
    constant_tensor,
    dims_of,
    identity_of,
    numpy_dtype,
    stored,
)
from ortops.graph.files.serialization import is_map
from ortops.graph.operators import ELEMENTWISE
from ortops.graph.pooled_sizes import pooled_sizes

_SMALL = 4096  # constants with at most this many elements are used in shape inference

_MOST_INFERRED = 10_000
_HASHABLE = frozenset(
    {
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.STRING,
        ir.AttributeType.STRINGS,
        ir.AttributeType.TENSOR,
    }
)
"""Types of attributes that can be part of a key of the inference cache."""

_BROADCASTING = ELEMENTWISE - {"CastLike", "Clip", "PRelu", "SwiGLU"}
"""Operators whose output has the shape to which all inputs are broadcast."""

_Inferred: TypeAlias = tuple[tuple[ir.TypeProtocol | None, tuple[Dim, ...] | None], ...]
_inferred: dict[tuple[object, ...], _Inferred] = {}  # a cache, because layers of a model repeat


def infer(node: ir.Node, imports: MutableMapping[str, int]) -> None:
    """Infers the types and shapes of a node's outputs.

    Args:
        node: A node.
        imports: The versions of the operators in its graph, to which a missing one is added.

    Raises:
        ModelError: If its inputs are invalid.
    """
    op_type = node.op_type
    if op_type in ("LessOrEqual", "GreaterOrEqual"):
        op_type = "Less"  # same types and shapes; onnx < 1.20 cannot infer them
    schema = schema_of(op_type, node.domain, imports)
    if not schema.has_type_and_shape_inference_function:
        _infer_types(node, schema)
        return
    if any(value is not None and value.name and value.type is None for value in node.inputs):
        _infer_types(node, schema)
        return
    first = node.inputs[0].shape if op_type == "Slice" and node.inputs[0] else None
    if first is not None and any(isinstance(dim, int) and dim < 1 for dim in first):
        _infer_types(node, schema)  # onnx aborts the process where steps are negative
        return
    dims = _broadcast_dims(node)
    key = _inference_key(node, imports, sizes=dims is None)
    found = None if key is None else _inferred.get(key)
    if found is None:
        found = _infer_anew(node, schema, imports)
        if key is not None:
            if len(_inferred) >= _MOST_INFERRED:
                _inferred.clear()
            _inferred[key] = found
    for value, (kind, inferred) in zip(node.outputs, found, strict=True):
        if value.type is None:
            value.type = kind
        if value.shape is None and inferred is not None:
            value.shape = ir.Shape(inferred if dims is None else dims)


def _broadcast_dims(node: ir.Node) -> tuple[int, ...] | None:
    """Returns the sizes to which a node broadcasts inputs of known sizes; None for other nodes.

    With them, onnx infers elementwise nodes once for all sizes. Most nodes of a step are such.
    """
    if node.op_type not in _BROADCASTING or node.domain:
        return None
    shapes = {None if v is None or v.shape is None else dims_of(v.shape) for v in node.inputs}
    if any(dims is None or any(type(dim) is not int for dim in dims) for dims in shapes):
        return None
    known = cast(set[tuple[int, ...]], shapes)
    try:
        return known.pop() if len(known) == 1 else np.broadcast_shapes(*known)
    except ValueError:  # of which onnx has a message
        return None


def _infer_anew(node: ir.Node, schema: onnx.defs.OpSchema, imports: Mapping[str, int]) -> _Inferred:
    """Returns the type and dimensions of each output of a node whose inputs have types."""
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    for value in node.inputs:
        if value is None or not value.name:
            continue
        types[value.name] = _type_proto(value)
        tensor = constant_tensor(value)
        if tensor is not None and tensor.size <= _SMALL:
            data[value.name] = ir.serde.serialize_tensor(tensor)
    proto = ir.serde.serialize_node(node)
    proto.op_type = schema.name
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            schema,
            proto,
            types,
            data,
            opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in imports.items()],
            ir_version=IR_VERSION,
        )
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        reason = str(error).strip().rsplit("] ", 1)[-1]
        shapes = ", ".join(described(v) if v else "absent" for v in node.inputs)
        raise ModelError(f"{node.op_type} node '{node.name}': {reason}; got {shapes}") from error
    # Absent outputs share a name.
    typed = [inferred.get(value.name) if value.name else None for value in node.outputs]
    sizes = pooled_sizes(node)
    return tuple(_type_and_dims(each, sizes) for each in typed)


def _type_and_dims(
    typed: onnx.TypeProto | None, sizes: Sequence[int | None] | None
) -> tuple[ir.TypeProtocol | None, tuple[Dim, ...] | None]:
    """Returns an inferred type and its dimensions, with the known spatial sizes of a pooling."""
    if typed is None or is_map(typed):
        return None, None
    kind = ir.serde.deserialize_type_proto_for_type(typed)
    shape = ir.serde.deserialize_type_proto_for_shape(typed)
    dims = None if shape is None else dims_of(shape)
    if isinstance(kind, ir.SequenceType) and dims is not None:
        # A symbol would mean that all elements of the sequence have equal sizes.
        dims = tuple(dim if isinstance(dim, int) else None for dim in dims)
    if sizes is not None and dims:
        dims = (*dims[:2], *(a or b for a, b in zip(sizes, dims[2:], strict=True)))
    return kind, dims


ML = "ai.onnx.ml"
"""The domain of classical machine learning."""


@functools.cache
def _newest_ml() -> int:
    return max(each.since_version for each in onnx.defs.get_all_schemas() if each.domain == ML)


@functools.cache
def is_of_ml(op_type: str) -> bool:
    """Whether an operator is in the domain of classical machine learning alone."""
    return not onnx.defs.has(op_type) and bool(onnx.defs.has(op_type, ML))


_schema = functools.cache(onnx.defs.get_schema)  # each call makes an object, which takes long


def schema_of(op_type: str, domain: str, imports: MutableMapping[str, int]) -> onnx.defs.OpSchema:
    """Returns the schema of an operator.

    Args:
        op_type: The operator.
        domain: Its domain.
        imports: The versions of domains, to which a missing one is added.

    Raises:
        ModelError: If there is no such operator.
    """
    if domain == ML:
        imports.setdefault(domain, _newest_ml())
    opset = imports.get(domain, 1)
    try:
        return _schema(op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        place = f"domain '{domain}'" if domain else "the standard"
        raise ModelError(f"{op_type}: no such operator in {place} at opset {opset}") from error


_FIXED_TYPES = {"tensor(float)": ir.DataType.FLOAT, "tensor(int64)": ir.DataType.INT64}
"""Output types that schemas specify directly, without a type constraint."""


def _infer_types(node: ir.Node, schema: onnx.defs.OpSchema) -> None:
    """Sets the output types that follow from the schema alone."""
    known = {
        formal.type_str: value.type
        for formal, value in zip(schema.inputs, node.inputs, strict=False)
        if value is not None and value.type is not None
    }
    for formal, value in zip(schema.outputs, node.outputs, strict=False):
        if formal.type_str in _FIXED_TYPES:
            value.type = ir.TensorType(_FIXED_TYPES[formal.type_str])
        elif value.type is None:
            value.type = known.get(formal.type_str)


def allows(schema: onnx.defs.OpSchema, type_str: str, dtype: np.dtype[Any]) -> bool:
    """Whether a formal type allows an element type."""
    name = onnx.helper.tensor_dtype_to_string(ir.DataType.from_numpy(dtype).value)
    wanted = f"tensor({name.removeprefix('TensorProto.').lower()})"
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            return wanted in constraint.allowed_type_strs
    return wanted == type_str


def attribute_of(schema: onnx.defs.OpSchema, name: str, value: Any) -> ir.Attr:
    """Converts a Python value to the attribute type of the schema."""
    if name not in schema.attributes:
        known = ", ".join(sorted(schema.attributes)) or "none"
        raise ModelError(f"{schema.name}: unknown attribute '{name}'; the operator has {known}")
    kind = ir.AttributeType(cast(int, schema.attributes[name].type))
    match kind:
        case ir.AttributeType.FLOAT:
            value = float(value)
        case ir.AttributeType.INT:
            value = int(value)
        case ir.AttributeType.INTS:
            value = tuple(int(item) for item in value)
        case ir.AttributeType.FLOATS:
            value = tuple(float(item) for item in value)
        case ir.AttributeType.TENSOR:
            value = stored(np.asarray(value))
        case _:
            pass
    return ir.Attr(name, kind, value)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    assert value.type is not None
    ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _inference_key(
    node: ir.Node, imports: Mapping[str, int], *, sizes: bool
) -> tuple[object, ...] | None:
    """Returns a key for the inference cache; None if the node has large constants or subgraphs.

    Keys are small, so that the cache is: they have digests in place of constants.

    Args:
        node: The node.
        imports: The versions of the operators in its graph.
        sizes: Whether the result depends on the sizes and the content of the inputs.
    """
    key: list[object] = [node.domain, node.op_type, *imports.items()]
    key += [bool(value.name) for value in node.outputs]
    for name, attribute in node.attributes.items():
        if attribute.type not in _HASHABLE:
            return None
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = _content(cast(ir.TensorProtocol, value))
            if value is None:
                return None
        if isinstance(value, Sequence) and len(value) > DIGEST_SIZE:
            return None
        key += [name, tuple(value) if isinstance(value, Sequence) else value]
    for read in node.inputs:
        if read is None or not read.name:
            key.append(None)
            continue
        kind = read.type  # whose hash onnx-ir makes of its representation as text
        key.append(kind.dtype if type(kind) is ir.TensorType else kind)
        if sizes:
            tensor = constant_tensor(read)
            key.append(None if read.shape is None else dims_of(read.shape))
            key.append(None if tensor is None else _content(tensor))
    return tuple(key)


def _content(tensor: ir.TensorProtocol) -> tuple[object, ...] | None:
    """Returns a hashable key for the content of a small tensor, and None for a big one."""
    if tensor.size > _SMALL:
        return None
    return tensor.dtype, *tensor.shape, identity_of(tensor.numpy())


def described(value: ir.Value) -> str:
    """Returns the name, type and shape of a value as text for messages."""
    dims = "?" if value.shape is None else ", ".join(str(dim) for dim in dims_of(value.shape))
    return f"Tensor({value.name or ''!r}, {numpy_dtype(value)}, [{dims}])"
