"""The bridge to JAX: a Function as a function of JAX arrays that JAX can transform.

One primitive computes Functions. It holds a `_Call`: a Function, or products with its Jacobian,
which are Functions as well. Thus derivatives of any order have the same rules:

- the derivative of a call is the Jacobian-vector product, another call;
- the transpose of the Jacobian-vector product is the vector-Jacobian product, and vice versa;
- a batch of any of these is the call of a Function with one more axis.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ortops._common.numbers import Array
from ortops.derivatives.function import Function
from ortops.derivatives.programs import input_of
from ortops.engine.training.input_values import Input
from ortops.errors import ArgumentError, KernelError, UnsupportedError

Kind: TypeAlias = Literal["jvp", "vjp"]

_X64 = "call jax.config.update('jax_enable_x64', True) first"
_SHAPES = "under jit and grad, shapes must depend on shapes only"


def jax_function(function: Function) -> Callable[..., Any]:
    """Returns a function of JAX arrays; see `Function.jax`."""
    function._source.refuse_random("jax", "but functions of JAX must be pure")
    for given in function._source.inputs.values():
        if given.unbound is not None or given.dtype is None or given.dtype.kind in "OUSc":
            kind = given.unbound or given.dtype or "unknown"
            raise UnsupportedError(f"jax: input '{given.name}' has no type of JAX, but {kind}")

    @functools.cache
    def call_reading(weights: tuple[str, ...]) -> _Call:
        return _Call(function.reading(weights) if weights else function)

    def computed(*xs: Any, parameters: Mapping[str, Any] | None = None) -> Any:
        if not isinstance(parameters, Mapping | None):
            raise ArgumentError(
                f"parameters must be a dict of arrays, got {type(parameters).__name__}"
            )
        weights = dict(sorted((parameters or {}).items()))
        call = call_reading(tuple(weights))
        args = [*function._arguments.in_order(xs, {}), *weights.values()]
        inputs = call.function._source.inputs.values()
        args = [_argument(given, value) for given, value in zip(inputs, args, strict=True)]
        found = _call_p.bind(*args, call=call)
        return found[0] if len(found) == 1 else tuple(found)

    return computed


def _argument(given: Input, value: Any) -> Any:
    """Returns a value as a JAX array of the type of an input."""
    wanted = np.dtype(given.dtype)
    kind = _in_jax(given.name, wanted)
    if hasattr(value, "__jax_array__"):
        value = jnp.asarray(value)
    if not isinstance(value, jax.Array | np.ndarray) and not _holds_tracers(value):
        value = given.fit(value, {})
    array = value if isinstance(value, jax.Array | np.ndarray) else jnp.asarray(value)
    has = np.dtype(array.dtype)
    weak = array is not value or getattr(array, "weak_type", False)
    if not (_rank(has) <= _rank(wanted) if weak else np.can_cast(has, wanted, "safe")):
        raise ArgumentError(
            f"input '{given.name}' must be {wanted}, got {has}; convert it with .astype"
        )
    return jnp.asarray(_narrowed(given.name, array, kind))


def _holds_tracers(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def _rank(kind: np.dtype[Any]) -> int:
    """Returns the place of a type in the order boolean, integer, floating-point."""
    return {"b": 0, "i": 1, "u": 1}.get(kind.kind, 2)


def _in_jax(name: str, kind: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the type that JAX has for one of ONNX: integers may have fewer bits, floats not."""
    found: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(kind))
    if found != kind and _rank(kind) == 2:
        raise ArgumentError(
            f"'{name}' is {kind}, which JAX computes with as an option only; {_X64}"
        )
    return found


def _narrowed(name: str, array: Any, kind: np.dtype[Any]) -> Any:
    """Returns an array in a type of JAX, which its integers must fit."""
    if isinstance(array, np.ndarray) and array.dtype.kind in "iu" and kind != array.dtype:
        limits = np.iinfo(kind)
        if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
            raise ArgumentError(f"'{name}' has values that {kind} cannot represent; {_X64}")
    return array.astype(kind)


