"""Sequence metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np

from ortops._common.arguments import text, whole_number
from ortops.metrics.metric import (
    Array,
    Mean,
    StreamingMetric,
    class_rows,
    label_weights,
    log_probabilities,
)

__all__ = ["EditDistance", "Perplexity"]


@dataclass
class Perplexity(Mean):
    """exp of the mean negative log-likelihood of the labels.

    Outputs have a class axis. The result is infinite if a label has probability 0, and NaN if an
    output that is not ignored is NaN.

    Example:
        >>> perplexity = Perplexity(axis=-1)
        >>> perplexity.update(np.zeros((2, 5, 8)), np.zeros((2, 5), np.int64))
        >>> round(perplexity.result(), 6)
        8.0
    """

    _other_names = ("ppl",)

    higher_is_better = False
    fits = frozenset(("labels",))

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        scores, labels = class_rows(self, outputs, targets)
        found = np.take_along_axis(log_probabilities(self, scores), labels[:, None], axis=1)
        self.add(-found[:, 0], label_weights(self, targets, sample_weight))

    def result(self) -> float:
        """Returns the perplexity."""
        with np.errstate(over="ignore"):
            return float(np.exp(np.float64(super().result())))


@dataclass
class EditDistance(StreamingMetric):
    """Edit distance per target label: the character or word error rate.

    The sum of the Levenshtein distances of all rows, divided by the sum of their targets' lengths.
    Targets are labels of shape (N, S). Outputs are labels of shape (N, T), or scores of shape
    (T, N, classes) that are decoded greedily as in CTC: the argmax at each time step, with
    repetitions merged and blanks removed. With scores, blanks in the targets are ignored. A NaN
    within the input lengths makes the result NaN.

    Arguments that are None are those of the loss that compares the same tensors, if it is CTC.

    Args:
        blank: The blank class of scores; 0 without CTC.
        padding: A label to ignore, in targets and in outputs that are labels.
        batch_first: Whether scores have shape (N, T, classes); False without CTC.
        normalize: Whether to divide by the targets' lengths; else by the number of rows.
        input_lengths: The input with the valid lengths along T, if the loss has it; without CTC,
            ``"input_lengths"``.
        target_lengths: The input with the valid lengths along S, if the loss has it; without CTC,
            ``"target_lengths"``.

    Example:
        >>> distance = EditDistance(padding=0)
        >>> distance.update(np.array([[1, 2, 3], [4, 0, 0]]), np.array([[1, 3, 0], [4, 5, 0]]))
        >>> distance.result()
        0.5

    Source:
        Levenshtein, 1966; Graves et al., 2006 (doi:10.1145/1143844.1143891), best path decoding.
    """

    higher_is_better = False
    fits = frozenset(("sequences",))

    _: KW_ONLY
    blank: int | None = None
    padding: int | None = None
    batch_first: bool | None = None
    normalize: bool = True
    input_lengths: str | None = None
    target_lengths: str | None = None

    shared: ClassVar[frozenset[str]] = frozenset(
        {"blank", "batch_first", "input_lengths", "target_lengths"}
    )

    def __post_init__(self) -> None:
        """Checks the arguments and resets the state."""
        super().__post_init__()
        for argument in ("input_lengths", "target_lengths"):
            if getattr(self, argument) is not None:
                text(self.named(argument), getattr(self, argument), "the name of an input")
        for argument in ("blank", "padding"):
            if getattr(self, argument) is not None:
                whole_number(self.named(argument), getattr(self, argument))

    @property
    def inputs(self) -> Mapping[str, str]:
        """The inputs with the lengths."""
        names = ("input_lengths", "target_lengths")
        return {name: name if (own := getattr(self, name)) is None else own for name in names}

    def update(
        self,
        outputs: Array,
        targets: Array,
        input_lengths: Array | None = None,
        target_lengths: Array | None = None,
    ) -> None:
        """Adds a batch.

        Args:
            outputs: See the class.
            targets: See the class.
            input_lengths: The valid length along T of each row; all of T by default.
            target_lengths: The valid length along S of each row; all of S by default.
        """
        scored, blank = outputs.ndim == 3, self.blank or 0
        if scored and not self.batch_first:
            outputs = np.moveaxis(outputs, 1, 0)
        labels = outputs.ndim == 2 and outputs.dtype.kind in "iu"
        if not (scored or labels) or targets.ndim != 2 or len(outputs) != len(targets):
            hint = " (batch_first=True is for (N, T, classes))" if not self.batch_first else ""
            shape = np.moveaxis(outputs, 0, 1).shape if scored and hint else outputs.shape
            raise self.wrong(
                "outputs must be scores of shape "
                f"{'(N, T, classes)' if self.batch_first else '(T, N, classes)'}{hint} or integers "
                f"of shape (N, T), and targets (N, S), got shapes {list(shape)} and "
                f"{list(targets.shape)}"
            )
        for row, target in enumerate(targets):
            length = None if target_lengths is None else int(target_lengths[row])
            found = outputs[row]
            if scored:
                found = found[: None if input_lengths is None else int(input_lengths[row])]
                if np.isnan(found).any():
                    self._edits = math.nan
                found = _decoded(found, blank)
            elif self.padding is not None:
                found = found[found != self.padding]
            target = target[:length]
            without = [self.padding, self.ignored, *([blank] if scored else [])]
            target = target[~np.isin(target, [each for each in without if each is not None])]
            self._edits += _distance(found, target)
            self._length += len(target)
        self._rows += len(targets)

    def result(self) -> float:
        """Returns the distance per label, or per row."""
        by = self._length if self.normalize else self._rows
        return self._edits / by if by else math.nan

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self._edits, self._length, self._rows = 0.0, 0, 0


def _decoded(scores: Array, blank: int) -> Array:
    """Returns labels from scores of shape (times, classes)."""
    if not len(scores):
        return np.zeros(0, np.int64)
    path = scores.argmax(axis=1)
    changes = np.append(True, path[1:] != path[:-1])
    return np.asarray(path[changes & (path != blank)])


def _distance(one: Sequence[int] | Array, other: Sequence[int] | Array) -> int:
    """Returns the Levenshtein distance of two sequences of labels."""
    places = np.arange(len(other) + 1)
    row = places.copy()
    for number, label in enumerate(one, start=1):
        new = np.append(number, np.minimum(row[1:] + 1, row[:-1] + (np.asarray(other) != label)))
        # An insertion costs 1 per position: new[i] is the minimum of new[j] + i − j over j ≤ i.
        row = np.minimum.accumulate(new - places) + places
    return int(row[-1])
