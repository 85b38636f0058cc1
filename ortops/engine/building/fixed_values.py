"""Recognizes initializers that hold a table of numbers, which no training produced.

Spectrograms are matrix products or convolutions with windowed cosines, mel scales are products with
triangular filters, and expected values are products with the numbers 0 … n. Detectors multiply
distances by the sizes of the cells of grids, and add them to the centers of cells. Exporters write
these tables as initializers, in the places of weights, as well as masks, the identity, and kernels
of filters. What is drawn at random, or trained, is none of these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

_SHORTEST = 8  # fewer numbers look like a table by chance
_SAMPLES = 32
_MOST_GRIDS = 6
_FEWEST = 6  # rows with fewer turns are equal by chance
_WIDEST = 2**14  # no position embedding has more features, but tables of embeddings have
_MASKING = 1000  # numbers like it are added to scores, to make them vanish


def table_kind(values: npt.NDArray[Any]) -> str:
    """Returns what a table of numbers holds; empty if the numbers may be learned.

    Args:
        values: Floating-point numbers of any shape; dimensions of size 1 do not count.

    Returns:
        ``"equally spaced numbers"``, ``"a window function"``, ``"cosines"``, ``"sines and
        cosines"``, ``"the basis of a Fourier transform"``, ``"triangular filters"``,
        ``"multiples of positions"``, ``"anchor points"``, ``"sizes of cells"``, or an empty text.

    Example:
        >>> table_kind(np.arange(16.0)), table_kind(np.hanning(400))
        ('equally spaced numbers', 'a window function')
        >>> table_kind(np.random.default_rng(0).standard_normal((16, 16)))
        ''
    """
    table = values.reshape([size for size in values.shape if size != 1])
    sines = table.ndim in (2, 3) and any(map(_is_sines, _sides(table)))
    return _kind(table) or ("sines and cosines" if sines else "")


def _kind(table: npt.NDArray[Any]) -> str:
    shape = table.shape
    if len(shape) not in (1, 2) or max(shape) < _SHORTEST:
        return ""
    if table.ndim == 1:
        return _vector_kind(table)
    if min(shape) == 2:
        rows = _float64(table if shape[0] == 2 else table.T)
        return "anchor points" if _is_grid(*rows) or _is_grid(*rows[::-1]) else ""
    sides = [rows for rows in (table, table.T) if rows.shape[1] >= _SHORTEST and len(rows) > 2]
    kinds = (kind for kind, is_kind in _MATRICES.items() if any(map(is_kind, sides)))
    return next(kinds, "")


def mask_kind(values: npt.NDArray[Any]) -> str:
    """Returns whether numbers are a mask; empty if not.

    Returns:
        ``"the identity"``, ``"a permutation"``, ``"a triangular mask"``, ``"a mask of 0 and 1"``,
        the last with a number beyond ±1000 or minus infinity in place of 1, or an empty text.

    Example:
        >>> mask_kind(np.eye(3)), mask_kind(np.tri(3)), mask_kind(np.ones(3))
        ('the identity', 'a triangular mask', '')
    """
    if len(np.unique(_float64(values.flat[:_SAMPLES]))) > 2:
        return ""
    marked = values != 0
    kept = values[marked]
    number = float(kept[0]) if 0 < kept.size < values.size else 0.0
    if not (number == 1 or abs(number) >= _MASKING) or not (kept == kept[0]).all():
        return ""
    square = marked.reshape([size for size in values.shape if size != 1])
    if number == 1 and square.ndim == 2 and all((square.sum(axis) == 1).all() for axis in (0, 1)):
        return "the identity" if square.diagonal().all() else "a permutation"
    is_square = square.ndim == 2 and square.shape[0] == square.shape[1]
    ones = np.ones_like(square)
    is_half = is_square and any((square == half(ones)).all() for half in (np.tril, np.triu))
    return "a triangular mask" if number == 1 and is_half else f"a mask of 0 and {number:g}"


def is_fixed_kernel(values: npt.NDArray[Any], rank: int) -> bool:
    """Whether all channels have one kernel times a number, symmetric or antisymmetric on each axis.

    Kernels that blur, interpolate or differentiate are, and their transposes count as equal. Zeros
    and ones are no such kernels, as learned weights may start there.

    Args:
        values: The weight of a convolution.
        rank: The number of its spatial axes, which are the last ones.

    Example:
        >>> sobel = np.outer([1, 2, 1], [1, 0, -1])
        >>> is_fixed_kernel(np.stack([sobel, 2 * sobel.T])[:, None], 2)
        True
        >>> is_fixed_kernel(np.arange(9.0).reshape(1, 1, 3, 3), 2)
        False
    """
    spatial = values.shape[values.ndim - rank :]
    if not 0 < rank <= values.ndim or math.prod(spatial) < 2 or not values.size:
        return False
    kernels = values.reshape(-1, *spatial)
    if not _is_symmetric(_float64(kernels[0]), values):  # before gigabytes are read
        return False
    flat = _float64(kernels).reshape(len(kernels), -1)
    largest = flat[np.abs(flat).max(axis=1).argmax()].reshape(spatial)
    error = 2 * _epsilon(values) * np.abs(largest).max()
    if (values == 1).all() or not 0 < error < math.inf or not _is_symmetric(largest, values):
        return False
    others = np.ones(len(flat), bool)
    for axes in itertools.permutations(range(rank)):
        if largest.transpose(axes).shape == spatial:
            form = largest.transpose(axes).ravel()
            factors = flat @ form / (form @ form)
            others &= np.abs(flat - factors[:, None] * form).max(axis=1) > error
    return not others.any()


def is_geometric(values: npt.NDArray[Any]) -> bool:
    """Whether numbers grow or fall by one factor, as the frequencies of position embeddings."""
    x = _float64(values).ravel()
    if len(x) < 3 or not (x > 0).all():
        return False
    steps = np.diff(np.log(x))
    return bool(abs(steps[0]) > 1e-2 and np.ptp(steps) <= max(1e-4, 4 * _epsilon(values)))


def _is_symmetric(kernel: Array, values: npt.NDArray[Any]) -> bool:
    error = 2 * _epsilon(values) * np.abs(kernel).max()
    return all(
        min(np.abs(kernel - flipped).max(), np.abs(kernel + flipped).max()) <= error
        for flipped in (np.flip(kernel, axis) for axis in range(kernel.ndim))
    )


def _sides(table: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Returns a table with the features on the last axis, whichever they are."""
    return [table.reshape(-1, table.shape[-1]), table.reshape(len(table), -1).T]


