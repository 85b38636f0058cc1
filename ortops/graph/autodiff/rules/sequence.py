"""Rules of sequences and optionals: the cotangent of a sequence is a sequence.

The rule of SequenceMap is in `ortops.graph.autodiff.rules.control_flow`.
"""

from __future__ import annotations

import numpy as np

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.shapes import map_sequences
from ortops.graph.tensor import Tensor, op, zeros_like


@vjp("SequenceConstruct")
def sequence_construct(g: Tensor, y: Tensor, *xs: Tensor) -> Cotangents:
    return tuple(_at(g, index, x) for index, x in enumerate(xs))


@vjp("SequenceAt")
def sequence_at(g: Tensor, y: Tensor, sequence: Tensor, position: Tensor) -> Cotangents:
    place = _from_front(sequence, position)
    zeros = map_sequences(zeros_like, sequence)
    return op.SequenceInsert(op.SequenceErase(zeros, place), g, place)


@vjp("SequenceInsert")
def sequence_insert(
    g: Tensor, y: Tensor, sequence: Tensor, tensor: Tensor, position: Tensor | None = None
) -> Cotangents:
    if position is None:  # the last element; the backward pass need not keep the sequence
        return op.SequenceErase(g), _at(g, -1, tensor)
    place = _from_front(sequence, position)
    return op.SequenceErase(g, place), _at(g, place, tensor)


@vjp("SequenceErase")
def sequence_erase(
    g: Tensor, y: Tensor, sequence: Tensor, position: Tensor | None = None
) -> Cotangents:
    place = _from_front(sequence, -1 if position is None else position)
    erased = op.SequenceAt(sequence, place)
    return op.SequenceInsert(g, zeros_like(erased), place)


@vjp("ConcatFromSequence")
def concat_from_sequence(
    g: Tensor, y: Tensor, sequence: Tensor, *, axis: int, new_axis: int = 0
) -> Cotangents:
    if new_axis:
        return op.SplitToSequence(g, axis=axis, keepdims=0)
    end = None if axis == -1 else axis + 1
    sizes = map_sequences(lambda x: op.Shape(x, start=axis, end=end), sequence)
    return op.SplitToSequence(g, op.ConcatFromSequence(sizes, axis=0), axis=axis)


@vjp("SplitToSequence")
def split_to_sequence(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    split: Tensor | None = None,
    *,
    axis: int = 0,
    keepdims: int = 1,
) -> Cotangents:
    # Without a split, the parts have size 1, and are stacked along a new axis if keepdims is 0.
    return op.ConcatFromSequence(g, axis=axis, new_axis=int(split is None and not keepdims))


@vjp("Optional")
def optional(g: Tensor, y: Tensor, x: Tensor | None = None, *, type: object = None) -> Cotangents:  # noqa: A002
    return g


@vjp("OptionalGetElement")
def optional_get_element(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g


def _at(sequence: Tensor, place: int | Tensor, like: Tensor) -> Tensor:
    return op.SequenceAt(sequence, place).with_shape_of(like)


def _from_front(sequence: Tensor, position: int | Tensor) -> int | Tensor:
    """Returns a position counted from the front."""
    known = position if isinstance(position, int) else position.constant
    if known is not None and int(known) >= 0:
        return position
    if not isinstance(position, int):
        position = position.astype(np.int64)
    length = op.SequenceLength(sequence)
    if known is not None:
        return op.Add(length, position)
    return op.Where(op.Less(position, 0), op.Add(position, length), position)
