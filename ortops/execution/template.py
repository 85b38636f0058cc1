"""The template of a step: its updates taken out, its graph ready to be made for a batch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from ortops.autodiff.registry import Rules
from ortops.execution.cut import Cut, cut, settled
from ortops.execution.onnxruntime_sessions import Sessions
from ortops.execution.packed import Packed
from ortops.execution.settings import Settings
from ortops.execution.sizes import bind_sizes, sizes_in
from ortops.execution.split import Group, split
from ortops.execution.step import Step
from ortops.execution.update import Update
from ortops.graph.edit import prune, remove_defaults
from ortops.graph.tensor import Names
from ortops.inference import Kernels
from ortops.lowering import lower_optimizers, lower_prepared, takes_python_kernel
from ortops.passes import scaled_sums
from ortops.passes.rematerialization import Checkpoint, Rematerialization, names_in

__all__ = ["Template"]


class Template:
    """The part of a step that one training_info entry makes, before it is made for a batch.

    Args:
        step: The part; its model is not to be used afterwards.
        rules: How cotangents pass through nodes.
        kernels: ``"onnx"`` or ``"python"``, for optimizer nodes.
        settings: How it is executed.
        threads: How many share the chunks of large updates.
        on_cpu: Whether onnxruntime's CPU provider runs it.
        on_device: Whether variables lie on a device, each by itself: none are packed.
        in_place: Whether updates may be made in place, where their formula is safe.
        checkpoint: What is kept for the backward pass.

    Attributes:
        step: The part.
        joined: Whether packed updates are made in the graph of gradients.
        packed: The updates that are packed, with their memory.
        left: The other updates: variable → its next value, an output.
        spins: Whether threads may wait actively for the next run: no update needs the cores.
        gains: Whether the graph is faster if it is made for known sizes.
    """

    def __init__(
        self,
        step: Step,
        rules: Rules,
        kernels: Kernels,
        settings: Settings,
        *,
        threads: int,
        on_cpu: bool,
        on_device: bool,
        in_place: bool,
        checkpoint: Checkpoint | None,
    ) -> None:
        self.step = step
        self._rules = rules
        self._keep = takes_python_kernel if kernels == "python" else None
        self._passes = list(settings.passes) if on_cpu else []
        if checkpoint is not None:
            self._passes.insert(0, Rematerialization(checkpoint))
        graph = step.model.graph
        remove_defaults(graph, step.variables)
        lower_optimizers(graph, Names(graph), lambda node: True)  # into one-tensor nodes
        self._settled = settled(graph, step.updates)
        self._updates: list[Update] = []
        self._counts = step.counts
        shown = [*step.outputs, *step.counts]
        groups: list[Group] = []
        self.left: dict[str, str] = dict(step.updates)
        if not on_device:
            groups, self.left = split(graph, step.updates, step.feeds, shown, keep=self._keep)
        size = sum(group.size for group in groups)
        self.joined = kernels == "onnx" and size <= settings.joined
        apart = on_cpu and not self.joined and kernels == "onnx"
        if apart and settings.scaled_sums and scaled_sums.has_kernel():
            for group in groups:
                scaled_sums.insert(group.formula, group.updated)
        self.spins = self.joined or not groups
        chunk = sys.maxsize if self.joined else settings.chunk
        in_place = in_place and not self.joined
        self.packed = [
            Packed(group, chunk, threads, in_place=in_place, joined=self.joined) for group in groups
        ]
        if not self.joined:  # what only updates read is no input of the graph of gradients
            fed = {
                name for group in groups for role in group.roles if role.fed for name in role.names
            }
            for value in list(graph.inputs):
                if value.name in fed and not value.uses() and not value.is_graph_output():
                    graph.inputs.remove(value)
        # What nothing reads is no input, and several steps in a run pass it from one to the next.
        self._all_read = set(self.left) <= {value.name for value in graph.inputs}
        kept = names_in(checkpoint)  # which graphs made for sizes need not have
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
        if self._counts:
            kept = [v for v in model.graph.outputs if v.name not in self._counts]
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
            shown=self.step.outputs,
        )

    def updates(self, sessions: Sessions) -> list[Update]:
        """Returns the packed updates that are made apart from the gradients, opened once."""
        if not self.joined and not self._updates:
            self._updates += [Update(packed, sessions) for packed in self.packed]
        return self._updates

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
            step, model=halves.gradients, outputs=[*shown, *fetched], updates={}
        )
        gradients.packed, gradients.left, gradients._updates = [], {}, []
        taken = [*halves.given.values(), *halves.carried.values(), *halves.fed]
        apply.step = replace(step, model=halves.apply, feeds=taken, outputs=[], loss="")
        gradients._counts = apply._counts = ()
        apply.gains = False
        return gradients, apply, halves
