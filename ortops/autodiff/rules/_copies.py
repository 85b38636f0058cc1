"""Where the cotangents of copied elements belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.autodiff.rules._precision import wide_dtype
from ortops.graph.shapes import pad_axes, reshape_like
from ortops.graph.tensor import Tensor, op

__all__ = ["add_at", "pad_zeros", "positions", "runnable", "scatter_add"]

Array: TypeAlias = npt.NDArray[Any]


def positions(x: Tensor) -> Tensor:
    """Returns an int64 tensor of the shape of x that has at each place the number of that place.

    An operator that copies elements of x copies these numbers in the same way, and so tells where
    the cotangent of each copy belongs.
    """
    return reshape_like(op.Range(0, _size(x), 1), x)


def add_at(places: Tensor, g: Tensor, x: Tensor) -> Tensor:
    """Returns a tensor of the shape of x with the sum of the cotangents of each of its places.

    Args:
        places: Flat positions in x, counted from the end where negative, of any shape.
        g: As many cotangents.
        x: The tensor that was copied from.
    """
    flat = op.Reshape(g, [-1])
    zeros = op.ConstantOfShape(op.Reshape(_size(x), [1]), value=np.zeros(1, x.dtype))
    return reshape_like(scatter_add(zeros, op.Reshape(places, [-1]), flat), x)


def scatter_add(into: Tensor, indices: Tensor, g: Tensor, axis: int = 0) -> Tensor:
    """Adds cotangents, by index along an axis, to what is there already.

    Narrow floating-point types are added up in float32: that is exacter, and onnxruntime has no
    kernel for them.

    Args:
        into: What they are added to; with rank 1 it is the fastest.
        indices: The indices, counted from the end where negative.
        g: The cotangents, of the shape of the indices.
        axis: The axis.
    """
    # ScatterND with reduction="add" would be faster, but onnxruntime's CPU kernel splits the
    # updates among threads without a lock: where two meet at one place, one of them gets lost.
    # The one-dimensional ScatterElements is the fastest of its forms (4.4 ms for 4096 rows of 256;
    # 7.5 ms with two axes, 180 ms as the product with a one-hot matrix for a table of 10000).
    wide = wide_dtype(g)
    added = op.ScatterElements(
        into.astype(wide), indices, g.astype(wide), axis=axis, reduction="add"
    )
    return added.astype(g.dtype)


def runnable(g: Tensor) -> Tensor:
    """Returns a cotangent in float32 where it is of bfloat16.

    onnxruntime's CPU has kernels of bfloat16 for operators that move elements, but neither for Pad
    nor for Where.
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
