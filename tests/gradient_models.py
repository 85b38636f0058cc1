"""Models that put out what they compute and its gradients, and how onnxruntime runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime

from ortops import Tape, Tensor, op

Array = np.ndarray[Any, Any]
Build = Callable[..., Tensor]


def with_gradients(
    build: Build, shapes: dict[str, tuple[int, ...]], *, seed: int = 0
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Returns a model of sum(build(…) · random) and its gradients by all inputs, and the inputs."""
    rng = np.random.default_rng(seed)
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    with Tape(name="test") as tape:
        inputs = [tape.input(name, np.float32, shape) for name, shape in shapes.items()]
        y = tape.output(build(*inputs), "y")
        weights = rng.standard_normal([int(str(size)) for size in y.shape or ()])
        tape.output(op.ReduceSum(y * weights.astype(np.float32), keepdims=0), "loss")
    model = tape.model()
    domain = "ai.onnx.preview.training"
    outputs = [f"{name}_gradient" for name in shapes]
    node = onnx.helper.make_node(
        "Gradient", list(shapes), outputs, "gradient", domain=domain, xs=list(shapes), y="loss"
    )
    model.graph.node.append(node)
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[x])
        for name, x in zip(outputs, shapes, strict=True)
    )
    model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return model, feeds


def run(model: onnx.ModelProto, feeds: dict[str, Array], *, optimize: bool = True) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    # Copies: onnxruntime's BatchNormalization writes its new statistics over the fed ones.
    copies = {name: array.copy() for name, array in feeds.items()}
    return [np.asarray(array) for array in session.run(None, copies)]
