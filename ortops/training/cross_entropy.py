"""Losses of class numbers, in few nodes.

For the private graph of a TrainingSession: onnxruntime has no kernel for these losses, and takes
them apart into a dozen nodes that cover every case. The common case needs less than half of them.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.gradient import replace_value
from ortops.tensor import Names, Tape, Tensor, op

__all__ = ["expand_losses"]


def expand_losses(graph: ir.Graph, names: Names) -> None:
    """Takes losses apart that have no weights and count all labels.

    Args:
        graph: A lowered graph; changed in place.
        names: The names taken in it.
    """
    for node in list(graph):
        if not _is_plain(node):
            continue
        tape = Tape(graph, before=node, names=names)
        tape.scope = f"{node.name or node.op_type}/"
        scores, labels = (tape.tensor(value) for value in node.inputs[:2] if value is not None)
        results = [scores]
        if node.op_type == "SoftmaxCrossEntropyLoss":
            results.append(op.LogSoftmax(scores, axis=1))
        results.append(_loss(results[-1], labels, node.attributes.get_string("reduction", "mean")))
        put_out: set[ir.Value] = set()
        for old, new in zip(node.outputs, reversed(results), strict=False):
            if old.name:
                replace_value(tape, old, new, put_out)
        graph.remove(node, safe=True)


def _is_plain(node: ir.Node) -> bool:
    losses = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    if node.domain or node.op_type not in losses or "ignore_index" in node.attributes:
        return False
    scores, _, weights = (*node.inputs, None)[:3]
    return weights is None and scores is not None and scores.shape is not None


def _loss(log_probabilities: Tensor, labels: Tensor, reduction: str | None) -> Tensor:
    """Returns the negative log-probabilities of the labels, reduced."""
    picked = op.GatherElements(log_probabilities, op.Unsqueeze(labels, [1]), axis=1)
    match reduction:
        case "none":
            loss = op.Neg(op.Squeeze(picked, [1]))
        case "sum":
            loss = op.Neg(op.ReduceSum(picked, keepdims=0))
        case _:
            loss = op.Neg(op.ReduceMean(picked, keepdims=0))
    result: Tensor = loss
    return result
