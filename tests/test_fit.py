"""TrainingSession.fit: epochs, batches, order, validation and the progress on a terminal."""

from __future__ import annotations

import errno
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from training_models import (
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    foreign,
    labelled,
    normalizing,
    softmax_cross_entropy,
)
from violations import all_violations

import ortops
from ortops import (
    ArgumentError,
    FeedError,
    OrtopsError,
    TrainingSession,
    build_training_model,
    schedules,
)
from ortops.engine.execution.execution import Execution
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.history import History
from ortops.engine.training.progress_bar import ProgressBar
from ortops.metrics import Accuracy, MeanAbsoluteError, StreamingMetric
from ortops.optimizers import SGD, Adam
from ortops.surgery import free_batch


def affine_session(rate: float = 0.1, **settings: Any) -> TrainingSession:
    return TrainingSession(
        build_training_model(affine(**settings), loss="MeanSquaredError", optimizer=SGD(rate))
    )


def classifying(**settings: Any) -> TrainingSession:
    model = classifier(dropout=0.25)
    return TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=Adam(0.01), **settings)
    )


def cut(data: Arrays, size: int) -> list[Arrays]:
    rows = len(data["x"])
    return [
        {name: array[start : start + size] for name, array in data.items()}
        for start in range(0, rows, size)
    ]


# ----------------------------------------------------------------------------- what it computes


def test_sees_every_row_once_in_each_epoch_in_another_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = affine_session(rate=0.0)
    data = affine_batch(10)
    data["x"][:, 0] = np.arange(10)
    seen: list[Any] = []
    step = Execution.step

    def watched(self: Execution, feeds: Any, *options: Any, **more: Any) -> Any:
        np.testing.assert_array_equal(
            feeds["targets"], data["targets"][feeds["x"][:, 0].astype(int)]
        )
        seen.append(feeds["x"][:, 0].astype(int).tolist())
        return step(self, feeds, *options, **more)

    monkeypatch.setattr(Execution, "step", watched)
    session.fit(data, epochs=2, batch_size=4, progress=False)
    assert [len(batch) for batch in seen] == [4, 4, 2] * 2
    first, second = np.concatenate(seen[:3]).tolist(), np.concatenate(seen[3:]).tolist()
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_gives_the_same_training(seed: int) -> None:
    data = labelled((6,), rows=20)
    sessions = [classifying(seed=3), classifying(seed=3), classifying(seed=3)]
    for session, order in zip(sessions, (seed, seed, seed + 1), strict=True):
        session.fit(data, epochs=2, batch_size=6, seed=order, progress=False)
    assert_same_arrays(dict(sessions[0].state), dict(sessions[1].state))
    assert np.any(sessions[0].state["w1"] != sessions[2].state["w1"])


@pytest.mark.slow
def test_a_resumed_training_is_the_one_that_never_stopped(tmp_path: Path) -> None:
    data = labelled((1, 4, 4), rows=20)
    model = build_training_model(normalizing(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    whole, part = TrainingSession(model), TrainingSession(model)
    settings: dict[str, Any] = {"batch_size": 6, "seed": 5, "progress": False}
    expected = whole.fit(data, epochs=4, **settings)
    history = part.fit(data, epochs=1, **settings)
    part.save(tmp_path / "checkpoint.onnx")
    resumed = TrainingSession(tmp_path / "checkpoint.onnx")
    history += resumed.fit(data, epochs=3, **settings)
    assert history == expected
    assert_same_arrays(dict(resumed.state), dict(whole.state))


@pytest.mark.slow
def test_learns() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6)).astype(np.float32)
    data = {"x": x, "labels": x[:, :3].argmax(axis=1)}
    session = TrainingSession(
        build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer=Adam(0.02))
    )
    history = session.fit(data, epochs=30, validation=data, metrics=["accuracy"], progress=False)
    assert history[0]["validation_accuracy"] < 0.8
    assert history[-1]["validation_accuracy"] > 0.95
    assert history[-1]["loss"] < 0.3 * history[0]["loss"]


