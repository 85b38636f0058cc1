"""Rules of softmax and the cross-entropy losses."""

from __future__ import annotations

from ortops.autodiff.registry import Cotangents
from ortops.autodiff.rules._copies import scatter_add
from ortops.autodiff.rules._precision import wide_dtype
from ortops.autodiff.rules.table import vjp
from ortops.graph.shapes import expand_like, size_of
from ortops.graph.tensor import Tensor, op, zeros_like

Optionals = tuple[Tensor | None, ...]


@vjp("Softmax")
def softmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return y * (g - op.ReduceSum(g * y, [axis], keepdims=1))


@vjp("LogSoftmax")
def log_softmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return g - op.Exp(y) * op.ReduceSum(g, [axis], keepdims=1)


@vjp("Hardmax", limits="zero wherever it exists")
def hardmax(g: Tensor, y: Tensor, x: Tensor, *, axis: int = -1) -> Cotangents:
    return None


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
    loss, log_probabilities = y
    assert log_probabilities is not None
    probabilities = op.Exp(log_probabilities)
    g_loss, g_log_probabilities = (*g, None)[:2]
    d_scores = d_weights = None
    if g_loss is not None:
        classes, counted = _classes(labels, ignore_index)
        rate, slope = _slope(g_loss, labels, classes, counted, weights, reduction)
        # probabilities − one_hot(labels), without a one-hot matrix
        picked = op.GatherElements(probabilities, op.Unsqueeze(classes, [1]), axis=1)
        difference = op.ScatterElements(
            probabilities, op.Unsqueeze(classes, [1]), picked - 1, axis=1
        )
        d_scores = difference * (op.Unsqueeze(slope, [1]) if slope.ndim else slope)
        if weights is not None:
            each = _negative_pick(log_probabilities, classes)
            d_weights = _weights_vjp(rate, each, loss, classes, counted, weights, reduction)
    if g_log_probabilities is not None:
        total = op.ReduceSum(g_log_probabilities, [1], keepdims=1)
        part = g_log_probabilities - probabilities * total
        d_scores = part if d_scores is None else d_scores + part
    return d_scores, None, d_weights


@vjp("NegativeLogLikelihoodLoss")
def negative_log_likelihood_loss(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Cotangents:
    classes, counted = _classes(labels, ignore_index)
    rate, slope = _slope(g, labels, classes, counted, weights, reduction)
    column = op.Unsqueeze(classes, [1])
    slope = op.Unsqueeze(slope, [1]) if slope.ndim else slope
    d_x = op.ScatterElements(zeros_like(x), column, expand_like(-slope, column), axis=1)
    d_weights = None
    if weights is not None:
        each = _negative_pick(x, classes)
        d_weights = _weights_vjp(rate, each, y, classes, counted, weights, reduction)
    return d_x, None, d_weights


def _classes(labels: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Replaces ignored labels with 0; also returns which samples count (None: all)."""
    if ignore_index is None:
        return labels, None
    counted = op.Not(op.Equal(labels, ignore_index))
    return op.Where(counted, labels, 0), counted


def _slope(
    g: Tensor,
    labels: Tensor,
    classes: Tensor,
    counted: Tensor | None,
    weights: Tensor | None,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Returns the cotangents of the weighted and of the unweighted loss of each sample.

    A cotangent that is equal for all samples is a scalar.
    """
    each = None if weights is None else op.Gather(weights, classes)
    if reduction == "mean":
        wide = wide_dtype(g)  # float16 cannot count beyond 65504
        total: Tensor | int
        if each is not None:
            kept = each if counted is None else op.Where(counted, each, 0)
            total = op.ReduceSum(kept.astype(wide), keepdims=0)
        elif counted is not None:
            total = op.ReduceSum(counted.astype(wide), keepdims=0)
        else:
            count = size_of(labels, range(labels.ndim))
            total = count.astype(wide) if isinstance(count, Tensor) else count
        if each is not None or counted is not None:
            total = op.Where(op.Equal(total, 0), 1, total)  # without samples, the gradient is 0
        g = (g.astype(wide) / total).astype(g.dtype)
    slope = g if each is None else g * each
    if counted is not None:
        slope = op.Where(counted, slope, 0)
    return g, slope


def _negative_pick(log_probabilities: Tensor, classes: Tensor) -> Tensor:
    """Returns the unweighted loss of each sample."""
    picked = op.GatherElements(log_probabilities, op.Unsqueeze(classes, [1]), axis=1)
    return -op.Squeeze(picked, [1])


def _weights_vjp(
    rate: Tensor,
    each: Tensor,
    loss: Tensor | None,
    classes: Tensor,
    counted: Tensor | None,
    weights: Tensor,
    reduction: str,
) -> Tensor:
    """Returns the cotangent of the class weights, which are also in the denominator of a mean."""
    part = rate * (each - loss if reduction == "mean" else each)
    if counted is not None:
        part = op.Where(counted, part, 0)
    flat = op.Reshape(classes, [-1])
    return scatter_add(zeros_like(weights), flat, op.Reshape(part, [-1]))
