"""Rules of recurrent operators: LSTM, GRU and RNN.

The output Y contains the hidden state before each step. Therefore the pre-activations of all steps
are computed with one product with W and one with R. The rest of a step is elementwise, and its
derivatives, here called slopes, are computed for all steps at once. Only the cotangents of the
states are computed step by step, in a Scan in the opposite direction, which is linear in them. The
cotangents of the pre-activations then propagate to X, W, R and B through the products, again for
all steps at once.

The elementwise part of an LSTM is in the functions `lstm_update`, `lstm_slopes` and `lstm_step`.
They work on one step or on all steps, in any layout, and `ortops.graph.passes.recurrent`, which
keeps the gates, uses them too.

Notation: ``a_i`` is the pre-activation of gate i (z and r: update and reset gate, n: new hidden
state; i, o, f and c: input, output and forget gate, and candidate), ``h_i`` the slope ∂h/∂a_i,
``h_h`` and ``h_c`` slopes with respect to states, ``c_cell`` the slope of a cell state with respect
to the previous one, and ``dh`` the cotangent of the hidden state.

The equations are those of the ONNX operators. If onnxruntime differs (defaults of activations), or
specifies more (a sequence of length 0 ends in zeros), they follow onnxruntime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, Unpack, cast

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.backward import backward, backward_to_inputs
from ortops.graph.autodiff.registry import Cotangents, Rules
from ortops.graph.autodiff.rules.table import nested_vjp
from ortops.graph.constants import Dim
from ortops.graph.edit import describe
from ortops.graph.shapes import size_of
from ortops.graph.tensor import Tensor, ones_like, op, zeros_like

MaybeTensor = Tensor | None

# An activation uses alpha or beta if its name is in the table of their defaults.
_ACTIVATIONS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "Affine": lambda x, alpha, beta: x * alpha + beta,
    "Elu": lambda x, alpha, beta: op.Elu(x, alpha=alpha),
    "HardSigmoid": lambda x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta),
    "LeakyRelu": lambda x, alpha, beta: op.LeakyRelu(x, alpha=alpha),
    "Relu": lambda x, alpha, beta: op.Relu(x),
    "ScaledTanh": lambda x, alpha, beta: op.Tanh(x * beta) * alpha,
    "Sigmoid": lambda x, alpha, beta: op.Sigmoid(x),
    "Softplus": lambda x, alpha, beta: op.Softplus(x),
    "Softsign": lambda x, alpha, beta: op.Softsign(x),
    "Tanh": lambda x, alpha, beta: op.Tanh(x),
    "ThresholdedRelu": lambda x, alpha, beta: op.ThresholdedRelu(x, alpha=alpha),
}
# onnxruntime's defaults: the standard has none for Affine and ScaledTanh, and 1 for ThresholdedRelu
_ALPHA = {
    "Affine": 0.0,
    "Elu": 1.0,
    "HardSigmoid": 0.2,
    "LeakyRelu": 0.01,
    "ScaledTanh": 0.0,
    "ThresholdedRelu": 0.0,
}
_BETA = {"Affine": 0.0, "HardSigmoid": 0.5, "ScaledTanh": 0.0}


@dataclass(frozen=True)
class _Activation:
    """An activation with its parameters, and the limit to which its argument is clipped."""

    name: str
    alpha: float
    beta: float
    clip: float | None

    def __call__(self, a: Tensor) -> Tensor:
        limited = a if self.clip is None else op.Clip(a, -self.clip, self.clip)
        return _ACTIVATIONS[self.name](limited, self.alpha, self.beta)


class Activated(NamedTuple):
    """A value ``y = f(a)`` of an activation, and the function (w, w · y) → ∂(w · y)/∂a."""

    y: Tensor
    slope: Callable[[Tensor, Tensor], Tensor]


def sigmoid_value(y: Tensor) -> Activated:
    return Activated(y, lambda w, product: product - y * product)


def tanh_value(y: Tensor) -> Activated:
    return Activated(y, lambda w, product: w - product * y)


class RecurrentAttributes(TypedDict, total=False):
    """The attributes that the three operators have in common, except layout."""

    activation_alpha: Sequence[float]
    activation_beta: Sequence[float]
    activations: Sequence[str]
    clip: float
    direction: str
    hidden_size: int


_LENGTHS = 4
"""The index of the input sequence_lens."""


@dataclass(frozen=True)
class _Node:
    """The arguments of a recurrent rule.

    Attributes:
        rules: The rules to differentiate emitted nodes with.
        g: The cotangents of the node's outputs.
        y: The outputs.
        inputs: The inputs, in ONNX's order.
        layout: The attribute: 0 for time first, 1 for batch first.
        attributes: The attributes.
    """

    rules: Rules
    g: Sequence[MaybeTensor]
    y: Sequence[MaybeTensor]
    inputs: Sequence[MaybeTensor]
    layout: int
    attributes: RecurrentAttributes

    @property
    def description(self) -> str:
        """The node, for messages."""
        node = cast(Tensor, self.y[0]).value.producer()
        return describe(node) if node else "recurrent node"


@dataclass
class _Direction:
    """One direction of a recurrent node, in tensors with time first and no axis of directions.

    Attributes:
        rules: The rules to differentiate emitted nodes with.
        start: The number of nodes on the tape before those of the rule.
        units: The size of the hidden state, H.
        x: The input, [T, N, I].
        valid: Whether a step belongs to the sequence, [T, N, 1].
        last: Whether a step is the last one of the sequence, [T, N, 1].
        reverse: Whether the node runs from the end of the sequences to their beginning.
        activations: The direction's activations.
        w: The weights of the input, [gates · H, I].
        r: The weights of the hidden state, [gates · H, H].
        b: The biases of w and r, [2 · gates · H].
        p: The weights of the peepholes, [3 · H].
        h: The initial hidden state, [N, H].
        c: The initial cell state, [N, H].
        dh: The cotangent of the last hidden state, [N, H].
        dc: The cotangent of the last cell state, [N, H].
        y: The hidden state after each step, [T, N, H].
        dy: The cotangent of y.
        w_bias: The bias of w, [gates · H].
        r_bias: The bias of r, [gates · H].
    """

    rules: Rules
    start: int
    units: int | Tensor
    x: Tensor
    valid: MaybeTensor
    last: MaybeTensor
    reverse: bool
    activations: Sequence[_Activation]
    w: Tensor
    r: Tensor
    b: MaybeTensor
    p: MaybeTensor
    h: Tensor
    c: Tensor
    dh: Tensor
    dc: Tensor
    y: Tensor
    dy: MaybeTensor
    w_bias: MaybeTensor = field(default=None, init=False)
    r_bias: MaybeTensor = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.b is not None:
            self.w_bias, self.r_bias = op.Split(self.b, axis=0, num_outputs=2)
        if self.dy is not None:
            self.dy = self.mask(self.dy)  # Y is zero after the end of a sequence

    def hidden_before(self) -> Tensor:
        """Returns the hidden state before each step, [T, N, H]."""
        first = op.Unsqueeze(self.h, [0])
        if self.reverse:
            before = op.Concat(self.y, first, axis=0)[1:, :, :]
            if self.last is not None:  # the initial state precedes the last step of each sequence
                before = op.Where(self.last, first, before)
        else:
            before = op.Concat(first, self.y, axis=0)[:-1, :, :]
        return before.with_shape_of(self.y)

    def project(self, x: Tensor, weights: Tensor, bias: MaybeTensor) -> Tensor:
        """Returns x · weightsᵀ + bias for all steps."""
        rows = op.Gemm(op.Flatten(x, axis=2), weights, bias, transB=1)
        steps, batch = x.shape[:2] if x.shape else (None, None)
        sizes = [size_of(x, [0]), size_of(x, [1]), size_of(weights, [0])]
        size = sizes[2] if isinstance(sizes[2], int) else None
        shaped = op.Reshape(rows, sizes, allowzero=1)
        return shaped.with_shape([steps, batch, size])

    def mask(self, x: Tensor, other: float = 0) -> Tensor:
        """Replaces the values of steps after the end of a sequence."""
        return x if self.valid is None else op.Where(self.valid, x, other)

    def hold(self) -> MaybeTensor:
        """Returns 1 for steps after the end of a sequence, which keep the state, [T, N, 1]."""
        return None if self.valid is None else op.Not(self.valid).astype(self.x.dtype)

    def slopes(self, y: Tensor, xs: Sequence[Tensor], w: MaybeTensor = None) -> list[Tensor]:
        """Returns w · dy/dx for tensors that y is an elementwise function of."""
        values = [x.value for x in xs]
        nodes = y.tape.nodes[self.start :]
        seeds = {y.value: ones_like(y) if w is None else w}
        found = backward(y.tape, nodes, seeds, values, self.rules, asked_by="a slope")
        return [zeros_like(y) if slope is None else slope for slope in found]

    def activate(self, f: _Activation, a: Tensor) -> Activated:
        """Applies an activation."""
        y = f(a)
        explicit = {"Sigmoid": sigmoid_value, "Tanh": tanh_value}.get(f.name)
        if explicit and f.clip is None:
            return explicit(y)
        return Activated(y, lambda w, product: self.slopes(y, [a], w)[0])

    def scan(
        self, step: Callable[..., Sequence[Tensor]], states: Sequence[Tensor], *slices: MaybeTensor
    ) -> list[Tensor]:
        """Emits a Scan in the opposite direction of the node; see `scan`."""
        return scan(step, states, slices, backwards=not self.reverse)


Cell = Callable[[_Direction], tuple[dict[Tensor, Tensor], list[Tensor]]]
"""Computes the backward pass of a direction. Returns the cotangents of tensors that the direction
computed from the inputs of the node, and the tensors that were treated as constants."""

_LIMITS = "at least one step if the length is dynamic"


@nested_vjp("RNN", needs=(0,), limits=_LIMITS)
def rnn(
    rules: Rules,
    g: Sequence[MaybeTensor],
    y: Sequence[MaybeTensor],
    *inputs: MaybeTensor,
    layout: int = 0,
    **attributes: Unpack[RecurrentAttributes],
) -> Cotangents:
    node = _Node(rules, g, y, inputs, layout, attributes)
    return _recurrent(node, _rnn, ("Tanh",))


def _rnn(at: _Direction) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    (f,) = at.activations
    before = at.hidden_before()
    of_x, of_h = at.project(at.x, at.w, at.w_bias), at.project(before, at.r, at.r_bias)
    a = of_x + of_h
    (h_a,) = at.slopes(f(a), [a])

    def step(dh: Tensor, dy: MaybeTensor, h_a: Tensor, hold: MaybeTensor) -> Sequence[Tensor]:
        dh = plus(dh, dy)
        da = dh * h_a
        return plus(da @ inside(dh, at.r), _times(dh, hold)), da

    dh, da = at.scan(step, [at.dh], at.dy, at.mask(h_a), at.hold())
    return {of_x: da, of_h: da, at.h: dh}, [before]


@nested_vjp("GRU", needs=(0,), limits=_LIMITS)
def gru(
    rules: Rules,
    g: Sequence[MaybeTensor],
    y: Sequence[MaybeTensor],
    *inputs: MaybeTensor,
    layout: int = 0,
    linear_before_reset: int = 0,
    **attributes: Unpack[RecurrentAttributes],
) -> Cotangents:
    node = _Node(rules, g, y, inputs, layout, attributes)
    cell = _gru_linear_before_reset if linear_before_reset else _gru
    return _recurrent(node, cell, ("Sigmoid", "Tanh"))


def _gru(at: _Direction) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    f, g = at.activations
    sizes = [at.units * 2, at.units]
    r_gates, r_new = op.Split(at.r, sizes, axis=0)
    gates_bias, new_bias = (None, None)
    if at.r_bias is not None:
        gates_bias, new_bias = op.Split(at.r_bias, sizes, axis=0)
    before = at.hidden_before()
    of_x, of_h = at.project(at.x, at.w, at.w_bias), at.project(before, r_gates, gates_bias)
    x_gates, x_new = op.Split(of_x, sizes, axis=2)
    a_z, a_r = op.Split(x_gates + of_h, axis=2, num_outputs=2)
    reset = f(a_r) * before
    of_reset = at.project(reset, r_new, new_bias)
    a_n = x_new + of_reset
    z = f(a_z)
    h = (1 - z) * g(a_n) + z * before
    h_z, h_n, h_h = at.slopes(h, [a_z, a_n, before])
    reset_r, reset_h = at.slopes(reset, [a_r, before])

    def step(
        dh: Tensor,
        dy: MaybeTensor,
        h_z: Tensor,
        h_n: Tensor,
        h_h: Tensor,
        reset_r: Tensor,
        reset_h: Tensor,
    ) -> Sequence[Tensor]:
        dh = plus(dh, dy)
        dn = dh * h_n
        dreset = dn @ inside(dh, r_new)
        dgates = op.Concat(dh * h_z, dreset * reset_r, axis=1)
        dbefore = dgates @ inside(dh, r_gates) + dh * h_h + dreset * reset_h
        return dbefore, dgates, dn

    slopes = (at.mask(h_z), at.mask(h_n), at.mask(h_h, 1), reset_r, reset_h)
    dh, dgates, dn = at.scan(step, [at.dh], at.dy, *slopes)
    da = op.Concat(dgates, dn, axis=2)
    return {of_x: da, of_h: dgates, of_reset: dn, at.h: dh}, [before, reset]


def _gru_linear_before_reset(at: _Direction) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    f, g = at.activations
    before = at.hidden_before()
    of_x, of_h = at.project(at.x, at.w, at.w_bias), at.project(before, at.r, at.r_bias)
    x_z, x_r, x_n = op.Split(of_x, axis=2, num_outputs=3)
    h_z, h_r, h_n = op.Split(of_h, axis=2, num_outputs=3)
    a_z, a_r = x_z + h_z, x_r + h_r
    z, r = f(a_z), f(a_r)
    h = (1 - z) * g(x_n + r * h_n) + z * before
    slopes = at.slopes(h, [a_z, a_r, x_n, h_n, before])

    def step(
        dh: Tensor, dy: MaybeTensor, s_z: Tensor, s_r: Tensor, s_x: Tensor, s_h: Tensor, s: Tensor
    ) -> Sequence[Tensor]:
        dh = plus(dh, dy)
        dz, dr = dh * s_z, dh * s_r
        da = op.Concat(dz, dr, dh * s_h, axis=1)
        return da @ inside(dh, at.r) + dh * s, op.Concat(dz, dr, dh * s_x, axis=1), da

    masked = [*(at.mask(slope) for slope in slopes[:-1]), at.mask(slopes[-1], 1)]
    dh, dx, da = at.scan(step, [at.dh], at.dy, *masked)
    return {of_x: dx, of_h: da, at.h: dh}, [before]


@nested_vjp("LSTM", needs=(0,), limits=_LIMITS)
def lstm(
    rules: Rules,
    g: Sequence[MaybeTensor],
    y: Sequence[MaybeTensor],
    *inputs: MaybeTensor,
    input_forget: int = 0,
    layout: int = 0,
    **attributes: Unpack[RecurrentAttributes],
) -> Cotangents:
    node = _Node(rules, g, y, inputs, layout, attributes)
    return _recurrent(node, lambda at: _lstm(at, bool(input_forget)), ("Sigmoid", "Tanh", "Tanh"))


def _lstm(at: _Direction, coupled: bool) -> tuple[dict[Tensor, Tensor], list[Tensor]]:
    of_gates, of_candidate, of_cell = at.activations
    before = at.hidden_before()
    of_x, of_h = at.project(at.x, at.w, at.w_bias), at.project(before, at.r, at.r_bias)
    a_i, a_o, a_f, a_c = op.Split(of_x + of_h, axis=2, num_outputs=4)
    p_i, p_o, p_f = (None,) * 3 if at.p is None else op.Split(at.p, axis=0, num_outputs=3)

    def gate(a: Tensor, peephole: MaybeTensor, cell: MaybeTensor) -> Activated:
        if cell is not None and peephole is not None:
            a = a + cell * inside(a, peephole)
        return at.activate(of_gates, a)

    def gates(a: Sequence[Tensor], cell: MaybeTensor = None) -> Sequence[Activated]:
        a_i, a_f, a_c = a
        i, g = gate(a_i, p_i, cell), at.activate(of_candidate, a_c)
        if coupled:  # f = 1 - i, so its slope is with respect to a_i too
            return i, Activated(1 - i.y, lambda w, product: -i.slope(w, w * i.y)), g
        return i, gate(a_f, p_f, cell), g

    def advance(cell: Tensor, valid: MaybeTensor, *slices: Tensor) -> Sequence[Tensor]:
        i, f, g = slices if at.p is None else [z.y for z in gates(slices, cell)]
        _, _, after = lstm_update(i, f, g, cell)
        return (after if valid is None else op.Where(valid, after, cell)), cell

    known = gates([a_i, a_f, a_c]) if at.p is None else None
    slices = [a_i, a_f, a_c] if known is None else [z.y for z in known]
    _, cell = scan(advance, [at.c], [at.valid, *slices], backwards=at.reverse)
    i, f, g = known or gates([a_i, a_f, a_c], cell)
    added, kept, after = lstm_update(i.y, f.y, g.y, cell)
    o, t = gate(a_o, p_o, after), at.activate(replace(of_cell, clip=None), after)
    values = (i, o, f, g, t)
    c_i, h_o, c_f, c_c, h_c, c_cell = lstm_slopes(values, cell, added, kept, o.y * t.y)
    if coupled:
        c_i, c_f, p_f = c_i + c_f, zeros_like(c_f), None
    h_c = plus(h_c, _times(h_o, p_o))
    c_cell = plus(plus(c_cell, _times(c_i, p_i)), _times(c_f, p_f))

    def step(
        dh: Tensor, dc: Tensor, dy: MaybeTensor, hold: MaybeTensor, *slopes: Tensor
    ) -> Sequence[Tensor]:
        dh = plus(dh, dy)
        da, dc = lstm_step(dh, dc, *slopes, axis=1)
        return plus(da @ inside(dh, at.r), _times(dh, hold)), dc, da

    slopes = at.mask(op.Concat(c_i, h_o, c_f, c_c, axis=2)), at.mask(h_c), at.mask(c_cell, 1)
    dh, dc, da = at.scan(step, [at.dh, at.dc], at.dy, at.hold(), *slopes)
    cotangents = {of_x: da, of_h: da, at.h: dh, at.c: dc}
    if at.p is not None:
        d_i, d_o, d_f, _ = op.Split(da, axis=2, num_outputs=4)
        products = op.Concat(d_i * cell, d_o * after, d_f * cell, axis=2)
        cotangents[at.p] = op.ReduceSum(products, [0, 1], keepdims=0)
    return cotangents, [before]


def lstm_update(i: Tensor, f: Tensor, g: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns i · g and f · cell, and their sum, the new cell state."""
    added, kept = i * g, f * cell
    return added, kept, added + kept


