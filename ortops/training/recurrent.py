"""LSTM networks in the private graph of a TrainingSession: the forward pass keeps its gates.

The LSTM operator puts out states only, so its rule has to compute the gates once more. Here, before
gradients are taken, `keep_gates` replaces the operator by a Scan that puts out what the
backward pass needs, and by a node that stands for both: it passes the outputs on, and its rule
reads what the Scan has put out. Once gradients are taken that node goes.

All tensors of a step have the batch last. The product of a step, R · h, then has the large matrix
on its left, where onnxruntime's kernel reads it as it is; on the right it would be copied in each
step, into the order that the kernel wants.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from ortops import gradient
from ortops.autodiff import ancestor_nodes, attribute_value, dependent_values, vjp
from ortops.gradient import BOUND_DOMAIN, is_of_higher_order
from ortops.rules._types import Cotangents
from ortops.rules.recurrent import scan
from ortops.tensor import Tape, Tensor, op, remove_unread, size_of
from ortops.training.products import fused_matmul

__all__ = ["keep_gates"]

DOMAIN = "ortops.recurrent"
"""The private domain of the node that stands for an LSTM."""

_INPUTS = 6  # X, W, R, B, initial_h and initial_c: those that get cotangents
_OUTPUTS = 3  # Y, Y_h and Y_c
_USUAL = ("Sigmoid", "Tanh", "Tanh")
_SAMPLES = 8  # below, onnxruntime's own LSTM and the gates once more are faster (measured)


@contextlib.contextmanager
def keep_gates(model: ir.Model) -> Iterator[None]:
    """While it lasts, a prepared model is lowered so that LSTM nodes keep what gradients need.

    Nodes of float32 with the usual activations, and without sequence lengths, peepholes, clipping
    or coupled gates, take part, unless a gradient of higher order is asked for. The result is for
    onnxruntime's CPU provider; others have faster kernels for LSTM than for Scan.
    """
    found = [] if is_of_higher_order(model.graph) else _differentiated(model.graph)
    for node in found:
        _insert(node)
    yield
    if found:
        _remove(model.graph)


def _differentiated(graph: ir.Graph) -> list[ir.Node]:
    """Returns the LSTM nodes that take part."""
    usual = [node for node in graph if _is_usual(node)]
    found: set[ir.Node] = set()
    for bound in graph if usual else ():
        if bound.domain == BOUND_DOMAIN:
            *inputs, y = (value for value in bound.inputs if value is not None)
            named = inputs[len(inputs) // 2 :]
            wanted = ancestor_nodes(y, set(named))
            path = [node for node in graph if node in wanted]
            xs = named[: len(bound.outputs)]
            reached = dependent_values(path, xs, differentiably=True)
            found |= {node for node in path if reached.intersection(node.outputs)}
    return [node for node in usual if node in found]


def _is_usual(node: ir.Node) -> bool:
    """Whether a node is an LSTM of the form that is replaced, and no gradient names its outputs."""
    if node.domain or node.op_type != "LSTM" or any(node.inputs[4:5]) or any(node.inputs[7:]):
        return False
    attributes = {name: attribute_value(each) for name, each in node.attributes.items()}
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
        and not any(user.domain == BOUND_DOMAIN for y in node.outputs for user, _ in y.uses())
    )


def _parts(x: Tensor | None, count: int) -> list[Tensor | None]:
    """Splits a tensor by its first axis, which is that of the directions."""
    if x is None:
        return [None] * count
    pieces = [x] if count == 1 else op.Split(x, axis=0, num_outputs=count)
    return [op.Squeeze(piece, [0]) for piece in pieces]


def _joined(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Joins what each direction has given along a new axis."""
    pieces: list[Tensor] = [op.Unsqueeze(part, [axis]) for part in parts]
    return pieces[0] if len(pieces) == 1 else cast(Tensor, op.Concat(*pieces, axis=axis))


def _swapped(x: Tensor) -> Tensor:
    """Exchanges the last two axes."""
    return cast(Tensor, op.Transpose(x, perm=[1, 0] if x.ndim == 2 else [0, 2, 1]))


def _columns(x: Tensor) -> Tensor:
    """Returns (steps, rows, batch) as (rows, steps · batch)."""
    return cast(Tensor, op.Flatten(op.Transpose(x, perm=[1, 0, 2]), axis=1))


