"""Rules by operator: how cotangents pass through it, or what it stands for.

A `Table` is filled with decorators. `Rules` looks a node up in several tables, the topmost first:
those of passes, then the user's, then ortops' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import onnx_ir as ir

from ortops.graph.edit import is_float, read_inputs
from ortops.graph.tensor import Tensor

__all__ = [
    "USER",
    "AnyRule",
    "Cotangents",
    "Definition",
    "NestedRule",
    "Rule",
    "Rules",
    "StructuralRule",
    "Table",
    "ZeroRule",
    "vjp",
]

Cotangents: TypeAlias = Tensor | tuple[Tensor | None, ...] | None
"""What a rule returns: a cotangent for each input, None where none flows; one alone stands for
itself."""

Function: TypeAlias = Callable[..., Any]
Key: TypeAlias = tuple[str, str]
"""Domain and operator."""

_F = TypeVar("_F", bound=Function)


@dataclass(frozen=True)
class Rule:
    """The formula of a gradient.

    Attributes:
        function: ``(g, y, *inputs, **attributes)`` → cotangents of the inputs.
        elementwise: Whether each input was broadcast to the output's shape, so that its cotangent
            is to be summed back.
        needs: Indices of optional outputs that the rule reads; the forward node gets them.
        attributes: The names of the attributes that the rule takes into account.
        quantizes: Whether the first output, though of integers, carries a cotangent: that of the
            real numbers before rounding.
        limits: What it does not do, for the table of operators.
        when: Tells of a node whether the rule takes it; one that it declines gets the next rule.
    """

    function: Function
    attributes: frozenset[str]
    elementwise: bool = False
    needs: tuple[int, ...] = ()
    quantizes: bool = False
    limits: str = ""
    when: Callable[[ir.Node], bool] | None = None


@dataclass(frozen=True)
class NestedRule(Rule):
    """A rule that differentiates what it emits itself.

    Its function gets the `Rules` to do so with before anything else.
    """


@dataclass(frozen=True)
class StructuralRule:
    """A rule for nodes with graphs inside, which works on the node itself.

    Attributes:
        function: Takes an `ortops.autodiff.backward.Site`; returns a cotangent for each value that
            it has one for, of those that the node reads.
        limits: What it does not do, for the table of operators.
    """

    function: Function
    limits: str = ""


@dataclass(frozen=True)
class ZeroRule:
    """The derivative is exactly zero wherever it exists: no cotangent passes."""


@dataclass(frozen=True)
class Definition:
    """What an operator stands for, which is differentiated in its place.

    Attributes:
        function: ``(*inputs, **attributes)`` → the outputs, None for those that it cannot give.
        attributes: The names of the attributes that the definition takes into account.
        keep: Whether the operator stays in the forward pass, and only the backward pass computes
            what the definition says.
        quantizes: With ``keep``: see `Rule`.
        limits: What it does not do, for the table of operators.
    """

    function: Function
    attributes: frozenset[str]
    keep: bool = False
    quantizes: bool = False
    limits: str = ""


AnyRule: TypeAlias = Rule | StructuralRule | ZeroRule | Definition


class Table:
    """Rules by operator. A later one takes the place of an earlier one.

    Attributes:
        rules: The rules by (domain, operator).
        rearranging: Operators that only move elements, so that quantized numbers that pass through
            still carry a cotangent.
        refusals: Why there is no rule, for operators for which that can be told, and what to do.
    """

    def __init__(self) -> None:
        self.rules: dict[Key, AnyRule] = {}
        self.rearranging: set[Key] = set()
        self.refusals: dict[Key, str] = {}

    def vjp(
        self,
        *op_types: str,
        domain: str = "",
        elementwise: bool = False,
        needs: Sequence[int] = (),
        quantizes: bool = False,
        limits: str = "",
        when: Callable[[ir.Node], bool] | None = None,
    ) -> Callable[[_F], _F]:
        """Registers the vector-Jacobian product of one or more operators.

        The decorated function gets the cotangent ``g`` of the output and the output ``y`` (tuples
        of them for an operator that can have several outputs, with None for those that are absent),
        then the inputs in ONNX order (None where absent), and the attributes as keywords, whose
        defaults are ONNX's own. It returns a cotangent for each input, None where none flows.

        Args:
            *op_types: The operators.
            domain: Their domain.
            elementwise: Whether cotangents are to be summed over the axes of broadcasting.
            needs: Indices of optional outputs that the forward node must have.
            quantizes: Whether the first output carries a cotangent though it is of integers.
            limits: What the rule does not do, for the table of operators.
            when: Tells of a node whether the rule takes it; all by default.

        Example:
            >>> table = Table()
            >>> @table.vjp("Cube", domain="com.example")
            ... def cube(g, y, x):
            ...     return 3 * x * x * g
            >>> table.rules["com.example", "Cube"].attributes
            frozenset()
        """

        def register(function: _F) -> _F:
            names = _attributes(function)
            rule = Rule(function, names, elementwise, tuple(needs), quantizes, limits, when)
            return self._add(op_types, domain, rule, function)

        return register

    def nested_vjp(
        self, *op_types: str, domain: str = "", needs: Sequence[int] = (), limits: str = ""
    ) -> Callable[[_F], _F]:
        """Registers a rule that differentiates what it emits; see `NestedRule` and `vjp`."""

        def register(function: _F) -> _F:
            names = _attributes(function)
            rule = NestedRule(function, names, needs=tuple(needs), limits=limits)
            return self._add(op_types, domain, rule, function)

        return register

    def structural(self, op_type: str, *, limits: str = "") -> Callable[[_F], _F]:
        """Registers the rule of an operator with graphs inside; see `StructuralRule`."""

        def register(function: _F) -> _F:
            return self._add((op_type,), "", StructuralRule(function, limits), function)

        return register

    def zero(self, *op_types: str, domain: str = "") -> None:
        """Registers operators whose derivative is zero; see `ZeroRule`."""
        for op_type in op_types:
            self.rules[domain, op_type] = ZeroRule()

    def rearranges(self, *op_types: str) -> None:
        """Registers operators that quantized numbers pass through; see `rearranging`."""
        self.rearranging.update(("", op_type) for op_type in op_types)

    def refuses(self, *op_types: str, domain: str = "", reason: str) -> None:
        """Registers why operators have no rule, and what to do; see `refusals`."""
        for op_type in op_types:
            self.refusals[domain, op_type] = reason

    def definition(
        self,
        *op_types: str,
        domain: str = "",
        keep: bool = False,
        quantizes: bool = False,
        limits: str = "",
    ) -> Callable[[_F], _F]:
        """Registers what one or more operators stand for.

        The decorated function gets the inputs as Tensors in ONNX order (None where absent) and the
        attributes as keywords, and returns the output, or a tuple of outputs with None for those
        that it cannot give. It may raise `UnsupportedError` with a reason; the node's name is put
        before it.

        Args:
            *op_types: The operators.
            domain: Their domain.
            keep: Whether the operator stays in the forward pass, and only the backward pass
                computes what the definition says.
            quantizes: With ``keep``, whether the first output carries a cotangent though it is of
                integers.
            limits: What it does not do, for the table of operators.

        Example:
            >>> from ortops import op
            >>> table = Table()
            >>> @table.definition("ScaledTanh", domain="com.example")
            ... def scaled_tanh(x, *, alpha=1.0):
            ...     return op.Tanh(x * alpha)
            >>> sorted(table.rules["com.example", "ScaledTanh"].attributes)
            ['alpha']
        """

        def register(function: _F) -> _F:
            rule = Definition(function, _attributes(function), keep, quantizes, limits)
            return self._add(op_types, domain, rule, function)

        return register

    def _add(self, op_types: Sequence[str], domain: str, rule: AnyRule, function: _F) -> _F:
        for op_type in op_types:
            self.rules[domain, op_type] = rule
        return function


def _attributes(function: Function) -> frozenset[str]:
    """Returns the names of the attributes that a function takes: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


