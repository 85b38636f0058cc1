"""Passes: each changes some graph, none changes numbers, and a user's own rules go before them.

Sums of updates, which are no pass, are compared with and without in tests/test_scaled_sums.py; the
order of nodes cannot be left out.
"""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from running import run

import ortops
from models.lenet import lenet
from models.lstm import lstm
from models.mlp import mlp
from models.transformer import transformer
from ortops import OrtopsError, Tape, Tensor, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.graph.autodiff.registry import USER, Rules, Table
from ortops.graph.autodiff.rules import RULES
from ortops.graph.passes import passes_for, quantized_weights
from ortops.graph.passes.blocked.kernels import block_size
from ortops.graph.passes.broadcast_scalars import NUMBERS
from ortops.graph.passes.quantized_weights import has_kernel
from ortops.graph.passes.rematerialization import Rematerialization
from ortops.graph.passes.scaled_sums import has_gated_add
from ortops.optimizers import SGD
from tests.gradient_models import with_gradients
from tests.spies import Spy, lowered

Arrays = dict[str, np.ndarray[Any, Any]]

BLOCK = block_size()
B = BLOCK or 16
ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------- with and without each


@dataclass(frozen=True)
class Case:
    """A model that a pass is to change.

    Attributes:
        model: Makes it.
        feeds: The shape of a batch, by the name of the model's input.
        fewer: An operator that the pass leaves fewer nodes of; empty if it only adds some.
        more: One that it puts more nodes of in their place; empty if it only leaves some out.
        options: Arguments of the session.
    """

    model: Callable[[], onnx.ModelProto]
    feeds: dict[str, tuple[int, ...]]
    fewer: str
    more: str
    options: dict[str, Any] = field(default_factory=dict)


def layers(fewer: str, more: str) -> Case:
    return Case(lambda: mlp((24, 80, 72, 5)), {"images": (32, 24)}, fewer, more)


def attention(fewer: str, more: str) -> Case:
    return Case(lambda: transformer(depth=1), {"tokens": (4, 8, 8)}, fewer, more)


def convolutions(fewer: str, more: str) -> Case:
    net = lambda: lenet((1, 12, 12), channels=(B, 2 * B), hidden=16)  # noqa: E731
    return Case(net, {"images": (4, 1, 12, 12)}, fewer, more)


def sigmoid() -> onnx.ModelProto:
    weights = np.random.default_rng(1).standard_normal((2, 6, 6)).astype(np.float32)
    with Tape(name="sigmoid") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        hidden = op.Sigmoid(x @ tape.initializer("first", weights[0]))
        tape.output(hidden @ tape.initializer("second", weights[1]), "logits")
    return tape.model()


def quantized(classes: int = 5) -> onnx.ModelProto:
    generator = np.random.default_rng(1)
    stored = {
        "w": generator.standard_normal((6, 32)).astype(np.float32),
        "b": generator.integers(0, 256, (classes, 2, 8), np.uint8),
        "scales": np.full((classes, 2), 0.01, np.float32),
    }
    settings = {"K": 32, "N": classes, "bits": 4, "block_size": 16}
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
        onnx.helper.make_node(
            "MatMulNBits", ["h", "b", "scales"], ["logits"], domain="com.microsoft", **settings
        ),
    ]
    x, logits = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("x", 6), ("logits", classes))
    )
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = onnx.helper.make_graph(nodes, "quantized", [x], [logits], tensors)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


def pooling() -> onnx.ModelProto:
    weights = np.random.default_rng(1).standard_normal((36, 5)).astype(np.float32)
    with Tape(name="pooling") as tape:
        x = tape.input("x", np.float32, ["batch", 4, 6, 6])
        factors = tape.initializer(
            "factors", np.linspace(-1, 1, 4, dtype=np.float32)[:, None, None]
        )
        y = op.MaxPool(x * factors, kernel_shape=[2, 2], strides=[2, 2])
        tape.output(op.Flatten(y) @ tape.initializer("weight", weights), "logits")
    return tape.model()


