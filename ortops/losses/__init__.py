"""Loss functions: a scalar computed from tensors of a model and from targets.

A loss is an object that names the tensors it reads, or a function of yours:

    >>> from ortops import op
    >>> def huber(prediction, targets):
    ...     distance = abs(prediction - targets)
    ...     squared = 0.5 * distance * distance
    ...     return op.ReduceMean(op.Where(distance < 1.0, squared, distance - 0.5), keepdims=0)

Losses can be added and weighted: ``0.7 * SoftmaxCrossEntropy("classes") + 0.3 * L1("boxes")``. To
add a loss to ortops, write a subclass of `Loss` in a file of this folder and list it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TypeAlias

from ortops.errors import ArgumentError, did_you_mean
from ortops.losses.classification import (
    BinaryCrossEntropy,
    BinaryCrossEntropyWithLogits,
    Focal,
    Hinge,
    NegativeLogLikelihood,
    NextToken,
    SoftmaxCrossEntropy,
)
from ortops.losses.compute import Computed, Inputs, Prediction, compute
from ortops.losses.distillation import Distillation
from ortops.losses.loss import Combined, Function, Loss
from ortops.losses.preference import DPO
from ortops.losses.regression import L1, Huber, KullbackLeibler, MeanSquaredError, SmoothL1
from ortops.losses.segmentation import Dice
from ortops.losses.sequence import CTC
from ortops.losses.similarity import CosineEmbedding, InfoNCE, Triplet

__all__ = [
    "CTC",
    "DPO",
    "L1",
    "LOSSES",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
    "Combined",
    "Computed",
    "CosineEmbedding",
    "Dice",
    "Distillation",
    "Focal",
    "Hinge",
    "Huber",
    "InfoNCE",
    "Inputs",
    "KullbackLeibler",
    "Loss",
    "LossLike",
    "MeanSquaredError",
    "NegativeLogLikelihood",
    "NextToken",
    "Prediction",
    "SmoothL1",
    "SoftmaxCrossEntropy",
    "Triplet",
    "compute",
    "resolve",
]

LOSSES: Mapping[str, type[Loss]] = {
    loss.__name__: loss
    for loss in (
        *(BinaryCrossEntropy, BinaryCrossEntropyWithLogits, CosineEmbedding, CTC, Dice),
        *(Distillation, DPO, Focal, Hinge, Huber, InfoNCE, KullbackLeibler, L1, MeanSquaredError),
        *(NegativeLogLikelihood, NextToken, SmoothL1, SoftmaxCrossEntropy, Triplet),
    )
}
"""All losses by name."""

for _public in (Combined, Loss, *LOSSES.values()):
    _public.__module__ = __name__  # so that messages show the public name

LossLike: TypeAlias = str | Loss | type[Loss] | Function
"""A loss, its class or the name of its class (both with default arguments), or a function."""


def resolve(loss: LossLike) -> Loss | Function:
    """Resolves the argument ``loss=`` to a loss or a function.

    Raises:
        ArgumentError: If no loss has that name, or the value has another type.

    Example:
        >>> resolve("L1").output is None
        True
        >>> resolve("MeanSquared")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: unknown loss 'MeanSquared'; did you mean 'MeanSquaredError'?
    """
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ArgumentError(f"unknown loss '{loss}'; {did_you_mean(loss, LOSSES)}")
        return _default(LOSSES[loss])
    if isinstance(loss, type):
        if issubclass(loss, Loss) and loss is not Loss:
            return _default(loss)
    elif isinstance(loss, Loss):
        if type(loss) is not Loss:
            return loss
    elif callable(loss):
        return loss
    raise ArgumentError(
        f"loss must be one of ortops.losses, its name, or a function of Tensors, got {loss!r}"
    )


def _default(loss: type[Loss]) -> Loss:
    """Returns a loss with default arguments, if all arguments have defaults."""
    needed = [
        each.name
        for each in fields(loss)
        if each.init and each.default is MISSING and each.default_factory is MISSING
    ]
    if needed:
        shown = ", ".join(f"{name}=…" for name in needed)
        raise ArgumentError(
            f"loss '{loss.__name__}' reads several tensors; name them: "
            f"ortops.losses.{loss.__name__}({shown})"
        )
    return loss()