# -------------------------------------------------------------------------- kinds of data


def test_an_iterator_serves_one_epoch() -> None:
    batches = cut(affine_batch(8), 4)
    assert len(affine_session().fit(iter(batches), progress=False)) == 1
    session, used_up = affine_session(), iter(batches)
    with pytest.raises(FeedError, match="data: list_iterator can be iterated over once, but there"):
        session.fit(iter(batches), epochs=2, progress=False)
    assert len(list(used_up)) == 2
    expected = "data: there are no batches; an iterator can be used for one epoch only, so give"
    with pytest.raises(FeedError, match=expected):
        session.fit(used_up, progress=False)
    assert session.steps_done == 0


def test_no_epoch_is_nothing() -> None:
    session = affine_session()
    assert session.fit(affine_batch(), epochs=0) == []
    assert session.steps_done == 0


def test_a_fixed_batch_size() -> None:
    session = affine_session(batch=4)
    session.fit(affine_batch(8), batch_size=4, progress=False)
    before = dict(session.state)
    for rows, size in ((8, 32), (10, 4), (8, 2)):
        expected = (
            rf"data: 'x' has {rows} rows in batches of {size}, but the model's batch size is fixed "
            "at 4; give batch_size=4 and a multiple of 4 rows, or a model whose batch dimension"
        )
        with pytest.raises(FeedError, match=expected):
            session.fit(affine_batch(rows), batch_size=size, progress=False)
        with pytest.raises(FeedError, match=expected):
            session.evaluate(affine_batch(rows), batch_size=size)
    with pytest.raises(FeedError, match="'x' has 10 rows"):
        session.fit(affine_batch(8), batch_size=4, validation=affine_batch(10), progress=False)
    assert_same_arrays(dict(session.state), before)


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ({}, {}, "data: there are no arrays; give one for each input"),
        (
            {"x": np.zeros((4, 3), np.float32), "targets": np.zeros((3, 2), np.float32)},
            {},
            "data: the arrays must have the same length, got 'x' 4, 'targets' 3",
        ),
        (affine_batch(0), {}, "data: there are no batches"),
        (
            {"x": affine_batch()["x"]},
            {},
            "feeds: input 'targets' is missing; the inputs are 'x', 'targets'",
        ),
        (
            {"x": affine_batch()["x"], "target": affine_batch()["targets"]},
            {},
            "feeds: there is no input 'target'; did you mean 'targets'?",
        ),
        ([3], {}, "order of the inputs, got int"),
        (3, {}, "data must be arrays by name or an iterable of batches, got int"),
    ],
)
def test_bad_data_change_nothing(
    data: Any, settings: dict[str, Any], message: str, progress: bool
) -> None:
    session = affine_session()
    before = dict(session.state)
    with pytest.raises(FeedError) as raised:
        session.fit(data, **({"progress": progress} | settings))
    assert message in str(raised.value)
    with pytest.raises(FeedError) as raised:
        session.evaluate(data, **settings)
    assert message.split(";")[0] in str(raised.value)
    assert_same_arrays(dict(session.state), before)
    session.fit(affine_batch(), progress=False)


def test_bad_arguments_are_found_before_training() -> None:
    session = affine_session()
    validation = affine_batch() | {"targets": np.zeros((5, 2), np.float32)}
    with pytest.raises(FeedError, match="data: the arrays must have the same length"):
        session.fit(affine_batch(), validation=validation, progress=False)
    with pytest.raises(OrtopsError, match="unknown metric 'acuracy'; did you mean 'accuracy'"):
        session.fit(affine_batch(), validation=affine_batch(), metrics=["acuracy"], progress=False)
    with pytest.raises(OrtopsError, match="'accuracy' is computed on validation data; give"):
        session.fit(affine_batch(), metrics=["accuracy"], progress=False)
    assert session.steps_done == 0


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "number"),
    [("epochs", -1), ("epochs", 1.5), ("epochs", "3"), ("epochs", True), ("seed", -1)],
)
def test_numbers_that_are_no_counts(name: str, number: Any) -> None:
    session = affine_session()
    expected = f"{name} must be an integer >= 0, got {number!r}"
    with pytest.raises(ArgumentError, match=expected):
        session.fit(affine_batch(), **{name: number}, progress=False)
    assert session.steps_done == 0


