"""Rules of operators that read or write elements by index."""

from __future__ import annotations

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._copies import add_at, pad_zeros, positions, runnable, scatter_add
from ortops.graph.autodiff.rules._precision import equal
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.shapes import reshape_like, size_of
from ortops.graph.tensor import Tensor, op, shape_of, zeros_like


@vjp("Gather")
def gather(g: Tensor, y: Tensor, x: Tensor, indices: Tensor, *, axis: int = 0) -> Cotangents:
    index = indices.constant
    if index is not None and index.size == 1 and index.ndim <= 1:
        return _pad_to(
            op.Unsqueeze(g, [axis]) if index.ndim == 0 else g, int(index.item()), x, axis
        )
    if x.shape is None or axis not in (0, -x.ndim):
        return add_at(op.Gather(positions(x), indices, axis=axis), g, x)
    rows = indices.astype("int64")
    if x.ndim > 1:  # the flat indices in a row follow from its number
        width = size_of(x, range(1, x.ndim))
        columns = op.Range(g.tape.constant(0), width, 1)
        rows = op.Add(op.Mul(op.Reshape(rows, [-1, 1]), width), columns)
    return add_at(rows, g, x)


def _pad_to(g: Tensor, index: int, x: Tensor, axis: int) -> Tensor:
    """Pads a slice of size 1 with zeros to the size of the axis that it was gathered from."""
    size = size_of(x, [axis])
    if isinstance(size, int) and size:
        index %= size
    before = index if index >= 0 else size + index
    after = size - 1 - index if index >= 0 else -1 - index
    return pad_zeros(g, [before, after], [axis])


@vjp("GatherElements")
def gather_elements(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, *, axis: int = 0
) -> Cotangents:
    return scatter_add(zeros_like(x), indices, g, axis)


@vjp("GatherND")
def gather_nd(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, *, batch_dims: int = 0
) -> Cotangents:
    return add_at(op.GatherND(positions(x), indices, batch_dims=batch_dims), g, x)


@vjp("Compress")
def compress(
    g: Tensor, y: Tensor, x: Tensor, condition: Tensor, *, axis: int | None = None
) -> Cotangents:
    return add_at(op.Compress(positions(x), condition, axis=axis), g, x)


@vjp("ScatterElements", limits="reduction mul: second order only if no factor is 0")
def scatter_elements(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    reduction: str = "none",
) -> Cotangents:
    if reduction not in ("none", "add"):
        return _reduced(g, y, x, updates, indices, axis, reduction)
    picked = op.GatherElements(g, indices, axis=axis)
    if reduction == "none":
        g = op.ScatterElements(g, indices, zeros_like(updates), axis=axis)
    return g, None, picked


@vjp("ScatterND", limits="reduction mul: second order only if no factor is 0")
def scatter_nd(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none"
) -> Cotangents:

    def flat(values: Tensor) -> Tensor:
        return op.Reshape(values, [-1])

    if reduction not in ("none", "add"):
        places = op.GatherND(positions(x), indices)
        dx, _, du = _reduced(flat(g), flat(y), flat(x), flat(updates), flat(places), 0, reduction)
        return reshape_like(dx, x), None, reshape_like(du, updates)
    picked = op.GatherND(g, indices)
    if reduction == "none":
        g = op.ScatterND(g, indices, zeros_like(updates))
    return g, None, picked


def _reduced(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    updates: Tensor,
    indices: Tensor,
    axis: int,
    reduction: str,
) -> tuple[Tensor, None, Tensor]:
    """Returns the cotangents of ScatterElements with reduction mul, min or max."""

    def pick(values: Tensor) -> Tensor:
        return op.GatherElements(values, indices, axis=axis)

    if reduction == "mul":
        # The cotangent of a factor is the product of all others. Zeros are replaced with 1, so that
        # the product can be divided by the factor, and are counted, because another zero makes the
        # cotangent 0.
        zero_x, zero_u = (op.Equal(v, 0).astype(v.dtype) for v in (x, updates))
        x, updates = x + zero_x, updates + zero_u
        product = op.ScatterElements(x, indices, updates, axis=axis, reduction="mul")
        zeros = scatter_add(zero_x, indices, zero_u, axis)
        dx = op.Where(op.Equal(zeros, zero_x), g * product / x, 0)
        du = op.Where(op.Equal(pick(zeros), zero_u), pick(g * product) / updates, 0)
        return dx, None, du
    # All elements that are equal to the extremum share its cotangent evenly.
    is_x = equal(x, y).astype(g.dtype)
    is_u = equal(updates, pick(y)).astype(g.dtype)
    share = g / scatter_add(is_x, indices, is_u, axis)
    return share * is_x, None, pick(share) * is_u


@vjp("TensorScatter")
def tensor_scatter(
    g: Tensor,
    y: Tensor,
    past: Tensor,
    update: Tensor,
    write_indices: Tensor | None = None,
    *,
    axis: int = -2,
    mode: str = "linear",
) -> Cotangents:
    def write(into: Tensor, values: Tensor) -> Tensor:
        return op.TensorScatter(into, values, write_indices, axis=axis, mode=mode)

    source = write(op.ConstantOfShape(shape_of(past), value=np.array([-1])), positions(update))
    is_new = op.GreaterOrEqual(source, 0)
    du = add_at(op.Max(source, 0), op.Where(is_new, runnable(g), 0), update)
    return write(g, zeros_like(update)), du.astype(update.dtype)


@vjp("Unique", needs=(1,))
def unique(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor | None, ...],
    x: Tensor,
    *,
    axis: int | None = None,
    sorted: int = 1,  # noqa: A002  ONNX's name
) -> Cotangents:
    if g[0] is None:
        return None
    # Of equal elements, the first one is the output.
    places = positions(x)
    if axis is None:
        return add_at(op.Gather(op.Reshape(places, [-1]), y[1]), g[0], x)
    return add_at(op.Gather(places, y[1], axis=axis), g[0], x)
