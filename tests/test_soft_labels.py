"""`SoftmaxCrossEntropy(probabilities=True)`: soft and one-hot labels, in sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_models import classifier, labelled

import ortops
from ortops import ArgumentError, FeedError, TrainingSession, build_training_model, op
from ortops.losses import ArcFace, KullbackLeibler, NextToken, SoftmaxCrossEntropy

F = np.float32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 2)).astype(F)
W = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.7]], F)
HARD = np.array([0, 1, 2, 0, 1, 2])
SOFT = RNG.dirichlet(np.ones(3), 6).astype(F)
P = np.exp(X @ W) / np.exp(X @ W).sum(1, keepdims=True)


def session(loss: Any, end: str = "Softmax", dtype: Any = F) -> TrainingSession:
    with ortops.Tape() as tape:
        y = tape.input("x", dtype, ["N", 2]) @ tape.initializer("w", W.astype(dtype))
        tape.output(getattr(op, end)(y, axis=1) if end else y, "y")
    return TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))


SOFT_LOSS = SoftmaxCrossEntropy(probabilities=True)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("end", ["Softmax", "LogSoftmax", ""])
@pytest.mark.parametrize("kind", ["soft", "one-hot"])
def test_gradients_are_those_of_keras_and_torch(kind: str, end: str) -> None:
    labels = SOFT if kind == "soft" else np.eye(3, dtype=F)[HARD]
    own = session(SOFT_LOSS, end)
    assert own.inputs["labels"].dtype == np.float32
    found = own.gradients({"x": X, "labels": labels})
    np.testing.assert_allclose(found["w"], X.T @ (P - labels) / 6, rtol=1e-5, atol=1e-6)
    assert found.loss == pytest.approx(-(labels * np.log(P)).sum(1).mean(), rel=1e-5)
    if kind == "one-hot":
        hard = session("SoftmaxCrossEntropy", end).gradients({"x": X, "labels": HARD})
        np.testing.assert_allclose(found["w"], hard["w"], rtol=1e-4, atol=1e-6)
    rows = session(KullbackLeibler(reduction="batchmean"), end or "Softmax")
    np.testing.assert_allclose(
        rows.gradients({"x": X, "targets": labels})["w"], found["w"], rtol=1e-4, atol=1e-6
    )


def test_weights_of_rows() -> None:
    own = session(SoftmaxCrossEntropy(probabilities=True, sample_weight="weight"))
    weight = np.array([1, 0, 2, 0.5, 0, 1], F)
    found = own.gradients({"x": X, "labels": SOFT, "weight": weight})
    expected = -(weight * (SOFT * np.log(P)).sum(1)).sum() / weight.sum()
    assert found.loss == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ArgumentError, match="'labels' has probabilities; use sample_weight="):
        own.fit({"x": X, "labels": SOFT}, class_weight={0: 2.0}, progress=False)


def test_float16() -> None:
    own = session(SOFT_LOSS, dtype=np.float16)
    assert own.inputs["labels"].dtype == np.float32
    found = own.gradients({"x": X.astype(np.float16), "labels": SOFT})
    np.testing.assert_allclose(found["w"], X.T @ (P - SOFT) / 6, rtol=2e-2, atol=2e-3)


def test_metrics_compare_with_the_most_likely_class() -> None:
    own = session(SOFT_LOSS)
    likely = SOFT.argmax(1)
    metrics = ["accuracy", "perplexity", "confusion_matrix"]
    found = own.evaluate({"x": X, "labels": SOFT}, metrics=metrics, batch_size=4)
    right = (P.argmax(1) == likely).mean()
    assert found["accuracy"] == found["confusion_matrix"] == pytest.approx(right)
    loss = -np.log(P[np.arange(6), likely]).mean()
    assert found["perplexity"] == pytest.approx(np.exp(loss), rel=1e-4)
    assert found["loss"] == pytest.approx(-(SOFT * np.log(P)).sum(1).mean(), rel=1e-5)


def test_a_training_that_is_saved_and_in_parts(tmp_path: Any) -> None:
    data = labelled((6,), rows=12)
    data["labels"] = RNG.dirichlet(np.ones(3), 12).astype(F)  # type: ignore[assignment]
    model = build_training_model(classifier(), loss=SOFT_LOSS, optimizer="SGD")
    own = TrainingSession(model)
    own.fit(data, epochs=2, batch_size=4, accumulate=3, shuffle=False, progress=False)
    whole = TrainingSession(model)
    whole.save(tmp_path / "model.onnx")
    again = TrainingSession(tmp_path / "model.onnx")
    for _ in range(2):
        again.step(data)
    for name, array in again.parameters.items():
        np.testing.assert_allclose(own.parameters[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SoftmaxCrossEntropy(probabilities=1),
            "probabilities must be True or False, got 1",
        ),
        (
            lambda: SoftmaxCrossEntropy(probabilities=True, ignore_index=-100),
            "ignore_index requires class numbers, got ignore_index=-100 with probabilities=True",
        ),
        (lambda: NextToken(probabilities=True), "its labels are class numbers, got True"),
        (lambda: ArcFace(probabilities=True), "its labels are class numbers, got True"),
    ],
)
def test_what_does_not_go_together(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize("labels", [SOFT, np.eye(3)[HARD]])
def test_the_error_without_it_names_it(labels: Any) -> None:
    with pytest.raises(FeedError, match=r"use the loss SoftmaxCrossEntropy\(probabilities=True\)"):
        session("SoftmaxCrossEntropy").step({"x": X, "labels": labels})
    with pytest.raises(FeedError, match="labels"):
        session(SOFT_LOSS).step({"x": X, "labels": HARD})
