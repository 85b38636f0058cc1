"""Definitions of attention and rotary embeddings, those of ONNX and of onnxruntime.

If a mask excludes all keys of a query, its output is zero, and so are the cotangents that it passes
on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack, cast

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.backward import backward_to_inputs
from ortops.graph.autodiff.registry import Cotangents, Rules
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.recurrent import inside, scan
from ortops.graph.autodiff.rules.table import definition
from ortops.graph.faults import pad_axes
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.shapes import index_range, size_of, unbroadcast
from ortops.graph.tensor import Tensor, op, zeros_like

Size = int | Tensor


class Scoring(TypedDict, total=False):
    """The attributes of onnxruntime's attention operators for the scores and their masks."""

    mask_filter_value: float
    scale: float
    unidirectional: int


@definition("Attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    nonpad_kv_seqlen: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
) -> Cotangents:
    flat = q.ndim == 3
    if flat:
        q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    length, total = size_of(q, [2]), size_of(k, [2])
    offset: Size = 0
    if past_key is not None:
        offset = size_of(past_key, [2])
    elif nonpad_kv_seqlen is not None:
        offset = op.Sub(op.Reshape(nonpad_kv_seqlen, [-1, 1, 1, 1]), length)
    right = 0 if is_causal else right_window_size
    allowed = _window(q, length, total, offset, left_window_size, right)
    if nonpad_kv_seqlen is not None:
        padding = op.Less(index_range(total, q), op.Reshape(nonpad_kv_seqlen, [-1, 1, 1, 1]))
        allowed = _both(allowed, padding)
    added = None
    if attn_mask is not None:
        is_bool = attn_mask.dtype == np.bool_
        last = size_of(attn_mask, [-1])
        if isinstance(last, Tensor) or isinstance(total, Tensor) or last != total:
            fill = q.tape.constant(np.array(False if is_bool else -np.inf, attn_mask.dtype))
            attn_mask = pad_axes(attn_mask, [0, _minus(total, last)], fill, [-1])
        if is_bool:
            allowed = _both(allowed, attn_mask)
        else:
            added = attn_mask
    # With a causal window alone, each query can attend to the key at its own position.
    certain = attn_mask is None and nonpad_kv_seqlen is None and left_window_size < 0
    bias = _bias(q, allowed, added)
    y, probabilities, stages = _attend(
        q,
        k,
        v,
        bias,
        scale=scale,
        softcap=softcap,
        precision=None if softmax_precision is None else ir.DataType(softmax_precision),
        masked_rows=not certain,
    )
    shown = (*stages, probabilities)[qk_matmul_output_mode]
    return (_merge(y) if flat else y), k, v, shown


def _heads(x: Tensor, count: int | None) -> Tensor:
    """Splits the last axis of (batch, length, hidden) into heads: (batch, head, length, size)."""
    if not count:
        raise UnsupportedError("missing number of heads, which inputs of rank 3 require")
    width = size_of(x, [2])
    size = width // count if isinstance(width, int) else -1
    batch, length = x.shape[:2] if x.shape else (None, None)
    shape = [batch, length, count, size if size > 0 else None]
    return op.Transpose(op.Reshape(x, [0, 0, count, size]).with_shape(shape), perm=[0, 2, 1, 3])


def _merge(y: Tensor) -> Tensor:
    """Merges the heads again; the inverse of `_heads`."""
    width = size_of(y, [1, 3])
    joined = op.Transpose(y, perm=[0, 2, 1, 3])
    size = width if isinstance(width, int) else -1
    batch, length = joined.shape[:2] if joined.shape else (None, None)
    shape = [batch, length, size if size > 0 else None]
    return op.Reshape(joined, [0, 0, size]).with_shape(shape)


