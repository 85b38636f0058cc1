"""Rules of matrix products against differences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dot_test import Case, check, lowered, normal

MATMUL = [
    ((3,), (3,)),
    ((3,), (3, 2)),
    ((4, 3), (3,)),
    ((4, 3), (3, 2)),
    ((1, 3), (3, 1)),
    ((2, 4, 3), (3,)),
    ((2, 4, 3), (3, 2)),
    ((5, 2, 4, 3), (3, 2)),
    ((3,), (2, 3, 4)),
    ((3,), (5, 2, 3, 4)),
    ((4, 3), (2, 3, 5)),
    ((2, 4, 3), (2, 3, 5)),
    ((2, 4, 3), (1, 3, 5)),
    ((1, 4, 3), (2, 3, 5)),
    ((5, 1, 4, 3), (2, 3, 2)),
    ((2, 4, 3), (5, 1, 3, 2)),
    ((5, 1, 4, 3), (1, 2, 3, 2)),
    ((2, 1, 3), (2, 3, 1)),
    ((0, 3), (3, 2)),
    ((0, 4, 3), (3, 2)),
    ((2, 4, 0), (0, 3)),
]


def gemms() -> Iterator[Case]:
    """Yields every way to transpose, scale and add."""
    for trans_a in (0, 1):
        for trans_b in (0, 1):
            a = normal(3, 4) if trans_a else normal(4, 3)
            b = normal(2, 3, seed=1) if trans_b else normal(3, 2, seed=1)
            attributes = {"transA": trans_a, "transB": trans_b}
            name = f"{trans_a}{trans_b}"
            yield Case("Gemm", [a, b], attributes, orders=2, epsilon=1, name=name)
            scaled = {**attributes, "alpha": 0.5, "beta": -1.5}
            c = normal(4, 2, seed=2)
            yield Case("Gemm", [a, b, c], scaled, orders=2, epsilon=1, name=f"{name}-scaled")
    for shape in ((4, 2), (1, 2), (4, 1), (1, 1), (2,), (1,), ()):
        inputs = [normal(4, 3), normal(3, 2, seed=1), normal(*shape, seed=2)]
        yield Case("Gemm", inputs, {"beta": 0.5}, orders=2, epsilon=1)
    inputs = [normal(0, 3), normal(3, 2, seed=1), normal(2, seed=2)]
    yield Case("Gemm", inputs, orders=2, epsilon=1, name="empty")


CASES = [
    *(Case("MatMul", [normal(*a), normal(*b, seed=1)], orders=2, epsilon=1) for a, b in MATMUL),
    *gemms(),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def backward(case: Case, *, symbolic: bool = False) -> list[str]:
    """Returns the operators that the rule under test emitted, constants aside."""
    nodes = lowered(case, symbolic=symbolic).graph.node
    return sorted(
        node.op_type for node in nodes if "/under_test/" in node.name and node.op_type != "Constant"
    )


@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("trans_a", [0, 1])
def test_gemm_needs_one_gemm_for_each_factor(trans_a: int, trans_b: int) -> None:
    a = normal(3, 4) if trans_a else normal(4, 3)
    b = normal(2, 3, seed=1) if trans_b else normal(3, 2, seed=1)
    case = Case("Gemm", [a, b], {"transA": trans_a, "transB": trans_b, "alpha": 0.5})
    assert backward(case) == ["Gemm", "Gemm"]


def test_product_with_a_matrix_is_not_batched() -> None:
    # One product over all leading axes, not one for each, summed.
    case = Case("MatMul", [normal(2, 4, 3), normal(3, 5, seed=1)])
    assert backward(case) == ["Flatten", "Flatten", "Gemm", "Gemm", "Reshape"]
    assert not {"MatMul", "ReduceSum"} & set(backward(case, symbolic=True))


def test_bias_of_a_static_gemm_takes_one_sum() -> None:
    case = Case("Gemm", [normal(4, 3), normal(3, 2, seed=1), normal(2, seed=2)])
    assert backward(case) == ["Gemm", "Gemm", "ReduceSum"]
