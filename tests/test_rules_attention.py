"""Attention and rotary embeddings against differences of onnx's reference implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from checked import by_case, quick
from domain_models import model, node, value
from dot_test import Case, check, normal
from onnx import helper
from packaging.version import Version
from running import REFUSALS, run

import ortops

B, N, S, T, H, HV = 2, 4, 3, 5, 4, 6


def four(heads: int = N, keys: int = T, *, kv: int = N) -> list[Any]:
    """Returns queries, keys and values of rank 4."""
    return [
        normal(B, heads, S, H),
        normal(B, kv, keys, H, seed=1),
        normal(B, kv, keys, HV, seed=2),
    ]


def three(kv: int = N) -> list[Any]:
    """Returns queries, keys and values of rank 3."""
    return [
        normal(B, S, N * H),
        normal(B, T, kv * H, seed=1),
        normal(B, T, kv * HV, seed=2),
    ]


def boolean(*shape: int) -> np.ndarray:
    mask = np.random.default_rng(5).random(shape) < 0.6
    mask[..., 0] = True
    return mask


def excluding(*shape: int) -> np.ndarray:
    """Returns a mask whose first row excludes every key."""
    mask = boolean(*shape)
    mask[..., 0, :] = False
    return mask


def infinite(mask: np.ndarray) -> np.ndarray:
    """Returns minus infinity where a mask excludes, else something."""
    return np.where(mask, normal(*mask.shape, seed=6), -np.inf)


PAST = [normal(B, N, 2, H, seed=3), normal(B, N, 2, HV, seed=4)]


def attention_cases() -> Iterator[Case]:
    heads = {"q_num_heads": N, "kv_num_heads": N}
    rows: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("plain", four(), {}),
        ("scale", four(), {"scale": 0.3}),
        ("causal", four(), {"is_causal": 1}),
        ("causal-square", four(keys=S), {"is_causal": 1}),
        ("softcap", four(), {"softcap": 0.7}),
        ("softcap-causal", four(), {"softcap": 0.7, "is_causal": 1}),
        ("precision", four(), {"softmax_precision": onnx.TensorProto.DOUBLE}),
        ("grouped", four(kv=2), {}),
        ("one-key-head", four(kv=1), {"is_causal": 1}),
        ("rank-3", three(), heads),
        ("rank-3-grouped", three(kv=2), {"q_num_heads": N, "kv_num_heads": 2}),
        ("float-mask", [*four(), normal(S, T, seed=6)], {}),
        ("float-mask-4", [*four(), normal(B, 1, S, T, seed=6)], {"is_causal": 1}),
        ("float-mask-heads", [*four(), normal(N, S, T, seed=6)], {"softcap": 0.7}),
        ("bool-mask", [*four(), boolean(S, T)], {}),
        ("bool-mask-causal", [*four(), boolean(B, 1, S, T)], {"is_causal": 1}),
        ("masked-row", [*four(), excluding(B, 1, S, T)], {}),
        ("masked-row-infinite", [*four(), infinite(excluding(B, 1, S, T))], {}),
        ("masked-row-causal", [*four(), excluding(B, N, S, T)], {"is_causal": 1, "softcap": 0.7}),
        ("short-float-mask", [*four(), normal(S, T - 2, seed=6)], {}),
        ("short-bool-mask", [*four(), boolean(S, T - 2)], {}),
        ("past", [*four(), None, *PAST], {}),
        ("past-causal", [*four(keys=S), None, *PAST], {"is_causal": 1}),
        ("past-mask-rank-3", [*three(), normal(S, T + 2, seed=6), *PAST], heads),
    ]
    for name, inputs, attributes in rows:
        orders = 2 if name in ("softcap-causal", "rank-3-grouped", "masked-row") else 1
        yield Case(
            "Attention",
            inputs,
            attributes,
            orders=orders,
            opset=23,
            reference=True,
            name=name,
        )
    outputs = [("present", 3, {}), *((f"qk{m}", 4, {"qk_matmul_output_mode": m}) for m in range(4))]
    for name, count, attributes in outputs:
        inputs = [*four(), normal(S, T + 2, seed=6), *PAST]
        yield Case(
            "Attention",
            inputs,
            attributes,
            outputs=count,
            opset=23,
            reference=True,
            name=name,
        )
    for causal in (0, 1):
        lengths = np.array([4, 2])
        yield Case(
            "Attention",
            [*four(), None, None, None, lengths],
            {"is_causal": causal},
            opset=24,
            reference=True,
            name=f"nonpad-{causal}",
        )
    for left, right, causal in ((1, -1, 0), (-1, 1, 0), (1, 1, 0), (1, -1, 1), (0, 0, 0)):
        yield Case(
            "Attention",
            [*four(), None, *PAST],
            {"left_window_size": left, "right_window_size": right, "is_causal": causal},
            opset=26,
            reference=True,
            name=f"window{left}{right}{causal}",
        )


def rotary_cases() -> Iterator[Case]:
    positions = np.array([[0, 3, 2], [5, 1, 1]])
    for interleaved in (0, 1):
        for rotated in (0, 4):
            half = (rotated or 6) // 2
            table = [normal(7, half, seed=1), normal(7, half, seed=2)]
            picked = [normal(2, 3, half, seed=1), normal(2, 3, half, seed=2)]
            attributes = {"interleaved": interleaved, "rotary_embedding_dim": rotated}
            for name, x in (("4", normal(2, 2, 3, 6)), ("3", normal(2, 3, 12))):
                given = attributes | ({"num_heads": 2} if name == "3" else {})
                full = f"rank{name}-{interleaved}-{rotated}"
                rest = {"orders": 2, "opset": 23, "reference": True}
                yield Case("RotaryEmbedding", [x, *table, positions], given, name=full, **rest)
                yield Case("RotaryEmbedding", [x, *picked], given, name=f"{full}-picked", **rest)


CASES = [*attention_cases(), *rotary_cases()]
CASES = quick(
    CASES,
    """
    Attention-softcap-causal-2x4x3x4_2x4x5x4_2x4x5x6
    Attention-masked-row-2x4x3x4_2x4x5x4_2x4x5x6_2x1x3x5
    Attention-window1-10-2x4x3x4_2x4x5x4_2x4x5x6_2x4x2x4_2x4x2x6
    Attention-nonpad-1-2x4x3x4_2x4x5x4_2x4x5x6_2
    RotaryEmbedding-rank3-1-0-2x3x12_7x3_7x3_2x3
    RotaryEmbedding-rank3-0-0-2x3x12_7x3_7x3_2x3
    RotaryEmbedding-rank3-0-4-2x3x12_7x2_7x2_2x3
    """,
)


@pytest.mark.nightly(47)
@pytest.mark.quick(3)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def as_float32(case: Case) -> list[np.ndarray | None]:
    return [
        a.astype(np.float32) if a is not None and a.dtype == np.float64 else a for a in case.inputs
    ]


REFUSED = {
    "short": "onnxruntime wants a mask that is as long as the keys",
}
if Version(onnxruntime.__version__) < Version("1.32"):
    REFUSED["window"] = "onnxruntime does not know the window's attributes yet"
"""Cases that onnxruntime does not run, by the start of their names, and why."""


def is_refused(case: Case) -> bool:
    return case.name.startswith(tuple(REFUSED))


def forward(case: Case) -> tuple[Any, list[str], dict[str, np.ndarray]]:
    """Returns the node of a case, the names of its outputs, and its feeds in float32."""
    arrays = [
        a.astype(np.float32) if a is not None and a.dtype == np.float64 else a for a in case.inputs
    ]
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    feeds = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
    # onnxruntime wants to put the present out where there is a past
    outputs = [f"y{i}" for i in range(max(case.outputs, 3 if len(arrays) > 4 else 1))]
    return helper.make_node(case.op, names, outputs, **case.attributes), outputs, feeds


def fed(feeds: dict[str, np.ndarray]) -> list[onnx.ValueInfoProto]:
    return [value(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in feeds.items()]


@by_case([case for case in CASES if not is_refused(case)])
def test_forward_is_that_of_onnxruntime(case: Case) -> None:
    attention, outputs, feeds = forward(case)
    expected = run(model([attention], fed(feeds), outputs, opset=case.opset), feeds)
    nodes = [attention, node("Gradient", ["x0"], ["d"], xs=["x0"], y="y0")]
    lowered = ortops.lower(model(nodes, fed(feeds), [*outputs, "d"], opset=case.opset))
    assert case.op not in [n.op_type for n in lowered.graph.node]
    *found, _ = run(lowered, feeds)
    for result, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)


@pytest.mark.needs("onnxruntime<1.33")  # the list was made with 1.32
@by_case([case for case in CASES if is_refused(case)])
def test_onnxruntime_does_not_run(case: Case) -> None:
    attention, outputs, feeds = forward(case)
    with pytest.raises(REFUSALS):
        run(model([attention], fed(feeds), outputs, opset=case.opset), feeds)


def attention_oracle(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Returns what attention of one head puts out, and the cotangents of q, k and v, row by row.

    A row that attends to nothing is zero, and nothing flows back from it.
    """
    y, dq, dk, dv = (np.zeros_like(x, float) for x in (q, q, k, v))
    scale = 1 / np.sqrt(q.shape[-1])
    for row, (query, added, slope) in enumerate(zip(q, bias, g, strict=True)):
        kept = np.flatnonzero(added > -np.inf)
        if not kept.size:
            continue
        scores = k[kept] @ query * scale + added[kept]
        p = np.exp(scores - scores.max())
        p /= p.sum()
        y[row] = p @ v[kept]
        d_scores = p * (v[kept] @ slope - y[row] @ slope) * scale
        dq[row] = d_scores @ k[kept]
        dk[kept] += np.outer(d_scores, query)
        dv[kept] += np.outer(p, slope)
    return y, dq, dk, dv


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("form", ["boolean", "infinite"])
@pytest.mark.parametrize("opset", [23, 24])
def test_rows_that_attend_to_nothing(opset: int, form: str, causal: int) -> None:
    batch, size = 2, 4
    q, k, v, g = (normal(batch, 1, size, size, seed=seed) for seed in range(4))
    mask = np.full((batch, 1, size, size), True)
    mask[1, 0, 2] = False  # nothing at all
    mask[0, 0, 1, :2] = False  # nothing that the causal order would allow
    mask[0, 0, 3, 1] = False
    bias = np.where(mask, 0.0 if form == "boolean" else normal(*mask.shape, seed=9), -np.inf)
    feeds = {"q": q, "k": k, "v": v, "g": g, "m": mask if form == "boolean" else bias}
    nodes = [
        helper.make_node("Attention", ["q", "k", "v", "m"], ["y"], is_causal=causal),
        helper.make_node("Mul", ["y", "g"], ["z"]),
        node("Gradient", ["q", "k", "v"], ["dq", "dk", "dv"], xs=["q", "k", "v"], y="z"),
    ]
    lowered = ortops.lower(model(nodes, fed(feeds), ["y", "dq", "dk", "dv"], opset=opset))
    found = run(lowered, feeds)
    if causal:
        bias = np.where(np.tri(size, dtype=bool), bias, -np.inf)
    for sample in range(batch):
        arrays = (x[sample, 0] for x in (q, k, v, bias, g))
        for ours, right in zip(found, attention_oracle(*arrays), strict=True):
            np.testing.assert_allclose(ours[sample, 0], right, rtol=1e-9, atol=1e-12)
    assert not found[0][1, 0, 2].any()
    assert not found[1][1, 0, 2].any()


