"""The rule of Det.

The derivative of a determinant is the matrix of its cofactors, the signed determinants of the
minors. It also exists for singular matrices, unlike det(A) · A⁻ᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.recurrent import scan
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.shapes import index_range, reshape_like, size_of
from ortops.graph.tensor import Tensor, ones_like, op

_MANY = 16  # rows; for larger matrices, the n² minors of n² elements are too expensive


@vjp("Det", limits="above 16×16, or of unknown size: only nonsingular matrices")
def det(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    size = size_of(x, [-1])
    g = op.Unsqueeze(g, [-2, -1])
    if isinstance(size, int) and size > _MANY:
        n_rows = op.Reshape(x, [-1, size, size])
        inverse = reshape_like(_inverse(n_rows, size), x)
        return g * op.Unsqueeze(y, [-2, -1]) * inverse.mT
    return g * _cofactors(x, size)


def _cofactors(x: Tensor, size: int | Tensor) -> Tensor:
    if isinstance(size, int):
        if size == 1:
            return ones_like(x)
        places = np.arange(size)
        others = places[:-1] + (places[:-1] >= places[:, None])
        kept = x.tape.constant(others)
        signs = x.tape.constant((-1.0) ** (places + places[:, None])).astype(x.dtype)
    else:
        index, short = index_range(size, x), index_range(op.Sub(size, 1), x)
        column = op.Unsqueeze(index, [1])
        kept = op.Add(short, op.Cast(op.GreaterOrEqual(short, column), to=ir.DataType.INT64))
        odd = op.Mod(op.Add(index, column), 2)
        signs = 1 - 2 * odd.astype(x.dtype)
    rank = x.ndim
    rows = op.Gather(x, kept, axis=rank - 2)  # …, row left out, row, column
    minors = op.Gather(rows, kept, axis=rank)  # …, row left out, row, column left out, column
    axes = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    minors = op.Transpose(minors, perm=axes)
    return op.Det(minors) * signs


def _inverse(x: Tensor, size: int) -> Tensor:
    """Inverts a stack of matrices by Gauss-Jordan elimination with partial pivoting."""
    constant = x.tape.constant

    def eliminate(state: Tensor, step: Tensor) -> Sequence[Tensor]:
        index = state.tape.constant(np.arange(size))
        column = op.Squeeze(op.Gather(state, op.Unsqueeze(step, [0]), axis=2), [2])
        sizes = op.Where(op.Less(index, step), op.CastLike(-1.0, column), abs(column))
        pivot = op.ArgMax(sizes, axis=1)  # (matrix, 1)
        is_step = op.Equal(index, step)
        order = op.Where(op.Equal(index, pivot), step, op.Where(is_step, pivot, index))
        rows = op.Expand(op.Unsqueeze(order, [2]), op.Shape(state))
        swapped = op.GatherElements(state, rows, axis=1)
        row = op.Gather(swapped, op.Unsqueeze(step, [0]), axis=1)  # (matrix, 1, column)
        row = row / op.Gather(row, op.Unsqueeze(step, [0]), axis=2)
        factors = op.Gather(swapped, op.Unsqueeze(step, [0]), axis=2)
        reduced = swapped - factors * row
        return [op.Where(op.Unsqueeze(is_step, [1]), row, reduced).with_shape_of(state)]

    identity = op.Expand(
        constant(np.eye(size, dtype=x.dtype)), op.Concat(op.Shape(x, end=1), [1, 1], axis=0)
    )
    start = op.Concat(x, identity, axis=2).with_shape([None, size, 2 * size])
    (inverse,) = scan(eliminate, [start], [constant(np.arange(size))], backwards=False)
    return inverse[:, :, size:]
