"""Data sets in any form, as checked batches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import whole_number
from ortops.engine.training import foreign_arrays
from ortops.engine.training.arrow import is_arrow, open_arrow
from ortops.engine.training.feeds import Checked, Feeds, Inputs
from ortops.engine.training.foreign_arrays import RowIndex
from ortops.engine.training.prefetch import Prefetcher
from ortops.engine.training.row_data import Division, RowData
from ortops.engine.training.samples import Collate, check_collate, sample_rows
from ortops.errors import FREE_BATCH, FeedError

Data: TypeAlias = Any
"""A data set in one of the forms that `open_data` takes."""

_Read: TypeAlias = "Callable[[int, np.random.Generator | None, int], Iterator[Checked]]"


@dataclass(frozen=True)
class Source:
    """A data set that can be iterated over, epoch by epoch.

    Attributes:
        rows: The number of samples; None if batches are given.
        batches: The number of batches in an epoch; None if unknown.
        part: Returns the rows, or the given batches, from a first one up to another; None if they
            cannot be read by number.
        prefetch: The number of batches that a thread reads ahead; 0 for none.
    """

    rows: int | None
    batches: int | None
    _read: _Read
    part: Callable[[int, int], Source] | None = None
    prefetch: int = 0
    _keeps: bool = False
    """Whether a batch stays valid while later ones are read into other memory."""

    def epoch(
        self, number: int = 0, *, order: np.random.Generator | None = None, start: int = 0
    ) -> Iterator[Checked]:
        """Returns the batches of an epoch, checked.

        A caller that may stop early has to close the iterator, for example with
        `contextlib.closing`, to end the thread that reads ahead.

        Args:
            number: The epoch of a training, from 1; 0 outside of training, where data are not
                augmented. A data function that has a parameter for it is called with at least 1.
            order: Shuffles the rows. The order of given batches does not change.
            start: The number of batches to skip at the beginning; the others do not change.

        Raises:
            FeedError: If a batch does not fit the inputs, there is none, or there are fewer than
                ``start``.
        """
        batches = self._read(number, order, start)
        if not self.prefetch:
            return batches
        if not self._keeps:
            batches = (_copied(batch) for batch in batches)
        return Prefetcher(batches, self.prefetch)

    def whole_batches(self, batch_size: int) -> Source:
        """Returns the data set without the last batch of each epoch if it has fewer rows.

        Raises:
            FeedError: If there are no rows, but batches, or fewer rows than a batch has.
        """
        count = (self.rows or 0) // batch_size
        if not count:
            raise FeedError(f"drop_last needs {batch_size} rows, got {self.rows or 'batches'}")
        return replace(self.first(count), rows=self.rows)

    def first(self, count: int) -> Source:
        """Returns the data set with only the first batches of each epoch."""

        def read(number: int, order: np.random.Generator | None, start: int) -> Iterator[Checked]:
            return itertools.islice(self._read(number, order, start), max(0, count - start))

        batches = None if self.batches is None else min(self.batches, count)
        return replace(self, rows=None, batches=batches, _read=read, part=None)


def open_data(
    data: Data,
    inputs: Inputs,
    *,
    batch_size: int = 32,
    epochs: int = 1,
    prefetch: int = 0,
    more: Mapping[str, npt.NDArray[Any]] | None = None,
    collate: Collate | None = None,
    group_by_length: bool | Sequence[int] = False,
) -> Source:
    """Opens a data set in any form as batches.

    Each read may reuse the memory of the previous one: what is needed longer is copied first.

    Args:
        data: A source, which is returned unchanged, or one of

            - a data set of `ortops.data`;
            - the path of a Parquet, Arrow or Feather file, or a dataset of pyarrow, of which the
                columns with names of inputs are read in blocks;
            - arrays by name, which are sliced along the axis of the rows, axis 0 unless another is
                known to be the batch (see `ortops.graph.row_axes`): all have the same number of
                rows, except for inputs without such an axis, which are the same in every batch.
                Sparse arrays, and arrays that are not in memory (h5py, zarr, memory maps), are read
                batch by batch;
            - arrays in a tuple: the inputs of the model in order, then those of the loss; or one
                array, if there is one input;
            - a table of pandas, polars or pyarrow, of which the columns with names of inputs are
                used, or a dataset of Hugging Face, which is read batch by batch;
            - samples: an object with ``__len__`` and ``__getitem__`` and without ``__iter__``, like
                PyTorch's datasets, that returns a dict or tuple for an index. If what it returns
                has an additional axis, these are batches;
            - batches: a list, or an object that can be iterated over once per epoch, like a
                DataLoader, of dicts, tuples, lists or tables;
            - a function that returns any of these for an epoch. If it has a parameter, it is called
                with the number of the epoch, from 1.
        inputs: The inputs that a batch has to fit.
        batch_size: The number of rows per batch, if rows are given; the last batch has the rest.
        epochs: The number of passes over the data; an iterator allows one.
        prefetch: The number of batches that a thread reads ahead.
        more: Further arrays by name, with as many rows as the data.
        collate: Makes a batch of samples, if rows are given: a function of a list of samples, an
            `ortops.data.Pad`, or ``"pad"`` for its defaults. A list is then one of samples.
        group_by_length: Whether shuffled batches have samples of similar length; or the length of
            each sample.

    Raises:
        ArgumentError: If ``batch_size``, ``prefetch``, ``collate`` or ``group_by_length`` is wrong.
        FeedError: If it has another form or is empty, its arrays differ in length or leave a
            partial batch although the model's batch size is static, or it is an iterator and there
            are several epochs.
    """
    if isinstance(data, Source):
        return data
    batch_size = whole_number("batch_size", batch_size, 1)
    prefetch = whole_number("prefetch", prefetch, 0)
    collate = check_collate(collate, group_by_length)
    if is_arrow(data):
        data = open_arrow(data)
    is_function = callable(data) and not isinstance(data, Iterable)
    if collate is not None and not is_function:
        data = sample_rows(data, inputs, collate, group_by_length)
    made = _in_rows(data, inputs)
    if made is not None:
        found = _of_rows(made, inputs, batch_size, more)
    elif more:
        raise _no_rows(more)
    elif is_function and not _is_read_by_number(data):
        found = _function(data, inputs, batch_size, collate, group_by_length)
    else:
        found = _of_batches(data, inputs, batch_size, epochs)
    return replace(found, prefetch=prefetch)


def _in_rows(data: Data, inputs: Inputs) -> RowData | None:
    """Returns a data set as rows; None if it consists of batches."""
    if isinstance(data, RowData):
        return data
    if isinstance(data, Mapping) or foreign_arrays.is_table(data) or _is_arrays(data):
        if foreign_arrays.is_stored_table(data):
            return _stored_table(data, inputs)
        return _arrays(inputs.named(data), inputs)
    return _samples(data, inputs) if _is_read_by_number(data) else None


def _of_batches(data: Data, inputs: Inputs, batch_size: int, epochs: int) -> Source:
    """Returns a data set that consists of batches."""
    if isinstance(data, list | tuple) or _is_read_by_number(data):
        return _batch_list(data, inputs)
    if hasattr(data, "iter") and hasattr(data, "with_format"):  # a stream of Hugging Face
        return _function(_stream(data, inputs, batch_size), inputs, batch_size)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | type):
        return _iterable(data, inputs, epochs)
    raise FeedError(
        f"data must be arrays by name or an iterable of batches, got {type(data).__name__}"
    )


def _is_read_by_number(data: object) -> bool:
    """Whether a data set is an object that returns samples or batches by number."""
    is_sized = hasattr(data, "__getitem__") and isinstance(data, Sized)
    return is_sized and not hasattr(type(data), "__iter__")


def rows(feeds: Mapping[str, npt.NDArray[Any]]) -> int:
    """Returns the number of samples in a batch: the size of the first axis of rows that there is.

    Args:
        feeds: Arrays by name. In a checked batch, inputs that are the same in every batch do not
            count.

    Raises:
        FeedError: If there are none.
    """
    if isinstance(feeds, Checked):
        sizes = {name: feeds[name].shape[feeds.by.axis_of(name)] for name in feeds.sampled}
    else:
        sizes = {name: array.shape[0] for name, array in feeds.items() if array.ndim}
    if sizes and not any(sizes.values()):
        name = next(iter(sizes))
        shape = list(feeds[name].shape)
        raise FeedError(f"feeds: '{name}' must have at least one row, got shape {shape}")
    return next((size for size in sizes.values() if size), 1)


def _copied(batch: Checked) -> Checked:
    """Returns a batch in its own memory; that of the given one may be reused."""
    return Checked({name: array.copy() for name, array in batch.items()}, batch.by)


def _is_arrays(data: object) -> bool:
    """Whether data are an array, or a tuple of arrays, and not batches."""
    if isinstance(data, tuple):
        return any(foreign_arrays.is_array(part) for part in data)
    return not isinstance(data, list) and foreign_arrays.is_array(data)


# -------------------------------------------------------------------------------------- of rows


def _check_rows(size: int, names: Iterable[str], inputs: Inputs, batch_size: int) -> None:
    """Raises an error if there are no rows, or if they do not fill batches of a static size."""
    if inputs.rows.doubt:
        inputs.say(inputs.rows.doubt)
    for name in names:
        fixed = inputs.fixed_rows(name)
        if inputs.rows.fixed == 1 and name not in inputs.sampled:
            continue
        if fixed is not None and size and (min(batch_size, size) != fixed or size % fixed):
            if inputs.sampled and name not in inputs.sampled:
                raise FeedError(
                    f"data: '{name}' has {size} rows, but the model takes {inputs[name].shown} "
                    f"with every batch; give one array of this shape, batch_size={fixed}, or a "
                    "model in which its batch dimension has the symbol that the other inputs have "
                    f"({FREE_BATCH})"
                )
            raise FeedError(
                f"data: '{name}' has {size} rows in batches of {batch_size}, but the model's batch "
                f"size is fixed at {fixed}; give batch_size={fixed} and a multiple of {fixed} "
                f"rows, or a model whose batch dimension is a symbol ({FREE_BATCH})"
            )
    if not size:
        raise FeedError("data: there are no batches; give at least one row")


def _of_rows(
    data: RowData,
    inputs: Inputs,
    batch_size: int,
    more: Mapping[str, npt.NDArray[Any]] | None,
) -> Source:
    """Returns a data set of rows.

    Args:
        data: The rows.
        inputs: See `open_data`.
        batch_size: See `open_data`.
        more: See `open_data`.
    """
    size, added = len(data), more or {}
    _check_rows(size, data.filled(inputs), inputs, batch_size)
    data.check(inputs)
    for name, array in added.items():
        if len(array) != size:
            raise FeedError(
                f"data: '{name}' must have {size} rows, as the data have, got {len(array)}"
            )

    def epoch(number: int, order: np.random.Generator | None, start: int) -> Iterator[Checked]:
        batches: Sequence[Any] = data.arrange(order, batch_size)
        _check_start(start, len(batches))
        for place in range(start, len(batches)):
            rows = batches[place]
            if isinstance(rows, range):  # of a slice, arrays return views
                rows = slice(rows.start, rows.stop)
            batch: Any = data.read(rows, inputs, number)
            if added:
                batch = dict(inputs.named(batch))
                for name, array in added.items():
                    if name in batch and isinstance(data, _ReadRows):
                        raise weights_twice(name)
                    own = array[rows if isinstance(rows, slice) else rows % size]
                    batch[name] = inputs.along_rows(name, own) if inputs.axis_of(name) else own
            yield inputs.check(batch)

    def part(begin: int, end: int) -> Source:
        rest = {name: array[begin:end] for name, array in added.items()}
        return _of_rows(data.part(begin, end), inputs, batch_size, rest)

    return Source(size, len(Division(range(size), batch_size)), epoch, part, _keeps=data.keeps)


class _ReadRows(RowData):
    """Rows that a function reads.

    Args:
        read: Reads the rows with some indices.
        size: The number of rows.
        names: The inputs of which a batch has rows; None for all.
        keeps: Whether what ``read`` returned stays valid when it is called again.
    """

    def __init__(
        self,
        read: Callable[[RowIndex], Feeds],
        size: int,
        names: Iterable[str] | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        self._read, self._size, self._names, self.keeps = read, size, names, keeps

    def __len__(self) -> int:
        return self._size

    def filled(self, inputs: Inputs) -> Iterable[str]:
        return inputs if self._names is None else self._names

    def check(self, inputs: Inputs) -> None:
        pass  # each batch is

    def permutation(self, order: np.random.Generator | None) -> Any:
        return range(self._size) if order is None else super().permutation(order)

    def read(self, rows: RowIndex, inputs: Inputs, epoch: int) -> Feeds:
        return self._read(rows)

    def part(self, begin: int, end: int) -> _ReadRows:
        def shifted(rows: RowIndex) -> Feeds:
            if isinstance(rows, slice):
                return self._read(slice(rows.start + begin, rows.stop + begin))
            return self._read(rows + begin)

        return _ReadRows(shifted, end - begin, self._names, keeps=self.keeps)


def _arrays(data: Mapping[str, Any], inputs: Inputs) -> RowData:
    if not data:
        raise FeedError("data: there are no arrays; give one for each input")
    arrays = inputs.columns(data)
    sampled = {name for name in arrays if name in inputs.sampled}
    axes = {name: inputs.axis_of(name) for name in arrays}
    for name in sampled:
        if len(arrays[name].shape) <= axes[name]:
            raise FeedError(
                f"data: '{name}' must have rows along axis {axes[name]}, as the input of shape "
                f"{inputs[name].shown} has, got shape {list(arrays[name].shape)}"
            )
    lengths = {name: array.shape[axes[name]] for name, array in arrays.items() if name in sampled}
    size = lengths[min(sampled, key=list(arrays).index)] if sampled else 1
    constants = {}
    for name in [name for name in arrays if name not in sampled]:
        array, dims = arrays[name], (inputs[name].dims if name in inputs else ()) or ()
        own, fixed = array.shape[:1], inputs.fixed_rows(name)
        if own == (size,) == (fixed,) and size > 1:
            raise FeedError(
                f"data: '{name}' is ambiguous: its {size} rows may be those of the samples, or the "
                "same in every batch, as the model needs as many; give a list of batches"
            )
        if name not in inputs:  # nothing that is computed reads it
            lengths[name] = array.shape[0] if own else 1
        elif not own or _fits(array.shape, dims):
            array = arrays.pop(name)
            constants[name] = foreign_arrays.take(array, slice(None)) if own else array
        elif not _fits(array.shape[1:], dims[1:]):
            raise FeedError(
                f"data: '{name}' must have shape {inputs[name].shown}, got {list(array.shape)}: "
                "no dimension of this input is the batch dimension of the model, so give one array "
                "for all batches, or a model in which its batch dimension has the symbol that the "
                "other inputs have"
            )
        else:
            lengths[name] = array.shape[0]
    if len(set(lengths.values())) > 1:
        raise _unequal(lengths, axes, inputs)
    whole = next((name for name in constants if name in inputs.of_loss), None)
    if whole is not None and size > (inputs.rows.fixed or size):
        raise FeedError(
            f"data: there are {size} rows, but '{whole}' of shape {inputs[whole].shown} has none: "
            f"the model's batch size is fixed at {inputs.rows.fixed}; give a list of batches"
        )

    def read(rows: RowIndex) -> dict[str, Any]:
        taken = {
            name: foreign_arrays.take(array, rows, axes[name]) for name, array in arrays.items()
        }
        return taken | constants

    return _ReadRows(read, size, arrays)


def _fits(shape: Sequence[int], dims: Sequence[int | str | None]) -> bool:
    """Whether a shape has the static sizes of an input."""
    return len(shape) == len(dims) and all(
        not isinstance(dim, int) or dim == size for size, dim in zip(shape, dims, strict=True)
    )


def _unequal(lengths: Mapping[str, int], axes: Mapping[str, int], inputs: Inputs) -> FeedError:
    """Returns the error for arrays with different numbers of rows."""
    shown = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
    said = f"data: the arrays must have the same length, got {shown}"
    for name in lengths:
        if axes[name]:
            said += f"; the rows of '{name}', of shape {inputs[name].shown}, are along axis "
            said += str(axes[name])
    return FeedError(said)


def weights_twice(name: str) -> FeedError:
    """Returns the error for weights that are given and also in the data."""
    return FeedError(
        f"sample_weight: the data have '{name}', too; give sample_weight='{name}' to use it, or "
        "leave it out of the data"
    )


def _no_rows(more: Mapping[str, object]) -> FeedError:
    name = next(iter(more))
    return FeedError(
        "sample_weight has a weight for each row, but the data are batches; put the weights of "
        f"each batch into it, under '{name}', and give sample_weight='{name}'"
    )


def _stored_table(data: Any, inputs: Inputs) -> RowData:
    wanted = [name for name in inputs if name in data.column_names]
    data = data.select_columns(wanted)
    if data.format["type"] is None and len(data):  # numbers are read faster than as Python objects
        arrow = data.with_format("arrow")
        if all(foreign_arrays.is_numeric(arrow[:1][name]) for name in wanted):
            data = arrow

    def read(rows: RowIndex) -> Mapping[str, Any]:
        part = data[rows if isinstance(rows, slice) else rows.tolist()]
        return inputs.as_columns({name: part[name] for name in wanted})

    # A transform that the user gave the data set may fill the same memory again.
    return _ReadRows(read, len(data), keeps=False)


def _samples(data: Any, inputs: Inputs) -> RowData | None:
    """Returns samples that are read by number; None if they are batches."""
    size = len(data)
    if size and _is_batch(data[0], inputs):
        return None

    def read(rows: RowIndex) -> dict[str, Any]:
        numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        return inputs.stacked(inputs.in_columns((data[n] for n in numbers), numbers))

    return _ReadRows(read, size)


def _is_batch(item: object, inputs: Inputs) -> bool:
    """Whether an item of a sequence is a batch and not a sample, by its axes."""
    for name, value in inputs.named(item).items():
        dims = inputs[name].dims if name in inputs else None
        if dims:
            return inputs[name].array(value).ndim == len(dims)
    return False


# ------------------------------------------------------------------------------------ of batches


def _batch_list(data: Sequence[Any], inputs: Inputs) -> Source:
    if not data:
        raise FeedError("data: there are no batches; give at least one")

    def epoch(_: int, __: np.random.Generator | None, start: int) -> Iterator[Checked]:
        _check_start(start, len(data))
        return (inputs.check(data[place]) for place in range(start, len(data)))

    def part(begin: int, end: int) -> Source:
        return _batch_list(_Slice(data, begin, end), inputs)

    return Source(None, len(data), epoch, part)


class _Slice(Sequence[Any]):
    """The items of a sequence from a first one up to another, which are read on access."""

    def __init__(self, items: Sequence[Any], begin: int, end: int) -> None:
        self._items, self._places = items, range(begin, end)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        return self._items[self._places[place]]


def _iterable(data: Iterable[Any], inputs: Inputs, epochs: int) -> Source:
    given = data
    if isinstance(data, Iterator):
        if epochs > 1:
            raise FeedError(
                f"data: {type(data).__name__} can be iterated over once, but there are {epochs} "
                "epochs; give arrays, a list, or a function that returns a new one for each epoch"
            )
        first = [_copied(inputs.check(batch)) for batch in itertools.islice(data, epochs)]
        if len(first) < epochs:
            raise _nothing()
        given = itertools.chain(first, data)

    def epoch(_: int, __: np.random.Generator | None, start: int) -> Iterator[Checked]:
        batches, done = iter(given), 0
        for batch in batches:
            done += 1
            if done > start:
                yield inputs.check(batch)
        if not done:
            raise _nothing()
        _check_start(start, done)

    return Source(None, _length(data), epoch)


def _length(data: object) -> int | None:
    try:
        return len(data) if isinstance(data, Sized) else None
    except Exception:  # a loader has a length, but not for every data set
        return None


def _function(
    function: Callable[..., Any],
    inputs: Inputs,
    batch_size: int,
    collate: Collate | None = None,
    group_by_length: bool | Sequence[int] = False,
) -> Source:
    has_parameter = False
    try:
        inspect.signature(function).bind()
    except TypeError:  # an argument is missing
        has_parameter = True
    except ValueError:  # it has no signature
        pass

    def epoch(number: int, order: np.random.Generator | None, start: int) -> Iterator[Checked]:
        data = function(max(number, 1)) if has_parameter else function()
        if callable(data) and not isinstance(data, Iterable):
            raise FeedError(
                "data: the function returned another function; return an iterable of batches"
            )
        opened = open_data(
            *(data, inputs), batch_size=batch_size, collate=collate, group_by_length=group_by_length
        )
        yield from opened.epoch(number, order=order, start=start)

    return Source(None, _length(function), epoch)


def _stream(data: Any, inputs: Inputs, batch_size: int) -> Callable[[], Iterator[dict[str, Any]]]:
    def batches() -> Iterator[dict[str, Any]]:
        for batch in data.iter(batch_size=batch_size):
            yield inputs.as_columns({name: batch[name] for name in inputs if name in batch})

    return batches


def _nothing() -> FeedError:
    return FeedError(
        "data: there are no batches; an iterator can be used for one epoch only, so give a list or "
        "arrays"
    )


def _check_start(start: int, there: int) -> None:
    if start > there:
        raise FeedError(
            f"data: there are {there} batches, but {start} of the epoch are finished; give the "
            "data with which the epoch began"
        )
