"""How far a training is: what a call of `fit` has begun, kept beside the weights it belongs to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import onnx

from ortops.errors import ModelError, OrtopsError
from ortops.training.history import History
from ortops.training.notes import read_note, where

__all__ = ["POSITION_KEY", "Begun", "Call", "Place", "Position", "Standing", "read_position"]

POSITION_KEY = "ortops.fit"
"""Where a trainable model's ``metadata_props`` has the position, as JSON."""

_WHERE = where(POSITION_KEY)
_REMEDY = "what TrainingSession.save writes is accepted, or nothing: remove it"


@dataclass(frozen=True)
class Call:
    """What a call of `fit` was given that says which rows its steps see.

    Attributes:
        epochs: How many epochs it is to make.
        batch_size: Rows in a batch.
        shuffle: Whether rows are shuffled.
        seed: Determines their order.
        accumulate: How many batches make an update.
        rows: How many rows the data have, where that is known.
        batches: How many batches an epoch has, where that is known.
    """

    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    accumulate: int
    rows: int | None
    batches: int | None

    def check_same(self, given: Call) -> None:
        """Refuses to go on with other arguments.

        Raises:
            OrtopsError: If one differs; what is not known of the data is not compared.
        """
        for name, begun in asdict(self).items():
            now = getattr(given, name)
            data = name in ("rows", "batches")
            if begun == now or (data and None in (begun, now)):
                continue
            what = f"data of {begun} {name}" if data else f"{name}={begun}"
            raise OrtopsError(
                f"fit: resume=True goes on with a training that was begun with {what}, and {now} "
                f"{'are' if data else 'is'} given; give the same, or leave out resume=True to "
                "begin another one"
            )


class Place(NamedTuple):
    """What changes with every update.

    Attributes:
        batch: How many batches of the epoch are done.
        samples: How many rows they had.
        totals: For the loss and each of its parts the sum over these rows; empty before the first.
        rate: The learning rate of the last step, if it is one of a schedule.
        seconds: The time since the training began.
    """

    batch: int = 0
    samples: int = 0
    totals: tuple[float, ...] = ()
    rate: float | None = None
    seconds: float = 0.0


class Begun(NamedTuple):
    """What changes with every epoch.

    Attributes:
        call: What `fit` was given.
        epoch: The epoch, from 1; one more than there are when all is done.
        first_step: How many steps were made before it, which with the seed determines its order.
        history: The entries of the epochs before it.
        states: Returns the callbacks' classes and states.
    """

    call: Call
    epoch: int
    first_step: int
    history: History
    states: Callable[[], Sequence[Mapping[str, Any]]]


class Position(NamedTuple):
    """How far a training is, always at a whole update.

    Attributes:
        begun: What changes with every epoch.
        place: What changes with every update.
    """

    begun: Begun
    place: Place

    def text(self, steps: int) -> str:
        """Returns the position as JSON (numbers that are not finite as Python writes them).

        Args:
            steps: How many steps the session has made.

        Raises:
            OrtopsError: If the state of a callback has no JSON, or `read_position` would refuse
                what a callback has made of it or of the history.
        """
        begun = self.begun
        found = {
            **asdict(begun.call),
            "epoch": begun.epoch,
            "first_step": begun.first_step,
            **self.place._asdict(),
            "totals": list(self.place.totals),
            "steps": steps,
            "history": list(begun.history),
            "callbacks": list(begun.states()),
        }
        for name, (accepted, fits) in _FIELDS.items():
            if not fits(found[name]):
                raise OrtopsError(
                    f"save: '{name}' of fit is {found[name]!r:.200}, which could not be read "
                    f"again; {accepted} is accepted"
                )
        return _dumps(found)


def _dumps(found: dict[str, Any]) -> str:
    try:
        return json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise OrtopsError(
            f"callbacks: a state of one cannot be saved: {error}; return dicts, lists, texts, "
            "numbers of Python, true, false and None from `state`"
        ) from error


class Standing:
    """The position that belongs to the present state of a session.

    The state of a session changes by one store, that of how many steps were made, which nothing
    cuts in two. What the position is follows from that number, so that no moment lies between.

    Args:
        made: Returns how many steps were made.
    """

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        self._now: tuple[int, Position | None, Position | None] = (0, None, None)

    @property
    def position(self) -> Position | None:
        """The position; None where nothing was begun, or the session was reset since."""
        made, before, after = self._now
        now = self._made()
        return before if now == made else after if now > made else None

    def set(self, position: Position | None) -> None:
        """Sets the position of the present state."""
        self._now = (self._made(), position, position)

    def prepare(self, position: Position) -> None:
        """Says what the position will be when one more step is made."""
        self._now = (self._made(), self.position, position)


def read_position(proto: onnx.ModelProto) -> tuple[Position, int] | None:
    """Returns the position in a trainable model, and how many steps were made.

    Raises:
        ModelError: If it is not what `Position.text` writes.
    """
    found = read_note(proto, POSITION_KEY, _REMEDY)
    if found is None:
        return None
    for name, (accepted, fits) in _FIELDS.items():
        if name not in found or not fits(found[name]):
            shown = f"{found[name]!r:.80}" if name in found else "missing"
            raise ModelError(f"{_WHERE}: its '{name}' is {shown}; {accepted} is accepted")
    call = Call(**{field.name: found[field.name] for field in fields(Call)})
    states = found["callbacks"]
    history = History(found["history"])
    begun = Begun(call, found["epoch"], found["first_step"], history, lambda: states)
    place = Place(**{name: found[name] for name in Place._fields})
    return Position(begun, place._replace(totals=tuple(place.totals))), found["steps"]


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 2**63


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _are_numbers(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _is_row(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_state(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("class"), str)
        and isinstance(value.get("state"), dict)
    )


_COUNT = ("an integer >= 0", _is_count)
_POSITIVE = ("an integer >= 1", lambda value: _is_count(value, 1))
_KNOWN_COUNT = ("an integer >= 0 or null", lambda value: value is None or _is_count(value))

_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("epochs", "epoch", "batch_size", "accumulate"), _POSITIVE),
    **dict.fromkeys(("first_step", "batch", "samples", "steps"), _COUNT),
    "seed": ("an integer >= 0", lambda value: type(value) is int and value >= 0),
    **dict.fromkeys(("rows", "batches"), _KNOWN_COUNT),
    "shuffle": ("true or false", lambda value: isinstance(value, bool)),
    "totals": ("an array of numbers", _is_row),
    "rate": ("a number or null", lambda value: value is None or _is_number(value)),
    "seconds": ("a number >= 0", lambda value: _is_number(value) and 0 <= value < math.inf),
    "history": (
        "an array of objects of numbers",
        lambda value: isinstance(value, list) and all(map(_are_numbers, value)),
    ),
    "callbacks": (
        "an array of objects of 'class' and 'state'",
        lambda value: isinstance(value, list) and all(map(_is_state, value)),
    ),
}
