"""A small transformer encoder that classifies sequences."""

from __future__ import annotations

import numpy as np
import onnx

from models.layers import dropout, embedding, encoder_layer, glorot, layer_norm, linear, positions
from ortops import Tape, op

__all__ = ["transformer"]


def transformer(
    features: int = 8,
    *,
    vocabulary: int | None = None,
    length: int = 8,
    width: int = 64,
    heads: int = 4,
    hidden: int = 256,
    depth: int = 2,
    classes: int = 10,
    dropout_ratio: float = 0.0,
    seed: int = 0,
) -> onnx.ModelProto:
    """Builds an embedding, pre-norm encoder layers, the mean over the sequence, a linear layer.

    A token is a vector of numbers (by default a row of an 8×8 image), or with ``vocabulary`` an id.
    Batch and sequence are symbolic, so a sequence may be shorter than ``length``; all sequences of
    a batch have the same length.

    Args:
        features: The length of a token's vector.
        vocabulary: The number of ids; replaces ``features``.
        length: The maximum sequence length, with learned positions.
        width: The number of features inside the encoder.
        heads: The number of attention heads, a divisor of ``width``.
        hidden: The width of the feed-forward parts.
        depth: The number of encoder layers.
        classes: The number of classes.
        dropout_ratio: The fraction of elements that each dropout zeroes during training, placed as
            in ``torch.nn.TransformerEncoderLayer``; 0 for no dropout.
        seed: The seed of the initial weights.

    Returns:
        A model from ``tokens``, float32 (batch, sequence, features) or, for ids, int64
        (batch, sequence), to ``logits``, float32 (batch, classes).

    Example:
        >>> model = transformer(vocabulary=1000, length=128, width=256, hidden=1024)
        >>> len([node for node in model.graph.node if node.op_type == "Softmax"])
        2
        >>> [parameter.name for parameter in model.graph.initializer][:3]
        ['embedding.weight', 'positions.weight', 'encoder.layers.0.norm1.weight']
    """
    rng = np.random.default_rng(seed)
    with Tape(name="transformer") as tape:
        if vocabulary is None:
            tokens = tape.input("tokens", np.float32, ["batch", "sequence", features])
            x = linear(tokens, "embedding", width, rng, init=glorot)
        else:
            tokens = tape.input("tokens", np.int64, ["batch", "sequence"])
            x = embedding(tokens, "embedding", vocabulary, width, rng)
        x = dropout(positions(x, "positions", length, rng), "dropout", dropout_ratio)
        for layer in range(depth):
            name = f"encoder.layers.{layer}"
            x = encoder_layer(x, name, heads, hidden, rng, ratio=dropout_ratio)
        x = op.ReduceMean(layer_norm(x, "encoder.norm"), [1], keepdims=0)
        tape.output(linear(x, "classifier", classes, rng, init=glorot), "logits")
    return tape.model()
