"""Communication through torch.distributed."""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from ortops._common.numbers import Array
from ortops._common.optional import optional_module
from ortops.distributed.exchanges import PATIENCE, warn_of_wait
from ortops.errors import ArgumentError, OrtopsError

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables of the environment by which torchrun tells processes about each other."""

_BETWEEN = 0.02
"""The time, in seconds, between looks at what other processes have seen."""


class TorchCommunicator:
    """The processes of a group of torch.distributed, as an `ortops.distributed.Communicator`.

    `ortops.distributed.join` with ``"torch"`` uses all processes that torchrun, or a launcher that
    sets the same variables of the environment, has started. Arrays stay in the memory of the CPU.

    Args:
        group: A process group with the backend gloo for the CPU; by default, that of all processes.
            If ``init_process_group`` has not been called, it is made with the default timeout.

    Attributes:
        rank: The index of this process in the group, from 0.
        size: The number of processes in the group.

    Raises:
        ArgumentError: If there is no group and the program was not started by torchrun, or this
            process does not belong to the group.
        OrtopsError: If torch cannot be imported, or a new group cannot be made.

    Example:
        >>> torch.distributed.init_process_group(timeout=timedelta(minutes=5))  # doctest: +SKIP
        >>> join(session, TorchCommunicator()).size  # doctest: +SKIP
        2
    """

    def __init__(self, group: Any = None) -> None:
        instead = "pass another communicator"
        module = optional_module("join", "torch.distributed", "torch", "torch", instead)
        self._torch, self._module = optional_module("join", "torch", "torch"), module
        if not (module.is_available() and module.is_initialized()):
            _start(module)
        self._group = group
        self.rank, self.size = int(module.get_rank(group)), int(module.get_world_size(group))
        if self.rank < 0:
            raise ArgumentError(
                f"join: process {module.get_rank()} does not belong to the process group; call "
                "join only in those that do"
            )
        self._first = 0 if group is None else int(module.get_global_rank(group, 0))

    def sum(self, array: Array) -> None:
        """Replaces an array by its sum over all processes."""
        self._wait(self._module.all_reduce, array)

    def broadcast(self, array: Array) -> None:
        """Replaces an array by that of process 0."""
        self._wait(self._module.broadcast, array, src=self._first)

    def _wait(self, start: Callable[..., Any], array: Array, **arguments: Any) -> None:
        """Makes an exchange. Signal handlers run while it waits, unlike in gloo."""
        done, begin = threading.Event(), time.monotonic()
        tensor = self._torch.from_numpy(array)  # the same memory
        work = start(tensor, group=self._group, async_op=True, **arguments)
        work.get_future().add_done_callback(lambda _: done.set())
        if not done.wait(PATIENCE):
            remedy = "The timeout of the process group"
            warn_of_wait(self.rank, time.monotonic() - begin, remedy)
            done.wait()
        work.wait()  # raises its error


def _start(module: Any) -> None:
    """Makes the group of all processes that were started together."""
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if missing:
        raise ArgumentError(
            "join: torch.distributed has no process group, and the environment lacks "
            f"{', '.join(missing)}; start the program with: torchrun --nproc-per-node 2 train.py, "
            "or call torch.distributed.init_process_group first"
        )
    try:
        shared, rank, size = next(module.rendezvous("env://"))
        store = module.PrefixStore(_agreed(shared, rank, size), shared)
        module.init_process_group("gloo", store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        raise OrtopsError(
            f"join: torch.distributed cannot connect rank {os.environ['RANK']} of "
            f"{os.environ['WORLD_SIZE']} ({error}); start all ranks with the same MASTER_ADDR and "
            "MASTER_PORT"
        ) from error


def _agreed(store: Any, rank: int, size: int) -> str:
    """Returns a name that the running processes have agreed on, and no earlier ones.

    torchrun keeps its store when it starts the processes again, so gloo would find the addresses of
    those that have ended. Each process writes a new token, then all tokens that it sees. They agree
    once all have seen the same: what a process sees contains its own new token, so another that has
    seen it has been started again, too.
    """
    store.set(f"ortops/token/{rank}", uuid.uuid4().hex)
    deadline = time.monotonic() + store.timeout.total_seconds()
    while time.monotonic() < deadline:
        tokens = store.multi_get([f"ortops/token/{each}" for each in range(size)])
        seen = hashlib.sha256(b"".join(tokens)).hexdigest()
        store.set(f"ortops/seen/{rank}", seen)
        others = store.multi_get([f"ortops/seen/{each}" for each in range(size)])
        if all(each.decode() == seen for each in others):
            return seen
        time.sleep(_BETWEEN)
    raise RuntimeError("the other ranks have not started in time")
