"""Training on onnxruntime's WebGPU provider, on the device of `tests.webgpu`: equal to the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

import ortops
from models import digits
from models.lenet import lenet
from models.lstm import lstm
from models.resnet import resnet
from models.transformer import transformer
from ortops import TrainingSession, build_training_model, optimizers, schedules
from ortops.cli import main
from ortops.engine.execution.memory import DeviceArray
from ortops.engine.execution.providers import why_unusable
from ortops.engine.execution.settings import Settings
from ortops.errors import UnsupportedError
from tests.internals import execution_of
from tests.test_entries import rows, two_heads
from tests.training_models import assert_same_arrays, classifier, labelled

pytestmark = [pytest.mark.webgpu, pytest.mark.needs("onnxruntime>=1.32")]

BATCH = labelled((6,))


def built(model: onnx.ModelProto | None = None, **arguments: Any) -> onnx.ModelProto:
    arguments = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam", **arguments}
    return build_training_model(model or classifier(), **arguments)


def pair(model: onnx.ModelProto, **more: Any) -> tuple[TrainingSession, TrainingSession]:
    """Returns sessions on the device and on the CPU."""
    return TrainingSession(model, providers=["webgpu"], **more), TrainingSession(model, **more)


def assert_close(
    found: Mapping[str, Any], expected: Mapping[str, Any], bound: float = 1e-5
) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=bound, atol=bound, err_msg=name)


def batches(name: str, rows: int = 16, count: int = 8) -> list[dict[str, np.ndarray]]:
    train = digits.load().train
    starts = range(0, rows * count, rows)
    images = [train.images[at : at + rows] for at in starts]
    if name == "tokens":
        images = [each[:, 0] for each in images]
    return [
        {name: each, "labels": train.labels[at : at + rows]}
        for at, each in zip(starts, images, strict=True)
    ]


def ids() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 20, (16, 8)) for _ in range(4)]
    return [{"tokens": each, "labels": each[:, 0] % 10} for each in tokens]


# Batches, arguments, and the greatest difference of losses, as a part of the loss, and of states.
# The states of AdamW are less alike, because it divides by gradients near 0.
MODELS: dict[str, tuple[Any, Any, dict[str, Any], float, float]] = {
    "mlp, dropout": (
        lambda: classifier(dropout=0.5),
        lambda: [labelled((6,), seed=seed) for seed in range(4)],
        {"optimizer": optimizers.AdamW(schedules.cosine(0.01, steps=100)), "ema_decay": 0.9},
        1e-5,
        1e-4,
    ),
    "lenet, dropout": (
        lambda: lenet(channels=(4, 8), hidden=16, dropout_ratio=0.3),
        lambda: batches("images"),
        {},
        2e-5,
        1e-4,
    ),
    "transformer": (
        lambda: transformer(width=16, heads=2, hidden=32, depth=1, dropout_ratio=0.1),
        lambda: batches("tokens"),
        {"optimizer": "AdamW", "clip_norm": 1.0},
        5e-5,
        5e-3,
    ),
    "transformer, ids": (
        lambda: transformer(vocabulary=20, width=16, heads=2, hidden=32, depth=1),
        ids,
        {},
        5e-5,
        5e-3,
    ),
    "lstm": (lambda: lstm(width=16), lambda: batches("tokens"), {}, 1e-5, 1e-4),
    "resnet": (
        lambda: resnet((1, 1), width=4),
        lambda: batches("images"),
        {"optimizer": optimizers.Momentum(0.05, alpha=0.9, beta=1.0)},
        5e-5,
        1e-3,
    ),
}


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n if n.startswith("mlp") else pytest.param(n, marks=pytest.mark.slow) for n in MODELS],
)
def test_a_hundred_steps_equal_the_cpu(name: str) -> None:
    model, data, arguments, of_losses, of_states = MODELS[name]
    device, cpu = pair(built(model(), **arguments))
    given = data()
    fed = [given[number % len(given)] for number in range(100)]
    losses = [
        [float(session.step(batch, outputs=["loss"])["loss"]) for batch in fed]
        for session in (device, cpu)
    ]
    np.testing.assert_allclose(*losses, rtol=of_losses, atol=of_losses)
    assert losses[1][-1] < losses[1][0]
    assert device.steps_done == 100
    assert_close(device.state, cpu.state, of_states)


def test_a_provider_that_is_asked_for_again_is_not_registered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second registration fails, and the next session would then end the process."""
    with monkeypatch.context() as hidden:
        hidden.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
        for _ in range(2):
            assert why_unusable("webgpu").endswith("has found no device on this machine")
    assert why_unusable("webgpu") == ""


