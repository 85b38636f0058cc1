"""Atomic writing of files, without leftover temporary files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from ortops.errors import ModelError, OrtopsError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, where a file that is open can be neither moved nor removed
    fcntl = None

Content: TypeAlias = bytes | Callable[[BinaryIO], object]
"""The content of a file, or a function that writes it to an open file."""

_LONG_NAME = 100  # bytes; a name derived from a longer one could exceed the file system's limit
TEMPORARY = ".tmp"
"""The suffix of temporary files."""


def check_path(who: str, path: str | os.PathLike[str]) -> None:
    """Checks whether a file can be written to a path.

    Raises:
        OrtopsError: If the folder does not exist, or the path is itself a folder.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise OrtopsError(
            f"{who}: cannot write '{file}', because there is no folder '{file.parent}'; create it"
        )
    if file.is_dir():
        raise OrtopsError(f"{who}: cannot write '{file}', because it is a folder; name a file")


def write_atomically(
    path: str | os.PathLike[str], content: Content, *, follow: bool = True
) -> None:
    """Replaces a file atomically: at any time, it has the complete old or new content.

    The content is written to a file ``.<file name>.<unique>.tmp`` in the same folder, which then
    replaces the file and inherits its mode and, if permitted, its owner and group. A killed process
    leaves the temporary file; the next process that writes to the path removes it.

    Args:
        path: The file. A link is followed. Anything other than a regular file (a device, a pipe,
            ``/dev/stdout``) is written in place.
        content: Its content, or a function that writes the content to an open file.
        follow: Whether the path is the user's. Of a file in a folder that ortops writes, whoever
            made the folder chose what is at the path: without ``follow``, a link, a device or a
            pipe is replaced.

    Raises:
        OSError: If it cannot be written; the old file is unchanged.
        ModelError: If the path is invalid.
    """
    target = destination(path, follow=follow)
    with naming(path):
        if target is None:
            with _open_in_place(Path(path)) as stream:
                _write(stream, content)
        else:
            _replace(target, content)


