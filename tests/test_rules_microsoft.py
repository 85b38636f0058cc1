"""onnxruntime's fused operators against the standard operators that they stand for.

onnx knows nothing of them, and onnxruntime runs them in float32 only. So the forward values of what
is differentiated are compared with onnxruntime's fused kernel, and the gradient, in float32, with
differences in float64 of an equivalent that is written here in numpy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick, without_gradient
from domain_models import DOMAIN, model, node, value
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state
from running import optimized, run

import ortops
from models.lenet import lenet
from models.resnet import resnet
from models.transformer import transformer
from ortops.graph.autodiff.registry import USER

MICROSOFT = "com.microsoft"
SEED = 31


@dataclass(frozen=True)
class Fused:
    """One fused operator, its inputs, and its outputs as a numpy function of them.

    Attributes:
        op: The operator.
        inputs: Its inputs; None where one is absent. Floating-point ones are differentiated.
        function: What it computes.
        attributes: Its attributes.
        outputs: How many outputs the node has, or the indices of those that it has.
        domain: The operator's domain.
        name: What tells the case from others of the operator.
        orders: Up to which order derivatives are checked.
        kernel: Whether onnxruntime runs the operator on CPUs.
        quick: Whether the quick suite has it; see `checked.quick`.
    """

    op: str
    inputs: Sequence[np.ndarray | None]
    function: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | Sequence[int] = 1
    domain: str = MICROSOFT
    name: str = ""
    orders: int = 2
    kernel: bool = True
    quick: bool = True

    def __str__(self) -> str:
        return f"{self.op}-{self.name}" if self.name else self.op

    @property
    def differentiated(self) -> list[int]:
        """The indices of the inputs whose gradient is checked."""
        return [i for i, a in enumerate(self.inputs) if a is not None and a.dtype.kind == "f"]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((SEED, seed)).standard_normal(shape)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def gelu(x):
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def fast_gelu(x, bias=0.0):
    x = x + bias
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def swap(x):
    return np.swapaxes(x, -1, -2)


def layer_norm(x, gamma, beta=0.0, epsilon=1e-12):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * gamma + beta


def rms_norm(x, gamma, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma


def skip_layer_norm(x, skip, gamma, beta=0.0, bias=0.0, *, epsilon=1e-12):
    total = x + skip + bias
    return layer_norm(total, gamma, 0.0 if beta is None else beta, epsilon), None, None, total


def skip_rms_norm(x, skip, gamma, bias=0.0, *, epsilon=1e-12):
    total = x + skip + bias
    return rms_norm(total, gamma, epsilon), None, None, total


def convolution(x, w, bias=None, z=None):
    """A convolution of a 2-D image with stride 1 and no padding."""
    height, width = x.shape[2] - w.shape[2] + 1, x.shape[3] - w.shape[3] + 1
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    y = np.einsum("nchwij,ocij->nohw", windows, w)
    assert y.shape[2:] == (height, width)
    if bias is not None:
        y = y + bias[:, None, None]
    return y if z is None else y + z


ACTIVATIONS: list[tuple[str, dict[str, Any], list[float], Callable[..., Any]]] = [
    ("Relu", {}, [], lambda x: np.maximum(x, 0)),
    ("Tanh", {}, [], np.tanh),
    ("Sigmoid", {}, [], sigmoid),
    ("LeakyRelu", {"activation_alpha": 0.2}, [0.2], lambda x: np.where(x > 0, x, 0.2 * x)),
    (
        "HardSigmoid",
        {"activation_alpha": 0.3, "activation_beta": 0.4},
        [0.3, 0.4],
        lambda x: np.clip(0.3 * x + 0.4, 0, 1),
    ),
]


def quantized(n: int, k: int, block: int, bits: int, zero: str):
    """Returns inputs of MatMulNBits, and the weights that they stand for."""
    rng = np.random.default_rng((SEED, n, k, bits))
    blocks = -(-k // block)
    numbers = rng.integers(0, 1 << bits, (n, blocks, block))
    scales = rng.uniform(0.05, 0.2, (n, blocks))
    zeros = np.full((n, blocks), 1 << (bits - 1))
    if zero:
        zeros = rng.integers(0, 1 << bits, (n, blocks))

    def pack(rows):
        per = 8 // bits
        rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % per)]).reshape(len(rows), -1, per)
        return (rows << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)

    packed = pack(numbers.reshape(n, -1)).reshape(n, blocks, -1)
    given = None
    if zero == "packed":
        given = pack(zeros)
    elif zero == "float":
        given = zeros.astype(np.float64)

    def function(a, b, scales, zero_points=None, g_idx=None, bias=None):
        float_zeros = zero_points if zero == "float" else zeros
        weights = ((numbers - float_zeros[:, :, None]) * scales[:, :, None]).reshape(n, -1)[:, :k]
        return a @ weights.T + (0 if bias is None else bias)

    return packed, scales, given, function


def nbits(zero: str, bits: int, *, k: int = 32, bias: bool = False) -> Fused:
    packed, scales, given, function = quantized(5, k, 16, bits, zero)
    inputs = [normal(2, 3, k), packed, scales, given]
    if bias:
        inputs += [None, normal(5, seed=4)]
    attributes = {"K": k, "N": 5, "bits": bits, "block_size": 16}
    name = f"{bits}-{zero or 'default'}-{k}-{'bias' if bias else ''}"
    return Fused("MatMulNBits", inputs, function, attributes, name=name)


def split(x, heads):
    return np.moveaxis(x.reshape(*x.shape[:2], heads, -1), 2, 1)


def attend(q, k, v, bias=0.0, scale=None):
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    y = softmax(q @ swap(k) * scale + bias) @ v
    return np.moveaxis(y, 1, 2).reshape(len(y), y.shape[2], -1)


def causal(queries, keys):
    allowed = np.arange(keys) <= np.arange(queries)[:, None] + keys - queries
    return np.where(allowed, 0.0, -np.inf)


def multi_head(q, k, v, bias=None, padding=None, added=None, pk=None, pv=None, **options):
    """Attention with two heads; the padding is what it adds to the scores."""
    if bias is not None:
        q = q + bias[: q.shape[2]]
        if k.ndim == 3:
            k = k + bias[q.shape[2] : 2 * q.shape[2]]
            v = v + bias[2 * q.shape[2] :]
    q = split(q, 2)
    k, v = (x if x.ndim == 4 else split(x, 2) for x in (k, v))
    if pk is not None:
        k, v = np.concatenate([pk, k], 2), np.concatenate([pv, v], 2)
    total = 0.0 if added is None else added
    if options.get("unidirectional"):
        total = total + causal(q.shape[2], k.shape[2])
    if padding is not None:
        if padding.ndim == 1:
            seen = (np.arange(k.shape[2]) < padding[:, None])[:, None, None]
        else:
            seen = padding[:, None, None] if padding.ndim == 2 else padding[:, None]
        total = total + np.where(seen, 0.0, -10000.0)
    return attend(q, k, v, total, options.get("scale")), k, v


def packed_heads(*given):
    """Attention of (batch, length, head, which, size) with itself, or of queries with keys."""
    flat = [np.reshape(x, (*x.shape[:2], -1)) for x in np.moveaxis(given[-1], 3, 0)]
    return multi_head(*given[:-1], *flat)[0]


def heads_cases():
    q, k, v = normal(2, 3, 8), normal(2, 5, 8, seed=1), normal(2, 5, 12, seed=2)
    bias = normal(28, seed=3)
    padding = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], np.int32)
    by_query = np.tril(np.ones((2, 3, 5), np.int32), 1)
    past = [normal(2, 2, 2, 4, seed=5), normal(2, 2, 2, 4, seed=6)]
    key4, value4 = normal(2, 2, 5, 4, seed=7), normal(2, 2, 5, 4, seed=8)
    v8 = normal(2, 5, 8, seed=9)
    rows: list[tuple[str, list[Any], dict[str, Any], Any]] = [
        ("plain", [q, k, v], {}, 1),
        ("scale", [q, k, v], {"scale": 0.4}, 1),
        ("bias", [q, k, v, bias], {}, 1),
        ("padding", [q, k, v, bias, padding], {}, 1),
        ("padding-lengths", [q, k, v, None, np.array([3, 5], np.int32)], {}, 1),
        ("padding-by-query", [q, k, v, None, by_query], {}, 1),
        ("attention-bias", [q, k, v, None, None, normal(1, 2, 3, 5, seed=4)], {}, 1),
        ("attention-bias-1", [q, k, v, None, padding, normal(2, 1, 3, 5, seed=4)], {}, 1),
        ("causal", [q, k[:, :3], v[:, :3]], {"unidirectional": 1}, 1),
        ("past", [q, k, v8, None, None, None, *past], {}, 3),
        (
            "past-causal",
            [q, k[:, :3], v8[:, :3], bias[:24], None, None, *past],
            {"unidirectional": 1},
            3,
        ),
        ("cross-cache", [q, key4, value4, bias[:24]], {}, 1),
    ]
    together = normal(2, 5, 2, 3, 4, seed=10)
    for name, inputs in (("packed", [together]), ("packed-keys", [q, together[:, :, :, 1:]])):
        yield Fused(
            "MultiHeadAttention", inputs, packed_heads, {"num_heads": 2}, name=name, kernel=False
        )
    for name, inputs, attributes, outputs in rows:
        yield Fused(
            "MultiHeadAttention",
            inputs,
            lambda *a, o=attributes: multi_head(*a, **o),
            {"num_heads": 2, **attributes},
            outputs=outputs,
            name=name,
        )


def group_query(
    q, k, v, pk, pv, lengths, total, cos=None, sin=None, positions=None, *others, **options
):
    """Four heads of queries and two of keys and values, of size 16, sample by sample."""
    if k is None:
        q, k, v = np.split(q, [64, 96], axis=-1)
    q, k, v = split(q, 4), split(k, 2), split(v, 2)
    _, sink, _, _, q_scale, k_scale = (*others, *[None] * 6)[:6]
    if q_scale is not None:
        epsilon = options.get("qk_norm_epsilon", 1e-6)
        q = rms_norm(q, q_scale, options.get("q_norm_epsilon", epsilon))
        k = rms_norm(k, k_scale, options.get("k_norm_epsilon", epsilon))
    if sink is None and options.get("smooth_softmax"):
        sink = np.zeros(4)
    length = q.shape[2]
    capacity = 0 if pk is None else pk.shape[2]
    if positions is None:
        positions = np.arange(length) + np.zeros((len(q), 1), int)
        if total != length:
            positions = positions + (lengths[:, None] + 1 - length)
    first = np.zeros(len(q), int) if total == length else lengths + 1 - length
    if cos is not None:
        interleaved = options.get("rotary_interleaved", 0)
        q, k = (rotate(x, positions, cos, sin, interleaved=interleaved) for x in (q, k))
    size = max(int(total), capacity)
    keys, values = (np.zeros((len(q), 2, size, 16)) for _ in range(2))
    outputs = []
    for n, start in enumerate(first):
        for whole, past, new in ((keys, pk, k), (values, pv, v)):
            if start:
                whole[n, :, :start] = past[n, :, :start]
            whole[n, :, start : start + length] = new[n]
        behind = start + np.arange(length)[:, None] - np.arange(size)
        allowed = (behind >= 0) & (behind < options.get("local_window_size", size))
        allowed &= np.arange(size) <= lengths[n]
        scores = q[n] @ swap(np.repeat(keys[n], 2, axis=0)) * options.get("scale", 1 / 4)
        if "softcap" in options:
            scores = options["softcap"] * np.tanh(scores / options["softcap"])
        scores = np.where(allowed, scores, -np.inf)
        if sink is not None:
            scores = np.concatenate([scores, np.tile(sink[:, None, None], (1, length, 1))], -1)
        y = softmax(scores)[..., :size] @ np.repeat(values[n], 2, axis=0)
        outputs.append(y.swapaxes(0, 1).reshape(length, -1))
    return np.stack(outputs), keys, values


def group_query_cases():
    q, k, v = normal(2, 3, 64), normal(2, 3, 32, seed=1), normal(2, 3, 32, seed=2)
    turn = [normal(9, 8, seed=5), normal(9, 8, seed=6)]
    rest = [None, None, np.array([2, 2], np.int32), np.array(3, np.int32)]
    past = [normal(2, 2, 4, 16, seed=7), normal(2, 2, 4, 16, seed=8)]
    # 4 and 2 of the past are used; of a prompt that is shorter, none.
    more = [*past, np.array([6, 4], np.int32), np.array(7, np.int32)]
    one = [x[:, :1] for x in (q, k, v)]
    decoding = [*past, np.array([4, 2], np.int32), np.array(5, np.int32)]
    prompt = [*past, np.array([2, 2], np.int32), np.array(3, np.int32)]
    positions = np.array([[5], [3]], np.int64)
    sink, scales = normal(4, seed=9), [1 + normal(16, seed=10), 1 - normal(16, seed=11)]
    rows: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("plain", [q, k, v, *rest], {}),
        ("packed", [np.concatenate([q, k, v], -1), None, None, *rest], {}),
        ("scale-cap", [q, k, v, *rest], {"scale": 0.2, "softcap": 0.5}),
        ("window", [q, k, v, *rest], {"local_window_size": 2}),
        ("rotary", [q, k, v, *rest, *turn], {"do_rotary": 1}),
        (
            "interleaved",
            [q, k, v, *rest, *turn],
            {"do_rotary": 1, "rotary_interleaved": 1},
        ),
        ("past", [*one, *decoding], {}),
        ("past-rotary", [*one, *decoding, *turn], {"do_rotary": 1}),
        ("past-positions", [*one, *decoding, *turn, positions], {"do_rotary": 1}),
        ("past-packed", [np.concatenate(one, -1), None, None, *decoding, *turn], {"do_rotary": 1}),
        ("past-window", [*one, *decoding], {"local_window_size": 3, "softcap": 0.5}),
        ("past-several", [*(x[:1] for x in (q, k, v, *more[:3])), more[3]], {}),
        ("past-prompt", [q, k, v, *prompt, *turn], {"do_rotary": 1}),
        ("smooth", [q, k, v, *rest], {"smooth_softmax": 1}),
        ("smooth-past", [*one, *decoding], {"smooth_softmax": 1, "local_window_size": 3}),
        ("sink", [q, k, v, *rest, *[None] * 4, sink], {"softcap": 0.5, "smooth_softmax": 1}),
        ("sink-past", [*one, *decoding, *turn, None, None, sink], {"do_rotary": 1}),
        ("norm", [q, k, v, *rest, *[None] * 7, *scales], {"qk_norm_epsilon": 0.1}),
        (
            "norm-rotary",
            [q, k, v, *rest, *turn, *[None] * 5, *scales],
            {"do_rotary": 1, "q_norm_epsilon": 0.2, "k_norm_epsilon": 0.3},
        ),
    ]
    for name, inputs, attributes in rows:
        yield Fused(
            "GroupQueryAttention",
            inputs,
            lambda *a, o=attributes: group_query(*a, **o),
            {"num_heads": 4, "kv_num_heads": 2, **attributes},
            outputs=3,
            name=name,
            kernel=not name.startswith("norm"),  # onnxruntime has it for GPUs only
        )


def packed(x, w, bias=None, mask=None, past=None, added=None, sizes=(8, 8, 8), **options):
    projected = x @ w + (0 if bias is None else bias)
    q, k, v = np.split(projected, np.cumsum(sizes)[:2], axis=-1)
    pk, pv = (None, None) if past is None else past
    y, k, v = multi_head(q, k, v, None, mask, added, pk, pv, **options)
    return y, np.stack([k, v]) if sizes[1] == sizes[2] else None


def packed_cases():
    x, w, bias = normal(2, 3, 6), normal(6, 24, seed=1) * 0.5, normal(24, seed=2)
    padding = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    past = normal(2, 2, 2, 2, 4, seed=5)
    rows: list[tuple[str, list[Any], dict[str, Any], Any]] = [
        ("plain", [x, w, bias], {}, 1),
        ("padding", [x, w, bias, padding], {}, 1),
        ("lengths", [x, w, bias, np.array([2, 3], np.int32)], {}, 1),
        ("causal", [x, w, bias], {"unidirectional": 1}, 1),
        ("past", [x, w, bias, None, past], {"unidirectional": 1}, 2),
        ("attention-bias", [x, w, bias, None, None, normal(2, 2, 3, 3, seed=4)], {}, 1),
        ("sizes", [x, w, bias], {"qkv_hidden_sizes": [4, 4, 16]}, 1),
    ]
    for name, inputs, attributes, outputs in rows:
        options = {"sizes" if k == "qkv_hidden_sizes" else k: v for k, v in attributes.items()}
        yield Fused(
            "Attention",
            inputs,
            lambda *a, o=options: packed(*a, **o),
            {"num_heads": 2, **attributes},
            outputs=outputs,
            name=name,
        )


def rotate(x, positions, cos, sin, heads=0, rotated=0, interleaved=0):
    flat = x.ndim == 3
    if flat:
        x = split(x, heads or x.shape[2] // (2 * cos.shape[1]))
    if positions.shape == (1,):
        positions = positions + np.arange(x.shape[2])[None]
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    width = rotated or x.shape[3]
    a, b = (
        (x[..., :width:2], x[..., 1:width:2])
        if interleaved
        else (x[..., : width // 2], x[..., width // 2 : width])
    )
    real, imaginary = a * cos - b * sin, a * sin + b * cos
    y = (
        np.stack([real, imaginary], -1).reshape(*x.shape[:3], width)
        if interleaved
        else np.concatenate([real, imaginary], -1)
    )
    y = np.concatenate([y, x[..., width:]], -1)
    return np.moveaxis(y, 1, 2).reshape(len(y), y.shape[2], -1) if flat else y


def rotary_cases():
    cos, sin = normal(7, 4, seed=1), normal(7, 4, seed=2)
    each, first = np.array([[0, 3, 2], [5, 1, 1]]), np.array([2])
    rows: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("rank-4", normal(2, 2, 3, 8), each, {}),
        ("rank-3", normal(2, 3, 16), each, {}),
        ("first", normal(2, 3, 16), first, {"interleaved": 1}),
        ("partial", normal(2, 3, 24), each, {"num_heads": 2, "rotary_embedding_dim": 8}),
    ]
    for name, x, positions, attributes in rows:
        options = {
            {"num_heads": "heads", "rotary_embedding_dim": "rotated"}.get(k, k): v
            for k, v in attributes.items()
        }
        yield Fused(
            "RotaryEmbedding",
            [x, positions, cos, sin],
            lambda *a, o=options: rotate(*a, **o),
            attributes,
            name=name,
        )


def embed(ids, segments, words, places, kinds, gamma, beta, mask=None, positions=None):
    total = words[ids] + places[np.arange(ids.shape[1]) if positions is None else positions]
    if segments is not None:
        total = total + kinds[segments]
    return layer_norm(total, gamma, beta), None, total


def embed_cases():
    ids, segments = np.array([[1, 3, 1], [0, 4, 2]], np.int32), np.array([[0, 0, 1]] * 2, np.int32)
    words, places, kinds = normal(5, 6, seed=1), normal(4, 6, seed=2), normal(2, 6, seed=3)
    rest = [normal(6, seed=4), normal(6, seed=5)]
    yield Fused(
        "EmbedLayerNormalization",
        [ids, segments, words, places, kinds, *rest],
        embed,
        outputs=(0, 2),
    )
    yield Fused(
        "EmbedLayerNormalization",
        [ids, None, words, places, None, *rest, None, np.array([[3, 0, 1], [1, 1, 2]], np.int32)],
        embed,
        outputs=(0, 2),
        name="positions-sum",
    )


def bnb4(kind: int, *, n: int = 3, k: int = 32) -> Fused:
    codes = np.random.default_rng((SEED, kind)).integers(0, 16, n * k)
    if kind:
        quantiles = "-1 -.69619280 -.52507305 -.39491749 -.28444138 -.18477343 -.09105004 0"
        quantiles += " .07958030 .16093020 .24611230 .33791524 .44070983 .56261700 .72295684 1"
        table = np.array(quantiles.split(), float)
    else:
        magnitudes = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
        table = np.concatenate([magnitudes, -magnitudes])

    def function(a, b, absmax):
        weights = (table[codes] * np.repeat(absmax, 16)).reshape(n, k)
        return a @ weights.T

    packed = (codes[::2] << 4 | codes[1::2]).astype(np.uint8)
    absmax = np.random.default_rng(3).uniform(0.5, 2, n * k // 16)
    return Fused(
        "MatMulBnb4",
        [normal(2, 3, k), packed, absmax],
        function,
        {"K": k, "N": n, "block_size": 16, "quant_type": kind},
        name=str(kind),
    )


def gathered(bits: int, zero: bool) -> Fused:
    """A table of 5 rows of 32 numbers in bytes."""
    rng = np.random.default_rng((SEED, bits))
    numbers = rng.integers(0, 1 << bits, (5, 32))
    zeros = rng.integers(0, 1 << bits, (5, 2)) if zero else np.full((5, 2), 1 << (bits - 1))

    def pack(rows):
        per = 8 // bits
        rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % per)]).reshape(len(rows), -1, per)
        return (rows << np.arange(0, 8, bits)).sum(-1).astype(np.uint8)

    def function(data, indices, scales, zero_points=None):
        return ((numbers - np.repeat(zeros, 16, 1)) * np.repeat(scales, 16, 1))[indices]

    given = [pack(numbers), np.array([[1, 0, 3], [1, 4, 4]]), rng.uniform(0.5, 2, (5, 2))]
    return Fused(
        "GatherBlockQuantized",
        [*given, pack(zeros)] if zero else given,
        function,
        {"bits": bits, "block_size": 16},
        name=f"{bits}-{zero}",
    )


def causal_convolution(x, w, bias=0.0, past=None, *, last=False, silu=False, step=1):
    """Convolves each channel along the sequence with what came before; returns that as a state."""
    shape, (channels, _, taps) = x.shape, w.shape
    reach = (taps - 1) * step
    if last:
        x = np.moveaxis(x.reshape(*shape[:2], channels), 1, 2)
        past = None if past is None else np.moveaxis(past.reshape(len(x), reach, channels), 1, 2)
    length = x.shape[2]
    joined = np.concatenate([np.zeros((len(x), channels, reach)) if past is None else past, x], 2)
    y = sum(w[:, 0, j, None] * joined[:, :, j * step : j * step + length] for j in range(taps))
    y = y + np.reshape(bias, (-1, 1))
    y = y * sigmoid(y) if silu else y
    present = joined[:, :, length:]
    if last:
        y, present = (np.moveaxis(a, 1, 2) for a in (y, present))
        y, present = y.reshape(shape), present.reshape(len(x), reach, *shape[2:])
    return y, present


def causal_cases():
    for name, inputs, options in (
        ("plain", [normal(2, 3, 5), normal(3, 1, 4)], {}),
        ("past", [normal(2, 3, 5), normal(3, 1, 3), normal(3), normal(2, 3, 4)],
         {"step": 2, "silu": True}),
        ("short", [normal(2, 3, 1), normal(3, 1, 4), None, normal(2, 3, 3)], {"silu": True}),
        ("last", [normal(2, 5, 3, 2), normal(6, 1, 2), normal(6), normal(2, 1, 3, 2)],
         {"last": True}),
        ("last-new", [normal(2, 5, 6), normal(6, 1, 3)], {"last": True}),
    ):  # fmt: skip
        given = {"dilation": options.get("step", 1), "channels_last": int(options.get("last", 0))}
        given |= {"activation": "silu"} if options.get("silu") else {}

        def function(x, w, bias=None, past=None, options=options):
            return causal_convolution(x, w, 0.0 if bias is None else bias, past, **options)

        yield Fused("CausalConvWithState", inputs, function, given, 2, name=name, kernel=HAS_CAUSAL)


V = normal(6, seed=7)
HAS_CAUSAL = any(
    each.name == "CausalConvWithState"
    for each in onnxruntime_pybind11_state.get_all_operator_schema()
)
"""Older versions of onnxruntime have no such operator."""
X, SKIP = normal(2, 3, 6, seed=8), normal(2, 3, 6, seed=9)
CASES = [
    Fused("Gelu", [X], gelu, orders=3),
    Fused("BiasGelu", [X, V], lambda x, b: gelu(x + b), orders=3),
    Fused("FastGelu", [X], fast_gelu, orders=3),
    Fused("FastGelu", [X, V], fast_gelu, name="bias"),
    Fused("QuickGelu", [X], lambda x: x * sigmoid(1.702 * x), orders=3),
    Fused("QuickGelu", [X], lambda x: x * sigmoid(0.7 * x), {"alpha": 0.7}, name="alpha"),
    Fused("BiasAdd", [X, V, SKIP], lambda x, b, skip: x + b + skip, kernel=False),
    Fused("FusedMatMul", [normal(4, 3), normal(3, 2)], lambda a, b: a @ b),
    Fused("TransposeMatMul", [normal(3, 4), normal(3, 2)], lambda a, b: a.T @ b, {"transA": 1}),
    Fused(
        "FusedMatMulActivation",
        [normal(3, 4), normal(3, 2)],
        lambda a, b: np.tanh(0.5 * a.T @ b),
        {"alpha": 0.5, "transA": 1, "activation": "Tanh"},
        kernel=False,
    ),
    *(
        Fused(
            "FusedMatMul",
            [normal(*((2, 3, 4) if ta else (2, 4, 3))), normal(*((5, 3) if tb else (3, 5)))],
            lambda a, b, ta=ta, tb=tb: 0.5 * ((swap(a) if ta else a) @ (swap(b) if tb else b)),
            {"alpha": 0.5, "transA": ta, "transB": tb},
            name=f"{ta}{tb}",
        )
        for ta in (0, 1)
        for tb in (0, 1)
    ),
    Fused(
        "FusedMatMul",
        [normal(4, 2, 3), normal(3, 2, 5)],
        lambda a, b: np.moveaxis(a, 0, 1) @ np.moveaxis(b, 0, 1),
        {"transBatchA": 1, "transBatchB": 1},
        name="batch",
    ),
    Fused(
        "FusedMatMul",
        [normal(3, 2, 4), normal(5, 2, 3)],
        lambda a, b: swap(np.moveaxis(a, 0, 1)) @ swap(np.moveaxis(b, 0, 1)),
        {"transBatchA": 1, "transBatchB": 1, "transA": 1, "transB": 1},
        name="batch-trans",
    ),
    *(
        Fused(
            "FusedGemm",
            [normal(3, 4), normal(3, 2), normal(2, seed=1)],
            lambda a, b, c, f=f: f(0.5 * a.T @ b + 2 * c),
            {"alpha": 0.5, "beta": 2.0, "transA": 1, "activation": name, **attributes},
            name=name,
        )
        for name, attributes, _, f in ACTIVATIONS
    ),
    Fused(
        "FusedGemm",
        [normal(4, 3), normal(2, 3)],
        lambda a, b: np.maximum(a @ b.T, 0),
        {"transB": 1, "activation": "Relu"},
        name="no-bias",
    ),
    *(
        Fused(
            "FusedConv",
            [normal(2, 3, 5, 4), normal(4, 3, 2, 2), normal(4, seed=1)],
            lambda x, w, b, f=f: f(convolution(x, w, b)),
            {"activation": name, "activation_params": parameters, "kernel_shape": [2, 2]}
            if parameters
            else {"activation": name, "kernel_shape": [2, 2]},
            name=name,
        )
        for name, _, parameters, f in [
            *ACTIVATIONS,
            ("Clip", {}, [-0.5, 1.0], lambda x: np.clip(x, -0.5, 1)),
        ]
    ),
    Fused(
        "FusedConv",
        [normal(2, 3, 5, 4), normal(4, 3, 2, 2), normal(4, seed=1), normal(2, 4, 4, 3, seed=2)],
        lambda x, w, b, z: np.maximum(convolution(x, w, b, z), 0),
        {"activation": "Relu"},
        name="sum",
    ),
    Fused("SkipLayerNormalization", [X, SKIP, V], skip_layer_norm),
    Fused("SkipLayerNormalization", [X, SKIP, V, V + 1], skip_layer_norm, name="beta"),
    Fused(
        "SkipLayerNormalization",
        [X, SKIP[:1], V, V + 1, V - 1],
        lambda *a: skip_layer_norm(*a, epsilon=1e-3),
        {"epsilon": 1e-3},
        outputs=(0, 3),
        name="bias-sum-broadcast",
    ),
    Fused(
        "SkipLayerNormalization",
        [X, SKIP[0], V, None, V - 1],
        lambda *a: skip_layer_norm(*a, epsilon=1e-3),
        {"epsilon": 1e-3},
        outputs=(0, 3),
        name="no-beta",
    ),
    Fused(
        "SimplifiedLayerNormalization",
        [X, V],
        lambda x, s: rms_norm(x, s, 1e-5),
        {"axis": -1, "epsilon": 1e-5, "stash_type": 1},
        domain="",
    ),
    Fused("SkipSimplifiedLayerNormalization", [X, SKIP, V], skip_rms_norm),
    Fused(
        "SkipSimplifiedLayerNormalization",
        [X, SKIP, V, V - 1],
        lambda *a: skip_rms_norm(*a, epsilon=1e-3),
        {"epsilon": 1e-3},
        outputs=(0, 3),
        name="bias-sum",
    ),
    *causal_cases(),
    Fused("Trilu", [normal(2, 4, 3), np.array(1)], np.triu, name="1"),
    Fused("Trilu", [normal(2, 4, 3), np.array(-1)], np.tril, {"upper": 0}, name="lower"),
    Fused("Trilu", [normal(3, 4)], np.triu),
    *heads_cases(),
    *group_query_cases(),
    *packed_cases(),
    *rotary_cases(),
    *embed_cases(),
    *(bnb4(kind) for kind in (0, 1)),
    *(gathered(bits, zero) for bits in (4, 8) for zero in (False, True)),
    nbits("", 4),
    nbits("packed", 4),
    nbits("packed", 4, k=48),
    nbits("float", 4, bias=True),
    nbits("", 8),
    nbits("packed", 8, k=40, bias=True),
    nbits("packed", 2, k=40),
]
CASES = quick(
    CASES,
    """
    Gelu
    BiasGelu
    FastGelu-bias
    QuickGelu
    BiasAdd
    FusedMatMul-batch-trans
    TransposeMatMul
    FusedMatMulActivation
    FusedGemm-HardSigmoid
    FusedConv-LeakyRelu
    FusedConv-sum
    CausalConvWithState-past
    Trilu-1
    SkipLayerNormalization-bias-sum-broadcast
    SimplifiedLayerNormalization
    SkipSimplifiedLayerNormalization-bias-sum
    MultiHeadAttention-past-causal
    GroupQueryAttention-norm-rotary
    Attention-past
    RotaryEmbedding-partial
    EmbedLayerNormalization
    MatMulBnb4-0
    MatMulBnb4-1
    GatherBlockQuantized-4-False
    MatMulNBits-4-float-32-bias
    MatMulNBits-8-packed-40-bias
    MatMulNBits-4-default-32-
    """,
)


STATIC = (
    "Attention",
    "CausalConvWithState",
    "EmbedLayerNormalization",
    "GatherBlockQuantized",
    "MatMulNBits",
)


def forward(case: Fused, *, symbolic: bool):
    """Returns nodes of y = Σ weights · outputs², the model's inputs, feeds, and y in numpy."""
    names, inputs, feeds = [], [], {}
    for index, array in enumerate(case.inputs):
        names.append("" if array is None else f"x{index}")
        if array is None:
            continue
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        feeds[f"x{index}"] = array
        # onnxruntime wants to know the sizes of some operators' parameters too.
        strict = case.op in STATIC
        free = symbolic and (index == 0 or not strict)
        if case.op == "GroupQueryAttention" and index in (3, 4):
            free = True  # it takes the present to be as long as a past whose length is known
        dims = [f"x{index}_{axis}" for axis in range(array.ndim)] if free else array.shape
        if strict and free and array.ndim > 2:
            dims = [*dims[:-1], array.shape[-1]]
        inputs.append(value(names[-1], dims, helper.np_dtype_to_tensor_dtype(array.dtype)))
    wanted = range(case.outputs) if isinstance(case.outputs, int) else case.outputs
    outputs = [f"y{i}" if i in wanted else "" for i in range(max(wanted) + 1)]
    fused = helper.make_node(
        case.op, names, outputs, name="under_test", domain=case.domain, **case.attributes
    )

    def evaluate(arrays: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        results = case.function(*arrays)
        results = results if isinstance(results, tuple) else (results,)
        return [results[i] for i in wanted]

    wide = [feeds.get(f"x{index}") for index in range(len(names))]
    wide = [a.astype(np.float64) if a is not None and a.dtype.kind == "f" else a for a in wide]
    values = evaluate(wide)
    weights = [normal(*v.shape, seed=50 + i) for i, v in enumerate(values)]
    nodes = [fused]
    terms = []
    for i, weight in zip(wanted, weights, strict=True):
        feeds[f"w{i}"] = weight.astype(np.float32)
        inputs.append(value(f"w{i}", weight.shape))
        nodes += [
            helper.make_node("Mul", [f"y{i}", f"y{i}"], [f"square{i}"]),
            helper.make_node("Mul", [f"square{i}", f"w{i}"], [f"weighted{i}"]),
            helper.make_node("ReduceSum", [f"weighted{i}"], [f"term{i}"], keepdims=0),
        ]
        terms.append(f"term{i}")
    nodes.append(helper.make_node("Sum", terms, ["y"]))
    exact = [feeds[f"w{i}"].astype(np.float64) for i in wanted]

    def total(arrays: Sequence[np.ndarray | None]) -> float:
        found = evaluate(arrays)
        return float(sum((w * v * v).sum() for w, v in zip(exact, found, strict=True)))

    return nodes, inputs, feeds, wide, total


@pytest.mark.nightly(42)
@pytest.mark.quick(5)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_gradient(case: Fused, symbolic: bool) -> None:
    nodes, inputs, feeds, wide, total = forward(case, symbolic=symbolic)
    xs = [f"x{i}" for i in case.differentiated]
    gradients = [f"d{x}" for x in xs]
    gradient = node("Gradient", xs, gradients, xs=xs, y="y")
    plain = model(nodes, inputs, ["y"], imports=[(MICROSOFT, 1)])
    whole = model([*nodes, gradient], inputs, ["y", *gradients], imports=[(MICROSOFT, 1)])
    lowered = ortops.lower(whole)
    assert not without_gradient(lowered), "of the next order"
    y, *found = run(lowered, feeds)
    np.testing.assert_allclose(y, total(wide), rtol=1e-4, atol=1e-4)
    if case.kernel:
        np.testing.assert_allclose(run(plain, feeds)[0], y, rtol=1e-4, atol=1e-4)
    for position, result in zip(case.differentiated, found, strict=True):
        expected = differences(total, wide, position)
        assert result.shape == expected.shape
        assert result.dtype == np.float32
        np.testing.assert_allclose(
            result, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max(initial=1)
        )


def differences(
    total: Callable[[Sequence[np.ndarray | None]], float],
    arrays: Sequence[np.ndarray | None],
    position: int,
    step: float = 1e-5,
) -> np.ndarray:
    """Returns all partial derivatives by central differences in float64."""
    result = np.zeros_like(arrays[position])
    for place in np.ndindex(result.shape):
        ends = []
        for sign in (1, -1):
            moved = list(arrays)
            moved[position] = arrays[position].copy()
            moved[position][place] += sign * step
            ends.append(total(moved))
        result[place] = (ends[0] - ends[1]) / (2 * step)
    return result


def mixed_difference(
    total: Callable[[Sequence[np.ndarray | None]], float],
    arrays: Sequence[np.ndarray | None],
    directions: Sequence[Mapping[int, np.ndarray]],
    step: float,
) -> float:
    """Returns the derivative of a function along one direction after the other, in float64."""
    result = 0.0
    for signs in itertools.product((1, -1), repeat=len(directions)):
        moved = list(arrays)
        for sign, direction in zip(signs, directions, strict=True):
            for position, v in direction.items():
                moved[position] = moved[position] + sign * step * v
        result += math.prod(signs) * total(moved)
    return result / (2 * step) ** len(directions)


@pytest.mark.nightly(22)
@pytest.mark.quick(6)
@by_case([case for case in CASES if case.orders > 1])
def test_higher_orders(case: Fused) -> None:
    """The gradient of Σ vᵢ · ∂y/∂xᵢ, and the same once more for a third order."""
    nodes, inputs, feeds, wide, total = forward(case, symbolic=False)
    positions = case.differentiated
    xs = [f"x{i}" for i in positions]
    y = "y"
    directions: list[dict[int, np.ndarray]] = []
    for order in range(2, case.orders + 1):
        directions.append({i: normal(*wide[i].shape, seed=90 + order + i) for i in positions})
        nodes.append(node("Gradient", xs, [f"d{order}{x}" for x in xs], xs=xs, y=y))
        terms = []
        for i, v in directions[-1].items():
            feeds[f"v{order}{i}"] = v.astype(np.float32)
            inputs.append(value(f"v{order}{i}", v.shape))
            nodes.append(
                helper.make_node("Mul", [f"d{order}x{i}", f"v{order}{i}"], [f"dv{order}{i}"])
            )
            terms.append(f"s{order}{i}")
            nodes.append(helper.make_node("ReduceSum", [f"dv{order}{i}"], terms[-1:], keepdims=0))
        y = f"f{order}"
        nodes.append(helper.make_node("Sum", terms, [y]))
        whole = model(
            [*nodes, node("Gradient", xs, [f"d{x}" for x in xs], xs=xs, y=y)],
            inputs,
            [f"d{x}" for x in xs],
            imports=[(MICROSOFT, 1)],
        )
        found = run(ortops.lower(whole), feeds)
        for i, gradient in zip(positions, found, strict=True):
            u = normal(*wide[i].shape, seed=70 + i)
            step = 1e-4 if order == 2 else 1e-3
            expected = mixed_difference(total, wide, [*directions, {i: u}], step)
            scale = np.abs(gradient * u).sum() + abs(expected) + 1e-2
            assert abs((gradient * u).sum() - expected) <= 1e-3 * scale, (order, i)


def layers(opset: int = 21) -> tuple[list[onnx.NodeProto], list[onnx.ValueInfoProto], Any]:
    """Fused operators one behind the other: onnx infers no type behind any of them."""
    nodes = [
        helper.make_node("FusedMatMul", ["x", "w"], ["a"], domain=MICROSOFT, transB=1),
        helper.make_node("BiasGelu", ["a", "b"], ["c"], domain=MICROSOFT),
        helper.make_node(
            "SkipLayerNormalization", ["c", "x", "g"], ["n", "", "", "s"], domain=MICROSOFT
        ),
        helper.make_node("SimplifiedLayerNormalization", ["n", "g"], ["m"], epsilon=1e-5, axis=-1),
        helper.make_node("MatMul", ["m", "w"], ["p"]),
        helper.make_node("Mul", ["p", "s"], ["q"]),
        helper.make_node("ReduceSum", ["q"], ["y"], keepdims=0),
    ]
    inputs = [value("x", ["batch", "time", 6]), value("w", [6, 6]), value("b", [6])]
    rng = np.random.default_rng(SEED)
    shapes = {"x": (2, 3, 6), "w": (6, 6), "b": (6,), "g": (6,)}
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}

    def total(x, w, b, g):
        s = gelu(x @ w.T + b) + x
        return ((rms_norm(layer_norm(s, g), g, 1e-5) @ w) * s).sum()

    return nodes, [*inputs, value("g", [6])], (feeds, total)


