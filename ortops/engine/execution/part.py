"""A part of a step with its graphs for batches of different shapes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ortops._common.garbage_collection import pause_collection
from ortops._common.uninterrupted import run_uninterrupted
from ortops.engine.execution.memory import Memory
from ortops.engine.execution.placement import PlacedNode, nodes_of
from ortops.engine.execution.split_step import Cut, Layout
from ortops.engine.execution.template import Template
from ortops.engine.execution.variables import Variables
from ortops.engine.execution.variant import Binding, Variant

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Part:
    """The part of a step that belongs to one training_info entry, or a half of it.

    Batches of some shapes get graphs of their own, if graphs for known shapes are faster. Only the
    first few shapes do. A data set of equal samples has two: that of a full batch and that of the
    last batch.

    Args:
        template: The part for batches of any shape.
        variables: The variables of the execution.
        number: The index of the part.
        capacity: How many shapes get graphs of their own.
        rebound: Inputs that are bound before each run, besides what another part updates.

    Attributes:
        template: As given.
        variables: As given.
        gains: Whether graphs for known shapes are faster.
        split: What `split_step` has returned; None before it is called.
    """

    def __init__(
        self,
        template: Template,
        variables: Variables,
        number: int,
        capacity: int,
        rebound: Collection[str] = (),
    ) -> None:
        self.template, self.gains = template, template.gains
        self.variables, self._number, self._capacity = variables, number, capacity
        owners = {name: variables.updated_by.get(name, number) for name in template.step.variables}
        self._owners = {name: owner for name, owner in owners.items() if owner != number}
        self._rebound = {*self._owners, *rebound}
        self.forget()

    def forget(self) -> None:
        """Forgets the graphs, which are made anew when they are used again."""
        self._general: Variant | None = None
        self._made: dict[tuple[tuple[str, tuple[int, ...]], ...], Variant] = {}
        self.split: SplitStep | None = None

    def show(self, names: Sequence[str]) -> None:
        """Sets the tensors to compute in addition to outputs; leaves out those that it lacks."""
        extra = tuple(filter(self.template.computes, names))
        if extra != self.template.extra:
            self.template.extra = extra
            self.forget()

    @property
    def turn(self) -> int:
        """Which of the two buffers of the variables that it updates has the current values."""
        return self.variables.position[0][self._number]

    def buffers(self, name: str, turn: int) -> tuple[Memory, Memory]:
        """Returns the memory that a variable is read from, and that its next value is written to.

        What another part updates is read from its current buffer, which changes.
        """
        both = self.variables[name].buffers
        if name in self._owners:
            return (both[self.variables.turn_of(name)],) * 2
        return both[turn], both[1 - turn]

    def foreign_values(self, turns: Sequence[int]) -> dict[str, Memory]:
        """Returns the memory of what the part reads and another one updates.

        Args:
            turns: The index of the current buffers of each part.
        """
        return {n: self.variables[n].buffers[turns[owner]] for n, owner in self._owners.items()}

    def of(self, shapes: Shapes) -> Variant:
        """Returns the graph for batches of given shapes, bound to memory."""
        key = tuple(shapes.items()) if self.gains else ()
        if key not in self._made:
            own = len(self.shapes) < self._capacity and self.template.gains_at(shapes)
            # Uninterrupted, because other libraries wrap exceptions of signal handlers in their
            # own.
            make = functools.partial(self._variant, shapes if own else None)
            self._made[key] = run_uninterrupted(make)
        return self._made[key]

    @pause_collection()
    def _variant(self, shapes: Shapes | None) -> Variant:
        variant = self.any_shape() if shapes is None else Variant(self.template, shapes)
        if not variant.bindings:
            variant.bind(self.buffers, self._rebound)
        return variant

    def any_shape(self) -> Variant:
        """Returns the graph for batches of any shape, which may not be bound to memory yet."""
        if self._general is None:
            self._general = run_uninterrupted(functools.partial(Variant, self.template, None))
        return self._general

    def half(self, shapes: Shapes) -> Binding:
        """Returns what runs the graph for batches of given shapes on the current values."""
        return self.of(shapes).bindings[self.turn]

    def whole(self, shapes: Shapes) -> Binding:
        """Returns what computes the gradients of a batch and applies them, wherever that runs."""
        if not self.template.overwrites:
            return self.half(shapes)
        split = self.split_step()
        return split.gradients.half(shapes).followed_by(split.apply.half({}), split.passed)

    def graphs(self) -> list[Part]:
        """Returns what a step runs: the part itself, or the halves of one that overwrites."""
        if not self.template.overwrites:
            return [self]
        split = self.split_step()
        return [split.gradients, split.apply]

    def split_step(self) -> SplitStep:
        """Returns the part cut in two after its gradients.

        Raises:
            UnsupportedError: If it has no gradients, or several of a parameter.
        """
        if self.split is None:
            self.split = run_uninterrupted(self._cut)
        return self.split

    def _cut(self) -> SplitStep:
        gradients, apply, names = self.template.cut()
        step = self.template.step
        make = functools.partial(Part, variables=self.variables, number=self._number)
        return SplitStep(
            names,
            make(
                gradients,
                capacity=self._capacity,
                rebound=[*names.carried, step.seed, step.scale],
            ),
            make(apply, capacity=0, rebound=apply.step.feeds),
            self.variables,
        )

    def nodes(self) -> list[PlacedNode] | None:
        """Returns the nodes of all graphs, and where they run; None if it is not known."""
        variants = [self._general] if self._general else list(self._made.values())
        if not variants:  # there is a graph only for batches of known shapes
            return nodes_of(self.template.lowered(None).graph)
        return _all_nodes(variants)

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The shapes of feeds that have a graph of their own."""
        return [dict(key) for key, made in self._made.items() if made is not self._general]

    def nodes_made_last(self) -> list[PlacedNode] | None:
        """Returns the nodes of the graph that was made last; [] without one, None as in `nodes`."""
        last = next(reversed(self._made.values()), self._general)
        return _all_nodes([last] if last else [])


def _all_nodes(variants: Sequence[Variant]) -> list[PlacedNode] | None:
    found = [variant.nodes for variant in variants]
    return None if None in found else [node for nodes in found for node in nodes or ()]


@dataclass(frozen=True)
class SplitStep:
    """A part of a step cut in two after its gradients.

    Attributes:
        names: The names of the tensors that go from the first half to the second.
        gradients: The gradient half.
        apply: The update half.
        variables: The variables by name.
    """

    names: Cut
    gradients: Part
    apply: Part
    variables: Variables

    @functools.cached_property
    def layout(self) -> Layout:
        """The memory layout of gradients."""
        return Layout({name: self.variables[name].buffers[0] for name in self.names.given})

    @property
    def passed(self) -> list[str]:
        """The outputs of the first part that the second one reads.

        They begin with those that `Execution.gradients` writes into arrays of its own.
        """
        carried = self.names.carried
        updated = [name for label, name in carried.items() if label in self.variables]
        others = [name for label, name in carried.items() if label not in self.variables]
        return [*self.names.given.values(), *updated, *others]

    @property
    def carried(self) -> Sequence[str]:
        """The public names of the tensors other than gradients that the update part reads."""
        return [*self.names.carried, *self.names.fed]
