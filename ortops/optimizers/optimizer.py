"""What optimizers are made of: the base class, the domain's operators, rules of one's own."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ortops.errors import ModelError
from ortops.numbers import real
from ortops.schedules import Schedule

__all__ = [
    "OPERATORS",
    "Arrays",
    "Custom",
    "Operator",
    "Optimizer",
    "UpdateRule",
    "arrays",
    "as_float32",
    "norm",
    "regularized",
    "shrunk",
]

UpdateRule: TypeAlias = Callable[..., Any]
"""``(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` on numpy arrays or Tensors."""

Arrays: TypeAlias = tuple[Any, ...]
"""``(x_new, *state_new)``, arrays of the kind that the rule was given."""


def regularized(g: Any, x: Any, norm_coefficient: float) -> Any:
    """Returns the gradient of the loss plus ``norm_coefficient / 2 · ‖x‖²``."""
    return norm_coefficient * x + g if norm_coefficient else g


def shrunk(r: Any, x: Any, weight_decay: float) -> Any:
    """Returns ``(1 - r · weight_decay) · x``."""
    if not weight_decay:
        return x
    return arrays((1.0 - r.astype(np.float64) * weight_decay).astype(x.dtype) * x)[0]


def norm(x: Any) -> Any:
    """Returns the root of the sum of squares, 0-d float64."""
    (x,) = arrays(x)  # a scalar of numpy 2.0 has no namespace
    xp = x.__array_namespace__()
    return xp.sqrt(xp.sum(x * x).astype(np.float64))


def arrays(*values: Any) -> Arrays:
    """Returns the values; numpy's scalars, which 0-d arithmetic decays to, are arrays again."""
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in values)


def as_float32(value: Any) -> Any:
    """Returns the value that a float has as an ONNX attribute; anything else as it is."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True)
class Operator:
    """What a node of an optimizer operator of ai.onnx.preview.training takes.

    All of it is read from the signature of the update rule; the tests compare it with the schema.

    Attributes:
        rule: The update rule. Inputs of a node are R, T, then for n parameters all X, all G and all
            of each state; outputs are all X_new and all of each new state.

    Example:
        >>> from ortops.optimizers import OPERATORS
        >>> OPERATORS["Momentum"].states
        ('V',)
    """

    rule: UpdateRule

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors in the notation of the specification.

        Example:
            >>> from ortops.optimizers import OPERATORS
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
            name: as_float32(parameter.default)
            for name, parameter in _keyword_only(self.rule).items()
            if parameter.default is not inspect.Parameter.empty
        }

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The attributes that a node must have."""
        return tuple(name for name in self.attribute_types if name not in self.defaults)


@functools.lru_cache(maxsize=64)  # asked for each parameter of a model
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


OPERATORS: dict[str, Operator] = {}
"""The optimizer operators that ai.onnx.preview.training has, by ``op_type``."""


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

    Example:
        >>> from ortops.optimizers import Adam
        >>> optimizer = Adam(learning_rate=0.1)
        >>> optimizer.name, optimizer.peak, optimizer.states, optimizer.first_step
        ('Adam', 0.1, ('V', 'H'), 1)
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
                is_finite = math.isfinite(as_float32(real(value)))
                self._require(each.name, is_finite, "a finite float32")
                object.__setattr__(self, each.name, float(value))
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
        """Returns the optimizer that updates a parameter of a shape: this one, by default.

        Its `first_step` is this one's.
        """
        return self

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor of a parameter: the parameter's, by default.

        Example:
            >>> from ortops.optimizers import Adam
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
        self._require(name, low <= as_float32(getattr(self, name)) < high, what)

    def _require_decays(self, *names: str) -> None:
        for name in names:
            self._require_float32(name, 0, 1, "a number in [0, 1)")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            self._require(name, as_float32(getattr(self, name)) > 0, "a number > 0")

    def _require_not_negative(self, *names: str) -> None:
        for name in names:
            self._require(name, getattr(self, name) >= 0, "a number >= 0")

    @property
    def name(self) -> str:
        """The constructor's name, which as a string stands for its defaults."""
        return type(self).__name__

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the state tensors, each of which starts as zeros of the parameter's dtype.

        Example:
            >>> from ortops.optimizers import SGD, Adam
            >>> Adam().states, SGD().states
            (('V', 'H'), ())
        """
        return _states(self.rule)

    @property
    def attributes(self) -> dict[str, Any]:
        """The rule's keyword arguments, floats rounded to float32 as in an ONNX file.

        Example:
            >>> from ortops.optimizers import Adagrad
            >>> Adagrad(epsilon=0.5).attributes
            {'norm_coefficient': 0.0, 'decay_factor': 0.0, 'epsilon': 0.5}
        """
        return {name: as_float32(getattr(self, name)) for name in _keyword_only(self.rule)}

    @property
    def operator_attributes(self) -> dict[str, Any]:
        """All attributes for the domain's node, defaults written out; empty without an operator."""
        if self.operator is None:
            return {}
        operator, own = OPERATORS[self.operator], self.attributes
        return {
            name: own[name] if name in own else operator.defaults[name]
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
            >>> from ortops.optimizers import SGD
            >>> SGD().update(np.float32(1), np.int64(0), np.float32([3]), np.float32([1]))
            (array([2.], dtype=float32),)
        """
        return tuple(self.rule(r, t, x, g, *state, **self.attributes))


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
