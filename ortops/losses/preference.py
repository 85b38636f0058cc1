"""Preference losses: a language model learns which of two answers is better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ortops.graph.tensor import Tensor, op, shape_of
from ortops.losses.classification import NextToken
from ortops.losses.loss import Loss, Sources, Terms, check_number, mean_or_sum, softplus

__all__ = ["DPO"]

REWARD_MARGIN = "reward_margin"
"""The tensor of a training algorithm that has beta · (chosen − rejected) of each pair."""


@dataclass(frozen=True)
class DPO(NextToken):
    """Direct preference optimization: −log σ(beta · (chosen − rejected)), averaged over pairs.

    ``chosen`` and ``rejected`` are log p − log p₀ of the two answers to a prompt, where p is the
    probability of an answer by the model with its adapter (`ortops.lora`), and p₀ that by the
    reference, which is the same model without the adapter.

    Rows come in pairs: the chosen answer, then the rejected one. Logits have shape (2 · pairs,
    sequence, vocabulary). Labels have shape (2 · pairs, sequence), are not shifted, and are
    ``ignore_index`` for prompts and padding; see `NextToken`.

    Args:
        output: See `NextToken`.
        target: See `Loss`.
        reduction: See `Loss`.
        axis: The axis of the vocabulary, which must be the last.
        ignore_index: The label of tokens that are not part of an answer.
        weights: A weight for each token of the vocabulary; 1 by default.
        beta: How strongly the model is held at the reference, > 0.
        label_smoothing: The probability, in [0, 0.5), that a preference is wrong.

    Source:
        Rafailov et al., 2023 (arXiv:2305.18290), equation 7; with smoothing, Mitchell, "A note on
        DPO with noisy preferences", 2023.

    Example:
        >>> from ortops.llm import FineTuning
        >>> row = {"prompt": [65, 66], "chosen": [67, 256], "rejected": [68, 256]}
        >>> tuning = FineTuning("model", learning_rate=0.01, loss=DPO(beta=0.5))  # doctest: +SKIP
        >>> history = tuning.fit([row], epochs=5, progress=False)  # doctest: +SKIP
        >>> round(history[0]["loss"], 4), history[-1]["loss"] < 0.4  # doctest: +SKIP
        (0.6931, True)
    """

    _: KW_ONLY
    beta: float = 0.1

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        check_number(self, "beta", above=0)
        check_number(self, "label_smoothing", minimum=0, below=0.5)

    @property
    def couples_rows(self) -> bool:
        """True, as the two rows of a pair are compared."""
        return True

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the logits, the labels and the reference's logits."""
        loss, (logits, labels) = super().tensors(sources)
        return loss, (logits, labels, sources.without_adapter(self, self.output))

    def terms(self, logits: Tensor, labels: Tensor, reference: Any = None) -> Terms:
        """Emits the loss, and the number of pairs."""
        ratios = self.log_likelihood(logits, labels) - self.log_likelihood(reference, labels)
        pairs = op.Reshape(ratios, np.array([-1, 2]))
        margin = self.beta * op.Squeeze(pairs[:, :1] - pairs[:, 1:], [1])
        margin.value.name = margin.tape.names.unique(REWARD_MARGIN)
        losses = softplus(-margin)
        if self.label_smoothing:
            losses = losses + self.label_smoothing * margin  # softplus(m) = softplus(-m) + m
        return mean_or_sum(losses, self.reduction)

    def log_likelihood(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Returns the sum of log p of each row's answer."""
        ignored = np.array(self.ignore_index, np.int64)
        following = op.Pad(labels[:, 1:], [0, 0, 0, 1], ignored)
        scores, flat = self.classes_second(logits, following)
        weights = [] if self.weights is None else [self.class_factors("weights", scores)]
        each = op.SoftmaxCrossEntropyLoss(
            scores, flat, *weights, reduction="none", ignore_index=self.ignore_index
        )
        return -op.ReduceSum(op.Reshape(each, shape_of(following)), [1], keepdims=0)
