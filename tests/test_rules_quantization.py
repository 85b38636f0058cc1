"""Quantization straight through: expected numbers from the definition, and differences for scales.

A quantized function has no derivative worth the name, so differences are no oracle where it rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from checked import Checked, by_case
from domain_models import model, node, value
from dot_test import Case, check, normal
from onnx import TensorProto, helper
from running import run

import ortops

F = np.float32
CHECKED = [
    Checked("QuantizeLinear", 1, [0, 1]),
    Checked("DequantizeLinear", 1, [0, 1]),
    Checked("DynamicQuantizeLinear", 1, [0]),
    Checked("MatMulInteger", 1, [0]),
    Checked("ConvInteger", 1, [0]),
]


def pair(
    x: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    *,
    between: list[onnx.NodeProto] | None = None,
    symbolic: bool = False,
    **attributes: Any,
) -> list[np.ndarray]:
    """Returns y = dequantized(quantized(x)) and the gradients of Σ y · (1, 2, …)."""
    weights = np.arange(1, x.size + 1, dtype=F).reshape(x.shape)
    feeds = {"x": x.astype(F), "s": scale.astype(F), "w": weights}
    zero = onnx.numpy_helper.from_array(zero_point, "z")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        *(between or []),
        helper.make_node(
            "DequantizeLinear", ["moved" if between else "q", "s", "z"], ["y"], **attributes
        ),
        helper.make_node("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x", "s"], ["dx", "ds"], xs=["x", "s"], y="p"),
    ]
    inputs = [
        value(name, [f"{name}{axis}" for axis in range(a.ndim)] if symbolic else a.shape)
        for name, a in feeds.items()
    ]
    whole = model(nodes, inputs, ["y", "dx", "ds"])
    whole.graph.initializer.append(zero)
    return run(ortops.lower(whole), feeds)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_whole_tensor(symbolic: bool) -> None:
    x = np.array([-20, -1.3, 0.2, 0.6, 30], F)  # int8 with scale 0.1: −12.8 … 12.7
    y, dx, ds = pair(x, F(0.1), np.int8(0), symbolic=symbolic)
    np.testing.assert_allclose(y, [-12.8, -1.3, 0.2, 0.6, 12.7], rtol=1e-6)
    np.testing.assert_allclose(dx, [0, 2, 3, 4, 0], rtol=1e-6)
    # Saturated: the limits −128 and 127 times the weights 1 and 5; else nothing but the rounding.
    np.testing.assert_allclose(ds, -128 + 5 * 127, rtol=1e-5)


def test_rounding_shows_in_the_cotangent_of_the_scale() -> None:
    _, dx, ds = pair(np.array([0.6, 1.7], F), F(0.5), np.int8(0))
    np.testing.assert_allclose(dx, [1, 2])
    # round(1.2) − 1.2 and round(3.4) − 3.4
    np.testing.assert_allclose(ds, -0.2 + 2 * -0.4, rtol=1e-5)


def test_zero_point_moves_the_limits() -> None:
    x = np.array([-0.4, -0.2, 1, 24, 26], F)  # uint8 with scale 0.1, zero point 3: −0.3 … 25.2
    y, dx, _ = pair(x, F(0.1), np.uint8(3))
    np.testing.assert_allclose(y, [-0.3, -0.2, 1, 24, 25.2], rtol=1e-5)
    np.testing.assert_allclose(dx, [0, 2, 3, 4, 0])


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axis(axis: int, symbolic: bool) -> None:
    x = normal(3, 3).astype(F) * 3
    scale = np.array([0.015, 0.02, 0.5], F)
    zero = np.array([0, 3, -5], np.int8)
    y, dx, ds = pair(x, scale, zero, axis=axis, symbolic=symbolic)
    shape = (3, 1) if axis == 0 else (1, 3)
    s, z = scale.reshape(shape), zero.reshape(shape).astype(F)
    q = np.rint(x / s) + z
    inside = (q >= -128) & (q <= 127)
    w = np.arange(1, 10).reshape(3, 3)
    np.testing.assert_allclose(y, (np.clip(q, -128, 127) - z) * s, rtol=1e-5)
    np.testing.assert_allclose(dx, np.where(inside, w, 0), rtol=1e-5)
    slope = np.clip(q, -128, 127) - z - np.where(inside, x / s, 0)
    np.testing.assert_allclose(ds, (w * slope).sum(1 if axis == 0 else 0), rtol=1e-4, atol=1e-4)
    assert (~inside).any()


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_blocks(symbolic: bool) -> None:
    x = normal(2, 5).astype(F)
    scale = np.array([[0.1, 0.01, 0.2], [0.3, 0.02, 0.5]], F)
    zero = np.zeros((2, 3), np.int8)
    _, dx, ds = pair(x, scale, zero, axis=1, block_size=2, symbolic=symbolic)
    s = np.repeat(scale, 2, axis=1)[:, :5]
    q = np.rint(x / s)
    inside = np.abs(q + 0.5) <= 127.5
    w = np.arange(1, 11).reshape(2, 5)
    np.testing.assert_allclose(dx, np.where(inside, w, 0), rtol=1e-5)
    slope = w * (np.clip(q, -128, 127) - np.where(inside, x / s, 0))
    expected = np.add.reduceat(slope, [0, 2, 4], axis=1)
    np.testing.assert_allclose(ds, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "greatest"),
    [(TensorProto.UINT4, 15), (TensorProto.INT16, 32767), (TensorProto.FLOAT8E4M3FN, 448)],
)
def test_other_types(kind: int, greatest: int) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=kind),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
        node("Gradient", ["x", "s"], ["dx", "ds"], xs=["x", "s"], y="y"),
    ]
    lowered = ortops.lower(model(nodes, [value("x", [3]), value("s")], ["dx", "ds"]))
    dx, ds = run(lowered, {"x": np.array([0.5, 3, 1e6], F), "s": F(0.5)})
    np.testing.assert_array_equal(dx, [1, 1, 0])
    np.testing.assert_allclose(ds, greatest, rtol=1e-6)


def test_rearranged_in_between() -> None:
    between = [
        helper.make_node("Transpose", ["q"], ["t"], perm=[1, 0]),
        helper.make_node("Flatten", ["t"], ["moved"], axis=0),
    ]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        *between,
        helper.make_node("DequantizeLinear", ["moved", "s", "z"], ["y"]),
        helper.make_node("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="p"),
    ]
    inputs = [value("x", [2, 3]), value("w", [1, 6]), value("s"), value("z", [], TensorProto.INT8)]
    feeds = {"x": normal(2, 3).astype(F), "w": np.arange(6, dtype=F)[None]}
    (dx,) = run(ortops.lower(model(nodes, inputs, ["dx"])), feeds | {"s": F(0.1), "z": np.int8(0)})
    np.testing.assert_allclose(dx, [[0, 2, 4], [1, 3, 5]], rtol=1e-5)


def test_dynamic_quantization() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        helper.make_node("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="p"),
    ]
    whole = model(nodes, [value("x", [4]), value("w", [4])], ["dx"])
    x, w = np.array([-1, 0.5, 2, 0.3], F), np.arange(4, dtype=F)
    (dx,) = run(ortops.lower(whole), {"x": x, "w": w})
    scale = 3 / 255
    rounding = (w * (np.rint(x / scale) - x / scale)).sum() / 255
    expected = w + rounding * np.array([-1, 0, 1, 0])  # the scale is that of the two ends
    np.testing.assert_allclose(dx, expected, rtol=1e-4)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("columns", [False, True], ids=["tensor", "columns"])
def test_dynamically_quantized_product(columns: bool, symbolic: bool) -> None:
    rng = np.random.default_rng(8)
    weights = rng.integers(0, 255, (5, 3)).astype(np.uint8)
    zero = np.array([100, 130, 120], np.uint8) if columns else np.uint8(120)
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "b", "z", "bz"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["f", "s"], ["y"]),
        helper.make_node("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="p"),
    ]
    shape = ["n", "m", 5] if symbolic else [2, 4, 5]
    inputs = [value("x", shape), value("w", ["n", "m", 3] if symbolic else [2, 4, 3])]
    whole = model(nodes, inputs, ["dx"], initializers={"b": weights, "bz": zero})
    x, w = normal(2, 4, 5).astype(F), normal(2, 4, 3, seed=1).astype(F)
    (dx,) = run(ortops.lower(whole), {"x": x, "w": w})
    real = weights.astype(F) - zero
    expected = w @ real.T
    scale = (x.max() - x.min()) / 255
    q = np.rint(x / scale)
    rounding = (w * ((q - x / scale) @ real)).sum() / 255
    expected[x == x.max()] += rounding
    expected[x == x.min()] -= rounding
    np.testing.assert_allclose(dx, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("zero", [np.uint8(120), np.array([120], np.uint8)], ids=["0-d", "1-d"])
def test_dynamically_quantized_convolution(zero: np.ndarray, symbolic: bool) -> None:
    rng = np.random.default_rng(9)
    weights = rng.integers(0, 255, (3, 2, 2, 2)).astype(np.uint8)
    real = weights.astype(F) - zero.astype(F)
    shape = ["n", 2, "h", "w"] if symbolic else [1, 2, 4, 4]
    w_shape = ["n", 3, "i", "j"] if symbolic else [1, 3, 4, 3]
    inputs = [value("x", shape), value("w", w_shape)]
    options = {"pads": [1, 0, 0, 0], "kernel_shape": [2, 2]}
    feeds = {"x": normal(1, 2, 4, 4).astype(F), "w": normal(1, 3, 4, 3, seed=1).astype(F)}
    found = []
    for integer in (True, False):
        nodes = [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            helper.make_node("ConvInteger", ["q", "b", "z", "bz"], ["i"], **options),
            helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["f", "s"], ["y"]),
        ]
        if not integer:
            nodes = [helper.make_node("Conv", ["x", "r"], ["y"], **options)]
        nodes += [
            helper.make_node("Mul", ["y", "w"], ["p"]),
            node("Gradient", ["x"], ["dx"], xs=["x"], y="p"),
        ]
        parameters = {"b": weights, "bz": zero} if integer else {"r": real}
        whole = model(nodes, inputs, ["dx"], initializers=parameters)
        found += run(ortops.lower(whole), feeds)
    # The scale, that of the two ends of x, gets what rounding leaves over.
    ends = (feeds["x"] == feeds["x"].max()) | (feeds["x"] == feeds["x"].min())
    quantized, exact = found
    assert np.abs(exact).max() > 100
    np.testing.assert_allclose(quantized[~ends], exact[~ends], rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(quantized[ends], exact[ends], atol=0.05 * np.abs(exact).max())


def test_quantized_tensors_are_no_xs() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
        node("Gradient", ["q"], ["d"], xs=["q"], y="y"),
    ]
    whole = model(nodes, [value("x", [4]), value("s")], ["d"])
    message = r"x 'q' must be a floating-point tensor, got a tensor of UINT8"
    with pytest.raises(ortops.ModelError, match=message):
        ortops.lower(whole)


CASES = [
    Case(
        "DequantizeLinear",
        [np.arange(-3, 3, dtype=np.int8).reshape(2, 3), scale, *zero],
        attributes,
        orders=2,
        epsilon=1,
        rtol=1e-4,
        name=name,
    )
    for name, scale, zero, attributes in [
        ("tensor", np.array(0.5, F), [np.array(1, np.int8)], {}),
        ("no-zero-point", np.array(0.5, F), [], {}),
        ("axis", np.array([0.5, 0.2, 2], F), [np.array([1, 0, 3], np.int8)], {"axis": 1}),
        ("axis-0", np.array([0.5, 0.2], F), [np.array([1, 0], np.int8)], {"axis": 0}),
        ("blocks", np.array([[0.5, 0.2], [1, 3]], F), [], {"axis": 1, "block_size": 2}),
    ]
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dequantized_weights(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
