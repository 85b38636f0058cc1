"""Updates that are compiled after some steps, as by default: nothing else changes.

The oracle is a session with ``kernels="onnx"``, whose bits must be the same in every step, wherever
the other session changes.
"""

from __future__ import annotations

import itertools
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from internals import memory_of
from onnx import TensorProto
from test_compiled import anew, batches, build, softened
from test_precision import half
from training_models import affine, affine_batch, classifier, labelled

import ortops
from benchmarks import works
from models import line
from ortops import TrainingSession, optimizers, schedules
from ortops.engine.execution import compilation, trial
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.update import CompiledUpdate, SessionUpdate
from ortops.optimizers import OPTIMIZERS

__all__ = ["anew"]

WAYS = {
    "small": Settings(),
    "one chunk": Settings(joined=-1),
    "chunks": Settings(joined=-1, chunk=256, threads=2),
    "passed": Settings(joined=-1, chunk=256, threads=2, passed=0),
}
CHANGES = (0, 1, 3)
"""The number of steps before the change."""

needs_llvmlite = pytest.mark.optional("llvmlite", "fast")
pytestmark = needs_llvmlite


def after(steps: int, settings: Settings | None = None) -> Settings:
    """Returns settings with which updates are compiled after a number of steps."""
    return replace(settings or Settings(), compiled_after=(steps, 0.0), compiled_share=-1.0)


def assert_same(found: TrainingSession, expected: TrainingSession, where: object = "") -> None:
    state = expected.state
    assert list(found.state) == list(state)
    for name, array in state.items():
        assert found.state[name].tobytes() == array.tobytes(), f"{name} {where}"


def assert_same_steps(
    model: onnx.ModelProto, feeds: Sequence[Any], settings: Settings, **options: Any
) -> TrainingSession:
    """Trains with every step of the change, and returns the last session."""
    plain = TrainingSession(model, kernels="onnx", settings=settings, **options)
    outputs, states = [], []
    for batch in feeds:
        outputs.append(plain.step(batch))
        states.append({name: array.tobytes() for name, array in plain.state.items()})
    for change in CHANGES:
        session = TrainingSession(model, settings=after(change, settings), **options)
        for number, batch in enumerate(feeds):
            assert number >= change or session.compiled == ()
            found = session.step(batch)
            for name, array in outputs[number].items():
                assert found[name].tobytes() == array.tobytes(), f"{name}, {change}, {number}"
            for name, expected in states[number].items():
                assert session.state[name].tobytes() == expected, f"{name}, {change}, {number}"
    return session


# ------------------------------------------------------------------------------------- same bits


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, way: str) -> None:
    model = build(classifier(hidden=64), OPTIMIZERS[name]())
    session = assert_same_steps(model, batches() + batches(), WAYS[way])
    early = TrainingSession(model, kernels="compiled", settings=WAYS[way])
    assert set(session.compiled) == set(early.compiled)
    for each in (session, early, TrainingSession(model, settings=WAYS[way])):
        assert set(each.compilable) == set(early.compiled)
    assert TrainingSession(model, kernels="onnx").compilable == ()


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adam", "Lion"])
def test_float64(name: str, way: str) -> None:
    model = build(affine(dtype=np.float64), OPTIMIZERS[name](), loss="MeanSquaredError")
    feeds = [affine_batch(seed=seed, dtype=np.float64) for seed in range(6)]
    session = assert_same_steps(model, feeds, WAYS[way])
    assert {"w", "b"} <= set(session.compiled)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_parameters_of_16_bits_and_their_masters(kind: int, way: str) -> None:
    model = half(affine(), kind)
    options = {"clip_norm": 0.5, "clip_value": 0.25, "ema_decay": 0.5, "loss": "MeanSquaredError"}
    feeds = [{n: np.round(4 * a) for n, a in affine_batch(seed=seed).items()} for seed in range(6)]
    types = {t.name: t.type.tensor_type.elem_type for t in model.graph.input}
    if types["x"] == TensorProto.FLOAT16:
        feeds = [{**each, "x": each["x"].astype(np.float16)} for each in feeds]
    session = assert_same_steps(build(model, optimizers.Adam(0.02), **options), feeds, WAYS[way])
    assert {"w", "w.master", "w.ema", "w.V", "w.H"} <= set(session.compiled)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_groups_schedule_clipping_decay_and_averages(way: str) -> None:
    model = build(
        classifier(hidden=64),
        optimizers.AdamW(schedules.warmup_cosine(0.05, steps=10, warmup=2), weight_decay=0.1),
        groups={"b*": {"weight_decay": 0.0, "learning_rate": 0.5}},
        clip_norm=0.05,
        clip_value=0.02,
        ema_decay=0.9,
    )
    session = assert_same_steps(model, batches(3.0) + batches(), WAYS[way])
    assert {"w1", "b1", "w1.ema", "b1.ema"} <= set(session.compiled)


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_some_updates_stay_standard(way: str) -> None:
    model = build(classifier(hidden=64), optimizers.Custom(softened, learning_rate=0.1))
    session = assert_same_steps(model, batches() + batches(), WAYS[way])
    assert set(session.compiled) == {"b1", "b1.V"}


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_gradients_that_are_fed(name: str, way: str) -> None:
    work = works.Update(1500, tensors=3)
    session = assert_same_steps(
        work.trainable(name), [dict(each) for each in work.batches()] * 3, WAYS[way]
    )
    assert {"w0", "w1", "w2"} <= set(session.compiled)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_dropout(way: str) -> None:
    assert_same_steps(build(classifier(dropout=0.5), "Adam"), batches() * 2, WAYS[way])


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_sizes_of_batches_and_recomputed_activations(way: str) -> None:
    feeds = [labelled((6,), rows=rows) for rows in (8, 5, 8, 3, 8, 5, 1)]
    assert_same_steps(build(classifier(), "Adam"), feeds, WAYS[way], recompute="sqrt")


