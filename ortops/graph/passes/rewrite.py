"""Rewrite patterns: functions that return a replacement for a node, and their application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from ortops.graph.autodiff.registry import Table
from ortops.graph.edit import describe, remove_unread, replace_value, take_place
from ortops.graph.matching import Form, Found, Search
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs, nodes_of
from ortops.graph.passes.draft import SESSION, Draft, Pass, Runtime
from ortops.graph.tensor import Tape, Tensor

Result: TypeAlias = Tensor | Sequence[Tensor] | str | None
"""The replacements for all outputs of a node; None to keep the node, or text that says why."""


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

    def apply(self, node: ir.Node, tape: Tape, is_free: Callable[[ir.Node], bool]) -> Result:
        """Applies the pattern to a node, unless that is not free to be replaced."""
        return self.function(node, tape) if is_free(node) else None


@dataclass(frozen=True)
class Formula(Pattern):
    """A rewrite pattern for what a formula finds.

    Attributes:
        written: The formula.
        replace: ``(found, tape)`` → replacements for the last node that was found; or None to keep
            all, or text that says why.
    """

    written: Form
    replace: Callable[[Found, Tape], Result]

    def apply(self, node: ir.Node, tape: Tape, is_free: Callable[[ir.Node], bool]) -> Result:
        """Applies the pattern to a node, unless a node that is found is not free."""
        search, why = Search(self.written, node.outputs[0]), ""
        for found in search:
            result = self.replace(found, tape) if all(map(is_free, found.nodes)) else None
            if isinstance(result, str):
                why = f"{describe(node)}: {result}"
            elif result is not None:
                return result
        return why or search.refusal or None


def pattern(
    *op_types: str, domain: str = ""
) -> Callable[[Callable[[ir.Node, Tape], Result]], Pattern]:
    """Decorates a function as a pattern for some operators; see `Pattern`."""
    return lambda function: Pattern(function, frozenset(op_types), domain)


def formula(written: Form) -> Callable[[Callable[[Found, Tape], Result]], Formula]:
    """Decorates a function that replaces what a formula finds; see `Formula`."""
    return lambda replace: Formula(_of_no_node, written.roots, "", written, replace)


def _of_no_node(node: ir.Node, tape: Tape) -> Result:
    return None


def _always(node: ir.Node) -> bool:
    return True


def rewrite(
    graph: ir.Graph,
    names: Names,
    *patterns: Pattern,
    is_free: Callable[[ir.Node], bool] = _always,
    refused: list[str] | None = None,
) -> bool:
    """Traverses a graph once and replaces the nodes that match patterns.

    New nodes are inserted before the node that they replace, are named after it, and are not
    matched again. If any node is a candidate, unused nodes are removed in the end.

    Args:
        graph: A lowered graph; it is modified in place.
        names: The names used in it.
        *patterns: The patterns; the first one that matches is applied. A replacement of another
            rank is not used.
        is_free: Whether a node may be replaced; by default, all may.
        refused: Gets the reasons why near matches were kept.

    Returns:
        Whether anything was replaced.
    """
    by_operator: dict[tuple[str, str], list[Pattern]] = {}
    for each in patterns:
        for op_type in each.op_types:
            by_operator.setdefault((each.domain, op_type), []).append(each)
    op_types = {op_type for _, op_type in by_operator}
    candidates = [node for node in nodes_of(graph) if node.op_type in op_types]
    tape, changed = Tape(graph, names=names), False
    for node in candidates:
        for each in by_operator.get((node.domain, node.op_type), ()):
            if node.graph is not graph:  # a pattern has removed it
                break
            tape.before, tape.scope = node, f"{node.name or node.op_type}/"
            results = each.apply(node, tape, is_free)
            if isinstance(results, str):
                if refused is not None:
                    refused.append(results)
                continue
            results = [results] if isinstance(results, Tensor) else results
            if results is not None and _have_ranks(node, results):
                _replace(tape, node, results)
                changed = True
                break
    if candidates:  # patterns also change nodes in place
        remove_unread(nodes_of(graph))
    return changed


def rewrite_with_bodies(graph: ir.Graph, names: Names, *patterns: Pattern, **options: Any) -> bool:
    """Calls `rewrite` for a graph and the bodies of Loop, If and Scan in it."""
    bodies = _bodies(graph)
    changed = [rewrite(each, names, *patterns, **options) for each in (*bodies, graph)]
    for each in bodies:  # a file declares the domains of all of them
        for domain, version in each.opset_imports.items():
            graph.opset_imports.setdefault(domain, version)
    return any(changed)


def _bodies(graph: ir.Graph) -> list[ir.Graph]:
    """Returns the bodies of Loop, If and Scan, inner ones first; onnx-ir's way takes long."""
    found: list[ir.Graph] = []
    for node in nodes_of(graph):
        if node.op_type in ("If", "Loop", "Scan"):
            for body in inner_graphs(node):
                found += [*_bodies(body), body]
    return found


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
        # Inputs and outputs of the graph keep their names, and cannot take that of the old value;
        # neither can a value of an outer graph be the output of a body.
        made = new.value.producer()
        stays = new.value.is_graph_output() or made is None or made.graph is not tape.graph
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
        bodies: Whether it also rewrites the bodies of Loop, If and Scan.

    Attributes:
        visits_bodies: Whether it does.
    """

    def __init__(
        self,
        name: str,
        *patterns: Pattern,
        serves: Collection[Runtime] = SESSION,
        bodies: bool = False,
    ) -> None:
        super().__init__(name, serves)
        self.patterns, self.visits_bodies = patterns, bodies

    def finish(self, draft: Draft) -> None:
        """Rewrites the graph."""
        function = rewrite_with_bodies if self.visits_bodies else rewrite
        function(draft.graph, draft.names, *self.patterns, refused=draft.refused(self.name))


class Fusion(Pass):
    """A pass that fuses nodes to one before differentiation.

    Args:
        name: See `Pass`.
        *formulas: What is fused.
        fused: The domain and the operator of the fused node; a rule of the user for it, or for a
            part, turns the fusion off.
        table: The rule of the fused node, if the built-in one is not for it.
        serves: See `Pass`.
    """

    def __init__(
        self,
        name: str,
        *formulas: Formula,
        fused: tuple[str, str],
        table: Table | None = None,
        serves: Collection[Runtime] = SESSION,
    ) -> None:
        super().__init__(name, serves)
        self._formulas, self._fused, self._table = formulas, fused, table

    def prepare(self, draft: Draft) -> None:
        """Fuses nodes, also in the bodies of Loop, If and Scan."""
        options = {"is_free": draft.is_free, "refused": draft.refused(self.name)}
        if not draft.is_free(ir.Node(*self._fused, [])):
            return
        changed = rewrite_with_bodies(draft.graph, draft.names, *self._formulas, **options)
        if changed and self._table is not None:
            draft.add_rules(self._table)
