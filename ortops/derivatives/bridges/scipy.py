"""A scalar Function as functions of flat float64 vectors, for scipy.optimize."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ortops._common.numbers import Array, integer
from ortops.derivatives.function import Function
from ortops.engine.training.input_values import Input
from ortops.errors import ArgumentError, FeedError, did_you_mean

Shapes: TypeAlias = (
    int | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Sequence[int] | None] | None
)
"""The shape of one input, or of several in order or by name."""


_Evaluated: TypeAlias = tuple[bytes, float, Callable[[], Array]]
"""A vector, as bytes; the output for it; and the function that computes the gradient there."""


class ScipyFunctions(NamedTuple):
    """The arguments of scipy.optimize.minimize; see `Function.scipy`.

    Attributes:
        fun: Returns the output for a flat vector, a float.
        jac: Returns the gradient for a flat vector, a flat vector.
        hessp: Returns the product of the Hessian with a flat vector: ``hessp(x, p)``.
    """

    fun: Callable[[Array], float]
    jac: Callable[[Array], Array]
    hessp: Callable[[Array, Array], Array]


def scipy_functions(function: Function, shape: Shapes, fixed: Mapping[str, Any]) -> ScipyFunctions:
    """Returns the functions; see `Function.scipy`."""
    function._arguments.check_scalar("scipy")
    for name in fixed.keys() - set(function.inputs):
        raise ArgumentError(
            f"scipy: no input is named '{name}'; {did_you_mean(name, function.inputs)}"
        )
    layout = _layout(function, shape, fixed)
    names = list(layout)
    last: _Evaluated | None = None

    def cut(what: str, vector: Any) -> dict[str, Array]:
        """Returns a flat vector in parts, in the types of the inputs."""
        flat = np.asarray(vector, np.float64)
        size = sum(math.prod(dims) for dims in layout.values())
        if flat.shape != (size,):
            raise FeedError(f"scipy: {what} must have shape [{size}], got {list(flat.shape)}")
        parts, start = {}, 0
        for name, dims in layout.items():
            end = start + math.prod(dims)
            with np.errstate(over="ignore"):  # becomes infinite
                part = flat[start:end].astype(function._source.inputs[name].dtype)
            parts[name], start = part.reshape(dims), end
        return parts

    def ordered(parts: Mapping[str, Any]) -> list[Any]:
        return [parts[name] if name in parts else fixed[name] for name in function.inputs]

    def joined(parts: Sequence[Any]) -> Array:
        return np.concatenate([np.ravel(part).astype(np.float64) for part in parts])

    def evaluated(x: Any) -> _Evaluated:
        """Returns the output and the pullback, which scipy wants for the same vector in turn."""
        nonlocal last
        key, found = np.asarray(x, np.float64).tobytes(), last
        if found is None or found[0] != key:
            value, pullback = function.vjp(*ordered(cut("x", x)), wrt=names)
            function._arguments.check_one_element("scipy", value.shape)
            one = np.ones_like(value)
            last = found = key, float(value.reshape(())), lambda: joined(pullback(one))
        return found

    def fun(x: Any) -> float:
        return evaluated(x)[1]

    def jac(x: Any) -> Array:
        return evaluated(x)[2]()

    def hessp(x: Any, p: Any) -> Array:
        vectors = list(cut("p", p).values())
        found = function.hvp(ordered(cut("x", x)), vectors, wrt=names)
        return joined([found] if len(names) == 1 else found)

    return ScipyFunctions(fun, jac, hessp)


def _layout(function: Function, shape: Any, fixed: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Returns the shapes of the parts of a flat vector, by the names of their inputs."""
    inputs = function._source.inputs
    free = [name for name in inputs if name not in fixed]
    if not free:
        raise ArgumentError("scipy: all inputs are fixed; leave out those that are optimized")
    given: dict[str, Any] = dict.fromkeys(free)
    if isinstance(shape, Mapping):
        for name in shape:
            if name not in free:
                raise ArgumentError(f"scipy: shape: no such input; {did_you_mean(name, free)}")
        given |= shape
    elif shape is not None:
        shapes = shape if _holds_shapes(shape) else [shape]
        if len(shapes) != len(free):
            raise ArgumentError(
                f"scipy: shape must have one shape for each of {', '.join(free) or 'no inputs'}, "
                f"got {shape!r:.80}; pass arrays for the fixed inputs by name"
            )
        given = dict(zip(free, shapes, strict=True))
    return {name: _dims(inputs[name], function, each) for name, each in given.items()}


def _holds_shapes(shape: object) -> bool:
    return isinstance(shape, Sequence) and any(isinstance(each, Sequence) for each in shape)


def _dims(given: Input, function: Function, shape: Any) -> Sequence[int]:
    """Returns the checked shape of an input; None is the shape in the model."""
    name, dims = given.name, given.dims
    if name not in function._source.float_inputs:
        raise ArgumentError(
            f"scipy: input '{name}' must be floating-point to be optimized, got {given.dtype}; "
            f"pass its array as scipy(..., {name}=...)"
        )
    if shape is None:
        shape = () if dims is None else dims
        if dims is None or not all(isinstance(dim, int) for dim in dims):
            shown = "unknown" if dims is None else list(dims)
            raise ArgumentError(
                f"scipy: input '{name}' has the shape {shown} in the model; pass its sizes as "
                "shape=, or its array by name if it is fixed"
            )
    sizes = [integer(each) for each in (shape if isinstance(shape, Sequence) else [shape])]
    found = [size for size in sizes if size is not None and size >= 0]
    if len(found) != len(sizes):
        raise ArgumentError(f"scipy: shape must have integers >= 0 for '{name}', got {shape!r:.80}")
    given.fit(np.empty(found, given.dtype), {})
    return found
