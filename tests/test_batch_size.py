"""`ortops.find_batch_size` finds the largest batch whose steps fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training_models import affine, affine_batch, assert_same_arrays, classifier, labelled

import ortops
from ortops import ArgumentError, FeedError, OrtopsError, TrainingSession
from ortops.engine.training import batch_size
from ortops.optimizers import Adam

MEGABYTE = 2**20


def resident() -> int:
    """Returns the resident memory of the process in bytes."""
    (line,) = (
        each
        for each in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if each.startswith("VmRSS:")
    )
    return int(line.split()[1]) * 1024


def session() -> TrainingSession:
    return TrainingSession(
        ortops.build_training_model(
            classifier(dropout=0.25), loss="SoftmaxCrossEntropy", optimizer=Adam(0.05)
        )
    )


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 100])
def test_all_rows_if_they_fit(rows: int) -> None:
    data = labelled((6,), rows=rows)
    assert ortops.find_batch_size(session(), data) == rows
    assert ortops.find_batch_size(session(), data, largest=50) == min(rows, 50)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("base", [50, 1000])
@pytest.mark.parametrize("per_row", [0.5, 3, 17])
@pytest.mark.parametrize("limit", [1100, 1200, 5000])
def test_the_search(base: int, per_row: float, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a memory that grows by a fixed amount for each row, without exceeding the limit."""
    tried: list[int] = []

    def step(self: Any, size: int) -> None:
        tried.append(size)

    def peak(work: Callable[[], None]) -> int:
        work()
        return int((base + per_row * tried[-1]) * MEGABYTE)

    monkeypatch.setattr(batch_size._Search, "_step", step)
    monkeypatch.setattr(batch_size, "_peak", peak)
    data = labelled((6,), rows=10_000)
    found = ortops.find_batch_size(session(), data, limit=limit * MEGABYTE)
    right = min(int((limit - base) / per_row), 10_000)
    assert right * 15 // 16 - 1 <= found <= right
    beyond = [size for size in tried if base + per_row * size > limit]
    assert len(beyond) <= 1, "only the first sizes are tried without an estimate"


def test_a_size_that_cannot_be_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Any, size: int) -> None:
        if size > 20:
            raise MemoryError

    monkeypatch.setattr(batch_size._Search, "_step", step)
    assert 19 <= ortops.find_batch_size(session(), labelled((6,), rows=100)) <= 20


@pytest.mark.slow
def test_memory_that_is_measured() -> None:
    """A limit between those of two sizes, each row of which takes 4 MB in a product."""
    draw = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 1000] x) => (float[batch, 1] y)
    { s = Constant<value_ints = [-1, 1000, 1]>() t = Constant<value_ints = [-1, 1, 1000]>()
      a = Reshape(x, s) b = Reshape(x, t) c = MatMul(a, b) d = MatMul(c, w) e = Tanh(d)
      axes = Constant<value_ints = [1]>() y = ReduceSum<keepdims = 0>(e, axes) }""")
    weights = onnx.numpy_helper.from_array(draw.normal(size=(1000, 1)).astype(np.float32), "w")
    model.graph.initializer.append(weights)
    trainable = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    rows = draw.normal(size=(128, 1000)).astype(np.float32)
    data = {"x": rows, "targets": np.zeros((128, 1), np.float32)}
    made = TrainingSession(trainable)
    made.step({name: array[:1] for name, array in data.items()})
    made.free_memory()
    limit = resident() + 160 * MEGABYTE
    found = ortops.find_batch_size(made, data, limit=limit)
    assert 8 <= found <= 40  # 4 MB for each row, and some of the gradient
    assert made.steps_done == 1
    assert resident() < limit - 40 * MEGABYTE  # what it took is free again


@pytest.mark.slow
def test_the_session_stays_as_it_is() -> None:
    data = labelled((6,), rows=20)
    made, plain = session(), session()
    settings: dict[str, Any] = {"batch_size": 6, "progress": False}
    made.fit(data, **settings)
    plain.fit(data, **settings)
    before, history = dict(made.state), made.history
    ortops.find_batch_size(made, data)
    assert_same_arrays(dict(made.state), before)
    assert made.history == history
    assert made.steps_done == plain.steps_done
    given: dict[str, Any] = {**settings, "resume": True, "epochs": 3}
    assert made.fit(data, **given) == plain.fit(data, **given)
    assert_same_arrays(dict(made.state), dict(plain.state))


def test_what_does_not_fit() -> None:
    with pytest.raises(OrtopsError, match=r"a step with one row needs .* more than the limit of 1"):
        ortops.find_batch_size(session(), labelled((6,), rows=20), limit=1)


@pytest.mark.slow
def test_what_is_refused() -> None:
    data = labelled((6,), rows=20)
    with pytest.raises(ArgumentError, match="session must be a TrainingSession, got str"):
        ortops.find_batch_size("model.onnx", {})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"limit must be an integer >= 1, got 0"):
        ortops.find_batch_size(session(), data, limit=0)
    with pytest.raises(ArgumentError, match=r"largest must be an integer >= 1, got 0.5"):
        ortops.find_batch_size(session(), data, largest=0.5)  # type: ignore[arg-type]
    with pytest.raises(FeedError, match="the data must be rows"):
        ortops.find_batch_size(session(), [data])
    fixed = ortops.build_training_model(affine(batch=4), loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(FeedError, match="batch size is fixed at 4"):
        ortops.find_batch_size(TrainingSession(fixed), affine_batch(8))
