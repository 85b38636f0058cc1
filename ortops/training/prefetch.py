"""Items that a thread fetches before they are asked for."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Prefetcher"]

_T = TypeVar("_T")

_PATIENCE = 5.0
"""Seconds that `close` waits for the item that is being fetched."""


class _Fetching(Generic[_T]):
    """What the thread knows: nothing of the one who takes items, so that it ends with that one."""

    def __init__(self, items: Iterator[_T], ahead: int) -> None:
        self.items = items
        self.free = threading.Semaphore(ahead)
        self.stopped = False
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
                yield next(self.items)
            except StopIteration:
                return

    def stop(self) -> None:
        self.stopped = True
        self.free.release()


class Prefetcher(Iterator[_T]):
    """Yields the items of an iterator, which a thread of its own fetches some ahead, in order.

    What the iterator raises is raised here, in its turn and with its traceback. The thread ends
    with the iterator, with an error, at `close`, and when the prefetcher is garbage.

    Args:
        items: The iterator. It runs, and is closed, in the thread.
        ahead: How many items may be fetched before they are asked for; at least 1.

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

    def __next__(self) -> _T:
        if self._ended:
            raise StopIteration
        item, error = self._fetching.fetched.get()
        if error is not None:
            self.close()
            if isinstance(error, StopIteration):
                raise StopIteration
            raise error
        self._fetching.free.release()
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Ends the thread; an item that is being fetched is waited for, for some seconds."""
        self._ended = True
        self._stop()
        self._thread.join(_PATIENCE)
