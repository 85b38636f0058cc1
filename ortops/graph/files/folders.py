"""The folder of a model in memory whose data are still in the files next to the one it came from.

The location of external data is relative to the folder of the model's file, which a ModelProto does
not know. Its metadata refer to a list of this process, and not to the folder itself: a file cannot
name a folder to read from, because it would have to know a random number of this process.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import onnx

FOLDER_KEY = "ortops.folder"
"""The metadata key of the reference; without meaning in other processes."""

_TOKEN = secrets.token_hex(16)
_folders: list[Path] = []


def note(folder: Path) -> str:
    """Returns a reference to a folder."""
    folder = folder.absolute()
    if folder not in _folders:
        _folders.append(folder)
    return f"{_TOKEN}/{_folders.index(folder)}"


def remember(model: onnx.ModelProto, folder: Path | None) -> None:
    """Writes the folder of a model to its metadata, in place, if it has external data.

    Args:
        model: The model.
        folder: The folder; None if it has no file.
    """
    if folder is not None and any(tensor.external_data for tensor in model.graph.initializer):
        forget(model)
        model.metadata_props.add(key=FOLDER_KEY, value=note(folder))


def remembered(model: onnx.ModelProto) -> Path | None:
    """Returns the folder of a model, if this process wrote it to its metadata."""
    for entry in model.metadata_props:
        token, _, number = entry.value.partition("/")
        if entry.key == FOLDER_KEY and token == _TOKEN and number.isdecimal():
            return _folders[int(number)] if int(number) < len(_folders) else None
    return None


def forget(model: onnx.ModelProto) -> None:
    """Removes the folder from the metadata of a model, in place."""
    for entry in [entry for entry in model.metadata_props if entry.key == FOLDER_KEY]:
        model.metadata_props.remove(entry)
