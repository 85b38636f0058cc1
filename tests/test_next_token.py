"""The loss of language models, whose labels are the input ids, and labels that were not shifted."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, ModelError, Tape, TrainingSession, losses, op

F = np.float32
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 7, (4, 5))
WEIGHT = RNG.standard_normal((7, 7)).astype(F)
WARNING = "feeds: 'labels' equals 'ids', so each token is trained to predict itself; use the loss"


def bigrams(*, softmax: bool = False) -> onnx.ModelProto:
    """Logits of the next token from the last one."""
    with Tape(name="bigrams") as tape:
        ids = tape.input("ids", np.int64, ["batch", "time"])
        y = op.Gather(tape.initializer("table.weight", WEIGHT), ids)
        tape.output(op.Softmax(y, axis=-1) if softmax else y, "y")
    return tape.model()


def session_of(loss: Any, model: onnx.ModelProto | None = None) -> TrainingSession:
    model = bigrams() if model is None else model
    built = ortops.build_training_model(model, loss=loss, optimizer="SGD", trainable=["table*"])
    return TrainingSession(built)


def expected(ids: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns the loss and the accuracy."""
    logits = WEIGHT.astype(np.float64)[ids[:, :-1]]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    next_labels = labels[:, 1:]
    kept = next_labels != -100
    chosen = np.take_along_axis(log_p, np.where(kept, next_labels, 0)[..., None], -1)[..., 0]
    right = logits.argmax(-1) == next_labels
    return float(-chosen[kept].mean()), float(right[kept].mean())


def masked() -> np.ndarray:
    labels = IDS.copy()
    labels[0, :3] = labels[2, 4:] = -100
    return labels


@pytest.mark.quick(2)
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("labels", [IDS, masked()])
def test_each_position_predicts_the_next_token(labels: np.ndarray, softmax: bool) -> None:
    session = session_of("NextToken", bigrams(softmax=softmax))
    loss, accuracy = expected(IDS, labels)
    feeds = {"ids": IDS, "labels": labels}
    found = session.evaluate(feeds, batch_size=3, metrics=["accuracy", "perplexity"])
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(found["accuracy"], accuracy, rtol=1e-6)
    np.testing.assert_allclose(found["perplexity"], np.exp(loss), rtol=1e-5)
    np.testing.assert_allclose(session.step(feeds)["loss"], loss, rtol=1e-5)


def test_it_trains_as_shifted_labels_do() -> None:
    """Bit by bit, in parts of a batch too."""
    shifted = np.concatenate([masked()[:, 1:], np.full((4, 1), -100)], axis=1)
    one = session_of(losses.NextToken())
    other = session_of(losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100))
    for session, labels in ((one, masked()), (other, shifted)):
        data = {"ids": IDS, "labels": labels}
        session.fit(data, epochs=3, batch_size=2, accumulate=2, progress=False)
    np.testing.assert_array_equal(one.parameters["table.weight"], other.parameters["table.weight"])


def test_logits_are_not_copied() -> None:
    """Labels are shifted: a slice of the logits would double their memory."""
    model = ortops.build_training_model(bigrams(), loss="NextToken", optimizer="SGD")
    sliced = [
        node.input[0] for node in model.training_info[0].algorithm.node if node.op_type == "Slice"
    ]
    assert sliced == ["labels", "loss/Shape_output"]


def test_a_single_token_has_no_next_one() -> None:
    session = session_of("NextToken")
    before = session.parameters["table.weight"]
    assert session.step({"ids": IDS[:, :1], "labels": IDS[:, :1]})["loss"] == 0
    np.testing.assert_array_equal(session.parameters["table.weight"], before)


@pytest.mark.parametrize("loss", ["SoftmaxCrossEntropy", "NegativeLogLikelihood"])
def test_labels_that_were_not_shifted_are_told_once(
    loss: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_of(getattr(losses, loss)(axis=-1), bigrams(softmax=True))
    with caplog.at_level(logging.WARNING, "ortops"):
        session.fit({"ids": IDS, "labels": IDS}, epochs=2, batch_size=2, progress=False)
        session.step({"ids": IDS, "labels": IDS})
    assert caplog.text.count(WARNING) == 1


@pytest.mark.parametrize("run", ["step", "run_steps", "gradients"])
def test_every_kind_of_step_tells_it(run: str, caplog: pytest.LogCaptureFixture) -> None:
    session = session_of(losses.SoftmaxCrossEntropy(axis=-1))
    batch = {"ids": IDS.astype(np.int32), "labels": IDS}
    with caplog.at_level(logging.WARNING, "ortops"):
        getattr(session, run)([batch, batch] if run == "run_steps" else batch)
    assert caplog.text.count(WARNING) == 1


def test_other_labels_and_losses_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def own(y: Any, labels: Any) -> Any:
        return losses.SoftmaxCrossEntropy(axis=2)(y[:, :-1], labels[:, 1:])

    with caplog.at_level(logging.WARNING, "ortops"):
        for loss in ("NextToken", own):
            session_of(loss).step({"ids": IDS, "labels": IDS})
        session = session_of(losses.SoftmaxCrossEntropy(axis=-1))
        session.step({"ids": IDS[:, :-1], "labels": IDS[:, 1:]})
        session.step({"ids": IDS, "labels": IDS})  # only the first batch is compared
    assert "trained to predict itself" not in caplog.text


def test_logits_of_another_shape() -> None:
    with Tape(name="classifier") as tape:
        x = tape.input("x", F, ["batch", 7])
        tape.output(x @ tape.initializer("w", WEIGHT), "y")
    with pytest.raises(
        ModelError,
        match=r"loss NextToken: logits must have shape \(batch, sequence, vocabulary\), ",
    ):
        ortops.build_training_model(tape.model(), loss="NextToken", optimizer="SGD")


@pytest.mark.parametrize("ignore_index", [None, 1.5])
def test_the_ignored_label_is_an_integer(ignore_index: Any) -> None:
    with pytest.raises(ArgumentError, match=r"loss NextToken: ignore_index must be an integer"):
        losses.NextToken(ignore_index=ignore_index)
