"""The base class of passes, and the draft that they work on."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import are_of_first_order
from ortops.graph.autodiff.registry import Rules, Table
from ortops.graph.names import Names
from ortops.graph.passes.finite import unbounded_values

Runtime: TypeAlias = Literal[
    "any", "onnxruntime", "cuda", "cuda_session", "webgpu", "webgpu_session", "session"
]
"""What runs a graph: any runtime that implements the ONNX standard, onnxruntime with the CPU
provider, onnxruntime with the WebGPU provider (alone, or in a TrainingSession), or a
TrainingSession on this machine's CPU."""

SESSION: frozenset[Runtime] = frozenset({"session"})
"""For graphs that run only on this machine."""

ONNXRUNTIME: frozenset[Runtime] = SESSION | {"onnxruntime"}
"""For operators or kernels that onnxruntime's CPU provider has on any machine."""

ANYWHERE: frozenset[Runtime] = ONNXRUNTIME | {"any"}
"""For standard operators that are not slower on other runtimes."""


@dataclass
class Draft:
    """A model that is being optimized.

    Attributes:
        model: The model.
        names: The names used in it.
        given: The rules without those of passes: the user's, then the built-in ones.
        sizes: The sizes of the inputs' symbolic dimensions; None if they may change.
        feeds: The inputs that are fed with a batch.
        shown: The outputs that are shown to users: the loss, and the outputs of the model.
        refusals: Why passes kept what is near to what they replace, by the name of the pass.
        rules: The active rules: those of passes, then the given ones.
        pinned: Names of tensors that are temporarily outputs, so that passes do not change them.
    """

    model: ir.Model
    names: Names
    given: Rules
    sizes: Mapping[str, int] | None
    feeds: Sequence[str]
    shown: Sequence[str]
    refusals: dict[str, list[str]] = field(default_factory=dict)
    rules: Rules = field(init=False)
    pinned: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rules = self.given

    @property
    def graph(self) -> ir.Graph:
        """The graph of the model."""
        return self.model.graph

    def refused(self, name: str) -> list[str]:
        """Returns the list of the refusals of a pass."""
        return self.refusals.setdefault(name, [])

    def add_rules(self, table: Table) -> None:
        """Adds a table of rules that takes precedence over the active ones."""
        self.rules = self.rules.below(table)

    def is_free(self, node: ir.Node) -> bool:
        """Whether a pass may choose the gradient rule of a node, because there is no user rule."""
        return not self.given.is_overridden(node)

    @functools.cached_property
    def is_of_first_order(self) -> bool:
        """Whether the model before any pass has only gradients for which passes may add rules.

        Placeholders in subgraphs, or differentiated ones, would remain.
        """
        return are_of_first_order(self.graph)

    @functools.cached_property
    def unbounded(self) -> set[ir.Value]:
        """The values of the model before any pass whose cotangents may be infinite."""
        return unbounded_values(self.graph, self.given)

    def pin(self, names: Collection[str]) -> None:
        """Makes tensors outputs, until `unpin`."""
        outputs = set(self.graph.outputs)
        values = (value for node in self.graph for value in node.outputs if value.name in names)
        added = [value for value in values if value not in outputs]
        self.graph.outputs.extend(added)
        self.pinned += [value.name or "" for value in added]

    def unpin(self) -> None:
        """Undoes `pin`."""
        for value in [value for value in self.graph.outputs if value.name in self.pinned]:
            self.graph.outputs.remove(value)
        self.pinned.clear()


class Pass:
    """Makes a model faster or smaller, without changing its results except for rounding.

    Args:
        name: The name by which it can be disabled.
        serves: The runtimes that it is for.
    """

    def __init__(self, name: str, serves: Collection[Runtime] = SESSION) -> None:
        self.name = name
        self.serves = frozenset(serves)

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether the pass is more effective if the model is lowered for known sizes.

        Args:
            model: The prepared model.
            sizes: The sizes by symbol; None for the best case.
        """
        return False

    def prepare(self, draft: Draft) -> None:
        """Works on a prepared model: Gradient nodes are bound, types and shapes inferred."""

    def finish(self, draft: Draft) -> None:
        """Works on a lowered model. The pass that was prepared last is finished first."""

    def __repr__(self) -> str:
        return f"<pass {self.name}>"
