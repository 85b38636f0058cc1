"""Rewrite patterns: functions that return a replacement for a node, and their application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from ortops.graph.edit import remove_unread, replace_value, take_place
from ortops.graph.names import Names
from ortops.graph.passes.draft import SESSION, Draft, Pass, Runtime
from ortops.graph.tensor import Tape, Tensor

Result: TypeAlias = Tensor | Sequence[Tensor] | None
"""The replacements for all outputs of a node; None to keep the node."""


@dataclass(frozen=True)
class Pattern:
    """A rewrite pattern for nodes of some operators.

    Attributes:
        function: ``(node, tape)`` → replacements for the node's outputs, emitted on the tape or
            existing already; or None to keep the node.
        op_types: The operators.
        domain: Their domain.
    """

    function: Callable[[ir.Node, Tape], Result]
    op_types: frozenset[str]
    domain: str


def pattern(
    *op_types: str, domain: str = ""
) -> Callable[[Callable[[ir.Node, Tape], Result]], Pattern]:
    """Decorates a function as a pattern for some operators; see `Pattern`."""
    return lambda function: Pattern(function, frozenset(op_types), domain)


def rewrite(graph: ir.Graph, names: Names, *patterns: Pattern) -> None:
    """Traverses a graph once and replaces the nodes that match patterns.

    New nodes are inserted before the node that they replace, are named after it, and are not
    matched again. If any node is a candidate, unused nodes are removed in the end.

    Args:
        graph: A lowered graph; it is modified in place.
        names: The names used in it.
        *patterns: The patterns; the first one that matches is applied. A replacement of another
            rank is not used.
    """
    by_operator: dict[tuple[str, str], list[Pattern]] = {}
    for each in patterns:
        for op_type in each.op_types:
            by_operator.setdefault((each.domain, op_type), []).append(each)
    if not any((node.domain, node.op_type) in by_operator for node in graph):
        return
    tape = Tape(graph, names=names)
    for node in list(graph):
        for each in by_operator.get((node.domain, node.op_type), ()):
            if node.graph is not graph:  # a pattern has removed it
                break
            tape.before, tape.scope = node, f"{node.name or node.op_type}/"
            results = each.function(node, tape)
            results = [results] if isinstance(results, Tensor) else results
            if results is not None and _have_ranks(node, results):
                _replace(tape, node, results)
                break
    remove_unread(list(graph))


def _have_ranks(node: ir.Node, results: Sequence[Tensor]) -> bool:
    """Whether replacements have as many axes as the outputs, as far as is known.

    A number of shape [1, 1, 1] in the original nodes adds axes to a matrix, which fusions drop.
    """
    for old, new in zip(node.outputs, results, strict=False):
        shape, found = old.shape, new.value.shape
        if shape is not None and found is not None and len(shape) != len(found):
            return False
    return True


def _replace(tape: Tape, node: ir.Node, results: Sequence[Tensor]) -> None:
    for old, new in zip(node.outputs, results, strict=False):
        if not old.name:
            continue
        emitted, shown = tape.emitted(new.value), old.is_graph_output()
        # Inputs and outputs of the graph keep their names, and cannot take that of the old value.
        stays = new.value.is_graph_output() or new.value.producer() is None
        if emitted and (new.shape is None or None in new.shape):
            new = new.with_shape_of(tape.tensor(old))
        if emitted or (shown and stays):
            replace_value(tape, old, new)
        elif shown:
            take_place(old, new.value)
        else:
            old.replace_all_uses_with(new.value)
    remove_unread([node])


class PatternPass(Pass):
    """A pass that rewrites a lowered graph by patterns.

    Args:
        name: See `Pass`.
        *patterns: The patterns.
        serves: See `Pass`.
    """

    def __init__(
        self, name: str, *patterns: Pattern, serves: Collection[Runtime] = SESSION
    ) -> None:
        super().__init__(name, serves)
        self.patterns = patterns

    def finish(self, draft: Draft) -> None:
        """Rewrites the graph."""
        rewrite(draft.graph, draft.names, *self.patterns)
