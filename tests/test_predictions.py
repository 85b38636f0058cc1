"""What a loss takes for its prediction: logits before a Softmax, any tensor, behind a ZipMap."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from running import run

import ortops
from ortops import ModelError, Tape, Tensor, TrainingSession, build_training_model, losses, op
from ortops.optimizers import SGD

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=(4, 3)).astype(np.float32)
LABELS = np.array([0, 2, 1, 1, 0, 2])


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def cross_entropy(z: Array, labels: Array) -> float:
    z = z.astype(np.float64)
    return float(-np.log(softmax(z)[np.arange(len(z)), labels]).mean())


def written_out(z: Tensor, *, shifted: bool) -> Tensor:
    e = op.Exp(z - op.ReduceMax(z, [1], keepdims=1) if shifted else z)
    return e / op.ReduceSum(e, [1], keepdims=1)


ENDS: dict[str, Any] = {
    "Softmax": lambda z: op.Softmax(z, axis=1),
    "Softmax, last axis": lambda z: op.Softmax(z, axis=-1),
    "LogSoftmax": lambda z: op.LogSoftmax(z, axis=-1),
    "Sigmoid": op.Sigmoid,
    "Exp / ReduceSum / Div": lambda z: written_out(z, shifted=False),
    "shifted": lambda z: written_out(z, shifted=True),
    "Log of Softmax": lambda z: op.Log(op.Softmax(z, axis=1)),
    "Log of written out": lambda z: op.Log(written_out(z, shifted=True)),
    "z - ReduceLogSumExp": lambda z: z - op.ReduceLogSumExp(z, [1], keepdims=1),
    "z - log sum exp": lambda z: z - op.Log(op.ReduceSum(op.Exp(z), [1], keepdims=1)),
    "Exp of LogSoftmax": lambda z: op.Exp(op.LogSoftmax(z, axis=1)),
    "exp(z - log sum exp)": lambda z: op.Exp(
        z - op.Reshape(op.ReduceLogSumExp(z, [1], keepdims=0), [-1, 1])
    ),
    "Clip behind": lambda z: op.Clip(op.Softmax(z, axis=1), 1e-7, 1 - 1e-7),
    "Max behind": lambda z: op.Max(op.Softmax(z, axis=1), 1e-7),
    "Log of Softmax + 1e-9": lambda z: op.Log(op.Softmax(z, axis=1) + 1e-9),
    "Identity behind": lambda z: op.Identity(op.Softmax(z, axis=1)),
    "Reshape behind": lambda z: op.Reshape(op.Softmax(z, axis=1), [-1, 3]),
    "Cast behind": lambda z: op.Cast(op.Softmax(z, axis=1), to=TensorProto.DOUBLE),
    "none": lambda z: z * 1.0,
}


def classifier(end: Any, *, classes: int = 3) -> onnx.ModelProto:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 4])
        z = x @ tape.initializer("w", W[:, :classes])
        z.value.name = "z"
        tape.output(end(z), "y")
    return tape.model()


@pytest.mark.parametrize("end", ENDS)
def test_a_loss_that_reads_logits_finds_them(end: str, caplog: pytest.LogCaptureFixture) -> None:
    model = classifier(ENDS[end])
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    )
    found = session.step({"x": X, "labels": LABELS})
    assert float(found["loss"]) == pytest.approx(cross_entropy(X @ W, LABELS), rel=1e-5)
    p = softmax((X @ W).astype(np.float64))
    p[np.arange(6), LABELS] -= 1
    np.testing.assert_allclose(session.state["w"], W - 0.1 * X.T @ p / 6, rtol=1e-4, atol=1e-6)
    said = [m for m in caplog.messages if "loss SoftmaxCrossEntropy reads '" in m]
    if end == "none":
        assert not said
    else:
        assert len(said) == 1
        assert "the logits before" in said[0]
        assert said[0].endswith("not 'y'")


def test_the_file_goes_on_giving_probabilities(tmp_path: Any) -> None:
    model = classifier(ENDS["Softmax"])
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
    )
    session.fit({"x": X, "labels": LABELS}, epochs=2, progress=False)
    session.save(tmp_path / "trained.onnx")
    (y,) = run(tmp_path / "trained.onnx", {"x": X})
    np.testing.assert_allclose(y, softmax(X @ session.state["w"]), rtol=1e-5)


@pytest.mark.slow
def test_binary_cross_entropy_finds_logits_of_a_sigmoid() -> None:
    targets = (X[:, :3] > 0).astype(np.float32)
    z = (X @ W).astype(np.float64)
    expected = float((np.logaddexp(0, z) - z * targets).mean())

    def by_hand(z: Tensor) -> Tensor:
        return 1.0 / (1.0 + op.Exp(-z))

    def reciprocal(z: Tensor) -> Tensor:
        return op.Reciprocal(op.Exp(op.Neg(z)) + 1.0)

    def half(z: Tensor) -> Tensor:
        return op.Slice(op.Sigmoid(z), [0], [2], [1])

    def limited(z: Tensor) -> Tensor:
        return op.Clip(op.Sigmoid(z), 1e-7, 1 - 1e-7)

    for end in (op.Sigmoid, by_hand, reciprocal, limited):
        trained = build_training_model(
            classifier(end), loss="BinaryCrossEntropyWithLogits", optimizer="SGD"
        )
        found = TrainingSession(trained).step({"x": X, "targets": targets})["loss"]
        assert float(found) == pytest.approx(expected, rel=1e-5)
    trained = build_training_model(
        classifier(half), loss="BinaryCrossEntropyWithLogits", optimizer="SGD"
    )
    found = TrainingSession(trained).step({"x": X, "targets": targets[:, :2]})["loss"]
    z, targets = z[:, :2], targets[:, :2]
    assert float(found) == pytest.approx((np.logaddexp(0, z) - z * targets).mean(), rel=1e-5)


def two_shares(z: Tensor) -> Tensor:
    p = op.Sigmoid(z)
    return op.Concat(1.0 - p, p, axis=1)


def test_shares_without_logits_are_read_by_logarithms(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier(two_shares, classes=1)
    labels = LABELS % 2
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    )
    z = (X @ W[:, :1]).astype(np.float64)
    expected = np.logaddexp(0, np.where(labels[:, None] == 1, -z, z)).mean()
    assert float(session.step({"x": X, "labels": labels})["loss"]) == pytest.approx(expected)
    assert any("reads the logarithms of the probabilities 'y'" in m for m in caplog.messages)


def test_binary_cross_entropy_refuses_shares_without_logits() -> None:
    expected = (
        "loss BinaryCrossEntropyWithLogits: tensor 'y' holds probabilities, from Concat node '.*', "
        "and no tensor before it holds their logits; use a loss of probabilities"
    )
    with pytest.raises(ModelError, match=expected):
        build_training_model(
            classifier(two_shares, classes=1), loss="BinaryCrossEntropyWithLogits", optimizer="SGD"
        )


@pytest.mark.parametrize(
    "end",
    [lambda z: 1.0 / (1.0 + op.Exp(z)), lambda z: op.Reciprocal(op.Exp(-1.0 * z) + 1.0)],
)
def test_other_forms_of_a_sigmoid_are_no_logits(end: Any) -> None:
    with pytest.raises(
        ModelError, match=r"tensor 'y' holds probabilities, from (Div|Reciprocal) node"
    ):
        build_training_model(classifier(end), loss="BinaryCrossEntropyWithLogits", optimizer="SGD")


def test_probabilities_out_of_a_branch_are_known() -> None:
    branches = [
        helper.make_graph(
            [helper.make_node(op_type, ["z"], [op_type])],
            op_type,
            [],
            [helper.make_tensor_value_info(op_type, TensorProto.FLOAT, ["N", 3])],
        )
        for op_type in ("Sigmoid", "Softmax")
    ]
    model = classifier(lambda z: z * 1.0)
    del model.graph.node[1:]
    model.graph.node.append(
        helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1])
    )
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    with pytest.raises(ModelError, match="holds probabilities, from If node 'y'"):
        build_training_model(model, loss="BinaryCrossEntropyWithLogits", optimizer="SGD")


def test_mean_squared_error_reads_probabilities_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    targets = np.eye(3, dtype=np.float32)[LABELS]
    session = TrainingSession(
        build_training_model(classifier(ENDS["Softmax"]), loss="MeanSquaredError", optimizer="SGD")
    )
    found = session.step({"x": X, "targets": targets})["loss"]
    assert float(found) == pytest.approx(((softmax(X @ W) - targets) ** 2).mean(), rel=1e-5)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("loss", "ending", "refused"),
    [
        ("BinaryCrossEntropy", "Softmax <axis = 1> (z)", True),
        ("MeanSquaredError", "Softmax <axis = 1> (z)", True),
        ("L1", "LogSoftmax <axis = -1> (z)", True),
        ("BinaryCrossEntropyWithLogits", "Softmax <axis = -1> (z)", True),
        ("MeanSquaredError", "Softmax <axis = 0> (z)", False),
        ("BinaryCrossEntropy", "Sigmoid (z)", False),
    ],
)
def test_a_softmax_over_one_class_is_refused(loss, ending, refused):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        constant (float[batch, 2] x) => (float[batch, 1] y) <float[2, 1] w = {{1, 2}}>
        {{ z = MatMul (x, w)  y = {ending} }}""")
    if not refused:
        ortops.build_training_model(model, loss=loss, optimizer="SGD")
        return
    with pytest.raises(ortops.ModelError, match=r"'y', of shape .* over one class, whose probab"):
        ortops.build_training_model(model, loss=loss, optimizer="SGD")


