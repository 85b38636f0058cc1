"""TrainingSession: runs the training_info of a model on onnxruntime."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from ortops import metrics as metric_functions
from ortops.arguments import renamed
from ortops.autodiff.rules import RULES
from ortops.errors import (
    FeedError,
    OrtopsError,
    UnknownVariableError,
    did_you_mean,
)
from ortops.execution.execution import Execution
from ortops.execution.memory import give_back
from ortops.execution.onnxruntime_sessions import UpdateKernels
from ortops.execution.settings import Settings
from ortops.garbage_collection import collection_put_off
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.files import external, saving
from ortops.graph.files.json_metadata import remove_note
from ortops.graph.limits import LIMITS
from ortops.inference import InferenceSession
from ortops.lowering import TRAINING_DOMAIN, has_domain, to_proto
from ortops.metrics import Metric, StreamingMetric
from ortops.passes.rematerialization import Checkpoint
from ortops.trainable.initialization import initial_values
from ortops.trainable.metadata import METADATA_KEY, LossPart, TrainingMetadata, training_metadata
from ortops.trainable.step_graph import evaluation_model, flatten
from ortops.trainable.training_mode import write_inference_mode
from ortops.trainable.write_back import write_back, write_values
from ortops.training.callback import Callback
from ortops.training.data import Data, Feeds, open_data, rows
from ortops.training.evaluation import (
    Evaluation,
    MetricBinding,
    bind_metric,
    measure,
    numbers_of,
    predict,
)
from ortops.training.feeds import Inputs
from ortops.training.fitting import StepStrategy, fit
from ortops.training.fitting import check as check_arguments
from ortops.training.gradients import Gradients, check_gradients, collect
from ortops.training.history import History
from ortops.training.initial_values import (
    Values,
    all_entries,
    computed,
    copy_to_memory,
    given_values,
    initializers,
)
from ortops.training.position import POSITION_KEY, FitArguments, ResumeState, read_position
from ortops.training.state import State, masters
from ortops.uninterrupted import finished_at_exit, run_uninterrupted

__all__ = ["TrainingSession"]

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_Method = TypeVar("_Method", bound=Callable[..., Any])

_STEPS_IN_A_RUN = 64
_BETWEEN_PARTS = 0x5851F42D

_EVALUATIONS = 8
"""How many graphs of tensors to evaluate or predict are kept."""

_NAMES = {
    "_apply": "apply",
    "_assign": "state",
    "_gradients": "gradients",
    "_reduced_step": "step",
    "_run_evaluation": "evaluate",
    "_several_steps": "run_steps",
    "_step": "step",
    "_write": "save",
}
"""What methods are called by those who use them."""


def _holding(*, alone: bool) -> Callable[[_Method], _Method]:
    """Makes a method hold the session's lock, and no change come between its lines.

    Another thread waits. A signal handler, which runs in the thread that it interrupts, gets an
    error where it calls what changes the session.

    Args:
        alone: Whether the method is such a change.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: TrainingSession, *args: Any, **kwargs: Any) -> Any:
            with finished_at_exit, self._lock:
                before = self._under_way
                try:  # nothing that a handler raises comes between these lines and the `finally`
                    if before and alone:
                        raise OrtopsError(
                            f"session: '{_NAMES[method.__name__]}' was called while "
                            f"'{before}' is under way in the same thread, as by a signal handler; "
                            "call it when that has returned"
                        )
                    self._under_way = before or _NAMES[method.__name__]
                    return method(self, *args, **kwargs)
                finally:
                    self._under_way = before

        return cast(_Method, call)

    return decorate


_alone, _together = _holding(alone=True), _holding(alone=False)