def test_variables_are_on_the_device() -> None:
    device, _ = pair(built())
    report = device.report()
    assert report.device == "webgpu"
    memories = execution_of(device).memories()
    kinds = {n: m.value.device_name() for n, m in memories.items() if isinstance(m, DeviceArray)}
    assert set(kinds.values()) == {"webgpu"}
    assert kinds.keys() == set(report.on_device)
    # The number of steps is int64, for which there are no kernels; it is where it is read.
    assert memories.keys() - kinds.keys() == {"step"}
    assert device.placement["Tanh"] == "WebGpuExecutionProvider"


@pytest.mark.slow
def test_fit_evaluate_and_predict() -> None:
    device, cpu = pair(built(classifier(dropout=0.25), ema_decay=0.9))
    data = {name: np.concatenate([array] * 5) for name, array in BATCH.items()}
    for session in (device, cpu):
        session.fit(data, epochs=3, batch_size=4, progress=False, validation=data)
    for ema in (False, True):
        found, expected = (s.evaluate(data, metrics=["accuracy"], ema=ema) for s in (device, cpu))
        assert_close(found, expected)
        assert_close(device.predict(data, ema=ema), cpu.predict(data, ema=ema))
    device.step(BATCH)
    cpu.step(BATCH)
    assert_close(device.evaluate(data), cpu.evaluate(data))  # of what the last step wrote


@pytest.mark.slow
def test_gradients_and_several_steps() -> None:
    device, cpu = pair(built(classifier(dropout=0.5), clip_norm=0.5))
    for _ in range(3):
        found, expected = device.gradients(BATCH), cpu.gradients(BATCH)
        assert_close(dict(found), dict(expected))
        device.apply(found)
        cpu.apply(expected)
    np.testing.assert_allclose(device.run_steps([BATCH] * 5), cpu.run_steps([BATCH] * 5), rtol=1e-5)
    for session in (device, cpu):
        session.fit([BATCH] * 4, epochs=2, accumulate=2, progress=False)
        session.step(BATCH, reduce=lambda gradients: None)
    assert_close(device.state, cpu.state)


@pytest.mark.slow
def test_resume_is_exact(tmp_path: Path) -> None:
    schedule = schedules.warmup_cosine(0.05, steps=20, warmup=5)
    model = built(classifier(dropout=0.5), optimizer=optimizers.AdamW(schedule))
    device, cpu = pair(model)
    for _ in range(5):
        device.step(BATCH)
    device.save(tmp_path / "device.onnx")
    again = TrainingSession(tmp_path / "device.onnx", providers=["webgpu"])
    for _ in range(5):
        assert_same_arrays(again.step(BATCH), device.step(BATCH))
    assert_same_arrays(dict(again.state), dict(device.state))
    assert again.steps_done == 10
    device.reset()
    assert_same_arrays(dict(sorted(device.state.items())), dict(sorted(cpu.state.items())))
    assert_close(device.step(BATCH), cpu.step(BATCH))


