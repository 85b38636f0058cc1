"""Rules of pooling against differences, expected values and PyTorch."""

import numpy as np
import pytest
from dot_test import Case, check, distinct, normal


def average(name: str, x: tuple[int, ...], **attributes: object) -> Case:
    """Averaging is linear, so a step of 1 is exact; float32 is all that onnxruntime has."""
    inputs = [normal(*x, dtype=np.float32)]
    return Case("AveragePool", inputs, attributes, orders=1, epsilon=1.0, rtol=2e-6, name=name)


def maximum(name: str, x: tuple[int, ...], **attributes: object) -> Case:
    return Case("MaxPool", [distinct(*x)], attributes, orders=1, name=name)


CASES = [
    average("tiles", (2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2]),
    average("stride_1", (2, 3, 6, 4), kernel_shape=[3, 2]),
    average("pads", (2, 3, 6, 5), kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
    maximum("tiles", (2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2]),
    maximum("overlap", (2, 3, 6, 5), kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]),
    Case("GlobalAveragePool", [normal(2, 3, 4, 5, dtype=np.float32)], epsilon=1.0, rtol=2e-6),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
