"""Rules of operators that sample images, against differences, expected values and PyTorch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, check, distinct, lowered, normal, uniform
from onnx import helper
from running import run

import ortops

SHAPES = {4: ((2, 3, 4, 5), (2, 3, 4, 2)), 5: ((2, 3, 3, 4, 5), (2, 2, 3, 2, 3))}


def grid(case_rank: int, mode: str, padding: str, align_corners: int, orders: int = 1) -> Case:
    """Coordinates in and around the image; their grid does not meet the elements'."""
    x, coordinates = SHAPES[case_rank]
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    return Case(
        "GridSample",
        [normal(*x), uniform(-1.6, 1.6, *coordinates, seed=1)],
        attributes,
        only=[0] if mode == "nearest" else None,
        orders=orders,
        epsilon=1e-6,
        rtol=1e-6,
        name=f"{mode}_{padding}_{align_corners}",
    )


GRID = [
    grid(rank, mode, padding, corners, orders=2)
    for rank, mode, padding, corners in itertools.product(
        (4, 5), ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
    if (rank, mode) != (5, "cubic")
]
GRID = quick(
    GRID,
    """
    GridSample-cubic_reflection_1-2x3x4x5_2x3x4x2
    GridSample-nearest_border_0-2x3x4x5_2x3x4x2
    GridSample-linear_zeros_0-2x3x3x4x5_2x2x3x2x3
    GridSample-cubic_zeros_1-2x3x4x5_2x3x4x2
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(3)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(GRID, "given")
def test_dot(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


UNIT = {"epsilon": 1.0, "rtol": 3e-6}
OTHERS = [
    *(
        Case("AffineGrid", [normal(*theta), np.array(size)], {"align_corners": corners},
             constant=[1], orders=2, epsilon=1.0)
        for theta, size in (((2, 2, 3), [2, 3, 4, 5]), ((2, 3, 4), [2, 1, 2, 3, 4]),
                            ((1, 2, 3), [1, 3, 1, 4]))
        for corners in (0, 1)
    ),
    Case("Col2Im", [normal(2, 8, 9, dtype=np.float32), np.array([4, 4]), np.array([2, 2])],
         constant=[1, 2], orders=2, name="plain", **UNIT),
    Case("Col2Im", [normal(2, 12, 12, dtype=np.float32), np.array([5, 6]), np.array([2, 3])],
         {"strides": [2, 2], "pads": [1, 0, 2, 2]}, constant=[1, 2], name="strides", **UNIT),
    Case("Col2Im", [normal(2, 12, 4, dtype=np.float32), np.array([5, 6]), np.array([2, 3])],
         {"dilations": [3, 2]}, constant=[1, 2], name="dilations", **UNIT),
    Case("Col2Im", [normal(1, 16, 12, dtype=np.float32), np.array([3, 4, 3]),
                    np.array([2, 2, 2])], constant=[1, 2], name="3d", **UNIT),
    Case("Col2Im", [normal(2, 6, 4, dtype=np.float32), np.array([6]), np.array([3])],
         constant=[1, 2], name="1d", **UNIT),
]  # fmt: skip
OTHERS = quick(
    OTHERS,
    """
    AffineGrid-2x2x3_4
    Col2Im-3d-1x16x12_3_3
    Col2Im-plain-2x8x9_2_2
    """,
)


def deform(
    name: str,
    *,
    outputs: tuple[int, int],
    kernel: tuple[int, int] = (3, 2),
    bias: bool = True,
    mask: bool = True,
    orders: int = 1,
    **attributes: Any,
) -> Case:
    batch, channels, filters, size = 2, 4, 4, (5, 6)
    attributes.setdefault("kernel_shape", kernel)
    groups = attributes.get("offset_group", 1)
    taps = groups * kernel[0] * kernel[1]
    return Case(
        "DeformConv",
        [
            normal(batch, channels, *size),
            normal(filters, channels // attributes.get("group", 1), *kernel, seed=1),
            2 * normal(batch, 2 * taps, *outputs, seed=2),
            normal(filters, seed=3) if bias else None,
            normal(batch, taps, *outputs, seed=4) if mask else None,
        ][: 5 if mask else 4 if bias else 3],
        attributes,
        orders=orders,
        epsilon=1e-6,
        rtol=2e-6,
        name=name,
    )


DEFORM = [
    deform("plain", outputs=(3, 5), bias=False, mask=False, orders=2),
    deform("bias", outputs=(3, 5), mask=False),
    deform("mask_without_bias", outputs=(3, 5), bias=False),
    deform("all", outputs=(3, 3), strides=[2, 2], pads=[1, 0, 1, 1], orders=2),
    deform("dilations", outputs=(3, 4), dilations=[1, 2]),
    deform("groups", outputs=(3, 5), group=2, offset_group=4),
    deform("offset_groups", outputs=(3, 5), offset_group=2),
    deform("one_tap", outputs=(5, 6), kernel=(1, 1), offset_group=2, group=2),
]
DEFORM = quick(
    DEFORM,
    """
    DeformConv-all-2x4x5x6_4x4x3x2_2x12x3x3_4_2x6x3x3
    """,
)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(OTHERS + DEFORM, "given")
def test_dot_of_others(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "given",
    [
        deform("", outputs=(3, 5)),
        deform("", outputs=(3, 3), strides=[2, 2], pads=[1, 0, 1, 1], offset_group=2, group=2),
    ],
)
def test_kernel_size_from_the_weights(given: Case, symbolic: bool) -> None:
    attributes = {name: a for name, a in given.attributes.items() if name != "kernel_shape"}
    check(replace(given, attributes=attributes), symbolic=symbolic)


ROIS = np.array(
    [[0.7, 1.1, 4.4, 5.6], [-1.3, 0.4, 2.2, 3.1], [2.6, 2.2, 8.9, 7.7], [1.1, 1.2, 1.6, 1.8]]
)
ALIGN = [
    Case(
        "RoiAlign",
        [normal(2, 3, 6, 7), ROIS, np.array([0, 1, 0, 1])],
        {
            "mode": mode,
            "sampling_ratio": ratio,
            "output_height": 2,
            "output_width": 3,
            "spatial_scale": 0.75,
            "coordinate_transformation_mode": coordinates,
        },
        constant=[2],
        orders=2,
        epsilon=1e-6,
        rtol=1e-6,
        name=f"{mode}_{ratio}_{coordinates}",
    )
    for mode, ratio, coordinates in itertools.product(
        ("avg", "max"), (0, 2), ("half_pixel", "output_half_pixel")
    )
]
ALIGN = quick(
    ALIGN,
    """
    RoiAlign-avg_0_half_pixel-2x3x6x7_4x4_4
    RoiAlign-max_0_half_pixel-2x3x6x7_4x4_4
    """,
)
ROI_POOL = Case(
    "MaxRoiPool",
    [
        distinct(2, 3, 6, 7, gap=1).astype(np.float32),
        np.array(
            [[0, 0, 1, 4, 5], [1, 2.5, 1.5, 9, 3], [1, 3, 3, 2, 2], [0, 9, 9, 12, 12]], np.float32
        ),
    ],
    {"pooled_shape": [2, 3], "spatial_scale": 0.9},
    only=[0],
    orders=2,
    epsilon=0.1,
    rtol=1e-4,
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case([*ALIGN, ROI_POOL], "given")
def test_dot_of_regions(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


def gradient_model(given: Case, *, symbolic: bool, opset: int = 21) -> onnx.ModelProto:
    """Returns the gradient of Σ w · op(x0, …) with respect to its floating-point inputs."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(given.inputs)]
    xs = [names[i] for i in given.differentiated]
    inputs = [helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, None)]
    for name, array in zip(names, given.inputs, strict=True):
        if array is not None:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            dims = [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
            inputs.append(helper.make_tensor_value_info(name, kind, dims))
    nodes = [
        helper.make_node(given.op, names, ["y"], "under_test", **given.attributes),
        helper.make_node("Mul", ["w", "y"], ["wy"]),
        helper.make_node("Gradient", xs, [f"d{x}" for x in xs], domain=DOMAIN, xs=xs, y="wy"),
    ]
    outputs = [helper.make_empty_tensor_value_info(f"d{x}") for x in xs]
    graph = helper.make_graph(nodes, "gradient", inputs, outputs)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))


