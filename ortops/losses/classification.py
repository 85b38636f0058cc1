"""Classification losses, for mutually exclusive or independent classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import boolean, number, whole_number
from ortops._common.numbers import cast_numbers, real
from ortops.errors import ArgumentError, ModelError
from ortops.graph.labels import Labels, add_labels
from ortops.graph.tensor import Tensor, op, shape_of, zeros_like
from ortops.losses.loss import (
    Loss,
    Reads,
    Shape,
    Sources,
    Terms,
    check_integer,
    check_number,
    check_numbers,
    count_type,
    mean_of,
    mean_or_sum,
    softplus,
    unless_empty,
    weighted_mean,
)

__all__ = [
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "Focal",
    "Hinge",
    "NegativeLogLikelihood",
    "NextToken",
    "SoftmaxCrossEntropy",
]

Factors: TypeAlias = float | Sequence[Any]
"""A number, or nested sequences of them."""


@dataclass(frozen=True)
class ClassLoss(Loss):
    """Base class of losses that compare class scores with integer labels. Use a subclass.

    Args:
        output: See `Loss`.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: The class axis: by default that of the Softmax at the end of the model, if any,
            else 1. Labels have the shape of the prediction without this axis.
    """

    _: KW_ONLY
    axis: int | None = None

    shifts_labels: ClassVar[bool] = False
    """Whether a score is compared with the label at the next position."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_integer(self, "axis")

    @property
    def default_target(self) -> str:
        """The default name of the target input."""
        return "labels"

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns int64 and the prediction's shape without the class axis."""
        shape = prediction.shape
        if shape is None:
            return np.dtype(np.int64), None
        if len(shape) < 2:
            raise ModelError(
                f"loss {self.name}: {self.reads.replace('_', '-')} must have shape (N, C) or "
                f"(N, C, d1, …), but output '{prediction.name}' has shape {list(shape)}"
            )
        axis = self.class_axis(prediction)
        if shape[axis] == 1:
            raise ModelError(
                f"loss {self.name}: output '{prediction.name}' of shape {list(shape)} has only one "
                "class, whose probability is always 1; use BinaryCrossEntropyWithLogits, or name "
                "another tensor with output="
            )
        return np.dtype(np.int64), (*shape[:axis], *shape[axis + 1 :])

    def class_axis(self, prediction: Tensor) -> int:
        """Returns the class axis, counted from the front.

        Raises:
            ModelError: If the prediction has no such axis.
        """
        axis, shape = 1 if self.axis is None else self.axis, prediction.shape
        rank = None if shape is None else len(shape)
        if rank is None and axis >= 0:
            return axis
        if rank is None or not -rank <= axis < rank or axis % rank == 0:
            raise ModelError(
                f"loss {self.name}: axis must be the class axis of '{prediction.name}', which has "
                f"shape {None if shape is None else list(shape)}, and not the first, got {axis}"
            )
        return axis % rank

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the prediction and the labels."""
        prediction, axis = sources.prediction(self, self.output, self.reads, self.axis)
        loss = replace(self, axis=axis)
        dtype, shape = loss.target_type(prediction)
        name = self.target or self.default_target
        labels = sources.input(self, name, dtype, shape, prediction)
        loss.note_labels(labels, prediction)
        return loss, (prediction, labels)

    def note_labels(self, labels: Tensor, prediction: Tensor) -> None:
        """Records the valid labels in the file, so that sessions can check their feeds."""
        classes = (
            None if prediction.shape is None else prediction.shape[self.class_axis(prediction)]
        )
        ignored = getattr(self, "ignore_index", None)
        add_labels(
            labels.value,
            Labels(
                classes=classes if isinstance(classes, int) else None,
                ignored=None if ignored is None else int(ignored),
                of_tokens=self._scores_tokens(prediction),
            ),
        )

    def _scores_tokens(self, prediction: Tensor) -> bool:
        """Whether scores (N, d, C) are compared with labels at the same position."""
        rank = None if prediction.shape is None else len(prediction.shape)
        return rank == 3 and not self.shifts_labels and self.class_axis(prediction) == 2

    def classes_second(self, prediction: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Moves the classes to axis 1; if they are on the last axis, all others become rows."""
        axis = self.class_axis(prediction)
        rank = None if prediction.shape is None else len(prediction.shape)
        if axis == 1:
            return prediction, labels
        if rank is not None and axis == rank - 1:
            rows = op.Reshape(prediction, op.Concat([-1], shape_of(prediction)[-1:], axis=0))
            classes = prediction.shape[-1] if prediction.shape else None
            return rows.with_shape([None, classes]), op.Reshape(labels, [-1])
        order = [0, axis, *(other for other in range(1, rank or 0) if other != axis)]
        return op.Transpose(prediction, perm=order), labels

    def class_factors(self, argument: str, prediction: Tensor, axis: int = 1) -> Any:
        """Returns an argument with one number for each class as an array.

        Args:
            argument: The argument's name.
            prediction: The prediction.
            axis: Its class axis.

        Raises:
            ModelError: If their count is not that of the classes, or a number overflows.
        """
        array = _in_type(self, argument, prediction.dtype)
        classes = prediction.shape[axis] if prediction.shape else None
        if isinstance(classes, int) and array.shape != (classes,):
            raise ModelError(
                f"loss {self.name}: {argument} must have one number for each of the {classes} "
                f"classes, got shape {list(array.shape)}"
            )
        return array


