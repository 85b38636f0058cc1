"""Tables and arrays of other libraries, recognized by their methods, without an import.

Also the cells of CSV files that ortops writes.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.graph.row_axes import along

Array: TypeAlias = npt.NDArray[Any]
RowIndex: TypeAlias = slice | npt.NDArray[np.integer[Any]]


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""The first characters of text that a spreadsheet evaluates as a formula."""


def as_cell(value: Any) -> Any:
    """Returns a value as a cell of a CSV file.

    A spreadsheet evaluates text such as ``=HYPERLINK(…)``, which may be in the name of a file, a
    class or an output. An apostrophe in front of it makes it plain text.

    Args:
        value: The value. Numbers, also as text, do not change.

    Example:
        >>> as_cell("=1+1"), as_cell("-1.5"), as_cell(-1.5), as_cell("cat")
        ("'=1+1", '-1.5', -1.5, 'cat')
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Returns rows as comma-separated values, with a newline at the end of each line.

    Args:
        rows: The rows; text is passed through `as_cell`.
    """
    stream = io.StringIO()
    plain = csv.writer(stream, lineterminator="\n")
    quoted = csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:
        cells = [as_cell(value) for value in row]
        # Before Python 3.13, the module does not see that this, too, ends a line for readers.
        returns = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (quoted if returns else plain).writerow(cells)
    return stream.getvalue()


def is_table(data: object) -> bool:
    """Whether data have named columns.

    This holds for data frames of pandas and polars, Arrow tables, datasets of Hugging Face and
    structured arrays.
    """
    if isinstance(data, Mapping | type):
        return False
    if isinstance(data, np.ndarray):
        return data.dtype.names is not None
    has = functools.partial(hasattr, data)
    framed = has("columns") and has("dtypes")
    stored = has("column_names") and (has("schema") or has("format"))
    return (framed or stored) and has("__getitem__")


def is_stored_table(data: object) -> bool:
    """Whether a table is a dataset of Hugging Face, whose rows are read on access."""
    return is_table(data) and hasattr(data, "with_format") and hasattr(data, "select_columns")


def columns(table: Any, wanted: Sequence[str]) -> dict[str, object]:
    """Returns the wanted columns that a table has; other columns are not read."""
    there = _names(table)
    return {name: table[name] for name in wanted if name in there}


def _names(table: Any) -> list[str]:
    if isinstance(table, np.ndarray):
        return list(table.dtype.names or ())
    return list(table.column_names if hasattr(table, "column_names") else table.columns)


def is_array(data: object) -> bool:
    """Whether data are one array, of any library, or numbers in lists."""
    if isinstance(data, list | tuple):
        return len(data) > 0 and (_is_number(data[0]) or _holds_numbers(data[0]))
    if isinstance(data, Mapping | type):
        return False
    return any(
        hasattr(data, name) for name in ("__array__", "__dlpack__", "__array_interface__")
    ) or (hasattr(data, "shape") and hasattr(data, "dtype"))


def _is_number(data: object) -> bool:
    return isinstance(data, bool | int | float | np.generic)


def _holds_numbers(data: object) -> bool:
    return isinstance(data, list | tuple) and is_array(data)


def is_lazy(data: object) -> bool:
    """Whether an array should be read batch by batch, and not converted to numpy as a whole.

    This holds for arrays in files, of HDF5 and Zarr, and for sparse arrays.
    """
    if isinstance(data, np.ndarray | np.generic) or not getattr(data, "shape", ()):
        return False
    in_memory = ("__dlpack__", "to_numpy", "detach", "numpy", "iloc")
    has = ("dtype", "__getitem__")
    return all(hasattr(data, name) for name in has) and not any(
        hasattr(data, name) for name in in_memory
    )


def take(array: Any, rows: RowIndex, axis: int = 0) -> Any:
    """Returns rows of an array: a view of a numpy array, if they are a slice, else a copy.

    Args:
        array: A numpy array, or a lazy one (see `is_lazy`).
        rows: The indices of the rows, each at most once.
        axis: The axis of the rows.
    """
    index: Any = along(axis, rows) if axis else rows
    if isinstance(array, np.ndarray):
        return array[index]
    if isinstance(rows, slice):
        return _in_memory(array[index]).copy()  # the next read may reuse the memory
    ascending = np.argsort(rows)  # HDF5 requires ascending indices
    index = along(axis, rows[ascending]) if axis else rows[ascending]
    taken = _in_memory(getattr(array, "oindex", array)[index])
    back = np.empty_like(ascending)
    back[ascending] = np.arange(len(rows))
    return taken[along(axis, back)]


def _in_memory(rows: Any) -> Array:
    return np.asarray(rows.toarray() if hasattr(rows, "toarray") else rows)


def dense(column: Any) -> Array:
    """Returns a column as an array, or a table as a 2-d array.

    If the rows of a column are lists or arrays, they become axes.

    Raises:
        ValueError: If values are missing, or rows differ in shape.
    """
    if is_table(column):
        return np.stack([dense(column[name]) for name in _names(column)], axis=1)
    missing = _missing(column)
    if missing:
        raise ValueError(f"{missing} of its values are missing (null)")
    return _stacked(np.asarray(column))


def is_numeric(column: Any) -> bool:
    """Whether an Arrow column has numbers, or lists of numbers."""
    kind = column.type
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    kind = getattr(kind, "storage_type", kind)
    return not any(word in str(kind) for word in ("struct", "string", "binary", "dictionary"))


def _missing(column: Any) -> int:
    """Returns the number of null values, which numpy would convert to NaN."""
    dtype = getattr(column, "dtype", None)
    if hasattr(column, "isna") and not isinstance(dtype, np.dtype):  # of pandas, with a mask
        return int(column.isna().sum())
    count = getattr(column, "null_count", 0)
    found = int(count() if callable(count) else count)
    if found:
        return found
    if hasattr(getattr(column, "type", None), "value_type"):  # lists of arrow
        chunks = getattr(column, "chunks", [column])
        return sum(_missing(chunk.flatten()) for chunk in chunks if hasattr(chunk, "flatten"))
    return _missing(column.explode()) if hasattr(dtype, "inner") else 0  # of polars


def _stacked(array: Array) -> Array:
    if array.dtype != object or not array.size:
        return array
    if not all(isinstance(row, np.ndarray | list | tuple) for row in array.flat):
        return array
    rows = np.stack([_stacked(np.asarray(row)) for row in array.flat])
    return rows.reshape(array.shape + rows.shape[1:])
