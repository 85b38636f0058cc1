"""A step for batches of certain shapes: its graph in an open session, and bound to memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.execution.compilation import Call, run_in_a_row
from ortops.engine.execution.memory import DeviceArray, Memory, fetch, ort_value, put
from ortops.engine.execution.onnxruntime_sessions import (
    errors_as_ours,
    inputs_elsewhere,
    inputs_here,
    outputs_on,
)
from ortops.engine.execution.placement import PlacedNode, nodes_of, placed_nodes
from ortops.engine.execution.providers import WEBGPU, check_float16
from ortops.engine.execution.repetition import LOSSES, repeat, stacked, state_output
from ortops.engine.execution.template import Template
from ortops.engine.execution.update_groups import is_scalar
from ortops.engine.execution.updates_in_graph import (
    REMOVES_COPIES,
    SlicesByName,
    copy_last,
    join_updates,
    order_updates,
    put_updates_behind_gradients,
)
from ortops.engine.inference import InferenceSession
from ortops.graph.element_types import values_of_type
from ortops.graph.files import external
from ortops.graph.names import Names
from ortops.graph.passes.blocked import is_mostly_blocked
from ortops.graph.passes.order import order_for_memory, put_last_results_first
from ortops.graph.passes.quantized_weights import dequantize_products

_COPIED = 2**20  # the largest outputs, in bytes, that are copied from onnxruntime's memory

Buffers: TypeAlias = Callable[[str, int], tuple[Memory, Memory]]
"""Returns, for a variable and a turn, the memory that it is read from and that is written to."""


class Variant:
    """A template for batches of certain shapes.

    Args:
        template: The template.
        shapes: The shapes of the feeds; None for any.

    Attributes:
        template: The template.
        graph: The lowered graph, with the updates that are part of it.
        session: Runs the graph; None if it has no outputs.
        inputs: The inputs of the graph that hold packed roles.
        outputs: The outputs for their next values, in the same order.
        constants: The memory of large constants, such as frozen weights.
        safe: The outputs that may have the memory of the variable that they are the next value of.
        read_here: The inputs that are read in the CPU's memory.
        read_elsewhere: All other inputs.
        in_place: The variables whose next values overwrite the current ones, if their memory is the
            same.
        bindings: The graph bound to memory, for steps of even number and of odd number; empty
            before `bind`.
    """

    def __init__(self, template: Template, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        self.template = template
        self.bindings: list[Binding] = []
        sessions, settings = template.sessions, template.sessions.settings
        model = template.lowered(shapes)
        graph = self.graph = model.graph
        if WEBGPU in sessions.names and values_of_type(graph, ir.DataType.FLOAT16):
            check_float16()
        # Opening takes half as long without onnxruntime's optimizations, which find little.
        optimize = not is_mostly_blocked(graph)  # before updates, whose sums are in blocks as well
        self.inputs, self.outputs, self.safe = self._with_updates(graph)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():  # onnxruntime would warn
                del graph.initializers[name]
        if not optimize:
            order_for_memory(graph)
        if sessions.on_cpu and _frozen_bytes(graph) > settings.copied:
            dequantize_products(graph, Names(graph))
        self.in_place = copy_last(graph, template.unpacked) if template.overwrites else set()
        self.constants: dict[str, Memory] = {
            name: array if sessions.device is None else DeviceArray(array, sessions.device)
            for name, array in external.move_to_inputs(model, settings.copied).items()
        }
        self.session: InferenceSession | None = None  # as if all gradients are fed
        if graph.outputs:
            self.session = sessions.open(
                model,
                spin=template.spins,
                optimize=optimize,
                disabled=[REMOVES_COPIES] if self.in_place else [],
            )
        self.read_here = set() if self.session is None else inputs_here(self.session)
        self.read_elsewhere = {value.name or "" for value in graph.inputs} - self.read_here
        template.updates()  # opened here, before the graph is bound

    @functools.cached_property
    def nodes(self) -> list[PlacedNode] | None:
        """The nodes of the graph, and where they run; None if it is not known."""
        if self.template.sessions.on_cpu:
            return nodes_of(self.graph)
        return [] if self.session is None else placed_nodes(self.session)

    def _with_updates(self, graph: ir.Graph) -> tuple[SlicesByName, SlicesByName, set[str]]:
        """Adds the updates that are part of the graph, and orders its nodes.

        Returns:
            See the attributes ``inputs``, ``outputs`` and ``safe``.
        """
        template, gradients = self.template, list(graph)
        inputs, outputs = join_updates(graph, template.packed, template.in_backward)
        if not template.in_backward:
            put_last_results_first(graph)
            return inputs, outputs, set()
        shared: dict[str, list[str]] = {}  # the inputs that have the memory of an output
        for name, output in template.unpacked.items():
            shared.setdefault(output, []).append(name)
        for name, output in zip(inputs, outputs, strict=True):
            packed, index = inputs[name]
            if index in packed.overwritten:
                shared[output] = [name, *packed.group.roles[index].names]
        fixed = {value.name or "" for value in graph.inputs} - set(template.step.feeds)
        safe = order_updates(graph, shared, fixed=fixed, checked=outputs)
        put_updates_behind_gradients(graph, gradients)
        return inputs, outputs, safe

    def bind(self, buffers: Buffers, rebound: Collection[str] = ()) -> None:
        """Binds the graph to memory; see `Binding`."""
        bound = [Binding(self, buffers, turn, rebound) for turn in (0, 1)]
        self.bindings = [each.as_update() for each in bound] if self.in_place else bound

    @functools.cached_property
    def _repetition(self) -> tuple[InferenceSession, Mapping[str, str]]:
        """A session that makes several steps in a run, and its states with their next values."""
        states = {**self.template.unpacked, **dict(zip(self.inputs, self.outputs, strict=True))}
        step = self.template.step
        model = repeat(self.graph, states, self.inputs, step.feeds, step.loss)
        return self.template.sessions.open(model), states

    def repeat(self, buffers: Buffers, turn: int, feeds: Mapping[str, Array]) -> Array:
        """Makes several steps in one run.

        Args:
            buffers: Returns the memory of variables.
            turn: Which of the two buffers of a variable to read.
            feeds: The batches of each input, stacked along axis 0.

        Returns:
            The losses.

        Raises:
            KernelError: If the run failed.
        """
        session, states = self._repetition
        read = _memory_read(self, buffers, turn)
        read |= {stacked(name): array for name, array in feeds.items()}
        written, _ = _memory_written(self, buffers, turn)
        binding = session.io_binding()
        for value in session.get_inputs():
            binding.bind_ortvalue_input(value.name, ort_value(read[value.name]))
        binding.bind_output(LOSSES)
        for name, output in states.items():
            binding.bind_ortvalue_output(state_output(name), ort_value(written[output]))
        with errors_as_ours():
            session.run_with_iobinding(binding)
        losses: Array = binding.get_outputs_as_ortvaluevector()[0].numpy().copy()
        return losses


def _frozen_bytes(graph: ir.Graph) -> int:
    """Returns the size of all initializers."""
    tensors = (value.const_value for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Binding:
    """A variant bound to memory: computes gradients, and then applies the updates.

    Where the updates run is decided by others: as nodes of the graph (`differentiate` then writes
    the next values of variables), or afterwards (`update`).

    Args:
        variant: The variant.
        buffers: Returns the memory of variables.
        turn: Which of the two buffers of a variable to read.
        rebound: Inputs that are bound before each run and released after it, such as variables that
            a caller may replace, and large feeds.

    Attributes:
        shown: The outputs that a caller may request.
        interruptible: Whether it does no harm if an exception of a signal handler ends `update`.
    """

    def __init__(
        self, variant: Variant, buffers: Buffers, turn: int, rebound: Collection[str]
    ) -> None:
        template = variant.template
        self._session, self._turn, self._template = variant.session, turn, template
        self._device = template.sessions.device
        types = {value.name or "": value.dtype for value in variant.graph.outputs}
        self.shown: Sequence[str] = [name for name in template.shown if name in types]
        self.read = _memory_read(variant, buffers, turn)
        self.written, self._copies = _memory_written(variant, buffers, turn)
        self._scalars: dict[str, Array] = {}
        for update in template.updates():
            group = update.packed.group
            for name in group.scalars:
                dtype = types[name]
                assert dtype is not None
                scalar = self.written.setdefault(name, np.zeros((), dtype.numpy()))
                assert isinstance(scalar, np.ndarray)  # on a device nothing is packed
                self._scalars[name] = scalar
            for index, role in enumerate(group.roles):
                if not role.updated and index not in update.packed.given:
                    views = update.packed.views(index, turn)
                    self.written |= zip(role.names, views, strict=True)
        for value in variant.graph.outputs if self._device is None else ():
            if value.name == template.step.loss and value.dtype is not None and is_scalar(value):
                self.written.setdefault(value.name, np.zeros((), value.dtype.numpy()))
        self._passed = [name for each in template.updates() for name in each.packed.passed]
        self._kept: Sequence[str] = ()
        self._given: dict[str, Memory] = {}
        names = set[str]()
        if self._session is not None:
            names.update(value.name for value in self._session.get_inputs())
        self._rebound = names & set(rebound)
        self._feeds = names - self.read.keys() - self._rebound
        bound = {name: each for name, each in self.read.items() if name not in self._rebound}
        self._moving = [] if self._session is None else inputs_elsewhere(self._session, bound)
        self._there = set[str]()  # the outputs that the device computes
        self._place: tuple[Any, ...] = ()
        if self._device is not None:
            self._place = self._device.kind, self._device.number
            if self._session is not None:
                self._there = outputs_on(self._device, self._session)
        self._released = ort_value(np.zeros(1, np.float32))
        self._bindings: dict[tuple[str, ...], onnxruntime.IOBinding] = {}
        self.bind_updates()
        template.bindings.add(self)

    def bind_updates(self) -> None:
        """Binds the updates that are separate from the gradients, as the template has them now."""
        updates = self._template.updates()
        bound = [
            update.bind([self._scalars[name] for name in update.packed.group.scalars], self._turn)
            for update in updates
        ]
        calls = [each.calls for each in bound]
        self._works: Sequence[Callable[[Mapping[str, Any]], object]] = [e.apply for e in bound]
        self._calls: list[Call] | None = None
        if None not in calls:
            self._calls = [call for each in calls for call in each or ()]
        self.interruptible = all(update.interruptible for update in updates)

    def differentiate(
        self,
        feeds: Mapping[str, Memory],
        wanted: Sequence[str] | None,
        into: Mapping[str, Array] | None = None,
        *,
        stay: bool = False,
    ) -> dict[str, Any]:
        """Runs the graph.

        Args:
            feeds: The feeds, and arrays that replace variables.
            wanted: The outputs to return; all by default.
            into: Arrays for further outputs, which must be the same outputs in each run.
            stay: Whether outputs that are computed on a device are returned in its memory.
        """
        if self._session is None:
            return {}
        names = tuple(n for n in self.shown if wanted is None or n in wanted)
        fetched = tuple(name for name in names if name not in self.written)
        staying = self._there.intersection(fetched if stay else ())
        binding = self._bindings.get(fetched)
        if binding is None:
            binding = self._bindings[fetched] = self._bind(self._session)
        for name in self._feeds:
            binding.bind_cpu_input(name, feeds[name])
        for name in self._moving:
            binding.bind_ortvalue_input(name, ort_value(self.read[name]))
        for name in self._rebound:
            memory = feeds[name] if name in feeds else self.read[name]
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name in self._passed:
            binding.bind_output(name)
        into = into or {}
        for name in self._kept:
            binding.bind_output(name, *self._place)
        for name, array in into.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        for name in fetched:  # otherwise onnxruntime would write into the results of the last step
            binding.bind_output(name, *(self._place if name in staying else ()))
        with errors_as_ours():
            self._session.run_with_iobinding(binding)
        for source, target in self._copies:
            put(target, fetch(source))
        shown: dict[str, Any] = {
            n: fetch(self.written[n]).copy() for n in names if n in self.written
        }
        if fetched or self._passed or self._kept:
            outputs = binding.get_outputs_as_ortvaluevector()
            # An iterator would return references to elements, which are replaced below.
            found = (outputs[index] for index in range(len(self.written), len(outputs)))
            self._given = {name: next(found).numpy() for name in self._passed}
            if self._device is not None:
                around = functools.partial(DeviceArray.around, device=self._device)
                self._given |= {name: around(next(found)) for name in self._kept}
            for _ in into:
                next(found)
            for name in fetched:
                value = next(found)
                shown[name] = around(value) if name in staying else _copied(value.numpy())
        for name in self._rebound:  # otherwise the binding would keep them alive
            binding.bind_ortvalue_input(name, self._released)
        for name in (*self._passed, *self._kept, *into):
            binding.bind_ortvalue_output(name, self._released)
        return shown

    def _bind(self, session: InferenceSession) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        for name, memory in self.read.items():
            binding.bind_ortvalue_input(name, ort_value(memory))
        for name, memory in self.written.items():
            binding.bind_ortvalue_output(name, ort_value(memory))
        return binding

    def update(self, feeds: Mapping[str, Any]) -> None:
        """Runs the updates that are separate from the gradients, which are let go of."""
        if self._given:
            feeds, self._given = {**feeds, **self._given}, {}
        for work in self._works:
            work(feeds)

    def update_and(self, finish: Callable[[], object]) -> bool:
        """Does the same by `run_in_a_row`, with a C function, if it can; returns whether it did."""
        if self._calls is None:
            return False
        run_in_a_row(self._calls, finish)
        return True

    def as_update(self) -> Binding:
        """Returns a binding whose update is a run of this one, which overwrites variables."""
        return self._with([functools.partial(self.differentiate, wanted=())], session=None)

    def followed_by(self, other: Binding, kept: Sequence[str]) -> Binding:
        """Returns a binding whose updates are the run and the updates of another one.

        Args:
            other: The other one.
            kept: Outputs that it reads, which stay on the device.
        """
        run = functools.partial(other.differentiate, wanted=())
        result = self._with([run, other.update], session=self._session)
        result._kept = kept
        return result

    def _with(
        self,
        works: Sequence[Callable[[Mapping[str, Any]], object]],
        session: InferenceSession | None,
    ) -> Binding:
        result = copy.copy(self)
        result._session, result._works, result._calls = session, works, None
        result.interruptible = False
        return result


def _memory_read(variant: Variant, buffers: Buffers, turn: int) -> dict[str, Memory]:
    """Returns the memory of all inputs of a graph except feeds."""
    read: dict[str, Memory] = {}
    for name in (value.name or "" for value in variant.graph.inputs):
        if name in variant.inputs:
            packed, index = variant.inputs[name]
            read[name] = packed.arrays[index][turn]
        elif name in variant.constants:
            read[name] = variant.constants[name]
        elif name not in variant.template.step.feeds:
            read[name] = buffers(name, turn)[0]
    return read


def _memory_written(
    variant: Variant, buffers: Buffers, turn: int
) -> tuple[dict[str, Memory], list[tuple[Memory, Memory]]]:
    """Returns the memory of next values by output, and pairs of memory to copy after a run.

    An output that may not overwrite what the graph reads has memory of its own.
    """
    written: dict[str, Memory] = {}
    copies: list[tuple[Memory, Memory]] = []
    targets = [(output, buffers(name, turn)) for name, output in variant.template.unpacked.items()]
    for name, (packed, index) in variant.outputs.items():
        both = packed.arrays[index]
        targets.append((name, (both[turn], both[1 - turn])))
    in_graph = variant.template.in_backward
    for output, (present, target) in targets:
        own = in_graph and target is present and output not in variant.safe
        if own and output not in written:
            written[output] = np.empty_like(target)
        if written.setdefault(output, target) is not target:
            copies.append((written[output], target))
    return written, copies


def _copied(array: Array) -> Array:
    """Returns a copy, as a view would keep all of onnxruntime's memory; large arrays as views."""
    return array.copy() if array.nbytes <= _COPIED else array
