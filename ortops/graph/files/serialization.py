"""Conversion between protobuf and onnx-ir that preserves map types.

onnx-ir has no class for maps, which are inputs and outputs of operators of ai.onnx.ml. The type of
a map is stored in the metadata of the graph, by value name, and the value itself has no type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir

from ortops.graph.files.messages import node_graphs

GRADIENT_DOMAIN = "ai.onnx.preview.training"
"""The domain of ONNX's Gradient operator."""

BOUND_DOMAIN = "ortops.bound"
"""The private domain of bound Gradient nodes, which have inputs in place of tensor names."""

_KEY = "ortops.map_types"


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Converts a model to onnx-ir. The result refers to the tensors of the argument.

    Args:
        proto: The model; map types are removed from it.
    """
    graph = proto.graph
    ends = {value.name for value in (*graph.input, *graph.output)}
    kept: dict[str, onnx.TypeProto] = {}
    for value in _values(graph):
        if is_map(value.type):
            if value.name in ends:
                kept[value.name] = onnx.TypeProto()
                kept[value.name].CopyFrom(value.type)
            value.ClearField("type")
    model = ir.from_proto(proto)
    if kept:
        model.graph.meta[_KEY] = kept
    return model


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Serializes a model."""
    proto: onnx.ModelProto = ir.to_proto(model)
    kept = map_types(model.graph)
    for value in (*proto.graph.input, *proto.graph.output) if kept else ():
        if value.name in kept and not value.HasField("type"):
            value.type.CopyFrom(kept[value.name])
    return proto


def name_tensors(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Converts bound Gradient nodes to the form of the standard, with tensor names as attributes.

    Args:
        nodes: Nodes; they and the nodes in their subgraphs are modified in place. The inputs of a
            bound node are the Gradient's own inputs, then the tensors of xs and zs, then y.

    Returns:
        Whether there were bound nodes.
    """
    found = False
    for node in nodes:
        for inner in node_graphs(node):
            found |= name_tensors(inner.node)
        if node.domain == BOUND_DOMAIN:
            count = len(node.input) // 2
            *named, y = node.input[count:]
            (xs,) = (len(each.strings) for each in node.attribute if each.name == "xs")
            del node.input[count:], node.attribute[:]
            for name, value in (("xs", named[:xs]), ("zs", named[xs:]), ("y", y)):
                if value:
                    node.attribute.append(onnx.helper.make_attribute(name, value))
            node.domain = GRADIENT_DOMAIN
            found = True
    return found


def name_gradients(proto: onnx.ModelProto) -> None:
    """Converts the bound Gradient nodes of a model with `name_tensors`, in place."""
    if name_tensors(proto.graph.node):
        for entry in [entry for entry in proto.opset_import if entry.domain == BOUND_DOMAIN]:
            proto.opset_import.remove(entry)


def algorithm_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Yields the names of the tensors in the training algorithms of a model."""
    for info in proto.training_info:
        part = info.algorithm
        yield from (each.name for each in (*part.input, *part.output, *part.initializer))
        yield from (name for node in part.node for name in node.output)


def map_types(graph: ir.Graph) -> Mapping[str, onnx.TypeProto]:
    """Returns the map types of the inputs and outputs of a graph, by name."""
    types: Mapping[str, onnx.TypeProto] = graph.meta.get(_KEY, {})
    return types


def is_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or optional of maps."""
    match kind.WhichOneof("value"):
        case "map_type":
            return True
        case "sequence_type":
            return is_map(kind.sequence_type.elem_type)
        case "optional_type":
            return is_map(kind.optional_type.elem_type)
    return False


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yields the value descriptions of a graph and its subgraphs."""
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for inner in node_graphs(node):
            yield from _values(inner)
