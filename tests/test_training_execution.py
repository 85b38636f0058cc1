"""Packed updates, updates in place, and several steps in one run give the numbers of plain runs.

The oracle is the step graph, which a plain onnxruntime session runs with no memory shared between
old and new values.
"""

from __future__ import annotations

import ctypes
import functools
import json
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from internals import memory_of
from onnx import numpy_helper
from running import plain_session
from training_models import (
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    initializers,
    labelled,
    normalizing,
)

import ortops
from benchmarks import works
from benchmarks.task import OPTIMIZERS as HYPERPARAMETERS
from models.mlp import mlp
from ortops import TrainingSession, optimizers
from ortops.engine.execution import onnxruntime_sessions, packed
from ortops.engine.execution.compilation import Call, run_in_a_row
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.variant import Binding
from ortops.errors import FeedError, OrtopsError

Rule = Callable[..., Any]


def reads_the_old_momentum_late(r: Any, t: Any, x: Any, g: Any, v: Any) -> Any:
    v_new = 0.5 * v + g
    return x - r.astype(x.dtype) * (v_new * (v + 1.0) + 0.25 * v), v_new


def swaps_its_states(r: Any, t: Any, x: Any, g: Any, v: Any, h: Any) -> Any:
    return x - r.astype(x.dtype) * (v + h), h + 0.5 * g, v - g


def keeps_an_average(r: Any, t: Any, x: Any, g: Any, average: Any) -> Any:
    x_new = x - r.astype(x.dtype) * g
    return x_new, 0.9 * average + 0.1 * x_new


def sums_of_powers(r: Any, t: Any, x: Any, g: Any, *, beta: float = 0.5) -> Any:
    xp = x.__array_namespace__()
    total = xp.sum(beta ** (np.arange(1.0, 9.0) * (t.astype(np.float64) + 1.0)))
    return (x - (r.astype(np.float64) * total).astype(x.dtype) * g,)


def trusts_by_norm(r: Any, t: Any, x: Any, g: Any) -> Any:
    xp = x.__array_namespace__()
    ratio = xp.sqrt(xp.sum(x * x)) / (xp.sqrt(xp.sum(g * g)) + 1e-3)
    return (x - r.astype(x.dtype) * ratio * g,)


RULES: list[Rule] = [
    reads_the_old_momentum_late,
    swaps_its_states,
    keeps_an_average,
    sums_of_powers,
    trusts_by_norm,
]
OPTIMIZERS = [*sorted(optimizers.OPTIMIZERS), *RULES]

# Norms differ, and so do the shapes of matrices that Muon scales by. Prodigy's sums come first.
MEMBERS: dict[Any, list[int]] = {key: [] for key in (trusts_by_norm, "LAMB", "Adafactor")}
MEMBERS |= {"Muon": [1, 1, 1], "Prodigy": [1, 3, 1, 1], "ScheduleFreeAdamW": [1, 1, 1]}
"""How many of three variables a formula updates, where it is not all."""


def name_of(optimizer: Any) -> str:
    return (
        optimizer
        if isinstance(optimizer, str)
        else str(getattr(optimizer, "__name__", str(optimizer)))
    )


def steps_of_the_step_graph(
    model: onnx.ModelProto, batches: list[dict[str, Any]]
) -> tuple[dict[str, Any], list[Any]]:
    """Returns the variables after the steps, and the losses, by a plain session."""
    graph = ortops.lower(ortops.step_graph(model))
    (entry,) = (e.value for e in graph.metadata_props if e.key == "ortops.step_graph")
    updates = json.loads(entry)
    session = plain_session(graph)
    state = {name: a for name, a in initializers(graph.graph).items() if name in updates}
    losses = []
    for batch in batches:
        outputs = [value.name for value in session.get_outputs()]
        results = dict(zip(outputs, session.run(outputs, {**batch, **state}), strict=True))
        state = {name: results[output] for name, output in updates.items()}
        losses.append(results["loss"])
    return state, losses


