"""Estimates the memory and time of tuning a language model, by counting."""

from __future__ import annotations

import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ortops._common.cores import usable_memory

_BASE, _LAYER = 124e6, 8e6
"""Bytes of Python, its packages and onnxruntime, and of the graphs of a layer."""

_COPIED, _COPIES = 2**28, 2.4
"""Up to so many bytes of weights, the session and onnxruntime have this many copies of them."""

_OF_ADAPTER = 20
"""Bytes for each value of an adapter: itself, its first value, its gradient and two moments."""

_KEPT = 1.45
"""What a step keeps for each number that an adapted layer reads or returns: others lie between."""

_CHUNK, _LOGITS = 2**23, 3.5
"""The largest number of logits at a time, and how many arrays of their size there are."""

_FASTER, _SLOWER = 0.8, 8
"""How many times as long a step takes as its matrix products at the best speed of one alone."""


@dataclass(frozen=True)
class Forecast:
    """What steps of tuning need. All constants are those of measurements on a CPU.

    Attributes:
        rows: The number of rows per step.
        tokens: The number of tokens per row.
        fixed: The bytes that do not depend on the batch, the adapter of rank 8 included.
        per_token: The bytes for each token of a batch, the logits apart.
        words: The number of logits of a token.
        per_rank: The bytes for each rank of the adapter.
        context: The largest number of tokens of a row.
        seconds: The least and the largest time of a step.
        limit: The bytes that the process may have; None if that is not known.
    """

    rows: int
    tokens: int
    fixed: float
    per_token: float
    words: int
    per_rank: float
    context: int
    seconds: tuple[float, float]
    limit: int | None

    def memory(self, tokens: int) -> float:
        """Returns the peak memory of the process with a batch of so many tokens, in bytes."""
        logits = min(tokens * self.words, max(_CHUNK, self.words))
        return self.fixed + tokens * self.per_token + 4 * _LOGITS * logits

    def __str__(self) -> str:
        low, high = (float(f"{each:.2g}") for each in self.seconds)
        memory = self.memory(self.rows * self.tokens)
        text = (
            f"estimated for rank 8 with {self.rows} × {self.tokens} tokens: {memory / 1e6:,.0f} MB "
            f"of memory, {low:g} to {high:g} s per step"
        )
        if self.limit is None:
            return text
        most = int(self.rows * self.tokens + (self.limit - memory) / self.per_token)
        text += f"\nof {self.limit / 1e6:,.0f} MB that this process may have, "
        if self.limit < memory:
            return f"{text}rank 8 fits with at most {max(0, most):,} tokens per step"
        rank, row = (
            min(256, 8 + int((self.limit - memory) / self.per_rank)),
            min(most, self.context),
        )
        return (
            f"{text}rank 8 fits with up to {most // self.tokens:,} × {self.tokens} tokens or one "
            f"row of {row:,}; {self.rows} × {self.tokens} fit up to rank {rank}"
        )


def forecast(
    layers: Sequence[Sequence[int]],
    blocks: int,
    weights: tuple[int, int],
    words: int,
    shape: Sequence[int],
) -> Forecast:
    """Returns what steps with an adapter of rank 8 need.

    Args:
        layers: The sizes (in, out) of the layers with an adapter.
        blocks: The number of layers of attention.
        weights: The bytes of all weights, as they are stored, and of those that stay in the file.
        words: The number of logits of a token.
        shape: The numbers of rows and of tokens per row, and the largest number of these.
    """
    rows, tokens, context = shape
    width = sum(map(sum, layers))  # also the values of an adapter of rank 1
    held = (weights[0] - weights[1]) * (_COPIES if weights[0] <= _COPIED else 1)
    fixed = _BASE + _LAYER * blocks + held + 8 * _OF_ADAPTER * width
    products = sum(into * out for into, out in layers) + layers[0][0] * words
    least = 4 * products * rows * tokens / _speed()  # forward, and the same backward
    each, rank, seconds = 4 * _KEPT * width, _OF_ADAPTER * width, (_FASTER * least, _SLOWER * least)
    return Forecast(rows, tokens, fixed, each, words, rank, context, seconds, usable_memory())


def _speed() -> float:
    """Returns how many operations per second a product of matrices makes, tried for half one."""
    x = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(timeit.repeat(lambda: x @ x, number=1, repeat=10))
