"""LSTM: the forward pass keeps its gates.

The LSTM operator puts out states only, so its rule has to compute the gates once more. Here, before
gradients are taken, a Scan that puts out what the backward pass needs replaces the operator, and
with it a node that stands for both: it passes the outputs on, and its rule reads what the Scan has
put out. Once gradients are taken that node goes. There is one for each direction.

All tensors of a step have the batch last. The product of a step, R · h, then has the large matrix
on its left, where onnxruntime's kernel reads it as it is; on the right it would be copied in each
step, into the order that the kernel wants.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.autodiff.gradient_node import Bound, is_bound
from ortops.autodiff.registry import Cotangents, Table
from ortops.autodiff.rules.recurrent import (
    lstm_slopes,
    lstm_step,
    lstm_update,
    scan,
    sigmoid_value,
    tanh_value,
)
from ortops.graph.edit import attribute_values, remove_unread, replace_value
from ortops.graph.shapes import size_of
from ortops.graph.tensor import Tape, Tensor, op, zeros_like
from ortops.passes.draft import ANYWHERE, Draft, Pass

__all__ = ["LSTM"]

DOMAIN = "ortops.recurrent"
"""The private domain of the node that stands for one direction of an LSTM."""

TABLE = Table()
"""Its rule."""

_INPUTS = 6  # of that node: those that get cotangents
_USUAL = ("Sigmoid", "Tanh", "Tanh")
_SAMPLES = 8  # below, onnxruntime's own LSTM and the gates once more are faster (measured)


class _Lstm(Pass):
    """Keeps the gates of LSTM nodes that a gradient passes through.

    Nodes of float32 with the usual activations, and without sequence lengths, peepholes, clipping
    or coupled gates, take part, unless a gradient of higher order is asked for. The result is for
    onnxruntime's CPU provider; others have faster kernels for LSTM than for Scan.
    """

    def prepare(self, draft: Draft) -> None:
        """Replaces the operator by Scans, and by nodes that stand for them."""
        usual = [node for node in draft.graph if _is_usual(node) and draft.is_free(node)]
        if not usual or not draft.is_of_first_order:
            return
        gradients = [Bound.of(node) for node in draft.graph if is_bound(node)]
        found = {node for each in gradients for node in each.path(draft.graph, draft.rules)}
        xs = {x for each in gradients for x in each.xs}
        draft.add_rules(TABLE)
        for node in usual:
            # Who asks for the gradient of x alone does not train, and may come with one sample.
            trained = any(w in xs or (w and w.producer() in found) for w in node.inputs[1:4])
            if node in found and (trained or _has_known_batch(node)):
                _insert(node, draft)

    def finish(self, draft: Draft) -> None:
        """Removes the nodes that stand for an LSTM."""
        found = [node for node in draft.graph if node.domain == DOMAIN]
        for node in found:
            for old, new in zip(node.outputs, node.inputs[_INPUTS:], strict=False):
                assert new is not None
                old.replace_all_uses_with(new)
        if found:
            remove_unread(list(draft.graph))


LSTM = _Lstm("lstm", ANYWHERE)


def _is_usual(node: ir.Node) -> bool:
    """Whether a node is an LSTM of the form that is replaced, and no gradient names its outputs."""
    if node.domain or node.op_type != "LSTM" or any(node.inputs[4:5]) or any(node.inputs[7:]):
        return False
    attributes = attribute_values(node)
    names = tuple(attributes.get("activations", _USUAL))
    x = node.inputs[0]
    return (
        names in (_USUAL, _USUAL * 2)
        and "clip" not in attributes
        and not attributes.get("input_forget", 0)
        and not attributes.get("layout", 0)
        and x is not None
        and x.dtype == ir.DataType.FLOAT
        and all(value is None or value.shape is not None for value in node.inputs)
        and not (isinstance(x.shape[1], int) and x.shape[1] < _SAMPLES)  # type: ignore[index]
        and not any(is_bound(user) for y in node.outputs for user, _ in y.uses())
    )


def _has_known_batch(node: ir.Node) -> bool:
    x = node.inputs[0]
    return x is not None and x.shape is not None and isinstance(x.shape[1], int)


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Splits a tensor by its first axis, which is that of the directions."""
    pieces = [x] if count == 1 else op.Split(x, axis=0, num_outputs=count)
    return [op.Squeeze(piece, [0]) for piece in pieces]


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Joins what each direction has given along a new axis, batch before units."""
    pieces: list[Tensor] = [op.Unsqueeze(_swapped(part), [axis]) for part in parts]
    return pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=axis)


def _swapped(x: Tensor) -> Tensor:
    """Exchanges the last two axes."""
    return op.Transpose(x, perm=[1, 0] if x.ndim == 2 else [0, 2, 1])


def _columns(x: Tensor) -> Tensor:
    """Returns (steps, rows, batch) as (rows, steps · batch)."""
    return op.Flatten(op.Transpose(x, perm=[1, 0, 2]), axis=1)


def _insert(node: ir.Node, draft: Draft) -> None:
    """Replaces an LSTM by Scans that keep the gates."""
    tape = Tape(draft.graph, before=node, names=draft.names)
    tape.scope = f"{node.name or node.op_type}/"
    given = [None if value is None else tape.tensor(value) for value in node.inputs]
    x, w, r, b, _, *states = (*given, *[None] * 4)[:7]
    assert x is not None
    assert w is not None
    assert r is not None
    direction = node.attributes.get_string("direction", "forward")
    backwards = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    count = len(backwards)
    zero = _zero_state(x, r)
    h_parts, c_parts = (
        [zero] * count if z is None else [_swapped(part) for part in _parts(z, count)]
        for z in states
    )
    b_parts = [None] * count if b is None else _parts(b, count)
    parts = zip(_parts(w, count), _parts(r, count), b_parts, h_parts, c_parts, strict=True)
    results = [
        _forward(x, *each, backwards=reverse)
        for each, reverse in zip(parts, backwards, strict=True)
    ]
    y, last_h, last_c = zip(*results, strict=True)
    joined = (_joined(y, 1), _joined(last_h, 0), _joined(last_c, 0))
    for old, new in zip(node.outputs, joined, strict=False):
        if old.name:
            replace_value(tape, old, new.with_shape_of(tape.tensor(old)))
    draft.graph.remove(node, safe=True)


def _zero_state(x: Tensor, r: Tensor) -> Tensor:
    """Returns a state of zeros, [H, N]."""
    sizes = op.Concat(op.Shape(r, start=2, end=3), op.Shape(x, start=1, end=2), axis=0)
    batch = None if x.shape is None else x.shape[1]
    units = None if r.shape is None else r.shape[2]
    return op.ConstantOfShape(sizes).with_shape([units, batch])


def _with_ones(x: Tensor) -> Tensor:
    """Returns x with a last column of ones, which a bias is multiplied by."""
    shape = op.Concat(op.Shape(x, start=0, end=2), [1], axis=0)
    ones = op.ConstantOfShape(shape, value=np.ones(1, x.dtype))
    return op.Concat(x, ones, axis=2)


def _forward(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, h: Tensor, c: Tensor, *, backwards: bool
) -> list[Tensor]:
    """Emits one direction of an LSTM, and the node that stands for it.

    That reads the inputs, the outputs and, of all steps, [T, H, N], both states before, the gates
    i, o and f, the candidate, and tanh of the cell state.

    Args:
        x: The input, [T, N, I].
        w: The weights of the input, [4 · H, I].
        r: The weights of the hidden state, [4 · H, H].
        b: Both biases, [8 · H].
        h: The hidden state at the beginning, [H, N].
        c: The cell state at the beginning, [H, N].
        backwards: Whether to go from the last step to the first.

    Returns:
        The hidden states, [T, H, N], and both states at the end, [H, N].
    """
    factor, rows = w, x
    if b is not None:
        w_bias, r_bias = op.Split(b, axis=0, num_outputs=2)
        b = w_bias + r_bias
        factor, rows = op.Concat(w, op.Unsqueeze(b, [1]), axis=1), _with_ones(x)
    steps, batch, _ = x.shape or (None,) * 3
    a = op.MatMul(factor, _swapped(rows)).with_shape([steps, (r.shape or (None,))[0], batch])

    def step(h: Tensor, c: Tensor, a: Tensor) -> Sequence[Tensor]:
        a_i, a_o, a_f, a_c = op.Split(op.Gemm(h.tape.tensor(r.value), h, a), axis=0, num_outputs=4)
        i, o, f = (op.Sigmoid(each) for each in (a_i, a_o, a_f))
        g = op.Tanh(a_c)
        _, _, after = lstm_update(i, f, g, c)
        t = op.Tanh(after)
        new = o * t
        return new, after, new, h, c, i, o, f, g, t

    last_h, last_c, y, *saved = scan(step, [h, c], [a], backwards=backwards)
    results = (y, last_h, last_c)
    stand_in = ir.Node(
        DOMAIN,
        "LSTM",
        [None if z is None else z.value for z in (x, w, r, b, h, c, *results, *saved)],
        [ir.AttrInt64("backwards", int(backwards))],
        num_outputs=len(results),
    )
    x.tape.append(stand_in)
    for new, like in zip(stand_in.outputs, results, strict=True):
        new.type, new.shape = like.value.type, like.value.shape
    return [x.tape.tensor(value) for value in stand_in.outputs]


@TABLE.vjp("LSTM", domain=DOMAIN)
def _lstm(
    g: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    h: Tensor,
    c: Tensor,
    *saved: Tensor,
    backwards: int,
) -> Cotangents:
    y, _, _, h_before, c_before, i, o, f, candidate, t = saved
    added, kept, _ = lstm_update(i, f, candidate, c_before)
    values = (*map(sigmoid_value, (i, o, f)), tanh_value(candidate), tanh_value(t))
    *by_gate, h_c, c_cell = lstm_slopes(values, c_before, added, kept, y)
    transposed = _swapped(r)

    def step(dh: Tensor, dc: Tensor, dy: Tensor | None, *slopes: Tensor) -> Sequence[Tensor]:
        dh = dh if dy is None else dh + dy
        da, dc = lstm_step(dh, dc, *slopes, axis=0)
        return dh.tape.tensor(transposed.value) @ da, dc, da

    dy, *states = g
    last = [zeros_like(h) if dz is None else dz for dz in states]
    slices = (dy, op.Concat(*by_gate, axis=1), h_c, c_cell)
    dh, dc, da = scan(step, last, slices, backwards=not backwards)
    da = _columns(da)
    dw, db = op.Gemm(da, op.Flatten(x if b is None else _with_ones(x), axis=2)), None
    if b is not None:
        dw, db = op.Split(dw, [size_of(w, [1]), 1], axis=1)
        db = op.Squeeze(db, [1])
    dr = op.Gemm(da, _columns(h_before), transB=1)
    dx = op.Reshape(op.Gemm(da, w, transA=1), op.Shape(x), allowzero=1)
    return dx, dw, dr, db, dh, dc, *(None for _ in saved)
