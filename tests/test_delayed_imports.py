"""SymPy is imported when symbolic dimensions are computed with, and not before."""

import subprocess
import sys

import pytest

from ortops import delayed_imports

DELAYED = """
import sys
from ortops import delayed_imports
sys.meta_path[:] = [each for each in sys.meta_path if type(each) is not delayed_imports._Finder]
sys.meta_path.insert(0, delayed_imports._Finder())
"""
"""On all versions of Python, since only one thread runs here."""

LOADED = """
print("sympy.core" in sys.modules)
"""


def printed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_a_session_does_not_load_it() -> None:
    code = """
import numpy as np, ortops
from ortops import Tape, op
with Tape(name="dense") as tape:
    x = tape.input("x", np.float32, ["batch", 2])
    tape.output(op.Relu(x @ tape.initializer("w", np.ones((2, 3), np.float32))), "y")
model = ortops.build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer="Adam")
session = ortops.TrainingSession(model)
session.step({"x": np.ones((4, 2), np.float32), "labels": np.zeros(4, np.int64)})
"""
    assert printed(DELAYED + code + LOADED) == ["False"]


def test_arithmetic_loads_it() -> None:
    code = """
import onnx_ir
total = onnx_ir.SymbolicDim("n") + 1
print(total.evaluate({"n": 4}))
"""
    assert printed(DELAYED + code + LOADED) == ["5", "True"]


def test_others_can_import_it() -> None:
    code = """
import onnx_ir
import sympy
from sympy.abc import x
print((x + x).subs(x, sympy.Integer(3)))
"""
    assert printed(DELAYED + code + LOADED) == ["6", "True"]


def test_an_import_of_its_own_is_not_delayed() -> None:
    assert printed(DELAYED + "import sympy" + LOADED) == ["True"]


def test_the_finder_leaves() -> None:
    code = """
import onnx_ir
print(any(type(each) is delayed_imports._Finder for each in sys.meta_path))
"""
    assert printed(DELAYED + code) == ["False"]


@pytest.mark.parametrize(
    ("version", "delays"),
    [
        ((3, 11, 8), False),
        ((3, 11, 9), True),
        ((3, 12, 2), False),
        ((3, 12, 3), True),
        ((3, 13, 0), True),
    ],
)
def test_versions(version: tuple[int, ...], delays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", version)
        patch.setattr(sys, "meta_path", [])
        patch.setattr(sys, "modules", {})
        delayed_imports.delay_sympy()
        found = len(sys.meta_path)
    assert found == int(delays)
