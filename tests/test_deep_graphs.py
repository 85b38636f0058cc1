"""Graphs of 5,000 nodes in a row: nothing in ortops may recurse along a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from violations import all_violations

import ortops
from ortops.graph.squashing import partly_squashed, squashed

DEPTH = 5000
Repeat = Callable[[str, str], list[onnx.NodeProto]]


def node(op_type: str, *inputs: str, **attributes: Any) -> Repeat:
    """Repeats a node that reads the last value where an input is ``"_"``."""

    def repeat(before: str, after: str) -> list[onnx.NodeProto]:
        read = [before if name == "_" else name for name in inputs]
        return [helper.make_node(op_type, read, [after], **attributes)]

    return repeat


KINDS: dict[str, Repeat] = {
    "a weight that is read often": node("Add", "_", "w"),
    "products with a weight": node("Mul", "_", "ones"),
    "products with a number": node("Mul", "_", "one"),
    "squares": node("Mul", "_", "_"),
    "maxima": node("Max", "_", "_"),
    "concatenations": node("Concat", "_", axis=1),
    "copies": node("Identity", "_"),
    "Softmax": node("Softmax", "_"),
}

FOUND = {
    "products with a number": "probabilities",
    "squares": "probabilities",
    "maxima": "probabilities",
    "concatenations": "sigmoid",
    "copies": "sigmoid",
    "Softmax": "softmax",
}
"""What the end of such a chain holds, if it is known."""


def model(repeat: Repeat, last: str = "Identity") -> onnx.ModelProto:
    """Returns a chain between a Sigmoid and an output."""
    nodes = [helper.make_node("Add", ["x", "w"], ["s"]), helper.make_node("Sigmoid", ["s"], ["v0"])]
    for index in range(DEPTH):
        nodes += repeat(f"v{index}", f"v{index + 1}")
    nodes += [helper.make_node("Erf", ["s"], ["e"]), helper.make_node("Mul", ["s", "e"], ["f"])]
    nodes.append(helper.make_node("Add", [f"v{DEPTH}", "f"], ["g"]))
    nodes.append(helper.make_node(last, ["g" if last == "Identity" else f"v{DEPTH}"], ["y"]))
    arrays = {
        "w": np.linspace(0.001, 0.002, 4, dtype=np.float32),
        "ones": np.linspace(1, 1.0001, 4, dtype=np.float32),
        "one": np.float32(1),
    }
    read = {name for each in nodes for name in each.input}
    tensors = [numpy_helper.from_array(a, name) for name, a in arrays.items() if name in read]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy")
    graph = helper.make_graph(nodes, "deep", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_logits_are_looked_for_in_deep_graphs() -> None:
    with all_violations() as check:
        for name, repeat in KINDS.items():
            with check(name):
                graph = ir.from_proto(model(repeat, last="Relu")).graph
                (end,) = (each.inputs[0] for each in graph if each.op_type == "Relu")
                assert end is not None
                found = squashed(end)
                assert (None if found is None else found.kind) == FOUND.get(name)
                partly_squashed(end)


@pytest.mark.slow
def test_deep_graphs_are_trained() -> None:
    x = np.ones((2, 4), np.float32)
    with all_violations() as check:
        for name in ("a weight that is read often", "products with a weight", "squares"):
            with check(name):
                given = model(KINDS[name])
                trainable = ortops.build_training_model(
                    given, loss="MeanSquaredError", optimizer="Adam", trainable=["w"]
                )
                session = ortops.TrainingSession(trainable)
                session.step({"x": x, "targets": np.zeros_like(x)})
    assert sys.getrecursionlimit() < DEPTH
