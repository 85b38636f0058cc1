"""Variants of Adam: NAdam, RAdam, Adamax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import (
    Arrays,
    Optimizer,
    UpdateRule,
    arrays,
    regularized,
    shrunk,
)
from ortops.schedules import LearningRate

__all__ = ["Adamax", "NAdam", "RAdam", "adamax", "nadam", "radam"]


def nadam(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    momentum_decay: float = 4e-3,
    norm_coefficient: float = 0.0,
    weight_decay: float = 0.0,
) -> Arrays:
    """One NAdam update, as in PyTorch: Adam with Nesterov momentum.

    With ``X = (1 - R · weight_decay) · X``, then ``G = norm_coefficient · X + G``, and
    ``m(i) = beta1 · (1 - 0.96^(i · momentum_decay) / 2)``, ``M(i) = m(1) · m(2) · … · m(i)``::

        V_new = beta1 · V + (1 - beta1) · G
        H_new = beta2 · H + (1 - beta2) · G²
        N     = (1 - m(T)) / (1 - M(T)) · G + m(T + 1) / (1 - M(T + 1)) · V_new
        X_new = X - R · N / (√(H_new / (1 - beta2^T)) + epsilon)

    ``M`` is computed from ``T`` alone (see `_warming_product`), so it needs no state.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        beta1: Decay of ``v``, and the limit of the momentum ``m``.
        beta2: Decay of ``h``.
        epsilon: Added to the bias-corrected root for numerical stability.
        momentum_decay: How fast the momentum rises from half of ``beta1``.
        norm_coefficient: L2 regularization, added to the gradient.
        weight_decay: Decay per unit of learning rate, as in `adamw`.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Dozat, "Incorporating Nesterov Momentum into Adam", 2016. There is no ONNX operator for it.

    Example:
        >>> x, g, zero = np.float64([1]), np.float64([3]), np.zeros(1)
        >>> x_new, *_ = nadam(  # m is 1/4: N is (3/4) / (3/4) · 3 + (1/4) / (15/16) · 3/2
        ...     np.float64(1), np.int64(1), x, g, zero, zero, beta1=0.5, momentum_decay=0.0)
        >>> x_new.round(4).tolist()  # 1 - 3.4 / 3
        [-0.1333]
    """
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)

    def momentum(i: Any) -> Any:
        return beta1 * (1.0 - 0.5 * 0.96 ** (i * momentum_decay))

    product = _warming_product(count, beta1, momentum_decay)
    present, following = momentum(count), momentum(count + 1.0)
    root = xp.sqrt(1.0 - beta2**count)
    of_gradient = r * root * (1.0 - present) / (1.0 - product)
    of_mean = r * root * following / (1.0 - product * following)
    x = shrunk(r, x, weight_decay)
    g = regularized(g, x, norm_coefficient)
    v_new = beta1 * v + (1.0 - beta1) * g
    h_new = beta2 * h + (1.0 - beta2) * g * g
    step = of_gradient.astype(x.dtype) * g + of_mean.astype(x.dtype) * v_new
    x_new = x - step / (xp.sqrt(h_new) + (epsilon * root).astype(x.dtype))
    return arrays(x_new, v_new, h_new)


_TERMS = np.arange(1.0, 49.0)  # the last is below 2^-48


def _warming_product(count: Any, beta1: float, momentum_decay: float) -> Any:
    """Returns the product m(1) · … · m(count) of NAdam's momentum schedule, 0-d float64.

    Its logarithm is ``count · log(beta1)`` and the sum over i of ``log(1 - q^i / 2)``, where ``q``
    is ``0.96^momentum_decay``. With ``log(1 - z) = -Σ z^k / k`` the sum over i is geometric::

        -Σ_k 1 / (k · 2^k) · (q^k + q^2k + … + q^(count · k))
    """
    if not momentum_decay:
        return (0.5 * beta1) ** count
    slope = math.log(0.96) * momentum_decay * _TERMS  # of the logarithm of q^k
    weights = np.exp(slope) / (_TERMS * 2.0**_TERMS * -np.expm1(slope))
    (count,) = arrays(count)  # scalars of numpy 2.0 have no __array_namespace__
    xp = count.__array_namespace__()
    half = xp.tanh(0.5 * slope * count)
    risen = -2.0 * half / (1.0 - half)  # 1 - exp(slope · count), which would cancel
    return beta1**count * xp.exp(-xp.sum(weights * risen))


def radam(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    norm_coefficient: float = 0.0,
    weight_decay: float = 0.0,
) -> Arrays:
    """One RAdam update, as in PyTorch: Adam once the variance of the mean square is small enough.

    With ``X = (1 - R · weight_decay) · X``, then ``G = norm_coefficient · X + G``, and the
    effective number of gradients in ``h``, ``n = N - 2 · T · beta2^T / (1 - beta2^T)``, which is
    at most ``N = 2 / (1 - beta2) - 1``::

        V_new = beta1 · V + (1 - beta1) · G
        H_new = beta2 · H + (1 - beta2) · G²
        C     = √((n - 4) · (n - 2) · N / ((N - 4) · (N - 2) · n))
        S     = n > 5 ? C · √(1 - beta2^T) / (√H_new + epsilon) : 1
        X_new = X - R / (1 - beta1^T) · S · V_new

    ``epsilon`` is added before bias correction, as in PyTorch.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        beta1: Decay of ``v``.
        beta2: Decay of ``h``.
        epsilon: Added to the root for numerical stability.
        norm_coefficient: L2 regularization, added to the gradient.
        weight_decay: Decay per unit of learning rate, as in `adamw`.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Liu, Jiang, He, Chen, Liu, Gao and Han, "On the Variance of the Adaptive Learning Rate and
        Beyond", 2020. There is no ONNX operator for it.

    Example:
        >>> x, g, zero = np.float64([1]), np.float64([3]), np.zeros(1)
        >>> radam(np.float64(0.1), np.int64(1), x, g, zero, zero)[0].round(9)  # SGD at first
        array([0.7])
    """
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)
    rate = r / (1.0 - beta1**count)
    x = shrunk(r, x, weight_decay)
    g = regularized(g, x, norm_coefficient)
    v_new = beta1 * v + (1.0 - beta1) * g
    h_new = beta2 * h + (1.0 - beta2) * g * g
    most = 2.0 / (1.0 - beta2) - 1.0
    if most <= 5.0:
        return arrays(x - rate.astype(x.dtype) * v_new, v_new, h_new)
    power = beta2**count
    known = most - 2.0 * count * power / (1.0 - power)
    variance = (known - 4.0) * (known - 2.0) / known * (most / ((most - 4.0) * (most - 2.0)))
    correction = xp.sqrt(xp.maximum(variance * (1.0 - power), 0.0))
    scale = (rate * xp.where(known > 5.0, correction, 1.0)).astype(x.dtype)
    divisor = xp.where(known > 5.0, xp.sqrt(h_new) + epsilon, np.asarray(1.0, x.dtype))
    return arrays(x - scale * v_new / divisor, v_new, h_new)


def adamax(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    u: Any,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    norm_coefficient: float = 0.0,
) -> Arrays:
    """One Adamax update, as in PyTorch: Adam divided by the infinity norm of past gradients.

    With ``G = norm_coefficient · X + G``::

        V_new = beta1 · V + (1 - beta1) · G
        U_new = max(beta2 · U, |G| + epsilon)
        X_new = X - R / (1 - beta1^T) · V_new / U_new

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update; 0 counts as 1.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        u: Exponentially decaying maximum of the gradient's magnitude, like ``x``.
        beta1: Decay of ``v``.
        beta2: Decay of ``u``.
        epsilon: Added to the gradient's magnitude, so that ``u`` is not 0.
        norm_coefficient: L2 regularization, added to the gradient.

    Returns:
        ``(x_new, v_new, u_new)``, like ``x``.

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015 (algorithm 2). The domain
        has no operator for it.

    Example:
        >>> x, g, zero = np.float64([1, 2]), np.float64([3, -4]), np.zeros(2)
        >>> x_new, _, u_new = adamax(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist(), u_new.round(4).tolist()
        ([0.9, 2.1], [3.0, 4.0])
    """
    xp = x.__array_namespace__()
    count = xp.maximum(t, 1).astype(np.float64)
    rate = (r.astype(np.float64) / (1.0 - beta1**count)).astype(x.dtype)
    g = regularized(g, x, norm_coefficient)
    v_new = beta1 * v + (1.0 - beta1) * g
    u_new = xp.maximum(beta2 * u, xp.abs(g) + epsilon)
    return arrays(x - rate * v_new / u_new, v_new, u_new)


@dataclass(frozen=True)
class NAdam(Optimizer):
    """NAdam as in PyTorch; see `nadam` for the formulae. T is 1 in the first update.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        beta1: Decay of the mean gradient, in [0, 1).
        beta2: Decay of the mean squared gradient, in [0, 1).
        epsilon: Added to the corrected root; positive.
        momentum_decay: How fast the momentum rises from half of ``beta1``; non-negative.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).
        weight_decay: Decay per unit of learning rate; non-negative (PyTorch's ``weight_decay`` with
            ``decoupled_weight_decay=True``).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = NAdam().update(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # Adam's 0.9 and Nesterov's look-ahead
        [0.8944]
    """

    learning_rate: LearningRate = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum_decay: float = 4e-3
    norm_coefficient: float = 0.0
    weight_decay: float = 0.0

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = nadam


@dataclass(frozen=True)
class RAdam(Optimizer):
    """RAdam as in PyTorch; see `radam` for the formulae. T is 1 in the first update.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        beta1: Decay of the mean gradient, in [0, 1).
        beta2: Decay of the mean squared gradient, in [0, 1).
        epsilon: Added to the root, before bias correction; positive.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).
        weight_decay: Decay per unit of learning rate; non-negative (PyTorch's ``weight_decay`` with
            ``decoupled_weight_decay=True``).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = RAdam().update(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # SGD until the variance is small enough
        [0.95]
    """

    learning_rate: LearningRate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    norm_coefficient: float = 0.0
    weight_decay: float = 0.0

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = radam


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adamax as in PyTorch; see `adamax` for the formulae. T is 1 in the first update.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        beta1: Decay of the mean gradient, in [0, 1).
        beta2: Decay of the maximum of the gradient's magnitude, in [0, 1).
        epsilon: Added to the gradient's magnitude; positive.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = Adamax().update(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · 0.5 / |0.5|
        [0.9]
    """

    learning_rate: LearningRate = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    norm_coefficient: float = 0.0

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = adamax
