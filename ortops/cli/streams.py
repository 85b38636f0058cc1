"""Reads models from files or standard input, and writes them to files or standard output."""

from __future__ import annotations

import json
import math
from typing import Any

import onnx

from ortops.cli.standard_streams import print_bytes, print_text, standard_input
from ortops.graph import convert
from ortops.graph.files import saving
from ortops.graph.files.external import LightModel, serialize


def source(path: str) -> str | bytes:
    """Returns a path as it is, or for ``-`` the bytes of standard input."""
    return standard_input().read() if path == "-" else path


def read_model(path: str) -> onnx.ModelProto:
    """Reads a model, with its external data.

    Args:
        path: A file, or ``-`` for standard input.

    Raises:
        ModelError: If it is not a model.
        OSError: If it cannot be read.
    """
    return read_light_model(path).attach()


def read_light_model(path: str) -> LightModel:
    """Reads a model whose big data stay in the file; see `read_model`."""
    return convert.load_light(source(path))


def write_model(model: onnx.ModelProto | LightModel, path: str) -> None:
    """Writes a model.

    Args:
        model: The model.
        path: A file, which is replaced as a whole, or ``-`` for standard output.
    """
    if path == "-":
        print_bytes(serialize(model.attached() if isinstance(model, LightModel) else model))
    elif isinstance(model, LightModel):
        saving.write_model(path, model)
    else:
        saving.save_model(model, path)


def describe_stream(path: str) -> str:
    """Returns the name of a path for messages."""
    return "standard output" if path == "-" else path


def print_json(found: Any) -> None:
    """Prints an object as JSON.

    NaN and infinity become null. Bytes of file names that are not UTF-8 are escaped with
    backslashes.
    """
    print_text(json.dumps(_plain(found), indent=2))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return None if isinstance(value, float) and not math.isfinite(value) else value
