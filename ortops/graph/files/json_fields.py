"""Checks of the fields of JSON objects from untrusted files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ortops.errors import ModelError


class Expected(NamedTuple):
    """What a value must be.

    Attributes:
        text: What follows "must be" in messages.
        fits: Whether a value is that.
    """

    text: str
    fits: Callable[[Any], bool]


BOOLEAN = Expected("true or false", lambda value: isinstance(value, bool))
TEXT = Expected("a string", lambda value: isinstance(value, str))


def or_null(each: Expected) -> Expected:
    """Returns what is also fulfilled by null."""
    return Expected(f"{each.text} or null", lambda value: value is None or each.fits(value))


def array_of(text: str, fits: Callable[[Any], bool], *, least: int = 0) -> Expected:
    """Returns arrays of values that pass a test, with at least a number of them."""
    return Expected(
        f"an array of {text}",
        lambda value: isinstance(value, list) and len(value) >= least and all(map(fits, value)),
    )


def object_of(text: str, fits: Callable[[Any], bool]) -> Expected:
    """Returns objects whose values pass a test."""
    return Expected(
        f"an object of {text}",
        lambda value: isinstance(value, dict) and all(map(fits, value.values())),
    )


def check_fields(
    where: str,
    found: Mapping[str, Any],
    expected: Mapping[str, Expected],
    *,
    optional: Collection[str] = (),
    remedy: str = "",
) -> None:
    """Checks the fields of an object.

    Args:
        where: The object, at the beginning of messages.
        found: The object.
        expected: What each field must be.
        optional: The fields that may be missing.
        remedy: The remedy, at the end of messages.

    Raises:
        ModelError: If a field is missing or invalid.
    """
    for name, (text, fits) in expected.items():
        if (name in found and fits(found[name])) or (name not in found and name in optional):
            continue
        shown = f"got {found[name]!r:.80}" if name in found else "but is missing"
        end = f"; {remedy}" if remedy else ""
        raise ModelError(f"{where}: '{name}' must be {text}, {shown}{end}")
