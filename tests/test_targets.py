"""Graphs that are lowered for what is to run them: the same numbers, of the operators it has."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from running import run

from models.lenet import lenet
from models.lstm import lstm
from models.mlp import mlp
from models.resnet import resnet
from models.transformer import transformer
from ortops import ArgumentError, Tape, build_training_model, lower, op, step_graph
from ortops.cli.parser import make_parser
from ortops.engine.lowering import Target
from tests.gradient_models import with_gradients

TARGETS = [None, "onnxruntime"]

MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], str, tuple[int, ...]]] = {
    "layers": (lambda: mlp((24, 80, 72, 5)), "images", (32, 24)),
    "convolutions": (
        lambda: lenet((1, 12, 12), channels=(3, 5), hidden=16),
        "images",
        (4, 1, 12, 12),
    ),
    "residual": (resnet, "images", (6, 1, 8, 8)),
    "attention": (lambda: transformer(depth=1), "tokens", (4, 8, 8)),
    "recurrent": (lambda: lstm(5, width=6), "tokens", (9, 4, 5)),
}


def trainable(name: str) -> onnx.ModelProto:
    return build_training_model(MODELS[name][0](), loss="SoftmaxCrossEntropy", optimizer="SGD")


def losses(model: onnx.ModelProto, name: str) -> tuple[list[float], dict[str, Any]]:
    """Drives a step graph as any language would; returns the losses and the last state."""
    rng = np.random.default_rng(0)
    _, feed, shape = MODELS[name]
    pairs = json.loads({each.key: each.value for each in model.metadata_props}["ortops.step_graph"])
    names = [value.name for value in model.graph.output]
    state: dict[str, Any] = {}
    found = []
    for _ in range(3):
        batch = {
            feed: rng.standard_normal(shape, np.float32),
            "labels": rng.integers(0, 5, shape[0]),
        }
        results = dict(zip(names, run(model, {**batch, **state}), strict=True))
        found.append(float(results["loss"]))
        state = {variable: results[output] for variable, output in pairs.items()}
    return found, state


def domains(model: onnx.ModelProto) -> set[str]:
    def inside(nodes: Any) -> set[str]:
        found = set()
        for node in nodes:
            found.add(node.domain)
            for attribute in node.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    found |= inside(graph.node)
        return found

    return inside(model.graph.node)


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_same(name: str) -> None:
    """The functions of the step graph are what no pass has seen."""
    model = trainable(name)
    wanted, wanted_state = losses(step_graph(model), name)
    assert len(set(wanted)) == len(wanted)
    graphs = {
        "by default": lower(step_graph(model)),
        "lowered twice": lower(lower(step_graph(model), target="onnxruntime")),
        "at once": step_graph(model, target="onnxruntime"),
    }
    for graph in graphs.values():
        found, state = losses(graph, name)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        for variable, array in wanted_state.items():
            scale = np.abs(array).max() if array.size else 1
            np.testing.assert_allclose(state[variable], array, rtol=0, atol=2e-5 * scale)
    assert domains(graphs["by default"]) == {""}
    assert not graphs["by default"].functions
    assert domains(graphs["at once"]) <= {"", "com.microsoft"}
    onnx.checker.check_model(graphs["by default"], full_check=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["attention", "recurrent", "convolutions"])
def test_onnxruntime_gets_operators_of_its_own(name: str) -> None:
    graph = step_graph(trainable(name), target="onnxruntime")
    assert "com.microsoft" in domains(graph)
    assert "com.microsoft" in {each.domain for each in graph.opset_import}
    assert {each.op_type for each in graph.graph.node if each.domain} == {"FusedMatMul"}


def test_what_the_default_is_made_of() -> None:
    """No Indices of MaxPool, no loss that onnxruntime takes apart, no LSTM beside its gates."""
    convolutions = lower(step_graph(trainable("convolutions"))).graph.node
    assert {len(node.output) for node in convolutions if node.op_type == "MaxPool"} == {1}
    operators = {node.op_type for node in convolutions}
    assert {"LogSoftmax", "HardSigmoid"} <= operators
    assert "SoftmaxCrossEntropyLoss" not in operators
    recurrent = {node.op_type for node in lower(step_graph(trainable("recurrent"))).graph.node}
    assert "Scan" in recurrent
    assert "LSTM" not in recurrent


@pytest.mark.parametrize("target", TARGETS)
def test_metadata_inputs_and_outputs_are_those_of_the_step_graph(target: Any) -> None:
    model = trainable("layers")
    plain = step_graph(model)
    graph = step_graph(model, target=target) if target else lower(plain)
    assert list(graph.graph.input) == list(plain.graph.input)
    assert list(graph.graph.output) == list(plain.graph.output)
    assert list(graph.graph.initializer) == list(plain.graph.initializer)
    assert list(graph.metadata_props) == list(plain.metadata_props)
    assert not graph.training_info


@pytest.mark.parametrize("call", [lower, step_graph])
def test_unknown_target(call: Callable[..., Any]) -> None:
    for target in ("tpu", ["webgpu"]):
        with pytest.raises(
            ArgumentError, match=r"target must be None, 'onnxruntime', 'cuda' or 'webgpu', got "
        ):
            call(trainable("layers"), target=target)


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", TARGETS)
def test_the_argument_stays(target: Any) -> None:
    model = step_graph(trainable("attention"))
    before = model.SerializeToString()
    lower(model, target=target)
    assert model.SerializeToString() == before


def expression(x: Any, y: Any) -> Any:
    hidden = op.Relu(x @ op.Transpose(y, perm=[1, 0])) * np.float32(0.5)
    return op.ReduceSum(hidden * hidden, [0], keepdims=0)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gradients_of_a_formula(target: Any, rows: int) -> None:
    shapes = {"x": (rows, 3), "y": (4, 3)}
    model, feeds = with_gradients(expression, shapes)
    names = [value.name for value in model.graph.output]
    found = dict(zip(names, run(lower(model, target=target), feeds), strict=True))
    x, y = (feeds[name].astype(np.float64) for name in shapes)
    hidden = np.maximum(x @ y.T, 0) / 2
    rng = np.random.default_rng(0)
    for shape in shapes.values():
        rng.standard_normal(shape, np.float32)
    g = hidden * rng.standard_normal(4).astype(np.float32)  # 2 · hidden · ∂hidden/∂product
    np.testing.assert_allclose(found["x_gradient"], g @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["y_gradient"], g.T @ x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_types(target: Any, dtype: Any) -> None:
    """The sum of squares of what is above zero, of a tensor whose columns are not counted."""
    with Tape(name="types") as tape:
        x = tape.input("x", dtype, ["rows", None])
        y = tape.output(op.ReduceSum(op.Relu(x) * op.Relu(x), keepdims=0), "y")
        assert y.dtype == dtype
    model = tape.model()
    domain = "ai.onnx.preview.training"
    node = onnx.helper.make_node("Gradient", ["x"], ["slope"], domain=domain, xs=["x"], y="y")
    model.graph.node.append(node)
    kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model.graph.output.append(onnx.helper.make_tensor_value_info("slope", kind, None))
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    array = np.array([[-1, 2, 0.5], [3, -4, 0]], dtype)
    lowered = lower(model, target=target)
    assert domains(lowered) == {""}
    _, slope = run(lowered, {"x": array})
    np.testing.assert_array_equal(slope, np.array([[0, 4, 1], [6, 0, 0]], dtype))


def test_the_command_line_takes_all_targets() -> None:
    for target in get_args(Target):
        given = ["export-step", "model.onnx", "folder", "--target", target]
        assert make_parser("").parse_args(given).target == target
