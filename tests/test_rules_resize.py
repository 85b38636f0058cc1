"""The rule of Resize against differences, expected values and PyTorch.

Resize is linear, so a step of 1 is exact; float32 is all that onnxruntime has.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, check, normal
from onnx import helper
from running import run

import ortops

MODES = {
    "nearest": {"mode": "nearest"},
    "linear": {"mode": "linear"},
    "cubic": {"mode": "cubic"},
    "linear_antialias": {"mode": "linear", "antialias": 1},
    "cubic_antialias": {"mode": "cubic", "antialias": 1},
    "cubic_inside": {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5},
    "linear_antialias_inside": {"mode": "linear", "antialias": 1, "exclude_outside": 1},
}
COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def case(
    name: str,
    x: tuple[int, ...],
    *,
    scales: list[float] | None = None,
    sizes: list[int] | None = None,
    roi: list[float] | None = None,
    orders: int = 1,
    **attributes: Any,
) -> Case:
    inputs = [
        normal(*x, dtype=np.float32),
        None if roi is None else np.array(roi, np.float32),
        None if scales is None else np.array(scales, np.float32),
        None if sizes is None else np.array(sizes, np.int64),
    ]
    while inputs[-1] is None:
        inputs.pop()
    return Case(
        "Resize",
        inputs,
        attributes,
        constant=range(1, len(inputs)),
        only=[0],
        orders=orders,
        epsilon=1.0,
        rtol=3e-6,
        name=name,
    )


def every_form() -> list[Case]:
    """Every mode with every coordinate transformation: larger, smaller, sizes and scales."""
    made = []
    for (name, mode), coordinates in itertools.product(MODES.items(), COORDINATES):
        for nearest in NEAREST if name == "nearest" else (None,):
            attributes = {**mode, "coordinate_transformation_mode": coordinates}
            attributes |= {} if nearest is None else {"nearest_mode": nearest}
            roi = None
            if coordinates == "tf_crop_and_resize":
                roi = [0.0, 0.0, 0.1, -0.2, 1.0, 1.0, 0.8, 1.1]
                attributes["extrapolation_value"] = 7.0
            title = "_".join(filter(None, (name, coordinates, nearest)))
            made += [
                case(f"{title}_scales", (2, 3, 5, 7), scales=[1, 1, 1.7, 0.6], roi=roi,
                     **attributes),
                case(f"{title}_sizes", (2, 3, 7, 5), sizes=[2, 3, 3, 12], roi=roi,
                     **attributes),
            ]  # fmt: skip
    return made


FORMS = [
    case("same", (2, 3, 4, 5), scales=[1, 1, 1, 1]),
    case("1d_nearest", (7,), sizes=[4]),
    case("2d_linear", (5, 7), scales=[2, 0.5], mode="linear", orders=2),
    case("2d_cubic", (5, 7), sizes=[8, 11], mode="cubic", orders=2),
    case("3d_linear", (3, 4, 5), sizes=[5, 7, 3], mode="linear", orders=2),
    case("5d_linear", (2, 3, 4, 5, 6), scales=[1, 1, 2, 1.5, 0.5], mode="linear", orders=2),
    case("5d_nearest", (2, 3, 4, 5, 6), scales=[2, 1, 2, 1.5, 0.5]),
    case("channels_last_linear", (2, 5, 6, 3), scales=[1, 1.5, 2, 1], mode="linear"),
    case("channels_last_linear_sizes", (2, 5, 6, 3), sizes=[2, 3, 9, 3], mode="linear"),
    case("channels_last_antialias", (2, 5, 6, 3), sizes=[2, 3, 9, 3], mode="cubic", antialias=1),
    case("one_axis", (2, 3, 4, 5), scales=[2.5], axes=[3], mode="linear", orders=2),
    case("axes", (2, 3, 4, 5), scales=[0.5, 2], axes=[3, 2], mode="cubic"),
    case("axes_sizes", (2, 3, 4, 5), sizes=[9, 3], axes=[3, 2], mode="linear"),
    case("axes_from_the_end", (2, 3, 4, 5), sizes=[9, 3], axes=[-1, -2], mode="linear"),
    case("axes_roi", (2, 3, 4, 5), sizes=[9, 3], axes=[3, 2], mode="linear",
         coordinate_transformation_mode="tf_crop_and_resize", roi=[0.1, 0.2, 0.7, 1.3]),
    case("blocks_1d", (5,), scales=[3], orders=2),
    case("blocks", (2, 3, 4, 5), scales=[1, 1, 2, 3], orders=2),
    case("blocks_sizes", (2, 3, 4, 5), sizes=[2, 3, 8, 15]),
    case("blocks_all_axes", (2, 3, 4, 5), scales=[2, 3, 1, 2]),
    *(
        case(f"not_smaller_{mode}", (2, 3, 4, 6), sizes=[7, 8], axes=[2, 3], mode=mode,
             keep_aspect_ratio_policy="not_smaller")
        for mode in ("nearest", "linear", "cubic")
    ),
    case("not_larger", (2, 3, 4, 6), sizes=[7, 8], axes=[2, 3], mode="linear",
         keep_aspect_ratio_policy="not_larger"),
    case("not_larger_antialias", (2, 3, 9, 6), sizes=[4, 3], axes=[2, 3], mode="linear",
         keep_aspect_ratio_policy="not_larger", antialias=1),
    case("not_larger_corners", (2, 3, 4, 6), sizes=[8, 7], axes=[3, 2], mode="cubic",
         keep_aspect_ratio_policy="not_larger", coordinate_transformation_mode="align_corners"),
    case("not_larger_nearest_all_axes", (2, 3, 4), sizes=[4, 5, 6],
         keep_aspect_ratio_policy="not_larger"),
    case("not_larger_3_axes", (1, 2, 3, 4, 5), sizes=[5, 6, 7], axes=[2, 3, 4], mode="linear",
         keep_aspect_ratio_policy="not_larger"),
    # A scale of 1.1 gives 5 elements for 5: onnxruntime interpolates if another axis changes.
    case("keeps_length", (2, 3, 5, 4), scales=[1, 1, 1.1, 2], mode="linear"),
    case("keeps_length_cubic", (2, 3, 5, 4), scales=[1, 1, 1.1, 2], mode="cubic"),
    case("keeps_length_crop", (2, 3, 5, 4), scales=[1, 1, 1.1, 2], mode="linear",
         coordinate_transformation_mode="tf_crop_and_resize",
         roi=[0, 0, 0.1, 0.2, 1, 1, 0.8, 0.7]),
    case("keeps_all_lengths", (2, 3, 5, 4), scales=[1, 1, 1.1, 1.2], mode="linear"),
]  # fmt: skip
RESIZE = every_form() + FORMS
RESIZE = quick(
    RESIZE,
    """
    Resize-5d_linear-2x3x4x5x6_5
    Resize-not_larger_antialias-2x3x9x6_2
    Resize-one_axis-2x3x4x5_1
    Resize-3d_linear-3x4x5_3
    Resize-blocks-2x3x4x5_4
    Resize-linear_tf_crop_and_resize_scales-2x3x5x7_8_4
    Resize-1d_nearest-7_1
    """,
)
FORMS = RESIZE[-len(FORMS) :]


@pytest.mark.nightly
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(RESIZE, "given")
def test_dot(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


def gradient_model(given: Case, *, run_time: bool, dims: Any = None) -> onnx.ModelProto:
    """Returns the gradient of Σ w · op(x) with respect to x."""
    x = given.inputs[0]
    names = [None if array is None else f"x{i}" for i, array in enumerate(given.inputs)]
    initializers = (
        []
        if run_time
        else [
            onnx.numpy_helper.from_array(array, name)
            for name, array in zip(names[1:], given.inputs[1:], strict=True)
            if name
        ]
    )
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    nodes = [
        helper.make_node("Resize", [n or "" for n in names], ["y"], "under_test",
                         **given.attributes),
        helper.make_node("Mul", ["w", "y"], ["wy"]),
        helper.make_node("Gradient", ["x0"], ["dx"], domain=DOMAIN, xs=["x0"], y="wy"),
    ]  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x0", kind, x.shape if dims is None else dims),
        helper.make_tensor_value_info("w", kind, [None] * x.ndim),
    ]
    if run_time:
        inputs += [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in zip(names[1:], given.inputs[1:], strict=True)
            if name
        ]
    graph = helper.make_graph(
        nodes, "gradient", inputs, [helper.make_empty_tensor_value_info("dx")], initializers
    )
    imports = [helper.make_opsetid("", given.opset), helper.make_opsetid(DOMAIN, 1)]
    return ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))


def output_of(given: Case) -> np.ndarray:
    arrays = {f"x{i}": array for i, array in enumerate(given.inputs) if array is not None}
    names = [f"x{i}" if f"x{i}" in arrays else "" for i in range(len(given.inputs))]
    graph = helper.make_graph(
        [helper.make_node("Resize", names, ["y"], **given.attributes)],
        "f",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in arrays.items()
        ],
        [helper.make_empty_tensor_value_info("y")],
    )
    imports = [helper.make_opsetid("", given.opset)]
    return run(helper.make_model(graph, opset_imports=imports, ir_version=10), arrays)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(FORMS, "given")
def test_sizes_at_run_time_give_the_same(given: Case, symbolic: bool) -> None:
    x, *rest = given.inputs
    w = normal(*output_of(given).shape, dtype=np.float32)
    (expected,) = run(gradient_model(given, run_time=False), {"x0": x, "w": w})
    dims = list("abcde")[: x.ndim] if symbolic else None
    feeds = {f"x{i}": array for i, array in enumerate(rest, 1) if array is not None}
    (found,) = run(gradient_model(given, run_time=True, dims=dims), {"x0": x, "w": w, **feeds})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "given", [form for form in FORMS if form.name in ("blocks", "blocks_all_axes")], ids=str
)
def test_empty_batch(given: Case, symbolic: bool) -> None:
    # Elsewhere the result is a product with a batch, which onnxruntime refuses to broadcast to 0.
    x, *rest = given.inputs
    given = replace(given, inputs=[x[:0], *rest])
    dims = ["N", *x.shape[1:]] if symbolic else None
    w = output_of(given)
    (found,) = run(gradient_model(given, run_time=False, dims=dims), {"x0": x[:0], "w": w})
    assert found.shape == (0, *x.shape[1:])


@pytest.mark.parametrize("dims", [None, ["N", 2, "H", "W"]], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("scales", "attributes", "expected"),
    [
        ([1, 1, 2, 3], {}, "ReduceSum"),
        ([1, 1, 2, 1], {"mode": "linear"}, "EyeLike Resize MatMul"),
        ([1, 1, 2, 2], {"mode": "linear"}, "EyeLike Resize Transpose MatMul EyeLike Resize MatMul"),
    ],
)
def test_nodes(
    scales: list[float], attributes: dict[str, Any], expected: str, dims: list[Any] | None
) -> None:
    model = gradient_model(
        case("", (1, 2, 4, 4), scales=scales, **attributes), run_time=False, dims=dims
    )
    emitted = [n.op_type for n in model.graph.node if n.name.startswith("Gradient/under_test/")]
    sizes = {
        "Constant",
        "ConstantOfShape",
        "Shape",
        "Gather",
        "Reshape",
        "Concat",
        "ReduceProd",
        "Slice",
    }
    assert [name for name in emitted if name not in sizes] == expected.split()


REFUSED = [
    (
        case("", (2, 3, 4, 6), sizes=[2, 3, 8, 12], mode="linear",
             keep_aspect_ratio_policy="not_larger"),
        ("no gradient for keep_aspect_ratio_policy 'not_larger' in mode 'linear' for axes "
         "[0, 1, 2, 3], because "
         "onnxruntime resizes no axis before 1; list the axes to resize in the attribute axes"),
    ),
    (
        case("", (2, 3, 4, 6), sizes=[8, 12], axes=[2, 3], mode="cubic", antialias=1,
             coordinate_transformation_mode="tf_crop_and_resize", roi=[0, 0, 1, 1],
             keep_aspect_ratio_policy="not_smaller"),
        ("no gradient for keep_aspect_ratio_policy 'not_smaller' with antialias and "
         "tf_crop_and_resize; use the policy 'stretch'"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refusals(given: Case, message: str) -> None:
    with pytest.raises(ortops.UnsupportedError) as error:
        gradient_model(given, run_time=False)
    assert str(error.value) == f"Resize node 'under_test': {message}"


def old_model(opset: int, node: onnx.NodeProto, **given: np.ndarray) -> onnx.ModelProto:
    """Returns Σ w · node(x), with its gradient, as an exporter of that opset would write it."""
    nodes = [
        node,
        helper.make_node("Mul", ["w", "y"], ["wy"]),
        helper.make_node("Gradient", ["x"], ["dx"], domain=DOMAIN, xs=["x"], y="wy"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 1, "H", "W"]),
        helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, None),
    ]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in given.items()]
    graph = helper.make_graph(
        nodes, "old", inputs, [helper.make_empty_tensor_value_info("dx")], initializers
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


SCALES = np.array([1, 1, 2, 2], np.float32)
NOTHING = np.array([], np.float32)


@pytest.mark.parametrize(
    ("opset", "node", "given"),
    [
        (7, helper.make_node("Upsample", ["x"], ["y"], mode="nearest", scales=SCALES), {}),
        (9, helper.make_node("Upsample", ["x", "s"], ["y"], mode="nearest"), {"s": SCALES}),
        (10, helper.make_node("Resize", ["x", "s"], ["y"], mode="nearest"), {"s": SCALES}),
        (11, helper.make_node("Resize", ["x", "r", "s"], ["y"], mode="nearest"),
         {"s": SCALES, "r": NOTHING}),
        (11, helper.make_node("Resize", ["x", "r", "r", "n"], ["y"], mode="nearest"),
         {"r": NOTHING, "n": np.array([1, 1, 4, 6])}),
    ],
)  # fmt: skip
def test_old_files(opset: int, node: onnx.NodeProto, given: dict[str, np.ndarray]) -> None:
    model = ortops.lower(old_model(opset, node, **given))
    w = np.arange(24, dtype=np.float32).reshape(1, 1, 4, 6)
    (found,) = run(model, {"x": np.ones((1, 1, 2, 3), np.float32), "w": w})
    np.testing.assert_array_equal(found, [[[[14, 22, 30], [62, 70, 78]]]])


TORCH = [
    ("nearest", "asymmetric", {"nearest_mode": "floor"}, {"mode": "nearest"}),
    ("nearest", "half_pixel", {"nearest_mode": "round_prefer_ceil"}, {"mode": "nearest-exact"}),
    ("linear", "pytorch_half_pixel", {}, {"mode": "bilinear"}),
    ("linear", "align_corners", {}, {"mode": "bilinear", "align_corners": True}),
    ("cubic", "pytorch_half_pixel", {}, {"mode": "bicubic"}),
    ("cubic", "align_corners", {}, {"mode": "bicubic", "align_corners": True}),
    ("linear", "half_pixel", {"antialias": 1, "exclude_outside": 1},
     {"mode": "bilinear", "antialias": True}),
    ("cubic", "half_pixel", {"antialias": 1, "exclude_outside": 1, "cubic_coeff_a": -0.5},
     {"mode": "bicubic", "antialias": True}),
]  # fmt: skip


@pytest.mark.quick(16)
@pytest.mark.torch
@pytest.mark.parametrize("size", [(10, 14), (3, 4), (9, 5)])
@pytest.mark.parametrize(("mode", "coordinates", "attributes", "given"), TORCH)
def test_like_torch(
    mode: str,
    coordinates: str,
    attributes: dict[str, Any],
    given: dict[str, Any],
    size: tuple[int, int],
) -> None:
    import torch

    resize = case(
        "", (2, 3, 5, 7), sizes=[2, 3, *size], mode=mode,
        coordinate_transformation_mode=coordinates, **attributes,
    )  # fmt: skip
    x = resize.inputs[0]
    leaf = torch.tensor(x, requires_grad=True)
    y = torch.nn.functional.interpolate(leaf, size=size, **given)
    w = normal(*y.shape, seed=1, dtype=np.float32)
    (y * torch.tensor(w)).sum().backward()
    model = gradient_model(resize, run_time=False, dims=["N", "C", "H", "W"])
    (found,) = run(model, {"x0": x, "w": w})
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=1e-4, atol=1e-4)


OLD = [
    (opset, scales, mode, run_time)
    for opset, scales, mode, run_time in itertools.product(
        (7, 8, 9, 10), ([2.3, 1.7], [0.4, 0.6], [2.3, 0.6]), ("nearest", "linear"), (False, True)
    )
    # Upsample only enlarges, and at first its scales were an attribute.
    if (opset == 10 or min(scales) >= 1) and (opset >= 9 or not run_time)
]


@pytest.mark.quick(10)
@pytest.mark.parametrize(("opset", "scales", "mode", "run_time"), OLD)
def test_old_files_keep_their_meaning(
    opset: int, scales: list[float], mode: str, run_time: bool
) -> None:
    """Before opset 11, coordinates were asymmetric, and shrinking took the element ahead."""
    array = np.array([1, 1, *scales], np.float32)
    op, attributes = "Resize" if opset == 10 else "Upsample", {"mode": mode}
    if opset < 9:
        node = helper.make_node(op, ["x"], ["y"], scales=array, **attributes)
    else:
        node = helper.make_node(op, ["x", "s"], ["y"], **attributes)
    model = old_model(opset, node, **({} if opset < 9 else {"s": array}))
    feeds = {"x": normal(1, 1, 5, 6, dtype=np.float32)}
    if run_time:
        del model.graph.initializer[:]
        value = helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, [4])
        model.graph.input.append(value)
        feeds["s"] = array
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    del plain.graph.node[1:], plain.graph.input[1]
    plain.graph.output[0].name = "y"
    model.graph.output.append(helper.make_empty_tensor_value_info("y"))
    (expected,) = run(plain, feeds)
    w = normal(*expected.shape, seed=1, dtype=np.float32)
    lowered = ortops.lower(model)
    dx, y = run(lowered, {**feeds, "w": w})
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)
    direction = normal(*dx.shape, seed=2, dtype=np.float32)
    (change,) = run(plain, {**feeds, "x": direction})
    np.testing.assert_allclose((dx * direction).sum(), (change * w).sum(), rtol=1e-4)