def _is_sines(rows: npt.NDArray[Any]) -> bool:
    """Whether rows are sines and cosines of positions times some frequencies.

    Each pair of a sine and a cosine is a point of a circle, which turns by the same angle from row
    to row, or by a few angles if the positions are those of a grid.
    """
    size = rows.shape[1] // 2 * 2
    x = rows[: 2 * _SAMPLES, :size]
    if len(x) < _FEWEST or not 4 <= size <= _WIDEST:
        return False
    halves = [x.reshape(len(x), part, 2, -1) for part in (1, 2) if size % (2 * part) == 0]
    pairs = [(x[:, ::2], x[:, 1::2]), *((half[:, :, 0], half[:, :, 1]) for half in halves)]
    pairs = [(sines, cosines) for sines, cosines in pairs if _turns(sines[-1:], cosines[-1:])]
    return any(_turns(sines, cosines) for sines, cosines in pairs)


def _turns(sines: Array, cosines: Array) -> bool:
    """Whether points, one for each row and frequency, lie on a circle and turn by few angles."""
    with np.errstate(invalid="ignore"):  # infinite numbers, which are refused below
        points = (_float64(cosines) + 1j * _float64(sines)).reshape(len(sines), -1)
    points = points[points.any(axis=1)]  # without rows of padding
    radius = float(np.abs(points).max(initial=0))
    if not 0 < radius < math.inf or np.ptp(np.abs(points)) > 2e-3 * radius:
        return False
    if len(points) == 1:
        return True
    turns = points[1:] / points[:-1]
    angles = [len(np.unique(np.angle(turn * turn[0].conj()).round(2))) for turn in turns.T]
    kinds = len(np.unique(np.abs(np.round(points.imag / radius, 2))))
    return max(angles) <= max(3, len(turns) // 3) and kinds > 4


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


def _is_multiples(rows: npt.NDArray[Any]) -> bool:
    """Whether each row is 0, s, 2 s, …, as the biases of attention that grow with the distance."""
    return not rows[:, 0].any() and all(_cosine(row) == 0 for row in rows)


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
    "multiples of positions": _is_multiples,
}
