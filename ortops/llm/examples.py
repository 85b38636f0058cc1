"""Training data of language models: rows of text or tokens become batches."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.engine.training.arrow import open_arrow
from ortops.errors import FeedError, OrtopsError
from ortops.graph.files.archive import check_size
from ortops.graph.files.json_text import read_json
from ortops.graph.files.opening import open_regular
from ortops.llm.tokenization import Message, RefusedTextError, Tokenizer

IGNORED = -100
"""The label of a token that is not trained."""

TRAIN_ON = ("assistant", "completion", "all")

Array: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""The path of a file of JSON lines or Parquet, or its rows."""

PADDING = ("right", "left")

_AT_ONCE = 1024
"""The rows of a file of Parquet that become Python's values at once."""

_FORMS = "have messages, conversations, prompt and completion, text, or input_ids"

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
        labels: What is trained in the place of each token: the same token, another one, or
            `IGNORED`.
        lengths: The lengths of the examples in a packed row; empty for one example.
    """

    tokens: Array
    labels: Array
    lengths: tuple[int, ...] = ()

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Whether the loss counts each token."""
        return np.asarray(self.labels != IGNORED)


def read_examples(
    rows: Rows,
    tokenizer: Callable[[], Tokenizer],
    train_on: str,
    max_length: int,
    words: int | None = None,
    said: set[str] | None = None,
) -> list[Example]:
    """Reads the rows of a data set; logs how many are truncated or left out.

    Args:
        rows: The rows (see `ortops.llm.FineTuning.fit`).
        tokenizer: Returns the tokenizer; not called for rows of tokens.
        train_on: Which tokens to train.
        max_length: The largest number of tokens of a row.
        words: The size of the vocabulary, if it is known.
        said: What was warned of, see `note`.

    Raises:
        FeedError: If a row has another form, or no row has a token to train.
    """
    found, cut, left, lost = list[Example](), 0, 0, list[int]()
    for number, row in enumerate(rows_of(rows), 1):
        with errors_of(f"data: row {number}", row, _FORMS):
            example, missing = _tokenized(row, tokenizer, train_on, words)
        cut += len(example.tokens) > max_length
        lost += [missing] if missing else []
        example = Example(example.tokens[:max_length], example.labels[:max_length])
        if example.trained[1:].any():  # nothing predicts the first token
            found.append(example)
        else:
            left += 1
    said = set() if said is None else said
    note(said, "%d rows were truncated to max_length=%d tokens", cut, max_length)
    note(said, "%d rows were left out, as they have no token to train", left)
    text = "%d rows have replies that the chat template changes: %d replies are not trained"
    note(said, text, len(lost), sum(lost))
    if not found:
        raise FeedError(
            f"data: no row has a token to train with train_on='{train_on}' and "
            f"max_length={max_length}; give other rows, or change these arguments"
        )
    return found


def note(said: set[str], text: str, count: int, *more: int) -> None:
    """Warns of rows, if there are any: once for each text, and later for those who want details."""
    if count:
        logger.log(logging.INFO if text in said else logging.WARNING, text, count, *more)
        said.add(text)


@contextlib.contextmanager
def errors_of(
    what: str, given: Any, forms: str, kind: type[OrtopsError] = FeedError
) -> Iterator[None]:
    """Raises an error of a kind for what is wrong in a row, or a prompt."""
    try:
        yield
    except RefusedTextError as error:
        raise kind(f"{what}: {error}; correct it") from error
    except OrtopsError:  # of files
        raise
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise kind(f"{what} must {forms}, got {given!r:.80} ({error})") from error


