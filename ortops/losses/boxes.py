"""Losses of bounding boxes: overlaps of two boxes, and distributions of their sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ortops._common.arguments import choice, whole_number
from ortops.errors import ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import Loss, Reads, Shape, Terms, count_type, stopped, weighted_mean

__all__ = ["CIoU", "DistributionFocal", "GIoU"]

BOX_FORMATS = ("xyxy", "yxyx", "xywh", "cxcywh")
"""The four numbers of a box: two corners; a corner and the sizes; the center and the sizes."""

_LEAST = 1e-12
"""The smallest area, or squared length, that is divided by."""


class Box(NamedTuple):
    """Boxes by their sides, tensors of shapes that broadcast.

    Attributes:
        left: The smallest x.
        top: The smallest y.
        right: The largest x.
        bottom: The largest y.
    """

    left: Tensor
    top: Tensor
    right: Tensor
    bottom: Tensor

    @classmethod
    def of(cls, boxes: Tensor, box_format: str, axis: int = -1) -> Box:
        """Splits boxes into their sides; corners may be in any order.

        Args:
            boxes: The boxes, with four numbers along an axis.
            box_format: One of `BOX_FORMATS`.
            axis: That axis.
        """
        parts = op.Split(boxes, axis=axis, num_outputs=4)
        a, b, c, d = (op.Squeeze(part, [axis]) for part in parts)
        if box_format == "yxyx":
            a, b, c, d = b, a, d, c
        elif box_format == "xywh":
            c, d = a + c, b + d
        elif box_format == "cxcywh":
            a, b, c, d = a - 0.5 * c, b - 0.5 * d, a + 0.5 * c, b + 0.5 * d
        return cls(op.Min(a, c), op.Min(b, d), op.Max(a, c), op.Max(b, d))

    @property
    def width(self) -> Tensor:
        """The widths, >= 0."""
        return self.right - self.left

    @property
    def height(self) -> Tensor:
        """The heights, >= 0."""
        return self.bottom - self.top

    def around(self, other: Box) -> Box:
        """Returns the smallest boxes that contain two boxes."""
        low = op.Min(self.left, other.left), op.Min(self.top, other.top)
        return Box(*low, op.Max(self.right, other.right), op.Max(self.bottom, other.bottom))


def _overlap(first: Box, second: Box) -> tuple[Tensor, Tensor]:
    """Returns the intersection over union, and the union."""
    width = op.Min(first.right, second.right) - op.Max(first.left, second.left)
    height = op.Min(first.bottom, second.bottom) - op.Max(first.top, second.top)
    shared = op.Max(width, 0.0) * op.Max(height, 0.0)
    union = first.width * first.height + second.width * second.height - shared
    return _ratio(shared, union), union


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Returns part / whole; where the whole is nothing, the part, whose gradient is finite."""
    return part / op.Where(whole > _LEAST, whole, 1.0)


def _giou(first: Box, second: Box) -> Tensor:
    """Returns 1 − GIoU, between 0 and 2."""
    overlap, union = _overlap(first, second)
    around = first.around(second)
    area = around.width * around.height
    return 1 - overlap + _ratio(area - union, area)


def _ciou(first: Box, second: Box) -> Tensor:
    """Returns 1 − CIoU, >= 0."""
    overlap, _ = _overlap(first, second)
    around = first.around(second)
    x = first.left + first.right - second.left - second.right
    y = first.top + first.bottom - second.top - second.bottom
    distance = 0.25 * (x * x + y * y)
    diagonal = around.width * around.width + around.height * around.height
    turned = _angle(first) - _angle(second)
    aspect = (4 / np.pi**2) * turned * turned
    trade_off = stopped(_ratio(aspect, 1 - overlap + aspect))
    return 1 - overlap + _ratio(distance, diagonal) + trade_off * aspect


