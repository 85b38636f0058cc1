"""Rules of elementwise operators against differences, and at kinks, ties and extremes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, away_from, check, distinct, normal, uniform
from onnx import helper
from running import run

import ortops

X = normal(2, 3)
# The reference implementation computes Erf in float32, onnxruntime Shrink.
ERF: dict[str, Any] = {"float32": True, "epsilon": 1e-3, "rtol": 1e-3}
SHRINK: dict[str, Any] = {"epsilon": 1e-2, "rtol": 1e-4}

CASES = [
    # Arithmetic, with every way of broadcasting
    Case("Add", [X, normal(3, seed=1)], orders=3),
    Case("Add", [normal(3), normal(2, 3, seed=1)], orders=2),
    Case("Add", [normal(2, 1, 3), normal(4, 1, seed=1)], orders=2),
    Case("Add", [X, normal(seed=1)], orders=2),
    Case("Add", [normal(0, 3), normal(3, seed=1)]),
    Case("Sub", [X, normal(2, 1, seed=1)], orders=3),
    Case("Mul", [X, normal(2, 1, seed=1)], orders=3),
    Case("Mul", [normal(), normal(2, 3, seed=1)], orders=2),
    Case("Div", [X, 2 + uniform(0, 1, 3)], orders=3),
    Case("Div", [X, -2 - uniform(0, 1, 2, 1)], orders=2),
    Case("Neg", [X], orders=3),
    Case("Reciprocal", [away_from([0], 2, 3, gap=0.3)], orders=3),
    Case("Sum", [X], orders=2),
    Case("Sum", [X, normal(3, seed=1), normal(2, 1, seed=2)], orders=3),
    Case("Mean", [X], float32=True),
    Case("Mean", [X, normal(3, seed=1), normal(2, 1, seed=2)], orders=3, float32=True),
    Case("Mod", [uniform(-6, 6, 2, 3), np.array([2.1, -1.7, 0.9])], {"fmod": 1}, orders=3),
    # Powers: both inputs, the exponent alone a constant, negative bases, integers
    Case("Pow", [uniform(0.5, 2, 2, 3), normal(3, seed=1)], orders=3),
    Case("Pow", [uniform(0.5, 2, 3), normal(2, 3, seed=1)], orders=2),
    *(
        Case("Pow", [away_from([0], 2, 3), np.array(n)], constant=[1], orders=3, name=str(n))
        for n in (0.0, 1.0, 2.0, 3.0, -1.0, -2.0)
    ),
    Case("Pow", [uniform(0.5, 2, 2, 3), np.array([0.5])], constant=[1], orders=3),
    Case("Pow", [X, np.array([[2.0]])], constant=[1], orders=3, name="rank2"),
    Case("Pow", [X[0], np.array([[2.0]])], constant=[1], orders=2, name="rank2"),
    Case("Pow", [X, np.array([0.0, 1.0, 2.0])], constant=[1], orders=3),
    Case("Pow", [X, np.array(2)], constant=[1], orders=3, name="int64"),
    Case("Pow", [X, np.array([0, 3, 2], np.int32)], orders=3, name="int32"),
    Case("Pow", [uniform(0.5, 2, 2, 3), uniform(1, 2, 3)], only=[1], orders=3, name="exponent"),
    # Smooth functions
    Case("Sqrt", [uniform(0.5, 2, 2, 3)], orders=3),
    Case("Exp", [X], orders=3),
    Case("Log", [uniform(0.5, 2, 2, 3)], orders=3),
    Case("Erf", [X], orders=3, **ERF),
    Case("Sin", [X], orders=3),
    Case("Cos", [X], orders=3),
    Case("Tan", [uniform(-1, 1, 2, 3)], orders=3, float32=True),
    Case("Asin", [uniform(-0.8, 0.8, 2, 3)], orders=3, float32=True),
    Case("Acos", [uniform(-0.8, 0.8, 2, 3)], orders=3, float32=True),
    Case("Atan", [X], orders=3, float32=True),
    Case("Sinh", [X], orders=3, float32=True),
    Case("Cosh", [X], orders=3, float32=True),
    Case("Tanh", [X], orders=3),
    Case("Asinh", [X], orders=3, float32=True),
    Case("Acosh", [uniform(1.5, 3, 2, 3)], orders=3, float32=True),
    Case("Atanh", [uniform(-0.7, 0.7, 2, 3)], orders=3, float32=True),
    Case("Sigmoid", [X], orders=3),
    Case("Softplus", [3 * X], orders=3, float32=True),
    Case("Softsign", [away_from([0], 2, 3)], orders=3, float32=True),
    Case("Gelu", [2 * X], orders=3, **ERF),
    Case("Gelu", [2 * X], {"approximate": "tanh"}, orders=3, float32=True),
    Case("Swish", [2 * X], orders=3, opset=24, float32=True),
    Case("Swish", [2 * X], {"alpha": -1.7}, orders=3, opset=24, float32=True),
    Case("Mish", [2 * X], orders=3, float32=True),
    # Activations in pieces
    Case("Relu", [away_from([0], 2, 3)], orders=3),
    Case("LeakyRelu", [away_from([0], 2, 3)], orders=3, float32=True),
    Case("LeakyRelu", [away_from([0], 2, 3)], {"alpha": -0.5}, float32=True, name="negative"),
    Case("PRelu", [away_from([0], 2, 3), normal(3, seed=1)], orders=3, float32=True),
    Case("PRelu", [away_from([0], 2, 3, 4), normal(3, 1, seed=1)], orders=2, float32=True),
    Case("ThresholdedRelu", [away_from([1], 2, 3)], orders=3, float32=True),
    Case("ThresholdedRelu", [away_from([-0.3], 8)], {"alpha": -0.3}, float32=True),
    Case("Elu", [away_from([0], 2, 3)], orders=3, float32=True),
    Case("Elu", [away_from([0], 2, 3)], {"alpha": 1.7}, orders=3, float32=True, name="alpha"),
    Case("Celu", [away_from([0], 2, 3)], orders=3, float32=True),
    Case("Celu", [away_from([0], 2, 3)], {"alpha": 0.6}, orders=3, float32=True, name="alpha"),
    Case("Selu", [away_from([0], 2, 3)], orders=3, float32=True),
    Case("Selu", [away_from([0], 8)], {"alpha": 1.2, "gamma": 0.7}, orders=3, float32=True),
    Case("HardSigmoid", [away_from([-2.5, 2.5], 3, 4)], orders=3, float32=True),
    Case("HardSigmoid", [away_from([-1, 1], 8)], {"alpha": -0.5}, float32=True, name="falling"),
    Case("HardSwish", [3 * away_from([-1, 1], 3, 4)], orders=3, float32=True),
    # Selection
    Case("Abs", [away_from([0], 2, 3)], orders=3),
    Case("Shrink", [away_from([-0.5, 0.5], 3, 4)], orders=3, **SHRINK),
    Case("Shrink", [away_from([-1, 1], 8)], {"lambd": 1.0, "bias": 0.4}, **SHRINK, name="soft"),
    Case("Shrink", [away_from([0], 8)], {"lambd": -1.0, "bias": 0.4}, **SHRINK, name="negative"),
    Case("Clip", [away_from([-1, 1], 3, 4), np.array(-1.0), np.array(1.0)], orders=3),
    Case("Clip", [away_from([-1, 1], 8), np.array(-1.0), np.array(1.0)], constant=[1, 2]),
    Case("Clip", [away_from([0], 3, 4), np.array(0.0)], orders=2),
    Case("Clip", [away_from([0], 3, 4), None, np.array(0.0)], orders=2),
    Case("Clip", [away_from([0], 3, 4)], orders=2),
    Case("Clip", [normal(8), np.array(1.0), np.array(-1.0)], only=[2], name="crossed"),
    Case(
        "Clip",
        [np.array([-2.0, -1.0, 0.0, 1.0]), np.array(1.0), np.array(-1.0)],
        constant=[1, 2],
        name="crossed",
    ),
    Case("Where", [X > 0, X, normal(3, seed=1)], orders=3),
    Case("Where", [X[0] > 0, normal(2, 1), normal(seed=1)], orders=2),
    Case("Where", [np.array(True), X, normal(2, 1, seed=1)], orders=2),
    Case("Max", [X], orders=2),
    Case("Max", [distinct(2, 3), distinct(3, seed=1) + 0.03], orders=3),
    Case("Max", [distinct(2, 3), distinct(3, seed=1) + 0.03, distinct(2, 1, seed=2) + 0.06]),
    Case("Min", [distinct(2, 3), distinct(2, 1, seed=1) + 0.03], orders=3),
    Case("Min", [distinct(2, 3), distinct(3, seed=1) + 0.03, distinct(2, 1, seed=2) + 0.06]),
    # Types
    Case("Identity", [X], orders=3),
    Case("Cast", [X], {"to": onnx.TensorProto.DOUBLE}, orders=3),
    Case(
        "Cast",
        [normal(2, 3, dtype=np.float32)],
        {"to": onnx.TensorProto.DOUBLE},
        epsilon=1,
        rtol=1e-5,
        name="float32",
    ),
    Case("CastLike", [X, np.zeros(1)], only=[0], orders=3),
    Case(
        "CastLike",
        [normal(2, 3, dtype=np.float32), np.zeros(1)],
        only=[0],
        epsilon=1,
        rtol=1e-5,
        name="float32",
    ),
]
CASES = quick(
    CASES,
    """
    Add-2x3_3
    Sub-2x3_2x1
    Mul-2x3_2x1
    Div-2x3_3
    Neg-2x3
    Reciprocal-2x3
    Sum-2x3_3_2x1
    Mean-2x3_3_2x1
    Mod-2x3_3
    Pow-rank2-2x3_1x1
    Pow-2x3_3#1
    Sqrt-2x3
    Exp-2x3
    Log-2x3
    Erf-2x3
    Sin-2x3
    Cos-2x3
    Tan-2x3
    Asin-2x3
    Acos-2x3
    Atan-2x3
    Sinh-2x3
    Cosh-2x3
    Tanh-2x3
    Asinh-2x3
    Acosh-2x3
    Atanh-2x3
    Sigmoid-2x3
    Softplus-2x3
    Softsign-2x3
    Gelu-2x3#1
    Gelu-2x3
    Swish-2x3
    Swish-2x3#1
    Mish-2x3
    Relu-2x3
    LeakyRelu-2x3
    PRelu-2x3_3
    ThresholdedRelu-2x3
    Elu-alpha-2x3
    Celu-alpha-2x3
    Selu-8
    HardSigmoid-falling-8
    HardSigmoid-3x4
    HardSwish-3x4
    Abs-2x3
    Shrink-3x4
    Clip-3x4__
    Clip-3x4_
    Where-2x3_2x3_3
    Max-2x3_3
    Min-2x3_2x1
    Identity-2x3
    Cast-2x3
    CastLike-2x3_1
    """,
)


@pytest.mark.nightly(91)
@pytest.mark.quick(8)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def gradients(
    op: str,
    inputs: Sequence[np.ndarray | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    opset: int = 21,
    ranks: bool = True,
) -> list[np.ndarray]:
    """Returns the gradients of the sum of an operator's output, by onnxruntime."""
    names = ["" if array is None else f"x{index}" for index, array in enumerate(inputs)]
    feeds = {name: a for name, a in zip(names, inputs, strict=True) if a is not None}
    xs = [name for name, array in feeds.items() if array.dtype.kind == "f"]
    shown = [
        helper.make_tensor_value_info(
            n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape if ranks else None
        )
        for n, a in feeds.items()
    ]
    nodes = [
        helper.make_node(op, names, ["y"], **(attributes or {})),
        helper.make_node("Gradient", xs, [f"d{x}" for x in xs], domain=DOMAIN, xs=xs, y="y"),
    ]
    graph = helper.make_graph(
        nodes, "kinks", shown, [helper.make_empty_tensor_value_info(f"d{x}") for x in xs]
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    return run(model, feeds)


def single(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


KINKS = [
    ("Relu", [single(-1, 0, 1)], {}, [[0, 0, 1]]),
    ("Abs", [single(-1, 0, 1)], {}, [[-1, 0, 1]]),
    ("LeakyRelu", [single(-1, 0, 1)], {"alpha": 0.125}, [[0.125, 0.125, 1]]),
    ("PRelu", [single(-1, 0, 2), single(0.25)], {}, [[0.25, 0.25, 1], [-1]]),
    ("ThresholdedRelu", [single(0.5, 1, 2)], {}, [[0, 0, 1]]),
    ("Elu", [single(0, 1)], {"alpha": 2.0}, [[2, 1]]),
    ("Celu", [single(0, 1)], {"alpha": 2.0}, [[1, 1]]),
    ("Selu", [single(0, 1)], {"alpha": 2.0, "gamma": 1.5}, [[3, 1.5]]),
    ("HardSigmoid", [single(-2, -1, 0, 1, 2)], {"alpha": 0.5}, [[0, 0, 0.5, 0, 0]]),
    ("HardSwish", [single(-4, -3, 0, 3, 4)], {}, [[0, 0, 0.5, 1, 1]]),
    ("Shrink", [single(-1, -0.5, 0, 0.5, 1)], {}, [[1, 0, 0, 0, 1]]),
    ("Softsign", [single(-1, 0, 1)], {}, [[0.25, 1, 0.25]]),
    ("Clip", [single(-2, -1, 0, 1, 2), np.float32(-1), np.float32(1)], {}, [[0, 1, 1, 1, 0], 1, 1]),
    ("Clip", [single(-2, 1, 2), np.float32(1), np.float32(1)], {}, [[0, 1, 0], 0, 1]),
    ("Clip", [single(-2, -1, 2), np.float32(1), np.float32(-1)], {}, [[0, 0, 0], 0, 3]),
    ("Max", [single(1, 2, 3), single(2, 2, 2)], {}, [[0, 0.5, 1], [1, 0.5, 0]]),
    ("Min", [single(1, 2, 3), single(2, 2, 2)], {}, [[1, 0.5, 0], [0, 0.5, 1]]),
    (
        "Max",
        [single(1, 2, 0, 1), single(1, 2, 0, 0), single(0, 2, 1, 0), single(1, 2, 1, 0)],
        {},
        [[1 / 3, 0.25, 0, 1], [1 / 3, 0.25, 0, 0], [0, 0.25, 0.5, 0], [1 / 3, 0.25, 0.5, 0]],
    ),
    ("Max", [single(np.inf, 1), single(np.inf, np.inf)], {}, [[0.5, 0], [0.5, 1]]),
    # d/dx 0^y, d/dy 0^y and the logarithm of a negative base
    (
        "Pow",
        [single(0, 0, 0, 0, 0, -2, -2), single(0, 1, 2, 0.5, -1, 3, 0)],
        {},
        [[0, 1, 0, np.inf, -np.inf, 12, 0], [0, 0, 0, 0, -np.inf, np.nan, np.nan]],
    ),
    ("Pow", [single(0, -2, 3), np.array([0, 3, 2])], {}, [[0, 12, 6]]),
    ("Mod", [single(5, -5, 7.5), single(3, 3, -2)], {"fmod": 1}, [[1, 1, 1], [-1, 1, 3]]),
    ("Sqrt", [single(0, 4)], {}, [[np.inf, 0.25]]),
    ("Where", [np.array([True, False]), single(1, 2), single(3, 4)], {}, [[1, 0], [0, 1]]),
]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    KINKS,
    ids=[f"{row[0]}-{index}" for index, row in enumerate(KINKS)],
)
def test_kinks_and_ties(
    op: str,
    inputs: Sequence[np.ndarray],
    attributes: Mapping[str, Any],
    expected: Sequence[Any],
) -> None:
    found = gradients(op, [np.asarray(array) for array in inputs], attributes)
    assert len(found) == len(expected)
    for array, numbers in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            array, single(*np.ravel(numbers)).reshape(array.shape), rtol=1e-6
        )


