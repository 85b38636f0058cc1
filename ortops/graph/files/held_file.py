"""Reads a model file without the data of its big tensors, which stay in the file.

protobuf parses whole messages: the content of the file is in memory twice, and a third time when a
tensor's data are accessed. This module scans the fields of the file and omits big data from the
message. The file stays open, so that the data can be read at any time, even if the file has been
replaced. There may be more files with external data than a process can open. Therefore, only the
most recently read ones stay open, and the others are reopened when needed.

A change of a file is detected by its identity (device, inode, size and time) whenever a tensor has
been read. A checksum of the data would take as long as reading them.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.numbers import Array, overwrite
from ortops.errors import ModelError
from ortops.graph.files.atomic import remedy
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
    MalformedError,
    length_prefix,
)

resource: Any
try:
    import resource
except ImportError:  # Windows
    resource = None

_PIECE = 2**18  # bytes that the cache of a core holds from being read to being copied
_MOST = 2**31 - 2**16  # systems read less than 2 GB at a time; parts are in memory twice
_MOST_FIELDS = 10**6  # protobuf is faster for a file with more fields
_MOST_OPEN = 256  # files with external data; fewer if the system's limit is low
_TICK = 20_000_000  # in nanoseconds, longer than a tick of the clock of file times

Tree: TypeAlias = "dict[int, Tree | None]"
_GRAPH: Tree = {INITIALIZER: None}
_MODEL: Tree = {GRAPH: _GRAPH, TRAINING_INFO: {INITIALIZATION: _GRAPH, ALGORITHM: _GRAPH}}
"""The field numbers that lead to initializers."""

Detach: TypeAlias = Callable[[onnx.TensorProto, "InFile"], bool]
"""Makes a tensor refer to its data in a file; returns False if their size is wrong."""


class HeldFile:
    """A file that is read with its content at the time of opening.

    Args:
        path: The file.
        descriptor: Its open descriptor, which this object closes.
        stays_open: Whether the descriptor stays open, so that the file may be replaced. Otherwise,
            it is closed if too many files are open, and reopened by path. Reopening fails if the
            file has been replaced.
    """

    def __init__(self, path: Path, descriptor: int, *, stays_open: bool) -> None:
        self.path = path
        self._absolute = path.absolute()
        self._descriptors = [descriptor]  # at most one
        self._readers = 0
        self._identity = _identity(os.fstat(descriptor))
        if not stays_open:
            _closable[id(self)] = weakref.ref(self)
        finalizer = weakref.finalize(self, _forget, id(self), self._descriptors)
        finalizer.atexit = False  # atexit handlers may still read it

    @property
    def identity(self) -> tuple[int, ...]:
        """Device, inode, size and modification time at the time of opening."""
        return self._identity

    @property
    def size(self) -> int:
        """The size in bytes at the time of opening."""
        return self._identity[2]

    def is_as_opened(self) -> bool:
        """Whether it has not been modified since it was opened, according to its metadata."""
        with self._descriptor() as descriptor:
            return _identity(os.fstat(descriptor)) == self._identity

    def read(self, begin: int, end: int) -> bytes:
        """Returns the bytes between two offsets; fewer if the file has been truncated.

        Raises:
            ModelError: If it had to be reopened and has been replaced.
            OSError: If it cannot be read.
        """
        return b"".join(self.pieces(begin, end, _MOST))

    def pieces(self, begin: int, end: int, most: int) -> Iterator[bytes]:
        """Yields what `read` returns, in pieces of at most so many bytes."""
        with self._descriptor() as descriptor:
            while begin < end and (piece := os.pread(descriptor, min(end - begin, most), begin)):
                yield piece
                begin += len(piece)

    def stay_open(self) -> None:
        """Keeps the descriptor open from now on, even if too many files are open.

        Raises:
            ModelError: If it had to be reopened and has been replaced.
            OSError: If it cannot be opened.
        """
        with self._descriptor(), _lock:
            _closable.pop(id(self), None)

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yields the descriptor, which is not closed meanwhile."""
        with _lock:
            self._readers += 1
        try:
            with _lock:
                if not self._descriptors:
                    self._open_again()
                elif id(self) in _closable:  # the most recently used one is closed last
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
                f"file '{self.path}' was replaced after it had been opened, and it could not stay "
                "open because there are too many files with external data; load the model again"
            )
        self._descriptors.append(descriptor)
        _closable[id(self)] = weakref.ref(self)

    def close_if_unread(self) -> None:
        """Closes it unless it is being read; the caller holds `_lock`."""
        if not self._readers:
            _forget(id(self), self._descriptors)


