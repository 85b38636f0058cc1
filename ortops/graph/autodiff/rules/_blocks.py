"""The gradient of attention in blocks of queries, whose scores are computed again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.rules._attention import (
    Size,
    bias_of,
    both,
    factor_of,
    group,
    minus,
    products,
    softmax,
    ungroup,
    window,
)
from ortops.graph.autodiff.rules.recurrent import inside, scan
from ortops.graph.faults import pad_axes
from ortops.graph.shapes import index_range, size_of, unbroadcast
from ortops.graph.tensor import Tensor, op, zeros_like

BLOCK = 128
"""The largest number of queries whose scores exist together in `gradients_in_blocks`."""


@dataclass(frozen=True)
class Operands:
    """The operands of attention.

    Attributes:
        q: Queries (batch, head, length, size).
        k: All keys; the number of heads divides that of the queries.
        v: All values.
        seen: The number of keys that exist, (batch, 1, 1, 1); all by default.
        offset: The position of the first query among the keys, for all samples or for each.
        places: The positions of the keys of a sliding cache, if there is one.
        left: The number of keys to the left of a query; -1 for no limit.
        causal: Whether a query attends only to keys up to its own.
        bias: The bias of the scores (batch or 1, head or 1, queries, keys); if it is not trained,
            there may also be one row for all queries.
        trained: Whether the bias gets a cotangent.
        masked: Whether the bias may exclude all keys of a query, whose probabilities are zeros.
        sink: The score of a key without value, (1, head, 1, 1) or (1, 1, 1, 1).
        scale: The factor of the scores.
        softcap: The limit of the scores before the bias is added; 0 for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None = None
    offset: Size = 0
    places: Tensor | None = None
    left: int = -1
    causal: bool = False
    bias: Tensor | None = None
    trained: bool = True
    masked: bool = False
    sink: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0

    @property
    def is_windowed(self) -> bool:
        """Whether some queries read some of the keys only."""
        return self.causal or self.left >= 0

    def inside(self, x: Tensor) -> Operands:
        """Returns the operands for use in the graph of x, which are some of the queries."""
        k, v = inside(x, self.k), inside(x, self.v)
        seen, sink = (None if y is None else inside(x, y) for y in (self.seen, self.sink))
        offset = self.offset if isinstance(self.offset, int) else inside(x, self.offset)
        return replace(self, q=x, k=k, v=v, seen=seen, offset=offset, sink=sink)

    def allowed(self, queries: Size, first: Size, keys: Size) -> Tensor | None:
        """Returns which of the first keys the queries attend to; None for all.

        Args:
            queries: The number of queries.
            first: The position of the first of them.
            keys: The number of keys.
        """
        x = self.q
        exist = None if self.seen is None else op.Less(index_range(keys, x), self.seen)
        if self.places is None:
            right = 0 if self.causal else -1
            return both(window(x, queries, keys, first, self.left, right), exist)
        at, own = self.places, op.Add(op.Unsqueeze(index_range(queries, x), [1]), first)
        near = op.And(op.LessOrEqual(at, own), op.GreaterOrEqual(at, op.Sub(own, self.left)))
        used = op.GreaterOrEqual(at, 0)
        if self.seen is not None:
            used = op.And(used, op.Less(at, self.seen))
        return op.And(near, used)


