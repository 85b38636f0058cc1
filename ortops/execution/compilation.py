"""Compiles the text of updates by numba, in another process, and keeps the machine code.

Compilation takes seconds and over 100 MB, neither of which a training should pay twice: a child
process does it and leaves numba's cache behind, in a folder of the user's. Only the text that this
process wrote is run; what is read from the folder is machine code.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from ortops.errors import OrtopsError
from ortops.execution.translation import Translation
from ortops.graph.files import write_atomically

__all__ = ["Function", "check_numba", "compile_all"]

Function: TypeAlias = Callable[..., None]

logger = logging.getLogger("ortops")

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import numba
from pathlib import Path
for path, name, signature in json.loads(sys.argv[2]):
    namespace = {"__name__": "builtins"}
    exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), namespace)
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


def compile_all(translations: Iterable[Translation]) -> dict[Translation, Function]:
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
        paths = {each: _place(each) for each in translations}
        _compile_apart(paths)
    except OSError as error:
        logger.warning(
            "kernels: compiled updates cannot be kept in '%s' (%s), so they are compiled in this "
            "process, each time; give a folder that can be written in XDG_CACHE_HOME",
            folder(),
            error,
        )
        return {each: _function(each, "<update>") for each in translations}
    return {each: _kept(each, path) for each, path in paths.items()}


def folder() -> Path:
    """Returns the folder that keeps machine code."""
    default = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    cache = os.environ.get("XDG_CACHE_HOME") or default
    return (Path(cache) if cache else Path.home() / ".cache") / "ortops"


def _place(translation: Translation) -> Path:
    """Returns the file with the text, written if need be: numba keeps machine code beside it.

    Raises:
        OSError: If it cannot be written, or others may write there.
    """
    import llvmlite
    import numba
    from llvmlite import binding

    within = folder()
    within.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        status = within.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o002:
            raise PermissionError(f"others may write in '{within}'")
    made_by = sys.version, numba.__version__, llvmlite.__version__
    made_for = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    made = hashlib.sha256("\n".join((*made_by, *made_for)).encode()).hexdigest()[:8]
    path = within / f"{translation.name}_{made}.py"
    if not path.exists():
        write_atomically(path, translation.text.encode())
    return path


def _compile_apart(paths: dict[Translation, Path]) -> None:
    """Compiles in a child process what is not compiled yet."""
    missing = {t: p for t, p in paths.items() if not p.with_suffix(".done").exists()}
    if not missing or not sys.executable or getattr(sys, "frozen", False):
        return
    logger.info("kernels: %d updates are compiled, once, into '%s'", len(missing), folder())
    found = json.dumps([(str(path), each.name, each.signature) for each, path in missing.items()])
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), found]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stderr.strip().rpartition("\n")[2] if done.returncode else ""
    except OSError as error:
        said = str(error)
    if said:
        logger.warning("kernels: a process that compiles updates failed (%s)", said)


def _kept(translation: Translation, path: Path) -> Function:
    """Returns the function that was compiled; compiles it if its machine code cannot be read."""
    try:
        return _function(translation, str(path), cache=True)
    except Exception as error:  # numba's, those of pickle, and of files
        logger.warning("kernels: '%s' is compiled again, its code cannot be read (%s)", path, error)
        return _function(translation, "<update>")


def _function(translation: Translation, path: str, *, cache: bool = False) -> Function:
    import numba

    namespace: dict[str, Any] = {"__name__": "builtins"}  # numba imports it when it reads code
    exec(compile(translation.text, path, "exec"), namespace)
    decorate = numba.njit(translation.signature, nogil=True, error_model="numpy", cache=cache)
    function: Function = decorate(namespace[translation.name])
    return function
