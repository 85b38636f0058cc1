"""The base classes of metrics, and how they read outputs and targets."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import boolean, choice, text, whole_number
from ortops._common.numbers import plain
from ortops.errors import OrtopsError

Array: TypeAlias = npt.NDArray[Any]

KINDS = ("logits", "probabilities", "log_probabilities", "values")

_Metric = TypeVar("_Metric", bound="StreamingMetric")


@dataclass
class StreamingMetric:
    """A metric accumulated over batches. Use one of the subclasses, or write your own.

    Your own subclass defines `update`, `result` and `reset`. `reset` initializes the accumulators;
    it is called on construction and before each data set. If `update` has a parameter
    ``sample_weight``, it gets the weights by which the loss averages rows, if there are any. The
    attribute ``higher_is_better``, True or False, tells callbacks that monitor it what is better.

    `update` gets arrays with the rows on the first axis, wherever the model has them. Arguments
    that are None are taken from the loss: a session fills them in, in a copy. If a Softmax computes
    the outputs and targets have their shape, such as one-hot labels, metrics of classes compare
    with the most likely class of each row.

    Args:
        output: The tensor of the model to evaluate, an output or not; by default that of the loss.
            If the loss reads the logits before an output, errors of numbers (such as R2) are those
            of the output. Of a sum of losses, it is each one that the metric fits, and if these are
            several, the results are called ``<name>_<output>``.
        target: The input of the loss, or of the model, to compare with; by default the target of
            the loss of that output.
        name: The name in results; by default the class name in snake_case, followed by ``output``
            if given.
        kind: What the outputs are: ``"logits"`` (the default without a session),
            ``"probabilities"``, ``"log_probabilities"`` or other ``"values"``.
        axis: The class axis; 1 without a session.
        ignored: A label, or other target, to ignore.

    Example:
        >>> import numpy as np
        >>> class LargestError(StreamingMetric):
        ...     higher_is_better = False
        ...     def reset(self):
        ...         self.largest = 0.0
        ...     def update(self, outputs, targets):
        ...         self.largest = max(self.largest, float(np.abs(outputs - targets).max()))
        ...     def result(self):
        ...         return self.largest
        >>> from ortops.docs import examples
        >>> examples.session().evaluate(examples.BATCH, metrics=[LargestError()])
        {'loss': 1.0, 'largest_error': 1.0}
    """

    _: KW_ONLY
    output: str | None = None
    target: str | None = None
    name: str | None = None
    kind: str | None = None
    axis: int | None = None
    ignored: int | None = None

    shared: ClassVar[frozenset[str]] = frozenset()
    """Further arguments that the loss fills in if they are None."""

    fits: ClassVar[frozenset[str] | None] = None
    """What it compares, of ``"labels"`` (class numbers), ``"answers"`` (0 and 1), ``"numbers"``,
    ``"boxes"`` and ``"sequences"``; None for anything. Of a sum of losses, it measures each
    prediction that it fits."""

    _other_names: ClassVar[tuple[str, ...]] = ()
    """What other libraries call it, as `ortops._common.other_names.find_name` takes it."""

    def __post_init__(self) -> None:
        """Checks the arguments and resets the state."""
        for argument in ("output", "target", "name"):
            if getattr(self, argument) is not None:
                text(self.named(argument), getattr(self, argument), "a name")
        if self.kind is not None:
            choice(self.named("kind"), self.kind, KINDS)
        for argument in ("axis", "ignored"):
            if getattr(self, argument) is not None:
                whole_number(self.named(argument), getattr(self, argument))
        self.reset()

    @property
    def default_name(self) -> str:
        """The class name in snake_case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()

    @property
    def higher_is_better(self) -> bool | None:
        """Whether more is better; None if that is not known. A subclass may set an attribute."""
        return None

    @property
    def label(self) -> str:
        """The name in results."""
        if self.name:
            return self.name
        return self.default_name + (f"_{self.output}" if self.output else "")

    @property
    def inputs(self) -> Mapping[str, str]:
        """Keyword arguments of `update` → inputs of the loss to pass there, if they exist."""
        return {}

    def wrong(self, what: str) -> OrtopsError:
        """Returns an error that names the metric."""
        return OrtopsError(f"metric '{self.label}': {what}")

    def named(self, argument: str) -> str:
        """Returns the name of an argument for messages."""
        return f"metric '{self.label}': {argument}"

    def begun(
        self: _Metric,
        kind: str | None = None,
        axis: int | None = None,
        ignored: int | None = None,
        **shared: object,
    ) -> _Metric:
        """Returns a reset copy, in which arguments that are None are filled in.

        Args:
            kind: See the class.
            axis: See there.
            ignored: See there.
            **shared: Other arguments of the loss; those that are in `shared` of the class count.
        """
        result = copy.copy(self)
        for name in self.shared & shared.keys():
            if getattr(self, name) is None:
                setattr(result, name, shared[name])
        result.kind = kind if self.kind is None else self.kind
        result.axis = axis if self.axis is None else self.axis
        result.ignored = ignored if self.ignored is None else self.ignored
        result.reset()
        return result

    @property
    def takes_weights(self) -> bool:
        """Whether `update` has a parameter ``sample_weight``."""
        return "sample_weight" in inspect.signature(self.update).parameters

    def weights_like(self, targets: Array, sample_weight: Array | None) -> Array | None:
        """Returns a weight for each target in float64, given weights of rows; None if all are 1.

        Args:
            targets: The targets.
            sample_weight: Weights whose axes are the first ones of the targets; further axes of
                size 1 do not matter.

        Raises:
            OrtopsError: If the shapes do not fit.
        """
        if sample_weight is None:
            return None
        wide = np.asarray(sample_weight, np.float64)
        while wide.ndim > targets.ndim and wide.shape[-1] == 1:
            wide = wide[..., 0]
        wide = wide.reshape(wide.shape + (1,) * (targets.ndim - wide.ndim))
        try:
            return np.broadcast_to(wide, targets.shape)
        except ValueError:
            raise self.wrong(
                f"sample_weight must have the first axes of the targets, of shape "
                f"{list(targets.shape)}, got shape {list(np.shape(sample_weight))}"
            ) from None

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """Adds a batch.

        Args:
            outputs: The model's outputs.
            targets: The targets.
            sample_weight: A weight for each row, or for each target; all are 1 by default.

        Raises:
            OrtopsError: If shapes or values are incompatible.
        """
        raise NotImplementedError

    def result(self) -> float:
        """Returns the value for all batches since `reset`, as if they were one; NaN if none."""
        raise NotImplementedError

    def reset(self) -> None:
        """Resets the accumulators."""
        raise NotImplementedError

    def counts(self, targets: Array) -> Any:
        """Returns which targets count: a mask, or an index of all."""
        return ... if self.ignored is None else targets != self.ignored


