"""Numbers that users give."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

__all__ = ["real"]


def real(value: Any) -> float:
    """Returns a real number as a float, infinity if it is too large, and NaN for anything else.

    Args:
        value: What was given; truth values, texts and arrays are no numbers here.

    Example:
        >>> real(2), real(-(10**400)), real("2"), real(True)
        (2.0, -inf, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    given: Any = value  # a Real that mypy does not let be compared
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf
