"""The data sets that the command line names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx

from ortops.cli.standard_streams import say, standard_input
from ortops.data.files import read_data
from ortops.data.wanted import DataFile, Wanted
from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.json_text import read_json

Classes: TypeAlias = dict[str, list[str]]

PIXELS = ("scale", "mean", "std")
"""The options that prepare pixels."""

CLASSES_KEY = "ortops.classes"
"""The metadata key under which a model stores the class names of its labels as JSON, by input."""

COLUMNS_KEY = "ortops.columns"
"""The metadata key under which it stores the columns of a table from which inputs were formed."""

PIXELS_KEY = "ortops.pixels"
"""The metadata key under which it stores the numbers by which pixels of images were prepared."""

_STORED = {CLASSES_KEY: "classes", COLUMNS_KEY: "columns", PIXELS_KEY: "pixels"}
"""The attribute of `DataFile` that each of them stores."""


def read_given(
    options: argparse.Namespace,
    path: str,
    inputs: Sequence[Wanted],
    model: onnx.ModelProto,
    *,
    ignored: Collection[str] = (),
) -> DataFile:
    """Reads a data set with the options of the command line, and prints the automatic choices.

    Args:
        options: The options.
        path: The file.
        inputs: The inputs to fill.
        model: The model, which stores class names, and what counts where the options leave it open.
        ignored: As for `read_data`.
    """
    is_folder = path != "-" and Path(path).is_dir()
    if is_folder and options.columns:
        raise OrtopsError("--columns: a folder of images has no columns; omit --columns")
    if not is_folder and any(getattr(options, name) is not None for name in PIXELS):
        raise OrtopsError(
            f"--scale, --mean, --std: '{path}' is not a folder of images; omit these options"
        )
    pixels = _pixels(options, path, inputs, model) if is_folder else {}
    # Integers are not scaled by 1, either.
    applied = {name: n for name, n in pixels.items() if n is not None and (name, n) != ("scale", 1)}
    data = read_data(
        "standard input" if path == "-" else path,
        inputs,
        columns=_chosen(options.columns, inputs),
        classes=read_notes(model, CLASSES_KEY),
        usual=read_notes(model, COLUMNS_KEY),
        pixels=applied,
        ignored=ignored,
        piped=standard_input() if path == "-" else None,
    )
    for sentence in data.said:
        say(sentence)
    data.pixels = {n: [*map(str, np.ravel(v))] for n, v in pixels.items() if v is not None}
    return data


def _pixels(
    options: argparse.Namespace, path: str, inputs: Sequence[Wanted], model: onnx.ModelProto
) -> dict[str, Any]:
    """Returns scale, mean and std of images: those given, else those of the training."""
    stored: dict[str, Any] = read_notes(model, PIXELS_KEY)
    given: dict[str, Any] = {name: getattr(options, name) for name in PIXELS}
    usual = [name for name in PIXELS if given[name] is None and stored.get(name)]
    for name in usual:
        try:
            numbers = [float(text) for text in stored[name]]
        except ValueError as error:
            raise OrtopsError(
                f"metadata_props '{PIXELS_KEY}' must have numbers, got {stored[name]!r:.80}"
            ) from error
        given[name] = numbers[0] if name == "scale" else numbers
    if usual:
        shown = ", ".join(f"{name} {' '.join(stored[name])}" for name in usual)
        say(f"pixels of '{path}' are prepared as in training: {shown}")
    elif given["scale"] is None and any(e.dtype.kind == "f" for e in inputs if not e.is_target):
        given["scale"] = 255.0  # as in `image_folder`
        say(f"pixels of '{path}' are divided by 255; --scale 1 leaves them as they are")
    return given


def note_data(model: onnx.ModelProto, data: DataFile) -> None:
    """Stores in a model the class names of labels, and how its inputs were formed."""
    for key, attribute in _STORED.items():
        if found := getattr(data, attribute):
            write_metadata(model, key, json.dumps(read_notes(model, key) | found))


def keep_notes(result: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Copies what `note_data` stored, which an original file does not have."""
    for key in _STORED:
        if found := read_notes(model, key):
            write_metadata(result, key, json.dumps(found))


def read_notes(model: onnx.ModelProto, key: str) -> dict[str, list[str]]:
    """Returns what `note_data` stored in a model under a key, such as class names by input."""
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
