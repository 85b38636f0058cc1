"""Finds the Softmax, LogSoftmax or Sigmoid at the end of a model, and the logits before it.

Shipped classifiers output probabilities. A loss on logits would apply the function a second time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.graph.choices import CHOOSING, chosen_axes, chosen_indices, constant_integers
from ortops.graph.constants import constant_number, constant_tensor
from ortops.graph.edit import (
    Steps,
    attribute_values,
    is_float,
    permutation_of,
    producer_of,
    unrolled,
)
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.matching import Behind, Form, Found, Search, Variable, adds_axes, form
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import MOVES

Kind: TypeAlias = Literal["softmax", "log_softmax", "sigmoid", "complement", "probabilities"]

_ML = "ai.onnx.ml"

_KEEPING = frozenset({"Cast", "Identity"})
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
        elif (exact := _before_rounding(node) or _before_limits(node)) is not None:
            value = exact
        elif (branch := _chosen_branch(node, path)) is not None:
            if not _drop_choice(path, branch, node):
                path.insert(0, Move(node, branch, value))
            value = branch
        else:
            break
    if node is None or node.domain not in ("", _ML, MICROSOFT):
        return None
    for kind, pattern in _FORMS.items():
        found = _is_one_of(node.outputs[0], pattern)
        if found is not None:
            logits, axis = found[_X], _axis_of(kind, found)
            chosen = any(move.node.op_type in CHOOSING for move in path)
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
    result = next(move.result for move in path if move.node is chosen)
    indices = chosen_indices(chosen, result, axis)
    if not indices:
        return None
    low = 0
    for value in node.inputs:
        part = None if value is None or value.shape is None else value.shape[axis]
        if value is None or not isinstance(part, int):
            return None
        if low <= min(indices) and max(indices) < low + part:
            return value
        low += part
    return None


def _drop_choice(path: list[Move], branch: ir.Value, concat: ir.Node) -> bool:
    """Removes the node that chooses from a Concat if it returns one input as it was."""
    place = next(n for n, move in enumerate(path) if move.node.op_type not in _KEEPING)
    node, _, result = path[place]
    rank = len(branch.shape or ())
    axis = attribute_values(concat)["axis"] % rank
    indices = chosen_indices(node, result, axis)
    if chosen_axes(node) != [axis] or not isinstance(indices, range) or indices.step != 1:
        return False
    if result.shape is None or result.shape[axis] != (branch.shape or ())[axis]:
        return False
    path.pop(place)
    return True


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
        match node.op_type:
            case "Transpose":
                axis = (permutation_of(node) or ()).index(axis)
            case "Gather" | "Slice" | "Split" | "Concat":
                changed = chosen_axes(node)
                later = len(after) - len(before) if changed and axis > changed[0] else 0
                axis = None if changed is None or axis in changed else axis + later
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


# ---------------------------------------------------------------------------------------- forms

_X, _P, _ANY, _MORE = (Variable(what) for what in ("the logits", "p", "a tensor", "a tensor"))


def _unmoved(value: ir.Value) -> ir.Value | None:
    """Returns the value before a node that only moves elements."""
    node = producer_of(value, *MOVES)
    return None if node is None else node.inputs[0]


def _unlimited(value: ir.Value) -> ir.Value | None:
    node = producer_of(value)
    return None if node is None else _before_limits(node)


def _logistic(exponent: Form) -> Form:
    """Returns the form of 1 / (1 + eˣ)."""
    total = 1 + form.Exp(exponent)
    return 1 / total | form.Reciprocal(total)


def _is_one_of(value: ir.Value, pattern: Form) -> Found | None:
    """Returns how a value has a form; None if it has another one."""
    return next(iter(Search(pattern, value, removing=False)), None)


_SHIFTED = _X - form.ReduceMax(_X, ...) | _X
_EXP = form.Exp(_SHIFTED)
_TOTAL = form.ReduceSum(_EXP, ...)
_LOG_TOTAL = form.ReduceLogSumExp(_X, ...)
# Behind nodes that restore the axis.
_NORM, _LOG_NORM = Behind(form.Log(_TOTAL), _unmoved), Behind(_LOG_TOTAL, _unmoved)
_LOG_FUNCTION, _FUNCTION = form.LogSoftmax(_X), form.Softmax(_X)
_DIFFERENCE = _LOG_FUNCTION | _X - _LOG_NORM | _SHIFTED - _NORM
_SOFTMAX = _FUNCTION | form.Exp(_DIFFERENCE) | _EXP / _TOTAL
_LOG_SOFTMAX = _DIFFERENCE | form.Log(Behind(_SOFTMAX, _unlimited))
_SIGMOID = form.Sigmoid(_X) | _logistic(-_X)
_COMPLEMENT = form.Concat(1 - _SIGMOID, _SIGMOID) | form.Concat(_SIGMOID, 1 - _SIGMOID)

_FORMS: Mapping[Kind, Form] = {
    "softmax": _SOFTMAX,
    "log_softmax": _LOG_SOFTMAX,
    "sigmoid": _SIGMOID,
    "complement": _COMPLEMENT,
}

_INVERSE = 1 / _P | form.Reciprocal(_P)
_LOGISTIC = _logistic(_P)
_SUM = form.ReduceSum(_P, ...) | form.ReduceL1(_P, ...)
# Also with small numbers added to avoid division by zero.
_SHARE = _P / Behind(_SUM, _unmoved) | (_P + _ANY) / (_SUM + _MORE)
_OPPOSITE = form.Concat(-_P, _P)
_PAIR = form.Concat(1 - _P, _P) | form.Concat(_P, 1 - _P)


def _axis_of(kind: Kind, found: Found) -> int | None:
    """Returns the axis over which a function normalizes."""
    if kind == "complement":
        axis: int = attribute_values(found.node(_COMPLEMENT))["axis"]
        return axis
    for each in (_FUNCTION, _LOG_FUNCTION):
        if each in found:
            return found.node(each).attributes.get_int("axis", -1)
    for total, norm in ((_LOG_TOTAL, _LOG_NORM), (_TOTAL, _NORM)):
        if total in found:
            return _reduced_axis(found.node(total), found.values.get(norm))
    return None


def _passes_on(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _KEEPING | MOVES | CHOOSING:
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
    limits = [each for each in node.inputs[1:] if each is not None]
    numbers = [constant_number(each) for each in limits]
    if None in numbers or any(adds_axes(each, node.inputs[0]) for each in limits):
        return None
    ends = {"Clip": (0.0, 1.0), "Min": (1.0,)}.get(node.op_type, (0.0,))
    near = (any(abs((number or 0) - end) < 0.01 for end in ends) for number in numbers)
    return _first(node) if all(near) else None


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
        if _is_one_of(node.outputs[0], _OPPOSITE) is None:
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
            is_pair = _is_one_of(value, _PAIR) is not None
            return is_pair or (yield _are_squashed(node.inputs, known))
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
        case "Reciprocal" | "Div" if _is_one_of(value, _INVERSE) is not None:
            return _is_one_of(value, _LOGISTIC) is not None
        case "Div":
            is_share = _is_one_of(value, _SHARE) is not None
            return is_share or (yield _is_average(node, known))
        case "Mul" | "Mean" if (yield _is_average(node, known)):
            return True
        case op_type if op_type in _SHRINKING:
            others = [each for each in node.inputs if not _is_share(each)]
            return bool(others) and (yield _are_squashed(others, known))
        case "Sub":
            return _is_one_of(value, 1 - _P) is not None and (
                yield _are_squashed(node.inputs[1:], known)
            )
        case op_type:
            averages = op_type in _AVERAGING | {"Sqrt"}
            return averages and bool((yield _are_squashed(node.inputs[:1], known)))


def _are_squashed(values: Iterable[ir.Value | None], known: _Known) -> Steps[bool]:
    for value in values:
        found: Squashed | None = None if value is None else (yield _squashed(value, known))
        if found is None or found.kind == "log_softmax":
            return False
    return True


def _is_average(node: ir.Node, known: _Known) -> Steps[bool]:
    """Whether a node computes the mean of probabilities, also as a sum of n, divided by n."""
    if node.op_type == "Mean":
        return bool((yield _are_squashed(node.inputs, known)))
    for total, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
        factor = None if other is None else constant_number(other)
        if factor is None or (node.op_type == "Div" and total is not node.inputs[0]):
            continue
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


def _reduced_axis(node: ir.Node, result: ir.Value | None = None) -> int | None:
    """Returns the single axis that a node reduces, if it has size 1 in the result."""
    axes = constant_integers(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or len(axes) != 1:
        return None
    (axis,) = axes
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


def _is_share(value: ir.Value | None) -> bool:
    """Whether a value is a constant between 0 and 1."""
    tensor = None if value is None else constant_tensor(value)
    if tensor is None or tensor.size > 1 << 20:
        return False
    array = tensor.numpy()
    return bool(np.all((array >= 0) & (array <= 1)))
