"""Rows of text encoders: texts with a label, pairs with a score, and texts with their answers."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops._common.numbers import real
from ortops.errors import ArgumentError, FeedError
from ortops.llm.encoders import PLACES, Encoder, is_lowered, longest_of
from ortops.llm.examples import Reading
from ortops.llm.row_files import Columns, Rows, prepared, rows_of
from ortops.llm.row_kinds import NO_ROWS, RowKind
from ortops.llm.sequence_pairs import padded

FIRST = ("text", "sentence", "sentence1", "anchor", "query", "question", "premise")
SECOND = ("text_pair", "sentence2", "positive", "answer", "hypothesis")
"""The names of the columns with texts."""
_TYPES = "token_type_ids"

_FRACTION = re.compile(r"[+-]?\d*\.\d*[1-9]\d*")
"""A number that is not whole, as text, which a CSV file has."""


@dataclass(frozen=True)
class Text:
    """A text, or two that are read together.

    Attributes:
        tokens: The tokens.
        types: Of each token, the number of its text.
        target: The class or the score of the row.
    """

    tokens: list[int]
    types: list[int]
    target: float = 0


class Texts(RowKind):
    """Rows with one or several texts.

    Args:
        encoder: What is trained.
        settings: See `RowKind`.
    """

    needs_one = "a text encoder"

    def __init__(self, encoder: Encoder, *settings: Any) -> None:
        super().__init__(*settings)
        self._encoder, self._longest = encoder, longest_of(self.folder)
        self._is_lowered = bool(encoder.compares) and is_lowered(self.folder)
        self._classes = {name: number for number, name in enumerate(encoder.labels)}
        wanted = ["text (or sentence1)", "optionally text_pair (or sentence2)", "label"]
        if encoder.compares:
            wanted = ["anchor", "positive", *["negative"] * (encoder.compares == 3)]
        if encoder.has_scores:
            wanted = ["sentence1", "sentence2", "score"]
        self.forms = f"have {', '.join(wanted)}"

    def units(self, row: Any, reading: Reading, number: int) -> list[Any]:
        """See `RowKind`."""
        if not isinstance(row, Mapping):
            raise TypeError(f"a row must be a dict, got {type(row).__name__}")
        first, second = _text(row, FIRST), _text(row, SECOND)
        if first is None:
            raise KeyError(FIRST[0])
        if not self._encoder.compares:
            texts: list[Any] = [[first] if second is None else [first, second]]
        else:
            negative = _text(row, ("negative",))
            needed = {"positive": second, "negative": negative}
            for name, text in list(needed.items())[: self._encoder.compares - 1]:
                if text is None:
                    raise KeyError(name)
            texts = [[text] for text in (first, second, negative) if text is not None]
            texts = texts[: 2 if self._encoder.has_scores else None]
        target = self._target(row, number)
        found = []
        for each in texts:
            each = [text.lower() for text in each] if self._is_lowered else each
            longest = min(reading.max_length, self._longest)
            tokens, types, is_cut = self.tokenizer().encoded(each, longest)
            reading.met["cut"] += is_cut
            found.append(Text(tokens, types, target))
        return [tuple(found)]

    def probe(self, tokens: Sequence[int]) -> dict[str, npt.NDArray[Any]]:
        """See `RowKind`."""
        return self.batch([(Text(list(tokens), [0] * len(tokens)),)], "right")

    def _target(self, row: Mapping[str, Any], number: int) -> float:
        """Returns the class or the score of a row."""
        if self._encoder.has_scores:
            score = float(row["label" if "label" in row and "score" not in row else "score"])
            if not -1 <= score <= 1:
                remedy = "divide the scores by the largest one"
                remedy = remedy if math.isfinite(score) else "leave the row out"
                raise FeedError(
                    f"data: row {number}: score must be a similarity from -1 to 1, got {score:g}; "
                    f"{remedy}"
                )
            return score
        if not self._encoder.compares:
            return self._class(row["label"], number)
        for name in ("score", "label"):
            if name in row:
                raise FeedError(
                    f"data: row {number}: {name} must be left out, as each positive is taken as "
                    f"the answer to its anchor, got {row[name]!r:.40}; use task='pairs', or give "
                    "columns="
                )
        return 0

    def _class(self, label: Any, number: int) -> int:
        """Returns the number of a class, by its name, or by itself if names are no numbers."""
        name = label_name(label, number)
        if name in self._classes:
            return self._classes[name]
        known = None if any(each[:1].isdigit() for each in self._classes) else _number(name)
        if known is not None and 0 <= known < len(self._classes):
            return known
        raise FeedError(
            f"data: row {number}: label must be one of "
            f"{', '.join(map(repr, self._encoder.labels))}, got {label!r:.80}; give labels= with "
            "all classes"
        )

    def batch(self, rows: Sequence[Any], padding: str) -> dict[str, npt.NDArray[Any]]:
        """See `RowKind`."""
        texts = [text for row in rows for text in row]
        ids = padded([text.tokens for text in texts], self.folder.pad)
        mask = padded([[1] * len(text.tokens) for text in texts], 0)
        types = padded([text.types for text in texts], 0)
        feeds = {"input_ids": ids, "attention_mask": mask, _TYPES: types}
        feeds["position_ids"] = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        targets = [row[0].target for row in rows]
        if not self._encoder.compares:
            return feeds | {"labels": np.array(targets, np.int64)}
        starts = np.cumsum([0, *(len(row) for row in rows)])[:-1]
        spans = [range(at + 2, at + len(row)) for row, at in zip(rows, starts, strict=True)]
        second, third = starts + 1, np.array([*itertools.chain(*spans)], np.int64)
        if self._encoder.compares == 2 and not self._encoder.has_scores:
            second = np.concatenate([second, third])  # other answers are candidates, too
        places = dict(zip(PLACES, (starts, second, third), strict=True))
        return feeds | places | {"scores": np.array(targets, np.float32)}

    def show(self, rows: Sequence[Any]) -> str:
        """See `RowKind`."""
        lines = []
        for number, row in enumerate(rows, 1):
            target = "" if not self._encoder.labels else f" → {self._encoder.labels[row[0].target]}"
            target = f" → {row[0].target:g}" if self._encoder.has_scores else target
            texts = (self.tokenizer().text(text.tokens, special=True) for text in row)
            lines.append(f"row {number}: {' | '.join(texts)}{target}")
        return "\n".join(lines)

    def check(self, padding: str, *, group_by_length: bool) -> None:
        """See `RowKind`."""
        super().check(padding, group_by_length=group_by_length)
        if padding != "right":
            raise ArgumentError(f"padding must be 'right' for {self.needs_one}, got {padding!r}")


def labels_in(data: Rows, columns: Columns = None) -> list[str]:
    """Returns the names of the classes of rows: numbers in order, or else sorted texts.

    Raises:
        FeedError: If a row has none, all have the same, or one is a score.
    """
    found = dict[str, None]()
    for number, row in enumerate(rows_of(data), 1):
        row = prepared(row, columns)
        if not isinstance(row, Mapping) or "label" not in row:
            raise FeedError(f"data: row {number} must have label, got {row!r:.80}")
        found[label_name(row["label"], number)] = None
    if not found:
        raise FeedError(NO_ROWS)
    numbers = [_number(name) for name in found]
    if all(each is not None for each in numbers):
        names = sorted(found, key=lambda name: _number(name) or 0)
    else:
        names = sorted(found)
    if len(names) < 2:
        raise FeedError(f"data: rows must have at least 2 classes, got {names}")
    fractions = [name for name in names if _FRACTION.fullmatch(name)]
    if fractions:
        raise FeedError(
            f"data: label {fractions[0]} is a number with a fraction, not a class; give labels= "
            "with all classes if it is one, or train scores with task='pairs'"
        )
    return names


def label_name(label: Any, row: int) -> str:
    """Returns the name of a class: a text without spaces around it, or a number.

    Args:
        label: The text, or an integer or boolean, also as a float.
        row: The number of the row, from 1.

    Raises:
        FeedError: If it is something else.
    """
    if isinstance(label, str) and label.strip():
        return label.strip()
    if isinstance(label, bool | np.bool_):
        return str(label)
    whole = None if isinstance(label, str) else real(label)
    if whole is None or not math.isfinite(whole) or whole != int(whole):
        raise FeedError(
            f"data: row {row}: label must be a text that is not empty, an integer or a boolean, "
            f"got {label!r:.80}"
        )
    return str(int(whole))


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _text(row: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Returns the text of a row under one of several names."""
    name = next((name for name in names if name in row), None)
    if name is None:
        return None
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"'{name}' must be a text that is not empty")
    return str(row[name])
