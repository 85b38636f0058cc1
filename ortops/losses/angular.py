"""Losses of the angles between embeddings and the centers of classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import numpy as np

from ortops.errors import ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.classification import SoftmaxCrossEntropy
from ortops.losses.loss import Loss, Reads, Sources, Terms, check_name, check_number

__all__ = ["ArcFace"]


@dataclass(frozen=True)
class ArcFace(SoftmaxCrossEntropy):
    """Softmax cross-entropy of cosines, with a margin on the angle to the center of the label.

    The logits are scale · cos θ, and scale · cos(θ + margin) for the label, where θ is the angle
    between an embedding and the center of a class. Where θ + margin exceeds π, it is
    scale · (cos θ − margin · sin margin), so that the loss always falls with θ.

    The prediction is cos θ, of shape (N, C). If the model ends in a linear layer instead, name its
    weight as ``centers`` and its input as ``output``: embeddings (N, D) and centers are then
    normalized here, and the layer's bias does not count. Cosines outside of [−1, 1] make the loss
    NaN.

    Args:
        output: The cosines, or the embeddings; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: See `ClassLoss`.
        ignore_index: See `SoftmaxCrossEntropy`.
        weights: See `SoftmaxCrossEntropy`.
        label_smoothing: See `SoftmaxCrossEntropy`.
        centers: The name of the weight with the centers, of shape (C, D), or else (D, C).
        margin: The margin in radians, in [0, π).
        scale: The factor of the cosines.

    Source:
        Deng et al., 2019 (arXiv:1801.07698), equation 3, with the authors' continuation beyond π.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> cosines = [[1.0, 0.0]]  # 1 · cos(0 + ½ π) and 1 · 0: both classes are equally likely
        >>> loss_at(ArcFace(margin=1.5707963, scale=1.0), cosines, labels=[0])
        0.6931
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    centers: str | None = None
    margin: float = 0.5
    scale: float = 64.0

    reads: ClassVar[Reads] = "values"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.centers is not None:
            check_name(self, "centers", "a weight")
        check_number(self, "margin", minimum=0, below=math.pi)
        check_number(self, "scale", above=0)

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the cosines and the labels."""
        if self.centers is None:
            return super().tensors(sources)
        embeddings, _ = sources.prediction(self, self.output, self.reads)
        centers, _ = sources.prediction(self, self.centers, self.reads)
        cosines = self._cosines(embeddings, centers)
        loss = replace(self, axis=1)
        dtype, shape = loss.target_type(cosines)
        labels = sources.input(self, self.target or self.default_target, dtype, shape, embeddings)
        loss.note_labels(labels, cosines)
        return loss, (cosines, labels)

    def _cosines(self, embeddings: Tensor, centers: Tensor) -> Tensor:
        """Emits the cosines between embeddings (N, D) and the centers of classes."""
        size = embeddings.shape[-1] if embeddings.shape else None
        sizes = list(centers.shape or ())
        if len(embeddings.shape or ()) != 2 or len(sizes) != 2 or size not in sizes:
            raise ModelError(
                f"loss {self.name}: centers '{self.centers}' of shape {sizes} must have an axis of "
                f"the size of the embeddings '{embeddings.name}', of shape "
                f"{list(embeddings.shape or ())}"
            )
        rows = centers if sizes[1] == size else op.Transpose(centers, perm=[1, 0])
        units = [each / op.Max(op.ReduceL2(each, [1]), _least(each)) for each in (embeddings, rows)]
        return op.MatMul(units[0], op.Transpose(units[1], perm=[1, 0]))

    def _with_margin(self, cosines: Tensor, labels: Tensor) -> Tensor:
        """Emits the logits: cosines with the margin at the labels, times the scale."""
        axis = self.class_axis(cosines)
        one = np.array(1, cosines.dtype)
        inside = op.Clip(cosines, -one, one)
        valid = abs(cosines) <= 1.001  # rounding
        inside = op.Where(valid, inside, np.array(np.nan, cosines.dtype))
        # The gradient of the root is infinite at 0, which would make that of the cosine NaN.
        sine = op.Sqrt(op.Max(one - inside * inside, _least(cosines)))
        moved = inside * math.cos(self.margin) - sine * math.sin(self.margin)
        below = inside - self.margin * math.sin(self.margin)
        moved = op.Where(inside > math.cos(math.pi - self.margin), moved, below)
        classes = op.Range(0, op.Squeeze(op.Shape(cosines, start=axis, end=axis + 1)), 1)
        after = list(range(1, cosines.ndim - axis))
        classes = op.Unsqueeze(classes, after) if after else classes
        is_label = op.Equal(op.Unsqueeze(labels, [axis]), classes)
        return op.Where(is_label, moved, inside) * self.scale

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the sum of the weights of the labels that count."""
        return super().terms(self._with_margin(prediction, target), target)

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each label."""
        return super().each(self._with_margin(prediction, target), target)


def _least(like: Tensor) -> np.ndarray[tuple[()], np.dtype[np.floating]]:
    """Returns the smallest square, or norm, that does not count as 0."""
    return np.array(1e-12, like.dtype)
