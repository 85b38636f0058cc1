"""Function.scipy: minimization of ONNX models with scipy.optimize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from test_function import LOOKUP, X, hessian, jacobian, loss, network

import ortops
from ortops import Function, Tape, op

scipy_optimize = pytest.mark.optional("scipy", "scipy")


def rosenbrock(dtype: type = np.float64) -> onnx.ModelProto:
    with Tape(name="rosenbrock") as tape:
        x = tape.input("x", dtype, ["n"])
        first, last = op.Slice(x, [0], [-1]), op.Slice(x, [1], [2**31])
        tape.output((100 * (last - first**2) ** 2 + (1 - first) ** 2).sum(), "y")
    return tape.model()


def fit() -> onnx.ModelProto:
    """Returns the error of a small net, of inputs, targets and weights."""
    rng = np.random.default_rng(0)
    with Tape(name="fit") as tape:
        x, target = tape.input("x", np.float64, ["n", 2]), tape.input("t", np.float64, ["n"])
        w1 = tape.initializer("w1", rng.normal(size=(2, 4)))
        b1 = tape.initializer("b1", rng.normal(size=4))
        w2 = tape.initializer("w2", rng.normal(size=4))
        error = op.Tanh(x @ w1 + b1) @ w2 - target
        tape.output((error**2).mean() + 1e-3 * ((w1**2).sum() + (w2**2).sum()), "error")
    return tape.model()


@pytest.mark.quick(1)
@scipy_optimize
@pytest.mark.parametrize(
    ("dtype", "tolerance", "near"), [(np.float64, 1e-8, 1e-7), (np.float32, 1e-2, 1e-2)]
)
def test_trust_ncg_minimizes_rosenbrock(dtype: type, tolerance: float, near: float) -> None:
    from scipy import optimize

    fun, jac, hessp = Function(rosenbrock(dtype)).scipy(shape=5)
    start = np.array([1.3, 0.7, 0.8, 1.9, 1.2])
    assert fun(start) == pytest.approx(optimize.rosen(start), rel=1e-5)
    assert np.allclose(jac(start), optimize.rosen_der(start), rtol=1e-5)
    assert np.allclose(
        hessp(start, start), optimize.rosen_hess_prod(start, start), rtol=1e-5, atol=1e-2
    )
    found = optimize.minimize(
        fun, start, jac=jac, hessp=hessp, method="trust-ncg", options={"gtol": tolerance}
    )
    assert found.success
    assert np.allclose(found.x, 1, atol=near)


@scipy_optimize
def test_trust_ncg_trains_a_small_net() -> None:
    from scipy import optimize

    names = ["w1", "b1", "w2"]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 2))
    f = Function(fit())
    fun, jac, hessp = f.reading(names).scipy(x=x, t=np.sin(x[:, 0]) * x[:, 1])
    start = np.concatenate([f.parameters[name].ravel() for name in names])
    assert optimize.check_grad(fun, jac, start) < 1e-5
    found = optimize.minimize(
        fun, start, jac=jac, hessp=hessp, method="trust-ncg", options={"gtol": 1e-6}
    )
    assert found.success
    assert np.linalg.norm(found.jac) < 1e-6
    assert found.fun < fun(start) / 5
    parts = np.split(found.x, [8, 12])
    trained = {n: p.reshape(f.parameters[n].shape) for n, p in zip(names, parts, strict=True)}
    assert f.with_parameters(trained)(x, np.sin(x[:, 0]) * x[:, 1]) == pytest.approx(found.fun)


def test_products_of_a_matrix() -> None:
    f = Function(network(scalar=True))
    flat, vector = X.ravel(), np.arange(12.0)
    for functions in (f.scipy(shape=(4, 3)), f.scipy(shape=[(4, 3)]), f.scipy({"x": (4, 3)})):
        assert functions.fun(flat) == pytest.approx(loss(X), rel=1e-12)
        assert isinstance(functions.fun(flat), float)
        assert np.allclose(functions.jac(flat), jacobian(loss, X).ravel(), rtol=1e-10)
        expected = hessian(loss, X).reshape(12, 12) @ vector
        assert np.allclose(functions.hessp(flat, vector), expected, rtol=1e-5, atol=1e-6)


def test_several_inputs_are_concatenated() -> None:
    with Tape(name="sum") as tape:
        a, b = tape.input("a", np.float32, [2]), tape.input("b", np.float64, [1, 2])
        ids = tape.input("ids", np.int64, ["n"])
        rows = op.Gather(a, ids).astype(np.float64)
        tape.output((rows**2).sum() + (b**3).sum(), "y")
    f = Function(tape.model())
    x = np.array([1, 2, 3, 4.0])
    for fun, jac, hessp in (
        f.scipy(ids=[0, 0]),
        f.scipy({"b": None}, ids=[0, 0]),
        f.scipy([(2,), (1, 2)], ids=[0, 0]),
    ):
        assert fun(x) == 2 + 27 + 64
        assert jac(x).tolist() == [4, 0, 27, 48]
        assert hessp(x, np.ones(4)).tolist() == [4, 0, 18, 24]
        assert jac(x).dtype == hessp(x, x).dtype == np.float64
    fun, jac, _ = f.scipy(a=np.float32([1, 2]), ids=[0, 1])
    assert fun(x[2:]) == 5 + 27 + 64
    assert jac(x[2:]).tolist() == [27, 48]


def test_fun_and_jac_share_a_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    f = Function(rosenbrock())
    calls: list[Any] = []
    vjp = Function.vjp
    monkeypatch.setattr(Function, "vjp", lambda *a, **b: calls.append(a) or vjp(*a, **b))
    fun, jac, _ = f.scipy(shape=2)
    x = np.array([1.0, 2])
    assert fun(x) == 100
    assert jac(x).tolist() == [-400, 200]
    assert len(calls) == 1
    x[1] = 1  # the same memory
    assert fun(x) == 0
    assert jac(x).tolist() == [0, 0]
    assert len(calls) == 2


def test_large_numbers_become_infinite_in_float32() -> None:
    fun, _, _ = Function(rosenbrock(np.float32)).scipy(shape=2)
    assert fun([1e300, 0]) == np.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.scipy(), r"input 'x' has the shape \['n'\] in the model; pass its sizes"),
        (lambda f: f.scipy(shape=-1), "shape must have integers >= 0 for 'x', got -1"),
        (lambda f: f.scipy(shape="ab"), "one shape for each of x, got 'ab'"),
        (lambda f: f.scipy(shape={"z": (1,)}), "shape: no such input; known names: 'x'"),
        (lambda f: f.scipy(shape=[(1,), (2,)]), "one shape for each of x, got"),
        (lambda f: f.scipy(shape=(1, 2)), r"'x' must have shape \[n\], got \[1, 2\]"),
        (lambda f: f.scipy(x=[1.0]), "all inputs are fixed"),
        (lambda f: f.scipy(z=[1.0]), "no input is named 'z'; known names: 'x'"),
        (lambda f: f.scipy(3).fun([1.0]), r"x must have shape \[3\], got \[1\]"),
        (lambda f: f.scipy(1).hessp([1.0], [1.0, 2]), r"p must have shape \[1\], got \[2\]"),
        (
            lambda f: Function(network()).scipy((4, 3)).fun(np.zeros(12)),
            r"needs a scalar output, but 'y' has shape \[4, 2\]",
        ),
        (
            lambda f: Function(onnx.parser.parse_model(LOOKUP), outputs="y").scipy({"x": (1, 2)}),
            "input 'ids' must be floating-point to be optimized, got int64; pass its array as",
        ),
    ],
)
def test_errors(call: Callable[[Function], Any], message: str) -> None:
    with pytest.raises((ortops.ArgumentError, ortops.FeedError), match=message):
        call(Function(rosenbrock()))
