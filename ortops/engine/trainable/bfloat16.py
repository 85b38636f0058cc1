"""Makes training steps of bfloat16 models compute in float32.

onnxruntime's CPU provider can move and cast bfloat16 tensors, but not compute with them. Variables
stay bfloat16: they are cast when they are read and when they are written.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ortops.graph.element_types import replace_type, values_of_type
from ortops.graph.names import Names
from ortops.graph.tensor import Tape, op

_FLOAT32, _BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16


def compute_in_float32(graph: ir.Graph, updates: Mapping[str, str]) -> None:
    """Replaces bfloat16 by float32 in a graph, except for its variables.

    Args:
        graph: A prepared graph, changed in place. Its variables are inputs and initializers of the
            same name. A graph without bfloat16 is not changed.
        updates: The output that is the next value, by variable.
    """
    bfloat16 = values_of_type(graph, _BFLOAT16)
    if not bfloat16:
        return
    inputs = set(graph.inputs)
    variables = [v for v in bfloat16 if v in inputs and v.name in graph.initializers]
    replace_type(graph, _BFLOAT16, _FLOAT32, _float32_tensor, kept=set(variables))
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


def _float32_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
