"""Arrays that remember how they were computed, for derivatives of any order.

There are few primitives: sums, products, functions of one array, a choice, and moving elements.
The derivative of each is written with them, so that it can be differentiated as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_numbers = itertools.count()


class Traced:
    """An array, the arrays that it was computed from, and how cotangents reach them.

    Attributes:
        value: The array.
        parents: The arrays that it was computed from, each with the function that turns a
            cotangent of this array into one of that array; constants are left out.
        is_constant: Whether no variable is among what it was computed from.
        number: Larger than those of the parents.
    """

    __slots__ = ("is_constant", "number", "parents", "value")

    def __init__(
        self,
        value: Array,
        parents: Sequence[tuple[Traced, Callable[[Traced], Traced]]] = (),
        *,
        is_variable: bool = False,
    ) -> None:
        self.value = value
        self.parents = tuple(pair for pair in parents if not pair[0].is_constant)
        self.is_constant: bool = not is_variable and not self.parents
        self.number = next(_numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape


Value: TypeAlias = Traced | Array
"""What a tensor is during a replay: traced, or an array that no derivative passes through."""


def value_of(value: Value) -> Array:
    """Returns the array itself."""
    return value.value if isinstance(value, Traced) else value


def lift(value: Value | float, like: Traced | None = None) -> Traced:
    """Returns a traced array of a constant; numbers get the type of ``like``."""
    if isinstance(value, Traced):
        return value
    return Traced(np.asarray(value, None if like is None else like.value.dtype))


def leaf(value: Value) -> Traced:
    """Returns a new variable. What it stands for is its parent, for derivatives of other nodes."""
    if isinstance(value, Traced):
        return Traced(value.value, [(value, lambda g: g)], is_variable=True)
    return Traced(value, is_variable=True)


# -------------------------------------------------------------------------------- moving elements


def take(x: Traced, index: Array) -> Traced:
    """Returns the elements at positions of the flattened array, in the shape of ``index``."""
    shape = x.shape
    value = x.value.ravel()[index] if x.value.size else np.zeros(index.shape, x.value.dtype)
    return Traced(value, [(x, lambda g: _put(g, index, shape))])


def _put(x: Traced, index: Array, shape: tuple[int, ...]) -> Traced:
    """Returns an array of zeros to which elements are added at positions of the flattened array."""
    total = np.zeros(int(np.prod(shape)), x.value.dtype)
    np.add.at(total, index.ravel(), x.value.ravel())
    return Traced(total.reshape(shape), [(x, lambda g: take(g, index))])


def _positions(shape: Sequence[int]) -> Array:
    return np.arange(int(np.prod(shape))).reshape(shape)


def reshape(x: Traced, shape: Sequence[int]) -> Traced:
    """Returns the elements in another shape."""
    return take(x, _positions(x.shape).reshape(shape))


def broadcast(x: Traced, shape: tuple[int, ...]) -> Traced:
    """Returns the elements repeated, by numpy's rules."""
    return x if x.shape == shape else take(x, np.broadcast_to(_positions(x.shape), shape))


def _sum_to(x: Traced, shape: tuple[int, ...]) -> Traced:
    """Returns the sums of what `broadcast` from that shape has repeated."""
    if x.shape == shape:
        return x
    return _put(x, np.broadcast_to(_positions(shape), x.shape), shape)


def sum_over(x: Traced, axes: Sequence[int], *, keepdims: bool = True) -> Traced:
    """Returns the sums over axes."""
    chosen = {axis % max(x.value.ndim, 1) for axis in axes}
    kept = tuple(1 if axis in chosen else size for axis, size in enumerate(x.shape))
    total = _sum_to(x, kept)
    rest = tuple(size for axis, size in enumerate(x.shape) if axis not in chosen)
    return total if keepdims else reshape(total, rest)


def concatenate(parts: Sequence[Traced], axis: int) -> Traced:
    """Returns arrays one behind the other along an axis."""
    starts = np.cumsum([0, *(part.value.size for part in parts)]).tolist()
    indices = [_positions(p.shape) + start for p, start in zip(parts, starts, strict=False)]
    flat = [_put(part, index, (starts[-1],)) for part, index in zip(parts, indices, strict=True)]
    total = flat[0]
    for part in flat[1:]:
        total = add(total, part)
    return take(total, np.concatenate(indices, axis))