def gradients(given: Case, w: np.ndarray, **settings: Any) -> list[np.ndarray]:
    model = gradient_model(given, **settings)
    known = {value.name for value in model.graph.input}
    feeds = {
        f"x{i}": array
        for i, array in enumerate(given.inputs)
        if array is not None and f"x{i}" in known
    }
    return run(model, {"w": w, **feeds})


def test_names_of_opset_16() -> None:
    x, coordinates = (array.astype(np.float32) for array in GRID[0].inputs)
    w = normal(2, 3, 3, 4, dtype=np.float32)
    for old, new in (("bilinear", "linear"), ("bicubic", "cubic"), ("nearest", "nearest")):
        found = gradients(
            Case("GridSample", [x, coordinates], {"mode": old}), w, symbolic=True, opset=16
        )
        expected = gradients(Case("GridSample", [x, coordinates], {"mode": new}), w, symbolic=False)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


KINKS = [
    # On an element, the slope is the one behind it, as in PyTorch.
    ("border", 1, [0.0], [20 - 10]),
    # On the border and beyond it, nothing changes.
    ("border", 1, [-1.0], [0]),
    ("border", 1, [1.0], [0]),
    ("border", 1, [-1.5], [0]),
    # With zeros around the image, its last element falls to 0 there.
    ("zeros", 1, [1.0], [-20]),
    ("zeros", 1, [-1.0], [10 - 0]),
]


