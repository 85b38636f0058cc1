"""Relu in the private graph of a TrainingSession: its gradient is a product with a mask.

The rule of the public graph chooses, by Where, between the cotangent and 0. A product takes less
time, but it gives the same only if the cotangent is finite: infinity times 0 is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from ortops.autodiff import ancestor_nodes, vjp
from ortops.gradient import BOUND_DOMAIN
from ortops.lowering import Keep
from ortops.tensor import Tensor, op

__all__ = ["is_of_higher_order", "lower_rectified", "mask", "reach_unbounded"]

DOMAIN = "ortops.rectified"
"""The private domain of a Relu that gets finite cotangents."""

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


def lower_rectified(
    model: ir.Model, lower: Callable[..., ir.Model], *, keep: Keep | None = None
) -> ir.Model:
    """Lowers a prepared model so that the gradients of Relu are products, where that is safe.

    Nodes of float32 take part, unless a gradient of higher order is asked for.

    Args:
        model: The model, in place.
        lower: `ortops.lowering.lower_prepared`, or what does more.
        keep: See there.

    Returns:
        The lowered model.
    """
    if is_of_higher_order(model.graph):
        return lower(model, keep=keep)
    unbounded = reach_unbounded(model.graph)
    found = [node for node in model.graph if _is_relu(node) and node.outputs[0] not in unbounded]
    for node in found:
        node.domain = DOMAIN
    model = lower(model, keep=keep)
    if found:
        for node in ir.traversal.RecursiveGraphIterator(model.graph):  # with copies of them
            if node.domain == DOMAIN:
                node.domain = ""
    return model


def _is_relu(node: ir.Node) -> bool:
    return node.op_type == "Relu" and not node.domain and node.outputs[0].dtype == ir.DataType.FLOAT


@vjp("Relu", domain=DOMAIN)
def _relu(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return g * mask(y)


def mask(y: Tensor, *, at_zero: float = 0.0) -> Tensor:
    """Returns 1 where y of float32 is above 0, and 0 where it is below, in one pass."""
    result: Tensor = op.HardSigmoid(y, alpha=_STEEP, beta=at_zero)
    return result


def reach_unbounded(graph: ir.Graph) -> set[ir.Value]:
    """Returns the values behind which there are operators that may make a cotangent infinite.

    Args:
        graph: A prepared graph.
    """
    found: set[ir.Value] = set()
    for node in reversed(list(graph)):
        if node.domain == BOUND_DOMAIN:  # which is not a part of the forward pass
            continue
        bounded = not node.domain and node.op_type in _FINITE
        if not bounded or not found.isdisjoint(node.outputs):
            found |= {value for value in node.inputs if value is not None}
    return found


def is_of_higher_order(graph: ir.Graph) -> bool:
    """Whether a gradient is taken of what another gradient is part of."""
    return any(
        other.domain == BOUND_DOMAIN
        for node in ir.traversal.RecursiveGraphIterator(graph)
        if node.domain == BOUND_DOMAIN and node.inputs[-1] is not None
        for other in ancestor_nodes(node.inputs[-1], set())
    )
