"""Sessions of several ranks that train as one: `ortops.distributed`.

Ranks are threads here, each with a session of its own, and processes of MPI where that is there.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from test_entries import rows as heads
from test_entries import two_heads
from test_precision import BFLOAT16, batch, half, reshaped
from training_models import (
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    labelled,
    normalizing,
)
from waiting import until

import ortops
from ortops import TrainingSession
from ortops.callbacks import Callback, Checkpoint, CSVLog, EarlyStopping
from ortops.distributed import JoinedSession, join, mpi
from ortops.errors import (
    ArgumentError,
    DivergedError,
    FeedError,
    ModelError,
    OrtopsError,
    UnsupportedError,
)

ROOT = Path(__file__).parents[1]
ROUNDING = 2e-6
"""By how much float32 sums of parts may differ from the sum of all, for numbers around 1."""

Result = TypeVar("Result")


class Room:
    """Where threads meet."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.arrays: list[Any] = [None] * size


class Thread:
    """A communicator of threads. Sums are made in the order of the ranks."""

    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, len(room.arrays)
        self.calls = 0

    def sum(self, array: np.ndarray[Any, Any]) -> None:
        assert array.dtype in (np.float32, np.float64)
        assert array.ndim == 1
        array[:] = sum(self._all(array))

    def broadcast(self, array: np.ndarray[Any, Any]) -> None:
        assert array.dtype == np.uint8
        array[:] = self._all(array)[0]

    def _all(self, array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        self.calls += 1
        self.room.arrays[self.rank] = array.copy()
        self.room.barrier.wait()
        arrays = list(self.room.arrays)
        self.room.barrier.wait()
        return arrays


def in_ranks(work: Callable[[Thread], Result], size: int = 2) -> list[Result]:
    """Returns what a function returns in each rank; where one fails, no other waits for it."""
    room = Room(size)
    raised: list[BaseException] = []

    def run(rank: int) -> Result:
        try:
            return work(Thread(room, rank))
        except BaseException as error:
            raised.append(error)
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        for future in futures:
            future.exception()
    if raised:
        raise raised[0]
    return [future.result() for future in futures]


def build(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    settings: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam", **options}
    return ortops.build_training_model(model, **settings)


def fit_joined(
    model: Any, data: Any, size: int = 2, **options: Any
) -> tuple[list[JoinedSession], list[Any]]:
    """Returns the joined sessions, and what `fit` returns in each."""

    def work(communicator: Thread) -> tuple[JoinedSession, Any]:
        session = join(TrainingSession(model), communicator)
        return session, session.fit(data, progress=False, **options)

    found = in_ranks(work, size)
    return [session for session, _ in found], [history for _, history in found]


def assert_near(found: TrainingSession, expected: TrainingSession) -> None:
    assert list(found.state) == list(expected.state)
    for name, array in expected.state.items():
        np.testing.assert_allclose(
            found.state[name], array, rtol=ROUNDING, atol=ROUNDING, err_msg=name
        )


def losses(history: Any) -> list[float]:
    return [epoch["loss"] for epoch in history]


# ------------------------------------------------------------------- as one with the joined batch


SGD = ortops.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": SGD},
        {"optimizer": SGD, "clip_norm": 0.1},
        {"optimizer": SGD, "loss": ortops.losses.SoftmaxCrossEntropy(ignore_index=2)},
        {
            "optimizer": ortops.optimizers.SGD(0.01, momentum=0.9),
            "loss": ortops.losses.SoftmaxCrossEntropy(reduction="sum"),
        },
    ],
    ids=["mean", "clipped", "some labels do not count", "sum"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_fit_is_that_of_one_process(options: Any, accumulate: int, size: int) -> None:
    """Also with parts of different sizes, and with a last batch in which a rank has no row."""
    model = build(classifier(), **options)
    data = labelled((6,), rows=33)
    data["labels"] = np.where(np.arange(33) % 12, data["labels"] % 2, 2)
    arguments: dict[str, Any] = {"epochs": 3, "batch_size": 8, "accumulate": accumulate}
    alone = TrainingSession(model)
    history = alone.fit(data, progress=False, **arguments)
    sessions, histories = fit_joined(model, data, size, **arguments)
    assert_near(sessions[0], alone)
    np.testing.assert_allclose(losses(histories[0]), losses(history), rtol=ROUNDING)
    clipped = "clip_norm" in options
    norms = [[epoch["gradient_norm"] for epoch in each if clipped] for each in histories]
    wanted = [epoch["gradient_norm"] for epoch in history if clipped]
    np.testing.assert_allclose(norms[0], wanted, rtol=ROUNDING)
    for session, other in zip(sessions[1:], histories[1:], strict=True):
        assert_same_arrays(dict(session.state), dict(sessions[0].state))
        assert losses(other) == losses(histories[0])
    assert norms[1:] == norms[:1] * (size - 1)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "weights", [{"class_weight": "balanced"}, {"sample_weight": np.arange(33) % 4 / 2}]
)
def test_weights_of_rows_are_those_of_one_process(weights: Any, accumulate: int) -> None:
    """Also where all rows of a rank have weight 0."""
    model = build(classifier(), loss=ortops.losses.SoftmaxCrossEntropy(sample_weight="weight"))
    data = labelled((6,), rows=33)
    if "sample_weight" in weights:
        weights = {"sample_weight": np.where(np.arange(33) < 4, 0, weights["sample_weight"])}
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 8, "accumulate": accumulate, **weights}
    alone = TrainingSession(model)
    history = alone.fit(data, progress=False, shuffle=False, **arguments)
    for file in (model, build(classifier(), loss="SoftmaxCrossEntropy")):
        sessions, histories = fit_joined(file, data, shuffle=False, **arguments)
        assert_near(sessions[0], alone)
        np.testing.assert_allclose(losses(histories[0]), losses(history), rtol=ROUNDING)


