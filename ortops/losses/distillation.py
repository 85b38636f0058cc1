"""Knowledge distillation: a model learns from another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from ortops.errors import ArgumentError, ModelError
from ortops.graph.files.loading import ModelLike
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tensor, op
from ortops.losses.classification import ClassLoss
from ortops.losses.loss import (
    Loss,
    Reads,
    Sources,
    Terms,
    check_name,
    check_number,
    mean_or_sum,
)

__all__ = ["Distillation"]


@dataclass(frozen=True)
class Distillation(ClassLoss):
    """(1 − alpha) T² Σ q (log q − log p) + alpha · cross-entropy with labels, averaged.

    q = Softmax(teacher / T) and p = Softmax(student / T), over the classes. The teacher's logits
    have the shape of the student's, (N, C) or (N, C, d1, …). They are an input, computed by a
    session of the teacher, or the teacher's model is part of the step. Labels (N) or (N, d1, …) are
    read if alpha is above 0.

    Args:
        output: The student's logits, or their Softmax; the first floating-point output by default.
        target: See `Loss`; the input of the labels.
        reduction: See `Loss`; the average is over all positions that have or could have a label.
        axis: See `ClassLoss`.
        model: The teacher: a model, its bytes or its path. It reads the student's inputs of the
            same names. Its weights become constants of the trainable file.
        teacher: The name of the input with the teacher's logits, ``"teacher"`` by default. With
            ``model``, the tensor of the teacher with its logits or their Softmax; its first
            floating-point output by default.
        temperature: T. The factor T² keeps gradients as large as those of the label loss.
        alpha: The weight of the label loss, in [0, 1).

    Source:
        Hinton et al., 2015 (arXiv:1503.02531).

    Example:
        >>> from ortops.docs.examples import loss_at
        >>> loss = Distillation(temperature=1.0)
        >>> loss_at(loss, [[0.0, 0.0]], teacher=[[0.0, 0.0]])
        0.0
        >>> loss_at(loss, [[0.0, 0.0]], teacher=[[100.0, 0.0]])
        0.6931
    """

    not_negative: ClassVar[bool] = True

    _: KW_ONLY
    model: ModelLike | None = None
    teacher: str | None = None
    temperature: float = 2.0
    alpha: float = 0.0

    reads: ClassVar[Reads] = "logits"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        if self.teacher is not None:
            check_name(self, "teacher", "an input")
        check_number(self, "temperature", above=0)
        check_number(self, "alpha", minimum=0, below=1)
        if self.target is not None and self.alpha == 0:
            raise ArgumentError(
                f"loss {self.name}: target={self.target!r} is not read with alpha=0; set alpha > 0 "
                "or leave target out"
            )

    def tensors(self, sources: Sources) -> tuple[Loss, Sequence[Tensor]]:
        """Gets the student's logits, the teacher's, and the labels if alpha is above 0."""
        student, axis = sources.prediction(self, self.output, self.reads, self.axis)
        loss = replace(self, axis=axis)
        dtype, shape = loss.target_type(student)
        labels = []
        if self.alpha:  # first, because metrics compare with the first input
            name = self.target or self.default_target
            labels = [sources.input(self, name, dtype, shape, student)]
            loss.note_labels(labels[0], student)
        if self.model is None:
            name = self.teacher or "teacher"
            teacher = sources.input(self, name, student.dtype, student.shape, student)
        else:
            teacher = self._of_model(sources, student)
        return loss, (student, teacher, *labels)

    def _of_model(self, sources: Sources, student: Tensor) -> Tensor:
        """Returns the logits of the teacher's model."""
        assert self.model is not None
        teacher = sources.teacher(self, self.model, self.teacher)
        if not may_be_equal(teacher.value.shape, student.value.shape):
            raise ModelError(
                f"loss {self.name}: the teacher's logits '{teacher.name}' have shape "
                f"{list(teacher.shape or ())}, the student's {list(student.shape or ())}; both "
                "models must have the same classes"
            )
        return teacher.astype(student.dtype)

    def terms(self, student: Tensor, teacher: Tensor, labels: Tensor | None = None) -> Terms:
        """Emits the loss, and the number of positions that have or could have a label."""
        return mean_or_sum(self.each(student, teacher, labels)[0], self.reduction)

    def each(
        self, student: Tensor, teacher: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Emits the loss of each position."""
        axis = self.class_axis(student)
        log_p = op.LogSoftmax(student / self.temperature, axis=axis)
        log_q = op.LogSoftmax(teacher / self.temperature, axis=axis)
        divergence = op.ReduceSum(op.Exp(log_q) * (log_q - log_p), [axis], keepdims=0)
        losses = (1 - self.alpha) * self.temperature**2 * divergence
        if self.alpha:
            log_p = op.LogSoftmax(student, axis=axis)
            picked = op.GatherElements(log_p, op.Unsqueeze(labels, [axis]), axis=axis)
            losses = losses - self.alpha * op.Squeeze(picked, [axis])
        return losses, None
