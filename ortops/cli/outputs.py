"""Rejects output files that would overwrite an input or each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from ortops.data.images import EXTENSIONS
from ortops.errors import OrtopsError
from ortops.graph.files.external import read_light


def check_outputs(
    inputs: Mapping[str, str | None], outputs: Mapping[str, str | None], *, force: bool = False
) -> None:
    """Rejects outputs that are also inputs, and two outputs that are the same file.

    Different spellings of a path, and links to it, count as the same file.

    Args:
        inputs: The paths that are read, by the names that messages give them. ``-`` and None are
            not files.
        outputs: The paths that are written, likewise.
        force: Whether inputs may be overwritten.

    Raises:
        OrtopsError: If an output is rejected, or two inputs are standard input.
    """
    piped = [name for name, path in inputs.items() if path == "-"]
    if len(piped) > 1:
        raise OrtopsError(
            f"{piped[0]} and {piped[1]} are both '-', and standard input can be read only once; "
            "give a file for one of them"
        )
    written: dict[str, str] = {name: path for name, path in outputs.items() if _is_file(path)}
    for name, other in itertools.combinations(written, 2):
        path = written[name]
        if _is_same(path, written[other]):
            raise OrtopsError(f"{name} and {other} are both '{path}'; give two different files")
    for source, read in inputs.items():
        if force or not written or not _is_file(read):
            continue
        files = [Path(read), *_data_files(read)]
        for name, path in written.items():
            if any(_is_same(path, file) for file in files) or _is_image_in(path, read):
                raise OrtopsError(
                    f"{name}: '{path}' would overwrite {source} '{read}'; give another file, or "
                    "--force to overwrite it"
                )


def check_writable(outputs: Mapping[str, str | None]) -> None:
    """Rejects files that cannot be written, before any work is done for them.

    Args:
        outputs: The paths that are written, by the names that messages give them. ``-`` and None
            are not files.

    Raises:
        OrtopsError: If a path is a folder, or a file cannot be created there.
    """
    for name, path in outputs.items():
        if not _is_file(path):
            continue
        if Path(path).is_dir():
            raise OrtopsError(f"{name}: '{path}' is a folder; give the path of a file")
        folder = Path(os.path.realpath(path)).parent
        if not folder.is_dir():
            raise OrtopsError(f"{name}: there is no folder '{folder}'; create it first")
        if not os.access(folder, os.W_OK):
            raise OrtopsError(
                f"{name}: the folder '{folder}' is not writable; give a file in another one"
            )


def _is_file(path: str | None) -> TypeGuard[str]:
    """Whether a path names a file or folder, existing or not, rather than a stream."""
    if path is None or path == "-":
        return False
    return not Path(path).exists() or Path(path).is_file() or Path(path).is_dir()


def _is_same(first: str, second: str | Path) -> bool:
    try:
        return Path(first).samefile(second)
    except OSError:  # one of them does not exist yet
        return os.path.realpath(first) == os.path.realpath(second)


def _is_image_in(path: str, folder: str) -> bool:
    """Whether a file is, or would become, an image of the data set in a folder."""
    if not Path(folder).is_dir() or Path(path).suffix.lower() not in EXTENSIONS:
        return False
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents


def _data_files(path: str) -> list[Path]:
    """Returns the external data files of a model."""
    if Path(path).suffix != ".onnx":
        return []
    try:
        found = read_light(Path(path))
    except OSError:  # reported when the model is read
        return []
    tensors = () if found is None else found[0].graph.initializer
    names = {e.value for tensor in tensors for e in tensor.external_data if e.key == "location"}
    return [Path(os.path.realpath(path)).parent / name for name in names]
