"""Losses of unaligned sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops._common.arguments import whole_number
from ortops.errors import ModelError
from ortops.graph.autodiff.rules.recurrent import scan
from ortops.graph.tensor import Tensor, op
from ortops.losses.loss import Loss, Reads, Sources, Terms, check_name, count_type, mean_or_sum

__all__ = ["CTC"]

_IMPOSSIBLE = -1e30
"""Represents log 0, because −∞ would make gradients NaN."""


@dataclass(frozen=True)
class CTC(Loss):
    """Connectionist temporal classification: −log of the summed probability of all alignments.

    An alignment assigns a class to each time step. Merging repeated classes and then removing
    blanks gives its labels. The log-probabilities are the LogSoftmax of logits (T, N, C): the
    output, or what a Softmax or LogSoftmax at the end of the model reads. The loss adds three int64
    inputs: labels (N, S) with any padding, and the valid lengths (N) along T and S. A run fails if
    a length exceeds T or S.

    A target without any alignment (longer than the input, or with too many repeated labels) has
    loss infinity and gradient 0. A call within your own loss function reads log-probabilities, and
    its gradients are with respect to them. PyTorch's gradients include that of a LogSoftmax; with
    respect to the logits, both agree.

    Args:
        output: The logits, probabilities or log-probabilities; the first floating-point output by
            default.
        target: See `Loss`.
        reduction: ``"mean"`` divides each loss by the length of its target (at least 1) and
            averages over the batch; ``"sum"`` adds the losses up.
        blank: The blank class.
        zero_infinity: Whether infinite losses are replaced by 0.
        batch_first: Whether logits have shape (N, T, C).
        input_lengths: The name of the input with the valid lengths along T.
        target_lengths: The name of the input with the valid lengths along S.

    Source:
        Graves et al., 2006 (doi:10.1145/1143844.1143891), its forward variables in log space; the
        same as torch.nn.CTCLoss.

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> half = [[[-0.6931, -0.6931]]] * 2  # two times, blank or 1: three of four paths fit
        >>> loss_at(CTC(), half, labels=[[1]], input_lengths=[2], target_lengths=[1])  # -log ¾
        0.2877
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    blank: int = 0
    zero_infinity: bool = False
    batch_first: bool = False
    input_lengths: str = "input_lengths"
    target_lengths: str = "target_lengths"

    reads: ClassVar[Reads] = "logits"
    shared: ClassVar[tuple[str, ...]] = ("blank", "batch_first", "input_lengths", "target_lengths")

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        whole_number(f"loss {self.name}: blank", self.blank, 0)
        for argument in ("input_lengths", "target_lengths"):
            check_name(self, argument, "an input")

    @property
    def default_target(self) -> str:
        """The default name of the target input."""
        return "labels"

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the LogSoftmax of the logits, the labels and both lengths."""
        x, _ = sources.prediction(self, self.output, self.reads, 2)
        shape = x.shape
        if shape is not None:
            classes = shape[-1] if shape else None
            if len(shape) != 3 or (isinstance(classes, int) and self.blank >= classes):
                wanted = "(N, T, C)" if self.batch_first else "(T, N, C)"
                raise ModelError(
                    f"loss {self.name}: '{x.name}' must have shape {wanted} with C > blank = "
                    f"{self.blank}, got {list(shape)}"
                )
        rows = None if shape is None else shape[0 if self.batch_first else 1]
        name = self.target or self.default_target
        return self, (
            op.LogSoftmax(x, axis=2),
            sources.input(self, name, np.int64, (rows, None), x),
            sources.input(self, self.input_lengths, np.int64, (rows,), x),
            sources.input(self, self.target_lengths, np.int64, (rows,), x),
        )

    def terms(
        self,
        log_probabilities: Tensor,
        labels: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
    ) -> Terms:
        """Emits the loss and the number of rows."""
        losses, _ = self.each(log_probabilities, labels, input_lengths, target_lengths)
        value, count = mean_or_sum(losses, self.reduction)
        return value.astype(log_probabilities.dtype), count

    def each(
        self,
        log_probabilities: Tensor,
        labels: Tensor,
        input_lengths: Tensor,
        target_lengths: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each row."""
        x = log_probabilities
        if self.batch_first:
            x = op.Transpose(x, perm=[1, 0, 2])
        x = x.astype(count_type(x))
        losses = self._negative_log_likelihood(x, labels, input_lengths, target_lengths)
        if self.reduction == "mean":
            losses = losses / op.Max(target_lengths, 1).astype(losses.dtype)
        return losses, None

    def _negative_log_likelihood(
        self, x: Tensor, labels: Tensor, input_lengths: Tensor, target_lengths: Tensor
    ) -> Tensor:
        """Emits the loss of each row; x has shape (T, N, C), and a type that can hold 1e30."""
        times, rows = op.Shape(x, start=0, end=1), op.Shape(x, start=1, end=2)
        most = op.Shape(labels, start=1, end=2)
        states = 2 * most + 1  # blank, label, blank, …, label, blank
        log_zero, blank = np.array(_IMPOSSIBLE, x.dtype), np.array(self.blank, np.int64)

        real = op.Unsqueeze(op.Range(0, op.Squeeze(most), 1), [0])
        real = op.Less(real, op.Unsqueeze(target_lengths, [1]))
        known = op.Unsqueeze(op.Where(real, labels, blank), [2])
        pairs = op.Concat(op.Expand(blank, op.Shape(known)), known, axis=2)
        pairs = op.Reshape(pairs, op.Concat(rows, 2 * most, axis=0), allowzero=1)
        blanks = op.Expand(blank, op.Concat(rows, [2], axis=0))
        symbols = op.Concat(pairs, blanks[:, :1], axis=1)
        two_before = op.Concat(blanks, symbols, axis=1)[:, :-2]
        differs = op.Not(op.Or(op.Equal(symbols, blank), op.Equal(symbols, two_before)))
        skip = op.Where(differs, np.zeros((), x.dtype), log_zero)

        everywhere = op.Expand(symbols, op.Concat(times, rows, states, axis=0))
        emissions = op.Max(op.GatherElements(x, everywhere, axis=2), log_zero)
        # Gather makes the run fail for lengths beyond T.
        lengths = op.Gather(op.Range(0, op.Squeeze(times) + 1, 1), input_lengths)
        time = op.Reshape(op.Range(0, op.Squeeze(times), 1), [-1, 1, 1])
        active = op.Less(time, op.Reshape(lengths, [1, -1, 1]))
        start = op.Where(op.Equal(op.Range(0, op.Squeeze(states), 1), 0), 0.0, log_zero)
        alpha = op.Expand(start, op.Concat(rows, states, axis=0)).with_shape([None, None])

        def step(alpha: Tensor, emission: Tensor, active: Tensor) -> list[Tensor]:
            wide = op.Pad(alpha, [0, 2, 0, 0], log_zero)
            ways = (alpha, wide[:, 1:-1], wide[:, :-2] + skip)
            stack = op.Concat(*(op.Unsqueeze(way, [0]) for way in ways), axis=0)
            new = op.ReduceLogSumExp(stack, [0], keepdims=0) + emission
            return [op.Where(active, new, alpha)]

        (alpha,) = scan(step, [alpha], [emissions, active], backwards=False)
        last = 2 * op.Unsqueeze(target_lengths, [1])
        ends = op.GatherElements(alpha, op.Concat(last, op.Max(last - 1, 0), axis=1), axis=1)
        empty = op.And(
            op.Equal(last, 0), np.array([False, True])
        )  # without labels, only the blank can be the last state
        likelihood = op.ReduceLogSumExp(op.Where(empty, log_zero, ends), [1], keepdims=0)
        instead = np.array(0 if self.zero_infinity else np.inf, x.dtype)
        return op.Where(op.Less(likelihood, 0.1 * log_zero), instead, -likelihood)
