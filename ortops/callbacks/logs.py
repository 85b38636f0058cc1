"""Callbacks that log metrics to files and to TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from ortops._common.arguments import whole_number
from ortops._common.optional import optional_module
from ortops.callbacks.monitor import (
    _Recording,
    begins_anew,
    grouped,
    path_of,
    remembered,
)
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.foreign_arrays import as_cell, csv_text
from ortops.engine.training.session import TrainingSession
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import check_path, naming, write_atomically
from ortops.graph.files.opening import open_regular

logger = logging.getLogger("ortops")


class _Log(Callback):
    """A text file to which rows are appended.

    A resumed fit first truncates the file to the rows before the resume position, because later
    rows will be written again.
    """

    writes = True

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.path = path_of(type(self).__name__, path)
        self._append = append
        self._size = 0  # bytes written so far
        self._last = (0, 0)  # length in bytes and checksum of the last row

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Empties the file, or truncates it to the resume position."""
        check_path(type(self).__name__, self.path)
        present = self.path.stat().st_size if self.path.exists() else 0
        if begins_anew(record):
            self._size, self._last = present if self._append else 0, (0, 0)
        elif present < self._size:
            logger.warning(
                "%s: '%s' has %d bytes, but had %d at the resume position; rows are missing",
                *(type(self).__name__, self.path, present, self._size),
            )
            self._size, self._last = present, (0, 0)
        elif self._is_foreign():
            raise OrtopsError(
                f"{type(self).__name__}: '{self.path}' was not written by this training, and "
                "resuming would truncate it; use another path, or remove the file"
            )
        if present > self._size:
            os.truncate(self.path, self._size)

    def _is_foreign(self) -> bool:
        """Whether the last row differs from the one that this training wrote."""
        length, checksum = self._last
        if not length:
            return False
        with self._opened() as stream:
            stream.seek(self._size - length)
            return zlib.crc32(stream.read(length)) != checksum

    def _opened(self) -> BinaryIO:
        what = f"{type(self).__name__}: file"
        return open_regular(self.path, error=OrtopsError, what=what, remedy="use another path")

    def _write(self, row: str) -> None:
        content = row.encode()
        try:
            with naming(self.path), self.path.open("ab") as stream:
                stream.write(content)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, self._size)  # a full disk can have a part of the row
            raise
        self._size = self.path.stat().st_size
        self._last = len(content), zlib.crc32(content)

    def state(self) -> dict[str, Any]:
        """Returns the file's length and the last row's checksum, for the model file."""
        length, checksum = self._last
        return {"bytes": self._size, "row": length, "checksum": checksum}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the file's length and the last row's checksum."""
        numbers = {"row": 0, "checksum": 0, **state}  # older versions wrote only bytes
        self._size, length, checksum = (
            int(remembered(type(self).__name__, numbers, name, whole=True))
            for name in ("bytes", "row", "checksum")
        )
        self._last = min(length, self._size), checksum


class CSVLog(_Log):
    """Writes the metrics of each epoch, the training history, to a CSV file.

    A new fit overwrites the file; a resumed one continues it at the resume position. Numbers are
    written with full precision; non-finite ones are ``nan``, ``inf`` and ``-inf``. A column name
    that a spreadsheet would interpret as a formula (beginning with ``=``, ``+``, ``-`` or ``@``)
    gets an apostrophe as prefix.

    Args:
        path: The file.
        append: Whether a new fit appends to the file instead of overwriting it.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if the file's folder does not exist.

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
        if added and columns:  # an earlier fit had fewer metrics
            with io.TextIOWrapper(self._opened(), "utf-8", newline="") as stream:
                rows = list(csv.DictReader(stream))
            text = _csv(columns + added, rows, header=True)
            write_atomically(self.path, text.encode())
            self._size = len(text.encode())
        self._write(_csv(columns + added, [row], header=not columns))

    def _columns(self) -> list[str]:
        if not self._size:
            return []
        with io.TextIOWrapper(self._opened(), "utf-8", newline="") as stream:
            return next(csv.reader(stream), [])


def _csv(columns: list[str], rows: list[dict[str, Any]], *, header: bool) -> str:
    cells = ([row.get(name, "") for name in columns] for row in rows)
    return csv_text([columns, *cells] if header else cells)


class JSONLines(_Recording, _Log):
    """Writes the metrics of epochs and validations, and optionally of steps, as JSON Lines.

    A new fit overwrites the file; a resumed one continues it at the resume position. Non-finite
    numbers, which JSON does not have, are written as ``null``.

    Args:
        path: The file.
        every: The number of batches between lines for steps, at least; by default only epochs are
            written.
        append: Whether a new fit appends to the file instead of overwriting it.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if the file's folder does not exist.

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
        self.every = None if every is None else whole_number("JSONLines: every", every, 1)

    def _add(self, event: str, record: Record) -> None:
        numbers = {
            name: value if math.isfinite(value) else None for name, value in record.values.items()
        }
        place = {"epoch": record.epoch, "batch": record.batch, "step": record.step}
        line = {"event": event, **place, **numbers}
        self._write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")


class TensorBoard(_Recording):
    """Writes event files for TensorBoard: ``tensorboard --logdir <folder>``.

    Metrics of epochs are called ``epoch/<name>``, those of steps, and of validations within epochs,
    ``step/<name>``; the x axis is the
    number of finished steps. A resumed fit hides events after the resume position. Requires
    tensorboardX (``pip install ortops[tensorboard]``).

    Args:
        folder: The folder for the files; created if it does not exist. To compare runs, use
            one subfolder of a common folder for each.
        every: The number of batches between events of steps, at least.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if tensorboardX is not installed.

    Example:
        >>> board = TensorBoard("runs/first", every=10)  # session.fit(data, callbacks=[board])
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1) -> None:
        self.folder = path_of("TensorBoard", folder)
        self.every = whole_number("TensorBoard: every", every, 1)
        self._writer: Any = None

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Opens an event file."""
        module = optional_module("TensorBoard", "tensorboardX", "tensorboard")
        self._close()
        purged = None if begins_anew(record) else session.steps_done + 1
        self._writer = module.SummaryWriter(os.fspath(self.folder), purge_step=purged)

    def on_close(self) -> None:
        """Closes the file, also if the training has failed."""
        self._close()

    def _add(self, event: str, record: Record) -> None:
        for name, value in grouped(event, record).items():
            self._writer.add_scalar(name, value, record.step)
        if event == "epoch":
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