def assert_trains_alike(
    model: onnx.ModelProto, batches: list[dict[str, Any]], **options: Any
) -> TrainingSession:
    session = TrainingSession(model, **options)
    losses = [session.step(batch)["loss"] for batch in batches]
    state, expected = steps_of_the_step_graph(model, batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, array in state.items():
        np.testing.assert_allclose(session.state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    return session


APART = Settings(joined=-1)
WAYS = {
    "joined": Settings(),
    "one chunk": APART,
    "chunks": Settings(joined=-1, chunk=256, threads=3),
}
"""The three ways in which updates are run, on models small enough for a test."""

every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.nightly(7)
@pytest.mark.slow
@every_way
@pytest.mark.parametrize("kernels", ["onnx", "python"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_packed_updates(optimizer: Any, kernels: Any, way: str) -> None:
    model = ortops.build_training_model(
        classifier(hidden=64), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    batches = [labelled((6,), seed=seed) for seed in range(4)]
    session = assert_trains_alike(model, batches, kernels=kernels, settings=WAYS[way])
    report = session.report()
    members = [len(each.shapes) for each in report.packed]
    assert members == MEMBERS.get(optimizer, [3])
    joined = way == "joined" and kernels == "onnx"
    assert report.kernels == kernels
    assert report.repeatable == joined
    assert [each.in_graph for each in report.packed] == [joined] * len(members)
    assert any(each.chunks > 1 for each in report.packed) == (way == "chunks" and members != [])


def test_padding_does_not_count_as_size() -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    size = sum(array.size for array in initializers(affine().graph).values())
    batches = [affine_batch(seed=seed) for seed in range(2)]
    session = assert_trains_alike(model, batches, settings=Settings(joined=size))
    assert [each.in_graph for each in session.report().packed] == [True]
    session = assert_trains_alike(model, batches, settings=Settings(joined=size - 1))
    assert [each.in_graph for each in session.report().packed] == [False]


@pytest.mark.quick(2)
@every_way
@pytest.mark.parametrize("optimizer", ["Adam", swaps_its_states], ids=name_of)
def test_double_precision(optimizer: Any, way: str) -> None:
    model = ortops.build_training_model(
        affine(dtype=np.float64), loss="MeanSquaredError", optimizer=optimizer
    )
    batches = [affine_batch(seed=seed, dtype=np.float64) for seed in range(3)]
    assert_trains_alike(model, batches, settings=WAYS[way])


@pytest.mark.quick(1)
@every_way
def test_running_statistics_take_turns_with_packed_updates(way: str) -> None:
    model = ortops.build_training_model(
        normalizing(), loss="SoftmaxCrossEntropy", optimizer="Momentum"
    )
    session = TrainingSession(model, settings=WAYS[way])
    batches = [labelled((1, 4, 4), seed=seed) for seed in range(4)]
    means = []
    for batch in batches:
        session.step(batch)
        means.append(session.state["bn.mean"])
    assert len({mean.tobytes() for mean in means}) == 4
    resumed = TrainingSession(session.model(), settings=WAYS[way])
    assert_same_arrays(resumed.step(batches[0]), session.step(batches[0]))
    assert_same_arrays(dict(resumed.state), dict(session.state))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("optimizer", "safe"),
    [
        ("Adam", {"w": True, "w.V": True, "w.H": True}),
        ("AdamW", {"w": True, "w.V": True, "w.H": True}),
        (
            ortops.optimizers.Adam(epsilon_after_correction=True),
            {"w": True, "w.V": True, "w.H": True},
        ),
        ("Momentum", {"w": True, "w.V": True}),
        ("SGD", {"w": True}),
        (reads_the_old_momentum_late, {"w": True, "w.V": False}),
        (swaps_its_states, {"w": True, "w.V": False, "w.H": False}),
        (keeps_an_average, {"w": True, "w.AVERAGE": True}),
    ],
    ids=lambda value: name_of(value) if not isinstance(value, dict) else "",
)
def test_what_is_safe_in_place(optimizer: Any, safe: dict[str, bool]) -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer=optimizer)
    settings = Settings(joined=-1, scaled_sums=False)
    report = TrainingSession(model, settings=settings).report()
    (update,) = report.packed
    names = [name for role in update.variables for name in role]
    found = {name: name in report.in_place for name in names if name.startswith("w")}
    assert found == safe
    assert {name: name not in report.in_turn for name in safe} == safe


def test_a_wrong_answer_to_what_is_safe_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    # There is no setting for it: nobody may want wrong numbers.
    monkeypatch.setattr(packed, "is_safe_in_place", lambda *_: True)
    model = ortops.build_training_model(
        classifier(), loss="SoftmaxCrossEntropy", optimizer=swaps_its_states
    )
    with pytest.raises(AssertionError):
        assert_trains_alike(model, [labelled((6,), seed=seed) for seed in range(4)], settings=APART)


def test_safe_updates_are_made_in_place() -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    session = TrainingSession(model, settings=APART)
    before = memory_of(session, "w")
    session.step(affine_batch())
    assert np.shares_memory(memory_of(session, "w"), before)
    assert {"w", "w.V", "w.H"} <= set(session.report().in_place)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no SIGALRM on Windows")
def test_no_signal_handler_runs_between_a_compiled_update_and_the_end_of_its_step() -> None:
    class AlarmError(Exception):
        pass

    def handler(*_: object) -> None:
        raise AlarmError

    def update(*_: int) -> None:  # a signal during the update; C functions only
        raise AssertionError("the test replaces it")

    call = Call(update, [], 0)
    call.native = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGALRM))
    done: list[int] = []
    finish = functools.partial(done.append, 1)
    previous = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(AlarmError):
            run_in_a_row([call, call], finish)
        assert done == [1]
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.quick(1)
@every_way
def test_a_state_that_was_set_is_trained_on(way: str) -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    session, other = (TrainingSession(model, settings=WAYS[way]) for _ in range(2))
    for seed in range(3):
        session.step(affine_batch(seed=seed))
    other.state = dict(session.state)
    for seed in range(3):
        session.step(affine_batch(seed=seed))
        other.step(affine_batch(seed=seed))
    assert_same_arrays(dict(other.state), dict(session.state))


def test_the_outputs_that_are_asked_for() -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(model)
    assert set(session.step(affine_batch())) == {"loss", "y"}
    assert set(session.step(affine_batch(), outputs=["loss"])) == {"loss"}
    assert session.step(affine_batch(), outputs=[]) == {}
    with pytest.raises(OrtopsError, match="outputs: there is no output 'los'; did you mean 'loss'"):
        session.step(affine_batch(), outputs=["los"])
    assert session.steps_done == 3


@pytest.mark.quick(2)
@every_way
def test_state_is_whole_while_steps_are_made(way: str) -> None:
    """Weights and step count that another thread reads together belong together."""
    rate = optimizers.SGD(learning_rate=1.0)
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer=rate)
    session = TrainingSession(model, settings=WAYS[way])
    batch = {"x": np.zeros((1, 3), np.float32), "targets": np.zeros((1, 2), np.float32)}
    stop = threading.Event()
    seen: list[int] = []

    def watch() -> None:
        while not stop.is_set():
            seen.append(session.steps_done)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(50):
        session.step(batch)
    stop.set()
    watcher.join()
    assert seen == sorted(seen)
    assert session.steps_done == 50


