"""Graphs of 5,000 nodes in a row: nothing in ortops may recurse along a graph."""

from __future__ import annotations

import sys
from collections import Counter, UserList
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from violations import all_violations

import ortops
from ortops import lora
from ortops.engine.check import check
from ortops.engine.execution import part
from ortops.graph import inference
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


@pytest.mark.slow
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


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["a weight that is read often", "products with a weight", "squares"]
)
def test_deep_graphs_are_trained(kind: str) -> None:
    assert sys.getrecursionlimit() < DEPTH
    x = np.ones((2, 4), np.float32)
    trainable = ortops.build_training_model(
        model(KINDS[kind]), loss="MeanSquaredError", optimizer="Adam", trainable=["w"]
    )
    ortops.TrainingSession(trainable).step({"x": x, "targets": np.zeros_like(x)})


def of_many_weights(count: int, *, wide: bool) -> onnx.ModelProto:
    """Returns a model of as many weights, one after another or summed by one node."""
    weights = [f"w{index}" for index in range(count)]
    ends = [f"h{index}" for index in range(count)]
    reads = ["x"] * count if wide else ["x", *ends[:-1]]
    nodes = [
        helper.make_node("Mul", [read, weight], [end])
        for read, weight, end in zip(reads, weights, ends, strict=True)
    ]
    nodes.append(
        helper.make_node("Sum", ends, ["y"]) if wide else node("Neg", "_")(ends[-1], "y")[0]
    )
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy")
    tensors = [
        numpy_helper.from_array(np.linspace(1, 1.001, 4, dtype=np.float32), w) for w in weights
    ]
    graph = helper.make_graph(nodes, "many", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def trained(model: onnx.ModelProto) -> ortops.TrainingSession:
    """Returns a session of a model that has been built, opened as a user does."""
    return ortops.TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    )


