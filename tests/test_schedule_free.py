"""ScheduleFreeAdamW in sessions: ``ema=True`` evaluates and exports the average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from optimizer_oracle import schedule_free
from running import plain_session

import ortops
from ortops import ArgumentError, TrainingSession
from ortops.optimizers import ScheduleFreeAdamW

SETTINGS: dict[str, Any] = {"beta1": 0.875, "beta2": 0.96875, "epsilon": 2.0**-7}
FEATURES = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
TARGETS = (FEATURES @ np.float32([[1], [-2], [0.5]]) + 0.25).astype(np.float32)
BATCHES = [{"x": FEATURES[i : i + 8], "targets": TARGETS[i : i + 8]} for i in range(0, 40, 8)] * 4

LINE = """<ir_version: 10, opset_import: ["": 21]>
line (float[batch, 3] x) => (float[batch, 1] y) <float[3, 1] w = {0.5, 0.25, -1}>
{ y = MatMul (x, w) }"""


def session(optimizer: ScheduleFreeAdamW, **settings: Any) -> TrainingSession:
    model = ortops.build_training_model(
        onnx.parser.parse_model(LINE), loss="MeanSquaredError", optimizer=optimizer, **settings
    )
    return TrainingSession(model)


def by_oracle(rates: list[float], **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the weights and their average after all batches, in float64."""
    gradients: list[np.ndarray] = []
    start = np.float64([[0.5], [0.25], [-1]])
    y = average = start
    for number, batch in enumerate(BATCHES, 1):
        x, target = batch["x"].astype(np.float64), batch["targets"].astype(np.float64)
        gradients.append(2 * x.T @ (x @ y - target) / len(x))
        y, average = schedule_free(start, gradients, rates[:number], **SETTINGS, **settings)
    return y, average


@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_weights_and_average_follow_the_paper(decay: float) -> None:
    trained = session(ScheduleFreeAdamW(0.0625, **SETTINGS, weight_decay=decay))
    for batch in BATCHES:
        trained.step(batch)
    y, average = by_oracle([0.0625] * len(BATCHES), decay=decay)
    np.testing.assert_allclose(trained.parameters["w"], y, rtol=1e-5)
    for ema, w in ((False, y), (True, average)):
        np.testing.assert_allclose(
            trained.predict({"x": FEATURES}, outputs="y", ema=ema), FEATURES @ w, rtol=1e-4
        )
        exported = plain_session(trained.inference_model(onnx.parser.parse_model(LINE), ema=ema))
        np.testing.assert_allclose(
            exported.run(None, {"x": FEATURES})[0], FEATURES @ w, rtol=1e-4, atol=1e-6
        )


def test_a_warmup_weights_iterates_by_the_largest_rate() -> None:
    warmup = ortops.schedules.constant(0.0625, warmup=10)
    trained = session(ScheduleFreeAdamW(warmup, **SETTINGS))
    rates = [float(trained.step(batch)["scheduled_learning_rate"]) for batch in BATCHES]
    assert rates[0] < rates[5] < rates[-1] == 0.0625
    _, average = by_oracle(rates)
    np.testing.assert_allclose(trained.state["w.A"], average, rtol=1e-5)


@pytest.mark.slow
def test_it_resumes_and_resets_exactly(tmp_path: Path) -> None:
    first = session(ScheduleFreeAdamW(0.0625, **SETTINGS))
    first.run_steps(BATCHES[:6])
    first.save(tmp_path / "line.onnx")
    second = TrainingSession(tmp_path / "line.onnx")
    for each in (first, second):
        each.run_steps(BATCHES[6:])
    assert second.evaluate(BATCHES[0], ema=True) == first.evaluate(BATCHES[0], ema=True)
    done = first.state["w.A"]
    first.reset()
    np.testing.assert_array_equal(first.state["w.Z"], np.float32([[0.5], [0.25], [-1]]))
    first.run_steps(BATCHES)
    np.testing.assert_array_equal(first.state["w.A"], done)


def test_it_needs_no_other_average() -> None:
    with pytest.raises(ArgumentError, match=r"ema_decay must be left out .* got 0\.9"):
        session(ScheduleFreeAdamW(), ema_decay=0.9)


def test_an_adapter_with_a_scaling_is_averaged() -> None:
    """With one rate, all iterates have the same weight; B includes the scaling of 4."""
    model = ortops.lora.add(onnx.parser.parse_model(LINE), rank=2, alpha=8)
    trained = TrainingSession(
        ortops.build_training_model(
            model, loss="MeanSquaredError", optimizer=ScheduleFreeAdamW(0.0625)
        )
    )
    (b,) = (name for name in trained.parameters if "lora_B" in name)
    iterates = []
    for batch in BATCHES[:5]:
        trained.step(batch)
        iterates.append({name: trained.state[f"{name}.Z"] for name in trained.parameters})
    np.testing.assert_allclose(np.abs(iterates[0][b]), 0.25, rtol=1e-5)  # 4 · the rate
    for name, parameter in trained.parameters.items():
        mean = np.mean([each[name] for each in iterates], axis=0)
        np.testing.assert_allclose(trained.state[f"{name}.A"], mean, rtol=1e-5)
        between = 0.1 * iterates[-1][name] + 0.9 * mean
        np.testing.assert_allclose(parameter, between, rtol=1e-5)
