"""What `fit` tells others while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ortops.training.history import History

__all__ = ["Callback", "Record"]


@dataclass
class Record:
    """How far a call of `fit` is.

    Attributes:
        epoch: The epoch, from 1.
        epochs: How many there are to be.
        batch: How many batches of the epoch are done.
        batches: How many it has, where that is known.
        step: How many steps the session has made (`TrainingSession.steps_done`).
        values: In `Callback.on_step` ``loss``, ``loss_<name>`` of each summand and
            ``learning_rate`` of the step; in `Callback.on_epoch` the epoch's entry in the history;
            in `Callback.on_end` that of the last epoch, or what there is of one that was cut
            short.
        samples: How many rows of the epoch are done.
        seconds: The time since the training began; that of interrupted calls counts.
        history: The entries of the finished epochs.
        interrupted: ``"SIGINT"``, ``"SIGTERM"`` or ``"SIGHUP"`` in `Callback.on_end`, if such a
            signal ended the training; else "".
        stopped: Why the training is to end, if `stop` was called.

    Example:
        >>> from models import line
        >>> from ortops.callbacks import Callback
        >>> class Patience(Callback):
        ...     def on_step(self, record, session):
        ...         if record.values["loss"] < 0.1:
        ...             record.stop(f"the loss is small at step {record.step}")
        >>> session = line.session()
        >>> _ = session.fit([line.BATCH] * 9, callbacks=[Patience()], progress=False)
        >>> session.steps_done
        3
    """

    epoch: int
    epochs: int
    batch: int
    batches: int | None
    step: int
    values: dict[str, float]
    samples: int
    seconds: float
    history: History
    interrupted: str = ""
    stopped: str = field(default="", init=False)

    def stop(self, reason: str) -> None:
        """Ends the training after this step or epoch.

        Args:
            reason: Why, in words.
        """
        self.stopped = self.stopped or reason or "a callback asked for it"


class Callback:
    """Is called while `fit` goes on: ``fit(…, callbacks=[…])``.

    Subclass it and define what you need. The session may be read, evaluated, saved and changed;
    what is raised ends the training and reaches the caller of `fit`.

    Of each event, first all callbacks are told, in the order in which they were given, and then
    `on_save` of each is called. A callback that saves the session does so there: the file also
    holds the `state` of all callbacks, and by then all of them have seen the event.

    Attributes:
        saves: Whether it saves the session. One that does so in another method than `on_save` is
            told after all others.
        writes: Whether it writes or shows something. Where several processes train together (see
            `ortops.distributed`), only the first one calls it, as one that saves; so it changes
            nothing in the session.

    Example:
        >>> class Print(Callback):
        ...     def on_epoch(self, record, session):
        ...         print(record.epoch, round(record.values["loss"], 3))
    """

    saves: bool = False
    writes: bool = False

    def on_begin(self, record: Record, session: Any) -> None:
        """Is called before the first step, and after `restore` where a training is resumed."""

    def on_step(self, record: Record, session: Any) -> None:
        """Is called after each step; after each window of batches with ``accumulate=``."""

    def on_epoch(self, record: Record, session: Any) -> None:
        """Is called after each epoch and its validation."""

    def on_end(self, record: Record, session: Any) -> None:
        """Is called when training ends: it is done, was stopped, or interrupted by a signal."""

    def on_save(self, record: Record, session: Any) -> None:
        """Is called after each of the methods above, once all callbacks have been told."""

    def on_close(self) -> None:
        """Is called once when `fit` returns or raises, after anything else: close files here."""

    def state(self) -> dict[str, Any]:
        """Returns what has to be restored when the training is resumed, as JSON has it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned when the session was saved."""
