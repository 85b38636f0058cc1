"""Losses: values and gradients against float64 formulae, and functions of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortops
from ortops import (
    ArgumentError,
    ModelError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from ortops.losses import LOSSES
from tests import test_losses_formulas, test_losses_torch
from tests.loss_models import loss_and_gradients

Array = np.ndarray[Any, Any]


def offsets(shape: tuple[Any, ...], parameters: Array) -> onnx.ModelProto:
    """y = x + p: the gradient by p is the gradient by the output, summed over the batch."""
    with Tape() as tape:
        x = tape.input("x", parameters.dtype, shape)
        tape.output(x + tape.initializer("p", parameters), "y")
    return tape.model()


def loss_and_gradient(loss: Any, y: Array, **feeds: Array) -> tuple[float, Array]:
    """The loss at an output y, and its gradient there, in float64."""
    value, gradients = loss_and_gradients(loss, {"y": y}, feeds)
    return value, gradients["y"].astype(np.float64)


def numeric_gradient(function: Callable[[Array], float], y: Array) -> Array:
    y = y.astype(np.float64)
    gradient = np.zeros_like(y)
    for index in np.ndindex(y.shape):
        step = np.zeros_like(y)
        step[index] = 1e-6
        gradient[index] = (function(y + step) - function(y - step)) / 2e-6
    return gradient


def log_softmax(y: Array) -> Array:
    shifted = y - y.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


RNG = np.random.default_rng(0)
Y = RNG.normal(size=(5, 3)).astype(np.float32)
TARGETS = RNG.normal(size=(5, 3)).astype(np.float32)
SHARES = RNG.uniform(size=(5, 3)).astype(np.float32)
PIXELS = RNG.normal(size=(2, 3, 2, 2)).astype(np.float32)
PIXEL_LABELS = RNG.integers(0, 3, (2, 2, 2))
LABELS = np.array([0, 2, 1, 1, 0])
LOGITS = RNG.normal(size=(2, 4, 3)).astype(np.float32)
TOKENS = np.array([[-100, 2, -100, 0], [1, 1, 2, -100]])
COUNTED = TOKENS[:, 1:] != -100
WEIGHTS = (0.5, 2.0, 1.0)


def cross_entropy(y: Array, labels: Array, weights: Any = (1, 1, 1), ignored: int = -9) -> float:
    chosen = np.take_along_axis(log_softmax(y), np.where(labels < 0, 0, labels)[:, None], 1)[:, 0]
    counted = np.where(labels == ignored, 0.0, np.take(np.array(weights, float), labels))
    return float(-(counted * chosen).sum() / counted.sum())


CASES: dict[str, tuple[Any, Array, dict[str, Array], Callable[[Array], float]]] = {
    "mean squared error": (
        "MeanSquaredError",
        Y,
        {"targets": TARGETS},
        lambda y: float(np.mean((y - TARGETS) ** 2)),
    ),
    "L1": ("L1", Y, {"targets": TARGETS}, lambda y: float(np.mean(np.abs(y - TARGETS)))),
    "binary cross-entropy": (
        "BinaryCrossEntropyWithLogits",
        Y,
        {"targets": SHARES},
        lambda y: float(
            -np.mean(
                SHARES * np.log(1 / (1 + np.exp(-y))) + (1 - SHARES) * np.log(1 / (1 + np.exp(y)))
            )
        ),
    ),
    "cross-entropy": (
        "SoftmaxCrossEntropy",
        Y,
        {"labels": LABELS},
        lambda y: cross_entropy(y, LABELS),
    ),
    "weighted cross-entropy": (
        losses.SoftmaxCrossEntropy(weights=WEIGHTS),
        Y,
        {"labels": LABELS},
        lambda y: cross_entropy(y, LABELS, WEIGHTS),
    ),
    "cross-entropy with a label that does not count": (
        losses.SoftmaxCrossEntropy(ignore_index=2, weights=WEIGHTS),
        Y,
        {"labels": LABELS},
        lambda y: cross_entropy(y, LABELS, WEIGHTS, ignored=2),
    ),
    "cross-entropy of pixels": (
        "SoftmaxCrossEntropy",
        PIXELS,
        {"labels": PIXEL_LABELS},
        lambda y: cross_entropy(y, PIXEL_LABELS),
    ),
    "next tokens": (
        "NextToken",
        LOGITS,
        {"labels": TOKENS},
        lambda y: cross_entropy(y[:, :-1][COUNTED], TOKENS[:, 1:][COUNTED]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient(case: str) -> None:
    loss, y, feeds, formula = CASES[case]
    value, gradient = loss_and_gradient(loss, y, **feeds)
    assert value == pytest.approx(formula(y.astype(np.float64)), rel=1e-5)
    np.testing.assert_allclose(gradient, numeric_gradient(formula, y), rtol=1e-4, atol=1e-6)


def test_every_loss_is_tested() -> None:
    tested = {loss if isinstance(loss, str) else loss.name for loss, *_ in CASES.values()}
    tested |= {case.loss.name for case in test_losses_torch.CASES}
    tested |= {loss.name for loss, *_ in test_losses_formulas.CASES.values()}
    others = {"CIoU", "CTC", "DPO", "DistributionFocal", "GIoU", "TaskAligned"}
    assert tested | others == set(LOSSES)  # which have tests of their own
    assert set(LOSSES) <= set(losses.__all__)
    assert all(getattr(ortops.losses, name) is loss for name, loss in LOSSES.items())


def test_big_logits_overflow_nowhere() -> None:
    y = np.array([[1e4, -1e4, 30]], np.float32)
    value, gradient = loss_and_gradient(
        "BinaryCrossEntropyWithLogits", y, targets=np.array([[0, 1, 1]], np.float32)
    )
    assert value == pytest.approx(2e4 / 3)
    np.testing.assert_allclose(gradient, [[1 / 3, -1 / 3, 0]], atol=1e-6)
    value, gradient = loss_and_gradient("SoftmaxCrossEntropy", y, labels=np.array([1]))
    assert value == pytest.approx(2e4)
    np.testing.assert_allclose(gradient, [[1, -1, 0]], atol=1e-6)


def test_l1_has_gradient_zero_where_output_and_target_are_equal() -> None:
    y = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    _, gradient = loss_and_gradient("L1", y, targets=np.array([[1, 0, 9, 4]], np.float32))
    np.testing.assert_array_equal(gradient, [[0, 0.25, -0.25, 0]])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(
    "loss",
    [
        *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "Dice", "Focal", "Huber"),
        *("KullbackLeibler", "L1", "MeanSquaredError", "SmoothL1"),
    ],
)
def test_targets_have_the_type_and_shape_of_the_output(loss: str, dtype: type) -> None:
    model = build_training_model(
        offsets(("N", 4, "M"), np.zeros((4, 1), dtype)), loss=loss, optimizer="SGD"
    )
    (targets,) = model.training_info[0].algorithm.input
    assert targets.name == "targets"
    (y,) = model.graph.output
    assert targets.type == y.type


def test_an_output_of_unknown_rank() -> None:
    model = offsets(("N", 3), np.zeros(3, np.float32))
    # An operator whose output has a rank that only the run knows.
    model.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, ["R"]))
    model.graph.node.append(helper.make_node("Reshape", ["y", "shape"], ["z"]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    batch = {"x": Y, "shape": np.array([15]), "targets": TARGETS.reshape(15)}
    session = TrainingSession(build_training_model(model, loss="L1", optimizer="SGD"))
    assert session.step(batch)["loss"] == pytest.approx(np.abs(Y - TARGETS).mean(), rel=1e-5)


def two_outputs() -> onnx.ModelProto:
    """At first x, and twice x."""
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 3])
        p = tape.initializer("p", np.zeros(3, np.float32))
        tape.output(x + p, "first")
        tape.output(x * (p + 2.0), "second")
    return tape.model()


@pytest.mark.parametrize(("name", "expected"), [("first", Y), ("second", 2 * Y), (None, Y)])
def test_a_loss_looks_at_the_output_that_it_is_told(name: str | None, expected: Array) -> None:
    model = build_training_model(two_outputs(), loss=losses.L1(output=name), optimizer="SGD")
    shown = TrainingSession(model).step({"x": Y, "targets": TARGETS})
    # The output that the loss depends on is shown; the other is not computed.
    assert set(shown) == {"loss", name or "first"}
    np.testing.assert_allclose(shown[name or "first"], expected, rtol=1e-6)
    assert shown["loss"] == pytest.approx(np.abs(expected - TARGETS).mean(), rel=1e-5)


# ------------------------------------------------------------------- functions of the user's own


def mean(x: Tensor) -> Tensor:
    result: Tensor = op.ReduceMean(x, keepdims=0)
    return result


def of_one(prediction):
    return mean(prediction * prediction)


def of_two(prediction, targets):
    return mean(abs(prediction - targets))


def of_both_outputs(a, second):
    return mean(a * second)


def of_both_and_targets(a, second, targets):
    return mean(a * second - targets)


def by_name(second, x, targets):
    return mean(second * x - targets)


def with_labels(first, labels):
    return op.SoftmaxCrossEntropyLoss(first, labels)


def with_both(labels, targets, first):
    return op.SoftmaxCrossEntropyLoss(first, labels) + mean(first * targets)


def with_a_default(first, targets, scale=2.0):
    return scale * mean(abs(first - targets))


def keyword_only(*, targets, first):
    return mean(first - targets)


def positional_only(first, targets, /):
    return mean(first - targets)


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, first, targets):
        return self.scale * mean(abs(first - targets))


OWN: dict[str, tuple[Any, list[str], Callable[[], float]]] = {
    "one": (of_one, [], lambda: (Y**2).mean()),
    "two": (of_two, ["targets"], lambda: np.abs(Y - TARGETS).mean()),
    "both outputs": (of_both_outputs, [], lambda: (Y * 2 * Y).mean()),
    "n": (of_both_and_targets, ["targets"], lambda: (2 * Y * Y - TARGETS).mean()),
    "by name": (by_name, ["targets"], lambda: (2 * Y * Y - TARGETS).mean()),
    "labels": (with_labels, ["labels"], lambda: cross_entropy(Y, LABELS)),
    "labels and targets": (
        with_both,
        ["labels", "targets"],
        lambda: cross_entropy(Y, LABELS) + (Y * TARGETS).mean(),
    ),
    "default": (with_a_default, ["targets"], lambda: 2 * np.abs(Y - TARGETS).mean()),
    "partial": (
        functools.partial(with_a_default, scale=3.0),
        ["targets"],
        lambda: 3 * np.abs(Y - TARGETS).mean(),
    ),
    "keyword-only": (keyword_only, ["targets"], lambda: (Y - TARGETS).mean()),
    "positional-only": (positional_only, ["targets"], lambda: (Y - TARGETS).mean()),
    "object": (Scaled(4.0), ["targets"], lambda: 4 * np.abs(Y - TARGETS).mean()),
    "lambda": (lambda first: mean(first), [], lambda: Y.mean()),
}


@pytest.mark.parametrize("case", OWN)
def test_functions_of_ones_own(case: str) -> None:
    # "two" is given the first output and the targets only if the model has one output.
    loss, inputs, formula = OWN[case]
    model = offsets(("N", 3), np.zeros(3, np.float32)) if case == "two" else two_outputs()
    trainable = build_training_model(model, loss=loss, optimizer="SGD")
    assert [value.name for value in trainable.training_info[0].algorithm.input] == inputs
    everything = {"x": Y, "labels": LABELS, "targets": TARGETS}
    feeds = {name: everything[name] for name in ("x", *inputs)}
    session = TrainingSession(trainable)
    assert session.step(feeds)["loss"] == pytest.approx(formula(), rel=1e-5, abs=1e-6)
    assert np.any(session.state["p"] != 0)


def test_a_constant_loss() -> None:
    with pytest.raises(ModelError, match="trainable: the loss depends on no floating-point"):
        build_training_model(
            two_outputs(), loss=lambda first: mean(op.Floor(first)), optimizer="SGD"
        )


def test_an_exception_of_the_function_is_the_users() -> None:
    def loss(first):
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        build_training_model(two_outputs(), loss=loss, optimizer="SGD")


@pytest.mark.parametrize(
    ("loss", "shape", "message"),
    [
        (
            "SoftmaxCrossEntropy",
            (4,),
            (
                "loss SoftmaxCrossEntropy: logits must have shape (N, C) or (N, C, d1, …), but "
                "output 'y' has shape [4]"
            ),
        ),
        (
            losses.SoftmaxCrossEntropy(weights=(1.0, 2.0)),
            ("N", 3),
            "weights must have one number for each of the 3 classes, got shape [2]",
        ),
        (
            lambda y: mean(y + np.ones(4, np.float32)),
            ("N", 3),
            "Add node 'loss/Add': Incompatible dimensions",
        ),
    ],
)
def test_losses_that_do_not_fit(loss: Any, shape: tuple[Any, ...], message: str) -> None:
    model = offsets(shape, np.zeros(shape[-1], np.float32))
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(ModelError) as raised:
        build_training_model(model, loss=loss, optimizer="SGD")
    assert message in str(raised.value)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("loss", [losses.Loss, Tensor])
def test_classes_that_are_not_losses(loss: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        build_training_model(offsets(("N", 3), np.zeros(3, np.float32)), loss=loss, optimizer="SGD")
    expected = "loss must be one of ortops.losses, its name, or a function of Tensors, got "
    assert str(raised.value) == f"{expected}{loss!r}"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            losses.SoftmaxCrossEntropy(weights=[1, 1e39, 1]),
            "weights contains 1e+39, which overflows",
        ),
        (
            losses.BinaryCrossEntropy(weights=[1e39, 1, 1]),
            "weights contains 1e+39, which overflows",
        ),
        (
            losses.BinaryCrossEntropyWithLogits(positive_weight=[1e39, 1, 1]),
            "positive_weight contains 1e+39, which overflows float32, the type of the prediction",
        ),
        (losses.Huber(delta=1e39), "float32, the dtype of the other operand, cannot represent"),
    ],
)
def test_numbers_of_a_loss_that_do_not_fit_the_prediction(loss: Any, message: str) -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 3])
        tape.output(x * tape.initializer("w", np.ones(3, np.float32)), "y")
    with pytest.raises(ModelError) as raised:
        build_training_model(tape.model(), loss=loss, optimizer="SGD")
    assert message in str(raised.value)


def test_losses_that_may_be_negative() -> None:
    """Of the others, a negative value is an error; a subclass may compute something else."""
    found = {name for name, kind in LOSSES.items() if not vars(kind).get("not_negative")}
    assert found == {"DPO", "GaussianNLL", "KullbackLeibler", "NextToken", "PoissonNLL"}
