"""Does with files what users do, and writes what became of it; run as a process of its own.

``python hostile_run.py folder number…`` does it with ``folder/<number>.onnx`` for each number, and
writes a line of JSON for each: the number, and what was raised where nothing of it is allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import ortops
from ortops import cli
from ortops.engine.check import check
from ortops.graph.limits import LIMITS

MEMORY = 6 * 2**30
"""How many bytes of addresses a process may have; threads of onnxruntime reserve many."""

RAW = "[\x00-\x08\x0b-\x1f\x7f-\x9f]"
"""Characters that drive a terminal."""

KINDS = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(bool)": np.bool_,
}


def feeds_of(session: ortops.TrainingSession) -> dict[str, Any]:
    """Returns zeros for what a session takes; shapes are guessed where they are unknown."""
    feeds = {}
    for name, value in session.inputs.items():
        dims = [dim if isinstance(dim, int) and dim > 0 else 2 for dim in value.dims or ()]
        kind = np.int64 if value.dtype == np.int64 else np.float32
        if np.prod(dims, dtype=float) < 2**20:
            feeds[name] = np.zeros(dims, kind)
    return feeds


def train(path: Path) -> None:
    session = ortops.TrainingSession(path, sess_options=quiet())
    for action in (
        lambda: session.step(feeds_of(session)),
        lambda: session.evaluate(feeds_of(session)),
        session.reset,
        session.inference_model,
        lambda: session.steps_done,
        lambda: session.save(path.with_suffix(".saved")),
    ):
        allowed(action)


def infer(path: Path) -> None:
    ortops.InferenceSession(path, quiet())


def quiet() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return options


def composed(path: Path) -> None:
    """Composes a model with itself, and takes it apart."""
    model = ortops.compose({"first": path, "second": path})
    ortops.split(model)
    ortops.split(model, {"first": path, "second": path})


@contextlib.contextmanager
def descriptors_to(stream: Any) -> Any:
    """Lets what this process prints, libraries in C included, go to a file."""
    kept = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def command(name: str, *options: str) -> Callable[[Path], object]:
    """Returns what runs a command on a model, and looks at what it prints."""

    def run(path: Path) -> None:
        with tempfile.TemporaryFile() as stream:
            with descriptors_to(stream):
                cli.main([name, str(path), *options])
            stream.seek(0)
            printed = stream.read().decode(errors="replace")
        if "bug in ortops" in printed:
            raise AssertionError(printed[-300:])
        raw = [line for line in printed.splitlines() if re.search(RAW, line)]
        if raw:
            raise AssertionError(f"raw: {raw[0]!r}")
        forged = [line for line in printed.splitlines() if line.startswith("FORGED")]
        if forged:
            raise AssertionError(f"forged: {printed[:300]!r}")

    return run


ACTIONS: dict[str, Callable[[Path], object]] = {
    "compose": composed,
    "split": ortops.split,
    "check command": command("check"),
    "check --json": command("check", "--json"),
    "inspect command": command("inspect"),
    "inspect --json": command("inspect", "--json"),
    "lower": ortops.lower,
    "infer": infer,
    "check": check,
    "build": lambda path: ortops.build_training_model(
        path, loss="MeanSquaredError", optimizer="Adam"
    ),
    "train": train,
    "step_graph": ortops.step_graph,
}


def allowed(action: Callable[[], object]) -> None:
    """Does something that may fail with an error of ours."""
    with contextlib.suppress(ortops.OrtopsError, OSError):
        action()


def tell(number: str, wrong: object) -> None:
    sys.stdout.write(json.dumps([number, wrong]) + "\n")
    sys.stdout.flush()


def main(folder: Path, numbers: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    LIMITS.initialization_seconds = 2.0
    for number in numbers:
        path = folder / f"{number}.onnx"
        tell(number, "begun")
        wrong = {}
        for name, action in ACTIONS.items():
            try:
                allowed(partial(action, path))
            except Exception as error:
                frames = traceback.extract_tb(error.__traceback__)
                last = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in frames[-4:]]
                wrong[name] = f"{type(error).__name__}: {str(error)[:200]} at {' '.join(last)}"
        tell(number, wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
