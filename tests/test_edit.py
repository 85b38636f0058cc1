"""Removing what nobody reads, in graphs and in those inside their nodes."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from ortops.graph.edit import all_nodes, prune, remove_unread

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
nested (float[4] x, bool c) => (float[4] y) {
    read_inside = Neg (x)
    nobody_reads = If (c) <
        then_branch = one () => (float[4] a) { inner = Abs (read_inside) a = Neg (x) },
        else_branch = two () => (float[4] b) { b = Identity (x) }
    >
    y = If (c) <
        then_branch = three () => (float[4] d) { unread = Abs (read_inside) d = Exp (x) },
        else_branch = four () => (float[4] e) { e = Identity (x) }
    >
    last = Neg (y)
}
"""


def operators(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in all_nodes(graph)]


def test_what_only_an_unread_node_of_an_inner_graph_reads() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(MODEL)).graph
    remove_unread(list(all_nodes(graph)))
    assert operators(graph) == ["If", "Exp", "Identity"]


def test_what_only_the_branch_of_an_unread_node_reads() -> None:
    """An input, an initializer and the result of a node."""
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    captured (float[4] x, float[4] kept, bool c) => (float[4] y)
    <float[4] w = {1, 2, 3, 4}>
    {
        result = Neg (x)
        nobody_reads = If (c) <
            then_branch = one () => (float[4] a) { a = Add (result, w) },
            else_branch = two () => (float[4] b) { b = Identity (x) }
        >
        y = Abs (kept)
    }
    """
    graph = ir.from_proto(onnx.parser.parse_model(text)).graph
    prune(graph)
    assert operators(graph) == ["Abs"]
    assert [value.name for value in graph.inputs] == ["kept"]
    assert not graph.initializers


def test_nodes_of_the_main_graph_alone() -> None:
    graph = ir.from_proto(onnx.parser.parse_model(MODEL)).graph
    prune(graph)
    assert operators(graph) == ["Neg", "If", "Abs", "Exp", "Identity"]