def safe_labels(labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Returns labels that are valid indices, and a mask of those that count (None: all)."""
    if ignore_index is None:
        return labels, None
    counted = op.Not(op.Equal(labels, ignore_index))
    return op.Where(counted, labels, 0), counted


def like_labels(losses: Tensor, labels: Tensor) -> Tensor:
    """Returns losses of labels in the shape of the labels: `classes_second` may flatten them."""
    shaped = op.Reshape(losses, op.Shape(labels))
    return shaped if labels.shape is None else shaped.with_shape(labels.shape)


@dataclass(frozen=True)
class _Likelihood(ClassLoss):
    """A loss that is computed from log-probabilities."""

    _: KW_ONLY
    ignore_index: int | None = None
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_integer(self, "ignore_index")
        check_numbers(self, "weights", rank=1)

    def count(self, labels: Tensor, weights: Any, dtype: np.dtype[Any]) -> Tensor:
        """Returns the divisor of the sum of the losses."""
        if self.reduction == "sum":
            return labels.tape.constant(np.array(1, dtype))
        each = self.counts(labels, weights, dtype)
        return op.Size(labels).astype(dtype) if each is None else op.ReduceSum(each, keepdims=0)

    def counts(self, labels: Tensor, weights: Any, dtype: np.dtype[Any]) -> Tensor | None:
        """Returns how much each label counts in the mean; None if all count 1."""
        labels, counted = safe_labels(labels, self.ignore_index)
        if weights is None:
            return None if counted is None else counted.astype(dtype)
        each = op.Gather(weights.astype(dtype), labels)
        return each if counted is None else op.Where(counted, each, 0)

    @property
    def may_be_empty(self) -> bool:
        """Whether the loss may be a mean over nothing, because labels can be ignored."""
        some_count = self.ignore_index is not None or self.weights is not None
        return some_count and self.reduction != "sum"


@dataclass(frozen=True)
class SoftmaxCrossEntropy(_Likelihood):
    """Softmax cross-entropy between logits and integer labels, averaged over the labels.

    Logits have shape (N, C) or (N, C, d1, …), labels (N) or (N, d1, …) with values in [0, C).
    If the model ends in a Softmax, LogSoftmax or Sigmoid, the logits are the tensor before it. If
    it computes probabilities in another way, their logarithms are used as logits.

    With ``probabilities``, labels are probabilities of the classes (soft or one-hot labels), of the
    shape of the logits. Then the loss of a row is −Σ weight · probability · log p over the classes,
    and the mean divides by the number of rows (and positions), whatever the weights are. Metrics
    compare with the most likely class.

    Args:
        output: The logits, or their Softmax; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: See `ClassLoss`; -1 for a language model's (batch, sequence, vocabulary).
        ignore_index: A label to ignore. If all labels are ignored, the loss is 0.
        weights: A weight for each class. The loss is the weighted average; 0 if all weights are 0.
        label_smoothing: The probability mass, in [0, 1], that is spread over all classes.
        probabilities: Whether labels are probabilities, in place of class numbers.

    Source:
        Schema of SoftmaxCrossEntropyLoss, ai.onnx version 13; the same as
        torch.nn.CrossEntropyLoss of labels, or of probabilities of classes. Smoothing: Szegedy et
        al., 2016 (arXiv:1512.00567).

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> logits = [[0.0, 0.0], [0.0, 100.0]]
        >>> loss_at(SoftmaxCrossEntropy(), logits, labels=[0, 1])  # log 2 and 0
        0.3466
        >>> loss_at(SoftmaxCrossEntropy(ignore_index=1), logits, labels=[0, 1])
        0.6931
        >>> soft = SoftmaxCrossEntropy(probabilities=True)
        >>> loss_at(soft, logits, labels=[[0.5, 0.5], [0.0, 1.0]])
        0.3466
    """

    _other_names: ClassVar[tuple[str, ...]] = (
        "crossentropy",
        "ce",
        "softmaxcrossentropywithlogits",
        "sparsecategoricalcrossentropy",
    )

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    label_smoothing: float = 0.0
    probabilities: bool = False

    reads: ClassVar[Reads] = "logits"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "label_smoothing", minimum=0, maximum=1)
        boolean(f"loss {self.name}: probabilities", self.probabilities)
        if self.probabilities and type(self).terms is not SoftmaxCrossEntropy.terms:
            raise ArgumentError(
                f"loss {self.name}: probabilities must be False, because its labels are class "
                "numbers, got True; use SoftmaxCrossEntropy"
            )
        if self.probabilities and self.ignore_index is not None:
            raise ArgumentError(
                f"loss {self.name}: ignore_index requires class numbers, got ignore_index="
                f"{self.ignore_index!r} with probabilities=True; leave it out, and use "
                "sample_weight= to ignore rows"
            )

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns int64 and the shape without the class axis, or those of probabilities."""
        found = super().target_type(prediction)
        return (prediction.dtype, prediction.shape) if self.probabilities else found

    def note_labels(self, labels: Tensor, prediction: Tensor) -> None:
        """Records the valid labels in the file, if they are class numbers."""
        if not self.probabilities:
            super().note_labels(labels, prediction)

    def _of_probabilities(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss of each row or position, for probabilities of the classes."""
        axis = self.class_axis(prediction)
        log_p = op.LogSoftmax(prediction, axis=axis)
        if self.weights is not None:
            weights = self.class_factors("weights", prediction, axis)
            log_p = log_p * weights.reshape(-1, *(1,) * (log_p.ndim - axis - 1))
        losses = op.ReduceSum(target * log_p, [axis], keepdims=0)
        if self.label_smoothing:
            spread = op.ReduceMean(log_p, [axis], keepdims=0)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * spread
        return -losses

    def _spread(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Emits the loss of each label if all classes were equally right; 0 for ignored ones."""
        log_p = op.LogSoftmax(logits, axis=1)
        if weights is not None:
            log_p = log_p * weights.reshape(-1, *(1,) * (logits.ndim - 2))
        spread = -op.ReduceMean(log_p, [1], keepdims=0)
        if self.ignore_index is None:
            return spread
        return op.Where(op.Equal(labels, self.ignore_index), 0.0, spread)

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the sum of the weights of the labels that count."""
        if self.probabilities:
            return mean_or_sum(self._of_probabilities(prediction, target), self.reduction)
        logits, labels = self.classes_second(prediction, target)
        weights = None if self.weights is None else self.class_factors("weights", logits)
        loss = op.SoftmaxCrossEntropyLoss(
            logits, labels, weights, ignore_index=self.ignore_index, reduction=self.reduction
        )
        count = self.count(labels, weights, count_type(logits))
        if self.may_be_empty:
            loss = unless_empty(loss, count)
        if self.label_smoothing:
            spread = self._spread(logits, labels, weights)
            total = op.ReduceSum(spread.astype(count.dtype), keepdims=0)
            smooth = mean_of(total, count) if self.may_be_empty else total / count
            smooth = smooth.astype(loss.dtype)
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * smooth
        return loss, count

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each label."""
        if self.probabilities:
            return self._of_probabilities(prediction, target), None
        logits, labels = self.classes_second(prediction, target)
        weights = None if self.weights is None else self.class_factors("weights", logits)
        losses = op.SoftmaxCrossEntropyLoss(
            logits, labels, weights, ignore_index=self.ignore_index, reduction="none"
        )
        if self.label_smoothing:
            spread = self._spread(logits, labels, weights)
            losses = (1 - self.label_smoothing) * losses + self.label_smoothing * spread
        counts = self.counts(labels, weights, count_type(logits))
        return like_labels(losses, target), None if counts is None else like_labels(counts, target)


@dataclass(frozen=True)
class NextToken(SoftmaxCrossEntropy):
    """Softmax cross-entropy between the logits of a language model and the next token.

    Logits have shape (batch, sequence, vocabulary). Labels have shape (batch, sequence) and are not
    shifted: they are the input ids, or ``ignore_index`` for padding and prompts. The logits at a
    position are compared with the label at the next position; the label at the first position is
    not used. The loss is averaged over the labels that are not ignored.

    Args:
        output: The logits, or their Softmax; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: The axis of the vocabulary, which must be the last.
        ignore_index: A label to ignore. If all labels are ignored, the loss is 0.
        weights: A weight for each token of the vocabulary; see `SoftmaxCrossEntropy`.
        label_smoothing: See `SoftmaxCrossEntropy`.

    Source:
        ``ForCausalLMLoss`` of Hugging Face's transformers.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> logits = [[[0.0, 100.0], [0.0, 0.0], [7.0, 9.0]]]
        >>> loss_at(NextToken(), logits, labels=[[0, 1, 0]])  # the mean of 0 and log 2
        0.3466
    """

    _other_names = ("causallm",)

    _: KW_ONLY
    axis: int | None = -1
    ignore_index: int | None = -100

    shifts_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        whole_number(f"loss {self.name}: ignore_index", self.ignore_index)

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns int64 and (batch, sequence)."""
        shape = prediction.shape
        if shape is None or len(shape) != 3 or self.class_axis(prediction) != 2:
            raise ModelError(
                f"loss {self.name}: logits must have shape (batch, sequence, vocabulary), but "
                f"output '{prediction.name}' has shape {None if shape is None else list(shape)}; "
                "name the logits with output="
            )
        return super().target_type(prediction)

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the sum of the weights of the labels that count."""
        # The labels are shifted, not the logits, which may take gigabytes.
        ignored = np.array(self.ignore_index, np.int64)
        return super().terms(prediction, op.Pad(target[:, 1:], [0, 0, 0, 1], ignored))

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss at each position."""
        ignored = np.array(self.ignore_index, np.int64)
        shifted = op.Pad(target[:, 1:], [0, 0, 0, 1], ignored)
        return super().each(prediction, like_labels(shifted, target))


@dataclass(frozen=True)
class NegativeLogLikelihood(_Likelihood):
    """The average of −x at the labels, where x are log-probabilities.

    Log-probabilities have shape (N, C) or (N, C, d1, …), labels (N) or (N, d1, …) with values in
    [0, C). If the model ends in a Softmax, x is the LogSoftmax of the logits before it.

    Args:
        output: The log-probabilities, or the probabilities; the first floating-point output by
            default.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: See `ClassLoss`.
        ignore_index: A label to ignore. If all labels are ignored, the loss is 0.
        weights: A weight for each class. The loss is the weighted average; 0 if all weights are 0.

    Source:
        Schema of NegativeLogLikelihoodLoss, ai.onnx version 13; the same as torch.nn.NLLLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> log = [[-1.0, -0.5], [-2.0, -0.1]]
        >>> loss = NegativeLogLikelihood(weights=[3, 1])
        >>> loss_at(loss, log, labels=[0, 1])  # (3 · 1 + 1 · 0.1) / (3 + 1)
        0.775
    """

    _other_names = ("nll",)

    not_negative: ClassVar[bool] = True
    reads: ClassVar[Reads] = "log_probabilities"

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the sum of the weights of the labels that count."""
        x, labels = self.classes_second(prediction, target)
        weights = None if self.weights is None else self.class_factors("weights", x)
        loss = op.NegativeLogLikelihoodLoss(
            x, labels, weights, ignore_index=self.ignore_index, reduction=self.reduction
        )
        count = self.count(labels, weights, count_type(x))
        return unless_empty(loss, count) if self.may_be_empty else loss, count

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each label."""
        x, labels = self.classes_second(prediction, target)
        weights = None if self.weights is None else self.class_factors("weights", x)
        losses = op.NegativeLogLikelihoodLoss(
            x, labels, weights, ignore_index=self.ignore_index, reduction="none"
        )
        counts = self.counts(labels, weights, count_type(x))
        return like_labels(losses, target), None if counts is None else like_labels(counts, target)


@dataclass(frozen=True)
class Hinge(ClassLoss):
    """Multi-class hinge loss: the sum of max(0, margin − x[y] + x[j])ᵖ over j ≠ y, divided by C.

    Scores x have shape (N, C) or (N, C, d1, …), labels y (N) or (N, d1, …) with values in [0, C).
    The loss is averaged over all labels, with equal weight.

    Args:
        output: The scores; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: See `ClassLoss`.
        p: The exponent, 1 or 2.
        margin: How much higher than the others the score of the label should be.
        weights: A factor for the loss of each class.

    Source:
        Weston and Watkins, 1999; the same as torch.nn.MultiMarginLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(Hinge(), [[2.0, 1.5, 0.0]], labels=[0])  # (0.5 + 0) / 3
        0.1667
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    p: int = 1
    margin: float = 1.0
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if real(self.p) not in (1, 2):
            raise ArgumentError(f"loss {self.name}: p must be 1 or 2, got {self.p!r}")
        check_number(self, "margin")
        check_numbers(self, "weights", rank=1)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss of each label."""
        x, labels = self.classes_second(prediction, target)
        column = op.Unsqueeze(labels, [1])
        picked = op.GatherElements(x, column, axis=1)
        over = op.Relu(x - picked + self.margin)
        over = op.ScatterElements(over, column, zeros_like(picked), axis=1)
        losses = op.ReduceMean(over * over if self.p == 2 else over, [1], keepdims=0)
        if self.weights is None:
            return losses
        return losses * op.Gather(self.class_factors("weights", x), labels)

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each label."""
        return like_labels(self.elements(prediction, target), target), None


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy −t log p − (1 − t) log(1 − p) of probabilities, averaged.

    Logarithms are clamped at −100, with gradient 0 (in float32 at −87, where denormal numbers
    begin). If the model ends in a Sigmoid, `BinaryCrossEntropyWithLogits` is exact.

    Args:
        output: The probabilities p, of any shape; the first floating-point output by default.
        target: See `Loss`; targets t are in [0, 1].
        reduction: See `Loss`; the average is over all elements, whatever their weights.
        weights: Factors that are broadcast to the shape of the losses, or None.

    Source:
        torch.nn.BCELoss, except for the gradient of the logarithm if p or 1 − p is below 1e-12.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(BinaryCrossEntropy(), [0.5, 0.25], targets=[1, 0.0])  # -½ (log ½ + log ¾)
        0.4904
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    weights: Factors | None = None

    reads: ClassVar[Reads] = "probabilities"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_numbers(self, "weights")

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the losses."""
        wide = count_type(prediction)  # float16 has low resolution near 1
        p, t = prediction.astype(wide), target.astype(wide)
        losses = -(t * _bounded_log(p) + (1 - t) * _bounded_log(1 - p))
        losses = losses.astype(prediction.dtype)
        return losses if self.weights is None else losses * _factors(self, "weights", prediction)


def _bounded_log(p: Tensor) -> Tensor:
    """Returns log p, clamped at −100."""
    least = max(float(np.finfo(p.dtype).tiny), float(np.exp(-100.0)))
    return op.Where(op.Less(p, least), -100.0, op.Log(op.Max(p, least)))


def _in_type(loss: Loss, argument: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Converts a numeric argument to the type of the prediction."""
    array, lost = cast_numbers(np.asarray(getattr(loss, argument)), dtype)
    if lost is not None:
        raise ModelError(
            f"loss {loss.name}: {argument} contains {lost}, which overflows {dtype}, the type of "
            "the prediction; use smaller numbers"
        )
    return array


def _factors(loss: Loss, argument: str, prediction: Tensor) -> Any:
    """Returns factors as an array, which must broadcast to the shape of the prediction."""
    array = _in_type(loss, argument, prediction.dtype)
    shape = prediction.shape
    if shape is not None:
        pairs = zip(reversed(array.shape), reversed(shape), strict=False)
        fits = all(count in (1, size) or not isinstance(size, int) for count, size in pairs)
        if not fits or array.ndim > len(shape):
            raise ModelError(
                f"loss {loss.name}: {argument} must broadcast to the shape of "
                f"'{prediction.name}', {list(shape)}, got shape {list(array.shape)}"
            )
    return array


@dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(Loss):
    """Binary cross-entropy between the sigmoid of logits and targets in [0, 1], averaged.

    Computed as ``softplus(x) − x · t``, without overflow. If the model ends in a Sigmoid, the
    logits are the tensor before it.

    Args:
        output: The logits, of any shape, or their Sigmoid; the first floating-point output by
            default.
        target: See `Loss`.
        reduction: See `Loss`; the average is over all elements, whatever their weights.
        weights: Factors that are broadcast to the shape of the losses, or None.
        positive_weight: A factor for the loss of positive targets: a number, one for each class
            along the last axis, or nested sequences that are broadcast to the logits' shape.

    Source:
        torch.nn.BCEWithLogitsLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss = BinaryCrossEntropyWithLogits(positive_weight=3.0)
        >>> loss_at(loss, [0.0, 0.0], targets=[1.0, 0.0])  # (3 + 1) / 2 · log 2
        1.3863
    """

    _other_names = ("bcewithlogits",)

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    weights: Factors | None = None
    positive_weight: Factors | None = None

    reads: ClassVar[Reads] = "logits"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_numbers(self, "weights")
        check_numbers(self, "positive_weight")

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the logits and the targets."""
        return self, _independent_classes(self, sources, "use SoftmaxCrossEntropy")

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the losses; with a positive weight p, p t softplus(−x) + (1 − t) softplus(x)."""
        if self.positive_weight is None:
            losses = softplus(prediction) - prediction * target
        else:
            losses = target * softplus(-prediction)
            losses = losses * _factors(self, "positive_weight", prediction)
            losses = losses + (1 - target) * softplus(prediction)
        return losses if self.weights is None else losses * _factors(self, "weights", prediction)


@dataclass(frozen=True)
class MulticlassLoss(ClassLoss):
    """Base class of losses for independent classes or, with ``multiclass``, exclusive ones.

    Args:
        output: See `Loss`.
        target: See `Loss`; ``"labels"`` by default with ``multiclass``, else ``"targets"``.
        reduction: See `Loss`.
        axis: See `ClassLoss`.
        multiclass: Whether classes are mutually exclusive; None decides by the end of the model.
        ignore_index: A label to ignore; only with ``multiclass``.
    """

    _: KW_ONLY
    multiclass: bool | None = None
    ignore_index: int | None = None

    reads: ClassVar[Reads] = "logits"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_integer(self, "ignore_index")
        if not self.multiclass:
            self.check_only_multiclass("ignore_index")

    def check_only_multiclass(self, argument: str) -> None:
        """Raises an ArgumentError if an argument is set that only labels have."""
        if getattr(self, argument) is not None:
            raise ArgumentError(
                f"loss {self.name}: {argument} requires multiclass=True, got {argument}="
                f"{getattr(self, argument)!r}; set multiclass=True or leave {argument} out"
            )

    @property
    def default_target(self) -> str:
        """The default name of the target input."""
        return "labels" if self.multiclass else "targets"

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the logits, and the labels or the targets."""
        if self.multiclass is None:
            is_exclusive = sources.class_axis(self, self.output) is not None
            return replace(self, multiclass=is_exclusive).tensors(sources)
        if self.multiclass:
            return super().tensors(sources)
        return self, _independent_classes(self, sources, "set multiclass=True")


@dataclass(frozen=True)
class Focal(MulticlassLoss):
    """Focal loss: cross-entropy times α (1 − q)^γ, where q is the probability of the true class.

    For independent classes, logits of any shape are compared with targets in [0, 1] of the same
    shape; q is the Sigmoid of x if t = 1, and of −x if t = 0. For exclusive classes
    (``multiclass``), logits of shape (N, C) or (N, C, d1, …) are compared with integer labels of
    shape (N) or (N, d1, …); q is the Softmax at the label. If the model ends in a Softmax or
    Sigmoid, the logits are the tensor before it.

    Args:
        output: The logits; the first floating-point output by default.
        target: See `Loss`; ``"labels"`` by default with ``multiclass``, else ``"targets"``.
        reduction: See `Loss`; the average is over all elements, whatever their α.
        axis: See `ClassLoss`; only with ``multiclass``.
        gamma: γ; with 0 the loss is cross-entropy.
        alpha: α: the factor, in [0, 1], of positive targets; negative ones have the factor 1 − α.
            With ``multiclass``, a factor for each class.
        multiclass: Whether classes are mutually exclusive; by default they are if the model ends in
            a Softmax.
        ignore_index: A label to ignore; only with ``multiclass``. If all labels are ignored, the
            loss is 0.

    Source:
        Lin et al., 2017 (arXiv:1708.02002); for targets between 0 and 1 as
        torchvision.ops.sigmoid_focal_loss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(Focal(gamma=2.0), [0.0], targets=[1.0])  # (1 - ½)² log 2
        0.1733
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    gamma: float = 2.0
    alpha: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "gamma", minimum=0)
        if self.multiclass:
            check_numbers(self, "alpha", rank=1)
            return
        if self.alpha is not None:
            name = f"loss {self.name}: without multiclass=True, alpha"
            number(name, self.alpha, minimum=0, maximum=1)
        self.check_only_multiclass("axis")

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss, and the number of elements that count."""
        elements, counts = self._elements(prediction, target)
        if counts is None:
            return mean_or_sum(elements, self.reduction)
        return weighted_mean(elements, counts, self.reduction)

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each element of the target."""
        elements, counts = self._elements(prediction, target)
        return like_labels(elements, target), None if counts is None else like_labels(
            counts, target
        )

    def _elements(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits the losses, and which of them count; rows may be flattened."""
        if not self.multiclass:
            return self._independent(prediction, target), None
        x, labels = self.classes_second(prediction, target)
        labels, counted = safe_labels(labels, self.ignore_index)
        elements = self._exclusive(x, labels)
        if counted is None:
            return elements, None
        return op.Where(counted, elements, 0.0), counted.astype(elements.dtype)

    def _independent(self, x: Tensor, t: Tensor) -> Tensor:
        losses = t * softplus(-x) + (1 - t) * softplus(x)
        miss = t * op.Sigmoid(-x) + (1 - t) * op.Sigmoid(x)
        losses = losses * self._modulation(miss)
        if self.alpha is None:
            return losses
        positive = float(np.asarray(self.alpha))
        return losses * (positive * t + (1 - positive) * (1 - t))

    def _exclusive(self, x: Tensor, labels: Tensor) -> Tensor:
        log_p = op.LogSoftmax(x, axis=1)
        column = op.Unsqueeze(labels, [1])
        picked = op.GatherElements(log_p, column, axis=1)
        # 1 − q as the sum of the other classes, to avoid cancellation.
        others = op.ScatterElements(op.Exp(log_p), column, zeros_like(picked), axis=1)
        miss = op.ReduceSum(others, [1], keepdims=0)
        losses = -op.Squeeze(picked, [1]) * self._modulation(miss)
        if self.alpha is None:
            return losses
        return losses * op.Gather(self.class_factors("alpha", x), labels)

    def _modulation(self, miss: Tensor) -> Tensor | float:
        """Returns missᵞ with a bounded gradient at 0."""
        if self.gamma == 0:
            return 1.0
        return op.Max(miss, float(np.finfo(miss.dtype).tiny)) ** float(self.gamma)


def _independent_classes(loss: Loss, sources: Sources, instead: str) -> Sequence[Tensor]:
    """Gets logits of independent classes, and targets of the same type and shape.

    Args:
        loss: The loss.
        sources: Provides the tensors.
        instead: The remedy to suggest if the model ends in a Softmax.

    Raises:
        ModelError: If the model ends in a Softmax.
    """
    prediction, axis = sources.prediction(loss, loss.output, "logits")
    if axis is not None:
        raise ModelError(
            f"loss {loss.name}: '{prediction.name}' are the logits of a Softmax, whose classes are "
            f"mutually exclusive; {instead}, or name other logits with output="
        )
    name = loss.target or loss.default_target
    return prediction, sources.input(loss, name, prediction.dtype, prediction.shape, prediction)
