"""SIGINT and SIGTERM end a training after a step, in place of somewhere in it."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

__all__ = ["Interruption"]

_DEFAULTS: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL}


class Interruption:
    """Notes the first SIGINT or SIGTERM, and takes its hands off then: the next one is as ever.

    Only where the process has Python's own handlers, and in the main thread: a handler of the
    program's own stays, and what it raises arrives at once.

    Args:
        code: The function that is interrupted, one of whose variables this is. A handler that was
            left behind, because another signal's raised while it was to be taken away, does nothing
            outside of that call.

    Attributes:
        name: ``"SIGINT"``, ``"SIGTERM"`` or "" as long as neither has come.
    """

    def __init__(self, code: CodeType) -> None:
        self.name = ""
        self._code = code
        self._taken: list[str] = []
        self._at_once = False

    def watch(self) -> None:
        """Puts the handlers in place."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name, default in _DEFAULTS.items():
            number = getattr(signal, name)
            present = signal.getsignal(number)
            if present is default or self._was_left(present):
                self._taken.append(name)
                signal.signal(number, self._note)

    def release(self) -> None:
        """Puts back the handlers that were there."""
        for name in reversed(self._taken):  # SIGINT last: what it raises leaves none of them here
            number = getattr(signal, name)
            if signal.getsignal(number) == self._note:
                signal.signal(number, _DEFAULTS[name])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.release()
        name = signal.Signals(number).name
        if not self._is_watching(frame):
            signal.raise_signal(number)
            return
        self.name = self.name or name
        if self._at_once:
            self.throw()

    def _is_watching(self, frame: FrameType | None) -> bool:
        """Whether the call that has this is under way, and not only another one of the function."""
        while frame is not None:
            if frame.f_code is self._code and any(v is self for v in frame.f_locals.values()):
                return True
            frame = frame.f_back
        return False

    @staticmethod
    def _was_left(handler: Any) -> bool:
        """Whether a handler was left behind by a call that has ended."""
        owner = getattr(handler, "__self__", None)
        return isinstance(owner, Interruption) and not owner._is_watching(sys._getframe())

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets a signal end what changes nothing at any moment, as `throw` does."""
        self._at_once = True
        try:
            if self.name:
                self.throw()
            yield
        finally:
            self._at_once = False

    def throw(self) -> None:
        """Raises what the signal that came stands for.

        Raises:
            KeyboardInterrupt: For SIGINT.
            SystemExit: For SIGTERM, with the status 143, which is what shells call such an end.
        """
        if self.name == "SIGTERM":
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt
