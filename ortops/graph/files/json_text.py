"""Reads JSON from untrusted files."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from ortops.graph.limits import LIMITS

__all__ = ["read_json"]

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # also an unterminated one
_OTHERS = re.compile(r"[^][{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str | bytes) -> Any:
    """Parses JSON.

    Args:
        text: The text.

    Raises:
        ValueError: If it is invalid, or nested more deeply than
            ``ortops.graph.limits.LIMITS.nested_metadata``; recursive functions like ``repr`` fail
            on deeper values.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    brackets = _OTHERS.sub("", _STRING.sub("", text))
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > LIMITS.nested_metadata:
        raise ValueError(
            f"nested {depth:,} levels deep, the limit is {LIMITS.nested_metadata} "
            "(ortops.graph.limits.LIMITS.nested_metadata)"
        )
    return json.loads(text)
