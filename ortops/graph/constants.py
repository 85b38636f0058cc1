"""Constants of graphs: their content, the numbers that they are made of, and dimensions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops._common.numbers import Array, cast_numbers, is_numeric
from ortops.errors import ModelError

Dim: TypeAlias = int | str | None
"""A dimension: its size, its symbol, or None if it is unknown."""

DEFAULT_OPSET = 21
IR_VERSION = 10
VARIABLE = "ortops.variable"
"""The key in ``value.meta`` of initializers that are variables, so that they are not folded."""


DIGEST_SIZE = 64
"""The most bytes of `identity_of`."""


def numpy_dtype(value: ir.Value) -> np.dtype[Any] | None:
    """Returns the element type of an ONNX value as a numpy dtype, or None if it is unknown."""
    return None if value.dtype is None else np.dtype(value.dtype.numpy())


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the content of a constant, or None for values that are known at run time only.

    An initializer that is also an input has a default value and is not a constant; neither is a
    value marked as a `VARIABLE`.

    Raises:
        ModelError: If it is the output of a Constant node with a wrong attribute.
    """
    if value.is_graph_input() or VARIABLE in value.meta:
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant":
        content = node.attributes.get("value")
        legal = len(node.attributes) == len(node.outputs) == 1 and node.domain == ""
        if legal and content is not None and content.type == ir.AttributeType.TENSOR:
            if content.is_ref():
                return None
            # onnx-ir checks the class of the tensor against a protocol, which takes much longer.
            return cast(ir.TensorProtocol, content.value)
    try:
        return ir.convenience.get_const_tensor(value)
    except (TypeError, ValueError) as error:
        name = value.name if node is None else node.name or value.name
        raise ModelError(f"Constant node '{name}': {error}; correct its attribute") from error


def constant_number(value: ir.Value) -> float | None:
    """Returns the number in a constant of one element, or None."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    return float(tensor.numpy().item())


def numbers_of(given: object, dtype: np.dtype[Any] | None, where: str) -> Array:
    """Converts Python numbers to a dtype, which must be able to represent them up to rounding."""
    array = np.asarray(given)
    if array.size == 0 and dtype is None:
        return array.astype(np.int64)
    if dtype is None and array.dtype == np.float64:
        return array.astype(np.float32)  # ONNX's default for numbers without a type
    if dtype is None:
        return array
    if not is_numeric(array.dtype):
        return array.astype(dtype)
    converted, lost = cast_numbers(array, dtype)
    if lost is not None:
        raise ModelError(
            f"{where}: {dtype}, the dtype of the other operand, cannot represent {given!r}; cast "
            "the tensor with .astype, or pass a number of its dtype"
        )
    return converted


def storable(given: npt.ArrayLike) -> np.ndarray[Any, Any]:
    """Returns an array that a tensor can hold; text as bytes, as in ONNX."""
    array = np.asarray(given)
    if array.dtype.kind not in "OSTU":
        return array
    texts = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
    if not all(isinstance(each, bytes) for each in texts):
        raise ModelError(f"a constant must be an array of numbers or of strings, got {given!r}")
    encoded = np.empty(len(texts), object)
    encoded[:] = texts
    return encoded.reshape(array.shape)


def identity_of(array: np.ndarray[Any, Any]) -> bytes:
    """Returns the bytes of a small array, and a digest of those of a large one."""
    if array.dtype == object:  # text
        return repr(array.tolist()).encode()
    if array.nbytes <= DIGEST_SIZE:
        return array.tobytes()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat.data, digest_size=DIGEST_SIZE).digest()


def stored(array: np.ndarray[Any, Any], name: str | None = None) -> ir.TensorProtocol:
    """Converts an array to a tensor of onnx-ir."""
    if array.dtype == object:
        return ir.StringTensor(array, shape=ir.Shape(array.shape), name=name)
    if array.dtype.kind in "biuf" and array.dtype.isbuiltin:
        return ir.Tensor(array, name=name)
    return ir.tensor(array, name=name)  # supports all dtypes, but is slower


def typed_value(name: str, dtype: npt.DTypeLike, shape: Sequence[Dim] | None) -> ir.Value:
    """Returns a new value of a type and a shape."""
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    return ir.Value(name=name, type=kind, shape=None if shape is None else ir.Shape(shape))


def dims_of(shape: ir.Shape) -> tuple[Dim, ...]:
    """Returns the dimensions of a shape."""
    dims = shape.dims
    if ir.SymbolicDim not in map(type, dims):  # a hot path: most sizes of a step are known
        return cast(tuple[int, ...], dims)
    return tuple(dim if isinstance(dim, int) else dim.value for dim in dims)
