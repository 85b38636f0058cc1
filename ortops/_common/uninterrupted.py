"""Atomic state changes: neither signal handlers nor the exit of Python interrupt them.

Python runs signal handlers in the main thread, between any two bytecodes, so an exception from a
handler may separate any two lines. A change that must be atomic therefore runs in a worker thread,
where no handler runs, while the main thread waits for it. An exception from a handler leaves the
wait immediately and unchanged; the change continues in the background until it is complete, and
`AtomicChanges.settle` waits for that.

When the interpreter shuts down, it ends every thread that asks for the GIL again. In a thread that
returns from onnxruntime, this unwinds C++ functions that do not allow it, and the process aborts.
So `wait_for_threads` runs at exit. It lets the thread above and all blocks under `finished_at_exit`
finish.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

EXIT_SECONDS = 60.0
"""How many seconds the exit of Python waits for threads that are inside onnxruntime."""

_QUIET_SECONDS = 1.0  # for which it waits without saying so
_POLL_SECONDS = 0.005

logger = logging.getLogger("ortops")


class _Worker:
    """A thread that runs calls in order."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="ortops", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while True:
            self.calls.get()()


_worker: _Worker | None = None
_forked = False


def _forget_threads() -> None:
    """Forgets the parent's threads, which do not exist in a forked child process."""
    global _worker, _forked
    _worker, _forked = None, True
    _inside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


# --------------------------------------------------------------------------------------- at exit

_inside: dict[int, int] = {}  # daemon thread → its number of nested blocks
_exiting = False


class _FinishedAtExit(contextlib.ContextDecorator):
    """A context manager and decorator for code that enters onnxruntime, see `finished_at_exit`."""

    def __enter__(self) -> None:
        if _ends_with_python():
            thread = threading.get_ident()
            _inside[thread] = _inside.get(thread, 0) + 1
            if _exiting and _inside[thread] == 1:
                del _inside[thread]
                threading.Event().wait()  # forever: it must not enter onnxruntime any more

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        if thread in _inside:
            _inside[thread] -= 1
            if not _inside[thread]:
                del _inside[thread]


finished_at_exit = _FinishedAtExit()
"""Makes the exit of Python wait for a block, or a function, that runs in a daemon thread.

Once the exit has begun, daemon threads no longer enter such blocks: they stop there. Put the
outermost block around all locks that the main thread may want at exit. Other threads are not
affected: Python itself waits for them.
"""


def _ends_with_python() -> bool:
    """Whether this is a daemon thread, which Python does not wait for at exit."""
    thread = threading.get_ident()
    if thread == threading.main_thread().ident:
        return False
    if _worker is not None and thread == _worker.thread.ident:  # wait_for_threads waits for it
        return False
    return threading.current_thread().daemon


def wait_for_threads() -> None:
    """Waits until no daemon thread is inside onnxruntime, for at most `EXIT_SECONDS`.

    Python calls it at exit. If a thread needs longer, the process may abort; a warning says so.
    A second Ctrl-C during the wait ends the process immediately, as SIGINT does by default.
    """
    global _exiting
    _exiting = True
    begin = time.monotonic()
    done = _thread.allocate_lock()
    if _worker is not None:
        done.acquire()
        _worker.calls.put(done.release)
    raised: BaseException | None = None
    said = False
    while (done.locked() or _inside) and (waited := time.monotonic() - begin) < EXIT_SECONDS:
        try:
            if waited > _QUIET_SECONDS and not said:
                said = True
                logger.warning(
                    "waiting up to %g s for onnxruntime to finish in another thread; press Ctrl-C "
                    "to end the process at once",
                    EXIT_SECONDS,
                )
            time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            _end_by_interrupt()
        except BaseException as error:  # of another signal's handler
            raised = error
    if done.locked() or _inside:
        logger.warning(
            "onnxruntime has not finished in another thread after %g s; Python exits without "
            "waiting any longer, which may abort the process",
            EXIT_SECONDS,
        )
    if raised is not None:
        raise raised


def _end_by_interrupt() -> None:
    """Ends the process as an unhandled Ctrl-C does, with the same exit status."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


atexit.register(wait_for_threads)


# --------------------------------------------------------------------------------------- changes


def _inline_only() -> bool:
    """Whether the worker cannot be used: at interpreter shutdown, and in a forked child."""
    return _forked or sys.is_finalizing()


def run_uninterrupted(function: Callable[[], _T]) -> _T:
    """Calls a function so that no signal handler interrupts it, and returns its result.

    Args:
        function: Called once. Its exceptions are raised here.

    Raises:
        BaseException: An exception from a signal handler, immediately. The function then continues
            in the background, and its result is lost.
    """
    global _worker
    if _inline_only() or threading.get_ident() != threading.main_thread().ident:
        return function()
    if _worker is None:
        try:
            _worker = _Worker()
        except RuntimeError:  # no new threads at interpreter shutdown
            return function()
    pending = [function]  # popped by the thread, so that it does not keep the function alive
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
    done.acquire()  # exceptions from signal handlers are raised here
    if failures:
        raise failures[0]
    return results[0]


class AtomicChanges:
    """Makes the changes of one object atomic for its readers.

    It is not a lock: threads that change or read the object need one around it.
    """

    def __init__(self) -> None:
        self._may_be_running = False

    def change(self, function: Callable[[], None]) -> None:
        """Makes a change after those still in progress; see `run_uninterrupted`."""
        self.settle()
        self._may_be_running = True
        run_uninterrupted(function)
        self._may_be_running = False

    def settle(self) -> None:
        """Waits for a change still in progress because a signal handler raised an exception."""
        worker = _worker
        if not self._may_be_running or (worker and worker.thread.ident == threading.get_ident()):
            return
        if worker is not None and not _inline_only():
            done = _thread.allocate_lock()
            done.acquire()
            worker.calls.put(done.release)
            done.acquire()
        self._may_be_running = False
