"""Reads onnxruntime's adapter files, which are flatbuffers.

This reader checks all bounds. Older versions of onnxruntime, such as 1.21, trust the dimensions in
a file and read past its end.

The format: ``adapter_schema.fbs`` in onnxruntime, and https://flatbuffers.dev/internals
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortops.errors import ModelError
from ortops.graph.files.loading import readable
from ortops.graph.files.opening import read_regular
from ortops.lora.model import Array

_IDENTIFIER = b"TORT"
_FORMAT_VERSION = 1
_MOST_AXES = 64
_TYPES: Mapping[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype("<f4"),
    onnx.TensorProto.FLOAT16: np.dtype("<f2"),
    onnx.TensorProto.DOUBLE: np.dtype("<f8"),
}


def read_adapter_file(file: Path) -> tuple[Mapping[str, Array], int, int]:
    """Returns the tensors of an adapter file, its model version and its adapter version.

    Raises:
        ModelError: If it cannot be read, or is not an adapter file.
    """
    content = readable(file, read_regular, "pass the path of an adapter")
    try:
        return _Flatbuffer(content).adapter()
    except (struct.error, ValueError, OverflowError) as error:
        raise ModelError(
            f"file '{file}': not an adapter of onnxruntime ({error}); give a file written by "
            "ortops.lora.save_adapter"
        ) from error


class _Flatbuffer:
    """The content of a file. Positions are byte offsets from its start."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def adapter(self) -> tuple[dict[str, Array], int, int]:
        if self._content[4:8] != _IDENTIFIER:
            raise ValueError(f"it does not start with the identifier {_IDENTIFIER!r}")
        root = self._number("I", 0)
        version = self._scalar(root, 0)
        if version != _FORMAT_VERSION:
            raise ValueError(f"its format version must be {_FORMAT_VERSION}, got {version}")
        arrays: dict[str, Array] = {}
        first, count = self._vector(root, 3, 4)
        for place in range(first, first + 4 * count, 4):
            name, array = self._parameter(place + self._number("I", place))
            if name in arrays:
                raise ValueError(f"it has '{name:.200}' twice")
            arrays[name] = array
        return arrays, self._scalar(root, 2), self._scalar(root, 1)

    def _parameter(self, table: int) -> tuple[str, Array]:
        begin, size = self._vector(table, 0, 1)
        name = self._content[begin : begin + size].decode()
        begin, axes = self._vector(table, 1, 8)
        if axes > _MOST_AXES:
            raise ValueError(f"its '{name:.200}' has {axes} axes")
        shape = [self._number("q", begin + 8 * axis) for axis in range(axes)]
        kind = self._scalar(table, 2)
        if kind not in _TYPES:
            raise ValueError(
                f"its '{name:.200}' must be FLOAT, FLOAT16 or DOUBLE, got data_type {kind}"
            )
        begin, size = self._vector(table, 3, 1)
        dtype = _TYPES[kind]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f"its '{name:.200}' has {size} bytes, which do not fit shape {shape}")
        flat = np.frombuffer(self._content, dtype, size // dtype.itemsize, begin)
        return name, flat.astype(dtype.newbyteorder("=")).reshape(shape)

    def _number(self, kind: str, place: int) -> int:
        if place < 0:  # Python would count it from the end
            raise ValueError(f"an offset points {-place} bytes before its start")
        (number,) = struct.unpack_from(f"<{kind}", self._content, place)
        return int(number)

    def _field(self, table: int, index: int) -> int:
        """Returns the position of a field of a table; 0 if it is absent."""
        fields = table - self._number("i", table)
        place = 4 + 2 * index
        if place >= self._number("H", fields):
            return 0
        offset = self._number("H", fields + place)
        return table + offset if offset else 0

    def _scalar(self, table: int, index: int) -> int:
        place = self._field(table, index)
        return self._number("i", place) if place else 0

    def _vector(self, table: int, index: int, width: int) -> tuple[int, int]:
        """Returns the position and the number of the elements of a vector."""
        place = self._field(table, index)
        if not place:
            return 0, 0
        start = place + self._number("I", place)
        count = self._number("I", start)
        if start + 4 + width * count > len(self._content):
            raise ValueError(f"a vector ends after its {len(self._content)} bytes")
        return start + 4, count
