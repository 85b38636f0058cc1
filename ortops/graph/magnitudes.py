"""The two forms of a model with DoRA: scales that are given, and scales that are computed.

DoRA scales each output of a layer by m / ‖W + B A‖, where m is trained and the norm is that of the
output's row of the weight. For inference the scale is an input, like A and B; in training it is
computed. The norm follows from products with A alone, so that W itself is not needed, which may be
quantized: ‖W + B A‖² = ‖W‖² + Σ B (2 A W + A Aᵀ B), summed over the rank.

The norm has no gradient, as in PEFT: it goes through Round, whose gradient is zero, times a power
of two with which Round changes nothing.

Source: arXiv:2402.09353, whose section 4.3 suggests to treat the norm as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortops.errors import ModelError
from ortops.graph.adapters import Adapter, Module
from ortops.graph.files.external import LightModel
from ortops.graph.operators import WEIGHTS

_LARGE = 2.0**100
"""A float of 24 or 53 bits between 2⁻⁴⁰ and 2²⁷, times this, is a whole number."""


def with_computed_scales(light: LightModel, adapter: Adapter | None) -> LightModel:
    """Returns a model that computes the scales of DoRA from the magnitudes, which become inputs.

    Args:
        light: The model, which stays as it is.
        adapter: Its adapter.

    Raises:
        ModelError: If the nodes of a layer are missing.
    """
    layers = {} if adapter is None else adapter.modules
    known = {tensor.name: tensor for tensor in light.proto.graph.initializer}
    modules = [module for module in layers.values() if module.dora and module.scale in known]
    if not modules:
        return light
    result = light.copy()
    graph = result.proto.graph
    made = {name: node for node in graph.node for name in node.output}
    bases = {total: base for m in layers.values() for base, total in m.tensors}
    before: dict[int, list[onnx.NodeProto]] = {}
    for module in modules:
        for name in (module.a, module.b, module.magnitude, module.square):
            if name not in known or not known[name].dims:
                raise ModelError(
                    f"model: its adapter has no '{name}'; restore what ortops.lora.add created"
                )
        node = _layer(module, made, bases)
        before.setdefault(id(node), []).extend(_scale_nodes(module, node, known))
    nodes = [each for node in graph.node for each in (*before.get(id(node), ()), node)]
    given = {module.scale for module in modules}
    inputs = [value for value in graph.input if value.name not in given]
    for module in modules:
        tensor = known[module.magnitude]
        inputs.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    kept = [tensor for tensor in graph.initializer if tensor.name not in given]
    _fill(graph, node=nodes, input=inputs, initializer=kept)
    return result


def with_given_scales(light: LightModel, adapter: Adapter | None) -> LightModel:
    """Returns a model whose scales are inputs again: ones, as long as the adapter adds nothing.

    Args:
        light: The model, which stays as it is.
        adapter: Its adapter, whose A or B are zeros.
    """
    layers = {} if adapter is None else adapter.modules
    known = {tensor.name: tensor for tensor in light.proto.graph.initializer}
    modules = [m for m in layers.values() if m.dora and m.scale not in known]
    if not modules:
        return light
    result = light.copy()
    graph = result.proto.graph
    scales = {module.scale for module in modules}
    computing = tuple(f"{scale}/norm/" for scale in scales)
    nodes = [n for n in graph.node if not (n.name.startswith(computing) or scales & {*n.output})]
    trained = {module.magnitude for module in modules}
    inputs = [value for value in graph.input if value.name not in trained]
    tensors = list(graph.initializer)
    for module in modules:
        m = known[module.magnitude]
        ones = np.ones(m.dims, helper.tensor_dtype_to_np_dtype(m.data_type))
        tensors.append(numpy_helper.from_array(ones, module.scale))
        inputs.append(helper.make_tensor_value_info(module.scale, m.data_type, m.dims))
    _fill(graph, node=nodes, input=inputs, initializer=tensors)
    return result


def _fill(graph: onnx.GraphProto, **fields: Sequence[Any]) -> None:
    """Sets repeated fields of a graph to messages, which may be in it."""
    for field, values in fields.items():
        copies = [type(value)() for value in values]
        for copy, value in zip(copies, values, strict=True):
            copy.CopyFrom(value)
        graph.ClearField(field)
        getattr(graph, field).extend(copies)


def _layer(
    module: Module, made: dict[str, onnx.NodeProto], bases: dict[str, str]
) -> onnx.NodeProto:
    """Returns the node that multiplies by the weight of a layer."""
    name = module.tensors[0][0]
    while name in bases:  # of another part of a fused layer
        name = bases[name]
    node = made.get(name)
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        node = made.get(node.input[0])
    if node is None or (node.op_type not in WEIGHTS and node.op_type != "Gather"):
        raise ModelError(
            f"model: no node of the main graph computes '{name}', which the adapter scales; give "
            "the model as ortops.lora created it"
        )
    return node


def _scale_nodes(
    module: Module, layer: onnx.NodeProto, known: dict[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Returns the nodes that compute the scale of a layer from A, B and its magnitude."""
    nodes: list[onnx.NodeProto] = []
    scope, kind = f"{module.scale}/norm", known[module.a].data_type

    def emit(op_type: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        name = f"{scope}/{op_type}_{len(nodes)}"
        nodes.append(helper.make_node(op_type, inputs, [output or name], name=name, **attributes))
        return str(nodes[-1].output[0])

    def constant(value: Any, dtype: Any = np.int64) -> str:
        return emit("Constant", [], value=numpy_helper.from_array(np.array(value, dtype)))

    axes = len(known[module.a].dims)
    a = emit("Transpose", [module.a], perm=[1, 0, *range(2, axes)])
    b, index = module.b, 0 if layer.op_type == "Gather" else 1
    if module.kind == "convolution":
        flat = constant([0, -1])
        a, b = emit("Reshape", [a, flat]), emit("Reshape", [b, flat])
        weight = emit("Cast", [emit("Reshape", [layer.input[1], flat])], to=kind)
        product = emit("MatMul", [a, emit("Transpose", [weight], perm=[1, 0])])
    elif layer.op_type == "MatMulNBits":
        narrow = known[layer.input[2]].data_type
        product = emit("MatMulNBits", [emit("Cast", [a], to=narrow), *layer.input[1:4]])
        nodes[-1].domain = layer.domain
        nodes[-1].attribute.extend(e for e in layer.attribute if e.name != "accuracy_level")
        product = emit("Cast", [product], to=kind)
    else:
        weight = emit("Cast", [layer.input[index]], to=kind)
        product = emit(layer.op_type if layer.op_type == "Gemm" else "MatMul", [a, weight])
        if layer.op_type == "Gemm":
            kept = [each for each in layer.attribute if each.name in ("alpha", "transB")]
            nodes[-1].attribute.extend(kept)
    if module.columns:
        first, last, _ = module.columns
        product = emit("Slice", [product, constant([first]), constant([last]), constant([1])])
    square = emit("MatMul", [emit("MatMul", [a, emit("Transpose", [a], perm=[1, 0])]), b])
    total = emit("Mul", [b, emit("Add", [emit("Add", [product, product]), square])])
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    summed = emit("MatMul", [constant(np.ones((1, module.rank)), dtype), total])
    shape = constant([-1, *(1 for _ in range(2, axes))])
    squares = emit("Add", [known[module.square].name, emit("Reshape", [summed, shape])])
    whole = emit("Round", [emit("Mul", [emit("Sqrt", [squares]), constant(_LARGE, dtype)])])
    norm = emit("Mul", [whole, constant(1 / _LARGE, dtype)])
    emit("Div", [module.magnitude, norm], module.scale)
    return nodes