def lstm_slopes(
    values: Sequence[Activated], cell: Tensor, added: Tensor, kept: Tensor, h: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the slopes c_i, h_o, c_f, c_c, h_c (by the new cell state) and c_cell.

    Args:
        values: The gates i, o and f, the candidate g, and the activation t of the new cell state.
        cell: The previous cell state.
        added: i · g.
        kept: f · cell.
        h: The hidden state, o · t.
    """
    i, o, f, g, t = values
    c_i, c_c = i.slope(g.y, added), g.slope(i.y, added)
    h_o, h_c = o.slope(t.y, h), t.slope(o.y, h)
    return c_i, h_o, f.slope(cell, kept), c_c, h_c, f.y


def lstm_step(
    dh: Tensor, dc: Tensor, slopes: Tensor, h_c: Tensor, c_cell: Tensor, *, axis: int
) -> tuple[Tensor, Tensor]:
    """Returns the cotangents of the pre-activations of a step, and of the previous cell state.

    Args:
        dh: The cotangent of the hidden state after the step.
        dc: The cotangent of the cell state after the step, without the contribution of dh.
        slopes: The first four results of `lstm_slopes`, concatenated.
        h_c: The fifth result.
        c_cell: The sixth result.
        axis: The axis along which the gates are concatenated.
    """
    dc = dc + dh * h_c
    return op.Concat(dc, dh, dc, dc, axis=axis) * slopes, dc * c_cell


def _recurrent(node: _Node, cell: Cell, usual: Sequence[str]) -> Cotangents:
    """Returns the cotangents of the inputs of a recurrent node.

    Args:
        node: The node.
        cell: The backward pass of a direction.
        usual: The default activations of a direction.
    """
    x = cast(Tensor, node.inputs[0])
    if (
        x.shape is not None and 0 in x.shape[:2]
    ):  # then onnxruntime ignores states and returns zeros
        return (None,) * len(node.inputs)
    tape = x.tape
    start = len(tape.nodes)
    seeds: dict[ir.Value, Tensor] = {}
    cut: list[ir.Value] = []
    with tape:
        directions = _directions(node, start, usual)
    for direction in directions:
        cotangents, held = cell(direction)
        seeds.update((x.value, cotangent) for x, cotangent in cotangents.items())
        cut += [x.value for x in held]
    inputs = [
        None if x is None or index == _LENGTHS else x.value for index, x in enumerate(node.inputs)
    ]
    made = tape.nodes[start:]
    return backward_to_inputs(
        tape, made, seeds, inputs, node.rules, cut=cut, asked_by=node.description
    )


def _directions(node: _Node, start: int, usual: Sequence[str]) -> list[_Direction]:
    """Splits the inputs, outputs and cotangents of a node by direction."""
    reverse = _is_reverse(node)
    count = len(reverse)
    activations = _activations(node, count, usual)
    x, w, r, b, lengths, h, c, p = (*node.inputs, *[None] * 8)[:8]
    assert x is not None
    assert r is not None
    state_order, y_order = ([1, 0, 2], [1, 2, 0, 3]) if node.layout else (None, None)
    x = _ranked(x, 3) if state_order is None else op.Transpose(_ranked(x, 3), perm=state_order)
    units = node.attributes.get("hidden_size") or size_of(_ranked(r, 3), [2])
    steps, batch = cast(tuple[Dim, ...], x.shape)[:2]
    size = units if isinstance(units, int) else None
    zero = op.ConstantOfShape([size_of(x, [1]), units], value=np.zeros(1, x.dtype))
    zero = zero.with_shape([batch, size])
    valid, last, nonempty = (None, None, None) if lengths is None else _masks(x, lengths)

    def states(z: MaybeTensor) -> list[Tensor]:
        """Splits a state by direction; zeros if it is absent."""
        pieces = _by_direction(z, 3, count, state_order)
        return [zero if piece is None else piece.with_shape([batch, size]) for piece in pieces]

    def final_states(z: MaybeTensor) -> list[Tensor]:
        """Splits the cotangent of a final state, which is constant for empty sequences."""
        if z is None or nonempty is None:
            return states(z)
        return [op.Where(nonempty, piece, 0) for piece in states(z)]

    def sequences(z: MaybeTensor) -> list[MaybeTensor]:
        """Splits Y or its cotangent by direction."""
        pieces = _by_direction(z, 4, count, y_order)
        return [
            None if piece is None else piece.with_shape([steps, batch, size]) for piece in pieces
        ]

    dy, dh, dc = (*node.g, None, None)[:3]
    parts: list[Sequence[Any]] = [  # in the order of the fields of `_Direction`
        *(_by_direction(z, 3, count) for z in (w, r)),
        *(_by_direction(z, 2, count) for z in (b, p)),
        *(states(z) for z in (h, c)),
        *(final_states(z) for z in (dh, dc)),
        *(sequences(z) for z in (node.y[0], dy)),
    ]
    return [
        _Direction(node.rules, start, units, x, valid, last, is_reverse, functions, *own)
        for is_reverse, functions, *own in zip(reverse, activations, *parts, strict=True)
    ]


def _is_reverse(node: _Node) -> list[bool]:
    """Returns for each direction of a node whether it is the reverse one."""
    direction = node.attributes.get("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        raise UnsupportedError(
            f"{node.description}: direction must be forward, reverse or bidirectional, got "
            f"'{direction}'"
        )
    return [False, True] if direction == "bidirectional" else [direction == "reverse"]


def _masks(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns masks of valid steps, of last steps, and of non-empty sequences.

    Args:
        x: The input, (steps, batch, features).
        lengths: The lengths of the sequences.
    """
    steps, batch = cast(tuple[Dim, ...], x.shape)[:2]
    lengths = op.Cast(lengths, to=ir.DataType.INT64)
    time = op.Unsqueeze(op.Range(0, size_of(x, [0]), 1), [1])
    valid = op.Unsqueeze(time < lengths, [2]).with_shape([steps, batch, 1])
    last = op.Unsqueeze(op.Equal(time, lengths - 1), [2]).with_shape([steps, batch, 1])
    return valid, last, op.Unsqueeze(lengths > 0, [1])


def _by_direction(
    z: MaybeTensor, rank: int, count: int, order: Sequence[int] | None = None
) -> list[MaybeTensor]:
    """Splits a tensor by direction, after a permutation of its axes."""
    if z is None:
        return [None] * count
    z = _ranked(z, rank)
    if order is not None:
        z = op.Transpose(z, perm=order)
    axis = 1 if rank == 4 else 0
    pieces = [z] if count == 1 else op.Split(z, axis=axis, num_outputs=2)
    return [op.Squeeze(piece, [axis]) for piece in pieces]


def _activations(node: _Node, directions: int, usual: Sequence[str]) -> list[Sequence[_Activation]]:
    """Returns the activations of each direction, which consume alpha and beta in order."""
    each, attributes = len(usual), node.attributes
    alphas = list(attributes.get("activation_alpha") or ())
    betas = list(attributes.get("activation_beta") or ())
    found: list[_Activation] = []
    names = attributes.get("activations", [*usual, *usual])[: each * directions]
    if len(names) < each * directions:
        raise UnsupportedError(
            f"{node.description}: direction {attributes.get('direction', 'forward')} requires "
            f"{each * directions} activations, got {list(names)}"
        )
    for name in names:
        if name not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise UnsupportedError(
                f"{node.description}: no gradient for activation '{name}'; use one of {known}"
            )
        alpha = beta = 0.0
        if name in _ALPHA:
            alpha = alphas.pop(0) if alphas else _ALPHA[name]
        if name in _BETA:
            beta = betas.pop(0) if betas else _BETA[name]
        found.append(_Activation(name, alpha, beta, attributes.get("clip")))
    return [found[index * each : (index + 1) * each] for index in range(directions)]


def _ranked(x: Tensor, rank: int) -> Tensor:
    """Sets the rank that the operator requires if the shape is unknown."""
    return x if x.shape is not None else x.with_shape([None] * rank)


def inside(x: Tensor, outer: Tensor) -> Tensor:
    """Returns a tensor of the outer graph for use in the graph of another tensor."""
    return x.tape.tensor(outer.value)


def plus(x: Tensor, y: MaybeTensor) -> Tensor:
    return x if y is None else x + y


def _times(x: Tensor, y: MaybeTensor) -> MaybeTensor:
    return None if y is None else x * y


def scan(
    step: Callable[..., Sequence[Tensor]],
    states: Sequence[Tensor],
    slices: Sequence[MaybeTensor],
    *,
    backwards: bool,
) -> list[Tensor]:
    """Emits a Scan.

    Args:
        step: The body. It is called with the states and slices, None for absent slices, and returns
            the new states and the outputs of the step.
        states: The initial states.
        slices: The tensors to scan along the first axis; None for absent ones.
        backwards: Whether to scan from the last slice to the first.

    Returns:
        The final states, then the outputs of all steps.
    """
    sequences = [sequence for sequence in slices if sequence is not None]
    tape = sequences[0].tape
    inner = tape.subgraph(f"{tape.scope}{'backwards' if backwards else 'forwards'}")

    def slice_of(sequence: Tensor) -> Tensor:
        return inner.input(f"{inner.scope}slice", sequence.dtype, (sequence.shape or ())[1:])

    carried = [inner.input(f"{inner.scope}state", z.dtype, z.shape or ()) for z in states]
    results = step(
        *carried, *[None if sequence is None else slice_of(sequence) for sequence in slices]
    )
    for result in results:
        # A value may be an output only once, and not an input too.
        if result.value.is_graph_input() or result.value.is_graph_output():
            result = op.Identity(result)
        inner.graph.outputs.append(result.value)
    count = len(sequences)
    made = len(results) - len(states)
    node = ir.Node(
        "",
        "Scan",
        [*(z.value for z in states), *(sequence.value for sequence in sequences)],
        [
            ir.AttrGraph("body", inner.graph),
            ir.AttrInt64("num_scan_inputs", count),
            ir.AttrInt64s("scan_input_directions", [int(backwards)] * count),
            ir.AttrInt64s("scan_output_directions", [int(backwards)] * made),
        ],
        num_outputs=len(results),
    )
    tape.append(node)
    steps = (sequences[0].shape or (None,))[0]
    outputs = []
    for index, (value, result) in enumerate(zip(node.outputs, results, strict=True)):
        value.type = result.value.type
        shape = result.shape or ()
        output = tape.tensor(value)
        if index < len(states):
            outputs.append(output.with_shape_of(states[index]))
        else:
            outputs.append(output.with_shape([steps, *shape]))
    return outputs
