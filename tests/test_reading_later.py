"""Losses that stay on a device until somebody reads them, so that steps need not wait for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from ortops import TrainingSession, build_training_model, losses, optimizers, schedules
from ortops.callbacks import Callback
from ortops.engine.execution import variant
from ortops.engine.execution.memory import Device
from ortops.engine.execution.settings import Settings
from tests.internals import execution_of
from tests.training_models import assert_same_arrays, classifier, labelled

ON_DEVICE = Settings(device=Device("cpu"), joined=0)
"""A device in the only memory that every build has; without a Scan of several steps."""
ROWS = labelled((6,), rows=40)
QUIET: dict[str, Any] = {"batch_size": 8, "progress": False}


def session_of(
    settings: Settings = ON_DEVICE, loss: Any = "SoftmaxCrossEntropy", **more: Any
) -> TrainingSession:
    rate = schedules.cosine(0.1, steps=20)
    model = build_training_model(classifier(), loss=loss, optimizer=optimizers.Adam(rate))
    return TrainingSession(model, settings=settings, **more)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens: steps, those that wait for results, and results of steps that are read."""
    events: list[str] = []
    kept: list[Any] = []
    differentiate, read = variant.Binding.differentiate, onnxruntime.OrtValue.numpy

    def spy_on_steps(binding: Any, *given: Any, **more: Any) -> dict[str, Any]:
        found = differentiate(binding, *given, **more)
        if binding.shown:  # the run that computes gradients
            waits = any(isinstance(each, np.ndarray) for each in found.values())
            events.append("waits" if waits else "step")
            kept.extend(each.value for each in found.values() if not waits)
        return found

    def spy_on_reading(value: Any) -> Any:
        if any(each is value for each in kept):
            events.append("read")
        return read(value)

    monkeypatch.setattr(variant.Binding, "differentiate", spy_on_steps)
    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", spy_on_reading)
    return events


@pytest.mark.slow
def test_several_steps_do_not_wait_for_their_losses(seen: list[str]) -> None:
    batches = [labelled((6,), seed=seed) for seed in range(70)]
    session, other = session_of(), session_of()
    expected = [float(other.step(batch, outputs=["loss"])["loss"]) for batch in batches]
    assert seen == ["waits"] * 70
    seen.clear()
    assert session.run_steps(batches).tolist() == expected
    # The first batch is compared with what the file declares; no more than 64 losses are kept.
    assert seen == ["waits", *["step"] * 63, *["read"] * 63, *["step"] * 6, *["read"] * 6]
    seen.clear()
    assert session.step(batches[0], outputs=[]) == {}
    assert seen == ["step"]
    assert_same_arrays(session.state, {**other.state, **session.state})


