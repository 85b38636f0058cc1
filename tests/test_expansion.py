"""Operators that are taken apart: by a definition, or by the function body in ONNX's schema."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from domain_models import model, node, value
from dot_test import Case, check, normal
from onnx import TensorProto, helper
from running import run

import ortops
from ortops.engine.check import check as check_model
from ortops.engine.lowering import lower_prepared, prepare, takes_python_kernel
from ortops.graph.autodiff import expansion
from ortops.graph.autodiff.registry import Definition, Table
from ortops.graph.autodiff.rules import RULES
from ortops.graph.autodiff.rules.table import BUILT_IN
from ortops.graph.convert import to_ir
from ortops.graph.files.serialization import to_proto
from ortops.graph.tensor import op

SIZE4, SIZE5 = np.array([2, 3, 4, 5]), np.array([2, 3, 2, 3, 4])
CASES = [
    Case("AffineGrid", [normal(2, 2, 3), SIZE4], constant=(1,), orders=2, epsilon=1),
    Case("AffineGrid", [normal(2, 2, 3), SIZE4], {"align_corners": 1}, (1,), epsilon=1),
    Case("AffineGrid", [normal(2, 3, 4), SIZE5], constant=(1,), epsilon=1),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_function_bodies(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def test_function_body_at_another_opset_than_the_models() -> None:
    nodes = [
        helper.make_node("AffineGrid", ["t", "n"], ["y"]),
        node("Gradient", ["t"], ["d"], xs=["t"], y="y"),
    ]
    for opset in (21, 23, 26):
        inputs = [value("t", [1, 2, 3]), value("n", [4], TensorProto.INT64)]
        lowered = ortops.lower(model(nodes, inputs, ["d"], opset=opset))
        (d,) = run(lowered, {"t": np.ones((1, 2, 3), np.float32), "n": np.array([1, 1, 2, 4])})
        np.testing.assert_allclose(d, [[[0, 0, 8], [0, 0, 8]]], atol=1e-6)
        assert not lowered.functions
        assert {entry.domain for entry in lowered.opset_import} <= {"", "ai.onnx.preview.training"}


def linear_attention(opset: int) -> onnx.ModelProto:
    attention = helper.make_node(
        "LinearAttention",
        ["x", "x", "x"],
        ["y", "state"],
        q_num_heads=2,
        kv_num_heads=2,
        name="mix",
    )
    attention.attribute.append(helper.make_attribute("update_rule", "linear"))
    nodes = [attention, node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    return model(nodes, [value("x", [1, 3, 4])], ["d"], opset=opset)


@pytest.mark.needs("onnx>=1.23")
@pytest.mark.needs("onnxruntime>=1.32")
def test_schemas_body_at_a_later_opset() -> None:
    """The body of opset 27 casts, and Cast takes more types from opset 28 on."""
    x = normal(1, 3, 4).astype(np.float32)
    q, g = x[0].reshape(3, 2, 2).transpose(1, 0, 2), np.ones((2, 3, 2))
    # y = scale · mask(q qᵀ) q, where token t sees those up to t
    mask, scale = np.tril(np.ones((3, 3))), 1 / np.sqrt(2)
    scores, from_above = mask * (q @ q.swapaxes(1, 2)), mask * (g @ q.swapaxes(1, 2))
    d = scale * (scores.swapaxes(1, 2) @ g + from_above @ q + from_above.swapaxes(1, 2) @ q)
    for opset in (27, 28):
        (found,) = run(ortops.lower(linear_attention(opset)), {"x": x})
        np.testing.assert_allclose(found[0], d.transpose(1, 0, 2).reshape(3, 4), rtol=1e-5)


@pytest.mark.needs("onnx>=1.23")
def test_schemas_body_of_operators_that_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = expansion._signature
    monkeypatch.setattr(
        expansion, "_signature", lambda name, opset: (before(name, opset), name == "Scan" and opset)
    )
    message = (
        "LinearAttention node 'mix': its function body uses Scan of opset 27, which "
        "differs from that of the model's opset 28; convert the model to opset 27"
    )
    with pytest.raises(ortops.errors.UnsupportedError, match=message):
        ortops.lower(linear_attention(28))


def twice_model(x_node: onnx.NodeProto) -> onnx.ModelProto:
    nodes = [x_node, node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    return model(nodes, [value("x", [2])], ["d"], imports=[("com.example", 1)])


def test_definition_of_ones_own() -> None:
    table = Table()

    @table.definition("Cubed", domain="com.example")
    def cubed(x, *, factor=1.0):
        return op.Mul(op.Mul(x, x), x) * factor

    cubed_node = helper.make_node("Cubed", ["x"], ["y"], domain="com.example", factor=2.0)
    rules = RULES.below(table)
    lowered = lower_prepared(prepare(to_ir(twice_model(cubed_node)), rules), rules=rules)
    (d,) = run(to_proto(lowered), {"x": np.array([1, 2], np.float32)})
    np.testing.assert_allclose(d, [6, 24])


def test_no_definition_and_no_rule() -> None:
    unheard = helper.make_node("Unheard", ["x"], ["y"], name="u", domain="com.example")
    with pytest.raises(ortops.UnsupportedError, match=r"Unheard node 'u': there is no gradient"):
        ortops.lower(twice_model(unheard))


def test_inside_a_branch() -> None:
    def branch(name: str, op_type: str) -> onnx.GraphProto:
        inner = helper.make_node(op_type, ["x"], [name], domain="com.microsoft")
        return helper.make_graph([inner], name, [], [value(name, [2])])

    nodes = [
        helper.make_node(
            "If",
            ["c"],
            ["y"],
            then_branch=branch("t", "Gelu"),
            else_branch=branch("e", "QuickGelu"),
        ),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    inputs = [value("c", [], TensorProto.BOOL), value("x", [2])]
    lowered = ortops.lower(model(nodes, inputs, ["d"], imports=[("com.microsoft", 1)]))
    for condition, expected in ((True, [0.5, 1.0833155]), (False, [0.5, 1.0677])):
        (d,) = run(lowered, {"c": np.array(condition), "x": np.array([0, 1], np.float32)})
        if condition:
            np.testing.assert_allclose(d, expected, rtol=1e-5)
        else:
            s = 1 / (1 + np.exp(-1.702))
            np.testing.assert_allclose(d, [0.5, s + 1.702 * s * (1 - s)], rtol=1e-5)


DEFINITIONS = {key: rule for key, rule in BUILT_IN.rules.items() if isinstance(rule, Definition)}
STANDARD = sorted(op_type for domain, op_type in DEFINITIONS if not domain)


@pytest.mark.parametrize(
    "op_type", [name for name in STANDARD if name != "SimplifiedLayerNormalization"]
)
def test_definition_follows_schema(op_type: str) -> None:
    attributes = onnx.defs.get_schema(op_type, 26).attributes
    definition = DEFINITIONS["", op_type]
    assert definition.attributes == set(attributes)
    assert definition.quantizes or not definition.keep(ir.Node("", op_type, []))


def test_fused_operators_have_definitions() -> None:
    assert {name for domain, name in DEFINITIONS if domain == "com.microsoft"} >= {
        "Attention",
        "BiasGelu",
        "FastGelu",
        "FusedConv",
        "FusedGemm",
        "FusedMatMul",
        "Gelu",
        "MatMulNBits",
        "MultiHeadAttention",
        "QuickGelu",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    }


def test_check_takes_apart_too() -> None:
    fused = helper.make_node("BiasGelu", ["x", "b"], ["y"], "gelu", domain="com.microsoft")
    whole = model([fused], [value("x", [2, 3])], ["y"], imports=[("com.microsoft", 1)])
    whole.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "b"))
    report = check_model(whole)
    assert report.problems == []
    assert list(report.parameters) == ["b"]
    whole.graph.node[0].attribute.append(helper.make_attribute("slope", 2.0))
    (problem,) = check_model(whole).problems
    assert problem.startswith("BiasGelu node 'gelu': there is no gradient for attribute 'slope'")


def test_whether_nodes_were_replaced() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 23]>
        m (float[1, 2, 3, 4] x, float[1, 3, 2] c) => (float[1, 2, 3, 4] y, float[1, 3, 2] z)
        { y = RotaryEmbedding (x, c, c)  z = Relu (c) }"""
    )
    for place, expected in enumerate((True, False)):
        work = to_ir(model)
        assert expansion.expand_nodes(work, [[*work.graph][place]], RULES) is expected


def test_optimizers_of_unknown_types_have_no_python_kernel() -> None:
    known, unknown = ir.Value(name="a", type=ir.TensorType(ir.DataType.FLOAT)), ir.Value(name="b")
    for inputs, expected in (([known], True), ([known, unknown], False), ([known, None], False)):
        assert takes_python_kernel(ir.Node("", "Adam", inputs)) is expected
