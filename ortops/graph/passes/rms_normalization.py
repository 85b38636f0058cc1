"""Fusion of an RMS normalization that was exported as several nodes.

onnxruntime's SimplifiedLayerNormalization computes it in one pass over memory, with the rounding
errors of the nodes, and returns the factor of each row, which the backward pass needs.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.normalization import rms_vjp
from ortops.graph.constants import constant_number, constant_tensor
from ortops.graph.edit import has_one_reader, producer_of
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.passes.rewrite import Result, pattern, rewrite
from ortops.graph.tensor import Tape, Tensor

FUSED = "SimplifiedLayerNormalization"
"""onnxruntime's operator, in the standard domain."""

_PARTS = ("Add", "Div", "Mul", "Pow", "Reciprocal", "ReduceMean", "ReduceSumSquare", "Sqrt")

TABLE = Table()
"""The rule of the fused operator."""


class _RMSNormalization(Pass):
    """Fuses the nodes of an RMS normalization to one node."""

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes before differentiation, unless the user has a rule for one of them."""
        nodes = [node for node in draft.graph if node.op_type in _PARTS and not node.domain]
        if not any(node.op_type in ("Pow", "Sqrt") for node in nodes):
            return
        if all(map(draft.is_free, (*nodes, ir.Node("", FUSED, [])))):
            rewrite(draft.graph, draft.names, _fused)
            draft.add_rules(TABLE)


@pattern("Mul")
def _fused(node: ir.Node, tape: Tape) -> Result:
    for scaled, scale in (node.inputs, node.inputs[::-1]):
        if scaled is None or scale is None or not has_one_reader(scaled):
            continue
        found = _normalized(scaled)
        if found is None:
            continue
        x, epsilon = found
        if x.dtype != ir.DataType.FLOAT or x.shape is None or scale.shape is None:
            continue
        columns = x.shape[-1]
        if not isinstance(columns, int) or list(scale.shape) != [columns]:
            continue
        attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", epsilon)]
        attributes.append(ir.AttrInt64("stash_type", 1))
        fused = ir.Node("", FUSED, [x, scale], attributes, num_outputs=2)
        shapes = (x.shape.copy(), ir.Shape([*x.shape[:-1], 1]))
        for value, shape in zip(fused.outputs, shapes, strict=True):
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), shape
        tape.append(fused)
        return tape.tensor(fused.outputs[0])
    return None


def _normalized(value: ir.Value) -> tuple[ir.Value, float] | None:
    """Returns x and epsilon if a value is x / √(mean(x²) + epsilon), over the last axis."""
    node = producer_of(value, "Div", "Mul")
    if node is None:
        return None
    pairs = [(node.inputs[0], node.inputs[1])]
    if node.op_type == "Mul":
        pairs.append((node.inputs[1], node.inputs[0]))
    for x, factor in pairs:
        if x is None or factor is None or not has_one_reader(factor):
            continue
        square = _radicand(factor) if node.op_type == "Div" else _inverse_radicand(factor)
        added = producer_of(square, "Add")
        if square is None or added is None or not has_one_reader(square):
            continue
        for mean, other in (added.inputs, added.inputs[::-1]):
            epsilon = None if other is None else constant_number(other)
            if epsilon is not None and epsilon >= 0 and mean is not None and _is_mean(mean, x):
                return x, epsilon
    return None


def _radicand(value: ir.Value) -> ir.Value | None:
    """Returns v if a value is √v."""
    node = producer_of(value, "Pow", "Sqrt")
    if node is None or (node.op_type == "Pow" and not _has_number(node, 1, 0.5)):
        return None
    return node.inputs[0]


def _inverse_radicand(value: ir.Value) -> ir.Value | None:
    """Returns v if a value is 1 / √v."""
    node = producer_of(value, "Div", "Pow", "Reciprocal")
    if node is None:
        return None
    if node.op_type == "Pow":
        return node.inputs[0] if _has_number(node, 1, -0.5) else None
    if node.op_type == "Div" and not _has_number(node, 0, 1):
        return None
    root = node.inputs[-1]
    return None if root is None or not has_one_reader(root) else _radicand(root)


def _is_mean(value: ir.Value, x: ir.Value) -> bool:
    """Whether a value is the mean of x² over the last axis, which it keeps."""
    node = producer_of(value, "Div", "ReduceMean")
    if node is None or not has_one_reader(value) or not x.shape:
        return False
    source = node.inputs[0]
    if node.op_type == "Div":
        inner = producer_of(source, "ReduceSumSquare")
        size = x.shape[-1]
        if inner is None or not isinstance(size, int) or not _has_number(node, 1, size):
            return False
        return has_one_reader(inner.outputs[0]) and inner.inputs[0] is x and _is_last(inner, x)
    square = producer_of(source, "Mul", "Pow")
    if source is None or square is None or not has_one_reader(source) or not _is_last(node, x):
        return False
    if square.op_type == "Pow":
        return square.inputs[0] is x and _has_number(square, 1, 2)
    return square.inputs[0] is x and square.inputs[1] is x


def _is_last(reduction: ir.Node, x: ir.Value) -> bool:
    """Whether a reduction is over the last axis of x, and keeps it."""
    axes = reduction.inputs[1] if len(reduction.inputs) > 1 else None
    chosen = None if axes is None else constant_tensor(axes)
    if chosen is None or x.shape is None or not reduction.attributes.get_int("keepdims", 1):
        return False
    return [int(axis) % len(x.shape) for axis in chosen.numpy().ravel()] == [len(x.shape) - 1]


def _has_number(node: ir.Node, index: int, number: float) -> bool:
    """Whether an input of a node is a certain number."""
    value = node.inputs[index]
    return value is not None and constant_number(value) == number


@TABLE.vjp(FUSED, needs=(1,))
def _rule(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Cotangents:
    g_y, g_inverse = (*g, None)[:2]
    inverse = y[1]
    d_x = d_scale = None
    if g_y is not None:
        d_x, d_scale = rms_vjp(g_y, x, inverse, scale, [x.ndim - 1])
    if g_inverse is not None:  # of a gradient of higher order
        assert x.shape is not None
        assert isinstance(x.shape[-1], int)
        part = x * (g_inverse * inverse * (inverse * inverse) * (-1 / x.shape[-1]))
        d_x = part if d_x is None else d_x + part
    return d_x, d_scale


RMS_NORMALIZATION = _RMSNormalization("rms_normalization")
