"""Tables in Parquet and Arrow files, and pyarrow's datasets, of which rows are read by number."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ortops._common.optional import optional_module
from ortops.engine.training.feeds import Feeds, Inputs, listed
from ortops.engine.training.row_data import RowData, Rows
from ortops.errors import ArgumentError, FeedError
from ortops.graph.files.archive import check_size
from ortops.graph.files.opening import leads_out, open_regular

ARROW = (".arrow", ".feather")
"""The suffixes of files in the format of Arrow, with which Feather's is the same."""

_MEMORY = 512 * 2**20
"""The bytes of a data set that are held in memory, and shuffled at once."""

_PARQUET_SIZES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}
"""The bytes per value of Parquet's types of fixed size."""


@dataclass(frozen=True)
class Block:
    """A part of a table that is read at once, such as a row group of Parquet.

    Attributes:
        rows: The number of its rows.
        sizes: The approximate size of each column in memory, in bytes.
        read: Returns some of its columns as an Arrow table.
    """

    rows: int
    sizes: Mapping[str, int]
    read: Callable[[Sequence[str]], Any]

    @property
    def size(self) -> int:
        """The approximate size of all columns in memory, in bytes."""
        return sum(self.sizes.values())


def is_arrow(data: object) -> bool:
    """Whether data are the path of a file, or a dataset of pyarrow."""
    if isinstance(data, str | os.PathLike):
        return True
    return hasattr(data, "get_fragments") and hasattr(data, "schema")


def open_arrow(data: Any) -> ArrowRows:
    """Opens a Parquet or Arrow file, or a dataset of pyarrow; no rows are read.

    Args:
        data: The path of a ``.parquet``, ``.arrow`` or ``.feather`` file, or the dataset.

    Raises:
        FeedError: If it cannot be read.
        OrtopsError: If pyarrow is not installed.
    """
    name = os.fspath(data) if isinstance(data, str | os.PathLike) else type(data).__name__
    where = f"data '{name}'"
    suffix = Path(name).suffix.lower() if isinstance(data, str | os.PathLike) else ""
    if suffix not in ("", ".parquet", *ARROW) or (not suffix and name == data):
        raise FeedError(
            f"data must be arrays by name or an iterable of batches, got {type(data).__name__} "
            f"{name!r:.80}; of files, only .parquet, .arrow and .feather are read; for a folder of "
            "images, give ortops.data.image_folder(…)"
        )
    with contextlib.suppress(OSError):  # of a file that cannot be read, which pyarrow meets as well
        if suffix:
            _refuse_endless(Path(name))
    arrow = optional_module(where, "pyarrow", "tables")
    datasets = optional_module(where, "pyarrow.dataset", "tables")
    with _named(where, arrow):
        if suffix in ARROW:
            blocks, names = _ipc_blocks(arrow, name)
            _check_names(where, names)
        else:
            if suffix and Path(name).is_file():  # a data set of it would not say which column
                parquet = optional_module(where, "pyarrow.parquet", "tables")
                _check_names(where, parquet.read_schema(name).names)
            dataset = datasets.dataset(name, format="parquet") if suffix else data
            blocks, names = _blocks(dataset), list(dataset.schema.names)
    return ArrowRows(_Blocks(where, [block for block in blocks if block.rows], names))


def _check_names(where: str, names: Sequence[str]) -> None:
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise FeedError(f"{where} has two columns '{name:.80}'; rename one of them")


@contextlib.contextmanager
def _named(where: str, arrow: Any) -> Iterator[None]:
    """Adds the name of a table to errors of pyarrow."""
    try:
        yield
    except FeedError:
        raise
    except FileNotFoundError as error:
        raise FeedError(f"{where}: there is no such file") from error
    except (arrow.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).strip().split("\n")[0][:200] or type(error).__name__
        is_of_system = isinstance(error, OSError) and error.errno is not None
        remedy = "" if is_of_system else "; write it again, as Parquet or Arrow"
        raise FeedError(f"{where}: {why}{remedy}") from error


