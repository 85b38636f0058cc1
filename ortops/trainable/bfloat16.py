"""Makes training steps of bfloat16 models compute in float32.

onnxruntime's CPU provider can move and cast bfloat16 tensors, but not compute with them. Variables
stay bfloat16: they are cast when they are read and when they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import all_nodes, inner_graphs
from ortops.graph.tensor import Names, Tape, op

__all__ = ["compute_in_float32"]

_FLOAT32, _BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16
_TYPES = ("dtype", "output_dtype", "precision", "stash_type", "to")
"""Attributes whose value is the number of a type."""


def compute_in_float32(graph: ir.Graph, updates: Mapping[str, str]) -> None:
    """Replaces bfloat16 by float32 in a graph, except for its variables.

    Args:
        graph: A prepared graph, changed in place. Its variables are inputs and initializers of the
            same name. A graph without bfloat16 is not changed.
        updates: The output that is the next value, by variable.
    """
    nodes = list(all_nodes(graph))
    graphs = [graph, *(inner for node in nodes for inner in inner_graphs(node))]
    values = dict.fromkeys(value for each in graphs for value in each.inputs)
    values |= dict.fromkeys(value for each in graphs for value in each.initializers.values())
    values |= dict.fromkeys(value for node in nodes for value in node.outputs)
    bfloat16 = [value for value in values if _element_type(value) == _BFLOAT16]
    if not bfloat16:
        return
    inputs = set(graph.inputs)
    variables = [v for v in bfloat16 if v in inputs and v.name in graph.initializers]
    kept = set(variables)
    for value in bfloat16:
        if value not in kept:
            value.type = _float32_type(value.type)
            if value.const_value is not None:
                value.const_value = _float32_tensor(value.const_value)
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = attribute.as_tensor()
                if tensor.dtype == _BFLOAT16:
                    node.attributes[name] = ir.AttrTensor(name, _float32_tensor(tensor))
            elif name in _TYPES and attribute.value == _BFLOAT16.value:
                node.attributes[name] = ir.AttrInt64(name, _FLOAT32.value)
    names = Names(graph)
    start = Tape(graph, before=next(iter(graph), None), names=names)
    for value in variables:
        uses = list(value.uses())
        if uses:
            cast = op.Cast(start.tensor(value), to=_FLOAT32.value).value
            cast.type = ir.TensorType(_FLOAT32)
            for use in uses:
                use.node.replace_input_with(use.idx, cast)
    end = Tape(graph, names=names)
    positions = {value.name: index for index, value in enumerate(graph.outputs)}
    for name in (updates[v.name] for v in variables if v.name and v.name in updates):
        value = graph.outputs[positions[name]]
        value.name = names.unique(f"{name}_wide")
        rounded = op.Cast(end.tensor(value), to=_BFLOAT16.value).value
        rounded.name, rounded.type, rounded.shape = name, ir.TensorType(_BFLOAT16), value.shape
        graph.outputs[positions[name]] = rounded


def _element_type(value: ir.Value) -> ir.DataType | None:
    return None if value.type is None else value.type.dtype


def _float32_type(kind: ir.TypeProtocol | None) -> ir.TypeProtocol | None:
    """Returns the float32 type for the bfloat16 type of a tensor, a sequence or an optional."""
    if isinstance(kind, ir.SequenceType | ir.OptionalType):
        inner = _float32_type(kind.elem_type)
        return kind if inner is None else type(kind)(inner)
    return ir.TensorType(_FLOAT32)


def _float32_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
