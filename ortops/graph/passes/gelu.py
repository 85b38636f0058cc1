"""Fusion of a Gelu that was exported as several nodes; the backward pass keeps only its input.

The formula is x · (1 + erf(x / √2)) / 2, or with √(2 / π) · (x + 0.044715 · x³) under a tanh. The
gradient of the latter also reads the output, if that of the next layer does.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeAlias

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.elementwise import gelu
from ortops.graph.constants import constant_number
from ortops.graph.edit import has_one_reader, producer_of
from ortops.graph.operators import MOVES
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, Tensor, op

_PARTS = ("Add", "Div", "Erf", "Gelu", "Mul", "Pow", "Tanh")
_CUBIC = 0.044715
_MOST_PARTS = 32  # of a product: its factors, and the products in it

PRIVATE = "ortops.gelu"
"""The private domain of gradients until the end of lowering."""

_LARGE = 6.0  # beyond it, the derivative is 0 or 1 up to 1e-9
_MOST = 1 + _CUBIC * _LARGE**2

Product: TypeAlias = tuple[float, Counter[ir.Value]]
"""A constant factor, and the exponent of each value."""


class _Gelu(Pass):
    """Fuses the nodes of a Gelu to one node."""

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes before differentiation, unless the user has a rule for one of them."""
        nodes = [node for node in draft.graph if node.op_type in _PARTS and not node.domain]
        named = {node.op_type for node in nodes}
        free = all(map(draft.is_free, (*nodes, ir.Node("", "Gelu", []))))
        if "Mul" in named and named & {"Erf", "Tanh"} and free:
            rewrite(draft.graph, draft.names, _gelu)
        chosen = {node for node in draft.graph if _is_approximate(node) and draft.is_free(node)}
        if chosen and draft.is_of_first_order:
            table = Table()
            table.vjp("Gelu", when=chosen.__contains__)(_later)
            draft.add_rules(table)

    def finish(self, draft: Draft) -> None:
        """Replaces the placeholders, and computes the gate in the gradient in fewer nodes."""
        rewrite(draft.graph, draft.names, _gradient)
        rewrite(draft.graph, draft.names, _gate)


def _is_approximate(node: ir.Node) -> bool:
    is_tanh = node.attributes.get_string("approximate", "none") == "tanh"
    is_gelu = node.op_type == "Gelu" and not node.domain
    return is_gelu and is_tanh and node.outputs[0].dtype == ir.DataType.FLOAT


def _later(g: Tensor, y: Tensor, x: Tensor, *, approximate: str = "none") -> Cotangents:
    """Emits a placeholder: only when all gradients are there, it is known what keeps y."""
    node = ir.Node(PRIVATE, "Gradient", [g.value, y.value, x.value], num_outputs=1)
    node.outputs[0].type, node.outputs[0].shape = g.value.type, g.value.shape
    g.tape.append(node)
    return g.tape.tensor(node.outputs[0])


@pattern("Gradient", domain=PRIVATE)
def _gradient(node: ir.Node, tape: Tape) -> Result:
    g, y, x = (tape.tensor(value) for value in node.inputs if value is not None)
    if not _is_kept(y.value):
        result = gelu(g, y, x, approximate="tanh")
        assert isinstance(result, Tensor)
        return result
    return g * _slope(y, x)


def _slope(y: Tensor, x: Tensor) -> Tensor:
    """Returns the derivative, so that the gradient takes 12 passes over memory instead of 15.

    y = x · s(v) with the logistic function s and v = √(8 / π) · (x + 0.044715 · x³), so that
    dy / dx = s + y · (1 - s) · dv / dx. HardSigmoid is (1 + 0.044715 · x²) / a, and 1 where x is
    large, so that nothing overflows.
    """
    scale = math.sqrt(8 / math.pi)
    h = op.HardSigmoid(x * x, alpha=_CUBIC / _MOST, beta=1 / _MOST)
    s = op.Sigmoid(x * h * (scale * _MOST))
    return s + y * (1 - s) * (h * (3 * scale * _MOST) - 2 * scale)


def _is_kept(y: ir.Value) -> bool:
    """Whether the product that reads a tensor has a gradient that reads it, too, in any shape."""
    products = 0
    pending = [y]
    while pending:
        for user, index in pending.pop().uses():
            if user.op_type in ("FusedMatMul", "Gemm", "MatMul"):
                products += 1
            elif user.op_type in MOVES and not user.domain and index == 0:
                pending.append(user.outputs[0])
    return products > 1


