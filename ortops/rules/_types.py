"""Types that the rules share."""

from __future__ import annotations

from typing import Any, TypeAlias

from ortops.tensor import Tensor

__all__ = ["Cotangents"]

Cotangents: TypeAlias = Tensor | tuple[Tensor | None, ...] | Any | None
"""What a rule returns: a cotangent for each input, None where none flows; one alone stands for
itself. ``Any`` is there because that is what ``op`` returns."""
