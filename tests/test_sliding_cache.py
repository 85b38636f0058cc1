"""GroupQueryAttention with a sliding cache, against onnxruntime's kernel and a full cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import run

import ortops

WINDOW, SIZE = 3, 16
NAMES = ["q", "k", "v", "pk", "pv", "lengths", "total", "cos", "sin"]


def attention(*, sliding: bool, gradient: bool, **more: Any) -> Any:
    inputs = [
        value(name, ["batch", "time", heads * SIZE])
        for name, heads in zip("qkv", (4, 2, 2), strict=True)
    ]
    inputs += [value(name, ["batch", 2, "past", SIZE]) for name in ("pk", "pv")]
    inputs += [
        value("lengths", ["batch"], TensorProto.INT32),
        value("total", [], TensorProto.INT32),
    ]
    inputs += [value(name, [40, SIZE // 2]) for name in ("cos", "sin")]
    nodes = [
        helper.make_node(
            "GroupQueryAttention",
            NAMES,
            ["y", "nk", "nv"],
            name="attention",
            domain="com.microsoft",
            num_heads=4,
            kv_num_heads=2,
            do_rotary=1,
            local_window_size=WINDOW,
            softcap=2.0,
            **({"sliding_window_cache": 1} if sliding else {}),
            **more,
        ),
        helper.make_node("Mul", ["y", "y"], ["square"]),
        helper.make_node("ReduceSum", ["square"], ["loss"], keepdims=0),
    ]
    outputs = ["y", "nk", "nv"]
    if gradient:
        nodes.append(
            node("Gradient", ["q", "k", "v"], ["dq", "dk", "dv"], xs=list("qkv"), y="loss")
        )
        outputs += ["dq", "dk", "dv"]
    return model(nodes, inputs, outputs, imports=[("com.microsoft", 1)])


def draw(rows: int, time: int, capacity: int) -> dict[str, Any]:
    random = np.random.default_rng(7)
    shapes = {"q": (rows, time, 64), "k": (rows, time, 32), "v": (rows, time, 32)}
    feeds: dict[str, Any] = {n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    angles = random.normal(size=(40, SIZE // 2)).astype(np.float32)
    feeds |= {n: np.zeros((rows, 2, capacity, SIZE), np.float32) for n in ("pk", "pv")}
    return feeds | {"cos": np.cos(angles), "sin": np.sin(angles)}


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, 3, 5])
def test_prompts(capacity: int) -> None:
    """Padded prompts are those of a cache that keeps everything; its gradients have a test."""
    feeds = draw(2, 8, capacity) | {"lengths": np.array([7, 4], np.int32), "total": np.int32(8)}
    full = ortops.lower(attention(sliding=False, gradient=True))
    empty = {n: np.zeros((2, 2, 0, SIZE), np.float32) for n in ("pk", "pv")}
    expected = run(full, feeds | empty)
    found = run(ortops.lower(attention(sliding=True, gradient=True)), feeds)
    real = np.arange(8)[:, None] <= feeds["lengths"][:, None, None]  # others are undefined
    np.testing.assert_allclose(found[0] * real, expected[0] * real, rtol=1e-5, atol=1e-5)
    for a, b in zip(found[3:], expected[3:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        assert not a[~np.broadcast_to(real, a.shape)].any()


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("capacity", [3, 5])
def test_steps_are_those_of_onnxruntime(capacity: int) -> None:
    kernel = attention(sliding=True, gradient=False)
    lowered = ortops.lower(attention(sliding=True, gradient=True))
    feeds, done = draw(1, 30, capacity), 0
    whole = {name: feeds[name] for name in "qkv"}
    for time in (4, 1, 1, 1, 2, 1, 7, 1, 1):
        total = done + time
        feeds |= {name: whole[name][:, done:total] for name in "qkv"}
        feeds |= {"lengths": np.array([total - 1], np.int32), "total": np.int32(total)}
        expected, found = run(kernel, feeds), run(lowered, feeds)[:3]
        spare = capacity - WINDOW + 1
        kept = total - spare * -(-max(total - capacity, 0) // spare)
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
        for a, b in zip(found[1:], expected[1:], strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a[:, :, :kept], b[:, :, :kept], rtol=1e-5, atol=1e-5)
        feeds |= {"pk": expected[1], "pv": expected[2]}
        done = total


@pytest.mark.parametrize(
    "settings", [{"kv_cache_bit_width": 8}, {"k_quant_type": "PER_TENSOR"}], ids=str
)
def test_a_quantized_cache_is_refused_by_name(settings: dict[str, Any]) -> None:
    ((name, given),) = settings.items()
    with pytest.raises(ortops.UnsupportedError, match=f"'attention'.*{name}={given!r}"):
        ortops.lower(attention(sliding=False, gradient=True, **settings))
