"""Mean average precision of object detectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, number, whole_number
from ortops.errors import ArgumentError
from ortops.metrics.metric import Array, StreamingMetric, check_labels, whole

__all__ = ["MeanAveragePrecision"]

_RECALLS = np.linspace(0, 1, 101)

_FORMATS = ("xyxy", "yxyx", "xywh", "cxcywh")

_LAYOUTS = ("predictions", "detections")


@dataclass
class MeanAveragePrecision(StreamingMetric):
    """Average precision of detected boxes as in COCO: its mean over classes and IoU thresholds.

    Outputs are the predictions of a detector, (N, 4 + C, points) with boxes first, as
    `ortops.losses.TaskAligned` reads them; boxes that overlap a better one of their class are
    suppressed here. With ``layout="detections"`` they are what is left after that, (N, K, 6) with
    the corners x1, y1, x2, y2 of a box, its score and its class; rows with a score of 0 or less do
    not count. Targets are those of `ortops.losses.TaskAligned`, (N, M, 5): class and box, filled
    up with zeros.

    A detection is right if its IoU with an object of its class that no better detection has is at
    least the threshold. The average precision is the mean, over 101 recalls, of the best precision
    at that recall or a higher one. Classes without any object do not count; NaN if there are none.
    After `evaluate`, `per_class` and `at` of the object that was given return more.

    Args:
        box_format: The format of boxes in predictions and targets, ``"xyxy"``, ``"yxyx"``,
            ``"xywh"`` or ``"cxcywh"``; by default that of the loss, or else ``"cxcywh"``.
        layout: ``"predictions"`` or ``"detections"``.
        iou_thresholds: The thresholds of the result; by default 0.5, 0.55, …, 0.95.
        suppression: The IoU above which a worse box of the same class is suppressed, with
            ``layout="predictions"``.
        candidates: The number of scores of an image that are considered before that.
        max_detections: The number of detections of each class in an image that count.

    Source:
        Lin et al., 2014 (arXiv:1405.0312), as pycocotools computes it for objects of all sizes.

    Example:
        >>> metric = MeanAveragePrecision(layout="detections", box_format="xyxy")
        >>> found = [[0, 0, 10, 10, 0.9, 0], [0, 0, 10, 8, 0.8, 1], [50, 50, 60, 60, 0.7, 1]]
        >>> wanted = [[0, 0, 0, 10, 10], [1, 0, 0, 10, 10], [0, 0, 0, 0, 0]]
        >>> metric.update(np.array([found]), np.array([wanted]))
        >>> metric.result(), metric.at(0.5)  # an IoU of 0.8 is enough for 7 of 10 thresholds
        (0.85, 1.0)
        >>> metric.per_class()
        array([1. , 0.7])
    """

    _other_names = ("map", "cocomap", "map5095")

    higher_is_better = True
    fits = frozenset(("boxes",))

    _: KW_ONLY
    box_format: str | None = None
    layout: str = "predictions"
    iou_thresholds: Sequence[float] = tuple(np.linspace(0.5, 0.95, 10).tolist())
    suppression: float = 0.7
    candidates: int = 1000
    max_detections: int = 100
    _shown_in: MeanAveragePrecision | None = field(
        default=None, init=False, repr=False, compare=False
    )

    shared: ClassVar[frozenset[str]] = frozenset({"box_format"})

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.box_format is not None:
            choice(self.named("box_format"), self.box_format, _FORMATS)
        choice(self.named("layout"), self.layout, _LAYOUTS)
        number(self.named("suppression"), self.suppression, minimum=0, maximum=1)
        for argument in ("candidates", "max_detections"):
            whole_number(self.named(argument), getattr(self, argument), 1)
        given = self.iou_thresholds
        if isinstance(given, str | float | int) or not len(given):
            raise ArgumentError(
                f"{self.named('iou_thresholds')} must be a list of numbers, got {given!r}"
            )
        for each in given:
            number(self.named("iou_thresholds"), each, above=0, maximum=1)

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._classes: dict[int, _Class] = {}

    def begun(self, *arguments: Any, **shared: Any) -> MeanAveragePrecision:
        """See `StreamingMetric`; results of the copy are shown in this object, too."""
        result = super().begun(*arguments, **shared)
        result._shown_in = self
        return result

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`; weights are those of images."""
        if targets.ndim != 3 or targets.shape[2] != 5 or len(targets) != len(outputs):
            raise self.wrong(
                "targets must have shape (N, objects, 5), a class and a box for each object, got "
                f"shape {list(targets.shape)} for outputs of shape {list(outputs.shape)}"
            )
        if np.isnan(outputs).any():
            raise self.wrong("outputs contain NaN, which is neither a box nor a score")
        weights = self.weights_like(np.zeros(len(targets)), sample_weight)
        for place, (output, row) in enumerate(zip(outputs, targets, strict=True)):
            found = self._read(output.astype(np.float64))
            wanted = row.astype(np.float64)
            sides = _sides(wanted[:, 1:].T, self.box_format or "cxcywh")
            counted = ((sides[:, 2:] > sides[:, :2]).all(axis=1)) & (wanted[:, 0] >= 0)
            labels = whole(self, wanted[counted, 0])
            if self.layout == "predictions":
                check_labels(self, labels, output.shape[self._axis] - 4)
            weight = 1.0 if weights is None else float(weights[place])
            if weight:
                self._add(found, _Boxes(labels, sides[counted]), weight)

    @property
    def _axis(self) -> int:
        """The axis of the numbers of a point, in the output of an image."""
        return 0 if self.axis is None else (self.axis - 1) % 2

    def _read(self, output: Array) -> _Boxes:
        """Returns the detections of an image, the best ones first."""
        if self.layout == "detections":
            if output.ndim != 2 or output.shape[1] != 6:
                raise self.wrong(
                    "outputs must have shape (N, detections, 6), a box, a score and a class for "
                    f"each detection, got shape {['N', *output.shape]}"
                )
            rows = output[output[:, 4] > 0]
            rows = rows[np.argsort(-rows[:, 4], kind="stable")]
            return _Boxes(whole(self, rows[:, 5]), rows[:, :4], rows[:, 4])
        if output.ndim != 2 or output.shape[self._axis] < 5:
            raise self.wrong(
                "outputs must have shape (N, 4 + classes, points), boxes and scores, got shape "
                f"{['N', *output.shape]}; set axis=2 for (N, points, 4 + classes), or "
                "layout='detections'"
            )
        numbers = np.moveaxis(output, self._axis, 0)
        scores = numbers[4:].reshape(-1)
        best = np.arange(len(scores))
        if len(scores) > self.candidates:
            best = np.sort(np.argpartition(-scores, self.candidates)[: self.candidates])
        best = best[np.argsort(-scores[best], kind="stable")]
        labels, points = np.divmod(best, numbers.shape[1])
        sides = _sides(numbers[:4, points], self.box_format or "cxcywh")
        return _Boxes(labels, sides, scores[best])

    def _add(self, found: _Boxes, wanted: _Boxes, weight: float) -> None:
        """Adds an image."""
        for label in np.union1d(found.labels, wanted.labels).tolist():
            own = found.of(label)
            if self.layout == "predictions":
                own = own.without_overlaps(self.suppression, self.max_detections)
            own = own.first(self.max_detections)
            objects = wanted.of(label)
            overlaps = _overlaps(own.sides, objects.sides)
            matches = np.array([_matched(overlaps, each) for each in self.iou_thresholds])
            known = self._classes.setdefault(label, _Class())
            known.objects += weight * len(objects.sides)
            known.scores.append(own.scores)
            known.weights.append(np.full(len(own.scores), weight))
            known.matches.append(matches)

    def result(self) -> float:
        """Returns the mean over classes and thresholds."""
        if self._shown_in is not None:
            self._shown_in._classes = self._classes
        found = self._precisions()
        return float(np.nanmean(found)) if np.isfinite(found).any() else math.nan

    def at(self, iou_threshold: float) -> float:
        """Returns the mean over classes at one of the thresholds, such as 0.5.

        Raises:
            ArgumentError: If it is none of ``iou_thresholds``.
        """
        places = np.flatnonzero(np.isclose(self.iou_thresholds, iou_threshold))
        if not len(places):
            raise ArgumentError(
                f"{self.named('at')}: the threshold must be one of iou_thresholds, "
                f"{list(self.iou_thresholds)}, got {iou_threshold!r}"
            )
        found = self._precisions()[:, places[0]]
        return float(np.nanmean(found)) if np.isfinite(found).any() else math.nan

    def per_class(self) -> Array:
        """Returns the mean over thresholds for each class; NaN for classes without any object."""
        return np.asarray(self._precisions().mean(axis=1))

    def _precisions(self) -> Array:
        """Returns the average precision of each class at each threshold."""
        size = max(self._classes, default=-1) + 1
        result = np.full((size, len(self.iou_thresholds)), np.nan)
        for label, known in self._classes.items():
            if known.objects:
                result[label] = known.precisions()
        return result


