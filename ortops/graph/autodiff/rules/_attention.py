"""What definitions of attention share: heads, windows of keys, scores, and rotation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.shapes import index_range, size_of
from ortops.graph.tensor import Tensor, op

Size = int | Tensor


def heads_of(x: Tensor, count: int | None) -> Tensor:
    """Splits the last axis of (batch, length, hidden) into heads: (batch, head, length, size)."""
    if not count:
        raise UnsupportedError("missing number of heads, which inputs of rank 3 require")
    width = size_of(x, [2])
    size = width // count if isinstance(width, int) else -1
    batch, length = x.shape[:2] if x.shape else (None, None)
    shape = [batch, length, count, size if size > 0 else None]
    return op.Transpose(op.Reshape(x, [0, 0, count, size]).with_shape(shape), perm=[0, 2, 1, 3])


def merged(y: Tensor) -> Tensor:
    """Merges the heads again; the inverse of `heads_of`."""
    width = size_of(y, [1, 3])
    joined = op.Transpose(y, perm=[0, 2, 1, 3])
    size = width if isinstance(width, int) else -1
    batch, length = joined.shape[:2] if joined.shape else (None, None)
    shape = [batch, length, size if size > 0 else None]
    return op.Reshape(joined, [0, 0, size]).with_shape(shape)


def minus(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return op.Sub(a, b)


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return op.And(a, b)


def window(
    x: Tensor, length: Size, total: Size, offset: Size, left: int, right: int
) -> Tensor | None:
    """Returns a mask of the keys in a window around each query; None for all keys.

    Args:
        x: A tensor on the tape.
        length: The number of queries.
        total: The number of keys.
        offset: The position of the first query among the keys, for all samples or for each.
        left: The number of keys to the left of the query; -1 for no limit.
        right: The number of keys to the right of the query; -1 for no limit.
    """
    if left < 0 and right < 0:
        return None
    if isinstance(length, int) and isinstance(total, int) and isinstance(offset, int):
        ahead = np.arange(total) - (np.arange(length)[:, None] + offset)
        allowed = np.full(ahead.shape, True)
        if left >= 0:
            allowed &= ahead >= -left
        if right >= 0:
            allowed &= ahead <= right
        return x.tape.constant(allowed)
    queries = op.Add(op.Unsqueeze(index_range(length, x), [1]), offset)
    steps = op.Sub(index_range(total, x), queries)
    before = op.GreaterOrEqual(steps, -left) if left >= 0 else None
    return both(before, op.LessOrEqual(steps, right) if right >= 0 else None)


def bias_of(
    like: Tensor, allowed: Tensor | None, added: Tensor | None, excluded: float = -np.inf
) -> Tensor | None:
    """Returns the bias of the scores, which is minus infinity by default for excluded keys."""
    if allowed is None:
        return added
    fill = like.tape.constant(np.array(excluded, like.dtype))
    return op.Where(allowed, op.CastLike(0.0, like) if added is None else added, fill)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    precision: ir.DataType | None = None,
    masked_rows: bool = True,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Returns the output, the probabilities, and the scores: raw, capped, with the bias.

    Args:
        q: Queries (batch, head, length, size).
        k: Keys (batch, head, length, size); the number of heads divides that of the queries.
        v: Values.
        bias: The bias of the scores, of a shape that broadcasts to theirs.
        scale: The factor of the scores; 1/√size by default.
        softcap: The limit of the scores before the bias is added; 0 for none.
        precision: The type in which the softmax is computed.
        masked_rows: Whether all elements in a row of the bias may be minus infinity.
        sink: The score of a key without value, of shape (1, head, 1, 1) or (1, 1, 1, 1).
    """
    scores = products(q * factor_of(q, scale), k)
    raw = scores
    if softcap > 0:
        scores = op.Tanh(scores * (1 / softcap)) * softcap
    capped = scores
    nothing = None
    if bias is not None:
        shown = (scores + bias).with_shape_of(scores)
        if masked_rows:
            nothing = op.IsInf(op.ReduceMax(bias, [-1]), detect_positive=0)
            scores = (scores + op.Where(nothing, 0, bias)).with_shape_of(scores)
        else:
            scores = shown
    else:
        shown = scores
    dtype = q.dtype
    if precision is not None:
        scores = scores.astype(precision.numpy())
    p = softmax(scores, sink)[0].astype(dtype)
    if nothing is not None:
        p = op.Where(nothing, 0, p)
    y = op.MatMul(group(p, k), v) if _is_grouped(q, k) else op.MatMul(p, v)
    if _is_grouped(q, k):
        y = ungroup(y, q, size_of(v, [3]))
    elif q.shape is not None and v.shape is not None:
        y = y.with_shape([*q.shape[:3], v.shape[3]])
    return y, p, (raw, capped, shown)


