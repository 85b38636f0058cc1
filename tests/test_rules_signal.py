"""Fourier transforms against differences of onnx's reference implementation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from checked import by_case, quick
from dot_test import Case, check, normal


def scalar(number: int) -> np.ndarray:
    return np.array(number, np.int64)


def dft_cases() -> Iterator[Case]:
    rest: dict[str, Any] = {"orders": 2, "epsilon": 1, "reference": True}
    for size in (6, 5):
        real, complex_ = normal(2, size, 3, 1), normal(2, size, 3, 2)
        half = normal(2, size // 2 + 1, 3, 2)
        for length in (None, 4, 7, 8):
            given = None if length is None else scalar(length)
            for inverse in (0, 1):
                name = f"{size}-{length}-{'inverse' if inverse else 'forward'}"
                attributes = {"inverse": inverse}
                yield Case(
                    "DFT", [complex_, given, scalar(1)], attributes, (1, 2), name=name, **rest
                )
            yield Case(
                "DFT", [real, given, scalar(-3)], {}, (1, 2), name=f"{size}-{length}-real", **rest
            )
            yield Case(
                "DFT",
                [real, given, scalar(1)],
                {"onesided": 1},
                (1, 2),
                name=f"{size}-{length}-onesided",
                **rest,
            )
            yield Case(
                "DFT",
                [half, given, scalar(1)],
                {"onesided": 1, "inverse": 1},
                (1, 2),
                name=f"{size}-{length}-real-inverse",
                **rest,
            )
    yield Case("DFT", [normal(2, 3, 5, 2)], name="last-axis", **rest)
    # Length and axis that only a run can tell.
    for attributes in ({}, {"inverse": 1}, {"onesided": 1, "inverse": 1}):
        for length in (4, 7):
            inputs = [normal(2, 5, 3, 2), scalar(length), scalar(1)]
            name = f"fed-{length}-{len(attributes)}"
            yield Case("DFT", inputs, attributes, name=name, epsilon=1, reference=True)


def stft_cases() -> Iterator[Case]:
    rest: dict[str, Any] = {"orders": 2, "reference": True}
    real, complex_, window = normal(2, 11, 1), normal(2, 11, 2), normal(4, seed=1)
    for constant in ((1, 3), ()):
        name = "constant" if constant else "fed"
        for onesided in (0, 1):
            attributes = {"onesided": onesided}
            inputs = [real, scalar(3), window, scalar(4)]
            yield Case("STFT", inputs, attributes, constant, name=f"{name}-{onesided}", **rest)
        yield Case(
            "STFT", [complex_, scalar(2), window], {"onesided": 0}, constant[:1], name=name, **rest
        )
        yield Case(
            "STFT", [real, scalar(2), None, scalar(4)], {}, constant, name=f"{name}-plain", **rest
        )


CASES = [*dft_cases(), *stft_cases()]
CASES = quick(
    CASES,
    """
    DFT-6-4-real-inverse-2x4x3x2__
    DFT-5-7-onesided-2x5x3x1__
    DFT-5-7-inverse-2x5x3x2__
    STFT-constant-0-2x11x1__4_
    STFT-constant-2x11x2__4
    STFT-fed-0-2x11x1__4_
    STFT-fed-2x11x2__4
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(8)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
