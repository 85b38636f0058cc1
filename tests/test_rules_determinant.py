"""Det against differences, and at singular matrices against the cofactors."""

from __future__ import annotations

import numpy as np
import pytest
from domain_models import model, node, value
from dot_test import Case, check, normal
from onnx import helper
from running import run

import ortops

CASES = [
    Case("Det", [normal(1, 1)], float32=True, orders=2, epsilon=1e-4),
    Case("Det", [normal(2, 2)], float32=True, orders=2, epsilon=1e-4),
    Case("Det", [normal(3, 3)], float32=True, orders=2, epsilon=1e-4),
    Case("Det", [normal(2, 3, 3)], float32=True, orders=2, epsilon=1e-4),
    Case("Det", [normal(2, 1, 4, 4)], float32=True, epsilon=1e-4),
    Case("Det", [normal(7, 7)], float32=True, epsilon=1e-4),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("shape", [[3, 3], ["n", "n"]], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("matrix", "cofactors"),
    [
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[-3, 6, -3], [6, -12, 6], [-3, 6, -3]]),
        ([[1, 2, 3], [2, 4, 6], [3, 6, 9]], [[0, 0, 0], [0, 0, 0], [0, 0, 0]]),
        ([[0, 0, 0], [0, 2, 1], [0, 1, 3]], [[5, 0, 0], [0, 0, 0], [0, 0, 0]]),
    ],
    ids=["rank-2", "rank-1", "zero-row"],
)
def test_singular_matrices(matrix, cofactors, shape) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    lowered = ortops.lower(model(nodes, [value("x", shape)], ["d"]))
    (found,) = run(lowered, {"x": np.array(matrix, np.float32)})
    np.testing.assert_allclose(found, cofactors, atol=1e-5)


def test_elimination_of_big_matrices() -> None:
    x = normal(2, 17, 17).astype(np.float32) / 3
    v = normal(2, 17, 17, seed=1).astype(np.float32)
    nodes = [
        helper.make_node("Det", ["x"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
        helper.make_node("Mul", ["d", "v"], ["dv"]),
        node("Gradient", ["x"], ["h"], xs=["x"], y="dv"),
    ]
    shape = [2, 17, 17]
    lowered = ortops.lower(model(nodes, [value("x", shape), value("v", shape)], ["d", "h"]))
    d, h = run(lowered, {"x": x, "v": v})

    def gradient(x: np.ndarray) -> np.ndarray:
        return np.linalg.det(x)[:, None, None] * np.swapaxes(np.linalg.inv(x), 1, 2)

    wide, step = x.astype(np.float64), 1e-5 * v.astype(np.float64)
    exact = gradient(wide)
    np.testing.assert_allclose(d, exact, rtol=1e-3, atol=1e-4 * np.abs(exact).max())
    exact = (gradient(wide + step) - gradient(wide - step)) / 2e-5
    np.testing.assert_allclose(h, exact, rtol=1e-3, atol=1e-3 * np.abs(exact).max())