def test_one_class_has_no_cross_entropy() -> None:
    expected = "output 'y' of shape .* has only one class, whose probability is always 1; use Bin"
    with pytest.raises(ModelError, match=expected):
        build_training_model(
            classifier(lambda z: z * 1.0, classes=1), loss="SoftmaxCrossEntropy", optimizer="SGD"
        )


# ------------------------------------------------------------------------------ any tensor


def test_output_names_any_tensor() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 4])
        hidden = op.Tanh(x @ tape.initializer("w", W))
        hidden.value.name = "hidden"
        tape.output(hidden @ tape.initializer("v", W.T), "y")
    model = tape.model()
    trained = build_training_model(
        model, loss=losses.MeanSquaredError(output="hidden"), optimizer="SGD"
    )
    assert [b.key for b in trained.training_info[0].update_binding] == ["w", "step"] or {
        b.key for b in trained.training_info[0].update_binding
    } == {"w", "step"}
    targets = np.zeros((6, 3), np.float32)
    session = TrainingSession(trained)
    found = session.step({"x": X, "targets": targets})["loss"]
    assert float(found) == pytest.approx((np.tanh(X @ W) ** 2).mean(), rel=1e-5)
    expected = "loss MeanSquaredError: the model has no tensor 'hiden'; did you mean 'hidden'?"
    with pytest.raises(ModelError, match=expected):
        build_training_model(model, loss=losses.MeanSquaredError(output="hiden"), optimizer="SGD")


