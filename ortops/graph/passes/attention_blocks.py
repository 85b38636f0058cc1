"""Attention whose probabilities a step does not keep: the backward pass computes them again.

A file of an exporter has attention as products and a Softmax, and so has the definition of each
operator of attention. The backward pass would read the probabilities of all layers, which grow with
the square of the length. Before differentiation, this pass inserts a placeholder behind the last
product. Its rule is that of GroupQueryAttention, in blocks of queries. The forward pass is not
changed, and so are no bits of the loss. Operands may be broadcast, as far as is known: TorchScript
computes sizes at run time.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import Bound, bound_nodes
from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules._blocks import Operands, gradients_in_blocks
from ortops.graph.constants import Dim, constant_number
from ortops.graph.edit import emit_one, permutation_of, producer_of
from ortops.graph.matching import Behind, Form, Found, Number, Search, Variable, form
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.shapes import is_unknown, unbroadcast
from ortops.graph.tensor import Tape, Tensor, op

PRIVATE = "ortops.attention"
"""The private domain of placeholders until the end of lowering."""

_PAIRS = 2**18
"""The number of pairs of a query and a key from which on blocks are worth it, if it is known: with
256 queries and keys, a step of a Llama takes 7 % longer (measured)."""


def _before_cast(x: ir.Value) -> ir.Value | None:
    """Returns the value before a Cast from one type of operands to another."""
    node = producer_of(x, "Cast")
    source = None if node is None else node.inputs[0]
    return source if source is not None and {x.dtype, source.dtype} <= {*_TYPES} else None


def _wide(operand: Form) -> Form:
    """Returns a form that may be computed in another type: a softmax of float16 in float32."""
    return Behind(operand, _before_cast)


_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""The types of operands; the gradient is computed in float32."""

_Q, _K, _V, _BIAS, _NONE = (Variable(what) for what in ("Q", "K", "V", "the bias", "empty rows"))
_NUMBER, _DIVISOR, _INNER, _INNER_DIVISOR, _CAP = (Number() for _ in range(5))
_PRODUCT = _wide(form.MatMul(_Q, _K))
_SCALED = _PRODUCT * _NUMBER | _PRODUCT / _DIVISOR | _PRODUCT
_CAPPED = form.Tanh(_SCALED * _INNER | _SCALED / _INNER_DIVISOR | _SCALED) * _CAP
_SCORES = _CAPPED | _SCALED
_P = form.Softmax(_wide(_SCORES + _BIAS | _SCORES), ...)
_GUARDED = form.Where(form.IsNaN(_P), 0.0, _P)
_ALLOWED = form.Softmax(_wide(_SCORES + form.Where(_NONE, 0.0, _BIAS)), ...)
_EXCLUDED = form.Where(_NONE, 0.0, _ALLOWED)
"""What `attend` writes: rows of the bias that exclude all keys are left out."""

_FORMULA = form.MatMul(_wide(_EXCLUDED | _GUARDED | _P), _V)


class _AttentionBlocks(Pass):
    """Selects the gradient in blocks for attention of long or unknown lengths."""

    def prepare(self, draft: Draft) -> None:
        """Inserts placeholders, unless there are gradients of higher order."""
        graph = draft.graph
        if not any(node.op_type == "Softmax" for node in graph) or not draft.is_of_first_order:
            return
        xs = [x for node in bound_nodes(graph) for x in Bound.of(node).xs]
        active = draft.rules.active_values(list(graph), xs)
        made = [
            _insert(node, draft, active)
            for node in list(graph)
            if node.op_type == "MatMul" and not node.domain and node.outputs[0] in active
        ]
        if any(made):
            table = Table()
            table.vjp("Attention", domain=PRIVATE)(_gradient)
            draft.add_rules(table)

    def finish(self, draft: Draft) -> None:
        """Removes the placeholders."""
        for node in [node for node in draft.graph if node.domain == PRIVATE]:
            y = node.inputs[0]
            assert y is not None
            node.outputs[0].replace_all_uses_with(y)
            draft.graph.remove(node, safe=True)


def _insert(node: ir.Node, draft: Draft, active: Collection[ir.Value]) -> bool:
    """Inserts a placeholder behind a product, if that is the last one of attention."""
    y = node.outputs[0]
    for found in Search(_FORMULA, y, removing=False):
        if not all(map(draft.is_free, found.nodes)) or not _is_chosen(found, y):
            continue
        tape = Tape(node.graph, names=draft.names)
        tape.scope = f"{node.name}/"
        readers = [(use.node, use.idx) for use in y.uses()]
        with tape:
            k, scale = _keys(tape, found)
            inputs = [tape.tensor(y), tape.tensor(found[_Q]), k, tape.tensor(found[_V])]
            inputs += [tape.tensor(found[_BIAS])] if _BIAS in found else []
            new = emit_one(
                *(PRIVATE, "Attention", inputs, y.shape),
                scale=scale,
                softcap=found.number(_CAP) if _CAP in found else 0.0,
                trained=int(_BIAS in found and found[_BIAS] in active),
                masked=int(_P not in found or _GUARDED in found),
            )
        new.value.type = y.type
        for made in tape.nodes:
            tape.graph.remove(made)
        tape.graph.insert_after(node, tape.nodes)
        for reader, index in readers:
            reader.replace_input_with(index, new.value)
        return True
    return False


