"""Writes the page of operators with a gradient, ortops/docs/operators.md.

The registry of rules determines how an operator is differentiated, the tables of cases in tests/
which inputs and orders are tested, and the schemas of onnx and onnxruntime the names.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import onnx
from checked import RULES, ZERO_ELSEWHERE, ZERO_GRADIENT, checked
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from ortops.graph.autodiff.registry import Definition, StructuralRule
from ortops.graph.autodiff.rules.table import BUILT_IN

PAGE = Path(__file__).parents[1] / "ortops" / "docs" / "operators.md"
OPSET = 26
DOMAINS = {
    "": "operator of the standard domain",
    "ai.onnx.ml": "operator of ai.onnx.ml",
    "com.microsoft": "operator of com.microsoft",
}
ORDERS = ("", "1", "1, 2", "1–3")


class Row(NamedTuple):
    """A row of the table."""

    op_type: str
    how: str
    inputs: str
    orders: int
    limits: str


def rows(domain: str) -> list[Row]:
    """Returns the rows of a domain's operators, by name."""
    tests = checked()
    found = []
    for key, rule in sorted(RULES.items(), key=lambda item: item[0]):
        if key[0] != domain:
            continue
        inputs = [] if key not in tests else _names(*key, tests[key].differentiated)
        if isinstance(rule, StructuralRule):
            inputs.append("captured values")
        found.append(
            Row(
                key[1],
                "definition" if isinstance(rule, Definition) else "rule",
                ", ".join(inputs),
                tests[key].orders if key in tests else 0,
                rule.limits,
            )
        )
    return found


def _names(domain: str, op_type: str, indices: list[int]) -> list[str]:
    """Returns the names of inputs in an operator's schema; the last one may be repeated."""
    names = [formal.name for formal in _schema(domain, op_type).inputs]
    return list(dict.fromkeys(names[min(index, len(names) - 1)] for index in indices))


def _schema(domain: str, op_type: str) -> Any:
    try:
        return onnx.defs.get_schema(op_type, OPSET, domain)
    except onnx.defs.SchemaError:  # an operator of onnxruntime
        return next(
            schema
            for schema in get_all_operator_schema()
            if (schema.domain, schema.name) == (domain, op_type)
        )


def page() -> str:
    """Returns the page: a summary and the tables."""
    by_domain = {domain: rows(domain) for domain in DOMAINS}
    everything = [row for found in by_domain.values() for row in found]
    second, third = (sum(row.orders >= order for row in everything) for order in (2, 3))
    return TEXT.format(
        count=len(everything),
        standard=len(by_domain[""]),
        second=second,
        third=third,
        zero=", ".join(sorted(ZERO_GRADIENT)),
        elsewhere=", ".join(op_type for _, op_type in sorted(ZERO_ELSEWHERE)),
        refused=", ".join(op_type for _, op_type in sorted(BUILT_IN.refusals)),
        tables="\n\n".join(map(_table, DOMAINS.values(), by_domain.values())),
    )


TEXT = """\
<!-- Written by scripts/operator_table.py. -->

# Operators with a gradient

{count} operators have a gradient, {standard} of them in the standard domain. Gradients are of any
order unless the table says otherwise. Tests check {second} operators to the second order and
{third} to the third, including all elementwise ones. Sizes may be unknown; if a rule needs a rank
that is unknown, an error names the tensor.

In the tables, "rule" means that ortops has a formula for the gradient. "definition" means that the
operator is replaced by simpler ones, which are then differentiated. "gradient to" lists the inputs
that get a gradient, and "orders" the orders that tests check.

These operators have a zero derivative wherever it exists: {zero}; and of ai.onnx.ml: {elsewhere}.

A gradient through these operators is rejected with an error: {refused}.

{tables}
"""


def _table(title: str, found: list[Row]) -> str:
    head = f"| {title} | how | gradient to | orders | limits |\n| --- | --- | --- | --- | --- |"
    lines = [
        f"| {row.op_type} | {row.how} | {row.inputs} | {ORDERS[row.orders]} | {row.limits} |"
        for row in found
    ]
    return "\n".join([head, *lines])


def main() -> int:
    """Writes the page, or with ``--check`` checks whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    options = parser.parse_args()
    wanted = page()
    if options.check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
