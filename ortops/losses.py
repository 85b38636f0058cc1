"""Loss functions: a scalar from a model's output and what it should have been.

A loss is an object with the output that it looks at, or a function of one's own:

    >>> from ortops import op
    >>> def huber(prediction, targets):
    ...     distance = abs(prediction - targets)
    ...     squared = 0.5 * distance * distance
    ...     return op.ReduceMean(op.Where(distance < 1.0, squared, distance - 0.5), keepdims=0)

To add a loss, write a subclass of `Loss` here; nothing else needs to know it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ortops.errors import ModelError, did_you_mean
from ortops.graph.tensor import Dim, Tape, Tensor, op

__all__ = [
    "L1",
    "BinaryCrossEntropyWithLogits",
    "Loss",
    "LossLike",
    "MeanSquaredError",
    "SoftmaxCrossEntropy",
    "compute",
    "resolve",
]


@dataclass(frozen=True)
class Loss:
    """What a training step makes as small as it can. Use one of the subclasses.

    Args:
        output: The model output that it looks at; the first one by default.
    """

    output: str | None = None

    target: ClassVar[str] = "targets"
    """The name of the input that holds what the output should have been."""

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], tuple[Dim, ...] | None]:
        """Returns the dtype and shape of the target: those of the prediction, by default.

        Args:
            prediction: The model's output.

        Returns:
            The dtype, and the dimensions, or None where the rank is unknown.
        """
        return prediction.dtype, prediction.shape

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss.

        Args:
            prediction: The model's output.
            target: What it should have been.

        Returns:
            A scalar.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SoftmaxCrossEntropy(Loss):
    """Softmax cross-entropy between logits and integer labels, averaged over the labels.

    Logits have shape (N, C) or (N, C, d1, …), labels (N) or (N, d1, …) with values in [0, C).

    Args:
        output: The output that holds the logits; the first one by default.
        ignore_index: A label that does not count.
        weights: A weight for each class; the average is weighted too.

    Source:
        Schema of SoftmaxCrossEntropyLoss, ai.onnx version 13; the same as
        torch.nn.CrossEntropyLoss.
    """

    ignore_index: int | None = None
    weights: tuple[float, ...] | None = None

    target: ClassVar[str] = "labels"

    def target_type(self, prediction: Tensor) -> tuple[np.dtype[Any], tuple[Dim, ...] | None]:
        """Returns int64 and the prediction's shape without the class axis."""
        shape = prediction.shape
        if shape is None:
            return np.dtype(np.int64), None
        if len(shape) < 2:
            raise ModelError(
                f"loss SoftmaxCrossEntropy: output '{prediction.name}' has shape {list(shape)}; "
                "logits of shape (N, C) or (N, C, d1, …) are accepted"
            )
        return np.dtype(np.int64), (shape[0], *shape[2:])

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss; see `Loss.__call__`."""
        weights = None if self.weights is None else np.asarray(self.weights, prediction.dtype)
        classes = prediction.shape[1] if prediction.shape else None
        if weights is not None and isinstance(classes, int) and weights.shape != (classes,):
            raise ModelError(
                f"loss SoftmaxCrossEntropy: weights has shape {list(weights.shape)}; one number "
                f"for each of the {classes} classes is accepted"
            )
        return op.SoftmaxCrossEntropyLoss(
            prediction, target, weights, ignore_index=self.ignore_index, reduction="mean"
        )


@dataclass(frozen=True)
class BinaryCrossEntropyWithLogits(Loss):
    """Binary cross-entropy between the sigmoid of logits and targets in [0, 1], averaged.

    Computed as ``softplus(x) − x · t``, which overflows nowhere.

    Args:
        output: The output that holds the logits, of any shape; the first one by default.
    """

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss; see `Loss.__call__`."""
        return op.ReduceMean(op.Softplus(prediction) - prediction * target, keepdims=0)


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """The average of (prediction − target)².

    Args:
        output: The output that it looks at, of any shape; the first one by default.
    """

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss; see `Loss.__call__`."""
        difference = prediction - target
        return op.ReduceMean(difference * difference, keepdims=0)


@dataclass(frozen=True)
class L1(Loss):
    """The average of |prediction − target|, whose gradient where both are equal is 0.

    Args:
        output: The output that it looks at, of any shape; the first one by default.
    """

    def __call__(self, prediction: Tensor, target: Tensor) -> Tensor:
        """Emits the loss; see `Loss.__call__`."""
        return op.ReduceMean(abs(prediction - target), keepdims=0)


LOSSES: Mapping[str, type[Loss]] = {loss.__name__: loss for loss in Loss.__subclasses__()}

LossLike: TypeAlias = str | Loss | type[Loss] | Callable[..., Tensor]
"""A loss, its class or the class's name (both stand for the defaults), or a function."""


