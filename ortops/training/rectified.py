"""Relu in the private graph of a TrainingSession: its gradient is a product with a mask.

The rule of the public graph chooses, by Where, between the cotangent and 0. A product takes less
time, but it gives the same only if the cotangent is finite: infinity times 0 is NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ortops.autodiff import vjp
from ortops.gradient import BOUND_DOMAIN, is_of_higher_order
from ortops.tensor import Tensor, op

__all__ = ["mask", "reach_unbounded", "rectify"]

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


@contextlib.contextmanager
def rectify(model: ir.Model) -> Iterator[None]:
    """While it lasts, a prepared model is lowered so that gradients of Relu are products.

    Nodes of float32 take part whose cotangents are finite, unless a gradient of higher order is
    asked for.
    """
    graph = model.graph
    unbounded = reach_unbounded(graph)
    found = [node for node in graph if _is_relu(node) and node.outputs[0] not in unbounded]
    if not found or is_of_higher_order(graph):
        yield
        return
    for node in found:
        node.domain = DOMAIN
    yield
    for node in ir.traversal.RecursiveGraphIterator(graph):  # with copies of them
        if node.domain == DOMAIN:
            node.domain = ""


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
