"""Recognizes initializers that hold a table of numbers, which no training produced.

Spectrograms are matrix products or convolutions with windowed cosines, mel scales are products with
triangular filters, and expected values are products with the numbers 0 … n. Detectors multiply
distances by the sizes of the cells of grids, and add them to the centers of cells. Exporters write
these tables as initializers, in the places of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["table_kind"]

Array: TypeAlias = npt.NDArray[np.float64]

_SHORTEST = 8  # fewer numbers look like a table by chance
_SAMPLES = 32
_MOST_GRIDS = 6


def table_kind(values: npt.NDArray[Any]) -> str:
    """Returns what a table of numbers holds; empty if the numbers may be learned.

    Args:
        values: Floating-point numbers of any shape; dimensions of size 1 do not count.

    Returns:
        ``"equally spaced numbers"``, ``"a window function"``, ``"cosines"``, ``"the basis of a
        Fourier transform"``, ``"triangular filters"``, ``"anchor points"``, ``"sizes of cells"``,
        or an empty text.

    Example:
        >>> table_kind(np.arange(16.0)), table_kind(np.hanning(400))
        ('equally spaced numbers', 'a window function')
        >>> table_kind(np.random.default_rng(0).standard_normal((16, 16)))
        ''
    """
    shape = tuple(size for size in values.shape if size != 1)
    if len(shape) not in (1, 2) or max(shape) < _SHORTEST:
        return ""
    table = values.reshape(shape)
    if table.ndim == 1:
        return _vector_kind(table)
    if min(shape) == 2:
        rows = _float64(table if shape[0] == 2 else table.T)
        return "anchor points" if _is_grid(*rows) or _is_grid(*rows[::-1]) else ""
    sides = [rows for rows in (table, table.T) if rows.shape[1] >= _SHORTEST and len(rows) > 2]
    kinds = (kind for kind, is_kind in _MATRICES.items() if any(map(is_kind, sides)))
    return next(kinds, "")


def _vector_kind(values: npt.NDArray[Any]) -> str:
    found = _cosine(values)
    if found is None:
        return "sizes of cells" if _is_doubling(_float64(values)) else ""
    if found == 0:
        return "equally spaced numbers"
    ends = np.abs(_float64(values[[0, 1, -1]]))
    middle = abs(float(values[len(values) // 2]))
    return "a window function" if ends.max() < 0.2 * middle else "cosines"


def _is_grid(x: Array, y: Array) -> bool:
    """Whether points are those of grids, row by row, and one grid behind the other."""
    along, down = np.diff(x), np.diff(y)
    (ends,) = np.nonzero(down)  # of rows
    inner = np.delete(along, ends)
    if len(ends) > len(x) // 2 or inner.min() <= 0:
        return False
    steps = along[np.maximum(ends - 1, 0)]
    others = np.count_nonzero(np.abs(down[ends] - steps) > 1e-3 * np.abs(steps))
    kinds = len(np.unique(inner.round(3)))
    return bool(len(ends) > 0 and others <= _MOST_GRIDS and kinds <= _MOST_GRIDS)


def _is_doubling(values: Array) -> bool:
    """Whether there are several numbers, each twice the one before and at most as often."""
    steps, counts = np.unique(values, return_counts=True)
    runs = 1 + np.count_nonzero(np.diff(values))
    is_known = 2 <= len(steps) == runs <= _MOST_GRIDS and counts[-1] > 1
    doubled = (steps[1:] == 2 * steps[:-1]).all() and (counts[1:] < counts[:-1]).all()
    return bool(is_known and doubled)


def _cosine(values: npt.NDArray[Any]) -> float | None:
    """Returns the angle ω of numbers a + b · cos(ω n + φ); 0 for equally spaced ones, else None.

    These are the sequences with x[n + 1] + x[n - 1] = c · x[n] + d, with c = 2 · cos ω. Long ones
    are sampled, as the smoother a sequence is, the better it fits by itself.
    """
    x = _sampled(values)
    span, noise = float(np.ptp(x)), 4 * _epsilon(values) * float(np.abs(x).max())
    if len(x) < _SHORTEST or not noise < 0.01 * span < math.inf:  # it could be anything
        return None
    sums, inner = x[2:] + x[:-2], x[1:-1]
    bend = float(np.abs(sums - 2 * inner).max())
    if bend <= 1e-4 * span + noise:
        return 0.0
    centered = inner - inner.mean()
    power = float(centered @ centered)
    if power == 0:
        return None
    c = float(centered @ (sums - sums.mean())) / power
    error = sums - sums.mean() - c * centered
    fits = abs(c) < 2 and np.abs(error).max() <= 1e-3 * bend + noise
    return math.acos(c / 2) if fits else None


def _sampled(values: npt.NDArray[Any]) -> Array:
    return _float64(values[:: max(1, len(values) // _SAMPLES)])


def _is_cosines(rows: npt.NDArray[Any]) -> bool:
    """Whether all rows are cosines, most of them of different frequencies, or constant."""
    found = set()
    for row in rows:
        x = _sampled(row)
        if np.ptp(x) > 400 * _epsilon(row) * np.abs(x).max():  # else it is constant, but for noise
            angle = _cosine(row)
            if angle is None:
                return False
            found.add(round(angle, 3))
    return len(found - {0.0}) > max(2, len(rows) // 8)


def _is_fourier(rows: npt.NDArray[Any]) -> bool:
    """Whether rows are window · cos(k θ), window · sin(k θ), or the ones and then the others."""
    count, size = rows.shape
    halves = [rows] if count % 2 or count < 6 else [rows, rows[: count // 2], rows[count // 2 :]]
    whole, *parts = (_is_windowed(half, size) for half in halves)
    return whole or (len(parts) == 2 and all(parts))


def _is_windowed(rows: npt.NDArray[Any], size: int) -> bool:
    angle = 2 * np.pi / size * np.arange(size)
    error = 1e-3 * float(np.abs(_float64(rows[:3])).max())
    if not 0 < error < math.inf:
        return False

    def fits(number: int, window: Array, wave: Callable[..., Array]) -> bool:
        expected: Array = np.abs(window * wave(number * angle))
        return float(np.abs(np.abs(_float64(rows[number])) - expected).max()) <= error

    window = _float64(rows[0])
    if np.abs(window).max() > error:
        return all(fits(number, window, np.cos) for number in range(1, len(rows)))
    sine = np.sin(angle)
    window = np.where(np.abs(sine) > 1e-3, _float64(rows[1]) / np.where(sine == 0, 1, sine), 0.0)
    return all(fits(number, window, np.sin) for number in range(2, len(rows)))


def _is_triangles(rows: npt.NDArray[Any]) -> bool:
    """Whether rows are triangles, one behind the other, with zeros around them."""
    if len(rows) < _SHORTEST or np.count_nonzero(rows[0]) > rows.shape[1] // 2:
        return False
    peaks, widths = [], []
    for row in rows:
        triangle = _float64(row)
        (places,) = np.nonzero(triangle)
        if not len(places):
            continue
        first, last, peak = int(places[0]), int(places[-1]), int(triangle.argmax())
        if triangle[peak] < 0 or last - first + 1 != len(places):
            return False
        for side in (triangle[first:peak], triangle[peak + 1 : last + 1][::-1]):
            slopes = np.diff(side)  # the peak of the triangle lies between two bins
            if len(side) > 1 and (slopes.min() <= 0 or np.ptp(slopes) > 1e-3 * triangle[peak]):
                return False
        peaks.append(peak)
        widths.append(len(places))
    return bool(widths) and max(widths) > 3 and peaks == sorted(peaks)


def _float64(values: npt.NDArray[Any]) -> Array:
    with np.errstate(invalid="ignore"):  # signalling NaNs, which stay NaN
        return np.asarray(values).astype(np.float64)


def _epsilon(values: npt.NDArray[Any]) -> float:
    """Returns the distance of 1 from the next number of a type."""
    return _EPSILONS.get(values.dtype.name, 2.0**-7)


_EPSILONS = {"float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}

_MATRICES: dict[str, Callable[[npt.NDArray[Any]], bool]] = {
    "the basis of a Fourier transform": _is_fourier,
    "cosines": _is_cosines,
    "triangular filters": _is_triangles,
}
