"""Comparisons of ortops with itself: depth, session creation, imports, `fit`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Contestant, Effort, measure, worker
from benchmarks.peers import LOWERED
from benchmarks.works import DEPTH_WORKS, DEPTHS, WORKS, TrainingStep, transformer, write

__all__ = [
    "CREATION_DEPTH",
    "FIT_TARGETS",
    "STEP_GRAPH_TARGETS",
    "compared",
    "creation_seconds",
    "depth_seconds",
    "fit_ratios",
    "growth",
    "import_seconds",
]

CREATION_DEPTH = 12
"""The number of transformer layers for measuring session creation."""

FIT_TARGETS = {"LeNet 28×28, batch 64": 1.03, "MLP 784-128-10, batch 32": 1.1}
"""The target ratio of the time of `fit` to a loop's, by workload."""

STEP_GRAPH_TARGETS = {
    name: 2.0 if name.startswith(("LeNet", "ResNet")) else 1.5
    for name, work in WORKS.items()
    if isinstance(work, TrainingStep)
}
"""The target ratio of the time of a step graph in a plain session to `step`."""

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
        effort: The duration.

    Returns:
        The median time of a step in each round, by workload.
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
    """Returns the seconds to create a session of the transformer, without imports."""
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
    """Returns the times of `TrainingSession(…)`, each in a separate process."""
    times = []
    for _ in range(repeats):
        with worker() as submit:
            times.append(submit(_create).result())
    return times


def _fit(name: str, optimizer: str, effort: Effort) -> list[float]:
    """Returns the ratio of the time of `fit` to a loop of steps, in each round."""
    import ortops

    work = WORKS[name]
    assert isinstance(work, TrainingStep)
    model = ortops.build_training_model(
        work.build(), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    session = ortops.TrainingSession(model)
    batches = work.batches()
    data = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
    rows = len(next(iter(data.values())))

    def loop() -> None:
        order = np.random.default_rng(0).permutation(rows)
        for start in range(0, rows, work.batch):
            chosen = order[start : start + work.batch]
            batch = {key: array[chosen] for key, array in data.items()}
            float(session.step(batch, outputs=["loss"])["loss"])

    def fit() -> None:
        session.fit(data, batch_size=work.batch, progress=False, stop_on_nan=False)

    begin = time.perf_counter()
    loop()
    fit()
    repeats = max(1, round(2 * effort.turn / (time.perf_counter() - begin)))
    ratios = []
    for _ in range(effort.rounds):
        seconds = {loop: 0.0, fit: 0.0}
        for _ in range(repeats):
            for each in seconds:
                begin = time.perf_counter()
                each()
                seconds[each] += time.perf_counter() - begin
        ratios.append(seconds[fit] / seconds[loop])
    return ratios


def fit_ratios(optimizer: str, effort: Effort) -> dict[str, list[float]]:
    """Compares `fit` with an equivalent loop, interleaved.

    The loop slices the same shuffled batches, calls `step` and reads the loss.

    Args:
        optimizer: The optimizer.
        effort: The duration.

    Returns:
        The ratio of the time of `fit` to the loop's in each round, by workload.
    """
    found = {}
    for name in FIT_TARGETS:
        with worker() as submit:
            found[name] = submit(_fit, name, optimizer, effort).result()
    return found


def import_seconds(repeats: int) -> list[float]:
    """Returns the times to import `TrainingSession`, each in a separate process."""
    command = [sys.executable, "-c", IMPORT]
    project = Path(__file__).parents[1]
    subprocess.run(
        command, cwd=project, stdout=subprocess.DEVNULL, check=True
    )  # fills the file cache
    return [
        float(subprocess.run(command, cwd=project, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(repeats)
    ]


def compared() -> tuple[str, str]:
    """Returns the workloads that `growth` compares.

    The shallowest network is not used, because half of its step is outside its layers.
    """
    names = list(DEPTH_WORKS)
    return names[len(names) // 2], names[-1]


def growth(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns, for each round, the ratio of the time per layer in the deepest network."""
    middle, deepest = compared()
    share = DEPTHS[len(DEPTHS) // 2] / DEPTHS[-1]
    return [share * b / a for a, b in zip(seconds[middle], seconds[deepest], strict=True)]
