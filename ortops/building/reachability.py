"""Determines which of the chosen parameters the loss depends on, and through which tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence

import onnx_ir as ir

from ortops.autodiff.rules import RULES
from ortops.building.parameters import Choice, quantized
from ortops.errors import ModelError
from ortops.graph.edit import ancestor_nodes, describe, read_inputs
from ortops.graph.tensor import Tensor

__all__ = ["passed_through", "reached"]

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
    for pattern, names in choice.patterns.items():
        if ancestors.isdisjoint(choice.trained[name] for name in names):
            more = "" if pattern in names else f", which '{pattern}' matches"
            raise ModelError(
                f"trainable: the loss does not depend on '{names[0]}'{more}; leave it out"
            )
    for name, value in choice.trained.items():
        if value not in ancestors:
            choice.reasons[name] = "has no effect on the loss"
    chosen = {name: value for name, value in choice.trained.items() if value in ancestors}
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
        others = _untrained_sources(choice, ancestors)
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


def _untrained_sources(choice: Choice, ancestors: Container[ir.Value]) -> str:
    """Returns the initializers that the loss depends on, and why they are not trained, as text."""
    found = {n: why for n, why in choice.reasons.items() if choice.floats[n] in ancestors}
    if not found:
        return ""
    if all(why.startswith("is one number") for why in found.values()):
        return f", only on scalars ({', '.join(found)})"
    shown = ", ".join(f"'{name}', which {why}" for name, why in list(found.items())[:5])
    return f", only on {shown}"
