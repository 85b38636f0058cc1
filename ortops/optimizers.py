"""Optimizers: every update rule once, as a function on arrays, and the constructors users name.

An update rule is a function ``rule(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` in
the notation of the specification (`ai.onnx.preview.training`): ``r`` is the learning rate (0-d,
float32 or float64), ``t`` the update count (0-d int64), ``x`` the parameter, ``g`` its gradient,
and every state tensor has the shape and dtype of ``x``. Keyword-only parameters are attributes.
Given numpy arrays a rule computes; given `ortops.Tensor` it emits ONNX nodes. There is no
second implementation.

Precision: scalar coefficients are computed in float64, then tensor arithmetic and results are in
the dtype of ``x``, also when ``r`` has another one. A term whose coefficient is exactly 0 is left
out.

Attributes are float32 in an ONNX file: 0.9 there means 0.8999999761581421. A rule uses the Python
float that it is given; `Optimizer.attributes` holds the float32 values, so that a file, a kernel
and a graph of nodes compute with the same numbers.

To add an optimizer, write its rule and an `Optimizer` subclass in this file; nothing else needs to
know it. For one of your own, hand a rule to ``optimizer=`` instead (see `Custom`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from ortops.errors import ModelError, did_you_mean
from ortops.schedules import Schedule

__all__ = [
    "OPERATORS",
    "OPTIMIZERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Custom",
    "Momentum",
    "Operator",
    "Optimizer",
    "UpdateRule",
    "adagrad",
    "adam",
    "adam_after_correction",
    "adamw",
    "adamw_after_correction",
    "momentum",
    "resolve",
    "sgd",
]

UpdateRule: TypeAlias = Callable[..., Any]
"""``(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` on numpy arrays or Tensors."""

Arrays: TypeAlias = tuple[Any, ...]
"""``(x_new, *state_new)``, arrays of the kind that the rule was given."""

Mode: TypeAlias = Literal["standard", "nesterov"]


# ---------------------------------------------------------------------------------------- rules


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
    """One Adagrad update: a step per element that shrinks with the gradients seen so far.

    With ``G = norm_coefficient · X + G``::

        H_new = H + G²
        X_new = X - R / (1 + T · decay_factor) · G / (√H_new + epsilon)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Updates made before this one, 0-d int64; only ``decay_factor`` looks at it.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        h: Sum of squared gradients, like ``x``.
        norm_coefficient: L2 regularization, added to the gradient.
        decay_factor: How fast the learning rate falls with ``t``.
        epsilon: Added to the root, so that it is not 0.

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
    g = _regularized(g, x, norm_coefficient)
    h_new = h + g * g
    x_new = x - r.astype(x.dtype) * g / (xp.sqrt(h_new) + epsilon)
    return _arrays(x_new, h_new)


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

    ``epsilon`` is added to the root *before* bias correction, so it weighs more in early steps
    than PyTorch's, which is added after (`adam_after_correction`). At
    ``t = 0`` nothing is corrected; training starts at ``t = 1`` (see `Adam`).

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
        epsilon: Added to the root, so that it is not 0.

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
    """One Adam update as PyTorch makes it: `adam`, but ``epsilon`` is added after bias correction.

    With ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (1 - alpha) · G
        H_new = beta · H + (1 - beta) · G²
        X_new = X - R / (1 - alpha^T) · V_new / (√(H_new / (1 - beta^T)) + epsilon)
        X_new = (1 - norm_coefficient_post) · X_new

    It is computed as `adam` with ``epsilon · √(1 - beta^T)``, which is the same.

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
        epsilon: Added to the corrected root, so that it is not 0.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015 (algorithm 1). The
        domain's operator cannot say it.

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
    """Makes an Adam update; ``after`` tells whether ``epsilon`` is added after bias correction."""
    xp = x.__array_namespace__()
    r = r.astype(np.float64)
    count = xp.maximum(t, 1).astype(np.float64)  # at t = 0 the branch not taken would be 0 / 0
    root = xp.sqrt(1.0 - beta**count)
    corrected = r * root / (1.0 - alpha**count)
    r = xp.where(t > 0, corrected, r).astype(x.dtype)
    if after:
        epsilon = xp.where(t > 0, epsilon * root, epsilon).astype(x.dtype)
    g = _regularized(g, x, norm_coefficient)
    v_new = alpha * v + (1.0 - alpha) * g
    h_new = beta * h + (1.0 - beta) * g * g
    x_new = x - r * v_new / (xp.sqrt(h_new) + epsilon)
    if norm_coefficient_post:
        x_new = (1.0 - norm_coefficient_post) * x_new
    return _arrays(x_new, v_new, h_new)


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
    """One update of stochastic gradient descent with (Nesterov's) momentum.

    With ``G = norm_coefficient · X + G``::

        V_new = alpha · V + (T > 0 ? beta : 1) · G
        X_new = X - R · V_new                        mode "standard"
        X_new = X - R · (G + alpha · V_new)          mode "nesterov"

    ``beta`` is ``1 - dampening`` of PyTorch, and like there it does not count in the first update
    (``t = 0``); with ``beta = 1`` both agree.

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
        ModelError: ``mode`` is another string.

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
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"Momentum: mode is {mode!r}; 'standard' or 'nesterov' is accepted")
    xp = x.__array_namespace__()
    r = r.astype(x.dtype)
    g = _regularized(g, x, norm_coefficient)
    scaled = g
    if beta != 1.0:
        first, later = np.asarray(1.0, x.dtype), np.asarray(beta, x.dtype)
        scaled = xp.where(t > 0, later, first) * g
    v_new = alpha * v + scaled
    x_new = x - r * (v_new if mode == "standard" else g + alpha * v_new)
    return _arrays(x_new, v_new)


def sgd(r: Any, t: Any, x: Any, g: Any, *, norm_coefficient: float = 0.0) -> Arrays:
    """One update of plain stochastic gradient descent.

    ::

        X_new = X - R · (norm_coefficient · X + G)

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64; not looked at.
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
    return _arrays(x - r * _regularized(g, x, norm_coefficient))


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

    As in PyTorch the decay follows the learning rate. ``epsilon`` is added before bias correction,
    which PyTorch does after it (see `adam`, and `adamw_after_correction`).

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter, any shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Running mean of the gradient, like ``x``.
        h: Running mean of the squared gradient, like ``x``.
        alpha: Decay of ``v`` (beta1 in the paper).
        beta: Decay of ``h`` (beta2 in the paper).
        epsilon: Added to the root, so that it is not 0.
        weight_decay: Decay per unit of learning rate.

    Returns:
        ``(x_new, v_new, h_new)``, like ``x``.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019. The domain has no
        operator for it.

    Example:
        >>> x, zero = np.float64([1, 2]), np.zeros(2)
        >>> x_new, *_ = adamw(np.float64(0.1), np.int64(1), x, zero, zero, zero, weight_decay=0.5)
        >>> x_new.tolist()
        [0.95, 1.9]
    """
    x = _shrunk(r, x, weight_decay)
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
    """One AdamW update as PyTorch makes it: ``epsilon`` is added after bias correction.

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
        epsilon: Added to the corrected root, so that it is not 0.
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
    x = _shrunk(r, x, weight_decay)
    return adam_after_correction(r, t, x, g, v, h, alpha=alpha, beta=beta, epsilon=epsilon)


def _regularized(g: Any, x: Any, norm_coefficient: float) -> Any:
    """Returns the gradient of the loss plus ``norm_coefficient / 2 · ‖x‖²``."""
    return norm_coefficient * x + g if norm_coefficient else g


def _shrunk(r: Any, x: Any, weight_decay: float) -> Any:
    """Returns ``(1 - r · weight_decay) · x``."""
    if not weight_decay:
        return x
    return _arrays((1.0 - r.astype(np.float64) * weight_decay).astype(x.dtype) * x)[0]


def _arrays(*values: Any) -> Arrays:
    """Returns the values; numpy's scalars, which 0-d arithmetic decays to, are arrays again."""
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in values)


# ---------------------------------------------------------------------- operators of the domain


@dataclass(frozen=True)
class Operator:
    """What a node of an optimizer operator of ai.onnx.preview.training takes.

    All of it is read from the signature of the update rule; the tests compare it with the schema.

    Attributes:
        rule: The update rule. Inputs of a node are R, T, then for n parameters all X, all G and all
            of each state; outputs are all X_new and all of each new state.
    """

    rule: UpdateRule

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors in the notation of the specification.

        Example:
            >>> OPERATORS["Adam"].states
            ('V', 'H')
        """
        return _states(self.rule)

    @functools.cached_property
    def attribute_types(self) -> dict[str, type]:
        """Every attribute that a node may have, and its type: `float` or `str`."""
        annotations = inspect.get_annotations(self.rule, eval_str=True)
        return {
            name: float if annotations[name] is float else str for name in _keyword_only(self.rule)
        }

    @functools.cached_property
    def defaults(self) -> dict[str, float | str]:
        """The attributes that a node may leave out, with the values they have then (float32)."""
        return {
            name: _float32(parameter.default)
            for name, parameter in _keyword_only(self.rule).items()
            if parameter.default is not inspect.Parameter.empty
        }

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The attributes that a node must have."""
        return tuple(name for name in self.attribute_types if name not in self.defaults)


def _parameters(rule: UpdateRule) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(rule).parameters


def _keyword_only(rule: UpdateRule) -> dict[str, inspect.Parameter]:
    parameters = _parameters(rule).items()
    return {name: p for name, p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _states(rule: UpdateRule) -> tuple[str, ...]:
    """Returns the names of the positional parameters after r, t, x, g, in upper case."""
    positional = [
        name
        for name, p in _parameters(rule).items()
        if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return tuple(name.upper() for name in positional[4:])


def _float32(value: Any) -> Any:
    """Returns the value that a float has as an ONNX attribute; anything else as it is."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value))


OPERATORS: Mapping[str, Operator] = {
    "Adagrad": Operator(adagrad),
    "Adam": Operator(adam),
    "Momentum": Operator(momentum),
}
"""The optimizer operators that ai.onnx.preview.training has, by ``op_type``."""


# --------------------------------------------------------------------------------- constructors


@dataclass(frozen=True)
class Optimizer:
    """What a trainable model needs to know about its optimizer. Use one of the subclasses.

    For each parameter a builder emits the domain's node where there is one, and the rule where
    there is none::

        if optimizer.operator is None:
            x_new, *state_new = optimizer.update(r, t, x, g, *state)
        else:
            x = optimizer.before_operator(r, x)
            # a node optimizer.operator(r, t, x, g, *state) with optimizer.operator_attributes

    Attributes:
        learning_rate: R at the start of training, finite and not negative; or a schedule of it.
        first_step: T in the first update.
    """

    learning_rate: float | Schedule

    first_step: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Makes numbers floats and refuses values outside their range."""
        for each in fields(self):
            if isinstance(getattr(self, each.name), Schedule) and each.name == "learning_rate":
                continue
            if isinstance(each.default, bool):
                is_bool = isinstance(getattr(self, each.name), bool)
                self._require(each.name, is_bool, "True or False")
            if isinstance(each.default, float):
                value: Any = getattr(self, each.name)
                is_number = isinstance(value, Real) and not isinstance(value, bool)
                self._require(each.name, is_number, "a number")
                object.__setattr__(self, each.name, float(value))
                self._require(each.name, math.isfinite(_float32(float(value))), "a finite float32")
        self._require("learning_rate", self.peak >= 0, "a number >= 0")
        self._check()

    @property
    def peak(self) -> float:
        """The learning rate that a schedule's factor multiplies; without one, the learning rate."""
        rate = self.learning_rate
        return rate.peak if isinstance(rate, Schedule) else rate

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the learning rate, if there is one."""
        return self.learning_rate if isinstance(self.learning_rate, Schedule) else None

    def of(self, shape: Sequence[int]) -> Optimizer:
        """Returns the optimizer that updates a parameter of a shape: this one, by default."""
        return self

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor of a parameter: the parameter's, by default.

        Example:
            >>> Adam().state_shapes((3, 2))
            {'V': (3, 2), 'H': (3, 2)}
        """
        return dict.fromkeys(self.states, tuple(shape))

    @property
    def operator(self) -> str | None:
        """The ``op_type`` of the domain's operator that makes the update, or None."""
        return None

    @property
    def rule(self) -> UpdateRule:
        """The update rule."""
        raise NotImplementedError

    def _check(self) -> None:
        """Checks the attributes; called after the learning rate has been checked."""

    def _require(self, name: str, accepted: bool, what: str) -> None:
        if not accepted:
            value = getattr(self, name)
            raise ModelError(f"optimizer {self.name}: {name} is {value!r}; {what} is accepted")

    def _require_float32(self, name: str, low: float, high: float, what: str) -> None:
        """Requires ``low <= value < high`` of the float32 value, the one that is computed with."""
        self._require(name, low <= _float32(getattr(self, name)) < high, what)

    @property
    def name(self) -> str:
        """The constructor's name, which as a string stands for its defaults."""
        return type(self).__name__

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors. Each starts as zeros of the parameter's shape and dtype.

        Example:
            >>> Adam().states, SGD().states
            (('V', 'H'), ())
        """
        return _states(self.rule)

    @property
    def attributes(self) -> dict[str, Any]:
        """The rule's keyword arguments, floats rounded to float32 as in an ONNX file.

        Example:
            >>> Adagrad(epsilon=0.5).attributes
            {'norm_coefficient': 0.0, 'decay_factor': 0.0, 'epsilon': 0.5}
        """
        return {name: _float32(getattr(self, name)) for name in _keyword_only(self.rule)}

    @property
    def operator_attributes(self) -> dict[str, Any]:
        """All attributes for the domain's node, defaults written out; empty without an operator."""
        if self.operator is None:
            return {}
        operator = OPERATORS[self.operator]
        return {
            name: self.attributes[name] if name in self.attributes else operator.defaults[name]
            for name in operator.attribute_types
        }

    def before_operator(self, r: Any, x: Any) -> Any:
        """Returns the parameter as the domain's operator shall get it: here, unchanged.

        Args:
            r: Learning rate, 0-d, float32 or float64.
            x: Parameter, any shape.
        """
        return x

    def update(self, r: Any, t: Any, x: Any, g: Any, *state: Any) -> Arrays:
        """Applies the rule with these attributes and returns ``(x_new, *state_new)``.

        Example:
            >>> SGD().update(np.float32(1), np.int64(0), np.float32([3]), np.float32([1]))
            (array([2.], dtype=float32),)
        """
        return tuple(self.rule(r, t, x, g, *state, **self.attributes))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam as the ONNX specification defines it; see `adam` for the formulae.

    Next to PyTorch's Adam: ``epsilon`` is added before bias correction, unless
    ``epsilon_after_correction`` is set. T is 1 in the first update, so the first update is
    bias-corrected (the specification's T = 0 would not be).

    Args:
        learning_rate: R; finite, not negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Positive. The specification's own default is 1e-6.
        norm_coefficient: L2 regularization, added to the gradient.
        norm_coefficient_post: Shrinks parameters after each update, not scaled by R.
        epsilon_after_correction: Whether ``epsilon`` is added after bias correction, as in PyTorch.
            The domain's operator cannot say that, so a file has standard nodes in its place.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.

    Example:
        >>> Adam(learning_rate=0.01).epsilon
        1e-08
        >>> Adam(alpha=1.5)
        Traceback (most recent call last):
        ...
        ortops.errors.ModelError: optimizer Adam: alpha is 1.5; a number in [0, 1) is accepted
    """

    learning_rate: float | Schedule = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    norm_coefficient: float = 0.0
    norm_coefficient_post: float = 0.0
    epsilon_after_correction: bool = False

    first_step: ClassVar[int] = 1

    @property
    def operator(self) -> str | None:
        """The domain's operator, Adam; None where ``epsilon`` is added after bias correction."""
        return None if self.epsilon_after_correction else "Adam"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adam` or `adam_after_correction`."""
        return adam_after_correction if self.epsilon_after_correction else adam

    def _check(self) -> None:
        self._require_float32("alpha", 0, 1, "a number in [0, 1)")
        self._require_float32("beta", 0, 1, "a number in [0, 1)")
        self._require("epsilon", _float32(self.epsilon) > 0, "a number > 0")


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad as the ONNX specification defines it; see `adagrad` for the formulae.

    With the same settings it is PyTorch's Adagrad: ``decay_factor`` is its ``lr_decay``,
    ``norm_coefficient`` its ``weight_decay``, T is 0 in the first update. ``epsilon`` is 1e-6 here
    and 1e-10 there.

    Args:
        learning_rate: R; finite, not negative.
        epsilon: Positive.
        decay_factor: Not negative.
        norm_coefficient: L2 regularization, added to the gradient.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.
    """

    learning_rate: float | Schedule = 0.01
    epsilon: float = 1e-6
    decay_factor: float = 0.0
    norm_coefficient: float = 0.0

    @property
    def operator(self) -> str:
        """The domain's operator, Adagrad."""
        return "Adagrad"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adagrad`."""
        return adagrad

    def _check(self) -> None:
        self._require("epsilon", _float32(self.epsilon) > 0, "a number > 0")
        self._require("decay_factor", self.decay_factor >= 0, "a number >= 0")


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Gradient descent with (Nesterov's) momentum; see `momentum` for the formulae.

    With ``beta = 1`` it is PyTorch's SGD with ``momentum = alpha``. ``beta`` is ``1 - dampening``;
    T is 0 in the first update, in which ``beta`` does not count, as in PyTorch.

    Args:
        learning_rate: R; finite, not negative.
        alpha: Decay of the momentum, in [0, 1).
        beta: Weight of the gradient from the second update on; not negative.
        mode: ``"standard"`` or ``"nesterov"``.
        norm_coefficient: L2 regularization, added to the gradient.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.
    """

    learning_rate: float | Schedule = 0.01
    alpha: float = 0.9
    beta: float = 1.0
    mode: Mode = "standard"
    norm_coefficient: float = 0.0

    @property
    def operator(self) -> str:
        """The domain's operator, Momentum."""
        return "Momentum"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `momentum`."""
        return momentum

    def _check(self) -> None:
        self._require_float32("alpha", 0, 1, "a number in [0, 1)")
        self._require("beta", self.beta >= 0, "a number >= 0")
        self._require("mode", self.mode in ("standard", "nesterov"), "'standard' or 'nesterov'")


@dataclass(frozen=True)
class SGD(Optimizer):
    """Plain stochastic gradient descent; see `sgd`. It has no state and no operator.

    Args:
        learning_rate: R; finite, not negative.
        norm_coefficient: L2 regularization, added to the gradient.

    Raises:
        ModelError: A value is outside its range.
    """

    learning_rate: float | Schedule = 0.01
    norm_coefficient: float = 0.0

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `sgd`."""
        return sgd


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay; see `adamw` for the formulae.

    In a file it is a shrink by learning rate times weight decay, then the domain's Adam. The decay
    follows the learning rate, as in PyTorch; ``epsilon`` is added before bias correction, unlike
    there, unless ``epsilon_after_correction`` is set. T is 1 in the first update.

    Args:
        learning_rate: R; finite, not negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Positive.
        weight_decay: Decay per unit of learning rate; not negative.
        epsilon_after_correction: Whether ``epsilon`` is added after bias correction, as in PyTorch,
            in standard nodes.

    Raises:
        ModelError: A value is outside its range, also when only its float32 value is.
    """

    learning_rate: float | Schedule = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    epsilon_after_correction: bool = False

    first_step: ClassVar[int] = 1

    @property
    def operator(self) -> str | None:
        """The domain's operator, Adam; None where ``epsilon`` is added after bias correction."""
        return None if self.epsilon_after_correction else "Adam"

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `adamw` or `adamw_after_correction`."""
        return adamw_after_correction if self.epsilon_after_correction else adamw

    def _check(self) -> None:
        self._require_float32("alpha", 0, 1, "a number in [0, 1)")
        self._require_float32("beta", 0, 1, "a number in [0, 1)")
        self._require("epsilon", _float32(self.epsilon) > 0, "a number > 0")
        self._require("weight_decay", self.weight_decay >= 0, "a number >= 0")

    def before_operator(self, r: Any, x: Any) -> Any:
        """Returns the parameter shrunk by learning rate times weight decay."""
        return _shrunk(r, x, _float32(self.weight_decay))


OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    constructor.__name__: constructor for constructor in Optimizer.__subclasses__()
}
"""The constructors above, by the names that stand for their defaults."""


@dataclass(frozen=True)
class Custom(Optimizer):
    """An update rule of the user's own, with its learning rate. T counts from 0.

    The rule gets Tensors and is built into the graph, so it must stay with what Tensors and numpy
    arrays share: arithmetic, comparison, ``.astype``, ``x.__array_namespace__()``. Its first four
    parameters are r, t, x, g; the positional ones after them are states, whose names are theirs in
    upper case; keyword-only ones are attributes, which are given by their defaults (use
    `functools.partial` for other values). It returns ``(x_new, *state_new)``.

    Args:
        function: The update rule.
        learning_rate: R; finite, not negative.

    Raises:
        ModelError: The function's parameters do not fit.

    Example:
        >>> def sign_momentum(r, t, x, g, v, *, alpha=0.9):
        ...     xp = x.__array_namespace__()
        ...     v_new = alpha * v + (1 - alpha) * g
        ...     return x - r.astype(x.dtype) * xp.sign(v_new), v_new
        >>> optimizer = Custom(sign_momentum, learning_rate=1e-4)
        >>> optimizer.name, optimizer.states, optimizer.attributes["alpha"]
        ('sign_momentum', ('V',), 0.9)
    """

    function: UpdateRule
    learning_rate: float | Schedule = field(default=0.01, kw_only=True)

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `function`."""
        return self.function

    @property
    def name(self) -> str:
        """The function's name."""
        function = getattr(self.function, "func", self.function)  # of a functools.partial
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def attributes(self) -> dict[str, Any]:
        """The rule's keyword arguments: the defaults in its signature, as they are."""
        return {name: p.default for name, p in _keyword_only(self.function).items()}

    def _check(self) -> None:
        parameters = _parameters(self.function)
        kinds = [p.kind for p in parameters.values()]
        keyword_only = _keyword_only(self.function)
        shown = f"optimizer {self.name}{inspect.signature(self.function)}"
        if len(parameters) - len(keyword_only) < 4 or {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        } & set(kinds):
            raise ModelError(
                f"{shown}: the parameters do not fit; an update rule takes"
                " (r, t, x, g, *one for each state, then attributes as keyword-only parameters)"
            )
        for name, parameter in parameters.items():
            has_default = parameter.default is not inspect.Parameter.empty
            if name in keyword_only and not has_default:
                raise ModelError(
                    f"{shown}: attribute {name!r} has no value; give the parameter a default,"
                    " or the function a value with functools.partial"
                )
            if name not in keyword_only and has_default:
                raise ModelError(
                    f"{shown}: parameter {name!r} has a default, which an input of an update rule"
                    " cannot have; make it an attribute by putting '*' before it"
                )


def resolve(optimizer: str | Optimizer | type[Optimizer] | UpdateRule) -> Optimizer:
    """Turns what a user may give as ``optimizer=`` into an `Optimizer`.

    Args:
        optimizer: An optimizer, its class or the name of its class (both stand for the defaults),
            or an update rule of the user's own (see `Custom`).

    Raises:
        ModelError: There is no optimizer of that name, or the value is none of these.

    Example:
        >>> resolve("SGD")
        SGD(learning_rate=0.01, norm_coefficient=0.0)
        >>> resolve("Adan")
        Traceback (most recent call last):
        ...
        ortops.errors.ModelError: optimizer 'Adan' is not known; did you mean 'Adam'?
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            hint = did_you_mean(optimizer, OPTIMIZERS)
            raise ModelError(f"optimizer {optimizer!r} is not known; {hint}")
        return OPTIMIZERS[optimizer]()  # type: ignore[call-arg]  # every subclass has a default
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer()  # type: ignore[call-arg]
    if callable(optimizer):
        return Custom(optimizer)
    raise ModelError(
        f"optimizer is {optimizer!r}; one of ortops.optimizers, its name, or an update function"
        " (r, t, x, g, *state) is accepted"
    )
