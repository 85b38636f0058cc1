"""The graphs inside nodes: branches, and bodies of loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

_GRAPH, _GRAPHS = ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS


def nodes_of(graph: ir.Graph) -> list[ir.Node]:
    """Returns the nodes of a graph; onnx-ir's own iterator takes five times as long."""
    nodes: list[ir.Node] = []
    end: Any = graph._nodes._root
    box = end.next
    while box is not end:
        nodes.append(box.value)
        box = box.next
    return nodes


def inner_graphs(node: ir.Node) -> list[ir.Graph]:
    """Returns the subgraphs of a node: its branches, or the body of a loop."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.data.values():  # a hot path: the inner dict is faster
        kind = attribute.type
        if kind == _GRAPH:
            graphs.append(attribute.as_graph())
        elif kind == _GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def subgraphs(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yields all graphs within a graph, outer ones first; onnx-ir's own way takes long."""
    for node in nodes_of(graph):
        for inner in inner_graphs(node):
            yield inner
            yield from subgraphs(inner)
