"""Data-parallel training: the time of steps of joined sessions, and of the all-reduce alone.

Each case runs in a separate program, and cases take turns: one process with one or two threads;
steps in two halves; a joined session of one rank; and two ranks, each with one thread and half of
the batch::

    python -m benchmarks.distributed

Requires ``pip install ortops[distributed]``. MPI starts this program again as a worker.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import ortops
from benchmarks.peers.with_ortops import trainable
from benchmarks.task import Task
from models import lenet, mlp, resnet

ROUNDS = 3
SECONDS = 1.5
BATCH = 64
NETWORKS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "MLP 64-128-10": (mlp.mlp, (64,)),
    "MLP 784-1024-1024-10": (lambda: mlp.mlp((784, 1024, 1024, 10)), (784,)),
    "LeNet 28×28": (lambda: lenet.lenet((1, 28, 28)), (1, 28, 28)),
    "ResNet-20 32×32": (
        lambda: resnet.resnet((3, 3, 3), image=(3, 32, 32)),
        (3, 32, 32),
    ),
}
CASES = {
    "one thread": (1, 1, False),
    "in two halves": (1, 1, False),
    "joined, alone": (1, 1, True),
    "two threads": (1, 2, False),
    "two ranks": (2, 1, True),
}
"""The number of processes, threads of each, and whether sessions are joined."""
BYTES = [4 * 4**power for power in range(1, 13)]


def main() -> None:
    """Runs all cases in turns and prints the minimum over turns of the median times."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for name in NETWORKS:
            for case in CASES:
                found[name][case].append(start(name, case)["seconds"])
    print(f"| batch of {BATCH} | " + " | ".join(f"{case}, ms" for case in CASES) + " |")
    for name, cases in found.items():
        row = [f"{1000 * min(times):.2f}" for times in cases.values()]
        print(f"| {name} | " + " | ".join(row) + " |")
    for size, seconds in start("all-reduce", "two ranks").items():
        print(f"all-reduce of {int(size):9} bytes: {1e6 * seconds:10.1f} µs")


def mpiexec() -> str:
    """Returns the path of mpiexec, which a package of MPI may have brought; "" if there is none."""
    folders = [Path(sys.executable).parent, *(Path(each, "bin") for each in sys.path if each)]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path) or ""


def case_of(name: str) -> tuple[int, int, bool]:
    """Returns a case of `CASES`, or the case of a name such as ``2x8``: two ranks of 8 threads."""
    if name in CASES:
        return CASES[name]
    ranks, threads = map(int, name.split("x"))
    return ranks, threads, ranks > 1


def start(name: str, case: str) -> dict[str, float]:
    """Measures a case in processes of its own.

    Args:
        name: A key of `NETWORKS`, or a folder with a `benchmarks.task.Task`.
        case: See `case_of`.

    Returns:
        ``seconds``, the median of a step with the whole batch.
    """
    processes, threads, joined = case_of(case)
    command = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.distributed", name, case]
    if joined:
        command = [mpiexec(), "-n", str(processes), *command]
    else:
        command = [sys.executable, *command[3:]]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def work(name: str, case: str) -> None:
    """Measures one case; rank 0 prints seconds as JSON."""
    found = _all_reduce() if name == "all-reduce" else _steps(name, case)
    if found:
        print(json.dumps(found), flush=True)


def _steps(name: str, case: str) -> dict[str, float]:
    processes, threads, joined = case_of(case)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    model, batch = _model_and_batch(name)
    session = ortops.TrainingSession(model, sess_options=options)
    session = ortops.distributed.join(session) if joined else session
    batch = {name: array[: len(array) // processes] for name, array in batch.items()}
    reduce = (lambda gradients: None) if case == "in two halves" else None
    times = []
    for _ in range(5):
        session.step(batch, outputs=["loss"], reduce=reduce)
    begin = time.perf_counter()
    for _ in range(5):
        session.step(batch, outputs=["loss"], reduce=reduce)
    count = np.array([SECONDS / (time.perf_counter() - begin) * 5])
    if processes > 1:  # all ranks must run the same number of steps
        session._communicator.sum(count)
    for _ in range(max(20, int(count[0] / processes))):
        begin = time.perf_counter()
        session.step(batch, outputs=["loss"], reduce=reduce)
        times.append(time.perf_counter() - begin)
    is_first = not joined or session.rank == 0
    return {"seconds": statistics.median(times)} if is_first else {}


def _model_and_batch(name: str) -> tuple[Path | onnx.ModelProto, dict[str, np.ndarray]]:
    if name not in NETWORKS:
        task = Task.read(name)
        return trainable(task, "Adam"), task.batches()[0]
    build, shape = NETWORKS[name]
    model = ortops.build_training_model(build(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((BATCH, *shape), np.float32)
    return model, {
        model.graph.input[0].name: samples,
        "labels": rng.integers(0, 10, BATCH),
    }


def _all_reduce() -> dict[str, float]:
    from ortops.distributed import _MPI

    world = _MPI()
    found = {}
    for size in BYTES:
        array = np.zeros(size // 4, np.float32)
        times = []
        for _ in range(max(5, min(200, 2**26 // size))):
            world.sum(np.zeros(1))  # a barrier
            begin = time.perf_counter()
            world.sum(array)
            times.append(time.perf_counter() - begin)
        found[str(size)] = statistics.median(times)
    return found if not world.rank else {}


if __name__ == "__main__":
    work(*sys.argv[1:]) if len(sys.argv) > 1 else main()