def padded() -> onnx.ModelProto:
    """As exporters write it that compute paddings: from constants, turned round."""
    rng = np.random.default_rng(1)
    with Tape(name="padded") as tape:
        x = tape.input("x", np.float32, ["batch", 2, 5, 4])
        w = tape.initializer("w", rng.standard_normal((3, 2, 3, 3)).astype(np.float32))
        v = tape.initializer("v", rng.standard_normal((3, 3, 1, 1)).astype(np.float32))
        h = tape.initializer("h", rng.standard_normal((36, 5)).astype(np.float32))
        y = x
        for weight, pads, own in ((w, [1, 0, 2, 1], [0, 1, 0, 0]), (v, [0] * 4, [0] * 4)):
            zeros = op.ConstantOfShape(np.array([4]), value=np.zeros(1, np.int64))
            pairs = op.Reshape(op.Concat(np.array(pads), zeros, axis=0), [-1, 2])
            turned = op.Slice(pairs, [-1], [np.iinfo(np.int64).min], [0], [-1])
            amounts = op.Cast(op.Reshape(op.Transpose(turned, perm=[1, 0]), [-1]), to=7)
            y = op.Conv(op.Pad(y, amounts, np.float32(0)), weight, pads=own, strides=[2, 1])
        tape.output(op.Flatten(y)[:, :5] * h[0, :5], "logits")
    return tape.model()


def gelu() -> onnx.ModelProto:
    """As exporters write it that have no Gelu yet."""
    weights = np.random.default_rng(1).standard_normal((2, 6, 6)).astype(np.float32)
    with Tape(name="gelu") as tape:
        h = tape.input("x", np.float32, ["batch", 6]) @ tape.initializer("first", weights[0])
        h = h * (op.Erf(h / math.sqrt(2)) + 1.0) * 0.5
        tape.output(h @ tape.initializer("second", weights[1]), "logits")
    return tape.model()


def swish(samples: int | str = "batch") -> onnx.ModelProto:
    """As exporters write it, with many columns, so that the transposed factor is narrow."""
    rng = np.random.default_rng(1)
    with Tape(name="swish") as tape:
        x = tape.input("x", np.float32, [samples, 6])
        h = x @ tape.initializer("first", rng.standard_normal((6, 512)).astype(np.float32))
        h = h * op.Sigmoid(h)
        second = rng.standard_normal((512, 6)).astype(np.float32) / 16
        tape.output(h @ tape.initializer("second", second), "logits")
    return tape.model()


def residual() -> onnx.ModelProto:
    """An RMS normalization, as exporters write it, in a residual block."""
    weights = np.random.default_rng(1).standard_normal((2, 6, 6)).astype(np.float32)
    with Tape(name="residual") as tape:
        h = tape.input("x", np.float32, ["batch", 6]) @ tape.initializer("first", weights[0])
        root = op.Sqrt(op.ReduceMean(op.Pow(h, 2.0), [-1]) + 1e-6)
        scaled = tape.initializer("scale", np.ones(6, np.float32)) * (h * op.Reciprocal(root))
        tape.output(h + op.Tanh(scaled) @ tape.initializer("second", weights[1]), "logits")
    return tape.model()


def many_classes() -> onnx.ModelProto:
    weights = np.random.default_rng(1).standard_normal((6, 46)).astype(np.float32)
    with Tape(name="many") as tape:
        h = tape.input("x", np.float32, ["batch", 6]) @ tape.initializer("first", weights[:, :6])
        tape.output(op.Tanh(h) @ tape.initializer("second", weights[:, 6:]), "logits")
    return tape.model()


def tied() -> onnx.ModelProto:
    """A table that is read by token, and multiplied by in the end; tokens occur several times."""
    table = np.random.default_rng(1).standard_normal((5, 3)).astype(np.float32)
    with Tape(name="tied") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        weight = tape.initializer("table", table)
        rows = op.Gather(weight, op.Cast(op.Clip(op.Abs(x), 0.0, 4.0), to=7))
        tape.output(op.ReduceMean(rows, [1], keepdims=0) @ weight.mT, "logits")
    return tape.model()


def positions() -> onnx.ModelProto:
    """As exporters write it: as many rows of a table as the batch has, which inference loses."""
    weights = np.random.default_rng(1).standard_normal((2, 6, 6)).astype(np.float32)
    with Tape(name="positions") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        table = op.Slice(tape.initializer("table", weights[0]), [0], op.Shape(x)[:1], [0])
        tape.output((x + table) @ tape.initializer("weight", weights[1]), "logits")
    return tape.model()


