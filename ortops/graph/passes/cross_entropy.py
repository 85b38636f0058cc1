"""Cross-entropy losses with integer labels, in few nodes.

onnxruntime has no kernels for these losses, and expands them to a dozen nodes that cover all cases.
The common case, without weights and ignore_index, needs less than half of them. With them, only the
LogSoftmax is written here: in onnxruntime's expansion, it fails for a batch of 0 rows.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.edit import attribute_values
from ortops.graph.passes.draft import ANYWHERE
from ortops.graph.passes.rewrite import PatternPass, Result, pattern
from ortops.graph.tensor import Tape, Tensor, op


@pattern("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _few_nodes(node: ir.Node, tape: Tape) -> Result:
    scores, labels, weights = (*node.inputs, None)[:3]
    if scores is None or scores.shape is None or labels is None:
        return None
    general = "ignore_index" in node.attributes or weights is not None
    of_logits = node.op_type == "SoftmaxCrossEntropyLoss"
    if general and not of_logits:
        return None
    log_p, targets = tape.tensor(scores), tape.tensor(labels)
    if of_logits:
        log_p = op.LogSoftmax(log_p, axis=1)
    if general:
        factors = None if weights is None else tape.tensor(weights)
        loss = op.NegativeLogLikelihoodLoss(log_p, targets, factors, **attribute_values(node))
    else:
        reduction = node.attributes.get_string("reduction", "mean")
        loss = _negative_mean(log_p, targets, reduction)
    return [loss, log_p] if of_logits else [loss]


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


CROSS_ENTROPY = PatternPass("cross_entropy", _few_nodes, serves=ANYWHERE, bodies=True)
