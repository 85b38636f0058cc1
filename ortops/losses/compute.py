"""Emits a loss at the end of a model: an object of a class, or a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ortops._common.arguments import parameters_of
from ortops._common.numbers import integer
from ortops.errors import ArgumentError, ModelError
from ortops.graph.edit import (
    is_float,
)
from ortops.graph.squashing import squashed
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses.loss import Function, Loss, Part, Shape, mean_of
from ortops.losses.scene import Computed, Inputs, Kind, Prediction, Scene, wide


def compute(
    loss: Loss | Function,
    tape: Tape,
    find: Callable[[str], Tensor | None],
    names: Sequence[str],
    outputs: Sequence[ir.Value],
    declared: Inputs | None = None,
    own: Callable[[ir.Value], ir.Value] = lambda value: value,
    base: Callable[[ir.Value], ir.Value] | None = None,
) -> Computed:
    """Emits a loss.

    A loss function gets a Tensor for each parameter, found by name: a tensor of the model, or an
    input in ``declared``. ``labels`` and ``targets`` are new inputs: integers, in the shape of the
    first parameter's tensor without axis 1, and numbers of its type and shape. If the first
    parameter has any other name, it gets the default output. Further parameters with a default
    keep it. The function returns a scalar, or a pair of a sum and a count. The loss is then their
    quotient, or 0 if the count is 0, and the losses of parts of a batch add up exactly.

    float16 and bfloat16 tensors are read as float32, and so are targets.

    Args:
        loss: The result of `resolve`.
        tape: Receives the nodes and the new inputs.
        find: Returns the training step's tensor for a name of the model, or None.
        names: The names of the model's tensors, for messages.
        outputs: The model's outputs.
        declared: The inputs that the user declared.
        own: Returns the model's tensor for one of the training step.
        base: Returns what the model computes for one of its tensors without its adapter, for
            losses that compare with it.

    Returns:
        The emitted loss.

    Raises:
        ArgumentError: If ``declared`` or the function's parameters are invalid.
        ModelError: If the loss is not a scalar, or is incompatible with the model.
    """
    scene = Scene(tape, find, names, outputs, _checked(declared or {}, find), own, base)
    parts = loss.parts(scene) if isinstance(loss, Loss) else [_call(loss, scene)]
    parts = [_checked_part(part) for part in parts]
    unread = [name for name in scene.declared if name not in scene.added]
    if unread:
        raise ModelError(
            f"inputs: the loss does not read '{unread[0]}'; leave it out, or give a parameter or "
            "target of the loss this name"
        )
    value = parts[0].value
    if len(parts) > 1 or parts[0].weight != 1:
        value = parts[0].weight * parts[0].value
        for part in parts[1:]:
            value = value + part.weight * part.value
    for part in parts:
        if part.batch_coupled:
            scene.say(
                f"loss {part.label} couples the rows of a batch: the loss of a batch is not the "
                "average of the losses of its parts"
            )
    inputs = [tensor for tensor, _ in scene.added.values()]
    predictions = [looked_at for _, looked_at in scene.predictions.values()]
    return Computed(value, parts, inputs, predictions, scene.said, scene.constants)


def _checked(declared: Inputs, find: Callable[[str], Tensor | None]) -> Inputs:
    """Checks the declared inputs."""
    if not isinstance(declared, Mapping):
        raise ArgumentError(
            "inputs must be a dict of names to a dtype and dimensions, got "
            f"{type(declared).__name__}"
        )
    for name, given in declared.items():
        try:
            dtype, dims = given
            fits = dtype is not None and not isinstance(dims, str) and all(map(_is_size, dims))
            ir.DataType.from_numpy(np.dtype(dtype))
        except (TypeError, ValueError):
            fits = False
        if not fits or not isinstance(name, str):
            raise ArgumentError(
                f"inputs: {name!r} must be declared with a dtype and dimensions, for example "
                f'(np.float32, ["batch", 3]), got {given!r}'
            )
        if find(name) is not None:
            raise ModelError(
                f"inputs: the model already has a tensor '{name}'; give the new input another name"
            )
    return declared


def _is_size(dim: object) -> bool:
    """Whether a dimension is valid: a number, a symbol, or None for any size."""
    size = integer(dim)
    return size >= 0 if size is not None else dim is None or (isinstance(dim, str) and dim != "")


def _call(loss: Function, scene: Scene) -> Part:
    """Calls a loss function with a tensor for each parameter."""
    name = getattr(loss, "__name__", type(loss).__name__)
    parameters = _parameters(loss, name)
    looked_at = _looked_at(parameters, scene, name)
    positional: list[Any] = []
    named: dict[str, Tensor] = {}
    for number, (parameter, details) in enumerate(parameters.items()):
        found = scene.find(parameter)
        if found is not None:
            argument = wide(found)
        elif parameter in scene.declared or parameter in ("labels", "targets"):
            dtype, shape = wide(looked_at).dtype, looked_at.shape
            if parameter == "labels":
                dtype, shape = np.dtype(np.int64), _without_classes(shape)
            argument = scene.declare(parameter, dtype, shape)
            scene.added[parameter] = (argument, scene.name_of(looked_at.value))
        elif number == 0:
            argument = wide(looked_at)
        elif details.default is not inspect.Parameter.empty:
            if details.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(details.default)  # later parameters keep their positions
            continue
        else:
            raise _unknown(name, parameter, scene)
        if details.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(argument)
        else:
            named[parameter] = argument
    if not parameters:
        raise ArgumentError(f"loss {name} has no parameters; {_EXPLAINED}")
    targets = [each for each in ("labels", "targets") if each in scene.added]
    target = targets[0] if targets else None  # declared inputs may be masks or weights
    prediction = _prediction(looked_at, target, scene.own(looked_at.value).name or "")
    scene.predictions[0] = (None, prediction)
    returned = loss(*positional, **named)
    if len(parameters) == 1 and isinstance(returned, Tensor) and returned.shape not in (None, ()):
        raise ModelError(
            f"loss {name} must be a scalar, got shape {list(returned.shape or ())}; {_EXPLAINED}"
        )
    return _part_of(name, returned)


_EXPLAINED = (
    "a loss is a function of Tensors, the prediction and the targets, that returns a scalar "
    "Tensor, such as lambda prediction, targets: op.ReduceMean((prediction - targets) ** 2, "
    "keepdims=0)"
)


def _unknown(name: str, parameter: str, scene: Scene) -> ModelError:
    shown = ", ".join(f"'{each}'" for each in list(scene.names)[:20])
    more = f" and {len(scene.names) - 20} more" if len(scene.names) > 20 else ""
    own = ", ".join(f"'{each}'" for each in ("labels", "targets", *scene.declared))
    return ModelError(
        f"loss {name}: no tensor for parameter '{parameter}'; use one of the model's tensors "
        f"({shown}{more}) or {own}, or declare an input, for example "
        f'inputs={{"{parameter}": (np.float32, ["batch"])}}'
    )


def _part_of(name: str, returned: object) -> Part:
    """Returns the loss that a function returned, a Tensor or a pair of a sum and a count."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        total, count = returned
        if not isinstance(total, Tensor) or not isinstance(count, Tensor):
            raise ModelError(
                f"loss {name} must return a Tensor or a pair of Tensors, the sum and the count, "
                f"got {returned!r}"
            )
        count = _scalar(count, name).astype(total.dtype)
        return Part(name, 1.0, mean_of(_scalar(total, name), count), count)
    if not isinstance(returned, Tensor):
        raise ModelError(f"loss {name} must return a Tensor, got {returned!r:.80}; {_EXPLAINED}")
    return Part(name, 1.0, _scalar(returned, name), None)


