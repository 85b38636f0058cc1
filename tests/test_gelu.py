"""Gelu in parts: every way in which it is written becomes one node, and nothing else does.

Steps with the pass and without are compared in tests/test_passes.py.
"""

from __future__ import annotations

import math
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
from ortops.graph.passes.gelu import GELU
from tests.spies import Spy, lowered

HALF, ROOT = math.sqrt(0.5), math.sqrt(2 / math.pi)

Function = Callable[[Tensor], Tensor]

FORMS: dict[str, tuple[Function, str]] = {
    "erf of a quotient": (lambda x: x * (op.Erf(x / math.sqrt(2)) + 1.0) * 0.5, "none"),
    "erf of a product": (lambda x: 0.5 * x * (1.0 + op.Erf(x * HALF)), "none"),
    "half of the sum": (lambda x: x * (0.5 * (1.0 + op.Erf(HALF * x))), "none"),
    "over two": (lambda x: x * (1.0 + op.Erf(HALF * x)) / 2.0 * 1.0, "none"),
    "cube as a power": (
        lambda x: 0.5 * x * (1.0 + op.Tanh(ROOT * (x + 0.044715 * op.Pow(x, 3.0)))),
        "tanh",
    ),
    "cube as products": (
        lambda x: 0.5 * x * (op.Tanh((x * x * x * 0.044715 + x) * ROOT) + 1.0),
        "tanh",
    ),
    "square": (
        lambda x: x * 0.5 * (1.0 + op.Tanh(x * ROOT * (1.0 + 0.044715 * x * x))),
        "tanh",
    ),
    "square as a power": (
        lambda x: x * (1.0 + op.Tanh(ROOT * x * (0.044715 * op.Pow(x, 2.0) + 1.0))) * 0.5,
        "tanh",
    ),
}

OTHERS: dict[str, Function] = {
    "another width": lambda x: x * (op.Erf(x / 1.5) + 1.0) * 0.5,
    "another factor": lambda x: x * (op.Erf(x * HALF) + 1.0) * 0.51,
    "another shift": lambda x: x * (op.Erf(x * HALF) + 1.5) * 0.5,
    "another operand": lambda x: op.Relu(x) * (op.Erf(x * HALF) + 1.0) * 0.5,
    "squared": lambda x: x * x * (op.Erf(x * HALF) + 1.0) * 0.5,
    "another cubic": lambda x: 0.5 * x * (1.0 + op.Tanh(ROOT * (x + 0.0447 * op.Pow(x, 3.0)))),
    "another power": lambda x: 0.5 * x * (1.0 + op.Tanh(ROOT * (x + 0.044715 * op.Pow(x, 2.0)))),
    "no cubic": lambda x: 0.5 * x * (1.0 + op.Tanh(ROOT * x)),
    "a part read twice": lambda x: _twice(x, op.Erf(x * HALF)),
    "a vector of factors": lambda x: x * (op.Erf(x * HALF) + 1.0) * np.full(6, 0.5, np.float32),
}


def _twice(x: Tensor, part: Tensor) -> Tensor:
    return x * (part + 1.0) * 0.5 + part


def model(function: Function, dtype: type = np.float32, *, shown: str = "") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="gelu") as tape:
        x = tape.input("x", dtype, ["batch", 6])
        h = x @ tape.initializer("first", rng.standard_normal((6, 6)).astype(dtype))
        y = function(h)
        if shown:
            (node,) = (each for each in tape.nodes if each.op_type == shown)
            tape.output(tape.tensor(node.outputs[0]), "shown")
        tape.output(y @ tape.initializer("second", rng.standard_normal((6, 3)).astype(dtype)), "y")
    return tape.model()


def trained(
    proto: onnx.ModelProto, settings: Settings | None = None
) -> tuple[Counter[str], dict[str, np.ndarray]]:
    """Returns the operators of a step's graph, and the parameters after three steps."""
    trainable = build_training_model(
        proto, loss=ortops.losses.MeanSquaredError("y"), optimizer="Adam"
    )
    spy, rng = Spy(), np.random.default_rng(1)
    session = TrainingSession(trainable, settings=spy.watching(settings or Settings()))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(proto.graph.input[0].type.tensor_type.elem_type)
    for _ in range(3):
        x = 2 * rng.standard_normal((5, 6)).astype(dtype)
        session.step({"x": x, "targets": np.ones((5, 3), dtype)})
    (operators,) = spy.operators
    return Counter(operators), dict(session.parameters)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_becomes_one_node(form: str) -> None:
    function, _ = FORMS[form]
    operators, found = trained(model(function))
    assert operators["Gelu"] == 1
    others, wanted = trained(model(function), Settings().without("gelu"))
    assert others["Gelu"] == 0
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_function_that_it_becomes(form: str) -> None:
    function, approximate = FORMS[form]
    x = np.linspace(-4, 4, 48, dtype=np.float32).reshape(8, 6)
    with Tape(name="both") as tape:
        value = tape.input("x", np.float32, [8, 6])
        tape.output(function(value), "parts")
        tape.output(op.Gelu(value, approximate=approximate), "whole")
    parts, whole = ortops.InferenceSession(tape.model()).run(None, {"x": x})
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_gelu_stays(other: str) -> None:
    operators, found = trained(model(OTHERS[other]))
    assert operators["Gelu"] == 0
    _, wanted = trained(model(OTHERS[other]), Settings(passes=()))
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shown", ["Erf", "Add", "Div"])
def test_parts_that_are_outputs_stay(shown: str) -> None:
    operators, _ = trained(model(FORMS["erf of a quotient"][0], shown=shown))
    assert operators["Gelu"] == 0


