"""Finds the Softmax, LogSoftmax or Sigmoid at the end of a model, and the logits before it.

Shipped classifiers output probabilities. A loss on logits would apply the function a second time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import attribute_values, inner_graphs, is_float, producer_of
from ortops.graph.tensor import constant_tensor
from ortops.numbers import Array

__all__ = ["Squashed", "squashed"]

Kind: TypeAlias = Literal["softmax", "log_softmax", "sigmoid", "complement", "probabilities"]

_ML = "ai.onnx.ml"
_MICROSOFT = "com.microsoft"

_KEEPING = frozenset({"Cast", "Identity"})
_MOVING = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_CHOOSING = frozenset({"Gather", "Slice"})
_AVERAGING = frozenset(
    {"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReduceMax", "ReduceMean"}
    | {"ReduceMin"}
)


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
    """

    kind: Kind
    node: ir.Node
    logits: ir.Value | None = None
    squashed_axis: int | None = None
    axis: int | None = None
    path: tuple[ir.Node, ...] = ()
    opposite: bool = False


def squashed(value: ir.Value) -> Squashed | None:
    """Finds the function that made a tensor probabilities; None if there is none.

    Args:
        value: A tensor of a graph at opset 13 or later.
    """
    path: list[ir.Node] = []
    chosen = False
    while (node := value.producer()) is not None:
        if _passes_on(node):
            chosen |= node.op_type in _CHOOSING
            path.insert(0, node)
            value = _first(node)
        elif (exact := _before_rounding(node) or _before_limits(node)) is not None:
            value = exact
        else:
            break
    if node is None or node.domain not in ("", _ML, _MICROSOFT):
        return None
    for recognize in (_softmax, _log_softmax, _sigmoid, _complement):
        found = recognize(node)
        if found is not None:
            kind, logits, axis = found
            if chosen and kind != "sigmoid":  # a single class has no logit
                return Squashed("probabilities", node)
            opposite = None if chosen or kind != "sigmoid" else _opposite_axis(logits)
            axis = axis if opposite is None else opposite
            moved = _moved_axis(axis, value, path)
            is_opposite = opposite is not None
            return Squashed(kind, node, logits, axis, moved, tuple(path), is_opposite)
    if _is_normalizer(node):  # applied to probabilities by scikit-learn
        inner = squashed(_first(node))
        if inner is not None and inner.kind == "softmax" and inner.axis in (1, -1) and not path:
            return inner
    return Squashed("probabilities", node) if _holds_probabilities(node, value) else None


_Found: TypeAlias = tuple[Kind, ir.Value, int | None]


def _moved_axis(axis: int | None, value: ir.Value, path: Sequence[ir.Node]) -> int | None:
    """Follows an axis of a value through nodes that move elements; None if it is unknown."""
    for node in path:
        if axis is None:
            return None
        if node.op_type not in _MOVING:
            continue
        source, result = _first(node).shape, node.outputs[0].shape
        if source is None or result is None:
            return None
        before, after = list(source), list(result)
        axis %= len(before)
        if node.op_type == "Transpose":
            order = attribute_values(node).get("perm") or range(len(before))[::-1]
            axis = list(order).index(axis)
        else:
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
    if node.domain or node.op_type not in _KEEPING | _MOVING | _CHOOSING:
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
    node = producer_of(value, "Transpose")
    if node is not None:
        matrix = _array(_first(node))
        return None if matrix is None or matrix.ndim != 2 else matrix.T
    tensor = None if value is None else constant_tensor(value)
    return None if tensor is None else np.atleast_1d(tensor.numpy())


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


def _holds_probabilities(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node outputs probabilities without logits, such as x / Σ x or an average."""
    if node.domain:
        return _is_normalizer(node) or _is_classifier(node)
    match node.op_type:
        case "Concat":
            return _is_complement(node) or all(_is_squashed(each) for each in node.inputs)
        case "If":
            index = node.outputs.index(value)
            return all(_is_squashed(graph.outputs[index]) for graph in inner_graphs(node))
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
            return _is_divided_by_sum(node) or _is_average(node)
        case "Mul" | "Mean":
            return _is_average(node)
        case "Sub":
            return _is_number(node.inputs[0], 1) and _is_squashed(node.inputs[1])
        case op_type:
            return op_type in _AVERAGING and _is_squashed(node.inputs[0])


def _is_squashed(value: ir.Value | None) -> bool:
    found = None if value is None else squashed(value)
    return found is not None and found.kind != "log_softmax"


def _is_divided_by_sum(node: ir.Node) -> bool:
    """Whether a Div is x / Σ x, also with small numbers added to avoid division by zero."""
    above = _first(node)
    below, guarded = producer_of(node.inputs[1], "Add"), producer_of(above, "Add")
    if below is not None and guarded is not None:
        return any(_is_sum(producer_of(value), guarded.inputs) for value in below.inputs)
    return _is_sum(producer_of(_source(node.inputs[1])), [above])


def _is_average(node: ir.Node) -> bool:
    """Whether a node computes the mean of probabilities, also as a sum of n, divided by n."""
    if node.op_type == "Mean":
        return all(_is_squashed(value) for value in node.inputs)
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
            return all(map(_is_squashed, summands))
    return False


def _summands(value: ir.Value | None) -> list[ir.Value | None]:
    node = producer_of(value, "Add", "Sum")
    if node is None:
        return [value]
    return [each for given in node.inputs for each in _summands(given)]


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
    while (node := producer_of(value, *_MOVING)) is not None:
        value = node.inputs[0]
    return value


def _is_number(value: ir.Value | None, number: float) -> bool:
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.size == 1 and bool(np.all(tensor.numpy() == number))