@pytest.mark.slow
def test_accumulated_batches_are_exchanged_once() -> None:
    """However many make an update, it takes as many exchanges as one batch does."""
    model = build(classifier(), optimizer=SGD)
    data = labelled((6,), rows=64)

    def work(communicator: Thread) -> list[int]:
        calls = []
        for accumulate in (1, 2, 16):
            session = join(TrainingSession(model), communicator)
            before = communicator.calls
            size = 32 // accumulate
            session.fit(data, batch_size=size, accumulate=accumulate, epochs=3, progress=False)
            assert session.steps_done == 6
            calls.append(communicator.calls - before)
        return calls

    for first, *others in in_ranks(work):
        assert others == [first, first]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_and_batches_without_labels(accumulate: int, size: int) -> None:
    """Parts count as much as they have labels, and those without any not at all."""
    loss = ortops.losses.SoftmaxCrossEntropy(ignore_index=-100, weights=(1.0, 2.0, 0.5))
    model = build(classifier(), loss=loss, optimizer=SGD)
    data = labelled((6,), rows=42)
    labels = data["labels"]
    labels[:4] = labels[9:12] = labels[18:24] = -100  # some parts, and a batch as a whole
    labels[36:38] = -100
    options: dict[str, Any] = {"batch_size": 6, "accumulate": accumulate, "shuffle": False}
    alone = TrainingSession(model)
    history = alone.fit(data, progress=False, epochs=2, **options)
    sessions, histories = fit_joined(model, data, size, epochs=2, **options)
    for session, other in zip(sessions, histories, strict=True):
        assert_near(session, alone)
        np.testing.assert_allclose(losses(other), losses(history), rtol=ROUNDING)


@pytest.mark.slow
def test_running_statistics_of_accumulated_batches_are_averaged_by_rows() -> None:
    """Each rank's own go on from part to part; in the last batch, rank 0 has no row."""
    model = build(normalizing(), optimizer=SGD, seed=5)
    whole = labelled((1, 4, 4), rows=13)
    cuts = {0: [slice(0, 3), slice(6, 9)], 1: [slice(3, 6), slice(9, 12), slice(12, 13)]}

    def work(communicator: Thread) -> Arrays:
        session = join(TrainingSession(model), communicator)
        options: dict[str, Any] = {"batch_size": 6, "accumulate": 3, "shuffle": False}
        session.fit(whole, progress=False, **options)
        assert session.steps_done == 1
        return dict(session.state)

    first, second = in_ranks(work)
    assert_same_arrays(first, second)
    chains = []
    for rank, parts in cuts.items():
        session = TrainingSession(model)
        session.state["seed"] = 5 + rank
        last = None
        for cut in parts:
            part = session.inputs.check({n: a[cut] for n, a in whole.items()})
            last = session._steps.strategy().gradients(part, outputs=None, after=last)
        assert last is not None
        chains.append(last.statistics)
    for name in ("bn.mean", "bn.var"):
        expected = (chains[0][name] * 6.0 + chains[1][name] * 7.0) / 13
        np.testing.assert_allclose(first[name], expected, rtol=ROUNDING)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("counted", [[[2, 4, 3], [2, 4, 3]], [[2, 4, 4], [4, 2, 4]]])
def test_parts_that_do_not_add_up_are_refused_in_all_ranks(
    counted: list[list[int]], accumulate: int
) -> None:
    """Also in a rank whose own part does, or whose parts do together."""
    counting = ortops.losses.SoftmaxCrossEntropy("logits", ignore_index=-1, target="some")
    model = build(classifier(), loss=counting + ortops.losses.SoftmaxCrossEntropy("logits"))
    data = labelled((6,), rows=24)
    parts = [number for batch in counted for number in batch]  # labels that count, of 4 each
    marks = [number < count for count in parts for number in range(4)]
    data["some"] = np.where(marks, data["labels"], -1)

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        options: dict[str, Any] = {"batch_size": 12, "accumulate": accumulate, "shuffle": False}
        session.fit(data, progress=False, **options)

    for said in raised_in_all(work, 3):
        assert "so the gradients of parts of a batch do not add up; give the parts equal" in said


def test_a_step_against_formulas_in_numpy() -> None:
    """Mean squared error of 3 and 1 rows: gradients 2/n · xᵀ(x·w + b − t), by hand."""
    model = build(affine(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.5))
    whole = affine_batch(4)
    start = TrainingSession(model).parameters
    x, t = (whole[name].astype(np.float64) for name in ("x", "targets"))
    difference = x @ start["w"] + start["b"] - t
    scale = 2 / difference.size

    def work(communicator: Thread) -> tuple[Any, Any]:
        session = join(TrainingSession(model), communicator)
        part = slice(0, 3) if communicator.rank == 0 else slice(3, 4)
        batch = {name: array[part] for name, array in whole.items()}
        return session.step(batch), session.parameters

    for outputs, found in in_ranks(work):
        np.testing.assert_allclose(outputs["loss"], np.mean(difference**2), rtol=ROUNDING)
        np.testing.assert_allclose(
            found["w"], start["w"] - 0.5 * scale * x.T @ difference, rtol=ROUNDING, atol=ROUNDING
        )
        np.testing.assert_allclose(
            found["b"], start["b"] - 0.5 * scale * difference.sum(0), rtol=ROUNDING, atol=ROUNDING
        )
    assert len(in_ranks(work)[0][0]["y"]) == 3


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["step", "run_steps", "apply of gradients", "reduce"])
def test_all_ways_of_making_steps_agree(way: str) -> None:
    model = build(classifier(), optimizer=SGD)
    batches = [labelled((6,), rows=8, seed=seed) for seed in range(3)]
    alone = TrainingSession(model)
    expected = alone.run_steps(batches)

    def work(communicator: Thread) -> tuple[TrainingSession, list[float]]:
        session = join(TrainingSession(model), communicator)
        part = slice(communicator.rank, None, 2)
        parts = [{name: array[part] for name, array in each.items()} for each in batches]
        if way == "run_steps":
            return session, list(session.run_steps(parts))
        found = []
        for each in parts:
            if way == "apply of gradients":
                gradients = session.gradients(each)
                session.apply(gradients)
                found.append(gradients.loss)
            else:
                seen: list[float] = []
                reduce = (lambda g, seen=seen: seen.append(g.loss)) if way == "reduce" else None
                found.append(float(session.step(each, reduce=reduce)["loss"]))
                assert seen == (found[-1:] if reduce else [])
        return session, found

    for session, found in in_ranks(work):
        assert_near(session, alone)
        np.testing.assert_allclose(found, expected, rtol=ROUNDING)


