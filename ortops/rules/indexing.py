"""Rules of operators that pick elements by index, or put them there."""

from __future__ import annotations

from typing import cast

from ortops.autodiff import vjp
from ortops.rules._copies import add_at, positions
from ortops.rules._types import Cotangents
from ortops.tensor import Tensor, op, size_of


@vjp("Gather")
def gather(g: Tensor, y: Tensor, x: Tensor, indices: Tensor, *, axis: int = 0) -> Cotangents:
    index = indices.constant
    if index is not None and index.size == 1 and index.ndim <= 1:
        return _pad_to(
            op.Unsqueeze(g, [axis]) if index.ndim == 0 else g, int(index.item()), x, axis
        )
    if x.shape is None or axis not in (0, -x.ndim):
        return add_at(op.Gather(positions(x), indices, axis=axis), g, x)
    rows = indices.astype("int64")
    if x.ndim > 1:  # the places in a row follow from its number
        width = size_of(x, range(1, x.ndim))
        columns = op.Range(g.tape.constant(0), width, 1)
        rows = op.Add(op.Mul(op.Reshape(rows, [-1, 1]), width), columns)
    return add_at(rows, g, x)


def _pad_to(g: Tensor, index: int, x: Tensor, axis: int) -> Tensor:
    """Puts a slice of size 1 among zeros at the index that it was taken from."""
    size = size_of(x, [axis])
    if isinstance(size, int):
        index %= size
    before = index if index >= 0 else size + index
    after = size - 1 - index if index >= 0 else -1 - index
    return cast(Tensor, op.Pad(g, [before, after], None, [axis]))
