"""Rules of reductions and cumulative operators, and TopK."""

from __future__ import annotations

import numpy as np

from ortops.autodiff.registry import Cotangents
from ortops.autodiff.rules._compare import equal
from ortops.autodiff.rules.table import vjp
from ortops.graph.shapes import expand_like, size_of
from ortops.graph.tensor import Tensor, op, shape_of, zeros_like


def _keep(reduced: Tensor, axes: Tensor | None, keepdims: int) -> Tensor:
    """Gives a reduced tensor its reduced axes back, with size 1, so that it broadcasts.

    Without axes nothing is to be done: either nothing was reduced or all of it, to a scalar.
    """
    if keepdims or axes is None or (axes.constant is not None and axes.constant.size == 0):
        return reduced
    return op.Unsqueeze(reduced, axes)


def _is_noop(axes: Tensor | None, noop_with_empty_axes: int) -> bool:
    """Whether a reduction is known to reduce nothing."""
    if not noop_with_empty_axes:
        return False
    return axes is None or (axes.constant is not None and axes.constant.size == 0)


def _inverse_count(g: Tensor, y: Tensor, x: Tensor, axes: Tensor | None) -> float | Tensor:
    """Returns one divided by the number of elements of x for each of y.

    At run time it is computed in 32 bits at least, because float16 ends at 65504.
    """
    dtype = np.promote_types(g.dtype, np.float32) if g.dtype.kind == "f" else np.dtype(np.float32)
    given = None if axes is None else axes.constant
    if axes is not None and given is None:
        return (op.Size(y).astype(dtype) / op.Size(x).astype(dtype)).astype(g.dtype)
    if given is not None and given.size:
        count = size_of(x, given.reshape(-1).tolist())
    elif x.shape is not None:
        count = size_of(x, range(x.ndim))
    else:
        count = op.Size(x)
    if isinstance(count, int):
        return 1 / max(count, 1)
    return op.Reciprocal(count.astype(dtype)).astype(g.dtype)