def factor_of(q: Tensor, scale: float | None) -> float | Tensor:
    """Returns the factor of the scores, 1/√size by default."""
    if scale is not None:
        return scale
    size = size_of(q, [3])
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return op.Reciprocal(op.Sqrt(op.CastLike(size, q)))


def products(q: Tensor, k: Tensor) -> Tensor:
    """Returns q kᵀ; query heads with the same key head become rows of one product."""
    keys = op.Transpose(k, perm=[0, 1, 3, 2])
    if not _is_grouped(q, k):
        return op.MatMul(q, keys)
    return ungroup(op.MatMul(group(q, k), keys), q, size_of(k, [2]))


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether several query heads share a key head, as far as is known."""
    return q.shape is None or k.shape is None or q.shape[1] != k.shape[1] or None in q.shape[:2]


def softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the probabilities of the keys, and of the sink."""
    if sink is None:
        return op.Softmax(scores, axis=-1), None
    last = op.Expand(sink.astype(scores.dtype), op.Shape(op.ReduceMax(scores, [-1])))
    p = op.Softmax(op.Concat(scores, last, axis=-1), axis=-1)
    return p[..., :-1], p[..., -1:]


def group(x: Tensor, k: Tensor) -> Tensor:
    """Stacks the rows of the heads of x that share a head of k."""
    width = size_of(x, [3])
    return op.Reshape(x, [0, size_of(k, [1]), -1, width])


def ungroup(x: Tensor, q: Tensor, width: Size) -> Tensor:
    sizes = [0, size_of(q, [1]), size_of(q, [2]), width]
    shape = [*(q.shape or (None,) * 4)[:3], width if isinstance(width, int) else None]
    return op.Reshape(x, sizes).with_shape(shape)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    split: Sequence[Size],
    interleaved: int,
    rotated: int,
) -> Tensor:
    """Rotates pairs of features.

    Args:
        x: The features, (batch, head, position, size) or (batch, position, head · size).
        cos: The cosines, (batch, position, pair).
        sin: The sines, in the same shape.
        split: If x has three axes, the shape (batch, position, head, size) to split it into.
        interleaved: Whether pairs are adjacent; otherwise, they consist of an element of the first
            half and one of the second half.
        rotated: The number of leading features to rotate; 0 for all.
    """
    flat = x.ndim == 3
    cos, sin = (op.Unsqueeze(angle, [2 if flat else 1]) for angle in (cos, sin))
    heads = op.Reshape(x, split) if flat else x
    turned, rest = heads, None
    width = size_of(heads, [3])
    if rotated and (isinstance(width, Tensor) or rotated != width):
        turned, rest = heads[..., :rotated], heads[..., rotated:]
    if interleaved:
        pairs = op.Reshape(turned, [0, 0, 0, -1, 2])
        a, b = pairs[..., 0], pairs[..., 1]
    else:
        a, b = op.Split(turned, num_outputs=2, axis=-1)
    ac, bs, as_, bc = (x.with_shape_of(a) for x in (a * cos, b * sin, a * sin, b * cos))
    real, imaginary = (ac - bs).with_shape_of(a), (as_ + bc).with_shape_of(a)
    if interleaved:
        pairs = op.Concat(op.Unsqueeze(real, [4]), op.Unsqueeze(imaginary, [4]), axis=4)
        y = op.Reshape(pairs, [0, 0, 0, -1])
    else:
        y = op.Concat(real, imaginary, axis=-1)
    if rest is not None:
        y = op.Concat(y, rest, axis=-1)
    if flat:
        width = size_of(x, [2])
        y = op.Reshape(y, [0, 0, width if isinstance(width, int) else -1])
    return y.with_shape_of(x)
