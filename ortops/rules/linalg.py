"""Rules of matrix products."""

from __future__ import annotations

from typing import cast

from ortops.autodiff import vjp
from ortops.rules._types import Cotangents
from ortops.tensor import Tensor, op, reshape_like, unbroadcast


def _rows(x: Tensor) -> Tensor:
    """Returns a tensor as a matrix whose rows are its vectors along the last axis."""
    return x if x.ndim == 2 else cast(Tensor, op.Flatten(x, axis=-1))


def _swap(x: Tensor) -> Tensor:
    """Transposes the matrices on the last two axes."""
    axes = range(x.ndim)
    return cast(Tensor, op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]]))


@vjp("MatMul")
def matmul(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    if b.ndim == 1:  # a row of a times the vector b: scalars, which scale vectors
        if a.ndim == 1:
            return g * b, g * a
        return op.Unsqueeze(g, [-1]) * b, op.MatMul(op.Reshape(g, [-1]), _rows(a))
    if b.ndim == 2:
        if a.ndim == 1:
            return op.MatMul(b, g), op.Unsqueeze(a, [1]) * op.Unsqueeze(g, [0])
        rows = _rows(g)
        da = op.Gemm(rows, b, transB=1)
        return reshape_like(da, a), op.Gemm(_rows(a), rows, transA=1)
    if a.ndim == 1:
        da = op.MatMul(b, op.Unsqueeze(g, [-1]))
        db = op.Unsqueeze(a, [1]) * op.Unsqueeze(g, [-2])
        return unbroadcast(op.Squeeze(da, [-1]), a), db
    return unbroadcast(op.MatMul(g, _swap(b)), a), unbroadcast(op.MatMul(_swap(a), g), b)


@vjp("Gemm")
def gemm(
    g: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Cotangents:
    if transA:
        da = op.Gemm(b, g, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(g, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(g, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, g, alpha=alpha, transA=1 - transA)
    if c is None:
        return da, db
    dc = unbroadcast(g, c)
    return da, db, dc if beta == 1 else dc * beta
