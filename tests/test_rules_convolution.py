"""Rules of convolutions against differences and PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, check, normal
from onnx import helper
from running import run

from tests import spies

UNIT = {"epsilon": 1.0, "rtol": 3e-6}
"""A convolution is linear in each argument: a step of 1 is exact, to the rounding of float32."""


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed, dtype=np.float32)


def case(
    name: str, op: str, x: tuple[int, ...], w: tuple[int, ...], *, bias: int = 0, **attributes: Any
) -> Case:
    inputs = [floats(*x), floats(*w, seed=1), *([floats(bias, seed=2)] if bias else [])]
    return Case(op, inputs, attributes, orders=2, name=name, **UNIT)


X = (2, 4, 7, 6)
W = (6, 4, 3, 2)
CONV = [
    case("1d", "Conv", (2, 3, 8), (4, 3, 3), bias=4, pads=[1, 2]),
    case("2d", "Conv", X, W, bias=6),
    case("3d", "Conv", (2, 2, 4, 5, 4), (3, 2, 2, 3, 1), strides=[1, 2, 2],
         pads=[0, 1, 1, 1, 0, 0]),
    case("kernel_shape", "Conv", X, W, kernel_shape=[3, 2], pads=[1, 0, 2, 1]),
    case("strides", "Conv", X, W, strides=[2, 3], pads=[1, 1, 0, 1]),
    case("gaps", "Conv", (2, 3, 9, 8), (4, 3, 2, 2), strides=[3, 4]),
    case("left_over", "Conv", (1, 2, 12, 11), (3, 2, 2, 3), strides=[5, 4], dilations=[1, 2]),
    case("dilations", "Conv", X, W, dilations=[2, 3], pads=[2, 1, 1, 2]),
    case("dilations_strides", "Conv", (2, 3, 9, 9), (6, 3, 3, 2), bias=6, dilations=[2, 3],
         strides=[3, 2], pads=[2, 1, 0, 2]),
    case("wide_pads", "Conv", X, W, pads=[4, 3, 3, 5]),
    case("pointwise", "Conv", X, (5, 4, 1, 1), bias=5),
    case("pointwise_strides", "Conv", X, (5, 4, 1, 1), strides=[2, 2]),
    case("pointwise_many_channels", "Conv", (2, 6, 3, 2), (8, 6, 1, 1)),
    case("one_channel", "Conv", (3, 1, 6, 6), (4, 1, 3, 3), pads=[1, 1, 1, 1]),
    case("large_kernel", "Conv", (2, 3, 11, 10), (4, 3, 7, 6), strides=[2, 1], pads=[3, 3, 3, 3]),
    case("large_kernel_groups", "Conv", (2, 4, 11, 10), (6, 2, 7, 6), group=2, strides=[2, 3],
         dilations=[1, 2], pads=[3, 3, 3, 3]),
    case("shifts", "Conv", (2, 6, 16, 5), (4, 6, 3, 3), pads=[1, 0, 2, 1]),
    case("shifts_dilations", "Conv", (2, 6, 18, 8), (4, 6, 3, 2), dilations=[2, 3],
         pads=[2, 1, 0, 3]),
    case("shifts_same", "Conv", (2, 6, 18, 8), (4, 6, 3, 3), auto_pad="SAME_LOWER"),
    case("groups", "Conv", X, (6, 2, 3, 2), bias=6, group=2, pads=[1, 0, 1, 1]),
    case("groups_strides", "Conv", X, (6, 2, 3, 2), group=2, strides=[2, 2], dilations=[1, 2]),
    case("depthwise", "Conv", X, (4, 1, 3, 3), bias=4, group=4, pads=[1, 1, 1, 1]),
    case("depthwise_strides", "Conv", X, (4, 1, 3, 3), group=4, strides=[2, 2]),
    case("depthwise_multiplier", "Conv", X, (8, 1, 3, 2), bias=8, group=4, pads=[1, 0, 1, 1]),
    case("valid", "Conv", X, W, auto_pad="VALID", strides=[2, 1]),
    case("same_upper", "Conv", X, W, auto_pad="SAME_UPPER"),
    case("same_lower", "Conv", X, W, auto_pad="SAME_LOWER", bias=6),
    case("same_upper_strides", "Conv", X, W, auto_pad="SAME_UPPER", strides=[2, 4]),
    case("same_lower_strides", "Conv", X, (6, 2, 3, 2), auto_pad="SAME_LOWER", strides=[2, 4],
         group=2, bias=6),
    case("same_upper_gaps", "Conv", (1, 2, 9, 7), (3, 2, 2, 1), auto_pad="SAME_UPPER",
         strides=[4, 3]),
]  # fmt: skip
CONV = quick(
    CONV,
    """
    Conv-dilations-2x4x7x6_6x4x3x2
    Conv-same_lower_strides-2x4x7x6_6x2x3x2_6
    Conv-large_kernel_groups-2x4x11x10_6x2x7x6
    Conv-kernel_shape-2x4x7x6_6x4x3x2
    Conv-groups-2x4x7x6_6x2x3x2_6
    Conv-3d-2x2x4x5x4_3x2x2x3x1
    Conv-valid-2x4x7x6_6x4x3x2
    Conv-dilations_strides-2x3x9x9_6x3x3x2_6
    Conv-same_upper_gaps-1x2x9x7_3x2x2x1
    Conv-same_upper_strides-2x4x7x6_6x4x3x2
    Conv-pointwise_many_channels-2x6x3x2_8x6x1x1
    Conv-shifts_same-2x6x18x8_4x6x3x3
    """,
)

V = (4, 3, 3, 2)
TRANSPOSE = [
    case("1d", "ConvTranspose", (2, 3, 5), (3, 4, 3), bias=4, strides=[2], pads=[1, 0]),
    case("2d", "ConvTranspose", (2, 4, 4, 5), V, bias=3),
    case("3d", "ConvTranspose", (1, 2, 3, 2, 3), (2, 3, 2, 2, 1), strides=[1, 2, 3]),
    case("strides", "ConvTranspose", (2, 4, 4, 5), V, strides=[2, 3], pads=[1, 0, 1, 1]),
    case("output_padding", "ConvTranspose", (2, 4, 4, 5), V, strides=[2, 3],
         output_padding=[1, 2], pads=[1, 0, 1, 1]),
    case("dilations", "ConvTranspose", (2, 4, 4, 5), V, strides=[2, 1], dilations=[2, 3]),
    case("groups", "ConvTranspose", (2, 4, 4, 5), V, bias=6, group=2, strides=[2, 1]),
    case("depthwise", "ConvTranspose", (2, 4, 4, 5), (4, 1, 3, 2), group=4, strides=[2, 2]),
    case("large_kernel", "ConvTranspose", (2, 2, 4, 5), (2, 3, 7, 6), strides=[2, 3], bias=3),
    case("valid", "ConvTranspose", (2, 4, 4, 5), V, auto_pad="VALID", strides=[2, 3]),
    case("same_upper", "ConvTranspose", (2, 4, 4, 5), V, auto_pad="SAME_UPPER", strides=[2, 1]),
    case("same_lower", "ConvTranspose", (2, 4, 4, 5), V, auto_pad="SAME_LOWER", strides=[2, 1]),
    case("output_shape", "ConvTranspose", (2, 4, 4, 5), V, output_shape=[8, 13], strides=[2, 3]),
    case("output_shape_upper", "ConvTranspose", (2, 4, 4, 5), V, output_shape=[8, 13],
         strides=[2, 3], auto_pad="SAME_UPPER"),
]  # fmt: skip
TRANSPOSE = quick(
    TRANSPOSE,
    """
    ConvTranspose-output_padding-2x4x4x5_4x3x3x2
    ConvTranspose-output_shape_upper-2x4x4x5_4x3x3x2
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(9)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CONV + TRANSPOSE)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def lowered(
    op: str,
    arrays: list[np.ndarray],
    attributes: dict[str, Any],
    dims: tuple[str | int, ...] | None = None,
    opset: int = 21,
    size: tuple[str | int, ...] = ("n", "m", "o", "p", "q"),
) -> onnx.ModelProto:
    """Returns the gradient of Σ w · op(x0, x1, …) with respect to x0, x1, …

    x0 is an input with the given dimensions, the others are initializers, as in a trained model.
    """
    names = [f"x{index}" for index in range(len(arrays))]
    gradient = helper.make_node(
        "Gradient", names, [f"d{name}" for name in names], domain=DOMAIN, xs=names, y="wy"
    )
    nodes = [
        helper.make_node(op, names, ["y"], name="under_test", **attributes),
        helper.make_node("Mul", ["w", "y"], ["wy"]),
        gradient,
    ]
    inputs = [
        helper.make_tensor_value_info("x0", onnx.TensorProto.FLOAT, dims or arrays[0].shape),
        helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, size[: arrays[0].ndim]),
    ]
    outputs = [helper.make_empty_tensor_value_info(f"d{name}") for name in names]
    graph = helper.make_graph(nodes, "gradient", inputs, outputs)
    for name, array in zip(names[1:], arrays[1:], strict=True):
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return spies.lowered(helper.make_model(graph, opset_imports=imports, ir_version=10))


