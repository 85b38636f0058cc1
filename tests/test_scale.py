"""Differentiating big models: work grows linearly, and nothing that nobody reads is left.

Work is counted in function calls, which are the same in every run, unlike times.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import node
from onnx import TensorProto, helper

import ortops
from ortops import Tape, op
from ortops.graph.tensor import Tensor

WIDTH = 4


def dense(tape: Tape, h: Tensor, index: int) -> Tensor:
    """Five nodes with two parameters."""
    rng = np.random.default_rng(index)
    w = tape.initializer(f"w{index}", rng.standard_normal((WIDTH, WIDTH)).astype(np.float32))
    b = tape.initializer(f"b{index}", rng.standard_normal(WIDTH).astype(np.float32))
    z = op.Add(op.MatMul(h, w), b)
    return op.Add(h, op.Mul(op.Tanh(z), op.Sigmoid(z)))


def plain(tape: Tape, h: Tensor, index: int) -> Tensor:
    """Five nodes without parameters, with reductions and shapes that only a run tells."""
    parts = op.Reshape(op.Transpose(h, perm=[1, 0]), [WIDTH, -1])
    centred = op.Sub(parts, op.ReduceMean(parts, [0], keepdims=1))
    return op.Transpose(centred, perm=[1, 0])


def chain(layer: Callable[[Tape, Tensor, int], Tensor], layers: int) -> onnx.ModelProto:
    """Returns a chain of layers with the gradients of its parameters, or of its input."""
    with Tape(name="chain") as tape:
        h = x = tape.input("x", np.float32, ["batch", WIDTH])
        for index in range(layers):
            h = layer(tape, h, index)
        tape.output(op.ReduceSum(h, keepdims=0), "y")
    model = tape.model()
    xs = [tensor.name for tensor in model.graph.initializer] or [x.name]
    made = [f"d_{name}" for name in xs]
    model.graph.node.append(node("Gradient", xs, made, xs=xs, y="y"))
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    return model


def unread(graph: onnx.GraphProto) -> list[str]:
    """Returns the nodes none of whose outputs anybody reads."""
    read = {value.name for value in graph.output}
    read.update(name for item in graph.node for name in item.input)
    return [item.name for item in graph.node if read.isdisjoint(item.output)]


def calls(function: Callable[[onnx.ModelProto], Any], model: onnx.ModelProto) -> int:
    """Returns how many function calls it takes to apply a function to a model."""
    gc.collect()
    profile = cProfile.Profile()
    profile.runcall(function, model)
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.quick(1)
@pytest.mark.parametrize("layer", [dense, plain])
def test_backward_of_each_further_layer_is_the_same(
    layer: Callable[[Tape, Tensor, int], Tensor],
) -> None:
    lowered = [ortops.lower(chain(layer, layers)) for layers in (2, 12, 22)]
    sizes = [len(model.graph.node) for model in lowered]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1]
    assert all(not unread(model.graph) for model in lowered)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("layer", [dense, plain])
def test_work_grows_linearly(layer: Callable[[Tape, Tensor, int], Tensor]) -> None:
    ortops.lower(chain(layer, 2))  # imports, and what is kept from call to call
    few, many = (calls(ortops.lower, chain(layer, layers)) for layers in (40, 160))
    assert many < 4.5 * few, (few, many)  # one per pair of parameters shows as 5


@pytest.mark.slow
def test_work_of_a_training_step_grows_linearly() -> None:
    def trainable(layers: int) -> onnx.ModelProto:
        with Tape(name="chain") as tape:
            h = tape.input("x", np.float32, ["batch", WIDTH])
            for index in range(layers):
                h = dense(tape, h, index)
            tape.output(h, "y")
        return ortops.build_training_model(tape.model(), loss="MeanSquaredError", optimizer="Adam")

    ortops.step_graph(trainable(2))
    few, many = (calls(ortops.step_graph, trainable(layers)) for layers in (30, 120))
    # onnx-ir looks at all outputs of the graph where a node goes: 4.9. A walk each shows as 9.
    assert many < 5.5 * few, (few, many)


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_five_thousand_nodes() -> None:
    model = chain(dense, 1000)
    assert len(model.graph.node) > 5000
    lowered = ortops.lower(model)
    assert unread(lowered.graph) == []
    onnx.checker.check_model(lowered, full_check=True)
