"""The normal form of a graph: one form for one computation, whichever exporter wrote the file.

The other passes and the gradient rules look for certain operators, so nodes that do nothing, and
roundabout forms of an operator, are replaced before they look. To add a form, write a pattern and
add it to `PATTERNS`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import onnx_ir as ir

from ortops.graph.edit import attribute_values, producer_of
from ortops.graph.files.serialization import BOUND_DOMAIN
from ortops.graph.folding import fold
from ortops.graph.tensor import Tape, Tensor, constant_number, constant_tensor, op
from ortops.passes.draft import SESSION, Draft, Pass
from ortops.passes.rewrite import Pattern, Result, pattern, rewrite

__all__ = ["NORMAL_FORM", "PATTERNS"]


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
    order = _order(node)
    inner = producer_of(node.inputs[0], "Transpose")
    if order is None:
        return None
    source = node.inputs[0]
    before = None if inner is None else _order(inner)
    if inner is not None and before is not None:
        source, order = inner.inputs[0], [before[axis] for axis in order]
    assert source is not None
    if order == sorted(order):
        return tape.tensor(source)
    return op.Transpose(tape.tensor(source), perm=order) if source is not node.inputs[0] else None


@pattern("SequenceAt")
def _sequence_at(node: ir.Node, tape: Tape) -> Result:
    """SequenceAt(SplitToSequence(x), n) is output n of Split(x), or a Slice of it."""
    split = producer_of(node.inputs[0], "SplitToSequence")
    position = None if node.inputs[1] is None else constant_number(node.inputs[1])
    x = None if split is None else split.inputs[0]
    if split is None or x is None or x.shape is None or position is None:
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
    low, high = ends[int(position) % len(lengths)], ends[int(position) % len(lengths) + 1]
    part = op.Slice(tape.tensor(x), [low], [high], [axis])
    keeps = attribute_values(split).get("keepdims", 1)
    return part if given is not None or keeps else op.Squeeze(part, [axis])


PATTERNS: tuple[Pattern, ...] = (
    _identity,
    _cast_like,
    _cast,
    _dropout,
    _transpose,
    _sequence_at,
)
"""The forms that are replaced, each by its pattern."""


class _NormalForm(Pass):
    """Replaces roundabout forms before differentiation, and folds constants."""

    def prepare(self, draft: Draft) -> None:
        """Rewrites the graph, except for operators with a rule of the user."""
        rewrite(draft.graph, draft.names, *(_unless_bound(each, draft) for each in PATTERNS))
        fold(draft.graph)


def _unless_bound(given: Pattern, draft: Draft) -> Pattern:
    """Returns a pattern that skips tensors that a Gradient node names, and a user's operators."""

    def function(node: ir.Node, tape: Tape) -> Result:
        if not draft.is_free(node) or any(map(_is_named, node.outputs)):
            return None
        return given.function(node, tape)

    return replace(given, function=function)


def _is_named(value: ir.Value) -> bool:
    return any(user.domain == BOUND_DOMAIN for user, _ in value.uses())


def _first(node: ir.Node, tape: Tape) -> Tensor:
    value = node.inputs[0]
    assert value is not None
    return tape.tensor(value)


def _order(node: ir.Node) -> list[int] | None:
    """Returns the order of axes of a Transpose; None if its rank is unknown."""
    order = attribute_values(node).get("perm")
    shape = node.outputs[0].shape
    if order is None and shape is not None:
        order = range(len(shape))[::-1]
    return None if order is None else list(order)


NORMAL_FORM = _NormalForm("normal_form", SESSION)
