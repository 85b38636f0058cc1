"""Training data of preference losses: pairs of a chosen and a rejected answer to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ortops.errors import FeedError
from ortops.llm.examples import (
    Example,
    Rows,
    answer,
    chat,
    errors_of,
    example_of,
    rows_of,
    tokens_of,
)
from ortops.llm.tokenization import Tokenizer

ANSWERS = ("chosen", "rejected")

Pair: TypeAlias = tuple[Example, Example]
"""The chosen answer, then the rejected one, each with its prompt."""


def is_preference(row: Any) -> bool:
    """Whether a row has a chosen and a rejected answer."""
    return isinstance(row, Mapping) and set(ANSWERS) <= set(row)


def read_pairs(
    rows: Rows, tokenizer: Callable[[], Tokenizer], *, max_length: int, words: int | None = None
) -> list[Pair]:
    """Reads the rows of a data set.

    Args:
        rows: Rows with ``prompt``, ``chosen`` and ``rejected``: texts, chats, or tokens. Without
            ``prompt``, the answers are whole chats, which end with the reply.
        tokenizer: Returns the tokenizer; not called for rows of tokens.
        max_length: The largest number of tokens of a prompt with its answer.
        words: The size of the vocabulary, if it is known.

    Raises:
        FeedError: If a row has another form, or is longer than ``max_length``.
    """
    found = []
    for number, row in enumerate(rows_of(rows), 1):
        with errors_of(f"data: row {number}", row, "have prompt, chosen and rejected"):
            pair = tuple(_answer(row, name, tokenizer, words) for name in ANSWERS)
        length = max(len(each.tokens) for each in pair)
        if length > max_length:  # a truncated answer would lose what makes it better or worse
            raise FeedError(
                f"data: row {number} has {length} tokens, but max_length is {max_length}; increase "
                "max_length, or leave the row out"
            )
        if not all(each.trained[1:].any() for each in pair):
            raise FeedError(f"data: row {number} has an empty answer; leave the row out")
        found.append((pair[0], pair[1]))
    if not found:
        raise FeedError("data has no rows; give at least one")
    return found


def _answer(
    row: Mapping[str, Any], name: str, tokenizer: Callable[[], Tokenizer], words: int | None
) -> Example:
    """Returns an answer with its prompt, of which only the answer is trained."""
    prompt, reply = row.get("prompt", []), row[name]
    if isinstance(reply, str):
        return answer(row["prompt"], reply, tokenizer())
    if _is_chat(reply):
        messages = [*(prompt if _is_chat(prompt) else _said(prompt)), *reply]
        return chat(messages, tokenizer(), "completion")[0]
    tokens = [*tokens_of(prompt, words), *tokens_of(reply, words)]
    return example_of(tokens, [place >= len(prompt) for place in range(len(tokens))])


def _said(prompt: Any) -> list[dict[str, str]]:
    """Returns a prompt in front of a reply that is a chat as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _is_chat(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
