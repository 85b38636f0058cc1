"""Metrics of numbers, summed in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ortops.metrics.metric import Array, StreamingMetric

__all__ = ["R2", "MeanAbsoluteError", "MeanSquaredError", "RootMeanSquaredError"]


def _check(metric: StreamingMetric, outputs: Array, targets: Array) -> None:
    if outputs.shape != targets.shape:
        raise metric.wrong(
            f"outputs have shape {list(outputs.shape)}, and targets {list(targets.shape)}; one "
            "shape is accepted (accuracy compares classes with labels)"
        )


@dataclass
class MeanAbsoluteError(StreamingMetric):
    """The mean of |outputs − targets| over all elements that count; NaN if one is.

    Example:
        >>> error = MeanAbsoluteError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        >>> error.result()
        0.5
    """

    def update(self, outputs: Array, targets: Array) -> None:
        """See `StreamingMetric`."""
        _check(self, outputs, targets)
        kept = self.counts(targets)
        errors = self.errors(outputs.astype(np.float64)[kept] - targets[kept])
        self._sum += float(errors.sum())
        self._count += errors.size

    def errors(self, differences: Array) -> Array:
        """Returns what is averaged."""
        return np.abs(differences)

    def result(self) -> float:
        """Returns the mean."""
        return self._sum / self._count if self._count else math.nan

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._sum, self._count = 0.0, 0


@dataclass
class MeanSquaredError(MeanAbsoluteError):
    """The mean of (outputs − targets)² over all elements that count; NaN if one is.

    Example:
        >>> error = MeanSquaredError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        >>> error.result()
        2.0
    """

    def errors(self, differences: Array) -> Array:
        """Returns what is averaged."""
        return np.square(differences)


@dataclass
class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean squared error.

    Example:
        >>> error = RootMeanSquaredError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        >>> round(error.result(), 4)
        1.4142
    """

    def result(self) -> float:
        """Returns the root of the mean of all batches."""
        return math.sqrt(super().result())


@dataclass
class R2(StreamingMetric):
    """The coefficient of determination, 1 − Σ (t − y)² / Σ (t − mean t)².

    Of several columns (axis 1; further axes are rows) the mean, as in scikit-learn; as there, a
    column of equal targets has 1 where outputs are the same, else 0, and NaN is that of less than
    two rows. NaN among numbers that count makes it NaN.

    Example:
        >>> r2 = R2()
        >>> r2.update(np.array([2.5, 0.0]), np.array([3.0, -0.5]))
        >>> r2.update(np.array([2.0, 8.0]), np.array([2.0, 7.0]))
        >>> round(r2.result(), 4)
        0.9486

    Source:
        Chan, Golub and LeVeque, 1983 (doi:10.1080/00031305.1983.10483115), the sums of parts.
    """

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._seen: bool = False

    def update(self, outputs: Array, targets: Array) -> None:
        """See `StreamingMetric`."""
        _check(self, outputs, targets)
        if outputs.ndim < 2:
            outputs, targets = outputs.reshape(-1, 1), targets.reshape(-1, 1)
        y, t = (
            np.moveaxis(each, 1, -1).reshape(-1, each.shape[1]).astype(np.float64)
            for each in (outputs, targets)
        )
        if not t.size:
            return
        kept = np.ones(t.shape) if self.ignored is None else (t != self.ignored).astype(np.float64)
        if not self._seen:
            columns = t.shape[1]
            self._count, self._mean, self._spread, self._error = np.zeros((4, columns))
            self._origin = np.take_along_axis(t, kept.argmax(axis=0)[None], axis=0)[0]
            self._seen = True
        elif t.shape[1] != len(self._count):
            raise self.wrong(
                f"batches of {len(self._count)} and of {t.shape[1]} columns were given"
            )
        self._error += np.where(kept > 0, np.square(t - y), 0).sum(axis=0)
        # From the first target on: equal targets have a spread of 0, without rounding.
        shifted = np.where(kept > 0, t - self._origin, 0)
        count = kept.sum(axis=0)
        mean = shifted.sum(axis=0) / np.maximum(count, 1)
        spread = np.where(kept > 0, np.square(shifted - mean), 0).sum(axis=0)
        total = self._count + count
        step = mean - self._mean
        share = count / np.maximum(total, 1)
        self._spread += spread + np.square(step) * self._count * share
        self._mean += step * share
        self._count = total

    def result(self) -> float:
        """Returns the coefficient."""
        if not self._seen or (self._count < 2).any():
            return math.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1 - self._error / self._spread
        flat = self._spread == 0
        found[flat] = np.where(self._error[flat] == 0, 1.0, self._error[flat] * 0)
        return float(found.mean())
