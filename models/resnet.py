"""A residual network for small images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx

from models.layers import batch_norm, conv, glorot, linear, named
from ortops import Tape, Tensor, op

__all__ = ["resnet"]


def resnet(
    blocks: Sequence[int] = (1, 1, 1),
    *,
    image: tuple[int, int, int] = (1, 8, 8),
    width: int = 16,
    classes: int = 10,
    seed: int = 0,
) -> onnx.ModelProto:
    """Builds the CIFAR form of He et al. 2016, section 4.2, with projection shortcuts.

    One convolution; stages of residual blocks, each with half the height and width and twice the
    channels of the previous one; the average over all pixels; and a linear layer. The depth is
    2 · sum(blocks) + 2: ``resnet((3, 3, 3), image=(3, 32, 32))`` is ResNet-20.

    Args:
        blocks: The number of blocks of the stages ``layer1``, ``layer2``, ….
        image: (channels, height, width) of the images.
        width: The number of channels of the first stage.
        classes: The number of classes.
        seed: The seed of the initial weights.

    Returns:
        A model from ``images``, float32 (batch, *image), to ``logits``, float32 (batch, classes).
        BatchNormalization is in inference mode.

    Example:
        >>> model = resnet((3, 3, 3), image=(3, 32, 32))
        >>> sum(node.op_type in ("Conv", "Gemm") for node in model.graph.node)  # 2 in shortcuts
        22
        >>> [parameter.name for parameter in model.graph.initializer][:3]
        ['conv1.weight', 'bn1.weight', 'bn1.bias']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="resnet") as tape:
        x = tape.input("images", np.float32, ["batch", *image])
        x = conv(x, "conv1", width, rng, bias=False)
        x = op.Relu(batch_norm(x, "bn1"))
        for stage, count in enumerate(blocks):
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(x, f"layer{stage + 1}.{index}", width << stage, stride, rng)
        x = op.Flatten(op.GlobalAveragePool(x))
        tape.output(linear(x, "fc", classes, rng, init=glorot), "logits")
    return tape.model()


@named
def block(x: Tensor, name: str, channels: int, stride: int, rng: np.random.Generator) -> Tensor:
    """Adds the result of two 3×3 convolutions to the input.

    Args:
        x: Of shape (N, inputs, H, W).
        name: The prefix of the names ``conv1``, ``bn1``, ``conv2``, ``bn2`` and, if the shape
            changes, ``downsample.0`` (a 1×1 convolution) and ``downsample.1`` (its normalization).
        channels: The number of output channels.
        stride: The step of the first convolution and of the shortcut.
        rng: Draws the initial weights.

    Returns:
        Of shape (N, channels, ⌈H / stride⌉, ⌈W / stride⌉).
    """
    y = conv(x, f"{name}.conv1", channels, rng, stride=stride, bias=False)
    y = op.Relu(batch_norm(y, f"{name}.bn1"))
    y = conv(y, f"{name}.conv2", channels, rng, bias=False)
    y = batch_norm(y, f"{name}.bn2")
    if x.shape != y.shape:
        x = conv(x, f"{name}.downsample.0", channels, rng, kernel=1, stride=stride, bias=False)
        x = batch_norm(x, f"{name}.downsample.1")
    return cast(Tensor, op.Relu(y + x))
