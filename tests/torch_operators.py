"""What ONNX's operators mean, in PyTorch's own functions, and graphs run with them.

Each function takes an operator's inputs as tensors (None where one is absent, lists for sequences)
and its attributes with ONNX's defaults, and returns its outputs; None for one without a use here.
Where PyTorch has the operator, that is called, with its choices at kinks and ties.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

F = torch.nn.functional
Values = dict[str, Any]

OPERATORS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Add": torch.add,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Celu": lambda x, alpha=1.0: F.celu(x, alpha),
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.linalg.det,
    "Div": torch.div,
    "Einsum": lambda *xs, equation: torch.einsum(equation, *xs),
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Erf": torch.erf,
    "Equal": torch.eq,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "GlobalAveragePool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdim=True),
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Log": torch.log,
    "LogSoftmax": lambda x, axis=-1: F.log_softmax(x, axis),
    "MatMul": torch.matmul,
    "Mean": lambda *xs: sum(xs) / len(xs),
    "Mish": F.mish,
    "Mod": lambda a, b, fmod=0: torch.fmod(a, b) if fmod else torch.remainder(a, b),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Optional": lambda x, type=None: x,  # noqa: A006
    "OptionalGetElement": lambda x: x,
    "Pow": torch.pow,
    "Reciprocal": torch.reciprocal,
    "Relu": F.relu,
    "Round": torch.round,
    "Selu": lambda x, alpha=1.6732632423543772, gamma=1.0507009873554805: gamma * F.elu(x, alpha),
    "SequenceAt": lambda values, position: values[int(position)],
    "SequenceConstruct": lambda *values: list(values),
    "SequenceEmpty": lambda dtype=1: [],
    "Shape": lambda x, start=0, end=None: torch.tensor(x.shape[start:end]),
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softmax": lambda x, axis=-1: F.softmax(x, axis),
    "Softplus": lambda x: F.softplus(x, threshold=1000),
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Sum": lambda *xs: sum(xs[1:], xs[0]),
    "Swish": lambda x, alpha=1.0: F.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x),
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "ThresholdedRelu": lambda x, alpha=1.0: F.threshold(x, alpha, 0),
    "Tile": lambda x, repeats: torch.tile(x, repeats.tolist()),
    "Where": torch.where,
}


class Inexpressible(Exception):  # noqa: N818
    """PyTorch has no function for a form of an operator; the text says which."""


def operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a function to the table."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return add


def evaluate(graph: onnx.GraphProto, values: Values, **extra: Any) -> Values:
    """Runs a graph.

    Args:
        graph: The graph.
        values: Inputs and values of outer graphs by name.
        extra: Further keyword arguments of the operators of the graph.

    Returns:
        The outputs by name.
    """
    values = dict(values)
    for initializer in graph.initializer:
        values[initializer.name] = constant(numpy_helper.to_array(initializer))
    for node in graph.node:
        attributes = {a.name: _attribute(a) for a in node.attribute}
        if node.op_type in ("If", "Loop", "Scan", "SequenceMap"):
            attributes["outer"] = values
        if node.op_type == "Split":
            attributes.setdefault("num_outputs", len(node.output))
        inputs = [values[name] if name else None for name in node.input]
        results = OPERATORS[node.op_type](*inputs, **attributes, **extra)
        if not isinstance(results, tuple):
            results = (results,)
        values.update(zip(node.output, results, strict=False))
    return {value.name: values.get(value.name) for value in graph.output}


_computes_in: ContextVar[Any] = ContextVar("computes_in", default=np.float64)


@contextlib.contextmanager
def precision(dtype: Any) -> Iterator[None]:
    """Lets graphs run in another type than float64."""
    token = _computes_in.set(dtype)
    try:
        yield
    finally:
        _computes_in.reset(token)


def constant(array: np.ndarray) -> Any:
    """Returns an array as a tensor: floating point in `precision`, other types in int64."""
    if array.dtype.name.startswith(("float", "bfloat")):
        return torch.from_numpy(np.array(array, _computes_in.get()))
    if array.dtype == bool:
        return torch.from_numpy(np.array(array))
    return torch.from_numpy(np.array(array, np.int64))


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [item.decode() for item in value]
    return value


# Elementwise


@operator("Cast", "CastLike")
def cast(x: Any, like: Any = None, to: int = 1, saturate: int = 1, round_mode: str = "up") -> Any:
    is_float = like.is_floating_point() if like is not None else to in (1, 10, 11, 16)
    if not is_float:
        return x.to(torch.int64)
    return x.to(
        constant(np.zeros(0)).dtype
    )  # the comparison's tolerance is that of the narrower type


@operator("Clip")
def clip(x: Any, low: Any = None, high: Any = None) -> Any:
    return x if low is None and high is None else torch.clamp(x, low, high)


@operator("Constant")
def constant_node(**attributes: Any) -> Any:
    ((kind, value),) = attributes.items()
    return constant(numpy_helper.to_array(value) if kind == "value" else np.asarray(value))


@operator("HardSigmoid")
def hard_sigmoid(x: Any, alpha: float = 0.2, beta: float = 0.5) -> Any:
    # F.hardsigmoid has slope 1/6 and takes what x = ±3 is.
    return F.hardsigmoid(6 * alpha * x + 6 * (beta - 0.5))


@operator("Max")
def maximum(first: Any, *others: Any) -> Any:
    for other in others:
        first = torch.maximum(first, other)
    return first


@operator("Min")
def minimum(first: Any, *others: Any) -> Any:
    for other in others:
        first = torch.minimum(first, other)
    return first


@operator("PRelu")
def prelu(x: Any, slope: Any) -> Any:
    flat = F.prelu(x.reshape(1, -1), slope.expand_as(x).reshape(-1))
    return flat.reshape(x.shape)


@operator("Shrink")
def shrink(x: Any, lambd: float = 0.5, bias: float = 0.0) -> Any:
    if bias == lambd:
        return F.softshrink(x, lambd)
    return F.hardshrink(x, lambd) - bias * torch.sign(F.hardshrink(x, lambd)).detach()


@operator("Dropout")
def dropout(
    x: Any, ratio: Any = None, training: Any = None, mask: Any = None, **attributes: Any
) -> Any:
    if training is None or not bool(training):
        return x, torch.ones_like(x, dtype=torch.bool)
    ratio = 0.5 if ratio is None else ratio.detach()
    return torch.where(mask, x, 0.0) / (1 - ratio), mask


# Quantization


@operator("DequantizeLinear")
def dequantize(
    x: Any, scale: Any, zero: Any = None, axis: int = 1, block_size: int = 0, **attributes: Any
) -> Any:
    def spread(parameter: Any) -> Any:
        if block_size:
            repeated = parameter.repeat_interleave(block_size, axis)
            return repeated.narrow(axis, 0, x.shape[axis])
        if parameter.ndim == 1:
            return parameter.reshape([-1 if d == axis % x.ndim else 1 for d in range(x.ndim)])
        return parameter

    return ((x - spread(zero)) if zero is not None else x) * spread(scale)


@operator("DynamicQuantizeLinear")
def dynamic_quantize(x: Any) -> Any:
    zero = torch.zeros((), dtype=x.dtype)
    return None, (torch.maximum(x.amax(), zero) - torch.minimum(x.amin(), zero)) / 255, None


# Reductions


def _axes(x: Any, axes: Any, noop: int) -> tuple[int, ...]:
    given = () if axes is None else tuple(axes.tolist())
    return given if given or noop else tuple(range(x.ndim))


def reduction(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds a reduction, a function of a tensor, axes and whether to keep these."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(
            x: Any, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0
        ) -> Any:
            chosen = _axes(x, axes, noop_with_empty_axes)
            return function(x, chosen, bool(keepdims)) if chosen or x.ndim == 0 else x

        OPERATORS[name] = reduce
        return function

    return add


reduction("ReduceL1")(lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keep))
reduction("ReduceL2")(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keep))
reduction("ReduceLogSum")(lambda x, axes, keep: x.sum(axes, keep).log())
reduction("ReduceLogSumExp")(torch.logsumexp)
reduction("ReduceMax")(torch.amax)
reduction("ReduceMean")(torch.mean)
reduction("ReduceMin")(torch.amin)
reduction("ReduceSum")(torch.sum)
reduction("ReduceSumSquare")(lambda x, axes, keep: x.square().sum(axes, keep))


@reduction("ReduceProd")
def product(x: Any, axes: tuple[int, ...], keep: bool) -> Any:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = torch.prod(x, axis, keep)
    return x


@operator("CumSum", "CumProd")
def cumulate(x: Any, axis: Any, exclusive: int = 0, reverse: int = 0, *, function: Any) -> Any:
    axis = int(axis)
    x = x.flip(axis) if reverse else x
    if exclusive:
        first = (torch.zeros_like if function is torch.cumsum else torch.ones_like)(
            x.narrow(axis, 0, 1)
        )
        x = torch.cat([first, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
    x = function(x, axis)
    return x.flip(axis) if reverse else x


OPERATORS["CumSum"] = lambda *a, **k: cumulate(*a, **k, function=torch.cumsum)
OPERATORS["CumProd"] = lambda *a, **k: cumulate(*a, **k, function=torch.cumprod)


@operator("TopK")
def top_k(x: Any, k: Any, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:  # noqa: A002
    return tuple(torch.topk(x, int(k), axis, bool(largest), bool(sorted)))


@operator("Hardmax")
def hardmax(x: Any, axis: int = -1) -> Any:
    hot = F.one_hot(x.argmax(axis), x.shape[axis]).movedim(-1, axis)
    return hot.to(x.dtype)


# Shapes


@operator("Expand")
def expand(x: Any, shape: Any) -> Any:
    return torch.broadcast_to(x, torch.broadcast_shapes(x.shape, tuple(shape.tolist())))


@operator("Flatten")
def flatten(x: Any, axis: int = 1) -> Any:
    axis = axis % x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


@operator("Reshape")
def reshape(x: Any, shape: Any, allowzero: int = 0) -> Any:
    dims = shape.tolist()
    if not allowzero:
        dims = [x.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)]
    return x.reshape(dims)


def _list(values: Any) -> list[int]:
    """Returns integers, which older operators take as an attribute."""
    return list(values) if isinstance(values, list) else values.tolist()


@operator("Squeeze")
def squeeze(x: Any, axes: Any = None) -> Any:
    return torch.squeeze(x) if axes is None else torch.squeeze(x, tuple(_list(axes)))


@operator("Unsqueeze")
def unsqueeze(x: Any, axes: Any) -> Any:
    axes = _list(axes)
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = torch.unsqueeze(x, axis)
    return x


@operator("Transpose")
def transpose(x: Any, perm: Sequence[int] | None = None) -> Any:
    return x.permute(perm if perm is not None else list(reversed(range(x.ndim))))


@operator("Concat")
def concat(*xs: Any, axis: int) -> Any:
    return torch.cat(xs, axis)


@operator("Split")
def split(x: Any, sizes: Any = None, axis: int = 0, num_outputs: int = 0) -> Any:
    if sizes is not None:
        return tuple(torch.split(x, sizes.tolist(), axis))
    return tuple(torch.split(x, -(-x.shape[axis] // num_outputs), axis))


@operator("Slice")
def slice_(x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    count = starts.numel()
    axes = list(range(count)) if axes is None else axes.tolist()
    steps = [1] * count if steps is None else steps.tolist()
    for axis, start, end, step in zip(axes, starts.tolist(), ends.tolist(), steps, strict=True):
        size = x.shape[axis]
        # A negative end beyond the first entry means "before the first".
        last = None if step < 0 and end < -size else end
        chosen = torch.arange(size).numpy()[slice(start, last, step)]
        x = torch.index_select(x, axis, torch.from_numpy(chosen.copy()))
    return x


@operator("Pad")
def pad(x: Any, pads: Any, value: Any = None, axes: Any = None, mode: str = "constant") -> Any:
    axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes.tolist()]
    count = len(axes)
    amounts = [0] * (2 * x.ndim)
    for position, axis in enumerate(axes):
        amounts[2 * (x.ndim - 1 - axis)] = int(pads[position])
        amounts[2 * (x.ndim - 1 - axis) + 1] = int(pads[count + position])
    names = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}
    if value is None or mode != "constant":
        while mode != "constant" and amounts[-2:] == [0, 0]:  # torch wants these left out
            del amounts[-2:]
        return F.pad(x, amounts, names[mode])
    inside = F.pad(torch.ones_like(x), amounts)
    return F.pad(x, amounts) + value * (1 - inside)  # F.pad has no gradient to the value


@operator("CenterCropPad")
def center_crop_pad(x: Any, shape: Any, axes: Sequence[int] | None = None) -> Any:
    for axis, size in zip(axes or range(x.ndim), shape.tolist(), strict=True):
        have = x.shape[axis]
        if size < have:
            x = x.narrow(axis, (have - size) // 2, size)
        else:
            amounts = [0] * (2 * x.ndim)
            before = (size - have) // 2
            place = 2 * (x.ndim - 1 - axis % x.ndim)
            amounts[place : place + 2] = [before, size - have - before]
            x = F.pad(x, amounts)
    return x


@operator("DepthToSpace")
def depth_to_space(x: Any, blocksize: int, mode: str = "DCR") -> Any:
    if mode == "DCR":  # pixel_shuffle's channels are in the other order
        n, c, h, w = x.shape
        x = x.reshape(n, blocksize**2, -1, h, w).transpose(1, 2).reshape(n, c, h, w)
    return F.pixel_shuffle(x, blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Any, blocksize: int, mode: str = "DCR") -> Any:
    y = F.pixel_unshuffle(x, blocksize)
    if mode == "DCR":
        n, c, h, w = y.shape
        y = y.reshape(n, -1, blocksize**2, h, w).transpose(1, 2).reshape(n, c, h, w)
    return y


@operator("ReverseSequence")
def reverse_sequence(x: Any, lengths: Any, batch_axis: int = 1, time_axis: int = 0) -> Any:
    x = x.movedim((batch_axis, time_axis), (0, 1))
    rows = [
        torch.cat([row[:length].flip(0), row[length:]])
        for row, length in zip(x, lengths.tolist(), strict=True)
    ]
    return torch.stack(rows).movedim((0, 1), (batch_axis, time_axis))


@operator("Range")
def range_(start: Any, limit: Any, delta: Any) -> Any:
    first, last, step = (float(value.detach()) for value in (start, limit, delta))
    count = max(math.ceil((last - first) / step), 0)
    return start + torch.arange(count) * delta


@operator("Trilu")
def trilu(x: Any, k: Any = None, upper: int = 1) -> Any:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k))


# Indexing


@operator("Compress")
def compress(x: Any, condition: Any, axis: int | None = None) -> Any:
    if axis is None:
        x, axis = x.reshape(-1), 0
    return torch.index_select(x, axis, condition.nonzero().reshape(-1))


@operator("Gather")
def gather(x: Any, indices: Any, axis: int = 0) -> Any:
    axis = axis % x.ndim
    flat = torch.index_select(x, axis, (indices % x.shape[axis]).reshape(-1))
    return flat.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


@operator("GatherElements")
def gather_elements(x: Any, indices: Any, axis: int = 0) -> Any:
    return torch.gather(x, axis, indices % x.shape[axis])


@operator("GatherND")
def gather_nd(x: Any, indices: Any, batch_dims: int = 0) -> Any:
    if batch_dims:
        rows = [gather_nd(a, i, batch_dims - 1) for a, i in zip(x, indices, strict=True)]
        return torch.stack(rows)
    return x[indices.unbind(-1)]


REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Scatter", "ScatterElements")
def scatter(x: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none") -> Any:
    indices = indices % x.shape[axis]
    if reduction == "none":
        return torch.scatter(x, axis, indices, updates)
    return torch.scatter_reduce(x, axis, indices, updates, REDUCE[reduction])


@operator("ScatterND")
def scatter_nd(x: Any, indices: Any, updates: Any, reduction: str = "none") -> Any:
    depth = indices.shape[-1]
    if reduction in ("none", "add"):
        return torch.index_put(x, indices.unbind(-1), updates, accumulate=reduction == "add")
    numbers = torch.arange(x.numel()).reshape(x.shape)[indices.unbind(-1)]
    assert numbers.shape == updates.shape, depth
    flat = torch.scatter_reduce(
        x.reshape(-1), 0, numbers.reshape(-1), updates.reshape(-1), REDUCE[reduction]
    )
    return flat.reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(
    cache: Any, update: Any, starts: Any = None, axis: int = -2, mode: str = "linear"
) -> Any:
    length, count = cache.shape[axis], update.shape[axis]
    rows = []
    for index, row in enumerate(cache):
        start = 0 if starts is None else int(starts[index])
        places = (start + torch.arange(count)) % length
        rows.append(torch.index_copy(row, axis % cache.ndim - 1, places, update[index]))
    return torch.stack(rows)


@operator("OneHot")
def one_hot(indices: Any, depth: Any, values: Any, axis: int = -1) -> Any:
    count = int(depth)
    whole = indices.to(torch.int64)
    inside = (whole >= -count) & (whole < count)
    hot = F.one_hot(whole % count, count).bool() & inside[..., None]
    return torch.where(hot, values[1], values[0]).movedim(-1, axis)


@operator("Unique")
def unique(x: Any, axis: int | None = None, sorted: int = 1) -> Any:  # noqa: A002
    # torch.unique has no derivative: the values are picked where they first occur.
    data = x.detach().numpy()
    _, first = np.unique(data, return_index=True, axis=axis)
    first = torch.from_numpy(np.sort(first) if not sorted else first)
    return x.reshape(-1)[first] if axis is None else torch.index_select(x, axis, first)


# Convolution, pooling and sampling


def _spatial_pads(
    x: Any, kernel: Sequence[int], pads: Any, auto_pad: str, strides: Any, dilations: Any
) -> tuple[list[int], list[int], list[int]]:
    """Returns pads (all begins, then all ends), strides and dilations."""
    rank = len(kernel)
    strides = list(strides or [1] * rank)
    dilations = list(dilations or [1] * rank)
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max((-(-size // s) - 1) * s + d * (k - 1) + 1 - size, 0)
            for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True)
        ]
        small, big = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = small + big if auto_pad == "SAME_UPPER" else big + small
    return list(pads or [0] * (2 * rank)), strides, dilations


def _torch_pads(pads: Sequence[int]) -> list[int]:
    """Returns ONNX's spatial pads in the order of F.pad."""
    rank = len(pads) // 2
    return [pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)]


