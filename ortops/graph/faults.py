"""Faults of onnxruntime's optimizer, and how models are written so that they do not matter.

onnxruntime 1.32 fuses MatMul(Transpose(A), v) into a product that is wrong if v has one axis, in
float32 and float64, also through a Cast or an Identity. It is right with v · Transpose(Aᵀ), which
it fuses, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx
import onnx_ir as ir

from ortops.graph.edit import all_nodes, producer_of
from ortops.graph.tensor import Names

__all__ = ["avoid_matrix_times_vector", "write_vector_first"]

_SWAPPED = "ortops.vector_first"


def avoid_matrix_times_vector(graph: ir.Graph, names: Names | None = None) -> None:
    """Replaces products of computed matrices with vectors by products of vectors with matrices.

    Args:
        graph: A graph with inferred types, changed in place, with its subgraphs.
        names: The names used in it.
    """
    for node in list(all_nodes(graph)):
        if node.op_type != "MatMul" or node.domain:
            continue
        matrix, vector = node.inputs
        rank = _rank(matrix)
        if matrix is None or rank < 2 or _rank(vector) != 1 or producer_of(matrix) is None:
            continue
        if producer_of(matrix, "Constant") is not None:
            continue
        perm = [*range(rank - 2), rank - 1, rank - 2]
        before = producer_of(matrix, "Transpose")
        if before is not None and before.attributes.get_ints("perm", [1, 0]) == perm:
            factor, perm = before.inputs[0], []
        else:
            names = names or Names(graph)
            name = names.unique(f"{node.name or node.op_type}/Transpose")
            attributes = [ir.AttrInt64s("perm", perm)]
            transpose = ir.Node("", "Transpose", [matrix], attributes, name=name)
            factor = transpose.outputs[0]
            factor.name, factor.type = names.unique(f"{name}_output"), matrix.type
            if matrix.shape is not None:
                factor.shape = ir.Shape([matrix.shape[axis] for axis in perm])
            assert node.graph is not None
            node.graph.insert_before(node, [transpose])
        node.replace_input_with(0, vector)
        node.replace_input_with(1, factor)
        node.meta[_SWAPPED] = perm


def write_vector_first(proto: onnx.GraphProto, graph: ir.Graph) -> list[str]:
    """Changes a graph like the one of which `avoid_matrix_times_vector` was called.

    Args:
        proto: The graph, with the same names; changed in place. Functions stay as they are.
        graph: The changed graph.

    Returns:
        The names of new tensors.
    """
    changed = {node.outputs[0].name: node for node in all_nodes(graph) if _SWAPPED in node.meta}
    return _write(proto, changed) if changed else []


def _write(proto: onnx.GraphProto, changed: Mapping[str | None, ir.Node]) -> list[str]:
    added: list[str] = []
    for node in list(proto.node):
        for inner in _inner(node):
            added += _write(inner, changed)
        if node.op_type != "MatMul" or node.output[0] not in changed:
            continue
        product = changed[node.output[0]]
        perm, factor = product.meta[_SWAPPED], product.inputs[1]
        assert factor is not None
        assert factor.name is not None
        if perm:
            transpose = onnx.helper.make_node("Transpose", node.input[:1], [factor.name], perm=perm)
            proto.node.insert(list(proto.node).index(node), transpose)
            added.append(factor.name)
        node.input[:] = [node.input[1], factor.name]
    return added


def _inner(node: onnx.NodeProto) -> Iterable[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _rank(value: ir.Value | None) -> int:
    return 0 if value is None or value.shape is None else len(value.shape)
