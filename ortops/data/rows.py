"""Rows of arrays whose images are augmented in training, and which may be drawn by class."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.data.augmentation import Augmentation
from ortops.data.images import Images, in_threads
from ortops.engine.training.feeds import Feeds, Inputs
from ortops.engine.training.foreign_arrays import RowIndex
from ortops.engine.training.row_data import RowData
from ortops.errors import ArgumentError, FeedError
from ortops.graph.row_axes import along

Array: TypeAlias = npt.NDArray[Any]
Column: TypeAlias = Array | Images
"""The rows of a data set for one input."""


def select(column: Column, rows: RowIndex, axis: int = 0) -> Column:
    """Returns some rows of a column, which are along an axis; images in files are not read yet."""
    return column.select(rows) if isinstance(column, Images) else column[along(axis, rows)]


def balanced_weights(labels: Array, classes: int) -> npt.NDArray[np.float64]:
    """Returns a weight for each class that makes the sum of the weights of its rows equal.

    Args:
        labels: The class numbers.
        classes: The number of classes.

    Raises:
        FeedError: If a class has no rows.

    Source:
        ``class_weight="balanced"`` of scikit-learn: rows / (classes · rows of the class).

    Example:
        >>> balanced_weights(np.array([0, 0, 0, 1]), 2).round(3)
        array([0.667, 2.   ])
    """
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        raise FeedError(
            f"class_weights: class {int(counts.argmin())} has no rows; give at least one for each "
            "class"
        )
    weights: npt.NDArray[np.float64] = len(labels) / (classes * counts)
    return weights


class ImageRows(RowData):
    """Images and the numbers of their classes, as rows.

    Args:
        images: The images, one per row.
        labels: The class numbers; None if there are none.
        classes: The number of classes; 0 if there are no labels.
        names: The inputs that images and labels fill; None for the first ones of the model and the
            loss.
        augmentation: Changes images in training; None for no changes.
        balanced: Whether training draws rows with replacement, such that all classes are equally
            likely. An epoch has as many rows as without.
    """

    def __init__(
        self,
        images: Column,
        labels: Array | None,
        *,
        classes: int,
        names: tuple[str, str] | None = None,
        augmentation: Augmentation | None = None,
        balanced: bool = False,
    ) -> None:
        self._images, self._labels, self._classes = images, labels, classes
        self._names, self._augmentation, self._balanced = names, augmentation, balanced

    def __len__(self) -> int:
        return int(self._images.shape[0])

    def images(self, rows: npt.NDArray[np.integer[Any]]) -> Array:
        """Returns the images of some rows, without augmentation.

        Raises:
            FeedError: If there are no such rows.
        """
        try:
            numbers = np.asarray(rows)
        except (ValueError, OverflowError):  # lists of several lengths
            numbers = np.empty(())
        fits = not numbers.size or numbers.dtype.kind in "iu"
        if (
            numbers.ndim != 1
            or not fits
            or not np.isin(numbers, range(-len(self), len(self))).all()
        ):
            raise FeedError(
                f"images: rows must be a list of integers from 0 to {len(self) - 1}, got "
                f"{rows!r:.80}"
            )
        found: Array = self._images[numbers.astype(np.int64)]
        return found

    def part(self, begin: int, end: int) -> ImageRows:
        """Returns the rows from a first one up to another."""
        return self.take(slice(begin, end))

    def take(self, rows: slice | npt.NDArray[np.integer[Any]]) -> ImageRows:
        """Returns some rows."""
        return ImageRows(
            select(self._images, rows),
            None if self._labels is None else self._labels[rows],
            classes=self._classes,
            names=self._names,
            augmentation=self._augmentation,
            balanced=self._balanced,
        )

    def permutation(self, order: np.random.Generator | None) -> npt.NDArray[np.int64]:
        """Returns the numbers of the rows of an epoch; repeated draws of row i are i + n·k."""
        if not self._balanced or order is None or self._labels is None:
            return super().permutation(order)
        size = len(self)
        weights = 1.0 / np.bincount(self._labels, minlength=self._classes)[self._labels]
        drawn = order.choice(size, size, p=weights / weights.sum())
        return drawn + size * _repetitions(drawn)

    def check(self, inputs: Inputs) -> None:
        """Raises an error if labels have to be mixed, but the loss takes class numbers.

        Args:
            inputs: The inputs.
        """
        mixing = self._augmentation.mixing if self._augmentation is not None else []
        target = self._target(inputs)
        if mixing and target in inputs and not self._soft(inputs):
            name = type(mixing[0]).__name__.lower()
            raise ArgumentError(
                f"augment: '{name}' mixes labels, but input '{target}' takes one class number per "
                "row; train with a loss of probabilities, such as "
                "losses.SoftmaxCrossEntropy(probabilities=True) or "
                "losses.BinaryCrossEntropyWithLogits(), or leave it out"
            )

    def _target(self, inputs: Inputs) -> str:
        return self._names[1] if self._names else inputs.place(1)

    def _soft(self, inputs: Inputs) -> bool:
        """Whether labels are probabilities of classes."""
        target = inputs.get(self._target(inputs))
        if target is None or target.dtype is None or target.dims is None:
            return False
        return target.dtype.kind == "f" and len(target.dims) == 2

    def read(self, rows: npt.NDArray[np.int64], inputs: Inputs, epoch: int) -> Feeds:
        """Returns a batch; images are augmented in training only.

        Args:
            rows: The numbers of the rows, as `arrange` returned them.
            inputs: The inputs that the batch has to fit.
            epoch: The epoch of a training, from 1; 0 outside of training.
        """
        places = rows % len(self)
        images = self._images[places]
        labels: Array | None = None
        soft = self._labels is not None and self._soft(inputs)
        if self._labels is not None:
            labels = self._labels[places]
            labels = np.eye(self._classes, dtype=np.float64)[labels] if soft else labels
        if epoch and self._augmentation is not None:
            images, shares = self._augmented(images, rows, epoch)
            if soft and labels is not None and self._augmentation.mixing:
                labels = shares * labels + (1 - shares) * np.roll(labels, 1, 0)
        if soft and labels is not None:
            labels = labels.astype(inputs[self._target(inputs)].dtype)
        first, second = self._names or (inputs.place(0), inputs.place(1))
        return {first: images} | ({second: labels} if labels is not None and second else {})

    def _augmented(self, images: Array, rows: Array, epoch: int) -> tuple[Array, Array]:
        """Returns changed images, and their shares in mixtures with those before them."""
        change = self._augmentation
        assert change is not None
        result = np.empty_like(images)
        shares = np.ones((len(images), 1))
        mixes = bool(change.mixing) and len(images) > 1

        def fill(place: int) -> None:
            other = images[place - 1] if mixes else None
            result[place], shares[place] = change(
                images[place], other, epoch, int(rows[place]), int(rows[place - 1])
            )

        in_threads(fill, range(len(images)))
        return result, shares


def _repetitions(drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how often each number occurs before its place.

    Example:
        >>> _repetitions(np.array([5, 2, 5, 5]))
        array([0, 0, 1, 2])
    """
    order = np.argsort(drawn, kind="stable")
    ordered = drawn[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    first = np.repeat(starts, np.diff(np.r_[starts, len(drawn)]))
    result = np.empty_like(drawn)
    result[order] = np.arange(len(drawn)) - first
    return result
