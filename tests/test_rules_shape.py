"""Rules of operators that move elements, against differences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, check, lowered, normal
from onnx import TensorProto, helper
from running import run

import ortops

X = normal(2, 3, 4)
VECTOR = normal(5)
IMAGE = normal(2, 3, 4, 5)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def both(
    op: str, inputs: Sequence[np.ndarray | None], name: str = "", **attributes: object
) -> Iterator[Case]:
    """Yields a case with integer inputs as initializers, and one with them fed at run time."""
    integers = [i for i, a in enumerate(inputs) if a is not None and a.dtype.kind != "f"]
    for constant in ([], integers):
        tag = "-".join(filter(None, (name, "constant" if constant else "run_time")))
        yield Case(op, inputs, attributes, constant=constant, orders=2, epsilon=1, name=tag)


def linear(
    op: str, *inputs: np.ndarray | None, name: str = "", outputs: int = 1, **attributes: object
) -> Case:
    return Case(op, inputs, attributes, outputs=outputs, orders=2, epsilon=1, name=name)


def reshapes() -> Iterator[Case]:
    for shape in ((6, 4), (-1,), (0, -1), (4, 1, 6), (2, 3, 4)):
        yield from both("Reshape", [X, ints(*shape)], name=str(shape))
    yield from both("Reshape", [normal(0, 3), ints(3, 0)], allowzero=1)
    yield from both("Reshape", [normal(1, 1), ints()], name="scalar")
    yield from both("Reshape", [np.asarray(normal()), ints(1, 1)])
    for perm in ((0, 2, 1), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        yield linear("Transpose", X, name=str(perm), perm=perm)
    yield linear("Transpose", X)
    yield linear("Transpose", normal(3))
    for axis in (0, 1, 2, 3, -1):
        yield linear("Flatten", X, name=str(axis), axis=axis)
    yield linear("Flatten", normal(0, 3))
    for axes in ((0,), (-1,), (2, 0), (0, -2, -1)):
        yield from both("Squeeze", [normal(1, 3, 1, 1), ints(*axes)], name=str(axes))
    yield linear("Squeeze", normal(1, 3, 1, 1))
    yield linear("Squeeze", normal(1, 1))
    yield linear("Squeeze", normal(2, 3))
    yield from both("Squeeze", [normal(1, 1), ints(0, 1)])
    for axes in ((0,), (-1,), (3, 0), (-1, 1), (0, 1, 2)):
        yield from both("Unsqueeze", [normal(2, 3), ints(*axes)], name=str(axes))
    yield from both("Unsqueeze", [np.asarray(normal()), ints(0)])
    yield from both("Unsqueeze", [normal(2), ints()], name="no_axes")


def repetitions() -> Iterator[Case]:
    for given, shape in (
        ((3, 1), (3, 4)),
        ((3, 1), (2, 1, 4)),
        ((1, 4), (3, 1)),
        ((3, 4), (3, 4)),
        ((3, 4), (1,)),
        ((3, 4), (2, 3, 1)),
        ((1,), (1,)),
        ((), (2, 3)),
        ((1, 1), (0, 2)),
    ):
        inputs = [np.asarray(normal(*given)), ints(*shape)]
        yield from both("Expand", inputs, name=str(shape))
    for repeats in ((1, 1, 1), (2, 1, 3), (3, 2, 2), (1, 0, 1)):
        yield from both("Tile", [X, ints(*repeats)], name=str(repeats))
    yield from both("Tile", [VECTOR, ints(3)])


def joints() -> Iterator[Case]:
    for axis in (0, 1, -1, -2):
        parts = [np.moveaxis(normal(n, 3, 4, seed=n), 0, axis) for n in (2, 1, 3)]
        yield linear("Concat", *parts, name=str(axis), axis=axis)
    yield linear("Concat", X, axis=0)
    yield linear("Concat", X, normal(2, 0, 4), axis=1)
    yield linear("Concat", *(normal(2, seed=n) for n in range(20)), name="many", axis=0)


def parts() -> Iterator[Case]:
    for constant in ([], [1]):
        for axis, sizes in ((0, (2, 1, 4)), (1, (3,)), (-1, (2, 2)), (0, (0, 7))):
            yield Case(
                "Split",
                [normal(7, 3, 4), ints(*sizes)],
                {"axis": axis},
                constant=constant,
                outputs=len(sizes),
                orders=2,
                epsilon=1,
                name=f"{axis}-{sizes}-{'constant' if constant else 'run_time'}",
            )
    for axis, count in ((0, 3), (0, 7), (1, 2), (-1, 2), (2, 4)):
        attributes = {"axis": axis, "num_outputs": count}
        name = f"{axis}-into_{count}"
        yield linear("Split", normal(7, 3, 4), name=name, outputs=count, **attributes)


def slices() -> Iterator[Case]:
    x = normal(5, 6, 4)
    big = np.iinfo(np.int64).max
    for starts, ends, axes, steps in (
        ((1,), (4,), (0,), None),
        ((1, 0), (4, 2), None, None),
        ((-3,), (-1,), (1,), None),
        ((0,), (-1,), (-1,), None),
        ((-100,), (100,), (0,), (1,)),
        ((1, 2), (big, 4), (2, 0), (1, 1)),
        ((3,), (3,), (0,), None),
        ((4,), (2,), (0,), None),
        ((0,), (big,), (1,), (2,)),
        ((1,), (6,), (1,), (3,)),
        ((-1,), (-big,), (0,), (-1,)),
        ((4, 1), (0, 5), (0, 1), (-2, 3)),
        ((-1, 0), (-100, 3), (-2, 0), (-3, 1)),
        ((3,), (0,), (0,), (-1,)),
    ):
        given = [None if a is None else ints(*a) for a in (starts, ends, axes, steps)]
        name = f"{starts}:{ends}:{axes}:{steps}".replace(str(big), "max")
        yield from both("Slice", [x, *given], name=name)
    narrow = [np.array(a, np.int32) for a in ((-4,), (5,), (1,), (1,))]
    yield from both("Slice", [x, *narrow], name="int32")


def pads() -> Iterator[Case]:
    for amounts in ((1, 2, 0, 3), (0, 0, 0, 0), (-1, 2, 1, -1), (0, -2, -1, -1)):
        yield from both("Pad", [normal(3, 4), ints(*amounts)], name=str(amounts))
        given = [normal(3, 4), ints(*amounts), np.asarray(normal(seed=1))]
        yield from both("Pad", given, name=f"{amounts}-value")
    for axes in ((1,), (-1,), (2, 0)):
        amounts = ints(*range(1, 2 * len(axes) + 1))
        yield from both("Pad", [X, amounts, None, ints(*axes)], name=str(axes))
        value = np.asarray(normal(seed=1))
        yield from both("Pad", [X, amounts, value, ints(*axes)], name=f"{axes}-value")
    narrow = np.array([1], np.int32)
    yield Case("Pad", [X, ints(1, 2), None, narrow], orders=2, epsilon=1, name="int32_axes")
    for mode in ("reflect", "edge", "wrap"):
        for amounts in ((1, 2, 0, 3), (0, 0, 0, 0), (2, 3, 2, 3), (0, 2, 0, -1)):
            inputs = [normal(3, 4), ints(*amounts)]
            yield from both("Pad", inputs, name=f"{mode}-{amounts}", mode=mode)
        inputs = [X, ints(1, 1), None, ints(-2)]
        yield from both("Pad", inputs, name=f"{mode}-axes", mode=mode)
    for shape in ((5, 2), (3, 4), (2, 7), (6, 7)):
        yield from both("CenterCropPad", [normal(3, 4), ints(*shape)], name=str(shape))
    yield from both("CenterCropPad", [X, ints(1, 7)], axes=[1, -1])


def blocks() -> Iterator[Case]:
    yield linear("SpaceToDepth", normal(2, 3, 4, 6), blocksize=2)
    for mode in ("DCR", "CRD"):
        yield linear("DepthToSpace", normal(2, 8, 2, 3), name=mode, blocksize=2, mode=mode)
        yield linear("DepthToSpace", normal(1, 9, 2, 1), name=mode, blocksize=3, mode=mode)
    yield linear("DepthToSpace", normal(2, 8, 2, 3), blocksize=2)


def triangles() -> Iterator[Case]:
    for upper in (0, 1):
        for k in (None, 0, 1, -2, 5):
            inputs = [normal(2, 4, 3), None if k is None else np.array(k, np.int64)]
            yield from both("Trilu", inputs, name=f"{upper}-{k}", upper=upper)
    yield from both("ReverseSequence", [normal(4, 3, 2), ints(4, 1, 2)])
    yield from both("ReverseSequence", [normal(3, 4, 2), ints(4, 1, 2)], time_axis=1, batch_axis=0)


CASES = [
    *reshapes(),
    *repetitions(),
    *joints(),
    *parts(),
    *slices(),
    *pads(),
    *blocks(),
    *triangles(),
]
CASES = quick(
    CASES,
    """
    Reshape-(6, 4)-run_time-2x3x4_2
    Transpose-(0, 2, 1)-2x3x4
    Flatten-0-2x3x4
    Squeeze-2x3
    Squeeze-(0,)-run_time-1x3x1x1_1
    Unsqueeze-(0,)-run_time-2x3_1
    Expand-(3, 4)-run_time-3x1_2
    Tile-(1, 1, 1)-constant-2x3x4_3
    Tile-(1, 1, 1)-run_time-2x3x4_3
    Tile-constant-5_1
    Concat-0-2x3x4_1x3x4_3x3x4
    Concat-1-3x2x4_3x1x4_3x3x4
    Split-0-into_3-7x3x4
    Slice-(1, 2):(max, 4):(2, 0):(1, 1)-constant-5x6x4_2_2_2_2
    Slice-(3,):(3,):(0,):None-run_time-5x6x4_1_1_1
    Slice-(-100,):(100,):(0,):(1,)-constant-5x6x4_1_1_1_1
    Slice-(4, 1):(0, 5):(0, 1):(-2, 3)-constant-5x6x4_2_2_2_2
    Slice-(0,):(max,):(1,):(2,)-constant-5x6x4_1_1_1_1
    Slice-(-3,):(-1,):(1,):None-constant-5x6x4_1_1_1
    Slice-(0,):(-1,):(-1,):None-constant-5x6x4_1_1_1
    Slice-(1, 0):(4, 2):None:None-run_time-5x6x4_2_2
    Pad-(0, 0, 0, 0)-value-constant-3x4_4_
    Pad-reflect-axes-run_time-2x3x4_2_1
    Pad-int32_axes-2x3x4_2_1
    CenterCropPad-run_time-2x3x4_2
    SpaceToDepth-2x3x4x6
    DepthToSpace-CRD-2x8x2x3
    Trilu-0-0-run_time-2x4x3_
    ReverseSequence-run_time-3x4x2_3
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(21)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("dims", [[7, 2], ["N", "M"]], ids=["static", "symbolic"])
@pytest.mark.parametrize("given", [True, False], ids=["sizes", "num_outputs"])
def test_split_with_unused_outputs(used: int, dims: list[int | str], given: bool) -> None:
    attributes = {"axis": 0} if given else {"axis": 0, "num_outputs": 3}
    inputs = ["x", "sizes"] if given else ["x"]
    graph = helper.make_graph(
        [
            helper.make_node("Split", inputs, ["y0", "y1", "y2"], **attributes),
            helper.make_node("Mul", [f"y{used}", f"y{used}"], ["square"]),
            helper.make_node("Gradient", ["x"], ["dx"], domain=DOMAIN, xs=["x"], y="square"),
        ],
        "unused",
        [helper.make_tensor_value_info("x", TensorProto.DOUBLE, dims)],
        [helper.make_tensor_value_info("dx", TensorProto.DOUBLE, dims)],
        [helper.make_tensor("sizes", TensorProto.INT64, [3], [3, 3, 1])],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    x = normal(7, 2)
    expected = np.zeros_like(x)
    rows = slice(3 * used, 3 * used + 3)
    expected[rows] = 2 * x[rows]
    np.testing.assert_array_equal(run(model, {"x": x})[0], expected)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("Reshape", [X, ints(6, 4)], constant=[1]), ["Reshape"]),
        (Case("Squeeze", [normal(2, 1, 3), ints(1)], constant=[1]), ["Unsqueeze"]),
        (Case("Transpose", [X], {"perm": [1, 2, 0]}), ["Transpose"]),
        (Case("Slice", [X, ints(1), ints(2)], constant=[1, 2]), ["Pad"]),
        (Case("Concat", [X, X], {"axis": 1}), ["Split"]),
        (Case("Expand", [normal(3, 1), ints(3, 4)], constant=[1]), ["ReduceSum"]),
        (Case("Expand", [normal(3, 4), ints(3, 4)], constant=[1]), []),
    ],
    ids=str,
)
def test_emitted_operators(case: Case, expected: list[str]) -> None:
    nodes = lowered(case, symbolic=False).graph.node
    emitted = [node.op_type for node in nodes if "/under_test/" in node.name]
    assert [op_type for op_type in emitted if op_type != "Constant"] == expected
