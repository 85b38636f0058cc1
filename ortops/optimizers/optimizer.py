"""The base class of optimizers, the ONNX optimizer operators, and custom update rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np

from ortops._common.arguments import boolean, number, parameters_of
from ortops.errors import ArgumentError
from ortops.schedules import LearningRate, Schedule, schedule_of

UpdateRule: TypeAlias = Callable[..., Any]
"""``(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` on numpy arrays or Tensors."""

Ranges: TypeAlias = Mapping[str, Mapping[str, float]]
"""The bounds of numbers, as arguments of `ortops._common.arguments.number`, by attribute."""

_DECAY: Mapping[str, float] = {"minimum": 0, "below": 1}
_POSITIVE: Mapping[str, float] = {"above": 0}
_NON_NEGATIVE: Mapping[str, float] = {"minimum": 0}

RANGES: dict[str, Mapping[str, float]] = {
    **dict.fromkeys(("alpha", "beta", "beta1", "beta2", "momentum", "rho"), _DECAY),
    **dict.fromkeys(("epsilon", "adamw_epsilon"), _POSITIVE),
    **dict.fromkeys(("learning_rate", "weight_decay"), _NON_NEGATIVE),
    **dict.fromkeys(("momentum_decay", "decay_factor"), _NON_NEGATIVE),
}
"""The bounds that attributes of these names have, unless an optimizer has others."""

Arrays: TypeAlias = tuple[Any, ...]
"""``(x_new, *state_new)``, arrays of the same kind as the rule's arguments."""


def regularized(g: Any, x: Any, norm_coefficient: float) -> Any:
    """Returns the gradient of the loss plus ``norm_coefficient / 2 · ‖x‖²``."""
    return norm_coefficient * x + g if norm_coefficient else g


def shrunk(r: Any, x: Any, weight_decay: float) -> Any:
    """Returns ``(1 - r · weight_decay) · x``."""
    if not weight_decay:
        return x
    return arrays((1.0 - r.astype(np.float64) * weight_decay).astype(x.dtype) * x)[0]


def norm(x: Any) -> Any:
    """Returns the L2 norm, 0-d float64."""
    (x,) = arrays(x)  # scalars of numpy 2.0 have no __array_namespace__
    xp = x.__array_namespace__()
    return xp.sqrt(xp.sum(x * x).astype(np.float64))


def arrays(*values: Any) -> Arrays:
    """Returns the values with numpy scalars, which 0-d arithmetic returns, as arrays."""
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in values)


def as_float32(value: Any) -> Any:
    """Returns a float rounded to float32, as in an ONNX attribute; anything else unchanged."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(np.float32(value))


@dataclass(frozen=True)
class Operator:
    """The signature of an optimizer operator of ai.onnx.preview.training.

    It is derived from the signature of the update rule; the tests compare it with the schema.

    Attributes:
        rule: The update rule. A node's inputs are R and T, then, for n parameters, n each of X, G
            and every state; its outputs are n each of X_new and every new state.

    Example:
        >>> from ortops.optimizers import OPERATORS
        >>> OPERATORS["Momentum"].states
        ('V',)
    """

    rule: UpdateRule

    @functools.cached_property
    def states(self) -> tuple[str, ...]:
        """The names of the state tensors in the notation of the specification.

        Example:
            >>> from ortops.optimizers import OPERATORS
            >>> OPERATORS["Adam"].states
            ('V', 'H')
        """
        return _states(self.rule)

    @functools.cached_property
    def attribute_types(self) -> dict[str, type]:
        """All attributes of the operator with their types, `float` or `str`."""
        annotations = inspect.get_annotations(self.rule, eval_str=True)
        return {
            name: float if annotations[name] is float else str for name in _keyword_only(self.rule)
        }

    @functools.cached_property
    def defaults(self) -> dict[str, float | str]:
        """The optional attributes with their default values (float32)."""
        return {
            name: as_float32(parameter.default)
            for name, parameter in _keyword_only(self.rule).items()
            if parameter.default is not inspect.Parameter.empty
        }

    @functools.cached_property
    def required(self) -> tuple[str, ...]:
        """The required attributes."""
        return tuple(name for name in self.attribute_types if name not in self.defaults)


@functools.lru_cache(maxsize=64)  # called for each parameter of a model
def _parameters(rule: UpdateRule) -> Mapping[str, inspect.Parameter]:
    return parameters_of(f"optimizer {_name(rule)}", rule)


def _name(rule: UpdateRule) -> str:
    function = getattr(rule, "func", rule)  # unwraps a functools.partial
    return str(getattr(function, "__name__", type(function).__name__))


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
"""The optimizer operators of ai.onnx.preview.training, by ``op_type``."""


@dataclass(frozen=True)
class Optimizer:
    """The base class of optimizers. Use one of the subclasses.

    For each parameter a builder emits the ONNX operator if the optimizer has one, and the nodes of
    the update rule otherwise::

        if optimizer.operator is None:
            x_new, *state_new = optimizer.update(r, t, x, g, *state)
        else:
            x = optimizer.before_operator(r, x)
            # a node optimizer.operator(r, t, x, g, *state) with optimizer.operator_attributes

    Attributes:
        learning_rate: The initial learning rate (R), finite and non-negative; or a schedule, or a
            function of the number of completed steps, which may use what NumPy arrays and
            `ortops.Tensor` both support.
        first_step: The value of T in the first update.
        copies: The states that start as the parameter; the others start as zeros.
        average: The state that is the trained parameter, if the parameter is only where gradients
            are taken; "" otherwise.
        is_shared: Whether updates read sums over all parameters (`summands`), which the attribute
            ``sums`` of the rule then holds.
        ranges: The bounds of attributes.

    Example:
        >>> from ortops.optimizers import Adam
        >>> optimizer = Adam(learning_rate=0.1)
        >>> optimizer.name, optimizer.peak, optimizer.states, optimizer.first_step
        ('Adam', 0.1, ('V', 'H'), 1)
    """

    learning_rate: LearningRate

    first_step: ClassVar[int] = 0
    copies: ClassVar[tuple[str, ...]] = ()
    average: ClassVar[str] = ""
    is_shared: ClassVar[bool] = False
    ranges: ClassVar[Ranges] = RANGES
    _rule: ClassVar[UpdateRule]

    _other_names: ClassVar[tuple[str, ...]] = ()
    """What other libraries call it, as `ortops._common.other_names.find_name` takes it."""

    def __post_init__(self) -> None:
        """Converts numbers to float and rejects values that are out of range."""
        object.__setattr__(self, "learning_rate", schedule_of(self.learning_rate))
        for each in fields(self):
            if isinstance(getattr(self, each.name), Schedule) and each.name == "learning_rate":
                continue
            if isinstance(each.default, bool):
                shown = self._shown(each.name)
                object.__setattr__(self, each.name, boolean(shown, getattr(self, each.name)))
            if isinstance(each.default, float):
                self._require(each.name)
        self._check()

    @property
    def peak(self) -> float:
        """The peak learning rate of the schedule; without a schedule, the learning rate."""
        schedule = self.schedule
        return cast(float, self.learning_rate) if schedule is None else schedule.peak

    @property
    def schedule(self) -> Schedule | None:
        """The learning-rate schedule, or None."""
        return self.learning_rate if isinstance(self.learning_rate, Schedule) else None

    def of(self, shape: Sequence[int]) -> Optimizer:
        """Returns the optimizer for parameters of a given shape: by default, this one.

        Its `first_step` is the same.
        """
        return self

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor: by default, the shape of the parameter.

        Example:
            >>> from ortops.optimizers import Adam
            >>> Adam().state_shapes((3, 2))
            {'V': (3, 2), 'H': (3, 2)}
        """
        return dict.fromkeys(self.states, tuple(shape))

    def state_dtypes(self, dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
        """Returns the dtype of each state tensor of a parameter: by default, the parameter's.

        Example:
            >>> from ortops.optimizers import Adam8bit
            >>> Adam8bit().state_dtypes(np.dtype(np.float32))["V"]
            dtype('uint8')
        """
        return dict.fromkeys(self.states, dtype)

    @property
    def operator(self) -> str | None:
        """The ``op_type`` of the ONNX operator for this update, or None."""
        return None

    @property
    def rule(self) -> UpdateRule:
        """The update rule."""
        return type(self)._rule

    def _check(self) -> None:
        """Checks the attributes; called after numbers and flags have been checked."""

    def _shown(self, name: str) -> str:
        """Returns what messages call an attribute."""
        return f"optimizer {self.name}: {name}"

    def _require(self, name: str) -> None:
        """Converts an attribute to float and checks its range.

        Updates compute with the value in float32, so this must be in range, too.
        """
        shown, bounds = self._shown(name), self.ranges.get(name, {})
        value = number(shown, getattr(self, name))
        number(shown, value, **bounds)
        number(f"{shown}={value!r} in float32", as_float32(value), **bounds)
        object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The class name, which users can pass as a string to get the defaults."""
        return type(self).__name__

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the state tensors, which start as zeros except for `copies`.

        Example:
            >>> from ortops.optimizers import SGD, Adam
            >>> Adam().states, SGD().states
            (('V', 'H'), ())
        """
        return _states(self.rule)

    @property
    def attributes(self) -> dict[str, Any]:
        """The keyword arguments of the rule, floats rounded to float32 as in an ONNX file.

        Example:
            >>> from ortops.optimizers import Adagrad
            >>> Adagrad(epsilon=0.5).attributes
            {'norm_coefficient': 0.0, 'decay_factor': 0.0, 'epsilon': 0.5}
        """
        return {name: as_float32(getattr(self, name)) for name in _keyword_only(self.rule)}

    @property
    def operator_attributes(self) -> dict[str, Any]:
        """All attributes of the ONNX node, defaults included; empty without an operator."""
        if self.operator is None:
            return {}
        operator, own = OPERATORS[self.operator], self.attributes
        return {
            name: own[name] if name in own else operator.defaults[name]
            for name in operator.attribute_types
        }

    def before_operator(self, r: Any, x: Any) -> Any:
        """Returns the parameter as passed to the ONNX operator: by default, unchanged.

        Args:
            r: Learning rate, 0-d, float32 or float64.
            x: Parameter, any shape.
        """
        return x

    def summands(self, r: Any, t: Any, x: Any, g: Any, *state: Any) -> tuple[Any, ...]:
        """Returns what a parameter adds to the sums over all parameters, if `is_shared`."""
        return ()

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
    """A custom update rule with its learning rate. T counts from 0.

    The rule is called with Tensors and becomes part of the graph, so it may use only what Tensors
    and numpy arrays share: arithmetic, comparison, ``.astype``, ``x.__array_namespace__()``. Its
    first four parameters are r, t, x, g. Further positional parameters are states, named after
    them in upper case. Keyword-only parameters are attributes; their defaults are their values
    (use `functools.partial` to change them). The rule returns ``(x_new, *state_new)``.

    Args:
        function: The update rule.
        learning_rate: Learning rate (R); finite, non-negative.

    Raises:
        ArgumentError: If the function does not have the parameters of an update rule.

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
    learning_rate: LearningRate = field(default=0.01, kw_only=True)

    @property
    def rule(self) -> UpdateRule:
        """The update rule, `function`."""
        return self.function

    @property
    def name(self) -> str:
        """The function's name."""
        return _name(self.function)

    @property
    def attributes(self) -> dict[str, Any]:
        """The keyword arguments of the rule: the defaults in its signature, not rounded."""
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
            raise ArgumentError(
                f"{shown}: wrong signature; an update rule must have the parameters r, t, x and g,"
                " then one for each state, then keyword-only ones for attributes"
            )
        for name, parameter in parameters.items():
            has_default = parameter.default is not inspect.Parameter.empty
            if name in keyword_only and not has_default:
                raise ArgumentError(
                    f"{shown}: attribute {name!r} has no value; give the parameter a default,"
                    " or bind a value with functools.partial"
                )
            if name not in keyword_only and has_default:
                raise ArgumentError(
                    f"{shown}: parameter {name!r} has a default, but only attributes can have"
                    " one; make it keyword-only by putting '*' before it"
                )
