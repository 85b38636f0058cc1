"""Serializes light models piece by piece, so that one tensor's data are in memory at a time."""

from __future__ import annotations

import sys
from typing import BinaryIO, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from ortops.graph.files.external import LightModel, serialize, too_large
from ortops.graph.files.held_file import Tree
from ortops.graph.files.messages import LOCATION, initializers, is_light, location_of
from ortops.graph.files.wire_format import (
    ALGORITHM,
    GRAPH,
    INITIALIZATION,
    INITIALIZER,
    MOST_BYTES,
    RAW_DATA,
    TRAINING_INFO,
    ByteSpan,
    FieldReader,
    length_prefix,
)

_MARK = LOCATION.encode()
_GRAPH: Tree = {INITIALIZER: {RAW_DATA: None}}
_MODEL: Tree = {GRAPH: _GRAPH, TRAINING_INFO: {INITIALIZATION: _GRAPH, ALGORITHM: _GRAPH}}
"""The field numbers that lead to the data of initializers."""

Part: TypeAlias = bytes | ir.TensorProtocol
"""Bytes of a message, or a tensor whose data are the bytes."""


def serialized_parts(model: LightModel) -> list[Part]:
    """Returns the parts of the message that `LightModel.attached` has: its bytes, in order.

    Args:
        model: The model; it is not modified, and its data are not read.

    Raises:
        ModelError: If it is 2 GB or larger.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    for tensor in initializers(proto):
        if is_light(tensor):
            location = location_of(tensor)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = location.encode()  # replaced by the data below
    message = serialize(proto)
    parts, size = _Insertion(message, model).copy(ByteSpan(0, len(message)), _MODEL)
    if size > MOST_BYTES:
        raise too_large(proto)
    return parts


def write_parts(stream: BinaryIO, parts: list[Part]) -> None:
    """Writes the parts of a message."""
    for part in parts:
        if isinstance(part, bytes):
            stream.write(part)
        else:
            write_data(stream, part)


def write_data(stream: BinaryIO, tensor: ir.TensorProtocol) -> None:
    """Writes the data of a tensor in the format of ``raw_data``."""
    if tensor.dtype.bitwidth < 8 or sys.byteorder != "little":
        stream.write(tensor.tobytes())
    else:  # tofile of numpy and onnx-ir ignores a full disk
        stream.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)


class _Insertion:
    """Inserts data into a serialized model, in place of their locations.

    Args:
        message: The serialized model.
        model: The model with the data.
    """

    def __init__(self, message: bytes, model: LightModel) -> None:
        self._message, self._data = message, model.data
        self._reader = FieldReader(lambda begin, end: message[begin:end])

    def copy(self, span: ByteSpan, tree: Tree) -> tuple[list[Part], int]:
        """Returns the parts of a message with data, and their size in bytes."""
        parts: list[Part] = []
        size, copied, end = 0, *span
        for number, begin, content in self._reader.fields(span):
            if number not in tree:
                continue
            inner = tree[number]
            if inner is not None:
                new, length = self.copy(content, inner)
                if len(new) == 1:  # without data
                    continue
            elif self._message.startswith(_MARK, content.begin, content.end):
                data = self._data[self._message[slice(*content)].decode()]
                new, length = [data], data.nbytes
            else:
                continue
            head = self._message[copied:begin] + length_prefix(number, length)
            parts += [head, *new]
            size += len(head) + length
            copied = content.end
        parts.append(self._message[copied:end])
        return parts, size + end - copied