MAX = float(np.finfo(np.float32).max)
FAR = [-MAX, -1e30, -1e5, -200, 200, 1e5, 1e30, MAX]
STEP = [0, 0, 0, 0, 1, 1, 1, 1]
FLAT = [0] * 8

EXTREMES = [
    ("Sigmoid", {}, FLAT),
    ("Tanh", {}, FLAT),
    ("Erf", {}, FLAT),
    ("Atan", {}, [0, 0, 1e-10, 1 / 40001, 1 / 40001, 1e-10, 0, 0]),
    ("Softplus", {}, STEP),
    ("Softsign", {}, [0, 0, 1e-10, 1 / 40401, 1 / 40401, 1e-10, 0, 0]),
    ("Gelu", {}, STEP),
    ("Gelu", {"approximate": "tanh"}, STEP),
    ("Mish", {}, STEP),
    ("Swish", {}, STEP),
    ("Swish", {"alpha": 3.0}, STEP),
    ("Elu", {}, STEP),
    ("Celu", {}, STEP),
    ("Selu", {"gamma": 1.0}, STEP),
    ("HardSigmoid", {}, FLAT),
    ("HardSwish", {}, STEP),
    ("Relu", {}, STEP),
    ("LeakyRelu", {"alpha": 0.5}, [0.5] * 4 + [1] * 4),
]


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    EXTREMES,
    ids=[f"{row[0]}-{index}" for index, row in enumerate(EXTREMES)],
)
def test_far_from_zero(op: str, attributes: Mapping[str, Any], expected: Sequence[float]) -> None:
    opset = 24 if op == "Swish" else 21
    (found,) = gradients(op, [single(*FAR)], attributes, opset=opset)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-12)


