"""Exchanges through any communicator: their checks, and the errors of those that fail."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from ortops._common.numbers import Array
from ortops.errors import ArgumentError, OrtopsError

logger = logging.getLogger("ortops")

PATIENCE = 60.0
"""The time, in seconds, after which a rank logs that it waits for the others."""

CALLS = (
    "all ranks must make the same calls of `step`, `run_steps`, `gradients` and `fit` in the same "
    "order"
)

CUT_OFF = (
    "join: an earlier exchange was interrupted, so the ranks are out of sync; restart all of them "
    "from a saved file"
)


def warn_of_wait(rank: int, waited: float, remedy: str) -> None:
    """Logs that a rank has waited for the others for some seconds."""
    logger.warning(
        "join: rank %d has waited for the other ranks for %.0f s; if one of them has stopped, end "
        "the job. %s raises an error instead",
        *(rank, waited, remedy),
    )


class Exchanges:
    """A communicator of which every failure is an OrtopsError, and none is followed by others.

    Args:
        communicator: An `ortops.distributed.Communicator`.

    Attributes:
        rank: The index of this process, from 0.
        size: The number of processes.

    Raises:
        ArgumentError: If it lacks what a communicator has.
    """

    def __init__(self, communicator: Any) -> None:
        try:
            self.rank, self.size = int(communicator.rank), int(communicator.size)
            fits = 0 <= self.rank < self.size and callable(communicator.sum)
            fits = fits and callable(communicator.broadcast)
        except (AttributeError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ArgumentError(
                "join: communicator must have rank < size, sum(array) and broadcast(array), or be "
                f"None for MPI or 'torch', got {communicator!r:.80}"
            )
        self._communicator = communicator
        self._is_cut_off = False

    def sum(self, array: Array) -> None:
        """Replaces an array by its sum over all ranks."""
        self._exchange("sum", array)

    def broadcast(self, array: Array) -> None:
        """Replaces an array by that of rank 0."""
        self._exchange("broadcast", array)

    def check(self) -> None:
        """Raises an error if the communicator computes anything else than it must.

        Otherwise, each rank would train by itself, with its part of the data.
        """
        ranks = np.arange(self.size, dtype=np.float64)
        for dtype, unit in ((np.float64, 1 + 2.0**-40), (np.float32, 1.0)):
            array = np.array([unit, self.rank], dtype)
            self.sum(array)
            expected = np.array([unit * self.size, ranks.sum()])
            if not np.allclose(
                array, expected, rtol=1e-15 if dtype is np.float64 else 1e-5, atol=0
            ):
                self._refuse(
                    "sum",
                    f"its sum over {self.size} ranks",
                    f"{dtype.__name__} [1, rank] became {array.tolist()} instead of "
                    f"{expected.tolist()}",
                )
        own = np.array([7 if self.rank else 11, 13], np.uint8)
        self.broadcast(own)
        if own.tolist() != [11, 13]:
            self._refuse("broadcast", "that of rank 0", f"rank {self.rank} got {own.tolist()}")

    def _refuse(self, method: str, by: str, found: str) -> None:
        raise ArgumentError(
            f"join: {method} of {self._communicator!r:.80} must replace the elements of the array "
            f"that it gets by {by}, in the same place and exactly, and all ranks must agree on "
            f"their number; {found}"
        )

    def _exchange(self, method: str, array: Array) -> None:
        """Calls a method of the communicator."""
        if self._is_cut_off:
            raise OrtopsError(CUT_OFF)
        self._is_cut_off = True  # until it is done, because a signal handler may raise
        kind = array.dtype, array.shape
        try:
            getattr(self._communicator, method)(array)
        except OrtopsError:
            raise
        except Exception as error:  # of any library
            raise OrtopsError(
                f"join: {method} of {type(self._communicator).__name__} failed in rank "
                f"{self.rank} ({type(error).__name__}: {error}); a rank may have ended, or have "
                f"come too late, and {CALLS}"
            ) from error
        if (array.dtype, array.shape) != kind:
            self._refuse(
                method,
                "others",
                f"it made {array.dtype} {list(array.shape)} of {kind[0]} {[*kind[1]]}",
            )
        self._is_cut_off = False
