"""A trainable model in memory: what a training session, its evaluator and its file share."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.autodiff.rules import RULES
from ortops.errors import OrtopsError
from ortops.execution.execution import Execution
from ortops.execution.memory import give_back
from ortops.execution.onnxruntime_sessions import UpdateKernels
from ortops.execution.settings import Settings
from ortops.graph.convert import ModelLike
from ortops.graph.files import external
from ortops.graph.files.messages import initializers
from ortops.passes.rematerialization import Checkpoint
from ortops.trainable.initialization import initial_values
from ortops.trainable.metadata import LossPart, training_metadata
from ortops.trainable.step_graph import flatten
from ortops.training.data import rows
from ortops.training.feeds import Inputs
from ortops.training.gradients import Gradients, check_gradients, collect
from ortops.training.initial_values import (
    Values,
    all_entries,
    computed,
    copy_to_memory,
    given_values,
)
from ortops.training.position import ResumeState, read_position
from ortops.training.state import State, masters
from ortops.uninterrupted import finished_at_exit

__all__ = ["LoadedModel", "changes", "reads"]

Array: TypeAlias = npt.NDArray[Any]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_BETWEEN_PARTS = 0x5851F42D


class _Part(Protocol):
    """A session, or an object that it holds."""

    @property
    def _loaded(self) -> LoadedModel: ...


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
        def call(self: _Part, *args: Any, **kwargs: Any) -> Any:
            loaded = self._loaded
            with finished_at_exit, loaded.lock:
                before = loaded.operation
                try:  # nothing that a handler raises comes between these lines and the `finally`
                    if before and alone:
                        raise OrtopsError(
                            f"session: '{operation}' was called while '{before}' is in progress in "
                            "the same thread, as by a signal handler; call it after that has "
                            "returned"
                        )
                    loaded.operation = before or operation
                    return method(self, *args, **kwargs)
                finally:
                    loaded.operation = before

        return cast(_Method, call)

    return decorate


changes = functools.partial(_holding, alone=True)
reads = functools.partial(_holding, alone=False)


class LoadedModel:
    """A trainable model in memory, with the execution of its steps.

    Args:
        model: The model; not changed.
        entry: Which training_info entry a step runs; None for all of them in order.
        kernels: See `ortops.TrainingSession`, as for all other arguments.
        options: Options for the onnxruntime sessions.
        providers: Execution providers for the onnxruntime sessions.
        recompute: Which activations to keep.
        settings: How steps are executed.

    Attributes:
        proto: The light model.
        data: Its data.
        options: As given.
        providers: As given, with the default.
        entries: The training_info entries that a step runs.
        metadata: What the builder wrote about the model.
        steps: A step for each entry.
        inputs: The inputs that a batch fills.
        outputs: The names of the outputs of a step.
        execution: Holds the variables and makes the steps.
        given: The initial values that the initialization graph does not compute.
        resume_state: How far `fit` is.
        lock: Held while variables are read or changed.
        operation: The public method that holds the lock; "" if none does.
    """

    def __init__(
        self,
        model: ModelLike,
        entry: int | None,
        *,
        kernels: UpdateKernels,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any] | None,
        recompute: Checkpoint | None,
        settings: Settings | None,
    ) -> None:
        self.proto, self.data = copy_to_memory(model, entry)
        self.options = options
        self.providers = list(providers or ["CPUExecutionProvider"])
        self.entries = all_entries(self.proto) if entry is None else [entry]
        self.metadata = training_metadata(self.proto)
        self.steps = [
            flatten(self.proto, self.data, number, counts=True) for number in self.entries
        ]
        unread = [value.name for value in self.proto.graph.input]  # by what a step computes
        self.inputs = Inputs(self.steps, unread)
        self.outputs = [name for step in self.steps for name in step.outputs]
        self.lock = threading.RLock()
        self.operation = ""
        given = given_values(self.proto, self.data, self.steps, self.entries, self.metadata.masters)
        execution = self.execution = Execution(
            self.steps,
            given,
            RULES,
            kernels=kernels,
            settings=settings or Settings(),
            options=options,
            providers=self.providers,
            recompute=self._in_training_mode(recompute),
        )
        self.given = self._without_computed(given)
        give_back()
        self.resume_state = ResumeState(lambda: execution.steps_made)
        if found := read_position(self.proto):
            position, steps_made = found
            execution.assign({}, steps_made=steps_made)
            self.resume_state.set(position)

    def _in_training_mode(self, recompute: Checkpoint | None) -> Checkpoint | None:
        """Replaces names of tensors by those of their copies in training mode."""
        if not isinstance(recompute, list | tuple):
            return recompute
        nodes = (node for info in self.proto.training_info for node in info.algorithm.node)
        produced = {name for node in nodes for name in node.output}
        copies = {source: copy for copy, source in self.metadata.training_copies.items()}

        def copy_of(name: str) -> str:
            # `copy_in_training_mode` appends "_training" to the name of a tensor.
            copy = copies.get(name, f"{name}_training")
            return copy if copy in produced else name

        return [copy_of(name) for name in recompute]

    def _without_computed(self, given: Values) -> Mapping[str, Array]:
        """Returns the given values that `reset` needs; it computes others, like optimizer state.

        The data of these are then the present values.
        """
        anew = computed(self.proto, self.entries) & self.execution.variables.keys()
        execution = weakref.ref(self.execution)  # models that are garbage refer to the tensors

        def present(name: str) -> Array:
            alive = execution()
            assert alive is not None
            return alive.present(name)

        for tensor in initializers(self.proto, initialization=False):
            later = functools.partial(present, tensor.name)
            external.set_later(tensor, self.data, later if tensor.name in anew else None)
        return given.without(anew)

    def arrays(self) -> dict[str, Array]:
        """Returns the memory of the variables, to be read while the lock is held."""
        return {name: self.execution.present(name) for name in self.execution.variables}

    def initial_values(self, number: int) -> dict[str, Array]:
        """Runs the initialization graph of a training_info entry."""
        return initial_values(
            self.proto, self.data, number, self.arrays(), self.options, self.providers
        )

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
        """Returns the names of the loss, and of its parts if there are several."""
        parts = [part.name for part in self.metadata.losses]
        several = [name for name in parts if name in self.outputs] if len(parts) > 1 else []
        return [self.loss, *several]

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
        wide = masters(self.metadata, self.execution.variables)
        names = dict.fromkeys(name for step in self.steps for name in step.parameters)
        return {name: wide.get(name, name) for name in names}

    def learning_rates(self) -> list[str]:
        """Returns the variables that hold a learning rate.

        Raises:
            OrtopsError: If there is none.
        """
        rates = list(dict.fromkeys(name for step in self.steps for name in step.learning_rates))
        if not rates:
            raise OrtopsError(
                "learning_rate: the training algorithm has no learning rate in an initializer; "
                "set the variables that it uses through `state`"
            )
        return rates

    def differentiate(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
        *,
        rank: int,
        state: State,
    ) -> Gradients:
        """Computes the gradients of a batch; see `ortops.TrainingSession.gradients`.

        Args:
            feeds: The batch, checked.
            outputs: The outputs to compute besides the loss; None for all of them.
            after: The gradients of the previous part of the batch.
            rank: The number of this process among those that train together.
            state: The variables.
        """
        (step, *others), metadata = self.steps, self.metadata
        instead: dict[str, Array] = {}
        part = 0
        if after is not None:
            part = after.part + 1
            statistics = after.statistics.items()
            instead = {n: state.check(n, a) for n, a in statistics if n in state}
        if step.seed and (part or rank):  # parts are far from the seeds that ranks have
            seed = int(self.execution.present(step.seed)) + part * _BETWEEN_PARTS + rank
            instead[step.seed] = np.array(seed % 2**32, np.int64)
        parts = [p for p in metadata.losses if p.name in step.outputs] if not others else []
        parts = parts or [LossPart(name=step.loss)] * bool(step.loss)
        chosen = [*step.outputs] if outputs is None else list(outputs)
        read = [step.loss, *(name for p in parts for name in (p.name, p.count))]
        wanted = dict.fromkeys((*chosen, *(name for name in read if name)))
        found = self.execution.gradients(feeds, list(wanted), instead)
        moved = next((name for name in step.updates if name in found.carried), "")
        couples = moved and (
            f"the batch updates the running statistic '{moved}', as in BatchNormalization, where "
            "the loss of a row depends on other rows"
        )
        return collect(
            found, step.loss, parts, rows(feeds), shown=chosen, couples=couples, part=part
        )

    def update(self, gradients: Mapping[str, npt.ArrayLike], state: State) -> None:
        """Applies gradients; see `ortops.TrainingSession.apply`."""
        split = self.execution.split_step()
        arrays = check_gradients(gradients, split.layout)
        carried: dict[str, Array] = {}
        given = gradients.statistics if isinstance(gradients, Gradients) else {}
        for name in split.carried:
            if name in self.execution.variables:
                if name in given:
                    carried[name] = state.check(name, given[name])
            elif name in given:
                carried[name] = np.require(given[name], requirements=["C", "A"])
            else:
                raise OrtopsError(
                    f"gradients: the update also reads '{name}' of the batch; pass what "
                    "`gradients` returned"
                )
        self.execution.apply(arrays, carried)
