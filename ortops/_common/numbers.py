"""Conversion of numbers from users and from their functions."""

from __future__ import annotations

import math
import operator
from numbers import Integral, Real
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def real(value: Any) -> float:
    """Returns a real number as a float, infinity if it is too large, and NaN for anything else.

    Args:
        value: The value; booleans, strings and arrays are not numbers here.

    Example:
        >>> real(2), real(-(10**400)), real("2"), real(True)
        (2.0, -inf, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    given: Any = value  # a Real that mypy does not let be compared
    try:
        return float(given)
    except OverflowError:
        return math.inf if given > 0 else -math.inf


def integer(value: Any) -> int | None:
    """Returns an integer as a Python int, which cannot overflow; None for anything else.

    Args:
        value: The value: an integer of Python or numpy, or a 0-d integer array. Booleans and floats
            do not count.

    Example:
        >>> integer(np.uint8(200)), integer(True), integer(2.0), integer(np.array([2]))
        (200, None, None, None)
    """
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is numeric or boolean, including the types of ml_dtypes.

    Args:
        dtype: The type.

    Example:
        >>> import ml_dtypes
        >>> [is_numeric(np.dtype(kind)) for kind in (bool, ml_dtypes.bfloat16, "U3", "M8[s]")]
        [True, True, False, False]
    """
    return dtype.kind in "biufc" or _is_extended(dtype)


def cast_numbers(array: Array, dtype: np.dtype[Any]) -> tuple[Array, Any]:
    """Converts numbers to another dtype, and finds the first one that it cannot represent.

    Rounding of floats, also to 0, is allowed. Numbers that overflow, wrap around or lose their
    fraction or imaginary part cannot be represented, nor can NaN as an integer.

    Args:
        array: Numbers of any type (see `is_numeric`).
        dtype: The target dtype.

    Returns:
        The converted array, and the first number that cannot be represented, or None.

    Example:
        >>> cast_numbers(np.array([3.0, 2.5, 300.0]), np.dtype(np.uint8))[1].item()
        2.5
        >>> cast_numbers(np.array([0.5, 2049.0]), np.dtype(np.float16))
        (array([5.000e-01, 2.048e+03], dtype=float16), None)
    """
    if array.dtype == dtype:
        return array, None
    given = array.astype(np.float64) if _is_extended(array.dtype) else array
    lost = np.zeros(array.shape, bool)
    if array.dtype.kind == "c" and dtype.kind != "c":
        lost |= array.imag != 0  # also true for NaN
        given = array.real
    with np.errstate(all="ignore"):
        result = given.astype(dtype)
        comparable = result.astype(np.float64) if _is_extended(dtype) else result
        if _is_float(dtype):
            lost |= np.isfinite(given) & ~np.isfinite(comparable)
        elif given.dtype.kind in "biu":
            # Wrapping around twice restores the number, but the sign in between differs.
            back = comparable.astype(given.dtype)
            lost |= (back != given) | ((comparable < 0) != (given < 0))
        else:
            # In C, casting a float that is out of range for the integer type is undefined.
            wide = given.astype(np.promote_types(given.dtype, np.float64))
            low, high = _range(dtype)
            lost |= ~((wide >= low) & (wide < high) & (wide == np.trunc(wide)))
    return result, array[lost].flat[0] if lost.any() else None


def _is_extended(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is from ml_dtypes."""
    return dtype.kind == "V" and np.can_cast(dtype, np.float64)


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fc" or (
        _is_extended(dtype) and not dtype.name.startswith(("int", "uint"))
    )


def _range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Returns the smallest integer of a dtype, and the largest plus 1, both as exact floats."""
    if dtype.kind == "b":
        return 0.0, 2.0
    name = dtype.name
    bits = int(name.removeprefix("u").removeprefix("int"))
    return (0.0, 2.0**bits) if name.startswith("u") else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1))


def overwrite(memory: Array, value: Array) -> None:
    """Writes a value into an array.

    Zeros are not written over zeros, because a system gives memory to a process when it is written
    to. Moments that start from zeros need none until the first step.

    Args:
        memory: The array.
        value: What it gets: an array that numpy broadcasts.

    Example:
        >>> memory = np.empty(2)
        >>> overwrite(memory, np.ones(1))
        >>> memory.tolist()
        [1.0, 1.0]
    """
    if not (_is_zero(value) and _is_zero(memory)):
        memory[...] = value


def _is_zero(array: Array) -> bool:
    """Whether all bits of an array are zero, as far as that is known quickly."""
    if not array.flags.c_contiguous or array.dtype.hasobject:
        return False
    return not array.reshape(-1).view(np.bool_).any()


def plain(value: Any) -> int | float | None:
    """Returns a computed number as a Python int or float, and None for anything else.

    Args:
        value: The return value of a function: a number of Python, numpy or another library, a
            boolean, or an array of one number. Strings are not numbers. 64-bit integers stay
            integers.

    Example:
        >>> plain(np.float32(0.5)), plain(np.array(3)), plain(np.True_), plain("0.5")
        (0.5, 3, 1, None)
    """
    if value is np.ma.masked:  # its `item` is 0.0
        return None
    try:
        found = value.item() if hasattr(value, "item") else value
        if isinstance(found, Integral) and -(2**63) <= int(found) < 2**63:
            return int(found)
        return float(found) if isinstance(found, SupportsFloat) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):  # PyTorch raises the last one
        return None
