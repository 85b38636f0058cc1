"""Rules of operators that sample images, against differences, expected values and PyTorch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from dot_test import DOMAIN, Case, check, normal, uniform
from onnx import helper

import ortops

SHAPES = {4: ((2, 3, 4, 5), (2, 3, 4, 2)), 5: ((2, 3, 3, 4, 5), (2, 2, 3, 2, 3))}


def grid(case_rank: int, mode: str, padding: str, align_corners: int, orders: int = 1) -> Case:
    """Coordinates in and around the image; their grid does not meet the elements'."""
    x, coordinates = SHAPES[case_rank]
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align_corners}
    return Case(
        "GridSample",
        [normal(*x), uniform(-1.6, 1.6, *coordinates, seed=1)],
        attributes,
        only=[0] if mode == "nearest" else None,
        orders=orders,
        epsilon=1e-6,
        rtol=1e-6,
        name=f"{mode}_{padding}_{align_corners}",
    )


GRID = [
    grid(rank, mode, padding, corners, orders=2 if rank == 4 else 1)
    for rank, mode, padding, corners in itertools.product(
        (4, 5), ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
    if (rank, mode) != (5, "cubic")
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("given", GRID, ids=str)
def test_dot(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


UNIT = {"epsilon": 1.0, "rtol": 3e-6}
OTHERS = [
    *(
        Case("AffineGrid", [normal(*theta), np.array(size)], {"align_corners": corners},
             constant=[1], orders=2, epsilon=1.0)
        for theta, size in (((2, 2, 3), [2, 3, 4, 5]), ((2, 3, 4), [2, 1, 2, 3, 4]),
                            ((1, 2, 3), [1, 3, 1, 4]))
        for corners in (0, 1)
    ),
    Case("Col2Im", [normal(2, 8, 9, dtype=np.float32), np.array([4, 4]), np.array([2, 2])],
         constant=[1, 2], orders=2, name="plain", **UNIT),
    Case("Col2Im", [normal(2, 12, 12, dtype=np.float32), np.array([5, 6]), np.array([2, 3])],
         {"strides": [2, 2], "pads": [1, 0, 2, 2]}, constant=[1, 2], name="strides", **UNIT),
    Case("Col2Im", [normal(2, 12, 4, dtype=np.float32), np.array([5, 6]), np.array([2, 3])],
         {"dilations": [3, 2]}, constant=[1, 2], name="dilations", **UNIT),
    Case("Col2Im", [normal(1, 16, 12, dtype=np.float32), np.array([3, 4, 3]),
                    np.array([2, 2, 2])], constant=[1, 2], name="3d", **UNIT),
    Case("Col2Im", [normal(2, 6, 4, dtype=np.float32), np.array([6]), np.array([3])],
         constant=[1, 2], name="1d", **UNIT),
]  # fmt: skip


def deform(name: str, *, batch: int = 2, channels: int = 4, size: tuple[int, int] = (5, 6),
           filters: int = 4, kernel: tuple[int, int] = (3, 2), outputs: tuple[int, int],
           bias: bool = True, mask: bool = True, orders: int = 1, **attributes: Any) -> Case:  # fmt: skip
    attributes.setdefault("kernel_shape", kernel)
    groups = attributes.get("offset_group", 1)
    taps = groups * kernel[0] * kernel[1]
    return Case(
        "DeformConv",
        [
            normal(batch, channels, *size),
            normal(filters, channels // attributes.get("group", 1), *kernel, seed=1),
            2 * normal(batch, 2 * taps, *outputs, seed=2),
            normal(filters, seed=3) if bias else None,
            normal(batch, taps, *outputs, seed=4) if mask else None,
        ][: 5 if mask else 4 if bias else 3],
        attributes,
        orders=orders,
        epsilon=1e-6,
        rtol=2e-6,
        name=name,
    )


DEFORM = [
    deform("plain", outputs=(3, 5), bias=False, mask=False, orders=2),
    deform("bias", outputs=(3, 5), mask=False),
    deform("mask_without_bias", outputs=(3, 5), bias=False),
    deform("all", outputs=(3, 3), strides=[2, 2], pads=[1, 0, 1, 1], orders=2),
    deform("dilations", outputs=(3, 4), dilations=[1, 2]),
    deform("groups", outputs=(3, 5), group=2, offset_group=4),
    deform("offset_groups", outputs=(3, 5), offset_group=2),
    deform("one_tap", outputs=(5, 6), kernel=(1, 1), offset_group=2, group=2),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("given", OTHERS + DEFORM, ids=str)
def test_dot_of_others(given: Case, symbolic: bool) -> None:
    check(given, symbolic=symbolic)


def test_kernel_size_from_the_weights() -> None:
    given = deform("", outputs=(3, 5))
    given = replace(given, attributes={})
    check(given, symbolic=False)
    with pytest.raises(ortops.UnsupportedError) as error:
        check(given, symbolic=True)
    assert str(error.value) == (
        "DeformConv node 'under_test': the size of its kernel is unknown, ['x1_2', 'x1_3']; give "
        "it in the attribute kernel_shape"
    )
