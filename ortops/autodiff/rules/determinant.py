"""The rule of Det.

The derivative of a determinant is the matrix of its cofactors, the determinants of the minors with
their signs. It exists for singular matrices too, where det(A) · A⁻ᵀ does not.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.autodiff.registry import Cotangents
from ortops.autodiff.rules.table import vjp
from ortops.graph.shapes import reshape_like, size_of
from ortops.graph.tensor import Tape, Tensor, ones_like, op

_MANY = 16  # rows; for more, the n² minors of n² elements cost too much


@vjp("Det", limits="above 16×16, or of unknown size: only nonsingular matrices")
def det(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    size = size_of(x, [-1])
    g = op.Unsqueeze(g, [-2, -1])
    if isinstance(size, int) and size > _MANY:
        n_rows = op.Reshape(x, [-1, size, size])
        inverse = reshape_like(_inverse(n_rows, size), x)
        axes = list(range(x.ndim))
        transposed = op.Transpose(inverse, perm=[*axes[:-2], axes[-1], axes[-2]])
        return g * op.Unsqueeze(y, [-2, -1]) * transposed
    return g * _cofactors(x, size)


def _cofactors(x: Tensor, size: int | Tensor) -> Tensor:
    if isinstance(size, int):
        if size == 1:
            return ones_like(x)
        places = np.arange(size)
        others = places[:-1] + (places[:-1] >= places[:, None])
        kept = x.tape.constant(others)
        signs = x.tape.constant((-1.0) ** (places + places[:, None])).astype(x.dtype)
    else:
        index = op.Range(x.tape.constant(np.array(0)), size, 1)
        column = op.Unsqueeze(index, [1])
        short = op.Range(x.tape.constant(np.array(0)), op.Sub(size, 1), 1)
        kept = op.Add(short, op.Cast(op.GreaterOrEqual(short, column), to=ir.DataType.INT64))
        odd = op.Mod(op.Add(index, column), 2)
        signs = 1 - 2 * odd.astype(x.dtype)
    rank = x.ndim
    rows = op.Gather(x, kept, axis=rank - 2)  # …, row left out, row, column
    minors = op.Gather(rows, kept, axis=rank)  # …, row left out, row, column left out, column
    axes = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    minors = op.Transpose(minors, perm=axes)
    return op.Det(minors) * signs


def _inverse(x: Tensor, size: int) -> Tensor:
    """Inverts a stack of matrices by Gauss-Jordan elimination with the greatest pivots."""
    tape = x.tape
    graph = ir.Graph(
        [], [], nodes=[], opset_imports=dict(tape.graph.opset_imports), name="elimination"
    )
    inner = Tape(graph, names=tape.names)
    inner.scope = f"{tape.scope}elimination/"
    with inner:
        state = inner.input("rows", x.dtype, [None, size, 2 * size])
        step = inner.input("step", np.int64, [])
        index = inner.constant(np.arange(size))
        column = op.Squeeze(op.Gather(state, op.Unsqueeze(step, [0]), axis=2), [2])
        sizes = op.Where(op.Less(index, step), op.CastLike(-1.0, column), abs(column))
        pivot = op.ArgMax(sizes, axis=1)  # (matrix, 1)
        is_step = op.Equal(index, step)
        order = op.Where(op.Equal(index, pivot), step, op.Where(is_step, pivot, index))
        # Each row's number, for all of its elements.
        wide = op.Expand(op.Unsqueeze(order, [2]), op.Shape(state))
        swapped = op.GatherElements(state, wide, axis=1)
        row = op.Gather(swapped, op.Unsqueeze(step, [0]), axis=1)  # (matrix, 1, column)
        row = row / op.Gather(row, op.Unsqueeze(step, [0]), axis=2)
        factors = op.Gather(swapped, op.Unsqueeze(step, [0]), axis=2)
        reduced = swapped - factors * row
        result = op.Where(op.Unsqueeze(is_step, [1]), row, reduced)
        graph.outputs.append(result.with_shape([None, size, 2 * size]).value)
    identity = op.Expand(
        tape.constant(np.eye(size, dtype=x.dtype)), op.Concat(op.Shape(x, end=1), [1, 1], axis=0)
    )
    start = op.Concat(x, identity, axis=2)
    node = ir.Node(
        "",
        "Scan",
        [start.value, tape.constant(np.arange(size)).value],
        [ir.AttrGraph("body", graph), ir.AttrInt64("num_scan_inputs", 1)],
        num_outputs=1,
    )
    tape.append(node)
    node.outputs[0].type, node.outputs[0].shape = start.value.type, start.value.shape
    return tape.tensor(node.outputs[0])[:, :, size:]
