"""The rows of data sets: in memory, in files that are read by number, or in streams."""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import os
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeGuard

import numpy as np

from ortops.data.tables import read_csv
from ortops.engine.training.arrow import ARROW, open_arrow
from ortops.errors import ArgumentError, FeedError, did_you_mean
from ortops.graph.files.archive import check_size
from ortops.graph.files.json_text import read_json
from ortops.graph.files.opening import leads_out, open_regular
from ortops.graph.limits import LIMITS

Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""The path of a file or folder, or rows."""

Columns: TypeAlias = Mapping[str, str] | None
"""The columns of rows by our names, if they have others."""

SETTINGS = ("tools", "documents", "chat_template_kwargs")
"""What a row may have beside a chat, for its template."""

NAMES = (
    *("messages", "conversations", "prompt", "completion", "instruction", "input", "output"),
    *("question", "answer", "text", "input_ids", "labels", "chosen", "rejected"),
    *("input_features", "decoder_prefix", *SETTINGS),
    *("label", "score", "text_pair", "sentence", "sentence1", "sentence2", "premise", "hypothesis"),
    *("anchor", "query", "positive", "negative"),
    *("system", "attention_mask", "completion_mask", "assistant_masks"),
)
"""The names that a row may have."""

_FILES = "JSON lines, JSON, CSV or Parquet"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", *ARROW)
_AT_ONCE = 1024
"""The rows of a table that become Python's values at once."""


class FileRows(Sequence[Any]):
    """Rows of files, which are read when they are needed.

    Args:
        count: Their number.
        read: Returns the rows from a first one up to another.
    """

    def __init__(self, count: int, read: Callable[[int, int], list[Any]]) -> None:
        self._count, self.read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return self.read(place, place + 1)[0]

    def __iter__(self) -> Iterator[Any]:
        for begin in range(0, self._count, _AT_ONCE):
            yield from self.read(begin, min(begin + _AT_ONCE, self._count))


def is_stream(rows: Rows) -> TypeGuard[Iterable[Any]]:
    """Whether rows are an iterator without a length."""
    is_path = isinstance(rows, str | os.PathLike)
    return isinstance(rows, Iterable) and not is_path and not hasattr(rows, "__len__")


def rows_of(rows: Rows) -> Iterable[Any]:
    """Returns rows, or those of a file or of a folder of files.

    Raises:
        FeedError: If they are neither, or the file is not valid.
    """
    if isinstance(rows, Mapping) or not isinstance(rows, str | os.PathLike | Iterable):
        parts = [f"data[{name!r}]" for name in rows] if isinstance(rows, Mapping) else []
        what = f"; give one of its parts: {', '.join(parts)}" if parts else ""
        raise FeedError(
            f"data must be the path of a file of {_FILES}, or rows, got {type(rows).__name__}{what}"
        )
    if not isinstance(rows, str | os.PathLike):
        return rows
    folder = Path(rows)
    if not folder.is_dir() or folder.suffix == ".parquet":  # which pyarrow reads
        return _of_file(folder)
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _SUFFIXES)
    for file in files:
        if leads_out(folder, file):
            raise FeedError(f"data '{file}' leads out of the folder; replace the link by the file")
    if not files:
        raise FeedError(f"data '{folder}' has no file of {_FILES}")
    return _joined([_of_file(file) for file in files])


@contextlib.contextmanager
def of_path(data: Rows) -> Iterator[None]:
    """Names the file in errors of its rows."""
    try:
        yield
    except FeedError as error:
        where, _, why = str(error).partition(": ")
        if where != "data" or not isinstance(data, str | os.PathLike):
            raise
        raise FeedError(f"data '{os.fspath(data)}': {why}") from error


def _joined(parts: Sequence[FileRows]) -> FileRows:
    """Returns the rows of several files as one."""
    starts = [0, *itertools.accumulate(map(len, parts))]

    def read(begin: int, end: int) -> list[Any]:
        found = []
        for part, start in zip(parts, starts, strict=False):
            first, last = max(begin - start, 0), min(end - start, len(part))
            found += part.read(first, last) if first < last else []
        return found

    return FileRows(starts[-1], read)


