"""How steps are executed; the defaults are what was measured to be fastest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ortops.errors import OrtopsError, did_you_mean
from ortops.execution.memory import Device
from ortops.passes import Pass, passes_for

__all__ = ["Settings"]


def _cores() -> int:
    known = hasattr(os, "sched_getaffinity")  # not everywhere
    return len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1


@dataclass(frozen=True)
class Settings:
    """How steps are executed. Numbers are the same with any, but for rounding.

    Attributes:
        passes: What makes graphs fast on onnxruntime's CPU provider.
        joined: The largest number of packed elements that are updated in the graph of gradients
            itself, which saves a run.
        chunk: How many elements of a role are updated at a time otherwise: they stay in a core's
            cache.
        passed: The smallest number of packed elements whose gradients take memory of
            onnxruntime's, which the forward pass has used, from step to step. Smaller ones have
            memory of their own, which takes less time.
        shapes: How many shapes of batches get graphs of their own, as many as a data set of equal
            samples has: that of a batch and that of the last one.
        threads: How many threads share the chunks, where the options for sessions do not say.
        spin: For how many microseconds a thread of onnxruntime waits actively for work before it
            sleeps, where the options for sessions do not say: about as long as it takes to wake it,
            so that waiting never costs much more than either alone, and a core that others use is
            not taken from them. None stands for onnxruntime's own default, a million pauses, 3
            to 50 ms; so does any number where onnxruntime does not know this setting.
        scaled_sums: Whether sums y + c · x of long tensors may be made in one pass over memory.
        device: The device that variables lie on, whatever the providers say.
    """

    passes: Sequence[Pass] = field(default_factory=lambda: passes_for("session"))
    joined: int = 2**18
    chunk: int = 2**17
    passed: int = 2**22
    shapes: int = 2
    threads: int = field(default_factory=_cores)
    spin: int | None = 20
    scaled_sums: bool = True
    device: Device | None = None

    def without(self, *names: str) -> Settings:
        """Returns settings without some passes.

        Raises:
            OrtopsError: If there is no such pass.

        Example:
            >>> settings = Settings().without("max_pool", "recurrent", "blocked", "scales")
            >>> [each.name for each in settings.passes][:5]
            ['computed_sizes', 'padding', 'gelu', 'transposed', 'row_sums']
        """
        known = [each.name for each in self.passes]
        for name in names:
            if name not in known:
                raise OrtopsError(f"passes: there is no pass '{name}'; {did_you_mean(name, known)}")
        return replace(self, passes=[each for each in self.passes if each.name not in names])
