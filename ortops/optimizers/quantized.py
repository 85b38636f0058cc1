"""Adam with moments of 8 bits: Adam8bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ortops._common.arguments import whole_number
from ortops.optimizers.moments import AdamW, adamw_after_correction
from ortops.optimizers.optimizer import Arrays, Optimizer, UpdateRule, arrays
from ortops.schedules import LearningRate

__all__ = ["Adam8bit", "adam8bit"]

_DECADES = 7  # from 1e-7 to 1


def adam8bit(
    r: Any,
    t: Any,
    x: Any,
    g: Any,
    v: Any,
    v_scale: Any,
    h: Any,
    h_scale: Any,
    *,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> Arrays:
    """One Adam update whose moments are kept in 8 bits, block by block.

    The elements of a parameter are cut into blocks, the last one filled with zeros. A moment of
    each element is a code, which stands for a share of the largest magnitude in its block::

        m            = SHARES[V] · V_SCALE
        n            = SHARES[H] · H_SCALE
        X_new, m, n  = adamw_after_correction(R, T, X, G, m, n)
        V_SCALE_new  = max |m| of each block,    V_new = the code of m / V_SCALE_new
        H_SCALE_new  = max n of each block,      H_new = the code of n / H_SCALE_new

    The shares are those of dynamic tree quantization. Between 10^(e-7) and 10^(e-6), for e from 0
    to 6, there are 2^e intervals of equal length for each sign, or 2^(e+1) for H, which has no
    sign. A code represents the middle of its interval. Two more codes represent 0 and 1. V below
    the first interval is rounded to 0, but an H above 0 never is: it gets the code of the first
    interval. Otherwise, V could be divided by ``epsilon`` alone.

    Args:
        r: Learning rate, 0-d, float32 or float64.
        t: Update count, 0-d int64, 1 in the first update.
        x: Parameter of static shape, float32 or float64.
        g: Gradient, like ``x``.
        v: Codes of the running mean of the gradient, uint8 ``[blocks, block size]``.
        v_scale: Largest magnitude of each block, ``[blocks, 1]`` of the type of ``x``.
        h: Codes of the running mean of the squared gradient, like ``v``.
        h_scale: Largest value of each block, like ``v_scale``.
        alpha: Decay of the mean gradient (beta1 in the paper).
        beta: Decay of the mean squared gradient (beta2 in the paper).
        epsilon: Added to the bias-corrected root for numerical stability.
        weight_decay: Decay per unit of learning rate, as in `adamw_after_correction`.

    Returns:
        ``(x_new, v_new, v_scale_new, h_new, h_scale_new)``, each like its old value.

    Source:
        Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via Block-wise Quantization",
        2021. The codes are those of the package ``bitsandbytes``; where two intervals of different
        length meet, that package rounds to the nearest share, and it rounds small H to 0. There is
        no ONNX operator for it.

    Example:
        >>> x, g = np.float64([1, 2, 3]), np.float64([3, -4, 0.001])
        >>> codes, scale = np.zeros((1, 256), np.uint8), np.zeros((1, 1))
        >>> x_new, v, v_scale, h, h_scale = adam8bit(
        ...     np.float64(0.1), np.int64(1), x, g, codes, scale, codes, scale)
        >>> x_new.round(4).tolist(), v[0, :4].tolist(), v_scale.round(4).tolist()
        ([0.9, 2.1, 2.9], [237, 0, 136, 127], [[0.4]])
    """
    xp = x.__array_namespace__()
    blocks, length = v.shape
    m = xp.take(_SIGNED, v.astype(np.int32), axis=0).astype(x.dtype) * v_scale
    n = xp.take(_UNSIGNED, h.astype(np.int32), axis=0).astype(x.dtype) * h_scale
    inputs = _in_blocks(x, blocks, length), _in_blocks(g, blocks, length), m, n
    x_new, m, n = adamw_after_correction(
        r, t, *inputs, alpha=alpha, beta=beta, epsilon=epsilon, weight_decay=weight_decay
    )
    size = math.prod(x.shape)
    if size < blocks * length:
        x_new = xp.reshape(x_new, (1, -1))[:, :size]
    magnitudes = xp.abs(m)
    v_scale_new, position = _positions(magnitudes, 1)
    h_scale_new, place = _positions(n, 2)
    v_new = xp.maximum(xp.sign(m) * position + 127.0, 0.0)  # there is no code for -1
    # If H were 0 and V were not, a gradient of 0 would leave V divided by epsilon alone.
    h_new = xp.maximum(place - 1.0, xp.sign(n))
    codes = v_new.astype(np.uint8), h_new.astype(np.uint8)
    return arrays(xp.reshape(x_new, x.shape), codes[0], v_scale_new, codes[1], h_scale_new)


def _in_blocks(x: Any, blocks: int, length: int) -> Any:
    """Returns the elements as a matrix with a row for each block.

    It makes no vectors, because onnx's shape inference would list all their elements.
    """
    xp = x.__array_namespace__()
    if missing := blocks * length - math.prod(x.shape):
        zeros = np.zeros((1, missing), x.dtype)
        x = xp.concat([xp.reshape(x, (1, -1)), zeros], axis=1)
    return xp.reshape(x, (blocks, length))


def _positions(magnitudes: Any, first: int) -> tuple[Any, Any]:
    """Returns the scale of each block and the number of each element's interval.

    With ``first`` intervals in the first decade, the intervals are numbered from ``first`` on. The
    number is a piecewise linear function of the share, rounded down. It is concave, since each
    decade has twice the intervals in ten times the length, so it is the least of 7 lines.
    """
    xp = magnitudes.__array_namespace__()
    scale = xp.max(magnitudes, axis=-1, keepdims=True)
    shares = magnitudes / xp.maximum(scale, float(np.finfo(magnitudes.dtype).tiny))
    number = None
    for slope, start in _lines(first):
        line = shares * slope + start
        number = line if number is None else xp.minimum(number, line)
    return scale, xp.floor(number)


def _lines(first: int) -> list[tuple[float, float]]:
    """Returns slope and intercept of the number of an interval as a function of the share."""
    counts = [first * 2**decade for decade in range(_DECADES)]
    lines = [
        (count * 10.0 ** (_DECADES - 1 - decade) / 0.9, count * 8 / 9)
        for decade, count in enumerate(counts)
    ]
    # The share 1 has the number after all intervals exactly, in float32 as well.
    slope = float(np.float32(lines[-1][0]))
    lines[-1] = slope, 2 * counts[-1] - slope
    return lines


def _middles(first: int) -> list[float]:
    """Returns the middles of all intervals in ascending order."""
    return [
        10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (number + 0.5) / count)
        for decade, count in enumerate(first * 2**d for d in range(_DECADES))
        for number in range(count)
    ]


_UNSIGNED = np.array([0.0, *_middles(2), 1.0], np.float32)
"""What the codes of non-negative numbers stand for."""

_SIGNED = np.array([*(-x for x in reversed(_middles(1))), 0.0, *_middles(1), 1.0], np.float32)
"""What the codes of numbers with a sign stand for."""


@dataclass(frozen=True)
class Adam8bit(Optimizer):
    """Adam with a quarter of the memory for its state; see `adam8bit` for the formulae.

    Both moments have 8 bits for each element and a float32 for each block. Parameters with fewer
    than ``min_8bit_size`` elements keep float32 moments. As in PyTorch and in ``bitsandbytes``,
    ``epsilon`` is added after bias correction. T is 1 in the first update. With ``weight_decay`` it
    is AdamW.

    Args:
        learning_rate: Learning rate (R); finite, non-negative.
        alpha: Decay of the mean gradient (beta1), in [0, 1).
        beta: Decay of the mean squared gradient (beta2), in [0, 1).
        epsilon: Positive.
        weight_decay: Decay per unit of learning rate; non-negative.
        block_size: Number of elements with a common scale, 16 to 65536.
        min_8bit_size: Smallest number of elements of a parameter whose moments have 8 bits.

    Raises:
        ArgumentError: If a value is out of range, before or after rounding to float32.

    Example:
        >>> optimizer = Adam8bit()
        >>> optimizer.of((100, 50)).state_shapes((100, 50))
        {'V': (20, 256), 'V_SCALE': (20, 1), 'H': (20, 256), 'H_SCALE': (20, 1)}
        >>> optimizer.of((50,)).name
        'AdamW'
    """

    learning_rate: LearningRate = 1e-3
    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    block_size: int = 256
    min_8bit_size: int = 4096

    first_step: ClassVar[int] = 1
    _rule: ClassVar[UpdateRule] = adam8bit

    def of(self, shape: Sequence[int]) -> Optimizer:
        """Returns the optimizer for a parameter: AdamW with float32 moments if it is small."""
        if math.prod(shape) >= self.min_8bit_size:
            return self
        return AdamW(
            self.learning_rate,
            alpha=self.alpha,
            beta=self.beta,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            epsilon_after_correction=True,
        )

    def state_shapes(self, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state tensor: codes and scales in blocks."""
        blocks = -(-math.prod(shape) // self.block_size)
        codes, scales = (blocks, self.block_size), (blocks, 1)
        return {"V": codes, "V_SCALE": scales, "H": codes, "H_SCALE": scales}

    def state_dtypes(self, dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
        """Returns the dtype of each state tensor: uint8 for codes."""
        code = np.dtype(np.uint8)
        return {"V": code, "V_SCALE": dtype, "H": code, "H_SCALE": dtype}

    def _check(self) -> None:
        for name, least, most in (("block_size", 16, 2**16), ("min_8bit_size", 1, 2**31)):
            value = whole_number(self._shown(name), getattr(self, name), least, most)
            object.__setattr__(self, name, value)
