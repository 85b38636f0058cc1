"""Waiting for what other threads do, not for a time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

PATIENCE = 60
"""Seconds after which what has not come does not come: no test passes because of them."""


def until(condition: Callable[[], bool]) -> None:
    """Waits until something holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.001)


def is_inside(thread: threading.Thread, file: str | None) -> bool:
    """Whether a thread is in a function of a file, or in one of C that it calls."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == file
