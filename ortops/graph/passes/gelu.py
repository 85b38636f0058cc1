"""Fusion of a Gelu that was exported as several nodes; the backward pass keeps only its input.

The formula is x · (1 + erf(x / √2)) / 2, or with √(2 / π) · (x + 0.044715 · x³) under a tanh. The
gradient of the latter also reads the output, if that of the next layer does.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.elementwise import gelu
from ortops.graph.edit import emit_one, producer_of
from ortops.graph.matching import Found, Variable, form, product
from ortops.graph.operators import MOVES
from ortops.graph.passes.draft import ONNXRUNTIME, Draft
from ortops.graph.passes.rewrite import (
    Fusion,
    Result,
    formula,
    pattern,
    rewrite,
    rewrite_with_bodies,
)
from ortops.graph.tensor import Tape, Tensor, op

_CUBIC, _ROOT = 0.044715, math.sqrt(2 / math.pi)

PRIVATE = "ortops.gelu"
"""The private domain of gradients until the end of lowering."""

_LARGE = 6.0  # beyond it, the derivative is 0 or 1 up to 1e-9
_MOST = 1 + _CUBIC * _LARGE**2

_X = Variable("the input")
_EXACT = form.Erf(product(math.sqrt(0.5), _X))
_SUM = product(_ROOT, _X + product(_CUBIC, _X, _X, _X))
_APPROXIMATE = form.Tanh(_SUM | product(_ROOT, _X, 1 + product(_CUBIC, _X, _X)))
_Z = Variable("an Erf or Tanh", lambda value: producer_of(value, "Erf", "Tanh") is not None)


class _Gelu(Fusion):
    """Fuses the nodes of a Gelu to one node."""

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes before differentiation, unless the user has a rule for one of them."""
        super().prepare(draft)
        chosen = {node for node in draft.graph if _is_approximate(node) and draft.is_free(node)}
        if chosen and draft.is_of_first_order:
            table = Table()
            table.vjp("Gelu", when=chosen.__contains__)(_later)
            draft.add_rules(table)

    def finish(self, draft: Draft) -> None:
        """Replaces the placeholders, and computes the gate in the gradient in fewer nodes."""
        rewrite(draft.graph, draft.names, _gradient)
        rewrite_with_bodies(draft.graph, draft.names, _gate)


def _is_approximate(node: ir.Node) -> bool:
    is_tanh = node.attributes.get_string("approximate", "none") == "tanh"
    is_gelu = node.op_type == "Gelu" and not node.domain
    return is_gelu and is_tanh and node.outputs[0].dtype == ir.DataType.FLOAT


def _later(g: Tensor, y: Tensor, x: Tensor, *, approximate: str = "none") -> Cotangents:
    """Emits a placeholder: only when all gradients are there, it is known what keeps y."""
    return emit_one(PRIVATE, "Gradient", [g, y, x], g.value.shape)


@pattern("Gradient", domain=PRIVATE)
def _gradient(node: ir.Node, tape: Tape) -> Result:
    g, y, x = (tape.tensor(value) for value in node.inputs if value is not None)
    if not _is_kept(y.value):
        result = gelu(g, y, x, approximate="tanh")
        assert isinstance(result, Tensor)
        return result
    return g * _slope(y, x)


def _slope(y: Tensor, x: Tensor) -> Tensor:
    """Returns the derivative, so that the gradient takes 12 passes over memory instead of 15.

    y = x · s(v) with the logistic function s and v = √(8 / π) · (x + 0.044715 · x³), so that
    dy / dx = s + y · (1 - s) · dv / dx. HardSigmoid is (1 + 0.044715 · x²) / a, and 1 where x is
    large, so that nothing overflows.
    """
    scale = math.sqrt(8 / math.pi)
    h = op.HardSigmoid(x * x, alpha=_CUBIC / _MOST, beta=1 / _MOST)
    s = op.Sigmoid(x * h * (scale * _MOST))
    return s + y * (1 - s) * (h * (3 * scale * _MOST) - 2 * scale)


def _is_kept(y: ir.Value) -> bool:
    """Whether the product that reads a tensor has a gradient that reads it, too, in any shape."""
    products = 0
    pending = [y]
    while pending:
        for user, index in pending.pop().uses():
            if user.op_type in ("FusedMatMul", "Gemm", "MatMul"):
                products += 1
            elif user.op_type in MOVES and not user.domain and index == 0:
                pending.append(user.outputs[0])
    return products > 1


@formula(0.5 + product(0.5, _Z))
def _gate(found: Found, tape: Tape) -> Result:
    """Replaces (1 + z) / 2 with one node if z is an erf or tanh, whose bounds are -1 and 1."""
    z = found[_Z]
    if z.dtype != ir.DataType.FLOAT:
        return None
    return op.HardSigmoid(tape.tensor(z), alpha=0.5, beta=0.5)


@formula(product(0.5, _X, 1 + (_EXACT | _APPROXIMATE)))
def _gelu(found: Found, tape: Tape) -> Result:
    x = found[_X]
    if x.dtype != ir.DataType.FLOAT:
        return f"'{x.name}' is {x.dtype}, and onnxruntime's kernel is for float32"
    return op.Gelu(tape.tensor(x), approximate="tanh" if _APPROXIMATE in found else None)


GELU = _Gelu("gelu", _gelu, fused=("", "Gelu"), serves=ONNXRUNTIME)
