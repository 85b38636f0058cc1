"""What onnxruntime's optimizer computes wrongly, and ortops' models avoid; numpy is right."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from violations import all_violations

import ortops
from ortops.graph.faults import FAULTS

FORMS = {
    "x Wᵀ": ("t = Transpose <perm = [1, 0]> (m) p = MatMul (x, t)", False),
    "Wᵀ x": ("t = Transpose <perm = [1, 0]> (m) p = MatMul (t, x)", True),
    "Wᵀ x behind Identity": (
        "t = Transpose <perm = [1, 0]> (m) i = Identity (t) p = MatMul (i, x)",
        True,
    ),
    "(1 W)ᵀ x": (
        """c = Constant <value = float {1}> () s = Mul (m, c)
        t = Transpose <perm = [1, 0]> (s) p = MatMul (t, x)""",
        True,
    ),
    "Wᵀ x in a branch": (
        """yes = Constant <value = bool {1}> () p = If (yes) <
        then_branch = a () => (float[3] a) { t = Transpose <perm = [1, 0]> (m) a = MatMul (t, x) },
        else_branch = b () => (float[3] b) { t2 = Transpose (m) b = MatMul (t2, x) }>""",
        True,
    ),
}
"""Products of a vector with a matrix: the nodes, and whether W has a column for each element."""

W = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL")
ZERO = {"zero": np.zeros((), np.float32)}  # keeps onnxruntime from folding Transpose
X = np.array([0.5, -1.0, 2.0, 0.25], np.float32)


def model(body: str, *, left: bool, scalar: bool = False) -> onnx.ModelProto:
    """Returns y = tanh(W x); or the mean of y²."""
    shape, weight = ("4, 3", W.T) if left else ("3, 4", W)
    mean = "squares = Mul (y, y) e = ReduceMean <keepdims = 0> (squares)" if scalar else ""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[4] x, float zero) => ({"float e" if scalar else "float[3] y"})
        <float[{shape}] w = {{{", ".join(map(str, weight.ravel().tolist()))}}}> {{
            m = Add (w, zero) {body} y = Tanh (p) {mean} }}""")


def results(
    given: onnx.ModelProto,
    level: str,
    feeds: dict[str, np.ndarray],
    outputs: list[str] | None = None,
) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level, ZERO)
    return onnxruntime.InferenceSession(given.SerializeToString(), options).run(
        outputs, {"x": X} | feeds
    )


@pytest.mark.slow
def test_products_with_vectors() -> None:
    y = np.tanh(W @ X)
    slope = 1 - y * y
    de = 2 / 3 * y * slope
    zero = ZERO["zero"]
    dx, dw = W.T @ de, np.outer(de, X)
    hessian = W.T @ np.diag(2 / 3 * (slope * slope - 2 * y * y * slope)) @ W
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    with all_violations() as check:
        for name, (body, left) in FORMS.items():
            given, scalar = model(body, left=left), model(body, left=left, scalar=True)
            trainable = ortops.build_training_model(
                given, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
            )
            session = ortops.TrainingSession(trainable)
            batch = {"x": X, "targets": np.zeros(3, np.float32)} | ZERO
            function = ortops.Function(scalar)
            gradient = ortops.derivatives.gradient(scalar, xs=["x"], lowered=True)
            with check((name, "TrainingSession")):
                close(session.gradients(batch)["w"], dw.T if left else dw)
            with check((name, "plain call of a Function")):
                close(ortops.Function(given)(X, zero), y)
                close(ortops.Function(given, outputs=["p"])(X, zero), W @ X)
            with check((name, "Function")):
                close(function.value_and_grad(X, zero, wrt="x")[1], dx)
                close(function.hessian(X, zero, wrt="x"), hessian)
            for level in LEVELS:
                with check((name, "files", level, ZERO)):
                    close(results(trainable, level, ZERO)[0], y)
                    close(results(session.inference_model(), level, ZERO)[0], y)
                    close(results(gradient, level, ZERO)[-1], dx)


