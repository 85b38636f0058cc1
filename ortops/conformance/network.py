"""A case of ten training steps of a network with a hidden layer, cross-entropy and Adam."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx

from ortops.conformance.case import Array, Call, Case
from ortops.conformance.formulas import adam
from ortops.conformance.optimizers import float32_attributes
from ortops.conformance.training import COMBINED, UPDATE, Entry, rounded, trainable

_SHAPES = {"w": (3, 4), "b": (4,), "u": (4, 2)}
_MOMENTS = tuple(f"{kind}_{name}" for kind in "vh" for name in _SHAPES)


def _numbers(a: Array) -> str:
    return "{" + ", ".join(f"{value:.9g}" for value in a.ravel().tolist()) + "}"


def _model(weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns the network with its training algorithm."""
    kinds = {name: f"float[{', '.join(map(str, shape))}]" for name, shape in _SHAPES.items()}
    initializers = ", ".join(f"{kinds[name]} {name} = {_numbers(weights[name])}" for name in "wbu")
    inference = (
        f"network (float[n, 3] x) => (float[n, 2] scores)<{initializers}>"
        "{ m = MatMul (x, w) a = Add (m, b) h = Tanh (a) scores = MatMul (h, u) }"
    )
    declared = "".join(
        f", {kinds[name[-1]]} {name} = {_numbers(np.zeros(_SHAPES[name[-1]]))}" for name in _MOMENTS
    )
    variables = [*_SHAPES, *_MOMENTS]
    results = ", ".join(f"{name}_new" for name in variables)
    outputs = ", ".join(f"{kinds[name[-1]]} {name}_new" for name in variables)
    algorithm = (
        f"train (int64[n] labels) => (float loss, int64 t_new, {outputs})"
        f"<float r = {{0.125}}, int64 t = {{1}}, int64 one = {{1}}{declared}> {{"
        "loss = SoftmaxCrossEntropyLoss (scores, labels)"
        ' dw, db, du = Gradient <xs = ["w", "b", "u"], zs = ["x", "labels"], y = "loss">'
        " (w, b, u, x, labels)"
        f" {results} = Adam (r, t, w, b, u, dw, db, du, {', '.join(_MOMENTS)})"
        " t_new = Add (t, one) }"
    )
    return trainable(
        inference, Entry(algorithm, {name: f"{name}_new" for name in (*variables, "t")})
    )


def _gradients(
    state: Mapping[str, Array], x: Array, labels: Array
) -> tuple[Array, Any, dict[str, Array]]:
    """Returns the scores, the loss, and the gradients of w, b and u."""
    h = np.tanh(x.astype(np.float64) @ state["w"] + state["b"])
    scores = h @ state["u"]
    e = np.exp(scores - scores.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    ds = (p - np.eye(2)[labels]) / 6
    da = ds @ state["u"].T * (1 - h * h)
    loss = -np.log(p[np.arange(6), labels]).mean()
    return scores, loss, {"w": x.T.astype(np.float64) @ da, "b": da.sum(0), "u": h.T @ ds}


def cases() -> Iterator[Case]:
    """Yields the case."""
    rng = np.random.default_rng(5)
    weights = {
        name: rng.uniform(-0.5, 0.5, shape).astype(np.float32) for name, shape in _SHAPES.items()
    }
    state = {name: value.astype(np.float64) for name, value in weights.items()}
    state |= {name: np.zeros(_SHAPES[name[-1]]) for name in _MOMENTS}
    exact = float32_attributes({"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6})
    calls = []
    for t in range(1, 11):
        x = rng.uniform(-1, 1, (6, 3)).astype(np.float32)
        labels = (x.sum(1) > 0).astype(np.int64)
        scores, loss, gradients = _gradients(state, x, labels)
        for name, g in gradients.items():
            own = [name, f"v_{name}", f"h_{name}"]
            new = adam(0.125, t, state[name], g, *(state[key] for key in own[1:]), **exact)
            state |= dict(zip(own, new, strict=True))
        outputs, after = {"loss": loss, "scores": scores}, {**state, "t": t + 1}
        calls.append(Call("step", {"x": x, "labels": labels}, rounded(outputs), rounded(after)))
    yield Case(
        "test_training_network",
        _model(weights),
        [COMBINED, UPDATE],
        calls=calls,
        rtol=1e-3,
        atol=1e-5,
    )
