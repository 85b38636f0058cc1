"""Compiles the source code of updates with numba in a child process, and caches the machine code.

Compilation takes seconds and over 100 MB of memory. A child process does it once and writes numba's
cache to a folder of the user. Loading the cache executes its contents, so a folder or file is used
only if nobody but the user and root can have written to it.
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

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH  # by users other than the owner

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
        OrtopsError: If numba cannot be imported.
    """
    try:
        importlib.import_module("numba")
    except ImportError as error:
        raise OrtopsError(
            f"kernels='compiled' needs numba, which cannot be imported ({error}); "
            "pip install ortops[compiled], or use kernels='onnx'"
        ) from error


def compile_all(translations: Sequence[Translation]) -> dict[Translation, Function]:
    """Compiles formulas, or loads them from the cache.

    Args:
        translations: The formulas.

    Returns:
        The function of each formula. The functions run without the GIL and raise no exceptions.

    Raises:
        OrtopsError: If numba cannot be imported.
    """
    check_numba()
    try:
        cached = [_cached(each) for each in translations]
        _compile_in_child(cached)
    except OSError as error:
        _warn_uncached(str(error))
        return {each: _compiled(_dispatcher(each, "<update>"), each) for each in translations}
    return {each.translation: _loaded(each) for each in cached}


@functools.cache
def _warn_uncached(why: str) -> None:
    """Logs once why machine code is not cached."""
    logger.warning(
        "kernels: compiled updates are not cached (%s), so each process compiles them again; set "
        "XDG_CACHE_HOME to a folder that only you can write to",
        why,
    )


def folder() -> Path:
    """Returns the folder for machine code.

    Raises:
        OSError: If the user has no home folder, and no cache folder is set.
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
    """A formula whose machine code is cached.

    Attributes:
        translation: The formula.
        path: The file with its source code.
        folder: The folder with numba's machine code.
        dispatcher: numba's function, not compiled yet.
    """

    translation: Translation
    path: Path
    folder: Path
    dispatcher: Any

    @property
    def done(self) -> Path:
        """The file that the child process creates after compiling it."""
        return self.path.with_suffix(".done")

    def files(self) -> Iterator[Path]:
        """Yields the existing files of the machine code."""
        return (file for file in self.folder.iterdir() if self.translation.name in file.name)


def _cached(translation: Translation) -> _Cached:
    """Writes the source code of a formula to a file, because numba only caches code from files.

    Raises:
        OSError: If the cache cannot be written, or others may have written to it.
    """
    path = _source_file(translation)
    try:
        dispatcher = _dispatcher(translation, str(path), cache=True)
        cache = Path(dispatcher.stats.cache_path)  # NUMBA_CACHE_DIR may set another folder
    except RuntimeError as error:  # numba has no folder to write to
        raise OSError(str(error)) from error
    cached = _Cached(translation, path, cache, dispatcher)
    _check_folder(cache)
    for file in (path, cached.done, *cached.files()):
        with contextlib.suppress(FileNotFoundError):  # numba's temporary files come and go
            _check_file(file)
    return cached


def _source_file(translation: Translation) -> Path:
    """Returns the file with the source code of a formula; writes it if it does not exist."""
    import llvmlite
    import numba
    from llvmlite import binding

    cache = folder()
    machine_code = cache / "__pycache__"  # numba's default
    for missing in [each for each in (*reversed(cache.parents), cache) if not each.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    _check_folder(cache)
    machine_code.mkdir(mode=0o700, exist_ok=True)
    made_by = sys.version, numba.__version__, llvmlite.__version__
    made_for = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made = hashlib.sha256("\n".join((*made_by, *made_for)).encode()).hexdigest()[:8]
    path = cache / f"{translation.name}_{made}.py"
    if not os.path.lexists(path):
        write_atomically(path, translation.text.encode())
        path.chmod(0o600)
    return path


def _check_folder(path: Path) -> None:
    """Checks that other users cannot write to a folder or redirect its path.

    Raises:
        OSError: If they can.
    """
    if not hasattr(os, "geteuid"):  # on Windows, folders of users are private
        return
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"'{path}' is not a folder, or is a symbolic link to one")
    _check_owner(path, status)
    _check_ancestors(path.parent)


def _check_ancestors(path: Path) -> None:
    """Checks that other users cannot replace a part of a folder's path."""
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode):
            _check_owner(part, status)
            _check_ancestors(part.parent / part.readlink())
            continue
        # In a folder with the sticky bit, such as /tmp, only the owner of an entry can replace it.
        # Many systems have a group for each user, with the user as only member and write access.
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
        alone = not status.st_mode & stat.S_IWOTH and _is_alone(status.st_gid)
        _check_owner(part, status, writable=is_sticky or alone)


def _is_alone(group: int) -> bool:
    """Whether the user is the only member of a group."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    is_own = user.pw_gid == group and user.pw_name == found.gr_name
    return is_own and user.pw_uid != 0 and set(found.gr_mem) <= {user.pw_name}


def _check_file(path: Path) -> None:
    """Checks that other users cannot have written a file."""
    if not hasattr(os, "geteuid"):
        return
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise PermissionError(f"'{path}' is not a regular file")
    _check_owner(path, status)


def _check_owner(path: Path, status: os.stat_result, *, writable: bool = False) -> None:
    """Checks that other users neither own a path nor can write to it, unless ``writable``."""
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"'{path}' belongs to another user")
    is_link = stat.S_ISLNK(status.st_mode)  # the mode of a link has no meaning
    if not (writable or is_link) and status.st_mode & _WRITABLE:
        raise PermissionError(f"others may write to '{path}'")


def _compile_in_child(cached: Sequence[_Cached]) -> None:
    """Compiles formulas that are not cached yet in a child process."""
    missing = [each for each in cached if not each.done.exists()]
    if not missing or not sys.executable or getattr(sys, "frozen", False):
        return
    logger.info("kernels: compiling %d updates, once, into '%s'", len(missing), folder())
    updates = [
        (str(each.path), each.translation.text, each.translation.name, each.translation.signature)
        for each in missing
    ]
    given = json.dumps({"path": sys.path, "updates": updates})
    command = [sys.executable, "-c", _CHILD]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
        problem = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        logger.warning("kernels: the process that compiles updates failed (%s)", problem)


def _loaded(cached: _Cached) -> Function:
    """Returns the compiled function; compiles it again if its machine code cannot be read."""
    translation, path = cached.translation, cached.path
    try:
        function = _compiled(cached.dispatcher, translation)
        for file in cached.files():  # this process may have written them with a permissive umask
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mode & _WRITABLE:
                    file.chmod(0o600)
        return function
    except Exception as error:  # exceptions of numba, pickle and files
        logger.warning(
            "kernels: compiling '%s' again, because its code cannot be read (%s)", path, error
        )
        return _compiled(_dispatcher(translation, "<update>"), translation)


def _dispatcher(translation: Translation, path: str, *, cache: bool = False) -> Any:
    """Returns the function of a formula, not compiled yet."""
    import numba

    namespace: dict[str, Any] = {
        "__name__": "builtins"
    }  # numba imports this module when it reads code
    exec(compile(translation.text, path, "exec"), namespace)
    return numba.njit(nogil=True, error_model="numpy", cache=cache)(namespace[translation.name])


def _compiled(dispatcher: Any, translation: Translation) -> Function:
    dispatcher.compile(translation.signature)
    dispatcher.disable_compile()
    function: Function = dispatcher
    return function
