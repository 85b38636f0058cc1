"""Rules of operators that sample images at interpolated positions.

A sample is a weighted sum of a few elements around its coordinates, the taps. It is linear in the
image. The derivatives of the weights with respect to the coordinates are called slopes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._copies import add_at
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.shapes import index_range, reshape_like, size_of
from ortops.graph.tensor import Tensor, op

Size: TypeAlias = int | Tensor
"""A length: an int, or an int64 scalar if it is known only at run time."""

_A = -0.75
_CUBIC = np.array(
    [[0, 1, 0, 0], [_A, 0, -_A, 0], [-2 * _A, -_A - 3, 2 * _A + 3, _A], [_A, _A + 2, -_A - 2, -_A]]
)
"""The weights of four neighbours as polynomials in the fraction; row n: coefficients of power n."""


@dataclass(frozen=True)
class _Axis:
    """The taps of samples along one axis, in the last dimension.

    Attributes:
        index: The int64 indices of the taps, clipped to the axis.
        weight: Their weights.
        slope: The derivatives of the weights with respect to the coordinate; None for zeros.
    """

    index: Tensor
    weight: Tensor
    slope: Tensor | None


def _wide(x: Tensor) -> Tensor:
    """Converts x to at least float32; narrower types cannot represent the indices of an image."""
    return x.astype(wide_dtype(x))


def _number(size: Size, like: Tensor) -> Any:
    return float(size) if isinstance(size, int) else size.astype(like.dtype)


def _last(x: Tensor) -> Tensor:
    """Appends an axis of size 1."""
    return op.Unsqueeze(x, [-1])


def _taps_along(
    coordinate: Tensor, length: Size, mode: str, padding: str, align_corners: int
) -> _Axis:
    """Returns the taps of samples along an axis.

    Args:
        coordinate: The coordinates of the samples, in elements.
        length: The length of the axis.
        mode: The interpolation: nearest, linear or cubic.
        padding: The attribute padding_mode of GridSample.
        align_corners: The attribute of GridSample.
    """
    dtype = coordinate.dtype
    slope: Tensor | None
    if mode == "nearest":
        index = _last(op.Round(coordinate).astype(np.int64))
        weight, slope = coordinate.tape.constant(np.ones(1, dtype)), None
    else:
        low = op.Floor(coordinate)
        fraction = _last(coordinate - low)
        if mode == "cubic":
            powers = [coordinate.tape.constant(row.astype(dtype)) for row in _CUBIC]
            index = _last(low.astype(np.int64)) + np.arange(-1, 3)
            weight = ((powers[3] * fraction + powers[2]) * fraction + powers[1]) * fraction
            weight = weight + powers[0]
            slope = (powers[3] * 3 * fraction + powers[2] * 2) * fraction + powers[1]
        else:
            sign = coordinate.tape.constant(np.array([-1, 1], dtype))
            index = _last(low.astype(np.int64)) + np.arange(2)
            weight, slope = sign * fraction + np.array([1, 0], dtype), sign
            if padding == "border":  # on the border itself the slope is 0, as in PyTorch
                slope = slope * _last(coordinate > 0).astype(dtype)
    if padding == "reflection":
        if align_corners:  # reflect at the centres of the outer elements
            period = 2 * length - 2
            period = max(period, 1) if isinstance(period, int) else op.Max(period, 1)
            mirrored = period
        else:  # reflect at their outer edges
            period = 2 * length
            mirrored = period - 1
        index = op.Mod(index, period)
        index = op.Min(index, mirrored - index)
    elif padding == "zeros":
        inside = op.And(index >= 0, index < length).astype(dtype)
        weight = weight * inside
        slope = None if slope is None else slope * inside
    index = op.Max(op.Min(index, length - 1), 0)
    return _Axis(index, weight, slope)


def _spread(axes: Sequence[Tensor]) -> list[Tensor]:
    """Shapes the taps along D axes to broadcast to a grid of taps in the last D dimensions."""
    count = len(axes)
    return [
        op.Unsqueeze(taps, [k - count for k in range(count) if k != axis]) if count > 1 else taps
        for axis, taps in enumerate(axes)
    ]


def _product(factors: Sequence[Any]) -> Any:
    return functools.reduce(operator.mul, factors)


@dataclass(frozen=True)
class _Samples:
    """Samples of images.

    Attributes:
        x: The images, (N, C, …) with D spatial axes.
        lengths: Their spatial sizes.
        axes: The taps along each spatial axis, (N, …samples…, taps).
    """

    x: Tensor
    lengths: list[Size]
    axes: list[_Axis]

    @property
    def _tap_axes(self) -> list[int]:
        # Not negative, because onnxruntime does not reduce an empty tensor along negative axes.
        first = self.axes[0].index.ndim - 1
        return list(range(first, first + len(self.axes)))

    @functools.cached_property
    def weights(self) -> list[Tensor]:
        """The weights along each axis, with D dimensions for the taps."""
        return _spread([axis.weight for axis in self.axes])

    @functools.cached_property
    def index(self) -> Tensor:
        """The flat index of each tap in an image, (N, …samples…, taps × D)."""
        steps = [
            functools.reduce(operator.mul, self.lengths[axis + 1 :], 1)
            for axis in range(len(self.lengths))
        ]
        parts = _spread([axis.index for axis in self.axes])
        parts = [
            part if isinstance(step, int) and step == 1 else part * step
            for part, step in zip(parts, steps, strict=True)
        ]
        return functools.reduce(operator.add, parts)

    @functools.cached_property
    def values(self) -> Tensor:
        """The elements at the taps, (N, …samples…, taps × D, C)."""
        # Channels last, so that the channels of a tap are contiguous in memory.
        rows = op.Transpose(self.x, perm=[0, *range(2, self.x.ndim), 1])
        area = _product(self.lengths)
        flat = op.Reshape(rows, [size_of(self.x, [0]), area, size_of(self.x, [1])])
        return op.GatherND(flat, _last(self.index), batch_dims=1)

    def sampled(self) -> Tensor:
        """Returns the samples with the channels last, (N, …samples…, C)."""
        weight = _last(_product(self.weights)).astype(self.x.dtype)
        return op.ReduceSum(self.values * weight, self._tap_axes, keepdims=0)

    def image_gradient(self, g: Tensor) -> Tensor:
        """Returns the cotangent of the images from that of the samples, (N, C, …samples…)."""
        count = len(self.axes)
        area = _product(self.lengths)
        images = [size_of(self.x, [0]), size_of(self.x, [1])]
        numbers = index_range(images[0] * images[1], g)
        starts = op.Reshape(numbers, [*images, *(1,) * (g.ndim - 2 + count)])
        weight = op.Unsqueeze(_product(self.weights), [1])
        spread = op.Unsqueeze(g, [g.ndim + k for k in range(count)]).astype(weight.dtype)
        places = starts * area + op.Unsqueeze(self.index, [1])
        return add_at(places, (spread * weight).astype(self.x.dtype), self.x)

    def coordinate_gradients(self, g: Tensor) -> list[Tensor]:
        """Returns the cotangents of the coordinates, (N, …samples…), for each spatial axis."""
        count = len(self.axes)
        rows = op.Transpose(g, perm=[0, *range(2, g.ndim), 1])
        rows = op.Unsqueeze(rows, [-2 - k for k in range(count)])
        channels = [self._tap_axes[-1] + 1]
        seen = op.ReduceSum(rows * self.values, channels, keepdims=0).astype(self.weights[0].dtype)
        slopes = _spread([cast(Tensor, axis.slope) for axis in self.axes])
        result = []
        for axis, slope in enumerate(slopes):
            others = [weight for k, weight in enumerate(self.weights) if k != axis]
            terms = _product([seen, slope, *others])
            result.append(op.ReduceSum(terms, self._tap_axes, keepdims=0))
        return result


@vjp("GridSample")
def grid_sample(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    grid: Tensor,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Cotangents:
    rank = x.ndim - 2
    lengths = [size_of(x, [2 + axis]) for axis in range(rank)]
    wide, kind = _wide(grid), mode.removeprefix("bi")
    axes, scales = [], []
    for axis, length in enumerate(lengths):
        along = op.Gather(wide, np.array(rank - 1 - axis), axis=-1)
        size = _number(length, wide)
        if align_corners:
            coordinate, scale = (along + 1) / 2 * (size - 1), (size - 1) / 2
        else:
            coordinate, scale = ((along + 1) * size - 1) / 2, size / 2
        axes.append(_taps_along(coordinate, length, kind, padding_mode, align_corners))
        scales.append(scale)
    samples = _Samples(x, lengths, axes)
    dx = samples.image_gradient(g)
    if mode == "nearest":
        return dx, None
    pairs = zip(samples.coordinate_gradients(g), scales, strict=True)
    parts = [_last(part * scale) for part, scale in pairs]
    return dx, op.Concat(*reversed(parts), axis=-1).astype(grid.dtype)


@vjp("AffineGrid")
def affine_grid(
    g: Tensor, y: Tensor, theta: Tensor, size: Tensor, *, align_corners: int = 0
) -> Cotangents:
    # The grid is θ times the homogeneous coordinates, which are the grid of the identity.
    size_length = None if size.shape is None else size.shape[0]
    rank = size_length - 2 if isinstance(size_length, int) else y.ndim - 2
    one = op.Concat(np.ones(1, np.int64), size[1:], axis=0)
    identity = np.eye(rank, rank + 1, dtype=g.dtype)[None]
    base = op.AffineGrid(identity, one, align_corners=align_corners)
    points = functools.reduce(operator.mul, (size_of(g, [1 + axis]) for axis in range(rank)))
    flat = op.Reshape(g, [size_of(g, [0]), points, rank])
    linear = op.MatMul(flat.mT, op.Reshape(base, [points, rank]))
    return op.Concat(linear, _last(op.ReduceSum(flat, [1], keepdims=0)), axis=-1), None


@vjp("Col2Im")
def col2im(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    image_shape: Tensor,
    block_shape: Tensor,
    *,
    dilations: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Cotangents:
    # Each element of a column was added to one element of the image, and gets its cotangent.
    known = [v.shape[0] for v in (image_shape, block_shape) if v.shape is not None]
    rank = next((size for size in known if isinstance(size, int)), None) or y.ndim - 2
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    padding = list(pads or (0,) * 2 * rank)
    if any(padding):
        g = op.Pad(g, [0, 0, *padding[:rank], 0, 0, *padding[rank:]])
    lengths = [size_of(g, [2 + axis]) for axis in range(rank)]
    places = _column_places(lengths, block_shape, steps, spread)
    images = [size_of(g, [0]), size_of(g, [1])]
    flat = op.Reshape(g, [*images, _product(lengths)])
    return reshape_like(op.Gather(flat, places, axis=2), x)


def _column_places(
    lengths: Sequence[Size], blocks: Tensor, steps: Sequence[int], spread: Sequence[int]
) -> Tensor:
    """Returns the flat index in the image of each element of each block, (elements, blocks)."""
    tape, sizes = blocks.tape, blocks.constant
    static = [length for length in lengths if isinstance(length, int)]
    if sizes is not None and len(static) == len(lengths):
        extents = (sizes - 1) * spread + 1
        numbers = np.arange(math.prod(static)).reshape(static)
        seen = np.lib.stride_tricks.sliding_window_view(numbers, extents)
        chosen = seen[tuple(slice(None, None, step) for step in (*steps, *spread))]
        rank = len(lengths)
        order = [*range(rank, 2 * rank), *range(rank)]
        return tape.constant(chosen.transpose(order).reshape(math.prod(sizes.tolist()), -1))
    places: Tensor | None = None
    for axis, length in enumerate(lengths):
        block = blocks[axis]
        count = (length - ((block - 1) * spread[axis] + 1)) // steps[axis] + 1
        along = op.Unsqueeze(index_range(block, blocks) * spread[axis], [1])
        along = along + index_range(count, blocks) * steps[axis]
        if places is None:
            places = along
        else:  # (elements, blocks) of the axes so far and of this one
            both = op.Unsqueeze(places * length, [1, 3]) + op.Unsqueeze(along, [0, 2])
            pairs = op.ReduceProd(op.Reshape(op.Shape(both), [2, 2]), [1], keepdims=0)
            places = op.Reshape(both, pairs)
    assert places is not None
    return places


def _kernel_elements(sizes: Sequence[Size], like: Tensor) -> list[Any]:
    """Returns, for each axis, the indices of all elements of a kernel, (elements, 1 …)."""
    shape = [-1, *(1,) * len(sizes)]
    if all(isinstance(size, int) for size in sizes):
        return [index.reshape(shape) for index in np.indices(cast(Sequence[int], sizes))]
    numbers = op.Reshape(index_range(_product(sizes), like), shape)
    steps = (functools.reduce(operator.mul, sizes[axis:], 1) for axis in range(1, len(sizes) + 1))
    return [op.Mod(op.Div(numbers, step), size) for step, size in zip(steps, sizes, strict=True)]


@vjp("DeformConv")
def deform_conv(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    b: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    offset_group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Cotangents:
    rank = x.ndim - 2
    kernel = kernel_shape or (w.shape or (None,) * x.ndim)[2:]
    sizes = [
        size if isinstance(size, int) else size_of(w, [2 + axis])
        for axis, size in enumerate(kernel)
    ]
    count = _product(sizes)
    steps, spread = strides or (1,) * rank, dilations or (1,) * rank
    begin = list(pads or (0,) * rank)[:rank]
    batch, channels = size_of(x, [0]), size_of(x, [1])
    images = batch * offset_group
    lengths = [size_of(x, [2 + axis]) for axis in range(rank)]
    outputs = [size_of(g, [2 + axis]) for axis in range(rank)]
    points = _product(outputs)
    # The channels of each offset group are treated as an image, sampled at the coordinates
    # (kernel elements, outputs).
    offsets = op.Reshape(_wide(offset), [images, count, rank, *outputs])
    taps = _kernel_elements(sizes, g)
    axes = []
    for axis, length in enumerate(lengths):
        first = index_range(outputs[axis], g) * steps[axis]
        first = op.Reshape(first, [1, outputs[axis], *(1,) * (rank - 1 - axis)])
        shift = taps[axis] * spread[axis] - begin[axis]
        moved = op.Gather(offsets, np.array(axis), axis=2)
        coordinate = moved + (first + shift).astype(offsets.dtype)
        axes.append(_taps_along(coordinate, length, "linear", "zeros", 0))
    split = [images, channels // offset_group]
    samples = _Samples(op.Reshape(x, [*split, *lengths]), lengths, axes)
    seen = op.Transpose(samples.sampled(), perm=[0, rank + 2, *range(1, rank + 2)])
    masks = None if mask is None else op.Reshape(mask, [images, 1, count, *outputs])
    columns = seen if masks is None else seen * masks

    # The convolution and its gradients are products with the columns.
    inputs, filters = size_of(w, [1]), size_of(w, [0])
    rows = inputs * count
    per_group = filters // group
    weights = op.Reshape(w, [group, per_group, rows])
    by_group = op.Reshape(g, [batch, group, per_group, points])
    dcolumns = op.MatMul(weights.mT, by_group)
    dcolumns = op.Reshape(dcolumns, [*split, count, *outputs])
    flat = op.Reshape(columns, [batch, group, rows, points])
    dw = op.ReduceSum(op.MatMul(by_group, flat.mT), [0], keepdims=0)
    db = None if b is None else op.ReduceSum(g, [0, *range(2, 2 + rank)], keepdims=0)
    dmask = None
    if masks is not None and mask is not None:
        dmask = reshape_like(op.ReduceSum(dcolumns * seen, [1], keepdims=0), mask)
        dcolumns = dcolumns * masks
    parts = [op.Unsqueeze(part, [2]) for part in samples.coordinate_gradients(dcolumns)]
    doffset = reshape_like(op.Concat(*parts, axis=2), offset).astype(offset.dtype)
    dx = reshape_like(samples.image_gradient(dcolumns), x)
    return dx, reshape_like(dw, w), doffset, db, dmask


@dataclass(frozen=True)
class _RoiAxis:
    """The samples of regions along one axis: (R regions, P bins, G samples in a bin).

    Attributes:
        position: Their coordinates, clipped to the image.
        inside: 1 for samples that were in the image or up to 1 outside, 0 for others.
        exists: Whether a region has each of the G samples; None for all.
        count: The number of samples in a bin of a region, at least 1; broadcasts to all.
        by_start: The derivative of the position with respect to the region's start.
        by_end: The derivative of the position with respect to the region's end.
        length: The length of the image.
    """

    position: Tensor
    inside: Tensor
    exists: Tensor | None
    count: float | Tensor
    by_start: Tensor
    by_end: Tensor
    length: Size

    def distances(self) -> Tensor:
        """Returns the signed distance from each sample to each element, (R, P, G, L)."""
        elements = index_range(self.length, self.position).astype(self.position.dtype)
        return elements - _last(self.position)

    def weights(self) -> Tensor:
        """Returns the weights of the elements of the image in the mean of each bin, (R, P, L)."""
        near = op.Relu(1 - abs(self.distances())) * _last(self.inside / self.count)
        return op.ReduceSum(near, [2], keepdims=0)

    def end_gradients(self, dweights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cotangents of the regions' starts and ends, (R,), from the weights'."""
        ahead = self.distances()
        near = (abs(ahead) < 1).astype(ahead.dtype) * op.Sign(ahead)
        moved = op.ReduceSum(near * op.Unsqueeze(dweights, [2]), [3], keepdims=0)
        moved = moved * (self.inside / self.count)
        by_ends = (self.by_start, self.by_end)
        start, end = (op.ReduceSum(moved * by, [1, 2], keepdims=0) for by in by_ends)
        return start, end

    def taps(self) -> _Axis:
        """Returns the two elements around each sample."""
        low = op.Floor(self.position)
        sign = low.tape.constant(np.array([-1, 1], low.dtype))
        weight = sign * _last(self.position - low) + np.array([1, 0], low.dtype)
        inside = _last(self.inside)
        index = op.Min(_last(low.astype(np.int64)) + np.arange(2), self.length - 1)
        return _Axis(index, weight * inside, sign * inside)


