"""Gradients of attention over many queries, whose scores are computed in blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import plain_session

import ortops

Array = npt.NDArray[Any]

HEADS, PAIRS, SIZE = 4, 2, 8
NAMES = ["q", "k", "v", "pk", "pv", "lengths", "total"]


def reference(feeds: dict[str, Array], past: int, **settings: Any) -> Array:
    """Attention by its formula, one row of the batch and one head at a time; zeros for padding."""
    length = feeds["q"].shape[1]
    result = np.zeros(feeds["q"].shape)
    for row, last in enumerate(feeds["lengths"]):
        seen = last + 1
        count = seen - past if past else min(seen, length)
        for head in range(HEADS):
            here = slice(head * SIZE, (head + 1) * SIZE)
            pair = head * PAIRS // HEADS
            there = slice(pair * SIZE, (pair + 1) * SIZE)
            keys, values = (
                np.concatenate([feeds[f"p{n}"][row, pair, :past], feeds[n][row, :count, there]])
                for n in "kv"
            )
            scores = feeds["q"][row, :count, here] @ keys.T / np.sqrt(SIZE)
            if cap := settings.get("softcap"):
                scores = cap * np.tanh(scores / cap)
            if "bias" in feeds:
                scores = scores + feeds["bias"][0, head, :count, :seen]
            at = past + np.arange(count)[:, None]
            window = settings.get("local_window_size", seen)
            keep = (np.arange(seen) <= at) & (np.arange(seen) > at - window)
            shifted = np.exp(scores - scores.max()) * keep
            total = shifted.sum(1, keepdims=True)
            if "sink" in feeds:
                total = total + np.exp(feeds["sink"][head] - scores.max())
            result[row, :count, here] = shifted / total @ values
    return result


def attention(feeds: dict[str, Array], **settings: Any) -> onnx.ModelProto:
    """A model of the gradients of Σ w · attention(q, k, v)²."""
    kinds = {"lengths": TensorProto.INT32, "total": TensorProto.INT32}
    dims: dict[str, list[Any]] = {
        **{name: ["batch", "time", feeds[name].shape[-1]] for name in ("q", "k", "v", "weights")},
        "pk": ["batch", PAIRS, "past", SIZE],
        "pv": ["batch", PAIRS, "past", SIZE],
        "lengths": ["batch"],
        "total": [],
        "bias": [1, HEADS, "time", "all"],
        "sink": [HEADS],
    }
    inputs = [value(n, dims[n], kinds.get(n, TensorProto.FLOAT)) for n in feeds]
    optional = ["", "", "", *(n if n in feeds else "" for n in ("bias", "sink"))]
    names = [*NAMES, *optional]
    while not names[-1]:
        names.pop()
    nodes = [
        helper.make_node(
            "GroupQueryAttention",
            names,
            ["y", "nk", "nv"],
            name="attention",
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=PAIRS,
            **settings,
        ),
        helper.make_node("Mul", ["y", "y"], ["square"]),
        helper.make_node("Mul", ["square", "weights"], ["product"]),
        helper.make_node("ReduceSum", ["product"], ["loss"], keepdims=0),
    ]
    xs = [n for n in ("q", "k", "v", "sink") if n in feeds]
    gradients = [f"d{n}" for n in xs]
    nodes.append(node("Gradient", xs, gradients, xs=xs, y="loss"))
    return model(nodes, inputs, gradients, imports=[("com.microsoft", 1)])


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"softcap": 2.0},
        {"local_window_size": 40},
        pytest.param({"bias": True}, marks=pytest.mark.needs("onnxruntime>=1.22")),
        pytest.param({"sink": True}, marks=pytest.mark.needs("onnxruntime>=1.24")),
    ],
    ids=str,
)
def test_gradients(settings: dict[str, Any], length: int, past: int) -> None:
    draw = np.random.default_rng(length + past)
    # onnxruntime's kernel computes several tokens after a past for one row only.
    rows, total = 1 if past and length > 1 else 2, length + past
    feeds: dict[str, Array] = {
        "q": draw.standard_normal((rows, length, HEADS * SIZE)),
        "k": draw.standard_normal((rows, length, PAIRS * SIZE)),
        "v": draw.standard_normal((rows, length, PAIRS * SIZE)),
        "pk": draw.standard_normal((rows, PAIRS, past, SIZE)),
        "pv": draw.standard_normal((rows, PAIRS, past, SIZE)),
        "lengths": np.array([total - 1, total - 1 if past else length // 2], np.int32)[:rows],
        "total": np.array(total, np.int32),
        "weights": draw.standard_normal((rows, length, HEADS * SIZE)),
    }
    attributes = {k: v for k, v in settings.items() if v is not True}
    if "bias" in settings:
        feeds["bias"] = draw.standard_normal((1, HEADS, length, total))
    if "sink" in settings:
        feeds["sink"] = draw.standard_normal(HEADS)
    proto = attention(feeds, **attributes)
    single = {
        name: array.astype(np.float32) if array.dtype == np.float64 else array
        for name, array in feeds.items()
    }
    session = plain_session(ortops.lower(proto))
    found = dict(zip(("q", "k", "v", "sink"), session.run(None, single), strict=False))
    scale = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in found.values()))
    for name, gradient in found.items():
        along = draw.standard_normal(feeds[name].shape)
        one, other = (
            np.sum(
                feeds["weights"]
                * reference(feeds | {name: feeds[name] + step * along}, past, **attributes) ** 2
            )
            for step in (1e-5, -1e-5)
        )
        expected = (one - other) / 2e-5
        assert abs(np.sum(gradient.astype(np.float64) * along) - expected) <= 1e-4 * scale, name


@pytest.mark.needs("onnxruntime>=1.23")  # before, the outputs for the cache were not optional
def test_without_outputs_for_a_cache() -> None:
    draw = np.random.default_rng(0)
    feeds: dict[str, Array] = {
        "q": draw.standard_normal((2, 5, HEADS * SIZE)),
        "k": draw.standard_normal((2, 5, PAIRS * SIZE)),
        "v": draw.standard_normal((2, 5, PAIRS * SIZE)),
        "pk": np.zeros((2, PAIRS, 0, SIZE)),
        "pv": np.zeros((2, PAIRS, 0, SIZE)),
        "lengths": np.array([4, 2], np.int32),
        "total": np.array(5, np.int32),
        "weights": draw.standard_normal((2, 5, HEADS * SIZE)),
    }
    single = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in feeds.items()}
    proto = attention(feeds)
    expected = plain_session(ortops.lower(proto)).run(None, single)
    del proto.graph.node[0].output[1:]
    for name in ("pk", "pv"):
        proto.graph.node[0].input[NAMES.index(name)] = ""
        proto.graph.input.remove(next(each for each in proto.graph.input if each.name == name))
        del single[name]
    found = plain_session(ortops.lower(proto)).run(None, single)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0}, {"local_window_size": 40}], ids=str)
def test_the_forward_pass_keeps_the_kernel(settings: dict[str, Any]) -> None:
    feeds = {"q": np.zeros((1, 1, 32)), "k": np.zeros((1, 1, 16)), "v": np.zeros((1, 1, 16))}
    feeds |= {"pk": np.zeros(0), "pv": np.zeros(0), "lengths": np.zeros(0), "total": np.zeros(0)}
    feeds["weights"] = np.zeros((1, 1, 32))
    nodes = list(ortops.lower(attention(feeds, **settings)).graph.node)
    kinds = [each.op_type for each in nodes]
    assert kinds.count("GroupQueryAttention") == kinds.count("Scan") == 1
    assert "Softmax" not in kinds


def test_a_block_reads_the_keys_of_its_window() -> None:
    """No row of a block of scores is longer than the window and the block."""
    feeds: dict[str, Array] = {
        "q": np.zeros((1, 600, HEADS * SIZE)),
        "k": np.zeros((1, 600, PAIRS * SIZE)),
        "v": np.zeros((1, 600, PAIRS * SIZE)),
        "pk": np.zeros((1, PAIRS, 0, SIZE)),
        "pv": np.zeros((1, PAIRS, 0, SIZE)),
        "lengths": np.array([599], np.int32),
        "total": np.array(600, np.int32),
        "weights": np.zeros((1, 600, HEADS * SIZE)),
    }
    single = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in feeds.items()}
    widths = []
    for window in (-1, 40):
        lowered = ortops.lower(attention(feeds, local_window_size=window))
        (scan,) = (each for each in lowered.graph.node if each.op_type == "Scan")
        for name in ("scan_output_directions", "scan_output_axes"):  # the default, for all outputs
            given = [a for a in scan.attribute if a.name == name]
            assert not any(any(a.ints) for a in given)
            for each in given:
                scan.attribute.remove(each)
        (body,) = (a.g for a in scan.attribute if a.HasField("g"))
        (softmax,) = (each for each in body.node if each.op_type == "Softmax")
        body.node.append(helper.make_node("Shape", [softmax.output[0]], ["shape"], start=3))
        body.output.append(value("shape", [1], TensorProto.INT64))
        scan.output.append("shapes")
        lowered.graph.output.append(value("shapes", ["block", 1], TensorProto.INT64))
        widths.append(plain_session(lowered).run(["shapes"], single)[0].ravel().tolist())
    assert widths == [[120, 240, 360, 480, 600], [120, 159, 159, 159, 159]]
