"""Gradient descent, plain and with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from ortops._common.arguments import choice, number
from ortops.errors import ArgumentError
from ortops.optimizers.optimizer import (
    OPERATORS,
    RANGES,
    Arrays,
    Operator,
    Optimizer,
    Ranges,
    UpdateRule,
    arrays,
    as_float32,
    regularized,
)
from ortops.schedules import LearningRate

__all__ = ["SGD", "Momentum", "momentum", "sgd"]

Mode: TypeAlias = Literal["standard", "nesterov"]

MODES: tuple[Mode, ...] = get_args(Mode)


def momentum(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    *,
    norm_coefficient: float,
    alpha: float,
    beta: float,
    mode: Mode,
) -> Arrays:
    """One update of stochastic gradient descent with (Nesterov) momentum.

    With ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (T > 0 ? beta : 1) · G
        X_new = X - R · V_new                        mode "standard"
        X_new = X - R · (G + alpha · V_new)          mode "nesterov"

    ``beta`` corresponds to PyTorch's ``1 - dampening`` and, like there, does not apply to the
    first update (``t = 0``).

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Updates made before this one, 0-d int64, 0 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Momentum, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.
        alpha: Decay of the momentum.
        beta: Weight of the gradient in the momentum, from the second update on.
        mode: ``"standard"`` or ``"nesterov"``.

    Returns:
        ``(x_new, v_new)``, like ``x``.

    Raises:
        ArgumentError: If ``mode`` is neither.

    Source:
        Schema of `Momentum` in ai.onnx.preview.training, version 1 (its attributes have no
        defaults); Sutskever, Martens, Dahl and Hinton, "On the importance of initialization and
        momentum in deep learning", 2013.

    Example:
        >>> r, t, x, g, v = map(np.float64, (0.5, 0, 1, 2, 4))
        >>> settings = {"norm_coefficient": 0.0, "alpha": 0.5, "beta": 1.0}
        >>> momentum(r, t, x, g, v, **settings, mode="standard")
        (array(-1.), array(4.))
        >>> momentum(r, t, x, g, v, **settings, mode="nesterov")
        (array(-1.), array(4.))
    """
    choice("Momentum: mode", mode, MODES)
    xp = x.__array_namespace__()
    r = r.astype(x.dtype)
    g = regularized(g, x, norm_coefficient)
    scaled = g
    if beta != 1.0:
        first, later = np.asarray(1.0, x.dtype), np.asarray(beta, x.dtype)
        scaled = xp.where(t > 0, later, first) * g
    v_new = alpha * v + scaled
    x_new = x - r * (v_new if mode == "standard" else g + alpha * v_new)
    return arrays(x_new, v_new)


OPERATORS["Momentum"] = Operator(momentum)


def sgd(r: Any, t: Any, x: Any, g: Any, *, norm_coefficient: float = 0.0) -> Arrays:
    """One update of plain stochastic gradient descent.

    ::

        X_new = X - R · (norm_coefficient · X + G)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; ignored.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.

    Returns:
        ``(x_new,)``, like ``x``.

    Source:
        Robbins and Monro, "A Stochastic Approximation Method", 1951. The domain has no operator
        for it.

    Example:
        >>> sgd(np.float32(0.5), np.int64(0), np.float32([1, 2]), np.float32([2, 4]))[0].tolist()
        [0.0, 0.0]
    """
    r = r.astype(x.dtype)
    return arrays(x - r * regularized(g, x, norm_coefficient))


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Gradient descent with (Nesterov) momentum; see `momentum` for the formulae.

    It equals PyTorch's SGD with ``momentum = alpha`` and ``dampening = 1 - beta``. T is 0 in the
    first update, to which ``beta`` does not apply, as in PyTorch.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        alpha: Decay of the momentum, in [0, 1).
        beta: Weight of the gradient from the second update on; non-negative.
        mode: ``"standard"`` or ``"nesterov"``.
        norm_coefficient: L2 regularization, added to the gradient.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> x, g, zero = np.array([1.0]), np.array([0.5]), np.zeros(1)
        >>> x_new, *_ = Momentum().update(np.float64(0.1), np.int64(0), x, g, zero)
        >>> x_new.round(4).tolist()  # the first step equals SGD's
        [0.95]
    """

    _other_names = ("sgdmomentum",)

    learning_rate: LearningRate = 0.01
    alpha: float = 0.9
    beta: float = 1.0
    mode: Mode = "standard"
    norm_coefficient: float = 0.0

    @property
    def operator(self) -> str:
        """The ONNX operator, Momentum."""
        return "Momentum"

    _rule: ClassVar[UpdateRule] = momentum
    ranges: ClassVar[Ranges] = RANGES | {"beta": {"minimum": 0}}

    def _check(self) -> None:
        choice(self._shown("mode"), self.mode, MODES)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with the settings and formulae of PyTorch's SGD.

    Without momentum the update is `sgd`, which has no state and no ONNX operator. With momentum it
    is the ONNX operator Momentum with ``alpha = momentum`` and ``beta = 1 - dampening``.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        norm_coefficient: L2 regularization, added to the gradient (PyTorch's ``weight_decay``).
        momentum: Decay of the momentum, in [0, 1); 0 for none.
        dampening: Dampening of the gradient in the momentum from the second update on, in [0, 1];
            requires momentum.
        nesterov: Whether to use Nesterov momentum; requires momentum and no dampening.

    Raises:
        ArgumentError: If a value is out of range, or contradicts another one.

    Example:
        >>> SGD(momentum=0.5, nesterov=True).operator_attributes
        {'norm_coefficient': 0.0, 'alpha': 0.5, 'beta': 1.0, 'mode': 'nesterov'}
    """

    _other_names = ("gradientdescent",)

    learning_rate: LearningRate = 0.01
    norm_coefficient: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False

    @property
    def operator(self) -> str | None:
        """The ONNX operator, Momentum; None without momentum."""
        return "Momentum" if self.momentum else None

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `momentum` or `sgd`."""
        return momentum if self.momentum else sgd

    @property
    def attributes(self) -> dict[str, Any]:
        """The keyword arguments of the rule, floats rounded to float32 as in an ONNX file."""
        common = {"norm_coefficient": as_float32(self.norm_coefficient)}
        if not self.momentum:
            return common
        return common | {
            "alpha": as_float32(self.momentum),
            "beta": as_float32(1.0 - self.dampening),
            "mode": "nesterov" if self.nesterov else "standard",
        }

    def _check(self) -> None:
        number(self._shown("dampening"), self.dampening, minimum=0, maximum=1)
        if self.dampening and not self.momentum:
            raise ArgumentError(
                f"optimizer SGD: dampening must be 0 without momentum, got {self.dampening!r}"
            )
        if self.nesterov and (self.dampening or not self.momentum):
            condition = "with dampening" if self.momentum else "without momentum"
            raise ArgumentError(f"optimizer SGD: nesterov must be False {condition}, got True")
