"""A callback that saves the session periodically."""

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

from ortops._common.arguments import number, whole_number
from ortops.callbacks.monitor import begins_anew, path_of, remembered
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.position import POSITION_KEY
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, OrtopsError
from ortops.graph import convert
from ortops.graph.files import saving
from ortops.graph.files.atomic import check_path

logger = logging.getLogger("ortops")


class Checkpoint(Callback):
    """Saves the session periodically, so that `fit` can be resumed: ``fit(…, resume=True)``.

    Saves after each epoch, or after the given number of steps or minutes, and when fit ends, also
    by a signal. Each file is a trainable model (see `ortops.TrainingSession.save`) and is complete
    at any time.

    Args:
        path: The file. ``{step}`` and ``{epoch}`` are replaced by the number of finished steps and
            of the epoch; formats like ``{step:06d}`` work, too. Without placeholders, each save
            replaces the previous one.
        every: The number of steps between saves.
        minutes: The number of minutes between saves.
        keep: The number of most recent files to keep; all by default. A file is removed only if its
            metadata show that this training wrote it with ``keep`` under that name, before or after
            a resume.

    Attributes:
        latest: The last file written, or None.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if the file's folder does not exist.

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
        self.every = None if every is None else whole_number("Checkpoint: every", every, 1)
        if minutes is not None:
            number("Checkpoint: minutes", minutes, above=0)
        self.minutes = minutes
        self.keep = None if keep is None else whole_number("Checkpoint: keep", keep, 1)
        if not _check_placeholders(self.path) and keep is not None:
            raise ArgumentError(
                f"Checkpoint: keep={keep} requires several files, but '{self.path}' is one; add "
                "{step} or {epoch} to its name"
            )
        self.latest: Path | None = None
        self._written: list[_Written] = []  # the files that `keep` may remove
        self._mark = ""  # of the file being written
        self._due: _Written | None = None  # the file that `on_save` will write
        self._before: list[_Written] = []  # `_written` without it
        self._step = 0
        self._time = time.monotonic()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({self.path!r}, every={self.every}, minutes={self.minutes}, "
            f"keep={self.keep})"
        )

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Checks that files can be written, and starts counting."""
        self.check(self._file(session.steps_done, record.epoch))
        self._time = time.monotonic()
        if begins_anew(record):
            self._step = session.steps_done

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Requests a save when it is due."""
        steps = self.every is not None and session.steps_done - self._step >= self.every
        passed = time.monotonic() - self._time
        if steps or (self.minutes is not None and passed >= 60 * self.minutes):
            self._ask(record, session)

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Requests a save, unless steps or minutes were given."""
        if self.every is None and self.minutes is None:
            self._ask(record, session)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Requests a save at the end of the training, or where it was interrupted."""
        self._ask(record, session)

    def _ask(self, record: Record, session: TrainingSession) -> None:
        """Records a file before it is written, so that all files saved now contain the record."""
        self._due = _Written(session.steps_done, record.epoch, secrets.token_hex(8))
        self._before = self._written
        self._note(self._due)
        self._step, self._time = self._due.step, time.monotonic()

    def _note(self, made: _Written) -> None:
        """Records a file as the latest, replacing a record of the same name."""
        if self.keep is not None:
            file = self._file(made.step, made.epoch)
            others = [old for old in self._written if self._file(old.step, old.epoch) != file]
            self._written = [*others, made]

    def on_save(self, record: Record, session: TrainingSession) -> None:
        """Saves if requested, and removes the oldest files beyond ``keep``."""
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
            self.write(session, file)
        finally:
            self._mark = ""
        self.latest = file
        while self.keep is not None and len(self._written) > self.keep:
            oldest = self._written[0]
            _remove(self._file(oldest.step, oldest.epoch), oldest.mark)
            self._written.pop(0)

    def check(self, file: Path) -> None:
        """Raises an error if a file cannot be written."""
        check_path("Checkpoint", file)

    def write(self, session: TrainingSession, file: Path) -> None:
        """Writes a file. A subclass may write another form."""
        session.save(file)

    def _file(self, step: int, epoch: int) -> Path:
        return Path(self.path.format(step=step, epoch=epoch))

    def state(self) -> dict[str, Any]:
        """Returns the records of written files, for the file."""
        return {
            "step": self._step,
            "mark": self._mark,
            "written": [[made.step, made.epoch] for made in self._written],
            "marks": [made.mark for made in self._written],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the count of steps since the last save, and the records of written files."""
        self._step = int(remembered("Checkpoint", state, "step", whole=True))
        written, marks = state.get("written"), state.get("marks", [])
        for name, value, fits, items in (
            ("written", written, _is_made, "pairs of a step and an epoch"),
            ("marks", marks, _is_mark, "strings of 16 hexadecimal digits"),
        ):
            if not isinstance(value, list) or not all(map(fits, value)):
                raise ModelError(
                    f"Checkpoint: '{name}' in the state of the file to resume from must be a list "
                    f"of {items}, got {value!r:.80}"
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
        mark: A random string in its metadata that identifies the file.
    """

    step: int
    epoch: int
    mark: str


def _remove(file: Path, mark: str) -> None:
    """Removes a file if it has the mark, so that a file that replaced it is kept."""
    if not file.exists():
        saving.remove_model(file)  # its data, if the process was killed between the two
        return
    try:
        model = convert.load_light(file).proto
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
    """Whether an object is a pair of a step and an epoch."""
    return (
        isinstance(made, list)
        and len(made) == 2
        and all(type(number) is int and number >= 0 for number in made)
    )


def _is_mark(mark: object) -> bool:
    return isinstance(mark, str) and re.fullmatch("[0-9a-f]{16}", mark) is not None


def _check_placeholders(path: str) -> bool:
    """Returns whether a path has placeholders; raises an error for unknown ones."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(path) if field is not None]
        unknown = [field for field in fields if field not in ("step", "epoch")]
        if not unknown:
            path.format(step=1, epoch=1)
    except (ValueError, KeyError, IndexError) as error:
        raise ArgumentError(
            f"Checkpoint: cannot format '{path}' ({error}); use {{step}} and {{epoch}}, also as in "
            "{step:06d}, and {{ for a literal brace"
        ) from error
    if unknown:
        raise ArgumentError(
            f"Checkpoint: '{path}' has the unknown placeholder {{{unknown[0]}}}; use {{step}} or "
            "{epoch}"
        )
    return bool(fields)
