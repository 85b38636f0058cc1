"""LSTM in lowered graphs, which keeps its gates.

The gradients are compared with those of a graph that no pass has seen, whose rule computes the
gates once more and is tested against the equations; outputs with those of onnxruntime's LSTM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import model, node, value
from onnx import helper
from running import run

from models.lstm import lstm
from ortops import TrainingSession, build_training_model
from ortops.execution.settings import Settings
from ortops.passes.lstm import LSTM
from tests.spies import Spy, lowered

DIRECTIONS = ("forward", "reverse", "bidirectional")
STEPS, SAMPLES, FEATURES, UNITS = 4, 9, 2, 3


def build(
    *,
    optional: str = "Bhc",
    outputs: Sequence[str] = ("Y", "Y_h", "Y_c"),
    xs: Sequence[str] | None = None,
    symbolic: bool = False,
    samples: int = SAMPLES,
    lengths: bool = False,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of an LSTM's outputs and the gradients of Σ w · outputs, and its feeds."""
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = {
        "X": (STEPS, samples, FEATURES),
        "W": (directions, 4 * UNITS, FEATURES),
        "R": (directions, 4 * UNITS, UNITS),
        "B": (directions, 8 * UNITS),
        "h": (directions, samples, UNITS),
        "c": (directions, samples, UNITS),
        "P": (directions, 3 * UNITS),
    }
    rng = np.random.default_rng(3)
    present = ["X", "W", "R", *optional]
    feeds = {name: rng.standard_normal(shapes[name], np.float32) for name in present}
    order = ["X", "W", "R", "B", "lengths", "h", "c", "P"]
    if lengths:
        feeds["lengths"] = np.arange(samples, dtype=np.int32) % (STEPS + 1)
    nodes = [
        helper.make_node(
            "LSTM",
            [name if name in feeds else "" for name in order],
            [name if name in outputs else "" for name in ("Y", "Y_h", "Y_c")],
            name="under_test",
            hidden_size=UNITS,
            **attributes,
        )
    ]
    made = {
        "Y": (STEPS, directions, samples, UNITS),
        "Y_h": (directions, samples, UNITS),
        "Y_c": (directions, samples, UNITS),
    }
    for name in outputs:
        feeds[f"w_{name}"] = rng.standard_normal(made[name], np.float32)
        nodes.append(helper.make_node("Mul", [name, f"w_{name}"], [f"weighted_{name}"]))
        nodes.append(helper.make_node("ReduceSum", [f"weighted_{name}"], [f"s_{name}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"s_{name}" for name in outputs], ["total"]))
    named = list(xs or present)
    gradients = [f"d_{name}" for name in named]
    nodes.append(node("Gradient", named, gradients, xs=named, y="total"))
    inputs = [
        value(
            name,
            [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape,
            helper.np_dtype_to_tensor_dtype(array.dtype),
        )
        for name, array in feeds.items()
    ]
    return model(nodes, inputs, [*outputs, *gradients]), feeds


def operators(proto: onnx.ModelProto) -> set[str]:
    return {each.op_type for each in proto.graph.node}


def check(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> None:
    """Checks all that a model puts out; it must have been changed."""
    ours = lowered(proto, LSTM)
    assert "LSTM" not in operators(ours)
    standard = lowered(proto)
    assert "LSTM" in operators(standard)
    names = [entry.name for entry in standard.graph.output]
    assert [entry.name for entry in ours.graph.output] == names
    for name, a, b in zip(names, run(ours, feeds), run(standard, feeds), strict=True):
        assert a.shape == b.shape
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
        assert scale > 0


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients(direction: str, symbolic: bool) -> None:
    check(*build(direction=direction, symbolic=symbolic))


@pytest.mark.parametrize("optional", ["", "B", "h", "c", "Bh"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_optional_inputs(direction: str, optional: str) -> None:
    check(*build(direction=direction, optional=optional))


@pytest.mark.parametrize("outputs", [["Y"], ["Y_h"], ["Y_c"], ["Y", "Y_c"]], ids="-".join)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_optional_outputs(direction: str, outputs: Sequence[str]) -> None:
    check(*build(direction=direction, outputs=outputs))


@pytest.mark.parametrize("xs", ["X", "W", "R", "B", "h", "c"])
def test_gradient_of_one_input(xs: str) -> None:
    check(*build(xs=xs))


def test_usual_activations_written_out() -> None:
    check(*build(activations=["Sigmoid", "Tanh", "Tanh"]))


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": True},
        {"optional": "BhcP"},
        {"clip": 0.5},
        {"input_forget": 1},
        {"activations": ["Sigmoid", "Tanh", "Relu"]},
        {"samples": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_forms_stay(options: dict[str, Any]) -> None:
    proto, feeds = build(**options)
    ours = lowered(proto, LSTM)
    assert ours == lowered(proto)
    assert "LSTM" in operators(ours)
    assert all(np.isfinite(array).all() for array in run(ours, feeds))


def test_what_no_gradient_passes_through_stays() -> None:
    proto, _ = build(outputs=["Y"], xs=["w_Y"])
    assert lowered(proto, LSTM) == lowered(proto)


def test_higher_order_stays() -> None:
    proto, _ = build(outputs=["Y"], xs=("X",))
    proto.graph.node.append(helper.make_node("ReduceSumSquare", ["d_X"], ["squares"], keepdims=0))
    proto.graph.node.append(node("Gradient", ["R"], ["dd_R"], xs=["R"], y="squares"))
    proto.graph.output.append(value("dd_R", [1, 4 * UNITS, UNITS]))
    assert lowered(proto, LSTM) == lowered(proto)


def test_training() -> None:
    """A net is trained as with onnxruntime's LSTM, on batches of changing sizes."""
    trainable = build_training_model(lstm(5, width=6), loss="SoftmaxCrossEntropy", optimizer="SGD")
    rng = np.random.default_rng(0)
    batches = [
        {
            "tokens": rng.standard_normal((samples, steps, 5), np.float32),
            "labels": rng.integers(0, 10, samples),
        }
        for samples, steps in [(16, 7), (3, 7), (16, 2), (1, 1)]
    ]
    spies = Spy(), Spy()
    ours = TrainingSession(trainable, settings=spies[0].watching(Settings()))
    losses = [float(ours.step(batch)["loss"]) for batch in batches]
    (operators,) = spies[0].operators
    assert "LSTM" not in operators
    standard = TrainingSession(trainable, settings=spies[1].watching(Settings().without("lstm")))
    (operators,) = spies[1].operators
    assert operators.count("LSTM") == 1
    np.testing.assert_allclose(
        losses, [float(standard.step(batch)["loss"]) for batch in batches], rtol=1e-5
    )
    for name, array in standard.state.items():
        np.testing.assert_allclose(ours.state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gradient_of_the_input_alone_of_any_batch_stays() -> None:
    """A model that is served, whose batch may be 1."""
    proto, _ = build(symbolic=True, xs=("X",))
    assert "LSTM" in operators(lowered(proto, LSTM))
    proto, _ = build(symbolic=True, xs=("R",))
    assert "LSTM" not in operators(lowered(proto, LSTM))
