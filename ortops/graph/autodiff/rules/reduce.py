"""Rules of reductions, cumulative operators and TopK."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._precision import equal, wide_dtype
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.shapes import expand_like, index_range, size_of
from ortops.graph.tensor import Tensor, op, shape_of, zeros_like


@dataclass(frozen=True)
class _Reduction:
    """The axes and attributes of a reduction.

    Attributes:
        axes: The axes; all axes, or none, if absent or empty.
        keepdims: Whether the reduced axes are kept, with size 1.
        noop_with_empty_axes: Whether a reduction without axes reduces nothing.
    """

    axes: Tensor | None
    keepdims: int
    noop_with_empty_axes: int

    @property
    def has_no_axes(self) -> bool:
        """Whether the axes are known to be absent or empty."""
        return self.axes is None or (self.axes.constant is not None and not self.axes.constant.size)

    @property
    def is_noop(self) -> bool:
        """Whether the reduction is known to reduce nothing."""
        return bool(self.noop_with_empty_axes) and self.has_no_axes

    def keep(self, reduced: Tensor) -> Tensor:
        """Restores the reduced axes, with size 1, so that the tensor broadcasts to the input."""
        # Without axes, the tensor has the shape of the input, or is a scalar.
        return reduced if self.keepdims or self.has_no_axes else op.Unsqueeze(reduced, self.axes)


_Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor, _Reduction], Tensor]


def _reduction(*op_types: str, limits: str = "") -> Callable[[_Rule], _Rule]:
    """Registers the rule of a reduction; its last argument is the `_Reduction`."""

    def register(function: _Rule) -> _Rule:
        def rule(
            g: Tensor,
            y: Tensor,
            x: Tensor,
            axes: Tensor | None = None,
            *,
            keepdims: int = 1,
            noop_with_empty_axes: int = 0,
        ) -> Cotangents:
            return function(g, y, x, _Reduction(axes, keepdims, noop_with_empty_axes))

        vjp(*op_types, limits=limits)(rule)
        return function

    return register


def _inverse_count(g: Tensor, y: Tensor, x: Tensor, axes: Tensor | None) -> float | Tensor:
    """Returns one divided by the number of elements of x for each of y.

    At run time it is computed in at least 32 bits, because float16 ends at 65504.
    """
    dtype = wide_dtype(g)
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


@_reduction("ReduceSum")
def reduce_sum(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    return expand_like(over.keep(g), x)


@_reduction("ReduceMean")
def reduce_mean(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    if over.is_noop:
        return g
    return expand_like(over.keep(g * _inverse_count(g, y, x, over.axes)), x)


@_reduction("ReduceMax", "ReduceMin")
def reduce_extremum(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    if over.is_noop:
        return g
    chosen = equal(x, over.keep(y)).astype(g.dtype)
    ties = op.ReduceSum(chosen, over.axes, noop_with_empty_axes=over.noop_with_empty_axes)
    return chosen * (over.keep(g) / ties)  # ties share evenly


@_reduction("ReduceProd", limits="needs n times the memory for an axis of size n")
def reduce_prod(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    if over.is_noop:
        return g
    total = over.keep(g)
    partial = x
    # One axis after the other, so that the cost is the sum, not the product, of the axes' sizes.
    for axis, applies in _reduced_axes(x, over):
        total = total * _product_of_others(partial, axis, applies)
        product = op.ReduceProd(partial, [axis])
        partial = product if applies is None else op.Where(applies, product, partial)
    return expand_like(total, x)


def _reduced_axes(x: Tensor, over: _Reduction) -> list[tuple[int, Tensor | None]]:
    """Lists the axes that may be reduced, each with the condition that it is (None: always)."""
    axes = over.axes
    if over.has_no_axes:
        return [(axis, None) for axis in range(x.ndim)]
    assert axes is not None
    if axes.constant is not None:
        return [(int(axis), None) for axis in axes.constant.reshape(-1) % x.ndim]
    if x.ndim == 0:
        return []
    named = op.Equal(op.Unsqueeze(op.Mod(axes, x.ndim), [1]), list(range(x.ndim)))
    reduced = op.ReduceSum(named.astype(np.int64), [0], keepdims=0) > 0
    if not over.noop_with_empty_axes:
        reduced = op.Or(reduced, op.Equal(op.Size(axes), 0))
    return [(axis, op.Gather(reduced, axis)) for axis in range(x.ndim)]


def _product_of_others(x: Tensor, axis: int, applies: Tensor | None = None) -> Tensor:
    """Returns, for each index along an axis, the product of the elements at all other indices.

    y / x would fail if an x is zero, and special cases would make the second derivative wrong.

    Args:
        x: The factors.
        axis: The axis along which to multiply.
        applies: A condition; if it is false, the result is 1, with size 1 along the axis.
    """
    size = size_of(x, [axis])
    here: int | Tensor = size if applies is None else op.Where(applies, size, 1)
    rows, columns = index_range(here, x), index_range(size, x)
    trailing = list(range(1, x.ndim - axis))
    itself = op.Equal(
        op.Unsqueeze(rows, [*trailing, x.ndim - axis]), op.Unsqueeze(columns, trailing)
    )
    others = op.Where(itself, 1, op.Unsqueeze(x, [axis]))
    product = op.ReduceProd(others, [axis + 1], keepdims=0)
    if applies is not None:
        return op.Where(applies, product, 1)
    return product.with_shape_of(x)


@_reduction("ReduceL1")
def reduce_l1(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    return op.Sign(x) * over.keep(g)


@_reduction("ReduceL2")
def reduce_l2(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    nonzero = op.Where(op.Equal(y, 0), 1, y)  # the subgradient of the norm at 0 is 0
    return x * over.keep(g / nonzero)


@_reduction("ReduceSumSquare")
def reduce_sum_square(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    return x * over.keep(2 * g)


@_reduction("ReduceLogSum")
def reduce_log_sum(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    return expand_like(over.keep(g * op.Exp(-y)), x)


@_reduction("ReduceLogSumExp")
def reduce_log_sum_exp(g: Tensor, y: Tensor, x: Tensor, over: _Reduction) -> Tensor:
    return op.Exp(x - over.keep(y)) * over.keep(g)


@vjp("CumSum")
def cumsum(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0
) -> Cotangents:
    return op.CumSum(g, axis, exclusive=exclusive, reverse=1 - reverse)


@vjp("CumProd", limits="needs n times the memory for an axis of size n")
def cumprod(
    g: Tensor, y: Tensor, x: Tensor, axis: Tensor, *, exclusive: int = 0, reverse: int = 0
) -> Cotangents:
    # ∂y_j / ∂x_i is the cumulative product at j with x_i replaced by 1; ``rows`` is the axis of i,
    # and ``columns`` that of j. As for ReduceProd, all orders are correct if an x is zero.
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
