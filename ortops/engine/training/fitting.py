"""The training loop of `fit`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops import metrics as metric_functions
from ortops._common.arguments import boolean, function, number, whole_number
from ortops._common.numbers import plain
from ortops.engine.building.updates import SMALLEST_SCALE
from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training.anomalies import Anomalies
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.data import Data, Source, open_data, rows
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.gradients import Accumulation, Gradients, number_of
from ortops.engine.training.history import History
from ortops.engine.training.interruption import Interruption
from ortops.engine.training.limits import DEV_STEPS, Limits, checked_limits
from ortops.engine.training.position import (
    Entries,
    EpochState,
    FitArguments,
    Position,
    Progress,
    ResumeState,
)
from ortops.engine.training.prefetch import Prefetcher
from ortops.engine.training.probabilities import warn_of_probabilities
from ortops.engine.training.progress_bar import ProgressBar
from ortops.engine.training.sample_weights import ClassWeight, SampleWeight, Weighed, weigh
from ortops.engine.training.samples import Collate
from ortops.engine.training.schedule_length import planned_steps, set_length
from ortops.engine.training.state import State
from ortops.engine.training.training_metrics import TrainingMetrics
from ortops.engine.training.validation_split import split_source
from ortops.errors import ArgumentError, DivergedError, OrtopsError
from ortops.metrics import Metric, StreamingMetric

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = Mapping[str, Array]
Note: TypeAlias = Callable[[Mapping[str, Array]], object]
Step: TypeAlias = Callable[[Batch, Sequence[str], Note], object]

logger = logging.getLogger("ortops")


class Trainer(Protocol):
    """The interface of a session that the loop uses."""

    learning_rate: float
    peak_learning_rate: float
    resume_state: ResumeState

    @property
    def metadata(self) -> TrainingMetadata:
        """What the builder wrote about the model."""

    @property
    def state(self) -> State:
        """The variables."""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""

    @property
    def saved_in(self) -> str:
        """The file that the present state was saved in; "" if it was not saved."""

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and its parts."""

    def directions(self, metrics: Mapping[str, StreamingMetric]) -> dict[str, bool | None]:
        """Returns whether higher results of metrics are better."""

    def training_metrics(self, metrics: Mapping[str, StreamingMetric]) -> TrainingMetrics:
        """Returns metrics that read the outputs of training steps."""

    def apply(self, gradients: Gradients) -> None:
        """Applies gradients."""

    def model(self) -> onnx.ModelProto:
        """Returns the trainable model."""

    def evaluate(
        self, data: Data, *, batch_size: int, metrics: Sequence[str | Metric]
    ) -> dict[str, float]:
        """Computes loss and metrics of a data set."""

    def predict(self, data: Data, *, outputs: str) -> Array:
        """Computes a tensor of the model."""


class Differentiate(Protocol):
    """Computes the gradients of a batch."""

    def __call__(
        self, feeds: Batch, *, outputs: Sequence[str], after: Gradients | None
    ) -> Gradients:
        """Returns the gradients; see `ortops.TrainingSession.gradients`."""


@dataclass(frozen=True)
class Shared:
    """What several processes do together. All make the same calls in the same order, and wait.

    Attributes:
        agree: Combines the states of all processes. Arguments: the reason why training stops and
            the name of the signal that ends it ("" for none), and an object that should be the same
            in all processes. Returns the reason and the signal of any process, and whether the
            objects are the same.
        same: Raises an error if processes differ in an object. Arguments: its name and the object.
        add_up: Returns the gradients of a whole batch, given those of this process's parts.
    """

    agree: Callable[[str, str, object], tuple[str, str, bool]]
    same: Callable[[str, object], None]
    add_up: Callable[[Accumulation], Gradients]


@dataclass(frozen=True)
class StepStrategy:
    """How steps are made with the batches of a data set, by one process or several.

    Attributes:
        step: Makes a step with a batch. It calls its last argument with the outputs that its second
            argument names, before anything changes.
        gradients: Computes the gradients of a batch, or of this process's part of it.
        counts: For the loss and each of its parts, the output with its divisor; "" if all rows
            count.
        show: Sets the tensors that steps can return in addition to outputs.
        leads: Whether this process shows progress and calls callbacks that write.
        shared: What several processes do together; None for one process.
        entries: The training_info entries that make the steps; "" for all of them in each step.
        entry: The index of the training_info entry that makes all steps; None if several do.
        rates: The outputs that are the learning rates of entries in turn.
    """

    step: Step
    gradients: Differentiate
    counts: Sequence[str]
    show: Callable[[Sequence[str]], object]
    leads: bool = True
    shared: Shared | None = None
    entries: str = ""
    entry: int | None = None
    rates: Sequence[str] = ()


