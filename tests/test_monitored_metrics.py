"""What callbacks take for better: each name of a metric, with each callback that monitors one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import line
from ortops import ArgumentError, Tape, TrainingSession, build_training_model
from ortops.callbacks import BestModel, Callback, EarlyStopping, Record, ReduceLROnPlateau
from ortops.engine.training.history import History
from ortops.losses import L1
from ortops.metrics import (
    METRICS,
    OTHER_NAMES,
    Accuracy,
    Function,
    MeanAbsoluteError,
    StreamingMetric,
    resolve,
)

ERRORS = {
    *("mean_absolute_error", "mae", "l1", "MeanAbsoluteError", "mean_squared_error", "mse", "MSE"),
    *("MeanSquaredError", "root_mean_squared_error", "rmse", "RMSE", "RootMeanSquaredError"),
    *("perplexity", "ppl", "Perplexity", "edit_distance", "EditDistance"),
}
"""The names that are minimized, in ortops, Keras, torchmetrics and fastai."""

GAINS = {
    *("accuracy", "acc", "Accuracy", "binaryaccuracy", "BinaryAccuracy", "binary_accuracy"),
    *("sparsecategoricalaccuracy", "SparseCategoricalAccuracy", "top_k", "TopK", "top5", "top_5"),
    *("topkaccuracy", "TopKAccuracy", "sparsetopkcategoricalaccuracy", "precision", "Precision"),
    *("SparseTopKCategoricalAccuracy", "recall", "Recall", "f1", "F1", "auc", "AUC", "rocauc"),
    *("ROC_AUC", "ndcg", "NDCG", "r2", "R2", "iou", "IoU", "jaccard", "Jaccard", "meaniou"),
    *("MeanIoU", "mean_average_precision", "MeanAveragePrecision", "map", "cocomap", "map5095"),
}

NAMES = sorted(ERRORS | GAINS)


class Rate:
    """A session that has nothing but a learning rate."""

    peak_learning_rate = 1.0


def history(callback: Callback, name: str, directions: dict[str, Any]) -> bool:
    """Tells a callback of three epochs with rising values, and returns whether it takes them."""
    session, done = Rate(), History()
    callback.on_begin(Record(1, 9, 0, 1, 0, {}, 0, 0.0, done, directions=directions), session)
    for epoch in (1, 2, 3):
        done.append({name: float(epoch)})
        record = Record(epoch, 9, 1, 1, epoch, done[-1], 1, 0.0, done, directions=directions)
        callback.on_epoch(record, session)
    if isinstance(callback, ReduceLROnPlateau):
        return session.peak_learning_rate == 1.0
    assert isinstance(callback, EarlyStopping | BestModel)
    return callback.best == 3.0 and not record.stopped


CALLBACKS: dict[str, Callable[..., Callback]] = {
    "EarlyStopping": functools.partial(EarlyStopping, 1),
    "BestModel": functools.partial(BestModel, "best.onnx"),
    "ReduceLROnPlateau": functools.partial(ReduceLROnPlateau, 0, 0.5),
}


def directions(metrics: Any) -> dict[str, Any]:
    """Returns the directions of metrics that fit tells callbacks."""
    found: dict[str, Any] = {}
    session = line.session()
    for metric in metrics:
        found |= session.directions(resolve([metric]))
    return {f"validation_{name}": more for name, more in found.items()}


def test_all_names_are_below() -> None:
    known = {name for name, what in OTHER_NAMES.items() if not what.startswith("use ")}
    assert known | METRICS.keys() <= ERRORS | GAINS | {"confusion_matrix"}


@pytest.mark.parametrize("who", CALLBACKS)
def test_a_metric_has_its_direction_under_each_name(who: str) -> None:
    known = directions(NAMES)
    assert len(known) == len(NAMES)
    wrong = [
        name
        for name in NAMES
        if history(
            CALLBACKS[who](monitor=f"validation_{name}"),
            f"validation_{name}",
            known,
        )
        != (name in GAINS)
    ]
    assert not wrong


@pytest.mark.sklearn
@pytest.mark.parametrize("who", CALLBACKS)
def test_functions_of_sklearn_have_the_signs_of_its_scorers(who: str) -> None:
    from sklearn import metrics

    signs: dict[str, tuple[Any, int]] = {}
    for name in metrics.get_scorer_names():
        scorer = metrics.get_scorer(name)
        made = scorer._score_func
        if "likelihood" not in name:  # a pair of numbers, of which one is chosen
            signs[made.__name__] = (made, scorer._sign)
    assert len(signs) > 30
    functions = [made for made, _ in signs.values()]
    functions += [functools.partial(metrics.fbeta_score, beta=2.0), metrics.zero_one_loss]
    functions += [metrics.hamming_loss, metrics.hinge_loss, metrics.cohen_kappa_score]
    signs |= {"fbeta_score": (None, 1), "zero_one_loss": (None, -1), "hamming_loss": (None, -1)}
    signs |= {"hinge_loss": (None, -1), "cohen_kappa_score": (None, 1)}
    known: dict[str, Any] = {}
    for each in functions:
        metric = Function(each, takes="labels")
        known[f"validation_{metric.label}"] = metric.higher_is_better
    wrong = [
        name
        for name, (_, sign) in signs.items()
        if history(CALLBACKS[who](monitor=f"validation_{name}"), f"validation_{name}", known)
        != (sign > 0)
    ]
    assert not wrong


def worst(outputs: Any, targets: Any) -> float:
    return float(np.abs(outputs - targets).max())


def accuracy_score(y_true: Any, y_pred: Any) -> float:
    """A function of a user's own, with a name of scikit-learn's."""
    return float((y_true == y_pred).mean())


class Gain(StreamingMetric):
    def reset(self) -> None:
        self.sum = 0.0

    def update(self, outputs: Any, targets: Any, sample_weight: Any = None) -> None:
        self.sum += float(outputs.sum())

    def result(self) -> float:
        return self.sum


class Declared(Gain):
    higher_is_better = True


class Torch:
    """A function as torchmetrics writes it."""

    higher_is_better = False

    def __call__(self, outputs: Any, targets: Any) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("metric", "more"),
    [
        (Accuracy(name="loss_of_weight"), True),
        (MeanAbsoluteError(name="score"), False),
        (Declared, True),
        (Gain, None),
        (worst, None),
        (accuracy_score, None),
        (Function(worst, higher_is_better=False), False),
        (Function(worst, higher_is_better=True, name="error"), True),
        (Torch(), False),
    ],
)
def test_the_direction_belongs_to_the_metric(metric: Any, more: bool | None) -> None:
    (found,) = directions([metric]).values()
    assert found is more


def test_a_direction_is_true_or_false() -> None:
    message = "metric 'worst': higher_is_better must be True or False, got 'yes'"
    with pytest.raises(ArgumentError, match=message):
        Function(worst, higher_is_better="yes")  # type: ignore[arg-type]


class Adding(Callback):
    """Writes a number of its own into the history."""

    def on_epoch(self, record: Record, session: Any) -> None:
        record.values["validation_score"] = float(record.epoch)


QUIET: dict[str, Any] = {"progress": False, "epochs": 3, "validation": line.BATCH}


@pytest.mark.quick(3)
@pytest.mark.parametrize("who", CALLBACKS)
@pytest.mark.parametrize("monitor", ["validation_worst", "validation_score", "learning_rate"])
def test_what_is_better_must_be_known_before_the_first_step(
    who: str, monitor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = line.session()
    callbacks = [Adding(), CALLBACKS[who](monitor=monitor)]
    with pytest.raises(ArgumentError, match=rf"{who}: .* more or less of '{monitor}' is better"):
        session.fit(line.BATCH, metrics=[worst], callbacks=callbacks, **QUIET)
    assert session.steps_done == 0
    callbacks = [Adding(), CALLBACKS[who](monitor=monitor, mode="max")]
    session.fit(line.BATCH, metrics=[worst], callbacks=callbacks, **QUIET)
    assert session.steps_done > 0


def test_the_best_epoch_of_a_training() -> None:
    session = line.session()
    best = {
        name: EarlyStopping(9, name)
        for name in ("loss", "validation_loss", "validation_r2", "validation_rmse", "mae")
    }
    metrics: list[Any] = ["rmse", "mae", "r2"]
    data = {"x": np.array([[1], [2]], np.float32), "targets": np.array([[2], [4]], np.float32)}
    history = session.fit(
        data,
        **(QUIET | {"validation": data}),
        metrics=metrics,
        train_metrics=True,
        callbacks=list(best.values()),
    )
    columns = history.history
    for name, callback in best.items():
        extreme = max if name.endswith("r2") else min
        assert callback.best == extreme(columns[name]), name


def test_summands_of_a_loss_are_minimized() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        tape.output(x @ tape.initializer("w", np.ones((2, 1), np.float32)), "accuracy")
        tape.output(x @ tape.initializer("v", np.ones((2, 1), np.float32)), "b")
    model: onnx.ModelProto = tape.model()
    loss = L1("accuracy", target="one") + L1("b", target="two")
    session = TrainingSession(build_training_model(model, loss=loss, optimizer="SGD"))
    data = {"x": np.ones((4, 2), np.float32)}
    data |= {name: np.zeros((4, 1), np.float32) for name in ("one", "two")}
    early = EarlyStopping(9, "validation_loss_accuracy")
    history = session.fit(data, validation=data, epochs=3, callbacks=[early], progress=False)
    assert early.best == min(history.history["validation_loss_accuracy"])