def _without_classes(shape: Shape) -> Shape:
    """Returns the shape of labels; sizes after the first are unknown, as the class axis is."""
    if shape is None or len(shape) < 2:
        return shape
    return (shape[0], *[None] * (len(shape) - 2))


def _looked_at(parameters: Mapping[str, inspect.Parameter], scene: Scene, name: str) -> Tensor:
    """Returns the prediction of a loss function: the first parameter that the model computes.

    If the first parameter has any other name, the prediction is the default output.
    """
    for number, parameter in enumerate(parameters):
        found = scene.find(parameter)
        if found is not None and is_float(found.value) and found.value.producer() is not None:
            return found
        added = parameter in ("labels", "targets") or parameter in scene.declared
        if number == 0 and found is None and not added:
            break
    return scene.tensor(None, name)


def _prediction(tensor: Tensor, target: str | None, output: str) -> Prediction:
    found = squashed(tensor.value)
    kind: Kind = "logits"
    if found is not None:
        kind = "log_probabilities" if found.kind == "log_softmax" else "probabilities"
    axis = None if found is None else found.axis
    if axis is not None and axis < 0 and tensor.shape is not None:
        axis += len(tensor.shape)
    return Prediction(tensor, kind, axis, target, output=output)


def _scalar(tensor: Tensor, name: str) -> Tensor:
    """Returns the value of a loss, which must be a scalar."""
    if tensor.shape is None:
        tensor = op.Reshape(tensor, np.zeros(0, np.int64))  # a run fails unless it is a scalar
    elif tensor.shape != ():
        raise ModelError(
            f"loss {name} must be a scalar, got shape {list(tensor.shape)}; reduce it, for example "
            "with op.ReduceMean(loss, keepdims=0)"
        )
    return tensor


def _checked_part(part: Part) -> Part:
    value = _scalar(part.value, part.label)
    if value.dtype.kind in "iub":
        raise ModelError(f"loss {part.label} must be floating-point, got type {value.dtype}")
    return replace(part, value=value)


def _parameters(loss: Function, name: str) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a loss function, each of which must be a single tensor."""
    parameters = parameters_of(f"loss {name}", loss)
    for parameter, details in parameters.items():
        if details.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"loss {name}: replace the variable parameter '*{parameter}' by one named "
                "parameter for each tensor"
            )
    return parameters
