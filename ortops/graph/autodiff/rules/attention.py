"""Definitions of attention and rotary embeddings, those of ONNX and of onnxruntime.

If a mask excludes all keys of a query, its output is zero, and so are the cotangents that it passes
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._attention import (
    Size,
    attend,
    bias_of,
    both,
    heads_of,
    merged,
    minus,
    rotate,
    window,
)
from ortops.graph.autodiff.rules.table import definition
from ortops.graph.faults import pad_axes
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.shapes import index_range, size_of
from ortops.graph.tensor import Tensor, op


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
        q, k, v = heads_of(q, q_num_heads), heads_of(k, kv_num_heads), heads_of(v, kv_num_heads)
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    length, total = size_of(q, [2]), size_of(k, [2])
    offset: Size = 0
    if past_key is not None:
        offset = size_of(past_key, [2])
    elif nonpad_kv_seqlen is not None:
        offset = op.Sub(op.Reshape(nonpad_kv_seqlen, [-1, 1, 1, 1]), length)
    right = 0 if is_causal else right_window_size
    allowed = window(q, length, total, offset, left_window_size, right)
    if nonpad_kv_seqlen is not None:
        padding = op.Less(index_range(total, q), op.Reshape(nonpad_kv_seqlen, [-1, 1, 1, 1]))
        allowed = both(allowed, padding)
    added = None
    if attn_mask is not None:
        is_bool = attn_mask.dtype == np.bool_
        last = size_of(attn_mask, [-1])
        if isinstance(last, Tensor) or isinstance(total, Tensor) or last != total:
            fill = q.tape.constant(np.array(False if is_bool else -np.inf, attn_mask.dtype))
            attn_mask = pad_axes(attn_mask, [0, minus(total, last)], fill, [-1])
        if is_bool:
            allowed = both(allowed, attn_mask)
        else:
            added = attn_mask
    # With a causal window alone, each query can attend to the key at its own position.
    certain = attn_mask is None and nonpad_kv_seqlen is None and left_window_size < 0
    bias = bias_of(q, allowed, added)
    y, probabilities, stages = attend(
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
    return (merged(y) if flat else y), k, v, shown


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
        q = heads_of(query, num_heads)
        k, v = (_unpack(key, index) for index in range(2))
    else:
        if bias is not None:
            width = size_of(query, [2])
            end = op.Add(width, width) if isinstance(width, Tensor) else 2 * width
            query = query + bias[:width]
            if key.ndim == 3:
                key, value = key + bias[width:end], value + bias[end:]
        q = heads_of(query, num_heads)
        k, v = (x if x.ndim == 4 else heads_of(x, num_heads) for x in (key, value))
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
        causal = window(q, length, total, minus(total, length), -1, 0)
        # The least finite number, because the other scores of a row may all be masked.
        bias = bias_of(q, causal, bias, float(ir.DataType.from_numpy(q.dtype).min))
    if added is not None:
        bias = added if bias is None else bias + added
    scale = attributes.get("scale") or None  # 0 selects the default
    y, _, _ = attend(q, k, v, bias, scale=scale, masked_rows=False)
    return merged(y)


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
    q, k, v = (heads_of(part, num_heads) for part in parts)
    if past is not None:
        k, v = op.Concat(past[0], k, axis=2), op.Concat(past[1], v, axis=2)
    y = _masked_attention(q, k, v, mask_index, attention_bias, **attributes)
    same = not qkv_hidden_sizes or qkv_hidden_sizes[1] == qkv_hidden_sizes[2]
    present = op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0) if same else None
    return y, present


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
    return rotate(x, cos, sin, split, interleaved, rotary_embedding_dim)


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
    return rotate(
        x, op.Gather(cos, position_ids), op.Gather(sin, position_ids), split, interleaved, rotated
    )
