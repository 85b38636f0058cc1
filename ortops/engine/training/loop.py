"""The loop over epochs and steps of a call of `fit`."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ortops.engine.training.anomalies import Anomalies
from ortops.engine.training.callback import Record
from ortops.engine.training.calls import Calls
from ortops.engine.training.data import Source, rows
from ortops.engine.training.divergence import check_loss, diverged
from ortops.engine.training.feeds import Checked
from ortops.engine.training.fit_options import FitOptions
from ortops.engine.training.gradients import Accumulation, Gradients, number_of
from ortops.engine.training.history import History
from ortops.engine.training.interruption import Interruption
from ortops.engine.training.limits import Limits
from ortops.engine.training.position import (
    MOST_UNREAD,
    AnyPosition,
    Position,
    UnreadPosition,
    known,
)
from ortops.engine.training.prefetch import Prefetcher
from ortops.engine.training.probabilities import warn_of_probabilities
from ortops.engine.training.progress_bar import ProgressBar
from ortops.engine.training.trainer import Array, Batch, StepStrategy, Trainer
from ortops.engine.training.training_metrics import TrainingMetrics
from ortops.errors import DivergedError, OrtopsError

logger = logging.getLogger("ortops")


@dataclass(eq=False)
class Loop:
    """A call of `fit`, from a position on.

    Attributes:
        trainer: The session.
        strategy: How it makes steps.
        options: The arguments of `fit`.
        source: The training data.
        validation: The validation data, if any.
        position: The position in the training.
        limits: When validation is due within an epoch, and when training ends.
        measured: The metrics of training, if any.
        anomalies: What explains values that are not finite, if asked for.
        directions: See `Record`.
        interruption: Records a signal.
        history: The entries of the finished epochs.
        calls: Calls the callbacks.
    """

    trainer: Trainer
    strategy: StepStrategy
    options: FitOptions
    source: Source
    validation: Source | None
    position: AnyPosition
    limits: Limits
    measured: TrainingMetrics | None
    anomalies: Anomalies | None
    directions: Mapping[str, bool | None]
    interruption: Interruption

    def __post_init__(self) -> None:
        trainer, strategy = self.trainer, self.strategy
        self.calls = Calls(trainer, self.options["callbacks"], leads=strategy.leads)
        self.history = self.position.epoch_state.history
        self._limit = ""  # why training ends within or after an epoch
        self._cut = False  # whether it ends within one
        self._names = trainer.loss_names()
        self._rate = trainer.metadata.scheduled_learning_rate
        self._counts = strategy.counts if any(strategy.counts) else []
        self._outputs = [*self._names, *(name for name in (self._rate, *self._counts) if name)]
        self._outputs += self.strategy.norms.values()
        self._outputs += [] if self.measured is None else self.measured.outputs
        shares = {part.name: part.weight for part in trainer.metadata.losses}
        self._shares = {name: shares.get(name, 1.0) for name in self._names[1:]}
        self._losses: list[float] = []
        self._norms: dict[str, float] = {}  # of the last step
        self._said = False
        self._is_first = True
        self._began = sum(entry.get("seconds", 0.0) for entry in self.history)  # the epoch
        begin = known(self.position)
        self.calls.restore(begin)
        self._clock = time.perf_counter() - begin.seconds
        epoch_state = begin.epoch_state
        epoch_state = epoch_state._replace(entries=self.history, states=self.calls.states)
        self.position = self._done = begin._replace(epoch_state=epoch_state)
        reads = self.options["stop_on_nan"] or self.options["accumulate"] > 1
        reads = reads or self.calls.see_steps or (self.anomalies, self.measured) != (None, None)
        self._later = None if reads else strategy.later

    def run(self) -> None:
        """Trains until all epochs are finished or something ends training early."""
        self.trainer.resume_state.set(self._done)
        self._notify("on_begin", self._averages())
        if self.calls.stopped and self.strategy.leads:
            logger.warning("fit: stopped before the first step: %s", self.calls.stopped)
        while self._epoch <= self.options["epochs"] and not self._ended():
            if self._reaches_limit() and not self.position.batch:
                break
            shows = self.options["progress"] and self.strategy.leads
            bar = self._bar() if shows else None
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
        cut, between = self.position.epoch_state.cut, bool(self.history) and not self.position.batch
        last = self.history[-1] if between else cut or self._averages()
        self._notify("on_end", dict(last), finished=between)
        self._ended()  # waits for the others, as a signal may end all processes at once

    @property
    def _epoch(self) -> int:
        return self.position.epoch_state.epoch

    def _ended(self) -> bool:
        ended, _ = self._agree(None)
        return ended

    def _agree(self, found: object) -> tuple[bool, bool]:
        """Returns whether training ends, and whether all processes have the same object.

        Args:
            found: The object.
        """
        calls, interruption = self.calls, self.interruption
        if self.strategy.shared is None:
            return bool(calls.stopped or interruption.name), True
        calls.stopped, signal, alike = self.strategy.shared.agree(
            calls.stopped, interruption.name, found
        )
        if signal:  # keeps one that has come since
            interruption.name = signal
        return bool(calls.stopped or signal), alike

    # -------------------------------------------------------------------------------- an epoch

    def _train(self, bar: ProgressBar | None) -> None:
        """Trains on the remaining batches of an epoch."""
        options, begin = self.options, known(self.position)
        if options["schedule"] is not None and not begin.batch:
            self.trainer.learning_rate = options["schedule"]((self._epoch - 1) / options["epochs"])
        order = None
        if options["shuffle"]:
            order = np.random.default_rng((options["seed"], begin.epoch_state.first_step))
        if self.measured is not None:
            if begin.batch:
                self.measured.resume(begin.metrics)
            else:
                self.measured.begin()
        batches = self.source.epoch(self._epoch, order=order, start=begin.batch)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close, batches)
            make = self._make_joined_update if options["accumulate"] > 1 else self._make_update
            if self._validates_within(batches):  # that of a resumed training may be missing
                return
            while not self._reaches_limit() and make(batches):
                if bar:
                    bar.update(self.position.batch, self.position.samples, self._shown)
                if self.calls.see_steps:
                    losses = zip(["loss", *self._shares], self._losses, strict=True)
                    self._notify("on_step", dict(losses) | self._norms | self._present_rate())
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

    def _has_more(self, batches: Iterator[Checked]) -> bool:
        """Whether the epoch has more batches."""
        known = self.source.batches
        if known is not None:
            return self.position.batch < known
        return self._read(batches) is not None

    def _validates_within(self, batches: Iterator[Checked]) -> bool:
        """Validates within the epoch, if it is due.

        Returns:
            Whether training ends.
        """
        epoch, steps = self._epoch, self.trainer.steps_done
        due = self.position.batch and self.limits.is_validation_due(steps)
        if not due or self.history.is_validated(epoch, steps):
            return False
        paused = batches.paused if isinstance(batches, Prefetcher) else contextlib.nullcontext()
        measured = self._measure(paused)
        if self._ended():  # in all processes
            return True
        self.history.validations.append({"epoch": epoch, "steps": steps, **measured})
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
                    batch_size=self.options["batch_size"],
                    metrics=self.options["metrics"],
                )

        measured = self.interruption.at_once(measure) if self.validation is not None else None
        return {f"validation_{name}": value for name, value in (measured or {}).items()}

    def _shown(self) -> dict[str, float]:
        """Returns the numbers of the progress bar within an epoch."""
        cheap = [*known(self.position).metrics]  # not those that read all rows again
        measured = self.measured.results(cheap) if self.measured is not None else {}
        return self._averages() | measured | self.history.last_within(self._epoch)

    def _close(self, batches: Iterator[Checked]) -> None:
        """Closes the batches; after a signal, without waiting for one that is being read."""
        if isinstance(batches, Prefetcher):
            batches.close(wait=not self.interruption.name)
        elif hasattr(batches, "close"):
            batches.close()

    def _read(self, batches: Iterator[Checked]) -> Checked | None:
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
        if not ended and not alike:
            missing = self.options["accumulate"] - len(sizes)
            for number, size in enumerate([*sizes, *["none"] * missing], self.position.batch + 1):
                shared.same(f"the rows of batch {number} of epoch {self._epoch}", size)
        return bool(sizes) and not ended

    def _make_update(self, batches: Iterator[Checked]) -> bool:
        """Makes a step with the next batch; afterwards, the position is the one after the batch.

        Returns:
            Whether there was a batch.
        """
        batch = self._read(batches)
        size = 0 if batch is None else rows(batch)
        if not self._is_update_due([size] if batch is not None else []):
            return False
        assert batch is not None

        def prepare(found: Mapping[str, Array]) -> None:
            if self.measured is not None:
                self.measured.add(found, batch)
            self._prepare(1, size, found)

        where = self._place(1)
        if self.anomalies is not None:
            self.anomalies.begin()
        (self._later or self.strategy.step)(batch, self._outputs, prepare)
        if self.anomalies is not None:
            self.anomalies.check(self._losses[0], [batch])
        if self.options["stop_on_nan"]:
            check_loss(self.trainer, self._losses[0], batch, where)
        return True

    def _make_joined_update(self, batches: Iterator[Checked]) -> bool:
        """Makes a step with the accumulated gradients of the next batches.

        Returns:
            Whether there were any, and no signal came between them.
        """
        shared, wanted = self.strategy.shared, self.options["accumulate"]
        stops = self.options["stop_on_nan"]
        total: Accumulation | None = None
        last: Gradients | None = None
        wrong: DivergedError | None = None
        sizes: list[int] = []
        read: Batch = {}
        kept: list[Batch] = []
        where = ""
        if self.anomalies is not None:
            self.anomalies.begin()
        while len(sizes) < wanted:
            batch = self._read(batches)
            if batch is None:
                break
            last = self.strategy.gradients(batch, outputs=self._outputs, after=last)
            if self.measured is not None:
                self.measured.add(last.outputs, batch)
            sizes.append(rows(batch))
            if self.anomalies is not None:  # copies: a loader may fill the same memory again
                kept.append({name: array.copy() for name, array in batch.items()})
                self.anomalies.check(last.loss, kept, made=False)
            where = self._place(len(sizes))
            if stops and last.count and not math.isfinite(last.loss):
                wrong = wrong or diverged(self.trainer, last.loss, batch, where, made=False)
                if shared is None:
                    raise wrong
            if total is None:
                exact = not self._differs(last)
                total = Accumulation(last, exact=exact, shared=shared is not None)
            else:
                total.add(last)
            read = batch
        if len(sizes) < wanted and shared is None and self.interruption.name:
            return False
        if not self._is_update_due(sizes):
            return False
        assert total is not None
        joined = total.result() if shared is None else shared.add_up(total)
        if stops and shared is not None and not math.isfinite(joined.loss):
            where = f"batches up to {where}"
            raise wrong or diverged(self.trainer, joined.loss, None, where, made=False)
        prepare = functools.partial(self._prepare, len(sizes), sum(sizes))
        self.strategy.apply(joined, self._outputs, prepare)
        if self.anomalies is not None:
            self.anomalies.check(self._losses[0], kept, joined)
        if stops:
            check_loss(self.trainer, self._losses[0], read, where)
        return True

    def _place(self, number: int) -> str:
        """Returns which batch one of the next is, for messages."""
        return f"batch {self.position.batch + number} of epoch {self._epoch}"

    def _differs(self, gradients: Gradients) -> bool:
        """Whether the step differs from that of the joined batch; warns once."""
        if not gradients.is_estimate:
            return False
        if not self._said:
            self._said = True
            log = logger.warning if self.strategy.leads else logger.debug
            log(
                "fit: accumulate=%d: %s, so a step differs from that of one batch with all rows",
                *(self.options["accumulate"], gradients.not_additive),
            )
        return True

    def _prepare(self, count: int, size: int, found: Mapping[str, Array]) -> None:
        """Sets the position after the batches of the next step."""
        seconds = time.perf_counter() - self._clock

        def after(before: Position) -> Position:
            losses = [number_of(found[name]) for name in self._names]
            counts = [number_of(found[name]) if name else None for name in self._counts]
            if counts:  # in files of older versions a mean over no label is 0 / 0
                pairs = zip(losses, counts, strict=True)
                losses = [0.0 if counted == 0 else loss for loss, counted in pairs]
            self._losses, norms = losses, self.strategy.norms.items()
            self._norms = {key: number_of(found[name]) for key, name in norms if name in found}
            return before.after(
                *(count, size, losses, counts, self._norms),
                rate=number_of(found[self._rate]) if self._rate else None,
                seconds=seconds,
                metrics=self.measured.states() if self.measured is not None else {},
                rates={n: number_of(found[n]) for n in self.strategy.rates if n in found},
            )

        unread = UnreadPosition(self.position, size, after)
        waits = self._later is not None and unread.unread < MOST_UNREAD
        self.position = unread if waits else unread.read()
        self.trainer.resume_state.prepare(self.position)

    def _finish_epoch(self) -> dict[str, float] | None:
        """Evaluates, and moves to the next epoch.

        Returns:
            The entry of the history; None if a signal came before.
        """
        position, steps = known(self.position), self.trainer.steps_done
        entry = self._averages()
        if self.measured is not None:
            entry |= self.measured.results()
        if self.history.is_validated(self._epoch, steps) and not self.calls.revalidates:
            entry |= self.history.last_within(self._epoch)
        else:
            entry |= self._measure(contextlib.nullcontext())
        if self._ended():  # in all processes, whether or not each of them evaluates
            return None
        seconds = time.perf_counter() - self._clock
        entry |= self._present_rate()
        entry["steps"] = self.trainer.steps_done
        entry["seconds"] = seconds - self._began
        if self._cut:
            epoch_state = position.epoch_state._replace(cut=entry)
            reached = position._replace(epoch_state=epoch_state, seconds=seconds)
        else:
            self._began = seconds
            self.history.append(entry)
            epoch_state = position.epoch_state._replace(
                epoch=self._epoch + 1,
                first_step=self.trainer.steps_done,
                finished=len(self.history),
            )
            self._done = position
            reached = Position(
                epoch_state, rate=position.rate, seconds=seconds, rates=position.rates
            )
        self.position = reached
        self.trainer.resume_state.set(reached)
        return entry

    def results(self) -> History:
        """Returns a new list of the entries of all epochs, also of one that a limit cut short."""
        return self.position.epoch_state.history

    def _averages(self) -> dict[str, float]:
        """Returns the mean losses of the epoch so far; NaN if no label counts."""
        return known(self.position).averages(self._shares)

    def _present_rate(self) -> dict[str, float]:
        """Returns the learning rate of the last step, if there is one, and those of entries."""
        position = known(self.position)
        rate, rates = position.rate, position.rates
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
        return ProgressBar(
            *(self._epoch, self.options["epochs"], self.source.batches),
            *(self.position.batch, self.position.samples),
        )

    def _notify(self, event: str, values: dict[str, float], *, finished: bool = False) -> None:
        """Calls the callbacks with the position, or with the end of the epoch before."""
        position = self._done if finished else self.position
        epoch, epochs = self._epoch - finished, self.options["epochs"]
        record = Record(
            epoch=min(epoch, epochs),
            epochs=epochs,
            batch=position.batch,
            batches=self.source.batches,
            step=self.trainer.steps_done,
            values=values,
            samples=position.samples,
            seconds=time.perf_counter() - self._clock,
            history=self.results() if self.position.epoch_state.cut else self.history,
            interrupted=self.interruption.name,
            cut=self._cut,
            accumulate=self.options["accumulate"],
            directions=self.directions,
        )
        self.calls.notify(event, record)
