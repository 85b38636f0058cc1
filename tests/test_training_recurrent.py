"""LSTM, GRU and RNN in lowered graphs, which keep their gates.

The gradients are compared with those of a graph that no pass has seen, whose rule computes the
gates once more and is tested against the equations; outputs with those of onnxruntime's
operators.
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
from ortops.engine.execution.settings import Settings
from ortops.graph.passes.recurrent import RECURRENT
from tests.spies import Spy, lowered

DIRECTIONS = ("forward", "reverse", "bidirectional")
STEPS, SAMPLES, FEATURES, UNITS = 4, 9, 2, 3
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS = ["X", "W", "R", "B", "lengths", "h", "c", "P"]

CELLS = pytest.mark.parametrize(
    ("operator", "attributes"),
    [("LSTM", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})],
    ids=["LSTM", "GRU", "GRU-linear", "RNN"],
)


def build(
    operator: str = "LSTM",
    *,
    optional: str = "Bhc",
    outputs: Sequence[str] = ("Y", "Y_h", "Y_c"),
    xs: Sequence[str] | None = None,
    symbolic: bool = False,
    samples: int = SAMPLES,
    lengths: bool = False,
    **attributes: Any,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of an operator's outputs and the gradients of Σ w · outputs, and its feeds.

    What other operators than LSTM do not have, a cell state, is left out of the arguments.
    """
    if operator != "LSTM":
        optional = optional.replace("c", "")
        outputs = [name for name in outputs if name != "Y_c"]
    gates = GATES[operator]
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    shapes = {
        "X": (STEPS, samples, FEATURES),
        "W": (directions, gates * UNITS, FEATURES),
        "R": (directions, gates * UNITS, UNITS),
        "B": (directions, 2 * gates * UNITS),
        "h": (directions, samples, UNITS),
        "c": (directions, samples, UNITS),
        "P": (directions, 3 * UNITS),
    }
    rng = np.random.default_rng(3)
    present = ["X", "W", "R", *optional]
    feeds = {name: rng.standard_normal(shapes[name], np.float32) for name in present}
    order = INPUTS if operator == "LSTM" else INPUTS[:6]
    places = ["Y", "Y_h", "Y_c"] if operator == "LSTM" else ["Y", "Y_h"]
    if lengths:
        feeds["lengths"] = np.arange(samples, dtype=np.int32) % (STEPS + 1)
    nodes = [
        helper.make_node(
            operator,
            [name if name in feeds else "" for name in order],
            [name if name in outputs else "" for name in places],
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
    ours = lowered(proto, RECURRENT)
    assert GATES.keys().isdisjoint(operators(ours))
    standard = lowered(proto)
    assert not GATES.keys().isdisjoint(operators(standard))
    names = [entry.name for entry in standard.graph.output]
    assert [entry.name for entry in ours.graph.output] == names
    for name, a, b in zip(names, run(ours, feeds), run(standard, feeds), strict=True):
        assert a.shape == b.shape
        scale = np.abs(b).max()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale, err_msg=name)
        assert scale > 0


@pytest.mark.nightly
@pytest.mark.quick(1)
@CELLS
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_gradients(
    operator: str, attributes: dict[str, int], direction: str, symbolic: bool
) -> None:
    check(*build(operator, direction=direction, symbolic=symbolic, **attributes))


@pytest.mark.nightly
@pytest.mark.quick(2)
@CELLS
@pytest.mark.parametrize("optional", ["", "B", "h", "Bh"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_optional_inputs(
    operator: str, attributes: dict[str, int], direction: str, optional: str
) -> None:
    check(*build(operator, direction=direction, optional=optional, **attributes))


@pytest.mark.nightly
@pytest.mark.quick(2)
@CELLS
@pytest.mark.parametrize("outputs", [["Y"], ["Y_h"]], ids="-".join)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_optional_outputs(
    operator: str, attributes: dict[str, int], direction: str, outputs: Sequence[str]
) -> None:
    check(*build(operator, direction=direction, outputs=outputs, **attributes))


@pytest.mark.quick(2)
@pytest.mark.parametrize("outputs", [["Y_c"], ["Y", "Y_c"]], ids="-".join)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_optional_cell_state(direction: str, outputs: Sequence[str]) -> None:
    check(*build(direction=direction, optional="c", outputs=outputs))


@pytest.mark.nightly
@pytest.mark.quick(3)
@CELLS
@pytest.mark.parametrize("xs", ["X", "W", "R", "B", "h"])
def test_gradient_of_one_input(operator: str, attributes: dict[str, int], xs: str) -> None:
    check(*build(operator, xs=xs, **attributes))


def test_gradient_of_the_cell_state() -> None:
    check(*build(xs="c"))


@pytest.mark.quick(2)
@CELLS
def test_one_step(
    operator: str, attributes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "STEPS", 1)
    check(*build(operator, **attributes))


@pytest.mark.parametrize(
    ("operator", "activations"),
    [("LSTM", ["Sigmoid", "Tanh", "Tanh"]), ("GRU", ["Sigmoid", "Tanh"]), ("RNN", ["Tanh"])],
)
def test_usual_activations_written_out(operator: str, activations: Sequence[str]) -> None:
    check(*build(operator, activations=activations))


@pytest.mark.quick(3)
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
    ours = lowered(proto, RECURRENT)
    assert ours == lowered(proto)
    assert "LSTM" in operators(ours)
    assert all(np.isfinite(array).all() for array in run(ours, feeds))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("GRU", {"lengths": True}),
        ("GRU", {"clip": 0.5}),
        ("GRU", {"activations": ["HardSigmoid", "Tanh"]}),
        ("GRU", {"samples": 7}),
        ("RNN", {"lengths": True}),
        ("RNN", {"activations": ["Relu"]}),
        ("RNN", {"samples": 3}),
    ],
    ids=lambda each: each if isinstance(each, str) else next(iter(each)),
)
def test_other_forms_of_the_others_stay(operator: str, options: dict[str, Any]) -> None:
    proto, feeds = build(operator, **options)
    ours = lowered(proto, RECURRENT)
    assert ours == lowered(proto)
    assert operator in operators(ours)
    assert all(np.isfinite(array).all() for array in run(ours, feeds))


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.torch
@pytest.mark.parametrize("form", ["static", "symbolic, Y only", "symbolic, last states only"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("operator", "attributes"),
    [("LSTM", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})],
    ids=GATES,
)
def test_gradients_are_those_of_torch(
    operator: str, attributes: dict[str, int], direction: str, form: str
) -> None:
    """In float64; PyTorch's GRU is linear before its reset gate."""
    import torch

    outputs = ["Y"] * ("last" not in form) + ["Y_h", "Y_c"] * ("Y only" not in form)
    symbolic = form.startswith("symbolic")
    proto, feeds = build(
        operator, direction=direction, outputs=outputs, symbolic=symbolic, **attributes
    )
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[operator]

    def in_order(array: np.ndarray) -> torch.Tensor:
        """Gates as PyTorch has them, where ONNX says iofc and zrn."""
        return torch.from_numpy(np.concatenate([np.split(array, len(order))[g] for g in order]))

    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    leaves = {
        name: torch.from_numpy(wide[name]).requires_grad_() for name in "Xhc" if name in feeds
    }
    nets, ys, ends = [], [], []
    for index, backwards in enumerate(
        {"bidirectional": [0, 1]}.get(direction, [direction[0] == "r"])
    ):
        net = getattr(torch.nn, operator)(FEATURES, UNITS, dtype=torch.float64)
        b_w, b_r = np.split(wide["B"][index], 2)
        given = {"weight_ih": wide["W"][index], "weight_hh": wide["R"][index]}
        given |= {"bias_ih": b_w, "bias_hh": b_r}
        net.load_state_dict({f"{name}_l0": in_order(array) for name, array in given.items()})
        states = tuple(leaves[name][index : index + 1] for name in "hc" if name in leaves)
        x = leaves["X"].flip(0) if backwards else leaves["X"]
        y, last = net(x, states if operator == "LSTM" else states[0])
        nets.append(net)
        ys.append(y.flip(0) if backwards else y)
        ends.append(last if operator == "LSTM" else [last])
    lasts = [torch.cat(each) for each in zip(*ends, strict=True)]
    results = dict(zip(("Y", "Y_h", "Y_c"), (torch.stack(ys, 1), *lasts), strict=False))
    results = {name: array for name, array in results.items() if name in outputs}
    sum((torch.from_numpy(wide[f"w_{k}"]) * v).sum() for k, v in results.items()).backward()
    wanted = {f"d_{name}": leaf.grad for name, leaf in leaves.items()} | results
    ours = lowered(proto, RECURRENT)
    assert operator not in operators(ours)
    found = dict(zip([entry.name for entry in ours.graph.output], run(ours, feeds), strict=True))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array.detach(), rtol=1e-4, atol=1e-5, err_msg=name)
    for index, net in enumerate(nets):
        bias = np.concatenate([net.bias_ih_l0.grad, net.bias_hh_l0.grad])
        of_bias = [in_order(half) for half in np.split(found["d_B"][index], 2)]
        np.testing.assert_allclose(np.concatenate(of_bias), bias, rtol=1e-4, atol=1e-5)
        for name, grad in (("d_W", net.weight_ih_l0.grad), ("d_R", net.weight_hh_l0.grad)):
            np.testing.assert_allclose(
                in_order(found[name][index]), grad, rtol=1e-4, atol=1e-5, err_msg=name
            )


def test_what_no_gradient_passes_through_stays() -> None:
    proto, _ = build(outputs=["Y"], xs=["w_Y"])
    assert lowered(proto, RECURRENT) == lowered(proto)


def test_higher_order_stays() -> None:
    proto, _ = build(outputs=["Y"], xs=("X",))
    proto.graph.node.append(helper.make_node("ReduceSumSquare", ["d_X"], ["squares"], keepdims=0))
    proto.graph.node.append(node("Gradient", ["R"], ["dd_R"], xs=["R"], y="squares"))
    proto.graph.output.append(value("dd_R", [1, 4 * UNITS, UNITS]))
    assert lowered(proto, RECURRENT) == lowered(proto)


@pytest.mark.slow
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
    kept, *small = spies[0].operators  # for any size, and where few samples gain nothing
    assert "LSTM" not in kept
    assert [operators.count("LSTM") for operators in small] == [1, 1]
    standard = TrainingSession(
        trainable, settings=spies[1].watching(Settings().without("recurrent"))
    )
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
    assert "LSTM" in operators(lowered(proto, RECURRENT))
    proto, _ = build(symbolic=True, xs=("R",))
    assert "LSTM" not in operators(lowered(proto, RECURRENT))
