"""Rules of elementwise operators against differences."""

import pytest
from dot_test import Case, check, normal

CASES = [
    Case("Add", [normal(2, 3), normal(3, seed=1)], orders=2),
    Case("Mul", [normal(2, 3), normal(2, 1, seed=1)], orders=3),
    Case("Exp", [normal(2, 3)], orders=3),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
