"""Parses options written as calls, such as ``AdamW(weight_decay=0.1)``."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortops._common.other_names import find_name
from ortops.errors import OrtopsError


@dataclass(frozen=True)
class Call:
    """A name with arguments: numbers, strings, booleans, None, or lists of these.

    Attributes:
        name: The name.
        arguments: The positional arguments.
        keywords: The keyword arguments.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def read_call(text: str, option: str) -> Call:
    """Parses a call without running anything.

    Args:
        text: A name, or a name with arguments in parentheses.
        option: The option that the text was given for, named in messages.

    Raises:
        OrtopsError: If the text is not a call.

    Example:
        >>> read_call("AdamW(weight_decay=0.1)", "--optimizer")
        Call(name='AdamW', arguments=(), keywords={'weight_decay': 0.1})
    """
    try:
        found = ast.parse(text.strip(), mode="eval").body
        if isinstance(found, ast.Name):
            return Call(found.id)
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Name):
            values = tuple(ast.literal_eval(argument) for argument in found.args)
            named = {str(k.arg): ast.literal_eval(k.value) for k in found.keywords if k.arg}
            if len(named) == len(found.keywords):
                _check_values([*values, *named.values()], option)
                return Call(found.func.id, values, named)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        pass
    raise OrtopsError(
        f"{option} must be a name, or a name with arguments such as 'Adam(alpha=0.95)', got "
        f"{text!r:.200}"
    )


def _check_values(values: Iterable[Any], option: str) -> None:
    """Rejects values that a model file cannot store."""
    for value in values:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise OrtopsError(f"{option}: an integer must fit in 64 bits")
        if isinstance(value, str) and not value.isascii():
            value.encode()  # raises a ValueError for what UTF-8 cannot encode
        if isinstance(value, list | tuple | set):
            _check_values(value, option)
        if isinstance(value, dict):
            _check_values([*value.keys(), *value.values()], option)


def make(
    call: Call,
    known: Mapping[str, Any],
    option: str,
    others: Mapping[str, str] | None = None,
    **more: Any,
) -> Any:
    """Evaluates a call.

    Args:
        call: The call.
        known: The functions and classes that may be called, by name.
        option: The option that the call was given for, named in messages.
        others: What other libraries call them; see `ortops._common.other_names.find_name`.
        **more: Further arguments; those of the call take precedence.

    Raises:
        OrtopsError: If the name is unknown, or the arguments do not match.
    """
    name, hint = find_name(call.name, known, others or {})
    if name is None:
        raise OrtopsError(f"{option}: there is no '{call.name}'; {hint}")
    try:
        return known[name](*call.arguments, **{**more, **call.keywords})
    except TypeError as error:
        why = str(error).split(".")[-1]  # without the class in front
        raise OrtopsError(f"{option}: {call.name}: {why}; see the reference of ortops") from error
