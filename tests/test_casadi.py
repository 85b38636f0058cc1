"""CasADi finds and uses the derivatives that ortops writes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import lenet
from ortops import Function, derivatives

RNG = np.random.default_rng(11)

HEADER = '<ir_version: 8, opset_import: ["": 17]>'

MODELS = {
    "vector to scalar": "f (float[3] x) => (float y) { q = Sin (x) p = Mul (q, x) "
    "y = ReduceSum <keepdims = 0> (p) }",
    "matrix to matrix": "f (float[2, 3] x) => (float[2, 3] y) <int64 one = {1}> { q = Mul (x, x) "
    "y = CumSum (q, one) }",
    "column to scalar": "f (float[3, 1] x) => (float[1, 1] y) { t = Transpose <perm = [1, 0]> (x) "
    "q = Mul (x, x) y = MatMul (t, q) }",
    "convolution": "f (float[1, 1, 4, 4] x) => (float[1, 2, 2, 2] y) "
    "<float[2, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 8, 7, 6, 5, 4, 3, 2, 1}> "
    "{ s = Sin (x) y = Conv (s, w) }",
    "pooling": "f (float[1, 1, 4, 4] x) => (float[1, 1, 2, 2] y) { s = Exp (x) "
    "y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (s) }",
    "transposed convolution": "f (float[1, 1, 2, 2] x) => (float[1, 1, 3, 3] y) "
    "<float[1, 1, 2, 2] w = {1, 2, 3, 4}> { s = Sin (x) y = ConvTranspose (s, w) }",
    "Einsum": 'f (float[2, 3] x) => (float[2, 2] y) { y = Einsum <equation = "ij,kj->ik"> (x, x) }',
    "scatter": "f (float[3] x) => (float[4] y) <float[4] zeros = {0, 0, 0, 0}, "
    "int64[3] at = {2, 0, 3}> { s = Mul (x, x) y = ScatterElements <axis = 0> (zeros, at, s) }",
    "loop": "f (float[2] x) => (float[2] y) <int64 three = {3}, bool go = {1}> "
    "{ y = Loop (three, go, x) <body = b (int64 i, bool c, float[2] p) => (bool d, float[2] q) "
    "{ d = Identity (c) q = Mul (p, x) }> }",
}


@pytest.fixture(scope="module")
def ca() -> Any:
    """CasADi, with onnxruntime's library from its wheel."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    library = next(iter(sorted(folder.glob("libonnxruntime.*"))), None)
    if library is None:
        pytest.skip("onnxruntime's wheel has no shared library on this system")
    os.environ["CASADI_ONNXRUNTIME_LIB"] = str(library)
    return pytest.importorskip("casadi")


def columns(array: Any, rank: int) -> Any:
    """Returns an array as CasADi's vector: columns of a matrix one after the other."""
    return np.asarray(array).reshape(-1, order="F" if rank == 2 else "C")


def jacobian(array: Any, x_rank: int) -> Any:
    """Returns a Jacobian [*y, *x] as CasADi's matrix."""
    y_rank = array.ndim - x_rank
    rows = np.stack([columns(array[index], x_rank) for index in np.ndindex(*array.shape[:y_rank])])
    order = columns(
        np.arange(math.prod(array.shape[:y_rank])).reshape(array.shape[:y_rank]), y_rank
    )
    return rows[order]


def matrix(array: Any) -> Any:
    return array if array.ndim == 2 else array.reshape(-1, 1)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.optional("casadi", "casadi")
@pytest.mark.parametrize("name", MODELS)
def test_casadi_differentiates_twice(ca: Any, tmp_path: Path, name: str) -> None:
    model = onnx.parser.parse_model(HEADER + MODELS[name])
    f = Function(model)
    shape = tuple(dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim)
    x = RNG.normal(size=shape).astype(np.float32)
    call = ca.GraphBuilder(str(derivatives.casadi(model, tmp_path)), {}).create("f")
    symbol = ca.MX.sym("x", *matrix(x).shape)
    y = call(symbol)
    assert np.allclose(columns(call(matrix(x)).full(), 2), columns(f(x), f(x).ndim))
    slope = ca.Function("slope", [symbol], [ca.jacobian(y, symbol)])
    assert np.allclose(
        slope(matrix(x)).full(), jacobian(f.jacobian(x), x.ndim), rtol=1e-5, atol=1e-6
    )
    weights = RNG.normal(size=f(x).shape).astype(np.float32)
    scalar = ca.dot(y, matrix(weights))
    curvature = ca.Function("curvature", [symbol], [ca.hessian(scalar, symbol)[0]])
    expected = f.derivative("vjp").jacobian(x, weights, wrt=0)
    assert np.allclose(
        curvature(matrix(x)).full(), jacobian(expected, x.ndim), rtol=1e-4, atol=1e-4
    )
    vector = ca.Function("product", [symbol], [ca.jtimes(y, symbol, matrix(np.ones_like(x)))])
    _, tangent = f.jvp((x,), (np.ones_like(x),))
    assert np.allclose(
        columns(vector(matrix(x)).full(), 2), columns(tangent, tangent.ndim), rtol=1e-5
    )


