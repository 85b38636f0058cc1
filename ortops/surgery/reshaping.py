"""How the axes of a tensor correspond to those that it has in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.surgery.channels import Axes, Channels, Labels
from ortops.surgery.reading import constant

Sizes: TypeAlias = Sequence[int | str | None]

_Piece: TypeAlias = tuple[int | None, ir.Node, int, int]


def pieces(node: ir.Node, index: int, count: int | None = None) -> list[_Piece] | None:
    """Returns the numbers of a shape that a node reads; None if their count is unknown.

    Each is given with the node and the index of the input that has it, and its place there. Numbers
    that are computed are None.

    Args:
        node: The node.
        index: The index of the input.
        count: How many there are, if it is known.
    """
    value = node.inputs[index]
    array = constant(value)
    if array is not None:
        return [(int(each), node, index, place) for place, each in enumerate(array.reshape(-1))]
    source = None if value is None else value.producer()
    if value is not None and source is not None and not source.domain:
        if source.op_type == "Concat" and len(value.uses()) == 1:
            found = [pieces(source, each) for each in range(len(source.inputs))]
            unknown = [each for each, part in enumerate(found) if part is None]
            if len(unknown) == 1 and count is not None:
                rest = count - sum(len(part) for part in found if part is not None)
                found[unknown[0]] = [(None, source, unknown[0], each) for each in range(rest)]
            return None if None in found else [each for part in found for each in part or ()]
        if source.op_type in ("Cast", "Identity") and len(value.uses()) == 1:
            return pieces(source, 0, count)
    if value is not None and value.shape is not None and len(value.shape) == 1:
        size = value.shape[0]
        if isinstance(size, int):
            return [(None, node, index, place) for place in range(size)]
    return None


def blocks(old: Sizes, new: Sizes) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Cuts two shapes of a tensor into parts that correspond to each other, as ranges of axes."""
    found = []
    a, b, p, q = 0, len(old), 0, len(new)
    while a < b and p < q and old[a] == new[p] and old[a] is not None:
        found.append(((a, a + 1), (p, p + 1)))
        a, p = a + 1, p + 1
    while a < b and p < q:
        low, start, left, right = b - 1, q - 1, old[b - 1], new[q - 1]
        while isinstance(left, int) and isinstance(right, int) and left != right:
            if left < right and low > a:
                low -= 1
                size = old[low]
                left = left * size if isinstance(size, int) else None
            elif right < left and start > p:
                start -= 1
                size = new[start]
                right = right * size if isinstance(size, int) else None
            else:
                left = None
        if left is None or left != right:
            break
        found.append(((low, b), (start, q)))
        b, q = low, start
    return [*found, ((a, b), (p, q))]


def merged(channels: Channels, axes: Axes, old: Sizes, new: Sizes, reason: str) -> Axes:
    """Returns the labels of a part of a tensor after it was given another shape.

    At most one axis of the part, the last one with labels, keeps them. If several new axes are made
    of it, the last one that is not of size 1 keeps them, and they are joined along the others.
    """
    labelled = [place for place, labels in enumerate(axes) if labels is not None]
    if not labelled:
        return [None] * len(new)
    if len(axes) == len(new) == 1:
        return list(axes)
    place = labelled[-1]
    channels.fix_axes([axes[each] for each in labelled[:-1]], reason)
    labels = axes[place]
    assert labels is not None
    sizes = [each for each in old if isinstance(each, int)]
    if list(new) == [-1]:
        new = [math.prod(sizes)]
    known = [each for each in new if isinstance(each, int)]
    fits = len(sizes) == len(old) and len(known) == len(new)
    if not fits or math.prod(sizes) != math.prod(known):
        channels.fix_axes([labels], reason)
        return [None] * len(new)
    spread = labels.reshape([-1 if each == place else 1 for each in range(len(old))])
    grid = np.broadcast_to(spread, sizes).reshape(known)
    wide = [each for each, size in enumerate(known) if size > 1]
    chosen = next((each for each in wide if _varies_along(grid, each)), wide[-1])
    rows = np.moveaxis(grid, chosen, -1).reshape(-1, known[chosen])
    for row in rows[1:]:
        channels.units.join(rows[0], row)
    return [rows[0] if each == chosen else None for each in range(len(known))]


def _varies_along(grid: Labels, axis: int) -> bool:
    """Whether labels differ along one axis only."""
    return all(
        bool((grid == grid.take([0], axis=each)).all()) for each in range(grid.ndim) if each != axis
    )
