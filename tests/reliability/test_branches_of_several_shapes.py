"""If with branches of several shapes: the gradients are right, and onnxruntime has no warning.

The loss of each branch is computed again with numpy in float64, the gradient from differences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import ortops
from ortops import op

Array = np.ndarray[Any, Any]


def numbers(array: Array) -> str:
    return "{" + ", ".join(str(number) for number in array.ravel()) + "}"


W = np.array([[0.3, -0.7], [0.2, 0.5], [-0.4, 0.6]])
V = np.array([[[0.5, -1.0]], [[2.0, 0.25]]])
U = np.array([[0.5, 1.5]])

BRANCHES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "itself": ("{o} = Identity(h)", lambda h: h),
    "unsqueezed": ("{o} = Unsqueeze(h, one)", lambda h: h[:, None]),
    "a column": ("{o} = Slice(h, zero, one, one)", lambda h: h[:, :1]),
    "a column squeezed": (
        "{o}0 = Slice(h, zero, one, one)  {o} = Squeeze({o}0, one)",
        lambda h: h[:, 0],
    ),
    "broadcast": ("{o} = Mul(h, v)", lambda h: h * V),
    "product": ("{o} = Mul(h, u)", lambda h: h * U),
    "tiled": ("{o} = Tile(h, twice)", lambda h: np.tile(h, (2, 3))),
    "transposed": ("{o}0 = Tanh(h)  {o} = Transpose<perm=[1, 0]>({o}0)", lambda h: np.tanh(h).T),
    "a sum": ("{o} = ReduceSum<keepdims=0>(h)", lambda h: h.sum()),
    "branches again": (
        """{o} = If (other) <then_branch = p () => ({o}1) {{ {o}1 = Identity(h) }},
                             else_branch = q () => ({o}2) {{ {o}2 = Mul(h, v) }}>""",
        lambda h: h * V,
    ),
}
"""Nodes that make {o} of h (float[batch, 2]), and the same in numpy."""

WEIGHTS = f"""float[3, 2] w = {numbers(W)}, float[2, 1, 2] v = {numbers(V)},
 float[1, 2] u = {numbers(U)}, float[2] start = {{0, 0}},
 int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[2] twice = {{2, 3}}"""

PAIRS = list(itertools.permutations(BRANCHES, 2))


def itself(y: ortops.Tensor) -> ortops.Tensor:
    return op.Identity(y)


def model(then: str, other: str) -> onnx.ModelProto:
    first, second = BRANCHES[then][0].format(o="a"), BRANCHES[other][0].format(o="b")
    return parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 3] x, bool flag, bool other) => (float y)
        <{WEIGHTS}>
        {{
          h = MatMul(x, w)
          z = If (flag) <then_branch = t () => (a) {{ {first} }},
                         else_branch = e () => (b) {{ {second} }}>
          squares = Mul(z, z)
          y = ReduceMean<keepdims=0>(squares)
        }}"""
    )


def slope(x: Array, function: Callable[[Array], Array]) -> Array:
    """Returns the gradient to W of the mean of the squares of function(x · W)."""
    found = np.zeros_like(W)
    for place in np.ndindex(W.shape):
        step = np.zeros_like(W)
        step[place] = 1e-6
        ahead, behind = (np.mean(function(x @ w) ** 2) for w in (W + step, W - step))
        found[place] = (ahead - behind) / 2e-6
    return found


def test_a_warning_would_be_seen(capfd: pytest.CaptureFixture[str]) -> None:
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> m (float[2] x) => (float[3] y) '
        "{ one = Constant<value = int64[1] {1}>()  s = Shape(x)  r = Sub(s, one) "
        "y = Expand(x, r) }"
    )
    onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": np.zeros(2, np.float32)}
    )
    assert "W:onnxruntime" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize(("then", "other"), PAIRS)
def test_branches_of_several_shapes(
    then: str, other: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trainable = ortops.build_training_model(
        model(then, other),
        loss=itself,
        optimizer=ortops.optimizers.SGD(1.0),
        trainable=["w"],
    )
    session = ortops.TrainingSession(trainable)
    x = np.random.default_rng(4).normal(size=(4, 3))
    for flag, name in ((True, then), (False, other), (True, then)):
        session.state["w"] = W
        session.step({"x": x.astype(np.float32), "flag": np.array(flag), "other": np.array(False)})
        found = W - session.state["w"]
        np.testing.assert_allclose(found, slope(x, BRANCHES[name][1]), rtol=1e-4, atol=1e-5)
    assert capfd.readouterr() == ("", "")


LOOPS = {
    "Loop": """
        s, o = Loop (n, , h) <body = b (int64 i, bool c, float[batch, 2] s1) =>
          (bool c2, float[batch, 2] s2, float[batch, 2] o1)
          { c2 = Identity(c)  s2 = Mul(s1, u)  o1 = Identity(s2) }>
        z = Add(s, o)""",
    "Scan": """
        s, o = Scan <num_scan_inputs = 1, body = b (s1, row) => (s2, o1)
          { s2 = Add(s1, row)  o1 = Mul(s2, s2) }> (start, h)
        z = Add(s, o)""",
    "If in a Loop": """
        s, z = Loop (n, , h) <body = b (int64 i, bool c, float[batch, 2] s1) =>
          (bool c2, float[batch, 2] s2, o1)
          { c2 = Identity(c)  s2 = Mul(s1, u)
            o1 = If (flag) <then_branch = t () => (a) { a = Identity(s2) },
                            else_branch = e () => (d) { d = Mul(s2, v) }> }>""",
    "Loop in an If": """
        z = If (flag)
          <then_branch = t () => (a)
            { p, a = Loop (n, , h) <body = b (int64 i, bool c, float[batch, 2] s1) =>
              (bool c2, float[batch, 2] s2, float[batch, 2] o1)
              { c2 = Identity(c)  s2 = Mul(s1, u)  o1 = Identity(s2) }> },
           else_branch = e () => (d) { d = Identity(h) }>""",
}


def looped(name: str, h: Array, flag: bool) -> Array:
    """What the graphs of LOOPS compute, three times."""
    states = np.stack([h * U**n for n in (1, 2, 3)])
    if name == "Loop":
        return states + states[-1]
    if name == "Scan":
        return h.cumsum(axis=0) ** 2 + h.sum(axis=0)
    if name == "If in a Loop":
        return states if flag else states[:, None, :, :] * V[None, :, :, :]
    return states if flag else h


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        m (float[batch, 3] x, int64 n, bool flag) => (float y)
        <{WEIGHTS}>
        {{
          h = MatMul(x, w)
          {LOOPS[name]}
          squares = Mul(z, z)
          y = ReduceMean<keepdims=0>(squares)
        }}"""
    )
    trainable = ortops.build_training_model(
        proto,
        loss=itself,
        optimizer=ortops.optimizers.SGD(1.0),
        trainable=["w"],
    )
    session = ortops.TrainingSession(trainable)
    x = np.random.default_rng(4).normal(size=(4, 3))
    for flag in (True, False, True):
        session.state["w"] = W
        feeds = {"x": x.astype(np.float32), "n": np.array(3), "flag": np.array(flag)}
        session.step(feeds)
        found = W - session.state["w"]
        expected = slope(x, lambda h, flag=flag: looped(name, h, flag))  # type: ignore[misc]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert capfd.readouterr() == ("", "")
