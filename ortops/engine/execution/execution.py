"""Runs training steps: onnxruntime sessions bound to the memory of the variables.

A step is one run of the gradient graph, followed by one run of each packed update (see
`ortops.engine.execution.update_groups`). All of them read and write the memory of the variables
directly, without copies. Updates are in place if that is safe; other variables have two buffers
that are used alternately. In small models, the updates are part of the gradient graph, which saves
a run.

If a caller reads or provides gradients, the step runs in two parts on the same memory (see
`ortops.engine.execution.split_step`).
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from ortops._common.numbers import Array
from ortops._common.uninterrupted import run_uninterrupted
from ortops.engine.execution.compilation import has_compiler
from ortops.engine.execution.memory import DeviceArray, Memory, give_back, hold
from ortops.engine.execution.onnxruntime_sessions import Sessions, UpdateKernels
from ortops.engine.execution.packed import Variable
from ortops.engine.execution.part import Part, SplitStep
from ortops.engine.execution.placement import PlacedNode, log_fallback
from ortops.engine.execution.settings import SessionReport, Settings
from ortops.engine.execution.split_step import Differentiated
from ortops.engine.execution.step import Step
from ortops.engine.execution.template import Template
from ortops.engine.execution.trial import choose
from ortops.engine.execution.variables import Variables
from ortops.engine.execution.variant import Binding
from ortops.errors import OrtopsError, UnsupportedError
from ortops.graph.autodiff.registry import Rules
from ortops.graph.passes.rematerialization import Checkpoint, check, computed_names

logger = logging.getLogger("ortops")


class Execution:
    """Runs the steps of a training algorithm.

    Args:
        steps: The parts of a step, one for each training_info entry; must not be used afterwards.
        values: The initial values of the variables; copied one after the other.
        rules: The gradient rules.
        kernels: The kernels for updates: ``"auto"``, ``"onnx"``, ``"python"`` or ``"compiled"``.
        settings: How steps are executed.
        options: Options for the onnxruntime sessions.
        providers: Execution providers.
        recompute: Which activations to keep if the backward pass recomputes the others (see
            `ortops.graph.passes.rematerialization`); None keeps all.
        names: The name of each part, if there are several.
        in_backward: Whether a variable is updated, in place, once its gradient is there.
        shown: See `show`.

    Attributes:
        variables: The variables by name.

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
        names: Sequence[str] = (),
        in_backward: bool = False,
        shown: Sequence[str] = (),
    ) -> None:
        self.variables = Variables([step.updates for step in steps])
        self._process = os.getpid()
        self._chosen: Sequence[int] = range(len(steps))
        if recompute is not None:
            parts = [computed_names(s.model.graph, s.feeds, s.outputs) for s in steps]
            check(recompute, [name for names in parts for name in names])
        sessions = Sessions(kernels, options, providers, settings)
        if in_backward:
            _check_in_backward(len(steps), sessions)
        # With several parts, updates are not in place, because a later part might fail.
        in_place = kernels != "python" and len(steps) == 1
        templates = [
            Template(
                step,
                rules,
                sessions,
                in_place=in_place,
                recompute=recompute,
                in_backward=in_backward,
            )
            for step in steps
        ]
        self._parts = [
            Part(template, self.variables, number, settings.shapes)
            for number, template in enumerate(templates)
        ]
        for part in self._parts:
            part.show(shown)
        self._in_backward = any(template.in_backward for template in templates)
        self._sessions = sessions
        self._compiles_later = sessions.compiles_later and not self._in_backward
        self._shared = _Shared(self._compiles_later)
        if kernels == "compiled":
            self._log_compiled(logging.INFO if self.compiled else logging.WARNING)
        self._outputs = [len(step.outputs) for step in steps]
        self._labels = output_labels([[*step.outputs, *step.varying] for step in steps], names)
        self._take_packed()
        self._hold(values, sessions)
        for graph in (graph for part in self._parts for graph in part.graphs()):
            if not graph.gains:
                graph.of({})
        if not sessions.on_cpu:
            log_fallback(sessions.names, self._nodes() or ())

    def _take_packed(self) -> None:
        """Takes over the memory of packed updates."""
        packed = [packed for part in self._parts for packed in part.template.packed]
        for each in packed:
            self.variables.update(each.variables)
        self.variables.in_place |= self._in_backward or any(each.in_place for each in packed)

    def _hold(self, values: Mapping[str, Array], sessions: Sessions) -> None:
        """Allocates the memory of all variables that are not packed, and sets all variables.

        It is the CPU's where only nodes read a variable for which the device has no kernels.
        """
        here: set[str] = set()
        in_place: set[str] = set()
        if sessions.device is not None:
            try:
                graphs = [graph for part in self._parts for graph in part.graphs()]
            except UnsupportedError:  # there are no gradients to separate updates from
                self._parts[0].template.overwrites = False
                graphs = self._parts
            variants = [graph.any_shape() for graph in graphs]
            if sessions.settings.device is None:
                here = here.union(*(variant.read_here for variant in variants))
                here = here.difference(*(variant.read_elsewhere for variant in variants))
            in_place = in_place.union(*(variant.in_place for variant in variants))
            self.variables.in_place |= bool(in_place)
        for name in (name for name in values if name not in self.variables):
            device = None if name in here else sessions.device
            first = second = hold(values, name, device)
            updated = name in self.variables.updated_by
            if updated and name not in in_place and not self._in_backward:
                second = np.empty_like(first) if device is None else hold(values, name, device)
            self.variables[name] = Variable((first, second))
        self.variables.assign(values)

    def _nodes(self) -> list[PlacedNode] | None:
        """Returns the nodes of the graphs of a step of all parts; None if it is not known."""
        found = [graph.nodes() for part in self._parts for graph in part.graphs()]
        return None if None in found else [node for nodes in found for node in nodes or ()]

    def nodes(self) -> list[PlacedNode]:
        """Returns the nodes of the gradient graphs of a step, and where they run.

        Raises:
            UnsupportedError: If onnxruntime is too old to tell.
        """
        nodes = self._nodes()
        if nodes is None:
            raise UnsupportedError(
                f"placement: onnxruntime {onnxruntime.__version__} does not tell where nodes run; "
                "upgrade onnxruntime, or set sess_options.log_severity_level = 0"
            )
        return nodes

    @property
    def compiled(self) -> tuple[str, ...]:
        """The names of variables whose updates are compiled."""
        found = (packed for part in self._parts for packed in part.template.translations)
        return tuple(name for packed in found for name in packed.variables)

    @property
    def compilable(self) -> tuple[str, ...]:
        """The names of variables whose updates are compiled now, or can be after some steps."""
        if not (self._compiles_later and has_compiler()):
            return self.compiled
        found = (packed for part in self._parts for packed in part.template.compilable())
        return tuple(name for packed in found for name in packed.variables)

    def report(self) -> SessionReport:
        """Returns what was chosen for the steps, as they run now; makes nothing for it."""
        self.variables.settle()
        parts = [self._parts[number] for number in self._chosen]
        graphs = parts
        if parts[0].template.overwrites:
            split = parts[0].split
            graphs = [] if split is None else [split.gradients, split.apply]
        found = [graph.nodes_made_last() for graph in graphs]
        nodes = None if None in found else [node for each in found for node in each or ()]
        own = {name for part in parts for name in part.template.step.updates}
        in_place = {n: _is_one(*self.variables[n].buffers) for n in self.variables if n in own}
        compiled = tuple(name for name in self.compiled if name in own)
        device = self._sessions.device
        return SessionReport(
            kernels="compiled" if compiled else self._sessions.kernels,
            choice=self._shared.choice,
            compiled=compiled,
            packed=tuple(packed for part in parts for packed in part.template.report()),
            in_place=tuple(name for name, is_one in in_place.items() if is_one),
            in_turn=tuple(name for name, is_one in in_place.items() if not is_one),
            device="cpu" if device is None else device.kind,
            on_device=tuple(
                name
                for name, variable in self.variables.items()
                if isinstance(variable.buffers[0], DeviceArray)
            ),
            optimizer_in_backward=self._in_backward,
            repeatable=self.repeatable,
            variants=tuple(shapes for graph in graphs for shapes in graph.shapes),
            operators=None if nodes is None else dict(Counter(node.operator for node in nodes)),
            placement=None if nodes is None else {node.name: node.provider for node in nodes},
        )

    def _log_compiled(self, level: int, when: str = "") -> None:
        standard = [each for part in self._parts for each in part.template.standard.items()]
        reasons = "".join(f"; '{name}' is not: {why}" for name, why in standard)
        message = "kernels: updates of %d variables are compiled%s%s"
        logger.log(level, message, len(self.compiled), when, reasons)

    def _compile_after_some_steps(self) -> None:
        """Compiles updates once the steps have taken so long that it is worthwhile.

        It happens between two steps, which have the same results before and after it.
        """
        shared, settings = self._shared, self._sessions.settings
        steps, seconds = settings.compiled_after
        if shared.compiles_later and shared.steps >= steps and shared.seconds >= seconds:
            shared.compiles_later = False
            self.variables.change(self._compile_updates)

    def _compile_updates(self) -> None:
        shared, sessions = self._shared, self._sessions
        if not has_compiler():
            shared.choice = "llvmlite is not installed"
            logger.debug("kernels: updates are not compiled, because %s", shared.choice)
            return
        found = [part.template.compilable() for part in self._parts]
        if not any(found):
            shared.choice = "none can be compiled"
            return
        step = max(1e-6, shared.seconds) / max(1, shared.steps)
        try:
            faster, shared.choice = choose(found, step, sessions)
            turns = self.variables.position[0]
            for turn, part, own in zip(turns, self._parts, found, strict=True):
                only = {packed: each for packed, each in own.items() if packed in faster}
                if only and part.template.compile_updates(turn, only=only):
                    self._take_packed()
                    part.forget()
        except Exception as error:  # exceptions of llvmlite, and its library's
            _warn_not_compiled(f"{error}")
        if self.compiled:
            when = f" from now on, after {shared.steps} steps, because {shared.choice}"
            self._log_compiled(logging.INFO, when)
        elif shared.choice:
            logger.info("kernels: updates are not compiled, because %s", shared.choice)

    @property
    def steps_made(self) -> int:
        """See `Variables.steps_made`."""
        return self.variables.steps_made

    def adopt(self, other: Execution) -> None:
        """Takes over the graphs and the memory of an execution of steps with the same variables.

        Executions that `only` returned do so as well.

        Args:
            other: An execution with other inputs that are variables, or other losses. It must not
                be used any more.
        """
        for own, part in zip(self._parts, other._parts, strict=True):
            part.show(own.template.extra)
            part.variables = self.variables
        self._parts[:] = other._parts
        self._outputs = other._outputs
        if self._chosen == other._chosen:
            self._labels = other._labels
        else:
            self._labels = [{name: name for name in labels} for labels in other._labels]
        self.variables.replace(other.variables)
        self._shared.compiles_later = self._compiles_later

    def only(self, part: int) -> Execution:
        """Returns an execution on the same variables whose steps run one of the parts.

        Args:
            part: The index of the part.
        """
        result = copy.copy(self)
        result._chosen = [part]
        result._labels = [{name: name for name in labels} for labels in self._labels]
        return result

    def present(self, name: str) -> Array:
        """See `Variables.present`."""
        return self.variables.present(name)

    def memories(self) -> dict[str, Memory]:
        """See `Variables.memories`."""
        return self.variables.memories()

    def assign(self, values: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        """See `Variables.assign`."""
        self.variables.assign(values, steps_made=steps_made)

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
        note: Callable[[Mapping[str, Any]], object] | None = None,
        *,
        stay: bool = False,
    ) -> dict[str, Any]:
        """Makes one step.

        Args:
            feeds: The batch, checked.
            wanted: The outputs to return, possibly with varying counts; all outputs by default.
            note: A function to call with the outputs before the variables change.
            stay: Whether outputs that are computed on a device are returned in its memory, which
                `fetch` reads when they are needed, so that the step does not wait for them.

        Raises:
            KernelError: If a run failed. No variable has changed, unless an update in place failed.
                In this case, the session can be used again only after `assign` of all variables.
            OrtopsError: In a forked process, or after an update in place failed.
        """
        self._prepare()
        if wanted is None:
            labels_of = [list(self._labels[n].values())[: self._outputs[n]] for n in self._chosen]
            wanted = [label for labels in labels_of for label in labels]
        shapes = _shapes(feeds)
        bindings = {number: self._parts[number].whole(shapes) for number in self._chosen}
        if not self._shared.steps:  # graphs were made, and the caller may have freed the model
            give_back()
        if not self._in_backward:
            return self._run(bindings, feeds, wanted, note, stay=stay)
        shown: dict[str, Array] = {}  # the run itself changes variables
        self.variables.change(lambda: shown.update(self._run(bindings, feeds, wanted, note)))
        return shown

    def _prepare(self) -> None:
        """Checks that a step can be made; compiles updates once that is worthwhile."""
        self.check_process()
        self.variables.check()
        self._compile_after_some_steps()

    def _run(
        self,
        bindings: Mapping[int, Binding],
        feeds: Mapping[str, Memory],
        wanted: Sequence[str],
        note: Callable[[Mapping[str, Any]], object] | None = None,
        *,
        stay: bool = False,
    ) -> dict[str, Any]:
        """Runs the parts of a step; returns the outputs."""
        begin = time.perf_counter()
        turns, made = self.variables.position
        new_turns = list(turns)
        shown: dict[str, Any] = {}
        last = list(bindings)[-1]
        for number, part in bindings.items():
            given = {**feeds, **self._parts[number].foreign_values(new_turns)}
            labels = self._labels[number]
            own = [name for name in part.shown if labels.get(name, name) in wanted]
            found = part.differentiate(given, own, stay=stay)
            shown |= {labels.get(name, name): array for name, array in found.items()}
            new_turns[number] = 1 - turns[number]
            if number != last:
                self._finish(part, functools.partial(part.update, feeds))
        if note is not None:
            note(shown)
        position = tuple(new_turns), made + 1
        commit = functools.partial(setattr, self.variables, "position", position)

        def finish() -> None:
            part.update(feeds)
            commit()

        if not part.update_and(commit):
            self._finish(part, finish)
        self._shared.steps += 1
        self._shared.seconds += time.perf_counter() - begin
        return shown

    def _finish(self, part: Binding, finish: Callable[[], None]) -> None:
        """Runs the updates of a part."""
        if part.interruptible:  # the step wrote only to buffers that nobody reads yet
            finish()
        else:
            self.variables.change(finish)

    @property
    def on_device(self) -> bool:
        """Whether variables have the memory of a device."""
        return self._sessions.device is not None

    def computes(self, name: str) -> bool:
        """Whether a step computes a tensor, so that `show` can make it an output."""
        return any(self._parts[number].template.computes(name) for number in self._chosen)

    def show(self, names: Sequence[str]) -> None:
        """Sets the tensors that a step can return in addition to its outputs.

        If they change, graphs are made anew. The variables stay as they are.

        Args:
            names: Tensors that a step computes.
        """

        def change() -> None:
            for number in self._chosen:
                self._parts[number].show(names)

        run_uninterrupted(change)

    def free(self) -> None:
        """Frees the memory of graphs, which are made anew when they are used again."""
        run_uninterrupted(self._forget)
        give_back()

    def _forget(self) -> None:
        for number in self._chosen:
            self._parts[number].forget()

    def split_step(self) -> SplitStep:
        """Returns the step cut into two parts after its gradients, created by the first call.

        Raises:
            UnsupportedError: If a step has several parts, no gradients, or several of a parameter.
        """
        if len(self._chosen) != 1:
            raise UnsupportedError(
                f"gradients: a step runs {len(self._chosen)} training_info entries one after "
                "the other; choose one with entry="
            )
        return self._parts[self._chosen[0]].split_step()

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
            instead: Values to use instead of the current running statistics, seed and loss scale.

        Raises:
            KernelError: If the run failed.
            OrtopsError: In a forked process, or after an update failed.
            UnsupportedError: See `split_step`.
        """
        self._prepare()
        split_step = self.split_step()
        begin = time.perf_counter()
        names = split_step.names
        flat, found = split_step.layout.zeros()
        carried = {n: np.empty_like(self.present(n)) for n in names.carried if n in self.variables}
        into = {names.given[name]: array for name, array in found.items()}
        into |= {names.carried[name]: array for name, array in carried.items()}
        fetched = {name: label for label, name in names.carried.items() if name not in into}
        foreign = split_step.gradients.foreign_values(self.variables.position[0])
        binding = split_step.gradients.half(_shapes(feeds))
        given = {**feeds, **foreign, **(instead or {})}
        shown = binding.differentiate(given, [*wanted, *fetched], into)
        carried |= {label: shown.pop(name) for name, label in fetched.items()}
        carried |= {name: feeds[name].copy() for name in names.fed}
        self._shared.seconds += time.perf_counter() - begin
        return Differentiated(shown, found, flat, carried)

    def apply(
        self,
        gradients: Mapping[str, Array],
        carried: Mapping[str, Array],
        wanted: Sequence[str] = (),
        note: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        """Applies gradients to the variables, as a step does.

        Args:
            gradients: The gradients by parameter, with the dtypes and shapes of the layout.
            carried: The other tensors that the update reads; those that are missing, such as
                running statistics, keep their current values.
            wanted: Tensors of `show` to return to ``note``; those that do not depend on gradients
                are left out, and all where the update overwrites variables.
            note: As in `step`.

        Raises:
            KernelError: As in `step`.
            OrtopsError: As in `step`.
            UnsupportedError: See `split_step`.
        """
        self.check_process()
        self.variables.check()
        split_step = self.split_step()
        names = split_step.names
        feeds = {names.given[name]: array for name, array in gradients.items()}
        for label, name in (*names.carried.items(), *zip(names.fed, names.fed, strict=True)):
            feeds[name] = carried[label] if label in carried else self.present(label)
        (number,) = self._chosen
        self._run({number: split_step.apply.half({})}, feeds, wanted, note)

    @property
    def repeatable(self) -> bool:
        """Whether `steps` is available: for small models with one training_info entry."""
        return len(self._chosen) == 1 and self._parts[self._chosen[0]].template.repeatable

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
        self.variables.check()
        turns, made = self.variables.position
        (number,) = self._chosen
        shapes = {name: array.shape[1:] for name, array in feeds.items()}
        part, turn = self._parts[number], turns[number]
        losses = part.of(shapes).repeat(part.buffers, turn, feeds)
        changed = tuple(1 - turn if n == number else other for n, other in enumerate(turns))
        self.variables.position = (changed, made + count)
        return losses


@dataclass
class _Shared:
    """What executions of parts of a step share, besides variables.

    Attributes:
        compiles_later: Whether updates may be compiled after some steps, and are not yet.
        choice: Why updates were compiled or were not.
        steps: The number of steps in this process, each made in a run of its own.
        seconds: How long they have taken.
    """

    compiles_later: bool
    choice: str = ""
    steps: int = 0
    seconds: float = 0.0


def output_labels(outputs: Sequence[Sequence[str]], names: Sequence[str]) -> list[dict[str, str]]:
    """Returns what the outputs of parts are called in a step of all: by part, name and label.

    Args:
        outputs: The outputs of each part.
        names: The name of each part, which precedes an output that an earlier part has as well.

    Example:
        >>> output_labels([["loss", "y"], ["loss", "z"]], ["main", "other"])
        [{'loss': 'loss', 'y': 'y'}, {'loss': 'other.loss', 'z': 'z'}]
    """
    labels: list[dict[str, str]] = []
    taken: set[str] = set()
    for number, own in enumerate(outputs):
        prefix = names[number] if number < len(names) else str(number)
        labels.append({n: f"{prefix}.{n}" if n in taken else n for n in own})
        taken |= set(labels[-1].values())
    return labels


@functools.cache
def _warn_not_compiled(why: str) -> None:
    """Logs once why updates are not compiled."""
    logger.warning(
        "kernels: updates cannot be compiled (%s); training goes on with standard operators, with "
        "the same results",
        why,
    )


def _check_in_backward(parts: int, sessions: Sessions) -> None:
    """Raises an error if variables cannot be updated in the backward pass."""
    reason = ""
    if parts > 1:
        reason = f"a step of {parts} training_info entries; choose one with entry="
    elif not sessions.on_cpu:
        reason = f"the provider {sessions.names[0]}; train on the CPU"
    elif sessions.kernels == "python":
        reason = "kernels='python'; use kernels='onnx'"
    if reason:
        raise UnsupportedError(f"optimizer_in_backward is not available with {reason}")


def _is_one(first: Memory, second: Memory) -> bool:
    """Whether the memory of a variable before and after a step is the same."""
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first is second or np.may_share_memory(first, second)
    return first is second


def _shapes(feeds: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in feeds.items()}
