"""The number of steps of a schedule that has none before `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortops import schedules
from ortops.engine.training.trainer import Trainer
from ortops.errors import ArgumentError


def steps_left(call: Mapping[str, Any], epoch: int = 1, batch: int = 0) -> int | None:
    """Returns the number of steps that remain; None if that of batches is not known.

    Args:
        call: What determines the rows of each step; see `call_of`.
        epoch: The epoch.
        batch: The number of its batches that are finished.

    Example:
        >>> steps_left({"epochs": 3, "batches": 5, "accumulate": 2}, epoch=2, batch=4)
        4
    """
    if call["batches"] is None:
        return None
    of_epoch, done = (-(-batches // call["accumulate"]) for batches in (call["batches"], batch))
    steps: int = (call["epochs"] - epoch + 1) * of_epoch - done
    return steps


def planned_steps(trainer: Trainer) -> int:
    """Returns after how many steps such a schedule ends; 0 if the model has none."""
    metadata, state = trainer.metadata, trainer.state
    names = (metadata.schedule_start, metadata.schedule_steps)
    return sum(int(state[name]) for name in names) if metadata.schedule_steps else 0


def set_length(
    trainer: Trainer, call: Mapping[str, Any], max_steps: int | None, *, new: bool
) -> None:
    """Sets the number of steps of the schedule, if `fit` has to do so.

    Args:
        trainer: The session.
        call: See `steps_left`.
        max_steps: The greatest number of steps.
        new: Whether a new training begins. A resumed one has a number of steps already.

    Raises:
        ArgumentError: If the number of steps is not known, or too small for the schedule.
    """
    metadata, state = trainer.metadata, trainer.state
    if not metadata.schedule_steps or not (new or not int(state[metadata.schedule_steps])):
        return
    known = [each for each in (steps_left(call), max_steps) if each is not None]
    if not known:
        raise ArgumentError(
            f"fit: the schedule {metadata.schedule} needs the number of steps, but the number of "
            "batches of these data is not known; give max_steps=, or steps= of the schedule"
        )
    steps = min(known)
    if not steps:  # without epochs
        return
    schedules.check_steps(metadata.schedule, steps)
    values: Mapping[str, int] = {
        metadata.schedule_start: trainer.steps_done,
        metadata.schedule_steps: steps,
    }
    state.assign({name: np.array(value, np.int64) for name, value in values.items()})
