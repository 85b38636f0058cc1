"""Adam, AdamW and AMSGrad: running means of the gradient and of its square."""

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
    shrunk,
)
from ortops.schedules import LearningRate

__all__ = [
    "AMSGrad",
    "Adam",
    "AdamW",
    "adam",
    "adam_after_correction",
    "adamw",
    "adamw_after_correction",
    "amsgrad",
]


def adam(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
) -> Arrays:
    """One Adam update, as the ONNX specification defines it.

    With ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (1 - alpha) · G
        H_new = beta · H + (1 - beta) · G²
        R'    = T > 0 ? R · √(1 - beta^T) / (1 - alpha^T) : R
        X_new = (1 - norm_coefficient_post) · (X - R' · V_new / (√H_new + epsilon))

    ``epsilon`` is added to the root *before* bias correction, so it matters more in early steps
    than in PyTorch, which adds it after bias correction (`adam_after_correction`). There is no
    bias correction at ``t = 0``; training starts at ``t = 1`` (see `Adam`).

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.
        norm_coefficient_post: Shrinks the parameter after the update.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the root for numerical stability.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Schema of `Adam` in ai.onnx.preview.training, version 1; Kingma and Ba, "Adam: A Method for
        Stochastic Optimization", 2015 (section 2, the form with the corrected learning rate).

    Example:
        >>> x, g, zero = np.float64([1, 2]), np.float64([3, -4]), np.zeros(2)
        >>> x_new, v_new, h_new = adam(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist(), v_new.round(4).tolist()
        ([0.9, 2.1], [0.3, -0.4])
    """
    return _adam(
        r, t, x, g, v, h, norm_coefficient, norm_coefficient_post, alpha, beta, epsilon, after=False
    )


OPERATORS["Adam"] = Operator(adam)


def adam_after_correction(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
) -> Arrays:
    """One Adam update as in PyTorch: `adam` with ``epsilon`` added after bias correction.

    With ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (1 - alpha) · G
        H_new = beta · H + (1 - beta) · G²
        X_new = X - R / (1 - alpha^T) · V_new / (√(H_new / (1 - beta^T)) + epsilon)
        X_new = (1 - norm_coefficient_post) · X_new

    It is computed as `adam` with ``epsilon · √(1 - beta^T)``, which is equivalent.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.
        norm_coefficient_post: Shrinks the parameter after the update.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the bias-corrected root for numerical stability.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015 (algorithm 1). The ONNX
        operator cannot express it.

    Example:
        >>> x, g, zero = np.float64([1, 2]), np.float64([3, -4]), np.zeros(2)
        >>> x_new, *_ = adam_after_correction(
        ...     np.float64(0.1), np.int64(1), x, g, zero, zero, epsilon=1.0)
        >>> x_new.tolist()  # 0.1 · 3 / (3 + 1) less, and 0.1 · 4 / (4 + 1) more
        [0.925, 2.08]
    """
    return _adam(
        r, t, x, g, v, h, norm_coefficient, norm_coefficient_post, alpha, beta, epsilon, after=True
    )


def _adam(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    norm_coefficient: float,
    norm_coefficient_post: float,
    alpha: float,
    beta: float,
    epsilon: Any,
    *,
    after: bool,
) -> Arrays:
    """One Adam update, which adds ``epsilon`` before or after bias correction."""
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)  # avoids 0 / 0 at t = 0 in the unused branch
    root = xp.sqrt(1.0 - beta**count)
    corrected = r * root / (1.0 - alpha**count)
    r = xp.where(t > 0, corrected, r).astype(x.dtype)
    if after:
        epsilon = xp.where(t > 0, epsilon * root, epsilon).astype(x.dtype)
    g = regularized(g, x, norm_coefficient)
    v_new = alpha * v + (1.0 - alpha) * g
    h_new = beta * h + (1.0 - beta) * g * g
    x_new = x - r * v_new / (xp.sqrt(h_new) + epsilon)
    if norm_coefficient_post:
        x_new = (1.0 - norm_coefficient_post) * x_new
    return arrays(x_new, v_new, h_new)