# ------------------------------------------------------------------------- everything in between


def accumulated(session: TrainingSession) -> None:
    data = {name: np.concatenate([b[name] for b in batches()]) for name in batches()[0]}
    session.fit(data, epochs=2, batch_size=4, accumulate=2, progress=False)


def in_two_parts(session: TrainingSession) -> None:
    for each in batches() * 2:
        session.apply(session.gradients(each))


def applied_later(session: TrainingSession) -> None:
    first, second, *others = batches()
    gradients = session.gradients(first)
    for each in others * 2:
        session.step(each)
    session.apply(gradients)
    summed = session.gradients(second, after=session.gradients(first))
    session.step(first)
    session.apply(summed)


def repeated(session: TrainingSession) -> None:
    for each in (batches(), batches()[:1], batches() * 2):
        session.run_steps(each)
        session.step(each[0])


def of_other_sizes(session: TrainingSession) -> None:
    rows = (8, 8, 3, 8, 8, 3, 3, 8)
    session.run_steps([labelled((6,), rows=count, seed=n) for n, count in enumerate(rows)])


def started_anew(session: TrainingSession) -> None:
    for _ in range(2):
        for each in batches():
            session.step(each)
        session.reset()
    for each in batches():
        session.step(each)


def reduced(session: TrainingSession) -> None:
    def halve(gradients: Any) -> None:
        for array in gradients.values():
            array *= np.float32(0.5)

    for each in batches() * 2:
        session.step(each, reduce=halve)


def watched(session: TrainingSession) -> None:
    data = {name: np.concatenate([b[name] for b in batches()]) for name in batches()[0]}
    session.fit(data, epochs=1, batch_size=4, progress=False, detect_anomaly=True)
    session.fit(
        data, epochs=1, batch_size=8, progress=False, metrics=["Accuracy"], train_metrics=True
    )
    session.fit(data, epochs=1, batch_size=8, progress=False, validation_split=0.25)


def set_from_outside(session: TrainingSession) -> None:
    for number, each in enumerate(batches() * 2):
        session.step(each)
        session.learning_rate = 0.01 / (1 + number)
        session.state = {"b1": session.state["b1"] * np.float32(2)}


