"""Function.pytensor: a model as an Op, with the gradients that samplers need."""

from __future__ import annotations

import importlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from models import lenet
from ortops import Function, Tape, op
from tests.test_function import (
    BRANCH,
    LOOKUP,
    MASKED,
    POWER,
    W1,
    X,
    jacobian,
    loss,
    network,
    numpy_network,
)
from tests.test_function_jax import FLATTENED, QUANTIZED, TEXT

pytestmark = pytest.mark.optional("pytensor", "pytensor")


@pytest.fixture(scope="module")
def pytensor() -> Any:
    return importlib.import_module("pytensor")


@pytest.fixture(scope="module")
def pt() -> Any:
    return importlib.import_module("pytensor.tensor")


@pytest.fixture(scope="module")
def gradient() -> Any:
    return importlib.import_module("pytensor.gradient")


@pytest.fixture(autouse=True)
def _without_compiler(pytensor: Any) -> Iterator[None]:
    """Compiling takes longer than all else; one test has the default mode."""
    mode = importlib.import_module("pytensor.compile.mode").Mode("py", "fast_compile")
    with pytensor.config.change_flags(mode=mode):
        yield


@pytest.fixture(scope="module")
def f() -> Function:
    return Function(network())


@pytest.fixture(scope="module")
def scalar() -> Function:
    return Function(network(scalar=True))


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.slow
def test_values_and_static_shapes(pytensor: Any, pt: Any, f: Function) -> None:
    apply, x = f.pytensor(), pt.dmatrix("x")
    y = apply(x)
    assert y.type.shape == (None, 2)
    assert apply(pt.tensor("x", shape=(4, 3), dtype="float64")).type.shape == (4, 2)
    assert np.array_equal(pytensor.function([x], y)(X), f(X))
    assert np.array_equal(apply(X).eval(), f(X))
    assert np.array_equal(apply([[1, 2, 3]]).eval(), f([[1, 2, 3]]))


def test_derivatives_of_first_and_second_order(
    pytensor: Any, pt: Any, gradient: Any, f: Function, scalar: Function
) -> None:
    apply = scalar.pytensor()
    gradient.verify_grad(f.pytensor(), [X], rng=rng())
    gradient.verify_grad(apply, [X], rng=rng())
    gradient.verify_grad(lambda x: pt.grad(apply(x), x), [X], rng=rng())
    x, v = pt.dmatrix("x"), pt.dmatrix("v")
    product = gradient.hessian_vector_product(apply(x), [x], [v])[0]
    found = pytensor.function([x, v], product)(X, X + 1)
    assert np.allclose(found, scalar.hvp((X,), (X + 1,)))


def test_forward_mode(pytensor: Any, pt: Any, gradient: Any, f: Function) -> None:
    apply, x, v = f.pytensor(), pt.dmatrix("x"), pt.dmatrix("v")
    _, expected = f.jvp((X,), (X + 1,))
    for product in (
        apply.R_op([x], [v])[0],
        apply.pushforward([x], apply.make_node(x).outputs, [v])[0],
        gradient.pushforward(apply(x), x, v, use_op_pushforward=True),
        gradient.pushforward(apply(x), x, v),
    ):
        assert np.allclose(pytensor.function([x, v], product)(X, X + 1), expected)
    assert apply.R_op([x], [None]) == [None]
    (product,) = apply.L_op([x], [apply(x)], [pt.as_tensor(np.ones((4, 2)))])
    assert np.allclose(
        pytensor.function([x], product)(X), jacobian(lambda x: numpy_network(x).sum(), X)
    )


@pytest.mark.slow
def test_weights_as_inputs(gradient: Any, scalar: Function) -> None:
    other = rng().normal(size=W1.shape)
    apply = scalar.reading(["w1"]).pytensor()
    gradient.verify_grad(apply, [X, other], rng=rng())
    assert apply(X, other).eval() == pytest.approx(loss(X, other), rel=1e-12)
    changed = scalar.with_parameters({"w1": other}).pytensor()
    assert changed(X).eval() == pytest.approx(loss(X, other), rel=1e-12)
    gradient.verify_grad(changed, [X], rng=rng())