def fit(
    trainer: Trainer,
    strategy: StepStrategy,
    inputs: Inputs,
    data: Data,
    *,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    seed: int,
    validation: Data | None,
    validation_split: float,
    validate_every: int | None,
    max_steps: int | None,
    max_minutes: float | None,
    sample_weight: SampleWeight,
    class_weight: ClassWeight | None,
    collate: Collate | None,
    group_by_length: bool | Sequence[int],
    metrics: Sequence[str | Metric],
    train_metrics: bool,
    schedule: Callable[[float], float] | None,
    callbacks: Sequence[Callback],
    accumulate: int,
    prefetch: int,
    resume: bool,
    progress: bool,
    stop_on_nan: bool,
    detect_anomaly: bool,
    fast_dev_run: bool,
) -> History:
    """Trains on a data set.

    ``trainer`` is the session, ``strategy`` makes its steps, and a batch fills ``inputs``. For all
    other arguments, see `ortops.TrainingSession.fit`.
    """
    epochs = whole_number("epochs", epochs, 0)
    seed = whole_number("seed", seed, 0)
    accumulate = whole_number("accumulate", accumulate, 1)
    shuffle, resume = boolean("shuffle", shuffle), boolean("resume", resume)
    progress, stop_on_nan = boolean("progress", progress), boolean("stop_on_nan", stop_on_nan)
    wanted = epochs, max_steps
    if boolean("fast_dev_run", fast_dev_run):
        epochs, resume = min(epochs, 1), False
        max_steps = min(DEV_STEPS, DEV_STEPS if max_steps is None else max_steps)
    split = number("validation_split", validation_split, minimum=0, below=1)
    if split and validation is not None:
        raise ArgumentError("validation_split: validation= is given, too; give one of them")
    validated = validation is not None or split > 0
    limits = checked_limits(validate_every, max_steps, max_minutes, validated=validated)
    measures = boolean("train_metrics", train_metrics)
    computed = _check(trainer, validated or measures, metrics, schedule, callbacks)
    measured = _measured(trainer, strategy, metrics) if measures else None
    detects = boolean("detect_anomaly", detect_anomaly)
    anomalies = _anomalies(trainer, strategy) if detects else None
    reading: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "collate": collate}
    weighed = weigh(data, inputs, trainer.metadata, sample_weight, class_weight, split)
    groups = group_by_length is not False
    if groups and not shuffle:
        raise ArgumentError(
            "group_by_length changes the order of the rows, so it needs shuffle=True, got False"
        )
    source = weighed.open(prefetch=prefetch, group_by_length=group_by_length, **reading)
    if validation is not None:
        validation = open_data(validation, inputs, **reading)
    elif split:
        source, validation = _split(source, weighed, inputs, split, reading)
    if fast_dev_run:
        callbacks = [each for each in callbacks if _is_harmless(each)]
        validation = None if validation is None else validation.first(DEV_STEPS)
    call = FitArguments(
        *(epochs, int(batch_size), shuffle, seed, accumulate, source.rows, source.batches),
        *(split, strategy.entries, groups),
    )
    begun = trainer.resume_state.position if resume else None
    position = _first_position(trainer, call, begun)
    if strategy.shared is not None:
        _check_same(strategy.shared, call, limits, position)
    epoch, planned = position.epoch_state.epoch, begun.epoch_state.call.epochs if begun else 0
    if epoch > epochs and (begun is None or begun.epoch_state.epoch > planned):
        return position.epoch_state.history
    if begun is not None and _has_ended(begun, limits, trainer.steps_done):
        return begun.epoch_state.history
    whole = dataclasses.replace(call, epochs=wanted[0])
    set_length(trainer, whole, wanted[1], new=begun is None)
    loop = _Loop(trainer, strategy, source, validation, metrics, schedule, callbacks, position)
    loop.limits, loop.measured = limits, measured
    loop.anomalies = anomalies
    loop.directions = _directions(trainer, computed, validated=validated, measured=measures)
    strategy.show(measured.outputs if measured else [])
    if begun is not None and epochs > planned and strategy.leads:
        _warn_if_schedule_ends(trainer, position, max_steps)
    loop.progress, loop.stop_on_nan = progress and strategy.leads, stop_on_nan
    return _run(loop)


def _run(loop: _Loop) -> History:
    """Trains until the end, and raises the exception of a signal."""
    interruption = loop.interruption
    try:
        interruption.watch()
        with loop.closing():
            loop.run()
    finally:
        interruption.release()
    if interruption.name:
        if loop.strategy.leads:
            _log_how_to_continue(loop.trainer, interruption.name)
        interruption.throw()
    return loop.results()


def _measured(
    trainer: Trainer, strategy: StepStrategy, metrics: Sequence[str | Metric]
) -> TrainingMetrics:
    """Returns the metrics of training."""
    chosen = metric_functions.resolve(metrics)
    if not chosen:
        raise ArgumentError("train_metrics: there are no metrics; give metrics=")
    if strategy.shared is not None:
        raise ArgumentError(
            "train_metrics: each rank of a joined session has only its rows of a batch, so metrics "
            "of whole batches are not known; leave it out, and give validation="
        )
    return trainer.training_metrics(chosen)


def _split(
    source: Source, weighed: Weighed, inputs: Inputs, split: float, reading: Mapping[str, Any]
) -> tuple[Source, Source]:
    """Returns the data for training, and those for validation, whose classes have no weights."""
    plain = dataclasses.replace(weighed, inputs=inputs)
    unweighed = source if weighed.inputs is inputs else plain.open(**reading)
    return split_source(source, split)[0], split_source(unweighed, split)[1]