def _roi_axis(
    rois: Tensor,
    columns: tuple[int, int],
    bins: int,
    samples: int,
    scale: float,
    half_pixel: bool,
    length: Size,
) -> _RoiAxis:
    start, end = (
        op.Unsqueeze(op.Gather(rois, [column], axis=1), [2]) * scale - 0.5 * half_pixel
        for column in columns
    )
    extent = end - start
    scaled: float | Tensor = 1.0
    if not half_pixel:  # regions are at least 1 long
        scaled = (extent > 1).astype(rois.dtype)
        extent = op.Max(extent, 1.0)
    exists: Tensor | None = None
    count: float | Tensor = float(samples)
    part = rois.tape.constant(((np.arange(samples) + 0.5) / max(samples, 1)).astype(rois.dtype))
    if not samples:  # by default, as many samples as the bin has elements
        needed = op.Ceil(extent / float(bins))
        most = _largest(needed).astype(np.int64)
        number = index_range(most, rois).astype(rois.dtype)
        exists = number < needed
        count = op.Max(needed, 1.0)
        part = (number + 0.5) / count
    fraction = (part + np.arange(bins, dtype=rois.dtype)[:, None]) / float(bins)
    position = start + fraction * extent
    last = _number(length, rois) - 1
    inside = op.And(position >= -1.0, position <= last + 1)
    if exists is not None:
        inside = op.And(inside, exists)
    free = op.And(position > 0.0, position < last).astype(rois.dtype)
    by_end = fraction * scaled
    clipped = op.Max(op.Min(position, last), 0.0)
    inside = inside.astype(rois.dtype)
    by_ends = (1 - by_end) * free, by_end * free
    return _RoiAxis(clipped, inside, exists, count, *by_ends, length)


