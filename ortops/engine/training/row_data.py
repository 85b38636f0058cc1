"""Data sets of rows that are read by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.engine.training.feeds import Feeds, Inputs

Rows: TypeAlias = npt.NDArray[np.int64]

_MEGABATCH = 50  # batches


class Division(Sequence[Any]):
    """Rows, or their numbers, divided into batches; the last one has the rest.

    Args:
        rows: The rows, which are read when a batch is.
        batch_size: The number of rows per batch.

    Example:
        >>> list(Division(np.arange(5), 2)), len(Division(range(5), 2))
        ([array([0, 1]), array([2, 3]), array([4])], 3)
    """

    def __init__(self, rows: Sequence[Any] | Rows, batch_size: int) -> None:
        self._rows, self._size = rows, batch_size
        self._starts = range(0, len(rows), batch_size)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, place: Any) -> Any:
        start = self._starts[place]
        return self._rows[start : start + self._size]


class RowData(ABC):
    """A data set of rows that are read by number, such as those of `ortops.data`.

    Attributes:
        keeps: Whether a batch stays valid while later ones are read.
        lengths: The length of each row, if shuffled batches have rows of similar length.
    """

    keeps = True
    lengths: npt.NDArray[Any] | None = None

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows."""

    @abstractmethod
    def read(self, rows: Rows, inputs: Inputs, epoch: int) -> Feeds:
        """Returns a batch.

        Args:
            rows: The numbers of the rows, as `arrange` returned them.
            inputs: The inputs that the batch has to fit.
            epoch: The epoch of a training, from 1; 0 outside of training.
        """

    @abstractmethod
    def part(self, begin: int, end: int) -> RowData:
        """Returns the rows from a first one up to another."""

    @abstractmethod
    def check(self, inputs: Inputs) -> None:
        """Raises an error if the rows cannot fit some inputs, before any is read.

        Args:
            inputs: The inputs.
        """

    def filled(self, inputs: Inputs) -> Iterable[str]:
        """Returns the inputs of which a batch has rows."""
        return inputs.sampled

    def arrange(self, order: np.random.Generator | None, batch_size: int) -> Sequence[Rows]:
        """Returns the numbers of the rows of each batch of an epoch.

        The number of batches is always the same, and equal states of ``order`` give equal batches.
        A number may also be i + k · the number of rows, for the k-th repetition of row i.

        Args:
            order: Shuffles the rows; None to keep their order.
            batch_size: The number of rows per batch; the last batch has the rest.
        """
        rows = self.permutation(order)
        if self.lengths is not None and order is not None:
            rows = grouped(rows, self.lengths, batch_size)
        return Division(rows, batch_size)

    def permutation(self, order: np.random.Generator | None) -> Rows:
        """Returns the numbers of the rows in the order of an epoch.

        Args:
            order: Shuffles the rows; None to keep their order.
        """
        size = len(self)
        return np.arange(size) if order is None else order.permutation(size)


def grouped(order: Rows, lengths: Sequence[int] | npt.NDArray[Any], batch_size: int) -> Rows:
    """Sorts rows by length within megabatches, and keeps the order of the batches random.

    Args:
        order: A permutation of the rows.
        lengths: The length of each row.
        batch_size: The number of rows per batch. Only the last batch may have fewer.
    """
    size, known = _MEGABATCH * batch_size, np.array(lengths)
    parts = [order[first : first + size] for first in range(0, len(order), size)]
    rows = np.concatenate([part[np.argsort(-known[part], kind="stable")] for part in parts])
    whole = len(rows) // batch_size * batch_size
    batches = rows[:whole].reshape(-1, batch_size)
    ranks = np.argsort(order[: len(batches)], kind="stable")  # as random as the order
    return np.concatenate([batches[ranks].ravel(), rows[whole:]])