WAYS_TO_TRAIN = [
    accumulated,
    in_two_parts,
    applied_later,
    repeated,
    of_other_sizes,
    started_anew,
    reduced,
    watched,
    set_from_outside,
]


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("train", WAYS_TO_TRAIN, ids=lambda each: each.__name__)
def test_other_ways_to_train(train: Callable[[TrainingSession], None], way: str) -> None:
    model = build(classifier(), "Adam", clip_norm=0.1)
    plain = TrainingSession(model, kernels="onnx", settings=WAYS[way])
    train(plain)
    for change in (0, 1, 2, 3, 5):
        session = TrainingSession(model, settings=after(change, WAYS[way]))
        train(session)
        assert_same(session, plain, change)
        at_once = train in (repeated, of_other_sizes)  # which makes few steps in runs of their own
        assert {"w1", "w1.V", "b1"} <= set(session.compiled) or (at_once and change > 1)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_files_and_resuming(way: str, tmp_path: Path) -> None:
    model = build(classifier(), "Adam")
    data = {name: np.concatenate([b[name] for b in batches()]) for name in batches()[0]}
    plain = TrainingSession(model, kernels="onnx", settings=WAYS[way])
    plain.fit(data, epochs=2, batch_size=5, progress=False)
    session = TrainingSession(model, settings=after(2, WAYS[way]))
    session.fit(data, epochs=2, batch_size=5, progress=False, max_steps=4)
    session.save(tmp_path / "file.onnx")
    opened = TrainingSession(tmp_path / "file.onnx", settings=after(1, WAYS[way]))
    assert opened.compiled == ()
    for each in (session, opened):
        each.fit(data, epochs=2, batch_size=5, progress=False, resume=True)
        assert_same(each, plain)
        assert each.compiled


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_several_algorithms(way: str) -> None:
    model = build(classifier(), optimizers.Adam(0.01), trainable=["w1", "b1"])
    model = ortops.add_training(
        model,
        loss="SoftmaxCrossEntropy",
        optimizer=optimizers.Momentum(0.02),
        trainable=["w2"],
        name="other",
    )
    entries = (None, "main", "other", None, "main", "main", None, "other")
    plain = TrainingSession(model, kernels="onnx", settings=WAYS[way])
    for entry, each in zip(entries, batches() * 2, strict=True):
        plain.step(each, entry=entry)
    for change in CHANGES:
        session = TrainingSession(model, settings=after(change, WAYS[way]))
        for entry, each in zip(entries, batches() * 2, strict=True):
            session.step(each, entry=entry)
        assert_same(session, plain, change)
        assert {"w1", "w2"} <= set(session.compiled)


@pytest.mark.slow
def test_other_weights_and_constants() -> None:
    model = build(classifier(), "Adam", trainable=["w1", "b1"])
    sessions = []
    for settings, kernels in ((Settings(), "onnx"), (after(2), "auto")):
        session = TrainingSession(model, kernels=kernels, settings=settings)  # type: ignore[arg-type]
        for each in batches():
            session.step(each)
        session.constants["w2"] = session.constants["w2"] * np.float32(2)
        for each in batches():
            session.step(each)
        other = session.with_trainable(["w2"])
        for each in batches():
            other.step(each)
        sessions.append((session, other))
    for plain, session in zip(*sessions, strict=True):
        assert_same(session, plain)
        assert session.compiled


# -------------------------------------------------------------------------------- when, and what


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    session = TrainingSession(build(classifier(), "Adam"), settings=after(2))
    with caplog.at_level(logging.INFO, "ortops"):
        for each in batches():
            session.step(each)
    (said,) = [text for text in caplog.messages if text.startswith("kernels: ")]
    expected = "kernels: updates of 9 variables are compiled from now on, after 2 steps"
    assert said.startswith(expected)
    assert "'step' is not: it is not elementwise" in said


def test_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    session = TrainingSession(build(classifier(), "LAMB"), settings=after(1))
    with caplog.at_level(logging.INFO, "ortops"):
        for each in batches():
            session.step(each)
    assert session.compiled == ()
    assert not [text for text in caplog.messages if text.startswith("kernels: ")]


def test_without_llvmlite(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda name: None)
    session = TrainingSession(build(classifier(), "Adam"), settings=after(1))
    with caplog.at_level(logging.DEBUG, "ortops"):
        for each in batches():
            session.step(each)
    assert session.compiled == ()
    said = [r for r in caplog.records if r.getMessage().startswith("kernels: ")]
    assert [(r.levelname, r.getMessage()) for r in said] == [
        ("DEBUG", "kernels: updates are not compiled, because llvmlite is not installed")
    ]


