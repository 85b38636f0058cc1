"""Metrics of weighted rows and of several columns, against scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortops import ArgumentError, OrtopsError
from ortops.metrics import F1, R2, IoU, Precision, Recall, RootMeanSquaredError

pytestmark = pytest.mark.sklearn
CLASSES: dict[Any, str] = {
    F1: "f1_score",
    Precision: "precision_score",
    Recall: "recall_score",
    IoU: "jaccard_score",
}


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["labels", "scores", "batches"])
@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
@pytest.mark.parametrize("metric", CLASSES)
def test_classes_in_rows_of_weight_0(metric: Any, average: str, form: str) -> None:
    from sklearn import metrics

    wrong = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        true, answers = rng.integers(0, 4, (2, 9))
        weight = rng.integers(0, 3, 9).astype(np.float64)
        weight[(true == 3) | (answers == 3)] = 0  # class 3 occurs in these rows only
        own = metric(average=average)
        given = answers if form == "labels" else np.eye(6)[answers]
        for part in (slice(0, 4), slice(4, 9)) if form == "batches" else (slice(None),):
            own.update(given[part], true[part], weight[part])
        expected = getattr(metrics, CLASSES[metric])(
            *(true, answers), average=average, sample_weight=weight, zero_division=0
        )
        if own.result() != pytest.approx(expected):
            wrong.append((seed, own.result(), expected))
    assert not wrong


def test_the_example() -> None:
    own = F1(average="macro")
    own.update(np.array([0, 1, 2]), np.array([0, 1, 1]), np.array([1.0, 1.0, 0.0]))
    assert own.result() == pytest.approx(2 / 3)
    assert own.per_class().tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(7,), (7, 1), (7, 3)])
def test_rmse_of_columns(shape: tuple[int, ...], weighted: bool) -> None:
    from sklearn.metrics import root_mean_squared_error

    rng = np.random.default_rng(0)
    y, t = rng.normal(size=(2, *shape)) * np.arange(1, shape[-1] + 1)
    weight = rng.random(7) if weighted else None
    pooled, averaged = RootMeanSquaredError(), RootMeanSquaredError(multioutput="uniform_average")
    for part in (slice(0, 3), slice(3, 7)):
        for own in (pooled, averaged):
            own.update(y[part], t[part], None if weight is None else weight[part])
    assert averaged.result() == pytest.approx(root_mean_squared_error(t, y, sample_weight=weight))
    wide = np.ones(7) if weight is None else weight
    squares = np.square(y - t).reshape(7, -1)
    keras = np.sqrt((wide[:, None] * squares).sum() / (wide.sum() * squares.shape[1]))
    assert pooled.result() == pytest.approx(keras)


def test_rmse_of_columns_refuses() -> None:
    with pytest.raises(ArgumentError, match="multioutput must be 'uniform_average', got 'raw'"):
        RootMeanSquaredError(multioutput="raw")
    own = RootMeanSquaredError(multioutput="uniform_average")
    assert np.isnan(own.result())
    own.update(np.zeros((2, 3)), np.ones((2, 3)))
    with pytest.raises(OrtopsError, match="batches have 3 and 2 columns"):
        own.update(np.zeros((2, 2)), np.ones((2, 2)))


def test_r2_of_rows_of_weight_0() -> None:
    from sklearn.metrics import r2_score

    for weight in ([1.0, 0.0], [0.5, 2.0], [1.0, 1.0]):
        own = R2()
        own.update(np.array([1.0, 2.0]), np.array([1.5, 2.5]), np.array(weight))
        expected = r2_score([1.5, 2.5], [1.0, 2.0], sample_weight=weight)
        assert own.result() == pytest.approx(expected)
