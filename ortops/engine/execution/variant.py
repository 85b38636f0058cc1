"""A step for batches of certain shapes, with open sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.binding import Binding, overwriting
from ortops.engine.execution.compilation import Call
from ortops.engine.execution.device_updates import REMOVES_COPIES, copy_last
from ortops.engine.execution.memory import DeviceArray, Memory
from ortops.engine.execution.onnxruntime_sessions import inputs_here
from ortops.engine.execution.packed import Packed
from ortops.engine.execution.placement import PlacedNode, nodes_of, placed_nodes
from ortops.engine.execution.providers import WEBGPU, check_float16
from ortops.engine.execution.repetition import Repetition, repeat
from ortops.engine.execution.template import Template
from ortops.engine.execution.update_groups import is_scalar
from ortops.engine.execution.updates_in_backward import order_updates, put_updates_behind_gradients
from ortops.graph.element_types import values_of_type
from ortops.graph.files import external
from ortops.graph.files.serialization import to_proto
from ortops.graph.names import Names
from ortops.graph.passes.blocked import is_mostly_blocked
from ortops.graph.passes.order import put_last_results_first
from ortops.graph.passes.quantized_weights import dequantize_products
from ortops.graph.passes.scaled_sums import expand
from ortops.graph.tensor import Tape, op

_LENT = 2**24
"""Constants of at least this many bytes, such as frozen weights, are shared with onnxruntime."""

SlicesByName: TypeAlias = dict[str, tuple[Packed, int]]
"""Inputs or outputs of a graph that hold a packed role: the packed update and the role's index."""


