"""What rules emit is computed alike by onnxruntime's optimizer and without it.

The optimizer has faults (`ortops.graph.faults`); a rule whose form of nodes meets one is wrong only
there. The suite compares a case of each operator, `./scripts/test --soak` all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import SOAK
from dot_test import Case, differences_of_levels
from violations import all_violations

from ortops.errors import UnsupportedError


def cases(table: Any) -> Iterator[Case]:
    if isinstance(table, Case):
        yield table
    elif isinstance(table, list | tuple):
        for each in table:
            yield from cases(each)


def all_cases() -> list[Case]:
    tables = [
        table
        for path in sorted(Path(__file__).parents[1].glob("test_rules_*.py"))
        for name, table in vars(importlib.import_module(path.stem)).items()
        if name.isupper()
    ]
    return list(cases(tables))


@pytest.mark.slow
def test_the_optimizer_does_not_change_derivatives() -> None:
    every = all_cases()
    first = {(case.domain, case.op): case for case in reversed(every)}
    assert len(first) > 100
    with all_violations() as check:
        for case in every if SOAK > 1 else first.values():
            for symbolic in (False, True):
                with check(f"{case}, symbolic={symbolic}"):
                    try:
                        differences = differences_of_levels(case, symbolic=symbolic)
                    except UnsupportedError:  # refused cases are in the tables, too
                        continue
                    else:
                        assert not differences
