"""The number of steps of a schedule that has none before `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ortops import schedules
from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training.position import FitArguments
from ortops.engine.training.state import State
from ortops.errors import ArgumentError


class _Trainer(Protocol):
    @property
    def metadata(self) -> TrainingMetadata:
        """What the builder wrote about the model."""

    @property
    def state(self) -> State:
        """The variables."""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""


def planned_steps(trainer: _Trainer) -> int:
    """Returns after how many steps such a schedule ends; 0 if the model has none."""
    metadata, state = trainer.metadata, trainer.state
    names = (metadata.schedule_start, metadata.schedule_steps)
    return sum(int(state[name]) for name in names) if metadata.schedule_steps else 0


def set_length(trainer: _Trainer, call: FitArguments, max_steps: int | None, *, new: bool) -> None:
    """Sets the number of steps of the schedule, if `fit` has to do so.

    Args:
        trainer: The session.
        call: The arguments of `fit`.
        max_steps: The greatest number of steps.
        new: Whether a new training begins. A resumed one has a number of steps already.

    Raises:
        ArgumentError: If the number of steps is not known, or too small for the schedule.
    """
    metadata, state = trainer.metadata, trainer.state
    if not metadata.schedule_steps or not (new or not int(state[metadata.schedule_steps])):
        return
    steps = max_steps
    if call.batches is not None:
        steps = call.epochs * -(-call.batches // call.accumulate)
        steps = steps if max_steps is None else min(steps, max_steps)
    if steps is None:
        raise ArgumentError(
            f"fit: the schedule {metadata.schedule} needs the number of steps, but the number of "
            "batches of these data is not known; give max_steps=, or steps= of the schedule"
        )
    if not steps:  # without epochs
        return
    schedules.check_steps(metadata.schedule, steps)
    values: Mapping[str, int] = {
        metadata.schedule_start: trainer.steps_done,
        metadata.schedule_steps: steps,
    }
    state.assign({name: np.array(value, np.int64) for name, value in values.items()})
