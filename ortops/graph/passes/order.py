"""The order of a graph's nodes, which determines the execution order in onnxruntime."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

import onnx_ir as ir

from ortops.graph.edit import read_inputs
from ortops.graph.nesting import subgraphs
from ortops.graph.operators import MOVES, is_random

_Place: TypeAlias = tuple[int, int]
"""Where a node runs: its number, or that of the one it was moved behind, and the move."""

_VIEWS = MOVES - {"Transpose"} | {"Identity"}
"""Operators whose result has the memory of their first input in onnxruntime."""


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


def order_for_memory(graph: ir.Graph) -> None:
    """Orders nodes as onnxruntime runs them, but those that free memory as early as possible.

    The gradient of a Clip, for example, reads a mask of the elements that it changed. onnxruntime
    would compute it in the backward pass, and keep both the input and the output of the Clip until
    then. The mask takes a quarter of the memory of the input, so it is computed behind the Clip.

    A node is moved only if what it frees is larger than its results, so there is never more in
    memory than before. onnxruntime runs the nodes in this order if it is told to (see
    `execution_order` of its session options) and optimizes none of them.

    Args:
        graph: The graph; it is modified in place.
    """
    reads = _executed(graph)
    order = list(reads)
    owner = _owners(order)
    owned = {node: {owner.get(value, value) for value in reads[node]} for node in order}
    readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in order:
        for value in owned[node]:
            readers[value].append(node)
    kept = {owner.get(value, value) for value in graph.outputs}
    place: dict[ir.Node | None, _Place] = {node: (i, 0) for i, node in enumerate(order)}
    place[None] = (-1, 0)  # of inputs and initializers
    for moved, node in enumerate(order, 1):
        if any(value in owner for value in node.outputs) or is_random(node.op_type):
            continue
        behind = max((place[value.producer()] for value in reads[node]), default=place[None])
        last: dict[_Place, float] = defaultdict(float)  # what nobody reads behind a place
        for value in owned[node] - kept:
            if readers[value][-1] is node and value.producer() is not None:  # no other is behind
                others = [place[each] for each in readers[value][:-1]]
                size = _bytes(value)
                last[max(others, default=place[value.producer()])] += size if size < math.inf else 0
        left = sum(map(_bytes, node.outputs)) if last else 0
        for each in sorted(last):
            left -= last[each]
            if left < 0:
                target = max(behind, each)[0]
                place[node] = min(place[node], (target, moved))
                break
    graph.remove(order)
    graph.extend(sorted(order, key=place.__getitem__))


def _owners(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.Value]:
    """Returns the value whose memory another one shares, for each that does."""
    owner: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        if node.op_type in _VIEWS and not node.domain and node.inputs[0] is not None:
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
    return owner


def _bytes(value: ir.Value) -> float:
    """Returns the size of a value; infinity if it is unknown."""
    if value.dtype is None or value.shape is None or not value.shape.is_static():
        return math.inf if value.name else 0
    return math.ceil(math.prod(value.shape.numpy()) * value.dtype.bitwidth / 8)


def _executed(graph: ir.Graph) -> dict[ir.Node, list[ir.Value]]:
    """Returns what each node of a graph reads, in the order in which onnxruntime runs them.

    It goes back from each node without readers, the last one first, and behind each node from what
    was written last. Constants are no nodes to it; here, they come first.
    """
    reads = {node: read_inputs(node) for node in graph}
    number = {node: index for index, node in enumerate(reads)}
    before = {node: {value.producer() for value in values} for node, values in reads.items()}
    constants = [node for node in reads if node.op_type == "Constant"]
    read = set().union(*before.values())
    pending = [(node, False) for node in reads if node not in read]
    seen: set[ir.Node | None] = {None, *constants}
    order = list(constants)
    while pending:
        node, is_ready = pending.pop()
        if is_ready:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            pending.append((node, True))
            fresh = [each for each in before[node] if each is not None and each not in seen]
            pending += [(each, False) for each in sorted(fresh, key=number.__getitem__)]
    return {node: reads[node] for node in order}
