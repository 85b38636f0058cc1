"""Schedules without a number of steps, which `fit` sets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from test_distributed import Thread, in_ranks
from test_precision import half
from training_models import Arrays, assert_same_arrays, classifier, labelled

import ortops
from ortops import ArgumentError, ModelError, OrtopsError, TrainingSession, schedules
from ortops.callbacks import Callback
from ortops.optimizers import SGD, Adam

ROWS, BATCH, BATCHES, EPOCHS = 20, 6, 4, 3
DATA = labelled((6,), rows=ROWS)

EACH: dict[str, tuple[Any, dict[str, Any]]] = {
    "polynomial": (schedules.polynomial, {"power": 1.5, "end": 0.1, "warmup": 2}),
    "linear": (schedules.polynomial, {}),
    "cosine": (schedules.cosine, {"end": 0.05}),
    "restarts": (schedules.cosine, {"restarts": 1, "warmup": 2}),
    "one_cycle": (schedules.one_cycle, {"rise": 0.4}),
    "warmup_cosine": (schedules.warmup_cosine, {"warmup": 3}),
    "warmup_linear": (schedules.warmup_linear, {"warmup": 2, "end": 0.2}),
}


def model(rate: Any, net: Any = None, **more: Any) -> Any:
    optimizer = more.pop("optimizer", SGD)(rate)
    net = classifier() if net is None else net
    return ortops.build_training_model(net, loss="SoftmaxCrossEntropy", optimizer=optimizer, **more)


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "seed": 3, "progress": False}
    return {**settings, **more}


class Rates(Callback):
    """Keeps the learning rate of each step."""

    def __init__(self, stop: int = 0) -> None:
        self.found: list[float] = []
        self.stop = stop

    def on_step(self, record: Any, session: Any) -> None:
        self.found.append(record.values["learning_rate"])
        if record.step == self.stop:
            record.stop("the test says so")


def rates(make: Any, given: dict[str, Any], steps: int) -> list[float]:
    """Those of a schedule with a number of steps, whose formulas are tested against PyTorch's."""
    schedule = make(0.2, steps=steps, **given)
    return [schedule(n) for n in range(steps)]


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("case", EACH)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 12), ({"accumulate": 3, "epochs": 5}, 10), ({"max_steps": 7}, 7)],
    ids=str,
)
def test_the_steps_of_fit(case: str, settings: Any, steps: int) -> None:
    make, given = EACH[case]
    seen = Rates()
    session = TrainingSession(model(make(0.2, **given)))
    history = session.fit(DATA, callbacks=[seen], **arguments(**settings))
    assert seen.found == pytest.approx(rates(make, given, steps), rel=1e-6, abs=1e-9)
    known = TrainingSession(model(make(0.2, steps=steps, **given)))
    expected = known.fit(DATA, **arguments(**settings))
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)
    assert int(session.state["schedule_steps"]) == steps
    assert int(session.state["schedule_start"]) == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_resuming_continues(stop: int, tmp_path: Path) -> None:
    trainable = model(schedules.warmup_cosine(0.2, warmup=2), optimizer=Adam)
    whole = TrainingSession(trainable)
    wanted = whole.fit(DATA, **arguments())
    begun = TrainingSession(trainable)
    begun.fit(DATA, callbacks=[Rates(stop)], **arguments())
    begun.save(tmp_path / "saved.onnx")
    for session in (begun, TrainingSession(tmp_path / "saved.onnx")):
        assert session.fit(DATA, resume=True, **arguments()) == wanted
        assert_same_arrays(dict(session.state), dict(whole.state))


def test_more_epochs_keep_the_last_rate(caplog: pytest.LogCaptureFixture) -> None:
    session, seen = TrainingSession(model(schedules.cosine(0.2, end=0.5))), Rates()
    session.fit(DATA, **arguments())
    session.fit(DATA, callbacks=[seen], resume=True, **arguments(epochs=4))
    assert seen.found == pytest.approx([0.1] * BATCHES)
    assert "ends after 12 steps" in caplog.text


def test_another_training_starts_again() -> None:
    session = TrainingSession(model(schedules.cosine(0.2)))
    for count, before in ((3, 0), (2, 12)):
        seen = Rates()
        session.fit(DATA, callbacks=[seen], **arguments(epochs=count))
        steps = count * BATCHES
        wanted = rates(schedules.cosine, {}, steps)
        assert seen.found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        assert int(session.state["schedule_start"]) == before


