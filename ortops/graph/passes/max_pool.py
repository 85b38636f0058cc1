"""MaxPool: indices of the maxima, found by comparison.

The gradient needs the index of each maximum. The onnxruntime kernel that returns indices takes ten
times as long as the kernel for the maxima alone, and is the slowest node of a small network.
Comparing each maximum with the elements of its window takes less than half of that time.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.rules.convolution import node_windows
from ortops.graph.autodiff.rules.pooling import tiles
from ortops.graph.passes.draft import ANYWHERE
from ortops.graph.passes.rewrite import PatternPass, Result, pattern
from ortops.graph.tensor import Tape, Tensor, op

_TAPS = 16  # elements of the largest windows: each is compared


@pattern("MaxPool")
def _compared(node: ir.Node, tape: Tape) -> Result:
    """Replaces MaxPool with indices, if the windows tile images of known size."""
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT or x.shape is None or len(node.outputs) < 2:
        return None
    images, sizes = tape.tensor(x), x.shape[1:]
    kernel = tuple(node.attributes["kernel_shape"].as_ints())
    if len(sizes) != 3 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    tiled = tiles(images, node_windows(node, images, kernel))
    by_column = node.attributes.get_int("storage_order", 0)
    if not tiled or by_column or not 1 < math.prod(kernel) <= _TAPS or not node.outputs[1].uses():
        return None
    # onnxruntime's optimizer moves these nodes after a Slice, and then infers wrong types.
    if any(other.op_type in ("QuantizeLinear", "DequantizeLinear") for other in node.graph or ()):
        return None
    largest = op.MaxPool(images, kernel_shape=kernel, strides=kernel)
    largest = largest.with_shape_of(tape.tensor(node.outputs[0]))
    channels, height, width = (int(str(size)) for size in sizes)
    return [largest, _places(images, largest, channels, height, width, *kernel)]


def _places(
    x: Tensor, largest: Tensor, channels: int, height: int, width: int, rows: int, columns: int
) -> Tensor:
    """Returns the flat index of each maximum; the first one in case of ties."""
    windows = (channels, height // rows, width // columns)
    offsets = [row * width + column for row in range(rows) for column in range(columns)]
    seen = []
    for row in range(rows):
        lines = op.Slice(x, [row], [height], [2], [rows]) if rows > 1 else x
        pairs = op.Reshape(lines, [0, *windows, columns])
        seen += [op.Squeeze(part, [4]) for part in op.Split(pairs, axis=4, num_outputs=columns)]
    # The smallest type is the fastest.
    small = np.uint8 if offsets[-1] < 256 else np.int32
    within: Tensor | np.integer = small(offsets[-1])
    for each, offset in reversed(list(zip(seen[:-1], offsets[:-1], strict=True))):
        within = op.Where(op.Equal(each, largest), small(offset), within)
    corners = np.ravel_multi_index(
        np.ix_(range(channels), range(0, height, rows), range(0, width, columns)),
        (channels, height, width),
    )
    image = op.Range(0, op.Squeeze(op.Shape(x, start=0, end=1), [0]), 1)
    first = op.Reshape(image, [-1, 1, 1, 1]) * (channels * height * width)
    return op.Cast(within, to=ir.DataType.INT64) + corners + first


MAX_POOL = PatternPass("max_pool", _compared, serves=ANYWHERE, bodies=True)
