"""Finds the Softmax, LogSoftmax or Sigmoid at the end of a model, and the logits before it.

Shipped classifiers output probabilities. A loss on logits would apply the function a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import (
    Steps,
    attribute_values,
    inner_graphs,
    is_float,
    producer_of,
    unrolled,
)
from ortops.graph.operators import MOVES

Kind: TypeAlias = Literal["softmax", "log_softmax", "sigmoid", "complement", "probabilities"]

_ML = "ai.onnx.ml"
_MICROSOFT = "com.microsoft"

_KEEPING = frozenset({"Cast", "Identity"})
_CHOOSING = frozenset({"Gather", "Slice", "Split"})
_SHRINKING = frozenset({"Max", "Min", "Mul"})
_BOUNDED = frozenset(
    {"Clip", "Erf", "Exp", "HardSigmoid", "LogSoftmax", "Sigmoid", "Softmax", "Softsign", "Tanh"}
)
_WEIGHING = frozenset(
    {"Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "Loop", "LSTM", "MatMul", "RNN", "Scan"}
)
_AVERAGING = frozenset(
    {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMean"}
    | {"ReduceMin"}
)


class Move(NamedTuple):
    """A node that only moves elements, from one of its inputs to one of its outputs."""

    node: ir.Node
    source: ir.Value
    result: ir.Value


@dataclass(frozen=True)
class Squashed:
    """The function that turned logits into probabilities or log-probabilities.

    Attributes:
        kind: The function. ``"complement"`` is the pair 1 − p, p with the Sigmoid p of one number,
            and ``"probabilities"`` is anything without logits.
        node: The node that computes it.
        logits: Its input, if there is one.
        squashed_axis: The axis of the logits over which probabilities sum to 1, if known.
        axis: The same axis of the tensor, if known.
        path: The nodes between the function and the tensor, which only move elements.
        opposite: Whether the logits are −z and z, so that the two Sigmoids sum to 1.
        joined: The results of several functions of this kind, which a Concat joins before the path;
            `node` is the first of them, and the logits are those of each.
        joined_axis: The axis of the Concat.
    """

    kind: Kind
    node: ir.Node
    logits: ir.Value | None = None
    squashed_axis: int | None = None
    axis: int | None = None
    path: tuple[Move, ...] = ()
    opposite: bool = False
    joined: tuple[Squashed, ...] = ()
    joined_axis: int = 0

    @property
    def all_logits(self) -> list[ir.Value]:
        """The logits of all joined functions; empty if there are none."""
        found: list[ir.Value] = []
        pending = [self]
        while pending:
            each = pending.pop()
            pending += reversed(each.joined)
            if each.logits is not None and not each.joined:
                found.append(each.logits)
        return found


def squashed(value: ir.Value) -> Squashed | None:
    """Finds the function that made a tensor probabilities; None if there is none.

    Args:
        value: A tensor of a graph at opset 13 or later.
    """
    return unrolled(_squashed(value, {}))


_Known: TypeAlias = dict[ir.Value, Squashed | None]
"""What was found of values, so that each is examined once."""


def _squashed(value: ir.Value, known: _Known) -> Steps[Squashed | None]:
    if value not in known:
        known[value] = yield _search(value, known)
    return known[value]


def _search(value: ir.Value, known: _Known) -> Steps[Squashed | None]:
    path: list[Move] = []
    while (node := value.producer()) is not None:
        if _passes_on(node):
            path.insert(0, Move(node, _first(node), value))
            value = _first(node)
        elif (exact := _before_rounding(node) or _before_limits(node)) is not None and (
            _has_rank_of(exact, value)
        ):
            value = exact
        elif (branch := _chosen_branch(node, path)) is not None:
            if not _drop_choice(path, branch, node):
                path.insert(0, Move(node, branch, value))
            value = branch
        else:
            break
    if node is None or node.domain not in ("", _ML, _MICROSOFT):
        return None
    for recognize in (_softmax, _log_softmax, _sigmoid, _complement):
        found = recognize(node)
        if found is not None and _has_rank_of(found[1], node.outputs[0]):
            kind, logits, axis = found
            chosen = any(move.node.op_type in _CHOOSING for move in path)
            opposite = None if chosen or kind != "sigmoid" else _opposite_axis(logits)
            axis = axis if opposite is None else opposite
            moved = _moved_axis(axis, path)
            if chosen and kind != "sigmoid" and moved is None:  # a single class has no logit
                return Squashed("probabilities", node) if kind != "log_softmax" else None
            is_opposite = opposite is not None
            return Squashed(kind, node, logits, axis, moved, tuple(path), is_opposite)
    joined: Squashed | None = yield _joined(node, path, known)
    if joined is not None:
        return joined
    if _is_normalizer(node):  # applied to probabilities by scikit-learn
        inner: Squashed | None = yield _squashed(_first(node), known)
        if inner is not None and inner.kind == "softmax" and inner.axis in (1, -1) and not path:
            return inner
    holds: bool = yield _holds_probabilities(node, value, known)
    return Squashed("probabilities", node) if holds else None


def partly_squashed(value: ir.Value) -> Squashed | None:
    """Finds the first Softmax, LogSoftmax or Sigmoid of which only a part of a tensor consists.

    Args:
        value: A tensor that `squashed` does not recognize as a whole.
    """
    known: _Known = {}
    seen: set[ir.Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        part = unrolled(_squashed(value, known)) if seen else None
        if part is not None:
            return part
        seen.add(value)
        while (node := value.producer()) is not None and _passes_on(node):
            value = _first(node)
        if node is not None and not node.domain and node.op_type == "Concat":
            read = (each for each in reversed(node.inputs) if each is not None)
            pending += [each for each in read if each not in seen]
    return None


def may_be_bounded(value: ir.Value) -> bool:
    """Whether a function with bounded values computes a tensor, without weights in between."""
    seen: set[ir.Node] = set()
    waiting = [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.op_type in _WEIGHING or node.domain:
            continue
        if node.op_type in _BOUNDED:
            return True
        seen.add(node)
        waiting += [each.producer() for each in node.inputs if each is not None]
    return False


_Found: TypeAlias = tuple[Kind, ir.Value, int | None]


def _joined(node: ir.Node, path: Sequence[Move], known: _Known) -> Steps[Squashed | None]:
    """Recognizes the concatenation of results of one kind, whose logits can be concatenated."""
    if node.op_type != "Concat" or node.domain:
        return None
    parts: list[Squashed | None] = []
    for value in node.inputs:
        part = None if value is None else (yield _squashed(value, known))
        parts.append(part)
    axis, rank = attribute_values(node)["axis"], len(node.outputs[0].shape or ())
    first = parts[0]
    if first is None or first.kind not in ("softmax", "log_softmax", "sigmoid"):
        return None
    is_sigmoid = first.kind == "sigmoid"
    of_classes = None if first.axis is None or not rank else first.axis % rank
    if not is_sigmoid and of_classes in (None, axis % rank if rank else None):
        return None
    for part in parts:
        if part is None or part.kind != first.kind or part.opposite:
            return None
        if part.logits is None and not part.joined:
            return None
        if not is_sigmoid and (part.axis is None or part.axis % rank != of_classes):
            return None
    moved = _moved_axis(first.axis, path)
    if moved is None and not is_sigmoid:
        return None
    joined = tuple(part for part in parts if part is not None)
    return Squashed(
        first.kind,
        first.node,
        squashed_axis=first.axis,
        axis=moved,
        path=tuple(path),
        joined=joined,
        joined_axis=axis,
    )


def _chosen_branch(node: ir.Node, path: Sequence[Move]) -> ir.Value | None:
    """Returns the only input of a Concat from which later nodes choose elements, or None."""
    if node.op_type != "Concat" or node.domain:
        return None
    chosen = next((move.node for move in path if move.node.op_type not in _KEEPING), None)
    shape = node.outputs[0].shape
    if chosen is None or shape is None:
        return None
    axis = attribute_values(node)["axis"] % len(shape)
    size = shape[axis]
    result = next(move.result for move in path if move.node is chosen)
    bounds = _chosen_range(chosen, result, axis, size if isinstance(size, int) else None)
    if bounds is None:
        return None
    low = 0
    for value in node.inputs:
        part = None if value is None or value.shape is None else value.shape[axis]
        if value is None or not isinstance(part, int):
            return None
        if low <= bounds[0] and bounds[1] < low + part:
            return value
        low += part
    return None


def _drop_choice(path: list[Move], branch: ir.Value, concat: ir.Node) -> bool:
    """Removes the node that chooses from a Concat if it returns one input as it was."""
    place = next(n for n, move in enumerate(path) if move.node.op_type not in _KEEPING)
    node, _, result = path[place]
    rank = len(branch.shape or ())
    axis = attribute_values(concat)["axis"] % rank
    is_split = node.op_type == "Split"
    if not is_split and (node.op_type != "Slice" or _slice_axes(node) != [axis]):
        return False
    steps = _integers(node.inputs[4]) if not is_split and len(node.inputs) > 4 else [1]
    if steps != [1] or result.shape is None or result.shape[axis] != (branch.shape or ())[axis]:
        return False
    path.pop(place)
    return True


def _chosen_range(
    node: ir.Node, result: ir.Value, axis: int, size: int | None
) -> tuple[int, int] | None:
    """Returns the first and the last index that a node chooses on an axis; None if unknown."""
    rank = len(_first(node).shape or ())
    match node.op_type:
        case "Gather" if attribute_values(node).get("axis", 0) % rank == axis:
            chosen = _integers(node.inputs[1])
        case "Split" if attribute_values(node).get("axis", 0) % rank == axis and size is not None:
            given = _integers(node.inputs[1]) if len(node.inputs) > 1 else None
            count = len(node.outputs)
            sizes = given if given is not None else [-(-size // count)] * count
            place = list(node.outputs).index(result)
            low = sum(sizes[:place])
            chosen = [low, min(low + sizes[place], size) - 1]
        case "Slice" if size is not None and axis in (_slice_axes(node) or ()):
            place = (_slice_axes(node) or []).index(axis)
            starts, ends = _integers(node.inputs[1]), _integers(node.inputs[2])
            steps = _integers(node.inputs[4]) if len(node.inputs) > 4 else None
            if starts is None or ends is None or (len(node.inputs) > 4 and steps is None):
                return None
            step = 1 if steps is None else steps[place]
            chosen = list(range(size)[starts[place] : ends[place] : step])
        case _:
            return None
    if not chosen or (size is None and min(chosen) < 0):
        return None
    places = [each % size if size else each for each in chosen]
    return min(places), max(places)


def _slice_axes(node: ir.Node) -> list[int] | None:
    """Returns the axes that a Slice changes; None if they are unknown."""
    rank = len(_first(node).shape or ())
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = _integers(node.inputs[1])
        return None if starts is None else list(range(len(starts)))
    axes = _integers(node.inputs[3])
    return None if axes is None or not rank else [axis % rank for axis in axes]


def _integers(value: ir.Value | None) -> list[int] | None:
    """Returns the elements of a constant."""
    tensor = None if value is None else constant_tensor(value)
    return None if tensor is None else [int(each) for each in tensor.numpy().reshape(-1)]


def _moved_axis(axis: int | None, path: Sequence[Move]) -> int | None:
    """Follows an axis through nodes that move elements.

    Returns:
        The axis; None if it is unknown, or if only a part of the axis is left.
    """
    for node, source, result in path:
        if axis is None:
            return None
        if node.op_type in _KEEPING:
            continue
        if source.shape is None or result.shape is None:
            return None
        before, after = list(source.shape), list(result.shape)
        axis %= len(before)
        values = attribute_values(node)
        match node.op_type:
            case "Transpose":
                axis = list(values.get("perm") or range(len(before))[::-1]).index(axis)
            case "Slice":
                changed = _slice_axes(node)
                axis = None if changed is None or axis in changed else axis
            case "Split" | "Concat":
                axis = None if values.get("axis", 0) % len(before) == axis else axis
            case "Gather":
                place = values.get("axis", 0) % len(before)
                later = len(after) - len(before) if axis > place else 0
                axis = None if axis == place else axis + later
            case _:
                axis = _reshaped_axis(before, after, axis)
    return axis


def _reshaped_axis(before: Sequence[Any], after: Sequence[Any], axis: int) -> int | None:
    """Returns the axis of equal size with equally many elements after it, or None."""
    size, rest = before[axis], before[axis + 1 :]
    for place in reversed(range(len(after))):
        behind = after[place + 1 :]
        if after[place] == size and isinstance(size, int) and _are_as_many(rest, behind):
            return place
    return None


def _are_as_many(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether shapes are known to have equal numbers of elements; symbols are compared by name."""
    numbers = [math.prod(each for each in of if isinstance(each, int)) for of in (sizes, others)]
    symbols = [
        sorted(str(each) for each in of if not isinstance(each, int)) for of in (sizes, others)
    ]
    return numbers[0] == numbers[1] and symbols[0] == symbols[1] and "None" not in symbols[0]