@pytest.mark.parametrize("size", [0, 2.5])
def test_batch_sizes_that_are_no_counts(size: Any) -> None:
    session = affine_session()
    before = dict(session.state)
    for call in (session.fit, session.evaluate):
        with pytest.raises(ArgumentError, match=f"batch_size must be an integer >= 1, got {size}"):
            call(affine_batch(), batch_size=size)
    assert_same_arrays(dict(session.state), before)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"resume": None}, "resume must be True or False, got None"),
        ({"progress": 1}, "progress must be True or False, got 1"),
        ({"stop_on_nan": "x"}, "stop_on_nan must be True or False, got 'x'"),
        ({"callbacks": 3}, "callbacks must be a list of callbacks, got 3"),
        (
            {"callbacks": [3]},
            "callbacks must be instances of subclasses of ortops.callbacks.Callback, got 3",
        ),
        ({"metrics": 3}, "metrics must be a list of metrics, got 3"),
        (
            {"schedule": 0.1},
            "schedule must be a function of the fraction of epochs that are finished, got 0.1",
        ),
    ],
)
def test_arguments_that_cannot_be_right(settings: dict[str, Any], message: str) -> None:
    session = affine_session()
    with pytest.raises(OrtopsError) as raised:
        session.fit(affine_batch(), validation=affine_batch(), **({"progress": False} | settings))
    assert message in str(raised.value)
    assert session.steps_done == 0


# ----------------------------------------------------------- validation, metrics, schedule


def test_validation_and_metrics() -> None:
    data, held_out = labelled((6,), rows=20), labelled((6,), rows=13, seed=1)

    def worst(outputs: Any, targets: Any) -> float:
        assert outputs.shape == (13, 3)
        assert targets.shape == (13,)
        return float(outputs.min())

    session = classifying()
    history = session.fit(
        data,
        epochs=2,
        batch_size=5,
        validation=held_out,
        metrics=["accuracy", worst],
        progress=False,
    )
    assert set(history[-1]) == {
        *("loss", "validation_loss", "validation_accuracy", "validation_worst"),
        *("learning_rate", "steps", "seconds"),
    }
    weights = session.state
    logits = np.tanh(held_out["x"] @ weights["w1"] + weights["b1"]) @ weights["w2"]
    expected = {
        "validation_loss": softmax_cross_entropy(logits, held_out["labels"]),
        "validation_accuracy": np.mean(logits.argmax(axis=1) == held_out["labels"]),
        "validation_worst": logits.min(),
    }
    found = {name: value for name, value in history[-1].items() if name in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    measured = session.evaluate(held_out, batch_size=5, metrics=["accuracy", worst])
    assert {f"validation_{name}": value for name, value in measured.items()} == found


def test_metrics_by_hand() -> None:
    def measured(metric: StreamingMetric, outputs: np.ndarray, targets: np.ndarray) -> float:
        metric.update(outputs, targets)
        return metric.result()

    logits = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]])
    assert measured(Accuracy(), logits, np.array([1, 1, 1])) == pytest.approx(2 / 3)
    assert measured(Accuracy(), np.array([[-1.0], [2.0]]), np.array([[0.0], [0.0]])) == 0.5
    pixels = np.zeros((2, 3, 4, 4))
    pixels[:, 2] = 1
    assert measured(Accuracy(), pixels, np.full((2, 4, 4), 2)) == 1.0
    assert measured(MeanAbsoluteError(), np.array([1.0, -1.0]), np.array([0.0, 1.0])) == 1.5


