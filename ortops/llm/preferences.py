"""Training data of preference losses: pairs of a chosen and a rejected answer to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ortops.errors import FeedError
from ortops.llm.examples import Example, Rows, answer, chat, example_of, rows_of
from ortops.llm.tokenization import Tokenizer

__all__ = ["ANSWERS", "Pair", "is_preference", "read_pairs"]

ANSWERS = ("chosen", "rejected")

Pair: TypeAlias = tuple[Example, Example]
"""The chosen answer, then the rejected one, each with its prompt."""


def is_preference(row: Any) -> bool:
    """Whether a row has a chosen and a rejected answer."""
    return isinstance(row, Mapping) and set(ANSWERS) <= set(row)


def read_pairs(rows: Rows, tokenizer: Callable[[], Tokenizer], *, max_length: int) -> list[Pair]:
    """Reads the rows of a data set.

    Args:
        rows: Rows with ``prompt``, ``chosen`` and ``rejected``: texts, chats, or tokens. Without
            ``prompt``, the answers are whole chats, which end with the reply.
        tokenizer: Returns the tokenizer; not called for rows of tokens.
        max_length: The largest number of tokens of a prompt with its answer.

    Raises:
        FeedError: If a row has another form, or is longer than ``max_length``.
    """
    found = []
    for number, row in enumerate(rows_of(rows), 1):
        try:
            pair = tuple(_answer(row, name, tokenizer) for name in ANSWERS)
        except (KeyError, TypeError, ValueError) as error:
            raise FeedError(
                f"data: row {number} must have prompt, chosen and rejected, got {row!r:.80} "
                f"({error})"
            ) from error
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


def _answer(row: Mapping[str, Any], name: str, tokenizer: Callable[[], Tokenizer]) -> Example:
    """Returns an answer with its prompt, of which only the answer is trained."""
    prompt, reply = row.get("prompt", []), row[name]
    if isinstance(reply, str):
        return example_of(*answer(row["prompt"], reply, tokenizer()))
    if _is_chat(reply):
        messages = [*(prompt if _is_chat(prompt) else _said(prompt)), *reply]
        return example_of(*chat(messages, tokenizer(), "completion"))
    tokens = [*map(int, prompt), *map(int, reply)]
    return example_of(tokens, [place >= len(prompt) for place in range(len(tokens))])


def _said(prompt: Any) -> list[dict[str, str]]:
    """Returns a prompt in front of a reply that is a chat as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _is_chat(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
