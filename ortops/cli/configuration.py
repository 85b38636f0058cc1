"""Reads and writes the options of `ortops train` and `ortops tune` as TOML files."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tomllib
from collections.abc import Mapping
from typing import Any

from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.opening import read_regular
from ortops.llm.options import remedy_on_command_line

_NOT_KEPT = (
    *("command", "run", "given", "config", "write_config", "debug", "resume", "force", "show"),
)
_PLACES = {"train": ("model",), "tune": ("folder", "data")}  # arguments without a name


def read_options(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fills in options missing from the command line from the file given as ``--config``.

    Args:
        options: The options of the command; changed in place.
        parser: The parser that checks the options of the file.

    Raises:
        OrtopsError: If the file is not valid TOML, or has an unknown option or an invalid value.
        OSError: If it cannot be read.
    """
    path = options.config
    try:
        content = read_regular(path, error=OrtopsError, what="--config", remedy="give a TOML file")
        found = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OrtopsError(f"--config '{path}': {error}; give a TOML file") from error
    except ValueError as error:  # Python converts at most 4300 digits
        raise OrtopsError(f"--config '{path}': a number in it has too many digits") from error
    except RecursionError as error:
        raise OrtopsError(f"--config '{path}': its values are nested too deeply") from error
    known = [name.replace("_", "-") for name in vars(options) if name not in _NOT_KEPT]
    for key in found:
        if key not in known:
            of_others = remedy_on_command_line(key) if options.command == "tune" else None
            hint = of_others or did_you_mean(key, known)
            raise OrtopsError(f"--config '{path}': there is no option '{key}'; {hint}")
    places = {name: found.pop(name, None) for name in _PLACES[options.command]}
    for name, place in places.items():
        if not isinstance(place, str | None):
            raise OrtopsError(f"--config '{path}': '{name}' must be a string, a path")
    arguments = [word for key, value in found.items() for word in _arguments(key, value, path)]
    arguments += ["--", *("-" if place is None else place for place in places.values())]
    usage = io.StringIO()
    try:
        with contextlib.redirect_stderr(usage):
            read = parser.parse_args([options.command, *arguments])
    except SystemExit as error:
        why = usage.getvalue().strip().rpartition(" error: ")[2]
        raise OrtopsError(
            f"--config '{path}': {why}; see ortops {options.command} --help"
        ) from error
    for key, value in found.items():
        if isinstance(value, list) and not isinstance(getattr(read, key.replace("-", "_")), list):
            raise OrtopsError(f"--config '{path}': '{key}' must be a single value, not an array")
    for name, value in (vars(read) | places).items():  # None for a place that is not in the file
        if getattr(options, name) is None:
            setattr(options, name, value)


def _arguments(key: str, value: Any, path: str) -> list[str]:
    """Returns an option as it would be written on the command line."""
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no-{key}"]
    values = value if isinstance(value, list) else [value]
    if not values:
        raise OrtopsError(f"--config '{path}': '{key}' must not be an empty array")
    if not all(type(one) in (str, int, float) for one in values):
        raise OrtopsError(
            f"--config '{path}': '{key}' must be a number, a string, a boolean, or an array of "
            "numbers or strings"
        )
    if any(isinstance(one, int) and not -(2**63) <= one < 2**63 for one in values):
        raise OrtopsError(f"--config '{path}': '{key}' must fit in 64 bits")
    return [f"--{key}={one}" for one in values]


def write_options(options: argparse.Namespace, path: str) -> None:
    """Writes the given options to a TOML file that `--config` can read."""
    given = {
        name.replace("_", "-"): value
        for name, value in vars(options).items()
        if name not in _NOT_KEPT and value is not None
    }
    for name, value in given.items():
        try:
            dumps({name: value}).encode()
        except UnicodeEncodeError as error:
            raise OrtopsError(
                f"--write-config '{path}': TOML must be UTF-8, and '{name}' is {value!r:.200}; "
                "rename the file"
            ) from error
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
    # JSON and TOML strings are the same except for this character and surrogate escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