@pytest.mark.parametrize(("padding", "corners", "at", "expected"), KINKS)
def test_kinks(padding: str, corners: int, at: list[float], expected: list[float]) -> None:
    """The image is one row of 0, 10, 20, whose elements are 1 apart in the grid's terms."""
    x = np.array([0, 10, 20], np.float32).reshape(1, 1, 1, 3)
    coordinates = np.array([[*at, 0]], np.float32).reshape(1, 1, 1, 2)
    given = Case(
        "GridSample", [x, coordinates], {"padding_mode": padding, "align_corners": corners}
    )
    _, found = gradients(given, np.ones((1, 1, 1, 1), np.float32), symbolic=False)
    np.testing.assert_array_equal(found[0, 0, 0, :1], expected)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
def test_ties_of_regions(symbolic: bool) -> None:
    """Of equal elements the first one is the maximum; a bin outside the image has none."""
    x = np.array([[5, 5, 1, 0], [5, 0, 1, 1], [2, 0, 3, 3], [2, 2, 0, 3]], np.float32)[None, None]
    rois = np.array([[0, 0, 0, 3, 3], [0, 8, 8, 9, 9]], np.float32)
    w = np.arange(1, 9, dtype=np.float32).reshape(2, 1, 2, 2)
    given = Case("MaxRoiPool", [x, rois], {"pooled_shape": [2, 2]}, only=[0])
    (found,) = gradients(given, w, symbolic=symbolic)
    expected = [[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 4, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(found[0, 0], expected)


def test_nodes_of_col2im() -> None:
    case = OTHERS[6]
    assert case.op == "Col2Im"
    model = lowered(case, symbolic=False)
    emitted = [n.op_type for n in model.graph.node if "/under_test/" in n.name]
    assert [name for name in emitted if name != "Constant"] == ["Reshape", "Gather", "Reshape"]


EMPTY = [
    ("GridSample", [(0, 2, 4, 5), (0, 3, 3, 2)], {}),
    ("GridSample", [(1, 2, 4, 5), (1, 0, 3, 2)], {"mode": "cubic"}),
    ("RoiAlign", [(1, 2, 4, 5), (0, 4), (0,)], {"output_height": 2}),
    ("RoiAlign", [(1, 2, 4, 5), (0, 4), (0,)], {"mode": "max"}),
    ("RoiAlign", [(1, 2, 4, 5), (0, 4), (0,)], {"sampling_ratio": 2}),
    ("MaxRoiPool", [(1, 2, 4, 5), (0, 5)], {"pooled_shape": [2, 2]}),
]


@pytest.mark.parametrize(("op", "shapes", "attributes"), EMPTY)
def test_no_samples(op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    arrays: list[np.ndarray] = [np.zeros(shape, np.float32) for shape in shapes]
    if op == "RoiAlign":
        arrays[2] = arrays[2].astype(np.int64)
    given = Case(op, arrays, attributes, only=[0] if op == "MaxRoiPool" else None)
    found = gradients(given, np.zeros((), np.float32), symbolic=True)
    for index, gradient in zip(given.differentiated, found, strict=True):
        np.testing.assert_array_equal(gradient, arrays[index])


@pytest.mark.torch
@by_case(GRID, "given")
def test_like_torch(given: Case) -> None:
    import torch

    attributes = given.attributes
    x, coordinates = (torch.tensor(a.astype(np.float32), requires_grad=True) for a in given.inputs)
    y = torch.nn.functional.grid_sample(
        x,
        coordinates,
        mode={"linear": "bilinear", "cubic": "bicubic"}.get(attributes["mode"], "nearest"),
        padding_mode=attributes["padding_mode"],
        align_corners=bool(attributes["align_corners"]),
    )
    w = normal(*y.shape, seed=2, dtype=np.float32)
    (y * torch.tensor(w)).sum().backward()
    narrow = replace(given, inputs=[a.astype(np.float32) for a in given.inputs])
    for found, leaf in zip(gradients(narrow, w, symbolic=True), (x, coordinates), strict=False):
        np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-3, atol=1e-4)
