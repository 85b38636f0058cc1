"""Regression metrics, accumulated in float64."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops._common.arguments import choice
from ortops.metrics.metric import Array, Mean, StreamingMetric, check_same_shape, columns

__all__ = ["R2", "MeanAbsoluteError", "MeanSquaredError", "RootMeanSquaredError"]


def _columns(
    metric: StreamingMetric, outputs: Array, targets: Array, sample_weight: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Returns outputs and targets in columns, which of them count, and their weights."""
    check_same_shape(metric, outputs, targets)
    weights = metric.weights_like(targets, sample_weight)
    y, t = (each.astype(np.float64) for each in columns(outputs, targets, 1))
    counted = np.ones(t.shape)
    if metric.ignored is not None:
        counted *= t != metric.ignored
    kept = counted if weights is None else counted * columns(weights, targets, 1)[0]
    return y, t, counted, kept


@dataclass
class MeanAbsoluteError(Mean):
    """The mean of |outputs − targets| over all elements that are not ignored; NaN if one is.

    Example:
        >>> error = MeanAbsoluteError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        >>> error.result()
        0.5
    """

    _other_names: ClassVar[tuple[str, ...]] = ("mae", "l1")

    higher_is_better = False
    fits = frozenset(("numbers",))

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        check_same_shape(self, outputs, targets)
        kept = self.counts(targets)
        errors = self.errors(outputs.astype(np.float64)[kept] - targets[kept])
        weights = self.weights_like(targets, sample_weight)
        self.add(errors, None if weights is None else weights[kept])

    def errors(self, differences: Array) -> Array:
        """Returns the errors to average."""
        return np.abs(differences)


@dataclass
class MeanSquaredError(MeanAbsoluteError):
    """The mean of (outputs − targets)² over all elements that are not ignored; NaN if one is.

    Example:
        >>> error = MeanSquaredError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        >>> error.result()
        2.0
    """

    _other_names = ("mse",)

    def errors(self, differences: Array) -> Array:
        """Returns the errors to average."""
        return np.square(differences)


@dataclass
class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean squared error.

    It is one root of the mean over all elements, as in Keras, also for several columns.

    Args:
        multioutput: ``"uniform_average"`` is the mean of the roots of the columns (axis 1; further
            axes are rows), as scikit-learn's function has it by default.

    Example:
        >>> error = RootMeanSquaredError()
        >>> error.update(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
        >>> round(error.result(), 4)
        1.4142
    """

    _other_names = ("rmse",)

    _: KW_ONLY
    multioutput: str | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.multioutput is not None:
            choice(self.named("multioutput"), self.multioutput, ("uniform_average",))

    def reset(self) -> None:
        """See `StreamingMetric`."""
        super().reset()
        self._totals: Array = np.zeros((2, 0))  # squares and weights of each column

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if self.multioutput is None:
            super().update(outputs, targets, sample_weight)
            return
        y, t, _, kept = _columns(self, outputs, targets, sample_weight)
        squares = kept * np.where(kept > 0, np.square(t - y), 0)
        found = np.stack([squares.sum(axis=0), kept.sum(axis=0)])
        if not self._totals.size:
            self._totals = found
        elif self._totals.shape == found.shape:
            self._totals = self._totals + found
        else:
            raise self.wrong(
                f"batches have {self._totals.shape[1]} and {t.shape[1]} columns; the number must "
                "be the same"
            )

    def result(self) -> float:
        """Returns the root of the mean over all batches, or the mean of those of the columns."""
        if self.multioutput is None:
            return math.sqrt(super().result())
        if not self._totals.size or not self._totals[1].all():
            return math.nan
        return float(np.sqrt(self._totals[0] / self._totals[1]).mean())


@dataclass
class R2(StreamingMetric):
    """The coefficient of determination, 1 − Σ (t − y)² / Σ (t − mean t)².

    For several columns (axis 1; further axes are rows), the result is the mean, as in scikit-learn.
    As there, a column with equal targets has 1 if its outputs are the same, else 0, and the result
    is NaN for less than two rows. A NaN that is not ignored makes the result NaN.

    Example:
        >>> r2 = R2()
        >>> r2.update(np.array([2.5, 0.0]), np.array([3.0, -0.5]))
        >>> r2.update(np.array([2.0, 8.0]), np.array([2.0, 7.0]))
        >>> round(r2.result(), 4)
        0.9486

    Source:
        Chan, Golub and LeVeque, 1983 (doi:10.1080/00031305.1983.10483115), for adding batches.
    """

    higher_is_better = True
    fits = frozenset(("numbers",))

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._seen: bool = False

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        y, t, counted, kept = _columns(self, outputs, targets, sample_weight)
        if not t.size:
            return
        if not self._seen:
            self._rows, self._count, self._mean, self._spread, self._error = np.zeros(
                (5, t.shape[1])
            )
            self._origin = np.take_along_axis(t, kept.argmax(axis=0)[None], axis=0)[0]
            self._seen = True
        elif t.shape[1] != len(self._count):
            raise self.wrong(
                f"batches have {len(self._count)} and {t.shape[1]} columns; the number must be the "
                "same"
            )
        self._rows += counted.sum(axis=0)
        self._error += (kept * np.where(kept > 0, np.square(t - y), 0)).sum(axis=0)
        # Relative to the first target, so that equal targets have a spread of exactly 0.
        shifted = np.where(kept > 0, t - self._origin, 0)
        count = kept.sum(axis=0)
        mean = (kept * shifted).sum(axis=0) / np.where(count > 0, count, 1)
        spread = (kept * np.square(shifted - mean)).sum(axis=0)
        total = self._count + count
        step = mean - self._mean
        share = count / np.where(total > 0, total, 1)
        self._spread += spread + np.square(step) * self._count * share
        self._mean += step * share
        self._count = total

    def result(self) -> float:
        """Returns the coefficient."""
        if not self._seen or (self._rows < 2).any():
            return math.nan
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1 - self._error / self._spread
        flat = self._spread == 0
        found[flat] = np.where(self._error[flat] == 0, 1.0, self._error[flat] * 0)
        return float(found.mean())
