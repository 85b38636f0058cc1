"""The inputs of a training step, and the checks of a batch."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortops._common.numbers import cast_numbers
from ortops.engine.execution.step import Step
from ortops.engine.training import foreign_arrays
from ortops.errors import FREE_BATCH, FeedError, OrtopsError, did_you_mean
from ortops.graph.constants import numpy_dtype
from ortops.graph.labels import Labels, read_labels
from ortops.graph.operators import MOVES, having
from ortops.graph.row_axes import RowAxes, row_axes, rows_to

logger = logging.getLogger("ortops")

Array: TypeAlias = npt.NDArray[Any]

Feeds: TypeAlias = Mapping[str, npt.NDArray[Any]] | Sequence[Any] | npt.NDArray[Any]
"""A batch: an array, or an array-like (see `Input.array`), for each input, by name or in the order
of the inputs (see `Inputs.named`)."""


@dataclass(frozen=True)
class Input:
    """An input that a batch fills.

    Attributes:
        name: Its name.
        dtype: Its element type; None if any type is allowed.
        dims: Its shape. Dimensions with the same symbol have the same size; None is any size. None
            if the rank is unknown.
        unbound: The kind of its values, if onnxruntime cannot bind them to a training step.
        past: The number of heads and their size, if it is the cache of earlier keys or values of a
            language model, [batch, heads, 0, size], and may be left out.
    """

    name: str
    dtype: np.dtype[Any] | None
    dims: tuple[int | str | None, ...] | None
    unbound: str | None = None
    past: tuple[int, int] | None = None

    @property
    def shown(self) -> str:
        """Its shape in messages."""
        return "[" + ", ".join("?" if d is None else str(d) for d in self.dims or ()) + "]"

    def array(self, given: object) -> Array:
        """Converts a value to an array, without copying the memory of an array.

        Python numbers have no precision of their own and get the type of the input; values with a
        type keep it.

        Args:
            given: Any array-like: an array of any library, an OrtValue, numbers in lists.

        Raises:
            FeedError: If it cannot be converted, or the type cannot represent its values.
        """
        array, plain = _opened_array(f"feeds: '{self.name}'", given)
        return self._typed(array, plain) if isinstance(plain, list | float) else array

    def fit(self, given: object, sizes: dict[str, tuple[int, str]]) -> Array:
        """Converts a value to the array that onnxruntime needs: contiguous, aligned, of the type.

        Args:
            given: The value (see `array`). Another type is converted if that preserves all values:
                integers and booleans to floats, and one precision to another.
            sizes: The sizes of symbols so far, each with the input that defined it; extended.

        Raises:
            FeedError: If the value does not fit.
        """
        if self.unbound is not None:
            raise FeedError(
                f"feeds: '{self.name}' is an input of type {self.unbound}, which onnxruntime "
                "cannot bind to a training step; use a numeric type of numpy, such as float32"
            )
        array = self.array(given)
        if self.dtype is not None and self.dtype.kind == "O":
            array = self._strings(array)
        elif self.dtype is not None and array.dtype != self.dtype:
            array = self._converted(array)
        elif array.dtype.kind not in "biufcV":
            raise FeedError(f"feeds: '{self.name}' must have numbers, got type {array.dtype}")
        if self.dims is not None:
            self._check_shape(array.shape, self.dims, sizes)
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = array.copy(order="C")
        return array

    def _strings(self, array: Array) -> Array:
        """Returns strings as an array of objects, whose memory is not that of the given one."""
        found = array.astype(object)
        wrong = [each for each in found.flat if not isinstance(each, str)]
        if wrong:
            raise FeedError(
                f"feeds: '{self.name}' must have strings, got {wrong[0]!r:.80} of type "
                f"{type(wrong[0]).__name__}"
            )
        return found

    def _typed(self, array: Array, plain: list[Any] | float) -> Array:
        """Returns Python numbers in the type of the input, if that is a float type."""
        numbers = list(_leaves(plain))
        if not numbers:  # an empty list has no type
            return array if self.dtype is None else array.astype(self.dtype)
        types = {getattr(number, "dtype", type(number)) for number in numbers}
        if array.dtype.kind != "f" or (len(types) == 1 and types != {float}):
            return array
        is_float = self.dtype is not None and _kind(self.dtype) == "f"
        with np.errstate(all="ignore"):
            result = array.astype(self.dtype) if is_float else array
        flat = (
            one for leaf in numbers for one in ([leaf] if _has_no_type(leaf) else np.ravel(leaf))
        )
        for number, converted in zip(flat, result.flat, strict=True):
            if not _stands_for(float(converted), number):
                raise FeedError(
                    f"feeds: '{self.name}' has the value {number}, which {result.dtype} cannot "
                    f"represent; give values of type {result.dtype}"
                )
        return result

    def _converted(self, array: Array) -> Array:
        wanted = self.dtype
        assert wanted is not None
        ranks = {"b": 0, "u": 1, "i": 1, "f": 2}
        have, want = ranks.get(_kind(array.dtype), 3), ranks.get(_kind(wanted), -1)
        hint = f" (convert it with .astype(np.{wanted}))" if array.dtype.kind in "biuf" else ""
        if have > want:
            raise FeedError(f"feeds: '{self.name}' must be {wanted}, got {array.dtype}{hint}")
        with np.errstate(all="ignore"):
            result = array.astype(wanted)
            lost = ~_survives(array, result)
        if lost.any():
            raise FeedError(
                f"feeds: '{self.name}' must be {wanted}, got {array.dtype} with the value "
                f"{array[lost].flat[0]}, which {wanted} cannot represent{hint}"
            )
        return result

    def _check_shape(
        self,
        shape: tuple[int, ...],
        dims: Sequence[int | str | None],
        sizes: dict[str, tuple[int, str]],
    ) -> None:
        if len(dims) != len(shape) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
        ):
            raise FeedError(f"feeds: '{self.name}' must have shape {self.shown}, got {list(shape)}")
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, str):
                known, teller = sizes.setdefault(dim, (size, self.name))
                if known != size:
                    raise FeedError(
                        f"feeds: '{dim}' is {known} in '{teller}' and {size} in '{self.name}'; it "
                        "must be the same in all inputs"
                    )


def to_array(what: str, given: object) -> Array:
    """Converts an array-like to an array, without copying the memory of an array.

    Args:
        what: Its name in messages.
        given: An array of any library, an OrtValue, numbers in lists.

    Raises:
        FeedError: If it cannot be converted, or has missing values.
    """
    return _opened_array(what, given)[0]


def fitted_array(what: str, given: object, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Converts an array-like to an array of a dtype and shape, contiguous and aligned.

    Args:
        what: Its name in messages.
        given: See `to_array`. Numbers of another type are converted if they do not overflow.
        dtype: The dtype.
        shape: The shape.

    Raises:
        OrtopsError: If the shape or a value does not fit.
    """
    array = to_array(what, given)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise OrtopsError(
            f"{what} must be {dtype}{list(shape)}, got {array.dtype}{list(array.shape)}"
        )
    converted, lost = cast_numbers(array, dtype)
    if lost is not None:
        raise OrtopsError(f"{what} cannot be set to {lost}, which does not fit {dtype}")
    return np.require(converted, requirements=["C", "A"])


