"""What the tests of the rules check: which inputs of which operators, up to which order."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import onnx
import pytest

from ortops.graph.autodiff.registry import ZeroRule
from ortops.graph.autodiff.rules.table import BUILT_IN

_ZERO = [key for key, rule in BUILT_IN.rules.items() if isinstance(rule, ZeroRule)]

ZERO_GRADIENT = {op for domain, op in _ZERO if not domain}
"""Operators of the standard domain whose derivative is zero."""

ZERO_ELSEWHERE = {key for key in _ZERO if key[0]}
"""Those of other domains, by (domain, operator)."""

RULES = {key: rule for key, rule in BUILT_IN.rules.items() if not isinstance(rule, ZeroRule)}
"""All other rules by (domain, operator)."""


_C = TypeVar("_C")


def quick(cases: Sequence[_C], names: str) -> list[_C]:
    """Returns the cases of a table, of which only some are in the quick suite; see `by_case`.

    These are the first ones to kill a mutant of the rule, and at least one of each operator.

    Args:
        cases: The cases, dataclasses with a field ``quick``.
        names: The names of those in the quick suite as `labels` has them, one on each line.

    Raises:
        ValueError: A name is not that of a case.
    """
    wanted = {line.strip() for line in names.splitlines() if line.strip()}
    found = labels(cases)
    if unknown := sorted(wanted - set(found)):
        raise ValueError(f"not in the table: {unknown}")
    return [
        replace(case, quick=label in wanted)  # type: ignore[type-var]
        for case, label in zip(cases, found, strict=True)
    ]


def labels(cases: Sequence[Any]) -> list[str]:
    """Returns the names of cases, with the number of earlier ones behind the same name."""
    before: Counter[str] = Counter()
    found = []
    for name in map(str, cases):
        found.append(f"{name}#{before[name]}" if before[name] else name)
        before[name] += 1
    return found


def by_case(cases: Sequence[Any], argument: str = "case") -> pytest.MarkDecorator:
    """Parametrizes a test by cases; those that are not quick are marked slow."""
    return pytest.mark.parametrize(
        argument,
        [
            pytest.param(case, id=label, marks=() if case.quick else pytest.mark.slow)
            for case, label in zip(cases, labels(cases), strict=True)
        ],
    )


@dataclass(frozen=True)
class Checked:
    """What tests check of an operator. Tables of cases say it themselves; a test that needs more
    than one node, or draws numbers, has one of these beside it.

    Attributes:
        op: The operator.
        orders: Up to which order.
        differentiated: The indices of the inputs.
        domain: The operator's domain.
        quick: Whether the quick suite has these tests.
    """

    op: str
    orders: int
    differentiated: Sequence[int]
    domain: str = ""
    quick: bool = True


def checked(*, quickly: bool = False) -> dict[tuple[str, str], Checked]:
    """Returns what is checked, by domain and operator, from the tables of tests/test_rules_*.py.

    A table is a list at the top of a module, with a name in capitals, of what has an ``op``,
    ``orders`` and ``differentiated``.

    Args:
        quickly: Whether only what the quick suite checks counts.
    """
    found: dict[tuple[str, str], Checked] = {}
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for name, table in vars(importlib.import_module(path.stem)).items():
            for case in _cases(table) if name.isupper() else ():
                if quickly and not case.quick:
                    continue
                key = case.domain, case.op
                before = found.get(key, Checked(case.op, 0, (), case.domain))
                found[key] = Checked(
                    case.op,
                    max(before.orders, case.orders),
                    sorted({*before.differentiated, *case.differentiated}),
                    case.domain,
                )
    return found


def _cases(table: Any) -> Iterator[Any]:
    if isinstance(table, list | tuple):
        for item in table:
            yield from _cases(item)
    elif all(hasattr(table, name) for name in ("op", "orders", "differentiated", "domain")):
        yield table


def without_gradient(model: onnx.ModelProto) -> set[str]:
    """Returns the operators of a model, graphs inside nodes included, that no rule takes."""
    return {
        node.op_type
        for node in nodes_within(model.graph.node)
        if (node.domain, node.op_type) not in BUILT_IN.rules
        and not _has_body(node.op_type, node.domain)
    }


def _has_body(op_type: str, domain: str) -> bool:
    """Whether ONNX defines an operator by other ones."""
    if not onnx.defs.has(op_type, domain):
        return False
    schema = onnx.defs.get_schema(op_type, domain=domain)
    return schema.has_function or schema.has_context_dependent_function


def nodes_within(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, and those in the graphs inside them."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from nodes_within(inner.node)
