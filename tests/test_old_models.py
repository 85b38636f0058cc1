"""Models of opset 7 to 20: brought up, they compute the same, and their gradients are right.

Forward values are compared in onnxruntime between the file as it was written and as `upgrade`
brought it up. The oracle of the gradients is differences of the file as it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from domain_models import DOMAIN, node
from onnx import TensorProto, helper, numpy_helper
from running import plain_session, run, run_session
from violations import all_violations

import ortops
from ortops.graph import convert

SEED = 20
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Old:
    """A model of an older opset.

    Attributes:
        opset: Its opset.
        nodes: Its nodes; the last one's first output is the model's.
        inputs: Values of its inputs; floating-point ones are differentiated.
        constants: Values of its initializers.
        step: The step of the differences; 1 is exact for what is linear along a direction.
        gradient: Whether there is a gradient to be checked.
    """

    opset: int
    nodes: Sequence[onnx.NodeProto]
    inputs: Arrays
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    step: float = 1e-6
    gradient: bool = True


def n(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """Makes a node; inputs and outputs are separated by spaces, and - is an absent one."""
    split = [[("" if x == "-" else x) for x in text.split()] for text in (inputs, outputs)]
    return helper.make_node(op, *split, name=f"the_{op}", **attributes)


def r(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    """Returns normal numbers."""
    return np.random.default_rng((SEED, seed, *shape)).standard_normal(shape).astype(dtype)


def f(*shape: int, seed: int = 0) -> np.ndarray:
    """Returns normal numbers in float32, for operators without a kernel for float64."""
    return r(*shape, seed=seed, dtype=np.float32)


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def positive(*shape: int) -> np.ndarray:
    return np.abs(r(*shape)) + 0.5


def body(nodes: Sequence[onnx.NodeProto], output: str, rank: int | None = None) -> onnx.GraphProto:
    """Makes a graph without inputs, as the branches of If are."""
    kind = TensorProto.DOUBLE
    shape = None if rank is None else [None] * rank
    return helper.make_graph(
        nodes, "body", [], [helper.make_tensor_value_info(output, kind, shape)]
    )


CASES: dict[str, Old] = {}


def old(name: str, opset: int, nodes: Any, inputs: Mapping[str, np.ndarray], **rest: Any) -> None:
    nodes = nodes if isinstance(nodes, list) else [nodes]
    CASES[f"{name}-{opset}"] = Old(opset, nodes, inputs, **rest)


for opset in (7, 11, 12):
    old("Squeeze", opset, n("Squeeze", "x", axes=[0, 2]), {"x": r(1, 3, 1, 2)})
    old("Squeeze_all", opset, n("Squeeze", "x"), {"x": r(1, 3, 1, 2)})
    old("Unsqueeze", opset, n("Unsqueeze", "x", axes=[0, 2]), {"x": r(3, 2)})
    old("ReduceSum", opset, n("ReduceSum", "x", axes=[1], keepdims=0), {"x": r(3, 2, 4)})
    old("ReduceSum_all", opset, n("ReduceSum", "x"), {"x": r(3, 2, 4)})
    old("Softmax", opset, n("Softmax", "x"), {"x": r(2, 3, 4)})
    old("Softmax_axis", opset, n("Softmax", "x", axis=0), {"x": r(2, 3, 4)})
    old("Softmax_last", opset, n("Softmax", "x", axis=2), {"x": r(2, 3, 4)})
    old("LogSoftmax", opset, n("LogSoftmax", "x", axis=1), {"x": r(2, 3, 4)})
    old("Hardmax", opset, n("Hardmax", "x"), {"x": f(2, 3, 4)}, gradient=False)
    old(
        "Split",
        opset,
        [n("Split", "x", "a b", axis=1, split=[1, 3]), n("ReduceMax", "a", "c"), n("Mul", "b c")],
        {"x": r(2, 4)},
    )
    old("Split_even", opset, [n("Split", "x", "a b", axis=1), n("Mul", "a b")], {"x": r(2, 4)})
old("Softmax_negative", 11, n("Softmax", "x", axis=-2), {"x": r(2, 3, 4)})
for opset in (7, 11, 13, 17):
    for reduction in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare"):
        old(
            f"Reduce{reduction}",
            opset,
            n(f"Reduce{reduction}", "x", axes=[0, 2], keepdims=1),
            {
                "x": (
                    positive(2, 3, 4) if reduction in ("LogSum", "Max", "Min") else f(2, 3, 4)
                ).astype(np.float32)
            },
            step=1e-2,
        )
    old("ReduceMean_all", opset, n("ReduceMean", "x"), {"x": r(2, 3)})
for opset in (7, 9, 10):
    old("Clip", opset, n("Clip", "x", min=-0.5, max=0.7), {"x": f(3, 4)}, step=1e-3)
    old("Clip_min", opset, n("Clip", "x", min=0.0), {"x": f(3, 4)}, step=1e-3)
    old("Dropout", opset, n("Dropout", "x", ratio=0.3), {"x": r(3, 4)})
    old("Pad", opset, n("Pad", "x", pads=[0, 1, 2, 0], mode="constant", value=1.5), {"x": r(3, 4)})
    old("Pad_reflect", opset, n("Pad", "x", pads=[0, 1, 2, 0], mode="reflect"), {"x": r(3, 4)})
for opset in (7, 9):
    old(
        "Slice", opset, n("Slice", "x", starts=[1, -3], ends=[3, 1000], axes=[0, 1]), {"x": r(4, 5)}
    )
    old("Slice_no_axes", opset, n("Slice", "x", starts=[1, 0], ends=[-1, 2]), {"x": r(4, 5)})
    old("TopK", opset, n("TopK", "x", "y i", axis=1, k=2), {"x": r(3, 5)})
old("TopK", 10, n("TopK", "x k", "y i", axis=0), {"x": r(3, 5)}, constants={"k": i64(2)})
old(
    "Slice",
    10,
    n("Slice", "x s e a t"),
    {"x": r(4, 5)},
    constants={"s": i64(3), "e": i64(-100), "a": i64(1), "t": i64(-2)},
)
for opset in (7, 8, 9, 12, 13, 14, 15):
    old(
        "BatchNormalization",
        opset,
        n("BatchNormalization", "x s b m v", epsilon=1e-3),
        {"x": r(2, 3, 4), "s": r(3), "b": r(3, seed=1)},
        constants={"m": r(3, seed=2), "v": positive(3)},
    )
for opset in (7, 8):
    old(
        "BatchNormalization_spatial",
        opset,
        n("BatchNormalization", "x s b m v", spatial=1),
        {"x": r(2, 3, 4), "s": r(3), "b": r(3, seed=1)},
        constants={"m": r(3, seed=2), "v": positive(3)},
    )
old(
    "Upsample_attribute",
    7,
    n("Upsample", "x", scales=[1.0, 1.0, 2.0, 3.0], mode="nearest"),
    {"x": f(1, 2, 3, 2)},
    step=1.0,
)
old(
    "Upsample_linear",
    7,
    n("Upsample", "x", scales=[1.0, 1.0, 2.0, 3.0], mode="linear"),
    {"x": f(1, 2, 3, 2)},
    step=1.0,
)
old(
    "Upsample",
    9,
    n("Upsample", "x s", mode="nearest"),
    {"x": f(1, 2, 3, 2)},
    constants={"s": np.float32([1, 1, 2, 3])},
    step=1.0,
)
old(
    "Upsample_linear",
    9,
    n("Upsample", "x s", mode="linear"),
    {"x": f(1, 2, 3, 2)},
    constants={"s": np.float32([1, 1, 2, 3])},
    step=1.0,
)
for mode in ("nearest", "linear"):
    old(
        f"Resize_{mode}",
        10,
        n("Resize", "x s", mode=mode),
        {"x": f(1, 2, 4, 4)},
        constants={"s": np.float32([1, 1, 2, 0.5])},
        step=1.0,
    )
    for opset in (13, 18):
        old(
            f"Resize_{mode}",
            opset,
            n("Resize", "x - s", mode=mode, coordinate_transformation_mode="align_corners"),
            {"x": f(1, 2, 4, 4)},
            constants={"s": np.float32([1, 1, 2, 2])},
            step=1.0,
        )
old(
    "Resize_empty_roi",
    11,
    n("Resize", "x roi s", mode="linear"),
    {"x": f(1, 2, 4, 4)},
    constants={"roi": np.zeros(0, np.float32), "s": np.float32([1, 1, 2, 2])},
    step=1.0,
)
old(
    "Resize_sizes",
    11,
    n("Resize", "x roi s size", mode="cubic"),
    {"x": f(1, 2, 4, 4)},
    constants={
        "roi": np.zeros(0, np.float32),
        "s": np.zeros(0, np.float32),
        "size": i64(1, 2, 6, 5),
    },
    step=1.0,
)
for opset in (7, 9, 11):
    for shape in ((4,), (1, 4), (3, 1), (3, 4), (1,)):
        old(
            f"Gemm_{len(shape)}_{shape[0]}_{shape[-1]}",
            opset,
            n("Gemm", "a b c", transA=1, alpha=0.5, beta=2.0),
            {"a": r(5, 3), "b": r(5, 4), "c": r(*shape)},
        )
old("Gemm_no_bias", 11, n("Gemm", "a b"), {"a": r(5, 3), "b": r(3, 4)})
for opset in (7, 9, 13):
    old(
        "Cast",
        opset,
        [n("Cast", "x", "z", to=TensorProto.FLOAT), n("Mul", "z z")],
        {"x": r(2, 3)},
        step=1e-2,
    )
    old("Add_broadcast", opset, n("Add", "a b"), {"a": r(2, 3, 4), "b": r(3, 1)})
    old("Pow", opset, n("Pow", "a b"), {"a": positive(2, 3), "b": r(3)})
    old("Div", opset, n("Div", "a b"), {"a": r(2, 3), "b": positive(3)})
    old("PRelu", opset, n("PRelu", "x s"), {"x": f(2, 3, 4), "s": f(3, 1)}, step=1e-3)
    old("Flatten", opset, n("Flatten", "x", axis=2), {"x": r(2, 3, 4)})
    old("Concat", opset, n("Concat", "a b", axis=1), {"a": r(2, 3), "b": r(2, 1)})
    old("Gather", opset, n("Gather", "x i", axis=1), {"x": r(2, 3)}, constants={"i": i64(2, 0, 2)})
    old("Transpose", opset, n("Transpose", "x"), {"x": r(2, 3, 4)})
    old("Elu", opset, n("Elu", "x", alpha=0.7), {"x": f(2, 3)}, step=1e-3)
    old("LRN", opset, n("LRN", "x", size=3, alpha=0.1), {"x": f(1, 4, 2, 2)}, step=1e-2)
    old(
        "InstanceNormalization",
        opset,
        n("InstanceNormalization", "x s b"),
        {"x": f(2, 3, 4), "s": f(3), "b": f(3, seed=1)},
        step=1e-2,
    )
    old(
        "Conv",
        opset,
        n("Conv", "x w b", pads=[1, 1, 1, 1], strides=[2, 1], kernel_shape=[3, 3]),
        {"x": f(1, 2, 5, 5), "w": f(3, 2, 3, 3), "b": f(3)},
        step=1.0,
    )
    old(
        "Conv_auto_pad",
        opset,
        n("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2]),
        {"x": f(1, 2, 5, 5), "w": f(3, 2, 3, 3)},
        step=1.0,
    )
    old(
        "ConvTranspose",
        opset,
        n("ConvTranspose", "x w b", strides=[2, 2], output_padding=[1, 0]),
        {"x": f(1, 2, 3, 3), "w": f(2, 3, 3, 3), "b": f(3)},
        step=1.0,
    )
    old(
        "MaxPool",
        opset,
        n("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 0, 1]),
        {"x": f(1, 2, 5, 5)},
        step=1e-3,
    )
    old(
        "AveragePool",
        opset,
        n("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
        {"x": f(1, 2, 5, 5)},
        step=1.0,
    )
    old(
        "AveragePool_no_pad",
        opset,
        n("AveragePool", "x", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        {"x": f(1, 2, 5, 5)},
        step=1.0,
    )
    old(
        "LpPool", opset, n("LpPool", "x", kernel_shape=[2, 2], p=3), {"x": f(1, 2, 5, 5)}, step=1e-2
    )
    old("GlobalAveragePool", opset, n("GlobalAveragePool", "x"), {"x": f(1, 2, 5, 5)}, step=1.0)
    old("DepthToSpace", opset, n("DepthToSpace", "x", blocksize=2), {"x": f(1, 8, 2, 2)}, step=1.0)
    old("LpNormalization", opset, n("LpNormalization", "x", axis=1, p=2), {"x": r(2, 3)})
    for direction, count in (("forward", 1), ("bidirectional", 2)):
        old(
            f"LSTM_{direction}",
            opset,
            n("LSTM", "x w r b - h c", "y y_h y_c", hidden_size=3, direction=direction),
            {
                "x": f(4, 2, 2),
                "w": f(count, 12, 2),
                "r": f(count, 12, 3),
                "b": f(count, 24),
                "h": f(count, 2, 3),
                "c": f(count, 2, 3, seed=1),
            },
            step=1e-2,
        )
        old(
            f"GRU_{direction}",
            opset,
            n("GRU", "x w r b", "y y_h", hidden_size=3, direction=direction, linear_before_reset=1),
            {"x": f(4, 2, 2), "w": f(count, 9, 2), "r": f(count, 9, 3), "b": f(count, 18)},
            step=1e-2,
        )
        old(
            f"RNN_{direction}",
            opset,
            n("RNN", "x w r", "y y_h", hidden_size=3, direction=direction),
            {"x": f(4, 2, 2), "w": f(count, 3, 2), "r": f(count, 3, 3)},
            step=1e-2,
        )
old(
    "MaxPool_ceil",
    10,
    n("MaxPool", "x", kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
    {"x": f(1, 2, 5, 5)},
    step=1e-3,
)
old("Expand", 8, n("Expand", "x s"), {"x": r(3, 1)}, constants={"s": i64(2, 3, 4)})
old(
    "Where",
    9,
    n("Where", "c a b"),
    {"a": r(2, 3), "b": r(3)},
    constants={"c": np.array([[True, False, True]])},
)
old(
    "OneHot",
    9,
    n("OneHot", "i d v"),
    {"v": f(2)},
    constants={"i": i64(1, 0), "d": i64(3)},
    step=1.0,
)
old(
    "Scatter",
    9,
    n("Scatter", "x i u", axis=1),
    {"x": r(2, 4), "u": r(2, 2)},
    constants={"i": np.array([[1, 3], [0, 2]])},
)
for opset in (11, 13, 16):
    old(
        "ScatterElements",
        opset,
        n("ScatterElements", "x i u", axis=1),
        {"x": r(2, 4), "u": r(2, 2)},
        constants={"i": np.array([[1, 3], [0, 2]])},
    )
    old(
        "ScatterND",
        opset,
        n("ScatterND", "x i u"),
        {"x": r(4, 2), "u": r(2, 2)},
        constants={"i": np.array([[1], [3]])},
    )
    old("CumSum", opset, n("CumSum", "x a"), {"x": r(2, 3)}, constants={"a": np.array(1)})
    old(
        "Clip_inputs",
        opset,
        n("Clip", "x lo hi"),
        {"x": f(2, 3)},
        constants={"lo": np.float32(-0.5), "hi": np.float32(0.6)},
        step=1e-3,
    )
    old(
        "Pad_inputs",
        opset,
        n("Pad", "x p v", mode="constant"),
        {"x": r(2, 3)},
        constants={"p": i64(1, 0, 0, 2), "v": np.array(0.25)},
    )
    old("Celu", max(opset, 12), n("Celu", "x", alpha=0.7), {"x": f(2, 3)}, step=1e-3)
    old("HardSwish", max(opset, 14), n("HardSwish", "x"), {"x": f(2, 3)}, step=1e-3)
old("Dropout", 12, n("Dropout", "x ratio"), {"x": r(2, 3)}, constants={"ratio": np.float32(0.4)})
old("Dropout", 13, n("Dropout", "x"), {"x": r(2, 3)})
old(
    "GridSample",
    16,
    n("GridSample", "x g", mode="bilinear"),
    {"x": f(1, 2, 4, 4), "g": 0.4 * f(1, 3, 3, 2)},
    step=1e-3,
)
old(
    "LayerNormalization",
    17,
    n("LayerNormalization", "x s b"),
    {"x": r(2, 3), "s": r(3), "b": r(3, seed=1)},
)
old(
    "GroupNormalization",
    18,
    n("GroupNormalization", "x s b", num_groups=2),
    {"x": f(2, 4, 3), "s": f(2), "b": f(2, seed=1)},
    step=1e-2,
)
old(
    "Split_num",
    18,
    [n("Split", "x", "a b", axis=1, num_outputs=2), n("ReduceMax", "b", "c"), n("Mul", "a c")],
    {"x": r(2, 5)},
)
old("Sum", 7, n("Sum", "a b"), {"a": r(2, 3), "b": r(2, 3)})
old("Mean", 8, n("Mean", "a b"), {"a": f(2, 3), "b": f(3)}, step=1.0)
old("Max", 7, n("Max", "a b"), {"a": f(2, 3), "b": f(2, 3, seed=1)}, step=1e-3)
old("Mod", 10, n("Mod", "a b", fmod=1), {"a": r(2, 3), "b": positive(2, 3)})
old("Einsum", 12, n("Einsum", "a b", equation="ij,jk->ik"), {"a": r(2, 3), "b": r(3, 2)})
old(
    "NegativeLogLikelihoodLoss",
    12,
    n("NegativeLogLikelihoodLoss", "x t"),
    {"x": r(3, 4)},
    constants={"t": i64(1, 0, 3)},
)
old(
    "SoftmaxCrossEntropyLoss",
    12,
    n("SoftmaxCrossEntropyLoss", "x t"),
    {"x": r(3, 4)},
    constants={"t": i64(1, 0, 3)},
)
old("DFT", 17, n("DFT", "x", axis=1), {"x": f(1, 4, 1)}, step=1.0)
old("DFT_default", 17, n("DFT", "x", onesided=1), {"x": f(2, 4, 1)}, step=1.0)
old(
    "RoiAlign",
    10,
    n("RoiAlign", "x r b", output_height=2, output_width=2, sampling_ratio=2),
    {"x": f(1, 2, 6, 6)},
    constants={"r": np.float32([[0.3, 0.2, 4.1, 4.6]]), "b": i64(0)},
    step=1.0,
)
old("MatMul", 7, n("MatMul", "a b"), {"a": r(2, 3), "b": r(2, 3, 4)})
old("Tile", 7, n("Tile", "x t"), {"x": r(2, 3)}, constants={"t": i64(2, 1)})
old("Reshape", 7, n("Reshape", "x s"), {"x": r(2, 3)}, constants={"s": i64(0, -1, 1)})
old(
    "ArgMax",
    7,
    [n("ArgMax", "x", "i", axis=1), n("Cast", "i", "z", to=TensorProto.DOUBLE), n("Mul", "x z")],
    {"x": r(2, 3)},
)
old(
    "Constant_then_Mul",
    7,
    [n("Constant", "", "c", value=numpy_helper.from_array(r(3))), n("Mul", "x c")],
    {"x": r(2, 3)},
)

for opset in (7, 9, 10):
    old("Dropout_mask", opset, [n("Dropout", "x", "d m"), n("Mul", "d x")], {"x": r(3, 4)})
    old(
        "Pad_float16",
        opset,
        n("Pad", "x", pads=[0, 1, 2, 0], value=1.5),
        {"x": r(3, 4, dtype=np.float16)},
        step=0.5,
    )
    old(
        "ConvTranspose_auto_pad",
        opset,
        n("ConvTranspose", "x w", strides=[2, 2], auto_pad="SAME_UPPER"),
        {"x": f(1, 2, 3, 3), "w": f(2, 3, 3, 3)},
        step=1.0,
    )
    old(
        "ConvTranspose_output_shape",
        opset,
        n("ConvTranspose", "x w", strides=[2, 2], output_shape=[8, 7]),
        {"x": f(1, 2, 3, 3), "w": f(2, 3, 3, 3)},
        step=1.0,
    )
    old(
        "MaxPool_auto_pad",
        opset,
        n("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_LOWER"),
        {"x": f(1, 2, 6, 6)},
        step=1e-3,
    )
    old("Sum_one", opset, n("Sum", "x"), {"x": r(3)})
    old("Selu", opset, n("Selu", "x"), {"x": f(2, 3)}, step=1e-3)
for transform in (
    "half_pixel",
    "pytorch_half_pixel",
    "asymmetric",
    "align_corners",
    "tf_half_pixel_for_nn",
):
    for nearest in ("round_prefer_floor", "floor", "ceil", "round_prefer_ceil"):
        old(
            f"Resize_{transform}_{nearest}",
            11,
            n("Resize", "x roi s", coordinate_transformation_mode=transform, nearest_mode=nearest),
            {"x": f(1, 1, 4, 5)},
            constants={"roi": np.zeros(0, np.float32), "s": np.float32([1, 1, 2.5, 0.6])},
            step=1.0,
        )
old(
    "Resize_crop",
    11,
    n(
        "Resize",
        "x roi s",
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=0.5,
    ),
    {"x": f(1, 1, 4, 5)},
    constants={"roi": np.float32([0, 0, 0.1, 0.2, 1, 1, 0.9, 1.2]), "s": np.float32([1, 1, 2, 2])},
    step=1.0,
)
for opset in (16, 18):
    for mode in ("bilinear", "bicubic", "nearest"):
        old(
            f"GridSample_{mode}",
            opset,
            n("GridSample", "x g", mode=mode, padding_mode="border"),
            {"x": f(1, 2, 4, 4)},
            constants={"g": 0.8 * f(1, 3, 3, 2)},
            step=1.0,
        )
old(
    "RoiAlign_max",
    10,
    n("RoiAlign", "x r b", output_height=2, output_width=2, sampling_ratio=2, mode="max"),
    {"x": f(1, 2, 6, 6)},
    constants={"r": np.float32([[0.3, 0.2, 4.1, 4.6]]), "b": i64(0)},
    step=1e-3,
)
old(
    "RoiAlign_small",
    10,
    n("RoiAlign", "x r b", output_height=2, output_width=2),
    {"x": f(1, 2, 6, 6)},
    constants={"r": np.float32([[0.3, 0.2, 0.5, 0.6]]), "b": i64(0)},
    step=1.0,
)
old(
    "MeanVarianceNormalization",
    9,
    n("MeanVarianceNormalization", "x"),
    {"x": f(2, 3, 2, 2)},
    step=1e-2,
)
old("Unsqueeze_negative", 11, n("Unsqueeze", "x", axes=[-1]), {"x": r(3, 2)})
old(
    "DequantizeLinear",
    10,
    [n("QuantizeLinear", "x s z", "q"), n("DequantizeLinear", "q s z", "d"), n("Mul", "d x")],
    {"x": f(2, 3)},
    constants={"s": np.float32(0.05), "z": np.uint8(100)},
    gradient=False,
)
old("Hardmax_negative", 11, n("Hardmax", "x", axis=-2), {"x": f(2, 3, 4)}, gradient=False)
for opset in (7, 11):
    inner = helper.make_graph(
        [
            n("Unsqueeze", "state", "u", axes=[1]),
            n("Softmax", "u", "s", axis=0),
            n("Squeeze", "s", "q", axes=[1]),
            n("Mul", "q x", "next"),
            n("ReduceSum", "next", "total", axes=[0], keepdims=0),
            n("Identity", "go", "go_on"),
        ],
        "loop",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.DOUBLE, [3]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.DOUBLE, [3]),
            helper.make_tensor_value_info("total", TensorProto.DOUBLE, []),
        ],
    )
    old(
        "Loop",
        opset,
        [n("Loop", "count yes x", "last totals", body=inner), n("Mul", "totals last")],
        {"x": r(3)},
        constants={"count": np.array(3), "yes": np.array(True)},
    )
step_graph = helper.make_graph(
    [
        n("ReduceSum", "state", "t", axes=[0], keepdims=1),
        n("Mul", "t item", "next"),
        n("Identity", "next", "out"),
    ],
    "scan",
    [helper.make_tensor_value_info(k, TensorProto.DOUBLE, [2]) for k in ("state", "item")],
    [helper.make_tensor_value_info(k, TensorProto.DOUBLE, [2]) for k in ("next", "out")],
)
old(
    "Scan",
    9,
    n("Scan", "a b", "last y", num_scan_inputs=1, body=step_graph),
    {"a": r(2), "b": r(4, 2)},
)

for opset in (7, 9, 10, 11, 12):
    branch = [
        n("Unsqueeze", "x", "u", axes=[0]),
        n("Softmax", "u", "s", axis=1),
        n("Mul", "s u", "m"),
        n("ReduceSum", "m", "t", axes=[1], keepdims=1),
        n("Squeeze", "t", "e", axes=[0]),
    ]
    other = [n("ReduceSum", "x", "f", axes=[0], keepdims=1)]
    old(
        "If",
        opset,
        n("If", "c", then_branch=body(branch, "e"), else_branch=body(other, "f")),
        {"x": r(2, 3)},
        constants={"c": np.array(True)},
    )

for opset in (9, 13, 16):  # onnxruntime's optimizer writes these before they were in the standard
    old(
        "LayerNormalization",
        opset,
        [n("LayerNormalization", "x g b", "h", epsilon=1e-3), n("Softmax", "h", axis=1)],
        {"x": r(2, 4), "g": r(4, seed=1), "b": r(4, seed=2)},
    )
    old(
        "SimplifiedLayerNormalization",
        opset,
        [n("SimplifiedLayerNormalization", "x g", "h"), n("Softmax", "h", axis=1)],
        {"x": r(2, 4), "g": r(4, seed=1)},
    )


def model_of(case: Old) -> onnx.ModelProto:
    def described(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        return helper.make_tensor_value_info(
            name,
            kind,
            [f"{name}_{i}" for i in range(array.ndim)] if array.ndim > 1 else array.shape,
        )

    early = case.opset < 9  # when initializers had to be inputs too
    listed = {name: np.asarray(a) for name, a in case.constants.items()} if early else {}
    graph = helper.make_graph(
        case.nodes,
        "old",
        [described(name, array) for name, array in (case.inputs | listed).items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in case.constants.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=3 if early else 8
    )


def upgraded(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = convert.to_ir(proto)
    convert.inline(model)
    return ir.to_proto(convert.upgrade(model))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="ortops")


FORMS: dict[str, list[Old]] = {}
"""The cases by name, each in one or several opsets."""
for name, case in CASES.items():
    FORMS.setdefault(name.rpartition("-")[0], []).append(case)


@pytest.mark.nightly(31)
@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_gradient(form: str) -> None:
    with all_violations() as check:
        for case in FORMS[form]:
            proto = model_of(case)
            session = plain_session(proto)
            (before,) = run_session(session, case.inputs)
            with check(f"opset {case.opset}, forward"):
                (after,) = run(upgraded(proto), case.inputs)
                assert before.dtype == after.dtype
                np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
            if case.gradient:
                with check(f"opset {case.opset}, gradient"):
                    check_gradient(case, proto, session, before)


def check_gradient(
    case: Old, proto: onnx.ModelProto, session: onnxruntime.InferenceSession, before: np.ndarray
) -> None:
    """Compares a gradient with differences.

    Args:
        case: The case.
        proto: Its model, as it was written.
        session: The model's.
        before: What it puts out.
    """
    rng = np.random.default_rng(SEED)
    weight = rng.standard_normal(before.shape).astype(before.dtype)
    y = proto.graph.output[0].name
    names = [key for key, array in case.inputs.items() if array.dtype.kind == "f"]
    trained = onnx.ModelProto()
    trained.CopyFrom(proto)
    trained.graph.initializer.append(numpy_helper.from_array(weight, "weight_of_y"))
    made = [f"d_{key}" for key in names]
    trained.graph.node.extend(
        [
            helper.make_node("Mul", [y, "weight_of_y"], ["weighted"]),
            node("Gradient", names, made, xs=names, y="weighted"),
        ]
    )
    trained.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    del trained.graph.output[:]
    trained.graph.output.extend(helper.make_empty_tensor_value_info(key) for key in made)
    gradients = run(ortops.lower(trained), case.inputs)
    exact = before.dtype == np.float64 and all(a.dtype != np.float32 for a in case.inputs.values())
    tolerance = 1e-6 if exact else 1e-5 if case.step == 1 else 1e-2
    for key, gradient in zip(names, gradients, strict=True):
        array = case.inputs[key]
        v = rng.standard_normal(array.shape).astype(array.dtype)
        ahead, behind = (
            run_session(session, {**case.inputs, key: moved.astype(array.dtype)})[0]
            for moved in (array + case.step * v, array - case.step * v)
        )
        expected = np.sum((ahead.astype(np.float64) - behind) * weight) / (2 * case.step)
        terms = gradient.astype(np.float64) * v
        scale = np.abs(terms).sum() + abs(expected) + 1e-3
        assert abs(terms.sum() - expected) <= tolerance * scale, (key, terms.sum(), expected)


def test_operators_that_keep_their_form_only_take_more() -> None:
    """Each of these was looked up: it takes more types, or an attribute more values."""
    names = {schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}
    found = {
        name
        for opset in range(17, 21)
        for name in names
        if convert._same_signature(name, opset, 21)
        and len({onnx.defs.get_schema(name, each).since_version for each in (opset, 21)}) == 2
    }
    assert found == {
        *("Cast", "CastLike", "Constant", "ConstantOfShape", "Equal", "Flatten", "Identity", "If"),
        *("IsInf", "IsNaN", "Loop", "OptionalGetElement", "Pad", "ReduceMax", "ReduceMin"),
        *("Reshape", "Resize", "Scan", "ScatterElements", "ScatterND", "Shape", "Size", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    }
    assert not convert._same_signature(
        "GroupNormalization", 20, 21
    )  # scale and bias are of channels
    assert not convert._same_signature("Gelu", 19, 21)
    assert not convert._same_signature("BiasGelu", 20, 21)


def test_what_the_converter_loses_stays_where_it_is_not_needed() -> None:
    nodes = [n("Transpose", "x", "t", perm=[1, 0]), n("Relu", "t")]
    old = model_of(Old(20, nodes, {"x": r(2, 3)}))
    entry = old.graph.node[0].metadata_props.add()
    entry.key, entry.value = "written", "by hand"
    new = upgraded(old)
    assert new.opset_import[0].version == 21
    assert new.graph.node[0] == old.graph.node[0]
