"""Ranking metrics: the area under the ROC curve, and the gain of ranked documents."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, whole_number
from ortops.metrics.metric import (
    Array,
    Mean,
    StreamingMetric,
    class_rows,
    columns,
    has_classes,
    label_weights,
    probabilities,
)

__all__ = ["AUC", "NDCG"]

_MOST_BINS = 2**31 - 1


@dataclass
class AUC(StreamingMetric):
    """Area under the ROC curve; ties count half.

    Outputs of the targets' shape are scores of a single binary question, or of one for each column
    along axis 1 (multi-label). For two classes, the second is the positive one. For more, the
    result is the average of one-vs-rest areas of the class probabilities. The result is NaN if a
    question lacks positive or negative targets, or a score that is not ignored is NaN.

    Args:
        average: ``"macro"`` is the mean over classes or questions, ``"weighted"`` weights them by
            their number of positive targets.
        bins: None keeps all scores and is exact. An integer counts probabilities in that many equal
            bins, with constant memory; probabilities in the same bin count as ties.

    Example:
        >>> auc = AUC()
        >>> auc.update(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]))
        >>> auc.result()
        0.75

    Source:
        Hanley and McNeil, 1982 (doi:10.1148/radiology.143.1.7063747): the area is the Wilcoxon
        statistic.
    """

    _other_names = ("rocauc",)

    higher_is_better = True
    fits = frozenset(("labels", "answers"))

    _: KW_ONLY
    average: str = "macro"
    bins: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        choice(self.named("average"), self.average, ("macro", "weighted"))
        if self.bins is not None:
            whole_number(self.named("bins"), self.bins, 2, _MOST_BINS)

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._questions: list[_Question] = []
        self._undefined: bool = False

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            scores, labels = class_rows(self, outputs, targets)
            classes = scores.shape[1]
            if classes == 2:
                yes = labels[:, None] == 1
                scores = self._of_two(scores)
            else:
                yes = labels[:, None] == np.arange(classes)
                scores = probabilities(self, scores, classes=True)
            kept = np.ones(yes.shape, np.bool)
            weights = label_weights(self, targets, sample_weight)
            shares = None if weights is None else np.broadcast_to(weights[:, None], yes.shape)
        else:
            shares = self.weights_like(targets, sample_weight)
            shares = None if shares is None else columns(shares, targets, self.axis)[0]
            scores, found = columns(outputs, targets, self.axis)
            kept = np.ones(found.shape, np.bool)
            if self.ignored is not None:
                kept = found != self.ignored
            yes = found > 0.5
            if self.bins:
                scores = probabilities(self, scores, classes=False)
        self._undefined |= bool(np.isnan(scores[kept]).any())
        if not self._questions:
            self._questions = [_Question(self.bins) for _ in range(scores.shape[1])]
        elif len(self._questions) != scores.shape[1]:
            raise self.wrong(
                f"batches have {len(self._questions)} and {scores.shape[1]} questions; the number "
                "must be the same"
            )
        if self.bins and not self._undefined and scores[kept].size:
            low, high = scores[kept].min(), scores[kept].max()
            if low < 0 or high > 1:
                raise self.wrong(
                    f"bins= requires probabilities, got outputs of {low if low < 0 else high:g}; "
                    "set kind='logits', or leave bins= out"
                )
        if not self._undefined:
            for number, question in enumerate(self._questions):
                rows = kept[:, number]
                weights = None if shares is None else shares[rows, number]
                question.add(scores[rows, number], yes[rows, number], weights)

    def _of_two(self, scores: Array) -> Array:
        """Returns a score that increases with the probability of the second of two classes."""
        if self.bins:
            return probabilities(self, scores, classes=True)[:, 1:]
        if self.kind in ("probabilities", "log_probabilities"):
            return scores[:, 1:].copy()
        return scores[:, 1:].astype(np.float64) - scores[:, :1]

    def result(self) -> float:
        """Returns the area."""
        if self._undefined or not self._questions:
            return math.nan
        areas, yeses = zip(*(question.area() for question in self._questions), strict=True)
        if self.average == "weighted" and sum(yeses):
            return float(np.average(areas, weights=yeses))
        return float(np.mean(areas))


@dataclass
class NDCG(Mean):
    """Normalized discounted cumulative gain, averaged over rows.

    Outputs (N, documents) are scores, targets of the same shape are relevances >= 0. The gain of a
    row is Σ relevance / log2(1 + rank), with documents ranked by score; it is divided by that of
    the best order. Documents with equal scores share their places. A row without any relevant
    document has 0.

    Args:
        k: The number of ranks that count; all by default.

    Example:
        >>> gain = NDCG()
        >>> gain.update(np.array([[0.1, 0.9, 0.4]]), np.array([[3.0, 2.0, 0.0]]))
        >>> round(gain.result(), 4)
        0.8212

    Source:
        Järvelin and Kekäläinen, 2002 (doi:10.1145/582415.582418); the same as
        sklearn.metrics.ndcg_score.
    """

    higher_is_better = True
    fits = frozenset(("numbers", "answers"))

    k: int | None = None

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.k is not None:
            whole_number(self.named("k"), self.k, 1)

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if outputs.ndim != 2 or outputs.shape != targets.shape:
            raise self.wrong(
                "outputs and targets must have the shape (rows, documents), got shapes "
                f"{list(outputs.shape)} and {list(targets.shape)}"
            )
        if (targets < 0).any():
            raise self.wrong(f"relevances must be >= 0, got {targets.min():g}")
        discount = 1 / np.log2(np.arange(outputs.shape[1]) + 2.0)
        if self.k is not None:
            discount[self.k :] = 0
        pairs = zip(outputs, targets.astype(np.float64), strict=True)
        values = np.array([_normalized_gain(*pair, discount) for pair in pairs])
        weights = self.weights_like(targets[:, 0], sample_weight)
        self.add(values, weights)


def _normalized_gain(scores: Array, relevances: Array, discount: Array) -> float:
    """Returns the gain of a row, divided by that of the best order."""
    best = float(np.sort(relevances)[::-1] @ discount)
    if np.isnan(scores).any():
        return math.nan
    if not best:
        return 0.0
    _, places, counts = np.unique(-scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    sums = np.concatenate([[0.0], np.cumsum(discount)])
    shared = (sums[ends] - sums[ends - counts]) / counts  # the discount of documents that tie
    return float(relevances @ shared[places]) / best


class _Question:
    """Scores of positive and negative targets: all of them, or counts in bins."""

    def __init__(self, bins: int | None) -> None:
        self._counts = None if bins is None else np.zeros((2, bins))
        self._scores: list[Array] = []
        self._weights: list[Array] = []
        self._yes: list[npt.NDArray[np.bool]] = []

    def add(self, scores: Array, yes: npt.NDArray[np.bool], weights: Array | None) -> None:
        shares = np.ones(len(scores)) if weights is None else weights
        if self._counts is None:
            self._scores.append(scores.copy())
            self._yes.append(yes.copy())
            self._weights.append(shares.copy())
            return
        bins = self._counts.shape[1]
        places = np.minimum((scores * bins).astype(np.int64), bins - 1)
        for kind in (0, 1):
            self._counts[kind] += np.bincount(places[yes == kind], shares[yes == kind], bins)

    def area(self) -> tuple[float, float]:
        """Returns the area and the sum of the weights of positive targets."""
        counts = self._counts
        if counts is None:
            values, places = np.unique(np.concatenate(self._scores), return_inverse=True)
            yes, weights = np.concatenate(self._yes), np.concatenate(self._weights)
            counts = np.array(
                [
                    np.bincount(places[yes == kind], weights[yes == kind], len(values))
                    for kind in (0, 1)
                ]
            )
        no_count, yes_count = counts.sum(axis=1)
        if not no_count or not yes_count:
            return math.nan, float(yes_count)
        below = np.cumsum(counts[0]) - counts[0]
        pairs = (counts[1] * (below + 0.5 * counts[0])).sum()
        return float(pairs / (float(no_count) * float(yes_count))), float(yes_count)