def _minus(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return a - b
    return op.Sub(a, b)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return op.And(a, b)


def _window(
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
    return _both(before, op.LessOrEqual(steps, right) if right >= 0 else None)


def _bias(
    like: Tensor, allowed: Tensor | None, added: Tensor | None, excluded: float = -np.inf
) -> Tensor | None:
    """Returns the bias of the scores, which is minus infinity by default for excluded keys."""
    if allowed is None:
        return added
    fill = like.tape.constant(np.array(excluded, like.dtype))
    return op.Where(allowed, op.CastLike(0.0, like) if added is None else added, fill)


def _attend(
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
    scores = _products(q * _factor(q, scale), k)
    raw = scores
    if softcap > 0:
        scores = op.Tanh(scores * (1 / softcap)) * softcap
    capped = scores
    nothing = None
    if bias is not None:
        shown = scores + bias
        if masked_rows:
            nothing = op.IsInf(op.ReduceMax(bias, [-1]), detect_positive=0)
            scores = scores + op.Where(nothing, 0, bias)
        else:
            scores = shown
    else:
        shown = scores
    dtype = q.dtype
    if precision is not None:
        scores = scores.astype(precision.numpy())
    p = _softmax(scores, sink)[0].astype(dtype)
    if nothing is not None:
        p = op.Where(nothing, 0, p)
    y = op.MatMul(_group(p, k), v) if _is_grouped(q, k) else op.MatMul(p, v)
    if _is_grouped(q, k):
        y = _ungroup(y, q, size_of(v, [3]))
    elif q.shape is not None and v.shape is not None:
        y = y.with_shape([*q.shape[:3], v.shape[3]])
    return y, p, (raw, capped, shown)


def _factor(q: Tensor, scale: float | None) -> float | Tensor:
    """Returns the factor of the scores, 1/√size by default."""
    if scale is not None:
        return scale
    size = size_of(q, [3])
    if isinstance(size, int):
        return 1 / math.sqrt(size)
    return op.Reciprocal(op.Sqrt(op.CastLike(size, q)))


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns q kᵀ; query heads with the same key head become rows of one product."""
    keys = op.Transpose(k, perm=[0, 1, 3, 2])
    if not _is_grouped(q, k):
        return op.MatMul(q, keys)
    return _ungroup(op.MatMul(_group(q, k), keys), q, size_of(k, [2]))


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    """Whether several query heads share a key head, as far as is known."""
    return q.shape is None or k.shape is None or q.shape[1] != k.shape[1] or None in q.shape[:2]


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns the probabilities of the keys, and of the sink."""
    if sink is None:
        return op.Softmax(scores, axis=-1), None
    last = op.Expand(sink.astype(scores.dtype), op.Shape(op.ReduceMax(scores, [-1])))
    p = op.Softmax(op.Concat(scores, last, axis=-1), axis=-1)
    return p[..., :-1], p[..., -1:]


def _group(x: Tensor, k: Tensor) -> Tensor:
    """Stacks the rows of the heads of x that share a head of k."""
    width = size_of(x, [3])
    return op.Reshape(x, [0, size_of(k, [1]), -1, width])


def _ungroup(x: Tensor, q: Tensor, width: Size) -> Tensor:
    sizes = [0, size_of(q, [1]), size_of(q, [2]), width]
    shape = [*(q.shape or (None,) * 4)[:3], width if isinstance(width, int) else None]
    return op.Reshape(x, sizes).with_shape(shape)


# onnxruntime's operators


@definition(
    "MultiHeadAttention",
    domain=MICROSOFT,
    limits="no past_sequence_length, no cache_indirection, no bias with packed keys; a mask of "
    "rank 1 must be one length per sample; no output qk",
)
def multi_head_attention(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    cache_indirection: Tensor | None = None,
    *,
    num_heads: int,
    **attributes: Unpack[Scoring],
) -> Cotangents:
    if past_sequence_length is not None or cache_indirection is not None:
        raise UnsupportedError(
            "no gradient with past_sequence_length or cache_indirection; use a concatenated cache"
        )
    if bias is not None and (key is None or value is None):
        raise UnsupportedError(
            "no gradient for bias with packed queries, keys and values; remove the bias, or use "
            "separate inputs"
        )
    if key is None:
        q, k, v = (_unpack(query, index) for index in range(3))
    elif value is None:
        q = _heads(query, num_heads)
        k, v = (_unpack(key, index) for index in range(2))
    else:
        if bias is not None:
            width = size_of(query, [2])
            end = op.Add(width, width) if isinstance(width, Tensor) else 2 * width
            query = query + bias[:width]
            if key.ndim == 3:
                key, value = key + bias[width:end], value + bias[end:]
        q = _heads(query, num_heads)
        k, v = (x if x.ndim == 4 else _heads(x, num_heads) for x in (key, value))
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    return _masked_attention(q, k, v, key_padding_mask, attention_bias, **attributes), k, v


def _unpack(packed: Tensor, index: int) -> Tensor:
    """Returns the queries, keys or values in (batch, length, head, which, size)."""
    return op.Transpose(packed[:, :, :, index], perm=[0, 2, 1, 3])


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    added: Tensor | None,
    **attributes: Unpack[Scoring],
) -> Tensor:
    """Returns attention in which masked scores are replaced with a finite number."""
    length, total = size_of(q, [2]), size_of(k, [2])
    bias = None
    if mask is not None:
        if mask.ndim == 1:
            sizes = [x.shape[0] if x.shape is not None else None for x in (mask, q)]
            if all(isinstance(size, int) for size in sizes) and sizes[0] != sizes[1]:
                raise UnsupportedError(
                    f"no gradient for a mask of shape {mask.shape}; use one length per sample, or "
                    "shape (batch, keys), (batch, queries, keys) or (batch, 1, queries, keys)"
                )
            seen = op.Less(index_range(total, q), op.Reshape(mask.astype(np.int64), [-1, 1, 1, 1]))
        else:
            seen = op.Unsqueeze(op.Greater(mask, 0), {2: [1, 2], 3: [1], 4: []}[mask.ndim])
        masked_score = op.CastLike(attributes.get("mask_filter_value", -10000.0), q)
        bias = op.Where(seen, op.CastLike(0.0, q), masked_score)
    if attributes.get("unidirectional"):
        window = _window(q, length, total, _minus(total, length), -1, 0)
        # The least finite number, because the other scores of a row may all be masked.
        bias = _bias(q, window, bias, float(ir.DataType.from_numpy(q.dtype).min))
    if added is not None:
        bias = added if bias is None else bias + added
    scale = attributes.get("scale") or None  # 0 selects the default
    y, _, _ = _attend(q, k, v, bias, scale=scale, masked_rows=False)
    return _merge(y)


@definition(
    "Attention",
    domain=MICROSOFT,
    limits="no do_rotary, no past in a shared buffer; a mask of rank 1 must be one length "
    "per sample; the output present needs keys and values of equal size",
)
def packed_attention(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    mask_index: Tensor | None = None,
    past: Tensor | None = None,
    attention_bias: Tensor | None = None,
    past_sequence_length: Tensor | None = None,
    *,
    num_heads: int,
    do_rotary: int = 0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] | None = None,
    rotary_embedding_dim: int = 0,
    **attributes: Unpack[Scoring],
) -> Cotangents:
    if do_rotary or past_present_share_buffer or past_sequence_length is not None:
        raise UnsupportedError(
            f"no gradient for do_rotary={do_rotary} with "
            f"past_present_share_buffer={past_present_share_buffer}; use 0 for both, and a "
            "concatenated cache"
        )
    projected = op.MatMul(x, weights)
    if bias is not None:
        projected = projected + bias
    return attend_projected(
        *(projected, mask_index, past, attention_bias, qkv_hidden_sizes),
        num_heads=num_heads,
        **attributes,
    )


def attend_projected(
    projected: Tensor,
    mask_index: Tensor | None,
    past: Tensor | None,
    attention_bias: Tensor | None,
    qkv_hidden_sizes: Sequence[int] | None = None,
    *,
    num_heads: int,
    **attributes: Unpack[Scoring],
) -> tuple[Tensor, Tensor | None]:
    """Applies com.microsoft::Attention after its projection; returns the output and the present.

    Args:
        projected: The concatenated queries, keys and values, (batch, length, hidden).
        mask_index: See the operator.
        past: See the operator.
        attention_bias: See the operator.
        qkv_hidden_sizes: See the operator.
        num_heads: See the operator.
        **attributes: See the operator.
    """
    if qkv_hidden_sizes:
        parts = op.Split(projected, list(qkv_hidden_sizes), axis=-1)
    else:
        parts = op.Split(projected, num_outputs=3, axis=-1, outputs=3)
    q, k, v = (_heads(part, num_heads) for part in parts)
    if past is not None:
        k, v = op.Concat(past[0], k, axis=2), op.Concat(past[1], v, axis=2)
    y = _masked_attention(q, k, v, mask_index, attention_bias, **attributes)
    same = not qkv_hidden_sizes or qkv_hidden_sizes[1] == qkv_hidden_sizes[2]
    present = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0) if same else None
    return y, present


