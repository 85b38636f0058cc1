"""Writing files that are never half written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_atomically"]


def write_atomically(
    path: str | os.PathLike[str], data: bytes | Callable[[BinaryIO], object]
) -> None:
    """Writes a file so that at any time the old content or the new is there, whole.

    Args:
        path: The file; a link stays one, and what it leads to is written.
        data: Its content, or what writes it into an open file.

    Raises:
        OSError: If it cannot be written; then the old file is as it was.
    """
    target = Path(path).resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:  # it names the file that stands in for a while
        raise type(error)(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(handle, "wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink()
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
