"""A step bound to memory: what runs it, time after time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.execution.memory import Memory, fetch, ort_value, put
from ortops.execution.onnxruntime_sessions import errors_as_ours
from ortops.inference import InferenceSession

__all__ = ["Binding"]

Array: TypeAlias = npt.NDArray[Any]

_COPIED = 2**20  # bytes of the largest outputs that are copied out of onnxruntime's memory


class Binding:
    """One part of a step, bound to memory.

    Args:
        session: The graph of gradients; None if it gives nothing.
        read: The memory of its inputs, but feeds.
        written: Outputs, and the memory that they are written to.
        shown: The outputs that a caller may want.
        copies: Memory that is written, and other that gets the same values.
        updates: What runs the packed updates.
        interruptible: Whether nothing is lost where the updates are not made to their end.
        anew: Inputs that a run may be given: variables, then they have their values by default, and
            big feeds, which are let go of after it.
        passed: Outputs in onnxruntime's memory, which the updates are given and let go of.

    Attributes:
        interruptible: As given.
    """

    def __init__(
        self,
        session: InferenceSession | None,
        read: Mapping[str, Memory],
        written: Mapping[str, Memory],
        shown: Sequence[str],
        copies: Sequence[tuple[Memory, Memory]],
        updates: Sequence[Callable[[Mapping[str, Array]], None]],
        interruptible: bool,
        anew: Collection[str] = (),
        passed: Sequence[str] = (),
    ) -> None:
        self._session = session
        self._read = read
        self._written = written
        self._shown = shown
        self._copies = copies
        self._updates = updates
        self.interruptible = interruptible
        self._passed = passed
        self._given: Mapping[str, Array] = {}
        inputs = [] if session is None else session.get_inputs()
        names = {value.name for value in inputs}
        self._anew = names & set(anew)
        self._feeds = names - read.keys() - self._anew
        self._nothing = ort_value(np.zeros(1, np.float32))
        self._bindings: dict[tuple[str, ...], onnxruntime.IOBinding] = {}

    def differentiate(
        self,
        feeds: Mapping[str, Array],
        wanted: Sequence[str] | None,
        into: Mapping[str, Array] | None = None,
    ) -> dict[str, Array]:
        """Runs the graph of gradients.

        Args:
            feeds: What is fed, and arrays in the place of variables.
            wanted: The outputs to return; all by default.
            into: Further outputs, the same in each run, and the arrays that they are written to.
        """
        if self._session is None:
            return {}
        names = tuple(n for n in self._shown if wanted is None or n in wanted)
        fetched = tuple(name for name in names if name not in self._written)
        binding = self._bindings.get(fetched)
        if binding is None:
            binding = self._bindings[fetched] = self._bind(self._session)
        for name in self._feeds:
            binding.bind_cpu_input(name, feeds[name])
        for name in self._anew:
            memory = feeds[name] if name in feeds else self._read[name]
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name in self._passed:
            binding.bind_output(name)
        into = into or {}
        for name, array in into.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        for name in fetched:  # anew: onnxruntime would write into the last step's
            binding.bind_output(name)
        with errors_as_ours():
            self._session.run_with_iobinding(binding)
        for source, target in self._copies:
            put(target, fetch(source))
        shown = {name: fetch(self._written[name]).copy() for name in names if name in self._written}
        if fetched or self._passed:
            found = iter(list(binding.get_outputs_as_ortvaluevector())[len(self._written) :])
            self._given = {name: next(found).numpy() for name in self._passed}
            for _ in into:
                next(found)
            shown |= {name: _copied(next(found).numpy()) for name in fetched}
        for name in self._anew:  # or the binding would keep them alive
            binding.bind_ortvalue_input(name, self._nothing)
        for name in (*self._passed, *into):
            binding.bind_ortvalue_output(name, self._nothing)
        return shown

    def _bind(self, session: InferenceSession) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        for name, memory in self._read.items():
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name, memory in self._written.items():
            binding.bind_ortvalue_output(name, ort_value(memory))
        return binding

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Runs the packed updates."""
        if self._given:
            feeds, self._given = {**feeds, **self._given}, {}
        for update in self._updates:
            update(feeds)


def _copied(array: Array) -> Array:
    """Returns a copy: a view would keep all of onnxruntime's memory; a big array stays as it is."""
    return array.copy() if array.nbytes <= _COPIED else array
