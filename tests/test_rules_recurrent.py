"""LSTM, GRU and RNN against differences of the equations in numpy, in float64.

onnxruntime has no float64 kernel for them, and onnx's reference implementation ignores most of
their attributes. So the equations stand here once more, written as loops over samples and steps.
They are compared with what onnxruntime computes in float32; the gradients are compared with their
differences in float64, for which the forward node of the lowered model is run by them, and with
the same gradients in float32, which onnxruntime computes on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import model, node, run, value
from onnx import TensorProto, helper

import ortops

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
OUTPUTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}
INPUTS = ("X", "W", "R", "B", "lens", "h", "c", "P")
USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}

ACTIVATIONS: dict[str, tuple[Callable[..., np.ndarray], int]] = {
    "Relu": (lambda x: np.maximum(x, 0), 0),
    "Tanh": (np.tanh, 0),
    "Sigmoid": (lambda x: 1 / (1 + np.exp(-x)), 0),
    "Softsign": (lambda x: x / (1 + np.abs(x)), 0),
    "Softplus": (lambda x: np.log1p(np.exp(x)), 0),
    "LeakyRelu": (lambda x, alpha=0.01: np.where(x < 0, alpha * x, x), 1),
    "ThresholdedRelu": (lambda x, alpha=0.0: np.where(x > alpha, x, 0), 1),
    "Elu": (lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(x), x), 1),
    "Affine": (lambda x, alpha=0.0, beta=0.0: alpha * x + beta, 2),
    "ScaledTanh": (lambda x, alpha=0.0, beta=0.0: alpha * np.tanh(beta * x), 2),
    "HardSigmoid": (lambda x, alpha=0.2, beta=0.5: np.clip(alpha * x + beta, 0, 1), 2),
}
"""Each activation, with onnxruntime's defaults, and how many numbers it takes."""


def activations(op: str, attributes: Mapping[str, Any]) -> list[Callable[..., np.ndarray]]:
    """Returns the activations of all directions."""
    alphas = list(attributes.get("activation_alpha", []))
    betas = list(attributes.get("activation_beta", []))
    found = []
    for name in attributes.get("activations", USUAL[op] * 2):
        function, count = ACTIVATIONS[name]
        numbers = {}
        if count > 0 and alphas:
            numbers["alpha"] = np.float32(alphas.pop(0)).item()
        if count > 1 and betas:
            numbers["beta"] = np.float32(betas.pop(0)).item()
        found.append(lambda x, function=function, numbers=numbers: function(x, **numbers))
    return found


