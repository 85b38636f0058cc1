"""Rows of arrays whose images are augmented in training, and which may be drawn by class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.data.augmentation import Augmentation, Mixing
from ortops.data.images import Images, in_threads
from ortops.engine.training.foreign_arrays import RowIndex
from ortops.errors import FeedError
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


@dataclass(frozen=True)
class ImageRows:
    """The images of rows, and what training does with them.

    Attributes:
        images: The images, one per row.
        augmentation: Changes images in training; None for no changes.
        balanced: Whether training draws rows with replacement, such that all classes are equally
            likely. An epoch has as many rows as without.
    """

    images: Column
    augmentation: Augmentation | None = None
    balanced: bool = False

    def take(self, rows: RowIndex) -> ImageRows:
        """Returns some rows."""
        return replace(self, images=select(self.images, rows))

    @property
    def mixing(self) -> list[Mixing]:
        """The changes that mix each image with another one."""
        return [] if self.augmentation is None else self.augmentation.mixing

    def augmented(self, images: Array, rows: Array, epoch: int) -> tuple[Array, Array]:
        """Returns changed images, and their shares in mixtures with those before them.

        Args:
            images: The images of a batch.
            rows: The numbers of its rows.
            epoch: The epoch of a training, from 1.
        """
        change = self.augmentation
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


def drawn_by_class(labels: Array, classes: int, order: np.random.Generator) -> Array:
    """Returns the numbers of rows, drawn with replacement such that all classes are equally likely.

    Repeated draws of row i are i + n·k.
    """
    size = len(labels)
    weights = 1.0 / np.bincount(labels, minlength=classes)[labels]
    drawn = order.choice(size, size, p=weights / weights.sum())
    return drawn + size * _repetitions(drawn)


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
