"""Nodes that round less in a training step: their digits, and where they stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from running import run

from ortops import Tape, op
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.rounding import ROUNDING
from ortops.graph.shapes import sum_along
from tests.gradient_models import with_gradients
from tests.spies import finish, lowered

SHAPE = (3, 4, 64, 64)


def rounded(function: Callable[..., Any], x: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Returns the operators of a function's graph after the pass, and its value."""
    with Tape(name="rounding") as tape:
        tape.output(function(tape.input("x", x.dtype, list(x.shape))), "y")
    model = to_proto(finish(ir.from_proto(tape.model()), ROUNDING))
    operators = [node.op_type for node in model.graph.node if node.op_type != "Constant"]
    return operators, run(model, {"x": x}, optimize=False)[0]


def exact_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


def test_small_probabilities_have_all_digits() -> None:
    x = np.linspace(-87, 87, 400, dtype=np.float32)
    operators, y = rounded(op.Sigmoid, x)
    assert operators == ["Neg", "Exp", "Add", "Reciprocal"]
    np.testing.assert_allclose(y, exact_sigmoid(x), rtol=3e-7)


def test_infinities() -> None:
    _, y = rounded(op.Sigmoid, np.array([-np.inf, -200, 0, 200, np.inf, np.nan], np.float32))
    np.testing.assert_array_equal(y, [0, 0, 0.5, 1, 1, np.nan])


def test_gradient_of_small_probabilities() -> None:
    rng = np.random.default_rng(0)  # as in `with_gradients`
    model, feeds = with_gradients(lambda x: op.Sigmoid(x), {"x": (500,)})
    feeds["x"][:] = np.linspace(-80, -1, 500)
    _, weights = (rng.standard_normal(500, np.float32), rng.standard_normal(500))
    exact = exact_sigmoid(feeds["x"])
    wanted = weights.astype(np.float32) * exact * (1 - exact)
    *_, gradient = run(lowered(model, ROUNDING), feeds)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    *_, gradient = run(lowered(model), feeds)
    assert not gradient[feeds["x"] < -20].any()  # what the pass is for


@pytest.mark.parametrize("function", [lambda x: x * op.Sigmoid(x), lambda x: op.Sigmoid(x) * x])
def test_a_product_with_its_argument_keeps_the_fast_kernel(function: Callable[..., Any]) -> None:
    operators, _ = rounded(function, np.ones(3, np.float32))
    assert sorted(operators) == ["Mul", "Sigmoid"]


def test_doubles_keep_the_kernel() -> None:
    operators, _ = rounded(lambda x: op.Sigmoid(x), np.ones(3))
    assert operators == ["Sigmoid"]


IN_A_BRANCH = """
    <ir_version: 10, opset_import: ["": 21]>
    graph (float[n] x, bool chosen) => (float[n] y) {
        y = If (chosen) <
            then_branch = yes () => (float[n] a) { a = Sigmoid(x) },
            else_branch = no () => (float[n] b) { b = Identity(x) }
        >
    }"""

IN_A_LOOP = """
    <ir_version: 10, opset_import: ["": 21]>
    graph (float[n] x, int64 count, bool going) => (float[n] y) {
        y = Loop (count, going, x) <
            body = each (int64 i, bool c, float[n] h) => (bool d, float[n] a) {
                d = Identity(c)
                a = Sigmoid(h)
            }
        >
    }"""


@pytest.mark.parametrize(
    ("text", "expected"), [(IN_A_BRANCH, "Reciprocal"), (IN_A_LOOP, "Sigmoid")]
)
def test_branches_and_loops(text: str, expected: str) -> None:
    found = lowered(onnx.parser.parse_model(text), ROUNDING)
    x = np.array([-60, 3], np.float32)
    feeds = {"x": x, "chosen": np.array(True), "count": np.array(1), "going": np.array(True)}
    (y,) = run(found, feeds, optimize=False)
    np.testing.assert_allclose(y, exact_sigmoid(x), rtol=1e-6, atol=1e-7)
    assert (y[0] > 0) == (expected == "Reciprocal")
    inner = [n.op_type for a in found.graph.node[-1].attribute for n in a.g.node]
    assert expected in inner


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [[2, 3], [-1, -2], [0, 2, 3], [1, 0]])
def test_means_of_many_numbers(axes: list[int], keepdims: int) -> None:
    x = np.random.default_rng(0).random(SHAPE, np.float32)
    operators, y = rounded(lambda x: op.ReduceMean(x, axes, keepdims=keepdims), x)
    assert operators == ["ReduceMean", "ReduceMean"]
    exact = x.mean(tuple(axes), dtype=np.float64, keepdims=bool(keepdims))
    assert y.shape == exact.shape
    np.testing.assert_allclose(y, exact, rtol=1e-6)


def test_a_mean_along_one_axis_stays() -> None:
    operators, _ = rounded(lambda x: op.ReduceMean(x, [1]), np.ones((2, 3), np.float32))
    assert operators == ["ReduceMean"]


@pytest.mark.parametrize(
    ("shape", "axes", "keepdims"),
    [((2048, 3), [0], 0), ((16, 128, 64), [0, 1], 0), ((2, 8, 64, 96), [0, 2, 3], 1)],
)
def test_sums_along_axes(shape: tuple[int, ...], axes: list[int], keepdims: int) -> None:
    x = np.random.default_rng(0).random(shape, np.float32)
    with Tape(name="sums") as tape:
        tape.output(sum_along(tape.input("x", np.float32, shape), axes, keepdims=keepdims), "y")
    (y,) = run(tape.model(), {"x": x})
    exact = x.sum(tuple(axes), dtype=np.float64, keepdims=bool(keepdims))
    assert y.shape == exact.shape
    bound = 3e-6 if len(axes) == 1 else 5e-7  # onnxruntime's own, and that of two short sums
    np.testing.assert_allclose(y, exact, rtol=bound)
