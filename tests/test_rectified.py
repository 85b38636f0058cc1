"""Relu whose gradient is a product: the same numbers, and none of it where that is not safe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from running import run

from ortops import Tensor, op
from ortops.graph.passes.rectified import RECTIFIED
from tests.gradient_models import Array, Build, with_gradients
from tests.spies import lowered


def rectified(build: Build, shape: tuple[int, ...]) -> tuple[set[str], list[Array]]:
    """Returns the operators of the lowered graph, and what it computes, which is checked."""
    model, feeds = with_gradients(build, {"x": shape})
    feeds["x"][0] = 0
    standard, ours = lowered(model), lowered(model, RECTIFIED)
    assert {node.domain for node in ours.graph.node} == {""}
    results = run(ours, feeds)
    for wanted, found in zip(run(standard, feeds), results, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    return {node.op_type for node in ours.graph.node}, results


@pytest.mark.parametrize(
    "build",
    [
        op.Relu,
        lambda x: op.Sqrt(x * x + 1) * op.Relu(x),
        lambda x: op.MatMul(op.Relu(op.Relu(x) - 1), np.ones((5, 2), np.float32)),
    ],
    ids=["alone", "a root beside", "twice"],
)
def test_product(build: Callable[..., Any]) -> None:
    operators, _ = rectified(build, (4, 5))
    assert "HardSigmoid" in operators
    assert "Where" not in operators


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_small_and_large_numbers(scale: float) -> None:
    rectified(lambda x: op.Relu(x * np.float32(scale)), (4, 5))


@pytest.mark.parametrize(
    "behind",
    [op.Sqrt, lambda y: op.Pow(y, np.float32(0.5)), lambda y: op.Relu(op.Sqrt(y))],
    ids=["root", "power", "root within"],
)
def test_a_root_of_zero_gives_no_nan(behind: Callable[..., Any]) -> None:
    operators, (y, _, gradient) = rectified(lambda x: behind(op.Relu(x)), (4, 5))
    assert "Where" in operators
    assert not y.all()
    assert np.isfinite(gradient).all()


def test_gradients_of_higher_order_keep_their_form() -> None:
    def inner(x: Tensor) -> Tensor:
        return op.Relu(x) ** 3

    model, feeds = with_gradients(inner, {"x": (4, 5)})
    node = model.graph.node[-1]
    second = onnx.NodeProto()
    second.CopyFrom(node)
    second.name, second.output[0] = "second", "second"
    second.attribute[1].s = b"x_gradient"
    model.graph.node.append(second)
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("second", onnx.TensorProto.FLOAT, (4, 5))
    )
    ours = lowered(model, RECTIFIED)
    assert "HardSigmoid" not in {each.op_type for each in ours.graph.node}
    wanted = run(lowered(model), feeds)
    for found, other in zip(run(ours, feeds), wanted, strict=True):
        np.testing.assert_allclose(found, other)


def test_a_gradient_in_a_branch_of_what_lies_outside() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
        branches (float[4] x, bool c) => (float[4] z)
        {
            hidden = Relu(x)
            square = Mul(hidden, hidden)
            y = ReduceSum <keepdims=0> (square)
            z = If (c) <
                then_branch = g1 () => (float[4] a) {
                    a = ai.onnx.preview.training.Gradient <xs=["x"], y="y"> (x)
                },
                else_branch = g2 () => (float[4] e) { e = Identity(x) }
            >
        }
        """
    )
    ours = lowered(model, RECTIFIED)
    feeds = {"x": np.float32([-1, 0, 2, 3]), "c": np.array(True)}
    (found,) = run(ours, feeds)
    assert found.tolist() == [0, 0, 4, 6]
