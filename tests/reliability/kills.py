"""Every operation of Python on the files of a folder: what a kill there leaves, and a full disk.

`snapshots` calls a function once, and copies the folder before each operation. A copy is what a
process leaves that is killed there: what Python has not written yet is not in it, and nobody holds
a lock on its files. `killed_at` kills a process at an operation, which shows that this is true.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import hashlib
import io
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

RANDOM = re.compile(rb"\.[0-9a-f]{16}(?=\.(data|tmp))")

_ONE_PATH = ("mkdir", "unlink", "remove", "rmdir", "truncate", "fsync")
_TWO_PATHS = ("link", "symlink", "rename", "replace")  # from one to the other
_TAKE_ROOM = ("open", "write", "fsync", "mkdir", "link", "symlink")


class Snapshot(NamedTuple):
    """A folder before an operation.

    Attributes:
        operation: Its name and that of the file; "end" after the last one.
        folder: The copy, which does not exist if the folder did not.
    """

    operation: str
    folder: Path


@contextlib.contextmanager
def watched(folder: Path, before: Callable[[str, Path], None]) -> Iterator[None]:
    """Calls a function before each operation on a folder and what is in it.

    The function gets the name of the operation and the path. Writing is two operations, as the
    system may write a part.
    """
    root = folder.absolute()

    def tell(name: str, path: Any) -> bool:
        if isinstance(path, int):  # a descriptor, whose path only Linux tells
            link = Path(f"/proc/self/fd/{path}")
            path = link.readlink() if link.is_symlink() else root
        found = Path(path).absolute()
        if not found.is_relative_to(root):
            return False
        before(name, found)
        return True

    class Raw(io.FileIO):
        halved = False

        def write(self, content: Any) -> int:
            tell("write", self.name)
            self.halved = not self.halved and len(content) > 1
            return super().write(content[: len(content) // 2] if self.halved else content)

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        writes = set(mode) - set("rbtU") and not isinstance(file, int)
        if not writes or not tell("open", file):
            return given_open(file, mode, *arguments, **options)
        kind = "".join(letter for letter in mode if letter not in "bt")
        raw = Raw(os.fspath(file), kind, opener=options.pop("opener", None))
        buffered = io.BufferedRandom(raw) if "+" in kind else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, **options)

    def told(name: str, position: int) -> Callable[..., Any]:
        call = getattr(os, name)

        def replacement(*arguments: Any, **options: Any) -> Any:
            tell(name, arguments[position])
            return call(*arguments, **options)

        return replacement

    given_open = open
    with contextlib.ExitStack() as stack:
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", opened))
        for position, names in enumerate((_ONE_PATH, _TWO_PATHS)):
            for name in names:
                stack.enter_context(mock.patch.object(os, name, told(name, position)))
        yield


def snapshots(function: Callable[[], object], folder: Path, into: Path) -> list[Snapshot]:
    """Calls a function that writes into a folder; returns the folder before each operation."""
    found: list[Snapshot] = []

    def copy(name: str, path: Path) -> None:
        target = into / f"{len(found):04d}"
        if folder.exists():
            shutil.copytree(folder, target, symlinks=True)
        file = RANDOM.sub(b"", os.fsencode(path.name)).decode()
        found.append(Snapshot(f"{name} {file}".strip(), target))

    with watched(folder, copy):
        function()
    copy("end", Path())
    return found


def killed_at(number: int, function: Callable[[], object], folder: Path) -> bool:
    """Calls a function in a child process, which is killed before an operation on the folder.

    Returns:
        Whether there are so many operations.
    """
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def kill(name: str, path: Path) -> None:
                nonlocal count
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

            with watched(folder, kill):
                function()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


def full_disk_at(number: int, function: Callable[[], object], folder: Path) -> BaseException | None:
    """Calls a function while the disk gets full at an operation on the folder, and stays so.

    From there, nothing that takes room succeeds. Another operation fails if it is the one.

    Returns:
        What it raised.
    """
    count = 0

    def fail(name: str, path: Path) -> None:
        nonlocal count
        count += 1
        spares = name in ("unlink", "remove", "rmdir")
        if not spares and (count == number or (count > number and name in _TAKE_ROOM)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(path))

    try:
        with watched(folder, fail):
            function()
    except Exception as error:
        return error
    return None


def contents(folder: Path) -> dict[str, str]:
    """Returns a checksum of each file of a folder, by name; temporary files have none.

    What is random in names is left out, in models that have them too. Of several generations of
    external data, and of several temporary files, there is what differs.
    """
    found: dict[str, set[str]] = {}
    for file in folder.rglob("*"):
        if not file.is_dir():
            name, content = (
                RANDOM.sub(b"", each)
                for each in (os.fsencode(file.relative_to(folder)), file.read_bytes())
            )
            checksum = "" if name.endswith(b".tmp") else hashlib.sha256(content).hexdigest()
            found.setdefault(name.decode(), set()).add(checksum)
    return {name: " ".join(sorted(checksums)) for name, checksums in sorted(found.items())}


def litter(folder: Path) -> list[str]:
    """Returns the names of temporary files."""
    return [name for name, checksum in contents(folder).items() if not checksum]


def different(found: list[Snapshot]) -> list[Snapshot]:
    """Returns the first of all snapshots with the same files, whatever is in temporary ones."""
    first: dict[object, Snapshot] = {}
    for each in found:
        key = tuple(contents(each.folder).items())
        first.setdefault((each.folder.exists(), key), each)
    return list(first.values())
