"""The loop of `fit`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from ortops import metrics as metric_functions
from ortops.errors import DivergedError, OrtopsError
from ortops.metrics import Metric, StreamingMetric
from ortops.training.callback import Callback, Record
from ortops.training.data import Data, Source, rows
from ortops.training.evaluation import number_of
from ortops.training.gradients import Accumulation, Gradients
from ortops.training.history import History
from ortops.training.interruption import Interruption
from ortops.training.metadata import TrainingMetadata
from ortops.training.position import Begun, Call, Place, Position, Standing
from ortops.training.progress import Progress
from ortops.training.state import State
from ortops.training.updates import SMALLEST_SCALE

__all__ = ["Trainer", "Way", "check", "fit"]

Array: TypeAlias = npt.NDArray[Any]
Batch: TypeAlias = Mapping[str, Array]
Note: TypeAlias = Callable[[Mapping[str, Array]], object]
Step: TypeAlias = Callable[[Batch, Sequence[str], Note], object]

logger = logging.getLogger("ortops")


class Trainer(Protocol):
    """What the loop needs of a session."""

    learning_rate: float
    standing: Standing

    @property
    def noted(self) -> TrainingMetadata:
        """What the builder wrote about the model."""

    @property
    def state(self) -> State:
        """The variables."""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""

    @property
    def saved_in(self) -> str:
        """The file that the present state was saved in, if it was."""

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and its parts."""

    def target(self, metrics: Mapping[str, StreamingMetric]) -> str:
        """Returns the input that metrics compare outputs with."""

    def apply(self, gradients: Gradients) -> None:
        """Makes a step of gradients."""

    def evaluate(
        self, data: Data, *, batch_size: int, metrics: Sequence[str | Metric]
    ) -> dict[str, float]:
        """Computes loss and metrics of a data set."""


class Differentiate(Protocol):
    """Computes the gradients of a batch."""

    def __call__(
        self, feeds: Batch, *, outputs: Sequence[str], after: Gradients | None
    ) -> Gradients:
        """Returns them; see `ortops.TrainingSession.gradients`."""


@dataclass(frozen=True)
class Way:
    """How steps are made with the batches of the data set, by one process or several.

    Attributes:
        step: Makes a step with a batch. It calls its last argument with the outputs that the other
            one names once they are known, before anything changes.
        gradients: Computes the gradients of a batch.
        leads: Whether this process shows progress, and tells callbacks that write.
        agree: Is given why the training ends and the signal that ends it, each "" if nothing does,
            and returns what holds for all processes. It waits for them. None for one process.
        same: Is given a name, and what is called so, and refuses that if a process has another.
            None for one process.
    """

    step: Step
    gradients: Differentiate
    leads: bool = True
    agree: Callable[[tuple[str, str]], tuple[str, str]] | None = None
    same: Callable[[str, object], None] | None = None


def fit(
    trainer: Trainer,
    way: Way,
    source: Source,
    *,
    call: Call,
    validation: Source | None,
    metrics: Sequence[str | Metric],
    schedule: Callable[[float], float] | None,
    callbacks: Sequence[Callback],
    progress: bool,
    stop_on_nan: bool,
    resume: bool,
) -> History:
    """Trains on a data set; see `ortops.TrainingSession.fit`.

    Args:
        trainer: The session.
        way: How steps are made.
        source: The data.
        call: What the order of the rows depends on.
        validation: The validation data.
        metrics: What to compute on it.
        schedule: Gives the learning rate of an epoch.
        callbacks: What is told of the training.
        progress: Whether to show it.
        stop_on_nan: Whether to stop at a loss that is no number.
        resume: Whether to go on from the session's position, if it has one.
    """
    position = trainer.standing.position if resume else None
    if position is None:
        begun = Begun(call, 1, trainer.steps_done, History(), list)
        position = Position(begun, Place())
    else:
        position.begun.call.check_same(call)
    if way.same is not None:
        _check_same(way.same, call, position)
    if position.begun.epoch > call.epochs:
        return History(position.begun.history)
    loop = _Loop(trainer, way, source, validation, metrics, schedule, callbacks, position)
    loop.progress, loop.stop_on_nan = progress and way.leads, stop_on_nan
    interruption = loop.interruption
    try:
        interruption.watch()
        loop.run()
    finally:
        interruption.release()
    if interruption.name:
        if way.leads:
            _say_how_to_go_on(trainer, interruption.name)
        interruption.throw()
    return loop.history


