"""Shared parts of callbacks: monitoring a metric, checking paths."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ortops._common.arguments import choice, number, text
from ortops._common.numbers import integer, real
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.history import History
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, OrtopsError

Mode: TypeAlias = Literal["auto", "max", "min"]


class Monitor:
    """Finds the best epoch by a metric, and counts those since then.

    Args:
        who: The callback, for messages.
        name: The metric: ``loss``, ``validation_loss``, ``validation_<metric>``.
        mode: Whether higher (``"max"``) or lower (``"min"``) is better; ``"auto"`` is the direction
            of the metric, which `begin` looks up.
        minimum_change: The smallest change that counts as an improvement.

    Attributes:
        best: The best value so far, or None.
        epoch: Its epoch; 0 if there is none.
        steps: The number of finished steps at that time; 0 if there is none.
        waited: How many epochs or validations in a row were no improvement.
    """

    def __init__(self, who: str, name: str, mode: Mode, minimum_change: float) -> None:
        examples = "the name of a metric, for example 'loss', 'validation_loss'"
        self.name = text(f"{who}: monitor", name, examples)
        choice(f"{who}: mode", mode, ("auto", "max", "min"))
        self.minimum_change = number(f"{who}: minimum_change", minimum_change, minimum=0)
        self.who = who
        self._given = self.mode = mode
        self.forget()

    def begin(self, record: Record) -> None:
        """Finds out which direction is better in a call of fit, before its first step.

        Raises:
            ArgumentError: If that is not known, and there is no ``mode``.
        """
        known = record.directions
        if self._given != "auto":
            return
        more = known.get(self.name, known.get(self.name.removeprefix("validation_")))
        if more is None:
            several = [name for name in known if name.startswith(f"{self.name}_")]
            if self.name not in known and several:
                raise ArgumentError(
                    f"{self.who}: there are several '{self.name}': {', '.join(several)}; monitor "
                    "one of them"
                )
            raise ArgumentError(
                f"{self.who}: it is not known whether more or less of '{self.name}' is better; "
                f"set mode='max' or mode='min' (fit computes {', '.join(known)})"
            )
        self.mode = "max" if more else "min"

    @property
    def is_more_better(self) -> bool:
        """Whether higher is better."""
        return self.mode == "max"

    def forget(self) -> None:
        """Resets the best value."""
        self.best: float | None = None
        self.epoch = self.steps = self.waited = 0

    @property
    def is_validation(self) -> bool:
        """Whether the metric is known after each validation, and not only after each epoch."""
        return self.name.startswith("validation_")

    def is_new(self, record: Record) -> bool:
        """Whether a record of an epoch has something that no validation within it had."""
        done = record.history.validations
        last = (done[-1]["epoch"], done[-1]["steps"]) if done and self.is_validation else None
        return last != (record.epoch, record.step)

    def seen(self, history: History) -> list[tuple[int, dict[str, float]]]:
        """Returns the epochs and values of a history in which it looks for improvements, in order.

        These are validations within epochs, if it monitors a result of these, and epochs, without
        those at whose last step there was such a validation.
        """
        within = history.validations if self.is_validation else []
        found = [(int(values["epoch"]), values) for values in within]
        done = {(epoch, values["steps"]) for epoch, values in found}
        epochs = enumerate(history, 1)
        found += [(n, each) for n, each in epochs if (n, each.get("steps")) not in done]
        return sorted(found, key=lambda each: (each[0], each[1].get("steps", 0)))

    def is_best(self, epoch: int, values: Mapping[str, float]) -> bool:
        """Whether an epoch or a validation of a history is the best one."""
        return (epoch, values.get("steps", 0)) == (self.epoch, self.steps)

    def is_present(self, values: Mapping[str, float], record: Record) -> bool:
        """Whether an epoch or a validation of a history ended at the position of a record.

        A step that overflows is skipped and not counted, but it changes the loss scale. Therefore
        the number of steps alone does not tell whether the next epoch has begun.
        """
        is_validation = "epoch" in values
        return values.get("steps", 0) == record.step and (is_validation or not record.batch)

    def improves(self, epoch: int, values: Mapping[str, float], steps: float) -> bool:
        """Adds an epoch or a validation, and returns whether it is the best so far.

        Args:
            epoch: The number of the epoch, from 1.
            values: The metrics.
            steps: The number of finished steps.

        Raises:
            OrtopsError: If it does not have the metric.
        """
        value = self.value(epoch, values)
        if not self.is_better(value):
            self.waited += 1
            return False
        self.best, self.epoch, self.steps, self.waited = value, epoch, int(steps), 0
        return True

    def is_better(self, value: float) -> bool:
        """Whether a value is an improvement."""
        if self.best is None or not math.isfinite(value):
            return math.isfinite(value)
        gain = value - self.best if self.is_more_better else self.best - value
        return gain > 0 and gain >= self.minimum_change

    def value(self, epoch: int, values: Mapping[str, float]) -> float:
        """Returns the metric of an epoch or a validation.

        Raises:
            OrtopsError: If it does not have the metric.
        """
        if self.name not in values:
            known = ", ".join(f"'{name}'" for name in values)
            raise OrtopsError(
                f"{self.who}: epoch {epoch} has no metric '{self.name}' to monitor; it has {known} "
                "(validation= and metrics= of fit add more)"
            )
        return float(values[self.name])


class _Monitoring(Callback):
    """Base class of callbacks that judge each epoch, or each validation, by a metric."""

    _monitor: Monitor
    _judges_cut = False  # also an epoch that a limit cuts short

    @property
    def best(self) -> float | None:
        """The best value so far, or None."""
        return self._monitor.best

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Judges the epoch, unless a validation at its end was judged."""
        if self._monitor.is_new(record) and (self._judges_cut or not record.cut):
            self._judge(record, session)

    def on_validation(self, record: Record, session: TrainingSession) -> None:
        """Judges the validation, if the metric is one of validation."""
        if self._monitor.is_validation:
            self._judge(record, session)

    def _judge(self, record: Record, session: TrainingSession) -> None:
        raise NotImplementedError


