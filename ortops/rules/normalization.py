"""Rules of normalizations: subtract a mean, divide by a standard deviation, scale and shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from ortops.autodiff import vjp
from ortops.rules._types import Cotangents
from ortops.tensor import Tensor, expand_like, op, size_of, unbroadcast

Optionals = tuple[Tensor | None, ...]


def _wide(*tensors: Tensor | None) -> np.dtype[Any]:
    """Returns the type to compute in: that of the widest tensor, float32 at least."""
    sizes = [tensor.dtype.itemsize for tensor in tensors if tensor is not None]
    return np.dtype(np.float64 if max(sizes) == 8 else np.float32)


def _cast(tensors: Sequence[Tensor | None], dtype: np.dtype[Any]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.astype(dtype) for tensor in tensors]


def _like(cotangents: Optionals, primals: Optionals) -> Optionals:
    """Gives each cotangent the type of its primal."""
    return tuple(
        cotangent if cotangent is None or primal is None else cotangent.astype(primal.dtype)
        for cotangent, primal in zip(cotangents, primals, strict=True)
    )


def _count(x: Tensor, axes: Sequence[int], dtype: np.dtype[Any]) -> int | Tensor:
    """Returns the number of elements along axes, to divide a tensor of a type by."""
    count = size_of(x, axes)
    return count.astype(dtype) if isinstance(count, Tensor) else count


def _add(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """Shapes a vector of one number per channel (axis 1) so that it broadcasts to ``x``."""
    return vector if x.ndim <= 2 else cast(Tensor, op.Unsqueeze(vector, [*range(1, x.ndim - 1)]))


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
    wide = _wide(x, scale, mean)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    g_y, g_mean, g_var = _cast((*g, None, None)[:3], wide)
    wide_x = x.astype(wide)
    count = _count(x, axes, wide)
    if training_mode:
        batch_mean = op.ReduceMean(wide_x, axes, keepdims=1)
        centred = wide_x - batch_mean
        batch_var = op.ReduceMean(centred * centred, axes, keepdims=0)
    else:
        centred = wide_x - _per_channel(mean.astype(wide), x)
        batch_var = var.astype(wide)
    inverse_std = op.Reciprocal(op.Sqrt(batch_var + epsilon))

    d_x = d_scale = d_bias = d_mean = d_var = None
    slope = shift = None  # training: d_x = factor · g + slope · centred + shift, per channel
    if g_y is not None:
        factor = scale.astype(wide) * inverse_std
        d_bias = op.ReduceSum(g_y, axes, keepdims=0)
        d_scale = inverse_std * op.ReduceSum(g_y * centred, axes, keepdims=0)
        d_x = g_y * _per_channel(factor, x)
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
        d_x = _add(d_x, centred * _per_channel(slope, x))
    if shift is not None:
        d_x = _add(d_x, _per_channel(shift, x))
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
    wide = _wide(x, mean)
    axes = list(range(axis % x.ndim, x.ndim))
    wide_x = x.astype(wide)
    if wide != mean.dtype:  # the saved statistics of a float64 input are float32
        centred = wide_x - op.ReduceMean(wide_x, axes, keepdims=1)
        variance = op.ReduceMean(centred * centred, axes, keepdims=1)
        inverse_std = op.Reciprocal(op.Sqrt(variance + epsilon))
    else:
        centred = wide_x - mean
    normalized = centred * inverse_std

    g_y, g_mean, g_inverse_std = _cast((*g, None, None)[:3], wide)
    d_x = d_scale = d_bias = None
    slope = shift = None  # d_x = inverse_std · scale · g + slope · normalized + shift, per row
    if g_y is not None:
        d_bias = None if bias is None else unbroadcast(g_y, bias)
        product = g_y * normalized
        d_scale = unbroadcast(product, scale)
        scaled = g_y * scale.astype(wide)
        slope = -(inverse_std * op.ReduceMean(scaled * normalized, axes, keepdims=1))
        shift = -(inverse_std * op.ReduceMean(scaled, axes, keepdims=1))
        d_x = scaled * inverse_std
    count = _count(x, axes, wide)
    if g_inverse_std is not None:
        slope = _add(slope, -(g_inverse_std * inverse_std * inverse_std / count))
    if g_mean is not None:
        shift = _add(shift, g_mean / count)
    if slope is not None:
        d_x = _add(d_x, normalized * slope)
    if shift is not None:
        d_x = _add(d_x, shift)
    if d_x is not None and g_y is None and g_inverse_std is None:
        d_x = expand_like(d_x, x)
    return _like((d_x, d_scale, d_bias), (x, scale, bias))
