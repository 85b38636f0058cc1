"""Writing files that are never half written, and leave nothing behind; what errors of them mean."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ortops.errors import ModelError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, where a file that is open can be neither moved nor removed
    fcntl = None

__all__ = [
    "TEMPORARY",
    "destination",
    "is_free",
    "move",
    "naming",
    "new_file",
    "remedy",
    "remove_free",
    "remove_litter",
    "siblings",
    "unique_sibling",
    "write_atomically",
]

Content: TypeAlias = bytes | Callable[[BinaryIO], object]
"""What a file holds, or what writes it into an open one."""

_LONG_NAME = 100  # bytes; what is made from a longer name might be too long for the file system
TEMPORARY = ".tmp"
"""What the names of temporary files end with."""


def write_atomically(path: str | os.PathLike[str], content: Content) -> None:
    """Writes a file so that at any time the old content or the new is there, whole.

    The content is written into a file ``.<file name>.<unique>.tmp`` beside it, which then takes its
    place, mode, owner and group (these as far as it is permitted). A process that is killed leaves
    that file; the next one that writes to the path removes it.

    Args:
        path: The file; a link stays one, and what it leads to is written. What is no regular file
            (a device, a pipe that somebody reads, ``/dev/stdout``) is written in place.
        content: Its content, or what writes it into an open file.

    Raises:
        OSError: If it cannot be written; then the old file is as it was.
        ModelError: If it is no path.
    """
    target = destination(path)
    with naming(path):
        if target is None:
            with _open_in_place(Path(path)) as stream:
                _write(stream, content)
        else:
            _replace(target, content)


def destination(path: str | os.PathLike[str]) -> Path | None:
    """Returns the regular file that a path leads to, which need not exist.

    Returns:
        The file, or None where the path leads to something that must stay what it is: a device, a
        pipe, a socket, or a descriptor that this process has open.

    Raises:
        OSError: If it leads to a folder, or in a circle, or cannot be followed.
        ModelError: If it is no path.
    """
    with naming(path):
        try:
            given = Path(path)
            status = _status(given)
        except (TypeError, ValueError) as error:
            raise ModelError(f"file {path!r}: {error}; give the path of a file") from error
        if status is not None:
            if stat.S_ISDIR(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(status.st_mode) or _descriptor(given) is not None:
                return None
        return given.resolve()


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Lets the operating system's errors name the path that was given, not what stands in for it.

    Args:
        path: What they name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's; a signal handler may raise TimeoutError
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def new_file(file: Path, content: Content, like: Path) -> Iterator[BinaryIO]:
    """Writes a file that does not exist yet.

    Args:
        file: The file, which the caller removes if something goes wrong.
        content: Its content, or what writes it into an open file.
        like: The file that it belongs to, whose mode, owner and group it takes where that exists.

    Yields:
        The file, when it is on disk. `remove_free` leaves it as long as it is open.
    """
    old = _status(like)
    with _created(file, 0o666 if old is None else 0o600) as stream:
        _write(stream, content)
        if old is not None:  # only now, since writing takes the bits setuid and setgid away
            _take_over(file, old)
        os.fsync(stream.fileno())
        yield stream


def move(stream: BinaryIO, file: Path, target: Path) -> None:
    """Lets a file that `new_file` wrote take the place of another, or a new one."""
    if fcntl is None:
        stream.close()
    file.replace(target)
    with contextlib.suppress(OSError):  # not every system knows folders that can be synchronized
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def unique_sibling(target: Path, suffix: str) -> Path:
    """Returns a name beside a file that nobody else uses and that says what it belongs to.

    Args:
        target: The file.
        suffix: What the name ends with: ``<file name>.<unique><suffix>``. A very long file name is
            replaced by its hash; the name of a temporary file is hidden.
    """
    return target.with_name(f"{_stem(target, suffix)}.{secrets.token_hex(8)}{suffix}")


def siblings(target: Path, suffix: str) -> list[Path]:
    """Returns the files that exist under names of `unique_sibling`.

    Args:
        target: The file that they belong to.
        suffix: What their names end with.
    """
    begin = f"{_stem(target, suffix)}."
    name = re.compile(rf"{re.escape(begin)}[0-9a-f]{{16}}{re.escape(suffix)}")
    try:
        with os.scandir(target.parent) as entries:  # which makes no Path of each of many files
            names = [entry.name for entry in entries if entry.name.startswith(begin)]
    except OSError:  # a folder may be written, but not read
        return []
    return [target.parent / each for each in names if name.fullmatch(each)]


def remedy(error: OSError, otherwise: str) -> str:
    """Returns what to do about an error of the system.

    Args:
        error: The error.
        otherwise: What to do if it is not that too many files are open.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit on open files (ulimit -n)"
    return otherwise


