"""Relu and Clip: gradients as products with masks.

The rules of the public graph use Where, which is slower (see `ortops.graph.passes.finite`).
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.passes.draft import ANYWHERE, Draft, Pass
from ortops.graph.passes.finite import clip_bounds, equal_mask, mask
from ortops.graph.tensor import Tensor


class _Rectified(Pass):
    """Selects the rules for float32 Relu and Clip nodes with finite cotangents."""

    def prepare(self, draft: Draft) -> None:
        """Adds rules for such nodes, unless there are gradients of higher order."""
        chosen = {node for node in draft.graph if _is_chosen(node) and draft.is_free(node)}
        if not chosen or not draft.is_of_first_order:
            return
        chosen = {node for node in chosen if node.outputs[0] not in draft.unbounded}
        table = Table()
        table.vjp("Relu", when=chosen.__contains__)(_relu)
        table.vjp("Clip", when=chosen.__contains__)(_clip)
        draft.add_rules(table)


def _is_chosen(node: ir.Node) -> bool:
    if node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    return node.op_type == "Relu" or (node.op_type == "Clip" and clip_bounds(node) is not None)


def _relu(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g * mask(y)


def _clip(g: Tensor, y: Tensor, x: Tensor, *bounds: Tensor | None) -> Cotangents:
    return g * equal_mask(x, y), *[None for _ in bounds]


RECTIFIED = _Rectified("rectified", ANYWHERE)
