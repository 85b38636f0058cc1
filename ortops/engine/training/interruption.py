"""SIGINT, SIGTERM and SIGHUP end training after a whole step."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

_DEFAULTS: dict[str, Any] = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL}
if hasattr(signal, "SIGHUP"):  # Windows has none
    _DEFAULTS["SIGHUP"] = signal.SIG_DFL
_Result = TypeVar("_Result")
_STATUSES = {"SIGTERM": 143, "SIGHUP": 129}


class Interruption:
    """Records the first SIGINT, SIGTERM or SIGHUP; the next signal has its usual effect.

    Work that `at_once` runs ends when the signal comes.

    This applies only in the main thread, and only to signals with Python's default handlers. A
    handler of the program stays in place, and its exceptions are raised at once.

    Args:
        code: The code of the interrupted function; one of its local variables must be this object.
            A handler that was left in place, because the handler of another signal raised an
            exception while it was being removed, has no effect outside of that call.

    Attributes:
        name: ``"SIGINT"``, ``"SIGTERM"`` or ``"SIGHUP"``; "" if none has come.
    """

    def __init__(self, code: CodeType) -> None:
        self.name = ""
        self._code = code
        self._taken: list[str] = []
        self._at_once = False

    def watch(self) -> None:
        """Installs the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name, default in _DEFAULTS.items():
            number = getattr(signal, name)
            present = signal.getsignal(number)
            if present is default or self._was_left(present):
                self._taken.append(name)
                signal.signal(number, self._note)

    def release(self) -> None:
        """Restores the previous handlers."""
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
        """Whether the call that has this object is running."""
        while frame is not None:
            if frame.f_code is self._code and any(v is self for v in frame.f_locals.values()):
                return True
            frame = frame.f_back
        return False

    @staticmethod
    def _was_left(handler: Any) -> bool:
        """Whether a handler was left in place by a call that has ended."""
        owner = getattr(handler, "__self__", None)
        return isinstance(owner, Interruption) and not owner._is_watching(sys._getframe())

    def at_once(self, work: Callable[[], _Result]) -> _Result | None:
        """Calls a function that a signal may interrupt at any moment, as it changes nothing.

        The handler raises the exception of `throw`. User code in between may catch it or raise
        another exception: the result is the same.

        Args:
            work: The function.

        Returns:
            Its result; None if a signal came before or while it ran.
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
        """Raises the exception that corresponds to the signal.

        Raises:
            KeyboardInterrupt: For SIGINT.
            SystemExit: For SIGTERM and SIGHUP, with the exit status that shells use: 143 and 129.
        """
        if self.name == "SIGINT":
            raise KeyboardInterrupt
        raise SystemExit(_STATUSES[self.name])
