"""What can be told of shapes where onnx's own inference tells nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import run

import ortops
from ortops import Tape
from ortops.graph.convert import to_ir
from ortops.graph.shapes import infer_shapes

BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64


def inferred(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], name: str
) -> list[int | str | None] | None:
    """Returns the shape of a value, None where the rank is unknown."""
    work = to_ir(model(nodes, inputs, [name], imports=[("ai.onnx.ml", 3)]))
    infer_shapes(work)
    shape = next(output for output in work.graph.outputs if output.name == name).shape
    if shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in shape]


def looped(*nodes: onnx.NodeProto) -> onnx.NodeProto:
    """Returns a loop over nodes that make the state ``out`` of ``state``."""
    body = helper.make_graph(
        [*nodes, helper.make_node("Identity", ["go_on"], ["goes_on"])],
        "body",
        [value("i", [], INT64), value("go_on", [], BOOL), value("state", None)],
        [value("goes_on", [], BOOL), value("out", None), value("out", None)],
    )
    return helper.make_node("Loop", ["times", "", "x"], ["y", "all"], body=body)


TIMES = value("times", [], INT64)
X = value("x", ["n", 3])


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        ([helper.make_node("Sin", ["state"], ["out"])], ["n", 3]),
        ([helper.make_node("Add", ["state", "x"], ["out"])], ["n", 3]),
        ([helper.make_node("Concat", ["state", "x"], ["out"], axis=1)], ["n", None]),
        ([helper.make_node("Concat", ["state", "state"], ["out"], axis=0)], [None, 3]),
        ([helper.make_node("Unsqueeze", ["state", "zero"], ["out"])], None),
        ([helper.make_node("Transpose", ["state"], ["out"])], [None, None]),
    ],
    ids=["same", "sum", "grows", "doubles", "gets-axes", "turns"],
)
def test_states_of_a_loop(
    nodes: list[onnx.NodeProto], shape: list[int | str | None] | None
) -> None:
    zero = helper.make_node("Constant", [], ["zero"], value_ints=[0])
    assert inferred([zero, looped(*nodes)], [TIMES, X], "y") == shape
    stacked = None if shape is None else [None, *shape]
    assert inferred([zero, looped(*nodes)], [TIMES, X], "all") == stacked


def test_a_loop_in_a_loop() -> None:
    inner = looped(helper.make_node("Sin", ["state"], ["out"]))
    inner.input[2], inner.output[0], inner.output[1] = "state", "out", "inner_all"
    assert inferred([looped(inner)], [TIMES, X], "y") == ["n", 3]


def test_branches_have_the_sizes_on_which_they_agree() -> None:
    def chosen(then: str, other: str) -> list[int | str | None] | None:
        axes = helper.make_node("Constant", [], ["axes"], value_ints=[0])
        branches = {
            name: helper.make_graph(
                [helper.make_node("Unsqueeze", [x, "axes"], [name])], name, [], [value(name, None)]
            )
            for name, x in (("then_branch", then), ("else_branch", other))
        }
        choice = helper.make_node("If", ["flag"], ["y"], **branches)
        inputs = [value("flag", [], BOOL), X, value("z", [5, 3]), value("v", [3])]
        return inferred([axes, choice], inputs, "y")

    assert chosen("x", "x") == [1, "n", 3]
    assert chosen("x", "z") == [1, None, 3]
    assert chosen("x", "v") is None


@pytest.mark.parametrize(("axis", "shape"), [(0, [4, "n", 3]), (-1, ["n", 3, 4])])
def test_what_a_scan_stacks(axis: int, shape: list[int | str]) -> None:
    nodes = [
        helper.make_node("Constant", [], ["axes"], value_ints=[0]),
        helper.make_node("Unsqueeze", ["scalar", "axes"], ["vector"]),
        helper.make_node("Mul", ["vector", "x"], ["out"]),
    ]
    body = helper.make_graph(nodes[1:], "body", [value("scalar", None)], [value("out", None)])
    scan = helper.make_node(
        "Scan", ["s"], ["y"], num_scan_inputs=1, scan_output_axes=[axis], body=body
    )
    assert inferred([nodes[0], scan], [value("s", [4]), X], "y") == shape


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [
        ("Scaler", {"offset": [1.0, -2.0, 0.5], "scale": [2.0, 0.5, 1.0]}),
        ("Normalizer", {"norm": "L2"}),
        ("Imputer", {"imputed_value_floats": [1.0], "replaced_value_float": 0.0}),
    ],
)
@pytest.mark.parametrize("symbolic", [False, True])
def test_a_network_behind_a_scaler(
    operator: str, attributes: dict[str, object], symbolic: bool
) -> None:
    """The nodes are those that skl2onnx writes for a scaler and an MLPClassifier."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 3)).astype(np.float32)
    w1, w2 = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4, 2)))
    scaler = helper.make_node(operator, ["x"], ["variable"], domain="ai.onnx.ml", **attributes)
    nodes = [
        scaler,
        helper.make_node("Cast", ["variable"], ["cast_input"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["cast_input", "w1"], ["mul_result"]),
        helper.make_node("Tanh", ["mul_result"], ["next_activations"]),
        helper.make_node("MatMul", ["next_activations", "w2"], ["y"]),
        node("Gradient", ["w1", "w2"], ["d1", "d2"], xs=["w1", "w2"], y="y"),
    ]
    inputs = [value("x", [None, 3] if symbolic else [5, 3])]
    weights = {"w1": w1, "w2": w2}
    ml = [("ai.onnx.ml", 3)]
    built = model(nodes, inputs, ["variable", "d1", "d2"], initializers=weights, imports=ml)
    scaled, d1, d2 = run(ortops.lower(built), {"x": x})
    hidden = np.tanh(scaled.astype(float) @ w1)
    slopes = np.ones((5, 2)) @ w2.T * (1 - hidden**2)
    np.testing.assert_allclose(d2, hidden.T @ np.ones((5, 2)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(d1, scaled.T.astype(float) @ slopes, rtol=1e-5, atol=1e-6)


def test_the_type_behind_a_scaler_is_float32() -> None:
    attributes = {"offset": [0.0], "scale": [1.0]}
    scaler = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", **attributes)
    given = model([scaler], [value("x", [2, 3], INT64)], ["y"], imports=[("ai.onnx.ml", 3)])
    work = to_ir(given)
    infer_shapes(work)
    (output,) = work.graph.outputs
    assert output.dtype is not None
    assert output.dtype.name == "FLOAT"
    (kept,) = work.graph
    assert (kept.domain, kept.op_type) == ("ai.onnx.ml", "Scaler")
    assert sorted(kept.attributes) == ["offset", "scale"]


def sizes_of(model: onnx.ModelProto) -> dict[str, list[int]]:
    found = to_ir(model)
    infer_shapes(found)
    values = (value for node in found.graph for value in node.outputs)
    return {v.name or "": list(v.shape.numpy()) for v in values if v.shape is not None}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("opset", [11, 19, 21, 22])
def test_windows_in_the_padding_do_not_count(opset: int, counted: int, recorded: bool) -> None:
    """On the first axis a last window would start behind the input; on the second one reaches out.

    Poolings behind each other: the sizes of the second follow from those of the first.
    """
    given = {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}
    if opset >= 19:
        given["count_include_pad"] = counted
    nodes = [
        helper.make_node("AveragePool", ["x"], ["a"], name="a", pads=[1, 0, 1, 0], **given),
        helper.make_node("AveragePool", ["a"], ["b"], name="b", pads=[1, 1, 1, 1], **given),
        helper.make_node("Identity", ["b"], ["c"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pools",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 3, 6])],
        [helper.make_tensor_value_info("c", TensorProto.FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    if recorded:
        model = onnx.shape_inference.infer_shapes(model)
    x = np.ones((1, 2, 3, 6), np.float32)
    expected = [1, 2, 2, 3], [1, 2, 2, 2]
    symbolic = onnx.ModelProto()
    symbolic.CopyFrom(model)
    for dim in symbolic.graph.input[0].type.tensor_type.shape.dim:
        dim.dim_param = f"d{dim.dim_value}"
    del symbolic.graph.value_info[:]
    symbolic.graph.output[0].type.tensor_type.ClearField("shape")
    assert list(run(symbolic, {"x": x})[0].shape) == expected[1]  # as onnxruntime counts
    assert sizes_of(model) == {"a": expected[0], "b": expected[1], "c": expected[1]}


def test_absent_outputs_get_no_shape() -> None:
    """onnx gives them all one name."""
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["", "", "y"], hidden_size=2)
    inputs = [value("x", [1, "n", 3]), value("w", [1, 8, 3]), value("r", [1, 8, 2])]
    work = to_ir(model([lstm], inputs, ["y"]))
    node_of_lstm = work.graph[0]
    infer_shapes(work)
    node_of_lstm.outputs[2].shape = None
    Tape(work.graph).infer(node_of_lstm)
    y = node_of_lstm.outputs[2].shape
    assert y is not None
    assert y[0] == 1
    assert [output.shape for output in node_of_lstm.outputs[:2]] == [None, None]


def test_a_map_whose_type_nobody_knows_does_not_end_the_process() -> None:
    """As onnx does at it."""
    nodes = [
        helper.make_node("Own", ["x"], ["map"], domain="own"),
        helper.make_node(
            "DictVectorizer", ["map"], ["y"], domain="ai.onnx.ml", int64_vocabulary=[1]
        ),
    ]
    imports = [("ai.onnx.ml", 3), ("own", 1)]
    work = to_ir(model(nodes, [value("x", [2])], ["y"], imports=imports))
    infer_shapes(work)
    assert [node.op_type for node in work.graph] == ["Own", "DictVectorizer"]
    assert [output.type for output in work.graph.node(0).outputs] == [None]


def test_nodes_are_inferred_one_by_one_where_onnx_refuses_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = helper.make_node("Own", ["x"], ["z"], domain="own")
    made = model([own, helper.make_node("Relu", ["x"], ["y"])], [value("x", [2, 3])], ["y"])
    work = to_ir(made)
    assert "own" not in work.graph.opset_imports
    infer_shapes(work)
    (output,) = work.graph.outputs
    assert output.shape == [2, 3]
    assert "onnx's shape inference failed: " in caplog.text
    assert "No opset import for domain own" in caplog.text