def _largest(counts: Tensor) -> Tensor:
    """Returns the maximum as a scalar, but at least 1."""
    one = np.ones(1, counts.dtype)  # the maximum exists even if there are no regions
    return op.ReduceMax(op.Concat(op.Reshape(counts, [-1]), one, axis=0), keepdims=0)


def _flat_taps(per_axis: Sequence[Tensor], combine: Any) -> Tensor:
    """Combines values of taps along y and x, (R, P, …), to values of shape (R, PH, PW, taps)."""
    y, x = per_axis
    extra = y.ndim - 2  # the number of axes of a bin's taps
    both = combine(
        op.Unsqueeze(y, [2, *(3 + 2 * k + 1 for k in range(extra))]),
        op.Unsqueeze(x, [1, *(3 + 2 * k for k in range(extra))]),
    )
    taps = op.ReduceProd(op.Shape(both, start=3), keepdims=1)
    return op.Reshape(both, op.Concat(op.Shape(both, end=3), taps, axis=0), allowzero=1)


@dataclass(frozen=True)
class _Chosen:
    """The taps with the largest value, for maxima over the bins of regions.

    Attributes:
        x: The images, (N, C, H, W).
        batch: The image of each region, (R,).
        index: The flat indices of the taps in an image, (R, PH, PW, K).
        best: The index of the largest of the K taps of a bin, (R, PH, PW, C).
        value: The element of the image at the largest tap, (R, PH, PW, C).
    """

    x: Tensor
    batch: Tensor
    index: Tensor
    best: Tensor
    value: Tensor

    def of(self, taps: Tensor) -> Tensor:
        """Returns the values of the chosen taps."""
        return op.GatherElements(taps, self.best, axis=3)

    def image_gradient(self, rows: Tensor) -> Tensor:
        """Returns the cotangent of the images from that of the values."""
        channels = size_of(self.x, [1])
        area = size_of(self.x, [2, 3])
        image = op.Unsqueeze(self.batch * channels, [1, 2, 3])
        places = (image + index_range(channels, rows)) * area + self.of(self.index)
        return add_at(places, rows, self.x)


