"""Rules of operators that pick elements by index, or put them there, against differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from checked import by_case, quick
from domain_models import model, node, value
from dot_test import Case, check, distinct, lowered, normal
from onnx import helper
from running import run
from test_rules_elementwise import gradients

import ortops

X = normal(3, 4, 5)
WIDE = normal(6, 2)


def both(
    op: str, inputs: Sequence[np.ndarray | None], name: str = "", **attributes: object
) -> Iterator[Case]:
    """Yields a case with the indices as an initializer, and one with them fed at run time."""
    for constant in ([], [1]):
        tag = "-".join(filter(None, (name, "constant" if constant else "run_time")))
        yield Case(op, inputs, attributes, constant=constant, orders=2, epsilon=1, name=tag)


def gathers() -> Iterator[Case]:
    for axis in (0, 1, 2, -1, -2, -3):
        for indices in (1, -1, [2], [-2], [0, 2, 2, -3, 0], [[1, 1], [0, -1]], [[1]], []):
            given = np.array(indices, np.int64)
            yield from both("Gather", [X, given], name=f"{axis}-{indices}", axis=axis)
    yield from both("Gather", [normal(5), np.array([3, 3, -1])])
    yield from both("Gather", [WIDE, np.array([[5, 5, -6]], np.int32)])
    yield from both("Gather", [WIDE, np.array(-2, np.int32)])
    indices = np.array([[[0, 0, 2], [-1, 1, 1]]])
    for axis in (0, 1, -1):
        x = normal(1, 3, 4) if axis != 1 else normal(2, 3, 4)
        yield from both("GatherElements", [x, indices % x.shape[axis]], name=str(axis), axis=axis)
    yield from both("GatherElements", [normal(3), np.array([-1, 2, 2, 2, 0])])
    yield from both("GatherND", [X, np.array([[0, 1, 2], [0, 1, 2], [-1, -2, -3]])])
    yield from both("GatherND", [X, np.array([[[0, 1]], [[2, -1]]])])
    yield from both("GatherND", [X, np.array([[1], [1], [0], [-1]])])
    yield from both("GatherND", [X, np.array([[1], [-1], [3]])], batch_dims=1)
    batched = np.array([[[1], [1], [0], [-1]]] * 3)
    yield from both("GatherND", [X, batched], batch_dims=2)
    yield from both("GatherND", [X, np.zeros((0, 2), np.int64)], name="none")
    for axis in (None, 0, 1, -1):
        chosen = np.array([True, False, True])
        attributes = {} if axis is None else {"axis": axis}
        yield from both("Compress", [X, chosen], name=str(axis), **attributes)


def scatters() -> Iterator[Case]:
    unique = np.array([[2, 0, 1, -1], [0, 1, 2, 0]])
    repeated = np.array([[2, 2, -1, 0], [2, 1, 0, 0]])
    for axis in (0, 1, -1):
        x = normal(4, 5)
        updates = normal(2, 4, seed=1)
        rows = unique if axis == 0 else np.array([[2, 0, 1, -1], [0, 1, 2, 3]])
        yield from both("ScatterElements", [x, rows, updates], name=str(axis), axis=axis)
        given = [x, repeated, updates]
        yield from both("ScatterElements", given, name=f"{axis}-add", axis=axis, reduction="add")
        yield Case(
            "ScatterElements",
            given,
            {"axis": axis, "reduction": "mul"},
            orders=2,
            name=f"{axis}-mul",
        )
        for reduction in ("min", "max"):
            values = distinct(28)
            given = [values[:20].reshape(4, 5), repeated, values[20:].reshape(2, 4)]
            attributes = {"axis": axis, "reduction": reduction}
            name = f"{axis}-{reduction}"
            yield Case("ScatterElements", given, attributes, orders=2, name=name)
    points, rows = np.array([[[0, 1], [2, -1]]]), np.array([[2], [-3]])
    same = np.array([[1, 1], [1, 1], [0, 0]])
    yield from both("ScatterND", [X, points, normal(1, 2, 5, seed=1)])
    yield from both("ScatterND", [X, rows, normal(2, 4, 5, seed=1)])
    yield from both("ScatterND", [X, rows, normal(2, 4, 5, seed=1)], name="add", reduction="add")
    yield from both("ScatterND", [X, same, normal(3, 5, seed=1)], name="add", reduction="add")
    given = [X, same, normal(3, 5, seed=1)]
    yield Case("ScatterND", given, {"reduction": "mul"}, orders=2, name="mul")
    values = distinct(75)
    for reduction in ("min", "max"):
        given = [values[:60].reshape(3, 4, 5), same, values[60:].reshape(3, 5)]
        yield Case("ScatterND", given, {"reduction": reduction}, orders=2, name=reduction)


def caches() -> Iterator[Case]:
    past, update = normal(2, 3, 6, 4), normal(2, 3, 2, 4, seed=1)
    for start in (None, np.array([1, 4])):
        inputs = [past, update, start]
        yield Case("TensorScatter", inputs, orders=2, epsilon=1, opset=24)
    inputs = [past, update, np.array([5, 2])]
    yield Case("TensorScatter", inputs, {"mode": "circular"}, orders=2, epsilon=1, opset=24)
    inputs = [past, normal(2, 2, 6, 4, seed=1), np.array([1, 0])]
    yield Case("TensorScatter", inputs, {"axis": 1}, orders=2, epsilon=1, opset=24, name="axis")


CASES = [*gathers(), *scatters(), *caches()]
CASES = quick(
    CASES,
    """
    Gather-0-[[1, 1], [0, -1]]-run_time-3x4x5_2x2
    Gather-2--1-constant-3x4x5_
    Gather-0-1-constant-3x4x5_
    Gather-1-[[1, 1], [0, -1]]-run_time-3x4x5_2x2
    Gather-0-[[1, 1], [0, -1]]-constant-3x4x5_2x2
    Gather-run_time-6x2_1x3
    GatherElements-0-run_time-1x3x4_1x2x3
    GatherND-run_time-3x4x5_3x4x1
    Compress-0-run_time-3x4x5_3
    ScatterElements-0-mul-4x5_2x4_2x4
    ScatterElements-0-add-run_time-4x5_2x4_2x4
    ScatterElements--1-max-4x5_2x4_2x4
    ScatterND-max-3x4x5_3x2_3x5
    ScatterND-add-run_time-3x4x5_2x1_2x4x5
    TensorScatter-2x3x6x4_2x3x2x4_2#1
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(20)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def double(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float64)


