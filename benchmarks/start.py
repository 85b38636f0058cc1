"""The time from the start of a process to the end of its first step, and its memory.

``python -m benchmarks.start FOLDER PEER OPTIMIZER STEPS`` is that process: a peer runs a step of
the workload in the folder, and then STEPS more. It prints a JSON object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Start", "measure", "peak_megabytes"]

PROJECT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Start:
    """The start-up time and memory of a process.

    Attributes:
        seconds: The time from the start of the process to the end of its first step.
        megabytes: Its peak memory, in 10⁶ bytes, up to the end of its last step.
    """

    seconds: float
    megabytes: float


def peak_megabytes() -> float:
    """Returns the peak memory of this process, in 10⁶ bytes."""
    try:  # unlike resource.getrusage, this does not include the memory of the parent
        status = Path("/proc/self/status").read_text(encoding="ascii")
        kibibytes = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(kibibytes.split()[1]) * 1024 / 1e6
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main(folder: str, peer: str, optimizer: str, steps: str) -> None:
    """Runs the process."""
    from benchmarks.peers import PEERS
    from benchmarks.task import Task

    step = PEERS[peer].make(Task.read(folder), optimizer)
    step.run()
    ended = time.time()
    for _ in range(int(steps)):
        step.run()
    print(json.dumps({"ended": ended, "megabytes": peak_megabytes()}))


def measure(
    folder: str, peers: list[str], optimizer: str, starts: int, steps: int
) -> Mapping[str, list[Start]]:
    """Starts each peer several times, in turns, after one start that is not counted.

    Must be called in a process with limited threads; child processes inherit the limit.

    Args:
        folder: The workload, as a `benchmarks.task.Task`.
        peers: Names in `benchmarks.peers.PEERS`.
        optimizer: The optimizer.
        starts: The number of starts.
        steps: The number of steps after the first before memory is measured.
    """
    found: dict[str, list[Start]] = {peer: [] for peer in peers}
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # bytecode is cached, as for an installed package
    for number in range(1 + starts):
        for peer in peers:
            started = time.time()
            process = subprocess.run(
                [sys.executable, "-m", "benchmarks.start", folder, peer, optimizer, str(steps)],
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
            answer: dict[str, Any] = json.loads(process.stdout)
            if number:  # the first start fills the file cache
                found[peer].append(Start(answer["ended"] - started, answer["megabytes"]))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
