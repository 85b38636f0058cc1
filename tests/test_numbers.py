"""Numbers of users: what another type holds of them is told by Python's integers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from violations import all_violations

from ortops._common.numbers import cast_numbers, integer

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
SMALL = ["int4", "uint4"]
NUMBERS = [
    *(0, 1, 2, 7, 8, 15, 16, 127, 128, 255, 256, 300, -1, -8, -9, -128, -129, -300, 32768, 65536),
    *(65504, 65520, 70000, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(1.5, -0.5, 0.1, 1e-60, 448.0, 464.0, 480.0, 57344.0, 61440.0, 61500.0, 1e38, 3.5e38, 1e300),
    *(math.inf, -math.inf, math.nan),
]


def type_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def limits(name: str) -> tuple[int, int]:
    if name == "bool":
        return 0, 1
    bits = int(name.lstrip("uint"))
    return (0, 2**bits - 1) if name[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def numbers_of(name: str) -> list[Any]:
    """Returns numbers that a type has, as Python's: integers it holds, and what floats round to."""
    if name in FLOATS:
        with np.errstate(all="ignore"):
            return [float(np.float64(each).astype(type_of(name))) for each in NUMBERS]
    low, high = limits(name)
    return [each for each in NUMBERS if isinstance(each, int) and low <= each <= high]


def test_what_a_type_does_not_hold_is_found() -> None:
    types = ["bool", *INTEGERS, *SMALL, *FLOATS]
    with all_violations() as check:
        for source, target in itertools.product(types, types):
            for number in numbers_of(source):
                with check(f"{number!r} from {source} to {target}"):
                    is_found_or_held(number, source, target)


def is_found_or_held(number: Any, source: str, target: str) -> None:
    array = np.zeros(2, type_of(source))
    array[1] = number
    result, lost = cast_numbers(array, type_of(target))
    assert result.dtype == type_of(target)
    if target in FLOATS:
        held = not math.isfinite(number) or math.isfinite(float(result[1]))
    else:
        low, high = limits(target)
        held = math.isfinite(number) and number == int(number) and low <= number <= high
        assert not held or int(result[1]) == number
    assert (lost is None) == held
    assert lost is None or float(lost) == float(number) or math.isnan(number)


def test_imaginary_parts_are_not_dropped() -> None:
    array = np.array([1 + 0j, 2 + 1j])
    assert cast_numbers(array, np.dtype(np.float32))[1] == 2 + 1j
    result, lost = cast_numbers(array[:1], np.dtype(np.int8))
    assert (result.tolist(), lost) == ([1], None)
    result, lost = cast_numbers(np.array([1, 2]), np.dtype(np.complex64))
    assert (result.tolist(), lost) == ([1, 2], None)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_shapes_stay(shape: tuple[int, ...]) -> None:
    result, lost = cast_numbers(np.ones(shape), np.dtype(np.int8))
    assert (result.shape, lost) == (shape, None)


@pytest.mark.parametrize("kind", [int, np.uint8, np.int64, lambda n: np.array(n, np.int8)])
def test_integers_become_those_of_python(kind: Any) -> None:
    found = integer(kind(100))
    assert type(found) is int
    assert found == 100


@pytest.mark.parametrize(
    "value", [True, np.True_, 2.0, np.float32(2), "2", None, np.array([2]), np.array([2, 3]), [2]]
)
def test_what_is_no_integer(value: Any) -> None:
    assert integer(value) is None
