"""Packs several examples into one row, for models that keep them apart.

Whether a model does is found by computing: the logits of an example must not depend on the examples
before it, bit for bit, and must be those of the example alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops.errors import UnsupportedError
from ortops.llm.examples import IGNORED, Example, example_of

_REMEDY = "use group_by_length=True, which makes batches of rows of similar length"

Logits = Callable[[Example], npt.NDArray[np.floating]]


def packed(examples: Sequence[Example], length: int) -> list[Example]:
    """Joins examples to rows of at most so many tokens.

    The longest example comes first, and each goes into the row that it fills best.
    """
    sizes = np.array([len(example.tokens) for example in examples])
    rows = list[list[Example]]()
    room = list[tuple[int, int]]()  # of each row, sorted
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        found = bisect_left(room, (size, -1))
        left, row = room.pop(found) if found < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(examples[place])
        insort(room, (left - size, row))
    return [_joined(row) for row in rows]


def _joined(examples: Sequence[Example]) -> Example:
    """Returns one row of examples. Nothing predicts the first token of each."""
    labels = [example.labels.copy() for example in examples]
    for each in labels:
        each[0] = IGNORED
    tokens = np.concatenate([example.tokens for example in examples])
    lengths = tuple(len(example.tokens) for example in examples)
    return Example(tokens, np.concatenate(labels), lengths)


def refuse_leaks(logits: Logits, words: int, node: str) -> None:
    """Refuses a model that does not keep the examples of a row apart.

    Args:
        logits: Computes the logits [tokens, words] of a row.
        words: The size of the vocabulary.
        node: An attention node that counts tokens only, as text; empty if there is none.

    Raises:
        UnsupportedError: If the model does not.
    """
    tokens = np.random.default_rng(0).integers(words, size=11)
    first, second = tokens[:5], tokens[5:]
    others = (first + 1) % words
    alone, after, after_others = (
        logits(_joined([example_of(list(part), [True] * len(part)) for part in parts]))[-6:]
        for parts in ([second], [first, second], [others, second])
    )
    if not np.array_equal(after, after_others):
        reason = (
            f"{node} separates rows by their length only"
            if node
            else "no mask or position_ids among its inputs keeps them apart"
        )
        raise UnsupportedError(
            f"packing: the examples of a row would attend to each other, as {reason}; {_REMEDY}"
        )
    scale = float(np.abs(alone).max())
    if not np.abs(after - alone).max() <= 1e-3 * scale:  # NaN is refused, too
        raise UnsupportedError(
            "packing: the logits of an example would depend on its place in a row, as the model "
            f"counts positions by itself; {_REMEDY}"
        )


def attention_mask(
    segments: npt.NDArray[np.int64], rank: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Returns the mask of queries and keys: of earlier tokens in the same example.

    Args:
        segments: The number of the example of each token, [batch, time].
        rank: 3 for [batch, queries, keys], 4 for [batch, 1, queries, keys].
        dtype: bool or an integer for 1 where attention is allowed; a float for 0 there, and the
            least finite number elsewhere.
    """
    same = segments[:, :, None] == segments[:, None, :]
    allowed = same & np.tri(segments.shape[1], dtype=bool)
    if rank == 4:
        allowed = allowed[:, None]
    if dtype.kind == "f":
        least = np.array(np.finfo(dtype).min, dtype)
        found: npt.NDArray[Any] = np.where(allowed, np.zeros_like(least), least)
    else:
        found = allowed.astype(dtype)
    return found
