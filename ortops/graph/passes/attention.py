"""The gradient of attention's Softmax in fewer passes over the probabilities.

With the output O = P V and its cotangent dO, the cotangent of the probabilities P is dP = dO Vᵀ,
and that of the scores P · (dP - r). The rows of P · dP have the sums r, which are also those of
dO · O (Dao, Fu, Ermon, Rudra and Ré, "FlashAttention", 2022). A step reads P and dP once less this
way, and O instead, which is smaller if there are more keys than elements in a value. If there are
many more, the product subtracts r itself, as [dO, r] [V, -1]ᵀ.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import attribute_values, permutation_of, producer_of
from ortops.graph.matching import Found, Variable, form, is_last_axis, kept
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.passes.rewrite import Result, formula, pattern, rewrite_with_bodies
from ortops.graph.tensor import Tape, op, shape_of

_MANY = 4  # keys for each element of a value: then two Concats are cheaper than a Sub (measured)

_P, _DY, _V, _R, _AXES = (Variable(f"the {what}") for what in ("P", "dO", "V", "r", "axes"))
_TURNED = kept(form.Transpose(_V))
_DP = form.MatMul(_DY, _TURNED)
_SCALED = _P * kept(_DP)


class _Attention(Pass):
    """Rewrites the gradient of a Softmax in front of a product."""

    def finish(self, draft: Draft) -> None:
        """Replaces the sums first: the differences have one reader less then."""
        rewrite_with_bodies(draft.graph, draft.names, _before, _sum_of_rows)
        rewrite_with_bodies(draft.graph, draft.names, _difference)


@pattern("MatMul", "Transpose")
def _before(node: ir.Node, tape: Tape) -> Result:
    """Notes the nodes that are computed before the sums, without a change."""
    key = (node.op_type, *node.inputs, *attribute_values(node).get("perm", ()))
    tape.once(key, lambda: node.outputs[0])
    return None


@formula(form.ReduceSum(_SCALED, _AXES, keepdims=1))
def _sum_of_rows(found: Found, tape: Tape) -> Result:
    """Replaces the sums of the rows of P · (dO Vᵀ) with those of dO · (P V)."""
    x, dy = found[_SCALED], found[_DY]
    y: ir.Value | None = tape.once(("MatMul", found[_P], found[_V]), lambda: None)
    if not is_last_axis(found[_AXES], x) or not _is_product(found):
        return None
    if y is None or y.shape != dy.shape or not _is_smaller(y, x):
        return None
    return _sum_of_products(dy, y, tape)


def _is_product(found: Found) -> bool:
    """Whether dO Vᵀ is a product of matrices of float32, and no other axes are exchanged."""
    shape = found[_V].shape
    if shape is None or found[_DP].dtype != ir.DataType.FLOAT:
        return False
    *outer, row, column = range(len(shape))
    return permutation_of(found.node(_TURNED)) == (*outer, column, row)


def _is_smaller(y: ir.Value, x: ir.Value) -> bool:
    """Whether the rows of y are shorter than those of x, or than rows of unknown length may be."""
    assert x.shape is not None
    assert y.shape is not None
    width, keys = y.shape[-1], x.shape[-1]
    return isinstance(width, int) and (not isinstance(keys, int) or width < keys)


def _sum_of_products(dy: ir.Value, y: ir.Value, tape: Tape) -> Result:
    """Returns the sums of the rows of dO · O.

    If the heads are moved after the product, the moved O is taken, which the next layer keeps.
    """
    transpose = producer_of(dy, "Transpose")
    order = [] if transpose is None else list(attribute_values(transpose).get("perm", ()))
    moved: ir.Value | None = tape.once(("Transpose", y, *np.argsort(order)), lambda: None)
    if transpose is None or moved is None or order[-1] != len(order) - 1:
        return op.ReduceSum(tape.tensor(dy) * tape.tensor(y), [-1], keepdims=1)
    (source,) = transpose.inputs
    assert source is not None
    sums = op.ReduceSum(tape.tensor(source) * tape.tensor(moved), [-1], keepdims=1)
    return op.Transpose(sums, perm=order)


@formula(_DP - _R)
def _difference(found: Found, tape: Tape) -> Result:
    """Replaces dO Vᵀ - r with [dO, r] [V, -1]ᵀ if there are many more keys than values are wide."""
    dy, v, r = found[_DY], found[_V], found[_R]
    if not _is_product(found) or v.shape is None or None in (tape.tensor(dy).shape or (None,)):
        return None
    assert dy.shape is not None
    if r.shape != ir.Shape([*dy.shape[:-1], 1]):  # they may broadcast
        return None
    keys, width = v.shape[-2:]
    if not isinstance(keys, int) or not isinstance(width, int) or keys < _MANY * width:
        return None
    values = tape.tensor(v)
    size = op.Concat(shape_of(values)[:-1], [1], axis=0)
    column = op.ConstantOfShape(size, value=np.full(1, -1, np.float32))
    left = op.Concat(tape.tensor(dy), tape.tensor(r), axis=-1)
    return op.MatMul(left, op.Concat(values, column, axis=-1).mT)


ATTENTION = _Attention("attention", ONNXRUNTIME)
