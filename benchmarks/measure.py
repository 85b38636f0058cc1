"""Timing: each peer runs in a separate process, and peers take turns.

Separate processes keep thread pools, allocators and imports of one peer from affecting another.
Peers take turns in rounds, so that a machine that slows down affects all of them.

Nothing heavy is imported at the top, because a process must limit its threads before numpy starts.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from benchmarks.task import THREADS

__all__ = [
    "CHECKED_STEPS",
    "QUICK",
    "Contestant",
    "Effort",
    "Result",
    "first_values",
    "limit_threads",
    "measure",
    "worker",
]

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Calls a function of this package with the given arguments in a separate process."""

Key = TypeVar("Key", bound=Hashable)

CHECKED_STEPS = 3
"""The number of compared steps: enough to cover gradients and optimizer state. Each further step
amplifies rounding differences (about threefold in a deep network with batch normalization)."""

SAMPLES = 1000
"""The number of elements of updated parameters that are compared in each step."""

PAUSE = 0.02
"""Seconds before a turn, in which threads of the previous turn stop waiting for work."""


@dataclass(frozen=True)
class Effort:
    """The duration of measurements.

    Attributes:
        rounds: The number of turns of each peer.
        turn: The duration of a turn, in seconds.
        warm_up: The number of calls before the first turn.
        starts: The number of starts of each peer.
        memory_steps: The number of steps after the first before memory is measured.
    """

    rounds: int = 15
    turn: float = 0.4
    warm_up: int = 5
    starts: int = 5
    memory_steps: int = 6


QUICK = Effort(rounds=2, turn=0.02, warm_up=1, starts=1, memory_steps=2)


@dataclass(frozen=True)
class Contestant:
    """A peer and a workload.

    Attributes:
        folder: The workload, as a `benchmarks.task.Task`.
        peer: A name in `benchmarks.peers.PEERS`.
        optimizer: The optimizer for timing.
        checked_optimizer: The optimizer for checking results, if different.
        threads: The number of threads.
        options: Further arguments of the peer's ``make``, such as where it trains.
    """

    folder: str
    peer: str
    optimizer: str
    checked_optimizer: str | None = None
    threads: int = THREADS
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The times and results of a contestant.

    Attributes:
        seconds: The median time of a step in each round.
        values: The results of the first steps with the optimizer for checking: losses, or a sample
            of the parameters.
        timed_values: The results of the first steps with the optimizer for timing.
    """

    seconds: Sequence[float]
    values: Sequence[float]
    timed_values: Sequence[float]

    def ratios(self, other: Result) -> list[float]:
        """Returns the ratios of times to another contestant's, round by round."""
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]

    def difference(self, other: Result) -> float:
        """Returns the largest difference of values, relative to the largest value of the other."""
        return _difference(self.values, other.values)

    def timed_difference(self, other: Result) -> float:
        """Returns the same for the timed steps."""
        return _difference(self.timed_values, other.timed_values)


def _difference(values: Sequence[float], others: Sequence[float]) -> float:
    gaps = [abs(a - b) for a, b in zip(values, others, strict=True)]
    largest = max(map(abs, others))
    return math.inf if any(map(math.isnan, gaps)) else max(gaps) / largest


# ------------------------------------------------------------------------- in a peer's process

_step: Any


def limit_threads(threads: int = THREADS) -> None:
    """Limits the threads of this process and its children to a peer's."""
    for library in ("MKL", "OMP", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(threads)
    if hasattr(os, "sched_setaffinity"):  # the only way to limit JAX
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def first_values(
    folder: str,
    peer: str,
    optimizer: str,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[float]:
    """Creates a step function and runs the first steps.

    Args:
        folder: The workload, as a `benchmarks.task.Task`.
        peer: A name in `benchmarks.peers.PEERS`.
        optimizer: A name in `benchmarks.task.OPTIMIZERS`.
        limit: The number of different batches; all by default. With fewer batches, an update shows
            sooner in the loss of the batch that it was computed from.
        options: Further arguments of the peer's ``make``.

    Returns:
        The losses, or a sample of the parameters after each update.
    """
    import numpy as np

    from benchmarks.peers import PEERS
    from benchmarks.task import UPDATE, Task

    global _step
    task = replace(Task.read(folder), limit=limit)
    _step = PEERS[peer].make(task, optimizer, **(options or {}))
    values: list[float] = []
    for _ in range(math.ceil(CHECKED_STEPS / _step.count)):
        losses = _step.run()
        if task.network != UPDATE:
            values += np.ravel(losses).tolist()
            continue
        parameters = _step.parameters()
        flat = np.concatenate([parameters[name].ravel() for name in sorted(parameters)])
        values += flat[:: max(1, flat.size // SAMPLES)][:SAMPLES].tolist()
    return values if task.network == UPDATE else values[:CHECKED_STEPS]


def warm_up(calls: int, turn: float) -> int:
    """Warms up the step function that was created last.

    Returns:
        The number of calls in a turn of the given duration.
    """
    for _ in range(calls):
        _step.run()
    return max(2, round(turn / (min(time_steps(3)) * _step.count)))


def time_steps(calls: int) -> list[float]:
    """Returns the seconds per step of several calls, after one that is not timed."""
    time.sleep(PAUSE)
    _step.run()  # restores caches and threads after another peer
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        _step.run()
        times.append((time.perf_counter() - start) / _step.count)
    return times


# --------------------------------------------------------------------------- in this process


@contextmanager
def worker(threads: int = THREADS) -> Iterator[Submit]:
    """Starts a process; its exceptions are raised here when a result is read."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, limit_threads, (threads,)) as executor:
        yield executor.submit


def measure(contestants: Mapping[Key, Contestant], effort: Effort) -> dict[Key, Result]:
    """Measures contestants, interleaved.

    Args:
        contestants: The contestants, by any names.
        effort: The duration.
    """
    names = list(contestants)
    with ExitStack() as stack:
        submit = {name: stack.enter_context(worker(contestants[name].threads)) for name in names}
        values, timed, counts = {}, {}, {}
        for name, it in contestants.items():
            if it.checked_optimizer is not None:
                values[name] = submit[name](
                    first_values, it.folder, it.peer, it.checked_optimizer, 1, it.options
                ).result()
            timed[name] = submit[name](
                first_values, it.folder, it.peer, it.optimizer, None, it.options
            ).result()
            counts[name] = submit[name](warm_up, effort.warm_up, effort.turn).result()
        seconds: dict[Key, list[float]] = {name: [] for name in names}
        for number in range(effort.rounds):
            first = number % len(names)  # so that the order of peers varies
            for name in itertools.chain(names[first:], names[:first]):
                times = submit[name](time_steps, counts[name]).result()
                seconds[name].append(statistics.median(times))
    return {
        name: Result(seconds[name], values.get(name, timed[name]), timed[name]) for name in names
    }
