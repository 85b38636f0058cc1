"""Times packed updates in standard operators and as compiled code, to keep what is faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np

from ortops.engine.execution.onnxruntime_sessions import Sessions
from ortops.engine.execution.packed import Packed
from ortops.engine.execution.translation import Translation
from ortops.engine.execution.update import CompiledUpdate, SessionUpdate, Update

_RUNS = 7
_CALL = 2e-5
"""Seconds: a call of an update that is no longer part of the gradient graph."""
_KEPT = 0.01
"""The share of a step that compiled updates must save once they have been timed."""


class Trial:
    """How long a packed update takes in each step, from runs on a chunk with memory of its own.

    Args:
        packed: The update, as standard operators run it.
        sessions: Opens its session.

    Attributes:
        standard: The seconds that standard operators take.
        least: The seconds that compiled code takes at least: it reads and writes all tensors.
    """

    def __init__(self, packed: Packed, sessions: Sessions) -> None:
        self._packed = packed
        # A thread runs its chunks one after the other.
        self._times = packed.rows / min(packed.rows, sessions.threads)
        self._call = _CALL if packed.joined else 0.0
        sample = packed.sample(packed.overwritten)
        standard = SessionUpdate(sample, sessions, single_thread=packed.rows > 1)
        self.standard = self._times * _seconds_of(standard)
        roles, arrays = packed.group.roles, [first for first, _ in sample.arrays.values()]
        moved = sum(a.nbytes * (1 + r.updated) for a, r in zip(arrays, roles, strict=True))
        source = max(arrays, key=lambda array: array.nbytes)
        target = source.copy()
        copying = _fastest(lambda: np.copyto(target, source)) / (2 * source.nbytes)
        self.least = self._times * copying * moved + self._call

    def compiled(self, translation: Translation) -> float:
        """Returns the seconds that compiled code takes; compiles it."""
        sample = self._packed.sample(translation.overwritten)
        code = CompiledUpdate(sample, translation, 1)
        return self._times * _seconds_of(code) + self._call


def choose(
    found: Sequence[Mapping[Packed, Translation]], step: float, sessions: Sessions
) -> tuple[Set[Packed], str]:
    """Returns the updates that are faster as compiled code, and the reason for a reader.

    Args:
        found: What can be compiled, in each part of a step.
        step: The seconds that a step takes.
        sessions: Opens sessions.
    """
    share = sessions.settings.compiled_share
    trials = {packed: Trial(packed, sessions) for each in found for packed in each}
    standard = sum(trial.standard for trial in trials.values())
    promised = sum(max(0.0, trial.standard - trial.least) for trial in trials.values())
    takes = f"their standard operators take {standard / step:.0%} of a step"
    if promised <= share * step:
        return set(), f"{takes}, and compiled code would save at most {promised / step:.0%}"
    translations = {packed: text for each in found for packed, text in each.items()}
    saved = {
        packed: each.standard - each.compiled(translations[packed])
        for packed, each in trials.items()
    }
    faster = {packed for packed, gain in saved.items() if gain > 0 or share < 0}
    gain = sum(saved[packed] for packed in faster)
    reason = f"{takes}, and compiled code saves {gain / step:.0%}"
    return (faster if share < 0 or gain > _KEPT * step else set()), reason


def _seconds_of(update: Update) -> float:
    """Returns how long an update takes whose scalars are all one."""
    group = update.packed.group
    scalars = []
    for value in group.formula.inputs[len(group.roles) :]:
        assert value.dtype is not None
        scalars.append(np.ones((), value.dtype.numpy()))
    apply = update.bind(scalars, 0).apply
    return _fastest(lambda: apply({}))


def _fastest(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of some runs; others may use the cores meanwhile."""
    best = math.inf
    for _ in range(_RUNS):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
