"""Multiplies by quantized weights without integers if onnxruntime is wrong with them.

With ``accuracy_level=4``, MatMulNBits rounds activations to 8 bits. onnxruntime 1.32 computes zeros
then if the weights are constant and the scales are not: if these are trained, or if onnxruntime
inserts a Cast of float16 scales that it does not fold, which happens inside a Scan and below the
optimization level ALL.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.edit import all_nodes

__all__ = ["use_exact_products"]

_EIGHT_BITS = 4


def use_exact_products(graph: ir.Graph) -> None:
    """Removes ``accuracy_level=4`` where onnxruntime is wrong with it, also in subgraphs.

    Args:
        graph: A graph, changed in place.
    """
    for node in all_nodes(graph):
        is_product = (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits")
        if is_product and node.attributes.get_int("accuracy_level", 0) == _EIGHT_BITS:
            scales = node.inputs[2]
            if scales is None or scales.dtype != ir.DataType.FLOAT or not _is_constant(scales):
                del node.attributes["accuracy_level"]


def _is_constant(value: ir.Value) -> bool:
    return not value.is_graph_input() and ir.convenience.get_const_tensor(value) is not None