def remove_litter(target: Path) -> None:
    """Removes the temporary files that killed processes left beside a file."""
    if fcntl is not None:  # without it there is no telling whether somebody is writing them
        for file in siblings(target, TEMPORARY):
            remove_free(file, lambda: False)


def is_free(file: Path) -> bool:
    """Whether a regular file is there that nobody holds (see `new_file`)."""
    return remove_free(file, lambda: True)


def remove_free(file: Path, is_needed: Callable[[], bool]) -> bool:
    """Removes a file, unless somebody holds it or needs it.

    Args:
        file: The file. One that cannot be removed is left.
        is_needed: Whether it must stay; asked when nobody holds it anymore.

    Returns:
        Whether it was there, and nobody held it.
    """
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return False
        if fcntl is None:
            if not is_needed():
                file.unlink()
            return True
        # Network file systems lock only what is open for writing.
        with file.open("r+b" if os.access(file, os.W_OK) else "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_needed():
                file.unlink()
            return True
    except OSError:
        return False


def _replace(target: Path, content: Content) -> None:
    remove_litter(target)
    temporary = unique_sibling(target, TEMPORARY)
    try:
        with new_file(temporary, content, target) as stream:
            move(stream, temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)  # an interrupt may come when it has been moved already
        raise


def _write(stream: BinaryIO, content: Content) -> None:
    if callable(content):
        content(stream)
    else:
        stream.write(content)
    stream.flush()


@contextlib.contextmanager
def _created(file: Path, mode: int) -> Iterator[BinaryIO]:
    """Creates a file, held by a lock of it that ends with the process."""
    while True:
        with open(file, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # a file system may have no locks
                    fcntl.flock(stream, fcntl.LOCK_EX)
            if fcntl is None or file.exists():  # and was not removed before it was locked
                yield stream
                return


def _take_over(file: Path, old: os.stat_result) -> None:
    """Gives a file the mode, owner and group of another, as far as it is permitted."""
    if hasattr(os, "chown"):
        for owner, group in ((-1, old.st_gid), (old.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.chown(file, owner, group)
    new = file.stat()
    mode = stat.S_IMODE(old.st_mode)
    if new.st_uid != old.st_uid:  # the bits would lend the rights of somebody else
        mode &= ~stat.S_ISUID
    if new.st_gid != old.st_gid:
        mode &= ~stat.S_ISGID
    with contextlib.suppress(PermissionError):  # a file system may have no modes
        file.chmod(mode)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _descriptor(path: Path) -> int | None:
    """Returns which open descriptor of this process a path is, as ``/dev/stdout`` is 1."""
    folders = [Path(name).resolve() for name in ("/dev/fd", "/proc/self/fd")]
    while True:
        folder = path.parent.resolve()
        if folder in folders and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = folder / path.readlink()


def _open_in_place(path: Path) -> BinaryIO:
    number = _descriptor(path)
    if number is None:
        return path.open("wb")
    return os.fdopen(os.dup(number), "wb")  # goes on where it is; to open it anew would not


def _stem(target: Path, suffix: str) -> str:
    name = target.name
    try:
        if len(name.encode()) > _LONG_NAME:
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
    except UnicodeEncodeError:  # a model cannot name such a file
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}" if suffix == TEMPORARY else name
