"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the graph of gradients, then one run of each packed update (see
`ortops.execution.split`). Both read and write the variables where they lie: nothing is copied
between them. Updates that are safe in place are made in place; other variables have two buffers
that take turns. Small models are updated in the graph of gradients itself, which saves a run.

A `Template` is a step as the model says it; a `Variant` is one made for batches of some shapes, or
of any; a `Binding` is a variant tied to memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.autodiff.registry import Rules
from ortops.custom_ops import interrupts_deferred
from ortops.execution.binding import Binding
from ortops.execution.onnxruntime_sessions import Sessions
from ortops.execution.packed import Variable
from ortops.execution.settings import Settings
from ortops.execution.step import Step
from ortops.execution.template import Template
from ortops.execution.variant import Variant
from ortops.inference import Kernels
from ortops.passes.rematerialization import Checkpoint, check, computed_names

__all__ = ["Execution"]

Array: TypeAlias = npt.NDArray[Any]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


class Execution:
    """Runs the steps of a training algorithm.

    Args:
        steps: The parts of a step, one for each training_info entry; not to be used afterwards.
        values: The first values of the variables; copied.
        rules: How cotangents pass through nodes.
        kernels: ``"onnx"`` or ``"python"``, for optimizer nodes.
        settings: How steps are executed.
        options: Options for the onnxruntime sessions.
        providers: Execution providers.
        checkpoint: What is kept for the backward pass (see `ortops.passes.rematerialization`).

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
        rules: Rules,
        *,
        kernels: Kernels,
        settings: Settings,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._turn = 0
        self.variables: dict[str, Variable] = {}
        self._updated_by: dict[str, int] = {}
        if checkpoint is not None:
            parts = [computed_names(s.model.graph, s.feeds, s.outputs) for s in steps]
            check(checkpoint, [name for names in parts for name in names])
        threads, frugal = settings.threads, checkpoint is not None
        self._sessions = Sessions(kernels, options, providers, threads=threads, frugal=frugal)
        self._templates = [
            Template(
                step,
                rules,
                kernels,
                settings,
                threads=self._sessions.threads,
                on_cpu=self._sessions.on_cpu,
                in_place=kernels == "onnx" and len(steps) == 1,  # else a later run might fail
                checkpoint=checkpoint,
            )
            for step in steps
        ]
        for number, template in enumerate(self._templates):
            for packed in template.packed:
                self.variables |= packed.variables
            self._updated_by |= dict.fromkeys(template.step.updates, number)
        for name, value in values.items():
            if name not in self.variables:
                first = np.array(value, order="C")
                second = first.copy() if name in self._updated_by else first
                self.variables[name] = Variable((first, second))
        self.assign(values)
        self._made: dict[Shapes, _Made] = {}
        self._most_special = settings.shapes
        self._special = 0
        self._gain = any(template.gains for template in self._templates)
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
        *before, last = (turns[self._turn] for turns in self._made_for(shapes).bindings)
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
            if self._special < self._most_special and any(
                template.gains_at(sizes) for template in self._templates
            ):
                self._special += 1
                self._made[shapes] = self._make(sizes)
            else:
                self._made[shapes] = self._general
        return self._made[shapes]

    @functools.cached_property
    def _general(self) -> _Made:
        """What runs batches of any shapes."""
        return self._make(None)

    def _make(self, shapes: Mapping[str, tuple[int, ...]] | None) -> _Made:
        variants = [Variant(template, shapes, self._sessions) for template in self._templates]
        bindings = [
            [variant.bind(self._buffers_of(number, turn), turn) for turn in (0, 1)]
            for number, variant in enumerate(variants)
        ]
        return _Made(variants, bindings)

    @property
    def repeatable(self) -> bool:
        """Whether `steps` can be called: a small model, one training_info entry."""
        return len(self._templates) == 1 and self._templates[0].repeatable

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
        (variant,) = self._made_for(shapes if self._gain else ()).variants
        losses = variant.repetition.run(self._buffers_of(0, self._turn), self._turn, feeds)
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
        variants: The parts of a step.
        bindings: Each part, bound to memory for steps of even number, and for those of odd number.
    """

    variants: list[Variant]
    bindings: list[list[Binding]]
