"""The gradient of a tied embedding: rows are added to that of the head, without a table of zeros.

A table that a language model reads by token, and multiplies by in the end, has two gradients. The
first is a ScatterElements into zeros. Scattering into the second one saves the zeros and their sum.
"""

from __future__ import annotations

from ortops.graph.edit import attribute_values, has_one_reader
from ortops.graph.matching import Found, Variable, form, kept
from ortops.graph.passes.draft import ONNXRUNTIME
from ortops.graph.passes.rewrite import PatternPass, Result, formula
from ortops.graph.tensor import Tape, op

_INDICES, _UPDATES, _OTHER = (Variable(f"the {what}") for what in ("indices", "updates", "other"))
_ZEROS = kept(form.ConstantOfShape(...))
_SCATTER = form.ScatterElements(_ZEROS, _INDICES, _UPDATES)
_ROWS = form.Reshape(_SCATTER, ...)


@formula(_ROWS + _OTHER)
def _into_the_other(found: Found, tape: Tape) -> Result:
    rows, other, zeros = found[_ROWS], found[_OTHER], found[_ZEROS]
    filler = attribute_values(found.node(_ZEROS)).get("value")
    attributes = attribute_values(found.node(_SCATTER))
    if rows.shape is None or rows.shape != other.shape or rows.dtype != other.dtype:
        return None
    if not rows.shape.is_static() or not has_one_reader(other):
        return None
    if zeros.shape is None or len(zeros.shape) != 1 or (filler is not None and filler.any()):
        return None
    if attributes.get("reduction") != "add":
        return None
    table = op.Reshape(tape.tensor(other), [-1])
    indices, updates = (tape.tensor(found[each]) for each in (_INDICES, _UPDATES))
    total = op.ScatterElements(table, indices, updates, **attributes)
    return op.Reshape(total, list(rows.shape.numpy()))


SCATTERED_SUMS = PatternPass("scattered_sums", _into_the_other, serves=ONNXRUNTIME, bodies=True)