def _is_harmless(callback: Callback) -> bool:
    """Whether a callback is called with ``fast_dev_run=True``: one of the user's without files."""
    own = type(callback).__module__.startswith("ortops.")
    return not (callback.saves or callback.writes or own)


def _anomalies(trainer: Trainer, strategy: StepStrategy) -> Anomalies:
    """Returns what explains values that are not finite."""
    if strategy.shared is not None:
        raise ArgumentError(
            "detect_anomaly: a joined session divides each batch, so a step cannot be repeated by "
            "one process; train in one process to find the node"
        )
    if strategy.entry is None:
        raise ArgumentError(
            "detect_anomaly: several training_info entries make steps; train one of them with "
            "entry="
        )
    return Anomalies(trainer, strategy.entry)


def _has_ended(begun: Position, limits: Limits, steps: int) -> bool:
    """Whether the training to resume has ended at a limit, and the end was recorded."""
    epoch_state, progress = begun
    recorded = epoch_state.cut is not None or not progress.batch
    return recorded and limits.reaches_steps(steps - epoch_state.begun)


def _check(
    trainer: Trainer,
    validated: bool,
    metrics: Sequence[str | Metric],
    schedule: Callable[[float], float] | None,
    callbacks: Sequence[Callback],
) -> dict[str, bool | None]:
    """Checks those arguments of `fit` that are objects, and returns the directions of metrics."""
    if not isinstance(callbacks, Sequence):
        raise ArgumentError(f"callbacks must be a list of callbacks, got {callbacks!r:.80}")
    if schedule is not None:
        function("schedule", schedule, "a function of the fraction of epochs that are finished")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ArgumentError(
                "callbacks must be instances of subclasses of ortops.callbacks.Callback, got "
                f"{callback!r:.80}"
            )
    trainer.loss_names()
    chosen = metric_functions.resolve(metrics)
    if chosen and not validated:
        raise OrtopsError(
            f"metrics: '{next(iter(chosen))}' is computed on validation data; give "
            "validation= or validation_split=, or train_metrics=True, or use evaluate"
        )
    if schedule is not None:
        trainer.metadata.refuse_second_schedule()
    return trainer.directions(chosen)


def _directions(
    trainer: Trainer, metrics: Mapping[str, bool | None], *, validated: bool, measured: bool
) -> dict[str, bool | None]:
    """Returns the losses and metrics in the history, each with whether higher is better.

    Args:
        trainer: The session.
        metrics: The metrics.
        validated: Whether they are computed on validation data.
        measured: Whether they are computed on the training data.
    """
    parts = [part.name for part in trainer.metadata.losses]
    losses = ["loss", *(parts if len(parts) > 1 else [])]
    known = {**dict.fromkeys(losses, False), **metrics}
    found = {name: more for name, more in known.items() if measured or name in losses}
    if validated:
        found |= {f"validation_{name}": more for name, more in known.items()}
    return found


def _first_position(trainer: Trainer, call: FitArguments, begun: Position | None) -> Position:
    """Returns the position at which a call of `fit` starts.

    Args:
        trainer: The session.
        call: The arguments of this call.
        begun: The position to resume from; None for a new training.
    """
    if begun is None:
        made = trainer.steps_done
        epoch_state = EpochState(
            call, 1, made, Entries(History()), 0, list, Entries(History()), begun=made
        )
        position = Position(epoch_state, Progress())
    else:
        position = begun.resumed(call)
        position.progress.check_sums(len(trainer.loss_names()))
    return position


