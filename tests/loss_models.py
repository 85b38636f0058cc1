"""Losses at given outputs: their values, and their gradients by the outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from ortops import Tape, Tensor, TrainingSession, build_training_model
from ortops.losses import Loss
from ortops.optimizers import SGD
from tests.running import run

Array = np.ndarray[Any, Any]


def shifted(
    outputs: Mapping[str, Array],
    squash: Callable[[Tensor], Tensor] | None = None,
    *,
    symbolic: bool = False,
) -> onnx.ModelProto:
    """Returns a model of outputs y = x + p: the gradient by p is that by y.

    Args:
        outputs: The outputs, before they are squashed.
        squash: What ends the model.
        symbolic: Whether the model tells no sizes; then p has one element.
    """
    with Tape() as tape:
        for name, y in outputs.items():
            dims = ["N", *(f"{name}_{i}" for i in range(1, y.ndim))] if symbolic else y.shape
            p = np.zeros([1] * y.ndim, y.dtype) if symbolic else np.zeros_like(y)
            x = tape.input(f"x_{name}", y.dtype, dims) + tape.initializer(f"p_{name}", p)
            tape.output(x if squash is None else squash(x), name)
    return tape.model()


def loss_and_gradients(
    loss: Any,
    outputs: Mapping[str, Array],
    feeds: Mapping[str, Array],
    squash: Callable[[Tensor], Tensor] | None = None,
    *,
    symbolic: bool = False,
) -> tuple[float, dict[str, Array]]:
    """The loss at outputs, and its gradient by each: what one step of rate 1 subtracts.

    Args:
        loss: The loss.
        outputs: The model's outputs; before they are squashed, where they are.
        feeds: Targets and the like.
        squash: What ends the model; then gradients are those by its input.
        symbolic: Whether the model tells no sizes; then each gradient is summed up.
    """
    model = shifted(outputs, squash, symbolic=symbolic)
    names = [f"p_{name}" for name in outputs]
    trainable = build_training_model(model, loss=loss, optimizer=SGD(1.0), trainable=names)
    session = TrainingSession(trainable)
    found = session.step({**{f"x_{name}": y for name, y in outputs.items()}, **feeds})["loss"]
    assert found.shape == ()
    return float(found), {name: -session.state[f"p_{name}"] for name in outputs}


def value_and_count(loss: Loss, *tensors: Array) -> tuple[Array, Array]:
    """The loss of tensors, called as by a function of one's own, and what it was divided by."""
    with Tape() as tape:
        inputs = [tape.input(f"x_{i}", t.dtype, [None] * t.ndim) for i, t in enumerate(tensors)]
        for given, tensor in zip(inputs, tensors, strict=True):
            given.with_shape(["N", *[None] * (tensor.ndim - 1)])
        value, count = loss.terms(*inputs)
        tape.output(value, "value")
        tape.output(count, "count")
    return tuple(run(tape.model(), {f"x_{i}": t for i, t in enumerate(tensors)}))
