"""Sums of products with one factor per row, in one pass over memory for each product.

y + c · x, with a factor c for each row of x, takes two passes with standard operators. The operator
GatedAdd of onnxruntime 1.31 takes one, and rounds in the same way. The gradients of
normalizations consist of such sums, and are added to those of residual connections.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ortops.graph.edit import has_one_reader, producer_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.matching import Search, Variable
from ortops.graph.passes.rewrite import PatternPass, Result, pattern
from ortops.graph.passes.scaled_sums import gated_add, has_gated_add
from ortops.graph.shapes import is_unknown
from ortops.graph.tensor import Tape, Tensor, op

_X, _FACTOR = Variable("a tensor"), Variable("a number for each row")
_PRODUCT = _X * _FACTOR


@dataclass
class _Sum:
    """The terms of a sum.

    Attributes:
        shape: The shape of the sum.
        whole: Terms of this shape.
        gated: Products of a tensor of this shape and one number for each row.
        columns: Such numbers.
        passes: How many passes over the memory of the sum its nodes take.
    """

    shape: ir.Shape
    whole: list[ir.Value] = field(default_factory=list)
    gated: list[tuple[ir.Value, ir.Value]] = field(default_factory=list)
    columns: list[ir.Value] = field(default_factory=list)
    passes: int = 0

    def add(self, value: ir.Value, *, root: bool = False) -> bool:
        """Adds the terms of a value, and returns whether all shapes are among the above."""
        pending = [(value, root)]
        while pending:
            added = self._add(*pending.pop())
            if added is None:
                return False
            pending += [(each, False) for each in reversed(added)]
        return True

    def _add(self, value: ir.Value, root: bool) -> list[ir.Value] | None:
        """Adds a term, or returns its own terms; None if it has another shape."""
        if self._is_column(value):
            self.columns.append(value)
            return []
        if value.shape != self.shape or value.dtype != ir.DataType.FLOAT:
            return None
        node = value.producer() if root or has_one_reader(value) else None
        if node is not None and (node.domain, node.op_type) == (MICROSOFT, "GatedAdd"):
            base, x, gate = (each for each in node.inputs if each is not None)
            self.passes += 1
            self.gated.append((x, gate))
            return [base]
        if node is not None and (node.domain, node.op_type) == ("", "Add"):
            self.passes += 1
            return [each for each in node.inputs if each is not None]
        product = None if root else self._product(value)
        if product is None:
            self.whole.append(value)
        else:
            self.passes += 1
            self.gated.append(product)
        return []

    def is_whole(self, value: ir.Value) -> bool:
        """Whether a value is neither a sum nor a product of a tensor and numbers for its rows."""
        is_sum = has_one_reader(value) and (
            producer_of(value, "Add") or producer_of(value, "GatedAdd", domain=MICROSOFT)
        )
        return not is_sum and self._product(value) is None

    def _is_column(self, value: ir.Value) -> bool:
        return value.shape is not None and value.shape == ir.Shape([*self.shape[:-1], 1])

    def _product(self, value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
        for found in Search(_PRODUCT, value) if has_one_reader(value) else ():
            x, factor = found[_X], found[_FACTOR]
            if x.shape == self.shape and self._is_column(factor):
                return x, factor
        return None


@pattern("Add")
def _gated(node: ir.Node, tape: Tape) -> Result:
    y = node.outputs[0]
    if y.dtype != ir.DataType.FLOAT or y.shape is None or len(y.shape) < 2 or y.shape[-1] == 1:
        return None
    if any(map(is_unknown, y.shape)):
        return None
    total = _Sum(y.shape)
    # So that a long chain of sums is not read again from each of them.
    ungated: set[ir.Value] = tape.once("sums without products", set)
    if all(each in ungated or total.is_whole(each) for each in node.inputs if each is not None):
        ungated.add(y)
        return None
    if not total.add(y, root=True) or not total.gated:
        return None
    # Without a whole term, one product is computed first, in a pass of its own.
    needed = max(len(total.whole) - 1, 0) + len(total.gated) + len(total.columns)
    if needed >= total.passes or not has_gated_add():
        return None
    return _emit(total, tape)


def _emit(total: _Sum, tape: Tape) -> Tensor:
    gated = [(tape.tensor(x), tape.tensor(gate)) for x, gate in total.gated]
    if total.whole:
        result, *others = (tape.tensor(each) for each in total.whole)
        for other in others:
            result = result + other
    else:
        x, gate = gated.pop()
        result = op.Mul(x, gate)
    for x, gate in gated:
        result = gated_add(x, gate, result)
    for column in total.columns:
        result = result + tape.tensor(column)
    return result


GATED_SUMS = PatternPass("gated_sums", _gated, bodies=True)