class GroupQueryAttributes(TypedDict, total=False):
    """The attributes of GroupQueryAttention."""

    num_heads: int
    kv_num_heads: int
    causal: int
    do_rotary: int
    k_quant_type: str
    kv_cache_bit_width: int
    local_window_size: int
    k_norm_epsilon: float
    q_norm_epsilon: float
    qk_norm_epsilon: float
    qk_output: int
    rotary_interleaved: int
    scale: float
    sliding_window_cache: int
    smooth_softmax: int
    softcap: float
    v_quant_type: str


_OPTIONAL_INPUTS = 17
"""The number of inputs of GroupQueryAttention."""

_Q_NORM = 14
"""The index of its input q_norm_weight."""


def _is_kept(node: ir.Node) -> bool:
    """Whether the forward pass keeps GroupQueryAttention.

    The CPU has no kernel that normalizes queries, and a sliding cache must not be empty there.
    """
    slides = node.attributes.get_int("sliding_window_cache", 0)
    return not slides and all(value is None for value in node.inputs[_Q_NORM:])


@dataclass(frozen=True)
class _Grouped:
    """The operands of GroupQueryAttention, after rotation and the cache.

    Attributes:
        q: Queries (batch, head, length, size).
        k: All keys; the number of heads divides that of the queries.
        v: All values.
        seen: The number of keys that exist, (batch, 1, 1, 1).
        offset: The position of the first query among the keys, for all samples or for each.
        places: The positions of the keys of a sliding cache, if there is one.
        presents: The outputs for the cache.
        left: The number of keys to the left of a query; -1 for no limit.
        causal: Whether a query attends only to keys up to its own.
        bias: The bias of the scores (batch or 1, head or 1, queries, keys).
        sink: The score of a key without value, (1, head, 1, 1) or (1, 1, 1, 1).
        scale: The factor of the scores.
        softcap: The limit of the scores before the bias is added; 0 for none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor
    offset: Size
    places: Tensor | None
    presents: tuple[Tensor, ...]
    left: int
    causal: bool
    bias: Tensor | None
    sink: Tensor | None
    scale: float | None
    softcap: float

    @classmethod
    def of(cls, given: Sequence[Tensor | None], attributes: GroupQueryAttributes) -> _Grouped:
        """Emits the operands from the inputs of the operator."""
        inputs = (*given, *(None,) * (_OPTIONAL_INPUTS - len(given)))
        query, key, value, past_key, past_value, seqlens, total, cos, sin, *others = inputs
        position_ids, attention_bias, head_sink, _, _, q_norm, k_norm, _ = others
        query, seqlens, total = (cast(Tensor, x) for x in (query, seqlens, total))
        _refuse_caches(inputs, attributes)
        slides = attributes.get("sliding_window_cache", 0)
        heads, pairs = attributes["num_heads"], attributes["kv_num_heads"]
        if key is None or value is None:  # packed queries, keys and values
            together = _heads(query, heads + 2 * pairs)
            q, k, v = op.Split(together, [heads, pairs, pairs], axis=1)
        else:
            q, k, v = _heads(query, heads), _heads(key, pairs), _heads(value, pairs)
        if q_norm is not None and k_norm is not None:
            both = attributes.get("qk_norm_epsilon", 1e-6)
            q = _normalize(q, q_norm, attributes.get("q_norm_epsilon") or both)
            k = _normalize(k, k_norm, attributes.get("k_norm_epsilon") or both)
        length = size_of(q, [2])
        seen = op.Add(op.Reshape(seqlens.astype(np.int64), [-1, 1, 1, 1]), 1)
        offset: Size = 0
        longest = op.Reshape(total.astype(np.int64), [])
        cached = None if past_key is None or past_value is None else size_of(past_key, [2])
        if isinstance(cached, Tensor) or cached:
            # The past of a sample has the seen keys without the new ones; a prompt has no past.
            offset = op.Where(op.Equal(longest, length), 0, op.Sub(seen, length))
        if attributes.get("do_rotary"):
            if position_ids is None:
                position_ids = op.Unsqueeze(index_range(length, q), [0])
                if isinstance(offset, Tensor):
                    position_ids = op.Add(position_ids, op.Reshape(offset, [-1, 1]))
            rotated = cos.shape[1] if cos is not None and cos.shape else None
            count = 2 * rotated if isinstance(rotated, int) else 0
            cos, sin = op.Gather(cos, position_ids), op.Gather(sin, position_ids)
            interleaved = attributes.get("rotary_interleaved", 0)
            q, k = (_rotate(x, cos, sin, [], interleaved, count) for x in (q, k))
        sink = head_sink if head_sink is None else op.Reshape(head_sink, [1, -1, 1, 1])
        if sink is None and attributes.get("smooth_softmax", -1) > 0:
            sink = op.CastLike(np.zeros((1, 1, 1, 1), np.float32), q)
        window = attributes.get("local_window_size", -1)
        places: Tensor | None = None
        presents: tuple[Tensor, ...] = ()
        if past_key is not None and past_value is not None and isinstance(offset, Tensor):
            if slides:
                pasts = past_key, past_value, offset
                (k, v), places, presents = _after_window(*pasts, k, v, seen, window)
            else:
                both_pasts = (past_key, k), (past_value, v)
                k, v = (_append(past, new, offset, longest) for past, new in both_pasts)
        return cls(
            *(q, k, v, seen, offset, places, presents or (k, v)),
            left=window - 1 if window > 0 else -1,
            causal=bool(attributes.get("causal", 1)),
            bias=attention_bias,
            sink=sink,
            scale=attributes.get("scale") or None,
            softcap=attributes.get("softcap", 0.0),
        )

    def inside(self, x: Tensor) -> _Grouped:
        """Returns the operands for use in the graph of x, which are some of the queries."""
        k, v, seen = (inside(x, operand) for operand in (self.k, self.v, self.seen))
        offset = self.offset if isinstance(self.offset, int) else inside(x, self.offset)
        sink = None if self.sink is None else inside(x, self.sink)
        return replace(self, q=x, k=k, v=v, seen=seen, offset=offset, sink=sink)

    def allowed(self, queries: Size, first: Size, keys: Size) -> Tensor:
        """Returns which of the first keys the queries attend to.

        Args:
            queries: The number of queries.
            first: The position of the first of them.
            keys: The number of keys.
        """
        x = self.q
        exist = op.Less(index_range(keys, x), self.seen)
        if self.places is None:
            right = 0 if self.causal else -1
            return cast(Tensor, _both(_window(x, queries, keys, first, self.left, right), exist))
        at, own = self.places, op.Add(op.Unsqueeze(index_range(queries, x), [1]), first)
        near = op.And(op.LessOrEqual(at, own), op.GreaterOrEqual(at, op.Sub(own, self.left)))
        return op.And(near, op.And(op.GreaterOrEqual(at, 0), op.Less(at, self.seen)))


def _without_padding(y: Tensor, *inputs: Tensor | None, **attributes: object) -> Tensor:
    """Replaces the outputs of padding, which GroupQueryAttention leaves undefined, by zeros.

    Only a prompt has padding, at its end: the tokens after a past all count.
    """
    past, seqlens, total = inputs[3], cast(Tensor, inputs[5]), cast(Tensor, inputs[6])
    length = size_of(y, [1])
    places = op.Unsqueeze(index_range(length, y), [1])
    exists = op.Less(places, op.Add(op.Reshape(seqlens.astype(np.int64), [-1, 1, 1]), 1))
    if past is not None:
        is_prompt = op.Equal(op.Reshape(total.astype(np.int64), []), length)
        exists = op.Or(exists, op.Not(is_prompt))
    if y.shape is not None:
        exists = exists.with_shape([*y.shape[:2], 1])
    return op.Where(exists, y, op.CastLike(0.0, y)).with_shape_of(y)


def _group_query_gradient(
    rules: Rules,
    g: Tensor | Sequence[Tensor | None],
    y: Tensor | Sequence[Tensor | None],
    *inputs: Tensor | None,
    **attributes: Unpack[GroupQueryAttributes],
) -> Cotangents:
    """Returns the cotangents of the inputs of a node that the forward pass keeps."""
    g, y = ((x,) if isinstance(x, Tensor) else x for x in (g, y))  # of one output, or several
    first = cast(Tensor, y[0])
    tape, start = first.tape, len(first.tape.nodes)
    at = _Grouped.of(inputs, attributes)
    nodes = tape.nodes[start:]
    seeds: dict[ir.Value, Tensor] = {}
    if g[0] is not None:
        count = attributes["num_heads"]
        # The forward pass continues with the output without padding, so that it is kept anyway.
        readers = (use.node for use in first.value.uses() if use.node.op_type == "Where")
        out = next((tape.tensor(node.outputs[0]) for node in readers), None)
        known = _without_padding(first, *inputs) if out is None else out
        dy, y0 = (
            _heads(x, count).with_shape_of(at.q) for x in (_without_padding(g[0], *inputs), known)
        )
        found = _gradients_in_blocks(dy, y0, at)
        operands = at.q, at.k, at.v, at.bias, at.sink
        pairs = zip(operands, found, strict=True)
        seeds = {x.value: dx for x, dx in pairs if x is not None and dx is not None}
    for x, dx in zip((at.k, at.v), g[1:3], strict=False):
        if dx is not None:
            seeds[x.value] = seeds[x.value] + dx if x.value in seeds else dx
    values = [None if x is None else x.value for x in inputs]
    wanted = [x if x is not None and rules.carries_cotangent(x) else None for x in values]
    given = [x for x in values if x is not None]
    return backward_to_inputs(
        tape, nodes, seeds, wanted, rules, cut=given, asked_by="GroupQueryAttention"
    )


@definition(
    "GroupQueryAttention",
    domain=MICROSOFT,
    keep=_is_kept,
    after=_without_padding,
    gradient=_group_query_gradient,
    limits="outputs of padding are zeros; no quantized cache, no query_seqlens, no output "
    "output_qk; with sliding_window_cache=1, no attention_bias",
)
def group_query_attention(
    *inputs: Tensor | None, **attributes: Unpack[GroupQueryAttributes]
) -> Cotangents:
    at = _Grouped.of(inputs, attributes)
    allowed = at.allowed(size_of(at.q, [2]), at.offset, size_of(at.k, [2]))
    bias = _bias(at.q, allowed, at.bias)
    y, _, _ = _attend(at.q, at.k, at.v, bias, scale=at.scale, softcap=at.softcap, sink=at.sink)
    return _without_padding(_merge(y), *inputs), *at.presents


def _refuse_caches(inputs: Sequence[Tensor | None], attributes: GroupQueryAttributes) -> None:
    """Refuses each input and attribute of a quantized or padded cache that is present."""
    *_, attention_bias, _, k_scale, v_scale, _, _, query_seqlens = inputs
    settings = {
        name: given
        for name in ("k_quant_type", "v_quant_type", "kv_cache_bit_width")
        if (given := attributes.get(name)) not in (None, 0, "NONE")
    }
    named = {"k_scale": k_scale, "v_scale": v_scale, "query_seqlens": query_seqlens}
    shown = [f"{name}={given!r}" for name, given in settings.items()]
    shown += [f"input {name}" for name, given in named.items() if given is not None]
    if shown:
        raise UnsupportedError(
            f"no gradient for {shown[0]}; use a cache of floating-point numbers without padding"
        )
    if attributes.get("sliding_window_cache") and attention_bias is not None:
        raise UnsupportedError(
            "no gradient for input attention_bias with sliding_window_cache=1; use one without the "
            "other"
        )


BLOCK = 128
"""The largest number of queries whose scores exist together in `_gradients_in_blocks`."""


def _gradients_in_blocks(
    dy: Tensor, y: Tensor, at: _Grouped
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the cotangents of queries, keys, values, the bias and the sink.

    With scores s = scale · q kᵀ + bias, probabilities p = softmax(s) and outputs y = p v:

        dv = pᵀ dy,  ds = p (dy vᵀ - Σ dy y),  dq = scale · ds k,  dk = scale · dsᵀ q

    A Scan computes the scores of a block of queries again, so that memory grows linearly with their
    number. With a causal window, a block reads only the keys up to its end.

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

    def block(*given: Tensor | None) -> Sequence[Tensor]:
        *sums, q, dy, weighted, start, bias = given
        q, dy, weighted, start = (cast(Tensor, x) for x in (q, dy, weighted, start))
        here = at.inside(q)
        keys = size_of(here.k, [2])
        if at.causal:
            reach = op.Add(op.Add(start, inside(q, rows)), inside(q, furthest))
            keys = op.Min(reach, keys)
        end = op.Reshape(op.Add(keys, q.tape.constant(np.array(0))), [1])
        k, v = (op.Slice(x, [0], end, [2]) for x in (here.k, here.v))
        allowed = here.allowed(inside(q, rows), op.Add(start, here.offset), keys)
        shown = None if bias is None else op.Slice(bias, [0], end, [3])
        # A finite number, because no key may be allowed for a row of padding.
        lowest = float(ir.DataType.from_numpy(q.dtype).min) / 2
        factor = _factor(q, at.scale)
        raw = _products(q * factor, k)
        slope = None
        if at.softcap > 0:
            capped = op.Tanh(raw * (1 / at.softcap))
            raw, slope = capped * at.softcap, 1 - capped * capped
        p, p_sink = _softmax(raw + cast(Tensor, _bias(q, allowed, shown, lowest)), here.sink)
        ds = p * (_products(dy, v) - weighted)
        change = None
        if bias is not None:
            change = pad_axes(ds, [0, op.Sub(size_of(bias, [3]), keys)], None, [3])
            change = unbroadcast(change, bias)
        ds = ds if slope is None else ds * slope
        parts = [_group(x, k).mT @ _group(z, k) for x, z in ((ds, q * factor), (p, dy))]
        missing = op.Sub(size_of(here.k, [2]), keys)
        totals = [
            cast(Tensor, total) + pad_axes(part, [0, missing], None, [2])
            for total, part in zip(sums, parts, strict=False)
        ]
        if p_sink is not None and here.sink is not None:
            totals.append(cast(Tensor, sums[2]) - unbroadcast(p_sink * weighted, here.sink))
        dq = _ungroup(_group(ds, k) @ k, q, size_of(q, [3])) * factor
        return [*totals, dq, *([] if change is None else [change])]

    operands = [at.k, at.v, *([] if at.sink is None else [at.sink])]
    slices = [cut(q), cut(dy), cut(weighted), starts, None if at.bias is None else cut(at.bias)]
    found = scan(block, [zeros_like(x) for x in operands], slices, backwards=False)
    dk, dv, *others = found
    dsink = None if at.sink is None else others.pop(0)
    dbias = None if at.bias is None else joined(others[1], at.bias)
    return joined(others[0], q), dk, dv, dbias, dsink


def _normalize(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Divides each head by its root mean square, and scales."""
    wide = x.astype(wide_dtype(x))
    rms = op.Sqrt(op.ReduceMean(wide * wide, [-1]) + epsilon)
    return (wide / rms).astype(x.dtype) * scale


