"""Metrics of classes, and of yes and no."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ortops.metrics.metric import (
    Array,
    StreamingMetric,
    check_labels,
    class_rows,
    has_classes,
    whole,
    yes_border,
)

__all__ = ["F1", "Accuracy", "IoU", "Precision", "Recall", "TopK"]

Counts = npt.NDArray[np.int64]


@dataclass
class Accuracy(StreamingMetric):
    """The share of right answers.

    Outputs with a class axis answer with the class of the largest number (the first of equal ones);
    floats of the targets' shape answer yes above a border: 0 for logits, ½ for probabilities and
    values; targets are yes above ½. Integers and bools of the targets' shape are labels.
    A NaN among numbers that count makes the result NaN.

    Example:
        >>> accuracy = Accuracy()
        >>> accuracy.update(np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1]))
        >>> accuracy.update(np.array([[0.3, 0.7]]), np.array([1]))
        >>> round(accuracy.result(), 4)
        0.6667
    """

    _: KW_ONLY
    threshold: float | None = None

    def update(self, outputs: Array, targets: Array) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            axis = 1 if self.axis is None else self.axis
            right = np.asarray(outputs.argmax(axis=axis) == targets)
            undefined = np.asarray(np.isnan(outputs).any(axis=axis))
        elif outputs.dtype.kind in "iub":
            right = np.asarray(outputs == targets)
            undefined = np.zeros(outputs.shape, np.bool)
        else:
            border = yes_border(self.kind) if self.threshold is None else self.threshold
            right = (outputs > border) == (targets > 0.5)
            undefined = np.isnan(outputs) | np.isnan(targets)
        kept = self.counts(targets)
        self._right += math.nan if undefined[kept].any() else float(np.sum(right[kept]))
        self._count += right[kept].size

    def result(self) -> float:
        """Returns the share."""
        return self._right / self._count if self._count else math.nan

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._right, self._count = 0.0, 0


@dataclass
class TopK(StreamingMetric):
    """The share of rows whose label is among the k classes with the largest numbers.

    Of equal numbers the first count as larger, as in `Accuracy`, which is the case k = 1. A NaN
    among numbers that count makes the result NaN.

    Args:
        k: How many classes.

    Example:
        >>> top = TopK(2)
        >>> top.update(np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), np.array([1, 2]))
        >>> top.result()
        0.5
    """

    k: int = 5

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if isinstance(self.k, bool) or not isinstance(self.k, int | np.integer) or self.k < 1:
            raise self.wrong(f"k is {self.k!r}; an integer of at least 1 is accepted")

    def update(self, outputs: Array, targets: Array) -> None:
        """See `StreamingMetric`."""
        scores, labels = class_rows(self, outputs, targets)
        if self.k >= scores.shape[1]:
            raise self.wrong(
                f"k is {self.k}, and there are {scores.shape[1]} classes, so that every answer is "
                f"right; TopK(k) with a smaller k is accepted"
            )
        own = np.take_along_axis(scores, labels[:, None], axis=1)
        before = np.arange(scores.shape[1]) < labels[:, None]
        rank = ((scores > own) | ((scores == own) & before)).sum(axis=1)
        self._right += math.nan if np.isnan(scores).any() else float(np.sum(rank < self.k))
        self._count += len(labels)

    def result(self) -> float:
        """Returns the share."""
        return self._right / self._count if self._count else math.nan

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._right, self._count = 0.0, 0


@dataclass
class PerClass(StreamingMetric):
    """A metric of how often each class was answered, right, and answered rightly.

    Three counts for each class are kept: the margins and the diagonal of the confusion matrix.

    - Outputs with a class axis answer with the class of the largest number.
    - Integers of the targets' shape are labels.
    - Floats and bools of the targets' shape are yes and no, as in `Accuracy`: one question where
      axis 1 (or ``axis``) is missing or of size 1, else as many as that axis is long (multi-label).

    A class that neither an answer nor a target has does not count, as in scikit-learn, but a
    question does; 0/0 is 0. A NaN among numbers that count makes the result NaN.

    Args:
        average: ``"binary"``: of the class ``positive`` alone. ``"macro"``: the mean over classes.
            ``"weighted"``: the same, weighted by how many targets a class has. ``"micro"``: of the
            counts of all classes together. By default binary for two classes and for one question,
            else macro.
        positive: The class that ``"binary"`` is about: 1, or 0 for no.
        threshold: The border of yes, where outputs are yes and no; by default that of their kind.
    """

    _: KW_ONLY
    average: str | None = None
    positive: int = 1
    threshold: float | None = None

    two_are_binary: ClassVar[bool] = True
    """Whether two classes are averaged by "binary" by default."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        accepted = ("binary", "macro", "weighted", "micro")
        if self.average not in (None, *accepted):
            raise self.wrong(
                f"average is {self.average!r}; {', '.join(map(repr, accepted))} are accepted"
            )

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._hits: Counts = np.zeros(0, np.int64)
        self._answered: Counts = np.zeros(0, np.int64)
        self._true: Counts = np.zeros(0, np.int64)
        self._counted: int = 0
        self._undefined: bool = False
        self._form: str = ""

    def update(self, outputs: Array, targets: Array) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            form = "classes"
            scores, labels = class_rows(self, outputs, targets)
            self._undefined |= bool(np.isnan(scores).any())
            self._add_labels(scores.argmax(axis=1), labels, scores.shape[1])
        elif outputs.dtype.kind in "iu":
            form, kept = "labels", self.counts(targets)
            labels, answers = whole(self, targets[kept].reshape(-1)), outputs[kept].reshape(-1)
            check_labels(self, labels)
            if answers.size and answers.min() < 0:
                raise self.wrong(
                    f"outputs have the label {answers.min()}; 0 and above are accepted"
                )
            self._add_labels(answers.astype(np.int64), labels, 0)
        else:
            form = "questions"
            self._add_questions(outputs, targets)
        if self._form not in ("", form):
            raise self.wrong(f"batches of {self._form} and of {form} were given; give one form")
        self._form = form

    def _add_labels(self, answers: Counts, labels: Counts, classes: int) -> None:
        most = max(int(answers.max(initial=-1)), int(labels.max(initial=-1))) + 1
        size = max(classes, most, len(self._hits))
        found = [np.bincount(each, minlength=size) for each in (answers, labels)]
        self._add(np.bincount(labels[answers == labels], minlength=size), *found)

    def _add_questions(self, outputs: Array, targets: Array) -> None:
        axis = 1 if self.axis is None else self.axis
        if outputs.ndim < 2:
            outputs, targets, axis = outputs.reshape(-1, 1), targets.reshape(-1, 1), 1
        outputs, targets = (
            np.moveaxis(each, axis, -1).reshape(-1, each.shape[axis]) for each in (outputs, targets)
        )
        kept = np.broadcast_to(
            True if self.ignored is None else targets != self.ignored, targets.shape
        )
        if outputs.dtype.kind == "b":
            answers = outputs
        else:
            border = yes_border(self.kind) if self.threshold is None else self.threshold
            answers = outputs > border
            self._undefined |= bool((np.isnan(outputs) | np.isnan(targets))[kept].any())
        truths = targets > 0.5
        if answers.shape[1] == 1 and self.positive == 0:
            answers, truths = ~answers, ~truths
        self._add(*((each & kept).sum(axis=0) for each in (answers & truths, answers, truths)))
        self._counted += int(kept.sum())

    def _add(self, hits: Counts, answered: Counts, true: Counts) -> None:
        if len(self._hits) < len(hits):
            more = (0, len(hits) - len(self._hits))
            self._hits, self._answered, self._true = (
                np.pad(each, more) for each in (self._hits, self._answered, self._true)
            )
        self._hits += hits
        self._answered += answered
        self._true += true

    def fraction(self, hits: Counts, answered: Counts, true: Counts) -> tuple[Counts, Counts]:
        """Returns numerator and denominator.

        Args:
            hits: How often a class was answered rightly.
            answered: How often it was answered.
            true: How often it was the target.
        """
        raise NotImplementedError

    def per_class(self) -> npt.NDArray[np.float64]:
        """Returns the number of each class, or question; NaN where a class does not occur."""
        above, below = self.fraction(self._hits, self._answered, self._true)
        found = np.divide(above, below, out=np.zeros(len(above)), where=below > 0)
        if self._form != "questions":
            found[self._answered + self._true == 0] = np.nan
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
        """Returns where the positive class stands."""
        if self._form == "questions":
            if size != 1 or self.positive not in (0, 1):
                raise self.wrong(
                    f"average='binary' with positive={self.positive!r} is of one question, and "
                    f"outputs answer {size}; positive 1 or 0, or another average, is accepted"
                )
            return 0
        if self.positive < 0 or (self._form == "classes" and self.positive >= size):
            raise self.wrong(f"positive is {self.positive!r}; 0 to {size - 1} are accepted")
        return self.positive