@pytest.mark.slow
def test_large_models_are_updated_in_place(tmp_path: Path) -> None:
    model = built(
        classifier(dropout=0.5),
        optimizer=optimizers.AdamW(schedules.cosine(0.05, steps=20)),
        ema_decay=0.9,
        clip_norm=0.5,
    )
    large = Settings(joined=0)  # as if all models were
    device, cpu = (
        TrainingSession(model, providers=["webgpu"], settings=large),
        TrainingSession(model),
    )
    in_turn = device.report().in_turn
    assert not any(device.state[name].ndim for name in in_turn), in_turn
    for _ in range(5):
        assert_close(device.step(BATCH), cpu.step(BATCH))
    np.testing.assert_allclose(device.run_steps([BATCH] * 3), cpu.run_steps([BATCH] * 3), rtol=1e-5)
    device.save(tmp_path / "device.onnx")
    again = TrainingSession(tmp_path / "device.onnx", providers=["webgpu"], settings=large)
    for session in (device, cpu, again):
        session.fit([BATCH] * 4, epochs=2, accumulate=2, progress=False)
        session.step(BATCH)
    assert_same_arrays(dict(again.state), dict(device.state))
    assert_close(device.state, cpu.state, 1e-4)
    assert_close(device.evaluate([BATCH], ema=True), cpu.evaluate([BATCH], ema=True))
    copies = {n: p for n, p in device.placement.items() if n.endswith(".overwritten")}
    assert copies.keys() >= {"w1.overwritten", "w1.V.overwritten"}
    assert set(copies.values()) == {"WebGpuExecutionProvider"}


def test_state_is_set() -> None:
    device, cpu = pair(built())
    for session in (device, cpu):
        session.step(BATCH)
        session.learning_rate = 0.25
        session.state["w1"] = session.state["w1"] * 2
        session.state["step"] = np.array(7)
        session.step(BATCH)
    assert device.steps_done == 8
    assert_close(device.state, cpu.state)


@pytest.mark.slow
def test_recomputed_activations() -> None:
    model = transformer(width=8, heads=2, hidden=16, depth=2, dropout_ratio=0.1)
    device, cpu = pair(built(model), recompute="sqrt")
    for batch in batches("tokens", rows=4, count=3):
        assert_close(device.step(batch), cpu.step(batch))


@pytest.mark.slow
def test_an_adapter() -> None:
    model = ortops.lora.add(transformer(width=8, heads=2, hidden=16, depth=1), rank=2)
    device, cpu = pair(built(model))
    for batch in batches("tokens", rows=4, count=5):
        assert_close(device.step(batch), cpu.step(batch))
    assert_close(device.state, cpu.state, 1e-4)


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "optimizer", ["SGD", "NAdam", "RAdam", "Lion", "LAMB", "Adafactor", "Muon"]
)
def test_optimizers(optimizer: str) -> None:
    device, cpu = pair(built(optimizer=optimizer))
    for _ in range(5):
        assert_close(device.step(BATCH), cpu.step(BATCH))
    assert_close(device.state, cpu.state)


def test_what_falls_back_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ortops"):
        session = TrainingSession(built(), providers=["webgpu", "CPUExecutionProvider"])
        session.step(BATCH)
        session.evaluate([BATCH])
    (said,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("providers")]
    counts = session.placement
    fallen = [name for name, provider in counts.items() if provider == "CPUExecutionProvider"]
    assert said.startswith(f"providers: {len(fallen)} of {len(counts)} nodes of a step run on the")
    assert said.endswith("session.placement names them")
    assert 0 < len(fallen) < len(counts) / 2


@pytest.mark.slow
def test_names_of_the_provider() -> None:
    model = built()
    expected = TrainingSession(model, providers=["webgpu"]).step(BATCH)
    devices = [
        each for each in onnxruntime.get_ep_devices() if each.ep_name == "WebGpuExecutionProvider"
    ]
    for providers in (
        ["WebGpuExecutionProvider"],
        [("webgpu", {}), "CPUExecutionProvider"],
        ["CUDAExecutionProvider", "webgpu", "CPUExecutionProvider"],
        devices,
    ):
        session = TrainingSession(model, providers=providers)
        assert "WebGpuExecutionProvider" in session.placement.values()
        assert_same_arrays(session.step(BATCH), expected)


