"""If, Loop and Scan against differences of what onnxruntime computes in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import pytest
from checked import Checked, without_gradient
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import run

import ortops

D = TensorProto.DOUBLE
ORDERS = 2
CHECKED = [Checked("If", ORDERS, ()), Checked("Loop", ORDERS, [2]), Checked("Scan", ORDERS, [0])]


def check(
    nodes: Sequence[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    xs: Sequence[str],
    *,
    y: str = "y",
    orders: int = ORDERS,
    symbolic: bool = False,
) -> None:
    """Compares the gradients of Σ y with differences, then those of Σ (random · gradient)."""
    rng = np.random.default_rng(1)
    inputs = []
    for name, array in feeds.items():
        shape = [f"{name}{axis}" for axis in range(array.ndim)] if symbolic else array.shape
        inputs.append(value(name, shape, helper.np_dtype_to_tensor_dtype(array.dtype)))
    nodes = [*nodes, helper.make_node("ReduceSum", [y], ["f1"], keepdims=0)]
    feeds = dict(feeds)
    for order in range(1, orders + 1):
        names = [f"d{order}_{x}" for x in xs]
        function = ortops.lower(model(nodes, inputs, [f"f{order}"]))
        nodes = [*nodes, node("Gradient", xs, names, xs=list(xs), y=f"f{order}")]
        lowered = ortops.lower(model(nodes, inputs, names))
        assert not without_gradient(lowered), "of the next order"
        found = run(lowered, feeds)
        for x, gradient in zip(xs, found, strict=True):
            v = rng.standard_normal(feeds[x].shape)
            ahead, behind = (
                run(function, {**feeds, x: feeds[x] + sign * 1e-6 * v})[0] for sign in (1, -1)
            )
            expected = (ahead - behind) / 2e-6
            assert np.isfinite(gradient).all()
            assert abs(np.sum(gradient * v) - expected) <= 1e-6 * (
                np.abs(gradient * v).sum() + abs(expected) + 1
            ), (order, x)
        terms = []
        for x, name in zip(xs, names, strict=True):
            weight = f"u{order}_{x}"
            feeds[weight] = rng.standard_normal(feeds[x].shape)
            shape = [f"{x}{axis}" for axis in range(feeds[x].ndim)] if symbolic else feeds[x].shape
            inputs.append(value(weight, shape, D))
            nodes.append(helper.make_node("Mul", [name, weight], [f"{name}_weighted"]))
            nodes.append(
                helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_sum"], keepdims=0)
            )
            terms.append(f"{name}_sum")
        nodes.append(helper.make_node("Sum", terms, [f"f{order + 1}"]))


def subgraph(name, nodes, inputs, outputs):
    return helper.make_graph(nodes, name, inputs, outputs)


def arrays(**shapes):
    rng = np.random.default_rng(2)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def branches():
    then = subgraph(
        "then",
        [helper.make_node("Mul", ["a", "b"], ["p"]), helper.make_node("Sin", ["p"], ["t"])],
        [],
        [value("t", None, D)],
    )
    other = subgraph("else", [helper.make_node("Exp", ["a"], ["e"])], [], [value("e", None, D)])
    return helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("flag", [True, False])
def test_if(flag, symbolic):
    check(
        [branches()],
        {"flag": np.array(flag), **arrays(a=(3,), b=(3,))},
        ["a", "b"],
        symbolic=symbolic,
    )


def test_if_in_if():
    inner = branches()
    then = subgraph("outer_then", [inner], [], [value("y", None, D)])
    inner.output[0] = "inner_y"
    then = subgraph("outer_then", [inner], [], [value("inner_y", None, D)])
    other = subgraph(
        "outer_else", [helper.make_node("Neg", ["b"], ["n"])], [], [value("n", None, D)]
    )
    outer = helper.make_node("If", ["flag2"], ["y"], then_branch=then, else_branch=other)
    feeds = {"flag": np.array(True), "flag2": np.array(True), **arrays(a=(3,), b=(3,))}
    check([outer], feeds, ["a", "b"])


def recurrence(direction=0, axis=0):
    """h ← tanh(w · x_t + u · h); puts out h and h · x_t."""
    body = subgraph(
        "body",
        [
            helper.make_node("Mul", ["x", "w"], ["wx"]),
            helper.make_node("Mul", ["h", "u"], ["uh"]),
            helper.make_node("Add", ["wx", "uh"], ["sum"]),
            helper.make_node("Tanh", ["sum"], ["h_next"]),
            helper.make_node("Mul", ["h_next", "x"], ["out"]),
        ],
        [value("h", [2], D), value("x", [2], D)],
        [value("h_next", [2], D), value("out", [2], D)],
    )
    return helper.make_node(
        "Scan",
        ["h0", "xs"],
        ["last", "outs"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[direction],
        scan_output_directions=[1 - direction],
        scan_output_axes=[axis],
    )


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("direction", "axis"), [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("y", ["last", "outs"])
def test_scan(y, direction, axis, symbolic):
    sequence = (5, 2) if axis == 0 else (2, 5)
    feeds = arrays(h0=(2,), xs=sequence, w=(2,), u=(2,))
    check([recurrence(direction, axis)], feeds, ["h0", "xs", "w", "u"], y=y, symbolic=symbolic)


def loop_node(trip="", condition="", *, stop=None):
    """h ← sin(w · h) + h², with h put out in each iteration; stops once Σ h > stop."""
    nodes = [
        helper.make_node("Mul", ["h", "w"], ["wh"]),
        helper.make_node("Sin", ["wh"], ["s"]),
        helper.make_node("Mul", ["h", "h"], ["square"]),
        helper.make_node("Add", ["s", "square"], ["h_next"]),
        helper.make_node("Mul", ["h_next", "w"], ["out"]),
    ]
    if stop is None:
        nodes.append(helper.make_node("Identity", ["go"], ["go_on"]))
    else:
        nodes += [
            helper.make_node("ReduceSum", ["h_next"], ["total"], keepdims=0),
            helper.make_node(
                "Constant", [], ["limit"], value=onnx.numpy_helper.from_array(np.array(stop))
            ),
            helper.make_node("Less", ["total", "limit"], ["go_on"]),
        ]
    body = subgraph(
        "body",
        nodes,
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("h", [2], D)],
        [value("go_on", (), TensorProto.BOOL), value("h_next", [2], D), value("out", [2], D)],
    )
    return helper.make_node("Loop", [trip, condition, "h0"], ["last", "outs"], body=body)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("y", ["last", "outs"])
def test_loop(y, symbolic):
    feeds = {"trip": np.array(4), "h0": np.array([0.3, -0.4]), "w": np.array([0.7, 1.1])}
    check([loop_node("trip")], feeds, ["h0", "w"], y=y, symbolic=symbolic)


def test_loop_that_stops_early():
    feeds = {
        "trip": np.array(50),
        "condition": np.array(True),
        "h0": np.array([0.4, 0.5]),
        "w": np.array([1.2, 1.1]),
    }
    nodes = [loop_node("trip", "condition", stop=1.9)]
    length = run(
        model(
            nodes,
            [
                value("trip", (), TensorProto.INT64),
                value("condition", (), TensorProto.BOOL),
                value("h0", [2], D),
                value("w", [2], D),
            ],
            ["outs"],
        ),
        feeds,
    )[0].shape[0]
    assert 1 < length < 50
    check(nodes, feeds, ["h0", "w"], y="outs")


def test_loop_without_iterations():
    nodes = [
        loop_node("trip"),
        node("Gradient", ["h0", "w"], ["dh", "dw"], xs=["h0", "w"], y="last"),
    ]
    inputs = [value("trip", (), TensorProto.INT64), value("h0", [2], D), value("w", [2], D)]
    feeds = {"trip": np.array(0), "h0": np.array([0.3, -0.4]), "w": np.array([0.7, 1.1])}
    dh, dw = run(ortops.lower(model(nodes, inputs, ["dh", "dw"])), feeds)
    np.testing.assert_array_equal(dh, [1, 1])
    np.testing.assert_array_equal(dw, [0, 0])


def test_scan_in_if():
    scan = recurrence()
    then = subgraph("then", [scan], [], [value("outs", None, D)])
    other = subgraph("else", [helper.make_node("Neg", ["xs"], ["n"])], [], [value("n", None, D)])
    choose = helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    feeds = {"flag": np.array(True), **arrays(h0=(2,), xs=(5, 2), w=(2,), u=(2,))}
    check([choose], feeds, ["h0", "xs", "w"])


def test_gradient_inside_a_branch():
    then = subgraph(
        "then",
        [
            helper.make_node("Sin", ["a"], ["s"]),
            node("Gradient", ["a"], ["slope"], xs=["a"], y="s"),
        ],
        [],
        [value("slope", None, D)],
    )
    other = subgraph("else", [helper.make_node("Neg", ["a"], ["n"])], [], [value("n", None, D)])
    choose = helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    inputs = [value("flag", (), TensorProto.BOOL), value("a", [2], D)]
    feeds = {"flag": np.array(True), "a": np.array([0.5, 1.5])}
    (found,) = run(ortops.lower(model([choose], inputs, ["y"])), feeds)
    np.testing.assert_allclose(found, np.cos(feeds["a"]))


def unsqueezed(x: str, y: str) -> onnx.NodeProto:
    """Unsqueezes along axes that are a constant of the outer graph, as bodies of functions do."""
    return helper.make_node("Unsqueeze", [x, "axes"], [y])


AXES = helper.make_node("Constant", [], ["axes"], value_ints=[-1])


@pytest.mark.parametrize("symbolic", [False, True])
def test_scan_whose_ranks_follow_from_the_outer_graph(symbolic):
    nodes = [
        unsqueezed("k", "column"),
        helper.make_node("MatMul", ["s_in", "column"], ["product"]),
        helper.make_node("Squeeze", ["product", "axes"], ["row"]),
        helper.make_node("Sin", ["row"], ["out"]),
        helper.make_node("Mul", ["column", "column"], ["square"]),
        helper.make_node("Add", ["s_in", "square"], ["s_out"]),
    ]
    body = subgraph(
        "body",
        nodes,
        [value("s_in", None, D), value("k", None, D)],
        [value("s_out", None, D), value("out", None, D)],
    )
    scan = helper.make_node("Scan", ["s", "ks"], ["last", "rows"], num_scan_inputs=1, body=body)
    nodes = [AXES, scan, unsqueezed("rows", "columns")]
    nodes += [helper.make_node("MatMul", ["last", "columns"], ["y"])]
    check(nodes, arrays(s=(3, 3), ks=(4, 3)), ["s", "ks"], symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
def test_loop_whose_ranks_follow_from_the_outer_graph(symbolic):
    nodes = [
        unsqueezed("x", "column"),
        helper.make_node("MatMul", ["s_in", "column"], ["product"]),
        helper.make_node("Squeeze", ["product", "axes"], ["row"]),
        helper.make_node("Mul", ["s_in", "row"], ["scaled"]),
        helper.make_node("Sin", ["scaled"], ["s_out"]),
        helper.make_node("MatMul", ["s_out", "column"], ["out"]),
        helper.make_node("Identity", ["go_on"], ["goes_on"]),
    ]
    body = subgraph(
        "body",
        nodes,
        [
            value("i", [], TensorProto.INT64),
            value("go_on", [], TensorProto.BOOL),
            value("s_in", None, D),
        ],
        [value("goes_on", [], TensorProto.BOOL), value("s_out", None, D), value("out", None, D)],
    )
    loop = helper.make_node("Loop", ["times", "", "s"], ["last", "outs"], body=body)
    total = helper.make_node("MatMul", ["last", "outs"], ["y"])
    feeds = {"times": np.array(3), **arrays(s=(3, 3), x=(3,))}
    check([AXES, loop, total], feeds, ["s", "x"], symbolic=symbolic)


HSTACK = """<ir_version: 10, opset_import: ["": 20]>
    g (float[m] a, float[n] b) => (float[k] y) <float w = {2}, int64 zero = {0}, int64 one = {1}> {
        scaled = Mul (a, w)
        square = Mul (b, b)
        both = SequenceConstruct (scaled, square)
        first = SequenceAt (both, zero)
        shape = Shape (first)
        rank = Size (shape)
        is_vector = Equal (rank, one)
        y = If (is_vector) <
            then_branch = vectors () => (float[p] u) { u = ConcatFromSequence <axis = 0> (both) },
            else_branch = matrices () => (float[] v) { v = ConcatFromSequence <axis = 1> (both) }>
    }"""
TENSOR_SPLIT = """<ir_version: 10, opset_import: ["": 20]>
    g (float[n] a) => (float[k] y) <float w = {2}, int64[3] cuts = {0, 1, 3}, int64[1] zero = {0},
        int64[1] two = {2}, int64 one = {1}, bool[1] yes = {1}, int64 last = {-1}> {
        empty = SequenceEmpty <dtype = 1> ()
        parts = Loop (two, yes, empty) <body = split
            (int64[1] i, bool[1] go, seq(float[?]) before) => (bool[1] on, seq(float[?]) after) {
                start = Gather <axis = 0> (cuts, i)
                next = Add (i, one)
                end = Gather <axis = 0> (cuts, next)
                part = Slice (a, start, end, zero)
                after = SequenceInsert (before, part)
                on = Identity (go)
            }>
        second = SequenceAt (parts, last)
        square = Mul (second, second)
        y = Mul (square, w)
    }"""


def test_branches_and_bodies_as_torch_script_exports_them() -> None:
    """A branch that cannot run for this rank, and a number of iterations with an axis."""
    a, b = np.array([1, -2, 3, 5], np.float32), np.array([4, 0.5], np.float32)
    seed = np.linspace(1, 2, 6, dtype=np.float32)
    square = a[1:3] ** 2
    for text, arrays, y, expected, of_w in (
        (HSTACK, [a, b], np.r_[2 * a, b * b], [2 * seed[:4], 2 * b * seed[4:]], np.r_[a, 0, 0]),
        (TENSOR_SPLIT, [a], 2 * square, [np.r_[0, 4 * a[1:3] * seed[:2], 0]], square),
    ):
        model = onnx.parser.parse_model(text)
        function = ortops.Function(model)
        found, pullback = function.vjp(*arrays, wrt=[*function.inputs, "w"])
        np.testing.assert_array_equal(found, y)
        expected = [*expected, seed[: len(y)] @ of_w]
        for one, other in zip(pullback(seed[: len(y)]), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        np.testing.assert_allclose(function.jacobian(*arrays, wrt="w"), of_w, rtol=1e-6)
        session = ortops.TrainingSession(
            ortops.build_training_model(
                model, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
            )
        )
        feeds = dict(zip(function.inputs, arrays, strict=True))
        session.step({**feeds, "targets": np.zeros_like(y)})
        updated = 2 - 0.01 * 2 * np.mean(y * of_w)
        np.testing.assert_allclose(session.state["w"], updated, rtol=1e-6)
