"""Rules of operators that build a tensor from a few numbers, against differences."""

import numpy as np
import pytest
from dot_test import Case, check, normal

INDICES = np.array([[0, 2, -1], [3, 1, 7]])
DEPTH = np.array(4)

CASES = [
    Case("Range", [np.array(0.7), np.array(5.1), np.array(1.3)], only=[0, 2], orders=2),
    Case("Range", [np.array(2.0), np.array(0.5), np.array(1.0)], only=[0, 2], name="no_elements"),
    Case("Range", [np.array(2.0), np.array(-3.4), np.array(-1.0)], only=[1], name="limit"),
    Case("OneHot", [INDICES, DEPTH, normal(2)], orders=2, float32=True),
    Case(
        "OneHot", [INDICES, DEPTH, normal(2)], {"axis": 0}, constant=[0, 1], orders=2, float32=True
    ),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
