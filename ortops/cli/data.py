"""The data sets that the command line names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import onnx

from ortops.cli.standard_streams import say, standard_input
from ortops.data.files import read_data
from ortops.data.wanted import DataFile, Wanted
from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.json_text import read_json

Classes: TypeAlias = dict[str, list[str]]

CLASSES_KEY = "ortops.classes"
"""The metadata key under which a model stores the class names of its labels as JSON, by input."""

COLUMNS_KEY = "ortops.columns"
"""The metadata key under which it stores the columns of a table from which inputs were formed."""


def read_given(
    options: argparse.Namespace,
    path: str,
    inputs: Sequence[Wanted],
    classes: Classes,
    columns: Classes,
    *,
    ignored: Collection[str] = (),
) -> DataFile:
    """Reads a data set with the options of the command line, and prints the automatic choices.

    Args:
        options: The options.
        path: The file.
        inputs: The inputs to fill.
        classes: The class names stored in the model.
        columns: The columns stored in the model, of which those count that the options leave open.
        ignored: As for `read_data`.
    """
    pixels = {name: getattr(options, name) for name in ("scale", "mean", "std")}
    is_folder = path != "-" and Path(path).is_dir()
    if is_folder and options.columns:
        raise OrtopsError("--columns: a folder of images has no columns; omit --columns")
    if not is_folder and any(each is not None for each in pixels.values()):
        raise OrtopsError(
            f"--scale, --mean, --std: '{path}' is not a folder of images; omit these options"
        )
    if is_folder and options.scale is None:
        if any(each.dtype.kind == "f" for each in inputs if not each.is_target):
            pixels["scale"] = 255.0  # as in `image_folder`
            say(f"pixels of '{path}' are divided by 255; --scale 1 leaves them as they are")
    elif options.scale == 1:
        del pixels["scale"]  # integers are not scaled, either
    data = read_data(
        "standard input" if path == "-" else path,
        inputs,
        columns=_chosen(options.columns, inputs),
        classes=classes,
        usual=columns,
        pixels=pixels,
        ignored=ignored,
        piped=standard_input() if path == "-" else None,
    )
    for sentence in data.said:
        say(sentence)
    return data


def note_data(model: onnx.ModelProto, data: DataFile) -> None:
    """Stores the class names of labels, and the columns of inputs, in a model."""
    for key, found in ((CLASSES_KEY, data.classes), (COLUMNS_KEY, data.columns)):
        if found:
            write_metadata(model, key, json.dumps(read_classes(model, key) | found))


def read_classes(model: onnx.ModelProto, key: str = CLASSES_KEY) -> Classes:
    """Returns the class names, or the columns, stored in a model, by input."""
    text = next((entry.value for entry in model.metadata_props if entry.key == key), "{}")
    try:
        found = read_json(text)
    except ValueError:
        found = None
    fits = isinstance(found, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in found.values()
    )
    if not fits:
        raise OrtopsError(
            f"metadata_props '{key}' must be a JSON object of arrays of names, got {text!r:.80}"
        )
    return dict(found or {})


def _chosen(columns: Sequence[str] | None, inputs: Sequence[Wanted]) -> dict[str, list[str]]:
    """Returns the columns given for each input."""
    known = [wanted.name for wanted in inputs]
    found: dict[str, list[str]] = {}
    for text in columns or ():
        name, equals, listed = text.partition("=")
        if not equals or not listed:
            raise OrtopsError(f"--columns must have the form INPUT=COLUMN,COLUMN, got {text!r}")
        if name not in known:
            raise OrtopsError(f"--columns: there is no input '{name}'; {did_you_mean(name, known)}")
        if name in found:
            raise OrtopsError(
                f"--columns: input '{name}' is given twice; give {name}=COLUMN,COLUMN once"
            )
        found[name] = listed.split(",")
    return found
