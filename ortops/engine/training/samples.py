"""Data sets of samples that a function joins to batches, and batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ortops.engine.training import foreign_arrays
from ortops.engine.training.arrow import ArrowRows
from ortops.engine.training.feeds import Feeds, Inputs
from ortops.engine.training.padding import Pad, ragged_axes
from ortops.engine.training.row_data import Division, RowData, Rows
from ortops.errors import ArgumentError, FeedError

Collate: TypeAlias = Callable[[list[Any]], Feeds] | Pad | str
"""What makes a batch of samples: a function, a `Pad`, or ``"pad"``."""

_AT_ONCE = 256  # samples that are read to measure them


class SampleRows(RowData):
    """Samples as rows.

    Args:
        samples: The samples.
        collate: Makes a batch of them.
        constants: Inputs that are the same in every batch.
        lengths: The length of each sample, if shuffled batches have samples of similar length.
    """

    def __init__(
        self,
        samples: _Items | ArrowRows,
        collate: Collate,
        constants: Mapping[str, Any],
        lengths: npt.NDArray[Any] | None = None,
    ) -> None:
        self._samples, self._collate, self._constants = samples, collate, constants
        self.lengths = lengths
        self.keeps = isinstance(collate, Pad)

    def __len__(self) -> int:
        return len(self._samples)

    def part(self, begin: int, end: int) -> SampleRows:
        """Returns the rows from a first one up to another."""
        lengths = None if self.lengths is None else self.lengths[begin:end]
        part = self._samples.part(begin, end)
        return SampleRows(part, self._collate, self._constants, lengths)

    def check(self, inputs: Inputs) -> None:
        """Raises an error if padding names an input that does not exist."""
        if isinstance(self._collate, Pad):
            self._collate.check(inputs)

    def permutation(self, order: np.random.Generator | None) -> Rows:
        """Returns the numbers of the rows in the order of an epoch."""
        return self._samples.permutation(order)

    def read(self, rows: Rows, inputs: Inputs, epoch: int) -> Feeds:
        """Returns a batch.

        Args:
            rows: The numbers of the rows.
            inputs: The inputs that the batch has to fit.
            epoch: The epoch of a training.
        """
        samples = list(self._samples.samples(rows))
        if isinstance(self._collate, Pad):
            return {**self._collate.join(samples, inputs), **self._constants}
        batch: Any = cast(Callable[[list[Any]], Feeds], self._collate)(samples)
        if batch is None:
            raise FeedError(
                "collate must return a dict or tuple with an array for each input, got None"
            )
        found: Any = {**inputs.named(batch), **self._constants} if self._constants else batch
        return found  # type: ignore[no-any-return]


class _Items:
    """Items that an object returns for numbers, as samples."""

    def __init__(self, items: Any, places: range | None = None) -> None:
        self._items = items
        self._places = range(len(items)) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    def samples(self, rows: Rows) -> Sequence[Any]:
        return [self._items[self._places[row]] for row in rows.tolist()]

    def part(self, begin: int, end: int) -> _Items:
        return _Items(self._items, self._places[begin:end])

    def permutation(self, order: np.random.Generator | None) -> Rows:
        return np.arange(len(self)) if order is None else order.permutation(len(self))


class _Columns:
    """Samples of columns, by name or in a tuple."""

    def __init__(self, columns: Mapping[str, Any], *, named: bool) -> None:
        self._columns, self._named = columns, named

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, row: int) -> Any:
        sample = {name: column[row] for name, column in self._columns.items()}
        return sample if self._named else tuple(sample.values())


def check_collate(collate: Collate | None, group_by_length: bool | Sequence[int]) -> Collate | None:
    """Returns what makes batches of samples.

    Raises:
        ArgumentError: If it is neither a function nor ``"pad"``, or samples are grouped without it.
    """
    if collate is None:
        if group_by_length is not False:
            raise ArgumentError(
                "group_by_length needs samples that are padded to the longest of their batch; give "
                "collate='pad', or a function of a list of samples"
            )
        return None
    if isinstance(collate, str) and collate == "pad":
        return Pad()
    if not isinstance(collate, Pad) and not callable(collate):
        raise ArgumentError(
            f"collate must be 'pad', an ortops.data.Pad or a function of a list of samples, got "
            f"{collate!r:.80}"
        )
    return collate


def sample_rows(
    data: Any, inputs: Inputs, collate: Collate, group_by_length: bool | Sequence[int]
) -> SampleRows:
    """Returns a data set of samples.

    Args:
        data: Samples in a list, or an object that returns one for an index; columns by name, in a
            tuple or in a table, with a sample for each input at each place.
        inputs: The inputs that a batch has to fit.
        collate: Makes a batch of samples.
        group_by_length: See `ortops.open_data`.

    Raises:
        ArgumentError: If ``group_by_length`` has another number of lengths.
        FeedError: If the data are not samples that are read by number.
    """
    samples, constants = _samples_of(data, inputs)
    lengths = None
    if group_by_length is not False:
        lengths = _lengths(samples, inputs, group_by_length)
    return SampleRows(samples, collate, constants, lengths)


def _samples_of(data: Any, inputs: Inputs) -> tuple[_Items | ArrowRows, Mapping[str, Any]]:
    """Returns samples, and the inputs that are the same in every batch."""
    if isinstance(data, ArrowRows):
        return data, {}
    if isinstance(data, RowData):
        raise ArgumentError(
            f"collate: {type(data).__name__} makes batches itself; leave collate out"
        )
    if foreign_arrays.is_stored_table(data):
        return _Items(data), {}
    if isinstance(data, Mapping) or foreign_arrays.is_table(data):
        named = isinstance(data, Mapping)
        columns = dict(data) if named else foreign_arrays.columns(data, [*inputs, *inputs.unread])
        constants = {
            name: columns.pop(name)
            for name in list(columns)
            if name in inputs and name not in inputs.sampled
        }
        return _columns({name: _rows(column) for name, column in columns.items()}), constants
    if isinstance(data, tuple):
        columns = {str(place): _rows(column) for place, column in enumerate(data)}
        return _columns(columns, named=False), {}
    if hasattr(data, "__getitem__") and isinstance(data, Sized) and len(data):
        return _Items(data), {}
    if hasattr(data, "__getitem__") and isinstance(data, Sized):
        raise FeedError("data: there are no samples; give at least one")
    raise FeedError(
        f"data: collate needs samples that are read by number, got {type(data).__name__}; give a "
        "list of samples, lists of arrays by name, or an object with __len__ and __getitem__"
    )


def _rows(column: Any) -> Any:
    """Returns a column whose rows are read by number."""
    if hasattr(column, "iloc"):  # of pandas, where [0] is a label
        return column.to_numpy()
    if hasattr(column, "combine_chunks"):  # of pyarrow, whose items are scalars
        return column.to_pylist()
    if not hasattr(column, "__getitem__") or not hasattr(column, "__len__"):
        raise FeedError(
            f"data: a column must be a list or array with a sample for each row, got "
            f"{type(column).__name__}"
        )
    return column


def _columns(columns: Mapping[str, Any], *, named: bool = True) -> _Items:
    if not columns:
        raise FeedError("data: there are no columns; give one for each input")
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"'{name}' {size}" for name, size in sizes.items())
        raise FeedError(f"data: the columns must have the same number of rows, got {shown}")
    return _Items(_Columns(columns, named=named))


def _lengths(
    samples: _Items | ArrowRows, inputs: Inputs, given: bool | Sequence[int]
) -> npt.NDArray[np.int64]:
    """Returns the length of each sample."""
    if given is not True:
        found = np.asarray(given)
        if found.shape != (len(samples),) or found.dtype.kind not in "iuf":
            raise ArgumentError(
                f"group_by_length must be True, or the lengths of {len(samples)} samples, got "
                f"{given!r:.80}"
            )
        return found
    own = [name for name in inputs if name not in inputs.of_loss and ragged_axes(name, inputs)]
    rows = np.arange(len(samples))
    parts = (part for block in Division(rows, _AT_ONCE) for part in samples.samples(block))
    try:
        return np.array([_length(sample, own, inputs) for sample in parts])
    except (FeedError, LookupError) as error:
        raise ArgumentError(
            f"group_by_length: the length of a sample is not known ({error}); give the length of "
            "each sample in place of True"
        ) from error


def _length(sample: Any, own: Sequence[str], inputs: Inputs) -> int:
    """Returns the largest size of the dynamic axes of the model's inputs in a sample."""
    named = inputs.named(sample)
    sizes: list[int] = []
    for name in own:
        if name in named:
            shape = inputs[name].array(named[name]).shape
            sizes += [shape[axis] for axis in ragged_axes(name, inputs) or () if axis < len(shape)]
    if not sizes:
        raise FeedError("no input of the model has an axis of dynamic size")
    return max(sizes)
