"""Communication through MPI, with timeouts and interruptible by signals."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import numpy as np

from ortops._common.numbers import Array
from ortops._common.optional import optional_module
from ortops.distributed.exchanges import CALLS, CUT_OFF, PATIENCE, warn_of_wait
from ortops.errors import OrtopsError

logger = logging.getLogger("ortops")

_LOOKS = 64
"""The number of tests for completion of an exchange between checks of timeout and exited ranks."""

_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class MPI:
    """All processes of MPI, through mpi4py, as an `ortops.distributed.Communicator`.

    Args:
        timeout: The maximum time, in seconds, to wait for the other processes in one exchange; None
            for no limit.

    Attributes:
        rank: The index of this process, from 0.
        size: The number of processes.

    Raises:
        OrtopsError: If mpi4py cannot be imported, or the other processes do not join in time.
    """

    _channel: ClassVar[_Channel | None] = None

    def __init__(self, timeout: float | None = None) -> None:
        instead = "pass another communicator"
        module = optional_module("join", "mpi4py.MPI", "distributed", instead=instead)
        self.rank, self.size = int(module.COMM_WORLD.rank), int(module.COMM_WORLD.size)
        self._timeout = timeout
        if self.size > 1 and MPI._channel is None:
            if not self.rank and "mpi4py.run" not in sys.modules:
                logger.warning(
                    "join: the program runs without `-m mpi4py`, so if a rank fails before `join`, "
                    "or in communication of its own, the others wait for it forever; start it "
                    "with: mpiexec -n %d python -m mpi4py %s, or pass join(…, timeout=)",
                    *(self.size, sys.argv[0] or "train.py"),
                )
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

    A process that exits sends the number of its exchanges to the others. Processes that wait for it
    in a later exchange then raise an error.

    Args:
        module: ``mpi4py.MPI``.
        timeout: See `MPI`.
    """

    def __init__(self, module: Any, timeout: float | None) -> None:
        self._module = module
        self._done = 0
        self._is_cut_off = False
        self._ended: dict[int, int] = {}  # the number of exchanges of each exited process
        self._held: list[object] = []  # buffers that MPI may still read or write
        self._rank = int(module.COMM_WORLD.rank)
        self._world: Any = None
        world, request = module.COMM_WORLD.Idup()  # separate from the program's own communication
        self._exchange(lambda: request, timeout, world)
        self._world = world
        self._done = 0
        atexit.register(self._end)
        self._catch_exit()

    def sum(self, array: Array, timeout: float | None) -> None:
        """Replaces an array by its sum over all processes."""
        in_place = self._module.IN_PLACE
        self._exchange(lambda: self._world.Iallreduce(in_place, array), timeout, array)

    def broadcast(self, array: Array, timeout: float | None) -> None:
        """Replaces an array by that of process 0."""
        self._exchange(lambda: self._world.Ibcast(array), timeout, array)

    def _exchange(self, begin: Callable[[], Any], timeout: float | None, data: object) -> None:
        """Performs an exchange. All processes must start exchanges in the same order.

        Args:
            begin: Starts the exchange and returns its request.
            timeout: See `MPI`.
            data: The buffer that MPI reads and writes.

        Raises:
            OrtopsError: If another process does not take part, or MPI fails.
        """
        if self._is_cut_off:
            raise OrtopsError(CUT_OFF)
        self._is_cut_off = True  # until it is done, because a signal handler may raise
        held = len(self._held)
        self._held.append(data)
        try:
            request = begin()
            self._held.append(request)
            self._wait(request, timeout)
        except self._module.Exception as error:
            raise OrtopsError(f"join: MPI failed ({error}); {CALLS}") from error
        del self._held[held:]
        self._done += 1
        self._is_cut_off = False

    def _wait(self, request: Any, timeout: float | None) -> None:
        begin = time.monotonic()
        patience = PATIENCE
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
                        f"join: rank {rank} has exited while rank {self._rank} waits for it; "
                        f"{CALLS}"
                    )
            waited = time.monotonic() - begin
            if waited > patience:
                patience = float("inf")
                warn_of_wait(self._rank, waited, "join(…, timeout=)")
            if timeout is not None and waited > timeout:
                raise OrtopsError(
                    f"join: rank {self._rank} timed out after {timeout:g} s of waiting for the "
                    f"other ranks; {CALLS}, or increase join(…, timeout=)"
                )

    def _look(self) -> None:
        """Receives the messages of exited processes."""
        if self._world is None:
            return
        status = self._module.Status()
        while self._world.Iprobe(status=status):
            done = np.zeros(1, np.int64)
            self._world.Recv(done, status.Get_source())
            self._ended[status.Get_source()] = int(done[0])

    def _catch_exit(self) -> None:
        """Lets `os._exit` in this process notify the others.

        It runs no exit handlers, and ``mpiexec`` of MPICH then kills all other processes and
        returns the status of this one: after ``os._exit(0)``, a job that has not finished would
        look like one that has.
        """
        leave, process = os._exit, os.getpid()

        def notify_and_leave(status: int) -> NoReturn:
            if os.getpid() == process and not self._module.Is_finalized():
                text = f"ortops: join: rank {self._rank} ends with os._exit({status})\n"
                os.write(2, text.encode())
                if not status:  # mpiexec returns any other status
                    self._end()
                    self._module.Finalize()  # waits for the others
                    # MPICH tells mpiexec in an exit handler of C that this process has finalized.
                    getattr(ctypes.pythonapi, "exit", leave)(status)
            leave(status)

        os._exit = notify_and_leave

    def _end(self) -> None:
        """Notifies the others that this process exits."""
        if self._module.Is_finalized():
            return
        done = np.array([self._done], np.int64)
        others = (rank for rank in range(self._world.size) if rank != self._rank)
        self._held += [done, *[self._world.Isend(done, rank) for rank in others]]