def adamw(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Arrays:
    """One AdamW update: the parameter shrinks by ``R · weight_decay``, then Adam moves it.

    ::

        X_new = adam(R, T, (1 - R · weight_decay) · X, G, V, H)

    As in PyTorch, the decay is proportional to the learning rate. ``epsilon`` is added before bias
    correction; PyTorch adds it after (see `adam` and `adamw_after_correction`).

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the root for numerical stability.
        weight_decay: Decay per unit of learning rate.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. There is no ONNX
        operator for it.

    Example:
        >>> x, zero = np.float64([1, 2]), np.zeros(2)
        >>> x_new, *_ = adamw(np.float64(0.1), np.int64(1), x, zero, zero, zero, weight_decay=0.5)
        >>> x_new.tolist()
        [0.95, 1.9]
    """
    x = shrunk(r, x, weight_decay)
    return adam(r, t, x, g, v, h, alpha=alpha, beta=beta, epsilon=epsilon)


def adamw_after_correction(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.01,
) -> Arrays:
    """One AdamW update as in PyTorch: ``epsilon`` is added after bias correction.

    ::

        X_new = adam_after_correction(R, T, (1 - R · weight_decay) · X, G, V, H)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the bias-corrected root for numerical stability.
        weight_decay: Decay per unit of learning rate.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019 (algorithm 2).

    Example:
        >>> x, g, zero = np.float64([2]), np.float64([3]), np.zeros(1)
        >>> x_new, *_ = adamw_after_correction(
        ...     np.float64(0.1), np.int64(1), x, g, zero, zero, epsilon=1.0, weight_decay=0.5)
        >>> x_new.round(9).tolist()  # 0.95 · 2 - 0.1 · 3 / (3 + 1)
        [1.825]
    """
    x = shrunk(r, x, weight_decay)
    return adam_after_correction(r, t, x, g, v, h, alpha=alpha, beta=beta, epsilon=epsilon)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam as the ONNX specification defines it; see `adam` for the formulae.

    Unlike PyTorch, it adds ``epsilon`` before bias correction, unless ``epsilon_after_correction``
    is set. T is 1 in the first update, so that it is bias-corrected; the specification's T = 0
    would not be.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Positive. The specification's own default is 1e-6.
        norm_coefficient: L2 regularization, added to the gradient.
        norm_coefficient_post: Shrinks parameters after each update, not scaled by R.
        epsilon_after_correction: Whether to add ``epsilon`` after bias correction, as PyTorch does.
            The ONNX operator cannot express that, so files contain standard nodes instead.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> Adam(learning_rate=0.01).epsilon
        1e-08
        >>> Adam(epsilon=0)
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: optimizer Adam: epsilon must be a finite number > 0, got 0.0
    """

    learning_rate: LearningRate = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    norm_coefficient: float = 0.0
    norm_coefficient_post: float = 0.0
    epsilon_after_correction: bool = False

    first_step: ClassVar[int] = 1

    @property
    def operator(self) -> str | None:
        """The ONNX operator, Adam; None where ``epsilon`` is added after bias correction."""
        return None if self.epsilon_after_correction else "Adam"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adam` or `adam_after_correction`."""
        return adam_after_correction if self.epsilon_after_correction else adam


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay; see `adamw` for the formulae.

    In a file it is weight decay in standard nodes, followed by the ONNX operator Adam. As in
    PyTorch, the decay is proportional to the learning rate. Unlike PyTorch, it adds ``epsilon``
    before bias correction, unless ``epsilon_after_correction`` is set. T is 1 in the first update.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Positive.
        weight_decay: Decay per unit of learning rate; non-negative.
        epsilon_after_correction: Whether to add ``epsilon`` after bias correction, as PyTorch does,
            with standard nodes in the file.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> optimizer = AdamW(weight_decay=0.5)
        >>> x_new, *_ = optimizer.update(np.float64(0.1), np.int64(1), x, g, zero, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · 0.5 · 1 - 0.1
        [0.85]
    """

    learning_rate: LearningRate = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    epsilon_after_correction: bool = False

    first_step: ClassVar[int] = 1

    @property
    def operator(self) -> str | None:
        """The ONNX operator, Adam; None where ``epsilon`` is added after bias correction."""
        return None if self.epsilon_after_correction else "Adam"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adamw` or `adamw_after_correction`."""
        return adamw_after_correction if self.epsilon_after_correction else adamw

    def before_operator(self, r: Any, x: Any) -> Any:
        """Returns the parameter shrunk by learning rate times weight decay."""
        return shrunk(r, x, as_float32(self.weight_decay))


def amsgrad(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    h: Any,
    m: Any,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    norm_coefficient: float = 0.0,
    weight_decay: float = 0.0,
) -> Arrays:
    """One AMSGrad update, as in PyTorch: Adam with a non-decreasing second moment.

    With ``X = (1 - R · weight_decay) · X``, then ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (1 - alpha) · G
        H_new = beta · H + (1 - beta) · G²
        M_new = max(M, H_new)
        X_new = X - R / (1 - alpha^T) · V_new / (√(M_new / (1 - beta^T)) + epsilon)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        m: Maximum of ``h`` so far, like ``x``.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the bias-corrected root for numerical stability.
        norm_coefficient: L2 regularization, added to the gradient.
        weight_decay: Decay per unit of learning rate, as in `adamw`.

    Returns:
        ``(x_new, v_new, h_new, m_new)``, like ``x``.

    Source:
        Reddi, Kale and Kumar, "On the Convergence of Adam and Beyond", 2018; with bias correction,
        as in PyTorch. There is no ONNX operator for it.

    Example:
        >>> x, g, v, h, m = np.float64([[1], [2], [0], [0], [16]])
        >>> amsgrad(np.float64(1), np.int64(1), x, g, v, h, m, alpha=0.5, beta=0.75)[0].round(4)
        array([0.75])
    """
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)
    root = xp.sqrt(1.0 - beta**count)
    rate = (r * root / (1.0 - alpha**count)).astype(x.dtype)
    x = shrunk(r, x, weight_decay)
    g = regularized(g, x, norm_coefficient)
    v_new = alpha * v + (1.0 - alpha) * g
    h_new = beta * h + (1.0 - beta) * g * g
    m_new = xp.maximum(m, h_new)
    x_new = x - rate * v_new / (xp.sqrt(m_new) + (epsilon * root).astype(x.dtype))
    return arrays(x_new, v_new, h_new, m_new)


@dataclass(frozen=True)
class AMSGrad(Optimizer):
    """PyTorch's Adam or AdamW with ``amsgrad=True``; see `amsgrad` for the formulae.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Added to the corrected root; positive.
        norm_coefficient: L2 regularization, added to the gradient.
        weight_decay: Decay per unit of learning rate; non-negative.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = AMSGrad().update(np.float64(0.1), np.int64(1), x, g, zero, zero, zero)
        >>> x_new.round(4).tolist()  # 1 - 0.1 · 0.5 / √0.5²
        [0.9]
    """

    learning_rate: LearningRate = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    norm_coefficient: float = 0.0
    weight_decay: float = 0.0

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = amsgrad