def _after_window(
    past_key: Tensor,
    past_value: Tensor,
    used: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    window: int,
) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, ...]]:
    """Returns keys and values after those of a sliding cache, their positions, and the new cache.

    The positions of unused places are negative.

    Args:
        past_key: The cached keys, (batch, head, capacity, size); oldest first.
        past_value: The cached values.
        used: The number of tokens before the new ones, (batch, 1, 1, 1) or ().
        k: The new keys.
        v: The new values.
        seen: The number of tokens with the new ones, (batch, 1, 1, 1).
        window: The number of keys that a query attends to.
    """
    capacity = op.Reshape(size_of(past_key, [2]), [])
    used = op.Reshape(used, [-1, 1, 1, 1])
    removed = _evicted(used, capacity, window)
    kept = op.Sub(used, removed)
    count = op.Reshape(op.ReduceMax(kept, keepdims=0), [1])
    old = op.Range(0, op.Reshape(count, []), 1)
    places = op.Where(op.Less(old, kept), op.Add(old, removed), -1)
    added = op.Add(index_range(size_of(k, [2]), k), used)
    k, v = (
        op.Concat(op.Slice(past, [0], count, [2]), x, axis=2)
        for past, x in ((past_key, k), (past_value, v))
    )
    # The cache that follows: its unused places have any content.
    wanted = op.Add(op.Range(0, capacity, 1), _evicted(seen, capacity, window))
    index = op.Where(
        op.Less(wanted, used), op.Sub(wanted, removed), op.Add(op.Sub(wanted, used), count)
    )
    index = op.Min(op.Max(index, 0), op.Sub(size_of(k, [2]), 1))
    index = op.Transpose(index, perm=[0, 1, 3, 2])
    index = op.Expand(index, [1, size_of(k, [1]), 1, size_of(k, [3])])
    presents = tuple(op.GatherElements(x, index, axis=2) for x in (k, v))
    return (k, v), op.Concat(places, added, axis=3), presents


