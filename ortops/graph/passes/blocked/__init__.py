"""Convolutional networks in onnxruntime's blocked layout.

onnxruntime's fastest convolution kernels work on a layout with blocks of channels, and onnxruntime
uses them only if the weights are constants. In training they are not. Therefore, before
differentiation, `insertion` replaces convolutions, and the operators between them, with operators
on blocked tensors, whose gradient rules are in `rules`. After differentiation, `expansion` replaces
them with onnxruntime's nodes for these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import are_of_first_order
from ortops.graph.edit import merge_equal_nodes
from ortops.graph.passes.blocked.expansion import expand
from ortops.graph.passes.blocked.insertion import insert
from ortops.graph.passes.blocked.kernels import KERNEL_DOMAIN, block_size
from ortops.graph.passes.blocked.rules import DOMAIN, TABLE
from ortops.graph.passes.draft import Draft, Pass


class _Blocked(Pass):
    """Converts convolutions to the blocked layout, once the sizes of a batch are known.

    The result is for onnxruntime's CPU provider on this machine only. Convolutions of unknown sizes
    are not changed. Nothing is changed if onnxruntime lacks these kernels here, or if there are
    gradients of higher order or in subgraphs.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether there are convolutions of images in float32, and kernels for them."""
        found = any(map(_is_of_images, model.graph)) and are_of_first_order(model.graph)
        return found and block_size() is not None

    def prepare(self, draft: Draft) -> None:
        """Inserts operators on blocked tensors."""
        if draft.sizes is None or not any(map(_is_of_images, draft.graph)):
            return
        size = block_size() if draft.is_of_first_order else None
        if size is not None:
            draft.add_rules(TABLE)
            insert(draft, size)

    def finish(self, draft: Draft) -> None:
        """Replaces them with the kernels' nodes, and merges equal nodes of both passes."""
        graph = draft.graph
        if not any(node.domain == DOMAIN for node in graph):
            return
        expand(graph, draft.names)
        merge_equal_nodes(graph)


def _is_of_images(node: ir.Node) -> bool:
    """Whether a node is a convolution of images in float32."""
    y = node.outputs[0] if node.outputs else None
    return (
        node.op_type in ("Conv", "ConvTranspose")
        and not node.domain
        and y is not None
        and y.dtype == ir.DataType.FLOAT
        and y.shape is not None
        and len(y.shape) == 4
    )


def is_mostly_blocked(graph: ir.Graph) -> bool:
    """Whether the results of products are mostly those of convolutions in the blocked layout.

    onnxruntime's optimizer can improve little in such a graph. Sizes count, not nodes: a live
    BatchNormalization has several products of its own, whose results are as small as its scale.
    """
    kinds = ("Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul")
    blocked = others = 0
    for node in graph:
        if node.op_type in kinds:
            shape = node.outputs[0].shape
            if shape is None or not shape.is_static():
                return False
            size = math.prod(shape.numpy())
            blocked += size if node.domain == KERNEL_DOMAIN else 0
            others += size if node.domain != KERNEL_DOMAIN else 0
    return blocked > others


BLOCKED = _Blocked("blocked")
