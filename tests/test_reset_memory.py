"""`TrainingSession.reset`: values are read one at a time, and nothing changes if one is invalid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from memory_peaks import counts_peaks, deep, peak

import ortops
from ortops.execution import execution

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
        patch.setattr(execution, "put_all", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            session.reset()
    with pytest.raises(ortops.OrtopsError, match=r"setting variables failed \(the disk is gone\)"):
        session.step(batch)
    session.reset()
    assert [session.step(batch)["loss"] for _ in range(2)] == losses