def resolve(loss: LossLike) -> Loss | Callable[..., Tensor]:
    """Turns what a user may give as ``loss=`` into a loss or a function.

    Raises:
        ModelError: If there is no loss of that name, or the value is none of these.

    Example:
        >>> resolve("L1")
        L1(output=None)
        >>> resolve("MeanSquared")
        Traceback (most recent call last):
        ...
        ortops.errors.ModelError: loss 'MeanSquared' is not known; did you mean 'MeanSquaredError'?
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ModelError(f"loss '{loss}' is not known; {did_you_mean(loss, LOSSES)}")
        return LOSSES[loss]()
    if isinstance(loss, type):
        if issubclass(loss, Loss) and loss is not Loss:
            return loss()
    elif callable(loss) and type(loss) is not Loss:
        return loss
    raise ModelError(
        f"loss is {loss!r}; one of ortops.losses, its name, or a function of Tensors is accepted"
    )


def compute(
    loss: Loss | Callable[..., Tensor],
    tape: Tape,
    outputs: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Emits a loss.

    A function of one's own gets a Tensor for each parameter: the model output or input of that
    name; for ``labels`` and ``targets`` a new input, of integers (the first output's shape without
    axis 1) or like the first output; for other names the model's outputs in order, and when these
    are used up, for one more, the ``targets``. A parameter of another name that has a default keeps
    it.

    Args:
        loss: What `resolve` returned.
        tape: Where the nodes go; the new inputs are made on it.
        outputs: The model's outputs by name.
        inputs: The model's inputs by name.

    Returns:
        The loss and the inputs that it added.

    Raises:
        ModelError: If it is not a scalar, or does not fit the model.
    """
    added: list[Tensor] = []

    def new_input(name: str, like: Loss, prediction: Tensor) -> Tensor:
        dtype, shape = like.target_type(prediction)
        added.append(tape.input(name, dtype, shape or ()))
        if shape is None:
            added[-1].value.shape = None
        return added[-1]

    first = next(iter(outputs.values()))
    if isinstance(loss, Loss):
        name = type(loss).__name__
        if loss.output is not None and loss.output not in outputs:
            hint = did_you_mean(loss.output, outputs)
            raise ModelError(f"loss {name}: the model has no output '{loss.output}'; {hint}")
        prediction = first if loss.output is None else outputs[loss.output]
        result = loss(prediction, new_input(loss.target, loss, prediction))
    else:
        name = getattr(loss, "__name__", type(loss).__name__)
        positional: list[Tensor] = []
        named: dict[str, Tensor] = {}
        parameters = _parameters(loss, name)
        unnamed = [output for key, output in outputs.items() if key not in parameters]
        has_targets = "targets" in parameters
        for parameter, details in parameters.items():
            if parameter in outputs:
                argument = outputs[parameter]
            elif parameter in inputs:
                argument = inputs[parameter]
            elif parameter == "labels":
                argument = new_input("labels", SoftmaxCrossEntropy(), first)
            elif parameter == "targets":
                argument = new_input("targets", Loss(), first)
            elif details.default is not inspect.Parameter.empty:
                continue
            elif unnamed:
                argument = unnamed.pop(0)
            elif not has_targets:
                has_targets = True
                argument = new_input("targets", Loss(), first)
            else:
                raise ModelError(
                    f"loss {name}: there is nothing for parameter '{parameter}'; a parameter is "
                    "named after an output or input of the model, 'labels' or 'targets'"
                )
            if details.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(argument)
            else:
                named[parameter] = argument
        result = loss(*positional, **named)
    if not isinstance(result, Tensor):
        raise ModelError(f"loss {name}: it returned {result!r}; it must return a Tensor")
    if result.shape is None:
        result = op.Reshape(result, np.zeros(0, np.int64))  # a run fails if it is no scalar
    elif result.shape != ():
        raise ModelError(
            f"loss {name}: it is of shape {list(result.shape)}; it must be a scalar, so reduce it, "
            "for example with op.ReduceMean(loss, keepdims=0)"
        )
    if result.dtype.kind in "iub":
        raise ModelError(f"loss {name}: it is of type {result.dtype}; it must be floating-point")
    return result, added


def _parameters(loss: Callable[..., Tensor], name: str) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function that each want one tensor, or refuses the function."""
    try:
        parameters = inspect.signature(loss).parameters
    except ValueError as error:
        raise ModelError(f"loss {name}: its parameters are unknown; wrap it in a `def`") from error
    for parameter, details in parameters.items():
        if details.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ModelError(
                f"loss {name}: parameter '*{parameter}' stands for any number of tensors; give "
                "each a name of its own"
            )
    return parameters
