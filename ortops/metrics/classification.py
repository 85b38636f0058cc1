"""Classification metrics, for classes and for binary questions."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, number, whole_number
from ortops.metrics.metric import (
    Array,
    Mean,
    StreamingMetric,
    check_labels,
    class_rows,
    columns,
    has_classes,
    label_weights,
    whole,
    yes_border,
)

__all__ = ["F1", "Accuracy", "IoU", "Precision", "Recall", "TopK"]

Counts = npt.NDArray[np.int64]


@dataclass
class Accuracy(Mean):
    """The fraction of correct predictions.

    For outputs with a class axis, the prediction is the argmax (the first one of equal values).
    Floats of the targets' shape are positive above a threshold: 0 for logits, ½ for probabilities
    and values; targets are positive above ½. Integers and bools of the targets' shape are labels.
    A NaN that is not ignored makes the result NaN.

    Args:
        threshold: The threshold of positive predictions.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        >>> accuracy.update(np.array([[0.3, 0.7]]), np.array([1]))
        >>> round(accuracy.result(), 4)
        0.6667
    """

    _other_names = ("acc", "binaryaccuracy", "sparsecategoricalaccuracy")

    higher_is_better = True
    fits = frozenset(("labels", "answers"))

    _: KW_ONLY
    threshold: float | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.threshold is not None:
            number(self.named("threshold"), self.threshold)

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            axis = 1 if self.axis is None else self.axis
            right = np.asarray(outputs.argmax(axis=axis) == targets)
            undefined = np.asarray(np.isnan(outputs).any(axis=axis))
        elif outputs.dtype.kind in "iub":
            right = np.asarray(outputs == targets)
            undefined = np.zeros(outputs.shape, np.bool)
        else:
            threshold = yes_border(self.kind) if self.threshold is None else self.threshold
            right = (outputs > threshold) == (targets > 0.5)
            undefined = np.isnan(outputs) | np.isnan(targets)
        kept = self.counts(targets)
        weights = self.weights_like(targets, sample_weight)
        values = np.where(undefined, math.nan, right.astype(np.float64))
        self.add(values[kept], None if weights is None else weights[kept])


@dataclass
class TopK(Mean):
    """The fraction of rows whose label is among the k classes with the highest scores.

    Ties are broken in favor of the first class, as in `Accuracy`, which is the case k = 1. A NaN
    that is not ignored makes the result NaN.

    Args:
        k: The number of classes.

    Example:
        >>> top = TopK(2)
        >>> top.update(np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.array([1, 2]))
        >>> top.result()
        0.5
    """

    _other_names = ("topkaccuracy", "sparsetopkcategoricalaccuracy", "top5")

    higher_is_better = True
    fits = frozenset(("labels",))

    k: int = 5

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        whole_number(self.named("k"), self.k, 1)

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        scores, labels = class_rows(self, outputs, targets)
        if self.k >= scores.shape[1]:
            raise self.wrong(
                f"with k = {self.k} and {scores.shape[1]} classes, every prediction is correct; "
                "use TopK(k) with a smaller k"
            )
        own = np.take_along_axis(scores, labels[:, None], axis=1)
        before = np.arange(scores.shape[1]) < labels[:, None]
        rank = ((scores > own) | ((scores == own) & before)).sum(axis=1)
        values = np.where(np.isnan(scores).any(axis=1), math.nan, rank < self.k)
        self.add(values, label_weights(self, targets, sample_weight))


@dataclass
class PerClass(StreamingMetric):
    """Base class of metrics that are computed from true positives, predictions and targets.

    For each class, three counts are kept: the margins and the diagonal of the confusion matrix.

    - For outputs with a class axis, the prediction is the argmax.
    - Integers of the targets' shape are labels.
    - Floats and bools of the targets' shape are binary, as in `Accuracy`: a single question if
      axis 1 (or ``axis``) is missing or has size 1, else one for each column (multi-label).

    A class that occurs neither in predictions nor in targets is left out, as in scikit-learn; a
    question is not, nor is a class that occurs only in rows of weight 0. 0/0 is 0. A NaN that is
    not ignored makes the result NaN.

    Args:
        average: ``"binary"``: only the class ``positive``. ``"macro"``: the mean over classes.
            ``"weighted"``: the mean weighted by the number of targets of each class. ``"micro"``:
            computed from the summed counts of all classes. The default is binary for two classes
            and for a single question, else macro.
        positive: The positive class of ``"binary"``: 1, or 0 for the negative answer.
        threshold: The threshold of positive predictions; by default that of ``kind``.
    """

    higher_is_better = True
    fits = frozenset(("labels", "answers"))

    _: KW_ONLY
    average: str | None = None
    positive: int = 1
    threshold: float | None = None

    two_are_binary: ClassVar[bool] = True
    """Whether the default average of two classes is "binary"."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.average is not None:
            averages = ("binary", "macro", "weighted", "micro")
            choice(self.named("average"), self.average, averages)
        whole_number(self.named("positive"), self.positive)
        if self.threshold is not None:
            number(self.named("threshold"), self.threshold)

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._hits: Array = np.zeros(0)
        self._answered: Array = np.zeros(0)
        self._true: Array = np.zeros(0)
        self._seen: Array = np.zeros(0)  # how often classes occur, whatever the weights are
        self._counted: float = 0.0
        self._undefined: bool = False
        self._form: str = ""

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            form = "classes"
            scores, labels = class_rows(self, outputs, targets)
            self._undefined |= bool(np.isnan(scores).any())
            weights = label_weights(self, targets, sample_weight)
            self._add_labels(scores.argmax(axis=1), labels, scores.shape[1], weights)
        elif outputs.dtype.kind in "iu":
            form, kept = "labels", self.counts(targets)
            labels, answers = whole(self, targets[kept].reshape(-1)), outputs[kept].reshape(-1)
            check_labels(self, labels)
            if answers.size and answers.min() < 0:
                raise self.wrong(f"labels in outputs must be >= 0, got {answers.min()}")
            weights = label_weights(self, targets, sample_weight)
            self._add_labels(answers.astype(np.int64), labels, 0, weights)
        else:
            form = "questions"
            self._add_questions(outputs, targets, self.weights_like(targets, sample_weight))
        if self._form not in ("", form):
            raise self.wrong(f"batches contain {self._form} and {form}; use one form for all")
        self._form = form

    def _add_labels(
        self, answers: Counts, labels: Counts, classes: int, weights: Array | None
    ) -> None:
        most = max(int(answers.max(initial=-1)), int(labels.max(initial=-1))) + 1
        size = max(classes, most, len(self._hits))
        found = [np.bincount(each, weights, size) for each in (answers, labels)]
        seen = np.bincount(answers, minlength=size) + np.bincount(labels, minlength=size)
        right = answers == labels
        hits = np.bincount(labels[right], None if weights is None else weights[right], size)
        self._add(seen, hits, *found)

    def _add_questions(self, outputs: Array, targets: Array, weights: Array | None) -> None:
        shares = np.ones(targets.shape) if weights is None else weights
        shares, _ = columns(shares, targets, self.axis)
        outputs, targets = columns(outputs, targets, self.axis)
        kept = np.broadcast_to(
            True if self.ignored is None else targets != self.ignored, targets.shape
        )
        if outputs.dtype.kind == "b":
            answers = outputs
        else:
            threshold = yes_border(self.kind) if self.threshold is None else self.threshold
            answers = outputs > threshold
            counts = kept & (shares > 0)
            self._undefined |= bool((np.isnan(outputs) | np.isnan(targets))[counts].any())
        truths = targets > 0.5
        if answers.shape[1] == 1 and self.positive == 0:
            answers, truths = ~answers, ~truths
        counted = ((each & kept) * shares for each in (answers & truths, answers, truths))
        self._add(np.ones(answers.shape[1]), *(each.sum(axis=0) for each in counted))
        self._counted += float((kept * shares).sum())

    def _add(self, seen: Array, hits: Array, answered: Array, true: Array) -> None:
        if len(self._hits) < len(hits):
            more = (0, len(hits) - len(self._hits))
            held = (self._hits, self._answered, self._true, self._seen)
            self._hits, self._answered, self._true, self._seen = (np.pad(e, more) for e in held)
        self._seen += seen
        self._hits += hits
        self._answered += answered
        self._true += true

    def fraction(self, hits: Array, answered: Array, true: Array) -> tuple[Array, Array]:
        """Returns numerator and denominator for each class.

        Args:
            hits: The number, or sum of weights, of true positives.
            answered: That of predictions of the class.
            true: That of targets of the class.
        """
        raise NotImplementedError

    def per_class(self) -> npt.NDArray[np.float64]:
        """Returns the value of each class or question; NaN for classes that do not occur."""
        above, below = self.fraction(self._hits, self._answered, self._true)
        found = np.divide(above, below, out=np.zeros(len(above)), where=below > 0)
        found[self._seen == 0] = np.nan
        return np.full_like(found, np.nan) if self._undefined else found

    def result(self) -> float:
        """Returns the average."""
        size = len(self._hits)
        counted = self._counted or self._true.sum()
        if not counted or self._undefined:
            return math.nan
        average = self.average
        if average is None:
            two = self._form == "classes" and size == 2 and self.two_are_binary
            average = "binary" if two or (self._form, size) == ("questions", 1) else "macro"
        found = self.per_class()
        if average == "binary":
            place = self._place(size)
            return float(np.nan_to_num(found[place])) if place < size else 0.0
        if average == "micro":
            above, below = self.fraction(
                *(np.atleast_1d(each.sum()) for each in (self._hits, self._answered, self._true))
            )
            return float(above[0] / below[0]) if below[0] else 0.0
        occurs = ~np.isnan(found)
        if average == "macro":
            return float(found[occurs].mean())
        total = self._true.sum()
        return float((np.nan_to_num(found) * self._true).sum() / total) if total else 0.0

    def _place(self, size: int) -> int:
        """Returns the index of the positive class."""
        if self._form == "questions":
            if size != 1 or self.positive not in (0, 1):
                raise self.wrong(
                    f"average='binary' requires a single question and positive=1 or 0, got {size} "
                    f"questions and positive={self.positive!r}; use another average"
                )
            return 0
        if self.positive < 0 or (self._form == "classes" and self.positive >= size):
            raise self.wrong(f"positive must be from 0 to {size - 1}, got {self.positive!r}")
        return self.positive


