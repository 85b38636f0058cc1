"""The confusion matrix of classes, and its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ortops.errors import ArgumentError
from ortops.graph.files.pictures import check_picture, new_figure, write_picture
from ortops.metrics.metric import (
    Array,
    StreamingMetric,
    check_labels,
    class_rows,
    has_classes,
    label_weights,
    whole,
    yes_border,
)

__all__ = ["ConfusionMatrix"]


@dataclass
class ConfusionMatrix(StreamingMetric):
    """How often each class was predicted for the samples of each class.

    The result is the fraction of correct predictions; `matrix` of the object that was given to
    `evaluate` or `fit` has the numbers. For outputs with a class axis, the prediction is the argmax
    (the first one of equal values); other outputs are labels, or answers to one yes/no question.

    Args:
        names: The names of the classes in `plot`; by default their numbers.

    Attributes:
        matrix: The number, or the sum of the weights, of samples of shape (label, prediction).

    Example:
        >>> confusion = ConfusionMatrix()
        >>> confusion.update(np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), np.array([0, 1, 1]))
        >>> confusion.matrix
        array([[1., 0.],
               [1., 1.]])
        >>> round(confusion.result(), 4)
        0.6667
    """

    higher_is_better = True
    fits = frozenset(("labels", "answers"))

    names: Sequence[str] | None = None
    _shown_in: ConfusionMatrix | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the arguments."""
        super().__post_init__()
        names = self.names
        if names is not None and (
            isinstance(names, str) or not all(isinstance(each, str) for each in names)
        ):
            raise ArgumentError(f"{self.named('names')} must be a list of texts, got {names!r:.80}")

    def reset(self) -> None:
        """See `StreamingMetric`."""
        self.matrix: Array = np.zeros((0, 0))

    def begun(self, *arguments: Any, **shared: Any) -> ConfusionMatrix:
        """See `StreamingMetric`; results of the copy are shown in this object, too."""
        result = super().begun(*arguments, **shared)
        result._shown_in = self
        return result

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        """See `StreamingMetric`."""
        if has_classes(self, outputs, targets):
            scores, labels = class_rows(self, outputs, targets)
            if np.isnan(scores).any():
                raise self.wrong("outputs contain NaN, which has no class")
            answers, classes = scores.argmax(axis=1), scores.shape[1]
        else:
            kept = self.counts(targets)
            if outputs.dtype.kind not in "iub":
                outputs, targets_ = outputs > yes_border(self.kind), targets > 0.5
            else:
                targets_ = targets
            labels = whole(self, targets_[kept].reshape(-1))
            answers, classes = outputs[kept].reshape(-1).astype(np.int64), 2
            check_labels(self, labels)
            check_labels(self, answers)
        size = max(
            classes, len(self.matrix), *(int(e.max(initial=0)) + 1 for e in (labels, answers))
        )
        more = size - len(self.matrix)
        weights = label_weights(self, targets, sample_weight)
        found = np.bincount(labels * size + answers, weights, size * size).reshape(size, size)
        self.matrix = np.pad(self.matrix, (0, more)) + found

    def result(self) -> float:
        """Returns the fraction of correct predictions."""
        if self._shown_in is not None:
            self._shown_in.matrix = self.matrix.copy()
        total = float(self.matrix.sum())
        return float(np.trace(self.matrix)) / total if total else math.nan

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes a picture of the matrix, colored by the shares of the predictions for each label.

        Args:
            path: The file, which ends in .png, .svg or .pdf.

        Raises:
            ArgumentError: If the file has another ending, or there are not as many names as
                classes.
            OrtopsError: If there are no samples, or matplotlib is not installed.
        """
        check_picture(self.named("plot"), path)
        size = len(self.matrix)
        if not size:
            raise self.wrong("there is nothing to plot; evaluate a data set first")
        names = list(map(str, range(size))) if self.names is None else list(self.names)
        if len(names) != size:
            raise ArgumentError(
                f"{self.named('names')} must have a name for each of the {size} classes, got "
                f"{len(names)}"
            )
        write_picture(self._drawn(names), path)

    def _drawn(self, names: Sequence[str]) -> Any:
        """Returns the figure."""
        size, totals = len(names), self.matrix.sum(axis=1, keepdims=True)
        shares = self.matrix / np.where(totals > 0, totals, 1)
        side = min(max(2.6 + 0.45 * size, 4.0), 16.0)
        figure = new_figure(self.named("plot"), (side + 0.8, side))
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set(xlabel="prediction", ylabel="label")
        turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
        long = max(map(len, names)) > 3
        axes.set_xticks(range(size), names, **(turn if long else {}))
        axes.set_yticks(range(size), names)
        if size <= 25:
            for row, column in np.ndindex(size, size):
                dark = shares[row, column] > 0.5
                text = f"{self.matrix[row, column]:g}"
                style: dict[str, Any] = {"color": "white" if dark else "black", "fontsize": 8}
                axes.text(column, row, text, ha="center", va="center", **style)
        figure.colorbar(image, ax=axes, label="share of the label's samples", shrink=0.8)
        return figure
