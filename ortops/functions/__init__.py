"""A model as a differentiable function of NumPy arrays, and its bridges to other libraries."""

from __future__ import annotations

from ortops.functions.function import Function

__all__ = ["Function"]
