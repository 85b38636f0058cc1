"""A part of a step, bound to memory."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.execution.compilation import Call
from ortops.engine.execution.memory import Device, DeviceArray, Memory, fetch, ort_value, put
from ortops.engine.execution.onnxruntime_sessions import errors_as_ours, inputs_elsewhere
from ortops.engine.inference import InferenceSession

_COPIED = 2**20  # the largest outputs, in bytes, that are copied from onnxruntime's memory


@dataclass(eq=False)
class Binding:
    """A part of a step, bound to memory.

    Attributes:
        session: The gradient graph; None if it has no outputs.
        read: The memory of all inputs except feeds.
        written: The memory of outputs by name.
        shown: The outputs that a caller may request.
        copies: Pairs of memory: the values of the first are copied to the second.
        updates: Functions that run the packed updates.
        interruptible: Whether an interrupted update does no harm.
        rebound: Inputs that are bound before each run and released after it: variables that a
            caller may replace, and large feeds.
        passed: Outputs in onnxruntime's memory that are passed to the updates and released.
        device: The device of the variables; None for numpy's memory.
        calls: The calls of compiled code that run all packed updates; None if these need more.
    """

    session: InferenceSession | None
    read: Mapping[str, Memory]
    written: Mapping[str, Memory]
    shown: Sequence[str]
    copies: Sequence[tuple[Memory, Memory]]
    updates: Sequence[Callable[[Mapping[str, Any]], None]]
    interruptible: bool
    rebound: Collection[str]
    passed: Sequence[str]
    device: Device | None = None
    calls: Sequence[Call] | None = None

    def __post_init__(self) -> None:
        """Determines which inputs are feeds, and which are bound before each run."""
        self._given: dict[str, Memory] = {}
        inputs = [] if self.session is None else self.session.get_inputs()
        names = {value.name for value in inputs}
        self.rebound = names & set(self.rebound)
        self._feeds = names - self.read.keys() - self.rebound
        bound = {name: memory for name, memory in self.read.items() if name not in self.rebound}
        self._moving = [] if self.session is None else inputs_elsewhere(self.session, bound)
        self._released = ort_value(np.zeros(1, np.float32))
        self._bindings: dict[tuple[str, ...], onnxruntime.IOBinding] = {}

    def differentiate(
        self,
        feeds: Mapping[str, Memory],
        wanted: Sequence[str] | None,
        into: Mapping[str, Array] | None = None,
        kept: Sequence[str] = (),
    ) -> dict[str, Array]:
        """Runs the gradient graph.

        Args:
            feeds: The feeds, and arrays that replace variables.
            wanted: The outputs to return; all by default.
            into: Arrays for further outputs, which must be the same outputs in each run.
            kept: Further outputs that stay on the device until `take`; the same in each run, and
                the same as those of ``into`` in other runs.
        """
        if self.session is None:
            return {}
        names = tuple(n for n in self.shown if wanted is None or n in wanted)
        fetched = tuple(name for name in names if name not in self.written)
        binding = self._bindings.get(fetched)
        if binding is None:
            binding = self._bindings[fetched] = self._bind(self.session)
        for name in self._feeds:
            binding.bind_cpu_input(name, feeds[name])
        for name in self._moving:
            binding.bind_ortvalue_input(name, ort_value(self.read[name]))
        for name in self.rebound:
            memory = feeds[name] if name in feeds else self.read[name]
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name in self.passed:
            binding.bind_output(name)
        into = into or {}
        if self.device is not None:
            for name in kept:
                binding.bind_output(name, self.device.kind, self.device.number)
        for name, array in into.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        for name in fetched:  # otherwise onnxruntime would write into the results of the last step
            binding.bind_output(name)
        with errors_as_ours():
            self.session.run_with_iobinding(binding)
        for source, target in self.copies:
            put(target, fetch(source))
        shown = {name: fetch(self.written[name]).copy() for name in names if name in self.written}
        if fetched or self.passed or kept:
            outputs = binding.get_outputs_as_ortvaluevector()
            # An iterator would return references to elements, which are replaced below.
            found = (outputs[index] for index in range(len(self.written), len(outputs)))
            self._given = {name: next(found).numpy() for name in self.passed}
            if self.device is not None:
                self._given |= {n: DeviceArray.around(next(found), self.device) for n in kept}
            for _ in into:
                next(found)
            shown |= {name: _copied(next(found).numpy()) for name in fetched}
        for name in self.rebound:  # otherwise the binding would keep them alive
            binding.bind_ortvalue_input(name, self._released)
        for name in (*self.passed, *kept, *into):
            binding.bind_ortvalue_output(name, self._released)
        return shown

    def _bind(self, session: InferenceSession) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        for name, memory in self.read.items():
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name, memory in self.written.items():
            binding.bind_ortvalue_output(name, ort_value(memory))
        return binding

    def take(self) -> Mapping[str, Memory]:
        """Returns the outputs that the last run has kept, which are not kept any longer."""
        taken, self._given = self._given, {}
        return taken

    def update(self, feeds: Mapping[str, Any]) -> None:
        """Runs the packed updates."""
        if self._given:
            feeds = {**feeds, **self.take()}
        for update in self.updates:
            update(feeds)

    def update_and(self, finish: Callable[[], object]) -> bool:
        """Runs the packed updates and a C function, if these are `calls`; returns whether it did.

        Python runs signal handlers between its own instructions only. Here, C functions are called
        by C functions, so no handler runs before all of them have ended.
        """
        if self.calls is None:
            return False
        functions: list[Callable[[], object]] = [*(call.native for call in self.calls), finish]
        deque(map(operator.call, functions), maxlen=0)
        return True


def overwriting(binding: Binding) -> Binding:
    """Returns a binding whose updates are the runs of another one, which overwrites variables."""

    def update(feeds: Mapping[str, Memory]) -> None:
        binding.differentiate(feeds, ())

    return Binding(None, {}, {}, [], [], [update], interruptible=False, rebound=(), passed=())


def _copied(array: Array) -> Array:
    """Returns a copy, as a view would keep all of onnxruntime's memory; large arrays as views."""
    return array.copy() if array.nbytes <= _COPIED else array
