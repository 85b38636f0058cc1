"""Models from files and standard input, and to files and standard output."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import OrtopsError
from ortops.graph import convert
from ortops.graph.external import attached, save_model, serialize

__all__ = [
    "describe_stream",
    "leave_standard_output",
    "print_bytes",
    "print_json",
    "read_model",
    "write_model",
]


def read_model(path: str) -> onnx.ModelProto:
    """Reads a model, with its external data.

    Args:
        path: A file, or ``-`` for standard input.

    Raises:
        ModelError: If it is no model.
        OSError: If it cannot be read.
    """
    light, data = convert.load_light(sys.stdin.buffer.read() if path == "-" else path)
    return attached(light, data)


def write_model(model: onnx.ModelProto, path: str) -> None:
    """Writes a model.

    Args:
        model: The model.
        path: A file, which is replaced as a whole, or ``-`` for standard output.
    """
    if path == "-":
        print_bytes(serialize(model))
    else:
        save_model(model, path)


def describe_stream(path: str) -> str:
    """Returns what messages call a path."""
    return "standard output" if path == "-" else path


def print_json(found: Any) -> None:
    """Prints what was found as JSON, which has no numbers that are not finite: null for them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print(json.dumps(plain(found), indent=2))


def print_bytes(content: bytes) -> None:
    """Writes bytes to standard output."""
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:  # Python has none where the shell closed it
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "-")
    try:
        stream.write(content)
        stream.flush()
    except OSError as error:
        leave_standard_output()
        raise OrtopsError(str(error)) from error  # who reads has no whole file


def leave_standard_output() -> None:
    """Lets go to nowhere what is left to write, or Python would try again as it ends."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
