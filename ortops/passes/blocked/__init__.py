"""Convolution networks in onnxruntime's blocked layout.

onnxruntime's fastest convolution kernels want channels in blocks, and it uses them only where the
weights are constants. In training they are not. So, before gradients are taken, `insertion`
replaces convolutions, and what lies between them, by operators on blocked tensors, whose rules are
in `rules`; after that, `expansion` replaces what is left of them by the kernels' own nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.autodiff.gradient_node import is_of_higher_order
from ortops.passes.blocked.expansion import expand
from ortops.passes.blocked.insertion import insert
from ortops.passes.blocked.kernels import KERNEL_DOMAIN, block_size
from ortops.passes.blocked.rules import DOMAIN, TABLE
from ortops.passes.draft import Draft, Pass

__all__ = ["BLOCKED", "is_mostly_blocked"]

_RANDOM = ("Bernoulli", "Dropout")
"""Operators that give other numbers each time, and that onnx-ir's pass takes for deterministic."""


class _Blocked(Pass):
    """Puts convolutions in the blocked layout, once a batch has told the sizes.

    The result is for onnxruntime's CPU provider on this machine only. Convolutions whose shapes are
    not known as numbers stay as they are, and so does everything where there are no such kernels or
    a gradient of higher order is asked for.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether there are convolutions of images in float32, and kernels for them."""
        found = any(map(_is_of_images, model.graph)) and not is_of_higher_order(model.graph)
        return found and block_size() is not None

    def prepare(self, draft: Draft) -> None:
        """Puts operators on blocked tensors in."""
        if draft.sizes is None or not any(map(_is_of_images, draft.graph)):
            return
        size = block_size() if draft.is_of_first_order else None
        if size is not None:
            draft.add_rules(TABLE)
            insert(draft, size)

    def finish(self, draft: Draft) -> None:
        """Replaces them by the kernels' nodes, those of forward and backward pass once."""
        graph = draft.graph
        if not any(node.domain == DOMAIN for node in graph):
            return
        expand(graph, draft.names)
        if not any(node.op_type in _RANDOM for node in graph):
            passes.CommonSubexpressionEliminationPass()(draft.model)


def _is_of_images(node: ir.Node) -> bool:
    """Whether a node is a convolution of images in float32."""
    y = node.outputs[0] if node.outputs else None
    return (
        node.op_type == "Conv"
        and not node.domain
        and y is not None
        and y.dtype == ir.DataType.FLOAT
        and y.shape is not None
        and len(y.shape) == 4
    )


def is_mostly_blocked(graph: ir.Graph) -> bool:
    """Whether most products in a graph are convolutions in the blocked layout.

    Such a graph has what onnxruntime should run, so that its optimizer would find little to do.
    """
    kinds = ("Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul")
    products = [node.domain for node in graph if node.op_type in kinds]
    return 2 * products.count(KERNEL_DOMAIN) > len(products)


BLOCKED = _Blocked("blocked")