INTO = np.array([0, 0, 1])

TIES = [
    # As in PyTorch, all that are equal to the extremum share the cotangent.
    ("max", [double(1, 5, 7), INTO, double(1, 1, 4)], [[1 / 3, 1, 1], [1 / 3, 1 / 3, 0]]),
    ("min", [double(1, 5, 7), INTO, double(2, 1, 5)], [[0.5, 0.5, 1], [0, 0.5, 0.5]]),
    # A product with one zero factor has a derivative there, one with two of them has none.
    ("mul", [double(2, 0, 7), INTO, double(3, 0, 5)], [[0, 5, 1], [0, 6, 0]]),
    ("mul", [double(0, 3, 0), INTO, double(3, 0, 5)], [[0, 5, 1], [0, 0, 3]]),
    ("mul", [double(0, 3, 0), INTO, double(3, 4, 0)], [[12, 0, 1], [0, 0, 3]]),
]


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize(("reduction", "inputs", "expected"), TIES)
def test_ties_and_zeros(
    op: str, reduction: str, inputs: list[np.ndarray], expected: list[list[float]]
) -> None:
    data, indices, updates = inputs
    if op == "ScatterND":
        indices = indices[:, None]
    found = gradients(op, [data, indices, updates], {"reduction": reduction})
    for gradient, numbers in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, numbers, rtol=1e-15)


REPEATED = [
    Case("Gather", [normal(4, 256), np.full((8, 512), 1)]),
    Case("Gather", [normal(4, 256), np.full((1, 4096), 1)], {"axis": 1}),
    Case("GatherND", [normal(4, 256), np.full((4096, 1), 1)]),
    Case("GatherElements", [normal(4, 256), np.full((4096, 256), 1)]),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_terms_that_meet_are_not_lost(case: Case) -> None:
    # onnxruntime's ScatterND adds in several threads without a lock.
    assert "ScatterND" not in {node.op_type for node in lowered(case, symbolic=False).graph.node}
    x, indices = np.ones((4, 256)), case.inputs[1]
    (found,) = gradients(case.op, [x, indices], case.attributes)
    expected = np.zeros_like(x)
    if case.attributes:
        expected[:, 1] = 4096
    else:
        expected[1] = 4096
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("op", "indices"),
    [
        ("Gather", np.full(3000, 1)),
        ("GatherND", np.full((3000, 1), 1)),
        ("GatherElements", np.full((3000, 2), 1)),
    ],
)
def test_float16_is_added_up_in_float32(op: str, indices: np.ndarray) -> None:
    # In float16, adding 1 to 2048 gives 2048.
    (found,) = gradients(op, [np.ones((4, 2), np.float16), indices])
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, [[0, 0], [3000, 3000], [0, 0], [0, 0]])


def test_embedding_gradient_takes_the_rows_as_they_are() -> None:
    case = Case("Gather", [normal(10, 4), np.array([[1, 2], [1, 3]])])
    nodes = lowered(case, symbolic=False).graph.node
    assert [node.op_type for node in nodes].count("ScatterElements") == 1
    assert "Gather" not in [node.op_type for node in nodes if "/under_test/" in node.name]


def test_gradient_of_one_constant_index_is_padding() -> None:
    case = Case("Gather", [normal(2, 3, 4), np.array(0)], {"axis": 1}, constant=[1])
    emitted = {n.op_type for n in lowered(case, symbolic=False).graph.node if "/" in n.name}
    assert "Pad" in emitted
    assert "ScatterElements" not in emitted


UNIQUE = [
    Case("Unique", [distinct(3, 4)], flags, orders=2, epsilon=1e-4)
    for flags in ({}, {"sorted": 0}, {"axis": 0}, {"axis": 1, "sorted": 0})
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", UNIQUE, ids=lambda case: str(case.attributes))
def test_unique_elements(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def test_first_of_equal_elements_gets_the_cotangent() -> None:
    # Σ i · unique(x)[i], of (−1, 2, 5)
    nodes = [
        helper.make_node("Unique", ["x"], ["u"]),
        helper.make_node("Mul", ["u", "w"], ["p"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="p"),
    ]
    lowered = ortops.lower(model(nodes, [value("x", [5]), value("w", [3])], ["d"]))
    feeds = {"x": np.array([5, 2, 5, -1, 2], np.float32), "w": np.array([1, 2, 3], np.float32)}
    np.testing.assert_array_equal(run(lowered, feeds)[0], [3, 2, 0, 1, 0])
