"""Training mode: what BatchNormalization and Dropout do differently while a model learns.

The inference graph stays as it is. The algorithm gets a renamed copy of the nodes that behave
differently and of all that depends on them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ortops.autodiff import dependent_values, describe
from ortops.errors import ModelError
from ortops.gradient import copy_node
from ortops.tensor import Tape, Tensor, constant_tensor, op, reshape_like, size_of

__all__ = ["copy_in_training_mode", "uniform_bits", "write_inference_mode"]


def copy_in_training_mode(
    tape: Tape, nodes: list[ir.Node], step: Tensor, seed: int
) -> tuple[dict[ir.Value, ir.Value], dict[str, Tensor]]:
    """Copies what training changes: BatchNormalization, Dropout, and all that depends on them.

    Args:
        tape: Where the copies go.
        nodes: The nodes of the inference graph, in topological order.
        step: The number of finished steps, which together with the seed determines which elements
            Dropout drops.
        seed: The seed.

    Returns:
        The copy of each value that has one, and the updated running statistics by the names of the
        initializers that hold them.
    """
    changed = [node for node in nodes if _changes(node)]
    reached = dependent_values(nodes, [value for node in changed for value in node.outputs])
    copies: dict[ir.Value, ir.Value] = {}
    statistics: dict[str, Tensor] = {}
    for node in nodes:
        if reached.isdisjoint(node.outputs):
            continue
        tape.scope = f"training/{node.name or node.op_type}/"
        if node in changed and node.op_type == "Dropout":
            made = [_dropout(tape, node, copies, step, seed, changed.index(node))]
        else:
            copy = copy_node(node, copies)
            if node in changed:
                copy.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
                copy.resize_outputs(3)
            for old, new in zip(node.outputs, copy.outputs, strict=False):
                if old.name:
                    new.name = tape.names.unique(f"{old.name}_training")
            tape.append(copy)
            tape.infer(copy)
            made = list(copy.outputs)
            if node in changed:
                for value, updated in zip(node.inputs[3:], copy.outputs[1:], strict=True):
                    assert value is not None
                    statistics[value.name or ""] = tape.tensor(updated)
        copies.update(zip(node.outputs, made, strict=False))
    tape.scope = ""
    return copies, statistics


def _changes(node: ir.Node) -> bool:
    """Whether a node behaves differently in training mode."""
    if node.domain:
        return False
    if node.op_type == "BatchNormalization":
        already = node.attributes.get_int("training_mode", 0)
        statistics = node.inputs[3:5]
        return not already and all(v is not None and v.is_initializer() for v in statistics)
    return node.op_type == "Dropout" and _ratio(node) > 0


def _ratio(node: ir.Node) -> float:
    """Returns the share of elements that a Dropout node drops in training."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    if ratio is None:
        return 0.5
    tensor = constant_tensor(ratio)
    if tensor is None:
        raise ModelError(
            f"{describe(node)}: its ratio '{ratio.name}' is computed; a constant is accepted"
        )
    value = float(tensor.numpy())
    if not 0 <= value < 1:
        raise ModelError(f"{describe(node)}: its ratio is {value}; 0 <= ratio < 1 is accepted")
    return value


def _dropout(
    tape: Tape,
    node: ir.Node,
    copies: dict[ir.Value, ir.Value],
    step: Tensor,
    seed: int,
    number: int,
) -> ir.Value:
    """Emits y = x · mask / (1 − ratio), with a mask that seed, step and position determine.

    A Dropout node would draw from a generator whose state no file holds, so a resumed training
    would differ from one that never stopped.
    """
    source = node.inputs[0]
    assert source is not None
    x = tape.tensor(copies.get(source, source))
    ratio = _ratio(node)
    bits = uniform_bits(x, step, key=(seed * 0x9E3779B9 + number * 0x85EBCA6B) % 2**32)
    kept = (bits >= np.array(round(ratio * 2**32), np.uint32)).astype(x.dtype)
    y: Tensor = x * (kept * (1.0 / (1.0 - ratio)))
    y.value.name = tape.names.unique(f"{node.outputs[0].name}_training")
    return y.with_shape_of(x).value


def uniform_bits(x: Tensor, step: Tensor, *, key: int) -> Tensor:
    """Returns 32 uniform random bits for each element of a tensor.

    A counter-based generator: the bits depend on the key, the step and the element's position and
    on nothing else, whatever else runs on the machine.

    Args:
        x: Gives the shape.
        step: A scalar of int64.
        key: Tells one use from another, in [0, 2³²).

    Returns:
        A tensor of uint32 in the shape of ``x``.

    Source:
        The mixing function is the finalizer of MurmurHash3 (Appleby, 2011).
    """
    key_bits = _mix(op.BitwiseXor(_mix(step.astype(np.uint32)), np.array(key, np.uint32)))
    count = op.Range(0, size_of(x, range(x.ndim)), 1).astype(np.uint32)
    return reshape_like(_mix(count * np.array(0x9E3779B9, np.uint32) + key_bits), x)


def _mix(bits: Tensor) -> Tensor:
    def shifted(amount: int) -> Tensor:
        fewer = op.BitShift(bits, np.array(amount, np.uint32), direction="RIGHT")
        mixed: Tensor = op.BitwiseXor(bits, fewer)
        return mixed

    bits = shifted(16) * np.array(0x85EBCA6B, np.uint32)
    bits = shifted(13) * np.array(0xC2B2AE35, np.uint32)
    return shifted(16)


def write_inference_mode(graph: ir.Graph) -> None:
    """Puts BatchNormalization and Dropout of a graph into inference mode, in place."""
    for node in graph:
        if node.domain:
            continue
        if node.op_type == "BatchNormalization":
            if node.attributes.get_int("training_mode", 0):
                node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
                node.resize_outputs(1)
        elif node.op_type == "Dropout" and len(node.inputs) > 2:
            node.resize_inputs(2)