class _Loop:
    """A call of `fit`, from a position on.

    Attributes:
        position: The position in the training.
        history: The entries of the finished epochs.
        interruption: The signal that came, if any.
        progress: Whether to show a line for each epoch.
        stop_on_nan: Whether to stop at a loss that is NaN, infinite, or below what it can be.
        limits: When validation is due within an epoch, and when training ends.
        measured: The metrics of training, if any.
        anomalies: What explains values that are not finite, if asked for.
        directions: See `Record`.
    """

    progress = True
    stop_on_nan = True
    limits = Limits()
    measured: TrainingMetrics | None = None
    anomalies: Anomalies | None = None

    def __init__(
        self,
        trainer: Trainer,
        strategy: StepStrategy,
        source: Source,
        validation: Source | None,
        metrics: Sequence[str | Metric],
        schedule: Callable[[float], float] | None,
        callbacks: Sequence[Callback],
        position: Position,
    ) -> None:
        self.trainer = trainer
        self.strategy = strategy
        self.source = source
        self.validation = validation
        self.metrics = metrics
        self.schedule = schedule
        called = [each for each in callbacks if strategy.leads or not (each.saves or each.writes)]
        self.callbacks = sorted(
            called, key=lambda each: each.saves and not _defines(each, "on_save")
        )
        self.position = position
        self.directions: Mapping[str, bool | None] = {}
        self.entries = Entries(position.epoch_state.history)
        self.history = self.entries.history
        self.validations = Entries(History(position.epoch_state.validations.history))
        self.history.validations = self.validations.history
        self.interruption = Interruption(_run.__code__)
        self.stopped = ""
        self._limit = ""  # why training ends within or after an epoch
        self._cut = False  # whether it ends within one
        self._done = Progress()
        self._names = trainer.loss_names()
        rate = trainer.metadata.scheduled_learning_rate
        self._rate = rate
        self._counts = strategy.counts if any(strategy.counts) else []
        self._outputs = [*self._names, *(name for name in (rate, *self._counts) if name)]
        self._shares = {part.name: part.weight for part in trainer.metadata.losses}
        self._revalidates = any(
            _defines(each, "on_validation") and not type(each).__module__.startswith("ortops.")
            for each in self.callbacks
        )  # as they may change the model; callbacks of ortops do not
        self._on_step = [each for each in self.callbacks if _defines(each, "on_step")]
        self._on_save = [each for each in self.callbacks if _defines(each, "on_save")]
        self._on_save_of_step = [each for each in self._on_step if _defines(each, "on_save")]
        self._losses: list[float] = []
        self._said = False
        self._is_first = True
        self._zeros = (0.0,) * len(self._names)
        self._clock = time.perf_counter() - position.progress.seconds
        self._began = sum(entry.get("seconds", 0.0) for entry in self.history)  # the epoch
        self._restore(callbacks)

    def _restore(self, callbacks: Sequence[Callback]) -> None:
        """Restores the states of the callbacks, and registers them for later positions."""
        left = list(callbacks)
        for saved in self.position.epoch_state.states():
            name, state = saved["class"], saved["state"]
            callback = next((each for each in left if type(each).__name__ == name), None)
            if callback is not None:
                left.remove(callback)
                callback.restore(dict(state))
            elif state:
                raise OrtopsError(
                    f"fit: the training to resume had the callback {name}, which is missing; give "
                    "one, or leave out resume=True to start a new training"
                )
        given = list(callbacks)
        epoch_state = self.position.epoch_state._replace(
            entries=self.entries,
            validations=self.validations,
            states=lambda: [
                {"class": type(each).__name__, "state": each.state()} for each in given
            ],
        )
        self.position = self.position._replace(epoch_state=epoch_state)

    def run(self) -> None:
        """Trains until all epochs are finished or something ends training early."""
        self.trainer.resume_state.set(self.position)
        self._notify("on_begin", self._averages())
        if self.stopped and self.strategy.leads:
            logger.warning("fit: stopped before the first step: %s", self.stopped)
        epochs = self.position.epoch_state.call.epochs
        while self.position.epoch_state.epoch <= epochs and not self._ended():
            if self._reaches_limit() and not self.position.progress.batch:
                break
            bar = self._bar() if self.progress else None
            entry = None
            try:
                self._train(bar)
                if not self._ended():
                    entry = self._finish_epoch()
            finally:
                if bar and entry is None:
                    bar.abandon()
            if entry is None:
                break
            if bar:
                bar.finish(entry)
            self._notify("on_epoch", entry, finished=not self._cut)
            if self._limit:
                break
        self._ended()  # waits until callbacks of other processes have written
        (*_, cut), progress = self.position
        between = bool(self.history) and not progress.batch
        last = self.history[-1] if between else cut or self._averages()
        self._notify("on_end", dict(last), finished=between)
        self._ended()  # waits for the others, as a signal may end all processes at once

    def _ended(self) -> bool:
        ended, _ = self._agree(None)
        return ended

    def _agree(self, found: object) -> tuple[bool, bool]:
        """Returns whether training ends, and whether all processes have the same object.

        Args:
            found: The object.
        """
        if self.strategy.shared is None:
            return bool(self.stopped or self.interruption.name), True
        stopped, signal, alike = self.strategy.shared.agree(
            self.stopped, self.interruption.name, found
        )
        self.stopped = stopped
        if signal:  # keeps one that has come since
            self.interruption.name = signal
        return bool(stopped or signal), alike

    # -------------------------------------------------------------------------------- an epoch

    def _train(self, bar: ProgressBar | None) -> None:
        """Trains on the remaining batches of an epoch."""
        epoch_state, progress = self.position
        call = epoch_state.call
        if self.schedule is not None and not progress.batch:
            self.trainer.learning_rate = self.schedule((epoch_state.epoch - 1) / call.epochs)
        order = np.random.default_rng((call.seed, epoch_state.first_step)) if call.shuffle else None
        if self.measured is not None:
            if progress.batch:
                self.measured.resume(progress.metrics)
            else:
                self.measured.begin()
        batches = self.source.epoch(epoch_state.epoch, order=order, start=progress.batch)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close, batches)
            make = self._make_joined_update if call.accumulate > 1 else self._make_update
            if self._validates_within(batches):  # that of a resumed training may be missing
                return
            while not self._reaches_limit() and make(batches):
                if bar:
                    progress = self.position.progress
                    bar.update(progress.batch, progress.samples, self._shown)
                if self._on_step:
                    self._notify_of_step()
                if self._ended() or self._validates_within(batches):
                    return
            self._cut = bool(self._limit) and self._has_more(batches)

    def _reaches_limit(self) -> bool:
        """Whether training ends here, in all processes, because of a limit."""
        made = self.trainer.steps_done - self.position.epoch_state.begun
        self._limit = self._limit or self.limits.ending(made)
        if self.strategy.shared is not None and self.limits.max_minutes is not None:
            self._limit, _, _ = self.strategy.shared.agree(self._limit, "", None)
        return bool(self._limit)

    def _has_more(self, batches: Iterator[Batch]) -> bool:
        """Whether the epoch has more batches."""
        known = self.source.batches
        if known is not None:
            return self.position.progress.batch < known
        return self._read(batches) is not None

    def _validates_within(self, batches: Iterator[Batch]) -> bool:
        """Validates within the epoch, if it is due.

        Returns:
            Whether training ends.
        """
        epoch_state, progress = self.position
        steps = self.trainer.steps_done
        due = progress.batch and self.limits.is_validation_due(steps)
        if not due or self.history.is_validated(
            self.position.epoch_state.epoch, self.trainer.steps_done
        ):
            return False
        paused = batches.paused if isinstance(batches, Prefetcher) else contextlib.nullcontext()
        measured = self._measure(paused)
        if self._ended():  # in all processes
            return True
        entry = {"epoch": epoch_state.epoch, "steps": steps, **measured}
        self.history.validations.append(entry)
        self._notify("on_validation", dict(measured))
        return self._ended()

    def _measure(self, paused: contextlib.AbstractContextManager[object]) -> dict[str, float]:
        """Returns the results on the validation data; those before a signal mean nothing.

        Args:
            paused: A context in which nothing else reads data.
        """

        def measure() -> dict[str, float]:
            with paused:
                return self.trainer.evaluate(
                    self.validation,
                    batch_size=self.position.epoch_state.call.batch_size,
                    metrics=self.metrics,
                )

        measured = self.interruption.at_once(measure) if self.validation is not None else None
        return {f"validation_{name}": value for name, value in (measured or {}).items()}

    def _shown(self) -> dict[str, float]:
        """Returns the numbers of the progress bar within an epoch."""
        cheap = [*self.position.progress.metrics]  # not those that read all rows again
        measured = self.measured.results(cheap) if self.measured is not None else {}
        return (
            self._averages() | measured | self.history.last_within(self.position.epoch_state.epoch)
        )

    def _close(self, batches: Iterator[Batch]) -> None:
        """Closes the batches; after a signal, without waiting for one that is being read."""
        if isinstance(batches, Prefetcher):
            batches.close(wait=not self.interruption.name)
        elif hasattr(batches, "close"):
            batches.close()

    def _read(self, batches: Iterator[Batch]) -> Batch | None:
        """Returns the next batch; None at the end of the epoch, or if a signal came.

        A signal does not wait for the data: the session is in the state after a whole step.
        """
        batch = self.interruption.at_once(functools.partial(next, batches, None))
        if batch is not None and self._is_first and self.strategy.leads:
            warn_of_probabilities(self.trainer, batch)
        self._is_first = False
        return batch

    def _is_update_due(self, sizes: Sequence[int]) -> bool:
        """Whether an update is made with the batches that were read.

        It is not made at the end of the epoch, nor if any process got a signal since the last
        update.

        Args:
            sizes: The numbers of rows of the batches. If another process has other batches, an
                error is raised.
        """
        shared = self.strategy.shared
        if shared is None:
            return bool(sizes)
        ended, alike = self._agree(list(sizes))
        epoch_state, progress = self.position
        if not ended and not alike:
            missing = epoch_state.call.accumulate - len(sizes)
            for number, size in enumerate([*sizes, *["none"] * missing], progress.batch + 1):
                shared.same(f"the rows of batch {number} of epoch {epoch_state.epoch}", size)
        return bool(sizes) and not ended

    def _make_update(self, batches: Iterator[Batch]) -> bool:
        """Makes a step with the next batch; afterwards, the position is the one after the batch.

        Returns:
            Whether there was a batch.
        """
        before = self.position.progress
        batch = self._read(batches)
        size = 0 if batch is None else rows(batch)
        if not self._is_update_due([size] if batch is not None else []):
            return False
        assert batch is not None

        def prepare(found: Mapping[str, Array]) -> None:
            if self.measured is not None:
                self.measured.add(found, batch)
            self._prepare(before, 1, size, found)

        if self.anomalies is not None:
            self.anomalies.begin()
        self.strategy.step(batch, self._step_outputs(), prepare)
        if self.anomalies is not None:
            self.anomalies.check(self._losses[0], [batch])
        if self.stop_on_nan:
            where = f"batch {before.batch + 1} of epoch {self.position.epoch_state.epoch}"
            _check_loss(self.trainer, self._losses[0], batch, where)
        return True

    def _make_joined_update(self, batches: Iterator[Batch]) -> bool:
        """Makes a step with the accumulated gradients of the next batches.

        Returns:
            Whether there were any, and no signal came between them.
        """
        epoch_state, before = self.position
        shared = self.strategy.shared
        total: Accumulation | None = None
        last: Gradients | None = None
        wrong: DivergedError | None = None
        sizes: list[int] = []
        read: Batch = {}
        kept: list[Batch] = []
        where = ""
        if self.anomalies is not None:
            self.anomalies.begin()
        while len(sizes) < epoch_state.call.accumulate:
            batch = self._read(batches)
            if batch is None:
                break
            last = self.strategy.gradients(batch, outputs=self._step_outputs(), after=last)
            if self.measured is not None:
                self.measured.add(last.outputs, batch)
            sizes.append(rows(batch))
            if self.anomalies is not None:  # copies: a loader may fill the same memory again
                kept.append({name: array.copy() for name, array in batch.items()})
                self.anomalies.check(last.loss, kept, made=False)
            where = f"batch {before.batch + len(sizes)} of epoch {epoch_state.epoch}"
            if self.stop_on_nan and last.count and not math.isfinite(last.loss):
                wrong = wrong or _diverged(self.trainer, last.loss, batch, where, made=False)
                if shared is None:
                    raise wrong
            if total is None:
                exact = not self._differs(last)
                total = Accumulation(last, exact=exact, shared=shared is not None)
            else:
                total.add(last)
            read = batch
        if len(sizes) < epoch_state.call.accumulate and shared is None and self.interruption.name:
            return False
        if not self._is_update_due(sizes):
            return False
        assert total is not None
        joined = total.result() if shared is None else shared.add_up(total)
        if self.stop_on_nan and shared is not None and not math.isfinite(joined.loss):
            where = f"batches up to {where}"
            raise wrong or _diverged(self.trainer, joined.loss, None, where, made=False)
        self._prepare(before, len(sizes), sum(sizes), joined.outputs)
        self.trainer.apply(joined)
        if self.anomalies is not None:
            self.anomalies.check(self._losses[0], kept, joined)
        if self.stop_on_nan:
            _check_loss(self.trainer, self._losses[0], read, where)
        return True

    def _step_outputs(self) -> Sequence[str]:
        """Returns the outputs of a step that are read."""
        more = self.measured.outputs if self.measured is not None else []
        return [*self._outputs, *more] if more else self._outputs

    def _differs(self, gradients: Gradients) -> bool:
        """Whether the step differs from that of the joined batch; warns once."""
        if not gradients.is_estimate:
            return False
        if not self._said:
            self._said = True
            log = logger.warning if self.strategy.leads else logger.debug
            log(
                "fit: accumulate=%d: %s, so a step differs from that of one batch with all rows",
                self.position.epoch_state.call.accumulate,
                gradients.not_additive,
            )
        return True

    def _prepare(self, before: Progress, count: int, size: int, found: Mapping[str, Array]) -> None:
        """Sets the position after the batches of the next step."""
        self._losses = [number_of(found[name]) for name in self._names]
        added: Sequence[float] = [size] * len(self._names)
        weights: tuple[float, ...] = ()
        units: tuple[float, ...] = ()
        if self._counts:
            added, units = self._weigh(before, size, found)
            sums = zip(before.weights or (before.samples,) * len(added), added, strict=True)
            weights = tuple([float(weight + more) for weight, more in sums])
        summands = zip(before.totals or self._zeros, self._losses, added, strict=True)
        progress = Progress(
            before.batch + count,
            before.samples + size,
            tuple([total + loss * weight for total, loss, weight in summands]),
            float(found[self._rate]) if self._rate else None,
            time.perf_counter() - self._clock,
            weights,
            units,
            self.measured.states() if self.measured is not None else {},
            {name: number_of(found[name]) for name in self.strategy.rates if name in found},
        )
        self.position = Position(self.position.epoch_state, progress)
        self.trainer.resume_state.prepare(self.position)

    def _weigh(
        self, before: Progress, size: int, found: Mapping[str, Array]
    ) -> tuple[Sequence[float], tuple[float, ...]]:
        """Returns the weights of the losses of some rows in the averages of the epoch.

        The weight of a loss is its divisor, such as the number of labels that are not ignored, in
        units that make it the number of rows if all labels count.

        Args:
            before: The position before these rows.
            size: The number of rows.
            found: The losses and counts.

        Returns:
            The weights, and the units.
        """
        weights, units = [], []
        for place, unit in enumerate(before.units or self._zeros):
            name, weight = self._counts[place], float(size)
            if name:
                count = number_of(found[name])
                unit = unit or count / size
                weight = count / unit if count else 0.0
            if not weight:
                self._losses[place] = 0.0  # in files of older versions it is 0 / 0
            weights.append(weight)
            units.append(unit)
        if any(weight != size for weight in weights[1:]):
            weights[0] = 0.0  # the average of the sum is the sum of the averages of its summands
        return weights, tuple(units)

    def _finish_epoch(self) -> dict[str, float] | None:
        """Evaluates, and moves to the next epoch.

        Returns:
            The entry of the history; None if a signal came before.
        """
        epoch_state, progress = self.position
        entry = self._averages()
        if self.measured is not None:
            entry |= self.measured.results()
        if (
            self.history.is_validated(self.position.epoch_state.epoch, self.trainer.steps_done)
            and not self._revalidates
        ):
            entry |= self.history.last_within(self.position.epoch_state.epoch)
        else:
            entry |= self._measure(contextlib.nullcontext())
        if self._ended():  # in all processes, whether or not each of them evaluates
            return None
        seconds = time.perf_counter() - self._clock
        entry |= self._present_rate()
        entry["steps"] = self.trainer.steps_done
        entry["seconds"] = seconds - self._began
        if self._cut:
            epoch_state = epoch_state._replace(cut=entry)
            self.position = Position(epoch_state, progress._replace(seconds=seconds))
            self.trainer.resume_state.set(self.position)
            return entry
        self._began = seconds
        self.history.append(entry)
        epoch_state = epoch_state._replace(
            epoch=epoch_state.epoch + 1,
            first_step=self.trainer.steps_done,
            entries=self.entries,
            finished=len(self.history),
        )
        self._done = progress
        kept = Progress(rate=progress.rate, seconds=seconds, rates=progress.rates)
        self.position = Position(epoch_state, kept)
        self.trainer.resume_state.set(self.position)
        return entry

    def results(self) -> History:
        """Returns a new list of the entries of all epochs, also of one that a limit cut short."""
        cut = self.position.epoch_state.cut
        return History([*self.history, *([cut] if cut else [])], self.history.validations)

    def _averages(self) -> dict[str, float]:
        """Returns the mean losses of the epoch so far; NaN if no label counts."""
        progress = self.position.progress
        names = ["loss", *self._names[1:]]
        if not progress.samples:
            return {}
        weights: Sequence[float] = progress.weights or [progress.samples] * len(names)
        pairs = zip(progress.totals, weights, strict=True)
        values = [total / weight if weight else math.nan for total, weight in pairs]
        if len(names) > 1 and weights[0] != progress.samples:
            parts = zip(names[1:], values[1:], weights[1:], strict=True)
            summands = [self._shares[name] * value for name, value, weight in parts if weight]
            values[0] = sum(summands) if summands else math.nan
        return dict(zip(names, values, strict=True))

    def _present_rate(self) -> dict[str, float]:
        """Returns the learning rate of the last step, if there is one, and those of entries."""
        rate, rates = self.position.progress.rate, self.position.progress.rates
        if self.strategy.rates:
            first = rates.get(self.strategy.rates[0])
            return dict(rates) if first is None else {"learning_rate": first, **rates}
        if rate is None:
            try:
                rate = self.trainer.learning_rate
            except OrtopsError:  # the algorithm has none
                return {}
        return {"learning_rate": rate}

    def _bar(self) -> ProgressBar:
        epoch_state, progress = self.position
        return ProgressBar(
            epoch_state.epoch,
            epoch_state.call.epochs,
            self.source.batches,
            progress.batch,
            progress.samples,
        )

    # ------------------------------------------------------------------------------- callbacks

    def _notify_of_step(self) -> None:
        names = ["loss", *self._names[1:]]
        values = dict(zip(names, self._losses, strict=True)) | self._present_rate()
        self._call("on_step", self._record(values), self._on_step, self._on_save_of_step)

    def _notify(self, event: str, values: dict[str, float], *, finished: bool = False) -> None:
        self._call(event, self._record(values, finished=finished), self.callbacks, self._on_save)

    def _call(
        self, event: str, record: Record, callbacks: Sequence[Callback], saving: Sequence[Callback]
    ) -> None:
        """Calls callbacks, and lets those that save do so after all have seen the event.

        If one raises, the others see the event and save all the same, and then it is raised.
        """
        failed: Exception | None = None

        def call(method: str, callback: Callback, record: Record) -> None:
            nonlocal failed
            try:
                getattr(callback, method)(record, self.trainer)
                _make_plain(record.values, callback)
            except Exception as error:
                if event == "on_begin":  # nothing has been trained
                    raise
                if failed is not None:
                    failed.add_note(f"then {type(callback).__name__}.{method} raised {error!r}")
                failed = failed or error

        for callback in callbacks:
            call(event, callback, record)
        for callback in saving:
            call("on_save", callback, record)
        self.stopped = self.stopped or record.stopped
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes all callbacks at the end, whatever is raised, also by one of them."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self.callbacks):
                stack.callback(callback.on_close)
            yield

    def _record(self, values: dict[str, float], *, finished: bool = False) -> Record:
        epoch_state, progress = self.position
        if finished:
            epoch_state, progress = epoch_state._replace(epoch=epoch_state.epoch - 1), self._done
        return Record(
            epoch=min(epoch_state.epoch, epoch_state.call.epochs),
            epochs=epoch_state.call.epochs,
            batch=progress.batch,
            batches=self.source.batches,
            step=self.trainer.steps_done,
            values=values,
            samples=progress.samples,
            seconds=time.perf_counter() - self._clock,
            history=self.results() if epoch_state.cut else self.history,
            interrupted=self.interruption.name,
            cut=self._cut,
            accumulate=epoch_state.call.accumulate,
            directions=self.directions,
        )


