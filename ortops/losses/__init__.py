"""Loss functions: a scalar computed from tensors of a model and from targets.

A loss is an object that names the tensors it reads, or a function of yours:

    >>> from ortops import op
    >>> def huber(prediction, targets):
    ...     distance = abs(prediction - targets)
    ...     squared = 0.5 * distance * distance
    ...     return op.ReduceMean(op.Where(distance < 1.0, squared, distance - 0.5), keepdims=0)

Losses can be added and weighted: ``0.7 * SoftmaxCrossEntropy("classes") + 0.3 * L1("boxes")``. To
add a loss to ortops, write a subclass of `Loss` in a file of this folder, and list it in the file's
``__all__``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeAlias

from ortops._common.other_names import declared, find_name, foreign, other_names
from ortops.errors import ArgumentError
from ortops.losses import (
    angular,
    boxes,
    classification,
    detection,
    distillation,
    preference,
    regression,
    segmentation,
    sequence,
    similarity,
)
from ortops.losses.angular import *  # noqa: F403
from ortops.losses.boxes import *  # noqa: F403
from ortops.losses.classification import *  # noqa: F403
from ortops.losses.compute import compute
from ortops.losses.detection import *  # noqa: F403
from ortops.losses.distillation import *  # noqa: F403
from ortops.losses.loss import Combined, Function, Loss
from ortops.losses.preference import *  # noqa: F403
from ortops.losses.regression import *  # noqa: F403
from ortops.losses.scene import Computed, Inputs, Prediction
from ortops.losses.segmentation import *  # noqa: F403
from ortops.losses.sequence import *  # noqa: F403
from ortops.losses.similarity import *  # noqa: F403

__all__: list[str] = []
__all__ += angular.__all__
__all__ += boxes.__all__
__all__ += classification.__all__
__all__ += detection.__all__
__all__ += distillation.__all__
__all__ += preference.__all__
__all__ += regression.__all__
__all__ += segmentation.__all__
__all__ += sequence.__all__
__all__ += similarity.__all__

LOSSES: Mapping[str, type[Loss]] = declared(Loss, __all__, globals())
"""All losses by name."""

__all__ += ["LOSSES", "OTHER_NAMES", "Combined", "Computed", "Inputs", "Loss", "LossLike"]
__all__ += ["Prediction", "compute", "resolve"]

_BINARY = (
    "use 'BinaryCrossEntropyWithLogits' for logits, or for probabilities from a Sigmoid at the end "
    "of the model; 'BinaryCrossEntropy' for other probabilities"
)

_DIVERGENCE = (
    "use 'KullbackLeibler(reduction=\"batchmean\")', the sum for each row as in Keras, or "
    "'KullbackLeibler', whose mean divides by the number of elements as in PyTorch"
)

OTHER_NAMES: Mapping[str, str] = {
    **other_names(LOSSES),
    "categoricalcrossentropy": "use 'SoftmaxCrossEntropy(probabilities=True)' for one-hot or "
    "soft labels, or 'SoftmaxCrossEntropy' for class numbers",
    "logloss": "use 'SoftmaxCrossEntropy' for classes, 'BinaryCrossEntropyWithLogits' for yes "
    "or no",
    "l2": "use 'MeanSquaredError', or half of it",
    "rmse": "use 'MeanSquaredError', which has the same minimum",
    "rootmeansquarederror": "use 'MeanSquaredError', which has the same minimum",
    "bce": _BINARY,
    **dict.fromkeys(("kldivergence", "kullbackleiblerdivergence", "kld"), _DIVERGENCE),
    "binaryfocalcrossentropy": "use 'Focal'",
    "categoricalfocalcrossentropy": "use 'Focal'",
    **dict.fromkeys(("cosinesimilarity", "contrastive"), "use 'CosineEmbedding' or 'InfoNCE'"),
    "ntxent": "use 'InfoNCE'",
    "poisson": "use 'PoissonNLL(log_input=False)' for rates, as Keras reads, or 'PoissonNLL' for "
    "their logarithms, as PyTorch reads",
    **dict.fromkeys(("iou", "boxiou"), "use 'GIoU' or 'CIoU', or 'Dice' for segmentation"),
}
"""What other libraries call losses, in lower case, without underscores and without "loss"; the
value is a name, or a hint if the name has several meanings. A class declares those that mean it."""

for _public in (Combined, Loss, *LOSSES.values()):
    _public.__module__ = __name__  # so that messages show the public name

LossLike: TypeAlias = str | Loss | type[Loss] | Function | Mapping[str, Any]
"""A loss, its class or the name of its class (both with default arguments), or a function; or a
dict with a loss for each of several outputs."""


def resolve(loss: LossLike) -> Loss | Function:
    """Resolves the argument ``loss=`` to a loss or a function.

    Names may be written in lower case, and as in PyTorch or Keras, if their meaning is clear. A
    dict is the sum of the losses of its outputs, each with the target input ``labels_<output>`` or
    ``targets_<output>``, unless the loss names another one.

    Raises:
        ArgumentError: If no loss has that name, or the value has another type.

    Example:
        >>> resolve("L1").output is None
        True
        >>> [resolve(name).name for name in ("mse", "cross_entropy", "CTCLoss")]
        ['MeanSquaredError', 'SoftmaxCrossEntropy', 'CTC']
        >>> both = resolve({"classes": "SoftmaxCrossEntropy", "boxes": 0.3 * L1()})
        >>> [(weight, loss.output, loss.target) for weight, loss in both.summands]
        [(1.0, 'classes', 'labels_classes'), (0.3, 'boxes', 'targets_boxes')]
        >>> resolve("MeanSquared")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: unknown loss 'MeanSquared'; did you mean 'MeanSquaredError'?
    """
    if isinstance(loss, str):
        found, hint = find_name(loss, LOSSES, OTHER_NAMES)
        if found is None:
            raise ArgumentError(f"unknown loss '{loss}'; {hint}")
        return _default(LOSSES[found])
    if isinstance(loss, type):
        if issubclass(loss, Loss) and loss is not Loss:
            return _default(loss)
    elif isinstance(loss, Loss):
        if type(loss) is not Loss:
            return loss
    elif isinstance(loss, Mapping):
        return _by_output(loss)
    elif callable(loss) and not foreign(loss):
        return loss
    if name := foreign(loss):
        found, hint = find_name(name, LOSSES, OTHER_NAMES)
        hint = f"use ortops.losses.{found}()" if found else hint
        raise ArgumentError(
            f"loss must be one of ortops.losses, got {name} of another library; {hint}"
        )
    raise ArgumentError(
        f"loss must be one of ortops.losses, its name, or a function of Tensors, got {loss!r}"
    )


def _by_output(losses: Mapping[str, Any]) -> Loss:
    """Returns the sum of the losses of several outputs."""
    summands: list[tuple[float, Loss]] = []
    for output, given in losses.items():
        loss = resolve(given)
        if not isinstance(loss, Loss):
            raise ArgumentError(f"loss['{output}'] must be one of ortops.losses, got {given!r:.80}")
        for weight, each in loss.summands if isinstance(loss, Combined) else [(1.0, loss)]:
            if each.output not in (None, output):
                raise ArgumentError(f"loss['{output}'] must leave out output=, got {each.output!r}")
            target = each.target or f"{each.default_target}_{output}"
            summands.append((weight, replace(each, output=output, target=target)))
    if not summands:
        raise ArgumentError("loss must have a loss for each output that counts, got {}")
    return Combined(summands=tuple(summands))


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
