"""Each loss with each way that a file ends, each reduction, and one or two heads: as in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from violations import all_violations

from ortops import ModelError, losses, op
from tests.loss_models import Array, loss_and_gradients

pytestmark = pytest.mark.torch

CLASSES = 5


class Ending(NamedTuple):
    """How a file ends.

    Attributes:
        emit: Emits it, of a tensor whose last axis has one element.
        squash: What it does to numbers: the name of a function of torch.
    """

    emit: Callable[[Any], Any]
    squash: str | None


def squeezed(x: Any) -> Any:
    return op.Squeeze(x, [-1])


ENDINGS: dict[str, Ending] = {
    "none": Ending(lambda x: op.Reshape(x, op.Shape(x, end=-1)), None),
    "Squeeze": Ending(squeezed, None),
    "Softmax": Ending(lambda x: op.Softmax(squeezed(x), axis=-1), "softmax"),
    "LogSoftmax": Ending(lambda x: op.LogSoftmax(squeezed(x), axis=-1), "log_softmax"),
    "Sigmoid": Ending(lambda x: op.Sigmoid(squeezed(x)), "sigmoid"),
    "Softmax, Squeeze": Ending(lambda x: squeezed(op.Softmax(x, axis=-2)), "softmax"),
    "LogSoftmax, Squeeze": Ending(lambda x: squeezed(op.LogSoftmax(x, axis=-2)), "log_softmax"),
    "Sigmoid, Squeeze": Ending(lambda x: squeezed(op.Sigmoid(x)), "sigmoid"),
    "Log of Softmax": Ending(lambda x: op.Log(op.Softmax(squeezed(x), axis=-1)), "log_softmax"),
    "Softmax, Identity": Ending(lambda x: op.Identity(op.Softmax(squeezed(x), axis=-1)), "softmax"),
}
EXCLUSIVE = {name for name, each in ENDINGS.items() if each.squash in ("softmax", "log_softmax")}


def read(torch: Any, x: Any, ending: Ending, kind: str) -> Any:
    """Returns what a loss reads that wants logits, logarithms, probabilities or the output."""
    functional = torch.nn.functional
    if ending.squash is None or kind == "logits":
        return x
    logarithm = functional.logsigmoid(x) if ending.squash == "sigmoid" else x.log_softmax(-1)
    return {
        "log": logarithm,
        "probabilities": logarithm.exp(),
        "output": logarithm if ending.squash == "log_softmax" else logarithm.exp(),
    }[kind]


class Case(NamedTuple):
    """A loss, and its formula.

    Attributes:
        loss: The loss.
        reads: What it reads; see `read`.
        elements: What is summed or averaged, in torch, of what it reads and the targets.
        target: Draws the targets.
        shape: The shape of what it reads.
        refuses: The endings that it refuses.
        unit: Whether it takes numbers from 0 to 1.
    """

    loss: losses.Loss
    reads: str
    elements: Callable[..., Any]
    target: Callable[[np.random.Generator], Array]
    shape: tuple[int, ...] = (6, CLASSES)
    refuses: Any = ()
    unit: bool = False


def labels(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(0, CLASSES, shape or (6,))


def numbers(rng: np.random.Generator) -> Array:
    return rng.normal(size=(6, CLASSES))


def shares(rng: np.random.Generator) -> Array:
    return rng.random((6, CLASSES)).round(1)


def chances(rng: np.random.Generator) -> Array:
    drawn = rng.random((6, CLASSES))
    return drawn / drawn.sum(-1, keepdims=True)


def of_functional(torch: Any, y: Any, t: Any, *, function: str, **options: Any) -> Any:
    moved = y.movedim(-1, 1) if function in ("cross_entropy", "nll_loss") and y.ndim > 2 else y
    return getattr(torch.nn.functional, function)(moved, t, reduction="none", **options)


def shifted(torch: Any, y: Any, t: Any) -> Any:
    return torch.nn.functional.cross_entropy(
        y[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1), reduction="none"
    )


def focal(torch: Any, y: Any, t: Any, *, multiclass: bool) -> Any:
    functional = torch.nn.functional
    if multiclass:
        loss = functional.cross_entropy(y, t, reduction="none")
        return (1 - (-loss).exp()) ** 2 * loss
    p = torch.sigmoid(y)
    loss = functional.binary_cross_entropy_with_logits(y, t, reduction="none")
    return (1 - (p * t + (1 - p) * (1 - t))) ** 2 * loss


def dice(torch: Any, y: Any, t: Any, *, multiclass: bool) -> Any:
    if multiclass:
        p, t = y.softmax(-1), torch.nn.functional.one_hot(t, CLASSES)
    else:
        p = torch.sigmoid(y)
    return 1 - (2 * (p * t).sum(0) + 1) / ((p * p).sum(0) + (t * t).sum(0) + 1)


def distilled(torch: Any, y: Any, t: Any) -> Any:
    p, q = (y / 2).log_softmax(-1), (t / 2).softmax(-1)
    return 4 * (q * (q.log() - p)).sum(-1)


def pinball(torch: Any, y: Any, t: Any) -> Any:
    return torch.maximum(0.9 * (t - y), -0.1 * (t - y))


def arc(torch: Any, y: Any, t: Any) -> Any:
    own = torch.nn.functional.one_hot(t, CLASSES).bool()
    angle = torch.acos(y) + 0.5
    moved = torch.where(angle <= np.pi, torch.cos(angle), y - 0.5 * np.sin(0.5))
    logits = 4 * torch.where(own, moved, y)
    return torch.nn.functional.cross_entropy(logits, t, reduction="none")


F = of_functional
CASES = {
    "SoftmaxCrossEntropy": Case(
        losses.SoftmaxCrossEntropy(), "logits", partial(F, function="cross_entropy"), labels
    ),
    "SoftmaxCrossEntropy, smoothed": Case(
        losses.SoftmaxCrossEntropy(label_smoothing=0.2),
        *("logits", partial(F, function="cross_entropy", label_smoothing=0.2), labels),
    ),
    "SoftmaxCrossEntropy of probabilities": Case(
        losses.SoftmaxCrossEntropy(probabilities=True),
        *("logits", partial(F, function="cross_entropy"), chances),
    ),
    "SoftmaxCrossEntropy of a sequence": Case(
        losses.SoftmaxCrossEntropy(axis=-1),
        *("logits", partial(F, function="cross_entropy"), labels, (2, 3, CLASSES)),
    )._replace(target=lambda rng: labels(rng, 2, 3)),
    "NextToken": Case(
        losses.NextToken(), "logits", shifted, lambda rng: labels(rng, 2, 4), (2, 4, CLASSES)
    ),
    "NegativeLogLikelihood": Case(
        losses.NegativeLogLikelihood(), "log", partial(F, function="nll_loss"), labels
    ),
    "Focal of classes": Case(
        losses.Focal(multiclass=True), "logits", partial(focal, multiclass=True), labels
    ),
    "Focal": Case(
        losses.Focal(multiclass=False),
        *("logits", partial(focal, multiclass=False), shares, (6, CLASSES), EXCLUSIVE),
    ),
    "Dice of classes": Case(
        losses.Dice(multiclass=True), "logits", partial(dice, multiclass=True), labels
    ),
    "Dice": Case(
        losses.Dice(),
        *("logits", partial(dice, multiclass=False), shares, (6, CLASSES), EXCLUSIVE),
    ),
    "Hinge": Case(losses.Hinge(), "output", partial(F, function="multi_margin_loss"), labels),
    "Distillation": Case(losses.Distillation(), "logits", distilled, numbers),
    "ArcFace": Case(losses.ArcFace(scale=4.0), "output", arc, labels, (6, CLASSES), (), True),
    "BinaryCrossEntropyWithLogits": Case(
        losses.BinaryCrossEntropyWithLogits(),
        "logits",
        partial(F, function="binary_cross_entropy_with_logits"),
        *(shares, (6, CLASSES), EXCLUSIVE),
    ),
    "BinaryCrossEntropy": Case(
        losses.BinaryCrossEntropy(),
        *("probabilities", partial(F, function="binary_cross_entropy"), shares),
        *((6, CLASSES), (), True),
    ),
    "KullbackLeibler": Case(
        losses.KullbackLeibler(), "log", partial(F, function="kl_div"), chances
    ),
    "MeanSquaredError": Case(
        losses.MeanSquaredError(), "output", partial(F, function="mse_loss"), numbers
    ),
    "L1": Case(losses.L1(), "output", partial(F, function="l1_loss"), numbers),
    "Huber": Case(losses.Huber(), "output", partial(F, function="huber_loss"), numbers),
    "SmoothL1": Case(losses.SmoothL1(), "output", partial(F, function="smooth_l1_loss"), numbers),
    "Quantile": Case(losses.Quantile(quantiles=0.9), "output", pinball, numbers),
    "PoissonNLL": Case(
        losses.PoissonNLL(), "output", partial(F, function="poisson_nll_loss"), shares
    ),
}
FIVE = ("none", "Squeeze", "Softmax", "LogSoftmax", "Sigmoid")
ALL = [
    (name, ending, heads, reduction)
    for name, ending, heads in product(CASES, ENDINGS, (1, 2))
    for place, reduction in enumerate(CASES[name].loss.reductions)
    if (ending in FIVE or (heads, place) in ((1, 0), (2, 1)))
    and not (name == "ArcFace" and ENDINGS[ending].squash == "log_softmax")  # not a cosine
]


def test_all_losses_of_one_tensor_are_in_the_table() -> None:
    several = {"CosineEmbedding", "GaussianNLL", "InfoNCE", "Triplet"}
    of_forms = {"CIoU", "CTC", "DPO", "DistributionFocal", "GIoU", "TaskAligned"}
    found = {type(each.loss).__name__ for each in CASES.values()}
    assert found == set(losses.LOSSES) - several - of_forms


def is_that_of_torch(name: str, ending_name: str, heads: int, reduction: str) -> None:
    import torch

    case, ending = CASES[name], ENDINGS[ending_name]
    rng = np.random.default_rng(len(name) + len(ending_name))
    outputs, feeds, parts, tensors, total = {}, {}, [], {}, torch.zeros((), dtype=torch.float64)
    for head, weight in zip(("y", "z")[:heads], (1.0, 0.5), strict=False):
        x = (
            rng.random(case.shape)
            if case.unit and not ending.squash
            else rng.normal(size=case.shape)
        )
        outputs[head], feeds[f"of_{head}"] = x[..., None], case.target(rng)
        target: Any = {"teacher" if name == "Distillation" else "target": f"of_{head}"}
        parts.append(replace(case.loss, output=head, reduction=reduction, **target) * weight)
        tensors[head] = torch.tensor(x, requires_grad=True)
        given = read(torch, tensors[head], ending, case.reads)
        elements = case.elements(torch, given, torch.tensor(feeds[f"of_{head}"]))
        rows = elements.shape[0] if reduction == "batchmean" else elements.numel()
        total = total + weight * elements.sum() / (1 if reduction == "sum" else rows)
    loss = parts[0] if heads == 1 else parts[0] + parts[1]
    if ending_name in case.refuses:
        with pytest.raises(ModelError):
            loss_and_gradients(loss, outputs, feeds, ending.emit)
        return
    value, gradients = loss_and_gradients(loss, outputs, feeds, ending.emit)
    total.backward()
    np.testing.assert_allclose(value, total.item(), rtol=1e-10)
    for head, tensor in tensors.items():
        assert np.any(tensor.grad.numpy() != 0)
        found = gradients[head][..., 0]
        np.testing.assert_allclose(found, tensor.grad, rtol=1e-9, atol=1e-12, err_msg=head)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # torch, of its KLDivLoss
@pytest.mark.nightly(2)
@pytest.mark.parametrize("every", [pytest.param(7, marks=pytest.mark.slow), 1, 37])
def test_losses_of_endings_are_those_of_torch(every: int) -> None:
    with all_violations() as check:
        for row in ALL[::every]:
            with check(row):
                is_that_of_torch(*row)
