"""Each metric of training steps, in trainings that are resumed within an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_train_metrics import StopAt
from violations import all_violations

from ortops import Tape, TrainingSession, build_training_model, losses, metrics
from ortops.optimizers import SGD

RNG = np.random.default_rng(4)
ROWS, STEPS = 8, 3  # of an epoch: batches of 3 rows


def model(name: str, *shape: int) -> onnx.ModelProto:
    """A model of y = x · w of a shape after the rows, with a weight for each number of a row."""
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", *shape])
        w = RNG.normal(1, 0.3, shape).astype(np.float32)
        tape.output(x * tape.initializer("w", w), name)
    return tape.model()


def drawn(*shape: int) -> Any:
    return RNG.normal(size=(ROWS, *shape)).astype(np.float32)


def objects() -> Any:
    targets = np.zeros((ROWS, 2, 5), np.float32)
    targets[:, 0] = [1, 2, 3, 10, 12]
    return targets


def boxes() -> Any:
    x = np.full((ROWS, 6, 5), -9, np.float32)
    x[:, :4] = RNG.uniform(0, 2, (ROWS, 4, 5))
    x[:, :4, 2], x[:, 5, 2] = [2, 3, 10, 12], RNG.uniform(0.5, 0.9, ROWS)
    x[2, 0, 2] += 100
    return x


CLASSES = (model("y", 4), "SoftmaxCrossEntropy", {"x": drawn(4), "labels": np.arange(ROWS) % 4})
YES = {"x": drawn(1), "targets": np.float32([[row % 2] for row in range(ROWS)])}
BINARY = (model("y", 1), "BinaryCrossEntropyWithLogits", YES)
NUMBERS = (model("y", 2), "MeanSquaredError", {"x": drawn(2), "targets": drawn(2)})
TEXT = (model("y", 5, 4), "NextToken", {"x": drawn(5, 4), "labels": RNG.integers(0, 4, (ROWS, 5))})
PIXELS = (
    model("y", 3, 2, 2),
    losses.Dice(multiclass=True),
    {"x": drawn(3, 2, 2), "labels": RNG.integers(0, 3, (ROWS, 2, 2))},
)
RANKS = (
    model("y", 5),
    losses.L1(),
    {"x": drawn(5), "targets": RNG.integers(0, 4, (ROWS, 5)).astype(np.float32)},
)
SPEECH = (
    model("y", 7, 4),
    losses.CTC(batch_first=True),
    {
        "x": drawn(7, 4),
        "labels": RNG.integers(1, 4, (ROWS, 2)),
        "input_lengths": np.full(ROWS, 7),
        "target_lengths": np.full(ROWS, 2),
    },
)
DETECTOR = (
    model("y", 6, 5),
    losses.TaskAligned(strides=[8, 16], box_format="xywh"),
    {"x": boxes(), "targets": objects()},
)
CASES: list[tuple[Any, tuple[Any, Any, Any]]] = [
    ("accuracy", CLASSES),
    ("accuracy", BINARY),
    (metrics.TopK(2), CLASSES),
    *((name, form) for name in ("precision", "recall", "f1") for form in (CLASSES, BINARY)),
    *((metrics.F1(average=average), CLASSES) for average in ("micro", "weighted")),
    ("auc", BINARY),
    ("auc", CLASSES),
    ("ndcg", RANKS),
    ("confusion_matrix", CLASSES),
    *((name, NUMBERS) for name in ("mean_absolute_error", "mean_squared_error")),
    *((name, NUMBERS) for name in ("root_mean_squared_error", "r2")),
    ("perplexity", TEXT),
    ("iou", PIXELS),
    ("edit_distance", SPEECH),
    ("mean_average_precision", DETECTOR),
]


def label_of(metric: Any) -> str:
    return metric if isinstance(metric, str) else str(metric.label)


def test_each_metric_is_in_the_table() -> None:
    assert {label_of(metric) for metric, _ in CASES} == set(metrics.METRICS)


def is_as_uninterrupted(
    metric: Any, form: tuple[Any, Any, Any], stop: int, path: Path, left_out: set[str]
) -> None:
    net, loss, data = form
    built = build_training_model(net, loss=loss, optimizer=SGD(0.1), trainable=["w"])
    settings: dict[str, Any] = {"metrics": [metric], "train_metrics": True, "epochs": 3}
    settings |= {"batch_size": 3, "progress": False}
    whole = TrainingSession(built).fit(data, **settings)
    assert label_of(metric) in whole[1]
    begun = TrainingSession(built)
    begun.fit(data, callbacks=[StopAt(stop)], **settings)
    begun.save(path)
    for session in (TrainingSession(path), begun):
        found = session.fit(data, resume=True, **settings)
        wanted: list[dict[str, Any]] = [dict(entry) for entry in whole]
        if label_of(metric) in left_out:  # of the epoch that is resumed
            del wanted[(stop - 1) // STEPS][label_of(metric)]
        assert found == wanted


@pytest.mark.parametrize(
    ("stop", "every"), [(5, 6), *(pytest.param(s, 1, marks=pytest.mark.slow) for s in (1, 5))]
)
def test_metrics_of_resumed_epochs(stop: int, every: int, tmp_path: Path) -> None:
    """They are those of a training that was not interrupted, or say that they are left out."""
    with all_violations() as check:
        for number, (metric, form) in enumerate(CASES[::every]):
            with check((label_of(metric), form[1])):
                path = tmp_path / f"{number}.onnx"
                is_as_uninterrupted(metric, form, stop, path, {"auc", "mean_average_precision"})