# ------------------------------------------------------------------------------------- arithmetic


def add(a: Traced, b: Traced) -> Traced:
    """Returns a + b, with numpy's broadcasting."""
    first, second = a.shape, b.shape
    return Traced(
        a.value + b.value,
        [(a, lambda g: _sum_to(g, first)), (b, lambda g: _sum_to(g, second))],
    )


def multiply(a: Traced, b: Traced) -> Traced:
    """Returns a · b, with numpy's broadcasting."""
    first, second = a.shape, b.shape
    return Traced(
        a.value * b.value,
        [
            (a, lambda g: _sum_to(multiply(g, b), first)),
            (b, lambda g: _sum_to(multiply(g, a), second)),
        ],
    )


def elementwise(
    x: Traced, function: Callable[[Array], Array], derivative: Callable[[Traced], Traced]
) -> Traced:
    """Returns a function of each element.

    Args:
        x: The array.
        function: The function.
        derivative: Its derivative at ``x``, as a traced array.
    """
    value = np.asarray(function(x.value), x.value.dtype)
    return Traced(value, [(x, lambda g: multiply(g, derivative(x)))])


def power(x: Traced, exponent: float) -> Traced:
    """Returns a constant power of each element."""
    return elementwise(
        x,
        lambda v: v ** np.asarray(exponent, v.dtype),
        lambda t: multiply(lift(exponent, t), power(t, exponent - 1)),
    )


def power_of(x: Traced, exponent: Traced, log: Callable[[Traced], Traced]) -> Traced:
    """Returns x to the power of another array, with numpy's broadcasting.

    Args:
        x: The base.
        exponent: The exponent, which may have another type.
        log: The natural logarithm.
    """
    first, second, own = x.shape, exponent.shape, x.value.dtype

    def by_base(g: Traced) -> Traced:
        less = add(exponent, lift(-1.0, exponent))
        slope = multiply(cast(exponent, own), power_of(x, less, log))
        return _sum_to(multiply(g, slope), first)

    def by_exponent(g: Traced) -> Traced:
        slope = multiply(power_of(x, exponent, log), log(x))
        return cast(_sum_to(multiply(g, slope), second), exponent.value.dtype)

    value = (x.value**exponent.value).astype(own)
    return Traced(value, [(x, by_base), (exponent, by_exponent)])


def select(mask: Array, a: Traced, b: Traced) -> Traced:
    """Returns a where the mask is true and b elsewhere, with numpy's broadcasting."""
    first, second = a.shape, b.shape
    zero = lift(0.0, a)
    return Traced(
        np.where(mask, a.value, b.value),
        [
            (a, lambda g: _sum_to(select(mask, g, zero), first)),
            (b, lambda g: _sum_to(select(mask, zero, g), second)),
        ],
    )


def cast(x: Traced, dtype: npt.DTypeLike) -> Traced:
    """Returns the array in another floating-point type."""
    own = x.value.dtype
    return Traced(x.value.astype(dtype), [(x, lambda g: cast(g, own))])


def gradients(y: Traced, xs: Sequence[Traced]) -> list[Traced]:
    """Returns the gradient of the sum of y by each of xs, zeros where y does not depend on it."""
    ends = {x.number for x in xs}
    found = {y.number: y}
    waiting = [y]
    while waiting:
        node = waiting.pop()
        if node.number in ends:
            continue
        for parent, _ in node.parents:
            if parent.number not in found:
                found[parent.number] = parent
                waiting.append(parent)
    cotangents = {y.number: Traced(np.ones_like(y.value))}
    for number in sorted(found, reverse=True):
        if number in ends or number not in cotangents:
            continue
        g = cotangents[number]
        for parent, pullback in found[number].parents:
            own = pullback(g)
            known = cotangents.get(parent.number)
            cotangents[parent.number] = own if known is None else add(known, own)
    return [cotangents.get(x.number) or Traced(np.zeros_like(x.value)) for x in xs]