def output_of(case: Case) -> np.ndarray:
    names = [f"x{index}" for index in range(len(case.inputs))]
    node = helper.make_node(case.op, names, ["y"], **case.attributes)
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape)
        for name, array in zip(names, case.inputs, strict=True)
    ]
    graph = helper.make_graph([node], "f", inputs, [helper.make_empty_tensor_value_info("y")])
    imports = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return run(model, dict(zip(names, case.inputs, strict=True)))[0]


@pytest.mark.nightly(30)
@pytest.mark.quick(12)
@pytest.mark.parametrize("known", [2, 4], ids=["channels", "all_but_batch"])
@by_case(CONV + TRANSPOSE)
def test_unknown_sizes_with_known_weights_give_the_same(case: Case, known: int) -> None:
    x, *parameters = case.inputs
    w = floats(*output_of(case).shape, seed=7)
    dims = (
        "N",
        *(size if axis < known else f"S{axis}" for axis, size in enumerate(x.shape[1:], 1)),
    )
    static = lowered(case.op, [x, *parameters], case.attributes)
    symbolic = lowered(case.op, [x, *parameters], case.attributes, dims, opset=22)
    feeds = {"x0": x, "w": w}
    for expected, found in zip(run(static, feeds), run(symbolic, feeds), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


TAPS = 9 * "Slice "
BY_IMAGE = "Reshape Reshape Transpose MatMul ReduceSum Reshape"
JOINED = "Reshape Reshape Gemm Reshape"
MOVED_PRODUCT = "Reshape Transpose Reshape MatMul ReduceSum Reshape Transpose"
MOVED = "Slice Slice Slice Concat Pad Pad Pad Concat"
SAME = {"pads": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("data", "weights", "attributes", "expected"),
    [
        # dx: mirrored weights; dw: the columns times the cotangent, for all images at once.
        (X, (6, 4, 3, 3), SAME,
         f"Slice Transpose Conv Pad Transpose Transpose {TAPS} Concat {JOINED} Transpose"),
        # The same, image by image.
        ((2, 4, 20, 20), (16, 4, 3, 3), SAME,
         f"Slice Transpose Conv Pad {TAPS} Concat {BY_IMAGE} Transpose"),
        # Large images: the input moved sideways, the cotangent up and down.
        ((2, 4, 20, 20), (4, 4, 3, 3), SAME,
         f"Slice Transpose Conv Pad {MOVED} {MOVED_PRODUCT}"),
        # Pointwise: the input itself is the columns.
        (X, (6, 4, 1, 1), {}, f"Transpose Conv {BY_IMAGE}"),
        (X, (60, 4, 1, 1), {"strides": [2, 2]},
         f"ConvTranspose Transpose Transpose Slice {JOINED}"),
        # Large kernels: batch and channels exchanged.
        (X, (6, 4, 7, 7), {"pads": [3, 3, 3, 3]},
         "Slice Transpose Conv Transpose Transpose Conv Transpose"),
        # Depthwise: a sum for each kernel element.
        (X, (4, 1, 3, 3), {**SAME, "group": 4},
         f"Slice Conv Pad {TAPS} {9 * 'Mul ReduceSum '} {9 * 'Unsqueeze '} Concat Reshape"),
    ],
)  # fmt: skip
def test_nodes(
    data: tuple[int, ...], weights: tuple[int, ...], attributes: dict[str, Any], expected: str
) -> None:
    x, w = floats(*data), floats(*weights)
    size = output_of(Case("Conv", [x, w], attributes)).shape
    model = lowered("Conv", [x, w], attributes, data, size=size)
    emitted = [node for node in model.graph.node if node.name.startswith("Gradient/under_test/")]
    assert [n.op_type for n in emitted if n.op_type != "Constant"] == expected.split()


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(0, 4, 7, 6), ("N", 4, "H", "W")], ids=["static", "symbolic"])
@by_case([case for case in CONV + TRANSPOSE if case.inputs[0].shape == X])
def test_empty_batch(case: Case, dims: tuple[str | int, ...]) -> None:
    x, *parameters = case.inputs
    w = output_of(case)[:0]
    model = lowered(case.op, [x[:0], *parameters], case.attributes, dims)
    dx, *rest = run(model, {"x0": x[:0], "w": w})
    assert dx.shape == (0, 4, 7, 6)
    for parameter, found in zip(parameters, rest, strict=True):
        np.testing.assert_array_equal(found, np.zeros_like(parameter))


