"""The results of the epochs of a training, as a list and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ortops._common.numbers import plain
from ortops.errors import OrtopsError

_TIMES = frozenset(("seconds",))


class Entries(list[dict[str, float]]):
    """Dicts of numbers, each of which is converted to text only once."""

    def __init__(self, entries: Iterable[dict[str, float]] = ()) -> None:
        super().__init__(entries)
        self._done: tuple[list[dict[str, float]], str] = ([], "")  # copies, and their JSON

    def as_json(self, count: int | None = None) -> str:
        """Returns the first entries as JSON objects, separated by commas.

        Args:
            count: The number of entries; all by default.

        Raises:
            OrtopsError: If an entry has something other than numbers, or numbers that JSON cannot
                hold.
        """
        copies, text = self._done
        entries = self[:count]
        if entries[: len(copies)] != copies:  # a callback has changed one, or removed it
            copies, text = [], ""
        rest = enumerate(entries[len(copies) :], len(copies) + 1)
        added = [plain_entry(entry, epoch) for epoch, entry in rest]
        if added:
            new = json.dumps(added)[1:-1]
            copies, text = [*copies, *added], f"{text}, {new}" if text else new
            self._done = copies, text
        return text


def plain_entry(entry: Mapping[str, Any], epoch: int) -> dict[str, float]:
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


class History(Entries):
    """A dict of numbers for each epoch.

    ``loss`` (and ``loss_<name>`` of each summand of a sum of losses) is the mean over the rows of
    the epoch, ``gradient_norm`` (where ``clip_norm`` computes it) the mean norm of all gradients of
    a step before it is limited, ``validation_<name>`` a result on the validation data,
    ``learning_rate`` that of the last step, ``steps`` the number of finished steps at the end of
    the epoch, and ``seconds`` its duration. Histories are equal if everything but ``seconds`` is.

    Args:
        entries: The epochs.
        validations: The results of ``fit(validate_every=…)``.

    Attributes:
        validations: A dict of ``epoch``, ``steps`` and ``validation_<name>`` for each validation
            within an epoch.

    Example:
        >>> history = History([{"loss": 2.0, "steps": 10}, {"loss": 0.5, "steps": 20}])
        >>> history.history["loss"]
        [2.0, 0.5]
        >>> print(history.table())
        epoch  loss  steps
            1     2     10
            2   0.5     20
    """

    def __init__(
        self,
        entries: Iterable[dict[str, float]] = (),
        validations: Iterable[dict[str, float]] = (),
    ) -> None:
        super().__init__(entries)
        self.validations = Entries(validations)

    def is_validated(self, epoch: int, steps: int) -> bool:
        """Whether there was a validation within an epoch after a number of steps."""
        last = self.validations[-1] if self.validations else {}
        return (last.get("epoch"), last.get("steps")) == (epoch, steps)

    def last_within(self, epoch: int) -> dict[str, float]:
        """Returns the results of the last validation within an epoch, if there was one."""
        last = self.validations[-1] if self.validations else {}
        if last.get("epoch") != epoch:
            return {}
        return {name: value for name, value in last.items() if name.startswith("validation_")}

    @property
    def history(self) -> dict[str, list[float]]:
        """A list of the numbers of all epochs for each name; NaN if an epoch has none."""
        names = dict.fromkeys(name for entry in self for name in entry)
        return {name: [entry.get(name, float("nan")) for entry in self] for name in names}

    def table(self) -> str:
        """Returns an aligned table with a line for each epoch."""
        rows = self._cells()
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def _repr_html_(self) -> str:
        """Returns the table for notebooks."""
        head, *body = self._cells()
        lines = [_line(head, "th"), *(_line(row, "td") for row in body)]
        return "<table>" + "".join(lines) + "</table>"

    def _cells(self) -> list[list[str]]:
        columns = self.history
        body = zip(*columns.values(), strict=True)
        return [
            ["epoch", *columns],
            *([str(n), *(_shown(value) for value in row)] for n, row in enumerate(body, 1)),
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list):
            return NotImplemented
        validations = other.validations if isinstance(other, History) else self.validations
        return _without_times(self) == _without_times(other) and self.validations == validations

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as that of a list


def _without_times(entries: Iterable[object]) -> list[object]:
    return [
        {name: value for name, value in entry.items() if name not in _TIMES}
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _line(cells: Iterable[str], kind: str) -> str:
    import html  # only here: notebooks ask for it

    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