def check(
    trainer: Trainer,
    *,
    numbers: Mapping[str, tuple[object, int]],
    switches: Mapping[str, object],
    validation: Data | None,
    metrics: Sequence[str | Metric],
    schedule: Callable[[float], float] | None,
    callbacks: Sequence[Callback],
) -> None:
    """Refuses arguments of `fit` that cannot be right.

    Args:
        trainer: The session.
        numbers: Counts by name, each with the least that is accepted.
        switches: What is True or False, by name.
        validation: The validation data.
        metrics: What to compute on it.
        schedule: Gives the learning rate of an epoch.
        callbacks: What is told of the training.
    """
    for what, (number, least) in numbers.items():
        is_integer = isinstance(number, SupportsIndex) and not isinstance(number, bool)
        if not is_integer or int(cast(SupportsIndex, number)) < least:
            raise OrtopsError(f"{what} is {number!r}; an integer of at least {least} is accepted")
    for what, value in switches.items():
        if not isinstance(value, bool | np.bool_):
            raise OrtopsError(f"{what} is {value!r:.80}; True or False is accepted")
    if not isinstance(callbacks, Sequence):
        raise OrtopsError(f"callbacks is {callbacks!r:.80}; a list of callbacks is accepted")
    if schedule is not None and not callable(schedule):
        raise OrtopsError(
            f"schedule is {schedule!r:.80}; a function of the share of epochs that are done is "
            "accepted"
        )
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise OrtopsError(
                f"callbacks: {callback!r:.80} was given; an instance of a subclass of "
                "ortops.callbacks.Callback is accepted"
            )
    trainer.loss_names()
    chosen = metric_functions.resolve(metrics)
    if chosen:
        if validation is None:
            raise OrtopsError(
                f"metrics: '{next(iter(chosen))}' is computed from validation data; give "
                "validation=, or use evaluate"
            )
        trainer.target(chosen)
    if schedule is not None:
        trainer.noted.refuse_second_schedule()


