"""What a start computes: one parse, one shape inference, and nothing twice."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from violations import all_violations

import ortops
from models.resnet import resnet
from ortops.engine.trainable import handed_graph, step_graph
from ortops.graph import convert
from ortops.graph.files import validation
from ortops.graph.files.held_file import HeldFile
from ortops.graph.passes.blocked.kernels import block_size

COUNTED = {
    "inferred": (onnx.shape_inference, "infer_shapes"),
    "parsed": (ir, "from_proto"),
    "written": (ir, "to_proto"),
    "opened": (onnxruntime.InferenceSession, "__init__"),
    "validated": (validation, "_check_nodes"),
    "sorted": (ir.Graph, "sort"),
}
"""What takes time proportional to a whole graph."""


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the calls for models of more than three nodes, which are no parts of an update."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            graph = getattr(args[0], "graph", args[0])
            nodes = graph.node if isinstance(graph, onnx.GraphProto) else graph
            found[name] += not isinstance(nodes, Sized) or len(nodes) > 3  # a session has no size
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, attribute) in COUNTED.items():
            patch.setattr(owner, attribute, counted(name, getattr(owner, attribute)))
        yield found


def model(
    *,
    repeated: int = 2,
    opset: int = 21,
    exported: bool = False,
    steps: bool = False,
    sequence: bool = False,
) -> onnx.ModelProto:
    """Returns layers behind a Reshape to rows, whose number is computed from a shape.

    Args:
        repeated: The number of layers.
        opset: The version of operators.
        exported: Whether the file has types of all tensors, as those of exporters.
        steps: Whether a Slice has steps that are computed from a constant, as TorchScript's.
        sequence: Whether the result is an element of a sequence.
    """
    nodes = [
        helper.make_node("Unsqueeze", ["number", "zero"], ["steps"]),
        helper.make_node("Shape", ["x"], ["all_sizes"]),
        helper.make_node(
            "Slice", ["all_sizes", "zero", "one", *(["zero", "steps"] if steps else [])], ["first"]
        ),
        helper.make_node("Concat", ["first", "wide"], ["sizes"], axis=0),
        helper.make_node("Reshape", ["x", "sizes"], ["h0"]),
    ]
    for number in range(repeated):
        nodes += [
            helper.make_node("MatMul", [f"h{number}", "w"], [f"m{number}"]),
            helper.make_node("Tanh", [f"m{number}"], [f"h{number + 1}"]),
        ]
    nodes += [
        helper.make_node("SplitToSequence", [f"h{repeated}", "wide"], ["parts"], axis=1),
        helper.make_node("SequenceAt", ["parts", "index"], ["part"]),
    ][: 2 * sequence]
    last = "part" if sequence else f"h{repeated}"
    nodes.append(helper.make_node("Transpose", [last], ["y"], perm=[0, 1]))
    arrays = {
        "w": np.linspace(-1, 1, 16 * 16, dtype=np.float32).reshape(16, 16),
        "zero": np.array([0]),
        "one": np.array([1]),
        "wide": np.array([16]),
        "number": np.array(1),
        "index": np.array(0),
    }
    arrays["table"] = np.arange(300)  # which could be sizes
    nodes.append(helper.make_node("Identity", ["table"], ["many"]))
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "layers", [x], [y], tensors)
    result = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return onnx.shape_inference.infer_shapes(result) if exported else result


def trainable(given: onnx.ModelProto) -> onnx.ModelProto:
    return ortops.build_training_model(given, loss="MeanSquaredError", optimizer="Adam")


def batch(rows: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    x = np.linspace(-1, 2, rows * 16, dtype=np.float32)
    return {"x": x.reshape(rows, 4, 4), "targets": x.reshape(rows, 16)}


def test_a_start_computes_nothing_twice(tmp_path: Path) -> None:
    """What was built is neither read nor inferred again, but for batches where a step gains."""
    path = tmp_path / "trainable.onnx"
    ortops.TrainingSession(trainable(model())).step(batch())  # finds out what onnxruntime has
    rows = {
        "without types": (model(), {"written": 1}, 0),
        "with types": (model(exported=True), {"written": 1}, 1),
        "of an older opset": (model(opset=20), {"written": 2}, 0),
        "with steps": (model(steps=True), {"written": 1}, 1),
        "with a sequence": (model(sequence=True), {"written": 1}, 1),
    }
    with all_violations() as check:
        for name, (given, expected, sized) in rows.items():
            with check(name):
                with counting() as building:
                    built = trainable(given)
                assert +building == Counter(expected, validated=1, parsed=1, inferred=1)
                with counting() as starting:
                    ortops.TrainingSession(built).step(batch())
                # What is validated is the initialization, which no digest includes.
                once = Counter(inferred=sized, opened=1, written=1 + sized, validated=1)
                assert +starting == +once
                ortops.save_model(built, path)
                for source in (built, path):
                    with counting() as starting:
                        ortops.TrainingSession(source).step(batch())
                    assert +starting == once + Counter(parsed=1, inferred=1, written=1, validated=2)


@pytest.mark.slow
@pytest.mark.skipif(block_size() is None, reason="onnxruntime has no such kernels here")
def test_a_step_in_blocks_is_written_once() -> None:
    """Merging equal nodes of a convolutional network compares attributes, and writes no model."""
    built = ortops.build_training_model(
        resnet(image=(3, 8, 8)), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    feeds = {"images": np.ones((2, 3, 8, 8), np.float32), "labels": np.zeros(2, np.int64)}
    ortops.TrainingSession(built).step(feeds)  # finds out what onnxruntime has
    with counting() as starting:
        ortops.TrainingSession(built).step(feeds)
    assert +starting == Counter(validated=3, parsed=1, inferred=2, opened=1, written=3)


def test_the_number_of_nodes_changes_no_count() -> None:
    few, many = (model(repeated=n) for n in (2, 60))
    found = []
    for given in (few, many):
        with counting() as counts:
            ortops.TrainingSession(trainable(given)).step(batch())
        found.append(+counts)
    assert found[0] == found[1]


@pytest.mark.skipif(os.name == "nt", reason="open files cannot be replaced there")
def test_building_reads_each_weight_of_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Counter[int] = Counter()
    read = HeldFile.pieces

    def counted(self: HeldFile, begin: int, end: int, most: int) -> Iterator[bytes]:
        found[end - begin] += 1
        return read(self, begin, end, most)

    given = dense(np.random.default_rng(0))
    ortops.save_model(given, tmp_path / "model.onnx")
    monkeypatch.setattr(HeldFile, "pieces", counted)
    settings: dict[str, Any] = {"loss": "MeanSquaredError", "optimizer": "Adam"}
    built = ortops.build_training_model(tmp_path / "model.onnx", **settings)
    assert [found[4 * 32 * size] for size in (16, 32)] == [1, 1]
    assert built == ortops.build_training_model(given, **settings)


def dense(rng: np.random.Generator) -> onnx.ModelProto:
    """Returns two layers with weights of more than a kilobyte."""
    with ortops.Tape(name="dense") as tape:
        x = tape.input("x", np.float32, ["n", 32])
        shapes = {"w0": (32, 32), "w1": (32, 16)}
        w0, w1 = (
            tape.initializer(name, rng.standard_normal(shape, np.float32))
            for name, shape in shapes.items()
        )
        tape.output(ortops.op.Tanh(x @ w0) @ w1, "y")
    return tape.model()


def changes() -> dict[str, Callable[[onnx.ModelProto], object]]:
    """Returns what a caller may do to a model between building it and opening it."""

    def tensor(name: str, array: np.ndarray[Any, Any]) -> Callable[[onnx.ModelProto], object]:
        def change(proto: onnx.ModelProto) -> None:
            (found,) = (each for each in proto.graph.initializer if each.name == name)
            found.CopyFrom(numpy_helper.from_array(array, name))

        return change

    def node(name: str, change: Callable[[onnx.NodeProto], object]) -> Any:
        return lambda proto: change(next(n for n in proto.graph.node if name in n.output))

    def graph(change: Callable[[onnx.GraphProto], object]) -> Any:
        return lambda proto: change(proto.graph)

    def algorithm(change: Callable[[onnx.GraphProto], object]) -> Any:
        return lambda proto: change(proto.training_info[0].algorithm)

    def transpose(found: onnx.NodeProto) -> None:
        found.attribute[0].CopyFrom(helper.make_attribute("perm", [1, 0]))

    def renamed(found: onnx.GraphProto) -> None:
        for each in found.node:
            for names in (each.input, each.output):
                names[:] = [{"m0": "m1", "m1": "m0"}.get(name, name) for name in names]

    copied = helper.make_node("Identity", ["y"], ["z"])
    body = [helper.make_node("Identity", ["a"], ["b"])]
    function = helper.make_function("own", "F", ["a"], ["b"], body, list(model().opset_import))
    return {
        "an operator": node("h1", lambda found: setattr(found, "op_type", "Shape")),
        "an attribute": node("y", transpose),
        "an input of a node": node("m1", lambda found: found.input.__setitem__(0, "h0")),
        "a node more": graph(lambda found: found.node.append(copied)),
        "two names": graph(renamed),
        "small values": tensor("wide", np.array([8])),
        "many values": tensor("table", np.arange(1, 301)),
        "the shape of a weight": tensor("w", np.ones((16, 8), np.float32)),
        "the type of a weight": tensor("w", np.ones((16, 16))),
        "the rows of an input": graph(
            lambda found: found.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 8)
        ),
        "a declared shape": graph(
            lambda found: found.output[0].CopyFrom(
                helper.make_tensor_value_info("y", TensorProto.FLOAT, [5, 16])
            )
        ),
        "the version of operators": lambda proto: setattr(proto.opset_import[0], "version", 22),
        "a function": lambda proto: proto.functions.append(function),
        "a node of the algorithm": algorithm(lambda found: found.node.append(copied)),
        "a type in the algorithm": algorithm(
            lambda found: found.value_info[0].type.tensor_type.__setattr__("elem_type", 11)
        ),
        "an input of the algorithm": algorithm(lambda found: found.input[0].ClearField("type")),
    }


def test_a_model_that_was_changed_is_inferred_anew() -> None:
    with all_violations() as check:
        for name, change in changes().items():
            with check(name):
                built = trainable(model())
                assert handed_graph.is_known(built)
                change(built)
                assert not handed_graph.is_known(built)
                assert not handed_graph.take(convert.load_light(built), 0)
                assert handed_graph.take(convert.load_light(trainable(model())), 0)


def test_a_model_that_was_changed_computes_what_it_now_holds() -> None:
    built = trainable(model())
    for each in built.graph.node:
        each.op_type = {"Tanh": "Sigmoid"}.get(each.op_type, each.op_type)
    x, w = batch()["targets"], numpy_helper.to_array(built.graph.initializer[0])
    h = 1 / (1 + np.exp(-(x @ w)))
    y = 1 / (1 + np.exp(-(h @ w)))
    found = ortops.TrainingSession(built).step(batch())["loss"]
    np.testing.assert_allclose(found, np.mean((y - x) ** 2), rtol=1e-5)


def test_what_was_handed_over_is_what_inference_finds() -> None:
    """The graph of a step is the same, whether types were handed over or inferred."""
    for given in (model(), model(exported=True), model(opset=20)):
        light = convert.load_light(trainable(given))
        assert handed_graph._handed
        handed, inferred = (step_graph.flatten(light).model for _ in range(2))
        assert shown(handed) == shown(inferred)


def shown(step: ir.Model) -> list[object]:
    """Returns the nodes and types of a graph, with the unknown sizes in order of appearance."""
    symbols: dict[str, int] = {}

    def sizes(value: ir.Value) -> list[object]:
        dims = [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ["none"]]
        return [
            symbols.setdefault(dim, -len(symbols) - 1) if str(dim).startswith("unk__") else dim
            for dim in dims
        ]

    return [
        (node.op_type, [v.name for v in node.inputs if v], v.name, str(v.type), sizes(v))
        for node in step.graph
        for v in node.outputs
    ]
