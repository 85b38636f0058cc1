"""Batches of no samples: gradients have no elements, or are zeros, where onnxruntime runs the rest.

Data come in batches, and a filter or a detector may leave nothing of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from domain_models import model, node, value
from onnx import helper
from running import run

import ortops

F = np.float32


def some(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(F)


def none(*shape: int) -> np.ndarray:
    return np.zeros((0, *shape), F)


IMAGES = none(4, 8, 8)
ROWS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Conv", [IMAGES, some(6, 4, 3, 3), some(6)], {}),
    ("Conv", [IMAGES, some(8, 2, 3, 3), some(8)], {"group": 2, "strides": [2, 2]}),
    ("Conv", [IMAGES, some(4, 1, 3, 3), some(4)], {"group": 4}),
    ("ConvTranspose", [IMAGES, some(4, 3, 3, 3), some(3)], {"strides": [2, 2]}),
    ("MaxPool", [IMAGES], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ("MaxPool", [IMAGES], {"kernel_shape": [3, 3]}),
    ("AveragePool", [IMAGES], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ("LpPool", [IMAGES], {"kernel_shape": [2, 2]}),
    ("GlobalAveragePool", [IMAGES], {}),
    ("GlobalMaxPool", [IMAGES], {}),
    ("BatchNormalization", [IMAGES, some(4), some(4), some(4), some(4) ** 2], {}),
    ("InstanceNormalization", [IMAGES, some(4), some(4)], {}),
    ("LayerNormalization", [none(5, 6), some(6), some(6)], {}),
    ("LpNormalization", [none(5, 6)], {}),
    ("LRN", [IMAGES], {"size": 3}),
    ("MatMul", [none(5, 6), some(6, 4)], {}),
    ("MatMul", [none(5, 6), none(6, 4)], {}),
    ("MatMul", [none(6), some(6, 4)], {}),
    ("Gemm", [none(6), some(6, 4), some(4)], {}),
    ("Einsum", [none(3), some(3, 4)], {"equation": "ij,jk->ik"}),
    ("Softmax", [none(6)], {}),
    ("LogSoftmax", [none(6)], {}),
    ("Gelu", [none(6)], {}),
    ("PRelu", [none(6), some(6)], {}),
    ("Clip", [none(6), F(-1), F(1)], {}),
    ("Mul", [none(6), some(1, 6)], {}),
    ("Div", [none(6), some(6)], {}),
    ("Pow", [none(6), some(6)], {}),
    ("Where", [np.zeros((0, 6), bool), none(6), some(6)], {}),
    ("ReduceSum", [none(6)], {}),
    ("ReduceMean", [none(6), np.array([1])], {}),
    ("ReduceMax", [none(6), np.array([1])], {}),
    ("ReduceProd", [none(6), np.array([1])], {}),
    ("ReduceLogSumExp", [none(6), np.array([1])], {}),
    ("CumSum", [none(6), np.array(1)], {}),
    ("TopK", [none(6), np.array([2])], {}),
    ("Reshape", [none(6), np.array([-1, 2, 3])], {}),
    ("Concat", [none(6), some(2, 6)], {"axis": 0}),
    ("Split", [none(6)], {"axis": 1, "num_outputs": 2}),
    ("Slice", [none(6), np.array([1]), np.array([3]), np.array([1])], {}),
    ("Gather", [some(5, 6), np.zeros((0, 2), np.int64)], {}),
    ("Gather", [none(6), np.array([1, 2])], {"axis": 1}),
    ("GatherElements", [none(6), np.zeros((0, 3), np.int64)], {"axis": 1}),
    ("Pad", [none(6), np.array([0, 1, 0, 1])], {}),
    ("Expand", [none(1), np.array([0, 4])], {}),
    ("Tile", [none(2), np.array([1, 3])], {}),
    ("Resize", [IMAGES, None, np.array([1, 1, 2, 2], F)], {"mode": "nearest"}),
    ("DepthToSpace", [IMAGES], {"blocksize": 2}),
    ("GridSample", [IMAGES, none(3, 3, 2)], {}),
]


@pytest.mark.nightly
@pytest.mark.quick(44)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("op", "arrays", "attributes"), ROWS, ids=[f"{n}-{row[0]}" for n, row in enumerate(ROWS)]
)
def test_no_samples(op, arrays, attributes, symbolic) -> None:
    names = ["" if a is None else f"x{i}" for i, a in enumerate(arrays)]
    given = {n: a for n, a in zip(names, arrays, strict=True) if a is not None}
    fed = {n: a for n, a in given.items() if 0 in a.shape or (a.dtype == F and op != "Resize")}
    inputs = [
        value(
            n,
            [f"{n}_samples" if symbolic and size == 0 else size for size in a.shape],
            helper.np_dtype_to_tensor_dtype(a.dtype),
        )
        for n, a in fed.items()
    ]
    outputs = ["y", "other"] if op in ("Split", "TopK") else ["y"]
    xs = [n for n, a in fed.items() if a.dtype == F]
    nodes = [
        helper.make_node(op, names, outputs, **attributes),
        node("Gradient", xs, [f"d{x}" for x in xs], xs=xs, y="y"),
    ]
    parts = {n: a for n, a in given.items() if n not in fed}
    whole = model(nodes, inputs, ["y", *(f"d{x}" for x in xs)], initializers=parts)
    y, *found = run(ortops.lower(whole), fed)
    # Concat puts out what the other input has, ReduceSum one zero.
    assert y.size == 0 or op in ("Concat", "ReduceSum")
    for x, gradient in zip(xs, found, strict=True):
        expected = np.ones_like(fed[x]) if op == "Concat" else np.zeros_like(fed[x])
        np.testing.assert_array_equal(gradient, expected)
