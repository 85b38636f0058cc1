"""Rules of convolutions against differences, expected values and PyTorch."""

import numpy as np
import pytest
from dot_test import Case, check, normal


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return normal(*shape, seed=seed, dtype=np.float32)


def case(name: str, op: str, x: tuple, w: tuple, b: int = 0, **attributes: object) -> Case:
    """A convolution: linear in each argument, so a step of 1 is exact; float32 is all ORT has."""
    inputs = [floats(*x), floats(*w, seed=1), *([floats(b, seed=2)] if b else [])]
    return Case(op, inputs, attributes, orders=1, epsilon=1.0, rtol=2e-6, name=name)


CONV = [
    case("plain", "Conv", (2, 3, 6, 5), (4, 3, 3, 3), 4),
    case("pads", "Conv", (2, 3, 6, 5), (4, 3, 3, 2), pads=[1, 0, 2, 1]),
    case("strides", "Conv", (2, 3, 8, 7), (4, 3, 3, 2), 4, strides=[2, 3], pads=[1, 1, 0, 1]),
    case("leftover", "Conv", (2, 3, 9, 8), (4, 3, 2, 2), strides=[3, 4]),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CONV, ids=str)
def test_conv(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
