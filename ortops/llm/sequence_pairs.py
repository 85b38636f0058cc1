"""Training data of encoder-decoder models: what the encoder reads, and what the decoder writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import ArgumentError, FeedError, ModelError
from ortops.llm.examples import IGNORED, SEEN, as_prompt, tokens_of
from ortops.llm.folder import Folder
from ortops.llm.tokenization import Tokenizer

Array: TypeAlias = npt.NDArray[Any]

FORMS = "have prompt and completion, input_ids and labels, or input_features and text or labels"


@dataclass(frozen=True)
class Pair:
    """An input of the encoder, and the tokens that the decoder has to write.

    Attributes:
        source: The tokens; or the features, of shape [bins, frames].
        labels: The tokens, with -100 for those that the loss ignores.
        prefix: Tokens before them, which the decoder is given and the loss ignores.
    """

    source: Array
    labels: npt.NDArray[np.int64]
    prefix: tuple[int, ...] = ()


def start_token(folder: Folder) -> int:
    """Returns the token that the decoder starts with.

    Raises:
        ModelError: If config.json does not say it.
    """
    found = folder.config.get("decoder_start_token_id", folder.config.get("bos_token_id"))
    if not isinstance(found, int):
        raise ModelError(
            f"folder '{folder.path}': config.json must have decoder_start_token_id, got {found!r}"
        )
    return found


def read_pair(
    row: Any, tokenizer: Callable[[], Tokenizer], folder: Folder, words: int | None
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Returns what the encoder reads of a row, and the labels of the decoder."""
    if not isinstance(row, Mapping):
        raise TypeError("not a dict")
    row = as_prompt(row)
    source: Array
    if "input_features" in row:
        source = _features(row["input_features"])
    elif "input_ids" in row:
        source = np.array(tokens_of(row["input_ids"], words), np.int64)
        if SEEN in row:  # without padding
            source = source[np.array(tokens_of(row[SEEN], 2), bool)]
    else:
        source = np.array(tokenizer().tokens(row["prompt"]), np.int64)
    if "labels" in row:
        return source, np.array(tokens_of(row["labels"], words, labels=True), np.int64)
    text = row["completion"] if "completion" in row else row["text"]
    tokens = tokenizer().tokens(text, special="decoder_prefix" not in row)
    if tokens[:1] == [start_token(folder)]:  # the decoder's inputs begin with it
        tokens = tokens[1:]
    end = tokenizer().end
    return source, np.array(tokens + (end if tokens[-1:] != end else []), np.int64)


def prefix_of(
    given: str | Sequence[int],
    tokenizer: Callable[[], Tokenizer],
    folder: Folder,
    words: int | None = None,
) -> tuple[int, ...]:
    """Returns the tokens that a decoder is given, without the one that it starts with."""
    if isinstance(given, str):
        tokens = tokenizer().tokens(given, special=False)
    else:
        tokens = tokens_of(given, words)
    is_whole = bool(tokens) and tokens[0] == start_token(folder)
    return tuple(tokens[is_whole:])


def pair_feeds(
    pairs: Sequence[Pair], folder: Folder, inputs: Mapping[str, Mapping[str, str]]
) -> dict[str, Array]:
    """Returns the feeds of a batch, padded at the end.

    The decoder's inputs are the labels, shifted to the right behind the start token, as in
    transformers.

    Args:
        pairs: The rows.
        folder: The folder.
        inputs: The names of the inputs of encoder and decoder in the model.
    """
    pad = folder.pad
    ignored = [np.full(len(pair.prefix), IGNORED) for pair in pairs]
    whole = [np.append(no, pair.labels) for no, pair in zip(ignored, pairs, strict=True)]
    labels = padded(whole, IGNORED)
    shifted = np.full_like(labels, start_token(folder))
    shifted[:, 1:] = np.where(labels[:, :-1] == IGNORED, pad, labels[:, :-1])
    for row, pair in enumerate(pairs):
        shifted[row, 1 : len(pair.prefix) + 1] = pair.prefix
    encoder = source_feeds([pair.source for pair in pairs], pad)
    decoder = {
        "input_ids": shifted,
        "decoder_input_ids": shifted,
        "decoder_attention_mask": np.ones_like(shifted),
    }
    result: dict[str, Array] = {"labels": labels}
    for part, feeds in (("decoder", decoder), ("encoder", encoder)):
        known = inputs[part]
        result.update({known[name]: array for name, array in feeds.items() if name in known})
    return result


def source_feeds(sources: Sequence[Array], pad: int) -> dict[str, Array]:
    """Returns what the encoder reads.

    Raises:
        FeedError: If features differ in shape, or are mixed with tokens.
    """
    shapes = {source.shape if source.ndim == 2 else () for source in sources}
    if len(shapes) > 1:
        raise FeedError(f"data: input_features of a batch must have one shape, got {shapes}")
    if shapes != {()}:
        return {"input_features": np.stack(sources)}
    mask = padded([np.ones_like(source) for source in sources], 0)
    return {"input_ids": padded(sources, pad), "attention_mask": mask}


def source_of(prompt: Any, tokenizer: Callable[[], Tokenizer], words: int | None) -> Array:
    """Returns the tokens or features of a prompt.

    Raises:
        ArgumentError: If it is empty.
        TypeError: If it has another form.
        ValueError: Likewise.
    """
    if np.ndim(prompt) == 2:
        return _features(prompt)
    tokens = tokenizer().tokens(prompt) if isinstance(prompt, str) else tokens_of(prompt, words)
    if not tokens:
        raise ArgumentError(
            f"prompt must be a text, tokens, or features [bins, frames], got {prompt!r:.80}"
        )
    return np.array(tokens, np.int64)


def _features(given: Any) -> Array:
    source = np.asarray(given)
    if source.ndim != 2 or not source.size or source.dtype.kind not in "iuf":
        what = f"{list(source.shape)} of {source.dtype}"
        raise ValueError(f"input_features must be [bins, frames], got {what}")
    return source.astype(np.float32)


def padded(rows: Sequence[Array | Sequence[int]], value: int) -> npt.NDArray[np.int64]:
    """Returns rows of integers as an array, with a value behind the shorter ones."""
    result = np.full((len(rows), max(map(len, rows))), value, np.int64)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result
