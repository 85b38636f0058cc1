"""Determines which of the chosen parameters the loss depends on, and through which tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence

import onnx_ir as ir

from ortops.engine.building.parameters import (
    UNREAD,
    Choice,
    listed_with_reasons,
    quantized,
    why_not,
)
from ortops.errors import ModelError
from ortops.graph.autodiff.rules import RULES
from ortops.graph.edit import ancestor_nodes, describe, read_inputs
from ortops.graph.tensor import Tensor

_TRAINED = (
    *(ir.DataType.FLOAT16, ir.DataType.BFLOAT16),
    *(ir.DataType.FLOAT, ir.DataType.DOUBLE),
)


def reached(choice: Choice, loss: Tensor) -> list[ir.Value]:
    """Returns the chosen initializers that the loss depends on; adds reasons for the others.

    Raises:
        ModelError: If the loss depends on none of them, or not on one that was named.
    """
    ancestors = RULES.ancestors(loss.value)
    nodes = ancestor_nodes(loss.value, set())
    read = {value for node in nodes for value in read_inputs(node)}
    for pattern, names in choice.patterns.items():
        if ancestors.isdisjoint(choice.trained[name] for name in names):
            more = "" if pattern in names else f", which '{pattern}' matches"
            why = _why_unreached(choice.trained[names[0]], nodes)
            raise ModelError(
                f"trainable: the loss does not depend on '{names[0]}'{more}; leave it out"
                + (f" (it {why})" if why else "")
            )
    stopped = {}
    for name, value in list(choice.trained.items()):
        if value not in ancestors:
            why = _why_unreached(value, nodes)
            if why and name not in choice.constants:
                stopped[name] = why
            unread = UNREAD if why_not(value, reads=False) == UNREAD else ""
            choice.leave_out(name, why or unread or "has no effect on the loss")
    chosen = choice.trained
    choice.said += [f"not trained: {listed_with_reasons(stopped)}"] if stopped else []
    choice.said += [said for said in [choice.left_out(read)] if said]
    if not chosen:
        found = quantized(loss.tape.graph.initializers.values())
        if found:
            name, what = next(iter(found.items()))
            raise ModelError(
                f"trainable: the model's weights are all quantized, such as '{name}', which "
                f"{what}; train the float model and quantize it again, or name scales of "
                "DequantizeLinear in trainable="
            )
        for node in ancestor_nodes(loss.value, set()):
            reason = RULES.refusal(node)
            if reason is not None:
                raise ModelError(
                    f"trainable: the loss depends on no weight, only on {describe(node)}: {reason}"
                )
        others = _untrained_sources(choice, read)
        raise ModelError(
            f"trainable: the loss depends on no floating-point initializer{others}; "
            "name what to train in trainable="
        )
    for name, value in chosen.items():
        if value.dtype not in _TRAINED:
            raise ModelError(
                f"trainable: '{name}' is of type {value.dtype}; FLOAT16, BFLOAT16, FLOAT and "
                "DOUBLE can be trained, so train the float32 model and convert it afterwards"
            )
    return list(chosen.values())


def passed_through(parameters: Sequence[ir.Value], loss: Tensor) -> set[ir.Value]:
    """Returns the tensors between some parameters and the loss, including the parameters."""
    from_parameters = set(parameters)
    for node in loss.tape.graph:
        if not from_parameters.isdisjoint(read_inputs(node)):
            from_parameters.update(node.outputs)
    return from_parameters & {*RULES.ancestors(loss.value), *parameters}


def _untrained_sources(choice: Choice, read: Container[ir.Value]) -> str:
    """Returns the initializers that the loss depends on, and why they are not trained, as text."""
    found = {n: why for n, why in choice.reasons.items() if choice.floats.get(n) in read}
    if not found:
        return ""
    if all(why.startswith("is one number") for why in found.values()):
        return f", only on scalars ({', '.join(found)})"
    return f", only on {listed_with_reasons(found, 'which ')}"


def _why_unreached(value: ir.Value, nodes: Container[ir.Node]) -> str:
    """Returns the node between a weight and the loss whose derivative is 0, as text; or empty.

    Args:
        value: The weight.
        nodes: The nodes that the loss is computed by.
    """
    pending, seen = [value], {value}
    while pending:
        for use in pending.pop().uses():
            node = use.node
            if node not in nodes or node.op_type in ("Shape", "Size"):
                continue
            if RULES.is_zero(node):
                return (
                    f"reaches the loss only through {describe(node)}, whose derivative is 0; "
                    f'@ortops.vjp("{node.op_type}") can define another'
                )
            if not any(map(RULES.carries_cotangent, node.outputs)):
                return f"reaches the loss only through integers, from {describe(node)}"
            new = [output for output in node.outputs if output not in seen]
            seen.update(new)
            pending += new
    return ""
