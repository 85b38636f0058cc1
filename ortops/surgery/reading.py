"""Helpers shared by the functions of surgery: reading a model and its constants."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.shapes import infer_shapes

__all__ = [
    "Array",
    "constant",
    "dimensions",
    "drop_unread",
    "inferred",
    "logger",
    "read",
    "refuse_training",
]

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_LIKE_INPUTS = (
    *("BiasGelu", "BiasSplitGelu", "FastGelu", "FusedConv", "FusedGemm", "FusedMatMul", "Gelu"),
    *("QuickGelu", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
)
"""onnxruntime's operators whose output has the rank of an input; onnx cannot infer their shapes."""


def read(model: ModelLike) -> tuple[ir.Model, onnx.ModelProto, Path | None]:
    """Returns a model to change, the proto that it was read from, and the folder of its file."""
    proto, folder = convert.load(model)
    return convert.to_ir(proto, folder), proto, folder


def refuse_training(proto: onnx.ModelProto, what: str) -> None:
    """Rejects a model that already has a training algorithm."""
    if proto.training_info:
        raise ModelError(
            "model: it has training_info, which would no longer fit the changed model; "
            f"{what} before build_training_model"
        )


def inferred(proto: onnx.ModelProto, folder: Path | None) -> dict[str, ir.Value]:
    """Returns the values of the main graph by name, with inferred types and shapes."""
    model = convert.to_ir(proto, folder)
    graph = model.graph
    infer_shapes(model)
    while _infer_ranks(graph):
        infer_shapes(model)
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    return {value.name: value for value in values if value.name}


def _infer_ranks(graph: ir.Graph) -> bool:
    """Infers ranks of outputs that onnx cannot infer; returns whether there were any."""
    found = False
    for node in graph:
        shapes = [value.shape for value in node.inputs[:2] if value is not None]
        if not node.outputs or node.outputs[0].shape is not None or None in shapes:
            continue
        ranks = [len(shape) for shape in shapes if shape is not None]
        if node.domain == "com.microsoft" and node.op_type in _LIKE_INPUTS:
            node.outputs[0].shape = ir.Shape([None] * max(ranks))
            found = True
        elif node.op_type == "Reshape" and not node.domain and len(shapes) == 2:
            count = shapes[1][0] if shapes[1] else None
            if isinstance(count, int):
                node.outputs[0].shape = ir.Shape([None] * count)
                found = True
    return found


def constant(value: ir.Value | None) -> Array | None:
    """Returns the array of an initializer or Constant node; None for other values."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def dimensions(value: ir.Value) -> str:
    """Returns the shape of a value for messages."""
    return "[…]" if value.shape is None else f"[{', '.join(str(dim) for dim in value.shape)}]"


def drop_unread(value: ir.Value) -> None:
    """Removes a constant if it is unused."""
    node, graph = value.producer(), value.graph
    if value.uses() or value.is_graph_output():
        return
    if node is not None and node.op_type == "Constant" and node.graph is not None:
        node.graph.remove(node, safe=True)
    elif isinstance(graph, ir.Graph) and value.is_initializer() and not value.is_graph_input():
        graph.initializers.pop(value.name or "")
