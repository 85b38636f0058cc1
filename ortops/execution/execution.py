"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the gradient graph, followed by one run of each packed update (see
`ortops.execution.split`). All of them read and write the memory of the variables directly, without
copies. Updates are in place if that is safe; other variables have two buffers that are used
alternately. In small models, the updates are part of the gradient graph, which saves a run.

If a caller reads or provides gradients, the step runs in two parts on the same memory (see
`ortops.execution.cut`).

A `Template` is a step for batches of any shape, a `Variant` its lowered graph for certain shapes,
and a `Binding` a variant bound to memory.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
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
from ortops.numbers import Array
from ortops.passes.rematerialization import Checkpoint, check, computed_names
from ortops.uninterrupted import AtomicChanges, run_uninterrupted

__all__ = ["Execution"]


logger = logging.getLogger("ortops")


class Execution:
    """Runs the steps of a training algorithm.

    Args:
        steps: The parts of a step, one for each training_info entry; must not be used afterwards.
        values: The initial values of the variables; copied one after the other.
        rules: The gradient rules.
        kernels: The kernels for updates: ``"onnx"``, ``"python"`` or ``"compiled"``.
        settings: How steps are executed.
        options: Options for the onnxruntime sessions.
        providers: Execution providers.
        recompute: Which activations to keep if the backward pass recomputes the others (see
            `ortops.passes.rematerialization`); None keeps all.

    Attributes:
        variables: The variables by name.
        compiled: The names of variables whose updates are compiled.

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
        # The index of the current buffers, and the number of steps: one store changes both.
        self._position = (0, 0)
        self._changes = AtomicChanges()
        self._failed = ""
        self._process = os.getpid()
        self._begun = False
        self._split_step: SplitStep | None = None
        if recompute is not None:
            parts = [computed_names(s.model.graph, s.feeds, s.outputs) for s in steps]
            check(recompute, [name for names in parts for name in names])
        save_memory = recompute is not None
        sessions = Sessions(kernels, options, providers, settings, save_memory=save_memory)
        # With several parts, updates are not in place, because a later part might fail.
        in_place = kernels != "python" and len(steps) == 1
        self._templates = [
            Template(step, rules, sessions, in_place=in_place, recompute=recompute)
            for step in steps
        ]
        all_packed = [packed for template in self._templates for packed in template.packed]
        self._in_place = any(packed.in_place for packed in all_packed)
        compiled = [packed.variables for packed in all_packed if packed.translation is not None]
        self.compiled = tuple(name for variables in compiled for name in variables)
        if kernels == "compiled":
            self._log_compiled()
        self.variables: dict[str, Variable] = {}
        for packed in all_packed:
            self.variables |= packed.variables
        self._updated_by = {name: n for n, step in enumerate(steps) for name in step.updates}
        for name in (name for name in values if name not in self.variables):
            value = values[name]
            first = second = hold(value, sessions.device)
            if name in self._updated_by:
                second = hold(value, sessions.device)
            self.variables[name] = Variable((first, second))
        self.assign(values)
        self._shown = [name for step in steps for name in step.outputs]
        self._capacity = settings.shapes
        self._cache = ShapeCache(self._templates, self._capacity)
        if not self._cache.gain:
            self._cache.of({}, self._buffers_of)

    def _log_compiled(self) -> None:
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
        """The number of steps since the session was created, or since `assign` set it."""
        self._changes.settle()
        return self._position[1]

    def present(self, name: str) -> Array:
        """Returns the current value of a variable: its memory, or a copy of device memory.

        Raises:
            OrtopsError: If onnxruntime failed during an update.
        """
        self._check_variables()
        return fetch(self.variables[name].buffers[self._position[0]])

    def _check_variables(self) -> None:
        """Waits for the end of a step; raises an OrtopsError if an update failed halfway."""
        self._changes.settle()
        if self._failed:
            raise OrtopsError(self._failed)

    def assign(self, values: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        """Sets variables to values whose dtypes and shapes have been checked.

        Args:
            values: The values by name.
            steps_made: The new value of `steps_made`; unchanged by default.
        """

        def change() -> None:
            turn, made = self._position
            put_all({name: self.variables[name].buffers[turn] for name in values}, values)
            self._position = (turn, made if steps_made is None else steps_made)
            if values.keys() >= self.variables.keys():
                self._failed = ""

        self._changes.change(change)

    def check_process(self) -> None:
        """Raises an error in a forked process, which lacks the threads of its parent.

        Raises:
            OrtopsError: If the session was created in another process.
        """
        if os.getpid() != self._process:
            raise OrtopsError(
                "session: it was created before this process was forked, and its threads do not "
                "exist here; create a session in this process, for example from a saved file"
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
            wanted: The outputs to return, possibly with varying counts; all outputs by default.
            note: A function to call with the outputs before the variables change.

        Raises:
            KernelError: If a run failed. No variable has changed, unless an update in place failed.
                In this case, the session can be used again only after `assign` of all variables.
            OrtopsError: In a forked process, or after an update in place failed.
        """
        self.check_process()
        self._check_variables()
        if not self._begun:  # the caller may have freed the model by now
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
        """Runs all parts of a step; returns the outputs."""
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
                        f"session: an update failed ({error}) and left the variables between two "
                        "steps; continue from a saved file, or call reset()"
                    )
                raise
            self._position = (1 - turn, made + 1)

        if last.interruptible:  # the step wrote only to buffers that nobody reads yet
            finish()
        else:
            self._changes.change(finish)
        return shown

    def computes(self, name: str) -> bool:
        """Whether a step computes a tensor, so that `show` can make it an output."""
        return any(template.computes(name) for template in self._templates)

    def show(self, names: Sequence[str]) -> None:
        """Sets the tensors that a step can return in addition to its outputs.

        If they change, graphs are made anew. The variables stay as they are.

        Args:
            names: Tensors that a step computes.
        """
        extra = tuple(names)
        if all(template.extra == extra for template in self._templates):
            return

        def change() -> None:
            for template in self._templates:
                template.extra = extra
            self._cache = ShapeCache(self._templates, self._capacity)
            self._split_step = None

        run_uninterrupted(change)

    def split_step(self) -> SplitStep:
        """Returns the step cut into two parts after its gradients, created by the first call.

        Raises:
            UnsupportedError: If a step has several parts, no gradients, or several of a parameter.
        """
        # Uninterrupted, because other libraries wrap exceptions of signal handlers in their own.
        if self._split_step is None:
            self._split_step = run_uninterrupted(self._cut)
        return self._split_step

    def _cut(self) -> SplitStep:
        if len(self._templates) != 1:
            raise UnsupportedError(
                f"gradients: a step runs {len(self._templates)} training_info entries one after "
                "the other; choose one with TrainingSession(…, entry=)"
            )
        (template,) = self._templates
        gradients, apply, names = template.cut()
        rebound = [*names.carried, template.step.seed]
        return SplitStep(
            names,
            Layout({name: self.variables[name].buffers[0] for name in names.given}),
            ShapeCache([gradients], self._capacity, rebound),
            ShapeCache([apply], 0, apply.step.feeds),
        )

    def gradients(
        self,
        feeds: Mapping[str, Array],
        wanted: Sequence[str],
        instead: Mapping[str, Array] | None = None,
    ) -> Differentiated:
        """Computes gradients, running statistics and outputs without changing variables.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return.
            instead: Values to use instead of the current running statistics and seed.

        Raises:
            KernelError: If the run failed.
            OrtopsError: In a forked process, or after an update failed.
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
        """Applies gradients to the variables, as a step does.

        Args:
            gradients: The gradients by parameter, with the dtypes and shapes of the layout.
            carried: The other tensors that the update reads; those that are missing, such as
                running statistics, keep their current values.

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
        """Whether `steps` is available: for small models with one training_info entry."""
        return len(self._templates) == 1 and self._templates[0].repeatable

    def steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        """Makes several steps in one run.

        Args:
            feeds: The batches of each input, checked and stacked along axis 0.
            count: The number of batches.

        Returns:
            The losses.

        Raises:
            KernelError: If the run failed; no variable has changed.
            OrtopsError: In a forked process.
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
        """Returns a function that maps a variable to the memory that a part reads and writes."""

        def buffers(name: str) -> tuple[Memory, Memory]:
            both = self.variables[name].buffers
            done = self._updated_by.get(name, number) < number  # by an earlier part of this step
            return both[1 - turn if done else turn], both[1 - turn]

        return buffers


def _shapes(feeds: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in feeds.items()}
