"""What a row of training data is: a sequence, two answers, or a source and its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ortops._common.arguments import choice
from ortops.errors import ArgumentError, FeedError, UnsupportedError
from ortops.llm.examples import (
    FORMS,
    IGNORED,
    PADDING,
    TRAIN_ON,
    Example,
    Reading,
    Units,
    answer,
    batch_of,
    chat,
    errors_of,
    example_of,
    is_chat,
    length_of,
    messages_in,
    template_settings,
    tokens_of,
    whole_chat,
    with_system,
)
from ortops.llm.folder import Folder
from ortops.llm.row_files import NAMES, Columns, FileRows, Rows, check_columns, prepared, rows_of
from ortops.llm.sequence_pairs import FORMS as FORMS_OF_PAIRS
from ortops.llm.sequence_pairs import Array, Pair, pair_feeds, prefix_of, read_pair
from ortops.llm.several_files import SeveralFiles
from ortops.llm.tokenization import Tokenizer

ANSWERS = ("chosen", "rejected")

NO_ROWS = "data: there are no rows; give at least one"

_HELD = 2**22
"""The tokens of files that are held in memory."""


class RowKind(ABC):
    """Reads rows of a kind, makes batches of them, and shows them.

    Args:
        folder: The folder.
        tokenizer: Returns the tokenizer.
        words: The size of the vocabulary, if it is known.

    Attributes:
        needs_one: What needs this kind, as messages call it; empty if a row is one sequence.
        forms: What a row must have, as messages say it.
    """

    needs_one = ""
    forms = FORMS

    def __init__(
        self, folder: Folder, tokenizer: Callable[[], Tokenizer], words: int | None
    ) -> None:
        self.folder, self.tokenizer, self.words = folder, tokenizer, words
        self.said = set[str]()

    def probe(self, tokens: Sequence[int]) -> dict[str, Array]:
        """Returns the feeds of a row of tokens."""
        return batch_of([example_of(tokens, [True] * len(tokens))])

    def read(self, data: Rows, *settings: Any) -> Units:
        """Reads the rows of a data set; see `ortops.llm.FineTuning.fit`.

        Those of large files are not held in memory, but read again when they are needed.

        Args:
            data: The data set.
            *settings: ``max_length``, ``train_on``, and ``columns`` if they have other names.

        Raises:
            FeedError: If a row has another form, or no row has a token to train.
        """
        reading, rows = self._reading(*settings), rows_of(data)
        held: list[Any] | None = []
        numbers, lengths, size = array("q"), array("q"), 0  # of the row of each unit, its tokens
        for number, units in enumerate(self._units(rows, reading)):
            numbers.extend([number] * len(units))
            lengths.extend(map(length_of, units))
            size += sum(lengths[len(lengths) - len(units) :])
            if held is not None:
                held += units
            if isinstance(rows, FileRows) and size > _HELD:
                held = None
        reading.tell(self.said)
        if not lengths and not reading.rows:
            raise FeedError(NO_ROWS)
        if not lengths:
            raise FeedError(
                f"data: no row has a token to train with train_on='{reading.train_on}' and "
                f"max_length={reading.max_length}; give other rows, or change these arguments"
            )
        places = np.array(numbers)

        def again(place: int) -> Any:
            assert isinstance(rows, FileRows)
            row = int(places[place])
            units = next(self._units([rows[row]], reading, row + 1))
            return units[place - int(np.searchsorted(places, row))]

        read = again if held is None else held.__getitem__
        return Units(read, places, np.array(lengths))

    def stream(self, data: Iterable[Any], *settings: Any) -> Iterator[Any]:
        """Yields the rows of a data set of any length, one after another; see `read`."""
        reading = self._reading(*settings)
        for units in self._units(data, reading):
            yield from units
        reading.tell(self.said)

    def _reading(self, max_length: int, train_on: str, columns: Columns = None) -> Reading:
        if self.needs_one and train_on != TRAIN_ON[0]:
            raise ArgumentError(
                f"train_on must be left out for {self.needs_one}, whose rows say what is trained, "
                f"got '{train_on}'"
            )
        check_columns(columns)
        return Reading(self.tokenizer, train_on, max_length, self.words, columns)

    def _units(self, rows: Iterable[Any], reading: Reading, first: int = 1) -> Iterator[list[Any]]:
        """Yields what each row is for a training: nothing, or one unit or several."""
        for number, row in enumerate(rows, first):
            reading.rows = number
            found = prepared(row, reading.columns)
            if isinstance(found, Mapping):
                reading.unread |= {name for name in found if name not in NAMES}
            with errors_of(f"data: row {number}", found, self.forms):
                units = self.units(found, reading, number)
            yield units

    @abstractmethod
    def units(self, row: Any, reading: Reading, number: int) -> list[Any]:
        """Returns what a row is for a training.

        Args:
            row: The row.
            reading: How rows are read.
            number: Its number, from 1.
        """

    @abstractmethod
    def batch(self, rows: Sequence[Any], padding: str) -> dict[str, Array]:
        """Returns the arrays of a batch."""

    @abstractmethod
    def show(self, rows: Sequence[Any]) -> str:
        """Returns rows as text, with marks around the tokens that are trained."""

    def check(self, padding: str, *, group_by_length: bool) -> None:
        """Rejects arguments that do not fit."""
        choice("padding", padding, PADDING)

    def refuse(self, argument: str) -> None:
        """Rejects an argument that needs rows that are one sequence each.

        Raises:
            ArgumentError: If they are not.
        """
        if self.needs_one:
            raise ArgumentError(f"{argument} must be False for {self.needs_one}, got True")


class Sequences(RowKind):
    """Rows that are one sequence of tokens each: a text, or a chat."""

    def units(self, row: Any, reading: Reading, number: int) -> list[Any]:
        """See `RowKind`."""
        if _is_preference(row):
            raise FeedError("data: rows with chosen and rejected need loss='DPO' (--loss DPO)")
        return [(each,) for each in reading.examples(row)]

    def batch(self, rows: Sequence[tuple[Example, ...]], padding: str) -> dict[str, Array]:
        """See `RowKind`."""
        return batch_of([each for row in rows for each in row], padding)

    def show(self, rows: Sequence[tuple[Example, ...]]) -> str:
        """See `RowKind`."""
        lines = []
        for number, row in enumerate(rows, 1):
            for example in row:
                trained = int(example.trained[1:].sum())
                lines.append(f"row {number}: {len(example.tokens)} tokens, {trained} trained")
                lines.append(self._marked(example))
        return "\n".join(lines)

    def _marked(self, example: Example) -> str:
        """Returns tokens as text, with « and » around what is trained, and nowhere else."""
        changes = np.flatnonzero(np.diff(example.trained)) + 1
        text = ""
        for part in np.split(np.arange(len(example.tokens)), changes):
            trained = bool(example.trained[part[0]])
            tokens = (example.labels if trained else example.tokens)[part].tolist()
            if self.folder.has_tokenizer:
                shown = self.tokenizer().text(tokens, special=True)
                shown = shown.replace("«", "\\xab").replace("»", "\\xbb")
            else:
                shown = " ".join(map(str, tokens)) + " "
            text += f"«{shown}»" if trained else shown
        return text


class Comparisons(Sequences):
    """Rows with ``prompt``, ``chosen`` and ``rejected``: texts, chats, or tokens.

    Without ``prompt``, it is what both answers begin with, texts or chats.
    """

    needs_one = "DPO"
    forms = "have prompt, chosen and rejected"

    def units(self, row: Any, reading: Reading, number: int) -> list[Any]:
        """See `RowKind`."""
        if not _is_preference(row):
            raise FeedError("data: for DPO, each row must have chosen and rejected")
        pair = tuple(self._answers(row))
        length = length_of(pair)
        if length > reading.max_length:  # a truncated answer would lose what makes it better
            raise FeedError(
                f"data: row {number} has {length} tokens, but max_length is "
                f"{reading.max_length}; increase max_length, or leave the row out"
            )
        if not all(each.trained[1:].any() for each in pair):
            raise FeedError(f"data: row {number} has an empty answer; leave the row out")
        return [pair]

    def _answers(self, row: Mapping[str, Any]) -> Iterator[Example]:
        """Yields the answers with their prompt, of which only the answers are trained."""
        prompt, replies = row.get("prompt", []), [row[name] for name in ANSWERS]
        if is_chat(prompt) or any(map(is_chat, replies)):
            before = messages_in(prompt)
            chats = [with_system(row, whole_chat(before, reply)) for reply in replies]
            shared = min(_shared(chats), *(len(each) - 1 for each in chats))
            for messages in chats:
                yield self._reply(messages, shared, template_settings(row))
        elif any(isinstance(reply, str) for reply in replies):
            if "prompt" not in row:
                prompt, replies = _split(replies)
            yield from (answer(prompt, reply, self.tokenizer()) for reply in replies)
        else:
            for reply in replies:
                tokens = [*tokens_of(prompt, self.words), *tokens_of(reply, self.words)]
                yield example_of(tokens, [place >= len(prompt) for place in range(len(tokens))])

    def _reply(
        self, messages: Sequence[Mapping[str, Any]], shared: int, more: Mapping[str, Any]
    ) -> Example:
        """Returns a chat, of which the replies behind the shared messages are trained."""
        before = [{**each, "weight": 0} for each in messages[:shared]]
        found, *others = chat([*before, *messages[shared:]], self.tokenizer(), TRAIN_ON[0], more)[0]
        if others:
            raise ValueError(
                "the chats differ before their last reply, and the template changes earlier ones; "
                "leave out what follows the first reply that differs"
            )
        return found


def _shared(answers: Sequence[Sequence[Any]]) -> int:
    """Returns how much two answers have in common at their beginning."""
    differ = (n for n, (one, other) in enumerate(zip(*answers, strict=False)) if one != other)
    return next(differ, min(map(len, answers)))


def _split(answers: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the prompt that two texts begin with, and what follows it, as in TRL.

    Raises:
        ValueError: If they do not begin with the same text.
    """
    shared = _shared(answers)
    shared -= answers[0][:shared].endswith(" ")  # a token usually begins with the space before it
    if not shared:
        raise ValueError("texts without prompt must begin with the same text, their prompt")
    return answers[0][:shared], [each[shared:] for each in answers]


