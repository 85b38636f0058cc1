"""The normal form of a graph: one form for one computation, whichever exporter wrote the file.

The other passes and the gradient rules look for certain operators, so nodes that do nothing, and
roundabout forms of an operator, are replaced before they look. To add a form, write a pattern and
add it to `PATTERNS`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import onnx_ir as ir

from ortops.graph.choices import chosen_axes, chosen_indices
from ortops.graph.constants import constant_number, constant_tensor
from ortops.graph.edit import (
    Steps,
    attribute_values,
    permutation_of,
    producer_of,
    rank_of,
    unrolled,
)
from ortops.graph.files.serialization import BOUND_DOMAIN
from ortops.graph.folding import fold
from ortops.graph.matching import Found, Number, Variable, form, kept
from ortops.graph.passes.draft import SESSION, Draft, Pass
from ortops.graph.passes.rewrite import (
    Pattern,
    Result,
    formula,
    pattern,
    rewrite_with_bodies,
)
from ortops.graph.tensor import Tape, Tensor, op


@pattern("Identity")
def _identity(node: ir.Node, tape: Tape) -> Result:
    """Identity(x) is x."""
    return _first(node, tape)


@pattern("CastLike")
def _cast_like(node: ir.Node, tape: Tape) -> Result:
    """CastLike(x, y) is Cast(x), or x if both have the same type."""
    x, like = node.inputs
    if x is None or like is None or x.dtype is None or like.dtype is None:
        return None
    if like.dtype == x.dtype:
        return _first(node, tape)
    attributes = {key: value for key, value in attribute_values(node).items() if key == "saturate"}
    result: Tensor = op.Cast(tape.tensor(x), to=like.dtype, **attributes)
    return result


@pattern("Cast")
def _cast(node: ir.Node, tape: Tape) -> Result:
    """Cast(x) is x if it has that type already."""
    (x,) = node.inputs
    same = x is not None and x.dtype is not None and x.dtype == node.outputs[0].dtype
    return _first(node, tape) if same else None


@pattern("Dropout")
def _dropout(node: ir.Node, tape: Tape) -> Result:
    """Dropout(x) is x if its ratio is 0, or if it is not in training mode."""
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return None
    _, ratio, mode = (*node.inputs, None, None)[:3]
    is_zero = ratio is not None and constant_number(ratio) == 0
    training = None if mode is None else constant_tensor(mode)
    is_off = mode is None or (training is not None and not training.numpy().any())
    return [_first(node, tape)] if is_zero or is_off else None


@pattern("Transpose")
def _transpose(node: ir.Node, tape: Tape) -> Result:
    """Transpose(Transpose(x)) is one Transpose, or x; Transpose in the given order is x."""
    x, order = node.inputs[0], permutation_of(node)
    if x is None or order is None:
        return None
    source, whole = _source(x, order)
    if source is x and list(whole) != sorted(whole):
        return None
    return _transposed(source, whole, tape)


_LIST, _PLACE = Variable("the tensor"), Number()
_SPLIT = form.SplitToSequence(_LIST, ...)


@formula(form.SequenceAt(kept(_SPLIT), _PLACE))
def _sequence_at(found: Found, tape: Tape) -> Result:
    """SequenceAt(SplitToSequence(x), n) is output n of Split(x), or a Slice of it."""
    x, split, position = found[_LIST], found.node(_SPLIT), int(found.number(_PLACE))
    if x.shape is None:
        return None
    axis = attribute_values(split).get("axis", 0) % len(x.shape)
    size = x.shape[axis]
    if not isinstance(size, int):
        return None
    given = split.inputs[1] if len(split.inputs) > 1 else None
    lengths = [1] * size
    if given is not None:
        tensor = constant_tensor(given)
        if tensor is None:
            return None
        parts = tensor.numpy()
        if parts.ndim:
            lengths = [int(part) for part in parts]
        else:
            step = int(parts)
            lengths = [min(step, size - low) for low in range(0, size, step)] if step > 0 else []
    if not -len(lengths) <= position < len(lengths):
        return None  # the run fails
    ends = list(itertools.accumulate(lengths, initial=0))
    low, high = ends[position % len(lengths)], ends[position % len(lengths) + 1]
    part = op.Slice(tape.tensor(x), [low], [high], [axis])
    keeps = attribute_values(split).get("keepdims", 1)
    return part if given is not None or keeps else op.Squeeze(part, [axis])


@pattern("Gather", "Slice")
def _part(node: ir.Node, tape: Tape) -> Result:
    """Slices and Gathers of one index that cover an axis once are the outputs of a Split(x).

    A Slice of a whole axis is x. The gradient of a Split is one Concat, and that of each part a Pad
    to the size of x. Integers have no gradient, and the parts of shapes are folded.
    """
    x, span = node.inputs[0], _span(node)
    if x is None or x.shape is None or span is None:
        return None
    axis, low, high = span
    if (low, high) == (0, x.shape[axis]) and node.op_type == "Slice":
        return tape.tensor(x)
    if x.dtype is None or not x.dtype.is_floating_point():
        return None
    part = tape.once(("parts", x, axis), lambda: _split(x, axis, tape)).get((low, high))
    return op.Squeeze(part, [axis]) if part is not None and node.op_type == "Gather" else part


def _split(x: ir.Value, axis: int, tape: Tape) -> dict[tuple[int, int], Tensor]:
    """Returns the outputs of a Split by their bounds; none if the parts of x do not cover it."""
    assert x.shape is not None
    size = x.shape[axis]
    parts = (u for u, _ in x.uses() if u.op_type in ("Gather", "Slice") and not u.domain)
    free = (each for each in parts if each.graph is tape.graph and not _is_named(each.outputs[0]))
    spans = (span for each in free if (span := _span(each)) is not None and span[0] == axis)
    bounds = sorted({(low, high) for _, low, high in spans} - {(0, size)})
    if [0, *(high for _, high in bounds)] != [*(low for low, _ in bounds), size]:
        return {}
    made = op.Split(tape.tensor(x), [high - low for low, high in bounds], axis=axis)
    return dict(zip(bounds, made, strict=True))


def _span(node: ir.Node) -> tuple[int, int, int] | None:
    """Returns the axis of a part, its first index, and the one after its last.

    Returns:
        None for several axes, several indices of a Gather, a step other than 1, no elements, or
        what is not constant.
    """
    x, axes = node.inputs[0], chosen_axes(node)
    if x is None or x.shape is None or axes is None or len(axes) != 1:
        return None
    if node.op_type == "Gather" and rank_of(node.inputs[1]) != 0:
        return None
    indices = chosen_indices(node, node.outputs[0], axes[0])
    if not indices or not isinstance(x.shape[axes[0]], int):
        return None
    low, high = indices[0], indices[-1] + 1
    return (axes[0], low, high) if high - low == len(indices) else None


_X, _MASK = Variable("the scores"), Variable("the mask")
_MASKED = _X + _MASK


@formula(_MASKED)
def _empty_mask(found: Found, tape: Tape) -> Result:
    """Softmax(x + mask) is Softmax(x) if the mask is 0, as that of a model without padding.

    Elsewhere, the sum stays: it makes 0 of -0.
    """
    x, y, mask = found[_X], found[_MASKED], found[_MASK]
    if y.is_graph_output() or not all(user.op_type == "Softmax" for user, _ in y.uses()):
        return None
    if None in (tape.tensor(y).shape or [None]) or x.shape != y.shape:
        return None
    return tape.tensor(x) if unrolled(_number(mask)) == 0 else None


def _number(value: ir.Value) -> Steps[float | None]:
    """Returns the number that all elements of a tensor are, if nodes compute it from constants."""
    tensor = None if _is_named(value) else constant_tensor(value)
    if tensor is not None:
        array = tensor.numpy()
        return float(array.flat[0]) if array.size and (array == array.flat[0]).all() else None
    node = producer_of(value, "Expand", "Where")
    if node is None or node.inputs[0] is None:
        return None
    found: float | None = yield _number(node.inputs[0])
    if node.op_type == "Expand" or found is None:
        return found
    chosen = node.inputs[1 if found else 2]
    number: float | None = None if chosen is None else (yield _number(chosen))
    return number


@pattern("SoftmaxCrossEntropyLoss")
def _loss_of_rows(node: ir.Node, tape: Tape) -> Result:
    """The cross-entropy of scores (N, C, d1, …) is that of rows (N·d1·…, C).

    onnxruntime computes a LogSoftmax along another axis than the last by transposing twice; a loss
    whose scores a LogSoftmax reads too shares it.
    """
    scores, labels, *weights = node.inputs
    if scores is None or scores.shape is None or len(scores.shape) < 3 or labels is None:
        return None
    is_shared = any(user.op_type == "LogSoftmax" for user, _ in scores.uses())
    classes = scores.shape[1]
    if is_shared or any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        return None
    if not isinstance(classes, int) or not classes:
        return None
    last = _transposed(*_source(scores, [0, *range(2, len(scores.shape)), 1]), tape)
    targets, factors = tape.tensor(labels), [None if v is None else tape.tensor(v) for v in weights]
    rows, places = op.Reshape(last, [-1, classes]), op.Reshape(targets, [-1])
    loss: Tensor = op.SoftmaxCrossEntropyLoss(rows, places, *factors, **attribute_values(node))
    is_scalar = node.attributes.get_string("reduction", "mean") != "none"
    return [loss if is_scalar else op.Reshape(loss, op.Shape(targets))]


PATTERNS: tuple[Pattern, ...] = (
    _identity,
    _cast_like,
    _cast,
    _dropout,
    _transpose,
    _sequence_at,
)
"""The forms that are replaced first, each by its pattern."""


class _NormalForm(Pass):
    """Replaces roundabout forms before differentiation, and folds constants."""

    def prepare(self, draft: Draft) -> None:
        """Rewrites the graph and its bodies, but no operators with a rule of the user."""

        def is_free(node: ir.Node, *, may_be_y: bool = False) -> bool:
            return draft.is_free(node) and not any(_is_named(y, not may_be_y) for y in node.outputs)

        graph, names = draft.graph, draft.names
        rewrite_with_bodies(graph, names, *PATTERNS, is_free=is_free)
        fold(graph)
        # Only now are bounds of Slices and masks constants, and sequences written as Slices.
        may_be_y = functools.partial(is_free, may_be_y=True)
        rewrite_with_bodies(graph, names, _loss_of_rows, is_free=may_be_y)
        later = [_empty_mask, _part] if draft.is_free(ir.Node("", "Split", [])) else [_empty_mask]
        rewrite_with_bodies(graph, names, *later, is_free=is_free)


def _is_named(value: ir.Value, as_y: bool = True) -> bool:
    """Whether a Gradient node names a tensor; as its y, which is its last input, only if asked."""
    uses = [use for use in value.uses() if use.node.domain == BOUND_DOMAIN]
    return any(as_y or use.idx < len(use.node.inputs) - 1 for use in uses)


def _first(node: ir.Node, tape: Tape) -> Tensor:
    value = node.inputs[0]
    assert value is not None
    return tape.tensor(value)


def _source(x: ir.Value, order: Sequence[int]) -> tuple[ir.Value, Sequence[int]]:
    """Returns what to transpose instead of x, and how, if a Transpose computes x."""
    inner = producer_of(x, "Transpose")
    before = None if inner is None or _is_named(x) else permutation_of(inner)
    if inner is None or before is None:
        return x, order
    source = inner.inputs[0]
    assert source is not None
    return source, [before[axis] for axis in order]


def _transposed(x: ir.Value, order: Sequence[int], tape: Tape) -> Tensor:
    """Emits a Transpose, or returns x if that is in this order."""
    y = tape.tensor(x)
    return y if list(order) == sorted(order) else op.Transpose(y, perm=order)


NORMAL_FORM = _NormalForm("normal_form", SESSION)
