"""A value that fills an input: its conversion to the array that onnxruntime needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops._common.numbers import cast_numbers
from ortops.engine.training import foreign_arrays
from ortops.errors import FeedError, OrtopsError

Array: TypeAlias = npt.NDArray[Any]


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
