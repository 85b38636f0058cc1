"""`validate_every=`, `max_steps=` and `max_minutes=` of fit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_distributed import fit_joined, in_ranks
from training_models import Arrays, assert_same_arrays, classifier, labelled

import ortops
from ortops import ArgumentError, TrainingSession, build_training_model
from ortops.callbacks import BestModel, Callback, Checkpoint, CSVLog, EarlyStopping, JSONLines
from ortops.engine.training import limits
from ortops.engine.training.history import History
from ortops.engine.training.position import POSITION_KEY
from ortops.optimizers import SGD, Adam

ROWS, BATCH, BATCHES, EPOCHS = 20, 6, 4, 3
STEPS = BATCHES * EPOCHS

DATA = labelled((6,), rows=ROWS)
HELD = labelled((6,), rows=9, seed=7)


def model(optimizer: Any = None) -> Any:
    net = classifier(dropout=0.25)
    return build_training_model(net, loss="SoftmaxCrossEntropy", optimizer=optimizer or Adam(0.05))


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "seed": 3, "progress": False}
    return {**settings, "validation": HELD, "metrics": ["accuracy"], **more}


def cut(data: Arrays) -> list[Arrays]:
    return [{n: a[i : i + BATCH] for n, a in data.items()} for i in range(0, ROWS, BATCH)]


def generated() -> Iterator[Arrays]:
    """Batches whose number is not known."""
    yield from cut(DATA)


class Loader:
    """Batches that are read from the beginning, in memory that is used again."""

    def __iter__(self) -> Iterator[Arrays]:
        memory = {n: a.copy() for n, a in cut(DATA)[0].items()}
        for batch in cut(DATA):
            part = {n: memory[n][: len(a)] for n, a in batch.items()}
            for name, array in batch.items():
                part[name][:] = array
            yield part


FORMS: dict[str, Any] = {
    "rows": lambda: DATA,
    "batches": lambda: cut(DATA),
    "generator": lambda: generated,
    "loader": Loader,
}


class Evaluating(Callback):
    """Evaluates after some steps, as `validate_every` should."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.found: list[dict[str, float]] = []

    def on_step(self, record: Any, session: Any) -> None:
        if record.step % self.every == 0:
            measured = session.evaluate(HELD, batch_size=BATCH, metrics=["accuracy"])
            values = {f"validation_{name}": value for name, value in measured.items()}
            self.found.append({"epoch": record.epoch, "steps": record.step, **values})


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: Any, session: Any) -> None:
        if record.step == self.step:
            record.stop("the test says so")


