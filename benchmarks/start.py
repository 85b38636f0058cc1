"""A process from its start to the end of the first step, and its memory.

``python -m benchmarks.start FOLDER PEER OPTIMIZER STEPS`` is the process: a peer makes a step of
the work in the folder, and so many more. It prints a JSON object.
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
    """What a process needed.

    Attributes:
        seconds: From the start of the process to the end of its first step.
        megabytes: The most memory that it held, in 10⁶ bytes, to the end of its last step.
    """

    seconds: float
    megabytes: float


def peak_megabytes() -> float:
    """Returns the most memory that this process held, in 10⁶ bytes."""
    try:  # unlike what resource tells, this does not begin with what the parent held
        status = Path("/proc/self/status").read_text(encoding="ascii")
        kibibytes = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(kibibytes.split()[1]) * 1024 / 1e6
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def main(folder: str, peer: str, optimizer: str, steps: str) -> None:
    """Is the process."""
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
    """Starts each peer several times, in turns; one start of each before them is not counted.

    Called in a process whose threads are limited: those that it starts inherit that.

    Args:
        folder: The work, as a `benchmarks.task.Task`.
        peers: Names of `benchmarks.peers.PEERS`.
        optimizer: The optimizer.
        starts: How many times.
        steps: Steps after the first until the memory is read.
    """
    found: dict[str, list[Start]] = {peer: [] for peer in peers}
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has been compiled
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
            if number:  # before that, files come from the disk
                found[peer].append(Start(answer["ended"] - started, answer["megabytes"]))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
