"""The gradient of a tied embedding: rows are added to that of the head, without a table of zeros.

A table that a language model reads by token, and multiplies by in the end, has two gradients. The
first is a ScatterElements into zeros. Scattering into the second one saves the zeros and their sum.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.edit import attribute_values, has_one_reader, producer_of
from ortops.graph.passes.draft import ONNXRUNTIME
from ortops.graph.passes.rewrite import PatternPass, Result, pattern
from ortops.graph.tensor import Tape, op


@pattern("Add")
def _into_the_other(node: ir.Node, tape: Tape) -> Result:
    for rows, other in (node.inputs, node.inputs[::-1]):
        reshape = producer_of(rows, "Reshape")
        flat = None if reshape is None else reshape.inputs[0]
        scatter = producer_of(flat, "ScatterElements")
        if rows is None or other is None or flat is None or scatter is None:
            continue
        if rows.shape is None or rows.shape != other.shape or rows.dtype != other.dtype:
            continue
        shared = not (has_one_reader(rows) and has_one_reader(flat) and has_one_reader(other))
        if shared or not rows.shape.is_static() or not _adds_to_zeros(scatter):
            continue
        _, indices, updates = (tape.tensor(v) for v in scatter.inputs if v is not None)
        table = op.Reshape(tape.tensor(other), [-1])
        total = op.ScatterElements(table, indices, updates, **attribute_values(scatter))
        return op.Reshape(total, list(rows.shape.numpy()))
    return None


def _adds_to_zeros(scatter: ir.Node) -> bool:
    """Whether a node adds to a vector of zeros."""
    zeros = scatter.inputs[0]
    made = producer_of(zeros, "ConstantOfShape")
    if zeros is None or made is None or zeros.shape is None or len(zeros.shape) != 1:
        return False
    value = attribute_values(made).get("value")
    is_zero = value is None or not value.any()
    return is_zero and scatter.attributes.get_string("reduction", "none") == "add"


SCATTERED_SUMS = PatternPass("scattered_sums", _into_the_other, serves=ONNXRUNTIME)
