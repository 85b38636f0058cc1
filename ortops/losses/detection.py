"""The loss of object detectors that predict a box and class scores at each anchor point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, whole_number
from ortops.errors import ArgumentError, ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.boxes import BOX_FORMATS, BOX_LOSSES, Box, distribution
from ortops.losses.loss import (
    Loss,
    Part,
    Sources,
    Terms,
    check_name,
    check_number,
    count_type,
    mean_or_sum,
    softplus,
    stopped,
    weighted_by_sample,
    weighted_mean,
)

__all__ = ["TaskAligned"]

Array: TypeAlias = npt.NDArray[np.float64]

_NO_CLASS = float(2**30)
"""A label that makes the run fail."""

_PARTS = ("box", "class", "distribution")


@dataclass(frozen=True)
class TaskAligned(Loss):
    """The loss of an anchor-free detector, whose predictions are assigned to objects by alignment.

    The model predicts a box and C class scores at each of A anchor points, as YOLOv8 and its
    successors do: ``output`` has shape (N, 4 + C, A), boxes first. If Sigmoids compute the scores,
    their logits are the tensors before them. Anchor points are the centers of the cells of grids,
    one for each of the strides, in the order of the strides and by rows.

    Targets have shape (N, M, 5), for at most M objects in an image: the class, from 0 to C − 1,
    and the box, in the format and the unit of the model's boxes. Fill up with rows of zeros: an
    object whose box has no area, or whose class is below 0, does not count. A run fails if a class
    is not an integer below C.

    A point inside the box of an object is aligned with it by t = s^alpha · u^beta, where s is the
    predicted probability of the class, and u the overlap of both boxes: 1 minus the box loss, at
    least 0. The ``top_k`` points with the largest t > 0 are assigned to the object (equal ones are
    all assigned); a point with several objects, to the one with the largest u. Its target score is
    t, scaled so that its largest value of the object is the largest u. Then three losses are
    added, each with its gain: the box loss, weighted by the target scores; the binary cross-entropy
    of all class scores; and the distribution focal loss of the distances to the sides, in units of
    the stride, weighted by the target scores. Each is divided by the sum of the target scores, in
    which an image counts at least 1. The assignment has no gradient.

    Args:
        output: The boxes and class scores, or the boxes alone, or the logits of distances, of which
            boxes are computed; the first floating-point output by default.
        target: See `Loss`; ``"targets"`` by default.
        reduction: See `Loss`; ``"sum"`` does not divide.
        sample_weight: See `Loss`; weights of images.
        scores: A tensor with the class scores (N, C, A), or their logits, if ``output`` has only
            the boxes, (N, 4, A) or (N, A, 4), as NonMaxSuppression reads them, or only distances.
        distribution: A tensor with the logits of distances (N, 4 · bins, A) to the left, top, right
            and bottom side in units of the stride; by default ``output``, if it has distances.
            Without any, there is no distribution focal loss.
        strides: The size of a cell of each grid, in the unit of the boxes.
        image_size: The height and width of images in that unit, or the side of square ones; by
            default square images with as many cells as there are points.
        box_format: The format of boxes in the model and in targets; see `GIoU`.
        box_loss: ``"CIoU"`` or ``"GIoU"``.
        box_gain: The factor of the box loss.
        class_gain: The factor of the binary cross-entropy.
        distribution_gain: The factor of the distribution focal loss.
        top_k: The number of points for an object.
        alpha: The exponent of the probability.
        beta: The exponent of the overlap.

    Source:
        Feng et al., 2021 (arXiv:2108.07755), section 3.2, with the defaults of YOLOv8.

    Example:
        >>> import numpy as np
        >>> from ortops.docs.examples import loss_at
        >>> output = np.zeros((1, 5, 4))  # one class, and a grid of 2 · 2 cells of size 8
        >>> output[0, :, 0] = [4, 4, 8, 8, 100]  # the first cell, certainly
        >>> output[0, 4, 1:] = -100
        >>> loss, none = TaskAligned(strides=[8]), np.zeros((1, 1, 5))
        >>> loss_at(loss, output, targets=[[[0.0, 4.0, 4.0, 8.0, 8.0]]])
        0.0
        >>> loss_at(loss, output, targets=none)  # 0.5 · 100: no object in the image
        50.0
    """

    _other_names = ("v8detection", "tal", "detection", "yolo")

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    scores: str | None = None
    distribution: str | None = None
    strides: Sequence[int] = (8, 16, 32)
    image_size: int | Sequence[int] | None = None
    box_format: str = "cxcywh"
    box_loss: str = "CIoU"
    box_gain: float = 7.5
    class_gain: float = 0.5
    distribution_gain: float = 1.5
    top_k: int = 10
    alpha: float = 0.5
    beta: float = 6.0

    shared: ClassVar[tuple[str, ...]] = ("box_format",)

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        for argument in ("scores", "distribution"):
            if getattr(self, argument) is not None:
                check_name(self, argument)
        choice(f"loss {self.name}: box_format", self.box_format, BOX_FORMATS)
        choice(f"loss {self.name}: box_loss", self.box_loss, tuple(BOX_LOSSES))
        for argument in ("box_gain", "class_gain", "distribution_gain", "alpha", "beta"):
            check_number(self, argument, minimum=0)
        whole_number(f"loss {self.name}: top_k", self.top_k, 1)
        if isinstance(self.strides, str | int) or not len(self.strides):
            raise ArgumentError(
                f"loss {self.name}: strides must be a list of integers >= 1, got {self.strides!r}"
            )
        for stride in self.strides:
            whole_number(f"loss {self.name}: strides", stride, 1)
        if self.image_size is not None:
            for side in self._sides(self.image_size):
                whole_number(f"loss {self.name}: image_size", side, 1)

    def _sides(self, size: int | Sequence[int]) -> tuple[int, int]:
        """Returns the height and width of images."""
        if not isinstance(size, Sequence | np.ndarray):
            return size, size
        if len(size) != 2:
            raise ArgumentError(
                f"loss {self.name}: image_size must be the height and width, or one number for "
                f"square images, got {size!r}"
            )
        return size[0], size[1]

    # ------------------------------------------------------------------------------------- reading

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets boxes, the logits of classes, targets, and distances if there are any."""
        whole, _ = sources.prediction(self, self.output, axis=1)
        shape = whole.shape or ()
        if self.scores and len(shape) == 3 and shape[1] != 4 and shape[2] == 4:
            whole = op.Transpose(whole, perm=[0, 2, 1])
        self._check(whole, 4 if self.scores else 5)
        distances = whole if self.scores and (whole.shape or ())[1] != 4 else None
        if self.scores:
            boxes, (scores, _) = whole, sources.prediction(self, self.scores)
            self._check(scores, 1)
        else:
            boxes, scores = whole[:, :4], whole[:, 4:]
        logits = sources.logits_of(self, scores, self.scores or self.output)
        name = self.target or self.default_target
        target = sources.input(
            self, name, whole.dtype, ((whole.shape or (None,))[0], None, 5), whole
        )
        if self.distribution:
            distances, _ = sources.prediction(self, self.distribution)
        if distances is None:
            return self, (boxes, logits, target)
        self._check(distances, 8, of=4)
        return self, (boxes, logits, target, distances)

    def _check(self, tensor: Tensor, least: int, *, of: int = 1) -> None:
        """Raises an error unless a tensor has enough numbers for each point along axis 1."""
        shape = tensor.shape or ()
        size = shape[1] if len(shape) == 3 else 0
        if not isinstance(size, int) or size < least or size % of:
            what = f"{least} or more" + (f", a multiple of {of}," if of > 1 else "")
            raise ModelError(
                f"loss {self.name}: '{tensor.name}' must have shape (N, numbers, points) with "
                f"{what} numbers for each point, got {list(shape)}; name the tensors with output=, "
                "scores= and distribution=, or cut the model with "
                "ortops.surgery.before_postprocessing, if it suppresses boxes itself"
            )

    def points(self, count: int | None) -> tuple[Array, Array]:
        """Returns the anchor points and the size of their cells.

        Args:
            count: The number of points that the model predicts, if it is known.

        Returns:
            The points (x, y) of shape (A, 2), and the strides (A).

        Raises:
            ModelError: If the grids do not have that many cells.

        Example:
            >>> points, strides = TaskAligned(strides=[8, 16]).points(5)
            >>> points.tolist()
            [[4.0, 4.0], [12.0, 4.0], [4.0, 12.0], [12.0, 12.0], [8.0, 8.0]]
        """
        if self.image_size is not None:
            height, width = self._sides(self.image_size)
        elif count is None:
            raise ModelError(
                f"loss {self.name}: the number of points is not known before a run; give the size "
                "of images as image_size="
            )
        else:
            height = width = round(math.sqrt(count / sum(stride**-2 for stride in self.strides)))
        found, sizes = [], []
        for stride in self.strides:
            rows, columns = -(-height // stride), -(-width // stride)
            y, x = np.divmod(np.arange(rows * columns), max(columns, 1))
            found.append((np.stack([x, y], axis=1) + 0.5) * stride)
            sizes.append(np.full(rows * columns, float(stride)))
        points = np.concatenate(found)
        if count not in (None, len(points)):
            raise ModelError(
                f"loss {self.name}: the model predicts {count} boxes, but images of {height} × "
                f"{width} have {len(points)} cells of strides {list(self.strides)}; give the size "
                "of images as image_size= and the strides as strides="
            )
        return points, np.concatenate(sizes)

    # ------------------------------------------------------------------------------------ the loss

    def parts(self, sources: Sources) -> list[Part]:
        """Emits the loss of boxes, that of classes and that of distances."""
        _, tensors = self.tensors(sources)
        rows = self.rows(*tensors)
        counts, losses = rows[0], rows[1:]
        if self.sample_weight is not None:
            name, dim = self.sample_weight, (counts.shape or (None,))[0]
            weights = sources.sample_weights(self, name, counts.dtype, dim)
            if weights.ndim != 1:
                raise ModelError(
                    f"loss {self.name}: sample_weight '{name}' must have one weight for each "
                    f"image, got {weights.ndim} dimensions"
                )
        not_negative, is_sum = self.sample_weight is None, self.reduction == "sum"
        found = []
        for name, gain, loss in zip(_PARTS, self._gains, losses, strict=False):
            if self.sample_weight is None:
                value, count = self._reduced(loss, counts)
            else:
                value, count = weighted_by_sample(loss, counts, weights, self.reduction)
            found.append(Part(name, gain, value, count, is_sum, False, not_negative))
        return found

    @property
    def _gains(self) -> tuple[float, float, float]:
        return self.box_gain, self.class_gain, self.distribution_gain

    def _reduced(self, losses: Tensor, counts: Tensor) -> Terms:
        if self.reduction == "sum":
            return mean_or_sum(losses, "sum")
        return weighted_mean(losses, counts, "mean")

    def terms(
        self, boxes: Tensor, logits: Tensor, targets: Tensor, distances: Tensor | None = None
    ) -> Terms:
        """Emits the loss, and the sum of the target scores.

        Args:
            boxes: The boxes (N, 4, A), or the same as ``distances``.
            logits: The logits of classes (N, C, A).
            targets: The objects (N, M, 5).
            distances: The logits of distances (N, 4 · bins, A).
        """
        counts, *losses = self.rows(boxes, logits, targets, distances)
        total: Any = sum(gain * loss for gain, loss in zip(self._gains, losses, strict=False))
        value, count = self._reduced(total, counts)
        return value.astype(boxes.dtype), count

    def rows(
        self, boxes: Tensor, logits: Tensor, targets: Tensor, distances: Tensor | None = None
    ) -> list[Tensor]:
        """Emits, for each image, the sum of target scores (at least 1) and the sums of each loss.

        Args:
            boxes: See `terms`.
            logits: See there.
            targets: See there.
            distances: See there.
        """
        wide = count_type(boxes)
        number = (boxes.shape or (None,))[-1]
        points, strides = self.points(number if isinstance(number, int) else None)
        bins = None
        if distances is not None:
            bins = op.Reshape(distances.astype(wide), [0, 4, -1, len(points)])
        if distances is boxes and bins is not None:
            sides = _decoded(bins, points.astype(wide), strides.astype(wide))
        else:
            sides = Box.of(boxes.astype(wide), self.box_format, 1)
        given = _Predictions(sides, logits.astype(wide))
        objects = _Objects.of(targets.astype(wide), self.box_format)
        aligned = self._assign(given, objects, points.astype(wide))
        weights = op.ReduceSum(aligned.scores, [1], keepdims=0)
        counts = op.Max(op.ReduceSum(weights, [1], keepdims=0), 1.0)
        each = BOX_LOSSES[self.box_loss](given.boxes, aligned.boxes)
        cross_entropy = softplus(given.logits) - given.logits * aligned.scores
        found = [
            *(counts, op.ReduceSum(weights * each, [1], keepdims=0)),
            op.ReduceSum(cross_entropy, [1, 2], keepdims=0),
        ]
        if bins is not None:
            x, y = points.T.astype(wide)
            box, sizes = aligned.boxes, strides.astype(wide)
            four = (x - box.left, y - box.top, box.right - x, box.bottom - y)
            goal = op.Concat(*(op.Unsqueeze(side / sizes, [1]) for side in four), axis=1)
            each = op.ReduceMean(distribution(bins, goal, 2), [1], keepdims=0)
            found.append(op.ReduceSum(weights * each, [1], keepdims=0))
        return found

    def _assign(self, given: _Predictions, objects: _Objects, points: Any) -> _Aligned:
        """Assigns points to objects; predictions have shape (N, A), objects (N, M)."""
        x, y = points.T
        box = Box(*(op.Unsqueeze(side, [2]) for side in objects.boxes))
        inside = op.Min(x - box.left, y - box.top, box.right - x, box.bottom - y) > 0
        inside = op.And(inside, op.Unsqueeze(objects.counted, [2])).astype(points.dtype)
        predicted = Box(*(op.Unsqueeze(side, [1]) for side in given.boxes))
        u = inside * op.Max(1 - BOX_LOSSES[self.box_loss](box, predicted), 0.0)
        where = op.Expand(op.Unsqueeze(objects.labels, [2]), op.Shape(u))
        s = op.GatherElements(op.Sigmoid(given.logits), where, axis=1)
        t = s**self.alpha * u**self.beta * inside
        best, _ = op.TopK(t, [min(self.top_k, len(points))], axis=2, outputs=2)
        u = u * op.And(t > 0, t >= best[:, :, -1:]).astype(u.dtype)
        which = op.ArgMax(u, axis=1, keepdims=1)
        numbers = op.Range(0, op.Squeeze(op.Shape(u, start=1, end=2)), 1)
        chosen = op.And(op.Equal(op.Unsqueeze(numbers, [0, 2]), which), u > 0).astype(u.dtype)
        t, u = t * chosen, u * chosen
        most, largest = (op.ReduceMax(each, [2], keepdims=1) for each in (t, u))
        scores = stopped(t / op.Where(most > 0, most, 1.0) * largest)
        classes = op.Range(0, op.Squeeze(op.Shape(given.logits, start=1, end=2)), 1)
        labels = op.Equal(op.Unsqueeze(objects.labels, [1]), op.Unsqueeze(classes, [0, 2]))
        sides = op.Concat(*(op.Unsqueeze(side, [1]) for side in objects.boxes), axis=1)
        goals = op.Split(op.MatMul(sides, chosen), axis=1, num_outputs=4)
        return _Aligned(
            op.MatMul(labels.astype(u.dtype), scores), Box(*(op.Squeeze(g, [1]) for g in goals))
        )


def _decoded(bins: Tensor, points: Any, strides: Any) -> Box:
    """Returns the boxes of logits (N, 4, bins, A) of distances, whose expectations count."""
    count = op.Squeeze(op.Shape(bins, start=2, end=3))
    numbers = op.Reshape(op.Range(0, count, 1).astype(bins.dtype), [-1, 1])
    means = op.ReduceSum(op.Softmax(bins, axis=2) * numbers, [2], keepdims=0) * strides
    left, top, right, bottom = (
        op.Squeeze(each, [1]) for each in op.Split(means, axis=1, num_outputs=4)
    )
    x, y = points.T
    return Box(x - left, y - top, x + right, y + bottom)


class _Predictions(NamedTuple):
    """What a model predicts: boxes (N, A), and logits of classes (N, C, A)."""

    boxes: Box
    logits: Tensor


class _Aligned(NamedTuple):
    """What should be predicted: scores (N, C, A), and boxes (N, A), 0 without an object."""

    scores: Tensor
    boxes: Box


class _Objects(NamedTuple):
    """The objects of images, with one more that does not count, so that there is at least one.

    Attributes:
        labels: The classes (N, M), 0 for objects that do not count.
        boxes: The boxes (N, M).
        counted: Which objects count (N, M).
    """

    labels: Tensor
    boxes: Box
    counted: Tensor

    @classmethod
    def of(cls, targets: Tensor, box_format: str) -> _Objects:
        """Reads targets (N, M, 5)."""
        targets = op.Pad(targets, [0, 0, 0, 0, 1, 0])
        boxes = Box.of(targets[:, :, 1:], box_format)
        labels = op.Squeeze(targets[:, :, :1], [2])
        counted = op.And(op.And(boxes.width > 0, boxes.height > 0), labels >= 0)
        known = op.Where(op.Equal(labels, op.Floor(labels)), labels, _NO_CLASS)
        return cls(op.Where(counted, known, 0.0).astype(np.int64), boxes, counted)
