"""The arithmetic of Tensors, with numpy's semantics, as nodes.

Class Tensor is made of these functions, which therefore know it only by its base class.
"""

# mypy: disable-error-code="no-any-return"
# What `op` emits is a Tensor, whose type is not known yet.

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np

from ortops._common.numbers import Array
from ortops.errors import ArgumentError, ModelError
from ortops.graph.constants import numbers_of, numpy_dtype
from ortops.graph.tape import BaseOperators, BaseTensor, known_dtype

Axes: TypeAlias = int | Sequence[int] | None

_T = TypeVar("_T", bound=BaseTensor)

op: Any = BaseOperators()


def axes_of(axis: Axes) -> list[int] | None:
    """Returns axes as a list; None for all."""
    if axis is None:
        return None
    return [operator.index(axis)] if isinstance(axis, SupportsIndex) else list(axis)


def reduced(op_type: str, x: _T, axis: Axes, keepdims: bool) -> _T:
    """Reduces a Tensor over axes."""
    axes = axes_of(axis)
    empty = 1 if axes == [] else None  # no axes; by default, ONNX would reduce all
    reduce = getattr(op, op_type)
    return reduce(x, axes, keepdims=int(keepdims), noop_with_empty_axes=empty)


def total(op_type: str, given: _T, axis: Axes, keepdims: bool) -> _T:
    """Reduces a Tensor; booleans and integers as 64-bit integers."""
    x: Any = given
    dtype = numpy_dtype(x.value)
    if dtype is None or dtype.kind not in "biu":
        return reduced(op_type, x, axis, keepdims)
    total = reduced(op_type, x.astype(np.int64), axis, keepdims)
    return total.astype(np.uint64) if dtype.kind == "u" else total


def extreme(op_type: str, given: _T, axis: Axes, keepdims: bool) -> _T:
    """Returns the minimum or maximum over axes, also of booleans."""
    x: Any = given
    dtype = numpy_dtype(x.value)
    if dtype == np.bool_:
        return reduced(op_type, x.astype(np.int32), axis, keepdims).astype(np.bool_)
    return reduced(op_type, x, axis, keepdims)


def position(op_type: str, given: _T, axis: int | None, keepdims: bool) -> _T:
    """Returns the index of the minimum or maximum along an axis, or of all elements."""
    x: Any = given
    if numpy_dtype(x.value) == np.bool_:
        x = x.astype(np.int32)
    find = getattr(op, op_type)
    if axis is not None:
        return find(x, axis=axis, keepdims=int(keepdims))
    found = find(x.flatten(), axis=0, keepdims=0)
    return op.Reshape(found, [1] * x.ndim) if keepdims else found


def is_operand(given: object) -> bool:
    """Whether something can be an operand beside a Tensor."""
    return isinstance(given, BaseTensor | np.ndarray | np.generic | int | float | list | tuple)


def is_scalar(given: object) -> bool:
    """Whether something has no axes."""
    return given.shape == () if isinstance(given, BaseTensor) else np.ndim(cast(Any, given)) == 0


def comparable(x: Any, other: object) -> object:
    """Returns what a Tensor is compared with, if it is an operand."""
    if not is_operand(other):
        raise TypeError(
            f"cannot compare {x!r} with {other!r}; == and != are elementwise, for numbers, arrays "
            "and Tensors; use `is` for identity"
        )
    return other


def _alike(where: str, a: object, b: object) -> tuple[Any, Any]:
    """Converts both operands to Tensors; Python numbers get the dtype of the other operand."""
    tape = next(x.tape for x in (a, b) if isinstance(x, BaseTensor))
    own = [known_dtype(x) for x in (a, b)]
    dtype = own[0] or own[1]

    def tensor(x: object, known: np.dtype[Any] | None) -> Any:
        if isinstance(x, BaseTensor):
            return x
        return tape.constant(cast(Array, x) if known is not None else numbers_of(x, dtype, where))

    first, second = tensor(a, own[0]), tensor(b, own[1])
    # `is`, because numpy's float64 equals None.
    if own[0] is not None and own[1] is not None and own[0] != own[1]:
        raise ModelError(
            f"{where}: {first!r} and {second!r} have different types; cast one with .astype"
        )
    return first, second


