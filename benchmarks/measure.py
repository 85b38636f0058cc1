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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["CHECKED_STEPS", "QUICK", "THREADS", "Effort", "Result", "measure", "worker"]

Submit: TypeAlias = Callable[..., "Future[Any]"]
"""Calls a function of this package, with the arguments after it, in a process of its own."""

THREADS = 2
"""Threads of every peer."""

CHECKED_STEPS = 3
"""Enough for gradients and optimizer state to count; each further one multiplies differences that
are rounding only (about three times in a deep net with batch normalization)."""


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: How many turns each peer takes.
        turn: How long a turn lasts, in seconds.
        warm_up: Steps before the first turn.
    """

    rounds: int = 15
    turn: float = 0.4
    warm_up: int = 5


QUICK = Effort(rounds=2, turn=0.02, warm_up=1)


@dataclass(frozen=True)
class Result:
    """What a peer needed for a work.

    Attributes:
        seconds: The median time of a step in each round.
        values: What the first steps gave: losses, or a sample of the parameters.
    """

    seconds: Sequence[float]
    values: Sequence[float]

    def ratios(self, other: Result) -> list[float]:
        """Returns the time as a multiple of another's, round by round."""
        return [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]

    def difference(self, other: Result) -> float:
        """Returns the largest difference of the values, as a share of the largest of the other."""
        largest = max(abs(value) for value in other.values)
        gap = [abs(a - b) for a, b in zip(self.values, other.values, strict=True)]
        return math.inf if any(map(math.isnan, gap)) else max(gap) / largest


# ------------------------------------------------------------------------- in a peer's process

_step: Callable[[], Any]


def _limit_threads() -> None:
    for library in ("MKL", "OMP", "OPENBLAS"):
        os.environ[f"{library}_NUM_THREADS"] = str(THREADS)


def first_values(work: str, peer: str, optimizer: str) -> list[float]:
    """Makes the first steps with the optimizer by which a work is checked.

    Returns:
        The loss of each step, or of each updated parameter at most 1,000 elements.
    """
    import numpy as np

    from benchmarks.peers import PEERS
    from benchmarks.works import WORKS

    checked = WORKS[work].checked_optimizer or optimizer
    step = PEERS[peer].step(WORKS[work], checked)
    values: list[float] = []
    for _ in range(CHECKED_STEPS):
        result = step()
        flat = np.ravel(result.numpy() if hasattr(result, "numpy") else result)
        values += flat[:: max(1, flat.size // 1000)][:1000].tolist()
    return values


def warm_up(work: str, peer: str, optimizer: str, effort: Effort) -> int:
    """Makes the step that is timed from now on, and its first steps.

    Returns:
        How many steps make a turn.
    """
    from benchmarks.peers import PEERS
    from benchmarks.works import WORKS

    global _step
    _step = PEERS[peer].step(WORKS[work], optimizer)
    for _ in range(effort.warm_up):
        _step()
    return max(2, round(effort.turn / min(time_steps(3))))


def time_steps(count: int) -> list[float]:
    """Returns the seconds of each of a number of steps, after one that is not counted."""
    _step()  # caches and threads are another peer's before it
    times = []
    for _ in range(count):
        start = time.perf_counter()
        _step()
        times.append(time.perf_counter() - start)
    return times


# --------------------------------------------------------------------------- in this process


@contextmanager
def worker() -> Iterator[Submit]:
    """Starts a process; a result raises here what was raised there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_limit_threads) as executor:
        yield executor.submit


def measure(
    work: str, peers: Sequence[str], optimizer: str, effort: Effort
) -> Mapping[str, Result]:
    """Measures peers at a work, interleaved.

    Args:
        work: A name of `benchmarks.works.WORKS`.
        peers: Names of `benchmarks.peers.PEERS`.
        optimizer: A name of `benchmarks.peers.OPTIMIZERS`, for what is timed.
        effort: How long to measure.
    """
    with ExitStack() as stack:
        submit = {peer: stack.enter_context(worker()) for peer in peers}
        checks = {p: submit[p](first_values, work, p, optimizer) for p in peers}  # all at once
        values = {peer: check.result() for peer, check in checks.items()}
        counts = {p: submit[p](warm_up, work, p, optimizer, effort).result() for p in peers}
        seconds: dict[str, list[float]] = {peer: [] for peer in peers}
        for number in range(effort.rounds):
            first = number % len(peers)  # nobody always comes after the same peer
            for peer in itertools.chain(peers[first:], peers[:first]):
                times = submit[peer](time_steps, counts[peer]).result()
                seconds[peer].append(statistics.median(times))
    return {peer: Result(seconds[peer], values[peer]) for peer in peers}