USER = Table()
"""The user's own rules."""

vjp = USER.vjp
"""Registers a rule of the user's own; see `Table.vjp`."""

_NEVER_QUANTIZED = frozenset(
    {
        ir.DataType.BFLOAT16,
        ir.DataType.BOOL,
        ir.DataType.DOUBLE,
        ir.DataType.FLOAT,
        ir.DataType.FLOAT16,
        ir.DataType.INT64,
        ir.DataType.STRING,
    }
)


class Rules:
    """What is known of operators: several tables, of which the first that has a rule decides.

    Args:
        *tables: The tables, the topmost first; ortops' own is the last.
    """

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def below(self, table: Table) -> Rules:
        """Returns these rules under another table."""
        return Rules(table, *self.tables)

    def find(self, node: ir.Node) -> AnyRule | None:
        """Returns the rule of a node, or None."""
        key = (node.domain, node.op_type)
        for table in self.tables:
            rule = table.rules.get(key)
            if rule is None or (isinstance(rule, Rule) and rule.when and not rule.when(node)):
                continue
            return rule
        return None

    def definition(self, node: ir.Node) -> Definition | None:
        """Returns what a node stands for, whatever rule it has; None where that is unknown."""
        key = (node.domain, node.op_type)
        found = (table.rules.get(key) for table in self.tables)
        return next((rule for rule in found if isinstance(rule, Definition)), None)

    def refusal(self, node: ir.Node) -> str | None:
        """Returns why a node has no rule, where that can be told."""
        key = (node.domain, node.op_type)
        return next((t.refusals[key] for t in self.tables if key in t.refusals), None)

    def is_overridden(self, node: ir.Node) -> bool:
        """Whether a rule of ortops' own has to give way to another one."""
        return any((node.domain, node.op_type) in table.rules for table in self.tables[:-1])

    def is_zero(self, node: ir.Node) -> bool:
        """Whether nothing flows through a node: its derivative is zero wherever it exists."""
        return isinstance(self.find(node), ZeroRule)

    def rearranges(self, node: ir.Node) -> bool:
        """Whether a node only moves elements, which may be quantized numbers."""
        key = (node.domain, node.op_type)
        return any(key in table.rearranging for table in self.tables)

    def is_quantized(self, value: ir.Value) -> bool:
        """Whether a value is what a rule with ``quantizes`` made, possibly in another order."""
        pending, seen = [value], {value}
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is None or value.dtype in _NEVER_QUANTIZED:
                continue
            rule = self.find(node)
            if isinstance(rule, Rule | Definition) and rule.quantizes and value is node.outputs[0]:
                return True
            if self.rearranges(node):
                new = {part for part in node.inputs if part is not None} - seen
                seen |= new
                pending += new
        return False

    def carries_cotangent(self, value: ir.Value) -> bool:
        """Whether a cotangent can flow through a value, as far as is known."""
        return is_float(value) or self.is_quantized(value)

    def active_values(self, nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
        """Returns the values to which a path leads from others along which a cotangent can flow.

        Args:
            nodes: Nodes in topological order.
            sources: The values to start from, which count too; what computes them is not followed.
        """
        reached = set(sources)
        for node in nodes:
            if any(value in reached for value in read_inputs(node)) and not self.is_zero(node):
                reached.update(value for value in node.outputs if self.carries_cotangent(value))
        return reached

    def ancestors(self, y: ir.Value) -> set[ir.Value]:
        """Returns the values from which a path leads to y along which a cotangent can flow."""
        found, pending = {y}, [y]
        while pending:
            node = pending.pop().producer()
            if node is None or self.is_zero(node):
                continue
            read = (value for value in read_inputs(node) if self.carries_cotangent(value))
            new = [value for value in read if value not in found]
            found.update(new)
            pending += new
        return found
