"""Metrics, accumulated over batches with numpy.

``session.evaluate(data, metrics=["accuracy", TopK(5), sklearn.metrics.f1_score])`` accepts

- the name of a class below in snake_case, for example ``"root_mean_squared_error"``, with default
  arguments; or its name in Keras or scikit-learn, such as ``"rmse"`` or ``"acc"``, if its meaning
  is clear. Results have the name that was given;
- an instance of such a class. `StreamingMetric.update` adds a batch, `StreamingMetric.result`
  returns the value for all batches, as if they were one. ``output=`` and ``target=`` choose the
  tensors to compare. A session works on a copy;
- any function of all outputs and targets, ``(outputs, targets)`` or scikit-learn's
  ``(y_true, y_pred)``. Outputs and targets are then kept in memory (see `Function`).

By default a metric compares the same tensors as the loss (logits, if the loss reads logits). Inputs
that ``inputs=`` of the builder declares for your own loss function are not targets, unless they are
named ``labels`` or ``targets``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ortops._common.other_names import declared, find_name, other_names
from ortops.errors import ArgumentError
from ortops.metrics import (
    classification,
    confusion,
    detection,
    ranking,
    regression,
    sequence,
)
from ortops.metrics.classification import *  # noqa: F403
from ortops.metrics.confusion import *  # noqa: F403
from ortops.metrics.detection import *  # noqa: F403
from ortops.metrics.functions import Function
from ortops.metrics.metric import StreamingMetric
from ortops.metrics.ranking import *  # noqa: F403
from ortops.metrics.regression import *  # noqa: F403
from ortops.metrics.sequence import *  # noqa: F403

__all__: list[str] = []
__all__ += classification.__all__
__all__ += confusion.__all__
__all__ += detection.__all__
__all__ += ranking.__all__
__all__ += regression.__all__
__all__ += sequence.__all__

METRICS: Mapping[str, type[StreamingMetric]] = {
    each().default_name: each for each in declared(StreamingMetric, __all__, globals()).values()
}

__all__ += ["Function", "Metric", "StreamingMetric", "resolve"]

Metric: TypeAlias = StreamingMetric | type[StreamingMetric] | Callable[..., Any]
"""A metric that is not given by name."""

Metrics: TypeAlias = str | Metric | Sequence[str | Metric] | Mapping[str, Any]
"""Metrics, or metrics by the output that they measure."""

OTHER_NAMES: Mapping[str, str] = {
    **other_names(METRICS),
    "categoricalaccuracy": "use 'accuracy': its labels are class numbers, or one-hot if the model "
    "ends in a Softmax or the loss is SoftmaxCrossEntropy(probabilities=True)",
    "map50": "use 'mean_average_precision' with other thresholds: "
    "MeanAveragePrecision(iou_thresholds=[0.5])",
    **dict.fromkeys(("cer", "levenshtein"), "use 'edit_distance'"),
}
"""What other libraries call metrics, as in `ortops.losses.OTHER_NAMES`."""


def resolve(metrics: Metrics) -> dict[str, StreamingMetric]:
    """Returns metrics by their names in results.

    Args:
        metrics: Names, instances and functions (see `ortops.metrics`), or a single one; or a dict
            of these by the output that they measure. Their results are ``<metric>_<output>``.

    Raises:
        ArgumentError: If a name is unknown, or two metrics have the same name.

    Example:
        >>> sorted(resolve(["accuracy", TopK(5)]))
        ['accuracy', 'top_k']
        >>> sorted(resolve({"kind": ["accuracy", "acc"], "price": "mae"}))
        ['acc_kind', 'accuracy_kind', 'mae_price']
    """
    if isinstance(metrics, Mapping):
        metrics = [_of_output(each, name) for name, own in metrics.items() for each in _list(own)]
    found: dict[str, StreamingMetric] = {}
    for metric in _list(metrics):
        made = _resolve(metric)
        if made.label in found or made.label == "loss":
            whose = "of the loss" if made.label == "loss" else "of another metric"
            raise ArgumentError(
                f"metric '{made.label}': this is also the name {whose}; rename one with name="
            )
        found[made.label] = made
    return found


def _list(metrics: Any) -> Sequence[Any]:
    """Returns one metric or several as a sequence."""
    if isinstance(metrics, str | StreamingMetric) or callable(metrics):
        return [metrics]
    if not isinstance(metrics, Sequence):
        raise ArgumentError(f"metrics must be a list of metrics, got {metrics!r:.80}")
    return metrics


def _of_output(metric: Any, output: str) -> StreamingMetric:
    """Returns a metric that measures an output."""
    made = copy.copy(_resolve(metric))
    if made.output not in (None, output):
        raise ArgumentError(f"metrics['{output}'] must leave out output=, got {made.output!r}")
    if made.name and made.output is None:
        made.name = f"{made.name}_{output}"
    made.output = output
    return made


def _resolve(metric: Any) -> StreamingMetric:
    if isinstance(metric, StreamingMetric):
        return metric
    if isinstance(metric, type) and issubclass(metric, StreamingMetric):
        return metric()
    if isinstance(metric, str):
        found, hint = find_name(metric, METRICS, OTHER_NAMES)
        if found is None:
            raise ArgumentError(f"unknown metric '{metric}'; {hint}")
        # Results have the name that the user gave.
        return METRICS[found]() if found == metric else METRICS[found](name=metric)
    if callable(metric):
        return Function(metric)
    raise ArgumentError(f"metrics must be names of metrics or functions, got {metric!r:.80}")
