"""`fit(fast_dev_run=True)` tries a call out and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_distributed import Thread, in_ranks
from training_models import assert_same_arrays, classifier, labelled

import ortops
from ortops import ArgumentError, DivergedError, OrtopsError, TrainingSession, schedules
from ortops.callbacks import BestModel, Callback, Checkpoint, CSVLog, EarlyStopping, JSONLines
from ortops.optimizers import Adam

DATA, HELD = labelled((6,), rows=40), labelled((6,), rows=40, seed=7)


def session(rate: Any = 0.05) -> TrainingSession:
    return TrainingSession(
        ortops.build_training_model(
            classifier(dropout=0.25), loss="SoftmaxCrossEntropy", optimizer=Adam(rate)
        )
    )


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"epochs": 3, "batch_size": 6, "progress": False, "validation": HELD}
    return {**settings, "metrics": ["accuracy"], "train_metrics": True, **more}


class Counting(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, record: Any, session: Any) -> None:
        self.steps += 1


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_steps_and_nothing_left(accumulate: int, tmp_path: Path) -> None:
    made, counting = session(), Counting()
    made.fit(DATA, **arguments(epochs=1))
    before, history = dict(made.state), made.history
    callbacks = [
        Checkpoint(tmp_path / "saved.onnx", every=1),
        BestModel(tmp_path / "best.onnx"),
        EarlyStopping(1, restore_best=tmp_path / "kept.onnx"),
        CSVLog(tmp_path / "log.csv"),
        JSONLines(tmp_path / "log.jsonl", every=1),
        counting,
    ]
    found = made.fit(
        DATA, fast_dev_run=True, **arguments(callbacks=callbacks, accumulate=accumulate)
    )
    assert counting.steps == 3
    assert len(found) == 1
    assert {"loss", "accuracy", "validation_loss", "validation_accuracy"} <= found[0].keys()
    assert not list(tmp_path.iterdir())
    assert_same_arrays(dict(made.state), before)
    assert made.history == history
    expected = session()
    expected.fit(DATA, **arguments(epochs=1))
    assert made.fit(DATA, resume=True, **arguments()) == expected.fit(
        DATA, resume=True, **arguments()
    )
    assert_same_arrays(dict(made.state), dict(expected.state))


@pytest.mark.slow
def test_the_numbers_of_the_steps() -> None:
    made = session()
    found = made.fit(DATA, fast_dev_run=True, **arguments())
    first = {n: a[: 3 * 6] for n, a in HELD.items()}
    expected = session().fit(DATA, **arguments(validation=first, max_steps=3))
    assert found == expected


def test_a_signal_of_an_error_leaves_nothing() -> None:
    made = session()
    before = dict(made.state)
    wrong = {**DATA, "x": DATA["x"] * float("nan")}
    with pytest.raises(DivergedError):
        made.fit(wrong, fast_dev_run=True, **arguments())
    assert_same_arrays(dict(made.state), before)
    with pytest.raises(OrtopsError):
        made.fit(DATA, fast_dev_run=True, **arguments(metrics=["no such metric"]))
    with pytest.raises(ArgumentError, match="fast_dev_run must be True or False, got 1"):
        made.fit(DATA, **arguments(fast_dev_run=1))


def test_a_schedule_has_the_steps_of_the_whole_training() -> None:
    made = session(schedules.warmup_cosine(0.05, warmup=10))
    found = made.fit(DATA, fast_dev_run=True, **arguments())
    assert found[0]["learning_rate"] == pytest.approx(0.05 * 2 / 10)
    assert int(made.state["schedule_steps"]) == 0


@pytest.mark.slow
def test_ranks() -> None:
    model = session().model()

    def work(communicator: Thread) -> TrainingSession:
        made = ortops.distributed.join(TrainingSession(model), communicator)
        given = arguments(train_metrics=False)
        made.fit(DATA, fast_dev_run=True, **given)
        assert made.steps_done == 0
        made.fit(DATA, **given)
        return made

    for made in in_ranks(work):
        assert made.steps_done == 21