def test_other_types_stay() -> None:
    operators, _ = trained(model(FORMS["cube as products"][0], np.float64))
    assert operators["Gelu"] == 0


def test_gradients_with_respect_to_a_part_stay() -> None:
    with Tape(name="part") as tape:
        x = tape.input("x", np.float32, [6])
        inner = x / math.sqrt(2)
        y = op.ReduceSum(x * (op.Erf(inner) + 1.0) * 0.5, keepdims=0)
        tape.output(ortops.grad(y, [inner])[0], "slope")
    given = np.linspace(-2, 2, 6, dtype=np.float32)
    lowered = ortops.lower(tape.model(), target="onnxruntime")
    assert "Gelu" not in {node.op_type for node in lowered.graph.node}
    (slope,) = ortops.InferenceSession(lowered).run(None, {"x": given})
    wanted = given / math.sqrt(math.pi) * np.exp(-given * given / 2)
    np.testing.assert_allclose(slope, wanted, rtol=1e-5, atol=1e-7)


def test_lower_for_onnxruntime_keeps_the_operand_alone() -> None:
    with Tape(name="saliency") as tape:
        x = tape.input("x", np.float32, [6])
        y = op.ReduceSum(FORMS["cube as a power"][0](x), keepdims=0)
        tape.output(ortops.grad(y, [x])[0], "slope")
    given = np.linspace(-3, 3, 6, dtype=np.float32)
    lowered = ortops.lower(tape.model(), target="onnxruntime")
    (slope,) = ortops.InferenceSession(lowered).run(None, {"x": given})
    wide = given.astype(np.float64)

    def gelu(v: np.ndarray) -> np.ndarray:
        return 0.5 * v * (1 + np.tanh(ROOT * (v + 0.044715 * v**3)))

    wanted = (gelu(wide + 1e-6) - gelu(wide - 1e-6)) / 2e-6
    np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op_type", ["Erf", "Gelu"])
def test_rules_of_the_user_go_before_it(op_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(USER, "rules", {})
    ortops.vjp(op_type)(lambda g, y, x: g * 0.0)
    operators, _ = trained(model(FORMS["erf of a product"][0]))
    assert operators["Gelu"] == 0


# ------------------------------------------------------------------------- gradient by the output


def tanh_slope(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the derivative of the tanh form in float64."""
    x = np.clip(x.astype(np.float64), -12, 12)  # beyond it, it is 0 or 1
    t = np.tanh(ROOT * (x + 0.044715 * x**3))
    return (1 + t) / 2 + x * (1 - t * t) / 2 * ROOT * (1 + 3 * 0.044715 * x * x)


def behind_gelu(*, read: bool) -> onnx.ModelProto:
    """A model with the gradient by x, which other gradients read the output of Gelu for or not."""
    domain, names = "ai.onnx.preview.training", ["x", "w"] if read else ["x"]
    shapes = {"x": ["batch", 1], "w": [1, 1]}
    with Tape(name="behind") as tape:
        x, w = (tape.input(name, np.float32, shape) for name, shape in shapes.items())
        y = op.Gelu(x * 1.0, approximate="tanh")
        tape.output(op.ReduceSum(op.Reshape(y, [-1, 1]) @ w, keepdims=0), "total")
    model = tape.model()
    outputs = [f"d_{name}" for name in names]
    model.graph.node.append(
        onnx.helper.make_node("Gradient", names, outputs, domain=domain, xs=names, y="total")
    )
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(f"d_{name}", 1, shapes[name]) for name in names
    )
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize("read", [True, False])
def test_gradient_by_the_output(read: bool) -> None:
    made = lowered(behind_gelu(read=read), GELU)
    operators = Counter(node.op_type for node in made.graph.node)
    assert (operators["Sigmoid"], operators["Tanh"]) == ((1, 0) if read else (0, 1))
    small = np.geomspace(1e-30, 12, 2000)
    x = np.concatenate([np.linspace(-12, 12, 20001), small, -small, [0.0, 1e30, -1e30, 50, -50]])
    feeds = {"x": x.astype(np.float32)[:, None], "w": np.ones((1, 1), np.float32)}
    found = run_by_name(made, feeds)["d_x"]
    np.testing.assert_allclose(found, tanh_slope(feeds["x"]), rtol=0, atol=1e-5)


def test_gradient_of_higher_order_is_that_of_the_rule() -> None:
    with Tape(name="second") as tape:
        x = tape.input("x", np.float32, [9, 1])
        w = tape.input("w", np.float32, [1, 1])
        total = op.ReduceSum(op.Gelu(x, approximate="tanh") @ w, keepdims=0)
        (slope, _) = ortops.grad(total, [x, w])
        tape.output(ortops.grad(op.ReduceSum(slope, keepdims=0), [x])[0], "second")
    made = lowered(tape.model(), GELU)
    assert "Sigmoid" not in {node.op_type for node in made.graph.node}
    at = np.linspace(-3, 3, 9)
    wanted = (tanh_slope(at + 1e-5) - tanh_slope(at - 1e-5)) / 2e-5
    feeds = {"x": at.astype(np.float32)[:, None], "w": np.ones((1, 1), np.float32)}
    np.testing.assert_allclose(run_by_name(made, feeds)["second"][:, 0], wanted, atol=1e-4)