GRID = list(
    itertools.product(
        [(1, 1), (3, 2), (6, 5)],  # kernel
        [(1, 1), (2, 3)],  # strides
        [(1, 1), (2, 1)],  # dilations
        [(0, 0), (2, 1)],  # pads
        [1, 2, 4],  # groups
    )
)


@pytest.mark.nightly(50)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("transposed", [False, True], ids=["Conv", "ConvTranspose"])
@pytest.mark.parametrize(("kernel", "strides", "dilations", "pads", "group"), GRID)
def test_like_torch(
    transposed: bool,
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    pads: tuple[int, int],
    group: int,
) -> None:
    import torch

    x, b = floats(2, 4, 12, 11), floats(8, seed=2)
    w = floats(*((4, 8 // group) if transposed else (8, 4 // group)), *kernel, seed=1)
    leaves = [torch.tensor(array, requires_grad=True) for array in (x, w, b)]
    functional = torch.nn.functional
    function = functional.conv_transpose2d if transposed else functional.conv2d
    y = function(*leaves, stride=strides, padding=pads, dilation=dilations, groups=group)
    weights = floats(*y.shape, seed=7)
    (y * torch.tensor(weights)).sum().backward()
    op = "ConvTranspose" if transposed else "Conv"
    attributes = {
        "strides": strides, "pads": pads * 2, "dilations": dilations, "group": group
    }  # fmt: skip
    model = lowered(op, [x, w, b], attributes, ("N", 4, 12, 11))
    for leaf, found in zip(leaves, run(model, {"x0": x, "w": weights}), strict=True):
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-4, atol=1e-4)
