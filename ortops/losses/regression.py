"""Regression losses, and divergences of distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np

from ortops._common.arguments import boolean, number
from ortops.errors import ArgumentError, ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import (
    Loss,
    Reads,
    Sources,
    Terms,
    check_name,
    check_number,
    count_type,
    mean_or_sum,
    rows_of,
)

__all__ = [
    "L1",
    "GaussianNLL",
    "Huber",
    "KullbackLeibler",
    "MeanSquaredError",
    "PoissonNLL",
    "Quantile",
    "SmoothL1",
]


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
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(MeanSquaredError(), [1.0, 2.0], targets=[1.0, 5.0])
        4.5
    """

    _other_names = ("mse",)

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
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(L1(), [1.0, 2.0], targets=[1.0, 5.0])
        1.5
    """

    _other_names = ("mae", "meanabsoluteerror")

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
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(Huber(delta=2.0), [1.0, 4.0], targets=[0.0, 0.0])  # ½ 1², 2 (4 - ½ 2)
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
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(SmoothL1(beta=2.0), [1.0, 4.0], targets=[0.0, 0.0])  # ½ 1² / 2, 4 - ½ 2
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
class GaussianNLL(Loss):
    """The average of ½ (log σ² + (prediction − target)² / σ²), for a model that predicts σ², too.

    Args:
        output: The mean, of any shape; the first floating-point output by default.
        target: See `Loss`.
        reduction: See `Loss`.
        variance: The name of the tensor with σ² > 0, which broadcasts to the mean. Give this or
            ``log_variance``.
        log_variance: The name of the tensor with log σ², which has any sign.
        full: Whether to add the constant ½ log 2π.
        eps: The least variance; smaller ones of ``variance`` count as this one, with gradient 0.

    Source:
        Nix and Weigend, 1994 (doi:10.1109/ICNN.1994.374138); the same as torch.nn.GaussianNLLLoss,
        but for the gradient of variances below ``eps``.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> outputs = {"mean": [1.0, 2.0], "var": [1.0, 4.0]}
        >>> loss_at(GaussianNLL("mean", variance="var"), outputs, targets=[1.0, 6.0])
        1.3466
    """

    _other_names = ("gaussian",)

    _: KW_ONLY
    variance: str | None = None
    log_variance: str | None = None
    full: bool = False
    eps: float = 1e-6

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if (self.variance is None) == (self.log_variance is None):
            raise ArgumentError(
                f"loss {self.name}: give the tensor with the variances as variance= or that with "
                f"their logarithms as log_variance=, got {self.variance!r} and "
                f"{self.log_variance!r}"
            )
        check_name(self, "variance" if self.log_variance is None else "log_variance")
        boolean(f"loss {self.name}: full", self.full)
        check_number(self, "eps", above=0)

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the mean, the variance or its logarithm, and the targets."""
        _, (mean, target) = super().tensors(sources)
        spread, _ = sources.prediction(self, self.variance or self.log_variance)
        return self, (mean, spread, target)

    def elements(self, mean: Tensor, spread: Tensor, target: Tensor) -> Tensor:
        """Emits ½ (log σ² + (mean − target)² / σ²)."""
        difference = mean - target
        if self.log_variance is not None:
            found = 0.5 * (spread + difference * difference * op.Exp(-spread))
        else:
            variance = op.Max(spread, np.array(self.eps, spread.dtype))
            found = 0.5 * (op.Log(variance) + difference * difference / variance)
        return found + 0.5 * math.log(2 * math.pi) if self.full else found


@dataclass(frozen=True)
class PoissonNLL(Loss):
    """The average of λ − target · log λ, for a model that predicts log λ of counts, or λ.

    Args:
        output: log λ, or λ with ``log_input=False``; the first floating-point output by default.
        target: See `Loss`; the counts, as numbers >= 0.
        reduction: See `Loss`.
        log_input: Whether the prediction is log λ.
        full: Whether to add Stirling's approximation of log target!, for targets above 1.
        eps: Added to λ in its logarithm, with ``log_input=False``.

    Source:
        The same as torch.nn.PoissonNLLLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(PoissonNLL(), [0.0, 0.0], targets=[3.0, 0.0])  # e⁰ − 3 · 0, e⁰
        1.0
    """

    _: KW_ONLY
    log_input: bool = True
    full: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        boolean(f"loss {self.name}: log_input", self.log_input)
        boolean(f"loss {self.name}: full", self.full)
        check_number(self, "eps", above=0)

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits λ − target · log λ."""
        if self.log_input:
            found = op.Exp(prediction) - target * prediction
        else:
            found = prediction - target * op.Log(prediction + self.eps)
        if not self.full:
            return found
        count = op.Max(target, np.array(1, target.dtype))
        stirling = count * op.Log(count) - count + 0.5 * op.Log(2 * math.pi * count)
        return found + op.Where(target > 1, stirling, 0.0)


@dataclass(frozen=True)
class Quantile(Loss):
    """The average of max(q · d, (q − 1) · d) for the quantile q, where d = target − prediction.

    Args:
        output: The prediction; the first floating-point output by default. With several quantiles,
            its last axis has one prediction for each, and targets have the shape without it.
        target: See `Loss`.
        reduction: See `Loss`.
        quantiles: The quantile, or several, between 0 and 1.

    Source:
        Koenker and Bassett, 1978 (doi:10.2307/1913643); the same as
        sklearn.metrics.mean_pinball_loss for one quantile, and its average for several.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss_at(Quantile(quantiles=0.9), [1.0, 2.0], targets=[3.0, 1.0])  # 0.9·2, 0.1·1
        0.95
    """

    _other_names = ("pinball", "quantileregression")

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    quantiles: float | Sequence[float] = 0.5

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        several = isinstance(self.quantiles, Sequence | np.ndarray)
        given: Any = self.quantiles if several else [self.quantiles]
        if isinstance(given, str) or not len(given):
            raise ArgumentError(
                f"loss {self.name}: quantiles must be a number between 0 and 1 or a list of them, "
                f"got {self.quantiles!r}"
            )
        for each in given:
            number(f"loss {self.name}: quantiles", each, above=0, below=1)

    @property
    def _several(self) -> bool:
        return isinstance(self.quantiles, Sequence | np.ndarray)

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], Any]:
        """Returns the dtype, and the shape without the axis of the quantiles."""
        dtype, shape = super().target_type(prediction)
        if not self._several:
            return dtype, shape
        count = len(np.asarray(self.quantiles))
        if shape is not None and (len(shape) < 2 or shape[-1] not in (count, None)):
            raise ModelError(
                f"loss {self.name}: '{prediction.name}' must have {count} predictions on its last "
                f"axis, one for each of the quantiles, got shape {list(shape)}"
            )
        return dtype, None if shape is None else shape[:-1]

    def elements(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits max(q · d, (q − 1) · d)."""
        q = np.asarray(self.quantiles, prediction.dtype)
        if self._several:
            target = op.Unsqueeze(target, [-1])
        difference = target - prediction
        return op.Max(q * difference, (q - 1) * difference)


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
        >>> from ortops.docs.examples import loss_at
        >>> log = [[-0.6931, -0.6931]]  # of ½ and ½
        >>> loss_at(KullbackLeibler(reduction="batchmean"), log, targets=[[1.0, 0.0]])
        0.6931
    """

    _other_names = ("kldiv",)

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