def _is_chosen(found: Found, y: ir.Value) -> bool:
    """Whether operands are of such a type and of rank 4, and may have enough pairs."""
    softmax = found[_P if _P in found else _ALLOWED]
    q, k, v, bias = (found.values.get(x) for x in (_Q, _K, _V, _BIAS))
    if any(x is None or x.dtype not in _TYPES for x in (q, v, softmax, y)):
        return False
    if any(x is None or x.shape is None or len(x.shape) != 4 for x in (q, k, v, softmax, y)):
        return False
    node = softmax.producer()
    if node is None or node.attributes.get_int("axis", -1) not in (-1, 3):
        return False
    if _CAP in found and found.number(_CAP) <= 0:
        return False
    assert softmax.shape is not None
    pairs = [size for size in softmax.shape[2:] if isinstance(size, int)]
    if len(pairs) == 2 and math.prod(pairs) < _PAIRS:
        return False
    return bias is None or (bias.shape is not None and len(bias.shape) <= 4)


def _keys(tape: Tape, found: Found) -> tuple[Tensor, float]:
    """Returns the keys, in rows, and the factor of the scores."""
    scale = found.number(_NUMBER) if _NUMBER in found else 1.0
    scale = scale / found.number(_DIVISOR) if _DIVISOR in found else scale
    if _CAP in found:  # c · tanh(a · s) = c · tanh(a · c · s / c)
        inner = found.number(_INNER) if _INNER in found else 1.0
        inner = inner / found.number(_INNER_DIVISOR) if _INNER_DIVISOR in found else inner
        scale = scale * inner * found.number(_CAP)
    k, node = found[_K], found[_K].producer()
    if node is not None and node.op_type == "Mul" and not node.domain:
        for value, other in (node.inputs, node.inputs[::-1]):
            number = constant_number(other) if other is not None else None
            if number is not None and value is not None and value.shape == k.shape:
                k, node, scale = value, value.producer(), scale * number
                break
    order = None if node is None else permutation_of(node)
    if node is None or order is None:
        return tape.tensor(k).mT, scale
    (source,) = node.inputs
    assert source is not None
    *outer, row, column = order
    perm = [*outer, column, row]
    x = tape.tensor(source)
    return (x if perm == sorted(perm) else op.Transpose(x, perm=perm)), scale


def _gradient(
    g: Tensor,
    y: Tensor,
    _: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float,
    softcap: float,
    trained: int,
    masked: int,
) -> Cotangents:
    given = q, k, v, bias
    g, y, q, k, v = (x.astype(np.float32) for x in (g, y, q, k, v))
    bias = None if bias is None else bias.astype(np.float32)
    wide_v = _spread(v, y, 2)
    wide_q, wide_k = _spread(q, y, 3), _spread(k, wide_v, 3)
    wide_bias = None if bias is None else _with_rows(bias, y, bool(trained))
    at = Operands(
        *(wide_q, wide_k, wide_v),
        bias=wide_bias,
        trained=bool(trained),
        masked=bool(masked),
        scale=scale,
        softcap=softcap,
    )
    dq, dk, dv, dbias, _sink = gradients_in_blocks(g, y, at)
    pairs = zip((dq, dk, dv, dbias), given, strict=True)
    found = [
        None if dx is None or x is None else unbroadcast(dx, x).astype(x.dtype) for dx, x in pairs
    ]
    return (None, *found[: 3 if bias is None else 4])


def _spread(x: Tensor, like: Tensor, count: int) -> Tensor:
    """Returns x with the first sizes of another tensor, to which products may broadcast it."""
    assert x.shape is not None
    assert like.shape is not None
    if x.shape[:count] == like.shape[:count] and not any(map(_is_open, x.shape[:count])):
        return x
    sizes = op.Concat(op.Shape(like, start=0, end=count), [1] * (4 - count), axis=0)
    return op.Expand(x, sizes).with_shape([*like.shape[:count], *x.shape[count:]])


def _with_rows(bias: Tensor, y: Tensor, trained: bool) -> Tensor:
    """Returns a bias with four axes; if it is trained, with a row for each query."""
    x = op.Unsqueeze(bias, list(range(4 - bias.ndim))) if bias.ndim < 4 else bias
    assert x.shape is not None
    assert y.shape is not None
    if not trained or (x.shape[2] == y.shape[2] and not _is_open(y.shape[2])):
        return x
    sizes = op.Concat([1, 1], op.Shape(y, start=2, end=3), [1], axis=0)
    return op.Expand(x, sizes).with_shape([*x.shape[:2], y.shape[2], x.shape[3]])


def _is_open(dim: Dim) -> bool:
    return dim is None or (isinstance(dim, str) and is_unknown(ir.SymbolicDim(dim)))


ATTENTION_BLOCKS = _AttentionBlocks("attention_blocks")
