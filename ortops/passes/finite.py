"""Where cotangents are finite, so that a product with a mask does what a choice does.

Where is exact whatever the cotangent is. A product takes less time, but infinity times 0 is NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.autodiff.gradient_node import is_bound
from ortops.autodiff.registry import Rules
from ortops.graph.tensor import Tensor, op

__all__ = ["mask", "unbounded_values"]

# The largest number, so that the product with any positive normal one is at least 1.
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
"""Operators through which a finite cotangent stays finite, unlike through a root of zero."""


def unbounded_values(graph: ir.Graph, rules: Rules) -> set[ir.Value]:
    """Returns the values behind which there are operators that may make a cotangent infinite.

    Args:
        graph: A prepared graph.
        rules: The rules; of those that are not ortops' own nothing is known.
    """
    found: set[ir.Value] = set()
    for node in reversed(list(graph)):
        if is_bound(node):  # which is not a part of the forward pass
            continue
        bounded = node.op_type in _FINITE and not (node.domain or rules.is_overridden(node))
        if not bounded or not found.isdisjoint(node.outputs):
            found |= {value for value in node.inputs if value is not None}
    return found


def mask(y: Tensor, *, at_zero: float = 0.0) -> Tensor:
    """Returns 1 where y of float32 is above 0, and 0 where it is below, in one pass."""
    return op.HardSigmoid(y, alpha=_STEEP, beta=at_zero)
