"""The inputs of a training step, and the checks of a batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.engine.execution.step import Step
from ortops.engine.training import foreign_arrays
from ortops.engine.training.batch_labels import (
    ClassWeights,
    accepted_labels,
    check_labels,
    check_weights,
    remedy_of_labels,
)
from ortops.engine.training.input_values import Array, Input, to_array
from ortops.errors import FREE_BATCH, FeedError, did_you_mean
from ortops.graph.constants import numpy_dtype
from ortops.graph.labels import Labels
from ortops.graph.row_axes import RowAxes, row_axes, rows_to

logger = logging.getLogger("ortops")

Feeds: TypeAlias = Mapping[str, npt.NDArray[Any]] | Sequence[Any] | npt.NDArray[Any]
"""A batch: an array, or an array-like (see `Input.array`), for each input, by name or in the order
of the inputs (see `Inputs.named`)."""


_PAST = ("past_key_values.", "past_conv.")


class Checked(dict[str, Array]):
    """A checked batch: `Inputs.check` returns it, and accepts it without another check.

    Attributes:
        by: The inputs that it was checked for.
    """

    def __init__(self, arrays: Mapping[str, Array], by: Inputs) -> None:
        super().__init__(arrays)
        self.by = by

    @property
    def sampled(self) -> list[str]:
        """The inputs with a row for each sample."""
        return [name for name, axis in self.by.rows.axes.items() if self._reaches(name, axis)]

    def _reaches(self, name: str, axis: int) -> bool:
        return name in self and self[name].ndim > axis


class Inputs(dict[str, Input]):
    """The inputs of a training step by name: those of the model in order, then those of the loss.

    Args:
        steps: The parts of the step.
        unread: Inputs that may be fed although no step reads them.
        warns_of_unshifted: Whether to warn if the labels of the first batch equal an input, as
            those of a language model do that were not shifted.
        rows: Which axis of which inputs has a row for each sample; see `row_axes`.
        weights: The inputs with weights of rows, which are 1 where they are not fed.
        lengths: The inputs with the lengths of other inputs, by these.

    Attributes:
        of_loss: The inputs that the model does not have.
        lengths: See above.
        unread: Inputs that may be fed although no step reads them.
    """

    def __init__(
        self,
        steps: Iterable[Step],
        unread: Iterable[str],
        *,
        warns_of_unshifted: bool = False,
        rows: RowAxes | None = None,
        weights: Iterable[str] = (),
        lengths: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.lengths = dict(lengths or {})
        self._weights = frozenset(weights)
        self._by_class: ClassWeights | None = None
        self._base = self
        self.unread = frozenset(unread)
        self._labels: list[tuple[str, Labels]] = []
        self._warns_of_unshifted = warns_of_unshifted
        for step in steps:
            self._labels += [each for each in accepted_labels(step) if each not in self._labels]
            for value in step.model.graph.inputs:
                name = value.name or ""
                if name in step.feeds:
                    shape = value.shape
                    dims = (
                        None
                        if shape is None
                        else tuple(dim if isinstance(dim, int) else dim.value for dim in shape)
                    )
                    past = _past(value)
                    self[name] = Input(name, numpy_dtype(value), dims, _unbound(value), past)
        self.rows = rows or row_axes({name: value.dims for name, value in self.items()})
        self._places = tuple(self)
        self.of_loss = frozenset(self.keys() - self.unread)
        self._said: set[str] = set()

    def only(self, names: Iterable[str]) -> Inputs:
        """Returns some of the inputs; the others may be fed, but are not read.

        Args:
            names: Their names. Their positions in a tuple (see `named`) do not change.
        """
        chosen = set(names)
        rows = self.rows if chosen & self.rows.axes.keys() else None
        result = Inputs((), self.unread | self.keys(), weights=self._weights & chosen)
        result.update((name, value) for name, value in self.items() if name in chosen)
        result._labels = [each for each in self._labels if each[0] in chosen]
        result._places = self._places
        result.of_loss, result.lengths = self.of_loss, self.lengths
        # Without any that has rows, those that are left are all static.
        result.rows = rows or row_axes({name: value.dims for name, value in result.items()})
        result._said = self._said
        return result

    def weighed(self, by_class: ClassWeights) -> Inputs:
        """Returns these inputs with weights of classes, by which `check` multiplies those of rows.

        Args:
            by_class: The weights.
        """
        result = copy.copy(self)
        result._by_class = by_class
        return result

    def place(self, number: int) -> str:
        """Returns the name of the input that an array without name fills; "" if there is none.

        Args:
            number: The place of the array in a tuple; see `named`.
        """
        return self._places[number] if number < len(self._places) else ""

    def named(self, feeds: object) -> Mapping[str, object]:
        """Returns a batch, or a data set of arrays, by name.

        Args:
            feeds: A mapping; a table, of which the columns with names of inputs are used; arrays in
                a tuple or list, the inputs of the model in order and then those of the loss (nested
                tuples are flattened: ``((x1, x2), y)`` is ``(x1, x2, y)``); or one array, if there
                is one input.

        Raises:
            FeedError: If it is something else, or the number of arrays is wrong.
        """
        if isinstance(feeds, Mapping):
            return feeds
        if foreign_arrays.is_table(feeds):
            return self._columns_of(feeds)
        in_parts = isinstance(feeds, list | tuple)
        if foreign_arrays.is_array(feeds) and not (in_parts and len(self._places) > 1):
            parts = [feeds]
        elif isinstance(feeds, list | tuple) and feeds:
            parts = _opened(feeds)
        else:
            raise FeedError(
                "feeds must be a dict with an array for each input, or a tuple of arrays in the "
                f"order of the inputs, got {type(feeds).__name__}"
            )
        wanted = self.keys() - self._weights
        needed = max((n for n, name in enumerate(self._places, 1) if name in wanted), default=0)
        if not needed <= len(parts) <= len(self._places):
            raise FeedError(
                f"feeds: {len(parts)} array{'s' * (len(parts) > 1)} without names for "
                f"{len(self._places)} inputs; give a dict, or a tuple with an array for each of "
                f"{listed(self._places)} in this order"
            )
        return dict(zip(self._places, parts, strict=False))

    def _columns_of(self, table: object) -> dict[str, object]:
        return self.as_columns(foreign_arrays.columns(table, list(self)))

    def as_columns(self, found: Mapping[str, object]) -> dict[str, object]:
        """Gives columns of a table the axes of their inputs.

        A column becomes [rows, 1] for an input of that shape, and its rows are moved to the axis
        that has them.

        Args:
            found: Columns by the names of inputs.
        """
        found = dict(found)
        for name, column in found.items():
            dims, axis = self[name].dims, self.axis_of(name)
            is_pair = dims is not None and len(dims) == 2 and dims[1 - axis] == 1
            if is_pair or axis:
                array = self[name].array(column)
                array = array[:, None] if is_pair and array.ndim == 1 else array
                found[name] = rows_to(array, axis)
        return found

    def stacked(self, samples: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Returns the values of several samples by name, with the axis of the rows in its place.

        If the model takes one row at a time, a target without such an axis is that of the sample.

        Args:
            samples: The values of each input.
        """
        found: dict[str, Any] = {}
        for name, values in samples.items():
            is_whole = self.rows.fixed == 1 and name in self and name not in self.rows.axes
            if is_whole and len(values) == 1:
                found[name] = values[0]
            elif name in self and (axis := self.axis_of(name)):
                found[name] = rows_to(self[name].array(values), axis)
            else:
                found[name] = values
        return found

    @property
    def needed(self) -> list[str]:
        """The inputs that every batch must have."""
        return [name for name in self if self[name].past is None and name not in self._weights]

    @property
    def sampled(self) -> list[str]:
        """The inputs with a row for each sample; the others are the same in every batch."""
        return [name for name in self if name in self.rows.axes]

    def axis_of(self, name: str) -> int:
        """Returns the axis of an input that has its rows, if it has any."""
        return self.rows.axes.get(name, 0)

    def along_rows(self, name: str, weights: Array) -> Array:
        """Returns weights of rows with as many axes as an input has.

        Args:
            name: The input.
            weights: The weights. If they have several axes, they stay as they are.
        """
        rank, axis = len(self[name].dims or ()), self.axis_of(name)
        if weights.ndim > 1 or rank < 2:
            return weights
        return weights.reshape([-1 if at == axis else 1 for at in range(rank)])

    def classes_of(self, name: str) -> int | None:
        """Returns the number of classes of an input with labels, if it is known."""
        found = [each.classes for of, each in self._labels if of == name and each.classes]
        return min(found, default=None)

    def has_labels(self, name: str) -> bool:
        """Whether an input has labels, the numbers of classes."""
        return any(of == name for of, _ in self._labels)

    def ignored_of(self, name: str) -> list[int]:
        """Returns the labels of an input that losses ignore."""
        labels = (each.ignored for of, each in self._labels if of == name)
        return [label for label in labels if label is not None]

    def say(self, sentence: str) -> None:
        """Logs a warning once."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning("data: %s", sentence)

    def note(self, sentence: str) -> None:
        """Logs an automatic choice once."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.info("data: %s", sentence)

    def fixed_rows(self, name: str) -> int | None:
        """Returns the number of rows of an input, if it is static."""
        dims, axis = (self[name].dims if name in self else None) or (), self.axis_of(name)
        size = dims[axis] if len(dims) > axis else None
        return size if isinstance(size, int) else None

    def check(self, feeds: Feeds) -> Checked:
        """Returns the feeds as arrays that fit the inputs.

        Raises:
            FeedError: If they do not fit.
        """
        if isinstance(feeds, Checked) and feeds.by is self._base:
            return feeds
        given = self.named(feeds)
        self._check_names(given)
        sizes: dict[str, tuple[int, str]] = {}
        arrays = {}
        # A mapping that reads what it is asked for may read it into the same memory each time.
        holds = getattr(type(given), "__getitem__", None) is dict.__getitem__
        absent = [name for name in self if name not in given]
        for name in absent:
            self._check_there(name, given)
        by_class = self._by_class and self._by_class.name
        for name, value in self.items():
            if name in given and name != by_class:
                array = self._fit(value, _read(given, name), sizes)
                arrays[name] = array if holds else array.copy()
        for name in absent:
            if name != by_class:
                empty = self._ones if name in self._weights else self._empty_past
                arrays[name] = empty(self[name], arrays, sizes)
        for name in self._weights & arrays.keys():
            check_weights(name, arrays[name])
        if self._by_class is not None:
            name = self._by_class.name
            arrays[name] = self._times_classes(self._by_class, given, arrays, sizes)
        for name, accepted in self._labels:
            check_labels(name, arrays[name], accepted)
        if self._warns_of_unshifted:
            self._warns_of_unshifted = False
            self._warn_of_unshifted(arrays)
        return Checked(arrays, self._base)

    def _times_classes(
        self,
        by_class: ClassWeights,
        given: Mapping[str, object],
        arrays: Mapping[str, Array],
        sizes: dict[str, tuple[int, str]],
    ) -> Array:
        """Returns the weights of rows, times those of classes.

        Args:
            by_class: The weights of classes.
            given: The batch. Where the input has a weight for each label, weights of rows count for
                all labels of these.
            arrays: The other inputs.
            sizes: The sizes of dimensions by symbol, with the inputs that have them.
        """
        value, labels = self[by_class.name], arrays[by_class.labels]
        is_by_label = labels.ndim > 1 and len(value.dims or ()) == labels.ndim
        if value.name in given:
            weights = value.array(_read(given, value.name))
        else:
            weights = np.ones(labels.shape) if is_by_label else self._ones(value, arrays, sizes)
        if is_by_label:
            weights = self.along_rows(value.name, weights)
        pairs = zip(weights.shape, labels.shape, strict=False)
        if is_by_label and weights.ndim == labels.ndim and all(n in (1, of) for n, of in pairs):
            weights = np.broadcast_to(weights, labels.shape)
        weights = self._fit(value, weights, sizes)
        check_weights(value.name, weights)
        return by_class.times(weights, labels)

    def _ones(
        self, value: Input, arrays: Mapping[str, Array], sizes: dict[str, tuple[int, str]]
    ) -> Array:
        """Returns a weight of 1 for each row of a batch; says so once, unless classes have some."""
        if self._by_class is None:
            self.say(
                f"there is no '{value.name}', so each row has weight 1; give sample_weight=, or an "
                "array of this name"
            )
        shape = [
            dim if isinstance(dim, int) else sizes.get(dim or "", (1, ""))[0]
            for dim in value.dims or ()
        ]
        if (
            shape
            and value.dims
            and value.dims[0] not in sizes
            and not isinstance(value.dims[0], int)
        ):
            shape[0] = self._rows_in(arrays)
        return value.fit(np.ones(shape, value.dtype), sizes)

    def _rows_in(self, arrays: Mapping[str, Array]) -> int:
        """Returns the number of rows of a batch."""
        axes = self.rows.axes
        sizes = (a.shape[axes[n]] for n, a in arrays.items() if n in axes and a.ndim > axes[n])
        return next(sizes, 1)

    def _fit(self, value: Input, given: object, sizes: dict[str, tuple[int, str]]) -> Array:
        """Returns a value as the array that an input needs; explains one-hot labels, and batches.

        Args:
            value: The input.
            given: The value.
            sizes: The sizes of dimensions by symbol, with the inputs that have them.
        """
        labels = [accepted for name, accepted in self._labels if name == value.name]
        try:
            return value.fit(given, sizes)
        except FeedError as error:
            remedy = remedy_of_labels(value, given, labels)
            if not remedy:
                shape = getattr(given, "shape", ())  # a method of an OrtValue
                if isinstance(shape, tuple) and self._differs_in_rows(value, shape, sizes):
                    raise FeedError(f"{error}; the batch size is fixed ({FREE_BATCH})") from error
                raise
            array = to_array(f"feeds: '{value.name}'", given)
            raise FeedError(
                f"feeds: '{value.name}' must be class numbers, {value.dtype}{value.shown}, got "
                f"{array.dtype}{list(array.shape)}; {remedy}"
            ) from error

    def _differs_in_rows(
        self, value: Input, shape: Sequence[int], sizes: Mapping[str, tuple[int, str]]
    ) -> bool:
        """Whether a shape differs from that of an input by the number of its rows alone."""
        dims, axis = value.dims or (), self.axis_of(value.name)
        pairs = enumerate(zip(dims, shape, strict=False))
        unlike = [n for n, (dim, size) in pairs if isinstance(dim, int) and dim != size]
        if len(dims) != len(shape) or unlike != [axis]:
            return False
        return value.name in self.sampled or shape[axis] in {size for size, _ in sizes.values()}

    def _warn_of_unshifted(self, arrays: Mapping[str, Array]) -> None:
        """Warns of labels of tokens that are the tokens of the same batch."""
        for label in dict.fromkeys(name for name, accepted in self._labels if accepted.of_tokens):
            for name, array in arrays.items():
                is_tokens = name != label and array.ndim == 2 and array.dtype.kind in "iu"
                if is_tokens and array.shape[1] > 1 and np.array_equal(array, arrays[label]):
                    logger.warning(
                        "feeds: '%s' equals '%s', so each token is trained to predict itself; use "
                        "the loss NextToken, or shift the labels of a language model by one token",
                        *(label, name),
                    )

    def _empty_past(
        self, value: Input, arrays: Mapping[str, Array], sizes: dict[str, tuple[int, str]]
    ) -> Array:
        """Returns a cache without any keys or values, or of zeros, for the rows of a batch."""
        assert value.past is not None
        assert value.dims is not None
        heads, size = value.past
        first, *_, time, _ = value.dims
        rows = self._rows_in(arrays)
        if isinstance(first, int):
            rows = first
        elif first in sizes:
            rows = sizes[first][0]
        # The cache of an encoder has the encoder's length, also where it is not read.
        length = sizes[time][0] if time in sizes else 0
        is_cache = len(value.dims) == 4  # not the state of a convolution, which begins with zeros
        shape = (rows, heads, length, size) if is_cache else (rows, heads, size)
        return value.fit(np.zeros(shape, value.dtype), sizes)

    def sample(self, feeds: object) -> dict[str, Array | None]:
        """Returns a sample by name, in its own memory: the next one may reuse that of this one.

        Args:
            feeds: See `named`. Inputs that no step reads are None in the result.

        Raises:
            FeedError: If a value cannot be converted to an array.
        """
        given = self.named(feeds)
        return {
            name: self[name].array(_read(given, name)).copy() if name in self else None
            for name in given
        }

    def in_columns(
        self, samples: Iterable[object], numbers: Sequence[int], where: str = ""
    ) -> dict[str, list[Any]]:
        """Returns the values of samples by name, None for inputs that no step reads.

        Args:
            samples: The samples; see `sample`.
            numbers: Their numbers, for messages.
            where: What these belong to, for messages.

        Raises:
            FeedError: If samples have different names, or a value is no array.
        """
        columns: dict[str, list[Any]] = {}
        for number, sample in zip(numbers, samples, strict=True):
            named = self.sample(sample)
            columns = columns or {name: [] for name in named}
            if named.keys() != columns.keys():
                raise FeedError(
                    f"data: all samples must have the same names, but sample {number} {where}has "
                    f"{listed(named)} and sample {numbers[0]} has {listed(columns)}"
                )
            for name, value in named.items():
                columns[name].append(value)
        return columns

    def columns(self, data: Mapping[str, object]) -> dict[str, Any]:
        """Returns a data set as arrays, from which batches are cut.

        Types do not change: `check` converts batch by batch. Arrays that are not in memory stay
        where they are.

        Args:
            data: An array, or an array-like (see `Input.array`), for each input.

        Raises:
            FeedError: If a value cannot be converted to an array.
        """
        self._check_names(data)
        found = {}
        for name in data:
            if self and name not in self:
                continue  # no step reads it
            given, own = _read(data, name), self.get(name, Input(name, None, None))
            array: Any = given if foreign_arrays.is_lazy(given) else own.array(given)
            if not array.shape and own.dims != ():
                raise FeedError(
                    f"data: '{name}' must be an array with a row for each sample, got a single "
                    f"{type(array.item()).__name__}"
                )
            found[name] = array
        for name in self:
            self._check_there(name, found)
        return found

    def _check_there(self, name: str, given: Mapping[str, object]) -> None:
        if name not in given and name in self.needed:
            raise FeedError(f"feeds: input '{name}' is missing; the inputs are {listed(self)}")

    def _check_names(self, given: Mapping[str, object]) -> None:
        for name in given:
            if not isinstance(name, str):
                raise FeedError(
                    f"feeds: keys must be names of inputs, got {name!r}; the inputs are "
                    f"{listed(self)}"
                )
            if name not in self and name not in self.unread:
                raise FeedError(f"feeds: there is no input '{name}'; " + did_you_mean(name, self))


