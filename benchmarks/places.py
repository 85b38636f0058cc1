"""Trains digits from one exported folder in all supported languages, and compares the times.

Each program trains three epochs. Programs take turns; those whose requirements are missing are
skipped::

    python -m benchmarks.places            # print a Markdown table
    python -m benchmarks.places --write    # also write it to ortops/docs/speed.md

Chromium and Node require ``scripts/web_environment``, C requires ``cc``, MPI requires ``pip install
ortops[distributed]``.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import onnxruntime

import ortops
from models import digits, lenet
from ortops.graph.safetensors import write_safetensors
from tests.c.trainer import LIBRARY, compile_trainer
from tests.chromium import CHROMIUM, MODULES, WEB, page_of, run_page

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ortops" / "docs" / "speed.md"
BEGIN, END = "<!-- places: begin -->", "<!-- places: end -->"
ROUNDS, EPOCHS, ROWS = 5, 3, 64
CPU = ["CPUExecutionProvider"]

Found = tuple[float, float]
"""Milliseconds per step, and the accuracy on test digits."""

Start = Callable[[Path], Found]
"""Trains from a folder, in a separate program."""


def batches() -> list[dict[str, np.ndarray]]:
    """Returns the batches of one epoch, in the order of the rows."""
    train = digits.load().train._asdict()
    starts = range(0, len(train["labels"]), ROWS)
    return [{name: array[at : at + ROWS] for name, array in train.items()} for at in starts]


def accuracy(file: Path) -> float:
    """Returns the test accuracy of a trained file in stock onnxruntime."""
    test = digits.load().test
    session = onnxruntime.InferenceSession(file, providers=CPU)
    return float(
        (session.run(["logits"], {"images": test.images})[0].argmax(1) == test.labels).mean()
    )


def timed(step: Callable[[dict[str, np.ndarray]], object]) -> float:
    """Returns the median milliseconds per step over all epochs."""
    times = []
    for batch in batches() * EPOCHS:
        begin = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


# ------------------------------------------------------------------------- in a separate program


def in_a_session(folder: Path) -> Found:
    """Trains with `ortops.TrainingSession`, or a joined session in several MPI processes."""
    session = ortops.TrainingSession(folder / "model.onnx")
    rank, size = 0, 1
    if "mpi4py" in sys.modules:
        joined = ortops.distributed.join(session)
        session, rank, size = joined, joined.rank, joined.size
    parts = slice(rank, None, size)
    found = timed(lambda batch: session.step({n: a[parts] for n, a in batch.items()}))
    session.save(folder / "here.onnx")
    return found, accuracy(folder / "here.onnx") if not rank else 0.0


def with_the_step_graph(folder: Path) -> Found:
    """Trains with a plain session of ``step.onnx``, as other languages do."""
    described = json.loads((folder / "step.json").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(folder / "step.onnx", providers=CPU)
    variables = described["variables"]
    state = dict(ortops.TrainingSession(folder / "model.onnx").state)
    following = {name: v["next"] for name, v in variables.items() if v["next"]}
    outputs = [described["step"]["loss"], *following.values()]

    def step(batch: dict[str, np.ndarray]) -> None:
        found = session.run(outputs, batch | state)
        state.update(zip(following, found[1:], strict=True))

    found = timed(step)
    trained = ortops.TrainingSession(folder / "model.onnx")
    trained.state.update(state)
    trained.save(folder / "here.onnx")
    return found, accuracy(folder / "here.onnx")


# ------------------------------------------------------------------------------------- the places


def python(function: Callable[[Path], Found], *launcher: str, threads: int | None = None) -> Start:
    """Returns a function that runs a function of this file in a separate program."""

    def start(folder: Path) -> Found:
        command = [*launcher, "-m", "benchmarks.places", function.__name__, str(folder)]
        environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        milliseconds, reached = json.loads(_run(command, environment))
        return milliseconds, reached

    return start


def node(package: str) -> Start:
    """Returns a function that trains in Node, with the driver and a package of onnxruntime."""

    def start(folder: Path) -> Found:
        arguments = [WEB, package, folder, folder, folder / "node"]
        found = json.loads(_run(["node", MODULES / "train.mjs", *arguments]))
        return found["milliseconds"], found["accuracy"]

    return start


def chromium(folder: Path) -> Found:
    """Trains in the web page, as a user would."""
    found, _ = run_page(folder, "test.html?ordered")
    return found["milliseconds"], found["accuracy"]


def c(folder: Path) -> Found:
    """Trains with models/c; the time per step is the difference of two runs of different length."""
    program, steps = folder / "train", len(batches()) * EPOCHS
    times = []
    for count in (1, steps):
        begin = time.perf_counter()
        _run([program, folder, folder / "whole.safetensors", ROWS, count, folder / "here.onnx"])
        times.append(time.perf_counter() - begin)
    return 1000 * (times[1] - times[0]) / (steps - 1), accuracy(folder / "here.onnx")


def prepare(folder: Path) -> dict[str, Start]:
    """Exports the folder, and returns the available programs."""
    model = ortops.build_training_model(lenet.lenet(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    ortops.export_step(model, folder, web=True)
    for name, samples in digits.load()._asdict().items():
        write_safetensors(folder / f"{name}.safetensors", samples._asdict())
    whole = {n: a[: len(a) // ROWS * ROWS] for n, a in digits.load().train._asdict().items()}
    write_safetensors(folder / "whole.safetensors", whole)
    (folder / "node").mkdir()
    places: dict[str, Start] = {
        "Python, `TrainingSession`": python(in_a_session, sys.executable),
        "Python, a plain session of `step.onnx`": python(with_the_step_graph, sys.executable),
    }
    if LIBRARY and shutil.which("cc"):
        compile_trainer(folder, "-O2")
        places["C, `models/c` of a clone"] = c
    if (WEB / "node_modules").exists() and shutil.which("node"):
        places["Node, onnxruntime-node"] = node("onnxruntime-node")
        places["Node, WebAssembly, one thread"] = node("onnxruntime-web")
        if CHROMIUM:
            page_of(folder)
            places["Chromium, WebAssembly"] = chromium
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if mpiexec.exists():
        launcher = (str(mpiexec), "-n", "2", sys.executable, "-m", "mpi4py")
        places["Python, 2 processes of MPI, one thread each"] = python(
            in_a_session, *launcher, threads=1
        )
    return places


def table() -> str:
    """Runs all programs in turns, and returns a table of accuracies and times."""
    found: dict[str, list[Found]] = {}
    with tempfile.TemporaryDirectory() as name:
        places = prepare(Path(name))
        for place, start in islice(cycle(places.items()), ROUNDS * len(places)):
            found.setdefault(place, []).append(start(Path(name)))
    first, *_ = found.values()
    unit = statistics.median(milliseconds for milliseconds, _ in first)
    lines = ["| where | accuracy | ms per step | relative to Python |", "| --- | --- | --- | --- |"]
    for place, each in found.items():
        milliseconds = statistics.median(taken for taken, _ in each)
        (reached,) = {round(reached, 3) for _, reached in each}
        lines.append(
            f"| {place} | {reached:.3f} | {milliseconds:.1f} | {milliseconds / unit:.1f} |"
        )
    return "\n".join(lines)


def _run(command: Sequence[object], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(
        [str(each) for each in command],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return result.stdout.splitlines()[-1] if result.stdout else ""


def main() -> None:
    """Prints the table."""
    found = table()
    print(found)
    if "--write" in sys.argv:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    functions = {each.__name__: each for each in (in_a_session, with_the_step_graph)}
    if sys.argv[1:2] and sys.argv[1] in functions:
        milliseconds, reached = functions[sys.argv[1]](Path(sys.argv[2]))
        if reached:
            print(json.dumps([milliseconds, reached]), flush=True)
    else:
        main()