def _evicted(tokens: Tensor, capacity: Tensor, window: int) -> Tensor:
    """Returns how many of the tokens a sliding cache has removed: as many at a time as fit."""
    spare = op.Max(op.Sub(capacity, window - 1), 1)
    excess = op.Max(op.Sub(tokens, capacity), 0)
    return op.Mul(spare, op.Div(op.Add(excess, op.Sub(spare, 1)), spare))


def _append(past: Tensor, new: Tensor, used: Tensor, longest: Tensor) -> Tensor:
    """Writes new keys or values after the used part of a past, whose length depends on the sample.

    Args:
        past: The past, (batch, head, length, size).
        new: The new keys or values, with another length.
        used: The length of the used part, (batch, 1, 1, 1) or ().
        longest: The minimum length of the result; that of the past may be greater.
    """
    capacity, length = size_of(past, [2]), size_of(new, [2])
    total = op.Max(longest, capacity)
    places = op.Unsqueeze(index_range(total, new), [0, 1, 3])
    is_past, exists = op.Less(places, used), op.Less(places, op.Add(used, length))
    index = op.Where(is_past, places, op.Add(op.Sub(places, used), capacity))
    joined = op.Concat(past, new, axis=2)
    sizes = [size_of(new, [0]), size_of(new, [1]), total, size_of(new, [3])]
    index = op.Expand(op.Where(exists, index, 0), sizes)
    y = op.Where(exists, op.GatherElements(joined, index, axis=2), 0)
    return y if new.shape is None else y.with_shape([*new.shape[:2], None, new.shape[3]])


