"""Confusion matrix and NDCG, next to scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.mlp import mlp
from ortops import ArgumentError, OrtopsError, TrainingSession, build_training_model
from ortops.metrics import NDCG, ConfusionMatrix

RNG = np.random.default_rng(0)


def updated(metric: Any, outputs: Any, targets: Any, weights: Any = None, size: int = 7) -> Any:
    for at in range(0, len(targets), size):
        part = slice(at, at + size)
        more = {} if weights is None else {"sample_weight": weights[part]}
        metric.update(outputs[part], targets[part], **more)
    return metric


@pytest.mark.sklearn
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["scores", "labels", "questions"])
def test_confusion_matrix(form: str, *, weighted: bool) -> None:
    from sklearn.metrics import confusion_matrix

    labels = RNG.integers(0, 4, 40)
    weights = RNG.choice([0.5, 2.0, 0.0], 40) if weighted else None
    scores = RNG.standard_normal((40, 4))
    outputs, answers = scores, scores.argmax(1)
    if form == "labels":
        outputs = answers
    elif form == "questions":
        outputs, labels = scores[:, 0], (labels > 1).astype(np.float32)
        answers = outputs > 0
    found = updated(ConfusionMatrix(), outputs, labels, weights)
    wanted = confusion_matrix(labels, answers, sample_weight=weights)
    np.testing.assert_allclose(found.matrix, wanted)
    total = np.ones(40) if weights is None else weights
    assert found.result() == pytest.approx(((labels == answers) * total).sum() / total.sum())


@pytest.mark.slow
@pytest.mark.optional("matplotlib", "plot")
def test_the_given_object_has_the_matrix(tmp_path: Any) -> None:
    session = TrainingSession(
        build_training_model(mlp((4, 8, 3)), loss="SoftmaxCrossEntropy", optimizer="Adam")
    )
    data = {"images": RNG.standard_normal((30, 4), np.float32), "labels": RNG.integers(0, 3, 30)}
    confusion = ConfusionMatrix(names=["cat", "dog", "mouse"])
    found = session.evaluate(data, metrics=[confusion, "accuracy"], batch_size=7)
    assert confusion.matrix.sum() == 30
    assert found["confusion_matrix"] == pytest.approx(found["accuracy"])
    confusion.plot(tmp_path / "matrix.png")
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match=r"must end in \.pdf, \.png or \.svg, got"):
        confusion.plot(tmp_path / "matrix.txt")
    few = ConfusionMatrix(names=["a", "b"])
    few.matrix = confusion.matrix
    with pytest.raises(ArgumentError, match="a name for each of the 3 classes, got 2"):
        few.plot(tmp_path / "few.png")
    with pytest.raises(OrtopsError, match="nothing to plot"):
        ConfusionMatrix().plot(tmp_path / "none.png")


def test_wrong_classes() -> None:
    with pytest.raises(OrtopsError, match="outputs contain NaN"):
        ConfusionMatrix().update(np.full((2, 3), np.nan), np.array([0, 1]))
    with pytest.raises(OrtopsError, match="labels must be from 0 to 2, got 3"):
        ConfusionMatrix().update(np.zeros((2, 3)), np.array([0, 3]))
    ignoring = ConfusionMatrix(ignored=-100)
    ignoring.update(np.eye(3), np.array([0, -100, 2]))
    assert ignoring.matrix.sum() == 2
    with pytest.raises(ArgumentError, match="names must be a list of texts, got 'abc'"):
        ConfusionMatrix(names="abc")


@pytest.mark.sklearn
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [None, 1, 3, 9])
@pytest.mark.parametrize("ties", [False, True])
def test_ndcg(k: int | None, *, weighted: bool, ties: bool) -> None:
    from sklearn.metrics import ndcg_score

    relevances = RNG.integers(0, 4, (20, 6)).astype(np.float64)
    relevances[3] = 0
    scores = RNG.integers(0, 3, (20, 6)) * 1.0 if ties else RNG.standard_normal((20, 6))
    weights = RNG.choice([0.5, 2.0, 0.0], 20) if weighted else None
    found = updated(NDCG(k), scores, relevances, weights).result()
    assert found == pytest.approx(ndcg_score(relevances, scores, k=k, sample_weight=weights))


def test_relevances_that_cannot_be() -> None:
    with pytest.raises(OrtopsError, match="relevances must be >= 0, got -1"):
        NDCG().update(np.zeros((1, 2)), np.array([[1.0, -1.0]]))
    with pytest.raises(OrtopsError, match=r"got shapes \[2\] and \[2\]"):
        NDCG().update(np.zeros(2), np.zeros(2))
    with pytest.raises(ArgumentError, match="k must be an integer >= 1, got 0"):
        NDCG(0)
