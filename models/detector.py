"""A small object detector of the type of YOLOv8, complete with non-maximum suppression."""

from __future__ import annotations

import numpy as np
import onnx

from models.layers import batch_norm, conv
from ortops import Tape, Tensor, losses, op

__all__ = ["STRIDES", "detector"]

STRIDES = (4, 8)
"""The sizes of the cells of both grids of anchor points, in pixels."""


def detector(
    size: int = 32, *, classes: int = 3, bins: int = 8, width: int = 16, seed: int = 0
) -> onnx.ModelProto:
    """Builds convolutions with batch normalization, two grids of predictions, and the suppression.

    After Jocher et al., 2023 (YOLOv8), without its connections between the grids: a point predicts
    distributions of its distances to the sides of a box, and a Sigmoid for each class.

    Args:
        size: The height and width of images, a multiple of 8.
        classes: The number of classes.
        bins: The number of bins of a distance, in units of the stride.
        width: The number of channels of the first layer.
        seed: The seed of the initial weights.

    Returns:
        A model from ``images``, float32 (batch, 1, size, size), to ``selected``, int64 (count, 3):
        image, class and point of the boxes that are left. Before that, ``joined`` (batch,
        4 + classes, points) has all boxes, as centers and sizes in pixels, and scores, and
        ``distances`` (batch, 4 · bins, points) the logits of distributions.

    Example:
        >>> [node.op_type for node in detector().graph.node][-1]
        'NonMaxSuppression'
    """
    rng = np.random.default_rng(seed)
    layers = ((width, 2), (2 * width, 2), (2 * width, 1), (3 * width, 2), (3 * width, 1))
    grids = []
    with Tape(name="detector") as tape:
        x = tape.input("images", np.float32, ["batch", 1, size, size])
        for number, (channels, stride) in enumerate(layers):
            x = conv(x, f"{number}", channels, rng, stride=stride, bias=False)
            x = op.Relu(batch_norm(x, f"{number}.norm"))
            if stride == 1:
                grid = conv(x, f"{number}.head", 4 * bins + classes, rng, kernel=1)
                grids.append(op.Reshape(grid, [0, 4 * bins + classes, -1]))
        found = op.Concat(*grids, axis=2)
        distances = found[:, : 4 * bins]
        boxes = _decoded(distances, bins, size)
        joined = op.Concat(boxes, op.Sigmoid(found[:, 4 * bins :]), axis=1)
        distances.value.name, joined.value.name = "distances", "joined"
        half = 0.5 * joined[:, 2:4]
        corners = op.Concat(joined[:, :2] - half, joined[:, :2] + half, axis=1).mT
        limits = (np.array([20]), np.float32([0.5]), np.float32([0.3]))
        tape.output(op.NonMaxSuppression(corners, joined[:, 4:], *limits), "selected")
    return tape.model()


def _decoded(distances: Tensor, bins: int, size: int) -> Tensor:
    """Returns centers and sizes of boxes, of the logits of distances to their sides."""
    points, strides = losses.TaskAligned(strides=STRIDES, image_size=size).points(None)
    shares = op.Softmax(op.Reshape(distances, [0, 4, bins, -1]), axis=2)
    sides = op.ReduceSum(shares * np.arange(bins, dtype=np.float32)[:, None], [2], keepdims=0)
    sides = sides * strides.astype(np.float32)
    low, high = (points.T.astype(np.float32) + side for side in (-sides[:, :2], sides[:, 2:]))
    return op.Concat(0.5 * (low + high), high - low, axis=1)
