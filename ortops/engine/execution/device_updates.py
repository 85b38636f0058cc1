"""Updates in place in the memory of a device, which cannot be packed.

A node may not write to memory that it reads (WebGPU forbids it), so each next value is computed in
memory of its own, which is free again after the copy.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping

import onnx_ir as ir

from ortops.engine.execution.update_groups import is_scalar
from ortops.graph.edit import ancestor_nodes
from ortops.graph.names import Names

REMOVES_COPIES = "EliminateIdentity"
"""onnxruntime's optimizer that would remove the copies."""


def copy_last(graph: ir.Graph, updates: Mapping[str, str]) -> set[str]:
    """Adds copies of next values to a graph, so that they may overwrite the present ones.

    A next value may do so if all nodes that read the present one are among those that compute it.
    Scalars are left as they are.

    Args:
        graph: The graph that computes the next values; changed in place.
        updates: The output that is the next value, by variable.

    Returns:
        The variables whose next values may overwrite the present ones in memory.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    counts = collections.Counter(updates.values())
    names = Names(graph)
    result: set[str] = set()
    for variable, output in updates.items():
        value, present = outputs[output], inputs.get(variable)
        if counts[output] > 1 or value.producer() is None or is_scalar(value):
            continue
        before = ancestor_nodes(value, set())
        readers = [] if present is None else [reader for reader, _ in present.uses()]
        if not before.issuperset(readers):
            continue
        value.name = names.unique(f"{output}.computed")
        copy = ir.Node("", "Identity", [value], num_outputs=1, name=f"{variable}.overwritten")
        copied = copy.outputs[0]
        copied.name, copied.type, copied.shape = output, value.type, value.shape
        graph.append(copy)
        graph.outputs[list(graph.outputs).index(value)] = copied
        result.add(variable)
    return result
