"""Data-parallel training: the time of steps of joined sessions, and of the all-reduce alone.

Each case runs in a separate program, and cases take turns: one process with one or two threads;
steps in two halves; a joined session of one rank; and two ranks, each with one thread and half of
the batch::

    python -m benchmarks.distributed

Requires ``pip install ortops[distributed]``. MPI starts this program again as a worker.

Two ranks over gloo, through loopback and through links of lower rates between two network
namespaces of Linux (which need root, ``ip`` and ``tc``; the rate is limited, not the latency)::

    python -m benchmarks.distributed links
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import ortops
from benchmarks.peers.with_ortops import trainable
from benchmarks.task import Task
from models import lenet, mlp, resnet
from ortops.distributed import JoinedSession
from ortops.distributed.mpi import MPI

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
LINKED = {
    **NETWORKS,
    "MLP 784-1024-1024-10, adapters of rank 8": (
        lambda: ortops.lora.add(mlp.mlp((784, 1024, 1024, 10)), rank=8, alpha=8),
        (784,),
    ),
}
"""The networks that are measured over links."""
RATES = {"loopback": "", "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
"""The rates of links, as ``tc`` calls them."""
CASES = {
    "one thread": (1, 1, False),
    "in two halves": (1, 1, False),
    "joined, alone": (1, 1, True),
    "two threads": (1, 2, False),
    "two ranks": (2, 1, True),
}
"""The number of processes, threads of each, and whether sessions are joined."""
ALONE, LINK = "joined, alone", "link"
"""Cases that are measured beside links: with half of the batch, as one of two ranks has it."""
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


def links() -> None:
    """Measures steps of two ranks over gloo, and prints them beside bytes and estimates."""
    columns = ["alone", *RATES]
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name in LINKED:
            for column in columns:
                with _link(RATES.get(column, "")) as ranks:
                    result = _in_ranks(name, ranks if column != "alone" else ranks[:1])
                found[name][column].append(result["seconds"])
                sizes[name] = result["bytes"]
    print("| 2 ranks of 32 rows | gradients, kB | " + ", ms | ".join(columns) + ", ms |")
    for name, cases in found.items():
        row = [f"{sizes[name] / 1000:.0f}", *(f"{1000 * min(cases[each]):.2f}" for each in columns)]
        print(f"| {name} | " + " | ".join(row) + " |")


Ranks = list[tuple[list[str], dict[str, str]]]
"""What each rank's command begins with, and its environment."""


@contextlib.contextmanager
def _link(rate: str) -> Iterator[Ranks]:
    """Connects two ranks, by loopback or by a link of a limited rate."""
    shared = {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    if not rate:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        yield [([], {**shared, "RANK": str(rank)}) for rank in range(2)]
        return
    spaces = [f"ortops{os.getpid()}-{rank}" for rank in range(2)]
    shared |= {"MASTER_ADDR": "10.97.0.1", "MASTER_PORT": "29500"}
    try:
        for space in spaces:
            _network("ip", "netns", "add", space)
        ends = ["netns", spaces[0], "type", "veth", "peer", "name", "link1", "netns", spaces[1]]
        _network("ip", "link", "add", "link0", *ends)
        for rank, space in enumerate(spaces):
            inside = ["ip", "-n", space]
            _network(*inside, "addr", "add", f"10.97.0.{rank + 1}/24", "dev", f"link{rank}")
            for device in ("lo", f"link{rank}"):
                _network(*inside, "link", "set", device, "up")
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _network("tc", "-n", space, "qdisc", "add", "dev", f"link{rank}", *limit)
        yield [
            (
                ["ip", "netns", "exec", space],
                {**shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": f"link{rank}"},
            )
            for rank, space in enumerate(spaces)
        ]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _network(*command: str) -> None:
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: {result.stderr.strip()}; it needs root on Linux")


def _in_ranks(name: str, ranks: Ranks) -> dict[str, float]:
    """Measures a network in one or two processes."""
    case = LINK if len(ranks) > 1 else ALONE
    command = [sys.executable, "-m", "benchmarks.distributed", name, case]
    started = [
        subprocess.Popen(
            [*before, *command],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
        )
        for before, environment in ranks
    ]
    printed = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{name}, {case}: a rank failed")
    return dict(json.loads(printed[0].splitlines()[-1]))


def mpiexec() -> str:
    """Returns the path of mpiexec, which a package of MPI may have brought; "" if there is none."""
    folders = [Path(sys.executable).parent, *(Path(each, "bin") for each in sys.path if each)]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path) or ""


def case_of(name: str) -> tuple[int, int, bool]:
    """Returns a case of `CASES`, or the case of a name such as ``2x8``: two ranks of 8 threads."""
    if name == LINK:
        return 2, 1, True
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
    linked = "MASTER_PORT" in os.environ
    if processes > 1 or not linked:
        communicator = "torch" if linked else None
        session = ortops.distributed.join(session, communicator) if joined else session
    parts = 2 if linked else processes
    batch = {name: array[: len(array) // parts] for name, array in batch.items()}
    size = sum(flat.nbytes for flat in session.gradients(batch).flat)
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
    is_first = session.rank == 0 if isinstance(session, JoinedSession) else True
    return {"seconds": statistics.median(times), "bytes": size} if is_first else {}


def _model_and_batch(name: str) -> tuple[Path | onnx.ModelProto, dict[str, np.ndarray]]:
    if name not in LINKED:
        task = Task.read(name)
        return trainable(task, "Adam"), task.batches()[0]
    build, shape = LINKED[name]
    model = ortops.build_training_model(build(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((BATCH, *shape), np.float32)
    return model, {
        model.graph.input[0].name: samples,
        "labels": rng.integers(0, 10, BATCH),
    }


def _all_reduce() -> dict[str, float]:
    world = MPI()
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
    if sys.argv[1:] == ["links"]:
        links()
    else:
        work(*sys.argv[1:]) if len(sys.argv) > 1 else main()
