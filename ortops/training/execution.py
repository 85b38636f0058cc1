"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the graph of gradients, then one run of each packed update (see
`ortops.training.split`). Both read and write the variables where they lie: nothing is copied
between them. Updates that are safe in place are made in place; other variables have two buffers
that take turns. Small models are updated in the graph of gradients itself, which saves a run.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from ortops import external
from ortops.custom_ops import interrupts_deferred
from ortops.errors import KernelError, OrtopsError, UnsupportedError
from ortops.lowering import (
    lower_optimizers,
    lower_prepared,
    takes_python_kernel,
    to_proto,
)
from ortops.session import InferenceSession, Kernels
from ortops.tensor import Names, Tape
from ortops.training import blocked, scaled_sums, transposed
from ortops.training.blocked import block_convolutions, block_size, is_mostly_blocked
from ortops.training.checkpoint import Checkpoint, check, names_in, pin, recompute
from ortops.training.cross_entropy import expand_losses
from ortops.training.order import put_last_results_first
from ortops.training.packed import Packed, Variable
from ortops.training.products import improve_products
from ortops.training.rectified import rectify
from ortops.training.recurrent import keep_gates
from ortops.training.repetition import LOSSES, repeat, stacked, state_output
from ortops.training.sizes import bind_sizes
from ortops.training.split import split
from ortops.training.step_graph import Step, remove_defaults
from ortops.training.transposed import transpose_activations

__all__ = ["Execution", "errors_as_ours", "open_session", "ort_value"]

Array: TypeAlias = npt.NDArray[Any]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]

_SHAPES = 2  # shapes of batches that get graphs of their own
_JOINED = 2**18  # elements of models that are updated in the graph of gradients
_CHUNK = 2**17  # elements of a role that are updated at a time: they stay in a core's cache
_COPIED_OPTIONS = (
    "enable_profiling",
    "graph_optimization_level",
    "log_severity_level",
    "profile_file_prefix",
)
_COPIED = 2**20  # bytes of the largest outputs that are copied out of onnxruntime's memory


