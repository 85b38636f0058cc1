"""Notes on automatic choices: warnings, or details where nobody asked for the choice."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

_LEVEL = contextvars.ContextVar("level of notes", default=logging.WARNING)


def say_note(text: str, *arguments: object) -> None:
    """Logs a note."""
    logging.getLogger("ortops").log(_LEVEL.get(), text, *arguments)


@contextlib.contextmanager
def notes_as_details() -> Iterator[None]:
    """Logs notes at level INFO, which is not shown by default."""
    token = _LEVEL.set(logging.INFO)
    try:
        yield
    finally:
        _LEVEL.reset(token)
