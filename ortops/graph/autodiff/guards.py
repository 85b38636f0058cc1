"""Values that may be NaN where a model replaces them, so that gradients must not read the NaN.

A Softmax of a row that a mask excludes entirely is NaN. Exporters write PyTorch's attention with
``Where(IsNaN(p), 0, p)`` behind it, or ``Where(p != p, 0, p)``. The cotangent of such an element is
0, but 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx_ir as ir

from ortops.graph.edit import producer_of
from ortops.graph.operators import ELEMENTWISE, REARRANGES, having
from ortops.graph.tensor import Tensor, op

_SOURCES = ("LogSoftmax", "Softmax")
_PASSING = (ELEMENTWISE - having("zero")) | REARRANGES | {"Dropout"}
_PRODUCTS = frozenset({"Einsum", "Gemm", "MatMul"})


def guarded_values(nodes: Iterable[ir.Node]) -> frozenset[ir.Value]:
    """Returns the values from a Softmax or LogSoftmax up to a Where that replaces their NaN.

    Args:
        nodes: The nodes of a graph, in topological order.
    """
    found: set[ir.Value] = set()
    for node in nodes:
        value, _ = _tested(node)
        if value is not None and all(_replaces_nan(user, value) for user, _ in value.uses()):
            found |= _since_softmax(value)
    return frozenset(found)


def without_nan(x: Tensor) -> Tensor:
    """Returns x with 1 for NaN, whose product with a cotangent of 0 is 0, and its quotient, too."""
    return x.tape.once(("without NaN", x.value), lambda: op.Where(op.IsNaN(x), 1, x))


def _replaces_nan(user: ir.Node, value: ir.Value) -> bool:
    """Whether a reader of a value does not read its NaN."""
    if user.op_type in ("Shape", "Size") or user.outputs[0].dtype == ir.DataType.BOOL:
        return True
    if user.op_type != "Where" or user.domain:
        return False
    condition, if_true, if_false = user.inputs
    negated = False
    while (inverse := producer_of(condition, "Not")) is not None:
        condition, negated = inverse.inputs[0], not negated
    tested, is_nan = _tested(producer_of(condition))
    return tested is value and (if_true if is_nan != negated else if_false) is not value


def _tested(node: ir.Node | None) -> tuple[ir.Value | None, bool]:
    """Returns what a node tests for NaN, and whether it is true for NaN; None for other nodes."""
    if node is None or node.domain or node.op_type not in ("Equal", "IsNaN"):
        return None, False
    if node.op_type == "IsNaN":
        return node.inputs[0], True
    same = node.inputs[0] is node.inputs[1]  # NaN is not equal to itself
    return (node.inputs[0] if same else None), False


def _since_softmax(value: ir.Value) -> set[ir.Value]:
    """Returns a value and those before it, up to a Softmax, with at most one product between."""
    found: set[ir.Value] = set()
    pending: list[tuple[ir.Value, tuple[ir.Value, ...], bool]] = [(value, (value,), False)]
    seen: set[tuple[ir.Value, bool]] = set()
    while pending:
        current, path, multiplied = pending.pop()
        node = producer_of(current)
        if node is None or (current, multiplied) in seen:
            if current in found:
                found.update(path)
            continue
        seen.add((current, multiplied))
        if node.op_type in _SOURCES:
            found.update(path)
            continue
        if node.op_type == "Div" and producer_of(node.inputs[0], "Exp") is not None:
            found.update((*path, *_float_inputs(node)))  # exp(x) / Σ exp(x), a Softmax
            continue
        is_product = node.op_type in _PRODUCTS
        if node.op_type in _PASSING or (is_product and not multiplied):
            multiplied |= is_product
            pending += [(each, (*path, each), multiplied) for each in _float_inputs(node)]
    return found


def _float_inputs(node: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        if value is not None and value.dtype is not None and value.dtype.is_floating_point():
            yield value