@pytest.mark.parametrize("way", ["in turn", "by hand"])
def test_several_entries(way: str) -> None:
    """Each makes the steps of one process; what one rank sets for another entry is noticed."""
    model, data = two_heads(), heads(13)
    options: dict[str, Any] = {"batch_size": 4, "entries": {"main": 2, "second": 1}}

    def train(session: TrainingSession, part: slice) -> list[float]:
        if way == "in turn":
            return losses(session.fit(data, epochs=2, progress=False, **options))
        own = {name: array[part] for name, array in data.items()}
        found = [float(session.step(own, entry=each)["loss"]) for each in ("second", "main")]
        session.apply(session.gradients(own, entry="second"), entry="second")
        session.learning_rates["second"] = 0.5
        return [*found, float(session.step(own, entry="second")["loss"])]

    alone = TrainingSession(model)
    expected = train(alone, slice(None))

    def work(communicator: Thread) -> tuple[TrainingSession, list[float]]:
        session = join(TrainingSession(model), communicator)
        found = train(session, slice(communicator.rank, None, 2))
        for make in (session.step, session.gradients):
            with pytest.raises(UnsupportedError, match=r"runs 2 .* choose one with entry="):
                make(data)
        return session, found

    for session, found in in_ranks(work):
        assert_near(session, alone)
        np.testing.assert_allclose(found, expected, rtol=ROUNDING)

    def differently(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        if communicator.rank:
            session.learning_rates["second"] = 0.7
        session.step(data, entry="main")

    assert "rank 1 has set 'second.learning_rate' in state" in raised_in_all(differently)[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("overflows", [False, True])
def test_parameters_of_16_bits(overflows: bool) -> None:
    """Gradients that overflow in one rank skip the step in all."""
    model = build(half(reshaped()), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(1e-4))
    feeds = {name: array.astype(np.float16) for name, array in batch(1.0).items()}
    large = {name: array.astype(np.float16) for name, array in batch(24000.0).items()}

    def work(communicator: Thread) -> tuple[Arrays, float, Arrays]:
        session = join(TrainingSession(model), communicator)
        session.state["loss_scale"] = scale = np.float32(16)
        before = session.parameters
        session.step(large if overflows and communicator.rank else feeds)
        assert (session.state["loss_scale"] < scale) == overflows
        return dict(session.state), before, session.parameters

    first, second = in_ranks(work)
    assert_same_arrays(first[0], second[0])
    for name, array in first[1].items():
        assert np.array_equal(first[2][name], array) == overflows


@pytest.mark.slow
def test_statistics_are_averaged_by_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Each part is normalized by itself, as two sessions do, whose gradients numpy averages."""
    model = build(normalizing(), optimizer=SGD, seed=5)
    whole = labelled((1, 4, 4), rows=8)
    cuts = [slice(0, 6), slice(6, 8)]
    parts = [{name: array[cut] for name, array in whole.items()} for cut in cuts]

    def work(communicator: Thread) -> TrainingSession:
        session = join(TrainingSession(model), communicator)
        session.step(parts[communicator.rank])
        return session

    first, second = in_ranks(work)
    apart = [TrainingSession(model) for _ in parts]
    apart[1].state["seed"] = 6  # what rank 1 draws from
    found = [session.gradients(part) for session, part in zip(apart, parts, strict=True)]
    mean = {n: (found[0][n] * np.float64(6) + found[1][n] * 2) / 8 for n in found[0]}
    apart[0].apply({n: array.astype(np.float32) for n, array in mean.items()})
    for name, array in apart[0].parameters.items():
        np.testing.assert_allclose(first.state[name], array, rtol=ROUNDING, atol=ROUNDING)
    for name in ("bn.mean", "bn.var"):
        expected = (found[0].statistics[name] * 6.0 + found[1].statistics[name] * 2.0) / 8
        np.testing.assert_allclose(first.state[name], expected, rtol=ROUNDING)
        assert not np.allclose(first.state[name], found[0].statistics[name])
    assert_same_arrays(dict(first.state), dict(second.state))
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("join: the batch updates the running statistic 'bn.mean'")
    assert message.endswith("so a step of 2 ranks differs from one of a single process")


@pytest.mark.slow
def test_a_rank_without_rows_gives_no_statistics() -> None:
    model = build(normalizing(), optimizer=SGD)
    data = labelled((1, 4, 4), rows=1)
    sessions, _ = fit_joined(model, data, batch_size=8)
    alone = TrainingSession(model)
    alone.state["seed"] = 1  # a single row is that of the last rank
    alone.fit(data, batch_size=8, progress=False)
    sessions[0].state["seed"] = 1
    assert_near(sessions[0], alone)


def test_ranks_drop_differently() -> None:
    with ortops.Tape(name="thinned") as tape:
        x = tape.input("x", np.float32, ["batch", 50])
        w = tape.initializer("w", np.ones(50, np.float32))
        tape.output(ortops.op.Dropout(x * w, np.array(0.5, np.float32)), "y")
    model = build(tape.model(), loss="MeanSquaredError", optimizer="SGD", seed=3)
    batch = {"x": np.ones((2, 50), np.float32), "targets": np.zeros((2, 50), np.float32)}

    def work(communicator: Thread) -> tuple[Any, ...]:
        session = join(TrainingSession(model), communicator)
        masks = [session.step(batch)["y_training"] == 0 for _ in range(2)]
        return *masks, int(session.state["seed"])

    (first, next_first, seed), (second, _, other_seed) = in_ranks(work)
    assert (first != second).any()
    assert (first != next_first).any()
    assert seed == other_seed == 3  # variables are those of one process


# ------------------------------------------------------------------------------------------- files


class Watch(Callback):
    """Counts its calls."""

    def __init__(self, *, writes: bool) -> None:
        self.writes = writes
        self.steps = 0

    def on_step(self, record: Any, session: Any) -> None:
        self.steps += 1


class StopAt(Callback):
    """Ends the training in one rank."""

    def __init__(self, step: int, rank: int) -> None:
        self.at = step, rank

    def on_step(self, record: Any, session: Any) -> None:
        if (record.step, session.rank) == self.at:
            record.stop("enough")


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [3, 7])
def test_a_resumed_training_is_an_unbroken_one(tmp_path: Path, stop: int, accumulate: int) -> None:
    model = build(classifier(dropout=0.5), seed=7)
    data = labelled((6,), rows=29)
    arguments: dict[str, Any] = {"epochs": 3, "batch_size": 4, "accumulate": accumulate}
    whole, history = fit_joined(model, data, **arguments)
    file = tmp_path / "rank0.onnx"

    def broken(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        callbacks: list[Callback] = [Checkpoint(file)]
        if communicator.rank == 1:
            callbacks = [Checkpoint(tmp_path / "rank1.onnx"), StopAt(stop, 1)]
        else:
            callbacks.append(StopAt(stop, 1))
        session.fit(data, callbacks=callbacks, progress=False, **arguments)
        assert session.steps_done == stop

    def resumed(communicator: Thread) -> tuple[JoinedSession, Any]:
        session = join(TrainingSession(file), communicator)
        callbacks = [Checkpoint(file), StopAt(-1, 1)]
        found = session.fit(data, callbacks=callbacks, progress=False, resume=True, **arguments)
        return session, found

    in_ranks(broken)
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.onnx"]
    for rank, (session, found) in enumerate(in_ranks(resumed)):
        assert_same_arrays(dict(session.state), dict(whole[rank].state))
        assert losses(found) == losses(history[rank])
    # With another number of ranks the file goes on as well, within rounding but for Dropout.
    assert TrainingSession(file).steps_done == whole[0].steps_done


def test_only_rank_0_writes_and_shows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = build(classifier())
    data = labelled((6,), rows=8)

    def work(communicator: Thread) -> tuple[int, int]:
        session = join(TrainingSession(model), communicator)
        own = tmp_path / str(communicator.rank)
        own.mkdir()
        callbacks = [Watch(writes=True), Watch(writes=False), CSVLog(own / "log.csv")]
        session.fit(data, batch_size=4, epochs=2, callbacks=callbacks)
        session.save(own / "model.onnx")
        return callbacks[0].steps, callbacks[1].steps  # type: ignore[attr-defined]

    assert in_ranks(work) == [(4, 4), (0, 4)]
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["log.csv", "model.onnx"]
    assert list((tmp_path / "1").iterdir()) == []
    assert capfd.readouterr().err.count("epoch 2/2") == 1


def test_early_stopping_ends_all(tmp_path: Path) -> None:
    model = build(classifier(), optimizer=ortops.optimizers.SGD(3.0))
    data = labelled((6,), rows=16)
    held = labelled((6,), rows=8, seed=1)

    def work(communicator: Thread) -> tuple[JoinedSession, Any]:
        session = join(TrainingSession(model), communicator)
        stopping = EarlyStopping(2, restore_best=tmp_path / "best.onnx")
        found = session.fit(
            data, epochs=50, batch_size=4, validation=held, callbacks=[stopping], progress=False
        )
        return session, found

    (first, history), (second, other) = in_ranks(work)
    assert len(history) == len(other) < 50
    best = int(np.argmin([epoch["validation_loss"] for epoch in history]))
    assert first.steps_done == history[best]["steps"]
    assert_same_arrays(dict(first.state), dict(second.state))


# ------------------------------------------------------------------------------------- the start


@pytest.mark.slow
def test_variables_become_those_of_rank_0() -> None:
    """Of all types, and again after `reset`."""
    model = build(half(classifier(dropout=0.5), TensorProto.BFLOAT16), seed=4)

    def work(communicator: Thread) -> tuple[Arrays, Arrays]:
        session = TrainingSession(model)
        rng = np.random.default_rng(communicator.rank)
        session.parameters = {n: rng.normal(size=a.shape) for n, a in session.parameters.items()}
        session.learning_rate = 1 + communicator.rank
        joined = join(session, communicator)
        assert joined.parameters.keys() == session.parameters.keys()
        before = dict(joined.state)
        feeds = labelled((6,), rows=4)
        joined.step(feeds | {"x": feeds["x"].astype(BFLOAT16)})
        assert session.steps_done == 1  # the same session
        joined.reset()
        return before, dict(joined.state)

    first, second = in_ranks(work)
    rng = np.random.default_rng(0)
    for name, array in TrainingSession(model).parameters.items():
        expected = rng.normal(size=array.shape).astype(np.float32)
        np.testing.assert_array_equal(first[0][f"{name}.master"], expected)
    assert first[0]["learning_rate"] == 1
    for found, other in zip(first, second, strict=True):
        assert_same_arrays(found, other)


def test_one_rank_is_the_session_itself() -> None:
    model = build(classifier())
    data = labelled((6,), rows=12)
    alone = TrainingSession(model)
    alone.fit(data, batch_size=4, progress=False)

    def work(communicator: Thread) -> tuple[TrainingSession, int]:
        session = join(TrainingSession(model), communicator)
        session.fit(data, batch_size=4, progress=False)
        return session, communicator.calls

    ((session, calls),) = in_ranks(work, 1)
    assert_same_arrays(dict(session.state), dict(alone.state))
    assert calls == 0


@pytest.mark.slow
def test_ranks_with_other_models_are_refused() -> None:
    def joined(*models: Any) -> Callable[[Thread], object]:
        return lambda communicator: join(models[communicator.rank], communicator)

    one = TrainingSession(build(classifier()))
    message = r"join: rank 1 has another model than rank 0; open the same file in all ranks"
    with pytest.raises(ModelError, match=message):
        in_ranks(joined(one, TrainingSession(build(classifier(hidden=9)))))
    assert type(one) is TrainingSession  # and trains on alone
    one.fit(labelled((6,)), progress=False)
    with pytest.raises(ModelError, match=message):
        in_ranks(joined(one, TrainingSession(build(affine(), loss="MeanSquaredError"))))
    begun = TrainingSession(build(classifier()))
    begun.fit(labelled((6,)), progress=False)
    with pytest.raises(ModelError, match=r"join: rank 1 has another point of `fit`, or none, than"):
        in_ranks(joined(TrainingSession(build(classifier())), begun))


class Broken:
    rank, size = 2, 2


def test_what_cannot_be_joined_is_refused() -> None:
    session = TrainingSession(build(classifier()))
    with pytest.raises(ArgumentError, match=r"join: session must be a TrainingSession, got 3"):
        join(3)  # type: ignore[arg-type]
    for wrong in (Broken(), 3):
        with pytest.raises(ArgumentError, match=r"communicator must have rank < size, .*, got "):
            join(session, wrong)  # type: ignore[arg-type]
    joined = join(session, Thread(Room(1), 0))
    with pytest.raises(ArgumentError, match=r"join: the session is already joined; join each "):
        join(joined, Thread(Room(1), 0))


class Wrong(Thread):
    """A communicator with a defect."""

    def __init__(self, other: Thread, defect: str) -> None:
        super().__init__(other.room, other.rank)
        self.defect = defect
        self.size += defect == "size"

    def sum(self, array: np.ndarray[Any, Any]) -> object:  # type: ignore[override]
        if self.defect == "not in place":
            return sum(self._all(array))
        if self.defect == "float32":
            rounded = array.astype(np.float32)
            array[:] = sum(self._all(rounded))
        elif self.defect == "another shape":
            array.resize((len(array) + 1,), refcheck=False)
        elif self.defect == "fails" and self.calls == 9:
            raise TimeoutError("nobody came")
        elif self.defect == "mean":
            super().sum(array)
            array /= self.size
        else:
            super().sum(array)
        return None

    def broadcast(self, array: np.ndarray[Any, Any]) -> None:
        if self.defect != "no broadcast":
            super().broadcast(array)


MUST = (
    r" must replace the elements of the array that it gets by its sum over [23] ranks, in the same "
)
DEFECTS = {
    "not in place": rf"sum of <.*>{MUST}place and exactly, .*; float64 \[1, rank\] became \[1.0",
    "float32": rf"sum of <.*>{MUST}",
    "mean": rf"sum of <.*>{MUST}.* became \[1.0\d*, 0.5\] instead of \[2.0\d*, 1.0\]",
    "size": rf"sum of <.*>{MUST}.*, and all ranks must agree on their number; .* of \[3",
    "another shape": r"sum of <.*> must replace .*; it made float64 \[3\] of float64 \[2\]",
    "no broadcast": r"broadcast of <.*> by that of rank 0, .*; rank 1 got \[7, 13\]",
}


@pytest.mark.parametrize("defect", list(DEFECTS))
def test_communicators_that_compute_something_else_are_refused(defect: str) -> None:
    """Each rank would train by itself, with its part of the data; the session stays as it is."""
    session = TrainingSession(build(classifier()))

    def work(communicator: Thread) -> str:
        try:
            own = session if communicator.rank else TrainingSession(build(classifier()))
            join(own, Wrong(communicator, defect))
        except OrtopsError as error:
            return str(error)
        return ""

    said = in_ranks(work)
    assert re.search(DEFECTS[defect].replace("> by", "> .* by"), said[1]), said
    assert type(session) is TrainingSession


def test_what_a_communicator_raises_is_an_error_of_ortops() -> None:
    """The session stands at a whole step, and makes no other exchange."""
    model = build(classifier())

    def work(communicator: Thread) -> None:
        own = Wrong(communicator, "fails")
        session = join(TrainingSession(model), own)
        own.calls = 9
        with pytest.raises(
            OrtopsError, match=r"join: sum of Wrong failed in rank \d \(TimeoutError: "
        ):
            session.step(labelled((6,)))
        with pytest.raises(OrtopsError, match=r"join: an earlier exchange was interrupted"):
            session.step(labelled((6,)))
        assert session.steps_done == 0

    in_ranks(work)


def test_torch_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TrainingSession(build(classifier()))
    with pytest.raises(ArgumentError, match=r"join: communicator must be 'torch', got 'nccl'"):
        join(session, "nccl")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(OrtopsError, match=r"join needs torch; .*ortops\[torch\], or pass another"):
        join(session, "torch")
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=group))
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(
        ArgumentError,
        match=r"no process group, and the environment lacks WORLD_SIZE, MASTER_ADDR, ",
    ):
        join(session, "torch")


def test_fixed_batches_are_not_divided() -> None:
    model = build(affine(batch=4), loss="MeanSquaredError")
    with pytest.raises(
        FeedError, match=r"join: cannot divide 'x' among 2 ranks, because the model has a fixed "
    ):
        fit_joined(model, affine_batch(8), batch_size=4)


@pytest.mark.slow
def test_parts_that_do_not_add_up_are_refused() -> None:
    """Two means that count different elements of the same rows."""
    counting = ortops.losses.SoftmaxCrossEntropy("logits", ignore_index=0)
    loss = counting + ortops.losses.SoftmaxCrossEntropy("logits")
    model = build(classifier(), loss=loss)
    inputs = [name for name in TrainingSession(model).inputs if name != "x"]
    data = {"x": labelled((6,), rows=8)["x"]}
    data |= {name: np.array([0, 0, 0, 1, 1, 1, 1, 2]) for name in inputs}
    with pytest.raises(
        OrtopsError, match=r"divisor of loss '.*' is .* but that of '.*' is .*give the parts"
    ):
        fit_joined(model, data, batch_size=8, shuffle=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_no_number_ends_all(accumulate: int) -> None:
    """In the rank whose rows have it, and in the other."""
    model = build(classifier())
    data = labelled((6,), rows=16)
    data["x"][7] = np.nan

    def work(communicator: Thread) -> str:
        session = join(TrainingSession(model), communicator)
        options: dict[str, Any] = {"batch_size": 8, "accumulate": accumulate, "shuffle": False}
        with pytest.raises(DivergedError) as error:
            session.fit(data, progress=False, **options)
        assert session.steps_done == (1 if accumulate == 1 else 0)
        return str(error.value)

    first, second = in_ranks(work)
    assert "loss is nan at step 1 (batch 1 of epoch 1): in the batch, 'x' has 6 of 48" in second
    if accumulate == 1:
        assert first == second
    else:
        assert "(batches up to batch 2 of epoch 1): the part of this process is finite" in first


@pytest.mark.slow
def test_labels_that_do_not_count_in_any_rank_change_nothing() -> None:
    """The loss is 0, and so is its gradient, as in one process."""
    loss = ortops.losses.SoftmaxCrossEntropy(ignore_index=2)
    model = build(classifier(), loss=loss, optimizer=ortops.optimizers.SGD(0.1))
    data = labelled((6,), rows=8) | {"labels": np.full(8, 2)}
    before = TrainingSession(model).parameters
    options: dict[str, Any] = {"batch_size": 4, "accumulate": 2}
    alone = TrainingSession(model)
    alone.fit(data, progress=False, **options)
    sessions, _ = fit_joined(model, data, **options)
    for session in (alone, *sessions):
        assert_same_arrays(dict(session.parameters), dict(before))


# ------------------------------------------------------------------------ ranks that differ


def raised_in_all(work: Callable[[Thread], object], size: int = 2) -> list[str]:
    """Returns what the error that each rank raises says."""
    said = [""] * size

    def run(communicator: Thread) -> None:
        with pytest.raises(OrtopsError) as error:
            work(communicator)
        said[communicator.rank] = str(error.value)

    in_ranks(run, size)
    return said


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name", ["epochs", "batch_size", "shuffle", "seed", "accumulate", "rows of data"]
)
def test_other_arguments_of_fit_are_refused(name: str) -> None:
    model = build(classifier())
    data = labelled((6,), rows=32)

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        options: dict[str, Any] = {"epochs": 2, "batch_size": 8, "shuffle": True, "seed": 3}
        given = data
        if communicator.rank == 2 and name == "rows of data":
            given = {n: array[:31] for n, array in data.items()}
        elif communicator.rank == 2:
            options[name] = {"shuffle": False, "accumulate": 2}.get(name, 4)
        session.fit(given, progress=False, **options)

    for rank, said in enumerate(raised_in_all(work, 3)):
        start = "join: the arguments of fit, and where it begins must be the same in all ranks; "
        start += f"rank {rank} has epochs="
        assert said.startswith(start)
        assert said.endswith("another rank has a different value")


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([[8, 8, 8], [8, 8]], ["the rows of batch 3 of epoch 1 must be", "rank 1 has none,"]),
        ([[8, 8], [8, 6]], ["same in all ranks; rank 0 has 8, another", "rank 1 has 6, another"]),
    ],
)
def test_other_batches_are_refused(
    sizes: list[list[int]], expected: list[str], accumulate: int
) -> None:
    model = build(classifier())

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        batches = [labelled((6,), rows=size) for size in sizes[communicator.rank]]
        session.fit(lambda: iter(batches), epochs=2, accumulate=accumulate, progress=False)

    for said, part in zip(raised_in_all(work), expected, strict=True):
        assert part in said


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("way", ["step", "fit", "in fit"])
def test_variables_set_in_one_rank_are_refused(rank: int, way: str) -> None:
    model = build(classifier())
    data = labelled((6,), rows=16)

    class Set(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            session.state["b1"] = session.state["b1"] + (session.rank == rank)

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        session.learning_rate = 0.5  # the same in all
        session.step(data)
        if way == "in fit":
            session.fit(data, batch_size=4, callbacks=[Set()], progress=False)
            return
        if communicator.rank == rank:
            session.learning_rate = 0.25
        before = dict(session.state)
        try:
            session.step(data) if way == "step" else session.fit(data, progress=False)
        finally:
            assert_same_arrays(dict(session.state), before)

    name = "b1" if way == "in fit" else "learning_rate"
    said = raised_in_all(work)
    expected = f"join: since the last step, rank {rank} has set '{name}' in state, parameters or "
    assert said[rank].startswith(expected)
    assert said[rank].endswith(
        "another rank has set other variables or values; set the same in all ranks"
    )
    other = f"'{name}'" if way == "in fit" else "nothing"
    assert said[1 - rank].startswith(f"join: since the last step, rank {1 - rank} has set {other} ")


def test_variables_that_all_set_alike_are_taken() -> None:
    """Also where one was late, and where a rank counts as another object of the session."""
    model = build(affine(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.5))
    batch = affine_batch(4)

    def work(communicator: Thread) -> Arrays:
        session = TrainingSession(model)
        joined = join(session, communicator)
        if communicator.rank:
            session.state["b"] = np.ones_like(session.state["b"])
        with pytest.raises(OrtopsError, match=r"join: since the last step"):
            session.step(batch)
        joined.state = {"b": np.ones_like(session.state["b"])}
        session.step(batch)  # with its old name it trains together, too
        return dict(joined.state)

    first, second = in_ranks(work)
    assert_same_arrays(first, second)
    assert first["step"] == 1


def test_data_that_differ_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build(classifier())
    data = labelled((6,), rows=16)

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        session.fit(data, batch_size=4, progress=False)
        assert not caplog.records
        communicator.room.barrier.wait()
        own = {name: array[communicator.rank :: 2] for name, array in data.items()}
        session.fit(own, batch_size=4, epochs=2, progress=False)

    in_ranks(work)
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith(
        "join: ranks have different values in the first batch. Each rank uses"
    )


@pytest.mark.slow
def test_batches_without_common_rows_are_not_divided() -> None:
    with ortops.Tape(name="scaled") as tape:
        x = tape.input("x", np.float32, ["batch", 4])
        w = tape.initializer("w", np.ones((4, 3), np.float32))
        scales = tape.input("scales", np.float32, ["n"])
        tape.output((x @ w) * ortops.op.ReduceSum(scales, keepdims=0), "y")
    model = build(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    batch = {"x": np.ones((8, 4)), "scales": np.ones(2), "targets": np.ones((8, 3))}
    batch = {name: array.astype(np.float32) for name, array in batch.items()}

    def work(communicator: Thread) -> None:
        join(TrainingSession(model), communicator).fit([batch], progress=False)

    for said in raised_in_all(work):
        assert said.startswith(
            "join: cannot divide 'scales' by rows, because it has 2 rows in a batch of 8; pass"
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize("pooled", [False, True])
def test_batches_with_time_along_axis_0_are_divided_along_axis_1(pooled: bool) -> None:
    """Also where only the targets tell which axis is that of the rows."""
    size = "people" if pooled else "batch"
    with ortops.Tape(name="running") as tape:
        x = tape.input("x", np.float32, ["time", size, 4])
        sums = ortops.op.CumSum(x @ tape.initializer("w", np.ones((4, 3), np.float32)), np.array(0))
        tape.output(ortops.op.ReduceMean(sums, [0], keepdims=0) if pooled else sums, "y")
    model = build(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    draw = np.random.default_rng(0).standard_normal
    targets = draw((5, 3) if pooled else (6, 5, 3), np.float32)
    batch = {"x": draw((6, 5, 4), np.float32), "targets": targets}
    alone = TrainingSession(model)
    alone.fit([batch], progress=False)
    found = {}

    def work(communicator: Thread) -> None:
        session = join(TrainingSession(model), communicator)
        session.fit([batch], progress=False)
        found[communicator.rank] = session.state["w"]

    in_ranks(work)
    for weights in found.values():
        np.testing.assert_allclose(weights, alone.state["w"], rtol=1e-5)


def test_models_that_differ_in_an_attribute_or_a_constant_are_refused() -> None:
    frozen = classifier()
    weights = frozen.graph.initializer[0]
    moved = onnx.ModelProto()
    moved.CopyFrom(frozen)
    array = onnx.numpy_helper.to_array(weights) + 1
    moved.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(array, weights.name))
    trained = [tensor.name for tensor in frozen.graph.initializer[1:]]
    pairs = [
        [build(m, trainable=trained, optimizer="SGD") for m in (frozen, moved)],
        [build(classifier(), optimizer=ortops.optimizers.SGD(0.1, momentum=m)) for m in (0.9, 0.8)],
    ]
    for pair in pairs:

        def work(communicator: Thread, pair: Any = pair) -> None:
            join(TrainingSession(pair[communicator.rank]), communicator)

        with pytest.raises(ModelError, match=r"join: rank 1 has another model than rank 0"):
            in_ranks(work)


@pytest.mark.slow
def test_a_file_and_the_model_it_comes_from_are_one_model(tmp_path: Path) -> None:
    model = build(half(classifier(dropout=0.5), TensorProto.BFLOAT16), seed=4)
    session = TrainingSession(model)
    feeds = labelled((6,), rows=4)
    session.step(feeds | {"x": feeds["x"].astype(BFLOAT16)})
    session.save(tmp_path / "model.onnx")

    def work(communicator: Thread) -> Arrays:
        own = model if communicator.rank else tmp_path / "model.onnx"
        return dict(join(TrainingSession(own), communicator).state)

    for found in in_ranks(work):
        assert_same_arrays(found, dict(session.state))


def test_rank_1_waits_for_the_best_state_that_rank_0_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last epoch is the best: its file is written when all others are done."""
    from ortops.graph.files import saving

    write, rooms = saving.write_model, []

    def slowly(*arguments: Any) -> None:
        barrier = rooms[0].barrier
        until(lambda: barrier.n_waiting == 1 or barrier.broken)
        write(*arguments)

    monkeypatch.setattr(saving, "write_model", slowly)
    model = build(classifier(), optimizer=ortops.optimizers.SGD(0.1))
    data = labelled((6,), rows=16)

    def work(communicator: Thread) -> TrainingSession:
        rooms.append(communicator.room)
        session = join(TrainingSession(model), communicator)
        stopping = EarlyStopping(5, "loss", restore_best=tmp_path / "best.onnx")
        session.fit(data, epochs=2, callbacks=[stopping], progress=False)
        assert stopping.best_epoch == 2
        return session

    first, second = in_ranks(work)
    assert first.steps_done == 2
    assert_same_arrays(dict(first.state), dict(second.state))


def test_mpi4py_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    session = TrainingSession(build(classifier()))
    with pytest.raises(OrtopsError, match=r"needs mpi4py; .*ortops\[distributed\], or"):
        join(session)


# -------------------------------------------------------------------------------------------- MPI

SCRIPT = """
import os, sys, time
import numpy as np
import ortops
from ortops.callbacks import Callback, Checkpoint

class Die(Callback):
    def on_step(self, record, session):
        if record.step == 5 and session.rank == 1:
            how = sys.argv[2]
            if how == "raise":
                raise RuntimeError("rank 1 fails")
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "interrupt":
                os.kill(os.getpid(), 2)
            if how == "terminate":
                os.kill(os.getpid(), 15)

class Slow(Checkpoint):
    def on_end(self, record, session):
        time.sleep(0.5)  # the other rank must not end all before that
        super().on_end(record, session)

def validation():
    if sys.argv[2] == "terminate in an evaluation" and session.rank == 1 and not resumed:
        os.kill(os.getpid(), 15)
    yield {name: array[:4] for name, array in data.items()}

folder = sys.argv[1]
data = dict(np.load(f"{folder}/data.npz"))
file = f"{folder}/run.onnx"
resumed = os.path.exists(file)
session = ortops.TrainingSession(file if resumed else f"{folder}/model.onnx")
session = ortops.distributed.join(session)
every = 100 if "terminate" in sys.argv[2] else 3
callbacks = [Slow(file, every=every), Die()]
session.fit(
    data, epochs=3, batch_size=8, resume=True, validation=validation, callbacks=callbacks
)
np.savez(f"{folder}/rank{session.rank}.npz", **session.state)
"""


def run_mpi(
    folder: Path, how: str = "", *, script: str = SCRIPT, ranks: int = 2, runner: bool = True
) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    mpiexec = Path(sys.executable).parent / "mpiexec"
    command: list[Any] = [mpiexec if mpiexec.exists() else "mpiexec", "-n", str(ranks)]
    command += [sys.executable, *["-m", "mpi4py"] * runner, folder / "train.py", folder, how]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def ran(folder: Path, model: onnx.ModelProto, how: str = "") -> Any:
    """Trains a model of a folder on the same data in two processes."""
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "data.npz", **labelled((6,), rows=27))
    return run_mpi(folder, how)


@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
def test_processes_of_mpi(tmp_path: Path) -> None:
    """As one process, within rounding."""
    model = build(classifier(), optimizer=SGD)
    result = ran(tmp_path, model)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("epoch 3/3") == 1, result.stderr
    alone = TrainingSession(model)
    alone.fit(labelled((6,), rows=27), epochs=3, batch_size=8, progress=False)
    for rank in (0, 1):
        found = np.load(tmp_path / f"rank{rank}.npz")
        for name, array in alone.state.items():
            np.testing.assert_allclose(found[name], array, rtol=ROUNDING, atol=ROUNDING)


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, Any]:
    """A model that drops, and what two processes make of it."""
    folder = tmp_path_factory.mktemp("whole")
    model = build(classifier(dropout=0.5), optimizer=SGD, seed=2)
    result = ran(folder, model)
    assert result.returncode == 0, result.stderr
    return model, dict(np.load(folder / "rank0.npz"))


