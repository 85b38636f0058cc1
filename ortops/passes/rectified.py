"""Relu: its gradient is a product with a mask.

The rule of the public graph chooses, by Where, between the cotangent and 0, which takes longer (see
`ortops.passes.finite`).
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.autodiff.registry import Cotangents, Table
from ortops.graph.tensor import Tensor
from ortops.passes.draft import ANYWHERE, Draft, Pass
from ortops.passes.finite import mask

__all__ = ["RECTIFIED"]


class _Rectified(Pass):
    """Chooses the rule for Relu nodes of float32 whose cotangents are finite."""

    def prepare(self, draft: Draft) -> None:
        """Adds a rule that takes such nodes, unless a gradient of a gradient is asked for."""
        chosen = {node for node in draft.graph if _is_relu(node) and draft.is_free(node)}
        if not chosen or not draft.is_of_first_order:
            return
        chosen = {node for node in chosen if node.outputs[0] not in draft.unbounded}
        table = Table()
        table.vjp("Relu", when=chosen.__contains__)(_relu)
        draft.add_rules(table)


def _is_relu(node: ir.Node) -> bool:
    return node.op_type == "Relu" and not node.domain and node.outputs[0].dtype == ir.DataType.FLOAT


def _relu(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g * mask(y)


RECTIFIED = _Rectified("rectified", ANYWHERE)
