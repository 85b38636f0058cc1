"""Rules of pooling against differences, expected values and PyTorch."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, check, distinct, normal
from onnx import helper
from running import run

import ortops
from ortops.graph.autodiff.rules import pooling

UNIT = {"epsilon": 1.0, "rtol": 2e-6}


def average(name: str, *x: int, opset: int = 21, **attributes: Any) -> Case:
    """Averaging is linear, so a step of 1 is exact; float32 is all that onnxruntime has."""
    inputs = [normal(*x, dtype=np.float32)]
    return Case("AveragePool", inputs, attributes, orders=2, opset=opset, name=name, **UNIT)


def maximum(name: str, *x: int, opset: int = 21, **attributes: Any) -> Case:
    return Case("MaxPool", [distinct(*x)], attributes, orders=2, opset=opset, name=name)


def maximum32(name: str, *x: int, opset: int = 21, **attributes: Any) -> Case:
    """The elements are 0.1 apart: over a step of 0.01 a maximum stays where it is."""
    inputs = [distinct(*x, gap=1.0).astype(np.float32)]
    return Case(
        "MaxPool", inputs, attributes, orders=2, opset=opset, epsilon=0.1, rtol=2e-5, name=name
    )


def norm(name: str, p: int, *x: int, opset: int = 21, **attributes: Any) -> Case:
    """In float32, which is all that onnxruntime has, differences are good to three digits."""
    inputs = [(np.sign(normal(*x, seed=1)) * (0.5 + np.abs(normal(*x)))).astype(np.float32)]
    attributes = {"p": p, **attributes}
    return Case(
        "LpPool", inputs, attributes, orders=2, opset=opset, epsilon=0.01, rtol=5e-4, name=name
    )


DROPPED = {"strides": [3, 4], "ceil_mode": 1, "opset": 22}
"""A last window would start in the padding; onnxruntime loads that before version 22 only where
sizes are symbols, which other tests do."""

AVERAGE = [
    average("1d", 2, 3, 7, kernel_shape=[3], strides=[2], pads=[1, 1]),
    average("3d", 1, 2, 4, 5, 4, kernel_shape=[2, 3, 2], strides=[1, 2, 2]),
    average("tiles", 2, 3, 6, 4, kernel_shape=[2, 2], strides=[2, 2]),
    average("left_over", 2, 3, 9, 8, kernel_shape=[2, 2], strides=[4, 3]),
    average("stride_1", 2, 3, 6, 4, kernel_shape=[3, 2]),
    average("stride_1_pads", 2, 3, 6, 4, kernel_shape=[3, 2], pads=[2, 0, 1, 1]),
    average("pads", 2, 3, 6, 5, kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
    average("pads_counted", 2, 3, 6, 5, kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1],
            count_include_pad=1),
    average("ceil", 2, 3, 6, 8, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    average("ceil_pads", 2, 3, 7, 8, kernel_shape=[3, 3], pads=[0, 1, 1, 0], strides=[3, 2],
            ceil_mode=1),
    average("ceil_pads_counted", 2, 3, 7, 8, kernel_shape=[3, 3], pads=[0, 1, 1, 0],
            strides=[3, 2], ceil_mode=1, count_include_pad=1),
    average("ceil_dropped", 1, 1, 5, 4, kernel_shape=[2, 2], pads=[1, 1, 1, 1], **DROPPED),
    average("ceil_dropped_counted", 2, 3, 3, 4, kernel_shape=[2, 3], pads=[1, 0, 1, 0],
            strides=[2, 2], ceil_mode=1, count_include_pad=1, opset=22),
    average("larger", 2, 3, 4, 3, kernel_shape=[90, 70], strides=[90, 70], ceil_mode=1),
    average("larger_counted", 2, 3, 4, 3, kernel_shape=[90, 70], strides=[90, 70], ceil_mode=1,
            count_include_pad=1),
    average("larger_pads", 2, 3, 4, 3, kernel_shape=[9, 7], pads=[2, 1, 0, 2], strides=[9, 4],
            ceil_mode=1, count_include_pad=1),
    average("larger_on_one_axis", 2, 3, 7, 3, kernel_shape=[2, 7], strides=[3, 7], ceil_mode=1),
    average("larger_windows", 2, 3, 5, kernel_shape=[8], pads=[5, 4], strides=[2]),
    average("larger_windows_stride_1", 2, 3, 5, kernel_shape=[8], pads=[5, 4], count_include_pad=1),
    average("larger_dilations", 2, 3, 5, kernel_shape=[4], dilations=[3], pads=[3, 3], strides=[2],
            count_include_pad=1),
    average("dilations", 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3], strides=[1, 2]),
    average("dilations_pads", 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3],
            pads=[1, 0, 2, 1]),
    average("valid", 2, 3, 7, 6, kernel_shape=[3, 2], auto_pad="VALID", strides=[2, 2]),
    average("same_upper", 2, 3, 7, 6, kernel_shape=[3, 2], auto_pad="SAME_UPPER"),
    average("same_lower_strides", 2, 3, 8, 7, kernel_shape=[3, 2], auto_pad="SAME_LOWER",
            strides=[2, 3]),
    average("same_upper_strides_counted", 2, 3, 8, 7, kernel_shape=[3, 2],
            auto_pad="SAME_UPPER", strides=[2, 3], count_include_pad=1),
    Case("GlobalAveragePool", [normal(2, 3, 4, 5, dtype=np.float32)], orders=2, **UNIT),
    Case("GlobalAveragePool", [normal(2, 3, 4, dtype=np.float32)], orders=2, **UNIT),
]  # fmt: skip
AVERAGE = quick(
    AVERAGE,
    """
    AveragePool-ceil_pads_counted-2x3x7x8
    AveragePool-larger_counted-2x3x4x3
    AveragePool-larger_dilations-2x3x5
    AveragePool-stride_1-2x3x6x4
    GlobalAveragePool-2x3x4x5
    """,
)

MAXIMUM = [
    maximum("1d", 2, 3, 7, kernel_shape=[3], strides=[2], pads=[1, 1]),
    maximum("3d", 1, 2, 4, 5, 4, kernel_shape=[2, 3, 2], strides=[1, 2, 2]),
    maximum("tiles", 2, 3, 6, 4, kernel_shape=[2, 2], strides=[2, 2]),
    maximum32("tiles", 2, 3, 6, 4, kernel_shape=[2, 2], strides=[2, 2]),
    maximum32("tiles_3d", 1, 2, 4, 3, 2, kernel_shape=[2, 3, 1], strides=[2, 3, 1]),
    maximum32("tiles_1d", 1, 2, 6, kernel_shape=[3], strides=[3]),
    maximum32("left_over", 2, 3, 7, 5, kernel_shape=[2, 2], strides=[2, 2]),
    maximum("overlap", 2, 3, 6, 5, kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
    maximum("ceil", 2, 3, 6, 8, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    maximum("ceil_dropped", 2, 3, 5, 4, kernel_shape=[2, 2], pads=[1, 1, 1, 1], **DROPPED),
    maximum32("ceil_dropped_on_one_axis", 2, 3, 3, 4, kernel_shape=[2, 3], pads=[1, 0, 1, 0],
              strides=[2, 2], ceil_mode=1, opset=22),
    maximum("larger", 2, 3, 4, 3, kernel_shape=[90, 70], strides=[90, 70], ceil_mode=1),
    maximum32("larger_windows", 2, 3, 5, kernel_shape=[8], pads=[5, 4], strides=[2]),
    maximum("dilations", 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3], strides=[1, 2]),
    maximum("same_upper", 2, 3, 8, 7, kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 3]),
    maximum("same_lower", 2, 3, 8, 7, kernel_shape=[3, 2], auto_pad="SAME_LOWER"),
    maximum("column_major", 2, 3, 6, 5, kernel_shape=[3, 2], storage_order=1),
    Case("GlobalMaxPool", [distinct(2, 3, 4, 5, gap=1.0).astype(np.float32)], epsilon=0.1,
         rtol=2e-5, orders=2),
    Case("GlobalMaxPool", [distinct(2, 3, 4, gap=1.0).astype(np.float32)], epsilon=0.1, rtol=2e-5),
]  # fmt: skip
MAXIMUM = quick(
    MAXIMUM,
    """
    MaxPool-column_major-2x3x6x5
    MaxPool-left_over-2x3x7x5
    GlobalMaxPool-2x3x4x5
    """,
)

NORM = [
    Case("GlobalLpPool", [normal(2, 3, 4, 5, dtype=np.float32)], orders=2, epsilon=0.01, rtol=5e-4),
    Case("GlobalLpPool", [normal(2, 3, 4, dtype=np.float32)], {"p": 3}, epsilon=0.01, rtol=5e-4),
    norm("1", 1, 2, 3, 7, kernel_shape=[3], strides=[2]),
    norm("2", 2, 2, 3, 6, 5, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    norm("3", 3, 2, 3, 6, 5, kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 3]),
    norm("4", 4, 2, 3, 6, 8, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    norm("ceil_dropped", 2, 2, 3, 5, 4, kernel_shape=[2, 2], pads=[1] * 4, **DROPPED),
    norm("larger", 2, 2, 3, 4, 3, kernel_shape=[90, 70], strides=[90, 70], ceil_mode=1),
    norm("larger_windows", 3, 2, 3, 5, kernel_shape=[8], pads=[5, 4], strides=[2]),
    norm("dilations", 2, 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3]),
]
NORM = quick(
    NORM,
    """
    GlobalLpPool-2x3x4
    GlobalLpPool-2x3x4x5
    LpPool-4-2x3x6x8
    """,
)

INDICES = np.array([[[[5, 7], [12, 14]]], [[[16, 19], [26, 30]]]])
UNPOOL = [
    Case("MaxUnpool", [normal(2, 1, 2, 2, dtype=np.float32), INDICES],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, orders=2, **UNIT),
    Case("MaxUnpool", [normal(2, 1, 2, 2, dtype=np.float32), INDICES, np.array([2, 1, 5, 5])],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, orders=2, constant=[2], **UNIT),
]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(AVERAGE + MAXIMUM + NORM + UNPOOL)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def lowered(case: Case, dims: tuple[str | int, ...] | None = None) -> onnx.ModelProto:
    """Returns the gradient of Σ w · op(x) with respect to x."""
    return lowered_each([case], [() if dims else output_of(case).shape], dims)


def lowered_each(
    cases: Sequence[Case], sizes: Sequence[Sequence[int]], dims: tuple[str | int, ...] | None
) -> onnx.ModelProto:
    """Returns the same for cases of one opset with one x, each with its w, w1, w2, ….

    Args:
        cases: The cases.
        sizes: The shapes of their outputs, unless there are `dims`.
        dims: The dimensions of x.
    """
    (x,) = cases[0].inputs
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [helper.make_tensor_value_info("x", kind, x.shape if dims is None else dims)]
    nodes, outputs = [], []
    for number, (case, size) in enumerate(zip(cases, sizes, strict=True)):
        end = str(number or "")
        y, w, wy, dx = (name + end for name in ("y", "w", "wy", "dx"))
        nodes += [
            helper.make_node(case.op, ["x"], [y], name=f"under_test{end}", **case.attributes),
            helper.make_node("Mul", [w, y], [wy]),
            helper.make_node("Gradient", ["x"], [dx], domain=DOMAIN, xs=["x"], y=wy),
        ]
        symbols = [letter + end for letter in "nmopq"[: x.ndim]]
        inputs.append(helper.make_tensor_value_info(w, kind, size if dims is None else symbols))
        outputs.append(helper.make_empty_tensor_value_info(dx))
    graph = helper.make_graph(nodes, "gradient", inputs, outputs)
    imports = [helper.make_opsetid("", cases[0].opset), helper.make_opsetid(DOMAIN, 1)]
    return ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))


def output_of(case: Case) -> np.ndarray:
    (x,) = case.inputs
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(case.op, ["x"], ["y"], **case.attributes)],
        "f",
        [helper.make_tensor_value_info("x", kind, ["N", "C", "H", "W", "D"][: x.ndim])],
        [helper.make_empty_tensor_value_info("y")],
    )
    imports = [helper.make_opsetid("", case.opset)]
    return run(helper.make_model(graph, opset_imports=imports, ir_version=10), {"x": x})[0]


TIES = [
    ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]},
     [[1, 1, 0, 0], [1, 1, 0, 2], [3, 4, 5, 5], [4, 3, 5, 6]],
     [[1, 0, 0, 0], [0, 0, 0, 2], [0, 3, 0, 0], [0, 0, 0, 4]]),
    # Windows that overlap: what several of them take adds up.
    ("MaxPool", {"kernel_shape": [2, 2]},
     [[7, 7, 7], [7, 9, 7], [7, 7, 9]],
     [[0, 0, 0], [0, 10, 0], [0, 0, 0]]),
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]},
     [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
     [[1, 2, 0], [3, 4, 0], [0, 0, 0]]),
    ("GlobalMaxPool", {}, [[1, 5, 2], [5, 5, 0], [0, 0, 5]], [[0, 1, 0], [0, 0, 0], [0, 0, 0]]),
    # A window of zeros: the subgradient of the norm is 0.
    ("LpPool", {"kernel_shape": [1, 2], "strides": [1, 2]}, [[0, 0, 3, 4]], [[0, 0, 1.2, 1.6]]),
    ("LpPool", {"kernel_shape": [1, 2], "strides": [1, 2], "p": 1}, [[0, 0, 0, -4]],
     [[0, 0, 0, -2]]),
    ("LpPool", {"kernel_shape": [1, 2], "strides": [1, 2], "p": 3}, [[0, 0, 0, -4]],
     [[0, 0, 0, -2]]),
    ("GlobalLpPool", {}, [[0, 0, 0]], [[0, 0, 0]]),
]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(("op", "attributes", "x", "expected"), TIES)
def test_ties_and_kinks(
    op: str, attributes: dict[str, Any], x: list[Any], expected: list[Any], symbolic: bool
) -> None:
    """The windows are weighted 1, 2, 3, …; of equal elements the first one of a window counts."""
    x_array = np.array(x, np.float32)[None, None]
    case = Case(op, [x_array], attributes)
    size = output_of(case).shape
    w = np.arange(1, 1 + np.prod(size), dtype=np.float32).reshape(size)
    model = lowered(case, ("N", "C", "H", "W") if symbolic else None)
    np.testing.assert_allclose(run(model, {"x": x_array, "w": w})[0][0, 0], expected, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [("N", "C", 8, 6), ("N", 3, "H", "W")], ids=["batch", "sizes"])
@by_case(AVERAGE + MAXIMUM + NORM)
def test_unknown_sizes_give_the_same(case: Case, dims: tuple[str | int, ...]) -> None:
    x = case.inputs[0].astype(np.float32)
    known = tuple(
        size if isinstance(dim, int) else dim
        for size, dim in zip(x.shape, (*dims, dims[-1]), strict=False)
    )
    known = tuple(f"{dim}{axis}" if isinstance(dim, str) else dim for axis, dim in enumerate(known))
    case = replace(case, inputs=[x])
    w = normal(*output_of(case).shape, dtype=np.float32)
    (expected,) = run(lowered(case), {"x": x, "w": w})
    (found,) = run(lowered(case, known), {"x": x, "w": w})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(AVERAGE + MAXIMUM + NORM)
def test_empty_batch(case: Case, symbolic: bool) -> None:
    x = case.inputs[0].astype(np.float32)
    w = output_of(replace(case, inputs=[x]))[:0]
    model = lowered(replace(case, inputs=[x[:0]]), ("N", *x.shape[1:]) if symbolic else None)
    assert run(model, {"x": x[:0], "w": w})[0].shape == (0, *x.shape[1:])


@pytest.mark.parametrize(
    ("op", "attributes", "expected"),
    [
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2]}, "MaxUnpool"),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
         "Div AveragePool Mul"),
        ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2]},
         "Div Reshape ConvTranspose Reshape"),
        ("GlobalAveragePool", {}, "Div Expand"),
    ],
)  # fmt: skip
def test_nodes(op: str, attributes: dict[str, Any], expected: str) -> None:
    model = lowered(Case(op, [normal(2, 3, 8, 6, dtype=np.float32)], attributes))
    emitted = [node for node in model.graph.node if node.name.startswith("Gradient/under_test/")]
    assert [n.op_type for n in emitted if n.op_type != "Constant"] == expected.split()


WIDE = [
    (length, window, stride, pads, ceil_mode)
    for length, window, pads, stride, ceil_mode in itertools.product(
        [1, 2, 3, 5, 6],
        [(1, 1), (2, 1), (3, 1), (2, 2), (2, 3), (7, 1)],  # kernel and dilation
        [(0, 0), (1, 1), (0, 1), (2, 2), (6, 3)],
        [1, 2, 3, 5],
        [0, 1],
    )
    if max(pads) < window[0] and length + sum(pads) > (window[0] - 1) * window[1]
]
"""Numbers of elements, and the windows that are taken of them."""


def taken(x: np.ndarray, given: Any) -> list[np.ndarray]:
    """Returns the places that each window of a pooling takes, as onnxruntime and PyTorch count."""
    length, (kernel, dilation), stride, (begin, end), ceil_mode = given
    room = length + begin + end - (kernel - 1) * dilation - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    windows = [number * stride - begin + dilation * np.arange(kernel) for number in range(count)]
    if ceil_mode and windows[-1][0] >= length:  # it would start in the padding at the end
        windows.pop()
    return windows


def expected_of(op: str, given: Any, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Returns the gradient of Σ w · op(x), window by window."""
    expected = np.zeros_like(x)
    pads = given[3]
    for channel, (number, places) in itertools.product((0, 1), enumerate(taken(x, given))):
        g = w[0, channel, number]
        inside = places[(places >= 0) & (places < given[0])]
        counted = places[(places >= -pads[0]) & (places < given[0] + pads[1])]
        seen = x[0, channel, inside]
        if op == "MaxPool" and inside.size:
            expected[0, channel, inside[seen.argmax()]] += g
        elif op == "LpPool":
            expected[0, channel, inside] += g * seen / max(np.sqrt(np.sum(seen**2)), 1e-9)
        elif "AveragePool" in op and inside.size:
            expected[0, channel, inside] += g / (counted if "counted" in op else inside).size
    return expected


