"""What the functions of surgery have in common: reading a model, and its constants."""

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
"""onnxruntime's operators whose output has as many axes as an input; onnx does not know them."""


def read(model: ModelLike) -> tuple[ir.Model, onnx.ModelProto, Path | None]:
    """Returns a model to change, the message it was read from, and the folder of its file."""
    proto, folder = convert.load(model)
    return convert.to_ir(proto, folder), proto, folder


def refuse_training(proto: onnx.ModelProto, what: str) -> None:
    """Refuses a model that has a training algorithm already."""
    if proto.training_info:
        raise ModelError(
            f"model: it has {len(proto.training_info)} training_info, which fits the model as it "
            f"is; {what} before build_training_model"
        )


def inferred(proto: onnx.ModelProto, folder: Path | None) -> dict[str, ir.Value]:
    """Returns the values of the main graph by name, with types and shapes as far as onnx knows."""
    model = convert.to_ir(proto, folder)
    graph = model.graph
    infer_shapes(model)
    while _infer_ranks(graph):
        infer_shapes(model)
    values = [*graph.inputs, *graph.initializers.values()]
    values += [value for node in graph for value in node.outputs]
    return {value.name: value for value in values if value.name}


def _infer_ranks(graph: ir.Graph) -> bool:
    """Gives outputs as many axes as they are known to have, where onnx does not."""
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
    """Returns what an initializer or a Constant node holds, else None."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def dimensions(value: ir.Value) -> str:
    """Returns the shape of a value as messages say it."""
    return "[…]" if value.shape is None else f"[{', '.join(str(dim) for dim in value.shape)}]"


def drop_unread(value: ir.Value) -> None:
    """Removes a constant that nobody reads any more."""
    node, graph = value.producer(), value.graph
    if value.uses() or value.is_graph_output():
        return
    if node is not None and node.op_type == "Constant" and node.graph is not None:
        node.graph.remove(node, safe=True)
    elif isinstance(graph, ir.Graph) and value.is_initializer() and not value.is_graph_input():
        graph.initializers.pop(value.name or "")
