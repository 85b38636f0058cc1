"""Training steps of bfloat16 models, computed in float32.

onnxruntime's CPU provider moves and casts bfloat16, and computes with nothing of it. What a step
keeps from one to the next stays bfloat16: it is cast where it is read, and where it is written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import all_nodes, inner_graphs
from ortops.graph.tensor import Names, Tape, op

__all__ = ["widen"]

_WIDE, _NARROW = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_TYPES = ("dtype", "output_dtype", "precision", "stash_type", "to")
"""Attributes that are the number of a type."""


def widen(graph: ir.Graph, updates: Mapping[str, str]) -> None:
    """Makes bfloat16 float32 in a graph, but for its variables.

    Args:
        graph: A prepared graph, whose variables are inputs and initializers of one name; changed
            in place. One without bfloat16 stays as it is.
        updates: Variable → its next value, an output.
    """
    nodes = list(all_nodes(graph))
    graphs = [graph, *(inner for node in nodes for inner in inner_graphs(node))]
    values = dict.fromkeys(value for each in graphs for value in each.inputs)
    values |= dict.fromkeys(value for each in graphs for value in each.initializers.values())
    values |= dict.fromkeys(value for node in nodes for value in node.outputs)
    narrow = [value for value in values if _element_type(value) == _NARROW]
    if not narrow:
        return
    inputs = set(graph.inputs)
    variables = [v for v in narrow if v in inputs and v.name in graph.initializers]
    kept = set(variables)
    for value in narrow:
        if value not in kept:
            value.type = _widened(value.type)
            if value.const_value is not None:
                value.const_value = _wide_tensor(value.const_value)
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if tensor.dtype == _NARROW:
                    node.attributes[name] = ir.AttrTensor(name, _wide_tensor(tensor))
            elif name in _TYPES and attribute.value == _NARROW.value:
                node.attributes[name] = ir.AttrInt64(name, _WIDE.value)
    names = Names(graph)
    first = next(iter(graph), None)
    reading = Tape(graph, names=names) if first is None else Tape(graph, before=first, names=names)
    for value in variables:
        uses = list(value.uses())
        if uses:
            wide = op.Cast(reading.tensor(value), to=_WIDE.value).value
            wide.type = ir.TensorType(_WIDE)
            for use in uses:
                use.node.replace_input_with(use.idx, wide)
    writing = Tape(graph, names=names)
    places = {value.name: index for index, value in enumerate(graph.outputs)}
    for name in (updates[v.name] for v in variables if v.name and v.name in updates):
        value = graph.outputs[places[name]]
        value.name = names.unique(f"{name}_wide")
        rounded = op.Cast(writing.tensor(value), to=_NARROW.value).value
        rounded.name, rounded.type, rounded.shape = name, ir.TensorType(_NARROW), value.shape
        graph.outputs[places[name]] = rounded


def _element_type(value: ir.Value) -> ir.DataType | None:
    return None if value.type is None else value.type.dtype


def _widened(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Returns a type of float32 for one of bfloat16: a tensor's, a sequence's, an optional's."""
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        inner = _widened(kind.elem_type)
        return kind if inner is None else type(kind)(inner)
    return ir.TensorType(_WIDE)


def _wide_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
