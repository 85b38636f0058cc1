"""Reads and writes arrays in the safetensors format: a JSON header, followed by the data.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.errors import ModelError, UnsupportedError
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.json_text import read_json
from ortops.graph.files.opening import open_regular, read_regular
from ortops.graph.limits import LIMITS

_TYPES: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ir.DataType.BFLOAT16.numpy(),
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_REMEDY = "give a safetensors file"
_NAMES = {np.dtype(kind): name for name, kind in _TYPES.items()}


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays to a file, which is replaced atomically.

    Args:
        path: The file.
        arrays: The arrays by name.
        metadata: Texts to store with them, by key.

    Raises:
        UnsupportedError: If the format does not support a dtype.
    """
    header = _header(arrays, metadata)

    def write(stream: BinaryIO) -> None:
        stream.write(header)
        for array in arrays.values():
            stream.write(_bytes(array))

    write_atomically(path, write)


def dump_safetensors(
    arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Returns arrays in the safetensors format.

    Args:
        arrays: The arrays by name.
        metadata: Texts to store with them, by key.

    Raises:
        UnsupportedError: If the format does not support a dtype.
    """
    return b"".join((_header(arrays, metadata), *map(_bytes, arrays.values())))


def _bytes(array: Array) -> bytes:
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _header(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise UnsupportedError(
                f"variable '{name}': safetensors does not support {array.dtype}, only "
                f"{', '.join(str(dtype) for dtype in _NAMES)}"
            )
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Returns the arrays of a file by name.

    Raises:
        ModelError: If it is not a safetensors file.
        UnsupportedError: If numpy has no such element type.
    """
    content = memoryview(read_regular(path, remedy=_REMEDY))
    return {name: array.astype(array.dtype) for name, array in _arrays(path, content).items()}


def map_safetensors(
    path: str | os.PathLike[str], unreadable: dict[str, str] | None = None
) -> dict[str, Array]:
    """Returns the arrays of a file by name, mapped into memory: they are read when they are used.

    The file must not be changed in place meanwhile; it may be replaced or removed.

    Args:
        path: The file.
        unreadable: Gets the types that numpy does not have, by name, instead of the error.

    Raises:
        ModelError: If it is not a safetensors file.
        UnsupportedError: If numpy has no such element type.
    """
    with open_regular(path, error=ModelError, what="file", remedy=_REMEDY) as stream:
        if not os.fstat(stream.fileno()).st_size:  # which cannot be mapped
            return _arrays(path, memoryview(b""), unreadable)
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    return _arrays(path, memoryview(content), unreadable)


def _arrays(
    path: str | os.PathLike[str], content: memoryview, unreadable: dict[str, str] | None = None
) -> dict[str, Array]:
    """Returns arrays that share the memory of a file's content."""
    size = int.from_bytes(content[:8], "little")
    found: dict[str, Array] = {}
    try:
        if size > min(len(content) - 8, LIMITS.metadata_bytes):
            raise ValueError(f"its header is said to have {size:,} bytes")
        header = read_json(bytes(content[8 : 8 + size]), unique=True)
        header.pop("__metadata__", None)
        data = content[8 + size :]
        for name, entry in header.items():
            shape, place = entry["shape"], entry["data_offsets"]
            if not (_are_sizes(shape) and _are_sizes(place)):
                raise ValueError(
                    f"{name!r:.80} has an invalid shape {shape!s:.80} or place {place!s:.80}"
                )
        spans = sorted(entry["data_offsets"] for entry in header.values())
        if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), len(data)]:
            raise ValueError("its tensors do not cover the data without gaps and overlaps")
        for name, entry in header.items():
            kind, shape = entry["dtype"], entry["shape"]
            if kind not in _TYPES and unreadable is not None:
                unreadable[name] = f"its type is {kind!s:.80}"
                continue
            if kind not in _TYPES:
                raise UnsupportedError(
                    f"file '{path}': '{name}' must be of type {', '.join(_TYPES)}, got {kind!s:.80}"
                )
            dtype = np.dtype(_TYPES[kind])
            begin, end = entry["data_offsets"]
            if end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"'{name}' has bytes {begin} to {end}, which do not fit its shape")
            little = np.frombuffer(data[begin:end], dtype.newbyteorder("<"))
            found[name] = little.astype(dtype, copy=False).reshape(shape)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"file '{path}': not a safetensors file ({error}); write it again"
        ) from error
    return found


def _are_sizes(value: Any) -> bool:
    """Whether a value is a list of a few sizes; the product of many takes long."""
    is_short = isinstance(value, list) and len(value) <= 64
    return is_short and all(type(size) is int and 0 <= size < 2**63 for size in value)
