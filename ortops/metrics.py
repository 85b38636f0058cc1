"""Metrics: numbers for people, computed with numpy from what the loss looks at.

A metric is a function ``(outputs, targets) -> float`` of the arrays of one data set: ``outputs`` is
the tensor that the loss looks at (logits, where it reads those), classes on axis 1, and ``targets``
what the loss compares it with. One that has a keyword ``kind`` or ``ignored`` is told what the
numbers are, and which label does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import OrtopsError, did_you_mean

__all__ = ["Metric", "accuracy", "mean_absolute_error", "measure", "resolve"]

Array: TypeAlias = npt.NDArray[Any]
Metric: TypeAlias = Callable[..., float]


def accuracy(
    outputs: Array, targets: Array, *, kind: str = "logits", ignored: int | None = None
) -> float:
    """Returns the share of right answers.

    Args:
        outputs: Numbers for each class of shape (N, C, …), of which the largest counts; or numbers
            of the shape of the targets, which tell whether something is so; or class labels.
        targets: Integer labels of shape (N, …), or targets of 0 and 1.
        kind: What outputs of the shape of the targets are: ``"logits"`` mean yes above 0,
            ``"log_probabilities"`` above log ½, ``"probabilities"`` and ``"values"`` above ½.
        ignored: A label that does not count.

    Example:
        >>> accuracy(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        0.5
        >>> accuracy(np.array([0.1, 0.9]), np.array([0.0, 1.0]), kind="probabilities")
        1.0
    """
    if outputs.ndim == targets.ndim + 1:
        right = outputs.argmax(axis=1) == targets
    elif outputs.dtype.kind in "iub":
        right = outputs == targets
    else:
        border = {"logits": 0.0, "log_probabilities": np.log(0.5)}.get(kind, 0.5)
        right = (outputs > border) == (targets > 0.5)
    counted = right if ignored is None else right[targets != ignored]
    return float(np.mean(counted)) if counted.size else float("nan")


def mean_absolute_error(outputs: Array, targets: Array) -> float:
    """Returns the average distance between outputs and targets of one shape.

    Raises:
        OrtopsError: If their shapes differ.

    Example:
        >>> mean_absolute_error(np.array([1.0, 2.0]), np.array([1.0, 3.0]))
        0.5
    """
    if outputs.shape != targets.shape:
        raise OrtopsError(
            f"metric 'mean_absolute_error': outputs have shape {list(outputs.shape)}, and targets "
            f"{list(targets.shape)}; one shape is accepted (accuracy compares classes with labels)"
        )
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
        elif isinstance(metric, str) and metric in METRICS:
            found[metric] = METRICS[metric]
        elif not isinstance(metric, str):
            raise OrtopsError(
                f"metric {metric!r}: the name of a metric, or a function, is accepted"
            )
        else:
            raise OrtopsError(f"metric '{metric}' is not known; {did_you_mean(metric, METRICS)}")
    return found


def measure(
    metric: Metric, outputs: Array, targets: Array, *, axis: int | None, **known: object
) -> float:
    """Computes a metric.

    Args:
        metric: The metric.
        outputs: What the loss looks at.
        targets: What it compares it with.
        axis: The axis of the classes, if any.
        **known: What else is known of the outputs, for a metric that has such keywords.
    """
    if outputs.ndim == targets.ndim + 1 and axis is not None:
        outputs = np.moveaxis(outputs, axis, 1)
    try:
        parameters = inspect.signature(metric).parameters
    except (TypeError, ValueError):  # one that is not written in Python
        return float(metric(outputs, targets))
    asked = {
        name: value
        for name, value in known.items()
        if name in parameters and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    }
    return float(metric(outputs, targets, **asked))
