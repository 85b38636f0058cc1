"""Overlap losses for segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops.errors import ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.classification import MulticlassLoss, safe_labels
from ortops.losses.loss import Terms, check_number, count_type, mean_or_sum, one, rows_of

__all__ = ["Dice"]


@dataclass(frozen=True)
class Dice(MulticlassLoss):
    """1 − D for each class, averaged, where D = (2 Σ p t + smooth) / (Σ p² + Σ t² + smooth).

    By default classes are independent: p is the Sigmoid of logits of shape (N, C, d1, …), and
    targets t in [0, 1] have the same shape. With ``multiclass`` they are mutually exclusive: p is
    the Softmax, and integer labels have shape (N, d1, …). If the model ends in a Softmax or
    Sigmoid, the logits are the tensor before it.

    Sums run over all elements of a class in the batch, so the loss of a row depends on the others.
    With ``per_sample``, D is computed for each row separately.

    Args:
        output: The logits; the first floating-point output by default.
        target: See `Loss`; ``"labels"`` by default with ``multiclass``, else ``"targets"``.
        reduction: See `Loss`; over the classes, and with ``per_sample`` over the rows.
        axis: See `ClassLoss`.
        smooth: Added to numerator and denominator. With 0, a class that is neither present nor
            predicted has loss NaN.
        squared: Whether probabilities and targets are squared in the denominator, as in the paper.
        per_sample: Whether D is computed for each row separately.
        multiclass: Whether classes are mutually exclusive.
        ignore_index: A label to ignore; only with ``multiclass``. A batch (with ``per_sample``, a
            row) in which all labels are ignored is ignored as well: its loss is 0.

    Source:
        Milletari et al., 2016 (arXiv:1606.04797).

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> logits = [[[100.0, 100.0, -100.0]]]  # one class, three pixels: p is 1, 1, 0
        >>> loss = Dice(smooth=0.0)
        >>> loss_at(loss, logits, targets=[[[1.0, 0.0, 0.0]]])  # 1 - 2 · 1 / (2 + 1)
        0.3333
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    smooth: float = 1.0
    squared: bool = True
    per_sample: bool = False
    multiclass: bool | None = False

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "smooth", minimum=0)

    @property
    def couples_rows(self) -> bool:
        """Whether sums run over the whole batch."""
        return not self.per_sample

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the number of rows that count."""
        value, _ = mean_or_sum(self.elements(prediction, target), self.reduction)
        if self.reduction == "sum":
            return value, one(value)
        rows = rows_of(prediction).astype(count_type(value))
        if self.ignore_index is None:
            return value, rows
        counts = op.Not(self._is_empty(op.Equal(target, self.ignore_index))).astype(rows.dtype)
        if not self.per_sample:
            return value, rows * counts
        count = op.ReduceSum(counts, keepdims=0)
        share = rows / op.Where(op.Equal(count, 0), 1, count)
        return value * share.astype(value.dtype), count  # ignored rows have loss 0

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits Σ (p − t)² / (Σ p² + Σ t² + smooth) for each class, which is 1 − D."""
        axis, rank = self.class_axis(prediction), prediction.ndim
        if self.per_sample and rank < 3:
            raise ModelError(
                f"loss {self.name}: per_sample=True requires a tensor of shape (N, C, d1, …), but "
                f"'{prediction.name}' has shape {list(prediction.shape or ())}"
            )
        p = op.Softmax(prediction, axis=axis) if self.multiclass else op.Sigmoid(prediction)
        t, counted = target, None
        if self.multiclass:
            labels, counted = safe_labels(target, self.ignore_index)
            t = self._one_hot(labels, prediction, axis)
            if counted is not None:
                counted = op.Unsqueeze(counted, [axis])
                p, t = op.Where(counted, p, 0.0), op.Where(counted, t, 0.0)
        over: Sequence[int] = [each for each in range(rank) if each != axis]
        over = over[1:] if self.per_sample else over
        if self.squared:
            apart, sizes = (p - t) ** 2.0, p * p + t * t
        else:  # p + t − 2 p t, without cancellation
            apart, sizes = p * (1 - t) + t * (1 - p), p + t
        total = op.ReduceSum(sizes, over, keepdims=0) + self.smooth
        if counted is not None and self.smooth == 0:
            empty = self._is_empty(op.Not(counted))
            total = op.Where(op.Unsqueeze(empty, [1]) if self.per_sample else empty, 1, total)
        return op.ReduceSum(apart, over, keepdims=0) / total

    def _is_empty(self, ignored: Tensor) -> Tensor:
        """Returns whether all labels are ignored, for each row with ``per_sample``, or overall."""
        axes = list(range(1, ignored.ndim)) if self.per_sample else list(range(ignored.ndim))
        return op.Equal(op.ReduceMin(ignored.astype(np.int32), axes, keepdims=0), 1)

    def _one_hot(self, labels: Tensor, prediction: Tensor, axis: int) -> Tensor:
        classes = op.Squeeze(op.Shape(prediction, start=axis, end=axis + 1))
        numbers = op.Reshape(op.Range(0, classes, 1), [-1, *(1,) * (prediction.ndim - 1 - axis)])
        return op.Equal(op.Unsqueeze(labels, [axis]), numbers).astype(prediction.dtype)
