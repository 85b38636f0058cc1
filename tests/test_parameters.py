"""Which tensors of a model are trained: what a person would call a weight, and what is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from running import run

from ortops import (
    ArgumentError,
    ModelError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    op,
)
from ortops.engine.building.parameters import SETTINGS
from ortops.engine.check import check
from ortops.optimizers import AdamW

F = np.float32
RNG = np.random.default_rng(2)


def trained(model: onnx.ModelProto, **settings: Any) -> set[str]:
    """The initializers that the builder trains by MeanSquaredError, but for the step."""
    settings = {"loss": "MeanSquaredError", "optimizer": "SGD"} | settings
    built = build_training_model(model, **settings)
    keys = {binding.key for binding in built.training_info[0].update_binding}
    return keys - {"step"}


def arrays(**shapes: Any) -> dict[str, Any]:
    return {
        name: given if isinstance(given, np.ndarray) else RNG.normal(size=given).astype(F)
        for name, given in shapes.items()
    }


Emit = Callable[..., Tensor]
CASES: dict[str, tuple[dict[str, Any], Emit, set[str]]] = {
    # What is read, how, and what of it is a weight beside "w", a matrix before.
    "bias": (arrays(b=(4,)), lambda h, b: h + b, {"b"}),
    "bias of one number behind a product": (
        arrays(v=(4, 1), b=(1,)),
        lambda h, v, b: h @ v + b,
        {"v", "b"},
    ),
    "scalar bias behind a product, on the left": (
        arrays(v=(4, 1), b=()),
        lambda h, v, b: b + h @ v,
        {"v", "b"},
    ),
    "bias of one number behind a reshaped convolution": (
        arrays(v=(1, 1, 1, 1), b=(1,)),
        lambda h, v, b: op.Reshape(op.Conv(op.Unsqueeze(h, [1, 2]), v), [-1, 4]) + b,
        {"v", "b"},
    ),
    "one number, added": (arrays(c=(1,)), lambda h, c: op.Tanh(h) + c, set()),
    "one number, a factor": (arrays(c=()), lambda h, c: h * c, set()),
    "GELU's constants": (
        arrays(c=(), one=(1,), half=()),
        lambda h, c, one, half: h * (op.Erf(h / c) + one) * half,
        set(),
    ),
    "a leaky slope and its limit": (
        arrays(slope=(), zero=(1,)),
        lambda h, slope, zero: op.Max(h, zero) + slope * op.Min(h, zero),
        set(),
    ),
    "limits of Clip": (arrays(low=(), high=()), lambda h, low, high: op.Clip(h, low, high), set()),
    "the limit of Max for each channel": (arrays(c=(4,)), lambda h, c: op.Max(h, c), set()),
    "an exponent for each channel": (
        arrays(c=np.array([1, 2, 1, 2], F)),
        lambda h, c: op.Pow(abs(h), c),
        set(),
    ),
    "a scale for each channel": (arrays(gamma=(4,)), lambda h, gamma: h * gamma, {"gamma"}),
    "PRelu of one slope": (arrays(slope=(1,)), lambda h, slope: op.PRelu(h, slope), {"slope"}),
    "an embedding": (
        arrays(table=(5, 4)),
        lambda h, table: h + op.Gather(table, np.array([0, 3])),
        {"table"},
    ),
    "a table of positions": (
        arrays(positions=(2, 4)),
        lambda h, positions: h + positions,
        {"positions"},
    ),
    "scales and roi of Resize": (
        arrays(roi=(8,), scales=np.array([1, 1, 2, 2], F)),
        lambda h, roi, scales: op.Resize(op.Reshape(h, [-1, 1, 2, 2]), roi, scales),
        set(),
    ),
    "the value of Pad": (
        arrays(c=()),
        lambda h, c: op.Pad(h, np.array([0, 0, 0, 1]), c),
        set(),
    ),
    "the values of OneHot": (
        arrays(values=(2,)),
        lambda h, values: h + op.OneHot(np.array([0, 1]), np.array([4]), values),
        set(),
    ),
    "running statistics": (
        arrays(s=(4,), b=(4,), m=(4,), v=np.ones(4, F)),
        lambda h, s, b, m, v: op.BatchNormalization(h, s, b, m, v),
        {"s", "b"},
    ),
    "layer normalization": (
        arrays(s=(4,), b=(4,)),
        lambda h, s, b: op.LayerNormalization(h, s, b),
        {"s", "b"},
    ),
    "weights of an LSTM, and its first state": (
        arrays(W=(1, 8, 4), R=(1, 8, 2), B=(1, 16), h0=(1, 2, 2), c0=(1, 2, 2)),
        lambda h, W, R, B, h0, c0: op.LSTM(
            op.Unsqueeze(h, [0]), W, R, B, None, h0, c0, hidden_size=2, outputs=1
        ),
        {"W", "R", "B"},
    ),
    "a quantized matrix's scale": (
        {"q": np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.int8), "scale": np.array(0.5, F)},
        lambda h, q, scale: h @ op.DequantizeLinear(q, scale),
        set(),
    ),
    "a matrix that is rounded as it runs": (
        {"v": RNG.normal(size=(4, 2)).astype(F), "scale": np.array(0.5, F)},
        lambda h, v, scale: (
            h @ op.DequantizeLinear(op.QuantizeLinear(v, scale, np.array(0, np.int8)), scale)
        ),
        {"v"},
    ),
    "behind Transpose, Reshape, Cast and Identity": (
        arrays(v=(2, 2, 2)),
        lambda h, v: h @ op.Identity(op.Transpose(op.Reshape(v, [2, 4]), perm=[1, 0])),
        {"v"},
    ),
}


@pytest.mark.quick(14)
@pytest.mark.parametrize("case", CASES)
def test_what_is_a_weight(case: str) -> None:
    given, emit, expected = CASES[case]
    with Tape() as tape:
        x = tape.input("x", F, [2, 3])
        h = x @ tape.initializer("w", RNG.normal(size=(3, 4)).astype(F))
        read = {name: tape.initializer(name, array) for name, array in given.items()}
        y = emit(op.Tanh(h), **read)
        tape.output(y, "y")
    model = tape.model()
    statistics = {"m", "v"} if case == "running statistics" else set()
    assert trained(model) - statistics == {"w", *expected}
    report = check(model)
    assert set(report.parameters) == {"w", *expected}
    floats = {name for name, array in given.items() if array.dtype == F}
    assert set(report.reasons) == floats - expected
    assert all(reason for reason in report.reasons.values())
    # An exact name always trains, whatever it is.
    for name in floats - expected - statistics:
        assert name in report.reasons
        try:
            assert trained(model, trainable=[name]) == {name}
        except ModelError as error:
            assert "the loss does not depend on" in str(error)  # noqa: PT017


def test_every_setting_is_an_input_of_its_operator() -> None:
    for (domain, op_type), indices in SETTINGS.items():
        if domain:
            continue
        formal = onnx.defs.get_schema(op_type, domain=domain).inputs
        variadic = formal[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        assert variadic or max(indices) < len(formal), op_type


def test_sizes_survive_weight_decay(tmp_path: Any) -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 1, 2, 2])
        h = op.Conv(x, tape.initializer("w", np.ones((1, 1, 1, 1), F)))
        tape.output(op.Resize(h, None, tape.initializer("scales", F([1, 1, 1.5, 1.5]))), "y")
    session = TrainingSession(
        build_training_model(
            tape.model(), loss="MeanSquaredError", optimizer=AdamW(0.1, weight_decay=0.5)
        )
    )
    batch = {"x": np.ones((2, 1, 2, 2), F), "targets": np.zeros((2, 1, 3, 3), F)}
    for _ in range(10):
        session.step(batch)
    session.save(tmp_path / "trained.onnx")
    (y,) = run(tmp_path / "trained.onnx", {"x": batch["x"]})
    assert y.shape == (2, 1, 3, 3)


def rotary() -> onnx.ModelProto:
    with Tape() as tape:
        ids = tape.input("ids", np.int64, ["T"])
        x = tape.input("x", F, ["T", 4])
        angles = op.Unsqueeze(ids.astype(F), [1]) @ tape.initializer("inv_freq", F([[1, 0.1]]))
        both = op.Concat(angles, angles, axis=1)
        h = x @ tape.initializer("w", np.ones((4, 4), F))
        tape.output(h * op.Cos(both) + h * op.Sin(both), "y")
    return tape.model()


def test_frequencies_of_a_rotary_embedding_are_no_weights() -> None:
    assert trained(rotary()) == {"w"}
    reason = check(rotary()).reasons["inv_freq"]
    assert reason == "holds the frequencies of a rotary embedding, in MatMul node 'MatMul'"
    assert trained(rotary(), trainable=["inv_freq"]) == {"inv_freq"}


@pytest.mark.parametrize("opset", [20, 21])
def test_frequencies_are_no_weights_where_a_file_tells_no_types(opset: int) -> None:
    """They are told by the integers that they multiply with."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}]>
        rotated (float[N, 7, 4] x) => (float[N, 7, 4] y)
        <float[4] frequencies = {{1, 0.1, 0.01, 0.001}}, float[4] w = {{1, 2, 3, 4}}> {{
            zero = Constant<value_int: int = 0>()
            one = Constant<value_int: int = 1>()
            seven = Constant<value_int: int = 7>()
            positions = Range(zero, seven, one)
            last = Constant<value_ints: ints = [1]>()
            column = Unsqueeze(positions, last)
            numbers = Cast<to = 1>(column)
            angles = Mul(numbers, frequencies)
            cosines = Cos(angles)
            sines = Sin(angles)
            turned = Mul(x, cosines)
            both = Add(turned, sines)
            y = Mul(both, w)
        }}""")
    assert trained(model) == {"w"}


def test_a_sine_of_a_product_of_the_input_is_one_of_weights() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 2])
        tape.output(op.Sin(x @ tape.initializer("w", np.ones((2, 2), F))), "y")
    assert trained(tape.model()) == {"w"}


def test_mean_and_deviation_of_the_input_are_no_weights() -> None:
    with Tape() as tape:
        x = tape.input("x", np.uint8, ["N", 3, 2, 2])
        mean = tape.initializer("mean", np.ones((1, 3, 1, 1), F))
        deviation = tape.initializer("deviation", np.ones((1, 3, 1, 1), F))
        w = tape.initializer("w", np.ones((2, 3, 1, 1), F))
        shift = tape.initializer("shift", np.ones((1, 2, 1, 1), F))
        tape.output(op.Conv((x.astype(F) - mean) / deviation, w) - shift, "y")
    model = tape.model()
    assert trained(model) == {"w", "shift"}
    assert set(check(model).reasons) == {"mean", "deviation"}


# ------------------------------------------------------------------------ names and scopes


def encoder(*, scoped: str) -> onnx.ModelProto:
    """Two blocks, whose matrices an exporter has folded and named after nothing."""
    nodes, tensors, last = [], [], "x"
    for block in range(2):
        place = f"encoder.layer.{block}"
        for part in ("query", "key"):
            matrix, bias = f"val_{len(tensors)}", f"{place}.{part}.bias"
            tensors.append(numpy_helper.from_array(RNG.normal(size=(4, 4)).astype(F), matrix))
            tensors.append(numpy_helper.from_array(RNG.normal(size=4).astype(F), bias))
            product, result = f"{place}.{part}.product", f"{place}.{part}.result"
            for op_type, read, made in (
                ("MatMul", [last, matrix], product),
                ("Add", [product, bias], result),
            ):
                node = helper.make_node(op_type, read, [made], name=f"node_{len(nodes)}")
                if scoped == "names":
                    node.name = f"/encoder/layer.{block}/{part}/{op_type}"
                elif scoped == "metadata":
                    entry = node.metadata_props.add(key="pkg.torch.onnx.name_scopes")
                    entry.value = str(["", "encoder", place, f"{place}.{part}", "linear"])
                nodes.append(node)
            last = result
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["N", 4])],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("scoped", ["names", "metadata"])
@pytest.mark.parametrize("pattern", ["encoder.layer.1.*", "encoder.layer.1", "encoder/layer.1/*"])
def test_patterns_mean_scopes_too(
    scoped: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = trained(encoder(scoped=scoped), trainable=[pattern])
    biases = {"encoder.layer.1.query.bias", "encoder.layer.1.key.bias"}
    assert found == {"val_4", "val_6", *biases}
    assert not [m for m in caplog.messages if m.startswith("trainable")]


def test_a_pattern_that_takes_a_part_says_so(caplog: pytest.LogCaptureFixture) -> None:
    found = trained(encoder(scoped=""), trainable=["encoder.layer.1.*"])
    assert found == {"encoder.layer.1.query.bias", "encoder.layer.1.key.bias"}
    (said,) = (m for m in caplog.messages if m.startswith("trainable"))
    assert said == (
        "trainable: 'encoder.layer.1.*' includes 2 weights, but not other weights of the same "
        "layers: 'val_4', 'val_6'"
    )


def test_a_scope_is_no_part_of_a_name() -> None:
    expected = "trainable: the model has no trainable initializer 'encoder.layer.11.*'"
    with pytest.raises(ModelError, match=expected):
        trained(encoder(scoped="names"), trainable=["encoder.layer.11.*"])
    assert not trained(encoder(scoped="names"), trainable=["encoder.layer.1"]) & {"val_0", "val_2"}


def test_a_pattern_means_weights_only() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 2])
        h = x @ tape.initializer("body.w", np.ones((2, 2), F))
        tape.output(op.Clip(h, tape.initializer("limit.low", F(0))), "y")
    assert trained(tape.model(), trainable=["*"]) == {"body.w"}
    expected = (
        r"trainable: 'limit\.\*' matches no weight, only 'limit.low', which is the min of Clip "
        "node 'Clip'; to train it anyway, give its exact name"
    )
    with pytest.raises(ModelError, match=expected):
        trained(tape.model(), trainable=["limit.*"])


def test_what_a_pattern_means_must_reach_the_loss() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 2])
        tape.output(x @ tape.initializer("one.w", np.ones((2, 2), F)), "y")
        tape.output(x @ tape.initializer("two.w", np.ones((2, 2), F)), "z")
    model = tape.model()
    assert trained(model, trainable=["*"]) == {"one.w"}
    expected = r"the loss does not depend on 'two.w', which 'two\.\*' matches; leave it out"
    with pytest.raises(ModelError, match=expected):
        trained(model, trainable=["two.*"])
    assert check(model).reasons == {"two.w": "has no effect on the loss"}


def test_tied_weights_are_shown() -> None:
    with Tape() as tape:
        ids = tape.input("ids", np.int64, ["N"])
        table = tape.initializer("table", RNG.normal(size=(5, 4)).astype(F))
        h = op.Gather(table, ids)
        tape.output(op.Tanh(h) @ op.Transpose(table, perm=[1, 0]), "y")
    report = check(tape.model())
    assert report.readers == {
        "table": ["Gather node 'Gather', input data", "MatMul node 'MatMul', input B"]
    }
    assert "table  FLOAT[5,4]  read by 2 nodes" in str(report)


@pytest.mark.parametrize("from_file", [False, True], ids=["memory", "file"])
@pytest.mark.parametrize("how", ["copy", "transposed copy", "same ends", "zeros"])
def test_copies_of_a_weight_are_said(how: str, from_file: bool, tmp_path: Path) -> None:
    table = RNG.normal(size=(40, 40)).astype(F)
    other = {"copy": table, "transposed copy": table.T, "zeros": np.zeros_like(table)}.get(how)
    if other is None:
        other = table.copy()
        other[1, 1] += 1
    if how == "zeros":
        table = np.zeros_like(table)
    with Tape() as tape:
        ids = tape.input("ids", np.int64, ["N"])
        h = op.Gather(tape.initializer("table", table), ids)
        tape.output(op.Tanh(h) @ tape.initializer("head", np.ascontiguousarray(other)), "y")
    model: onnx.ModelProto | Path = tape.model()
    if from_file:
        onnx.save(model, tmp_path / "model.onnx")
        model = tmp_path / "model.onnx"
    said = f"'head' is a {how} of 'table', as if a tied weight was exported several times; they "
    said += (
        "are trained independently, unless ortops.surgery.tie(model, ['table', 'head']) makes them"
    )
    assert (said in str(check(model))) == (how in ("copy", "transposed copy"))


def test_quantized_weights_are_shown_and_refused() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 2])
        h = x @ tape.initializer("w", np.ones((2, 2), F))
        q = tape.initializer("q", np.ones((2, 2), np.int8))
        tape.output(h @ op.DequantizeLinear(q, tape.initializer("scale", F(0.5))), "y")
    report = check(tape.model())
    assert report.quantized == {"q": "is INT8, read by DequantizeLinear node 'DequantizeLinear'"}
    expected = "'q' is of type INT8; only floating-point ones can be trained; it is quantized, so"
    with pytest.raises(ModelError, match=expected):
        trained(tape.model(), trainable=["q"])


# --------------------------------------------------------------- weights that stand elsewhere


def with_constants(*, kept: bool) -> onnx.ModelProto:
    """A backbone of Constant nodes, in the graph and in branches, and a head of an initializer."""
    values = ", ".join(str(v) for v in range(1, 5))
    return onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[N, 2] x, bool flag) => (float[N, 2] y)
        <float[2, 2] head = {{1, 2, 2, 1}}> {{
            w = Constant <value = float[2, 2] {{{values}}}> ()
            h = MatMul (x, w)
            b = If (flag) <
                then_branch = one () => (float[N, 2] p) {{
                    v = Constant <value = float[2, 2] {{2, 0, 0, 2}}> ()
                    p = MatMul (h, v)
                }},
                else_branch = two () => (float[N, 2] q) {{
                    u = Constant <value = float[2, 2] {{3, 0, 0, 3}}> ()
                    q = MatMul (h, u)
                }}>
            y = MatMul (b, head)
        }}"""
    )


