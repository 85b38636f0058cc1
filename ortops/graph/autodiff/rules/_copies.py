"""Gradients of operators that copy elements: adds up the cotangents of the copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.faults import pad_axes
from ortops.graph.shapes import reshape_like
from ortops.graph.tensor import Tensor, op


def positions(x: Tensor) -> Tensor:
    """Returns an int64 tensor that contains the flat index of each element of x.

    An operator that copies elements of x copies these indices in the same way. The result contains
    the index to which the cotangent of each copy must be added.
    """
    return reshape_like(op.Range(0, _size(x), 1), x)


def add_at(places: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Adds up cotangents by flat index, in a tensor of the shape of x.

    Args:
        places: Flat indices in x, of any shape; negative ones count from the end.
        g: The cotangents, as many as indices.
        x: The tensor that elements were copied from.
    """
    flat = op.Reshape(g, [-1])
    zeros = op.ConstantOfShape(op.Reshape(_size(x), [1]), value=np.zeros(1, x.dtype))
    return reshape_like(scatter_add(zeros, op.Reshape(places, [-1]), flat), x)


def scatter_add(into: Tensor, indices: Tensor, g: Tensor, axis: int = 0) -> Tensor:
    """Adds cotangents to a tensor, by index along an axis.

    Types narrower than float32 are added up in float32, which is more accurate, and because
    onnxruntime has no kernel for them.

    Args:
        into: The tensor to add to; rank 1 is the fastest.
        indices: The indices; negative ones count from the end.
        g: The cotangents, of the shape of the indices.
        axis: The axis.
    """
    # ScatterND with reduction="add" would be faster, but onnxruntime's CPU kernel splits the
    # updates among threads without a lock, so that updates of the same element may be lost.
    # Measured for a table of 10000: ScatterElements takes 4.4 ms for 4096 rows of 256 in one
    # dimension and 7.5 ms in two; a product with a one-hot matrix takes 180 ms.
    wide = wide_dtype(g)
    added = op.ScatterElements(
        into.astype(wide), indices, g.astype(wide), axis=axis, reduction="add"
    )
    return added.astype(g.dtype)


def runnable(g: Tensor) -> Tensor:
    """Converts a bfloat16 cotangent to float32; others are returned unchanged.

    onnxruntime's CPU provider has bfloat16 kernels for most operators that move elements, but not
    for Pad and Where.
    """
    return g.astype(np.float32) if g.value.dtype == ir.DataType.BFLOAT16 else g


def pad_zeros(
    g: Tensor, pads: Sequence[object] | Array | Tensor, axes: Sequence[int] | Tensor
) -> Tensor:
    """Pads a cotangent with zeros; see `ortops.graph.shapes.pad_axes`."""
    wide = runnable(g)
    padded = pad_axes(wide, pads, None, axes)
    return padded if wide is g else padded.astype(g.dtype)


def _size(x: Tensor) -> Tensor:
    if x.shape is not None and all(isinstance(dim, int) for dim in x.shape):
        return x.tape.constant(np.array(np.prod(cast(tuple[int, ...], x.shape)), np.int64))
    return op.Size(x)