def test_reset_forgets_the_number() -> None:
    session = TrainingSession(model(schedules.cosine(0.2)))
    session.fit(DATA, **arguments())
    session.reset()
    with pytest.raises(OrtopsError, match="has no number of steps"):
        session.step(DATA)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("kernels", ["onnx", "python"])
@pytest.mark.parametrize("net", ["float", "half"])
@pytest.mark.parametrize("groups", [None, {"w2": {"learning_rate": 0.02}}], ids=str)
def test_other_models(net: str, kernels: Any, groups: Any) -> None:
    given = {} if groups is None else {"groups": groups}
    made = half(classifier()) if net == "half" else classifier()
    data = {**DATA, "x": DATA["x"].astype(np.float16)} if net == "half" else DATA
    found = TrainingSession(model(schedules.cosine(0.2), made, **given), kernels=kernels)
    known = TrainingSession(model(schedules.cosine(0.2, steps=12), made, **given), kernels=kernels)
    history, expected = (each.fit(data, **arguments()) for each in (found, known))
    assert history.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-4)


def test_ranks_have_the_same() -> None:
    trainable = model(schedules.cosine(0.2))

    def work(communicator: Thread) -> Any:
        session = ortops.distributed.join(TrainingSession(trainable), communicator)
        return session.fit(DATA, **arguments())

    alone = TrainingSession(trainable).fit(DATA, **arguments())
    for history in in_ranks(work):
        assert history.history["learning_rate"] == alone.history["learning_rate"]


# ----------------------------------------------------------------------------- without a number


def test_steps_need_it() -> None:
    session = TrainingSession(model(schedules.cosine(0.2)))
    gradients = session.gradients(DATA)
    calls = (
        lambda: session.step(DATA),
        lambda: session.run_steps([DATA] * 3),
        lambda: session.apply(gradients),
        lambda: session.step(DATA, reduce=lambda gradients: None),
    )
    for call in calls:
        with pytest.raises(OrtopsError, match=r"schedule cosine\(.*\) has no number of steps"):
            call()
    assert session.steps_done == 0
    session.state["schedule_steps"] = 4
    found = [float(session.step(DATA)["scheduled_learning_rate"]) for _ in range(4)]
    assert found == pytest.approx(rates(schedules.cosine, {}, 4), rel=1e-6)


def test_data_of_unknown_length() -> None:
    def batches() -> Iterator[Arrays]:
        for start in range(0, ROWS, BATCH):
            yield {n: a[start : start + BATCH] for n, a in DATA.items()}

    session = TrainingSession(model(schedules.cosine(0.2)))
    with pytest.raises(ArgumentError, match="give max_steps=, or steps= of the schedule"):
        session.fit(batches, **arguments())
    seen = Rates()
    session.fit(batches, callbacks=[seen], **arguments(max_steps=6))
    assert seen.found == pytest.approx(rates(schedules.cosine, {}, 6), rel=1e-6)


def test_too_few_steps() -> None:
    """A warm-up that is longer is not finished: of 24 steps, 12 are made."""
    session = TrainingSession(model(schedules.warmup_linear(0.2, warmup=24)))
    history = session.fit(DATA, **arguments())
    assert history[-1]["learning_rate"] == pytest.approx(0.2 * 11 / 24)
    session = TrainingSession(model(schedules.one_cycle(0.2)))
    with pytest.raises(ArgumentError, match="rise must cover more than 1"):
        session.fit(DATA, **arguments(max_steps=3))


def test_a_schedule_of_unknown_length_has_no_values() -> None:
    schedule = schedules.cosine(0.2)
    with pytest.raises(ArgumentError, match="the number of steps is not known before fit"):
        schedule(3)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule.description == "cosine(restarts=0, end=0.0)"


@pytest.mark.slow
def test_a_step_graph_has_the_number_of_fit(tmp_path: Path) -> None:
    session = TrainingSession(model(schedules.cosine(0.2)))
    with pytest.raises(ModelError, match="save the session after that"):
        ortops.step_graph(session.model())
    with pytest.raises(ModelError, match="save the session after that"):
        ortops.export_step(session.model(), tmp_path / "step")
    session.fit(DATA, callbacks=[Rates(5)], **arguments())
    flat = ortops.lower(ortops.step_graph(session.model()))
    other = onnxruntime.InferenceSession(flat.SerializeToString())
    names = [value.name for value in other.get_outputs()]
    found = dict(zip(names, other.run(None, DATA), strict=True))
    wanted = rates(schedules.cosine, {}, 12)[5]
    assert float(found["scheduled_learning_rate"]) == pytest.approx(wanted, rel=1e-6)
    ortops.export_step(session.model(), tmp_path / "step")
