"""The position in a training: the progress of a call of `fit`, stored together with the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx

from ortops._common.numbers import plain
from ortops.engine.training.fit_options import SAVED, FitOptions
from ortops.engine.training.history import History, plain_entry
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


class EpochState(NamedTuple):
    """What changes with every epoch.

    Attributes:
        call: The arguments of `fit` that determine the rows of each step, with the number of rows
            of the training data and that of batches in an epoch, if known; see `call_of`.
        epoch: The epoch, from 1; the number of epochs + 1 at the end.
        first_step: The number of steps before the epoch, which determines its order together with
            the seed.
        entries: The entries of all epochs so far, shared with later positions.
        finished: The number of entries of earlier epochs.
        states: Returns the classes and states of the callbacks.
        begun: The number of steps before the training.
        cut: The entry of the present epoch if a limit ended training within it; None otherwise.
    """

    call: Mapping[str, Any]
    epoch: int
    first_step: int
    entries: History
    finished: int
    states: Callable[[], Sequence[Mapping[str, Any]]]
    begun: int = 0
    cut: dict[str, float] | None = None

    @property
    def history(self) -> History:
        """A new list of the entries of earlier epochs, and of one that a limit cut short."""
        cut = [self.cut] if self.cut is not None else []
        return History([*self.entries[: self.finished], *cut], self.entries.validations)


class Position(NamedTuple):
    """The position in a training, always after a whole update.

    Attributes:
        epoch_state: What changes with every epoch; all others change with every update.
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
        norms: The sum of the norms of gradients over the steps of the epoch where they are finite,
            and the number of these steps, by the names of their records.
    """

    epoch_state: EpochState
    batch: int = 0
    samples: int = 0
    totals: tuple[float, ...] = ()
    rate: float | None = None
    seconds: float = 0.0
    weights: tuple[float, ...] = ()
    units: tuple[float, ...] = ()
    metrics: Mapping[str, Mapping[str, Any]] = {}
    rates: Mapping[str, float] = {}
    norms: Mapping[str, Sequence[float]] = {}

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

    def resumed(self, given: Mapping[str, Any]) -> Position:
        """Returns the position with the number of epochs of the resuming call.

        An epoch that a limit cut short continues.

        Raises:
            OrtopsError: If other arguments differ, or there are fewer epochs than were begun.
                Properties of the data are compared only if they are known.
        """
        epoch_state, epoch = self.epoch_state, self.epoch_state.epoch
        call = epoch_state.call
        for name in ("validation_split", *call):  # first: the numbers of rows depend on it
            begun, now, data = call[name], given[name], name in _OF_DATA
            if name == "epochs" or begun == now or (data and None in (begun, now)):
                continue
            what = f"the data must have {begun} {name}" if data else f"{name} must be {begun}"
            if name == "entries":
                what, now = f"entry or entries must be {begun or 'left out'}", now or "neither"
            raise OrtopsError(
                f"fit: {what}, as in the training to resume, got {now}; leave out resume=True to "
                "start a new training"
            )
        under_way = self.batch > 0
        least = max(1, epoch - 1 + under_way)
        if given["epochs"] < least:
            where = f" and is in epoch {epoch}" if under_way else ""
            raise OrtopsError(
                f"fit: epochs must be an integer >= {least}, got {given['epochs']}: the training "
                f"to resume has finished {epoch - 1} of {call['epochs']} epochs{where}; "
                "leave out resume=True to start a new training"
            )
        if given["epochs"] != call["epochs"]:  # otherwise, it stays the same object
            call = {**call, "epochs": given["epochs"]}
        return self._replace(epoch_state=epoch_state._replace(call=call, cut=None))

    def after(
        self,
        batches: int,
        rows: int,
        losses: Sequence[float],
        counts: Sequence[float | None],
        norms: Mapping[str, float] | None = None,
        **others: Any,
    ) -> Position:
        """Returns the position after further batches.

        The weight of a loss in the averages of the epoch is its divisor, such as the number of
        labels that are not ignored, in units that make it the number of rows if all labels count.

        Args:
            batches: The number of batches.
            rows: The number of their rows.
            losses: The loss and its parts.
            counts: The divisor of each, None if all rows count; nothing if this holds for all.
            norms: The norms of the step's gradients, by the names of their records.
            **others: The values of attributes that do not follow from these.
        """
        zeros = (0.0,) * len(losses)
        added: Sequence[float] = [rows] * len(losses)
        weights: tuple[float, ...] = ()
        units: tuple[float, ...] = ()
        if counts:
            pairs = [*zip(self.units or zeros, counts, strict=True)]
            units = tuple([u if n is None else u or n / rows for u, n in pairs])
            added = [
                float(rows) if count is None else count / unit if count else 0.0
                for count, unit in zip(counts, units, strict=True)
            ]
            if any(weight != rows for weight in added[1:]):
                added[0] = 0.0  # the average of the sum is the sum of the averages of its summands
            sums = zip(self.weights or (self.samples,) * len(added), added, strict=True)
            weights = tuple([float(weight + more) for weight, more in sums])
        summands = zip(self.totals or zeros, losses, added, strict=True)
        totals = tuple([total + loss * weight for total, loss, weight in summands])
        sums_of_norms = dict(self.norms)
        for name, norm in (norms or {}).items():  # that of a skipped step is not finite
            total, steps = self.norms.get(name, (0.0, 0))
            finite = math.isfinite(norm)
            sums_of_norms[name] = (total + norm, steps + 1) if finite else (total, steps)
        return Position(
            self.epoch_state,
            *(self.batch + batches, self.samples + rows, totals),
            weights=weights,
            units=units,
            norms=sums_of_norms,
            **others,
        )

    def averages(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Returns the mean losses of the epoch so far; NaN if no label counts. Then mean norms.

        Args:
            shares: The weights in the loss of its parts, by their names; nothing for one part.
        """
        if not self.samples:
            return {}
        weights: Sequence[float] = self.weights or [self.samples] * len(self.totals)
        pairs = zip(self.totals, weights, strict=True)
        values = [total / weight if weight else math.nan for total, weight in pairs]
        if len(values) > 1 and weights[0] != self.samples:
            parts = zip(shares.values(), values[1:], weights[1:], strict=True)
            summands = [share * value for share, value, weight in parts if weight]
            values[0] = sum(summands) if summands else math.nan
        norms = {name: total / steps for name, (total, steps) in self.norms.items() if steps}
        return dict(zip(["loss", *shares], values, strict=True)) | norms

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
            **epoch_state.call,
            "epoch": epoch_state.epoch,
            "first_step": epoch_state.first_step,
            "begun": epoch_state.begun,
            "cut": epoch_state.cut and plain_entry(epoch_state.cut, epoch_state.epoch),
            **{name: getattr(self, name) for name in _OF_UPDATES},
            **{name: list(getattr(self, name)) for name in _TUPLES},
            "metrics": states_as_json(self.metrics),
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
        entries = epoch_state.entries.as_json(epoch_state.finished)
        # The history is text already, so the time of a save does not grow with the epochs.
        written = {name: value for name, value in found.items() if value or name not in _OPTIONAL}
        head = json.dumps(written).removesuffix("}")
        if validations := epoch_state.entries.validations.as_json():
            head += f', "validations": [{validations}]'
        return f'{head}, "history": [{entries}], "callbacks": [{", ".join(states)}]}}'


