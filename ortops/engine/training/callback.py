"""The callback interface of `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ortops.engine.training.history import History


@dataclass
class Record:
    """The progress of a call of `fit`.

    Attributes:
        epoch: The epoch, from 1.
        epochs: The number of epochs.
        batch: The number of finished batches of the epoch.
        batches: The number of batches of the epoch, if known.
        step: The number of finished steps (`TrainingSession.steps_done`).
        values: In `Callback.on_step`, ``loss``, ``loss_<name>`` of each summand, ``gradient_norm``
            (where ``clip_norm`` computes it) and ``learning_rate`` of the step. In
            `Callback.on_epoch`, the entry of the epoch in the history. In `Callback.on_validation`,
            ``validation_<name>``. In `Callback.on_end`, the entry of the last epoch, or the
            averages of an unfinished one.
        samples: The number of finished rows of the epoch.
        seconds: The time since training began, including interrupted calls.
        history: The entries of the finished epochs.
        cut: Whether ``max_steps`` or ``max_minutes`` of `fit` ended training within this epoch. A
            resumed training finishes the epoch, whose entry then replaces this one.
        interrupted: ``"SIGINT"``, ``"SIGTERM"`` or ``"SIGHUP"`` in `Callback.on_end`, if a signal
            ended training; else "".
        accumulate: The number of batches of a step, as given to `fit`.
        directions: For the numbers that `fit` itself puts into the history, losses and metrics,
            whether higher is better; None if that is not known.
        stopped: The reason given to `stop`, if it was called.

    Example:
        >>> from ortops.docs import examples
        >>> from ortops.callbacks import Callback
        >>> class Patience(Callback):
        ...     def on_step(self, record, session):
        ...         if record.values["loss"] < 0.1:
        ...             record.stop(f"the loss is small at step {record.step}")
        >>> session = examples.session()
        >>> _ = session.fit([examples.BATCH] * 9, callbacks=[Patience()], progress=False)
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
    cut: bool = False
    accumulate: int = 1
    directions: Mapping[str, bool | None] = field(
        default_factory=lambda: {"loss": False, "validation_loss": False}
    )
    stopped: str = field(default="", init=False)

    def stop(self, reason: str) -> None:
        """Stops training after this step or epoch.

        Args:
            reason: The reason, for messages.
        """
        self.stopped = self.stopped or reason or "a callback asked for it"


class Callback:
    """The base class of callbacks, which `fit` calls: ``fit(…, callbacks=[…])``.

    Subclass it and override the methods that you need. They may read, evaluate, save and change the
    session. An exception ends training and is raised by `fit`, once the other callbacks have seen
    the event and have saved.

    For each event, all callbacks are called in the order in which they were given, and then
    `on_save` of each. Save the session only in `on_save`: the file also holds the `state` of all
    callbacks, and by then all of them have seen the event.

    Attributes:
        saves: Whether it saves the session. If it saves in another method than `on_save`, it is
            called after all others.
        writes: Whether it writes or shows something. If several processes train together (see
            `ortops.distributed`), only the first one calls it, as with ``saves``, so it must not
            change the session.

    Example:
        >>> class Print(Callback):
        ...     def on_epoch(self, record, session):
        ...         print(record.epoch, round(record.values["loss"], 3))
    """

    saves: bool = False
    writes: bool = False

    def on_begin(self, record: Record, session: Any) -> None:
        """Called before the first step, and after `restore` if training is resumed."""

    def on_step(self, record: Record, session: Any) -> None:
        """Called after each step, which covers several batches with ``accumulate=``."""

    def on_validation(self, record: Record, session: Any) -> None:
        """Called after each validation within an epoch: ``fit(validate_every=…)``."""

    def on_epoch(self, record: Record, session: Any) -> None:
        """Called after each epoch and its validation."""

    def on_end(self, record: Record, session: Any) -> None:
        """Called when training ends: finished, stopped, or interrupted by a signal."""

    def on_save(self, record: Record, session: Any) -> None:
        """Called after each of the methods above, when all callbacks have been called."""

    def on_close(self) -> None:
        """Called once when `fit` returns or raises an exception; close files here."""

    def state(self) -> dict[str, Any]:
        """Returns the state to restore when training is resumed, as JSON values."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned when the session was saved."""
