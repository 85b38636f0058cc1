"""Comparing values that rules choose by."""

from __future__ import annotations

import numpy as np

from ortops.graph.tensor import Tensor, numpy_dtype, op

__all__ = ["equal"]


def equal(x: Tensor, y: Tensor) -> Tensor:
    """Tells where a value of an operator's input became its output.

    Narrow floating-point types are compared in float32. onnxruntime's CPU has no kernel for them,
    casts by itself, and in doing so takes the number that ``x`` was rounded from, which is not
    equal to any output.

    Args:
        x: An input.
        y: The output, or values of it.
    """
    dtype = numpy_dtype(x.value)
    if dtype is not None and dtype.name in ("float16", "bfloat16"):
        x, y = x.astype(np.float32), y.astype(np.float32)
    return op.Equal(x, y)