_OF_DATA = ("rows", "batches")
_OF_UPDATES = Position._fields[1:]


def call_of(
    options: FitOptions, rows: int | None, batches: int | None, entries: str
) -> dict[str, Any]:
    """Returns the arguments of `fit` that determine the rows of each step, in the file's order.

    Args:
        options: The arguments.
        rows: The number of rows of the training data, if known.
        batches: The number of batches in an epoch, if known.
        entries: The training_info entries that make the steps; "" for all of them in each step.
    """
    groups = options["group_by_length"] is not False
    saved = {**options, "entries": entries, "group_by_length": groups}
    needed = {name: saved[name] for name in SAVED if name not in _OPTIONAL}
    return {**needed, "rows": rows, "batches": batches, **{name: saved[name] for name in SAVED}}


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


MOST_UNREAD = 64
"""The number of steps whose losses may stay unread on a device."""


class UnreadPosition:
    """The position after steps whose losses are still on a device.

    Args:
        before: The position before the last of them.
        rows: The number of rows of its batch.
        after: Returns the position after it; reads its losses.

    Attributes:
        epoch_state, batch, samples: Those of the position.
        unread: The number of steps whose losses have not been read.
    """

    def __init__(
        self,
        before: Position | UnreadPosition,
        rows: int,
        after: Callable[[Position], Position],
    ) -> None:
        self.epoch_state: EpochState = before.epoch_state
        self.batch: int = before.batch + 1
        self.samples: int = before.samples + rows
        self.unread: int = 1 + (before.unread if isinstance(before, UnreadPosition) else 0)
        self._state: Position | tuple[Position | UnreadPosition, Callable[[Position], Position]]
        self._state = before, after

    def read(self) -> Position:
        """Returns the position; lets go of the earlier ones."""
        if not isinstance(self._state, Position):
            before, after = self._state
            self._state = after(known(before))
        return self._state


