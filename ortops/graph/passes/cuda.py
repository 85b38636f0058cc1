"""Adaptation to onnxruntime's CUDA provider: only operators for which it has kernels.

Its BatchNormalization refuses training mode when a session is made, it has no MaxUnpool, and its
ConvTranspose pads both ends of an axis alike. onnxruntime runs what it lacks on the CPU.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import inner_graphs
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.passes.webgpu import expand_batch_normalization
from ortops.graph.tensor import Tape, op


class _CUDA(Pass):
    """Replaces operators that the provider cannot run in a training step."""

    def finish(self, draft: Draft) -> None:
        """Rewrites the nodes that the provider would refuse or leave to the CPU."""
        graphs = [draft.graph]
        for graph in graphs:
            rewrite(graph, draft.names, expand_batch_normalization, _max_unpool, _conv_transpose)
            graphs += [inner for node in graph for inner in inner_graphs(node)]


@pattern("MaxUnpool")
def _max_unpool(node: ir.Node, tape: Tape) -> Result:
    """Writes the elements of a known number of rows and columns to their places in zeros."""
    y = node.outputs[0]
    sizes = [] if y.shape is None else y.shape[2:]
    if len(node.inputs) > 2 or not sizes or not all(isinstance(size, int) for size in sizes):
        return None
    x, indices = (tape.tensor(value) for value in node.inputs if value is not None)
    shape = op.Concat(op.Shape(x, start=0, end=2), [int(str(size)) for size in sizes], axis=0)
    flat = op.ReduceProd(shape, keepdims=1)
    zeros = op.Expand(np.zeros(1, x.dtype), flat)
    found = op.ScatterElements(zeros, op.Reshape(indices, [-1]), op.Reshape(x, [-1]), axis=0)
    return op.Reshape(found, shape)


@pattern("ConvTranspose")
def _conv_transpose(node: ir.Node, tape: Tape) -> Result:
    """Pads both ends of each axis by the smaller of its two pads, and cuts off the rest."""
    pads = list(node.attributes.get_ints("pads", ()))
    rank = len(pads) // 2
    begins, ends = pads[:rank], pads[rank:]
    if begins == ends:
        return None
    both = [min(pair) for pair in zip(begins, ends, strict=True)]
    attributes = {name: value.value for name, value in node.attributes.items()}
    inputs = (None if value is None else tape.tensor(value) for value in node.inputs)
    y = op.ConvTranspose(*inputs, **{**attributes, "pads": both + both})
    starts = [begin - less for begin, less in zip(begins, both, strict=True)]
    stops = [less - end or np.iinfo(np.int64).max for end, less in zip(ends, both, strict=True)]
    return op.Slice(y, starts, stops, list(range(2, 2 + rank)))


CUDA = _CUDA("cuda", serves={"cuda", "cuda_session"})
