"""The forms that a step has for batches of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt

from ortops.execution.binding import Binding
from ortops.execution.memory import Memory
from ortops.execution.onnxruntime_sessions import Sessions
from ortops.execution.template import Template
from ortops.execution.variant import Variant
from ortops.garbage_collection import pause_collection
from ortops.uninterrupted import run_uninterrupted

__all__ = ["CachedStep", "ShapeCache"]

Array: TypeAlias = npt.NDArray[Any]
Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
Buffers: TypeAlias = Callable[[int, int], Callable[[str], tuple[Memory, Memory]]]
"""Tells, for a part's number and a turn, where that reads a variable and where it writes it."""


@dataclass(frozen=True)
class CachedStep:
    """What runs the steps of some shapes.

    Attributes:
        variants: The parts of a step.
        bindings: Each part, bound to memory for steps of even number, and for those of odd number.
    """

    variants: list[Variant]
    bindings: list[list[Binding]]


class ShapeCache:
    """What runs steps, made for the shapes of batches where that gains something.

    Only the first few shapes get graphs of their own, as many as a data set of equal samples has:
    that of a batch and that of the last one.

    Args:
        templates: The parts of a step.
        sessions: Opens the sessions.
        most_special: How many shapes get graphs of their own.
        anew: Inputs that each run is given, beside the feeds.

    Attributes:
        gain: Whether shapes matter.
    """

    def __init__(
        self,
        templates: Sequence[Template],
        sessions: Sessions,
        most_special: int,
        anew: Collection[str] = (),
    ) -> None:
        self._templates = templates
        self._sessions = sessions
        self._most_special = most_special
        self._anew = anew
        self._general: CachedStep | None = None
        self._made: dict[Shapes, CachedStep] = {}
        self._special = 0
        self.gain = any(template.gains for template in templates)

    def of(self, shapes: Mapping[str, tuple[int, ...]], buffers: Buffers) -> CachedStep:
        """Returns what runs batches of these shapes.

        Args:
            shapes: The shapes of the feeds.
            buffers: Tells where the variables are.
        """
        key = tuple(shapes.items()) if self.gain else ()
        if key not in self._made:
            if self._special < self._most_special and any(
                template.gains_at(shapes) for template in self._templates
            ):
                self._made[key] = self._make(shapes, buffers)
                self._special += 1
            else:
                self._general = self._general or self._make(None, buffers)
                self._made[key] = self._general
        return self._made[key]

    def _make(self, shapes: Mapping[str, tuple[int, ...]] | None, buffers: Buffers) -> CachedStep:
        @pause_collection()
        def make() -> CachedStep:
            variants = [Variant(template, shapes, self._sessions) for template in self._templates]
            bindings = [
                [variant.bind(buffers(number, turn), turn, self._anew) for turn in (0, 1)]
                for number, variant in enumerate(variants)
            ]
            return CachedStep(variants, bindings)

        # Not to be cut in two: other libraries wrap what a handler raises in them.
        return run_uninterrupted(make)