def listed(names: Iterable[str]) -> str:
    """Returns quoted names, separated by commas."""
    return ", ".join(f"'{name}'" for name in names)


def _opened(parts: Iterable[object]) -> list[object]:
    """Returns the arrays in nested tuples and lists."""
    found: list[object] = []
    for part in parts:
        inner = isinstance(part, list | tuple) and not foreign_arrays.is_array(part)
        found += _opened(part) if inner else [part]  # type: ignore[arg-type]
    return found


def _read(given: Mapping[str, object], name: str) -> object:
    """Returns the value of a mapping for a name; some mappings read a file on access."""
    try:
        return given[name]
    except MemoryError:
        raise
    except Exception as error:
        raise FeedError(f"feeds: '{name}' cannot be read: {error}; give a numpy array") from error


def _past(value: ir.Value) -> tuple[int, int] | None:
    """Returns the number and size of the heads of an input ``past_key_values.*``; see `Input`.

    For the state of a convolution, [batch, channels, length], returns channels and length.
    """
    shape = value.shape
    if not (value.name or "").startswith(_PAST) or shape is None or len(shape) not in (3, 4):
        return None
    heads, *length, size = shape[1:]
    if length and isinstance(length[0], int):
        return None
    # The builder of onnxruntime-genai leaves the size dynamic.
    known = (size, *(_head_size(use.node, value) for use in value.uses()))
    size = next((each for each in known if isinstance(each, int)), size)
    return (heads, size) if isinstance(heads, int) and isinstance(size, int) else None


