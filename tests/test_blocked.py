"""Convolution networks in the blocked layout against the same graphs without it.

What a training step computes in the blocked layout must be what the standard operators compute, up
to float32 rounding. Inputs are random, so no two elements that max pooling compares are equal,
except where ties are tested, and no input of Relu is near enough to zero to change its sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from running import run

from models.lenet import lenet
from models.resnet import resnet
from ortops import Tape, Tensor, build_training_model, op
from ortops.engine.execution.sizes import bind_sizes
from ortops.engine.lowering import prepare
from ortops.engine.trainable.step_graph import flatten
from ortops.graph import convert
from ortops.graph.edit import remove_defaults
from ortops.graph.files.external import detach
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.blocked import BLOCKED, is_mostly_blocked
from ortops.graph.passes.blocked.kernels import KERNEL_DOMAIN, block_size
from ortops.optimizers import SGD
from tests.gradient_models import Build, with_gradients
from tests.spies import lowered, lowered_ir

BLOCK = block_size()
TOLERANCE = 2e-5  # of the largest element: sums of some thousand products in different orders

pytestmark = pytest.mark.skipif(BLOCK is None, reason="onnxruntime has no such kernels here")


def kernels(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == KERNEL_DOMAIN]


def both(model: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Returns the lowered model without and with the blocked layout."""
    return lowered(model), lowered(model, BLOCKED)


def check(
    build: Build, shapes: dict[str, tuple[int, ...]], *, optimize: bool = True, seed: int = 0
) -> onnx.ModelProto:
    """Compares outputs and gradients; returns the model in the blocked layout."""
    model, feeds = with_gradients(build, shapes, seed=seed)
    standard, ours = both(model)
    assert {node.domain for node in ours.graph.node} <= {"", KERNEL_DOMAIN}
    names = [value.name for value in standard.graph.output]
    assert [value.name for value in ours.graph.output] == names
    expected = dict(zip(names, run(standard, feeds), strict=True))
    for name, found in zip(names, run(ours, feeds, optimize=optimize), strict=True):
        wanted = expected[name]
        assert wanted.shape == found.shape, name
        # The loss is a sum of y times random numbers of both signs, which may nearly cancel.
        largest = np.linalg.norm(expected["y"]) if name == "loss" else np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * largest, err_msg=name)
    return ours


def convolution(**attributes: Any) -> Build:
    return lambda x, w, *b: op.Conv(x, w, *b, **attributes)


