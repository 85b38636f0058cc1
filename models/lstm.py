"""A recurrent network that classifies sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import onnx

from models.layers import glorot, linear, named
from ortops import Tape, Tensor, op

__all__ = ["lstm", "lstm_layer"]


def lstm(
    features: int = 8, *, width: int = 64, classes: int = 10, seed: int = 0
) -> onnx.ModelProto:
    """Builds an LSTM over a sequence and a linear layer on its last hidden state.

    Batch and sequence are symbolic; all sequences of a batch have the same length.

    Args:
        features: The length of a token's vector (by default a row of an 8×8 image).
        width: The length of the hidden state.
        classes: The number of classes.
        seed: The seed of the initial weights.

    Returns:
        A model from ``tokens``, float32 (batch, sequence, features), to ``logits``, float32
        (batch, classes).

    Example:
        >>> model = lstm(64, width=128)
        >>> [node.op_type for node in model.graph.node if node.op_type != "Constant"]
        ['Transpose', 'LSTM', 'Squeeze', 'Gemm']
        >>> [parameter.name for parameter in model.graph.initializer][:3]
        ['lstm.W', 'lstm.R', 'lstm.B']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="lstm") as tape:
        tokens = tape.input("tokens", np.float32, ["batch", "sequence", features])
        last = lstm_layer(tokens, "lstm", width, rng)
        tape.output(linear(last, "fc", classes, rng, init=glorot), "logits")
    return tape.model()


@named
def lstm_layer(x: Tensor, name: str, width: int, rng: np.random.Generator) -> Tensor:
    """Returns the last hidden state of an LSTM that starts from zeros.

    Parameters have the layout of the ONNX operator, with gates in the order input, output, forget,
    cell; PyTorch's order is input, forget, cell, output.

    Args:
        x: Of shape (batch, sequence, features).
        name: The layer's name; ``<name>.W`` has shape (1, 4 · width, features), ``<name>.R``
            (1, 4 · width, width) and ``<name>.B`` (1, 8 · width), the biases of the one and then
            of the other.
        width: The length of the hidden state.
        rng: Draws the initial weights and biases from U(−a, a), a² = 1 / width, as PyTorch does.

    Returns:
        Of shape (batch, width).
    """

    def uniform(shape: Sequence[int]) -> npt.NDArray[np.float32]:
        limit = 1 / math.sqrt(width)
        return rng.uniform(-limit, limit, shape).astype(np.float32)

    assert x.shape is not None
    weight = x.tape.initializer(f"{name}.W", uniform((1, 4 * width, cast(int, x.shape[-1]))))
    recurrence = x.tape.initializer(f"{name}.R", uniform((1, 4 * width, width)))
    bias = x.tape.initializer(f"{name}.B", uniform((1, 8 * width)))
    by_time = op.Transpose(x, perm=[1, 0, 2])
    _, last, _ = op.LSTM(by_time, weight, recurrence, bias, hidden_size=width, outputs=3)
    return cast(Tensor, op.Squeeze(last, [0]))
