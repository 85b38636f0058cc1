"""Rules of softmax and the classification losses against differences."""

import numpy as np
import pytest
from dot_test import Case, check, normal


def integers(high: int, *shape: int, dtype=np.int64) -> np.ndarray:
    return np.random.default_rng(20).integers(0, high, shape).astype(dtype)


CASES = [
    Case("Softmax", [normal(3, 4)], orders=3),
    Case("Softmax", [normal(2, 3, 4)], {"axis": 1}, orders=2),
    Case("LogSoftmax", [normal(3, 4)], orders=3),
    Case("LogSoftmax", [normal(2, 3, 4)], {"axis": 0}, orders=2),
    Case("SoftmaxCrossEntropyLoss", [normal(4, 3), integers(3, 4)]),
    Case("SoftmaxCrossEntropyLoss", [normal(4, 3), integers(3, 4)], outputs=2),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