def _kind(x: Any) -> str:
    """Returns numpy's code for the kind of a dtype; "f" if the dtype is unknown."""
    dtype = numpy_dtype(x.value)
    return "f" if dtype is None else dtype.kind


def divide(a: object, b: object) -> Any:
    """Returns a / b."""
    kinds = {_kind(x) for x in (a, b) if isinstance(x, BaseTensor)}
    if kinds & set("biu"):
        raise ModelError(
            f"/: cannot divide {a!r} by {b!r}, because an integer dtype cannot represent the "
            "quotient; use //, op.Div, which rounds towards zero, or .astype(np.float32)"
        )
    return op.Div(a, b)


def floor_divide(a: object, b: object) -> Any:
    """Returns a // b."""
    x, y = _alike("//", a, b)
    if _kind(x) == "u":
        return op.Div(x, y)
    if _kind(x) == "i":  # Div rounds towards zero
        quotient = op.Div(x, y)
        below = (quotient * y != x) & ((x < 0) != (y < 0))
        return quotient - below.astype(x.dtype)
    rest = op.Mod(x, y, fmod=1)
    exact = (x - rest) / y - _has_other_sign(rest, y).astype(x.dtype)
    whole = op.Floor(exact)  # as in numpy: the quotient is an integer up to rounding
    whole = whole + (exact - whole > 0.5).astype(x.dtype)
    return op.Where(y == 0, op.Floor(x / y), whole)


def remainder(a: object, b: object) -> Any:
    """Returns a % b."""
    x, y = _alike("%", a, b)
    if _kind(x) in "iu":
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y), rest + y, rest)


def _has_other_sign(rest: Any, divisor: Any) -> Any:
    """Whether a remainder is nonzero and differs in sign from the divisor."""
    return (rest != 0) & ((rest < 0) != (divisor < 0))


def power(a: object, b: object) -> Any:
    """Returns a ** b."""
    if isinstance(a, BaseTensor) and _kind(a) not in "biu":
        return op.Pow(a, b)  # the exponent may have another type
    base, exponent = _alike("**", a, b)
    if _kind(base) == "i" and exponent.constant is not None and (exponent.constant < 0).any():
        raise ModelError(
            f"**: the exponent of integers must be >= 0, got {base!r} ** {b!r}; cast the base with "
            ".astype(np.float32)"
        )
    return op.Pow(base, exponent)


def is_boolean(symbol: str, x: Any) -> bool:
    """Whether a Tensor is boolean rather than integer.

    Raises:
        ModelError: If it is neither.
    """
    if x.dtype.kind not in "biu":
        raise ModelError(f"{symbol} requires booleans or integers, got {x!r}; compare or cast it")
    return x.dtype.kind == "b"


def product(a: Any, b: Any) -> Any:
    """Emits a product; one of a computed matrix and a vector in the form of `graph.faults`."""
    is_tensor = isinstance(a, BaseTensor)
    is_computed = is_tensor and a.constant is None and a.value.producer() is not None
    if is_computed and _known_rank(a) > 1 and _known_rank(b) == 1:
        return op.MatMul(b, a.mT)
    return op.MatMul(a, b)


def _known_rank(x: Any) -> int:
    return np.ndim(x) if not isinstance(x, BaseTensor) else 0 if x.shape is None else x.ndim


def bitwise(symbol: str, op_type: str, a: object, b: object) -> Any:
    """Combines booleans, or the bits of integers."""
    x, y = _alike(symbol, a, b)
    combine = getattr(op, op_type if is_boolean(symbol, x) else f"Bitwise{op_type}")
    return combine(x, y)


def shift(symbol: str, direction: str, a: object, b: object) -> Any:
    """Shifts the bits of unsigned integers."""
    x, count = _alike(symbol, a, b)
    if _kind(x) != "u":
        raise ModelError(
            f"{symbol} requires unsigned integers, got {x!r}; cast it with .astype(np.uint64), or "
            "use * and // with a power of two"
        )
    width = 8 * x.dtype.itemsize
    shifted = op.BitShift(x, count, direction=direction)
    if count.constant is not None and (count.constant < width).all():
        return shifted
    masks = np.array([0, np.iinfo(x.dtype).max], x.dtype)  # C leaves larger shifts undefined
    return op.BitwiseAnd(shifted, op.Gather(masks, (count < width).astype(np.int64)))


