"""What a row of training data is: a sequence, two answers, or a source and its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortops._common.arguments import choice
from ortops.errors import ArgumentError, FeedError, UnsupportedError
from ortops.llm.examples import (
    IGNORED,
    PADDING,
    Example,
    Rows,
    answer,
    batch_of,
    chat,
    errors_of,
    example_of,
    note,
    read_examples,
    rows_of,
    tokens_of,
)
from ortops.llm.folder import Folder
from ortops.llm.sequence_pairs import FORMS, Array, Pair, pair_feeds, prefix_of, read_pair
from ortops.llm.several_files import SeveralFiles
from ortops.llm.tokenization import Tokenizer

ANSWERS = ("chosen", "rejected")


class RowKind(ABC):
    """Reads rows of a kind, makes batches of them, and shows them.

    Args:
        folder: The folder.
        tokenizer: Returns the tokenizer.
        words: The size of the vocabulary, if it is known.

    Attributes:
        needs_one: What needs this kind, as messages call it; empty if a row is one sequence.
    """

    needs_one = ""

    def __init__(
        self, folder: Folder, tokenizer: Callable[[], Tokenizer], words: int | None
    ) -> None:
        self.folder, self.tokenizer, self.words = folder, tokenizer, words
        self.said = set[str]()

    @abstractmethod
    def read(self, data: Rows, max_length: int, train_on: str) -> Sequence[Any]:
        """Reads the rows of a data set; see `ortops.llm.FineTuning.fit`."""

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

    def read(self, data: Rows, max_length: int, train_on: str) -> Sequence[tuple[Example, ...]]:
        """See `RowKind`."""
        rows = list(rows_of(data))
        if any(map(_is_preference, rows)):
            raise FeedError("data: rows with chosen and rejected need loss=ortops.losses.DPO()")
        settings = (train_on, max_length, self.words, self.said)
        return [(each,) for each in read_examples(rows, self.tokenizer, *settings)]

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

    Without ``prompt``, the answers are whole chats, which end with the reply.
    """

    needs_one = "DPO"

    def read(self, data: Rows, max_length: int, train_on: str) -> Sequence[tuple[Example, ...]]:
        """See `RowKind`."""
        found = []
        rows = list(rows_of(data))
        if not all(map(_is_preference, rows)):
            raise FeedError("data: for DPO, each row must have chosen and rejected")
        for number, row in enumerate(rows, 1):
            with errors_of(f"data: row {number}", row, "have prompt, chosen and rejected"):
                pair = tuple(self._answer(row, name) for name in ANSWERS)
            length = max(len(each.tokens) for each in pair)
            if length > max_length:  # a truncated answer would lose what makes it better or worse
                raise FeedError(
                    f"data: row {number} has {length} tokens, but max_length is {max_length}; "
                    "increase max_length, or leave the row out"
                )
            if not all(each.trained[1:].any() for each in pair):
                raise FeedError(f"data: row {number} has an empty answer; leave the row out")
            found.append(pair)
        if not found:
            raise FeedError("data has no rows; give at least one")
        return found

    def _answer(self, row: Mapping[str, Any], name: str) -> Example:
        """Returns an answer with its prompt, of which only the answer is trained."""
        prompt, reply = row.get("prompt", []), row[name]
        if isinstance(reply, str):
            return answer(row["prompt"], reply, self.tokenizer())
        if _is_chat(reply):
            messages = [*(prompt if _is_chat(prompt) else _said(prompt)), *reply]
            return chat(messages, self.tokenizer(), "completion")[0]
        tokens = [*tokens_of(prompt, self.words), *tokens_of(reply, self.words)]
        return example_of(tokens, [place >= len(prompt) for place in range(len(tokens))])


class SequencePairs(RowKind):
    """Rows with what an encoder reads, and what a decoder writes.

    Args:
        files: The files of the model.
        settings: See `RowKind`.
    """

    needs_one = "a model with an encoder"

    def __init__(self, files: SeveralFiles, *settings: Any) -> None:
        super().__init__(*settings)
        self._inputs = files.inputs

    def read(self, data: Rows, max_length: int, train_on: str) -> Sequence[Any]:
        """See `RowKind`."""
        found, cut = list[Pair](), 0
        limit = self.folder.config.get("max_target_positions")
        longest = min(max_length, limit) if isinstance(limit, int) else max_length
        settings = (self.tokenizer, self.folder, self.words)
        for number, row in enumerate(rows_of(data), 1):
            with errors_of(f"data: row {number}", row, FORMS):
                source, labels = read_pair(row, *settings)
                prefix = prefix_of(row.get("decoder_prefix", ()), *settings)
            is_long = source.ndim == 1 and len(source) > max_length
            rest = max(0, longest - len(prefix))
            cut += is_long or len(labels) > rest
            found.append(Pair(source[:max_length] if is_long else source, labels[:rest], prefix))
            if not len(source) or not (found[-1].labels != IGNORED).any():
                raise FeedError(f"data: row {number} has no token to train; leave it out")
        note(self.said, "%d rows were truncated to max_length=%d tokens", cut, longest)
        if not found:
            raise FeedError("data: there are no rows")
        return found

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


def _said(prompt: Any) -> list[dict[str, str]]:
    """Returns a prompt in front of a reply that is a chat as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _is_chat(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
