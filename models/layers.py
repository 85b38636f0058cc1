"""Layers: small functions that add nodes and initializers to the tape of their input.

Parameters are initializers with PyTorch's names (``conv1.weight``, ``bn1.running_mean``) and
layout, so weights can be exchanged by name in both directions. Nodes are named after their layer
(``conv1/Conv``), so errors and profiles show the layer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ortops import ModelError, Tensor, op

__all__ = [
    "attention",
    "batch_norm",
    "conv",
    "dropout",
    "embedding",
    "encoder_layer",
    "glorot",
    "he",
    "layer_norm",
    "linear",
    "max_pool",
    "named",
    "normal",
    "positions",
]

Array: TypeAlias = npt.NDArray[np.float32]
Init: TypeAlias = Callable[[np.random.Generator, Sequence[int]], Array]
Parameters = ParamSpec("Parameters")


def he(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draws weights that keep the variance through a ReLU, N(0, 2 / fan-in); He et al. 2015.

    Args:
        rng: Where the numbers come from.
        shape: (outputs, inputs, *kernel).
    """
    deviation = math.sqrt(2 / math.prod(shape[1:]))
    return rng.normal(0, deviation, shape).astype(np.float32)


def glorot(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draws weights from U(−a, a), a² = 6 / (fan-in + fan-out); Glorot and Bengio 2010.

    Args:
        rng: Where the numbers come from.
        shape: (outputs, inputs, *kernel).
    """
    limit = math.sqrt(6 / ((shape[0] + shape[1]) * math.prod(shape[2:])))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def normal(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Draws embeddings from N(0, 0.02²), as BERT and GPT-2 do.

    Args:
        rng: Where the numbers come from.
        shape: (entries, features).
    """
    return rng.normal(0, 0.02, shape).astype(np.float32)


def named(
    layer: Callable[Concatenate[Tensor, str, Parameters], Tensor],
) -> Callable[Concatenate[Tensor, str, Parameters], Tensor]:
    """Names the nodes that a layer emits after the layer."""

    @functools.wraps(layer)
    def with_scope(
        x: Tensor, name: str, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Tensor:
        outer = x.tape.scope
        x.tape.scope = f"{name}/"
        try:
            return layer(x, name, *args, **kwargs)
        finally:
            x.tape.scope = outer

    return cast(Callable[Concatenate[Tensor, str, Parameters], Tensor], with_scope)


def _size(x: Tensor, axis: int) -> int:
    """Returns the size of an axis that weights depend on."""
    size = None if x.shape is None else x.shape[axis]
    if not isinstance(size, int) or size == 0:
        raise ModelError(
            f"layer '{x.tape.scope.rstrip('/')}': axis {axis} of {x!r} has size {size}; "
            "weights need a fixed size of at least 1"
        )
    return size


def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns x Wᵀ + b over the last axis, as one Gemm whatever the rank."""
    if x.ndim == 2:
        return cast(Tensor, op.Gemm(x, weight, bias, transB=1))
    outputs, inputs = _size(weight, 0), _size(weight, 1)
    rows = op.Gemm(op.Reshape(x, [-1, inputs]), weight, bias, transB=1)
    shape = op.Concat(op.Shape(x, end=-1), [outputs], axis=0)
    assert x.shape is not None
    return cast(Tensor, op.Reshape(rows, shape).with_shape((*x.shape[:-1], outputs)))


@named
def linear(
    x: Tensor, name: str, features: int, rng: np.random.Generator, *, init: Init = he
) -> Tensor:
    """Maps the last axis linearly: x Wᵀ + b.

    Args:
        x: A tensor of shape (…, inputs), of rank 2 or more.
        name: The layer's name; ``<name>.weight`` has shape (features, inputs), ``<name>.bias``
            (features,).
        features: The number of outputs.
        rng: Draws the initial weight.
        init: How it is drawn. The bias starts at zero.

    Returns:
        Of shape (…, features).
    """
    weight = x.tape.initializer(f"{name}.weight", init(rng, (features, _size(x, -1))))
    bias = x.tape.initializer(f"{name}.bias", np.zeros(features, np.float32))
    return _affine(x, weight, bias)


@named
def conv(
    x: Tensor,
    name: str,
    channels: int,
    rng: np.random.Generator,
    *,
    kernel: int = 3,
    stride: int = 1,
    bias: bool = True,
) -> Tensor:
    """Convolves images with square kernels; the padding keeps their size at stride 1.

    Args:
        x: Of shape (N, inputs, H, W).
        name: The layer's name; ``<name>.weight`` has shape (channels, inputs, kernel, kernel),
            ``<name>.bias`` (channels,).
        channels: The number of output channels.
        rng: Draws the initial weight by ``he``; the bias starts at zero.
        kernel: The kernel's height and width, an odd number.
        stride: The step in both directions.
        bias: Whether there is a bias; it is redundant before batch normalization.

    Returns:
        Of shape (N, channels, ⌈H / stride⌉, ⌈W / stride⌉).
    """
    weight = x.tape.initializer(f"{name}.weight", he(rng, (channels, _size(x, 1), kernel, kernel)))
    offset = x.tape.initializer(f"{name}.bias", np.zeros(channels, np.float32)) if bias else None
    pads = [kernel // 2] * 4
    y = op.Conv(x, weight, offset, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)
    return cast(Tensor, y)


@named
def max_pool(x: Tensor, name: str, size: int = 2) -> Tensor:
    """Max pooling over squares of pixels; a remainder at the borders is dropped.

    Args:
        x: Of shape (N, channels, H, W), H and W at least ``size``.
        name: The layer's name.
        size: The squares' height and width.

    Returns:
        Of shape (N, channels, ⌊H / size⌋, ⌊W / size⌋).
    """
    if min(_size(x, 2), _size(x, 3)) < size:
        raise ModelError(
            f"layer '{name}': {x!r} is smaller than the {size}×{size} pixels to take the maximum "
            "of; start from larger images or leave layers out"
        )
    return cast(Tensor, op.MaxPool(x, kernel_shape=[size] * 2, strides=[size] * 2))


@named
def batch_norm(x: Tensor, name: str, *, epsilon: float = 1e-5, momentum: float = 0.9) -> Tensor:
    """Normalizes each channel, in inference mode: by the running mean and variance.

    Training switches the node to training mode, which normalizes with batch statistics and updates
    ``<name>.running_mean`` and ``<name>.running_var`` (with the batch's population variance, as in
    ONNX; PyTorch uses the sample variance).

    Args:
        x: Of shape (N, channels, …).
        name: The layer's name; ``<name>.weight`` starts at one and ``<name>.bias`` at zero.
        epsilon: Added to the variance.
        momentum: The weight of the old running values in the new ones (1 minus PyTorch's momentum:
            its 0.1 is 0.9 here).
    """
    ones, zeros = np.ones(_size(x, 1), np.float32), np.zeros(_size(x, 1), np.float32)
    start = {"weight": ones, "bias": zeros, "running_mean": zeros, "running_var": ones}
    state = [x.tape.initializer(f"{name}.{part}", value) for part, value in start.items()]
    return cast(Tensor, op.BatchNormalization(x, *state, epsilon=epsilon, momentum=momentum))


@named
def layer_norm(x: Tensor, name: str, *, epsilon: float = 1e-5) -> Tensor:
    """Normalizes the last axis to mean 0 and variance 1, then scales and shifts it.

    Args:
        x: Of shape (…, features).
        name: The layer's name; ``<name>.weight`` starts at one and ``<name>.bias`` at zero.
        epsilon: Added to the variance.
    """
    weight = x.tape.initializer(f"{name}.weight", np.ones(_size(x, -1), np.float32))
    bias = x.tape.initializer(f"{name}.bias", np.zeros(_size(x, -1), np.float32))
    return cast(Tensor, op.LayerNormalization(x, weight, bias, axis=-1, epsilon=epsilon))


@named
def dropout(x: Tensor, name: str, ratio: float) -> Tensor:
    """Zeroes random elements during training; does nothing in inference.

    Args:
        x: Of any shape.
        name: The layer's name.
        ratio: The fraction of zeroed elements, below 1; with 0, no node is added.
    """
    if ratio == 0:
        return x
    return cast(Tensor, op.Dropout(x, ratio))


@named
def embedding(
    ids: Tensor, name: str, entries: int, features: int, rng: np.random.Generator
) -> Tensor:
    """Looks up a row for each id.

    Args:
        ids: Of an integer type, from 0 to ``entries`` − 1.
        name: The layer's name; ``<name>.weight`` has shape (entries, features).
        entries: The number of rows.
        features: The length of a row.
        rng: Draws the rows.

    Returns:
        Of shape (*ids.shape, features).
    """
    table = ids.tape.initializer(f"{name}.weight", normal(rng, (entries, features)))
    return cast(Tensor, op.Gather(table, ids))


@named
def positions(x: Tensor, name: str, length: int, rng: np.random.Generator) -> Tensor:
    """Adds a learned embedding to each position of a sequence.

    Args:
        x: Of shape (batch, sequence, features); the sequence may be shorter than ``length``, and
            a longer one fails when the model runs.
        name: The layer's name; ``<name>.weight`` has shape (length, features).
        length: The longest sequence.
        rng: Draws the rows.
    """
    features = _size(x, -1)
    table = x.tape.initializer(f"{name}.weight", normal(rng, (length, features)))
    assert x.shape is not None
    if x.shape[1] != length:
        table = table[: op.Shape(x, start=1, end=2)].with_shape([x.shape[1], features])
    return x + table


@named
def attention(
    x: Tensor, name: str, heads: int, rng: np.random.Generator, *, ratio: float = 0.0
) -> Tensor:
    """Attends from every position to every position: softmax(q kᵀ / √d) v in each head.

    After Vaswani et al. 2017; parameters as in ``torch.nn.MultiheadAttention``.

    Args:
        x: Of shape (batch, sequence, features).
        name: The layer's name; ``<name>.in_proj_weight`` of shape (3 · features, features) makes
            queries, keys and values, ``<name>.out_proj.weight`` (features, features) joins the
            heads; both have a bias.
        heads: The number of heads, a divisor of ``features``.
        rng: Draws the initial weights.
        ratio: The fraction of attention weights that dropout zeroes.

    Returns:
        Of the shape of ``x``.
    """
    features = _size(x, -1)
    if features % heads:
        raise ModelError(
            f"layer '{name}': {features} features cannot be split between {heads} heads; "
            "the number of heads must divide them"
        )
    weight = x.tape.initializer(f"{name}.in_proj_weight", glorot(rng, (3 * features, features)))
    bias = x.tape.initializer(f"{name}.in_proj_bias", np.zeros(3 * features, np.float32))

    def split_heads(part: Tensor, perm: list[int]) -> Tensor:  # 0 keeps the dimension
        by_head = op.Reshape(part, [0, 0, heads, features // heads])
        return cast(Tensor, op.Transpose(by_head, perm=perm))

    query, key, value = op.Split(_affine(x, weight, bias), axis=-1, num_outputs=3)
    query = split_heads(query * (features // heads) ** -0.5, [0, 2, 1, 3])
    scores = query @ split_heads(key, [0, 2, 3, 1])
    weights = dropout(op.Softmax(scores, axis=-1), f"{name}.dropout", ratio)
    mixed = op.Transpose(weights @ split_heads(value, [0, 2, 1, 3]), perm=[0, 2, 1, 3])
    joined = op.Reshape(mixed, [0, 0, features])
    return linear(joined, f"{name}.out_proj", features, rng, init=glorot)


@named
def encoder_layer(
    x: Tensor, name: str, heads: int, hidden: int, rng: np.random.Generator, *, ratio: float = 0.0
) -> Tensor:
    """A pre-norm transformer layer: x + attention(norm(x)), then x + feed-forward(norm(x)).

    Parameters, Gelu and dropout as in ``torch.nn.TransformerEncoderLayer`` with
    ``norm_first=True, activation="gelu"``.

    Args:
        x: Of shape (batch, sequence, features).
        name: The prefix of the names ``self_attn``, ``linear1``, ``linear2``, ``norm1``, ``norm2``.
        heads: The number of attention heads.
        hidden: The width of the feed-forward part.
        rng: Draws the initial weights.
        ratio: The fraction of elements that each dropout zeroes.

    Returns:
        Of the shape of ``x``.
    """
    normed = layer_norm(x, f"{name}.norm1")
    attended = attention(normed, f"{name}.self_attn", heads, rng, ratio=ratio)
    x = x + dropout(attended, f"{name}.dropout1", ratio)

    normed = layer_norm(x, f"{name}.norm2")
    widened = op.Gelu(linear(normed, f"{name}.linear1", hidden, rng, init=glorot))
    widened = dropout(widened, f"{name}.dropout", ratio)
    narrowed = linear(widened, f"{name}.linear2", _size(x, -1), rng, init=glorot)
    return x + dropout(narrowed, f"{name}.dropout2", ratio)
