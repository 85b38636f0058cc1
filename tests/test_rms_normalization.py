"""RMS normalizations in parts become one node, and sums of scaled rows one pass each.

Gradients are compared with NumPy's in float64. Steps with each pass and without are compared in
tests/test_passes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from running import run_by_name

import ortops
from ortops import Tape, Tensor, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.graph.autodiff.registry import USER
from ortops.graph.passes.gated_sums import GATED_SUMS
from ortops.graph.passes.rms_normalization import RMS_NORMALIZATION
from ortops.graph.passes.scaled_sums import has_gated_add
from ortops.optimizers import SGD
from tests.gradient_models import with_gradients
from tests.spies import Spy, lowered

Array = np.ndarray[Any, Any]
EPSILON = 1e-5
FUSED = "SimplifiedLayerNormalization"


def mean(x: Tensor) -> Tensor:
    return op.ReduceMean(x * x, [-1])


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Llama": lambda x, w: (
        w * (x * op.Reciprocal(op.Sqrt(op.ReduceMean(op.Pow(x, 2.0), [-1]) + EPSILON)))
    ),
    "product": lambda x, w: x * op.Reciprocal(op.Sqrt(EPSILON + op.ReduceMean(x * x, [2]))) * w,
    "quotient": lambda x, w: x / op.Sqrt(mean(x) + EPSILON) * w,
    "one over root": lambda x, w: w * (1.0 / op.Sqrt(mean(x) + EPSILON) * x),
    "power": lambda x, w: w * (x * op.Pow(mean(x) + EPSILON, -0.5)),
    "over a power": lambda x, w: w * (x / op.Pow(mean(x) + EPSILON, 0.5)),
    "sum of squares": lambda x, w: (
        x * op.Reciprocal(op.Sqrt(op.ReduceSumSquare(x, [-1]) / 6.0 + EPSILON)) * w
    ),
    "weight plus one": lambda x, w: (w * 2.0) * (x / op.Sqrt(mean(x) + EPSILON)) * 0.5,
}


def twice(x: Tensor, w: Tensor) -> Tensor:
    normalized = x / op.Sqrt(mean(x) + EPSILON)
    return normalized * w + normalized


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no epsilon": lambda x, w: x / op.Sqrt(mean(x)) * w,
    "negative epsilon": lambda x, w: x / op.Sqrt(mean(x) - EPSILON + 0.0) * w,
    "another axis": lambda x, w: x / op.Sqrt(op.ReduceMean(x * x, [1]) + EPSILON) * w,
    "two axes": lambda x, w: x / op.Sqrt(op.ReduceMean(x * x, [1, 2]) + EPSILON) * w,
    "all axes": lambda x, w: x / op.Sqrt(op.ReduceMean(x * x) + EPSILON) * w,
    "another tensor": lambda x, w: x / op.Sqrt(mean(x + 1.0) + EPSILON) * w,
    "cubes": lambda x, w: x / op.Sqrt(op.ReduceMean(op.Pow(x, 4.0), [-1]) + EPSILON) * w,
    "another root": lambda x, w: x * op.Pow(mean(x) + EPSILON, -0.25) * w,
    "inverse": lambda x, w: x * op.Sqrt(mean(x) + EPSILON) * w,
    "another count": lambda x, w: x / op.Sqrt(op.ReduceSumSquare(x, [-1]) / 5.0 + EPSILON) * w,
    "weight of one element": lambda x, w: x / op.Sqrt(mean(x) + EPSILON) * w[:1],
    "weight of rows": lambda x, w: x / op.Sqrt(mean(x) + EPSILON) * op.Reshape(w, [1, 6]),
    "read twice": twice,
}

SHAPES = {"x": (2, 3, 6), "w": (6,)}


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def expected(x: Array, w: Array, g: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """Returns the normalization and its gradients, from the matrix of derivatives of each row."""
    x, w, g = (each.astype(np.float64) for each in (x, w, g))
    root = np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    outer = x[..., :, None] * x[..., None, :] / x.shape[-1]
    jacobian = np.eye(x.shape[-1]) / root[..., None] - outer / root[..., None] ** 3
    d_x = np.einsum("abi,abij->abj", g * w, jacobian)
    return x / root * w, d_x, (g * x / root).sum((0, 1))


def cotangent(shapes: dict[str, tuple[int, ...]]) -> Array:
    """Returns what `with_gradients` multiplies y by."""
    rng = np.random.default_rng(0)
    for shape in shapes.values():
        rng.standard_normal(shape, np.float32)
    return rng.standard_normal(shapes["x"]).astype(np.float32)


@pytest.mark.parametrize("name", FORMS)
def test_each_form_becomes_one_node(name: str) -> None:
    model, feeds = with_gradients(FORMS[name], SHAPES)
    fused = lowered(model, RMS_NORMALIZATION)
    count = operators(fused)
    assert count[FUSED] == 1
    assert not {"Sqrt", "Pow", "ReduceMean", "ReduceSumSquare", "Expand"} & set(count)
    found = run_by_name(fused, feeds)
    wanted = expected(feeds["x"], feeds["w"], cotangent(SHAPES), EPSILON)
    for key, value in zip(("y", "x_gradient", "w_gradient"), wanted, strict=True):
        np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_does(name: str) -> None:
    model, _ = with_gradients(OTHERS[name], SHAPES)
    assert FUSED not in operators(lowered(model, RMS_NORMALIZATION))


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1.0, 1e4, 1e12])
@pytest.mark.parametrize("epsilon", [1e-12, 1e-6])
def test_large_and_small_rows(size: float, epsilon: float) -> None:
    shapes = {"x": (2, 5, 64), "w": (64,)}

    def build(x: Tensor, w: Tensor) -> Tensor:
        return w * (x / op.Sqrt(mean(x) + epsilon))

    model, feeds = with_gradients(build, shapes)
    feeds["x"] = (feeds["x"] * size).astype(np.float32)
    found = run_by_name(lowered(model, GATED_SUMS, RMS_NORMALIZATION), feeds)
    wanted = expected(feeds["x"], feeds["w"], cotangent(shapes), float(np.float32(epsilon)))
    for key, value in zip(("y", "x_gradient", "w_gradient"), wanted, strict=True):
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6 * abs(value).max())


def test_gradient_of_a_gradient() -> None:
    """The derivative of the sum of squares of the gradient, by differences in float64."""
    with Tape(name="second") as tape:
        x = tape.input("x", np.float32, (1, 2, 6))
        w = tape.input("w", np.float32, (6,))
        y = w * (x / op.Sqrt(mean(x) + 0.1))
        (d_x,) = ortops.grad(op.ReduceSum(y * y * y, keepdims=0), [x])
        penalty = op.ReduceSum(d_x * d_x, keepdims=0)
        (second,) = ortops.grad(penalty, [x])
        tape.output(penalty, "penalty")
        tape.output(second, "second")
    rng = np.random.default_rng(3)
    feeds = {n: rng.standard_normal(s, np.float32) for n, s in (("x", (1, 2, 6)), ("w", (6,)))}
    fused = lowered(tape.model(), RMS_NORMALIZATION)
    assert operators(fused)[FUSED] >= 1

    def value(x: Array) -> float:
        y, _, _ = expected(x, feeds["w"], np.zeros_like(x), np.float32(0.1))
        _, d_x, _ = expected(x, feeds["w"], 3 * y * y, np.float32(0.1))
        return float((d_x**2).sum())

    x64, step = feeds["x"].astype(np.float64), 1e-5
    wanted = np.zeros_like(x64)
    for place in np.ndindex(x64.shape):
        ends = []
        for sign in (1, -1):
            moved = x64.copy()
            moved[place] += sign * step
            ends.append(value(moved))
        wanted[place] = (ends[0] - ends[1]) / (2 * step)
    found = run_by_name(fused, feeds)
    np.testing.assert_allclose(found["second"], wanted, rtol=1e-3, atol=1e-3)


def test_a_user_s_rule_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(USER, "rules", {})
    model, _ = with_gradients(FORMS["Llama"], SHAPES)
    ortops.vjp("Sqrt")(lambda g, y, x: 7 * g)
    assert FUSED not in operators(lowered(model, RMS_NORMALIZATION))


# ------------------------------------------------------------------------------------ gated sums

SUMS: dict[str, tuple[Callable[..., Tensor], dict[str, int]]] = {
    "product": (lambda x, y, c, d: y + x * c, {"GatedAdd": 1}),
    "product first": (lambda x, y, c, d: c * x + y, {"GatedAdd": 1}),
    "two products": (lambda x, y, c, d: x * c + y * d, {"GatedAdd": 1, "Mul": 1}),
    "inside": (lambda x, y, c, d: op.Abs(y) + (x * c + d), {"GatedAdd": 1, "Add": 1}),
    "two inside": (lambda x, y, c, d: op.Abs(y) + (x * c + y * d), {"GatedAdd": 2}),
    "nested": (
        lambda x, y, c, d: op.Abs(x) + (op.Abs(y) + (x * c + y * d + c)),
        {"GatedAdd": 2, "Add": 2},
    ),
    "no sum of whole tensors": (lambda x, y, c, d: x * c + d, {"Mul": 1, "Add": 1}),
    "whole product": (lambda x, y, c, d: y + x * y, {"Mul": 1, "Add": 1}),
    "row": (lambda x, y, c, d: y + x * y[:1, :1], {"Mul": 1, "Add": 1}),
    "factor of fewer rows": (lambda x, y, c, d: y + x * c[:1], {"Mul": 1, "Add": 1}),
    "columns": (lambda x, y, c, d: c + d * c, {"Mul": 1, "Add": 1}),
    "equal products": (lambda x, y, c, d: (y + x * c) / (x * c), {"Mul": 1, "GatedAdd": 1}),
}


def shared(x: Tensor, y: Tensor, c: Tensor, d: Tensor) -> Tensor:
    product = x * c
    return (y + product) * op.Abs(product)


SUMS["product with two readers"] = (shared, {"Add": 1, "Mul": 2})


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("rows", [2, "n"])
def test_gated_sums(name: str, rows: int | str) -> None:
    if not has_gated_add():
        pytest.skip("this onnxruntime has no GatedAdd")
    build, wanted = SUMS[name]
    with Tape(name="sums") as tape:
        x, y = (tape.input(n, np.float32, [rows, 3, 8]) for n in "xy")
        c, d = (tape.input(n, np.float32, [rows, 3, 1]) for n in "cd")
        tape.output(build(x, y, c, d), "z")
    model = tape.model()
    made = lowered(model, GATED_SUMS)
    found = {key: n for key, n in operators(made).items() if key in ("Add", "GatedAdd", "Mul")}
    assert found == wanted
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 3, 8 if n in "xy" else 1), np.float32) for n in "xycd"}
    exact = run_by_name(model, feeds)["z"]
    np.testing.assert_allclose(run_by_name(made, feeds)["z"], exact, rtol=1e-5, atol=1e-6)


def test_layer_normalization_with_a_residual() -> None:
    """Both products of its gradient are added to that of the residual connection."""
    if not has_gated_add():
        pytest.skip("this onnxruntime has no GatedAdd")
    with Tape(name="residual") as tape:
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2)]
        x = tape.input("x", np.float32, ["batch", 4, 8])
        h = x @ tape.initializer("first", weights[0])
        scale, bias = (tape.initializer(n, np.ones(8, np.float32)) for n in ("scale", "bias"))
        h = h + op.Tanh(op.LayerNormalization(h, scale, bias)) @ tape.initializer("w", weights[1])
        tape.output(op.ReduceMean(h, [1], keepdims=0), "logits")
    model = build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    spy = Spy()
    session = TrainingSession(model, settings=spy.watching(Settings()))
    rng = np.random.default_rng(1)
    for size in (3, 3, 5):  # the second size gets a graph for any
        feeds = {"x": rng.standard_normal((size, 4, 8), np.float32)}
        session.step({**feeds, "labels": rng.integers(0, 8, size)})
    assert [Counter(each)["GatedAdd"] for each in spy.operators] == [2] * len(spy.operators)
