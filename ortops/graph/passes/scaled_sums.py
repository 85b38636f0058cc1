"""Sums y + c · x of large tensors in one pass over memory.

With standard operators they take two passes, one for the product. onnxruntime's convolution kernels
in the blocked layout (see `ortops.graph.passes.blocked.kernels`) need only one: they convolve each
channel with a single weight, c, and add the result to y, in place if the result is bound to the
memory of y. The elements may be in any order, because all of them are scaled by the same number. On
machines without these kernels, onnxruntime's GatedAdd is used, from version 1.31 on; it rounds like
the standard operators.
"""

from __future__ import annotations

import functools
from collections.abc import Container

import numpy as np
import onnx_ir as ir

from ortops.graph.constants import constant_tensor
from ortops.graph.edit import emit_one
from ortops.graph.faults import outputs_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.names import Names
from ortops.graph.passes.blocked.kernels import block_size, convolve, sizes
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, Tensor, op

DOMAIN = "ortops.scaled_sums"
"""The private domain of a sum y + c · x."""

_CHANNELS = 16  # a multiple of any kernel's block
_HEIGHT = 16  # threads share the rows

MULTIPLE = _CHANNELS * _HEIGHT
"""The number of elements must be a multiple of this."""


def arranged(size: int) -> tuple[int, int, int, int]:
    """Returns the shape in which the kernels read a tensor with the given number of elements."""
    return 1, _CHANNELS, _HEIGHT, size // MULTIPLE


def has_kernel() -> bool:
    """Returns whether onnxruntime has a kernel here that computes such a sum in one pass."""
    return block_size() is not None or has_gated_add()


def adds_to_zero() -> bool:
    """Returns whether the kernel adds c · x to 0 before y, as a convolution does: -0 becomes 0."""
    return block_size() is not None


@functools.cache
def has_gated_add() -> bool:
    """Returns whether onnxruntime has GatedAdd."""
    with Tape(name="probe") as tape:
        x = tape.input("x", np.float32, arranged(MULTIPLE))
        tape.output(gated_add(x, tape.input("gate", np.float32, [*arranged(MULTIPLE)[:3], 1]), x))
    return outputs_of(tape.model()) is not None


def insert(formula: ir.Graph, updated: Container[ir.Value]) -> None:
    """Fuses the sums in an update's formula to single nodes, which `expand` replaces later.

    A running mean p of q, a · p + (1 - a) · q, becomes p + (1 - a) · (q - p), which scales once.
    If the mean is infinite, its next value is then NaN, but training has diverged anyway.

    Args:
        formula: See `ortops.engine.execution.update_groups.Group`; it is modified in place.
        updated: Its inputs whose next values it computes, in their memory if possible.
    """

    @pattern("Add", "Sub")
    def scaled_sum(node: ir.Node, tape: Tape) -> Result:
        a, b = (tape.tensor(value) for value in node.inputs if value is not None)
        if node.outputs[0].dtype != ir.DataType.FLOAT or a.shape == () or b.shape == ():
            return None
        # Each pair: a summand, the other one, and -1 if that is subtracted.
        pairs = [(a, b, 1), (b, a, 1)] if node.op_type == "Add" else [(a, b, -1)]
        tries = (form(*pair, updated) for form in (_running_mean, _scaled_sum) for pair in pairs)
        return next((found for found in tries if found is not None), None)

    rewrite(formula, Names(formula), scaled_sum)


def _running_mean(a: Tensor, b: Tensor, sign: int, updated: Container[ir.Value]) -> Tensor | None:
    """Returns a + b if they are decay · p and (1 - decay) · q, and decay is at least ½; or None."""
    if sign < 0:
        return None
    decay, p = _factored(a)
    weight, q = _factored(b)
    if decay is None or weight is None or decay.constant is None or weight.constant is None:
        return None
    # With a small decay, p should vanish quickly, but its rounding error would remain.
    if decay.constant < 0.5 or decay.constant + weight.constant != 1 or p.value not in updated:
        return None
    return _node(q - p, weight, p, 1)


def _scaled_sum(
    y: Tensor, product: Tensor, sign: int, updated: Container[ir.Value]
) -> Tensor | None:
    """Returns y + product, or y - product, if one factor of the product is a scalar; or None."""
    factor, x = _factored(product)
    if factor is None or x.value in updated:  # the result may be written to the memory of x
        return None
    return _node(x, factor, y, sign)


def _factored(x: Tensor) -> tuple[Tensor | None, Tensor]:
    """Splits a product or quotient into a scalar factor, or None, and the rest."""
    outer: list[tuple[str, Tensor]] = []
    inner = x
    while True:
        node = inner.value.producer()
        if node is None or node.op_type not in ("Mul", "Div") or len(inner.value.uses()) > 1:
            return None, x
        left, right = (x.tape.tensor(value) for value in node.inputs if value is not None)
        if node.op_type == "Mul":
            if right.shape == ():
                left, right = right, left
            if left.shape == ():
                break
        outer.append((node.op_type, right))
        inner = left
    for op_type, other in reversed(outer):
        right = right * other if op_type == "Mul" else right / other
    return left, right


def _node(x: Tensor, factor: Tensor, y: Tensor, sign: int) -> Tensor:
    total = emit_one(DOMAIN, "ScaledSum", [x, factor, y], (), sign=sign)
    total.value.shape = y.value.shape
    return total


def overwrites(writer: ir.Node, value: ir.Value) -> bool:
    """Whether a node writes its result before it reads a value, if both have the same memory."""
    return writer.op_type == "ScaledSum" and writer.inputs[0] is value


def expand(graph: ir.Graph) -> None:
    """Replaces the nodes of `insert` with those of onnxruntime; tensors must be `arranged`."""
    rewrite(graph, Names(graph), _kernel)


@pattern("ScaledSum", domain=DOMAIN)
def _kernel(node: ir.Node, tape: Tape) -> Result:
    x, factor, y = (tape.tensor(value) for value in node.inputs if value is not None)
    blocked = block_size() is not None
    shape = (_CHANNELS, 1, 1, 1) if blocked else (*sizes(y)[:3], 1)
    signs = np.full(shape, node.attributes["sign"].as_int(), np.float32)
    constant = constant_tensor(factor.value)
    known = None if constant is None else tape.constant(signs * constant.numpy())
    weights = op.Mul(signs, factor) if known is None else known
    if not blocked:
        return gated_add(x, weights, y)
    return convolve(x, weights, sizes(y), kernel=(1, 1), add=y, group=_CHANNELS)


def gated_add(x: Tensor, weights: Tensor, y: Tensor) -> Tensor:
    """Returns y + weights · x, with a weight for each row of x, which has the shape of y."""
    assert x.value.shape is not None
    return emit_one(MICROSOFT, "GatedAdd", [y, x, weights], x.value.shape)
