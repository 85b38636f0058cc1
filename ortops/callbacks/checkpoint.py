"""A callback that saves the session from time to time."""

from __future__ import annotations

import logging
import os
import re
import secrets
import string
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ortops.callbacks.monitor import (
    begins_anew,
    check_count,
    check_number,
    check_path,
    path_of,
    remembered,
)
from ortops.errors import ModelError, OrtopsError
from ortops.graph import convert
from ortops.graph.files import saving
from ortops.training.callback import Callback, Record
from ortops.training.position import POSITION_KEY
from ortops.training.session import TrainingSession

__all__ = ["Checkpoint"]

logger = logging.getLogger("ortops")


class Checkpoint(Callback):
    """Saves the session from time to time, so that `fit` can be resumed: ``fit(…, resume=True)``.

    It saves after each epoch, or after every so many steps or minutes where that is given; and when
    fit ends, also by a signal. Each file is a trainable model (see
    `ortops.TrainingSession.save`), which at any time is there as a whole.

    Args:
        path: The file. ``{step}`` and ``{epoch}`` in it stand for the number of finished steps and
            of the epoch, also as in ``{step:06d}``; without one, each save replaces the one before.
        every: After how many steps to save.
        minutes: After how many minutes to save.
        keep: How many of the files that it wrote are kept, the last ones; all by default. A file is
            only removed if what it says of itself shows that this training wrote it with ``keep``,
            under that name; a fit that is resumed goes on so.

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
        self._written: list[_Written] = []  # what `keep` may remove
        self._mark = ""  # of the file that is being written
        self._due: _Written | None = None  # what `on_save` writes
        self._before: list[_Written] = []  # `_written` without it
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
        """Asks for a save when it is time."""
        steps = self.every is not None and session.steps_done - self._step >= self.every
        passed = time.monotonic() - self._time
        if steps or (self.minutes is not None and passed >= 60 * self.minutes):
            self._ask(record, session)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Asks for a save, unless steps or minutes were given."""
        if self.every is None and self.minutes is None:
            self._ask(record, session)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Asks for a save of the end of the training, or of where it was interrupted."""
        self._ask(record, session)

    def _ask(self, record: Record, session: TrainingSession) -> None:
        """Notes that a file is written, as all files of this moment are to say."""
        self._due = _Written(session.steps_done, record.epoch, secrets.token_hex(8))
        self._before = self._written
        self._note(self._due)
        self._step, self._time = self._due.step, time.monotonic()

    def _note(self, made: _Written) -> None:
        """Notes a file as the last one, in place of another of its name."""
        if self.keep is not None:
            file = self._file(made.step, made.epoch)
            others = [old for old in self._written if self._file(old.step, old.epoch) != file]
            self._written = [*others, made]

    def on_save(self, record: Record, session: TrainingSession) -> None:
        """Saves, if it is time, and removes what is more than ``keep`` files."""
        if self._due is None:
            return
        made, self._due = self._due, None
        if session.steps_done != made.step:  # a later callback has restored another state
            self._written = self._before
            made = made._replace(step=session.steps_done)
            self._note(made)
            self._step = made.step
        file, self._mark = self._file(made.step, made.epoch), made.mark
        try:
            session.save(file)
        finally:
            self._mark = ""
        self.latest = file
        while self.keep is not None and len(self._written) > self.keep:
            oldest = self._written[0]
            _remove(self._file(oldest.step, oldest.epoch), oldest.mark)
            self._written.pop(0)

    def _file(self, step: int, epoch: int) -> Path:
        return Path(self.path.format(step=step, epoch=epoch))

    def state(self) -> dict[str, Any]:
        """Returns what was written when, for the file."""
        return {
            "step": self._step,
            "mark": self._mark,
            "written": [[made.step, made.epoch] for made in self._written],
            "marks": [made.mark for made in self._written],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from the save that fit is resumed from, or from the one before it."""
        self._step = int(remembered("Checkpoint", state, "step", whole=True))
        written, marks = state.get("written"), state.get("marks", [])
        for name, value, fits, accepted in (
            ("written", written, _is_made, "pairs of a step and an epoch"),
            ("marks", marks, _is_mark, "strings of 16 hexadecimal digits"),
        ):
            if not isinstance(value, list) or not all(map(fits, value)):
                raise ModelError(
                    f"Checkpoint: the file that fit goes on from has {value!r:.80} for its "
                    f"'{name}'; a list of {accepted} is accepted"
                )
        assert isinstance(written, list)
        if len(marks) < len(written) and self.keep is not None:  # an older version wrote none
            logger.warning(
                "Checkpoint: keep= does not remove files that an older version of ortops wrote in "
                "this training"
            )
        pairs = zip(written, marks, strict=False)
        self._written = [_Written(step, epoch, mark) for (step, epoch), mark in pairs]


class _Written(NamedTuple):
    """A file that was written.

    Attributes:
        step: The step in its name.
        epoch: The epoch in its name.
        mark: What its own metadata have for the mark, and no other file has.
    """

    step: int
    epoch: int
    mark: str


def _remove(file: Path, mark: str) -> None:
    """Removes a file with a mark; one that has taken its place is not ours."""
    if not file.exists():
        return
    try:
        model, _ = convert.load_light(file)
        notes = [note.value for note in model.metadata_props if note.key == POSITION_KEY]
    except (OSError, OrtopsError):
        notes = []
    if any(f'"mark": "{mark}"' in note for note in notes):
        saving.remove_model(file)
    else:
        logger.warning(
            "Checkpoint: '%s' is not the file that this callback wrote, so keep= does not remove "
            "it",
            file,
        )


def _is_made(made: object) -> bool:
    """Whether something is a step and an epoch."""
    return (
        isinstance(made, list)
        and len(made) == 2
        and all(type(number) is int and number >= 0 for number in made)
    )


def _is_mark(mark: object) -> bool:
    return isinstance(mark, str) and re.fullmatch("[0-9a-f]{16}", mark) is not None


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
