"""Helpers shared by the functions of surgery: reading a model and its constants."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeAlias

import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.edit import values_of
from ortops.graph.files import external, loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.operators import having
from ortops.graph.shapes import infer_shapes

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_FOLDER_KEY = "session.model_external_initializers_file_folder_path"

_LIKE_INPUTS = having("keeps_rank", MICROSOFT)
"""onnxruntime's operators whose output has the rank of an input; onnx cannot infer their shapes."""


def read(model: ModelLike) -> tuple[ir.Model, onnx.ModelProto, Path | None]:
    """Returns a model to change, the proto that it was read from, and the folder of its file."""
    proto, folder = loading.load(model)
    return convert.to_ir(proto, folder), proto, folder


def refuse_training(proto: onnx.ModelProto, remedy: str) -> None:
    """Rejects a model with a training algorithm, which would no longer fit the changed model."""
    if proto.training_info:
        raise ModelError(
            f"model: it has training_info, which would no longer fit the changed model; {remedy}"
        )


def model_of(work: ir.Model, graph: onnx.GraphProto, functions: Any = ()) -> onnx.ModelProto:
    """Returns a model of a few nodes of another model, in its versions of operators.

    Args:
        work: The other model.
        graph: The nodes, with their inputs and constants.
        functions: The functions of the other model.
    """
    opsets = work.graph.opset_imports.items()
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets]
    version = max(work.ir_version, 4)  # before, all initializers had to be inputs
    return onnx.helper.make_model(
        graph, opset_imports=imports, functions=functions, ir_version=version
    )


def open_model(proto: onnx.ModelProto, folder: Path | None = None) -> Any:
    """Opens a model in stock onnxruntime on the CPU, without its warnings.

    Args:
        proto: The model.
        folder: The folder of its external data.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if folder is not None:
        options.add_session_config_entry(_FOLDER_KEY, str(folder))
    content = external.serialize(proto)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def inferred(proto: onnx.ModelProto, folder: Path | None) -> dict[str, ir.Value]:
    """Returns the values of the main graph by name, with inferred types and shapes."""
    model = convert.to_ir(proto, folder)
    graph = model.graph
    infer_shapes(model)
    while _infer_ranks(graph):
        infer_shapes(model)
    return values_of(graph)


def _infer_ranks(graph: ir.Graph) -> bool:
    """Infers ranks of outputs that onnx cannot infer; returns whether there were any."""
    found = False
    for node in graph:
        shapes = [value.shape for value in node.inputs[:2] if value is not None]
        if not node.outputs or node.outputs[0].shape is not None or None in shapes:
            continue
        ranks = [len(shape) for shape in shapes if shape is not None]
        if node.domain == MICROSOFT and node.op_type in _LIKE_INPUTS:
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


def integers(node: ir.Node, name: str, index: int) -> list[int] | None:
    """Returns integers that are an attribute in older opsets and an input in newer ones.

    Args:
        node: The node.
        name: The name of the attribute.
        index: The index of the input.

    Returns:
        The integers; None if there are none, or they are computed.
    """
    if name in node.attributes:
        found = node.attributes[name]
        return [found.as_int()] if found.type == ir.AttributeType.INT else list(found.as_ints())
    array = constant(node.inputs[index]) if index < len(node.inputs) else None
    return None if array is None else [int(each) for each in array.reshape(-1)]


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