def _defines(callback: Callback, method: str) -> bool:
    """Whether a callback overrides a method of `Callback`."""
    return getattr(type(callback), method) is not getattr(Callback, method)


def _make_plain(values: dict[str, float], callback: Callback) -> None:
    """Converts the numbers that a callback put into a record to Python's, for files."""
    for name, value in values.items():
        if type(value) is not float:
            found = plain(value)
            if found is None:
                del values[name]  # or no file could be written of the session from now on
                raise OrtopsError(
                    f"callback {type(callback).__name__}: record.values[{name!r}] must be a "
                    f"number, got {value!r:.80}"
                )
            values[name] = found


def _check_same(shared: Shared, call: FitArguments, limits: Limits, position: Position) -> None:
    """Raises an error if processes have different arguments or positions."""
    epoch_state = position.epoch_state
    progress = {
        "epoch": epoch_state.epoch,
        "first_step": epoch_state.first_step,
        "batch": position.progress.batch,
    }
    arguments = asdict(call) | limits.arguments | progress
    given = (f"{name}={value}" for name, value in arguments.items())
    shared.same("the arguments of fit, and where it begins", ", ".join(given))


def _warn_if_schedule_ends(trainer: Trainer, position: Position, max_steps: int | None) -> None:
    """Warns if training has more steps than the schedule in its graph."""
    schedule = trainer.metadata.schedule
    found = re.search(r"[(, ]steps=(\d+)", schedule)
    planned = int(found[1]) if found else planned_steps(trainer)
    call, progress = position.epoch_state.call, position.progress
    if not planned:  # it never ends
        return
    epochs = call.epochs - position.epoch_state.epoch + 1
    if max_steps is not None and position.epoch_state.begun + max_steps <= planned:
        return
    if call.batches is not None:
        whole, done = (-(-batches // call.accumulate) for batches in (call.batches, progress.batch))
        if trainer.steps_done + epochs * whole - done <= planned:
            return
    logger.warning(
        "fit: the model's schedule, %s, ends after %s steps; later steps keep its final learning "
        "rate, which may be 0",
        *(schedule, planned),
    )


def _log_how_to_continue(trainer: Trainer, name: str) -> None:
    file = trainer.saved_in
    if file:
        how = f"TrainingSession({file!r}).fit(…, resume=True)"
    else:
        how = "fit(…, resume=True) of this session, or of the file that save(path) writes,"
    logger.warning(
        "training interrupted by %s after step %d; call %s to continue",
        *(name, trainer.steps_done, how),
    )


_ROUNDING = 0.01
"""How far below 0 the mean of losses that are not negative may be, by rounding in 16 bits."""


def _is_mean(metadata: TrainingMetadata) -> bool:
    """Whether a loss has no summand that is a sum over rows."""
    return not any(part.is_sum for part in metadata.losses)


def _check_loss(trainer: Trainer, loss: float, feeds: Batch, where: str) -> None:
    """Raises an error if the loss is not finite, or if no step can be made any more."""
    if not math.isfinite(loss):
        raise _diverged(trainer, loss, feeds, where)
    metadata = trainer.metadata
    if metadata.not_negative and loss < -_ROUNDING * (1 if _is_mean(metadata) else rows(feeds)):
        raise DivergedError(
            f"loss is {loss:g} at step {trainer.steps_done} ({where}), but the loss "
            f"{', '.join(part.label for part in metadata.losses)} cannot be negative, so it reads "
            "values that are not what it expects, such as scores in place of log-probabilities, or "
            "targets outside of [0, 1]; check the model's output and the targets. Pass "
            "stop_on_nan=False to continue anyway"
        )
    if (
        not metadata.loss_scale
        or not {metadata.loss_scale, metadata.good_steps} <= trainer.state.keys()
    ):
        return
    scale = float(trainer.state[metadata.loss_scale])
    good_steps = int(trainer.state[metadata.good_steps])
    if scale <= SMALLEST_SCALE and not good_steps:
        raise DivergedError(
            f"gradients are infinite or NaN after step {trainer.steps_done} ({where}) even at the "
            f"smallest loss scale, {scale:g}, so steps have no effect; check logarithms, "
            "divisions, roots and powers in the model and the loss, then set "
            f"state['{metadata.loss_scale}']. Pass stop_on_nan=False to continue anyway"
        )


def _diverged(
    trainer: Trainer, loss: float, feeds: Batch | None, where: str, *, made: bool = True
) -> DivergedError:
    """Returns the error for a loss that is not finite, with its likely cause.

    Args:
        trainer: The session.
        loss: The loss.
        feeds: The batch; None if the cause is in another process.
        where: Which batch it is.
        made: Whether the step was made.
    """
    wrong = []
    for name, array in (feeds or {}).items():
        if array.dtype.kind not in "fc":
            continue
        places = np.argwhere(~np.isfinite(array))
        if len(places):
            value = array[tuple(places[0])]
            wrong.append(
                f"'{name}' has {len(places)} of {array.size} values that are not finite, first "
                f"{value} at {places[0].tolist()}"
            )
    if wrong:
        look = f"in the batch, {', '.join(wrong)}; clean the data"
    elif feeds is None:
        look = "the part of this process is finite; see the error of the other process"
    else:
        try:
            rate = f" ({trainer.learning_rate:g})"
        except OrtopsError:  # the algorithm has none
            rate = ""
        look = (
            f"the batch is finite, so check the learning rate{rate}, and logarithms, divisions, "
            "roots and powers in the model and the loss; fit(…, detect_anomaly=True) names the node"
        )
    if not made:
        return DivergedError(
            f"loss is {loss} at step {trainer.steps_done + 1} ({where}): {look}. The step has not "
            "been made. Pass stop_on_nan=False to continue anyway"
        )
    return DivergedError(
        f"loss is {loss} at step {trainer.steps_done} ({where}): {look}. The session is in the "
        "state after this step; earlier weights are available only if they were saved. Pass "
        "stop_on_nan=False to continue anyway"
    )
