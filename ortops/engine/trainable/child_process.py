"""Runs what comes from untrusted files in a child process, with limits of time and memory.

onnxruntime cannot interrupt an operator, and Python cannot limit its memory. A process can be
killed, and most systems can limit its memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortops._common.numbers import Array
from ortops.engine.trainable import limited
from ortops.errors import ModelError, UnsupportedError

_OUT_OF_MEMORY = ("MemoryError", "bad_alloc", "bad allocation", "Failed to allocate memory")
"""Messages of Python, C++ and onnxruntime for a lack of memory."""

_RUN_MODEL = Path(__file__).with_name("model_run.py")


class ChildError(Exception):
    """A child process did not answer. The message says why, behind the name of what failed."""


class Child:
    """A child process, which answers requests one after another.

    Its memory is limited on systems that can, such as Linux.

    Args:
        program: A module that imports nothing of the package, with a function ``answer``, which
            gets a request and bytes, and returns an answer and buffers.
        what: What runs in it, named in messages.
        limits: The names of the limits of time and memory in `ortops.graph.limits`.

    Raises:
        UnsupportedError: If it cannot be started.
    """

    def __init__(self, program: Path, what: str, limits: tuple[str, str]) -> None:
        self._limits = tuple(f"ortops.graph.limits.LIMITS.{name}" for name in limits)
        remedy = f"if you trust the file, set {self._limits[0]} to math.inf, to do without"
        if not sys.executable or getattr(sys, "frozen", False):
            raise UnsupportedError(
                f"{what} runs in a child process, which needs a Python interpreter, and this "
                f"program has none; {remedy}"
            )
        # Each arena of glibc reserves addresses. A session of its own gets no Ctrl-C.
        environment = {"MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", limited.__file__, json.dumps(sys.path), str(program)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UnsupportedError(
                f"{what} runs in a child process, which cannot be started: {error}; {remedy}"
            ) from error
        self.owner, self._lock = os.getpid(), threading.Lock()
        self.close = weakref.finalize(self, _end, self._process, self.owner)
        assert self._process.stdout is not None  # it takes a while until Python has started
        if self._process.stdout.readline() != limited.READY:
            self.close()
            raise UnsupportedError(
                f"{what} runs in a child process, which '{sys.executable}' does not start; {remedy}"
            )

    def ask(self, request: Any, body: bytes, seconds: float, memory: int) -> tuple[Any, bytes]:
        """Returns an answer and its buffers as one.

        Args:
            request: What JSON can express.
            body: Further data.
            seconds: The time limit; the process kills itself after it.
            memory: How many bytes it may allocate.

        Raises:
            ChildError: If the program fails, or exceeds a limit. The process has then ended.
        """
        head = json.dumps([request, len(body), min(seconds, 1e6), memory]).encode()
        source: Any = self._process.stdout
        sink: Any = self._process.stdin
        done = False
        with self._lock:  # an answer is that to the last request
            try:
                sink.write(head + b"\n" + body)
                sink.flush()
                problem, found, sizes = json.loads(source.readline())
                rest = source.read(sum(sizes))
                if len(rest) != sum(sizes):
                    raise EOFError
                done = not problem
            except (EOFError, OSError, ValueError):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(5)
                status = self._process.returncode
                problem = "" if status == 1 else f"its process ended with status {status}"
            finally:  # also after a Ctrl-C, or the next answer would be this one
                if not done:
                    self.close()
        if done:
            return found, rest
        if not problem:
            what = f"did not end within {seconds:.3g} s; correct it, or allow more time"
            raise ChildError(f"{what} ({self._limits[0]})")
        if any(sign in problem for sign in _OUT_OF_MEMORY):
            what = f"needs more than {memory:,} bytes of memory; correct it, or allow more"
            raise ChildError(f"{what} ({self._limits[1]})")
        more = f", as if it needed more than {memory:,} bytes" if "status" in problem else ""
        raise ChildError(f"failed: {problem}{more}; correct it")


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends a child process; does nothing in another process than that which started it."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError), process:
            process.kill()


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
    child = Child(_RUN_MODEL, what, ("initialization_seconds", "initialization_memory"))
    try:
        shown, answer = child.ask(list(names), model, seconds, memory)
    except ChildError as error:
        raise ModelError(f"{what} {error}") from error
    finally:
        child.close()
    arrays, at = [], 0
    for dtype, shape in shown:
        count = math.prod(shape)
        arrays.append(np.frombuffer(answer, dtype, count, at).reshape(shape))
        at += arrays[-1].nbytes
    return arrays
