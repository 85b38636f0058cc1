"""``random_state`` and ``early_stopping`` of the estimators, next to scikit-learn's own meaning."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from test_sklearn_estimators import binary, double_mlp
from violations import all_violations

import ortops
from ortops import callbacks


def data(rows: int = 120, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows around a point for each class, of which the first is rare."""
    rng = np.random.default_rng(1)
    labels = np.minimum(rng.integers(0, 10 * classes, rows) // 7, classes - 1)
    return rng.normal(size=(rows, 4)) + np.eye(4)[labels % 4] * 1.5, np.array([*"abcdef"])[labels]


def weights(estimator: Any) -> np.ndarray:
    return np.asarray(estimator.session_.state["w1"])


@pytest.mark.slow
@pytest.mark.optional("sklearn", "sklearn")
def test_random_state_is_a_seed_as_in_scikit_learn() -> None:
    from sklearn.base import clone

    x, y = data(40)

    def fitted(random_state: Any) -> np.ndarray:
        return weights(
            ortops.sklearn.OnnxClassifier(double_mlp, random_state=random_state).fit(x, y)
        )

    seven = fitted(7)
    np.testing.assert_array_equal(fitted(np.int64(7)), seven)
    assert not np.array_equal(fitted(8), seven)
    source = np.random.RandomState(3)
    first, second = fitted(source), fitted(source)  # which has moved on
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(fitted(np.random.RandomState(3)), first)
    np.random.seed(5)  # noqa: NPY002 (what None means in scikit-learn)
    drawn = fitted(None)
    np.random.seed(5)  # noqa: NPY002
    np.testing.assert_array_equal(fitted(None), drawn)
    classifier = ortops.sklearn.OnnxClassifier(double_mlp, random_state=source, warm_start=True)
    classifier.fit(x, y)
    seed = classifier._seed
    assert pickle.loads(pickle.dumps(classifier)).fit(x, y)._seed == seed
    assert clone(classifier).random_state is not source
    with pytest.raises(ValueError, match="cannot be used to seed"):
        fitted("seven")


@pytest.mark.slow
@pytest.mark.optional("sklearn", "sklearn")
@pytest.mark.parametrize("kind", ["classes", "two classes", "one score", "numbers", "weights"])
def test_the_best_epoch_on_the_rows_that_are_set_aside(kind: str) -> None:
    """The rows are those of train_test_split; the score is that of scikit-learn."""
    from sklearn.metrics import accuracy_score, r2_score
    from sklearn.model_selection import train_test_split

    x, y = data(classes=3 if kind == "classes" else 2)
    settings: dict[str, Any] = {"learning_rate": 0.02, "epochs": 200, "random_state": 4}
    settings |= {"early_stopping": True, "validation_fraction": 0.25}
    model = double_mlp
    if kind == "numbers":
        estimator = ortops.sklearn.OnnxRegressor(model, **settings)
        y = np.stack([x[:, 0] * x[:, 1], x.sum(1)], 1) + 0.3
    else:
        if kind == "one score":
            model, settings["loss"] = binary, "BinaryCrossEntropyWithLogits"
        estimator = ortops.sklearn.OnnxClassifier(model, **settings)
    given = np.linspace(0.1, 2, len(x)) if kind == "weights" else None
    estimator.fit(x, y, sample_weight=given)
    strata = None if kind == "numbers" else y
    _, held = train_test_split(np.arange(len(x)), test_size=0.25, random_state=4, stratify=strata)
    name = "validation_r2" if kind == "numbers" else "validation_accuracy"
    scores = [entry[name] for entry in estimator.history_]
    measure = r2_score if kind == "numbers" else accuracy_score
    own = None if given is None else given[held]
    found = measure(y[held], estimator.predict(x[held]), sample_weight=own)
    assert found == pytest.approx(max(scores), rel=1e-4, abs=1e-6)
    if kind != "numbers":  # which become better for longer
        assert 10 < len(scores) < 200
        assert max(scores[-10:]) <= max(scores[:-10]) + 1e-4
    steps = estimator.session_.steps_done
    assert steps <= len(scores) * -(-(len(x) - len(held)) // 32)  # the others alone are trained


@pytest.mark.slow
@pytest.mark.optional("sklearn", "sklearn")
def test_settings_of_early_stopping() -> None:
    from sklearn.exceptions import NotFittedError

    x, y = data(40)
    make = ortops.sklearn.OnnxClassifier
    with all_violations() as check:
        for settings, message in (
            ({"early_stopping": "yes"}, "early_stopping must be True or False, got 'yes'"),
            ({"validation_fraction": 0}, "validation_fraction must be a finite number > 0 and < 1"),
            ({"validation_fraction": 3}, "validation_fraction must be a finite number > 0 and < 1"),
        ):
            with check(settings), pytest.raises(ortops.ArgumentError, match=message):
                make(double_mlp, **{"early_stopping": True} | settings).fit(x, y)
    with pytest.raises(ortops.ArgumentError, match="early_stopping must be False for partial_fit"):
        make(double_mlp, early_stopping=True).partial_fit(x, y, classes=[*"abc"])
    with pytest.raises(NotFittedError):
        make(double_mlp, early_stopping=True).predict(x)
    own = callbacks.EarlyStopping(patience=1, monitor="loss", minimum_change=100.0)
    stopped = make(double_mlp, early_stopping=True, epochs=9, callbacks=[own]).fit(x, y)
    assert len(stopped.history_) == 2


@pytest.mark.slow
@pytest.mark.optional("sklearn", "sklearn")
def test_a_search_in_several_processes() -> None:
    from sklearn.model_selection import GridSearchCV

    x, y = data(60)
    classifier = ortops.sklearn.OnnxClassifier(double_mlp(4, 3), epochs=1)
    grid = {"learning_rate": [1e-3, 0.05], "early_stopping": [False, True]}
    alone, together = (
        GridSearchCV(classifier, grid, cv=2, n_jobs=jobs, refit=False).fit(x, y) for jobs in (1, 2)
    )
    np.testing.assert_array_equal(
        alone.cv_results_["mean_test_score"], together.cv_results_["mean_test_score"]
    )
