"""Rules of normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.faults import pad_axes
from ortops.graph.shapes import expand_like, reshape_like, size_of, unbroadcast
from ortops.graph.tensor import Tensor, op

Optionals = tuple[Tensor | None, ...]


def _cast(tensors: Sequence[Tensor | None], dtype: np.dtype[Any]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.astype(dtype) for tensor in tensors]


def _like(cotangents: Optionals, primals: Optionals) -> Optionals:
    """Converts each cotangent to the type of its primal."""
    return tuple(
        cotangent if cotangent is None or primal is None else cotangent.astype(primal.dtype)
        for cotangent, primal in zip(cotangents, primals, strict=True)
    )


def _count(x: Tensor, axes: Sequence[int], dtype: np.dtype[Any]) -> int | Tensor:
    """Returns the number of elements along axes, as an int or as a tensor of a type."""
    count = size_of(x, axes)
    return count.astype(dtype) if isinstance(count, Tensor) else count


def _add(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """Shapes a vector with one element per channel (axis 1) so that it broadcasts to ``x``."""
    return vector if x.ndim <= 2 else op.Unsqueeze(vector, [*range(1, x.ndim - 1)])


@vjp("BatchNormalization")
def batch_normalization(
    g: Optionals,
    y: Optionals,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    training_mode: int = 0,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> Cotangents:
    wide = wide_dtype(x, scale, mean)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    g_y, g_mean, g_var = _cast((*g, None, None)[:3], wide)
    wide_x = x.astype(wide)
    count = _count(x, axes, wide)
    if training_mode:
        batch_mean = op.ReduceMean(wide_x, axes, keepdims=1)
        centred = wide_x - batch_mean
        batch_var = op.ReduceMean(centred * centred, axes, keepdims=0)
    else:
        centred = wide_x - per_channel(mean.astype(wide), x)
        batch_var = var.astype(wide)
    inverse_std = op.Reciprocal(op.Sqrt(batch_var + epsilon))

    d_x = d_scale = d_bias = d_mean = d_var = None
    slope = shift = None  # training: d_x = factor · g + slope · centred + shift, per channel
    if g_y is not None:
        factor = scale.astype(wide) * inverse_std
        d_bias = op.ReduceSum(g_y, axes, keepdims=0)
        d_scale = inverse_std * op.ReduceSum(g_y * centred, axes, keepdims=0)
        d_x = g_y * per_channel(factor, x)
        if training_mode:
            slope = -(factor * inverse_std * d_scale / count)
            shift = -(factor * d_bias / count)
        else:
            d_mean = -(factor * d_bias)
            d_var = factor * inverse_std * d_scale * -0.5
    if g_mean is not None:
        d_mean = g_mean * momentum
        shift = _add(shift, g_mean * (1 - momentum) / count)
    if g_var is not None:
        d_var = g_var * momentum
        slope = _add(slope, g_var * (2 * (1 - momentum)) / count)
    if slope is not None:
        d_x = _add(d_x, centred * per_channel(slope, x))
    if shift is not None:
        d_x = _add(d_x, per_channel(shift, x))
    if d_x is not None and g_y is None and g_var is None:
        d_x = expand_like(d_x, x)
    return _like((d_x, d_scale, d_bias, d_mean, d_var), (x, scale, bias, mean, var))


@vjp("LayerNormalization", needs=(1, 2))
def layer_normalization(
    g: Optionals,
    y: Optionals,
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Cotangents:
    _, mean, inverse_std = y
    assert mean is not None
    assert inverse_std is not None
    wide = wide_dtype(x, mean)
    axes = list(range(axis % x.ndim, x.ndim))
    wide_x = x.astype(wide)
    if wide != mean.dtype:  # the saved statistics of a float64 input are float32
        centred = wide_x - op.ReduceMean(wide_x, axes, keepdims=1)
        variance = op.ReduceMean(centred * centred, axes, keepdims=1)
        inverse_std = op.Reciprocal(op.Sqrt(variance + epsilon))
    else:
        centred = wide_x - mean
    count = _count(x, axes, wide)

    g_y, g_mean, g_inverse_std = _cast((*g, None, None)[:3], wide)
    d_x = d_scale = d_bias = None
    slope = shift = None  # d_x = inverse_std · scale · g + slope · centred + shift, per row
    if g_y is not None:
        d_bias = None if bias is None else unbroadcast(g_y, bias)
        product = g_y * centred
        d_scale = _sum_of_scaled_rows(product, inverse_std, scale)
        wide_scale = scale.astype(wide)
        d_x = g_y * wide_scale * inverse_std
        share = wide_scale * (-1 / count)
        square = inverse_std * inverse_std
        slope = _weighted_sum(product, share, axes) * inverse_std * square
        shift = _weighted_sum(g_y, share, axes) * inverse_std
    if g_inverse_std is not None:
        cubed = inverse_std * inverse_std * inverse_std
        slope = _add(slope, -(g_inverse_std * cubed / count))
    if g_mean is not None:
        shift = _add(shift, g_mean / count)
    if slope is not None:
        d_x = _add(d_x, centred * slope)
    if shift is not None:
        d_x = _add(d_x, shift)
    if d_x is not None and g_y is None and g_inverse_std is None:
        d_x = expand_like(d_x, x)
    return _like((d_x, d_scale, d_bias), (x, scale, bias))


def _weighted_sum(x: Tensor, weights: Tensor, axes: Sequence[int]) -> Tensor:
    """Returns the sum over axes of x times weights, with the axes kept.

    For the last axis, it is computed as a matrix product, in one pass over the memory of x.
    """
    if len(axes) == 1 and weights.ndim == 1 and x.shape and x.shape[-1] == (weights.shape or ())[0]:
        return op.MatMul(x, op.Unsqueeze(weights, [1]))
    return op.ReduceSum(x * weights, axes, keepdims=1)


def _sum_of_scaled_rows(x: Tensor, factors: Tensor, like: Tensor) -> Tensor:
    """Returns x times the factors of its rows, summed to the shape of another tensor.

    For the last axis, it is computed as a matrix product, in one pass over the memory of x.
    """
    shape = x.shape or (None,)
    columns = shape[-1]
    if factors.shape == (*shape[:-1], 1) and like.shape == (columns,) and isinstance(columns, int):
        return op.MatMul(op.Reshape(factors, [-1]), op.Reshape(x, [-1, columns]))
    return unbroadcast(x * factors, like)


@vjp("RMSNormalization")
def rms_normalization(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Cotangents:
    wide = wide_dtype(x, scale)
    axes = list(range(axis % x.ndim, x.ndim))
    wide_x = x.astype(wide)
    inverse_rms = op.Reciprocal(op.Sqrt(op.ReduceMean(wide_x * wide_x, axes) + epsilon))
    return _like(rms_vjp(g.astype(wide), wide_x, inverse_rms, scale, axes), (x, scale))


def rms_vjp(
    g: Tensor, x: Tensor, inverse_rms: Tensor, scale: Tensor, axes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns the cotangents of x and scale, given that of x · inverse_rms · scale.

    The factors of rows are multiplied with each other before they are with rows.

    Args:
        g: The cotangent.
        x: The tensor that was normalized, of the same type.
        inverse_rms: The reciprocal of its root mean square over the axes.
        scale: The scale.
        axes: The axes, up to the last one.
    """
    product = g * x
    wide_scale = scale.astype(g.dtype)
    share = wide_scale * (-1 / _count(x, axes, g.dtype))
    slope = _weighted_sum(product, share, axes) * inverse_rms * (inverse_rms * inverse_rms)
    d_x = g * wide_scale * inverse_rms + x * slope
    return d_x, _sum_of_scaled_rows(product, inverse_rms, scale)


