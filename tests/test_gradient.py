"""The Gradient node: what it means, at the values that a mathematician would give."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from domain_models import DOMAIN, model, node, value
from onnx import TensorProto, helper
from running import run

import ortops

F = np.float32


def gradient_model(xs, y, nodes, inputs, *, fed=None, zs=(), outputs=None, **options):
    fed = [*xs, *zs] if fed is None else fed
    outputs = [f"d{x}" for x in xs] if outputs is None else outputs
    attributes = {"xs": list(xs), "y": y} | ({"zs": list(zs)} if zs else {})
    gradient = node("Gradient", fed, outputs, name="gradient", **attributes)
    return model([*nodes, gradient], inputs, [o for o in outputs if o], **options)


PRODUCT = [helper.make_node("Mul", ["a", "b"], ["y"], name="product")]


def test_values_of_the_run():
    lowered = ortops.lower(gradient_model(["a", "b"], "y", PRODUCT, [value("a"), value("b")]))
    assert run(lowered, {"a": F(3), "b": F(5)}) == [5, 3]
    assert sum(n.op_type == "Mul" for n in lowered.graph.node) == 2  # nobody reads the product


def test_only_some_xs():
    lowered = ortops.lower(gradient_model(["a"], "y", PRODUCT, [value("a"), value("b")]))
    assert run(lowered, {"a": F(3), "b": F(5)}) == [5]


def test_y_of_any_shape_is_summed():
    lowered = ortops.lower(
        gradient_model(["a"], "y", PRODUCT, [value("a", ["n", 1]), value("b", [3])])
    )
    (found,) = run(lowered, {"a": np.ones((2, 1), F), "b": F([1, 2, 4])})
    np.testing.assert_array_equal(found, [[7], [7]])


def test_zs_are_held_constant():
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["z"]),
        helper.make_node("Mul", ["z", "b"], ["y"]),
    ]
    lowered = ortops.lower(gradient_model(["b"], "y", nodes, [value("a"), value("b")], zs=["z"]))
    assert run(lowered, {"a": F(3), "b": F(5)}) == [9]


def test_intermediate_tensor_in_xs():
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["h"]),
        helper.make_node("Mul", ["h", "h"], ["square"]),
        helper.make_node("Mul", ["square", "b"], ["y"]),
    ]
    lowered = ortops.lower(gradient_model(["h"], "y", nodes, [value("a"), value("b")]))
    assert run(lowered, {"a": F(2), "b": F(5)}) == [2 * 10 * 5]


def test_replay_at_other_values():
    nodes = [
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("Sin", ["product"], ["y"]),
    ]
    proto = gradient_model(
        ["a"], "y", nodes, [value("a"), value("b"), value("other")], fed=["other"]
    )
    (found,) = run(ortops.lower(proto), {"a": F(1), "b": F(2), "other": F(0.25)})
    np.testing.assert_allclose(found, 2 * np.cos(0.5), rtol=1e-6)


def test_replay_with_one_value_fed_twice():
    proto = gradient_model(
        ["a", "b"], "y", PRODUCT, [value("a"), value("b"), value("c")], fed=["c", "c"]
    )
    assert run(ortops.lower(proto), {"a": F(2), "b": F(3), "c": F(7)}) == [7, 7]


def test_replay_at_a_value_that_y_depends_on():
    proto = gradient_model(["a"], "y", PRODUCT, [value("a"), value("b")], fed=["b"])
    assert run(ortops.lower(proto), {"a": F(2), "b": F(3)}) == [3]  # b · b at a = b


def test_replay_of_a_z():
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"]),
        helper.make_node("Mul", ["square", "z"], ["y"]),
    ]
    inputs = [value("x"), value("z"), value("z2")]
    proto = gradient_model(["x"], "y", nodes, inputs, zs=["z"], fed=["x", "z2"])
    assert run(ortops.lower(proto), {"x": F(3), "z": F(1), "z2": F(10)}) == [60]


def test_skipped_output():
    proto = gradient_model(["a", "b"], "y", PRODUCT, [value("a"), value("b")], outputs=["", "db"])
    lowered = ortops.lower(proto)
    assert run(lowered, {"a": F(3), "b": F(5)}) == [3]
    assert sum(n.op_type == "Mul" for n in lowered.graph.node) == 1


def test_trailing_outputs_left_off():
    proto = gradient_model(["a", "b"], "y", PRODUCT, [value("a"), value("b")], outputs=["da"])
    assert run(ortops.lower(proto), {"a": F(3), "b": F(5)}) == [5]


def test_second_order_and_third():
    nodes = [
        helper.make_node("Sin", ["x"], ["y"]),
        node("Gradient", ["x"], ["first"], xs=["x"], y="y"),
        node("Gradient", ["x"], ["second"], xs=["x"], y="first"),
        node("Gradient", ["x"], ["third"], xs=["x"], y="second"),
    ]
    proto = model(nodes, [value("x")], ["first", "second", "third"])
    found = run(ortops.lower(proto), {"x": F(0.5)})
    np.testing.assert_allclose(found, [np.cos(0.5), -np.sin(0.5), -np.cos(0.5)], rtol=1e-6)


def test_second_order_of_the_specification():
    """The example of the schema: O = loss(Gemm(X, W), L), d²O/dW² and d(dO/dW)/dX."""
    nodes = [
        helper.make_node("Mul", ["X", "W"], ["Y"]),
        helper.make_node("Sub", ["Y", "L"], ["difference"]),
        helper.make_node("Mul", ["difference", "difference"], ["O"]),
        node("Gradient", ["X", "W", "L"], ["dO_dX", "dO_dW"], xs=["X", "W"], zs=["L"], y="O"),
        node("Gradient", ["X", "W", "L"], ["dX2", "dW2"], xs=["X", "W"], zs=["L"], y="dO_dW"),
    ]
    inputs = [value("X"), value("W"), value("L")]
    proto = model(nodes, inputs, ["dO_dX", "dO_dW", "dX2", "dW2"])
    x, w, target = 2.0, 3.0, 1.0  # O = (x w − l)²
    expected = [
        2 * (x * w - target) * w,
        2 * (x * w - target) * x,
        4 * x * w - 2 * target,
        2 * x * x,
    ]
    found = run(ortops.lower(proto), {"X": F(x), "W": F(w), "L": F(target)})
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_replay_of_a_gradient():
    nodes = [
        helper.make_node("Sin", ["x"], ["y"]),
        node("Gradient", ["x"], ["first"], xs=["x"], y="y"),
        node("Gradient", ["v"], ["second"], xs=["x"], y="first"),
    ]
    proto = model(nodes, [value("x"), value("v")], ["second"])
    np.testing.assert_allclose(
        run(ortops.lower(proto), {"x": F(0.5), "v": F(1.5)}), [-np.sin(1.5)], rtol=1e-6
    )


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Mul", ["b", "b"], ["y"])],
        [
            helper.make_node("Greater", ["a", "b"], ["mask"]),
            helper.make_node("Cast", ["mask"], ["y"], to=TensorProto.FLOAT),
        ],
        [helper.make_node("ArgMax", ["a"], ["y"], keepdims=0)],
    ],
    ids=["unrelated", "comparison", "integer y"],
)
def test_zeros_where_nothing_flows(nodes):
    proto = gradient_model(["a"], "y", nodes, [value("a", ["n", 2]), value("b")])
    (found,) = run(ortops.lower(proto), {"a": np.ones((3, 2), F), "b": F(2)})
    np.testing.assert_array_equal(found, np.zeros((3, 2)))
    assert found.dtype == F


def test_y_is_x():
    proto = gradient_model(["a"], "a", [helper.make_node("Neg", ["a"], ["y"])], [value("a", [2])])
    np.testing.assert_array_equal(run(ortops.lower(proto), {"a": F([5, 6])})[0], [1, 1])


def test_x_used_many_times():
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["square"]),
        helper.make_node("Add", ["square", "a"], ["sum"]),
        helper.make_node("Mul", ["sum", "a"], ["y"]),
    ]
    lowered = ortops.lower(gradient_model(["a"], "y", nodes, [value("a")]))
    assert run(lowered, {"a": F(3)}) == [3 * 9 + 2 * 3]


def test_double():
    proto = gradient_model(
        ["a", "b"], "y", PRODUCT, [value(n, (), TensorProto.DOUBLE) for n in "ab"]
    )
    found = run(ortops.lower(proto), {"a": np.float64(1 / 3), "b": np.float64(1 / 7)})
    assert found == [1 / 7, 1 / 3]
    assert found[0].dtype == np.float64


def test_alias_of_the_domain():
    gradient = node("Gradient", ["a"], ["da"], domain="ai.onnx.preview", xs=["a"], y="y")
    proto = model(
        [*PRODUCT, gradient], [value("a"), value("b")], ["da"], imports=[("ai.onnx.preview", 1)]
    )
    assert run(ortops.lower(proto), {"a": F(3), "b": F(5)}) == [5]


def test_gradient_before_the_nodes_that_it_names():
    gradient = node("Gradient", ["a"], ["da"], xs=["a"], y="y")
    proto = model([gradient, *PRODUCT], [value("a"), value("b")], ["da"])
    assert run(ortops.lower(proto), {"a": F(3), "b": F(5)}) == [5]


def test_gradient_in_a_model_local_function():
    body = [
        helper.make_node("Mul", ["p", "p"], ["square"]),
        helper.make_node("Mul", ["square", "q"], ["cubic"]),
        node("Gradient", ["p"], ["slope"], xs=["p"], y="cubic"),
    ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    function = helper.make_function("local", "Slope", ["p", "q"], ["slope"], body, imports)
    calls = [
        helper.make_node("Slope", ["a", "b"], ["first"], domain="local"),
        helper.make_node("Slope", ["b", "a"], ["second"], domain="local"),
    ]
    proto = model(
        calls,
        [value("a"), value("b")],
        ["first", "second"],
        functions=[function],
        imports=[("local", 1)],
    )
    lowered = ortops.lower(proto)
    assert run(lowered, {"a": F(3), "b": F(5)}) == [2 * 3 * 5, 2 * 5 * 3]


def test_through_a_model_local_function():
    body = [helper.make_node("Mul", ["p", "p"], ["q"])]
    function = helper.make_function(
        "local", "Square", ["p"], ["q"], body, [helper.make_opsetid("", 21)]
    )
    call = helper.make_node("Square", ["a"], ["y"], domain="local")
    gradient = node("Gradient", ["a"], ["da"], xs=["a"], y="y")
    proto = model(
        [call, gradient], [value("a")], ["da"], functions=[function], imports=[("local", 1)]
    )
    assert run(ortops.lower(proto), {"a": F(3)}) == [6]


BAD = {
    "no inputs for zs": (
        {"xs": ["a"], "y": "y", "zs": ["b"], "fed": ["a"]},
        (
            "expected one input for each of the 1 names in xs, then for "
            "each of the 1 names in zs, got 1"
        ),
    ),
    "more outputs than xs": (
        {"xs": ["a"], "y": "y", "outputs": ["da", "db"]},
        (
            "Gradient node 'gradient': expected at most one output for each of "
            "the 1 names in xs, got 2 outputs"
        ),
    ),
    "empty xs": (
        {"xs": ["a"], "y": "y", "outputs": [], "fed": []},
        "",
    ),
    "unknown x": (
        {"xs": ["product_"], "y": "y", "fed": ["a"], "outputs": ["d"]},
        "Gradient node 'gradient': the graph has no tensor 'product_', which is listed in xs;",
    ),
    "unknown y": (
        {"xs": ["a"], "y": "why"},
        "Gradient node 'gradient': the graph has no tensor 'why', which is listed in y;",
    ),
    "unknown z": (
        {"xs": ["a"], "y": "y", "zs": ["bb"], "fed": ["a", "b"]},
        "the graph has no tensor 'bb', which is listed in zs;",
    ),
    "x computed from another": (
        {"xs": ["a", "y"], "y": "y"},
        "'y' is computed from 'a', and both are listed in xs and zs; these tensors must not",
    ),
    "x listed twice": (
        {"xs": ["a", "a"], "y": "y", "outputs": ["d1", "d2"]},
        "'a' is listed 2 times in xs and zs; list it once",
    ),
    "integer x": (
        {"xs": ["i"], "y": "y"},
        "x 'i' must be a floating-point tensor, got a tensor of INT64; list it in zs",
    ),
    "fed value of another type": (
        {"xs": ["a"], "y": "y", "fed": ["i"]},
        "'i' is fed for 'a' and must have its type FLOAT, got INT64",
    ),
    "fed value of another shape": (
        {"xs": ["a"], "y": "y", "fed": ["vector"]},
        "'vector' is fed for 'a' and must have its shape [], got [3]",
    ),
}


@pytest.mark.parametrize("case", [name for name in BAD if name != "empty xs"])
def test_bad_node(case):
    options, message = BAD[case]
    inputs = [
        value("a"),
        value("b"),
        value("i", (), TensorProto.INT64),
        value("vector", [3]),
    ]
    proto = gradient_model(nodes=PRODUCT, inputs=inputs, **options)
    before = proto.SerializeToString()
    with pytest.raises(ortops.ModelError) as raised:
        ortops.lower(proto)
    assert message in str(raised.value)
    assert "node 'gradient'" in str(raised.value)
    assert proto.SerializeToString() == before


def attribute_model(**attributes):
    gradient = node("Gradient", ["a"], ["da"], name="gradient", **attributes)
    return model([*PRODUCT, gradient], [value("a"), value("b")], ["da"])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"xs": ["a"]}, "missing required attribute 'y'"),
        ({"y": "y"}, "missing required attribute 'xs'"),
        ({"xs": ["a"], "y": "y", "ys": ["y"]}, "unknown attribute 'ys'; Gradient has xs, zs and y"),
        ({"xs": "a", "y": "y"}, "attribute 'xs' must be of type STRINGS, got STRING"),
        ({"xs": ["a"], "y": 1}, "attribute 'y' must be of type STRING, got INT"),
    ],
)
def test_bad_attributes(attributes, message):
    with pytest.raises(ortops.ModelError) as raised:
        ortops.lower(attribute_model(**attributes))
    assert f"Gradient node 'gradient': {message}" in str(raised.value)


def test_empty_xs():
    empty = onnx.AttributeProto(name="xs", type=onnx.AttributeProto.STRINGS)
    proto = attribute_model(xs=["a"], y="y")
    gradient = proto.graph.node[-1]
    gradient.attribute[0].CopyFrom(empty)
    with pytest.raises(ortops.ModelError, match="xs is empty; name at least one tensor"):
        ortops.lower(proto)


def test_operator_without_a_rule():
    nodes = [
        helper.make_node("Strange", ["a"], ["h"], name="odd", domain="com.example"),
        helper.make_node("Mul", ["h", "b"], ["y"]),
    ]
    proto = gradient_model(
        ["a"], "y", nodes, [value("a"), value("b")], imports=[("com.example", 1)]
    )
    with pytest.raises(ortops.UnsupportedError) as raised:
        ortops.lower(proto)
    message = str(raised.value)
    assert message.startswith("Strange node 'odd': there is no gradient rule for Strange")
    assert "Gradient node 'gradient'" in message


def test_node_without_a_name_goes_by_its_output():
    gradient = node("Gradient", ["a"], ["slope"], xs=["nothing"], y="y")
    proto = model([*PRODUCT, gradient], [value("a"), value("b")], ["slope"])
    with pytest.raises(
        ortops.ModelError,
        match="'slope': the graph has no tensor 'nothing', which is listed in xs",
    ):
        ortops.lower(proto)


@pytest.mark.parametrize("fed", ["a", "b"])
def test_gradient_in_a_branch_of_what_is_computed_around_it(fed):
    inner = helper.make_graph(
        [
            node("Gradient", [fed], ["slope"], xs=["a"], y="y"),
            helper.make_node("Identity", ["slope"], ["then"]),
        ],
        "inner",
        [],
        [value("then")],
    )
    middle = helper.make_graph(
        [
            helper.make_node("Mul", ["square", "a"], ["y"]),
            helper.make_node("If", ["c"], ["chosen"], then_branch=inner, else_branch=branch("b")),
        ],
        "middle",
        [],
        [value("chosen")],
    )
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["square"]),
        helper.make_node("If", ["c"], ["out"], then_branch=middle, else_branch=branch("a")),
    ]
    inputs = [value("a"), value("b"), value("c", kind=TensorProto.BOOL)]
    lowered = ortops.lower(model(nodes, inputs, ["out"]))
    at = {"a": 2, "b": 5}[fed]
    assert run(lowered, {"a": F(2), "b": F(5), "c": np.True_}) == [3 * at**2]
    assert run(lowered, {"a": F(2), "b": F(5), "c": np.False_}) == [2]


def branch(name):
    nodes = [helper.make_node("Identity", [name], ["else"])]
    return helper.make_graph(nodes, "branch", [], [value("else")])