def test_products_with_vectors_in_functions() -> None:
    """A function may also be called with a matrix, for which its product is right."""
    given = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[4] x, float zero) => (float[3] y, float[3, 3] z)
        <float[4, 3] w = {{{", ".join(map(str, W.T.ravel().tolist()))}}}> {{
            m = Add (w, zero)
            y = f.Outer (m, x)
            z = f.Product (m, m)
        }}
        <opset_import: ["": 21, "f": 1], domain: "f"> Outer (a, b) => (c) {{ c = f.Product (a, b) }}
        <opset_import: ["": 21], domain: "f"> Product (a, b) => (c) {{
            t = Transpose <perm = [1, 0]> (a) c = MatMul (t, b)
        }}""")
    trainable = ortops.build_training_model(
        given, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    session = ortops.TrainingSession(trainable)
    with all_violations() as check:
        for level, (name, model) in itertools.product(
            LEVELS, {"trainable": trainable, "trained": session.inference_model()}.items()
        ):
            with check((level, name)):
                assert len(model.functions) == 2
                y, z = results(model, level, ZERO)[:2]
                np.testing.assert_allclose(y, W @ X, rtol=1e-5)
                np.testing.assert_allclose(z, W @ W.T, rtol=1e-5)


def test_products_with_vectors_on_a_tape() -> None:
    with ortops.Tape(name="g") as tape:
        x = tape.input("x", np.float32, [4])
        w = tape.constant(W.T)
        y = (w + 0).T @ x
        tape.output(y, "y")
        tape.output(ortops.grad(((w + 0).T @ x * y).sum(), [x])[0], "dx")
    lowered = ortops.lower(tape.model())
    for level in LEVELS:
        y, dx = results(lowered, level, {})
        np.testing.assert_allclose(y, W @ X, rtol=1e-5)
        np.testing.assert_allclose(dx, 2 * W.T @ W @ X, rtol=1e-5)


def test_each_fault_is_in_the_versions_that_it_names() -> None:
    """A version in which one is mended, or comes back, is to be written down."""
    installed = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
    with all_violations() as check:
        for name, fault in FAULTS.items():
            first, last = (tuple(map(int, each.split("."))) for each in fault.versions)
            with check(name):
                if first <= installed <= last:
                    assert fault.is_present()
                elif installed <= (1, 32):
                    assert not fault.is_present()


def test_a_padded_weight() -> None:
    """The second derivative of a transposed convolution convolves with a padded cotangent."""
    convolution = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 2, 3, 3, 3] x, float[2, 2, 3, 3, 3] w) => (float[1, 2, 7, 7, 7] y) {
            y = ConvTranspose <strides = [2, 2, 2]> (x, w) }""")
    gradient = ortops.derivatives.gradient(convolution, xs=["w"], lowered=True)
    second = ortops.derivatives.vjp(gradient, xs=["x"], y="d_y_d_w", lowered=True)
    r = np.random.default_rng(0).normal(size=(2, 2, 3, 3, 3)).astype(np.float32)
    feeds = {"x": np.ones((1, 2, 3, 3, 3), np.float32), "w": r, "seed_d_y_d_w": r}
    for level in LEVELS:
        (found,) = results(second, level, feeds, ["vjp_x"])
        expected = np.broadcast_to(r.sum((1, 2, 3, 4))[:, None, None, None], (1, 2, 3, 3, 3))
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_weight_that_a_model_pads() -> None:
    """onnxruntime cannot load the model itself, but what is made of it."""
    convolution = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[1, 1, 5] x) => (float[1, 1, 4] y)
        <float[1, 1, 1] w = {2}, int64[6] pads = {0, 0, 0, 0, 0, 1}, float[1] b = {0},
            int64[2] none = {0, 0}> {
            padded = Pad (w, pads) same = Identity (padded) bias = Pad (b, none)
            y = Conv (x, same, bias) }""")
    x = np.arange(5, dtype=np.float32)[None, None]
    found, pullback = ortops.Function(convolution).vjp(x, wrt=["w"])
    np.testing.assert_array_equal(found, 2 * x[..., :4])
    np.testing.assert_array_equal(pullback(np.ones_like(found))[0].ravel(), [x[..., :4].sum()])
    trainable = ortops.build_training_model(
        convolution, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    session = ortops.TrainingSession(trainable)
    loss = session.step({"x": x, "targets": np.zeros_like(found)})
    np.testing.assert_allclose(loss["loss"], np.mean(found**2))
