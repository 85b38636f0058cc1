"""Checks of arguments: what is returned, and each message."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortops
from ortops._common import arguments
from ortops._common.optional import optional_module


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers_become_ints_of_python(value: Any) -> None:
    found = arguments.whole_number("epochs", value, minimum=3)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [2, -1, 3.0, True, "3", None, np.array([3]), math.nan])
def test_other_values_are_no_integers(value: Any) -> None:
    with pytest.raises(ortops.ArgumentError) as error:
        arguments.whole_number("epochs", value, minimum=3)
    assert str(error.value) == f"epochs must be an integer >= 3, got {value!r}"


def test_integers_may_have_no_bound() -> None:
    assert arguments.whole_number("seed", -5) == -5
    with pytest.raises(ortops.ArgumentError, match=r"^seed must be an integer, got 0\.5$"):
        arguments.whole_number("seed", 0.5)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), np.int64(0)])
def test_numbers_in_range_become_floats(value: Any) -> None:
    found = arguments.number("ema_decay", value, minimum=0, below=1)
    assert found == value
    assert type(found) is float


@pytest.mark.parametrize("value", [1, -0.1, math.nan, math.inf, "0.5", None, True, 10**400])
def test_other_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ortops.ArgumentError) as error:
        arguments.number("ema_decay", value, minimum=0, below=1)
    text = f"{value!r:.80}"
    assert str(error.value) == f"ema_decay must be a finite number >= 0 and < 1, got {text}"


def test_the_other_bounds_are_named_too() -> None:
    with pytest.raises(ValueError, match="must be a finite number > 0 and <= 2, got 0"):
        arguments.number("rate", 0, above=0, maximum=2)
    with pytest.raises(ValueError, match="rate must be a finite number, got inf"):
        arguments.number("rate", math.inf)


def test_booleans_and_choices() -> None:
    assert arguments.boolean("shuffle", np.True_) is True
    with pytest.raises(ortops.ArgumentError, match="shuffle must be True or False, got 1"):
        arguments.boolean("shuffle", 1)
    assert arguments.choice("mode", "min", ["min", "max", "auto"]) == "min"
    with pytest.raises(ortops.ArgumentError, match="mode must be 'min', 'max' or 'auto', got 3"):
        arguments.choice("mode", 3, ["min", "max", "auto"])
    with pytest.raises(ortops.ArgumentError, match="mode must be 'min', got"):
        arguments.choice("mode", np.zeros(2), ["min"])


def test_functions() -> None:
    assert arguments.function("reduce", len) is len
    with pytest.raises(ortops.ArgumentError, match="reduce must be a function, got 'len'"):
        arguments.function("reduce", "len")


def test_a_package_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_package.py").write_text("raise OSError('no library libx')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ortops.OrtopsError) as found:
        optional_module("Plot", "broken_package", "plot", "broken-package", "draw by hand")
    assert str(found.value) == (
        "Plot needs broken-package, which cannot be imported (no library libx); pip install "
        "ortops[plot], or draw by hand"
    )