def copy_atomically(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copies a file into a folder that ortops writes; see `write_atomically`.

    Args:
        source: A regular file, or a link to one.
        target: The path of the copy. A link is replaced.

    Raises:
        OSError: If one cannot be read, or the other not written; the old file is unchanged.
    """
    with Path(source).open("rb") as stream:
        write_atomically(target, lambda copy: shutil.copyfileobj(stream, copy), follow=False)


def write_together(folder: Path, files: Mapping[str, Content]) -> None:
    """Writes files of a folder that ortops writes: all of them, or none if there is an error.

    A process that is killed while it moves them leaves each of them old or new, and of those that
    it has not moved the new ones as temporary files.

    Args:
        folder: The folder, which is created if necessary.
        files: The contents by name.

    Raises:
        OSError: If a file cannot be written; the old files are unchanged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[tuple[BinaryIO, Path, Path]] = []
    moved: list[tuple[Path, Path | None]] = []
    with contextlib.ExitStack() as stack:
        for name, content in files.items():
            with naming(folder / name):
                target = destination(folder / name, follow=False)
                assert target is not None
                remove_litter(target)
                new = unique_sibling(target, TEMPORARY)
                stack.callback(new.unlink, missing_ok=True)
                written.append((stack.enter_context(new_file(new, content, target)), new, target))
        try:
            for stream, new, target in written:
                with naming(target):
                    moved += _kept(target, stack)
                    move(stream, new, target)
        except BaseException:
            for target, old in moved:
                target.unlink(missing_ok=True) if old is None else old.replace(target)
            raise


def _kept(target: Path, stack: contextlib.ExitStack) -> list[tuple[Path, Path | None]]:
    """Keeps the old file under a temporary name, so that it can be brought back.

    Returns:
        The file, and the temporary name; None if there is no old file. Empty if that cannot be
        done: some file systems have no links.
    """
    if not os.path.lexists(target):
        return [(target, None)]
    old = unique_sibling(target, TEMPORARY)
    stack.callback(old.unlink, missing_ok=True)
    try:
        os.link(target, old, follow_symlinks=False)
    except (OSError, NotImplementedError):
        return []
    return [(target, old)]


def folder_within(folder: Path, relative: Path) -> Path:
    """Makes a folder below one that ortops writes; a link on the way is replaced.

    Args:
        folder: The folder that the user named, which may be a link.
        relative: The path of the other one in it.

    Raises:
        OSError: If it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in relative.parts:
        folder /= name
        if folder.is_symlink():
            folder.unlink()
        folder.mkdir(exist_ok=True)
    return folder


def destination(path: str | os.PathLike[str], *, follow: bool = True) -> Path | None:
    """Returns the regular file that a path resolves to; it need not exist.

    Args:
        path: The path.
        follow: See `write_atomically`. Without it, only the path's folder is resolved.

    Returns:
        The file, or None for anything that must not be replaced: a device, a pipe, a socket, or an
        open file descriptor of this process.

    Raises:
        OSError: If the path is a folder or a cycle of links, or cannot be resolved.
        ModelError: If the path is invalid.
    """
    with naming(path):
        try:
            given = Path(path)
            status = _status(given, follow=follow)
        except (TypeError, ValueError) as error:
            raise ModelError(f"file {path!r}: {error}; give the path of a file") from error
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not follow:
            return given.parent.resolve() / given.name
        if status is not None and not (stat.S_ISREG(status.st_mode) and _descriptor(given) is None):
            return None
        return given.resolve()


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Makes errors of the operating system name the user's path, not that of a temporary file.

    Args:
        path: The path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the system's; a signal handler may raise TimeoutError
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def new_file(file: Path, content: Content, like: Path) -> Iterator[BinaryIO]:
    """Writes a new file.

    Args:
        file: The file. The caller removes it after an error.
        content: Its content, or a function that writes the content to an open file.
        like: The file that it belongs to. If that exists, its mode, owner and group are copied.

    Yields:
        The open file, after it has been written to disk. `remove_free` does not remove it while it
        is open.
    """
    old = _status(like, follow=False)
    if old is not None and not stat.S_ISREG(old.st_mode):  # a link, which will be replaced
        old = None
    with _created(file, 0o666 if old is None else 0o600) as stream:
        _write(stream, content)
        if old is not None:  # after writing, which clears the setuid and setgid bits
            _copy_ownership(file, old)
        os.fsync(stream.fileno())
        yield stream


def move(stream: BinaryIO, file: Path, target: Path) -> None:
    """Moves a file that `new_file` wrote to its final path, which may exist."""
    if fcntl is None:
        stream.close()
    file.replace(target)
    with contextlib.suppress(OSError):  # not every system can synchronize folders
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def unique_sibling(target: Path, suffix: str) -> Path:
    """Returns a unique path in the folder of a file, derived from the file's name.

    Args:
        target: The file.
        suffix: The suffix. The name is ``<file name>.<unique><suffix>``; it starts with a dot for
            temporary files, and has a hash in place of a very long file name.
    """
    return target.with_name(f"{_stem(target, suffix)}.{secrets.token_hex(8)}{suffix}")


def siblings(target: Path, suffix: str) -> list[Path]:
    """Returns the existing files with names that `unique_sibling` returned.

    Args:
        target: The file that they belong to.
        suffix: Their suffix.
    """
    begin = f"{_stem(target, suffix)}."
    name = re.compile(rf"{re.escape(begin)}[0-9a-f]{{16}}{re.escape(suffix)}")
    try:
        with os.scandir(target.parent) as entries:  # faster than iterdir in large folders
            names = [entry.name for entry in entries if entry.name.startswith(begin)]
    except OSError:  # a folder may be writable without being readable
        return []
    return [target.parent / each for each in names if name.fullmatch(each)]


def is_temporary(name: str) -> bool:
    """Whether a name is that of a temporary file, which a process is writing or left behind."""
    return re.fullmatch(rf"\..*\.[0-9a-f]{{16}}{re.escape(TEMPORARY)}", name, re.DOTALL) is not None


def remedy(error: OSError, otherwise: str) -> str:
    """Returns the remedy for an error of the operating system, for messages.

    Args:
        error: The error.
        otherwise: The remedy for errors other than too many open files.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "close files, or raise the limit on open files (ulimit -n)"
    return otherwise


def remove_litter(target: Path) -> None:
    """Removes the temporary files of a file, or of a whole folder, that killed processes left."""
    if fcntl is not None:  # without locks, it is unknown whether another process is writing them
        inside = [f for f in target.iterdir() if is_temporary(f.name)] if target.is_dir() else []
        for file in (*inside, *siblings(target, TEMPORARY)):
            remove_free(file, lambda: False)


def is_free(file: Path) -> bool:
    """Whether a regular file exists and is not locked (see `new_file`)."""
    return remove_free(file, lambda: True)


def remove_free(file: Path, is_needed: Callable[[], bool]) -> bool:
    """Removes a file, unless it is locked or needed.

    Args:
        file: The file. Errors are ignored.
        is_needed: Returns whether the file must stay; called while this function holds the lock.

    Returns:
        Whether the file existed and was not locked.
    """
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            return False
        if fcntl is None:
            if not is_needed():
                file.unlink()
            return True
        # Network file systems only lock files that are open for writing.
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
        temporary.unlink(missing_ok=True)  # after an interrupt, it may already have been moved
        raise


def _write(stream: BinaryIO, content: Content) -> None:
    if callable(content):
        content(stream)
    else:
        stream.write(content)
    stream.flush()


@contextlib.contextmanager
def _created(file: Path, mode: int) -> Iterator[BinaryIO]:
    """Creates and locks a file; the lock ends with the process."""
    while True:
        with open(file, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            if fcntl is not None:
                with contextlib.suppress(OSError):  # some file systems have no locks
                    fcntl.flock(stream, fcntl.LOCK_EX)
            if fcntl is None or file.exists():  # another process may remove it before it is locked
                yield stream
                return


def _copy_ownership(file: Path, old: os.stat_result) -> None:
    """Copies the mode, owner and group of another file, as far as permitted."""
    if hasattr(os, "chown"):
        for owner, group in ((-1, old.st_gid), (old.st_uid, -1)):
            with contextlib.suppress(OSError):
                os.chown(file, owner, group)
    new = file.stat()
    mode = stat.S_IMODE(old.st_mode)
    if new.st_uid != old.st_uid:  # the bit would grant the rights of a different user
        mode &= ~stat.S_ISUID
    if new.st_gid != old.st_gid:
        mode &= ~stat.S_ISGID
    with contextlib.suppress(PermissionError):  # some file systems have no modes
        file.chmod(mode)


def _status(path: Path, *, follow: bool = True) -> os.stat_result | None:
    try:
        return path.stat(follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _descriptor(path: Path) -> int | None:
    """Returns the descriptor of this process that a path refers to: 1 for ``/dev/stdout``."""
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
    return os.fdopen(os.dup(number), "wb")  # keeps the position in the file


def _stem(target: Path, suffix: str) -> str:
    name = target.name
    try:
        if len(name.encode()) > _LONG_NAME:
            name = hashlib.sha256(name.encode()).hexdigest()[:32]
    except UnicodeEncodeError:  # names in models must be UTF-8
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return f".{name}" if suffix == TEMPORARY else name