def _ceil_pads(x: Any, kernel: Any, pads: Any, strides: Any, dilations: Any) -> list[int]:
    """Returns the further pads at the ends that ceil_mode's last windows reach into."""
    more = []
    rank = len(kernel)
    for axis, size in enumerate(x.shape[2:]):
        window = dilations[axis] * (kernel[axis] - 1) + 1
        padded = size + pads[axis] + pads[axis + rank]
        count = -(-(padded - window) // strides[axis]) + 1
        if (count - 1) * strides[axis] >= size + pads[axis]:
            count -= 1  # a window that starts in the padding at the end is none
        more.append(max((count - 1) * strides[axis] + window - padded, 0))
    return [0] * rank + more


def _window_sums(x: Any, kernel: Any, strides: Any, dilations: Any) -> Any:
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    ones = torch.ones(x.shape[1], 1, *kernel, dtype=x.dtype)
    return convolution(x, ones, None, strides, 0, dilations, x.shape[1])


@operator("AveragePool")
def average_pool(
    x: Any,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    count_include_pad: int = 0,
) -> Any:
    pads, strides, dilations = _spatial_pads(x, kernel_shape, pads, auto_pad, strides, dilations)
    more = _ceil_pads(x, kernel_shape, pads, strides, dilations)
    more = more if ceil_mode else [0] * len(pads)
    inner = F.pad(torch.ones_like(x), _torch_pads(pads), value=float(count_include_pad))
    sums, counts = (
        _window_sums(F.pad(array, _torch_pads(more)), kernel_shape, strides, dilations)
        for array in (F.pad(x, _torch_pads(pads)), inner)
    )
    return sums / counts


@operator("LpPool")
def lp_pool(
    x: Any,
    kernel_shape: Any,
    p: int = 2,
    auto_pad: str = "NOTSET",
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
) -> Any:
    pads, strides, dilations = _spatial_pads(x, kernel_shape, pads, auto_pad, strides, dilations)
    powers = F.pad(x.abs() ** p, _torch_pads(pads))
    return _window_sums(powers, kernel_shape, strides, dilations) ** (1 / p)


@operator("MaxPool")
def max_pool(
    x: Any,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    ceil_mode: int = 0,
    storage_order: int = 0,
) -> Any:
    pads, strides, dilations = _spatial_pads(x, kernel_shape, pads, auto_pad, strides, dilations)
    if ceil_mode:
        more = _ceil_pads(x, kernel_shape, pads, strides, dilations)
        pads = [a + b for a, b in zip(pads, more, strict=True)]
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel_shape) - 1]
    padded = F.pad(x, _torch_pads(pads), value=-math.inf)
    return pool(padded, kernel_shape, strides, 0, dilations), None


