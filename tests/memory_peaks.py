"""Peaks of memory, measured in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortops import Tape, op

__all__ = ["counts_peaks", "deep", "peak"]

counts_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the peak is reset by /proc/self/clear_refs, which only Linux has",
)
"""Marks tests of `peak`."""

_BEFORE = """
def kilobytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts from here
before = kilobytes("VmRSS")
"""
_AFTER = """
print(kilobytes("VmHWM") - before)
"""


def peak(setup: str, measured: str, *arguments: str) -> int:
    """Returns how far, in KiB, memory rises above its size after the setup.

    Args:
        setup: Python code that runs first.
        measured: The code whose peak is measured.
        *arguments: The command-line arguments of the process.
    """
    code = setup + _BEFORE + measured + _AFTER
    return int(subprocess.check_output([sys.executable, "-c", code, *arguments]))


def deep(width: int, count: int, dtype: Any = np.float32) -> onnx.ModelProto:
    """Returns a model of layers with different square weights, without biases."""
    with Tape(name="deep") as tape:
        x = tape.input("x", dtype, ["batch", width])
        for number in range(count):
            weight = 2 * np.eye(width) + number * np.arange(width) / width
            x = op.Tanh(x @ tape.initializer(f"w{number}", weight.astype(dtype)))
        tape.output(x, "y")
    return tape.model()
