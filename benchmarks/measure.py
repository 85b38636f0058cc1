"""Timing: every peer in a process of its own, in turns.

A process of its own keeps a peer's thread pool, allocator and imports out of another's time. Peers
take turns in rounds, so that a machine that slows down slows all of them.

Nothing heavy is imported at the top: a process sets its number of threads before numpy reads it.
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
from dataclasses import dataclass, replace
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
"""Calls a function of this package, with the arguments after it, in a process of its own."""

Key = TypeVar("Key", bound=Hashable)

CHECKED_STEPS = 3
"""Enough for gradients and optimizer state to count; each further one multiplies differences that
are rounding only (about three times in a deep net with batch normalization)."""

SAMPLES = 1000
"""How many elements of updated parameters are compared, of each step."""

PAUSE = 0.02
"""Seconds before a turn, in which the threads of the turn before stop waiting for work."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: How many turns each peer takes.
        turn: How long a turn lasts, in seconds.
        warm_up: Calls before the first turn.
        starts: How many times each peer starts.
        memory_steps: Steps after the first until the memory of a process is read.
    """

    rounds: int = 15
    turn: float = 0.4
    warm_up: int = 5
    starts: int = 5
    memory_steps: int = 6


QUICK = Effort(rounds=2, turn=0.02, warm_up=1, starts=1, memory_steps=2)


@dataclass(frozen=True)
class Contestant:
    """A peer at a work.

    Attributes:
        folder: The work, as a `benchmarks.task.Task`.
        peer: A name of `benchmarks.peers.PEERS`.
        optimizer: The optimizer that is timed.
        checked_optimizer: The one by which the work is checked, if it is another.
    """

    folder: str
    peer: str
    optimizer: str
    checked_optimizer: str | None = None


@dataclass(frozen=True)
class Result:
    """What a contestant needed and computed.

    Attributes:
        seconds: The median time of a step in each round.
        values: What its first steps gave with the optimizer that checks: losses, or a sample of
            the parameters.
        timed_values: What the first of the steps that are timed gave.
    """

    seconds: Sequence[float]
    values: Sequence[float]
    timed_values: Sequence[float]

    def ratios(self, other: Result) -> list[float]:
        """Returns the time as a multiple of another's, round by round."""
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]

    def difference(self, other: Result) -> float:
        """Returns the largest difference of the values, as a share of the largest of the other."""
        return _difference(self.values, other.values)

    def timed_difference(self, other: Result) -> float:
        """Returns the same of what the timed steps gave."""
        return _difference(self.timed_values, other.timed_values)


def _difference(values: Sequence[float], others: Sequence[float]) -> float:
    gaps = [abs(a - b) for a, b in zip(values, others, strict=True)]
    largest = max(map(abs, others))
    return math.inf if any(map(math.isnan, gaps)) else max(gaps) / largest


# ------------------------------------------------------------------------- in a peer's process

_step: Any


def limit_threads() -> None:
    """Keeps this process, and what it starts, to the threads that a peer may have."""
    for library in ("MKL", "OMP", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(THREADS)
    if hasattr(os, "sched_setaffinity"):  # JAX has no other setting
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def first_values(folder: str, peer: str, optimizer: str, limit: int | None = None) -> list[float]:
    """Makes a step, and the first steps with it.

    Args:
        folder: The work, as a `benchmarks.task.Task`.
        peer: A name of `benchmarks.peers.PEERS`.
        optimizer: A name of `benchmarks.task.OPTIMIZERS`.
        limit: How many of the batches come, if not all. What is learnt from a batch shows in its
            own loss rather than in another's.

    Returns:
        The losses, or of each update a sample of the parameters.
    """
    import numpy as np

    from benchmarks.peers import PEERS
    from benchmarks.task import UPDATE, Task

    global _step
    task = replace(Task.read(folder), limit=limit)
    _step = PEERS[peer].make(task, optimizer)
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
    """Warms up the step that was made last.

    Returns:
        How many calls make a turn of so many seconds.
    """
    for _ in range(calls):
        _step.run()
    return max(2, round(turn / (min(time_steps(3)) * _step.count)))


def time_steps(calls: int) -> list[float]:
    """Returns the seconds of a step, from each of a number of calls after one that is not timed."""
    time.sleep(PAUSE)
    _step.run()  # caches and threads are another peer's before it
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        _step.run()
        times.append((time.perf_counter() - start) / _step.count)
    return times


# --------------------------------------------------------------------------- in this process


@contextmanager
def worker() -> Iterator[Submit]:
    """Starts a process; a result raises here what was raised there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=limit_threads) as executor:
        yield executor.submit


def measure(contestants: Mapping[Key, Contestant], effort: Effort) -> dict[Key, Result]:
    """Measures contestants, interleaved.

    Args:
        contestants: Whom to measure, under names of the caller's.
        effort: How long to measure.
    """
    names = list(contestants)
    with ExitStack() as stack:
        submit = {name: stack.enter_context(worker()) for name in names}
        values, timed, counts = {}, {}, {}
        for name, it in contestants.items():
            if it.checked_optimizer is not None:
                values[name] = submit[name](
                    first_values, it.folder, it.peer, it.checked_optimizer, 1
                ).result()
            timed[name] = submit[name](first_values, it.folder, it.peer, it.optimizer).result()
            counts[name] = submit[name](warm_up, effort.warm_up, effort.turn).result()
        seconds: dict[Key, list[float]] = {name: [] for name in names}
        for number in range(effort.rounds):
            first = number % len(names)  # nobody always comes after the same one
            for name in itertools.chain(names[first:], names[:first]):
                times = submit[name](time_steps, counts[name]).result()
                seconds[name].append(statistics.median(times))
    return {
        name: Result(seconds[name], values.get(name, timed[name]), timed[name]) for name in names
    }
