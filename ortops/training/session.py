"""TrainingSession: runs the training_info of a model on onnxruntime."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from ortops.arguments import function, renamed
from ortops.errors import ArgumentError, FeedError, OrtopsError, UnknownVariableError, did_you_mean
from ortops.execution.onnxruntime_sessions import UpdateKernels
from ortops.execution.settings import Settings
from ortops.garbage_collection import pause_collection
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.metrics import Metric, StreamingMetric
from ortops.passes.rematerialization import Checkpoint
from ortops.trainable.metadata import TrainingMetadata
from ortops.training.callback import Callback
from ortops.training.data import Data, Feeds
from ortops.training.evaluation import Evaluator
from ortops.training.feeds import Inputs
from ortops.training.fitting import StepStrategy, fit
from ortops.training.gradients import Gradients, numbers_of
from ortops.training.history import History
from ortops.training.initial_values import Values
from ortops.training.loaded_model import LoadedModel, changes
from ortops.training.model_file import ModelFile
from ortops.training.position import ResumeState
from ortops.training.state import State
from ortops.uninterrupted import finished_at_exit, run_uninterrupted

__all__ = ["TrainingSession"]

Array: TypeAlias = npt.NDArray[Any]

_STEPS_IN_A_RUN = 64


class TrainingSession:
    """Runs the training algorithm of a trainable model.

    Args:
        model: A trainable model (see `ortops.build_training_model`): a ModelProto, its bytes or its
            path. It is not changed.
        kernels: How updates are computed: ``"onnx"`` as standard operators, ``"python"`` as custom
            operators in Python, ``"compiled"`` as one compiled loop for each update, which needs
            numba (``pip install ortops[compiled]``); see `compiled`.
        entry: The number of the training_info entry that a step runs; by default all, in order.
        sess_options: Options for the onnxruntime sessions.
        providers: Execution providers for the onnxruntime sessions. If the first available one is
            CUDA, TensorRT, DirectML or CANN, variables are stored in the memory of its device, and
            a step copies only its outputs to the host. None of these has been run on a device;
            tests replace device memory by CPU memory.
        recompute: Activation checkpointing: trades compute for memory by recomputing activations.
            The names of the activations to keep, or how many to choose automatically: small tensors
            that the whole forward pass goes through, with equal amounts of memory between them.
            ``"sqrt"`` chooses the square root of their number, which is a good choice for a deep
            model. The backward pass recomputes all other activations. Results stay the same up to
            rounding. By default, all activations are kept.
        settings: How steps are executed, for measurements and tests. Results stay the same up to
            rounding.
        checkpoint: Deprecated; the former name of ``recompute``.

    Raises:
        ArgumentError: If ``recompute`` is not valid, or both it and ``checkpoint`` are given.
        ModelError: If the model has no training_info or is not legal, or if ``recompute`` names a
            tensor that the model does not compute.
        OrtopsError: If ``kernels`` needs numba and it is not installed.
        UnsupportedError: If a gradient passes through an operator without a rule, or a device
            cannot store the variables.

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

        >>> session = TrainingSession(model, recompute=["y"])
        >>> [round(float(session.step(batch)["loss"]), 3) for _ in range(3)]
        [1.0, 0.25, 0.062]
    """

    @convert.blame_model
    @finished_at_exit
    @pause_collection()
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
        self._loaded = LoadedModel(
            model,
            entry,
            kernels=kernels,
            options=sess_options,
            providers=providers,
            recompute=recompute,
            settings=settings,
        )
        self._execution = self._loaded.execution
        self._evaluator = Evaluator(self._loaded)
        self._file = ModelFile(self._loaded)
        self._rank = 0  # among the sessions that one is joined with
        self.metadata = self._loaded.metadata
        self.resume_state = self._loaded.resume_state

    @property
    def compiled(self) -> tuple[str, ...]:
        """The variables with compiled updates; empty unless ``kernels="compiled"``.

        Their updates give the same bits as with ``kernels="onnx"``. An update is not compiled if it
        is not elementwise (such as Muon's of a matrix) or has an operator that is not exact (such
        as Exp); the logger ``"ortops"`` gives the reason at level INFO.

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
        """Runs one training step.

        Args:
            feeds: A batch: an array for each input of the model and of the loss, by name or in a
                tuple, in which the inputs of the model come first.
            outputs: The names of the outputs to return; all by default.
            reduce: A function that is called with the gradients before they are applied. It may
                change them in place, with their loss and running statistics, for example to average
                them over several workers. It may read the session, but not change it.

        Returns:
            The loss, and the outputs of the model that it was computed from, by name. An output
            that BatchNormalization or Dropout changes in training mode is called
            ``<name>_training``.

        Raises:
            FeedError: If the feeds do not fit; then nothing has changed.
            KernelError: If a kernel failed; then nothing has changed.
            OrtopsError: If there is no such output, or ``reduce`` left something that is not a
                gradient.
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
        if reduce is None:
            return self._step(self.inputs.check(feeds), outputs)
        function("reduce", reduce, "a function of gradients")
        return self._reduced_step(self.inputs.check(feeds), outputs, reduce)

    def _check_outputs(self, outputs: Sequence[str] | None) -> None:
        if isinstance(outputs, str) or not isinstance(outputs, Iterable | None):
            raise ArgumentError(f"outputs must be a list of names, got {outputs!r}")
        known = self._loaded.outputs
        for name in outputs or ():
            if name not in known:
                raise OrtopsError(
                    f"outputs: there is no output '{name}'; " + did_you_mean(name, known)
                )

    def gradients(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        after: Gradients | None = None,
    ) -> Gradients:
        """Computes the gradients of a batch in training mode, and changes nothing.

        ``apply(gradients(feeds))`` gives the same bits as ``step(feeds)``.

        Args:
            feeds: A batch, as for `step`.
            outputs: The names of the outputs to compute in addition to the loss; all by default.
            after: The gradients of the previous part, if the parts of a batch are to be applied
                together (see `ortops.training.gradients.Accumulation`). Running statistics continue
                from there, and Dropout draws other numbers.

        Returns:
            The gradients by parameter, with the loss, its divisor, the outputs and the running
            statistics of this batch.

        Raises:
            FeedError: If the feeds do not fit.
            KernelError: If a kernel failed.
            OrtopsError: If there is no such output.
            UnsupportedError: If the training algorithm updates variables without a Gradient node,
                or a step runs several training_info entries.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> gradients = session.gradients(line.BATCH)
            >>> gradients["w"], gradients.loss, session.steps_done
            (array([[-2.]], dtype=float32), 1.0, 0)
            >>> session.apply(gradients)
            >>> session.state["w"], session.steps_done
            (array([[0.5]], dtype=float32), 1)
        """
        self._check_outputs(outputs)
        if after is not None and not isinstance(after, Gradients):
            raise ArgumentError(f"after must be a result of `gradients`, got {after!r:.80}")
        return self._gradients(self.inputs.check(feeds), outputs, after)

    @changes("gradients")
    def _gradients(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
    ) -> Gradients:
        return self._loaded.differentiate(feeds, outputs, after, rank=self._rank, state=self.state)

    def apply(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Applies gradients: the part of a step that follows the backward pass.

        Parameters, optimizer state, ``step`` and the loss scale change as in `step`, and running
        statistics become those that the gradients contain.

        Args:
            gradients: A result of `gradients`, of this session or another one with the same model;
                or a dict with an array for each parameter (float32 for a 16-bit parameter), which
                leaves running statistics unchanged.

        Raises:
            KernelError: If a kernel failed, as in `step`.
            OrtopsError: If the gradients do not fit the parameters; then nothing has changed.
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

    @changes("apply")
    def _apply(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        self._loaded.update(gradients, self.state)

    @changes("step")
    def _reduced_step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        reduce: Callable[[Gradients], object],
    ) -> dict[str, Array]:
        state = self.state
        gradients = self._loaded.differentiate(feeds, outputs, None, rank=self._rank, state=state)
        reduce(gradients)
        self._loaded.update(gradients, state)
        chosen = self._loaded.outputs if outputs is None else outputs
        return {n: a for n, a in gradients.outputs.items() if n in chosen}

    @changes("step")
    def _step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        note: Callable[[Mapping[str, Array]], object] | None = None,
    ) -> dict[str, Array]:
        return self._execution.step(feeds, outputs, note)

    @changes("run_steps")
    def _several_steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        return self._execution.steps(feeds, count)

    def run_steps(self, batches: Iterable[Feeds]) -> Array:
        """Runs a training step with each of several batches.

        This reduces the overhead of small models: up to 64 steps with batches of the same shapes
        run in one call of onnxruntime. The results are those of `step`.

        Args:
            batches: The batches, each as for `step`.

        Returns:
            The loss of each step.

        Raises:
            FeedError: If a batch does not fit. Steps with earlier batches may have been made;
                `steps_done` counts them.
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
        loss = self._loaded.loss
        losses: list[Array] = []
        with finished_at_exit, self._loaded.lock:
            at_once = _STEPS_IN_A_RUN if self._execution.repeatable else 1
            checked: Iterator[dict[str, Array]] = (self.inputs.check(feeds) for feeds in batches)
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

        The seed and the number of finished steps determine the order of the rows. If training ends
        early, because of a signal, an error or a callback, or if the process is killed after the
        session was saved, ``resume=True`` continues it, even in the middle of an epoch, as if it
        had never stopped: `save` stores the position together with the weights. `reset` discards
        the position.

        SIGINT (Ctrl-C), SIGTERM and SIGHUP (a closed terminal) end training after the current step,
        or at once while `fit` waits for data or evaluates. Then the callbacks are notified, a
        message says how to continue, and KeyboardInterrupt or SystemExit (with status 143 or 129)
        is raised. Batches that were accumulated for an unfinished step are read again with
        ``resume=True``. A second signal has its usual effect at once. All this holds if `fit` runs
        in the main thread and the program has no signal handler. A handler of the program is called
        as usual: if it raises an exception, `fit` ends at once, and the session is in the state
        after a whole step.

        Args:
            data: The data set, in any form that `ortops.training.data.open_data` accepts: an array
                for each input, a tuple of arrays, a table, samples, an iterable of batches (a list,
                or an object that can be iterated over once per epoch), or a function that returns
                one.
            epochs: The number of passes over the data. With ``resume=True``, finished epochs count,
                and a larger number than before extends the training.
            batch_size: The number of rows per batch, if rows are given.
            shuffle: Whether to shuffle the rows before each epoch, if rows are given.
            seed: Determines the order of the rows.
            validation: A data set to evaluate after each epoch.
            metrics: The metrics to compute on the validation data (see `ortops.metrics`).
            schedule: A function that returns the learning rate of an epoch, given the fraction of
                ``epochs`` that are finished (0 in the first one). By default, the learning rate
                does not change, or follows the schedule in the model's graph.
            callbacks: Callbacks for each step, each epoch and the end (see `ortops.callbacks`).
            accumulate: The number of batches per step. A step is that of all their rows; the last
                one of an epoch may have fewer.
            prefetch: The number of batches that a thread reads ahead.
            resume: Whether to continue the training that an earlier call began, if there is one.
                The arguments that determine the rows of a step have to be the same: ``seed``,
                ``shuffle``, ``batch_size``, ``accumulate`` and the number of rows and batches.
                ``epochs`` may differ, but must include the epochs that were begun. A schedule in
                the model's graph keeps its final rate after its last step. If the training is
                complete, the history is returned at once. Batches of an iterable that were already
                used are read again and skipped.
            progress: Whether to show a line for each epoch on standard error. A terminal or
                notebook shows it while the epoch runs, a file gets it at the end of the epoch.
            stop_on_nan: Whether to stop at a loss that is NaN or infinite. A float16 step that is
                skipped because its gradients overflowed does not count (see
                `build_training_model`), unless they overflow at the smallest loss scale, too.

        Returns:
            A dict for each epoch: ``loss`` is the mean over its rows, and so is ``loss_<name>`` of
            each summand of a sum of losses (if labels are ignored or weighted, the mean over those
            that count; NaN if there are none); ``validation_loss`` and ``validation_<metric>`` are
            computed on the validation data; ``learning_rate``, ``steps`` and ``seconds`` are
            explained in `ortops.training.history.History`.

        Raises:
            ArgumentError: If an argument is wrong.
            DivergedError: If the loss of a step is NaN or infinite (the step has been made), or if
                float16 gradients overflow at the smallest loss scale.
            FeedError: If the data do not fit the model.
            KernelError: If a kernel failed.
            OrtopsError: If an argument is not that of the training to resume.
            KeyboardInterrupt: After SIGINT.
            SystemExit: After SIGTERM or SIGHUP.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> history = session.fit(line.BATCH, epochs=3, progress=False)
            >>> [round(loss, 3) for loss in history.columns["loss"]]
            [1.0, 0.25, 0.062]
        """
        return fit(
            self,
            self._step_strategy(),
            self.inputs,
            data,
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            validation=validation,
            metrics=metrics,
            schedule=schedule,
            callbacks=callbacks,
            accumulate=accumulate,
            prefetch=prefetch,
            resume=resume,
            progress=progress,
            stop_on_nan=stop_on_nan,
        )

    def _step_strategy(self) -> StepStrategy:
        """Returns how `fit` makes steps."""
        return StepStrategy(self._step, self._gradients, self._loaded.counts())

    @property
    def inputs(self) -> Inputs:
        """The inputs that a batch fills, by name: those of the model, then those of the loss.

        Example:
            >>> from models import line
            >>> sorted(line.session().inputs)
            ['targets', 'x']
        """
        return self._loaded.inputs

    @property
    def history(self) -> History:
        """The history of the last `fit`, also if it ran before the file was saved.

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
        """The file that the present state was last saved in; "" if it was not saved.

        A step, setting a variable and a new `fit` each change the state.

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
        return self._file.saved_in

    def evaluate(
        self,
        data: Data,
        *,
        batch_size: int = 256,
        metrics: str | Metric | Sequence[str | Metric] = (),
        ema: bool = False,
    ) -> dict[str, float]:
        """Computes the loss and metrics in inference mode, and changes nothing.

        Batches are evaluated one by one; only what a metric stores is kept in memory.

        Args:
            data: As for `fit`: arrays for each input of the model and of the loss, or batches.
            batch_size: The number of rows per batch, if rows are given.
            metrics: The metrics to compute: names, objects and functions (see `ortops.metrics`).
                They read what the loss reads, or any tensor of the model.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
                `ortops.build_training_model`).

        Returns:
            ``loss``, as if all batches were one (averaged over the rows if a loss function returns
            no count; NaN if no label counts); for a sum of losses also ``loss_<name>`` of each; and
            the metrics by name.

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
        return self._evaluator.evaluate(data, batch_size=batch_size, metrics=metrics, ema=ema)

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
        """Computes tensors of the model for all rows in inference mode, and changes nothing.

        Args:
            data: As for `fit`; only the inputs that the tensors depend on are needed, so labels may
                be omitted.
            batch_size: The number of rows per batch, if rows are given.
            outputs: The names of tensors of the model, outputs or not; all outputs by default. For
                a ZipMap, the tensor that it reads is returned.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
                `ortops.build_training_model`).

        Returns:
            An array for each name, with the batches concatenated along axis 0; a single array if
            ``outputs`` is one name.

        Raises:
            FeedError: If the data do not fit the model.
            ModelError: If there are no averages.
            OrtopsError: If there is no such tensor, or its axis 0 does not have the rows of the
                batch.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> _ = session.step(line.BATCH)
            >>> session.predict({"x": np.full((3, 1), 4, np.float32)}, batch_size=2, outputs="y")
            array([[2.],
                   [2.],
                   [2.]], dtype=float32)
        """
        found = self._evaluator.predict(data, batch_size=batch_size, outputs=outputs, ema=ema)
        return found[outputs] if isinstance(outputs, str) else found

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and, if there are several, of its summands.

        Raises:
            OrtopsError: If the training algorithm has no loss.

        Example:
            >>> import ortops
            >>> from models import line
            >>> line.session().loss_names()
            ['loss']
            >>> line.session(loss=ortops.losses.L1("y") + ortops.losses.Huber("y")).loss_names()
            ['loss', 'loss_y', 'loss_y_1']
        """
        return self._loaded.loss_names()

    def target(self, metrics: Mapping[str, StreamingMetric]) -> str:
        """Returns the input that the first of some metrics compares outputs with.

        Raises:
            OrtopsError: If it is not known what a metric compares.

        Example:
            >>> from models import line
            >>> from ortops.metrics import resolve
            >>> line.session().target(resolve(["mean_absolute_error"]))
            'targets'
        """
        return next(iter(self._evaluator.bind(metrics).values())).note.target

    # ---------------------------------------------------------------------------------- state

    @property
    def state(self) -> State:
        """The variables (parameters, optimizer state, ``step``, ``learning_rate``) by name.

        Reading returns a copy; ``session.state[name] = array`` sets one variable, and
        ``session.state = {…}`` several. Setting a float16 or bfloat16 parameter also sets its
        float32 value, ``<parameter>.master``, and vice versa.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> sorted(session.state)
            ['learning_rate', 'step', 'w']
            >>> session.state["w"] = [[0.75]]
            >>> session.step(line.BATCH)["loss"]
            array(0.0625, dtype=float32)
        """
        return State(self._execution, self._loaded.lock, self.metadata, self._assign)

    @state.setter
    def state(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        _check_dict("state", arrays)
        state = self.state
        self._assign(state.with_masters({n: state.check(n, array) for n, array in arrays.items()}))

    @property
    def parameters(self) -> Mapping[str, Array]:
        """Copies of the trained parameters by name, without optimizer state.

        A 16-bit parameter is given by its float32 value, from which training continues. Running
        statistics are not included, as they have no gradients. ``session.parameters = {…}`` sets
        some or all parameters and leaves optimizer state unchanged.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> _ = session.step(line.BATCH)
            >>> dict(session.parameters)
            {'w': array([[0.5]], dtype=float32)}
        """
        trained = self._loaded.trained()
        with finished_at_exit, self._loaded.lock:
            return {name: self._execution.present(v).copy() for name, v in trained.items()}

    @parameters.setter
    def parameters(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        _check_dict("parameters", arrays)
        trained = self._loaded.trained()
        for name in arrays:
            if name not in trained:
                raise UnknownVariableError(
                    f"parameters: '{name}' is not trained; " + did_you_mean(name, trained)
                )
        self.state = {trained[name]: array for name, array in arrays.items()}

    @property
    def noted(self) -> TrainingMetadata:
        """The former name of `metadata`."""
        return self.metadata

    @property
    def standing(self) -> ResumeState:
        """The former name of `resume_state`."""
        return self.resume_state

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. It is part of `state` and is saved.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> session.learning_rate = session.learning_rate * 2
            >>> session.run_steps([line.BATCH] * 2).tolist()  # the first step reaches the minimum
            [1.0, 0.0]
        """
        return float(self.state[self._loaded.learning_rates()[0]])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        try:
            accepted = 0 <= float(value) <= float(np.finfo(np.float32).max)
        except (TypeError, ValueError, OverflowError):
            accepted = False
        if not accepted:
            raise ArgumentError(f"learning_rate must be a finite number >= 0, got {value!r}")
        for name in self._loaded.learning_rates():
            self.state[name] = np.asarray(value, self.state[name].dtype)

    @property
    def steps_done(self) -> int:
        """The number of finished steps; those of this session if the algorithm does not count them.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> losses = session.run_steps([line.BATCH] * 5)
            >>> session.steps_done
            5
        """
        counter = self.metadata.step
        with finished_at_exit, self._loaded.lock:
            if counter not in self._execution.variables:
                return self._execution.steps_made
            return int(self._execution.present(counter))

    def reset(self) -> None:
        """Returns to the start of training.

        As the standard defines it, all variables are set to their values in the given model, and
        then to the results of the initialization graph (optimizer state, step, learning rate).

        A session on a file keeps it open and reads the values from it again, instead of holding a
        second copy in memory. In the meantime another file may take its name, as with `save`.

        Raises:
            ModelError: If the file was changed in place; the session is left unchanged.

        Example:
            >>> from models import line
            >>> session = line.session()
            >>> losses = session.run_steps([line.BATCH] * 5)
            >>> session.reset()
            >>> session.steps_done, session.state["w"].item()
            (0, 0.0)
        """
        given, state = dict(self._loaded.given), self.state  # read before anything is changed
        arrays = {name: functools.partial(given.__getitem__, name) for name in given}
        for number in self._loaded.entries:
            found = run_uninterrupted(functools.partial(self._loaded.initial_values, number))
            for name, array in found.items():
                if name in self._execution.variables:
                    state.check(name, array)
                    arrays[name] = functools.partial(state.check, name, array)  # one at a time
        self._assign(Values(arrays), steps_made=0)
        self.resume_state.set(None)

    def __reduce__(self) -> Any:
        raise OrtopsError(
            "session: it shares memory with onnxruntime and cannot be copied or pickled; save it "
            "and open the file, or pass session.model() to another TrainingSession"
        )

    @changes("state")
    def _assign(self, arrays: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        self._file.forget_saved()  # first: `saved_in` never names a file with other values
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
        return self._file.model()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trainable model with the present state; a session on it resumes exactly.

        The file is standard ONNX, and stock onnxruntime runs it as the trained model. If the model
        itself has Gradient nodes, it has to be lowered first (`ortops.lower`), as a warning says.

        Args:
            path: The file. At any time it contains either the old model or the new one, complete. A
                model of 2 GB or more has a data file next to it (see `ortops.save_model`).

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
        self._file.check_writable(path)
        self._write(path)

    def _write(self, path: str | os.PathLike[str]) -> None:
        self._file.write(path)

    def inference_model(
        self, original: ModelLike | None = None, *, ema: bool = False
    ) -> onnx.ModelProto:
        """Returns the trained model, without anything that belongs to training.

        Args:
            original: The model that training began with. The trained weights are written to a copy
                of it, which keeps its opset and everything else. By default, the inference graph of
                the trainable model is returned, with BatchNormalization and Dropout in inference
                mode.
            ema: Whether to use the averages of parameters (``ema_decay=`` of
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
        return self._file.inference_model(original, ema=ema)


def _check_dict(name: str, arrays: object) -> None:
    if not isinstance(arrays, Mapping):
        raise ArgumentError(
            f"{name} must be a dict with an array for each name, got {type(arrays).__name__}"
        )


def _shapes(feeds: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in feeds.values())
