"""TrainingSession: runs the training_info of a model on onnxruntime."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, Unpack, overload

import numpy.typing as npt
import onnx
import onnxruntime

from ortops._common.garbage_collection import pause_collection
from ortops._common.other_names import ARGUMENTS_OF_DATA, ARGUMENTS_OF_FIT, explains_arguments
from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.execution.execution import Execution
from ortops.engine.execution.onnxruntime_sessions import UpdateKernels
from ortops.engine.execution.settings import SessionReport, Settings
from ortops.engine.training.constants import Constants
from ortops.engine.training.data import Data
from ortops.engine.training.evaluation import Evaluator
from ortops.engine.training.feeds import Feeds, Inputs
from ortops.engine.training.fit_options import FitOptions, has_options, with_defaults
from ortops.engine.training.fitting import Fitting
from ortops.engine.training.gradients import Gradients
from ortops.engine.training.history import History
from ortops.engine.training.loaded_model import LoadedModel
from ortops.engine.training.model_file import ModelFile
from ortops.engine.training.modules import summary_of
from ortops.engine.training.properties import Properties
from ortops.engine.training.rebuilding import rebuilt
from ortops.engine.training.sample_weights import ClassWeight, SampleWeight
from ortops.engine.training.samples import Collate
from ortops.engine.training.state import State
from ortops.engine.training.steps import Steps
from ortops.engine.training.trainer import StepStrategy
from ortops.engine.training.training_metrics import TrainingMetrics
from ortops.engine.training.turns import LearningRates, Turns, check_lengths
from ortops.errors import ArgumentError, OrtopsError
from ortops.graph.files import loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.passes.rematerialization import Checkpoint
from ortops.losses import LossLike
from ortops.metrics import Metrics, StreamingMetric
from ortops.metrics.metric import direction
from ortops.optimizers import Optimizer, UpdateRule

Array: TypeAlias = npt.NDArray[Any]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _documented_by(part: Any) -> Callable[[_Method], _Method]:
    """Gives a method the docstring of the method that does its work, for `help` and the reference.

    Editors that only read the source show the first line, which stands here as well.
    """

    def decorate(method: _Method) -> _Method:
        method.__doc__ = part.__doc__
        return method

    return decorate


class TrainingSession:
    """Runs the training algorithm of a trainable model.

    Args:
        model: A trainable model (see `ortops.build_training_model`): a ModelProto, its bytes or its
            path. It is not changed.
        kernels: How updates are computed: ``"onnx"`` as standard operators, ``"python"`` as custom
            operators in Python, ``"compiled"`` as one compiled loop for each update, which needs
            llvmlite (``pip install ortops[fast]``). ``"auto"`` begins like ``"onnx"``. Once 10
            steps have taken 2 seconds, it compiles updates, if llvmlite is installed and variables
            are in the CPU's memory. All but ``"python"`` have the same bits; see `compiled`.
        entry: The training_info entry that a step runs, by index or name (see
            `ortops.add_training`); by default all, in order. The variables of other entries keep
            their values.
        sess_options: Options for the onnxruntime sessions.
        providers: Where to train: names of execution providers, pairs of a name and options, or
            devices of `onnxruntime.get_ep_devices`; by default, the CPU. With ``"webgpu"``, which
            needs ``pip install ortops[webgpu]``, CUDA, TensorRT, DirectML or CANN as the first one,
            variables are stored in the memory of its device, and a step copies only its outputs to
            the host. WebGPU was run on a device in software, the others not at all.
        recompute: Activation checkpointing: trades compute for memory by recomputing activations.
            The names of the activations to keep, or how many to choose automatically: small tensors
            that the whole forward pass goes through, with equal amounts of memory between them.
            ``"sqrt"`` chooses the square root of their number, which is a good choice for a deep
            model. The backward pass recomputes all other activations. ``"elementwise"`` recomputes
            only results of activation functions, sums, products of elements and normalizations
            whose inputs the backward pass reads anyway, so that a step takes hardly longer.
            ``"auto"`` is that on the CPU, and keeps all activations on other providers. Results
            stay the same up to rounding. By default, all activations are kept.
        outputs: The names of the model's outputs that `step` can return in addition to the losses;
            by default, all outputs that the loss depends on. Fewer outputs take less memory.
        optimizer_in_backward: Whether the backward pass updates each parameter, in place, as soon
            as its gradient is there, so that the gradients of all parameters never exist together.
            The bits stay the same. It excludes what needs all gradients at once: ``clip_norm``,
            `gradients` and `apply`, ``step(reduce=)``, ``fit(accumulate=)``, distributed training,
            the loss scaling of float16, and optimizers such as Prodigy. A step that fails leaves
            the session unusable until `reset`. Models with up to 2¹⁸ parameters are updated as
            without it.
            Source: Lv and others, "Full Parameter Fine-tuning for Large Language Models with
            Limited Resources", 2023.
        settings: How steps are executed, for measurements and tests. Results stay the same up to
            rounding.

    Raises:
        ArgumentError: If ``recompute`` is not valid, or ``outputs`` names something that is not an
            output; or if a provider is unknown, or does not work on this machine and
            CPUExecutionProvider is not listed behind it.
        ModelError: If the model has no training_info or is not legal, or if ``recompute`` names a
            tensor that the model does not compute.
        OrtopsError: If ``kernels="compiled"`` and llvmlite is not installed.
        UnsupportedError: If a gradient passes through an operator without a rule, or a device
            cannot store the variables.

    Example:
        >>> import numpy as np
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
    """

    @loading.blame_model
    @finished_at_exit
    @pause_collection()
    def __init__(
        self,
        model: ModelLike | LightModel,
        *,
        kernels: UpdateKernels = "auto",
        entry: int | str | None = None,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        recompute: Checkpoint | None = None,
        outputs: Sequence[str] | None = None,
        optimizer_in_backward: bool = False,
        settings: Settings | None = None,
    ) -> None:
        self._arguments: dict[str, Any] = {
            "kernels": kernels,
            "sess_options": sess_options,
            "providers": providers,
            "recompute": recompute,
            "outputs": outputs,
            "optimizer_in_backward": optimizer_in_backward,
            "settings": settings,
        }
        self._loaded = LoadedModel(model, entry, **self._arguments)
        self._steps = Steps(self._loaded)
        self._evaluator = Evaluator(self._loaded)
        self._file = ModelFile(self._loaded)
        self.metadata = self._loaded.metadata
        self.resume_state = self._loaded.resume_state
        self._of_entries: dict[int, TrainingSession] = {}
        self._of_weights: dict[tuple[tuple[int, ...], bool], TrainingSession] = {}

    @property
    def _execution(self) -> Execution:
        return self._loaded.execution

    def _only(self, entry: int | str | None) -> TrainingSession:
        """Returns a session on the same memory whose steps run one entry; itself for None."""
        if entry is None:
            return self
        number = self._loaded.number_of(entry)
        if self._loaded.entries == [number]:
            return self
        if number not in self._of_entries:
            made = object.__new__(type(self))
            made.__dict__.update(self.__dict__)
            loaded = made._loaded = self._loaded.only(number)
            made._steps, made._evaluator = Steps(loaded), Evaluator(loaded)
            made.metadata = loaded.metadata
            self._of_entries[number] = made
        return self._of_entries[number]

    def _with_weights(
        self, weights: tuple[SampleWeight, ClassWeight | None], entries: object
    ) -> TrainingSession:
        """Returns a session on the same memory whose losses have weights of rows.

        Args:
            weights: The weights that are given; if there are none, it is this session.
            entries: The entries that make steps; None for all.
        """
        loaded = self._loaded
        if all(each is None for each in weights):
            return self
        names = entries if isinstance(entries, Iterable) else loaded.entries
        numbers = tuple(loaded.number_of(name) for name in names)
        if any(self._only(number).metadata.sample_weights for number in numbers):
            return self
        by_label = weights[1] is not None or len(getattr(weights[0], "shape", ())) > 1
        if (numbers, by_label) not in self._of_weights:
            made = object.__new__(type(self))
            made.__dict__.update(self.__dict__)
            try:
                loaded = made._loaded = loaded.weighted(numbers, by_label=by_label)
            except ArgumentError as error:
                argument = "class_weight" if weights[0] is None else "sample_weight"
                raise ArgumentError(f"{argument}: {error}") from error
            made._steps = copy.copy(self._steps)
            made._steps._loaded = loaded
            made._evaluator, made.metadata = Evaluator(loaded), loaded.metadata
            made._of_entries = {}
            self._of_weights[numbers, by_label] = made
        return self._of_weights[numbers, by_label]

    def _by_entry(self) -> dict[str, TrainingSession]:
        """Returns a session for each entry, by its name."""
        names = self._loaded.names
        return {names[number]: self._only(number) for number in self._loaded.entries}

    @property
    def compiled(self) -> tuple[str, ...]:
        """The variables with compiled updates; with ``kernels="auto"``, empty in the first steps.

        Their updates give the same bits as with ``kernels="onnx"``, but for those of NaN. An update
        is not compiled if it is not elementwise (such as Muon's of a matrix) or has an operator
        that is not exact (such as Exp); the logger ``"ortops"`` gives the reason at level INFO.

        Example:
            >>> from ortops.docs import examples
            >>> examples.session().compiled
            ()
        """
        return self._execution.compiled

    @property
    def compilable(self) -> tuple[str, ...]:
        """The variables whose updates are compiled, now or after some steps; see `compiled`.

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> ortops.TrainingSession(examples.session().model(), kernels="onnx").compilable
            ()
        """
        return self._execution.compilable

    @property
    def providers(self) -> list[tuple[str, dict[str, str]]]:
        """The execution providers of the session, as names and options.

        Example:
            >>> from ortops.docs import examples
            >>> examples.session().providers
            [('CPUExecutionProvider', {})]
        """
        return list(self._loaded.providers)

    @property
    def placement(self) -> dict[str, str]:
        """The provider that runs each node of a step, by the name of the node.

        A node without a name has that of its first output. If a provider has no kernel for a node,
        the CPU runs it, and tensors move between the two. onnxruntime may merge nodes afterwards.
        Packed updates of variables in the CPU's memory are not included.

        Raises:
            UnsupportedError: If there are other providers than the CPU's, and onnxruntime is older
                than 1.24.

        Example:
            >>> from ortops.docs import examples
            >>> set(examples.session().placement.values())
            {'CPUExecutionProvider'}
        """
        return {node.name: node.provider for node in self._execution.nodes()}

    def report(self, *, entry: int | str | None = None) -> SessionReport:
        """Returns what the session chose for its steps, as they run now.

        That is how updates are computed, which variables are updated together and in place, in
        which memory variables are, and which nodes a step has. It changes when updates are
        compiled, and with graphs for other shapes of batches. It is read from what the session has,
        and costs next to nothing. `dataclasses.asdict` makes plain data of it, ``str`` a text.

        Args:
            entry: The training_info entry to report on, by index or name; by default, all.

        Raises:
            OrtopsError: If there is no such entry.

        Example:
            >>> from ortops.docs import examples
            >>> report = examples.session().report()
            >>> report.kernels, report.in_place, report.in_turn
            ('onnx', (), ('w', 'step'))
            >>> print(report.packed[0])
            updated together: w (1 element, in the graph)
        """
        return self._only(entry)._execution.report()

    def summary(self) -> str:
        """Returns the modules that have parameters as a table of at most 100 columns.

        Each line has the shape of a module's output, the number of its parameters, and whether they
        are trained, or why not. Modules are those in the names of parameters, or of the scopes that
        exporters give to nodes. A weight that several nodes read is counted once. Running
        statistics and other constants are no parameters; they are listed below, with the reason.

        Example:
            >>> from ortops.docs import examples
            >>> print(examples.session().summary())
            module  output     parameters  trained
            w       [batch,1]           1  yes
            1 parameters: 1 trained, 0 not trained
        """
        entries = self._by_entry().items()
        trained = {name: entry for entry, each in entries for name in each._loaded.trained()}
        return summary_of(self._loaded.light, trained)

    # ------------------------------------------------------------------------------- training

    @_documented_by(Steps.step)
    def step(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        reduce: Callable[[Gradients], object] | None = None,
        entry: int | str | None = None,
    ) -> dict[str, Array]:
        """Runs one training step."""
        return self._only(entry)._steps.step(feeds, outputs=outputs, reduce=reduce)

    @_documented_by(Steps.gradients)
    def gradients(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        after: Gradients | None = None,
        entry: int | str | None = None,
    ) -> Gradients:
        """Computes the gradients of a batch in training mode, and changes nothing."""
        return self._only(entry)._steps.gradients(feeds, outputs=outputs, after=after)

    @_documented_by(Steps.apply)
    def apply(
        self, gradients: Mapping[str, npt.ArrayLike], *, entry: int | str | None = None
    ) -> None:
        """Applies gradients: the part of a step that follows the backward pass."""
        self._only(entry)._steps.apply(gradients)

    @_documented_by(Steps.run_steps)
    def run_steps(self, batches: Iterable[Feeds], *, entry: int | str | None = None) -> Array:
        """Runs a training step with each of several batches."""
        return self._only(entry)._steps.run_steps(batches)

    @explains_arguments(**ARGUMENTS_OF_FIT)
    @has_options(FitOptions)
    @_documented_by(Fitting.fit)
    def fit(self, data: Data, **options: Unpack[FitOptions]) -> History:
        """Trains on a data set."""
        given = with_defaults(options)
        weights = given["sample_weight"], given["class_weight"]
        chosen = given["entries"] if given["entry"] is None else [given["entry"]]
        fitting = self._with_weights(weights, chosen)._fitting(given)
        begin = self.unchanged if given["fast_dev_run"] is True else contextlib.nullcontext
        with begin():
            return fitting.fit(data, given)

    def _fitting(self, options: FitOptions) -> Fitting:
        """Returns what makes the steps of `fit`."""
        entry, entries = options["entry"], options["entries"]
        if entries is not None:
            if entry is not None:
                raise ArgumentError(f"entry must be left out with entries=, got {entry!r:.80}")
            parts = self._by_entry()
            strategies = {name: part._step_strategy() for name, part in parts.items()}
            turns = Turns(self, parts, strategies, entries)
            turns.check(options)
            return Fitting(turns, turns.strategy(), turns.inputs)
        if entry is None:
            others = list(self._by_entry().values())[1:]
            check_lengths([each.metadata for each in others], self.state)
        chosen, strategy = self._only(entry), self._only(entry)._step_strategy()
        if chosen is not self:
            (number,) = chosen._loaded.entries
            strategy = replace(strategy, entries=chosen._loaded.names[number])
        return Fitting(chosen, strategy, chosen.inputs)

    def _step_strategy(self) -> StepStrategy:
        return self._steps.strategy()

    @property
    def inputs(self) -> Inputs:
        """The inputs that a batch fills, by name: those of the model, then those of the loss.

        Example:
            >>> from ortops.docs import examples
            >>> sorted(examples.session().inputs)
            ['targets', 'x']
        """
        return self._loaded.inputs

    @property
    def history(self) -> History:
        """The history of the last `fit`, also if it ran before the file was saved.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> _ = session.fit(examples.BATCH, epochs=2, progress=False)
            >>> [epoch["loss"] for epoch in session.history]
            [1.0, 0.25]
        """
        position = self.resume_state.position
        return History() if position is None else position.epoch_state.history

    @property
    @_documented_by(ModelFile.saved_in)
    def saved_in(self) -> str:
        """The file that the current state was last saved in; "" if it was not saved."""
        return self._file.saved_in

    @explains_arguments(**ARGUMENTS_OF_DATA)
    @_documented_by(Evaluator.evaluate)
    def evaluate(
        self,
        data: Data,
        *,
        batch_size: int = 256,
        metrics: Metrics = (),
        ema: bool = False,
        entry: int | str | None = None,
        sample_weight: SampleWeight = None,
        class_weight: ClassWeight | None = None,
        collate: Collate | None = None,
    ) -> dict[str, float]:
        """Computes the loss and metrics in inference mode, and changes nothing."""
        weights = sample_weight, class_weight
        number = self._loaded.entries[0] if entry is None else entry
        evaluator = self._with_weights(weights, [number])._only(entry)._evaluator
        return evaluator.evaluate(data, batch_size, metrics, ema, *weights, collate)

    @overload
    def predict(
        self,
        data: Data,
        *,
        batch_size: int = ...,
        outputs: str,
        ema: bool = ...,
        collate: Collate | None = ...,
    ) -> Array: ...

    @overload
    def predict(
        self,
        data: Data,
        *,
        batch_size: int = ...,
        outputs: Sequence[str] | None = ...,
        ema: bool = ...,
        collate: Collate | None = ...,
    ) -> dict[str, Array]: ...

    @explains_arguments(**ARGUMENTS_OF_DATA)
    @_documented_by(Evaluator.predict)
    def predict(
        self,
        data: Data,
        *,
        batch_size: int = 256,
        outputs: str | Sequence[str] | None = None,
        ema: bool = False,
        collate: Collate | None = None,
    ) -> Array | dict[str, Array]:
        """Computes tensors of the model for all rows in inference mode, and changes nothing."""
        return self._evaluator.predict(data, batch_size, outputs, ema, collate)

    @_documented_by(Evaluator.row_axis)
    def row_axis(self, name: str) -> int:
        """Returns the axis of a tensor of the model along which `predict` joins batches."""
        return self._evaluator.row_axis(name)

    @_documented_by(LoadedModel.loss_names)
    def loss_names(self) -> list[str]:
        """Returns the names of the loss and, if there are several, of its summands."""
        return self._loaded.loss_names()

    def directions(self, metrics: Mapping[str, StreamingMetric]) -> dict[str, bool | None]:
        """Returns the results of metrics by name, each with whether higher is better.

        Args:
            metrics: Metrics by name.

        Returns:
            True or False; None if it is not known.

        Raises:
            OrtopsError: If it is not known what a metric compares.

        Example:
            >>> from ortops.docs import examples
            >>> from ortops.metrics import resolve
            >>> examples.session().directions(resolve(["mean_absolute_error", "r2"]))
            {'mean_absolute_error': False, 'r2': True}
        """
        bound = self._evaluator.bind(metrics)
        return {name: direction(each.metric) for name, each in bound.items()}

    def training_metrics(self, metrics: Mapping[str, StreamingMetric]) -> TrainingMetrics:
        """Returns metrics that read the outputs of training steps; `fit` uses them.

        Raises:
            OrtopsError: If it is not known what a metric compares, or a step does not compute it.

        Example:
            >>> from ortops.docs import examples
            >>> from ortops.metrics import resolve
            >>> examples.session().training_metrics(resolve(["mean_absolute_error"])).outputs
            ['y']
        """
        return self._evaluator.of_steps(metrics)

    # ---------------------------------------------------------------------------------- state

    @property
    def state(self) -> State:
        """The variables (parameters, optimizer state, ``step``, ``learning_rate``) by name.

        Reading returns a copy; ``session.state[name] = array`` sets one variable, and
        ``session.state = {…}`` several. Setting a float16 or bfloat16 parameter also sets its
        float32 value, ``<parameter>.master``, and vice versa.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> sorted(session.state)
            ['learning_rate', 'step', 'w']
            >>> session.state["w"] = [[0.75]]
            >>> session.step(examples.BATCH)["loss"]
            array(0.0625, dtype=float32)
        """
        return self._loaded.state

    @state.setter
    def state(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        self._loaded.state.assign(arrays)

    @property
    def parameters(self) -> Mapping[str, Array]:
        """Copies of the trained parameters by name, without optimizer state.

        A 16-bit parameter is given by its float32 value, from which training continues. Running
        statistics are not included, as they have no gradients. ``session.parameters = {…}`` sets
        some or all parameters and leaves optimizer state unchanged.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> _ = session.step(examples.BATCH)
            >>> dict(session.parameters)
            {'w': array([[0.5]], dtype=float32)}
        """
        return self._loaded.parameters()

    @parameters.setter
    def parameters(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        self._loaded.set_parameters(arrays)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step.

        With a schedule it is `peak_learning_rate` times the schedule's factor. Setting it scales
        the rest of the schedule, so that the next step has this rate.

        Raises:
            ArgumentError: If it is set where the schedule's factor is 0.
            OrtopsError: If the schedule has no number of steps yet.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> session.learning_rate = session.learning_rate * 2
            >>> session.run_steps([examples.BATCH] * 2).tolist()  # one step reaches the minimum
            [1.0, 0.0]
        """
        return self._evaluator.scheduled(self.peak_learning_rate)

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        factor = self._evaluator.scheduled(1.0)
        if not factor:
            raise ArgumentError(
                f"learning_rate cannot be {value!r:.80} now, because the schedule "
                f"{self.metadata.schedule} multiplies it by 0 in the next step; set "
                "peak_learning_rate, the schedule's peak"
            )
        self._loaded.set_learning_rate(value, factor)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate that the schedule multiplies; without a schedule, that of each step.

        It is ``learning_rate`` in `state`, and saved. Setting it scales the rest of the schedule.

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> rate = ortops.schedules.polynomial(0.2, steps=4, warmup=2)
            >>> session = examples.session(optimizer=ortops.optimizers.SGD(rate))
            >>> _ = session.step(examples.BATCH)
            >>> round(session.peak_learning_rate, 6), round(session.learning_rate, 6)
            (0.2, 0.1)
        """
        return float(self.state[self._loaded.learning_rates()[0]])

    @peak_learning_rate.setter
    def peak_learning_rate(self, value: float) -> None:
        self._loaded.set_learning_rate(value)

    def with_trainable(
        self,
        trainable: Sequence[str] | None,
        *,
        loss: LossLike | None = None,
        optimizer: str | Optimizer | type[Optimizer] | UpdateRule | None = None,
    ) -> TrainingSession:
        """Returns a session that trains other weights and continues from the current state.

        This unfreezes or freezes weights during training. Weights that were trained
        before keep the state of the optimizer, new ones get that of a first step, and ``step``, the
        learning rate, ``loss_scale`` and ``seed`` stay. A schedule continues. Adam's correction of
        the first steps follows ``step``, which is no longer small, so that its first updates of new
        weights are about three times as large as usual.

        The algorithm is built again as `ortops.build_training_model` built it. The file says how,
        if loss and optimizer are those of ortops with numbers and names as arguments, and for sums
        of such losses. Others, such as functions and learning rates with a schedule, have to be
        given again.

        Args:
            trainable: The parameters to train from now on (see `ortops.build_training_model`); None
                for all that the loss depends on.
            loss: The loss, if the file does not describe it.
            optimizer: The optimizer, if the file does not describe it. Its state has to be that of
                the one before; the learning rate remains the current one.

        Returns:
            A new session. This one is not changed, and shares no memory with it. The position of
            `fit` is not taken over, so that ``resume=True`` begins a new training.

        Raises:
            ModelError: If ``trainable`` does not fit the model.
            OrtopsError: If the file does not describe loss or optimizer.
            UnsupportedError: If the model has several training_info entries.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> _ = session.step(examples.BATCH)
            >>> other = session.with_trainable(["w"])
            >>> other.steps_done, other.step(examples.BATCH)["loss"]
            (1, array(0.25, dtype=float32))
        """
        model = rebuilt(self._file.model(), trainable, loss, optimizer)
        result = TrainingSession(model, **self._arguments)
        before, after = self.state, result.state
        kept = {name: before[name] for name in after if name in before}
        shapes = ((array.shape, after[name].shape) for name, array in kept.items())
        if any(own != other for own, other in shapes):
            raise OrtopsError("with_trainable: optimizer must have the state of the one before")
        result.state.assign(kept)
        return result

    @property
    def constants(self) -> Constants:
        """The floating-point weights that no step changes, by name: readable and settable.

        Such weights are those that ``trainable=`` left out, a target network, or the teacher of
        `ortops.losses.Distillation`. A value that is set takes effect in the next step, `evaluate`
        and `predict`, is saved, and is part of `inference_model`; `reset` restores the first one.
        Reading returns a copy. `constants.update({…})` sets several. They are not part of `state`.

        The first assignment of a weight builds the graph of a step again, as the weight becomes an
        input of it; later ones only copy the values.

        Example:
            >>> from ortops.docs import examples
            >>> examples.session().constants
            Constants()
        """
        return Constants(self._loaded)

    @property
    def properties(self) -> Properties:
        """Numbers and texts of your own by name, which are saved with the model.

        They are part of what `save`, checkpoints, `inference_model` and `with_trainable` make, as a
        JSON object under the key ``ortops.properties`` of the model's metadata, where every
        program that reads ONNX finds them. `reset` leaves them as they are.

        Setting one that is neither an integer of 64 bits, nor a finite number, nor a text raises an
        ArgumentError.

        Example:
            >>> import ortops
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> session.properties["best"] = 0.93
            >>> ortops.TrainingSession(session.model()).properties
            Properties({'best': 0.93})
        """
        return Properties(self._loaded)

    @property
    def learning_rates(self) -> LearningRates:
        """The learning rate of the next step of each training_info entry, by its name.

        ``session.learning_rates["main"]`` is `learning_rate`. The peaks are part of `state`, for
        other entries as ``<name>.learning_rate``, and are saved. Setting one changes it.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> session.learning_rates["main"] = 0.5
            >>> session.learning_rates, session.learning_rate
            (LearningRates({'main': 0.5}), 0.5)
        """
        return LearningRates(self._by_entry())

    @property
    def steps_done(self) -> int:
        """The number of finished steps; those of this session if the algorithm does not count them.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> losses = session.run_steps([examples.BATCH] * 5)
            >>> session.steps_done
            5
        """
        return self._loaded.steps_done

    @_documented_by(LoadedModel.free_memory)
    def free_memory(self) -> None:
        """Frees the memory that steps have taken; the variables stay."""
        self._loaded.free_memory()

    @_documented_by(LoadedModel.unchanged)
    def unchanged(self) -> contextlib.AbstractContextManager[None]:
        """A context at whose end the variables, the steps and the history are as before."""
        return self._loaded.unchanged()

    @_documented_by(LoadedModel.reset)
    def reset(self) -> None:
        """Returns to the start of training."""
        self._loaded.reset()

    def __reduce__(self) -> Any:
        raise OrtopsError(
            "session: it shares memory with onnxruntime and cannot be copied or pickled; save it "
            "and open the file, or pass session.model() to another TrainingSession"
        )

    # ---------------------------------------------------------------------------------- files

    @_documented_by(ModelFile.model)
    def model(self) -> onnx.ModelProto:
        """Returns the trainable model with the current state."""
        return self._file.model()

    @contextlib.contextmanager
    def _locked_file(self) -> Iterator[ModelFile]:
        """Holds the lock of the session, so that light models can be read from what it yields."""
        with finished_at_exit, self._loaded.lock:
            yield self._file

    @_documented_by(ModelFile.save)
    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trainable model with the current state; a session on it resumes exactly."""
        self._file.save(path)

    @_documented_by(ModelFile.inference_model)
    def inference_model(
        self,
        original: ModelLike | None = None,
        *,
        ema: bool = False,
        outputs: str | Sequence[str] | None = None,
    ) -> onnx.ModelProto:
        """Returns the trained model, without anything that belongs to training."""
        return self._file.inference_model(original, ema=ema, outputs=outputs)
