"""Tensor and op: Python arithmetic that emits ONNX nodes on a tape.

A `Tape` inserts nodes at a position of a graph. ``op.<Operator>(...)`` and the arithmetic of
`Tensor` emit standard ONNX nodes on it, and infer their types and shapes immediately. Gradient
rules, losses, optimizers and whole models are written with them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, SupportsIndex, cast, overload

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.arithmetic import (
    Axes,
    axes_of,
    bitwise,
    comparable,
    divide,
    extreme,
    floor_divide,
    index,
    is_boolean,
    is_operand,
    is_scalar,
    position,
    power,
    product,
    reduced,
    remainder,
    shift,
    total,
)
from ortops.graph.constants import numpy_dtype
from ortops.graph.tape import BaseOperators, BaseTape, BaseTensor

_NO_VALUE = "has no value while the graph is built"
_NO_CONTENT = "the model in a session, because a Tensor has no value while the graph is built"

_INSTEAD = {
    "all": ".min() of booleans",
    "any": ".max() of booleans",
    "dot": "@",
    "item": _NO_CONTENT,
    "numpy": _NO_CONTENT,
    "permute": "op.Transpose(x, perm=[...])",
    "to": ".astype(dtype)",
    "tolist": _NO_CONTENT,
    "transpose": ".T, .mT, or op.Transpose(x, perm=[...])",
    "view": ".reshape(shape)",
}
"""Replacements for methods that arrays of other libraries have."""


def _methods_of(
    function: Callable[[Any, Any], Any],
) -> tuple[Callable[[Tensor, object], Tensor], Callable[[Tensor, object], Tensor]]:
    """Returns the methods of a binary operator: for a Tensor on the left, and on the right."""

    def forward(self: Tensor, other: object) -> Tensor:
        return function(self, other) if is_operand(other) else cast(Tensor, NotImplemented)

    def reflected(self: Tensor, other: object) -> Tensor:
        return function(other, self) if is_operand(other) else cast(Tensor, NotImplemented)

    return forward, reflected


class Tensor(BaseTensor):
    """A value of an ONNX graph under construction.

    Arithmetic emits nodes on its tape, with numpy's semantics and the operators of the Python array
    API. Comparisons are elementwise; use ``is`` for identity. Python numbers are converted to the
    Tensor's dtype, which must be able to represent them. Tensors and arrays of different dtypes
    cannot be mixed: cast with `astype`.

    Args:
        tape: The tape for new nodes.
        value: The value in the graph.

    Example:
        >>> with Tape() as tape:
        ...     x = tape.input("x", np.float32, ["batch", 3])
        ...     positive = (x > 0) & (x != 1)
        ...     y = x.sum(axis=1) / positive.sum(axis=1).astype(np.float32)
        >>> y
        Tensor('Div_output', float32, [batch])
    """

    __slots__ = ()
    tape: Tape
    __array_ufunc__ = None  # makes numpy_array * tensor call Tensor.__rmul__

    @property
    def T(self) -> Tensor:  # noqa: N802 - its name in the array API
        """The transpose of a matrix.

        Raises:
            ModelError: If the rank is not 2, or unknown.
        """
        if self.ndim != 2:
            raise ModelError(
                f"{self!r}: .T requires rank 2, got rank {self.ndim}; use .mT or op.Transpose"
            )
        return op.Transpose(self, perm=[1, 0])

    @property
    def mT(self) -> Tensor:  # noqa: N802 - its name in the array API
        """The transpose of the last two axes.

        Raises:
            ModelError: If the rank is less than 2, or unknown.
        """
        if self.ndim < 2:
            raise ModelError(f"{self!r}: .mT requires rank >= 2, got rank {self.ndim}")
        axes = list(range(self.ndim))
        return op.Transpose(self, perm=[*axes[:-2], axes[-1], axes[-2]])

    def astype(self, dtype: npt.DTypeLike) -> Tensor:
        """Casts the tensor to a dtype."""
        wanted = ir.DataType.from_numpy(np.dtype(dtype))
        return self if self.value.dtype == wanted else op.Cast(self, to=wanted)

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Sums over axes, all by default.

        Args:
            axis: An axis or several, negative ones from the end.
            keepdims: Whether to keep them, with size 1.

        Returns:
            The sums, of the Tensor's dtype; int64 for booleans and integers, uint64 for unsigned
            integers.
        """
        return total("ReduceSum", self, axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Multiplies over axes; see `sum`."""
        return total("ReduceProd", self, axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Averages over axes; see `sum`.

        Raises:
            ModelError: If the dtype is not floating-point.
        """
        dtype = numpy_dtype(self.value)
        if dtype is not None and dtype.kind in "biu":
            raise ModelError(
                f"{self!r}: mean requires a floating-point dtype; cast with .astype(np.float32)"
            )
        return reduced("ReduceMean", self, axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Returns the maximum over axes; for booleans, whether any is true. See `sum`."""
        return extreme("ReduceMax", self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Returns the minimum over axes; for booleans, whether all are true. See `sum`."""
        return extreme("ReduceMin", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Returns the index (int64) of the first maximum along an axis, or of all elements."""
        return position("ArgMax", self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Returns the index (int64) of the first minimum along an axis, or of all elements."""
        return position("ArgMin", self, axis, keepdims)

    def clip(self, min: object = None, max: object = None) -> Tensor:  # noqa: A002 - as in numpy
        """Limits the elements to a range.

        Args:
            min: The minimum: a number, array or Tensor; None for no limit.
            max: The maximum: a number, array or Tensor; None for no limit.
        """
        if all(x is None or is_scalar(x) for x in (min, max)):
            return self if min is max is None else op.Clip(self, min, max)
        result = self if min is None else op.Max(self, min)
        return result if max is None else op.Min(result, max)

    def reshape(self, *shape: object) -> Tensor:
        """Returns the elements in a different shape.

        Args:
            *shape: The sizes: integers or scalar Tensors of int64, of which one may be -1 to be
                inferred; or a sequence of them, or a vector of int64. Unlike in ``op.Reshape``, 0
                is a size.

        Raises:
            ModelError: If the shape contains -1 and 0, so that -1 cannot be inferred.
        """
        whole = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if isinstance(whole, Tensor) and numpy_dtype(whole.value) != np.int64:
            raise ModelError(
                f"{self!r}: the shape must be int64, got {whole!r}; cast it with .astype(np.int64)"
            )
        if isinstance(whole, Tensor) and whole.shape == ():
            whole = (whole,)
        if isinstance(whole, Tensor):
            return op.Reshape(self, whole, allowzero=1)
        if isinstance(whole, SupportsIndex):
            whole = (whole,)
        sizes = [
            size if isinstance(size, Tensor) else operator.index(cast(SupportsIndex, size))
            for size in cast(Sequence[object], whole)
        ]
        known = [size for size in sizes if isinstance(size, int)]
        if 0 in known and -1 in known:
            raise ModelError(f"{self!r}: cannot infer -1 in the shape {sizes}, which contains 0")
        zeros = 0 in known or len(known) < len(sizes)
        return op.Reshape(self, sizes, allowzero=1 if zeros else None)

    def flatten(self) -> Tensor:
        """Returns the elements as a 1-d tensor."""
        return op.Reshape(self, [-1])

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Removes axes of size 1, all of them by default.

        Raises:
            ModelError: If no axis is given and the shape is not static.
        """
        if axis is None and (
            self.shape is None or not all(isinstance(dim, int) for dim in self.shape)
        ):
            raise ModelError(f"{self!r}: its shape is not static; name the axes to remove in axis=")
        return op.Squeeze(self, axes_of(axis))

    def __array_namespace__(self, api_version: str | None = None) -> type[ArrayNamespace]:
        """Returns the array API functions, as the array API standard requires."""
        return ArrayNamespace

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value while the graph is built; use op.Where, & | ~ instead "
            "of and, or, not, and `is` for identity"
        )

    def __float__(self) -> float:
        raise TypeError(f"{self!r} {_NO_VALUE}; use .astype(np.float32)")

    def __int__(self) -> int:
        raise TypeError(f"{self!r} {_NO_VALUE}; use .astype(np.int64)")

    def __index__(self) -> int:
        raise TypeError(f"{self!r} {_NO_VALUE}; use it in op.<Operator>, or to index a Tensor")

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError(f"{self!r} {_NO_VALUE}; use its methods, or op.<Operator>")

    def __len__(self) -> int:
        raise TypeError(f"{self!r} has no len(); use .shape[0], or op.Shape(x)[0] where it varies")

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r} is not iterable; index it, or use op.Split")

    def __contains__(self, item: object) -> bool:
        raise TypeError(f"`in {self!r}` {_NO_VALUE}; use (x == item).max()")

    def __getitem__(self, key: object) -> Tensor:
        return index(self, key if isinstance(key, tuple) else (key,))

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError(f"{self!r} cannot be changed; use op.Where or op.ScatterND")

    if not TYPE_CHECKING:  # otherwise mypy would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            instead = _INSTEAD.get(name, "op.<Operator>")
            raise AttributeError(f"Tensor has no attribute '{name}'; use {instead}")

    __hash__ = object.__hash__  # == is elementwise

    def __pos__(self) -> Tensor:
        return self

    def __neg__(self) -> Tensor:
        return op.Neg(self)

    def __abs__(self) -> Tensor:
        return op.Abs(self)

    def __invert__(self) -> Tensor:
        return op.Not(self) if is_boolean("~", self) else op.BitwiseNot(self)

    # Lambdas, because `op` is defined further down.
    __add__, __radd__ = _methods_of(lambda a, b: op.Add(a, b))
    __sub__, __rsub__ = _methods_of(lambda a, b: op.Sub(a, b))
    __mul__, __rmul__ = _methods_of(lambda a, b: op.Mul(a, b))
    __truediv__, __rtruediv__ = _methods_of(divide)
    __floordiv__, __rfloordiv__ = _methods_of(floor_divide)
    __mod__, __rmod__ = _methods_of(remainder)
    __pow__, __rpow__ = _methods_of(power)
    __matmul__, __rmatmul__ = _methods_of(product)
    __and__, __rand__ = _methods_of(lambda a, b: bitwise("&", "And", a, b))
    __or__, __ror__ = _methods_of(lambda a, b: bitwise("|", "Or", a, b))
    __xor__, __rxor__ = _methods_of(lambda a, b: bitwise("^", "Xor", a, b))
    __lshift__, __rlshift__ = _methods_of(lambda a, b: shift("<<", "LEFT", a, b))
    __rshift__, __rrshift__ = _methods_of(lambda a, b: shift(">>", "RIGHT", a, b))
    __lt__ = _methods_of(lambda a, b: op.Less(a, b))[0]
    __le__ = _methods_of(lambda a, b: op.LessOrEqual(a, b))[0]
    __gt__ = _methods_of(lambda a, b: op.Greater(a, b))[0]
    __ge__ = _methods_of(lambda a, b: op.GreaterOrEqual(a, b))[0]

    def __divmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return op.Equal(self, comparable(self, other))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return op.Not(op.Equal(self, comparable(self, other)))


class Tape(BaseTape[Tensor]):
    """Inserts new nodes into a graph.

    In its ``with`` block, operators also work if none of their inputs is a Tensor.

    Args:
        graph: The graph; a new one by default.
        before: The node before which to insert; by default, nodes are appended.
        names: The names already used; by default, those in the graph.
        name: The name of a new graph.
        opset: The version of the default operator set of a new graph.

    Example:
        >>> with Tape(name="half") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 3])
        ...     y = tape.output(x * 0.5, "y")
        >>> [node.op_type for node in tape.model().graph.node]
        ['Constant', 'Mul']
    """

    def tensor(self, value: ir.Value) -> Tensor:
        """Returns the Tensor for a value of the graph."""
        return Tensor(self, value)


class _Emit(Protocol):
    """Emits a node that has one output by default."""

    @overload
    def __call__(
        self,
        *inputs: object,
        outputs: Literal[1] | None = ...,
        domain: str = ...,
        **attributes: Any,
    ) -> Tensor: ...
    @overload
    def __call__(
        self, *inputs: object, outputs: int, domain: str = ..., **attributes: Any
    ) -> tuple[Tensor, ...]: ...


class _Several(Protocol):
    """Emits a node with several outputs."""

    def __call__(
        self, *inputs: object, outputs: int | None = ..., domain: str = ..., **attributes: Any
    ) -> tuple[Tensor, ...]: ...


class _Operators(BaseOperators):
    """``op.<Operator>(*inputs, **attributes)`` emits one ONNX node.

    Inputs are Tensors, numpy arrays, Python scalars and lists (converted to constants of the type
    that the operator requires), or None for an absent input. Attributes are keyword arguments;
    ``outputs`` sets the number of outputs, and ``domain`` the operator set. The result is a Tensor,
    or a tuple of Tensors for several outputs.

    Example:
        >>> with Tape() as tape:
        ...     x = tape.input("x", np.float32, ["N", 4])
        ...     values, indices = op.TopK(x, [2])
        >>> values.shape, indices.dtype
        (('N', 2), dtype('int64'))
    """

    DynamicQuantizeLinear: _Several
    Split: _Several
    TopK: _Several

    if TYPE_CHECKING:

        def __getattr__(self, op_type: str) -> _Emit: ...


op: _Operators = _Operators()


class ArrayNamespace:
    """The subset of the Python array API that update rules and losses need, for Tensors."""

    pi = math.pi
    inf = math.inf
    nan = math.nan
    bool = np.dtype(np.bool_)
    float16 = np.dtype(np.float16)
    float32 = np.dtype(np.float32)
    float64 = np.dtype(np.float64)
    int32 = np.dtype(np.int32)
    int64 = np.dtype(np.int64)

    @staticmethod
    def where(condition: Tensor, a: object, b: object) -> Tensor:
        """Selects elements of ``a`` where the condition is true, else of ``b``."""
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = np.asarray(a)  # two Python floats result in float64, as in numpy
        return op.Where(condition, a, b)

    @staticmethod
    def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
        """Concatenates tensors along an axis; flattens them first if it is None."""
        if axis is None:
            arrays, axis = [x.flatten() for x in arrays], 0
        return op.Concat(*arrays, axis=axis)

    @staticmethod
    def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
        """Stacks tensors along a new axis."""
        return op.Concat(*(op.Unsqueeze(x, [axis]) for x in arrays), axis=axis)

    @staticmethod
    def expand_dims(x: Tensor, /, *, axis: int = 0) -> Tensor:
        """Adds an axis of size 1."""
        return op.Unsqueeze(x, [axis])

    @staticmethod
    def permute_dims(x: Tensor, /, axes: Sequence[int]) -> Tensor:
        """Permutes the axes."""
        return op.Transpose(x, perm=axes)

    @staticmethod
    def reshape(x: Tensor, /, shape: Sequence[int] | Tensor) -> Tensor:
        """Returns the elements in a different shape; see `Tensor.reshape`."""
        return x.reshape(shape)

    @staticmethod
    def take(x: object, indices: Tensor, /, *, axis: int) -> Tensor:
        """Returns the elements of a Tensor or an array at the given indices along an axis."""
        return op.Gather(x, indices, axis=axis)

    @staticmethod
    def square(x: Tensor, /) -> Tensor:
        """Returns the squares."""
        return op.Mul(x, x)

    @staticmethod
    def zeros_like(x: Tensor) -> Tensor:
        """Returns zeros."""
        return zeros_like(x)

    @staticmethod
    def ones_like(x: Tensor) -> Tensor:
        """Returns ones."""
        return ones_like(x)

    astype = staticmethod(Tensor.astype)
    sum = staticmethod(Tensor.sum)
    prod = staticmethod(Tensor.prod)
    mean = staticmethod(Tensor.mean)
    max = staticmethod(Tensor.max)
    min = staticmethod(Tensor.min)
    argmax = staticmethod(Tensor.argmax)
    argmin = staticmethod(Tensor.argmin)
    clip = staticmethod(Tensor.clip)
    squeeze = staticmethod(Tensor.squeeze)

    abs = staticmethod(op.Abs)
    ceil = staticmethod(op.Ceil)
    cos = staticmethod(op.Cos)
    exp = staticmethod(op.Exp)
    floor = staticmethod(op.Floor)
    isnan = staticmethod(op.IsNaN)
    isinf = staticmethod(op.IsInf)
    log = staticmethod(op.Log)
    logical_and = staticmethod(op.And)
    logical_not = staticmethod(op.Not)
    logical_or = staticmethod(op.Or)
    matmul = staticmethod(product)
    maximum = staticmethod(op.Max)
    minimum = staticmethod(op.Min)
    round = staticmethod(op.Round)
    sign = staticmethod(op.Sign)
    sin = staticmethod(op.Sin)
    sqrt = staticmethod(op.Sqrt)
    tanh = staticmethod(op.Tanh)

    add = staticmethod(operator.add)
    divide = staticmethod(operator.truediv)
    equal = staticmethod(operator.eq)
    floor_divide = staticmethod(operator.floordiv)
    greater = staticmethod(operator.gt)
    greater_equal = staticmethod(operator.ge)
    less = staticmethod(operator.lt)
    less_equal = staticmethod(operator.le)
    multiply = staticmethod(operator.mul)
    not_equal = staticmethod(operator.ne)
    pow = staticmethod(operator.pow)
    remainder = staticmethod(operator.mod)
    subtract = staticmethod(operator.sub)


def shape_of(x: Tensor) -> Tensor:
    """Returns the shape as a vector of int64: a constant if it is static, else a Shape node."""
    shape = x.shape
    if shape is not None and all(isinstance(dim, int) for dim in shape):
        return x.tape.constant(np.array(shape, np.int64))
    return op.Shape(x)


def zeros_like(x: Tensor) -> Tensor:
    """Returns zeros of the shape and dtype of ``x``."""
    return _filled_like(x, 0)


def ones_like(x: Tensor) -> Tensor:
    """Returns ones of the shape and dtype of ``x``."""
    return _filled_like(x, 1)


def _filled_like(x: Tensor, number: int) -> Tensor:
    if numpy_dtype(x.value) is None:  # the output of an operator that onnx does not know
        filled = op.ConstantOfShape(shape_of(x), value=np.array([number], np.float32))
        return op.CastLike(filled, x).with_shape_of(x)
    if x.shape == ():
        return x.tape.constant(np.array(number, x.dtype))
    value = np.array([number], x.dtype)
    return op.ConstantOfShape(shape_of(x), value=value).with_shape_of(x)
