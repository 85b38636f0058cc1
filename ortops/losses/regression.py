"""Regression losses, and divergences of distributions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import (
    Loss,
    Reads,
    Terms,
    check_number,
    count_type,
    mean_or_sum,
    rows_of,
)

__all__ = ["L1", "Huber", "KullbackLeibler", "MeanSquaredError", "SmoothL1"]


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """The average of (prediction − target)².

    Args:
        output: The prediction, of any shape; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.

    Source:
        The same as torch.nn.MSELoss.

    Example:
        >>> from models import echo
        >>> echo.loss_at(MeanSquaredError(), [1.0, 2.0], targets=[1.0, 5.0])
        4.5
    """

    not_negative: ClassVar[bool] = True

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits (prediction − target)²."""
        difference = prediction - target
        return difference * difference


@dataclass(frozen=True)
class L1(Loss):
    """The average of |prediction − target|, with gradient 0 where both are equal.

    Args:
        output: The prediction, of any shape; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.

    Source:
        The same as torch.nn.L1Loss.

    Example:
        >>> from models import echo
        >>> echo.loss_at(L1(), [1.0, 2.0], targets=[1.0, 5.0])
        1.5
    """

    not_negative: ClassVar[bool] = True

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits |prediction − target|."""
        return abs(prediction - target)


@dataclass(frozen=True)
class Huber(Loss):
    """The average of ½ d² where |d| ≤ δ, and of δ (|d| − ½ δ) elsewhere; d = prediction − target.

    Args:
        output: The prediction, of any shape; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        delta: δ, where the loss changes from quadratic to linear.

    Source:
        Huber, 1964 (doi:10.1214/aoms/1177703732); the same as torch.nn.HuberLoss.

    Example:
        >>> from models import echo
        >>> echo.loss_at(Huber(delta=2.0), [1.0, 4.0], targets=[0.0, 0.0])  # ½ 1², 2 (4 - ½ 2)
        3.25
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    delta: float = 1.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "delta", above=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits c (d − ½ c), where c is d clipped to [−δ, δ]."""
        difference = prediction - target
        clipped = op.Clip(difference, -self.delta, self.delta)
        return clipped * (difference - 0.5 * clipped)


@dataclass(frozen=True)
class SmoothL1(Loss):
    """The average of ½ d² / β where |d| < β, and of |d| − ½ β elsewhere; d = prediction − target.

    Args:
        output: The prediction, of any shape; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        beta: β, where the loss changes from quadratic to linear; with 0 it is `L1`.

    Source:
        Girshick, 2015 (arXiv:1504.08083); the same as torch.nn.SmoothL1Loss.

    Example:
        >>> from models import echo
        >>> echo.loss_at(SmoothL1(beta=2.0), [1.0, 4.0], targets=[0.0, 0.0])  # ½ 1² / 2, 4 - ½ 2
        1.625
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    beta: float = 1.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "beta", minimum=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits c / β (d − ½ c), where c is d clipped to [−β, β]."""
        difference = prediction - target
        if self.beta == 0:
            return abs(difference)
        clipped = op.Clip(difference, -self.beta, self.beta)
        return clipped / self.beta * (difference - 0.5 * clipped)


@dataclass(frozen=True)
class KullbackLeibler(Loss):
    """The Kullback–Leibler divergence of a prediction from a target: the sum of t (log t − x).

    x are log-probabilities, t probabilities of the same shape. Summands with t = 0 are 0. If the
    model ends in a Softmax, x is the LogSoftmax of the logits before it.

    Args:
        output: The log-probabilities, of any shape, or the probabilities; the first floating-point
            output by default.
        target: See `Loss`.
        reduction: ``"mean"`` divides the sum by the number of elements, which differs from the
            paper's divergence; ``"batchmean"`` divides by the size of the first axis; ``"sum"``
            does not divide.
        log_target: Whether the targets are log-probabilities too.

    Source:
        Kullback and Leibler, 1951 (doi:10.1214/aoms/1177729694); the same as torch.nn.KLDivLoss.

    Example:
        >>> from models import echo
        >>> log = [[-0.6931, -0.6931]]  # of ½ and ½
        >>> echo.loss_at(KullbackLeibler(reduction="batchmean"), log, targets=[[1.0, 0.0]])
        0.6931
    """

    _: KW_ONLY
    log_target: bool = False

    reads: ClassVar[Reads] = "log_probabilities"
    reductions: ClassVar[tuple[str, ...]] = ("mean", "batchmean", "sum")

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits t (log t − x)."""
        if self.log_target:
            return op.Exp(target) * (target - prediction)
        logarithm = op.Log(op.Where(op.Equal(target, 0.0), 1.0, target))
        return target * (logarithm - prediction)

    def terms(self, prediction: Tensor, target: Tensor) -> Terms:
        """Emits the loss and the divisor of its sum."""
        elements = self.elements(prediction, target)
        if self.reduction != "batchmean":
            return mean_or_sum(elements, self.reduction)
        wide = count_type(elements)
        count = rows_of(prediction).astype(wide)
        mean = op.ReduceSum(elements.astype(wide), keepdims=0) / count
        return mean.astype(elements.dtype), count

    def each(self, prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Emits t (log t − x), with the sum of each row for ``"batchmean"``."""
        elements = self.elements(prediction, target)
        if self.reduction == "batchmean" and elements.ndim > 1:
            elements = op.ReduceSum(elements, list(range(1, elements.ndim)), keepdims=0)
        return elements, None
