"""Training data of language models: rows of text or tokens become batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError
from ortops.graph.files.json_text import read_json
from ortops.llm.tokenization import Message, Tokenizer

__all__ = [
    "IGNORED",
    "TRAIN_ON",
    "Example",
    "Rows",
    "answer",
    "batch_of",
    "chat",
    "example_of",
    "read_examples",
    "rows_of",
]

IGNORED = -100
"""The label of a token that is not trained."""

TRAIN_ON = ("assistant", "completion", "all")

Array: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""The path of a file of JSON lines, or its rows."""

_FORMS = "messages, prompt and completion, text, or input_ids"

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Example:
    """A sequence of tokens.

    Attributes:
        tokens: The tokens.
        trained: Whether the loss counts each token.
    """

    tokens: Array
    trained: npt.NDArray[np.bool_]


def read_examples(
    rows: Rows, tokenizer: Callable[[], Tokenizer], *, train_on: str, max_length: int
) -> list[Example]:
    """Reads the rows of a data set; logs how many are truncated or left out.

    Args:
        rows: The rows (see `ortops.llm.FineTuning.fit`).
        tokenizer: Returns the tokenizer; not called for rows of tokens.
        train_on: Which tokens to train.
        max_length: The largest number of tokens of a row.

    Raises:
        FeedError: If a row has another form, or no row has a token to train.
    """
    found, cut, left = list[Example](), 0, 0
    for number, row in enumerate(rows_of(rows), 1):
        try:
            tokens, trained = _tokenized(row, tokenizer, train_on)
        except (KeyError, TypeError, ValueError) as error:
            raise FeedError(
                f"data: row {number} must have {_FORMS}, got {row!r:.80} ({error})"
            ) from error
        cut += len(tokens) > max_length
        example = example_of(tokens[:max_length], trained[:max_length])
        if example.trained[1:].any():  # nothing predicts the first token
            found.append(example)
        else:
            left += 1
    if cut:
        logger.warning("%d rows were truncated to max_length=%d tokens", cut, max_length)
    if left:
        logger.warning("%d rows were left out, as they have no token to train", left)
    if not found:
        raise FeedError(
            f"data: no row has a token to train with train_on='{train_on}' and "
            f"max_length={max_length}; give other rows, or change these arguments"
        )
    return found


def example_of(tokens: Sequence[int], trained: Sequence[bool]) -> Example:
    """Returns a sequence of tokens, and whether the loss counts each of them."""
    return Example(np.array(tokens, np.int64), np.array(trained, bool))


def batch_of(examples: Sequence[Example]) -> dict[str, Array]:
    """Returns input_ids, attention_mask, position_ids and labels [batch, time], padded at the end.

    Labels are not shifted: they are the tokens that the loss counts, and `IGNORED` elsewhere.
    """
    shape = len(examples), max(len(example.tokens) for example in examples)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    mask = np.zeros(shape, np.int64)
    for row, example in enumerate(examples):
        size = len(example.tokens)
        ids[row, :size], mask[row, :size] = example.tokens, 1
        labels[row, :size] = np.where(example.trained, example.tokens, IGNORED)
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": labels}


def rows_of(rows: Rows) -> Iterable[Any]:
    """Returns rows, or those of a file.

    Raises:
        FeedError: If they are neither, or the file is not valid.
    """
    if not isinstance(rows, str | os.PathLike):
        if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
            raise FeedError(
                f"data must be the path of a file of JSON lines, or rows, got {type(rows).__name__}"
            )
        return rows
    found = []
    with Path(rows).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found += [read_json(line)] if line.strip() else []
            except ValueError as error:
                raise FeedError(f"file '{rows}', line {number}: invalid JSON: {error}") from error
    return found


def _tokenized(
    row: Any, tokenizer: Callable[[], Tokenizer], train_on: str
) -> tuple[list[int], list[bool]]:
    if not isinstance(row, Mapping):
        return _whole([int(token) for token in row])
    if "input_ids" in row:
        tokens = [int(token) for token in row["input_ids"]]
        labels = row.get("labels", tokens)
        return tokens, [label != IGNORED for _, label in zip(tokens, labels, strict=True)]
    if "messages" in row:
        return chat(row["messages"], tokenizer(), train_on)
    if "completion" in row:
        return answer(row["prompt"], row["completion"], tokenizer(), whole=train_on == "all")
    text = row["text"]
    return _whole(tokenizer().tokens(text) + tokenizer().end)


def _whole(tokens: list[int]) -> tuple[list[int], list[bool]]:
    return tokens, [True] * len(tokens)


def answer(
    prompt: str, reply: str, tokenizer: Tokenizer, *, whole: bool = False
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a prompt and its answer, and which are those of the answer, or all."""
    before = tokenizer.tokens(prompt)
    after = tokenizer.tokens(reply, special=False) + tokenizer.end
    return before + after, [whole] * len(before) + [True] * len(after)


def chat(
    messages: Sequence[Message], tokenizer: Tokenizer, train_on: str
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a chat, and which of them are those of replies."""
    text = tokenizer.chat(messages)
    tokens, spans = tokenizer.spans(text)
    if train_on == "all":
        return _whole(tokens)
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [False] * len(tokens)
    for number in replies[-1:] if train_on == "completion" else replies:
        before = tokenizer.chat(messages[:number], begin_reply=True)
        after = tokenizer.chat(messages[: number + 1])
        if not (text.startswith(before) and text.startswith(after)):
            raise ValueError(
                "the chat template changes earlier messages, so the replies cannot be found; use "
                "train_on='all'"
            )
        for place, (first, end) in enumerate(spans):
            trained[place] |= len(before) <= first and end <= len(after) and end > first
    return tokens, trained
