"""Reading JSON that files hold, of which nothing is known yet."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from ortops.graph.limits import LIMITS

__all__ = ["read_json"]

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # one that never ends, too
_OTHERS = re.compile(r"[^][{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def read_json(text: str | bytes) -> Any:
    """Returns what a JSON text stands for.

    Args:
        text: The text.

    Raises:
        ValueError: If it is not JSON, or nested more deeply than
            ``ortops.graph.limits.LIMITS.nested_metadata``, because a recursive function, such as
            ``repr``, fails at such a value.
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
