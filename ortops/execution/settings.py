"""Settings of the execution of steps; the defaults were the fastest in measurements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ortops.errors import ArgumentError, did_you_mean
from ortops.execution.memory import Device
from ortops.passes import Pass, passes_for

__all__ = ["Settings"]


def _cores() -> int:
    known = hasattr(os, "sched_getaffinity")  # only on some systems
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    """Settings of the execution of steps. They do not change results, up to rounding.

    Attributes:
        passes: The graph rewrites for onnxruntime's CPU provider.
        joined: The maximum number of packed elements for which updates are part of the gradient
            graph, which saves a run.
        chunk: The number of elements that a separate update processes at a time, so that they stay
            in the cache of a core.
        passed: The minimum number of packed elements for which gradients are passed from step to
            update in onnxruntime's memory, which the forward pass has used before. Below it, they
            are written to memory of their own, which is faster.
        early: The minimum number of elements of a variable that is updated in the backward pass,
            if this is wanted. Many smaller ones are updated faster together, and their gradients
            take little memory.
        shapes: How many shapes of batches get graphs of their own. A data set of equal samples has
            two: that of a full batch and that of the last batch.
        threads: The number of threads that share the chunks, unless the session options set it.
        spin: How many microseconds a thread of onnxruntime waits actively for work before it
            sleeps, unless the session options set it. The default is about the time that waking a
            thread takes, so that waiting costs at most about twice the optimum, and cores remain
            free for others. None means onnxruntime's own default, a million pauses (3 to 50 ms); so
            does any number if onnxruntime does not know this setting.
        compiled_after: How many steps, and how many seconds in them, precede the compilation of
            updates with ``kernels="auto"``. It takes a few tenths of a second.
        saved: How many seconds compiled updates are assumed to save for each packed element, where
            the updates are part of the gradient graph, which must then be made anew.
        scaled_sums: Whether sums y + c · x of long tensors may be computed in one pass over memory.
        copied: The number of bytes of frozen weights up to which onnxruntime may copy them into the
            order of its kernels. Above it, they are inputs, which it reads where they are.
        device: The device for variables; by default, that of the providers.
    """

    passes: Sequence[Pass] = field(default_factory=lambda: passes_for("session"))
    joined: int = 2**18
    chunk: int = 2**17
    passed: int = 2**22
    early: int = 2**15
    shapes: int = 2
    threads: int = field(default_factory=_cores)
    spin: int | None = 20
    compiled_after: tuple[int, float] = (10, 2.0)
    saved: float = 1.5e-9
    scaled_sums: bool = True
    copied: int = 2**28
    device: Device | None = None

    def without(self, *names: str) -> Settings:
        """Returns settings without some passes.

        Raises:
            ArgumentError: If a pass is unknown.

        Example:
            >>> settings = Settings().without("max_pool", "recurrent", "blocked", "scales")
            >>> [each.name for each in settings.passes][:5]
            ['normal_form', 'numbers', 'gated_sums', 'computed_sizes', 'padding']
        """
        known = [each.name for each in self.passes]
        for name in names:
            if name not in known:
                raise ArgumentError(f"unknown pass '{name}'; {did_you_mean(name, known)}")
        return replace(self, passes=[each for each in self.passes if each.name not in names])