@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [18, 21])
def test_output_names_a_tensor_behind_dropout_and_evaluation_has_none(opset: int) -> None:
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 8, opset_import: ["" : {opset}]>
        g (float[N, 4] x) => (float[N, 3] y)
        <float[4, 3] w = {{{", ".join(map(str, W.ravel()))}}}> {{
            ratio = Constant <value = float {{0.5}}> ()
            z = MatMul (x, w)
            d = Dropout (z, ratio)
            h = Tanh (d)
            y = Softmax <axis = 1> (h)
        }}"""
    )
    targets = np.zeros((6, 3), np.float32)
    session = TrainingSession(
        build_training_model(
            model, loss=losses.MeanSquaredError(output="h"), optimizer=SGD(0.0), seed=3
        )
    )
    expected = float((np.tanh(X @ W) ** 2).mean())
    step = float(session.step({"x": X, "targets": targets})["loss"])
    assert step != pytest.approx(expected, rel=1e-2)
    measured = session.evaluate({"x": X, "targets": targets})
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.0), seed=3)
    )
    measured = session.evaluate({"x": X, "labels": LABELS}, metrics=["accuracy"])
    h = np.tanh(X @ W)
    assert measured["loss"] == pytest.approx(cross_entropy(h, LABELS), rel=1e-5)
    assert measured["accuracy"] == pytest.approx((h.argmax(axis=1) == LABELS).mean())


def test_logits_inside_a_function() -> None:
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[N, 4] x) => (float[N, 3] y)
        <float[4, 3] w = {{{", ".join(map(str, W.ravel()))}}}> {{
            y = own.head (x, w)
        }}
        <domain: "own", opset_import: ["" : 21]>
        head (x, w) => (y) {{
            z = MatMul (x, w)
            y = Softmax <axis = 1> (z)
        }}"""
    )
    trained = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")
    onnx.checker.check_model(trained, full_check=True)
    session = TrainingSession(trained)
    batch = {"x": X, "labels": LABELS}
    assert session.evaluate(batch)["loss"] == pytest.approx(cross_entropy(X @ W, LABELS), rel=1e-5)
    assert float(session.step(batch)["loss"]) == pytest.approx(
        cross_entropy(X @ W, LABELS), rel=1e-5
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize("axis", [-1, 2, None])
def test_the_axis_of_the_classes(axis: int | None) -> None:
    tokens = RNG.normal(size=(2, 5, 4)).astype(np.float32)
    labels = RNG.integers(0, 3, (2, 5))
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", "T", 4])
        z = x @ tape.initializer("w", W)
        # Without an axis, the Softmax tells.
        tape.output(op.Softmax(z, axis=-1) if axis is None else z, "y")
    trained = build_training_model(
        tape.model(), loss=losses.SoftmaxCrossEntropy(axis=axis), optimizer="SGD"
    )
    (added,) = trained.training_info[0].algorithm.input
    assert [d.dim_param for d in added.type.tensor_type.shape.dim] == ["N", "T"]
    session = TrainingSession(trained)
    batch = {"x": tokens, "labels": labels}
    expected = cross_entropy((tokens @ W).reshape(-1, 3), labels.reshape(-1))
    assert float(session.step(batch)["loss"]) == pytest.approx(expected, rel=1e-5)
    accuracy = session.evaluate(batch, metrics=["accuracy"])["accuracy"]
    now = tokens @ session.state["w"]
    assert accuracy == pytest.approx((now.argmax(axis=-1) == labels).mean())
    with pytest.raises(ortops.FeedError, match="labels in 'labels' must be from 0 to 2, got 3"):
        session.step({"x": tokens, "labels": np.full((2, 5), 3)})


MOVES: dict[str, tuple[Any, Any]] = {
    "Transpose": (lambda p: op.Transpose(p, perm=[0, 2, 1]), lambda p: p.transpose(0, 2, 1)),
    "Unsqueeze": (lambda p: op.Unsqueeze(p, [1]), lambda p: p[:, None]),
    "Unsqueeze behind": (lambda p: op.Unsqueeze(p, [3]), lambda p: p[..., None]),
    "Transpose twice": (
        lambda p: op.Transpose(op.Transpose(p, perm=[0, 2, 1]), perm=[0, 2, 1]),
        lambda p: p,
    ),
    "Reshape": (lambda p: op.Reshape(p, [0, 5, 1, 3]), lambda p: p.reshape(-1, 5, 1, 3)),
}


def classes_at(p: Array, labels: Array) -> Array:
    axis = next(i for i in range(p.ndim) if i and p.shape[i] == 3)
    return np.take_along_axis(p, np.expand_dims(labels, axis), axis)


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", ["SoftmaxCrossEntropy", "NegativeLogLikelihood", "Focal"])
@pytest.mark.parametrize("move", MOVES)
def test_the_axis_of_the_classes_is_followed(move: str, loss: str) -> None:
    tokens = RNG.normal(size=(2, 5, 4)).astype(np.float32)
    moved, oracle = MOVES[move]
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 5, 4])
        tape.output(moved(op.Softmax(x @ tape.initializer("w", W), axis=-1)), "y")
    e = np.exp(tokens.astype(np.float64) @ W)
    p = oracle(e / e.sum(axis=-1, keepdims=True))
    labels = RNG.integers(0, 3, [size for i, size in enumerate(p.shape) if not i or size != 3])
    q = classes_at(p, labels)
    expected = (-np.log(q) * ((1 - q) ** 2 if loss == "Focal" else 1)).mean()
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))
    found = session.step({"x": tokens, "labels": labels})["loss"]
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [losses.BinaryCrossEntropyWithLogits(), losses.Focal()])
def test_moved_classes_that_exclude_each_other_are_not_independent(loss: losses.Loss) -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 5, 4])
        p = op.Softmax(x @ tape.initializer("w", W), axis=-1)
        tape.output(op.Reshape(p, [-1, 15]), "y")
    with pytest.raises(ModelError) as raised:
        build_training_model(tape.model(), loss=loss, optimizer="SGD")
    assert f"loss {loss.name}: tensor 'y' holds the result of Softmax node " in str(raised.value)
    assert (
        "whose classes are mutually exclusive, on an unknown axis; use a loss with labels"
        in str(raised.value)
    )