def test_a_metric_needs_one_input_to_compare_with() -> None:
    from ortops import op

    model = build_training_model(
        affine(), loss=lambda y: op.ReduceMean(y * y, keepdims=0), optimizer="SGD"
    )
    session = TrainingSession(model)
    data = {"x": affine_batch()["x"]}
    session.fit(data, progress=False)
    with pytest.raises(OrtopsError, match="metric 'accuracy': the loss has 0 inputs"):
        session.evaluate(data, metrics=["accuracy"])


# -------------------------------------------------------------------------- foreign models


def averaging() -> TrainingSession:
    """A model without a step counter: w is replaced by the batch's x."""
    x_row = helper.make_tensor_value_info("w_next", TensorProto.FLOAT, [2, 1])
    return TrainingSession(
        foreign(
            [
                helper.make_node("Transpose", ["x"], ["w_next"]),
                helper.make_node("ReduceMean", ["y"], ["cost"], keepdims=0),
            ],
            outputs=[helper.make_tensor_value_info("cost", TensorProto.FLOAT, []), x_row],
            updates={"w": "w_next"},
        )
    )


def test_without_a_step_counter_the_order_still_changes() -> None:
    session = averaging()
    data = {"x": np.arange(40, dtype=np.float32).reshape(20, 2)}
    last = []
    for _ in range(4):
        session.fit(data, batch_size=1, progress=False)
        last.append(float(session.state["w"][0, 0]))
    assert len(set(last)) > 1
    assert session.steps_done == 80


# ------------------------------------------------------------------------------- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progress bar is drawn after each step, however soon it is."""
    monkeypatch.setattr("ortops.engine.training.progress_bar._INTERVAL", 0.0)


class AsciiTerminal(Terminal):
    encoding = "ascii"

    def write(self, text: str) -> int:
        text.encode("ascii")
        return super().write(text)


@pytest.mark.slow
def test_a_file_gets_one_line_per_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    session = classifying()
    data = labelled((6,), rows=10)
    session.fit(data, epochs=11, batch_size=4, validation=data, metrics=["accuracy"])
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 11
    assert "\x1b" not in err
    assert "\r" not in err
    for number, line in enumerate(lines, 1):
        pattern = (
            rf"epoch {number:>2}/11  3/3  loss \d+\.\d{{4}}  validation_loss \d+\.\d{{4}}"
            r"  validation_accuracy \d\.\d{4}  [\d,]+ samples/s  \d+\.\d s"
        )
        assert re.fullmatch(pattern, line), line