@dataclass
class Mean(StreamingMetric):
    """A metric that is a mean."""

    def add(self, values: Array, weights: Array | None = None) -> None:
        """Adds the values of a batch, each of them times its weight."""
        wide = values.astype(np.float64)
        if weights is None:
            self._sum += float(wide.sum())
            self._count += values.size
        else:
            counted = weights > 0
            self._sum += float((wide[counted] * weights[counted]).sum())
            self._count += float(weights.sum())

    def result(self) -> float:
        """Returns the mean."""
        return self._sum / self._count if self._count else math.nan

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._sum, self._count = 0.0, 0.0


def reads_numbers(metric: StreamingMetric) -> bool:
    """Whether a metric compares numbers only: those of the output, not logits that a loss reads."""
    return metric.fits is not None and metric.fits <= {"numbers"}


def as_number(metric: StreamingMetric, value: object) -> float:
    """Returns the result of a metric as a Python float.

    Args:
        metric: The metric.
        value: The return value of its `StreamingMetric.result`, or of its function.

    Raises:
        OrtopsError: If it is not a number.
    """
    found = plain(value)
    if found is None:
        raise metric.wrong(f"the result must be a number, got {value!r:.80}")
    return float(found)


def direction(metric: StreamingMetric) -> bool | None:
    """Returns whether higher results of a metric are better; None if that is not known.

    Raises:
        ArgumentError: If its ``higher_is_better`` is anything else.
    """
    given = metric.higher_is_better
    return None if given is None else boolean(metric.named("higher_is_better"), given)


def yes_border(kind: str | None) -> float:
    """Returns the threshold above which an output is a positive answer."""
    return {None: 0.0, "logits": 0.0, "log_probabilities": float(np.log(0.5))}.get(kind, 0.5)