@pytest.mark.parametrize("excluded", [-np.inf, float(np.finfo(np.float32).min), -10000.0])
@pytest.mark.parametrize("operator", ["MultiHeadAttention", "Attention"])
def test_causal_rows_whose_keys_are_padding(operator: str, excluded: float) -> None:
    """Here onnxruntime's operators attend to what comes later, for want of anything better."""
    x = normal(2, 3, 8, dtype=np.float32)
    weights = normal(8, 24, seed=1, dtype=np.float32)
    feeds = {"x": x, "mask": np.array([[1, 1, 1], [0, 0, 1]], np.int32)}
    names = ["x", "w", "b", "mask"] if operator == "Attention" else ["x", "k", "v", "", "mask"]
    if operator == "Attention":
        feeds |= {"w": weights, "b": np.zeros(24, np.float32)}
    else:
        feeds |= {"k": x[::-1], "v": x[:, ::-1]}
    attributes = {"num_heads": 2, "unidirectional": 1, "mask_filter_value": excluded}
    attention = helper.make_node(operator, names, ["y"], domain="com.microsoft", **attributes)
    microsoft = [("com.microsoft", 1)]
    (expected,) = run(model([attention], fed(feeds), ["y"], imports=microsoft), feeds)
    nodes = [attention, node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    lowered = ortops.lower(model(nodes, fed(feeds), ["y", "d"], imports=microsoft))
    y, d = run(lowered, feeds)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(d).all()
