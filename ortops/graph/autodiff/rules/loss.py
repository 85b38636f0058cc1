"""Rules of softmax and the cross-entropy losses."""

from __future__ import annotations

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules._copies import scatter_add
from ortops.graph.autodiff.rules._precision import wide_dtype
from ortops.graph.autodiff.rules.table import vjp
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
        at = _Labels(labels, weights, ignore_index, reduction == "mean")
        rate, slope = at.slopes(g_loss)
        # probabilities − one_hot(labels), without a one-hot matrix; the loss gathers the same
        picked = op.Exp(op.GatherElements(log_probabilities, at.column, axis=1))
        difference = op.ScatterElements(probabilities, at.column, picked - 1, axis=1)
        d_scores = difference * slope
        d_weights = at.weights_vjp(rate, log_probabilities, loss)
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
    at = _Labels(labels, weights, ignore_index, reduction == "mean")
    rate, slope = at.slopes(g)
    d_x = op.ScatterElements(zeros_like(x), at.column, expand_like(-slope, at.column), axis=1)
    return d_x, None, at.weights_vjp(rate, x, y)


class _Labels:
    """The labels and class weights of a loss.

    Args:
        labels: The labels, (N, …).
        weights: The weights of the classes.
        ignore_index: The label that does not count.
        is_mean: Whether the loss is the weighted mean over the samples.

    Attributes:
        column: The class of each sample, (N, 1, …); 0 for ignored ones.
    """

    def __init__(
        self, labels: Tensor, weights: Tensor | None, ignore_index: int | None, is_mean: bool
    ) -> None:
        self._classes, self._counted = labels, None
        if ignore_index is not None:
            self._counted = op.Not(op.Equal(labels, ignore_index))
            self._classes = op.Where(self._counted, labels, 0)
        self._weights, self._is_mean = weights, is_mean
        self.column = op.Unsqueeze(self._classes, [1])

    def _only_counted(self, x: Tensor) -> Tensor:
        return x if self._counted is None else op.Where(self._counted, x, 0)

    def slopes(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cotangents of the weighted, and in a column of the unweighted, losses.

        A cotangent that is equal for all samples is a scalar.
        """
        each = None if self._weights is None else op.Gather(self._weights, self._classes)
        if self._is_mean:
            wide = wide_dtype(g)  # float16 cannot count beyond 65504
            total: Tensor | int
            if each is not None:
                total = op.ReduceSum(self._only_counted(each).astype(wide), keepdims=0)
            elif self._counted is not None:
                total = op.ReduceSum(self._counted.astype(wide), keepdims=0)
            else:
                count = size_of(self._classes, range(self._classes.ndim))
                total = count.astype(wide) if isinstance(count, Tensor) else count
            if each is not None or self._counted is not None:
                total = op.Where(op.Equal(total, 0), 1, total)  # the gradient of no samples is 0
            g = (g.astype(wide) / total).astype(g.dtype)
        slope = self._only_counted(g if each is None else g * each)
        return g, op.Unsqueeze(slope, [1]) if slope.ndim else slope

    def weights_vjp(
        self, rate: Tensor, log_probabilities: Tensor, loss: Tensor | None
    ) -> Tensor | None:
        """Returns the cotangent of the class weights, which a mean is also divided by.

        Args:
            rate: The cotangent of the weighted losses.
            log_probabilities: The log-probabilities of the classes.
            loss: The result.
        """
        if self._weights is None:
            return None
        each = -op.Squeeze(op.GatherElements(log_probabilities, self.column, axis=1), [1])
        part = self._only_counted(rate * (each - loss if self._is_mean else each))
        places, values = (op.Reshape(x, [-1]) for x in (self._classes, part))
        return scatter_add(zeros_like(self._weights), places, values)