@operator("GlobalMaxPool")
def global_max_pool(x: Any) -> Any:
    pool = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[x.ndim - 3]
    return pool(x, 1)


@operator("MaxUnpool")
def max_unpool(
    x: Any,
    indices: Any,
    output_shape: Any = None,
    *,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    rank = len(kernel_shape)
    strides = strides or [1] * rank
    pads = pads or [0] * (2 * rank)
    inferred = [
        (size - 1) * s + k - pads[axis] - pads[axis + rank]
        for axis, (size, s, k) in enumerate(zip(x.shape[2:], strides, kernel_shape, strict=True))
    ]
    shape = inferred if output_shape is None else output_shape.tolist()[2:]
    unpool = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[rank - 1]
    # ONNX counts over the whole tensor, PyTorch over one channel.
    return unpool(x, indices % math.prod(shape), kernel_shape, strides, 0, shape)


@operator("Conv")
def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    group: int = 1,
) -> Any:
    kernel = weight.shape[2:]
    pads, strides, dilations = _spatial_pads(x, kernel, pads, auto_pad, strides, dilations)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]
    return convolution(F.pad(x, _torch_pads(pads)), weight, bias, strides, 0, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    kernel_shape: Any = None,
    auto_pad: str = "NOTSET",
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    group: int = 1,
    output_shape: Any = None,
    output_padding: Any = None,
) -> Any:
    kernel = weight.shape[2:]
    rank = len(kernel)
    strides = list(strides or [1] * rank)
    dilations = list(dilations or [1] * rank)
    extra = list(output_padding or [0] * rank)
    whole = [
        s * (size - 1) + e + (k - 1) * d + 1
        for size, s, e, k, d in zip(x.shape[2:], strides, extra, kernel, dilations, strict=True)
    ]
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [size * s for size, s in zip(x.shape[2:], strides, strict=True)]
    if output_shape is not None:
        totals = [w - wanted for w, wanted in zip(whole, output_shape, strict=True)]
        small, big = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = small + big if auto_pad == "SAME_UPPER" else big + small
    pads = list(pads or [0] * (2 * rank))
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    y = transposed(x, weight, None, strides, 0, 0, group, dilations)
    # The entries that output_padding adds are zeros; pads crop, and a negative one adds zeros.
    crop = [0] * rank + [w - have for w, have in zip(whole, y.shape[2:], strict=True)]
    y = F.pad(y, _torch_pads([c - p for c, p in zip(crop, pads, strict=True)]))
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


