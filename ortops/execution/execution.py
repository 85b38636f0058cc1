"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the graph of gradients, then one run of each packed update (see
`ortops.execution.split`). Both read and write the variables where they lie: nothing is copied
between them. Updates that are safe in place are made in place; other variables have two buffers
that take turns. Small models are updated in the graph of gradients itself, which saves a run.

Where gradients are asked for, or given, the step runs in two halves on the same memory (see
`ortops.execution.cut`).

A `Template` is a step as the model says it; a `Variant` is one made for batches of some shapes, or
of any; a `Binding` is a variant tied to memory.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.autodiff.registry import Rules
from ortops.errors import OrtopsError, UnsupportedError
from ortops.execution.memory import Memory, fetch, give_back, hold, put_all
from ortops.execution.onnxruntime_sessions import Sessions, UpdateKernels
from ortops.execution.packed import Variable
from ortops.execution.settings import Settings
from ortops.execution.shape_cache import CachedStep, ShapeCache
from ortops.execution.split_step import Differentiated, Layout, SplitStep
from ortops.execution.step import Step
from ortops.execution.template import Template
from ortops.passes.rematerialization import Checkpoint, check, computed_names
from ortops.uninterrupted import AtomicChanges, run_uninterrupted

__all__ = ["Execution"]

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")