class _Loop:
    """A call of `fit` that goes on from a position.

    Attributes:
        position: Where the training is.
        history: The entries of the finished epochs.
        interruption: What a signal left.
        progress: Whether to show a line for each epoch.
        stop_on_nan: Whether to stop at a loss that is no number.
    """

    progress = True
    stop_on_nan = True

    def __init__(
        self,
        trainer: Trainer,
        way: Way,
        source: Source,
        validation: Source | None,
        metrics: Sequence[str | Metric],
        schedule: Callable[[float], float] | None,
        callbacks: Sequence[Callback],
        position: Position,
    ) -> None:
        self.trainer = trainer
        self.way = way
        self.source = source
        self.validation = validation
        self.metrics = metrics
        self.schedule = schedule
        told = [each for each in callbacks if way.leads or not (each.saves or each.writes)]
        self.callbacks = sorted(told, key=lambda each: each.saves)
        self.position = position
        self.history = History(position.begun.history)
        self.interruption = Interruption(fit.__code__)
        self.stopped = ""
        self._done = Place()
        self._names = trainer.loss_names()
        rate = trainer.noted.scheduled_learning_rate
        self._outputs = [*self._names, rate] if rate else self._names
        self._rate = rate
        self._on_step = [
            each for each in self.callbacks if type(each).on_step is not Callback.on_step
        ]
        self._losses: list[float] = []
        self._said = False
        self._zeros = (0.0,) * len(self._names)
        self._clock = time.perf_counter() - position.place.seconds
        self._restore(callbacks)

    def _restore(self, callbacks: Sequence[Callback]) -> None:
        """Gives the callbacks what they knew, and says where their states are from now on."""
        left = list(callbacks)
        for saved in self.position.begun.states():
            name, state = saved["class"], saved["state"]
            taker = next((each for each in left if type(each).__name__ == name), None)
            if taker is not None:
                left.remove(taker)
                taker.restore(dict(state))
            elif state:
                raise OrtopsError(
                    f"fit: resume=True goes on with a training that had the callback {name}, which "
                    "is not given; give one, or leave out resume=True to begin another training"
                )
        given = list(callbacks)
        begun = self.position.begun._replace(
            states=lambda: [{"class": type(each).__name__, "state": each.state()} for each in given]
        )
        self.position = self.position._replace(begun=begun)

    def run(self) -> None:
        """Trains until all epochs are done, or something ends it before."""
        self.trainer.standing.set(self.position)
        self._tell("on_begin", self._averages())
        epochs = self.position.begun.call.epochs
        while self.position.begun.epoch <= epochs and not self._ended():
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
            self._tell("on_epoch", entry, finished=True)
        self._ended()  # what callbacks of other processes have written is there
        place = self.position.place
        between = bool(self.history) and not place.batch
        last = self.history[-1] if between else self._averages()
        self._tell("on_end", dict(last), finished=between)
        self._ended()  # none leaves, with a signal that ends all, while others write

    def _ended(self) -> bool:
        if self.way.agree is None:
            return bool(self.stopped or self.interruption.name)
        stopped, signal = self.way.agree((self.stopped, self.interruption.name))
        self.stopped = stopped
        if signal:  # one that has come since is not to be forgotten
            self.interruption.name = signal
        return bool(stopped or signal)

    # -------------------------------------------------------------------------------- an epoch

    def _train(self, bar: Progress | None) -> None:
        """Goes through what is left of an epoch."""
        begun, place = self.position
        call = begun.call
        if self.schedule is not None and not place.batch:
            self.trainer.learning_rate = self.schedule((begun.epoch - 1) / call.epochs)
        order = np.random.default_rng((call.seed, begun.first_step)) if call.shuffle else None
        batches = self.source.epoch(begun.epoch, order=order, start=place.batch)
        with contextlib.ExitStack() as stack:
            if hasattr(batches, "close"):
                stack.callback(batches.close)
            agreed: Iterator[Batch] = batches
            if self.way.same is not None:
                agreed = self._of_all(batches, self.way.same, place.batch)
            for batch in agreed:
                if call.accumulate > 1:
                    others = itertools.islice(agreed, call.accumulate - 1)
                    self._make_joined_update(itertools.chain([batch], others))
                else:
                    self._make_update(batch)
                if bar:
                    place = self.position.place
                    bar.update(place.batch, place.samples, self._averages)
                if self._on_step:
                    self._tell_step()
                if self._ended():
                    return

    def _of_all(
        self, batches: Iterator[Batch], same: Callable[[str, object], None], done: int
    ) -> Iterator[Batch]:
        """Returns batches of which all processes have as many, with as many rows."""
        for number in itertools.count(done + 1):
            batch: Batch | None = next(batches, None)
            size = "none" if batch is None else rows(batch)
            same(f"the rows of batch {number} of epoch {self.position.begun.epoch}", size)
            if batch is None:
                return
            yield batch

    def _make_update(self, batch: Batch) -> None:
        """Makes a step; its position is that after the batch, once it is made."""
        before = self.position.place
        size = rows(batch)
        self.way.step(batch, self._outputs, lambda found: self._prepare(before, 1, size, found))
        if self.stop_on_nan:
            where = f"batch {before.batch + 1} of epoch {self.position.begun.epoch}"
            _check_progress(self.trainer, self._losses[0], batch, where)

    def _make_joined_update(self, batches: Iterable[Batch]) -> None:
        """Makes a step with the gradients of several batches, as if they were one."""
        begun, before = self.position
        total, last = None, None
        count = size = 0
        for batch in batches:
            last = self.way.gradients(batch, outputs=self._outputs, after=last)
            count, size = count + 1, size + rows(batch)
            where = f"batch {before.batch + count} of epoch {begun.epoch}"
            if self.stop_on_nan and not math.isfinite(last.loss):
                raise _diverged(self.trainer, last.loss, batch, where, made=False)
            if total is None:
                total = Accumulation(last, exact=not self._differs(last))
            else:
                total.add(last)
        assert total is not None
        joined = total.result()
        self._prepare(before, count, size, joined.outputs)
        self.trainer.apply(joined)
        if self.stop_on_nan:
            _check_progress(self.trainer, self._losses[0], batch, where)

    def _differs(self, gradients: Gradients) -> bool:
        """Whether the step differs from that of the joined batch, which is said once."""
        kinds = {summand.is_sum for summand in gradients.summands if summand.weight}
        if gradients.additive or len(kinds) > 1:  # the latter has no meaning that would be near
            return False
        if not self._said:
            self._said = True
            log = logger.warning if self.way.leads else logger.debug
            log(
                "fit: accumulate=%d: %s, so that a step is not that of one batch of all rows",
                self.position.begun.call.accumulate,
                gradients.not_additive,
            )
        return True

    def _prepare(self, before: Place, count: int, size: int, found: Mapping[str, Array]) -> None:
        """Says what the position is after the batches whose step is made next."""
        self._losses = [number_of(found[name]) for name in self._names]
        totals = zip(before.totals or self._zeros, self._losses, strict=True)
        place = Place(
            before.batch + count,
            before.samples + size,
            tuple([total + loss * size for total, loss in totals]),
            float(found[self._rate]) if self._rate else None,
            time.perf_counter() - self._clock,
        )
        self.position = Position(self.position.begun, place)
        self.trainer.standing.prepare(self.position)

    def _finish_epoch(self) -> dict[str, float] | None:
        """Evaluates, and moves on to the next epoch.

        Returns:
            The entry of the history; None if a signal came before there is one.
        """
        begun, place = self.position
        entry = self._averages()
        if self.validation is not None:
            with contextlib.suppress(_SignalCame), self._signals_at_once():
                measured = self.trainer.evaluate(
                    self.validation, batch_size=begun.call.batch_size, metrics=self.metrics
                )
                entry |= {f"validation_{name}": value for name, value in measured.items()}
        if self._ended():  # in all processes, whether or not each of them evaluates
            return None
        seconds = time.perf_counter() - self._clock
        entry |= self._present_rate()
        entry["steps"] = self.trainer.steps_done
        entry["seconds"] = seconds - sum(entry.get("seconds", 0.0) for entry in self.history)
        self.history.append(entry)
        begun = begun._replace(
            epoch=begun.epoch + 1,
            first_step=self.trainer.steps_done,
            history=History(self.history),
        )
        self._done = place
        self.position = Position(begun, Place(rate=place.rate, seconds=seconds))
        self.trainer.standing.set(self.position)
        return entry

    @contextlib.contextmanager
    def _signals_at_once(self) -> Iterator[None]:
        try:
            with self.interruption.at_once():
                yield
        except (KeyboardInterrupt, SystemExit) as error:
            if not self.interruption.name:
                raise
            raise _SignalCame from error

    def _averages(self) -> dict[str, float]:
        """Returns the losses of the epoch so far."""
        place = self.position.place
        names = ["loss", *self._names[1:]]
        if not place.samples:
            return {}
        return {n: total / place.samples for n, total in zip(names, place.totals, strict=True)}

    def _present_rate(self) -> dict[str, float]:
        """Returns the learning rate of the last step, if there is one."""
        rate = self.position.place.rate
        if rate is None:
            try:
                rate = self.trainer.learning_rate
            except OrtopsError:  # the algorithm has none
                return {}
        return {"learning_rate": rate}

    def _bar(self) -> Progress:
        begun, place = self.position
        return Progress(
            begun.epoch, begun.call.epochs, self.source.batches, place.batch, place.samples
        )

    # ------------------------------------------------------------------------------- callbacks

    def _tell_step(self) -> None:
        names = ["loss", *self._names[1:]]
        values = dict(zip(names, self._losses, strict=True)) | self._present_rate()
        record = self._record(values)
        for callback in self._on_step:
            callback.on_step(record, self.trainer)
        self.stopped = self.stopped or record.stopped

    def _tell(self, event: str, values: dict[str, float], *, finished: bool = False) -> None:
        record = self._record(values, finished=finished)
        for callback in self.callbacks:
            getattr(callback, event)(record, self.trainer)
        self.stopped = self.stopped or record.stopped

    def _record(self, values: dict[str, float], *, finished: bool = False) -> Record:
        begun, place = self.position
        if finished:
            begun, place = begun._replace(epoch=begun.epoch - 1), self._done
        return Record(
            epoch=min(begun.epoch, begun.call.epochs),
            epochs=begun.call.epochs,
            batch=place.batch,
            batches=self.source.batches,
            step=self.trainer.steps_done,
            values=values,
            samples=place.samples,
            seconds=time.perf_counter() - self._clock,
            history=self.history,
            interrupted=self.interruption.name,
        )