@pytest.mark.slow
@pytest.mark.optional("casadi", "casadi")
def test_several_inputs_and_outputs(ca: Any, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        HEADER + "f (float[2, 3] a, float[3] b) => (float[2] y, float[2, 3] z) "
        "{ y = MatMul (a, b) s = Sin (a) z = Mul (s, b) }"
    )
    f = Function(model)
    a, b = (RNG.normal(size=shape).astype(np.float32) for shape in ((2, 3), (3,)))
    call = ca.GraphBuilder(str(derivatives.casadi(model, tmp_path)), {}).create("f")
    symbols = ca.MX.sym("a", 2, 3), ca.MX.sym("b", 3)
    outputs = call(*symbols)
    found = f.jacobian(a, b)
    for row, y in zip(found, outputs, strict=True):
        for expected, symbol, x in zip(row, symbols, (a, b), strict=True):
            slope = ca.Function("slope", list(symbols), [ca.jacobian(y, symbol)])
            assert np.allclose(slope(a, b).full(), jacobian(expected, x.ndim), rtol=1e-5, atol=1e-6)
    mixed = ca.jacobian(ca.gradient(ca.sum1(outputs[0] ** 2), symbols[0]), symbols[1])
    h = 1e-2
    columns_of = [
        (energy_slope(a, b + h * unit) - energy_slope(a, b - h * unit)) / (2 * h)
        for unit in np.eye(3)
    ]
    value = ca.Function("mixed", list(symbols), [mixed])(a, b).full()
    assert np.allclose(value, np.stack([columns(c, 2) for c in columns_of], 1), atol=1e-3)


def energy_slope(a: Any, b: Any) -> Any:
    """Returns the gradient of |a b|² with respect to a, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return 2 * np.outer(a @ b, b)


@pytest.mark.slow
@pytest.mark.optional("casadi", "casadi")
def test_a_dynamic_batch_is_bound_in_casadi(ca: Any, tmp_path: Path) -> None:
    model = lenet.lenet()
    builder = ca.GraphBuilder(str(derivatives.casadi(model, tmp_path)), {})
    builder.bind_dim("batch", 2)
    call = builder.create("f")
    x = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    symbol = ca.MX.sym("x", x.size)
    slope = ca.Function("slope", [symbol], [ca.jacobian(call(symbol), symbol)])
    expected = jacobian(Function(model).jacobian(x), 4)
    assert np.allclose(slope(x.ravel()).full(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f (int64[2] x) => (float[2] y) { y = Cast <to = 1> (x) }", "'x' is INT64 with shape"),
        ("f (float[2] x) => (int64[1] y) { y = Shape (x) }", "'y' is INT64 with shape"),
    ],
)
def test_only_floating_point_tensors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ortops.ModelError, match=message):
        derivatives.casadi(onnx.parser.parse_model(HEADER + text), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_have_the_signatures_of_casadi(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(HEADER + MODELS["matrix to matrix"])
    path = derivatives.casadi(model, tmp_path)

    def signature(name: str) -> list[str]:
        graph = onnx.load(path.with_name(name)).graph
        ends: Sequence[Any] = (*graph.input, *graph.output)
        return [onnx.helper.printable_value_info(value) for value in ends]

    assert signature("f.onnx") == ["%x[FLOAT, 2x3]", "%y[FLOAT, 2x3]"]
    assert signature("fwd_adj_f.onnx") == [
        *("%x[FLOAT, 2x3]", "%adj_y[FLOAT, 2xnadj_x3]", "%fwd_x[FLOAT, 2xnfwd_x3]"),
        *("%fwd_adj_y[FLOAT, 2xnfwd_nadj_x3]", "%y[FLOAT, 2x3]", "%adj_x[FLOAT, 2xnadj_x3]"),
        "%fwd_adj_x[FLOAT, 2xnfwd_nadj_x3]",
    ]
    for each in path.parent.iterdir():
        onnxruntime.InferenceSession(each)
        assert not any(node.domain for node in onnx.load(each).graph.node)
