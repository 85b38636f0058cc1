"""Contrastive losses, which compare embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops._common.numbers import real
from ortops.errors import ArgumentError
from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import (
    Loss,
    Sources,
    Terms,
    check_name,
    check_number,
    count_type,
    one,
    rows_of,
)

__all__ = ["CosineEmbedding", "InfoNCE", "Triplet"]


@dataclass(frozen=True)
class _Comparison(Loss):
    """A loss that compares several tensors of the model, given by name."""

    compared: ClassVar[tuple[str, ...]] = ()
    """The arguments that name the tensors."""

    has_target: ClassVar[bool] = False
    """Whether it also reads a target input."""

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        named = ", ".join(f"{argument}=…" for argument in self.compared)
        if self.output is not None:
            raise ArgumentError(
                f"loss {self.name}: reads several tensors; instead of output={self.output!r}, name "
                f"them: {named}"
            )
        if self.target is not None and not self.has_target:
            raise ArgumentError(
                f"loss {self.name}: compares tensors of the model and has no target; leave out "
                f"target={self.target!r}"
            )
        for argument in self.compared:
            check_name(self, argument, "a tensor of the model")

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the tensors of the model."""
        return self, [
            sources.prediction(self, getattr(self, argument))[0] for argument in self.compared
        ]


@dataclass(frozen=True)
class CosineEmbedding(_Comparison):
    """1 − cos(a, b) for target 1, and max(0, cos(a, b) − margin) for target −1; averaged.

    Embeddings have shape (N, D), targets (N). A pair with another target has loss 0, but is part of
    the average.

    Args:
        first: The name of the embeddings a.
        second: The name of the embeddings b.
        target: See `Loss`.
        reduction: See `Loss`.
        margin: The similarity, in [−1, 1], up to which pairs with target −1 have no loss.

    Source:
        The same as torch.nn.CosineEmbeddingLoss, with its 1e-12 in the squares of the norms.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss = CosineEmbedding(first="a", second="b")
        >>> pair = {"a": [[1.0, 0.0]], "b": [[3.0, 4.0]]}
        >>> loss_at(loss, pair, targets=[1.0]), loss_at(loss, pair, targets=[-1.0])
        (0.4, 0.6)
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    first: str
    second: str
    margin: float = 0.0

    compared: ClassVar[tuple[str, ...]] = ("first", "second")
    has_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "margin", minimum=-1, maximum=1)

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets both embeddings and the targets."""
        _, (first, second) = super().tensors(sources)
        shape = None if first.shape is None else first.shape[:-1]
        name = self.target or self.default_target
        return self, (first, second, sources.input(self, name, first.dtype, shape, first))

    def elements(self, first: Tensor, second: Tensor, target: Tensor) -> Tensor:
        """Emits the loss of each pair."""
        least = max(1e-12, float(np.finfo(first.dtype).tiny))
        norms = [op.Sqrt(op.ReduceSumSquare(x, [-1], keepdims=0) + least) for x in (first, second)]
        cosine = op.ReduceSum(first * second, [-1], keepdims=0) / (norms[0] * norms[1])
        alike = op.Where(op.Equal(target, 1), 1 - cosine, 0.0)
        return alike + op.Where(op.Equal(target, -1), op.Relu(cosine - self.margin), 0.0)