class SequencePairs(RowKind):
    """Rows with what an encoder reads, and what a decoder writes.

    Args:
        files: The files of the model.
        settings: See `RowKind`.
    """

    needs_one = "a model with an encoder"
    forms = FORMS_OF_PAIRS

    def __init__(self, files: SeveralFiles, *settings: Any) -> None:
        super().__init__(*settings)
        self._inputs = files.inputs

    def units(self, row: Any, reading: Reading, number: int) -> list[Any]:
        """See `RowKind`."""
        settings = (self.tokenizer, self.folder, self.words)
        source, labels = read_pair(row, *settings)
        prefix = prefix_of(row.get("decoder_prefix", ()), *settings)
        limit = self.folder.config.get("max_target_positions")
        longest = min(reading.max_length, limit) if isinstance(limit, int) else reading.max_length
        rest = max(0, longest - len(prefix))
        is_long = source.ndim == 1 and len(source) > reading.max_length
        reading.met["cut"] += is_long or len(labels) > rest
        pair = Pair(source[: reading.max_length] if is_long else source, labels[:rest], prefix)
        if not len(source) or not (pair.labels != IGNORED).any():
            raise FeedError(f"data: row {number} has no token to train; leave it out")
        return [pair]

    def batch(self, rows: Sequence[Any], padding: str) -> dict[str, Array]:
        """See `RowKind`."""
        return pair_feeds(rows, self.folder, self._inputs)

    def show(self, rows: Sequence[Any]) -> str:
        """See `RowKind`."""
        raise UnsupportedError("show: models with an encoder are not supported")

    def check(self, padding: str, *, group_by_length: bool) -> None:
        """See `RowKind`."""
        super().check(padding, group_by_length=group_by_length)
        if group_by_length or padding != "right":
            raise ArgumentError(
                f"group_by_length must be False and padding 'right' for {self.needs_one}, "
                f"got {group_by_length} and {padding!r}"
            )


def _is_preference(row: Any) -> bool:
    """Whether a row has a chosen and a rejected answer."""
    return isinstance(row, Mapping) and set(ANSWERS) <= set(row)