@pattern("Add")
def _gate(node: ir.Node, tape: Tape) -> Result:
    """Replaces (1 + z) / 2 with one node if z is an erf or tanh, whose bounds are -1 and 1."""
    half, scaled = node.inputs
    if half is None or scaled is None or scaled.dtype != ir.DataType.FLOAT:
        return None
    factor, values = _product(scaled)
    if (constant_number(half), factor, list(values.values())) != (0.5, 0.5, [1]):
        return None
    (z,) = values
    if producer_of(z, "Erf", "Tanh") is None:
        return None
    return op.HardSigmoid(tape.tensor(z), alpha=0.5, beta=0.5)


@pattern("Mul")
def _gelu(node: ir.Node, tape: Tape) -> Result:
    if node.outputs[0].dtype != ir.DataType.FLOAT:  # onnxruntime's kernel supports only float32
        return None
    factor, values = _product(node.outputs[0], root=True)
    if not _near(factor, 0.5) or sorted(values.values()) != [1, 1]:
        return None
    for x, other in (tuple(values), tuple(values)[::-1]):
        squashed = _one_more(other)
        inner = None if squashed is None else squashed.producer()
        argument = None if inner is None or inner.domain else inner.inputs[0]
        if inner is None or argument is None or not has_one_reader(argument):
            continue
        if inner.op_type == "Erf" and _is(_product(argument), math.sqrt(0.5), {x: 1}):
            return op.Gelu(tape.tensor(x))
        if inner.op_type == "Tanh" and _is_cubic(argument, x):
            return op.Gelu(tape.tensor(x), approximate="tanh")
    return None


def _is_cubic(value: ir.Value, x: ir.Value) -> bool:
    """Whether a value is √(2 / π) · (x + 0.044715 · x³), or x · √(2 / π) · (1 + 0.044715 · x²)."""
    factor, values = _product(value)
    if not _near(factor, math.sqrt(2 / math.pi)):
        return False
    power = values.pop(x, 0)
    ((added, once),) = values.items() if len(values) == 1 else ((None, 0),)
    node = None if added is None else added.producer()
    if added is None or node is None or once != 1 or not has_one_reader(added):
        return False
    if power == 1:
        rest = _one_more(added)
        return rest is not None and _is(_product(rest), _CUBIC, {x: 2})
    if power or node.op_type != "Add" or node.domain:
        return False
    return any(
        first is x and second is not None and _is(_product(second), _CUBIC, {x: 3})
        for first, second in (node.inputs, node.inputs[::-1])
    )


def _product(value: ir.Value, *, root: bool = False) -> Product:
    """Splits a value into its factors.

    Args:
        value: The value.
        root: Whether the value may have several consumers; intermediate products must have one.

    Returns:
        The factors; of a product of more parts than a Gelu has, the value itself.
    """
    factor, values, pending = 1.0, Counter[ir.Value](), [(value, root)]
    for _ in range(_MOST_PARTS):
        if not pending:
            return factor, values
        current, is_root = pending.pop()
        if (constant := constant_number(current)) is not None:
            factor *= constant
            continue
        node = current.producer()
        free = node is not None and not node.domain and (is_root or has_one_reader(current))
        first, second = (*node.inputs, None, None)[:2] if node is not None and free else (None,) * 2
        number = None if second is None else constant_number(second)
        if node is None or first is None or second is None:
            values[current] += 1
        elif node.op_type == "Mul":
            pending += [(second, False), (first, False)]
        elif node.op_type == "Div" and number:
            factor /= number
            pending.append((first, False))
        elif node.op_type == "Pow" and number in (2, 3):
            values[first] += int(number)
        else:
            values[current] += 1
    return 1.0, Counter([value])


def _one_more(value: ir.Value) -> ir.Value | None:
    """Returns a if the value is a + 1 and both have one consumer."""
    node = producer_of(value, "Add")
    if node is None or not has_one_reader(value):
        return None
    for added, one in (node.inputs, node.inputs[::-1]):
        if (
            added is not None
            and one is not None
            and constant_number(one) == 1
            and has_one_reader(added)
        ):
            return added
    return None


def _is(product: Product, factor: float, values: dict[ir.Value, int]) -> bool:
    return _near(product[0], factor) and product[1] == values


def _near(number: float, other: float) -> bool:
    """Whether two numbers are equal in float32."""
    return math.isclose(number, other, rel_tol=1e-6)


GELU = _Gelu("gelu", ONNXRUNTIME)
