"""Rules of the operators on blocked tensors, which exist only while a training step is built.

They emit onnxruntime's nodes, which have no rules, so there are no gradients of higher order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules import convolution
from ortops.graph.autodiff.rules.convolution import Windows
from ortops.graph.edit import emit_one
from ortops.graph.passes.blocked import kernels
from ortops.graph.passes.blocked.kernels import (
    affine,
    channel_means,
    convolve,
    gated,
    image_sums,
    products,
    reshape,
    sizes,
)
from ortops.graph.passes.finite import equal_mask, mask
from ortops.graph.tensor import Tensor, op

DOMAIN = "ortops.blocked"
"""The private domain of operators on blocked tensors."""

TABLE = Table()
"""Their rules."""

_CACHED = 2**20
"""The size in bytes of filters that stay in the cache of a core, where all outputs read them."""

vjp = TABLE.vjp


def enter(x: Tensor, size: int) -> Tensor:
    """Converts (N, C, H, W) to the blocked layout, padded with channels of zeros."""
    n, channels, *spatial = sizes(x)
    shape = (n, -(-channels // size) * size, *spatial)
    return emit_one(DOMAIN, "Block", [x], shape, block=size)


def leave(x: Tensor, size: int, channels: int | None = None) -> Tensor:
    """Converts the first channels, or all, from the blocked layout to (N, C, H, W)."""
    n, count, *spatial = sizes(x)
    kept = channels or count
    shape = (n, kept, *spatial)
    return emit_one(DOMAIN, "Unblock", [x], shape, block=size, channels=kept)


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


@vjp("Gate", domain=DOMAIN)
def _gate(g: Tensor, y: Tensor, x: Tensor, by: Tensor) -> Cotangents:
    return gated(g, by), products(g, x)


@vjp("MaxPool", domain=DOMAIN)
def _max_pool(
    g: Tensor, y: Tensor, x: Tensor, *, block: int, kernel_shape: Sequence[int], exact: int
) -> Cotangents:
    # The windows tile x. In case of ties, the first element is the maximum, as in PyTorch: each
    # element in turn, if it is equal to the maximum, takes the remaining cotangent.
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
    d_factor = reshape(image_sums(products(g, x)), *sizes(factor))
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
    centred, variance = y[3:]
    n, channels, height, width = sizes(x)
    count = n * height * width
    d_x = d_scale = d_bias = d_mean = d_var = None
    if g_y is not None:
        means, along = channel_means(g_y), products(g_y, centred)
        std = op.Sqrt(variance)
        d_scale = reshape(image_sums(along) / std, channels)
        d_bias = reshape(image_sums(means, height * width), channels)
        # d_x = scale / std · (g - mean of g - centred · mean of (g · centred) / variance)
        slope = image_sums(along, -1 / count) / variance
        inner = affine(centred, slope, image_sums(means, -1 / n), add=g_y)
        d_x = emit_one(DOMAIN, "Scale", [inner, scale / std], sizes(x))
    if g_mean is not None:
        d_mean = g_mean * momentum
        shift = g_mean * ((1 - momentum) / count)
        d_x = affine(centred, shift * 0.0, shift, add=d_x)
    if g_var is not None:
        d_var = g_var * momentum
        d_x = affine(centred, g_var * (2 * (1 - momentum) / count), add=d_x)
    return d_x, d_scale, d_bias, d_mean, d_var


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
    at = windows_on(sizes(w)[2:], strides, dilations, pads)
    g, factor = _factored(g, w)
    scaled = w if factor is None else w * factor
    if group > 1:
        d_x, d_w = _depthwise_input(g, scaled, x, at, block), _depthwise_weights(g, x, w, at, block)
    else:
        d_x, d_w = _input(g, scaled, x, at, block), _weights(g, x, w, at, block)
    d_b = None if b is None else _channel_sums(g)
    if factor is not None:
        d_w = d_w * factor
        d_b = None if d_b is None else d_b * reshape(factor, *sizes(d_b))
    return d_x, d_w, d_b


def _factored(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor | None]:
    """Splits a cotangent that a normalization has scaled into a tensor and factors (M, 1, 1, 1).

    It is faster to scale the weights (M, C, H, W) and their cotangent, if they are much smaller.
    """
    node = g.value.producer()
    if node is None or (node.domain, node.op_type) != (DOMAIN, "Scale"):
        return g, None
    inner, factor = (g.tape.tensor(cast(ir.Value, value)) for value in node.inputs)
    if 4 * math.prod(sizes(w)) > math.prod(sizes(g)):
        return g, None
    return inner, reshape(factor, sizes(w)[0], 1, 1, 1)


def windows_on(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], pads: Sequence[int]
) -> Windows:
    """Returns the windows of a convolution with two spatial axes."""
    return Windows(
        tuple(kernel), tuple(strides), tuple(dilations), tuple(pads[:2]), tuple(pads[2:])
    )


def _channel_sums(x: Tensor) -> Tensor:
    """Returns the sums over images, height and width, (C,), of a blocked tensor."""
    _, channels, height, width = sizes(x)
    return reshape(image_sums(channel_means(x), height * width), channels)


def _input(g: Tensor, w: Tensor, x: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the input of a convolution without groups."""
    n, channels, *lengths = sizes(x)
    if channels % size:  # the first convolution, whose input has the plain layout
        return convolution.input_gradient(leave(g, size), w, x, at, 1)
    if at.strides == (1, 1):
        return convolve(
            g,
            kernels.mirrored_filter_of(w, size),
            sizes(x),
            kernel=sizes(w)[2:],
            dilations=at.dilations,
            pads=convolution.mirrored_pads(at),
        )
    if sizes(w)[2:] == (1, 1) and not at.is_padded:
        _, _, *counts = sizes(g)
        spread = convolve(
            g, kernels.mirrored_filter_of(w, size), (n, channels, *counts), kernel=(1, 1)
        )
        return kernels.put_apart(spread, at.strides, lengths, size)
    phases = all_phases(sizes(w)[2:], lengths, sizes(g)[2:], at)
    if phases is None:
        plain = convolution.input_gradient(leave(g, size), w, leave(x, size), at, 1)
        return enter(plain, size)
    return by_phases(g, w, sizes(x), at, phases, size)


