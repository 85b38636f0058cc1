"""Reads what a command line says like a call: ``AdamW(weight_decay=0.1)``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortops.errors import OrtopsError, did_you_mean

__all__ = ["Call", "make", "read_call"]


@dataclass(frozen=True)
class Call:
    """A name with arguments, which are numbers, strings, booleans, None or lists of these.

    Attributes:
        name: The name.
        arguments: Those by position.
        keywords: Those by name.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


def read_call(text: str, option: str) -> Call:
    """Reads a call; nothing in it is run.

    Args:
        text: A name, or a name with arguments in brackets.
        option: The option that it was given for, for the message.

    Raises:
        OrtopsError: If it is something else.

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
                return Call(found.func.id, values, named)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        pass
    raise OrtopsError(
        f"{option}: {text!r} was given; a name is accepted, or a name with arguments such as "
        "'Adam(alpha=0.95)'"
    )


def make(call: Call, known: Mapping[str, Any], option: str, **more: Any) -> Any:
    """Makes what a call says.

    Args:
        call: The call.
        known: What there is, by name.
        option: The option that it was given for, for the message.
        **more: Further arguments; those of the call go before them.

    Raises:
        OrtopsError: If there is nothing of that name, or it does not take the arguments.
    """
    if call.name not in known:
        hint = did_you_mean(call.name, known)
        raise OrtopsError(f"{option}: there is no '{call.name}'; {hint}")
    try:
        return known[call.name](*call.arguments, **{**more, **call.keywords})
    except TypeError as error:
        why = str(error).split(".")[-1]  # without the class in front
        raise OrtopsError(f"{option}: {call.name}: {why}; see ortops' reference") from error