def _head_size(node: ir.Node, past: ir.Value) -> int | ir.SymbolicDim | None:
    """Returns the size of the heads of a cache, by a node that appends to it."""
    if node.op_type == "Slice":  # of a sliding cache
        cut = node.outputs[0]
        sizes = (_head_size(use.node, cut) for use in cut.uses())
        return next((size for size in sizes if isinstance(size, int)), None)
    inputs = [each for each in node.inputs if each is not past]
    shape = inputs[0].shape if inputs and inputs[0] is not None else None
    if shape is None:
        return None
    if node.op_type == "Concat":
        return shape[-1] if len(shape) == 4 else None
    if node.op_type != "GroupQueryAttention" or not isinstance(shape[-1], int):
        return None
    heads, pairs = (node.attributes.get_int(n, 1) for n in ("num_heads", "kv_num_heads"))
    packed = node.inputs[1] is None  # keys and values follow the queries
    return shape[-1] // (heads + 2 * pairs * packed)


def _unbound(value: ir.Value) -> str | None:
    """Returns the kind of values of an input, if onnxruntime cannot bind them."""
    if isinstance(value.type, ir.SequenceType | ir.OptionalType):
        return "a sequence" if isinstance(value.type, ir.SequenceType) else "an optional"
    dtype = numpy_dtype(value)
    return None if dtype is None or dtype.kind in "biufcO" else dtype.name
