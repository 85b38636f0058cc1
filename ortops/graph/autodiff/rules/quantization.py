"""Rules of quantization with the straight-through estimator.

A quantized tensor is integer, but has a cotangent: that of the real numbers before rounding. A pair
of QuantizeLinear and DequantizeLinear passes a cotangent on unchanged for elements that do not
saturate, and passes 0 for those that do. Scales get the gradient of learned step sizes
(https://arxiv.org/abs/1902.08153), including those computed by DynamicQuantizeLinear. Zero points
are constants. Products and convolutions of quantized tensors are differentiated like those of the
dequantized tensors.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.convolution import ConvAttributes, conv
from ortops.graph.autodiff.rules.linalg import matmul
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.edit import is_float
from ortops.graph.shapes import expand_like, index_range, reshape_like, size_of, unbroadcast
from ortops.graph.tensor import Tensor, ones_like, op

STRAIGHT_THROUGH = "straight-through estimator; first order"


@vjp("QuantizeLinear", quantizes=True, limits=STRAIGHT_THROUGH)
def quantize_linear(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
    saturate: int = 1,
) -> Cotangents:
    if not is_float(x.value):
        return None, None, None
    wide = wide_dtype(g)
    step = _spread(scale, x, axis, block_size).astype(wide)
    ratio = x.astype(wide) / step
    rounded = ratio
    assert y.value.dtype is not None
    if not y.value.dtype.is_floating_point():
        rounded = op.Round(ratio)
    if zero_point is not None:
        # With scale 1, DequantizeLinear converts a zero point of any type to the type of the scale.
        one = np.array(1, scale.dtype)
        shift = op.DequantizeLinear(zero_point, one, axis=0 if zero_point.shape else 1)
        rounded = rounded + _spread(shift, x, axis, block_size).astype(wide)
    low, high = float(y.value.dtype.min), float(y.value.dtype.max)
    inside = op.And(op.GreaterOrEqual(rounded, low), op.LessOrEqual(rounded, high))
    dx = op.Where(inside, g.astype(wide) / step, 0)
    dscale = _gather_up(-(dx * ratio), scale, x, axis, block_size)
    return dx.astype(x.dtype), dscale.astype(scale.dtype), None


@vjp("DequantizeLinear", limits=STRAIGHT_THROUGH)
def dequantize_linear(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Cotangents:
    step = _spread(scale, x, axis, block_size).astype(g.dtype)
    number = op.DequantizeLinear(
        x, ones_like(scale), zero_point, axis=axis, block_size=block_size or None
    )
    dscale = _gather_up(g * number.astype(g.dtype), scale, x, axis, block_size)
    return g * step, dscale.astype(scale.dtype), None


@vjp("DynamicQuantizeLinear", quantizes=True, limits=STRAIGHT_THROUGH)
def dynamic_quantize_linear(
    g: tuple[Tensor | None, ...], y: tuple[Tensor | None, ...], x: Tensor
) -> Cotangents:
    g_y, g_scale, _ = (*g, None, None)[:3]
    scale = y[1]
    assert scale is not None
    dx = None
    if g_y is not None:
        dx = g_y / scale
        through = -op.ReduceSum(dx * x, keepdims=0) / scale
        g_scale = through if g_scale is None else g_scale + through
    if g_scale is None:
        return dx
    # The scale is the width of the range, which includes zero, divided by 255.
    spread = _share(op.Equal(x, op.ReduceMax(x)), x > 0) - _share(
        op.Equal(x, op.ReduceMin(x)), x < 0
    )
    ends = spread * (g_scale * (1 / 255))
    return ends if dx is None else dx + ends


def _share(is_end: Tensor, counts: Tensor) -> Tensor:
    """Returns weights with sum 1, equal for all elements at an end of the range."""
    mask = op.And(is_end, counts).astype(np.float32)
    return mask / op.Max(op.ReduceSum(mask), 1)


@vjp("MatMulInteger", quantizes=True, limits=STRAIGHT_THROUGH)
def matmul_integer(
    g: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    a_zero_point: Tensor | None = None,
    b_zero_point: Tensor | None = None,
) -> Cotangents:
    # A factor has one zero point, or one for each row (a) or column (b).
    if a_zero_point is not None and a_zero_point.ndim == 1 and a.ndim > 1:
        a_zero_point = op.Unsqueeze(a_zero_point, [1])
    left, right = _real(a, a_zero_point, g), _real(b, b_zero_point, g)
    return matmul(g, y, left, right)


@vjp("ConvInteger", quantizes=True, limits=STRAIGHT_THROUGH)
def conv_integer(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    x_zero_point: Tensor | None = None,
    w_zero_point: Tensor | None = None,
    **attributes: Unpack[ConvAttributes],
) -> Cotangents:
    if w_zero_point is not None and w_zero_point.ndim == 1:  # one for each output channel
        w_zero_point = op.Unsqueeze(w_zero_point, list(range(1, w.ndim)))
    # The input is padded with its zero point, which represents zero, as in Conv.
    return conv(g, y, _real(x, x_zero_point, g), _real(w, w_zero_point, g), **attributes)


def _real(x: Tensor, zero_point: Tensor | None, like: Tensor) -> Tensor:
    wide = x.astype(like.dtype)
    return wide if zero_point is None else wide - zero_point.astype(like.dtype)


def _spread(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Shapes a scale per tensor, per index of an axis, or per block to broadcast to x."""
    if scale.ndim == 0 or scale.shape == (1,):
        return scale
    axis %= x.ndim
    if not block_size:
        behind = list(range(1, x.ndim - axis))
        return op.Unsqueeze(scale, behind) if behind else scale
    blocks = op.Div(index_range(size_of(x, [axis]), x), block_size)
    return op.Gather(scale, blocks, axis=axis).with_shape_of(x)


def _gather_up(g: Tensor, scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Sums over the elements that share a scale; the adjoint of `_spread`."""
    g = expand_like(g, x)
    if scale.ndim == 0 or scale.shape == (1,):
        return reshape_like(op.ReduceSum(g, keepdims=0), scale)
    axis %= x.ndim
    if not block_size:
        others = [other for other in range(x.ndim) if other != axis]
        return op.ReduceSum(g, others, keepdims=0) if others else g
    count, size = size_of(scale, [axis]), size_of(x, [axis])
    if isinstance(count, int) and isinstance(size, int):
        missing: int | Tensor = count * block_size - size
    else:
        missing = op.Sub(op.Mul(op.Gather(op.Shape(scale), axis), block_size), size)
    g = op.Pad(g, [0, missing], None, [axis])
    before, behind = [size_of(x, [a]) for a in range(axis)], list(range(axis + 1, x.ndim))
    split = [*before, count, block_size, *(size_of(x, [a]) for a in behind)]
    blocks = op.Reshape(g, split)
    return unbroadcast(op.ReduceSum(blocks, [axis + 1], keepdims=0), scale)
