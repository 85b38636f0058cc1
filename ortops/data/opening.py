"""Opens files of data that others wrote."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ortops.errors import FeedError
from ortops.graph.files.atomic import naming

__all__ = ["open_regular"]


def open_regular(path: str | os.PathLike[str], *, link: bool = True) -> BinaryIO:
    """Opens a regular file for reading.

    Pipes and devices are rejected: they may have no end, and opening a device may change its state.

    Args:
        path: The file.
        link: Whether the path may be a symbolic link.

    Raises:
        FeedError: If it is not a regular file.
        OSError: If it cannot be opened.
    """
    file = Path(path)
    wanted = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    wanted |= getattr(os, "O_NONBLOCK", 0)  # opening a pipe would wait for its writer
    if not link:
        wanted |= getattr(os, "O_NOFOLLOW", 0)
    with naming(path):
        status = file.stat() if link else file.lstat()
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISREG(status.st_mode):  # checked first, as opening a device may have effects
            stream = os.fdopen(os.open(file, wanted), "rb")
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return stream
            stream.close()
    raise FeedError(
        f"data '{file}' is not a regular file; copy its content to a regular file, or pipe "
        "comma-separated values to --data -"
    )
