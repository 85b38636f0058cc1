"""Callbacks of fit: what they stop, save, write and draw; and the search of a learning rate."""

from __future__ import annotations

import csv
import json
import math
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import Arrays, affine, affine_batch, assert_same_arrays, classifier, labelled

from ortops import (
    ArgumentError,
    DivergedError,
    ModelError,
    OrtopsError,
    TrainingSession,
    build_training_model,
)
from ortops.callbacks import (
    BestModel,
    Callback,
    Checkpoint,
    CSVLog,
    EarlyStopping,
    JSONLines,
    LossPlot,
    Record,
    TensorBoard,
    find_learning_rate,
    rate_finder,
)
from ortops.callbacks.monitor import is_line_due
from ortops.engine.training.history import History
from ortops.optimizers import SGD, Adam
from ortops.schedules import Schedule

QUIET: dict[str, Any] = {"progress": False, "batch_size": 4}


def affine_session(rate: float = 0.1) -> TrainingSession:
    return TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(rate))
    )


def classifying() -> TrainingSession:
    model = build_training_model(
        classifier(dropout=0.25), loss="SoftmaxCrossEntropy", optimizer=Adam(0.01)
    )
    return TrainingSession(model)


def records(name: str, values: Sequence[float]) -> Iterator[Record]:
    """Yields what fit would tell at the end of epochs whose numbers are these."""
    history = History()
    for epoch, value in enumerate(values, 1):
        entry = {"loss": 0.0, name: value}
        history.append(entry)
        yield Record(epoch, len(values), 3, 3, 3 * epoch, entry, 12, 0.1, history)


def beginning() -> Record:
    return Record(1, 9, 0, 3, 0, {}, 0, 0.0, History())


def stopped_after(callback: EarlyStopping, name: str, values: Sequence[float]) -> tuple[int, str]:
    """Returns after which epoch a callback ends fit, and why; 0 if it does not."""
    session: Any = None
    callback.on_begin(beginning(), session)
    for record in records(name, values):
        callback.on_epoch(record, session)
        if record.stopped:
            return record.epoch, record.stopped
    return 0, ""


class InterruptedFitError(Exception):
    pass


class Breaking(Callback):
    """Ends fit by an exception after some steps, before or after other callbacks."""

    def __init__(self, steps: int, *, last: bool = False) -> None:
        self.steps = steps
        self.saves = last

    def on_step(self, record: Record, session: Any) -> None:
        if session.steps_done == self.steps:
            raise InterruptedFitError


# --------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize(
    ("values", "options", "epoch", "best"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, 0, 1),
        ([5, 4, 4.5, 4.2, 1], {"patience": 2}, 4, 4),
        ([5, 4, 4.5, 3.9, 4, 4, 4], {"patience": 3}, 7, 3.9),
        ([5, 5, 5], {"patience": 2}, 3, 5),  # equal is no improvement
        ([5, 4.95, 4.9, 4.85], {"patience": 2, "minimum_change": 0.2}, 3, 5),
        ([5, 4.5, 4.0, 3.5], {"patience": 1, "minimum_change": 0.5}, 0, 3.5),
        ([math.nan, 5, math.nan, -math.inf, 4], {"patience": 2}, 4, 5),
        ([math.nan, math.nan], {"patience": 2}, 2, None),
        ([1, 2, 3], {"patience": 1, "mode": "max"}, 0, 3),
    ],
)
def test_early_stopping_counts_epochs_without_improvement(
    values: list[float], options: dict[str, Any], epoch: int, best: float | None
) -> None:
    callback = EarlyStopping(monitor="validation_loss", **options)
    assert stopped_after(callback, "validation_loss", values)[0] == epoch
    assert callback.best == best


def test_early_stopping_says_why() -> None:
    _, reason = stopped_after(EarlyStopping(2), "validation_loss", [5, 4, 4.5, 4.2])
    assert reason == (
        "EarlyStopping: validation_loss has not improved for 2 epochs; the best value is 4 (epoch "
        "2)"
    )
    _, reason = stopped_after(EarlyStopping(1), "validation_loss", [math.nan])
    assert reason.endswith("for 1 epoch; the best value is not finite")


def test_an_unknown_number_is_refused_with_those_that_there_are() -> None:
    session = affine_session()
    with pytest.raises(
        OrtopsError,
        match=r"EarlyStopping: epoch 1 has no metric 'validation_loss' to monitor; it has "
        r"'loss', .*\(validation= and metrics= of fit add more\)",
    ):
        session.fit(affine_batch(8), epochs=3, callbacks=[EarlyStopping()], **QUIET)
    assert session.steps_done == 2


def overfitting() -> tuple[TrainingSession, Arrays, Arrays]:
    """Returns a training whose validation loss grows after a few epochs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6)).astype(np.float32)
    data = {"x": x, "labels": rng.integers(0, 3, 16)}
    held = {"x": x + np.float32(0.1), "labels": np.where(x[:, 0] > 0, data["labels"], 0)}
    model = build_training_model(
        classifier(hidden=32), loss="SoftmaxCrossEntropy", optimizer=Adam(0.03)
    )
    return TrainingSession(model), data, held


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["memory", "file"])
def test_restore_best_goes_back_to_the_end_of_the_best_epoch(kept: str, tmp_path: Path) -> None:
    session, data, held = overfitting()
    where = True if kept == "memory" else tmp_path / "best.onnx"
    callback = EarlyStopping(3, restore_best=where)
    end = Checkpoint(tmp_path / "end.onnx")  # given before, and it saves what is restored
    history = session.fit(data, epochs=100, validation=held, callbacks=[end, callback], **QUIET)
    losses = [entry["validation_loss"] for entry in history]
    best = int(np.argmin(losses)) + 1
    assert 1 < best == len(history) - 3
    assert (callback.best, callback.best_epoch) == (min(losses), best)
    other, *_ = overfitting()
    other.fit(data, epochs=best, **QUIET)
    assert_same_arrays(dict(session.state), dict(other.state))
    assert_same_arrays(dict(TrainingSession(tmp_path / "end.onnx").state), dict(other.state))


@pytest.mark.slow
def test_the_name_of_a_file_tells_the_step_that_was_restored(tmp_path: Path) -> None:
    session, data, held = overfitting()
    end = Checkpoint(tmp_path / "{step}.onnx", keep=2)  # called before the best state is restored
    early = EarlyStopping(3, restore_best=True)
    history = session.fit(data, epochs=100, validation=held, callbacks=[end, early], **QUIET)
    best, last = history[early.best_epoch - 1]["steps"], history[-1]["steps"]
    assert best < last
    assert names(tmp_path) == sorted(f"{step:g}.onnx" for step in (best, last))
    for step in (best, last):
        assert TrainingSession(tmp_path / f"{step:g}.onnx").steps_done == step
    assert end.latest == tmp_path / f"{best:g}.onnx"


@pytest.mark.slow
def test_a_file_of_another_training_is_not_restored(tmp_path: Path) -> None:
    class Replacing(Callback):
        def on_epoch(self, record: Record, session: Any) -> None:
            affine_session().save(tmp_path / "best.onnx")

    session, data, held = overfitting()
    early = EarlyStopping(1, restore_best=tmp_path / "best.onnx")
    with pytest.raises(
        ModelError, match=r"the file '.*best.onnx' has no '.*', so it belongs to another training"
    ):
        session.fit(data, epochs=9, validation=held, callbacks=[early, Replacing()], **QUIET)


@pytest.mark.slow
def test_the_file_of_another_run_of_the_same_model_is_not_restored(tmp_path: Path) -> None:
    file = tmp_path / "best.onnx"
    session, data, held = overfitting()
    options: dict[str, Any] = {"epochs": 9, "validation": held, **QUIET}
    early = EarlyStopping(9, restore_best=file)
    last = Checkpoint(tmp_path / "last.onnx")
    with pytest.raises(InterruptedFitError):
        session.fit(data, callbacks=[early, last, Breaking(26)], **options)
    other, *_ = overfitting()
    other.fit(data, callbacks=[EarlyStopping(9, restore_best=file)], **(options | {"seed": 1}))
    state = dict(TrainingSession(tmp_path / "last.onnx").state)
    resumed = TrainingSession(tmp_path / "last.onnx")
    callbacks = [EarlyStopping(9, restore_best=file), last, Callback()]
    with pytest.raises(ModelError, match=r"best.onnx' does not contain epoch 3, the best epoch of"):
        resumed.fit(data, callbacks=callbacks, resume=True, **options)
    assert_same_arrays(dict(resumed.state), state)


@pytest.mark.slow
def test_without_restore_best_the_session_stays_at_the_last_epoch() -> None:
    session, data, held = overfitting()
    history = session.fit(data, epochs=100, validation=held, callbacks=[EarlyStopping(3)], **QUIET)
    other, *_ = overfitting()
    other.fit(data, epochs=len(history), **QUIET)
    assert_same_arrays(dict(session.state), dict(other.state))


def test_each_fit_begins_anew() -> None:
    callback = EarlyStopping(1, "loss")
    assert stopped_after(callback, "loss", [1, 2])[0] == 2
    assert stopped_after(callback, "loss", [4, 3, 2])[0] == 0


@pytest.mark.slow
def test_more_epochs_than_early_stopping_has_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that early stopping has ended goes on only with more patience."""
    file = tmp_path / "last.onnx"
    session, data, held = overfitting()
    options: dict[str, Any] = {"validation": held, "resume": True, **QUIET}
    first = session.fit(data, epochs=50, callbacks=[EarlyStopping(3), Checkpoint(file)], **options)
    assert len(first) == 6
    session = TrainingSession(file)
    callbacks = [EarlyStopping(3), Checkpoint(file)]
    history = session.fit(data, epochs=60, callbacks=callbacks, **options)
    assert history == first
    assert "fit: stopped before the first step: EarlyStopping: validation_loss has" in caplog.text
    session = TrainingSession(file)
    history = session.fit(
        data, epochs=60, callbacks=[EarlyStopping(5), Checkpoint(file)], **options
    )
    other, *_ = overfitting()
    expected = other.fit(data, epochs=60, callbacks=[EarlyStopping(5)], **options)
    assert len(expected) == 8
    assert history == expected
    assert_same_arrays(dict(session.state), dict(other.state))


