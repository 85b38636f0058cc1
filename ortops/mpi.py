"""Communication through MPI that can time out, and that signals can interrupt."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import OrtopsError

__all__ = ["MPI"]

Array: TypeAlias = npt.NDArray[Any]

_LOOKS = 64
"""How often a process tests whether an exchange is done between two checks of all else."""

_CALLS = (
    "all ranks must make the same calls of `step`, `run_steps`, `gradients` and `fit`, as often "
    "and in the same order"
)

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class MPI:
    """All processes of MPI, through mpi4py, as an `ortops.distributed.Communicator`.

    Args:
        timeout: How many seconds a process waits for the others in one exchange; None for no limit.

    Attributes:
        rank: The number of this process, from 0.
        size: How many processes there are.

    Raises:
        OrtopsError: If mpi4py cannot be imported, or the other processes do not join in time.
    """

    _channel: ClassVar[_Channel | None] = None

    def __init__(self, timeout: float | None = None) -> None:
        try:
            module = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            raise OrtopsError(
                f"join: mpi4py cannot be imported ({error}); pip install ortops[distributed], or "
                "give a communicator"
            ) from error
        self.rank, self.size = int(module.COMM_WORLD.rank), int(module.COMM_WORLD.size)
        self._timeout = timeout
        if self.size > 1 and MPI._channel is None:
            MPI._channel = _Channel(module, timeout)

    def sum(self, array: Array) -> None:
        """Replaces an array by its sum over all processes."""
        if self._channel is not None:
            self._channel.sum(array, self._timeout)

    def broadcast(self, array: Array) -> None:
        """Replaces an array by that of process 0."""
        if self._channel is not None:
            self._channel.broadcast(array, self._timeout)


class _Channel:
    """Exchanges with the other processes.

    A process that exits tells the others how many exchanges it took part in. Those that wait for it
    in a later one then raise an error.

    Args:
        module: ``mpi4py.MPI``.
        timeout: See `MPI`.
    """

    def __init__(self, module: Any, timeout: float | None) -> None:
        self._module = module
        self._done = 0
        self._is_cut_off = False
        self._ended: dict[int, int] = {}  # processes, and how many exchanges they took part in
        self._held: list[object] = []  # what MPI may still read or write
        self._rank = int(module.COMM_WORLD.rank)
        self._world: Any = None
        world, request = module.COMM_WORLD.Idup()  # apart from what the program itself sends
        self._exchange(lambda: request, timeout, world)
        self._world = world
        self._done = 0
        atexit.register(self._end)

    def sum(self, array: Array, timeout: float | None) -> None:
        """Replaces an array by its sum over all processes."""
        in_place = self._module.IN_PLACE
        self._exchange(lambda: self._world.Iallreduce(in_place, array), timeout, array)

    def broadcast(self, array: Array, timeout: float | None) -> None:
        """Replaces an array by that of process 0."""
        self._exchange(lambda: self._world.Ibcast(array), timeout, array)

    def _exchange(self, begin: Callable[[], Any], timeout: float | None, data: object) -> None:
        """Makes an exchange, which all processes begin in the same order.

        Args:
            begin: Begins it, and returns its request.
            timeout: See `MPI`.
            data: What MPI reads and writes.

        Raises:
            OrtopsError: If another process does not take part, or MPI fails.
        """
        if self._is_cut_off:
            raise OrtopsError(
                "join: an earlier exchange of the ranks was cut off, so that they are no longer at "
                "the same point; start all of them again, from a saved file"
            )
        self._is_cut_off = True  # until it is done, whatever a signal's handler raises meanwhile
        held = len(self._held)
        self._held.append(data)
        try:
            request = begin()
            self._held.append(request)
            self._wait(request, timeout)
        except self._module.Exception as error:
            raise OrtopsError(f"join: MPI failed ({error}); {_CALLS}") from error
        del self._held[held:]
        self._done += 1
        self._is_cut_off = False

    def _wait(self, request: Any, timeout: float | None) -> None:
        begin = time.monotonic()
        for number in itertools.count(1):
            if request.Test():
                return
            _give_way()
            if number % _LOOKS:
                continue
            self._look()
            for rank, done in self._ended.items():
                if done <= self._done:
                    raise OrtopsError(
                        f"join: rank {rank} has ended, and rank {self._rank} waits for it; {_CALLS}"
                    )
            if timeout is not None and time.monotonic() - begin > timeout:
                raise OrtopsError(
                    f"join: rank {self._rank} has waited {timeout:g} s for the other ranks; "
                    f"{_CALLS}, and join(…, timeout=) says how long one waits for the others"
                )

    def _look(self) -> None:
        """Receives what processes that have ended said."""
        if self._world is None:
            return
        status = self._module.Status()
        while self._world.Iprobe(status=status):
            done = np.zeros(1, np.int64)
            self._world.Recv(done, status.Get_source())
            self._ended[status.Get_source()] = int(done[0])

    def _end(self) -> None:
        """Tells the others that this process ends."""
        if self._module.Is_finalized():
            return
        done = np.array([self._done], np.int64)
        others = (rank for rank in range(self._world.size) if rank != self._rank)
        self._held += [done, *[self._world.Isend(done, rank) for rank in others]]