def prepared(row: Any, columns: Columns = None) -> Any:
    """Returns a row with the columns that it is formed of, and without those that are None.

    Args:
        row: The row.
        columns: The columns by our names, if they have others.

    Raises:
        FeedError: If there is no such column.
    """
    if not isinstance(row, Mapping):
        return row
    if columns:
        for name in columns.values():
            if name not in row:
                raise FeedError(f"data: a row has no column {name!r}; {did_you_mean(name, row)}")
        kept = {name: row.get(name) for name in SETTINGS if name not in columns}
        row = kept | {ours: row[name] for ours, name in columns.items()}
    return {name: value for name, value in row.items() if value is not None}


def check_columns(columns: Columns) -> None:
    """Rejects columns under names that a row does not have.

    Raises:
        ArgumentError: If there is one.
    """
    for name, column in (columns or {}).items():
        if name not in NAMES or not isinstance(column, str):
            raise ArgumentError(
                "columns must be the names of columns by those of a row, got "
                f"{name!r}: {column!r}; {did_you_mean(name, NAMES)}"
            )


def _of_file(file: Path) -> FileRows:
    """Returns the rows of a file."""
    suffix = file.suffix.lower()
    if suffix in (".parquet", *ARROW):
        table = open_arrow(file)
        return FileRows(len(table), table.records)
    stream = open_regular(file, what="file", remedy=f"give a file of {_FILES}")
    head = stream.read(99).removeprefix(codecs.BOM_UTF8).lstrip()
    is_list = head[:1] == b"[" and (suffix == ".json" or head[1:].lstrip()[:1] == b"{")
    if suffix == ".csv" or is_list:
        with stream:
            check_size(f"file '{file}'", os.fstat(stream.fileno()).st_size)
            stream.seek(0)
            rows = _csv_rows(stream, file) if suffix == ".csv" else _list_of(stream.read())
        if rows is not None:
            return FileRows(len(rows), lambda begin, end: rows[begin:end])
        stream = open_regular(file)
    return _JSONLines(stream, file)


def _csv_rows(stream: BinaryIO, file: Path) -> list[Any]:
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        table = read_csv(text, os.fspath(file))
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _list_of(content: bytes) -> list[Any] | None:
    """Returns a list in JSON; None for lines of JSON, such as lists of tokens."""
    try:
        found = read_json(content)
    except ValueError:
        return None
    return None if found and isinstance(found[0], int) else found


class _JSONLines(FileRows):
    """The rows of a file of JSON lines, of which only the places are in memory.

    Args:
        stream: The file, which stays open.
        file: Its path.

    Raises:
        FeedError: If a line is no JSON, when it is read.
    """

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._stream, self._file, self._lock = stream, file, threading.Lock()
        weakref.finalize(self, stream.close)
        stream.seek(0)
        places, at = array("q"), 0
        most = 16 * LIMITS.metadata_bytes
        for number, line in enumerate(iter(lambda: stream.readline(most), b""), 1):
            if len(line) == most:
                raise FeedError(
                    f"file '{file}', line {number} has more than {most:,} bytes; give a file of "
                    f"{_FILES}, or raise ortops.graph.limits.LIMITS.metadata_bytes"
                )
            if line.strip():
                places.extend((number, at))
            at += len(line)
        self._places = np.array(places).reshape(-1, 2)
        super().__init__(len(self._places), self._lines)

    def _lines(self, begin: int, end: int) -> list[Any]:
        found = []
        for number, at in self._places[begin:end].tolist():
            with self._lock:
                self._stream.seek(at)
                line = self._stream.readline()
            try:
                found.append(read_json(line))
            except ValueError as error:
                what = f"file '{self._file}', line {number}: invalid JSON: {error}"
                is_known = self._file.suffix.lower() in _SUFFIXES
                remedy = "" if is_known else f"; give a file of {_FILES}, with its usual ending"
                raise FeedError(f"{what}{remedy}") from error
        return found