class Told(Callback):
    """Keeps the events that it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def on_validation(self, record: Any, session: Any) -> None:
        self.seen.append(("validation", record.epoch, record.batch, record.step, record.cut))
        assert set(record.values) == {"validation_loss", "validation_accuracy"}

    def on_epoch(self, record: Any, session: Any) -> None:
        self.seen.append(("epoch", record.epoch, record.batch, record.step, record.cut))
        assert record.values == record.history[-1]
        assert len(record.history) == record.epoch

    def on_end(self, record: Any, session: Any) -> None:
        self.seen.append(("end", record.epoch, record.batch, record.step, record.cut))


# --------------------------------------------------------------------------- validate_every


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [1, 3, 4])
def test_validations_within_epochs(every: int, form: str, prefetch: int) -> None:
    evaluating = Evaluating(every)
    plain = TrainingSession(model())
    expected = plain.fit(FORMS[form](), callbacks=[evaluating], **arguments())
    session = TrainingSession(model())
    history = session.fit(FORMS[form](), validate_every=every, prefetch=prefetch, **arguments())
    assert history.validations == evaluating.found
    assert len(history.validations) == STEPS // every
    assert list(history) == expected
    assert history != expected  # which has no validations
    assert_same_arrays(dict(session.state), dict(plain.state))
    assert session.history == history


def test_callbacks_are_told_of_validations() -> None:
    told = Told()
    TrainingSession(model()).fit(DATA, validate_every=3, callbacks=[told], **arguments(epochs=2))
    assert told.seen == [
        ("validation", 1, 3, 3, False),
        ("epoch", 1, 4, 4, False),
        ("validation", 2, 2, 6, False),
        ("epoch", 2, 4, 8, False),
        ("end", 2, 4, 8, False),
    ]


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", range(1, 7))
def test_resumed_validations(stop: int, accumulate: int, tmp_path: Path) -> None:
    """A validation that was due when training stopped is made up for."""
    settings = arguments(validate_every=2, accumulate=accumulate)
    whole = TrainingSession(model()).fit(DATA, **settings)
    begun = TrainingSession(model())
    begun.fit(DATA, callbacks=[StopAt(stop)], **settings)
    begun.save(tmp_path / "saved.onnx")
    session = TrainingSession(tmp_path / "saved.onnx")
    assert session.fit(DATA, resume=True, **settings) == whole
    assert begun.fit(DATA, resume=True, **settings) == whole
    assert len(whole.validations) == STEPS // accumulate // 2


def test_a_validation_is_not_repeated_at_the_end_of_the_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = TrainingSession(model())
    calls = []
    evaluate = TrainingSession.evaluate

    def counted(self: Any, *given: Any, **settings: Any) -> Any:
        calls.append(self.steps_done)
        return evaluate(self, *given, **settings)

    monkeypatch.setattr(TrainingSession, "evaluate", counted)
    history = session.fit(DATA, validate_every=4, **arguments())
    assert calls == [4, 8, 12]
    assert [entry["validation_loss"] for entry in history] == [
        entry["validation_loss"] for entry in history.validations
    ]


def test_a_callback_may_change_the_model_at_a_validation() -> None:
    class Resetting(Callback):
        def on_validation(self, record: Any, session: Any) -> None:
            session.parameters = {"w2": 0 * session.parameters["w2"]}

    session = TrainingSession(model())
    history = session.fit(DATA, validate_every=4, callbacks=[Resetting()], **arguments(epochs=1))
    assert history[0]["validation_loss"] == pytest.approx(session.evaluate(HELD)["loss"])
    assert history[0]["validation_loss"] != history.validations[0]["validation_loss"]


@pytest.mark.slow
def test_a_signal_during_a_validation(tmp_path: Path) -> None:
    """Nothing of it is left, and the resumed training makes it again."""
    settings = arguments(validate_every=3)
    whole = TrainingSession(model())
    wanted = whole.fit(DATA, **settings)
    reads = []

    def interrupted() -> Arrays:
        reads.append(1)
        if len(reads) == 3:  # after steps 3 and 4
            signal.raise_signal(signal.SIGINT)
        return HELD

    session = TrainingSession(model())
    with pytest.raises(KeyboardInterrupt):
        session.fit(DATA, **settings | {"validation": interrupted, "callbacks": []})
    assert session.steps_done == 6
    assert [entry["steps"] for entry in session.history.validations] == [3]
    session.save(tmp_path / "saved.onnx")
    for each in (session, TrainingSession(tmp_path / "saved.onnx")):
        assert each.fit(DATA, resume=True, **settings) == wanted
        assert_same_arrays(dict(each.state), dict(whole.state))


@pytest.mark.slow
def test_early_stopping_counts_validations(tmp_path: Path) -> None:
    settings = arguments(epochs=50, validate_every=3, validation=HELD)
    evaluating = Evaluating(1)
    TrainingSession(model(Adam(0.3))).fit(DATA, callbacks=[evaluating], **arguments(epochs=50))
    losses = {entry["steps"]: entry["validation_loss"] for entry in evaluating.found}
    looks = [step for step in losses if step % 3 == 0 or step % BATCHES == 0]
    best, waited, end = looks[0], 0, 0
    for step in looks[1:]:  # the rule by hand
        best, waited = (step, 0) if losses[step] < losses[best] else (best, waited + 1)
        if waited == 4:
            end = step
            break
    assert end % BATCHES, "choose data for which it stops within an epoch"
    session = TrainingSession(model(Adam(0.3)))
    stopping = EarlyStopping(4, restore_best=tmp_path / "kept.onnx")
    kept = BestModel(tmp_path / "best.onnx")
    history = session.fit(DATA, callbacks=[stopping, kept], **settings)
    assert session.steps_done == best  # restored
    assert history.validations[-1]["steps"] == end
    assert stopping.best == kept.best == losses[best]
    assert TrainingSession(tmp_path / "best.onnx").steps_done == best
    assert_same_arrays(dict(TrainingSession(tmp_path / "best.onnx").state), dict(session.state))


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 4, 5, 6, 7, 9])
def test_early_stopping_goes_on_counting_validations(stop: int, tmp_path: Path) -> None:
    def callbacks(folder: str) -> list[Any]:
        (tmp_path / folder).mkdir(exist_ok=True)
        return [
            EarlyStopping(4, restore_best=tmp_path / folder / "kept.onnx"),
            BestModel(tmp_path / folder / "best.onnx"),
            JSONLines(tmp_path / folder / "log.jsonl"),
            CSVLog(tmp_path / folder / "log.csv"),
        ]

    settings = arguments(epochs=50, validate_every=3)
    whole = TrainingSession(model(Adam(0.3)))
    wanted = whole.fit(DATA, callbacks=callbacks("whole"), **settings)

    class Quit(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == stop:
                session.save(tmp_path / "saved.onnx")
                raise RuntimeError("killed")

    begun = TrainingSession(model(Adam(0.3)))
    with pytest.raises(RuntimeError, match="killed"):
        begun.fit(DATA, callbacks=[*callbacks("parts"), Quit()], **settings)
    session = TrainingSession(tmp_path / "saved.onnx")
    found = session.fit(DATA, callbacks=callbacks("parts"), resume=True, **settings)
    assert found == wanted
    assert_same_arrays(dict(session.state), dict(whole.state))
    for name in ("kept", "best"):
        one, other = (TrainingSession(tmp_path / f / f"{name}.onnx") for f in ("whole", "parts"))
        assert_same_arrays(dict(one.state), dict(other.state))
    lines = [
        [json.loads(line) for line in (tmp_path / f / "log.jsonl").read_text().splitlines()]
        for f in ("whole", "parts")
    ]
    for each in (*lines[0], *lines[1]):
        each.pop("seconds", None)
    assert lines[0] == lines[1]
    assert {"epoch", "validation"} == {line["event"] for line in lines[0]}


# --------------------------------------------------------------------------------- max_steps


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 4, 5, 12, 13])
def test_training_ends_after_some_steps(count: int, form: str, prefetch: int) -> None:
    states: dict[int, dict[str, Any]] = {}
    entries: dict[int, dict[str, float]] = {}

    class Keeping(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            states[record.step] = dict(session.state)
            measured = session.evaluate(HELD, batch_size=BATCH, metrics=["accuracy"])
            values = {f"validation_{name}": value for name, value in measured.items()}
            entries[record.step] = values

    whole = TrainingSession(model())
    wanted = whole.fit(FORMS[form](), callbacks=[Keeping()], **arguments())
    session, told = TrainingSession(model()), Told()
    history = session.fit(
        FORMS[form](), max_steps=count, prefetch=prefetch, callbacks=[told], **arguments()
    )
    made = min(count, STEPS)
    finished, rest = divmod(made, BATCHES)
    assert session.steps_done == made
    assert_same_arrays(dict(session.state), states[made])
    assert len(history) == finished + bool(rest)
    assert History(history[:finished]) == wanted[:finished]
    assert history[-1]["steps"] == made
    assert {n: v for n, v in history[-1].items() if n in entries[made]} == entries[made]
    place = (finished + bool(rest), rest or BATCHES, made)
    assert told.seen[-2:] == [("epoch", *place, bool(rest)), ("end", *place, bool(rest))]
    assert session.history == history


def test_the_entry_of_a_part_is_the_mean_over_its_rows() -> None:
    losses: list[float] = []

    class Keeping(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            losses.append(record.values["loss"])

    session = TrainingSession(model())
    history = session.fit(DATA, max_steps=6, callbacks=[Keeping()], **arguments())
    assert history[1]["loss"] == pytest.approx((losses[4] + losses[5]) / 2)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows", "generator"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("count", range(1, 7))
def test_a_part_of_an_epoch_goes_on(count: int, accumulate: int, form: str, tmp_path: Path) -> None:
    """As if it had never ended: the entry of the whole epoch replaces that of its part."""
    settings = arguments(accumulate=accumulate, validate_every=2)
    whole = TrainingSession(model())
    wanted = whole.fit(FORMS[form](), **settings)
    begun = TrainingSession(model())
    callbacks = [Checkpoint(tmp_path / "saved.onnx")]
    part = begun.fit(FORMS[form](), max_steps=count, callbacks=callbacks, **settings)
    settings["callbacks"] = [Checkpoint(tmp_path / "resumed.onnx")]
    session = TrainingSession(tmp_path / "saved.onnx")
    assert session.history == part
    again = session.fit(FORMS[form](), max_steps=count, resume=True, **settings)
    assert again == part  # there is nothing to do
    for each in (session, begun):
        assert each.fit(FORMS[form](), resume=True, **settings) == wanted
        assert_same_arrays(dict(each.state), dict(whole.state))


def test_steps_of_an_earlier_training_do_not_count() -> None:
    session = TrainingSession(model())
    session.fit(DATA, **arguments(epochs=1))
    history = session.fit(DATA, max_steps=5, **arguments())
    assert session.steps_done == 9
    assert [entry["steps"] for entry in history] == [8, 9]
    session.fit(DATA, max_steps=7, resume=True, **arguments())
    assert session.steps_done == 11


def test_a_callback_that_stops_where_the_limit_is() -> None:
    session = TrainingSession(model())
    history = session.fit(DATA, max_steps=2, callbacks=[StopAt(2)], **arguments())
    assert list(history) == []
    history = session.fit(DATA, max_steps=2, resume=True, **arguments())
    assert [entry["steps"] for entry in history] == [2]
    assert session.steps_done == 2


@pytest.mark.slow
def test_best_model_also_of_a_part(tmp_path: Path) -> None:
    session = TrainingSession(model())
    best = BestModel(tmp_path / "best.onnx")
    session.fit(DATA, max_steps=2, callbacks=[best], **arguments())
    assert TrainingSession(tmp_path / "best.onnx").steps_done == 2
    value = best.best
    assert value is not None
    session.save(tmp_path / "saved.onnx")
    resumed = BestModel(tmp_path / "best.onnx")
    other = TrainingSession(tmp_path / "saved.onnx")
    history = other.fit(DATA, callbacks=[resumed], resume=True, **arguments())
    assert resumed.best == min(value, *history.history["validation_loss"])


def test_early_stopping_does_not_count_a_part() -> None:
    stopping = EarlyStopping(1, "loss", mode="max")
    history = TrainingSession(model(SGD(0.5))).fit(
        DATA, max_steps=5, callbacks=[stopping], **arguments()
    )
    assert len(history) == 2
    assert stopping.best_epoch == 1
    assert stopping.best == history[0]["loss"]


def test_the_end_of_a_schedule_that_a_limit_keeps_from_being_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rate = ortops.schedules.cosine(0.1, steps=BATCHES)
    session = TrainingSession(model(SGD(rate)))
    session.fit(DATA, max_steps=2, **arguments(epochs=1))
    session.fit(DATA, max_steps=4, resume=True, **arguments())
    assert "ends after" not in caplog.text
    session.fit(DATA, max_steps=BATCHES + 1, resume=True, **arguments(epochs=4))
    assert "ends after" in caplog.text
    caplog.clear()
    session.fit(DATA, resume=True, **arguments(epochs=5))
    assert "ends after" in caplog.text


def test_a_schedule_that_had_the_length_of_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """Its rate is 0 from there on, also if the number of epochs stays."""
    for limit, ends in ((None, False), (2 * BATCHES, False), (4, True)):
        caplog.clear()
        session = TrainingSession(model(SGD(ortops.schedules.cosine(0.1))))
        session.fit(DATA, max_steps=limit, callbacks=[StopAt(3)], **arguments(epochs=2))
        assert session.steps_done == 3
        session.fit(DATA, max_steps=limit, resume=True, **arguments(epochs=2))
        assert "ends after" not in caplog.text
        history = session.fit(DATA, resume=True, **arguments(epochs=2))
        assert ("ends after 4 steps" in caplog.text) == ends
        assert (history[-1]["learning_rate"] == 0) == ends


# ------------------------------------------------------------------------------- max_minutes


class Clock:
    """A minute passes between any two looks at it."""

    def __init__(self) -> None:
        self.minutes = 0

    def perf_counter(self) -> float:
        self.minutes += 1
        return self.minutes * 60.0


@pytest.mark.slow
def test_time_ends_training_within_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "time", Clock())
    session, expected = TrainingSession(model()), TrainingSession(model())
    history = session.fit(DATA, max_minutes=8.5, **arguments())
    count = session.steps_done
    assert 4 < count < 8
    wanted = expected.fit(DATA, max_steps=count, **arguments())
    assert history == wanted
    assert_same_arrays(dict(session.state), dict(expected.state))
    session.fit(DATA, max_minutes=4.5, resume=True, **arguments())  # minutes of this call
    assert session.steps_done > count
    whole = TrainingSession(model()).fit(DATA, **arguments())
    assert session.fit(DATA, resume=True, **arguments()) == whole


def test_enough_time_changes_nothing() -> None:
    whole = TrainingSession(model()).fit(DATA, **arguments())
    assert TrainingSession(model()).fit(DATA, max_minutes=60, **arguments()) == whole


# -------------------------------------------------------------------------------- together


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"max_steps": 5, "validate_every": 3},
        {"max_steps": 4},
        {"max_minutes": 6.5, "validate_every": 2},
        {"max_steps": 3, "accumulate": 2},
    ],
    ids=str,
)
def test_ranks_end_together(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes at its own pace in each of them."""
    if "max_minutes" in given:
        monkeypatch.setattr(limits, "time", Clock())
    settings = arguments(metrics=(), **given)
    del settings["progress"]
    sessions, histories = fit_joined(model(), DATA, **settings)
    assert sessions[0].steps_done == sessions[1].steps_done < STEPS
    for name in ("steps", "validation_loss"):
        assert histories[0].history[name] == histories[1].history[name]
    assert histories[0].validations == histories[1].validations