def _choose(
    x: Tensor, batch: Tensor, index: Tensor, weight: Tensor | None, exists: Tensor | None
) -> _Chosen:
    area = size_of(x, [2, 3])
    flat = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), [size_of(x, [0]) * area, size_of(x, [1])])
    elements = op.Gather(flat, op.Unsqueeze(batch * area, [1, 2, 3]) + index, axis=0)
    values = elements if weight is None else elements * _last(weight).astype(x.dtype)
    if exists is not None:
        values = op.Where(_last(exists), values, np.array(-np.inf, x.dtype))
    best = op.ArgMax(values, axis=3, keepdims=1)
    value = op.Squeeze(op.GatherElements(elements, best, axis=3), [3])
    return _Chosen(x, batch, index, op.Squeeze(best, [3]), value)


@vjp("RoiAlign")
def roi_align(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Cotangents:
    half_pixel = coordinate_transformation_mode.lower() == "half_pixel"
    regions = _wide(rois)
    height, width = size_of(x, [2]), size_of(x, [3])
    sizes = ((1, 3), output_height, height), ((0, 2), output_width, width)
    axes = [
        _roi_axis(regions, columns, bins, sampling_ratio, spatial_scale, half_pixel, length)
        for columns, bins, length in sizes
    ]
    if mode.lower() == "max":
        dx, ends = _roi_maximum(g, x, batch_indices, axes)
    else:
        dx, ends = _roi_mean(g, x, batch_indices, axes)
    drois = op.Concat(*[_last(end) for end in ends], axis=1) * spatial_scale
    return dx, drois.astype(rois.dtype), None


def _roi_mean(
    g: Tensor, x: Tensor, batch: Tensor, axes: Sequence[_RoiAxis]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the cotangents of the images and of the regions' ends for means.

    The means of a region are the product of the image with the weights of both axes.
    """
    images, channels, (height, width) = size_of(x, [0]), size_of(x, [1]), [a.length for a in axes]
    by_row, by_column = (axis.weights().astype(x.dtype) for axis in axes)
    spread = op.MatMul(g, op.Unsqueeze(by_column, [1]))  # (R, C, PH, W)
    rows = size_of(g, [0, 2])
    # All regions at once: (N · H, R · PH) times (C, R · PH, W).
    own = op.Equal(_last(batch), index_range(images, g)).astype(x.dtype)
    own = op.Unsqueeze(own, [1, 3]) * op.Unsqueeze(by_row, [2])
    own = op.Reshape(own, [rows, images * height]).T
    by_channel = op.Reshape(op.Transpose(spread, perm=[1, 0, 2, 3]), [channels, rows, width])
    dx = op.Reshape(op.MatMul(own, by_channel), [channels, images, height, width])
    dx = op.Transpose(dx, perm=[1, 0, 2, 3])

    seen = op.Gather(x, batch, axis=0)
    drow = op.MatMul(spread, op.Transpose(seen, perm=[0, 1, 3, 2]))
    means = op.MatMul(op.Unsqueeze(by_row, [1]), seen)
    dcolumn = op.MatMul(op.Transpose(g, perm=[0, 1, 3, 2]), means)
    top, bottom = axes[0].end_gradients(_channel_sum(drow, axes[0]))
    left, right = axes[1].end_gradients(_channel_sum(dcolumn, axes[1]))
    return dx, [left, top, right, bottom]


def _channel_sum(values: Tensor, axis: _RoiAxis) -> Tensor:
    return op.ReduceSum(values, [1], keepdims=0).astype(axis.position.dtype)


def _roi_maximum(
    g: Tensor, x: Tensor, batch: Tensor, axes: Sequence[_RoiAxis]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the cotangents of the images and of the regions' ends for maxima.

    As in onnxruntime and onnx's reference implementation, the maximum is over the weighted
    elements, not over their sums.
    """
    taps = [axis.taps() for axis in axes]
    index = _flat_taps([taps[0].index * axes[1].length, taps[1].index], operator.add)
    weight = _flat_taps([taps[0].weight, taps[1].weight], operator.mul)
    present = [axis.exists for axis in axes if axis.exists is not None]
    exists = None
    if present:
        exists = _flat_taps([op.And(_last(p), np.ones(2, np.bool_)) for p in present], op.And)
    chosen = _choose(x, batch, index, weight, exists)
    rows = op.Transpose(g, perm=[0, 2, 3, 1])
    dx = chosen.image_gradient(rows * chosen.of(weight).astype(x.dtype))
    dweight = (rows * chosen.value).astype(weight.dtype)
    ends = {}
    for k, axis in enumerate(axes):
        for which, moved in enumerate((axis.by_start, axis.by_end)):
            factors = [taps[0].weight, taps[1].weight]
            factors[k] = cast(Tensor, taps[k].slope) * _last(moved)
            slope = chosen.of(_flat_taps(factors, operator.mul))
            ends[which, 1 - k] = op.ReduceSum(dweight * slope, [1, 2, 3], keepdims=0)
    return dx, [ends[key] for key in sorted(ends)]


@vjp("MaxRoiPool", limits="no gradient to rois, which are rounded")
def max_roi_pool(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    rois: Tensor,
    *,
    pooled_shape: Sequence[int],
    spatial_scale: float = 1.0,
) -> Cotangents:
    # The ends of regions are rounded, so only the image gets a cotangent. In case of ties, the
    # first element is the maximum. Bins without elements pass no cotangent on.
    regions = _wide(rois)
    indices, inside = [], []
    for axis, (start, bins) in enumerate(zip((2, 1), pooled_shape, strict=True)):
        length = size_of(x, [2 + axis])
        ends = [_round_half_away(op.Gather(regions, [k], axis=1) * spatial_scale)
                for k in (start, start + 2)]  # fmt: skip
        extent = op.Max(ends[1] - ends[0] + 1, 1.0) / float(bins)
        bin_number = np.arange(bins, dtype=regions.dtype)
        first = op.Floor(extent * bin_number) + ends[0]
        behind = op.Ceil(extent * (bin_number + 1)) + ends[0]
        first, behind = (op.Max(op.Min(x.astype(np.int64), length), 0) for x in (first, behind))
        index = _last(first) + index_range(_largest(behind - first), x)
        inside.append(index < _last(behind))
        indices.append(op.Min(index, length - 1))
    index = _flat_taps([indices[0] * size_of(x, [3]), indices[1]], operator.add)
    exists = _flat_taps(inside, op.And)
    batch = op.Squeeze(op.Gather(regions, [0], axis=1).astype(np.int64), [1])
    chosen = _choose(x, batch, index, None, exists)
    some = op.ReduceMax(exists.astype(g.dtype), [3], keepdims=1)
    return chosen.image_gradient(op.Transpose(g, perm=[0, 2, 3, 1]) * some), None


def _round_half_away(x: Tensor) -> Tensor:
    return op.Sign(x) * op.Floor(abs(x) + 0.5)
