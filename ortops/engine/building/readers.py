"""The nodes that read a weight, directly or after nodes that only move or round its elements."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from ortops.graph.edit import all_nodes, describe
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import MOVES, having

PASSING: Mapping[str, Collection[int]] = {
    **dict.fromkeys(MOVES | having("keeps") | having("rounds") | having("copies"), (0,)),
    "Concat": range(10_000),
}
"""Inputs that an operator only moves or rounds, so that its readers count as readers of them."""


@dataclass(frozen=True)
class Reader:
    """A node that reads a weight, directly or after nodes that only move or round its elements.

    Attributes:
        node: The node.
        index: The index of the input.
    """

    node: ir.Node
    index: int

    def __str__(self) -> str:
        return f"{describe(self.node)}, input {formal_name(self.node, self.index)}"


def readers(value: ir.Value) -> Iterator[Reader]:
    """Yields the nodes that read a value, directly or after nodes that only move its elements."""
    return (reader for reader in ends_of(value) if isinstance(reader, Reader))


def ends_of(value: ir.Value) -> Iterator[Reader | ir.Value]:
    """Yields the nodes that read a value (see `readers`), and the model's outputs that hold it."""
    root, seen, pending = value.graph, {value}, [value]
    while pending:
        value = pending.pop()
        moved: list[ir.Value] = []
        for use in value.uses():
            node, index = use.node, use.idx
            inner = _inner_input(node, index)
            if inner is not None:
                moved.append(inner)
            elif index in PASSING.get(node.op_type, ()) and node.domain in ("", MICROSOFT):
                moved += node.outputs
            elif node.op_type not in ("Shape", "Size") or node.domain:
                yield Reader(node, index)
        if value.is_graph_output():
            outer = _outer_output(value, root)
            if outer is None:
                yield value
            else:
                moved.append(outer)
        new = [each for each in dict.fromkeys(moved) if each not in seen]
        seen.update(new)
        pending += new


def _inner_input(node: ir.Node, index: int) -> ir.Value | None:
    """Returns the input of the body that receives an input of a Loop or Scan."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return None
    (body,) = inner_graphs(node)
    return body.inputs[index] if index < len(body.inputs) else None


def _outer_output(value: ir.Value, root: ir.Graph | None) -> ir.Value | None:
    """Returns the output of a node with subgraphs that receives an output of one of them."""
    for node in () if root is None or value.graph is root else all_nodes(root):
        for graph in inner_graphs(node):
            if value in graph.outputs:
                index = list(graph.outputs).index(value) - (node.op_type == "Loop")
                return node.outputs[index] if 0 <= index < len(node.outputs) else None
    return None


def formal_name(node: ir.Node, index: int) -> str:
    """Returns the name of an input in the operator's schema."""
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return str(index)
    formal = schema.inputs
    return str(formal[min(index, len(formal) - 1)].name) if formal else str(index)