def _refuse_endless(path: Path) -> None:
    """Rejects what is not a regular file, or a folder of these, which pyarrow would wait for."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file != path and leads_out(path, file):
            raise FeedError(f"data '{file}' leads out of the folder; replace the link by the file")
        if not file.is_dir():
            open_regular(file).close()


def _blocks(dataset: Any) -> list[Block]:
    """Returns the row groups of Parquet files, and the whole of other files of a dataset."""
    found = []
    for fragment in dataset.get_fragments():
        if not hasattr(fragment, "split_by_row_group"):
            found.append(_fragment_block(dataset, fragment, fragment.count_rows()))
            continue
        for part in fragment.split_by_row_group():
            for group in part.row_groups:
                metadata = part.metadata.row_group(group.id)
                found.append(_fragment_block(dataset, part, group.num_rows, metadata))
    return found


def _fragment_block(dataset: Any, fragment: Any, rows: int, metadata: Any = None) -> Block:
    schema = dataset.schema

    def read(names: Sequence[str]) -> Any:
        return fragment.to_table(schema=schema, columns=list(names), use_threads=False)

    if metadata is None:
        return Block(rows, dict.fromkeys(schema.names, 8 * rows), read)
    sizes: Counter[str] = Counter()
    for part in map(metadata.column, range(metadata.num_columns)):
        path = part.path_in_schema  # the values of a list are "column.list.element"
        owners = (name for name in schema.names if f"{path}.".startswith(f"{name}."))
        known = _PARQUET_SIZES.get(part.physical_type)
        size = part.num_values * (known or 8)  # a few bytes may encode many values
        sizes[max(owners, key=len, default=path)] += (
            size if known else max(part.total_uncompressed_size, size)
        )
    return Block(rows, sizes, read)


def _ipc_blocks(arrow: Any, path: str) -> tuple[list[Block], list[str]]:
    """Returns the record batches of a file in Arrow's file or stream format."""
    source = arrow.memory_map(path)
    try:
        file = arrow.ipc.open_file(source)
    except arrow.ArrowInvalid:
        with arrow.ipc.open_stream(source) as stream:
            table, names = stream.read_all(), list(stream.schema.names)
        return [_batch_block(arrow, batch) for batch in table.to_batches()], names
    names, count = list(file.schema.names), file.num_record_batches
    if not count:
        return [], names
    first = file.get_batch(0)
    each = {name: first.column(name).nbytes / max(1, first.num_rows) for name in names}
    # Only one column is decompressed to count the rows.
    counting = arrow.ipc.open_file(source, options=arrow.ipc.IpcReadOptions(included_fields=[0]))
    sizes = [counting.get_batch(number).num_rows for number in range(count)]

    def reader(number: int) -> Callable[[Sequence[str]], Any]:
        def read(wanted: Sequence[str]) -> Any:
            options = arrow.ipc.IpcReadOptions(
                included_fields=[names.index(name) for name in wanted]
            )
            batch = arrow.ipc.open_file(source, options=options).get_batch(number)
            return arrow.Table.from_batches([batch]).select(list(wanted))

        return read

    return [
        Block(rows, {name: int(rows * size) for name, size in each.items()}, reader(number))
        for number, rows in enumerate(sizes)
    ], names


def _batch_block(arrow: Any, batch: Any) -> Block:
    def read(names: Sequence[str]) -> Any:
        return arrow.Table.from_batches([batch]).select(list(names))

    names = batch.schema.names
    return Block(batch.num_rows, {name: batch.column(name).nbytes for name in names}, read)


class _Blocks:
    """The blocks of a table; those that were read last are kept.

    Args:
        where: What messages call it.
        blocks: The blocks.
        names: The names of the columns.
    """

    def __init__(self, where: str, blocks: Sequence[Block], names: Sequence[str]) -> None:
        self.where, self.blocks, self.names = where, blocks, list(names)
        self.ends = np.cumsum([block.rows for block in blocks], dtype=np.int64)
        self._kept: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._lock = threading.Lock()  # a thread may read ahead

    def table(self, rows: Rows, names: Sequence[str]) -> Any:
        """Returns some rows as an Arrow table."""
        arrow = optional_module(self.where, "pyarrow", "tables")
        places = np.searchsorted(self.ends, rows, side="right")
        order = np.argsort(places, kind="stable")
        parts = []
        with self._lock:
            for place, inner in itertools.groupby(order.tolist(), lambda row: int(places[row])):
                begin = int(self.ends[place]) - self.blocks[place].rows
                parts.append(self._block(place, tuple(names)).take(rows[list(inner)] - begin))
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return arrow.concat_tables(parts).take(back)

    def column(self, name: str) -> Any:
        """Returns a whole column."""
        arrow = optional_module(self.where, "pyarrow", "tables")
        check_size(f"{self.where}: column '{name}'", sum(b.sizes[name] for b in self.blocks))
        parts = (self._read(place, [name])[name] for place in range(len(self.blocks)))
        chunks = [chunk for part in parts for chunk in part.chunks]
        return arrow.chunked_array(chunks, None if chunks else arrow.float64())

    def _block(self, place: int, names: tuple[str, ...]) -> Any:
        """Returns a block, from memory or from the file."""
        key = (place, names)
        table = self._kept.pop(key, None)
        if table is None:
            table = self._read(place, names)
            size = self.blocks[place].size
            while self._kept and size + self._held() > _MEMORY:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = table  # the last one that was used
        return table

    def _held(self) -> int:
        return sum(self.blocks[place].size for place, _ in self._kept)

    def _read(self, place: int, names: Sequence[str]) -> Any:
        arrow = optional_module(self.where, "pyarrow", "tables")
        with _named(self.where, arrow):
            table = self.blocks[place].read(names)
            columns = [_plain(arrow, table[name]) for name in names]
            return arrow.table(columns, names=list(names)).combine_chunks()