@dataclass
class Precision(PerClass):
    """The share of answers that are right; see `PerClass` for averages and what outputs can be.

    Example:
        >>> precision = Precision()
        >>> precision.update(np.array([0.9, 0.8, 0.3]) - 0.5, np.array([1.0, 0.0, 1.0]))
        >>> precision.result()
        0.5
    """

    def fraction(self, hits: Counts, answered: Counts, true: Counts) -> tuple[Counts, Counts]:
        """Hits among answers."""
        return hits, answered


@dataclass
class Recall(PerClass):
    """The share of targets that were found; see `PerClass` for averages and what outputs can be.

    Example:
        >>> recall = Recall(kind="probabilities")
        >>> recall.update(np.array([0.9, 0.8, 0.3, 0.7]), np.array([1.0, 0.0, 1.0, 1.0]))
        >>> round(recall.result(), 4)
        0.6667
    """

    def fraction(self, hits: Counts, answered: Counts, true: Counts) -> tuple[Counts, Counts]:
        """Hits among targets."""
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

    def fraction(self, hits: Counts, answered: Counts, true: Counts) -> tuple[Counts, Counts]:
        """2 hits / (answers + targets)."""
        return 2 * hits, answered + true


@dataclass
class IoU(PerClass):
    """Intersection over union, of maps of classes or of yes and no (the Jaccard index).

    The mean over classes by default, over those that occur, two included; of the yes where outputs
    answer one question. Counts are of all batches together, as for segmentation data sets. See
    `PerClass` for averages and what outputs can be.

    Example:
        >>> iou = IoU()
        >>> iou.update(np.array([[0, 0, 1, 1]]), np.array([[0, 1, 1, 1]]))
        >>> round(iou.result(), 4)
        0.5833
    """

    two_are_binary: ClassVar[bool] = False

    @property
    def default_name(self) -> str:
        """It is one word."""
        return "iou"

    def fraction(self, hits: Counts, answered: Counts, true: Counts) -> tuple[Counts, Counts]:
        """Hits / (answers + targets − hits)."""
        return hits, answered + true - hits
