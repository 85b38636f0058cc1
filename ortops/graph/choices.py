"""Which elements Gather, Slice and Split choose, as far as constants tell."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from ortops.graph.constants import constant_tensor
from ortops.graph.edit import rank_of

CHOOSING = frozenset({"Gather", "Slice", "Split"})
"""Operators that choose elements of their first input."""


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """Returns the elements of a constant; None for what is none, or absent."""
    tensor = None if value is None else constant_tensor(value)
    return None if tensor is None else [int(each) for each in tensor.numpy().reshape(-1)]


def chosen_axes(node: ir.Node) -> list[int] | None:
    """Returns the axes along which a node chooses; None if they are unknown."""
    rank = rank_of(node.inputs[0])
    if node.op_type != "Slice":
        return [(node.attributes.get_int("axis", 0) or 0) % rank] if rank else None
    if not any(node.inputs[3:4]):
        starts = constant_integers(node.inputs[1])
        return None if starts is None else list(range(len(starts)))
    axes = constant_integers(node.inputs[3])
    return None if axes is None or not rank else [axis % rank for axis in axes]


def chosen_indices(node: ir.Node, result: ir.Value, axis: int) -> Sequence[int] | None:
    """Returns the indices that a node chooses along one of its axes, from 0 on.

    Args:
        node: The node.
        result: Its output.
        axis: The axis.

    Returns:
        The indices; None if they are unknown, some do not exist, or the node does not choose.
    """
    axes, x = chosen_axes(node), node.inputs[0]
    if (
        node.op_type not in CHOOSING
        or axes is None
        or axis not in axes
        or x is None
        or x.shape is None
    ):
        return None
    known = x.shape[axis]
    size = known if isinstance(known, int) else None
    if node.op_type == "Gather":
        chosen = constant_integers(node.inputs[1])
        if chosen is None or any(not -(size or 0) <= each < (size or each + 1) for each in chosen):
            return None
        return [each % size if size else each for each in chosen]
    if size is None:
        return None
    if node.op_type == "Split":
        count, place = len(node.outputs), list(node.outputs).index(result)
        equal = [-(-size // count)] * count
        lengths = constant_integers(node.inputs[1]) if any(node.inputs[1:]) else equal
        bounds = list(itertools.accumulate(lengths or (), initial=0))
        return range(size)[bounds[place] : bounds[place + 1]] if lengths else None
    place = axes.index(axis)
    starts, ends = (constant_integers(value) for value in node.inputs[1:3])
    steps = constant_integers(node.inputs[4]) if any(node.inputs[4:5]) else [1] * len(axes)
    if starts is None or ends is None or steps is None:
        return None
    return range(size)[starts[place] : ends[place] : steps[place]]
