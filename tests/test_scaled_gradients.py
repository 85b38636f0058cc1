"""Factors of rows of wide matrices move to the narrower matrices beside them in products.

Steps with the pass and without are compared in tests/test_passes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from running import run_by_name

from ortops import Tape, Tensor, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.graph.passes.products import ROW_SUMS, TRANSPOSES
from ortops.graph.passes.scaled_gradients import SCALED_GRADIENTS
from ortops.losses import SoftmaxCrossEntropy
from ortops.optimizers import SGD
from tests.spies import Spy, lowered

WIDE = 40
SHAPES = {"d": (6, WIDE), "w": (WIDE, 3), "x": (6, 5), "s": (), "c": (6, 1)}

Build = Callable[..., list[Tensor]]

PRODUCTS: dict[str, Build] = {
    "by a matrix": lambda z, w, x: [op.Abs(z @ w)],
    "by a transposed matrix": lambda z, w, x: [op.Abs(op.Gemm(z, op.Transpose(w), transB=1))],
    "transposed by a matrix": lambda z, w, x: [z.mT @ x],
    "matrix by it": lambda z, w, x: [x.mT @ z],
    "matrix by its transpose": lambda z, w, x: [op.Abs(op.Gemm(w, z, transA=1, transB=1))],
    "both transposed": lambda z, w, x: [op.Gemm(z, op.Transpose(x), transA=1, transB=1)],
    "sum of rows": lambda z, w, x: [op.ReduceSum(z, [0], keepdims=0)],
    "in other shapes": lambda z, w, x: [
        op.Reshape(op.Reshape(z, [2, 3, WIDE]), [6, WIDE]).mT @ x,
        op.Abs(op.Flatten(op.Reshape(z, [2, 3, WIDE]), axis=2) @ w),
    ],
    "several": lambda z, w, x: [op.Abs(z @ w), z.mT @ x, op.ReduceSum(z, [0], keepdims=0)],
}

OTHERS: dict[str, Build] = {
    "another reader": lambda z, w, x: [op.Abs(z @ w), op.Exp(z)],
    "output of the graph": lambda z, w, x: [op.Abs(z @ w), z],
    "product that is an output": lambda z, w, x: [z @ w],
    "bias": lambda z, w, x: [op.Abs(op.Gemm(z, w, x[0, :3]))],
    "wide other matrix": lambda z, w, x: [z.mT @ op.Concat(*[x] * 5, axis=1)],
    "by itself": lambda z, w, x: [op.Abs(z @ z.mT)],
    "other columns": lambda z, w, x: [op.Abs(op.Reshape(z, [6 * 2, WIDE // 2]) @ w[:20])],
}


def model(build: Build, op_type: str, factor: str) -> onnx.ModelProto:
    with Tape(name="products") as tape:
        inputs = {name: tape.input(name, np.float32, shape) for name, shape in SHAPES.items()}
        z = getattr(op, op_type)(op.Abs(inputs["d"]), inputs[factor])
        for number, y in enumerate(build(z, inputs["w"], inputs["x"])):
            tape.output(y, f"y{number}")
    return tape.model()


def is_scaled(made: onnx.ModelProto, op_type: str) -> bool:
    """Whether the wide matrix is multiplied, by the names of values that are its absolute value."""
    wide = {node.output[0] for node in made.graph.node if node.op_type == "Abs"}
    return any(node.op_type == op_type and wide & {node.input[0]} for node in made.graph.node)


@pytest.mark.parametrize("factor", ["s", "c"])
@pytest.mark.parametrize("op_type", ["Mul", "Div"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, op_type: str, factor: str) -> None:
    given = model(PRODUCTS[name], op_type, factor)
    made = lowered(given, SCALED_GRADIENTS, ROW_SUMS, TRANSPOSES)
    assert is_scaled(given, op_type)
    assert not is_scaled(made, op_type)
    rng = np.random.default_rng(0)
    feeds = {key: rng.uniform(0.5, 2, shape).astype(np.float32) for key, shape in SHAPES.items()}
    found, wanted = (run_by_name(each, feeds) for each in (made, given))
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)


@pytest.mark.parametrize("factor", ["s", "c"])
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_changes(name: str, factor: str) -> None:
    made = lowered(model(OTHERS[name], "Mul", factor), SCALED_GRADIENTS)
    assert is_scaled(made, "Mul")


def test_products_in_branches_stay() -> None:
    given = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        g (float[6, 40] d, float[40, 3] w, float s, bool c) => (float[6, 3] y) {
            a = Abs (d)
            z = Mul (a, s)
            y = If (c) <
                then_branch = g1 () => (float[6, 3] p) { q = MatMul (z, w) p = Abs (q) },
                else_branch = g2 () => (float[6, 3] p) { q = MatMul (z, w) p = Neg (q) }
            >
        }""")
    made = lowered(given, SCALED_GRADIENTS)
    assert is_scaled(made, "Mul")
    d, w = (np.ones(SHAPES[name], np.float32) for name in "dw")
    (y,) = run_by_name(made, {"d": d, "w": w, "s": np.float32(2), "c": np.array(True)}).values()
    np.testing.assert_allclose(y, 2 * WIDE)


@pytest.mark.quick(2)
@pytest.mark.parametrize("symbol", ["batch", None])
@pytest.mark.parametrize("ignore_index", [None, -100])
def test_gradients_of_a_head(symbol: str | None, ignore_index: int | None) -> None:
    """Of its weights, bias and input, by NumPy, for two sizes of batches."""
    rng = np.random.default_rng(0)
    weights = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in (("f", (4, 3)), ("w", (3, 30)))
    }
    with Tape(name="head") as tape:
        x = tape.input("x", np.float32, [symbol or 7, 4])
        h = x @ tape.initializer("f", weights["f"])
        bias = tape.initializer("b", np.zeros(30, np.float32))
        tape.output(op.Gemm(h, tape.initializer("w", weights["w"]), bias), "logits")
    loss = SoftmaxCrossEntropy(ignore_index=ignore_index)
    spy = Spy()
    session = TrainingSession(
        build_training_model(tape.model(), loss=loss, optimizer=SGD(0.1)),
        settings=spy.watching(Settings()),
    )
    for size in (7, 9) if symbol else (7,):
        feeds = {
            "x": rng.standard_normal((size, 4), np.float32),
            "labels": rng.integers(0, 30, size),
        }
        if ignore_index is not None:
            feeds["labels"][1:4] = ignore_index
        found = session.gradients(feeds)
        x, f, w = (each.astype(np.float64) for each in (feeds["x"], weights["f"], weights["w"]))
        scores = np.exp(x @ f @ w)
        counted = feeds["labels"] >= 0
        d = scores / scores.sum(1, keepdims=True)
        d[counted] -= np.eye(30)[feeds["labels"][counted]]
        d *= counted[:, None] / counted.sum()
        wanted = {"f": x.T @ d @ w.T, "w": (x @ f).T @ d, "b": d.sum(0)}
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)
    assert Counter(spy.operators[0])["ScatterElements"] == 1
