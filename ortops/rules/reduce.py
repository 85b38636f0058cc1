"""Rules of reductions."""

from __future__ import annotations

from ortops.autodiff import vjp
from ortops.tensor import Tensor, expand_like, op


def _kept(g: Tensor, x: Tensor, axes: Tensor | None, keepdims: int, noop: int) -> Tensor:
    """Returns a reduced tensor with the reduced axes as axes of size 1."""
    if keepdims or (noop and axes is None):
        return g
    if axes is None:
        return op.Reshape(g, [1] * x.ndim) if x.shape is not None else g
    return op.Unsqueeze(g, axes)


@vjp("ReduceSum")
def reduce_sum(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    axes: Tensor | None = None,
    *,
    keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Tensor:
    return expand_like(_kept(g, x, axes, keepdims, noop_with_empty_axes), x)
