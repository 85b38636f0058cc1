"""Adam8bit in exported folders, on several ranks, with parameters of 16 bits and several entries.

With the features of `fit`, `reliability/test_features.py` combines it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto
from running import CPU
from test_adam8bit import SHAPES, Array, a_model, assert_follows, batches, build
from test_distributed import Thread, in_ranks
from test_export_step import Driver
from test_precision import HALVES, half
from training_models import assert_same_arrays

import ortops
from ortops import TrainingSession, build_training_model, export_step, step_graph
from ortops.callbacks import Callback
from ortops.optimizers import Adam8bit

MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]


def of_rule(state: Any, name: str, weight: str = "") -> dict[str, Array]:
    """Returns copies of the state of one parameter, named as the arguments of the rule."""
    names = ("V", "V_SCALE", "H", "H_SCALE")
    rest = {key.lower(): np.array(state[f"{name}.{key}"]) for key in names}
    return {"x": np.array(state[weight or name]), **rest}


# ----------------------------------------------------------------------- other drivers


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("web", [False, True])
def test_a_driver_follows_the_paper_and_python_goes_on(web: bool, tmp_path: Path) -> None:
    export_step(build(), tmp_path, web=web)
    driver, session = Driver(tmp_path), TrainingSession(tmp_path / "model.onnx")
    given = batches(6)
    for t, batch in enumerate(given[:5], 1):
        session.state = driver.state
        gradients = session.gradients(batch)
        before = {name: of_rule(driver.state, name) for name in MATRICES}
        driver.step(batch)
        for name, old in before.items():
            assert_follows(old, of_rule(driver.state, name), t, gradients[name])
    resumed = TrainingSession(driver.save())
    assert_same_arrays(dict(resumed.state), {n: driver.state[n] for n in resumed.state})
    assert resumed.steps_done == 5
    session.state = driver.state
    assert resumed.step(given[5])["loss"] == session.step(given[5])["loss"]
    assert_same_arrays(dict(resumed.state), dict(session.state))


@pytest.mark.slow
def test_two_halves_follow_the_paper() -> None:
    model, batch = build(), batches(1)[0]

    def run(part: Any, feeds: dict[str, Array]) -> dict[str, Array]:
        graph = step_graph(model, part=part)
        session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=CPU)
        known = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
        names = [value.name for value in session.get_outputs()]
        fed = {name: array for name, array in feeds.items() if name in known}
        return dict(zip(names, session.run(names, fed), strict=True))

    session = TrainingSession(model)
    gradients = session.gradients(batch)
    found = run("apply", {**batch, **run("gradients", batch)})
    after = {name.removesuffix("_new"): array for name, array in found.items()}
    for name in MATRICES:
        assert_follows(of_rule(session.state, name), of_rule(after, name), 1, gradients[name])


# ------------------------------------------------------------------------ several ranks


@pytest.mark.slow
def test_ranks_follow_the_paper_and_agree() -> None:
    model, given = build(), batches(8)

    def work(communicator: Thread) -> dict[str, Array]:
        session = ortops.distributed.join(TrainingSession(model), communicator)
        for t, batch in enumerate(given[communicator.rank :: 2], 1):
            gradients = session.gradients(batch)
            before = {name: of_rule(session.state, name) for name in MATRICES}
            session.step(batch)
            for name, old in before.items():
                assert_follows(old, of_rule(session.state, name), t, gradients[name])
        return dict(session.state)

    first, second = in_ranks(work)
    assert_same_arrays(first, second)


@pytest.mark.slow
def test_ranks_go_on_from_a_file_bit_for_bit(tmp_path: Path) -> None:
    """From the middle of an epoch, with accumulated gradients that are clipped."""
    model = build(clip_norm=0.1)
    data = {name: np.concatenate([b[name] for b in batches(4)]) for name in ("x", "targets")}
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 8, "accumulate": 2, "progress": False}

    class Stop(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == 3:
                record.stop("the test says so")

    def work(communicator: Thread) -> tuple[dict[str, Array], dict[str, Array]]:
        unbroken = ortops.distributed.join(TrainingSession(model), communicator)
        unbroken.fit(data, **arguments)
        broken = ortops.distributed.join(TrainingSession(model), communicator)
        broken.fit(data, callbacks=[Stop()], **arguments)
        broken.save(tmp_path / "saved.onnx")
        communicator.sum(np.zeros(1, np.float32))  # wait for the file
        resumed = ortops.distributed.join(TrainingSession(tmp_path / "saved.onnx"), communicator)
        resumed.fit(data, resume=True, **arguments)
        return dict(unbroken.state), dict(resumed.state)

    states = [state for pair in in_ranks(work) for state in pair]
    for state in states[1:]:
        assert_same_arrays(state, states[0])
    assert states[0]["step"] == 8
    assert len(np.unique(states[0]["fc2.V"])) > 50


# ------------------------------------------------------------------------------ 16 bits


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", HALVES, ids=TensorProto.DataType.Name)
def test_masters_of_16_bits_follow_the_paper(kind: int, tmp_path: Path) -> None:
    dtype = HALVES[kind]
    model = build_training_model(
        half(a_model(), kind), loss="MeanSquaredError", optimizer=Adam8bit(), ema_decay=0.5
    )
    session = TrainingSession(model)
    given = [{n: a.astype(dtype) for n, a in b.items()} for b in batches(8)]
    t = 1
    for batch in given[:6]:
        before = {name: of_rule(session.state, name, f"{name}.master") for name in MATRICES}
        gradients = session.gradients(batch)
        session.apply(gradients)
        if session.steps_done < t:
            continue  # the scale of the loss was too large
        for name, old in before.items():
            new = of_rule(session.state, name, f"{name}.master")
            assert_follows(old, new, t, gradients[name].astype(np.float32))
            np.testing.assert_array_equal(session.state[name], new["x"].astype(dtype))
        t += 1
    assert t > 3
    session.save(tmp_path / "saved.onnx")
    resumed = TrainingSession(tmp_path / "saved.onnx")
    for batch in given[6:]:
        session.step(batch)
        resumed.step(batch)
    assert_same_arrays(dict(resumed.state), dict(session.state))


# ------------------------------------------------------------------------- two entries


@pytest.mark.slow
def test_each_of_two_entries_trains_as_if_alone(tmp_path: Path) -> None:
    """Both with moments of 8 bits, in blocks of different sizes."""
    alone = {"main": ["fc1", "bias"], "other": ["fc2"]}
    optimizers = {"main": Adam8bit(), "other": Adam8bit(2e-3, block_size=64)}
    models = {n: build(optimizers[n], trainable=alone[n]) for n in alone}
    both = ortops.add_training(
        models["main"],
        loss="MeanSquaredError",
        optimizer=optimizers["other"],
        trainable=alone["other"],
        name="other",
    )
    given = batches(4)
    for entry, single in models.items():
        together, expected = TrainingSession(both), TrainingSession(single)
        for number, batch in enumerate(given):
            if number == 2:
                together.save(tmp_path / f"{entry}.onnx")
                together = TrainingSession(tmp_path / f"{entry}.onnx")
            together.step(batch, entry=entry)
            expected.step(batch)
        prefix = "" if entry == "main" else "other."
        for name, array in expected.state.items():
            own = name if name in SHAPES else f"{prefix}{name}"
            np.testing.assert_array_equal(together.state[own], array, strict=True, err_msg=own)
        assert together.state[f"{prefix}{alone[entry][0]}.V"].dtype == np.uint8


@pytest.mark.slow
def test_a_step_of_two_entries_updates_both() -> None:
    both = ortops.add_training(
        build(trainable=["fc1"]),
        loss="MeanSquaredError",
        optimizer=Adam8bit(),
        trainable=["fc2"],
        name="other",
    )
    session = TrainingSession(both)
    with pytest.raises(ortops.UnsupportedError, match="choose one with entry="):
        TrainingSession(both, optimizer_in_backward=True)
    batch = batches(1)[0]
    first = TrainingSession(both)
    gradients = {"fc1": session.gradients(batch, entry="main")}
    first.step(batch, entry="main")  # before the step of the second entry
    gradients["fc2"] = first.gradients(batch, entry="other")
    names = {"fc1": "fc1", "fc2": "other.fc2"}
    before = {name: of_rule(session.state, own, name) for name, own in names.items()}
    session.step(batch)
    for name, own in names.items():
        g = gradients[name][name]
        assert_follows(before[name], of_rule(session.state, own, name), 1, g)
