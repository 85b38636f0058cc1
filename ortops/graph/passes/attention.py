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

from ortops.graph.constants import constant_number
from ortops.graph.edit import attribute_values, has_one_reader, producer_of
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, op, shape_of

_MANY = 4  # keys for each element of a value: then two Concats are cheaper than a Sub (measured)


class _Attention(Pass):
    """Rewrites the gradient of a Softmax in front of a product."""

    def finish(self, draft: Draft) -> None:
        """Replaces the sums first: the differences have one reader less then."""
        rewrite(draft.graph, draft.names, _before, _sum_of_rows)
        rewrite(draft.graph, draft.names, _difference)


@pattern("MatMul", "Transpose")
def _before(node: ir.Node, tape: Tape) -> Result:
    """Notes the nodes that are computed before the sums, without a change."""
    key = (node.op_type, *node.inputs, *attribute_values(node).get("perm", ()))
    tape.once(key, lambda: node.outputs[0])
    return None


@pattern("ReduceSum")
def _sum_of_rows(node: ir.Node, tape: Tape) -> Result:
    """Replaces the sums of the rows of P · (dO Vᵀ) with those of dO · (P V)."""
    x, axes = (*node.inputs, None)[:2]
    product = producer_of(x, "Mul")
    if x is None or x.shape is None or axes is None or product is None:
        return None
    is_last = constant_number(axes) in (-1, len(x.shape) - 1)
    if not is_last or not node.attributes.get_int("keepdims", 1) or not has_one_reader(x):
        return None
    for p, dp in (product.inputs, product.inputs[::-1]):
        found = _factors(dp)
        if found is None:
            continue
        dy, v = found
        y: ir.Value | None = tape.once(("MatMul", p, v), lambda: None)
        if y is not None and y.shape == dy.shape and _is_smaller(y, x):
            return _sum_of_products(dy, y, tape)
    return None


def _factors(dp: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Returns the matrices A and B of a product A Bᵀ in float32; None for other values."""
    product = producer_of(dp, "MatMul")
    if product is None or dp is None or dp.dtype != ir.DataType.FLOAT:
        return None
    a, b = product.inputs
    transpose = producer_of(b, "Transpose")
    source = None if transpose is None else transpose.inputs[0]
    if a is None or transpose is None or source is None or source.shape is None:
        return None
    *outer, row, column = range(len(source.shape))
    swapped = (*outer, column, row)
    return (a, source) if attribute_values(transpose).get("perm") == swapped else None


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


@pattern("Sub")
def _difference(node: ir.Node, tape: Tape) -> Result:
    """Replaces dO Vᵀ - r with [dO, r] [V, -1]ᵀ if there are many more keys than values are wide."""
    dp, r = node.inputs
    found = _factors(dp)
    if found is None or dp is None or r is None or not has_one_reader(dp):
        return None
    dy, v = found
    if dy.shape is None or v.shape is None or None in (tape.tensor(dy).shape or ()):
        return None
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
