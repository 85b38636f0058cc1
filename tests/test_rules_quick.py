"""The quick suite has a case of each rule, in each form that tests check."""

from __future__ import annotations

import importlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from checked import by_case, checked, labels, quick
from dot_test import Case, normal

FORMS = ("static", "symbolic")


def test_every_operator_is_checked_quickly_to_the_second_order() -> None:
    found, missing = checked(quickly=True), []
    for key, all_of_it in checked().items():
        orders = found[key].orders if key in found else 0
        if orders < min(2, all_of_it.orders):
            missing.append(f"{'::'.join(filter(None, key))}: order {orders} of {all_of_it.orders}")
    assert missing == []


def test_every_operator_is_checked_quickly_in_every_form() -> None:
    forms: dict[bool, defaultdict[tuple[str, str], set[str]]] = {
        quickly: defaultdict(set) for quickly in (False, True)
    }
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for name, test in vars(importlib.import_module(path.stem)).items():
            marks = getattr(test, "pytestmark", []) if name.startswith("test_") else []
            cases, shapes = _parameters(marks, FORMS[:1])
            if name.endswith("symbolic_shapes"):
                shapes = FORMS[1:]
            for case, slow in cases:
                for quickly in (False, True):
                    if not (quickly and slow):
                        forms[quickly][case.domain, case.op].update(shapes)
    assert len(forms[False]) > 100
    missing = {
        "::".join(filter(None, key)): sorted(shapes - forms[True][key])
        for key, shapes in forms[False].items()
        if shapes - forms[True][key]
    }
    assert missing == {}


def _parameters(
    marks: list[pytest.Mark], shapes: tuple[str, ...]
) -> tuple[list[tuple[Any, bool]], tuple[str, ...]]:
    """Returns the cases of a test, each with whether it is slow, and the forms of their shapes."""
    cases = []
    all_slow = any(mark.name == "slow" for mark in marks)
    for mark in marks:
        if mark.name == "parametrize" and mark.args[0] == "symbolic":
            shapes = FORMS
        for value in mark.args[1] if mark.name == "parametrize" else ():
            values = value.values if hasattr(value, "values") and hasattr(value, "marks") else ()
            for case in values:
                if hasattr(case, "quick"):
                    slow = any(each.name == "slow" for each in value.marks)
                    cases.append((case, slow or all_slow))
    return cases, shapes


def some_cases() -> list[Case]:
    """Returns a table; at the top of the module, it would count as one of rules."""
    negated = Case("Neg", [normal(2)], name="a")
    return [negated, negated, Case("Exp", [normal(3)])]


def test_cases_by_name() -> None:
    assert labels(some_cases()) == ["Neg-a-2", "Neg-a-2#1", "Exp-3"]
    chosen = quick(some_cases(), "\n  Neg-a-2#1\n  Exp-3\n")
    assert [case.quick for case in chosen] == [False, True, True]
    (mark,) = [by_case(chosen).mark]
    assert [param.id for param in mark.args[1]] == labels(some_cases())
    slow = [[each.name for each in param.marks] for param in mark.args[1]]
    assert slow == [["slow"], [], []]


def test_a_name_of_no_case_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in the table: \\['Log-3'\\]"):
        quick(some_cases(), "Log-3")