class _Call:
    """Computes a Function; a parameter of the primitive, which JAX compares by identity.

    Args:
        function: The Function.

    Attributes:
        function: The Function.
        linear: The number of its last inputs in which it is linear.
    """

    linear = 0

    def __init__(self, function: Function) -> None:
        self.function = function
        self._made: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return ", ".join(self.function.outputs)

    def product(self, kind: Kind, wrt: tuple[int, ...]) -> _Product:
        """Returns the product with the Jacobian with respect to inputs, given by position.

        Args:
            kind: ``"jvp"``, whose further inputs are tangents of these inputs; or ``"vjp"``, whose
                further inputs are cotangents of the floating-point outputs.
            wrt: The inputs.
        """
        return self._once(_Product, kind, wrt)  # type: ignore[no-any-return]

    def batch(self, axes: tuple[int | None, ...]) -> _Batch:
        """Returns the call for a batch: inputs with 0 and all outputs have it as the first axis."""
        return self._once(_Batch, axes)  # type: ignore[no-any-return]

    def _once(self, kind: Any, *args: Any) -> Any:
        """Returns one object for equal arguments, because JAX compares by identity."""
        if (kind, args) not in self._made:
            self._made.setdefault((kind, args), kind(self, *args))
        return self._made[kind, args]

    def _filled(self, number: int, args: Sequence[Any]) -> list[Array]:
        """Returns arrays shaped like arguments that hold one number."""
        inputs = self.function._source.inputs.values()
        return [np.full(x.shape, number, y.dtype) for x, y in zip(args, inputs, strict=True)]

    def types(self, *args: Any) -> list[ShapedArray]:
        """Returns the types and shapes of the outputs: those that the model states.

        Sizes that it does not state are found by running it.
        """
        source = self.function._source
        self.function._feeds(self._filled(0, args), {})  # checks the shapes
        shapes = dict(zip(source.inputs, (x.shape for x in args), strict=True))
        stated = source.output_shapes(shapes)
        kinds = [input_of(value).dtype for value in source.outputs.values()]
        if None in kinds or any(shape is None or None in shape for shape in stated):
            stated, kinds = self._observed(args)
        typed = zip(self.function.outputs, stated, kinds, strict=True)
        return [ShapedArray(shape, _in_jax(name, np.dtype(kind))) for name, shape, kind in typed]

    def _observed(self, args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the shapes and types of the outputs for zeros, which those for ones must equal.

        XLA does not compute empty outputs, so the callback cannot notice that such a shape is
        wrong.
        """
        found = [_as_list(self.function(*self._filled(0, args)))]
        with contextlib.suppress(KernelError):  # ones may be invalid, as indices for example
            found.append(_as_list(self.function(*self._filled(1, args))))
        for name, zeros, other in zip(self.function.outputs, found[0], found[-1], strict=True):
            if zeros.shape != other.shape:
                raise UnsupportedError(
                    f"jax: the shape of output '{name}' depends on values of the inputs: "
                    f"{list(zeros.shape)} for zeros, {list(other.shape)} for ones; {_SHAPES}"
                )
        return [y.shape for y in found[0]], [y.dtype for y in found[0]]

    def run(self, *args: Array) -> list[Array]:
        """Computes the outputs of NumPy arrays, in types that JAX has."""
        found = zip(self.function.outputs, _as_list(self.function(*args)), strict=True)
        return [_narrowed(name, y, _in_jax(name, y.dtype)) for name, y in found]

    def transposed(self, entries: Sequence[int]) -> tuple[_Call, Sequence[int]]:
        """Returns the transpose in linear inputs, given by number, and its outputs for these."""
        raise AssertionError("not linear")


class _Product(_Call):
    """A product with the Jacobian of a call; see `_Call.product`."""

    def __init__(self, of: _Call, kind: Kind, wrt: tuple[int, ...]) -> None:
        self.of, self.kind, self.wrt = of, kind, wrt
        self._made = {}

    @functools.cached_property
    def function(self) -> Function:  # type: ignore[override]
        return self.of.function.derivative(self.kind, self.wrt)

    @property
    def linear(self) -> int:  # type: ignore[override]
        if self.kind == "jvp":
            return len(self.wrt)
        return len(self.of.function._source.float_outputs)

    def types(self, *args: Any) -> list[ShapedArray]:
        """Returns the types and shapes of the outputs: those of what is differentiated."""
        if self.kind == "vjp":
            return [ShapedArray(args[place].shape, args[place].dtype) for place in self.wrt]
        return [y for y in self.of.types(*args[: -self.linear]) if _rank(y.dtype) == 2]

    def transposed(self, entries: Sequence[int]) -> tuple[_Call, Sequence[int]]:
        """See `_Call.transposed`."""
        if self.kind == "jvp":
            wrt = tuple(self.wrt[entry] for entry in entries)
            return self.of.product("vjp", wrt), range(len(wrt))
        return self.of.product("jvp", self.wrt), entries


class _Batch(_Call):
    """A call that is mapped over a batch; see `_Call.batch`."""

    def __init__(self, of: _Call, axes: tuple[int | None, ...]) -> None:
        self.of, self.axes = of, axes
        self._made = {}

    @functools.cached_property
    def function(self) -> Function:  # type: ignore[override]
        return self.of.function.vmap(self.axes)

    @property
    def linear(self) -> int:  # type: ignore[override]
        return self.of.linear

    def types(self, *args: Any) -> list[ShapedArray]:
        """Returns the types of an entry, and shapes with the axis of the batch."""
        pairs = list(zip(args, self.axes, strict=True))
        (size,) = {x.shape[0] for x, axis in pairs if axis is not None}
        entry = [x if axis is None else ShapedArray(x.shape[1:], x.dtype) for x, axis in pairs]
        return [ShapedArray((size, *y.shape), y.dtype) for y in self.of.types(*entry)]

    def run(self, *args: Array) -> list[Array]:
        """Computes the outputs; entry by entry if sizes inside the model differ between entries.

        A gradient of a Loop needs this, for example, if entries have different trip counts.
        """
        try:
            return super().run(*args)
        except KernelError:
            pairs = list(zip(args, self.axes, strict=True))
            (size,) = {x.shape[0] for x, axis in pairs if axis is not None}
            rows = [
                self.of.run(*(x if axis is None else x[row] for x, axis in pairs))
                for row in range(size)
            ]
            return [np.stack(entries) for entries in zip(*rows, strict=True)]

    def transposed(self, entries: Sequence[int]) -> tuple[_Call, Sequence[int]]:
        """See `_Call.transposed`."""
        call, outputs = self.of.transposed(entries)
        return call.batch((*self.axes[: -self.linear], *[0] * call.linear)), outputs


def _as_list(found: Any) -> list[Array]:
    return list(found) if isinstance(found, tuple) else [found]


# ------------------------------------------------------------------------------ the primitive

_call_p = Primitive("onnx")
_call_p.multiple_results = True


def _compute(*args: Any, call: _Call) -> list[Any]:
    return [jnp.asarray(y) for y in call.run(*map(np.asarray, args))]


_call_p.def_impl(_compute)
_call_p.def_abstract_eval(lambda *args, call: call.types(*args))


def _lower(context: Any, *args: Any, call: _Call) -> Any:
    """Lowers to a call of Python: not to `jax.pure_callback`, which makes JAX arrays.

    They can wait for the thread that makes them (github.com/jax-ml/jax/issues/24255).
    """
    names, types = call.function.outputs, context.avals_out

    def callback(*arrays: Array) -> tuple[Array, ...]:
        found = call.run(*arrays)
        for name, y, known in zip(names, found, types, strict=True):
            if y.shape != known.shape:
                raise UnsupportedError(
                    f"jax: output '{name}' has shape {list(y.shape)}, but {list(known.shape)} was "
                    f"expected from the shapes of the inputs; {_SHAPES}"
                )
        return tuple(found)

    results, _, _ = mlir.emit_python_callback(
        context,
        callback,
        None,
        list(args),
        context.avals_in,
        types,
        has_side_effect=False,
        returns_token=False,
    )
    return results


mlir.register_lowering(_call_p, _lower)


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: _Call
) -> tuple[list[Any], list[Any]]:
    found = _call_p.bind(*primals, call=call)
    first = len(primals) - call.linear
    moving = [place for place, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    moving = [place for place in moving if _rank(primals[place].dtype) == 2]
    if not moving:
        return found, [_zero(y) for y in found]
    if moving[0] >= first:
        vectors = map(ad.instantiate_zeros, tangents[first:])
        return found, _call_p.bind(*primals[:first], *vectors, call=call)
    product = call.product("jvp", tuple(moving))
    products = iter(_call_p.bind(*primals, *(tangents[n] for n in moving), call=product))
    return found, [next(products) if _rank(y.dtype) == 2 else _zero(y) for y in found]


ad.primitive_jvps[_call_p] = _differentiate


def _zero(y: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def _transpose(cotangents: Sequence[Any], *args: Any, call: _Call) -> list[Any]:
    unknown = [place for place, x in enumerate(args) if ad.is_undefined_primal(x)]
    first = len(args) - call.linear
    transposed, outputs = call.transposed([place - first for place in unknown])
    vectors = map(ad.instantiate_zeros, cotangents)
    found = _call_p.bind(*args[:first], *vectors, call=transposed)
    products = {place: found[output] for place, output in zip(unknown, outputs, strict=True)}
    return [products.get(place) for place in range(len(args))]


ad.primitive_transposes[_call_p] = _transpose


def _map(
    args: Sequence[Any], axes: Sequence[int | None], *, call: _Call
) -> tuple[Sequence[Any], Sequence[int]]:
    given = list(zip(args, axes, strict=True))
    (size,) = {x.shape[axis] for x, axis in given if axis is not None}
    first = len(args) - call.linear
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in given]
    # The transpose adds no entries up, so all linear inputs have the axis.
    for place in range(first, len(args)):
        if axes[place] is None:
            moved[place] = jnp.broadcast_to(moved[place], (size, *moved[place].shape))
    mapped = [None if axis is None else 0 for axis in axes[:first]] + [0] * call.linear
    batch = call.batch(tuple(mapped))
    if size:
        found = _call_p.bind(*moved, call=batch)
    else:
        found = [jnp.zeros(y.shape, y.dtype) for y in batch.types(*moved)]
    return found, [0] * len(found)


batching.primitive_batchers[_call_p] = _map