class Sees(Callback):
    """Sees each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, record: Any, session: Any) -> None:
        self.losses.append(record.values["loss"])


class SavesEpochs(Callback):
    """Reads the state after each epoch, but no step."""

    def on_epoch(self, record: Any, session: Any) -> None:
        session.model()


WEIGHTS = np.linspace(0.0, 2.0, 40, dtype=np.float32)
EACH = ["waits"]
LATE = [*["step"] * 5, *["read"] * 10]
"""An epoch of five batches, whose losses and learning rates are read at its end."""


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, [*EACH * 10]),
        ({"stop_on_nan": False}, ["waits", *["step"] * 4, *["read"] * 8, *LATE]),
        (
            {"stop_on_nan": False, "callbacks": [SavesEpochs()]},
            ["waits", *["step"] * 4, *["read"] * 8, *LATE],
        ),
        (
            {"stop_on_nan": False, "validation": ROWS, "validate_every": 2, "prefetch": 2},
            ["waits", *["step"] * 4, *["read"] * 8, *LATE],
        ),
        (
            {"stop_on_nan": False, "max_steps": 7, "sample_weight": WEIGHTS},
            ["waits", *["step"] * 4, *["read"] * 12, "step", "step", *["read"] * 6],
        ),
        ({"stop_on_nan": False, "callbacks": [Sees()]}, [*EACH * 10]),
        ({"stop_on_nan": False, "train_metrics": True, "metrics": ["accuracy"]}, [*EACH * 10]),
        ({"stop_on_nan": False, "detect_anomaly": True}, [*EACH * 10]),
    ],
    ids=[
        *("by default", "late", "callback of epochs", "validation", "a limit, weights"),
        *("callback of steps", "metrics", "anomalies"),
    ],
)
def test_fit_reads_what_somebody_reads(
    options: dict[str, Any], epochs: list[str], seen: list[str]
) -> None:
    weighs = "sample_weight" if "sample_weight" in options else None
    loss = losses.SoftmaxCrossEntropy(sample_weight=weighs)
    session = session_of(loss=loss)
    history = session.fit(ROWS, epochs=2, **QUIET, **options)
    assert seen == epochs
    expected = session_of(Settings(), loss).fit(ROWS, epochs=2, **QUIET, **options)
    for one, two in zip(history, expected, strict=True):
        for name in two.keys() - {"seconds"}:
            np.testing.assert_allclose(one[name], two[name], rtol=1e-6, err_msg=name)
    plain = session_of(loss=loss).fit(ROWS, epochs=2, **QUIET, **{**options, "stop_on_nan": True})
    assert history == plain  # the same bits


def test_a_long_epoch_keeps_few_losses(seen: list[str]) -> None:
    session = session_of()
    session.fit(labelled((6,), rows=150), batch_size=1, progress=False, stop_on_nan=False)
    parts = [[*["step"] * count, *["read"] * 2 * count] for count in (63, 64, 22)]
    assert seen == ["waits", *parts[0], *parts[1], *parts[2]]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_training_that_ended_with_an_error_goes_on(tmp_path: Path, ignored: bool) -> None:
    """The file has the sums of all steps before it, though nobody had read them."""
    rows = {name: array.copy() for name, array in ROWS.items()}
    loss = losses.SoftmaxCrossEntropy(ignore_index=2 if ignored else None)

    def batches(stop: int) -> Iterator[dict[str, np.ndarray]]:
        for begin in range(0, 40, 8):
            if begin == stop:
                raise RuntimeError("the disk is gone")
            yield {name: array[begin : begin + 8] for name, array in rows.items()}

    found = {}
    for stops in (True, False):
        session = session_of(loss=loss)
        options = {"epochs": 2, "progress": False, "stop_on_nan": stops}
        with pytest.raises(RuntimeError, match="disk"):
            session.fit(lambda: batches(24), **options)
        session.save(tmp_path / "half.onnx")
        properties = {p.key: p.value for p in onnx.load(tmp_path / "half.onnx").metadata_props}
        position = json.loads(properties["ortops.fit"])
        position.pop("seconds")
        assert (position["batch"], position["samples"]) == (3, 24)
        resumed = TrainingSession(tmp_path / "half.onnx", settings=ON_DEVICE)
        history = resumed.fit(lambda: batches(-1), **options, resume=True)
        found[stops] = position, history
    assert found[False] == found[True]


@pytest.mark.slow
@pytest.mark.webgpu
@pytest.mark.needs("onnxruntime>=1.32")
def test_losses_stay_on_webgpu(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[str, str]] = []
    bind = onnxruntime.IOBinding.bind_output

    def spy(binding: Any, name: str, device: str = "cpu", *more: Any, **others: Any) -> None:
        bound.append((name, device))
        bind(binding, name, device, *more, **others)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_output", spy)
    batch = labelled((6,))
    session = session_of(Settings(), providers=["webgpu"])
    assert execution_of(session).on_device
    first = session.step(batch, outputs=["loss"])["loss"]
    bound.clear()
    rest = session.run_steps([batch] * 3)
    assert bound == [("loss", "webgpu")] * 3
    bound.clear()
    session.step(batch, outputs=[])
    assert bound == []
    session.reset()
    history = session.fit(ROWS, **QUIET, stop_on_nan=False)
    assert [name for name, device in bound if (name, device) == ("loss", "webgpu")] == ["loss"] * 5
    expected = session_of(replace(ON_DEVICE, device=None))
    np.testing.assert_allclose([first, *rest], expected.run_steps([batch] * 4), rtol=1e-5)
    expected.reset()
    again = expected.fit(ROWS, **QUIET)
    np.testing.assert_allclose(history[0]["loss"], again[0]["loss"], rtol=1e-5)