@dataclass
class Precision(PerClass):
    """The fraction of predictions that are correct; see `PerClass` for averages and outputs.

    Example:
        >>> precision = Precision()
        >>> precision.update(np.array([0.9, 0.8, 0.3]) - 0.5, np.array([1.0, 0.0, 1.0]))
        >>> precision.result()
        0.5
    """

    def fraction(self, hits: Array, answered: Array, true: Array) -> tuple[Array, Array]:
        """Hits / predictions."""
        return hits, answered


@dataclass
class Recall(PerClass):
    """The fraction of targets that are found; see `PerClass` for averages and outputs.

    Example:
        >>> recall = Recall(kind="probabilities")
        >>> recall.update(np.array([0.9, 0.8, 0.3, 0.7]), np.array([1.0, 0.0, 1.0, 1.0]))
        >>> round(recall.result(), 4)
        0.6667
    """

    def fraction(self, hits: Array, answered: Array, true: Array) -> tuple[Array, Array]:
        """Hits / targets."""
        return hits, true


@dataclass
class F1(PerClass):
    """The harmonic mean of precision and recall; see `PerClass` for averages and outputs.

    Example:
        >>> f1 = F1(average="macro")
        >>> f1.update(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2]))
        >>> round(f1.result(), 4)
        0.7778
    """

    def fraction(self, hits: Array, answered: Array, true: Array) -> tuple[Array, Array]:
        """2 hits / (predictions + targets)."""
        return 2 * hits, answered + true


@dataclass
class IoU(PerClass):
    """Intersection over union (the Jaccard index) of class maps or binary maps.

    The default is the mean over all classes that occur, also for two classes; for a single question
    it is the IoU of the positive answer. Counts are summed over all batches, as usual for
    segmentation data sets. See `PerClass` for averages and outputs.

    Example:
        >>> iou = IoU()
        >>> iou.update(np.array([[0, 0, 1, 1]]), np.array([[0, 1, 1, 1]]))
        >>> round(iou.result(), 4)
        0.5833
    """

    _other_names = ("jaccard", "meaniou")

    two_are_binary: ClassVar[bool] = False

    @property
    def default_name(self) -> str:
        """``iou``: the general rule would give ``io_u``."""
        return "iou"

    def fraction(self, hits: Array, answered: Array, true: Array) -> tuple[Array, Array]:
        """Hits / (predictions + targets − hits)."""
        return hits, answered + true - hits
