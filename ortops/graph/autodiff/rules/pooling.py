"""Rules of the pooling operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack, cast

import numpy as np

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._copies import scatter_add
from ortops.graph.autodiff.rules.convolution import (
    Placement,
    Windows,
    input_gradient,
    mirrored_pads,
    static_sizes,
    windows,
)
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.edit import describe
from ortops.graph.shapes import expand_like, index_range, reshape_like, size_of
from ortops.graph.tensor import Tensor, op, zeros_like

_LARGE_KERNEL = 256
"""The area of a kernel above which products replace transposed convolutions of unknown sizes."""


def _with_channels_in_batch(x: Tensor, rank: int) -> Tensor:
    """Returns (N, C, …) as (N · C, 1, …)."""
    sizes = static_sizes(x, rank)
    if None in sizes:
        spatial = op.Shape(x, start=2)
        return op.Reshape(x, op.Concat([-1, 1], spatial, axis=0))
    if x.shape is not None and isinstance(x.shape[0], int) and isinstance(x.shape[1], int):
        return op.Reshape(x, [x.shape[0] * x.shape[1], 1, *sizes])
    return op.Reshape(x, [-1, 1, *sizes])


def _spread(g: Tensor, x: Tensor, at: Windows) -> Tensor:
    """Returns, for each element of x, the sum of g over the windows that contain it."""
    at = _clamped(g, x, at)
    if _cover(g, x, at):
        return expand_like(g, x)
    kernel, sizes = cast(tuple[int, ...], at.kernel), static_sizes(x, at.rank)
    if set(at.strides) == set(at.dilations) == {1} and at.pads is not None:
        pads = mirrored_pads(at)
        if min(pads) >= 0:
            mean = op.AveragePool(g, kernel_shape=kernel, pads=pads, count_include_pad=1)
            return (mean * math.prod(kernel)).with_shape_of(x)
    if None in (*sizes, *static_sizes(g, at.rank)) and math.prod(kernel) > _LARGE_KERNEL:
        return _spread_by_products(g, x, at)
    channels = _with_channels_in_batch(g, at.rank)
    like = _with_channels_in_batch(x, at.rank)
    ones = np.ones((1, 1, *kernel), g.dtype)
    result = input_gradient(channels, x.tape.constant(ones), like, at, 1)
    return reshape_like(result, x)


def _spread_by_products(g: Tensor, x: Tensor, at: Windows) -> Tensor:
    """Returns the same, without work that grows with the area of the kernel.

    The window is a product of one interval for each axis, so the sum over windows is a product with
    one matrix for each axis: which windows contain which elements.
    """
    first = 2  # the first spatial axis
    rotated = [*range(first), first + at.rank - 1, *range(first, first + at.rank - 1)]
    result = g
    for axis in reversed(range(at.rank)):
        elements = index_range(size_of(x, [first + axis]), x)
        starts = index_range(size_of(g, [first + axis]), g) * at.strides[axis] - at.begin[axis]
        offsets = elements - op.Unsqueeze(starts, [1])  # in the windows, (windows, elements)
        dilation, most = at.dilations[axis], cast(int, at.kernel[axis])
        inside = op.And(offsets >= 0, offsets <= (most - 1) * dilation)
        if dilation > 1:
            inside = op.And(inside, op.Equal(op.Mod(offsets, dilation), 0))
        result = op.MatMul(result, inside.astype(g.dtype))
        if at.rank > 1:
            result = op.Transpose(result, perm=rotated)
    return result.with_shape_of(x)


def _clamped(g: Tensor, x: Tensor, at: Windows) -> Windows:
    """Returns windows that contain the same elements of x, without those that lie beyond its end.

    The kernel of exported models may be much larger than x, and the work grows with its area.
    """
    if at.pads is None or isinstance(at.begin, Tensor) or isinstance(at.end, Tensor):
        return at
    kernel, strides, end = list(at.kernel), list(at.strides), list(at.end)
    sizes = zip(static_sizes(x, at.rank), static_sizes(g, at.rank), strict=True)
    for axis, (length, count) in enumerate(sizes):
        most, dilation, begin = kernel[axis], at.dilations[axis], at.begin[axis]
        if length is None or count is None or most is None or begin < 0 or length < 1:
            continue
        reached = -(-(length + begin) // dilation)  # elements of the first window up to the end
        stride = 1 if count == 1 else strides[axis]
        beyond = (count - 1) * stride + (reached - 1) * dilation + 1 - begin - length
        if reached < most and beyond >= 0:
            kernel[axis], strides[axis], end[axis] = reached, stride, beyond
    return replace(at, kernel=tuple(kernel), strides=tuple(strides), end=tuple(end))


def _cover(g: Tensor, x: Tensor, at: Windows) -> bool:
    """Whether there is one window, which contains all of x."""
    if at.pads is None or isinstance(at.begin, Tensor):
        return False
    sizes = zip(static_sizes(x, at.rank), static_sizes(g, at.rank), strict=True)
    return set(at.dilations) == {1} and all(
        count == 1 and length is not None and begin >= 0 and cast(int, size) - begin >= length
        for (length, count), begin, size in zip(sizes, at.begin, at.kernel, strict=True)
    )


def _counts(g: Tensor, x: Tensor, at: Windows, include_pad: bool) -> Tensor:
    """Returns the number of elements in each window, in a shape that broadcasts to g.

    Padding counts if ``include_pad`` is true. With ceil_mode, a window may extend beyond the
    padding; elements there never count.
    """
    result: Tensor | None = None
    lengths, outputs = static_sizes(x, at.rank), static_sizes(g, at.rank)
    for axis, (length, count) in enumerate(zip(lengths, outputs, strict=True)):
        offsets = np.arange(cast(int, at.kernel[axis]), dtype=np.int64) * at.dilations[axis]
        shape = [-1, *(1,) * (at.rank - 1 - axis)]
        if length is not None and count is not None and not isinstance(at.begin, Tensor):
            assert not isinstance(at.end, Tensor)
            low, high = (at.begin[axis], at.end[axis]) if include_pad else (0, 0)
            seen = np.arange(count)[:, None] * at.strides[axis] - at.begin[axis] + offsets
            inside = (seen >= -low) & (seen < length + high)
            number = x.tape.constant(inside.sum(axis=1).astype(g.dtype).reshape(shape))
        else:
            begin, end = at.begin[axis], at.end[axis]
            first = op.Range(0, size_of(g, [2 + axis]), 1) * at.strides[axis] - begin
            seen_at = op.Unsqueeze(first, [1]) + offsets
            size = size_of(x, [2 + axis])
            low_at, high_at = (-begin, size + end) if include_pad else (0, size)
            inside_at = op.And(seen_at >= low_at, seen_at < high_at)
            number = op.ReduceSum(inside_at.astype(g.dtype), [1], keepdims=0)
            number = op.Reshape(number, shape)
        result = number if result is None else result * number
    assert result is not None
    return result


def _averaged(g: Tensor, x: Tensor, at: Windows, ceil_mode: int, include_pad: int) -> Tensor:
    """Returns g divided by the number of elements of each window."""
    is_whole = not ceil_mode and at.may_fit(static_sizes(x, at.rank))
    if is_whole and (include_pad or not at.is_padded):
        return g / math.prod(cast(tuple[int, ...], at.kernel))
    counts = _counts(g, x, at, bool(include_pad))
    if _may_miss(x, at):  # infinity would become NaN in a product with 0
        counts = op.Max(counts, np.array(1, g.dtype))
    return g / counts


def _refuse_dilated_same(y: Tensor, placement: Placement) -> None:
    """Rejects a combination of attributes for which onnxruntime differs from the standard."""
    auto_pad, dilations = placement.get("auto_pad", "NOTSET"), placement.get("dilations", ())
    if auto_pad.startswith("SAME") and set(dilations) - {1}:
        node = y.value.producer()
        raise UnsupportedError(
            f"{describe(node) if node else 'pooling'}: no gradient for auto_pad {auto_pad} with "
            f"dilations {list(dilations)}, for which the padding of onnxruntime differs from the "
            "standard; use explicit pads"
        )


@vjp("AveragePool", limits="no auto_pad SAME with dilations")
def average_pool(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    **placement: Unpack[Placement],
) -> Cotangents:
    _refuse_dilated_same(y, placement)
    at = windows(x, kernel_shape, **placement)
    return _spread(_averaged(g, x, at, ceil_mode, count_include_pad), x, at)


@vjp("GlobalAveragePool")
def global_average_pool(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    size = size_of(x, range(2, x.ndim))
    return expand_like(g / (size.astype(g.dtype) if isinstance(size, Tensor) else size), x)


@vjp("GlobalMaxPool")
def global_max_pool(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    # In case of ties, the first element is the maximum, as in MaxPool.
    rows = [0, 0, size_of(x, range(2, x.ndim))]
    flat = op.Reshape(x, rows)
    indices = op.ArgMax(flat, axis=2)
    dx = op.ScatterElements(zeros_like(flat), indices, op.Reshape(g, [0, 0, 1]), axis=2)
    return reshape_like(dx, x)


def _norm_scale(g: Tensor, y: Tensor, p: int) -> Tensor:
    """Returns g / yᵖ⁻¹; if y = 0, all elements and the subgradient are 0."""
    if p == 1:
        return g
    safe: Tensor = op.Where(op.Equal(y, 0), np.array(1, y.dtype), y)
    return g / (safe if p == 2 else safe ** (p - 1))


def _norm_direction(x: Tensor, p: int) -> Tensor:
    """Returns |x|ᵖ⁻¹ · sign(x)."""
    if p == 1:
        return op.Sign(x)
    if p == 2:
        return x
    return x * (abs(x) if p == 3 else abs(x) ** (p - 2))


@vjp("LpPool", limits="no auto_pad SAME with dilations")
def lp_pool(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    p: int = 2,
    **placement: Unpack[Placement],
) -> Cotangents:
    _refuse_dilated_same(y, placement)
    at = windows(x, kernel_shape, **placement)
    return _spread(_norm_scale(g, y, p), x, at) * _norm_direction(x, p)


@vjp("GlobalLpPool")
def global_lp_pool(g: Tensor, y: Tensor, x: Tensor, *, p: int = 2) -> Cotangents:
    return _norm_scale(g, y, p) * _norm_direction(x, p)


@vjp("MaxPool", needs=(1,))
def max_pool(
    g: tuple[Tensor, Tensor | None],
    y: tuple[Tensor, Tensor],
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    storage_order: int = 0,
    **placement: Unpack[Placement],
) -> Cotangents:
    # In case of ties, the first element of a window is its maximum, as in PyTorch.
    indices = y[1]
    if storage_order:  # the indices count along columns, so count along rows instead
        _, indices = op.MaxPool(
            x, outputs=2, kernel_shape=kernel_shape, ceil_mode=ceil_mode, **placement
        )
    at = windows(x, kernel_shape, **placement)
    if _may_miss(x, at):  # then onnxruntime returns an index in another channel
        counts = _counts(g[0], x, at, include_pad=False)
        return _scattered(op.Where(counts > 0, g[0], np.array(0, g[0].dtype)), indices, x)
    if tiles(x, at) and g[0].dtype == np.float32:  # MaxUnpool has no kernel for other types
        dx = op.MaxUnpool(g[0], indices, kernel_shape=kernel_shape, strides=at.strides)
        return dx.with_shape_of(x)
    return _scattered(g[0], indices, x)


def _may_miss(x: Tensor, at: Windows) -> bool:
    """Whether a window may contain no element, because the input is shorter than its dilation."""
    return at.is_padded and any(
        dilation > 1 and (size is None or size < dilation)
        for size, dilation in zip(static_sizes(x, at.rank), at.dilations, strict=True)
    )


def tiles(x: Tensor, at: Windows) -> bool:
    """Whether the windows are known to cover x without gaps or overlaps."""
    return at.are_adjacent and all(
        size is not None and size % step == 0
        for size, step in zip(static_sizes(x, at.rank), at.strides, strict=True)
    )


def _scattered(g: Tensor, indices: Tensor, x: Tensor) -> Tensor:
    """Adds up g at flat indices of zeros like x."""
    zeros, places, flat = (op.Reshape(each, [-1]) for each in (zeros_like(x), indices, g))
    return reshape_like(scatter_add(zeros, places, flat), x)


@vjp("MaxUnpool")
def max_unpool(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    indices: Tensor,
    output_shape: Tensor | None = None,
    *,
    kernel_shape: Sequence[int],
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Cotangents:
    # The indices count the elements of y; in onnxruntime, even if output_shape is given.
    taken = op.GatherElements(op.Reshape(g, [-1]), op.Reshape(indices, [-1]))
    return reshape_like(taken, x)
