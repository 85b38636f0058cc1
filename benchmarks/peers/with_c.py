"""A fused loop in C, which is limited only by memory bandwidth."""

from __future__ import annotations

import ctypes
import itertools
import math
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.peers import COMPILERS, Step
from benchmarks.task import OPTIMIZERS, Task

# Without errno, a square root is a single instruction.
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]


def make(task: Task, optimizer: str) -> Step:
    """Returns the step function; OMP_NUM_THREADS sets the number of threads.

    Args:
        task: An update.
        optimizer: ``Adam``.
    """
    alpha, beta, epsilon, rate = (
        OPTIMIZERS[optimizer][name] for name in ("alpha", "beta", "epsilon", "learning_rate")
    )
    adam = _compiled().adam
    adam.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] + [ctypes.c_float] * 4
    adam.restype = None
    parameters = task.weights()
    state = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in parameters.items()}
    counter, batches = itertools.count(1), itertools.cycle(task.batches())

    def step() -> None:
        feeds, t = next(batches), next(counter)
        corrected = rate * math.sqrt(1 - beta**t) / (1 - alpha**t)
        for name, x in parameters.items():
            arrays = (x, feeds[f"{name}_gradient"], *state[name])
            adam(*(each.ctypes.data for each in arrays), x.size, corrected, alpha, beta, epsilon)

    return Step(step, lambda: parameters)


def _compiled() -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    source = Path(__file__).with_name("adam.c")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "adam.so"
        subprocess.run([compiler, *FLAGS, str(source), "-o", str(library), "-lm"], check=True)
        return ctypes.CDLL(str(library))