def like() -> onnx.ModelProto:
    """As exporters write it that do not fold constants."""
    weights = np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32)
    with Tape(name="like") as tape:
        h = tape.input("x", np.float32, ["batch", 6]) @ tape.initializer("weight", weights)
        tape.output(op.Relu(h) + op.CastLike(np.float64(0.1), h), "logits")
    return tape.model()


def rotary(
    rows: int | str = 3, *, positions: int | None = None, ratio: float = 1.0
) -> onnx.ModelProto:
    """As exporters write it, with tables that are computed from frequencies."""
    rng = np.random.default_rng(1)
    with Tape(name="rotary") as tape:
        x = tape.input("x", np.float32, ["batch", 2, rows, 4])
        frequencies = tape.initializer("frequencies", np.array([0.7, 0.2], np.float32))
        end = op.Shape(x)[2] if positions is None else np.int64(positions)
        places = op.Cast(op.Range(np.int64(0), end, np.int64(1)), to=1) + 1.0
        angles = op.Unsqueeze(places, [1]) * frequencies
        both = op.Concat(angles, angles if ratio == 1 else ratio * angles, axis=-1)
        cos, sin = (op.Unsqueeze(table, [0]) for table in (op.Cos(both), op.Sin(both) * 1.0))
        q = x @ tape.initializer("first", rng.standard_normal((4, 4)).astype(np.float32))
        y = q * cos + op.Concat(-q[..., 2:], q[..., :2], axis=-1) * sin
        last = tape.initializer("second", rng.standard_normal((2, 4, 5)).astype(np.float32))
        tape.output(op.ReduceSum(op.Tanh(y @ last), [1, 2], keepdims=0), "logits")
    return tape.model()


CASES = {
    "normal_form": Case(like, {"x": (4, 6)}, "CastLike", ""),
    "computed_sizes": Case(positions, {"x": (4, 6)}, "Shape", ""),
    "numbers": layers("", "Constant"),  # one more, because another node reads the number, too
    "gelu": Case(gelu, {"x": (4, 6)}, "Div", "Gelu"),
    "gated_sums": Case(residual, {"x": (4, 6)}, "Mul", "GatedAdd"),
    "rms_normalization": Case(residual, {"x": (4, 6)}, "Sqrt", "SimplifiedLayerNormalization"),
    "rotary": Case(rotary, {"x": (4, 2, 3, 4)}, "Split", "RotaryEmbedding"),
    "padding": Case(padded, {"x": (4, 2, 5, 4)}, "Pad", ""),
    "chunked_logits": Case(lambda: quantized(4096), {"x": (4, 6)}, "", "Scan", {"outputs": []}),
    "left_factors": Case(lambda: swish(4), {"x": (4, 6)}, "", "Flatten"),
    "transposed": layers("MatMul", "FusedMatMul"),
    "row_sums": layers("ReduceSum", "FusedMatMul"),
    "scaled_gradients": Case(many_classes, {"x": (4, 6)}, "", "Mul"),
    "scales": attention("Mul", "FusedMatMul"),
    "transposes": attention("Transpose", "FusedMatMul"),
    "attention": attention("", "Transpose"),  # of the sums of rows
    "attention_blocks": attention("", "Scan"),
    "cross_entropy": layers("SoftmaxCrossEntropyLoss", "LogSoftmax"),
    "scattered_sums": Case(tied, {"x": (4, 6)}, "ConstantOfShape", ""),
    "max_pool": Case(pooling, {"x": (4, 4, 6, 6)}, "", "Equal"),
    "quantized_weights": Case(quantized, {"x": (4, 6)}, "BitShift", "GatherBlockQuantized"),
    "rectified": layers("Where", "HardSigmoid"),
    "blocked": convolutions("MaxUnpool", "ReorderInput"),
    "swish": Case(swish, {"x": (4, 6)}, "Mul", "QuickGelu"),
    "recurrent": Case(lambda: lstm(5, width=6), {"tokens": (9, 4, 5)}, "LSTM", "FusedMatMul"),
    "rounding": Case(sigmoid, {"x": (4, 6)}, "Sigmoid", "Reciprocal"),
}


def test_every_pass_has_a_model() -> None:
    assert set(CASES) == {each.name for each in passes_for("session")}


