"""Recognizing what ends a model: a Softmax, a LogSoftmax or a Sigmoid, and the logits before it.

Shipped classifiers give probabilities. A loss that reads logits would squash them a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.graph.edit import attribute_values, inner_graphs, is_float
from ortops.graph.tensor import constant_tensor

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
    """How a tensor was squashed to probabilities, or to their logarithms.

    Attributes:
        kind: By what: ``"complement"`` are 1 − p and p of the Sigmoid of one number, and
            ``"probabilities"`` stands for all that has no logits.
        node: The node that did it.
        logits: What was squashed, where there is such a thing.
        axis: The axis over which probabilities sum to one, where that is known.
        path: The nodes between the squashed values and the tensor, which only move elements.
        opposite: Whether the logits are −z and z, so that their two Sigmoids sum to one.
    """

    kind: Kind
    node: ir.Node
    logits: ir.Value | None = None
    axis: int | None = None
    path: tuple[ir.Node, ...] = ()
    opposite: bool = False


def squashed(value: ir.Value) -> Squashed | None:
    """Tells how a tensor was squashed to probabilities; None where it was not, as far as is known.

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
        elif (exact := _before_rounding(node)) is not None:
            value = exact
        else:
            break
    if node is None or node.domain not in ("", _ML, _MICROSOFT):
        return None
    for recognize in (_softmax, _log_softmax, _sigmoid, _complement):
        found = recognize(node)
        if found is not None:
            kind, logits, axis = found
            if chosen and kind != "sigmoid":  # a class alone has no logit of its own
                return Squashed("probabilities", node)
            moved = any(each.op_type in _MOVING for each in path)
            if kind == "sigmoid" and not path and _are_opposite(logits):
                return Squashed(kind, node, logits, 1, opposite=True)
            return Squashed(kind, node, logits, None if moved else axis, tuple(path))
    if _is_normalizer(node):  # of what sums to one already, in scikit-learn's classifiers
        inner = squashed(_first(node))
        if inner is not None and inner.kind == "softmax" and inner.axis in (1, -1) and not path:
            return inner
    return Squashed("probabilities", node) if _holds_probabilities(node, value) else None


_Found: TypeAlias = tuple[Kind, ir.Value, int | None]


