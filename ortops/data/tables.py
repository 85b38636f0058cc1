"""Tables with named columns, of which inputs are formed: in CSV, Parquet and Arrow files."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortops._common.numbers import cast_numbers
from ortops.data.wanted import Array, DataFile, Wanted, row_axes_of
from ortops.engine.training import foreign_arrays
from ortops.errors import FeedError, OrtopsError, did_you_mean
from ortops.graph.row_axes import rows_to

_SHOWN = 20  # the most names in a message

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0")
"""The names that pandas gives to an index written as a column."""


def read_csv(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
    """Returns the columns of comma-separated values, by name.

    Args:
        stream: The file.
        path: What messages call it.

    Raises:
        FeedError: If it is no such file, or a line has too many or too few columns.
    """
    try:
        return _csv_table(stream, path)
    except UnicodeDecodeError as error:
        raise FeedError(f"data '{path}': {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise FeedError(f"data '{path}': {error}; give comma-separated values") from error


def _csv_table(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
    rows = csv.reader(stream, strict=True)  # otherwise an unclosed quote swallows the rest
    header = next(rows, None)
    if not header:
        raise FeedError(f"data '{path}' is empty; its first line must name the columns")
    _check_names(header, path)
    others = [mark for mark in ";\t|" if mark in header[0]] if len(header) == 1 else []
    if others:
        raise FeedError(
            f"data '{path}': its first line names a single column, {header[0]!r:.80}; if "
            f"{others[0]!r} separates columns, save it with commas"
        )
    table: list[list[str]] = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise FeedError(
                f"data '{path}': line {rows.line_num} has {len(row)} columns, but the first line "
                f"names {len(header)}"
            )
        if any("\0" in cell for cell in row):
            raise FeedError(
                f"data '{path}': line {rows.line_num} has a NUL character, so the file is probably "
                "not UTF-8; save it as UTF-8"
            )
        table.append(row)
    return {name: [row[i] for row in table] for i, name in enumerate(header)}


def _check_names(names: Sequence[str], path: str) -> None:
    """Rejects duplicate column names."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FeedError(f"data '{path}' has two columns '{name!s:.80}'; rename one of them")
        if "\0" in name:
            raise FeedError(
                f"data '{path}': a column name has a NUL character, so the file is probably not "
                "UTF-8; save it as UTF-8"
            )
        seen.add(name)


