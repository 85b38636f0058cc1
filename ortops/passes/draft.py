"""What passes are, and what they work on."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx_ir as ir

from ortops.autodiff.gradient_node import is_of_higher_order
from ortops.autodiff.registry import Rules, Table
from ortops.graph.tensor import Names
from ortops.passes.finite import unbounded_values

__all__ = ["ANYWHERE", "ONNXRUNTIME", "SESSION", "Draft", "Pass", "Runtime"]

Runtime: TypeAlias = Literal["any", "onnxruntime", "webgpu", "session"]
"""What runs a graph: whatever knows the standard's operators, a build of onnxruntime with its CPU
provider, one with the WebGPU provider, or a TrainingSession on this machine's CPU."""

SESSION: frozenset[Runtime] = frozenset({"session"})
"""For a graph that no other machine gets."""

ONNXRUNTIME: frozenset[Runtime] = SESSION | {"onnxruntime"}
"""For operators or kernels that onnxruntime's CPU provider has on any machine."""

ANYWHERE: frozenset[Runtime] = ONNXRUNTIME | {"any"}
"""For standard operators that are no slower elsewhere."""


@dataclass
class Draft:
    """A model on its way to what onnxruntime runs.

    Attributes:
        model: The model.
        names: The names taken in it.
        given: The rules that were asked for: ortops' own, and over them the user's.
        sizes: The sizes of symbols in the shapes of inputs; None where they may change.
        feeds: The inputs that a batch fills.
        shown: The outputs for people: the loss, and the model's own.
        rules: The rules in force: those of passes over the given ones.
        pinned: Names of tensors that are outputs while passes are at work, so that these leave
            them alone.
    """

    model: ir.Model
    names: Names
    given: Rules
    sizes: Mapping[str, int] | None
    feeds: Sequence[str]
    shown: Sequence[str]
    rules: Rules = field(init=False)
    pinned: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rules = self.given

    @property
    def graph(self) -> ir.Graph:
        """The graph of the model."""
        return self.model.graph

    def add_rules(self, table: Table) -> None:
        """Puts a table of rules over those in force."""
        self.rules = self.rules.below(table)

    def is_free(self, node: ir.Node) -> bool:
        """Whether a pass may choose how a node is differentiated: the user has no rule for it."""
        return not self.given.is_overridden(node)

    @functools.cached_property
    def is_of_first_order(self) -> bool:
        """Whether no gradient is taken of a gradient. It tells of the model before any pass."""
        return not is_of_higher_order(self.graph)

    @functools.cached_property
    def unbounded(self) -> set[ir.Value]:
        """The values whose cotangents may be infinite. It tells of the model before any pass."""
        return unbounded_values(self.graph, self.given)

    def pin(self, names: Collection[str]) -> None:
        """Makes tensors outputs, until `unpin`."""
        outputs = set(self.graph.outputs)
        values = (value for node in self.graph for value in node.outputs if value.name in names)
        added = [value for value in values if value not in outputs]
        self.graph.outputs.extend(added)
        self.pinned += [value.name or "" for value in added]

    def unpin(self) -> None:
        """Makes the pinned tensors no outputs any more."""
        for value in [value for value in self.graph.outputs if value.name in self.pinned]:
            self.graph.outputs.remove(value)
        self.pinned.clear()


class Pass:
    """Makes a model faster, or smaller, and leaves its numbers as they are but for rounding.

    Args:
        name: What it is called where it is left out.
        serves: What it makes graphs for.
    """

    def __init__(self, name: str, serves: Collection[Runtime] = SESSION) -> None:
        self.name = name
        self.serves = frozenset(serves)

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether it makes a prepared model faster if that is lowered for known sizes only.

        Args:
            model: The model.
            sizes: The sizes by symbol; None for those that suit best.
        """
        return False

    def prepare(self, draft: Draft) -> None:
        """Works on a prepared model: Gradient nodes are bound, types and shapes inferred."""

    def finish(self, draft: Draft) -> None:
        """Works on a lowered model. What was prepared last is finished first."""

    def __repr__(self) -> str:
        return f"<pass {self.name}>"
