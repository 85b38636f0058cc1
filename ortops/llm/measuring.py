"""Measures how much memory and time the steps of a fine-tuning need on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.session import TrainingSession
from ortops.errors import UnsupportedError
from ortops.llm.checkpoint import peak_memory
from ortops.llm.folder import Folder
from ortops.llm.tuning import FineTuning

_STEPS = 3


@dataclass(frozen=True)
class Measurement:
    """What a few steps needed.

    Attributes:
        rows: The number of rows per step.
        tokens: The number of tokens per row.
        steps: The number of measured steps, after a first one, which takes longer.
        seconds: The mean time per step.
        tokens_per_second: The number of tokens of all rows per second.
        peak_memory: The largest memory of the process until then in bytes; None on Windows.
    """

    rows: int
    tokens: int
    steps: int
    seconds: float
    tokens_per_second: float
    peak_memory: int | None

    def __str__(self) -> str:
        memory = self.peak_memory
        peak = "" if memory is None else f", peak memory of the process {memory / 1e6:,.0f} MB"
        return (
            f"measured, {self.steps} steps of rank 8 with {self.rows} × {self.tokens} tokens: "
            f"{self.tokens_per_second:,.0f} tokens per second, {self.seconds:.2g} s per step{peak}"
        )


def measure(folder: Folder, rows: int, tokens: int) -> Measurement:
    """Trains an adapter of rank 8 for a few steps on random tokens; nothing is saved.

    Args:
        folder: The folder.
        rows: The number of rows per step.
        tokens: The number of tokens per row, at most the model's context length.

    Raises:
        UnsupportedError: If the model has an encoder.
    """
    if folder.parts:
        raise UnsupportedError("not measured: models with an encoder are not supported")
    tuning = FineTuning(folder.model, rank=8)
    length = max(2, min(tokens, folder.context_length or tokens))
    shape = (_STEPS + 1) * rows, length
    data = np.random.default_rng(0).integers(2, size=shape).tolist()
    clock = _Clock()
    tuning.fit(data, 1, rows, length, shuffle=False, progress=False, callbacks=[clock])
    seconds = (clock.times[-1] - clock.times[0]) / _STEPS
    return Measurement(rows, length, _STEPS, seconds, rows * length / seconds, peak_memory())


class _Clock(Callback):
    """Notes when each step ends.

    Attributes:
        times: The times in seconds.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Notes the time."""
        self.times.append(time.perf_counter())
