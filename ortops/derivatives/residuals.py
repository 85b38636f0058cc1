"""Divides a model with a backward pass into a forward and a backward model.

The backward model reads what the forward pass computed, its residuals, so that a pullback neither
computes the outputs again nor draws other random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops.graph.edit import (
    all_nodes,
    ancestor_nodes,
    dependent_values,
    prune,
    read_inputs,
    take_place,
)
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import is_random


@dataclass(frozen=True)
class Passes:
    """A model in two parts.

    Attributes:
        forward: Computes the outputs, then the residuals, from the inputs.
        backward: Computes the products from the inputs that it reads, the residuals and the seeds.
        residuals: The residuals: names of outputs of ``forward`` and of inputs of ``backward``.
    """

    forward: ir.Model
    backward: ir.Model
    residuals: Sequence[str]


def divide(model: ir.Model, outputs: Sequence[str], seeds: Sequence[str]) -> Passes:
    """Divides a lowered model after the values that do not depend on its seeds.

    Args:
        model: The model; do not use it afterwards.
        outputs: Its outputs that do not depend on seeds; the others are the products.
        seeds: The inputs that are only known for the backward pass.
    """
    forward, backward = model.clone(), model
    graph = backward.graph
    late = dependent_values(graph, [value for value in graph.inputs if value.name in seeds])
    fed = dependent_values(graph, [value for value in graph.inputs if value.name not in seeds])
    products = [value for value in graph.outputs if value.name not in outputs]
    needed = ancestor_nodes(products, set())
    nodes = [node for node in graph if node in needed]
    random = dependent_values(nodes, [v for n in nodes if _is_random(n) for v in n.outputs])
    ends = [v for node in nodes if any(o in late for o in node.outputs) for v in read_inputs(node)]
    # What depends on weights only is computed in both parts: onnxruntime does it once, on opening.
    cut = [
        value
        for value in dict.fromkeys((*ends, *products))
        if value.producer() is not None and value not in late and (value in fed or value in random)
    ]
    residuals = [value.name or "" for value in cut]
    for value in cut:
        given = ir.Value(type=value.type, shape=value.shape)
        take_place(value, given)
        graph.inputs.append(given)
    for value in [value for value in graph.outputs if value.name in outputs]:
        graph.outputs.remove(value)
    _copy_repeated_outputs(graph)
    prune(graph)
    _keep(forward.graph, outputs, residuals)
    return Passes(forward, backward, residuals)


def _is_random(node: ir.Node) -> bool:
    nodes = [node, *(inner for graph in inner_graphs(node) for inner in all_nodes(graph))]
    return any(is_random(each.op_type) for each in nodes)


def _copy_repeated_outputs(graph: ir.Graph) -> None:
    """Gives outputs that are inputs, initializers or other outputs a node and name of their own."""
    names = Names(graph)
    found = list(graph.outputs)
    graph.outputs.clear()
    for value in found:
        if value.producer() is None or value.is_graph_output():
            node = ir.Node("", "Identity", [value], num_outputs=1)
            (copy,) = node.outputs
            copy.name = names.unique(f"{value.name}.copy")
            copy.type, copy.shape = value.type, value.shape
            graph.append(node)
            value = copy
        graph.outputs.append(value)


def _keep(graph: ir.Graph, outputs: Sequence[str], residuals: Sequence[str]) -> None:
    """Makes the outputs and the residuals the only outputs of a graph."""
    values = {value.name: value for node in graph for value in node.outputs}
    kept = {value.name: value for value in graph.outputs if value.name in outputs}
    more = [values[name] for name in residuals if name not in kept]
    graph.outputs[:] = [*kept.values(), *more]
    prune(graph)
