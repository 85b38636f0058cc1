"""`TrainingSession.reset`: values are read one at a time, and nothing changes if one is invalid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortops
from ortops import Tape, op
from ortops.execution import execution

MEASURED = """
import sys

import numpy as np

import ortops

def kilobytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

session = ortops.TrainingSession(sys.argv[1])
session.step({"x": np.ones((1, 1024), np.float32), "targets": np.ones((1, 1024), np.float32)})
session.free_memory()
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts from here
before = kilobytes("VmRSS")
session.reset()
print(kilobytes("VmHWM") - before)
"""


def deep(width: int, count: int) -> ortops.TrainingSession | Any:
    with Tape(name="deep") as tape:
        x = tape.input("x", np.float32, ["batch", width])
        for number in range(count):
            weight = np.eye(width, dtype=np.float32)
            x = op.Tanh(x @ tape.initializer(f"w{number}", weight))
        tape.output(x, "y")
    return ortops.build_training_model(tape.model(), loss="MeanSquaredError", optimizer="Adam")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts the peak")
def test_the_peak_is_a_few_variables(tmp_path: Path) -> None:
    """Of 16 weights of 4 MiB and their 32 moments, four exist at the same time: two per thread."""
    ortops.save_model(deep(1024, 16), tmp_path / "deep.onnx")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "deep.onnx")]
    assert int(subprocess.check_output(command)) < 8 * 4096  # in KiB; it varies by 4 MiB


def test_variables_that_were_half_set_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ortops.TrainingSession(deep(4, 2))
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
