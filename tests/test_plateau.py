"""`ReduceLROnPlateau` counts as PyTorch's does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_distributed import Thread, in_ranks
from training_models import affine, affine_batch, assert_same_arrays, classifier, labelled
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, OrtopsError, TrainingSession, build_training_model
from ortops.callbacks import Callback, Checkpoint, ReduceLROnPlateau
from ortops.distributed import join
from ortops.engine.training.callback import Record
from ortops.engine.training.history import History
from ortops.optimizers import SGD, Adam

DATA = labelled((6,), rows=20)
HELD = labelled((6,), rows=9, seed=7)


class Rate:
    """A session that has nothing but a learning rate."""

    def __init__(self, rate: float) -> None:
        self.peak_learning_rate = rate


def record(epoch: int, value: float, name: str = "loss") -> Record:
    return Record(epoch, 100, 1, 1, epoch, {name: value}, 1, 0.0, History())


def values(seed: int) -> list[float]:
    """A number of each epoch: falling, then noisy, with NaN and infinity, also below 0."""
    draw = np.random.default_rng(seed)
    found = (np.exp(-np.arange(60) / 8) + draw.normal(0, 0.03, 60) - 0.1 * (seed % 2)).tolist()
    found[int(draw.integers(60))] = math.nan
    found[int(draw.integers(60))] = math.inf
    found[int(draw.integers(60))] = found[0]
    return [found[0], found[0], *found[1:]]


@pytest.mark.torch
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"patience": 0},
        {"patience": 3, "factor": 0.5, "minimum": 0.03},
        {"patience": 2, "threshold": 0.05, "cooldown": 3},
        {"patience": 1, "threshold": 0.05, "threshold_mode": "absolute", "cooldown": 1},
        {"patience": 0, "threshold": 0.0, "factor": 0.3},
    ],
    ids=str,
)
def test_the_rates_of_torch(settings: Any, mode: Any) -> None:
    with all_violations() as check:
        for seed in range(6):
            with check(f"seed {seed}"):
                rates_are_those_of_torch(settings, mode, seed)


def rates_are_those_of_torch(settings: Any, mode: Any, seed: int) -> None:
    import torch

    given = dict(settings)
    kinds = {"relative": "rel", "absolute": "abs"}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer,
        mode=mode,
        factor=given.get("factor", 0.1),
        patience=given.get("patience", 10),
        threshold=given.get("threshold", 1e-4),
        threshold_mode=kinds[given.get("threshold_mode", "relative")],
        cooldown=given.get("cooldown", 0),
        min_lr=given.get("minimum", 0.0),
    )
    session, plateau = Rate(0.1), ReduceLROnPlateau(monitor="loss", mode=mode, **settings)
    plateau.on_begin(record(1, 0.0), session)  # type: ignore[arg-type]
    for epoch, value in enumerate(values(seed), 1):
        scheduler.step(value)
        plateau.on_epoch(record(epoch, value), session)  # type: ignore[arg-type]
        assert session.peak_learning_rate == pytest.approx(
            optimizer.param_groups[0]["lr"], rel=1e-9
        )


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"epochs": 12, "batch_size": 6, "seed": 3, "progress": False}
    return {**settings, "validation": HELD, **more}


def model(optimizer: Any = None) -> Any:
    return build_training_model(
        classifier(dropout=0.25), loss="SoftmaxCrossEntropy", optimizer=optimizer or Adam(0.3)
    )


@pytest.mark.slow
def test_a_training_by_hand() -> None:
    """The same with a learning rate that the test sets."""
    whole = TrainingSession(model())
    history = whole.fit(DATA, callbacks=[ReduceLROnPlateau(1, 0.5, mode="min")], **arguments())
    by_hand = TrainingSession(model())
    best, waited = math.inf, 0

    class Setting(Callback):
        def on_epoch(self, record: Any, session: Any) -> None:
            nonlocal best, waited
            value = record.values["validation_loss"]
            best, waited = (value, 0) if value < best * (1 - 1e-4) else (best, waited + 1)
            if waited > 1:
                session.learning_rate *= 0.5
                waited = 0

    assert by_hand.fit(DATA, callbacks=[Setting()], **arguments()) == history
    assert_same_arrays(dict(by_hand.state), dict(whole.state))
    assert history[-1]["learning_rate"] < history[0]["learning_rate"]


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("stop", [3, 9, 14, 20, 26, 33])
def test_a_resumed_training_goes_on_counting(stop: int, every: int | None, tmp_path: Path) -> None:
    class Quit(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == stop:
                session.save(tmp_path / "saved.onnx")
                raise RuntimeError("killed")

    settings = arguments(validate_every=every)
    whole = TrainingSession(model())
    wanted = whole.fit(DATA, callbacks=[ReduceLROnPlateau(1, 0.5)], **settings)
    assert len(set(wanted.history["learning_rate"])) > 2
    begun = TrainingSession(model())
    with pytest.raises(RuntimeError, match="killed"):
        begun.fit(DATA, callbacks=[ReduceLROnPlateau(1, 0.5), Quit()], **settings)
    session = TrainingSession(tmp_path / "saved.onnx")
    found = session.fit(DATA, callbacks=[ReduceLROnPlateau(1, 0.5)], resume=True, **settings)
    assert found == wanted
    assert_same_arrays(dict(session.state), dict(whole.state))


@pytest.mark.slow
def test_a_part_of_an_epoch_does_not_count(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [ReduceLROnPlateau(0, 0.5), Checkpoint(tmp_path / "saved.onnx")]

    whole = TrainingSession(model())
    wanted = whole.fit(DATA, callbacks=callbacks(), **arguments())
    TrainingSession(model()).fit(DATA, callbacks=callbacks(), max_steps=22, **arguments())
    session = TrainingSession(tmp_path / "saved.onnx")
    assert session.fit(DATA, callbacks=callbacks(), resume=True, **arguments()) == wanted


def test_the_rest_of_a_schedule_is_scaled() -> None:
    rate = ortops.schedules.exponential(0.4, factor=0.5)
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(rate))
    )
    plateau = ReduceLROnPlateau(0, 0.1, "loss", mode="max", threshold=1e6)
    data = affine_batch(4)
    history = session.fit(data, epochs=3, callbacks=[plateau], progress=False, stop_on_nan=False)
    assert history.history["learning_rate"] == pytest.approx([0.4, 0.2, 0.01])


@pytest.mark.slow
def test_ranks_reduce_together() -> None:
    """They refuse to go on with different learning rates."""
    plain = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer=Adam(0.3))

    def work(communicator: Thread) -> Any:
        session = join(TrainingSession(plain), communicator)
        return session.fit(DATA, callbacks=[ReduceLROnPlateau(0, 0.5)], **arguments())

    rates = [history.history["learning_rate"] for history in in_ranks(work)]
    assert rates[0] == rates[1]
    assert rates[0][-1] < rates[0][0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"patience": -1}, "patience must be an integer >= 0, got -1"),
        ({"factor": 1.0}, "factor must be a finite number > 0 and < 1, got 1.0"),
        ({"minimum": -0.1}, "minimum must be a finite number >= 0, got -0.1"),
        ({"threshold": math.nan}, "threshold must be a finite number >= 0, got nan"),
        ({"threshold_mode": "rel"}, "threshold_mode must be 'relative' or 'absolute', got 'rel'"),
        ({"mode": "lower"}, "mode must be 'auto', 'max' or 'min', got 'lower'"),
        ({"cooldown": 0.5}, "cooldown must be an integer >= 0, got 0.5"),
    ],
)
def test_wrong_arguments(given: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"ReduceLROnPlateau: {message}"):
        ReduceLROnPlateau(**given)


@pytest.mark.slow
def test_a_metric_that_is_missing() -> None:
    session = TrainingSession(model())
    plateau = ReduceLROnPlateau(monitor="validation_f1", mode="max")
    with pytest.raises(OrtopsError, match="has no metric 'validation_f1' to monitor"):
        session.fit(DATA, callbacks=[plateau], **arguments())


def test_a_damaged_state() -> None:
    for state in ({"best": "x", "waited": 0, "cooling": 0}, {"best": 1.0, "waited": -1}):
        with pytest.raises(ModelError, match="in the state of the file to resume from must be"):
            ReduceLROnPlateau().restore(state)