@pytest.mark.parametrize("opset", [17, 21, 24])
def test_fused_operators_behind_each_other(opset: int) -> None:
    nodes, inputs, (feeds, total) = layers()
    xs = list(feeds)
    gradient = node("Gradient", xs, [f"d{x}" for x in xs], xs=xs, y="y")
    whole = model(
        [*nodes, gradient], inputs, [f"d{x}" for x in xs], imports=[(MICROSOFT, 1)], opset=opset
    )
    narrow = {name: array.astype(np.float32) for name, array in feeds.items()}
    wide = [array.astype(np.float64) for array in narrow.values()]
    found = run(ortops.lower(whole), narrow)
    for position, result in enumerate(found):
        expected = differences(lambda a: float(total(*a)), wide, position)
        np.testing.assert_allclose(
            result, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max(initial=1)
        )


@pytest.mark.parametrize("opset", [17, 21])
def test_fused_operators_without_an_import(opset: int) -> None:
    """onnxruntime runs such models, and its tool for transformers makes them."""
    nodes = [
        helper.make_node("BiasGelu", ["x", "b"], ["y"], domain=MICROSOFT),
        node("Gradient", ["b"], ["d"], xs=["b"], y="y"),
    ]
    whole = model(nodes, [value("x", [4, 3]), value("b", [3])], ["d"], opset=opset)
    assert MICROSOFT not in [entry.domain for entry in whole.opset_import]
    (d,) = run(ortops.lower(whole), {"x": np.zeros((4, 3), np.float32), "b": np.zeros(3, "f")})
    np.testing.assert_allclose(d, [2, 2, 2])  # the slope at 0 is a half