def has_classes(metric: StreamingMetric, outputs: Array, targets: Array) -> bool:
    """Whether outputs have a class axis that targets do not have.

    Raises:
        OrtopsError: If outputs have neither a class axis nor the targets' shape.
    """
    shape = list(outputs.shape)
    if outputs.ndim == targets.ndim + 1:
        axis = 1 if metric.axis is None else metric.axis
        if not -outputs.ndim <= axis < outputs.ndim:
            raise metric.wrong(f"axis {axis} is out of range for outputs of shape {shape}")
        if shape[axis] == 1:
            raise metric.wrong(
                f"outputs of shape {shape} have only one class, targets have shape "
                f"{list(targets.shape)}; use targets of 0 and 1 in the shape of the outputs"
            )
        del shape[axis]
    check_same_shape(metric, outputs, targets, shape, ", or outputs with an additional class axis")
    return outputs.ndim > targets.ndim


def check_same_shape(
    metric: StreamingMetric,
    outputs: Array,
    targets: Array,
    shape: list[int] | None = None,
    hint: str = " (accuracy compares classes with labels)",
) -> None:
    """Raises an error unless targets have a shape, by default that of the outputs."""
    if (list(outputs.shape) if shape is None else shape) != list(targets.shape):
        raise metric.wrong(
            f"outputs have shape {list(outputs.shape)}, targets {list(targets.shape)}; both must "
            f"have the same shape{hint}"
        )


def columns(outputs: Array, targets: Array, axis: int | None) -> tuple[Array, Array]:
    """Returns outputs and targets of one shape with an axis as columns, and all others as rows."""
    if outputs.ndim < 2:
        return outputs.reshape(-1, 1), targets.reshape(-1, 1)
    axis = 1 if axis is None else axis
    width = outputs.shape[axis]
    first, second = (np.moveaxis(each, axis, -1).reshape(-1, width) for each in (outputs, targets))
    return first, second


def class_rows(
    metric: StreamingMetric, outputs: Array, targets: Array
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Returns scores of shape (rows, classes) and labels of shape (rows), without ignored ones.

    Raises:
        OrtopsError: If outputs have no class axis, or a label is out of range.
    """
    if not has_classes(metric, outputs, targets):
        raise metric.wrong(
            "outputs must have an additional class axis, but outputs and targets have the same "
            f"shape, {list(outputs.shape)}"
        )
    scores = np.moveaxis(outputs, 1 if metric.axis is None else metric.axis, -1)
    scores = scores.reshape(-1, scores.shape[-1])
    kept = metric.counts(targets.reshape(-1))
    labels = whole(metric, targets.reshape(-1)[kept])
    check_labels(metric, labels, scores.shape[1])
    return scores[kept], labels


def label_weights(
    metric: StreamingMetric, targets: Array, sample_weight: Array | None
) -> Array | None:
    """Returns the weights of labels that are not ignored, shape (rows); None if all are 1."""
    weights = metric.weights_like(targets, sample_weight)
    return None if weights is None else weights.reshape(-1)[metric.counts(targets.reshape(-1))]


def whole(metric: StreamingMetric, labels: Array) -> npt.NDArray[np.int64]:
    """Returns labels as integers.

    Raises:
        OrtopsError: If a label is not an integer.
    """
    with np.errstate(invalid="ignore"):
        result = labels.astype(np.int64)
    if labels.dtype.kind not in "iub" and not np.array_equal(result, labels):
        wrong = labels[result != labels].flat[0]
        raise metric.wrong(f"labels must be integers, got {wrong}")
    return result


def check_labels(
    metric: StreamingMetric, labels: npt.NDArray[np.int64], classes: int | None = None
) -> None:
    """Raises an error for labels out of range."""
    outside = labels < 0 if classes is None else (labels < 0) | (labels >= classes)
    if outside.any():
        valid = ">= 0" if classes is None else f"from 0 to {classes - 1}"
        raise metric.wrong(
            f"labels must be {valid}, got {labels[outside][0]}; a label to ignore is set with "
            "ignored="
        )


def probabilities(metric: StreamingMetric, scores: Array, *, classes: bool) -> Array:
    """Returns probabilities in float64.

    Args:
        metric: Its ``kind`` is that of the scores.
        scores: Scores, with classes on the last axis, if any.
        classes: Whether the last axis is that of mutually exclusive classes.

    Raises:
        OrtopsError: If the kind is ``"values"``.
    """
    wide = scores.astype(np.float64)
    if metric.kind == "values":
        raise metric.wrong(
            "outputs of kind 'values' cannot be converted to probabilities; set "
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
        OrtopsError: If the kind is ``"values"``.
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
