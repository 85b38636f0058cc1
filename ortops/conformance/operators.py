"""Cases of Gradient through one operator each: formulas of its derivative."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ortops.conformance.case import Array, Case
from ortops.conformance.gradients import gradient_case

_Formula = Callable[[Any], Any]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    found: Array = e / e.sum(-1, keepdims=True)
    return found


_POINTS = np.array([-1.5, -0.25, 0.5, 2.0])
_POSITIVE = np.array([0.25, 0.5, 1.5, 4.0])

_ELEMENTWISE: dict[str, tuple[Array, _Formula]] = {
    "Abs": (_POINTS, np.sign),
    "Atan": (_POINTS, lambda x: 1 / (1 + x * x)),
    "Cos": (_POINTS, lambda x: -np.sin(x)),
    "Cosh": (_POINTS, np.sinh),
    "Elu": (_POINTS, lambda x: np.where(x > 0, 1, np.exp(np.minimum(x, 0)))),
    "Erf": (_POINTS, lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x)),
    "Exp": (_POINTS, np.exp),
    "Identity": (_POINTS, np.ones_like),
    "LeakyRelu": (_POINTS, lambda x: np.where(x > 0, 1, float(np.float32(0.01)))),
    "Log": (_POSITIVE, lambda x: 1 / x),
    "Neg": (_POINTS, lambda x: -np.ones_like(x)),
    "Reciprocal": (_POSITIVE, lambda x: -1 / (x * x)),
    "Relu": (_POINTS, lambda x: x > 0),
    "Sigmoid": (_POINTS, lambda x: _sigmoid(x) * (1 - _sigmoid(x))),
    "Sin": (_POINTS, np.cos),
    "Sinh": (_POINTS, np.cosh),
    "Softplus": (_POINTS, _sigmoid),
    "Softsign": (_POINTS, lambda x: 1 / (1 + abs(x)) ** 2),
    "Sqrt": (_POSITIVE, lambda x: 0.5 / np.sqrt(x)),
    "Tanh": (_POINTS, lambda x: 1 - np.tanh(x) ** 2),
}
"""Operators of one tensor: where, and the derivative."""


def _elementwise() -> Iterator[Case]:
    weights = np.array([1.0, -2, 3, 0.5])
    for operator, (points, derivative) in _ELEMENTWISE.items():
        yield gradient_case(
            f"through_{operator.lower()}",
            f"g (float[4] x, float[4] w) => (float[4] g) {{ p = {operator} (x)"
            " q = Mul (p, w) y = ReduceSum <keepdims = 0> (q)"
            ' g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w) }',
            {"x": points, "w": weights},
            {"g": weights * derivative(points)},
        )


def _of_two_tensors() -> Iterator[Case]:
    a, b = _POSITIVE, np.array([2.0, -1.5, 0.5, 3.0])
    table: dict[str, tuple[Array, Array]] = {
        "Add": (np.ones(4), np.ones(4)),
        "Div": (1 / b, -a / (b * b)),
        "Max": ((a > b).astype(float), (b > a).astype(float)),
        "Min": ((a < b).astype(float), (b < a).astype(float)),
        "Mul": (b, a),
        "Pow": (b * a ** (b - 1), a**b * np.log(a)),
        "Sub": (np.ones(4), -np.ones(4)),
    }
    for operator, (da, db) in table.items():
        yield gradient_case(
            f"through_{operator.lower()}",
            "g (float[4] a, float[4] b) => (float[4] g, float[4] h) {"
            f"p = {operator} (a, b) y = ReduceSum <keepdims = 0> (p)"
            ' g, h = Gradient <xs = ["a", "b"], y = "y"> (a, b) }',
            {"a": a, "b": b},
            {"g": da, "h": db},
        )


_MATRIX = np.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
_WEIGHTS = np.array([[1.0, -2, 3], [0.5, 4, -1]])


def _moves() -> dict[str, tuple[str, Array, Array]]:
    """Returns nodes that move elements, weights and the gradient of Σ (weights · moved x)."""
    w = _WEIGHTS
    repeated = np.zeros((2, 3))
    repeated[:, 0], repeated[:, 2] = w[:, 1], w[:, 0] + w[:, 2]
    sliced = np.zeros((2, 3))
    sliced[:, 2:0:-1] = w[:, :2]
    tiled = w[:, None, :].repeat(2, 1)
    return {
        "Reshape": ("s = Constant <value_ints = [3, 2]> () m = Reshape (x, s)", w.reshape(3, 2), w),
        "Transpose": ("m = Transpose (x)", w.T, w),
        "Flatten": ("m = Flatten <axis = 0> (x)", w.reshape(1, 6), w),
        "Gather": (
            "i = Constant <value_ints = [2, 0, 2]> () m = Gather <axis = 1> (x, i)",
            w,
            repeated,
        ),
        "Slice": (
            (
                "s = Constant <value_ints = [2]> () e = Constant <value_ints = [0]> ()"
                "a = Constant <value_ints = [1]> () t = Constant <value_ints = [-1]> ()"
                "m = Slice (x, s, e, a, t)"
            ),
            w[:, :2],
            sliced,
        ),
        "Unsqueeze": ("a = Constant <value_ints = [0]> () m = Unsqueeze (x, a)", w[None], w),
        "Expand": (
            "s = Constant <value_ints = [2, 2, 3]> () m = Expand (x, s)",
            tiled.transpose(1, 0, 2),
            w + w,
        ),
        "Concat": ("m = Concat <axis = 0> (x, x)", np.concatenate([w, 3 * w]), 4 * w),
    }


def _moving() -> Iterator[Case]:
    """Yields operators that move elements, whose gradient moves back."""
    for operator, (nodes, weights, gradient) in _moves().items():
        shape = ", ".join(map(str, weights.shape))
        yield gradient_case(
            f"through_{operator.lower()}",
            f"g (float[2, 3] x, float[{shape}] w) => (float[2, 3] g) {{ {nodes}"
            " q = Mul (m, w) y = ReduceSum <keepdims = 0> (q)"
            ' g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w) }',
            {"x": _MATRIX, "w": weights},
            {"g": gradient},
        )
    yield gradient_case(
        "through_split",
        "g (float[2, 3] x) => (float[2, 3] g) { s = Constant <value_ints = [1, 2]> ()"
        "a, b = Split <axis = 1> (x, s) p = Mul (b, a) y = ReduceSum <keepdims = 0> (p)"
        ' g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": _MATRIX},
        {
            "g": np.concatenate(
                [_MATRIX[:, 1:].sum(1, keepdims=True), _MATRIX[:, :1].repeat(2, 1)], 1
            )
        },
    )


def _reducing() -> Iterator[Case]:
    x = _MATRIX
    column = np.array([[2.0], [-3.0]])
    highest = (x == x.max(1, keepdims=True)).astype(float)
    table: dict[str, Array] = {
        "ReduceSum": np.broadcast_to(column, (2, 3)),
        "ReduceMean": np.broadcast_to(column / 3, (2, 3)),
        "ReduceMax": highest * column,
        "ReduceL2": column * x / np.sqrt((x * x).sum(1, keepdims=True)),
        "ReduceSumSquare": 2 * column * x,
        "ReduceLogSumExp": column * _softmax(x),
        "ReduceProd": column * x.prod(1, keepdims=True) / x,
    }
    for operator, gradient in table.items():
        yield gradient_case(
            f"through_{operator.lower()}",
            "g (float[2, 3] x, float[2, 1] w) => (float[2, 3] g) {"
            f"a = Constant <value_ints = [1]> () m = {operator} (x, a)"
            " q = Mul (m, w) y = ReduceSum <keepdims = 0> (q)"
            ' g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w) }',
            {"x": x, "w": column},
            {"g": gradient},
        )


def _of_networks() -> Iterator[Case]:
    x = _MATRIX
    a = np.array([[1.0, 2], [-1, 0.5], [0.25, -2]])
    yield gradient_case(
        "through_matmul",
        "g (float[2, 3] x, float[3, 2] a) => (float[2, 3] g, float[3, 2] h) {"
        "p = MatMul (x, a) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q)"
        ' g, h = Gradient <xs = ["x", "a"], y = "y"> (x, a) }',
        {"x": x, "a": a},
        {"g": 2 * x @ a @ a.T, "h": 2 * x.T @ x @ a},
    )
    batch = np.stack([x, 2 * x])
    yield gradient_case(
        "through_matmul_with_broadcasting",
        "g (float[2, 2, 3] x, float[3, 2] a) => (float[2, 2, 3] g, float[3, 2] h) {"
        "p = MatMul (x, a) y = ReduceSum <keepdims = 0> (p)"
        ' g, h = Gradient <xs = ["x", "a"], y = "y"> (x, a) }',
        {"x": batch, "a": a},
        {
            "g": np.broadcast_to(a.sum(1), batch.shape),
            "h": np.repeat(batch.sum((0, 1))[:, None], 2, 1),
        },
    )
    yield gradient_case(
        "through_gemm",
        "g (float[3, 2] a, float[2, 3] b, float[2] c)"
        " => (float[3, 2] da, float[2, 3] db, float[2] dc) {"
        "p = Gemm <alpha = 0.5, beta = 2.0, transA = 1, transB = 1> (a, b, c)"
        " y = ReduceSum <keepdims = 0> (p)"
        ' da, db, dc = Gradient <xs = ["a", "b", "c"], y = "y"> (a, b, c) }',
        {"a": a, "b": x, "c": [1.0, -1]},
        {
            "da": np.repeat(0.5 * x.sum(0)[:, None], 2, 1),
            "db": np.repeat(0.5 * a.sum(1)[None], 2, 0),
            "dc": [4.0, 4],
        },
    )


def _of_softmax() -> Iterator[Case]:
    x, w = _MATRIX, _WEIGHTS
    s = _softmax(x)
    for name, gradient in {
        "Softmax": s * (w - (w * s).sum(1, keepdims=True)),
        "LogSoftmax": w - s * w.sum(1, keepdims=True),
    }.items():
        yield gradient_case(
            f"through_{name.lower()}",
            f"g (float[2, 3] x, float[2, 3] w) => (float[2, 3] g) {{ m = {name} (x)"
            " q = Mul (m, w) y = ReduceSum <keepdims = 0> (q)"
            ' g = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w) }',
            {"x": x, "w": w},
            {"g": gradient},
        )
    labels = np.array([2, 0])
    yield gradient_case(
        "through_cross_entropy",
        "g (float[2, 3] x, int64[2] labels) => (float loss, float[2, 3] g) {"
        "loss = SoftmaxCrossEntropyLoss (x, labels)"
        ' g = Gradient <xs = ["x"], zs = ["labels"], y = "loss"> (x, labels) }',
        {"x": x, "labels": labels},
        {
            "loss": -np.log(s[[0, 1], labels]).mean(),
            "g": (s - np.eye(3)[labels]) / 2,
        },
    )
    yield gradient_case(
        "through_clip",
        "g (float[2, 3] x) => (float[2, 3] g) <float low = {-0.8}, float high = {1.0}> {"
        "m = Clip (x, low, high) y = ReduceSum <keepdims = 0> (m)"
        ' g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": x},
        {"g": (abs(x - 0.1) < 0.9).astype(float)},
    )


def cases() -> Iterator[Case]:
    """Yields the cases."""
    yield from _elementwise()
    yield from _of_two_tensors()
    yield from _moving()
    yield from _reducing()
    yield from _of_networks()
    yield from _of_softmax()
