"""Batching rules: how operators are applied to all entries along a new first axis at once.

A rule is a formula. It gets ``again``, which emits the operator once more, and the operator's
inputs. Mapped inputs have the new axis in front. The rules of a network of matrix products,
convolutions, normalizations and elementwise operators need no loop. See `ortops.derivatives.vmap`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import attribute_values
from ortops.graph.operators import ELEMENTWISE, having
from ortops.graph.tensor import Tape, Tensor, op

Function: TypeAlias = Callable[..., Any]
_F = TypeVar("_F", bound=Function)


@dataclass(frozen=True)
class Same:
    """A result that is the same for all entries, without the axis."""

    tensor: Tensor


@dataclass(frozen=True)
class Rule:
    """A batching rule.

    Attributes:
        function: ``(again, *inputs, **attributes)`` → the output or a tuple of outputs, each a
            Tensor with the axis in front, or `Same`; None if the rule does not support the node.
            Inputs are None if absent. Without ``at``, the second argument is a list of booleans:
            which inputs are mapped.
        attributes: The names of the attributes that the function reads.
        at: The inputs that have the axis. The rule applies if all mapped inputs are among them;
            those that are not mapped are repeated. ``"all"`` for all inputs, None for those that
            are mapped.
    """

    function: Function
    attributes: frozenset[str]
    at: Sequence[int] | str | None


RULES: dict[str, list[Rule]] = {}
"""The rules of the operators of the standard domain; the first that supports a node is applied."""


def rule(*op_types: str, at: Sequence[int] | str | None = None) -> Callable[[_F], _F]:
    """Registers a batching rule of one or more operators; see `Rule`."""

    def register(function: _F) -> _F:
        parameters = inspect.signature(function).parameters.values()
        names = frozenset(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        for op_type in op_types:
            RULES.setdefault(op_type, []).append(Rule(function, names, at))
        return function

    return register


def rules_of(node: ir.Node) -> Sequence[Rule]:
    """Returns the rules of a node's operator."""
    return RULES.get(node.op_type, ()) if node.domain == "" else ()


def is_supported(node: ir.Node, mapped: Collection[int]) -> bool:
    """Whether a node's operator has a rule for mapped inputs at these places."""
    known = (each.at for each in rules_of(node))
    return any(at is None or isinstance(at, str) or {*mapped} <= {*at} for at in known)


def apply(
    tape: Tape, node: ir.Node, inputs: Sequence[Tensor | None], mapped: Sequence[bool], size: Tensor
) -> Sequence[Tensor | Same] | None:
    """Applies the first batching rule that supports a node.

    Args:
        tape: Receives the nodes.
        node: The node, whose values are entries.
        inputs: Its inputs, those that are mapped with the axis in front.
        mapped: Which inputs are mapped.
        size: The length of the axis, an int64 vector of one element.

    Returns:
        The outputs, or None if there is no such rule.
    """
    if any(each is not None and each.shape is None for each in inputs):
        return None
    attributes = attribute_values(node)
    for each in rules_of(node):
        arguments = _arguments(each, inputs, mapped, size)
        if arguments is None:
            continue
        given = {name: attributes[name] for name in each.attributes & attributes.keys()}
        found = each.function(_Again(tape, node, attributes), *arguments, **given)
        results = found if isinstance(found, tuple) else (found,)
        if found is not None and not any(value.name for value in node.outputs[len(results) :]):
            return results
    return None


def expand_axis(x: Tensor, size: Tensor) -> Tensor:
    """Returns an array for each entry, all equal to ``x``."""
    return op.Expand(x, op.Concat(size, np.ones(x.ndim, np.int64), axis=0))


def _arguments(
    each: Rule, inputs: Sequence[Tensor | None], mapped: Sequence[bool], size: Tensor
) -> list[Any] | None:
    """Returns the arguments of a rule, or None if it does not support these mapped inputs."""
    if each.at is None:
        return [list(mapped), *inputs]
    places = range(len(inputs)) if isinstance(each.at, str) else each.at
    if any(is_mapped and place not in places for place, is_mapped in enumerate(mapped)):
        return None
    found: list[Any] = list(inputs)
    for place in places:
        x = found[place] if place < len(found) else None
        if x is not None and not mapped[place]:
            found[place] = expand_axis(x, size)
    return found


