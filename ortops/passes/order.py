"""The order of a graph's nodes, which tells onnxruntime when to run what."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["put_last_results_first"]


def put_last_results_first(graph: ir.Graph) -> None:
    """Moves the nodes that nobody reads to the end, the last of them first.

    onnxruntime runs what the last node needs, then what the last but one needs, and so on. The last
    gradients to be known are those of the first layer: with these at the end of the graph it would
    compute all cotangents before it used the first of them, and keep them all.

    Args:
        graph: The graph; changed in place.
    """
    read_inside = {value for inner in graph.subgraphs() for value in inner.outputs}
    unread = [
        node
        for node in graph
        if not any(value.uses() or value in read_inside for value in node.outputs)
    ]
    graph.remove(unread)
    graph.extend(reversed(unread))