def _plain(arrow: Any, column: Any) -> Any:
    """Returns a column without a dictionary of categories."""
    kind = column.type
    return column.cast(kind.value_type) if arrow.types.is_dictionary(kind) else column


class ArrowRows(RowData):
    """The rows of a table in files.

    Up to 0.5 GB are held in memory. A larger table is shuffled in parts: its blocks in random
    order, and the rows within as many blocks at a time as fit into that memory.

    Args:
        blocks: The blocks.
        span: The rows; by default all.

    Attributes:
        names: The names of the columns.
    """

    def __init__(self, blocks: _Blocks, span: range | None = None) -> None:
        self._blocks = blocks
        self._span = (
            range(int(blocks.ends[-1]) if len(blocks.ends) else 0) if span is None else span
        )
        self.names = blocks.names

    def __len__(self) -> int:
        return len(self._span)

    @property
    def size(self) -> int:
        """The approximate size of the whole table in memory, in bytes."""
        return sum(block.size for block in self._blocks.blocks)

    def part(self, begin: int, end: int) -> ArrowRows:
        """Returns the rows from a first one up to another."""
        return ArrowRows(self._blocks, self._span[begin:end])

    def check(self, inputs: Inputs) -> None:
        """Raises an error if a column is missing."""
        missing = [name for name in inputs.needed if name not in self.names]
        if missing:
            raise FeedError(
                f"{self._blocks.where} has no column '{missing[0]}'; the inputs are "
                f"{listed(inputs)}, and the columns {listed(self.names[:20])}"
            )

    def permutation(self, order: np.random.Generator | None) -> Rows:
        """Returns the numbers of the rows in the order of an epoch."""
        windows = list(self._windows(order))
        if order is None or len(windows) < 2:
            return super().permutation(order)
        return np.concatenate([order.permutation(rows) for rows in windows])

    def _windows(self, order: np.random.Generator | None) -> Iterator[Rows]:
        """Yields the numbers of rows that are shuffled together."""
        blocks = self._blocks
        if order is None or self.size <= _MEMORY:
            return
        size, rows = 0, [np.empty(0, np.int64)]
        for place in order.permutation(len(blocks.ends)):
            end, block = int(blocks.ends[place]), blocks.blocks[place]
            if size and size + block.size > _MEMORY:
                yield np.concatenate(rows)
                size, rows = 0, []
            begin, end = max(end - block.rows, self._span.start), min(end, self._span.stop)
            rows.append(np.arange(begin, max(begin, end)) - self._span.start)
            size += block.size
        yield np.concatenate(rows)

    def read(self, rows: Rows, inputs: Inputs, epoch: int) -> Feeds:
        """Returns a batch; see `RowData`."""
        names = [name for name in inputs if name in self.names]
        table = self._blocks.table(rows + self._span.start, names)
        found: Any = inputs.as_columns({name: table[name] for name in names})
        return found  # type: ignore[no-any-return]

    def samples(self, rows: Rows, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Returns rows as samples: values and arrays by the names of the columns.

        Args:
            rows: Their numbers.
            names: The columns; None for all.
        """
        wanted = [name for name in self.names if names is None or name in names]
        table = self._blocks.table(rows + self._span.start, wanted)
        columns = {name: [_value(one) for one in table[name]] for name in wanted}
        return [{name: columns[name][row] for name in wanted} for row in range(len(rows))]

    def records(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Returns rows as dicts of plain values.

        Args:
            begin: The number of the first one.
            end: The number after the last one.
        """
        rows = np.arange(self._span.start, self._span.stop)[begin:end]
        found: list[dict[str, Any]] = self._blocks.table(rows, self.names).to_pylist()
        return found

    def column(self, name: str) -> Any:
        """Returns a whole column as an Arrow table's.

        Raises:
            ArgumentError: If there is none of this name.
        """
        if name not in self.names:
            raise ArgumentError(
                f"{self._blocks.where} has no column '{name}'; the columns are "
                f"{listed(self.names[:20])}"
            )
        return self._blocks.column(name)[self._span.start : self._span.stop]


def _value(scalar: Any) -> Any:
    """Returns an Arrow scalar as an array, if it is a list of numbers, or as Python's value."""
    values = getattr(scalar, "values", None)
    if values is None or not hasattr(values, "to_numpy") or hasattr(values.type, "value_type"):
        return scalar.as_py()
    if values.null_count:
        raise FeedError(f"data: a list has {values.null_count} missing values (null)")
    return values.to_numpy(zero_copy_only=False)
