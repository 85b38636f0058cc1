"""Multiplies by quantized weights without integers if onnxruntime is wrong with them.

With ``accuracy_level=4``, MatMulNBits rounds activations to 8 bits. onnxruntime 1.32 computes zeros
then if the weights are constant and the scales are not: if these are trained, or if onnxruntime
inserts a Cast of float16 scales that it does not fold, which happens inside a Scan and below the
optimization level ALL. It fuses DequantizeLinear and MatMul into that node, too.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.edit import all_nodes
from ortops.graph.tensor import Names

__all__ = ["use_exact_products"]

_EIGHT_BITS = 4


def use_exact_products(graph: ir.Graph) -> None:
    """Removes ``accuracy_level=4`` where onnxruntime is wrong with it, also in subgraphs.

    Weights with float16 scales are dequantized to float32 and then rounded, which gives the same
    numbers, and which onnxruntime does not fuse.

    Args:
        graph: A graph, changed in place.
    """
    names = Names(graph)
    for node in list(all_nodes(graph)):
        if not node.domain and node.op_type == "DequantizeLinear":
            _dequantize_to_float32(node, names)
        is_product = (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits")
        if is_product and node.attributes.get_int("accuracy_level", 0) == _EIGHT_BITS:
            scales = node.inputs[2]
            if scales is None or scales.dtype != ir.DataType.FLOAT or not _is_constant(scales):
                del node.attributes["accuracy_level"]


def _dequantize_to_float32(node: ir.Node, names: Names) -> None:
    """Dequantizes a constant weight to float32, and casts the result to float16."""
    weight, scales = node.inputs[:2]
    old = node.outputs[0]
    if weight is None or scales is None or not _is_constant(weight) or old.is_graph_output():
        return
    if scales.dtype != ir.DataType.FLOAT16 or "output_dtype" in node.attributes:
        return
    wide, narrow = (
        ir.Node("", "Cast", [value], [ir.AttrInt64("to", kind.value)], name=names.unique("Cast"))
        for value, kind in ((scales, ir.DataType.FLOAT), (old, ir.DataType.FLOAT16))
    )
    new = narrow.outputs[0]
    new.type, new.shape = old.type, old.shape
    old.replace_all_uses_with(new)
    narrow.replace_input_with(0, old)
    old.type = wide.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    wide.outputs[0].shape = scales.shape
    for cast in (wide, narrow):
        cast.outputs[0].name = names.unique(f"{cast.name}_output")
    node.replace_input_with(1, wide.outputs[0])
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, [wide])
    node.graph.insert_after(node, [narrow])


def _is_constant(value: ir.Value) -> bool:
    return not value.is_graph_input() and ir.convenience.get_const_tensor(value) is not None
