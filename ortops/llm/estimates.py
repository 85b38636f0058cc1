"""Estimates the memory and time of tuning a language model, by counting."""

from __future__ import annotations

import math
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from ortops._common.cores import usable_memory
from ortops.graph.edit import ancestor_nodes
from ortops.graph.passes.chunked_logits import largest_chunk

_BASE, _LAYER = 112e6, 11e6
"""Bytes of Python, its packages and onnxruntime, and of the graphs of a layer."""

_COPIED, _COPIES = 2**28, 2.5
"""Up to so many bytes of weights, the session and onnxruntime have this many copies of them; of
more one, and one more of those that are inside the model's file."""

_OF_ADAPTER = 20
"""Bytes for each value of an adapter: itself, its first value, its gradient and two moments."""


class _Form(NamedTuple):
    """What differs between the forms that attention has in files.

    Attributes:
        copies: How many more copies of the weights there are.
        kept: What a step keeps with recompute=None for each number that an adapted layer reads or
            returns: others lie between.
        scores: How many arrays of the scores of a layer there are, of each head, query and key.
    """

    copies: float
    kept: float
    scores: float


_FORMS = {
    ("com.microsoft", "GroupQueryAttention"): _Form(0, 1.33, 0),
    ("com.microsoft", "MultiHeadAttention"): _Form(0.2, 1.5, 0.7),
    ("", "Attention"): _Form(0.8, 1.2, 0.7),
    ("", "Softmax"): _Form(0.6, 1.4, 3.5),
}
"""Measured, with products of matrices in float32."""

_AGAIN = 0.68
"""The share of `_Form.kept` that a step keeps by default, with recompute="elementwise"."""

_LOGITS = 3.25
"""How many arrays of the size of a chunk of logits there are."""

_FASTER, _SLOWER = 0.8, 8
"""How many times as long a step takes as its matrix products at the best speed of one alone."""


@dataclass(frozen=True)
class Forecast:
    """What steps of tuning need. All constants are those of measurements on a CPU.

    Attributes:
        rows: The number of rows per step.
        tokens: The number of tokens per row.
        fixed: The bytes that do not depend on the batch, the adapter of rank 8 included.
        per_token: The bytes for each token of a batch, the logits apart, by default.
        words: The number of logits of a token.
        per_rank: The bytes for each rank of the adapter.
        context: The largest number of tokens of a row.
        seconds: The least and the largest time of a step.
        limit: The bytes that the process may have; None if that is not known.
        per_pair: The bytes for each pair of tokens of a row.
        kept: The further bytes for each token with recompute=None.
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
    per_pair: float = 0
    kept: float = 0

    def memory(self, rows: int, tokens: int) -> float:
        """Returns the peak memory of the process with rows of so many tokens, in bytes."""
        logits = min(rows * tokens * self.words, largest_chunk(self.words))
        return self.fixed + rows * tokens * self._each(tokens) + 4 * _LOGITS * logits

    def _each(self, tokens: int) -> float:
        """Returns the bytes for each token of a row, the logits apart."""
        return self.per_token + tokens * self.per_pair

    def __str__(self) -> str:
        low, high = (float(f"{each:.2g}") for each in self.seconds)
        memory = self.memory(self.rows, self.tokens)
        kept = memory + self.rows * self.tokens * self.kept
        text = (
            f"estimated for rank 8 with {self.rows} × {self.tokens} tokens: {memory / 1e6:,.0f} MB "
            f"of memory ({kept / 1e6:,.0f} MB with --recompute none), {low:g} to {high:g} s per "
            "step"
        )
        if self.limit is None:
            return text
        each = self._each(self.tokens)
        left = self.limit - memory + self.rows * self.tokens * each  # for all tokens
        most = int(left / each)
        text += f"\nof {self.limit / 1e6:,.0f} MB that this process may have, "
        if self.limit < memory:
            return f"{text}rank 8 fits with at most {max(0, most):,} tokens per step"
        root = math.sqrt(self.per_token**2 + 4 * self.per_pair * left)
        row = min(int(2 * left / (self.per_token + root)), self.context)
        rank = min(256, 8 + int((self.limit - memory) / self.per_rank))
        return (
            f"{text}rank 8 fits with up to {most // self.tokens:,} × {self.tokens} tokens or one "
            f"row of {row:,}; {self.rows} × {self.tokens} fit up to rank {rank}"
        )


class Attention(NamedTuple):
    """The attention of a model.

    Attributes:
        form: Its form.
        layers: The number of layers of it.
        heads: The number of heads of each.
    """

    form: _Form
    layers: int
    heads: int


def attention_of(graph: ir.Graph, heads: int | None) -> Attention | str:
    """Returns the attention of a model; or why its memory cannot be estimated.

    Args:
        graph: The model.
        heads: The number of heads, if the settings have it.
    """
    found = {key: [n for n in graph if (n.domain, n.op_type) == key] for key in _FORMS}
    kinds = {key: nodes for key, nodes in found.items() if nodes}
    if len(kinds) != 1:
        return f"its attention has {len(kinds) or 'none'} of the forms that were measured"
    ((key, nodes),) = kinds.items()
    form = _FORMS[key]
    products = {v for node in graph if node.op_type == "MatMul" for v in node.outputs}
    scores = [v for node in nodes for v in node.inputs[:1] if v is not None]
    if any(node.op_type == "Tanh" for node in ancestor_nodes(scores, products)):
        return "its scores have a soft cap, which was not measured"
    if form.scores and any(v.dtype == ir.DataType.FLOAT16 for v in graph.initializers.values()):
        return "attention in float16 was measured with GroupQueryAttention only"
    if form.scores and heads is None:
        return "its settings do not have the number of heads"
    return Attention(form, len(nodes), heads or 0)


def forecast(
    layers: Sequence[Sequence[int]],
    attention: Attention,
    weights: tuple[int, int, int],
    words: int,
    shape: Sequence[int],
) -> Forecast:
    """Returns what steps with an adapter of rank 8 need.

    Args:
        layers: The sizes (in, out) of the layers with an adapter.
        attention: The attention.
        weights: The bytes of all weights, as they are stored, of those that stay in the file, and
            of the model's file without external data.
        words: The number of logits of a token.
        shape: The numbers of rows and of tokens per row, and the largest number of these.
    """
    rows, tokens, context = shape
    width = sum(map(sum, layers))  # also the values of an adapter of rank 1
    form, blocks, heads = attention
    is_large = weights[0] > _COPIED
    held = (weights[0] - weights[1]) * ((1 if is_large else _COPIES) + form.copies)
    held += weights[2] if is_large else 0
    fixed = _BASE + _LAYER * blocks + held + 8 * _OF_ADAPTER * width
    products = sum(into * out for into, out in layers) + layers[0][0] * words
    least = 4 * products * rows * tokens / _speed()  # forward, and the same backward
    kept, rank = 4 * form.kept * width, _OF_ADAPTER * width
    return Forecast(
        *(rows, tokens, fixed, _AGAIN * kept, words, rank, context),
        *((_FASTER * least, _SLOWER * least), usable_memory(), 4 * form.scores * heads),
        kept=(1 - _AGAIN) * kept,
    )


def _speed() -> float:
    """Returns how many operations per second a product of matrices makes, tried for half one."""
    x = np.ones((1024, 1024), np.float32)
    return 2 * 1024**3 / min(timeit.repeat(lambda: x @ x, number=1, repeat=10))
