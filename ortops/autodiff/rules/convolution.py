"""Rules of Conv and ConvTranspose, and the window geometry that pooling shares with them.

A convolution is linear in its input and in its weights. With respect to the input it is the
transpose of ConvTranspose, so each is the other's gradient; with respect to the weights it is the
product of the output's cotangent with the columns that the windows see.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ortops.autodiff.registry import Cotangents
from ortops.autodiff.rules.table import vjp
from ortops.graph.shapes import pad_axes, reshape_like, size_of, sum_along
from ortops.graph.tensor import Dim, Tensor, op

MAX_COLUMN_TAPS = 25
"""The largest kernel whose weight gradient is taken from the columns.

The columns hold the input once per kernel element. For the 7×7 kernels at the entrance of a
residual net (3 channels of 224×224) the convolution with batch and channels exchanged took half the
time; for 3×3 and 1×1 kernels the columns took half the time or less.
"""


@dataclass(frozen=True)
class Windows:
    """How windows lie on the spatial axes of a tensor.

    Attributes:
        kernel: The sizes of the window; None where unknown.
        strides: The distances between windows.
        dilations: The distances between the elements of a window.
        begin: The padding before the first element: one int per axis, or a vector of int64 where
            it is known only at run time.
        end: The padding behind the last element.
    """

    kernel: tuple[int | None, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...] | Tensor
    end: tuple[int, ...] | Tensor

    @property
    def is_padded(self) -> bool:
        """Whether there is padding, or may be at run time."""
        if isinstance(self.begin, Tensor) or isinstance(self.end, Tensor):
            return True
        return any(self.begin) or any(self.end)

    @property
    def rank(self) -> int:
        """The number of spatial axes."""
        return len(self.strides)

    @property
    def axes(self) -> list[int]:
        """The spatial axes of a tensor (N, C, …)."""
        return list(range(2, 2 + self.rank))

    @property
    def extents(self) -> tuple[int | None, ...]:
        """The number of elements from the first to the last of a window, both included."""
        return tuple(
            None if size is None else (size - 1) * dilation + 1
            for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )


def windows(
    x: Tensor,
    kernel: Sequence[Dim],
    *,
    kernel_like: Tensor | None = None,
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
    auto_pad: str,
) -> Windows:
    """Returns the windows that the attributes of a convolution or pooling describe.

    Args:
        x: The tensor that the windows lie on, (N, C, …).
        kernel: The sizes of the window.
        kernel_like: A tensor (M, C, …) whose spatial sizes are the window's, for sizes that are
            known only at run time.
        strides: As in ONNX; ones by default.
        dilations: As in ONNX; ones by default.
        pads: As in ONNX; zeros by default.
        auto_pad: As in ONNX.
    """
    rank = len(kernel)
    sizes = tuple(size if isinstance(size, int) else None for size in kernel)
    steps = tuple(strides or (1,) * rank)
    spread = tuple(dilations or (1,) * rank)
    explicit = tuple(pads or (0,) * 2 * rank)
    result = Windows(sizes, steps, spread, explicit[:rank], explicit[rank:])
    if auto_pad in ("NOTSET", ""):
        return result
    if auto_pad == "VALID":
        return replace(result, begin=(0,) * rank, end=(0,) * rank)
    lengths = static_sizes(x, rank)
    totals = [
        _same_padding(length, extent, step)
        for length, extent, step in zip(lengths, result.extents, steps, strict=True)
    ]
    if None not in totals:
        begin, end = _halves(np.array(totals), auto_pad)
        return replace(result, begin=tuple(begin.tolist()), end=tuple(end.tolist()))
    length, step = op.Shape(x, start=2), np.array(steps)
    outputs = (length + (step - 1)) // step
    total = (outputs - 1) * step + _run_time_extents(result, kernel_like) - length
    begin, end = _halves(op.Max(total, [0]), auto_pad)
    return replace(result, begin=begin, end=end)


def _halves(total: Any, auto_pad: str) -> tuple[Any, Any]:
    """Splits padding in what comes first and last; an odd one goes to the end for SAME_UPPER."""
    half = total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


def _run_time_extents(at: Windows, kernel_like: Tensor | None) -> Any:
    if None in at.kernel:
        assert kernel_like is not None
        return (op.Shape(kernel_like, start=2) - 1) * np.array(at.dilations) + 1
    return np.array(at.extents)


def _same_padding(length: int | None, extent: int | None, step: int) -> int | None:
    """Returns the padding that gives ceil(length / step) windows, or None where unknown."""
    if extent is None:
        return None
    if step == 1:
        return extent - 1
    if length is None:
        return None
    return max((-(-length // step) - 1) * step + extent - length, 0)


def static_sizes(x: Tensor, rank: int) -> list[int | None]:
    """Returns the spatial sizes of a tensor (N, C, …), None where unknown."""
    shape: tuple[Dim, ...] = x.shape if x.shape is not None else (None,) * (2 + rank)
    return [size if isinstance(size, int) else None for size in shape[2:]]


def _padded(x: Tensor, at: Windows) -> tuple[Tensor, Windows]:
    """Returns a tensor with its padding written out, and the windows on that."""
    if not at.is_padded:
        return x, at
    zeros = (0,) * at.rank
    if isinstance(at.begin, Tensor) or isinstance(at.end, Tensor):
        x = pad_axes(x, op.Concat(at.begin, at.end, axis=0), None, at.axes)
    else:
        x = pad_axes(x, [0, 0, *at.begin, 0, 0, *at.end])
    return x, replace(at, begin=zeros, end=zeros)


def _explicit(at: Windows) -> list[int] | None:
    """Returns the attribute ``pads`` for padding that is known; None for none."""
    assert not isinstance(at.begin, Tensor)
    assert not isinstance(at.end, Tensor)
    pads = [*at.begin, *at.end]
    return pads if any(pads) else None


def input_gradient(g: Tensor, w: Tensor, x: Tensor, at: Windows, group: int) -> Tensor:
    """Returns the cotangent of the input of a convolution.

    It is exact also where the last window ends before the padded input does, and where it ends
    behind it, as in pooling with ceil_mode.

    Args:
        g: The output's cotangent (N, M, …).
        w: The weights (M, C/group, …).
        x: The input (N, C, …); only its shape is used.
        at: The windows on x.
        group: The number of groups.
    """
    if isinstance(at.begin, Tensor) or isinstance(at.end, Tensor):
        full = op.ConvTranspose(
            g,
            w,
            group=group,
            strides=at.strides,
            dilations=at.dilations,
            output_padding=[step - 1 for step in at.strides],
        )
        ends = at.begin + op.Shape(x, start=2)
        return op.Slice(full, at.begin, ends, at.axes).with_shape_of(x)
    extents = at.extents
    if set(at.strides) == {1} and all(
        extent is not None and max(before, behind) < extent
        for extent, before, behind in zip(extents, at.begin, at.end, strict=True)
    ):
        # Windows of stride 1: each element gets what the windows around it have, mirrored.
        reach = [cast(int, extent) - 1 for extent in extents]
        result = op.Conv(
            g,
            _mirrored(w, at.kernel, group),
            group=group,
            dilations=at.dilations,
            pads=[r - p for r, p in zip(reach * 2, at.begin + at.end, strict=True)],
        )
        return result.with_shape_of(x)
    ends_, extra, cut = [], [], []
    for axis, (length, count, extent) in enumerate(
        zip(static_sizes(x, at.rank), static_sizes(g, at.rank), extents, strict=True)
    ):
        step, end = at.strides[axis], at.end[axis]
        if step == 1:
            end, more = end, 0
        elif length is not None and count is not None and extent is not None:
            end = step * (count - 1) + extent - at.begin[axis] - length
            end, more = max(end, 0), max(-end, 0)
        else:  # what the last window left over is less than a step
            more = step - 1
            cut.append(axis)
        ends_.append(end)
        extra.append(more)
    result = op.ConvTranspose(
        g,
        w,
        group=group,
        strides=at.strides,
        dilations=at.dilations,
        pads=[*at.begin, *ends_],
        output_padding=extra if any(extra) else None,
    )
    if cut:
        axes = [2 + axis for axis in cut]
        lengths = op.Shape(x, start=2)
        if len(cut) < at.rank:
            lengths = op.Gather(lengths, cut)
        result = op.Slice(result, [0] * len(cut), lengths, axes)
    return result.with_shape_of(x)


def _mirrored(w: Tensor, kernel: Sequence[int | None], group: int) -> Tensor:
    """Returns weights (M, C/group, …) as (C, M/group, …), reversed along the spatial axes."""
    axes = [axis for axis, size in enumerate(kernel, 2) if size != 1]
    if axes:
        count = len(axes)
        w = op.Slice(w, [-1] * count, [np.iinfo(np.int64).min] * count, axes, [-1] * count)
    spatial = range(2, 2 + len(kernel))
    if group == 1:
        return op.Transpose(w, perm=[1, 0, *spatial])
    if _is_depthwise(w, group):
        return w
    split = _split_axis(w, 0, group)
    return _merge_axes(op.Transpose(split, perm=[0, 2, 1, *(a + 1 for a in spatial)]), 0)


def weight_gradient(g: Tensor, x: Tensor, w: Tensor, at: Windows, group: int) -> Tensor:
    """Returns the cotangent of the weights of a convolution.

    Args:
        g: The output's cotangent (N, M, …).
        x: The input (N, C, …).
        w: The weights (M, C/group, …); only their shape is used.
        at: The windows on x.
        group: The number of groups.
    """
    if isinstance(at.begin, Tensor):
        x, at = _padded(x, at)
    if None in at.kernel or math.prod(cast(tuple[int, ...], at.kernel)) > MAX_COLUMN_TAPS:
        return _weight_gradient_by_convolution(g, x, w, at, group)
    if group == 1 and _shifts_are_cheaper(g, w, at):
        return _weight_gradient_by_shifts(g, x, w, at)
    x, at = _padded(x, at)
    if group > 1 and _is_depthwise(w, group):
        products = [op.ReduceSum(g * seen, [0, *at.axes], keepdims=0) for seen in _taps(x, 2, at)]
        return reshape_like(op.Concat(*(op.Unsqueeze(p, [1]) for p in products), axis=1), w)
    return _weight_gradient_by_columns(g, x, w, at, group)


def _is_depthwise(w: Tensor, group: int) -> bool:
    return w.shape is not None and w.shape[:2] == (group, 1)


def _taps(x: Tensor, first: int, at: Windows) -> list[Tensor]:
    """Returns what each element of the windows sees of x, whose spatial axes begin at ``first``."""
    kernel, extents = cast(tuple[int, ...], at.kernel), cast(tuple[int, ...], at.extents)
    if set(kernel) == set(at.strides) == {1}:
        return [x]
    axes = list(range(first, first + at.rank))
    seen = []
    for tap in itertools.product(*map(range, kernel)):
        starts = [index * step for index, step in zip(tap, at.dilations, strict=True)]
        # Counted from the end, so that the number of windows need not be known.
        ends = [start - extent + 1 for start, extent in zip(starts, extents, strict=True)]
        ends = [end or np.iinfo(np.int64).max for end in ends]
        seen.append(op.Slice(x, starts, ends, axes, at.strides))
    return seen


def _weight_gradient_by_columns(g: Tensor, x: Tensor, w: Tensor, at: Windows, group: int) -> Tensor:
    """Multiplies the cotangent with the columns: what each kernel element sees of the input."""
    inputs = None if w.shape is None else w.shape[1]
    count = math.prod(cast(tuple[int, ...], at.kernel))
    if group == 1 and _sums_over_batch_in_product(g, x, w, at):
        swap = [1, 0, *at.axes]
        x, g = op.Transpose(x, perm=swap), op.Transpose(g, perm=swap)
        seen = _taps(x, 2, at)
        columns = seen[0] if count == 1 else op.Concat(*seen, axis=0)
        assert w.shape is not None
        outputs, rows = cast(int, w.shape[0]), count * cast(int, inputs)
        result = op.Gemm(op.Reshape(g, [outputs, -1]), op.Reshape(columns, [rows, -1]), transB=1)
    else:
        spatial = size_of(g, at.axes)
        if group > 1:
            x, g = _split_axis(x, 1, group, inputs), _split_axis(g, 1, group)
        channel = 1 if group == 1 else 2
        seen = _taps(x, channel + 1, at)
        columns = seen[0] if count == 1 else op.Concat(*seen, axis=channel)
        flat = [*(0,) * (channel + 1), spatial]
        columns, g = op.Reshape(columns, flat), op.Reshape(g, flat)
        by_row = op.Transpose(columns, perm=[*range(channel), channel + 1, channel])
        result = op.ReduceSum(op.MatMul(g, by_row), [0], keepdims=0)
    if count > 1 and inputs != 1:  # (M, taps · C/group), the taps outside
        width = inputs if isinstance(inputs, int) else size_of(w, [1])
        result = op.Transpose(op.Reshape(result, [-1, count, width]), perm=[0, 2, 1])
    return reshape_like(result, w)


def _sums_over_batch_in_product(g: Tensor, x: Tensor, w: Tensor, at: Windows) -> bool:
    """Whether one product over batch and positions is faster than a sum of one for each image.

    It needs x and g with the channels outside. That pays where an image's product, which would be
    written and summed, is not small next to the image: 3 ms instead of 15 for 64 channels of 8×8
    and 3×3 kernels, but 33 instead of 22 for 64 channels of 56×56.
    """
    shape = w.shape
    seen, given = static_sizes(x, at.rank), static_sizes(g, at.rank)
    if shape is None or any(not isinstance(size, int) for size in (*shape, *seen, *given)):
        return False
    outputs, inputs, *kernel = cast(tuple[int, ...], shape)
    moved = inputs * math.prod(cast(list[int], seen)) + outputs * math.prod(cast(list[int], given))
    return 4 * outputs * inputs * math.prod(kernel) >= moved


def _shifts_are_cheaper(g: Tensor, w: Tensor, at: Windows) -> bool:
    """Whether moving both operands along one axis each beats moving one along both.

    Counted are the copies of an image's channels, where the columns have one for each kernel
    element, what the longer product and the sum over images add, and nothing else. A copied element
    took as long as 20 multiplications in products (0.2 ns and 0.01 ns, on 2 cores).
    """
    sizes = (*(w.shape or (None,)), *static_sizes(g, at.rank))
    if at.rank != 2 or set(at.strides) != {1} or any(not isinstance(s, int) for s in sizes):
        return False
    outputs, inputs, rows, columns, height, width = cast(tuple[int, ...], sizes)
    if not height or not width:
        return False
    weights = outputs * inputs * rows * columns
    longer = cast(int, at.extents[0]) - 1
    shifts = (
        columns * inputs + rows * outputs + weights * (longer / height / 20 + 1 / height / width)
    )
    return shifts < rows * columns * inputs


def _weight_gradient_by_shifts(g: Tensor, x: Tensor, w: Tensor, at: Windows) -> Tensor:
    """Multiplies what each kernel column sees of the input with what sees each kernel row.

    The input is moved sideways, the cotangent up and down, and their product has all kernel
    elements.
    """
    outputs, inputs, rows, columns = cast(tuple[int, ...], w.shape)
    x, at = _padded(x, at)
    row = replace(at, kernel=(1, columns), dilations=(1, at.dilations[1]))
    seen = op.Concat(*_taps(x, 2, row), axis=1)
    down = at.dilations[0]
    moved = [
        pad_axes(g, [0, 0, index * down, 0, 0, 0, (rows - 1 - index) * down, 0])
        for index in range(rows)
    ]
    seeing = op.Concat(*moved, axis=1)
    flat = [0, 0, size_of(seen, at.axes)]
    by_row = op.Transpose(op.Reshape(seen, flat), perm=[0, 2, 1])
    result = op.ReduceSum(op.MatMul(op.Reshape(seeing, flat), by_row), [0], keepdims=0)
    split = op.Reshape(result, [rows, outputs, columns, inputs])
    return op.Transpose(split, perm=[1, 3, 0, 2])


def _weight_gradient_by_convolution(
    g: Tensor, x: Tensor, w: Tensor, at: Windows, group: int
) -> Tensor:
    """Convolves the input with the cotangent; batch and channels change places."""
    spatial = at.axes
    if group == 1:
        data = op.Transpose(x, perm=[1, 0, *spatial])
    else:  # (N, group · C, …) → (C, group · N, …)
        split = _split_axis(x, 1, group, None if w.shape is None else w.shape[1])
        data = _merge_axes(op.Transpose(split, perm=[2, 1, 0, *(a + 1 for a in spatial)]), 1)
    weights = op.Transpose(g, perm=[1, 0, *spatial])
    result = op.Conv(
        data,
        weights,
        group=group,
        strides=at.dilations,
        dilations=at.strides,
        pads=_explicit(at),
    )
    result = op.Transpose(result, perm=[1, 0, *spatial])
    if any(step > dilation for step, dilation in zip(at.strides, at.dilations, strict=True)):
        # What the last window left over would pass for more kernel elements.
        result = op.Slice(result, [0] * at.rank, _shape_from(w, 2), spatial)
    return result.with_shape_of(w)


def _shape_from(x: Tensor, start: int) -> list[int] | Tensor:
    """Returns the sizes from an axis on: ints where all are static, else a vector of int64."""
    sizes = None if x.shape is None else x.shape[start:]
    if sizes is not None and all(isinstance(size, int) for size in sizes):
        return cast(list[int], list(sizes))
    return op.Shape(x, start=start)


def _reshape(x: Tensor, leading: Sequence[int], kept: int) -> Tensor:
    """Returns x with other sizes in front of axis ``kept``; 0 and −1 as in Reshape."""
    tail = _shape_from(x, kept)
    if not isinstance(tail, Tensor):
        return op.Reshape(x, [*leading, *tail])
    return op.Reshape(x, op.Concat(list(leading), tail, axis=0))


def _split_axis(x: Tensor, axis: int, group: int, part: Dim = None) -> Tensor:
    """Splits an axis into ``group`` parts, of size ``part`` where that is known."""
    if part is None and x.shape is not None:
        size = x.shape[axis]
        part = size // group if isinstance(size, int) else None
    return _reshape(x, [*(0,) * axis, group, part if isinstance(part, int) else -1], axis + 1)


def _merge_axes(x: Tensor, axis: int) -> Tensor:
    """Joins an axis with the one behind it."""
    sizes = (None, None) if x.shape is None else x.shape[axis : axis + 2]
    joined = -1 if any(not isinstance(size, int) for size in sizes) else math.prod(cast(Any, sizes))
    return _reshape(x, [*(0,) * axis, joined], axis + 2)


def _bias_gradient(g: Tensor, at: Windows) -> Tensor:
    return sum_along(g, [0, *at.axes])


def _kernel(
    w: Tensor, kernel_shape: Sequence[int] | None, others: Sequence[Tensor]
) -> Sequence[Dim]:
    """Returns the sizes of the kernel, None where unknown."""
    if kernel_shape:
        return kernel_shape
    if w.shape is not None:
        return w.shape[2:]
    known = next((other for other in others if other.shape is not None), w)
    return (None,) * (known.ndim - 2)


@vjp("Conv")
def conv(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Cotangents:
    at = windows(
        x,
        _kernel(w, kernel_shape, (x, g)),
        kernel_like=w,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
    )
    return (
        input_gradient(g, w, x, at, group),
        weight_gradient(g, x, w, at, group),
        None if b is None else _bias_gradient(g, at),
    )


@vjp("ConvTranspose")
def conv_transpose(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] | None = None,
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Cotangents:
    at = windows(
        y,
        _kernel(w, kernel_shape, (x, g)),
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad="VALID" if auto_pad.startswith("SAME") else auto_pad,
    )
    if output_shape or auto_pad.startswith("SAME"):
        at = _cropped(at, x, w, auto_pad, output_padding, output_shape)
    # The windows lie on y: the roles of input and output are exchanged.
    padded, on_padded = _padded(g, at) if isinstance(at.begin, Tensor) else (g, at)
    dx = op.Conv(
        padded,
        w,
        group=group,
        strides=at.strides,
        dilations=at.dilations,
        pads=_explicit(on_padded),
    )
    return dx, weight_gradient(x, g, w, at, group), None if b is None else _bias_gradient(g, at)


def _cropped(
    at: Windows,
    x: Tensor,
    w: Tensor,
    auto_pad: str,
    output_padding: Sequence[int] | None,
    output_shape: Sequence[int] | None,
) -> Windows:
    """Returns the windows of a ConvTranspose with the padding that its output's size asks for."""
    extra = list(output_padding or (0,) * at.rank)
    extents, lengths = at.extents, static_sizes(x, at.rank)
    if None not in extents and (not output_shape or None not in lengths):
        totals = []
        for axis, (extent, step) in enumerate(zip(extents, at.strides, strict=True)):
            total = cast(int, extent) + extra[axis] - step
            if output_shape:
                total += cast(int, lengths[axis]) * step - output_shape[axis - at.rank]
            totals.append(max(total, 0))
        begin, end = _halves(np.array(totals), auto_pad)
        return replace(at, begin=tuple(begin.tolist()), end=tuple(end.tolist()))
    steps = np.array(at.strides)
    total_at = _run_time_extents(at, w) + (np.array(extra) - steps)
    if output_shape:
        total_at = op.Shape(x, start=2) * steps + total_at - np.array(output_shape[-at.rank :])
    begin, end = _halves(op.Max(total_at, [0]), auto_pad)
    return replace(at, begin=begin, end=end)