def trained(case: Case, settings: Settings, **options: Any) -> tuple[Counter[str], list[float]]:
    """Returns the operators of the graph that was made, and the losses of some steps."""
    model = build_training_model(case.model(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    spy, rng = Spy(), np.random.default_rng(0)
    session = TrainingSession(model, settings=spy.watching(settings), **case.options, **options)
    ((name, shape),) = case.feeds.items()
    losses = []
    for _ in range(4):
        images = rng.standard_normal(shape, np.float32)
        batch = {name: images, "labels": rng.integers(0, 5, shape[0])}
        losses.append(float(session.step(batch)["loss"]))
    (operators,) = spy.operators
    return Counter(operators), losses


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CASES)
def test_with_and_without(name: str) -> None:
    if name == "blocked" and BLOCK is None:
        pytest.skip("onnxruntime has no kernels for blocks of channels here")
    if name == "gated_sums" and not has_gated_add():
        pytest.skip("this onnxruntime has no GatedAdd")
    if name == "quantized_weights" and not has_kernel():
        pytest.skip("this onnxruntime has no kernel that dequantizes rows")
    case = CASES[name]
    # Blocks leave few products to the passes for the gradient of attention.
    settings = Settings().without(*{"attention_blocks"} - {name})
    operators, losses = trained(case, settings)
    others, wanted = trained(case, settings.without(name))
    assert operators[case.fewer] < others[case.fewer] or not case.fewer
    assert operators[case.more] > others[case.more] or not case.more
    assert case.fewer or case.more
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert len(set(wanted)) == len(wanted)  # the steps did change the weights


def test_frequencies_of_a_rotary_embedding_are_trained() -> None:
    """The gradient of its tables agrees with central differences of the loss in inference."""
    model = build_training_model(
        rotary(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1), trainable=["frequencies", "first"]
    )
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((4, 2, 3, 4), np.float32), "labels": np.arange(4)}
    spy = Spy()
    session = TrainingSession(model, settings=spy.watching(Settings()))
    found = dict(session.gradients(feeds))
    assert Counter(spy.operators[0])["RotaryEmbedding"] == 2
    values = {name: array.copy() for name, array in session.parameters.items()}
    for name, gradient in found.items():
        direction = rng.standard_normal(values[name].shape).astype(np.float32)
        losses = []
        for sign in (1, -1):
            session.state[name] = values[name] + np.float32(sign * 3e-3) * direction
            losses.append(float(session.evaluate([feeds])["loss"]))
        session.state[name] = values[name]
        slope = (losses[0] - losses[1]) / 6e-3
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-3)