def _opened_array(what: str, given: object) -> tuple[Array, Any]:
    """Returns a value as an array, and the object that numpy converted."""
    if type(given) is np.ndarray:
        return given, given
    try:
        plain = _plain(given)
        return np.asarray(plain), plain
    except MemoryError:
        raise
    except Exception as error:  # whatever has an __array__ may raise anything
        why = str(error).strip().split("\n")[0] or type(error).__name__
        remedy = "give a numpy array"
        if "inhomogeneous" in why:
            remedy = "give arrays of one shape, or collate='pad' to pad rows of different lengths"
        raise FeedError(f"{what} cannot be converted to an array: {why}; {remedy}") from error


def _plain(given: Any) -> Any:
    """Returns an object that numpy converts to an array without losing anything."""
    if isinstance(given, np.ma.MaskedArray):
        masked = int(np.ma.getmaskarray(given).sum())
        if masked:
            raise ValueError(f"{masked} of its {given.size} values are masked")
        return np.ma.getdata(given)
    if isinstance(given, list | tuple):
        return [_plain(part) for part in given]
    if isinstance(given, onnxruntime.OrtValue):
        return given.numpy()
    if hasattr(given, "null_count") or hasattr(given, "to_numpy"):  # a column of a table
        return foreign_arrays.dense(given)
    if hasattr(given, "toarray"):  # a sparse matrix
        return given.toarray()
    if hasattr(given, "detach"):  # PyTorch's: what is fed are its values
        values = given.detach().cpu()
        # numpy has no bfloat16; float32 holds all of its values.
        return np.asarray(values.float() if "bfloat16" in str(values.dtype) else values)
    if hasattr(given, "__dlpack__") and not hasattr(given, "__array__"):
        return np.from_dlpack(given)
    return given


