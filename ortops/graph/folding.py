"""Constant folding of the computed sizes and paddings in exported models."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import all_nodes, attribute_values, remove_unread
from ortops.graph.files.serialization import BOUND_DOMAIN
from ortops.graph.names import Names
from ortops.graph.tensor import Tape

_MOST = 1024  # elements: shapes and paddings have about ten, and weights are not folded


def fold(graph: ir.Graph) -> bool:
    """Replaces small tensors that do not depend on inputs by constants.

    Static sizes count as constants. Only operators that move, compare or convert numbers, or round
    once, are evaluated, so that results do not change. Subgraphs, outputs of the graph and tensors
    that a Gradient node names are not folded. Initializers count as constants, so variables must be
    inputs.

    Args:
        graph: A graph in topological order; it is modified in place.

    Returns:
        Whether the graph has changed.
    """
    # What a Gradient node names is a variable, also for the nodes that read it.
    bound = (node for node in all_nodes(graph) if node.domain == BOUND_DOMAIN)
    known: dict[ir.Value, Array | None] = {
        value: None for node in bound for value in node.inputs if value is not None
    }
    folded: dict[ir.Node, Array] = {}
    for node in graph:
        if node.domain or len(node.outputs) != 1:
            continue
        (value,) = node.outputs
        if value in known:
            continue
        try:
            result = _evaluate(node, known)
        except (ArithmeticError, IndexError, TypeError, ValueError):
            continue  # the node is invalid, and fails at run time
        if result is None or result.size > _MOST:
            continue
        known[value] = result
        if _is_whole(result) and not value.is_graph_output():
            folded[node] = result
    tape = Tape(graph, names=Names(graph)) if folded else None
    for node, result in folded.items():
        (value,) = node.outputs
        if tape is not None and any(user not in folded for user, _ in value.uses()):
            tape.before = node
            dtype = result.dtype if value.dtype is None else value.dtype.numpy()
            constant = tape.constant(result.astype(dtype))
            value.replace_all_uses_with(constant.value)
    sources = {v.producer() for node in folded for v in node.inputs if v is not None}
    remove_unread([node for node in graph if node in folded or node in sources])
    return bool(folded)


def _evaluate(node: ir.Node, known: Mapping[ir.Value, Array | None]) -> Array | None:
    """Returns the output of a node, or None if it is unknown; unknown sizes are None elements."""
    if node.op_type == "Shape":
        return _sizes(node)
    moves = node.op_type in _MOVES
    function = _MOVES.get(node.op_type) or _COMPUTES.get(node.op_type)
    if function is None:
        return None
    arrays: list[Array | None] = []
    for index, value in enumerate(node.inputs):
        array = None if value is None else _constant(value, known)
        if value is not None and array is None:
            return None
        # Unknown sizes can only be moved.
        movable = moves and (index == 0 or node.op_type == "Concat")
        if array is not None and not movable and not _is_whole(array):
            return None
        arrays.append(array)
    with np.errstate(all="ignore"):
        result = np.asarray(function(*arrays, **attribute_values(node)))
    return result.astype(np.int64) if result.dtype == object and _is_whole(result) else result


def _sizes(node: ir.Node) -> Array | None:
    x = node.inputs[0]
    if x is None or x.shape is None:
        return None
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(x.shape))
    sizes = [size if isinstance(size, int) else None for size in x.shape[start:end]]
    return np.array(sizes, np.int64 if None not in sizes else object)


def _constant(value: ir.Value, known: Mapping[ir.Value, Array | None]) -> Array | None:
    if value in known:
        return known[value]
    tensor = constant_tensor(value)
    if tensor is None or tensor.size > _MOST:
        return None
    array = tensor.numpy()
    if array.dtype.kind not in "biuf" or array.dtype.type.__module__ != "numpy":
        return None
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _is_whole(array: Array) -> bool:
    """Whether all sizes in an array are known."""
    return array.dtype != object or all(size is not None for size in array.ravel())


# ------------------------------------------------------------------------------------- operators


def _cast(x: Array, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise ValueError
    dtype = ir.DataType(to).numpy()
    if dtype.kind not in "biuf" or (
        x.dtype.kind == "f" and dtype.kind in "iu" and _is_out(x, dtype)
    ):
        raise ValueError
    return x.astype(dtype)


def _is_out(x: Array, dtype: np.dtype[Any]) -> bool:
    """Whether numbers exceed the range of an integer type, for which results vary by machine."""
    limits = np.iinfo(dtype)
    return bool(((x <= limits.min - 1.0) | (x >= limits.max)).any())


def _concat(*xs: Array, axis: int) -> Array:
    return np.concatenate(xs, axis)


def _constant_of_shape(shape: Array, *, value: Array | None = None) -> Array:
    if np.prod(shape, dtype=object) > _MOST:
        raise ValueError
    filler = np.zeros(1, np.float32) if value is None else value
    return np.full(shape, filler.item(), filler.dtype)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    if not b.all() or (a < 0).any() or (b < 0).any():  # C rounds towards zero, numpy down
        raise ValueError
    return a // b


def _expand(x: Array, shape: Array) -> Array:
    target = np.broadcast_shapes(x.shape, tuple(shape))
    if np.prod(target, dtype=object) > _MOST:
        raise ValueError
    return np.broadcast_to(x, target)


def _gather(x: Array, indices: Array, *, axis: int = 0) -> Array:
    return np.take(x, indices, axis)


def _modulo(a: Array, b: Array, *, fmod: int = 0) -> Array:
    if a.dtype.kind == "f" or not b.all():
        raise ValueError
    return np.fmod(a, b) if fmod else np.mod(a, b)


def _range(start: Array, limit: Array, delta: Array) -> Array:
    if start.dtype.kind == "f" or (limit - start) / delta > _MOST:
        raise ValueError
    numbers = range(int(start), int(limit), int(delta))
    return np.array(numbers, start.dtype)


def _reduce_prod(
    x: Array, axes: Array | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
) -> Array:
    if x.dtype.kind == "f" or (noop_with_empty_axes and (axes is None or not axes.size)):
        raise ValueError
    chosen = None if axes is None or not axes.size else tuple(axes)
    return np.asarray(np.prod(x, chosen, x.dtype, keepdims=bool(keepdims)))


def _reshape(x: Array, shape: Array, *, allowzero: int = 0) -> Array:
    wanted = [x.shape[i] if not (size or allowzero) else size for i, size in enumerate(shape)]
    return x.reshape(wanted)


def _slice(
    x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    places = [slice(None)] * x.ndim
    along = range(len(starts)) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(along, starts.tolist(), ends.tolist(), by, strict=True):
        low = -x.shape[axis] - 1  # a backward slice up to here includes element 0
        stop = None if step < 0 and end <= low else end
        places[axis] = slice(start, stop, step)
    return x[tuple(places)]


def _squeeze(x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, None if axes is None else tuple(axes.tolist()))


def _transpose(x: Array, *, perm: Sequence[int] | None = None) -> Array:
    return np.transpose(x, perm)


def _unsqueeze(x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(axes.tolist()))


def _of_integers(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*xs: Array) -> Any:
        if any(x.dtype.kind == "f" for x in xs):
            raise ValueError
        return function(*xs)

    return compute


_MOVES: Mapping[str, Callable[..., Any]] = {
    "Concat": _concat,
    "Gather": _gather,
    "Identity": np.asarray,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""Operators that move elements of their first input, or of all inputs."""

_COMPUTES: Mapping[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "Cast": _cast,
    "Ceil": np.ceil,
    "ConstantOfShape": _constant_of_shape,
    "Div": _divide,
    "Equal": np.equal,
    "Expand": _expand,
    "Floor": np.floor,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": _of_integers(lambda *xs: functools.reduce(np.maximum, xs)),
    "Min": _of_integers(lambda *xs: functools.reduce(np.minimum, xs)),
    "Mod": _modulo,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Where": np.where,
}
"""Operators whose results are exact or rounded once."""