def test_constants_count_beside_initializers(caplog: pytest.LogCaptureFixture) -> None:
    model = with_constants(kept=True)
    before = model.SerializeToString(deterministic=True)
    built = build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert model.SerializeToString(deterministic=True) == before
    keys = {binding.key for binding in built.training_info[0].update_binding}
    assert keys == {"w", "v", "u", "head", "step"}
    assert "the weights of 3 Constant nodes became initializers" in caplog.messages
    session = TrainingSession(built)
    batch = {"x": np.ones((1, 2), F), "targets": np.zeros((1, 2), F), "flag": np.array(True)}
    session.step(batch)
    assert not np.array_equal(session.state["v"], F([[2, 0], [0, 2]]))
    np.testing.assert_array_equal(session.state["u"], F([[3, 0], [0, 3]]))
    original = session.inference_model(original=model)
    assert [n.op_type for n in original.graph.node] == ["Constant", "MatMul", "If", "MatMul"]
    feeds = {"x": np.ones((1, 2), F), "flag": np.array(True)}
    np.testing.assert_array_equal(run(original, feeds)[0], run(session.inference_model(), feeds)[0])
    assert model.SerializeToString(deterministic=True) == before


def test_only_what_is_trained_moves() -> None:
    built = build_training_model(
        with_constants(kept=True), loss="MeanSquaredError", optimizer="SGD", trainable=["v", "head"]
    )
    assert {t.name for t in built.graph.initializer} == {"v", "head"}
    assert "Constant" in {node.op_type for node in built.graph.node}


