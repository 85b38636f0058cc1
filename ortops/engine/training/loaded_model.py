"""A trainable model in memory: what a training session, its evaluator and its file share."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from ortops._common.arguments import boolean
from ortops._common.numbers import plain
from ortops._common.uninterrupted import finished_at_exit, run_uninterrupted
from ortops.engine.building.weighted import with_weights
from ortops.engine.execution.execution import Execution, output_labels
from ortops.engine.execution.fronts import separate
from ortops.engine.execution.memory import fetch, give_back
from ortops.engine.execution.onnxruntime_sessions import UpdateKernels
from ortops.engine.execution.providers import CPU, choose_providers
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.step import Step
from ortops.engine.execution.values import Values
from ortops.engine.trainable.initialization import initial_values
from ortops.engine.trainable.metadata import (
    TrainingMetadata,
    entry_names,
    entry_number,
    training_metadata,
)
from ortops.engine.trainable.step_graph import flatten
from ortops.engine.training.declared_shapes import DeclaredShapes
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.initial_values import (
    computed,
    copy_to_memory,
    given_values,
)
from ortops.engine.training.position import ResumeState, read_position
from ortops.engine.training.state import State, check_dict, masters
from ortops.errors import ArgumentError, ModelError, OrtopsError, UnknownVariableError, did_you_mean
from ortops.graph.autodiff.rules import RULES
from ortops.graph.files import external
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import initializers
from ortops.graph.passes.rematerialization import SAID, Checkpoint, chosen
from ortops.graph.row_axes import row_axes_of_model

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _holding(operation: str, *, alone: bool) -> Callable[[_Method], _Method]:
    """Makes a method hold the lock of the session, so that no other change interleaves with it.

    Another thread waits. A signal handler runs in the thread that it interrupts, which has the lock
    already. If it calls a method that changes the session, that raises an error.

    Args:
        operation: What the method does, as messages call it.
        alone: Whether the method changes the session.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            loaded: LoadedModel = getattr(self, "_loaded", self)  # the model, or what holds it
            with finished_at_exit, loaded.lock:
                before = loaded.usage.operation
                try:  # nothing that a handler raises comes between these lines and the `finally`
                    if before and alone:
                        raise OrtopsError(
                            f"session: '{operation}' was called while '{before}' is in progress in "
                            "the same thread, as by a signal handler; call it after that has "
                            "returned"
                        )
                    loaded.usage.operation = before or operation
                    return method(self, *args, **kwargs)
                finally:
                    loaded.usage.operation = before

        return cast(_Method, call)

    return decorate


changes = functools.partial(_holding, alone=True)
reads = functools.partial(_holding, alone=False)


@dataclasses.dataclass
class Usage:
    """What is being done with the variables of a model in memory.

    Attributes:
        light: The model whose steps the execution runs.
        operation: The public method that holds the lock; "" if none does.
        assigned: The number of calls of `assign`.
        weights: The number of those that set weights which are trained.
        on_assign: A function that is called with the values that `assign` has set.
        constants: The weights that are not trained and were set: inputs of a step, like variables.
        properties: The properties, once one of them was set; None for those of the model.
    """

    light: LightModel
    operation: str = ""
    assigned: int = 0
    weights: int = 0
    on_assign: Callable[[Mapping[str, Array]], object] | None = None
    constants: list[str] = dataclasses.field(default_factory=list)
    properties: dict[str, int | float | str] | None = None


