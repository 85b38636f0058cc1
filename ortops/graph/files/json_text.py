"""Reads JSON from untrusted files."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortops.errors import ModelError
from ortops.graph.files.opening import read_regular
from ortops.graph.limits import LIMITS

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # also an unterminated one
_OTHERS = re.compile(r"[^][{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parses JSON.

    Args:
        text: The text; bytes are UTF-8.
        unique: Whether an object must not have a name twice, of which readers take either.

    Raises:
        ValueError: If it is invalid, or nested more deeply than
            ``ortops.graph.limits.LIMITS.nested_metadata``; recursive functions like ``repr`` fail
            on deeper values.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    brackets = _OTHERS.sub("", _STRING.sub("", text))
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > LIMITS.nested_metadata:
        raise ValueError(
            f"nested {depth:,} levels deep, the limit is {LIMITS.nested_metadata} "
            "(ortops.graph.limits.LIMITS.nested_metadata)"
        )
    return json.loads(text, object_pairs_hook=_unique if unique else None)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.80} twice")
    return found


def read_settings(file: Path, remedy: str = "correct it") -> dict[str, Any]:
    """Returns the JSON object in a file of settings.

    Args:
        file: The file.
        remedy: The remedy that messages suggest.

    Raises:
        ModelError: If it is not a regular file, not a JSON object, or exceeds
            ``ortops.graph.limits.LIMITS``.
        OSError: If it cannot be read.
    """
    content = read_regular(file, most=LIMITS.metadata_bytes, remedy=remedy)
    try:
        found = read_json(content, unique=True)
        json.dumps(found, ensure_ascii=False).encode()  # which fails for half of a character
    except ValueError as error:
        raise ModelError(f"file '{file}': invalid JSON: {error}; {remedy}") from error
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ModelError(f"file '{file}': it must be a JSON object, got {kind}; {remedy}")
    return found
