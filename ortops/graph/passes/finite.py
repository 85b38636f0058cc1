"""Detection of finite cotangents, for which multiplication by a mask can replace Where.

Where is exact for all cotangents. A product is faster, but infinity times 0 is NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import is_bound
from ortops.graph.autodiff.registry import Rules
from ortops.graph.constants import constant_number
from ortops.graph.edit import is_float
from ortops.graph.operators import having
from ortops.graph.tensor import Tensor, op

# The largest float32, so that its product with any positive normal number is at least 1.
_STEEP = float(np.finfo(np.float32).max)

_FINITE = having("finite")


def unbounded_values(graph: ir.Graph, rules: Rules) -> set[ir.Value]:
    """Returns the values whose cotangents may be infinite because of operators that follow.

    Args:
        graph: A prepared graph.
        rules: The rules; custom ones are assumed to return infinite cotangents.
    """
    found: set[ir.Value] = set()
    for node in reversed(list(graph)):
        if is_bound(node):  # not part of the forward pass
            continue
        bounded = _keeps_finite(node) and not (node.domain or rules.is_overridden(node))
        if not bounded or not found.isdisjoint(node.outputs):
            found |= {value for value in node.inputs if value is not None}
    return found


def _keeps_finite(node: ir.Node) -> bool:
    """Whether the gradient of a standard operator keeps finite cotangents finite."""
    if node.outputs and not any(map(is_float, node.outputs)):
        return True
    other = node.inputs[1] if len(node.inputs) > 1 else None
    number = None if other is None else constant_number(other)
    match node.op_type:
        case "Div":
            return number is not None and number != 0
        case "Pow":
            return number is not None and number >= 1
        case op_type:
            return op_type in _FINITE


def mask(y: Tensor, *, at_zero: float = 0.0) -> Tensor:
    """Returns 1 where y of float32 is above 0, and 0 where it is below, in one pass."""
    return op.HardSigmoid(y, alpha=_STEEP, beta=at_zero)


def equal_mask(x: Tensor, y: Tensor) -> Tensor:
    """Returns 1 where x and y of float32 are equal, and 0 elsewhere."""
    return op.Cast(op.Equal(x, y), to=ir.DataType.FLOAT)


def clip_bounds(node: ir.Node) -> tuple[float | None, float | None] | None:
    """Returns the bounds of a Clip, None for an absent one, if they are known and do not cross."""
    bounds: list[float | None] = []
    for value in (*node.inputs[1:], None, None)[:2]:
        number = None if value is None else constant_number(value)
        if value is not None and number is None:
            return None
        bounds.append(number)
    low, high = bounds
    return None if low is not None and high is not None and not low <= high else (low, high)
