"""Rules of convolutions against differences and PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from dot_test import DOMAIN, Case, check, normal
from onnx import helper

import ortops

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
    case("3d", "Conv", (2, 2, 4, 5, 4), (3, 2, 2, 3, 1), strides=[1, 2, 2], pads=[0, 1, 1, 1, 0, 0]),
    case("kernel_shape", "Conv", X, W, kernel_shape=[3, 2], pads=[1, 0, 2, 1]),
    case("strides", "Conv", X, W, strides=[2, 3], pads=[1, 1, 0, 1]),
    case("gaps", "Conv", (2, 3, 9, 8), (4, 3, 2, 2), strides=[3, 4]),
    case("left_over", "Conv", (1, 2, 12, 11), (3, 2, 2, 3), strides=[5, 4], dilations=[1, 2]),
    case("dilations", "Conv", X, W, dilations=[2, 3], pads=[2, 1, 1, 2]),
    case("dilations_strides", "Conv", (2, 3, 9, 9), W[:1] + (3, 3, 2), bias=6, dilations=[2, 3],
         strides=[3, 2], pads=[2, 1, 0, 2]),
    case("wide_pads", "Conv", X, W, pads=[4, 3, 3, 5]),
    case("pointwise", "Conv", X, (5, 4, 1, 1), bias=5),
    case("pointwise_strides", "Conv", X, (5, 4, 1, 1), strides=[2, 2]),
    case("one_channel", "Conv", (3, 1, 6, 6), (4, 1, 3, 3), pads=[1, 1, 1, 1]),
    case("large_kernel", "Conv", (2, 3, 11, 10), (4, 3, 7, 6), strides=[2, 1], pads=[3, 3, 3, 3]),
    case("large_kernel_groups", "Conv", (2, 4, 11, 10), (6, 2, 7, 6), group=2, strides=[2, 3],
         dilations=[1, 2], pads=[3, 3, 3, 3]),
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


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CONV + TRANSPOSE, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
