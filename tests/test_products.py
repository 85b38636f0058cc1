"""Products for onnxruntime's kernels: the same numbers from fewer nodes; the order of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from running import run

from ortops import Tape, Tensor, op
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.order import put_last_results_first
from ortops.graph.passes.products import ROW_SUMS, SCALES, TRANSPOSES
from tests.spies import finish

Shape = Sequence[int | str]


def build(function: Callable[..., Any], inputs: Mapping[str, Shape], dtype: Any) -> ir.Model:
    with Tape(name="products") as tape:
        results = function(*(tape.input(name, dtype, shape) for name, shape in inputs.items()))
        for number, y in enumerate(results if isinstance(results, tuple) else (results,)):
            tape.output(op.Identity(y), f"y{number}")
    return ir.from_proto(tape.model())


def improved(
    function: Callable[..., Any],
    inputs: Mapping[str, Shape],
    dtype: Any = np.float32,
    sizes: Mapping[str, int] | None = None,
) -> Counter[str]:
    """Checks that the improved graph computes the same; returns how often it has each operator."""
    rng = np.random.default_rng(0)
    known = {"batch": 3, "sequence": 5, **(sizes or {})}
    feeds = {
        name: rng.standard_normal([known.get(str(dim), dim) for dim in shape]).astype(dtype)
        for name, shape in inputs.items()
    }
    model = build(function, inputs, dtype)
    before = run(to_proto(model), feeds, optimize=False)
    finish(model, ROW_SUMS, SCALES, TRANSPOSES)
    after = to_proto(model)
    for one, other in zip(before, run(after, feeds, optimize=False), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    left = Counter(node.op_type for node in after.graph.node)
    return Counter({key: n for key, n in left.items() if key not in ("Constant", "Identity")})


def swap(x: Tensor) -> Any:
    return op.Transpose(x, perm=[*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


STACK = {"a": (2, 3, 4), "b": (2, 4, 5)}


@pytest.mark.parametrize(
    ("function", "inputs", "left"),
    [
        pytest.param(op.MatMul, STACK, {"MatMul": 1}, id="nothing to absorb"),
        pytest.param(
            lambda a, b: swap(a) @ b,
            {"a": (2, 4, 3), "b": (2, 4, 5)},
            {"FusedMatMul": 1},
            id="left transposed",
        ),
        pytest.param(
            lambda a, b: a @ swap(b),
            {"a": ("batch", 3, 4), "b": ("batch", "sequence", 4)},
            {"FusedMatMul": 1},
            id="right transposed",
        ),
        pytest.param(
            lambda a, b: swap(a) @ swap(b),
            {"a": (4, 3), "b": (5, 4)},
            {"FusedMatMul": 1},
            id="both transposed",
        ),
        pytest.param(
            lambda a, b: swap(a @ b), STACK, {"FusedMatMul": 1}, id="the result transposed"
        ),
        pytest.param(
            lambda a, b: swap(swap(a) @ b),
            {"a": (2, 4, 3), "b": (2, 4, 5)},
            {"FusedMatMul": 1},
            id="operand and result transposed",
        ),
        pytest.param(
            lambda a, b: op.Transpose(a @ b, perm=[0, 3, 1, 2]),
            {"a": (2, 3, 4, 5), "b": (2, 3, 5, 6)},
            {"FusedMatMul": 1, "Transpose": 1},
            id="the result transposed and moved",
        ),
        pytest.param(
            lambda a, b: op.Transpose(a @ b, perm=[0, 2, 1, 3]),
            {"a": (2, 3, 4, 5), "b": (2, 3, 5, 6)},
            {"MatMul": 1, "Transpose": 1},
            id="the result moved by rows",
        ),
        pytest.param(
            lambda a, b: (swap(a @ b), a @ b),
            STACK,
            {"FusedMatMul": 1, "MatMul": 1},
            id="another product that is not transposed",
        ),
        pytest.param(
            lambda a, b: a @ swap(swap(b)), STACK, {"MatMul": 1}, id="transposed and back"
        ),
        pytest.param(
            lambda q, k: (
                op.Transpose(q, perm=[0, 2, 1, 3]) @ (kt := op.Transpose(k, perm=[0, 2, 3, 1])),
                op.Transpose(q, perm=[0, 2, 3, 1]) @ swap(kt),
            ),
            {"q": (2, 5, 3, 4), "k": (2, 5, 3, 4)},
            {"FusedMatMul": 2, "Transpose": 2},
            id="heads: one transpose for each operand",
        ),
        pytest.param(
            lambda a, b: op.Transpose(a, perm=[2, 1, 0]) @ b,
            {"a": (4, 3, 2), "b": (2, 4, 5)},
            {"MatMul": 1, "Transpose": 1},
            id="neither of the last axes stays last",
        ),
        pytest.param(
            lambda a, b: swap(a) @ b,
            {"a": (4, 3), "b": (2, 4, 5)},
            {"MatMul": 1, "Transpose": 1},
            id="one matrix on the left of a stack",
        ),
        pytest.param(
            lambda a, b: a @ swap(b),
            {"a": ("batch", 3, 4), "b": (5, 4)},
            {"FusedMatMul": 1},
            id="one matrix for a stack, transposed",
        ),
        pytest.param(
            lambda a, b: swap(a) @ b,
            {"a": (2, 4, 3), "b": (4, 5)},
            {"MatMul": 1, "Transpose": 1},
            id="one matrix for a transposed stack",
        ),
        pytest.param(
            lambda a, b: swap(a @ b),
            {"a": (2, 3, 4), "b": (4, 5)},
            {"MatMul": 1, "Transpose": 1},
            id="one matrix for a stack, the result transposed",
        ),
        pytest.param(
            lambda a, b: op.Gemm(swap(a), swap(b), alpha=0.5, transB=1),
            {"a": (4, 3), "b": (4, 5)},
            {"Gemm": 1},
            id="operands of Gemm transposed",
        ),
        pytest.param(
            lambda a, b: swap(op.Gemm(a, b, alpha=0.5, transA=1)),
            {"a": (4, 3), "b": (4, 5)},
            {"Gemm": 1},
            id="the result of Gemm transposed",
        ),
        pytest.param(
            lambda a, b, c: swap(op.Gemm(a, swap(b), c, beta=2.0)),
            {"a": (3, 4), "b": (5, 4), "c": (5,)},
            {"Gemm": 1, "Transpose": 1},
            id="the result of Gemm with a bias transposed",
        ),
        pytest.param(
            lambda a, b: op.Transpose(a) @ b,
            {"a": (4, 3), "b": (4, 5)},
            {"FusedMatMul": 1},
            id="a Transpose without perm",
        ),
    ],
)
def test_transposes(
    function: Callable[..., Any], inputs: Mapping[str, Shape], left: Mapping[str, int]
) -> None:
    assert improved(function, inputs) == left


def test_other_types_stay() -> None:
    assert improved(lambda a, b: a @ swap(b), {"a": (3, 4), "b": (5, 4)}, np.float64) == {
        "MatMul": 1,
        "Transpose": 1,
    }
    assert improved(lambda x: op.ReduceSum(x, [0], keepdims=0), {"x": (3, 4)}, np.float64) == {
        "ReduceSum": 1
    }


def test_a_transposed_result_that_is_put_out_stays() -> None:
    model = build(lambda a, b: a @ b, STACK, np.float32)
    graph = model.graph
    product = next(node for node in graph if node.op_type == "MatMul")
    graph.outputs.append(product.outputs[0])
    tape = Tape(graph)
    graph.outputs.append(op.Transpose(tape.tensor(product.outputs[0]), perm=[0, 2, 1]).value)
    finish(model, ROW_SUMS, SCALES, TRANSPOSES)
    assert [node.op_type for node in graph] == ["MatMul", "Identity", "Transpose"]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        pytest.param(lambda a, b: (a * 0.5) @ b, {"FusedMatMul": 1}, id="before"),
        pytest.param(lambda a, b: (a @ b) * -3.0, {"FusedMatMul": 1}, id="behind"),
        pytest.param(lambda a, b: 0.5 * ((a * 0.5) @ b) * 3.0, {"FusedMatMul": 1}, id="both"),
        pytest.param(
            lambda a, b: ((scaled := a * 0.5) @ b, (scaled * 2.0) @ b),
            {"FusedMatMul": 1, "MatMul": 1, "Mul": 1},
            id="read by a product and something else",
        ),
        pytest.param(
            lambda a, b: ((scaled := a * 0.5) @ b, scaled @ (b * 3.0)),
            {"FusedMatMul": 2},
            id="read by two products",
        ),
        pytest.param(
            lambda a, b: (scaled := op.Reshape(a * 0.5, [2, 3, 4])) @ swap(scaled),
            {"FusedMatMul": 1, "Reshape": 1},
            id="both operands of one product",
        ),
        pytest.param(
            lambda a, b: ((scaled := a * 0.5) @ b, op.Shape(scaled).astype(np.float32)),
            {"FusedMatMul": 1, "Shape": 1, "Cast": 1},
            id="the shape is read too",
        ),
        pytest.param(
            lambda a, b: op.Unsqueeze((a @ b), [0]) * 0.5,
            {"FusedMatMul": 1, "Unsqueeze": 1},
            id="behind a change of shape",
        ),
        pytest.param(
            lambda a, b: ((y := a @ b) * 0.5, op.Exp(y)),
            {"MatMul": 1, "Mul": 1, "Exp": 1},
            id="a product that others read",
        ),
        pytest.param(
            lambda a, b: (a @ b) * np.float32([[[[0.5]]]]),
            {"MatMul": 1, "Mul": 1},
            id="a number that adds an axis",
        ),
        pytest.param(
            lambda a, b: (a @ b) * b[0, 0, 0], {"MatMul", "Mul", "Slice", "Squeeze"}, id="computed"
        ),
        pytest.param(lambda a, b: op.Exp(a * 0.5) @ b, {"MatMul", "Mul", "Exp"}, id="no product"),
    ],
)
def test_scales(function: Callable[..., Any], left: Mapping[str, int] | set[str]) -> None:
    found = improved(function, STACK)
    assert found == left if isinstance(left, dict) else set(found) == left


@pytest.mark.parametrize(
    ("function", "shape", "left"),
    [
        pytest.param(
            lambda x: op.ReduceSum(x, [0], keepdims=0), (3, 4), {"MatMul": 1}, id="matrix"
        ),
        pytest.param(
            lambda x: op.ReduceSum(x, [1, 0], keepdims=0),
            (2, 3, 4),
            {"MatMul": 1, "Reshape": 1},
            id="stack",
        ),
        pytest.param(
            lambda x: (op.ReduceSum(x, [0], keepdims=0), op.ReduceSum(x * x, [-2], keepdims=0)),
            ("batch", 4),
            {"MatMul": 2, "Mul": 1, "Shape": 1, "ConstantOfShape": 1},
            id="ones for two",
        ),
        pytest.param(
            lambda x: op.ReduceSum(op.Exp(x), [0, 1], keepdims=0),
            ("batch", "sequence", 4),
            {"MatMul": 1, "Exp": 1, "Reshape": 1, "Shape": 2, "Mul": 1, "ConstantOfShape": 1},
            id="two unknown sizes",
        ),
        pytest.param(
            lambda x: op.ReduceSum(op.Reshape(x, [-1, 4]), [0], keepdims=0),
            ("batch", "sequence", 4),
            {"MatMul": 1, "Reshape": 1, "Shape": 2, "Mul": 1, "ConstantOfShape": 1},
            id="rows of a stack",
        ),
        pytest.param(
            lambda x: op.ReduceSum(
                op.Gemm(op.Flatten(x, axis=-1), np.ones((4, 2), np.float32)), [0], keepdims=0
            ),
            ("batch", 5, 4),
            {"Gemm", "Flatten", "MatMul", "Shape", "Mul", "ConstantOfShape"},
            id="rows of a product",
        ),
        pytest.param(
            lambda x: op.ReduceSum(op.Reshape(x, [-1, 2]), [0], keepdims=0),
            ("batch", 4),
            {"MatMul": 1, "Reshape": 1, "Shape": 1, "ConstantOfShape": 1},
            id="rows that are cut",
        ),
        pytest.param(lambda x: op.ReduceSum(x, [0]), (3, 4), {"ReduceSum": 1}, id="axes kept"),
        pytest.param(
            lambda x: op.ReduceSum(x, [0], keepdims=0), (2, 3, 4), {"ReduceSum": 1}, id="some axes"
        ),
        pytest.param(lambda x: op.ReduceSum(x, keepdims=0), (3, 4), {"ReduceSum": 1}, id="all"),
        pytest.param(
            lambda x: op.ReduceSum(x, [0], keepdims=0), (3, "n"), {"ReduceSum": 1}, id="columns"
        ),
    ],
)
def test_sums_of_rows(
    function: Callable[..., Any], shape: Shape, left: Mapping[str, int] | set[str]
) -> None:
    found = improved(function, {"x": shape}, sizes={"n": 2})
    assert found == left if isinstance(left, dict) else set(found) == left


def test_sum_of_no_rows() -> None:
    improved(lambda x: op.ReduceSum(x, [0], keepdims=0), {"x": ("batch", 4)}, sizes={"batch": 0})


def names(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in graph]


def test_order() -> None:
    with Tape(name="order") as tape:
        x = tape.input("x", np.float32, [2])
        for function in (op.Exp, op.Sin, op.Cos):
            tape.output(function(-x))
    put_last_results_first(tape.graph)
    assert names(tape.graph) == ["Neg", "Neg", "Neg", "Cos", "Sin", "Exp"]
    tape.model()


def test_order_keeps_what_graphs_inside_read() -> None:
    with Tape(name="order") as tape:
        x = tape.input("x", np.float32, [2])
        read, put_out = op.Exp(x), op.Sin(x)
        branches = {}
        for branch in ("then_branch", "else_branch"):
            inner = ir.Graph([], [], nodes=[], opset_imports={"": 21}, name=branch)
            value = op.Abs(Tape(inner).tensor(read.value)).value
            inner.outputs.append(value)
            branches[branch] = inner
        condition = tape.input("condition", np.bool_, [])
        tape.output(op.If(condition, **branches), "chosen")
        tape.output(put_out, "other")
    put_last_results_first(tape.graph)
    assert names(tape.graph) == ["Exp", "If", "Sin"]
    tape.model()