_lock = threading.RLock()  # guards all descriptors; finalizers run with and without it
_closable: dict[int, weakref.ref[HeldFile]] = {}  # open files, the least recently used first


def _free_lock() -> None:
    """Replaces the lock in a forked child, in which the thread that holds it does not exist."""
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
        os.close(descriptors.pop())  # `pop` is atomic, so it is closed once


def _open(path: Path) -> int:
    """Opens a file, and closes others if too many are open; the caller holds `_lock`."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # never blocks
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
    """Returns the maximum number of open files among those that may be closed."""
    if resource is None:
        return _MOST_OPEN
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if limit == resource.RLIM_INFINITY else min(_MOST_OPEN, max(1, limit // 4))


_held: weakref.WeakValueDictionary[tuple[object, ...], HeldFile] = weakref.WeakValueDictionary()


def hold(path: Path, *, stays_open: bool) -> HeldFile | None:
    """Opens a file; all readers of its present content share one object.

    Args:
        path: The file.
        stays_open: See `HeldFile`.

    Returns:
        The file, or None if it cannot be held: a pipe or device, or any file on Windows, where an
        open file cannot be replaced.

    Raises:
        OSError: If it cannot be opened.
    """
    # Before it is opened, because opening a device may have side effects.
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
    """Waits until the next change of a file will have a later modification time.

    File times come from a clock that ticks every few milliseconds.
    """
    age = time.time_ns() - found.st_mtime_ns
    if 0 <= age < _TICK:
        time.sleep((_TICK - age) / 1e9)


class InFile(ir.LazyTensor):
    """The data of a tensor in a held file, which are read on each access.

    Args:
        file: The file.
        span: The span of the data.
        tensor: The message with the type, shape and name.
        ours: Whether nobody else can change the file, so that its data need no checks.

    Attributes:
        length: The size of the data in bytes.
    """

    def __init__(
        self, file: HeldFile, span: ByteSpan, tensor: onnx.TensorProto, *, ours: bool = False
    ) -> None:
        bare = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        read = functools.partial(_read, file, span, bare, ours)
        kind = ir.DataType(tensor.data_type)
        super().__init__(read, kind, ir.Shape(tensor.dims), name=tensor.name)
        self.length = span.length
        self._file, self._span, self._ours = file, span, ours

    @property
    def is_plain(self) -> bool:
        """Whether the data have the same bytes in the file as in memory."""
        return self.dtype.bitwidth >= 8 and sys.byteorder == "little"

    def fill(self, memory: Array) -> None:
        """Reads the data into an array, if they are plain, without another copy of them.

        Args:
            memory: The array, of their type and shape and contiguous; if reading fails, some of it
                may be overwritten.

        Raises:
            ModelError: If they cannot be read, or the file has been modified since it was opened.
        """
        flat, begin = memory.reshape(-1).view(np.uint8), 0
        for piece in _pieces(self._file, self._span, self.name, self._ours, _PIECE):
            overwrite(flat[begin : begin + len(piece)], np.frombuffer(piece, np.uint8))
            begin += len(piece)

    def ends(self, length: int) -> tuple[bytes, bytes]:
        """Returns the first and the last bytes, without checking for changes.

        Args:
            length: The number of bytes to return from each end.

        Raises:
            ModelError: If the file has been replaced.
        """
        begin, end = self._span
        read = self._file.read
        return read(begin, min(begin + length, end)), read(max(begin, end - length), end)

    def stay_open(self) -> None:
        """Keeps the file open from now on, so that it can be replaced.

        Raises:
            ModelError: If it has been replaced or cannot be opened.
        """
        with _errors(self._file, self.name):
            self._file.stay_open()

    def rows(self, numbers: Sequence[int]) -> Array:
        """Returns elements of axis 0, without reading the others.

        Args:
            numbers: Their indices, from 0.

        Raises:
            ModelError: If they cannot be read, or the file has been modified since it was opened.
        """
        kind, (count, *shape) = self.dtype.numpy(), self.shape.numpy()
        size, begin = self.length // count, self._span.begin
        parts = []
        with _errors(self._file, self.name):
            for number in numbers:
                first = begin + number * size
                parts.append(self._file.read(first, first + size))
            is_same = self._ours or self._file.is_as_opened()  # it was while they were read
        content = b"".join(parts)
        if not is_same or len(content) != size * len(parts):
            raise _changed(self._file, self.name)
        return np.frombuffer(content, kind).reshape(len(parts), *shape)


def _read(
    file: HeldFile, span: ByteSpan, tensor: onnx.TensorProto, ours: bool
) -> ir.TensorProtocol:
    content = b"".join(_pieces(file, span, tensor.name, ours, _MOST))
    kind = ir.DataType(tensor.data_type)
    if kind.bitwidth >= 8 and sys.byteorder == "little":
        array = np.frombuffer(content, kind.numpy()).reshape(tensor.dims)
        return ir.Tensor(array, dtype=kind, name=tensor.name)
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    whole.raw_data = content
    return ir.serde.deserialize_tensor(whole)


def _pieces(
    file: HeldFile,
    span: ByteSpan,
    name: str | None,
    ours: bool,
    most: int,
) -> Iterator[bytes]:
    """Yields the data of a tensor in pieces of at most so many bytes; fails if they have changed.

    Args:
        file: The file.
        span: The span of the data.
        name: The name of the tensor, for messages.
        ours: Whether nobody else can change the file.
        most: The size of a piece.
    """
    length = 0
    with _errors(file, name):
        for piece in file.pieces(*span, most):
            length += len(piece)
            yield piece
        is_same = ours or file.is_as_opened()  # it was while they were read
    if not is_same or length != span.length:
        raise _changed(file, name)


@contextlib.contextmanager
def _errors(file: HeldFile, name: str | None) -> Iterator[None]:
    """Converts errors of the system in reading a tensor to a ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"initializer '{name}': cannot read its data from file '{file.path}': "
            f"{error.strerror}; {remedy(error, 'keep the files of a model while it is in use')}"
        ) from error


