"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from models.layers import glorot, linear
from ortops import Tape, op

__all__ = ["mlp"]


def mlp(sizes: Sequence[int] = (64, 128, 10), *, seed: int = 0) -> onnx.ModelProto:
    """Builds linear layers ``fc1``, ``fc2``, … with a Relu between them.

    Args:
        sizes: The number of pixels, the widths of the hidden layers, and the number of classes.
        seed: The seed of the initial weights.

    Returns:
        A model from ``images``, float32 (batch, sizes[0]), to ``logits``, float32
        (batch, sizes[-1]).

    Example:
        >>> model = mlp((784, 1024, 1024, 10))
        >>> [node.op_type for node in model.graph.node]
        ['Gemm', 'Relu', 'Gemm', 'Relu', 'Gemm']
        >>> [parameter.name for parameter in model.graph.initializer][:2]
        ['fc1.weight', 'fc1.bias']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="mlp") as tape:
        x = tape.input("images", np.float32, ["batch", sizes[0]])
        for number, size in enumerate(sizes[1:-1], 1):
            x = op.Relu(linear(x, f"fc{number}", size, rng))
        logits = linear(x, f"fc{len(sizes) - 1}", sizes[-1], rng, init=glorot)
        tape.output(logits, "logits")
    return tape.model()
