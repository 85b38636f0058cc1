"""The template of a step: its updates taken out, its graph ready to be made for a batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ortops.autodiff.registry import Rules
from ortops.errors import UnsupportedError
from ortops.execution.compilation import Function, compile_all
from ortops.execution.cut import Cut, cut, settled
from ortops.execution.onnxruntime_sessions import Sessions, UpdateKernels
from ortops.execution.packed import Packed
from ortops.execution.settings import Settings
from ortops.execution.sizes import bind_sizes, sizes_in
from ortops.execution.split import Group, split
from ortops.execution.step import Step
from ortops.execution.translation import Translation, translate
from ortops.execution.update import CompiledUpdate, SharedUpdate, Update
from ortops.graph.edit import prune, remove_defaults
from ortops.graph.folding import fold
from ortops.graph.tensor import Names
from ortops.lowering import lower_optimizers, lower_prepared, takes_python_kernel
from ortops.passes import scaled_sums
from ortops.passes.rematerialization import Checkpoint, Rematerialization, names_in

__all__ = ["Template"]


class Template:
    """The part of a step that one training_info entry makes, before it is made for a batch.

    Args:
        step: The part; its model is not to be used afterwards.
        rules: How cotangents pass through nodes.
        kernels: What runs updates.
        settings: How it is executed.
        threads: How many share the chunks of large updates.
        on_cpu: Whether onnxruntime's CPU provider runs it.
        on_device: Whether variables lie on a device, each by itself: none are packed.
        in_place: Whether updates may be made in place, where their formula is safe.
        recompute: Which activations to keep if the backward pass recomputes the others.

    Attributes:
        step: The part.
        joined: Whether all packed updates are made in the graph of gradients.
        packed: The updates that are packed, with their memory.
        left: The other updates: variable → its next value, an output.
        standard: Why updates are not compiled though this was asked for, by variable.
        spins: Whether threads may wait actively for the next run: no update needs the cores.
        gains: Whether the graph is faster if it is made for known sizes.
    """

    def __init__(
        self,
        step: Step,
        rules: Rules,
        kernels: UpdateKernels,
        settings: Settings,
        *,
        threads: int,
        on_cpu: bool,
        on_device: bool,
        in_place: bool,
        recompute: Checkpoint | None,
    ) -> None:
        self.step = step
        self._rules = rules
        self._keep = takes_python_kernel if kernels == "python" else None
        self._passes = list(settings.passes) if on_cpu else []
        if recompute is not None:
            self._passes.insert(0, Rematerialization(recompute))
        graph = step.model.graph
        remove_defaults(graph, step.variables)
        lower_optimizers(graph, Names(graph), lambda node: True)  # into one-tensor nodes
        fold(graph)
        self._settled = settled(graph, step.updates)
        self._updates: list[SharedUpdate] = []
        self._dropped = [name for name in step.counts if name not in step.varying]
        shown = [*step.outputs, *step.counts]
        groups: list[Group] = []
        self.left: dict[str, str] = dict(step.updates)
        if not on_device:
            groups, self.left = split(graph, step.updates, step.feeds, shown, keep=self._keep)
        small = kernels != "python" and sum(group.size for group in groups) <= settings.joined
        apart = on_cpu and not small and kernels != "python"
        if apart and settings.scaled_sums and scaled_sums.has_kernel():
            for group in groups:
                scaled_sums.insert(group.formula, group.updated)
        self.spins = small or not groups
        chunk = sys.maxsize if small else settings.chunk
        in_place = in_place and not small
        self.packed: list[Packed] = []
        self.standard: dict[str, str] = {}
        if kernels == "compiled":
            self.standard = dict.fromkeys(self.left, "it does not work element by element")
        for group in groups:
            translation = self._translation(group, in_place) if kernels == "compiled" else None
            joined = small and translation is None
            self.packed.append(
                Packed(
                    group,
                    chunk,
                    threads,
                    in_place=in_place,
                    joined=joined,
                    translation=translation,
                    passed=not small and group.size >= settings.passed,
                )
            )
        self.joined = small and all(packed.joined for packed in self.packed)
        translations = [p.translation for p in self.packed if p.translation is not None]
        self._functions: dict[Translation, Function] = {}
        if kernels == "compiled":
            self._functions = compile_all(translations)
        # What only updates apart read is no input of the graph of gradients.
        apart_roles = [role for p in self.packed if not p.joined for role in p.group.roles]
        fed = {name for role in apart_roles if role.fed for name in role.names}
        if fed:
            joined_roles = [role for p in self.packed if p.joined for role in p.group.roles]
            fed -= {name for role in joined_roles for name in role.names}
            for value in list(graph.inputs):
                if value.name in fed and not value.uses() and not value.is_graph_output():
                    graph.inputs.remove(value)
        # What nothing reads is no input, and several steps in a run pass it from one to the next.
        self._all_read = set(self.left) <= {value.name for value in graph.inputs}
        kept = names_in(recompute)  # which graphs made for sizes need not have
        self.gains = not kept and any(each.gains(step.model, None) for each in self._passes)

    @property
    def repeatable(self) -> bool:
        """Whether several steps can be made in one run."""
        loss = self.step.loss
        outputs = [*self.left.values(), loss]
        alone = len(set(outputs)) == len(outputs)
        return self.joined and bool(loss) and alone and self._all_read

    def gains_at(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether the graph is faster if it is made for feeds of these shapes."""
        sizes = sizes_in(self.step.model, shapes)
        return self.gains and any(each.gains(self.step.model, sizes) for each in self._passes)

    def lowered(self, shapes: Mapping[str, tuple[int, ...]] | None) -> ir.Model:
        """Returns the graph of gradients, lowered to what is fast.

        Args:
            shapes: The shapes of feeds that it is made for; None for any.
        """
        model = self.step.model.clone()
        if self._dropped:
            kept = [v for v in model.graph.outputs if v.name not in self._dropped]
            inputs = list(model.graph.inputs)
            model.graph.outputs.clear()
            model.graph.outputs.extend(kept)
            prune(model.graph)
            model.graph.inputs.clear()
            model.graph.inputs.extend(inputs)
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
            shown=[*self.step.outputs, *self.step.varying],
        )

    def updates(self, sessions: Sessions) -> list[SharedUpdate]:
        """Returns the packed updates that are made apart from the gradients, opened once."""
        if not self._updates:
            self._updates += [
                Update(packed, sessions)
                if packed.translation is None
                else CompiledUpdate(packed, self._functions[packed.translation], sessions.threads)
                for packed in self.packed
                if not packed.joined
            ]
        return self._updates

    def _translation(self, group: Group, in_place: bool) -> Translation | None:
        """Returns the formula of a group as text; where there is none, notes the reason."""
        try:
            return translate(group, in_place=in_place)
        except UnsupportedError as error:
            names = [name for role in group.roles if role.updated for name in role.names]
            self.standard |= dict.fromkeys(names, str(error))
            return None

    def cut(self) -> tuple[Template, Template, Cut]:
        """Returns what computes gradients, and what applies them to the same memory.

        Raises:
            UnsupportedError: If the step has no gradients, or several of one parameter.
        """
        step = self.step
        roles = [role for packed in self.packed for role in packed.group.roles]
        read = [n for role in roles if not role.updated and not role.fed for n in role.names]
        scalars = [name for packed in self.packed for name in packed.group.scalars]
        shown: Sequence[str] = list(dict.fromkeys((*step.outputs, *step.counts)))
        halves = cut(
            step.model,
            variables=step.variables,
            updates=step.updates,
            feeds=step.feeds,
            shown=shown,
            ends=[*self.left.values(), *read, *scalars],
            fed=[name for role in roles if role.fed for name in role.names],
            scale=step.scale,
            labels=self._settled,
        )
        gradients, apply = copy.copy(self), copy.copy(self)
        fetched = [name for label, name in halves.carried.items() if label not in step.updates]
        gradients.step = replace(
            step, model=halves.gradients, outputs=[*shown, *fetched], updates={}, varying=()
        )
        gradients.packed, gradients.left, gradients._updates = [], {}, []
        taken = [*halves.given.values(), *halves.carried.values(), *halves.fed]
        apply.step = replace(step, model=halves.apply, feeds=taken, outputs=[], loss="", varying=())
        gradients._dropped = apply._dropped = []
        apply.gains = False
        return gradients, apply, halves