def test_a_function_that_is_called_twice_has_one_weight() -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[N, 2] x) => (float[N, 2] y) {
            h = own.layer (x)
            y = own.layer (h)
        }
        <domain: "own", opset_import: ["" : 21]>
        layer (a) => (b) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            b = MatMul (a, w)
        }"""
    )
    session = TrainingSession(build_training_model(model, loss="MeanSquaredError", optimizer="SGD"))
    assert set(session.state) == {"layer.w", "step", "learning_rate"}
    x = np.ones((1, 2), F)
    session.step({"x": x, "targets": np.zeros((1, 2), F)})
    w = F([[1, 2], [3, 4]])
    # d/dw of mean((x w w)²)
    y = x @ w @ w
    g = y  # 2 y / 2 elements
    slope = x.T @ (g @ w.T) + (x @ w).T @ g
    np.testing.assert_allclose(session.state["layer.w"], w - 0.01 * slope, rtol=1e-5)
    written = session.inference_model(original=model)
    (constant,) = (n for n in written.functions[0].node if n.op_type == "Constant")
    np.testing.assert_array_equal(
        numpy_helper.to_array(constant.attribute[0].t), session.state["layer.w"]
    )


# ------------------------------------------------------------------- batch normalization


def two_layers(*, constants: bool = False) -> onnx.ModelProto:
    with Tape() as tape:
        h = tape.input("x", F, ["N", 3])
        for layer in ("one", "two"):
            kinds = {"s": 2.0, "b": 0.5, "m": 1.0, "v": 4.0}
            read = [tape.initializer(f"{layer}.{k}", np.full(3, v, F)) for k, v in kinds.items()]
            h = op.BatchNormalization(h, *read)
            h = h @ tape.initializer(f"{layer}.w", RNG.normal(size=(3, 3)).astype(F))
        tape.output(h, "y")
    model = tape.model()
    if constants:
        made = [
            helper.make_node("Constant", [], [t.name], value=t) for t in model.graph.initializer
        ]
        nodes = [*made, *model.graph.node]
        del model.graph.node[:], model.graph.initializer[:]
        model.graph.node.extend(nodes)
    return model


MODES = {
    # What is trained, the mode, and the layers that learn from batches.
    "all": (None, "auto", {"one", "two"}),
    "head": (["two.*"], "auto", {"two"}),
    "scale alone": (["two.w", "one.s"], "auto", {"one"}),
    "neither": (["two.w"], "auto", set()),
    "head, train": (["two.w"], "train", {"one", "two"}),
    "all, frozen": (None, "frozen", set()),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("case", MODES)
def test_batch_normalization(case: str, constants: bool, caplog: pytest.LogCaptureFixture) -> None:
    trainable, mode, learning = MODES[case]
    model = two_layers(constants=constants)
    session = TrainingSession(
        build_training_model(
            model,
            loss="MeanSquaredError",
            optimizer="SGD",
            trainable=trainable,
            batch_normalization=mode,
        )
    )
    x = RNG.normal(size=(8, 3)).astype(F) + 3
    session.step({"x": x, "targets": np.zeros((8, 3), F)})
    state = session.state
    for layer in ("one", "two"):
        assert (f"{layer}.m" in state) == (layer in learning)
    if "one" in learning:
        np.testing.assert_allclose(state["one.m"], 0.9 + 0.1 * x.mean(axis=0), rtol=1e-5)
    names = {f"{layer}.{part}" for layer in ("one", "two") for part in "sbw"}
    parameters = {n for n in state if n in names}
    expected = names if trainable is None else set(trainable)
    if trainable == ["two.*"]:
        expected = {"two.s", "two.b", "two.w"}
    assert parameters == expected
    said = [m for m in caplog.messages if "BatchNormalization layers run in inference mode" in m]
    assert len(said) == (mode == "auto" and len(learning) < 2)
    if said:
        assert said[0].startswith(f"{2 - len(learning)} of 2 BatchNormalization layers")


def test_a_frozen_layer_normalizes_by_its_running_statistics() -> None:
    session = TrainingSession(
        build_training_model(
            two_layers(), loss="MeanSquaredError", optimizer="SGD", trainable=["two.w"]
        )
    )
    x = RNG.normal(size=(8, 3)).astype(F)
    (y,) = run(two_layers_like(session), {"x": x})
    found = session.step({"x": x, "targets": np.zeros((8, 3), F)})
    assert float(found["loss"]) == pytest.approx(float((y**2).mean()), rel=1e-5)


def two_layers_like(session: TrainingSession) -> onnx.ModelProto:
    return session.inference_model()


def test_a_file_in_training_mode_is_frozen_too() -> None:
    model = two_layers()
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend([f"{node.output[0]}_mean", f"{node.output[0]}_var"])
    session = TrainingSession(
        build_training_model(
            model, loss="MeanSquaredError", optimizer="SGD", batch_normalization="frozen"
        )
    )
    x = RNG.normal(size=(8, 3)).astype(F)
    (y,) = run(session.inference_model(), {"x": x}, ["y"])
    found = session.step({"x": x, "targets": np.zeros((8, 3), F)})
    assert float(found["loss"]) == pytest.approx(float((y**2).mean()), rel=1e-5)
    assert not {"one.m", "two.m"} & set(session.state)


def test_modes_that_there_are() -> None:
    expected = "^batch_normalization must be 'auto', 'train' or 'frozen', got 'no'$"
    with pytest.raises(ArgumentError, match=expected):
        trained(two_layers(), batch_normalization="no")


def test_an_input_without_a_name_is_said_by_its_number() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
        quantized (float[n, 16] x) => (float[n, 1] y)
        <uint8[1, 1, 8] w = {1, 2, 3, 4, 5, 6, 7, 8}, float[1] scales = {0.5}> {
            y = com.microsoft.MatMulNBits <K = 16, N = 1, bits = 4, block_size = 16> (x, w, scales)
        }""")
    expected = r"'scale\*' matches no weight, only 'scales', which is input 2 of MatMulNBits"
    with pytest.raises(ModelError, match=expected):
        build_training_model(model, loss="MeanSquaredError", optimizer="SGD", trainable=["scale*"])