@pytest.mark.slow
def test_the_default_mode_compiles_without_warnings(
    pytensor: Any, pt: Any, scalar: Function
) -> None:
    x = pt.dmatrix("x")
    y = scalar.pytensor()(x)
    value_and_slope = pytensor.function([x], [y, pt.grad(y, x)], mode="Mode")
    for rows in (4, 2):
        value, slope = value_and_slope(X[:rows])
        assert value == pytest.approx(loss(X[:rows]))
        assert np.allclose(slope, jacobian(loss, X[:rows]))


def test_float32(pytensor: Any, pt: Any, gradient: Any) -> None:
    f = Function(lenet.lenet())
    images = pt.tensor("images", shape=(None, 1, 8, 8), dtype="float32")
    logits = f.pytensor()(images)
    assert logits.type.dtype == "float32"
    values = rng().normal(size=(3, 1, 8, 8)).astype(np.float32)
    slope = pytensor.function([images], pt.grad(pt.sqr(logits).sum(), images))(values)
    y, pullback = f.vjp(values)
    assert slope.dtype == np.float32
    assert np.allclose(slope, pullback(2 * y)[0], rtol=1e-4, atol=1e-6)


def test_integer_inputs_and_outputs(pytensor: Any, pt: Any, gradient: Any) -> None:
    apply = Function(onnx.parser.parse_model(LOOKUP)).reading(["table"]).pytensor()
    ids, x, table = pt.lvector("ids"), pt.fmatrix("x"), pt.fmatrix("table")
    y, following = apply(ids, x, table)
    assert following.type.dtype == "int64"
    slopes = pt.grad(y.sum(), [x, table])
    run = pytensor.function([ids, x, table], [y, following, *slopes])
    weights = np.float32([[1, 2], [3, 4], [5, 6]])
    found = run(np.array([2, 0]), np.float32([[1, 1], [2, 2]]), weights)
    assert [each.tolist() for each in found] == [
        [[5, 6], [2, 4]],
        [3, 1],
        [[5, 6], [1, 2]],
        [[2, 2], [0, 0], [1, 1]],
    ]
    with pytest.raises(gradient.DisconnectedInputError):
        pt.grad(y.sum(), ids)
    narrow = pt.ivector("narrow")  # int32 fits int64
    assert apply(narrow, x, table)[0].type.shape == (None, 2)


def test_control_flow_and_quantized_models(pytensor: Any, pt: Any, gradient: Any) -> None:
    x = np.float32([1, 2, 3])
    v = pt.fvector("v")
    branch = Function(onnx.parser.parse_model(BRANCH)).pytensor()
    slope = pytensor.function([v], pt.grad(branch(True, v).sum(), v))
    assert slope(x).tolist() == [2, 4, 6]
    power = Function(onnx.parser.parse_model(POWER)).pytensor()
    slope = pytensor.function([v], pt.grad(power(3, v).sum(), v))
    assert np.allclose(slope(x), 3 * x**2)
    f = Function(onnx.parser.parse_model(QUANTIZED))
    m = pt.fmatrix("m")
    values = np.float32([[0.6, 0.4], [1.1, -0.2]])
    slope = pytensor.function([m], pt.grad(f.pytensor()(m)[0, 1], m))
    assert np.array_equal(slope(values), f.jacobian(values)[0, 1])


def likelihood() -> onnx.ModelProto:
    """Returns a likelihood network: log p(observation | mean, log scale) of each row."""
    with Tape(name="likelihood") as tape:
        rows = tape.input("rows", np.float32, ["n", 3])
        x, mean, log_scale = op.Split(rows, axis=1, num_outputs=3)
        z = (x - mean) * op.Exp(-log_scale)
        tape.output(op.Squeeze(z * z * -0.5 - log_scale, [1]), "log_p")
    return tape.model()