def _leaves(plain: Any) -> Iterator[Any]:
    """Yields the items of nested lists."""
    if isinstance(plain, list):
        for part in plain:
            yield from _leaves(part)
    else:
        yield plain


def _has_no_type(number: object) -> bool:
    return type(number) in (bool, int, float)


def _stands_for(converted: float, number: Any) -> bool:
    """Whether a float equals a number, or is the nearest one to a Python float."""
    if type(number) is float:
        alike = math.isfinite(number) == math.isfinite(converted)
        return alike and (number == 0) == (converted == 0)
    exact = number.item() if isinstance(number, np.generic) else number
    return bool(exact == converted or (exact != exact and converted != converted))


def _kind(dtype: np.dtype[Any]) -> str:
    """Returns numpy's letter for the kind of a type; "f" also for ml_dtypes' floats."""
    return "f" if dtype.kind == "V" and np.can_cast(dtype, np.float64) else dtype.kind


def _survives(array: Array, result: Array) -> Array:
    """Returns which values stay the same in another type."""
    same: Array = np.equal(result.astype(array.dtype), array)
    if array.dtype.kind not in "biu":
        same |= np.isnan(array)
    elif result.dtype.kind in "biu":
        same &= (result < 0) == (array < 0)
    else:  # a float that no such integer is: its cast may be anything
        bits = 8 * array.itemsize - (array.dtype.kind == "i")
        wide = result.astype(np.float64)
        same &= np.isfinite(wide) & (wide < 2.0**bits)
    return same


_PAST = "past_key_values."
_MOVING = MOVES | having("keeps")


def _check_labels(name: str, labels: Array, accepted: Labels) -> None:
    """Raises an error if labels are outside of the range of a loss."""
    if not labels.size:
        raise FeedError(
            f"feeds: '{name}' must have at least one row, got shape {list(labels.shape)}"
        )
    classes, ignored = accepted.classes, accepted.ignored
    bits = 8 * labels.itemsize
    largest = labels.view(f"u{labels.itemsize}").max()  # that of negative ones, if any
    if largest < (classes or 2 ** (bits - 1)):
        return
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    wrong = labels[outside & (labels != ignored)]
    if wrong.size:
        allowed = ">= 0" if classes is None else f"from 0 to {classes - 1}"
        extra = "" if ignored is None else f", or {ignored}, which is ignored"
        raise FeedError(f"feeds: labels in '{name}' must be {allowed}{extra}, got {wrong.flat[0]}")


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


@dataclass(frozen=True)
class ClassWeights:
    """Weights of classes, which multiply those of rows.

    Attributes:
        name: The input with the weights of rows.
        labels: The input with the classes.
        weights: The weight of each class; of all others, it is 1.
        is_question: Whether the labels are answers to yes/no questions, 0 and 1.
    """

    name: str
    labels: str
    weights: Mapping[int, float]
    is_question: bool = False

    def times(self, weights: Array, labels: Array) -> Array:
        """Returns weights of rows, each times that of its class.

        Args:
            weights: The weights of rows.
            labels: The classes, in a shape with as many elements.

        Raises:
            FeedError: If the shapes do not fit, or an answer to a question is not 0 or 1.
        """
        if self.is_question:
            wrong = labels[(labels != 0) & (labels != 1)]
            if wrong.size:
                raise FeedError(
                    f"class_weight: '{self.labels}' must be 0 or 1, got {wrong.flat[0]:g}; give "
                    "sample_weight= for targets that are not classes"
                )
        if labels.size != weights.size:
            raise FeedError(
                f"class_weight: '{self.labels}' of shape {list(labels.shape)} has a class for each "
                f"of its elements, but '{self.name}' of shape {list(weights.shape)} has a weight "
                f'for each row; declare it with inputs={{"{self.name}": (np.float32, [...])}} of '
                "build_training_model and the dimensions of the labels"
            )
        by_class = np.ones(weights.shape, np.float64)
        for label, weight in self.weights.items():
            by_class[labels.reshape(weights.shape) == label] = weight
        return (weights * by_class).astype(weights.dtype)