ENDS = {"kill": 3, "raise": 3, "interrupt": 5, "terminate": 5, "terminate in an evaluation": 4}
"""How one of the processes dies, and the steps in the file that it leaves."""


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
@pytest.mark.parametrize("how", ENDS)
def test_processes_of_mpi_that_died_go_on(how: str, tmp_path: Path, unstopped: Any) -> None:
    model, expected = unstopped
    assert ran(tmp_path, model, how).returncode != 0
    assert not (tmp_path / "rank0.npz").exists()
    assert TrainingSession(tmp_path / "run.onnx").steps_done == ENDS[how]
    result = ran(tmp_path, model)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert_same_arrays(dict(np.load(tmp_path / f"rank{rank}.npz")), expected)


UNEVEN = """
import os, signal, sys, threading, time
import numpy as np
import ortops

folder, how = sys.argv[1:]
data = dict(np.load(f"{folder}/data.npz"))
session = ortops.TrainingSession(f"{folder}/model.onnx")
timeout = 1 if "late" in how else None
session = ortops.distributed.join(session, timeout=timeout)

def say(*words):
    with open(f"{folder}/rank{session.rank}.txt", "a", encoding="utf-8") as file:
        print(*words, file=file)

def catching(make):
    try:
        make()
    except ortops.OrtopsError as error:
        say("raised", error)

def batches():
    for number in range(8):
        if number == 3 and session.rank == 1:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            time.sleep(1000)
        yield {name: array[number * 2 : number * 2 + 2] for name, array in data.items()}

if how == "blocked":
    try:
        session.fit(batches, progress=False)
    except SystemExit as error:
        say("left fit after step", session.steps_done, "with", error.code)
    raise SystemExit(0)

for _ in range(2):
    session.step(data)
if session.rank != 1:
    catching(lambda: session.fit(data, progress=False) if "fit" in how else session.step(data))
    catching(lambda: session.step(data))
elif "fails" in how:
    raise RuntimeError("rank 1 fails")
elif "late" in how:
    while not os.path.exists(f"{folder}/rank0.txt"):  # what it says when it has waited enough
        time.sleep(0.01)
say("has made", session.steps_done)
"""


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    onnx.save(build(classifier(), optimizer=SGD), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **labelled((6,), rows=16))  # type: ignore[arg-type]
    return tmp_path


