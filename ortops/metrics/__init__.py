"""Metrics: numbers for people, computed with numpy from outputs of a model, batch by batch.

``session.evaluate(data, metrics=["accuracy", TopK(5), sklearn.metrics.f1_score])`` takes

- the name of a class below in snake_case, such as ``"root_mean_squared_error"``, for its defaults;
- an object of such a class. It streams: `StreamingMetric.update` takes a batch, and
  `StreamingMetric.result` gives the number for all of them, as if they were one. ``output=`` and
  ``target=`` say what it compares; a session works on a copy;
- any function of all outputs and targets, ``(outputs, targets)`` or scikit-learn's
  ``(y_true, y_pred)``, which keeps what it needs (see `Function`).

By default a metric looks at what the loss looks at (logits, where it reads those), and compares it
with what the loss does. Inputs that ``inputs=`` of the builder declares for a function of one's own
are no targets, unless they are named ``labels`` or ``targets``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ortops.errors import OrtopsError, did_you_mean
from ortops.metrics.classification import F1, Accuracy, IoU, Precision, Recall, TopK
from ortops.metrics.functions import Function, accuracy, mean_absolute_error
from ortops.metrics.metric import StreamingMetric
from ortops.metrics.ranking import AUC
from ortops.metrics.regression import (
    R2,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
)
from ortops.metrics.sequence import EditDistance, Perplexity

__all__ = [
    "AUC",
    "F1",
    "R2",
    "Accuracy",
    "EditDistance",
    "Function",
    "IoU",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Perplexity",
    "Precision",
    "Recall",
    "RootMeanSquaredError",
    "StreamingMetric",
    "TopK",
    "accuracy",
    "mean_absolute_error",
    "resolve",
]

Metric: TypeAlias = StreamingMetric | type[StreamingMetric] | Callable[..., Any]
"""What is accepted beside names."""

METRICS: Mapping[str, type[StreamingMetric]] = {
    "accuracy": Accuracy,
    "top_k": TopK,
    "precision": Precision,
    "recall": Recall,
    "f1": F1,
    "auc": AUC,
    "mean_absolute_error": MeanAbsoluteError,
    "mean_squared_error": MeanSquaredError,
    "root_mean_squared_error": RootMeanSquaredError,
    "r2": R2,
    "perplexity": Perplexity,
    "iou": IoU,
    "edit_distance": EditDistance,
}


def resolve(metrics: str | Metric | Sequence[str | Metric]) -> dict[str, StreamingMetric]:
    """Returns metrics by what they are called in results.

    Args:
        metrics: Names, objects and functions (see `ortops.metrics`), or one of these.

    Raises:
        OrtopsError: If there is no metric of a name, or two are called the same.

    Example:
        >>> sorted(resolve(["accuracy", TopK(5)]))
        ['accuracy', 'top_k']
    """
    found: dict[str, StreamingMetric] = {}
    single = isinstance(metrics, str | StreamingMetric) or callable(metrics)
    if not single and not isinstance(metrics, Sequence):
        raise OrtopsError(f"metrics is {metrics!r:.80}; a list of metrics is accepted")
    for metric in [metrics] if single else metrics:  # type: ignore[union-attr]
        made = _resolve(metric)
        if made.label in found or made.label == "loss":
            what = "the loss is named so" if made.label == "loss" else "another is named so"
            raise made.wrong(f"{what}; give it a name of its own with name=")
        found[made.label] = made
    return found


def _resolve(metric: Any) -> StreamingMetric:
    if isinstance(metric, StreamingMetric):
        return metric
    if isinstance(metric, type) and issubclass(metric, StreamingMetric):
        return metric()
    if isinstance(metric, str):
        if metric not in METRICS:
            raise OrtopsError(f"metric '{metric}' is not known; {did_you_mean(metric, METRICS)}")
        return METRICS[metric]()
    if callable(metric):
        return Function(metric)
    raise OrtopsError(f"metric {metric!r}: the name of a metric, or a function, is accepted")
