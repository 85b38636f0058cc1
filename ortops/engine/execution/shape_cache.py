"""A cache of graphs for batches of different shapes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ortops._common.garbage_collection import pause_collection
from ortops._common.uninterrupted import run_uninterrupted
from ortops.engine.execution.binding import Binding
from ortops.engine.execution.memory import Memory
from ortops.engine.execution.placement import PlacedNode, nodes_of
from ortops.engine.execution.template import Template
from ortops.engine.execution.variant import Variant

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
Buffers: TypeAlias = Callable[[int, int], Callable[[str], tuple[Memory, Memory]]]
"""Maps the number of a part and a turn to a function that returns the memory of a variable."""


@dataclass(frozen=True)
class CachedStep:
    """A step for batches of certain shapes.

    Attributes:
        variants: The parts of the step.
        bindings: For each part, the bindings for steps of even number and of odd number.
    """

    variants: list[Variant]
    bindings: list[list[Binding]]


class ShapeCache:
    """Keeps graphs for the shapes of batches, if graphs for known shapes are faster.

    Only the first few shapes get graphs of their own. A data set of equal samples has two: that of
    a full batch and that of the last batch.

    Args:
        templates: The parts of a step.
        capacity: How many shapes get graphs of their own.
        rebound: Inputs that are bound before each run, in addition to the feeds.

    Attributes:
        gain: Whether graphs for known shapes are faster.
    """

    def __init__(
        self, templates: Sequence[Template], capacity: int, rebound: Collection[str] = ()
    ) -> None:
        self._templates = templates
        self._capacity = capacity
        self._rebound = rebound
        self._general: CachedStep | None = None
        self._variants: list[Variant] = []
        self._made: dict[Shapes, CachedStep] = {}
        self.gain = any(template.gains for template in templates)

    def of(self, shapes: Mapping[str, tuple[int, ...]], buffers: Buffers) -> CachedStep:
        """Returns the step for batches of given shapes.

        Args:
            shapes: The shapes of the feeds.
            buffers: Returns the memory of variables.
        """
        key = tuple(shapes.items()) if self.gain else ()
        if key not in self._made:
            if self._capacity and any(each.gains_at(shapes) for each in self._templates):
                self._made[key] = self._make(shapes, buffers)
                self._capacity -= 1
            else:
                self._general = self._general or self._make(None, buffers)
                self._made[key] = self._general
        return self._made[key]

    def read_here(self) -> tuple[set[str], set[str]]:
        """Returns the inputs that graphs read in the CPU's memory, and those read elsewhere."""
        if not self._variants:
            self._variants = run_uninterrupted(
                lambda: [Variant(template, None) for template in self._templates]
            )
        return (
            set[str]().union(*(variant.read_here for variant in self._variants)),
            set[str]().union(*(variant.read_elsewhere for variant in self._variants)),
        )

    @property
    def in_place(self) -> set[str]:
        """The variables whose next values overwrite the present ones; after `read_here`."""
        return set[str]().union(*(variant.in_place for variant in self._variants))

    def nodes(self) -> list[PlacedNode] | None:
        """Returns the nodes of all graphs, and where they run; None if it is not known."""
        cached = [self._general] if self._general else list(self._made.values())
        variants = [variant for each in cached for variant in each.variants] or self._variants
        if not variants:  # there is a graph only for batches of known shapes
            return [n for each in self._templates for n in nodes_of(each.lowered(None).graph)]
        found = [variant.nodes for variant in variants]
        return None if None in found else [node for nodes in found for node in nodes or ()]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of feeds that have a graph of their own."""
        return [dict(key) for key, made in self._made.items() if made is not self._general]

    def nodes_made_last(self) -> list[PlacedNode] | None:
        """Returns the nodes of the graph that was made last; [] without one, None as in `nodes`."""
        last = next(reversed(self._made.values()), self._general)
        found = [each.nodes for each in (last.variants if last else self._variants)]
        return None if None in found else [node for nodes in found for node in nodes or ()]

    def _make(self, shapes: Mapping[str, tuple[int, ...]] | None, buffers: Buffers) -> CachedStep:
        @pause_collection()
        def make() -> CachedStep:
            variants = [] if shapes else self._variants
            self._variants = []
            variants = variants or [Variant(template, shapes) for template in self._templates]
            bindings = [
                [variant.bind(buffers(number, turn), turn, self._rebound) for turn in (0, 1)]
                for number, variant in enumerate(variants)
            ]
            return CachedStep(variants, bindings)

        # Uninterrupted, because other libraries wrap exceptions of signal handlers in their own.
        return run_uninterrupted(make)