def test_ranks_have_the_same_limits() -> None:
    def work(communicator: Any) -> None:
        session = ortops.distributed.join(TrainingSession(model()), communicator)
        session.fit(DATA, max_steps=3 + communicator.rank, **arguments())

    with pytest.raises(ortops.OrtopsError, match="must be the same in all ranks"):
        in_ranks(work)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"validate_every": 0}, "validate_every must be an integer >= 1, got 0"),
        ({"validate_every": 2, "validation": None, "metrics": ()}, "give validation= or"),
        ({"max_steps": 0}, "max_steps must be an integer >= 1, got 0"),
        ({"max_steps": 1.5}, "max_steps must be an integer >= 1, got 1.5"),
        ({"max_minutes": 0}, "max_minutes must be a finite number > 0, got 0"),
        ({"max_minutes": "5"}, "max_minutes must be a finite number > 0, got '5'"),
    ],
)
def test_wrong_limits(given: Any, message: str) -> None:
    session = TrainingSession(model())
    with pytest.raises(ArgumentError, match=message):
        session.fit(DATA, **arguments(**given))
    assert session.steps_done == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda found: found.update(cut=[1]), "cut"),
        (lambda found: found.update(begun=-1), "begun"),
        (lambda found: found.update(validations=[{"steps": "3"}]), "validations"),
        (lambda found: found.update(validation_split=1), "validation_split"),
    ],
)
def test_damaged_positions(change: Callable[[Any], None], name: str) -> None:
    session = TrainingSession(model())
    session.fit(DATA, max_steps=2, validate_every=2, **arguments())
    saved = session.model()
    note = next(each for each in saved.metadata_props if each.key == POSITION_KEY)
    found = json.loads(note.value)
    assert found["cut"]["steps"] == 2
    change(found)
    note.value = json.dumps(found)
    with pytest.raises(ortops.ModelError, match=f"'{name}'"):
        TrainingSession(saved)
