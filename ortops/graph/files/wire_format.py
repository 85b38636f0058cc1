"""Where the data of tensors lie in the bytes of a model, so that they can be replaced there.

The wire format: https://protobuf.dev/programming-guides/encoding. The numbers of the fields are
those of onnx.proto.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["ByteSpan", "byte_spans"]

_GRAPH, _TRAINING_INFO, _ALGORITHM, _INITIALIZER = 7, 20, 2, 5
_NAME, _RAW_DATA = 8, 9
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class ByteSpan(NamedTuple):
    """Where the data of a tensor are.

    Attributes:
        offset: The first byte.
        length: How many bytes.
    """

    offset: int
    length: int


def byte_spans(message: bytes) -> dict[str, list[ByteSpan]]:
    """Returns where the raw data of initializers are, in the graph and in training algorithms.

    Args:
        message: A serialized ModelProto, as protobuf has just written it.
    """
    found: dict[str, list[ByteSpan]] = {}
    whole = ByteSpan(0, len(message))
    graphs = [place for number, place in _fields(message, whole) if number == _GRAPH]
    for number, info in _fields(message, whole):
        if number == _TRAINING_INFO:
            graphs += [place for field, place in _fields(message, info) if field == _ALGORITHM]
    for graph in graphs:
        for number, tensor in _fields(message, graph):
            if number == _INITIALIZER:
                parts = dict(_fields(message, tensor))
                if _NAME in parts and _RAW_DATA in parts:
                    begin, length = parts[_NAME]
                    name = message[begin : begin + length].decode()
                    found.setdefault(name, []).append(parts[_RAW_DATA])
    return found


def _fields(message: bytes, inside: ByteSpan) -> Iterator[tuple[int, ByteSpan]]:
    """Yields the number and the content of each field of a message that has a length."""
    at, end = inside.offset, inside.offset + inside.length
    while at < end:
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
        elif kind == _LENGTH:
            length, at = _varint(message, at)
            yield key >> 3, ByteSpan(at, length)
            at += length
        else:
            at += {_FIXED64: 8, _FIXED32: 4}[kind]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number in base 128, and where what comes after it begins."""
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
