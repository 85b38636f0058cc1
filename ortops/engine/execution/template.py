"""A step with its updates packed, whose gradient graph can be lowered for batches of any shape."""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from ortops.engine.execution.compilation import compiled
from ortops.engine.execution.memory import Device
from ortops.engine.execution.onnxruntime_sessions import Sessions
from ortops.engine.execution.packed import Packed
from ortops.engine.execution.settings import PackedUpdate
from ortops.engine.execution.sizes import bind_sizes, sizes_in
from ortops.engine.execution.split_step import Cut, cut, next_values
from ortops.engine.execution.step import Step
from ortops.engine.execution.translation import Translation, translate
from ortops.engine.execution.update import CompiledUpdate, SessionUpdate, Update
from ortops.engine.execution.update_groups import Group, split
from ortops.engine.execution.updates_in_graph import check_updates, concatenate_updates
from ortops.engine.lowering import lower_optimizers, lower_prepared, takes_python_kernel
from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Rules
from ortops.graph.edit import remove_defaults, remove_unread_inputs, set_outputs
from ortops.graph.folding import fold
from ortops.graph.names import Names
from ortops.graph.passes import scaled_sums
from ortops.graph.passes.rematerialization import Checkpoint, Rematerialization, names_in

_NOT_ELEMENTWISE = "it is not elementwise"
_IN_BACKWARD = "it is part of the backward pass"


