"""Registry of gradient rules and definitions by operator.

A `Table` is filled with decorators. `Rules` looks up a node in several tables in order: first
those of passes, then the user's, then the built-in one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

import onnx_ir as ir

from ortops.graph.edit import is_float, read_inputs
from ortops.graph.operators import REARRANGES
from ortops.graph.tensor import Tensor

Cotangents: TypeAlias = Tensor | tuple[Tensor | None, ...] | None
"""The return type of a rule: a cotangent or None for each input; a single one needs no tuple."""

Function: TypeAlias = Callable[..., Any]
Key: TypeAlias = tuple[str, str]
"""Domain and operator."""

_F = TypeVar("_F", bound=Function)


@dataclass(frozen=True)
class Rule:
    """A gradient rule.

    Attributes:
        function: ``(g, y, *inputs, **attributes)`` → cotangents of the inputs.
        elementwise: Whether inputs are broadcast to the output's shape, so that cotangents must be
            summed over the broadcast axes.
        needs: Indices of optional outputs that the rule reads; they are added to the forward node.
        quantizes: Whether the first output has a cotangent although it is integer: that of the real
            numbers before rounding.
        limits: Limitations, for the table of operators.
        when: A predicate of the nodes that the rule supports; for others the next rule is tried.
    """

    function: Function
    elementwise: bool = False
    needs: tuple[int, ...] = ()
    quantizes: bool = False
    limits: str = ""
    when: Callable[[ir.Node], bool] | None = None

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The names of the attributes that the rule supports."""
        return _attributes(self.function)


@dataclass(frozen=True)
class NestedRule(Rule):
    """A rule that differentiates nodes that it emits.

    Its function has an additional first parameter, the `Rules`.
    """


@dataclass(frozen=True)
class StructuralRule:
    """A rule for nodes with subgraphs, which works on the node itself.

    Attributes:
        function: ``(ortops.graph.autodiff.backward.Site)`` → cotangents by value, for values that
            the node reads.
        limits: Limitations, for the table of operators.
    """

    function: Function
    limits: str = ""


@dataclass(frozen=True)
class ZeroRule:
    """The derivative is exactly zero wherever it exists, so no cotangent is propagated."""


def _never(node: ir.Node) -> bool:
    return False


def _always(node: ir.Node) -> bool:
    return True


@dataclass(frozen=True)
class Definition:
    """The definition of an operator by other operators, which is differentiated instead.

    Attributes:
        function: ``(*inputs, **attributes)`` → the outputs, None for those that are not supported.
        keep: Whether the forward pass keeps a node, and only the backward pass computes the
            definition.
        after: With ``keep``: ``(y, *inputs, **attributes)`` → what the forward pass continues with
            in place of the first output y; None for y itself.
        gradient: With ``keep``: the function of a `NestedRule` that the backward pass applies in
            place of the definition's derivative; None for that.
        quantizes: With ``keep``: see `Rule`.
        limits: Limitations, for the table of operators.
    """

    function: Function
    keep: Callable[[ir.Node], bool] = _never
    after: Function | None = None
    gradient: Function | None = None
    quantizes: bool = False
    limits: str = ""

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The names of the attributes that the definition supports."""
        return _attributes(self.function)


AnyRule: TypeAlias = Rule | StructuralRule | ZeroRule | Definition


class Table:
    """Rules by operator. A new rule replaces an earlier one.

    Attributes:
        rules: The rules by (domain, operator).
        refusals: For operators without a rule, the reason and the remedy, if known.
    """

    def __init__(self) -> None:
        self.rules: dict[Key, AnyRule] = {}
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

        The decorated function is called with the cotangent ``g`` of the output and the output
        ``y`` (tuples for an operator that can have several outputs, with None for absent ones),
        then the inputs in ONNX order (None if absent), and the attributes as keyword arguments,
        whose defaults must be those of ONNX. It returns a cotangent or None for each input.

        Args:
            *op_types: The operators.
            domain: Their domain.
            elementwise: Whether to sum cotangents over broadcast axes.
            needs: Indices of optional outputs that the forward node must have.
            quantizes: Whether the first output has a cotangent although its type is integer.
            limits: Limitations, for the table of operators.
            when: A predicate of the nodes that the rule supports; by default, all nodes.

        Example:
            >>> table = Table()
            >>> @table.vjp("Cube", domain="com.example")
            ... def cube(g, y, x):
            ...     return 3 * x * x * g
            >>> table.rules["com.example", "Cube"].attributes
            frozenset()
        """
        return self._registers(
            lambda function: Rule(function, elementwise, tuple(needs), quantizes, limits, when),
            *op_types,
            domain=domain,
        )

    def nested_vjp(
        self, *op_types: str, domain: str = "", needs: Sequence[int] = (), limits: str = ""
    ) -> Callable[[_F], _F]:
        """Registers a rule that differentiates nodes that it emits; see `NestedRule` and `vjp`."""
        return self._registers(
            lambda function: NestedRule(function, needs=tuple(needs), limits=limits),
            *op_types,
            domain=domain,
        )

    def structural(self, op_type: str, *, limits: str = "") -> Callable[[_F], _F]:
        """Registers the rule of an operator with subgraphs; see `StructuralRule`."""
        return self._registers(lambda function: StructuralRule(function, limits), op_type)

    def zero(self, *op_types: str, domain: str = "") -> None:
        """Registers operators whose derivative is zero; see `ZeroRule`."""
        for op_type in op_types:
            self.rules[domain, op_type] = ZeroRule()

    def refuses(self, *op_types: str, domain: str = "", reason: str) -> None:
        """Registers the reason why operators have no rule, and the remedy; see `refusals`."""
        for op_type in op_types:
            self.refusals[domain, op_type] = reason

    def definition(
        self,
        *op_types: str,
        domain: str = "",
        keep: bool | Callable[[ir.Node], bool] = False,
        after: Function | None = None,
        gradient: Function | None = None,
        quantizes: bool = False,
        limits: str = "",
    ) -> Callable[[_F], _F]:
        """Registers the definition of one or more operators.

        The decorated function is called with the inputs as Tensors in ONNX order (None if absent)
        and the attributes as keyword arguments. It returns the output, or a tuple of outputs with
        None for unsupported ones. It may raise `UnsupportedError`; the node's name is prepended to
        the message.

        Args:
            *op_types: The operators.
            domain: Their domain.
            keep: Whether the forward pass keeps the operator, and only the backward pass computes
                the definition; or a predicate of the nodes that are kept.
            after: With ``keep``, ``(y, *inputs, **attributes)`` → what the forward pass continues
                with in place of the first output y. It must equal the definition's first output.
            gradient: With ``keep``, the function of a nested rule (see `nested_vjp`), for the
                backward pass to use in place of the definition's derivative.
            quantizes: With ``keep``, whether the first output has a cotangent although its type is
                integer.
            limits: Limitations, for the table of operators.

        Example:
            >>> from ortops import op
            >>> table = Table()
            >>> @table.definition("ScaledTanh", domain="com.example")
            ... def scaled_tanh(x, *, alpha=1.0):
            ...     return op.Tanh(x * alpha)
            >>> sorted(table.rules["com.example", "ScaledTanh"].attributes)
            ['alpha']
        """
        kept = keep if callable(keep) else _always if keep else _never
        return self._registers(
            lambda function: Definition(function, kept, after, gradient, quantizes, limits),
            *op_types,
            domain=domain,
        )

    def _registers(
        self, rule_of: Callable[[Function], AnyRule], *op_types: str, domain: str = ""
    ) -> Callable[[_F], _F]:
        """Returns a decorator that registers the rule made of a function for operators."""

        def register(function: _F) -> _F:
            rule = rule_of(function)
            self.rules.update(((domain, op_type), rule) for op_type in op_types)
            return function

        return register


