"""Numbers of shape [1, 1, 1] that add an axis to a matrix, in forms that ortops recognizes.

The forward pass is written in numpy, and gradients are differences of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest
from violations import all_violations

import ortops

Numbers = np.ndarray
NUMBERS = {"half": 0.5, "one": 1.0, "root": math.sqrt(2), "tiny": 1e-5}


def gelu(x: Numbers) -> Numbers:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def rms(x: Numbers) -> Numbers:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5)


def sigmoid(x: Numbers) -> Numbers:
    return 1 / (1 + np.exp(-x))


RMS = """two = Constant <value = float {2}> () last = Constant <value = int64[1] {-1}> ()
    s = Pow (h, two) m = ReduceMean (s, last) v = Add (m, tiny) r = Sqrt (v)"""
GELU = "a = Div (h, root) b = Erf (a) c = Add (b, one)"
CASES: dict[str, tuple[str, str, Callable[[Numbers], Numbers]]] = {
    "Gelu, half": ("half", f"{GELU} d = Mul (h, c) y = Mul (d, half)", gelu),
    "Gelu, half first": ("half", f"{GELU} d = Mul (h, half) y = Mul (d, c)", gelu),
    "Gelu, one": ("one", f"{GELU} d = Mul (h, c) y = Mul (d, half)", gelu),
    "Gelu, root": ("root", f"{GELU} d = Mul (h, c) y = Mul (d, half)", gelu),
    "gate": (
        "half",
        "b = Erf (h) d = Mul (b, half) c = Add (d, half) y = Identity (c)",
        lambda x: (np.vectorize(math.erf)(x) + 1) / 2,
    ),
    "RMS": ("tiny", f"{RMS} n = Div (h, r) y = Mul (n, w)", rms),
    "RMS, reciprocal": ("tiny", f"{RMS} i = Reciprocal (r) n = Mul (h, i) y = Mul (n, w)", rms),
    "Swish": ("one", "s = Sigmoid (h) d = Mul (s, one) y = Mul (h, d)", lambda x: x * sigmoid(x)),
    "limits": ("one", "s = Sigmoid (h) y = Min (s, one)", sigmoid),
    "Sigmoid": ("one", "n = Neg (h) e = Exp (n) d = Add (e, one) y = Div (one, d)", sigmoid),
}


def model(lifted: str, body: str) -> onnx.ModelProto:
    """Returns a model of x · w, where one number has the shape [1, 1, 1]."""
    numbers = ", ".join(
        f"float{'[1, 1, 1]' if name == lifted else ''} {name} = {{{number!r}}}"
        for name, number in NUMBERS.items()
        if name in body
    )
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n, 4] x) => (float[1, n, 4] y) <float[4] w = {{1, 1, 1, 1}}, {numbers}> {{
            h = Mul (x, w) {body} }}""")


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["MeanSquaredError", "BinaryCrossEntropy"])
def test_numbers_that_add_axes(loss: str) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4))
    scales = 1 + 1e-4 * np.eye(4)
    is_entropy = loss == "BinaryCrossEntropy"
    with all_violations() as check:
        for name, (lifted, body, forward) in CASES.items():
            if is_entropy and name not in ("limits", "Sigmoid"):
                continue

            def value(w: Numbers, forward: Callable[[Numbers], Numbers] = forward) -> float:
                y = forward(x * w)
                y = y * w if forward is rms else y
                terms = -np.log(1 - y) if is_entropy else y * y
                return float(terms.mean())

            with check(name):
                trainable = ortops.build_training_model(
                    model(lifted, body), loss=loss, optimizer="SGD", trainable=["w"]
                )
                session = ortops.TrainingSession(trainable)
                feeds = {"x": x.astype(np.float32)}
                targets = np.zeros((1, 3, 4), np.float32)
                found = session.gradients(feeds | {"targets": targets})
                right = value(np.ones(4))
                slope = [(value(w) - value(2 - w)) / 2e-4 for w in scales]
                np.testing.assert_allclose(found.loss, right, rtol=1e-5)
                np.testing.assert_allclose(found["w"], slope, rtol=1e-3, atol=1e-5)
