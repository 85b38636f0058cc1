"""Compares values of `Settings.spin`, the time for which threads spin while they wait for work.

Measures steps on an idle machine and with one busy core. Each setting runs in a separate process,
and processes take turns::

    python -m benchmarks.spinning [TEXT …]     # only workloads with TEXT in their name

Prints minimum, median and mean of all steps. The mean determines the time of a training; on a busy
machine, the minimum shows the time on an idle one. Losses must be bit-equal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks import measure, works
from benchmarks.peers import LOWERED, PEERS
from benchmarks.peers.with_ortops import make
from benchmarks.task import Task
from ortops.execution.settings import Settings

__all__ = ["main"]

SPINS = (None, 0, 20, 200)
"""Microseconds; None for onnxruntime's own default."""

TEXTS = ("784", "LeNet", "ResNet", "transformer", "LSTM")
ROUNDS, TURN = 15, 0.2


def _make(folder: str, spin: int | None) -> list[float]:
    """Creates the step function that this process times; returns its first losses."""
    settings = Settings(spin=spin)
    measure._step = make(Task.read(folder), "Adam", **PEERS[LOWERED].options, settings=settings)
    return [float(measure._step.run()) for _ in range(measure.CHECKED_STEPS)]


@contextmanager
def _neighbour(busy: bool) -> Iterator[None]:
    """Keeps one core busy with another process."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def main(texts: Sequence[str], rounds: int = ROUNDS, turn: float = TURN) -> int:
    """Measures, and prints a table.

    Args:
        texts: Parts of the names of the workloads.
        rounds: The number of turns of each setting.
        turn: The duration of a turn, in seconds.

    Returns:
        The exit status: 1 if losses differ.
    """
    print("| workload | load | spin, µs | minimum, ms | median | mean |")
    print("| --- | --- | --- | --- | --- | --- |")
    differ = False
    for name in works.find(texts or TEXTS):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            with measure.worker() as submit:
                submit(works.write, works.WORKS[name], folder, ["Adam"]).result()
            submits = {spin: stack.enter_context(measure.worker()) for spin in SPINS}
            losses = [submits[spin](_make, folder, spin).result() for spin in SPINS]
            differ |= any(each != losses[0] for each in losses)
            calls = min(submits[s](measure.warm_up, 3, turn).result() for s in SPINS)
            for busy in (False, True):
                times: dict[int | None, list[float]] = {spin: [] for spin in SPINS}
                with _neighbour(busy):
                    for number in range(rounds):
                        first = number % len(SPINS)
                        for spin in SPINS[first:] + SPINS[:first]:
                            times[spin] += submits[spin](measure.time_steps, calls).result()
                for spin, each in times.items():
                    least, median, mean = (
                        f"{1e3 * f(each):.3g}" for f in (np.min, np.median, np.mean)
                    )
                    shown = "default" if spin is None else spin
                    beside = "a busy core" if busy else "nothing"
                    print(f"| {name} | {beside} | {shown} | {least} | {median} | {mean} |")
    if differ:
        print("losses differ", file=sys.stderr)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