@pytest.mark.parametrize("end", ["as it is", "Identity", "Transpose"])
def test_opposite_scores_on_any_axis(end: str) -> None:
    tokens = RNG.normal(size=(2, 5, 4)).astype(np.float32)
    labels = RNG.integers(0, 2, (2, 5))
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 5, 4])
        z = x @ tape.initializer("w", W[:, :1])
        p = op.Sigmoid(op.Concat(-z, z, axis=-1))
        ends = {"Identity": op.Identity, "Transpose": lambda p: op.Transpose(p, perm=[0, 2, 1])}
        tape.output(ends.get(end, lambda p: p)(p), "y")
    session = TrainingSession(
        build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    z = (tokens.astype(np.float64) @ W[:, :1])[..., 0]
    expected = np.logaddexp(0, np.where(labels == 1, -z, z)).mean()
    found = session.step({"x": tokens, "labels": labels})["loss"]
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["sum / 2", "0.5 * sum", "Mean"])
def test_averages_of_probabilities_are_probabilities(name: str) -> None:
    def end(z: Tensor) -> Tensor:
        a, b = op.Softmax(z, axis=1), op.Softmax(2.0 * z, axis=1)
        return {"sum / 2": (a + b) / 2.0, "0.5 * sum": 0.5 * op.Sum(a, b)}.get(name, op.Mean(a, b))

    z = X.astype(np.float64) @ W
    p = (softmax(z) + softmax(2 * z)) / 2
    session = TrainingSession(
        build_training_model(classifier(end), loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    found = float(session.step({"x": X, "labels": LABELS})["loss"])
    assert found == pytest.approx(-np.log(p[np.arange(6), LABELS]).mean(), rel=1e-5)


def test_an_axis_that_is_chosen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 5, 4])
        tape.output(x @ tape.initializer("w", W), "y")
    for axis in (None, -1):
        caplog.clear()
        build_training_model(
            tape.model(), loss=losses.SoftmaxCrossEntropy(axis=axis), optimizer="SGD"
        )
        said = (
            "loss SoftmaxCrossEntropy uses axis 1 of 'y', of shape ['N', 5, 3], as the class axis"
        )
        assert caplog.messages == (
            [f"{said}; use axis=-1 for the last one"] if axis is None else []
        )