def begins_anew(record: Record) -> bool:
    """Whether fit starts at its first batch, rather than being resumed."""
    return not record.history and not record.batch


def is_line_due(record: Record, every: int) -> bool:
    """Whether a number of batches of the epoch have passed since the last line of a step.

    Lines follow from the batches alone, so a resumed fit writes the same ones.
    """
    between = -(-every // record.accumulate) * record.accumulate
    last = (record.batch - 1) // between * between
    return record.batch - last >= every


class _Recording(Callback):
    """Base class of callbacks that record the numbers of epochs, validations, and some steps."""

    writes = True
    every: int | None  # the number of batches between records of steps, if there are any

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Records the metrics of a step."""
        if self.every is not None and is_line_due(record, self.every):
            self._add("step", record)

    def on_validation(self, record: Record, session: TrainingSession) -> None:
        """Records the metrics of a validation within an epoch."""
        self._add("validation", record)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Records the metrics of an epoch."""
        self._add("epoch", record)

    def _add(self, event: str, record: Record) -> None:
        raise NotImplementedError


def grouped(event: str, record: Record) -> dict[str, float]:
    """Returns what to record, named for tools that show steps and epochs apart."""
    group = "epoch" if event == "epoch" else "step"
    return {f"{group}/{name}": n for name, n in record.values.items() if name != "steps"}


def remembered(
    who: str, state: Mapping[str, Any], name: str, *, whole: bool = False
) -> float | int:
    """Returns a number of a callback's saved state.

    Raises:
        ModelError: If it is not a number, or with ``whole`` not an integer >= 0.
    """
    value: Any = state.get(name)
    found = integer(value) if whole else value if not math.isnan(real(value)) else None
    if found is None or (whole and found < 0):
        wanted = "an integer >= 0" if whole else "a number"
        raise ModelError(
            f"{who}: '{name}' in the state of the file to resume from must be {wanted}, got "
            f"{value!r}"
        )
    return value  # type: ignore[no-any-return]


def path_of(who: str, path: object) -> Path:
    """Returns an argument that is the path of a file.

    Raises:
        ArgumentError: If it is empty, or not a path.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ArgumentError(f"{who}: path must be the path of a file, got {path!r}")
    return Path(os.fsdecode(path))
