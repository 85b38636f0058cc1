"""Rules of Fourier transforms: the adjoint of a transform is another transform, scaled."""

from __future__ import annotations

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import definition, vjp
from ortops.graph.shapes import index_range, size_of
from ortops.graph.tensor import Tensor, op


@vjp("DFT")
def dft(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    dft_length: Tensor | None = None,
    axis: Tensor | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Cotangents:
    where = axis if axis is not None else x.tape.constant(np.array(-2))
    given = _size_along(x, where)
    real = bool(inverse and onesided)
    if dft_length is not None:
        count = _scalar(dft_length)
    else:
        count = _size_along(y, where) if real else given
    if real:
        # A one-sided spectrum contains one of two conjugate frequencies, which counts twice.
        dx = op.DFT(g, count, axis, onesided=1) * _weights(g, count, x, where)
    elif onesided and not (g.shape is not None and isinstance(count, int)):
        # If sizes are unknown, onnxruntime assumes that both spectra have the same length.
        g = _fit(g, _size_along(y, where), count, where)
        dx = op.DFT(g, None, axis, inverse=1)
    else:
        dx = op.DFT(g, count, axis, inverse=1 - inverse)
    factor = count.astype(g.dtype) if isinstance(count, Tensor) else float(count)
    dx = dx / factor if inverse else dx * factor
    if not real and (x.shape is None or x.shape[-1] != 2):
        dx = dx[..., : size_of(x, [-1])]  # a real input has no imaginary part
    if dft_length is None:
        return dx
    # The transform pads or truncates its input to its length.
    have: int | Tensor = count
    if real:
        have = count // 2 + 1 if isinstance(count, int) else op.Add(op.Div(count, 2), 1)
    return _fit(dx, have, given, where)


def _fit(x: Tensor, have: int | Tensor, want: int | Tensor, axis: Tensor) -> Tensor:
    """Truncates, or pads with zeros, along an axis."""
    axes = op.Reshape(axis, [-1])
    if not isinstance(have, int) or not isinstance(want, int):
        cut = op.Slice(x, [0], op.Reshape(want, [1]) if isinstance(want, Tensor) else [want], axes)
        filled = op.Pad(cut, [0, op.Max(op.Sub(want, have), 0)], None, axes)
        return filled.with_shape([None] * x.ndim)
    if want < have:
        x = op.Slice(x, [0], [want], axes)
    elif want > have:
        x = op.Pad(x, [0, want - have], None, axes)
    return x


def _scalar(number: Tensor) -> int | Tensor:
    """Returns a scalar as an int if it is known, or as an int64 tensor."""
    if number.constant is not None:
        return int(number.constant.item())
    return op.Reshape(number, []).astype(np.int64)


def _size_along(x: Tensor, axis: Tensor) -> int | Tensor:
    if axis.constant is not None:
        return size_of(x, [int(axis.constant.item())])
    return op.Gather(op.Shape(x), op.Reshape(axis, []))


def _weights(g: Tensor, count: int | Tensor, x: Tensor, axis: Tensor) -> Tensor:
    """Returns 1 for frequencies that are their own conjugates, and 2 for the others."""
    number = g.tape.constant(np.array(count)) if isinstance(count, int) else count
    index = index_range(op.Add(op.Div(number, 2), 1), g)
    alone = op.Or(op.Equal(index, 0), op.Equal(op.Mul(index, 2), number))
    weights = op.Where(alone, np.array(1, g.dtype), np.array(2, g.dtype))
    if axis.constant is not None:
        behind = -1 - int(axis.constant.item()) % x.ndim + x.ndim
        return op.Unsqueeze(weights, list(range(1, 1 + behind)))
    is_axis = op.Equal(np.arange(x.ndim), op.Mod(op.Reshape(axis, []), x.ndim))
    return op.Reshape(weights, op.Where(is_axis, -1, np.array(1)))


@definition("STFT")
def stft(
    signal: Tensor,
    frame_step: Tensor,
    window: Tensor | None = None,
    frame_length: Tensor | None = None,
    *,
    onesided: int = 1,
) -> Cotangents:
    total = size_of(signal, [1])
    if frame_length is not None:
        length = _scalar(frame_length)
    else:
        length = total if window is None else size_of(window, [0])
    step = _scalar(frame_step)
    if isinstance(total, int) and isinstance(length, int) and isinstance(step, int):
        known = np.arange(0, total - length + 1, step)
        places = signal.tape.constant(known[:, None] + np.arange(length))
    else:
        zero = signal.tape.constant(np.array(0))
        starts = op.Range(zero, op.Add(op.Sub(total, length), 1), step)
        places = op.Add(op.Unsqueeze(starts, [1]), index_range(length, signal))
    frames = op.Gather(signal, places, axis=1)  # (batch, frame, place, part)
    if window is not None:
        frames = frames * op.Unsqueeze(window, [1])
    return op.DFT(frames, None, -2, onesided=onesided)