def recurrence(
    op: str, given: Mapping[str, np.ndarray], attributes: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the outputs of a recurrent operator.

    Args:
        op: LSTM, GRU or RNN.
        given: The inputs by the names in ``INPUTS``.
        attributes: The attributes.
    """
    given = dict(given)
    if attributes.get("layout"):
        given.update({k: given[k].swapaxes(0, 1) for k in ("X", "h", "c") if k in given})
    steps, samples, _ = given["X"].shape
    directions, rows, size = given["R"].shape
    state = np.zeros((directions, samples, size), given["X"].dtype)
    lens = given.get("lens", np.full(samples, steps))
    functions = activations(op, attributes)
    each = len(USUAL[op])
    limit = np.float32(attributes.get("clip", np.inf)).item()
    outputs = {"Y": np.zeros((steps, *state.shape), state.dtype), "Y_h": state, "Y_c": state.copy()}
    outputs["Y_h"] = state.copy()
    for d in range(directions):
        w_bias, r_bias = np.split(given["B"][d] if "B" in given else np.zeros(2 * rows), 2)
        peepholes = np.split(given["P"][d] if "P" in given else np.zeros(3 * size), 3)
        f, *others = (
            lambda x, function=function: function(np.clip(x, -limit, limit))
            for function in functions[d * each : (d + 1) * each]
        )
        output_function = functions[(d + 1) * each - 1]  # applied to the cell, which is not clipped
        for n in range(samples):
            h = given.get("h", state)[d, n]
            c = given.get("c", state)[d, n]
            order = range(lens[n])
            for t in reversed(order) if attributes.get("direction") == "reverse" or d else order:
                of_x = given["W"][d] @ given["X"][t, n] + w_bias
                weights = given["R"][d]
                if op == "RNN":
                    h = f(of_x + weights @ h + r_bias)
                elif op == "GRU":
                    x_z, x_r, x_n = np.split(of_x, 3)
                    r_z, r_r, r_n = np.split(weights, 3)
                    b_z, b_r, b_n = np.split(r_bias, 3)
                    z, r = f(x_z + r_z @ h + b_z), f(x_r + r_r @ h + b_r)
                    if attributes.get("linear_before_reset"):
                        new = others[0](x_n + r * (r_n @ h + b_n))
                    else:
                        new = others[0](x_n + r_n @ (r * h) + b_n)
                    h = (1 - z) * new + z * h
                else:
                    a_i, a_o, a_f, a_c = np.split(of_x + weights @ h + r_bias, 4)
                    p_i, p_o, p_f = peepholes
                    i = f(a_i + p_i * c)
                    forget = 1 - i if attributes.get("input_forget") else f(a_f + p_f * c)
                    c = forget * c + i * others[0](a_c)
                    h = f(a_o + p_o * c) * output_function(c)
                outputs["Y"][t, d, n] = h
            if lens[n]:
                outputs["Y_h"][d, n], outputs["Y_c"][d, n] = h, c
    if attributes.get("layout"):
        outputs["Y"] = outputs["Y"].transpose(2, 0, 1, 3)
        outputs.update({k: outputs[k].swapaxes(0, 1) for k in ("Y_h", "Y_c")})
    return {name: outputs[name] for name in OUTPUTS[op]}


@dataclass(frozen=True)
class Case:
    """A recurrent node.

    Attributes:
        op: LSTM, GRU or RNN.
        attributes: Its attributes but ``hidden_size``.
        optional: The optional inputs that it has.
        outputs: The outputs that it has.
        lens: Sequence lengths, if it has them.
        orders: Up to which order derivatives are checked.
        scale: The size of the numbers.
        name: What tells the case from others.
    """

    op: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ("B", "h", "c")
    outputs: Sequence[str] = ("Y", "Y_h", "Y_c")
    lens: Sequence[int] | None = None
    orders: int = 1
    scale: float = 0.7
    name: str = ""

    def __str__(self) -> str:
        direction = self.attributes.get("direction", "forward")
        return "-".join(filter(None, (self.op, direction, self.name)))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the inputs: 4 steps, 3 samples, 2 features, hidden size 3."""
        rng = np.random.default_rng(7)
        directions = 2 if self.attributes.get("direction") == "bidirectional" else 1
        rows = GATES[self.op] * 3
        shapes = {
            "X": (4, 3, 2),
            "W": (directions, rows, 2),
            "R": (directions, rows, 3),
            "B": (directions, 2 * rows),
            "h": (directions, 3, 3),
            "c": (directions, 3, 3),
            "P": (directions, 9),
        }
        if self.attributes.get("layout"):
            shapes.update({k: (shapes[k][1], shapes[k][0], *shapes[k][2:]) for k in "Xhc"})
        wanted = ["X", "W", "R", *self.optional]
        if self.op != "LSTM":
            wanted = [name for name in wanted if name not in ("c", "P")]
        found = {k: self.scale * rng.standard_normal(shapes[k]) for k in wanted}
        if self.lens is not None:
            found["lens"] = np.array(self.lens, np.int32)
        return found


def build(
    case: Case, arrays: Mapping[str, np.ndarray], symbolic: bool
) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], dict[str, np.ndarray]]:
    """Returns nodes that compute f1 = Σ w · outputs, the inputs, and the weights."""
    names = INPUTS[: 8 if case.op == "LSTM" else 6]
    outputs = [name if name in case.outputs else "" for name in OUTPUTS[case.op]]
    under_test = helper.make_node(
        case.op,
        [name if name in arrays else "" for name in names],
        outputs,
        name="under_test",
        hidden_size=3,
        **case.attributes,
    )
    nodes = [under_test]
    rng = np.random.default_rng(8)
    shapes = {
        name: array.shape for name, array in recurrence(case.op, arrays, case.attributes).items()
    }
    feeds = dict(arrays)
    for name in filter(None, outputs):
        feeds[f"w_{name}"] = rng.standard_normal(shapes[name]).astype(arrays["X"].dtype)
        nodes.append(helper.make_node("Mul", [name, f"w_{name}"], [f"weighted_{name}"]))
        nodes.append(helper.make_node("ReduceSum", [f"weighted_{name}"], [f"s_{name}"], keepdims=0))
    nodes.append(helper.make_node("Sum", [f"s_{name}" for name in filter(None, outputs)], ["f1"]))
    inputs = [
        value(
            name,
            [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape,
            helper.np_dtype_to_tensor_dtype(array.dtype),
        )
        for name, array in feeds.items()
    ]
    return nodes, inputs, feeds


def run_wide(
    case: Case, lowered: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Runs a lowered model in float64; the recurrent nodes are run by `recurrence`."""
    feeds = dict(feeds)
    computed = recurrence(case.op, {k: feeds[k] for k in INPUTS if k in feeds}, case.attributes)
    lowered = onnx.ModelProto.FromString(lowered.SerializeToString())
    kept = []
    for step in lowered.graph.node:
        if step.op_type != case.op:
            kept.append(step)
            continue
        for name, output in zip(step.output, computed.values(), strict=False):
            if name:
                feeds[name] = output
                lowered.graph.input.append(value(name, output.shape, TensorProto.DOUBLE))
    del lowered.graph.node[:]
    lowered.graph.node.extend(kept)
    known = {entry.name for entry in lowered.graph.input}
    return run(lowered, {name: array for name, array in feeds.items() if name in known})


def check(case: Case, *, symbolic: bool) -> None:
    """Checks the gradients of all floating-point inputs of a case."""
    arrays = case.arrays()
    nodes, inputs, feeds = build(case, arrays, symbolic)
    narrow = {k: a.astype(np.float32) if a.dtype == np.float64 else a for k, a in feeds.items()}
    narrow_inputs = [
        value(
            entry.name, shape_of(entry), helper.np_dtype_to_tensor_dtype(narrow[entry.name].dtype)
        )
        for entry in inputs
    ]
    xs = [name for name in arrays if name != "lens"]
    rng = np.random.default_rng(9)

    def total(changed: Mapping[str, np.ndarray]) -> float:
        given = {name: changed[name] for name in arrays}
        outputs = recurrence(case.op, given, case.attributes)
        return sum(
            float((a * feeds[f"w_{k}"]).sum()) for k, a in outputs.items() if f"w_{k}" in feeds
        )

    function: Callable[[Mapping[str, np.ndarray]], float] = total
    for order in range(1, case.orders + 1):
        names = [f"d{order}_{x}" for x in xs]
        nodes = [*nodes, node("Gradient", xs, names, xs=xs, y=f"f{order}")]
        lowered = ortops.lower(model(nodes, inputs, names))
        found = run_wide(case, lowered, feeds)
        for x, gradient in zip(xs, found, strict=True):
            assert gradient.shape == feeds[x].shape
            assert np.isfinite(gradient).all()
            for _ in range(2):
                v = rng.standard_normal(feeds[x].shape)
                ahead, behind = (function({**feeds, x: feeds[x] + e * v}) for e in (1e-6, -1e-6))
                expected = (ahead - behind) / 2e-6
                error = abs(np.sum(gradient * v) - expected)
                scale = np.abs(gradient * v).sum() + abs(expected) + 1e-2
                assert error <= 2e-7 * scale, (order, x, np.sum(gradient * v), expected)
        if not case.attributes.get("layout"):  # which onnxruntime does not run
            alone = run(ortops.lower(model(nodes, narrow_inputs, names)), narrow)
            for got, wanted in zip(alone, found, strict=True):
                assert got.dtype == np.float32
                np.testing.assert_allclose(
                    got, wanted, rtol=1e-4, atol=2e-5 * np.abs(wanted).max(initial=1)
                )
        if order < case.orders:
            terms = []
            for x, name in zip(xs, names, strict=True):
                key = f"u{order}_{x}"
                feeds[key] = rng.standard_normal(feeds[x].shape)
                narrow[key] = feeds[key].astype(np.float32)
                shape = [f"{x}_{axis}" for axis in range(feeds[x].ndim)]
                shape = shape if symbolic else feeds[x].shape
                inputs.append(value(key, shape, TensorProto.DOUBLE))
                narrow_inputs.append(value(key, shape, TensorProto.FLOAT))
                nodes.append(helper.make_node("Mul", [name, key], [f"{key}_product"]))
                nodes.append(
                    helper.make_node("ReduceSum", [f"{key}_product"], [f"{key}_sum"], keepdims=0)
                )
                terms.append(f"{key}_sum")
            nodes.append(helper.make_node("Sum", terms, [f"f{order + 1}"]))
            function_model = ortops.lower(model(nodes, inputs, [f"f{order + 1}"]))

            def function(
                changed: Mapping[str, np.ndarray], model: onnx.ModelProto = function_model
            ) -> float:
                return float(run_wide(case, model, changed)[0])


def shape_of(entry: onnx.ValueInfoProto) -> list[int | str]:
    """Returns the dimensions of an input."""
    return [dim.dim_param or dim.dim_value for dim in entry.type.tensor_type.shape.dim]


DIRECTIONS = [{"direction": d} for d in ("forward", "reverse", "bidirectional")]
CASES = [Case(op, d, orders=2) for op in GATES for d in DIRECTIONS]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(case, symbolic):
    check(case, symbolic=symbolic)