@pytest.mark.usefixtures("drawn_at_once")
def test_a_terminal_sees_the_bar_move(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    affine_session().fit(affine_batch(12), epochs=2, batch_size=3)
    drawn = stream.getvalue()
    assert drawn.count("\n") == 2
    first = drawn.split("\n")[0].split("\r\x1b[2K")[1:]
    assert [re.search(r"(█*)░*  (\d)/4", text).groups() for text in first] == [  # type: ignore[union-attr]
        ("█" * 6, "1"),
        ("█" * 12, "2"),
        ("█" * 18, "3"),
        ("█" * 24, "4"),
        ("█" * 24, "4"),
    ]


def test_a_terminal_without_unicode() -> None:
    stream = AsciiTerminal()
    bar = ProgressBar(1, 1, 4, stream=stream)
    bar.update(2, 0, dict)
    bar.finish({"loss": 1.0})
    assert re.fullmatch(
        r"\repoch 1/1  #{12}\.{12}  2/4  loss 1\.0000  \d+\.\d s\n",
        stream.getvalue().split("left")[-1],
    )


@pytest.mark.usefixtures("drawn_at_once")
@pytest.mark.parametrize("live", [True, False])
def test_a_stream_that_takes_nothing_more_does_not_end_the_training(
    live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def isatty(self) -> bool:
            return live

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sys.stderr", Closed())
    session = affine_session()
    session.fit([affine_batch()] * 3, epochs=2)
    assert session.steps_done == 6


def test_batches_of_unknown_number_are_counted() -> None:
    stream = io.StringIO()
    bar = ProgressBar(2, 3, None, stream=stream)
    bar.update(7, 0, dict)
    bar.finish({"loss": 0.5})
    assert re.fullmatch(r"epoch 2/3  7  loss 0\.5000  \d+\.\d s\n", stream.getvalue())


def test_no_progress_when_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    affine_session().fit(affine_batch(), progress=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("drawn_at_once")
def test_a_line_that_was_begun_is_ended_when_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    batches = [affine_batch(), {"x": affine_batch()["x"]}]
    with pytest.raises(FeedError):
        affine_session().fit(batches)
    assert stream.getvalue().endswith("\n")


def drawn_lines(stream: io.StringIO) -> list[str]:
    """Returns what a terminal shows after each drawing."""
    return [text for line in stream.getvalue().split("\n") for text in line.split("\r\x1b[2K")[1:]]


@pytest.mark.usefixtures("drawn_at_once")
@pytest.mark.parametrize("columns", [30, 50, 80, 200])
def test_a_line_that_moves_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    bar = ProgressBar(1, 10, 40, stream=stream)
    for done in (1, 20, 40):
        bar.update(done, 32 * done, lambda: {"loss": 0.5, "loss_of_something": 1.0})
    lines = drawn_lines(stream)
    assert len(lines) == 3
    for done, line in zip((1, 20, 40), lines, strict=True):
        assert len(line) < columns
        assert line.startswith("epoch  1/10  ")
        assert f"  {done}/40" in line
    if columns == 200:
        assert "█" * 12 + "░" * 12 in lines[1]
        assert re.search(r"loss 0\.5000 .* [\d,]+ samples/s  \d:\d\d left$", lines[1])


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0:00"), (61.2, "1:01"), (3599.8, "1:00:00"), (7325, "2:02:05")]
)
def test_time_that_is_left(seconds: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the batches are done, so that what is left takes as long as what is done."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    bar = ProgressBar(1, 1, 8, done=2, stream=stream)  # two were done before
    now[0] += seconds
    bar.update(5, 50, dict)
    assert drawn_lines(stream)[0].endswith(f"  {shown} left")


def test_it_is_drawn_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    stream = Terminal()
    bar = ProgressBar(1, 1, 1000, stream=stream)
    for done in range(1, 1001):
        now[0] += 0.004
        bar.update(done, done, dict)
    assert 30 <= len(drawn_lines(stream)) <= 40


class Cell:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, what: object) -> None:
        self.shown.append(repr(what))


@pytest.mark.usefixtures("drawn_at_once")
def test_a_notebook_draws_in_one_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells: list[Cell] = []

    def display(what: object, *, display_id: bool) -> Cell:
        assert display_id
        cells.append(Cell())
        return cells[-1]

    shell = types.SimpleNamespace(kernel=object())
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)  # type: ignore[arg-type]
    display_module: Any = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", display_module)
    affine_session().fit(affine_batch(12), epochs=2, batch_size=3)
    assert capsys.readouterr() == ("", "")
    assert len(cells) == 2
    assert len(cells[0].shown) == 5
    assert re.fullmatch(r"epoch 2/2  █{24}  4/4  loss .* \d\.\d s", cells[1].shown[-1])


@pytest.mark.usefixtures("drawn_at_once")
def test_the_line_of_a_stopped_epoch_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            record.stop("enough")

    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    affine_session().fit(affine_batch(12), batch_size=3, callbacks=[Stop()])
    assert stream.getvalue().endswith("\n")
    assert len(drawn_lines(stream)) == 1


# -------------------------------------------------------------------------- callbacks, history


def test_callbacks_see_each_step_and_epoch() -> None:
    seen: list[Any] = []

    class See(Callback):
        def on_begin(self, record: Record, session: Any) -> None:
            seen.append(("begin", record.epoch, record.batch, record.step, record.values))

        def on_step(self, record: Record, session: Any) -> None:
            assert session is fitted
            assert record.step == session.steps_done
            seen.append(("step", record.epoch, record.batch, record.samples, record.values))

        def on_epoch(self, record: Record, session: Any) -> None:
            assert record.values == record.history[-1]
            assert (record.epochs, record.batches) == (2, 3)
            seen.append(("epoch", record.epoch, record.batch, record.samples, len(record.history)))

        def on_end(self, record: Record, session: Any) -> None:
            assert record.values == record.history[-1]
            seen.append(("end", record.epoch, record.batch, record.step, record.interrupted))

    data = affine_batch(10)
    by_hand, fitted = affine_session(), affine_session()
    fitted.fit(data, epochs=2, batch_size=4, shuffle=False, callbacks=[See()], progress=False)
    expected: list[Any] = [("begin", 1, 0, 0, {})]
    rate = float(np.float32(0.1))
    for epoch in (1, 2):
        for number, batch in enumerate(cut(data, 4), 1):
            values = {"loss": float(by_hand.step(batch)["loss"]), "learning_rate": rate}
            expected.append(("step", epoch, number, min(4 * number, 10), values))
        expected.append(("epoch", epoch, 3, 10, epoch))
    assert seen == [*expected, ("end", 2, 3, 6, "")]


def test_the_rate_of_a_step_is_that_of_its_schedule() -> None:
    schedule = schedules.polynomial(0.5, steps=8)
    session = TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(schedule))
    )
    rates: list[float] = []

    class Rates(Callback):
        def on_step(self, record: Record, session: Any) -> None:
            rates.append(record.values["learning_rate"])

    history = session.fit(
        affine_batch(8), epochs=2, batch_size=2, callbacks=[Rates()], progress=False
    )
    np.testing.assert_allclose(rates, [0.5 * (1 - step / 8) for step in range(8)], rtol=1e-6)
    assert history.history["learning_rate"] == [rates[3], rates[7]]
    with pytest.raises(OrtopsError, match="schedule: the model has the schedule "):
        session.fit(affine_batch(8), schedule=lambda done: 0.1, progress=False)


