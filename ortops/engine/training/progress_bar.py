"""The progress of training in a terminal, a notebook or a file."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_WIDTH = 24
_NARROWEST = 8
_INTERVAL = 0.1  # seconds between two drawings
_HIDDEN = frozenset(("learning_rate", "steps", "seconds"))


class ProgressBar:
    """A line per epoch: live in a terminal or notebook, elsewhere written when the epoch ends.

    If the stream cannot be written, because the terminal was closed or the disk is full, nothing is
    shown and training continues.

    Args:
        epoch: The number of the epoch, from 1.
        epochs: The number of epochs.
        batches: The number of batches of the epoch, or None.
        done: The number of batches that were finished before this call.
        samples: The number of rows of these batches.
        stream: The stream to write to; standard error by default.
    """

    def __init__(
        self,
        epoch: int,
        epochs: int,
        batches: int | None,
        done: int = 0,
        samples: int = 0,
        stream: TextIO | None = None,
    ) -> None:
        self.title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        self.batches = batches
        self.done, self.first = done, done
        self.samples, self.first_sample = samples, samples
        self.stream: TextIO | None = sys.stderr if stream is None else stream
        self.live = self.stream is not None and self.stream.isatty()
        self.cell = None if self.live or stream is not None else _new_cell()
        self.start = time.perf_counter()
        self.drawn = 0.0

    def update(self, done: int, samples: int, values: Callable[[], Mapping[str, float]]) -> None:
        """Shows the progress of the epoch.

        Args:
            done: The number of finished batches.
            samples: The number of their rows.
            values: Returns the numbers to show; called only if the line is drawn.
        """
        self.done, self.samples = done, samples
        if not self.live and self.cell is None:
            return
        now = time.perf_counter()
        if now - self.drawn >= _INTERVAL:
            self.drawn = now
            self._draw(self._line(values(), ended=False), "")

    def abandon(self) -> None:
        """Ends the line when training ends in the middle of an epoch."""
        if self.live and self.drawn:
            self._write("\n")

    def finish(self, values: Mapping[str, float]) -> None:
        """Shows the end of the epoch."""
        self._draw(self._line(values, ended=True), "\n")

    def _line(self, values: Mapping[str, float], *, ended: bool) -> str:
        """Returns the line; a narrow terminal gets only its most important parts."""
        seconds = time.perf_counter() - self.start
        speed = (self.samples - self.first_sample) / seconds if seconds else 0.0
        shown = f"{self.done}/{self.batches}" if self.batches else str(self.done)
        numbers = [f"{n} {value:.4f}" for n, value in values.items() if n not in _HIDDEN]
        rate = [f"{speed:,.0f} samples/s"] if speed else []
        if ended:
            clock = [f"{seconds:.1f} s"]
        elif self.batches and self.done > self.first:
            left = seconds * (self.batches - self.done) / (self.done - self.first)
            clock = [f"{_duration(left)} left"]
        else:
            clock = []
        columns = self._columns()
        for parts in ([*numbers, *rate, *clock], [*numbers, *clock]):
            line = "  ".join([self.title, shown, *parts])
            if len(line) < columns:
                break
        width = min(_WIDTH, columns - len(line) - 3)
        if self.batches and width >= _NARROWEST and (self.live or self.cell):
            filled = min(width, width * self.done // self.batches)
            bar = "█" * filled + "░" * (width - filled)
            line = line.replace(self.title, f"{self.title}  {bar}", 1)
        return line if ended else line[: columns - 1]

    def _columns(self) -> int:
        """Returns the maximum width of a line."""
        if self.stream is None or not self.live:
            return sys.maxsize
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError, AttributeError):  # no real terminal
            return shutil.get_terminal_size().columns

    def _draw(self, line: str, end: str) -> None:
        if self.cell is not None:
            self.cell.update(_Text(line))
            return
        try:
            self._write(f"\r\x1b[2K{line}{end}" if self.live else line + end)
        except UnicodeEncodeError:  # a terminal without Unicode
            plain = line.replace("█", "#").replace("░", ".")
            self._write(f"\r{plain}{end}" if self.live else plain + end)

    def _write(self, text: str) -> None:
        if self.stream is None:  # a program without standard error
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            if error.errno is None:  # not the system's; a signal handler may raise TimeoutError
                raise
            self.stream, self.live = None, False


class _Text:
    """Text that a notebook shows without quotes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _new_cell() -> Any:
    """Returns a display of the notebook that can be updated; None outside of notebooks."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    return sys.modules["IPython.display"].display(_Text(""), display_id=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
