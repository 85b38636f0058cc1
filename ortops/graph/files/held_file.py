"""Reading a model file without the data of its big tensors, which stay in the file.

protobuf reads a message as a whole: then the bytes of the file are in memory twice, and a third
time when the data of a tensor are looked at. Here the fields of the file are walked, and big data
are left out of the message. The file is held open, so that they can be read at any time; another
file may take its name. Of files with external data, of which there may be more than a process can
open, the last ones that were read are held open, and the others opened again when they are read.

That a file has not changed is told by its identity (device, inode, size and time) when data of it
are read for the first time, and from then on by the checksum of these.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files.atomic import remedy

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None

__all__ = ["HeldFile", "InFile", "hold", "read_message"]

_BLOCK = 2**16  # bytes of the fields of a file that are read at once
_MOST = 2**30  # and of data; no system reads more than 2 GB
_MOST_FIELDS = 10**6  # of a file that are walked; protobuf reads one that has more
_MESSAGE = 2**31 - 1  # bytes of a message that protobuf reads
_MOST_OPEN = 256  # files of data; fewer where the system lets a process open few
_TICK = 20_000_000  # nanoseconds that are more than a tick of the clock of files
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # wire types of protobuf
_RAW_DATA = 9  # of a TensorProto

Tree: TypeAlias = "dict[int, Tree | None]"
_GRAPH: Tree = {5: None}
_MODEL: Tree = {7: _GRAPH, 20: {1: _GRAPH, 2: _GRAPH}}
"""The numbers of the fields on the way to initializers: in the graph, and in training_info."""

ByteSpan: TypeAlias = tuple[int, int]
"""Where something begins and ends in a file, in bytes."""
Detach: TypeAlias = Callable[[onnx.TensorProto, "InFile"], bool]
"""Makes a tensor refer to its data in a file, if they are as many as it claims."""


class _NotWalkedError(Exception):
    """The file is to be read by protobuf, which also says what is wrong with it."""


class HeldFile:
    """A file that is read as it was when it was opened, for as long as this object is there.

    Args:
        path: The file.
        descriptor: What it is opened as; closed in the end.
        stays_open: Whether it stays open for all that time, so that another file may take its name.
            If not, it is closed while it is not read and too many others are open. Then it is
            opened again by its path, and refused if another file has that name.
    """

    def __init__(self, path: Path, descriptor: int, *, stays_open: bool) -> None:
        self.path = path
        self._absolute = path.absolute()
        self._descriptors = [descriptor]  # of which there is one or none
        self._readers = 0
        self._identity = _identity(os.fstat(descriptor))
        if not stays_open:
            _closable[id(self)] = weakref.ref(self)
        finalizer = weakref.finalize(self, _forget, id(self), self._descriptors)
        finalizer.atexit = False  # for functions of atexit

    @property
    def identity(self) -> tuple[int, ...]:
        """Device, inode, size and time of the last change, as they were when it was opened."""
        return self._identity

    @property
    def size(self) -> int:
        """How many bytes it had when it was opened."""
        return self._identity[2]

    def is_as_opened(self) -> bool:
        """Whether it has not been written to since it was opened, as far as the system notes it."""
        with self._descriptor() as descriptor:
            return _identity(os.fstat(descriptor)) == self._identity

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes of a place; fewer where the file has been cut short.

        Raises:
            ModelError: If it was closed since, and another file has taken its name.
            OSError: If it cannot be read.
        """
        parts: list[bytes] = []
        with self._descriptor() as descriptor:
            while begin < end:
                parts.append(os.pread(descriptor, min(end - begin, _MOST), begin))
                if not parts[-1]:
                    break
                begin += len(parts[-1])
        return b"".join(parts)

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Gives the descriptor, which is not closed meanwhile."""
        with _lock:
            self._readers += 1
        try:
            with _lock:
                if not self._descriptors:
                    self._open_again()
                elif id(self) in _closable:  # the last one is closed last
                    _closable[id(self)] = _closable.pop(id(self))
                (descriptor,) = self._descriptors
            yield descriptor
        finally:
            with _lock:
                self._readers -= 1

    def _open_again(self) -> None:
        descriptor = _open(self._absolute)
        found = _identity(os.fstat(descriptor))
        if found[:2] != self._identity[:2]:
            os.close(descriptor)
            raise ModelError(
                f"file '{self.path}': another file has taken its place since it was opened, and it "
                "could not be held open, because there are too many files of data; open the model "
                "again"
            )
        self._descriptors.append(descriptor)
        _closable[id(self)] = weakref.ref(self)

    def close_if_unread(self) -> None:
        """Closes it, to be opened again, unless somebody is reading it; `_lock` is held."""
        if not self._readers:
            _forget(id(self), self._descriptors)


_lock = threading.RLock()  # of the descriptors of all files; finalizers run under it and without it
_closable: dict[int, weakref.ref[HeldFile]] = {}  # open files that may be closed, the oldest first


def _free_lock() -> None:
    """Lets a forked child read although another thread of its parent was just reading."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_lock)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _forget(key: int, descriptors: list[int]) -> None:
    """Closes a file's descriptor, if it has one."""
    _closable.pop(key, None)
    with contextlib.suppress(IndexError):
        os.close(descriptors.pop())  # `pop` is atomic, so that nobody closes it twice


