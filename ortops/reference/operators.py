"""ONNX operators on traced arrays, from their descriptions in the specification.

An operator that only moves elements needs no rule: it moves their positions. One that ONNX defines
as a function is replayed node by node. What remains is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from onnx import helper

from ortops.reference.traced import (
    Array,
    Traced,
    Value,
    add,
    cast,
    concatenate,
    elementwise,
    lift,
    multiply,
    power,
    power_of,
    reshape,
    select,
    sum_over,
    take,
)

Rule: TypeAlias = Callable[..., Traced]
"""Takes inputs in ONNX's order (None where absent), and attributes by name."""

MOVING = {
    *("Compress", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"),
    *("Identity", "Reshape", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze"),
    *("Tile", "Transpose", "Unsqueeze"),
}
"""Operators whose outputs are elements of the first input."""

CONSTANT = {
    *("And", "ArgMax", "ArgMin", "Ceil", "ConstantOfShape", "Equal", "EyeLike"),
    *("Floor", "Greater"),
    *("GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "NonZero", "Not", "Or", "Round"),
    *("Shape", "Sign", "Size", "Xor"),
}
"""Operators whose results are piecewise constant."""

OPERATORS: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


def _minus(a: Traced, b: Traced) -> Traced:
    return add(a, multiply(lift(-1.0, b), b))


def _over(a: Traced, b: Traced) -> Traced:
    return multiply(a, power(b, -1))


def _exp(x: Traced) -> Traced:
    return elementwise(x, np.exp, _exp)


def _log(x: Traced) -> Traced:
    return elementwise(x, np.log, lambda t: power(t, -1))


def _sin(x: Traced) -> Traced:
    return elementwise(x, np.sin, _cos)


def _cos(x: Traced) -> Traced:
    return elementwise(x, np.cos, lambda t: multiply(lift(-1.0, t), _sin(t)))


def _sinh(x: Traced) -> Traced:
    return elementwise(x, np.sinh, _cosh)


def _cosh(x: Traced) -> Traced:
    return elementwise(x, np.cosh, _sinh)


def _tanh(x: Traced) -> Traced:
    return elementwise(x, np.tanh, lambda t: _minus(lift(1.0, t), power(_tanh(t), 2)))


def _logistic(v: Array) -> Array:
    e = np.exp(-abs(v))
    found: Array = np.where(v >= 0, 1, e) / (1 + e)
    return found


def _sigmoid(x: Traced) -> Traced:
    def derivative(t: Traced) -> Traced:
        y = _sigmoid(t)
        return multiply(y, _minus(lift(1.0, y), y))

    return elementwise(x, _logistic, derivative)


def _erf(x: Traced) -> Traced:
    def derivative(t: Traced) -> Traced:
        return multiply(lift(2 / math.sqrt(math.pi), t), _exp(multiply(lift(-1.0, t), power(t, 2))))

    return elementwise(x, np.vectorize(math.erf, otypes=[float]), derivative)


def _atan(x: Traced) -> Traced:
    return elementwise(x, np.arctan, lambda t: power(add(lift(1.0, t), multiply(t, t)), -1))


def _softplus(x: Traced) -> Traced:
    return elementwise(x, lambda v: np.logaddexp(v, 0), _sigmoid)


def _slope(x: Traced, negative: float) -> Traced:
    """Returns x where it is positive, and ``negative`` · x elsewhere."""
    return select(x.value > 0, x, multiply(lift(negative, x), x))


OPERATORS.update(
    {
        "Abs": lambda x: multiply(x, lift(np.sign(x.value))),
        "Add": add,
        "Atan": _atan,
        "Cos": _cos,
        "Cosh": _cosh,
        "Div": _over,
        "Erf": _erf,
        "Exp": _exp,
        "Log": _log,
        "Mul": multiply,
        "Neg": lambda x: multiply(lift(-1.0, x), x),
        "Reciprocal": lambda x: power(x, -1),
        "Sigmoid": _sigmoid,
        "Sin": _sin,
        "Sinh": _sinh,
        "Softplus": _softplus,
        "Sqrt": lambda x: power(x, 0.5),
        "Sub": _minus,
        "Tanh": _tanh,
        "LeakyRelu": lambda x, alpha: _slope(x, alpha),
        # not 0 · x, which is NaN at infinity
        "Relu": lambda x: select(x.value > 0, x, lift(0.0, x)),
        "Where": lambda condition, a, b: select(condition.value, a, b),
    }
)


@_rule("Pow")
def _pow(x: Traced, exponent: Traced) -> Traced:
    return power_of(x, exponent, _log)


@_rule("Sum")
def _sum(*terms: Traced) -> Traced:
    total = terms[0]
    for term in terms[1:]:
        total = add(total, term)
    return total


@_rule("Mean")
def _mean(*terms: Traced) -> Traced:
    return multiply(_sum(*terms), lift(1 / len(terms), terms[0]))


@_rule("Max")
def _max(*terms: Traced) -> Traced:
    found = terms[0]
    for term in terms[1:]:
        found = select(found.value >= term.value, found, term)
    return found


@_rule("Min")
def _min(*terms: Traced) -> Traced:
    found = terms[0]
    for term in terms[1:]:
        found = select(found.value <= term.value, found, term)
    return found


@_rule("Clip")
def _clip(x: Traced, low: Traced | None = None, high: Traced | None = None) -> Traced:
    if low is not None:
        x = select(x.value < low.value, low, x)
    return x if high is None else select(x.value > high.value, high, x)


@_rule("Cast")
def _cast(x: Traced, *, to: int, **_: Any) -> Traced:
    return cast(x, helper.tensor_dtype_to_np_dtype(to))


# --------------------------------------------------------------------------------------- reducing


def _axes(x: Traced, axes: Traced | Sequence[int] | None, empty: int | None) -> list[int]:
    """Returns the axes to reduce, from an input or, before opset 18, an attribute."""
    given = axes.value.ravel().tolist() if isinstance(axes, Traced) else axes
    if given:
        return [int(axis) % x.value.ndim for axis in given]
    return [] if empty else list(range(x.value.ndim))


def _reduction(inner: Callable[[Traced, list[int]], Traced]) -> Rule:
    """Returns the rule of a reduction, from one that keeps the axes."""

    def reduce(
        x: Traced,
        axes: Traced | Sequence[int] | None = None,
        *,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Traced:
        chosen = _axes(x, axes, noop_with_empty_axes)
        found = inner(x, chosen)
        rest = [size for axis, size in enumerate(x.shape) if axis not in chosen]
        return found if keepdims else reshape(found, rest)

    return reduce


def _in_rows(x: Traced, axes: list[int]) -> tuple[Traced, list[int]]:
    """Returns the elements that are reduced together in the last axis, and the kept shape."""
    rest = [axis for axis in range(x.value.ndim) if axis not in axes]
    index = np.arange(x.value.size).reshape(x.shape).transpose([*rest, *axes])
    kept = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    width = math.prod(x.shape[axis] for axis in axes)
    return take(x, index.reshape(*(x.shape[axis] for axis in rest), width)), kept


def _extreme(best: Callable[..., Array]) -> Callable[[Traced, list[int]], Traced]:
    def inner(x: Traced, axes: list[int]) -> Traced:
        rows, kept = _in_rows(x, axes)
        width = rows.shape[-1]
        found = best(rows.value, axis=-1)
        index = np.arange(found.size).reshape(found.shape) * width + found
        return reshape(take(rows, index), kept)

    return inner


def _product(x: Traced, axes: list[int]) -> Traced:
    rows, kept = _in_rows(x, axes)
    positions = np.arange(rows.value.size).reshape(rows.shape)
    total = lift(np.ones(rows.shape[:-1], x.value.dtype))
    for column in range(rows.shape[-1]):
        total = multiply(total, take(rows, positions[..., column]))
    return reshape(total, kept)


def _average(x: Traced, axes: list[int]) -> Traced:
    count = math.prod(x.shape[axis] for axis in axes)
    return multiply(sum_over(x, axes), lift(1 / max(count, 1), x))


def _log_sum_exp(x: Traced, axes: list[int]) -> Traced:
    top = lift(x.value.max(tuple(axes), keepdims=True))  # any constant gives the same sum
    return add(top, _log(sum_over(_exp(_minus(x, top)), axes)))


OPERATORS.update(
    {
        "ReduceL1": _reduction(lambda x, axes: sum_over(OPERATORS["Abs"](x), axes)),
        "ReduceL2": _reduction(lambda x, axes: power(sum_over(multiply(x, x), axes), 0.5)),
        "ReduceLogSumExp": _reduction(_log_sum_exp),
        "ReduceMax": _reduction(_extreme(np.argmax)),
        "ReduceMean": _reduction(_average),
        "ReduceMin": _reduction(_extreme(np.argmin)),
        "ReduceProd": _reduction(_product),
        "ReduceSum": _reduction(sum_over),
        "ReduceSumSquare": _reduction(lambda x, axes: sum_over(multiply(x, x), axes)),
    }
)


@_rule("LogSoftmax")
def _log_softmax(x: Traced, *, axis: int = -1) -> Traced:
    return _minus(x, _log_sum_exp(x, [axis % x.value.ndim]))


@_rule("Softmax")
def _softmax(x: Traced, *, axis: int = -1) -> Traced:
    return _exp(_log_softmax(x, axis=axis))


# --------------------------------------------------------------------------------------- products


@_rule("MatMul")
def _matmul(a: Traced, b: Traced) -> Traced:
    left = reshape(a, (1, *a.shape)) if a.value.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.value.ndim == 1 else b
    # [..., m, k, 1] · [..., 1, k, n], summed over k
    terms = multiply(
        reshape(left, (*left.shape, 1)),
        reshape(right, (*right.shape[:-2], 1, *right.shape[-2:])),
    )
    product = sum_over(terms, [-2], keepdims=False)
    shape = list(product.shape)
    if b.value.ndim == 1:
        del shape[-1]
    if a.value.ndim == 1:
        del shape[-1 if b.value.ndim == 1 else -2]
    return reshape(product, shape)


def _transposed(x: Traced) -> Traced:
    return take(x, np.arange(x.value.size).reshape(x.shape).T)


@_rule("Gemm")
def _gemm(
    a: Traced,
    b: Traced,
    c: Traced | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Traced:
    product = _matmul(_transposed(a) if transA else a, _transposed(b) if transB else b)
    scaled = multiply(lift(alpha, product), product)
    return scaled if c is None else add(scaled, multiply(lift(beta, c), c))


def concat(parts: Sequence[Value], axis: int) -> Traced:
    """Returns the rule of Concat, whose inputs may be constants."""
    return concatenate([lift(part) for part in parts], axis)


@_rule("Conv")
def _conv(
    x: Traced,
    w: Traced,
    b: Traced | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
    **_: Any,
) -> Traced:
    if auto_pad not in ("NOTSET", "VALID"):
        raise NotImplementedError(f"Conv: the reference has no auto_pad={auto_pad!r}")
    kernel, dims = w.shape[2:], w.value.ndim - 2
    steps, gaps = strides or [1] * dims, dilations or [1] * dims
    edges = list(pads or [0] * 2 * dims)
    # Positions in x, and behind them one of a zero, which padding reads.
    positions = np.pad(
        np.arange(x.value.size).reshape(x.shape),
        [(0, 0), (0, 0), *zip(edges[:dims], edges[dims:], strict=True)],
        constant_values=x.value.size,
    )
    sizes = [
        (length - gap * (size - 1) - 1) // step + 1
        for length, size, gap, step in zip(positions.shape[2:], kernel, gaps, steps, strict=True)
    ]
    windows = []
    for offset in np.ndindex(*kernel):
        slices = (
            slice(o * gap, o * gap + (size - 1) * step + 1, step)
            for o, gap, size, step in zip(offset, gaps, sizes, steps, strict=True)
        )
        windows.append(positions[(slice(None), slice(None), *slices)])
    flat = concatenate([reshape(x, (-1,)), lift(np.zeros(1, x.value.dtype))], 0)
    batch, outputs, inputs = x.shape[0], w.shape[0] // group, w.shape[1]
    index = np.stack(windows, 2).reshape(batch, group, inputs * len(windows), -1)
    patches = take(flat, index)  # [batch, group, inputs · kernel, positions]
    weights = reshape(w, (group, outputs, inputs * len(windows)))
    y = reshape(_matmul(weights, patches), (batch, group * outputs, *sizes))
    return y if b is None else add(y, reshape(b, (-1, *(1 for _ in sizes))))
