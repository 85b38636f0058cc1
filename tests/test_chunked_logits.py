"""Cross-entropy in chunks of rows: the same numbers, without all logits at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import Tape, TrainingSession, op
from ortops.engine.execution.settings import Settings
from ortops.graph.passes import chunked_logits

F = np.float32
CLASSES, SIZE = 4096, 8


def language_model(*, trained_head: bool = False, after: str = "", half: bool = False) -> Any:
    """A trained layer, and a head of 4096 classes."""
    draw = np.random.default_rng(0)
    with Tape(name="tiny") as tape:
        x = tape.input("x", F, ["batch", "time", SIZE])
        w = tape.initializer("w", draw.standard_normal((SIZE, SIZE)).astype(F))
        weights = draw.standard_normal((SIZE, CLASSES)).astype(np.float16 if half else F)
        head = tape.initializer("head", weights)
        hidden = op.Tanh(x @ w)
        logits = (hidden.astype(np.float16) if half else hidden) @ head
        if after == "cap":
            logits = op.Tanh(logits * 0.5) * 2.0
        tape.output(logits.astype(F) if half else logits, "logits")
    return ortops.build_training_model(
        tape.model(),
        loss="NextToken",
        optimizer="SGD",
        trainable=["w", "head"] if trained_head else ["w"],
    )


def batch(rows: int = 3, time: int = 7, ignored: bool = True) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    labels = draw.integers(0, CLASSES, (rows, time))
    if ignored:
        labels[0, 3:] = -100
        labels[1, :2] = -100
    return {"x": draw.standard_normal((rows, time, SIZE)).astype(F), "labels": labels}


def gradients(model: onnx.ModelProto, feeds: dict[str, Any], *without: str) -> Any:
    session = TrainingSession(model, outputs=[], settings=Settings().without(*without))
    return session.gradients(feeds)


def expected(model: onnx.ModelProto, feeds: dict[str, Any], cap: bool) -> tuple[float, Any]:
    """The loss and its gradient by w in float64, from their formulas."""
    w, head = (
        onnx.numpy_helper.to_array(each).astype(np.float64)
        for name in ("w", "head")
        for each in model.graph.initializer
        if each.name == name
    )
    x, labels = feeds["x"].astype(np.float64), feeds["labels"]
    hidden = np.tanh(x @ w)
    raw = hidden @ head
    logits = np.tanh(raw * 0.5) * 2 if cap else raw
    shifted = np.full(labels.shape, -100)
    shifted[:, :-1] = labels[:, 1:]
    real = shifted != -100
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    one_hot = np.eye(CLASSES)[np.where(real, shifted, 0)]
    loss = -np.sum(np.log((p * one_hot).sum(-1)) * real) / real.sum()
    slope = (p - one_hot) * real[..., None] / real.sum()
    slope = slope * (1 - np.tanh(raw * 0.5) ** 2) if cap else slope
    slope = (slope @ head.T) * (1 - hidden**2)
    return loss, np.einsum("bti,btj->ij", x, slope)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("rows_per_chunk", [1, 4, 10**6])
@pytest.mark.parametrize("after", ["", "cap"])
@pytest.mark.parametrize("ignored", [True, False])
def test_loss_and_gradient(
    ignored: bool, after: str, rows_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_logits, "largest_chunk", lambda classes: rows_per_chunk * classes)
    model, feeds = language_model(after=after), batch(ignored=ignored)
    loss, slope = expected(model, feeds, after == "cap")
    found = gradients(model, feeds)
    assert found.loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(found["w"], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_half_precision() -> None:
    model, feeds = language_model(half=True), batch()
    one, other = gradients(model, feeds), gradients(model, feeds, "chunked_logits")
    assert one.loss == pytest.approx(other.loss, rel=1e-4)
    np.testing.assert_allclose(one["w"], other["w"], rtol=1e-2, atol=1e-4)


def test_all_labels_ignored() -> None:
    model, feeds = language_model(), batch()
    feeds["labels"][:] = -100
    found = gradients(model, feeds)
    assert found.loss == 0
    assert not found["w"].any()


def test_steps_are_those_without_chunks() -> None:
    model = language_model()
    sessions = [
        TrainingSession(model, outputs=[], settings=Settings().without(*names))
        for names in ((), ("chunked_logits",))
    ]
    for number in range(4):
        one, other = (session.step(batch(time=5 + number))["loss"] for session in sessions)
        assert one == pytest.approx(other, rel=1e-6)
    runs = [session.run_steps([batch()] * 3) for session in sessions]
    np.testing.assert_allclose(*runs, rtol=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("settings", "chunked"),
    [
        ({}, False),  # the logits are an output
        ({"outputs": []}, True),
        ({"outputs": ["logits"]}, False),
    ],
    ids=str,
)
def test_logits_that_are_returned_are_computed_at_once(
    settings: dict[str, Any], chunked: bool
) -> None:
    session = TrainingSession(language_model(), **settings)
    found = session.step(batch())
    operators = session.report().operators
    assert operators
    assert ("Scan" in operators) == chunked
    assert ("logits" in found) == (settings.get("outputs") != [])


def test_a_trained_head_is_computed_at_once() -> None:
    model, feeds = language_model(trained_head=True), batch()
    one, other = gradients(model, feeds), gradients(model, feeds, "chunked_logits")
    for name in ("w", "head"):
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("outputs", ["logits", ["nothing"], [3], 3])
def test_outputs_that_are_refused(outputs: Any) -> None:
    with pytest.raises(ortops.ArgumentError, match="outputs"):
        TrainingSession(language_model(), outputs=outputs)