def as_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose weights are float16, and cast to float32."""
    for tensor in model.graph.initializer:
        if tensor.name in ("w1", "w2"):
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            name = tensor.name
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, f"{name}.half"))
            cast = onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT)
            model.graph.node.insert(0, cast)
    return model


def test_float16() -> None:
    """Float16 is an optional feature of WebGPU, which the device in software lacks."""
    from ortops.engine.execution import providers

    assert why_unusable("webgpu") == ""  # asking registers it
    model = built(as_half(classifier()))
    if providers._computes_in_float16():
        device, cpu = pair(model)
        for _ in range(5):
            assert_close(device.step(BATCH), cpu.step(BATCH), 1e-3)
    else:
        with pytest.raises(UnsupportedError, match=r"has no float16 \(the feature 'shader-f16'\)"):
            TrainingSession(model, providers=["webgpu"])


def test_a_float64_model_is_refused() -> None:
    from tests.training_models import affine

    model = build_training_model(affine(dtype=np.float64), loss="L1", optimizer="SGD")
    with pytest.raises(UnsupportedError, match="is float64, which WebGPU does not support"):
        TrainingSession(model, providers=["webgpu"])


def test_kernels_in_python_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"kernels must be 'onnx' for .* 'webgpu'"):
        TrainingSession(built(), kernels="python", providers=["webgpu"])


@pytest.mark.slow
def test_several_algorithms_of_a_file() -> None:
    """The second one reads what the first one trains."""
    device, cpu = pair(two_heads())
    batch = rows()
    for entry in ("main", "second", "main", "second", "second", None, "main"):
        found, expected = (each.step(batch, entry=entry) for each in (device, cpu))
        assert_close(found, expected)
    assert_close(device.state, cpu.state, 1e-4)
    assert_close(device.evaluate(batch), cpu.evaluate(batch))


def test_a_function() -> None:
    f, g = (ortops.Function(classifier(), providers=p) for p in (["webgpu"], None))
    x = BATCH["x"]
    np.testing.assert_allclose(f(x), g(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_learning_rates_are_tried_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    session, cpu = pair(built())
    data = {name: np.concatenate([array] * 5) for name, array in BATCH.items()}
    with caplog.at_level(logging.INFO, "ortops"):
        found = ortops.callbacks.find_learning_rate(session, data, steps=20, lowest=1e-4)
    assert any("nodes of a step run on the CPU" in r.getMessage() for r in caplog.records)
    expected = ortops.callbacks.find_learning_rate(cpu, data, steps=20, lowest=1e-4)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-4)


@pytest.mark.slow
def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(built(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **BATCH)
    arguments = [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "data.npz")]
    saved = str(tmp_path / "saved.onnx")
    assert main(["train", *arguments, "--save", saved, "--providers", "webgpu"]) == 0
    expected = TrainingSession(built())
    expected.fit(BATCH, progress=False)
    assert_close(TrainingSession(saved).state, expected.state)
    capsys.readouterr()
    assert main(["inspect", saved, "--providers", "webgpu", "CPUExecutionProvider"]) == 0
    shown = capsys.readouterr().out.splitlines()
    placement = TrainingSession(saved, providers=["webgpu"]).placement
    count = sum(provider == "WebGpuExecutionProvider" for provider in placement.values())
    line = f"WebGpuExecutionProvider runs {count} of {len(placement)} nodes of a step"
    at = shown.index(line)
    fallen = len(placement) - count
    assert (
        shown[at + 1] == f"CPUExecutionProvider runs {fallen} of {len(placement)} nodes of a step:"
    )
    assert {each.strip() for each in shown[at + 2 : at + 2 + fallen]} <= placement.keys()