# ---------------------------------------------------------------------------------- run_steps


@pytest.mark.nightly(6)
@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=name_of)
def test_run_steps_are_steps(optimizer: Any) -> None:
    model = ortops.build_training_model(
        classifier(), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    batches = [labelled((6,), rows=rows, seed=rows) for rows in (8, 8, 8, 3, 8, 8)]
    one, several = TrainingSession(model), TrainingSession(model)
    expected = [one.step(batch)["loss"] for batch in batches]
    losses = several.run_steps(iter(batches))
    assert several.report().repeatable
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert several.steps_done == 6
    for name, array in one.state.items():
        np.testing.assert_allclose(several.state[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
    again = several.run_steps(batches[:2])
    np.testing.assert_allclose(again, [one.step(b)["loss"] for b in batches[:2]], rtol=1e-5)


@pytest.mark.slow
def test_run_steps_with_statistics_and_dropout() -> None:
    model = ortops.build_training_model(normalizing(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    batches = [labelled((1, 4, 4), seed=seed) for seed in range(5)]
    one, several = TrainingSession(model), TrainingSession(model)
    expected = [one.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(several.run_steps(batches), expected, rtol=1e-6)
    for name, array in one.state.items():
        np.testing.assert_allclose(several.state[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kernels", ["onnx", "python"])
def test_run_steps_of_a_model_that_is_not_small(kernels: Any) -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    session = TrainingSession(model, kernels=kernels, settings=APART)
    one = TrainingSession(model, settings=APART)
    batches = [affine_batch(seed=seed) for seed in range(3)]
    expected = [one.step(batch)["loss"] for batch in batches]
    np.testing.assert_allclose(session.run_steps(batches), expected, rtol=1e-6)
    assert not session.report().repeatable


def test_run_steps_of_nothing_and_of_what_does_not_fit() -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(model)
    assert session.run_steps([]).shape == (0,)
    batches = [affine_batch(), affine_batch(), {"x": np.zeros((4, 3), np.float32)}]
    before = session.state["w"]
    with pytest.raises(FeedError, match="input 'targets' is missing"):
        session.run_steps(batches)
    assert session.steps_done == 0
    np.testing.assert_array_equal(session.state["w"], before)


def test_more_steps_than_fit_into_a_run() -> None:
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(model)
    losses = session.run_steps(affine_batch(seed=0) for _ in range(150))
    assert losses.shape == (150,)
    assert session.steps_done == 150
    assert np.all(np.diff(losses) < 0)


@pytest.mark.quick(3)
@every_way
@pytest.mark.parametrize("kernels", ["onnx", "python"])
def test_gradients_that_are_fed(kernels: Any, way: str) -> None:
    work = works.Update(1500, tensors=3)  # 500 elements each: a chunk holds parts of two
    session = TrainingSession(work.trainable("Momentum"), kernels=kernels, settings=WAYS[way])
    (update,) = session.report().packed
    assert update.fed == tuple(f"{name}_gradient" for name in work.weights())
    batches, weights = work.batches(), work.weights()
    velocity = {name: np.zeros(500) for name in weights}
    chosen = HYPERPARAMETERS["Momentum"]
    for step in range(5):
        feeds = {name: array.copy() for name, array in batches[step % 2].items()}
        session.step(feeds)
        for array in feeds.values():
            array.fill(np.nan)  # what was fed is read during the step only
        for name in weights:
            g = batches[step % 2][f"{name}_gradient"]
            velocity[name] = chosen["alpha"] * velocity[name] + g
            weights[name] = weights[name] - chosen["learning_rate"] * velocity[name]
    for name, array in weights.items():
        np.testing.assert_allclose(session.state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_a_gradient_that_is_fed_and_read_elsewhere() -> None:
    model = works.Update(20).trainable("Momentum")
    graph = model.training_info[0].algorithm
    graph.node.add(op_type="ReduceMax", input=["w0_gradient"], output=["largest"], name="largest")
    graph.node[-1].attribute.add(name="keepdims", i=0, type=onnx.AttributeProto.INT)
    graph.output.append(onnx.helper.make_tensor_value_info("largest", 1, []))
    session = TrainingSession(model, settings=APART)
    gradient = np.arange(20, dtype=np.float32)
    before = session.state["w0"].copy()
    assert session.step({"w0_gradient": gradient})["largest"] == 19
    np.testing.assert_allclose(session.state["w0"], before - np.float32(1e-2) * gradient, rtol=1e-6)


@every_way
@pytest.mark.parametrize("in_nodes", [False, True], ids=["initializers", "nodes"])
def test_nothing_but_an_update(in_nodes: bool, way: str, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = [
        numpy_helper.from_array(np.float32(0.5), "R"),
        numpy_helper.from_array(np.int64(1), "T"),  # which Adagrad does not read without decay
    ]
    constants = [onnx.helper.make_node("Constant", [], [n.name], value=n) for n in numbers]
    nodes = [
        *(constants if in_nodes else []),
        onnx.helper.make_node(
            "Adagrad",
            ["R", "T", "w", "g", "h"],
            ["w_new", "h_new"],
            domain="ai.onnx.preview.training",
            epsilon=0.0,
        ),
    ]
    w, h = np.ones(600, np.float32), np.zeros(600, np.float32)
    weights, state = numpy_helper.from_array(w, "w"), numpy_helper.from_array(h, "h")

    def shown(name: str) -> onnx.ValueInfoProto:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [600])

    identity = onnx.helper.make_node("Identity", ["w"], ["y"])
    model = onnx.helper.make_model(
        onnx.helper.make_graph([identity], "model", [], [shown("y")], [weights]),
        opset_imports=[
            onnx.helper.make_opsetid(*pair) for pair in (("", 21), ("ai.onnx.preview.training", 1))
        ],
        ir_version=10,
    )
    entry = model.training_info.add()
    entry.algorithm.CopyFrom(
        onnx.helper.make_graph(
            nodes,
            "algorithm",
            [shown("g")],
            [shown("w_new"), shown("h_new")],
            [state, *([] if in_nodes else numbers)],
        )
    )
    for key in ("w", "h"):
        entry.update_binding.add(key=key, value=f"{key}_new")
    session = TrainingSession(model, settings=WAYS[way])
    for _ in range(3):
        g = np.random.default_rng(3).uniform(1, 2, 600).astype(np.float32)
        assert session.step({"g": g}) == {}
        h = h + g * g
        w = w - np.float32(0.5) * g / np.sqrt(h)
    np.testing.assert_allclose(session.state["w"], w, rtol=1e-5)
    np.testing.assert_allclose(session.state["h"], h, rtol=1e-6)
    assert not capfd.readouterr().err  # onnxruntime has nothing to warn of


@pytest.mark.quick(1)
@pytest.mark.parametrize("asked", [False, True])
def test_threads_wait_actively_for_as_long_as_settings_say(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    create = onnxruntime.InferenceSession.__init__

    def record(self: Any, model: Any, sess_options: Any = None, *rest: Any, **named: Any) -> None:
        opened.append(sess_options)
        create(self, model, sess_options, *rest, **named)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", record)
    options = onnxruntime.SessionOptions() if asked else None
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    cases = ((Settings(), "20"), (Settings(spin=7), "7"), (Settings(spin=None), ""))
    for settings, expected in cases:
        opened.clear()
        session = TrainingSession(model, settings=settings, sess_options=options)
        session.step(affine_batch())
        found = []
        for each in opened:
            try:
                found.append(each.get_session_config_entry("session.intra_op.spin_duration_us"))
            except RuntimeError:  # there is none
                found.append("")
        assert found
        assert set(found) == {"" if asked else expected}


@pytest.mark.slow
def test_how_threads_wait_changes_no_bit() -> None:
    work = works.WORKS["LSTM 64→128, sequence 50, batch 32"]
    batches = work.batches()[:3]
    found = []
    for settings in (Settings(spin=None), Settings(), Settings(spin=0)):
        session = TrainingSession(work.trainable("Adam"), settings=settings)
        losses = [session.step(batch)["loss"] for batch in batches]
        found.append([*losses, *session.state.values()])
    for others in found[1:]:
        assert_same_arrays(dict(enumerate(others)), dict(enumerate(found[0])))


def test_gradients_that_are_passed_on_are_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ortops.build_training_model(
        works._mlp(16, 32, 4), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    name = model.graph.input[0].name
    batch = {name: np.ones((8, 16), np.float32), "labels": np.arange(8) % 4}
    seen: list[weakref.ref[Any]] = []
    update = Binding.update

    def watched(self: Binding, feeds: Any) -> None:
        seen.extend(map(weakref.ref, self._given.values()))
        update(self, feeds)

    monkeypatch.setattr(Binding, "update", watched)
    settings = {"joined": -1, "chunk": 64, "threads": 2}
    sessions = [TrainingSession(model, settings=Settings(**settings, passed=n)) for n in (0, 2**40)]
    for _ in range(3):
        losses = [session.step(batch)["loss"] for session in sessions]
        np.testing.assert_array_equal(*losses)
    assert len(seen) == 3 * 4  # gradients of two layers in each step of the first session
    assert not any(gradient() is not None for gradient in seen)
    for key in sessions[0].state:
        np.testing.assert_array_equal(*(session.state[key] for session in sessions))


@pytest.mark.quick(1)
@pytest.mark.parametrize("asked", [False, True])
def test_frozen_weights_are_lent_to_onnxruntime(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the options are the caller's; numbers are the same, and several steps in a run."""
    net = mlp((64, 64, 10))
    trained = [t.name for t in net.graph.initializer if list(t.dims) != [64, 64]]
    model = ortops.build_training_model(
        net,
        loss="SoftmaxCrossEntropy",
        optimizer="Adam",
        trainable=trained,
    )
    rng = np.random.default_rng(0)
    x = net.graph.input[0].name
    batches = [
        {x: rng.random((8, 64), np.float32), "labels": rng.integers(0, 10, 8)} for _ in range(3)
    ]
    options = onnxruntime.SessionOptions() if asked else None
    found, sizes = [], []
    made = onnxruntime_sessions.open_lowered

    def note(proto: onnx.ModelProto, *arguments: Any) -> Any:
        sizes.append(proto.ByteSize())
        return made(proto, *arguments)

    monkeypatch.setattr(onnxruntime_sessions, "open_lowered", note)
    for limit in (2**24, 0):
        monkeypatch.setattr(onnxruntime_sessions, "_LENT", limit)
        session = TrainingSession(model, sess_options=options)
        losses = [session.step(batch)["loss"] for batch in batches]
        losses += list(session.run_steps(batches))
        found.append([*losses, *session.state.values()])
    assert_same_arrays(dict(enumerate(found[1])), dict(enumerate(found[0])))
    whole, lent = min(sizes[: len(sizes) // 2]), min(sizes[len(sizes) // 2 :])
    assert (whole - lent > 16000) != asked
