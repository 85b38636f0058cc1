"""Fusion of x · sigmoid(x), the activation Swish or SiLU; the backward pass keeps only its input.

onnxruntime's QuickGelu computes it in one pass over memory, with the same bits.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.elementwise import swish
from ortops.graph.edit import has_one_reader, producer_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, Tensor

TABLE = Table()
"""The rule of QuickGelu, x · sigmoid(alpha · x)."""


class _Swish(Pass):
    """Fuses the two nodes of a Swish to one node."""

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes before differentiation, unless the user has a rule for one of them."""
        nodes = [node for node in draft.graph if not node.domain]
        parts = [node for node in nodes if node.op_type in ("Mul", "Sigmoid")]
        if not any(node.op_type == "Sigmoid" for node in parts):
            return
        if all(map(draft.is_free, (*parts, ir.Node(MICROSOFT, "QuickGelu", [])))):
            rewrite(draft.graph, draft.names, _fused)
            draft.add_rules(TABLE)


@pattern("Mul")
def _fused(node: ir.Node, tape: Tape) -> Result:
    for x, other in (node.inputs, node.inputs[::-1]):
        sigmoid = producer_of(other, "Sigmoid")
        if x is None or sigmoid is None or sigmoid.inputs[0] is not x:
            continue
        if x.dtype != ir.DataType.FLOAT or not has_one_reader(sigmoid.outputs[0]):
            continue
        fused = ir.Node(MICROSOFT, "QuickGelu", [x], [ir.AttrFloat32("alpha", 1.0)], num_outputs=1)
        fused.outputs[0].type, fused.outputs[0].shape = x.type, x.shape
        tape.append(fused)
        tape.graph.opset_imports.setdefault(MICROSOFT, 1)
        return tape.tensor(fused.outputs[0])
    return None


@TABLE.vjp("QuickGelu", domain=MICROSOFT)
def _quick_gelu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.702) -> Cotangents:
    return swish(g, y, x, alpha=alpha)


SWISH = _Swish("swish", ONNXRUNTIME)
