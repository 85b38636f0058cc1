"""Reads the fields of serialized protobuf messages without parsing all of them.

Source: https://protobuf.dev/programming-guides/encoding. The field numbers are those of onnx.proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

GRAPH, TRAINING_INFO = 7, 20  # fields of a ModelProto
INITIALIZATION, ALGORITHM = 1, 2  # of a TrainingInfoProto
INITIALIZER = 5  # of a GraphProto
_NAME, RAW_DATA = 8, 9  # of a TensorProto

MOST_BYTES = 2**31 - 1
"""protobuf's limit for a message, in bytes."""

_VARINT, _EIGHT_BYTES, _LENGTH, _GROUP, _GROUP_END, _FOUR_BYTES = range(6)  # wire types
_BLOCK = 2**16  # the number of bytes to read at a time
_MOST_BITS = 70  # of a varint: 10 bytes of 7 bits


class ByteSpan(NamedTuple):
    """A range of bytes.

    Attributes:
        begin: The offset of the first byte.
        end: The offset after the last byte.
    """

    begin: int
    end: int

    @property
    def length(self) -> int:
        """The number of bytes."""
        return self.end - self.begin


class MalformedError(Exception):
    """The bytes are not a valid message, or have too many fields."""


class FieldReader:
    """Iterates over the fields of a message and of the messages in it.

    Args:
        read: Returns the bytes between two offsets of the outer message.
        most_fields: The maximum number of fields that are read in total.
    """

    def __init__(self, read: Callable[[int, int], bytes], most_fields: float = math.inf) -> None:
        self._read, self._fields_left = read, most_fields
        self._block, self._begin = b"", 0

    def fields(self, span: ByteSpan) -> Iterator[tuple[int, int, ByteSpan]]:
        """Yields the number of each field, its offset, and the span of its content.

        Args:
            span: The span of a message.

        Raises:
            MalformedError: If the message is malformed, or has too many fields.
        """
        at, end = span
        while at < end:
            begin = at
            self._fields_left -= 1
            tag, at = self._varint(at)
            if not tag >> 3 or self._fields_left < 0:
                raise MalformedError
            wire = tag & 7
            if wire == _VARINT:
                length = self._varint(at)[1] - at
            elif wire == _LENGTH:
                length, at = self._varint(at)
            elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
                length = 8 if wire == _EIGHT_BYTES else 4
            else:
                raise MalformedError
            content = ByteSpan(at, at + length)
            at += length
            if at > end:
                raise MalformedError
            yield tag >> 3, begin, content

    def _varint(self, at: int) -> tuple[int, int]:
        """Returns an integer of variable length, and the offset after it."""
        value = shift = 0
        while shift < _MOST_BITS:
            if not 0 <= at - self._begin < len(self._block):
                self._block, self._begin = self._read(at, at + _BLOCK), at
                if not self._block:
                    break
            byte = self._block[at - self._begin]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise MalformedError


def length_prefix(number: int, length: int) -> bytes:
    """Returns the bytes before the content of a field with a length."""
    return _encoded(number << 3 | _LENGTH) + _encoded(length)


def unknown_fields(message: Any) -> bytes:
    """Returns the bytes of the fields of a message that its type does not have.

    A file that a later version of ONNX wrote may have such fields.

    Args:
        message: A message, or an `UnknownFieldSet`.
    """
    return b"".join(map(_field, UnknownFieldSet(message)))


def _field(field: Any) -> bytes:
    """Encodes an unknown field."""
    number, wire, value = field.field_number, field.wire_type, field.data
    tag = _encoded(number << 3 | wire)
    if wire == _VARINT:
        return tag + _encoded(value)
    if wire == _LENGTH:
        return length_prefix(number, len(value)) + bytes(value)
    if wire == _GROUP:
        return tag + b"".join(map(_field, value)) + _encoded(number << 3 | _GROUP_END)
    return tag + int(value).to_bytes(8 if wire == _EIGHT_BYTES else 4, "little")


def _encoded(value: int) -> bytes:
    """Encodes an integer as a varint."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def byte_spans(message: bytes) -> dict[str, list[ByteSpan]]:
    """Returns the spans of the raw data of initializers, so that they can be replaced in place.

    Args:
        message: A serialized ModelProto. Initializers of its graph and training algorithms count.
    """
    reader = FieldReader(lambda begin, end: message[begin:end])

    def parts(span: ByteSpan, wanted: int) -> list[ByteSpan]:
        return [content for number, _, content in reader.fields(span) if number == wanted]

    whole = ByteSpan(0, len(message))
    algorithms = [each for info in parts(whole, TRAINING_INFO) for each in parts(info, ALGORITHM)]
    found: dict[str, list[ByteSpan]] = {}
    for graph in (*parts(whole, GRAPH), *algorithms):
        for tensor in parts(graph, INITIALIZER):
            fields = {number: content for number, _, content in reader.fields(tensor)}
            if _NAME in fields and RAW_DATA in fields:
                name = message[slice(*fields[_NAME])].decode()
                found.setdefault(name, []).append(fields[RAW_DATA])
    return found
