"""A callback that saves the session from time to time."""

from __future__ import annotations

import os
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortops.callbacks.monitor import (
    begins_anew,
    check_count,
    check_number,
    check_path,
    path_of,
    remembered,
)
from ortops.errors import ModelError, OrtopsError
from ortops.graph import external
from ortops.training.callback import Callback, Record
from ortops.training.session import TrainingSession

__all__ = ["Checkpoint"]


class Checkpoint(Callback):
    """Saves the session from time to time, so that `fit` can be resumed: ``fit(…, resume=True)``.

    It saves after each epoch, or after every so many steps or minutes where that is given; and when
    fit ends, also by Ctrl-C or SIGTERM. Each file is a trainable model (see
    `ortops.TrainingSession.save`), which at any time is there as a whole.

    Args:
        path: The file. ``{step}`` and ``{epoch}`` in it stand for the number of finished steps and
            of the epoch, also as in ``{step:06d}``; without one, each save replaces the one before.
        every: After how many steps to save.
        minutes: After how many minutes to save.
        keep: How many of the files that it wrote are kept, the last ones; all by default. No file
            of anybody else is removed.

    Attributes:
        latest: The file that it wrote last, or None.

    Raises:
        OrtopsError: If an argument is not as told here; in fit, if there is no folder for the file.

    Example:
        >>> Checkpoint("runs/{epoch:03d}-{step}.onnx", every=1000, keep=3)
        Checkpoint('runs/{epoch:03d}-{step}.onnx', every=1000, minutes=None, keep=3)
    """

    saves = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = None,
    ) -> None:
        self.path = os.fspath(path_of("Checkpoint", path))
        self.every = None if every is None else check_count("Checkpoint", "every", every)
        if minutes is not None:
            check_number("Checkpoint", "minutes", minutes)
        self.minutes = minutes
        self.keep = None if keep is None else check_count("Checkpoint", "keep", keep)
        if not _check_placeholders(self.path) and keep is not None:
            raise OrtopsError(
                f"Checkpoint: keep is {keep}, and '{self.path}' is one file; put {{step}} or "
                "{epoch} into its name"
            )
        self.latest: Path | None = None
        self._written: list[tuple[int, int]] = []  # step and epoch, which make the name
        self._step = 0
        self._time = time.monotonic()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({self.path!r}, every={self.every}, minutes={self.minutes}, "
            f"keep={self.keep})"
        )

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Looks whether files can be written, and begins to count."""
        check_path("Checkpoint", self._file(session.steps_done, record.epoch))
        self._time = time.monotonic()
        if begins_anew(record):
            self._step = session.steps_done

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Saves when it is time."""
        steps = self.every is not None and session.steps_done - self._step >= self.every
        passed = time.monotonic() - self._time
        if steps or (self.minutes is not None and passed >= 60 * self.minutes):
            self._save(record, session)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Saves, unless steps or minutes were given."""
        if self.every is None and self.minutes is None:
            self._save(record, session)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Saves the end of the training, or where it was interrupted."""
        self._save(record, session)

    def _save(self, record: Record, session: TrainingSession) -> None:
        made = session.steps_done, record.epoch
        file = self._file(*made)
        # What the file tells of this callback is that it has been written.
        self._written = [old for old in self._written if self._file(*old) != file] + [made]
        self._step, self._time = session.steps_done, time.monotonic()
        session.save(file)
        self.latest = file
        while self.keep is not None and len(self._written) > self.keep:
            external.remove_model(self._file(*self._written[0]))
            self._written.pop(0)

    def _file(self, step: int, epoch: int) -> Path:
        return Path(self.path.format(step=step, epoch=epoch))

    def state(self) -> dict[str, Any]:
        """Returns what was written when, for the file."""
        return {"step": self._step, "written": [list(made) for made in self._written]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from the save that fit is resumed from, or from the one before it."""
        self._step = int(remembered("Checkpoint", state, "step", whole=True))
        written = state.get("written")
        if not isinstance(written, list) or not all(_is_made(made) for made in written):
            raise ModelError(
                f"Checkpoint: the file that fit goes on from has {written!r} for its 'written'; "
                "a list of pairs of a step and an epoch is accepted"
            )
        self._written = [(made[0], made[1]) for made in written]


def _is_made(made: object) -> bool:
    """Whether something is a step and an epoch."""
    return (
        isinstance(made, list)
        and len(made) == 2
        and all(type(number) is int and number >= 0 for number in made)
    )


def _check_placeholders(path: str) -> bool:
    """Returns whether there are placeholders in a path, and refuses others than ours."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(path) if field is not None]
        unknown = [field for field in fields if field not in ("step", "epoch")]
        if not unknown:
            path.format(step=1, epoch=1)
    except (ValueError, KeyError, IndexError) as error:
        raise OrtopsError(
            f"Checkpoint: '{path}' cannot be filled in ({error}); {{step}} and {{epoch}} are "
            "accepted, also as {step:06d}, and {{ for a brace"
        ) from error
    if unknown:
        raise OrtopsError(
            f"Checkpoint: '{path}' has the placeholder {{{unknown[0]}}}; {{step}} and {{epoch}} "
            "are accepted"
        )
    return bool(fields)
