"""Replaces the symbolic dimensions of a graph by the sizes of a batch."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortops.engine.lowering import infer_types
from ortops.graph.edit import all_nodes
from ortops.graph.folding import fold
from ortops.graph.nesting import subgraphs


def sizes_in(model: ir.Model, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the sizes of a model's symbolic input dimensions for feeds of given shapes."""
    return {
        dim.value: size
        for value in model.graph.inputs
        if value.name and value.name in shapes and value.shape is not None
        for dim, size in zip(value.shape, shapes[value.name], strict=True)
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    }


def bind_sizes(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Replaces symbolic dimensions by sizes, and infers the shapes that follow from them.

    Args:
        model: A prepared model, changed in place. It then accepts only inputs of these sizes.
        sizes: The sizes by symbol, such as ``{"batch": 32}``.
    """
    graph = model.graph
    for inner in (graph, *subgraphs(graph)):
        for value in inner.inputs:
            if value.shape is not None:
                value.shape = _bound(value.shape, sizes)
    known: dict[ir.Value, ir.Shape] = {}
    for node in all_nodes(graph):
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                known[value] = value.shape
                value.shape = None
    fold(graph)  # the sizes of inputs, on which many other sizes depend
    infer_types(model)
    if fold(graph) and not all(map(_is_static, all_nodes(graph))):
        infer_types(model)  # again, with the values that the sizes make constant
    for value, shape in known.items():
        if value.shape is None:
            value.shape = _bound(shape, sizes)


def _is_static(node: ir.Node) -> bool:
    return all(value.shape is not None and value.shape.is_static() for value in node.outputs)


def _bound(shape: ir.Shape, sizes: Mapping[str, int]) -> ir.Shape:
    return ir.Shape(
        [dim if isinstance(dim, int) else sizes.get(dim.value or "", dim) for dim in shape]
    )