def index(given: _T, key: tuple[object, ...]) -> _T:
    """Indexes with integers, slices, None, ``...``, and at most one Tensor or array."""
    x: Any = given
    used = sum(part is not None and part is not Ellipsis for part in key)
    slices: list[tuple[object, object, int, int]] = []  # start, end, axis and step
    dropped: list[int] = []
    added: list[int] = []
    chosen: list[tuple[int, Any]] = []
    vectors = 0
    axis = position = 0
    for number, part in enumerate(key, 1):
        if part is None:
            added.append(position)
            position += 1
            continue
        if isinstance(part, EllipsisType):
            if number < len(key):
                skipped = x.ndim - used
                axis, position = axis + skipped, position + skipped
            continue
        if isinstance(part, slice):
            if not (part.start is None and part.stop is None and part.step in (None, 1)):
                slices.append(_bounds(part, axis))
            position += 1
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            _check_range(x, np.asarray(part), axis)
            slices.append((int(part), int(part) + 1 if part != -1 else _END, axis, 1))
            dropped.append(axis)
        else:
            indices = _indices(x, part)
            if indices.constant is not None:
                _check_range(x, indices.constant, axis)
            if indices.ndim == 0:
                dropped.append(axis)
                indices = op.Reshape(indices, [1])
            else:
                vectors += 1
                position += indices.ndim
            chosen.append((axis, indices))
        axis += 1
    if vectors > 1 or (vectors and dropped):
        raise TypeError(
            f"{x!r}: index {key!r}: an array cannot be combined with other arrays or integers; use "
            "op.GatherND"
        )
    if slices:
        x = op.Slice(x, *map(list, zip(*slices, strict=True)))
    for place, indices in chosen:
        x = op.Gather(x, indices, axis=place)
    if dropped:
        x = op.Squeeze(x, dropped)
    return op.Unsqueeze(x, added) if added else x


def _check_range(x: Any, indices: Array, axis: int) -> None:
    """Raises an ArgumentError if an index is out of range for an axis."""
    if x.shape is None:
        return
    if axis >= len(x.shape):
        raise ArgumentError(f"{x!r}: there are more indices than its {len(x.shape)} dimensions")
    size = x.shape[axis]
    if not isinstance(size, int):
        return
    wrong = indices[(indices < -size) | (indices >= size)]
    if len(wrong):
        raise ArgumentError(
            f"{x!r}: index {wrong[0]} is out of range for a dimension of {size} (axis {axis})"
        )


_END = int(np.iinfo(np.int64).max)


def _bounds(part: slice, axis: int) -> tuple[object, object, int, int]:
    """Returns the arguments of Slice for a slice of an axis: start, end, axis and step."""
    step = 1 if part.step is None else part.step
    first, last = (0, _END) if step > 0 else (_END, -_END)
    start = first if part.start is None else part.start
    return start, last if part.stop is None else part.stop, axis, step


def _indices(x: Any, part: Any) -> Any:
    """Converts an index of integers to a Tensor of int64."""
    if isinstance(part, list | np.ndarray | np.generic | bool):
        part = np.asarray(part)
        part = x.tape.constant(part.astype(np.int64) if part.size == 0 else part)
    if not isinstance(part, BaseTensor):
        raise TypeError(
            f"{x!r}: index must be integers, slices, None, or an array or Tensor of integers, got "
            f"{part!r}; or use op.Gather"
        )
    if part.dtype == np.bool_:
        raise TypeError(
            f"{x!r}: index {part!r} is boolean, so the size of the result is unknown while the "
            "graph is built; use op.Where, or op.Compress"
        )
    if part.dtype.kind not in "iu":
        raise TypeError(
            f"{x!r}: index must have an integer dtype, got {part!r}; cast it with .astype(np.int64)"
        )
    return cast(Any, part).astype(np.int64)
