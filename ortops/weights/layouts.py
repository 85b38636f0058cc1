"""Compares tensors across layouts and dtypes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.errors import ModelError

_PRECISIONS = (np.dtype("f8"), np.dtype("f4"), np.dtype("f2"), ir.DataType.BFLOAT16.numpy())
_PROBES = 16  # elements to compare before whole tensors
_MOST_AXES = 5
_FOLDED_ACCURACY = 1e-4  # relative; folding rounds each weight once or twice
_LEAST = 4  # elements that are hardly another number scaled and shifted by accident


def squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape without its axes of size 1."""
    return tuple(size for size in shape if size != 1)


def orders(given: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the orders of axes in which a tensor fits a shape, up to axes of size 1.

    The first one is the empty one (no change) if it fits, and the second one the transposed one.
    """
    found: list[tuple[int, ...]] = []
    if squeezed(given) == squeezed(wanted):
        found.append(())
    rank = len(given)
    if len(wanted) == rank and 2 <= rank <= _MOST_AXES:
        axes = tuple(range(rank))
        every = dict.fromkeys((axes[::-1], *itertools.permutations(axes)))
        found += [o for o in every if o != axes and [given[axis] for axis in o] == list(wanted)]
    return found


def is_informative(array: Array) -> bool:
    """Whether equality with an array says anything: it has different elements."""
    return bool(array.size > 1 and (array != array[(0,) * array.ndim]).any())


def same(first: Array, second: Array) -> bool:
    """Whether two arrays are equal up to axes of size 1, in the less precise of their dtypes."""
    if squeezed(first.shape) != squeezed(second.shape):
        return False
    first, second = np.squeeze(first), np.squeeze(second)
    if first.dtype != second.dtype:
        kinds = [a.dtype for a in (first, second)]
        if any(kind not in _PRECISIONS for kind in kinds):
            return False
    places = np.linspace(0, max(first.size - 1, 0), min(first.size, _PROBES)).astype(np.int64)
    probe = np.unravel_index(places, first.shape)
    return _equal(first[probe], second[probe]) and _equal(first, second)


def _equal(first: Array, second: Array) -> bool:
    if first.dtype != second.dtype:
        coarse = max(first.dtype, second.dtype, key=_PRECISIONS.index)
        with np.errstate(over="ignore"):
            first, second = first.astype(coarse), second.astype(coarse)
    return np.array_equal(first, second)


def scaled_channels(given: Array, found: Array) -> bool:
    """Whether an array is another one with each index of the first axis scaled by a number."""
    if given.shape != found.shape or given.ndim < 2 or given.size == len(given):
        return False
    rows, others = (a.astype(np.float64).reshape(len(a), -1) for a in (given, found))
    factors = (rows * others).sum(axis=1) / np.maximum((rows * rows).sum(axis=1), 1e-300)
    close = np.allclose(others, factors[:, None] * rows, rtol=0, atol=_accuracy(others))
    return bool(close and (factors != 0).any())


def is_computed(given: Array, found: Array) -> bool:
    """Whether an array is another one scaled and shifted, as a whole or for each first index.

    A part of large arrays is compared.
    """
    count = len(given) if given.ndim > 1 and given.size >= _LEAST * len(given) else 1
    rows, others = (a.reshape(count, -1)[:64, :4096] for a in (given, found))
    coarse = max(rows.dtype, others.dtype, key=_PRECISIONS.index)
    rows, others = (a.astype(np.float64) for a in (rows, others))
    if rows.size < _LEAST or not (np.isfinite(rows).all() and np.isfinite(others).all()):
        return False
    accuracy = _FOLDED_ACCURACY * float(np.ptp(others))
    accuracy += 2 * float(np.spacing(np.abs(others).max().astype(coarse)))
    if accuracy * 50 > np.ptp(others) or np.allclose(rows, others, rtol=0, atol=accuracy):
        return False
    centered = rows - rows.mean(axis=1, keepdims=True)
    factors = (centered * others).sum(axis=1) / np.maximum((centered**2).sum(axis=1), 1e-300)
    fitted = factors[:, None] * centered + others.mean(axis=1, keepdims=True)
    return bool(np.allclose(others, fitted, rtol=0, atol=accuracy) and (factors != 0).any())


def _accuracy(array: Array) -> float:
    return _FOLDED_ACCURACY * float(np.abs(array).max(initial=0))


def cast(array: Array, dtype: np.dtype[np.generic], shape: Sequence[int], what: str) -> Array:
    """Returns an array in another dtype and in a shape that differs in axes of size 1.

    Raises:
        ModelError: If the shape does not fit, the dtype is not a floating-point one, or a finite
            number becomes infinite.
    """
    for kind in (array.dtype, dtype):
        if kind not in _PRECISIONS:
            raise ModelError(f"{what} must be floating-point numbers, got {kind}")
    if squeezed(array.shape) != squeezed(shape) or array.size != math.prod(shape):
        raise ModelError(f"{what} must have the shape {list(shape)}, got {list(array.shape)}")
    with np.errstate(over="ignore"):
        result = array.astype(dtype, copy=False)
    if result is not array and (np.isinf(result) & ~np.isinf(array)).any():
        raise ModelError(f"{what} are too large for {dtype}; use a wider dtype")
    return result.reshape(shape)
