"""Updates divided by the root of squared gradients: Adagrad, RMSprop, Adadelta."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops.optimizers.optimizer import (
    OPERATORS,
    Arrays,
    Operator,
    Optimizer,
    UpdateRule,
    arrays,
    as_float32,
    regularized,
)
from ortops.schedules import LearningRate

__all__ = ["Adadelta", "Adagrad", "RMSprop", "adadelta", "adagrad", "rmsprop"]


def adagrad(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    h: Any,
    *,
    norm_coefficient: float = 0.0,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
) -> Arrays:
    """One Adagrad update: per-element steps that shrink with the gradients seen so far.

    With ``G = norm_coefficient · X + G``::

        H_new = H + G²
        X_new = X - R / (1 + T · decay_factor) · G / (√H_new + epsilon)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Updates made before this one, 0-d int64; only used with ``decay_factor``.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Sum of squared gradients, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.
        decay_factor: How fast the learning rate falls with ``t``.
        epsilon: Added to the root for numerical stability.

    Returns:
        ``(x_new, h_new)``, like ``x``.

    Source:
        Schema of `Adagrad` in ai.onnx.preview.training, version 1; Duchi, Hazan and Singer,
        "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.

    Example:
        >>> x, g, h = np.float32([1, 2]), np.float32([3, 4]), np.float32([0, 9])
        >>> x_new, h_new = adagrad(np.float32(0.1), np.int64(0), x, g, h)
        >>> x_new.round(3).tolist(), h_new.tolist()
        ([0.8999999761581421, 1.9199999570846558], [9.0, 25.0])
    """
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    if decay_factor:
        r = r / (1.0 + t.astype(np.float64) * decay_factor)
    g = regularized(g, x, norm_coefficient)
    h_new = h + g * g
    x_new = x - r.astype(x.dtype) * g / (xp.sqrt(h_new) + epsilon)
    return arrays(x_new, h_new)


OPERATORS["Adagrad"] = Operator(adagrad)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad as the ONNX specification defines it; see `adagrad` for the formulae.

    It equals PyTorch's Adagrad with ``decay_factor`` as ``lr_decay`` and ``norm_coefficient`` as
    ``weight_decay``. T is 0 in the first update. The default of ``epsilon`` is 1e-6; PyTorch's is
    1e-10.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        epsilon: Positive.
        decay_factor: Decay of the learning rate with T; non-negative.
        norm_coefficient: L2 regularization, added to the gradient.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = Adagrad().update(np.float64(0.1), np.int64(0), x, g, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · 0.5 / √0.5²
        [0.9]
    """

    learning_rate: LearningRate = 0.01
    epsilon: float = 1e-6
    decay_factor: float = 0.0
    norm_coefficient: float = 0.0

    @property
    def operator(self) -> str:
        """The ONNX operator, Adagrad."""
        return "Adagrad"

    _rule: ClassVar[UpdateRule] = adagrad


def rmsprop(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    h: Any,
    *more: Any,
    rho: float = 0.99,
    epsilon: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    norm_coefficient: float = 0.0,
) -> Arrays:
    """One RMSprop update, as in PyTorch: Adagrad with a running mean.

    With ``G = norm_coefficient · X + G``::

        H_new = rho · H + (1 - rho) · G²
        A_new = rho · A + (1 - rho) · G              if centered
        D     = G / (√(H_new - A_new²) + epsilon)    without A_new² if not centered
        V_new = momentum · V + D                     if momentum > 0
        X_new = X - R · V_new                        or R · D without momentum

    If ``H_new - A_new²`` is negative because of rounding, it is replaced by 0.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; ignored.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        *more: ``a``, the running mean of the gradient, if ``centered``; then ``v``, the momentum,
            if ``momentum`` is not 0; like ``x``.
        rho: Decay of the running means (PyTorch's ``alpha``).
        epsilon: Added to the root for numerical stability.
        momentum: Decay of the momentum, 0 for none.
        centered: Whether to divide by the standard deviation of the gradient.
        norm_coefficient: L2 regularization, added to the gradient.

    Returns:
        ``(x_new, h_new)``, followed by ``a_new`` and ``v_new`` if present; like ``x``.

    Source:
        Tieleman and Hinton, lecture 6.5 of "Neural Networks for Machine Learning", 2012; centered:
        Graves, "Generating Sequences With Recurrent Neural Networks", 2013. There is no ONNX
        operator for it.

    Example:
        >>> x, g, h = np.float64([[1], [2], [4]])
        >>> rmsprop(np.float64(0.5), np.int64(0), x, g, h, rho=0.0, epsilon=0.5)
        (array([0.6]), array([4.]))
    """
    xp = x.__array_namespace__()
    g = regularized(g, x, norm_coefficient)
    states = [rho * h + (1.0 - rho) * g * g]
    square = states[0]
    if centered:
        mean = rho * more[0] + (1.0 - rho) * g
        square = xp.maximum(square - mean * mean, 0.0)
        states.append(mean)
    step = g / (xp.sqrt(square) + epsilon)
    if momentum:
        step = momentum * more[-1] + step
        states.append(step)
    return arrays(x - r.astype(x.dtype) * step, *states)


