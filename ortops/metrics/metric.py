"""What a metric is, and how it reads outputs and targets."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ortops.errors import OrtopsError
from ortops.numbers import plain

__all__ = [
    "Array",
    "StreamingMetric",
    "as_number",
    "class_rows",
    "has_classes",
    "log_probabilities",
    "probabilities",
    "yes_border",
]

Array: TypeAlias = npt.NDArray[Any]

KINDS = ("logits", "probabilities", "log_probabilities", "values")

_Metric = TypeVar("_Metric", bound="StreamingMetric")


@dataclass
class StreamingMetric:
    """A number for people that is computed batch by batch. Use one of the subclasses.

    A subclass of one's own defines `update`, `result` and `reset`; what it adds up it begins with
    in `reset`, which is called when it is made and before each data set.

    What is None is as the loss has it: a session fills it in, in a copy.

    Args:
        output: The tensor of the model that is looked at, an output or not; what the loss looks at
            by default, or the first summand of a loss that has a target.
        target: The input of the loss, or of the model, that it is compared with; by default what
            the loss on that output compares it with.
        name: What the number is called in results: the class in snake_case by default, and the
            output where one is given.
        kind: What the outputs are: ``"logits"`` (the default without a session),
            ``"probabilities"``, ``"log_probabilities"`` or other ``"values"``.
        axis: The axis of the classes, 1 without a session.
        ignored: The label, or other target, that does not count.

    Example:
        >>> import numpy as np
        >>> class LargestError(StreamingMetric):
        ...     def reset(self):
        ...         self.largest = 0.0
        ...     def update(self, outputs, targets):
        ...         self.largest = max(self.largest, float(np.abs(outputs - targets).max()))
        ...     def result(self):
        ...         return self.largest
        >>> from models import line
        >>> line.session().evaluate(line.BATCH, metrics=[LargestError()])
        {'loss': 1.0, 'largest_error': 1.0}
    """

    _: KW_ONLY
    output: str | None = None
    target: str | None = None
    name: str | None = None
    kind: str | None = None
    axis: int | None = None
    ignored: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments and resets the state."""
        for argument in ("output", "target", "name"):
            value = getattr(self, argument)
            if value is not None and (not isinstance(value, str) or not value):
                raise self.wrong(f"{argument} is {value!r}; a name is accepted")
        if self.kind not in (None, *KINDS):
            raise self.wrong(
                f"kind is {self.kind!r}; " + ", ".join(map(repr, KINDS)) + " are accepted"
            )
        for argument in ("axis", "ignored"):
            value = getattr(self, argument)
            if value is not None and not _is_integer(value):
                raise self.wrong(f"{argument} is {value!r}; an integer is accepted")
        self.reset()

    @property
    def default_name(self) -> str:
        """The class in snake_case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def label(self) -> str:
        """What the number is called in results."""
        if self.name:
            return self.name
        return self.default_name + (f"_{self.output}" if self.output else "")

    @property
    def inputs(self) -> Mapping[str, str]:
        """Keywords of `update` → inputs of the loss that it gets there, where these exist."""
        return {}

    def wrong(self, what: str) -> OrtopsError:
        """Returns an error that names the metric."""
        return OrtopsError(f"metric '{self.label}': {what}")

    def begun(
        self: _Metric,
        kind: str | None = None,
        axis: int | None = None,
        ignored: int | None = None,
    ) -> _Metric:
        """Returns a copy that has seen nothing, and knows what was not given.

        Args:
            kind: See the class.
            axis: See there.
            ignored: See there.
        """
        result = copy.copy(self)
        result.kind = kind if self.kind is None else self.kind
        result.axis = axis if self.axis is None else self.axis
        result.ignored = ignored if self.ignored is None else self.ignored
        result.reset()
        return result

    def update(self, outputs: Array, targets: Array) -> None:
        """Takes a batch.

        Args:
            outputs: What the model gave.
            targets: What it should have been.

        Raises:
            OrtopsError: If their shapes or values do not fit.
        """
        raise NotImplementedError

    def result(self) -> float:
        """Returns the number for all batches since `reset`, as if they were one; NaN of none."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets all batches."""
        raise NotImplementedError

    def counts(self, targets: Array) -> Any:
        """Returns which targets count: a mask, or an index of all."""
        return ... if self.ignored is None else targets != self.ignored


