"""Small models, batches and numpy oracles that the tests of training share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortops import Tape, op

TRAINING_DOMAIN = "ai.onnx.preview.training"

Arrays = dict[str, np.ndarray[Any, Any]]


def affine(
    *, dtype: type = np.float32, batch: int | str = "batch", opset: int = 21
) -> onnx.ModelProto:
    """y = x · w + b with w of shape (3, 2): easy to redo by hand."""
    rng = np.random.default_rng(1)
    with Tape(name="affine", opset=opset) as tape:
        x = tape.input("x", dtype, [batch, 3])
        w = tape.initializer("w", rng.normal(size=(3, 2)).astype(dtype))
        b = tape.initializer("b", rng.normal(size=2).astype(dtype))
        tape.output(x @ w + b, "y")
    return tape.model(author="somebody")


def affine_batch(rows: int = 4, seed: int = 0, dtype: type = np.float32) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, 3)).astype(dtype),
        "targets": rng.normal(size=(rows, 2)).astype(dtype),
    }


def classifier(*, hidden: int = 8, dropout: float = 0.0) -> onnx.ModelProto:
    """Two linear layers from (N, 6) to logits of 3 classes, with Dropout between them."""
    rng = np.random.default_rng(2)
    with Tape(name="classifier") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        w1 = tape.initializer("w1", rng.normal(size=(6, hidden)).astype(np.float32))
        b1 = tape.initializer("b1", np.zeros(hidden, np.float32))
        h = op.Tanh(x @ w1 + b1)
        if dropout:
            h = op.Dropout(h, np.array(dropout, np.float32))
        w2 = tape.initializer("w2", rng.normal(size=(hidden, 3)).astype(np.float32))
        tape.output(h @ w2, "logits")
    return tape.model()


def normalizing() -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu, Dropout and a mean: (N, 1, 4, 4) to 3 logits."""
    rng = np.random.default_rng(3)
    with Tape(name="normalizing") as tape:
        x = tape.input("x", np.float32, ["batch", 1, 4, 4])
        w = tape.initializer("conv.w", rng.normal(size=(3, 1, 3, 3)).astype(np.float32))
        scale = tape.initializer("bn.scale", np.linspace(0.5, 1.5, 3, dtype=np.float32))
        bias = tape.initializer("bn.bias", np.linspace(-1, 1, 3, dtype=np.float32))
        mean = tape.initializer("bn.mean", np.linspace(-0.1, 0.1, 3, dtype=np.float32))
        var = tape.initializer("bn.var", np.linspace(0.8, 1.2, 3, dtype=np.float32))
        h = op.Conv(x, w, pads=[1, 1, 1, 1])
        h = op.Relu(op.BatchNormalization(h, scale, bias, mean, var, momentum=0.8))
        h = op.Dropout(h, np.array(0.25, np.float32))
        tape.output(op.ReduceMean(h, [2, 3], keepdims=0), "logits")
    return tape.model()


def forces(*, dropout: float = 0.0) -> onnx.ModelProto:
    """An energy per row and, by a Gradient node of the inference graph, its gradient."""
    rng = np.random.default_rng(6)
    with Tape(name="forces") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        w = tape.initializer("w", rng.normal(size=(3, 8)).astype(np.float32))
        v = tape.initializer("v", rng.normal(size=(8, 1)).astype(np.float32))
        h = op.Tanh(x @ w)
        if dropout:
            h = op.Dropout(h, np.array(dropout, np.float32))
        tape.output(op.ReduceSum(h @ v, [1], keepdims=0), "energy")
    model = tape.model()
    gradient = helper.make_node(
        "Gradient", ["x"], ["slope"], "slopes", domain=TRAINING_DOMAIN, xs=["x"], y="energy"
    )
    model.graph.node.append(gradient)
    model.graph.output.append(
        helper.make_tensor_value_info("slope", TensorProto.FLOAT, ["batch", 3])
    )
    model.opset_import.add(domain=TRAINING_DOMAIN, version=1)
    return model


def labelled(shape: tuple[int, ...], classes: int = 3, rows: int = 8, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, *shape)).astype(np.float32),
        "labels": rng.integers(0, classes, rows),
    }


def initializers(graph: onnx.GraphProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}


def assert_same_arrays(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Asserts that two sets of arrays are equal bit for bit."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def names(values: Iterable[Any]) -> list[str]:
    return [value.name for value in values]


def op_types(graph: onnx.GraphProto) -> list[str]:
    return [node.op_type for node in graph.node]


def concatenated(model: onnx.ModelProto, entry: int = 0) -> onnx.ModelProto:
    """The training graph as onnx.proto defines it: each list of both, joined."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    algorithm = result.training_info[entry].algorithm
    for part in ("node", "initializer", "sparse_initializer", "input", "output", "value_info"):
        getattr(result.graph, part).extend(getattr(algorithm, part))
    del result.training_info[:]
    return result


def softmax_cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logarithm = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-np.mean(logarithm[np.arange(len(labels)), labels]))


def foreign(algorithm: list[onnx.NodeProto], **parts: Any) -> onnx.ModelProto:
    """A trainable file as someone writes it by hand after onnx.proto: y = x · w, no metadata.

    Args:
        algorithm: The nodes of the algorithm.
        **parts: ``inputs`` and ``outputs`` (lists of value infos) and ``variables`` (arrays by
            name) of the algorithm, its ``updates``, the ``initial`` nodes, outputs and bindings,
            further ``graph_nodes`` and ``graph_outputs``.
    """
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])
    w = numpy_helper.from_array(np.array([[0.5], [-0.5]], np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), *parts.get("graph_nodes", [])],
        "inference",
        [x],
        [y, *parts.get("graph_outputs", [])],
        [w],
    )
    model = helper.make_model(
        graph,
        ir_version=10,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(TRAINING_DOMAIN, 1)],
    )
    info = model.training_info.add()
    info.algorithm.CopyFrom(
        helper.make_graph(
            algorithm,
            "algorithm",
            parts.get("inputs", []),
            parts.get("outputs", []),
            [numpy_helper.from_array(a, name) for name, a in parts.get("variables", {}).items()],
        )
    )
    for key, value in parts.get("updates", {}).items():
        info.update_binding.add(key=key, value=value)
    if "initial" in parts:
        nodes, outputs, bindings = parts["initial"]
        info.initialization.CopyFrom(helper.make_graph(nodes, "initialization", [], outputs))
        for key, value in bindings.items():
            info.initialization_binding.add(key=key, value=value)
    return model
