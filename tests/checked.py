"""What the tests of the rules check: which inputs of which operators, up to which order."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ortops.autodiff.registry import ZeroRule
from ortops.autodiff.rules.table import BUILT_IN

_ZERO = [key for key, rule in BUILT_IN.rules.items() if isinstance(rule, ZeroRule)]

ZERO_GRADIENT = {op for domain, op in _ZERO if not domain}
"""Operators of the standard domain whose derivative is zero."""

ZERO_ELSEWHERE = {key for key in _ZERO if key[0]}
"""Those of other domains, by (domain, operator)."""

RULES = {key: rule for key, rule in BUILT_IN.rules.items() if not isinstance(rule, ZeroRule)}
"""All other rules by (domain, operator)."""


@dataclass(frozen=True)
class Checked:
    """What tests check of an operator. Tables of cases say it themselves; a test that needs more
    than one node, or draws numbers, has one of these beside it.

    Attributes:
        op: The operator.
        orders: Up to which order.
        differentiated: The indices of the inputs.
        domain: The operator's domain.
    """

    op: str
    orders: int
    differentiated: Sequence[int]
    domain: str = ""


def checked() -> dict[tuple[str, str], Checked]:
    """Returns what is checked, by domain and operator, from the tables of tests/test_rules_*.py.

    A table is a list at the top of a module, with a name in capitals, of what has an ``op``,
    ``orders`` and ``differentiated``.
    """
    found: dict[tuple[str, str], Checked] = {}
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for name, table in vars(importlib.import_module(path.stem)).items():
            for case in _cases(table) if name.isupper() else ():
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
        for node in _nodes(model.graph)
        if (node.domain, node.op_type) not in BUILT_IN.rules
        and not _has_body(node.op_type, node.domain)
    }


def _has_body(op_type: str, domain: str) -> bool:
    """Whether ONNX defines an operator by other ones."""
    if not onnx.defs.has(op_type, domain):
        return False
    schema = onnx.defs.get_schema(op_type, domain=domain)
    return schema.has_function or schema.has_context_dependent_function


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
