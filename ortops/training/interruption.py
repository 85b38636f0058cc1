"""SIGINT, SIGTERM and SIGHUP end a training after a step, in place of somewhere in it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = ["Interruption"]

_DEFAULTS: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL}
if hasattr(signal, "SIGHUP"):  # Windows has none
    _DEFAULTS["SIGHUP"] = signal.SIG_DFL
_Result = TypeVar("_Result")
_STATUSES = {"SIGTERM": 143, "SIGHUP": 129}


class Interruption:
    """Notes the first SIGINT, SIGTERM or SIGHUP; the next signal does what it always does.

    What is run by `at_once` ends when the signal comes.

    Only where the process has Python's own handlers, and in the main thread: a handler of the
    program's own stays, and what it raises arrives at once.

    Args:
        code: The function that is interrupted, one of whose variables this is. A handler that was
            left behind, because another signal's raised while it was to be taken away, does nothing
            outside of that call.

    Attributes:
        name: ``"SIGINT"``, ``"SIGTERM"``, ``"SIGHUP"`` or "" as long as none has come.
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

    def at_once(self, work: Callable[[], _Result]) -> _Result | None:
        """Calls a function that a signal may end at any moment, as it changes nothing.

        The handler raises what `throw` does. Code of the user's in between may catch that, or make
        another exception of it: the result is the same.

        Args:
            work: The function.

        Returns:
            What it returns; None if a signal came, before or while it ran.
        """
        try:
            try:
                self._at_once = True
                found = None if self.name else work()
            finally:
                self._at_once = False
        except BaseException:
            if not self.name:
                raise
        return None if self.name else found

    def throw(self) -> None:
        """Raises what the signal that came stands for.

        Raises:
            KeyboardInterrupt: For SIGINT.
            SystemExit: For SIGTERM and SIGHUP, with the status that shells give such an end: 143
                and 129.
        """
        if self.name == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(_STATUSES[self.name])
