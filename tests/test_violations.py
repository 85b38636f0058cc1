"""A test of a whole table says each row that is wrong."""

from __future__ import annotations

import pytest
from violations import all_violations


def checked_rows(seen: list[int]) -> None:
    with all_violations() as check:
        for number in range(5):
            with check(f"row {number}"):
                seen.append(number)
                assert number != 1, "one"
                if number == 2:
                    int("two")
                if number == 3:
                    pytest.fail("three")


def test_each_row_that_fails_is_named() -> None:
    seen: list[int] = []
    with pytest.raises(AssertionError) as raised:
        checked_rows(seen)
    assert seen == [0, 1, 2, 3, 4]
    lines = str(raised.value).splitlines()
    assert lines[0] == "3 violations"
    assert [line.split(",")[0] for line in lines[1:] if line.startswith("row")] == [
        "row 1",
        "row 2",
        "row 3",
    ]
    for said in (": one", ": ValueError: invalid literal", ": Failed: three"):
        assert said in str(raised.value)


def test_nothing_is_said_of_right_rows() -> None:
    with all_violations() as check, check("row"):
        assert True


def test_what_fails_outside_of_rows_is_raised() -> None:
    with pytest.raises(ValueError, match="outside"), all_violations():
        raise ValueError("outside")
