"""Cross-entropy losses with integer labels, in few nodes.

onnxruntime has no kernels for these losses, and expands them to a dozen nodes that cover all cases.
The common case, without weights and ignore_index, needs less than half of them.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.tensor import Tape, Tensor, op
from ortops.passes.draft import ANYWHERE
from ortops.passes.rewrite import PatternPass, Result, pattern

__all__ = ["CROSS_ENTROPY"]


@pattern("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _plain_loss(node: ir.Node, tape: Tape) -> Result:
    scores, labels, weights = (*node.inputs, None)[:3]
    if "ignore_index" in node.attributes or weights is not None:
        return None
    if scores is None or scores.shape is None or labels is None:
        return None
    x = tape.tensor(scores)
    results = [x]
    if node.op_type == "SoftmaxCrossEntropyLoss":
        results.append(op.LogSoftmax(x, axis=1))
    reduction = node.attributes.get_string("reduction", "mean")
    return [_negative_mean(results[-1], tape.tensor(labels), reduction), *results[1:]]


def _negative_mean(log_probabilities: Tensor, labels: Tensor, reduction: str | None) -> Tensor:
    """Returns the negative log-probabilities of the labels, reduced."""
    picked = op.GatherElements(log_probabilities, op.Unsqueeze(labels, [1]), axis=1)
    match reduction:
        case "none":
            return op.Neg(op.Squeeze(picked, [1]))
        case "sum":
            return op.Neg(op.ReduceSum(picked, keepdims=0))
        case _:
            return op.Neg(op.ReduceMean(picked, keepdims=0))


CROSS_ENTROPY = PatternPass("cross_entropy", _plain_loss, serves=ANYWHERE)
