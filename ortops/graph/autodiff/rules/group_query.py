"""The definition of GroupQueryAttention, and its gradient in blocks of queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack, cast

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.backward import backward_to_inputs
from ortops.graph.autodiff.registry import Cotangents, Rules
from ortops.graph.autodiff.rules._attention import (
    Size,
    attend,
    bias_of,
    heads_of,
    merged,
    rotate,
)
from ortops.graph.autodiff.rules._blocks import Operands, gradients_in_blocks
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.table import definition
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.shapes import index_range, size_of
from ortops.graph.tensor import Tensor, op


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
class _Grouped(Operands):
    """The operands of GroupQueryAttention, after rotation and the cache.

    Attributes:
        presents: The outputs for the cache.
    """

    presents: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, given: Sequence[Tensor | None], attributes: GroupQueryAttributes) -> _Grouped:
        """Emits the operands from the inputs of the operator."""
        inputs: tuple[Any, ...] = (*given, *(None,) * (_OPTIONAL_INPUTS - len(given)))
        query, key, value, past_key, past_value, seqlens, total, cos, sin, *others = inputs
        position_ids, attention_bias, head_sink, _, _, q_norm, k_norm, _ = others
        _refuse_caches(inputs, attributes)
        heads, pairs = attributes["num_heads"], attributes["kv_num_heads"]
        if key is None or value is None:  # packed queries, keys and values
            together = heads_of(query, heads + 2 * pairs)
            q, k, v = op.Split(together, [heads, pairs, pairs], axis=1)
        else:
            q, k, v = heads_of(query, heads), heads_of(key, pairs), heads_of(value, pairs)
        if q_norm is not None and k_norm is not None:
            epsilon = attributes.get("qk_norm_epsilon", 1e-6)
            q = _normalize(q, q_norm, attributes.get("q_norm_epsilon") or epsilon)
            k = _normalize(k, k_norm, attributes.get("k_norm_epsilon") or epsilon)
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
            q, k = _rotated(q, k, cos, sin, position_ids, attributes.get("rotary_interleaved", 0))
        sink = head_sink if head_sink is None else op.Reshape(head_sink, [1, -1, 1, 1])
        if sink is None and attributes.get("smooth_softmax", -1) > 0:
            sink = op.CastLike(np.zeros((1, 1, 1, 1), np.float32), q)
        size = attributes.get("local_window_size", -1)
        places: Tensor | None = None
        presents: tuple[Tensor, ...] = ()
        if past_key is not None and past_value is not None and isinstance(offset, Tensor):
            if attributes.get("sliding_window_cache"):
                pasts = past_key, past_value, offset
                (k, v), places, presents = _after_window(*pasts, k, v, seen, size)
            else:
                both_pasts = (past_key, k), (past_value, v)
                k, v = (_append(past, new, offset, longest) for past, new in both_pasts)
        return cls(
            *(q, k, v, seen, offset, places),
            presents=presents or (k, v),
            left=size - 1 if size > 0 else -1,
            causal=bool(attributes.get("causal", 1)),
            bias=attention_bias,
            sink=sink,
            scale=attributes.get("scale") or None,
            softcap=attributes.get("softcap", 0.0),
        )


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
            heads_of(x, count).with_shape_of(at.q) for x in (_without_padding(g[0], *inputs), known)
        )
        found = gradients_in_blocks(dy, y0, at)
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
    bias = bias_of(at.q, allowed, at.bias)
    y, _, _ = attend(at.q, at.k, at.v, bias, scale=at.scale, softcap=at.softcap, sink=at.sink)
    return _without_padding(merged(y), *inputs), *at.presents


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


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: int
) -> tuple[Tensor, Tensor]:
    """Rotates the features that have an angle."""
    rotated = cos.shape[1] if cos.shape else None
    count = 2 * rotated if isinstance(rotated, int) else 0
    cos, sin = op.Gather(cos, positions), op.Gather(sin, positions)
    q, k = (rotate(x, cos, sin, [], interleaved, count) for x in (q, k))
    return q, k


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
