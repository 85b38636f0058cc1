"""`TrainingSession.reset`: values are read one at a time, and nothing changes if one is invalid."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from memory_peaks import counts_peaks, deep, peak

import ortops
from ortops.engine.execution import variables
from ortops.graph.files import external

SETUP = """
import sys

import numpy as np

import ortops

session = ortops.TrainingSession(sys.argv[1])
session.step({"x": np.ones((1, 1024), np.float32), "targets": np.ones((1, 1024), np.float32)})
session.free_memory()
"""


def trainable(width: int, count: int) -> onnx.ModelProto:
    settings = {"loss": "MeanSquaredError", "optimizer": "Adam"}
    return ortops.build_training_model(deep(width, count), **settings)


@pytest.mark.slow
@counts_peaks
def test_the_peak_is_a_few_variables(tmp_path: Path) -> None:
    """Of 16 weights of 4 MiB and their 32 moments, four exist at the same time: two per thread."""
    path = str(tmp_path / "deep.onnx")
    ortops.save_model(trainable(1024, 16), path)
    assert peak(SETUP, "session.reset()", path) < 8 * 4096  # it varies by 4 MiB


def test_variables_that_were_half_set_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ortops.TrainingSession(trainable(4, 2))
    batch = {"x": np.ones((1, 4), np.float32), "targets": np.ones((1, 4), np.float32)}
    losses = [session.step(batch)["loss"] for _ in range(2)]

    def fail(targets: Any, values: Any) -> None:
        name = next(iter(targets))
        targets[name][...] = 7
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(variables, "put_all", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            session.reset()
    with pytest.raises(ortops.OrtopsError, match=r"setting variables failed \(the disk is gone\)"):
        session.step(batch)
    session.reset()
    assert [session.step(batch)["loss"] for _ in range(2)] == losses


CREATED = """
import ortops
from memory_peaks import deep

model = deep(1024, 16)
model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
"""


@pytest.mark.slow
@counts_peaks
def test_a_session_of_a_model_in_memory_holds_no_copy_of_it() -> None:
    """Of 16 weights of 4 MiB, it has the weights and two moments: 192 MiB, and little more."""
    setup = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n" + CREATED
    assert peak(setup, "session = ortops.TrainingSession(model)") < 3.6 * 16 * 4096


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_parameters_come_back_from_a_temporary_file(
    dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which has no name, and which a later change of the given model does not reach."""
    monkeypatch.setattr(external, "_ASIDE", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = deep(32, 3, dtype)
    expected = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    with caplog.at_level(logging.INFO, "ortops"):
        session = ortops.TrainingSession(model)
    assert f"temporary file in '{tmp_path}'" in caplog.text
    assert not list(tmp_path.iterdir())
    for tensor in model.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    batch = {"x": np.ones((2, 32), dtype), "targets": np.ones((2, 32), np.float32)}
    for _ in range(2):
        session.step(batch)
        changed = [n for n, v in expected.items() if not np.array_equal(session.state[n], v)]
        assert len(changed) == 3
        session.reset()
        for name, value in expected.items():
            np.testing.assert_array_equal(session.state[name], value)


def test_parameters_stay_in_memory_where_no_temporary_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(external, "_ASIDE", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    model = trainable(32, 2)
    with caplog.at_level(logging.INFO, "ortops"):
        session = ortops.TrainingSession(model)
    assert "stay in memory" in caplog.text
    before = session.state["w1"].copy()
    session.step({"x": np.ones((1, 32), np.float32), "targets": np.ones((1, 32), np.float32)})
    session.reset()
    np.testing.assert_array_equal(session.state["w1"], before)
