"""Nodes that work on tensors in onnxruntime's blocked layout.

onnxruntime's fast convolution kernels require the channels of a tensor (N, C, H, W) in blocks. The
layout in memory is (N, C / block, H, W, block), but the declared shape is still (N, C, H, W). The
operators are in the domain com.microsoft.nchwc, whose schemas are not published; onnxruntime uses
them for convolutions with constant weights. Here they compute training steps. Convolutions also
compute operations that are not convolutions in the model, such as a scale and a shift of each
channel, or the sum of a product.

The layout of filters (M, C, H, W) in memory is (M / block, C / block, H, W, block of C, block of
M), or (M / block, C, H, W, block of M) if there are fewer input channels than in a block.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import onnx

from ortops.graph.edit import emit_one
from ortops.graph.faults import outputs_of
from ortops.graph.tensor import Tape, Tensor, op

KERNEL_DOMAIN = "com.microsoft.nchwc"


@functools.cache
def block_size() -> int | None:
    """Returns the number of channels in a block on this machine; None if there are no such kernels.

    It is read from an optimized model, in which onnxruntime has padded the filters to whole blocks.
    """
    with Tape(name="probe") as tape:
        x = tape.input("x", np.float32, [1, 4, 4, 4])
        w = tape.initializer("w", np.ones((4, 4, 1, 1), np.float32))
        tape.output(op.Conv(x, w), "y")
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.onnx"
            outputs_of(tape.model(), written=str(path))
            graph = onnx.load(path).graph
    except OSError:  # no temporary folder is writable
        return None
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if (node.domain, node.op_type) == (KERNEL_DOMAIN, "Conv"):
            return int(shapes[node.input[1]][0])
    return None


def sizes(x: Tensor) -> tuple[int, ...]:
    """Returns the shape of a tensor, whose sizes must be known."""
    assert x.shape is not None
    assert all(isinstance(size, int) for size in x.shape)
    return cast(tuple[int, ...], x.shape)


def reshape(x: Tensor, *shape: int) -> Tensor:
    """Reshapes a tensor to a shape of known sizes; skips previous Reshape nodes."""
    before = x.value.producer()
    while before is not None and before.op_type == "Reshape" and before.inputs[0] is not None:
        x = x.tape.tensor(before.inputs[0])
        before = x.value.producer()
    if x.shape == shape:
        return x
    return emit_one("", "Reshape", [x, x.tape.constant(np.array(shape, np.int64))], shape)


def to_blocks(x: Tensor, block: int, *, channels_last: bool = False) -> Tensor:
    """Converts (N, C, H, W) or (N, H, W, C) to the blocked layout; C must be a multiple of 4.

    The last block is padded with channels of zeros.
    """
    n, *rest = sizes(x)
    *spatial, channels = rest if channels_last else (*rest[1:], rest[0])
    shape = (n, -(-channels // block) * block, *spatial)
    return emit_one(KERNEL_DOMAIN, "ReorderInput", [x], shape, channels_last=int(channels_last))


def to_plain(x: Tensor, channels: int, *, channels_last: bool = False) -> Tensor:
    """Converts a blocked tensor to the plain layout (N, C, H, W) or (N, H, W, C)."""
    n, _, *spatial = sizes(x)
    shape = (n, *spatial, channels) if channels_last else (n, channels, *spatial)
    attributes = {"channels": channels, "channels_last": int(channels_last)}
    return emit_one(KERNEL_DOMAIN, "ReorderOutput", [x], shape, **attributes)


def to_lanes(x: Tensor, lanes: int, block: int) -> Tensor:
    """Returns a matrix (lanes, rest) as (lanes / block, rest, block)."""
    blocked = to_blocks(reshape(x, 1, lanes, math.prod(sizes(x)) // lanes, 1), block)
    _, channels, rest, _ = sizes(blocked)
    return reshape(blocked, channels // block, rest, block)


def from_lanes(x: Tensor, lanes: int) -> Tensor:
    """Returns (lanes / block, rest, block) as a matrix (lanes, rest)."""
    rest = math.prod(sizes(x)) // lanes
    return reshape(to_plain(reshape(x, 1, lanes, rest, 1), lanes), lanes, rest)


def convolve(
    x: Tensor,
    w: Tensor,
    shape: Sequence[int],
    *,
    kernel: Sequence[int],
    bias: Tensor | None = None,
    add: Tensor | None = None,
    strides: Sequence[int] = (1, 1),
    dilations: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0, 0, 0, 0),
    group: int = 1,
) -> Tensor:
    """Convolves a blocked tensor with a blocked filter.

    Args:
        x: (N, C, H, W), blocked, or plain if there are fewer channels than in a block.
        w: (M, C / group, *kernel), in the layout of the kernels.
        shape: The result's shape (N, M, …).
        kernel: The filter's height and width.
        bias: (M,), added to the result.
        add: A blocked tensor of the result's shape, added to it.
        strides: As in ONNX.
        dilations: As in ONNX.
        pads: As in ONNX.
        group: As in ONNX.
    """
    inputs = [x, w, bias, add]
    while inputs[-1] is None:
        inputs.pop()
    return emit_one(
        KERNEL_DOMAIN,
        "Conv",
        inputs,
        shape,
        kernel_shape=list(kernel),
        strides=list(strides),
        dilations=list(dilations),
        pads=list(pads),
        group=group,
    )


def affine(
    x: Tensor, factor: Tensor | None, shift: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Returns factor · x + shift + add for a blocked x, in one pass over memory.

    Args:
        x: (N, C, H, W), blocked.
        factor: (C,) or (1, C); ones by default.
        shift: (C,) or (1, C).
        add: A blocked tensor of x's shape.
    """
    channels = sizes(x)[1]
    if factor is None:
        factor = x.tape.constant(np.ones((channels, 1, 1, 1), np.float32))
    filters = reshape(factor, channels, 1, 1, 1)
    bias = None if shift is None else reshape(shift, channels)
    return convolve(x, filters, sizes(x), kernel=(1, 1), bias=bias, add=add, group=channels)


