"""Definitions of onnxruntime's fused operators, which optimized exports contain.

They are in the domain com.microsoft, except SimplifiedLayerNormalization, which is in the standard
domain. The forward pass keeps products with quantized weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack, cast

import numpy as np

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.convolution import ConvAttributes
from ortops.graph.autodiff.rules.table import definition
from ortops.graph.edit import is_float
from ortops.graph.faults import pad_axes
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.shapes import size_of
from ortops.graph.tensor import Tensor, op

# Activations


@definition("Gelu", domain=MICROSOFT)
def gelu(x: Tensor) -> Cotangents:
    return op.Gelu(x)


@definition("BiasGelu", domain=MICROSOFT)
def bias_gelu(x: Tensor, bias: Tensor) -> Cotangents:
    return op.Gelu(x + bias)


@definition("FastGelu", domain=MICROSOFT)
def fast_gelu(x: Tensor, bias: Tensor | None = None) -> Cotangents:
    return op.Gelu(x if bias is None else x + bias, approximate="tanh")


@definition("QuickGelu", domain=MICROSOFT)
def quick_gelu(x: Tensor, *, alpha: float = 1.702) -> Cotangents:
    return x * op.Sigmoid(x * alpha)


@definition("BiasAdd", domain=MICROSOFT)
def bias_add(x: Tensor, bias: Tensor, skip: Tensor) -> Cotangents:
    return x + bias + skip


ACTIVATIONS = (
    "the activation is Clip, Elu, HardSigmoid, LeakyRelu, Relu, Sigmoid, Softplus, Softsign, Tanh "
    "or ThresholdedRelu"
)


def _activate(x: Tensor, activation: str, parameters: Sequence[float | None]) -> Tensor:
    """Applies an activation with its alpha and beta, or the bounds of Clip."""
    parameters = [parameter for parameter in parameters if parameter is not None]
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, *parameters)
    names = {
        "Elu": ("alpha",),
        "HardSigmoid": ("alpha", "beta"),
        "LeakyRelu": ("alpha",),
        "ThresholdedRelu": ("alpha",),
    }
    given = dict(zip(names.get(activation, ()), parameters, strict=False))
    if activation not in (*names, "Relu", "Sigmoid", "Softplus", "Softsign", "Tanh"):
        raise UnsupportedError(
            f"no gradient for activation '{activation}'; use Clip, Elu, HardSigmoid, LeakyRelu, "
            "Relu, Sigmoid, Softplus, Softsign, Tanh or ThresholdedRelu"
        )
    return cast(Tensor, getattr(op, activation)(x, **given))


# Products


class MatMulAttributes(TypedDict, total=False):
    """The attributes of FusedMatMul."""

    alpha: float
    transA: int
    transB: int
    transBatchA: int
    transBatchB: int


@definition("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(a: Tensor, b: Tensor, **attributes: Unpack[MatMulAttributes]) -> Tensor:
    y = op.MatMul(
        _matrices(a, attributes.get("transA", 0), attributes.get("transBatchA", 0)),
        _matrices(b, attributes.get("transB", 0), attributes.get("transBatchB", 0)),
    )
    alpha = attributes.get("alpha", 1.0)
    return y if alpha == 1 else y * alpha


def _matrices(x: Tensor, transposed: int, batch_transposed: int) -> Tensor:
    """Transposes a factor so that its matrices are on the last two axes."""
    if not (transposed or batch_transposed) or x.ndim < 2:
        return x
    axes = list(range(x.ndim))
    if batch_transposed:  # the first axis belongs to the matrices, and the next ones to the batch
        axes = [*axes[1:-1], axes[0], axes[-1]]
    if transposed:
        axes = [*axes[:-2], axes[-1], axes[-2]]
    return op.Transpose(x, perm=axes)


@definition("FusedMatMulActivation", domain=MICROSOFT, limits=ACTIVATIONS)
def fused_matmul_activation(
    a: Tensor,
    b: Tensor,
    *,
    activation: str,
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
    activation_axis: int | None = None,
    **attributes: Unpack[MatMulAttributes],
) -> Cotangents:
    y = fused_matmul(a, b, **attributes)
    return _activate(y, activation, (activation_alpha, activation_beta))


@definition("FusedGemm", domain=MICROSOFT, limits=ACTIVATIONS)
def fused_gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> Cotangents:
    y = op.Gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _activate(y, activation, (activation_alpha, activation_beta))


@definition("FusedConv", domain=MICROSOFT, limits=ACTIVATIONS)
def fused_conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    **attributes: Unpack[ConvAttributes],
) -> Cotangents:
    y = op.Conv(x, w, bias, **attributes)
    return _activate(y if z is None else y + z, activation, activation_params)


# Normalizations


@definition("Trilu", domain=MICROSOFT)
def trilu(x: Tensor, k: Tensor | None = None, *, upper: int = 1) -> Cotangents:
    return op.Trilu(x, k, upper=upper)


@definition(
    "CausalConvWithState",
    domain=MICROSOFT,
    limits="what the CPU provider supports: ndim=1, and no attributes of states or of channels",
)
def causal_conv_with_state(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    ndim: int = 1,
) -> Cotangents:
    if ndim != 1:
        raise UnsupportedError(f"ndim={ndim} is not supported; use ndim=1")
    sizes = [size for size in w.shape or () if isinstance(size, int)]
    if len(sizes) != 3:
        raise UnsupportedError(f"no gradient for a weight of unknown shape, got {w.shape}")
    channels, reach = sizes[0], (sizes[2] - 1) * dilation
    if past is None:
        zero = op.CastLike(0.0, x)
        before = op.Expand(zero, op.Concat(op.Shape(x, start=0, end=1), [channels, reach], axis=0))
    else:
        before = _channels_second(past, channels) if channels_last else past
    inside = _channels_second(x, channels) if channels_last else x
    joined = op.Concat(before, inside, axis=2)
    y = op.Conv(joined, w, bias, group=channels, dilations=[dilation])
    if activation in ("silu", "swish"):
        y = y * op.Sigmoid(y)
    present = op.Slice(joined, op.Shape(inside, start=2, end=3), [np.iinfo(np.int64).max], [2])
    if channels_last:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1]), op.Shape(x))
        present = op.Reshape(
            op.Transpose(present, perm=[0, 2, 1]),
            op.Concat([0, reach], op.Shape(x, start=2), axis=0),
        )
    return y, present


def _channels_second(x: Tensor, channels: int) -> Tensor:
    """Moves channels, which may be several axes, in front of the sequence."""
    return op.Transpose(op.Reshape(x, [0, 0, channels]), perm=[0, 2, 1])


@definition("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Cotangents:
    total = _skip_sum(x, skip, bias)
    y, mean, inverse_std = op.LayerNormalization(total, gamma, beta, epsilon=epsilon, outputs=3)
    return y, mean, inverse_std, total


@definition(
    "SkipSimplifiedLayerNormalization", domain=MICROSOFT, limits="the output mean is not supported"
)
def skip_simplified_layer_normalization(
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    bias: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
) -> Cotangents:
    total = _skip_sum(x, skip, bias)
    y, inverse_rms = _rms_normalize(total, gamma, -1, epsilon)
    return y, None, inverse_rms, total


def _skip_sum(x: Tensor, skip: Tensor, bias: Tensor | None) -> Tensor:
    # onnxruntime adds in this order.
    return x + skip if bias is None else x + skip + bias


@definition("SimplifiedLayerNormalization")
def simplified_layer_normalization(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Cotangents:
    return _rms_normalize(x, scale, axis, epsilon)


def _rms_normalize(x: Tensor, scale: Tensor, axis: int, epsilon: float) -> tuple[Tensor, Tensor]:
    """Divides by the root mean square over the last axes, and scales."""
    wide = wide_dtype(x)
    wide_x = x.astype(wide)
    axes = list(range(axis % x.ndim, x.ndim))
    # A sum of squares, because the gradient of a mean reads the shape of the squares.
    count = size_of(x, axes)
    count = count if isinstance(count, int) else op.CastLike(count, wide_x)
    mean = op.ReduceSumSquare(wide_x, axes) / count
    inverse_rms = op.Reciprocal(op.Sqrt(mean + epsilon))
    return (wide_x * inverse_rms).astype(scale.dtype) * scale, inverse_rms


@definition(
    "EmbedLayerNormalization",
    domain=MICROSOFT,
    limits="the output mask_index needs mask_index_type=0",
)
def embed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    word_embedding: Tensor,
    position_embedding: Tensor,
    segment_embedding: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor]:
    total = op.Gather(word_embedding, input_ids)
    if position_ids is None:
        length = op.Squeeze(op.Shape(input_ids, start=1, end=2), [0])
        position_ids = op.Range(0, length, 1)
    total = total + op.Gather(position_embedding, position_ids)
    if segment_ids is not None and segment_embedding is not None:
        total = total + op.Gather(segment_embedding, segment_ids)
    y = op.LayerNormalization(total, gamma, beta, epsilon=epsilon)
    index = None
    if mask is not None and mask_index_type == 0:
        index = op.ReduceSum(mask, [1], keepdims=0)
    elif mask is None:
        index = op.Cast(op.ReduceSum(op.Mul(input_ids, 0), [1], keepdims=0), to=6)
    return y, index, total


# Quantized weights


@definition(
    "MatMulNBits",
    domain=MICROSOFT,
    keep=True,
    limits="bits: 2, 4 or 8; no g_idx, no prepacked weights",
)
def matmul_nbits(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Cotangents:
    numbers, scale = _blocks(b, scales, zero_points, g_idx, bits, block_size, N, weight_prepacked)
    y = op.MatMul(a, _rows(numbers * scale, N, K).T)
    return y if bias is None else y + bias


_FOUR_BITS = np.array(
    [
        [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4],
        [0, -1 / 192, -2 / 3, -1, -1 / 3, -1 / 2, -1 / 6, -1 / 4],
    ]
).reshape(-1)
"""The values of the 16 codes of fp4: a sign and a magnitude, as in bitsandbytes."""

_NORMAL_FOUR_BITS = np.array(
    [
        *(-1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1),
    ]
)
"""The values of nf4: quantiles of the normal distribution (https://arxiv.org/abs/2305.14314, E)."""


@definition("MatMulBnb4", domain=MICROSOFT, keep=True, limits="only transB=1")
def matmul_bnb4(
    a: Tensor,
    b: Tensor,
    absmax: Tensor,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    training_mode: int = 0,
    transB: int = 1,
) -> Cotangents:
    if not transB:
        raise UnsupportedError("no gradient for transB=0; use transB=1")
    table = (_NORMAL_FOUR_BITS if quant_type else _FOUR_BITS).astype(absmax.dtype)
    # The first of two numbers is in the upper bits.
    pairs = op.BitShift(op.Unsqueeze(b, [-1]), np.array([4, 0], np.uint8), direction="RIGHT")
    codes = op.Reshape(op.BitwiseAnd(pairs, np.array(15, np.uint8)), [-1])
    numbers = op.Gather(table, codes.astype(np.int64))
    blocks = -(-N * K // block_size)
    filled = pad_axes(numbers[: N * K].with_shape([N * K]), [0, blocks * block_size - N * K])
    scaled = op.Reshape(filled, [blocks, block_size]) * op.Unsqueeze(absmax, [1])
    weights = op.Reshape(op.Reshape(scaled, [-1])[: N * K], [N, K])
    return op.MatMul(a, weights.T)


@definition(
    "GatherBlockQuantized",
    domain=MICROSOFT,
    keep=True,
    limits="only integer data",
)
def gather_block_quantized(
    data: Tensor,
    indices: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Cotangents:
    if is_float(data.value):
        raise UnsupportedError(f"no gradient for data of type {data.dtype}; use an integer type")
    if data.dtype == np.uint8:  # packed in bytes; the default zero point is half of the range
        data = _in_bytes(data, bits)
        if zero_points is None:
            half = np.array([1 << (bits - 1)], np.uint8)
            zero_points = op.ConstantOfShape(op.Shape(scales), value=half)
        else:
            zero_points = _in_bytes(zero_points, bits)
            zero_points = op.Slice(zero_points, [0], op.Shape(scales, start=-1), [-1])
    numbers = op.DequantizeLinear(
        data, scales, zero_points, axis=quantize_axis, block_size=block_size
    )
    return op.Gather(numbers, indices, axis=gather_axis)


def _in_bytes(packed: Tensor, bits: int) -> Tensor:
    """Unpacks numbers that are packed along the last axis, to one byte each."""
    if bits == 8:
        return packed
    return op.Reshape(_unpack(packed, bits), [*(0,) * (packed.ndim - 1), -1])


def _blocks(
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    g_idx: Tensor | None,
    bits: int,
    block_size: int,
    n: int,
    prepacked: int,
) -> tuple[Tensor, Tensor]:
    """Unpacks weights.

    Returns:
        The unscaled weights, (row, block, element), and the scales, (row, block, 1).
    """
    if bits not in (2, 4, 8):
        raise UnsupportedError(f"no gradient for bits={bits}; use 2, 4 or 8")
    if g_idx is not None or prepacked:
        given = "g_idx is given" if g_idx is not None else f"weight_prepacked is {prepacked}"
        raise UnsupportedError(
            f"no gradient for {given}; use weights in their original order, without prepacking"
        )
    scale = op.Reshape(scales, [n, -1, 1])
    numbers = op.Reshape(_unpack(b, bits), [n, -1, block_size]).astype(scales.dtype)
    zero: float | Tensor = float(1 << (bits - 1))
    if zero_points is not None:
        zero = zero_points
        if not is_float(zero.value):
            count = op.Shape(scale, start=1, end=2)
            zero = op.Reshape(_unpack(zero, bits), [n, -1])
            zero = op.Slice(zero, [0], count, [1]).astype(scales.dtype)
        zero = op.Reshape(zero, [n, -1, 1])
    return numbers - zero, scale


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpacks the numbers in bytes to uint8 along a new axis, starting with the lowest bits."""
    if bits == 8:
        return packed
    places = np.arange(0, 8, bits, dtype=np.uint8)
    shifted = op.BitShift(op.Unsqueeze(packed, [-1]), places, direction="RIGHT")
    return op.BitwiseAnd(shifted, np.array((1 << bits) - 1, np.uint8))


def _rows(blocks: Tensor, n: int, k: int) -> Tensor:
    """Returns weights as n rows of k, without the padding of the last block."""
    return op.Reshape(blocks, [n, -1])[:, :k].with_shape([n, k])
