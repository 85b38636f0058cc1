"""Rules of matrix products against differences."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from checked import by_case, quick
from dot_test import Case, check, lowered, normal

import ortops

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


EINSUM = [
    ("ij,jk->ik", (4, 3), (3, 2)),
    ("ij,jk", (4, 3), (3, 2)),
    ("ba,cb", (4, 3), (2, 4)),
    ("ij,jk->ki", (4, 3), (3, 2)),
    ("b h i d , b h j d -> b h i j", (2, 1, 3, 4), (2, 1, 2, 4)),
    ("bhwc,hkc->bhwk", (2, 3, 2, 4), (3, 2, 4)),
    ("bij,bjk->bik", (4, 2, 3), (4, 3, 2)),
    ("i,j->ij", (3,), (2,)),
    ("i,i->", (3,), (3,)),
    ("ij,kl->", (2, 3), (3, 2)),
    ("ij,jk->", (2, 3), (3, 2)),
    ("i,ij,j->", (2,), (2, 3), (3,)),
    ("a,b,c->cab", (2,), (3,), (4,)),
    (",ij->ij", (), (2, 3)),
    ("ij->ji", (2, 3)),
    ("ij->j", (2, 3)),
    ("ij->", (2, 3)),
    ("ij->ij", (2, 3)),
    ("ii->i", (3, 3)),
    ("ii", (3, 3)),
    ("iij->ij", (3, 3, 2)),
    ("iji->j", (3, 2, 3)),
    ("iii->i", (2, 2, 2)),
    ("ii,i->i", (3, 3), (3,)),
    ("...ii->...i", (2, 3, 3)),
    ("...ij,...jk->...ik", (2, 3, 4, 3), (2, 3, 3, 2)),
    ("ij...,jk...->ik...", (2, 3, 5), (3, 4, 5)),
    ("...ij,jk->...ik", (2, 4, 3), (3, 2)),
    ("i...->...", (2, 3, 4)),
    ("ij...->ji...", (2, 3, 4)),
    ("...i,...i", (2, 3), (2, 3)),
]
BROADCAST = [
    ("...ij,...jk->...ik", (1, 2, 3), (5, 3, 4)),
    ("b...ij,b...jk->b...ik", (2, 1, 2, 3), (2, 6, 3, 4)),
    ("...i,...i", (1, 5, 3), (4, 1, 3)),
    ("i...,i...->...", (3, 1, 5), (3, 4, 1)),
]


def einsum(equation: str, *shapes: tuple[int, ...], orders: int = 2) -> Case:
    inputs = [np.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
    attributes = {"equation": equation}
    return Case("Einsum", inputs, attributes, orders=orders, epsilon=1, name=equation)


CASES = [
    *(Case("MatMul", [normal(*a), normal(*b, seed=1)], orders=2, epsilon=1) for a, b in MATMUL),
    *gemms(),
    *(einsum(equation, *shapes) for equation, *shapes in EINSUM),
]
CASES = quick(
    CASES,
    """
    MatMul-5x2x4x3_3x2
    MatMul-2x4x3_3
    MatMul-3_2x3x4
    MatMul-3_3x2
    MatMul-3_3
    MatMul-0x3_3x2
    Gemm-00-scaled-4x3_3x2_4x2
    Gemm-01-scaled-4x3_2x3_4x2
    Einsum-...ij,...jk->...ik-2x3x4x3_2x3x3x2
    Einsum-ij,jk->-2x3_3x2
    Einsum-iji->j-3x2x3
    Einsum-a,b,c->cab-2_3_4
    Einsum-ij...->ji...-2x3x4
    Einsum-...ij,jk->...ik-2x4x3_3x2
    Einsum-...i,...i-2x3_2x3
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(19)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize(("equation", "shapes"), [(row[0], row[1:]) for row in BROADCAST])
def test_ellipses_that_are_broadcast(equation: str, shapes: list[tuple[int, ...]]) -> None:
    check(einsum(equation, *shapes), symbolic=False)
    # For the second order of unknown sizes, onnxruntime reuses memory by wrong symbols.
    check(einsum(equation, *shapes, orders=1), symbolic=True)


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


def test_einsum_that_broadcasts_a_letter_is_refused() -> None:
    case = Case("Einsum", [normal(1, 3), normal(2, 3, seed=1)], {"equation": "ij,ij->ij"})
    with pytest.raises(
        ortops.UnsupportedError,
        match=r"Einsum node 'under_test': in 'ij,ij->ij', 'i' has sizes \[1, 2\]; squeeze",
    ):
        lowered(case, symbolic=False)
