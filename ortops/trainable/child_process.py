"""Runs a model from an untrusted file in a child process, with limits of time and memory.

onnxruntime cannot interrupt an operator, and Python cannot limit its memory. A process can be
killed, and most systems can limit its memory.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from ortops.errors import ModelError, UnsupportedError
from ortops.numbers import Array

__all__ = ["run_in_child"]


_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "bad allocation", "Failed to allocate memory")
"""Messages of Python, C++ and onnxruntime for a lack of memory."""

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import numpy as np, onnxruntime

output = sys.stdout.buffer

def limit_memory(size):
    try:
        import resource
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        wanted = present + size if hard < 0 else min(present + size, hard)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    except (ImportError, OSError, ValueError):  # the system has no such limit
        pass

output.write(b"ready\\n")
output.flush()
names, memory = json.loads(sys.stdin.buffer.readline())
model = sys.stdin.buffer.read()
limit_memory(memory)
arrays, problem = [], ""
try:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    for name, value in zip(names, session.run(names, {})):
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError(f"output '{name}' must be a tensor of numbers")
        arrays.append(np.ascontiguousarray(value).reshape(value.shape))
except BaseException as error:
    arrays, problem = [], str(error).strip() or type(error).__name__
shown = [(array.dtype.str, array.shape) for array in arrays]
output.write(json.dumps([problem, shown]).encode() + b"\\n")
for array in arrays:
    output.write(array.data.cast("B") if array.size else b"")
output.flush()
"""


def run_in_child(
    model: bytes, names: Sequence[str], *, what: str, seconds: float, memory: int
) -> list[Array]:
    """Runs a model without inputs in a child process, on the CPU and without optimizations.

    Args:
        model: The model, of standard operators.
        names: The outputs to compute.
        what: The name of the model in messages.
        seconds: The maximum time for loading and running it.
        memory: The maximum memory in bytes, on systems that can limit it, such as Linux.

    Returns:
        The outputs, in the order of their names.

    Raises:
        ModelError: If the model fails, or exceeds a limit.
        UnsupportedError: If no child process can be started.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        raise UnsupportedError(
            f"{what} runs in a child process, which needs a Python interpreter, and this program "
            "has none; if you trust the file, run it in this process by setting "
            "ortops.graph.limits.LIMITS.initialization_seconds to math.inf"
        )
    command = [sys.executable, "-c", _CHILD, json.dumps(sys.path)]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "2"}  # each arena of glibc reserves addresses
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError as error:
        raise UnsupportedError(
            f"{what} runs in a child process, which cannot be started: {error}"
        ) from error
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()  # wait until Python has started, which may take a while
            request = json.dumps([list(names), memory]).encode() + b"\n"
            answer, _ = process.communicate(request + model, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"{what} did not end within {seconds:g} s; correct its graph, or allow more time "
                "(ortops.graph.limits.LIMITS.initialization_seconds)"
            ) from error
        finally:
            process.kill()  # does nothing if it has ended
    return _read(answer, what, process.returncode, memory)


def _read(answer: bytes, what: str, status: int, memory: int) -> list[Array]:
    """Returns the arrays of an answer.

    Raises:
        ModelError: If the answer is an error, or not complete.
    """
    at = answer.find(b"\n") + 1
    try:
        problem, shown = json.loads(answer[:at])
    except ValueError:
        problem, shown = f"its process ended with status {status}", []
    if any(sign in problem for sign in _OUT_OF_MEMORY):
        raise ModelError(
            f"{what} needs more than {memory:,} bytes of memory; correct its graph, or allow more "
            "(ortops.graph.limits.LIMITS.initialization_memory)"
        )
    if problem:
        raise ModelError(f"{what} failed: {problem}; correct its graph")
    arrays = []
    for dtype, shape in shown:
        count = math.prod(shape)
        arrays.append(np.frombuffer(answer, dtype, count, at).reshape(shape))
        at += arrays[-1].nbytes
    return arrays
