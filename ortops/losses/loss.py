"""The base class of losses, and the arithmetic that losses share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from ortops._common.arguments import choice, number, text, whole_number
from ortops.errors import ArgumentError, ModelError
from ortops.graph.constants import Dim
from ortops.graph.files.loading import ModelLike
from ortops.graph.tensor import Tensor, op

Reads: TypeAlias = Literal["values", "logits", "probabilities", "log_probabilities"]
"""How a loss interprets its prediction."""

Terms: TypeAlias = tuple[Tensor, Tensor]
"""A loss, already divided by its count, and the count. Both are scalars."""

Shape: TypeAlias = tuple[Dim, ...] | None


class Sources(Protocol):
    """Provides the tensors that a loss reads: tensors of the model and new inputs."""

    def prediction(
        self, loss: Loss, name: str | None, reads: Reads = "values", axis: int | None = None
    ) -> tuple[Tensor, int | None]:
        """Returns a tensor of the model in the form that the loss reads.

        Args:
            loss: The loss, for messages.
            name: Any tensor of the model; the first floating-point output by default.
            reads: How the loss interprets it. Logits are found before a final Softmax, LogSoftmax
                or Sigmoid.
            axis: The class axis, if given.

        Returns:
            The tensor, and the class axis: the given one, else that of a Softmax at the end of the
            model, else None.

        Raises:
            ModelError: If the tensor does not exist, or cannot be interpreted in that way.
        """

    def class_axis(self, loss: Loss, name: str | None) -> int | None:
        """Returns the axis of a Softmax or LogSoftmax that computes a tensor; None if none does.

        Args:
            loss: The loss, for messages.
            name: As for `prediction`.
        """

    def input(self, loss: Loss, name: str, dtype: Any, shape: Shape, like: Tensor) -> Tensor:
        """Returns an input of the step, which is added unless it already exists.

        Args:
            loss: The loss, for messages.
            name: The input's name.
            dtype: Its element type, unless ``inputs=`` of the builder declares it.
            shape: Its dimensions, unless declared there; None if the rank is unknown.
            like: The tensor that it is compared with. Losses of the same tensor share inputs.
        """

    def logits_of(self, loss: Loss, scores: Tensor, name: str | None) -> Tensor:
        """Returns the logits of class scores: those before a Sigmoid, or the scores themselves.

        Args:
            loss: The loss, for messages.
            scores: The scores.
            name: The tensor of the model of which they are a part, for messages; the first
                floating-point output by default.

        Raises:
            ModelError: If they come from another function, such as a Softmax.
        """

    def sample_weights(self, loss: Loss, name: str, dtype: Any, rows: Dim) -> Tensor:
        """Returns the input with a weight for each row, which losses may share.

        Args:
            loss: The loss, for messages.
            name: The input's name.
            dtype: Its element type, unless ``inputs=`` of the builder declares it.
            rows: Its only dimension, unless more are declared there.
        """

    def without_adapter(self, loss: Loss, name: str | None) -> Tensor:
        """Returns logits as the model computes them without its adapter, in inference mode.

        Args:
            loss: The loss, for messages.
            name: As for `prediction`.

        Raises:
            ModelError: If the model has no adapter.
        """

    def teacher(self, loss: Loss, model: ModelLike, name: str | None) -> Tensor:
        """Returns the logits of another model that reads the same inputs.

        Args:
            loss: The loss, for messages.
            model: The model; its weights become constants.
            name: A tensor of that model; by default its first floating-point output. Logits are
                found before a final Softmax, LogSoftmax or Sigmoid.
        """


@dataclass(frozen=True)
class Part:
    """A summand of the total loss.

    Attributes:
        label: Its name in reports, if there are several summands.
        weight: The factor of the value.
        value: The loss, a scalar.
        count: The divisor of the value. The loss of a whole batch is the sum of value · count of
            its parts, divided by the sum of the counts. If the count is 0, because every label is
            ignored, the value is 0. None means the number of rows.
        is_sum: Whether the value is a sum. The sums of parts of a batch add up.
        batch_coupled: Whether the loss of a row depends on other rows of the batch. Then the loss
            of a batch is not the average of the losses of its parts.
        not_negative: Whether the value cannot be negative.
    """

    label: str
    weight: float
    value: Tensor
    count: Tensor | None
    is_sum: bool = False
    batch_coupled: bool = False
    not_negative: bool = False


@dataclass(frozen=True)
class Loss:
    """Base class of the losses that a training step minimizes. Use one of the subclasses.

    Losses can be added and weighted: ``0.7 * SoftmaxCrossEntropy("classes") + 0.3 * L1("boxes")``
    minimizes the weighted sum and reports each summand.

    Args:
        output: The prediction: the name of any tensor of the model, output or not; the first
            floating-point output by default.
        target: The name of the target input; by default ``"labels"`` for integer labels and
            ``"targets"`` for other numbers.
        reduction: ``"mean"`` divides the sum of the losses by their count, ``"sum"`` does not.
        sample_weight: The name of a further input, which has a weight for each row of the batch.
            The mean becomes Σ w · loss / Σ w over all elements of the batch, or 0 if Σ w is 0;
            class weights multiply w. ``inputs=`` of the builder may declare more dimensions than
            that of the rows, for example for a weight for each token.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> from ortops.losses import L1, SoftmaxCrossEntropy
        >>> weighted = L1(sample_weight="w")
        >>> loss_at(weighted, [1.0, 2.0], targets=[1.0, 6.0], w=[3.0, 1.0])  # (0 + 4) / 4
        1.0
        >>> both = 0.7 * SoftmaxCrossEntropy("classes") + 0.3 * L1("boxes")
        >>> [(weight, loss.name, loss.output) for weight, loss in both.summands]
        [(0.7, 'SoftmaxCrossEntropy', 'classes'), (0.3, 'L1', 'boxes')]
    """

    output: str | None = None
    _: KW_ONLY
    target: str | None = None
    reduction: str = "mean"
    sample_weight: str | None = None

    reads: ClassVar[Reads] = "values"
    """How the loss interprets its prediction."""

    not_negative: ClassVar[bool] = False
    """Whether the loss cannot be negative if the prediction and the targets are as it expects them;
    a subclass does not inherit this."""

    shared: ClassVar[tuple[str, ...]] = ()
    """The arguments that metrics share, besides the class axis and the label to ignore."""

    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum")
    """The supported reductions."""

    _other_names: ClassVar[tuple[str, ...]] = ()
    """What other libraries call it, as `ortops._common.other_names.find_name` takes it."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for argument, of in (("output", "a tensor"), ("target", "a tensor"), _WEIGHT):
            if getattr(self, argument) is not None:
                check_name(self, argument, of)
        choice(f"loss {self.name}: reduction", self.reduction, self.reductions)

    @property
    def name(self) -> str:
        """The name in messages."""
        return type(self).__name__

    @property
    def default_target(self) -> str:
        """The default name of the target input."""
        return "targets"

    @property
    def couples_rows(self) -> bool:
        """Whether the loss of a row depends on other rows of the batch."""
        return False

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns the dtype and shape of the target; by default those of the prediction.

        Args:
            prediction: The prediction.

        Returns:
            The dtype, and the dimensions, or None if the rank is unknown.
        """
        return prediction.dtype, prediction.shape

    def elements(self, *tensors: Any, **named: Any) -> Tensor:
        """Emits the element-wise losses, of any shape. A simple loss overrides only this method.

        Args:
            *tensors: The tensors that `tensors` returned; by default the prediction and the target.
            **named: Unused here; subclasses name their tensors.
        """
        raise NotImplementedError

    def terms(self, *tensors: Any, **named: Any) -> Terms:
        """Emits the loss and its divisor; by default the number of `elements`."""
        return mean_or_sum(self.elements(*tensors, **named), self.reduction)

    def each(self, *tensors: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Emits the losses that `terms` averages, before sample weights multiply them.

        A loss that overrides `terms` overrides this method too, or refuses ``sample_weight``.

        Args:
            *tensors: As for `terms`.
            **named: The same by name.

        Returns:
            The losses, whose first axis is that of the rows, and how much each of them counts in
            the mean, in the same shape; None if all count 1.
        """
        return self.elements(*tensors, **named), None

    def weighted_terms(self, sources: Sources, tensors: Sequence[Tensor]) -> Terms:
        """Emits the loss weighted by the input ``sample_weight``, and its divisor.

        Args:
            sources: Provides the weights.
            tensors: The arguments of `terms`.

        Raises:
            ModelError: If the loss is not an average of losses of rows.
        """
        if self.couples_rows or not issubclass(_definer(self, "each"), _definer(self, "terms")):
            raise ModelError(
                f"loss {self.name}: sample_weight needs a loss that is an average over rows, got "
                f"'{self.sample_weight}'; leave it out, or use another loss"
            )
        losses, counts = self.each(*tensors)
        rows = losses.shape[0] if losses.shape else None
        name = self.sample_weight or ""
        weights = sources.sample_weights(self, name, count_type(losses), rows)
        if losses.shape is None or not 1 <= weights.ndim <= losses.ndim:
            raise ModelError(
                f"loss {self.name}: sample_weight '{name}' must have between 1 dimension and as "
                f"many as the losses, whose shape is {losses.shape}, got {weights.ndim}"
            )
        later = [dim for dim in losses.shape[weights.ndim :] if isinstance(dim, str)]
        rows_of_others = weights.shape or ()
        if any(dim.lower().startswith("batch") or dim in rows_of_others for dim in later):
            raise ModelError(
                f"loss {self.name}: sample_weight '{name}' would weigh the first axis of losses of "
                f"shape {list(losses.shape)}, whose rows are on another; declare its dimensions "
                "up to that of the rows with inputs="
            )
        return weighted_by_sample(losses, counts, weights, self.reduction)

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the arguments of `terms`.

        Returns:
            The loss, with settings that were inferred from the tensors, and the tensors.
        """
        prediction, _ = sources.prediction(self, self.output, self.reads)
        name = self.target or self.default_target
        dtype, shape = self.target_type(prediction)
        return self, (prediction, sources.input(self, name, dtype, shape, prediction))

    def parts(self, sources: Sources) -> list[Part]:
        """Emits the loss."""
        loss, tensors = self.tensors(sources)
        if self.sample_weight is None:
            value, count = loss.terms(*tensors)
        else:
            value, count = loss.weighted_terms(sources, tensors)
        # A subclass may compute something else, and weights of rows may be negative.
        not_negative = vars(type(self)).get("not_negative", False) and self.sample_weight is None
        is_sum = self.reduction == "sum"
        label = self.output or self.name
        return [Part(label, 1.0, value, count, is_sum, self.couples_rows, not_negative)]

    def __call__(self, *tensors: Any, **named: Any) -> Tensor:
        """Emits the loss of given tensors, for use in your own loss function.

        Args:
            *tensors: The prediction and the target, or the arguments of `terms` of the loss.
            **named: The same by name.

        Returns:
            A scalar.

        Raises:
            ArgumentError: If it has a ``sample_weight``, which is an input of the builder's losses.
        """
        if self.sample_weight is not None:
            raise ArgumentError(
                f"loss {self.name}: sample_weight must be None in a call, got "
                f"{self.sample_weight!r}; multiply by an input of your own loss function instead"
            )
        return self.terms(*tensors, **named)[0]

    def __mul__(self, weight: float) -> Combined:
        return Combined(summands=((_weight(self, weight), self),))

    __rmul__ = __mul__

    def __add__(self, other: Loss) -> Combined:
        if not isinstance(other, Loss):
            return NotImplemented
        return Combined(summands=(*_summands(self), *_summands(other)))


@dataclass(frozen=True)
class Combined(Loss):
    """A weighted sum of losses, the result of adding and multiplying losses.

    Args:
        summands: Pairs of a weight and a loss.
    """

    summands: tuple[tuple[float, Loss], ...] = ()

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.sample_weight is not None:
            raise ArgumentError(
                "loss: a sum of losses has no sample_weight of its own, got "
                f"{self.sample_weight!r}; give it to each summand"
            )

    def parts(self, sources: Sources) -> list[Part]:
        """Emits the losses."""
        return [
            replace(part, weight=weight * part.weight)
            for weight, loss in self.summands
            for part in loss.parts(sources)
        ]

    def __call__(self, *tensors: Any, **named: Any) -> Tensor:
        """Raises an error: each summand reads tensors of its own."""
        raise ArgumentError("loss: a sum of losses cannot be called; call each summand separately")

    def __mul__(self, weight: float) -> Combined:
        factor = _weight(self, weight)
        return Combined(summands=tuple((factor * own, loss) for own, loss in self.summands))

    __rmul__ = __mul__


_WEIGHT = ("sample_weight", "an input")


def _definer(loss: Loss, method: str) -> type:
    """Returns the class that defines a method of a loss."""
    return next(each for each in type(loss).__mro__ if method in vars(each))


def _summands(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.summands if isinstance(loss, Combined) else ((1.0, loss),)


def _weight(loss: Loss, weight: Any) -> float:
    return number(f"loss {loss.name}: weight", weight)


def one(like: Tensor) -> Tensor:
    """Returns the constant 1 in the type of a tensor: the count of a sum."""
    return like.tape.constant(np.array(1, like.dtype))


def rows_of(tensor: Tensor) -> Tensor:
    """Returns the number of rows of a tensor, an int64 scalar."""
    return op.Squeeze(op.Shape(tensor, start=0, end=1))


def mean_or_sum(elements: Tensor, reduction: str) -> Terms:
    """Reduces losses to a scalar.

    Args:
        elements: Losses, of any shape.
        reduction: ``"mean"`` or ``"sum"``.

    Returns:
        Their mean and number, or their sum and 1.
    """
    if reduction == "sum":
        return op.ReduceSum(elements, keepdims=0), one(elements)
    return op.ReduceMean(elements, keepdims=0), op.Size(elements).astype(count_type(elements))


def weighted_mean(elements: Tensor, weights: Tensor, reduction: str) -> Terms:
    """Reduces weighted losses to a scalar.

    Args:
        elements: Losses, already multiplied by their weights.
        weights: The weights; their shape must broadcast to that of the losses.
        reduction: ``"mean"`` divides by the sum of the weights, ``"sum"`` does not.

    Returns:
        The mean and the sum of the weights, or the sum and 1.
    """
    if reduction == "sum":
        return mean_or_sum(elements, "sum")
    wide = count_type(elements)
    count = op.ReduceSum(weights.astype(wide), keepdims=0)
    mean = mean_of(op.ReduceSum(elements.astype(wide), keepdims=0), count)
    return mean.astype(elements.dtype), count


def weighted_by_sample(
    losses: Tensor, counts: Tensor | None, weights: Tensor, reduction: str
) -> Terms:
    """Reduces losses to a scalar, with a weight for each row or for smaller parts.

    Args:
        losses: Losses of a known rank.
        counts: How much each of them counts in the mean, in the same shape; None if all count 1.
        weights: The weights; their axes are the first ones of the losses.
        reduction: ``"sum"``, or one that divides by the sum of weights · counts.

    Returns:
        The mean and its divisor, or the sum and 1.
    """
    wide = count_type(losses)
    more = list(range(weights.ndim, losses.ndim))
    each = op.Unsqueeze(weights, more) if more else weights
    each = op.Expand(each.astype(wide), op.Shape(losses))
    weighted = losses.astype(wide) * each
    if reduction == "sum":
        return mean_or_sum(weighted.astype(losses.dtype), "sum")
    counted = each if counts is None else each * counts.astype(wide)
    return weighted_mean(weighted, counted, "mean")


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Returns a sum divided by a count; 0, with gradient 0, if the count is 0.

    Args:
        total: A scalar.
        count: A scalar of the same type.
    """
    return unless_empty(total / op.Where(op.Equal(count, 0), 1, count), count)


