"""Definitions of operators on quantized tensors: DequantizeLinear, the operator, QuantizeLinear.

The forward pass keeps the integer operators, because real numbers would round differently. The
backward pass dequantizes the tensors again, and uses the straight-through estimator (see
`ortops.graph.autodiff.rules.quantization`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.attention import Scoring, attend_projected
from ortops.graph.autodiff.rules.convolution import ConvAttributes, PoolAttributes
from ortops.graph.autodiff.rules.microsoft import embed_layer_normalization
from ortops.graph.autodiff.rules.quantization import STRAIGHT_THROUGH
from ortops.graph.autodiff.rules.recurrent import RecurrentAttributes
from ortops.graph.autodiff.rules.table import definition
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.shapes import reshape_like
from ortops.graph.tensor import Tensor, op

_F = TypeVar("_F", bound=Callable[..., Any])


def _on_integers(op_type: str, domain: str = "") -> Callable[[_F], _F]:
    """Registers the definition of an operator on quantized tensors."""
    return definition(op_type, domain=domain, keep=True, quantizes=True, limits=STRAIGHT_THROUGH)


def _on_real(
    op_type: str, domain: str = MICROSOFT, *, axes: Sequence[int] = (), plain: int = 0
) -> Callable[[_F], _F]:
    """Registers the definition of an operator by a function of real numbers.

    The operator has three inputs for each tensor of the function: the quantized tensor, its scale
    and its zero point. After them come the scale and the zero point of the result.

    Args:
        op_type: The operator.
        domain: Its domain.
        axes: The axis of each tensor's scale, if that is a vector; the last one by default.
        plain: The number of first inputs that are not quantized.
    """

    def register(function: _F) -> _F:
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        count = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - plain

        @functools.wraps(function)
        def quantized(*inputs: Any, **attributes: Any) -> Tensor:
            end = plain + 3 * count
            numbers, scales, zero_points = (inputs[plain + i : end : 3] for i in range(3))
            reals = map(real, numbers, scales, zero_points, axes or (-1,) * count)
            y = function(*inputs[:plain], *reals, **attributes)
            y_scale, y_zero_point = (*inputs[end:], None)[:2]
            return _integers(y, y_scale, y_zero_point, numbers[0])

        _on_integers(op_type, domain)(quantized)
        return function

    return register


def _is_one(scale: Tensor) -> bool:
    """Whether there is one scale for the whole tensor."""
    return scale.ndim == 0 or scale.shape == (1,)


def real(x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int = -1) -> Tensor:
    """Dequantizes a tensor.

    Args:
        x: The integers.
        scale: The scale: a scalar, a vector along an axis, or a tensor that broadcasts to x.
        zero_point: The zero point, of the same shape; 0 by default.
        axis: The axis of a vector of scales.
    """
    if _is_one(scale):
        return op.DequantizeLinear(x, scale, zero_point)
    if scale.ndim == 1:
        return op.DequantizeLinear(x, scale, zero_point, axis=axis % x.ndim)
    number = _cast_like(x, scale)
    if zero_point is not None:
        number = number - _cast_like(zero_point, scale)
    return number * scale


def _integers(y: Tensor, scale: Tensor, zero_point: Tensor | None, like: Tensor) -> Tensor:
    """Quantizes to the type of the zero point, or of another tensor if there is no zero point."""
    kind = like.value.dtype if zero_point is None else None
    return op.QuantizeLinear(y, scale, zero_point, output_dtype=kind)


@_on_real("QLinearMatMul", "", axes=(-2, -1))  # for rows on the left, for columns on the right
def qlinear_matmul(a: Tensor, b: Tensor) -> Tensor:
    return op.MatMul(a, b)


@_on_integers("QLinearConv")
def qlinear_conv(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero_point: Tensor,
    y_scale: Tensor,
    y_zero_point: Tensor,
    bias: Tensor | None = None,
    **attributes: Unpack[ConvAttributes],
) -> Tensor:
    y = op.Conv(
        real(x, x_scale, x_zero_point, 1),
        real(w, w_scale, w_zero_point, 0),
        None if bias is None else _cast_like(bias, w_scale) * (x_scale * w_scale),
        **attributes,
    )
    return _integers(y, y_scale, y_zero_point, x)


# onnxruntime's operators


@_on_integers("QLinearConv", domain=MICROSOFT)
def qlinear_conv_with_layout(
    x: Tensor, *others: Tensor, channels_last: int = 0, **attributes: Unpack[ConvAttributes]
) -> Cotangents:
    y = qlinear_conv(_channels_second(x, channels_last), *others, **attributes)
    return _as_in(x, y, channels_last)


@definition("NhwcMaxPool", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def nhwc_max_pool(x: Tensor, **attributes: Unpack[PoolAttributes]) -> Cotangents:
    return _as_in(x, op.MaxPool(_channels_second(x, 1), **attributes), 1)


@_on_real("QLinearAdd")
def qlinear_add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@_on_real("QLinearMul")
def qlinear_mul(a: Tensor, b: Tensor) -> Tensor:
    return a * b


@_on_real("QLinearWhere", plain=1)
def qlinear_where(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return op.Where(condition, a, b)


@_on_integers("QLinearConcat", domain=MICROSOFT)
def qlinear_concat(y_scale: Tensor, y_zero_point: Tensor, *parts: Tensor, axis: int) -> Cotangents:
    numbers = [real(*part) for part in zip(parts[::3], parts[1::3], parts[2::3], strict=True)]
    return _integers(op.Concat(*numbers, axis=axis), y_scale, y_zero_point, parts[0])


@_on_real("QLinearSigmoid")
def qlinear_sigmoid(x: Tensor) -> Tensor:
    return op.Sigmoid(x)


@_on_real("QLinearLeakyRelu")
def qlinear_leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return op.LeakyRelu(x, alpha=alpha)


@_on_real("QLinearSoftmax")
def qlinear_softmax(x: Tensor, *, opset: int, axis: int = -1) -> Tensor:
    if opset >= 13:
        return op.Softmax(x, axis=axis)
    # Before opset 13, Softmax normalizes over the axis and all axes after it.
    return reshape_like(op.Softmax(op.Flatten(x, axis=axis), axis=-1), x)


@_on_real("QLinearAveragePool")
def qlinear_average_pool(
    x: Tensor,
    *,
    channels_last: int = 0,
    count_include_pad: int = 0,
    **attributes: Unpack[PoolAttributes],
) -> Tensor:
    images = _channels_second(x, channels_last)
    y = op.AveragePool(images, count_include_pad=count_include_pad, **attributes)
    return _as_in(x, y, channels_last)


@_on_real("QLinearGlobalAveragePool")
def qlinear_global_average_pool(x: Tensor, *, channels_last: int = 0) -> Tensor:
    images = _channels_second(x, channels_last)
    return _as_in(x, op.GlobalAveragePool(images), channels_last)


def _channels_second(x: Tensor, channels_last: int) -> Tensor:
    perm = [0, x.ndim - 1, *range(1, x.ndim - 1)]
    return op.Transpose(x, perm=perm) if channels_last else x


def _as_in(x: Tensor, y: Tensor, channels_last: int) -> Tensor:
    """Moves the channels of y, which are second, to their position in x."""
    perm = [0, *range(2, x.ndim), 1]
    return op.Transpose(y, perm=perm) if channels_last else y


@_on_integers("QGemm", domain=MICROSOFT)
def qgemm(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    c: Tensor | None = None,
    y_scale: Tensor | None = None,
    y_zero_point: Tensor | None = None,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Cotangents:
    left, right = real(a, a_scale, a_zero_point), real(b, b_scale, b_zero_point, 1 - transB)
    bias = None if c is None else _cast_like(c, a_scale) * (a_scale * b_scale * alpha)
    y = op.Gemm(left, right, bias, alpha=alpha, transA=transA, transB=transB)
    return y if y_scale is None else _integers(y, y_scale, y_zero_point, a)


@definition("QuantizeLinear", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def quantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1
) -> Cotangents:
    return op.QuantizeLinear(x, scale, zero_point, axis=0 if _is_one(scale) else axis)


@definition("DequantizeLinear", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int = 1
) -> Cotangents:
    return op.DequantizeLinear(x, scale, zero_point, axis=0 if _is_one(scale) else axis)


@definition("DynamicQuantizeMatMul", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def dynamic_quantize_matmul(
    a: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Cotangents:
    numbers, scale, zero_point = op.DynamicQuantizeLinear(a)
    return matmul_integer_to_float(numbers, b, scale, b_scale, zero_point, b_zero_point, bias)


@definition("MatMulIntegerToFloat", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def matmul_integer_to_float(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_zero_point: Tensor | None = None,
    b_zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    product = op.MatMulInteger(a, b, a_zero_point, b_zero_point)
    y = _cast_like(product, a_scale) * (a_scale * b_scale)
    return y if bias is None else y + bias


@definition(
    "QAttention", domain=MICROSOFT, limits=f"{STRAIGHT_THROUGH}; no do_rotary, no shared buffer"
)
def qattention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    mask_index: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
    past: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    past_present_share_buffer: int = 0,
    **attributes: Unpack[Scoring],
) -> Cotangents:
    if do_rotary or past_present_share_buffer:
        raise UnsupportedError(
            f"no gradient for do_rotary={do_rotary} with "
            f"past_present_share_buffer={past_present_share_buffer}; use 0 for both"
        )
    projected = matmul_integer_to_float(
        x, weights, x_scale, weight_scale, x_zero_point, weight_zero_point, bias
    )
    return attend_projected(projected, mask_index, past, None, num_heads=num_heads, **attributes)


@definition("QEmbedLayerNormalization", domain=MICROSOFT, limits=STRAIGHT_THROUGH)
def qembed_layer_normalization(
    input_ids: Tensor,
    segment_ids: Tensor | None,
    words: Tensor,
    positions: Tensor,
    segments: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None,
    words_scale: Tensor,
    positions_scale: Tensor,
    segments_scale: Tensor | None,
    gamma_scale: Tensor,
    beta_scale: Tensor,
    words_zero_point: Tensor,
    positions_zero_point: Tensor,
    segments_zero_point: Tensor | None,
    gamma_zero_point: Tensor,
    beta_zero_point: Tensor,
    *,
    epsilon: float = 1e-12,
) -> Cotangents:
    of_segments = None
    if segments is not None and segments_scale is not None:
        of_segments = real(segments, segments_scale, segments_zero_point)
    y, index, _ = embed_layer_normalization(
        input_ids,
        segment_ids,
        real(words, words_scale, words_zero_point),
        real(positions, positions_scale, positions_zero_point),
        of_segments,
        real(gamma, gamma_scale, gamma_zero_point),
        real(beta, beta_scale, beta_zero_point),
        mask,
        epsilon=epsilon,
    )
    return y, index


@definition("DynamicQuantizeLSTM", domain=MICROSOFT, keep=True, limits=STRAIGHT_THROUGH)
def dynamic_quantize_lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    sequence_lens: Tensor | None,
    initial_h: Tensor | None,
    initial_c: Tensor | None,
    p: Tensor | None,
    w_scale: Tensor,
    w_zero_point: Tensor,
    r_scale: Tensor,
    r_zero_point: Tensor,
    *,
    input_forget: int = 0,
    **attributes: Unpack[RecurrentAttributes],
) -> Cotangents:
    weights = [_transposed(w, w_scale, w_zero_point), _transposed(r, r_scale, r_zero_point)]
    others = (b, sequence_lens, initial_h, initial_c, p)
    return op.LSTM(x, *weights, *others, input_forget=input_forget, outputs=3, **attributes)


def _transposed(w: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """Dequantizes weights to the layout of LSTM, (direction, column, row).

    Args:
        w: The integers, (direction, row, column).
        scale: The scales, (direction,) or (direction, column).
        zero_point: The zero points, of the same shape.
    """
    axes = [1] if scale.ndim == 2 else [1, 2]
    scale, zero_point = op.Unsqueeze(scale, axes), op.Unsqueeze(zero_point, axes)
    return op.Transpose(real(w, scale, zero_point), perm=[0, 2, 1])


def _cast_like(x: Tensor, like: Tensor) -> Tensor:
    """Converts a tensor to the type of another one.

    onnxruntime has no kernel for CastLike, and warns of each one that it cannot fold.
    """
    return op.CastLike(x, like) if like.value.dtype is None else x.astype(like.dtype)