# Functions that have a limit where a part of them overflows, and their derivatives in float64

op = ortops.op
SATURATED = single(-MAX, -1e5, -1000, -100, -89, -30, 0, 30, 89, 100, 1000, 1e5, MAX)


def logistic(x: np.ndarray, order: int = 1) -> np.ndarray:
    """Returns a derivative of the logistic function, from numbers that do not overflow."""
    small = np.exp(-abs(x))
    bell = small / (1 + small) ** 2
    return bell if order == 1 else bell * np.sign(-x) * (1 - small) / (1 + small)


LIMITS: dict[str, tuple[Any, Any]] = {
    "Reciprocal": (lambda x: op.Reciprocal(1 + op.Exp(-x)), logistic),
    "Div": (lambda x: 1 / (1 + op.Exp(-x)), logistic),
    "Neg outside": (lambda x: 1 - 1 / (op.Exp(x) + 1), logistic),
    "power": (lambda x: (1 + op.Exp(-x)) ** -1.0, logistic),
    "power of e": (lambda x: 1 / (1 + op.Pow(np.float32(np.e), -x)), logistic),
    "of a scale": (lambda x: 1 / (1 + op.Exp(x * -0.5)), lambda x: 0.5 * logistic(x / 2)),
    "Tanh": (lambda x: 2 / (1 + op.Exp(-2 * x)) - 1, lambda x: 4 * logistic(2 * x)),
    "sech": (
        lambda x: 1 / op.Cosh(x),
        lambda x: -2 * np.sign(x) * (e := np.exp(-abs(x))) * (1 - e * e) / (1 + e * e) ** 2,
    ),
    "Sinh": (
        lambda x: 1 / (1 + op.Sinh(abs(x))),
        lambda x: -2 * np.sign(x) * (e := np.exp(-abs(x))) * (1 + e * e) / (2 * e + 1 - e * e) ** 2,
    ),
    "Gompertz": (
        lambda x: op.Exp(-op.Exp(-x)),
        lambda x: np.exp(-x - np.exp(np.minimum(-x, 700))) * (x > -700),
    ),
    "Lorentz": (lambda x: 1 / (1 + x**4.0), lambda x: -4 * x**3 / (1 + x**4) ** 2),
    "Softplus": (lambda x: op.Softplus(x), lambda x: 1 / (1 + np.exp(np.minimum(-x, 700)))),
    "stable Softplus": (
        lambda x: op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x))),
        lambda x: 1 / (1 + np.exp(np.minimum(-x, 700))),
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_behind_an_overflow(name: str) -> None:
    function, derivative = LIMITS[name]
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["n"])
        y = function(x)
        tape.output(ortops.grad(op.ReduceSum(y), x), "dx")
    (found,) = run(ortops.lower(tape.model()), {"x": SATURATED})
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        expected = np.nan_to_num(derivative(SATURATED.astype(np.float64)), nan=0.0)
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-12)


