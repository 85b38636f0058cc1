"""Models that put out what they compute and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

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