@dataclass
class Table:
    """Forms arrays from columns with names.

    An input gets the columns chosen for it, else the column of its name, else its usual columns if
    there are any of these. A single remaining input gets all remaining columns.

    Attributes:
        names: The names of the columns.
        column: Returns a column, a list or one of pyarrow.
        path: What messages call the file.
        given: The columns of inputs that are formed from those of other names.
        classes: The class names stored in the model, by input.
        ignored: Columns that do not become part of an input unless they are named.
        usual: The columns of inputs with which the model was trained.
    """

    names: Sequence[str]
    column: Callable[[str], Any]
    path: str
    given: Mapping[str, Sequence[str]]
    classes: Mapping[str, Sequence[str]]
    ignored: Collection[str]
    usual: Mapping[str, Sequence[str]]

    def data(self, inputs: Sequence[Wanted]) -> DataFile:
        """Returns the arrays of inputs."""
        found, chosen = DataFile({}), dict(self.given)
        axes = row_axes_of(inputs)
        for wanted in inputs:
            if wanted.name not in chosen and wanted.name in self.names:
                chosen[wanted.name] = [wanted.name]
            elif wanted.name not in chosen and self._has_usual(wanted.name):
                chosen[wanted.name] = self.usual[wanted.name]
        taken = {name for names in chosen.values() for name in names}
        rest = [name for name in self.names if name not in taken and name not in self.ignored]
        indices = [name for name in rest if not name or _INDEX.fullmatch(name)]
        rest = [name for name in rest if name not in indices]
        open_inputs = [wanted for wanted in inputs if wanted.name not in chosen]
        if len(open_inputs) == 1 and rest and not open_inputs[0].is_target:
            name = open_inputs[0].name
            self._check_count(open_inputs[0], rest)
            chosen[name] = rest
            found.said.append(f"input '{name}' is formed from the columns {_listed(rest)}")
            if indices:
                found.said.append("an unnamed column is ignored, as it looks like a row index")
        absent = [wanted for wanted in inputs if wanted.name not in chosen]
        if absent:
            name = next((each for each in absent if each.is_target), absent[0]).name
            raise FeedError(
                f"data '{self.path}' has no column for input '{name}'; give --columns "
                f"{name}=COLUMN,… (the columns are {_listed(self.names)})"
            )
        for wanted in inputs:
            for name in chosen[wanted.name]:
                if name not in self.names:
                    raise OrtopsError(
                        f"data '{self.path}': there is no column '{name}'; "
                        f"{did_you_mean(name, self.names)}"
                    )
            if [*chosen[wanted.name]] != [wanted.name]:
                found.columns[wanted.name] = [*chosen[wanted.name]]
            rows = self._array(chosen[wanted.name], wanted, found)
            found.arrays[wanted.name] = rows_to(rows, axes.get(wanted.name, 0))
        return found

    def _check_count(self, wanted: Wanted, names: Sequence[str]) -> None:
        """Raises an error if an input does not have as many numbers as there are columns."""
        sizes = () if wanted.dims is None or wanted.axis != 0 else wanted.dims[1:]
        if len(names) > 1 and sizes and None not in sizes:
            size = math.prod(size or 0 for size in sizes)
            if size != len(names):
                raise FeedError(
                    f"data '{self.path}': input '{wanted.name}' takes {size} columns, but "
                    f"{len(names)} remain for it, {_listed(names)}; give --columns "
                    f"{wanted.name}=COLUMN,…"
                )

    def _has_usual(self, name: str) -> bool:
        """Whether the table has the columns with which an input was formed in training.

        Raises:
            FeedError: If it has only some of them.
        """
        usual = self.usual.get(name, ())
        absent = [each for each in usual if each not in self.names]
        if absent and len(absent) < len(usual):
            raise FeedError(
                f"data '{self.path}' has no column '{absent[0]}', of which input '{name}' was "
                f"formed in training, with {_listed(usual)}; give --columns {name}=COLUMN,… (the "
                f"columns are {_listed(self.names)})"
            )
        return bool(usual) and not absent

    def _array(self, names: Sequence[str], wanted: Wanted, found: DataFile) -> Array:
        """Returns the array of an input that is formed from columns."""
        read = self._texts if wanted.dtype.kind == "O" else self._numbers
        arrays = [read(name, wanted, found) for name in names]
        if len(arrays) > 1 and any(array.ndim > 1 for array in arrays):
            raise FeedError(
                f"data '{self.path}': columns with several numbers per row cannot be combined to "
                f"input '{wanted.name}' ('{names[0]}' and others); give it a single such column"
            )
        rank = None if wanted.dims is None else len(wanted.dims)
        if len(arrays) == 1 and (arrays[0].ndim > 1 or rank != 2):
            joined = arrays[0]
        else:
            joined = np.stack(arrays, axis=1)
        rest = () if wanted.dims is None else wanted.dims[1:]
        sizes = [dim for dim in rest if dim is not None]
        flat = joined.ndim == 2 and rank not in (None, 2) and len(sizes) == len(rest)
        if flat and joined.shape[1] == math.prod(sizes):
            joined = joined.reshape(-1, *sizes)
        return joined

    def _texts(self, name: str, wanted: Wanted, found: DataFile) -> Array:
        """Returns a column as strings."""
        values = self.column(name)
        texts = np.empty(len(values), object)
        texts[:] = values if isinstance(values, list) else values.to_pylist()
        wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise FeedError(
                f"data '{self.path}': row {wrong + 1} of column '{name}' must be a string for "
                f"input '{wanted.name}', got {texts[wrong]!r:.80}"
            )
        return texts

    def _numbers(self, name: str, wanted: Wanted, found: DataFile) -> Array:
        """Returns a column as numbers; class names of labels become their numbers."""
        values, where = self.column(name), f"data '{self.path}': column '{name}'"
        if not isinstance(values, list):  # a column of pyarrow
            try:
                array = foreign_arrays.dense(values)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise FeedError(f"{where}: {error}; fill or drop them") from error
            if array.dtype.kind in "mMV":  # times would become integers of some unit
                raise FeedError(f"{where} must be numeric, got type {array.dtype}")
            if array.dtype.kind in "biuf":
                return _whole(array) if wanted.dtype.kind in "iub" else array
            values = array.tolist()
        whole = wanted.dtype.kind in "iub"
        numbers = [_number(value, whole=whole) for value in values]
        if None not in numbers:
            return in_type(numbers, wanted, where) if whole else np.array(numbers, np.float64)
        names = self.classes.get(wanted.name)
        row, value = next((i, v) for i, v in enumerate(values) if numbers[i] is None)
        are_names = whole and all(isinstance(one, str) and one for one in values)
        if not are_names or (names is None and _number(value, whole=False) is not None):
            raise FeedError(
                f"data '{self.path}': row {row + 1} of column '{name}' must be "
                f"{'an integer or a class name' if whole else 'a number'} for input "
                f"'{wanted.name}', got {value!r:.80}"
            )
        if names is None:
            names = sorted(set(values))
            found.said.append(f"the names in column '{name}' are classes: {numbered(names)}")
        found.classes[wanted.name] = list(names)
        return _places(values, names, wanted, where)


