"""Computation and comparison with enough precision."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortops.graph.constants import numpy_dtype
from ortops.graph.tensor import Tensor, op


def wide_dtype(*tensors: Tensor | None) -> np.dtype[Any]:
    """Returns the type to compute in: that of the widest tensor, but at least float32."""
    sizes = [tensor.dtype.itemsize for tensor in tensors if tensor is not None]
    return np.dtype(np.float64 if max(sizes) == 8 else np.float32)


def equal(x: Tensor, y: Tensor) -> Tensor:
    """Returns where an element of an operator's input was selected as its output.

    Types narrower than float32 are compared in float32. onnxruntime's CPU provider has no kernels
    for them and inserts casts, and then compares the value of x before it was rounded, which is not
    equal to any output.

    Args:
        x: An input.
        y: The output, or values of it.
    """
    dtype = numpy_dtype(x.value)
    if dtype is not None and dtype.name in ("float16", "bfloat16"):
        x, y = x.astype(np.float32), y.astype(np.float32)
    return op.Equal(x, y)
