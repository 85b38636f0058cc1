"""Reading a model file without the data of its big tensors, which stay in the file.

protobuf reads a message as a whole: then the bytes of the file are in memory twice, and a third
time when the data of a tensor are looked at. Here the fields of the file are walked, and big data
are left out of the message. The file is held open, so that they can be read at any time; another
file may take its name. That the file itself has not changed is proven by checksums.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError

__all__ = ["HeldFile", "InFile", "hold", "read_message"]

_BLOCK = 2**16  # bytes of the fields of a file that are read at once
_MOST = 2**30  # and of data; no system reads more than 2 GB
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types of protobuf
_RAW_DATA = 9  # of a TensorProto

Tree: TypeAlias = "dict[int, Tree | None]"
_GRAPH: Tree = {5: None}
_MODEL: Tree = {7: _GRAPH, 20: {1: _GRAPH, 2: _GRAPH}}
"""The numbers of the fields on the way to initializers: in the graph, and in training_info."""

Place: TypeAlias = tuple[int, int]
"""Where something begins and ends in a file, in bytes."""
Detach: TypeAlias = Callable[[onnx.TensorProto, "InFile"], bool]
"""Makes a tensor refer to its data in a file, if they are as many as it claims."""


class _NotWalkedError(Exception):
    """The file is to be read by protobuf, which also says what is wrong with it."""


class HeldFile:
    """A file that is held open as long as this object is there.

    Args:
        path: The file.
        descriptor: What it is opened as; closed in the end.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False  # for functions of atexit

    def status(self) -> os.stat_result:
        """Returns what the system knows of it."""
        return os.fstat(self._descriptor)

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes of a place; fewer where the file has been cut short."""
        parts: list[bytes] = []
        while begin < end:
            parts.append(os.pread(self._descriptor, min(end - begin, _MOST), begin))
            if not parts[-1]:
                break
            begin += len(parts[-1])
        return b"".join(parts)


_held: weakref.WeakValueDictionary[tuple[int, int], HeldFile] = weakref.WeakValueDictionary()


def hold(path: Path) -> HeldFile | None:
    """Opens a file once for all who read it as it is now.

    Args:
        path: The file.

    Returns:
        The file; None where it is none that can be read at any place and held: a pipe, or any on
        Windows, where an open file cannot be replaced either.

    Raises:
        OSError: If it cannot be opened.
    """
    # Asked before it is opened: that of a pipe would wait for its writer.
    if not hasattr(os, "pread") or not stat.S_ISREG(path.stat().st_mode):
        return None
    opened = HeldFile(path, os.open(path, os.O_RDONLY))
    found = opened.status()
    if not stat.S_ISREG(found.st_mode):
        return None
    return _held.setdefault((found.st_dev, found.st_ino), opened)


class InFile(ir.LazyTensor):
    """Data that are read from a held file whenever they are asked for.

    Args:
        file: The file.
        place: Where they are.
        tensor: The message that has their type, shape and name.

    Attributes:
        length: How many bytes they are.
    """

    def __init__(self, file: HeldFile, place: Place, tensor: onnx.TensorProto) -> None:
        bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        read = functools.partial(_read, file, place, bare, [])
        kind = ir.DataType(tensor.data_type)
        super().__init__(read, kind, ir.Shape(tensor.dims), name=tensor.name)
        self.length = place[1] - place[0]
        self._file, self._place = file, place

    def ends(self, length: int) -> tuple[bytes, bytes]:
        """Returns the first bytes and the last ones, so many of each; changes are not seen."""
        begin, end = self._place
        read = self._file.read
        return read(begin, min(begin + length, end)), read(max(begin, end - length), end)


def _read(
    file: HeldFile, place: Place, tensor: onnx.TensorProto, checksums: list[int]
) -> ir.TensorProtocol:
    content = file.read(*place)
    found = zlib.crc32(content)
    if not checksums:
        checksums.append(found)
    if found != checksums[0] or len(content) != place[1] - place[0]:
        raise ModelError(
            f"initializer '{tensor.name}': its data in file '{file.path}' have changed since it "
            "was opened; put a new file in the place of one in use, as ortops.save_model does"
        )
    kind = ir.DataType(tensor.data_type)
    if kind.bitwidth >= 8 and sys.byteorder == "little":
        array = np.frombuffer(content, kind.numpy()).reshape(tensor.dims)
        return ir.Tensor(array, dtype=kind, name=tensor.name)
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    whole.raw_data = content
    return ir.serde.deserialize_tensor(whole)


def read_message(path: Path, big: int, detach: Detach) -> onnx.ModelProto | None:
    """Reads a model file, but for the data of big initializers.

    Args:
        path: The file.
        big: Data of more bytes are left out.
        detach: Is given tensors without their data, and these. Where it returns False, the file is
            not read.

    Returns:
        The message; None where protobuf has to read all of it: it cannot be held, or something in
        it is not as it should be.

    Raises:
        OSError: If it cannot be read.
    """
    file = hold(path)
    if file is None:
        return None
    try:
        model = onnx.ModelProto()
        whole = (0, file.status().st_size)
        model.ParseFromString(_Walk(file, big, detach).copy(whole, _MODEL))
        return model
    except (_NotWalkedError, ValueError, google.protobuf.message.DecodeError):
        return None


class _Walk:
    """One way through the fields of a file."""

    def __init__(self, file: HeldFile, big: int, detach: Detach) -> None:
        self.file = file
        self._big, self._detach = big, detach
        self._block, self._begin = b"", 0

    def copy(self, place: Place, tree: Tree) -> bytes:
        """Returns the bytes of a message, without what is left out of it."""
        parts: list[bytes] = []
        copied, end = place
        for number, begin, content in self._fields(place):
            if number not in tree or content[1] - content[0] <= self._big:
                continue
            inner = tree[number]
            part = self._tensor(content) if inner is None else self.copy(content, inner)
            tag = _varint(number << 3 | _LENGTH)
            parts += [self.file.read(copied, begin), tag, _varint(len(part)), part]
            copied = content[1]
        parts.append(self.file.read(copied, end))
        return b"".join(parts)

    def _tensor(self, place: Place) -> bytes:
        """Returns the bytes of a tensor, whose raw data are left out if they are big."""
        rest, copied, raw = b"", place[0], []
        for number, begin, content in self._fields(place):
            if number == _RAW_DATA:
                rest += self.file.read(copied, begin)
                copied = content[1]
                raw.append(content)
        rest += self.file.read(copied, place[1])
        if not raw or raw[0][1] - raw[0][0] <= self._big:
            return self.file.read(*place)
        tensor = onnx.TensorProto()
        tensor.ParseFromString(rest)
        if len(raw) > 1 or not self._detach(tensor, InFile(self.file, raw[0], tensor)):
            raise _NotWalkedError
        return bytes(tensor.SerializeToString())

    def _fields(self, place: Place) -> Iterator[tuple[int, int, Place]]:
        """Yields the number of each field, where it begins, and where its content is."""
        at, end = place
        while at < end:
            begin = at
            tag, at = self._varint_at(at)
            wire = tag & 7
            length = 0
            if wire == _VARINT:
                _, after = self._varint_at(at)
                length = after - at
            elif wire == _LENGTH:
                length, at = self._varint_at(at)
            elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
                length = 8 if wire == _EIGHT_BYTES else 4
            else:
                raise _NotWalkedError
            content = at, at + length
            at += length
            if at > end:
                raise _NotWalkedError
            yield tag >> 3, begin, content

    def _varint_at(self, at: int) -> tuple[int, int]:
        """Returns a number of a variable length, and where it ends."""
        value = shift = 0
        while shift < 70:
            if not 0 <= at - self._begin < len(self._block):
                self._block, self._begin = self.file.read(at, at + _BLOCK), at
                if not self._block:
                    break
            byte = self._block[at - self._begin]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise _NotWalkedError


def _varint(value: int) -> bytes:
    """Returns a number as protobuf writes it."""
    result = bytearray()
    while value >= 0x80:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)
