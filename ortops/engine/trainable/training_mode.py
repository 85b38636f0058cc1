"""Training mode: batch statistics in BatchNormalization, and random masks in Dropout.

The inference graph is not changed. The algorithm gets renamed copies of these nodes and of all
nodes that depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.autodiff.gradient_node import is_bound
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import (
    Steps,
    all_nodes,
    copy_node,
    dependent_values,
    describe,
    read_inputs,
    unrolled,
)
from ortops.graph.nesting import inner_graphs
from ortops.graph.shapes import reshape_like
from ortops.graph.tensor import Tape, Tensor, op


@dataclass(frozen=True)
class TrainingCopies:
    """The results of `copy_in_training_mode`.

    Attributes:
        copies: The copies of values of the inference graph.
        statistics: The updated running statistics by initializer name.
        dropouts: The names of the inputs of Dropout, by the names of its outputs in the copies.
    """

    copies: dict[ir.Value, ir.Value]
    statistics: dict[str, Tensor]
    dropouts: dict[str, str]


def copy_in_training_mode(
    tape: Tape,
    nodes: list[ir.Node],
    visible: Container[str],
    step: Tensor,
    seed: Callable[[], Tensor],
    is_frozen: Callable[[ir.Node], bool],
) -> TrainingCopies:
    """Copies BatchNormalization and Dropout in training mode, and all nodes that depend on them.

    Args:
        tape: The tape for the copies.
        nodes: The nodes of the inference graph, in topological order, functions inlined.
        visible: The names of values that copies can read. Other values are inside functions, so the
            nodes that compute them are copied as well.
        step: The number of finished steps. Step and seed determine the elements that Dropout drops.
        seed: Returns the seed, an int64 scalar; called only if there is Dropout.
        is_frozen: Returns whether a BatchNormalization node runs in inference mode.

    Raises:
        ModelError: If the ratio of a Dropout node is not a constant in [0, 1).
        UnsupportedError: If such a node is in a sub-graph.
    """
    _check_inner_graphs(nodes, is_frozen)
    changed = [node for node in nodes if _changes(node, is_frozen)]
    reached = dependent_values(nodes, [value for node in changed for value in node.outputs])
    copied = {node for node in nodes if not reached.isdisjoint(node.outputs)}
    for node in reversed(nodes):
        if node in copied:
            hidden = (v for v in read_inputs(node) if v.name not in visible)
            copied.update(producer for v in hidden if (producer := v.producer()) is not None)
    found = TrainingCopies({}, {}, {})
    copies, statistics = found.copies, found.statistics
    for node in nodes:
        if node not in copied:
            continue
        tape.scope = f"training/{node.name or node.op_type}/"
        if node in changed and node.op_type == "Dropout":
            made = _dropout(tape, node, copies, step, seed(), changed.index(node))
            source = node.inputs[0]
            assert source is not None
            found.dropouts[made[0].name or ""] = copies.get(source, source).name or ""
        else:
            copy = copy_node(node, copies)
            if node in changed and is_frozen(node):
                _normalize_by_running_statistics(copy)
            elif node in changed:
                _normalize_by_batch(tape, copy, statistics)
            for old, new in zip(node.outputs, copy.outputs, strict=False):
                if old.name:
                    new.name = tape.names.unique(f"{old.name}_training")
            tape.append(copy)
            if not onnx.defs.has(copy.op_type, copy.domain):  # such as those of com.microsoft
                for old, new in zip(node.outputs, copy.outputs, strict=True):
                    new.type, new.shape = old.type, old.shape
            elif not is_bound(copy):
                tape.infer(copy)
            made = list(copy.outputs)
            if node in changed and not is_frozen(node):
                for value, updated in zip(node.inputs[3:], copy.outputs[1:], strict=True):
                    assert value is not None
                    statistics[value.name or ""] = tape.tensor(updated)
        copies.update(zip(node.outputs, made, strict=False))
    tape.scope = ""
    return found


def reveal(
    tape: Tape, value: ir.Value, visible: Container[str], copies: dict[ir.Value, ir.Value]
) -> ir.Value:
    """Returns a value that the algorithm can read: the value, or a copy if it is in a function.

    Args:
        tape: The tape for copies.
        value: A value of the inference graph, functions inlined.
        visible: See `copy_in_training_mode`.
        copies: The copies of values; extended.
    """
    return unrolled(_reveal(tape, value, visible, copies))


def _reveal(
    tape: Tape, value: ir.Value, visible: Container[str], copies: dict[ir.Value, ir.Value]
) -> Steps[ir.Value]:
    if value in copies:
        return copies[value]
    node = value.producer()
    if node is None or value.name in visible or node in tape.nodes:
        return value
    for read in read_inputs(node):
        yield _reveal(tape, read, visible, copies)
    copy = copy_node(node, copies)
    tape.append(copy)
    copies.update(zip(node.outputs, copy.outputs, strict=True))
    return copies[value]


def _check_inner_graphs(nodes: list[ir.Node], is_frozen: Callable[[ir.Node], bool]) -> None:
    """Raises an UnsupportedError if a sub-graph has a node that would need training mode."""
    for node in nodes:
        for graph in inner_graphs(node):
            for inner in all_nodes(graph):
                if _changes(inner, is_frozen):
                    raise UnsupportedError(
                        f"{describe(inner)}: it is in a sub-graph of {describe(node)}, where "
                        "training mode is not supported; move it out of the sub-graph, or remove it"
                    )


def _changes(node: ir.Node, is_frozen: Callable[[ir.Node], bool]) -> bool:
    """Whether a node behaves differently in training mode, or updates running statistics."""
    if is_batch_normalization(node):
        if is_frozen(node):
            return bool(node.attributes.get_int("training_mode", 0))
        return all(v is not None and v.is_initializer() for v in node.inputs[3:5])
    if node.domain:
        return False
    return node.op_type == "Dropout" and _ratio(node) > 0


def is_batch_normalization(node: ir.Node) -> bool:
    """Whether a node is a BatchNormalization."""
    return node.op_type == "BatchNormalization" and not node.domain


def _normalize_by_running_statistics(node: ir.Node) -> None:
    """Sets a BatchNormalization node to inference mode."""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    node.resize_outputs(1)


def _normalize_by_batch(tape: Tape, node: ir.Node, statistics: Mapping[str, Tensor]) -> None:
    """Sets a BatchNormalization node to training mode."""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    node.resize_outputs(3)
    for value in node.outputs[1:]:
        value.name = value.name or None
    for index in (3, 4):
        old = node.inputs[index]
        assert old is not None
        latest = statistics.get(
            old.name or ""
        )  # from a preceding node, if the two share statistics
        if latest is None:  # a copy, because onnxruntime may overwrite this input
            latest = op.Sum(tape.tensor(old))
        node.replace_input_with(index, latest.value)


def _ratio(node: ir.Node) -> float:
    """Returns the ratio of elements that a Dropout node drops in training."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    if ratio is None:
        return 0.5
    tensor = constant_tensor(ratio)
    if tensor is None:
        raise ModelError(
            f"{describe(node)}: its ratio '{ratio.name}' must be a constant, but it is computed"
        )
    value = float(tensor.numpy())
    if not 0 <= value < 1:
        raise ModelError(f"{describe(node)}: its ratio must be >= 0 and < 1, got {value}")
    return value