def test_limits_of_second_order() -> None:
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["n"])
        slope = ortops.grad(op.ReduceSum(op.Reciprocal(1 + op.Exp(-x))), x)
        tape.output(ortops.grad(op.ReduceSum(slope), x), "ddx")
    (found,) = run(ortops.lower(tape.model()), {"x": SATURATED})
    expected = logistic(SATURATED.astype(np.float64), order=2)
    np.testing.assert_allclose(found, expected, rtol=3e-5, atol=1e-12)


def test_a_cotangent_of_zero_is_differentiated() -> None:
    """(e^x - 1)² is flat at 0, and bent: its second derivative is 2 there."""
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["n"])
        part = op.Exp(x) - 1
        slope = ortops.grad(op.ReduceSum(part * part), x)
        tape.output(slope, "dx")
        tape.output(ortops.grad(op.ReduceSum(slope), x), "ddx")
    first, second = run(ortops.lower(tape.model()), {"x": single(0)})
    assert (first.tolist(), second.tolist()) == ([0], [2])


@pytest.mark.parametrize("op_type", ["Exp", "Cosh", "Sinh"])
def test_an_infinite_slope_is_not_hidden(op_type: str) -> None:
    (found,) = gradients(op_type, [single(100, 1)])
    assert np.isinf(found[0])
    assert np.isfinite(found[1])


