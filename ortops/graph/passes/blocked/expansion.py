"""Expansion of operators on blocked tensors to onnxruntime's nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import attribute_values, emit_one, has_one_reader
from ortops.graph.names import Names
from ortops.graph.passes.blocked import kernels
from ortops.graph.passes.blocked.kernels import KERNEL_DOMAIN, affine, reshape, sizes
from ortops.graph.passes.blocked.rules import DOMAIN, all_phases, by_phases, windows_on
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, Tensor, op


def expand(graph: ir.Graph, names: Names) -> None:
    """Replaces operators on blocked tensors with nodes that onnxruntime supports.

    Args:
        graph: The graph; it is modified in place.
        names: The names used in it.
    """
    rewrite(graph, names, _expanded)
    rewrite(graph, names, _sum_in_convolution, _relu_in_convolution)


def _expand_block(x: Tensor, *, block: int) -> Tensor:
    same = math.prod(sizes(x)[2:]) == 1 and sizes(x)[1] % block == 0
    return x if same else kernels.to_blocks(x, block)


def _expand_unblock(x: Tensor, *, block: int, channels: int) -> Tensor:
    same = math.prod(sizes(x)[2:]) == 1 and sizes(x)[1] == channels
    return x if same else kernels.to_plain(x, channels)


def _expand_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    block: int,
    dilations: Sequence[int],
    group: int,
    pads: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    n, _, *lengths = sizes(x)
    m, _, *kernel = sizes(w)
    counts = windows_on(kernel, strides, dilations, pads).counts(lengths)
    return kernels.convolve(
        x,
        kernels.filter_of(w, block),
        (n, m, *counts),
        kernel=kernel,
        bias=b,
        strides=strides,
        dilations=dilations,
        pads=pads,
        group=group,
    )


def _expand_conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    block: int,
    lengths: Sequence[int],
    pads: Sequence[int],
    strides: Sequence[int],
) -> Tensor:
    n, _, *counts = sizes(x)
    _, m, *kernel = sizes(w)
    at = windows_on(kernel, strides, (1, 1), pads)
    phases = all_phases(kernel, lengths, counts, at)
    assert phases is not None
    return by_phases(x, w, (n, m, *lengths), at, phases, block, b)


def _expand_batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    block: int,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, ...]:
    n, channels, height, width = sizes(x)
    means = kernels.channel_means(x)
    centred = affine(x, None, kernels.image_sums(means, -1 / n))
    squares = kernels.products(centred, centred)
    share = 1 / (n * height * width)
    variance = kernels.image_sums(squares, share, epsilon)
    y = affine(centred, scale / op.Sqrt(variance), bias)
    rest = 1 - momentum
    new_mean = kernels.image_sums(means, rest / n, running_mean, momentum)
    new_var = kernels.image_sums(squares, rest * share, running_var, momentum)
    return y, reshape(new_mean, channels), reshape(new_var, channels), centred, variance


def _expand_relu(x: Tensor, *, exact: int) -> Tensor:
    return op.Relu(x)


def _expand_clip(
    x: Tensor, *, exact: int, low: float | None = None, high: float | None = None
) -> Tensor:
    return op.Clip(x, *(None if bound is None else np.float32(bound) for bound in (low, high)))


def _expand_max_pool(x: Tensor, *, block: int, kernel_shape: Sequence[int], exact: int) -> Tensor:
    n, channels, *lengths = sizes(x)
    counts = [length // step for length, step in zip(lengths, kernel_shape, strict=True)]
    attributes = {"kernel_shape": list(kernel_shape), "strides": list(kernel_shape)}
    return emit_one(KERNEL_DOMAIN, "MaxPool", [x], (n, channels, *counts), **attributes)


def _expand_global_average_pool(x: Tensor, *, block: int) -> Tensor:
    return kernels.channel_means(x)


_EXPANSIONS: Mapping[str, Callable[..., Result]] = {
    "Affine": affine,
    "BatchNormalization": _expand_batch_normalization,
    "Block": _expand_block,
    "Clip": _expand_clip,
    "Conv": _expand_conv,
    "ConvTranspose": _expand_conv_transpose,
    "Gate": kernels.gated,
    "GlobalAveragePool": _expand_global_average_pool,
    "MaxPool": _expand_max_pool,
    "Relu": _expand_relu,
    "Scale": affine,
    "Unblock": _expand_unblock,
}


@pattern(*_EXPANSIONS, domain=DOMAIN)
def _expanded(node: ir.Node, tape: Tape) -> Result:
    tensors = [None if value is None else tape.tensor(value) for value in node.inputs]
    return _EXPANSIONS[node.op_type](*tensors, **attribute_values(node))


@pattern("Relu")
def _relu_in_convolution(node: ir.Node, tape: Tape) -> Result:
    """Fuses a Relu into the convolution before it."""
    (x,) = node.inputs
    assert x is not None
    conv = _convolution(x)
    if conv is None:
        return None
    conv.attributes["activation"] = ir.AttrString("activation", "Relu")
    return tape.tensor(x)


@pattern("Add")
def _sum_in_convolution(node: ir.Node, tape: Tape) -> Result:
    """Fuses an Add into a convolution before it, which adds while it writes its result."""
    a, b = node.inputs
    assert a is not None
    assert b is not None
    x, other = (b, a) if _convolution(b) is not None else (a, b)
    conv = _convolution(x)
    if conv is None or len(conv.inputs) > 3 or other.shape != x.shape or other is x:
        return None
    inputs = [*conv.inputs, None][:3]
    tensors = [None if value is None else tape.tensor(value) for value in (*inputs, other)]
    return emit_one(KERNEL_DOMAIN, "Conv", tensors, x.shape, **attribute_values(conv))


def _convolution(value: ir.Value) -> ir.Node | None:
    """Returns the convolution that computes a value, if it has one consumer and no activation."""
    conv = value.producer()
    if (
        conv is not None
        and (conv.domain, conv.op_type) == (KERNEL_DOMAIN, "Conv")
        and "activation" not in conv.attributes
        and has_one_reader(value)
    ):
        return conv
    return None