def _attributes(function: Function) -> frozenset[str]:
    """Returns the names of the attributes that a function supports.

    These are its keyword-only parameters, and the keys of a TypedDict in
    ``**name: Unpack[TypedDict]``, with which several rules share attributes.
    """
    names = set()
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names.add(name)
        elif parameter.kind is parameter.VAR_KEYWORD and "Unpack" in str(parameter.annotation):
            (attributes,) = get_args(get_type_hints(inspect.unwrap(function))[name])
            names |= attributes.__annotations__.keys()
    return frozenset(names)


USER = Table()
"""The user's own rules."""

vjp = USER.vjp
"""Registers a custom gradient rule; see `Table.vjp`."""

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


def rearranges(node: ir.Node) -> bool:
    """Whether a node only moves elements, so that quantized tensors keep their cotangents."""
    return node.op_type in REARRANGES and not node.domain


class Rules:
    """Rules from several tables; the first table with a rule takes precedence.

    Args:
        *tables: The tables in order of precedence; the built-in one is last.
    """

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def below(self, table: Table) -> Rules:
        """Returns these rules with another table that takes precedence."""
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
        """Returns the definition of a node, even if it also has a rule; None if there is none."""
        key = (node.domain, node.op_type)
        found = (table.rules.get(key) for table in self.tables)
        return next((rule for rule in found if isinstance(rule, Definition)), None)

    def refusal(self, node: ir.Node) -> str | None:
        """Returns the reason why a node has no rule, if known."""
        key = (node.domain, node.op_type)
        return next((t.refusals[key] for t in self.tables if key in t.refusals), None)

    def is_overridden(self, node: ir.Node) -> bool:
        """Whether another rule takes precedence over the built-in one."""
        return any((node.domain, node.op_type) in table.rules for table in self.tables[:-1])

    def is_zero(self, node: ir.Node) -> bool:
        """Whether the derivative of a node is zero wherever it exists."""
        return isinstance(self.find(node), ZeroRule)

    def is_quantized(self, value: ir.Value) -> bool:
        """Whether a value is a quantized tensor, possibly rearranged."""
        pending, seen = [value], {value}
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is None or value.dtype in _NEVER_QUANTIZED:
                continue
            rule = self.find(node)
            if isinstance(rule, Rule | Definition) and rule.quantizes and value is node.outputs[0]:
                return True
            if rearranges(node):
                new = {part for part in node.inputs if part is not None} - seen
                seen |= new
                pending += new
        return False

    def carries_cotangent(self, value: ir.Value) -> bool:
        """Whether a value can have a cotangent, as far as is known."""
        return is_float(value) or self.is_quantized(value)

    def active_values(self, nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
        """Returns the values that depend on others through paths that propagate cotangents.

        Args:
            nodes: Nodes in topological order.
            sources: The values to start from, which are included.
        """
        reached = set(sources)
        for node in nodes:
            if any(value in reached for value in read_inputs(node)) and not self.is_zero(node):
                reached.update(value for value in node.outputs if self.carries_cotangent(value))
        return reached

    def ancestors(self, y: ir.Value, stop: Callable[[ir.Node], bool] = _never) -> set[ir.Value]:
        """Returns the values that y depends on through paths that propagate cotangents.

        Args:
            y: The value.
            stop: Tells further nodes that propagate none.
        """
        found, pending = {y}, [y]
        while pending:
            node = pending.pop().producer()
            if node is None or self.is_zero(node) or stop(node):
                continue
            read = (value for value in read_inputs(node) if self.carries_cotangent(value))
            new = [value for value in read if value not in found]
            found.update(new)
            pending += new
        return found