@dataclass
class _Class:
    """The detections of a class, image by image.

    Attributes:
        objects: The number of objects, or the sum of their weights.
        scores: The scores of detections.
        weights: Their weights.
        matches: Whether they are right, of shape (thresholds, detections).
    """

    objects: float = 0.0
    scores: list[Array] = field(default_factory=list)
    weights: list[Array] = field(default_factory=list)
    matches: list[Array] = field(default_factory=list)

    def precisions(self) -> Array:
        """Returns the average precision at each threshold."""
        order = np.argsort(-np.concatenate(self.scores), kind="stable")
        weights = np.concatenate(self.weights)[order]
        result = []
        for right in np.concatenate(self.matches, axis=1)[:, order]:
            hits = np.cumsum(weights * right)
            precision = hits / np.maximum(np.cumsum(weights), np.finfo(float).tiny)
            best = np.maximum.accumulate(precision[::-1])[::-1]
            places = np.searchsorted(hits / self.objects, _RECALLS, side="left")
            result.append(np.append(best, 0)[places].mean())
        return np.array(result)


@dataclass(frozen=True)
class _Boxes:
    """Objects or detections of an image.

    Attributes:
        labels: Their classes.
        sides: Their boxes, of shape (count, 4): x1, y1, x2, y2.
        scores: The scores of detections, the best ones first.
    """

    labels: npt.NDArray[np.int64]
    sides: Array
    scores: Array = field(default_factory=lambda: np.zeros(0))

    def _chosen(self, which: Any) -> _Boxes:
        scores = self.scores[which] if len(self.scores) else self.scores
        return _Boxes(self.labels[which], self.sides[which], scores)

    def of(self, label: int) -> _Boxes:
        """Returns those of a class."""
        return self._chosen(self.labels == label)

    def first(self, count: int) -> _Boxes:
        """Returns the first ones."""
        return self._chosen(slice(count))

    def without_overlaps(self, limit: float, most: int) -> _Boxes:
        """Returns the best ones that overlap no better one by more than a limit."""
        kept: list[int] = []
        near = _overlaps(self.sides, self.sides) > limit
        left = np.ones(len(near), np.bool)
        for place, row in enumerate(near):
            if left[place] and len(kept) < most:
                kept.append(place)
                left &= ~row
        return self._chosen(kept)