class Execution:
    """Runs the steps of a training algorithm.

    Args:
        steps: The parts of a step, one for each training_info entry; not to be used afterwards.
        values: The first values of the variables; copied, one after the other.
        rules: How cotangents pass through nodes.
        kernels: What runs updates: ``"onnx"``, ``"python"`` or ``"compiled"``.
        settings: How steps are executed.
        options: Options for the onnxruntime sessions.
        providers: Execution providers.
        recompute: Which activations to keep if the backward pass recomputes the others (see
            `ortops.passes.rematerialization`); None keeps all.

    Attributes:
        variables: The variables by name.
        compiled: The names of those whose updates are compiled.

    Raises:
        ArgumentError: If ``recompute`` or ``kernels`` is not valid.
        ModelError: If ``recompute`` names an unknown tensor.
        UnsupportedError: If a rule is missing, or onnxruntime cannot load a graph.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        values: Mapping[str, Array],
        rules: Rules,
        *,
        kernels: UpdateKernels,
        settings: Settings,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
        recompute: Checkpoint | None = None,
    ) -> None:
        # The buffers that hold the present values, and the steps made: one store changes both.
        self._position = (0, 0)
        self._changes = AtomicChanges()
        self._failed = ""
        self._process = os.getpid()
        self._begun = False
        self._split_step: SplitStep | None = None
        self.variables: dict[str, Variable] = {}
        self._updated_by: dict[str, int] = {}
        if recompute is not None:
            parts = [computed_names(s.model.graph, s.feeds, s.outputs) for s in steps]
            check(recompute, [name for names in parts for name in names])
        self._sessions = Sessions(
            kernels,
            options,
            providers,
            threads=settings.threads,
            spin=settings.spin,
            save_memory=recompute is not None,
            device=settings.device,
        )
        device = self._sessions.device
        self._templates = [
            Template(
                step,
                rules,
                kernels,
                settings,
                threads=self._sessions.threads,
                on_cpu=self._sessions.on_cpu,
                on_device=device is not None,
                in_place=kernels != "python" and len(steps) == 1,  # else a later run might fail
                recompute=recompute,
            )
            for step in steps
        ]
        for number, template in enumerate(self._templates):
            for packed in template.packed:
                self.variables |= packed.variables
            self._updated_by |= dict.fromkeys(template.step.updates, number)
        self.compiled = tuple(
            name
            for template in self._templates
            for packed in template.packed
            if packed.translation is not None
            for name in packed.variables
        )
        if kernels == "compiled":
            self._say_what_is_compiled()
        all_packed = [packed for template in self._templates for packed in template.packed]
        self._in_place = any(packed.in_place for packed in all_packed)
        for name in values:
            if name not in self.variables:
                value = values[name]
                first = hold(value, device)
                second = hold(value, device) if name in self._updated_by else first
                self.variables[name] = Variable((first, second))
        self.assign(values)
        self._shown = [name for step in steps for name in step.outputs]
        self._most_special = settings.shapes
        self._cache = ShapeCache(self._templates, self._sessions, settings.shapes)
        if not self._cache.gain:
            self._cache.of({}, self._buffers_of)

    def _say_what_is_compiled(self) -> None:
        standard = {n: why for template in self._templates for n, why in template.standard.items()}
        reasons = "".join(f"; '{name}' is not: {why}" for name, why in standard.items())
        logger.log(
            logging.INFO if self.compiled else logging.WARNING,
            "kernels: updates of %d variables are compiled%s",
            len(self.compiled),
            reasons,
        )

    @property
    def steps_made(self) -> int:
        """The number of steps since the session was made, or since `assign` set it."""
        self._changes.settle()
        return self._position[1]

    def present(self, name: str) -> Array:
        """Returns the present value of a variable: its memory, or a copy of that of a device.

        Raises:
            OrtopsError: If onnxruntime failed in the midst of an update.
        """
        self._check_variables()
        return fetch(self.variables[name].buffers[self._position[0]])

    def _check_variables(self) -> None:
        """Waits until the variables are those of a step, or refuses them if they never will be."""
        self._changes.settle()
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
            put_all({name: self.variables[name].buffers[turn] for name in values}, values)
            self._position = (turn, made if steps_made is None else steps_made)
            if values.keys() >= self.variables.keys():
                self._failed = ""

        self._changes.change(change)

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

    def step(
        self,
        feeds: Mapping[str, Array],
        wanted: Sequence[str] | None,
        note: Callable[[Mapping[str, Array]], object] | None = None,
    ) -> dict[str, Array]:
        """Makes one step.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return, counts that vary included; all others by default.
            note: Called with them when they are known and the step is not made yet.

        Raises:
            KernelError: If a run failed; then no variable has changed, unless that was an update
                in place. Then only `assign` of all variables makes the session usable again.
            OrtopsError: In a child process, or after such a failure.
        """
        self.check_process()
        self._check_variables()
        if not self._begun:  # the model may be freed since
            give_back()
            self._begun = True
        wanted = self._shown if wanted is None else wanted
        return self._run(self._cache.of(_shapes(feeds), self._buffers_of), feeds, wanted, note)

    def _run(
        self,
        cached: CachedStep,
        feeds: Mapping[str, Array],
        wanted: Sequence[str],
        note: Callable[[Mapping[str, Array]], object] | None = None,
    ) -> dict[str, Array]:
        """Changes the variables as a step does."""
        turn, made = self._position
        shown: dict[str, Array] = {}
        *before, last = (turns[turn] for turns in cached.bindings)
        for part in before:
            shown |= part.differentiate(feeds, wanted)
            if part.interruptible:
                part.update(feeds)
            else:
                self._changes.change(functools.partial(part.update, feeds))
        shown |= last.differentiate(feeds, wanted)
        if note is not None:
            note(shown)

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

        if last.interruptible:  # all that the step wrote lies where nobody reads it yet
            last.update(feeds)
            self._position = (1 - turn, made + 1)
        else:
            self._changes.change(finish)
        return shown

    def split_step(self) -> SplitStep:
        """Returns the step cut in two behind its gradients, made when it is first asked for.

        Raises:
            UnsupportedError: If a step has several parts, no gradients, or several of a parameter.
        """
        # Not to be cut in two: other libraries wrap what a handler raises in them.
        if self._split_step is None:
            self._split_step = run_uninterrupted(self._cut)
        return self._split_step

    def _cut(self) -> SplitStep:
        if len(self._templates) != 1:
            raise UnsupportedError(
                f"gradients: a step runs {len(self._templates)} training_info entries, of which "
                "later ones see what earlier ones did; choose one with TrainingSession(…, entry=)"
            )
        (template,) = self._templates
        gradients, apply, names = template.cut()
        anew = [*names.carried, template.step.seed]
        return SplitStep(
            names,
            Layout({name: self.variables[name].buffers[0] for name in names.given}),
            ShapeCache([gradients], self._sessions, self._most_special, anew),
            ShapeCache([apply], self._sessions, 0, apply.step.feeds),
        )

    def gradients(
        self,
        feeds: Mapping[str, Array],
        wanted: Sequence[str],
        instead: Mapping[str, Array] | None = None,
    ) -> Differentiated:
        """Computes what a step would apply, and changes nothing.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return.
            instead: Values that stand for those of running statistics and of the seed.

        Raises:
            KernelError: If the run failed.
            OrtopsError: In a child process, or where an update failed before.
            UnsupportedError: See `split_step`.
        """
        self.check_process()
        self._check_variables()
        split_step = self.split_step()
        turn, _ = self._position
        names = split_step.names
        flat, found = split_step.layout.zeros()
        carried = {n: np.empty_like(self.present(n)) for n in names.carried if n in self.variables}
        into = {names.given[name]: array for name, array in found.items()}
        into |= {names.carried[name]: array for name, array in carried.items()}
        fetched = {name: label for label, name in names.carried.items() if name not in into}
        (turns,) = split_step.gradients.of(_shapes(feeds), self._buffers_of).bindings
        binding = turns[turn]
        shown = binding.differentiate({**feeds, **(instead or {})}, [*wanted, *fetched], into)
        carried |= {label: shown.pop(name) for name, label in fetched.items()}
        carried |= {name: feeds[name].copy() for name in names.fed}
        return Differentiated(shown, found, flat, carried)

    def apply(self, gradients: Mapping[str, Array], carried: Mapping[str, Array]) -> None:
        """Changes the variables as a step with these gradients does.

        Args:
            gradients: The gradients by parameter, of the types and shapes of the layout.
            carried: What else a step applies; running statistics stay as they are by default.

        Raises:
            KernelError: As in `step`.
            OrtopsError: As in `step`.
            UnsupportedError: See `split_step`.
        """
        self.check_process()
        self._check_variables()
        split_step = self.split_step()
        names = split_step.names
        feeds = {names.given[name]: array for name, array in gradients.items()}
        for label, name in (*names.carried.items(), *zip(names.fed, names.fed, strict=True)):
            feeds[name] = carried[label] if label in carried else self.present(label)
        self._run(split_step.apply.of({}, self._buffers_of), feeds, ())

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
        shapes = {name: array.shape[1:] for name, array in feeds.items()}
        (variant,) = self._cache.of(shapes, self._buffers_of).variants
        losses = variant.repetition.run(self._buffers_of(0, turn), turn, feeds)
        self._position = (1 - turn, made + count)
        return losses

    def _buffers_of(self, number: int, turn: int) -> Callable[[str], tuple[Memory, Memory]]:
        """Returns what tells where part ``number`` of a step reads a variable, and writes it."""

        def buffers(name: str) -> tuple[Memory, Memory]:
            both = self.variables[name].buffers
            done = self._updated_by.get(name, number) < number  # by an earlier part of this step
            return both[1 - turn if done else turn], both[1 - turn]

        return buffers


def _shapes(feeds: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in feeds.items()}
