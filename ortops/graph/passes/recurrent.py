"""LSTM, GRU and RNN: keeps the gates of the forward pass for the backward pass.

The operators return only states, so their gradient rules must recompute the gates. Before
differentiation, this pass replaces each operator with a Scan that also outputs what the backward
pass needs, and a placeholder node that passes the results on and whose rule reads these outputs.
After differentiation, the placeholder is removed. There is one for each direction.

All tensors of a step have the batch axis last. The product of a step, R · h, then has the large
matrix on its left, where onnxruntime's kernel reads it directly; as the right factor it would be
packed again in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import Bound, is_bound
from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.recurrent import inside, lstm_step, lstm_update, plus, scan
from ortops.graph.edit import attribute_values, emit, remove_unread, replace_value, tape_before
from ortops.graph.passes.draft import ANYWHERE, Draft, Pass
from ortops.graph.tensor import Tensor, op, zeros_like

DOMAIN = "ortops.recurrent"
"""The private domain of the placeholder nodes, one for each direction of an operator."""

TABLE = Table()
"""Their rules."""

_USUAL: Mapping[str, Sequence[str]] = {
    "LSTM": ("Sigmoid", "Tanh", "Tanh"),
    "GRU": ("Sigmoid", "Tanh"),
    "RNN": ("Tanh",),
}
_SAMPLES = {"LSTM": 8, "GRU": 8, "RNN": 4}
"""The minimum batch size; for smaller batches, recomputing the gates is faster (measured)."""


class _Recurrent(Pass):
    """Keeps the gates of LSTM, GRU and RNN nodes that a gradient passes through.

    It supports float32 nodes with the default activations, without sequence lengths, peepholes,
    clipping or coupled gates, and gradients of first order. The result is for onnxruntime's CPU
    provider; other providers have faster kernels for the operators than for Scan.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether batches may be so small that operators should be kept, which depends on sizes."""
        return any(
            _is_usual(node)
            and _symbol(node) is not None
            and (sizes is None or _is_small(node, sizes))
            for node in model.graph
        )

    def prepare(self, draft: Draft) -> None:
        """Replaces the operator with Scans and placeholder nodes."""
        usual = [node for node in draft.graph if _is_usual(node) and draft.is_free(node)]
        if not usual or not draft.is_of_first_order:
            return
        gradients = [Bound.of(node) for node in draft.graph if is_bound(node)]
        found = {node for each in gradients for node in each.path(draft.graph, draft.rules)}
        xs = {x for each in gradients for x in each.xs}
        draft.add_rules(TABLE)
        for node in usual:
            # A gradient of x alone is not for training, so that batches may be of one sample.
            trained = any(w in xs or (w and w.producer() in found) for w in node.inputs[1:4])
            if node in found and (trained or _symbol(node) is None):
                _insert(node, draft)

    def finish(self, draft: Draft) -> None:
        """Removes the placeholder nodes."""
        found = [node for node in draft.graph if node.domain == DOMAIN]
        for node in found:
            for old, new in zip(node.outputs, node.inputs[_read(node) :], strict=False):
                assert new is not None
                old.replace_all_uses_with(new)
        if found:
            remove_unread(list(draft.graph))


RECURRENT = _Recurrent("recurrent", ANYWHERE)


def _read(node: ir.Node) -> int:
    """Returns the number of a placeholder's inputs from the operator: x, w, r, b, states."""
    return 6 if node.op_type == "LSTM" else 5


def _is_usual(node: ir.Node) -> bool:
    """Whether the pass supports a node, and no Gradient node refers to its outputs."""
    if node.domain or node.op_type not in _USUAL or any(node.inputs[4:5]) or any(node.inputs[7:]):
        return False
    usual = tuple(_USUAL[node.op_type])
    attributes = attribute_values(node)
    names = tuple(attributes.get("activations", usual))
    x = node.inputs[0]
    return (
        names in (usual, usual * 2)
        and "clip" not in attributes
        and not attributes.get("input_forget", 0)
        and not attributes.get("layout", 0)
        and x is not None
        and x.dtype == ir.DataType.FLOAT
        and all(value is None or value.shape is not None for value in node.inputs)
        and x.shape is not None
        and not (isinstance(x.shape[1], int) and x.shape[1] < _SAMPLES[node.op_type])
        and not any(is_bound(user) for y in node.outputs for user, _ in y.uses())
    )