@vjp("ReduceSum")
def reduce_sum(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    return expand_like(_keep(g, axes, keepdims), x)


@vjp("ReduceMean")
def reduce_mean(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    if _is_noop(axes, noop_with_empty_axes):
        return g
    return expand_like(_keep(g * _inverse_count(g, y, x, axes), axes, keepdims), x)


@vjp("ReduceMax", "ReduceMin")
def reduce_extremum(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    if _is_noop(axes, noop_with_empty_axes):
        return g
    chosen = equal(x, _keep(y, axes, keepdims)).astype(g.dtype)
    ties = op.ReduceSum(chosen, axes, noop_with_empty_axes=noop_with_empty_axes)
    return chosen * (_keep(g, axes, keepdims) / ties)  # ties share evenly


@vjp("ReduceProd", limits="needs n times the memory for an axis of size n")
def reduce_prod(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    if _is_noop(axes, noop_with_empty_axes):
        return g
    total = _keep(g, axes, keepdims)
    partial = x
    # One axis after the other: the cost is the sum, not the product, of the axes' sizes.
    for axis, applies in _reduced_axes(x, axes, noop_with_empty_axes):
        total = total * _product_of_others(partial, axis, applies)
        product = op.ReduceProd(partial, [axis])
        partial = product if applies is None else op.Where(applies, product, partial)
    return expand_like(total, x)


def _reduced_axes(
    x: Tensor, axes: Tensor | None, noop_with_empty_axes: int
) -> list[tuple[int, Tensor | None]]:
    """Lists the axes that a reduction may reduce, and whether it does (None: it does)."""
    given = None if axes is None else axes.constant
    if axes is None or given is not None:
        chosen = range(x.ndim) if given is None or given.size == 0 else given.reshape(-1) % x.ndim
        return [(int(axis), None) for axis in chosen]
    if x.ndim == 0:
        return []
    named = op.Equal(op.Unsqueeze(op.Mod(axes, x.ndim), [1]), list(range(x.ndim)))
    reduced = op.ReduceSum(named.astype(np.int64), [0], keepdims=0) > 0
    if not noop_with_empty_axes:
        reduced = op.Or(reduced, op.Equal(op.Size(axes), 0))
    return [(axis, op.Gather(reduced, axis)) for axis in range(x.ndim)]


def _product_of_others(x: Tensor, axis: int, applies: Tensor | None = None) -> Tensor:
    """Returns, at each place along an axis, the product of the elements at all other places.

    y / x would fail at zeros, and mending that would make the second derivative wrong there.

    Args:
        x: The factors.
        axis: The axis along which they are multiplied.
        applies: Whether they are; where not, the result is 1 with size 1 on the axis.
    """
    size = size_of(x, [axis])
    here: object = size if applies is None else op.Where(applies, size, 1)
    rows, columns = (
        x.tape.constant(np.arange(n)) if isinstance(n, int) else op.Range(0, n, 1)
        for n in (here, size)
    )
    trailing = list(range(1, x.ndim - axis))
    itself = op.Equal(
        op.Unsqueeze(rows, [*trailing, x.ndim - axis]), op.Unsqueeze(columns, trailing)
    )
    others = op.Where(itself, 1, op.Unsqueeze(x, [axis]))
    product = op.ReduceProd(others, [axis + 1], keepdims=0)
    if applies is not None:
        return op.Where(applies, product, 1)
    return product.with_shape_of(x)


@vjp("ReduceL1")
def reduce_l1(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    return op.Sign(x) * _keep(g, axes, keepdims)


@vjp("ReduceL2")
def reduce_l2(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    nonzero = op.Where(op.Equal(y, 0), 1, y)  # the subgradient of the norm at 0 is 0
    return x * _keep(g / nonzero, axes, keepdims)


@vjp("ReduceSumSquare")
def reduce_sum_square(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    return x * _keep(2 * g, axes, keepdims)


@vjp("ReduceLogSum")
def reduce_log_sum(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    return expand_like(_keep(g * op.Exp(-y), axes, keepdims), x)


@vjp("ReduceLogSumExp")
def reduce_log_sum_exp(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Cotangents:
    return op.Exp(x - _keep(y, axes, keepdims)) * _keep(g, axes, keepdims)


@vjp("CumSum")
def cumsum(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0
) -> Cotangents:
    return op.CumSum(g, axis, exclusive=exclusive, reverse=1 - reverse)


@vjp("CumProd", limits="needs n times the memory for an axis of size n")
def cumprod(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0
) -> Cotangents:
    # ∂y_j / ∂x_i is the cumulative product at j with x_i replaced by 1: i lies on ``rows``, j on
    # ``columns``. As for ReduceProd, this stays right, in every order, where an x is zero.
    rank = x.ndim if x.shape is not None else op.Size(op.Shape(x))
    rows = op.Mod(op.Reshape(axis, [-1]).astype(np.int64), rank)
    columns = rows + 1
    places = op.CumSum(op.ConstantOfShape(shape_of(x), value=np.ones(1, np.int64)), rows)
    i, j = op.Unsqueeze(places, columns), op.Unsqueeze(places, rows)
    factors = op.Where(op.Equal(i, j), 1, op.Unsqueeze(x, rows))
    derivative = op.CumProd(factors, columns, exclusive=exclusive, reverse=reverse)
    compare = (
        (op.Less if exclusive else op.LessOrEqual)
        if reverse
        else (op.Greater if exclusive else op.GreaterOrEqual)
    )
    later = op.Where(compare(j, i), op.Unsqueeze(g, rows), 0)
    return op.ReduceSum(later * derivative, columns, keepdims=0)


@vjp("TopK", needs=(1,))
def top_k(
    g: tuple[Tensor, None],
    y: tuple[Tensor, Tensor],
    x: Tensor,
    k: Tensor,
    *,
    axis: int = -1,
    largest: int = 1,
    sorted: int = 1,  # noqa: A002
) -> Cotangents:
    return op.ScatterElements(zeros_like(x), y[1], g[0], axis=axis)
