"""Rules of pooling against differences, expected values and PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dot_test import Case, check, distinct, normal

UNIT = {"epsilon": 1.0, "rtol": 2e-6}


def average(name: str, *x: int, opset: int = 21, **attributes: Any) -> Case:
    """Averaging is linear, so a step of 1 is exact; float32 is all that onnxruntime has."""
    inputs = [normal(*x, dtype=np.float32)]
    return Case("AveragePool", inputs, attributes, orders=2, opset=opset, name=name, **UNIT)


def maximum(name: str, *x: int, **attributes: Any) -> Case:
    return Case("MaxPool", [distinct(*x)], attributes, orders=2, name=name)


def maximum32(name: str, *x: int, **attributes: Any) -> Case:
    """The elements are 0.1 apart: over a step of 0.01 a maximum stays where it is."""
    inputs = [distinct(*x, gap=1.0).astype(np.float32)]
    return Case("MaxPool", inputs, attributes, orders=2, epsilon=0.1, rtol=2e-5, name=name)


def norm(name: str, p: int, *x: int, **attributes: Any) -> Case:
    """In float32, which is all that onnxruntime has, differences are good to three digits."""
    inputs = [(np.sign(normal(*x, seed=1)) * (0.5 + np.abs(normal(*x)))).astype(np.float32)]
    attributes = {"p": p, **attributes}
    return Case("LpPool", inputs, attributes, orders=2, epsilon=0.01, rtol=5e-4, name=name)


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
    average("ceil_dropped", 1, 1, 5, 4, kernel_shape=[2, 2], pads=[1, 1, 1, 1], strides=[3, 4],
            ceil_mode=1, opset=22),
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
    maximum("dilations", 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3], strides=[1, 2]),
    maximum("same_upper", 2, 3, 8, 7, kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 3]),
    maximum("same_lower", 2, 3, 8, 7, kernel_shape=[3, 2], auto_pad="SAME_LOWER"),
    maximum("column_major", 2, 3, 6, 5, kernel_shape=[3, 2], storage_order=1),
    Case("GlobalMaxPool", [distinct(2, 3, 4, 5, gap=1.0).astype(np.float32)], epsilon=0.1,
         rtol=2e-5, orders=2),
    Case("GlobalMaxPool", [distinct(2, 3, 4, gap=1.0).astype(np.float32)], epsilon=0.1, rtol=2e-5),
]  # fmt: skip

NORM = [
    Case("GlobalLpPool", [normal(2, 3, 4, 5, dtype=np.float32)], orders=2, epsilon=0.01, rtol=5e-4),
    Case("GlobalLpPool", [normal(2, 3, 4, dtype=np.float32)], {"p": 3}, epsilon=0.01, rtol=5e-4),
    norm("1", 1, 2, 3, 7, kernel_shape=[3], strides=[2]),
    norm("2", 2, 2, 3, 6, 5, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1]),
    norm("3", 3, 2, 3, 6, 5, kernel_shape=[3, 2], auto_pad="SAME_UPPER", strides=[2, 3]),
    norm("4", 4, 2, 3, 6, 8, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1),
    norm("dilations", 2, 2, 3, 8, 7, kernel_shape=[3, 2], dilations=[2, 3]),
]

INDICES = np.array([[[[5, 7], [12, 14]]], [[[16, 19], [26, 30]]]])
UNPOOL = [
    Case("MaxUnpool", [normal(2, 1, 2, 2, dtype=np.float32), INDICES],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, orders=2, **UNIT),
    Case("MaxUnpool", [normal(2, 1, 2, 2, dtype=np.float32), INDICES, np.array([2, 1, 5, 5])],
         {"kernel_shape": [2, 2], "strides": [2, 2]}, orders=2, constant=[2], **UNIT),
]  # fmt: skip


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", AVERAGE + MAXIMUM + NORM + UNPOOL, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
