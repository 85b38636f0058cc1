"""Checks of arguments: each returns the value in its plain type, or raises an ArgumentError."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from ortops._common.numbers import integer, real
from ortops.errors import ArgumentError

_T = TypeVar("_T")


def whole_number(
    name: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Returns an integer argument as an int of Python.

    Args:
        name: What messages call the argument.
        value: What was given: an integer of Python or numpy. Booleans and floats are refused.
        minimum: The smallest value that is allowed.
        maximum: The largest value that is allowed.

    Raises:
        ArgumentError: If it is anything else.

    Example:
        >>> whole_number("epochs", np.uint8(3), 1)
        3
        >>> whole_number("epochs", 0, 1)
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: epochs must be an integer >= 1, got 0
    """
    found = integer(value)
    low, high = -math.inf if minimum is None else minimum, math.inf if maximum is None else maximum
    if found is None or not low <= found <= high:
        bounds = ((">=", minimum), ("<=", maximum))
        shown = " and ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
        raise ArgumentError(
            f"{name} must be an integer{' ' * bool(shown)}{shown}, got {value!r:.80}"
        )
    return found


def number(
    name: str,
    value: Any,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Returns a finite number as a float.

    Args:
        name: What messages call the argument.
        value: What was given: a number of Python or numpy. Booleans, NaN and infinity are refused.
        minimum: The smallest value that is allowed.
        maximum: The largest value that is allowed.
        above: What the value must be greater than.
        below: What the value must be less than.

    Raises:
        ArgumentError: If it is anything else.

    Example:
        >>> number("ema_decay", 0.9, minimum=0, below=1)
        0.9
        >>> number("clip_norm", -1, above=0)
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: clip_norm must be a finite number > 0, got -1
    """
    found = real(value)
    in_range = minimum <= found <= maximum and above < found < below
    if not (math.isfinite(found) and in_range):
        bounds = ((">=", minimum), (">", above), ("<=", maximum), ("<", below))
        shown = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
        raise ArgumentError(
            f"{name} must be a finite number{' ' * bool(shown)}{shown}, got {value!r:.80}"
        )
    return found


def boolean(name: str, value: Any) -> bool:
    """Returns True or False.

    Args:
        name: What messages call the argument.
        value: What was given: a boolean of Python or numpy.

    Raises:
        ArgumentError: If it is anything else.

    Example:
        >>> boolean("shuffle", "no")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: shuffle must be True or False, got 'no'
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} must be True or False, got {value!r:.80}")
    return bool(value)


def choice(name: str, value: _T, options: Collection[Any]) -> _T:
    """Returns one of several values.

    Args:
        name: What messages call the argument.
        value: What was given.
        options: What is allowed.

    Raises:
        ArgumentError: If it is none of them.

    Example:
        >>> choice("mode", "maximum", ("min", "max"))
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: mode must be 'min' or 'max', got 'maximum'
    """
    if not any(type(value) is type(option) and value == option for option in options):
        *most, last = (repr(option) for option in options)
        shown = f"{', '.join(most)} or {last}" if most else last
        raise ArgumentError(f"{name} must be {shown}, got {value!r:.80}")
    return value


def text(name: str, value: Any, what: str = "a non-empty string") -> str:
    """Returns a string that is not empty.

    Args:
        name: What messages call the argument.
        value: What was given.
        what: What it must be, as messages say it.

    Raises:
        ArgumentError: If it is anything else.

    Example:
        >>> text("output", 3, "the name of a tensor")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: output must be the name of a tensor, got 3
    """
    if not isinstance(value, str) or not value:
        raise ArgumentError(f"{name} must be {what}, got {value!r:.80}")
    return value


def function(name: str, value: _T, what: str = "a function") -> _T:
    """Returns something that can be called.

    Args:
        name: What messages call the argument.
        value: What was given.
        what: What it must be, as messages say it.

    Raises:
        ArgumentError: If it cannot be called.

    Example:
        >>> function("reduce", 3, "a function of gradients")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: reduce must be a function of gradients, got 3
    """
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        raise ArgumentError(f"{name} must be {what}, got {value!r:.80}")
    return value


def parameters_of(name: str, value: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function.

    Args:
        name: What messages call the function.
        value: The function.

    Raises:
        ArgumentError: If it has no signature, like some classes that are written in C.

    Example:
        >>> parameters_of("loss", dict)
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: loss: cannot inspect its parameters; wrap it in a `def`
    """
    try:
        return inspect.signature(value).parameters
    except ValueError as error:
        raise ArgumentError(f"{name}: cannot inspect its parameters; wrap it in a `def`") from error
