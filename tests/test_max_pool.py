"""MaxPool's places: those that the operator tells, found without the kernel that tells them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from running import run

from ortops import Tape, op
from ortops.graph import convert
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.max_pool import MAX_POOL
from tests.spies import finish

Array = np.ndarray[Any, Any]


def pooled(shape: list[int | str | None], **attributes: Any) -> onnx.ModelProto:
    """Returns a model of the maxima and their places, as the pass leaves it."""
    with Tape(name="pooled") as tape:
        x = tape.input("x", np.float32, shape)
        y, places = op.MaxPool(x, outputs=2, **attributes)
        tape.output(op.Neg(y), "negated")
        tape.output(places + 0, "places")
    return to_proto(finish(convert.to_ir(tape.model()), MAX_POOL))


def tells_places(model: onnx.ModelProto) -> bool:
    """Whether a MaxPool node has its second output."""
    return any(len(node.output) > 1 for node in model.graph.node if node.op_type == "MaxPool")


def expected(x: Array, rows: int, columns: int) -> tuple[Array, Array]:
    """Returns the maximum of each window and where the first of them is, in row-major order."""
    n, c, height, width = x.shape
    y = np.zeros((n, c, height // rows, width // columns), np.float32)
    places = np.zeros(y.shape, np.int64)
    for i, j, k, m in np.ndindex(y.shape):
        top, left = k * rows, m * columns
        window = x[i, j, top : top + rows, left : left + columns]
        row, column = divmod(int(window.argmax()), columns)
        y[i, j, k, m] = window[row, column]
        places[i, j, k, m] = ((i * c + j) * height + top + row) * width + left + column
    return y, places


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((3, 2, 4, 6), (2, 2)),
        ((2, 1, 6, 6), (3, 2)),
        ((1, 3, 3, 8), (1, 4)),
        ((2, 2, 8, 3), (4, 1)),
        ((2, 2, 4, 300), (2, 2)),  # offsets beyond 8 bits
        ((0, 2, 4, 4), (2, 2)),
    ],
)
@pytest.mark.parametrize("batch", ["known", "any"])
def test_places(sizes: tuple[int, ...], kernel: tuple[int, int], batch: str) -> None:
    first = sizes[0] if batch == "known" else "batch"
    model = pooled([first, *sizes[1:]], kernel_shape=kernel, strides=kernel)
    assert not tells_places(model)
    # Few different numbers, so that many windows have several maxima.
    x = np.random.default_rng(0).integers(-2, 3, sizes).astype(np.float32)
    y, places = expected(x, *kernel)
    negated, found = run(model, {"x": x})
    np.testing.assert_array_equal(negated, -y)
    np.testing.assert_array_equal(found, places)


def test_infinities() -> None:
    model = pooled([1, 1, 2, 4], kernel_shape=[2, 2], strides=[2, 2])
    inf = np.inf
    x = np.array([[[[-inf, 1, inf, inf], [-inf, -inf, 2, -inf]]]], np.float32)
    negated, places = run(model, {"x": x})
    np.testing.assert_array_equal(negated, [[[[-1, -inf]]]])
    np.testing.assert_array_equal(places, [[[[1, 2]]]])


@pytest.mark.parametrize(
    ("shape", "attributes"),
    [
        ([2, 3, 6, 6], {"kernel_shape": [3, 3], "strides": [2, 2]}),
        ([2, 3, 6, 6], {"kernel_shape": [2, 2]}),
        ([2, 3, 7, 6], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ([2, 3, 6, 6], {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ([2, 3, 8, 8], {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [2, 2]}),
        ([2, 3, 6, 6], {"kernel_shape": [2, 2], "strides": [2, 2], "storage_order": 1}),
        ([2, 3, 10, 10], {"kernel_shape": [5, 5], "strides": [5, 5]}),
        ([2, 3, "height", 6], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ([2, "channels", 6, 6], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ([2, 3, 6], {"kernel_shape": [2], "strides": [2]}),
    ],
)
def test_left_as_it_is(shape: list[int | str | None], attributes: dict[str, Any]) -> None:
    assert tells_places(pooled(shape, **attributes))


def test_maxima_alone_stay() -> None:
    with Tape(name="alone") as tape:
        x = tape.input("x", np.float32, [2, 3, 6, 6])
        tape.output(op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2]), "y")
    model = to_proto(finish(convert.to_ir(tape.model()), MAX_POOL))
    assert [node.op_type for node in model.graph.node] == ["MaxPool"]


def test_quantized_graphs_keep_the_operator() -> None:
    """onnxruntime's optimizer moves what quantizes behind a Slice, with a wrong type."""
    with Tape(name="quantized") as tape:
        x = tape.input("x", np.float32, ["batch", 2, 4, 4])
        scale, zero = np.float32(0.1), np.uint8(128)
        small = op.DequantizeLinear(op.QuantizeLinear(x, scale, zero), scale, zero)
        y, places = op.MaxPool(small, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
        tape.output(op.Neg(y), "negated")
        tape.output(places + 0, "places")
    assert tells_places(to_proto(finish(convert.to_ir(tape.model()), MAX_POOL)))
