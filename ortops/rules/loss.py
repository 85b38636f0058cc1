"""Rules of softmax and of the losses that belong to it."""

from __future__ import annotations

from ortops.autodiff import vjp
from ortops.rules._types import Cotangents
from ortops.tensor import Tensor, op, size_of

Optionals = tuple[Tensor | None, ...]


@vjp("Softmax")
def softmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return y * (g - op.ReduceSum(g * y, [axis], keepdims=1))


@vjp("LogSoftmax")
def log_softmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1)


@vjp("Hardmax")
def hardmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return None


def _coefficients(
    g: Tensor,
    x: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    ignore_index: int | None,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Returns the classes to pick, and −∂loss/∂(log-probability picked), with an axis for classes.

    The class of an ignored sample is 0 and its coefficient is 0.
    """
    counted = None
    if ignore_index is not None:
        counted = op.Not(op.Equal(labels, ignore_index))
        labels = op.Where(counted, labels, 0)
    each = None if weights is None else op.Gather(weights, labels)
    if counted is not None:
        each = op.Where(counted, 1.0 if each is None else each, op.CastLike(0.0, x))
    if reduction == "mean":
        if each is None:
            count = size_of(labels, range(labels.ndim))
            g = g / (count.astype(x.dtype) if isinstance(count, Tensor) else count)
        else:
            g = g / op.ReduceSum(each, keepdims=0)
    coefficient = g if each is None else g * each
    if coefficient.ndim:
        coefficient = op.Unsqueeze(coefficient, [1])
    return op.Unsqueeze(labels, [1]), coefficient


@vjp("SoftmaxCrossEntropyLoss", needs=(1,))
def softmax_cross_entropy_loss(
    g: Optionals,
    y: Optionals,
    scores: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Cotangents:
    log_probabilities = y[1]
    assert log_probabilities is not None
    probabilities = op.Exp(log_probabilities)
    g_loss, g_log_probabilities = g
    d_scores = None
    if g_loss is not None:
        classes, coefficient = _coefficients(
            g_loss, scores, labels, weights, ignore_index, reduction
        )
        picked = op.GatherElements(probabilities, classes, axis=1)
        d_scores = op.ScatterElements(probabilities, classes, picked - 1, axis=1) * coefficient
    if g_log_probabilities is not None:
        total = op.ReduceSum(g_log_probabilities, [1], keepdims=1)
        part = g_log_probabilities - probabilities * total
        d_scores = part if d_scores is None else d_scores + part
    return d_scores, None