def _symbol(node: ir.Node) -> str | None:
    """Returns the symbol of the batch size, '' if it is unknown; None if it is a number."""
    x = node.inputs[0]
    batch = None if x is None or x.shape is None else x.shape[1]
    return None if isinstance(batch, int) or batch is None else batch.value or ""


def _is_small(node: ir.Node, sizes: Mapping[str, int]) -> bool:
    least = _SAMPLES[node.op_type]
    return sizes.get(_symbol(node) or "", least) < least


def _parts(x: Tensor, count: int) -> list[Tensor]:
    """Splits a tensor by its first axis, the direction."""
    pieces = [x] if count == 1 else op.Split(x, axis=0, num_outputs=count)
    return [op.Squeeze(piece, [0]) for piece in pieces]


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Stacks the results of the directions along a new axis, with the batch before the units."""
    pieces: list[Tensor] = [op.Unsqueeze(part.mT, [axis]) for part in parts]
    return pieces[0] if len(pieces) == 1 else op.Concat(*pieces, axis=axis)


def _columns(x: Tensor) -> Tensor:
    """Returns (steps, rows, batch) as (rows, steps · batch)."""
    return op.Flatten(op.Transpose(x, perm=[1, 0, 2]), axis=1)


def _insert(node: ir.Node, draft: Draft) -> None:
    """Replaces an operator with Scans that keep the gates."""
    tape = tape_before(node, draft.names)
    given = [None if value is None else tape.tensor(value) for value in node.inputs]
    x, w, r, b, _, *states = (*given, *[None] * 4)[: _read(node) + 1]
    assert x is not None
    assert w is not None
    assert r is not None
    direction = node.attributes.get_string("direction", "forward")
    backwards = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    count = len(backwards)
    zero = _zero_state(x, r)
    starts = [
        [zero] * count if z is None else [part.mT for part in _parts(z, count)] for z in states
    ]
    b_parts = [None] * count if b is None else _parts(b, count)
    results = []
    for reverse, w_part, r_part, b_part, *start in zip(
        backwards, _parts(w, count), _parts(r, count), b_parts, *starts, strict=True
    ):
        at = _Direction(x, w_part, r_part, b_part, reverse)
        match node.op_type:
            case "LSTM":
                found = _lstm_forward(at, *start)
            case "GRU":
                linear = node.attributes.get_int("linear_before_reset", 0)
                found = _gru_forward(at, linear, *start)
            case _:
                found = _rnn_forward(at, *start)
        results.append(found)
    y, *last = zip(*results, strict=True)
    joined = (_joined(y, 1), *(_joined(each, 0) for each in last))
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
    """Appends a column of ones to x, which is multiplied by the bias."""
    shape = op.Concat(op.Shape(x, start=0, end=2), [1], axis=0)
    ones = op.ConstantOfShape(shape, value=np.ones(1, x.dtype))
    return op.Concat(x, ones, axis=2)


@dataclass(frozen=True)
class _Direction:
    """One direction of an operator.

    Attributes:
        x: The input, [T, N, I].
        w: The weights of the input, [gates · H, I].
        r: The weights of the hidden state, [gates · H, H].
        b: Both biases, [2 · gates · H].
        backwards: Whether to go from the last step to the first.
    """

    x: Tensor
    w: Tensor
    r: Tensor
    b: Tensor | None
    backwards: bool

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the biases of w and r."""
        if self.b is None:
            return None, None
        of_w, of_r = op.Split(self.b, axis=0, num_outputs=2)
        return of_w, of_r

    def sum_of_biases(self) -> Tensor | None:
        """Returns the sum of the biases, for gates that add both products."""
        of_w, of_r = self.biases()
        return None if of_w is None or of_r is None else of_w + of_r

    def project(self, bias: Tensor | None) -> Tensor:
        """Returns w · x + bias for all steps, [T, gates · H, N]."""
        factor, rows = self.w, self.x
        if bias is not None:
            factor = op.Concat(factor, op.Unsqueeze(bias, [1]), axis=1)
            rows = _with_ones(rows)
        steps, batch, _ = self.x.shape or (None,) * 3
        shape = [steps, (self.r.shape or (None,))[0], batch]
        return op.MatMul(factor, rows.mT).with_shape(shape)

    def scan(
        self, step: Callable[..., Sequence[Tensor]], states: Sequence[Tensor], *slices: Tensor
    ) -> list[Tensor]:
        """Emits a Scan in this direction; see `scan`."""
        return scan(step, states, slices, backwards=self.backwards)

    def placeholder(
        self,
        operator: str,
        states: Sequence[Tensor],
        results: Sequence[Tensor],
        saved: Sequence[Tensor],
        **attributes: int,
    ) -> list[Tensor]:
        """Emits the placeholder node.

        Args:
            operator: The operator.
            states: The initial states, [H, N].
            results: The hidden states, [T, H, N], and the final states, [H, N].
            saved: Further inputs of its rule, of all steps.
            **attributes: Attributes for its rule.

        Returns:
            The outputs of the placeholder, which replace the results.
        """
        inputs = (self.x, self.w, self.r, self.b, *states, *results, *saved)
        attributes["backwards"] = int(self.backwards)
        shapes = [result.value.shape for result in results]
        return list(emit(self.x.tape, DOMAIN, operator, inputs, shapes, **attributes))