class Template:
    """The part of a step that belongs to one training_info entry, for batches of any shape.

    Args:
        step: The part; its model must not be used afterwards.
        rules: The gradient rules.
        sessions: Opens the sessions.
        in_place: Whether updates may be in place if their formula allows it.
        recompute: Which activations to keep if the backward pass recomputes the others.
        in_backward: Whether a variable is updated, in place, once its gradient is there.

    Attributes:
        step: The part.
        sessions: Opens the sessions.
        joined: Whether all packed updates are part of the gradient graph.
        packed: The packed updates, with their memory.
        unpacked: The output that is the next value, by variable, for updates that are not packed.
        standard: Why updates are not compiled although this was tried, by variable.
        translations: The packed updates that are compiled, as intermediate code.
        spins: Whether threads may wait actively for the next run, because no update needs the
            cores.
        gains: Whether graphs for known sizes are faster.
        in_backward: Whether variables are updated in the backward pass; false in small models.
        extra: Further tensors of the graph that are outputs; those that it does not have are
            ignored.
        bindings: What binds the updates to memory.
        overwrites: Whether next values overwrite the current ones in the memory of a device, in a
            run after that of the gradients.
    """

    extra: tuple[str, ...] = ()
    overwrites: bool = False

    def __init__(
        self,
        step: Step,
        rules: Rules,
        sessions: Sessions,
        *,
        in_place: bool,
        recompute: Checkpoint | None,
        in_backward: bool = False,
    ) -> None:
        kernels, settings = sessions.kernels, sessions.settings
        self._may_overwrite = in_place
        self.step = step
        self.sessions = sessions
        self._rules = rules
        self._keep = takes_python_kernel if kernels == "python" else None
        self._passes = list(sessions.passes)
        if recompute is not None:
            self._passes.insert(0, Rematerialization(recompute))
        graph = step.model.graph
        remove_defaults(graph, step.variables)
        lower_optimizers(graph, Names(graph), lambda node: True)  # into one-tensor nodes
        fold(graph)
        self._next_values = next_values(graph, step.updates)
        if in_backward:
            check_updates(step)
        self.in_backward = in_backward and _size_of(graph, step.parameters) > settings.joined
        self.bindings = weakref.WeakSet[Any]()
        self._updates: list[Update] = []
        self._dropped = [name for name in step.counts if name not in step.varying]
        groups: list[Group] = []
        self.unpacked: dict[str, str] = dict(step.updates)
        shown = [*step.outputs, *step.counts]
        if sessions.device is None:
            groups, self.unpacked = split(
                graph,
                step.updates,
                step.feeds,
                shown,
                keep=self._keep,
                alone=settings.early if self.in_backward else math.inf,
            )
        else:  # device memory cannot be packed
            self._update_on(sessions.device, shown)
        in_nodes = kernels != "python" and not self.in_backward
        small = in_nodes and sum(group.size for group in groups) <= settings.joined
        self.spins = small or not groups
        if not small and kernels != "python":
            self._insert_scaled_sums(groups)
        self.standard: dict[str, str] = {}
        self.translations: dict[Packed, Translation] = {}
        self.packed = [self._pack(group, small=small) for group in groups]
        self.joined = small
        if kernels == "compiled":
            self.compile_updates(0, anew=True)
        self._remove_unread_feeds()
        # Repeated steps pass states from one to the next, so each of them must be an input.
        self._all_read = set(self.unpacked) <= {value.name for value in graph.inputs}
        # Graphs for known sizes may lack the tensors that were named to be kept.
        has_names = bool(names_in(recompute))
        self.gains = not has_names and any(each.gains(step.model, None) for each in self._passes)

    def _update_on(self, device: Device, shown: Collection[str]) -> None:
        """Prepares updates of variables in the memory of a device."""
        step, graph = self.step, self.step.model.graph
        if device.kind != "webgpu":  # whose Split has few outputs
            concatenate_updates(graph, step.updates, step.feeds, shown)
        large = _size_of(graph, step.updates) > self.sessions.settings.joined
        self.overwrites = self._may_overwrite and large

    def _insert_scaled_sums(self, groups: Sequence[Group]) -> None:
        settings = self.sessions.settings
        if self.sessions.on_cpu and settings.scaled_sums and scaled_sums.has_kernel():
            for group in groups:
                scaled_sums.insert(group.formula, group.updated)

    def _pack(self, group: Group, *, small: bool) -> Packed:
        """Returns a group with its memory."""
        settings = self.sessions.settings
        early = self.in_backward and group.size >= settings.early and len(group.shapes) == 1
        return Packed(
            group,
            sys.maxsize if small else settings.chunk,
            self.sessions.threads,
            # A small update in the gradient graph must not overwrite anything before all has run.
            in_place=self._may_overwrite and not small,
            joined=small or early,
            passed=not small and not early and group.size >= settings.passed,
        )

    def compilable(self, *, anew: bool = False) -> dict[Packed, Translation]:
        """Returns the translations of all updates that have one.

        Args:
            anew: Whether updates can move in memory, because nothing is bound to it yet. Otherwise,
                only those can that are part of the gradient graph, which is then made anew.
        """
        self.standard = dict.fromkeys(self.unpacked, _NOT_ELEMENTWISE)
        found: dict[Packed, Translation] = {}
        for packed in self.packed:
            # Compiled code may overwrite anything, as no error can stop it halfway.
            anywhere = packed.group.next_values if self._may_overwrite else ()
            overwritten = anywhere if packed.joined or anew else packed.overwritten
            try:
                if packed.joined and self.in_backward:
                    raise UnsupportedError(_IN_BACKWARD)
                found[packed] = translate(packed.group, overwritten=overwritten)
            except UnsupportedError as error:
                roles = [role for role in packed.group.roles if role.updated]
                names = [name for role in roles for name in role.names]
                self.standard |= dict.fromkeys(names, str(error))
        return found

    def compile_updates(
        self,
        turn: int,
        *,
        anew: bool = False,
        only: Mapping[Packed, Translation] | None = None,
    ) -> bool:
        """Compiles updates.

        Args:
            turn: The index of the buffers with the current values.
            anew: See `compilable`.
            only: Some of those that are `compilable`; all by default.

        Returns:
            Whether the graphs must be made anew, because updates are no longer part of them. The
            memory of their variables may have changed as well.

        Raises:
            OrtopsError: See `ortops.engine.execution.compilation.compiled`. Nothing has changed.
        """
        found = self.compilable(anew=anew) if only is None else only
        for translation in found.values():
            compiled(translation)
        kept = turn if self._may_overwrite else None
        apart = {packed: packed.apart(kept) for packed in found if packed.joined or anew}
        self.packed = [apart.get(packed, packed) for packed in self.packed]
        self.translations |= {apart.get(packed, packed): each for packed, each in found.items()}
        self.joined = self.joined and not apart
        if apart:
            self._updates = []
        else:  # in place, because halves of the step share the list
            self._updates[:] = [
                self._update(each.packed) if each.packed in found else each
                for each in self._updates
            ]
            for binding in list(self.bindings):
                binding.bind_updates()
        return bool(apart)

    def _remove_unread_feeds(self) -> None:
        """Removes the inputs of the gradient graph that only separate updates read."""
        read_by = {True: set[str](), False: set[str]()}
        for packed in self.packed:
            for role in packed.group.roles:
                if packed.joined or role.fed:
                    read_by[packed.joined].update(role.names)
        graph, feeds = self.step.model.graph, read_by[False] - read_by[True]
        remove_unread_inputs(graph, feeds)

    @property
    def repeatable(self) -> bool:
        """Whether one run can make several steps."""
        loss = self.step.loss
        outputs = [*self.unpacked.values(), loss]
        alone = len(set(outputs)) == len(outputs)
        # The WebGPU provider has no kernel for Scan, so that all states would move in each step.
        device = self.sessions.device
        moves = device is not None and device.kind == "webgpu"
        stays = not moves and not self.overwrites
        return self.joined and bool(loss) and alone and self._all_read and stays

    def gains_at(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a graph for feeds of these shapes is faster."""
        sizes = sizes_in(self.step.model, shapes)
        return self.gains and any(each.gains(self.step.model, sizes) for each in self._passes)

    def lowered(self, shapes: Mapping[str, tuple[int, ...]] | None) -> ir.Model:
        """Returns the gradient graph, lowered to fast operators.

        Args:
            shapes: The shapes of the feeds; None for any.
        """
        model = self.step.model.clone()
        if self._dropped:
            kept = [v for v in model.graph.outputs if v.name not in self._dropped]
            set_outputs(model.graph, kept)
        if self.extra:
            present = {value.name for value in model.graph.outputs}
            there = {v.name: v for node in model.graph for v in node.outputs}
            model.graph.outputs.extend(
                self._readable(there[name])
                for name in self.extra
                if name in there and name not in present
            )
        sizes = sizes_in(model, shapes) if self.gains and shapes is not None else None
        if sizes is not None:
            bind_sizes(model, sizes)
        return lower_prepared(
            model,
            keep=self._keep,
            rules=self._rules,
            passes=self._passes,
            sizes=sizes,
            feeds=self.step.feeds,
            shown=self.shown,
        )

    def _readable(self, value: ir.Value) -> ir.Value:
        """Returns a tensor as an output; WebGPU computes scalars of float64 in float32."""
        device, node = self.sessions.device, value.producer()
        is_scalar = value.dtype == ir.DataType.DOUBLE and value.shape == ()
        if device is None or device.kind != "webgpu" or not is_scalar or node is None:
            return value
        cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.FLOAT)])
        (result,) = cast.outputs
        result.name, value.name = value.name, f"{value.name}_of_64_bits"
        result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        node.append(cast)
        return result

    @property
    def shown(self) -> list[str]:
        """The outputs that a caller can request."""
        names = [*self.step.outputs, *self.step.varying]
        return [*names, *(name for name in self.extra if name not in names)]

    def computes(self, name: str) -> bool:
        """Whether a tensor is computed in a step, as an array."""
        values = (value for node in self.step.model.graph for value in node.outputs)
        found = next((value for value in values if value.name == name), None)
        return found is not None and not isinstance(found.type, ir.SequenceType | ir.OptionalType)

    def updates(self) -> list[Update]:
        """Returns the packed updates that are separate from the gradients, opened once."""
        if not self._updates:
            self._updates += [self._update(each) for each in self.packed if not each.joined]
        return self._updates

    def _update(self, packed: Packed) -> Update:
        translation = self.translations.get(packed)
        if translation is None:
            return SessionUpdate(packed, self.sessions)
        return CompiledUpdate(packed, translation, self.sessions.threads)

    def report(self) -> list[PackedUpdate]:
        """Returns what the packed updates are."""
        return [
            PackedUpdate(
                variables=tuple(role.names for role in each.group.roles if role.updated),
                shapes=each.group.shapes,
                chunks=each.rows,
                in_graph=each.joined,
                compiled=each in self.translations,
                fed=tuple(name for role in each.group.roles if role.fed for name in role.names),
                operators=dict(
                    Counter(n.op_type for n in each.group.formula if n.op_type != "Constant")
                ),
            )
            for each in self.packed
        ]

    def cut(self) -> tuple[Template, Template, Cut]:
        """Returns the gradient part and the update part of the step, on the same memory.

        Raises:
            UnsupportedError: If the step has no gradients, or several of one parameter.
        """
        if self.in_backward:
            raise UnsupportedError(
                "gradients: with optimizer_in_backward=True the gradients of all parameters never "
                "exist together, so `gradients`, `apply`, step(reduce=), fit(accumulate=) and "
                "distributed training are not available; leave out optimizer_in_backward"
            )
        step = self.step
        roles = [role for packed in self.packed for role in packed.group.roles]
        read = [n for role in roles if not role.updated and not role.fed for n in role.names]
        scalars = [name for packed in self.packed for name in packed.group.scalars]
        shown = list(dict.fromkeys((*step.outputs, *step.counts)))
        parts = cut(
            step,
            shown=shown,
            ends=[*self.unpacked.values(), *read, *scalars],
            fed=[name for role in roles if role.fed for name in role.names],
            labels=self._next_values,
        )
        gradients, apply = copy.copy(self), copy.copy(self)
        fetched = [name for label, name in parts.carried.items() if label not in step.updates]
        gradients.step = replace(
            step, model=parts.gradients, outputs=[*shown, *fetched], updates={}, varying=()
        )
        gradients.packed, gradients.unpacked, gradients._updates = [], {}, []
        gradients.overwrites = False
        feeds = [*parts.given.values(), *parts.carried.values(), *parts.fed]
        apply.step = replace(step, model=parts.apply, feeds=feeds, outputs=[], loss="", varying=())
        gradients._dropped = apply._dropped = []
        apply.gains = False
        return gradients, apply, parts


def _size_of(graph: ir.Graph, variables: Collection[str]) -> int:
    """Returns the number of elements of variables; 0 for those of unknown shapes."""
    shapes = [value.shape for value in graph.inputs if value.name in variables]
    return sum(math.prod(shape.numpy()) for shape in shapes if shape and shape.is_static())
