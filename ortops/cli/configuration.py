"""Options of `ortops train` in a TOML file."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from typing import Any

from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files import write_atomically

__all__ = ["dumps", "read_options", "write_options"]

_NOT_KEPT = ("command", "run", "config", "write_config", "debug", "resume")


def read_options(options: argparse.Namespace, parser_defaults: Mapping[str, Any]) -> None:
    """Fills options that were not given from the file that ``--config`` names.

    Args:
        options: The options; changed in place.
        parser_defaults: The values that mean that an option was not given.

    Raises:
        OrtopsError: If the file is no TOML, or has an option that there is not, or of another type.
        OSError: If it cannot be read.
    """
    path = options.config
    try:
        with open(path, "rb") as stream:  # noqa: PTH123  # `-` is no special name here
            found = tomllib.load(stream)
    except tomllib.TOMLDecodeError as error:
        raise OrtopsError(f"--config '{path}': {error}; give a TOML file") from error
    known = [name.replace("_", "-") for name in vars(options) if name not in _NOT_KEPT]
    for key, value in found.items():
        name = key.replace("-", "_")
        if key not in known:
            raise OrtopsError(
                f"--config '{path}': there is no option '{key}'; {did_you_mean(key, known)}"
            )
        default = parser_defaults.get(name)
        if getattr(options, name) == default:
            setattr(options, name, _checked(value, key, path))


def _checked(value: Any, key: str, path: str) -> Any:
    simple = (str, int, float, bool)
    if isinstance(value, simple) or (
        isinstance(value, list) and all(isinstance(one, simple) for one in value)
    ):
        return value
    raise OrtopsError(
        f"--config '{path}': '{key}' is {value!r}; a number, a string, a boolean or an array of "
        "these is accepted"
    )


def write_options(options: argparse.Namespace, path: str) -> None:
    """Writes the options that were given to a TOML file, from which `--config` reads them."""
    given = {
        name.replace("_", "-"): value
        for name, value in vars(options).items()
        if name not in _NOT_KEPT and value is not None and value is not False
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
    # JSON's strings, numbers, booleans and arrays of them are TOML's.
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())
