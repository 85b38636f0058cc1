"""Options of `ortops train` in a TOML file."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files import write_atomically

__all__ = ["dumps", "read_options", "write_options"]

_NOT_KEPT = ("command", "run", "given", "config", "write_config", "debug", "resume")


def read_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fills options that were not given from the file that ``--config`` names.

    Args:
        options: The options of ``train``; changed in place.
        parser: Reads what the file says as if it had been given.

    Raises:
        OrtopsError: If the file is no TOML, or has an option that there is not, or a value that it
            does not take.
        OSError: If it cannot be read.
    """
    path = options.config
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OrtopsError(f"--config '{path}': {error}; give a TOML file") from error
    known = [name.replace("_", "-") for name in vars(options) if name not in _NOT_KEPT]
    for key in found:
        if key not in known:
            raise OrtopsError(
                f"--config '{path}': there is no option '{key}'; {did_you_mean(key, known)}"
            )
    model = found.pop("model", None)
    arguments = [word for key, value in found.items() for word in _arguments(key, value, path)]
    arguments += [] if model is None else ["--", str(model)]
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            read = parser.parse_args(["train", *arguments])
    except SystemExit as error:
        why = told.getvalue().strip().rpartition(" error: ")[2]
        raise OrtopsError(f"--config '{path}': {why}; see ortops train --help") from error
    for name, value in vars(read).items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _arguments(key: str, value: Any, path: str) -> list[str]:
    """Returns what would be given on a command line."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    if isinstance(value, str | int | float):
        return [f"--{key}={value}"]
    if isinstance(value, list) and all(type(one) in (str, int, float) for one in value):
        return [f"--{key}={one}" for one in value]
    raise OrtopsError(
        f"--config '{path}': '{key}' is {value!r}; a number, a string, a boolean or an array of "
        "numbers or strings is accepted"
    )


def write_options(options: argparse.Namespace, path: str) -> None:
    """Writes the options that were given to a TOML file, from which `--config` reads them."""
    given = {
        name.replace("_", "-"): value
        for name, value in vars(options).items()
        if name not in _NOT_KEPT and value is not None
    }
    write_atomically(path, dumps(given).encode())


def dumps(options: Mapping[str, Any]) -> str:
    """Returns options as TOML.

    Example:
        >>> print(dumps({"epochs": 3, "trainable": ["head.*"], "quiet": True}), end="")
        epochs = 3
        trainable = ["head.*"]
        quiet = true
    """
    return "".join(f"{name} = {_dumped(value)}\n" for name, value in options.items())


def _dumped(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_dumped, value))}]"
    if isinstance(value, float):
        return repr(value)  # TOML has inf and nan
    # JSON's other values are TOML's, but for a character and pairs of escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