def adadelta(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    h: Any,
    d: Any,
    *,
    rho: float = 0.9,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> Arrays:
    """One Adadelta update: steps of the same size as recent steps.

    With ``G = norm_coefficient · X + G``::

        H_new = rho · H + (1 - rho) · G²
        S     = √(D + epsilon) / √(H_new + epsilon) · G
        D_new = rho · D + (1 - rho) · S²
        X_new = X - R · S

    Args:
        r: Learning rate, 0-d, float32 or float64; 1 in the paper.
        t: Update count, 0-d int64; ignored.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        d: Running mean of the squared step, like ``x``.
        rho: Decay of the running means.
        epsilon: Added under the roots; without it the first step would be 0.
        norm_coefficient: L2 regularization, added to the gradient.

    Returns:
        ``(x_new, h_new, d_new)``, like ``x``.

    Source:
        Zeiler, "ADADELTA: An Adaptive Learning Rate Method", 2012; with a learning rate, as in
        PyTorch. There is no ONNX operator for it.

    Example:
        >>> one, zero = np.float64([1]), np.zeros(1)
        >>> x_new, h_new, d_new = adadelta(
        ...     np.float64(1), np.int64(0), one, one, zero, zero, rho=0.5, epsilon=0.5)
        >>> x_new.round(4).tolist(), h_new.tolist(), d_new.round(4).tolist()
        ([0.2929], [0.5], [0.25])
    """
    xp = x.__array_namespace__()
    g = regularized(g, x, norm_coefficient)
    h_new = rho * h + (1.0 - rho) * g * g
    step = xp.sqrt(d + epsilon) / xp.sqrt(h_new + epsilon) * g
    d_new = rho * d + (1.0 - rho) * step * step
    return arrays(x - r.astype(x.dtype) * step, h_new, d_new)


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop as in PyTorch; see `rmsprop` for the formulae.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        rho: Decay of the mean squared gradient, in [0, 1) (PyTorch's ``alpha``).
        epsilon: Added to the root; positive.
        momentum: Decay of the momentum, in [0, 1); 0 for none.
        centered: Whether to divide by the standard deviation of the gradient.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> RMSprop().states, RMSprop(centered=True, momentum=0.9).states
        (('H',), ('H', 'A', 'V'))
    """

    learning_rate: LearningRate = 0.01
    rho: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    norm_coefficient: float = 0.0

    _rule: ClassVar[UpdateRule] = rmsprop

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state tensors: H, then A if centered, then V with momentum."""
        more = {"A": self.centered, "V": as_float32(self.momentum)}
        return "H", *(name for name, is_there in more.items() if is_there)


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta as in PyTorch; see `adadelta` for the formulae.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        rho: Decay of the running means, in [0, 1).
        epsilon: Added under the roots; positive.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = Adadelta().update(np.float64(0.1), np.int64(0), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # a small step: there is no history of steps yet
        [0.9997]
    """

    learning_rate: LearningRate = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6
    norm_coefficient: float = 0.0

    _rule: ClassVar[UpdateRule] = adadelta
