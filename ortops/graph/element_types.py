"""Replacement of one element type by another in a graph."""

from __future__ import annotations

from collections.abc import Callable, Container

import onnx_ir as ir

from ortops.graph.edit import all_nodes
from ortops.graph.nesting import inner_graphs

_TYPES = ("dtype", "output_dtype", "precision", "stash_type", "to")
"""Attributes whose value is the number of a type."""


def values_of_type(graph: ir.Graph, kind: ir.DataType) -> list[ir.Value]:
    """Returns the values of an element type in a graph and its subgraphs.

    Sequences and optionals of this type are included.
    """
    nodes = list(all_nodes(graph))
    graphs = [graph, *(inner for node in nodes for inner in inner_graphs(node))]
    values = dict.fromkeys(value for each in graphs for value in each.inputs)
    values |= dict.fromkeys(value for each in graphs for value in each.initializers.values())
    values |= dict.fromkeys(value for node in nodes for value in node.outputs)
    return [value for value in values if value.type is not None and value.type.dtype == kind]


def replace_type(
    graph: ir.Graph,
    old: ir.DataType,
    new: ir.DataType,
    convert: Callable[[ir.TensorProtocol], ir.TensorProtocol],
    kept: Container[ir.Value] = (),
) -> None:
    """Replaces an element type in a graph and its subgraphs, in place.

    Args:
        graph: The graph.
        old: The type to replace.
        new: The type that replaces it.
        convert: Converts a constant of the old type.
        kept: Values that keep their type.
    """
    for value in values_of_type(graph, old):
        if value not in kept:
            value.type = _with_element_type(value.type, new)
            if value.const_value is not None:
                value.const_value = convert(value.const_value)
    for node in all_nodes(graph):
        if any(output in kept for output in node.outputs):
            continue
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if tensor.dtype == old:
                    node.attributes[name] = ir.AttrTensor(name, convert(tensor))
            elif name in _TYPES and attribute.value == old.value:
                node.attributes[name] = ir.AttrInt64(name, new.value)


def _with_element_type(kind: ir.TypeProtocol | None, new: ir.DataType) -> ir.TypeProtocol:
    """Returns the type of a tensor, a sequence or an optional with another element type."""
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        return type(kind)(_with_element_type(kind.elem_type, new))
    return ir.TensorType(new)