def test_shapes_that_are_computed_from_what_is_behind_fused_operators() -> None:
    """onnx infers no more than that they are vectors of integers."""
    cut = {"zero": np.array([0]), "two": np.array([2]), "last": np.array([-1])}
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["a"], domain=MICROSOFT),
        helper.make_node("Shape", ["a"], ["n"]),
        helper.make_node("Slice", ["n", "zero", "two"], ["front"]),
        helper.make_node("Concat", ["front", "last"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["a", "sizes"], ["b"]),
        helper.make_node("FusedMatMul", ["b", "w"], ["y"], domain=MICROSOFT, transB=1),
        node("Gradient", ["w"], ["dw"], xs=["w"], y="y"),
    ]
    inputs = [value("x", ["n", "t", 2, 3]), value("w", [5, 6])]
    whole = model(nodes, inputs, ["dw"], initializers=cut, imports=[(MICROSOFT, 1)])
    x = normal(2, 3, 2, 3).astype(np.float32)
    (dw,) = run(ortops.lower(whole), {"x": x, "w": np.ones((5, 6), np.float32)})
    expected = (x * sigmoid(1.702 * x)).reshape(-1, 6).sum(0)
    np.testing.assert_allclose(dw, np.tile(expected, (5, 1)), rtol=1e-4)


