"""Shapes: of tensors under construction, and inferred for whole models."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.errors import ModelError
from ortops.graph.edit import all_nodes
from ortops.graph.tensor import Names, Tape, Tensor, op, shape_of

__all__ = [
    "expand_like",
    "infer_shapes",
    "map_sequences",
    "may_be_equal",
    "pad_axes",
    "reshape_like",
    "size_of",
    "unbroadcast",
]

Array: TypeAlias = npt.NDArray[Any]

_NOT_INFERRED = ("GroupNormalization", "MeanVarianceNormalization")
"""Operators that onnx cannot infer anything for; the output is like the first input."""

_MAKE_SEQUENCES = (
    "Optional",
    "SequenceConstruct",
    "SequenceEmpty",
    "SequenceErase",
    "SequenceInsert",
    "SequenceMap",
    "SplitToSequence",
)


def size_of(x: Tensor, axes: Sequence[int]) -> int | Tensor:
    """Returns the number of elements along axes.

    Args:
        x: A tensor.
        axes: Axes, negative ones from the end.

    Returns:
        A Python int where the sizes are static, else a scalar Tensor of int64.
    """
    sizes = [x.shape[axis] if x.shape is not None else None for axis in axes]
    if all(isinstance(size, int) for size in sizes):
        return math.prod(cast(list[int], sizes))
    if x.shape is not None and len({axis % len(x.shape) for axis in axes}) == len(x.shape):
        return op.Size(x)
    return op.ReduceProd(op.Gather(op.Shape(x), list(axes)), keepdims=0)


def _same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to have one shape."""
    return a.shape is not None and a.shape == b.shape and None not in a.shape


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns ``x`` in the shape of ``like``, which has as many elements."""
    if _same_shape(x, like):
        return x
    shape = like.shape
    if shape is not None and 0 not in shape:
        unknown = sum(not isinstance(dim, int) for dim in shape)
        if unknown == 1:  # the one unknown size follows from the others
            sizes = [dim if isinstance(dim, int) else -1 for dim in shape]
            return op.Reshape(x, sizes).with_shape_of(like)
    return op.Reshape(x, shape_of(like), allowzero=1).with_shape_of(like)


def expand_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns ``x`` broadcast to the shape of ``like``."""
    if _same_shape(x, like):
        return x
    return op.Expand(x, shape_of(like)).with_shape_of(like)


def pad_axes(
    x: Tensor,
    pads: Sequence[object] | Array | Tensor,
    value: object = None,
    axes: Sequence[int] | Array | Tensor | None = None,
    *,
    mode: str = "constant",
) -> Tensor:
    """Pads like the operator, but names no axes where they are known.

    onnxruntime 1.31 moves transposes past a Pad as if its pads were for all axes.

    Args:
        x: A tensor.
        pads: Padding before each of the axes, then behind each.
        value: What to pad with; 0 by default.
        axes: The axes; all by default.
        mode: The operator's mode.
    """
    known = axes.constant if isinstance(axes, Tensor) else axes
    if known is None or x.shape is None:
        return op.Pad(x, pads, value, axes, mode=mode)
    places = [int(axis) % x.ndim for axis in known]
    places += [x.ndim + axis for axis in places]
    given = pads.constant if isinstance(pads, Tensor) else pads
    if given is not None:
        full: list[object] = [0] * (2 * x.ndim)
        for place, amount in zip(places, given, strict=True):
            full[place] = amount if isinstance(amount, Tensor) else int(cast(int, amount))
        return op.Pad(x, full, value, mode=mode)
    order = [0] * (2 * x.ndim)
    for number, place in enumerate(places, 1):
        order[place] = number
    amounts = op.Gather(op.Concat(np.zeros(1, np.int64), pads, axis=0), order)
    return op.Pad(x, amounts, value, mode=mode)


def map_sequences(function: Callable[..., Tensor], *sequences: Tensor) -> Tensor:
    """Returns the sequence of what a function makes of the elements of sequences.

    Args:
        function: Takes an element of each sequence, whose shape is not known.
        *sequences: Sequences of equal length.
    """
    tape = sequences[0].tape
    imports = dict(tape.graph.opset_imports)
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="each")
    inner = Tape(graph, names=tape.names)
    inner.scope = tape.scope
    for sequence in sequences:
        kind = None if sequence.value.dtype is None else ir.TensorType(sequence.value.dtype)
        graph.inputs.append(ir.Value(name=tape.names.unique("element"), type=kind))
    with inner:
        result = op.Identity(function(*(inner.tensor(value) for value in graph.inputs)))
    graph.outputs.append(result.value)
    mapped = op.SequenceMap(*sequences, body=graph)
    if result.value.dtype is not None:
        mapped.value.type = ir.SequenceType(ir.TensorType(result.value.dtype))
    return mapped