def _whole(array: Array) -> Array:
    """Returns floats as integers if all are whole numbers.

    pandas stores integers as floats where values are missing.
    """
    if array.dtype.kind != "f" or not (np.abs(array) < 2**53).all():
        return array
    integers = array.astype(np.int64)
    return integers if (integers == array).all() else array


def _number(value: Any, *, whole: bool) -> int | float | None:
    """Returns a cell as a number; None if it is not one, or not an integer where one is needed."""
    is_text = isinstance(value, str)
    if is_text and "_" in value:  # Python reads 1_2 as 12
        return None
    try:
        if whole and is_text:
            return int(value)
    except ValueError:  # it may be 3.0
        pass
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if whole:
        integer = int(value if not is_text else number) if number.is_integer() else None
        return integer if is_text or integer == value else None
    if is_text and math.isinf(number) and "inf" not in value.lower():  # 1e999
        return None
    return number


def in_type(numbers: Sequence[Any], wanted: Wanted, where: str) -> Array:
    """Returns integers converted to the type of an input."""
    for kind in (np.int64, np.uint64):
        try:
            result, lost = cast_numbers(np.array(numbers, kind), wanted.dtype)
        except OverflowError:
            continue
        if lost is None:
            return result
        break
    raise FeedError(
        f"{where} has a number out of range for {wanted.dtype}, the type of input '{wanted.name}'"
    )


def numbered(names: Sequence[str]) -> str:
    """Returns class names with their numbers, for a message."""
    return _listed([f"{number} {name}" for number, name in enumerate(names)])


def _listed(names: Sequence[str]) -> str:
    """Returns names for a message; only the first ones if there are many."""
    shown = ", ".join(f"{name!s:.80}" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _places(values: Sequence[str], names: Sequence[str], wanted: Wanted, where: str) -> Array:
    """Returns the numbers of class names."""
    number_of = {name: number for number, name in enumerate(names)}
    for value in values:
        if value not in number_of:
            raise FeedError(
                f"{where} has the class '{value}', which is unknown to the model; "
                + did_you_mean(value, names)
            )
    return in_type([number_of[value] for value in values], wanted, where)