def _passes_on(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _KEEPING | _MOVING | _CHOOSING:
        return False
    source = node.inputs[0]
    return source is not None and is_float(source)


def _before_rounding(node: ir.Node) -> ir.Value | None:
    """Returns what a QuantizeLinear node rounds whose values a node gives."""
    if node.op_type != "DequantizeLinear":
        return None
    rounding = _first(node).producer()
    if rounding is None or rounding.op_type != "QuantizeLinear":
        return None
    return _first(rounding)


def _softmax(node: ir.Node) -> _Found | None:
    """Recognizes Softmax, also written Exp / ReduceSum / Div."""
    if node.op_type == "Softmax":
        return "softmax", _first(node), attribute_values(node).get("axis", -1)
    if node.op_type != "Div":
        return None
    above, below = (_producer(value) for value in node.inputs)
    if above is None or below is None or (above.op_type, below.op_type) != ("Exp", "ReduceSum"):
        return None
    if below.inputs[0] is not above.outputs[0]:
        return None
    return "softmax", _shifted(_first(above)), _reduced_axis(below)


def _log_softmax(node: ir.Node) -> _Found | None:
    """Recognizes LogSoftmax, also written Log of Softmax, x − log Σ exp x."""
    if node.op_type == "LogSoftmax":
        return "log_softmax", _first(node), attribute_values(node).get("axis", -1)
    if node.op_type == "Log":
        inner = _producer(node.inputs[0])
        found = None if inner is None else _softmax(inner)
        return None if found is None else ("log_softmax", *found[1:])
    if node.op_type != "Sub":
        return None
    logits, norm = _first(node), _producer(node.inputs[1])
    if norm is not None and norm.op_type == "ReduceLogSumExp" and norm.inputs[0] is logits:
        return "log_softmax", logits, _reduced_axis(norm)
    total = None if norm is None or norm.op_type != "Log" else _producer(norm.inputs[0])
    exp = None if total is None or total.op_type != "ReduceSum" else _producer(total.inputs[0])
    if total is None or exp is None or exp.op_type != "Exp" or exp.inputs[0] is not logits:
        return None
    return "log_softmax", _shifted(logits), _reduced_axis(total)


def _sigmoid(node: ir.Node) -> _Found | None:
    """Recognizes Sigmoid, also written 1 / (1 + exp(−x))."""
    if node.op_type == "Sigmoid":
        return "sigmoid", _first(node), None
    if node.op_type == "Div" and _is_number(node.inputs[0], 1):
        below = _producer(node.inputs[1])
    elif node.op_type == "Reciprocal":
        below = _producer(node.inputs[0])
    else:
        return None
    if below is None or below.op_type != "Add":
        return None
    exps = [_producer(value) for value in below.inputs if not _is_number(value, 1)]
    exp = exps[0] if len(exps) == 1 else None
    negative = None if exp is None or exp.op_type != "Exp" else _producer(exp.inputs[0])
    if negative is None or negative.op_type != "Neg":
        return None
    return "sigmoid", _first(negative), None


def _complement(node: ir.Node) -> _Found | None:
    """Recognizes 1 − p and p of a Sigmoid, joined."""
    if node.op_type != "Concat" or not _is_complement(node):
        return None
    for value in node.inputs:
        found = _producer(value)
        inner = None if found is None else _sigmoid(found)
        if inner is not None:
            return "complement", inner[1], attribute_values(node)["axis"]
    return None


def _are_opposite(logits: ir.Value) -> bool:
    """Whether rows hold −z and z, as scikit-learn's classifiers of two classes have it."""
    node = _producer(logits)
    if node is not None and node.op_type == "Reshape":
        shape = None if node.inputs[1] is None else constant_tensor(node.inputs[1])
        if shape is not None and shape.numpy().tolist() == [-1, 2]:
            node = _producer(node.inputs[0])
    if node is None:
        return False
    if node.op_type == "Concat" and len(node.inputs) == 2:
        negative, other = _producer(node.inputs[0]), node.inputs[1]
        on_classes = attribute_values(node)["axis"] in (1, -1)
        is_negative = negative is not None and negative.op_type == "Neg"
        return on_classes and is_negative and negative is not None and _first(negative) is other
    product: ir.Node | None = node
    shift = list(node.inputs[2:])
    if node.op_type == "Add":
        product, shift = _producer(node.inputs[0]), [node.inputs[1]]
    if product is None or product.op_type not in ("Gemm", "MatMul"):
        return False
    weights = _array(product.inputs[1])
    if weights is not None and not attribute_values(product).get("transB", 0):
        weights = weights.T
    rows = [weights, *map(_array, shift)]
    return all(a is not None and len(a) == 2 and np.array_equal(a[0], -a[1]) for a in rows)


def _array(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Returns the value of a constant of at least one axis, or of a transposed matrix."""
    node = _producer(value)
    if node is not None and node.op_type == "Transpose":
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
    """Whether a node is a classifier of ``ai.onnx.ml`` that squashes its scores itself."""
    if node.domain != _ML or not node.op_type.endswith("Classifier"):
        return False
    transform = attribute_values(node).get("post_transform", "NONE")
    return transform in ("SOFTMAX", "LOGISTIC", b"SOFTMAX", b"LOGISTIC")


def _holds_probabilities(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node gives probabilities that have no logits: of others, or as x / Σ x."""
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
        case "Div":
            return _is_divided_by_sum(node)
        case "Sub":
            return _is_number(node.inputs[0], 1) and _is_squashed(node.inputs[1])
        case op_type:
            return op_type in _AVERAGING and _is_squashed(node.inputs[0])


def _is_squashed(value: ir.Value | None) -> bool:
    found = None if value is None else squashed(value)
    return found is not None and found.kind != "log_softmax"


def _is_divided_by_sum(node: ir.Node) -> bool:
    """Whether a Div is x / Σ x, also where numbers are added to both for a sum of zero."""
    above, below = _first(node), _producer(node.inputs[1])
    guarded = _producer(above)
    if below is not None and guarded is not None and below.op_type == guarded.op_type == "Add":
        return any(_is_sum(_producer(value), guarded.inputs) for value in below.inputs)
    while below is not None and below.op_type in _MOVING:
        below = _producer(below.inputs[0])
    return _is_sum(below, [above])


def _is_sum(node: ir.Node | None, of: Sequence[ir.Value | None]) -> bool:
    return node is not None and node.op_type in ("ReduceSum", "ReduceL1") and node.inputs[0] in of


def _is_complement(node: ir.Node) -> bool:
    """Whether a Concat joins 1 − p and p."""
    if len(node.inputs) != 2:
        return False
    for one, other in (tuple(node.inputs), tuple(reversed(node.inputs))):
        rest = _producer(one)
        if rest is not None and rest.op_type == "Sub" and _is_number(rest.inputs[0], 1):
            return rest.inputs[1] is other
    return False


def _shifted(value: ir.Value) -> ir.Value:
    """Returns x of x − max x, and other values as they are."""
    node = _producer(value)
    if node is None or node.op_type != "Sub":
        return value
    largest = _producer(node.inputs[1])
    if largest is None or largest.op_type != "ReduceMax" or largest.inputs[0] is not node.inputs[0]:
        return value
    return _first(node)


def _reduced_axis(node: ir.Node) -> int | None:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if axes is None else constant_tensor(axes)
    if tensor is None or tensor.size != 1 or not attribute_values(node).get("keepdims", 1):
        return None
    return int(tensor.numpy().reshape(()))


def _first(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _producer(value: ir.Value | None) -> ir.Node | None:
    node = None if value is None else value.producer()
    return None if node is None or node.domain else node


def _is_number(value: ir.Value | None, number: float) -> bool:
    tensor = None if value is None else constant_tensor(value)
    return tensor is not None and tensor.size == 1 and bool(np.all(tensor.numpy() == number))