CUT_OFF = [
    (2, {"kernel_shape": [3], "strides": [2]}, [0.5, 0.5]),
    (2, {"kernel_shape": [3], "strides": [3], "count_include_pad": 1}, [0.5, 0.5]),
    (1, {"kernel_shape": [3], "strides": [2], "pads": [0, 1], "count_include_pad": 1}, [0.5]),
    (2, {"kernel_shape": [2], "dilations": [2], "strides": [2]}, [1.0, 0.0]),
]
"""Single windows larger than the padded input, which onnxruntime cuts off."""


@pytest.mark.parametrize("opset", [21, 22])
@pytest.mark.parametrize(("length", "attributes", "expected"), CUT_OFF)
def test_average_of_a_window_that_is_cut_off(
    length: int, attributes: dict[str, Any], expected: list[float], opset: int
) -> None:
    x, w = np.ones((1, 1, length), np.float32), np.ones((1, 1, 1), np.float32)
    case = Case("AveragePool", [x], attributes, opset=opset)
    np.testing.assert_allclose(run(lowered(case), {"x": x, "w": w})[0][0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("op", ["AveragePool", "LpPool"])
def test_a_kernel_much_larger_than_an_input_of_unknown_size(op: str) -> None:
    """As in EfficientNets of transformers; a transposed convolution would take gigabytes."""
    attributes = {"kernel_shape": [1280, 640], "strides": [1280, 640], "ceil_mode": 1}
    x, w = normal(2, 3, 4, 5, dtype=np.float32), normal(2, 3, 1, 1, dtype=np.float32)
    case = Case(op, [x], attributes)
    model = lowered_each([case], [w.shape], ("N", "C", "H", "W"))
    expected = (
        w / 20 + 0 * x
        if op == "AveragePool"
        else w * x / np.sqrt((x**2).sum((2, 3), keepdims=True))
    )
    np.testing.assert_allclose(run(model, {"x": x, "w": w})[0], expected, rtol=1e-5)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("opset", [21, 22])
@pytest.mark.parametrize(
    ("op", "large"),
    [
        *((op, 256) for op in ("MaxPool", "AveragePool", "counted AveragePool", "LpPool")),
        *((op, 0) for op in ("AveragePool", "counted AveragePool", "LpPool")),  # by products
    ],
)
def test_against_windows_in_float64(
    op: str, opset: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also windows that reach beyond the padding, and those that meet no element at all.

    Gradients of one x are computed by one model, and for unknown sizes by one model for all x.
    """
    monkeypatch.setattr(pooling, "_LARGE_KERNEL", large)
    at_run_time = {}
    for (length, window, pads), group in itertools.groupby(WIDE, operator.itemgetter(0, 1, 3)):
        x = np.random.default_rng(length).permutation(2 * length) - length + 0.5
        x = x.reshape(1, 2, length)
        cases, feeds, expected = [], {"x": x.astype(np.float32)}, {}
        for given in group:
            attributes = {"kernel_shape": window[:1], "dilations": window[1:], "pads": pads}
            attributes |= {"strides": given[2:3], "ceil_mode": given[4]}
            if "counted" in op:
                attributes["count_include_pad"] = 1
            count = len(taken(x, given))
            w = np.arange(1.0, 1.0 + 2 * count).reshape(1, 2, count)
            feeds[f"w{len(cases) or ''}"] = w.astype(np.float32)
            expected[given] = expected_of(op, given, x, w)
            cases.append(Case(op.split()[-1], [feeds["x"]], attributes, opset=opset))
        sizes = [array.shape for array in feeds.values()][1:]
        if (window, pads) not in at_run_time:
            at_run_time[window, pads] = lowered_each(cases, sizes, ("N", "C", "L"))
        for model in (lowered_each(cases, sizes, None), at_run_time[window, pads]):
            for (given, array), found in zip(expected.items(), run(model, feeds), strict=True):
                np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-5, err_msg=f"{given}")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("inferred", [False, True], ids=["bare", "inferred by onnx"])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_a_network_of_an_older_opset_is_trained_like_one_of_version_22(
    op: str, inferred: bool
) -> None:
    """3 x 3 pixels have 2 x 2 windows, of which onnx counts 3 x 3 before version 22."""
    rng = np.random.default_rng(0)
    weights = {"w": normal(4, 2, 3, 3, dtype=np.float32), "d": normal(16, 3, dtype=np.float32)}
    x = rng.standard_normal((12, 2, 3, 3)).astype(np.float32)
    data = {"x": x, "labels": rng.integers(0, 3, 12)}
    pooling = {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        helper.make_node(op, ["c"], ["p"], **pooling),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "d"], ["y"]),
    ]
    found = {}
    for opset, sizes in itertools.product((14, 21, 22), ((3, 3), ("H", "W"))):
        graph = helper.make_graph(
            nodes,
            "network",
            [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 2, *sizes])],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 3])],
            [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        imports = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10)
        if inferred:
            model = onnx.shape_inference.infer_shapes(model)
        session = ortops.TrainingSession(
            ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")
        )
        history = session.fit(data, epochs=3, batch_size=5, progress=False)
        assert session.predict({"x": x}, outputs="p").shape == (12, 4, 2, 2)
        assert session.evaluate(data)["loss"] < history[0]["loss"]
        found[opset, sizes] = history.history["loss"]
    for losses in found.values():
        np.testing.assert_allclose(losses, found[22, (3, 3)], rtol=1e-6)


def test_padding_that_the_standard_and_onnxruntime_disagree_on_is_refused() -> None:
    attributes = {"kernel_shape": [3], "auto_pad": "SAME_UPPER", "dilations": [2], "strides": [2]}
    with pytest.raises(ortops.UnsupportedError) as error:
        lowered(
            Case("AveragePool", [normal(1, 1, 7, dtype=np.float32)], attributes), ("N", "C", "L")
        )
    assert str(error.value) == (
        "AveragePool node 'under_test': no gradient for auto_pad SAME_UPPER with dilations [2], "
        "for which the padding of onnxruntime differs from the standard; use explicit pads"
    )


KINDS = ["max", "max_dilated", "average", "average_counted", "norm"]
GRID = list(
    itertools.product(
        [(2, 2), (3, 2), (3, 3)],  # kernel
        [(1, 1), (2, 2), (2, 3), (3, 2)],  # strides
        [(0, 0), (1, 1)],  # pads
        [0, 1],  # ceil_mode
    )
)


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("opset", [21, 22])  # before 22, onnx counts windows in the padding
@pytest.mark.parametrize("kind", KINDS)
def test_like_torch(kind: str, opset: int) -> None:
    """Gradients of one x for all windows, computed by one model."""
    import torch

    functional = torch.nn.functional
    # Small integers, so that there are ties.
    x = np.random.default_rng(5).integers(0, 4, (2, 3, 8, 9)).astype(np.float32) + (kind == "norm")
    cases, feeds, expected, wrong = [], {"x": x}, [], []
    for kernel, strides, pads, ceil_mode in GRID:
        leaf = torch.tensor(x, requires_grad=True)
        attributes: dict[str, Any] = {
            "kernel_shape": kernel, "strides": strides, "pads": pads * 2, "ceil_mode": ceil_mode
        }  # fmt: skip
        given = {"stride": strides, "padding": pads, "ceil_mode": bool(ceil_mode)}
        match kind:
            case "max":
                op, y = "MaxPool", functional.max_pool2d(leaf, kernel, **given)
            case "max_dilated":
                op, attributes["dilations"] = "MaxPool", [2, 1]
                y = functional.max_pool2d(leaf, kernel, dilation=(2, 1), **given)
            case "norm" if ceil_mode:  # PyTorch's lp_pool scales what it cuts off
                continue
            case "norm":
                op = "LpPool"
                padded = functional.pad(leaf, (pads[1], pads[1], pads[0], pads[0]))
                y = functional.lp_pool2d(padded, 2.0, kernel, strides)
            case _:
                op, attributes["count_include_pad"] = "AveragePool", int(kind == "average_counted")
                y = functional.avg_pool2d(
                    leaf, kernel, count_include_pad=kind == "average_counted", **given
                )
        case = Case(op, [x], attributes, opset=opset)
        if output_of(case).shape != tuple(y.shape):
            wrong.append(f"{attributes}: shape {output_of(case).shape}, PyTorch has {y.shape}")
            continue
        w = normal(*y.shape, dtype=np.float32)
        (y * torch.tensor(w)).sum().backward()
        feeds[f"w{len(cases) or ''}"] = w
        cases.append(case)
        expected.append(leaf.grad.numpy())
    sizes = [array.shape for array in feeds.values()][1:]
    assert len(cases) >= 24
    for dims in (None, ("N", 3, "H", "W")):
        results = run(lowered_each(cases, sizes, dims), feeds)
        for case, right, found in zip(cases, expected, results, strict=True):
            if not np.allclose(found, right, rtol=1e-5, atol=1e-5):
                wrong.append(f"{case.attributes}, {dims}: off by {np.abs(found - right).max()}")
    assert wrong == []
