"""From protobuf to onnx-ir and back, with the types of values that are maps.

onnx-ir has no class for maps, which operators of ai.onnx.ml take and return. Such a type stays
beside the graph, under the name of its value, and the value itself has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir

from ortops.graph.files.messages import node_graphs

__all__ = [
    "BOUND_DOMAIN",
    "GRADIENT_DOMAIN",
    "algorithm_names",
    "from_proto",
    "is_map",
    "map_types",
    "name_tensors",
    "to_proto",
]

GRADIENT_DOMAIN = "ai.onnx.preview.training"
"""The domain of the specification's Gradient."""

BOUND_DOMAIN = "ortops.bound"
"""The private domain of Gradient nodes whose names have become inputs."""

_KEY = "ortops.map_types"


def from_proto(proto: onnx.ModelProto) -> ir.Model:
    """Returns a model as onnx-ir, which keeps hold of the tensors.

    Args:
        proto: The model, from which the types of maps are taken away.
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
    """Turns bound Gradient nodes into ones that name their tensors, as the specification has them.

    Args:
        nodes: Nodes, changed in place, with those of the graphs inside them. A bound node has for
            inputs what it is fed, then the tensors of xs and zs, then y.

    Returns:
        Whether there was one.
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


def algorithm_names(proto: onnx.ModelProto) -> Iterator[str]:
    """Yields the names of the tensors that the training algorithms of a model have."""
    for info in proto.training_info:
        part = info.algorithm
        yield from (each.name for each in (*part.input, *part.output, *part.initializer))
        yield from (name for node in part.node for name in node.output)


def map_types(graph: ir.Graph) -> Mapping[str, onnx.TypeProto]:
    """Returns the types of the inputs and outputs of a graph that are maps, by name."""
    types: Mapping[str, onnx.TypeProto] = graph.meta.get(_KEY, {})
    return types


def is_map(kind: onnx.TypeProto) -> bool:
    """Whether a type is a map, or a sequence or an optional of them."""
    match kind.WhichOneof("value"):
        case "map_type":
            return True
        case "sequence_type":
            return is_map(kind.sequence_type.elem_type)
        case "optional_type":
            return is_map(kind.optional_type.elem_type)
    return False


def _values(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yields what describes the values of a graph, and of the graphs in its nodes."""
    yield from graph.input
    yield from graph.output
    yield from graph.value_info
    for node in graph.node:
        for inner in node_graphs(node):
            yield from _values(inner)
