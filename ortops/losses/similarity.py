"""Losses that compare embeddings with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops.errors import ModelError
from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import Loss, Sources, Terms, check_number, count_type

__all__ = ["CosineEmbedding", "InfoNCE", "Triplet"]


@dataclass(frozen=True)
class _Comparison(Loss):
    """A loss of several tensors of the model, which it takes by name."""

    compared: ClassVar[tuple[str, ...]] = ()
    """The arguments that name the tensors."""

    has_target: ClassVar[bool] = False
    """Whether it reads an input, too."""

    def __post_init__(self) -> None:
        """Checks what was given."""
        super().__post_init__()
        named = ", ".join(f"{argument}=…" for argument in self.compared)
        if self.output is not None:
            raise ModelError(
                f"loss {self.name}: output is {self.output!r}; it reads several tensors, so name "
                f"them: {named}"
            )
        if self.target is not None and not self.has_target:
            raise ModelError(
                f"loss {self.name}: target is {self.target!r}; it compares tensors of the model "
                "with each other, so leave it out"
            )
        for argument in self.compared:
            if not isinstance(getattr(self, argument), str):
                raise ModelError(
                    f"loss {self.name}: {argument} is {getattr(self, argument)!r}; the name of a "
                    "tensor of the model is accepted"
                )

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the tensors of the model."""
        return self, [
            sources.prediction(self, getattr(self, argument))[0] for argument in self.compared
        ]


@dataclass(frozen=True)
class CosineEmbedding(_Comparison):
    """1 − cos(a, b) where the target is 1, and max(0, cos(a, b) − margin) where it is −1; averaged.

    Embeddings have shape (N, D), targets (N). A pair with another target has loss 0, and counts.

    Args:
        first: The tensor that holds embeddings a.
        second: The tensor that holds embeddings b.
        target: See `Loss`.
        reduction: See `Loss`.
        margin: How similar two embeddings that differ may be, from −1 to 1.

    Source:
        The same as torch.nn.CosineEmbeddingLoss, with its 1e-12 in the squares of the norms.

    Example:
        >>> from models import echo
        >>> loss = CosineEmbedding(first="a", second="b")
        >>> pair = {"a": [[1.0, 0.0]], "b": [[3.0, 4.0]]}
        >>> echo.loss_at(loss, pair, targets=[1.0]), echo.loss_at(loss, pair, targets=[-1.0])
        (0.4, 0.6)
    """

    _: KW_ONLY
    first: str
    second: str
    margin: float = 0.0

    compared: ClassVar[tuple[str, ...]] = ("first", "second")
    has_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Checks what was given."""
        super().__post_init__()
        check_number(self, "margin", "a number in [-1, 1]", lambda x: -1 <= x <= 1)

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
        anchor: The tensor that holds embeddings.
        positive: The tensor that holds what is to be near them.
        negative: The tensor that holds what is to be far from them.
        reduction: See `Loss`.
        margin: How much farther the negative is to be.
        p: The norm, at least 1; infinity is the largest difference.
        eps: What is added to differences.
        swap: Whether the negative's distance is the smaller one of those to anchor and positive.

    Source:
        Schroff et al., 2015 (arXiv:1503.03832); swap: Balntas et al., 2016; the same as
        torch.nn.TripletMarginLoss.

    Example:
        >>> from models import echo
        >>> loss = Triplet(anchor="a", positive="b", negative="c", margin=2.0)
        >>> three = {"a": [[0.0, 0.0]], "b": [[3.0, 4.0]], "c": [[6.0, 0.0]]}
        >>> echo.loss_at(loss, three)  # 2 + 5 - 6
        1.0
    """

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
        """Checks what was given."""
        super().__post_init__()
        check_number(self, "margin", "a finite number above 0", lambda x: 0 < x < np.inf)
        check_number(self, "p", "a number of at least 1", lambda x: x >= 1)
        check_number(self, "eps", "a finite number of at least 0", lambda x: 0 <= x < np.inf)

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
        positive = total > 0.0  # the slope of a root at 0 is infinite
        return op.Where(positive, op.Where(positive, total, 1.0) ** (1 / float(self.p)), 0.0)


@dataclass(frozen=True)
class InfoNCE(_Comparison):
    """Contrastive loss: each query is to find its key among those of the whole batch.

    Queries and keys have shape (N, D). The loss is the cross-entropy of the N × N logits
    ``query · keyᵀ / temperature`` with labels 0, 1, …, N − 1; other rows' keys are the negatives,
    so rows of a batch take part in each other's loss.

    Args:
        query: The tensor that holds the queries.
        key: The tensor that holds the keys.
        reduction: See `Loss`.
        temperature: What similarities are divided by.
        normalize: Whether embeddings are divided by their norms first, which makes similarities
            cosines.
        symmetric: Whether keys are to find their queries too, as in CLIP; the loss is the average
            of both.

    Source:
        van den Oord et al., 2018 (arXiv:1807.03748); symmetric: Radford et al., 2021
        (arXiv:2103.00020).

    Example:
        >>> from models import echo
        >>> texts = {"query": [[1.0, 0.0], [0.0, 1.0]], "key": [[1.0, 0.0], [0.0, 1.0]]}
        >>> echo.loss_at(InfoNCE(query="query", key="key", temperature=1.0), texts)  # log(1 + 1/e)
        0.3133
    """

    _: KW_ONLY
    query: str
    key: str
    temperature: float = 0.1
    normalize: bool = True
    symmetric: bool = False

    compared: ClassVar[tuple[str, ...]] = ("query", "key")

    def __post_init__(self) -> None:
        """Checks what was given."""
        super().__post_init__()
        check_number(self, "temperature", "a finite number above 0", lambda x: 0 < x < np.inf)

    @property
    def couples_rows(self) -> bool:
        """Yes: the keys of other rows are the negatives."""
        return True

    def terms(self, query: Tensor, key: Tensor) -> Terms:
        """Emits the loss and the number of rows."""
        if self.normalize:
            query, key = _unit(query), _unit(key)
        logits = op.MatMul(query, op.Transpose(key, perm=[1, 0])) / self.temperature
        rows = op.Squeeze(op.Shape(query, start=0, end=1))
        labels = op.Range(0, rows, 1)
        loss = op.SoftmaxCrossEntropyLoss(logits, labels, reduction=self.reduction)
        if self.symmetric:
            other = op.Transpose(logits, perm=[1, 0])
            backwards = op.SoftmaxCrossEntropyLoss(other, labels, reduction=self.reduction)
            loss = 0.5 * (loss + backwards)
        if self.reduction == "sum":
            return loss, loss.tape.constant(np.array(1, loss.dtype))
        return loss, rows.astype(count_type(loss))


def _unit(x: Tensor) -> Tensor:
    """Divides vectors along the last axis by their norms, of which 1e-12 is the least."""
    least = max(1e-12, float(np.finfo(x.dtype).tiny))
    return x / op.Max(op.ReduceL2(x, [-1], keepdims=1), least)
