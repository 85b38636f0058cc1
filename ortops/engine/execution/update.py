"""Packed updates that run after the gradient graph, in sessions or as compiled code."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.execution.compilation import Call, compiled
from ortops.engine.execution.memory import ort_value
from ortops.engine.execution.onnxruntime_sessions import Sessions, errors_as_ours
from ortops.engine.execution.packed import Packed
from ortops.engine.execution.translation import Translation

Work: TypeAlias = Callable[[Mapping[str, Array]], None]
"""Applies an update, or a part of it, given the feeds and the gradients that are passed to it."""


@dataclass(frozen=True)
class BoundUpdate:
    """An update that is bound to memory.

    Attributes:
        apply: Runs it.
        calls: The calls of compiled code that run it; None if it needs Python or several threads.
    """

    apply: Work
    calls: Sequence[Call] | None


class Update(ABC):
    """A packed update, whose chunks are shared by threads.

    It has two implementations with the same results to the bit: `SessionUpdate` runs everywhere,
    `CompiledUpdate` takes about half the time.

    Args:
        packed: The update.
        threads: The maximum number of threads.
    """

    def __init__(self, packed: Packed, threads: int) -> None:
        self.packed = packed
        self._threads = min(packed.rows, threads)
        self._pool = ThreadPoolExecutor(self._threads - 1) if self._threads > 1 else None
        self._by_chunk = bool(packed.given)

    @property
    def interruptible(self) -> bool:
        """Whether it does no harm if an exception of a signal handler ends a run early.

        This requires that the update writes only to buffers that nobody reads before the step is
        complete, and that no other thread continues.
        """
        return False

    def bind(self, scalars: Sequence[Array], turn: int) -> BoundUpdate:
        """Binds the update to memory.

        Args:
            scalars: The memory of the scalars of its formula.
            turn: The index of the buffers with the current values.
        """
        rows = self.packed.rows
        ends = [rows * number // self._threads for number in range(self._threads + 1)]
        bound = [self._bind_rows(*span, scalars, turn) for span in itertools.pairwise(ends)]
        if len(bound) == 1 and bound[0].calls is not None:
            return bound[0]
        works = [each.apply for each in bound]

        def update(feeds: Mapping[str, Array]) -> None:
            others = [self._start(work, feeds) for work in works[1:]]
            with errors_as_ours():
                try:
                    works[0](feeds)
                finally:
                    for other in others:
                        other.result()

        return BoundUpdate(update, None)

    def _start(self, work: Work, feeds: Mapping[str, Array]) -> Future[None]:
        """Starts work in another thread; does it in this one if no thread can be started."""
        assert self._pool is not None
        try:
            return self._pool.submit(work, feeds)
        except RuntimeError:  # at the end of the interpreter
            done: Future[None] = Future()
            work(feeds)
            done.set_result(None)
            return done

    @abstractmethod
    def _bind_rows(self, begin: int, end: int, scalars: Sequence[Array], turn: int) -> BoundUpdate:
        """Binds a range of chunks to memory: the work of one thread."""


class SessionUpdate(Update):
    """A packed update in an onnxruntime session.

    A gradient that fills a chunk is read without a copy, and released afterwards. Slices of several
    gradients are copied for each chunk, into memory that stays in the cache of a core.

    Args:
        packed: The update.
        sessions: Opens the session.
        single_thread: Whether a run uses one thread, even if there is one chunk only.
    """

    def __init__(self, packed: Packed, sessions: Sessions, *, single_thread: bool = False) -> None:
        super().__init__(packed, sessions.threads)
        model = packed.model(1 if self._by_chunk else packed.rows)
        alone = single_thread or packed.rows > 1
        self._session = sessions.open(model, single_thread=alone, anywhere=False)

    def _bind_rows(self, begin: int, end: int, scalars: Sequence[Array], turn: int) -> BoundUpdate:
        run = self._session.run_with_iobinding
        if not self._by_chunk:
            whole = slice(begin, end) if self.packed.rows > 1 else slice(None)
            binding = self._bind(whole, {}, scalars, turn)
            return BoundUpdate(lambda feeds: run(binding), None)
        group = self.packed.group
        filled = {
            index: np.zeros(self.packed.chunk, group.roles[index].dtype.numpy())
            for index in self.packed.given
        }
        released = ort_value(np.zeros(1, np.float32))
        chunks = []
        for row in range(begin, end):
            where = row if self.packed.rows > 1 else slice(None)
            copies, views = [], []
            for index, buffer in filled.items():
                for member, part, place in self.packed.spans(row):
                    name, target = group.roles[index].names[member], buffer.reshape(-1)[place]
                    if target.size == buffer.size:
                        views.append((f"input_{index}", name, part))
                    else:
                        copies.append((target, name, part))
            chunks.append((copies, views, self._bind(where, filled, scalars, turn)))

        def work(feeds: Mapping[str, Array]) -> None:
            for copies, views, binding in chunks:
                for target, name, part in copies:
                    np.copyto(target, feeds[name].reshape(-1)[part])
                for read, name, part in views:
                    chunk = feeds[name].reshape(-1)[part].reshape(self.packed.chunk)
                    binding.bind_ortvalue_input(read, ort_value(chunk))
                run(binding)
                for read, _, _ in views:  # otherwise the binding would keep it alive
                    binding.bind_ortvalue_input(read, released)

        return BoundUpdate(work, None)

    def _bind(
        self,
        where: int | slice,
        filled: Mapping[int, Array],
        scalars: Sequence[Array],
        turn: int,
    ) -> onnxruntime.IOBinding:
        binding = self._session.io_binding()
        group, arrays = self.packed.group, self.packed.arrays
        inputs = [
            filled[index] if index in filled else arrays[index][turn][where]
            for index in range(len(group.roles))
        ]
        for index, array in enumerate((*inputs, *scalars)):
            binding.bind_ortvalue_input(f"input_{index}", ort_value(array))
        for index in group.next_values:
            target = arrays[index][1 - turn][where]
            binding.bind_ortvalue_output(f"next_{index}", ort_value(target))
        return binding


class CompiledUpdate(Update):
    """A packed update in compiled code, in one pass over memory.

    Gradients are read without copies, slice by slice.

    Args:
        packed: The update.
        translation: Its translation.
        threads: The maximum number of threads.
    """

    def __init__(self, packed: Packed, translation: Translation, threads: int) -> None:
        super().__init__(packed, threads)
        self._function, self._constants = compiled(translation), translation.constants

    @property
    def interruptible(self) -> bool:
        """As in `Update`; the compiled code is never interrupted, but its caller may be."""
        return self._threads == 1 and not self.packed.in_place

    def _bind_rows(self, begin: int, end: int, scalars: Sequence[Array], turn: int) -> BoundUpdate:
        function, length = self._function, math.prod(self.packed.chunk)
        if not self._by_chunk:
            arguments = self._arguments(slice(begin * length, end * length), scalars, turn)
            whole = Call(function, arguments, (end - begin) * length)
            return BoundUpdate(lambda feeds: whole(), [whole])
        given = [self.packed.group.roles[index].names for index in self.packed.given]
        pieces = []
        for row in range(begin, end):
            for member, part, place in self.packed.spans(row):
                where = slice(row * length + place.start, row * length + place.stop)
                arguments = self._arguments(where, scalars, turn)
                call = Call(function, arguments, place.stop - place.start)
                pieces.append((call, [each[member] for each in given], part))

        def work(feeds: Mapping[str, Array]) -> None:
            for call, names, part in pieces:
                call([_piece(feeds, name, part) for name in names])

        return BoundUpdate(work, None)

    def _arguments(self, where: slice, scalars: Sequence[Array], turn: int) -> list[Array | None]:
        """Returns the arguments for a slice of the elements; None for passed tensors."""
        packed, overwritten = self.packed, self.packed.overwritten
        arguments: list[Array | None] = []
        for index, role in enumerate(packed.group.roles):
            if index in packed.given:
                arguments.append(None)
                continue
            first, second = (_numbers(packed.arrays[index][t])[where] for t in (turn, 1 - turn))
            arguments.append(first)
            if role.updated and index not in overwritten:
                arguments.append(second)
        return [*arguments, *map(_numbers, scalars), *self._constants]


def _numbers(array: Array) -> Array:
    """Returns a flat view; 16-bit numbers as uint16, as compiled code expects them."""
    flat = array.reshape(-1)
    return flat.view(np.uint16) if flat.dtype.itemsize == 2 else flat


def _piece(feeds: Mapping[str, Array], name: str, part: slice) -> Array:
    piece = _numbers(feeds[name])[part]
    return piece if piece.flags.aligned else piece.copy()
