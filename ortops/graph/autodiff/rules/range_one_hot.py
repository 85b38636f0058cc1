"""Rules of operators that build a tensor from a few numbers."""

from __future__ import annotations

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.edit import is_float
from ortops.graph.tensor import Tensor, op


@vjp("Range")
def arange(
    g: Tensor, y: Tensor, start: Tensor, limit: Tensor, delta: Tensor, *, stash_type: int = 1
) -> Cotangents:
    # y = start + delta · steps
    steps = op.Range(0, op.Squeeze(op.Shape(y), [0]), 1).astype(g.dtype)
    return op.ReduceSum(g, keepdims=0), None, op.ReduceSum(g * steps, keepdims=0)


@vjp("OneHot")
def one_hot(
    g: Tensor, y: Tensor, indices: Tensor, depth: Tensor, values: Tensor, *, axis: int = -1
) -> Cotangents:
    if not is_float(values.value):
        return None, None, None
    hot = op.OneHot(indices, depth, np.array([0, 1], g.dtype), axis=axis)
    on = op.ReduceSum(g * hot, keepdims=0)
    off = op.ReduceSum(g, keepdims=0) - on
    return None, None, op.Concat(op.Unsqueeze(off, [0]), op.Unsqueeze(on, [0]), axis=0)
