"""The factor of a gradient of many classes, applied to the narrower matrices beside it.

The gradient of a mean over rows is divided by their number, or by 0 for ignored rows, which is a
pass over the memory of all logits. Products read the result D: with a matrix S of the factors of
rows, (S D) W is S (D W), and (S D)ᵀ X is Dᵀ (S X). Both W and X are narrower than D where there are
more classes than features.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortops.graph.edit import node_after
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.passes.draft import ONNXRUNTIME
from ortops.graph.passes.products import transpose_flags
from ortops.graph.passes.rewrite import PatternPass, Result, pattern
from ortops.graph.tensor import Tape, Tensor, op

_SHARE = 0.5
"""The width of what is multiplied instead, as a share of the width of the gradient, at most."""


@dataclass(frozen=True)
class _Place:
    """Where a product can be multiplied by the factors of rows.

    Attributes:
        product: The product.
        index: The factor to multiply; None for the result.
        shape: The shape of the factors of rows there.
        width: The number of elements for each row of the gradient.
    """

    product: ir.Node
    index: int | None
    shape: tuple[int, ...]
    width: int


@pattern("Div", "Mul")
def _scaled(node: ir.Node, tape: Tape) -> Result:
    y = node.outputs[0]
    if y.dtype != ir.DataType.FLOAT or y.is_graph_output() or y.shape is None or len(y.shape) != 2:
        return None
    rows, columns = y.shape
    if not isinstance(columns, int):
        return None
    for x, factor in (node.inputs, node.inputs[::-1])[: 1 if node.op_type == "Div" else 2]:
        if x is None or factor is None or x.shape != y.shape or factor.shape is None:
            continue
        if list(factor.shape) not in ([], [rows, 1]):
            continue
        places = _places(node, columns)
        if not places or sum(each.width for each in places) > _SHARE * columns:
            return None
        for place in places:
            _apply(place, node.op_type, tape.tensor(factor), tape)
        return tape.tensor(x)
    return None


def _places(node: ir.Node, columns: int) -> list[_Place]:
    """Returns where to multiply all products that read a result instead; none if unknown.

    A body of Scan, Loop or If that reads it would compute the factors in each iteration.
    """
    found: dict[ir.Node, _Place] = {}
    pending = [node.outputs[0]]
    while pending:
        current = pending.pop()
        if current.is_graph_output() or current.shape is None or current.shape[-1] != columns:
            return []
        for user, index in current.uses():
            if user.op_type in ("Flatten", "Reshape") and not user.domain and index == 0:
                pending.append(user.outputs[0])
                continue
            place = _place(user, index) if user.graph is node.graph else None
            if place is None or user in found:
                return []
            found[user] = place
    return list(found.values())


def _place(product: ir.Node, index: int) -> _Place | None:
    """Returns where to multiply a product of two matrices instead of one of them."""
    fused = (product.domain, product.op_type) == (MICROSOFT, "FusedMatMul")
    if not fused and (product.domain or product.op_type not in ("Gemm", "MatMul")):
        return None
    shapes = [None if value is None else value.shape for value in product.inputs]
    if len(shapes) != 2:
        return None
    matrix, other = shapes[index], shapes[1 - index]
    if matrix is None or other is None or len(matrix) != 2:
        return None
    flags = transpose_flags(product)
    if len(other) == 1 and index == 1 and not any(flags):  # a sum of rows
        return _Place(product, 0, (-1,), 1)
    if len(other) != 2:
        return None
    free = (1 - index) ^ flags[1 - index]  # the axis of the other factor that the result has
    width = other[free]
    if not isinstance(width, int):
        return None
    # The inner axis of the left factor is its last one, unless that is transposed.
    if flags[index] != index:  # the rows are inside
        return _Place(product, 1 - index, (1, -1) if free == 0 else (-1, 1), width)
    if product.outputs[0].is_graph_output():
        return None
    return _Place(product, None, (-1, 1) if index == 0 else (1, -1), width)


def _apply(place: _Place, op_type: str, factor: Tensor, tape: Tape) -> None:
    """Multiplies a product, or divides it, by the factors of rows."""
    before, scope = tape.before, tape.scope
    product = place.product
    tape.scope = f"{product.name or product.op_type}/"
    emit = getattr(op, op_type)
    if place.index is not None:
        tape.before = product
        value = product.inputs[place.index]
        assert value is not None
        scaled = emit(tape.tensor(value), _shaped(factor, place.shape))
        product.replace_input_with(place.index, scaled.value)
    else:
        y = product.outputs[0]
        users = list(y.uses())
        tape.before = node_after(product)
        scaled = emit(tape.tensor(y), _shaped(factor, place.shape))
        for user, index in users:
            user.replace_input_with(index, scaled.value)
    tape.before, tape.scope = before, scope


def _shaped(factor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a number as it is, and a column in another shape."""
    return factor if factor.shape == () or shape == (-1, 1) else op.Reshape(factor, list(shape))


SCALED_GRADIENTS = PatternPass("scaled_gradients", _scaled, serves=ONNXRUNTIME)