# Rotary embeddings


@definition("RotaryEmbedding")
def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Cotangents:
    if position_ids is not None:
        cos, sin = op.Gather(cos, position_ids), op.Gather(sin, position_ids)
    split = [0, 0, num_heads, -1]
    return _rotate(x, cos, sin, split, interleaved, rotary_embedding_dim)


@definition("RotaryEmbedding", domain=MICROSOFT, limits="no packed batching; only scale=1")
def rotary_embedding_at(
    x: Tensor,
    position_ids: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Cotangents:
    if is_packed_batching or scale != 1:
        raise UnsupportedError(
            f"no gradient for is_packed_batching={is_packed_batching} with scale={scale}; use 0 "
            "and 1"
        )
    if position_ids.ndim == 1:  # the position of the first token; the same for each sample
        length = size_of(x, [1 if x.ndim == 3 else 2])
        position_ids = op.Unsqueeze(op.Add(index_range(length, x), position_ids), [0])
    size = size_of(cos, [1])
    width = op.Add(size, size) if isinstance(size, Tensor) else 2 * size
    split = [0, 0, num_heads, -1] if num_heads else [0, 0, -1, width]
    rotated = rotary_embedding_dim if num_heads else 0
    return _rotate(
        x, op.Gather(cos, position_ids), op.Gather(sin, position_ids), split, interleaved, rotated
    )


def _rotate(
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