def _insert(node: ir.Node) -> None:
    """Replaces an LSTM by a Scan that keeps the gates."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    tape = Tape(graph, before=node)
    tape.scope = f"{node.name or node.op_type}/"
    given = [None if value is None else tape.tensor(value) for value in node.inputs]
    x, w, r, b, _, h, c = (*given, *[None] * 4)[:7]
    assert x is not None
    assert w is not None
    assert r is not None
    direction = node.attributes.get_string("direction", "forward")
    backwards = [False, True] if direction == "bidirectional" else [direction == "reverse"]
    count = len(backwards)
    zero = None if h is not None and c is not None else _zero_state(x, r)
    results: list[list[Tensor]] = []
    with tape:
        w_parts, r_parts, b_parts = (_parts(each, count) for each in (w, r, b))
        h_parts, c_parts = (_parts(each, count) for each in (h, c))
        for index in range(count):
            first = [zero if z is None else _swapped(z) for z in (h_parts[index], c_parts[index])]
            results.append(
                _forward(
                    x,
                    cast(Tensor, w_parts[index]),
                    cast(Tensor, r_parts[index]),
                    b_parts[index],
                    cast(Sequence[Tensor], first),
                    backwards=backwards[index],
                )
            )
        y = _joined([_swapped(saved[2]) for saved in results], axis=1)
        states = [_joined([_swapped(saved[k]) for saved in results]) for k in (0, 1)]
    saved = [tensor for each in results for tensor in each[2:]]
    stand_in = ir.Node(
        DOMAIN,
        "LSTM",
        [None if t is None else t.value for t in (x, w, r, b, h, c, y, *states, *saved)],
        [ir.AttrInt64s("backwards", [int(each) for each in backwards])],
        num_outputs=_OUTPUTS,
    )
    tape.append(stand_in)
    for new, like in zip(stand_in.outputs, (y, *states), strict=True):
        new.type, new.shape = like.value.type, like.value.shape
    put_out: set[ir.Value] = set()
    for old, new in zip(node.outputs, stand_in.outputs, strict=False):
        if old.name:
            new.shape = old.shape if old.shape is not None else new.shape
            gradient.replace_value(tape, old, tape.tensor(new), put_out)
    graph.remove(node, safe=True)


def _zero_state(x: Tensor, r: Tensor) -> Tensor:
    """Returns a state of zeros, [H, N]."""
    sizes = op.Concat(op.Shape(r, start=2, end=3), op.Shape(x, start=1, end=2), axis=0)
    batch = None if x.shape is None else x.shape[1]
    units = None if r.shape is None else r.shape[2]
    return cast(Tensor, op.ConstantOfShape(sizes)).with_shape([units, batch])


def _with_ones(x: Tensor) -> Tensor:
    """Returns x with a last column of ones, which a bias is multiplied by."""
    shape = op.Concat(op.Shape(x, start=0, end=2), [1], axis=0)
    ones = op.ConstantOfShape(shape, value=np.ones(1, x.dtype))
    return cast(Tensor, op.Concat(x, ones, axis=2))


def _times_transposed(w: Tensor, x: Tensor) -> Tensor:
    """Returns w · xᵀ for each step: (steps, rows, batch) for x (steps, batch, columns)."""
    steps, batch, _ = x.shape or (None,) * 3
    product = fused_matmul(w.tape, [w.value, x.value], [0, 1])
    return product.with_shape([steps, (w.shape or (None,))[0], batch])


def _forward(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    first: Sequence[Tensor],
    *,
    backwards: bool,
) -> list[Tensor]:
    """Emits one direction of an LSTM.

    Args:
        x: The input, [T, N, I].
        w: The weights of the input, [4 · H, I].
        r: The weights of the hidden state, [4 · H, H].
        b: Both biases, [8 · H].
        first: The states at the beginning, [H, N].
        backwards: Whether to go from the last step to the first.

    Returns:
        The states at the end, [H, N]; then, of all steps, [T, H, N], the hidden state after and
        before a step, the gates i, o, f and c, and i · c, f · cell state, and tanh of what is their
        sum.
    """
    if b is not None:
        w_bias, r_bias = op.Split(b, axis=0, num_outputs=2)
        w = op.Concat(w, op.Unsqueeze(w_bias + r_bias, [1]), axis=1)
        x = _with_ones(x)
    a = _times_transposed(w, x)

    def step(h: Tensor, c: Tensor, a: Tensor) -> Sequence[Tensor]:
        a_i, a_o, a_f, a_c = op.Split(op.Gemm(h.tape.tensor(r.value), h, a), axis=0, num_outputs=4)
        i, o, f = (op.Sigmoid(each) for each in (a_i, a_o, a_f))
        g = op.Tanh(a_c)
        added, kept = i * g, f * c
        after = added + kept
        tanh = op.Tanh(after)
        new = o * tanh
        return new, after, new, h, i, o, f, g, added, kept, tanh

    return scan(step, first, [a], backwards=backwards)


@vjp("LSTM", domain=DOMAIN)
def _lstm(
    g: Sequence[Tensor | None],
    y: Sequence[Tensor | None],
    *inputs: Tensor | None,
    backwards: Sequence[int],
) -> Cotangents:
    x, w, r, b, h, c = inputs[:_INPUTS]
    assert x is not None
    assert w is not None
    assert r is not None
    saved = cast(Sequence[Tensor], inputs[_INPUTS + _OUTPUTS :])
    count = len(backwards)
    each = len(saved) // count
    dy, dh, dc = g
    dy_parts: list[Any] = [None] * count
    if dy is not None:
        pieces = [dy] if count == 1 else op.Split(dy, axis=1, num_outputs=count)
        dy_parts = [_swapped(op.Squeeze(piece, [1])) for piece in pieces]
    zero = _zero_state(x, r)
    states = [
        [zero if part is None else _swapped(part) for part in _parts(z, count)] for z in (dh, dc)
    ]
    x_rows = op.Flatten(x if b is None else _with_ones(x), axis=2)
    w_parts, r_parts = _parts(w, count), _parts(r, count)
    dx: Any = None
    found: list[list[Tensor]] = []
    for index, reverse in enumerate(backwards):
        here = saved[index * each : (index + 1) * each]
        r_part = cast(Tensor, r_parts[index])
        first = [states[0][index], states[1][index]]
        dh, dc, da = _backward(here, first, dy_parts[index], r_part, backwards=not reverse)
        dw = op.Gemm(da, x_rows)
        db = dw
        if b is not None:
            dw, db = op.Split(dw, [size_of(w, [2]), 1], axis=1)
            db = op.Squeeze(op.Concat(db, db, axis=0), [1])
        dr = op.Gemm(da, _columns(here[1]), transB=1)
        found.append([dw, dr, db, _swapped(dh), _swapped(dc)])
        part = op.Gemm(da, w_parts[index], transA=1)
        dx = part if dx is None else dx + part
    others = [_joined(parts) for parts in zip(*found, strict=True)]
    return (
        op.Reshape(dx, op.Shape(x), allowzero=1),
        *(None if z is None else dz for z, dz in zip((w, r, b, h, c), others, strict=True)),
    )


def _backward(
    saved: Sequence[Tensor],
    last: Sequence[Tensor],
    dy: Tensor | None,
    r: Tensor,
    *,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Emits the backward pass of one direction.

    Args:
        saved: What `_forward` returned behind the states.
        last: The cotangents of the states at the end, [H, N].
        dy: The cotangents of the hidden states, [T, H, N].
        r: The weights of the hidden state, [4 · H, H].
        backwards: Whether to go from the last step to the first, that is against the direction.

    Returns:
        The cotangents of the states at the beginning, [H, N], and of the pre-activations of all
        gates, [4 · H, T · N].
    """
    h, _, i, o, f, g, added, kept, tanh = saved
    transposed = _swapped(r)
    h_c = o - h * tanh
    # Derivatives by the pre-activations: of the cell state, and for o of the hidden state.
    slopes = op.Concat(added - i * added, h - o * h, kept - f * kept, i - added * g, axis=1)

    def step(
        dh: Tensor, dc: Tensor, dy: Tensor | None, h_c: Tensor, slopes: Tensor, f: Tensor
    ) -> Sequence[Tensor]:
        dh = dh if dy is None else dh + dy
        dc = dc + dh * h_c
        da = op.Concat(dc, dh, dc, dc, axis=0) * slopes
        return dh.tape.tensor(transposed.value) @ da, dc * f, da

    dh, dc, da = scan(step, last, [dy, h_c, slopes, f], backwards=backwards)
    return dh, dc, _columns(da)


def _remove(graph: ir.Graph) -> None:
    """Removes the nodes that stand for an LSTM."""
    tape = Tape(graph)
    put_out: set[ir.Value] = set()
    for node in [node for node in graph if node.domain == DOMAIN]:
        tape.before = node
        for old, new in zip(node.outputs, node.inputs[_INPUTS:], strict=False):
            assert new is not None
            gradient.replace_value(tape, old, tape.tensor(new), put_out)
    remove_unread(list(graph))
    graph.opset_imports.pop(DOMAIN, None)