def _check_weights(name: str, array: Array) -> None:
    """Raises an error for weights that are negative or not finite."""
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        raise FeedError(
            f"feeds: '{name}' has the weights of rows, which must be finite and >= 0, got "
            f"{array[wrong].flat[0]:g}"
        )


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
        for name, value in self.items():
            if name in given:
                array = self._fit(value, _read(given, name), sizes)
                arrays[name] = array if holds else array.copy()
        for name in absent:
            empty = self._ones if name in self._weights else self._empty_past
            arrays[name] = empty(self[name], arrays, sizes)
        for name in self._weights & arrays.keys():
            _check_weights(name, arrays[name])
        if self._by_class is not None:
            name = self._by_class.name
            arrays[name] = self._by_class.times(arrays[name], arrays[self._by_class.labels])
        for name, accepted in self._labels:
            _check_labels(name, arrays[name], accepted)
        if self._warns_of_unshifted:
            self._warns_of_unshifted = False
            self._warn_of_unshifted(arrays)
        return Checked(arrays, self._base)

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
            remedy = _remedy(value, given, labels)
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
        first, _, time, _ = value.dims
        rows = self._rows_in(arrays)
        if isinstance(first, int):
            rows = first
        elif first in sizes:
            rows = sizes[first][0]
        # The cache of an encoder has the encoder's length, also where it is not read.
        length = sizes[time][0] if time in sizes else 0
        return value.fit(np.zeros((rows, heads, length, size), value.dtype), sizes)

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


def _remedy(value: Input, given: object, labels: Sequence[Labels]) -> str:
    """Returns how class numbers are made of one-hot labels or of a column, if these are given."""
    if not labels or value.dims is None:
        return ""
    try:
        array = value.array(given)
    except FeedError:
        return ""
    if array.ndim != len(value.dims) + 1 or array.dtype.kind not in "biuf" or not array.size:
        return ""
    if array.ndim > 1 and array.shape[-1] == 1:
        return f"leave out the axis of size 1: {value.name}[..., 0]"
    for axis in (array.ndim - 1, 1):  # where Keras and PyTorch have classes
        of_classes = array.shape[axis] == (labels[0].classes or array.shape[axis])
        if of_classes and np.allclose(array.astype(np.float64).sum(axis), 1, atol=1e-3):
            return (
                f"they look like probabilities of classes: use the loss "
                f"SoftmaxCrossEntropy(probabilities=True), or give {value.name}.argmax(axis={axis})"
            )
    return ""


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
    """Returns the number and size of the heads of an input ``past_key_values.*``; see `Input`."""
    shape = value.shape
    if not (value.name or "").startswith(_PAST) or shape is None or len(shape) != 4:
        return None
    heads, length, size = shape[1:]
    if isinstance(length, int):
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


def accepted_labels(step: Step) -> list[tuple[str, Labels]]:
    """Returns the inputs that are labels, by metadata of losses and the nodes that read them."""
    found: list[tuple[str, Labels]] = []
    for value in step.model.graph.inputs:
        if value.name in step.feeds:
            found += [(value.name or "", labels) for labels in read_labels(value)]
    for node in step.model.graph:
        if node.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            continue
        scores, labels = node.inputs[:2]
        while labels is not None and (moved := labels.producer()) and moved.op_type in _MOVING:
            labels = moved.inputs[0]
        if labels is not None and labels.name in step.feeds:
            shape = None if scores is None else scores.shape
            size = None if shape is None or len(shape) < 2 else shape[1]
            classes = size if isinstance(size, int) else None
            ignored = node.attributes.get("ignore_index")
            limit = None if ignored is None else ignored.as_int()
            found.append((labels.name or "", Labels(classes, limit)))
    return found
