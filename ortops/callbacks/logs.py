"""Callbacks that write down how a training goes."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any

from ortops.callbacks.monitor import (
    begins_anew,
    check_count,
    check_path,
    optional_module,
    path_of,
    remembered,
)
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import write_atomically
from ortops.training.callback import Callback, Record
from ortops.training.session import TrainingSession
from ortops.training.tables import as_cell, csv_text

__all__ = ["CSVLog", "JSONLines", "TensorBoard"]

logger = logging.getLogger("ortops")


class _Log(Callback):
    """A text file that grows, row by row.

    A fit that is resumed goes on behind the rows that there were at the position it goes on from:
    what was written after that is cut off, as it comes again.
    """

    writes = True

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = path_of(type(self).__name__, path)
        self._append = append
        self._size = 0  # bytes of the rows so far
        self._last = (0, 0)  # bytes of the last row, and their checksum

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Empties the file, or cuts off what comes again."""
        check_path(type(self).__name__, self.path)
        present = self.path.stat().st_size if self.path.exists() else 0
        if begins_anew(record):
            self._size, self._last = present if self._append else 0, (0, 0)
        elif present < self._size:
            logger.warning(
                "%s: '%s' has %d bytes, and had %d where fit goes on from; rows are missing",
                *(type(self).__name__, self.path, present, self._size),
            )
            self._size, self._last = present, (0, 0)
        elif self._is_foreign():
            raise OrtopsError(
                f"{type(self).__name__}: '{self.path}' is not the file that this training wrote, "
                "and resuming would cut off its rows; give another path, or remove the file"
            )
        if present > self._size:
            os.truncate(self.path, self._size)

    def _is_foreign(self) -> bool:
        """Whether the last row is not the one that was written there."""
        length, checksum = self._last
        if not length:
            return False
        with self.path.open("rb") as stream:
            stream.seek(self._size - length)
            return zlib.crc32(stream.read(length)) != checksum

    def _write(self, row: str) -> None:
        content = row.encode()
        with self.path.open("ab") as stream:
            stream.write(content)
        self._size = self.path.stat().st_size
        self._last = len(content), zlib.crc32(content)

    def state(self) -> dict[str, Any]:
        """Returns how long the file is and what its last row is, for the file of the model."""
        length, checksum = self._last
        return {"bytes": self._size, "row": length, "checksum": checksum}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes up how long the file was, and what its last row was."""
        numbers = {"row": 0, "checksum": 0, **state}  # an older version wrote no more than bytes
        self._size, length, checksum = (
            int(remembered(type(self).__name__, numbers, name, whole=True))
            for name in ("bytes", "row", "checksum")
        )
        self._last = min(length, self._size), checksum


class CSVLog(_Log):
    """Writes a row for each epoch into a CSV file: what the history of the training has.

    A new fit begins the file anew; one that is resumed goes on behind the rows of its position.
    Numbers are written in full; those that are not finite are ``nan``, ``inf`` and ``-inf``. A name
    that a spreadsheet would take for a formula, as it begins with ``=``, ``+``, ``-`` or ``@``,
    gets an apostrophe before it.

    Args:
        path: The file.
        append: Whether a new fit goes on behind the rows that are there, instead of beginning anew.

    Raises:
        OrtopsError: In fit, if there is no folder for the file.

    Example:
        >>> log = CSVLog("history.csv")  # session.fit(data, callbacks=[log])

        ``pandas.read_csv("history.csv")`` reads it::

            epoch,loss,validation_loss,learning_rate,steps,seconds
            1,0.2513,0.1217,0.001,938,3.1
            2,0.1074,0.0951,0.001,1876,3.0
    """

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Writes the row of an epoch."""
        row = {as_cell(name): n for name, n in {"epoch": record.epoch, **record.values}.items()}
        columns = self._columns()
        added = [name for name in row if name not in columns]
        if added and columns:  # an earlier fit had less to tell
            with self.path.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
            text = _csv(columns + added, rows, header=True)
            write_atomically(self.path, text.encode())
        self._write(_csv(columns + added, [row], header=not columns))

    def _columns(self) -> list[str]:
        if not self._size:
            return []
        with self.path.open(newline="", encoding="utf-8") as stream:
            return next(csv.reader(stream), [])


def _csv(columns: list[str], rows: list[dict[str, Any]], *, header: bool) -> str:
    cells = ([row.get(name, "") for name in columns] for row in rows)
    return csv_text([columns, *cells] if header else cells)


class JSONLines(_Log):
    """Writes a JSON object for each epoch, and for steps if wanted, each on a line of its own.

    A new fit begins the file anew; one that is resumed goes on behind the lines of its position.
    JSON knows finite numbers only, so others are ``null``.

    Args:
        path: The file.
        every: After how many batches to write a line in an epoch; none by default.
        append: Whether a new fit goes on behind the lines that are there, instead of beginning
            anew.

    Raises:
        OrtopsError: If ``every`` is no integer of at least 1; in fit, if there is no folder for the
            file.

    Example:
        >>> log = JSONLines("log.jsonl", every=100)  # session.fit(data, callbacks=[log])

        Its lines::

            {"event": "step", "epoch": 1, "batch": 100, "step": 100, "loss": 0.71, …}
            {"event": "epoch", "epoch": 1, "batch": 938, "step": 938, "loss": 0.25, …}
    """

    def __init__(
        self, path: str | os.PathLike[str], *, every: int | None = None, append: bool = False
    ) -> None:
        super().__init__(path, append=append)
        self.every = None if every is None else check_count("JSONLines", "every", every)

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Writes the line of a step."""
        if self.every is not None and record.batch % self.every == 0:
            self._line("step", record)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Writes the line of an epoch."""
        self._line("epoch", record)

    def _line(self, event: str, record: Record) -> None:
        numbers = {
            name: value if math.isfinite(value) else None for name, value in record.values.items()
        }
        place = {"epoch": record.epoch, "batch": record.batch, "step": record.step}
        line = {"event": event, **place, **numbers}
        self._write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")


class TensorBoard(Callback):
    """Writes event files for TensorBoard: ``tensorboard --logdir <folder>``.

    The numbers of epochs are ``epoch/<name>``, those of steps ``step/<name>``, all over the number
    of finished steps. A fit that is resumed hides what was written after its position. Needs the
    package tensorboardX (``pip install ortops[tensorboard]``).

    Args:
        folder: Where the files go; created if it does not exist. Trainings are compared when each
            has a folder of its own in a common one.
        every: After how many batches to write the numbers of a step.

    Raises:
        OrtopsError: If ``every`` is no integer of at least 1, or tensorboardX is not installed.

    Example:
        >>> board = TensorBoard("runs/first", every=10)  # session.fit(data, callbacks=[board])
    """

    writes = True

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1) -> None:
        self.folder = path_of("TensorBoard", folder)
        self.every = check_count("TensorBoard", "every", every)
        self._writer: Any = None

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Opens a file for events."""
        module = optional_module("TensorBoard", "tensorboardX", "tensorboard")
        self._close()
        purged = None if begins_anew(record) else session.steps_done + 1
        self._writer = module.SummaryWriter(os.fspath(self.folder), purge_step=purged)

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Writes the numbers of a step."""
        if record.batch % self.every == 0:
            self._add("step", record)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Writes the numbers of an epoch."""
        self._add("epoch", record)
        self._writer.flush()

    def on_close(self) -> None:
        """Closes the file, also where the training has failed."""
        self._close()

    def _add(self, group: str, record: Record) -> None:
        for name, value in record.values.items():
            if name != "steps":
                self._writer.add_scalar(f"{group}/{name}", value, record.step)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
