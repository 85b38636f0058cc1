"""Finds sub-graphs by formulas, which are written like those that they find.

    x = Variable("x")
    gelu = product(0.5, x, 1 + form.Erf(product(math.sqrt(0.5), x)))
    for found in Search(gelu, value):
        found[x]

The same object in a formula stands for the same value. The operands of sums and products are tried
in both orders, and a `product` is found in any grouping. A number matches a constant of one element
if it does not add axes to what it is combined with: one of shape [1, 1, 1] makes a matrix a stack.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.graph.constants import constant_number
from ortops.graph.edit import attribute_values, describe, has_one_reader

Operand: TypeAlias = "Form | float | EllipsisType"

_COMMUTATIVE = frozenset({"Add", "Mul"})
_ARITHMETIC = frozenset({"Add", "Div", "Mul", "Neg", "Pow", "Sub"})
"""Operators that are everywhere, so that finding them tells nothing."""

_MOST_PARTS = 32
"""Parts of a product that are read, and nodes that are passed; more would be no formula."""

_TOLERANCE = 1e-6
"""Of numbers that float32 rounds, and of products of numbers."""


class Form:
    """What a value may be. Arithmetic with forms and numbers makes forms of nodes.

    Attributes:
        roots: The operators that a node which computes such a value may have.
    """

    roots: frozenset[str] = frozenset()

    def __add__(self, other: Operand) -> Form:
        return Call("Add", self, other)

    def __radd__(self, other: Operand) -> Form:
        return Call("Add", other, self)

    def __sub__(self, other: Operand) -> Form:
        return Call("Sub", self, other)

    def __rsub__(self, other: Operand) -> Form:
        return Call("Sub", other, self)

    def __mul__(self, other: Operand) -> Form:
        return Call("Mul", self, other)

    def __rmul__(self, other: Operand) -> Form:
        return Call("Mul", other, self)

    def __truediv__(self, other: Operand) -> Form:
        return Call("Div", self, other)

    def __rtruediv__(self, other: Operand) -> Form:
        return Call("Div", other, self)

    def __pow__(self, other: Operand) -> Form:
        return Call("Pow", self, other)

    def __neg__(self) -> Form:
        return Call("Neg", self)

    def __or__(self, other: Form) -> Form:
        return Either(self, other)

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """Yields the ways in which a value has this form, each an extension of what was found."""
        raise NotImplementedError


class Variable(Form):
    """Any value.

    Args:
        what: What it is, for the reasons of refusals.
        when: Whether a value may be it; by default, all may.
    """

    def __init__(self, what: str, when: Callable[[ir.Value], bool] | None = None) -> None:
        self._what, self._when = what, when

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        if self._when is None or self._when(value):
            yield from found.bind(self, value, self._what, search)
        else:
            search.miss(found, f"'{value.name}' is not {self._what}")


class Number(Form):
    """A constant of one element.

    Args:
        number: The number; any by default.
        when: Which numbers it may be.
    """

    def __init__(
        self, number: float | None = None, when: Callable[[float], bool] | None = None
    ) -> None:
        self._number, self._when = number, when

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        number = constant_number(value)
        if number is None:
            wanted = "a number" if self._number is None else f"the number {self._number:.9g}"
            search.miss(found, f"'{value.name}' is not {wanted}")
        elif self._number is not None and not is_near(number, self._number):
            search.miss(found, f"constant {number:.9g} is not {self._number:.9g}")
        elif self._when is not None and not self._when(number):
            search.miss(found, f"constant {number:.9g} is out of range")
        else:
            yield from found.bind(self, value, "the same number", search)


def is_near(number: float, other: float) -> bool:
    """Whether a number is another one, which float32 may have rounded."""
    return number == other or (
        float(np.float32(other)) != other and math.isclose(number, other, rel_tol=_TOLERANCE)
    )


class Call(Form):
    """The first output of a node of an operator.

    Args:
        op_type: The operator.
        *operands: Its inputs; after an Ellipsis, it may have any.
        **attributes: Attributes that must have their default values, which are given.
    """

    def __init__(self, op_type: str, *operands: Operand, **attributes: Any) -> None:
        self.op_type, self._attributes, self.roots = op_type, attributes, frozenset({op_type})
        self._open = bool(operands) and operands[-1] is ...
        given = [each for each in operands if not isinstance(each, EllipsisType)]
        self._operands = [each if isinstance(each, Form) else Number(each) for each in given]

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        if self in found.values:
            yield from found.bind(self, value, f"the same {self.op_type}", search)
            return
        node = search.node_of(value, found, self.op_type)
        if node is None:
            return
        now = found.with_node(self, node)
        inputs = list(node.inputs)
        values = attribute_values(node)
        changed = [
            n for n, default in self._attributes.items() if values.get(n, default) != default
        ]
        if changed:
            search.miss(now, f"its attribute {changed[0]} is {values[changed[0]]!r}")
        elif not (self._open or len(self._operands) == len(inputs)):
            search.miss(now, f"it has {len(inputs)} inputs, not {len(self._operands)}")
        elif None not in inputs[: len(self._operands)]:
            yield from self._find_operands(inputs, now, search)
            if self.op_type in _COMMUTATIVE:
                yield from self._find_operands(inputs[::-1], now, search)

    def _find_operands(
        self, inputs: Sequence[ir.Value | None], found: Found, search: Search
    ) -> Iterator[Found]:
        if self.op_type in _ARITHMETIC and len(inputs) == 2:
            for value, other in (inputs, inputs[::-1]):
                assert value is not None
                if adds_axes(value, other) and constant_number(value) is not None:
                    search.miss(found, f"constant of shape {value.shape} adds axes")
                    return
        ways = iter((found,))
        for form_, value in zip(self._operands, inputs, strict=False):
            assert value is not None
            ways = _chain(ways, form_, value, search)
        yield from ways


def _chain(
    ways: Iterator[Found], operand: Form, value: ir.Value, search: Search
) -> Iterator[Found]:
    for found in ways:
        yield from operand.find(value, found, search)


def adds_axes(value: ir.Value, other: ir.Value | None) -> bool:
    """Whether a value has more axes than another one, as far as is known."""
    if value.shape is None or other is None or other.shape is None:
        return False
    return len(value.shape) > len(other.shape)


class Either(Form):
    """One of several forms."""

    def __init__(self, *forms: Form) -> None:
        self._forms, self.roots = forms, frozenset[str]().union(*(each.roots for each in forms))

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        for each in self._forms:
            for way in each.find(value, found, search):
                yield from way.bind(self, value, "the same", search)


class Behind(Form):
    """A form behind nodes that may be there or not.

    Args:
        operand: The form.
        before: Returns the value before such a node; None if a value has no such node.
    """

    def __init__(self, operand: Form, before: Callable[[ir.Value], ir.Value | None]) -> None:
        self._operand, self._before, self.roots = operand, before, operand.roots

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        end, passed = value, list[ir.Node]()
        for _ in range(_MOST_PARTS):
            node, before = end.producer(), self._before(end)
            if node is None or before is None:
                break
            passed.append(node)
            end = before
        for way in self._operand.find(end, Found(found.values, (*found.nodes, *passed)), search):
            yield from way.bind(self, value, "the same", search)


class Product(Form):
    """A number times some factors, in any grouping, with quotients and powers; see `product`."""

    def __init__(self, number: float, factors: Sequence[Form]) -> None:
        self._number, self._factors = number, Counter(factors)
        self.roots = frozenset({"Div", "Mul"})

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        number, factors, nodes = search.factors_of(value)
        if sorted(factors.values()) != sorted(self._factors.values()):
            many = f"{self._number:.9g} and {len(self._factors)} factors"
            search.miss(found, f"'{value.name}' is not the product of {many}")
        elif not math.isclose(number, self._number, rel_tol=_TOLERANCE):
            search.miss(found, f"constant factor {number:.9g} is not {self._number:.9g}", 1)
        else:
            ends = found.with_nodes(self, value, nodes)
            yield from _assigned(list(self._factors.items()), factors, ends, search)


def _assigned(
    forms: Sequence[tuple[Form, int]], factors: Mapping[ir.Value, int], found: Found, search: Search
) -> Iterator[Found]:
    """Yields the ways in which each of some factors has one of some forms."""
    if not forms:
        yield found
        return
    (first, power), *rest = forms
    for value, count in factors.items():
        if count == power:
            left = {each: n for each, n in factors.items() if each is not value}
            for way in first.find(value, found, search):
                yield from _assigned(rest, left, way, search)


class _Kept(Form):
    """See `kept`."""

    def __init__(self, operand: Form) -> None:
        self._operand = operand

    def find(self, value: ir.Value, found: Found, search: Search) -> Iterator[Found]:
        """See `Form`."""
        for way in self._operand.find(value, Found(found.values, ()), search):
            yield from Found(way.values, found.nodes).bind(self, value, "the same", search)


def kept(operand: Form) -> Form:
    """Returns a form whose nodes stay, so that others may read them."""
    return _Kept(operand)


def product(number: float, *factors: Form) -> Form:
    """Returns the form of a number times some factors; powers repeat a factor."""
    return Product(number, factors)


def is_last_axis(axes: ir.Value, x: ir.Value) -> bool:
    """Whether the axes of a reduction are the last one of a tensor of known rank."""
    number = constant_number(axes)
    return number is not None and x.shape is not None and number in (-1, len(x.shape) - 1)


class _Forms:
    """Makes the form of a node: ``form.<Operator>(...)``; see `Call`."""

    def __getattr__(self, op_type: str) -> Callable[..., Form]:
        return functools.partial(Call, op_type)


form = _Forms()


class Found:
    """What a search has found.

    Attributes:
        values: The values, by form.
        nodes: The nodes, and how many of them are not only arithmetic.
    """

    def __init__(self, values: Mapping[Form, ir.Value], nodes: Sequence[ir.Node]) -> None:
        self.values, self.nodes = values, nodes

    def __getitem__(self, key: Form) -> ir.Value:
        return self.values[key]

    def __contains__(self, key: Form) -> bool:
        return key in self.values

    def number(self, key: Form) -> float:
        """Returns the number that was found."""
        number = constant_number(self[key])
        assert number is not None
        return number

    def node(self, key: Form) -> ir.Node:
        """Returns the node of a form."""
        node = self[key].producer()
        assert node is not None
        return node

    def bind(self, key: Form, value: ir.Value, what: str, search: Search) -> Iterator[Found]:
        """Yields this and a value, unless the form stands for another value already."""
        known = self.values.get(key, value)
        if known is value:
            yield Found({**self.values, key: value}, self.nodes)
        else:
            search.miss(self, f"'{value.name}' is not {what} '{known.name}'")

    def with_node(self, key: Form, node: ir.Node) -> Found:
        """Returns this and a node."""
        return self.with_nodes(key, node.outputs[0], [node])

    def with_nodes(self, key: Form, value: ir.Value, nodes: Sequence[ir.Node]) -> Found:
        """Returns this and a value that some nodes compute."""
        return Found({**self.values, key: value}, (*self.nodes, *nodes))


class Search:
    """The ways in which a value has a form.

    Args:
        pattern: The form.
        value: The value.
        removing: Whether what is found is replaced, so that nothing else may read it, and all of it
            must be in the graph of the value.

    Attributes:
        refusal: Why the furthest way that failed did; empty if none came further than to
            arithmetic.
    """

    def __init__(self, pattern: Form, value: ir.Value, *, removing: bool = True) -> None:
        self._pattern, self._value, self._removing = pattern, value, removing
        self._reach = 0
        self.refusal = ""

    def __iter__(self) -> Iterator[Found]:
        for found in self._pattern.find(self._value, Found({}, ()), self):
            if not self._removing or not self._is_shared(found):
                yield found

    def miss(self, found: Found, why: str, further: int = 0, at: ir.Node | None = None) -> None:
        """Notes why a way failed, if it came further than the others, beyond mere arithmetic."""
        reach = len(found.nodes) + further
        if reach > self._reach and any(n.op_type not in _ARITHMETIC for n in found.nodes[1:]):
            self._reach, self.refusal = reach, f"{describe(at or found.nodes[-1])}: {why}"

    def node_of(self, value: ir.Value, found: Found, op_type: str) -> ir.Node | None:
        """Returns the node of an operator that computes a value, or None."""
        node = value.producer()
        if node is None or (node.domain, node.op_type) != ("", op_type):
            made = "no result of a node" if node is None else f"the result of {node.op_type}"
            self.miss(found, f"'{value.name}' is {made}, not of {op_type}")
            return None
        if self._removing and node.graph is not _graph(self._value):
            self.miss(found, f"'{value.name}' is computed outside of the body")
            return None
        return node

    def factors_of(self, value: ir.Value) -> tuple[float, Counter[ir.Value], list[ir.Node]]:
        """Splits a value into a number, and the power of each factor.

        What others read, adds axes, or has too many parts, is a factor of its own.

        Returns:
            Both, and the nodes that multiply them.
        """
        number, factors, nodes = 1.0, Counter[ir.Value](), list[ir.Node]()
        pending = [value]
        for _ in range(_MOST_PARTS):
            if not pending:
                return number, factors, nodes
            current = pending.pop()
            known = constant_number(current)
            node = None if known is not None else self._multiplying(current)
            if known is not None:
                number *= known
            elif node is None:
                factors[current] += 1
            else:
                nodes.append(node)
                first, second = (each for each in node.inputs if each is not None)
                by = constant_number(second)
                if node.op_type == "Mul" or by is None:
                    pending += [second, first]
                elif node.op_type == "Div":
                    number /= by
                    pending.append(first)
                else:
                    factors[first] += int(by)
        return 1.0, Counter([value]), []

    def _multiplying(self, value: ir.Value) -> ir.Node | None:
        """Returns the node that multiplies others to a value, which only the formula reads."""
        node = value.producer()
        if node is None or node.domain or node.op_type not in ("Div", "Mul", "Pow"):
            return None
        if value is not self._value and not has_one_reader(value):
            return None
        if None in node.inputs or (self._removing and node.graph is not _graph(self._value)):
            return None
        first, second = (each for each in node.inputs if each is not None)
        for one, other in ((first, second), (second, first)):
            if adds_axes(one, other) and constant_number(one) is not None:
                return None
        by = None if node.op_type == "Mul" else constant_number(second)
        fits = {"Mul": True, "Div": bool(by), "Pow": by in (2, 3)}
        return node if fits[node.op_type] else None

    def _is_shared(self, found: Found) -> bool:
        """Whether something else reads what was found, so that it must stay."""
        nodes = set(found.nodes)
        for node in found.nodes:
            for value in node.outputs:
                if value is self._value:
                    continue
                others = [user for user, _ in value.uses() if user not in nodes]
                if others or value.is_graph_output():
                    reader = f"{describe(others[0])} reads it, too" if others else "it is an output"
                    self.miss(found, reader, at=node)
                    return True
        return False


def _graph(value: ir.Value) -> Any:
    node = value.producer()
    return None if node is None else node.graph
