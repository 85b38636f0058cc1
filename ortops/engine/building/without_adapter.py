"""Computes a tensor of a model as if the model had no adapter, beside the one with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.adapters import Adapter
from ortops.graph.edit import ancestor_nodes, copy_node, read_inputs, rename_within
from ortops.graph.nesting import inner_graphs
from ortops.graph.tensor import Tape


def without_adapter(
    tape: Tape,
    nodes: Sequence[ir.Node],
    value: ir.Value,
    adapter: Adapter | None,
    reveal: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Returns a tensor of the base: a copy of the nodes between the adapter and the tensor.

    The copy shares the weights, and everything in front of the first adapter.

    Args:
        tape: Receives the copies.
        nodes: The nodes of the model, in topological order, functions inlined.
        value: The tensor.
        adapter: The model's adapter.
        reveal: Returns what the copies read in place of a value of the model.

    Raises:
        ModelError: If the model has no adapter, or has one in a sub-graph or with whole weights.
    """
    if adapter is None:
        raise ModelError(
            "the reference is the model without its adapter, but the model has no adapter; add "
            "one with ortops.lora.add"
        )
    if adapter.weights:
        why = f"whole weights are trained, such as '{next(iter(adapter.weights))}'"
        remedy = "train without modules_to_save and bias"
        raise ModelError(f"the reference is the model without its adapter, but {why}; {remedy}")
    known = {output.name: output for node in nodes for output in node.outputs}
    bases = dict[ir.Value, ir.Value]()
    for name, module in adapter.modules.items():
        for base_name, total_name in module.tensors:
            if base_name not in known or total_name not in known:
                raise ModelError(
                    f"the reference is the model without its adapter, but layer '{name}' of the "
                    "adapter is in a sub-graph; add an adapter that leaves it out"
                )
            bases[known[total_name]] = known[base_name]
    wanted = ancestor_nodes([value, *bases.values()], set())
    copies = dict[ir.Value, ir.Value]()
    for node in nodes:
        total = node.outputs[0]
        if total in bases:
            base = bases[total]
            copies[total] = copies.get(base) or reveal(base)
            continue
        inputs = list(read_inputs(node))
        if node not in wanted or copies.keys().isdisjoint(inputs):
            continue
        shown = {each: copies.get(each) or reveal(each) for each in inputs}
        copy = copy_node(node, shown)
        for graph in inner_graphs(copy):
            rename_within(graph, tape.names)
        tape.append(copy)
        copies.update(zip(node.outputs, copy.outputs, strict=True))
    return copies.get(value) or reveal(value)