@dataclass(frozen=True)
class _Again:
    """Emits the operator of a node once more, with other inputs and attributes."""

    tape: Tape
    node: ir.Node
    attributes: dict[str, Any]

    def __call__(self, *inputs: Any, **attributes: Any) -> Any:
        """Returns the output, or a tuple of several; absent inputs at the end are left out."""
        while inputs and inputs[-1] is None:
            inputs = inputs[:-1]
        found = self.tape.emit(
            self.node.op_type,
            inputs,
            {**self.attributes, **attributes},
            outputs=len(self.node.outputs),
        )
        return found[0] if len(found) == 1 else found


# ---------------------------------------------------------------------------------------- layouts


def _inner(axis: int) -> int:
    """Returns the axis of all entries for an axis of one."""
    return axis + 1 if axis >= 0 else axis


def _inner_axes(axes: Tensor) -> Any:
    """Returns the axes of all entries for axes of one, given as an input."""
    known = axes.constant
    if known is not None:
        return np.where(known >= 0, known + 1, known).astype(known.dtype)
    return op.Where(axes >= 0, axes + 1, axes)


def _sizes(x: Tensor, start: int = 0, end: int | None = None) -> list[int] | Tensor:
    """Returns sizes of a tensor: numbers if all of them are known, else a vector."""
    if x.shape is None:
        return op.Shape(x, start=start, end=end)
    dims = x.shape[start:end]
    known = [dim for dim in dims if isinstance(dim, int)]
    return known if len(known) == len(dims) else op.Shape(x, start=start, end=end)


def _merged(x: Tensor, start: int = 0, end: int | None = None) -> list[int] | Tensor:
    """Returns the product of sizes, in the form of `_sizes`."""
    sizes = _sizes(x, start, end)
    return op.ReduceProd(sizes, keepdims=1) if isinstance(sizes, Tensor) else [int(np.prod(sizes))]


def _reshape(x: Tensor, *parts: list[int] | Tensor) -> Tensor:
    """Reshapes a tensor to the concatenation of sizes, in the form of `_sizes`."""
    numbers = [size for part in parts if not isinstance(part, Tensor) for size in part]
    unknown = [part.shape for part in parts if isinstance(part, Tensor)]
    if not unknown or (unknown == [(1,)] and 0 not in numbers):
        sizes = [size for part in parts for size in ([-1] if isinstance(part, Tensor) else part)]
        return op.Reshape(x, np.array(sizes, np.int64), allowzero=int(not unknown))
    vectors = [p if isinstance(p, Tensor) else np.array(p, np.int64) for p in parts]
    return op.Reshape(x, op.Concat(*vectors, axis=0), allowzero=1)


def _fold(x: Tensor) -> Tensor:
    """Merges the new axis with the first axis of each entry."""
    return _reshape(x, _merged(x, 0, 2), _sizes(x, 2))


def _unfold(y: Tensor, x: Tensor) -> Tensor:
    """Splits the first axis like the first two axes of ``x``."""
    return _reshape(y, _sizes(x, 0, 1), _sizes(x, 1, 2), _sizes(y, 1))


def moved(x: Tensor, axis: int, place: int = 0) -> Tensor:
    """Moves one axis."""
    if axis == place:
        return x
    perm = [other for other in range(x.ndim) if other != axis]
    return op.Transpose(x, perm=[*perm[:place], axis, *perm[place:]])


def _aligned(mapped: Sequence[bool], inputs: Sequence[Tensor | None], rank: int = 0) -> list[Any]:
    """Gives mapped inputs axes of size 1 after the new axis, so that all inputs broadcast.

    Args:
        mapped: Which inputs are mapped.
        inputs: The inputs.
        rank: The least rank of an entry of the result.
    """
    present = [(x, is_mapped) for x, is_mapped in zip(inputs, mapped, strict=True) if x is not None]
    rank = max([rank, *(x.ndim - is_mapped for x, is_mapped in present)])
    found: list[Any] = []
    for x, is_mapped in zip(inputs, mapped, strict=True):
        missing = 0 if x is None or not is_mapped else rank + 1 - x.ndim
        found.append(op.Unsqueeze(x, list(range(1, 1 + missing))) if missing else x)
    return found


# ------------------------------------------------------------------------------------ elementwise


