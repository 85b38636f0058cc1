"""How long threads should wait actively: steps by `Settings.spin`, idle and beside a busy core.

Each setting has a process of its own, and they take turns::

    python -m benchmarks.spinning [TEXT …]     # works with one of the texts in their name

It prints the least, the median and the mean of all steps. The mean is what a training takes; the
least, on a busy machine, tells what a quiet one would do. Losses have to be equal bit for bit.
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
    """Makes the step that this process times; returns what its first steps give."""
    settings = Settings(spin=spin)
    measure._step = make(Task.read(folder), "Adam", **PEERS[LOWERED].options, settings=settings)
    return [float(measure._step.run()) for _ in range(measure.CHECKED_STEPS)]


@contextmanager
def _neighbour(busy: bool) -> Iterator[None]:
    """Keeps a core busy by a process that does nothing else."""
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
        texts: What is in the names of the works.
        rounds: Turns of each setting.
        turn: How long a turn lasts, in seconds.

    Returns:
        The exit code: 1 where losses differ.
    """
    print("| work | beside | spin, µs | least, ms | median | mean |")
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