@operator("DeformConv")
def deform_conv(
    x: Any,
    weight: Any,
    offset: Any,
    bias: Any = None,
    mask: Any = None,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    group: int = 1,
    offset_group: int = 1,
) -> Any:
    # Each weight's samples are read by F.grid_sample, which has zeros outside too.
    n, channels, height, width = x.shape
    kh, kw = weight.shape[2:]
    pads, strides, dilations = _spatial_pads(x, (kh, kw), pads, "NOTSET", strides, dilations)
    oh, ow = offset.shape[2:]
    offset = offset.reshape(n, offset_group, kh * kw, 2, oh, ow)
    rows = (torch.arange(oh) * strides[0] - pads[0])[:, None]
    columns = (torch.arange(ow) * strides[1] - pads[1])[None, :]
    samples = []
    for point, (i, j) in enumerate(itertools.product(range(kh), range(kw))):
        parts = []
        for chunk, part in enumerate(x.chunk(offset_group, 1)):
            y = rows + i * dilations[0] + offset[:, chunk, point, 0]
            z = columns + j * dilations[1] + offset[:, chunk, point, 1]
            grid = torch.stack([2 * z / (width - 1) - 1, 2 * y / (height - 1) - 1], -1)
            read = F.grid_sample(part, grid, padding_mode="zeros", align_corners=True)
            if mask is not None:
                read = read * mask.reshape(n, offset_group, kh * kw, 1, oh, ow)[:, chunk, point]
            parts.append(read)
        samples.append(torch.cat(parts, 1))
    read = torch.stack(samples, 2).reshape(n, group, channels // group, kh * kw, oh, ow)
    grouped = weight.reshape(group, -1, channels // group, kh * kw)
    y = torch.einsum("ngckij,gock->ngoij", read, grouped).reshape(n, -1, oh, ow)
    return y if bias is None else y + bias[:, None, None]


@operator("Col2Im")
def col2im(
    x: Any, image: Any, block: Any, dilations: Any = None, pads: Any = None, strides: Any = None
) -> Any:
    rank = block.numel()
    pads = pads or [0] * (2 * rank)
    if rank != 2 or pads[:rank] != pads[rank:]:
        raise Inexpressible("F.fold takes images with two axes and the same pads on both sides")
    return F.fold(
        x, image.tolist(), block.tolist(), dilations or 1, tuple(pads[:rank]), strides or 1
    )


@operator("GridSample")
def grid_sample(
    x: Any, grid: Any, mode: str = "linear", padding_mode: str = "zeros", align_corners: int = 0
) -> Any:
    name = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, name, padding_mode, bool(align_corners))


@operator("AffineGrid")
def affine_grid(theta: Any, size: Any, align_corners: int = 0) -> Any:
    return F.affine_grid(theta, size.tolist(), bool(align_corners))


@operator("RoiAlign")
def roi_align(
    x: Any,
    rois: Any,
    batch: Any,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Any:
    if mode != "avg" or sampling_ratio == 0:
        raise Inexpressible("the maximum is over weighted neighbours, which F.grid_sample sums")
    half = coordinate_transformation_mode == "half_pixel"
    height, width = x.shape[2:]
    results = []
    for roi, index in zip(rois, batch.tolist(), strict=True):
        x1, y1, x2, y2 = (roi * spatial_scale - (0.5 if half else 0.0)).unbind()
        spans = (y2 - y1, x2 - x1)
        if not half:
            spans = tuple(torch.clamp(span, min=1.0) for span in spans)
        axes = []
        for start, span, bins, size in zip(
            (y1, x1), spans, (output_height, output_width), (height, width), strict=True
        ):
            count = bins * sampling_ratio
            points = start + (torch.arange(count, dtype=x.dtype) + 0.5) * span / count
            axes.append(2 * points / (size - 1) - 1)
            assert bool(((points > -1) & (points < size)).all()), "beyond the border it is 0"
        rows, columns = torch.meshgrid(*axes, indexing="ij")
        grid = torch.stack([columns, rows], -1)[None]
        read = F.grid_sample(x[index : index + 1], grid, padding_mode="border", align_corners=True)
        results.append(F.avg_pool2d(read, sampling_ratio)[0])
    return torch.stack(results)


@operator("Upsample")
def upsample(x: Any, scales: Any, mode: str = "nearest") -> Any:
    return F.interpolate(x, scale_factor=scales.tolist()[2:], mode=mode)


def _ties(old: Sequence[int], new: Sequence[int]) -> bool:
    """Returns whether an entry lies in the middle between two, with pixels' centres aligned."""
    return any(
        (2 * i + 1) * a % (2 * b) == 0 for a, b in zip(old, new, strict=True) for i in range(b)
    )


@operator("Resize")
def resize(
    x: Any,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Any:
    """Calls F.interpolate where it means the same."""
    transformation = coordinate_transformation_mode
    place = [axis % x.ndim for axis in (axes or range(x.ndim))]
    given: dict[int, float] = {}
    if scales is not None and scales.numel():
        given = dict(zip(place, scales.tolist(), strict=True))
        shape = [int(size * given.get(axis, 1.0)) for axis, size in enumerate(x.shape)]
    else:
        wanted = dict(zip(place, sizes.tolist(), strict=True))
        shape = [wanted.get(axis, size) for axis, size in enumerate(x.shape)]
    if list(shape[:2]) != list(x.shape[:2]) or x.ndim != 4:
        raise Inexpressible("F.interpolate leaves the first two axes alone")
    whole = all(axis not in given or given[axis] * x.shape[axis] == shape[axis] for axis in (2, 3))
    settings: dict[str, Any] = {"size": shape[2:]}
    if given and not whole:
        settings = {
            "scale_factor": [given.get(axis, 1.0) for axis in (2, 3)],
            "recompute_scale_factor": False,
        }
    if bool(exclude_outside) != bool(antialias) and mode != "nearest":
        what = "leaves out" if antialias else "repeats"
        raise Inexpressible(f"F.interpolate {what} the border")
    if keep_aspect_ratio_policy != "stretch":
        raise Inexpressible("F.interpolate has no aspect ratio policy")
    if transformation == "tf_crop_and_resize":
        raise Inexpressible("F.interpolate does not crop")
    if mode == "nearest":
        if transformation == "half_pixel" and not _ties(x.shape[2:], shape[2:]):
            nearest_mode = nearest_mode.replace("prefer_floor", "prefer_ceil")
        forms = {
            ("asymmetric", "floor"): "nearest",
            ("half_pixel", "round_prefer_ceil"): "nearest-exact",
        }
        if (transformation, nearest_mode) not in forms:
            raise Inexpressible("F.interpolate rounds the nearest entry in another way")
        return F.interpolate(x, mode=forms[transformation, nearest_mode], **settings)
    torch_a = -0.5 if antialias else -0.75
    if mode == "cubic" and cubic_coeff_a != torch_a:
        raise Inexpressible(f"F.interpolate's cubic coefficient is {torch_a}")
    same = ("half_pixel", "pytorch_half_pixel") if min(shape[2:]) > 1 else ("half_pixel",)
    if transformation == "half_pixel_symmetric" and whole:
        same += ("half_pixel_symmetric",)  # sizes fit the scales, so there is nothing to centre
    if transformation not in (*same, "align_corners"):
        raise Inexpressible("F.interpolate has other coordinates")
    corners = transformation == "align_corners"
    return F.interpolate(
        x,
        mode={"linear": "bilinear", "cubic": "bicubic"}[mode],
        align_corners=corners,
        antialias=bool(antialias),
        **({"size": shape[2:]} if corners else settings),
    )


# Linear algebra, normalization and losses


@operator("Gemm")
def gemm(
    a: Any,
    b: Any,
    c: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    a, b = a.T if transA else a, b.T if transB else b
    return alpha * (a @ b) if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


@operator("BatchNormalization")
def batch_normalization(
    x: Any,
    scale: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Any:
    if not training_mode:
        spread = [1, -1] + [1] * (x.ndim - 2)
        mean, variance, scale, bias = (p.reshape(spread) for p in (mean, variance, scale, bias))
        return (x - mean) / torch.sqrt(variance + epsilon) * scale + bias
    axes = [axis for axis in range(x.ndim) if axis != 1]
    now, batch = torch.var_mean(x, axes, correction=0)
    return (
        F.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon),
        momentum * mean + (1 - momentum) * batch,
        momentum * variance + (1 - momentum) * now,
    )


@operator("InstanceNormalization")
def instance_normalization(x: Any, scale: Any, bias: Any, epsilon: float = 1e-5) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@operator("GroupNormalization")
def group_normalization(
    x: Any, scale: Any, bias: Any, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LayerNormalization")
def layer_normalization(
    x: Any, scale: Any, bias: Any = None, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    shape = x.shape[axis % x.ndim :]
    axes = tuple(range(axis % x.ndim, x.ndim))
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    y = F.layer_norm(x, shape, scale.expand(shape), bias, epsilon)
    return y, mean, torch.rsqrt(variance + epsilon)


@operator("RMSNormalization")
def rms_normalization(
    x: Any, scale: Any, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    shape = x.shape[axis % x.ndim :]
    return F.rms_norm(x, shape, scale.expand(shape), epsilon)


@operator("LpNormalization")
def lp_normalization(x: Any, axis: int = -1, p: int = 2) -> Any:
    return F.normalize(x, p, axis)


@operator("MeanVarianceNormalization")
def mean_variance_normalization(x: Any, axes: Sequence[int] = (0, 2, 3)) -> Any:
    variance, mean = torch.var_mean(x, tuple(axes), correction=0, keepdim=True)
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


@operator("LRN")
def lrn(x: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Any:
    return F.local_response_norm(x, size, alpha, beta, bias)


@operator("NegativeLogLikelihoodLoss")
def nll_loss(
    x: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> Any:
    """Adds to F.nll_loss what it has no derivative for: the weights of the classes."""
    fixed = None if weight is None else weight.detach()
    loss = F.nll_loss(x, target, fixed, ignore_index=ignore_index, reduction=reduction)
    if weight is None:
        return loss
    counted = target != ignore_index
    each = torch.where(counted, weight[torch.where(counted, target, 0)], 0.0)
    picked = x.detach().gather(1, torch.where(counted, target, 0)[:, None])[:, 0]
    terms = -each * picked
    total = {"none": terms, "sum": terms.sum(), "mean": terms.sum() / each.sum()}[reduction]
    return loss + total - total.detach()


@operator("SoftmaxCrossEntropyLoss")
def cross_entropy(
    x: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
) -> Any:
    if weight is not None:
        log_prob = F.log_softmax(x, 1)
        return nll_loss(log_prob, target, weight, ignore_index, reduction), log_prob
    loss = F.cross_entropy(x, target, ignore_index=ignore_index, reduction=reduction)
    return loss, F.log_softmax(x, 1)


# Attention


@operator("CausalConvWithState")
def causal_conv(
    x: Any, weight: Any, bias: Any = None, past: Any = None, activation: str = "none"
) -> Any:
    count = weight.shape[-1] - 1
    past = torch.zeros(*x.shape[:2], count, dtype=x.dtype) if past is None else past
    whole = torch.cat([past, x], -1)
    y = F.conv1d(whole, weight, bias, groups=x.shape[1])
    return (y if activation == "none" else F.silu(y)), whole[..., whole.shape[-1] - count :]


@operator("SwiGLU")
def swiglu(a: Any, b: Any, alpha: float = 1.0) -> Any:
    return a * torch.sigmoid(alpha * a) * b


def _heads(x: Any, count: int | None) -> Any:
    """Returns (batch, heads, sequence, size) of what may have heads and size in one axis."""
    if x.ndim == 4:
        return x
    return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)


@operator("Attention")
def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    past_key: Any = None,
    past_value: Any = None,
    padding: Any = None,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Any:
    flat = q.ndim == 3
    q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if past_key is not None:
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    present = (k, v)
    batch, rows, columns = q.shape[0], q.shape[2], k.shape[2]
    added = torch.zeros(batch, 1, rows, columns, dtype=q.dtype)
    if mask is not None:
        short = columns - mask.shape[-1]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
        added = added + F.pad(mask, (0, short), value=-math.inf)
    place = torch.arange(columns)
    if padding is not None:
        hidden = place >= padding.reshape(-1, 1, 1, 1)
        added = added.masked_fill(hidden, -math.inf)
    behind = 0 if past_key is None else past_key.shape[2]
    if padding is not None:
        behind = (padding - rows).reshape(-1, 1, 1, 1)
    now = torch.arange(rows)[:, None] + behind
    if left_window_size >= 0:
        added = added.masked_fill(place < now - left_window_size, -math.inf)
    if right_window_size >= 0:
        added = added.masked_fill(place > now + right_window_size, -math.inf)
    if is_causal:
        added = added.masked_fill(place > now, -math.inf)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * scale
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    empty = torch.isneginf(added).all(-1, keepdim=True)  # such a row is zero
    probabilities = F.softmax(torch.where(empty, 0.0, capped + added), -1) * ~empty
    if softcap or bool(empty.any()):
        y = probabilities @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, added, scale=scale)
    if flat:
        y = y.transpose(1, 2).reshape(batch, rows, -1)
    shown = (scores, capped, capped + added, probabilities)[qk_matmul_output_mode]
    return y, *present, shown


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Any,
    cos: Any,
    sin: Any,
    positions: Any = None,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Any:
    shape = x.shape
    x = x.reshape(*x.shape[:2], num_heads, -1) if x.ndim == 3 else x.transpose(1, 2)
    size = rotary_embedding_dim or x.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    # A rotation is a product of complex numbers.
    factor = torch.complex(cos[..., : size // 2], sin[..., : size // 2])[:, :, None]
    if interleaved:
        pairs = torch.view_as_complex(turned.reshape(*turned.shape[:-1], -1, 2).contiguous())
        turned = torch.view_as_real(pairs * factor).flatten(-2)
    else:
        result = torch.complex(*turned.chunk(2, -1)) * factor
        turned = torch.cat([result.real, result.imag], -1)
    y = torch.cat([turned, kept], -1)
    return y.reshape(shape) if len(shape) == 3 else y.transpose(1, 2)


# Signals


@operator("DFT")
def dft(x: Any, length: Any = None, axis_input: Any = None, **attributes: Any) -> Any:
    axis = int(axis_input) if axis_input is not None else attributes.get("axis", 1)
    inverse, onesided = attributes.get("inverse", 0), attributes.get("onesided", 0)
    axis = axis % x.ndim
    count = None if length is None else int(length)
    if onesided and not inverse:
        return torch.view_as_real(torch.fft.rfft(x[..., 0], count, axis))
    if onesided:
        count = 2 * (x.shape[axis] - 1) if count is None else count
        return torch.fft.irfft(torch.view_as_complex(x.contiguous()), count, axis)[..., None]
    number = torch.complex(
        x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0])
    )
    transform = torch.fft.ifft if inverse else torch.fft.fft
    return torch.view_as_real(transform(number, count, axis))


@operator("STFT")
def stft(x: Any, step: Any, window: Any = None, length: Any = None, onesided: int = 1) -> Any:
    size = int(length) if length is not None else window.shape[0]
    result = torch.stft(
        x[..., 0],
        size,
        int(step),
        size if window is None else window.shape[0],
        torch.ones(size, dtype=x.dtype) if window is None else window,
        center=False,
        onesided=bool(onesided),
        return_complex=True,
    )
    return torch.view_as_real(result).transpose(1, 2)


# Recurrent networks

GATES = {"RNN": [0], "LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2]}
"""Where PyTorch's gates are in ONNX's weights: i f g o of i o f c, r z n of z r h."""


def _recurrent(
    kind: str,
    x: Any,
    W: Any,
    R: Any,
    B: Any,
    lengths: Any,
    states: Sequence[Any],
    hidden_size: int,
    direction: str,
    layout: int,
) -> Any:
    """Calls PyTorch's module, with the weights that it is given in the place of its own."""
    if layout:
        x, states = x.transpose(0, 1), [s if s is None else s.transpose(0, 1) for s in states]
    assert lengths is None or set(lengths.tolist()) == {x.shape[0]}
    hidden, batch, gates = hidden_size, x.shape[1], len(GATES[kind])

    def reordered(weight: Any) -> Any:
        parts = weight.reshape(gates, hidden, *weight.shape[1:])[GATES[kind]]
        return parts.reshape(weight.shape)

    names, both = {}, len(W) == 2
    for index in range(len(W)):
        suffix = "_l0_reverse" if index else "_l0"
        names[f"weight_ih{suffix}"] = reordered(W[index])
        names[f"weight_hh{suffix}"] = reordered(R[index])
        if B is not None:
            of_input, of_state = B[index].chunk(2)
            names[f"bias_ih{suffix}"] = reordered(of_input)
            names[f"bias_hh{suffix}"] = reordered(of_state)
    module = getattr(torch.nn, kind)(
        x.shape[2], hidden, bias=B is not None, bidirectional=both, dtype=x.dtype
    )
    zeros = torch.zeros(len(W), batch, hidden, dtype=x.dtype)
    given = [zeros if state is None else state for state in states]
    x = x.flip(0) if direction == "reverse" else x
    start = tuple(given) if len(given) == 2 else given[0]
    y, last = torch.func.functional_call(module, names, (x, start))
    y = y.flip(0) if direction == "reverse" else y
    y = y.reshape(len(x), batch, len(W), hidden).transpose(1, 2)
    results = [y, *(last if isinstance(last, tuple) else [last])]
    if layout:
        results = [y.permute(2, 0, 1, 3), *(r.transpose(0, 1) for r in results[1:])]
    return tuple(results)


@operator("RNN")
def rnn(
    x: Any,
    W: Any,
    R: Any,
    B: Any = None,
    lengths: Any = None,
    initial_h: Any = None,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
) -> Any:
    return _recurrent("RNN", x, W, R, B, lengths, [initial_h], hidden_size, direction, layout)


@operator("LSTM")
def lstm(
    x: Any,
    W: Any,
    R: Any,
    B: Any = None,
    lengths: Any = None,
    initial_h: Any = None,
    initial_c: Any = None,
    P: Any = None,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
) -> Any:
    states = [initial_h, initial_c]
    if P is None:
        return _recurrent("LSTM", x, W, R, B, lengths, states, hidden_size, direction, layout)
    # torch.nn.LSTM has no peepholes: the specification's formulae.
    assert direction == "forward"
    assert layout == 0
    assert lengths is None or set(lengths.tolist()) == {x.shape[0]}
    h, c = initial_h[0], initial_c[0]
    p_i, p_o, p_f = P[0].chunk(3)
    bias = sum(B[0].chunk(2))
    rows = []
    for step in x:
        i, o, f, g = (step @ W[0].T + h @ R[0].T + bias).chunk(4, -1)
        i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
        c = f * c + i * torch.tanh(g)
        h = torch.sigmoid(o + p_o * c) * torch.tanh(c)
        rows.append(h)
    return torch.stack(rows)[:, None], h[None], c[None]


@operator("GRU")
def gru(
    x: Any,
    W: Any,
    R: Any,
    B: Any = None,
    lengths: Any = None,
    initial_h: Any = None,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
    linear_before_reset: int = 0,
) -> Any:
    if linear_before_reset:
        return _recurrent("GRU", x, W, R, B, lengths, [initial_h], hidden_size, direction, layout)
    # torch.nn.GRU resets behind the matrix: the specification's formulae.
    x = x.transpose(0, 1) if layout else x
    assert lengths is None
    assert initial_h is None
    results = []
    for index in range(len(W)):
        backward = index == 1 or direction == "reverse"
        w_z, w_r, w_h = W[index].chunk(3)
        r_z, r_r, r_h = R[index].chunk(3)
        if B is None:
            b_z = b_r = b_h = 0.0
        else:
            b_z, b_r, b_h = sum(B[index].chunk(2)).chunk(3)
        h = torch.zeros(x.shape[1], hidden_size, dtype=x.dtype)
        rows = []
        for step in x.flip(0) if backward else x:
            z = torch.sigmoid(step @ w_z.T + h @ r_z.T + b_z)
            r = torch.sigmoid(step @ w_r.T + h @ r_r.T + b_r)
            new = torch.tanh(step @ w_h.T + (r * h) @ r_h.T + b_h)
            h = (1 - z) * new + z * h
            rows.append(h)
        results.append((torch.stack(rows[::-1] if backward else rows), h))
    y, last = torch.stack([y for y, _ in results], 1), torch.stack([h for _, h in results])
    return (y.permute(2, 0, 1, 3), last.transpose(0, 1)) if layout else (y, last)


# Sequences and control flow


@operator("SequenceInsert")
def sequence_insert(values: list[Any], value: Any, position: Any = None) -> list[Any]:
    place = len(values) if position is None else int(position)
    place = place + len(values) if place < 0 else place
    return [*values[:place], value, *values[place:]]


@operator("SequenceErase")
def sequence_erase(values: list[Any], position: Any = None) -> list[Any]:
    place = (len(values) - 1 if position is None else int(position)) % len(values)
    return values[:place] + values[place + 1 :]


@operator("ConcatFromSequence")
def concat_from_sequence(values: list[Any], axis: int, new_axis: int = 0) -> Any:
    return torch.stack(values, axis) if new_axis else torch.cat(values, axis)


@operator("SplitToSequence")
def split_to_sequence(x: Any, sizes: Any = None, axis: int = 0, keepdims: int = 1) -> list[Any]:
    if sizes is None:
        parts = torch.split(x, 1, axis)
        return list(parts) if keepdims else [part.squeeze(axis) for part in parts]
    return list(torch.split(x, sizes.tolist() if sizes.ndim else int(sizes), axis))


@operator("SequenceMap")
def sequence_map(first: list[Any], *others: Any, body: Any, outer: Values) -> Any:
    columns: list[list[Any]] = [[] for _ in body.output]
    for index, value in enumerate(first):
        given = [other[index] if isinstance(other, list) else other for other in others]
        names = [value.name for value in body.input]
        results = evaluate(body, {**outer, **dict(zip(names, [value, *given], strict=True))})
        for column, result in zip(columns, results.values(), strict=True):
            column.append(result)
    return tuple(columns)


@operator("If")
def if_(condition: Any, then_branch: Any, else_branch: Any, outer: Values) -> Any:
    return tuple(evaluate(then_branch if bool(condition) else else_branch, outer).values())


@operator("Loop")
def loop(count: Any, condition: Any, *states: Any, body: Any, outer: Values) -> Any:
    names = [value.name for value in body.input]
    values = list(states)
    scanned: list[list[Any]] = [[] for _ in body.output[1 + len(states) :]]
    iteration = 0
    running = condition is None or bool(condition)
    while running and (count is None or iteration < int(count)):
        given = [torch.tensor(iteration), torch.tensor(True), *values]
        results = evaluate(body, {**outer, **dict(zip(names, given, strict=True))})
        going, *made = results.values()
        values = made[: len(states)]
        for rows, row in zip(scanned, made[len(states) :], strict=True):
            rows.append(row)
        running = bool(going)
        iteration += 1
    return (*values, *(torch.stack(rows) for rows in scanned))


@operator("Scan")
def scan(*values: Any, body: Any, num_scan_inputs: int, outer: Values) -> Any:
    names = [value.name for value in body.input]
    count = len(values) - num_scan_inputs
    states, rows = list(values[:count]), values[count:]
    scanned: list[list[Any]] = [[] for _ in body.output[count:]]
    for step in zip(*rows, strict=True):
        results = evaluate(body, {**outer, **dict(zip(names, [*states, *step], strict=True))})
        made = list(results.values())
        states = made[:count]
        for column, result in zip(scanned, made[count:], strict=True):
            column.append(result)
    return (*states, *(torch.stack(column) for column in scanned))
