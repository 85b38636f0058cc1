"""Changes that are whole, whatever a signal handler raises.

Python runs signal handlers in the main thread, between any two of its bytecodes, so anything that
a handler raises may leave two lines of ours apart. What must not be cut in two runs in a thread of
its own, where no handler runs, while the main thread waits for it. An exception of a handler comes
out of the wait, unchanged and at once; the change goes on to its end, and `Whole.settle` waits for
that.
"""

from __future__ import annotations

import _thread
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Whole", "run_uninterrupted"]

_T = TypeVar("_T")


class _Worker:
    """A thread that makes one call after another."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="ortops", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            self.calls.get()()


_worker: _Worker | None = None
_forked = False


def _forget_worker() -> None:
    """Leaves a child process without the thread that only its parent has."""
    global _worker, _forked
    _worker, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_worker)


def _inline_only() -> bool:
    """Whether there is no other thread: at the end of the interpreter, and in a forked child."""
    return _forked or sys.is_finalizing()


def run_uninterrupted(function: Callable[[], _T]) -> _T:
    """Returns what a function returns, which no signal handler interrupts.

    Args:
        function: Called once. What it raises is raised here.

    Raises:
        BaseException: What a signal handler raises meanwhile, at once. The function goes on then;
            what comes of it is lost.
    """
    global _worker
    if _inline_only() or threading.get_ident() != threading.main_thread().ident:
        return function()
    if _worker is None:
        try:
            _worker = _Worker()
        except RuntimeError:  # no new threads, at the end of the interpreter
            return function()
    pending = [function]  # taken out of it: the thread keeps nothing alive for a moment longer
    results: list[_T] = []
    failures: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def call() -> None:
        function = pending.pop()
        try:
            results.append(function())
        except BaseException as error:
            failures.append(error)
        finally:
            del function
            done.release()

    _worker.calls.put(call)
    done.acquire()  # what a handler raises comes out of here
    if failures:
        raise failures[0]
    return results[0]


class Whole:
    """Keeps changes of one thing whole, for all who read it.

    It is not a lock: changes and readers of several threads need one around them.
    """

    def __init__(self) -> None:
        self._may_go_on = False

    def change(self, function: Callable[[], None]) -> None:
        """Makes a change, after those that still go on; see `run_uninterrupted`."""
        self.settle()
        self._may_go_on = True
        run_uninterrupted(function)
        self._may_go_on = False

    def settle(self) -> None:
        """Waits for a change that goes on because a handler raised meanwhile."""
        worker = _worker
        if not self._may_go_on or (worker and worker.thread.ident == threading.get_ident()):
            return
        if worker is not None and not _inline_only():
            done = _thread.allocate_lock()
            done.acquire()
            worker.calls.put(done.release)
            done.acquire()
        self._may_go_on = False
