"""Expansion of nodes whose onnxruntime kernels are less accurate than float32 allows."""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.choices import constant_integers
from ortops.graph.nesting import inner_graphs
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, op


class _Rounding(Pass):
    """Replaces such nodes, except in loops, where the overhead of additional nodes matters."""

    def finish(self, draft: Draft) -> None:
        """Rewrites the graph and the branches of If."""
        graphs = [draft.graph]
        for graph in graphs:
            rewrite(graph, draft.names, _sigmoid, _mean)
            graphs += [g for node in graph if node.op_type == "If" for g in inner_graphs(node)]


@pattern("Sigmoid")
def _sigmoid(node: ir.Node, tape: Tape) -> Result:
    """Keeps the precision of small values.

    The kernel has an absolute error of 3e-8: 1e-5 has three correct digits, and values below 4e-8
    are 0. The gradient of a confident model that ends in a Sigmoid consists of such values.
    """
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.FLOAT:
        return None
    # In x · Sigmoid(x), which QuickGelu may compute, small values do not matter.
    if any(user.op_type == "Mul" and x in user.inputs for user, _ in node.outputs[0].uses()):
        return None
    if any(user.op_type == "QuickGelu" for user, _ in x.uses()):
        return None
    return op.Reciprocal(1 + op.Exp(-tape.tensor(x)))  # 1 / ∞ = 0 where Exp overflows


@pattern("ReduceMean")
def _mean(node: ir.Node, tape: Tape) -> Result:
    """Reduces the last of several axes first, like `ortops.graph.shapes.sum_along`."""
    x, axes = (*node.inputs, None)[:2]
    chosen = constant_integers(axes)
    if x is None or x.shape is None or chosen is None or len(chosen) < 2:
        return None
    *others, last = sorted(axis % len(x.shape) for axis in chosen)
    keepdims = node.attributes.get_int("keepdims", 1)
    inner = op.ReduceMean(tape.tensor(x), [last], keepdims=keepdims)
    return op.ReduceMean(inner, others, keepdims=keepdims)


ROUNDING = _Rounding("rounding")