def calls(model: onnx.ModelProto) -> Counter[CodeType]:
    """Returns how often building and opening a model calls functions; steps of generators count."""
    counted: Counter[CodeType] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counted[frame.f_code] += 1

    sys.setprofile(count)
    try:
        trained(model)
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.slow
def test_time_is_linear_in_the_number_of_weights() -> None:
    """No function is called more often than 4 times as often for 4 times as many weights."""
    calls(of_many_weights(2, wide=True))  # what is called once in a process
    with all_violations() as check:
        for wide in (True, False):
            few, many = (calls(of_many_weights(count, wide=wide)) for count in (50, 200))
            for code, number in many.items():
                with check(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"):
                    assert number <= 4 * few[code] + 100, f"{few[code]} calls, then {number}"


def of_many_nodes(count: int) -> onnx.ModelProto:
    """Returns a chain of as many layers, each of which passes rewrite, on rows of any number."""
    nodes: list[onnx.NodeProto] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for n in range(count):
        nodes += [
            helper.make_node("MatMul", [f"h{n}", f"w{n}"], [f"m{n}"]),
            helper.make_node("Add", [f"m{n}", f"b{n}"], [f"a{n}"]),
            helper.make_node("Sigmoid", [f"a{n}"], [f"s{n}"]),
            helper.make_node("Mul", [f"a{n}", f"s{n}"], [f"h{n + 1}"]),
        ]
        arrays[f"w{n}"] = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
        arrays[f"b{n}"] = np.linspace(n, n + 1, 4, dtype=np.float32)
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    ends = (("h0", ["n", 4]), (f"h{count}", ["n", 4]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in ends)
    graph = helper.make_graph(nodes, "layers", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def of_many_branches(count: int) -> onnx.ModelProto:
    """Returns a chain of as many layers of ten nodes in two branches, with normalization."""
    nodes: list[onnx.NodeProto] = []
    arrays = {"split": np.array([-1, 2, 2]), "join": np.array([-1, 4])}

    def add(op_type: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op_type, inputs, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    def weight(*shape: int) -> str:
        name = f"w{len(arrays)}"
        arrays[name] = np.linspace(len(arrays), len(arrays) + 1, shape[0] ** len(shape))
        arrays[name] = arrays[name].astype(np.float32).reshape(shape)
        return name

    h = "x"
    for _ in range(count):
        normal = add("LayerNormalization", h, weight(4), weight(4), axis=-1)
        left = add("Relu", add("Add", add("MatMul", normal, weight(4, 4)), weight(4)))
        split = add("Reshape", add("Reshape", normal, "split"), "join")
        right = add("Add", add("MatMul", split, weight(4, 4)), weight(4))
        h = add("Add", h, add("Add", left, right))
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", h))
    graph = helper.make_graph(nodes, "branches", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "ends"), [(of_many_nodes, 100), (of_many_branches, 400)])
def test_time_is_linear_in_the_number_of_nodes(
    of: Callable[[int], onnx.ModelProto], ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No function is called more often than 4 times as often for 4 times as many layers.

    But for the first and last layers, of which so many calls are fewer than of others.

    Nor are more inputs or outputs looked at where one is searched for, of which calls tell nothing.
    """
    searched = 0

    def here(function: Callable[[], object]) -> object:
        return function()

    def search(self: UserList[object], *arguments: Any) -> object:
        nonlocal searched
        searched += len(self.data)
        return self.data.index(*arguments)

    monkeypatch.setattr(part, "run_uninterrupted", here)  # a thread of its own makes the graph
    monkeypatch.setattr(UserList, "index", search)
    monkeypatch.setattr(inference, "_inferred", {})  # a full one would be emptied within the test
    trained(of(100))  # what is called once in a process, and inferred once for equal nodes
    found = []
    for count in (25, 100):
        searched = 0
        found.append((calls(of(count)), searched))
    (few, looked_at), (many, looked_at_many) = found
    assert looked_at_many <= 4 * looked_at + ends
    with all_violations() as check:
        for code, number in many.items():
            with check(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"):
                assert number <= 4 * few[code] + ends, f"{few[code]} calls, then {number}"


def between_layers(repeat: Repeat, last: bool = True) -> onnx.ModelProto:
    """Returns a chain behind a layer and a Sigmoid, and before another layer or the output."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["v0"]),
    ]
    for index in range(DEPTH):
        nodes += repeat(f"v{index}", f"v{index + 1}")
    end = f"v{DEPTH}"
    nodes += [helper.make_node(*(("MatMul", [end, "b"]) if last else ("Identity", [end])), ["y"])]
    arrays = {"a": np.eye(4, dtype=np.float32), "b": np.full((4, 4), 0.5, np.float32)}
    tensors = [numpy_helper.from_array(arrays[name], name) for name in ("ab" if last else "a")]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
    graph = helper.make_graph(nodes, "deep", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.slow
def test_losses_read_the_logits_of_nested_concatenations() -> None:
    given = between_layers(KINDS["concatenations"], last=False)
    x, targets = np.array([[3, -2, 0, 1]], np.float32), np.array([[1, 0, 0, 1]], np.float32)
    expected = np.mean(np.logaddexp(0, x) - targets * x)
    for loss in ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"):
        session = ortops.TrainingSession(
            ortops.build_training_model(given, loss=loss, optimizer="SGD", trainable=["a"])
        )
        found = session.step({"x": x, "targets": targets})["loss"]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_other_entries_take_deep_graphs() -> None:
    given = between_layers(KINDS["squares"])
    x = np.ones((2, 4), np.float32)
    adapted = lora.add(given, rank=1)
    pruned = ortops.surgery.prune(given, ratio=0.5)
    other = ortops.surgery.replace_head(given, classes=3)
    y, pullback = ortops.Function(given).vjp(x)
    assert y.shape == pullback(y)[0].shape == (2, 4)
    assert check(given).problems == []
    assert len(lora.merge(adapted).graph.node) >= DEPTH
    assert ortops.Function(other)(x).shape == (2, 3)
    assert ortops.Function(pruned)(x).shape == (2, 4)