class Execution:
    """Runs the steps of a training algorithm.

    Args:
        steps: The parts of a step, one for each training_info entry; not to be used afterwards.
        values: The first values of the variables; copied.
        kernels: ``"onnx"`` or ``"python"``, for optimizer nodes.
        options: Options for the onnxruntime sessions.
        providers: Execution providers.
        checkpoint: What is kept for the backward pass (see `ortops.training.checkpoint`).

    Attributes:
        variables: The variables by name.

    Raises:
        OrtopsError: If a checkpoint is unknown.
        UnsupportedError: If a rule is missing, or onnxruntime cannot load a graph.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        values: Mapping[str, Array],
        *,
        kernels: Kernels,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._turn = 0
        self.variables: dict[str, Variable] = {}
        self._updated_by: dict[str, int] = {}
        on_cpu = list(providers) == ["CPUExecutionProvider"]
        if checkpoint is not None:
            check(checkpoint, steps)
        self._sessions = _Sessions(kernels, options, providers, frugal=checkpoint is not None)
        threads = self._sessions.threads
        self._parts = parts = [
            _Part(step, kernels, threads, on_cpu=on_cpu, checkpoint=checkpoint) for step in steps
        ]
        in_place = kernels == "onnx" and len(parts) == 1  # else a later run might fail
        for number, part in enumerate(parts):
            for packed in part.packed:
                self.variables |= packed.allocate(
                    in_place=in_place and not part.joined, joined=part.joined
                )
            self._updated_by |= dict.fromkeys(part.updates, number)
        for name, value in values.items():
            if name not in self.variables:
                first = np.array(value, order="C")
                second = first.copy() if name in self._updated_by else first
                self.variables[name] = Variable((first, second))
        self.assign(values)
        self._made: dict[Shapes, _Made] = {}
        self._special = 0
        self._gain = any(part.gains for part in parts)
        if not self._gain:
            self._made_for(())

    def present(self, name: str) -> Array:
        """Returns the present value of a variable: its memory, not a copy."""
        return self.variables[name].buffers[self._turn]

    def assign(self, values: Mapping[str, Array]) -> None:
        """Sets variables; their types and shapes have been checked."""
        for name, value in values.items():
            self.present(name)[...] = value

    def step(self, feeds: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        """Makes one step.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return; all by default.

        Raises:
            KernelError: If a run failed; then no variable has changed.
        """
        shown: dict[str, Array] = {}
        shapes = tuple((name, array.shape) for name, array in feeds.items()) if self._gain else ()
        *before, last = (turns[self._turn] for turns in self._made_for(shapes).runs)
        for part in before:
            shown |= part.differentiate(feeds, wanted)
            part.update(feeds)
        shown |= last.differentiate(feeds, wanted)
        with interrupts_deferred() if last.has_updates else contextlib.nullcontext():
            last.update(feeds)
            self._turn = 1 - self._turn
        return shown

    def _made_for(self, shapes: Shapes) -> _Made:
        """Returns what runs batches of these shapes: made for them, where that gains something.

        Only the first few shapes get graphs of their own, as many as a data set of equal samples
        has: that of a batch and that of the last one.
        """
        if shapes not in self._made:
            sizes = dict(shapes)
            if self._special < _SHAPES and any(part.gains_at(sizes) for part in self._parts):
                self._special += 1
                self._made[shapes] = self._make([part.at_shapes(sizes) for part in self._parts])
            else:
                self._made[shapes] = self._general
        return self._made[shapes]

    @functools.cached_property
    def _general(self) -> _Made:
        """What runs batches of any shapes."""
        return self._make([part.general for part in self._parts])

    def _make(self, parts: list[_Part]) -> _Made:
        for part in parts:
            part.open(self._sessions)
        runs = [
            [part.bind(self._buffers_of(number, turn), turn) for turn in (0, 1)]
            for number, part in enumerate(parts)
        ]
        return _Made(parts, runs)

    @property
    def repeatable(self) -> bool:
        """Whether `steps` can be called: a small model, one training_info entry."""
        return len(self._parts) == 1 and self._parts[0].repeatable

    def steps(self, feeds: Mapping[str, Array]) -> Array:
        """Makes several steps in one run.

        Args:
            feeds: For each input the batches, checked and stacked along axis 0.

        Returns:
            The losses.

        Raises:
            KernelError: If the run failed; then no variable has changed.
        """
        shapes = tuple((name, array.shape[1:]) for name, array in feeds.items())
        (part,) = self._made_for(shapes).parts
        given = {stacked(name): array for name, array in feeds.items()}
        buffers = self._buffers_of(0, self._turn)
        losses = part.run_several(self._sessions, buffers, self._turn, given)
        self._turn = 1 - self._turn
        return losses

    def _buffers_of(self, number: int, turn: int) -> Callable[[str], tuple[Array, Array]]:
        """Returns what tells where part ``number`` of a step reads a variable, and writes it."""

        def buffers(name: str) -> tuple[Array, Array]:
            both = self.variables[name].buffers
            done = self._updated_by.get(name, number) < number  # by an earlier part of this step
            return both[1 - turn if done else turn], both[1 - turn]

        return buffers


@dataclass(frozen=True)
class _Made:
    """What runs the steps of some shapes.

    Attributes:
        parts: The parts of a step, with sessions.
        runs: Each part, bound to memory for steps of even number, and for those of odd number.
    """

    parts: list[_Part]
    runs: list[list[_Run]]


class _Part:
    """The part of a step that one training_info entry makes.

    Args:
        step: The part; not to be used afterwards.
        kernels: ``"onnx"`` or ``"python"``, for optimizer nodes.
        threads: How many share the chunks of large updates.
        on_cpu: Whether onnxruntime's CPU provider runs it.
        checkpoint: What is kept for the backward pass.

    Attributes:
        updates: Variable → its next value, an output of the step.
        packed: The updates that are packed.
        joined: Whether they are made in the graph of gradients.
    """

    def __init__(
        self,
        step: Step,
        kernels: Kernels,
        threads: int,
        *,
        on_cpu: bool,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._step = step
        self._on_cpu = on_cpu
        self._checkpoint = checkpoint
        graph = step.model.graph
        self.updates = step.updates
        remove_defaults(graph, step.variables)
        keep = takes_python_kernel if kernels == "python" else None
        lower_optimizers(graph, Names(graph), lambda node: True)  # into one-tensor nodes
        groups, self._left = split(graph, step.updates, step.feeds, step.outputs, keep=keep)
        size = sum(group.size for group in groups)
        self.joined = kernels == "onnx" and size <= _JOINED
        chunk = sys.maxsize if self.joined else _CHUNK
        if on_cpu and not self.joined and kernels == "onnx" and block_size() is not None:
            for group in groups:
                scaled_sums.insert(group.formula, group.updated)
        self.packed = [Packed(group, chunk, threads) for group in groups]
        if not self.joined:  # what only updates read is no input of the graph of gradients
            fed = {
                name for group in groups for role in group.roles if role.fed for name in role.names
            }
            for value in list(graph.inputs):
                if value.name in fed and not value.uses() and not value.is_graph_output():
                    graph.inputs.remove(value)
        self._repeated: InferenceSession | None = None
        self._keep = keep
        self._pinned = pin(graph, names_in(checkpoint))
        gains = on_cpu and not self._pinned  # which has other tensors
        self._prepared = step.model if gains and _gains_from_sizes(step.model) else None
        if self._prepared is None:  # else once it is known for which sizes
            self._take(self._lowered(step.model))

    @property
    def gains(self) -> bool:
        """Whether the graph is faster if it is made for known shapes."""
        return self._prepared is not None

    @functools.cached_property
    def general(self) -> _Part:
        """The part for feeds of any shapes."""
        if self._prepared is None:
            return self
        part = copy.copy(self)
        part._take(self._lowered(self._prepared.clone()))
        return part

    def gains_at(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the graph is faster if it is made for feeds of these shapes."""
        if self._prepared is None:
            return False
        return _gains_from_sizes(self._prepared, self._sizes(self._prepared, shapes))

    def at_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> _Part:
        """Returns the part for feeds of these shapes only, without sessions."""
        if self._prepared is None:
            return self
        part = copy.copy(self)
        model = self._prepared.clone()
        bind_sizes(model, self._sizes(model, shapes))
        part._take(self._lowered(model, sized=True))
        return part

    @staticmethod
    def _sizes(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the sizes that the symbols in the shapes of a model's inputs have in feeds."""
        return {
            dim.value: size
            for value in model.graph.inputs
            if value.name and value.name in shapes and value.shape is not None
            for dim, size in zip(value.shape, shapes[value.name], strict=True)
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None
        }

    def _lowered(self, model: ir.Model, *, sized: bool = False) -> ir.Model:
        """Lowers a prepared model, in place, to what is fast on its provider.

        Args:
            model: The model.
            sized: Whether the sizes of its inputs are known.
        """
        if not self._on_cpu:
            return lower_prepared(model, keep=self._keep)
        blocks = block_convolutions(model) if sized else contextlib.nullcontext()
        with keep_gates(model), blocks, rectify(model):
            return lower_prepared(model, keep=self._keep)

    def _take(self, model: ir.Model) -> None:
        """Makes a lowered model the part's own."""
        self._model, self._graph = model, model.graph
        if self._on_cpu:
            names = Names(model.graph)
            expand_losses(model.graph, names)
            improve_products(model.graph, names)
            transpose_activations(model.graph, names)
        if self._checkpoint is not None:
            feeds, shown = self._step.feeds, self._step.outputs
            recompute(model.graph, self._checkpoint, feeds, shown, self._pinned)
        self._joined_inputs: dict[str, tuple[Packed, int]] = {}
        self._joined_outputs: dict[str, tuple[Packed, int]] = {}
        if self.joined:
            self._join()
        put_last_results_first(model.graph)
        for name, value in list(model.graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():  # onnxruntime would warn
                del model.graph.initializers[name]

    def _join(self) -> None:
        """Puts the packed updates into the graph of gradients."""
        graph = self._graph
        outputs = {value.name: value for value in graph.outputs}
        values = {**{value.name: value for value in graph.inputs}, **outputs}
        tape = Tape(graph)
        for packed in self.packed:
            group = packed.group
            inputs = packed.inputs(f"{tape.names.unique('packed')}_")
            for index, role in enumerate(group.roles):
                if role.updated:
                    graph.inputs.append(inputs[index])
                    self._joined_inputs[inputs[index].name or ""] = (packed, index)
                else:
                    inputs[index] = packed.pack(tape, [values[name] for name in role.names])
            scalars = [outputs[name] for name in group.scalars]
            results = group.emit(tape, [*inputs[: len(group.roles)], *scalars])
            taken = {*scalars, *(values[n] for r in group.roles if not r.updated for n in r.names)}
            kept = [value for value in graph.outputs if value not in taken]
            graph.outputs.clear()
            graph.outputs.extend([*kept, *results])
            for index, result in zip(group.next_values, results, strict=True):
                self._joined_outputs[result.name or ""] = (packed, index)

    def open(self, sessions: _Sessions) -> None:
        """Opens the sessions."""
        self._constants = external.move_to_inputs(self._model)
        apart = [] if self.joined else self.packed
        self._session: InferenceSession | None = None  # as if all gradients are fed
        if self._graph.outputs:
            # onnxruntime takes half as long as it is, where there is little left to optimize.
            optimize = not is_mostly_blocked(self._graph)
            model = to_proto(self._model)
            self._session = sessions.open(model, spin=not apart, optimize=optimize)
        self._updates = [_Update(packed, sessions) for packed in apart]

    def bind(self, buffers: Callable[[str], tuple[Array, Array]], turn: int) -> _Run:
        """Binds the sessions to memory.

        Args:
            buffers: Tells of a variable where it is read and where its next value is written.
            turn: Which of the arrays of packed roles are read.
        """
        read: dict[str, Array] = {}
        for name in (value.name or "" for value in self._graph.inputs):
            if name in self._joined_inputs:
                packed, index = self._joined_inputs[name]
                read[name] = packed.arrays[index][turn]
            elif name in self._constants:
                read[name] = self._constants[name]
            elif name not in self._step.feeds:
                read[name] = buffers(name)[0]
        written: dict[str, Array] = {}
        copies: list[tuple[Array, Array]] = []
        for name, output in self._left.items():
            target = buffers(name)[1]
            if written.setdefault(output, target) is not target:
                copies.append((written[output], target))
        for name, (packed, index) in self._joined_outputs.items():
            written[name] = packed.arrays[index][1 - turn]
        types = {value.name: value.dtype for value in self._graph.outputs}
        updates = []
        for update in self._updates:
            group = update.packed.group
            for name in group.scalars:
                dtype = types[name]
                assert dtype is not None
                written.setdefault(name, np.zeros((), dtype.numpy()))
            for index, role in enumerate(group.roles):
                if not role.updated and not role.fed:
                    written |= zip(role.names, update.packed.views(index, turn), strict=True)
            updates.append(update.bind([written[name] for name in group.scalars], turn))
        loss = next((v for v in self._graph.outputs if v.name == self._step.loss), None)
        if (
            loss is not None
            and loss.dtype is not None
            and loss.shape is not None
            and not loss.shape
        ):
            written.setdefault(self._step.loss, np.zeros((), loss.dtype.numpy()))
        return _Run(self._session, read, written, self._step.outputs, copies, updates)

    @property
    def repeatable(self) -> bool:
        """Whether several steps can be made in one run."""
        outputs = [*self._left.values(), self._step.loss]
        read = {value.name for value in self._step.model.graph.inputs}
        alone = len(set(outputs)) == len(outputs)
        return self.joined and bool(self._step.loss) and alone and set(self._left) <= read

    def run_several(
        self,
        sessions: _Sessions,
        buffers: Callable[[str], tuple[Array, Array]],
        turn: int,
        feeds: Mapping[str, Array],
    ) -> Array:
        """Makes several steps in one run.

        Args:
            sessions: Opens the session.
            buffers: See `bind`.
            turn: See `bind`.
            feeds: The batches, stacked.

        Returns:
            The losses.
        """
        packed = self._joined_inputs
        if self._repeated is None:
            states = {**self._left, **dict(zip(packed, self._joined_outputs, strict=True))}
            model = repeat(self._graph, states, packed, self._step.feeds, self._step.loss)
            self._repeated = sessions.open(to_proto(model))
        binding = self._repeated.io_binding()
        for name in (value.name for value in self._repeated.get_inputs()):
            if name in packed:
                group, index = packed[name]
                array = group.arrays[index][turn]
            else:
                array = feeds[name] if name in feeds else buffers(name)[0]
            binding.bind_ortvalue_input(name, ort_value(array))
        binding.bind_output(LOSSES)
        for name in self._left:
            binding.bind_ortvalue_output(state_output(name), ort_value(buffers(name)[1]))
        for name, (group, index) in packed.items():
            array = group.arrays[index][1 - turn]
            binding.bind_ortvalue_output(state_output(name), ort_value(array))
        with errors_as_ours():
            self._repeated.run_with_iobinding(binding)
        losses: Array = binding.get_outputs_as_ortvaluevector()[0].numpy().copy()
        return losses


class _Run:
    """One part of a step, bound to memory.

    Args:
        session: The graph of gradients; None if it gives nothing.
        read: The arrays of its inputs, but feeds.
        written: Outputs, and the arrays that they are written to.
        shown: The outputs that a caller may want.
        copies: Arrays that are written, and others that get the same values.
        updates: The packed updates.
    """

    def __init__(
        self,
        session: InferenceSession | None,
        read: Mapping[str, Array],
        written: Mapping[str, Array],
        shown: Sequence[str],
        copies: Sequence[tuple[Array, Array]],
        updates: Sequence[Callable[[Mapping[str, Array]], None]],
    ) -> None:
        self._session = session
        self._read = read
        self._written = written
        self._shown = shown
        self._copies = copies
        self._updates = updates
        inputs = [] if session is None else session.get_inputs()
        self._feeds = {value.name for value in inputs} - read.keys()
        self._bindings: dict[tuple[str, ...], onnxruntime.IOBinding] = {}

    @property
    def has_updates(self) -> bool:
        """Whether there are packed updates."""
        return bool(self._updates)

    def differentiate(
        self, feeds: Mapping[str, Array], wanted: Sequence[str] | None
    ) -> dict[str, Array]:
        """Runs the graph of gradients, and returns the outputs that are wanted."""
        if self._session is None:
            return {}
        names = tuple(n for n in self._shown if wanted is None or n in wanted)
        fetched = tuple(name for name in names if name not in self._written)
        binding = self._bindings.get(fetched)
        if binding is None:
            binding = self._bindings[fetched] = self._bind(self._session)
        for name in self._feeds:
            binding.bind_cpu_input(name, feeds[name])
        for name in fetched:  # anew: onnxruntime would write into the last step's
            binding.bind_output(name)
        with errors_as_ours():
            self._session.run_with_iobinding(binding)
        for source, target in self._copies:
            target[...] = source
        shown = {name: self._written[name].copy() for name in names if name in self._written}
        if fetched:
            found = binding.get_outputs_as_ortvaluevector()
            first = len(self._written)
            shown |= {n: _copied(found[first + i].numpy()) for i, n in enumerate(fetched)}
        return shown

    def _bind(self, session: InferenceSession) -> onnxruntime.IOBinding:
        binding = session.io_binding()
        for name, array in self._read.items():
            binding.bind_ortvalue_input(name, ort_value(array))
        for name, array in self._written.items():
            binding.bind_ortvalue_output(name, ort_value(array))
        return binding

    def update(self, feeds: Mapping[str, Array]) -> None:
        """Runs the packed updates."""
        for update in self._updates:
            update(feeds)


class _Update:
    """A packed update: its session, and the threads that share its chunks.

    What is fed is read where it lies if it fills a chunk; pieces of several tensors are copied for
    each chunk, into memory that stays in a core's cache.
    """

    def __init__(self, packed: Packed, sessions: _Sessions) -> None:
        self.packed = packed
        self._threads = min(packed.rows, sessions.threads)
        self._pool = ThreadPoolExecutor(self._threads - 1) if self._threads > 1 else None
        self._by_chunk = any(role.fed for role in packed.group.roles)
        model = packed.model(1 if self._by_chunk else packed.rows)
        self._session = sessions.open(to_proto(model), single_thread=packed.rows > 1)

    def bind(self, scalars: Sequence[Array], turn: int) -> Callable[[Mapping[str, Array]], None]:
        """Binds the update to memory; returns what runs it, given the feeds of a step."""
        rows = self.packed.rows
        ends = [rows * number // self._threads for number in range(self._threads + 1)]
        works = [self._bind_rows(*span, scalars, turn) for span in itertools.pairwise(ends)]

        def update(feeds: Mapping[str, Array]) -> None:
            others = [self._pool.submit(work, feeds) for work in works[1:]] if self._pool else []
            with errors_as_ours():
                try:
                    works[0](feeds)
                finally:
                    for other in others:
                        other.result()

        return update

    def _bind_rows(
        self, begin: int, end: int, scalars: Sequence[Array], turn: int
    ) -> Callable[[Mapping[str, Array]], None]:
        """Binds some of the chunks to memory; returns what a thread runs."""
        run = self._session.run_with_iobinding
        if not self._by_chunk:
            whole = slice(begin, end) if self.packed.rows > 1 else slice(None)
            binding = self._bind(whole, {}, scalars, turn)
            return lambda feeds: run(binding)
        group = self.packed.group
        filled = {
            index: np.zeros(self.packed.chunk, role.dtype.numpy())
            for index, role in enumerate(group.roles)
            if role.fed
        }
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

        return work

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


class _Sessions:
    """Opens sessions with the user's options and providers."""

    def __init__(
        self,
        kernels: Kernels,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
        *,
        frugal: bool,
    ) -> None:
        self._kernels = kernels
        self._options = options
        self._providers = providers
        self._frugal = frugal
        asked = 0 if options is None else options.intra_op_num_threads
        self.threads = 1 if kernels == "python" else asked or _cores()

    def open(
        self,
        model: onnx.ModelProto,
        *,
        spin: bool = True,
        optimize: bool = True,
        single_thread: bool = False,
    ) -> InferenceSession:
        """Opens a session.

        Args:
            model: The model.
            spin: Whether threads may wait actively between runs.
            optimize: Whether onnxruntime may rewrite the model, which takes time.
            single_thread: Whether a run has one thread: those of the caller share the work.
        """
        options = self._options
        if single_thread:
            options = _single_threaded(options)
        elif options is None:
            options = onnxruntime.SessionOptions()
            if self._frugal:  # memory that is to be used again by a node much later is not free
                options.enable_mem_reuse = False
            options.enable_mem_pattern = False  # a plan beside the first run's memory, no faster
            # In the order of the graph: a gradient is computed as soon as its cotangent is there.
            options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
            if not optimize:
                options.graph_optimization_level = (
                    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
            if not spin:  # threads that wait for work would take the cores of the update
                options.add_session_config_entry("session.force_spinning_stop", "1")
        return open_session(model, options, self._providers, self._kernels)


def open_session(
    model: onnx.ModelProto,
    options: onnxruntime.SessionOptions | None,
    providers: Sequence[Any],
    kernels: Kernels = "onnx",
) -> InferenceSession:
    """Returns a session; what onnxruntime cannot load is an error of ours.

    Raises:
        UnsupportedError: If onnxruntime cannot load the model.
    """
    try:
        return InferenceSession(model, options, providers, kernels=kernels)
    except OrtopsError:
        raise
    except Exception as error:  # onnxruntime's classes have no common base of their own
        raise UnsupportedError(
            f"onnxruntime: {str(error).strip()}; change the type of that node's tensors, or "
            "choose other providers"
        ) from error


def ort_value(array: Array) -> onnxruntime.OrtValue:
    """Returns an array as onnxruntime takes it: its memory, not a copy."""
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


@contextlib.contextmanager
def errors_as_ours() -> Iterator[None]:
    """Makes what onnxruntime raises in a run an error of ours.

    Raises:
        KernelError: If a run failed.
    """
    try:
        yield
    except OrtopsError:
        raise
    except Exception as error:  # onnxruntime's classes have no common base of their own
        raise KernelError(
            f"onnxruntime: {str(error).strip()}; check values and shapes of the feeds"
        ) from error


def _gains_from_sizes(model: ir.Model, sizes: Mapping[str, int] | None = None) -> bool:
    """Whether a prepared model is faster if it is lowered for known sizes."""
    return blocked.gains_from_sizes(model) or transposed.gains_from_sizes(model, sizes)


def _single_threaded(options: onnxruntime.SessionOptions | None) -> onnxruntime.SessionOptions:
    """Returns options like the given ones for a session with one thread."""
    result = onnxruntime.SessionOptions()
    if options is not None:
        for name in _COPIED_OPTIONS:
            setattr(result, name, getattr(options, name))
    result.intra_op_num_threads = 1
    return result


def _copied(array: Array) -> Array:
    """Returns a copy: a view would keep all of onnxruntime's memory; a big array stays as it is."""
    return array.copy() if array.nbytes <= _COPIED else array


def _cores() -> int:
    known = hasattr(os, "sched_getaffinity")  # not everywhere
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