def test_a_history_is_a_list_and_a_table() -> None:
    history = History([{"loss": 1.25, "steps": 3, "seconds": 0.5}])
    history += [{"loss": 0.5, "steps": 6, "seconds": 1.0, "validation_loss": 0.75}]
    assert history.history["loss"] == [1.25, 0.5]
    assert np.isnan(history.history["validation_loss"][0])
    assert history.table().splitlines() == [
        "epoch  loss  steps  seconds  validation_loss",
        "    1  1.25      3      0.5              nan",
        "    2   0.5      6        1             0.75",
    ]
    assert history._repr_html_().startswith("<table><tr><th>epoch</th><th>loss</th>")
    assert "<tr><td>2</td><td>0.5</td><td>6</td>" in history._repr_html_()
    assert history == [{**entry, "seconds": 7.0} for entry in history]
    assert history != history[:1]
    assert history != [{"loss": 1.0}, history[1]]
    assert History().table() == "epoch"


@pytest.mark.slow
def test_all_rows_in_one_batch_of_a_fixed_size_need_no_batch_size() -> None:
    for size in (1, 4):
        session, rows = affine_session(batch=size), affine_batch(size)
        loss = session.evaluate([rows])["loss"]
        assert session.evaluate(rows)["loss"] == loss
        (y,) = session.predict({"x": rows["x"]}).values()
        assert len(y) == size
        assert session.fit(rows, progress=False, validation=rows)[-1]["steps"] == 1
        assert session.evaluate(rows)["loss"] != loss


