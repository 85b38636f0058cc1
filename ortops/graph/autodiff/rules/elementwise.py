"""Rules of elementwise operators, with broadcasting.

At kinks, bounds and ties they return the same subgradient as PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._precision import equal
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.edit import is_float
from ortops.graph.tensor import Tensor, op


def _times_slope(g: Tensor, slope: Tensor) -> Tensor:
    """Returns g · slope, or 0 if the cotangent is 0 and the slope is infinite.

    A function with a limit as e^x overflows, such as 1 / (1 + e^x), passes a cotangent of 0 there,
    and 0 · ∞ would be NaN. Infinite products are kept, because they reveal a divergence.
    """
    zero = g.tape.constant(np.array(0, g.dtype))
    is_flat = op.And(abs(slope) >= math.inf, equal(g, zero))
    return g * op.Where(is_flat, 0, slope)


# Functions of one tensor

_UNARY: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "Neg": lambda g, y, x: -g,
    "Reciprocal": lambda g, y, x: -g * y * y,
    "Sqrt": lambda g, y, x: g * 0.5 / y,
    "Exp": lambda g, y, x: _times_slope(g, y),
    "Log": lambda g, y, x: g / x,
    "Erf": lambda g, y, x: g * (2 / math.sqrt(math.pi) * op.Exp(-x * x)),
    "Sin": lambda g, y, x: g * op.Cos(x),
    "Cos": lambda g, y, x: -g * op.Sin(x),
    "Tan": lambda g, y, x: g * (1 + y * y),
    "Asin": lambda g, y, x: g / op.Sqrt((1 - x) * (1 + x)),  # 1 − x² would cancel near ±1
    "Acos": lambda g, y, x: -g / op.Sqrt((1 - x) * (1 + x)),
    "Atan": lambda g, y, x: g / (1 + x * x),
    "Sinh": lambda g, y, x: _times_slope(g, op.Cosh(x)),
    "Cosh": lambda g, y, x: _times_slope(g, op.Sinh(x)),
    "Tanh": lambda g, y, x: g * (1 - y * y),
    "Asinh": lambda g, y, x: g / op.Sqrt(1 + x * x),
    "Acosh": lambda g, y, x: g / op.Sqrt((x - 1) * (x + 1)),
    "Atanh": lambda g, y, x: g / ((1 - x) * (1 + x)),
    # In terms of the rounded y, so that the 1 / y of a following logarithm cancels exactly.
    "Sigmoid": lambda g, y, x: g * (y * (1 - y)),
    "Softplus": lambda g, y, x: g * op.Sigmoid(x),
    # A product with a mask would be NaN for an infinite cotangent, such as that of a root at 0.
    "Relu": lambda g, y, x: op.Where(y > 0, g, 0),
    "Abs": lambda g, y, x: g * op.Sign(x),
    "Identity": lambda g, y, x: g,
}
for _op_type, _rule in _UNARY.items():
    vjp(_op_type)(_rule)


# Arithmetic


@vjp("Add", elementwise=True)
def add(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g, g


@vjp("Sub", elementwise=True)
def sub(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g, -g


@vjp("Mul", elementwise=True)
def mul(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g * b, g * a


@vjp("Div", elementwise=True)
def div(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    da = g / b
    return da, -da * y


@vjp("Pow", elementwise=True)
def power(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    db = None
    if is_float(b.value):
        # 0^0 = 1 and 0^y = 0 (y > 0) are treated as constant, because log 0 is not finite.
        flat = op.And(op.Equal(a, 0), b >= 0)
        db = (_times_slope(g, y) * op.Log(op.Where(flat, 1, a))).astype(b.dtype)
    return _base_cotangent(g, a, b), db


def _base_cotangent(g: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    constant = b.constant
    if constant is not None and constant.size == 1:
        exponent = constant.item()
        if exponent == 0:
            return None
        if exponent == 1:
            return g
        if exponent == 2:
            return g * (2 * a)
    exponents = b.astype(a.dtype)
    if constant is None or (constant == 0).any():
        # The derivative of x^0 is 0, but 0 · 0^(−1) would be NaN.
        a = op.Where(op.And(op.Equal(a, 0), op.Equal(b, 0)), 1, a)
    slope = exponents * op.Pow(a, exponents - 1)
    if constant is not None and ((constant >= 0) & (constant <= 2)).all():
        return g * slope  # infinite only at 0, which is a pole
    return _times_slope(g, slope)


@vjp("Sum", elementwise=True)
def variadic_sum(g: Tensor, y: Tensor, *xs: Tensor) -> Cotangents:
    return (g,) * len(xs)


@vjp("Mean", elementwise=True)
def variadic_mean(g: Tensor, y: Tensor, *xs: Tensor) -> Cotangents:
    return (g * (1 / len(xs)),) * len(xs)


@vjp("Max", "Min", elementwise=True)
def extremum(g: Tensor, y: Tensor, *xs: Tensor) -> Cotangents:
    if len(xs) == 1:
        return g
    chosen = [equal(x, y).astype(g.dtype) for x in xs]  # ties share evenly
    share = g / op.Sum(*chosen)
    return tuple(share * mask for mask in chosen)


@vjp("Mod", elementwise=True)
def mod(g: Tensor, y: Tensor, a: Tensor, b: Tensor, *, fmod: int = 0) -> Cotangents:
    return g, -g * op.Round((a - y) / b)  # y = a − b · quotient, for either rounding


# Activations


@vjp("Softsign")
def softsign(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    size = 1 + abs(x)
    return g / size / size  # size² could overflow


@vjp("LeakyRelu")
def leaky_relu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 0.01) -> Cotangents:
    return op.Where(x > 0, g, g * alpha)


@vjp("PRelu", elementwise=True)
def prelu(g: Tensor, y: Tensor, x: Tensor, slope: Tensor) -> Cotangents:
    positive = x > 0
    return op.Where(positive, g, g * slope), op.Where(positive, 0, g * x)


@vjp("ThresholdedRelu")
def thresholded_relu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.0) -> Cotangents:
    return op.Where(x > alpha, g, 0)


@vjp("Elu")
def elu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.0) -> Cotangents:
    return op.Where(x > 0, g, g * (y + alpha))


@vjp("Celu")
def celu(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.0) -> Cotangents:
    return op.Where(x > 0, g, g * (y * (1 / alpha) + 1))


@vjp("Selu")
def selu(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    *,
    alpha: float = 1.67326319217681884765625,
    gamma: float = 1.05070102214813232421875,
) -> Cotangents:
    return op.Where(x > 0, g * gamma, g * (y + alpha * gamma))


@vjp("HardSigmoid")
def hard_sigmoid(
    g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 0.2, beta: float = 0.5
) -> Cotangents:
    return op.Where(op.And(y > 0, y < 1), g * alpha, 0)


@vjp("HardSwish")
def hard_swish(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    curved = g * (x * (1 / 3) + 0.5)
    return op.Where(x >= 3, g, op.Where(x <= -3, 0, curved))


@vjp("Gelu")
def gelu(g: Tensor, y: Tensor, x: Tensor, *, approximate: str = "none") -> Cotangents:
    if approximate == "none":
        z = x * math.sqrt(0.5)
        cumulative = 0.5 + 0.5 * op.Erf(z)
        density = op.Exp(-math.log(math.pi) / 2 - z * z)  # √2 times the normal density
        return g * (cumulative + z * density)
    x = op.Clip(x, -10.0, 10.0)  # for larger |x|, tanh is exactly ±1, and x² could overflow
    square = x * x
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = op.Tanh(x * (scale + scale * cubic * square))
    slope = scale + 3 * scale * cubic * square
    return g * ((0.5 + 0.5 * t) * (1 + x * (1 - t) * slope))


@vjp("Mish")
def mish(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    t = op.Tanh(op.Softplus(x))
    return g * (t + x * op.Sigmoid(x) * (1 - t * t))


@vjp("Swish")
def swish(g: Tensor, y: Tensor, x: Tensor, *, alpha: float = 1.0) -> Cotangents:
    if alpha == 1:
        s = op.Sigmoid(x)
        return g * (s + y * (1 - s))
    s = op.Sigmoid(x * alpha)
    return g * (s + y * (alpha * (1 - s)))


# Selection


@vjp("Shrink")
def shrink(g: Tensor, y: Tensor, x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Cotangents:
    return op.Where(abs(x) > lambd, g, 0)


@vjp("Clip", elementwise=True)
def clip(
    g: Tensor, y: Tensor, x: Tensor, low: Tensor | None = None, high: Tensor | None = None
) -> Cotangents:
    inside = equal(x, y)
    below = None if low is None else x < low
    above = None if high is None else x > high
    if low is not None and high is not None:  # if low > high, y is high everywhere
        least, most = low.constant, high.constant
        if least is None or most is None or least > most:
            inside = op.And(inside, low <= high)
        below = op.And(below, low < high)
        above = op.Or(above, high < low)
    masks = (inside, below, above)
    return tuple(None if mask is None else op.Where(mask, g, 0) for mask in masks)


@vjp("Where", elementwise=True)
def where(g: Tensor, y: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return None, op.Where(condition, g, 0), op.Where(condition, 0, g)


# Type


@vjp("Cast")
def cast(
    g: Tensor, y: Tensor, x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up"
) -> Cotangents:
    return _cast_back(g, x)


def _cast_back(g: Tensor, x: Tensor) -> Tensor:
    return g.astype(x.dtype) if is_float(x.value) else g  # x is quantized, and g is float


@vjp("CastLike")
def cast_like(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    target: Tensor,
    *,
    saturate: int = 1,
    round_mode: str = "up",
) -> Cotangents:
    return _cast_back(g, x), None
