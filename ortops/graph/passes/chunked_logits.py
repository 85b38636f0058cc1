"""Cross-entropy of logits that never exist together: a chunk of rows at a time.

A language model with a vocabulary of 150,000 has more logits than anything else. A Scan over chunks
of rows computes the logits of a chunk, their losses, and at once the gradient of these by the rows
from which the logits are computed, which are few numbers. The logits are not computed again in the
backward pass, which only scales this gradient.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.backward import backward
from ortops.graph.autodiff.gradient_node import Bound, bound_nodes
from ortops.graph.autodiff.registry import Cotangents, Rules, Table
from ortops.graph.autodiff.rules.recurrent import scan
from ortops.graph.edit import copy_node, has_one_reader, rank_of, remove_unread, replace_value
from ortops.graph.faults import pad_axes
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.shapes import size_of
from ortops.graph.tensor import Tape, Tensor, op

_CLASSES = 4096
"""The number of classes from which on chunks are worth it."""

_CHUNK, _ROWS = 2**22, 256
"""The number of logits in a chunk; twice as many if these are fewer rows than that. The gradient of
each chunk reads the whole head, and products of few rows are slower."""

_NO_LABEL = np.iinfo(np.int64).min
"""The label of padding, if the loss ignores no label."""

_PRODUCTS = (("", "MatMul"), (MICROSOFT, "MatMulNBits"))

_BY_NUMBER = frozenset({"Add", "Cast", "CastLike", "Div", "Mul", "Sub", "Tanh"})
"""Operators that may come after the product, if their other operands are constants."""


def largest_chunk(classes: int) -> int:
    """Returns the largest number of logits in a chunk: at least those of a row."""
    return max(_CHUNK, min(2 * _CHUNK, _ROWS * classes), classes)


@dataclass(frozen=True)
class _Head:
    """The nodes from the last hidden state to the loss.

    Attributes:
        loss: The node SoftmaxCrossEntropyLoss.
        nodes: The nodes from the product to the logits, in order.
        x: The hidden state, (…, size).
        classes: The number of classes.
    """

    loss: ir.Node
    nodes: list[ir.Node]
    x: ir.Value
    classes: int

    @classmethod
    def of(cls, loss: ir.Node, active: Collection[ir.Value]) -> _Head | None:
        """Returns the head of a loss, or None if its logits cannot be computed in chunks.

        Args:
            loss: The node of the loss.
            active: The values that depend on what is differentiated with respect to.
        """
        labels_only = len(loss.inputs) == 2 or loss.inputs[2] is None
        reduction = loss.attributes.get_string("reduction", "mean")
        shown = any(v.uses() or v.is_graph_output() for v in loss.outputs[1:])
        value = loss.inputs[0]
        if not labels_only or shown or reduction == "none" or value is None or value.shape is None:
            return None
        classes = value.shape[-1]
        if len(value.shape) != 2 or not isinstance(classes, int) or classes < _CLASSES:
            return None
        made = value.producer()
        if made is not None and made.op_type == "Reshape" and not made.domain:
            if not has_one_reader(value):
                return None
            value = made.inputs[0]
            if value is None or value.shape is None or value.shape[-1] != classes:
                return None
        nodes: list[ir.Node] = []
        while value is not None and has_one_reader(value):
            node = value.producer()
            if node is None or any(each in active for each in node.inputs[1:]):
                return None
            nodes.insert(0, node)
            value = node.inputs[0]
            if (node.domain, node.op_type) in _PRODUCTS:
                is_row = value is not None and value.shape is not None and value in active
                flat = all(each is None or rank_of(each) == 2 for each in node.inputs[1:2])
                if value is None or not is_row or (node.op_type == "MatMul" and not flat):
                    return None
                return cls(loss, nodes, value, classes)
            if node.domain or node.op_type not in _BY_NUMBER:
                return None
            if any(each is None or rank_of(each) not in (0, 1) for each in node.inputs[1:]):
                return None
        return None

    def replace(self, tape: Tape, rules: Rules) -> ir.Node:
        """Replaces the loss by the sum of the losses of chunks; returns the Scan."""
        ignored = np.array(self.loss.attributes.get_int("ignore_index", _NO_LABEL), np.int64)
        labels = self.loss.inputs[1]
        assert labels is not None
        x, targets = tape.tensor(self.x), tape.tensor(labels).astype(np.int64)
        width = size_of(x, [-1])
        rows = op.Reshape(x, op.Concat([-1], op.Reshape(_tensor(tape, width), [1]), axis=0))
        total = _tensor(tape, size_of(targets, [0]))
        most = largest_chunk(self.classes)
        count = op.Max(op.Div(op.Add(op.Mul(total, self.classes), most - 1), most), 1)
        size = op.Div(op.Add(total, op.Sub(count, 1)), count)
        spare = op.Sub(op.Mul(size, count), total)
        rows = pad_axes(rows, [0, spare], None, [0])
        rows = op.Reshape(rows, op.Concat(*_sizes(tape, count, size, width), axis=0))
        rows = rows.with_shape([None, None, width if isinstance(width, int) else None])
        padded = pad_axes(targets, [0, spare], ignored, [0])
        padded = op.Reshape(padded, op.Concat(*_sizes(tape, count, size), axis=0))

        def chunk(x: Tensor, labels: Tensor) -> list[Tensor]:
            start = len(x.tape.nodes)
            logits = self._logits(x)
            real = op.Not(op.Equal(labels, ignored))
            index = op.Unsqueeze(op.Where(real, labels, 0), [1])
            picked = op.GatherElements(op.LogSoftmax(logits, axis=-1), index, axis=1)
            losses = op.Where(real, op.Squeeze(picked, [1]), op.CastLike(0.0, logits))
            loss = op.Neg(op.ReduceSum(losses, keepdims=0))
            seeds = {loss.value: op.CastLike(1.0, loss)}
            asked_by = "the loss of a chunk"
            nodes = x.tape.nodes[start:]
            (slope,) = backward(x.tape, nodes, seeds, [x.value], rules, asked_by=asked_by)
            assert slope is not None
            return [loss, slope]

        losses, _ = scan(chunk, [], [rows, padded.with_shape([None, None])], backwards=False)
        made = losses.value.producer()
        assert made is not None
        loss = op.ReduceSum(losses, keepdims=0)
        if self.loss.attributes.get_string("reduction", "mean") == "mean":
            real = op.Not(op.Equal(targets, ignored)).astype(loss.dtype)
            divisor = op.ReduceSum(real, keepdims=0)
            mean = loss / op.Max(divisor, op.CastLike(1.0, loss))  # whose gradient is finite
            loss = op.Where(op.Equal(divisor, 0.0), op.CastLike(np.nan, loss), mean)
        replace_value(tape, self.loss.outputs[0], loss.with_shape([]))
        return made

    def _logits(self, x: Tensor) -> Tensor:
        """Emits the logits of rows on their tape."""
        tape, copies = x.tape, {self.x: x.value}
        for node in self.nodes:
            copy = copy_node(node, copies)
            old, new = node.outputs[0], copy.outputs[0]
            tape.append(copy)
            new.type, new.shape = old.type, ir.Shape([None, self.classes])
            copies[old] = new
        return tape.tensor(new)


def _tensor(tape: Tape, size: int | Tensor) -> Tensor:
    return tape.constant(np.array(size)) if isinstance(size, int) else size


def _sizes(tape: Tape, *sizes: int | Tensor) -> list[Tensor]:
    return [op.Reshape(_tensor(tape, size), [1]) for size in sizes]


def _scaled(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor, ...],
    rows: Tensor,
    labels: Tensor,
    *,
    body: Any,
    num_scan_inputs: int,
    scan_input_directions: Any = None,
    scan_output_directions: Any = None,
) -> Cotangents:
    """Scales the gradients of the chunks' losses by the cotangents of these losses."""
    losses, slopes = g[0], y[1]
    if losses is None:
        return None, None
    wide = slopes.astype(losses.dtype)
    return (op.Unsqueeze(losses, [1, 2]) * wide).astype(slopes.dtype), None


class _ChunkedLogits(Pass):
    """Computes cross-entropy in chunks if the head is frozen."""

    def prepare(self, draft: Draft) -> None:
        """Replaces losses, and adds a rule for what replaces them."""
        graph = draft.graph
        losses = [node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss"]
        if not losses or not draft.is_of_first_order:
            return
        xs = [x for node in bound_nodes(graph) for x in Bound.of(node).xs]
        active = draft.rules.active_values(list(graph), xs)
        made: set[ir.Node] = set()
        for loss in losses:
            head = _Head.of(loss, active) if loss.outputs[0] in active else None
            if head is not None:
                tape = Tape(graph, before=loss, names=draft.names)
                tape.scope = f"{loss.name or loss.op_type}/"
                with tape:
                    made.add(head.replace(tape, draft.rules))
                remove_unread([*head.nodes, *graph])
        if made:
            table = Table()
            table.vjp("Scan", when=made.__contains__)(_scaled)
            draft.add_rules(table)


CHUNKED_LOGITS = _ChunkedLogits("chunked_logits", ONNXRUNTIME)