@rule(
    *sorted(ELEMENTWISE - having("broadcasts") - {"CastLike", "SwiGLU"}),
    *("Bernoulli", "Det", "Dropout", "RandomNormalLike", "RandomUniformLike", "Trilu"),
    at=(0,),
)
def _each_element(again: Any, *inputs: Any) -> Any:
    return again(*inputs)


@rule(*sorted(having("broadcasts")))
def _broadcast(again: Any, mapped: list[bool], *inputs: Any) -> Any:
    return again(*_aligned(mapped, inputs))


@rule("Clip")
def _clip(again: Any, mapped: list[bool], x: Any, low: Any = None, high: Any = None) -> Any:
    mapped = [*mapped, False, False][:3]
    x, low, high = _aligned(mapped, [x, low, high])
    x = x if low is None else op.Max(x, low)
    return x if high is None else op.Min(x, high)


@rule("PRelu", at=(0, 1))
def _prelu_of_slopes(again: Any, x: Any, slope: Any) -> Any:
    return again(*_aligned([True, True], [x, slope]))


@rule("CastLike")
def _cast_like(again: Any, mapped: list[bool], x: Any, like: Any) -> Any:
    return again(x, like) if mapped[0] else Same(again(x, like))


@rule("DequantizeLinear", "QuantizeLinear", at=(0,))
def _quantize(again: Any, x: Any, scale: Any, zero: Any = None, *, axis: int = 1) -> Any:
    if scale.ndim > 1:  # one scale per block
        return None
    return again(x, scale, zero, axis=_inner(axis) if scale.ndim else axis)


# ---------------------------------------------------------------------------------------- products


@rule("MatMul")
def _matmul(again: Any, mapped: list[bool], a: Any, b: Any) -> Any:
    rank_a, rank_b = a.ndim - mapped[0], b.ndim - mapped[1]
    if rank_a == 1 and rank_b == 2 and not mapped[1]:
        return op.MatMul(a, b)
    if rank_a == 2 and rank_b == 1 and not mapped[0]:
        return op.MatMul(b, op.Transpose(a, perm=[1, 0]))
    if rank_a == 1:
        a = op.Unsqueeze(a, [-2])
    if rank_b == 1:
        b = op.Unsqueeze(b, [-1])
    y = op.MatMul(*_aligned(mapped, [a, b], rank=2))
    ones = [axis for axis, rank in ((-2, rank_a), (-1, rank_b)) if rank == 1]
    return op.Squeeze(y, ones) if ones else y


@rule("Gemm")
def _gemm(
    again: Any,
    mapped: list[bool],
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    a, b = (_swapped(a) if transA else a), (_swapped(b) if transB else b)
    y = op.MatMul(a, b) if alpha == 1 else op.MatMul(a, b) * alpha
    if c is None:
        return y if any(mapped[:2]) else None
    (c,) = _aligned(mapped[2:], [c], rank=2)
    return y + (c if beta == 1 else c * beta)


def _swapped(x: Tensor) -> Tensor:
    """Swaps the last two axes."""
    return op.Transpose(x, perm=[*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])


@rule("Einsum")
def _einsum(again: Any, mapped: list[bool], *inputs: Any, equation: Any = "") -> Any:
    text = equation.decode() if isinstance(equation, bytes) else equation
    read, arrow, written = text.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(read) - set(",.") if read.count(c) == 1)
        written = "..." * ("..." in read) + "".join(once)
    letter = next(
        c for c in "zyxwvutsrqponmlkjihgfedcbaZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in text
    )
    terms = [letter * each + term for each, term in zip(mapped, read.split(","), strict=True)]
    return again(*inputs, equation=f"{','.join(terms)}->{letter}{written}")


# -------------------------------------------------------------------------------------- reductions


