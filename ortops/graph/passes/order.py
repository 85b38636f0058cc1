"""The order of a graph's nodes, which determines the execution order in onnxruntime."""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.nesting import subgraphs


def put_last_results_first(graph: ir.Graph) -> None:
    """Moves nodes without consumers to the end, in reverse order.

    onnxruntime first runs the nodes that the last node depends on, then those of the last but one,
    and so on. The gradients of the first layer are available last. With these at the end of the
    graph, it would compute and keep all cotangents before using the first one.

    Args:
        graph: The graph; it is modified in place.
    """
    read_inside = {value for inner in subgraphs(graph) for value in inner.outputs}
    unread = [
        node
        for node in graph
        if not any(value.uses() or value in read_inside for value in node.outputs)
    ]
    graph.remove(unread)
    graph.extend(reversed(unread))
