"""What ortops is measured against itself by: depth, the making of a session, imports."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import Contestant, Effort, measure, worker
from benchmarks.peers import LOWERED
from benchmarks.works import DEPTH_WORKS, DEPTHS, transformer, write

__all__ = [
    "CREATION_DEPTH",
    "compared",
    "creation_seconds",
    "depth_seconds",
    "growth",
    "import_seconds",
]

CREATION_DEPTH = 12
"""The layers of the transformer that a session is made of."""

IMPORT = """
import time
start = time.perf_counter()
from ortops import TrainingSession
print(time.perf_counter() - start)
"""


def depth_seconds(folder: Path, optimizer: str, effort: Effort) -> Mapping[str, Sequence[float]]:
    """Measures steps of multi-layer perceptrons of several depths, interleaved.

    Args:
        folder: An empty folder.
        optimizer: The optimizer.
        effort: How long to measure.

    Returns:
        By work, the median time of a step in each round.
    """
    contestants = {}
    with worker() as submit:
        for number, (name, work) in enumerate(DEPTH_WORKS.items()):
            place = folder / str(number)
            place.mkdir()
            submit(write, work, str(place), [optimizer]).result()
            contestants[name] = Contestant(str(place), LOWERED, optimizer)
    return {name: result.seconds for name, result in measure(contestants, effort).items()}


def _create() -> float:
    """Returns the seconds that a session of the transformer takes, everything being imported."""
    import ortops

    def trainable(depth: int) -> bytes:
        model = ortops.build_training_model(
            transformer(depth), loss="SoftmaxCrossEntropy", optimizer="Adam"
        )
        return bytes(model.SerializeToString())

    ortops.TrainingSession(trainable(1))
    model = trainable(CREATION_DEPTH)
    start = time.perf_counter()
    ortops.TrainingSession(model)
    return time.perf_counter() - start


def creation_seconds(repeats: int) -> list[float]:
    """Returns the time of `TrainingSession(…)`, each in a process of its own."""
    times = []
    for _ in range(repeats):
        with worker() as submit:
            times.append(submit(_create).result())
    return times


def import_seconds(repeats: int) -> list[float]:
    """Returns the time to import what runs a saved step, each in a process of its own."""
    command = [sys.executable, "-c", IMPORT]
    project = Path(__file__).parents[1]
    subprocess.run(command, cwd=project, stdout=subprocess.DEVNULL, check=True)  # from the disk
    return [
        float(subprocess.run(command, cwd=project, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(repeats)
    ]


def compared() -> tuple[str, str]:
    """Returns the works whose layers `growth` compares.

    The least deep net says little: half of its step is not in its layers.
    """
    names = list(DEPTH_WORKS)
    return names[len(names) // 2], names[-1]


def growth(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns, round by round, how many times as long a layer takes in the deepest net."""
    middle, deepest = compared()
    share = DEPTHS[len(DEPTHS) // 2] / DEPTHS[-1]
    return [share * b / a for a, b in zip(seconds[middle], seconds[deepest], strict=True)]
