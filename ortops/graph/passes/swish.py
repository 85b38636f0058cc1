"""Fusion of x · sigmoid(x), the activation Swish or SiLU; the backward pass keeps only its input.

onnxruntime's QuickGelu computes it in one pass over memory, with the same bits.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.elementwise import swish
from ortops.graph.edit import emit_one
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.matching import Found, Variable, form
from ortops.graph.passes.draft import ONNXRUNTIME
from ortops.graph.passes.rewrite import Fusion, Result, formula
from ortops.graph.tensor import Tape, Tensor

TABLE = Table()
"""The rule of QuickGelu, x · sigmoid(alpha · x)."""

_X = Variable("the input")


@formula(_X * form.Sigmoid(_X))
def _fused(found: Found, tape: Tape) -> Result:
    x = found[_X]
    if x.dtype != ir.DataType.FLOAT:
        return f"'{x.name}' is {x.dtype}, not float32"
    return emit_one(MICROSOFT, "QuickGelu", [tape.tensor(x)], x.shape, alpha=1.0)


@TABLE.vjp("QuickGelu", domain=MICROSOFT)
def _quick_gelu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.702) -> Cotangents:
    return swish(g, y, x, alpha=alpha)


SWISH = Fusion("swish", _fused, fused=(MICROSOFT, "QuickGelu"), table=TABLE, serves=ONNXRUNTIME)
