"""Rules of Conv and ConvTranspose, and the window geometry that they share with pooling.

A convolution is linear in its input and in its weights. Its gradient with respect to the input is a
transposed convolution, and the other way round. Its gradient with respect to the weights is the
product of the output's cotangent with the columns (im2col) of the input.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, cast

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.constants import Dim
from ortops.graph.edit import attribute_values
from ortops.graph.faults import pad_axes
from ortops.graph.shapes import reshape_like, size_of, sum_along
from ortops.graph.tensor import Tensor, op

MAX_COLUMN_TAPS = 25
"""The number of elements of the largest kernel whose weight gradient uses columns.

The columns hold the input once per kernel element. Measured: for the 7×7 kernels of the first layer
of a residual network (3 channels of 224×224), the convolution with batch and channels exchanged
takes half the time; for 3×3 and 1×1 kernels, the columns take half the time or less.
"""


class Placement(TypedDict, total=False):
    """The attributes of ONNX that place the windows of a convolution or pooling."""

    auto_pad: str
    dilations: Sequence[int]
    pads: Sequence[int]
    strides: Sequence[int]


class ConvAttributes(Placement, total=False):
    """The attributes of Conv."""

    group: int
    kernel_shape: Sequence[int]


class PoolAttributes(Placement, total=False):
    """The attributes that AveragePool, LpPool and MaxPool have in common."""

    ceil_mode: int
    kernel_shape: Sequence[int]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution or pooling on the spatial axes of a tensor.

    Attributes:
        kernel: The sizes of the window; None for unknown ones.
        strides: The distances between windows.
        dilations: The distances between the elements of a window.
        begin: The padding before the first element: one int per axis, or an int64 vector if it is
            known only at run time.
        end: The padding after the last element, in the same form.
    """

    kernel: tuple[int | None, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...] | Tensor
    end: tuple[int, ...] | Tensor

    @property
    def is_padded(self) -> bool:
        """Whether there is padding, or may be at run time."""
        pads = self.pads
        return pads is None or any(pads)

    @property
    def are_adjacent(self) -> bool:
        """Whether they begin at the first element, and each one where the one before it ends."""
        is_dense = set(self.dilations) == {1}
        return is_dense and self.kernel == self.strides and not self.is_padded

    @property
    def pads(self) -> list[int] | None:
        """The attribute ``pads`` of ONNX; None if the padding is known only at run time."""
        if isinstance(self.begin, Tensor) or isinstance(self.end, Tensor):
            return None
        return [*self.begin, *self.end]

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
        """The number of elements of the tensor from the first to the last one of a window."""
        return tuple(
            None if size is None else (size - 1) * dilation + 1
            for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )

    def _slack(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of padded elements after the first window, along each axis."""
        pads, rank = self.pads, self.rank
        assert pads is not None
        totals = zip(lengths, pads[:rank], pads[rank:], self.extents, strict=True)
        return [length + begin + end - cast(int, extent) for length, begin, end, extent in totals]

    def may_fit(self, lengths: Sequence[int | None]) -> bool:
        """Whether a window is not known to be larger than the padded tensor, which cuts it off."""
        known = [length for length in lengths if length is not None]
        return self.pads is None or len(known) < self.rank or min(self._slack(known)) >= 0

    def counts(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of windows along the axes of a tensor of known sizes."""
        slack = self._slack(lengths)
        return [more // step + 1 for more, step in zip(slack, self.strides, strict=True)]

    def left_over(self, lengths: Sequence[int]) -> list[int]:
        """Returns the number of padded elements after the last window, along each axis."""
        slack = self._slack(lengths)
        return [more % step for more, step in zip(slack, self.strides, strict=True)]


def windows(
    x: Tensor,
    kernel: Sequence[Dim],
    kernel_like: Tensor | None = None,
    **placement: Unpack[Placement],
) -> Windows:
    """Returns the windows that the attributes of a convolution or pooling describe.

    Args:
        x: The tensor that the windows slide over, (N, C, …).
        kernel: The sizes of the window.
        kernel_like: A tensor (M, C, …) with the spatial sizes of the window, which is read at run
            time if they are unknown.
        **placement: The attributes, with ONNX's defaults.
    """
    rank = len(kernel)
    sizes = tuple(size if isinstance(size, int) else None for size in kernel)
    steps = tuple(placement.get("strides") or (1,) * rank)
    spread = tuple(placement.get("dilations") or (1,) * rank)
    explicit = tuple(placement.get("pads") or (0,) * 2 * rank)
    result = Windows(sizes, steps, spread, explicit[:rank], explicit[rank:])
    auto_pad = placement.get("auto_pad", "NOTSET")
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


def node_windows(node: ir.Node, x: Tensor, kernel: Sequence[Dim]) -> Windows:
    """Returns the windows of a convolution or pooling node; see `windows`."""
    attributes = attribute_values(node)
    given = {name: attributes[name] for name in Placement.__annotations__ if name in attributes}
    return windows(x, kernel, **given)


def _halves(total: Any, auto_pad: str) -> tuple[Any, Any]:
    """Splits padding into begin and end; with SAME_UPPER, an odd element goes to the end."""
    half = total // 2
    return (half, total - half) if auto_pad == "SAME_UPPER" else (total - half, half)


def _run_time_extents(at: Windows, kernel_like: Tensor | None) -> Any:
    if None in at.kernel:
        assert kernel_like is not None
        return (op.Shape(kernel_like, start=2) - 1) * np.array(at.dilations) + 1
    return np.array(at.extents)


def _same_padding(length: int | None, extent: int | None, step: int) -> int | None:
    """Returns the padding that gives ceil(length / step) windows, or None if unknown."""
    if extent is None:
        return None
    if step == 1:
        return extent - 1
    if length is None:
        return None
    return max((-(-length // step) - 1) * step + extent - length, 0)


def static_sizes(x: Tensor, rank: int) -> list[int | None]:
    """Returns the spatial sizes of a tensor (N, C, …), None for unknown ones."""
    shape: tuple[Dim, ...] = x.shape if x.shape is not None else (None,) * (2 + rank)
    return [size if isinstance(size, int) else None for size in shape[2:]]


def _padded(x: Tensor, at: Windows) -> tuple[Tensor, Windows]:
    """Pads a tensor explicitly; returns it with the unpadded windows on it."""
    if not at.is_padded:
        return x, at
    zeros = (0,) * at.rank
    if at.pads is None:
        x = pad_axes(x, op.Concat(at.begin, at.end, axis=0), None, at.axes)
    else:
        x = pad_axes(x, [0, 0, *at.begin, 0, 0, *at.end])
    return x, replace(at, begin=zeros, end=zeros)


def _explicit(at: Windows) -> list[int] | None:
    """Returns the attribute ``pads`` for padding that is known; None for no padding."""
    return at.pads if at.is_padded else None


def input_gradient(g: Tensor, w: Tensor, x: Tensor, at: Windows, group: int) -> Tensor:
    """Returns the cotangent of the input of a convolution.

    The last window may end before the end of the padded input, or after it, as in pooling with
    ceil_mode.

    Args:
        g: The output's cotangent (N, M, …).
        w: The weights (M, C/group, …).
        x: The input (N, C, …); only its shape is used.
        at: The windows on x.
        group: The number of groups.
    """
    pads = at.pads
    common: dict[str, Any] = {"group": group, "strides": at.strides, "dilations": at.dilations}
    if pads is None:
        full = op.ConvTranspose(g, w, **common, output_padding=[step - 1 for step in at.strides])
        ends = at.begin + op.Shape(x, start=2)
        return op.Slice(full, at.begin, ends, at.axes).with_shape_of(x)
    if set(at.strides) == {1} and None not in at.extents and min(mirrored_pads(at)) >= 0:
        # With stride 1, the transposed convolution is a convolution with the mirrored kernel.
        result = op.Conv(
            g,
            _mirrored(w, at.kernel, group),
            group=group,
            dilations=at.dilations,
            pads=mirrored_pads(at),
        )
        return result.with_shape_of(x)
    ends_, extra, cut = _transposed_padding(g, x, at)
    result = op.ConvTranspose(
        g,
        w,
        **common,
        pads=[*pads[: at.rank], *ends_],
        output_padding=extra if any(extra) else None,
    )
    if cut:
        axes = [2 + axis for axis in cut]
        lengths = op.Shape(x, start=2)
        if len(cut) < at.rank:
            lengths = op.Gather(lengths, cut)
        result = op.Slice(result, [0] * len(cut), lengths, axes)
    return result.with_shape_of(x)


def mirrored_pads(at: Windows) -> list[int]:
    """Returns the padding of the convolution with the mirrored kernel, for strides of 1."""
    reach = [cast(int, extent) - 1 for extent in at.extents]
    return [r - pad for r, pad in zip(reach * 2, at.pads or (), strict=True)]


def _transposed_padding(
    g: Tensor, x: Tensor, at: Windows
) -> tuple[list[int], list[int], list[int]]:
    """Returns the padding of a ConvTranspose from the shape of g to that of x.

    Returns:
        The padding at the end of each axis; the output_padding; and the axes of unknown size, along
        which the result may be longer than x.
    """
    ends, extra, cut = [], [], []
    for axis, (length, count, extent, step, end) in enumerate(
        zip(
            *(static_sizes(x, at.rank), static_sizes(g, at.rank), at.extents, at.strides),
            cast(tuple[int, ...], at.end),
            strict=True,
        )
    ):
        more = 0
        if step > 1 and length is not None and count is not None and extent is not None:
            end = step * (count - 1) + extent - cast(int, at.begin[axis]) - length
            end, more = max(end, 0), max(-end, 0)
        elif step > 1:  # fewer elements than a step follow the last window
            more = step - 1
            cut.append(axis)
        ends.append(end)
        extra.append(more)
    return ends, extra, cut


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
    """Returns, for each kernel element, the elements of x that it is multiplied by.

    Args:
        x: A tensor.
        first: Its first spatial axis.
        at: The windows.
    """
    kernel, extents = cast(tuple[int, ...], at.kernel), cast(tuple[int, ...], at.extents)
    if set(kernel) == set(at.strides) == {1}:
        return [x]
    axes = list(range(first, first + at.rank))
    seen = []
    for tap in itertools.product(*map(range, kernel)):
        starts = [index * step for index, step in zip(tap, at.dilations, strict=True)]
        # Negative ends, so that the number of windows need not be known.
        ends = [start - extent + 1 for start, extent in zip(starts, extents, strict=True)]
        ends = [end or np.iinfo(np.int64).max for end in ends]
        seen.append(op.Slice(x, starts, ends, axes, at.strides))
    return seen


def _weight_gradient_by_columns(g: Tensor, x: Tensor, w: Tensor, at: Windows, group: int) -> Tensor:
    """Multiplies the cotangent by the columns (im2col): a copy of the input per kernel element."""
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
    if count > 1 and inputs != 1:  # (M, taps · C/group), with the taps as the outer axis
        width = inputs if isinstance(inputs, int) else size_of(w, [1])
        # onnxruntime replaces a Reshape behind a Transpose by a new node, and runs new nodes that
        # compute outputs before all other gradients (see `ortops.graph.passes.order`).
        kernel = cast(tuple[int, ...], at.kernel)
        split = op.Reshape(result, [-1, *kernel, width])
        return op.Transpose(split, perm=[0, len(kernel) + 1, *range(1, len(kernel) + 1)])
    return reshape_like(result, w)


def _sums_over_batch_in_product(g: Tensor, x: Tensor, w: Tensor, at: Windows) -> bool:
    """Whether one product over batch and positions is faster than the sum of a product per image.

    One product requires transposed copies of x and g. This pays if the product of an image is not
    small compared to the image. Measured: 3 ms instead of 15 ms for 64 channels of 8×8 and 3×3
    kernels, but 33 ms instead of 22 ms for 64 channels of 56×56.
    """
    shape = w.shape
    seen, given = static_sizes(x, at.rank), static_sizes(g, at.rank)
    if shape is None or any(not isinstance(size, int) for size in (*shape, *seen, *given)):
        return False
    outputs, inputs, *kernel = cast(tuple[int, ...], shape)
    moved = inputs * math.prod(cast(list[int], seen)) + outputs * math.prod(cast(list[int], given))
    return 4 * outputs * inputs * math.prod(kernel) >= moved


def _shifts_are_cheaper(g: Tensor, w: Tensor, at: Windows) -> bool:
    """Whether shifting both operands along one axis each is faster than columns.

    The estimate counts the copies of an image's channels, of which columns need one per kernel
    element, and the additional cost of the longer product and of the sum over images. Copying an
    element takes as long as 20 multiplications in products (0.2 ns and 0.01 ns, on 2 cores).
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
    """Multiplies horizontally shifted inputs by vertically shifted cotangents.

    The input is shifted for each kernel column, and the cotangent for each kernel row. Their
    product contains the gradient of all kernel elements.
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
    by_row = op.Reshape(seen, flat).mT
    result = op.ReduceSum(op.MatMul(op.Reshape(seeing, flat), by_row), [0], keepdims=0)
    split = op.Reshape(result, [rows, outputs, columns, inputs])
    return op.Transpose(split, perm=[1, 3, 0, 2])


def _weight_gradient_by_convolution(
    g: Tensor, x: Tensor, w: Tensor, at: Windows, group: int
) -> Tensor:
    """Convolves the input with the cotangent, with batch and channels exchanged."""
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
        # Input elements after the last window would add kernel elements.
        result = op.Slice(result, [0] * at.rank, _shape_from(w, 2), spatial)
    return result.with_shape_of(w)


def _shape_from(x: Tensor, start: int) -> list[int] | Tensor:
    """Returns the sizes from an axis on: ints if all are static, else an int64 vector."""
    sizes = None if x.shape is None else x.shape[start:]
    if sizes is not None and all(isinstance(size, int) for size in sizes):
        return cast(list[int], list(sizes))
    return op.Shape(x, start=start)


def _reshape(x: Tensor, leading: Sequence[int], kept: int) -> Tensor:
    """Reshapes the axes before axis ``kept``; 0 and −1 have the same meaning as in Reshape."""
    tail = _shape_from(x, kept)
    if not isinstance(tail, Tensor):
        return op.Reshape(x, [*leading, *tail])
    return op.Reshape(x, op.Concat(list(leading), tail, axis=0))


def _split_axis(x: Tensor, axis: int, group: int, part: Dim = None) -> Tensor:
    """Splits an axis into ``group`` parts, whose size ``part`` may be given."""
    if part is None and x.shape is not None:
        size = x.shape[axis]
        part = size // group if isinstance(size, int) else None
    return _reshape(x, [*(0,) * axis, group, part if isinstance(part, int) else -1], axis + 1)


def _merge_axes(x: Tensor, axis: int) -> Tensor:
    """Merges an axis and the next one."""
    sizes = (None, None) if x.shape is None else x.shape[axis : axis + 2]
    joined = -1 if any(not isinstance(size, int) for size in sizes) else math.prod(cast(Any, sizes))
    return _reshape(x, [*(0,) * axis, joined], axis + 2)


def _bias_gradient(g: Tensor, at: Windows) -> Tensor:
    return sum_along(g, [0, *at.axes])


def _kernel(
    w: Tensor, kernel_shape: Sequence[int] | None, others: Sequence[Tensor]
) -> Sequence[Dim]:
    """Returns the sizes of the kernel, None for unknown ones."""
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
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    **placement: Unpack[Placement],
) -> Cotangents:
    at = windows(x, _kernel(w, kernel_shape, (x, g)), w, **placement)
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
    group: int = 1,
    kernel_shape: Sequence[int] | None = None,
    output_padding: Sequence[int] | None = None,
    output_shape: Sequence[int] | None = None,
    **placement: Unpack[Placement],
) -> Cotangents:
    auto_pad = placement.get("auto_pad", "NOTSET")
    if is_same := auto_pad.startswith("SAME"):  # the padding follows from the size of the output
        placement["auto_pad"] = "VALID"
    at = windows(y, _kernel(w, kernel_shape, (x, g)), **placement)
    if output_shape or is_same:
        at = _cropped(at, x, w, auto_pad, output_padding, output_shape)
    # The windows slide over y, because the roles of input and output are exchanged.
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
    """Returns the windows of a ConvTranspose with the padding that gives the requested size."""
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