def _passes_on(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _KEEPING | MOVES | _CHOOSING:
        return False
    source = node.inputs[0]
    return source is not None and is_float(source)


def _before_rounding(node: ir.Node) -> ir.Value | None:
    """Returns the input of a QuantizeLinear and DequantizeLinear pair."""
    if node.op_type != "DequantizeLinear":
        return None
    rounding = _first(node).producer()
    if rounding is None or rounding.op_type != "QuantizeLinear":
        return None
    return _first(rounding)


def _before_limits(node: ir.Node) -> ir.Value | None:
    """Returns the input of a node that only keeps values away from 0 or 1, such as a Clip."""
    if node.domain or node.op_type not in ("Add", "Clip", "Max", "Min") or len(node.inputs) < 2:
        return None
    tensors = [None if each is None else constant_tensor(each) for each in node.inputs[1:]]
    numbers = [float(t.numpy().reshape(())) for t in tensors if t is not None and t.size == 1]
    if len(numbers) != sum(each is not None for each in node.inputs[1:]):
        return None
    ends = {"Clip": (0.0, 1.0), "Min": (1.0,)}.get(node.op_type, (0.0,))
    near = (any(abs(number - end) < 0.01 for end in ends) for number in numbers)
    return _first(node) if all(near) else None


def _softmax(node: ir.Node) -> _Found | None:
    """Recognizes Softmax, exp(x) / Σ exp(x), and Exp of LogSoftmax."""
    if node.op_type == "Softmax":
        return "softmax", _first(node), attribute_values(node).get("axis", -1)
    if node.op_type == "Exp":
        inner = producer_of(node.inputs[0], "LogSoftmax", "Sub")
        found = None if inner is None else _log_softmax(inner)
        return None if found is None else ("softmax", *found[1:])
    if node.op_type != "Div":
        return None
    above, below = producer_of(node.inputs[0], "Exp"), producer_of(node.inputs[1], "ReduceSum")
    if above is None or below is None or below.inputs[0] is not above.outputs[0]:
        return None
    return "softmax", _shifted(_first(above)), _reduced_axis(below)


def _log_softmax(node: ir.Node) -> _Found | None:
    """Recognizes LogSoftmax, Log of Softmax, and x − log Σ exp(x)."""
    if node.op_type == "LogSoftmax":
        return "log_softmax", _first(node), attribute_values(node).get("axis", -1)
    if node.op_type == "Log":
        inner = producer_of(node.inputs[0])
        limited = None if inner is None else _before_limits(inner)
        inner = inner if limited is None else producer_of(limited)
        found = None if inner is None else _softmax(inner)
        return None if found is None else ("log_softmax", *found[1:])
    if node.op_type != "Sub":
        return None
    logits, norm = _first(node), _source(node.inputs[1])  # behind nodes that restore the axis
    reduced = producer_of(norm, "ReduceLogSumExp")
    if reduced is not None and reduced.inputs[0] is logits:
        return "log_softmax", logits, _reduced_axis(reduced, node.inputs[1])
    total = producer_of(_input_of(producer_of(norm, "Log")), "ReduceSum")
    exp = producer_of(_input_of(total), "Exp")
    if total is None or exp is None or exp.inputs[0] is not logits:
        return None
    return "log_softmax", _shifted(logits), _reduced_axis(total, node.inputs[1])


def _sigmoid(node: ir.Node) -> _Found | None:
    """Recognizes Sigmoid and 1 / (1 + exp(−x))."""
    if node.op_type == "Sigmoid":
        return "sigmoid", _first(node), None
    negative = producer_of(_input_of(_exp_plus_one(_inverted(node))), "Neg")
    return None if negative is None else ("sigmoid", _first(negative), None)


def _inverted(node: ir.Node) -> ir.Value | None:
    """Returns x for 1 / x, or None."""
    if node.op_type == "Div" and _is_number(node.inputs[0], 1):
        return node.inputs[1]
    return node.inputs[0] if node.op_type == "Reciprocal" else None


def _exp_plus_one(value: ir.Value | None) -> ir.Node | None:
    """Returns the node Exp(x) if a value is 1 + exp(x), as in a Sigmoid of −x."""
    total = producer_of(value, "Add")
    rest = [] if total is None else [each for each in total.inputs if not _is_number(each, 1)]
    return producer_of(rest[0], "Exp") if len(rest) == 1 else None


def _complement(node: ir.Node) -> _Found | None:
    """Recognizes the concatenation of 1 − p and p, for the Sigmoid p."""
    if node.op_type != "Concat" or not _is_complement(node):
        return None
    for value in node.inputs:
        found = producer_of(value)
        inner = None if found is None else _sigmoid(found)
        if inner is not None:
            return "complement", inner[1], attribute_values(node)["axis"]
    return None


def _opposite_axis(logits: ir.Value) -> int | None:
    """Returns the axis of logits −z and z, as in scikit-learn's binary classifiers, or None."""
    node, reshaped = producer_of(logits), producer_of(logits, "Reshape")
    if reshaped is not None and reshaped.inputs[1] is not None:
        shape = constant_tensor(reshaped.inputs[1])
        if shape is not None and shape.numpy().tolist() == [-1, 2]:
            node = producer_of(reshaped.inputs[0])
    if node is None:
        return None
    shape_of_logits = logits.shape
    last = 1 if shape_of_logits is None else len(shape_of_logits) - 1
    if node.op_type == "Concat" and len(node.inputs) == 2:
        axis: int = attribute_values(node)["axis"]
        if _input_of(producer_of(node.inputs[0], "Neg")) is not node.inputs[1]:
            return None
        axis = axis % (last + 1) if axis < 0 else axis
        is_pair = shape_of_logits is None or shape_of_logits[axis] == 2
        return axis if axis and is_pair else None
    product: ir.Node | None = node
    shift = list(node.inputs[2:])
    if node.op_type == "Add":
        product, shift = producer_of(node.inputs[0]), [node.inputs[1]]
    if product is None or product.op_type not in ("Gemm", "MatMul"):
        return None
    weights = _array(product.inputs[1])
    if weights is None or weights.ndim != 2:
        return None
    if not attribute_values(product).get("transB", 0):
        weights = weights.T
    rows = [weights, *map(_array, shift)]
    are_opposite = all(a is not None and len(a) == 2 and np.array_equal(a[0], -a[1]) for a in rows)
    return last if are_opposite else None


def _array(value: ir.Value | None) -> Array | None:
    """Returns a constant, also behind a Transpose, with at least one axis."""
    turns = 0
    while (node := producer_of(value, "Transpose")) is not None:
        value, turns = _first(node), turns + 1
    tensor = None if value is None else constant_tensor(value)
    array = None if tensor is None else np.atleast_1d(tensor.numpy())
    if array is None or not turns:
        return array
    if array.ndim != 2:
        return None
    return array.T if turns % 2 else array


def _has_rank_of(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values have equally many axes, as far as is known.

    A number of shape [1, 1, 1] adds axes to a matrix.
    """
    return value.shape is None or other.shape is None or len(value.shape) == len(other.shape)


def _is_normalizer(node: ir.Node) -> bool:
    """Whether a node divides rows by their sums."""
    if (node.domain, node.op_type) != (_ML, "Normalizer"):
        return False
    return attribute_values(node).get("norm") in ("L1", b"L1")


def _is_classifier(node: ir.Node) -> bool:
    """Whether a node is a classifier of ``ai.onnx.ml`` that outputs probabilities."""
    if node.domain != _ML or not node.op_type.endswith("Classifier"):
        return False
    transform = attribute_values(node).get("post_transform", "NONE")
    return transform in ("SOFTMAX", "LOGISTIC", b"SOFTMAX", b"LOGISTIC")


def _holds_probabilities(node: ir.Node, value: ir.Value, known: _Known) -> Steps[bool]:
    """Whether a node outputs probabilities without logits, such as x / Σ x or an average."""
    if node.domain:
        return _is_normalizer(node) or _is_classifier(node)
    match node.op_type:
        case "Concat":
            return _is_complement(node) or (yield _are_squashed(node.inputs, known))
        case "If":
            index = node.outputs.index(value)
            ends = [graph.outputs[index] for graph in inner_graphs(node)]
            return bool((yield _are_squashed(ends, known)))
        case "LpNormalization":
            return bool(attribute_values(node).get("p", 2) == 1)
        case "DequantizeLinear":
            source = _first(node).producer()
            return source is not None and source.op_type in ("QLinearSoftmax", "QLinearSigmoid")
        case "HardSigmoid":
            return True
        case "Reciprocal" | "Div" if _inverted(node) is not None:
            return _exp_plus_one(_inverted(node)) is not None
        case "Div":
            return _is_divided_by_sum(node) or (yield _is_average(node, known))
        case "Mul" | "Mean" if (yield _is_average(node, known)):
            return True
        case op_type if op_type in _SHRINKING:
            others = [each for each in node.inputs if not _is_share(each)]
            return bool(others) and (yield _are_squashed(others, known))
        case "Sub":
            return _is_number(node.inputs[0], 1) and (yield _are_squashed(node.inputs[1:], known))
        case op_type:
            averages = op_type in _AVERAGING | {"Sqrt"}
            return averages and bool((yield _are_squashed(node.inputs[:1], known)))


def _are_squashed(values: Iterable[ir.Value | None], known: _Known) -> Steps[bool]:
    for value in values:
        found: Squashed | None = None if value is None else (yield _squashed(value, known))
        if found is None or found.kind == "log_softmax":
            return False
    return True


def _is_divided_by_sum(node: ir.Node) -> bool:
    """Whether a Div is x / Σ x, also with small numbers added to avoid division by zero."""
    above = _first(node)
    below, guarded = producer_of(node.inputs[1], "Add"), producer_of(above, "Add")
    if below is not None and guarded is not None:
        return any(_is_sum(producer_of(value), guarded.inputs) for value in below.inputs)
    return _is_sum(producer_of(_source(node.inputs[1])), [above])


def _is_average(node: ir.Node, known: _Known) -> Steps[bool]:
    """Whether a node computes the mean of probabilities, also as a sum of n, divided by n."""
    if node.op_type == "Mean":
        return bool((yield _are_squashed(node.inputs, known)))
    for total, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
        number = None if other is None else constant_tensor(other)
        if (
            number is None
            or number.size != 1
            or (node.op_type == "Div" and total is not node.inputs[0])
        ):
            continue
        factor = float(number.numpy().reshape(()))
        summands = _summands(total)
        count = factor if node.op_type == "Div" else 1 / factor if factor else 0.0
        if len(summands) > 1 and math.isclose(count, len(summands), rel_tol=1e-3):
            return bool((yield _are_squashed(summands, known)))
    return False


def _summands(total: ir.Value | None) -> list[ir.Value | None]:
    found: list[ir.Value | None] = []
    pending = [total]
    while pending:
        value = pending.pop()
        node = producer_of(value, "Add", "Sum")
        if node is None:
            found.append(value)
        else:
            pending += reversed(node.inputs)
    return found


def _is_sum(node: ir.Node | None, of: Sequence[ir.Value | None]) -> bool:
    return node is not None and node.op_type in ("ReduceSum", "ReduceL1") and node.inputs[0] in of


def _is_complement(node: ir.Node) -> bool:
    """Whether a Concat has the inputs 1 − p and p."""
    if len(node.inputs) != 2:
        return False
    for one, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
        rest = producer_of(one, "Sub")
        if rest is not None and _is_number(rest.inputs[0], 1):
            return rest.inputs[1] is other
    return False


def _shifted(value: ir.Value) -> ir.Value:
    """Returns x for x − max(x), and any other value unchanged."""
    node = producer_of(value, "Sub")
    if node is None:
        return value
    largest = producer_of(node.inputs[1], "ReduceMax")
    return _first(node) if _input_of(largest) is node.inputs[0] else value


def _reduced_axis(node: ir.Node, result: ir.Value | None = None) -> int | None:
    """Returns the single axis that a node reduces, if it has size 1 in the result."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if axes is None else constant_tensor(axes)
    if tensor is None or tensor.size != 1:
        return None
    axis = int(tensor.numpy().reshape(()))
    if attribute_values(node).get("keepdims", 1):
        return axis
    before = _first(node).shape
    after = None if result is None else result.shape
    if before is None or after is None or len(before) != len(after):
        return None
    return axis if after[axis] == 1 else None


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _input_of(node: ir.Node | None) -> ir.Value | None:
    return None if node is None else node.inputs[0]


def _source(value: ir.Value | None) -> ir.Value | None:
    """Returns the value before nodes that only move elements."""
    while (node := producer_of(value, *MOVES)) is not None:
        value = node.inputs[0]
    return value


def _is_share(value: ir.Value | None) -> bool:
    """Whether a value is a constant between 0 and 1."""
    tensor = None if value is None else constant_tensor(value)
    if tensor is None or tensor.size > 1 << 20:
        return False
    array = tensor.numpy()
    return bool(np.all((array >= 0) & (array <= 1)))


def _is_number(value: ir.Value | None, number: float) -> bool:
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.size == 1 and bool(np.all(tensor.numpy() == number))
