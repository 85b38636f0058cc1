"""Data sets of rows that are read by number."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from ortops.engine.training.feeds import Feeds, Inputs


class RowData(ABC):
    """A data set of rows that are read by number, such as those of `ortops.data`.

    Attributes:
        keeps: Whether a batch stays valid while later ones are read.
    """

    keeps = True

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows."""

    @abstractmethod
    def read(self, rows: npt.NDArray[np.int64], inputs: Inputs, epoch: int) -> Feeds:
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

    def arrange(
        self, order: np.random.Generator | None, batch_size: int
    ) -> list[npt.NDArray[np.int64]]:
        """Returns the numbers of the rows of each batch of an epoch.

        The number of batches is always the same, and equal states of ``order`` give equal batches.
        A number may also be i + k · the number of rows, for the k-th repetition of row i.

        Args:
            order: Shuffles the rows; None to keep their order.
            batch_size: The number of rows per batch; the last batch has the rest.
        """
        return in_batches(self.permutation(order), batch_size)

    def permutation(self, order: np.random.Generator | None) -> npt.NDArray[np.int64]:
        """Returns the numbers of the rows in the order of an epoch.

        Args:
            order: Shuffles the rows; None to keep their order.
        """
        size = len(self)
        return np.arange(size) if order is None else order.permutation(size)


def in_batches(rows: npt.NDArray[np.int64], batch_size: int) -> list[npt.NDArray[np.int64]]:
    """Divides the numbers of rows; the last part has the rest.

    Example:
        >>> in_batches(np.arange(5), 2)
        [array([0, 1]), array([2, 3]), array([4])]
    """
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
