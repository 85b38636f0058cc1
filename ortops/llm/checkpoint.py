"""Callbacks of a fine-tuning: saving the folder, and estimating how long the training takes."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ortops.callbacks.checkpoint import Checkpoint
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.session import TrainingSession

logger = logging.getLogger("ortops")


class FolderCheckpoint(Checkpoint):
    """Saves the folder of a language model: the model once, and then what training changes.

    Args:
        folder: The folder.
        every: The number of steps between saves; after each epoch by default.
        save_model: Writes the model into the folder.
        save_progress: Writes the adapter and the state of the training.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int | None,
        save_model: Callable[[Path], None],
        save_progress: Callable[[Path], None],
    ) -> None:
        super().__init__(os.fspath(folder).replace("{", "{{").replace("}", "}}"), every=every)
        self._save_model, self._save_progress = save_model, save_progress
        self._has_model = False

    def check(self, file: Path) -> None:
        """See `Checkpoint`; the folder is created when it is written."""

    def write(self, session: TrainingSession, file: Path) -> None:
        """See `Checkpoint`."""
        if not self._has_model:
            self._save_model(file)
            self._has_model = True
        self._save_progress(file)


class Estimate(Callback):
    """Logs once, after the first steps, how long the training takes and how much memory.

    Args:
        steps: The number of steps of the whole training, finished ones included.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first = self._time = 0.0

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Starts the clock."""
        self._first, self._time = session.steps_done + 1, 0.0

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Measures a few steps after the first one, which takes longer."""
        measured = session.steps_done - self._first
        if measured == 0:
            self._time = time.perf_counter()
        elif measured == _MEASURED:
            seconds = (time.perf_counter() - self._time) / measured
            left = self._steps - session.steps_done
            logger.log(
                logging.WARNING if left * seconds > _LONG else logging.INFO,
                "%d steps left, %.2g s each: about %.0f min%s",
                *(left, seconds, left * seconds / 60, _peak()),
            )


_MEASURED, _LONG = 3, 60  # steps, seconds


def _peak() -> str:
    """Returns the peak memory of the process so far as text; empty on Windows."""
    found = peak_memory()
    return "" if found is None else f", with {found / 1e6:.0f} MB of memory so far"


def peak_memory() -> int | None:
    """Returns the largest memory of the process so far in bytes; None on Windows."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
