"""Compiling models/c/train.c against the onnxruntime that is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import onnxruntime

LIBRARY = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"), None)
"""The shared library of the installed onnxruntime, which has no header."""

_SOURCE = Path(__file__).parents[2] / "models" / "c" / "train.c"


def compile_trainer(folder: Path, *options: str) -> Path:
    """Compiles the trainer; with a stand-in where onnxruntime's header is not installed.

    Args:
        folder: Where the program goes, and a link to the library.
        *options: Of the compiler.

    Returns:
        The program.
    """
    assert LIBRARY is not None
    (folder / "libonnxruntime.so.1").symlink_to(LIBRARY)
    source = "#include <onnxruntime_c_api.h>"
    installed = subprocess.run(["cc", "-E", "-"], input=source, capture_output=True, text=True)
    include = [] if installed.returncode == 0 else [f"-I{Path(__file__).parent}"]
    subprocess.run(
        [
            *("cc", "-std=c11", *options, *include),
            *(_SOURCE, folder / "libonnxruntime.so.1"),
            *(f"-Wl,-rpath,{folder}", "-o", folder / "train"),
        ],
        check=True,
    )
    return folder / "train"
