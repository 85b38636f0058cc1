"""Rules of reductions, cumulative operators and TopK against differences, and at ties and zeros."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from checked import by_case, quick
from dot_test import Case, away_from, check, distinct, normal, uniform
from test_rules_elementwise import gradients, single

from ortops.errors import ModelError

X = normal(2, 3, 4)
ZEROS = X * (distinct(2, 3, 4, seed=5) > -0.6)
POSITIVE = uniform(0.5, 2, 2, 3, 4)

INPUTS = {
    "ReduceSum": X,
    "ReduceMean": X,
    "ReduceMax": distinct(2, 3, 4),
    "ReduceMin": distinct(2, 3, 4),
    "ReduceProd": away_from([0], 2, 3, 4, gap=0.2),
    "ReduceL1": away_from([0], 2, 3, 4),
    "ReduceL2": X,
    "ReduceSumSquare": X,
    "ReduceLogSum": POSITIVE,
    "ReduceLogSumExp": 2 * X,
}


def axes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def reductions() -> Iterator[Case]:
    """Yields every way in which axes can be given, for every reduction."""
    for name, x in INPUTS.items():
        kinked = name in ("ReduceMax", "ReduceMin", "ReduceL1")
        orders = 2 if kinked else 3
        for keepdims in (0, 1):
            attributes = {"keepdims": keepdims}
            for label, given in {
                "last": axes(-1),
                "two": axes(0, 2),
                "swapped": axes(-1, 0),
            }.items():
                yield Case(
                    name,
                    [x, given],
                    attributes,
                    constant=[1],
                    orders=orders if label == "two" else 1,
                    name=f"{label}-keep{keepdims}",
                )
            for label, given in {"one": axes(1), "negative": axes(-3, 1), "none": axes()}.items():
                yield Case(
                    name, [x, given], attributes, orders=2, name=f"run_time-{label}-keep{keepdims}"
                )
            yield Case(name, [x], attributes, orders=2, name=f"absent-keep{keepdims}")
            yield Case(name, [x, axes()], attributes, constant=[1], name=f"empty-keep{keepdims}")
            noop = {**attributes, "noop_with_empty_axes": 1}
            yield Case(name, [x], noop, name=f"noop-absent-keep{keepdims}")
            yield Case(name, [x, axes()], noop, constant=[1], name=f"noop-empty-keep{keepdims}")
            yield Case(name, [x, axes()], noop, name=f"noop-run_time-keep{keepdims}")
            yield Case(name, [x, axes(2)], noop, name=f"noop-run_time-one-keep{keepdims}")
            yield Case(name, [np.asarray(x[0, 0, 0])], attributes, name=f"scalar-keep{keepdims}")
        yield Case(name, [x[:, :0], axes(0)], constant=[1], name="no_elements")


CASES = [
    *reductions(),
    Case("ReduceProd", [ZEROS, axes(1)], constant=[1], orders=3, name="zeros"),
    Case("ReduceProd", [ZEROS, axes(0, 2)], constant=[1], orders=3, name="zeros"),
    Case("ReduceProd", [ZEROS[0]], orders=3, name="zeros"),
    Case("ReduceProd", [ZEROS, axes(-1)], orders=3, name="zeros-run_time"),
    Case("CumProd", [ZEROS, np.array(1)], constant=[1], orders=2, opset=26, name="zeros"),
    *(
        Case("CumSum", [X, np.array(axis)], attributes, constant=constant, orders=2)
        for axis, constant in ((1, [1]), (-1, []))
        for attributes in (
            {},
            {"exclusive": 1},
            {"reverse": 1},
            {"exclusive": 1, "reverse": 1},
        )
    ),
    *(
        Case("CumProd", [X, np.array(axis)], attributes, constant=constant, orders=2, opset=26)
        for axis, constant in ((1, [1]), (-1, []))
        for attributes in (
            {},
            {"exclusive": 1},
            {"reverse": 1},
            {"exclusive": 1, "reverse": 1},
        )
    ),
    *(
        Case("TopK", [distinct(3, 4), axes(2)], attributes, constant=constant, outputs=2, orders=2)
        for attributes in ({}, {"axis": 0}, {"largest": 0}, {"axis": -2, "sorted": 0})
        for constant in ([1], [])
    ),
]
CASES = quick(
    CASES,
    """
    ReduceSum-two-keep0-2x3x4_2
    ReduceMean-two-keep0-2x3x4_2
    ReduceMean-run_time-one-keep0-2x3x4_1
    ReduceMax-two-keep0-2x3x4_2
    ReduceMin-two-keep0-2x3x4_2
    ReduceProd-two-keep0-2x3x4_2
    ReduceProd-zeros-run_time-2x3x4_1
    ReduceL1-two-keep0-2x3x4_2
    ReduceL2-two-keep0-2x3x4_2
    ReduceSumSquare-two-keep0-2x3x4_2
    ReduceLogSum-two-keep0-2x3x4_2
    ReduceLogSumExp-two-keep0-2x3x4_2
    CumProd-2x3x4_#3
    CumSum-2x3x4_#3
    TopK-3x4_1#6
    """,
)


@pytest.mark.nightly(235)
@pytest.mark.quick(7)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


TIES = [
    ("ReduceMax", [single(1, 3, 3, 3)], {}, [0, 1 / 3, 1 / 3, 1 / 3]),
    ("ReduceMin", [single(2, 1, 1, 3)], {}, [0, 0.5, 0.5, 0]),
    ("ReduceMax", [single(-np.inf, -np.inf)], {}, [0.5, 0.5]),
    ("ReduceMax", [single(1, 1)], {"noop_with_empty_axes": 1}, [1, 1]),
    ("ReduceL1", [single(-2, 0, 3)], {}, [-1, 0, 1]),
    ("ReduceL2", [single(0, 0)], {}, [0, 0]),
    ("ReduceL2", [single(3, 4)], {}, [0.6, 0.8]),
    ("ReduceProd", [single(0, 2, 3)], {}, [6, 0, 0]),
    ("ReduceProd", [single(0, 0, 3)], {}, [0, 0, 0]),
    ("ReduceProd", [single(5)], {}, [1]),
    ("ReduceLogSumExp", [single(-np.inf, 1)], {}, [0, 1]),
    ("ReduceLogSumExp", [single(-1e30, 200, 200)], {}, [0, 0.5, 0.5]),
    ("ReduceMean", [single(1, 2, 3, 4)], {}, [0.25] * 4),
]


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "expected"),
    TIES,
    ids=[f"{row[0]}-{index}" for index, row in enumerate(TIES)],
)
def test_ties_and_zeros(
    op: str, inputs: Sequence[np.ndarray], attributes: dict[str, Any], expected: Sequence[float]
) -> None:
    (found,) = gradients(op, inputs, attributes)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.quick(20)
@pytest.mark.parametrize("op", INPUTS)
@pytest.mark.parametrize("given", [axes(1), axes(0, -1), axes(), None], ids=str)
def test_unknown_ranks(op: str, given: np.ndarray | None) -> None:
    inputs = [INPUTS[op].astype(np.float32), *([] if given is None else [given])]
    for keepdims in (0, 1):
        attributes = {"keepdims": keepdims}
        if op == "ReduceProd":
            with pytest.raises(ModelError, match="its rank is unknown; add a value_info"):
                gradients(op, inputs, attributes, ranks=False)
            continue
        (found,) = gradients(op, inputs, attributes, ranks=False)
        (expected,) = gradients(op, inputs, attributes)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
