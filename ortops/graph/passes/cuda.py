"""Adaptation to onnxruntime's CUDA provider: only operators for which it has kernels.

Its BatchNormalization refuses training mode when a session is made, it has no MaxUnpool, and its
ConvTranspose pads both ends of an axis alike; its Pad takes no integers, its GroupQueryAttention no
float32, and it has no SplitToSequence. onnxruntime runs what it lacks on the CPU.
"""

from __future__ import annotations

import contextlib

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.expansion import replace_by_definition
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite_with_bodies
from ortops.graph.passes.webgpu import INTEGERS, expand_batch_normalization
from ortops.graph.tensor import Tape, op

_HALF_ONLY = ("GroupQueryAttention",)
"""Operators with kernels for float16 and bfloat16 only."""


class _CUDA(Pass):
    """Replaces operators that the provider cannot run in a training step."""

    def prepare(self, draft: Draft) -> None:
        """Replaces attention in types without a kernel, and parts of tensors in sequences."""
        rewrite_with_bodies(draft.graph, draft.names, _sequence_at)
        for node in list(draft.graph):
            known = draft.rules.definition(node)
            if known is not None and node.op_type in _HALF_ONLY and _is_wide(node):
                with contextlib.suppress(UnsupportedError):  # it runs on the CPU, as it is
                    replace_by_definition(node, known, draft.names)

    def finish(self, draft: Draft) -> None:
        """Rewrites the nodes that the provider would refuse or leave to the CPU."""
        rewrite_with_bodies(draft.graph, draft.names, *_PATTERNS)


def _is_wide(node: ir.Node) -> bool:
    return node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.FLOAT


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


@pattern("Pad")
def _pad(node: ir.Node, tape: Tape) -> Result:
    """Joins integers with equal ones, because only floating-point tensors can be padded."""
    x, given = node.inputs[0], node.inputs[1]
    pads = None if given is None else tape.tensor(given).constant
    is_plain = node.attributes.get_string("mode", "constant") == "constant"
    if x is None or x.dtype not in INTEGERS or pads is None or len(node.inputs) > 3 or not is_plain:
        return None
    if min(pads) < 0:
        return None
    padded, value = tape.tensor(x), node.inputs[2] if len(node.inputs) > 2 else None
    fill = np.zeros([], padded.dtype) if value is None else tape.tensor(value)
    for axis, (before, after) in enumerate(zip(*np.split(pads, 2), strict=True)):
        outer, inner = op.Shape(padded, start=0, end=axis), op.Shape(padded, start=axis + 1)
        ends = [
            op.Expand(fill, op.Concat(outer, [int(size)], inner, axis=0)) if size else None
            for size in (before, after)
        ]
        parts = [part for part in (ends[0], padded, ends[1]) if part is not None]
        padded = op.Concat(*parts, axis=axis) if len(parts) > 1 else padded
    return padded


@pattern("SequenceAt")
def _sequence_at(node: ir.Node, tape: Tape) -> Result:
    """Cuts a part of known place out of a tensor, which need not be split to a sequence."""
    sequence, at = node.inputs
    split = None if sequence is None else sequence.producer()
    index = None if at is None else tape.tensor(at).constant
    if split is None or split.op_type != "SplitToSequence" or len(split.inputs) < 2:
        return None
    x, sizes = (None if each is None else tape.tensor(each) for each in split.inputs)
    known = None if sizes is None else sizes.constant
    if x is None or index is None or known is None:
        return None
    axis = split.attributes.get_int("axis", 0)
    length = None if x.shape is None else x.shape[axis]
    if known.ndim == 0:  # parts of this size, and a last one with the rest
        if not isinstance(length, int):
            return None
        ends = [min(end, length) for end in range(int(known), length + int(known), int(known))]
    else:
        ends = np.cumsum(known).tolist()
    place = int(index) % len(ends)
    return op.Slice(x, [ends[place - 1] if place else 0], [ends[place]], [axis])


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


_PATTERNS = (expand_batch_normalization, _max_unpool, _pad, _conv_transpose)

CUDA = _CUDA("cuda", serves={"cuda", "cuda_session"})
