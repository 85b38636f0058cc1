"""A convolutional network similar to LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from models.layers import conv, dropout, glorot, linear, max_pool
from ortops import Tape, op

__all__ = ["lenet"]


def lenet(
    image: tuple[int, int, int] = (1, 8, 8),
    *,
    channels: Sequence[int] = (32, 64),
    hidden: int = 128,
    classes: int = 10,
    dropout_ratio: float = 0.0,
    seed: int = 0,
) -> onnx.ModelProto:
    """Builds 3×3 convolutions with Relu and 2×2 max pooling, then two linear layers.

    After LeCun et al. 1998, with Relu and max pooling. ``lenet((1, 28, 28))`` is a common network
    for MNIST, with 3,136 features before the linear layers.

    Args:
        image: (channels, height, width) of the images; each convolution halves height and width.
        channels: The number of channels after each of ``conv1``, ``conv2``, ….
        hidden: The width of ``fc1``.
        classes: The number of classes, the width of ``fc2``.
        dropout_ratio: The fraction of features that dropout zeroes before ``fc1`` and ``fc2``
            during training; 0 for no dropout.
        seed: The seed of the initial weights.

    Returns:
        A model from ``images``, float32 (batch, *image), to ``logits``, float32 (batch, classes).

    Example:
        >>> model = lenet()
        >>> [node.op_type for node in model.graph.node][:3]
        ['Conv', 'Relu', 'MaxPool']
        >>> [parameter.name for parameter in model.graph.initializer][:2]
        ['conv1.weight', 'conv1.bias']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="lenet") as tape:
        x = tape.input("images", np.float32, ["batch", *image])
        for number, width in enumerate(channels, 1):
            x = op.Relu(conv(x, f"conv{number}", width, rng))
            x = max_pool(x, f"pool{number}")
        x = dropout(op.Flatten(x), "dropout1", dropout_ratio)
        x = op.Relu(linear(x, "fc1", hidden, rng))
        x = dropout(x, "dropout2", dropout_ratio)
        tape.output(linear(x, "fc2", classes, rng, init=glorot), "logits")
    return tape.model()