def test_only_what_a_gradient_passes_through_is_taken_apart() -> None:
    nodes, inputs, _ = layers()
    gradient = node("Gradient", ["n"], ["dn"], xs=["n"], zs=["s"], y="y")
    gradient.input.append("s")
    whole = model([*nodes, gradient], inputs, ["dn"], imports=[(MICROSOFT, 1)])
    kept = [n.op_type for n in ortops.lower(whole).graph.node]
    assert [name for name in ("FusedMatMul", "BiasGelu", "SkipLayerNormalization") if name in kept]
    assert "SimplifiedLayerNormalization" not in kept


def test_a_rule_of_the_users_own_goes_before_a_definition(monkeypatch) -> None:
    monkeypatch.setattr(USER, "rules", {})
    ortops.vjp("QuickGelu", domain=MICROSOFT)(lambda g, y, x: g * 7)
    nodes = [
        helper.make_node("QuickGelu", ["x"], ["y"], domain=MICROSOFT),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    whole = model(nodes, [value("x", [2])], ["d"], imports=[(MICROSOFT, 1)])
    (found,) = run(ortops.lower(whole), {"x": np.ones(2, np.float32)})
    np.testing.assert_array_equal(found, [7, 7])


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (
            helper.make_node(
                "FusedGemm", ["x", "x"], ["y"], "gemm", domain=MICROSOFT, activation="Erf"
            ),
            r"FusedGemm node 'gemm': no gradient for activation 'Erf'; use Clip, Elu",
        ),
        (
            helper.make_node(
                "MatMulBnb4",
                ["x", "codes", "v"],
                ["y"],
                "bnb",
                domain=MICROSOFT,
                K=3,
                N=3,
                block_size=16,
                quant_type=1,
                transB=0,
            ),
            r"MatMulBnb4 node 'bnb': no gradient for transB=0; use transB=1",
        ),
        (
            helper.make_node(
                "MultiHeadAttention",
                ["heads", "", "", "v"],
                ["y"],
                "mha",
                domain=MICROSOFT,
                num_heads=1,
            ),
            (
                r"MultiHeadAttention node 'mha': no gradient for bias "
                r"with packed queries, keys and val"
            ),
        ),
        (
            helper.make_node("Gelu", ["x"], ["y"], "gelu", domain=MICROSOFT, slope=2.0),
            r"Gelu node 'gelu': there is no gradient for attribute 'slope' = 2.0; remove the attr",
        ),
        (
            helper.make_node(
                "SkipSimplifiedLayerNormalization",
                ["x", "x", "v"],
                ["n", "m"],
                "norm",
                domain=MICROSOFT,
            ),
            r"SkipSimplifiedLayerNormalization node 'norm': output 1 'm' is not available if",
        ),
    ],
)
def test_what_is_not_covered(fused: onnx.NodeProto, message: str) -> None:
    nodes = [fused]
    if "y" not in fused.output:
        nodes.append(helper.make_node("Sum", ["n", "m"], ["y"]))
    x = "heads" if "heads" in fused.input else "x"
    gradient = node("Gradient", [x], ["d"], xs=[x], y="y")
    inputs = [value("x", [3, 3]), value("v", [3]), value("heads", [1, 2, 1, 3, 1])]
    inputs.append(value("codes", [5], onnx.TensorProto.UINT8))
    whole = model([*nodes, gradient], inputs, ["d"], imports=[(MICROSOFT, 1)])
    with pytest.raises(ortops.UnsupportedError, match=message):
        ortops.lower(whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("made", "shape", "fused"),
    [
        (lenet(), (2, 1, 8, 8), {"FusedConv", "FusedGemm"}),
        (resnet(), (2, 1, 8, 8), {"FusedConv"}),
        (transformer(), (2, 3, 8), {"SkipLayerNormalization"}),
    ],
    ids=["lenet", "resnet", "transformer"],
)
def test_models_that_onnxruntime_has_optimized(made, shape, fused, tmp_path: Path) -> None:
    small = optimized(made, tmp_path / "optimized.onnx")
    assert {n.op_type for n in small.graph.node if n.domain == MICROSOFT} >= fused
    (x,) = (value.name for value in made.graph.input)
    before, after = (
        {array.name: onnx.numpy_helper.to_array(array) for array in m.graph.initializer}
        for m in (made, small)
    )
    weights = [
        name
        for name, array in before.items()
        if name in after and after[name].shape == array.shape and (after[name] == array).all()
    ]
    xs = [x, *(name for name in weights if before[name].dtype == np.float32)]
    assert len(xs) > 2
    results = []
    for proto in (made, small):
        whole = onnx.ModelProto()
        whole.CopyFrom(proto)
        output = whole.graph.output[0].name
        whole.graph.node.append(helper.make_node("Sin", [output], ["curved"]))
        whole.graph.node.append(node("Gradient", xs, [f"d_{i}" for i in xs], xs=xs, y="curved"))
        del whole.graph.output[:]
        whole.graph.output.extend(helper.make_empty_tensor_value_info(f"d_{i}") for i in xs)
        whole.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        results.append(run(ortops.lower(whole), {x: normal(*shape).astype(np.float32)}))
    for plain, found in zip(*results, strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-5 * np.abs(plain).max())
