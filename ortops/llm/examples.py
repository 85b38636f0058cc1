"""Training data of language models: rows of text or tokens become batches."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError, OrtopsError
from ortops.graph.files.json_text import read_json
from ortops.llm.row_files import Columns
from ortops.llm.tokenization import Message, Names, RefusedTextError, Tokenizer

IGNORED = -100
"""The label of a token that is not trained."""

TRAIN_ON = ("assistant", "completion", "all")

Array: TypeAlias = npt.NDArray[np.int64]
PADDING = ("right", "left")

FORMS = (
    "have messages, conversations, prompt and completion, instruction and output, question and "
    "answer, text, or input_ids"
)

_SPEAKERS = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
"""The roles of messages, by the names that ShareGPT has for them."""

SEEN, _TRAINED = "attention_mask", ("completion_mask", "assistant_masks")
"""The masks of tokens that transformers and TRL make."""

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


class Units(Sequence[Any]):
    """What the rows of a data set are for a training.

    Args:
        read: Returns a unit by its number.
        rows: The number of the row that each unit is of.
        lengths: The number of tokens of each unit.
        places: The numbers of the units; by default all.

    Attributes:
        rows: The number of the row that each unit is of.
        lengths: The number of tokens of each unit.
    """

    def __init__(
        self, read: Callable[[int], Any], rows: Array, lengths: Array, places: Array | None = None
    ) -> None:
        self._all = read, rows, lengths
        self._places = np.arange(len(rows)) if places is None else places
        self.rows, self.lengths = rows[self._places], lengths[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        found = self._places[place].tolist()
        return (
            [self._all[0](each) for each in found]
            if isinstance(place, slice)
            else (self._all[0](found))
        )

    def take(self, places: Array) -> Units:
        """Returns units by their numbers among these."""
        return Units(*self._all, self._places[places])


def length_of(unit: Any) -> int:
    """Returns the number of tokens of the longest example of a unit, or the size of a pair."""
    if isinstance(unit, tuple):
        return max(len(each.tokens) for each in unit)
    return int(unit.source.size + unit.labels.size)


@dataclass
class Reading:
    """How rows are read, and what was met.

    Attributes:
        tokenizer: Returns the tokenizer; not called for rows of tokens.
        train_on: Which tokens to train.
        max_length: The largest number of tokens of a row.
        words: The size of the vocabulary, if it is known.
        columns: The columns of rows by our names, if they have others.
        met: How many rows or replies there are of each kind that the log tells of.
        opened: What precedes replies in prompts, but not in chats; empty if nothing does.
        rows: The number of the last row.
        unread: The columns of rows that mean nothing here.
    """

    tokenizer: Callable[[], Tokenizer]
    train_on: str
    max_length: int
    words: int | None = None
    columns: Columns = None
    met: Counter[str] = field(default_factory=Counter)
    opened: str = ""
    rows: int = 0
    unread: set[str] = field(default_factory=set)

    def examples(self, row: Any) -> list[Example]:
        """Returns the examples of a row that have a token to train: none, one, or several."""
        found, missing, opened = _tokenized(row, self.tokenizer, self.train_on, self.words)
        self.opened = self.opened or opened
        self.met["opened"] += bool(opened)
        self.met["changed"] += bool(missing)
        self.met["missing"] += missing
        self.met["own"] += len(found) - 1
        self.met["cut"] += sum(len(each.tokens) > self.max_length for each in found)
        found = [Example(e.tokens[: self.max_length], e.labels[: self.max_length]) for e in found]
        kept = [each for each in found if each.trained[1:].any()]  # nothing predicts the first
        self.met["left"] += len(found) - len(kept)
        is_chat = isinstance(row, Mapping) and bool({"messages", "conversations"} & {*row})
        self.met["silent"] += is_chat and not missing and not any(e.trained.any() for e in found)
        return kept

    def tell(self, said: set[str]) -> None:
        """Logs what was met; see `note`."""
        met = self.met
        note(said, "%d rows were truncated to max_length=%d tokens", met["cut"], self.max_length)
        note(said, "%d rows were left out, as they have no token to train", met["left"])
        text = "%d rows have no message of the role 'assistant', or only those of weight 0"
        note(said, text, met["silent"])
        text = "%d rows have replies that the chat template changes: %d replies are not trained"
        note(said, text, met["changed"] if met["missing"] else 0, met["missing"])
        text = "%d replies that the chat template changes in longer chats are rows of their own"
        note(said, text, met["own"])
        text = "%d rows have replies without %r, with which generation begins"
        note(said, text, met["opened"], self.opened)
        text = "%d columns of rows are not read: %s"
        note(said, text, len(self.unread), ", ".join(sorted(self.unread)))


def note(said: set[str], text: str, count: int, *more: object) -> None:
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
        is_name = isinstance(error, KeyError) and kind is FeedError
        why = f"it has no {error}; if it has another name, give columns=" if is_name else error
        raise kind(f"{what} must {forms}, got {given!r:.80} ({why})") from error


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


def _tokenized(
    row: Any, tokenizer: Callable[[], Tokenizer], train_on: str, words: int | None
) -> tuple[list[Example], int, str]:
    """Returns the examples of a row, and what `chat` returns beside them."""
    if not isinstance(row, Mapping):
        return [_whole(tokens_of(row, words))], 0, ""
    if "input_ids" in row:
        tokens = tokens_of(row["input_ids"], words)
        given = {"labels": tokens_of(row.get("labels", tokens), words, labels=True)}
        given |= {name: tokens_of(row[name], 2) for name in (SEEN, *_TRAINED) if name in row}
        for name, each in given.items():
            if len(each) != len(tokens):
                raise ValueError(f"{len(tokens)} input_ids need as many {name}, got {len(each)}")
        masks = {name: np.array(each, bool) for name, each in given.items() if name != "labels"}
        labels = np.array(given["labels"], np.int64)
        for name in masks.keys() - {SEEN}:
            labels[~masks[name]] = IGNORED
        seen = masks.get(SEEN, np.ones(len(tokens), bool))  # no padding
        return [Example(np.array(tokens, np.int64)[seen], labels[seen])], 0, ""
    messages = _messages_of(row, tokenizer)
    if messages is not None:
        return chat(messages, tokenizer(), train_on, template_settings(row))
    row = as_prompt(row)
    if "completion" in row:
        whole = train_on == "all"
        return [answer(row["prompt"], row["completion"], tokenizer(), whole=whole)], 0, ""
    text = row["text"]
    return [_whole(tokenizer().tokens(text, end=False) + tokenizer().end)], 0, ""


def _messages_of(
    row: Mapping[str, Any], tokenizer: Callable[[], Tokenizer]
) -> list[Message] | None:
    """Returns the messages of a row; None if it is no chat."""
    for name in ("messages", "conversations"):
        if name in row:
            return with_system(row, _share_gpt(turns_of(row[name])))
    given, reply = row.get("prompt"), row.get("completion")
    if is_chat(reply) or (is_chat(given) and isinstance(reply, str)):
        before = [{**each, "weight": 0} for each in messages_in(row["prompt"])]
        return with_system(row, whole_chat(before, reply))
    pair = as_prompt(row)
    if pair is row or not tokenizer().has_template:
        return None
    return with_system(row, [*messages_in(pair["prompt"]), *reply_in(pair["completion"])])


def with_system(row: Mapping[str, Any], messages: Sequence[Message]) -> list[Message]:
    """Returns the messages of a row, with the system's that it may have beside them."""
    found, roles = row.get("system"), [each.get("role") for each in messages[:1]]
    if not found or roles[:1] == ["system"]:
        return list(messages)
    if not isinstance(found, str):
        raise TypeError(f"system must be a text, got {found!r:.80}")
    return [{"role": "system", "content": found}, *messages]