def tokens_of(given: Any, words: int | None, *, labels: bool = False) -> list[int]:
    """Returns tokens that a user gives.

    Args:
        given: A sequence or array of integers.
        words: The size of the vocabulary, if it is known.
        labels: Whether `IGNORED` is among them.

    Raises:
        TypeError: If they are no integers.
        ValueError: If the vocabulary does not have one of them.
    """
    if isinstance(given, str | bytes | bytearray | Mapping | Set):
        raise TypeError(f"tokens must be a list of integers, got {type(given).__name__}")
    found = list(given.tolist() if hasattr(given, "tolist") else given)
    limit = words or 2**31
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TypeError(f"a token must be an integer, got {token!r:.40}")
        if not (0 <= token < limit or (labels and token == IGNORED)):
            what = f"a label must be {IGNORED} or" if labels else "a token must be"
            raise ValueError(f"{what} an integer >= 0 and < {limit}, got {token}")
    return [int(token) for token in found]


def example_of(tokens: Sequence[int], trained: Sequence[bool]) -> Example:
    """Returns a sequence of tokens, of which the loss counts those that are trained."""
    whole = np.array(tokens, np.int64)
    return Example(whole, np.where(np.array(trained, bool), whole, IGNORED))


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
        labels[row, place] = example.labels
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
    remedy = "give a file of JSON lines or Parquet"
    with open_regular(rows, what="file", remedy=remedy) as lines:
        check_size(f"file '{rows}'", os.fstat(lines.fileno()).st_size)
        for number, line in enumerate(lines, 1):
            try:
                found += [read_json(line)] if line.strip() else []
            except ValueError as error:
                raise FeedError(f"file '{rows}', line {number}: invalid JSON: {error}") from error
    return found


def _parquet(file: Path) -> Iterator[Any]:
    """Yields the rows of a file of Parquet."""
    rows = open_arrow(file)
    for begin in range(0, len(rows), _AT_ONCE):
        yield from rows.records(begin, begin + _AT_ONCE)


def _tokenized(
    row: Any, tokenizer: Callable[[], Tokenizer], train_on: str, words: int | None
) -> tuple[Example, int]:
    """Returns the tokens of a row, and the number of replies that are not trained."""
    if not isinstance(row, Mapping):
        return _whole(tokens_of(row, words)), 0
    if "input_ids" in row:
        tokens = tokens_of(row["input_ids"], words)
        labels = tokens_of(row.get("labels", tokens), words, labels=True)
        if len(labels) != len(tokens):
            raise ValueError(f"{len(tokens)} input_ids need as many labels, got {len(labels)}")
        return Example(np.array(tokens, np.int64), np.array(labels, np.int64)), 0
    if "messages" in row:
        return chat(_turns(row["messages"]), tokenizer(), train_on)
    if "conversations" in row:
        return chat(_share_gpt(_turns(row["conversations"])), tokenizer(), train_on)
    if "completion" in row:
        whole = train_on == "all"
        return answer(row["prompt"], row["completion"], tokenizer(), whole=whole), 0
    text = row["text"]
    return _whole(tokenizer().tokens(text) + tokenizer().end), 0


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


def _whole(tokens: list[int]) -> Example:
    return example_of(tokens, [True] * len(tokens))


def answer(prompt: str, reply: str, tokenizer: Tokenizer, *, whole: bool = False) -> Example:
    """Returns a prompt and its answer, of which the answer is trained, or all."""
    before = tokenizer.tokens(prompt)
    after = tokenizer.tokens(reply, special=False) + tokenizer.end
    return example_of(before + after, [whole] * len(before) + [True] * len(after))


def chat(messages: Sequence[Message], tokenizer: Tokenizer, train_on: str) -> tuple[Example, int]:
    """Returns a chat, of which replies are trained, and the number of those that are not found."""
    if train_on == "all":
        return _whole(tokenizer.tokens(tokenizer.chat(messages), special=False)), 0
    text, replies = tokenizer.replies(messages)
    count = sum(message["role"] == "assistant" for message in messages)
    missing = max(0, count - sum(start < stop for start, stop in replies))
    if train_on == "completion":
        replies, missing = replies[-1:], 0
    return example_of(*tokenizer.tokens_in(text, replies)), missing
