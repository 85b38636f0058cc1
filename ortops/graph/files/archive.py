"""Reads arrays in ``.npz`` files that are not trusted.

Sizes are checked before memory is allocated, and only the requested arrays are read.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection, Sequence
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError, did_you_mean
from ortops.graph.limits import LIMITS

Array: TypeAlias = npt.NDArray[Any]

_SUFFIX = ".npy"
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
"""How numpy compresses arrays."""

_DEFLATED = 1032  # the highest compression ratio of zlib


def check_size(what: str, size: int) -> None:
    """Rejects data that exceed the memory limit, before memory is allocated.

    Args:
        what: The data, as named in messages.
        size: Their size in bytes.

    Raises:
        FeedError: If the size exceeds `ortops.graph.limits.LIMITS.data_bytes`.
    """
    if size > LIMITS.data_bytes:
        raise FeedError(
            f"{what} would take {size / 1e9:.3g} GB of memory, more than the limit of "
            f"{LIMITS.data_bytes / 1e9:.3g} GB (ortops.graph.limits.LIMITS.data_bytes); split the "
            "data or raise the limit"
        )


def read_arrays(
    stream: BinaryIO, where: str, names: Sequence[str] | None = None, texts: Collection[str] = ()
) -> dict[str, Array]:
    """Reads arrays from an ``.npz`` file.

    Args:
        stream: The file.
        where: What messages call it, as ``data 'train.npz'``.
        names: The arrays to read; all by default.
        texts: Those that may be of strings; the others are of numbers.

    Returns:
        The arrays by name, in native byte order.

    Raises:
        FeedError: If the file is not an archive, or an array is missing, duplicated, corrupt, not
            numeric, or too large.
        OSError: If the file cannot be read.
    """
    try:
        archive = zipfile.ZipFile(stream)
    except Exception as error:  # a corrupt archive may raise anything
        _pass_on(error)
        raise FeedError(
            f"{where} is not an .npz file ({_why(error)}); write it with numpy.savez"
        ) from error
    with archive:
        members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(_SUFFIX)
            if name in members:
                raise FeedError(
                    f"{where} has two arrays named '{name}'; write it again with numpy.savez"
                )
            members[name] = member
        for name in names or ():
            if name not in members:
                raise FeedError(f"{where} has no array '{name}'; {did_you_mean(name, members)}")
        wanted = {name: members[name] for name in (members if names is None else names)}
        check_size(where, sum(member.file_size for member in wanted.values()))
        return {
            name: _array(archive, member, f"{where}: array '{name}'", is_text=name in texts)
            for name, member in wanted.items()
        }


def _array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, where: str, *, is_text: bool
) -> Array:
    if member.flag_bits & 1:
        raise FeedError(f"{where} is encrypted; write it without a password")
    if member.compress_type not in _METHODS:
        raise FeedError(
            f"{where} uses the unsupported zip compression method {member.compress_type}; write it "
            "again with numpy.savez or numpy.savez_compressed"
        )
    try:
        stored = member.compress_type == zipfile.ZIP_STORED
        if member.file_size > member.compress_size * (1 if stored else _DEFLATED):
            raise ValueError(f"{member.compress_size} bytes cannot hold {member.file_size}")
        with archive.open(member) as stream:
            dtype = _checked_header(stream, member.file_size, where, "U" * is_text)
        with archive.open(member) as stream:
            array: Array = np.lib.format.read_array(stream, allow_pickle=False)
            if stream.read(1):  # reading to the end also verifies the checksum
                raise ValueError("it has more data than its header declares")
    except Exception as error:  # as above; numpy parses the header as Python source
        _pass_on(error)
        raise FeedError(
            f"{where} is corrupt ({_why(error)}); write it again with numpy.savez"
        ) from error
    if dtype.kind == "b":  # numpy reads any byte as a boolean
        return np.asarray(array.view(np.uint8) != 0)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _checked_header(stream: IO[bytes], size: int, where: str, more: str) -> np.dtype[Any]:
    """Reads the header of an array, and rejects unsupported arrays before their data are read."""
    version = np.lib.format.read_magic(stream)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:  # (3, 0) is for structured arrays with non-Latin field names
        raise FeedError(
            f"{where} has the unsupported format version {version}; write it again with numpy.savez"
        )
    shape, _, dtype = readers[version](stream)
    if dtype.kind not in "biufc" + more:
        what = "Python objects, which are not unpickled" if dtype.hasobject else f"type {dtype}"
        raise FeedError(f"{where} must be {'strings' if more else 'numeric'}, got {what}")
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {list(shape)}")
    claimed, there = math.prod(shape) * dtype.itemsize, size - stream.tell()
    if claimed != there:
        raise ValueError(f"its shape {list(shape)} needs {claimed} bytes, and it has {there}")
    return dtype


def _pass_on(error: Exception) -> None:
    """Re-raises errors that are not due to a corrupt file."""
    if isinstance(error, FeedError | MemoryError):
        raise error


def _why(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200] or type(error).__name__
