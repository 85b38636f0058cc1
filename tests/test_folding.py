"""Folding: what comes out of a graph is what onnxruntime computes of it, with fewer nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from running import run

from ortops import Tape, Tensor, op
from ortops.graph import convert
from ortops.graph.files.serialization import to_proto
from ortops.graph.folding import fold
from ortops.graph.shapes import infer_shapes

INT64 = np.iinfo(np.int64)
FOUND: dict[str, tuple[Callable[[Tensor], Any], set[str]]] = {
    "size": (lambda x: op.Gather(op.Shape(x), [1]), {"Shape", "Gather"}),
    "size beside an unknown one": (
        lambda x: op.Squeeze(op.Slice(op.Shape(x), [1], [2], [0]), [0]),
        {"Shape", "Slice", "Squeeze"},
    ),
    "all but the first": (lambda x: op.Shape(x, start=1), {"Shape"}),
    "half": (lambda x: op.Div(op.Gather(op.Shape(x), [2]), [2]), {"Div"}),
    "remainder": (lambda x: op.Mod(op.Shape(x, start=1) - 5, np.array([3, -3])), {"Mod", "Sub"}),
    "remainder, as in C": (
        lambda x: op.Mod(op.Shape(x, start=1) - 5, np.array([3, -3]), fmod=1),
        {"Mod", "Sub"},
    ),
    "floor": (
        lambda x: op.Cast(op.Floor(op.Cast(op.Shape(x, start=1), to=1) * np.float32(1.5)), to=7),
        {"Cast", "Floor", "Mul"},
    ),
    "backwards": (
        lambda x: op.Slice(np.arange(6).reshape(3, 2), [-1], [INT64.min + 1], [0], [-1]),
        {"Slice"},
    ),
    "backwards, part": (lambda x: op.Slice(np.arange(6), [4], [-6], [0], [-2]), {"Slice"}),
    "range": (lambda x: op.Range(op.Gather(op.Shape(x), 1), 9, 2), {"Range"}),
    "chosen": (
        lambda x: op.Where(op.Equal(op.Shape(x, start=1), [3, 1]), [7, 8], op.Shape(x, start=1)),
        {"Where", "Equal"},
    ),
    "expanded": (lambda x: op.Expand(op.Shape(x, start=2), [2, 3]), {"Expand"}),
    "product": (lambda x: op.ReduceProd(op.Shape(x, start=1), keepdims=0), {"ReduceProd"}),
    "reshaped": (
        lambda x: op.Reshape(op.Unsqueeze(op.Shape(x, start=1), [0]), [0, -1, 1]),
        {"Reshape"},
    ),
}


def both(build: Callable[[Tensor], Any]) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    with Tape(name="test") as tape:
        x = tape.input("x", np.float32, ["batch", 3, 4])
        tape.output(op.Identity(op.Cast(build(x), to=7)), "y")
        tape.output(x + 1, "z")
    model = convert.to_ir(tape.model())
    infer_shapes(model)
    before = to_proto(model)
    fold(model.graph)
    return before, to_proto(model)


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("case", FOUND)
def test_what_is_folded(case: str) -> None:
    build, gone = FOUND[case]
    before, after = both(build)
    assert gone <= operators(before)
    assert not gone & operators(after)
    feeds = {"x": np.zeros((2, 3, 4), np.float32)}
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert wanted.dtype == found.dtype
        np.testing.assert_array_equal(found, wanted)


STAYS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "unknown size": (lambda x: op.Gather(op.Shape(x), [0]) + 1, "Add"),
    "fed numbers": (lambda x: op.Floor(x), "Floor"),
    "many numbers": (lambda x: op.ConstantOfShape(np.array([2000])), "ConstantOfShape"),
    "many numbers of few": (lambda x: op.Expand(np.zeros(1, np.int64), [2000]), "Expand"),
    "what rounds differently on machines": (lambda x: op.Exp(np.ones(2, np.float32)), "Exp"),
    "negative division": (lambda x: op.Div(np.array([-7]), np.array([2])), "Div"),
    "remainder of a division by zero": (lambda x: op.Mod(np.array([7]), np.array([0])), "Mod"),
    "beyond an integer": (lambda x: op.Cast(np.array([1e30], np.float32), to=6), "Cast"),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_stays(case: str) -> None:
    build, kept = STAYS[case]
    assert kept in operators(both(build)[1])


def test_variables_and_outputs_stay() -> None:
    with Tape(name="test") as tape:
        step = tape.input("step", np.int64, [])
        tape.output(step + 1, "next")
        tape.output(op.Add(np.array(2), 3), "five")
    model = convert.to_ir(tape.model())
    assert not fold(model.graph)
    assert [node.op_type for node in model.graph if node.op_type != "Constant"] == ["Add", "Add"]


def test_graphs_inside_read_the_constant() -> None:
    with Tape(name="test") as tape:
        x = tape.input("x", np.float32, [2, 3])
        size = op.Gather(op.Shape(x), [1])
        tape.output(x + op.Cast(size, to=1), "y")
    proto = tape.model()
    inner = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [proto.graph.node[-1].input[0]], ["out"])],
        "branch",
        [],
        [onnx.helper.make_tensor_value_info("out", 1, None)],
    )
    condition = onnx.helper.make_tensor("condition", onnx.TensorProto.BOOL, [], [True])
    proto.graph.initializer.append(condition)
    size_name = next(n.output[0] for n in proto.graph.node if n.op_type == "Gather")
    inner.node[0].op_type, inner.node[0].input[0] = "Identity", size_name
    inner.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    proto.graph.node.append(
        onnx.helper.make_node("If", ["condition"], ["w"], then_branch=inner, else_branch=inner)
    )
    proto.graph.output.append(onnx.helper.make_tensor_value_info("w", 7, [1]))
    model = convert.to_ir(proto)
    assert isinstance(model, ir.Model)
    assert fold(model.graph)
    assert "Gather" not in operators(to_proto(model))
    feeds = {"x": np.zeros((2, 3), np.float32)}
    y, w = run(to_proto(model), feeds)
    np.testing.assert_array_equal(y, np.full((2, 3), 3, np.float32))
    assert w.tolist() == [3]
