"""Function: a model as a differentiable function, compared with complex-step derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import lenet
from ortops import Function, Tape, op

RNG = np.random.default_rng(7)
W1, B1 = RNG.normal(size=(3, 5)), RNG.normal(size=5)
W2 = RNG.normal(size=(5, 2))


def network(dtype: type = np.float64, scalar: bool = False) -> onnx.ModelProto:
    """Returns tanh(x · w1 + b1) · w2, or its sum of squares."""
    with Tape(name="network") as tape:
        x = tape.input("x", dtype, ["n", 3])
        w1, b1 = tape.initializer("w1", W1.astype(dtype)), tape.initializer("b1", B1.astype(dtype))
        w2 = tape.initializer("w2", W2.astype(dtype))
        y = op.Tanh(x @ w1 + b1) @ w2
        tape.output((y * y).sum() if scalar else y, "y")
    return tape.model()


def numpy_network(x: Any, w1: Any = W1) -> Any:
    return np.tanh(x @ w1 + B1) @ W2


def loss(x: Any, w1: Any = W1) -> Any:
    return (numpy_network(x, w1) ** 2).sum()


def jacobian(f: Callable[[Any], Any], x: Any) -> Any:
    """Returns the Jacobian by complex steps, which have no error of cancellation."""
    columns = []
    for index in np.ndindex(x.shape):
        moved = x.astype(complex)
        moved[index] += 1e-30j
        columns.append(np.imag(f(moved)) / 1e-30)
    stacked = np.stack(columns, axis=-1)
    return stacked.reshape(*stacked.shape[:-1], *x.shape)


def hessian(f: Callable[[Any], Any], x: Any) -> Any:
    """Returns the Hessian by central differences of complex-step gradients."""
    columns = []
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = 1e-6
        columns.append((jacobian(f, x + step) - jacobian(f, x - step)) / 2e-6)
    return np.stack(columns, axis=-1).reshape(*x.shape, *x.shape)


@pytest.fixture(scope="module")
def f() -> Function:
    return Function(network())


@pytest.fixture(scope="module")
def scalar() -> Function:
    return Function(network(scalar=True))


X = RNG.normal(size=(4, 3))


def test_a_call_is_bit_equal_to_onnxruntime() -> None:
    for model, x in (
        (network(np.float32), X.astype(np.float32)),
        (lenet.lenet(), RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)),
    ):
        session = onnxruntime.InferenceSession(model.SerializeToString())
        name = session.get_inputs()[0].name
        assert np.array_equal(Function(model)(x), session.run(None, {name: x})[0])


def test_products_and_jacobians(f: Function) -> None:
    expected = jacobian(numpy_network, X)
    cotangent, tangent = RNG.normal(size=(4, 2)), RNG.normal(size=(4, 3))
    y, pullback = f.vjp(X)
    assert np.allclose(y, numpy_network(X), rtol=1e-12)
    (product,) = pullback(cotangent)
    assert np.allclose(product, np.einsum("ab,abcd->cd", cotangent, expected), rtol=1e-10)
    assert np.array_equal(pullback((cotangent,))[0], product)  # called again, with a tuple
    y, tangents = f.jvp((X,), (tangent,))
    assert np.allclose(tangents, np.einsum("abcd,cd->ab", expected, tangent), rtol=1e-10)
    assert np.allclose(f.jacobian(X), expected, rtol=1e-10)


def test_gradients_and_hessians_of_a_scalar(scalar: Function) -> None:
    value, gradient = scalar.value_and_grad(X)
    assert value == pytest.approx(loss(X), rel=1e-12)
    assert np.allclose(gradient, jacobian(loss, X), rtol=1e-10)
    expected = hessian(loss, X)
    assert np.allclose(scalar.hessian(X), expected, rtol=1e-6, atol=1e-8)
    vector = RNG.normal(size=X.shape)
    product = scalar.hvp((X,), (vector,))
    assert np.allclose(product, np.einsum("abcd,cd->ab", expected, vector), rtol=1e-6, atol=1e-8)


def test_weights_are_replaced_and_differentiated(scalar: Function) -> None:
    other = RNG.normal(size=W1.shape)
    changed = scalar.with_parameters({"w1": other})
    assert sorted(scalar.parameters) == ["b1", "w1", "w2"]
    assert np.array_equal(scalar.parameters["w1"], W1)
    assert np.array_equal(changed.parameters["w1"], other)
    for function, w1 in ((scalar, W1), (changed, other)):
        assert function(X) == pytest.approx(loss(X, w1), rel=1e-12)
        value, (dx, dw) = function.value_and_grad(X, wrt=["x", "w1"])
        assert value == pytest.approx(loss(X, w1), rel=1e-12)
        assert np.allclose(dx, jacobian(lambda x: loss(x, w1), X), rtol=1e-10)  # noqa: B023
        assert np.allclose(dw, jacobian(lambda w: loss(X, w), w1), rtol=1e-10)
        _, pullback = function.vjp(X, wrt="w1")
        assert np.allclose(pullback(np.float64(1))[0], dw, rtol=1e-12)
        (xx, xw), (wx, ww) = function.hessian(X, wrt=[0, "w1"])
        assert np.allclose(ww, hessian(lambda w: loss(X, w), w1), rtol=1e-6, atol=1e-8)
        assert np.allclose(xw, np.transpose(wx, (2, 3, 0, 1)), rtol=1e-10)
        assert xx.shape == (4, 3, 4, 3)


def test_functions_with_the_same_weights_replaced_share_sessions(
    scalar: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    create = onnxruntime.InferenceSession.__init__

    def record(self: Any, *arguments: Any, **named: Any) -> None:
        opened.append(self)
        create(self, *arguments, **named)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", record)
    first, second = (scalar.with_parameters({"w1": c * W1}) for c in (1.0, 2.0))
    first.value_and_grad(X)
    made = len(opened)
    assert made
    second.value_and_grad(X)
    assert len(opened) == made
    assert second.with_parameters({"w1": W1})(X) == pytest.approx(loss(X), rel=1e-12)


def test_a_replaced_weight_is_copied(scalar: Function) -> None:
    given = W1.copy()
    changed = scalar.with_parameters({"w1": given})
    given[...] = 0
    assert changed(X) == pytest.approx(loss(X), rel=1e-12)
    with pytest.raises(ValueError, match="read-only"):
        changed.parameters["w1"][0, 0] = 1


def test_arrays_may_change_before_the_pullback(f: Function) -> None:
    given, cotangent = X.copy(), np.ones((4, 2))
    y, pullback = f.vjp(given)
    expected = pullback(cotangent)[0].copy()
    given[...] = 0
    y[...] = 0
    assert np.array_equal(pullback(cotangent)[0], expected)


MASKED = """<ir_version: 10, opset_import: ["": 21]> f (float[n] x) => (float[n] y) {
    ratio = Constant <value = float {0.5}> ()
    training = Constant <value = bool {1}> ()
    y = Dropout (x, ratio, training)
}"""


def test_a_pullback_has_the_dropout_mask_of_its_outputs() -> None:
    f = Function(onnx.parser.parse_model(MASKED))
    x = np.ones(1000, np.float32)
    drawn = []
    for _ in range(2):
        y, pullback = f.vjp(x)
        drawn.append(y)
        assert 300 < (y == 0).sum() < 700
        assert np.array_equal(pullback(x)[0], y)
        assert np.array_equal(pullback(x)[0], y)
        y, tangent = f.jvp((x,), (3 * x,))
        assert np.array_equal(tangent, 3 * y)
    assert not np.array_equal(*drawn)


LOOKUP = """<ir_version: 10, opset_import: ["": 21]>
f (int64[n] ids, float[n, 2] x) => (float[n, 2] y, int64[n] next)
<float[3, 2] table = {1, 2, 3, 4, 5, 6}, int64[1] one = {1}> {
    rows = Gather (table, ids)
    y = Mul (rows, x)
    next = Add (ids, one)
}"""


def test_integer_inputs_and_outputs() -> None:
    f = Function(onnx.parser.parse_model(LOOKUP))
    ids, x = np.array([2, 0]), np.float32([[1, 1], [2, 2]])
    (y, following), pullback = f.vjp(ids, x)
    assert y.tolist() == [[5, 6], [2, 4]]
    assert following.tolist() == [3, 1]
    none, product = pullback((np.ones_like(y), None))
    assert none is None
    assert product.tolist() == [[5, 6], [1, 2]]
    _, (tangent, no_tangent) = f.jvp((ids, x), (None, np.ones_like(x)))
    assert tangent.tolist() == [[5, 6], [1, 2]]
    assert no_tangent is None
    _, pullback = f.vjp(ids, x, wrt=["table"])
    assert pullback((np.ones_like(y), None))[0].tolist() == [[2, 2], [0, 0], [1, 1]]
    one = Function(onnx.parser.parse_model(LOOKUP), outputs="y")
    assert one.jacobian(x=x, ids=ids).shape == (2, 2, 2, 2)
    with pytest.raises(ortops.ArgumentError, match=r"'ids' must be floating-point .*, got int64"):
        one.jacobian(ids, x, wrt=0)
    with pytest.raises(ortops.ArgumentError, match=r"cotangents: 'next' is int64 .*; pass None"):
        f.vjp(ids, x)[1]((y, following))


BRANCH = """<ir_version: 10, opset_import: ["": 21]>
f (bool square, float[n] x) => (float[n] y) {
    y = If (square) <
        then_branch = a () => (float[n] p) { p = Mul (x, x) },
        else_branch = b () => (float[n] q) { q = Neg (x) }
    >
}"""

POWER = """<ir_version: 10, opset_import: ["": 21]>
f (int64 times, float[n] x) => (float[n] y) <float one = {1}> {
    go = Constant <value = bool {1}> ()
    start = Expand (one, shape)
    shape = Shape (x)
    y = Loop (times, go, start) <
        body = b (int64 i, bool c, float[n] before) => (bool c_out, float[n] after) {
            c_out = Identity (c)
            after = Mul (before, x)
        }
    >
}"""


def test_control_flow() -> None:
    x = np.float32([1, 2, 3])
    f = Function(onnx.parser.parse_model(BRANCH))
    for square, slope in ((True, 2 * x), (False, -np.ones_like(x))):
        y, pullback = f.vjp(square, x)
        assert np.array_equal(pullback(np.ones_like(y))[1], slope)
        assert np.array_equal(f.jacobian(square, x), np.diag(slope))
    loop = Function(onnx.parser.parse_model(POWER))
    for times in (1, 3):
        y, pullback = loop.vjp(times, x)
        assert np.allclose(y, x**times)
        assert np.allclose(pullback(np.ones_like(y))[1], times * x ** (times - 1))
        _, tangent = loop.jvp((times, x), (None, np.ones_like(x)))
        assert np.allclose(tangent, times * x ** (times - 1))


@pytest.mark.slow
def test_shapes_get_sessions_of_their_own_where_that_is_faster() -> None:
    f = Function(lenet.lenet())
    x = RNG.normal(size=(3, 1, 8, 8)).astype(np.float32)
    expected = None
    for rows in (3, 2, 1, 2, 3, 1, 5, 6, 7, 8):
        batch = x[np.arange(rows) % 3]
        y, pullback = f.vjp(batch, wrt=[0, *f.parameters])
        gradients = pullback(np.ones_like(y))
        expected = gradients[0] if expected is None else expected
        assert np.allclose(gradients[0], expected[np.arange(rows) % 3], rtol=1e-3, atol=1e-6)


def test_a_convolution_has_a_jacobian() -> None:
    f = Function(lenet.lenet())
    x = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
    y, pullback = f.vjp(x)
    found = f.jacobian(x)
    cotangent = RNG.normal(size=y.shape).astype(np.float32)
    expected = np.tensordot(cotangent, found, 2)
    assert np.allclose(pullback(cotangent)[0], expected, rtol=1e-4, atol=1e-6)


def test_outputs_name_any_tensor_of_the_main_graph() -> None:
    model = network()
    hidden = next(node.output[0] for node in model.graph.node if node.op_type == "Tanh")
    f = Function(model, outputs=[hidden, "y"])
    h, y = f(X)
    assert np.allclose(h @ W2, y)
    assert f.outputs == (hidden, "y")
    of_hidden, of_y = f.jacobian(X)
    assert of_hidden.shape == (4, 5, 4, 3)
    assert np.allclose(of_y, jacobian(numpy_network, X), rtol=1e-10)
    assert np.array_equal(Function(model, outputs=hidden)(X), h)
    with pytest.raises(ortops.ModelError, match="the model has no tensor 'z'; known names: 'y'"):
        Function(model, outputs="z")
    with pytest.raises(ortops.ArgumentError, match="'y' is listed twice"):
        Function(model, outputs=["y", "y"])


def test_files_of_other_kinds(tmp_path: Path) -> None:
    x = X.astype(np.float32)
    expected = Function(network(np.float32)).jacobian(x)
    trainable = ortops.build_training_model(
        network(np.float32), loss="MeanSquaredError", optimizer="Adam"
    )
    served = ortops.derivatives.gradient(network(np.float32))
    path = tmp_path / "model.onnx"
    onnx.save(network(np.float32), path, save_as_external_data=True, size_threshold=0)
    old = network(np.float32)
    old.opset_import[0].version, old.ir_version = 13, 7
    for model in (trainable, path, str(path), old, old.SerializeToString()):
        f = Function(model)
        assert np.allclose(f.jacobian(x), expected, rtol=1e-6, atol=1e-7)
        assert sorted(f.parameters) == ["b1", "w1", "w2"]
    f = Function(served)
    _, slope = f(x)
    assert np.allclose(slope, expected.sum(axis=(0, 1)), rtol=1e-5)
    second = f.jacobian(x)[1]
    assert np.allclose(second, hessian(lambda a: numpy_network(a).sum(), X), atol=1e-4)


def test_the_model_may_change_afterwards() -> None:
    model = network()
    f = Function(model)
    model.graph.initializer[0].raw_data = bytes(len(model.graph.initializer[0].raw_data))
    assert np.allclose(f(X), numpy_network(X), rtol=1e-12)


def test_threads_may_share_a_function() -> None:
    f = Function(network(scalar=True))
    results: list[Any] = []

    def work(scale: float) -> None:
        results.append((scale, f.value_and_grad(scale * X)[1]))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0, 3.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for scale, gradient in results:
        assert np.allclose(gradient, jacobian(loss, scale * X), rtol=1e-10)


def test_a_function_shows_its_signature(scalar: Function) -> None:
    assert repr(scalar) == "Function(x: float64[n, 3]) -> y: float64[], 3 weights (30 numbers)"
    assert "w1: float64[3, 5]" in repr(scalar.parameters)


def test_values_are_converted_only_without_loss(f: Function) -> None:
    assert np.array_equal(f([[1, 2, 3]]), f(np.array([[1.0, 2.0, 3.0]])))
    single = Function(network(np.float32))
    with pytest.raises(ortops.FeedError, match=r"'x' must be float32, got float64 with the value"):
        single(X)
    with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[4, 2\]"):
        f(X[:, :2])
    assert np.array_equal(f(X.T.copy().T), f(X))  # not contiguous
    assert np.array_equal(f(X[::2]), f(X[::2].copy()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(), r"missing: x: float64\[n, 3\]"),
        (lambda f: f(X, X), r"has 1 input \(x\), got 2 arrays"),
        (lambda f: f(X, x=X), "'x' is given twice"),
        (lambda f: f(z=X), "no input is named 'z'"),
        (lambda f: f.jacobian(X, wrt=3), "3 is not the position of an input; the Function has 1"),
        (lambda f: f.jacobian(X, wrt=True), "wrt must be names or positions of inputs, got True"),
        (lambda f: f.jacobian(X, wrt="w9"), "no input or weight 'w9'; known names: 'x', 'w1'"),
        (lambda f: f.jacobian(X, wrt=[]), r"wrt must be names or positions of inputs, got \[\]"),
        (lambda f: f.jacobian(X, wrt=["x", 0]), "wrt: 'x' is listed twice; list it once"),
        (lambda f: f.value_and_grad(X), r"needs a scalar output, but 'y' has shape \[4, 2\]"),
        (lambda f: f.hessian(X), r"needs a scalar output, but 'y' has shape \[4, 2\]"),
        (lambda f: f.hvp((X,), (X,)), r"needs a scalar output, but 'y' has shape \[4, 2\]"),
        (lambda f: f.jvp(X, (X,)), "xs must be a tuple of arrays, got ndarray"),
        (lambda f: f.jvp((X,), (X, X)), "tangents must have one array for each of x, got 2"),
        (lambda f: f.jvp((X,), (X[:2],)), r"'x' must have shape \[4, 3\], got \[2, 3\]"),
        (lambda f: f.jvp((X,), (None,)), r"'x' needs an array of shape \[4, 3\], got None"),
        (lambda f: f.vjp(X)[1](X), r"cotangents: 'y' must have shape \[4, 2\], got \[4, 3\]"),
        (
            lambda f: f.with_parameters({"w9": W1}),
            "no floating-point weight 'w9'; known names:",
        ),
        (lambda f: f.with_parameters([W1]), "values must be a dict of arrays, got list"),
    ],
)
def test_errors_name_the_argument(
    f: Function, call: Callable[[Function], Any], message: str
) -> None:
    with pytest.raises(ortops.ArgumentError, match=message):
        call(f)


def test_several_outputs_are_no_scalar() -> None:
    f = Function(onnx.parser.parse_model(LOOKUP))
    with pytest.raises(ortops.ArgumentError, match="one scalar output, got y, next; select one"):
        f.value_and_grad(np.array([0]), np.ones((1, 2), np.float32))


def test_a_missing_kernel_is_said() -> None:
    with Tape(name="double") as tape:
        x = tape.input("x", np.float64, ["n", 1, 5, 5])
        tape.output(op.Conv(x, tape.initializer("w", np.ones((1, 1, 3, 3)))), "y")
    f = Function(tape.model())
    with pytest.raises(ortops.UnsupportedError, match=r"Conv.*change the type of that node"):
        f(np.ones((1, 1, 5, 5)))


def test_an_operator_without_a_gradient_is_said() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> f (float[2, 2] x) => '
        "(float[2, 2] y) { y = com.microsoft.CDist (x, x) }"
    )
    f = Function(model)
    x = np.float32([[3, 0], [0, 4]])
    assert f(x).tolist() == [[0, 25], [25, 0]]
    with pytest.raises(ortops.UnsupportedError, match="CDist"):
        f.vjp(x)


def test_derivatives_are_functions_that_can_be_differentiated(scalar: Function) -> None:
    reading = scalar.reading(["w1"])
    assert reading.inputs == ("x", "w1")
    assert reading(X, W1) == pytest.approx(loss(X), rel=1e-12)
    product = reading.derivative("vjp")
    assert product.inputs == ("x", "w1", "seed_y")
    dx, dw = product(X, W1, 2.0)
    assert np.allclose(dx, 2 * jacobian(loss, X), rtol=1e-10)
    assert np.allclose(dw, 2 * jacobian(lambda w: loss(X, w), W1), rtol=1e-10)
    cotangent = RNG.normal(size=X.shape)
    _, pullback = product.vjp(X, W1, 1.0)
    expected = np.einsum("abcd,ab->cd", hessian(loss, X), cotangent)
    assert np.allclose(pullback((cotangent, np.zeros_like(W1)))[0], expected, rtol=1e-6, atol=1e-8)
    pushed = scalar.derivative("jvp")(X, cotangent)
    assert pushed == pytest.approx((jacobian(loss, X) * cotangent).sum(), rel=1e-10)
    other = scalar.with_parameters({"w1": 2 * W1}).derivative("vjp")
    assert np.allclose(other(X, 1.0), jacobian(lambda x: loss(x, 2 * W1), X), rtol=1e-10)


def test_bfloat16() -> None:
    with Tape(name="half") as tape:
        x = tape.input("x", ml_dtypes.bfloat16, ["n"])
        tape.output((x.astype(np.float32) * 3).astype(ml_dtypes.bfloat16), "y")
    f = Function(tape.model())
    x = np.array([1, 2], ml_dtypes.bfloat16)
    for _ in range(3):
        y, pullback = f.vjp(x)
        assert y.dtype == f(x).dtype == ml_dtypes.bfloat16
        assert f(x).tolist() == y.tolist() == [3, 6]
        assert pullback(x)[0].tolist() == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_outputs_that_are_declared_with_a_wrong_shape(hidden: bool) -> None:
    """As exporters do; a seed has the computed rank, also where that is known in a run only."""
    nodes = "a = MatMul(x, w) b = Reshape(a, s) y = Tanh(b)"
    if not hidden:
        nodes = nodes.replace("Reshape(a, s)", "Identity(a)")
    x, s = np.random.default_rng(0).standard_normal((3, 4), np.float32), np.array([3, 2])
    w = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], np.float64)
    seed = np.random.default_rng(1).standard_normal((3, 2), np.float32)
    slope = 1 - np.tanh(x @ w) ** 2
    jacobian = np.einsum("ny,fy,nm->nymf", slope, w, np.eye(3))
    given = (x, s) if hidden else (x,)
    wrong = []
    for declared in ("n", "n,2,1", "", "n,5", "6"):
        model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,4] x{", int64[k] s" * hidden}) => (float[{declared}] y)
        <float[4,2] w = {{1,0,0,1,1,1,0,0}}> {{ {nodes} }}""")
        if not declared:
            model.graph.output[0].type.tensor_type.shape.SetInParent()
        between = onnx.ValueInfoProto()
        between.CopyFrom(model.graph.output[0])
        between.name = "a"
        model.graph.value_info.append(between)
        f = Function(model)
        _, pull = f.vjp(*given)
        tangent = f.jvp(given, (x, None) if hidden else (x,))[1]
        results: dict[str, tuple[Any, Any]] = {
            "vjp": (pull(seed)[0], (seed * slope) @ w.T),
            "jacobian": (f.jacobian(*given, wrt="x"), jacobian),
            "jvp": (tangent, (x @ w) * slope),
        }
        if not hidden:  # a file needs a shape, so that an output of unknown rank keeps it
            derived = ortops.derivatives.vjp(model, lowered=True)
            session = onnxruntime.InferenceSession(derived.SerializeToString())
            (found,) = session.run(["vjp_x"], {"x": x, "seed_y": seed})
            results["derivatives.vjp"] = (found, (seed * slope) @ w.T)
        for kind, (found, wanted) in results.items():
            if np.shape(found) != wanted.shape or not np.allclose(found, wanted, 1e-5, 1e-5):
                wrong.append(f"{kind} of [{declared}]: {np.shape(found)}")
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # the exporter warns about itself
def test_an_exported_file_that_declares_the_length_of_its_example(tmp_path: Path) -> None:
    """PyTorch's dynamo exporter does, of an LSTM; the file runs with any length."""
    import torch

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.LSTM(4, 8, 2, batch_first=True)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.layers(x)[0])

    torch.manual_seed(0)
    module, file = Layers(), tmp_path / "model.onnx"
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    more: dict[str, Any] = {"dynamo": True, "dynamic_shapes": sizes, "verbose": False}
    torch.onnx.export(module, (torch.randn(3, 5, 4),), str(file), **more)
    x = torch.randn(2, 9, 4, requires_grad=True)
    y = module(x)
    seed = torch.randn_like(y)
    y.backward(seed)
    assert x.grad is not None
    f = Function(file)
    _, pull = f.vjp(x.detach().numpy())
    np.testing.assert_allclose(pull(seed.numpy())[0], x.grad.numpy(), rtol=1e-4, atol=1e-5)
    found = f.jacobian(x.detach().numpy())
    expected = torch.autograd.functional.jacobian(module, x.detach()).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