@rule(
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
    at=(0,),
)
def _reduce(
    again: Any, x: Any, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Any:
    if axes is not None and axes.shape == (0,):
        axes = None
    if axes is None and noop_with_empty_axes:
        return again(x)
    if x.ndim == 1 and not noop_with_empty_axes:
        return again(op.Unsqueeze(x, [1]), [1], keepdims=0)
    if axes is None:
        return again(x, list(range(1, x.ndim)))
    if not isinstance(axes.shape[0], int) and not noop_with_empty_axes:
        return None  # without axes, it would reduce the new axis, too
    y = again(x, _inner_axes(axes))
    return y.with_shape([None] * x.ndim) if keepdims and y.shape is None else y


# --------------------------------------------------------------------------------- along one axis


@rule("ArgMax", "ArgMin", "Gather", "Split", at=(0,))
@rule("GatherElements", at=(0, 1))
@rule("ScatterElements", at=(0, 1, 2))
@rule("Concat", at="all")
def _along_first_axis(again: Any, *inputs: Any, axis: int = 0) -> Any:
    return again(*inputs, axis=_inner(axis))


@rule("Hardmax", "LogSoftmax", "LpNormalization", "OneHot", "Softmax", "TopK", at=(0,))
@rule("LayerNormalization", "RMSNormalization", at=(0,))
def _along_last_axis(again: Any, *inputs: Any, axis: int = -1) -> Any:
    return again(*inputs, axis=_inner(axis))


@rule("CumProd", "CumSum", "Unsqueeze", at=(0,))
def _along_given_axes(again: Any, x: Any, axes: Any) -> Any:
    return again(x, _inner_axes(axes))


@rule("Compress", at=(0,))
def _compress(again: Any, x: Any, condition: Any, *, axis: int | None = None) -> Any:
    return None if axis is None else again(x, condition, axis=_inner(axis))


# ----------------------------------------------------------------------------------------- shapes


@rule("Reshape", at=(0,))
def _reshaped(again: Any, x: Any, shape: Any, *, allowzero: int = 0) -> Any:
    known = shape.constant
    if known is not None:  # for an axis of length 0, no size can be inferred
        entry = again.node.outputs[0].shape or known
        pairs = zip(known.tolist(), entry, strict=True)
        known = [b if a == -1 and isinstance(b, int) and b > 0 else a for a, b in pairs]
        shape = x.tape.constant(np.array(known, np.int64))
    if not allowzero:  # the first 0 copies the new axis
        return again(x, [0, *known] if known is not None else op.Concat([0], shape, axis=0))
    return again(x, op.Concat(op.Shape(x, end=1), shape, axis=0))


@rule("Transpose", at=(0,))
def _transpose(again: Any, x: Any, *, perm: Sequence[int] | None = None) -> Any:
    axes = range(x.ndim - 1)[::-1] if perm is None else perm
    return again(x, perm=[0, *(axis + 1 for axis in axes)])


@rule("Squeeze", at=(0,))
def _squeeze(again: Any, x: Any, axes: Any = None) -> Any:
    if axes is not None:
        return again(x, _inner_axes(axes))
    sizes = x.shape[1:]
    if not all(isinstance(size, int) for size in sizes):
        return None
    ones = [axis for axis, size in enumerate(sizes, 1) if size == 1]
    return again(x, ones) if ones else op.Identity(x)


@rule("Flatten", at=(0,))
def _flatten(again: Any, x: Any, *, axis: int = 1) -> Any:
    axis = _inner(axis) % x.ndim if axis < 0 else axis + 1
    return _reshape(x, _sizes(x, 0, 1), _merged(x, 1, axis), _merged(x, axis))


@rule("Expand", at=(0,))
def _expand(again: Any, x: Any, shape: Any) -> Any:
    (rank,) = shape.shape
    if not isinstance(rank, int):
        return None
    (x,) = _aligned([True], [x], rank=rank)
    missing = x.ndim - 1 - rank
    return again(x, op.Concat([1] * (1 + missing), shape, axis=0))


@rule("Tile", at=(0,))
def _tile(again: Any, x: Any, repeats: Any) -> Any:
    return again(x, op.Concat([1], repeats, axis=0))


@rule("Pad", at=(0,))
def _pad(again: Any, x: Any, pads: Any, value: Any = None, axes: Any = None) -> Any:
    if axes is not None:
        return again(x, pads, value, _inner_axes(axes))
    rank, known = x.ndim - 1, pads.constant
    if known is not None:
        return again(x, [0, *known[:rank], 0, *known[rank:]], value)
    begin, end = op.Split(pads, num_outputs=2, axis=0)
    return again(x, op.Concat([0], begin, [0], end, axis=0), value)


@rule("Slice", at=(0,))
def _slice(again: Any, x: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    if axes is not None:
        return again(x, starts, ends, _inner_axes(axes), steps)
    (count,) = starts.shape
    if not isinstance(count, int):
        return None
    return again(x, starts, ends, np.arange(1, 1 + count).astype(starts.dtype), steps)


@rule("Shape", at=(0,))
def _shape(again: Any, x: Any, *, start: int = 0, end: int | None = None) -> Any:
    first, last, _ = slice(start, end).indices(x.ndim - 1)
    sizes = _sizes(x, 1 + first, 1 + max(first, last))
    return Same(sizes if isinstance(sizes, Tensor) else x.tape.constant(np.array(sizes, np.int64)))


@rule("Size", at=(0,))
def _size(again: Any, x: Any) -> Any:
    count = _merged(x, 1)
    if isinstance(count, Tensor):
        return Same(op.Squeeze(count, [0]))
    return Same(x.tape.constant(np.array(count[0], np.int64)))


@rule("EyeLike", at=(0,))
def _eye_like(again: Any, x: Any) -> Any:
    zeros = op.ConstantOfShape(op.Shape(x, start=1), value=np.zeros(1, x.dtype))
    return Same(again(zeros))


# --------------------------------------------------------------------------------------- indexing


@rule("Gather", at=(1,))
def _gather_at(again: Any, x: Any, indices: Any, *, axis: int = 0) -> Any:
    axis %= x.ndim
    return moved(again(x, indices, axis=axis), axis)


@rule("Gather", at=(0, 1))
def _gather_each(again: Any, x: Any, indices: Any, *, axis: int = 0) -> Any:
    axis %= x.ndim - 1
    rank = indices.ndim - 1
    y = op.GatherND(moved(x, axis + 1, 1), op.Unsqueeze(indices, [-1]), batch_dims=1)
    before, after = range(1 + rank, 1 + rank + axis), range(1 + rank + axis, y.ndim)
    return op.Transpose(y, perm=[0, *before, *range(1, 1 + rank), *after]) if axis else y


@rule("GatherND", at=(0, 1))
def _gather_nd(again: Any, x: Any, indices: Any, *, batch_dims: int = 0) -> Any:
    return again(x, indices, batch_dims=batch_dims + 1)


@rule("ScatterND", at=(0, 1, 2))
def _scatter_nd(again: Any, x: Any, indices: Any, updates: Any) -> Any:
    size = op.Shape(indices, end=1)
    entries = op.Range(0, op.Squeeze(size, [0]), 1)
    entries = op.Unsqueeze(entries, list(range(1, indices.ndim)))
    shape = op.Concat(op.Shape(indices, end=-1), [1], axis=0)
    return again(x, op.Concat(op.Expand(entries, shape), indices, axis=-1), updates)


# ----------------------------------------------------------------- operators with an axis of rows


@rule(
    *("AveragePool", "Col2Im", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"),
    *("GlobalLpPool", "GlobalMaxPool", "LRN", "LpPool", "Multinomial", "SpaceToDepth"),
    at=(0,),
)
def _rows(again: Any, x: Any, *inputs: Any) -> Any:
    return _unfold(again(_fold(x), *inputs), x)


@rule("MaxPool", at=(0,))
def _max_pool(again: Any, x: Any) -> Any:
    found = again(_fold(x))
    if isinstance(found, Tensor):
        return _unfold(found, x)
    y, indices = (_unfold(each, x) for each in found)
    return y, indices - _first_places(indices, x)  # which count the elements of all rows


@rule("MaxUnpool", at=(0, 1))
def _max_unpool(again: Any, x: Any, indices: Any, shape: Any = None) -> Any:
    if shape is not None:
        return None
    one = _unfold(again(_fold(x), _fold(indices)), x)  # only for its shape
    if one.shape is None or not all(isinstance(size, int) for size in one.shape[1:]):
        return None
    places = indices + _first_places(indices, one)
    return _unfold(again(_fold(x), _fold(places)), x)


def _first_places(indices: Tensor, x: Tensor) -> Tensor:
    """Returns the places of the first elements of all entries of x, to add to indices."""
    count = _merged(x, 1)
    entries = op.Range(0, op.Squeeze(op.Shape(indices, end=1), [0]), 1)
    return op.Unsqueeze(entries * count, list(range(1, indices.ndim)))


@rule("GridSample", at=(0, 1))
def _grid_sample(again: Any, x: Any, grid: Any) -> Any:
    return _unfold(again(_fold(x), _fold(grid)), x)


@rule("Resize", at=(0,))
def _resize(
    again: Any,
    x: Any,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    axes: Sequence[int] | None = None,
) -> Any:
    rank, rows = x.ndim - 1, _fold(x)
    if axes is not None:
        kept = all(axis % rank for axis in axes)
        axes = [axis % rank for axis in axes]
    elif scales is not None:
        kept = scales.constant is not None and scales.constant[0] == 1
    else:
        entry, given = (value.shape for value in (again.node.outputs[0], again.node.inputs[0]))
        kept = entry is not None and entry[0] == given[0] and entry[0] != ir.SymbolicDim(None)
        sizes = op.Concat(op.Shape(rows, end=1), sizes[1:], axis=0)
    return _unfold(again(rows, roi, scales, sizes, axes=axes), x) if kept else None


@rule("Conv", "ConvTranspose")
def _conv_of_weights(
    again: Any, mapped: list[bool], x: Any, w: Any, b: Any = None, *, group: int = 1
) -> Any:
    with_bias = functools.partial(_with_bias, b, mapped[2:] == [True], x.ndim + (not mapped[0]))
    if not mapped[1]:
        y = _unfold(again(_fold(x), w), x) if mapped[0] else op.Unsqueeze(again(x, w), [0])
        return with_bias(y)
    size = w.shape[0]
    if not isinstance(size, int):  # the number of groups is an attribute
        return None
    if mapped[0]:  # entries become groups of channels
        rows = moved(x, 1, 0)
        x = _reshape(rows, _sizes(rows, 0, 1), _merged(rows, 1, 3), _sizes(rows, 3))
    else:
        x = op.Tile(x, [1, size] + [1] * (x.ndim - 2))
    y = again(x, _fold(w), group=size * group)
    sizes = _sizes(y, 0, 1), [size], op.Div(op.Shape(y, start=1, end=2), [size]), _sizes(y, 2)
    return with_bias(moved(_reshape(y, *sizes), 1, 0))


def _with_bias(b: Tensor | None, is_mapped: bool, rank: int, y: Tensor) -> Tensor:
    if b is None:
        return y
    return y + _per_channel(b, is_mapped, rank, 2)


def _per_channel(b: Tensor, is_mapped: bool, rank: int, axis: int) -> Tensor:
    """Gives numbers per channel axes of size 1, to broadcast with the channels of all entries."""
    axes = list(range(1 + is_mapped, rank - axis + is_mapped))
    b = op.Unsqueeze(b, axes) if axes else b
    return op.Unsqueeze(b, list(range(1, axis))) if is_mapped and axis > 1 else b


# --------------------------------------------------------------------------------- normalizations


@rule("BatchNormalization", at=(0,))
@rule("GroupNormalization", "InstanceNormalization", at=(0,))
def _normalized_rows(again: Any, x: Any, *weights: Any, training_mode: int = 0) -> Any:
    if training_mode:
        return None
    rows = _fold(x)
    return _unfold(again(rows, *weights).with_shape_of(rows), x)


@rule("GroupNormalization", "InstanceNormalization", at=(0, 1, 2))
def _normalized_rows_of_weights(again: Any, x: Any, scale: Any, b: Any) -> Any:
    one = op.ConstantOfShape(op.Shape(scale, start=1), value=np.ones(1, scale.dtype))
    rows = _fold(x)
    y = _unfold(again(rows, one, op.Sub(one, one)).with_shape_of(rows), x)
    return y * _per_channel(scale, True, y.ndim, 2) + _per_channel(b, True, y.ndim, 2)


@rule("BatchNormalization", at=(0, 1, 2, 3, 4))
def _batch_normalization(
    again: Any,
    x: Any,
    *weights: Any,
    epsilon: float = 1e-5,
    training_mode: int = 0,
) -> Any:
    if training_mode:
        return None
    scale, b, mean, variance = (_per_channel(each, True, x.ndim, 2) for each in weights)
    return (x - mean) / op.Sqrt(variance + epsilon) * scale + b


@rule("LayerNormalization", "RMSNormalization")
def _layer_normalization_of_weights(
    again: Any, mapped: list[bool], x: Any, scale: Any, b: Any = None, *, axis: int = -1
) -> Any:
    axis = _inner(axis) if mapped[0] else axis
    sizes = op.Shape(x, start=axis)
    y = again(x, op.ConstantOfShape(sizes, value=np.ones(1, scale.dtype)), axis=axis)
    if isinstance(y, tuple):
        return None
    y, scale, b = _aligned([*mapped, False][:3], [y, scale, b])
    return y * scale if b is None else y * scale + b


@rule("MeanVarianceNormalization", at=(0,))
def _mean_variance(again: Any, x: Any, *, axes: Sequence[int] = (0, 2, 3)) -> Any:
    return again(x, axes=[_inner(axis) for axis in axes]).with_shape_of(x)


# ------------------------------------------------------------------------- sequences and attention


@rule("LSTM", at=(0, 4, 5, 6))
@rule("GRU", "RNN", at=(0, 4, 5))
def _recurrent(again: Any, x: Any, w: Any, r: Any, *inputs: Any, layout: int = 0) -> Any:
    if layout:
        return None
    b, lengths, h, c, p = (*inputs, *[None] * 5)[:5]
    states = [None if state is None else _fold_at(state, 1) for state in (h, c)]
    lengths = None if lengths is None else _fold(lengths)
    found = again(_fold_at(x, 1), w, r, b, lengths, *states, p)
    results = found if isinstance(found, tuple) else (found,)
    return tuple(_unfold_at(y, 1 + (y.ndim == 4), x, 2) for y in results)


@rule("ReverseSequence", at=(0, 1))
def _reverse(again: Any, x: Any, lengths: Any, *, batch_axis: int = 1, time_axis: int = 0) -> Any:
    rows = moved(x, 2, 1) if batch_axis else x
    y = _unfold(again(_fold(rows), _fold(lengths), batch_axis=0, time_axis=1), rows)
    return moved(y, 2, 1) if batch_axis else y


@rule("Attention", at=(0, 1, 2, 4, 5, 6))
def _attention(again: Any, x: Any, k: Any, v: Any, mask: Any = None, *inputs: Any) -> Any:
    if mask is not None and mask.ndim != 2:  # it may differ between rows
        return None
    q, k, v, *rows = (each if each is None else _fold(each) for each in (x, k, v, *inputs))
    return _unfolded(again(q, k, v, mask, *rows), x)


@rule("Attention", at=(0, 1, 2, 3, 4, 5, 6))
def _masked_attention(again: Any, q: Any, k: Any, v: Any, mask: Any, *inputs: Any) -> Any:
    (mask,) = _aligned([True], [mask], rank=4)
    mask = op.Expand(mask, op.Concat([1], op.Shape(q, start=1, end=2), [1, 1, 1], axis=0))
    rows = [None if each is None else _fold(each) for each in (q, k, v, mask, *inputs)]
    return _unfolded(again(*rows), q)


def _unfolded(found: Any, x: Tensor) -> Any:
    """Splits the first axis of one output, or of several; see `_unfold`."""
    return tuple(_unfold(y, x) for y in found) if isinstance(found, tuple) else _unfold(found, x)


def _fold_at(x: Tensor, axis: int) -> Tensor:
    """Merges the new axis with an axis of each entry, at its place."""
    perm = [*range(1, 1 + axis), 0, *range(1 + axis, x.ndim)]
    x = op.Transpose(x, perm=perm)
    return _reshape(x, _sizes(x, 0, axis), _merged(x, axis, axis + 2), _sizes(x, axis + 2))


def _unfold_at(y: Tensor, axis: int, x: Tensor, place: int) -> Tensor:
    """Splits an axis into the new axis and an axis of ``x``; the inverse of `_fold_at`."""
    sizes = (_sizes(x, 0, 1), _sizes(x, place, place + 1))
    y = _reshape(y, _sizes(y, 0, axis), *sizes, _sizes(y, axis + 1))
    return moved(y, axis)


# ------------------------------------------------------------------------------------------ losses


@rule("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", at=(0, 1))
def _label_loss(
    again: Any,
    x: Any,
    labels: Any,
    weights: Any = None,
    *,
    reduction: Any = "mean",
    ignore_index: int | None = None,
) -> Any:
    kind = reduction.decode() if isinstance(reduction, bytes) else reduction
    if kind == "mean" and (weights is not None or ignore_index is not None):
        return None
    losses = again(_fold(x), _fold(labels), weights, reduction="none")
    if isinstance(losses, tuple):
        return None
    losses = _unfold(losses, x)
    if kind == "none":
        return losses
    axes = list(range(1, losses.ndim))
    return losses.mean(axis=axes) if kind == "mean" else losses.sum(axis=axes)