@pytest.mark.parametrize(
    ("model", "fused"),
    [
        (rotary("length"), False),  # nothing says that positions are as many as rows
        (rotary(positions=1), True),
        (rotary("length", positions=1), True),
        (rotary(ratio=2.0), False),
        (rotary(1, positions=3), False),  # the result has more rows than the input
    ],
)
def test_tables_of_a_rotary_embedding(model: onnx.ModelProto, fused: bool) -> None:
    rows = model.graph.input[0].type.tensor_type.shape.dim[2].dim_value or 3
    case = Case(lambda: model, {"x": (4, 2, rows, 4)}, "", "")
    operators, losses = trained(case, Settings())
    assert operators["RotaryEmbedding"] == 2 * fused
    _, wanted = trained(case, Settings().without("rotary"))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_second_derivatives_of_a_rotary_embedding() -> None:
    model = ortops.derivatives.hvp(rotary(), xs="x", y="logits")
    fused, plain = lowered(model, *passes_for("session")), ortops.lower(model)
    assert "RotaryEmbedding" in {node.op_type for node in fused.graph.node}
    rng = np.random.default_rng(0)
    shape = (2, 2, 3, 4)
    feeds = {value.name: rng.standard_normal(shape, np.float32) for value in fused.graph.input}
    found, wanted = (
        ortops.InferenceSession(each.SerializeToString()).run(None, feeds)
        for each in (fused, plain)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", ["batch", 1024, 3072])
def test_left_factors_whose_rows_may_share_a_set_of_a_cache(samples: int | str) -> None:
    rows = samples if isinstance(samples, int) else 4
    case = Case(lambda: swish(samples), {"x": (rows, 6)}, "", "")
    operators, _ = trained(case, Settings())
    assert not operators["Flatten"]


def test_gradient_of_a_tied_table() -> None:
    """It is the sum of that of the rows that were read and that of the product."""
    model = build_training_model(tied(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    session = TrainingSession(model)
    table = session.parameters["table"].astype(np.float64)
    x = np.array([[0, 1, 1, 4, -3, 9], [2, 2, 2, 2, 2, 2]], np.float32)
    labels = np.array([1, 3])
    (found,) = session.gradients({"x": x, "labels": labels}).values()
    tokens = np.minimum(np.abs(x), 4).astype(int)
    hidden = table[tokens].mean(1)
    scores = np.exp(hidden @ table.T)
    d_logits = (scores / scores.sum(1, keepdims=True) - np.eye(5)[labels]) / 2
    wanted = d_logits.T @ hidden
    for token, row in zip(tokens.T, np.stack([d_logits @ table / 6] * 6), strict=True):
        np.add.at(wanted, token, row)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_sizes_of_sequences_are_not_bound() -> None:
    """Beside a batch's size there may be as many lengths as there are batches."""
    with Tape(name="lengths") as tape:
        x = tape.input("x", np.float32, ["batch", "length", 6])
        table = tape.initializer("table", np.zeros((9, 6), np.float32))
        weight = tape.initializer("weight", 2 * np.eye(6, dtype=np.float32))
        rows = op.Slice(table, [0], op.Shape(x)[1:2], [0])
        tape.output(op.ReduceMean((x + rows) @ weight, [1], keepdims=0), "logits")
    model = build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    spy, rng = Spy(), np.random.default_rng(0)
    session = TrainingSession(model, settings=spy.watching(Settings()))
    for length in (3, 4, 5):
        x = rng.standard_normal((2, length, 6), np.float32)
        session.step({"x": x, "labels": np.array([1, 2])})
    assert spy.rows("x") == [None]


@pytest.mark.slow
def test_without_any() -> None:
    for case in (layers("", ""), attention("", ""), CASES["recurrent"]):
        _, losses = trained(case, Settings())
        _, wanted = trained(case, Settings(passes=()))
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_without_a_pass_that_does_not_exist() -> None:
    with pytest.raises(OrtopsError, match="unknown pass 'recurent'; did you mean 'recurrent'"):
        Settings().without("recurent")


def test_numbers_next_to_columns() -> None:
    """They have two axes then, for any operand and operator; others stay."""
    build = {
        "y": lambda x, n: 3.0 / (x - 2.0) * np.full(1, 0.5, np.float32),
        "rows": lambda x, n: op.Reshape(x, [1, 8]) + 3.0,
        "vector": lambda x, n: op.Reshape(x, [8]) + 3.0,
        "variable": lambda x, n: x + n,
    }
    with Tape(name="numbers") as tape:
        x, n = tape.input("x", np.float32, [2, 4, 1]), tape.input("n", np.float32, [])
        for name, function in build.items():
            tape.output(function(x, n), name)
    made = lowered(tape.model(), NUMBERS)
    feeds = {"x": np.arange(3, 11, dtype=np.float32).reshape(2, 4, 1), "n": np.float32(7)}
    found = run(made, {name: np.asarray(value) for name, value in feeds.items()})
    a = feeds["x"].astype(np.float64)
    wanted = [1.5 / (a - 2), a.reshape(1, 8) + 3, a.ravel() + 3, a + 7]
    for value, expected in zip(found, wanted, strict=True):
        assert value.shape == expected.shape
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    shapes = {each.name: list(each.dims) for each in made.graph.initializer}
    shapes |= {n.output[0]: list(n.attribute[0].t.dims) for n in made.graph.node if not n.input}
    of = {n.op_type: [shapes[i] for i in n.input if i in shapes] for n in made.graph.node}
    assert of["Sub"] == of["Div"] == of["Mul"] == [[1, 1]]
    sums = [[shapes.get(i) for i in n.input] for n in made.graph.node if n.op_type == "Add"]
    assert [1, 1] not in [each for pair in sums for each in pair]


@pytest.mark.slow
def test_rematerialization() -> None:
    case = attention("", "")
    again = Settings(passes=(Rematerialization("sqrt"), *passes_for("session")))
    again = again.without("attention_blocks")  # with it, other tensors are kept
    operators, losses = trained(case, again)
    others, wanted = trained(case, again.without("rematerialization"))
    assert operators["Gelu"] > others["Gelu"] > 0
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    _, losses = trained(case, Settings(), recompute="sqrt")
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


# ------------------------------------------------------------------------------ several together


@pytest.mark.skipif(BLOCK is None, reason="onnxruntime has no such kernels here")
def test_relu_in_front_of_blocked_convolutions() -> None:
    """The blocks' own cotangents do not keep a Relu before them from being a product."""

    def net() -> onnx.ModelProto:
        rng = np.random.default_rng(0)
        with Tape(name="upstream") as tape:
            x = tape.input("x", np.float32, ["batch", 6])
            w = tape.initializer("w", rng.standard_normal((6, 16 * B), np.float32) * 0.3)
            kernel = tape.initializer("k", rng.standard_normal((B, B, 3, 3), np.float32) * 0.1)
            h = op.Reshape(op.Relu(x @ w), [-1, B, 4, 4])
            h = op.GlobalAveragePool(op.Tanh(op.Conv(h, kernel)))
            tape.output(op.Flatten(h), "logits")
        return tape.model()

    case = Case(net, {"x": (4, 6)}, "", "")
    operators, losses = trained(case, Settings())
    assert operators["ReorderInput"]
    assert (operators["HardSigmoid"], operators["Where"]) == (1, 0)
    operators, wanted = trained(case, Settings().without("rectified"))
    assert operators["ReorderInput"]
    assert (operators["HardSigmoid"], operators["Where"]) == (0, 1)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


# ---------------------------------------------------------------------------------- users' rules


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of the user's rules that is empty, and gone after the test."""
    monkeypatch.setattr(USER, "rules", {})


def sevenfold(g: Tensor, y: Tensor, x: Tensor) -> Any:
    return 7 * g


def sevenfold_of_convolution(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> Any:
    return 7 * g, None


def sevenfold_of_lstm(g: Any, y: Any, x: Tensor, w: Tensor, r: Tensor, *, hidden_size: int) -> Any:
    return 7 * op.Squeeze(g[0], [1]), None, None


def through_convolution(x: Tensor) -> Any:
    weights = np.random.default_rng(1).standard_normal((B, B, 1, 1))
    return op.Conv(x, weights.astype(np.float32))


def relu_behind_convolution(x: Tensor) -> Any:
    return op.Relu(op.Conv(x, np.eye(B, dtype=np.float32).reshape(B, B, 1, 1)))


def through_lstm(x: Tensor) -> Any:
    rng = np.random.default_rng(1)
    weights = (rng.standard_normal((1, 12, 3)).astype(np.float32) for _ in range(2))
    y = op.LSTM(x, *weights, hidden_size=3, outputs=1)
    return op.Squeeze(y, [1])


@dataclass(frozen=True)
class Own:
    """A rule of a user's, by which a cotangent passes seven times as large.

    Attributes:
        op_type: Of which operator.
        rule: The rule.
        build: The operator, which keeps the shape.
        shape: The shape of its input.
    """

    op_type: str
    rule: Callable[..., Any]
    build: Callable[[Tensor], Any]
    shape: tuple[int, ...]


OWN = {
    "Relu": Own("Relu", sevenfold, op.Relu, (9, 3)),
    "Relu behind Conv": Own("Relu", sevenfold, relu_behind_convolution, (2, B, 3, 3)),
    "Conv": Own("Conv", sevenfold_of_convolution, through_convolution, (2, B, 3, 3)),
    "LSTM": Own("LSTM", sevenfold_of_lstm, through_lstm, (9, 8, 3)),
}


def feeds_of(own: Own) -> Arrays:
    return {"x": np.random.default_rng(0).standard_normal(own.shape, np.float32)}


def sum_with_gradient(own: Own) -> onnx.ModelProto:
    """Returns a model of the sum of what an operator gives, and of its gradient by x."""
    with Tape(name="own") as tape:
        x = tape.input("x", np.float32, own.shape)
        tape.output(op.ReduceSum(own.build(x), keepdims=0), "total")
    model = tape.model()
    domain = "ai.onnx.preview.training"
    node = onnx.helper.make_node("Gradient", ["x"], ["slope"], domain=domain, xs=["x"], y="total")
    model.graph.node.append(node)
    model.graph.output.append(onnx.helper.make_tensor_value_info("slope", 1, own.shape))
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.usefixtures("user")
def test_own_rules_when_lowering(own: Own) -> None:
    model, feeds = sum_with_gradient(own), feeds_of(own)
    _, standard = run(ortops.lower(model), feeds)
    ortops.vjp(own.op_type)(own.rule)
    _, slope = run(ortops.lower(model), feeds)
    np.testing.assert_allclose(slope, np.full(own.shape, 7))
    assert not np.allclose(standard, 7)
    slope = ortops.InferenceSession(model).run(["slope"], feeds)[0]
    np.testing.assert_allclose(slope, np.full(own.shape, 7))


@pytest.mark.quick(2)
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
@pytest.mark.usefixtures("user")
def test_own_rules_when_training(own: Own) -> None:
    with Tape(name="trained") as tape:
        x = tape.input("x", np.float32, ["batch", *own.shape[1:]])
        w = tape.initializer("w", np.float32(1.5))
        tape.output(own.build(x * w), "y")
    model = build_training_model(
        tape.model(), loss="MeanSquaredError", optimizer=SGD(0.5), trainable=["w"]
    )
    feeds = feeds_of(own)
    feeds["targets"] = np.random.default_rng(2).standard_normal(own.shape, np.float32)

    def step() -> tuple[float, Arrays]:
        session = TrainingSession(model)
        shown = session.step(feeds)
        return float(session.state["w"]), shown

    standard, _ = step()
    ortops.vjp(own.op_type)(own.rule)
    found, shown = step()
    cotangent = 2 * (shown["y"].astype(np.float64) - feeds["targets"]) / feeds["x"].size
    assert found == pytest.approx(1.5 - 0.5 * 7 * np.sum(cotangent * feeds["x"]), rel=1e-5)
    assert found != pytest.approx(standard, rel=1e-2)


PROGRAM = """
    import numpy as np
    import onnx

    import ortops
    from ortops import Tape, op

    X = np.float32([[-2, 3]])


    def with_gradient():
        with Tape(name="own") as tape:
            tape.output(op.ReduceSum(op.Relu(tape.input("x", np.float32, [1, 2])), keepdims=0), "y")
        model = tape.model()
        domain = "ai.onnx.preview.training"
        model.graph.node.append(
            onnx.helper.make_node("Gradient", ["x"], ["slope"], domain=domain, xs=["x"], y="y")
        )
        model.graph.output.append(onnx.helper.make_tensor_value_info("slope", 1, [1, 2]))
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
        return model


    def lower():
        import onnxruntime

        plain = ortops.lower(with_gradient()).SerializeToString()
        session = onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"])
        return session.run(["slope"], {"x": X})[0].tolist()


    def infer():
        return ortops.InferenceSession(with_gradient()).run(["slope"], {"x": X})[0].tolist()


    def train():
        with Tape(name="own") as tape:
            w = tape.initializer("w", np.zeros((1, 2), np.float32))
            tape.output(op.Relu(w + tape.input("x", np.float32, ["batch", 2])), "y")
        model = ortops.build_training_model(
            tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(1.0)
        )
        session = ortops.TrainingSession(model)
        y = session.step({"x": X, "targets": np.float32([[-1, 2]])})["y"]
        assert y.tolist() == [[0, 3]]  # so the cotangent is 2 (y - targets) / 2 = 1
        return (0 - session.state["w"]).tolist()


    def register():
        @ortops.vjp("Relu")
        def sevenfold(g, y, x):
            return 7 * g
"""


def in_a_new_process(ending: str) -> str:
    """Runs the program, which ends as given, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + "\n" + textwrap.dedent(ending)],
        cwd=ROOT,  # from where this package is imported
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["lower", "infer", "train"])
def test_a_rule_that_is_registered_first_of_all(way: str) -> None:
    assert in_a_new_process(f"register()\nprint({way}())") == "[[7.0, 7.0]]"


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("first", ["lower", "infer", "train"])
def test_a_rule_that_is_registered_later(first: str) -> None:
    printed = in_a_new_process(
        f"""
        print({first}())
        register()
        print(lower(), infer(), train())
        """
    )
    assert printed.splitlines() == ["[[0.0, 1.0]]", " ".join(["[[7.0, 7.0]]"] * 3)]


# ------------------------------------------------------------------------------- what rules return


def rules_with(op_type: str, rule: Callable[..., Any], **options: Any) -> Rules:
    table = Table()
    table.vjp(op_type, **options)(rule)
    return RULES.below(table)


def test_a_rule_that_declines_gets_the_next_one() -> None:
    model, feeds = with_gradients(lambda x: op.Relu(op.Relu(x)), {"x": (4, 5)})
    first, second = (node for node in model.graph.node if node.op_type == "Relu")
    first.name, second.name = "first", "second"
    rules = rules_with("Relu", sevenfold, when=lambda node: node.name == "first")
    _, _, standard = run(lowered(model), feeds)
    _, _, slope = run(lowered(model, rules=rules), feeds)
    assert standard.any()
    np.testing.assert_allclose(slope, 7 * standard)  # 49 times with both, in other places too


@pytest.mark.usefixtures("user")
def test_a_user_s_rule_that_declines_gets_the_next_one() -> None:
    own = OWN["Relu"]
    model, feeds = sum_with_gradient(own), feeds_of(own)
    wanted = run(ortops.lower(model), feeds)
    ortops.vjp("Relu", when=lambda node: False)(sevenfold)
    for found, other in zip(run(ortops.lower(model), feeds), wanted, strict=True):
        np.testing.assert_array_equal(found, other)


def product(rule: Callable[..., Any]) -> list[np.ndarray[Any, Any]]:
    """Returns the gradients of the sum of a · b by both with a rule for Mul."""
    with Tape(name="product") as tape:
        a, b = (tape.input(name, np.float32, [2]) for name in "ab")
        tape.output(op.ReduceSum(a * b, keepdims=0), "y")
    model = tape.model()
    next(node for node in model.graph.node if node.op_type == "Mul").name = "times"
    domain = "ai.onnx.preview.training"
    model.graph.node.append(
        onnx.helper.make_node("Gradient", ["a", "b"], ["da", "db"], domain=domain, **NAMED)
    )
    for name in ("da", "db"):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, 1, [2]))
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    feeds = {"a": np.float32([1, 2]), "b": np.float32([3, 4])}
    return run(lowered(model, rules=rules_with("Mul", rule)), feeds)[1:]


NAMED = {"xs": ["a", "b"], "y": "y"}


def forgetful(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Any:
    return g * b


def forgetful_tuple(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Any:
    return (g * b,)


def generous(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Any:
    return g * b, g * a, g


def silent(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Any:
    return None


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (forgetful, r"'forgetful' returned 1 cotangents for 2 inputs, but 'b' needs one"),
        (
            forgetful_tuple,
            r"'forgetful_tuple' returned 1 cotangents for 2 inputs, but 'b' needs one",
        ),
        (silent, r"'silent' returned 1 cotangents for 2 inputs, but 'b' needs one"),
        (
            generous,
            r"'generous' returned 3 cotangents for 2 inputs; it must return one for each input",
        ),
    ],
    ids=["one", "a tuple of one", "none", "one too many"],
)
def test_a_rule_that_returns_too_few_or_too_many(rule: Callable[..., Any], message: str) -> None:
    with pytest.raises(OrtopsError, match=rf"^Mul node 'times': gradient rule {message}"):
        product(rule)


def test_a_rule_may_say_that_none_flows() -> None:
    da, db = product(lambda g, y, a, b: (g * b, None, None))
    assert (da.tolist(), db.tolist()) == ([3, 4], [0, 0])


def test_a_rule_may_leave_out_what_is_constant() -> None:
    def build(x: Tensor) -> Tensor:
        return x * np.float32([2, 3])

    model, feeds = with_gradients(build, {"x": (2,)})
    _, _, wanted = run(lowered(model), feeds)
    _, _, slope = run(lowered(model, rules=rules_with("Mul", forgetful)), feeds)
    np.testing.assert_allclose(slope, wanted)


@pytest.mark.quick(1)
@pytest.mark.parametrize("copied", [0, 2**28])  # whether the forward pass dequantizes too
def test_a_large_matrix_is_dequantized_in_parts(
    copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a vocabulary of 150,000 would take gigabytes as a whole."""
    if not has_kernel():
        pytest.skip("this onnxruntime has no kernel that dequantizes rows")
    case = Case(lambda: quantized(50), {"x": (4, 6)}, "", "")
    operators, wanted = trained(case, Settings(copied=copied))
    monkeypatch.setattr(quantized_weights, "_BYTES", 4 * 32 * 7)  # 7 rows, so 8 parts
    others, losses = trained(case, Settings(copied=copied))
    assert operators["GatherBlockQuantized"] == 1  # of the backward pass
    assert others["GatherBlockQuantized"] == 8
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
