"""Rules of the operators on blocked tensors, which exist only while a training step is built.

They emit nodes that onnxruntime knows at once, so they are of first order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from ortops.autodiff.registry import Cotangents, Table
from ortops.autodiff.rules import convolution
from ortops.autodiff.rules.convolution import Windows
from ortops.graph.tensor import Tensor, op
from ortops.passes.blocked import kernels
from ortops.passes.blocked.kernels import affine, channel_means, convolve, reshape, sizes
from ortops.passes.finite import equal_mask, mask

__all__ = ["DOMAIN", "TABLE", "can_transpose", "enter", "leave"]

DOMAIN = "ortops.blocked"
"""The private domain of operators on blocked tensors."""

TABLE = Table()
"""Their rules."""

vjp = TABLE.vjp


def enter(x: Tensor, size: int) -> Tensor:
    """Puts (N, C, H, W) in the blocked layout, with channels of zeros where C is none of blocks."""
    n, channels, *spatial = sizes(x)
    shape = (n, -(-channels // size) * size, *spatial)
    (result,) = kernels.emit(x.tape, DOMAIN, "Block", [x], [shape], block=size)
    return result


def leave(x: Tensor, size: int, channels: int | None = None) -> Tensor:
    """Takes (N, C, H, W) out of the blocked layout, the first channels or all of them."""
    n, count, *spatial = sizes(x)
    kept = channels or count
    shape = (n, kept, *spatial)
    (result,) = kernels.emit(x.tape, DOMAIN, "Unblock", [x], [shape], block=size, channels=kept)
    return result


@vjp("Block", domain=DOMAIN)
def _block(g: Tensor, y: Tensor, x: Tensor, *, block: int) -> Cotangents:
    return leave(g, block, sizes(x)[1])


@vjp("Unblock", domain=DOMAIN)
def _unblock(g: Tensor, y: Tensor, x: Tensor, *, block: int, channels: int) -> Cotangents:
    return enter(g, block)


@vjp("Relu", domain=DOMAIN)
def _relu(g: Tensor, y: Tensor, x: Tensor, *, exact: int) -> Cotangents:
    if exact:  # g may be infinite, and a product with 0 would be NaN
        return op.Where(y > 0, g, 0)
    return g * mask(y)


@vjp("Clip", domain=DOMAIN)
def _clip(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    *,
    exact: int,
    low: float | None = None,
    high: float | None = None,
) -> Cotangents:
    return op.Where(op.Equal(x, y), g, 0) if exact else g * equal_mask(x, y)


@vjp("GlobalAveragePool", domain=DOMAIN)
def _global_average_pool(g: Tensor, y: Tensor, x: Tensor, *, block: int) -> Cotangents:
    n, channels, height, width = sizes(x)
    mean = reshape(g * (1 / (height * width)), n * channels // block, 1, block)
    return reshape(op.Expand(mean, [n * channels // block, height * width, block]), *sizes(x))


@vjp("MaxPool", domain=DOMAIN)
def _max_pool(
    g: Tensor, y: Tensor, x: Tensor, *, block: int, kernel_shape: Sequence[int], exact: int
) -> Cotangents:
    # The windows tile x. Of equal elements the first one is the maximum, as in PyTorch: each in
    # turn takes what is left of the cotangent if it is as large as the maximum.
    n, channels, *spatial = sizes(y)
    rows, columns = kernel_shape
    whole = [size * step for size, step in zip(spatial, kernel_shape, strict=True)]
    line = (n * channels // block * spatial[0], spatial[1])
    left, lines, below = g, [], -y
    for row in range(rows):
        parts = []
        for column in range(columns):
            chosen = np.zeros((channels // block, rows, columns, block), np.float32)
            chosen[:, row, column] = 1
            difference = convolve(
                x,
                x.tape.constant(chosen.reshape(channels, 1, rows, columns)),
                sizes(y),
                kernel=kernel_shape,
                strides=kernel_shape,
                add=below,
                group=channels,
            )
            is_last = (row, column) == (rows - 1, columns - 1)
            if exact:
                chosen_here = difference >= 0
                taken = op.Where(chosen_here, left, 0)
                left = left if is_last else op.Where(chosen_here, 0, left)
            else:
                taken = left * mask(difference, at_zero=1.0)
                left = left if is_last else left - taken
            parts.append(reshape(taken, *line, 1, block))
        lines.append(reshape(op.Concat(*parts, axis=2), line[0], 1, whole[1] * block))
    dx = reshape(op.Concat(*lines, axis=1), n * channels // block, *whole, block)
    missing = [size - done for size, done in zip(sizes(x)[2:], whole, strict=True)]
    if any(missing):
        dx = op.Pad(dx, [0, 0, 0, 0, 0, *missing, 0])
    return reshape(dx, *sizes(x))


@vjp("Affine", domain=DOMAIN)
def _affine(g: Tensor, y: Tensor, x: Tensor, factor: Tensor, shift: Tensor) -> Cotangents:
    d_factor = op.ReduceSum(kernels.products(g, x), [0, 2, 3], keepdims=0)
    return affine(g, factor), d_factor, _channel_sums(g)


@vjp("BatchNormalization", domain=DOMAIN)
def _batch_normalization(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    block: int,
    momentum: float,
    epsilon: float,
) -> Cotangents:
    g_y, g_mean, g_var, *_ = g
    centred, inverse_std = y[3:]
    d_scale = d_bias = d_mean = d_var = factor = None
    slope = shift = None  # d_x = factor · g + slope · centred + shift, per channel
    n, _, height, width = sizes(x)
    count = n * height * width
    if g_y is not None:
        mean_g = op.ReduceMean(channel_means(g_y), [0, 2, 3], keepdims=0)
        along = op.ReduceSum(kernels.products(g_y, centred), [0, 2, 3], keepdims=0) * inverse_std
        factor = scale * inverse_std
        d_scale, d_bias = along, mean_g * count
        slope = factor * along * inverse_std * (-1 / count)
        shift = -(factor * mean_g)
    if g_mean is not None:
        d_mean = g_mean * momentum
        shift = _sum(shift, g_mean * ((1 - momentum) / count))
    if g_var is not None:
        d_var = g_var * momentum
        slope = _sum(slope, g_var * (2 * (1 - momentum) / count))
    if shift is not None and slope is None:
        slope = shift * 0.0
    d_x = None if slope is None else affine(centred, slope, shift)
    if g_y is not None:
        d_x = affine(g_y, factor, add=d_x)
    return d_x, d_scale, d_bias, d_mean, d_var


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


@vjp("Conv", domain=DOMAIN)
def _conv(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    block: int,
    dilations: Sequence[int],
    group: int,
    pads: Sequence[int],
    strides: Sequence[int],
) -> Cotangents:
    kernel = sizes(w)[2:]
    at = Windows(kernel, tuple(strides), tuple(dilations), tuple(pads[:2]), tuple(pads[2:]))
    if group > 1:
        d_x, d_w = _depthwise_input(g, w, x, at, block), _depthwise_weights(g, x, w, at, block)
    else:
        d_x, d_w = _input(g, w, x, at, block), _weights(g, x, w, at, block)
    d_b = None
    if b is not None:
        d_b = _channel_sums(g)
    return d_x, d_w, d_b


def _channel_sums(x: Tensor) -> Tensor:
    """Returns the sums over images, height and width, (C,), of a blocked tensor."""
    n, _, height, width = sizes(x)
    mean: Tensor = op.ReduceMean(channel_means(x), [0, 2, 3], keepdims=0)
    return mean * (n * height * width)


def _input(g: Tensor, w: Tensor, x: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the input of a convolution without groups."""
    n, channels, *lengths = sizes(x)
    if channels % size:  # the first convolution, whose input is not blocked
        return convolution.input_gradient(leave(g, size), w, x, at, 1)
    begin, end = _padding(at)
    if at.strides == (1, 1):
        reach = [cast(int, extent) - 1 for extent in at.extents]
        return convolve(
            g,
            kernels.mirrored_filter_of(w, size),
            sizes(x),
            kernel=sizes(w)[2:],
            dilations=at.dilations,
            pads=[r - p for r, p in zip(reach * 2, begin + end, strict=True)],
        )
    if sizes(w)[2:] == (1, 1) and not any(begin + end):
        _, _, *counts = sizes(g)
        spread = convolve(
            g, kernels.mirrored_filter_of(w, size), (n, channels, *counts), kernel=(1, 1)
        )
        return kernels.put_apart(spread, at.strides, lengths, size)
    phases = _all_phases(w, x, g, at)
    if phases is None:
        plain = convolution.input_gradient(leave(g, size), w, leave(x, size), at, 1)
        return enter(plain, size)
    kernel = [len(each.taps[0]) for each in phases]
    counts = [-(-length // step) for length, step in zip(lengths, at.strides, strict=True)]
    down, across = at.strides
    result = convolve(
        g,
        kernels.mirrored_filter_of(w, size, [each.taps for each in phases]),
        (n, down * across * channels, *counts),
        kernel=kernel,
        pads=[each.begin for each in phases] + [each.end for each in phases],
    )
    split = reshape(result, n, down, across, channels // size, *counts, size)
    placed = op.Transpose(split, perm=[0, 3, 4, 1, 5, 2, 6])
    placed = reshape(placed, n * channels // size, counts[0] * down, counts[1] * across, size)
    return kernels.crop(placed, n, channels, lengths)


def _padding(at: Windows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cast(tuple[int, ...], at.begin), cast(tuple[int, ...], at.end)


class _Phases:
    """How elements of x that are a stride apart, one phase, depend on one axis of g.

    Element s · q + r of x is seen by window q + e − j at the weight s · j + f, where e and f are
    quotient and remainder of r + padding by s: a convolution with its own few weights for each r.
    """

    def __init__(self, kernel: int, step: int, padding: int, length: int, windows: int) -> None:
        seen = []
        for phase in range(step):
            e, f = divmod(phase + padding, step)
            seen.append({e - j: tap for j, tap in enumerate(range(f, kernel, step))})
        offsets = [offset for each in seen for offset in each]
        low, high = min(offsets), max(offsets)
        self.taps = [[each.get(u) for u in range(low, high + 1)] for each in seen]
        self.begin = -low
        self.end = -(-length // step) + high - windows

    @property
    def possible(self) -> bool:
        return self.begin >= 0 and self.end >= 0


def _all_phases(w: Tensor, x: Tensor, g: Tensor, at: Windows) -> list[_Phases] | None:
    """Returns the phases of both axes, or None where the kernels cannot take them."""
    if set(at.dilations) != {1}:
        return None
    made = [
        _Phases(*each)
        for each in zip(
            sizes(w)[2:], at.strides, _padding(at)[0], sizes(x)[2:], sizes(g)[2:], strict=True
        )
    ]
    return made if all(each.possible for each in made) else None


def can_transpose(at: Windows) -> bool:
    """Whether the padding is less than the extent of the windows, as the gradient requires."""
    return min(convolution.mirrored_pads(at)) >= 0


def _left_over(x: Tensor, at: Windows) -> list[int]:
    """Returns how many elements of the padded x the last window leaves over, along each axis."""
    begin, end = _padding(at)
    return [
        (length + b + e - cast(int, extent)) % step
        for length, b, e, extent, step in zip(
            sizes(x)[2:], begin, end, at.extents, at.strides, strict=True
        )
    ]


def _weights(g: Tensor, x: Tensor, w: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the weights of a convolution without groups.

    It is a convolution, too: the images of a batch are the channels, x the input, and g, with its
    channels as outputs, the filter. The input's own channels lie side by side, so that a row is
    W · C wide and the columns of the filter are C apart. The kernels then compute many outputs at
    once, which they do not if each channel is an image of its own.
    """
    n, m, *counts = sizes(g)
    channels, *kernel = sizes(w)[1:]
    lanes = -(-n // size) * size
    if (at.dilations[1] > 1 and kernel[1] > 1) or 3 * n < 2 * lanes:  # it would be mostly zeros
        seen = x if channels % size else leave(x, size)
        return convolution.weight_gradient(leave(g, size), seen, w, at, 1)
    (top, left), (bottom, right) = _padding(at)
    below, behind = _left_over(x, at)
    cut = min(bottom - below, 0)
    before = [left, right - behind]
    _, _, height, width = sizes(x)
    rows, row = height + cut, width + sum(before)
    if channels % size:
        x = op.Pad(x, [0, 0, 0, before[0], lanes - n, 0, cut, before[1]])
        images = kernels.to_lanes(x, lanes, size)
        if channels > 1:
            images = reshape(images, lanes // size, channels, rows * row, size)
            images = op.Transpose(images, perm=[0, 2, 1, 3])
    else:
        if min(before) >= 0 and any(before):
            x, width, before = kernels.pad_columns(x, *before), row, [0, 0]
        if channels > size:
            x = kernels.to_plain(x, channels, channels_last=True)
        x = reshape(x, n, height, width, channels)
        if lanes != n or cut or any(before):
            x = op.Pad(x, [0, 0, before[0], 0, lanes - n, cut, before[1], 0])
        images = kernels.to_lanes(x, lanes, size)
    if lanes != n:
        g = op.Pad(g, [0] * 4 + [lanes - n, 0, 0, 0])
    groups = lanes // size
    by_pixel = reshape(g, groups, size, 1, m * math.prod(counts))
    filters = kernels.to_blocks(by_pixel, size, channels_last=True)
    result = convolve(
        reshape(images, 1, lanes, rows, row * channels),
        reshape(filters, groups * m, size, *counts),
        (1, groups * m, kernel[0], kernel[1] * channels),
        kernel=counts,
        strides=(at.dilations[0], 1),
        dilations=(at.strides[0], at.strides[1] * channels),
        pads=[top, 0, max(bottom - below, 0), 0],
        group=groups,
    )
    taps = math.prod(kernel)
    by_tap = reshape(result, groups, m // size, taps, channels * size)
    if groups > 1:
        by_tap = op.ReduceSum(by_tap, [0], keepdims=0)
    if channels % size == 0:
        split = reshape(by_tap, m // size, taps, channels // size, size * size)
        filters = op.Transpose(split, perm=[0, 2, 1, 3])
        return kernels.from_filter(reshape(filters, *sizes(w)), size)
    by_output = reshape(kernels.from_lanes(by_tap, m), m, taps, channels)
    return reshape(op.Transpose(by_output, perm=[0, 2, 1]), *sizes(w))


def _depthwise_input(g: Tensor, w: Tensor, x: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the input of a convolution of each channel by itself."""
    begin, end = _padding(at)
    channels = sizes(x)[1]
    if at.strides != (1, 1):
        apart = [
            (count - 1) * step + 1 for count, step in zip(sizes(g)[2:], at.strides, strict=True)
        ]
        g = kernels.put_apart(g, at.strides, apart, size)
    extra = _left_over(x, at)
    reach = [cast(int, extent) - 1 for extent in at.extents]
    pads = [r - p for r, p in zip(reach * 2, begin + end, strict=True)]
    taps = math.prod(sizes(w)[2:])
    lanes = kernels.to_lanes(w, channels, size)
    if taps > 1:
        lanes = op.Gather(lanes, list(reversed(range(taps))), axis=1)
    return convolve(
        g,
        reshape(lanes, *sizes(w)),
        sizes(x),
        kernel=sizes(w)[2:],
        dilations=at.dilations,
        pads=[*pads[:2], *(pad + more for pad, more in zip(pads[2:], extra, strict=True))],
        group=channels,
    )


def _depthwise_weights(g: Tensor, x: Tensor, w: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the weights of a convolution of each channel by itself.

    Each image of each channel of g is a filter of its own for that of x.
    """
    n, channels, *counts = sizes(g)
    kernel = sizes(w)[2:]
    begin, end = _padding(at)
    shape = [
        (length + b + e - (count - 1) * step - 1) // dilation + 1
        for length, b, e, count, step, dilation in zip(
            sizes(x)[2:], begin, end, counts, at.strides, at.dilations, strict=True
        )
    ]
    result = convolve(
        reshape(x, 1, n * channels, *sizes(x)[2:]),
        reshape(g, n * channels, 1, *counts),
        (1, n * channels, *shape),
        kernel=counts,
        strides=at.dilations,
        dilations=at.strides,
        pads=[*begin, *end],
        group=n * channels,
    )
    by_image = reshape(result, n * channels // size, *shape, size)
    by_image = reshape(kernels.crop(by_image, n, channels, kernel), n, channels, *kernel)
    summed = op.ReduceSum(by_image, [0], keepdims=1)
    return reshape(kernels.from_lanes(summed, channels), *sizes(w))
