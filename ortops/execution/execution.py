"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the graph of gradients, then one run of each packed update (see
`ortops.execution.split`). Both read and write the variables where they lie: nothing is copied
between them. Updates that are safe in place are made in place; other variables have two buffers
that take turns. Small models are updated in the graph of gradients itself, which saves a run.

A `Template` is a step as the model says it; a `Variant` is one made for batches of some shapes, or
of any; a `Binding` is a variant tied to memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.autodiff.registry import Rules
from ortops.errors import OrtopsError
from ortops.execution.binding import Binding
from ortops.execution.onnxruntime_sessions import Sessions
from ortops.execution.packed import Variable
from ortops.execution.settings import Settings
from ortops.execution.step import Step
from ortops.execution.template import Template
from ortops.execution.variant import Variant
from ortops.inference import Kernels
from ortops.passes.rematerialization import Checkpoint, check, computed_names
from ortops.uninterrupted import Whole, run_uninterrupted

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
        # The buffers that hold the present values, and the steps made: one store changes both.
        self._position = (0, 0)
        self._whole = Whole()
        self._failed = ""
        self._process = os.getpid()
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
        all_packed = [packed for template in self._templates for packed in template.packed]
        self._in_place = any(packed.in_place for packed in all_packed)
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

    @property
    def steps_made(self) -> int:
        """The number of steps since the session was made, or since `assign` set it."""
        self._whole.settle()
        return self._position[1]

    def present(self, name: str) -> Array:
        """Returns the present value of a variable: its memory, not a copy.

        Raises:
            OrtopsError: If onnxruntime failed in the midst of an update.
        """
        self._check_variables()
        return self.variables[name].buffers[self._position[0]]

    def _check_variables(self) -> None:
        """Waits until the variables are those of a step, or refuses them if they never will be."""
        self._whole.settle()
        if self._failed:
            raise OrtopsError(self._failed)

    def assign(self, values: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        """Sets variables; their types and shapes have been checked.

        Args:
            values: The values, by name.
            steps_made: What `steps_made` is then; as before by default.
        """

        def change() -> None:
            turn, made = self._position
            for name, value in values.items():
                self.variables[name].buffers[turn][...] = value
            self._position = (turn, made if steps_made is None else steps_made)
            if values.keys() >= self.variables.keys():
                self._failed = ""

        self._whole.change(change)

    def check_process(self) -> None:
        """Refuses to run in a child process, which has none of its parent's threads.

        Raises:
            OrtopsError: If the session was made in another process.
        """
        if os.getpid() != self._process:
            raise OrtopsError(
                "session: it was made before this process was forked, and its threads are not "
                "here; make a session in this process, for example of a saved file"
            )

    def step(self, feeds: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        """Makes one step.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return; all by default.

        Raises:
            KernelError: If a run failed; then no variable has changed, unless that was an update
                in place. Then only `assign` of all variables makes the session usable again.
            OrtopsError: In a child process, or after such a failure.
        """
        self.check_process()
        self._check_variables()
        turn, made = self._position
        shown: dict[str, Array] = {}
        shapes = tuple((name, array.shape) for name, array in feeds.items()) if self._gain else ()
        *before, last = (turns[turn] for turns in self._made_for(shapes).bindings)
        for part in before:
            shown |= part.differentiate(feeds, wanted)
            if part.has_updates:
                self._whole.change(functools.partial(part.update, feeds))
        shown |= last.differentiate(feeds, wanted)

        def finish() -> None:
            try:
                last.update(feeds)
            except BaseException as error:
                if self._in_place:
                    self._failed = (
                        f"session: an update failed ({error}), so that its variables are of no "
                        "step; go on from a saved file, or call reset()"
                    )
                raise
            self._position = (1 - turn, made + 1)

        if last.has_updates:
            self._whole.change(finish)
        else:  # all that the step wrote lies where nobody reads it yet
            self._position = (1 - turn, made + 1)
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
                # Not to be cut in two: other libraries wrap what a handler raises in them.
                self._made[shapes] = run_uninterrupted(functools.partial(self._make, sizes))
                self._special += 1
            else:
                self._made[shapes] = self._general
        return self._made[shapes]

    @functools.cached_property
    def _general(self) -> _Made:
        """What runs batches of any shapes."""
        return run_uninterrupted(functools.partial(self._make, None))

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

    def steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        """Makes several steps in one run.

        Args:
            feeds: For each input the batches, checked and stacked along axis 0.
            count: How many they are.

        Returns:
            The losses.

        Raises:
            KernelError: If the run failed; then no variable has changed.
            OrtopsError: In a child process.
        """
        self.check_process()
        self._check_variables()
        turn, made = self._position
        shapes = tuple((name, array.shape[1:]) for name, array in feeds.items())
        (variant,) = self._made_for(shapes if self._gain else ()).variants
        losses = variant.repetition.run(self._buffers_of(0, turn), turn, feeds)
        self._position = (1 - turn, made + count)
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
