"""Metrics: numbers for people, computed with numpy from a model's outputs.

A metric is a function ``(outputs, targets) -> float`` of the arrays of one data set: ``outputs``
is the model's first output, ``targets`` what the loss compared it with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import OrtopsError, did_you_mean

__all__ = ["Metric", "accuracy", "mean_absolute_error", "resolve"]

Array: TypeAlias = npt.NDArray[Any]
Metric: TypeAlias = Callable[[Array, Array], float]


def accuracy(outputs: Array, targets: Array) -> float:
    """Returns the share of right answers.

    Args:
        outputs: Logits of shape (N, C, …), of which the largest counts, or of the shape of the
            targets, of which the sign counts.
        targets: Integer labels of shape (N, …), or targets of 0 and 1.

    Example:
        >>> accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        0.5
    """
    if outputs.ndim == targets.ndim + 1:
        return float(np.mean(outputs.argmax(axis=1) == targets))
    return float(np.mean((outputs > 0) == (targets > 0.5)))


def mean_absolute_error(outputs: Array, targets: Array) -> float:
    """Returns the average distance between outputs and targets of one shape.

    Example:
        >>> mean_absolute_error(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        0.5
    """
    return float(np.mean(np.abs(outputs - targets)))


METRICS: Mapping[str, Metric] = {
    "accuracy": accuracy,
    "mean_absolute_error": mean_absolute_error,
}


def resolve(metrics: Sequence[str | Metric]) -> dict[str, Metric]:
    """Returns metrics by name.

    Args:
        metrics: Names of the functions above, or functions of one's own.

    Raises:
        OrtopsError: If there is no metric of a name.
    """
    found: dict[str, Metric] = {}
    for metric in [metrics] if isinstance(metrics, str) else metrics:
        if callable(metric):
            found[getattr(metric, "__name__", type(metric).__name__)] = metric
        elif metric in METRICS:
            found[metric] = METRICS[metric]
        else:
            raise OrtopsError(f"metric '{metric}' is not known; {did_you_mean(metric, METRICS)}")
    return found
