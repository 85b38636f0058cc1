"""SymPy is imported when onnx-ir computes with symbolic dimensions, and not before."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LOADED = """
import sys
print("sympy.core" in sys.modules)
"""

THREADS = """
import sys, threading

uses = [with_onnx_ir, directly] * 4
barrier = threading.Barrier(len(uses))
results = []

def run(use):
    barrier.wait()
    results.append(use())

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=run, args=[use], daemon=True) for use in uses]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(*sorted(results))
"""


def printed(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


@pytest.mark.slow
def test_a_session_does_not_load_it_and_arithmetic_does() -> None:
    session = """
import numpy as np, ortops
from ortops import Tape, op
with Tape(name="dense") as tape:
    x = tape.input("x", np.float32, ["batch", 2])
    tape.output(op.Relu(x @ tape.initializer("w", np.ones((2, 3), np.float32))), "y")
model = ortops.build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer="Adam")
session = ortops.TrainingSession(model)
session.step({"x": np.ones((4, 2), np.float32), "labels": np.zeros(4, np.int64)})
"""
    arithmetic = """
import onnx_ir
total = onnx_ir.SymbolicDim("n") + 1
print(total.evaluate({"n": 4}))
"""
    assert printed(session + LOADED + arithmetic + LOADED) == ["False", "5", "True"]


@pytest.mark.slow
def test_training_imports_nothing_that_few_use() -> None:
    """Beyond what the packages below import."""
    code = """
import sys
import numpy, onnx, onnx_ir, onnxruntime
before = {*sys.modules}
from ortops import TrainingSession, build_training_model
names = ("html", "numpy.random", "email", "multiprocessing", "sqlite3", "subprocess", "unittest")
print(*(name for name in names if name in sys.modules.keys() - before))
"""
    assert printed(code) == []


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", ["ortops, onnx_ir, sympy", "sympy, ortops, onnx_ir"])
def test_others_get_the_module_itself(first: str) -> None:
    """At once, with submodules, reloading and pickling; and an expression of it is a dimension."""
    code = f"""
import {first}
{LOADED}
import importlib, pickle, sys, types
print(onnx_ir.SymbolicDim(2 * sympy.Symbol("n")).evaluate({{"n": 4}}))
try:
    onnx_ir.SymbolicDim(4)
except TypeError:
    print("refused")
from sympy.abc import x
print((x + x).subs(x, sympy.Integer(3)))
print(sys.modules["sympy"] is sympy and type(sympy) is types.ModuleType)
print(importlib.reload(sympy) is sympy)
print(pickle.loads(pickle.dumps(x)) == x)
print(onnx_ir._core.sympy.Expr is sympy.Expr)
"""
    assert printed(code) == ["True", "8", "refused", "6", "True", "True", "True", "True"]


@pytest.mark.slow
def test_source_and_reloading_of_the_user() -> None:
    code = """
import ortops
import importlib, inspect
from onnx_ir import _core
print(*inspect.getsource(_core.SymbolicDim.__add__).split("(")[:1])
print(importlib.reload(_core) is _core)
"""
    assert printed(code + LOADED) == ["def", "__add__", "True", "False"]


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("before", ["import ortops, onnx_ir", "import ortops"])
def test_threads_that_use_it_first(before: str) -> None:
    """Some of them through onnx-ir, the others directly."""
    code = f"""
{before}
def with_onnx_ir():
    import onnx_ir
    return (onnx_ir.SymbolicDim("n") + 1).evaluate({{"n": 4}})

def directly():
    import sympy
    return sympy.Integer(3) + 3
"""
    assert printed(code + THREADS) == ["5"] * 4 + ["6"] * 4


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python 3.11 fails here by itself")
def test_threads_that_use_a_submodule_first() -> None:
    """A module in `sys.modules` that loads when it is used would let them wait for each other.

    Python itself sees a deadlock between imports of SymPy now and then, and ends one with an error.
    """
    code = """
import ortops, onnx_ir
def with_onnx_ir():
    return caught(lambda: (onnx_ir.SymbolicDim("n") + 1).evaluate({"n": 4}))

def directly():
    def import_and_use():
        from sympy.core.numbers import Integer
        return Integer(3) + 3

    return caught(import_and_use)

def caught(use):
    try:
        return str(use())
    except RuntimeError as error:
        assert type(error).__name__ == "_DeadlockError"
        return "deadlock"
"""
    found = printed(code + THREADS)
    assert len(found) == 8  # each thread has ended
    assert {"5", "6"} <= set(found) <= {"5", "6", "deadlock"}


@pytest.mark.slow
def test_torch_and_a_thread_use_it_first() -> None:
    pytest.importorskip("torch")
    code = """
import ortops, onnx_ir
def with_onnx_ir():
    return (onnx_ir.SymbolicDim("n") + 1).evaluate({"n": 4})

def directly():
    import torch.fx.experimental.symbolic_shapes
    return torch.ones(2).sum().item()
"""
    assert printed(code + THREADS) == ["2.0"] * 4 + ["5"] * 4


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
import ortops

for name in ("SIGINT", "SIGTERM"):
    os.environ["SIGNAL"] = name
    try:
        ortops.TrainingSession
    except BaseException as error:
        print(type(error).__name__)
del os.environ["SIGNAL"]
import onnxruntime
print(onnxruntime.imported)
"""


@pytest.mark.slow
def test_a_signal_while_onnxruntime_is_imported_is_handled_after_that(tmp_path: Path) -> None:
    """What a handler raises within the import becomes an ImportError, as in pybind11."""
    (tmp_path / "onnxruntime.py").write_text(
        """
import os, signal

try:
    if "SIGNAL" in os.environ:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
        sum(range(1000))
except BaseException as error:
    raise ImportError("initialization failed") from error
imported = True
"""
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split() == ["KeyboardInterrupt", "SystemExit", "True"], done.stderr