def _open(path: Path) -> int:
    """Opens a file, and closes others if there are too many; `_lock` is held."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # no waiting
    _close_all_but(_most_open() - 1)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or not _closable:
            raise
        _close_all_but(0)
        return os.open(path, flags)


def _close_all_but(most: int) -> None:
    for reference in list(_closable.values())[: max(0, len(_closable) - most)]:
        file = reference()
        if file is not None:
            file.close_if_unread()


def _most_open() -> int:
    """Returns how many files that may be closed are open at a time."""
    if resource is None:
        return _MOST_OPEN
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else min(_MOST_OPEN, max(1, limit // 4))


_held: weakref.WeakValueDictionary[tuple[object, ...], HeldFile] = weakref.WeakValueDictionary()


def hold(path: Path, *, stays_open: bool) -> HeldFile | None:
    """Opens a file once for all who read it as it is now.

    Args:
        path: The file.
        stays_open: See `HeldFile`.

    Returns:
        The file; None where it is none that can be read at any place and held: a pipe, or any on
        Windows, where an open file cannot be replaced either.

    Raises:
        OSError: If it cannot be opened.
    """
    # Asked before it is opened, which may have effects where it is a device.
    if not hasattr(os, "pread") or not stat.S_ISREG(path.stat().st_mode):
        return None
    with _lock:
        descriptor = _open(path)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        return None
    _wait_for_clock(found)
    opened = HeldFile(path, descriptor, stays_open=stays_open)
    return _held.setdefault((*opened.identity, stays_open), opened)


def _wait_for_clock(found: os.stat_result) -> None:
    """Waits, after a change of a file, until the next change has a later time.

    The times of files come from a clock that ticks every few milliseconds.
    """
    age = time.time_ns() - found.st_mtime_ns
    if 0 <= age < _TICK:
        time.sleep((_TICK - age) / 1e9)


class InFile(ir.LazyTensor):
    """Data that are read from a held file whenever they are asked for.

    Args:
        file: The file.
        span: Where they are.
        tensor: The message that has their type, shape and name.

    Attributes:
        length: How many bytes they are.
    """

    def __init__(self, file: HeldFile, span: ByteSpan, tensor: onnx.TensorProto) -> None:
        bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        read = functools.partial(_read, file, span, bare, [])
        kind = ir.DataType(tensor.data_type)
        super().__init__(read, kind, ir.Shape(tensor.dims), name=tensor.name)
        self.length = span[1] - span[0]
        self._file, self._place = file, span

    def ends(self, length: int) -> tuple[bytes, bytes]:
        """Returns the first bytes and the last ones, so many of each; changes are not seen.

        Raises:
            ModelError: If another file has taken the place of this one.
        """
        begin, end = self._place
        read = self._file.read
        return read(begin, min(begin + length, end)), read(max(begin, end - length), end)


def _read(
    file: HeldFile, span: ByteSpan, tensor: onnx.TensorProto, checksums: list[int]
) -> ir.TensorProtocol:
    try:
        content = file.read(*span)
        found = zlib.crc32(content)
        is_same = found == checksums[0] if checksums else file.is_as_opened()
    except OSError as error:
        raise ModelError(
            f"initializer '{tensor.name}': its data in file '{file.path}' cannot be read: "
            f"{error.strerror}; {remedy(error, 'keep the files of a model in use')}"
        ) from error
    if not is_same or len(content) != span[1] - span[0]:
        raise ModelError(
            f"initializer '{tensor.name}': its data in file '{file.path}' have changed since it "
            "was opened; put a new file in the place of one in use, as ortops.save_model does"
        )
    if not checksums:
        checksums.append(found)
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
        ModelError: If it was written to meanwhile.
        OSError: If it cannot be read.
    """
    file = hold(path, stays_open=True)
    if file is None:
        return None
    try:
        model = onnx.ModelProto()
        model.ParseFromString(_Walk(file, big, detach).copy((0, file.size), _MODEL))
    except (_NotWalkedError, ValueError, google.protobuf.message.DecodeError):
        return None
    if not file.is_as_opened():
        raise ModelError(
            f"file '{path}': it was changed while it was read; put a new file in the place of one "
            "in use, as ortops.save_model does"
        )
    return model