def _halves(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Splits a tensor of three gates into the first two and the third."""
    size = (x.shape or (None,) * (axis + 1))[axis]
    if isinstance(size, int):
        first, second = op.Split(x, [2 * size // 3, size // 3], axis=axis)
        return first, second
    z, r, n = op.Split(x, axis=axis, num_outputs=3)
    return op.Concat(z, r, axis=axis), n


def _of_input(x: Tensor, w: Tensor, da: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cotangents of x, w and the bias, given that of w · x + bias, in columns."""
    dx = op.Reshape(op.Gemm(da, w, transA=1), op.Shape(x), allowzero=1)
    return dx, op.Gemm(da, op.Flatten(x, axis=2)), op.ReduceSum(da, [1], keepdims=0)


def _of_weights(
    x: Tensor, w: Tensor, b: Tensor | None, before: Tensor, da: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the cotangents of x, w, r and b, given that of w · x + r · before + bias."""
    da = _columns(da)
    dx, dw, db = _of_input(x, w, da)
    dr = op.Gemm(da, _columns(before), transB=1)
    return dx, dw, dr, None if b is None else op.Concat(db, db, axis=0)


# -------------------------------------------------------------------------------------------- LSTM


def _lstm_forward(at: _Direction, h: Tensor, c: Tensor) -> list[Tensor]:
    def step(h: Tensor, c: Tensor, a: Tensor) -> Sequence[Tensor]:
        a_i, a_o, a_f, a_c = op.Split(op.Gemm(inside(h, at.r), h, a), axis=0, num_outputs=4)
        i, o, f = (op.Sigmoid(each) for each in (a_i, a_o, a_f))
        g = op.Tanh(a_c)
        added, kept, after = lstm_update(i, f, g, c)
        t = op.Tanh(after)
        return o * t, after, h, added, kept, i, o, f, g, t

    last_h, last_c, *saved = at.scan(step, [h, c], at.project(at.sum_of_biases()))
    *_, o, _, _, t = saved  # one product for all steps is faster than a copy of y in each step
    return at.placeholder("LSTM", [h, c], [o * t, last_h, last_c], saved)


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
    y, _, _, before, added, kept, i, o, f, candidate, t = saved
    # In the Scan of the forward pass, slopes would need less memory and less time of one thread.
    # Here, threads share the work, which is faster from two threads on, unless batches are large.
    slopes = (added - i * added, y - o * y, kept - f * kept, i - added * candidate)
    h_c, c_cell = o - y * t, f
    transposed = r.mT

    def step(dh: Tensor, dc: Tensor, dy: Tensor | None, *slopes: Tensor) -> Sequence[Tensor]:
        dh = plus(dh, dy)
        da, dc = lstm_step(dh, dc, *slopes, axis=0)
        return inside(dh, transposed) @ da, dc, da

    dy, *states = g
    last = [zeros_like(h) if dz is None else dz for dz in states]
    slices = (dy, op.Concat(*slopes, axis=1), h_c, c_cell)
    dh, dc, da = scan(step, last, slices, backwards=not backwards)
    return *_of_weights(x, w, b, before, da), dh, dc, *(None for _ in saved)


# --------------------------------------------------------------------------------------------- GRU


def _gru_forward(at: _Direction, linear_before_reset: int, h: Tensor) -> list[Tensor]:
    """Emits a GRU; z, r and n are its update gate, its reset gate and the new hidden state."""
    w_bias, r_bias = at.biases()
    column = None if r_bias is None else op.Unsqueeze(r_bias, [1])
    r_gates, r_new = _halves(at.r, 0)

    def gates(a: Tensor) -> tuple[Tensor, Tensor]:
        z, r = op.Split(op.Sigmoid(a), axis=0, num_outputs=2)
        return z, r

    def step(h: Tensor, a_gates: Tensor, a_new: Tensor) -> Sequence[Tensor]:
        if linear_before_reset:
            bias = None if column is None else inside(h, column)
            h_gates, factor = _halves(op.Gemm(inside(h, at.r), h, bias), 0)
            z, r = gates(a_gates + h_gates)
            n = op.Tanh(a_new + r * factor)
        else:
            z, r = gates(op.Gemm(inside(h, r_gates), h, a_gates))
            factor = r * h
            n = op.Tanh(op.Gemm(inside(h, r_new), factor, a_new))
        difference = h - n
        return n + z * difference, h, z, r, n, difference, factor

    a = at.project(w_bias if linear_before_reset else at.sum_of_biases())
    last, *saved = at.scan(step, [h], *_halves(a, 1))
    _, z, _, n, difference, _ = saved
    attributes = {"linear_before_reset": linear_before_reset}
    return at.placeholder("GRU", [h], [n + z * difference, last], saved, **attributes)


@TABLE.vjp("GRU", domain=DOMAIN)
def _gru(
    g: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    h: Tensor,
    *saved: Tensor,
    backwards: int,
    linear_before_reset: int,
) -> Cotangents:
    _, _, before, z, reset, n, difference, factor = saved
    open_gate = 1 - z
    h_z, h_n = difference * z * open_gate, open_gate * (1 - n * n)
    of_reset = (factor if linear_before_reset else before) * reset * (1 - reset)
    dy, dh = g
    last = [zeros_like(h) if dh is None else dh]
    gates, new = (each.mT for each in _halves(r, 0))
    transposed = r.mT

    def step(
        dh: Tensor, dy: Tensor | None, h_z: Tensor, h_n: Tensor, of_reset: Tensor, *others: Tensor
    ) -> Sequence[Tensor]:
        reset, z = others
        dh = plus(dh, dy)
        dn = dh * h_n
        if linear_before_reset:
            da = op.Concat(dh * h_z, dn * of_reset, dn * reset, axis=0)
            return op.Gemm(inside(dh, transposed), da, dh * z), da, dn
        dreset = inside(dh, new) @ dn
        dgates = op.Concat(dh * h_z, dreset * of_reset, axis=0)
        return op.Gemm(inside(dh, gates), dgates, dh * z + dreset * reset), dgates, dn

    slices = (dy, h_z, h_n, of_reset, reset, z)
    dh, da, dn = scan(step, last, slices, backwards=not backwards)
    da, dn, before = _columns(da), _columns(dn), _columns(before)
    dgates = _halves(da, 0)[0] if linear_before_reset else da
    dx, dw, db = _of_input(x, w, op.Concat(dgates, dn, axis=0))
    if linear_before_reset:
        dr, db_r = op.Gemm(da, before, transB=1), op.ReduceSum(da, [1], keepdims=0)
    else:
        products = (op.Gemm(da, before, transB=1), op.Gemm(dn, _columns(factor), transB=1))
        dr, db_r = op.Concat(*products, axis=0), db
    both = None if b is None else op.Concat(db, db_r, axis=0)
    return dx, dw, dr, both, dh, *(None for _ in saved)


# --------------------------------------------------------------------------------------------- RNN


def _rnn_forward(at: _Direction, h: Tensor) -> list[Tensor]:
    def step(h: Tensor, a: Tensor) -> Sequence[Tensor]:
        new = op.Tanh(op.Gemm(inside(h, at.r), h, a))
        return new, new, h

    last, y, before = at.scan(step, [h], at.project(at.sum_of_biases()))
    return at.placeholder("RNN", [h], [y, last], [before])


@TABLE.vjp("RNN", domain=DOMAIN)
def _rnn(
    g: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    h: Tensor,
    *saved: Tensor,
    backwards: int,
) -> Cotangents:
    y, _, before = saved
    dy, dh = g
    transposed = r.mT

    def step(dh: Tensor, dy: Tensor | None, slope: Tensor) -> Sequence[Tensor]:
        da = plus(dh, dy) * slope
        return inside(dh, transposed) @ da, da

    last = [zeros_like(h) if dh is None else dh]
    dh, da = scan(step, last, [dy, 1 - y * y], backwards=not backwards)
    return *_of_weights(x, w, b, before, da), dh, *(None for _ in saved)
