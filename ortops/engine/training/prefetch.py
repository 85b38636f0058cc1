"""Items that a thread reads ahead."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

_PATIENCE = 5.0
"""Seconds that `close`, and the exit of Python, wait for the item that is being fetched."""


_LONGEST_WAIT = 0.5
"""Seconds after which a wait starts again: on Windows, Ctrl-C does not interrupt a wait itself."""


class _Fetching(Generic[_T]):
    """The state of the thread; it does not refer to the consumer, so it ends with that."""

    def __init__(self, items: Iterator[_T], ahead: int) -> None:
        self.items = items
        self.free = threading.Semaphore(ahead)
        self.stopped = False
        self.reading = threading.Lock()
        self.fetched: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        end: BaseException = StopIteration()
        try:
            self._fetch()
        except BaseException as error:  # it belongs to the one who asks for the item
            end = error
        finally:
            self.fetched.put((None, end))

    def _fetch(self) -> None:
        try:
            for item in self._wanted():
                self.fetched.put((item, None))
                del item
        finally:
            close = getattr(self.items, "close", None)
            if close is not None:
                close()

    def _wanted(self) -> Iterator[_T]:
        while True:
            self.free.acquire()
            if self.stopped:
                return
            try:
                with self.reading:
                    item = next(self.items)
            except StopIteration:
                return
            yield item
            del item

    def stop(self) -> None:
        self.stopped = True
        self.free.release()


_running: weakref.WeakKeyDictionary[threading.Thread, _Fetching[Any]] = weakref.WeakKeyDictionary()


def _end_all() -> None:
    """Ends all threads when Python exits; it would abort if they were in C++ code."""
    running = list(_running.items())
    for _, fetching in running:
        fetching.stop()
    end = time.monotonic() + _PATIENCE
    for thread, _ in running:
        thread.join(max(0.0, end - time.monotonic()))


atexit.register(_end_all)


class Prefetcher(Iterator[_T]):
    """Yields the items of an iterator in order, while a thread reads ahead.

    Exceptions of the iterator are raised here, in order and with their traceback. The thread ends
    with the iterator, with an exception, with `close`, and when the prefetcher is deleted.

    Args:
        items: The iterator. It runs, and is closed, in the thread.
        ahead: The maximum number of items to read ahead; at least 1.

    Example:
        >>> list(Prefetcher(iter("abc"), 2))
        ['a', 'b', 'c']
    """

    def __init__(self, items: Iterator[_T], ahead: int) -> None:
        self._fetching = _Fetching(items, ahead)
        self._ended = False
        self._thread = threading.Thread(
            target=self._fetching.run, name="ortops prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, self._fetching.stop)
        self._thread.start()
        _running[self._thread] = self._fetching

    def __next__(self) -> _T:
        if self._ended:
            raise StopIteration
        item, error = self._next()
        if error is not None:
            self.close()
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error
        self._fetching.free.release()
        return item  # type: ignore[return-value]

    def _next(self) -> tuple[_T | None, BaseException | None]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._fetching.fetched.get(timeout=_LONGEST_WAIT)

    @property
    def paused(self) -> contextlib.AbstractContextManager[object]:
        """A context in which the thread reads no item, so that others may read the same data.

        Example:
            >>> prefetcher = Prefetcher(iter("abc"), 2)
            >>> with prefetcher.paused:
            ...     pass
            >>> list(prefetcher)
            ['a', 'b', 'c']
        """
        return self._fetching.reading

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread.

        Args:
            wait: Whether to wait, for some seconds, for the item that is being read. Otherwise the
                thread ends when it has read the item.
        """
        self._ended = True
        self._stop()
        if wait:
            self._thread.join(_PATIENCE)
        _running.pop(self._thread, None)  # not waited for again at exit, if it still runs
