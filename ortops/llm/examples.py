"""Training data of language models: rows of text or tokens become batches."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError
from ortops.graph.files.archive import check_size
from ortops.graph.files.json_text import read_json
from ortops.graph.files.opening import open_regular
from ortops.llm.tokenization import Message, Tokenizer
from ortops.optional import optional_module

__all__ = [
    "IGNORED",
    "PADDING",
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
"""The path of a file of JSON lines or Parquet, or its rows."""

PADDING = ("right", "left")

_FORMS = "messages, conversations, prompt and completion, text, or input_ids"

_SPEAKERS = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""The roles of messages, by the names that ShareGPT has for them."""

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Example:
    """A sequence of tokens.

    Attributes:
        tokens: The tokens.
        trained: Whether the loss counts each token.
        lengths: The lengths of the examples in a packed row; empty for one example.
    """

    tokens: Array
    trained: npt.NDArray[np.bool_]
    lengths: tuple[int, ...] = ()


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


def batch_of(examples: Sequence[Example], padding: str = "right") -> dict[str, Array]:
    """Returns input_ids, attention_mask, position_ids, labels and segments [batch, time].

    Segments are the numbers of the examples in a row, from 1, and 0 for padding. Shorter sequences
    are padded on the right or the left. Labels are not shifted: they are the tokens that the loss
    counts, and `IGNORED` elsewhere.
    """
    shape = len(examples), max(len(example.tokens) for example in examples)
    ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
    segments, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, example in enumerate(examples):
        size = len(example.tokens)
        place = slice(0, size) if padding == "right" else slice(shape[1] - size, None)
        lengths = example.lengths or (size,)
        ids[row, place] = example.tokens
        segments[row, place] = np.repeat(np.arange(len(lengths)) + 1, lengths)
        positions[row, place] = np.concatenate([np.arange(length) for length in lengths])
        if padding == "right":
            positions[row, size:] = lengths[-1] - 1
        labels[row, place] = np.where(example.trained, example.tokens, IGNORED)
        if padding == "left":
            labels[row, place.start] = IGNORED  # padding does not predict it
    return {
        "input_ids": ids,
        "attention_mask": np.minimum(segments, 1),
        "position_ids": positions,
        "labels": labels,
        "segments": segments,
    }


def rows_of(rows: Rows) -> Iterable[Any]:
    """Returns rows, or those of a file, without the columns that are empty in a row.

    Raises:
        FeedError: If they are neither, or the file is not valid.
    """
    if isinstance(rows, Mapping) or not isinstance(rows, str | os.PathLike | Iterable):
        parts = [f"data[{name!r}]" for name in rows] if isinstance(rows, Mapping) else []
        what = f"; give one of its parts: {', '.join(parts)}" if parts else ""
        raise FeedError(
            "data must be the path of a file of JSON lines or Parquet, or rows, got "
            f"{type(rows).__name__}{what}"
        )
    given = _of_file(rows) if isinstance(rows, str | os.PathLike) else rows
    return (_without_empty(row) for row in given)


def _without_empty(row: Any) -> Any:
    if not isinstance(row, Mapping):
        return row
    return {name: value for name, value in row.items() if value is not None}


def _of_file(rows: str | os.PathLike[str]) -> Iterable[Any]:
    """Returns the rows of a file."""
    if Path(rows).suffix == ".parquet":
        return _parquet(Path(rows))
    found = []
    with _opened(rows) as lines:
        check_size(f"file '{rows}'", os.fstat(lines.fileno()).st_size)
        for number, line in enumerate(lines, 1):
            try:
                found += [read_json(line)] if line.strip() else []
            except ValueError as error:
                raise FeedError(f"file '{rows}', line {number}: invalid JSON: {error}") from error
    return found


def _opened(rows: str | os.PathLike[str]) -> BinaryIO:
    return open_regular(rows, what="file", remedy="give a file of JSON lines or Parquet")


def _parquet(file: Path) -> Iterator[Any]:
    """Yields the rows of a file of Parquet."""
    parquet = optional_module(f"file '{file}'", "pyarrow.parquet", "tables")
    try:
        with _opened(file) as stream:
            for batch in parquet.ParquetFile(stream).iter_batches():
                yield from batch.to_pylist()
    except FeedError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's errors are kinds of these
        raise FeedError(f"file '{file}': invalid Parquet: {error}") from error


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
        return chat(_turns(row["messages"]), tokenizer(), train_on)
    if "conversations" in row:
        return chat(_share_gpt(_turns(row["conversations"])), tokenizer(), train_on)
    if "completion" in row:
        return answer(row["prompt"], row["completion"], tokenizer(), whole=train_on == "all")
    text = row["text"]
    return _whole(tokenizer().tokens(text) + tokenizer().end)


def _turns(given: Any) -> Sequence[Any]:
    """Returns the dicts of a chat; a Sequence of Hugging Face's datasets is a dict of lists."""
    if not isinstance(given, Mapping):
        return list(given)
    columns = zip(*given.values(), strict=True)
    return [dict(zip(given, values, strict=True)) for values in columns]


def _share_gpt(turns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Returns the messages of a chat in the form of ShareGPT: turns with ``from`` and ``value``."""
    for turn in turns:
        if turn["from"] not in _SPEAKERS:
            raise ValueError(f"'from' must be one of {', '.join(_SPEAKERS)}, got {turn['from']!r}")
    return [{"role": _SPEAKERS[turn["from"]], "content": turn["value"]} for turn in turns]


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
    if train_on == "all":
        return _whole(tokenizer.spans(tokenizer.chat(messages))[0])
    text, replies = tokenizer.replies(messages)
    count = sum(message["role"] == "assistant" for message in messages)
    if len(replies) < count and train_on == "assistant":
        logger.warning(
            "the chat template changes earlier replies: %d of %d replies of a chat are not trained",
            count - len(replies),
            count,
        )
    tokens, spans = tokenizer.spans(text)
    trained = [False] * len(tokens)
    for start, stop in replies[-1:] if train_on == "completion" else replies:
        for place, (first, end) in enumerate(spans):
            trained[place] |= start <= first and end <= stop and end > first
    return tokens, trained
