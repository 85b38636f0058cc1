"""Compiles the text of updates by numba, in another process, and keeps the machine code.

Compilation takes seconds and over 100 MB, neither of which a training should pay twice: a child
process does it and leaves numba's cache behind, in a folder of the user's. Loading that cache runs
what is in it, so a folder or file counts only if nobody but the user and root can have written it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ortops.errors import OrtopsError
from ortops.execution.translation import Translation
from ortops.graph.files.atomic import write_atomically

__all__ = ["Function", "check_numba", "compile_all"]

Function: TypeAlias = Callable[..., None]

logger = logging.getLogger("ortops")

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by others than the owner

_CHILD = """
import json, os, sys
os.umask(0o077)
wanted = json.load(sys.stdin)
sys.path[:] = wanted["path"]
import numba
from pathlib import Path
for path, text, name, signature in wanted["updates"]:
    namespace = {"__name__": "builtins"}
    exec(compile(text, path, "exec"), namespace)
    options = dict(nogil=True, error_model="numpy", cache=True)
    numba.njit(signature, **options)(namespace[name])
    Path(path).with_suffix(".done").touch()
"""


def check_numba() -> None:
    """Imports numba.

    Raises:
        OrtopsError: If that is not possible.
    """
    try:
        importlib.import_module("numba")
    except ImportError as error:
        raise OrtopsError(
            f"kernels is 'compiled', and numba cannot be imported ({error}); "
            "pip install ortops[compiled], or give 'onnx'"
        ) from error


def compile_all(translations: Sequence[Translation]) -> dict[Translation, Function]:
    """Compiles formulas, or finds them compiled.

    Args:
        translations: The formulas.

    Returns:
        The function of each. They run without Python's lock, and raise nothing.

    Raises:
        OrtopsError: If numba cannot be imported.
    """
    check_numba()
    try:
        cached = [_cached(each) for each in translations]
        _compile_apart(cached)
    except OSError as error:
        _warn_uncached(str(error))
        return {each: _compiled(_dispatcher(each, "<update>"), each) for each in translations}
    return {each.translation: _loaded(each) for each in cached}


@functools.cache
def _warn_uncached(why: str) -> None:
    """Says once why machine code is not kept."""
    logger.warning(
        "kernels: compiled updates are not cached (%s), so each process compiles them again; set "
        "XDG_CACHE_HOME to a folder that only you can write to",
        why,
    )


def folder() -> Path:
    """Returns the folder that keeps machine code.

    Raises:
        OSError: If the user has no home folder, and no other folder is given.
    """
    default = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    cache = os.environ.get("XDG_CACHE_HOME") or default
    if cache and Path(cache).is_absolute():  # the XDG specification ignores relative paths
        return Path(cache) / "ortops"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError("the user has no home folder") from error
    if not home.is_absolute():
        raise FileNotFoundError(f"the home folder '{home}' is not an absolute path")
    return home / ".cache" / "ortops"


@dataclass(frozen=True)
class _Cached:
    """A formula whose machine code is kept.

    Attributes:
        translation: The formula.
        path: The file with its text.
        where: The folder that numba keeps the machine code in.
        dispatcher: numba's function, not compiled yet.
    """

    translation: Translation
    path: Path
    where: Path
    dispatcher: Any

    @property
    def done(self) -> Path:
        """The file that says that the child process has compiled it."""
        return self.path.with_suffix(".done")

    def files(self) -> Iterator[Path]:
        """Yields the files of the machine code, as many as there are."""
        return (file for file in self.where.iterdir() if self.translation.name in file.name)


def _cached(translation: Translation) -> _Cached:
    """Writes the text of a formula to a file, as numba keeps machine code of files only.

    Raises:
        OSError: If nothing can be kept, or others may have written what is kept.
    """
    path = _place(translation)
    try:
        dispatcher = _dispatcher(translation, str(path), cache=True)
        where = Path(dispatcher.stats.cache_path)  # NUMBA_CACHE_DIR may say another than ours
    except RuntimeError as error:  # numba has no folder to write to
        raise OSError(str(error)) from error
    cached = _Cached(translation, path, where, dispatcher)
    _check_folder(where)
    for file in (path, cached.done, *cached.files()):
        with contextlib.suppress(FileNotFoundError):  # numba's temporary files come and go
            _check_file(file)
    return cached


def _place(translation: Translation) -> Path:
    """Returns the file with the text of a formula; writes it if need be."""
    import llvmlite
    import numba
    from llvmlite import binding

    within = folder()
    machine_code = within / "__pycache__"  # numba's default
    for missing in [each for each in (*reversed(within.parents), within) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    _check_folder(within)
    machine_code.mkdir(mode=0o700, exist_ok=True)
    made_by = sys.version, numba.__version__, llvmlite.__version__
    made_for = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made = hashlib.sha256("\n".join((*made_by, *made_for)).encode()).hexdigest()[:8]
    path = within / f"{translation.name}_{made}.py"
    if not os.path.lexists(path):
        write_atomically(path, translation.text.encode())
        path.chmod(0o600)
    return path


def _check_folder(path: Path) -> None:
    """Refuses a folder if others may write to it, or may change where its path leads.

    Raises:
        OSError: If they may.
    """
    if not hasattr(os, "geteuid"):  # Windows keeps a user's folders from others
        return
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"'{path}' is not a folder, or is a symbolic link to one")
    _check_owner(path, status)
    _check_way(path.parent)


def _check_way(path: Path) -> None:
    """Refuses the path of a folder if others may replace a part of it."""
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode):
            _check_owner(part, status)
            _check_way(part.parent / part.readlink())
            continue
        # In a folder with the sticky bit, like /tmp, only its owner can replace an entry. Many
        # systems make a group for each user, who is alone in it, and let it write.
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        alone = not status.st_mode & stat.S_IWOTH and _is_alone(status.st_gid)
        _check_owner(part, status, writable=is_sticky or alone)


def _is_alone(group: int) -> bool:
    """Whether a group is the user's own, by its name and members."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_own = user.pw_gid == group and user.pw_name == found.gr_name
    return is_own and user.pw_uid != 0 and set(found.gr_mem) <= {user.pw_name}


