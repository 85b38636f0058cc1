"""Merges an adapter into the weights of its base."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ortops.engine.building.readers import readers
from ortops.errors import ModelError, UnsupportedError
from ortops.graph import convert
from ortops.graph.adapters import METADATA_KEY, adapter_of
from ortops.graph.edit import describe, remove_node, take_place
from ortops.graph.files import loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import to_proto
from ortops.graph.matching import Search, Variable, form
from ortops.graph.names import Names
from ortops.lora.evaluation import evaluated, update_of, weight_index
from ortops.lora.model import WITHOUT_TRAINING, Array, read_adapted, refuse_not_finite
from ortops.lora.removal import remove_adapter
from ortops.lora.targets import steps_to_weight
from ortops.surgery.reading import drop_unread, refuse_training

_DYNAMIC = form.Cast(form.MatMulInteger(...)) * Variable("a scale")
"""A product of integers, scaled."""


@loading.blame_model
def merge(model: ModelLike, *, dequantize: bool = False) -> onnx.ModelProto:
    """Returns a model with its adapter merged into the weights: W + scaling · B A, scaled in DoRA.

    Args:
        model: A model with an adapter from `add` or `from_peft`: a ModelProto, its bytes, or its
            path; not changed.
        dequantize: Whether to convert quantized weights to floating point. Otherwise quantized
            weights are an error, as quantizing the sum again would lose part of what the adapter
            has learned.

    Returns:
        A new model without an adapter, of the same opset, with the names of the base. If other
        layers share a weight, they keep it, and the merged layer gets a new one,
        ``<layer>.weight``. External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the model has no adapter, the adapter's nodes were changed or its values are
            not finite, a sum overflows the weight's type, or the model has training_info.
        UnsupportedError: If a weight is quantized and ``dequantize`` is false, or the output of a
            layer is quantized.

    Example:
        >>> from ortops.docs import examples
        >>> from ortops.lora import add
        >>> base = examples.mlp((4, 16, 2))
        >>> merged = merge(add(base, rank=2))
        >>> [node.op_type for node in merged.graph.node] == [n.op_type for n in base.graph.node]
        True
    """
    adapted = read_adapted(model)
    refuse_training(adapted.model.proto, WITHOUT_TRAINING)
    refuse_not_finite(adapted.parameters, "model")
    proto, folder = loading.load(model)
    work = convert.to_ir(proto, folder)
    names = Names(work.graph)
    updates: dict[tuple[ir.Node, ...], tuple[str, Array, Array]] = {}
    for name, values in remove_adapter(work, adapted.adapter).items():
        module = adapted.adapter.modules[name]
        for nodes in _by_weight([_node(value, name) for value in values]):
            with np.errstate(over="ignore", invalid="ignore"):  # `_sum` rejects an overflow
                update, factor = update_of(adapted, module, work, nodes[0])
                layer, before, factors = updates.get(nodes, (name, 0, 1))  # of other parts
                updates[nodes] = layer, before + update, factors * factor
    for nodes, (name, update, factor) in updates.items():
        with np.errstate(over="ignore", invalid="ignore"):
            _fold(work, names, name, nodes, (update, factor), dequantize)
    del work.metadata_props[METADATA_KEY]
    return to_proto(work)


def refuse_unmergeable(model: LightModel) -> None:
    """Rejects a model whose adapter cannot be merged, as a layer is computed in whole numbers."""
    work, adapter = convert.to_ir(model), adapter_of(model.proto.metadata_props)
    if adapter is not None:
        for name, values in remove_adapter(work, adapter).items():
            for value in values:
                _node(value, name)


def _by_weight(nodes: Sequence[ir.Node]) -> list[tuple[ir.Node, ...]]:
    """Returns the nodes of a layer that read a weight alike: exporters may store it twice."""
    found: dict[object, list[ir.Node]] = {}
    for node in nodes:
        steps = steps_to_weight(node.inputs[weight_index(node)])
        source = None if steps is None else (steps[0], *(step.op_type for step in steps[1]))
        factors = [node.attributes.get_float("alpha", 1.0), node.attributes.get_int("transB", 0)]
        found.setdefault((node.op_type, source, *factors * (node.op_type == "Gemm")), []).append(
            node
        )
    return [tuple(each) for each in found.values()]


def _node(value: ir.Value, layer: str) -> ir.Node:
    """Returns the node of the base that computes a tensor."""
    producer = value.producer()
    assert producer is not None
    if producer.op_type == "GatherBlockQuantized" or any(Search(_DYNAMIC, value, removing=False)):
        raise UnsupportedError(
            f"{describe(producer)}: layer '{layer}' is computed with quantized numbers, so its "
            "adapter cannot be merged; keep it, or merge it into the float model and quantize that"
        )
    if producer.op_type == "DequantizeLinear":
        raise UnsupportedError(
            f"{describe(producer)}: the output of layer '{layer}' is quantized before the adapter "
            "is added, so the adapter cannot be merged; keep it, or merge it into the float model "
            "and quantize that"
        )
    return producer


def _fold(
    work: ir.Model,
    names: Names,
    layer: str,
    nodes: Sequence[ir.Node],
    update: tuple[Array, Array],
    dequantize: bool,
) -> None:
    """Adds an update to the weight that nodes share, and multiplies the sum by a factor."""
    node, (delta, factor) = nodes[0], update
    index = weight_index(node)
    found = steps_to_weight(node.inputs[index])
    if found is None:
        raise ModelError(
            f"{describe(node)}: its weight is no longer a constant; merge the adapter before other "
            "tools rewrite the model"
        )
    source, steps = found
    is_quantized = node.op_type == "MatMulNBits" or any(
        step.op_type == "DequantizeLinear" for step in steps
    )
    if is_quantized and not dequantize:
        raise UnsupportedError(
            f"{describe(node)}: its weight '{source.name}' is quantized, and merging would round "
            "it again; keep the adapter, or convert the weight to floating point (dequantize=True)"
        )
    if node.op_type == "Gemm":
        alpha = node.attributes.get_float("alpha", 1.0)
        if alpha == 0:
            raise UnsupportedError(
                f"{describe(node)}: its weight has no effect, as its alpha is 0; keep the adapter"
            )
        delta = delta / delta.dtype.type(alpha)
        if node.attributes.get_int("transB", 0) == 1:
            delta, factor = delta.T, factor.T
    alone = {reader.node for reader in readers(source)} <= set(nodes)
    shown = source.is_graph_output() or any(v.is_graph_output() for s in steps for v in s.outputs)
    if alone and not is_quantized and not shown:
        for step in reversed(steps):
            if step.op_type == "Transpose":
                axes = np.argsort(step.attributes.get_ints("perm", range(delta.ndim)[::-1]))
                delta, factor = np.transpose(delta, axes), np.transpose(factor, axes)
        tensor = ir.convenience.get_const_tensor(source)
        assert tensor is not None
        _set(source, _sum(layer, source.name, tensor.numpy(), delta, factor))
        return
    old = [each.inputs[index] for each in nodes]
    weight = _sum(layer, source.name, evaluated(work, node, index, steps), delta, factor)
    value = ir.Value(name=names.unique(f"{layer}.weight"), const_value=ir.tensor(weight))
    work.graph.register_initializer(value)
    for each in nodes:
        if each.op_type == "MatMulNBits":
            old += each.inputs[2:]
            _to_product(each, value, names)
        else:
            each.replace_input_with(index, value)
    for unread in dict.fromkeys(old):
        drop(unread)


def _sum(layer: str, name: str | None, weight: Array, delta: Array, factor: Array) -> Array:
    if weight.shape != delta.shape:
        raise ModelError(
            f"model: the product of A and B of layer '{layer}' has shape {list(delta.shape)}, but "
            f"the layer's weight has {list(weight.shape)}; add the adapter again"
        )
    dtype = np.promote_types(weight.dtype, np.float32)
    total: Array = weight.astype(dtype) + delta.astype(dtype)
    total = (total * factor.astype(dtype)).astype(weight.dtype)
    if not np.isfinite(total[np.isfinite(weight)]).all():
        raise ModelError(
            f"model: merging the adapter of layer '{layer}' overflows {weight.dtype}, the type of "
            f"its weight '{name}'; keep the adapter, or give a model of a wider type"
        )
    return total


def _set(source: ir.Value, array: Array) -> None:
    tensor = ir.tensor(np.ascontiguousarray(array), name=source.name)
    node = source.producer()
    if node is None:
        source.const_value = tensor
        return
    for name in list(node.attributes):
        del node.attributes[name]
    node.attributes.add(ir.AttrTensor("value", tensor))


def drop(unused: ir.Value | None) -> None:
    """Removes an unused value, and the nodes and constants that only it needed."""
    pending = [unused]
    while pending:
        value = pending.pop()
        if value is None or value.uses():
            continue
        node = value.producer()
        if node is None or node.op_type == "Constant":
            drop_unread(value)
        elif node.graph and not any(v.uses() or v.is_graph_output() for v in node.outputs):
            pending += reversed(node.inputs)
            remove_node(node)


def _to_product(node: ir.Node, weight: ir.Value, names: Names) -> None:
    """Replaces a MatMulNBits node with MatMul, and Add if it has a bias."""
    bias = node.inputs[5] if len(node.inputs) > 5 else None
    product = ir.Node("", "MatMul", [node.inputs[0], weight], name=node.name)
    nodes = [product]
    if bias is not None:
        product.outputs[0].name = names.unique(f"{node.name or 'MatMul'}/product")
        nodes.append(ir.Node("", "Add", [product.outputs[0], bias]))
        nodes[-1].name = names.unique(f"{node.name or 'MatMul'}/Add")
    old, new = node.outputs[0], nodes[-1].outputs[0]
    new.type, new.shape = old.type, old.shape
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, nodes)
    take_place(old, new)
    remove_node(node)
