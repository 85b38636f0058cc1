"""The position in a training: the progress of a call of `fit`, stored together with the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import onnx

from ortops._common.numbers import plain
from ortops.engine.training.history import History
from ortops.engine.training.training_metrics import read_states, states_as_json
from ortops.errors import ModelError, OrtopsError
from ortops.graph.files.json_fields import (
    BOOLEAN,
    TEXT,
    Expected,
    array_of,
    check_fields,
    object_of,
    or_null,
)
from ortops.graph.files.json_metadata import read_metadata, where
from ortops.graph.files.json_text import read_json

POSITION_KEY = "ortops.fit"
"""The key in a trainable model's ``metadata_props`` for the position, as JSON."""

_WHERE = where(POSITION_KEY)
_REMEDY = "TrainingSession.save writes it; remove it if it is damaged"


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit` that determine the rows of each step.

    Attributes:
        epochs: The number of epochs.
        batch_size: The number of rows per batch.
        shuffle: Whether rows are shuffled.
        seed: Determines their order.
        accumulate: The number of batches per update.
        rows: The number of rows of the training data, if known.
        batches: The number of batches in an epoch, if known.
        validation_split: The fraction of the data that is set aside; 0 for none.
        entries: The training_info entries that make the steps; "" for all of them in each step.
        group_by_length: Whether batches have samples of similar length.
    """

    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    accumulate: int
    rows: int | None
    batches: int | None
    validation_split: float = 0.0
    entries: str = ""
    group_by_length: bool = False

    def resumed(self, given: FitArguments) -> FitArguments:
        """Returns these arguments with the number of epochs of the resuming call.

        Raises:
            OrtopsError: If another argument differs. Properties of the data are compared only if
                they are known.
        """
        names = ("validation_split", *asdict(self))  # first: the numbers of rows depend on it
        for name in names:
            begun, now = getattr(self, name), getattr(given, name)
            data = name in ("rows", "batches")
            if name == "epochs" or begun == now or (data and None in (begun, now)):
                continue
            what = f"the data must have {begun} {name}" if data else f"{name} must be {begun}"
            if name == "entries":
                what, now = f"entry or entries must be {begun or 'left out'}", now or "neither"
            raise OrtopsError(
                f"fit: {what}, as in the training to resume, got {now}; leave out resume=True to "
                "start a new training"
            )
        return self if given.epochs == self.epochs else replace(self, epochs=given.epochs)


class Progress(NamedTuple):
    """What changes with every update.

    Attributes:
        batch: The number of finished batches of the epoch.
        samples: The number of their rows.
        totals: For the loss and each of its parts, the sum over these rows; empty before the first.
        rate: The learning rate of the last step, if it follows a schedule.
        seconds: The time since training began.
        weights: For the loss and each of its parts, the number of rows, without those whose labels
            are ignored; empty if all count. The totals are sums over these rows.
        units: For the loss and each of its parts, the number of labels per row; 0 while unknown.
            Empty like the weights.
        metrics: The states of the metrics of training.
        rates: The learning rates of the last steps of entries in turn.
    """

    batch: int = 0
    samples: int = 0
    totals: tuple[float, ...] = ()
    rate: float | None = None
    seconds: float = 0.0
    weights: tuple[float, ...] = ()
    units: tuple[float, ...] = ()
    metrics: Mapping[str, Mapping[str, Any]] = {}
    rates: Mapping[str, float] = {}

    def check_sums(self, count: int) -> None:
        """Checks that there is a sum for each loss of the session.

        Args:
            count: The number of losses.

        Raises:
            ModelError: If the numbers differ.
        """
        for name in _TUPLES:
            found = len(getattr(self, name))
            if found not in (0, count):
                raise ModelError(
                    f"{_WHERE}: '{name}' must have one number for each loss, {count} in all, got "
                    f"{found}"
                )


class EpochState(NamedTuple):
    """What changes with every epoch.

    Attributes:
        call: The arguments of `fit`.
        epoch: The epoch, from 1; the number of epochs + 1 at the end.
        first_step: The number of steps before the epoch, which determines its order together with
            the seed.
        entries: The entries of all epochs so far, shared with later positions.
        finished: The number of entries of earlier epochs.
        states: Returns the classes and states of the callbacks.
        validations: The results of validations within epochs, shared with later positions.
        begun: The number of steps before the training.
        cut: The entry of the present epoch if a limit ended training within it; None otherwise.
    """

    call: FitArguments
    epoch: int
    first_step: int
    entries: Entries
    finished: int
    states: Callable[[], Sequence[Mapping[str, Any]]]
    validations: Entries
    begun: int = 0
    cut: dict[str, float] | None = None

    @property
    def history(self) -> History:
        """A new list of the entries of earlier epochs, and of one that a limit cut short."""
        cut = [self.cut] if self.cut is not None else []
        finished = self.entries.history[: self.finished]
        return History([*finished, *cut], self.validations.history)


class Position(NamedTuple):
    """The position in a training, always after a whole update.

    Attributes:
        epoch_state: What changes with every epoch.
        progress: What changes with every update.
    """

    epoch_state: EpochState
    progress: Progress

    def resumed(self, given: FitArguments) -> Position:
        """Returns the position with the number of epochs of the resuming call.

        An epoch that a limit cut short goes on.

        Raises:
            OrtopsError: If other arguments differ (see `FitArguments.resumed`), or there are fewer
                epochs than were begun.
        """
        epoch_state, epoch = self.epoch_state, self.epoch_state.epoch
        call = epoch_state.call.resumed(given)
        under_way = self.progress.batch > 0
        least = max(1, epoch - 1 + under_way)
        if call.epochs < least:
            where = f" and is in epoch {epoch}" if under_way else ""
            raise OrtopsError(
                f"fit: epochs must be an integer >= {least}, got {call.epochs}: the training to "
                f"resume has finished {epoch - 1} of {epoch_state.call.epochs} epochs{where}; "
                "leave out resume=True to start a new training"
            )
        return self._replace(epoch_state=epoch_state._replace(call=call, cut=None))

    def text(self, steps: int) -> str:
        """Returns the position as JSON, with NaN and infinity as Python writes them.

        Args:
            steps: The number of steps that the session has made.

        Raises:
            OrtopsError: If the state of a callback cannot be written as JSON, or `read_position`
                could not read what a callback has made of it or of the history.
        """
        epoch_state, states = self.epoch_state, []
        found = {
            **asdict(epoch_state.call),
            "epoch": epoch_state.epoch,
            "first_step": epoch_state.first_step,
            "begun": epoch_state.begun,
            "cut": epoch_state.cut and _plain_entry(epoch_state.cut, epoch_state.epoch),
            **self.progress._asdict(),
            **{name: list(getattr(self.progress, name)) for name in _TUPLES},
            "metrics": states_as_json(self.progress.metrics),
            "steps": steps,
        }
        for saved in epoch_state.states():
            if not _is_state(saved):
                raise OrtopsError(
                    f"callback {saved['class']}: `state` must return a dict, got "
                    f"{saved['state']!r:.80}"
                )
            states.append(_state_text(saved))
        for name, value in found.items():
            expected, fits = _FIELDS[name]
            if not fits(value):
                raise OrtopsError(f"save: '{name}' of fit must be {expected}, got {value!r:.200}")
        entries = epoch_state.entries.text(epoch_state.finished)
        # The history is text already, so the time of a save does not grow with the epochs.
        written = {name: value for name, value in found.items() if value or name not in _OPTIONAL}
        head = json.dumps(written).removesuffix("}")
        if validations := epoch_state.validations.text(len(epoch_state.validations.history)):
            head += f', "validations": [{validations}]'
        return f'{head}, "history": [{entries}], "callbacks": [{", ".join(states)}]}}'


class Entries:
    """The entries of epochs, each of which is converted to text only once.

    Args:
        history: The entries; more are appended as epochs end.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self._done: tuple[list[dict[str, float]], str] = ([], "")  # copies, and their JSON

    def text(self, count: int) -> str:
        """Returns the first entries as JSON objects, separated by commas.

        Args:
            count: The number of entries.

        Raises:
            OrtopsError: If an entry has something other than numbers, or numbers that JSON cannot
                hold.
        """
        copies, text = self._done
        entries = self.history[:count]
        if entries[: len(copies)] != copies:  # a callback has changed one, or removed it
            copies, text = [], ""
        rest = enumerate(entries[len(copies) :], len(copies) + 1)
        added = [_plain_entry(entry, epoch) for epoch, entry in rest]
        if added:
            new = json.dumps(added)[1:-1]
            copies, text = [*copies, *added], f"{text}, {new}" if text else new
            self._done = copies, text
        return text


def _plain_entry(entry: Mapping[str, Any], epoch: int) -> dict[str, float]:
    """Returns an entry of the history with Python numbers."""
    found: dict[str, float] = {}
    for name, value in entry.items():
        number = plain(value)
        if number is None or not isinstance(name, str):
            raise OrtopsError(
                f"save: the history must have numbers by name, got {name!r}: {value!r:.80} in "
                f"epoch {epoch}"
            )
        found[name] = number
    return found


def _state_text(saved: Mapping[str, Any]) -> str:
    """Returns the class and state of a callback as JSON."""
    try:
        text = json.dumps(saved, default=_number)
        read_json(f"[[{text}]]")  # as deep as in the file
    except (TypeError, ValueError, RecursionError) as error:
        raise OrtopsError(
            f"callback {saved['class']}: its state cannot be saved: {error}; return dicts, lists, "
            "strings, numbers, True, False and None from `state`"
        ) from error
    return text


def _number(value: object) -> bool | int | float:
    """Returns the Python number to write for another number."""
    found = bool(value) if isinstance(value, np.bool_) else plain(value)
    if found is None:
        raise TypeError(f"{value!r:.80} is a {type(value).__name__}")
    return found


class ResumeState:
    """The position that belongs to the present state of a session.

    A single assignment, of the number of steps, changes the state of a session, and a signal cannot
    split it. The position is derived from that number, so the two always agree.

    Args:
        made: Returns the number of steps.
    """

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._now: tuple[int, Position | None, Position | None] = (0, None, None)

    @property
    def position(self) -> Position | None:
        """The position; None if `fit` was not called, or the session was reset since."""
        made, before, after = self._now
        now = self._made()
        return before if now == made else after if now > made else None

    def set(self, position: Position | None) -> None:
        """Sets the position of the present state."""
        self._now = (self._made(), position, position)

    def prepare(self, position: Position) -> None:
        """Sets the position after one more step."""
        self._now = (self._made(), self.position, position)


def read_position(proto: onnx.ModelProto) -> tuple[Position, int] | None:
    """Returns the position in a trainable model, and the number of steps.

    Raises:
        ModelError: If it is not in the form that `Position.text` writes.
    """
    found = read_metadata(proto.metadata_props, POSITION_KEY, _REMEDY)
    if found is None:
        return None
    found = {**_OPTIONAL, **found}
    check_fields(_WHERE, found, _FIELDS)
    call = FitArguments(**{field.name: found[field.name] for field in fields(FitArguments)})
    states = found["callbacks"]
    entries = Entries(History(found["history"]))
    epoch_state = EpochState(
        call,
        found["epoch"],
        found["first_step"],
        entries,
        finished=len(entries.history),
        states=lambda: states,
        validations=Entries(History(found["validations"])),
        begun=found["begun"],
        cut=found["cut"],
    )
    progress = Progress(**{name: found[name] for name in Progress._fields})
    totals, weights, units = (tuple(found[name]) for name in _TUPLES)
    progress = progress._replace(
        totals=totals, weights=weights, units=units, metrics=read_states(found["metrics"]) or {}
    )
    return Position(epoch_state, progress), found["steps"]


_TUPLES = ("totals", "weights", "units")
_OPTIONAL: Mapping[str, Any] = {
    "weights": [],
    "units": [],
    "validation_split": 0.0,
    "entries": "",
    "group_by_length": False,
    "begun": 0,
    "cut": None,
    "validations": [],
    "metrics": {},
    "rates": {},
}


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_state(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("class"), str)
        and isinstance(value.get("state"), dict)
    )


_COUNT = Expected("an integer >= 0", _is_count)
_NUMBER = Expected("a number", _is_number)
_NUMBERS = object_of("numbers", _is_number)

_FIELDS: Mapping[str, Expected] = {
    **dict.fromkeys(
        ("epochs", "epoch", "batch_size", "accumulate"),
        Expected("an integer >= 1", lambda value: _is_count(value, 1)),
    ),
    **dict.fromkeys(("first_step", "begun", "batch", "samples", "steps"), _COUNT),
    "seed": Expected("an integer >= 0", lambda value: type(value) is int and value >= 0),
    **dict.fromkeys(("rows", "batches"), or_null(_COUNT)),
    **dict.fromkeys(("shuffle", "group_by_length"), BOOLEAN),
    "entries": TEXT,
    "validation_split": Expected(
        "a number >= 0 and < 1", lambda value: _is_number(value) and 0 <= value < 1
    ),
    **dict.fromkeys(_TUPLES, array_of("numbers", _is_number)),
    "rate": or_null(_NUMBER),
    "rates": _NUMBERS,
    "seconds": Expected("a number >= 0", lambda value: _is_number(value) and 0 <= value < math.inf),
    **dict.fromkeys(("history", "validations"), array_of("objects of numbers", _NUMBERS.fits)),
    "cut": or_null(_NUMBERS),
    "metrics": Expected("an object of states", lambda value: read_states(value) is not None),
    "callbacks": array_of("objects of 'class' and 'state'", _is_state),
}
