"""A training that ends anywhere goes on from its file as if it had never stopped."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training_models import (
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    foreign,
    labelled,
    normalizing,
)

import ortops
from ortops import ModelError, OrtopsError, TrainingSession, build_training_model, schedules
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.position import POSITION_KEY
from ortops.optimizers import SGD, Adam

EPOCHS = 3
ROWS, BATCH = 20, 6  # four batches an epoch, the last of two rows
BATCHES = 4
STEPS = EPOCHS * BATCHES


class StopAt(Callback):
    """Ends a training after a step.

    Args:
        step: The number of batches after which it ends.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: Record, session: Any) -> None:
        if (record.epoch - 1) * BATCHES + record.batch >= self.step:
            record.stop("the test says so")


class Counting(Callback):
    """Keeps all that it was told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, record: Record, session: Any) -> None:
        self.seen.append([record.epoch, record.batch, record.step, record.samples, record.values])

    def on_epoch(self, record: Record, session: Any) -> None:
        values = {name: value for name, value in record.values.items() if name != "seconds"}
        self.seen.append([record.epoch, record.batch, record.step, record.samples, values])

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def trainable(**settings: Any) -> onnx.ModelProto:
    settings = {"loss": "SoftmaxCrossEntropy", "optimizer": Adam(0.01), **settings}
    return build_training_model(classifier(dropout=0.25), **settings)


def rows() -> Arrays:
    return labelled((6,), rows=ROWS)


def arguments(**settings: Any) -> dict[str, Any]:
    return {"epochs": EPOCHS, "batch_size": BATCH, "seed": 5, "progress": False, **settings}


def whole(model: onnx.ModelProto, data: Any, **settings: Any) -> tuple[TrainingSession, Any]:
    session = TrainingSession(model)
    return session, session.fit(data, **arguments(**settings))


def in_parts(
    model: onnx.ModelProto, data: Any, stop: int, path: Path, **settings: Any
) -> tuple[TrainingSession, Any]:
    """Trains until a stop, and then in a new session of the saved file."""
    begun = TrainingSession(model)
    begun.fit(data, **arguments(callbacks=[StopAt(stop)], **settings))
    begun.save(path)
    resumed = TrainingSession(path)
    callbacks = [StopAt(STEPS + 1)]
    return resumed, resumed.fit(data, resume=True, **arguments(callbacks=callbacks, **settings))


def assert_same(found: tuple[TrainingSession, Any], expected: tuple[TrainingSession, Any]) -> None:
    assert_same_arrays(dict(found[0].state), dict(expected[0].state))
    assert found[1] == expected[1]
    assert len(expected[1]) == EPOCHS


# ------------------------------------------------------------------------------ the same weights


@pytest.mark.parametrize("stop", [2, 4, 5])
def test_without_a_step_counter(stop: int, tmp_path: Path) -> None:
    """The order of later epochs depends on how many steps there were, which the file says."""
    algorithm = [
        onnx.helper.make_node("Transpose", ["x"], ["w_next"]),
        onnx.helper.make_node("ReduceMean", ["y"], ["cost"], keepdims=0),
    ]
    outputs = [
        onnx.helper.make_tensor_value_info("cost", onnx.TensorProto.FLOAT, []),
        onnx.helper.make_tensor_value_info("w_next", onnx.TensorProto.FLOAT, [2, 1]),
    ]
    model = foreign(algorithm, outputs=outputs, updates={"w": "w_next"})
    data = {"x": np.arange(8, dtype=np.float32).reshape(4, 2)}
    found = in_parts(model, data, stop, tmp_path / "saved.onnx", batch_size=1)
    expected = whole(model, data, batch_size=1)
    assert_same(found, expected)
    assert found[0].steps_done == expected[0].steps_done == STEPS


@pytest.mark.slow
def test_a_file_that_a_callback_saved_in_the_middle(tmp_path: Path) -> None:
    """As after a kill: nothing but that file is left."""

    class Saving(Callback):
        saves = True

        def on_step(self, record: Record, session: Any) -> None:
            session.save(tmp_path / f"step{record.step}.onnx")

        def on_epoch(self, record: Record, session: Any) -> None:
            session.save(tmp_path / f"epoch{record.epoch}.onnx")

    counting = Counting()
    expected = whole(trainable(), rows(), callbacks=[Saving(), counting])
    for path in sorted(tmp_path.glob("*.onnx")):
        session, resumed = TrainingSession(path), Counting()
        history = session.fit(rows(), resume=True, **arguments(callbacks=[Callback(), resumed]))
        assert_same((session, history), expected)
        done = path.name == f"epoch{EPOCHS}.onnx"  # nothing is left to be told of
        assert resumed.seen == ([] if done else counting.seen)
    assert len(counting.seen) == STEPS + EPOCHS


@pytest.mark.slow
def test_a_file_that_another_thread_saved(tmp_path: Path) -> None:
    expected = whole(trainable(), rows())
    session = TrainingSession(trainable())
    ended = threading.Event()
    paths = []

    def save() -> None:
        while not ended.is_set():
            path = tmp_path / f"{len(paths)}.onnx"
            session.save(path)
            paths.append(path)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        session.fit(rows(), **arguments())
    finally:
        ended.set()
        thread.join()
    for path in paths:
        resumed = TrainingSession(path)
        history = resumed.fit(rows(), resume=True, **arguments())
        assert_same((resumed, history), expected)


# --------------------------------------------------------------------------- what resume means


def test_n_more_epochs_or_those_that_were_begun() -> None:
    session, history = whole(trainable(), rows())
    before = dict(session.state)
    assert session.fit(rows(), resume=True, **arguments()) == history
    assert_same_arrays(dict(session.state), before)
    more = session.fit(rows(), **arguments())
    assert session.steps_done == 2 * STEPS
    assert [entry["steps"] for entry in more] == [STEPS + BATCHES * n for n in (1, 2, 3)]
    session.reset()
    assert session.fit(rows(), resume=True, **arguments()) == history
    assert_same_arrays(dict(session.state), before)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 5}, "fit: batch_size must be 6, as in the training to resume, got 5"),
        ({"shuffle": False}, "fit: shuffle must be True, as in the training to resume, got False"),
        ({"seed": 6}, "fit: seed must be 5, as in the training to resume, got 6"),
        ({"callbacks": []}, "had the callback Counting, which is missing; give one, or leave"),
        (
            {"data": labelled((6,), rows=19)},
            "fit: the data must have 20 rows, as in the training to resume, got 19",
        ),
    ],
)
def test_other_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Counting(), StopAt(2)]))
    before = dict(session.state)
    settings = {"data": rows(), "resume": True, **arguments(callbacks=[Counting()]), **given}
    with pytest.raises(OrtopsError) as raised:
        session.fit(**settings)
    assert message in str(raised.value)
    assert_same_arrays(dict(session.state), before)
    session.fit(rows(), resume=True, **arguments(callbacks=[Counting()]))
    assert session.steps_done == STEPS


PROLONGED: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "batches that are added up": {"accumulate": 2},
    "no shuffling": {"shuffle": False},
    "validation": {"validation": labelled((6,), rows=7), "metrics": ["accuracy"]},
}


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize("name", list(PROLONGED))
def test_a_finished_training_is_prolonged(begun: int, name: str, tmp_path: Path) -> None:
    settings, path = PROLONGED[name], tmp_path / "saved.onnx"
    first = TrainingSession(trainable())
    first.fit(rows(), **arguments(epochs=begun, **settings))
    first.save(path)
    expected = whole(trainable(), rows(), **settings)
    for session in (first, TrainingSession(path)):
        history = session.fit(rows(), resume=True, **arguments(**settings))
        assert_same((session, history), expected)
        assert session.fit(rows(), resume=True, **arguments(**settings)) == history


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("begun", [2, 9])
def test_another_number_of_epochs_in_the_middle_of_one(
    begun: int, stop: int, tmp_path: Path
) -> None:
    first = TrainingSession(trainable())
    first.fit(rows(), **arguments(epochs=begun, callbacks=[StopAt(stop)]))
    first.save(tmp_path / "saved.onnx")
    session = TrainingSession(tmp_path / "saved.onnx")
    history = session.fit(rows(), resume=True, **arguments(callbacks=[StopAt(STEPS + 1)]))
    assert_same((session, history), whole(trainable(), rows()))
    assert session.resume_state.position is not None
    assert session.resume_state.position.epoch_state.call["epochs"] == EPOCHS


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("stop", "least", "message"),
    [
        (
            6,
            2,
            "has finished 1 of 9 epochs and is in epoch 2; leave out resume=True to start",
        ),
        (8, 2, "has finished 2 of 9 epochs; leave out resume=True to start a new training"),
        (1, 1, "has finished 0 of 9 epochs and is in epoch 1; leave out"),
    ],
)
def test_no_fewer_epochs_than_were_begun(stop: int, least: int, message: str) -> None:
    class StopAfter(Callback):
        """Ends a training after an epoch, where that is a whole one."""

        def on_epoch(self, record: Record, session: Any) -> None:
            if record.step >= stop:
                record.stop("the test says so")

    session = TrainingSession(trainable())
    callback = StopAfter() if stop % BATCHES == 0 else StopAt(stop)
    session.fit(rows(), **arguments(epochs=9, callbacks=[callback]))
    assert session.steps_done == stop
    before = dict(session.state)
    settings = arguments(epochs=least - 1, callbacks=[callback])
    with pytest.raises(OrtopsError) as raised:
        session.fit(rows(), resume=True, **settings)
    assert f"epochs must be an integer >= {least}, got {least - 1}: the training" in str(
        raised.value
    )
    assert message in str(raised.value)
    assert_same_arrays(dict(session.state), before)
    kind: Any = StopAfter if stop % BATCHES == 0 else StopAt
    callback = kind() if stop % BATCHES == 0 else kind(99)
    history = session.fit(rows(), resume=True, **arguments(epochs=least, callbacks=[callback]))
    assert len(history) == least
    assert session.steps_done == least * BATCHES


def test_a_shorter_training_is_told_its_end(tmp_path: Path) -> None:
    """The epochs are over before the first step: callbacks are told so, and can save it."""
    told = []

    class End(Callback):
        def on_begin(self, record: Record, session: Any) -> None:
            told.append(("begin", record.epoch, record.epochs, record.batch))

        def on_end(self, record: Record, session: Any) -> None:
            told.append(("end", record.epoch, record.epochs, record.batch))

    class StopAfterTwo(Callback):
        def on_epoch(self, record: Record, session: Any) -> None:
            if record.epoch == 2:
                record.stop("the test says so")

    session = TrainingSession(trainable())
    stopped = [StopAfterTwo()]
    history = session.fit(rows(), **arguments(epochs=9, callbacks=stopped))
    settings = arguments(epochs=2, callbacks=[*stopped, End()])
    assert session.fit(rows(), resume=True, **settings) == history
    assert told == [("begin", 2, 2, 0), ("end", 2, 2, 0)]
    session.save(tmp_path / "saved.onnx")
    resumed = TrainingSession(tmp_path / "saved.onnx")
    assert resumed.fit(rows(), resume=True, **settings) == history
    assert len(told) == 2  # it was over already


def test_a_schedule_of_epochs_sees_the_new_number_of_them() -> None:
    seen: list[float] = []

    def schedule(done: float) -> float:
        seen.append(done)
        return 0.1 * (1 - done)

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(epochs=2, schedule=schedule))
    history = session.fit(rows(), resume=True, **arguments(epochs=4, schedule=schedule))
    assert seen == [0.0, 0.5, 0.5, 0.75]
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, 0.05, 0.05, 0.025])


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "accumulate", "said"),
    [
        (
            schedules.cosine(0.01, steps=8, end=0.1),
            1,
            "cosine(steps=8, restarts=0, end=0.1), ends ",
        ),
        (
            schedules.warmup_linear(0.01, steps=8, warmup=2),
            1,
            "ends after 8 steps; later steps keep its",
        ),
        (schedules.one_cycle(0.01, steps=8), 1, "ends after 8 steps"),
        (schedules.cosine(0.01, steps=STEPS), 1, ""),
        (schedules.cosine(0.01, steps=6), 2, ""),
        (schedules.cosine(0.01, steps=5), 2, "ends after 5 steps"),
        (schedules.exponential(0.01, factor=0.5), 1, ""),
        (schedules.constant(0.01), 1, ""),
        (0.01, 1, ""),
    ],
    ids=lambda value: getattr(value, "description", None),
)
def test_a_schedule_in_the_graph_holds_its_last_rate(
    schedule: Any, accumulate: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = TrainingSession(trainable(optimizer=Adam(schedule)))
    session.fit(rows(), **arguments(epochs=2, accumulate=accumulate))
    assert "ends after" not in caplog.text
    history = session.fit(rows(), resume=True, **arguments(accumulate=accumulate))
    found = [
        r.getMessage() for r in caplog.records if "fit: the model's schedule, " in r.getMessage()
    ]
    assert len(found) == bool(said)
    assert said in "".join(found)
    if "end=0.1" in said:
        assert history[-1]["learning_rate"] == pytest.approx(0.001)
    if accumulate == 1:
        expected = whole(trainable(optimizer=Adam(schedule)), rows())
        assert_same((session, history), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("change", ["learning rate", "variable", "nothing"])
def test_the_message_after_an_interruption_names_no_file_of_another_state(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupting(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            if record.step == 3:
                session.save(tmp_path / "saved.onnx")
                if change == "learning rate":
                    session.learning_rate = 0.5
                elif change == "variable":
                    session.state = {n: a for n, a in session.state.items() if n != "step"}
                signal.raise_signal(signal.SIGINT)

    session = TrainingSession(trainable())
    with pytest.raises(KeyboardInterrupt):
        session.fit(rows(), **arguments(callbacks=[Interrupting()]))
    assert "training interrupted by SIGINT after step 3; call " in caplog.text
    assert ("saved.onnx" in caplog.text) == (change == "nothing")


def test_a_new_fit_is_in_no_file_of_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Interrupting(Callback):
        def on_begin(self, record: Record, session: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments())
    session.save(tmp_path / "saved.onnx")
    with pytest.raises(KeyboardInterrupt):
        session.fit(rows(), **arguments(epochs=5, callbacks=[Interrupting()]))
    assert f"training interrupted by SIGINT after step {STEPS}; call " in caplog.text
    assert "saved.onnx" not in caplog.text


def test_what_is_no_callback() -> None:
    session = TrainingSession(trainable())
    with pytest.raises(
        OrtopsError, match=r"callbacks must be instances of subclasses of .*Callback, got <class "
    ):
        session.fit(rows(), callbacks=[Callback], progress=False)  # type: ignore[list-item]


def test_a_stop_ends_before_validation_and_tells_the_end() -> None:
    ends = []

    class End(Callback):
        def on_end(self, record: Record, session: Any) -> None:
            ends.append((record.epoch, record.batch, record.step, record.interrupted))

    session = TrainingSession(trainable())
    callbacks = [StopAt(6), End()]
    history = session.fit(rows(), validation=rows(), **arguments(callbacks=callbacks))
    assert len(history) == 1
    assert ends == [(2, 2, 6, "")]


# ----------------------------------------------------------------------------------- in the file


def nested(levels: int) -> Any:
    """Returns a list in a list in a list …"""
    found: list[Any] = []
    for _ in range(levels - 1):
        found = [found]
    return found


def position_in(model: onnx.ModelProto) -> Any:
    found = [entry.value for entry in model.metadata_props if entry.key == POSITION_KEY]
    return json.loads(found[0]) if found else None


def test_the_file_says_what_was_begun() -> None:
    session = TrainingSession(trainable())
    assert position_in(session.model()) is None
    history = session.fit(rows(), **arguments(callbacks=[StopAt(6)]))
    found = position_in(session.model())
    assert found.pop("seconds") > 0
    losses = found.pop("totals")
    assert [len(losses), found.pop("history")] == [1, list(history)]
    assert found == {
        "epochs": 3,
        "batch_size": 6,
        "shuffle": True,
        "seed": 5,
        "accumulate": 1,
        "rows": 20,
        "batches": 4,
        "epoch": 2,
        "first_step": 4,
        "batch": 2,
        "samples": 12,
        "rate": None,
        "steps": 6,
        "callbacks": [{"class": "StopAt", "state": {}}],
    }
    assert position_in(session.inference_model()) is None
    session.reset()
    assert position_in(session.model()) is None


@pytest.mark.nightly(9)
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "metadata_props 'ortops.fit': Expecting property name"),
        (
            "[" * 100_000,
            "metadata_props 'ortops.fit': nested 100,000 levels deep, the limit is 100",
        ),
        (
            {"callbacks": nested(900)},
            "metadata_props 'ortops.fit': nested 901 levels deep, the lim",
        ),
        ({"seconds": nested(900)}, "metadata_props 'ortops.fit': nested 901 levels deep, the lim"),
        ("[]", "must be an object, got a list; TrainingSession.save writes it"),
        ({"epoch": 0}, "'epoch' must be an integer >= 1, got 0"),
        ({"epoch": True}, "'epoch' must be an integer >= 1, got True"),
        ({"batch": -1}, "'batch' must be an integer >= 0, got -1"),
        ({"batch": 2**63}, "must be an integer >= 0, got"),
        ({"rows": 1.5}, "'rows' must be an integer >= 0 or null, got 1.5"),
        ({"shuffle": 1}, "'shuffle' must be true or false, got 1"),
        ({"totals": {}}, "'totals' must be an array of numbers, got {}"),
        ({"totals": [10**400]}, "must be an array of numbers, got"),
        ({"history": [3]}, "'history' must be an array of objects of numbers, got [3]"),
        (
            {"callbacks": [1]},
            "'callbacks' must be an array of objects of 'class' and 'state', got [1]",
        ),
        ({"seconds": "x"}, "'seconds' must be a number >= 0, got 'x'"),
        ({"seed": None}, "'seed' must be an integer >= 0, got None"),
    ],
)
def test_a_position_that_nobody_wrote_is_refused(text: Any, message: str) -> None:
    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[StopAt(2)]))
    model = session.model()
    entry = next(entry for entry in model.metadata_props if entry.key == POSITION_KEY)
    entry.value = text if isinstance(text, str) else json.dumps(json.loads(entry.value) | text)
    with pytest.raises(ModelError) as raised:
        TrainingSession(model)
    assert message in str(raised.value)


def test_a_position_without_a_field_is_refused() -> None:
    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[StopAt(2)]))
    model = session.model()
    entry = next(entry for entry in model.metadata_props if entry.key == POSITION_KEY)
    found = json.loads(entry.value)
    del found["first_step"]
    entry.value = json.dumps(found)
    with pytest.raises(ModelError, match="'first_step' must be an integer >= 0, but is missing"):
        TrainingSession(model)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(2), r"array\(\[1., 1.\]\) is a ndarray; return dicts, lists, strings, numbers"),
        (Callback(), "is a Callback; return dicts"),
        (nested(97), "nested 101 levels deep, the limit is 100"),
        (nested(100_000), "; return dicts, lists"),
        (10**5000, "; return dicts, lists"),
    ],
    ids=["array", "object", "nested", "nested deeply", "huge"],
)
def test_a_state_that_is_no_json_is_refused_when_it_is_saved(
    value: Any, message: str, tmp_path: Path
) -> None:
    class Odd(Callback):
        def state(self) -> dict[str, Any]:
            return {"best": value}

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Callback(), Odd()]))
    with pytest.raises(OrtopsError, match=f"callback Odd: its state cannot be saved: .*{message}"):
        session.save(tmp_path / "saved.onnx")
    assert not (tmp_path / "saved.onnx").exists()


def test_a_state_as_deep_as_files_may_be_is_read_again() -> None:
    class Deep(Callback):
        state_of: Any = nested(96)

        def state(self) -> dict[str, Any]:
            return {"best": self.state_of}

        def restore(self, state: dict[str, Any]) -> None:
            self.state_of = state["best"]

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Deep(), StopAt(3)]))
    resumed, deep = TrainingSession(session.model()), Deep()
    deep.state_of = None
    resumed.fit(rows(), resume=True, **arguments(callbacks=[deep, StopAt(99)]))
    assert deep.state_of == nested(96)


def test_a_position_that_could_not_be_read_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = TrainingSession(trainable())
    session.fit(rows(), **arguments())
    limit = len(json.dumps(position_in(session.model())))
    monkeypatch.setattr("ortops.graph.limits.LIMITS.metadata_bytes", limit - 100)
    assert position_in(session.model()) is None
    assert "it is left out, so fit cannot resume from the file" in caplog.text


def test_a_loss_that_is_no_number_is_kept() -> None:
    data = affine_batch(4)
    data["x"][0, 0] = np.inf
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(0.1))
    )
    session.fit(data, progress=False, stop_on_nan=False)
    history = TrainingSession(session.model()).fit(data, resume=True, progress=False)
    assert np.isnan(history[0]["loss"]) or np.isinf(history[0]["loss"])


# ------------------------------------------------------------------------------- accumulated


def test_running_statistics_see_each_batch_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    data = labelled((1, 4, 4), rows=12)
    model = build_training_model(normalizing(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.0))
    joined, turns = TrainingSession(model), TrainingSession(model)
    turns.fit(data, batch_size=4, shuffle=False, epochs=2, progress=False)
    joined.fit(data, batch_size=4, shuffle=False, epochs=2, accumulate=3, progress=False)
    statistics = [name for name in joined.state if "mean" in name or "var" in name]
    assert statistics
    for name in statistics:
        np.testing.assert_array_equal(joined.state[name], turns.state[name])
    assert joined.steps_done == 2
    said = [r.getMessage() for r in caplog.records if "accumulate" in r.getMessage()]
    assert len(said) == 1
    begun = "fit: accumulate=3: the batch updates the running statistic 'bn.mean', as in BatchNorm"
    assert said[0].startswith(begun)
    assert said[0].endswith("so a step differs from that of one batch with all rows")


def test_an_infinite_loss_in_a_window_is_found_before_its_step() -> None:
    data = affine_batch(8)
    data["x"][1, 0] = np.inf
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(0.1))
    )
    with pytest.raises(ortops.DivergedError) as raised:
        session.fit(data, batch_size=2, accumulate=4, shuffle=False, progress=False)
    assert "at step 1 (batch 1 of epoch 1): in the batch, 'x' has 1 of" in str(raised.value)
    assert "The step has not been made" in str(raised.value)
    assert session.steps_done == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("number", [0, 1.5])
def test_accumulate_is_a_count(number: Any) -> None:
    session = TrainingSession(trainable())
    with pytest.raises(OrtopsError, match=f"accumulate must be an integer >= 1, got {number}"):
        session.fit(rows(), accumulate=number, progress=False)


def test_what_no_session_would_open_is_not_written(tmp_path: Path) -> None:
    class Odd(Callback):
        def state(self) -> Any:
            return 5

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Odd()]))
    with pytest.raises(OrtopsError, match="callback Odd: `state` must return a dict, got 5"):
        session.save(tmp_path / "a.onnx")
    session.fit(rows(), **arguments())
    session.history[0]["note"] = "mine"  # type: ignore[assignment]
    message = "save: the history must have numbers by name, got 'note': 'mine' in epoch 1"
    with pytest.raises(OrtopsError, match=message):
        session.save(tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    del session.history[0]["note"]
    session.save(tmp_path / "a.onnx")


@pytest.mark.slow
def test_a_file_has_entries_as_they_are_when_it_is_saved(tmp_path: Path) -> None:
    """Each entry is made text once, and again if a callback has changed it."""

    class Late(Callback):
        def on_epoch(self, record: Record, session: Any) -> None:
            session.save(tmp_path / f"{record.epoch}.onnx")
            if record.epoch > 1:
                record.history[-2]["next"] = record.values["loss"]

    session = TrainingSession(trainable())
    history = session.fit(rows(), **arguments(epochs=5, callbacks=[Late()]))
    losses = history.history["loss"]
    for epoch in range(1, 6):
        found = TrainingSession(tmp_path / f"{epoch}.onnx").history
        assert found.history["loss"] == losses[:epoch]
        known = [entry["next"] for entry in found if "next" in entry]
        assert known == losses[1 : epoch - 1]


def test_a_history_belongs_to_who_has_it() -> None:
    session = TrainingSession(trainable())
    history = session.fit(rows(), **arguments())
    history.clear()
    session.history.clear()
    assert len(session.history) == EPOCHS
    session.fit(rows(), resume=True, **arguments(epochs=EPOCHS + 1)).clear()
    assert len(session.history) == EPOCHS + 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("entries", [10, 100])
def test_a_save_serializes_no_entry_twice(
    entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    plain = ortops.engine.training.history.plain_entry
    monkeypatch.setattr(
        "ortops.engine.training.history.plain_entry",
        lambda *given: made.append(1) or plain(*given),
    )

    class Saving(Callback):
        def on_epoch(self, record: Record, session: Any) -> None:
            session.save(tmp_path / "a.onnx")

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(epochs=entries, callbacks=[Saving()]))
    assert len(made) == entries
    assert len(TrainingSession(tmp_path / "a.onnx").history) == entries


def test_numbers_that_a_callback_adds_to_the_history_are_saved(tmp_path: Path) -> None:
    class Add(Callback):
        def on_epoch(self, record: Record, session: TrainingSession) -> None:
            record.values["share"] = np.float64(record.epoch / record.epochs)

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Add()]))
    session.save(tmp_path / "a.onnx")
    found = TrainingSession(tmp_path / "a.onnx").history
    assert found.history["share"][-1] == 1.0