def unbroadcast(g: Tensor, like: Tensor) -> Tensor:
    """Sums a cotangent over the axes along which ``like`` was broadcast.

    The axes are found while building the graph where the dimensions are sizes or equal symbols,
    and at run time, from the shapes, where they are not.

    Args:
        g: A cotangent of a shape that ``like`` broadcasts to.
        like: The tensor whose shape the result has.
    """
    if _same_shape(g, like):
        return g
    if g.shape is None or like.shape is None:
        return _unbroadcast_at_run_time(g, like)
    added = len(g.shape) - len(like.shape)
    axes = list(range(added))
    for axis, (have, want) in enumerate(zip(g.shape[added:], like.shape, strict=True), added):
        if want == 1:
            axes += [axis] if have != 1 else []
        elif not isinstance(want, int) and have != 1 and (have is None or have != want):
            return _unbroadcast_at_run_time(g, like)
    if axes:
        g = op.ReduceSum(g, axes, keepdims=int(len(axes) > added))
        if added and len(axes) > added:
            g = op.Squeeze(g, list(range(added)))
    return g.with_shape_of(like)


def _unbroadcast_at_run_time(g: Tensor, like: Tensor) -> Tensor:
    shape = shape_of(like)
    added = op.Sub(op.Shape(op.Shape(g)), op.Shape(shape))
    ones = op.ConstantOfShape(added, value=np.ones(1, np.int64))
    axes = op.Squeeze(op.NonZero(op.Equal(op.Concat(ones, shape, axis=0), 1)), [0])
    summed = op.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, shape, allowzero=1).with_shape_of(like)


def may_be_equal(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Whether two shapes are not known to differ."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(
        p == q or not (isinstance(p, int) and isinstance(q, int)) for p, q in zip(a, b, strict=True)
    )


def infer_shapes(model: ir.Model) -> None:
    """Infers types and shapes, in place, as far as onnx can."""
    for node in all_nodes(model.graph):
        if node.domain == "" and node.op_type == "STFT" and "onesided" not in node.attributes:
            node.attributes.add(ir.AttrInt64("onesided", 1))  # onnx infers as if it were 0
    unknown = {
        node: node.op_type
        for node in all_nodes(model.graph)
        if node.domain == "" and node.op_type in _NOT_INFERRED
    }
    for node in unknown:
        node.op_type = "Identity"  # for the time of the pass: it has the type and the shape
    try:
        passes.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    finally:
        for node, op_type in unknown.items():
            node.op_type = op_type
    _forget_symbols_of_elements(model.graph)
    for node in all_nodes(model.graph):
        if node.domain == "" and node.op_type == "If":
            branch = node.attributes["then_branch"].as_graph()
            for value, result in zip(node.outputs, branch.outputs, strict=False):
                if isinstance(result.type, ir.SequenceType | ir.OptionalType):
                    value.type, value.shape = result.type, result.shape
        elif (node.domain == "" and node.op_type in _MAKE_SEQUENCES) or any(
            value is not None and isinstance(value.type, ir.SequenceType | ir.OptionalType)
            for value in node.inputs
        ):
            _infer_again(node)


def _forget_symbols_of_elements(graph: ir.Graph) -> None:
    """Drops symbols that come from elements of sequences: each element has its own sizes."""
    tensors = {
        str(dim)
        for value in graph.inputs
        if value.shape is not None and not isinstance(value.type, ir.SequenceType)
        for dim in value.shape
    }
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    elements = {
        str(dim)
        for value in values
        if isinstance(value.type, ir.SequenceType) and value.shape is not None
        for dim in value.shape
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    } - tensors
    for value in values if elements else ():
        if value.shape is not None and any(str(dim) in elements for dim in value.shape):
            value.shape = ir.Shape([None if str(d) in elements else d for d in value.shape])


def _infer_again(node: ir.Node) -> None:
    """Gives outputs their types anew: onnx-ir's pass takes every new value for a tensor."""
    found = [(value, value.type, value.shape) for value in node.outputs]
    for value in node.outputs:
        value.type = value.shape = None
    assert isinstance(node.graph, ir.Graph)
    with contextlib.suppress(ModelError):  # it may depend on what is not known
        Tape(node.graph, names=Names()).infer(node)
    for value, kind, shape in found:
        if value.type is None:
            value.type, value.shape = kind, shape