@pytest.mark.slow
def test_a_posterior_is_sampled_by_hamiltonian_monte_carlo(pytensor: Any, pt: Any) -> None:
    draws = rng()
    observed = draws.normal(2.0, 0.5, size=60).astype(np.float32)
    network = Function(likelihood()).pytensor()
    theta = pt.dvector("theta")
    columns = [
        observed,
        *(pt.full((60,), value.astype("float32")) for value in (theta[0], theta[1])),
    ]
    log_p = network(pt.stack(columns, axis=1)).sum() - 0.01 * pt.sqr(theta).sum()
    target = pytensor.function([theta], [log_p, pt.grad(log_p, theta)])

    samples, position = [], np.array([1.5, 0.0])
    value, slope = target(position)
    for _ in range(500):
        before = momentum = draws.normal(size=2)
        moved, moved_value, moved_slope = position, value, slope
        for _ in range(6):
            momentum = momentum + 0.02 * moved_slope
            moved = moved + 0.04 * momentum
            moved_value, moved_slope = target(moved)
            momentum = momentum + 0.02 * moved_slope
        gain = moved_value - value - (momentum @ momentum - before @ before) / 2
        if np.log(draws.uniform()) < gain:
            position, value, slope = moved, moved_value, moved_slope
        samples.append(position)
    mean, log_scale = np.mean(samples[100:], axis=0)
    assert mean == pytest.approx(observed.mean(), abs=0.03)
    assert log_scale == pytest.approx(np.log(observed.std()), abs=0.05)
    spread = np.std(samples[100:], axis=0)
    assert spread[0] == pytest.approx(observed.std() / np.sqrt(60), rel=0.35)


def test_threads_may_share_it(pytensor: Any, pt: Any, scalar: Function) -> None:
    x, apply = pt.dmatrix("x"), scalar.pytensor()
    found: dict[float, Any] = {}
    compiled = [pytensor.function([x], pt.grad(apply(x), x)) for _ in range(3)]

    def work(scale: float, run: Any) -> None:
        found[scale] = run(scale * X)

    threads = [
        threading.Thread(target=work, args=(scale, run))
        for scale, run in zip((1.0, 2.0, 3.0), compiled, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for scale, slope in found.items():
        assert np.allclose(slope, jacobian(loss, scale * X), rtol=1e-10)


def test_it_is_pickled_for_other_processes(pytensor: Any, pt: Any, scalar: Function) -> None:
    apply = scalar.with_parameters({"w1": 2 * W1}).pytensor()
    x = pt.dmatrix("x")
    copied_x, slope = pickle.loads(pickle.dumps((x, pt.grad(apply(x), x))))
    found = pytensor.function([copied_x], slope)(X)
    assert np.allclose(found, jacobian(lambda x: loss(x, 2 * W1), X))


def test_errors_name_the_input(pytensor: Any, pt: Any, f: Function) -> None:
    apply = Function(network(np.float32)).pytensor()
    with pytest.raises(ortops.ArgumentError, match="'x' must be float32, got float64; convert"):
        apply(pt.dmatrix("x"))
    with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[4, 2\]"):
        apply(np.ones((4, 2), np.float32))
    with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[\?\]"):
        apply(pt.fvector("x"))
    with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[\?, 2\]"):
        apply(pt.tensor("x", shape=(None, 2), dtype="float32"))
    with pytest.raises(ortops.ArgumentError, match="missing: x: float32"):
        apply()
    x = pt.dmatrix("x")
    with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[4, 2\]"):
        pytensor.function([x], f.pytensor()(x))(X[:, :2])
    with pytest.raises(ortops.UnsupportedError, match="type of input 'words' is"):
        Function(onnx.parser.parse_model(TEXT)).pytensor()
    with pytest.raises(ortops.UnsupportedError, match="Dropout node 'y' draws random numbers"):
        Function(onnx.parser.parse_model(MASKED)).pytensor()


def test_the_computed_shape_counts_not_the_declared_one(pytensor: Any, pt: Any) -> None:
    flattened = Function(onnx.parser.parse_model(FLATTENED)).pytensor()
    x = pt.fmatrix("x")
    assert pytensor.function([x], flattened(x))(np.ones((2, 3), np.float32)).shape == (6,)
    wrong = Function(onnx.parser.parse_model(FLATTENED.replace("float[k]", "float[5]"))).pytensor()
    assert pytensor.function([x], wrong(x))(np.ones((2, 3), np.float32)).shape == (6,)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, f: Function) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "pytensor", None)
    with pytest.raises(ortops.OrtopsError, match=r"pip install ortops\[pytensor\]"):
        f.pytensor()
