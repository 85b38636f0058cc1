"""The largest batch whose steps fit in memory."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ortops._common.arguments import whole_number
from ortops._common.cores import usable_memory
from ortops.engine.training.data import Data, open_data
from ortops.engine.training.samples import Collate
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, FeedError, OrtopsError, UnsupportedError

_SHARE = 0.9
"""The share of the available memory that is used by default."""

_INTERVAL = 0.0005
"""Seconds between two looks at the memory."""

_RESOLUTION = 16
"""The result is smaller than the largest batch size by at most one part in this number."""


def find_batch_size(
    session: TrainingSession,
    data: Data,
    *,
    limit: int | None = None,
    largest: int | None = None,
    collate: Collate | None = None,
) -> int:
    """Finds the largest batch size whose training steps fit in memory.

    Makes two steps each with 1, 2, 4 … rows, from the beginning of the data, and measures the
    memory of the process. Once the next size would not fit, judged by the two sizes before it, it
    bisects. The result is at most a sixteenth below the largest size that fits. If rows differ in
    size, such as texts, give the largest ones.

    The session's state does not change. Steps that wait for other processes (see
    `ortops.distributed`) are not supported.

    Args:
        session: The session.
        data: Rows, as for `ortops.TrainingSession.fit`: arrays, a table or samples by number.
        limit: The memory that the process may have, in bytes, with the model and the data; by
            default its current memory and 90 % of what the system has available.
        largest: The largest batch size to try; by default the number of rows.
        collate: Makes batches of samples, as for `ortops.TrainingSession.fit`.

    Raises:
        ArgumentError: If an argument is invalid.
        FeedError: If the data are not rows, or do not fit the model.
        OrtopsError: If not even one row fits.
        UnsupportedError: If the system does not report the memory of a process as Linux does, or
            the session is joined with others.

    Example:
        >>> from ortops.docs import examples
        >>> rows = {name: array.repeat(8, 0) for name, array in examples.BATCH.items()}
        >>> session = examples.session()
        >>> find_batch_size(session, rows), session.steps_done
        (8, 0)
    """
    if limit is not None:
        limit = whole_number("find_batch_size: limit", limit, 1)
    if largest is not None:
        largest = whole_number("find_batch_size: largest", largest, 1)
    if not isinstance(session, TrainingSession):
        raise ArgumentError(
            f"find_batch_size: session must be a TrainingSession, got {type(session).__name__}"
        )
    if getattr(session, "size", 1) > 1:
        raise UnsupportedError(
            "find_batch_size: the session is joined with other processes, whose steps it would "
            "have to wait for; use a session of one process"
        )
    if limit is None:
        limit = _memory() + int(_SHARE * _available())
    rows = open_data(data, session.inputs, batch_size=1, collate=collate).rows
    if rows is None:
        raise FeedError(
            "find_batch_size: the data must be rows, of which batches of any size can be made; "
            "give arrays, a table or samples by number"
        )
    most = rows if largest is None else min(rows, largest)
    search = _Search(session, data, limit, collate)
    with search.restoring():
        return search.largest(most)


class _Search:
    """Measures steps with batches of several sizes.

    Args:
        session: The session.
        data: The data.
        limit: The memory that the process may have.
        collate: Makes batches of samples.
    """

    def __init__(
        self, session: TrainingSession, data: Data, limit: int, collate: Collate | None
    ) -> None:
        self._session, self._data, self._limit = session, data, limit
        self._collate = collate
        self._peaks: dict[int, int] = {}

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Restores the session at the end, and frees the memory of the steps."""
        with self._session.unchanged():
            try:
                yield
            finally:
                self._session.free_memory()

    def largest(self, most: int) -> int:
        """Returns the largest size up to another that fits."""
        if not self._fits(1):
            raise OrtopsError(
                f"find_batch_size: a step with one row needs {self._peaks.get(1, 0):,} bytes of "
                f"memory in this process, more than the limit of {self._limit:,}; give a larger "
                "limit, or use recompute= of TrainingSession"
            )
        low, high = 1, most + 1
        while low * 2 <= most:
            if not self._fits(low * 2):
                high = low * 2
                break
            low *= 2
        while high - low > max(1, low // _RESOLUTION):
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        if high == most + 1 and low < most and self._fits(most):
            return most
        return low

    def _fits(self, size: int) -> bool:
        """Whether steps of a size fit; not tried if sizes before show that they do not."""
        if self._expected(size) > self._limit:
            return False
        self._session.free_memory()
        try:
            self._peaks[size] = _peak(lambda: self._step(size))
        except (MemoryError, OrtopsError) as error:
            if isinstance(error, OrtopsError) and "alloc" not in str(error):
                raise
            return False
        return self._peaks[size] <= self._limit

    def _expected(self, size: int) -> float:
        """Returns the memory to expect, on the line through the largest sizes measured so far."""
        below = sorted(each for each in self._peaks if each < size)[-2:]
        if len(below) < 2:
            return 0.0
        (one, other), (first, second) = below, (self._peaks[each] for each in below)
        return second + max(0, second - first) * (size - other) / (other - one)

    def _step(self, size: int) -> None:
        source = open_data(self._data, self._session.inputs, batch_size=size, collate=self._collate)
        batch = next(source.epoch())
        for _ in range(2):
            self._session.step(batch, outputs=[self._session.loss_names()[0]])


def _peak(work: Callable[[], None]) -> int:
    """Returns the largest memory of the process while a function runs, in bytes."""
    peak, done = _memory(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, _memory())
            time.sleep(_INTERVAL)

    thread = threading.Thread(target=watch, name="ortops memory", daemon=True)
    thread.start()
    try:
        work()
        return max(peak, _memory())
    finally:
        done.set()
        thread.join()


def _memory() -> int:
    """Returns the resident memory of the process in bytes."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError, AttributeError) as error:
        raise UnsupportedError(
            "find_batch_size: this system does not report the memory of a process in "
            "/proc/self/statm, as Linux does; choose the batch size yourself"
        ) from error


def _available() -> int:
    """Returns the memory that the system has available, in bytes."""
    found = usable_memory()
    if found is None:
        raise UnsupportedError(
            "find_batch_size: this system does not report the available memory in /proc/meminfo; "
            "give limit="
        )
    return found
