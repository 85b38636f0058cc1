"""Weights with infinite entries, such as the row for padding in a table of attention biases."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from ortops import Tape, TrainingSession, build_training_model, op
from ortops.optimizers import OPTIMIZERS, Adam

F = np.float32
ROWS = np.array([0.5, 0.25, -0.5], F)
BATCH = {
    "i": np.array([[0, 1, 2, 3], [0, 0, 3, 2]] * 2),
    "v": np.random.default_rng(0).normal(size=(4, 4)).astype(F),
    "targets": F([[0, 0.9, 0.05, 0.05]] * 4),
}


@functools.cache
def model(*, joined: bool = False, dtype: Any = F) -> Any:
    """Reads a table whose first row is −∞; with joined, that row is no part of the weight."""
    with Tape() as tape:
        i = tape.input("i", np.int64, ["N", "T"])
        v = tape.input("v", dtype, ["N", "T"])
        low = np.full(1, -np.inf, dtype)
        if joined:
            rows = tape.initializer("bias", ROWS.astype(dtype))
            table = op.Concat(tape.constant(low), rows, axis=0)
        else:
            table = tape.initializer("bias", np.concatenate([low, ROWS.astype(dtype)]))
        scaled = v * tape.initializer("w", np.ones(1, dtype))
        tape.output(op.Softmax(scaled + op.Gather(table, i), axis=1), "y")
    return tape.model()


def trained(*, joined: bool = False, dtype: Any = F, **settings: Any) -> TrainingSession:
    built = build_training_model(
        model(joined=joined, dtype=dtype),
        **{"loss": "MeanSquaredError", "trainable": ["bias", "w"], **settings},
    )
    return TrainingSession(built)


def feeds(dtype: Any = F) -> dict[str, Any]:
    return {**BATCH, "v": BATCH["v"].astype(dtype)}


COUNTING = {"Adafactor", "Muon", "Adam8bit", "LAMB"}
"""Rules in which an element depends on the shape of the weight, or is rounded with others."""


@pytest.mark.nightly(18)
@pytest.mark.quick(1)
@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_infinite_entries_stay(optimizer: str, ema: float | None) -> None:
    if ema and OPTIMIZERS[optimizer]().average:
        ema = None
    settings: dict[str, Any] = {"optimizer": optimizer, "ema_decay": ema, "clip_norm": 0.05}
    session, other = trained(**settings), trained(joined=True, **settings)
    for _ in range(4):
        assert np.isfinite(session.step(BATCH)["loss"])
        other.step(BATCH)
    found, expected = session.parameters["bias"], other.parameters["bias"]
    assert found[0] == -np.inf
    assert np.isfinite(found[1:]).all()
    assert (found[1:] != ROWS).all()
    if optimizer not in COUNTING:
        np.testing.assert_allclose(found[1:], expected, rtol=1e-5, atol=1e-6)
    for array in session.state.values():
        assert not np.isnan(array.astype(np.float64)).any()
    if ema:
        averages = session.state["bias.ema"]
        assert averages[0] == -np.inf
        assert np.isfinite(averages[1:]).all()
        if optimizer not in COUNTING:
            np.testing.assert_allclose(averages[1:], other.state["bias.ema"], rtol=1e-5)
        assert np.isfinite(session.evaluate(BATCH, ema=True)["loss"])


def test_regularization_and_positive_infinity() -> None:
    session = trained(optimizer=Adam(0.01, norm_coefficient=0.1))
    session.state["bias"] = np.array([-np.inf, np.inf, 0.5, 0.25], F)
    state = dict(session.state)
    session.step({**BATCH, "i": np.array([[0, 2, 2, 3]] * 4)})
    assert session.state["bias"][:2].tolist() == [-np.inf, np.inf]
    assert (session.state["bias"][2:] != state["bias"][2:]).all()


def test_float16() -> None:
    session = trained(dtype=np.float16, optimizer="AdamW", ema_decay=0.9)
    for _ in range(3):
        session.step(feeds(np.float16))
    assert session.steps_done == 3
    for name in ("bias", "bias.master", "bias.ema"):
        array = session.state[name]
        assert array[0] == -np.inf, name
        assert np.isfinite(array[1:]).all(), name


def test_they_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    trained(optimizer="Adam")
    said = [each for each in caplog.messages if "infinite" in each]
    assert said == ["'bias' has infinite entries (1), which stay as they are"]
    caplog.clear()
    trained(optimizer="Adam", joined=True)
    assert not [each for each in caplog.messages if "infinite" in each]