def test_an_exponent_that_is_differentiated_is_no_constant() -> None:
    """∂²(x^n)/∂x∂n = x^(n−1) · (1 + n · ln x), though n is an initializer that holds 2."""
    shown = [helper.make_tensor_value_info("x", onnx.TensorProto.DOUBLE, [3])]
    nodes = [
        helper.make_node("Pow", ["x", "n"], ["y"]),
        helper.make_node("Gradient", ["x"], ["dx"], domain=DOMAIN, xs=["x"], y="y"),
        helper.make_node("Gradient", ["n"], ["dxdn"], domain=DOMAIN, xs=["n"], y="dx"),
    ]
    graph = helper.make_graph(
        nodes,
        "mixed",
        shown,
        [helper.make_empty_tensor_value_info("dxdn")],
        [onnx.numpy_helper.from_array(np.array(2.0), "n")],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    x = np.array([0.5, 1.0, 3.0])
    (found,) = run(model, {"x": x})
    np.testing.assert_allclose(found, (x * (1 + 2 * np.log(x))).sum())


@pytest.mark.parametrize("op", ["Add", "Mul", "Div", "Max", "Pow"])
def test_unknown_ranks(op: str) -> None:
    """Where nothing is known of the shapes, broadcasting is undone at run time."""
    a, b = uniform(1, 2, 4, 2, 3).astype(np.float32), uniform(2, 3, 2, 1).astype(np.float32)
    for found, expected in zip(
        gradients(op, [a, b], ranks=False), gradients(op, [a, b]), strict=True
    ):
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5)