def by_phases(
    g: Tensor,
    w: Tensor,
    shape: Sequence[int],
    at: Windows,
    phases: Sequence[_Phases],
    size: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns a transposed convolution as one convolution for all phases, whose outputs are mixed.

    Args:
        g: (N, M, …), blocked.
        w: The weights (M, C, …).
        shape: The result's shape (N, C, …).
        at: The windows on the result.
        phases: The phases of both axes.
        size: The number of channels in a block.
        bias: (C,), added to the result.
    """
    n, channels, *lengths = shape
    down, across = at.strides
    counts = [-(-length // step) for length, step in zip(lengths, at.strides, strict=True)]
    result = convolve(
        g,
        kernels.mirrored_filter_of(w, size, [each.taps for each in phases]),
        (n, down * across * channels, *counts),
        kernel=[len(each.taps[0]) for each in phases],
        bias=None if bias is None else op.Concat(*[bias] * (down * across), axis=0),
        pads=[each.begin for each in phases] + [each.end for each in phases],
    )
    if down * across == 1:
        return result
    split = reshape(result, n, down, across, channels // size, *counts, size)
    placed = op.Transpose(split, perm=[0, 3, 4, 1, 5, 2, 6])
    placed = reshape(placed, n * channels // size, counts[0] * down, counts[1] * across, size)
    return kernels.crop(placed, n, channels, lengths)


@vjp("ConvTranspose", domain=DOMAIN)
def _conv_transpose(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    block: int,
    lengths: Sequence[int],
    pads: Sequence[int],
    strides: Sequence[int],
) -> Cotangents:
    kernel = sizes(w)[2:]
    at = windows_on(kernel, strides, (1, 1), pads)
    filters = kernels.filter_of(w, block)
    d_x = convolve(g, filters, sizes(x), kernel=kernel, strides=strides, pads=pads)
    # The windows slide over y, because the roles of input and output are exchanged.
    return d_x, _weights(x, g, w, at, block), None if b is None else _channel_sums(g)


def _padding(at: Windows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return cast(tuple[int, ...], at.begin), cast(tuple[int, ...], at.end)


class _Phases:
    """The gradient of a strided convolution along one axis, as a convolution for each phase.

    A phase r consists of the elements s · q + r of x, with stride s. Window q + e − j reads such an
    element with the weight s · j + f, where e and f are the quotient and remainder of r + padding
    divided by s. So the gradient of each phase is a convolution of g with a part of the weights.

    Attributes:
        taps: For each phase, the index of the weight at each position of its kernel; None for 0.
        begin: The padding of g at the beginning.
        end: The padding of g at the end.
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


def all_phases(
    kernel: Sequence[int], lengths: Sequence[int], counts: Sequence[int], at: Windows
) -> list[_Phases] | None:
    """Returns the phases of both axes, or None if the kernels do not support them.

    Args:
        kernel: The sizes of the windows.
        lengths: The sizes of what they slide over.
        counts: Their numbers.
        at: The windows.
    """
    if set(at.dilations) != {1}:
        return None
    each = zip(kernel, at.strides, _padding(at)[0], lengths, counts, strict=True)
    made = [_Phases(*axis) for axis in each]
    return made if all(axis.possible for axis in made) else None


def can_transpose(at: Windows) -> bool:
    """Whether the padding is less than the extent of the windows, as the gradient requires."""
    return min(convolution.mirrored_pads(at)) >= 0


def _weights(g: Tensor, x: Tensor, w: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the weights of a convolution without groups.

    It is computed as a convolution of x with g as the filter. The images of the batch become
    channels, and the channels of g become outputs. The channels of x are interleaved along its
    rows, so that a row has W · C elements, and the filter has a dilation of C. The kernels then
    compute many outputs at once, which they would not do if each channel were an image.

    If there are few images, or large ones, each is cut into strips of rows that count as images,
    provided that windows overlap: without that, a product has as little to copy.

    The gradient of a 1 × 1 convolution is a matrix product, and so is that of windows without gaps
    and overlap. A product also takes the place of a convolution of mostly zeros.
    """
    if _is_tiled(x, w, at, size):
        return _weights_of_tiles(g, x, w, size)
    n, m, height, width = sizes(g)
    channels, *kernel = sizes(w)[1:]
    overlap = all(count > step for count, step in zip(kernel, at.strides, strict=True))
    strips = _strips(n, m, height, width, size) if overlap else 1
    count = n * strips
    lanes = -(-count // size) * size
    is_sparse = (at.dilations[1] > 1 and kernel[1] > 1) or not _fills(count, size)
    is_product = math.prod(kernel) == 1 and at.strides == (1, 1)
    if is_product or is_sparse:
        seen = x if channels % size else leave(x, size)
        return convolution.weight_gradient(leave(g, size), seen, w, at, 1)
    rows = -(-height // strips)
    images, lines, row = _images_as_channels(x, at, channels, size, strips, rows)
    if strips > 1:
        g, top, bottom = _cut(g, strips, rows, size), 0, 0
    else:
        begin, end = _padding(at)
        top, bottom = begin[0], end[0] - at.left_over(sizes(x)[2:])[0]
    if lanes != count:
        g = op.Pad(g, [0] * 4 + [lanes - count, 0, 0, 0])
    groups = lanes // size
    by_pixel = reshape(g, groups, size, 1, m * rows * width)
    filters = kernels.to_blocks(by_pixel, size, channels_last=True)
    result = convolve(
        reshape(images, 1, lanes, lines, row * channels),
        reshape(filters, groups * m, size, rows, width),
        (1, groups * m, kernel[0], kernel[1] * channels),
        kernel=(rows, width),
        strides=(at.dilations[0], 1),
        dilations=(at.strides[0], at.strides[1] * channels),
        pads=[top, 0, max(bottom, 0), 0],
        group=groups,
    )
    by_tap = reshape(result, groups, m // size, math.prod(kernel), channels * size)
    if groups > 1:
        by_tap = op.ReduceSum(by_tap, [0], keepdims=0)
    return _from_taps(by_tap, w, size)


def _is_tiled(x: Tensor, w: Tensor, at: Windows, size: int) -> bool:
    """Whether windows of several elements cover a blocked tensor without gaps and overlap."""
    _, channels, *lengths = sizes(x)
    is_whole = channels % size == 0 and not any(at.left_over(lengths))
    return is_whole and at.are_adjacent and math.prod(sizes(w)[2:]) > 1


def _weights_of_tiles(g: Tensor, x: Tensor, w: Tensor, size: int) -> Tensor:
    """Returns the cotangent of the weights of a convolution whose windows are tiles of x."""
    n, m, height, width = sizes(g)
    channels, *kernel = sizes(w)[1:]
    down, across = kernel
    split = reshape(x, n, channels // size, height, down, width, across, size)
    tiles = op.Transpose(split, perm=[0, 2, 4, 3, 5, 1, 6])
    # The products of large images use more threads one by one than as one product.
    pixels = height * width
    images = n if pixels >= m + math.prod(kernel) * channels else 1
    by_pixel = kernels.to_plain(g, m, channels_last=True)
    by_pixel = reshape(by_pixel, images, n // images * pixels, m)
    columns = reshape(tiles, images, n // images * pixels, math.prod(kernel) * channels)
    summed = op.ReduceSum(op.MatMul(by_pixel.mT, columns), [0], keepdims=0)
    # A Reshape at the end would run before all other gradients (see `graph.passes.order`).
    return op.Transpose(reshape(summed, m, *kernel, channels), perm=[0, 3, 1, 2])


def _fills(count: int, size: int) -> bool:
    """Whether images fill at least two thirds of the lanes in blocks of a size."""
    return 3 * count >= 2 * -(-count // size) * size


def _strips(n: int, m: int, height: int, width: int, size: int) -> int:
    """Returns into how many strips of rows to cut each of n images for the gradient of weights.

    Of the numbers with which strips of the output's cotangent, the filters, stay in the cache, it
    is the smallest one that fills the lanes best.

    Args:
        n: The number of images.
        m: The number of channels of the output.
        height: The number of its rows.
        width: The number of its columns.
        size: The number of lanes in a block.
    """
    at_once = min(4, m // size)  # blocks of filters that the kernel applies together
    pixels = _CACHED // (4 * size * size * at_once)
    least = -(-height // max(1, pixels // width))
    if least == 1 and _fills(n, size):
        return 1

    def work(strips: int) -> int:
        return -(-n * strips // size) * -(-height // strips)

    return min(range(least, max(least, min(height, least + size - 1)) + 1), key=work)


def _cut(g: Tensor, strips: int, rows: int, size: int) -> Tensor:
    """Cuts a blocked tensor into strips of rows, (N · strips, C, rows, W); missing ones are 0."""
    n, channels, height, width = sizes(g)
    if strips * rows != height:
        g = kernels.pad(g, (0, 0, strips * rows - height, 0))
    split = reshape(g, n, channels // size, strips, rows, width * size)
    if channels > size:
        split = op.Transpose(split, perm=[0, 2, 1, 3, 4])
    return reshape(split, n * strips, channels, rows, width)


def _images_as_channels(
    x: Tensor, at: Windows, channels: int, size: int, strips: int, rows: int
) -> tuple[Tensor, int, int]:
    """Returns x in blocks of images, (lanes / size, height · width · channels, size), and sizes.

    Rows are padded, and elements after the last window are cut off. Strips are padded above and
    below as well, and overlap by what the windows of both have in common.

    Args:
        x: (N, C, H, W), blocked, or plain if there are fewer channels than in a block.
        at: The windows on it.
        channels: C.
        size: The number of images in a block.
        strips: The number of strips of an image that count as images.
        rows: The number of rows of windows in a strip.
    """
    n, _, height, width = sizes(x)
    (top, left), (bottom, right) = _padding(at)
    below, beyond = at.left_over((height, width))
    index = None  # of the rows of each strip
    if strips == 1:  # the convolution pads above and below
        top, bottom = 0, min(bottom - below, 0)
    else:
        step, extent = at.strides[0], cast(int, at.extents[0])
        within = np.arange((rows - 1) * step + extent)
        index = rows * step * np.arange(strips)[:, None] + within
        bottom = max(0, int(index.max()) + 1 - top - height)
    pads = (top, left, bottom, right - beyond)
    is_blocked = channels % size == 0
    if is_blocked:
        if min(pads) >= 0 and any(pads):
            x = kernels.pad(x, pads)
            pads = (0, 0, 0, 0)
        _, _, *spatial = sizes(x)
        if channels > size:
            x = kernels.to_plain(x, channels, channels_last=True)
        x = reshape(x, n, *spatial, channels)
    axis = 1 if is_blocked else 2  # the rows
    x = _padded(x, axis, pads, n if strips > 1 else -(-n // size) * size)
    if index is not None:
        x = op.Gather(x, index, axis=axis)
        if not is_blocked:
            x = op.Transpose(x, perm=[0, 2, 1, 3, 4])
        x = reshape(x, n * strips, *(sizes(x)[2:]))
        x = _padded(x, axis, (0, 0, 0, 0), -(-n * strips // size) * size)
    lines, row = sizes(x)[axis : axis + 2]
    images = kernels.to_lanes(x, sizes(x)[0], size)
    if not is_blocked and channels > 1:
        images = reshape(images, sizes(images)[0], channels, lines * row, size)
        images = op.Transpose(images, perm=[0, 2, 1, 3])
    return images, lines, row


def _padded(x: Tensor, axis: int, pads: Sequence[int], images: int) -> Tensor:
    """Pads a plain tensor to a number of images, and its rows and columns, or cuts them off."""
    top, left, bottom, right = pads
    begin, end = [0] * len(sizes(x)), [0] * len(sizes(x))
    begin[axis : axis + 2], end[axis : axis + 2] = (top, left), (bottom, right)
    end[0] = images - sizes(x)[0]
    return op.Pad(x, begin + end) if any(begin + end) else x


def _from_taps(by_tap: Tensor, w: Tensor, size: int) -> Tensor:
    """Returns weights (M / block, taps, C · block) in the shape of w."""
    m, channels, *kernel = sizes(w)
    taps = math.prod(kernel)
    if channels % size == 0:
        split = reshape(by_tap, m // size, taps, channels // size, size * size)
        filters = op.Transpose(split, perm=[0, 2, 1, 3])
        return kernels.from_filter(reshape(filters, *sizes(w)), size)
    by_output = reshape(kernels.from_lanes(by_tap, m), m, *kernel, channels)
    return op.Transpose(by_output, perm=[0, 3, 1, 2])  # at the end, as in `_weights_of_tiles`


def _depthwise_input(g: Tensor, w: Tensor, x: Tensor, at: Windows, size: int) -> Tensor:
    """Returns the cotangent of the input of a depthwise convolution."""
    channels = sizes(x)[1]
    if at.strides != (1, 1):
        apart = [
            (count - 1) * step + 1 for count, step in zip(sizes(g)[2:], at.strides, strict=True)
        ]
        g = kernels.put_apart(g, at.strides, apart, size)
    pads, extra = convolution.mirrored_pads(at), at.left_over(sizes(x)[2:])
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
    """Returns the cotangent of the weights of a depthwise convolution.

    It is a depthwise convolution of x, with each channel of each image as a channel and g as the
    filters.
    """
    n, channels, *counts = sizes(g)
    kernel = sizes(w)[2:]
    pads = at.pads or ()
    # g is the filter: strides and dilations are exchanged.
    shape = windows_on(counts, at.dilations, at.strides, pads).counts(sizes(x)[2:])
    result = convolve(
        reshape(x, 1, n * channels, *sizes(x)[2:]),
        reshape(g, n * channels, 1, *counts),
        (1, n * channels, *shape),
        kernel=counts,
        strides=at.dilations,
        dilations=at.strides,
        pads=pads,
        group=n * channels,
    )
    by_image = reshape(result, n * channels // size, *shape, size)
    by_image = reshape(kernels.crop(by_image, n, channels, kernel), n, channels, *kernel)
    summed = op.ReduceSum(by_image, [0], keepdims=1)
    return reshape(kernels.from_lanes(summed, channels), *sizes(w))