def test_a_batch_of_one_row_takes_several_only_one_by_one() -> None:
    session, rows = affine_session(batch=1), affine_batch(3)
    each = [{name: array[n : n + 1] for name, array in rows.items()} for n in range(3)]
    assert session.evaluate(rows, batch_size=1)["loss"] == session.evaluate(each)["loss"]
    (y,) = session.predict({"x": rows["x"]}, batch_size=1).values()
    expected = [session.predict([{"x": one["x"]}])["y"][0] for one in each]
    np.testing.assert_array_equal(y, expected)
    for use in (session.evaluate, session.predict, session.fit):
        with pytest.raises(FeedError, match=r"fixed at 1; give batch_size=1 .*free_batch\(model\)"):
            use(rows if use != session.predict else {"x": rows["x"]})


HIDDEN = """<ir_version: 10, opset_import: ["": 21]>
    six (float[N, 3, 4] x) => (float[N, 2] y)
    <float[4, 2] w = {1, 0, 0, 1, 1, 1, 0, 2}, int64[2] flat = {18, 4}, int64[3] back = {6, 3, 2},
     int64[1] axis = {1}> {
        r = Reshape (x, flat)  m = MatMul (r, w)  h = Reshape (m, back)
        y = ReduceSum <keepdims = 0> (h, axis)
    }"""


@pytest.mark.slow
def test_a_batch_size_that_nodes_have_fixed_is_explained() -> None:
    model = onnx.parser.parse_model(HIDDEN)
    x = np.ones((4, 3, 4), np.float32)
    rows = {"x": x, "targets": np.zeros((4, 2), np.float32)}
    built = build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(built)
    uses = {
        "step": lambda: session.step(rows),
        "gradients": lambda: session.gradients(rows),
        "fit": lambda: session.fit(rows, progress=False),
        "evaluate": lambda: session.evaluate(rows),
        "predict": lambda: session.predict({"x": x}),
        "Function": lambda: ortops.Function(model)(x),
        "value_and_grad": lambda: ortops.Function(model).vjp(x),
    }
    with all_violations() as check:
        for name, use in uses.items():
            with check(name), pytest.raises(OrtopsError, match=r"surgery\.free_batch\(model\)"):
                use()
    session = TrainingSession(
        build_training_model(free_batch(model), loss="MeanSquaredError", optimizer="SGD")
    )
    assert session.predict({"x": x})["y"].shape == (4, 2)


def test_drop_last_leaves_out_a_smaller_batch() -> None:
    """Other rows in each epoch, as the order is drawn before; the validation keeps all rows."""
    data = affine_batch(11)
    session, seen = affine_session(), []

    class Rows(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            seen.append((record.batch, record.batches, record.samples))

    call: dict[str, Any] = {"batch_size": 4, "progress": False, "callbacks": [Rows()]}
    history = session.fit(data, epochs=2, drop_last=True, validation=data, **call)
    assert seen == [(1, 2, 4), (2, 2, 8)] * 2
    assert session.steps_done == history[-1]["steps"] == 4
    assert history[-1]["validation_loss"] == session.evaluate(data)["loss"]
    expected = affine_session()
    for epoch in (0, 1):
        order = np.random.default_rng((0, 2 * epoch)).permutation(11)[:8]
        for rows in (order[:4], order[4:]):
            expected.step({name: array[rows] for name, array in data.items()})
    assert_same_arrays(dict(session.state), dict(expected.state))
    wrong = (([data], "got batches"), (affine_batch(3), "needs 4 rows, got 3"))
    for given, message in wrong:
        with pytest.raises(FeedError, match=message):
            session.fit(given, drop_last=True, batch_size=4, progress=False)
    with pytest.raises(OrtopsError, match="must have 2 batches, as in the training to resume"):
        session.fit(data, epochs=3, resume=True, **call)