def products(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sums of a · b over height and width, (N, C, 1, 1), for blocked a and b.

    It is a depthwise convolution of a, with each channel of each image as a channel and b as the
    filters.
    """
    n, channels, *spatial = sizes(a)
    count = n * channels
    images = reshape(a, 1, count, *spatial)
    filters = reshape(b, count, 1, *spatial)
    result = convolve(images, filters, (1, count, 1, 1), kernel=spatial, group=count)
    return reshape(result, n, channels, 1, 1)


def gated(x: Tensor, by: Tensor) -> Tensor:
    """Returns x · by for a blocked x and a factor of each channel of each image, (N, C, 1, 1).

    It is a convolution with each channel of each image as a channel, like `products`: a Mul that
    broadcasts has inner loops of one block.
    """
    n, channels, *spatial = sizes(x)
    images, filters = reshape(x, 1, n * channels, *spatial), reshape(by, n * channels, 1, 1, 1)
    result = convolve(images, filters, sizes(images), kernel=(1, 1), group=n * channels)
    return reshape(result, *sizes(x))


def channel_means(x: Tensor) -> Tensor:
    """Returns the means over height and width, (N, C, 1, 1), of a blocked tensor."""
    n, channels, *_ = sizes(x)
    return emit_one(KERNEL_DOMAIN, "GlobalAveragePool", [x], (n, channels, 1, 1))


def image_sums(
    x: Tensor, factor: float = 1.0, add: Tensor | float | None = None, decay: float = 1.0
) -> Tensor:
    """Returns factor · (the sums over images) + decay · add, (1, C).

    It is one product with a row of constants. ReduceSum takes up to ten times as long for a tensor
    of rank 4.

    Args:
        x: (N, C, 1, 1).
        factor: A factor.
        add: (C,), or a number.
        decay: Its factor.
    """
    n, channels, *_ = sizes(x)
    row = x.tape.constant(np.full((1, n), factor, np.float32))
    if isinstance(add, float):
        add = x.tape.constant(np.float32(add))
    inputs = [row, reshape(x, n, channels), add]
    if add is None:
        return emit_one("", "MatMul", inputs[:2], (1, channels))
    return emit_one("", "Gemm", inputs, (1, channels), beta=decay)


def pad(x: Tensor, pads: Sequence[int]) -> Tensor:
    """Pads a blocked tensor with rows and columns of zeros.

    It is a convolution of each channel with 1, because Pad is not multithreaded.

    Args:
        x: (N, C, H, W), blocked.
        pads: The numbers of rows or columns at the top, left, bottom and right.
    """
    n, channels, height, width = sizes(x)
    ones = x.tape.constant(np.ones((channels, 1, 1, 1), np.float32))
    top, left, bottom, right = pads
    shape = (n, channels, top + height + bottom, left + width + right)
    return convolve(x, ones, shape, kernel=(1, 1), pads=pads, group=channels)


def filter_of(w: Tensor, block: int) -> Tensor:
    """Converts weights (M, C, H, W) to the layout of filters.

    M must be a multiple of the block, and C a multiple or less than a block.
    """
    m, channels, *_ = sizes(w)
    blocked = w if channels < block else _inputs_in_blocks(w, block)
    return reshape(to_lanes(blocked, m, block), *sizes(w))


def from_filter(w: Tensor, block: int) -> Tensor:
    """Converts weights with blocks of M and C from the layout of filters to (M, C, H, W)."""
    m, channels, *kernel = sizes(w)
    by_output = reshape(from_lanes(w, m), m, channels, *kernel)
    return by_output if math.prod(kernel) == 1 else to_plain(by_output, channels)


def _inputs_in_blocks(w: Tensor, block: int) -> Tensor:
    """Returns weights (M, C, H, W) as (M, C / block, H, W, block) in memory."""
    return w if math.prod(sizes(w)[2:]) == 1 else to_blocks(w, block)


def mirrored_filter_of(
    w: Tensor, block: int, phases: Sequence[Sequence[Sequence[int | None]]] | None = None
) -> Tensor:
    """Returns weights (M, C, H, W) with M and C exchanged, in the layout of filters.

    Args:
        w: The weights; M and C are multiples of the block.
        block: The size of a block.
        phases: For each of the two axes, for each phase, the index of the weight at each position
            of a new kernel (None for a zero). The result has C outputs for each pair of phases. By
            default there is one phase, with the kernel reversed.
    """
    m, channels, *kernel = sizes(w)
    taps = math.prod(kernel)
    if phases is None:
        phases = [[list(reversed(range(size)))] for size in kernel]
    split = (m // block, block, channels // block, taps, block)
    by_output = reshape(_inputs_in_blocks(w, block), *split)
    by_tap = op.Transpose(by_output, perm=[2, 0, 3, 1, 4])
    order = [
        [
            taps if row is None or column is None else row * kernel[1] + column
            for row, column in itertools.product(rows, columns)
        ]
        for rows, columns in itertools.product(*phases)
    ]
    count, width = len(order), len(phases[1][0])
    if any(taps in each for each in order):
        by_tap = op.Pad(by_tap, [0] * 7 + [1, 0, 0])
    if count > 1:
        by_tap = op.Transpose(op.Gather(by_tap, order, axis=2), perm=[2, 0, 1, 3, 4, 5])
    elif taps > 1:
        by_tap = op.Gather(by_tap, order[0], axis=2)
    return reshape(by_tap, count * channels, m, len(order[0]) // width, width)


def put_apart(x: Tensor, strides: Sequence[int], shape: Sequence[int], block: int) -> Tensor:
    """Inserts zeros between the elements of a blocked tensor, as a transposed convolution does.

    Args:
        x: (N, C, H, W), blocked.
        strides: The distances between rows and between columns in the result.
        shape: The height and width of the result, at most ``strides`` times those of x.
        block: The size of a block.
    """
    n, channels, height, width = sizes(x)
    down, across = strides
    rows = reshape(x, n * channels // block, height, 1, width, block)
    wide = op.Pad(rows, [0, 0, 0, 0, 0, 0, 0, down - 1, 0, (across - 1) * block])
    spread = reshape(wide, n * channels // block, height * down, width * across, block)
    return crop(spread, n, channels, shape)


def crop(x: Tensor, n: int, channels: int, shape: Sequence[int]) -> Tensor:
    """Returns the first rows and columns of (N · C / block, H, W, block), as (N, C, *shape)."""
    axes = [axis for axis in (1, 2) if sizes(x)[axis] != shape[axis - 1]]
    if axes:
        x = op.Slice(x, [0] * len(axes), [shape[axis - 1] for axis in axes], axes)
    return reshape(x, n, channels, *shape)
