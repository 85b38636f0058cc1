"""A training that ends anywhere goes on from its file as if it had never stopped."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from test_precision import half
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
from ortops.optimizers import SGD, Adam
from ortops.training.callback import Callback, Record
from ortops.training.position import POSITION_KEY

EPOCHS = 3
ROWS, BATCH = 20, 6  # four batches an epoch, the last of two rows
BATCHES = 4
STEPS = EPOCHS * BATCHES


class StoppedError(Exception):
    """What ends a training from the outside."""


class StopAt(Callback):
    """Ends a training after a step, in one of the ways in which it may end.

    Args:
        step: The number of batches after which it ends.
        way: ``"stop"`` or ``"error"``.
    """

    def __init__(self, step: int, way: str = "stop") -> None:
        self.step, self.way = step, way

    def on_step(self, record: Record, session: Any) -> None:
        if (record.epoch - 1) * BATCHES + record.batch >= self.step:
            if self.way == "error":
                raise StoppedError
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
    model: onnx.ModelProto, data: Any, stops: list[int], path: Path, way: str, **settings: Any
) -> tuple[TrainingSession, Any]:
    """Trains with a new session of the saved file after each stop."""
    onnx.save(model, path)
    begun = TrainingSession(path)
    for stop in stops:
        try:
            begun.fit(data, resume=True, **arguments(callbacks=[StopAt(stop, way)], **settings))
        except StoppedError:
            assert way == "error"
        begun.save(path)
        begun = TrainingSession(path)
    history = begun.fit(data, resume=True, **arguments(callbacks=[StopAt(STEPS + 1)], **settings))
    return begun, history


def assert_same(found: tuple[TrainingSession, Any], expected: tuple[TrainingSession, Any]) -> None:
    assert_same_arrays(dict(found[0].state), dict(expected[0].state))
    assert found[1] == expected[1]
    assert len(expected[1]) == EPOCHS


# ------------------------------------------------------------------------------ the same weights


@pytest.mark.parametrize("optimizer", list(ortops.optimizers.OPTIMIZERS))
@hypothesis.settings(max_examples=3)
@hypothesis.given(
    stops=st.sets(st.integers(1, STEPS), min_size=1, max_size=3),
    way=st.sampled_from(["stop", "error"]),
)
def test_any_stop_with_any_optimizer(
    tmp_path_factory: pytest.TempPathFactory, optimizer: str, way: str, stops: set[int]
) -> None:
    model = trainable(optimizer=optimizer)
    path = tmp_path_factory.mktemp("resumed") / "saved.onnx"
    found = in_parts(model, rows(), sorted(stops), path, way)
    assert_same(found, whole(model, rows()))


SETTINGS: dict[str, dict[str, Any]] = {
    "no shuffling": {"fit": {"shuffle": False}},
    "validation": {"fit": {"validation": labelled((6,), rows=7), "metrics": ["accuracy"]}},
    "schedule of epochs": {"fit": {"schedule": lambda done: 0.1 * (1 - done)}},
    "schedule": {
        "model": {"optimizer": Adam(schedules.warmup_cosine(0.01, steps=STEPS, warmup=3))}
    },
    "average": {"model": {"ema_decay": 0.9}},
    "clipping": {"model": {"clip_norm": 0.1}},
}
"""What a training may have besides."""


@pytest.mark.parametrize("name", list(SETTINGS))
@hypothesis.settings(max_examples=3)
@hypothesis.given(stops=st.sets(st.integers(1, STEPS), min_size=1, max_size=3))
def test_any_stop_with_whatever_else_is_set(
    tmp_path_factory: pytest.TempPathFactory, name: str, stops: set[int]
) -> None:
    settings = SETTINGS[name].get("fit", {})
    model = trainable(**SETTINGS[name].get("model", {}))
    path = tmp_path_factory.mktemp("resumed") / "saved.onnx"
    found = in_parts(model, rows(), sorted(stops), path, "stop", **settings)
    assert_same(found, whole(model, rows(), **settings))


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_running_statistics(stop: int, tmp_path: Path) -> None:
    data = labelled((1, 4, 4), rows=ROWS)
    settings: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam"}
    model = build_training_model(normalizing(), **settings)
    assert_same(in_parts(model, data, [stop], tmp_path / "saved.onnx", "stop"), whole(model, data))


@pytest.mark.parametrize("stop", [1, 2, 5, 9])
def test_steps_that_float16_skips_are_batches(stop: int, tmp_path: Path) -> None:
    """The first scale of the loss is too large, and is halved until it is not."""
    data = labelled((1, 4, 4), rows=ROWS)
    data["x"] = data["x"].astype(np.float16)
    first = TrainingSession(
        build_training_model(half(normalizing()), loss="SoftmaxCrossEntropy", optimizer="Adam")
    )
    first.state["loss_scale"] = 2.0**24
    model = first.model()
    expected = whole(model, data)
    skipped = STEPS - expected[0].steps_done
    assert 1 < skipped < STEPS
    assert_same(in_parts(model, data, [stop], tmp_path / "saved.onnx", "stop"), expected)


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_batches_that_are_given(stop: int, tmp_path: Path) -> None:
    data = rows()
    batches = [{n: a[at : at + BATCH] for n, a in data.items()} for at in range(0, ROWS, BATCH)]
    expected = whole(trainable(), batches)
    for given in (batches, lambda: iter(batches)):
        found = in_parts(trainable(), given, [stop], tmp_path / "saved.onnx", "stop")
        assert_same(found, expected)


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
    found = in_parts(model, data, [stop], tmp_path / "saved.onnx", "stop", batch_size=1)
    expected = whole(model, data, batch_size=1)
    assert_same(found, expected)
    assert found[0].steps_done == expected[0].steps_done == STEPS


def test_a_session_goes_on_without_a_file() -> None:
    session = TrainingSession(trainable())
    for stop in (3, 4, 9):
        session.fit(rows(), resume=True, **arguments(callbacks=[StopAt(stop)]))
        assert session.steps_done == stop
    history = session.fit(rows(), resume=True, **arguments(callbacks=[StopAt(99)]))
    assert_same((session, history), whole(trainable(), rows()))


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 4}, "begun with epochs=3, and 4 is given; give the same"),
        ({"batch_size": 5}, "begun with batch_size=6, and 5 is given"),
        ({"shuffle": False}, "begun with shuffle=True, and False is given"),
        ({"seed": 6}, "begun with seed=5, and 6 is given"),
        ({"callbacks": []}, "had the callback Counting, which is not given; give one, or leave"),
        ({"data": labelled((6,), rows=19)}, "begun with data of 20 rows, and 19 are given"),
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


def test_what_is_no_callback() -> None:
    session = TrainingSession(trainable())
    with pytest.raises(OrtopsError, match=r"callbacks: <class .* was given; an inst"):
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "metadata_props 'ortops.fit': Expecting property name"),
        ("[" * 100_000, "metadata_props 'ortops.fit': "),
        ("[]", "it is a list; what TrainingSession.save writes is accepted"),
        ({"epoch": 0}, "its 'epoch' is 0; an integer >= 1 is accepted"),
        ({"epoch": True}, "its 'epoch' is True; an integer >= 1 is accepted"),
        ({"batch": -1}, "its 'batch' is -1; an integer >= 0 is accepted"),
        ({"batch": 2**63}, "an integer >= 0 is accepted"),
        ({"rows": 1.5}, "its 'rows' is 1.5; an integer >= 0 or null is accepted"),
        ({"shuffle": 1}, "its 'shuffle' is 1; true or false is accepted"),
        ({"totals": {}}, "its 'totals' is {}; an array of numbers is accepted"),
        ({"totals": [10**400]}, "an array of numbers is accepted"),
        ({"history": [3]}, "its 'history' is [3]; an array of objects of numbers is accepted"),
        (
            {"callbacks": [1]},
            "its 'callbacks' is [1]; an array of objects of 'class' and",
        ),
        ({"seconds": "x"}, "its 'seconds' is 'x'; a number >= 0 is accepted"),
        ({"seed": None}, "its 'seed' is None; an integer >= 0 is accepted"),
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
    with pytest.raises(ModelError, match="its 'first_step' is missing; an integer >= 0 is acce"):
        TrainingSession(model)


def test_a_state_that_is_no_json_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Odd(Callback):
        def state(self) -> dict[str, Any]:
            return {"best": np.float32(1)}

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Odd()]))
    with pytest.raises(OrtopsError, match="a state of one cannot be saved: Object of type float32"):
        session.save(tmp_path / "saved.onnx")
    assert not (tmp_path / "saved.onnx").exists()


def test_a_position_that_could_not_be_read_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = TrainingSession(trainable())
    session.fit(rows(), **arguments())
    limit = len(json.dumps(position_in(session.model())))
    monkeypatch.setattr("ortops.graph.limits.LIMITS.metadata_bytes", limit - 100)
    assert position_in(session.model()) is None
    assert "it is left out: the file does not resume it" in caplog.text


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


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "Adagrad"])
@pytest.mark.parametrize("loss", ["SoftmaxCrossEntropy", "mean and weights"])
def test_accumulated_batches_are_the_joined_batch(loss: str, optimizer: str) -> None:
    """Windows of 12 and 8 rows, as 6 + 6 and 6 + 2: the short one weighs by its rows."""
    chosen: Any = "SoftmaxCrossEntropy"
    data = rows()
    if loss != chosen:  # rows that do not count: each part is divided by another number
        chosen = ortops.losses.SoftmaxCrossEntropy(ignore_index=-100)
        data["labels"] = np.where(np.arange(ROWS) % 3 == 1, -100, data["labels"])
    model = build_training_model(classifier(), loss=chosen, optimizer=optimizer)
    joined, parts = TrainingSession(model), TrainingSession(model)
    expected = joined.fit(data, epochs=3, batch_size=12, seed=1, progress=False)
    found = parts.fit(data, epochs=3, batch_size=6, seed=1, accumulate=2, progress=False)
    assert parts.steps_done == joined.steps_done == 6
    for name, array in joined.state.items():
        np.testing.assert_allclose(parts.state[name], array, rtol=2e-4, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(found.columns["loss"], expected.columns["loss"], rtol=1e-5)


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
@pytest.mark.parametrize("kind", ["Dropout", "BatchNormalization"])
def test_accumulated_batches_go_on_at_whole_steps(kind: str, stop: int, tmp_path: Path) -> None:
    model, data = trainable(ema_decay=0.5), rows()
    if kind == "BatchNormalization":
        data = labelled((1, 4, 4), rows=ROWS)
        model = build_training_model(normalizing(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    found = in_parts(model, data, [stop], tmp_path / "saved.onnx", "stop", accumulate=3)
    expected = whole(model, data, accumulate=3)
    assert_same(found, expected)
    assert found[0].steps_done == 2 * EPOCHS


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
    begun = (
        "fit: accumulate=3: the batch sets the running statistic 'bn.mean', as BatchNormalization"
    )
    assert said[0].startswith(begun)
    assert said[0].endswith("so that a step is not that of one batch of all rows")


def test_an_infinite_loss_in_a_window_is_found_before_its_step() -> None:
    data = affine_batch(8)
    data["x"][1, 0] = np.inf
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(0.1))
    )
    with pytest.raises(ortops.DivergedError) as raised:
        session.fit(data, batch_size=2, accumulate=4, shuffle=False, progress=False)
    assert "in step 1 (batch 1 of epoch 1); in the batch 'x' has 1 of" in str(raised.value)
    assert "That step has not been made" in str(raised.value)
    assert session.steps_done == 0


@pytest.mark.parametrize("number", [0, 1.5])
def test_accumulate_is_a_count(number: Any) -> None:
    session = TrainingSession(trainable())
    with pytest.raises(OrtopsError, match=f"accumulate is {number}; an integer of at least 1 is"):
        session.fit(rows(), accumulate=number, progress=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("state", r"save: 'callbacks' of fit is \[.*5.*could not be read again; an array of objec"),
        ("entry", r"save: 'history' of fit is .*'mine'.*; an array of objects of numbers is accep"),
    ],
)
def test_what_no_session_would_open_is_not_written(
    spoil: str, message: str, tmp_path: Path
) -> None:
    class Odd(Callback):
        def on_epoch(self, record: Record, session: TrainingSession) -> None:
            if spoil == "entry":
                record.values["note"] = "mine"  # type: ignore[assignment]

        def state(self) -> Any:
            return 5 if spoil == "state" else {}

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Odd()]))
    with pytest.raises(OrtopsError, match=message):
        session.save(tmp_path / "a.onnx")
    assert list(tmp_path.iterdir()) == []
    session.reset()
    session.save(tmp_path / "a.onnx")


def test_numbers_that_a_callback_adds_to_the_history_are_saved(tmp_path: Path) -> None:
    class Add(Callback):
        def on_epoch(self, record: Record, session: TrainingSession) -> None:
            record.values["share"] = np.float64(record.epoch / record.epochs)

    session = TrainingSession(trainable())
    session.fit(rows(), **arguments(callbacks=[Add()]))
    session.save(tmp_path / "a.onnx")
    found = TrainingSession(tmp_path / "a.onnx").history
    assert found.columns["share"][-1] == 1.0
