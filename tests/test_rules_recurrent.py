"""LSTM, GRU and RNN against differences of the equations in numpy, in float64.

onnxruntime has no float64 kernel for them, and onnx's reference implementation ignores most of
their attributes. So the equations stand here once more, written as loops over samples and steps.
They are compared with what onnxruntime computes in float32; the gradients are compared with their
differences in float64, for which the forward node of the lowered model is run by them, and with
the same gradients in float32, which onnxruntime computes on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.reference
import pytest
from checked import by_case, quick, without_gradient
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import plain_session, run, run_session

import ortops
from ortops.errors import UnsupportedError

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
    "Elu": (lambda x, alpha=1.0: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x), 1),
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
        hidden_size: The attribute.
        name: What tells the case from others.
        domain: The operator's domain.
        quick: Whether the quick suite has it; see `checked.quick`.
    """

    op: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    optional: Sequence[str] = ("B", "h", "c")
    outputs: Sequence[str] = ("Y", "Y_h", "Y_c")
    lens: Sequence[int] | None = None
    orders: int = 1
    scale: float = 0.7
    hidden_size: int | None = 3
    name: str = ""
    domain: str = ""
    quick: bool = True

    def __str__(self) -> str:
        direction = self.attributes.get("direction", "forward")
        return "-".join(filter(None, (self.op, direction, self.name)))

    @property
    def differentiated(self) -> list[int]:
        """The indices of the inputs whose gradient is checked."""
        return [INPUTS.index(name) for name in self.arrays() if name != "lens"]

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
    while not outputs[-1]:
        outputs.pop()
    under_test = helper.make_node(
        case.op,
        [name if name in arrays else "" for name in names],
        outputs,
        name="under_test",
        hidden_size=case.hidden_size,
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
    sums = [f"s_{name}" for name in filter(None, outputs)]
    nodes.append(helper.make_node("Sum", sums, ["f1"], name="total"))
    inputs = [
        value(
            name,
            [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape,
            helper.np_dtype_to_tensor_dtype(array.dtype),
        )
        for name, array in feeds.items()
    ]
    return nodes, inputs, feeds


def wide(
    case: Case, lowered: onnx.ModelProto
) -> Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]:
    """Returns what runs a lowered model in float64; `recurrence` runs the recurrent nodes."""
    proto = onnx.ModelProto.FromString(lowered.SerializeToString())
    forward = [step for step in proto.graph.node if step.op_type == case.op]
    for step in forward:
        proto.graph.node.remove(step)
        proto.graph.input.extend(value(n, None, TensorProto.DOUBLE) for n in step.output if n)
    # onnxruntime has no float64 kernels for these: their definitions by other operators.
    names = ["Elu", "HardSigmoid", "LeakyRelu", "Softplus", "Softsign", "ThresholdedRelu"]
    proto = onnx.inliner.inline_selected_functions(
        proto, [("", name) for name in names], inline_schema_functions=True
    )
    session = plain_session(proto)

    def run_wide(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        given = {name: feeds[name] for name in INPUTS if name in feeds}
        outputs = recurrence(case.op, given, case.attributes).values()
        fed = dict(feeds)
        for step in forward:
            fed.update(zip(step.output, outputs, strict=False))
        return run_session(session, fed)

    return run_wide


def check(case: Case, *, symbolic: bool) -> None:
    """Checks the gradients of all floating-point inputs of a case."""
    arrays = case.arrays()
    nodes, inputs, feeds = build(case, arrays, symbolic)
    narrow, narrow_inputs = narrowed(feeds), cast_to(inputs, np.float32)
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
        assert not without_gradient(lowered), "of the next order"
        found = wide(case, lowered)(feeds)
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
        if not case.attributes.get("layout") and case.hidden_size:  # else onnxruntime refuses it
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
            next_order = wide(case, ortops.lower(model(nodes, inputs, [f"f{order + 1}"])))

            def function(changed: Mapping[str, np.ndarray], run_next: Any = next_order) -> float:
                return float(run_next(changed)[0])


def narrowed(arrays: Mapping[str, np.ndarray], kind: type = np.float32) -> dict[str, np.ndarray]:
    """Casts what is float64."""
    return {k: a.astype(kind) if a.dtype == np.float64 else a for k, a in arrays.items()}


def cast_to(inputs: Sequence[onnx.ValueInfoProto], kind: type) -> list[onnx.ValueInfoProto]:
    """Returns descriptions of inputs with another type for what is float64."""
    found = []
    for entry in inputs:
        entry = onnx.ValueInfoProto.FromString(entry.SerializeToString())
        if entry.type.tensor_type.elem_type == TensorProto.DOUBLE:
            entry.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        found.append(entry)
    return found


DIRECTIONS = [{"direction": name} for name in ("forward", "reverse", "bidirectional")]
LINEAR = {"linear_before_reset": 1}
NUMBERS = {"activation_alpha": [0.7], "activation_beta": [0.3]}


def activation_cases() -> list[Case]:
    """Returns cases of every activation in every place, with and without its numbers."""
    cases = []
    for op, usual in USUAL.items():
        for place in range(len(usual)):
            for name, (_, count) in ACTIVATIONS.items():
                names = [*usual[:place], name, *usual[place + 1 :]]
                label = f"{name}_at_{place}"
                cases.append(Case(op, {"activations": names}, scale=0.4, name=label))
                if count:
                    given = dict(list(NUMBERS.items())[:count])
                    attributes = {"activations": names, **given}
                    cases.append(Case(op, attributes, scale=0.4, name=f"{label}_given"))
    return cases


CASES = [
    *(Case(op, d, orders=2) for op in GATES for d in DIRECTIONS),
    *(Case("GRU", {**LINEAR, **d}, orders=2, name="linear") for d in DIRECTIONS),
    *(Case(op, d, lens=[2, 4, 0], orders=2, name="lens") for op in GATES for d in DIRECTIONS),
    *(Case(op, d, lens=[1, 3, 2], name="all_short") for op in GATES for d in DIRECTIONS),
    Case(
        "GRU",
        {**LINEAR, "direction": "bidirectional"},
        lens=[2, 4, 0],
        orders=2,
        name="linear_lens",
    ),
    *(
        Case(
            "LSTM",
            {"direction": "bidirectional"},
            outputs=o,
            lens=n,
            name="_".join(o) + str(bool(n)),
        )
        for o in (["Y"], ["Y_h"], ["Y_c"], ["Y", "Y_c"], ["Y_h", "Y_c"])
        for n in (None, [2, 4, 0])
    ),
    *(Case(op, outputs=[o], name=o) for op in ("GRU", "RNN") for o in ("Y", "Y_h")),
    *(
        Case(op, {"direction": "reverse"}, optional=o, name="with_" + "".join(o))
        for op in GATES
        for o in ([], ["B"], ["h"])
    ),
    Case("GRU", LINEAR, optional=[], name="linear_with_nothing"),
    Case("LSTM", optional=["c"], name="with_c"),
    Case("LSTM", optional=["P"], name="with_P"),
    *(Case(op, {"clip": 0.5, **d}, name="clip", orders=2) for op in GATES for d in DIRECTIONS[:2]),
    Case("GRU", {**LINEAR, "clip": 0.5}, name="linear_clip"),
    *(
        Case("LSTM", {**d, **more}, optional="BhcP", lens=lens, orders=2, name=name)
        for d in DIRECTIONS
        for name, more, lens in (
            ("peepholes", {}, None),
            ("peepholes_lens", {"clip": 0.6}, [2, 4, 0]),
            ("coupled_peepholes", {"input_forget": 1}, None),
        )
    ),
    Case("LSTM", {"input_forget": 1}, orders=2, name="coupled"),
    *(
        Case(op, {"layout": 1, **d}, optional="BhcP", lens=lens, name=f"layout{bool(lens)}")
        for op in GATES
        for d in DIRECTIONS
        for lens in (None, [2, 4, 0])
    ),
    Case("GRU", {"layout": 1, **LINEAR}, name="layout_linear"),
    *(Case(op, hidden_size=None, name="no_hidden_size") for op in GATES),
    *(
        Case(
            op,
            {
                "direction": "bidirectional",
                "activations": [
                    *["LeakyRelu", "ScaledTanh", "Elu"][:n],
                    *["Affine", "Tanh", "HardSigmoid"][:n],
                ],
                "activation_alpha": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
                "activation_beta": [0.7, 0.8, 0.9],
            },
            scale=0.4,
            name="numbers_in_order",
        )
        for op, n in (("LSTM", 3), ("GRU", 2), ("RNN", 1))
    ),
    *activation_cases(),
]
CASES = quick(
    CASES,
    """
    LSTM-forward-peepholes_lens
    LSTM-forward-clip
    LSTM-forward-coupled_peepholes
    GRU-forward-clip
    GRU-forward-linear
    GRU-bidirectional-linear_lens
    RNN-forward-clip
    """,
)


def has_shapes(case: Case) -> bool:
    """Whether a case may depend on shapes; an activation does not."""
    return "activations" not in case.attributes


def is_known(case: Case) -> bool:
    """Whether an implementation of others runs a case; onnx's own ignores sequence lengths."""
    return not (case.attributes.get("layout") and case.lens)


@pytest.mark.nightly(22)
@pytest.mark.quick(1)
@by_case(CASES)
def test_gradient(case):
    check(case, symbolic=False)


@pytest.mark.nightly(12)
@pytest.mark.quick(1)
@by_case([*filter(has_shapes, CASES)])
def test_gradient_at_symbolic_shapes(case):
    twice = case.name in ("", "linear", "lens") and case.attributes != DIRECTIONS[2]
    check(replace(case, orders=1 + twice), symbolic=True)


@by_case([*filter(is_known, CASES)])
def test_equations(case):
    """The equations of this file are those of onnxruntime, or of onnx where that refuses."""
    arrays = case.arrays()
    nodes, inputs, _ = build(case, arrays, False)
    inputs = [entry for entry in inputs if entry.name in arrays]
    names = [name for name in nodes[0].output if name]
    expected = recurrence(case.op, arrays, case.attributes)
    if case.attributes.get("layout") or case.hidden_size is None:
        proto = model(nodes[:1], inputs, names)
        found = onnx.reference.ReferenceEvaluator(proto).run(None, arrays)
    else:
        found = run(model(nodes[:1], cast_to(inputs, np.float32), names), narrowed(arrays))
    for name, array in zip(names, found, strict=True):
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-4)


def gradient_model(
    case: Case, kind: type = np.float32
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of the gradients of all inputs of a case, and its feeds."""
    arrays = case.arrays()
    nodes, inputs, feeds = build(case, arrays, False)
    xs = [name for name in arrays if name != "lens"]
    names = [f"d_{x}" for x in xs]
    nodes.append(node("Gradient", xs, names, xs=xs, y="f1"))
    return model(nodes, cast_to(inputs, kind), names), narrowed(feeds, kind)


@pytest.mark.parametrize("op", GATES)
def test_opset_26(op):
    proto, feeds = gradient_model(Case(op, lens=[2, 4, 0]))
    expected = run(ortops.lower(proto), feeds)
    proto.opset_import[0].version = 26
    lowered = ortops.lower(proto)
    assert lowered.opset_import[0].version == 26
    for a, b in zip(run(lowered, feeds), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("op", GATES)
def test_float16(op):
    case = Case(op, {"direction": "bidirectional"}, lens=[2, 4, 0])
    wide_model, wide_feeds = gradient_model(case)
    half, feeds = gradient_model(case, np.float16)
    expected = run(ortops.lower(wide_model), wide_feeds)
    for got, wanted in zip(run(ortops.lower(half), feeds), expected, strict=True):
        assert got.dtype == np.float16
        np.testing.assert_allclose(got, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("op", GATES)
def test_inputs_of_unknown_rank(op, layout):
    case = Case(op, {"layout": layout})
    proto, feeds = gradient_model(case, np.float64)
    expected = wide(case, ortops.lower(proto))(feeds)
    for entry in proto.graph.input:
        entry.type.tensor_type.ClearField("shape")
    for a, b in zip(wide(case, ortops.lower(proto))(feeds), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_one_tensor_as_two_inputs():
    """Both states begin with one tensor, whose gradient is the sum of both gradients."""
    proto, feeds = gradient_model(Case("LSTM"))
    feeds["c"] = feeds["h"]
    separate = dict(zip("XWRBhc", run(ortops.lower(proto), feeds), strict=True))
    lstm, gradient = proto.graph.node[0], proto.graph.node[-1]
    lstm.input[6] = "h"
    del gradient.input[5:], gradient.output[5:]
    gradient.attribute[0].strings.pop()
    del proto.graph.output[5:]
    proto.graph.input.remove(next(entry for entry in proto.graph.input if entry.name == "c"))
    del feeds["c"]
    shared = dict(zip("XWRBh", run(ortops.lower(proto), feeds), strict=True))
    np.testing.assert_allclose(shared["h"], separate["h"] + separate["c"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shared["R"], separate["R"], rtol=1e-5, atol=1e-6)


def unread_nodes(graph: onnx.GraphProto) -> list[str]:
    """Returns the nodes of a graph, and of those inside, none of whose outputs is read."""
    inner = [a.g for step in graph.node for a in step.attribute if a.HasField("g")]
    read = {entry.name for entry in graph.output}
    read.update(name for g in (graph, *inner) for step in g.node for name in step.input)
    found = [step.name for step in graph.node if not read.intersection(step.output)]
    return [*found, *(name for g in inner for name in unread_nodes(g))]


@pytest.mark.parametrize("op", GATES)
def test_every_emitted_node_is_read(op):
    proto, _ = gradient_model(Case(op, {"direction": "bidirectional"}, lens=[2, 4, 0]))
    lowered = ortops.lower(proto)
    assert "Scan" in {step.op_type for step in lowered.graph.node}
    assert unread_nodes(lowered.graph) == []  # nor what only the Gradient node read


def test_unknown_activation():
    proto, _ = gradient_model(Case("RNN"))
    proto.graph.node[0].attribute.append(helper.make_attribute("activations", ["Cube"]))
    with pytest.raises(
        UnsupportedError,
        match=r"RNN node 'under_test': no gradient for activation 'Cube'; use one of Affine, ",
    ):
        ortops.lower(proto)


def test_unknown_direction():
    proto, _ = gradient_model(Case("GRU"))
    proto.graph.node[0].attribute.append(helper.make_attribute("direction", "sideways"))
    with pytest.raises(
        UnsupportedError,
        match=(
            "GRU node 'under_test': direction must be forward, reverse "
            "or bidirectional, got 'sideways'"
        ),
    ):
        ortops.lower(proto)


def test_too_few_activations():
    proto, _ = gradient_model(Case("LSTM"))
    proto.graph.node[0].attribute.append(helper.make_attribute("activations", ["Tanh"]))
    with pytest.raises(
        UnsupportedError,
        match=r"LSTM node 'under_test': direction forward requires 3 activations, got \['Tanh'\]",
    ):
        ortops.lower(proto)


@pytest.mark.torch
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("op", GATES)
def test_like_torch(op, bidirectional):
    import torch

    direction = "bidirectional" if bidirectional else "forward"
    attributes = {"direction": direction, **(LINEAR if op == "GRU" else {})}
    case = Case(op, attributes)
    proto, feeds = gradient_model(case)
    found = dict(zip(case.arrays(), run(ortops.lower(proto), feeds), strict=True))
    torch.manual_seed(0)
    module = getattr(torch.nn, op)(2, 3, bidirectional=bidirectional)
    # torch keeps the gates in another order: input, forget, cell, output and reset, update, new
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[op]

    def in_torch_order(array: np.ndarray) -> np.ndarray:
        return np.concatenate([np.split(array, GATES[op])[gate] for gate in order])

    names = {"W": "weight_ih_l0", "R": "weight_hh_l0", "B": ("bias_ih_l0", "bias_hh_l0")}

    def parts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {}
        for index, suffix in enumerate(["", "_reverse"][: 1 + bidirectional]):
            made[names["W"] + suffix] = in_torch_order(arrays["W"][index])
            made[names["R"] + suffix] = in_torch_order(arrays["R"][index])
            for name, bias in zip(names["B"], np.split(arrays["B"][index], 2), strict=True):
                made[name + suffix] = in_torch_order(bias)
        return made

    module.load_state_dict({k: torch.from_numpy(a) for k, a in parts(feeds).items()})
    x, h = (torch.tensor(feeds[name], requires_grad=True) for name in ("X", "h"))
    if op == "LSTM":
        c = torch.tensor(feeds["c"], requires_grad=True)
        y, last = module(x, (h, c))
    else:
        y, last = module(x, h)
        last = (last,)
    steps, samples, _ = y.shape
    y = y.reshape(steps, samples, -1, 3).transpose(1, 2)
    outputs = dict(zip(OUTPUTS[op], (y, *last), strict=True))
    total = sum((a * torch.from_numpy(feeds[f"w_{k}"])).sum() for k, a in outputs.items())
    total.backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found["X"], x.grad.numpy(), **close)
    np.testing.assert_allclose(found["h"], h.grad.numpy(), **close)
    if op == "LSTM":
        np.testing.assert_allclose(found["c"], c.grad.numpy(), **close)
    for name, array in parts(found).items():
        np.testing.assert_allclose(array, module.get_parameter(name).grad.numpy(), **close)


@pytest.mark.parametrize(
    ("op", "steps", "samples", "symbolic"),
    # Without samples, onnxruntime's LSTM and GRU end the process, without steps its GRU does.
    [("LSTM", 0, 2, False), ("RNN", 0, 2, False), ("RNN", 3, 0, False), ("RNN", 3, 0, True)],
)
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_no_steps_or_no_samples(
    op: str, steps: int, samples: int, symbolic: bool, direction: str
) -> None:
    directions, rows = 2 if direction == "bidirectional" else 1, 3 * GATES[op]
    shapes = {
        "X": (steps, samples, 2),
        "W": (directions, rows, 2),
        "R": (directions, rows, 3),
        "B": (directions, 2 * rows),
        "h": (directions, samples, 3),
    }
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    xs = list(feeds)
    nodes = [
        helper.make_node(
            op,
            ["X", "W", "R", "B", "", "h"],
            ["Y", "Y_h"],
            hidden_size=3,
            direction=direction,
        ),
        node("Gradient", xs, [f"d{x}" for x in xs], xs=xs, y="Y_h"),
    ]
    free = {"X": ["t", "n", 2], "h": [directions, "n", 3]} if symbolic else {}
    inputs = [value(name, free.get(name, shape)) for name, shape in shapes.items()]
    found = run(ortops.lower(model(nodes, inputs, [f"d{x}" for x in xs])), feeds)
    for gradient, array in zip(found, feeds.values(), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros_like(array))
