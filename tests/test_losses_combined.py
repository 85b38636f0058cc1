"""Sums of losses, inputs of one's own, and what the parameters of a loss function stand for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortops import (
    ArgumentError,
    FeedError,
    ModelError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from ortops.optimizers import SGD

F = np.float32
RNG = np.random.default_rng(9)
X = RNG.normal(size=(7, 4)).astype(F)
V = RNG.normal(size=(4, 3)).astype(F)
U = RNG.normal(size=(4, 2)).astype(F)
LABELS = RNG.integers(0, 3, 7)
BOXES = RNG.normal(size=(7, 2)).astype(F)


def detector() -> onnx.ModelProto:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        tape.output(x @ tape.initializer("v", V), "cls")
        tape.output(x @ tape.initializer("u", U), "box")
    return tape.model()


def trainer(loss: Any, **settings: Any) -> TrainingSession:
    model = build_training_model(detector(), loss=loss, optimizer=SGD(0.1), **settings)
    return TrainingSession(model)


def cross_entropy(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(z)), labels]


# ------------------------------------------------------------------------------------- sums


def test_a_weighted_sum_of_losses() -> None:
    session = trainer(0.7 * losses.SoftmaxCrossEntropy("cls") + losses.L1("box") * 0.3)
    found = session.step({"x": X, "labels": LABELS, "targets": BOXES})
    one = cross_entropy(X @ V, LABELS).mean()
    two = np.abs(X @ U - BOXES).mean()
    assert float(found["loss_cls"]) == pytest.approx(one, rel=1e-5)
    assert float(found["loss_box"]) == pytest.approx(two, rel=1e-5)
    assert float(found["loss"]) == pytest.approx(0.7 * one + 0.3 * two, rel=1e-5)
    slope = 0.3 * X.T @ np.sign(X @ U - BOXES) / BOXES.size
    np.testing.assert_allclose(session.state["u"], U - 0.1 * slope, rtol=1e-5)


def test_each_summand_is_reported() -> None:
    loss = losses.SoftmaxCrossEntropy("cls") + 2.0 * losses.MeanSquaredError("box", target="boxes")
    session = trainer(loss)
    data = {"x": X, "labels": LABELS, "boxes": BOXES}
    measured = session.evaluate(data, batch_size=3, metrics=["accuracy"])
    one = cross_entropy(X @ V, LABELS).mean()
    two = ((X @ U - BOXES) ** 2).mean()
    assert measured == pytest.approx(
        {
            "loss": one + 2 * two,
            "loss_cls": one,
            "loss_box": two,
            "accuracy": ((X @ V).argmax(axis=1) == LABELS).mean(),
        },
        rel=1e-5,
    )
    (epoch,) = session.fit(data, batch_size=3, validation=data, progress=False)
    names = {"loss", "loss_cls", "loss_box"}
    measured = names | {f"validation_{name}" for name in names}
    assert set(epoch) == measured | {"learning_rate", "seconds", "steps"}
    assert epoch["loss"] == pytest.approx(epoch["loss_cls"] + 2 * epoch["loss_box"], rel=1e-5)


def test_summands_share_the_target_of_one_tensor() -> None:
    session = trainer(losses.MeanSquaredError("box") + 0.5 * losses.L1("box"))
    assert set(session.inputs) == {"x", "targets"}
    found = session.step({"x": X, "targets": BOXES})
    distance = X @ U - BOXES
    assert float(found["loss"]) == pytest.approx(
        (distance**2).mean() + 0.5 * np.abs(distance).mean(), rel=1e-5
    )
    assert {"loss", "loss_box", "loss_box_1"} <= set(found)


def test_summands_share_the_target_of_an_output_of_16_bits() -> None:
    """Each of them reads the output in float32."""
    with Tape() as tape:
        x = tape.input("x", np.float16, ["batch", 4])
        tape.output(x @ tape.initializer("u", U.astype(np.float16)), "box")
    loss = losses.MeanSquaredError() + 0.5 * losses.L1()
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer=SGD(0.1)))
    assert set(session.inputs) == {"x", "targets"}
    x16, u16 = X.astype(np.float16), U.astype(np.float16)
    distance = x16.astype(F) @ u16.astype(F) - BOXES
    found = session.step({"x": x16, "targets": BOXES})
    assert float(found["loss"]) == pytest.approx(
        (distance**2).mean() + 0.5 * np.abs(distance).mean(), rel=2e-3
    )


def test_summands_share_the_labels_of_one_output_that_they_read_in_two_ways() -> None:
    """One reads the logits before the Softmax, the other one the probabilities behind it."""
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        tape.output(op.Softmax(x @ tape.initializer("v", V), axis=1), "shares")
    loss = losses.SoftmaxCrossEntropy() + losses.Hinge()
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer=SGD(0.1)))
    assert set(session.inputs) == {"x", "labels"}
    z = (X @ V).astype(np.float64)
    shares = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    rows = np.arange(len(X))
    margins = np.maximum(0, 1 - shares[rows, LABELS][:, None] + shares)
    margins[rows, LABELS] = 0
    expected = cross_entropy(X @ V, LABELS).mean() + margins.sum(axis=1).mean() / 3
    found = session.step({"x": X, "labels": LABELS})
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-5)


def test_targets_of_two_tensors_are_named() -> None:
    expected = (
        "loss L1: 'targets' is already the target of another loss .*; give each its own with "
        "target="
    )
    with pytest.raises(ModelError, match=expected):
        trainer(losses.MeanSquaredError("cls") + losses.L1("box"))
    session = trainer(losses.MeanSquaredError("cls", target="a") + losses.L1("box", target="b"))
    assert set(session.inputs) == {"x", "a", "b"}


def test_weights_are_numbers() -> None:
    for weight in (True, "2", float("nan")):
        expected = f"loss L1: weight must be a finite number, got {weight!r}"
        with pytest.raises(ArgumentError, match=expected):
            weight * losses.L1()  # type: ignore[operator]
    with pytest.raises(TypeError):
        losses.L1() + 1  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="a sum of losses cannot be called; call each summand"):
        (losses.L1() + losses.L1())(X, X)
    assert (2.0 * (3.0 * losses.L1() + losses.L1())).summands == (
        (6.0, losses.L1()),
        (2.0, losses.L1()),
    )


def test_a_sum_of_one() -> None:
    found = trainer(3.0 * losses.L1("box")).step({"x": X, "targets": BOXES})
    assert float(found["loss"]) == pytest.approx(3 * np.abs(X @ U - BOXES).mean(), rel=1e-5)


def test_a_weight_counts_once_wherever_the_loss_is_told() -> None:
    """Also in files of older versions, whose note has the weight beside the weighted loss."""
    model = trainer(3.0 * losses.L1("box")).model()
    old = onnx.ModelProto()
    old.CopyFrom(model)
    (entry,) = (each for each in old.metadata_props if each.key == "ortops.training")
    note = json.loads(entry.value)
    (part,) = note["losses"]
    assert part["weight"] == 1
    part["weight"] = 3.0
    entry.value = json.dumps(note)
    feeds = {"x": X, "targets": BOXES}
    for given in (model, old):
        session = TrainingSession(given)
        expected = 3 * np.abs(X @ U - BOXES).mean()
        gradients = session.gradients(feeds)
        assert session.evaluate(feeds)["loss"] == pytest.approx(expected, rel=1e-5)
        assert gradients.summands[0].weight * gradients.summands[0].value == pytest.approx(
            expected, rel=1e-5
        )
        assert float(session.step(feeds)["loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions(reduction: Any) -> None:
    session = trainer(losses.L1("box", reduction=reduction))
    distance = np.abs(X @ U - BOXES)
    expected = getattr(distance, reduction)()
    data = {"x": X, "targets": BOXES}
    assert session.evaluate(data, batch_size=3)["loss"] == pytest.approx(expected, rel=1e-5)
    assert float(session.step(data)["loss"]) == pytest.approx(expected, rel=1e-5)


def test_reductions_that_there_are() -> None:
    expected = "loss L1: reduction must be 'mean' or 'sum', got 'none'"
    with pytest.raises(ArgumentError, match=expected):
        losses.L1(reduction="none")  # type: ignore[arg-type]


def test_parts_of_a_data_set_count_by_their_labels() -> None:
    labels = np.array([0, 1, 2, -100, -100, -100, 1])
    session = trainer(losses.SoftmaxCrossEntropy("cls", ignore_index=-100))
    kept = labels >= 0
    expected = cross_entropy((X @ V)[kept], labels[kept]).mean()
    for batch_size in (2, 3, 7):  # with 3, a batch has no label at all that counts
        measured = session.evaluate({"x": X, "labels": labels}, batch_size=batch_size)
        assert measured["loss"] == pytest.approx(expected, rel=1e-5)


# -------------------------------------------------------------------------- inputs of one's own


def masked(box: Tensor, targets: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    losses = abs(box - targets) * mask
    return op.ReduceSum(losses, keepdims=0), op.ReduceSum(mask, keepdims=0)


def test_declared_inputs_and_a_count() -> None:
    session = trainer(masked, inputs={"mask": (F, ["batch", 2])})
    mask = (RNG.uniform(size=(7, 2)) > 0.4).astype(F)
    data = {"x": X, "targets": BOXES, "mask": mask}
    expected = (np.abs(X @ U - BOXES) * mask).sum() / mask.sum()
    for batch_size in (2, 5):
        measured = session.evaluate(data, batch_size=batch_size)
        assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    assert float(session.step(data)["loss"]) == pytest.approx(expected, rel=1e-5)
    distance = np.sign(X @ U - BOXES) * mask / mask.sum()
    np.testing.assert_allclose(session.state["u"], U - 0.1 * X.T @ distance, rtol=1e-4)


def test_a_declaration_goes_before_what_a_name_stands_for() -> None:
    def loss(cls: Tensor, labels: Tensor) -> Tensor:
        return op.ReduceMean(op.ReduceSum(cls * labels, [1], keepdims=0), keepdims=0)

    session = trainer(loss, inputs={"labels": (F, ["batch", 3])})
    shares = RNG.uniform(size=(7, 3)).astype(F)
    found = session.step({"x": X, "labels": shares})["loss"]
    assert float(found) == pytest.approx(((X @ V) * shares).sum(axis=1).mean(), rel=1e-4)
    model = build_training_model(
        detector(),
        loss=losses.SoftmaxCrossEntropy("cls", target="kinds"),
        optimizer="SGD",
        inputs={"kinds": (np.int32, ["batch"])},
    )
    (added,) = model.training_info[0].algorithm.input
    assert (added.name, added.type.tensor_type.elem_type) == ("kinds", TensorProto.INT32)


DECLARED = "inputs: 'mask' must be declared with a dtype and dimensions, for example .*, got "

BAD_INPUTS = {
    "list": ([("mask", F)], "inputs must be a dict of names to a dtype and dimensions, got list"),
    "no dims": ({"mask": F}, DECLARED + "<class 'numpy.float32'>"),
    "no dtype": ({"mask": ("what", ["n"])}, DECLARED + r"\('what', \['n'\]\)"),
    "one string": ({"mask": (F, "nm")}, DECLARED),
    "below 0": ({"mask": (F, [-1])}, DECLARED),
    "bool": ({"mask": (F, [True])}, DECLARED),
    "no name": ({"mask": (F, [""])}, DECLARED),
    "None": ({"mask": (None, ["n"])}, DECLARED),
    "times": ({"mask": ("datetime64[s]", ["n"])}, DECLARED),
    "dims": ({"mask": (F, [1.5])}, DECLARED),
    "taken": ({"x": (F, ["n"])}, "inputs: the model already has a tensor 'x'; give the new input"),
    "rank": (
        {"targets": (F, ["n"])},
        (
            "inputs: 'targets' must have 2 dimensions, .*, because loss L1 compares it with "
            "'box', got 1"
        ),
    ),
    "unread": ({"mask": (F, ["n"])}, "inputs: the loss does not read 'mask'; leave it out"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_declarations_that_are_none(case: str) -> None:
    inputs, message = BAD_INPUTS[case]
    of_the_model = case in ("taken", "rank", "unread")
    with pytest.raises(ModelError if of_the_model else ArgumentError, match=message):
        trainer(losses.L1("box"), inputs=inputs)


def test_sizes_may_be_numbers_of_numpy() -> None:
    def loss(box: Tensor, mask: Tensor) -> Tensor:
        return op.ReduceMean(box * mask, keepdims=0)

    inputs = {"mask": (F, [None, np.int64(2)])}
    found = trainer(loss, inputs=inputs).step({"x": X, "mask": np.ones((len(X), 2), F)})["loss"]
    assert float(found) == pytest.approx((X @ U).mean(), rel=1e-5)


@pytest.mark.parametrize("name", ["x", "u", "box", "step", "learning_rate"])
def test_a_target_has_a_name_of_its_own(name: str) -> None:
    expected = f"loss L1: the model or the training already has a tensor '{name}'; give the new"
    with pytest.raises(ModelError, match=expected):
        trainer(losses.L1("box", target=name))


@pytest.mark.parametrize("argument", ["output", "target"])
@pytest.mark.parametrize("value", [3, ["box"], ""])
def test_names_are_strings(argument: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        losses.L1(**{argument: value})
    expected = f"loss L1: {argument} must be the name of a tensor, got {value!r}"
    assert str(raised.value) == expected


@pytest.mark.parametrize("value", ["1", 1.0, True])
def test_an_axis_is_an_integer(value: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        losses.SoftmaxCrossEntropy(axis=value)
    expected = f"loss SoftmaxCrossEntropy: axis must be an integer, got {value!r}"
    assert str(raised.value) == expected


def test_integers_of_numpy_are_integers() -> None:
    settings: dict[str, Any] = {"axis": np.int64(-1), "ignore_index": np.int64(2)}
    labels = np.array([0, 1, 2, 0, 1, 2])
    with_numpy, plain = (
        trainer(losses.SoftmaxCrossEntropy("cls", **given)).evaluate(
            {"x": X[:6], "labels": labels[: len(X)]}, metrics=["accuracy"]
        )
        for given in (settings, {"axis": -1, "ignore_index": 2})
    )
    assert with_numpy == plain


CLASS_LOSSES = [
    losses.SoftmaxCrossEntropy("cls", target="kinds"),
    losses.NegativeLogLikelihood("cls", target="kinds"),
    losses.Focal("cls", multiclass=True, target="kinds"),
    losses.Hinge("cls", target="kinds"),
    losses.Dice("cls", multiclass=True, target="kinds"),
    losses.Distillation("cls", alpha=0.5, target="kinds"),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", CLASS_LOSSES, ids=lambda loss: loss.name)
def test_labels_that_no_class_has_are_refused(loss: losses.Loss) -> None:
    session = trainer(loss)
    classes = (X @ V).shape[1]
    feeds: dict[str, Any] = {"x": X}
    if isinstance(loss, losses.Distillation):
        feeds["teacher"] = X @ V
    for label in (-1, classes):
        expected = f"feeds: labels in 'kinds' must be from 0 to {classes - 1}, got {label}"
        with pytest.raises(FeedError, match=expected):
            session.step({**feeds, "kinds": np.full(len(X), label)})
        with pytest.raises(FeedError, match=expected):
            session.evaluate({**feeds, "kinds": np.full(len(X), label)})


@pytest.mark.parametrize("loss", [losses.Focal, losses.Dice])
def test_a_label_that_does_not_count_is_accepted(loss: Any) -> None:
    session = trainer(loss("cls", multiclass=True, ignore_index=-1))
    labels = np.zeros(len(X), np.int64)
    labels[0] = -1
    assert np.isfinite(session.step({"x": X, "labels": labels})["loss"])
    labels[0] = -2
    expected = "labels in 'labels' must be from 0 to 2, or -1, which is ignored, got -2"
    with pytest.raises(FeedError, match=expected):
        session.step({"x": X, "labels": labels})


@pytest.mark.parametrize(
    "text", ["", "[1]", '[{"classes": 2}]', '[{"classes": "2", "ignored": 1}]']
)
def test_notes_of_labels_that_are_none(text: str) -> None:
    model = build_training_model(detector(), loss=losses.Hinge("cls"), optimizer="SGD")
    model.training_info[0].algorithm.input[0].metadata_props[0].value = text
    with pytest.raises(ModelError, match=r"input 'labels': metadata 'ortops.labels' must be"):
        TrainingSession(model)


# ---------------------------------------------------------------- parameters of loss functions


def test_positional_parameters_keep_their_places_behind_a_default() -> None:
    def loss(box: Tensor, scale: float = 3.0, targets: Any = None, /) -> Tensor:
        return scale * op.ReduceMean(abs(box - targets), keepdims=0)

    targets = np.ones((len(X), 2), F)
    found = trainer(loss).step({"x": X, "targets": targets})["loss"]
    assert float(found) == pytest.approx(3 * abs(X @ U - targets).mean(), rel=1e-5)


def test_parameters_are_never_bound_by_position() -> None:
    def loss(cls: Tensor, labels: Tensor, sample_weight: Tensor) -> Tensor:
        raise AssertionError("it is not called")

    expected = (
        "loss loss: no tensor for parameter 'sample_weight'; use one of the model's tensors "
        r"\('x', 'v', 'u', 'cls', 'box'\) or 'labels', 'targets', or declare an input, for example "
        r'inputs=\{"sample_weight": \(np.float32, \["batch"\]\)\}'
    )
    with pytest.raises(ModelError, match=expected):
        trainer(loss)

    def second(cls: Tensor, labels: Tensor, target_forces: Tensor) -> Tensor:
        raise AssertionError("it is not called")

    with pytest.raises(ModelError, match="loss second: no tensor for parameter 'target_forces'"):
        trainer(second)


def test_only_the_first_parameter_has_a_name_of_its_own() -> None:
    def loss(prediction: Tensor, box: Tensor) -> Tensor:
        return op.ReduceMean(prediction[:, :2] * box, keepdims=0)

    found = trainer(loss).step({"x": X})["loss"]
    assert float(found) == pytest.approx(((X @ V)[:, :2] * (X @ U)).mean(), rel=1e-5)


def test_weights_and_inner_tensors_are_tensors_too() -> None:
    def loss(box: Tensor, targets: Tensor, u: Tensor) -> Tensor:
        return op.ReduceMean(abs(box - targets), keepdims=0) + 0.1 * op.ReduceSum(u * u, keepdims=0)

    found = trainer(loss).step({"x": X, "targets": BOXES})["loss"]
    expected = np.abs(X @ U - BOXES).mean() + 0.1 * (U**2).sum()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_labels_have_the_shape_of_what_the_function_reads() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["z"]),
        helper.make_node("ArgMax", ["z"], ["label"], axis=1, keepdims=0),
        helper.make_node("Softmax", ["z"], ["p"], axis=1),
    ]
    model = detector()
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(nodes)
    model.graph.output.extend(
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("p", TensorProto.FLOAT, ["batch", 3]),
        ]
    )

    def loss(z: Tensor, labels: Tensor) -> Tensor:
        return op.SoftmaxCrossEntropyLoss(z, labels)

    session = TrainingSession(build_training_model(model, loss=loss, optimizer="SGD"))
    data = {"x": X, "labels": LABELS}
    measured = session.evaluate(data, metrics=["accuracy"])
    assert measured["loss"] == pytest.approx(cross_entropy(X @ V, LABELS).mean(), rel=1e-5)
    assert measured["accuracy"] == pytest.approx(((X @ V).argmax(axis=1) == LABELS).mean())


def test_labels_of_a_language_model() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", "time", 4])
        tape.output(op.ReduceMean(x, [1, 2], keepdims=0), "pooled")
        tape.output(x @ tape.initializer("v", V), "logits")
    tokens, labels = RNG.normal(size=(2, 5, 4)).astype(F), RNG.integers(0, 3, (2, 5))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return op.SoftmaxCrossEntropyLoss(op.Reshape(logits, [-1, 3]), op.Reshape(labels, [-1]))

    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))
    expected = cross_entropy((tokens @ V).reshape(-1, 3), labels.reshape(-1)).mean()
    assert float(session.step({"x": tokens, "labels": labels})["loss"]) == pytest.approx(
        expected, rel=1e-5
    )


def test_a_pair_that_is_no_sum_and_count() -> None:
    expected = "loss <lambda> must return a Tensor or a pair of Tensors, the sum and the count, got"
    with pytest.raises(ModelError, match=expected):
        trainer(lambda box: (op.ReduceSum(box, keepdims=0), 3))
    with pytest.raises(ModelError, match=r"must be a scalar, got shape .*; reduce it, for example"):
        trainer(lambda box: (box, box))


def test_a_mask_is_compared_elementwise() -> None:
    def loss(cls: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        chosen = op.Where(mask == 1, labels, np.int64(-100))
        return op.SoftmaxCrossEntropyLoss(cls, chosen, ignore_index=-100)

    session = trainer(loss, inputs={"mask": (np.int64, ["batch"])})
    mask = np.array([1, 0, 1, 1, 0, 0, 1])
    found = session.step({"x": X, "labels": LABELS, "mask": mask})["loss"]
    expected = cross_entropy(X @ V, LABELS)[mask == 1].mean()
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_focal_is_of_classes_that_exclude_each_other_where_a_softmax_ends_the_model() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        tape.output(op.Softmax(x @ tape.initializer("v", V), axis=-1), "y")
    model = build_training_model(tape.model(), loss="Focal", optimizer="SGD")
    found = TrainingSession(model).step({"x": X, "labels": LABELS})["loss"]
    losses_of_rows = cross_entropy(X @ V, LABELS)
    expected = ((1 - np.exp(-losses_of_rows)) ** 2 * losses_of_rows).mean()
    assert float(found) == pytest.approx(expected, rel=1e-5)