def _sides(boxes: Array, box_format: str) -> Array:
    """Returns the corners x1, y1, x2, y2 of boxes (4, count), of shape (count, 4)."""
    a, b, c, d = boxes
    if box_format == "yxyx":
        a, b, c, d = b, a, d, c
    elif box_format == "xywh":
        c, d = a + c, b + d
    elif box_format == "cxcywh":
        a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
    return np.stack(
        [np.minimum(a, c), np.minimum(b, d), np.maximum(a, c), np.maximum(b, d)], axis=1
    )


def _overlaps(first: Array, second: Array) -> Array:
    """Returns the intersection over union of each box with each other one."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = np.maximum(high - low, 0).prod(axis=2)
    sizes = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    union = sizes[0][:, None] + sizes[1][None, :] - shared
    return np.asarray(shared / np.where(union > 0, union, 1))


def _matched(overlaps: Array, threshold: float) -> npt.NDArray[np.bool]:
    """Returns which detections, the best ones first, are right at an IoU threshold."""
    right = np.zeros(len(overlaps), np.bool)
    free = np.ones(overlaps.shape[1], np.bool)
    least = min(threshold, 1 - 1e-10)
    near = overlaps >= least
    for place in np.flatnonzero(near.any(axis=1)):
        row, best = overlaps[place], np.flatnonzero(free & near[place])
        if len(best):
            # pycocotools takes the last one of equal overlaps.
            taken = best[len(best) - 1 - int(np.argmax(row[best][::-1]))]
            right[place], free[taken] = True, False
    return right