AnyPosition: TypeAlias = Position | UnreadPosition


def known(position: AnyPosition) -> Position:
    """Returns a position, with losses that have been read."""
    return position.read() if isinstance(position, UnreadPosition) else position


class ResumeState:
    """The position that belongs to the current state of a session.

    A single assignment, of the number of steps, changes the state of a session, and a signal cannot
    split it. The position is derived from that number, so the two always agree.

    Args:
        made: Returns the number of steps.
    """

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._now: tuple[int, AnyPosition | None, AnyPosition | None] = (0, None, None)

    @property
    def position(self) -> Position | None:
        """The position; None if `fit` was not called, or the session was reset since."""
        found = self._present()
        return None if found is None else known(found)

    def _present(self) -> AnyPosition | None:
        made, before, after = self._now
        now = self._made()
        return before if now == made else after if now > made else None

    def set(self, position: Position | None) -> None:
        """Sets the position of the current state."""
        self._now = (self._made(), position, position)

    def prepare(self, position: AnyPosition) -> None:
        """Sets the position after one more step."""
        self._now = (self._made(), self._present(), position)


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
    names = (*(name for name in SAVED if name not in _OPTIONAL), *_OF_DATA, *SAVED)
    epoch_state = EpochState(
        {name: found[name] for name in names},
        *(found["epoch"], found["first_step"], History(found["history"], found["validations"])),
        finished=len(found["history"]),
        states=lambda: found["callbacks"],
        begun=found["begun"],
        cut=found["cut"],
    )
    found |= {name: tuple(found[name]) for name in _TUPLES}
    found["metrics"] = read_states(found["metrics"]) or {}
    return Position(epoch_state, *(found[name] for name in _OF_UPDATES)), found["steps"]


_TUPLES = ("totals", "weights", "units")
_OPTIONAL: Mapping[str, Any] = {
    "weights": [],
    "units": [],
    "validation_split": 0.0,
    "drop_last": False,
    "entries": "",
    "group_by_length": False,
    "begun": 0,
    "cut": None,
    "validations": [],
    "metrics": {},
    "rates": {},
    "norms": {},
}


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_sum(value: object) -> bool:
    pair = list(value) if isinstance(value, list | tuple) else []
    return len(pair) == 2 and _is_number(pair[0]) and _is_count(pair[1])


def _is_state(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("class"), str)
        and isinstance(value.get("state"), dict)
    )


_COUNT = Expected("an integer >= 0", _is_count)
_NUMBER = Expected("a number", _is_number)
_NUMBERS = object_of("numbers", _is_number)
_SUMS = object_of("a sum and a number of steps", _is_sum)

_SAVED = {
    each.text: each
    for each in (
        *(BOOLEAN, TEXT),
        Expected("an integer >= 1", lambda value: _is_count(value, 1)),
        Expected("an integer >= 0", lambda value: type(value) is int and value >= 0),
        Expected("a number >= 0 and < 1", lambda value: _is_number(value) and 0 <= value < 1),
    )
}
"""What the arguments of `fit` are in files; see `Option`."""

_FIELDS: Mapping[str, Expected] = {
    **{name: _SAVED[option.saved] for name, option in SAVED.items()},
    "epoch": _SAVED["an integer >= 1"],
    **dict.fromkeys(("first_step", "begun", "batch", "samples", "steps"), _COUNT),
    **dict.fromkeys(_OF_DATA, or_null(_COUNT)),
    **dict.fromkeys(_TUPLES, array_of("numbers", _is_number)),
    "rate": or_null(_NUMBER),
    "rates": _NUMBERS,
    "norms": _SUMS,
    "seconds": Expected("a number >= 0", lambda value: _is_number(value) and 0 <= value < math.inf),
    **dict.fromkeys(("history", "validations"), array_of("objects of numbers", _NUMBERS.fits)),
    "cut": or_null(_NUMBERS),
    "metrics": Expected("an object of states", lambda value: read_states(value) is not None),
    "callbacks": array_of("objects of 'class' and 'state'", _is_state),
}