def test_options_that_compiled_code_would_not_follow() -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    model = build(classifier(), "Adam")
    session = TrainingSession(model, sess_options=options, settings=after(0))
    assert session.compilable == ()
    session.step(batches()[0])
    assert session.compiled == ()
    options = onnxruntime.SessionOptions()
    session = TrainingSession(model, sess_options=options, settings=after(0))
    session.step(batches()[0])
    assert session.compiled


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("harm", ["import", "library", "version", "code"])
@pytest.mark.parametrize("way", WAYS)
def test_what_fails_is_said_once_and_training_goes_on(
    way: str, harm: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import llvmlite

    def fail(*_: Any) -> Any:
        raise {"library": OSError, "code": RuntimeError}[harm]("broken")

    if harm == "import":
        monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    elif harm == "library":
        monkeypatch.setattr(compilation.importlib, "import_module", fail)
    elif harm == "version":
        monkeypatch.setattr(llvmlite, "__version__", "0.44.0")
    else:
        from llvmlite import binding

        monkeypatch.setattr(binding, "parse_assembly", fail)
    model = build(classifier(), "Adam")
    plain = TrainingSession(model, kernels="onnx", settings=WAYS[way])
    session, another = (TrainingSession(model, settings=after(1, WAYS[way])) for _ in range(2))
    for each in batches():
        plain.step(each)
        session.step(each)
        another.step(each)
    assert_same(session, plain)
    assert session.compiled == ()
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("kernels: updates cannot be compiled (")
    assert warning.endswith("training goes on with standard operators, with the same results")


def session_of(way: str, share: float) -> TrainingSession:
    """Returns a session that has decided whether to compile its updates."""
    settings = replace(WAYS[way], compiled_after=(1, 0.0), compiled_share=share)
    session = TrainingSession(build(classifier(), "Adam"), settings=settings)
    assert session.report().choice == ""
    for each in batches():
        session.step(each)
    return session


@pytest.mark.parametrize("way", WAYS)
def test_updates_change_only_if_that_promises_enough(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled that would have to take more than a step."""
    monkeypatch.setattr(trial, "CompiledUpdate", None)  # calling it would fail
    session = session_of(way, share=1.0)
    assert session.compiled == ()
    expected = r"their standard operators take \d+% of a step, and compiled code would save at most"
    assert re.match(expected, session.report().choice)


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiled", [0.5, 2.0])
def test_the_faster_is_kept(way: str, compiled: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are given: standard operators take 1 s, and the memory allows a tenth of it."""
    seconds = {SessionUpdate: 1.0, CompiledUpdate: compiled}
    monkeypatch.setattr(trial, "_seconds_of", lambda update: seconds[type(update)])
    monkeypatch.setattr(trial, "_fastest", lambda run: 0.0)
    session = session_of(way, share=0.0)
    assert bool(session.compiled) == (compiled < 1)
    assert " and compiled code saves " in session.report().choice
    assert session.report().kernels == ("compiled" if compiled < 1 else "onnx")


@pytest.mark.parametrize("after_", [(1000, 0.0), (0, 1000.0)])
def test_steps_and_seconds_must_both_have_passed(after_: tuple[int, float]) -> None:
    session = TrainingSession(line.session().model(), settings=Settings(compiled_after=after_))
    for _ in range(20):
        session.step(line.BATCH)
    assert session.compiled == ()


@pytest.mark.slow
def test_a_few_steps_import_no_compiler() -> None:
    code = (
        "import sys\nfrom models import line\nsession = line.session()\n"
        "for _ in range(9): session.step(line.BATCH)\n"
        "print([name for name in sys.modules if name.startswith(('llvmlite', 'numba'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_memory_is_that_of_standard_operators() -> None:
    """Where the formula is not safe in place, both arrays remain; others stay one."""
    model = build(classifier(hidden=64), "Adam")
    settings = Settings(joined=-1)
    plain = TrainingSession(model, kernels="onnx", settings=settings)
    session = TrainingSession(model, settings=after(1, settings))
    for each in batches():
        plain.step(each)
        session.step(each)
    found, expected = session.report(), plain.report()
    assert found.compiled
    assert not expected.compiled
    assert found.in_place == expected.in_place
    assert found.in_turn == expected.in_turn
    memories = [memory_of(session, name) for name in session.state]
    pairs = itertools.combinations(memories, 2)
    assert not any(np.shares_memory(*pair) for pair in pairs)


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.quick(2)
@pytest.mark.parametrize("change", CHANGES)
def test_compiled_updates_of_small_models_overwrite_their_variables(change: int) -> None:
    model = build(classifier(hidden=64), "Adam")
    session = TrainingSession(model, settings=after(change))
    for batch in batches()[: change + 1]:  # before the change, there are two buffers
        assert session.compiled == ()
        session.step(batch)
    session.step(batches()[0])
    assert "w1" in session.compiled
    before = {name: memory_of(session, name) for name in ("w1", "w1.V", "w1.H")}
    report = session.report()
    assert before.keys() <= set(report.in_place)
    assert [each.in_graph for each in report.packed] == [False]
    session.step(batches()[1])
    for name, array in before.items():
        assert np.shares_memory(memory_of(session, name), array), name


def test_compiled_updates_of_several_entries_have_two_buffers() -> None:
    # A later entry of a step may fail, and the variables must then be those of before the step.
    model = build(classifier(hidden=64), "Adam", trainable=["w1", "b1"])
    model = ortops.add_training(
        model, loss="SoftmaxCrossEntropy", optimizer="SGD", trainable=["w2"], name="other"
    )
    session = TrainingSession(model, kernels="compiled")
    assert "w1" in session.report().in_turn
    present = [memory_of(session, "w1")]
    for batch in batches()[:2]:
        session.step(batch)
        present.append(memory_of(session, "w1"))
    assert not np.shares_memory(present[0], present[1])
    assert np.shares_memory(present[0], present[2])