def as_prompt(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a row of Alpaca, or with question and answer, as one of prompt and completion."""
    if "instruction" in row and "output" in row:
        if row.get("history"):
            raise ValueError("history is not read; give the whole chat as messages")
        prompt = "\n\n".join(filter(None, [row["instruction"], row.get("input")]))
        return {"prompt": prompt, "completion": row["output"]}
    if "question" in row and "answer" in row:
        return {"prompt": row["question"], "completion": row["answer"]}
    return row


def template_settings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a row has for the chat template beside the messages."""
    found = {name: row[name] for name in ("tools", "documents") if name in row}
    more = row.get("chat_template_kwargs", {})
    if not isinstance(more, Mapping) or {"messages", "add_generation_prompt"} & set(more):
        raise ValueError("chat_template_kwargs must be names of the template and their values")
    for name, value in found.items():
        rows = [*(read_json(value) if isinstance(value, str) else value)]
        if not all(isinstance(each, Mapping) for each in rows):
            raise TypeError(f"{name} must be a list of dicts, got {value!r:.80}")
        found[name] = [dict(each) for each in rows]
    return found | {name: value for name, value in more.items() if value is not None}


def turns_of(given: Any) -> Sequence[Any]:
    """Returns the dicts of a chat, which may be JSON, one dict, or a dict of lists.

    A Sequence of Hugging Face's datasets is a dict of lists.
    """
    given = read_json(given) if isinstance(given, str) else given
    if isinstance(given, Mapping) and isinstance(given.get("role"), str):
        return [given]
    if not isinstance(given, Mapping):
        for each in given:
            if not isinstance(each, Mapping):
                raise TypeError(f"a message must have role and content, got {each!r:.80}")
        return list(given)
    columns = zip(*given.values(), strict=True)
    return [dict(zip(given, values, strict=True)) for values in columns]


def _share_gpt(turns: Sequence[Any]) -> list[Message]:
    """Returns messages; those in the form of ShareGPT have ``from`` and ``value``."""
    found = []
    for turn in turns:
        if isinstance(turn, Mapping) and "from" in turn:
            if turn["from"] not in _SPEAKERS:
                names = ", ".join(_SPEAKERS)
                raise ValueError(f"'from' must be one of {names}, got {turn['from']!r}")
            more = {name: value for name, value in turn.items() if name not in ("from", "value")}
            turn = {**more, "role": _SPEAKERS[turn["from"]], "content": turn["value"]}
        found.append(turn)
    return found


def _whole(tokens: list[int]) -> Example:
    return example_of(tokens, [True] * len(tokens))


def messages_in(prompt: Any) -> Sequence[Message]:
    """Returns a prompt in front of a reply that is a chat as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else turns_of(prompt)


def reply_in(reply: Any) -> Sequence[Message]:
    """Returns a reply as messages, or those that it is."""
    is_text = isinstance(reply, str)
    return [{"role": "assistant", "content": reply}] if is_text else turns_of(reply)


def whole_chat(before: Sequence[Message], reply: Any) -> Sequence[Message]:
    """Returns messages and the reply behind them, which may be the whole chat already."""
    turns = reply_in(reply)
    said = [(turn.get("role"), turn.get("content")) for turn in (*before[-1:], *turns)]
    return turns if before and said[0] in said[1:-1] else [*before, *turns]


def is_chat(given: Any) -> bool:
    """Whether something is a list of messages."""
    if isinstance(given, Mapping):  # a Sequence of Hugging Face's datasets
        return "role" in given
    given = given.tolist() if isinstance(given, np.ndarray) else given
    return isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)


def answer(prompt: str, reply: str, tokenizer: Tokenizer, *, whole: bool = False) -> Example:
    """Returns a prompt and its answer, of which the answer is trained, or all."""
    before = tokenizer.tokens(prompt, end=False)
    after = tokenizer.tokens(reply, special=False) + tokenizer.end
    return example_of(before + after, [whole] * len(before) + [True] * len(after))


def chat(
    messages: Sequence[Message], tokenizer: Tokenizer, train_on: str, more: Names = None
) -> tuple[list[Example], int, str]:
    """Returns a chat as examples, of which replies are trained.

    Args:
        messages: The messages.
        tokenizer: The tokenizer.
        train_on: Which tokens to train.
        more: Further names that the template reads, and their values.

    Returns:
        The chat; the chat up to each reply that the template changes in the whole chat; the number
        of replies that are not found; and what precedes replies only where they are generated.
    """
    if train_on == "all":
        text = tokenizer.chat(messages, more)
        return [_whole(tokenizer.tokens(text, special=False))], 0, ""
    if train_on == "completion":
        last = max((n for n, m in enumerate(messages) if m.get("role") == "assistant"), default=0)
        messages = [
            each if number == last or not isinstance(each, Mapping) else {**each, "weight": 0}
            for number, each in enumerate(messages)
        ]
    found = tokenizer.replies(messages, more)
    examples = [example_of(*tokenizer.tokens_in(*part)) for part in found.parts]
    return examples, found.missing, found.opened