class LoadedModel:
    """A trainable model in memory, with the execution of its steps.

    Args:
        model: The model; not changed.
        entry: Which training_info entry a step runs; None for all of them in order.
        kernels: See `ortops.TrainingSession`, as for all other arguments.
        sess_options: Options for the onnxruntime sessions.
        providers: Execution providers for the onnxruntime sessions.
        recompute: Which activations to keep.
        settings: How steps are executed.

    Attributes:
        light: The model.
        proto: Its message, without the data of big tensors.
        options: As given.
        providers: Their names and options.
        tables: The tables that stay in a file, which steps look up rows of.
        fronts: What is computed of a batch before a step.
        entries: The training_info entries that a step runs.
        loaded: The training_info entries that are in memory.
        metadata: What the builder wrote about the first of the entries.
        metadata_of_entries: The same for each of the entries.
        steps: A step for each entry.
        settings: How steps are executed.
        inputs: The inputs that a batch fills.
        declared: The shapes of outputs that the model declares.
        outputs: The names of the outputs of a step.
        execution: Holds the variables and makes the steps.
        given: The initial values that the initialization graph does not compute.
        resume_state: How far `fit` is.
        lock: Held while variables are read or changed.
        usage: What is being done with the variables.
    """

    def __init__(
        self,
        model: ModelLike | LightModel,
        entry: int | str | None,
        *,
        kernels: UpdateKernels,
        sess_options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any] | None,
        recompute: Checkpoint | None,
        outputs: Sequence[str] | None,
        settings: Settings | None,
        optimizer_in_backward: bool = False,
    ) -> None:
        self.options = sess_options
        self.providers = choose_providers(providers, sess_options)
        settings = settings or Settings()
        on_cpu = [name for name, _ in self.providers] == [CPU] and settings.device is None
        least = settings.looked_up if on_cpu else math.inf
        self.light, self.entries, self.tables = copy_to_memory(model, entry, least)
        self.loaded = self.entries
        self.proto = self.light.proto
        if outputs is not None:
            _check_outputs(self.proto, outputs)
        self.usage = Usage(self.light)
        self._wanted_outputs = outputs
        names = self._read()
        # What onnxruntime copies does not depend on where the tables are.
        left = settings.copied - sum(table.length for table in self.tables.values())
        self.settings = dataclasses.replace(settings, copied=left)
        if recompute == "auto" and on_cpu:
            logger.info("model: %s; recompute=None keeps them", SAID)
        self.lock = threading.RLock()
        given = given_values(self.light, self.steps, self.entries, self.shared_metadata.masters)
        self._open = functools.partial(
            Execution,
            rules=RULES,
            kernels=kernels,
            settings=self.settings,
            options=sess_options,
            providers=self.providers,
            recompute=self._in_training_mode(chosen(recompute, on_cpu=on_cpu)),
            names=names,
            in_backward=boolean("optimizer_in_backward", optimizer_in_backward),
            shown=self.noted,
        )
        execution = self.execution = self._open(self.steps, given)
        self.given = self._without_computed(given)
        give_back()
        self.resume_state = ResumeState(lambda: execution.steps_made)
        if found := read_position(self.proto):
            position, steps_made = found
            execution.assign({}, steps_made=steps_made)
            self.resume_state.set(position)

    def _read(self) -> list[str]:
        """Reads steps, metadata and inputs from the model; returns the names of the entries."""
        self.steps = self._flat_steps()
        self._metadata = [training_metadata(self.proto, number) for number in self.entries]
        self.metadata_of_entries: Sequence[TrainingMetadata] = self._metadata
        self.metadata = self._metadata[0]
        unread = [value.name for value in self.proto.graph.input]  # by what a step computes
        weights = {name for each in self._metadata for name in each.sample_weights}
        lengths = {n: of for each in self._metadata for n, of in each.target_lengths.items()}
        known: dict[str, Any] = {"weights": weights, "lengths": lengths, "warns_of_unshifted": True}
        known["rows"] = row_axes_of_model(self.proto)
        self.inputs = Inputs(self.steps, unread, **known)
        self.declared = DeclaredShapes(self.proto, self.metadata, self.inputs)
        self._inputs = [Inputs([step], [*unread, *self.inputs], **known) for step in self.steps]
        for inputs in self._inputs:
            inputs.of_loss = self.inputs.of_loss
        self.steps, self.fronts = separate(self.steps, self.tables)  # after the inputs were read
        names = [self.names[number] for number in self.entries]
        labels = output_labels([step.outputs for step in self.steps], names)
        self.outputs = [label for own in labels for label in own.values()]
        return names

    def weighted(self, numbers: Sequence[int], *, by_label: bool) -> LoadedModel:
        """Returns the model on the same memory, with losses that have weights of rows.

        Args:
            numbers: The indices of the entries whose losses get them.
            by_label: See `ortops.engine.building.weighted.with_weights`.

        Raises:
            ArgumentError: If the loss of one of them has no weighted form that is known.
        """
        result = copy.copy(self)
        trained = {n: self.steps[self.loaded.index(n)].parameters for n in numbers}
        result.light = with_weights(self.light, trained, by_label=by_label)
        result.proto = result.light.proto
        result._read()
        result.execution = copy.copy(self.execution)
        return result

    def ready(self) -> Execution:
        """Returns the execution with the graphs of this model, not of the one with other losses."""
        if self.usage.light is not self.light:
            run_uninterrupted(functools.partial(self._open_again, {}))
        return self.execution

    def _flat_steps(self) -> list[Step]:
        """Returns a step for each entry."""
        return [
            flatten(
                self.light,
                number,
                counts=True,
                outputs=self._wanted_outputs,
                constants=self.usage.constants,
            )
            for number in self.loaded
        ]

    @changes("constants")
    def set_constants(self, arrays: Mapping[str, Array]) -> None:
        """Sets weights that are not trained to values that have been checked."""
        constants = self.usage.constants
        added = [name for name in arrays if name not in constants]
        if added:
            run_uninterrupted(functools.partial(self._make_inputs, added, arrays))
        self._assign(arrays)

    def _make_inputs(self, names: Sequence[str], arrays: Mapping[str, Array]) -> None:
        """Opens the steps again, with weights that are not trained as inputs."""
        before = list(self.usage.constants)
        self.usage.constants += names
        try:
            self._open_again({name: arrays[name] for name in names})
        except BaseException:
            self.usage.constants[:] = before
            raise
        tensors = {t.name: t for t in initializers(self.proto, initialization=False)}
        first = {n: functools.partial(self.light.array_of, tensors[n]) for n in names}
        self.given = self.given.joined(first)

    def _open_again(self, more: Mapping[str, Array]) -> None:
        """Opens the steps again, on memory with more variables."""
        steps, _ = separate(self._flat_steps(), self.tables)
        values = {name: array.copy() for name, array in self.arrays().items()}
        self.execution.adopt(self._open(steps, {**values, **more}))
        self.usage.light = self.light
        give_back()

    def _in_training_mode(self, recompute: Checkpoint | None) -> Checkpoint | None:
        """Replaces names of tensors by those of their copies in training mode."""
        if not isinstance(recompute, list | tuple):
            return recompute
        return [self.in_training_mode(name) for name in recompute]

    def in_training_mode(self, name: str) -> str:
        """Returns the name of a tensor in a step: of its copy in training mode, if it has one.

        Each entry has copies of its own; here, those of the first one count.
        """
        algorithm = self.proto.training_info[self.entries[0]].algorithm
        produced = {name for node in algorithm.node for name in node.output}
        copies = {source: copied for copied, source in self.metadata.training_copies.items()}
        # `copy_in_training_mode` appends "_training" to the name of a tensor.
        found = copies.get(name, f"{name}_training")
        return found if found in produced else name

    def _without_computed(self, given: Values) -> Values:
        """Returns the given values that `reset` needs; it computes others, like optimizer state.

        The data of these are then the current values.
        """
        anew = computed(self.proto, self.entries) & self.execution.variables.keys()
        execution = weakref.ref(self.execution)  # models that are garbage refer to the tensors

        def present(name: str) -> Array:
            alive = execution()
            assert alive is not None
            return alive.present(name)

        for tensor in initializers(self.proto, initialization=False):
            later = functools.partial(present, tensor.name)
            external.set_later(tensor, self.light.data, later if tensor.name in anew else None)
        return given.without(anew)

    @property
    def names(self) -> list[str]:
        """The names of all training_info entries of the model."""
        return entry_names(self.proto)

    @functools.cached_property
    def shared_metadata(self) -> TrainingMetadata:
        """The metadata, with the masters and averages of all entries in memory."""
        masters_of = [each.masters for each in self._metadata]
        averages_of = [each.averages for each in self._metadata]
        return dataclasses.replace(
            self._metadata[0],
            masters={name: master for found in masters_of for name, master in found.items()},
            averages={name: average for found in averages_of for name, average in found.items()},
        )

    def number_of(self, entry: int | str) -> int:
        """Returns the index of an entry in memory.

        Raises:
            ArgumentError: If the argument is neither an index nor a name.
            ModelError: If the model has no such entry.
            OrtopsError: If the session was opened without it.
        """
        number, names = entry_number(self.proto, entry), self.names
        if not 0 <= number < len(names):
            raise ModelError(f"model: it has no training_info entry {number}; it has {len(names)}")
        if number not in self.loaded:
            opened = ", ".join(f"'{names[each]}'" for each in self.loaded)
            raise OrtopsError(
                f"entry: the session runs only {opened}, not '{names[number]}'; open the model "
                "without entry="
            )
        return number

    def only(self, number: int) -> LoadedModel:
        """Returns the model on the same memory, with steps that run one of the entries.

        Args:
            number: The index of the entry.
        """
        result, index = copy.copy(self), self.loaded.index(number)
        result.entries, result.steps = [number], [self.steps[index]]
        result.metadata_of_entries = [self._metadata[index]]
        result.metadata, result.inputs = self._metadata[index], self._inputs[index]
        result.declared = DeclaredShapes(self.proto, result.metadata, result.inputs)
        result.outputs = list(self.steps[index].outputs)
        result.execution = self.execution.only(index)
        result.fronts = self.fronts.only(index)
        return result

    def arrays(self) -> dict[str, Array]:
        """Returns the memory of the variables, to be read while the lock is held."""
        return {name: self.execution.present(name) for name in self.execution.variables}

    def initial_values(self, number: int) -> dict[str, Callable[[], Array]]:
        """Runs the initialization graph of an entry; returns functions that return its values."""
        # For their shapes; `arrays` would refuse them after an update that failed.
        variables = {n: fetch(each.buffers[0]) for n, each in self.execution.variables.items()}
        return initial_values(self.light, number, variables, self.options)

    @property
    def loss(self) -> str:
        """The name of the loss of the first entry.

        Raises:
            OrtopsError: If the training algorithm has no loss.
        """
        if not self.steps[0].loss:
            raise OrtopsError("loss: the training algorithm has no output; run it with `step`")
        return self.steps[0].loss

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and, if there are several, of its summands.

        Raises:
            OrtopsError: If the training algorithm has no loss.

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> examples.session().loss_names()
            ['loss']
            >>> examples.session(loss=ortops.losses.L1("y") + ortops.losses.Huber("y")).loss_names()
            ['loss', 'loss_y', 'loss_y_1']
        """
        parts = [part.name for part in self.metadata.losses]
        several = [name for name in parts if name in self.outputs] if len(parts) > 1 else []
        return [self.loss, *several]

    @property
    def noted(self) -> list[str]:
        """The tensors of all loaded entries that `fit` reads in addition to outputs."""
        return [each.gradient_norm for each in self._metadata if each.gradient_norm]

    def norms(self) -> dict[str, str]:
        """Returns the tensors that are norms of gradients, by the names of their records."""
        names = (f"{self.names[number]}.gradient_norm" for number in self.entries[1:])
        pairs = zip(("gradient_norm", *names), self.metadata_of_entries, strict=True)
        return {name: each.gradient_norm for name, each in pairs if each.gradient_norm}

    def counts(self) -> list[str]:
        """Returns the output with the divisor of each of `loss_names`; "" for the batch size."""
        varying = {name for step in self.steps for name in step.varying}
        counts = {
            p.name: p.count for p in self.metadata.losses if not p.is_sum and p.count in varying
        }
        loss, *parts = self.loss_names()
        return ["" if parts else counts.get(loss, ""), *(counts.get(name, "") for name in parts)]

    def trained(self) -> dict[str, str]:
        """Returns the parameters, and the variables that hold their values."""
        wide = masters(self.shared_metadata, self.execution.variables)
        names = dict.fromkeys(name for step in self.steps for name in step.parameters)
        return {name: wide.get(name, name) for name in names}

    @property
    def state(self) -> State:
        """The variables by name; see `ortops.TrainingSession.state`."""
        scales = {each.loss_scale for each in self._metadata} - {""}
        hidden = self.usage.constants
        return State(
            *(self.execution, self.lock, self.shared_metadata, self.assign, scales, hidden)
        )

    @changes("state")
    def assign(self, arrays: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        """Sets variables to values that have been checked, and the number of steps."""
        self._assign(arrays, steps_made=steps_made)

    def _assign(self, arrays: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        self.usage.assigned += 1  # first: `saved_in` never names a file with other values
        self.usage.weights += not arrays.keys().isdisjoint(self.trained().values())
        self.execution.assign(arrays, steps_made=steps_made)
        if self.usage.on_assign is not None:
            self.usage.on_assign(arrays)

    @changes("free_memory")
    def free_memory(self) -> None:
        """Frees the memory that steps have taken; the variables stay.

        The next step takes longer, because its graph is made anew.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> _ = session.step(examples.BATCH)
            >>> session.free_memory()
            >>> session.step(examples.BATCH)["loss"]
            array(0.25, dtype=float32)
        """
        self.execution.free()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """A context at whose end the variables, the steps and the history are as before.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> with session.unchanged():
            ...     _ = session.fit(examples.BATCH, progress=False)
            >>> session.steps_done, session.history
            (0, [])
        """
        before, made = dict(self.state), self.execution.steps_made
        weights, properties = self.usage.weights, self.usage.properties
        position = self.resume_state.position
        try:
            yield
        finally:
            self.assign(before, steps_made=made)
            self.usage.weights, self.usage.properties = weights, properties
            self.resume_state.set(position)

    @property
    def steps_done(self) -> int:
        """The number of finished steps; see `ortops.TrainingSession.steps_done`."""
        with finished_at_exit, self.lock:
            if self.metadata.step not in self.execution.variables:
                return self.execution.steps_made
            return int(self.execution.present(self.metadata.step))

    def reset(self) -> None:
        """Returns to the start of training.

        As the standard defines it, all variables are set to their values in the given model, and
        then to the results of the initialization graph (optimizer state, step, learning rate).

        A session on a file keeps it open and reads the values from it again, instead of holding a
        second copy in memory. In the meantime another file may take its name, as with `save`. All
        values are read one at a time: first to check them, and then to set the variables.

        Raises:
            ModelError: If the file was changed in place; the session is left unchanged.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> losses = session.run_steps([examples.BATCH] * 5)
            >>> session.reset()
            >>> session.steps_done, session.state["w"].item()
            (0, 0.0)
        """
        state = self.state
        anew: dict[str, Callable[[], Array]] = {}
        for number in self.loaded:
            found = run_uninterrupted(functools.partial(self.initial_values, number))
            for name, read in found.items():
                if name in self.execution.variables:
                    anew[name] = functools.partial(_checked, state, name, read)
        values = self.given.joined(anew)
        for read in values.read.values():
            read()  # fails before anything is changed
        self.assign(values, steps_made=0)
        self.resume_state.set(None)

    def parameters(self) -> dict[str, Array]:
        """Returns copies of the trained parameters; see `ortops.TrainingSession.parameters`."""
        with finished_at_exit, self.lock:
            return {n: self.execution.present(v).copy() for n, v in self.trained().items()}

    def set_parameters(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        """Sets some of the trained parameters."""
        check_dict("parameters", arrays)
        trained = self.trained()
        for name in arrays:
            if name not in trained:
                raise UnknownVariableError(
                    f"parameters: '{name}' is not trained; " + did_you_mean(name, trained)
                )
        self.state.assign({trained[name]: array for name, array in arrays.items()})

    def check_schedule(self, where: str) -> None:
        """Raises an error if a schedule has no number of steps.

        Args:
            where: What needs it, for the message.

        Raises:
            OrtopsError: If `fit` has not set it.
        """
        for metadata in self.metadata_of_entries:
            name = metadata.schedule_steps
            if name in self.execution.variables and not int(self.execution.present(name)) > 0:
                raise OrtopsError(
                    f"{where}: the schedule {metadata.schedule} has no number of steps; fit sets "
                    f"it to those of the training. Or set session.state['{name}'], or build the "
                    "model with steps= of the schedule"
                )

    def set_learning_rate(self, value: float, factor: float = 1.0) -> None:
        """Sets the learning rate of the first entry, which a schedule multiplies by a factor."""
        kind = str(getattr(value, "dtype", type(value).__name__))
        rate = math.nan if kind.endswith("bool") else plain(value)
        if rate is None or not 0 <= rate / factor <= float(np.finfo(np.float32).max):
            raise ArgumentError(f"learning_rate must be a finite number >= 0, got {value!r:.80}")
        for name in self.learning_rates():
            self.state[name] = np.asarray(rate / factor, self.state[name].dtype)

    def learning_rates(self) -> list[str]:
        """Returns the variables that hold a learning rate of the first entry.

        Raises:
            OrtopsError: If there is none.
        """
        rates = list(dict.fromkeys(self.steps[0].learning_rates))
        if not rates:
            raise OrtopsError(
                "learning_rate: the training algorithm has no learning rate in an initializer; "
                "set the variables that it uses through `state`"
            )
        return rates


def _checked(state: State, name: str, read: Callable[[], Array]) -> Array:
    """Returns a value that a variable can have."""
    return state.check(name, read())


def _check_outputs(proto: onnx.ModelProto, outputs: Sequence[str]) -> None:
    """Rejects names that are not outputs of a model."""
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise ArgumentError(f"outputs must be a list of names, got {outputs!r:.80}")
    known = [value.name for value in proto.graph.output]
    for name in outputs:
        if name not in known:
            raise ArgumentError(
                f"outputs: the model has no output {name!r:.80}; {did_you_mean(name, known)}"
            )
