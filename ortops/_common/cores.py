"""How many cores and how much memory this process may use, where the machine has more."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE")
"""What Open MPI, MPICH and torchrun call the number of processes that they started here."""

_SIBLINGS = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@functools.cache
def usable_cores() -> int:
    """Returns the number of cores, as the system counts them, that this process may use."""
    return cores_of(_affinity(), os.cpu_count() or 1, os.environ)[0]


@functools.cache
def session_threads() -> int:
    """Returns how many threads a session should have; 0 for onnxruntime's own number.

    That is one for each physical core of the machine, also where the process may use fewer, and
    where others that MPI has started with it want the same cores.
    """
    return cores_of(_affinity(), os.cpu_count() or 1, os.environ)[1]


def cores_of(
    cpus: Sequence[int], count: int, environment: Mapping[str, str], root: Path = Path("/")
) -> tuple[int, int]:
    """Returns `usable_cores` and `session_threads`.

    Args:
        cpus: The CPUs that the process may run on.
        count: The number of CPUs of the machine.
        environment: The environment variables.
        root: The root of the file system.
    """
    groups = {_text(root / _SIBLINGS.format(cpu)) or str(cpu) for cpu in cpus}
    quota = min(_quotas(root), default=math.inf)
    ranks = 1
    if len(cpus) == count:  # otherwise, each process has cores of its own
        given = [environment[name] for name in _RANKS if environment.get(name, "").isdigit()]
        ranks = max(1, int(given[0])) if given else 1
    usable, threads = (max(1, int(min(n, quota)) // ranks) for n in (len(cpus), len(groups)))
    is_limited = len(cpus) < count or quota < len(groups) or ranks > 1
    return usable, threads if is_limited else 0


def _affinity() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):  # only on some systems
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 1)


def usable_memory(root: Path = Path("/")) -> int | None:
    """Returns how many bytes this process may have; None where the system is not Linux.

    That is what the system has available, and at most the limits of the control groups.

    Args:
        root: The root of the file system.
    """
    lines = _text(root / "proc/meminfo").splitlines()
    found = [int(each.split()[1]) * 1024 for each in lines if each.startswith("MemAvailable:")]
    for folder, is_first in _groups("memory", root) if found else ():
        text = _text(folder / ("memory.limit_in_bytes" if is_first else "memory.max"))
        found += [int(text)] if text.isdigit() else []
    return min(found, default=None)


def _quotas(root: Path) -> Iterator[int]:
    """Yields the limits of the control groups of this process, rounded up to whole cores."""
    for folder, is_first in _groups("cpu", root):
        if is_first:
            parts = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        else:
            parts = _text(folder / "cpu.max").split()
        if len(parts) == 2 and all(part.isdigit() for part in parts) and int(parts[1]):
            yield max(1, math.ceil(int(parts[0]) / int(parts[1])))


def _groups(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of the control groups of this process, and whether of version 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / place.lstrip("/")
        for folder in (inner, *inner.parents):
            yield folder, bool(controllers)
            if folder == top:
                break


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