def _angle(box: Box) -> Tensor:
    """Returns atan(width / height) as 2 atan(w / (h + √(w² + h²))); 0 for a point."""
    width, height = box.width, box.height
    square = width * width + height * height
    length = op.Sqrt(op.Where(square > _LEAST, square, 1.0))
    return 2 * _arctangent(width / (height + length))


def _arctangent(x: Tensor) -> Tensor:
    """Returns atan x for x in [0, 1].

    onnxruntime has an Atan kernel only for float32: in float64, its result is a first estimate y,
    to which atan((x − tan y) / (1 + x tan y)) is added, which is small.
    """
    if x.dtype != np.float64:
        return op.Atan(x)
    estimate = stopped(op.Atan(x.astype(np.float32))).astype(np.float64)
    sine = op.Sin(estimate)
    cosine = op.Sqrt(1 - sine * sine)
    return estimate + (x * cosine - sine) / (cosine + x * sine)


BOX_LOSSES: Mapping[str, Callable[[Box, Box], Tensor]] = {"CIoU": _ciou, "GIoU": _giou}
"""The losses of pairs of boxes, 0 where both are equal."""


@dataclass(frozen=True)
class GIoU(Loss):
    """The average of 1 − GIoU of predicted boxes and target boxes.

    GIoU is IoU − (C − U) / C with the union U of two boxes and the area C of the smallest box that
    contains both, so that boxes apart from each other have a gradient as well. Corners may be in
    any order. Target boxes without an area, such as padding by zeros, do not count. If no box
    counts, the loss is 0.

    Args:
        output: The boxes, with four numbers along an axis; the first floating-point output by
            default.
        target: See `Loss`; boxes of the same shape and format.
        reduction: See `Loss`; over the boxes.
        box_format: ``"xyxy"`` or ``"yxyx"`` (two corners), ``"xywh"`` (the corner with the smallest
            x and y, and width and height) or ``"cxcywh"`` (center, width and height).
        axis: The axis of the four numbers; by default the last one.

    Source:
        Rezatofighi et al., 2019 (arXiv:1902.09630), algorithm 2; the same as
        torchvision.ops.generalized_box_iou_loss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> boxes = [[0.0, 0.0, 2.0, 2.0], [5.0, 5.0, 6.0, 6.0]]
        >>> targets = [[1.0, 0.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]  # the second one is padding
        >>> loss_at(GIoU(), boxes, targets=targets)  # 1 − 2 / 6 + (6 − 6) / 6
        0.6667
    """

    _other_names = ("generalizedboxiou", "generalizediou")

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    box_format: str = "xyxy"
    axis: int = -1

    shared: ClassVar[tuple[str, ...]] = ("box_format",)
    between: ClassVar[Callable[[Box, Box], Tensor]] = staticmethod(_giou)
    """The loss of each pair of boxes."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        choice(f"loss {self.name}: box_format", self.box_format, BOX_FORMATS)
        whole_number(f"loss {self.name}: axis", self.axis)

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns the dtype and shape of the prediction."""
        shape = prediction.shape
        if shape is not None:
            fits = -len(shape) <= self.axis < len(shape)
            if not fits or self.axis in (0, -len(shape)) or shape[self.axis] not in (4, None):
                raise ModelError(
                    f"loss {self.name}: '{prediction.name}' must have four numbers for each box "
                    f"along axis {self.axis}, got shape {list(shape)}; choose the axis with axis="
                )
        return super().target_type(prediction)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss of each box."""
        return self.each(prediction, target)[0]

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the number of boxes that count."""
        losses, counts = self._each(prediction, target)
        value, count = weighted_mean(losses, counts, self.reduction)
        return value.astype(prediction.dtype), count

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each box, and whether it counts."""
        return self._each(prediction, target)

    def _each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        wide = count_type(prediction)
        boxes, goals = (
            Box.of(each.astype(wide), self.box_format, self.axis) for each in (prediction, target)
        )
        counts = op.And(goals.width > 0, goals.height > 0)
        losses = op.Where(counts, type(self).between(boxes, goals), 0.0)
        return losses, counts.astype(wide)


@dataclass(frozen=True)
class CIoU(GIoU):
    """The average of 1 − CIoU of predicted boxes and target boxes.

    CIoU is IoU − ρ² / c² − α v with the distance ρ of the centers, the diagonal c of the smallest
    box that contains both, v = 4 / π² (atan(w / h) − atan(w' / h'))² and α = v / (1 − IoU + v),
    which is constant in the gradient.

    Args:
        output: See `GIoU`.
        target: See `GIoU`.
        reduction: See `GIoU`.
        box_format: See `GIoU`.
        axis: See `GIoU`.

    Source:
        Zheng et al., 2020 (arXiv:1911.08287), equations 8 to 11; the same as
        torchvision.ops.complete_box_iou_loss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> boxes, targets = [[0.0, 0.0, 2.0, 2.0]], [[1.0, 0.0, 3.0, 2.0]]
        >>> loss_at(CIoU(), boxes, targets=targets)  # 1 − 2 / 6 + 1² / (3² + 2²)
        0.7436
    """

    _other_names = ("completeboxiou", "completeiou")

    not_negative: ClassVar[bool] = True
    between: ClassVar[Callable[[Box, Box], Tensor]] = staticmethod(_ciou)


@dataclass(frozen=True)
class DistributionFocal(Loss):
    """Cross-entropy between a distribution over 0 … bins − 1 and the two integers around a target.

    A number y between the integers i and i + 1 is represented by the probabilities i + 1 − y of i
    and y − i of i + 1. Detectors predict the distances from an anchor point to the four sides of a
    box in that way.

    Args:
        output: The logits, with the bins along an axis, or their Softmax; the first floating-point
            output by default.
        target: See `Loss`; numbers of the shape of the logits without that axis. Numbers below 0
            count as 0, numbers above bins − 1 as bins − 1.
        reduction: See `Loss`.
        axis: The axis of the bins; by default the last one.

    Source:
        Li et al., 2020 (arXiv:2006.04388), equation 6.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> logits = [[0.0, 0.0, 100.0]]  # certainly 2
        >>> loss_at(DistributionFocal(), logits, targets=[1.75])  # −0.25 · log e^−100
        25.0
    """

    _other_names = ("dfl", "df")

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    axis: int = -1

    reads: ClassVar[Reads] = "logits"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        whole_number(f"loss {self.name}: axis", self.axis)

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns the dtype, and the shape without the axis of the bins."""
        shape = prediction.shape
        if shape is None:
            return prediction.dtype, None
        if not -len(shape) <= self.axis < len(shape) or self.axis in (0, -len(shape)):
            raise ModelError(
                f"loss {self.name}: axis must be that of the bins of '{prediction.name}', which "
                f"has shape {list(shape)}, and not the first, got {self.axis}"
            )
        place = self.axis % len(shape)
        return prediction.dtype, (*shape[:place], *shape[place + 1 :])

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss of each number."""
        return distribution(prediction, target, self.axis)


def distribution(logits: Tensor, target: Tensor, axis: int) -> Tensor:
    """Returns the distribution focal loss of each number; see `DistributionFocal`.

    Args:
        logits: The logits of the bins.
        target: The numbers.
        axis: The axis of the bins.
    """
    axis %= logits.ndim
    bins = op.Squeeze(op.Shape(logits, start=axis, end=axis + 1))
    last = (bins - 1).astype(logits.dtype)
    numbers = op.Range(0, bins, 1).astype(logits.dtype)
    numbers = op.Reshape(numbers, [-1, *(1,) * (logits.ndim - 1 - axis)])
    near = op.Unsqueeze(op.Min(op.Max(target, 0.0), last), [axis])
    share = op.Max(1 - abs(near - numbers), 0.0)
    return -op.ReduceSum(share * op.LogSoftmax(logits, axis=axis), [axis], keepdims=0)