class Variant:
    """A template for batches of certain shapes.

    Args:
        template: The template.
        shapes: The shapes of the feeds; None for any.

    Attributes:
        nodes: The nodes of the gradient graph, and where they run; None if it is not known.
        read_here: The inputs that are read in the CPU's memory.
        read_elsewhere: All other inputs.
        in_place: The variables whose next values overwrite the present ones, if their memory is the
            same.
    """

    def __init__(self, template: Template, shapes: Mapping[str, tuple[int, ...]] | None) -> None:
        self._template = template
        sessions, settings = template.sessions, template.sessions.settings
        model = template.lowered(shapes)
        graph = self._graph = model.graph
        if WEBGPU in sessions.names and values_of_type(graph, ir.DataType.FLOAT16):
            check_float16()
        self._inputs: SlicesByName = {}
        self._outputs: SlicesByName = {}
        gradients = list(graph)
        # Opening takes half as long without onnxruntime's optimizations, which find little.
        optimize = not is_mostly_blocked(graph)  # before updates, whose sums are in blocks as well
        if any(packed.joined for packed in template.packed):
            self._inputs, self._outputs = _join(graph, template.packed, template.in_backward)
        self._safe: set[str] = set()  # outputs that are written to the memory that is read
        if template.in_backward:
            self._safe = self._order_updates(graph)
            put_updates_behind_gradients(graph, gradients)
        else:
            put_last_results_first(graph)
        for name, value in list(graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():  # onnxruntime would warn
                del graph.initializers[name]
        if sessions.on_cpu and _frozen_bytes(graph) > settings.copied:
            dequantize_products(graph, Names(graph))
        self.in_place = copy_last(graph, template.unpacked) if template.overwrites else set()
        self._constants: dict[str, Memory] = {
            name: array if sessions.device is None else DeviceArray(array, sessions.device)
            for name, array in external.move_to_inputs(model, settings.copied).items()
        }
        self._session = None  # without outputs, as if all gradients are fed
        if graph.outputs:
            limit = _LENT if sessions.lends else None
            proto, self._lent = external.move_out(model, limit)
            self._session = sessions.open(
                proto,
                spin=template.spins,
                optimize=optimize,
                lent=self._lent,
                disabled=[REMOVES_COPIES] if self.in_place else [],
            )
        self.nodes: list[PlacedNode] | None = []
        if sessions.on_cpu:
            self.nodes = nodes_of(graph)
        elif self._session is not None:
            self.nodes = placed_nodes(self._session)
        self.read_here = set() if self._session is None else inputs_here(self._session)
        self.read_elsewhere = {value.name or "" for value in graph.inputs} - self.read_here
        self._updates = template.updates()

    def _order_updates(self, graph: ir.Graph) -> set[str]:
        """Makes updates in place wait for what reads old values; returns their outputs."""
        shared: dict[str, list[str]] = {}
        for name, output in self._template.unpacked.items():
            shared.setdefault(output, []).append(name)
        for name, output in zip(self._inputs, self._outputs, strict=True):
            packed, index = self._inputs[name]
            first, second = packed.arrays[index]
            if first is second:
                shared[output] = [name, *packed.group.roles[index].names]
        step = self._template.step
        fixed = {value.name or "" for value in graph.inputs} - set(step.feeds)
        return order_updates(graph, shared, fixed=fixed, checked=self._outputs)

    def bind(
        self,
        buffers: Callable[[str], tuple[Memory, Memory]],
        turn: int,
        rebound: Collection[str] = (),
    ) -> Binding:
        """Binds the sessions to memory.

        Args:
            buffers: Returns the memory that a variable is read from, and the memory that its next
                value is written to.
            turn: Which of the two arrays of packed roles to read.
            rebound: See `Binding`.
        """
        step = self._template.step
        read: dict[str, Memory] = {}
        for name in (value.name or "" for value in self._graph.inputs):
            if name in self._inputs:
                packed, index = self._inputs[name]
                read[name] = packed.arrays[index][turn]
            elif name in self._constants:
                read[name] = self._constants[name]
            elif name not in step.feeds:
                read[name] = buffers(name)[0]
        written: dict[str, Memory] = {}
        copies: list[tuple[Memory, Memory]] = []
        for name, output in self._template.unpacked.items():
            present, target = buffers(name)
            elsewhere = self._template.in_backward and output not in self._safe
            if elsewhere and target is present and output not in written:
                written[output] = np.empty_like(target)
            if written.setdefault(output, target) is not target:
                copies.append((written[output], target))
        for name, (packed, index) in self._outputs.items():
            present, target = packed.arrays[index][turn], packed.arrays[index][1 - turn]
            written[name] = target
            if target is present and name not in self._safe:
                written[name] = np.empty_like(target)
                copies.append((written[name], target))
        types = {value.name: value.dtype for value in self._graph.outputs}
        updates: list[Callable[[Mapping[str, Any]], None]] = []
        calls: list[Call] | None = []
        scalars: dict[str, Array] = {}
        for update in self._updates:
            group = update.packed.group
            for name in group.scalars:
                dtype = types[name]
                assert dtype is not None
                scalar = written.setdefault(name, np.zeros((), dtype.numpy()))
                assert isinstance(scalar, np.ndarray)  # on a device nothing is packed
                scalars[name] = scalar
            for index, role in enumerate(group.roles):
                if not role.updated and index not in update.packed.given:
                    written |= zip(role.names, update.packed.views(index, turn), strict=True)
            own = [scalars[name] for name in group.scalars]
            updates.append(update.bind(own, turn))
            of_update = update.calls(own, turn)
            calls = None if calls is None or of_update is None else [*calls, *of_update]
        for value in self._graph.outputs:
            if value.name == step.loss and value.dtype is not None and is_scalar(value):
                written.setdefault(step.loss, np.zeros((), value.dtype.numpy()))
        interruptible = all(update.interruptible for update in self._updates)
        passed = [name for update in self._updates for name in update.packed.passed]
        shown = [name for name in self._template.shown if name in types]
        device = self._template.sessions.device
        binding = Binding(
            *(self._session, read, written, shown, copies, updates, interruptible, rebound, passed),
            device,
            calls,
        )
        return overwriting(binding) if self.in_place else binding

    @functools.cached_property
    def repetition(self) -> Repetition:
        """Runs several steps at once."""
        states = {**self._template.unpacked, **dict(zip(self._inputs, self._outputs, strict=True))}
        step = self._template.step
        model = repeat(self._graph, states, self._inputs, step.feeds, step.loss)
        session = self._template.sessions.open(to_proto(model))
        return Repetition(session, states, self._inputs, self._constants)


def _frozen_bytes(graph: ir.Graph) -> int:
    """Returns the size of all initializers."""
    tensors = (value.const_value for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _join(
    graph: ir.Graph, all_packed: list[Packed], in_backward: bool
) -> tuple[SlicesByName, SlicesByName]:
    """Inserts the packed updates that are joined into the gradient graph.

    Args:
        graph: The gradient graph.
        all_packed: All packed updates.
        in_backward: Whether nodes are added for the scalars of an update, which may wait for others
            (see `ortops.engine.execution.updates_in_backward`).

    Returns:
        The inputs and the outputs of the graph that hold packed roles, in the same order.
    """
    new_inputs: SlicesByName = {}
    new_outputs: SlicesByName = {}
    outputs = {value.name: value for value in graph.outputs}
    values = {**{value.name: value for value in graph.inputs}, **outputs}
    tape = Tape(graph, names=Names(graph))
    apart = [packed.group for packed in all_packed if not packed.joined]
    read_apart = {n for group in apart for role in group.roles for n in role.names}
    read_apart |= {name for group in apart for name in group.scalars}
    for packed in all_packed:
        if not packed.joined:
            continue
        group = packed.group
        rows = None if packed.rows == 1 else packed.rows
        inputs = packed.inputs(f"{tape.names.unique('packed')}_", rows)
        for index, role in enumerate(group.roles):
            if role.updated:
                graph.inputs.append(inputs[index])
                new_inputs[inputs[index].name or ""] = (packed, index)
            else:
                inputs[index] = packed.pack(tape, [values[name] for name in role.names])
        scalars = [outputs[name] for name in group.scalars]
        own = [op.Identity(tape.tensor(v)).value if in_backward else v for v in scalars]
        results = packed.emit(tape, [*inputs[: len(group.roles)], *own])
        taken = {*scalars, *(values[n] for r in group.roles if not r.updated for n in r.names)}
        kept = [v for v in graph.outputs if v not in taken or v.name in read_apart]
        graph.outputs.clear()
        graph.outputs.extend([*kept, *results])
        for index, result in zip(group.next_values, results, strict=True):
            new_outputs[result.name or ""] = (packed, index)
    if in_backward:
        expand(graph)
    return new_inputs, new_outputs
