"""What a loss is: where it gets its tensors from, and a scalar that is a sum over a count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import numpy as np

from ortops.errors import ModelError
from ortops.graph.convert import ModelLike
from ortops.graph.tensor import Dim, Tensor, op

__all__ = [
    "Combined",
    "Loss",
    "Part",
    "Reads",
    "Sources",
    "Terms",
    "check_number",
    "check_numbers",
    "count_type",
    "mean_of",
    "mean_or_sum",
    "softplus",
    "unless_empty",
    "weighted_mean",
]

Reads: TypeAlias = Literal["values", "logits", "probabilities", "log_probabilities"]
"""What a loss takes its prediction for."""

Terms: TypeAlias = tuple[Tensor, Tensor]
"""A loss, which is a sum divided by a count, and the count; both scalars."""

Shape: TypeAlias = tuple[Dim, ...] | None


class Sources(Protocol):
    """Where a loss gets its tensors from: the model, and inputs that it adds."""

    def prediction(
        self, loss: Loss, name: str | None, reads: Reads = "values", axis: int | None = None
    ) -> tuple[Tensor, int | None]:
        """Returns a tensor of the model, as the loss reads it.

        Args:
            loss: The loss that asks, for messages.
            name: Any tensor of the model; the first floating-point output by default.
            reads: What the loss takes it for. Logits are found before a final Softmax, LogSoftmax
                or Sigmoid.
            axis: The axis of the classes, where it is given.

        Returns:
            The tensor, and the axis of the classes: as given, or else that of a Softmax that ends
            the model, or else None.

        Raises:
            ModelError: If there is no such tensor, or it cannot be read in that way.
        """

    def input(self, loss: Loss, name: str, dtype: Any, shape: Shape, like: Tensor) -> Tensor:
        """Returns a new input of the step, or the one of that name that there is already.

        Args:
            loss: The loss that asks.
            name: The input's name.
            dtype: Its element type, unless ``inputs=`` of the builder declares it.
            shape: Its dimensions, likewise; None where the rank is unknown.
            like: The tensor that it belongs to: losses that read the same one share its inputs.
        """

    def teacher(self, loss: Loss, model: ModelLike, name: str | None) -> Tensor:
        """Returns the logits of another model, which reads the same inputs.

        Args:
            loss: The loss that asks.
            model: The model; its weights become constants.
            name: A tensor of it; by default its first floating-point output. Logits are found
                before a final Softmax, LogSoftmax or Sigmoid.
        """


@dataclass(frozen=True)
class Part:
    """A summand of what is minimized.

    Attributes:
        label: What it is called where there are several.
        weight: The number that it is multiplied with.
        value: The scalar.
        count: What it was divided by, so that parts of a batch add up: value · count of each part,
            divided by the sum of the counts. Where it is 0, as no label counts, so is the value.
            None where rows stand for that.
        is_sum: Whether the value is a sum, and adds up as it is.
        batch_coupled: Whether rows of a batch take part in each other's loss, so that the loss of a
            batch is not the average of those of its parts.
    """

    label: str
    weight: float
    value: Tensor
    count: Tensor | None
    is_sum: bool = False
    batch_coupled: bool = False


@dataclass(frozen=True)
class Loss:
    """What a training step makes as small as it can. Use one of the subclasses.

    Losses are added and multiplied with numbers: ``0.7 * SoftmaxCrossEntropy("classes") + 0.3 *
    L1("boxes")`` minimizes the weighted sum and reports each.

    Args:
        output: The tensor of the model that it looks at, whether it is an output or not; the first
            floating-point output by default.
        target: The name of the input that holds what the output should have been; ``"labels"``
            for integers and ``"targets"`` for other numbers by default.
        reduction: ``"mean"`` divides the sum of the losses by their count, ``"sum"`` does not.

    Example:
        >>> from ortops.losses import L1, SoftmaxCrossEntropy
        >>> both = 0.7 * SoftmaxCrossEntropy("classes") + 0.3 * L1("boxes")
        >>> [(weight, loss.name, loss.output) for weight, loss in both.summands]
        [(0.7, 'SoftmaxCrossEntropy', 'classes'), (0.3, 'L1', 'boxes')]
    """

    output: str | None = None
    _: KW_ONLY
    target: str | None = None
    reduction: str = "mean"

    reads: ClassVar[Reads] = "values"
    """What it takes the prediction for."""

    reductions: ClassVar[tuple[str, ...]] = ("mean", "sum")
    """How it can be reduced to a scalar."""

    def __post_init__(self) -> None:
        """Checks what was given."""
        for argument in ("output", "target"):
            value = getattr(self, argument)
            if value is not None and (not isinstance(value, str) or not value):
                raise ModelError(
                    f"loss {self.name}: {argument} is {value!r}; the name of a tensor is accepted"
                )
        if self.reduction not in self.reductions:
            *others, last = (repr(each) for each in self.reductions)
            raise ModelError(
                f"loss {self.name}: reduction is {self.reduction!r}; {', '.join(others)} and "
                f"{last} are accepted"
            )

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    @property
    def default_target(self) -> str:
        """The name of the input that holds what the output should have been."""
        return "targets"

    @property
    def couples_rows(self) -> bool:
        """Whether rows of a batch take part in each other's loss."""
        return False

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Shape]:
        """Returns the dtype and shape of the target: those of the prediction, by default.

        Args:
            prediction: The tensor that the loss looks at.

        Returns:
            The dtype, and the dimensions, or None where the rank is unknown.
        """
        return prediction.dtype, prediction.shape

    def elements(self, *tensors: Any, **named: Any) -> Tensor:
        """Emits the losses that are averaged, of any shape; what a simple loss defines.

        Args:
            *tensors: What `tensors` returned: the prediction and the target, by default.
            **named: None; subclasses name their tensors.
        """
        raise NotImplementedError

    def terms(self, *tensors: Any, **named: Any) -> Terms:
        """Emits the loss and what its sum was divided by: the number of `elements`, by default."""
        return mean_or_sum(self.elements(*tensors, **named), self.reduction)

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the tensors that `terms` takes.

        Returns:
            The loss itself, or one that knows more of its tensors, and the tensors.
        """
        prediction, _ = sources.prediction(self, self.output, self.reads)
        name = self.target or self.default_target
        dtype, shape = self.target_type(prediction)
        return self, (prediction, sources.input(self, name, dtype, shape, prediction))

    def parts(self, sources: Sources) -> list[Part]:
        """Emits the loss."""
        loss, tensors = self.tensors(sources)
        value, count = loss.terms(*tensors)
        is_sum = self.reduction == "sum"
        return [Part(self.output or self.name, 1.0, value, count, is_sum, self.couples_rows)]

    def __call__(self, *tensors: Any, **named: Any) -> Tensor:
        """Emits the loss of tensors, in a loss function of one's own.

        Args:
            *tensors: The prediction and the target, or what else the loss says that it takes.
            **named: The same by name.

        Returns:
            A scalar.
        """
        return self.terms(*tensors, **named)[0]

    def __mul__(self, weight: float) -> Combined:
        return Combined(summands=((_number(self, weight), self),))

    __rmul__ = __mul__

    def __add__(self, other: Loss) -> Combined:
        if not isinstance(other, Loss):
            return NotImplemented
        return Combined(summands=(*_summands(self), *_summands(other)))


@dataclass(frozen=True)
class Combined(Loss):
    """A weighted sum of losses, which is what adding and multiplying losses makes.

    Args:
        summands: The weights and the losses.
    """

    summands: tuple[tuple[float, Loss], ...] = ()

    def parts(self, sources: Sources) -> list[Part]:
        """Emits the losses."""
        return [
            Part(
                part.label,
                weight * part.weight,
                part.value,
                part.count,
                part.is_sum,
                part.batch_coupled,
            )
            for weight, loss in self.summands
            for part in loss.parts(sources)
        ]

    def __call__(self, *tensors: Any, **named: Any) -> Tensor:
        """Refuses tensors: each summand has its own."""
        raise ModelError("loss: a sum of losses reads tensors by name; call each loss by itself")

    def __mul__(self, weight: float) -> Combined:
        number = _number(self, weight)
        return Combined(summands=tuple((number * own, loss) for own, loss in self.summands))

    __rmul__ = __mul__


def _summands(loss: Loss) -> tuple[tuple[float, Loss], ...]:
    return loss.summands if isinstance(loss, Combined) else ((1.0, loss),)


def _number(loss: Loss, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
        raise ModelError(f"loss {loss.name}: its weight is {weight!r}; a number is accepted")
    if not np.isfinite(weight):
        raise ModelError(f"loss {loss.name}: its weight is {weight}; a finite number is accepted")
    return float(weight)


def mean_or_sum(elements: Tensor, reduction: str) -> Terms:
    """Reduces losses to a scalar.

    Args:
        elements: Losses, of any shape.
        reduction: ``"mean"`` or ``"sum"``.

    Returns:
        Their mean and number, or their sum and 1.
    """
    if reduction == "sum":
        return op.ReduceSum(elements, keepdims=0), elements.tape.constant(
            np.array(1, elements.dtype)
        )
    return op.ReduceMean(elements, keepdims=0), op.Size(elements).astype(count_type(elements))


def weighted_mean(elements: Tensor, weights: Tensor, reduction: str) -> Terms:
    """Reduces losses that count differently to a scalar.

    Args:
        elements: Losses that are multiplied with their weights already.
        weights: The weights, of the same shape or one that broadcasts to it.
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


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Returns a sum divided by a count; 0, with gradient 0, where the count is 0.

    Args:
        total: A scalar.
        count: A scalar of the same type.
    """
    return unless_empty(total / op.Where(op.Equal(count, 0), 1, count), count)


def unless_empty(mean: Tensor, count: Tensor) -> Tensor:
    """Returns a mean; 0, with gradient 0, where its count is 0, so that it would be NaN.

    Args:
        mean: A scalar.
        count: A scalar.
    """
    return op.Where(op.Equal(count, 0), 0, mean)


def count_type(x: Tensor) -> np.dtype[Any]:
    """Returns the type of counts: that of a tensor, but float16 cannot count beyond 65504."""
    return np.promote_types(x.dtype, np.float32)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp x), which overflows nowhere.

    onnxruntime has a kernel of Softplus for float32 and float16.
    """
    if x.dtype != np.float64:
        return op.Softplus(x)
    return op.Max(x, 0.0) + op.Log(1 + op.Exp(-abs(x)))