B = BLOCK or 16
CONVOLUTIONS: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "3x3": ({"pads": [1, 1, 1, 1]}, (2 * B, B, 6, 6), (B, B, 3, 3)),
    "more channels": ({"pads": [1, 1, 1, 1]}, (B, 2 * B, 5, 4), (3 * B, 2 * B, 3, 3)),
    "no padding": ({}, (B, B, 6, 5), (B, B, 3, 2)),
    "uneven padding": ({"pads": [0, 2, 1, 1]}, (B, B, 6, 5), (B, B, 3, 3)),
    "SAME_UPPER": ({"auto_pad": "SAME_UPPER", "strides": [2, 2]}, (B, B, 6, 5), (B, B, 3, 3)),
    "SAME_LOWER": ({"auto_pad": "SAME_LOWER"}, (B, B, 6, 5), (B, B, 2, 4)),
    "VALID": ({"auto_pad": "VALID", "strides": [2, 1]}, (B, B, 6, 5), (B, B, 3, 3)),
    "1x1": ({}, (B, 2 * B, 3, 5), (B, 2 * B, 1, 1)),
    "1x1 stride 2": ({"strides": [2, 2]}, (B, B, 6, 5), (2 * B, B, 1, 1)),
    "1x1 stride 2 padded": ({"strides": [2, 2], "pads": [0] * 4}, (B, B, 7, 4), (B, B, 1, 1)),
    "stride 2": ({"strides": [2, 2], "pads": [1] * 4}, (2 * B, B, 8, 8), (2 * B, B, 3, 3)),
    "stride 2, odd": ({"strides": [2, 2], "pads": [1] * 4}, (B, B, 7, 9), (B, B, 3, 3)),
    "stride 2, left over": ({"strides": [2, 2]}, (B, B, 8, 6), (B, B, 3, 3)),
    "stride 3, 2": ({"strides": [3, 2], "pads": [1, 0, 0, 1]}, (B, B, 9, 7), (B, B, 4, 3)),
    "stride beyond the kernel": ({"strides": [3, 3]}, (B, B, 9, 8), (B, B, 2, 1)),
    "5x5 stride 2": ({"strides": [2, 2], "pads": [2] * 4}, (B, B, 9, 8), (B, B, 5, 5)),
    "7x7 stride 2": ({"strides": [2, 2], "pads": [3] * 4}, (B, 3, 14, 14), (B, 3, 7, 7)),
    "rows dilated": ({"dilations": [2, 1], "pads": [2, 1, 2, 1]}, (B, B, 6, 5), (B, B, 3, 3)),
    "dilated": ({"dilations": [2, 3], "pads": [2, 3, 2, 3]}, (B, B, 6, 8), (B, B, 3, 3)),
    "dilated and strided": (
        {"dilations": [2, 1], "strides": [2, 2], "pads": [2, 1, 2, 1]},
        (B, B, 8, 8),
        (B, B, 3, 3),
    ),
    "one channel": ({"pads": [1] * 4}, (2 * B, 1, 6, 5), (B, 1, 3, 3)),
    "three channels": ({"pads": [1] * 4, "strides": [2, 2]}, (B, 3, 7, 6), (2 * B, 3, 3, 3)),
    "image as large as the kernel": ({}, (B, B, 3, 3), (B, B, 3, 3)),
    "batch not of whole blocks": ({"pads": [1] * 4}, (B + 3, B, 4, 4), (B, B, 3, 3)),
    "three channels, odd batch": ({"pads": [1] * 4}, (B + 1, 3, 4, 4), (B, 3, 3, 3)),
    "small batch": ({"pads": [1] * 4}, (2, B, 5, 5), (B, B, 3, 3)),
    "three quarters of a block of images": ({"pads": [1] * 4}, (3 * B // 4, B, 5, 5), (B, B, 3, 3)),
    "depthwise": ({"group": B, "pads": [1] * 4}, (3, B, 6, 5), (B, 1, 3, 3)),
    "depthwise, many": ({"group": 2 * B, "pads": [0, 1, 2, 1]}, (2, 2 * B, 6, 5), (2 * B, 1, 3, 4)),
    "depthwise stride 2": (
        {"group": B, "pads": [1] * 4, "strides": [2, 2]},
        (3, B, 6, 7),
        (B, 1, 3, 3),
    ),
    "depthwise left over": ({"group": B, "strides": [2, 3]}, (3, B, 8, 9), (B, 1, 3, 2)),
    "depthwise dilated": (
        {"group": B, "dilations": [2, 3], "strides": [1, 2], "pads": [2] * 4},
        (3, B, 7, 9),
        (B, 1, 3, 3),
    ),
    "depthwise, part of a block": (
        {"group": 3 * B // 2, "pads": [1] * 4, "strides": [2, 2]},
        (3, 3 * B // 2, 6, 7),
        (3 * B // 2, 1, 3, 3),
    ),
    "inputs of a block and a half": (
        {"pads": [1] * 4},
        (B, 3 * B // 2, 4, 4),
        (B, 3 * B // 2, 3, 3),
    ),
    "outputs of a block and a half": ({}, (2, B, 5, 4), (3 * B // 2, B, 1, 1)),
    "both": ({"strides": [2, 2]}, (2, 3 * B // 2, 7, 6), (5 * B // 2, 3 * B // 2, 3, 3)),
    "depthwise 1x1": ({"group": B}, (3, B, 4, 3), (B, 1, 1, 1)),
}


@pytest.mark.nightly
@pytest.mark.quick(11)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolution(case: str, bias: bool) -> None:
    attributes, x, w = CONVOLUTIONS[case]
    shapes = {"x": x, "w": w} | ({"b": w[:1]} if bias else {})
    assert "Conv" in kernels(check(convolution(**attributes), shapes))


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(6))
def test_random_convolutions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kernel, strides = rng.integers(1, 5, 2), rng.integers(1, 4, 2)
    dilations = [int(rng.integers(1, 3)) if size > 1 else 1 for size in kernel]
    extents = [(int(k) - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = [int(rng.integers(0, extent)) for extent in extents * 2]
    height, width = (int(rng.integers(extent, extent + 6)) for extent in extents)
    channels, outputs, images = (int(size) for size in rng.integers(1, 3, 3) * B)
    build = convolution(strides=strides.tolist(), dilations=dilations, pads=pads)
    shapes = {"x": (images, channels, height, width), "w": (outputs, channels, *kernel.tolist())}
    assert "Conv" in kernels(check(build, shapes))


@pytest.mark.quick(3)
@pytest.mark.parametrize("seed", range(12))
def test_weights_from_strips_of_few_images(seed: int) -> None:
    """Of large images as well, whose strips are many."""
    rng = np.random.default_rng(seed)
    strides = rng.integers(1, 3, 2)
    kernel = [int(step + rng.integers(1, 3)) for step in strides]
    dilations = [int(rng.integers(1, 3)), 1]
    extents = [(size - 1) * d + 1 for size, d in zip(kernel, dilations, strict=True)]
    pads = [int(rng.integers(0, extent)) for extent in extents * 2]
    height, width = (extent + int(rng.integers(12, 40)) for extent in extents)
    channels = [1, 3, B, 2 * B][seed % 4]
    outputs, images = int(rng.integers(1, 3)) * B, int(rng.integers(1, B // 2 + 1))
    build = convolution(strides=strides.tolist(), dilations=dilations, pads=pads)
    shapes = {"x": (images, channels, height, width), "w": (outputs, channels, *kernel)}
    made = check(build, shapes)
    assert not {"Gemm", "MatMul", "FusedMatMul"} & {node.op_type for node in made.graph.node}


TRANSPOSED: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "2x2 stride 2": ({"strides": [2, 2]}, (2, 2 * B, 4, 5), (2 * B, B, 2, 2)),
    "3x2 stride 3, 2": ({"strides": [3, 2]}, (3, B, 4, 5), (B, 2 * B, 3, 2)),
    "whole blocks of images": ({"strides": [2, 2]}, (B, B, 4, 4), (B, B, 2, 2)),
    "4x4 stride 2": ({"strides": [2, 2], "pads": [1] * 4}, (2, B, 4, 5), (B, B, 4, 4)),
    "3x3 stride 1": ({"pads": [1] * 4}, (2, B, 6, 5), (B, B, 3, 3)),
    "output padding": (
        {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]},
        (2, B, 4, 5),
        (B, 2 * B, 3, 3),
    ),
    "uneven padding": ({"strides": [2, 3], "pads": [0, 1, 2, 0]}, (2, B, 4, 5), (B, B, 3, 4)),
    "blocks and a half": ({"strides": [2, 2]}, (2, 3 * B // 2, 4, 5), (3 * B // 2, B, 2, 2)),
    "outputs of a block and a half": ({"strides": [2, 2]}, (2, B, 3, 3), (B, 3 * B // 2, 2, 2)),
    "VALID": ({"strides": [2, 2], "auto_pad": "VALID"}, (2, B, 4, 5), (B, B, 2, 2)),
    "SAME_UPPER": ({"strides": [2, 2], "auto_pad": "SAME_UPPER"}, (2, B, 4, 5), (B, B, 3, 3)),
}


@pytest.mark.quick(13)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", TRANSPOSED)
def test_transposed_convolution(case: str, bias: bool) -> None:
    attributes, x, w = TRANSPOSED[case]
    shapes = {"x": x, "w": w} | ({"b": w[1:2]} if bias else {})
    made = check(lambda x, w, *b: op.ConvTranspose(x, w, *b, **attributes), shapes)
    stays = "ConvTranspose" in {node.op_type for node in made.graph.node}
    assert stays == (case == "SAME_UPPER")


@pytest.mark.parametrize(("height", "sums"), [(8, 1), (9, 0), (32, 1)])
def test_weights_of_tiles_are_a_product(height: int, sums: int) -> None:
    """Windows that cover the input are tiles of it; what the last ones leave over is not read."""
    shapes = {"x": (B, B, height, 4 * B), "w": (B, B, 2, 2)}
    made = check(convolution(strides=[2, 2]), shapes)
    assert [node.op_type for node in made.graph.node].count("MatMul") == sums


def test_transposed_convolutions_between_others_stay_in_the_layout() -> None:
    """As in a U-Net; the values are compared to sums in float64."""

    def build(x: Tensor, skipped: Tensor, v: Tensor, w: Tensor, b: Tensor, u: Tensor) -> Tensor:
        y = op.ConvTranspose(op.Relu(op.Conv(x, v)), w, b, strides=[2, 2])
        return op.Conv(op.Concat(y, op.Relu(op.Conv(skipped, v)), axis=1), u)

    shapes = {"x": (2, B, 3, 4), "skipped": (2, B, 6, 8), "v": (2 * B, B, 1, 1)}
    shapes |= {"w": (2 * B, B, 2, 2), "b": (B,), "u": (B, 3 * B, 1, 1)}
    made = check(build, shapes)
    _, feeds = with_gradients(build, shapes)
    x, skipped, v, w, b, u = (feeds[name].astype(np.float64) for name in shapes)
    inner, kept = (np.einsum("nchw,mc->nmhw", each, v[..., 0, 0]) for each in (x, skipped))
    wide = np.einsum("nchw,cmij->nmhiwj", np.maximum(inner, 0), w).reshape(2, B, 6, 8)
    joined = np.concatenate([wide + b[:, None, None], np.maximum(kept, 0)], axis=1)
    wanted = np.einsum("nchw,mc->nmhw", joined, u[..., 0, 0])
    y = run(made, feeds)[0]
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())
    images = [node.input[0] for node in made.graph.node if node.op_type == "ReorderInput"]
    assert {"x", "skipped"} < set(images)
    plain = {node.input[0] for node in made.graph.node if node.op_type == "Concat"}
    assert not plain & {
        node.output[0] for node in made.graph.node if node.op_type == "ReorderOutput"
    }


UNSUITABLE: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = {
    "outputs not of whole blocks": ({}, (2, B, 4, 4), (B + 1, B, 3, 3)),
    "inputs not of whole blocks": ({}, (2, 5 * B // 4, 4, 4), (B, 5 * B // 4, 3, 3)),
    "groups": ({"group": 2}, (2, 2 * B, 4, 4), (2 * B, B, 3, 3)),
    "more padding than kernel": ({"pads": [2] * 4}, (2, B, 4, 4), (B, B, 1, 1)),
    "one spatial axis": ({}, (2, B, 6), (B, B, 3)),
}


@pytest.mark.parametrize("case", UNSUITABLE)
def test_other_convolutions_stay(case: str) -> None:
    attributes, x, w = UNSUITABLE[case]
    assert not kernels(check(convolution(**attributes), {"x": x, "w": w}))


def test_unknown_sizes_stay() -> None:
    model, _ = with_gradients(convolution(), {"x": (2, B, 4, 4), "w": (B, B, 3, 3)})
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("x", "y")):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    assert not kernels(lowered(model, BLOCKED))
    assert BLOCKED.gains(prepare(convert.to_ir(model)), None)


def test_nothing_to_gain_without_convolutions() -> None:
    model, _ = with_gradients(op.MatMul, {"x": (2, 3), "w": (3, 4)})
    assert not BLOCKED.gains(prepare(convert.to_ir(model)), None)


@pytest.mark.parametrize("bounds", [(-0.5, 0.5), (None, 0.5), (-0.5,)], ids=str)
def test_clip(bounds: tuple[float | None, ...]) -> None:
    def build(x: Tensor, w: Tensor, v: Tensor) -> Any:
        y = op.Conv(x, w)
        limits = [None if each is None else np.float32(each) for each in bounds]
        return op.Conv(op.Clip(y, *limits), v)

    shapes = {"x": (3, B, 5, 4), "w": (B, B, 2, 2), "v": (B, B, 1, 1)}
    operators = [node.op_type for node in check(build, shapes).graph.node]
    assert "Where" not in operators
    assert operators.count("Clip") == 1


def test_clip_where_a_cotangent_may_be_infinite() -> None:
    def build(x: Tensor, w: Tensor) -> Any:
        return op.Sqrt(op.Clip(op.Conv(x, w), np.float32(0), np.float32(6)) + 1.0)

    operators = [
        node.op_type for node in check(build, {"x": (3, B, 5, 4), "w": (B, B, 2, 2)}).graph.node
    ]
    assert "Where" in operators


def test_channels_of_part_of_a_block_between() -> None:
    """What lies between such convolutions stays in blocks, whatever is in the added channels."""
    c = 3 * B // 2

    def build(x: Tensor, w: Tensor, b: Tensor, v: Tensor, *statistics: Tensor) -> Any:
        y = op.Conv(x, w, b)
        z = normalized(op.Sigmoid(y) + y * op.Relu(y), *statistics)
        return op.Conv(op.MaxPool(z, kernel_shape=[2, 2], strides=[2, 2]), v)

    scale = dict.fromkeys(("scale", "bias", "mean", "var"), (c,))
    shapes = {"x": (3, B, 6, 7), "w": (c, B, 1, 1), "b": (c,), "v": (B, c, 2, 2), **scale}
    ours = check(build, shapes)
    assert {"BatchNormalization", "MaxPool"}.isdisjoint(
        node.op_type for node in ours.graph.node if not node.domain
    )


def test_what_needs_whole_blocks_leaves_them() -> None:
    c = 3 * B // 2

    def build(x: Tensor, w: Tensor) -> Any:
        y = op.Conv(x, w)
        return op.GlobalAveragePool(op.Concat(y, op.Relu(y), axis=1))

    check(build, {"x": (3, B, 4, 5), "w": (c, B, 1, 1)})


def normalized(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    y, *_ = op.BatchNormalization(
        x, scale, bias, mean, var, outputs=3, training_mode=1, epsilon=0.1, momentum=0.7
    )
    return y  # type: ignore[no-any-return]


STATISTICS = {"scale": (B,), "bias": (B,), "mean": (B,), "var": (B,)}


def test_batch_normalization() -> None:
    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        return normalized(op.Conv(x, w), *statistics)

    ours = check(build, {"x": (5, B, 6, 7), "w": (B, B, 2, 2), **STATISTICS})
    assert "BatchNormalization" not in [node.op_type for node in ours.graph.node]


@pytest.mark.parametrize(("group", "height", "passes"), [(1, 12, 7), (1, 1, 8), (B, 12, 8)])
def test_scale_of_a_normalization_is_in_small_weights(group: int, height: int, passes: int) -> None:
    """The values are compared to closed forms in float64, with means that are far from 0.

    The passes are the convolution, three of the normalization, two of its gradient, a third if the
    weights are not small, and the gradients of the input and, if depthwise, of the weights.
    """
    shapes = {"x": (3, B, height, 9), "w": (B, B // group, 1, 1), "b": (B,), **STATISTICS}

    def build(x: Tensor, w: Tensor, b: Tensor, *statistics: Tensor) -> Tensor:
        return normalized(op.Conv(x, w, b * 10.0, group=group), *statistics)

    model, feeds = with_gradients(build, shapes)
    made = lowered(model, BLOCKED)
    found = dict(zip([each.name for each in made.graph.output], run(made, feeds), strict=True))
    x, w, b, scale, bias, *_ = (feeds[name].astype(np.float64) for name in shapes)
    taps = np.diag(w[:, 0, 0, 0]) if group > 1 else w[..., 0, 0]
    y = np.einsum("nchw,mc->nmhw", x, taps) + 10 * b[:, None, None]
    axes = (0, 2, 3)
    std = np.sqrt(y.var(axes, keepdims=True) + 0.1)
    unit = (y - y.mean(axes, keepdims=True)) / std
    rng = np.random.default_rng(0)  # as in with_gradients
    for shape in shapes.values():
        rng.standard_normal(shape, np.float32)
    g = rng.standard_normal(y.shape).astype(np.float32).astype(np.float64)
    centred = g - g.mean(axes, keepdims=True) - unit * (g * unit).mean(axes, keepdims=True)
    d_y = scale[:, None, None] / std * centred
    d_w = np.einsum("nmhw,nchw->mc", d_y, x)
    wanted = {
        "y": unit * scale[:, None, None] + bias[:, None, None],
        "x_gradient": np.einsum("nmhw,mc->nchw", d_y, taps),
        "w_gradient": (np.diag(d_w)[:, None] if group > 1 else d_w)[..., None, None],
        "scale_gradient": (g * unit).sum(axes),
        "bias_gradient": g.sum(axes),
    }
    for name, value in wanted.items():
        close = 5 * TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=close, err_msg=name)
    np.testing.assert_allclose(found["b_gradient"], 0, atol=1e-4 * np.abs(10 * d_y).sum())
    assert kernels(made).count("Conv") == passes


def test_batch_normalization_by_running_statistics() -> None:
    def build(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Any:
        return op.Relu(op.BatchNormalization(op.Conv(x, w), scale, bias, mean, var**2.0 + 1.0))

    ours = check(build, {"x": (5, B, 6, 7), "w": (B, B, 2, 2), **STATISTICS})
    operators = [node.op_type for node in ours.graph.node]
    assert not {"BatchNormalization", "Relu"}.intersection(operators)


def test_gradient_through_running_statistics() -> None:
    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        y, mean, var = op.BatchNormalization(
            op.Conv(x, w), *statistics, outputs=3, training_mode=1, momentum=0.7
        )
        means = op.Unsqueeze(mean * var, [1, 2])
        return y * means + mean[0]

    check(build, {"x": (5, B, 3, 4), "w": (B, B, 2, 2), **STATISTICS})


def test_gradient_through_running_statistics_alone() -> None:
    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        _, mean, var = op.BatchNormalization(
            op.Conv(x, w), *statistics, outputs=3, training_mode=1, momentum=0.7
        )
        return mean * 2.0 + 0.0 * var

    check(build, {"x": (5, B, 3, 4), "w": (B, B, 2, 2), **STATISTICS})


def test_residual_block_is_fused() -> None:
    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        first = op.Relu(normalized(op.Conv(x, w, pads=[1] * 4), *statistics))
        second = normalized(op.Conv(first, w, pads=[1] * 4), *statistics)
        return op.GlobalAveragePool(op.Relu(second + x))

    ours = check(build, {"x": (B, B, 6, 6), "w": (B, B, 3, 3), **STATISTICS})
    operators = [node.op_type for node in ours.graph.node]
    assert "Relu" not in operators  # the convolutions that scale and shift apply it
    assert operators.count("ReorderOutput") <= 5  # gradients of x and w, nothing between


def test_bias_and_relu_are_fused() -> None:
    def build(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return op.Relu(op.Conv(x, w, b))

    ours = check(build, {"x": (B, B, 6, 6), "w": (B, B, 3, 3), "b": (B,)})
    assert "Relu" not in [node.op_type for node in ours.graph.node]


@pytest.mark.parametrize("image", [(6, 6), (7, 5)], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["", "relu"])
def test_max_pooling(image: tuple[int, int], relu: bool) -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        y = op.Conv(x, w)
        return op.MaxPool(op.Relu(y) if relu else y, kernel_shape=[2, 3], strides=[2, 3])

    ours = check(build, {"x": (2, B, *image), "w": (B, B, 1, 1)})
    assert "MaxPool" in kernels(ours)


def test_first_of_equal_elements_is_the_maximum() -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        return op.MaxPool(op.Conv(op.Round(x) + x * 0.0, w), kernel_shape=[2, 2], strides=[2, 2])

    model, feeds = with_gradients(build, {"x": (2, B, 8, 8), "w": (B, B, 1, 1)})
    feeds["w"] = np.eye(B, dtype=np.float32).reshape(B, B, 1, 1)
    standard, ours = both(model)
    assert "MaxPool" in kernels(ours)
    for wanted, found in zip(run(standard, feeds), run(ours, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooled", [False, True], ids=["", "pooled"])
def test_a_root_of_zero_gives_no_nan(pooled: bool) -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        y = op.Relu(op.Conv(x, w))  # its cotangent is infinite where it is zero
        return op.Sqrt(op.MaxPool(y, kernel_shape=[1, 2], strides=[1, 2]) if pooled else y)

    shapes = {"x": (2, B, 6, 6), "w": (B, B, 1, 1)}
    ours = check(build, shapes)
    _, feeds = with_gradients(build, shapes)
    y, *others = run(ours, feeds)
    assert not y.all()
    assert all(np.isfinite(each).all() for each in others)


def test_pooling_of_an_activation_that_is_read_elsewhere() -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        y = op.Relu(op.Conv(x, w))
        pooled = op.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])
        return pooled + op.ReduceMean(y, [2, 3])

    check(build, {"x": (2, B, 6, 6), "w": (B, B, 1, 1)})


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2]},
        {"kernel_shape": [2, 2]},
    ],
    ids=str,
)
def test_other_pooling_leaves_the_layout(attributes: dict[str, Any]) -> None:
    def build(x: Tensor, w: Tensor) -> Tensor:
        return op.Conv(op.MaxPool(op.Conv(x, w), **attributes), w)

    assert "MaxPool" not in kernels(check(build, {"x": (2, B, 7, 7), "w": (B, B, 1, 1)}))


def test_what_lies_between_convolutions() -> None:
    def build(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        a, b = op.Tanh(op.Conv(x, w)), op.Sigmoid(op.Conv(x, w))
        y = op.Concat(a * b, op.LeakyRelu(a - b, alpha=0.1), axis=1)
        return op.Conv(y, v) + op.Softmax(op.Conv(x, w), axis=1)

    ours = check(build, {"x": (2, B, 4, 4), "w": (B, B, 1, 1), "v": (B, 2 * B, 1, 1)})
    concats = [node for node in ours.graph.node if node.op_type == "Concat"]
    assert len(concats) == 1


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("by_mean", [False, True], ids=["GlobalAveragePool", "ReduceMean"])
@pytest.mark.parametrize("channels", [B, 3 * B // 2], ids=["whole blocks", "part of a block"])
def test_squeeze_and_excitation_stays_in_the_layout(
    channels: int, by_mean: bool, swapped: bool
) -> None:
    """What gates channels would else be in memory in two layouts until the backward pass."""

    def build(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = op.Conv(x, w)
        pooled = op.ReduceMean(y, [-1, 2]) if by_mean else op.GlobalAveragePool(y)
        gate = op.Sigmoid(op.Conv(pooled, v))
        return op.Conv(gate * y if swapped else y * gate, v)

    c = channels
    ours = check(build, {"x": (3, B, 4, 5), "w": (c, B, 1, 1), "v": (c, c, 1, 1)})
    left = {node.input[0] for node in ours.graph.node if node.op_type == "ReorderOutput"}
    assert any(node.output[0] == "Mul/Gate_output" for node in ours.graph.node)
    assert ("Conv/Conv_output" in left) == (c % B > 0)  # the pooling needs whole blocks


def test_broadcasting_leaves_the_layout() -> None:
    def build(x: Tensor, w: Tensor, image: Tensor, row: Tensor) -> Tensor:
        y = op.Conv(x, w)
        return y * image + y * row + op.ReduceMean(y, [1, 2]) + y * np.float32(2)

    check(
        build,
        {"x": (2, B, 4, 4), "w": (B, B, 1, 1), "image": (2, 1, 1, 1), "row": (2, B, 1, 4)},
    )


def test_no_optimization_is_needed() -> None:
    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        y = op.Relu(normalized(op.Conv(x, w, pads=[1] * 4), *statistics))
        return op.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])

    check(build, {"x": (B, B, 6, 6), "w": (B, B, 3, 3), **STATISTICS}, optimize=False)


def test_onnxruntime_runs_a_network_with_live_normalizations_as_it_is() -> None:
    """Its optimizer finds nothing there, and takes most of the time of opening a session."""

    def build(x: Tensor, w: Tensor, *statistics: Tensor) -> Tensor:
        return normalized(op.Conv(x, w), *statistics)

    model, _ = with_gradients(build, {"x": (B, B, 8, 8), "w": (B, B, 1, 1), **STATISTICS})
    graph = lowered_ir(prepare(convert.to_ir(model)), BLOCKED).graph
    products = [node.domain for node in graph if node.op_type in ("Conv", "Gemm", "MatMul")]
    assert products.count(KERNEL_DOMAIN) <= products.count("")  # of sums
    assert is_mostly_blocked(graph)


def test_onnxruntime_optimizes_what_lies_behind_few_convolutions() -> None:
    def build(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return op.Flatten(op.Conv(x, w)) @ v

    sizes = {"x": (64, B, 4, 4), "w": (B, B, 3, 3), "v": (4 * B, 64 * B)}
    model, _ = with_gradients(build, sizes)
    graph = lowered_ir(prepare(convert.to_ir(model)), BLOCKED).graph
    assert any(node.domain == KERNEL_DOMAIN for node in graph)
    assert not is_mostly_blocked(graph)


def add_gradient(model: onnx.ModelProto, x: str, y: str, name: str, shape: tuple[int, ...]) -> None:
    """Adds the output ``name``, the gradient of y by x."""
    domain = "ai.onnx.preview.training"
    node = onnx.helper.make_node("Gradient", [x], [name], name, domain=domain, xs=[x], y=y)
    model.graph.node.append(node)
    output = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
    model.graph.output.append(output)
    if domain not in {entry.domain for entry in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def test_gradient_at_an_intermediate_tensor() -> None:
    rng = np.random.default_rng(0)
    with Tape(name="cut") as tape:
        x = tape.input("x", np.float32, (B, B, 5, 5))
        w = tape.initializer("w", rng.standard_normal((B, B, 3, 3), np.float32))
        middle = tape.output(op.Relu(op.Conv(x, w)), "middle")
        tape.output(op.ReduceSum(op.Conv(op.Tanh(middle), w) ** 2.0, keepdims=0), "loss")
    model = tape.model()
    add_gradient(model, "middle", "loss", "slope", (B, B, 3, 3))
    standard, ours = both(model)
    assert kernels(ours).count("Conv") == 3
    feeds = {"x": rng.standard_normal((B, B, 5, 5), np.float32)}
    for wanted, found in zip(run(standard, feeds), run(ours, feeds), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


def test_gradients_of_gradients_stay() -> None:
    with Tape(name="second") as tape:
        x = tape.input("x", np.float32, (B, B, 3, 3))
        w = tape.input("w", np.float32, (B, B, 3, 3))
        tape.output(op.ReduceSum(op.Tanh(op.Conv(x, w)), keepdims=0), "loss")
    model = tape.model()
    add_gradient(model, "x", "loss", "slope", (B, B, 3, 3))
    model.graph.node.append(
        onnx.helper.make_node("ReduceSumSquare", ["slope"], ["size"], keepdims=0)
    )
    add_gradient(model, "w", "size", "d", (B, B, 3, 3))
    assert not kernels(lowered(model, BLOCKED))


NETS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "lenet": (lambda: lenet((1, 12, 12), channels=(B, 2 * B), hidden=16), (1, 12, 12)),
    "resnet": (lambda: resnet((1, 1), image=(3, 8, 8), width=B), (3, 8, 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_training_step(net: str) -> None:
    build, sample = NETS[net]
    rng = np.random.default_rng(3)
    batch = {
        "images": rng.standard_normal((B, *sample), np.float32),
        "labels": rng.integers(0, 10, B),
    }
    trainable = build_training_model(build(), loss="SoftmaxCrossEntropy", optimizer=SGD(1.0))
    steps = [flatten(detach(trainable)), flatten(detach(trainable))]
    for step in steps:
        remove_defaults(step.model.graph, step.variables)
        bind_sizes(step.model, {"batch": B})
    models = [
        to_proto(lowered_ir(steps[0].model)),
        to_proto(lowered_ir(steps[1].model, BLOCKED)),
    ]
    graphs = (trainable.graph, trainable.training_info[0].algorithm)
    values = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for graph in graphs
        for tensor in graph.initializer
    }
    feeds = batch | {name: values[name] for name in steps[0].variables}
    assert kernels(models[1]).count("Conv") >= 5
    wanted, found = (run(model, feeds) for model in models)
    for output, a, b in zip(models[0].graph.output, wanted, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5, err_msg=output.name)
