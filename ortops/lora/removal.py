"""Removes an adapter from a model."""

from __future__ import annotations

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.adapters import Adapter, Module
from ortops.graph.edit import remove_node, take_place
from ortops.graph.nesting import subgraphs

_FACTORS = {"linear": ("MatMul", 1), "embedding": ("Gather", 0), "convolution": ("Conv", 1)}
"""The operator that reads A, and the index of that input, by the kind of a layer."""


def remove_adapter(work: ir.Model, adapter: Adapter) -> dict[str, list[ir.Value]]:
    """Removes the nodes, inputs and initializers of an adapter, in place.

    Weights that are trained themselves keep their values.

    Returns:
        The outputs of each layer without the adapter, under their original names.

    Raises:
        ModelError: If the nodes differ from those that `ortops.lora.add` adds.
    """
    graph = work.graph
    values = {v.name: v for inner in (graph, *subgraphs(graph)) for n in inner for v in n.outputs}
    removed = {  # of several adapters of a node, the last one reads what the node computes
        name: [_remove(values, name, module, *pair) for pair in module.tensors]
        for name, module in reversed(list(adapter.modules.items()))
    }
    found = {name: removed[name] for name in adapter.modules}
    for name, module in adapter.modules.items():
        others = {module.scale, module.magnitude, module.square} if module.dora else set[str]()
        for parameter in ({module.a, module.b} | others) & graph.initializers.keys():  # A: shared
            value = graph.initializers.pop(parameter)
            if value.uses() or value.is_graph_output():
                raise _refused(name, f"'{parameter}' has other readers")
            if value in graph.inputs:
                graph.inputs.remove(value)
    for name in adapter.weights:
        graph.inputs[:] = [value for value in graph.inputs if value.name != name]
    return found


def _refused(layer: str, what: str) -> ModelError:
    return ModelError(
        f"model: the adapter of layer '{layer}' was changed: {what}; give the model as ortops.lora "
        "created it"
    )


def _remove(
    values: dict[str | None, ir.Value], layer: str, module: Module, base: str, total: str
) -> ir.Value:
    """Removes the nodes that compute the adapter's part of a tensor; returns the base's part."""
    y = values.get(base)  # this name is unique, while branches may share the name `total`
    readers = () if y is None else (use.node for use in y.uses() if use.idx == 0)
    adds = (node for node in readers if node.op_type == "Add" and node.outputs[0].name == total)
    node = next(adds, None)
    if y is None or node is None:
        raise _refused(layer, f"no node adds the adapter to '{base}'")
    delta = node.inputs[1]
    if module.dora:
        delta = _unscaled(delta)
    if _parameters(delta, module) != [module.a, module.b]:
        raise _refused(layer, f"'{base}' is not added to the {module.kind} product of its A and B")
    pending = [node.inputs[1]]
    take_place(node.outputs[0], y)
    remove_node(node)
    values[total] = y
    while pending:
        value = pending.pop()
        maker = None if value is None else value.producer()
        if maker is None or maker.graph is None:  # DoRA reads some values twice
            continue
        if not any(v.uses() or v.is_graph_output() for v in maker.outputs):
            pending += maker.inputs
            remove_node(maker)
    return y


def _unscaled(delta: ir.Value | None) -> ir.Value | None:
    """Returns the product of A and B in g · (y + B A x) − y, which DoRA adds to y."""
    cast = _producer(delta, "Cast")
    minus = _producer(delta if cast is None else cast.inputs[0], "Sub")
    scaled = _producer(minus.inputs[0], "Mul") if minus else None
    total = _producer(scaled.inputs[1], "Add") if scaled else None
    return total.inputs[1] if total else None


def _parameters(delta: ir.Value | None, module: Module) -> list[str | None]:
    """Returns the names of A and B whose product is added; nothing if the nodes do not match."""
    operator, index = _FACTORS[module.kind]
    second = "MatMul" if module.kind == "embedding" else operator
    cast = _producer(delta, "Cast")
    last = _producer(delta if cast is None else cast.inputs[0], second)
    before = _producer(last.inputs[0], operator) if last else None
    if last is None or before is None:
        return []
    factors = [before.inputs[index], last.inputs[1]]
    padded = _producer(factors[1], "Pad")
    if (padded is not None) != bool(module.columns):
        return []
    if padded is not None:
        first, stop, count = module.columns
        if _pads(padded) != [0, first, 0, count - stop]:
            return []
        factors[1] = padded.inputs[0]
    if module.kind == "convolution":
        swaps = [_producer(factor, "Transpose") for factor in factors]
        factors = [None if swap is None else swap.inputs[0] for swap in swaps]
    return [None if factor is None else factor.name for factor in factors]


def _pads(node: ir.Node) -> list[int] | None:
    """Returns the pads of a Pad node, which were an attribute before opset 11."""
    if "pads" in node.attributes:
        return list(node.attributes["pads"].as_ints())
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if given is None else ir.convenience.get_const_tensor(given)
    return None if tensor is None else [int(pad) for pad in tensor.numpy()]


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None