def gradients_in_blocks(
    dy: Tensor, y: Tensor, at: Operands
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the cotangents of queries, keys, values, the bias and the sink.

    With scores s = scale · q kᵀ + bias, probabilities p = softmax(s) and outputs y = p v:

        dv = pᵀ dy,  ds = p (dy vᵀ - Σ dy y),  dq = scale · ds k,  dk = scale · dsᵀ q

    A Scan computes the scores of a block of queries again, so that memory grows linearly with their
    number. With a causal window, a block reads only the keys up to its end, and with one of a
    limited length, only those from its begin on.

    Args:
        dy: The cotangent of y, (batch, head, length, size); zero for padding.
        y: The output; zero for padding.
        at: The operands.

    Source: arXiv:2205.14135 (FlashAttention), algorithm 4.
    """
    q, length = at.q, size_of(at.q, [2])
    known = q.tape.constant(np.array(length)) if isinstance(length, int) else length
    count = op.Max(op.Div(op.Add(known, BLOCK - 1), BLOCK), 1)
    rows = op.Div(op.Add(known, op.Sub(count, 1)), count)

    def cut(x: Tensor) -> Tensor:
        """Returns blocks of queries, (block, batch, head, row, …)."""
        padded = pad_axes(x, [0, op.Sub(op.Mul(rows, count), known)], op.CastLike(0.0, x), [2])
        batch, heads, _, last = x.shape or (None,) * 4
        sizes = [size_of(x, [0]), size_of(x, [1]), count, rows, size_of(x, [3])]
        parts = op.Reshape(padded, sizes, allowzero=1).with_shape([batch, heads, None, None, last])
        return op.Transpose(parts, perm=[2, 0, 1, 3, 4])

    def joined(parts: Tensor, like: Tensor) -> Tensor:
        x = op.Transpose(parts, perm=[1, 2, 0, 3, 4])
        sizes = [size_of(like, [0]), size_of(like, [1]), op.Mul(rows, count), size_of(like, [3])]
        x = op.Reshape(x, sizes, allowzero=1)
        return op.Slice(x, [0], op.Reshape(known, [1]), [2]).with_shape_of(like)

    weighted = op.ReduceSum(dy * y, [3])
    starts = op.Mul(op.Range(0, count, 1), rows)
    offset = q.tape.constant(np.array(at.offset)) if isinstance(at.offset, int) else at.offset
    furthest = op.ReduceMax(offset, keepdims=0)
    nearest = op.ReduceMin(offset, keepdims=0)

    operands = [at.k, at.v, *([] if at.sink is None else [at.sink])]
    cuts = cut(at.bias) if at.trained and at.bias is not None else None
    slices = [cut(q), cut(dy), cut(weighted), starts, cuts]
    block = functools.partial(_gradients_of_block, at, rows, furthest, nearest)
    found = scan(block, [zeros_like(x) for x in operands], slices, backwards=False)
    dk, dv, *others = found
    dsink = None if at.sink is None else others.pop(0)
    dbias = None if at.bias is None or not at.trained else joined(others[1], at.bias)
    return joined(others[0], q), dk, dv, dbias, dsink


def _gradients_of_block(
    at: Operands, rows: Tensor, furthest: Tensor, nearest: Tensor, *given: Tensor | None
) -> Sequence[Tensor]:
    """Returns the sums of cotangents of keys, values and sink, and those of a block of queries."""
    *sums, q, dy, weighted, start, bias = given
    q, dy, weighted, start = (cast(Tensor, x) for x in (q, dy, weighted, start))
    here = at.inside(q)
    if bias is None and at.bias is not None:
        bias = _rows_of(inside(q, at.bias), start, inside(q, rows))
    keys = size_of(here.k, [2])
    if at.causal:
        reach = op.Add(op.Add(start, inside(q, rows)), inside(q, furthest))
        keys = op.Min(reach, keys)
    end = op.Reshape(op.Add(keys, q.tape.constant(np.array(0))), [1])
    begin = q.tape.constant(np.array([0]))
    if at.left >= 0:  # no query reads a key further to the left of it
        first = op.Sub(op.Add(start, inside(q, nearest)), at.left)
        begin = op.Min(op.Max(op.Reshape(first, [1]), begin), end)
        seen = None if here.seen is None else op.Sub(here.seen, begin)
        here = replace(here, seen=seen)

    def shown(x: Tensor, axis: int) -> Tensor:
        """Returns what belongs to the keys that the block reads."""
        return op.Slice(x, begin, end, [axis]) if at.is_windowed else x

    def placed(x: Tensor, axis: int, whole: Tensor) -> Tensor:
        """Returns x, which belongs to these keys, with zeros for the others."""
        if not at.is_windowed:
            return x
        missing = op.Sub(op.Add(size_of(whole, [axis]), begin * 0), end)
        return pad_axes(x, op.Concat(begin, missing, axis=0), None, [axis])

    k, v = shown(here.k, 2), shown(here.v, 2)
    place = op.Sub(op.Add(start, here.offset), begin)
    allowed = here.allowed(inside(q, rows), place, op.Reshape(op.Sub(end, begin), []))
    # A finite number, because no key may be allowed for a row of padding.
    lowest = float(ir.DataType.from_numpy(q.dtype).min) / 2
    factor = factor_of(q, at.scale)
    raw, slope = _capped(products(q * factor, k), at.softcap)
    added = bias_of(q, allowed, None if bias is None else shown(bias, 3), lowest)
    p, p_sink = softmax(raw if added is None else raw + added, here.sink)
    if at.masked:
        p = op.Where(op.IsNaN(p), 0, p)
    ds = p * (products(dy, v) - weighted)
    change = None
    if bias is not None and at.trained:
        change = unbroadcast(placed(ds, 3, bias), bias)
    ds = ds if slope is None else ds * slope
    parts = [group(x, k).mT @ group(z, k) for x, z in ((ds, q * factor), (p, dy))]
    totals = [
        cast(Tensor, total) + placed(part, 2, here.k)
        for total, part in zip(sums, parts, strict=False)
    ]
    if p_sink is not None and here.sink is not None:
        totals.append(cast(Tensor, sums[2]) - unbroadcast(p_sink * weighted, here.sink))
    dq = ungroup(group(ds, k) @ k, q, size_of(q, [3])) * factor
    return [*totals, dq, *([] if change is None else [change])]


def _rows_of(bias: Tensor, start: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows of a bias; its last row also serves the queries behind it."""
    if bias.shape is not None and bias.shape[2] == 1:
        return bias
    last = minus(size_of(bias, [2]), 1)
    return op.Gather(bias, op.Min(op.Add(op.Range(0, rows, 1), start), last), axis=2)


def _capped(scores: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Returns limited scores, and their slope; None for 1."""
    if softcap <= 0:
        return scores, None
    y = op.Tanh(scores * (1 / softcap))
    return y * softcap, 1 - y * y