def _dropout(
    tape: Tape,
    node: ir.Node,
    copies: dict[ir.Value, ir.Value],
    step: Tensor,
    seed: Tensor,
    number: int,
) -> list[ir.Value]:
    """Emits y = x · mask / (1 - ratio), with a mask that depends on seed, step and position.

    The random state of a Dropout node cannot be saved, so a training that is resumed would differ
    from one without interruption.
    """
    source = node.inputs[0]
    assert source is not None
    x = tape.tensor(copies.get(source, source))
    ratio = _ratio(node)
    key = seed.astype(np.uint32) * np.array(0x9E3779B9, np.uint32)
    key = key + np.array(number * 0x85EBCA6B % 2**32, np.uint32)
    bits = uniform_bits(x, step, key)
    mask = bits >= np.array(min(round(ratio * 2**32), 2**32 - 1), np.uint32)
    y: Tensor = x * (mask.astype(x.dtype) * (1.0 / (1.0 - ratio)))
    y.value.name = tape.names.unique(f"{node.outputs[0].name}_training")
    return [y.with_shape_of(x).value, mask.with_shape_of(x).value]


def uniform_bits(x: Tensor, step: Tensor, key: Tensor) -> Tensor:
    """Returns 32 uniform random bits for each element of a tensor.

    A counter-based generator: the bits depend only on the key, the step and the position of the
    element.

    Args:
        x: A tensor of the wanted shape.
        step: An int64 scalar.
        key: A uint32 scalar, different for each use.

    Returns:
        A uint32 tensor in the shape of ``x``.

    Source:
        The mixing function is the finalizer of MurmurHash3 (Appleby, 2011).
    """
    key_bits = _mix(op.BitwiseXor(_mix(step.astype(np.uint32)), key))
    count = op.Range(0, op.Size(x), 1).astype(np.uint32)
    return reshape_like(_mix(count * np.array(0x9E3779B9, np.uint32) + key_bits), x)


def _mix(bits: Tensor) -> Tensor:
    def shifted(amount: int) -> Tensor:
        fewer = op.BitShift(bits, np.array(amount, np.uint32), direction="RIGHT")
        return op.BitwiseXor(bits, fewer)

    bits = shifted(16) * np.array(0x85EBCA6B, np.uint32)
    bits = shifted(13) * np.array(0xC2B2AE35, np.uint32)
    return shifted(16)


def write_inference_mode(model: ir.Model) -> None:
    """Sets BatchNormalization and Dropout of a model to inference mode, in place."""
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in all_nodes(graph):
            if is_batch_normalization(node):
                if node.attributes.get_int("training_mode", 0):
                    _normalize_by_running_statistics(node)
            elif node.op_type == "Dropout" and not node.domain and len(node.inputs) > 2:
                node.resize_inputs(2)