def _changed(file: HeldFile, name: str | None) -> ModelError:
    return ModelError(
        f"initializer '{name}': its data in file '{file.path}' have changed since the file was "
        "opened; replace files in use instead of overwriting them, as ortops.save_model does"
    )


def read_message(path: Path, big: int, detach: Detach) -> onnx.ModelProto | None:
    """Reads a model file without the data of big initializers.

    Args:
        path: The file.
        big: Data of more bytes are omitted.
        detach: Is called with each tensor without data, and its data. If it returns False, reading
            stops.

    Returns:
        The message, or None if protobuf must read the whole file: it cannot be held, or is invalid.

    Raises:
        ModelError: If it was modified meanwhile.
        OSError: If it cannot be read.
    """
    file = hold(path, stays_open=True)
    if file is None:
        return None
    try:
        model = onnx.ModelProto()
        light = _LightCopy(file, big, detach).copy(ByteSpan(0, file.size), _MODEL)
        model.ParseFromString(light)
    except (MalformedError, ValueError, google.protobuf.message.DecodeError):
        return None
    if not file.is_as_opened():
        raise ModelError(
            f"file '{path}' was changed while it was read; replace files in use instead of "
            "overwriting them, as ortops.save_model does"
        )
    return model


class _LightCopy:
    """Copies the bytes of a model file, without the data of big initializers."""

    def __init__(self, file: HeldFile, big: int, detach: Detach) -> None:
        self._file, self._big, self._detach = file, big, detach
        self._reader = FieldReader(file.read, _MOST_FIELDS)
        self._bytes_left = MOST_BYTES

    def copy(self, span: ByteSpan, tree: Tree) -> bytes:
        """Returns the bytes of a message, without detached data."""
        parts: list[bytes] = []
        copied, end = span
        for number, begin, content in self._reader.fields(span):
            if number not in tree or content.length <= self._big:
                continue
            inner = tree[number]
            part = self._tensor(content) if inner is None else self.copy(content, inner)
            parts += [self._read(copied, begin), length_prefix(number, len(part)), part]
            copied = content.end
        parts.append(self._read(copied, end))
        return b"".join(parts)

    def _tensor(self, span: ByteSpan) -> bytes:
        """Returns the bytes of a tensor, without raw data if they are big."""
        rest, copied = b"", span.begin
        raw: ByteSpan | None = None
        for number, begin, content in self._reader.fields(span):
            if number == RAW_DATA:
                if raw is not None:  # protobuf would use the last one
                    raise MalformedError
                rest += self._read(copied, begin)
                copied = content.end
                raw = content
        if raw is None or raw.length <= self._big:
            return self._read(*span)
        rest += self._read(copied, span.end)
        tensor = onnx.TensorProto()
        tensor.ParseFromString(rest)
        if not self._detach(tensor, InFile(self._file, raw, tensor)):
            raise MalformedError
        return bytes(tensor.SerializeToString())

    def _read(self, begin: int, end: int) -> bytes:
        self._bytes_left -= end - begin
        if self._bytes_left < 0:
            raise MalformedError
        return self._file.read(begin, end)
