"""Types and shapes that building has inferred, for a session of the same model in this process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from ortops.graph.constants import constant_tensor, dims_of
from ortops.graph.files.external import LightModel
from ortops.graph.files.messages import is_light
from ortops.graph.nesting import inner_graphs

_Types: TypeAlias = Mapping[str, tuple[ir.TypeProtocol | None, ir.Shape | None]]

_OF_SIZES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
_SMALL = 2**14  # elements: inference reads no larger constants

_handed: dict[bytes, _Types] = {}
"""What the last call of `hand_over` left, by a digest of all that inference depends on."""


def hand_over(light: LightModel, graph: ir.Graph) -> None:
    """Keeps the types and shapes in the graph of a model until `take`, or until the next model.

    Args:
        light: The model, as it was built, with one entry.
        graph: Its inference graph with the algorithm, from which it was written.
    """
    _handed.clear()
    values = [value for node in graph for value in node.outputs if value.name]
    if not light.proto.functions and all(map(_is_settled, values)):
        types = {value.name or "": (value.type, _with_symbols(value)) for value in values}
        _handed[_digest(light, 0)] = types


def take(light: LightModel, entry: int, graph: ir.Graph) -> bool:
    """Sets the types and shapes that were handed over, if the model has not changed since.

    Args:
        light: A model.
        entry: The index of an entry.
        graph: Its inference graph with the algorithm of the entry.

    Returns:
        Whether they were set.
    """
    types = _handed.pop(_digest(light, entry), {}) if _handed else {}
    values = [value for node in graph for value in node.outputs if value.name] if types else []
    if any(value.name not in types for value in values):
        return False
    for value in values:
        value.type, value.shape = types[value.name or ""]
    return bool(types)


def _is_settled(value: ir.Value) -> bool:
    """Whether inference would find the same again, but for the symbols of unknown sizes."""
    node = value.producer()
    if node is None or value.type is None or inner_graphs(node):
        return False
    if _is_complete(value):
        return True
    outputs = (output for reader in value.consumers() for output in reader.outputs)
    stays = isinstance(value.type, ir.SequenceType) or _merges_axes(node)
    return stays and all(map(_is_complete, outputs))


def _merges_axes(node: ir.Node) -> bool:
    """Whether one axis gets what is left of a tensor of unknown size, which no symbol expresses."""
    x, sizes = (*node.inputs, None, None)[:2]
    if node.op_type != "Reshape" or x is None or x.shape is None or x.shape.is_static():
        return False
    source = None if sizes is None else sizes.producer()
    joins = source is not None and source.op_type == "Concat"
    parts = source.inputs if source is not None and joins else [sizes]  # as in losses of rows
    constants = [constant_tensor(part) for part in parts if part is not None]
    dims = dims_of(node.outputs[0].shape or ir.Shape([]))
    return dims.count(None) == 1 and any(-1 in t.numpy() for t in constants if t is not None)


def _is_complete(value: ir.Value) -> bool:
    """Whether all sizes of a tensor are numbers or symbols."""
    is_tensor = value.shape is not None and isinstance(value.type, ir.TensorType)
    return is_tensor and None not in dims_of(value.shape or ir.Shape([]))


def _with_symbols(value: ir.Value) -> ir.Shape | None:
    """Returns a shape with symbols for unknown sizes, named like those that onnx generates."""
    if value.shape is None:
        return None
    dims = enumerate(dims_of(value.shape))
    return ir.Shape([f"unk__{value.name}_{n}" if dim is None else dim for n, dim in dims])


def _digest(light: LightModel, entry: int) -> bytes:
    """Returns a digest of all that the types in a model with the algorithm of an entry follow from.

    Of tensors with detached data it has names, types and shapes; the values of those that may hold
    sizes, too.
    """
    found = hashlib.sha256()
    for message in _parts(light.proto, entry):
        if isinstance(message, onnx.TensorProto) and is_light(message):
            found.update(repr((message.name, message.data_type, [*message.dims])).encode())
            if message.data_type in _OF_SIZES and math.prod(message.dims) <= _SMALL:
                found.update(light.array_of(message).tobytes())
        else:
            found.update(message.SerializeToString(deterministic=True))
        found.update(b";")
    return found.digest()


def _parts(proto: onnx.ModelProto, entry: int) -> Iterator[Any]:
    yield from proto.opset_import
    yield from proto.functions
    for graph in (proto.graph, *(info.algorithm for info in proto.training_info[entry:][:1])):
        for name in ("input", "output", "value_info", "initializer", "sparse_initializer", "node"):
            yield from getattr(graph, name)