@dataclass(frozen=True)
class Triplet(_Comparison):
    """max(0, margin + d(anchor, positive) − d(anchor, negative)), averaged.

    Embeddings have shape (N, D); d(a, b) is the p-norm of a − b + eps along the last axis.

    Args:
        anchor: The name of the anchor embeddings.
        positive: The name of the embeddings that should be close to the anchors.
        negative: The name of the embeddings that should be far from the anchors.
        reduction: See `Loss`.
        margin: How much farther away the negative should be.
        p: The order of the norm, at least 1; infinity for the maximum norm.
        eps: Added to differences.
        swap: Whether to use the smaller one of the negative's distances to anchor and positive.

    Source:
        Schroff et al., 2015 (arXiv:1503.03832); swap: Balntas et al., 2016; the same as
        torch.nn.TripletMarginLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss = Triplet(anchor="a", positive="b", negative="c", margin=2.0)
        >>> three = {"a": [[0.0, 0.0]], "b": [[3.0, 4.0]], "c": [[6.0, 0.0]]}
        >>> loss_at(loss, three)  # 2 + 5 - 6
        1.0
    """

    _other_names = ("tripletmargin",)

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    anchor: str
    positive: str
    negative: str
    margin: float = 1.0
    p: float = 2.0
    eps: float = 1e-6
    swap: bool = False

    compared: ClassVar[tuple[str, ...]] = ("anchor", "positive", "negative")

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "margin", above=0)
        check_number(self, "eps", minimum=0)
        if not real(self.p) >= 1:  # also infinity
            raise ArgumentError(f"loss {self.name}: p must be a number >= 1, got {self.p!r}")

    def elements(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """Emits the loss of each triplet."""
        far = self._distance(anchor, negative)
        if self.swap:
            far = op.Min(far, self._distance(positive, negative))
        return op.Relu(self.margin + self._distance(anchor, positive) - far)

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        difference = a - b + self.eps
        if self.p == 1:
            return op.ReduceL1(difference, [-1], keepdims=0)
        if self.p == 2:
            return op.ReduceL2(difference, [-1], keepdims=0)
        if self.p == np.inf:
            return op.ReduceMax(abs(difference), [-1], keepdims=0)
        total = op.ReduceSum(abs(difference) ** float(self.p), [-1], keepdims=0)
        positive = total > 0.0  # the gradient of a root is infinite at 0
        return op.Where(positive, op.Where(positive, total, 1.0) ** (1 / float(self.p)), 0.0)


@dataclass(frozen=True)
class InfoNCE(_Comparison):
    """Contrastive loss: classifies which key of the batch belongs to each query.

    Queries and keys have shape (N, D). The loss is the cross-entropy of the N × N logits
    ``query · keyᵀ / temperature`` with labels 0, 1, …, N − 1. The keys of other rows are the
    negatives, so the loss of a row depends on the whole batch.

    Args:
        query: The name of the queries.
        key: The name of the keys.
        reduction: See `Loss`.
        temperature: The divisor of similarities.
        normalize: Whether embeddings are normalized first, so that similarities are cosines.
        symmetric: Whether queries are classified for each key as well, as in CLIP; the loss is the
            average of both.

    Source:
        van den Oord et al., 2018 (arXiv:1807.03748); symmetric: Radford et al., 2021
        (arXiv:2103.00020).

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> texts = {"query": [[1.0, 0.0], [0.0, 1.0]], "key": [[1.0, 0.0], [0.0, 1.0]]}
        >>> loss_at(InfoNCE(query="query", key="key", temperature=1.0), texts)  # log(1 + 1/e)
        0.3133
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    query: str
    key: str
    temperature: float = 0.1
    normalize: bool = True
    symmetric: bool = False

    compared: ClassVar[tuple[str, ...]] = ("query", "key")

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "temperature", above=0)

    @property
    def couples_rows(self) -> bool:
        """Yes: the keys of other rows are the negatives."""
        return True

    def terms(self, query: Tensor, key: Tensor) -> Terms:
        """Emits the loss and the number of rows."""
        if self.normalize:
            query, key = unit(query), unit(key)
        logits = op.MatMul(query, op.Transpose(key, perm=[1, 0])) / self.temperature
        rows = rows_of(query)
        labels = op.Range(0, rows, 1)
        loss = op.SoftmaxCrossEntropyLoss(logits, labels, reduction=self.reduction)
        if self.symmetric:
            other = op.Transpose(logits, perm=[1, 0])
            backwards = op.SoftmaxCrossEntropyLoss(other, labels, reduction=self.reduction)
            loss = 0.5 * (loss + backwards)
        if self.reduction == "sum":
            return loss, one(loss)
        return loss, rows.astype(count_type(loss))


def unit(x: Tensor) -> Tensor:
    """Divides vectors along the last axis by their norms, which are at least 1e-12."""
    least = max(1e-12, float(np.finfo(x.dtype).tiny))
    return x / op.Max(op.ReduceL2(x, [-1], keepdims=1), least)