def _check_file(path: Path) -> None:
    """Refuses a file that others may have written."""
    if not hasattr(os, "geteuid"):
        return
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"'{path}' is not a regular file")
    _check_owner(path, status)


def _check_owner(path: Path, status: os.stat_result, *, writable: bool = False) -> None:
    """Refuses what belongs to others, or what they may write to unless that does no harm."""
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"'{path}' belongs to another user")
    is_link = stat.S_ISLNK(status.st_mode)  # whose mode says nothing
    if not (writable or is_link) and status.st_mode & _WRITABLE:
        raise PermissionError(f"others may write to '{path}'")


def _compile_apart(cached: Sequence[_Cached]) -> None:
    """Compiles in a child process what is not compiled yet."""
    missing = [each for each in cached if not each.done.exists()]
    if not missing or not sys.executable or getattr(sys, "frozen", False):
        return
    logger.info("kernels: %d updates are compiled, once, into '%s'", len(missing), folder())
    updates = [
        (str(each.path), each.translation.text, each.translation.name, each.translation.signature)
        for each in missing
    ]
    given = json.dumps({"path": sys.path, "updates": updates})
    command = [sys.executable, "-c", _CHILD]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        said = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except OSError as error:
        said = str(error)
    if said:
        logger.warning("kernels: a process that compiles updates failed (%s)", said)


def _loaded(cached: _Cached) -> Function:
    """Returns the function that was compiled; compiles it if its machine code cannot be read."""
    translation, path = cached.translation, cached.path
    try:
        function = _compiled(cached.dispatcher, translation)
        for file in cached.files():  # this process may have written them with a lax umask
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mode & _WRITABLE:
                    file.chmod(0o600)
        return function
    except Exception as error:  # numba's, those of pickle, and of files
        logger.warning("kernels: '%s' is compiled again, its code cannot be read (%s)", path, error)
        return _compiled(_dispatcher(translation, "<update>"), translation)


def _dispatcher(translation: Translation, path: str, *, cache: bool = False) -> Any:
    """Returns the function of a formula, not compiled yet."""
    import numba

    namespace: dict[str, Any] = {"__name__": "builtins"}  # numba imports it when it reads code
    exec(compile(translation.text, path, "exec"), namespace)
    return numba.njit(nogil=True, error_model="numpy", cache=cache)(namespace[translation.name])


def _compiled(dispatcher: Any, translation: Translation) -> Function:
    dispatcher.compile(translation.signature)
    dispatcher.disable_compile()
    function: Function = dispatcher
    return function