class _Walk:
    """One way through the fields of a file."""

    def __init__(self, file: HeldFile, big: int, detach: Detach) -> None:
        self.file = file
        self._big, self._detach = big, detach
        self._block, self._begin = b"", 0
        self._fields_left, self._bytes_left = _MOST_FIELDS, _MESSAGE

    def copy(self, span: ByteSpan, tree: Tree) -> bytes:
        """Returns the bytes of a message, without what is left out of it."""
        parts: list[bytes] = []
        copied, end = span
        for number, begin, content in self._fields(span):
            if number not in tree or content[1] - content[0] <= self._big:
                continue
            inner = tree[number]
            part = self._tensor(content) if inner is None else self.copy(content, inner)
            tag = _varint(number << 3 | _LENGTH)
            parts += [self._read(copied, begin), tag, _varint(len(part)), part]
            copied = content[1]
        parts.append(self._read(copied, end))
        return b"".join(parts)

    def _tensor(self, span: ByteSpan) -> bytes:
        """Returns the bytes of a tensor, whose raw data are left out if they are big."""
        rest, copied = b"", span[0]
        raw: list[ByteSpan] = []
        for number, begin, content in self._fields(span):
            if number == _RAW_DATA:
                if raw:  # the last one counts
                    raise _NotWalkedError
                rest += self._read(copied, begin)
                copied = content[1]
                raw.append(content)
        if not raw or raw[0][1] - raw[0][0] <= self._big:
            return self._read(*span)
        rest += self._read(copied, span[1])
        tensor = onnx.TensorProto()
        tensor.ParseFromString(rest)
        if not self._detach(tensor, InFile(self.file, raw[0], tensor)):
            raise _NotWalkedError
        return bytes(tensor.SerializeToString())

    def _read(self, begin: int, end: int) -> bytes:
        self._bytes_left -= end - begin
        if self._bytes_left < 0:
            raise _NotWalkedError
        return self.file.read(begin, end)

    def _fields(self, span: ByteSpan) -> Iterator[tuple[int, int, ByteSpan]]:
        """Yields the number of each field, where it begins, and where its content is."""
        at, end = span
        while at < end:
            begin = at
            self._fields_left -= 1
            tag, at = self._varint_at(at)
            if not tag >> 3 or self._fields_left < 0:
                raise _NotWalkedError
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