def test_the_first_axis_is_not_that_of_classes() -> None:
    expected = (
        r"axis must be the class axis of 'y', which has shape \['N', 3\], and not the first, got 0"
    )
    with pytest.raises(ModelError, match=expected):
        build_training_model(
            classifier(ENDS["none"]), loss=losses.SoftmaxCrossEntropy(axis=0), optimizer="SGD"
        )


# ------------------------------------------------------------------- the default output


def with_a_label_first(*, zipped: bool) -> onnx.ModelProto:
    """A classifier as skl2onnx writes it: the label, then the probabilities, behind a ZipMap."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Softmax", ["z"], ["p"], axis=1),
        helper.make_node("ArgMax", ["p"], ["label"], axis=1, keepdims=0),
    ]
    outputs = [helper.make_tensor_value_info("label", TensorProto.INT64, ["N"])]
    imports = [helper.make_opsetid("", 21)]
    if zipped:
        nodes.append(
            helper.make_node(
                "ZipMap", ["p"], ["m"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]
            )
        )
        kind = helper.make_map_type_proto(
            TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
        )
        outputs.append(helper.make_value_info("m", helper.make_sequence_type_proto(kind)))
        imports.append(helper.make_opsetid("ai.onnx.ml", 1))
    else:
        outputs.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["N", 3]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        outputs,
        [numpy_helper.from_array(W, "w")],
    )
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("zipped", [False, True])
def test_the_default_output_is_the_first_of_floats(zipped: bool, tmp_path: Any) -> None:
    trained = build_training_model(
        with_a_label_first(zipped=zipped), loss="SoftmaxCrossEntropy", optimizer=SGD(0.5)
    )
    session = TrainingSession(trained)
    batch = {"x": X, "labels": LABELS}
    assert float(session.step(batch)["loss"]) == pytest.approx(cross_entropy(X @ W, LABELS))
    measured = session.evaluate(batch, metrics=["accuracy"])
    z = X @ session.state["w"]
    assert measured["accuracy"] == (z.argmax(axis=1) == LABELS).mean()
    session.save(tmp_path / "trained.onnx")
    label, p = run(tmp_path / "trained.onnx", {"x": X})
    np.testing.assert_array_equal(label, z.argmax(axis=1))
    if zipped:
        p = np.array([[row[c] for c in range(3)] for row in p])
    np.testing.assert_allclose(p, softmax(z), rtol=1e-5)


def test_no_output_of_floats() -> None:
    model = with_a_label_first(zipped=False)
    del model.graph.output[1]
    expected = (
        "loss L1: the model has no floating-point output, only 'label' .*INT64.*; name another"
    )
    with pytest.raises(ModelError, match=expected):
        build_training_model(model, loss="L1", optimizer="SGD")
    trained = build_training_model(model, loss=losses.L1("p"), optimizer="SGD")
    assert TrainingSession(trained).step({"x": X, "targets": np.zeros((6, 3), np.float32)})
    expected = (
        "tensor 'label' must be floating-point, got type INT64; name the tensor that it is computed"
    )
    with pytest.raises(ModelError, match=expected):
        build_training_model(model, loss=losses.L1("label"), optimizer="SGD")


# ------------------------------------------------------------------------------ metrics


@pytest.mark.parametrize(
    ("end", "loss", "border"),
    [
        (op.Sigmoid, "BinaryCrossEntropyWithLogits", 0.0),
        (op.Sigmoid, "MeanSquaredError", 0.0),
        (lambda z: z * 1.0, "BinaryCrossEntropyWithLogits", 0.0),
        (lambda z: z * 1.0, "MeanSquaredError", 0.5),
    ],
)
def test_accuracy_of_yes_and_no(end: Any, loss: str, border: float) -> None:
    targets = (RNG.uniform(size=(6, 3)) > 0.5).astype(np.float32)
    session = TrainingSession(build_training_model(classifier(end), loss=loss, optimizer="SGD"))
    measured = session.evaluate({"x": X, "targets": targets}, metrics=["accuracy"])
    expected = ((border < X @ W) == (targets > 0.5)).mean()
    assert measured["accuracy"] == pytest.approx(expected)


def test_labels_that_do_not_count_are_no_part_of_the_accuracy() -> None:
    labels = np.where(np.arange(6) < 2, -100, (X @ W).argmax(axis=1))
    session = TrainingSession(
        build_training_model(
            classifier(ENDS["Softmax"]),
            loss=losses.SoftmaxCrossEntropy(ignore_index=-100),
            optimizer="SGD",
        )
    )
    assert session.evaluate({"x": X, "labels": labels}, metrics=["accuracy"])["accuracy"] == 1.0


def test_metrics_that_do_not_fit() -> None:
    session = TrainingSession(
        build_training_model(classifier(ENDS["none"]), loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    batch = {"x": X, "labels": LABELS}
    with pytest.raises(ortops.OrtopsError) as raised:
        session.evaluate(batch, metrics=["mean_absolute_error"])
    assert str(raised.value) == (
        "metric 'mean_absolute_error': outputs have shape [6, 3], targets [6]; both must have the "
        "same shape (accuracy compares classes with labels)"
    )
    with pytest.raises(ortops.OrtopsError) as raised:
        session.evaluate(batch, metrics=[3])  # type: ignore[list-item]
    assert str(raised.value) == "metrics must be names of metrics or functions, got 3"


def test_a_metric_is_told_what_it_asks_for() -> None:
    told: dict[str, Any] = {}

    def own(outputs: Array, targets: Array, *, kind: str) -> float:
        told.update(kind=kind, outputs=outputs)
        return 0.25

    session = TrainingSession(
        build_training_model(classifier(op.Sigmoid), loss="MeanSquaredError", optimizer="SGD")
    )
    targets = np.zeros((6, 3), np.float32)
    assert session.evaluate({"x": X, "targets": targets}, metrics=[own])["own"] == 0.25
    assert told["kind"] == "probabilities"
    np.testing.assert_allclose(told["outputs"], 1 / (1 + np.exp(-(X @ W))), rtol=1e-5)


def test_what_a_loss_looks_at_stands_in_the_file() -> None:
    trained = build_training_model(
        classifier(ENDS["Softmax"]), loss="SoftmaxCrossEntropy", optimizer="SGD"
    )
    (entry,) = (e for e in trained.metadata_props if e.key == "ortops.training")
    assert json.loads(entry.value)["prediction"] == {
        "tensor": "z",
        "kind": "logits",
        "axis": 1,
        "target": "labels",
        "ignored": None,
        "output": "y",
    }


def test_nothing_is_said_where_nothing_was_chosen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ortops"):
        build_training_model(classifier(ENDS["none"]), loss="SoftmaxCrossEntropy", optimizer="SGD")
    assert not caplog.messages