def unless_empty(mean: Tensor, count: Tensor) -> Tensor:
    """Replaces a mean over nothing, which would be NaN, by 0 with gradient 0.

    Args:
        mean: A scalar.
        count: A scalar.
    """
    return op.Where(op.Equal(count, 0), 0, mean)


def count_type(x: Tensor) -> np.dtype[Any]:
    """Returns the type of counts: that of a tensor, but at least float32.

    float16 ends at 65504.
    """
    return np.promote_types(x.dtype, np.float32)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp x) without overflow.

    onnxruntime has a Softplus kernel only for float32 and float16.
    """
    if x.dtype != np.float64:
        return op.Softplus(x)
    return op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x)))


def stopped(x: Tensor) -> Tensor:
    """Returns numbers in [0, 1] without their gradient, rounded to the precision of 1."""
    scale = float(2 ** (np.finfo(x.dtype).nmant + 1))  # the gradient of Round is zero
    return op.Round(x * scale) * (1 / scale)


def check_number(loss: Loss, argument: str, **bounds: float) -> None:
    """Raises an ArgumentError unless an argument is a number within bounds."""
    number(f"loss {loss.name}: {argument}", getattr(loss, argument), **bounds)


def check_integer(loss: Loss, argument: str) -> None:
    """Raises an ArgumentError unless an argument is an integer or None."""
    if getattr(loss, argument) is not None:
        whole_number(f"loss {loss.name}: {argument}", getattr(loss, argument))


def check_name(loss: Loss, argument: str, of: str = "a tensor") -> None:
    """Raises an ArgumentError unless an argument is a name."""
    text(f"loss {loss.name}: {argument}", getattr(loss, argument), f"the name of {of}")


def check_numbers(loss: Loss, argument: str, rank: int | None = None) -> None:
    """Checks that weights are finite numbers >= 0.

    Args:
        loss: The loss.
        argument: The name of the argument, which may be None.
        rank: The depth of nested sequences: 1 for one number per class, None for any depth.

    Raises:
        ArgumentError: If the argument is anything else.
    """
    value = getattr(loss, argument)
    if value is None:
        return
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not np.all(np.isfinite(array) & (array >= 0)) or rank not in (None, array.ndim):
        what = "one finite number >= 0 for each class" if rank else "finite numbers >= 0"
        raise ArgumentError(f"loss {loss.name}: {argument} must be {what}, got {value!r}")


Function: TypeAlias = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A loss function that the user wrote."""
