"""Gradients of attention whose mask excludes all keys of a row, where the forward is finite.

The forward pass is written in numpy, in float64, with 0 for NaN; its differences are the gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest
from violations import all_violations

import ortops

Numbers = np.ndarray
MASK = np.array([[0, 0, -np.inf], [-np.inf, -np.inf, -np.inf]])
S, V = np.random.default_rng(0).normal(size=(2, 2, 3))  # scores, and values (transposed)
ZERO = "zero = Constant <value = float {0}> ()"
GUARD = f"bad = IsNaN (p) {ZERO}"


def softmax(s: Numbers, axis: int = -1) -> Numbers:
    shifted = np.exp(s - np.max(s, axis, keepdims=True))
    return shifted / shifted.sum(axis, keepdims=True)


def masked(s: Numbers) -> Numbers:
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(softmax(s + MASK))


def masked_logarithm(s: Numbers) -> Numbers:
    with np.errstate(invalid="ignore", divide="ignore"):
        p = softmax(s + MASK)
        return np.where(np.isneginf(np.log(p)), -100, np.nan_to_num(np.log(p)))


ADDED = "a = Add (s, mask)"
CASES: dict[str, tuple[str, Callable[[Numbers], Numbers]]] = {
    "added": (f"{ADDED} p = Softmax (a) {GUARD} y = Where (bad, zero, p)", masked),
    "Where": (
        """low = Constant <value = float {-inf}> () one = Constant <value = float {0}> ()
        keep = Equal (mask, one) a = Where (keep, s, low) p = Softmax (a) bad = IsNaN (p)
        zero = Constant <value = float {0}> () y = Where (bad, zero, p)""",
        masked,
    ),
    "not NaN": (
        f"{ADDED} p = Softmax (a) {GUARD} good = Not (bad) y = Where (good, p, zero)",
        masked,
    ),
    "p != p": (
        f"""{ADDED} p = Softmax (a) same = Equal (p, p) {ZERO} bad = Not (same)
        y = Where (bad, zero, p)""",
        masked,
    ),
    "p == p": (
        f"{ADDED} p = Softmax (a) {ZERO} same = Equal (p, p) y = Where (same, p, zero)",
        masked,
    ),
    "nan_to_num": (
        f"""{ADDED} p = Softmax (a) {GUARD} q = Where (bad, zero, p) large = IsInf (p)
        above = Greater (p, zero) both = And (large, above) y = Where (both, zero, q)""",
        masked,
    ),
    "not p == p, twice": (
        f"""{ADDED} p = Softmax (a) {ZERO} same = Equal (p, p) bad = Not (same) good = Not (bad)
        y = Where (good, p, zero)""",
        masked,
    ),
    "exp of LogSoftmax": (
        f"{ADDED} l = LogSoftmax (a) p = Exp (l) {GUARD} y = Where (bad, zero, p)",
        masked,
    ),
    "LogSoftmax": (
        f"""{ADDED} p = LogSoftmax (a) {GUARD} q = Where (bad, zero, p)
        least = Constant <value = float {{-100}}> () y = Max (q, least)""",
        masked_logarithm,
    ),
    "written out": (
        f"""{ADDED} last = Constant <value = int64[1] {{-1}}> () x = ReduceMax (a, last)
        d = Sub (a, x) h = Exp (d) t = ReduceSum (h, last) p = Div (h, t)
        {GUARD} y = Where (bad, zero, p)""",
        masked,
    ),
    "behind a product": (
        f"""{ADDED} w = Softmax (a) t = Transpose (s) p = MatMul (w, t)
        {GUARD} y = Where (bad, zero, p)""",
        lambda s: masked(s) @ s.T,
    ),
    "behind a Dropout and a Cast": (
        f"""{ADDED} w = Softmax (a) d = Dropout (w) h = Cast <to = 11> (d) p = Cast <to = 1> (h)
        {GUARD} y = Where (bad, zero, p)""",
        masked,
    ),
}


def model(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]>
        g (float[2, 3] s, float[2, 3] mask) => (float e) {{
            {body} r = Mul (y, y) axes = Constant <value = int64[2] {{0, 1}}> ()
            half = ReduceSum <keepdims = 0> (r, axes) e = Identity (half) }}""")


def differences(f: Callable[[Numbers], Numbers], x: Numbers) -> Numbers:
    """Returns the Jacobian of a function, with the axes of x last."""
    steps = 1e-5 * np.eye(x.size).reshape(-1, *x.shape)
    columns = [(f(x + step) - f(x - step)) / 2e-5 for step in steps]
    return np.stack(columns, -1).reshape(*np.shape(columns[0]), *x.shape)


@pytest.mark.slow
def test_rows_that_are_masked_entirely() -> None:
    mask = MASK.astype(np.float32)
    with all_violations() as check:
        for name, (body, forward) in CASES.items():

            def energy(s: Numbers, forward: Callable[[Numbers], Numbers] = forward) -> Numbers:
                return np.sum(forward(s) ** 2)

            function = ortops.Function(model(body))
            s = S.astype(np.float32)
            with check((name, "gradient")):
                value, gradient = function.value_and_grad(s, mask, wrt="s")
                np.testing.assert_allclose(value, energy(S), rtol=1e-5)
                np.testing.assert_allclose(gradient, differences(energy, S), rtol=1e-3, atol=1e-4)
            with check((name, "Hessian")):
                hessian = differences(lambda s: differences(energy, s), S)
                found = function.hessian(s, mask, wrt="s")
                np.testing.assert_allclose(found, hessian, rtol=1e-2, atol=2e-3)


def test_training_continues_in_float32_and_float16() -> None:
    for kind, numbers in (("float", "1, 2, 3"), ("float16", "15360, 16384, 16896")):  # 1, 2, 3
        given = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 18]>
            g ({kind}[batch, 3] mask) => ({kind}[batch, 3] y) <{kind}[3] w = {{{numbers}}}> {{
                s = Add (w, mask) p = Softmax (s) bad = IsNaN (p)
                zero = Constant <value = {kind} {{0}}> () y = Where (bad, zero, p) }}""")
        session = ortops.TrainingSession(
            ortops.build_training_model(given, loss="MeanSquaredError", optimizer="SGD")
        )
        dtype = np.float32 if kind == "float" else np.float16
        batch = {"mask": MASK.astype(dtype), "targets": np.zeros((2, 3), dtype)}
        p = softmax(np.array([1.0, 2, 3]) + MASK[0])
        right = p * (p - (p * p).sum()) * 2 / 6
        np.testing.assert_allclose(session.gradients(batch)["w"], right, atol=1e-3)
        session.step(batch)
        assert np.isfinite(session.parameters["w"]).all()


def test_without_a_guard_nothing_is_invented() -> None:
    for unguarded in ("y = Add (p, zero)", "q = Where (bad, zero, p) y = Add (p, q)"):
        function = ortops.Function(model(f"{ADDED} p = Softmax (a) {GUARD} {unguarded}"))
        value, gradient = function.value_and_grad(
            S.astype(np.float32), MASK.astype(np.float32), wrt="s"
        )
        assert np.isnan(value)
        assert np.isnan(gradient[1]).all()