@pytest.mark.quick(1)
@pytest.mark.parametrize("kept", ["memory", "file"])
def test_a_prolonged_training_goes_on_from_the_best_epoch_that_was_restored(
    kept: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session, data, held = overfitting()
    where = True if kept == "memory" else tmp_path / "best.onnx"
    options: dict[str, Any] = {"validation": held, **QUIET}
    callbacks = [EarlyStopping(50, restore_best=where), Checkpoint(tmp_path / "last.onnx")]
    session.fit(data, epochs=5, callbacks=callbacks, **options)
    best = callbacks[0]
    assert isinstance(best, EarlyStopping)
    assert best.best_epoch == 3
    restored = dict(session.state)
    if kept == "file":
        session = TrainingSession(tmp_path / "last.onnx")
    history = session.fit(data, epochs=7, callbacks=callbacks, resume=True, **options)
    assert "continues from the state of its best epoch, 3, which restore_best" in caplog.text
    assert len(history) == 7
    losses = history.history["validation_loss"]
    assert best.best == min(losses)
    if best.best_epoch == 3:
        assert_same_arrays(dict(session.state), restored)
    assert session.evaluate(held)["loss"] == pytest.approx(min(losses))


# ------------------------------------------------------------------------------ best model


@pytest.mark.slow
def test_best_model_is_the_session_of_the_best_epoch(tmp_path: Path) -> None:
    session, data, held = overfitting()
    best = BestModel(tmp_path / "best.onnx")
    served = BestModel(tmp_path / "served.onnx", inference=True)
    history = session.fit(data, epochs=25, validation=held, callbacks=[best, served], **QUIET)
    losses = [entry["validation_loss"] for entry in history]
    epoch = int(np.argmin(losses)) + 1
    assert 1 < epoch < 25
    assert best.best_epoch == served.best_epoch == epoch
    other, *_ = overfitting()
    other.fit(data, epochs=epoch, **QUIET)
    found = TrainingSession(tmp_path / "best.onnx")
    assert_same_arrays(dict(found.state), dict(other.state))
    file = onnxruntime.InferenceSession(tmp_path / "served.onnx")
    memory = onnxruntime.InferenceSession(other.inference_model().SerializeToString())
    np.testing.assert_array_equal(
        file.run(None, {"x": held["x"]})[0], memory.run(None, {"x": held["x"]})[0]
    )
    assert not onnx.load(tmp_path / "served.onnx").training_info
    assert sorted(file.name for file in tmp_path.iterdir()) == ["best.onnx", "served.onnx"]


def test_best_model_keeps_the_best_of_all_fits(tmp_path: Path) -> None:
    session = affine_session(rate=0.05)
    data = affine_batch(8)
    best = BestModel(tmp_path / "best.onnx", "loss")
    session.fit(data, epochs=5, callbacks=[best], **QUIET)
    content, number = (tmp_path / "best.onnx").read_bytes(), best.best
    session.reset()
    session.fit(data, epochs=2, callbacks=[best], **QUIET)  # not as far as before
    assert (tmp_path / "best.onnx").read_bytes() == content
    assert best.best == number


def test_best_model_of_a_resumed_fit_says_if_its_file_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session, data, held = overfitting()
    options: dict[str, Any] = {"epochs": 6, "validation": held, **QUIET}
    callbacks = [BestModel(tmp_path / "best.onnx"), Breaking(22)]
    with pytest.raises(InterruptedFitError):
        session.fit(data, callbacks=callbacks, **options)
    assert "BestModel" not in caplog.text
    others = [BestModel(tmp_path / "other.onnx"), Breaking(0)]
    session.fit(data, callbacks=others, resume=True, **options)
    assert f"BestModel: there is no '{tmp_path / 'other.onnx'}' yet; it will be" in caplog.text
    assert "better than epoch 3" in caplog.text


# ------------------------------------------------------------------------------ checkpoints


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.slow
def test_checkpoint_saves_after_each_epoch(tmp_path: Path) -> None:
    session = classifying()
    path = tmp_path / "{epoch:02d}.onnx"
    session.fit(labelled((6,), rows=12), epochs=3, callbacks=[Checkpoint(path)], **QUIET)
    assert names(tmp_path) == ["01.onnx", "02.onnx", "03.onnx"]
    for epoch in (1, 2, 3):
        other = classifying()
        other.fit(labelled((6,), rows=12), epochs=epoch, **QUIET)
        found = TrainingSession(tmp_path / f"{epoch:02d}.onnx")
        assert_same_arrays(dict(found.state), dict(other.state))


def test_checkpoint_saves_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    session = affine_session()
    callback = Checkpoint(tmp_path / "{epoch}-{step}.onnx", every=2)
    session.fit(affine_batch(12), epochs=3, callbacks=[callback], **QUIET)  # 3 steps each
    assert names(tmp_path) == ["1-2.onnx", "2-4.onnx", "2-6.onnx", "3-8.onnx", "3-9.onnx"]
    assert callback.latest == tmp_path / "3-9.onnx"
    assert TrainingSession(tmp_path / "2-4.onnx").steps_done == 4


def test_checkpoint_saves_every_so_many_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("ortops.callbacks.checkpoint.time.monotonic", lambda: clock[0])

    class Passing(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            clock[0] += 40  # seconds

    callbacks = [Passing(), Checkpoint(tmp_path / "{step}.onnx", minutes=2)]
    affine_session().fit(affine_batch(32), epochs=1, callbacks=callbacks, **QUIET)  # 8 steps
    assert names(tmp_path) == ["3.onnx", "6.onnx", "8.onnx"]


def test_checkpoint_keeps_the_last_ones_of_its_own(tmp_path: Path) -> None:
    for foreign in ("1.onnx", "100.onnx", "notes.txt"):
        (tmp_path / foreign).write_bytes(b"mine")
    callback = Checkpoint(tmp_path / "{step}.onnx", every=2, keep=2)
    affine_session().fit(affine_batch(12), epochs=4, callbacks=[callback], **QUIET)  # 12 steps
    assert names(tmp_path) == ["1.onnx", "10.onnx", "100.onnx", "12.onnx", "notes.txt"]
    assert (tmp_path / "1.onnx").read_bytes() == b"mine"


def test_checkpoint_of_one_file_is_replaced(tmp_path: Path) -> None:
    affine_session().fit(
        affine_batch(12), epochs=2, callbacks=[Checkpoint(tmp_path / "a.onnx")], **QUIET
    )
    assert names(tmp_path) == ["a.onnx"]
    assert TrainingSession(tmp_path / "a.onnx").steps_done == 6


def test_data_beside_a_removed_checkpoint_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_training_model(
        classifier(hidden=512), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1)
    )
    monkeypatch.setattr("ortops.graph.files.external.MESSAGE_LIMIT", 10_000)
    callback = Checkpoint(tmp_path / "{step}.onnx", every=1, keep=1)
    TrainingSession(model).fit(labelled((6,), rows=12), epochs=1, callbacks=[callback], **QUIET)
    assert {name.partition(".")[0] for name in names(tmp_path)} == {"3"}
    assert any(name.endswith(".data") for name in names(tmp_path))
    assert TrainingSession(tmp_path / "3.onnx").steps_done == 3


INTERRUPTED_AT = 8


def interrupted(path: Path, **options: Any) -> Arrays:
    """Trains with checkpoints every 3 steps until an error comes in step 8; returns the data."""
    data = affine_batch(20)  # 5 steps in an epoch
    callbacks = [Checkpoint(path, every=3, **options), Breaking(INTERRUPTED_AT)]
    with pytest.raises(InterruptedFitError):
        affine_session().fit(data, epochs=4, callbacks=callbacks, **QUIET)
    return data


def resume(file: Path, data: Arrays, *callbacks: Callback) -> None:
    TrainingSession(file).fit(
        data, epochs=4, callbacks=[*callbacks, Callback()], resume=True, **QUIET
    )


def write_others(folder: Path, *files: str) -> None:
    """Writes the checkpoints of somebody else's training of the same model."""
    other = affine_session(0.01)
    other.fit(affine_batch(20), epochs=1, callbacks=[Checkpoint(folder / "other.onnx")], **QUIET)
    for file in files:
        (folder / file).write_bytes((folder / "other.onnx").read_bytes())
    (folder / "other.onnx").unlink()


def test_a_resumed_checkpoint_removes_no_file_under_another_path(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    data = interrupted(first / "{step}.onnx", keep=2)
    assert names(first) == ["3.onnx", "6.onnx"]
    write_others(second, "3.onnx", "6.onnx")
    before = (second / "3.onnx").read_bytes()
    resume(first / "6.onnx", data, Checkpoint(second / "{step}.onnx", every=5, keep=2))
    assert names(first) == ["3.onnx", "6.onnx"]
    assert names(second) == ["16.onnx", "20.onnx", "3.onnx", "6.onnx"]
    assert (second / "3.onnx").read_bytes() == (second / "6.onnx").read_bytes() == before


def test_a_resumed_checkpoint_removes_no_file_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    data = interrupted(Path("{step}.onnx"), keep=2)
    monkeypatch.chdir(tmp_path / "second")
    write_others(Path(), "3.onnx")
    Path("6.onnx").write_text("notes")
    resume(Path("../first/6.onnx"), data, Checkpoint("{step}.onnx", every=5, keep=2))
    assert names(tmp_path / "first") == ["3.onnx", "6.onnx"]
    assert names(Path()) == ["16.onnx", "20.onnx", "3.onnx", "6.onnx"]
    said = "Checkpoint: '6.onnx' is not the file that this callback wrote, so keep= does not remove"
    assert said in caplog.text


def test_checkpoints_that_were_moved_together_are_still_removed(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    data = interrupted(tmp_path / "first" / "{step}.onnx", keep=2)
    (tmp_path / "first").rename(tmp_path / "moved")
    callback = Checkpoint(tmp_path / "moved" / "{step}.onnx", every=5, keep=2)
    resume(tmp_path / "moved" / "6.onnx", data, callback)
    assert names(tmp_path / "moved") == ["16.onnx", "20.onnx"]


def test_a_checkpoint_removes_no_file_that_took_the_place_of_its_own(tmp_path: Path) -> None:
    class Replacing(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            if record.step == 3:
                write_others(tmp_path, "1.onnx", "2.onnx")

    callbacks = [Checkpoint(tmp_path / "{step}.onnx", every=1, keep=2), Replacing()]
    affine_session().fit(affine_batch(20), epochs=1, callbacks=callbacks, **QUIET)
    assert names(tmp_path) == ["1.onnx", "2.onnx", "4.onnx", "5.onnx"]


def test_two_checkpoints_remove_their_own_files(tmp_path: Path) -> None:
    for folder in ("often", "seldom"):
        (tmp_path / folder).mkdir()

    def both() -> list[Callback]:
        return [
            Checkpoint(tmp_path / "often" / "{step}.onnx", every=1, keep=2),
            Checkpoint(tmp_path / "seldom" / "{step}.onnx", every=3, keep=2),
        ]

    data = affine_batch(20)
    with pytest.raises(InterruptedFitError):
        affine_session().fit(data, epochs=4, callbacks=[*both(), Breaking(8)], **QUIET)
    assert names(tmp_path / "often") == ["7.onnx", "8.onnx"]
    assert names(tmp_path / "seldom") == ["3.onnx", "6.onnx"]
    resume(tmp_path / "often" / "8.onnx", data, *both())
    assert names(tmp_path / "often") == ["19.onnx", "20.onnx"]
    assert names(tmp_path / "seldom") == ["18.onnx", "20.onnx"]


def test_two_checkpoints_under_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "{step}.onnx"
    callbacks = [Checkpoint(path, every=1, keep=1), Checkpoint(path, every=2, keep=2)]
    affine_session().fit(affine_batch(20), epochs=1, callbacks=callbacks, **QUIET)
    assert names(tmp_path) == ["4.onnx", "5.onnx"]


def test_files_of_a_checkpoint_without_keep_stay(tmp_path: Path) -> None:
    data = interrupted(tmp_path / "{step}.onnx")
    resume(tmp_path / "6.onnx", data, Checkpoint(tmp_path / "{step}.onnx", every=5, keep=1))
    assert names(tmp_path) == ["20.onnx", "3.onnx", "6.onnx"]


def test_a_checkpoint_of_an_older_version_keeps_what_it_cannot_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Checkpoint(tmp_path / "{step}.onnx", keep=1)
    callback.restore({"step": 6, "written": [[3, 1], [6, 2]]})
    assert "Checkpoint: keep= does not remove files that an older version of ortops" in caplog.text
    assert callback.state()["written"] == []


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {},
            r"Checkpoint: 'step' in the state of the file to resume from must be .*, got None",
        ),
        ({"step": -1, "written": []}, r"'step' .* must be an integer >= 0, got -1"),
        (
            {"step": 1, "written": "x"},
            r"'written' .* must be a list of pairs of a step and an epoch, got 'x'",
        ),
        ({"step": 1, "written": [["../a", 1]]}, r"a list of pairs of a step and an epoch"),
        (
            {"step": 1, "written": [], "marks": 3},
            r"'marks' .* must be a list of strings of 16 hexadecimal digits, got 3",
        ),
        (
            {"step": 1, "written": [[1, 1]], "marks": [""]},
            r"'marks' .* must be a list of .*, got \[''\]",
        ),
    ],
)
def test_a_checkpoint_does_not_trust_a_file(state: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Checkpoint("{step}.onnx", keep=1).restore(state)


# ------------------------------------------------------------------------------------- logs


def test_csv_log_is_the_history(tmp_path: Path) -> None:
    session, data, held = overfitting()
    log = CSVLog(tmp_path / "log.csv")
    history = session.fit(
        data, epochs=4, validation=held, metrics=["accuracy"], callbacks=[log], **QUIET
    )
    with (tmp_path / "log.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row.pop("epoch") for row in rows] == ["1", "2", "3", "4"]
    assert [{name: float(cell) for name, cell in row.items()} for row in rows] == history
    assert "validation_accuracy" in rows[0]


def test_names_are_no_formulas_in_a_table(tmp_path: Path) -> None:
    log, session = CSVLog(tmp_path / "log.csv"), affine_session()
    for epoch, values in enumerate(({"=A1": -0.5}, {"=A1": -0.25, "@B\r": 3.0}), 1):
        (record,) = records("loss", [-1.25])
        record.epoch, record.values = epoch, record.values | values
        log.on_epoch(record, session)
    with log.path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    assert rows == [
        ["epoch", "loss", "'=A1", "'@B\r"],
        ["1", "-1.25", "-0.5", ""],
        ["2", "-1.25", "-0.25", "3.0"],
    ]


@pytest.mark.parametrize("append", [False, True])
def test_a_new_fit_begins_a_log_anew_or_appends(append: bool, tmp_path: Path) -> None:
    session, data = affine_session(), affine_batch(8)
    table, lines = tmp_path / "log.csv", tmp_path / "log.jsonl"
    logs = [CSVLog(table, append=append), JSONLines(lines, append=append)]
    session.fit(data, epochs=2, callbacks=logs, **QUIET)
    session.fit(data, epochs=1, validation=data, callbacks=logs, **QUIET)
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    epochs = ["1", "2", "1"] if append else ["1"]
    assert [row["epoch"] for row in rows] == epochs
    assert float(rows[-1]["validation_loss"]) > 0
    if append:  # a column that the first fit did not have
        assert rows[0]["validation_loss"] == ""
        assert float(rows[0]["loss"]) > float(rows[1]["loss"])
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [str(line["epoch"]) for line in found] == epochs


def test_json_lines_have_steps_and_epochs(tmp_path: Path) -> None:
    log = JSONLines(tmp_path / "log.jsonl", every=2)
    by_hand = affine_session()
    data = affine_batch(20)
    history = affine_session().fit(data, epochs=2, shuffle=False, callbacks=[log], **QUIET)
    losses = [
        float(by_hand.step({name: array[i : i + 4] for name, array in data.items()})["loss"])
        for _ in range(2)
        for i in range(0, 20, 4)
    ]
    lines = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert [(line["event"], line["epoch"], line["batch"], line["step"]) for line in lines] == [
        *(("step", 1, 2, 2), ("step", 1, 4, 4), ("epoch", 1, 5, 5)),
        *(("step", 2, 2, 7), ("step", 2, 4, 9), ("epoch", 2, 5, 10)),
    ]
    found = [line["loss"] for line in lines if line["event"] == "step"]
    assert found == [losses[1], losses[3], losses[6], losses[8]]
    assert [line["loss"] for line in lines if line["event"] == "epoch"] == history.history["loss"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("every", "accumulate", "batches", "lines"),
    [
        (10, 8, 43, [16, 32, 43]),  # 11 batches after the one at 32
        (10, 8, 41, [16, 32]),
        (10, 1, 25, [10, 20]),
        (3, 3, 9, [3, 6, 9]),
        (2, 3, 7, [3, 6]),
        (1, 3, 7, [3, 6, 7]),
        (4, 3, 13, [6, 12]),
    ],
)
def test_lines_of_steps_that_accumulate(
    every: int, accumulate: int, batches: int, lines: list[int], tmp_path: Path
) -> None:
    """Also those of a resumed training."""

    class Told(Callback):
        def __init__(self) -> None:
            self.found: list[tuple[int, int]] = []

        def on_step(self, record: Record, session: Any) -> None:
            place = record.epoch, record.batch
            if is_line_due(record, every) and place not in self.found:
                self.found.append(place)

    data = affine_batch(batches)
    told, session = Told(), affine_session()
    log, file = JSONLines(tmp_path / "log.jsonl", every=every), tmp_path / "last.onnx"
    options: dict[str, Any] = {"epochs": 2, "accumulate": accumulate, **QUIET, "batch_size": 1}
    session.fit(data, callbacks=[told, log], **options)
    found = [json.loads(line) for line in log.path.read_text().splitlines()]
    expected = [(epoch, batch) for epoch in (1, 2) for batch in lines]
    assert [(e["epoch"], e["batch"]) for e in found if e["event"] == "step"] == expected
    assert told.found == expected
    resumed = JSONLines(tmp_path / "resumed.jsonl", every=every)
    stop = -(-batches // accumulate) // 2 + 1
    with pytest.raises(InterruptedFitError):
        affine_session().fit(
            data,
            callbacks=[resumed, Checkpoint(file, every=1), Breaking(stop, last=True)],
            **options,
        )
    again = JSONLines(tmp_path / "resumed.jsonl", every=every)
    TrainingSession(file).fit(data, callbacks=[again, Checkpoint(file)], resume=True, **options)
    steps = [json.loads(line) for line in again.path.read_text().splitlines()]
    assert [(e["epoch"], e["batch"]) for e in steps if e["event"] == "step"] == expected


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    table, lines = CSVLog(tmp_path / "log.csv"), JSONLines(tmp_path / "log.jsonl")
    session: Any = None
    for log in (table, lines):
        log.on_begin(beginning(), session)
        for record in records("validation_loss", [math.nan, math.inf, -math.inf]):
            log.on_epoch(record, session)
    assert table.path.read_text() == (
        "epoch,loss,validation_loss\n1,0.0,nan\n2,0.0,inf\n3,0.0,-inf\n"
    )
    values = [json.loads(line)["validation_loss"] for line in lines.path.read_text().splitlines()]
    assert values == [None, None, None]


def strict(text: str) -> Any:
    """Returns what a JSON text stands for, which no NaN of Python's may be in."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def narrow(outputs: Any, targets: Any) -> Any:
    return np.float32(0.1)


def whole(outputs: Any, targets: Any) -> Any:
    return np.int64(3)


def undefined(outputs: Any, targets: Any) -> Any:
    return np.float32("nan")


class Adding(Callback):
    """Adds numbers of numpy to what fit tells, and to its state."""

    def on_step(self, record: Record, session: Any) -> None:
        record.values["half"] = np.float16(0.5)  # type: ignore[assignment]  # on purpose, as below

    def on_epoch(self, record: Record, session: Any) -> None:
        record.values["third"] = np.float32(1 / 3)  # type: ignore[assignment]
        record.values["count"] = np.array(7)  # type: ignore[assignment]
        record.values["none"] = np.float32("inf")  # type: ignore[assignment]

    def state(self) -> dict[str, Any]:
        return {"best": np.float32(0.5), "seen": [np.int64(3), np.array(2.5)], "ok": np.True_}


def test_numbers_of_numpy_reach_all_files(tmp_path: Path) -> None:
    data = affine_batch(8)
    adding = Adding()
    callbacks = [
        Checkpoint(tmp_path / "a.onnx"),
        CSVLog(tmp_path / "log.csv"),
        adding,
        JSONLines(tmp_path / "log.jsonl", every=1),
        EarlyStopping(9, "validation_narrow", mode="min", restore_best=tmp_path / "best.onnx"),
    ]
    metrics = [narrow, whole, undefined]
    options: dict[str, Any] = {"validation": data, "metrics": metrics, **QUIET}
    history = affine_session().fit(data, epochs=2, callbacks=callbacks, **options)
    third, tenth = float(np.float32(1 / 3)), float(np.float32(0.1))
    assert history.history["validation_narrow"] == [tenth, tenth]
    assert {type(value) for entry in history for value in entry.values()} == {int, float}
    step, *_, epoch = map(strict, (tmp_path / "log.jsonl").read_text().splitlines())
    assert step["half"] == 0.5
    assert (epoch["third"], epoch["count"], epoch["none"]) == (third, 7, None)
    assert (epoch["validation_whole"], epoch["validation_undefined"]) == (3, None)
    found = TrainingSession(tmp_path / "a.onnx")
    assert found.history.history["third"] == [third, third]
    assert found.history.history["validation_narrow"] == [tenth, tenth]
    states = [saved["state"] for saved in saved_states(tmp_path / "a.onnx", "Adding")]
    assert states == [{"best": 0.5, "seen": [3, 2.5], "ok": True}]


def saved_states(file: Path, kind: str) -> list[Any]:
    """Returns the states of the callbacks of a class in a file."""
    props = {entry.key: entry.value for entry in onnx.load(file).metadata_props}
    return [
        saved for saved in json.loads(props["ortops.fit"])["callbacks"] if saved["class"] == kind
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize("event", ["on_begin", "on_step", "on_epoch"])
def test_what_is_not_a_number_is_refused_by_the_name_of_the_callback(
    event: str, tmp_path: Path
) -> None:
    class Noting(Callback):
        def note(self, record: Record, session: Any) -> None:
            record.values["note"] = "mine"  # type: ignore[assignment]

    setattr(Noting, event, Noting.note)
    session = affine_session()
    message = r"callback Noting: record.values\['note'\] must be a number, got 'mine'"
    with pytest.raises(OrtopsError, match=message):
        session.fit(affine_batch(8), epochs=2, callbacks=[Noting()], **QUIET)
    session.save(tmp_path / "a.onnx")  # it can be saved, and what it was up to then is there
    assert TrainingSession(tmp_path / "a.onnx").steps_done == session.steps_done


# -------------------------------------------------------------------------- order and ends


class Counting(Callback):
    """Counts the epochs that it was told of."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch(self, record: Record, session: Any) -> None:
        self.epochs += 1

    def state(self) -> dict[str, Any]:
        return {"epochs": self.epochs}


class Saving(Counting):
    """Saves in the method that comes with the epoch, as before there was another for it."""

    saves = True

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch(self, record: Record, session: Any) -> None:
        super().on_epoch(record, session)
        session.save(self.path)


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_a_saved_epoch_is_one_that_all_callbacks_have_seen(first: int, tmp_path: Path) -> None:
    data = affine_batch(8)
    files = {
        "early": lambda path: EarlyStopping(9, "loss", restore_best=path),
        "best": lambda path: BestModel(path, "loss"),
        "last": Checkpoint,
        "mine": Saving,
    }
    given = [Counting(), *(make(tmp_path / f"{name}.onnx") for name, make in files.items())]
    turned = [*given[first:], *given[:first]]
    session = affine_session(1e-3)
    with pytest.raises(InterruptedFitError):  # so that no file is written at the end
        session.fit(data, epochs=9, callbacks=[*turned, Breaking(5)], **QUIET)
    assert session.steps_done == 5  # the first one of the third epoch
    for name in files:
        file = tmp_path / f"{name}.onnx"
        assert TrainingSession(file).steps_done == 4
        assert [saved["state"] for saved in saved_states(file, "Counting")] == [{"epochs": 2}]
        assert [saved["state"] for saved in saved_states(file, "Saving")] == [{"epochs": 2}]
        checkpoint = saved_states(file, "Checkpoint")[0]["state"]
        assert checkpoint["step"] == 4


class Order(Callback):
    """Writes down what it is told."""

    def __init__(self, name: str, told: list[str], *, fails: str = "") -> None:
        self.name, self.told, self.fails = name, told, fails

    def note(self, event: str) -> None:
        self.told.append(f"{self.name} {event}")
        if event == self.fails:
            raise InterruptedFitError(self.name)

    def on_begin(self, record: Record, session: Any) -> None:
        self.note("begin")

    def on_step(self, record: Record, session: Any) -> None:
        self.note("step")

    def on_epoch(self, record: Record, session: Any) -> None:
        self.note("epoch")

    def on_end(self, record: Record, session: Any) -> None:
        self.note("end")

    def on_save(self, record: Record, session: Any) -> None:
        self.note("save")

    def on_close(self) -> None:
        self.note("close")


def test_all_are_told_before_any_saves_and_all_are_closed() -> None:
    told: list[str] = []
    callbacks = [Order("a", told), Order("b", told)]
    affine_session().fit(affine_batch(4), epochs=1, callbacks=callbacks, **QUIET)
    events = [
        f"{name} {each}"
        for e in ("begin", "step", "epoch", "end")
        for each in (e, "save")
        for name in "ab"
    ]
    assert told == [*events, "a close", "b close"]


@pytest.mark.parametrize("event", ["begin", "step", "epoch", "end", "save", "close"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_all_are_closed_once_if_one_fails(who: str, event: str) -> None:
    told: list[str] = []
    callbacks = [Order(name, told, fails=event if name == who else "") for name in "ab"]
    with pytest.raises(InterruptedFitError, match=who):
        affine_session().fit(affine_batch(4), epochs=1, callbacks=callbacks, **QUIET)
    assert told[-2:] == ["a close", "b close"]
    assert [each.split()[1] for each in told].count("close") == 2
    assert sum("end" in each for each in told) <= 2


def test_all_are_closed_after_an_interruption_and_bad_data() -> None:
    told: list[str] = []

    class Signal(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    callbacks = [Order("a", told), Signal()]
    with pytest.raises(KeyboardInterrupt):
        affine_session().fit(affine_batch(8), callbacks=callbacks, **QUIET)
    assert told[-3:] == ["a end", "a save", "a close"]
    told.clear()
    data = affine_batch(8)
    data["x"][5, 0] = np.nan
    with pytest.raises(DivergedError):
        affine_session().fit(data, shuffle=False, callbacks=[Order("a", told)], **QUIET)
    assert told == ["a begin", "a save", "a step", "a save", "a close"]


# --------------------------------------------------------------------------------- resuming


def all_callbacks(folder: Path, tail: Callback) -> list[Callback]:
    return [
        Checkpoint(folder / "last.onnx", every=2),
        BestModel(folder / "best.onnx"),
        EarlyStopping(3, restore_best=folder / "early.onnx"),
        CSVLog(folder / "log.csv"),
        JSONLines(folder / "log.jsonl", every=1),
        tail,
    ]


def contents(folder: Path) -> dict[str, Any]:
    """Returns what the files say, but for the time."""
    with (folder / "log.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for entry in (*rows, *lines):
        entry.pop("seconds", None)
    return {"rows": rows, "lines": lines}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, History]:
    folder = tmp_path_factory.mktemp("unbroken")
    session, data, held = overfitting()
    callbacks = all_callbacks(folder, Callback())
    history = session.fit(data, epochs=40, validation=held, callbacks=callbacks, **QUIET)
    return folder, history


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "last"), [(3, True), (4, False), (8, True), (13, False), (21, True), (24, False)]
)
def test_a_resumed_fit_leaves_the_files_of_an_unbroken_one(
    steps: int, last: bool, unbroken: tuple[Path, History], tmp_path: Path
) -> None:
    whole, expected = unbroken
    assert len(expected) == 6  # epochs of 4 steps, of which the third is the best
    session, data, held = overfitting()
    options: dict[str, Any] = {"epochs": 40, "validation": held, "resume": True, **QUIET}
    with pytest.raises(InterruptedFitError):
        session.fit(data, callbacks=all_callbacks(tmp_path, Breaking(steps, last=last)), **options)
    resumed = TrainingSession(tmp_path / "last.onnx")
    history = resumed.fit(
        data, callbacks=all_callbacks(tmp_path, Breaking(0, last=last)), **options
    )
    assert history == expected
    assert contents(tmp_path) == contents(whole)
    best = dict(TrainingSession(whole / "best.onnx").state)
    assert_same_arrays(dict(resumed.state), best)
    for name in ("best.onnx", "early.onnx", "last.onnx"):
        assert_same_arrays(dict(TrainingSession(tmp_path / name).state), best)


@pytest.mark.slow
def test_a_training_that_was_stopped_early_is_not_resumed(
    unbroken: tuple[Path, History], tmp_path: Path
) -> None:
    for file in unbroken[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before = contents(tmp_path)
    _, data, held = overfitting()
    session = TrainingSession(tmp_path / "last.onnx")
    state = dict(session.state)
    history = session.fit(
        data,
        epochs=40,
        validation=held,
        callbacks=all_callbacks(tmp_path, Callback()),
        resume=True,
        **QUIET,
    )
    assert history == unbroken[1]
    assert contents(tmp_path) == before
    assert_same_arrays(dict(session.state), state)


@pytest.mark.slow
def test_a_fit_goes_on_from_its_best_model_too(
    unbroken: tuple[Path, History], tmp_path: Path
) -> None:
    session, data, held = overfitting()
    session.fit(
        data, epochs=40, validation=held, callbacks=all_callbacks(tmp_path, Callback()), **QUIET
    )
    resumed = TrainingSession(tmp_path / "best.onnx")
    assert resumed.steps_done == 12
    history = resumed.fit(
        data,
        epochs=40,
        validation=held,
        callbacks=all_callbacks(tmp_path, Callback()),
        resume=True,
        **QUIET,
    )
    assert history == unbroken[1]
    assert contents(tmp_path) == contents(unbroken[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_fit_with_a_checkpoint(
    number: signal.Signals,
    raised: type[BaseException],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Signal(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            if record.step == 8:
                signal.raise_signal(number)

    data = labelled((6,), rows=20)  # 5 steps in an epoch
    file = tmp_path / "last.onnx"
    options: dict[str, Any] = {"epochs": 4, "resume": True, **QUIET}
    # The first epoch is the best of all for `restore_best`, which must not be gone back to yet.
    early = EarlyStopping(50, "learning_rate", mode="min", restore_best=True)
    with pytest.raises(raised):
        classifying().fit(data, callbacks=[Checkpoint(file, every=99), early, Signal()], **options)
    assert f"after step 8; call TrainingSession('{file}')" in caplog.text
    resumed = TrainingSession(file)
    assert resumed.steps_done == 8
    callbacks = [Checkpoint(file), EarlyStopping(50, "learning_rate", mode="min"), Callback()]
    resumed.fit(data, callbacks=callbacks, **options)
    whole = classifying()
    whole.fit(data, **options)
    assert_same_arrays(dict(resumed.state), dict(whole.state))


def test_checkpoints_go_on_counting_and_removing(tmp_path: Path) -> None:
    data = affine_batch(20)  # 5 steps in an epoch
    path = tmp_path / "{step:02d}.onnx"
    with pytest.raises(InterruptedFitError):
        affine_session().fit(
            data, epochs=4, callbacks=[Checkpoint(path, every=3, keep=2), Breaking(8)], **QUIET
        )
    assert names(tmp_path) == ["03.onnx", "06.onnx"]
    callback = Checkpoint(path, every=3, keep=2)
    session = TrainingSession(tmp_path / "06.onnx")
    with pytest.raises(InterruptedFitError):
        session.fit(data, epochs=4, callbacks=[callback, Breaking(14)], resume=True, **QUIET)
    assert names(tmp_path) == ["09.onnx", "12.onnx"]


@pytest.mark.slow
def test_the_best_state_in_memory_ends_with_its_process(tmp_path: Path) -> None:
    session, data, held = overfitting()
    options: dict[str, Any] = {"epochs": 40, "validation": held, **QUIET}
    first = EarlyStopping(50, restore_best=True)
    end = Checkpoint(tmp_path / "last.onnx", every=1)
    with pytest.raises(InterruptedFitError):
        session.fit(data, callbacks=[first, end, Breaking(70)], **options)
    assert first.best_epoch < 17
    others = [Checkpoint(tmp_path / "last.onnx", every=1000), Callback()]
    with pytest.raises(
        OrtopsError,
        match=rf"EarlyStopping: the best state, of epoch {first.best_epoch}, is only in the "
        r"memory of the callback that fit started with \(restore_best=True\); resume with restore_",
    ):
        TrainingSession(tmp_path / "last.onnx").fit(
            data, callbacks=[EarlyStopping(50, restore_best=True), *others], resume=True, **options
        )
    with pytest.raises(
        OrtopsError, match=r"the file '.*gone.onnx' of restore_best, .*, is missing"
    ):
        TrainingSession(tmp_path / "last.onnx").fit(
            data,
            callbacks=[EarlyStopping(50, restore_best=tmp_path / "gone.onnx"), *others],
            resume=True,
            **options,
        )
    resumed = TrainingSession(tmp_path / "last.onnx")  # in one process the memory is still there
    resumed.fit(data, callbacks=[first, *others], resume=True, **options)
    other, *_ = overfitting()
    other.fit(data, epochs=first.best_epoch, **QUIET)
    assert_same_arrays(dict(resumed.state), dict(other.state))


@pytest.mark.parametrize("size", [None, -1, 1.5, "9", True])
def test_a_log_does_not_trust_a_file(size: object) -> None:
    with pytest.raises(ModelError, match=r"JSONLines: 'bytes' .* must be an integer >= 0, got"):
        JSONLines("log.jsonl").restore({"bytes": size})
    with pytest.raises(ModelError, match=r"BestModel: 'best' .* must be a number, got 'low'"):
        BestModel("best.onnx").restore({"best": "low"})


def test_a_log_that_has_become_shorter_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = CSVLog(tmp_path / "log.csv")
    log.restore({"bytes": 50})
    log.path.write_bytes(b"epoch,loss\n")
    entry = {"loss": 1.0}
    session: Any = None
    log.on_begin(Record(2, 9, 0, 3, 3, {}, 0, 0.0, History([entry])), session)
    assert "CSVLog: '" in caplog.text
    assert "has 11 bytes, but had 50 at the resume position; rows are missing" in caplog.text
    log.on_epoch(Record(2, 9, 3, 3, 6, entry, 12, 0.0, History([entry, entry])), session)
    assert log.path.read_text() == "epoch,loss\n2,1.0\n"


@pytest.mark.parametrize("kind", [CSVLog, JSONLines])
def test_a_resumed_log_does_not_cut_off_rows_of_another_file(kind: Any, tmp_path: Path) -> None:
    data = affine_batch(20)
    path, others = tmp_path / "log", tmp_path / "other"
    callbacks = [kind(path), Checkpoint(tmp_path / "a.onnx", every=7), Breaking(12)]
    with pytest.raises(InterruptedFitError):
        affine_session().fit(data, epochs=4, callbacks=callbacks, **QUIET)
    content = b"notes of many months\n" * 100
    others.write_bytes(content)
    session = TrainingSession(tmp_path / "a.onnx")
    before = dict(session.state)
    options: dict[str, Any] = {"epochs": 4, "resume": True, **QUIET}
    message = rf"{kind.__name__}: '.*other' was not written by this training, and resuming"
    with pytest.raises(OrtopsError, match=message):
        session.fit(
            data, callbacks=[kind(others), Checkpoint(tmp_path / "b.onnx"), Callback()], **options
        )
    assert others.read_bytes() == content
    assert_same_arrays(dict(session.state), before)
    session.fit(
        data, callbacks=[kind(path), Checkpoint(tmp_path / "b.onnx"), Callback()], **options
    )
    lines = path.read_text().splitlines()
    assert len(lines) == 4 + (kind is CSVLog)  # with the row of the second epoch once


# ------------------------------------------------------------------------------ TensorBoard


def events(folder: Path) -> list[Any]:
    """Returns the events of a folder, by TensorFlow's format of records."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        content, place = file.read_bytes(), 0
        while place < len(content):
            (size,) = struct.unpack_from("<Q", content, place)
            found.append(Event.FromString(content[place + 12 : place + 12 + size]))
            place += 12 + size + 4
    return found


def scalars(found: list[Any]) -> dict[str, list[tuple[int, float]]]:
    result: dict[str, list[tuple[int, float]]] = {}
    for event in found:
        for value in event.summary.value:
            result.setdefault(value.tag, []).append((event.step, value.simple_value))
    return result


@pytest.mark.optional("tensorboardX", "tensorboard")
def test_tensorboard_has_the_numbers_of_steps_and_epochs(tmp_path: Path) -> None:
    data = affine_batch(20)
    lines = JSONLines(tmp_path / "log.jsonl", every=2)
    board = TensorBoard(tmp_path / "runs" / "first", every=2)
    history = affine_session().fit(
        data, epochs=2, validation=data, callbacks=[board, lines], **QUIET
    )
    found = scalars(events(tmp_path / "runs" / "first"))
    assert {"epoch/loss", "epoch/validation_loss", "step/loss", "step/learning_rate"} <= set(found)
    assert [step for step, _ in found["epoch/loss"]] == [5, 10]
    values = [value for _, value in found["epoch/loss"]]
    assert values == pytest.approx(history.history["loss"], rel=1e-6)  # they are float32 there
    rows = [json.loads(line) for line in lines.path.read_text().splitlines()]
    expected = [(row["step"], row["loss"]) for row in rows if row["event"] == "step"]
    assert found["step/loss"] == expected
    assert [step for step, _ in expected] == [2, 4, 7, 9]


@pytest.mark.optional("tensorboardX", "tensorboard")
def test_tensorboard_closes_its_file_if_fit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorboardX

    closed = []

    class Writer(tensorboardX.SummaryWriter):  # type: ignore[misc]
        def close(self) -> None:
            closed.append(self.logdir)
            super().close()

    monkeypatch.setattr(tensorboardX, "SummaryWriter", Writer)
    with pytest.raises(InterruptedFitError):
        affine_session().fit(
            affine_batch(20), callbacks=[TensorBoard(tmp_path), Breaking(3)], **QUIET
        )
    assert closed == [str(tmp_path)]
    assert [step for step, _ in scalars(events(tmp_path))["step/loss"]] == [1, 2, 3]


@pytest.mark.optional("tensorboardX", "tensorboard")
def test_tensorboard_hides_what_comes_again(tmp_path: Path) -> None:
    data = affine_batch(20)
    with pytest.raises(InterruptedFitError):
        affine_session().fit(
            data,
            epochs=2,
            callbacks=[
                TensorBoard(tmp_path / "first"),
                Checkpoint(tmp_path / "a.onnx", every=3),
                Breaking(8),
            ],
            **QUIET,
        )
    others = [Checkpoint(tmp_path / "a.onnx"), Callback()]
    TrainingSession(tmp_path / "a.onnx").fit(
        data, epochs=2, callbacks=[TensorBoard(tmp_path / "second"), *others], resume=True, **QUIET
    )
    second = events(tmp_path / "second")
    starts = [event.step for event in second if event.HasField("session_log")]
    assert starts == [7]  # TensorBoard hides what has this step or a later one
    assert [step for step, _ in scalars(second)["step/loss"]] == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("callback", "package", "group"),
    [
        (TensorBoard("runs"), "tensorboardX", "tensorboard"),
        (LossPlot("loss.png"), "matplotlib", "plot"),
    ],
)
def test_a_missing_package_is_said_before_the_training(
    callback: Callback,
    package: str,
    group: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.figure", None)
    session = affine_session()
    with pytest.raises(OrtopsError, match=rf"needs {package}; pip install ortops\[{group}\]"):
        session.fit(affine_batch(4), callbacks=[callback], **QUIET)
    assert session.steps_done == 0
    assert names(tmp_path) == []


# --------------------------------------------------------------------------------- pictures


def colors(file: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    pixels = np.asarray(np.round(imread(file)[..., :3] * 255), int)
    return set(map(tuple, pixels.reshape(-1, 3).tolist()))


BLUE, ORANGE = (31, 119, 180), (255, 127, 14)  # of training, and of validation


@pytest.mark.slow
@pytest.mark.optional("matplotlib", "plot")
def test_loss_plot_draws_training_and_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # it would choose a backend
    session, data, held = overfitting()
    plot = LossPlot(tmp_path / "loss.png")
    session.fit(data, epochs=3, callbacks=[plot], **QUIET)
    assert BLUE in colors(plot.path)
    assert ORANGE not in colors(plot.path)
    first = plot.path.read_bytes()
    options: dict[str, Any] = {"validation": held, "metrics": ["accuracy"], **QUIET}
    session.fit(data, epochs=3, callbacks=[plot], **options)
    assert {BLUE, ORANGE} <= colors(plot.path)
    size = [struct.unpack(">II", content[16:24]) for content in (first, plot.path.read_bytes())]
    assert size[1][0] == size[0][0]
    assert size[1][1] > 1.5 * size[0][1]  # a panel more, for the accuracy
    assert names(tmp_path) == ["loss.png"]


@pytest.mark.slow
@pytest.mark.optional("matplotlib", "plot")
def test_loss_plot_takes_numbers_that_are_not_finite_and_parts(tmp_path: Path) -> None:
    plot = LossPlot(tmp_path / "loss.svg")
    history = History(
        {"loss": loss, "loss_a": loss / 2, "learning_rate": rate}
        for loss, rate in [(100.0, 0.1), (math.inf, 0.2), (math.nan, 0.1), (0.5, 0.1)]
    )
    session: Any = None
    plot.on_epoch(Record(4, 4, 1, 1, 4, history[-1], 4, 0.1, history), session)
    assert plot.path.read_bytes().startswith(b"<?xml")


@pytest.mark.optional("matplotlib", "plot")
def test_drawing_takes_a_fifth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawn = [0.0], []

    def write_picture(figure: Any, path: Path) -> None:
        clock[0] += 3
        drawn.append(len(figure.axes[0].lines[0].get_xdata()))

    class Passing(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            clock[0] += 5

    monkeypatch.setattr("ortops.callbacks.plot.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("ortops.callbacks.plot.write_picture", write_picture)
    callbacks = [Passing(), LossPlot(tmp_path / "loss.png")]
    affine_session().fit(affine_batch(4), epochs=8, callbacks=callbacks, **QUIET)
    assert drawn == [1, 4, 7, 8]  # 12 seconds after each drawing, and at the end


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(0), r"EarlyStopping: patience must be an integer >= 1, got 0"),
        (lambda: EarlyStopping(2.5), r"EarlyStopping: patience must be an integer >= 1, got 2.5"),
        (
            lambda: EarlyStopping(np.array([3])),
            r"patience must be an integer >= 1, got array\(\[3\]\)",
        ),
        (
            lambda: EarlyStopping(monitor=""),
            r"monitor must be the name of a metric, for example 'loss'",
        ),
        (lambda: EarlyStopping(mode="up"), r"mode must be 'auto', 'max' or 'min', got 'up'"),
        (
            lambda: EarlyStopping(minimum_change=-1),
            r"minimum_change must be a finite number >= 0, got -1",
        ),
        (
            lambda: EarlyStopping(restore_best=3),
            r"restore_best must be True, False or the path of a file",
        ),
        (
            lambda: BestModel("a", minimum_change="x"),
            r"BestModel: minimum_change must be a finite .*, got 'x'",
        ),
        (
            lambda: Checkpoint("a.onnx", every=0),
            r"Checkpoint: every must be an integer >= 1, got 0",
        ),
        (lambda: Checkpoint("a.onnx", minutes=0), r"minutes must be a finite number > 0, got 0"),
        (lambda: Checkpoint("{step}", keep=True), r"keep must be an integer >= 1, got True"),
        (
            lambda: Checkpoint("a.onnx", keep=3),
            (
                r"Checkpoint: keep=3 requires several files, but 'a.onnx' is one; add {step} or "
                r"{epoch} to"
            ),
        ),
        (
            lambda: Checkpoint("{loss}.onnx"),
            r"has the unknown placeholder {loss}; use {step} or {epoch}",
        ),
        (lambda: Checkpoint("{.onnx"), r"Checkpoint: cannot format '{.onnx'"),
        (lambda: Checkpoint("{step:s}.onnx"), r"cannot format '{step:s}.onnx'"),
        (lambda: Checkpoint(None), r"Checkpoint: path must be the path of a file, got None"),
        (lambda: BestModel(""), r"BestModel: path must be the path of a file, got ''"),
        (lambda: CSVLog(5), r"CSVLog: path must be the path of a file, got 5"),
        (lambda: LossPlot(5), r"LossPlot: path must be the path of a file, got 5"),
        (lambda: TensorBoard(5), r"TensorBoard: path must be the path of a file, got 5"),
        (lambda: JSONLines("a", every=-1), r"JSONLines: every must be an integer >= 1, got -1"),
        (lambda: TensorBoard("a", every=0), r"TensorBoard: every must be an integer >= 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: EarlyStopping(restore_best=path),
        BestModel,
        Checkpoint,
        CSVLog,
        JSONLines,
        pytest.param(LossPlot, marks=pytest.mark.optional("matplotlib", "plot")),
    ],
)
def test_a_path_that_cannot_be_written_is_said_before_the_training(
    make: Any, tmp_path: Path
) -> None:
    session = affine_session()
    with pytest.raises(OrtopsError, match=r"because there is no folder '.*missing'; create it"):
        session.fit(affine_batch(4), callbacks=[make(tmp_path / "missing" / "a.png")], **QUIET)
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OrtopsError, match=r"a.png', because it is a folder; name a file"):
        session.fit(affine_batch(4), callbacks=[make(tmp_path / "a.png")], **QUIET)
    assert session.steps_done == 0


@pytest.mark.parametrize("path", ["loss.gif", "loss"])
def test_a_picture_of_an_unknown_kind_is_refused(path: str) -> None:
    with pytest.raises(ArgumentError, match=r"must end in .pdf, .png or .svg, got 'loss"):
        affine_session().fit(affine_batch(4), callbacks=[LossPlot(path)], **QUIET)


# ---------------------------------------------------------------------------- learning rates


def curved(rate: float = 0.1, **settings: Any) -> tuple[TrainingSession, Arrays, float]:
    """Returns a quadratic loss, and the rate above which gradient descent on it diverges."""
    data = affine_batch(64, seed=3)
    design = np.c_[data["x"], np.ones(64)].astype(np.float64)
    outputs = data["targets"].shape[1]
    curvature = np.linalg.eigvalsh(2 / (64 * outputs) * design.T @ design).max()
    return affine_session(rate, **settings), data, 2 / curvature


@pytest.mark.slow
def test_a_learning_rate_is_found_below_divergence() -> None:
    session, data, limit = curved()
    curve = find_learning_rate(session, data, lowest=1e-5, highest=1e3, batch_size=64)
    assert curve.rates[-1] > limit  # where it stops
    assert curve.rates[-1] < 10 * limit
    assert curve.suggestion is not None
    assert limit / 100 < curve.suggestion < limit
    np.testing.assert_allclose(np.diff(np.log(curve.rates)), np.log(1e8) / 99)

    def after(rate: float) -> float:
        other = affine_session(rate)
        other.fit(data, epochs=20, batch_size=64, progress=False, stop_on_nan=False)
        return other.evaluate(data)["loss"]

    begin = affine_session().evaluate(data)["loss"]
    assert after(curve.suggestion) < 0.5 * begin
    assert after(curve.suggestion / 1000) > 0.9 * begin
    assert not after(float(curve.rates[-1])) < begin


def test_the_losses_are_those_of_steps_with_growing_rates() -> None:
    session, data, _ = curved()
    curve = find_learning_rate(session, data, lowest=1e-4, highest=1e-1, steps=12, batch_size=64)
    rates = np.geomspace(1e-4, 1e-1, 12)
    by_hand = affine_session()
    losses = []
    for rate in rates:
        by_hand.learning_rate = float(rate)
        losses.append(float(by_hand.step(data)["loss"]))
    np.testing.assert_allclose(curve.losses, losses, rtol=1e-5)  # the batch's order differs
    np.testing.assert_allclose(curve.rates, rates)


@pytest.mark.slow
def test_the_search_changes_nothing() -> None:
    data = labelled((6,), rows=20)
    session, other = classifying(), classifying()
    for one in (session, other):
        one.fit(data, epochs=1, **QUIET)
    before = {name: array.tobytes() for name, array in session.state.items()}
    model = session.model().SerializeToString(deterministic=True)
    find_learning_rate(session, data, batch_size=4)
    assert {name: array.tobytes() for name, array in session.state.items()} == before
    assert session.model().SerializeToString(deterministic=True) == model
    for one in (session, other):  # in the same order, with the same Dropout
        one.fit(data, epochs=1, **QUIET)
    assert_same_arrays(dict(session.state), dict(other.state))


def test_a_fall_is_told_from_noise_by_what_is_left_of_it_behind_the_curve() -> None:
    """Not by the spread of the values, which is large where a fall is long."""
    x = np.linspace(0, 1, 60)
    fall = -x - x**2 / 100  # the steepest at its end
    assert rate_finder._steepest(x, fall, 5)[1] == 60 - 5 - 1
    noise = (-1.0) ** np.arange(60)
    assert rate_finder._steepest(x, fall / 100 + noise, 5)[1] is None


def test_without_a_fall_nothing_is_suggested() -> None:
    session, data, _ = curved()
    assert find_learning_rate(session, data, lowest=1e-12, highest=1e-10).suggestion is None


@pytest.mark.slow
@pytest.mark.optional("matplotlib", "plot")
def test_the_curve_is_drawn(tmp_path: Path) -> None:
    session, data, _ = curved()
    find_learning_rate(session, data, highest=1e3, path=tmp_path / "curve.png")
    assert {BLUE, ORANGE} <= colors(tmp_path / "curve.png")
    assert names(tmp_path) == ["curve.png"]


def test_a_schedule_in_the_model_is_refused() -> None:
    schedule = Schedule(0.1, lambda steps: 1.0 / (1.0 + steps))
    model = build_training_model(
        affine(), loss="MeanSquaredError", optimizer=SGD(learning_rate=schedule)
    )
    with pytest.raises(
        OrtopsError, match=r"schedule determines the learning rate, .*; build the model"
    ):
        find_learning_rate(TrainingSession(model), affine_batch(4))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowest": 0}, r"find_learning_rate: lowest must be a finite number > 0, got 0"),
        ({"highest": math.inf}, r"highest must be a finite number > 0, got inf"),
        ({"lowest": 1, "highest": 0.1}, r"lowest must be less than highest, got 1 and 0.1"),
        ({"steps": 3}, r"steps must be an integer >= 10, got 3"),
        ({"path": "curve.gif"}, r"must end in .pdf, .png or .svg, got 'curve.gif'"),
        (
            {"lowest": 1e30, "highest": 1e36},
            r"the loss is .* even at the lowest learning rate, 1e\+30; check",
        ),
    ],
)
def test_a_search_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OrtopsError, match=message):
        find_learning_rate(affine_session(), affine_batch(4), **options)
