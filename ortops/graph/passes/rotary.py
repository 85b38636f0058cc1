"""Fusion of a rotary embedding that was exported as several nodes.

The formula is x · cos + rotated(x) · sin, where rotated(x) is the negative second half of each row,
and then its first half. onnxruntime's RotaryEmbedding computes it in one pass over memory, and so
it does the gradient, which is the rotation by the negative angles.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.constants import constant_tensor, dims_of
from ortops.graph.edit import Steps, attribute_values, emit_one, rank_of, unrolled
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.matching import Found, Variable, form, kept
from ortops.graph.operators import ELEMENTWISE, is_random
from ortops.graph.passes.draft import Draft
from ortops.graph.passes.rewrite import Fusion, Result, formula
from ortops.graph.tensor import Tape, Tensor, op

FUSED = "RotaryEmbedding"

_X, _COS, _SIN = Variable("the input"), Variable("the cosines"), Variable("the sines")
_FIRST, _SECOND = kept(form.Split(_X, ...)), kept(form.Split(_X, ...))
_ROTATED = form.Concat(-_SECOND, _FIRST)
_SUM = _X * _COS + _ROTATED * _SIN


@formula(_SUM)
def _fused(found: Found, tape: Tape) -> Result:
    x, shape = found[_X], found[_X].shape
    if x.dtype != ir.DataType.FLOAT or shape is None or len(shape) != 4:
        return f"'{x.name}' is {x.dtype}{shape or ''}, not float32 of rank 4"
    parts = found.node(_FIRST).outputs
    sizes = [part.shape[3] for part in parts if part.shape is not None]
    if [found[_FIRST], found[_SECOND]] != [*parts] or sizes[0] != sizes[-1]:
        return f"the parts of '{x.name}' are not the halves of its rows"
    if attribute_values(found.node(_ROTATED)).get("axis") not in (-1, 3):
        return f"the halves of '{x.name}' do not make rows again"
    tables = [_half(found[each], x, found[_SUM], tape) for each in (_COS, _SIN)]
    if any(table is None for table in tables):
        return f"the factors of '{x.name}' are not known to have a row of equal halves for each"
    return emit_one(MICROSOFT, FUSED, [tape.tensor(x), tape.constant([0]), *tables], shape)


def _half(value: ir.Value, x: ir.Value, y: ir.Value, tape: Tape) -> Tensor | None:
    """Returns the first half of the rows of a table, if the second half is equal.

    The table has as many rows as the matrices of x, or one row for all of them, as it must have if
    the result y has the rows of x.
    """
    sizes, sizes_of_y = (dims_of(each.shape or ir.Shape([])) for each in (value, y))
    *_, rows, columns = dims_of(x.shape or ir.Shape([]))
    if len(sizes) < 2 or sizes[-1] != columns or not isinstance(columns, int):
        return None
    if rows is None or (sizes[-2] not in (rows, 1) and sizes_of_y[2:3] != (rows,)):
        return None
    if any(size != 1 for size in sizes[-4:-2]) or not unrolled(_has_equal_halves(value)):
        return None
    first = tape.once((value, FUSED), lambda: _first_columns(tape.tensor(value), columns // 2))
    if sizes[-2] == rows:
        return first
    return tape.once((first.value, rows), lambda: _with_rows(first, tape.tensor(x)))


def _first_columns(table: Tensor, columns: int) -> Tensor:
    return op.Reshape(op.Slice(table, [0], [columns], [-1]), [-1, columns])


def _with_rows(table: Tensor, x: Tensor) -> Tensor:
    return op.Expand(table, op.Concat(op.Shape(x, start=2, end=3), op.Shape(table)[1:], axis=0))


def _has_equal_halves(value: ir.Value | None) -> Steps[bool]:
    """Whether both halves of each row are equal, or rows have one element, in any run."""
    if value is None or rank_of(value) == 0:
        return True
    columns = value.shape[-1] if value.shape is not None else None
    tensor = constant_tensor(value)
    if tensor is not None and columns != 1:
        first, second = np.array_split(tensor.numpy(), 2, axis=-1)
        return np.array_equal(first, second)
    node = value.producer()
    if columns == 1 or node is None or node.domain:
        return columns == 1
    if node.op_type == "Concat":
        is_last = attribute_values(node)["axis"] in (-1, len(value.shape or ()) - 1)
        return is_last and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
    if node.op_type == "Unsqueeze":
        inner = node.inputs[0]
        found: bool = yield _has_equal_halves(inner)
        sizes = None if inner is None else inner.shape
        return found and sizes is not None and sizes[-1] == columns
    is_equal = node.op_type in ELEMENTWISE and not is_random(node.op_type)
    for each in node.inputs if is_equal else ():
        is_equal = is_equal and (yield _has_equal_halves(each))
    return is_equal


def _rotated_back(
    g: Tensor, y: Tensor, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor
) -> Cotangents:
    d_x = emit_one(MICROSOFT, FUSED, [g, position, cos, -sin], x.value.shape)
    (x1, x2), (g1, g2) = (op.Split(each, num_outputs=2, axis=-1, outputs=2) for each in (x, g))
    d_cos, d_sin = (
        op.ReduceSum(d, [0, 1], keepdims=0) for d in (g1 * x1 + g2 * x2, g2 * x1 - g1 * x2)
    )
    return d_x, None, d_cos, d_sin


class _Rotary(Fusion):
    """Fuses the nodes of a rotary embedding to one."""

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes, and adds a rule for them alone: in those of a file, positions differ."""
        before = {*draft.graph}
        super().prepare(draft)
        made = {node for node in draft.graph if node.op_type == FUSED} - before
        table = Table()
        table.vjp(FUSED, domain=MICROSOFT, when=made.__contains__)(_rotated_back)
        if made:
            draft.add_rules(table)


ROTARY = _Rotary("rotary", _fused, fused=(MICROSOFT, FUSED))
