"""Detection of finite cotangents, for which multiplication by a mask can replace Where.

Where is exact for all cotangents. A product is faster, but infinity times 0 is NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.autodiff.gradient_node import is_bound
from ortops.autodiff.registry import Rules
from ortops.graph.tensor import Tensor, constant_number, op

__all__ = ["clip_bounds", "equal_mask", "mask", "unbounded_values"]

# The largest float32, so that its product with any positive normal number is at least 1.
_STEEP = float(np.finfo(np.float32).max)

_FINITE = frozenset(
    {
        *("Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "Dropout"),
        *("ConvTranspose", "Elu", "Erf", "Expand", "Flatten", "Gather", "Gelu", "Gemm"),
        *("GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish", "Identity"),
        *("GroupNormalization", "InstanceNormalization", "LayerNormalization", "LeakyRelu"),
        *("LogSoftmax", "MatMul", "MaxPool", "Mish", "Mul", "Neg", "NegativeLogLikelihoodLoss"),
        *("Pad", "PRelu", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape", "Resize"),
        *("Shape", "Sigmoid", "Slice", "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Split"),
        *("Squeeze", "Sub", "Sum", "Tanh", "Transpose", "Unsqueeze", "Where"),
    }
)
"""Operators whose gradients keep finite cotangents finite, unlike that of a root at zero."""


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
        bounded = node.op_type in _FINITE and not (node.domain or rules.is_overridden(node))
        if not bounded or not found.isdisjoint(node.outputs):
            found |= {value for value in node.inputs if value is not None}
    return found


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