def as_number(metric: StreamingMetric, value: object) -> float:
    """Returns the result of a metric as a Python float.

    Args:
        metric: The metric.
        value: What its `StreamingMetric.result`, or its function, returned.

    Raises:
        OrtopsError: If that is not a number.
    """
    found = plain(value)
    if found is None:
        raise metric.wrong(f"the result must be a number, got {value!r:.80}")
    return float(found)


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def yes_border(kind: str | None) -> float:
    """Returns the number above which an output of some kind means yes."""
    return {None: 0.0, "logits": 0.0, "log_probabilities": float(np.log(0.5))}.get(kind, 0.5)


def has_classes(metric: StreamingMetric, outputs: Array, targets: Array) -> bool:
    """Whether outputs have a class axis that targets do not have.

    Raises:
        OrtopsError: If they have neither that nor the targets' shape.
    """
    shape = list(outputs.shape)
    if outputs.ndim == targets.ndim + 1:
        axis = 1 if metric.axis is None else metric.axis
        if not -outputs.ndim <= axis < outputs.ndim:
            raise metric.wrong(f"axis is {axis}, and outputs have shape {shape}")
        if shape[axis] == 1:
            raise metric.wrong(
                f"outputs of shape {shape} have one class, and targets shape "
                f"{list(targets.shape)}; give targets of yes and no in the shape of the outputs"
            )
        del shape[axis]
    if shape != list(targets.shape):
        raise metric.wrong(
            f"outputs have shape {list(outputs.shape)}, and targets {list(targets.shape)}; one "
            "shape is accepted, or outputs with an axis of classes more"
        )
    return outputs.ndim > targets.ndim


def class_rows(
    metric: StreamingMetric, outputs: Array, targets: Array
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Returns scores of shape (rows, classes) and labels of shape (rows): those that count.

    Raises:
        OrtopsError: If outputs have no class axis, or a label is none of their classes.
    """
    if not has_classes(metric, outputs, targets):
        raise metric.wrong(
            f"outputs and targets have one shape, {list(outputs.shape)}; outputs with an axis of "
            "classes more are accepted"
        )
    scores = np.moveaxis(outputs, 1 if metric.axis is None else metric.axis, -1)
    scores = scores.reshape(-1, scores.shape[-1])
    kept = metric.counts(targets.reshape(-1))
    labels = whole(metric, targets.reshape(-1)[kept])
    check_labels(metric, labels, scores.shape[1])
    return scores[kept], labels


def whole(metric: StreamingMetric, labels: Array) -> npt.NDArray[np.int64]:
    """Returns labels as integers.

    Raises:
        OrtopsError: If they are none.
    """
    with np.errstate(invalid="ignore"):
        result = labels.astype(np.int64)
    if labels.dtype.kind not in "iub" and not np.array_equal(result, labels):
        wrong = labels[result != labels].flat[0]
        raise metric.wrong(f"targets have the label {wrong}; integers are accepted")
    return result


def check_labels(
    metric: StreamingMetric, labels: npt.NDArray[np.int64], classes: int | None = None
) -> None:
    """Refuses labels that no class has."""
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if outside.any():
        accepted = "0 and above" if classes is None else f"0 to {classes - 1}"
        raise metric.wrong(
            f"targets have the label {labels[outside][0]}; {accepted} are accepted, and ignored= "
            "names one that does not count"
        )


def probabilities(metric: StreamingMetric, scores: Array, *, classes: bool) -> Array:
    """Returns probabilities in float64.

    Args:
        metric: Says what the scores are.
        scores: Scores, with classes on the last axis, if any.
        classes: Whether the last axis is that of classes, which exclude each other.

    Raises:
        OrtopsError: If the scores are values of another kind.
    """
    wide = scores.astype(np.float64)
    if metric.kind == "values":
        raise metric.wrong(
            "outputs are values of which nothing tells the probabilities; give "
            "kind='probabilities' or kind='logits'"
        )
    if metric.kind == "probabilities":
        return wide
    if metric.kind == "log_probabilities":
        return np.asarray(np.exp(wide))
    if classes:
        return np.exp(log_probabilities(metric, wide))
    smaller = np.exp(-np.abs(wide))
    return np.asarray(np.where(wide < 0, smaller, 1.0) / (1 + smaller))


def log_probabilities(metric: StreamingMetric, scores: Array) -> Array:
    """Returns log-probabilities of classes, on the last axis, in float64.

    Raises:
        OrtopsError: If the scores are values of another kind.
    """
    wide = scores.astype(np.float64)
    if metric.kind == "log_probabilities":
        return wide
    if metric.kind in ("probabilities", "values"):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(probabilities(metric, wide, classes=True))
    if not wide.size:
        return wide
    with np.errstate(invalid="ignore"):
        shifted = wide - wide.max(axis=-1, keepdims=True)
        return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
