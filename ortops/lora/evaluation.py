"""What adapters do to weights: dequantized weights, updates, and the scales of DoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.uninterrupted import finished_at_exit
from ortops.errors import UnsupportedError
from ortops.graph import convert
from ortops.graph.adapters import Module
from ortops.graph.edit import describe
from ortops.lora.model import Adapted, Array
from ortops.lora.removal import remove_adapter
from ortops.lora.targets import steps_to_weight
from ortops.surgery.reading import model_of, open_model


def weight_index(node: ir.Node) -> int:
    """Returns the index of the weight among the inputs of a layer."""
    return 0 if node.op_type == "Gather" else 1


def update_of(
    adapted: Adapted, module: Module, work: ir.Model, node: ir.Node
) -> tuple[Array, Array]:
    """Returns what an adapter adds to a weight, and what it then multiplies it by.

    Args:
        adapted: The model with the adapter.
        module: The layer.
        work: The model without the adapter.
        node: The node of the layer.

    Returns:
        The two arrays, [in, out], or [out, in, *kernel] for a convolution.
    """
    found = adapted.parameters
    update = product(module, found[module.a], found[module.b])
    factor = np.ones_like(update)
    if module.dora:
        scale = found.get(module.scale)
        if scale is None:
            m, squares = found[module.magnitude], squares_of(work, node, module.kind, update)
            scale = m / norms_of(module, m, squares)
        if module.kind == "convolution":
            factor *= scale.reshape(-1, *(1 for _ in factor.shape[1:]))
        else:
            first, last, _ = module.columns or (0, factor.shape[1], 0)
            factor[:, first:last] *= scale
    return update, factor


def norms_of(module: Module, magnitude: Array, squares: Array) -> Array:
    """Returns the norms of a layer's outputs, in the shape and the type of its magnitude."""
    first, last, _ = module.columns or (0, len(squares), 0)
    found: Array = np.sqrt(squares[first:last]).reshape(magnitude.shape).astype(magnitude.dtype)
    return found


def all_norms(adapted: Adapted, values: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the norms of the layers with DoRA, by the names of their scales.

    Args:
        adapted: The model with the adapter.
        values: A and B by name.
    """
    modules = {name: m for name, m in adapted.adapter.modules.items() if m.dora}
    if not modules:
        return {}
    work = convert.to_ir(adapted.model)
    bases = remove_adapter(work, adapted.adapter)
    result = {}
    for name, module in modules.items():
        node = bases[name][0].producer()
        while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
            before = node.inputs[0]
            node = None if before is None else before.producer()
        assert node is not None
        update = product(module, values[module.a], values[module.b])
        m = adapted.parameters[module.magnitude]
        result[module.scale] = norms_of(module, m, squares_of(work, node, module.kind, update))
    return result


def product(module: Module, a: Array, b: Array) -> Array:
    """Returns the update of a weight: [in, out], or [out, in, *kernel] for a convolution."""
    dtype = np.promote_types(a.dtype, np.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    if module.kind == "convolution":
        result: Array = np.tensordot(b.reshape(b.shape[:2]), a, axes=(0, 1))
        return result
    result = a @ b
    if module.columns:
        first, last, count = module.columns
        result = np.pad(result, [(0, 0), (first, count - last)])
    return result


def squares_of(work: ir.Model, node: ir.Node, kind: str, update: Array | float = 0.0) -> Array:
    """Returns the squared norm of the weight of each output with an update, in float64.

    Args:
        work: The model without the adapter.
        node: The node of the layer.
        kind: See `ortops.graph.adapters.Module`.
        update: What is added to the weight.

    Raises:
        UnsupportedError: If the weight cannot be computed.
    """
    weight = weight_of(work, node).astype(np.float64)
    if node.op_type == "Gemm":
        weight = weight.T if node.attributes.get_int("transB", 0) == 1 else weight
        weight = weight * node.attributes.get_float("alpha", 1.0)
    square: Array = np.square(weight + update)
    axes = tuple(range(1, square.ndim)) if kind == "convolution" else 0
    return np.asarray(square.sum(axis=axes))


def weight_of(work: ir.Model, node: ir.Node) -> Array:
    """Returns the dequantized weight of a node of a layer, as the node reads it.

    Args:
        work: The model.
        node: The node.

    Raises:
        UnsupportedError: If it cannot be computed.
    """
    index = weight_index(node)
    found = steps_to_weight(node.inputs[index])
    if found is None or node.op_type not in ("MatMul", "Gemm", "Conv", "Gather", "MatMulNBits"):
        raise UnsupportedError(
            f"{describe(node)}: its weight, the norms of which DoRA needs, cannot be computed; "
            "train it with dora=False, or leave the layer out"
        )
    return evaluated(work, node, index, found[1])


@finished_at_exit
def evaluated(work: ir.Model, node: ir.Node, index: int, steps: Sequence[ir.Node]) -> Array:
    """Returns the dequantized weight of a node, computed by onnxruntime.

    Args:
        work: The model.
        node: The node.
        index: The index of the weight among its inputs.
        steps: The nodes between the constant and the node.

    Raises:
        UnsupportedError: If what it is dequantized with is not constant.
    """
    weight = node.inputs[index]
    assert weight is not None
    nodes = [ir.serde.serialize_node(step) for step in steps]
    read = {value for step in steps for value in step.inputs} | {weight}
    inputs, feeds, result = [], {}, weight.name or ""
    if node.op_type == "MatMulNBits":
        product = ir.serde.serialize_node(node)
        attributes = [a for a in product.attribute if a.name != "accuracy_level"]
        del product.attribute[:], product.input[5:]  # without integer products and the bias
        product.attribute.extend(attributes)
        product.input[0], product.output[0], result = "identity", "product", "product"
        nodes.append(product)
        read |= set(node.inputs[2:5])
        scales = node.inputs[2]
        assert scales is not None
        dtype = scales.dtype or ir.DataType.FLOAT
        feeds["identity"] = np.eye(node.attributes["K"].as_int(), dtype=dtype.numpy())
        inputs = [onnx.helper.make_tensor_value_info("identity", dtype.value, None)]
    made = {value for step in steps for value in step.outputs}
    output = onnx.helper.make_value_info(result, onnx.TypeProto())
    graph = onnx.helper.make_graph(nodes, "weight", inputs, [output])
    for value in read - made:
        if value is None:
            continue
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None:
            raise UnsupportedError(
                f"{describe(node)}: '{value.name}', which its weight is dequantized with, is not a "
                "constant; keep the adapter"
            )
        if value is weight and not nodes:
            return np.asarray(tensor.numpy())
        ir.serde.serialize_tensor_into(graph.initializer.add(), tensor)
        graph.initializer[-1].name = value.name or ""
    found: Array = open_model(model_of(work, graph)).run(None, feeds)[0]
    return found