SAME_CALLS = "all ranks must make the same calls of `step`, `run_steps`, `gradients` and `fit` in"


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
@pytest.mark.parametrize("how", ["ends", "ends, fit", "fails"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_does_not_wait_for_one_that_has_ended(uneven: Path, how: str, ranks: int) -> None:
    """Whether that made fewer steps, or failed; the session stands at a whole step."""
    result = run_mpi(uneven, how, script=UNEVEN, ranks=ranks, runner=False)
    assert (result.returncode != 0) == (how == "fails"), result.stderr
    assert ("RuntimeError: rank 1 fails" in result.stderr) == (how == "fails")
    said = said_by(uneven)
    assert said.pop(1) == ([] if how == "fails" else ["has made 2"])
    for rank, (first, second, last) in said.items():
        start = f"raised join: rank 1 has exited while rank {rank} waits for it; {SAME_CALLS}"
        assert first.startswith(start)
        assert second.startswith("raised join: an earlier exchange was interrupted, so the ranks ")
        assert last == "has made 2"


def said_by(folder: Path) -> dict[int, list[str]]:
    files = {rank: folder / f"rank{rank}.txt" for rank in range(3)}
    said = {n: f.read_text("utf-8").splitlines() for n, f in files.items() if f.exists()}
    return {1: [], **said}


@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
def test_a_rank_waits_no_longer_than_it_is_to(uneven: Path) -> None:
    result = run_mpi(uneven, "late", script=UNEVEN)
    assert result.returncode == 0, result.stderr
    said = said_by(uneven)
    assert said[1] == ["has made 2"]
    start = (
        f"raised join: rank 0 timed out after 1 s of waiting for the other ranks; {SAME_CALLS} the"
    )
    assert said[0][0].startswith(start)
    assert said[0][1].startswith("raised join: an earlier exchange was interrupted")
    assert said[0][2] == "has made 2"


@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
def test_a_rank_that_waits_for_data_hears_signals(uneven: Path) -> None:
    """It ends `fit` in all ranks, after the same step."""
    result = run_mpi(uneven, "blocked", script=UNEVEN)
    assert result.returncode == 0, result.stderr
    assert said_by(uneven) == {rank: ["left fit after step 3 with 143"] for rank in (0, 1)}


LEAVING = """
import os, sys, time
import numpy as np
import mpi4py.MPI
import ortops

folder, how = sys.argv[1:]
rank = mpi4py.MPI.COMM_WORLD.rank
data = dict(np.load(f"{folder}/data.npz"))
session = ortops.TrainingSession(f"{folder}/model.onnx")
if how == "fails before":
    if rank == 1:
        raise RuntimeError("rank 1 fails")
    ortops.distributed.join(session, timeout=2)
session = ortops.distributed.join(session)
for step in range(4):
    session.step(data)
    if how.isdigit() and rank == 1 and step == 2:
        os._exit(int(how))
if how == "all":
    pid = os.fork()
    if not pid:
        os._exit(0)  # of a child, which is no rank
    os.waitpid(pid, 0)
    with open(f"{folder}/rank{rank}.txt", "w", encoding="utf-8") as file:
        print("has made", session.steps_done, file=file)
    time.sleep(0.3 * rank)
    os._exit(0)
"""


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
@pytest.mark.parametrize("runner", [True, False])
@pytest.mark.parametrize("status", ["0", "5"])
def test_an_immediate_exit_is_no_success(uneven: Path, status: str, runner: bool) -> None:
    """MPICH returns the status of the rank that ended first, and kills the others."""
    result = run_mpi(uneven, status, script=LEAVING, runner=runner)
    assert result.returncode != 0
    assert f"ortops: join: rank 1 ends with os._exit({status})" in result.stderr
    if status == "0":
        assert "join: rank 1 has exited while rank 0 waits for it" in result.stderr
    else:
        assert result.returncode == 5


@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
def test_all_ranks_may_exit_immediately(uneven: Path) -> None:
    """Each waits for the others, so that none is killed."""
    result = run_mpi(uneven, "all", script=LEAVING)
    assert result.returncode == 0, result.stderr
    assert said_by(uneven) == {rank: ["has made 4"] for rank in (0, 1)}
    assert "without `-m mpi4py`" not in result.stderr


@pytest.mark.slow
@pytest.mark.needs("mpi4py>=4.1")
def test_join_says_that_the_program_runs_without_mpi4py(uneven: Path) -> None:
    """A rank that fails before `join` waits in MPI's finalization, and the others for it."""
    result = run_mpi(uneven, "fails before", script=LEAVING, runner=False)
    assert result.returncode != 0
    assert result.stderr.count("join: the program runs without `-m mpi4py`") == 1
    assert "start it with: mpiexec -n 2 python -m mpi4py " in result.stderr
    assert "join: rank 0 timed out after 2 s of waiting" in result.stderr


def test_a_long_wait_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Request:
        tests = 0

        def Test(self) -> bool:
            self.tests += 1
            return self.tests > 200

    class Channel(mpi._Channel):
        def __init__(self) -> None:
            self._rank, self._world, self._ended, self._done = 1, None, {}, 0

    seconds = itertools.count(1000, 40)  # the clock at the beginning, and at each of three looks
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)), sleep=time.sleep)
    monkeypatch.setattr(mpi, "time", clock)
    Channel()._wait(Request(), None)
    assert next(seconds) == 1160
    (said,) = caplog.messages
    assert said.startswith("join: rank 1 has waited for the other ranks for 80 s; if one of them ")


@pytest.mark.quick(2)
@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    session = TrainingSession(build(classifier()))
    with pytest.raises(ArgumentError, match=r"join: timeout must be a finite number > 0, got "):
        join(session, timeout=timeout)
    with pytest.raises(
        ArgumentError,
        match=r"join: timeout applies to MPI only; set the timeout of the given communicator",
    ):
        join(session, Thread(Room(1), 0), timeout=1)
