"""Opens files that others wrote, and decides which files of a folder may be read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from ortops.errors import FeedError, ModelError, OrtopsError
from ortops.graph.files.atomic import naming


def open_regular(
    path: str | os.PathLike[str],
    *,
    link: bool = True,
    most: int | None = None,
    error: type[OrtopsError] = FeedError,
    what: str = "data",
    remedy: str = "copy its content to a regular file, or pipe comma-separated values to --data -",
) -> BinaryIO:
    """Opens a regular file for reading; every file is opened in this way.

    Pipes and devices are rejected: they may have no end, and opening a device may change its state.

    Args:
        path: The file.
        link: Whether the path may be a symbolic link.
        most: The largest number of bytes, `LIMITS.metadata_bytes` for text.
        error: The class of the error if it is something else, or larger.
        what: What messages call it.
        remedy: What messages suggest.

    Raises:
        OrtopsError: If it is not a regular file, or too large; of the given class.
        OSError: If it cannot be opened.
    """
    file = Path(path)
    wanted = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    wanted |= getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for its writer
    if not link:
        wanted |= getattr(os, "O_NOFOLLOW", 0)
    with naming(path):
        try:
            status = file.stat() if link else file.lstat()
        except ValueError as wrong:  # a NUL, or what is no text
            raise error(f"{what} {os.fspath(path)!r:.200}: {wrong}; {remedy}") from wrong
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(status.st_mode):  # checked first, as opening a device may have effects
            stream = os.fdopen(os.open(file, wanted), "rb")
            opened = os.fstat(stream.fileno())
            is_regular = stat.S_ISREG(opened.st_mode)
            if is_regular and (most is None or opened.st_size <= most):
                return stream
            stream.close()
            if is_regular:
                raise error(
                    f"{what} '{path}' must have at most {most:,} bytes, got {opened.st_size:,}; "
                    "raise ortops.graph.limits.LIMITS.metadata_bytes"
                )
    raise error(f"{what} '{file}' is not a regular file; {remedy}")


def read_regular(
    path: str | os.PathLike[str],
    *,
    most: int | None = None,
    error: type[OrtopsError] = ModelError,
    what: str = "file",
    remedy: str = "give a regular file",
) -> bytes:
    """Returns the content of a regular file; the arguments are those of `open_regular`."""
    with open_regular(path, most=most, error=error, what=what, remedy=remedy) as stream:
        return stream.read()


def file_in_folder(folder: Path, name: object, *, what: str) -> Path:
    """Returns the file that another file of a folder names; it need not exist.

    Args:
        folder: The folder.
        name: The name.
        what: Where the name is written, at the beginning of messages.

    Raises:
        ModelError: If it is not a plain relative path, or leads out of the folder.
    """
    file = folder / plain_path(name, f"{what} must be a file in the folder '{folder}'")
    if leads_out(folder, file):
        raise ModelError(
            f"{what}: {name!r:.200} is a link that leads out of '{folder}'; replace it by the file"
        )
    return file


def plain_path(name: object, what: str) -> Path:
    """Returns a relative path that stays in its folder on every system, links aside.

    Args:
        name: The path.
        what: What it is and where it must be, at the beginning of messages.

    Raises:
        ModelError: If it is empty, too long, absolute, not text, or has ``..``, a drive or a NUL.
    """
    if isinstance(name, str) and "\0" not in name and name.encode(errors="ignore").decode() == name:
        path = PureWindowsPath(name)  # both / and \ separate its parts
        is_name = 0 < max(map(len, path.parts), default=0) < 256  # which no system exceeds
        # Windows takes spaces and dots at the end of a name for none: '.. ' is '..'
        if is_name and not path.drive + path.root and all(part.strip(". ") for part in path.parts):
            return Path(name)
    raise ModelError(f"{what}, as a relative path without '..' or a drive, got {name!r:.200}")


def leads_out(folder: Path, file: Path) -> bool:
    """Whether a link leads from a file of a folder to a place outside, other than the cache's."""
    inside = Path(os.path.realpath(file)).is_relative_to(os.path.realpath(folder))
    return not inside and not is_cached(file)


def is_cached(link: Path) -> bool:
    """Whether a link is from a file in snapshots/<revision>/ of Hugging Face's cache to blobs/."""
    snapshots = next((each for each in link.absolute().parents if each.name == "snapshots"), None)
    if snapshots is None:
        return False
    target = Path(os.path.realpath(link))  # also for a cycle of links
    return target.parent == Path(os.path.realpath(snapshots)).parent / "blobs"
