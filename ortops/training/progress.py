"""Progress of a training on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

__all__ = ["Progress"]

_WIDTH = 24
_INTERVAL = 0.1  # seconds between two drawings


class Progress:
    """A line per epoch: on a terminal it moves with every batch, elsewhere it is printed once.

    Args:
        epoch: The number of the epoch, from 1.
        epochs: How many there are.
        steps: How many batches the epoch has, or None.
        stream: Where the line goes; standard error by default.
    """

    def __init__(
        self, epoch: int, epochs: int, steps: int | None, stream: TextIO | None = None
    ) -> None:
        self.title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        self.steps = steps
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.start = time.perf_counter()
        self.drawn = 0.0

    def update(self, done: int, values: Mapping[str, float]) -> None:
        """Shows how far the epoch is.

        Args:
            done: How many batches are done.
            values: What to show behind the bar.
        """
        now = time.perf_counter()
        if self.live and now - self.drawn >= _INTERVAL:
            self.drawn = now
            self._write(done, values, "")

    def abandon(self) -> None:
        """Ends the line where it is, because an error comes."""
        if self.live and self.drawn:
            self.stream.write("\n")
            self.stream.flush()

    def finish(self, done: int, values: Mapping[str, float]) -> None:
        """Shows the end of the epoch."""
        self._write(done, values, "\n")

    def _write(self, done: int, values: Mapping[str, float], end: str) -> None:
        parts = [self.title]
        if self.steps:
            filled = min(_WIDTH, _WIDTH * done // self.steps)
            parts.append("█" * filled + "░" * (_WIDTH - filled))
        parts.append(f"{done}/{self.steps}" if self.steps else str(done))
        parts += [f"{name} {value:.4f}" for name, value in values.items()]
        parts.append(f"{time.perf_counter() - self.start:.1f} s")
        line = "  ".join(parts)
        try:
            self.stream.write(f"\r\x1b[2K{line}{end}" if self.live else line + end)
        except UnicodeEncodeError:  # a terminal without Unicode
            plain = line.replace("█", "#").replace("░", ".")
            self.stream.write(f"\r{plain}{end}" if self.live else plain + end)
        self.stream.flush()
