"""Prodigy on arrays and in sessions, next to the published algorithm in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortops import ArgumentError, TrainingSession, build_training_model
from ortops.engine.execution.settings import Settings
from ortops.optimizers import Prodigy

LINE = """<ir_version: 10, opset_import: ["": 21]>
line (float[batch, 3] x) => (float[batch, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0, 1}>
{ product = MatMul (x, w)  y = Add (product, b) }"""
START = {"w": np.arange(1.0, 7.0).reshape(3, 2), "b": np.arange(2.0)}
FEATURES = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
TARGETS = (FEATURES @ np.float32([[1, 0], [-2, 1], [0.5, 3]]) + 0.25).astype(np.float32)
BATCHES = [{"x": FEATURES[i : i + 8], "targets": TARGETS[i : i + 8]} for i in range(0, 40, 8)] * 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decayed": {"weight_decay": 0.125, "coefficient": 0.5},
    "corrected": {"bias_correction": True, "learning_rate": 0.5},
    "safeguarded": {"safeguard_warmup": True, "start": 2.0**-12},
}
COMMON: dict[str, Any] = {"beta1": 0.875, "beta2": 0.9375, "epsilon": 2.0**-20, "start": 2.0**-10}


def gradients(weights: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    x, targets = (batch[name].astype(np.float64) for name in ("x", "targets"))
    back = 2 * (x @ weights["w"] + weights["b"] - targets) / targets.size
    return {"w": x.T @ back, "b": back.sum(0)}


def by_paper(
    batches: list[dict[str, Any]],
    *,
    learning_rate: float = 1.0,
    beta1: float,
    beta2: float,
    epsilon: float,
    start: float,
    weight_decay: float = 0.0,
    coefficient: float = 1.0,
    bias_correction: bool = False,
    safeguard_warmup: bool = False,
) -> tuple[dict[str, Any], list[float]]:
    """Returns the weights after some batches, and the estimates."""
    x = dict(START)
    zeros = {name: np.zeros_like(each) for name, each in x.items()}
    m, v, s = dict(zeros), dict(zeros), dict(zeros)
    numerator, d, seen, decay = 0.0, start, [], np.sqrt(beta2)
    for k, batch in enumerate(batches):
        g, rate = gradients(x, batch), d * learning_rate
        if bias_correction:
            rate *= np.sqrt(1 - beta2 ** (k + 1)) / (1 - beta1 ** (k + 1))
        numerator *= decay
        for name in x:
            numerator += d / start * rate * np.vdot(g[name], START[name] - x[name])
            m[name] = beta1 * m[name] + (1 - beta1) * d * g[name]
            v[name] = beta2 * v[name] + (1 - beta2) * d**2 * g[name] ** 2
            s[name] = decay * s[name] + d / start * (d if safeguard_warmup else rate) * g[name]
        d = max(d, coefficient * numerator / sum(np.abs(each).sum() for each in s.values()))
        for name in x:
            step = m[name] / (np.sqrt(v[name]) + d * epsilon) + weight_decay * x[name]
            x[name] = x[name] - rate * step
        seen.append(d)
    return x, seen


def session(
    optimizer: Prodigy, settings: Settings | None = None, text: str = LINE, **more: Any
) -> TrainingSession:
    model = build_training_model(
        onnx.parser.parse_model(text), loss="MeanSquaredError", optimizer=optimizer, **more
    )
    return TrainingSession(model, settings=settings)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("joined", [None, -1])
@pytest.mark.parametrize(("kind", "bound"), [("double", 1e-7), ("float", 5e-4)])
@pytest.mark.parametrize("name", CASES)
def test_sessions_follow_the_paper(name: str, kind: str, bound: float, joined: int | None) -> None:
    """In float32, the distance from the start is exact to some 1e-4 in the first steps."""
    settings = {**COMMON, **CASES[name]}
    execution = None if joined is None else Settings(joined=joined)
    trained = session(Prodigy(**settings), execution, LINE.replace("float[", f"{kind}["))
    dtype, estimates = np.float64 if kind == "double" else np.float32, []
    for batch in BATCHES:
        trained.step({name: array.astype(dtype) for name, array in batch.items()})
        estimates.append(trained.state["w.D"].item())
        assert trained.state["b.D"] == trained.state["w.D"]
    wanted, expected = by_paper(BATCHES, **settings)
    assert expected[-1] > 8 * expected[0]
    np.testing.assert_allclose(estimates, expected, rtol=bound)
    for parameter, array in wanted.items():
        np.testing.assert_allclose(trained.parameters[parameter], array, rtol=0, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_one_array_follows_the_paper(name: str) -> None:
    settings = {**COMMON, **CASES[name]}
    optimizer, zero = Prodigy(**settings), np.zeros(())
    x = START["w"]
    state = [np.zeros_like(x), np.zeros_like(x), np.zeros_like(x), x, zero, zero]
    bias = START["b"]
    batches = [{**each, "targets": np.float64(each["targets"])} for each in BATCHES]
    rate = np.float64(optimizer.peak)
    others = [np.zeros_like(bias)] * 3 + [bias, zero, zero]
    for t, batch in enumerate(batches, 1):
        g = gradients({"w": x, "b": bias}, batch)
        inputs = [(x, g["w"], *state), (bias, g["b"], *others)]
        parts = [optimizer.summands(rate, np.int64(t), *each) for each in inputs]
        sums = tuple(sum(each) for each in zip(*parts, strict=True))
        keywords = {**optimizer.attributes, "sums": sums}
        (x, *state), (bias, *others) = (
            optimizer.rule(rate, np.int64(t), *each, **keywords) for each in inputs
        )
    wanted, estimates = by_paper(batches, **settings)
    np.testing.assert_allclose(state[-1], estimates[-1], rtol=1e-12)
    np.testing.assert_allclose(x, wanted["w"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(bias, wanted["b"], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients_that_are_given_and_several_steps_are_the_same(tmp_path: Path) -> None:
    first, second, third = (session(Prodigy(**COMMON)) for _ in range(3))
    for batch in BATCHES[:4]:
        first.step(batch)
        second.apply(second.gradients(batch))
    third.run_steps(BATCHES[:4])
    first.save(tmp_path / "line.onnx")
    for other in (second, third, TrainingSession(tmp_path / "line.onnx")):
        for name, array in first.state.items():
            np.testing.assert_allclose(other.state[name], array, rtol=1e-5, atol=1e-9)


def test_float16_masters_share_an_estimate() -> None:
    text = LINE.replace("float[", "float16[")
    model = build_training_model(
        onnx.parser.parse_model(text), loss="MeanSquaredError", optimizer=Prodigy(**COMMON)
    )
    trained = TrainingSession(model)
    for batch in BATCHES[:8]:
        trained.step({name: array.astype(np.float16) for name, array in batch.items()})
    assert trained.state["b.D"] == trained.state["w.D"] >= np.float32(COMMON["start"])
    assert np.isfinite(trained.state["w.master"]).all()


def test_groups_need_one_learning_rate() -> None:
    session(Prodigy(), groups={"b": {"weight_decay": 0.5}}).step(BATCHES[0])
    with pytest.raises(ArgumentError, match=r"groups must have one learning rate .* Prodigy"):
        session(Prodigy(), groups={"b": {"learning_rate": 0.5}})