def check_number(
    loss: Loss, argument: str, accepted: str, fits: Callable[[float], bool] = np.isfinite
) -> None:
    """Refuses an argument that is not a number of some kind.

    Args:
        loss: The loss that was given it.
        argument: The name of the argument.
        accepted: What is accepted, in words.
        fits: Whether a number is.

    Raises:
        ModelError: If the argument is something else.
    """
    value = getattr(loss, argument)
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not fits(value):
        raise ModelError(f"loss {loss.name}: {argument} is {value!r}; {accepted} is accepted")


def check_numbers(loss: Loss, argument: str, rank: int | None = None) -> None:
    """Refuses weights that are not finite numbers of at least 0.

    Args:
        loss: The loss that was given them.
        argument: The name of the argument, which may be None.
        rank: How deep sequences are nested: 1 for a number for each class, None for any depth.

    Raises:
        ModelError: If the argument is something else.
    """
    value = getattr(loss, argument)
    if value is None:
        return
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.array(np.nan)
    if not np.all(np.isfinite(array) & (array >= 0)) or rank not in (None, array.ndim):
        what = "one finite number of at least 0 for each class" if rank else "finite numbers ≥ 0"
        verb = "is" if rank else "are"
        raise ModelError(f"loss {loss.name}: {argument} is {value!r}; {what} {verb} accepted")


Function: TypeAlias = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A loss of the user's own."""