class TrainingSession:
    """Runs the training algorithm of a trainable model.

    Args:
        model: A trainable model (see `ortops.build_training_model`): a ModelProto, its bytes or its
            path. It is not changed.
        kernels: ``"onnx"`` runs updates as standard operators, ``"python"`` as Python custom ops,
            ``"compiled"`` in one pass over memory each, by machine code that numba makes of their
            formula (``pip install ortops[compiled]``); see `compiled`.
        entry: Which training_info entry a step runs; all of them in order by default.
        sess_options: Options for the onnxruntime sessions.
        providers: Execution providers for the onnxruntime sessions. Where the first one that this
            build of onnxruntime has is CUDA, TensorRT, DirectML or CANN, variables lie in the
            memory of its device, and steps fetch only what they show. None of these has been run:
            there was no such device, and tests have the CPU's memory in its place.
        recompute: Activation checkpointing: trades compute for memory by recomputing activations.
            The names of the activations to keep, or how many to choose automatically: small
            tensors that the whole forward pass goes through, with equal amounts of memory between
            them. ``"sqrt"`` chooses the square root of their number, which is a good choice for a
            deep model. The backward pass recomputes all other activations. Results stay the same
            up to rounding. By default, all activations are kept.
        settings: How steps are executed, for measurements and tests; numbers do not change, but for
            rounding.
        checkpoint: The former name of ``recompute``, which is deprecated.

    Raises:
        ArgumentError: If ``recompute`` is not valid, or ``checkpoint`` is given, too.
        ModelError: If the model has no training_info, it is not legal, or ``recompute`` names a
            tensor that the model does not compute.
        OrtopsError: If numba is missing and ``kernels`` needs it.
        UnsupportedError: If an operator that a gradient passes through has no rule, or a device
            has no memory for the variables.

    Example:
        >>> import ortops
        >>> from ortops import Tape
        >>> with Tape(name="linear") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 1])
        ...     y = tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
        >>> model = ortops.build_training_model(
        ...     tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.25))
        >>> session = TrainingSession(model)
        >>> batch = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
        >>> [round(float(session.step(batch)["loss"]), 3) for _ in range(3)]
        [1.0, 0.25, 0.062]
        >>> session.state["w"]
        array([[0.875]], dtype=float32)

        With less memory, as only the activation "y" is kept:

        >>> frugal = TrainingSession(model, recompute=["y"])
        >>> [round(float(frugal.step(batch)["loss"]), 3) for _ in range(3)]
        [1.0, 0.25, 0.062]
    """

    @convert.blame_model
    @finished_at_exit
    @collection_put_off()
    def __init__(
        self,
        model: ModelLike,
        *,
        kernels: UpdateKernels = "onnx",
        entry: int | None = None,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        recompute: Checkpoint | None = None,
        settings: Settings | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        if checkpoint is not None:
            recompute = renamed("recompute", recompute, "checkpoint", checkpoint, stacklevel=6)
        self._proto, self._data = copy_to_memory(model, entry)
        self._options = sess_options
        self._providers = list(providers or ["CPUExecutionProvider"])
        self._entries = all_entries(self._proto) if entry is None else [entry]
        self.metadata = training_metadata(self._proto)
        self._steps = [
            flatten(self._proto, self._data, number, counts=True) for number in self._entries
        ]
        unread = [value.name for value in self._proto.graph.input]  # by what a step computes
        self._inputs = Inputs(self._steps, unread)
        self._outputs = [name for step in self._steps for name in step.outputs]
        self._rank = 0  # among the sessions that one is joined with
        self._under_way = ""
        self._said_to_lower = False
        self._evaluations: dict[tuple[tuple[str, ...], bool], Evaluation] = {}
        self._lock = threading.RLock()
        given = given_values(
            self._proto, self._data, self._steps, self._entries, self.metadata.masters
        )
        self._execution = Execution(
            self._steps,
            given,
            RULES,
            kernels=kernels,
            settings=settings or Settings(),
            options=sess_options,
            providers=self._providers,
            recompute=self._training_copies(recompute),
        )
        self._given = self._kept(given)
        give_back()
        execution = self._execution  # and not the session, which would never be free
        self.resume_state = ResumeState(lambda: execution.steps_made)
        self._saved: tuple[str, int, FitArguments | None] | None = None
        if found := read_position(self._proto):
            position, steps_made = found
            self._assign({}, steps_made=steps_made)
            self.resume_state.set(position)

    @property
    def compiled(self) -> tuple[str, ...]:
        """The variables whose updates are compiled: none but with ``kernels="compiled"``.

        Steps give the same bits with them as with ``kernels="onnx"``. Those of other variables are
        standard operators: the update does not work element by element, as Muon's of a matrix, or
        it has an operator that is not exact, as Exp; the logger ``"ortops"`` tells why at its level
        INFO.

        Example:
            >>> from models import line
            >>> line.session().compiled
            ()
        """
        return self._execution.compiled

    # ------------------------------------------------------------------------------- training

    def step(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        reduce: Callable[[Gradients], object] | None = None,
    ) -> dict[str, Array]:
        """Makes one training step.

        Args:
            feeds: A batch: an array for each input of the model and of the loss, by name, or in a
                tuple, those of the model first.
            outputs: Which outputs to return; all by default.
            reduce: Is given the gradients before they are applied, and may change them in place,
                with their loss and running statistics: to average them with those of other
                workers, for example. It may read the session and not change it.

        Returns:
            The loss, and the outputs of the model that it was computed from, by name; one that
            BatchNormalization or Dropout makes different in training is ``<name>_training``.

        Raises:
            FeedError: If the feeds do not fit; then nothing has changed.
            KernelError: If a kernel failed; then nothing has changed.
            OrtopsError: If there is no such output, or what ``reduce`` left is no gradient.
            UnsupportedError: If ``reduce`` is given and the step has no gradients (see
                `gradients`).
            Exception: Whatever ``reduce`` raises; then nothing has changed.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> {name: array.item() for name, array in session.step(line.BATCH).items()}
            {'loss': 1.0, 'y': 0.0}
            >>> session.step(line.BATCH, outputs=["loss"])
            {'loss': array(0.25, dtype=float32)}
        """
        self._check_outputs(outputs)
        if reduce is not None and not callable(reduce):
            raise OrtopsError(f"reduce is {reduce!r:.80}; a function of gradients is accepted")
        if reduce is None:
            return self._step(self._inputs.check(feeds), outputs)
        return self._reduced_step(self._inputs.check(feeds), outputs, reduce)

    def _check_outputs(self, outputs: Sequence[str] | None) -> None:
        if isinstance(outputs, str) or not isinstance(outputs, Iterable | None):
            raise OrtopsError(f"outputs is {outputs!r}; a list of names is accepted")
        for name in outputs or ():
            if name not in self._outputs:
                raise OrtopsError(
                    f"outputs: there is no output '{name}'; " + did_you_mean(name, self._outputs)
                )

    def gradients(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        after: Gradients | None = None,
    ) -> Gradients:
        """Computes the gradients of a batch in training mode, and changes nothing.

        ``apply(gradients(feeds))`` is ``step(feeds)``, bit for bit.

        Args:
            feeds: A batch, as for `step`.
            outputs: Which outputs to compute besides the loss; all by default.
            after: The gradients of the part before this one, where a batch is given in parts that
                are to be applied together (see `ortops.training.gradients.Accumulation`). Running
                statistics go on from it, and Dropout draws anew.

        Returns:
            The gradients by parameter, with the loss, what it was divided by, the outputs and the
            running statistics of this batch.

        Raises:
            FeedError: If the feeds do not fit.
            KernelError: If a kernel failed.
            OrtopsError: If there is no such output.
            UnsupportedError: If the training algorithm has no Gradient node of what it updates, or
                a step runs several training_info entries.

        Example:
            >>> import ortops
            >>> from ortops import Tape
            >>> with Tape(name="linear") as tape:
            ...     x = tape.input("x", np.float32, ["batch", 1])
            ...     y = tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
            >>> model = ortops.build_training_model(
            ...     tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.25))
            >>> session = TrainingSession(model)
            >>> batch = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
            >>> gradients = session.gradients(batch)
            >>> gradients["w"], gradients.loss, session.steps_done
            (array([[-2.]], dtype=float32), 1.0, 0)
            >>> session.apply(gradients)
            >>> session.state["w"], session.steps_done
            (array([[0.5]], dtype=float32), 1)
        """
        self._check_outputs(outputs)
        if after is not None and not isinstance(after, Gradients):
            raise OrtopsError(
                f"gradients: after is {after!r:.80}; what `gradients` returned is accepted"
            )
        return self._gradients(self._inputs.check(feeds), outputs, after)

    @_alone
    def _gradients(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
    ) -> Gradients:
        return self._differentiate(feeds, outputs, after)

    def _differentiate(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None = None,
    ) -> Gradients:
        (step, *others), metadata = self._steps, self.metadata
        instead: dict[str, Array] = {}
        part = 0 if after is None else after.part + 1
        if after is not None:
            state = self.state
            statistics = after.statistics.items()
            instead = {n: state.check(n, a) for n, a in statistics if n in state}
        if step.seed and (part or self._rank):  # parts are far from the seeds that ranks have
            seed = int(self._execution.present(step.seed)) + part * _BETWEEN_PARTS + self._rank
            instead[step.seed] = np.array(seed % 2**32, np.int64)
        parts = [p for p in metadata.losses if p.name in step.outputs] if not others else []
        parts = parts or [LossPart(name=step.loss)] * bool(step.loss)
        chosen = [*step.outputs] if outputs is None else list(outputs)
        read = [step.loss, *(name for p in parts for name in (p.name, p.count))]
        wanted = dict.fromkeys((*chosen, *(name for name in read if name)))
        found = self._execution.gradients(feeds, list(wanted), instead)
        moved = [name for name in step.updates if name in found.carried]
        couples = (
            f"the batch sets the running statistic '{moved[0]}', as BatchNormalization does, whose "
            "rows take part in each other's loss"
            if moved
            else ""
        )
        return collect(
            found, step.loss, parts, rows(feeds), shown=chosen, couples=couples, part=part
        )

    def apply(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Makes the update of given gradients: what is left of a step behind them.

        Parameters, optimizer state, ``step`` and the scale of the loss change as in `step`, and
        running statistics become those that the gradients come with.

        Args:
            gradients: What `gradients` returned, of this session or of another one of the same
                model; or a dict of an array for each parameter (float32 where it has 16 bits), with
                which running statistics stay as they are.

        Raises:
            KernelError: If a kernel failed, as in `step`.
            OrtopsError: If the gradients are not those of the parameters; then nothing has changed.
            UnsupportedError: See `gradients`.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> gradients = session.gradients(line.BATCH)
            >>> session.apply({"w": gradients["w"] * 2})  # SGD with rate 0.25: 0 - 0.25 · 2 · -2
            >>> session.state["w"].item()
            1.0
        """
        self._apply(gradients)

    @_alone
    def _apply(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        self._update(gradients)

    def _update(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        split = self._execution.split_step()
        arrays = check_gradients(gradients, split.layout)
        carried: dict[str, Array] = {}
        given = gradients.statistics if isinstance(gradients, Gradients) else {}
        for name in split.carried:
            if name in self._execution.variables:
                if name in given:
                    carried[name] = self.state.check(name, given[name])
            elif name in given:
                carried[name] = np.require(given[name], requirements=["C", "A"])
            else:
                raise OrtopsError(
                    f"gradients: the update reads '{name}' of the batch, too; give what "
                    "`gradients` returned"
                )
        self._execution.apply(arrays, carried)

    @_alone
    def _reduced_step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        reduce: Callable[[Gradients], object],
    ) -> dict[str, Array]:
        gradients = self._differentiate(feeds, outputs)
        reduce(gradients)
        self._update(gradients)
        chosen = self._outputs if outputs is None else outputs
        return {n: a for n, a in gradients.outputs.items() if n in chosen}

    @_alone
    def _step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        note: Callable[[Mapping[str, Array]], object] | None = None,
    ) -> dict[str, Array]:
        return self._execution.step(feeds, outputs, note)

    @_alone
    def _several_steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        return self._execution.steps(feeds, count)

    def run_steps(self, batches: Iterable[Feeds]) -> Array:
        """Makes a training step with each of several batches.

        A small model makes them in one call of onnxruntime, which saves what a call costs: up to
        64 steps at a time, as long as their batches are of the same shapes. The numbers are those
        of `step`.

        Args:
            batches: The batches, each as `step` takes it.

        Returns:
            The loss of each step.

        Raises:
            FeedError: If a batch does not fit; then the steps of those before it may have been
                made, as `steps_done` tells.
            KernelError: If a kernel failed; the same holds.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.run_steps([line.BATCH] * 3)
            array([1.    , 0.25  , 0.0625], dtype=float32)
        """
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise FeedError(
                f"batches: {type(batches).__name__} was given; give an iterable of batches, each a "
                "dict or tuple of an array for each input"
            )
        loss = self._loss()
        losses: list[Array] = []
        with finished_at_exit, self._lock:
            at_once = _STEPS_IN_A_RUN if self._execution.repeatable else 1
            checked: Iterator[dict[str, Array]] = (self._inputs.check(feeds) for feeds in batches)
            if at_once > 1:  # copies: what gives the batches may fill the same memory again
                checked = ({name: array.copy() for name, array in b.items()} for b in checked)
            for _, alike in itertools.groupby(checked, key=_shapes):
                while group := list(itertools.islice(alike, at_once)):
                    if len(group) > 1:
                        stacks = {name: np.stack([b[name] for b in group]) for name in group[0]}
                        losses.append(
                            numbers_of(self._several_steps(stacks, len(group)), len(group))
                        )
                    else:
                        losses += [numbers_of(self._step(b, [loss])[loss], 1) for b in group]
        return np.concatenate(losses) if losses else np.zeros(0, np.float32)

    def fit(
        self,
        data: Data,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        validation: Data | None = None,
        metrics: Sequence[str | Metric] = (),
        schedule: Callable[[float], float] | None = None,
        callbacks: Sequence[Callback] = (),
        accumulate: int = 1,
        prefetch: int = 0,
        resume: bool = False,
        progress: bool = True,
        stop_on_nan: bool = True,
    ) -> History:
        """Trains on a data set.

        The order of the rows is determined by the seed and the number of finished steps. A training
        that ends before it is done, by a signal, an error or a callback, or whose process is killed
        after the session was saved, goes on with ``resume=True``, in the middle of an epoch too, as
        if it had never stopped: `save` writes how far it is beside the weights. `reset` forgets it.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end the training after the step that
        is being made, and at once while `fit` waits for data or evaluates; then the callbacks are
        told of its end, a message says how to go on, and KeyboardInterrupt or SystemExit (of status
        143 or 129) is raised. Batches that were accumulated for a step that is not made are read
        again by ``resume=True``. A second signal does at once what it always does. All this where
        `fit` runs in the main thread and the program has no handler of its own, which else is
        called as ever: what it raises arrives at once, and leaves a whole step.

        Args:
            data: In any form that `ortops.training.data.open_data` takes: an array for each input,
                a tuple of arrays, a table, samples, an iterable of batches (a list, or anything
                that can be iterated over once for each epoch), or a function that returns one.
            epochs: How many times to go through the data, with ``resume=True`` the begun times
                included: a larger number than before prolongs the training.
            batch_size: Rows in a batch, where rows are given.
            shuffle: Whether to shuffle the rows before each epoch, where rows are given.
            seed: Determines the order.
            validation: A data set to evaluate after each epoch.
            metrics: What to compute on it besides the loss (see `ortops.metrics`).
            schedule: Gives the learning rate of an epoch from the share of ``epochs`` that are done
                (0 in the first); without it the learning rate stays as it is, or follows the
                schedule in the model's graph.
            callbacks: What is told of each step, each epoch and the end (see `ortops.callbacks`).
            accumulate: How many batches make one step, that of all their rows. At the end of an
                epoch it may be fewer.
            prefetch: How many batches a thread reads ahead.
            resume: Whether to go on with what an earlier call began. What determines the rows of a
                step has to be the same: ``seed``, ``shuffle``, ``batch_size``, ``accumulate`` and
                the number of rows and batches. ``epochs`` may be another, at least as many as were
                begun; a schedule in the model's graph keeps its last rate once its steps are over.
                It begins where nothing was begun, and where all was done it returns the history at
                once. Batches of an iterable that were seen are read again and left out.
            progress: Whether to show a line for each epoch on standard error: in a terminal and in
                a notebook it moves, elsewhere it is written when the epoch is done.
            stop_on_nan: Whether to stop at a loss that is NaN or infinite. A step that float16 has
                skipped, as its gradients overflowed, is none (see `build_training_model`), unless
                no scale of the loss keeps them finite.

        Returns:
            For each epoch a dict: ``loss`` is the average over its rows, as is ``loss_<name>`` of
            each summand of a sum of losses (where labels are ignored or weighted, over those that
            count, and NaN if none does); ``validation_loss`` and ``validation_<metric>`` are
            those of the validation data; ``learning_rate``, ``steps`` and ``seconds`` say what it
            took (see `ortops.training.history.History`).

        Raises:
            DivergedError: If the loss of a step is NaN or infinite; the step has been made. Or if
                the gradients of float16 are, at the smallest scale of the loss.
            FeedError: If the data do not fit the model.
            KernelError: If a kernel failed.
            OrtopsError: If an argument is not accepted, or is not that of the training to resume.
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM or SIGHUP.

        Example:
            >>> import ortops
            >>> from ortops import Tape
            >>> with Tape(name="linear") as tape:
            ...     x = tape.input("x", np.float32, ["batch", 1])
            ...     y = tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
            >>> session = TrainingSession(ortops.build_training_model(
            ...     tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.25)))
            >>> rows = {"x": np.ones((8, 1), np.float32), "targets": np.ones((8, 1), np.float32)}
            >>> history = session.fit(rows, epochs=3, batch_size=8, progress=False)
            >>> [round(loss, 3) for loss in history.columns["loss"]]
            [1.0, 0.25, 0.062]
        """
        numbers: dict[str, tuple[object, int]] = {
            "epochs": (epochs, 0),
            "seed": (seed, 0),
            "accumulate": (accumulate, 1),
        }
        check_arguments(
            self,
            numbers=numbers,
            validation=validation,
            switches={
                "shuffle": shuffle,
                "resume": resume,
                "progress": progress,
                "stop_on_nan": stop_on_nan,
            },
            metrics=metrics,
            schedule=schedule,
            callbacks=callbacks,
        )
        epochs = int(epochs)
        source = open_data(
            data, self._inputs, batch_size=batch_size, epochs=epochs, prefetch=prefetch
        )
        if validation is not None:
            validation = open_data(validation, self._inputs, batch_size=batch_size, epochs=epochs)
        call = FitArguments(
            epochs=epochs,
            batch_size=int(batch_size),
            shuffle=bool(shuffle),
            seed=int(seed),
            accumulate=int(accumulate),
            rows=source.rows,
            batches=source.batches,
        )
        return fit(
            self,
            self._step_strategy(),
            source,
            call=call,
            validation=validation,
            metrics=metrics,
            schedule=schedule,
            callbacks=callbacks,
            progress=progress,
            stop_on_nan=stop_on_nan,
            resume=resume,
        )

    def _step_strategy(self) -> StepStrategy:
        """Returns how `fit` makes steps."""
        return StepStrategy(self._step, self._gradients, self._counts())

    def _counts(self) -> list[str]:
        """Returns, for each of `loss_names`, the output that tells how much counts, if one does."""
        varying = {name for step in self._steps for name in step.varying}
        counts = {
            p.name: p.count for p in self.metadata.losses if not p.is_sum and p.count in varying
        }
        loss, *parts = self.loss_names()
        return ["" if parts else counts.get(loss, ""), *(counts.get(name, "") for name in parts)]

    @property
    def inputs(self) -> Inputs:
        """What a batch fills: inputs of the model and of the loss, by name.

        Example:
            >>> from models import line
            >>> sorted(line.session().inputs)
            ['targets', 'x']
        """
        return self._inputs

    @property
    def history(self) -> History:
        """The epochs of the last `fit`, also where it was made before the file was saved.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> _ = session.fit(line.BATCH, epochs=2, progress=False)
            >>> [epoch["loss"] for epoch in session.history]
            [1.0, 0.25]
        """
        position = self.resume_state.position
        return History() if position is None else position.epoch_state.history

    @property
    def saved_in(self) -> str:
        """The file that the present state was saved in last; "" if it was not saved.

        A step, a variable that is set and a new `fit` each make another state of it.

        Example:
            >>> import tempfile
            >>> from models import line
            >>> session = line.session()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     session.save(f"{folder}/line.onnx")
            ...     session.saved_in == f"{folder}/line.onnx"
            True
            >>> first = session.step(line.BATCH)
            >>> session.saved_in
            ''
        """
        saved = self._saved
        if saved is None:
            return ""
        path, steps, call = saved
        is_present = steps == self._execution.steps_made and call is self._fit_arguments()
        return path if is_present else ""

    def _fit_arguments(self) -> FitArguments | None:
        """Returns what the last `fit` was given, if there was one."""
        position = self.resume_state.position
        return None if position is None else position.epoch_state.call

    def evaluate(
        self,
        data: Data,
        *,
        batch_size: int = 256,
        metrics: str | Metric | Sequence[str | Metric] = (),
        ema: bool = False,
    ) -> dict[str, float]:
        """Computes the loss, and metrics, in inference mode, and changes nothing.

        Batch by batch: nothing is kept of a batch but what a metric keeps.

        Args:
            data: As for `fit`: arrays for each input of the model and of the loss, or batches.
            batch_size: Rows in a batch, where rows are given.
            metrics: What to compute besides the loss: names, objects and functions (see
                `ortops.metrics`). They look at what the loss looks at, or at any tensor of the
                model.
            ema: Whether parameters are their averages (``ema_decay=`` of
                `ortops.build_training_model`).

        Returns:
            ``loss``, as if all batches were one (averaged over the rows, for a function of one's
            own that returns no count; NaN if no label counts); where it is a sum of losses, each as
            ``loss_<name>``; and the metrics by name.

        Raises:
            FeedError: If the data do not fit the model.
            ModelError: If there are no averages.
            OrtopsError: If a metric does not fit what it compares.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.evaluate(line.BATCH, metrics=["mean_absolute_error"])
            {'loss': 1.0, 'mean_absolute_error': 1.0}
        """
        bindings = self._metric_bindings(metric_functions.resolve(metrics))
        self.loss_names()
        tensors = tuple(dict.fromkeys(each.note.tensor for each in bindings.values()))
        evaluation = self._evaluation(tensors, loss=True)
        source = open_data(data, evaluation.inputs, batch_size=batch_size)
        return measure(source.epoch(), evaluation, self._runner(evaluation, ema), bindings)

    @overload
    def predict(
        self, data: Data, *, batch_size: int = ..., outputs: str, ema: bool = ...
    ) -> Array: ...

    @overload
    def predict(
        self,
        data: Data,
        *,
        batch_size: int = ...,
        outputs: Sequence[str] | None = ...,
        ema: bool = ...,
    ) -> dict[str, Array]: ...

    def predict(
        self,
        data: Data,
        *,
        batch_size: int = 256,
        outputs: str | Sequence[str] | None = None,
        ema: bool = False,
    ) -> Array | dict[str, Array]:
        """Computes tensors of the model for all rows, in inference mode, and changes nothing.

        Args:
            data: As for `fit`, of the inputs that the tensors depend on; others, such as labels,
                may be left out.
            batch_size: Rows in a batch, where rows are given.
            outputs: Names of tensors of the model, outputs or not; all outputs by default. A
                ZipMap's maps are the tensor that they are made of.
            ema: Whether parameters are their averages (``ema_decay=`` of
                `ortops.build_training_model`).

        Returns:
            An array for each name, the batches one after the other along axis 0; one array where
            ``outputs`` is one name.

        Raises:
            FeedError: If the data do not fit the model.
            ModelError: If there are no averages.
            OrtopsError: If there is no such tensor, or its axis 0 has not the rows of a batch.

        Example:
            >>> import ortops
            >>> from ortops import Tape
            >>> with Tape(name="double") as tape:
            ...     x = tape.input("x", np.float32, ["batch", 1])
            ...     w = tape.initializer("w", np.full((1, 1), 2, np.float32))
            ...     y = tape.output(x @ w, "y")
            >>> session = TrainingSession(ortops.build_training_model(
            ...     tape.model(), loss="MeanSquaredError", optimizer="SGD"))
            >>> session.predict({"x": np.ones((3, 1), np.float32)}, batch_size=2, outputs="y")
            array([[2.],
                   [2.],
                   [2.]], dtype=float32)
        """
        names = [outputs] if isinstance(outputs, str) else outputs
        if names is None:
            names = [value.name for value in self._proto.graph.output]
        if not names or not all(isinstance(name, str) for name in names):
            raise OrtopsError(
                f"outputs is {outputs!r}; the name of a tensor, or a list of some, is accepted"
            )
        evaluation = self._evaluation(tuple(dict.fromkeys(names)), loss=False)
        source = open_data(data, evaluation.inputs, batch_size=batch_size)
        found = predict(source.epoch(), evaluation, self._runner(evaluation, ema))
        return found[outputs] if isinstance(outputs, str) else found

    def _evaluation(self, tensors: tuple[str, ...], *, loss: bool) -> Evaluation:
        """Returns what computes tensors, and the loss; made once."""
        key = (tensors, loss)
        if key not in self._evaluations:
            made = run_uninterrupted(lambda: self._build_evaluation(tensors, loss=loss))
            while len(self._evaluations) >= _EVALUATIONS:
                self._evaluations.pop(next(iter(self._evaluations)), None)
            self._evaluations[key] = made
            return made
        return self._evaluations[key]

    def _runner(
        self, evaluation: Evaluation, ema: bool
    ) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        if ema:
            self.metadata.averaged(self._arrays())  # refuses before the first batch
        return lambda feeds: self._run_evaluation(evaluation, feeds, ema)

    @_together
    def _run_evaluation(
        self, evaluation: Evaluation, feeds: Mapping[str, Array], ema: bool
    ) -> dict[str, Array]:
        self._execution.check_process()
        arrays = self.metadata.averaged(self._arrays()) if ema else self._arrays()
        return evaluation.run({**evaluation.constants, **arrays, **feeds})

    def _loss(self) -> str:
        """Returns the name of the loss, that of the first entry."""
        if not self._steps[0].loss:
            raise OrtopsError(
                "loss: the training algorithm has no output; it can be run with `step`"
            )
        return self._steps[0].loss

    def loss_names(self) -> list[str]:
        """Returns the names of the loss, and of its parts where there are several.

        Raises:
            OrtopsError: If the training algorithm has no loss.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.loss_names()
            ['loss']
            >>> import ortops
            >>> line.session(loss=ortops.losses.L1("y") + ortops.losses.Huber("y")).loss_names()
            ['loss', 'loss_y', 'loss_y_1']
        """
        parts = [part.name for part in self.metadata.losses]
        several = [name for name in parts if name in self._outputs] if len(parts) > 1 else []
        return [self._loss(), *several]

    def target(self, metrics: Mapping[str, StreamingMetric]) -> str:
        """Returns the input that the first of some metrics compares outputs with.

        Raises:
            OrtopsError: If it is not known what one compares.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.target(metric_functions.resolve(["mean_absolute_error"]))
            'targets'
        """
        return next(iter(self._metric_bindings(metrics).values())).note.target

    def _metric_bindings(self, metrics: Mapping[str, StreamingMetric]) -> dict[str, MetricBinding]:
        graph = self._proto.graph
        own, first = {value.name for value in graph.input}, graph.output[0].name
        return {
            name: bind_metric(metric, self.metadata, first, self._inputs, own)
            for name, metric in metrics.items()
        }

    # ---------------------------------------------------------------------------------- state

    @property
    def state(self) -> State:
        """The variables (parameters, optimizer state, ``step``, ``learning_rate``) by name.

        Reading copies an array out; ``session.state[name] = array`` sets one, and
        ``session.state = {…}`` several. To set a parameter of float16 or bfloat16 sets its float32
        value ``<parameter>.master``, and the other way round.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> sorted(session.state)
            ['learning_rate', 'step', 'w']
            >>> session.state["w"] = [[0.75]]
            >>> session.step(line.BATCH)["loss"]
            array(0.0625, dtype=float32)
        """
        return State(self._execution, self._lock, self.metadata, self._assign)

    @state.setter
    def state(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        if not isinstance(arrays, Mapping):
            raise OrtopsError(
                f"state: {type(arrays).__name__} was given; give a dict of an array for each name"
            )
        state = self.state
        self._assign(state.with_masters({n: state.check(n, array) for n, array in arrays.items()}))

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The parameters that are trained, by name, without optimizer state; copies.

        Those of 16 bits are their float32 values, as training goes on from them. Running
        statistics, which no gradient changes, are not among them. ``session.parameters = {…}``
        sets some or all of them; optimizer state stays as it is.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> _ = session.step(line.BATCH)
            >>> dict(session.parameters)
            {'w': array([[0.5]], dtype=float32)}
        """
        trained = self._trained()
        with finished_at_exit, self._lock:
            return {name: self._execution.present(v).copy() for name, v in trained.items()}

    @parameters.setter
    def parameters(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        if not isinstance(arrays, Mapping):
            raise OrtopsError(
                f"parameters: {type(arrays).__name__} was given; give a dict of an array for each "
                "name"
            )
        trained = self._trained()
        for name in arrays:
            if name not in trained:
                raise UnknownVariableError(
                    f"parameters: '{name}' is not trained; " + did_you_mean(name, trained)
                )
        self.state = {trained[name]: array for name, array in arrays.items()}

    @property
    def noted(self) -> TrainingMetadata:
        """An older name of `metadata`."""
        return self.metadata

    @property
    def standing(self) -> ResumeState:
        """An older name of `resume_state`."""
        return self.resume_state

    def _trained(self) -> dict[str, str]:
        """Returns the parameters, and the variables that hold their values."""
        wide = masters(self.metadata, self._execution.variables)
        names = dict.fromkeys(name for step in self._steps for name in step.parameters)
        return {name: wide.get(name, name) for name in names}

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; part of `state`, and saved.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.learning_rate = session.learning_rate * 2
            >>> session.run_steps([line.BATCH] * 2).tolist()  # the first step arrives
            [1.0, 0.0]
        """
        return float(self.state[self._learning_rates()[0]])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        try:
            accepted = 0 <= float(value) <= float(np.finfo(np.float32).max)
        except (TypeError, ValueError, OverflowError):
            accepted = False
        if not accepted:
            raise OrtopsError(f"learning_rate is {value!r}; a finite number >= 0 is accepted")
        for name in self._learning_rates():
            self.state[name] = np.asarray(value, self.state[name].dtype)

    def _learning_rates(self) -> list[str]:
        rates = list(dict.fromkeys(name for step in self._steps for name in step.learning_rates))
        if not rates:
            raise OrtopsError(
                "learning_rate: the training algorithm has none in an initializer; set what it "
                "uses through `state`"
            )
        return rates

    @property
    def steps_done(self) -> int:
        """The number of finished steps: those of this session where the algorithm has no count.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> losses = session.run_steps([line.BATCH] * 5)
            >>> session.steps_done
            5
        """
        counter = self.metadata.step
        with finished_at_exit, self._lock:
            if counter not in self._execution.variables:
                return self._execution.steps_made
            return int(self._execution.present(counter))

    def reset(self) -> None:
        """Goes back to the start of the training.

        All variables get, as the standard defines it, their values in the given model, and then
        those that the initialization graph computes (optimizer state, step, learning rate).

        A session on a file holds it open and reads the values from it again, in place of a second
        copy in memory. Another file may take its name meanwhile, as `save` makes it.

        Raises:
            ModelError: If the file itself was changed in place; the session is as it was.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> losses = session.run_steps([line.BATCH] * 5)
            >>> session.reset()
            >>> session.steps_done, session.state["w"].item()
            (0, 0.0)
        """
        given, state = dict(self._given), self.state  # read before anything is changed
        arrays = {name: functools.partial(given.__getitem__, name) for name in given}
        for number in self._entries:
            found = run_uninterrupted(functools.partial(self._initial_values, number))
            for name, array in found.items():
                if name in self._execution.variables:
                    state.check(name, array)
                    arrays[name] = functools.partial(state.check, name, array)  # one at a time
        self._assign(Values(arrays), steps_made=0)
        self.resume_state.set(None)

    def _initial_values(self, number: int) -> dict[str, Array]:
        """Runs the initialization graph of a training_info entry."""
        return initial_values(
            self._proto, self._data, number, self._arrays(), self._options, self._providers
        )

    def __reduce__(self) -> Any:
        raise OrtopsError(
            "session: it cannot be copied or pickled, its memory is onnxruntime's too; save it and "
            "open the file, or give session.model() to another TrainingSession"
        )

    def _training_copies(self, recompute: Checkpoint | None) -> Checkpoint | None:
        """Replaces names of tensors by those of their copies in training mode."""
        if not isinstance(recompute, list | tuple):
            return recompute
        nodes = (node for info in self._proto.training_info for node in info.algorithm.node)
        computed = {name for node in nodes for name in node.output}
        shown = {source: copy for copy, source in self.metadata.training_copies.items()}

        def copy_of(name: str) -> str:
            copy = shown.get(name, f"{name}_training")  # as `copy_in_training_mode` calls it
            return copy if copy in computed else name

        return [copy_of(name) for name in recompute]

    def _kept(self, given: Values) -> Mapping[str, Array]:
        """Returns the given values that `reset` needs: it computes others, like optimizer state.

        The data of these are then the present values.
        """
        anew = computed(self._proto, self._entries) & self._execution.variables.keys()
        execution = weakref.ref(self._execution)  # models that are garbage refer to the tensors

        def present(name: str) -> Array:
            alive = execution()
            assert alive is not None
            return alive.present(name)

        for tensor in initializers(self._proto):
            later = functools.partial(present, tensor.name)
            external.set_later(tensor, self._data, later if tensor.name in anew else None)
        return given.without(anew)

    @_alone
    def _assign(self, arrays: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        self._saved = None  # first: at no moment is a file named that has other values
        self._execution.assign(arrays, steps_made=steps_made)

    # ---------------------------------------------------------------------------------- files

    def model(self) -> onnx.ModelProto:
        """Returns the trainable model with the present state.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> first = session.step(line.BATCH)
            >>> other = TrainingSession(session.model())
            >>> other.steps_done, other.state["w"].item()
            (1, 0.5)
        """
        with finished_at_exit, self._lock:
            return external.attach(*self._light_model())

    def _light_model(self) -> tuple[onnx.ModelProto, external.Data]:
        """Returns the trainable model with the present state, as a light model and its data.

        The data are the memory of the variables, so the lock has to be held while they are read.
        """
        result, data = external.detach(self._proto)
        data |= self._data
        arrays = self._arrays()
        write_values(result.graph, data, arrays)
        for info in result.training_info:
            write_values(info.algorithm, data, arrays)
        self._write_position(result)
        return result, data

    def _write_position(self, model: onnx.ModelProto) -> None:
        """Writes how far the training is that `fit` has begun, if there is one."""
        position = self.resume_state.position
        remove_note(model, POSITION_KEY)
        if position is not None:
            text = position.text(self._execution.steps_made)
            if len(text) > LIMITS.metadata_bytes:
                logger.warning(
                    "save: how far fit is takes %d characters, history and callbacks included, and "
                    "%d may be read (ortops.graph.limits.LIMITS.metadata_bytes); it is left out: "
                    "the file does not resume it",
                    *(len(text), LIMITS.metadata_bytes),
                )
            else:
                model.metadata_props.add(key=POSITION_KEY, value=text)

    def _arrays(self) -> dict[str, Array]:
        """Returns the memory of the variables, to be read while the lock is held."""
        return {name: self._execution.present(name) for name in self._execution.variables}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trainable model with the present state; a session on it resumes exactly.

        The file is standard ONNX, and stock onnxruntime runs it as the trained model. One with
        Gradient nodes of its own it runs after `ortops.lower`, as a message says.

        Args:
            path: The file. At any time it holds the old model or the new one, whole. One of 2 GB
                or more has a data file beside it (see `ortops.save_model`).

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> import tempfile
            >>> first = session.step(line.BATCH)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     session.save(f"{folder}/line.onnx")
            ...     TrainingSession(f"{folder}/line.onnx").step(line.BATCH)["loss"]
            array(0.25, dtype=float32)
        """
        if sys.is_finalizing():
            raise OrtopsError(
                f"save '{path}': the interpreter is at its very exit, where no file is written "
                "safely; save before, for example in a function of atexit"
            )
        if has_domain(self._proto) and not self._said_to_lower:
            self._said_to_lower = True
            logger.warning(
                "save '%s': the model has Gradient nodes of its own, which stock onnxruntime does "
                "not run; ortops.InferenceSession runs the file, and ortops.lower('%s') gives one "
                "for stock onnxruntime",
                path,
                path,
            )
        self._write(path)

    @_together
    def _write(self, path: str | os.PathLike[str]) -> None:
        steps_made = self._execution.steps_made
        saving.write_model(path, *self._light_model())
        self._saved = (os.fspath(path), steps_made, self._fit_arguments())

    def inference_model(
        self, original: ModelLike | None = None, *, ema: bool = False
    ) -> onnx.ModelProto:
        """Returns the trained model, with nothing of training in it.

        Args:
            original: The model that training began with. The trained weights are written into a
                copy of it, which keeps its opset and everything else; by default the inference
                graph of the trainable model is returned, with BatchNormalization and Dropout in
                inference mode.
            ema: Whether parameters are their averages (``ema_decay=`` of
                `ortops.build_training_model`).

        Raises:
            ModelError: If a trained variable is not in the original, or there are no averages.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> first = session.step(line.BATCH)
            >>> plain = onnxruntime.InferenceSession(session.inference_model().SerializeToString())
            >>> plain.run(None, {"x": np.array([[4]], np.float32)})
            [array([[2.]], dtype=float32)]
        """
        with finished_at_exit, self._lock:
            return self._inference_model(original, ema)

    def _inference_model(self, original: ModelLike | None, ema: bool) -> onnx.ModelProto:
        own = {tensor.name for tensor in self._proto.graph.initializer}
        arrays = self.metadata.averaged(self._arrays()) if ema else self._arrays()
        trained = {name: array for name, array in arrays.items() if name in own}
        if original is not None:
            result, data = convert.load_light(original)
            write_back(result, data, trained)
        else:
            model = convert.to_ir(self._proto)  # leaves training_info behind, and data beside
            model.metadata_props.pop(METADATA_KEY, None)
            model.metadata_props.pop(POSITION_KEY, None)
            if not has_domain(self._proto):
                model.graph.opset_imports.pop(TRAINING_DOMAIN, None)
            write_inference_mode(model)
            result, data = to_proto(model), dict(self._data)
            write_values(result.graph, data, trained)
        return external.attach(result, data)

    def _build_evaluation(self, tensors: Sequence[str], *, loss: bool) -> Evaluation:
        step, entry = self._steps[0], self._entries[0]
        found = evaluation_model(self._proto, self._data, entry, step, tensors, loss=loss)
        model, feeds = found.step.model, found.step.feeds
        known = set(feeds) <= self._inputs.keys()
        unread = [value.name for value in self._proto.graph.input]
        inputs = self._inputs if known else Inputs([found.step], [*unread, *self._inputs])
        inputs = inputs.only(self._inputs if known and loss else feeds)
        if loss:  # metrics may compare with any
            for name, value in self._inputs.items():
                inputs.setdefault(name, value)
        constants = external.move_to_inputs(model)
        session = InferenceSession(to_proto(model), self._options, self._providers, kernels="onnx")
        return Evaluation(session, inputs, found.parts, found.tensors, found.kinds, constants)


def _shapes(feeds: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in feeds.values())