@vjp("InstanceNormalization")
def instance_normalization(
    g: Tensor, y: Tensor, x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5
) -> Cotangents:
    wide = wide_dtype(x)
    axes = list(range(2, x.ndim))
    wide_g = g.astype(wide)
    normalized, inverse_std = _standardize(x.astype(wide), axes, epsilon)
    d_x = _standardize_vjp(wide_g, normalized, inverse_std, axes)
    d_x = d_x * per_channel(scale.astype(wide), x)
    d_scale, d_bias = _affine_vjp(wide_g, normalized, x)
    return _like((d_x, d_scale, d_bias), (x, scale, bias))


@vjp("GroupNormalization")
def group_normalization(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Cotangents:
    wide = wide_dtype(x)
    groups = [0, num_groups, -1]
    wide_g = g.astype(wide)
    normalized, inverse_std = _standardize(op.Reshape(x.astype(wide), groups), [2], epsilon)
    scaled = op.Reshape(wide_g * per_channel(scale.astype(wide), x), groups)
    d_x = reshape_like(_standardize_vjp(scaled, normalized, inverse_std, [2]), x)
    d_scale, d_bias = _affine_vjp(wide_g, reshape_like(normalized, x), x)
    return _like((d_x, d_scale, d_bias), (x, scale, bias))


def _standardize(x: Tensor, axes: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns x with mean 0 and variance 1 along axes, and the inverse standard deviation of x."""
    centred = x - op.ReduceMean(x, axes)
    inverse_std = op.Reciprocal(op.Sqrt(op.ReduceMean(centred * centred, axes) + epsilon))
    return centred * inverse_std, inverse_std


def _standardize_vjp(
    g: Tensor, normalized: Tensor, inverse_std: Tensor, axes: Sequence[int]
) -> Tensor:
    """Returns the cotangent of x: projects out the mean of g and its component along normalized."""
    projected = g - op.ReduceMean(g, axes) - normalized * op.ReduceMean(g * normalized, axes)
    return projected * inverse_std


def _affine_vjp(g: Tensor, normalized: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cotangents of the scale and the bias of each channel of x."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    return op.ReduceSum(g * normalized, axes, keepdims=0), op.ReduceSum(g, axes, keepdims=0)


@vjp("MeanVarianceNormalization")
def mean_variance_normalization(
    g: Tensor, y: Tensor, x: Tensor, *, axes: Sequence[int] = (0, 2, 3)
) -> Cotangents:
    wide = wide_dtype(x)
    wide_g = g.astype(wide)
    wide_x = x.astype(wide)
    centred = wide_x - op.ReduceMean(wide_x, list(axes))
    std = op.Sqrt(op.ReduceMean(centred * centred, list(axes)))
    inverse_std = op.Reciprocal(std + 1e-9)  # the constant of the operator's definition
    d_x = _standardize_vjp(wide_g, centred * inverse_std, inverse_std, list(axes))
    return _like((d_x,), (x,))


@vjp("LpNormalization")
def lp_normalization(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1, p: int = 2) -> Cotangents:
    norm = op.ReduceL1(x, [axis]) if p == 1 else op.ReduceL2(x, [axis])
    direction = op.Sign(x) if p == 1 else y
    inverse = op.Reciprocal(op.Where(norm > 0, norm, 1))  # if the norm is 0, y and d_x are 0
    d_x = (g - direction * op.ReduceSum(g * y, [axis])) * inverse
    return op.Where(norm > 0, d_x, 0)


@vjp("LRN")
def lrn(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    *,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    bias: float = 1.0,
) -> Cotangents:
    before, after = (size - 1) // 2, size // 2
    total = _channel_window_sum(x * x, before, after) * (alpha / size) + bias
    # Channel c is in the windows of the channels from c - after to c + before.
    spread = _channel_window_sum(g * y / total, after, before)
    return g * op.Pow(total, -beta) - x * spread * (2 * beta * alpha / size)


def _channel_window_sum(x: Tensor, before: int, after: int) -> Tensor:
    """Sums, for each channel, over it and the given numbers of channels before and after it."""
    channels = size_of(x, [1])
    padded = pad_axes(x, [before, after], None, [1])
    windows = [padded[:, i : channels + i] for i in range(before + after + 1)]
    return op.Sum(*windows).with_shape_of(x)
