"""Rules of operators that only move elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._copies import add_at, pad_zeros, positions
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.faults import pad_axes
from ortops.graph.shapes import reshape_like, size_of, unbroadcast
from ortops.graph.tensor import Tensor, op, shape_of, zeros_like


def _has_axes(axes: Tensor | None) -> bool:
    """Whether there is at least one axis; without axes, Squeeze removes all of size 1."""
    return axes is not None and axes.constant is not None and axes.constant.size > 0


def _wide(numbers: Tensor | None) -> Tensor | None:
    """Converts integers to int64, because onnx infers no shape for a Pad with int32 axes."""
    if numbers is None or numbers.dtype == np.int64:
        return numbers
    if numbers.constant is not None:
        return numbers.tape.constant(numbers.constant.astype(np.int64))
    return numbers.astype(np.int64)


@vjp("Reshape")
def reshape(g: Tensor, y: Tensor, x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Cotangents:
    return reshape_like(g, x)


@vjp("Flatten")
def flatten(g: Tensor, y: Tensor, x: Tensor, *, axis: int = 1) -> Cotangents:
    return reshape_like(g, x)


@vjp("Squeeze")
def squeeze(g: Tensor, y: Tensor, x: Tensor, axes: Tensor | None = None) -> Cotangents:
    return op.Unsqueeze(g, axes) if _has_axes(axes) else reshape_like(g, x)


@vjp("Unsqueeze")
def unsqueeze(g: Tensor, y: Tensor, x: Tensor, axes: Tensor) -> Cotangents:
    return op.Squeeze(g, axes) if _has_axes(axes) else reshape_like(g, x)


@vjp("Transpose")
def transpose(g: Tensor, y: Tensor, x: Tensor, *, perm: Sequence[int] | None = None) -> Cotangents:
    return op.Transpose(g, perm=None if perm is None else np.argsort(perm))


@vjp("Expand")
def expand(g: Tensor, y: Tensor, x: Tensor, shape: Tensor) -> Cotangents:
    return unbroadcast(g, x)


@vjp("Tile")
def tile(g: Tensor, y: Tensor, x: Tensor, repeats: Tensor) -> Cotangents:
    # Reshaping an axis with copies of size d to (repeats, d) lets the copies be summed.
    times = repeats.constant
    if times is not None and times.size == 0:
        return g
    shape = shape_of(x)
    if times is not None and shape.constant is not None:
        split = x.tape.constant(np.stack([times, shape.constant], axis=1).reshape(-1))
    else:
        split = op.Reshape(
            op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(shape, [1]), axis=1), [-1]
        )
    axes = np.arange(0, 2 * len(times), 2) if times is not None else op.Range(0, op.Size(split), 2)
    return op.ReduceSum(op.Reshape(g, split, allowzero=1), axes, keepdims=0)


@vjp("Concat")
def concat(g: Tensor, y: Tensor, *xs: Tensor, axis: int) -> Cotangents:
    if len(xs) == 1:
        return g
    sizes = [x.shape[axis] if x.shape is not None else None for x in xs]
    if all(isinstance(size, int) for size in sizes):
        return op.Split(g, sizes, axis=axis)
    end = None if axis == -1 else axis + 1
    lengths = [
        np.array([size]) if isinstance(size, int) else op.Shape(x, start=axis, end=end)
        for x, size in zip(xs, sizes, strict=True)
    ]
    return op.Split(g, op.Concat(*lengths, axis=0), axis=axis, outputs=len(xs))


@vjp("Split")
def split(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor | None, ...],
    x: Tensor,
    sizes: Tensor | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
) -> Cotangents:
    parts = y
    if any(part is None for part in y):
        parts = op.Split(x, sizes, axis=axis, num_outputs=num_outputs, outputs=len(y))
    filled = [
        zeros_like(cast(Tensor, part)) if cotangent is None else cotangent
        for cotangent, part in zip(g, parts, strict=True)
    ]
    return op.Concat(*filled, axis=axis)


@vjp("Slice")
def slice_(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Cotangents:
    if steps is not None and (steps.constant is None or np.any(steps.constant != 1)):
        return add_at(op.Slice(positions(x), starts, ends, axes, steps), g, x)
    starts, axes = cast(Tensor, _wide(starts)), _wide(axes)
    if axes is None:
        count = (starts.shape or (None,))[0]
        axes = g.tape.constant(np.arange(count)) if isinstance(count, int) else None
    if axes is None:
        axes = op.Range(0, op.Size(starts), 1)
    if axes.constant is not None and axes.constant.size == 0:
        return g
    sizes, kept = _sizes(x, axes), _sizes(g, axes)
    first = starts.constant
    if first is not None and not isinstance(sizes, Tensor) and not isinstance(kept, Tensor):
        before = np.clip(np.where(first < 0, first + sizes, first), 0, sizes)
        pads = np.concatenate([before, sizes - before - kept])
        return pad_zeros(g, pads, axes)
    begin = starts
    if first is None or np.any(first < 0):
        begin = op.Where(op.Less(begin, 0), op.Add(begin, sizes), begin)
    if first is None or np.any(first != 0):
        begin = op.Max(op.Min(begin, sizes), 0)
    rest = op.Sub(op.Sub(sizes, begin), kept)
    return pad_zeros(g, op.Concat(begin, rest, axis=0), axes)


def _sizes(x: Tensor, axes: Tensor) -> np.ndarray | Tensor:
    """Returns the sizes of x along axes: an array if they are known, else a vector."""
    if axes.constant is not None and x.shape is not None:
        dims = [x.shape[axis] for axis in axes.constant.tolist()]
        if all(isinstance(dim, int) for dim in dims):
            return np.array(dims, np.int64)
    return op.Gather(op.Shape(x), axes)


@vjp("Pad")
def pad(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    pads: Tensor,
    constant_value: Tensor | None = None,
    axes: Tensor | None = None,
    *,
    mode: str = "constant",
) -> Cotangents:
    axes = _wide(axes)
    if mode != "constant":
        dx = add_at(pad_axes(positions(x), pads, None, axes, mode=mode), g, x)
        return dx, None, None, None
    back = op.Neg(pads) if pads.constant is None else -pads.constant
    dx = pad_axes(g, back, None, axes)
    if constant_value is None:
        return dx
    is_padding = pad_axes(zeros_like(x), pads, 1, axes)
    return dx, None, reshape_like(op.ReduceSum(g * is_padding, keepdims=0), constant_value)


@vjp("CenterCropPad")
def center_crop_pad(
    g: Tensor, y: Tensor, x: Tensor, shape: Tensor, *, axes: Sequence[int] | None = None
) -> Cotangents:
    sizes = shape_of(x)
    if axes is not None:
        sizes = op.Gather(sizes, list(axes))
    return op.CenterCropPad(g, sizes, axes=axes)


@vjp("SpaceToDepth")
def space_to_depth(
    g: Tensor, y: Tensor, x: Tensor, *, blocksize: int, mode: str = "DCR"
) -> Cotangents:
    return op.DepthToSpace(g, blocksize=blocksize, mode=mode)


@vjp("DepthToSpace")
def depth_to_space(
    g: Tensor, y: Tensor, x: Tensor, *, blocksize: int, mode: str = "DCR"
) -> Cotangents:
    blocks = op.SpaceToDepth(g, blocksize=blocksize)
    if mode == "DCR":
        return blocks
    # SpaceToDepth puts the position in a block before the channel; CRD requires it after.
    area = blocksize * blocksize
    split = [size_of(g, [0]), area, size_of(g, [1]), size_of(x, [2, 3])]
    swapped = op.Transpose(op.Reshape(blocks, split, allowzero=1), perm=[0, 2, 1, 3])
    return reshape_like(swapped, x)


@vjp("Trilu")
def trilu(
    g: Tensor, y: Tensor, x: Tensor, k: Tensor | None = None, *, upper: int = 1
) -> Cotangents:
    return op.Trilu(g, k, upper=upper)


@vjp("ReverseSequence")
def reverse_sequence(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    sequence_lens: Tensor,
    *,
    batch_axis: int = 1,
    time_axis: int = 0,
) -> Cotangents:
    return op.ReverseSequence(g, sequence_lens, batch_axis=batch_axis, time_axis=time_axis)