class _SignalCame(BaseException):
    """A signal came while an evaluation went on, which needs no end."""


def _check_same(same: Callable[[str, object], None], call: Call, position: Position) -> None:
    """Refuses arguments that other processes do not have."""
    begun = position.begun
    place = {"epoch": begun.epoch, "first_step": begun.first_step, "batch": position.place.batch}
    given = (f"{name}={value}" for name, value in (asdict(call) | place).items())
    same("the arguments of fit, and where it begins", ", ".join(given))


def _say_how_to_go_on(trainer: Trainer, name: str) -> None:
    file = trainer.saved_in
    if file:
        how = f"TrainingSession({file!r}).fit(…, resume=True) goes on from there"
    else:
        how = "fit(…, resume=True) goes on, of this session or of the file that save(path) writes"
    logger.warning("fit: %s ended it after step %d; %s", name, trainer.steps_done, how)


def _check_progress(trainer: Trainer, loss: float, feeds: Batch, place: str) -> None:
    """Refuses to go on after a loss that is no number, or where no step can be made."""
    if not math.isfinite(loss):
        raise _diverged(trainer, loss, feeds, place)
    noted = trainer.noted
    if not noted.loss_scale or not {noted.loss_scale, noted.good_steps} <= trainer.state.keys():
        return
    scale = float(trainer.state[noted.loss_scale])
    good_steps = int(trainer.state[noted.good_steps])
    if scale <= SMALLEST_SCALE and not good_steps:
        raise DivergedError(
            f"gradients: they are infinite or NaN after step {trainer.steps_done} ({place}), "
            f"down to the smallest scale of the loss, {scale:g}, so that steps change "
            "nothing; look at logarithms, divisions, roots and powers in the model and the "
            f"loss, then set state['{noted.loss_scale}']. stop_on_nan=False goes on all "
            "the same"
        )


def _diverged(
    trainer: Trainer, loss: float, feeds: Batch, place: str, *, made: bool = True
) -> DivergedError:
    """Returns the error of a loss that is no number, with what to look at."""
    wrong = []
    for name, array in feeds.items():
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
        look = f"in the batch {', '.join(wrong)}: clean the data"
    else:
        try:
            rate = f" ({trainer.learning_rate:g})"
        except OrtopsError:  # the algorithm has none
            rate = ""
        look = (
            f"the batch is finite, so look at the learning rate{rate}, and at logarithms, "
            "divisions, roots and powers in the model and the loss"
        )
    if not made:
        return DivergedError(
            f"loss: it is {loss} in step {trainer.steps_done + 1} ({place}); {look}. That step has "
            "not been made. stop_on_nan=False goes on all the same"
        )
    return DivergedError(
        f"loss: it is {loss} in step {trainer.steps_done} ({place}); {look}. The session is in "
        "the state after this step; the weights of before are there only if they were saved. "
        "stop_on_nan=False goes on all the same"
    )
