"""The cases with which onnxruntime-training tests its gradients, by the dot test of our rules.

Operators, attributes, shapes, given values and versions of operators are facts of
microsoft/onnxruntime, orttraining/orttraining/test/gradient/gradient_ops_test.cc, as of early 2024;
no code is from there. Random values are others, with the same distance from kinks. A row is checked
with static and with symbolic shapes, so that cases which differ in that are one row.

What the file has and this table does not, and why:

- Operators that only builds for training have, so that no file carries them to stock onnxruntime:
  ConcatTraining, SoftmaxCrossEntropy, SparseSoftmaxCrossEntropy, DropoutGrad, InPlaceAccumulator,
  InPlaceAccumulatorV2, ZeroGradient, PadAndUnflatten, ScaledSum. BatchNormInternal stands for
  BatchNormalization in training mode, which has its shapes.
- Dropout, which draws: its test there is one of forward values; test_rules_random.py has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from dot_test import Case, check, distinct, normal, uniform
from violations import all_violations

Array = np.ndarray[Any, Any]
MICROSOFT = "com.microsoft"
X = (2, 3, 4)
SINGLE: dict[str, Any] = {"dtype": np.float32, "epsilon": 1e-2, "rtol": 1e-3}
"""For operators that onnxruntime has in float32 only."""
LINEAR: dict[str, Any] = {"dtype": np.float32, "epsilon": 1, "rtol": 2e-5}
"""For such operators that are linear in each input, so that a large step is exact."""


def row(
    op: str,
    inputs: Iterable[Any],
    attributes: Mapping[str, Any] | None = None,
    opset: int = 9,
    dtype: Any = np.float64,
    **settings: Any,
) -> Case:
    """Returns a case; a tuple among the inputs is the shape of random numbers."""
    arrays = [
        normal(*each, seed=index) if isinstance(each, tuple) else each
        for index, each in enumerate(inputs)
    ]
    arrays = [a.astype(dtype) if a.dtype == np.float64 else a for a in arrays]
    return Case(op, arrays, attributes or {}, opset=opset, **settings)


def apart(*shape: int, seed: int = 0) -> Array:
    """Returns numbers that keep a distance from 0."""
    x = normal(*shape, seed=seed)
    return x + np.copysign(0.2, x)


def count(*shape: int) -> Array:
    """Returns the numbers from one on."""
    return np.arange(1.0, 1 + np.prod(shape)).reshape(shape)


def integers(*values: Any) -> Array:
    return np.array(values, np.int64)


def indices(below: int, *shape: int) -> Array:
    return np.random.default_rng(0).integers(below, size=shape)


def steps(*shape: int, offset: float) -> Array:
    """Returns hundredths, moved by less, so that two of these with other offsets never tie."""
    return np.trunc(normal(*shape, seed=int(1000 * offset)) * 100) / 100 + offset


PAIRS = [  # of broadcast shapes
    ((2, 3, 2, 3), (2, 3, 2, 3)),
    ((2, 3, 2, 3), ()),
    ((), (2, 3, 2, 3)),
    ((2, 3, 2, 3), (3,)),
    ((2, 3), (2, 3, 2, 3)),
    ((1, 2, 3), (2, 3, 1, 1)),
    ((3, 2, 3), (2, 1, 1, 1)),
    ((2, 1, 1, 3), (1, 3, 2, 1)),
    ((3, 2, 1, 3), (3, 2, 1, 1)),
    ((3, 2, 3, 3), (3, 1, 1, 3)),
]
PRODUCTS = [
    ((2, 2), (2, 3)),
    ((2, 3, 2), (2, 2, 3)),
    ((2, 3, 2), (2, 3)),
    ((3, 2), (2, 2, 3)),
    ((2, 3, 3, 2), (2, 3, 2, 3)),
    ((2, 3, 3, 2), (2, 3)),
    ((2, 3, 3, 2), (3, 2, 3)),
    ((2, 1, 3, 2), (1, 3, 2, 3)),
]
GEMM: list[tuple[Sequence[Any], dict[str, Any]]] = [
    ([(1, 3), (3, 2)], {}),
    ([(1, 3), (3, 2), ()], {}),
    ([(1, 3), (3, 2), (2,)], {}),
    *(([(2, 4), (4, 3), bias], {}) for bias in ((), (3,), (1, 3), (2, 3))),
    ([(4, 2), (4, 3), (3,)], {"transA": 1}),
    ([(2, 4), (3, 4), (3,)], {"transB": 1}),
    ([(4, 2), (3, 4), (3,)], {"transA": 1, "transB": 1}),
    ([(2, 4), (4, 3), (2, 3)], {"alpha": 0.7, "beta": 5.0}),
    ([(2, 4), (4, 3), (3,)], {"alpha": 0.7, "beta": 5.0}),
]
AXES: list[tuple[list[int], dict[str, int]]] = [
    ([], {}),
    ([0, 1, 2], {"keepdims": 0}),
    ([0, 2], {"keepdims": 1}),
    ([0, 1], {"keepdims": 0}),
    ([1], {"keepdims": 1}),
    ([2], {"keepdims": 0}),
    ([-2], {"keepdims": 1}),
    ([-2, -1], {"keepdims": 0}),
]
CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 2, 5), (2, 2, 3), {"pads": [1] * 2}),
    ((2, 1, 7), (1, 1, 3), {"pads": [1] * 2, "strides": [2]}),
    ((2, 1, 5), (1, 1, 1), {"pads": [1] * 2}),
    ((2, 1, 5), (1, 1, 1), {"pads": [0] * 2}),
    ((1, 1, 3, 3), (1, 1, 3, 3), {"pads": [1] * 4}),
    ((2, 1, 5, 5), (1, 1, 3, 3), {"pads": [1] * 4}),
    ((2, 1, 7, 5), (1, 1, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
    ((2, 1, 5, 5), (1, 1, 3, 3), {"pads": [0] * 4, "dilations": [2, 2]}),
    ((2, 1, 7, 5), (1, 1, 3, 3), {"pads": [1] * 4, "dilations": [2, 2]}),
    ((2, 1, 5, 5, 5), (1, 1, 3, 3, 3), {"pads": [1] * 6}),
    ((2, 1, 7, 5, 5), (1, 1, 3, 3, 3), {"pads": [1] * 6, "strides": [2, 2, 2]}),
]
POINTS = {"Conv": (1, 1, 1, 1), "ConvTranspose": (1, 1, 3, 3)}  # for kernels of one pixel
AVERAGES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 8), {"kernel_shape": [2], "strides": [2]}),
    ((2, 3, 8, 8), {"kernel_shape": [2, 2], "strides": [1, 1]}),
    ((2, 3, 8, 8, 8), {"kernel_shape": [2] * 3, "strides": [2] * 3}),
    ((1, 3, 8), {"kernel_shape": [3], "strides": [3], "pads": [1, 0]}),
    (
        (1, 3, 7, 8),
        {"kernel_shape": [3, 2], "strides": [3, 2], "pads": [1, 0, 1, 0], "count_include_pad": 1},
    ),
    ((1, 3, 7, 7), {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1] * 4}),
    ((1, 3, 8, 8, 8), {"kernel_shape": [3] * 3, "strides": [3] * 3, "pads": [1, 1, 1, 0, 0, 0]}),
    (
        (1, 4, 7, 7, 7),
        {"kernel_shape": [3] * 3, "strides": [3] * 3, "pads": [1] * 6, "count_include_pad": 1},
    ),
]
MAXIMA: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 2, 9), {"kernel_shape": [2]}),
    ((2, 3, 5, 5), {"kernel_shape": [2, 2], "strides": [1, 1]}),
    ((1, 1, 5, 5), {"kernel_shape": [3, 3], "pads": [2] * 4}),
    ((1, 1, 32, 32), {"kernel_shape": [5, 5], "strides": [3, 3]}),
    ((2, 1, 3, 3, 3), {"kernel_shape": [2] * 3}),
]
SQUEEZED = [
    ((1, 2, 3, 1), [0, 3]),
    ((1, 1, 2, 3, 2), [0, 1]),
    ((1, 2, 1, 3, 1), [0, 2, 4]),
    ((1, 2, 1, 3, 1), [2]),
]
UNSQUEEZED = [[0, 3], [0, 1], [0, 2, 4]]
JOINED = [
    ([(2,)] * 3, 0),
    ([(2, 2)] * 3, 1),
    ([(1, 2, 3)] * 3, 2),
    ([(2, 2), (2, 4)], 1),
    ([(2, 2), (2, 4)], -1),
]
EXPANDED = [
    ((2, 2, 1), [2, 2, 3]),
    ((2, 2, 1), [1, 1, 3]),
    ((2, 2, 1), [3]),
    ((2, 2, 1), [1, 1]),
    ((2, 3), [3, 2, 2, 3]),
    ((1, 2, 3), [3, 2, 1, 1]),
]
SCATTERED = [
    (8, [[4], [3], [1], [7]], 4),
    ((2, 2), [[0, 0], [1, 1]], 2),
    ((2, 2), [[1], [0]], (2, 2)),
    ((2, 2, 2), [[0, 1], [1, 0]], (2, 2)),
    ((2, 2, 2), [[[0, 1]], [[1, 0]]], (2, 1, 2)),
    ((2, 2, 2), [[0], [1]], (2, 2, 2)),
]
GATHERED: list[tuple[tuple[int, ...], Any, int]] = [
    ((3, 3), [[1, 2, 0], [2, 0, 0]], 0),
    ((3, 3), [[1, 1, 1], [2, 2, 2]], 0),
    ((3, 3), [[1, 1, 1], [1, 1, 1]], 1),
    ((2, 2, 2), [[[1, 1]], [[1, 1]]], 1),
    ((2, 2), [[1] * 4, [1] * 4], 1),
]
BATCHES = [(3, 3, 2, 4), (3, 1, 2, 4), (1, 4, 2), (6, 5, 3, 2, 4)]


def losses() -> Iterable[Case]:
    """Yields the cases of SoftmaxCrossEntropyLoss, of two classes."""
    for ignored in (0, -1):
        for shape in ((5,), (2, 3, 2)):
            for reduction in ("mean", "sum", "none"):
                of = (2,) if reduction == "none" and len(shape) == 1 else shape
                labels = indices(2, *of)
                for weights in ([], [uniform(0.1, 2, 2)]):
                    scores = (of[0], 2, *of[1:])
                    yield row(
                        "SoftmaxCrossEntropyLoss",
                        [scores, labels, *weights],
                        {"reduction": reduction},
                        12,
                        only=[0],
                    )
                    labels = labels.copy()
                    labels.flat[::2] = ignored
                    yield row(
                        "SoftmaxCrossEntropyLoss",
                        [scores, labels, *weights],
                        {"reduction": reduction, "ignore_index": ignored},
                        12,
                        only=[0],
                    )


ROWS = [
    row("Erf", [X], **SINGLE),
    row("Sqrt", [np.abs(normal(*X)) + 1]),
    *(
        row(op, pair, {}, opset)
        for opset in (11, 13)
        for op in ("Add", "Sub", "Mul")
        for pair in PAIRS
    ),
    *(
        row("Div", [apart(*a), apart(*b, seed=1)], {}, opset)
        for opset in (11, 13)
        for a, b in PAIRS
    ),
    *(row("Pow", [normal(*X).clip(-2, 2), np.full(1, n)], only=[0]) for n in (2.0, 3.0)),
    *(row("MatMul", pair, {}, opset) for opset in (11, 13) for pair in PRODUCTS),
    *(row(op, [X]) for op in ("Sin", "Cos", "Neg", "Tanh", "Sigmoid")),
    row("Abs", [apart(*X)]),
    row("Log", [np.abs(normal(*X)) + 0.1]),
    row("Exp", [uniform(-1, 1, *X)]),
    row("Reciprocal", [apart(*X)], {}, 12),
    row("Relu", [apart(*X)]),
    row("LeakyRelu", [apart(*X)], {}, 16, float32=True),
    row("Cast", [X], {"to": 1}, **LINEAR),
    *(row("Flatten", [(2, 3, 2)], {"axis": axis}, 11) for axis in range(-3, 4)),
    *(row("Gemm", inputs, found, opset) for opset in (11, 13) for inputs, found in GEMM),
    *(
        row(op, [(4, 3, 2)], {**keep, **({"axes": axes} if axes else {})}, opset)
        for op, opset in [
            ("ReduceMean", 11),
            ("ReduceMean", 13),
            ("ReduceSum", 11),
            ("ReduceL2", 11),
            ("ReduceLogSumExp", 11),
        ]
        for axes, keep in AXES
    ),
    *(row("ReduceSum", [(4, 3, 2), integers(*axes)], keep, 13) for axes, keep in AXES),
    *(row("Split", [(9, 5)], {"axis": 0}, opset, outputs=3) for opset in (9, 13)),
    *(row("MaxPool", [distinct(*shape, gap=0.01)], found) for shape, found in MAXIMA),
    *(row("GlobalAveragePool", [shape], **LINEAR) for shape in ((2, 3, 5, 5), (2, 1, 3, 3))),
    *(row("AveragePool", [shape], found, **LINEAR) for shape, found in AVERAGES),
    *(
        row(op, [x, w, w[:1]], {"kernel_shape": w[2:], **found}, **LINEAR)
        for op in ("Conv", "ConvTranspose")
        for x, w, found in [
            *CONVOLUTIONS,
            *((POINTS[op], (1, 1, 1, 1), {"pads": [pad] * 4}) for pad in (0, 1)),
        ]
    ),
    *(row("Concat", shapes, {"axis": axis}, opset) for opset in (9, 13) for shapes, axis in JOINED),
    *(
        row("Transpose", [X], {"perm": perm} if perm else {})
        for perm in ([], [0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])
    ),
    *(row("Squeeze", [x], {}, opset) for opset in (9, 13) for x, _ in SQUEEZED[:-1]),
    *(row("Squeeze", [x], {"axes": axes}) for x, axes in SQUEEZED),
    *(row("Squeeze", [x, integers(*axes)], {}, 13) for x, axes in SQUEEZED),
    *(row("Unsqueeze", [(2, 3)], {"axes": axes}) for axes in UNSQUEEZED),
    *(row("Unsqueeze", [(2, 3), integers(*axes)], {}, 13) for axes in UNSQUEEZED),
    *(
        row(
            "BatchNormalization",
            [s, *([(s[1],)] * 3), uniform(0.5, 2, s[1])],
            {"training_mode": 1, "momentum": float(np.float32(0.1)), **epsilon},
            15,
            outputs=3,
            only=[0, 1, 2],
        )
        for s in BATCHES
        for epsilon in [{"epsilon": float(np.float32(1e-5))}, *([{}] if s == (1, 4, 2) else [])]
    ),
    *(
        row(op, [X], found, opset)
        for op in ("Softmax", "LogSoftmax")
        for opset in (11, 13)
        for found in ({}, *({"axis": axis} for axis in range(3)))
    ),
    *losses(),
    *(row(op, [X], domain=MICROSOFT, **SINGLE) for op in ("Gelu", "FastGelu", "QuickGelu")),
    *(row("QuickGelu", [X], {"alpha": a}, domain=MICROSOFT, **SINGLE) for a in (1.0, -1.702)),
    *(row(op, [X, (4,)], domain=MICROSOFT, **SINGLE) for op in ("FastGelu", "BiasGelu")),
    *(
        row("Gather", [(4, 2, 3, 2), at], {"axis": axis})
        for at, axis in [
            (integers(2, 0), 0),
            (indices(4, 8), 0),
            (indices(2, 3), 1),
            (indices(4, 2, 3), 0),
        ]
    ),
    row("Gather", [count(4, 2), integers(-1, 0, -2)], {"axis": 0}),
    *(
        row("GatherND", [x, integers(*at)], {"batch_dims": batch}, 12)
        for x, at, batch in [
            ((2, 2), [[1, 1], [1, 1]], 0),
            ((2, 2), [[0, 1], [1, 0]], 0),
            ((2, 2, 3), [[1], [0]], 1),
            ((2, 2, 3), [[[1], [0]], [[2], [1]]], 2),
        ]
    ),
    row("LayerNormalization", [X, (4,), (4,)], {}, 17, outputs=3, **SINGLE),
    row("SimplifiedLayerNormalization", [(2, 3, 8), (8,)], **SINGLE),
    row("Where", [normal(4, 3, 2, seed=3) > 0, (4, 3, 2), (4, 3, 2)]),
    row("Slice", [(2, 4), integers(1, 0), integers(2, 3)], {}, 10),
    *(
        row("Slice", [shape, *map(np.array, ([1, 0], [2, 3], [0, 1], [1, 2]))], {}, 10)
        for shape in ((2, 4), (2, 4, 2))
    ),
    *(row("Expand", [x, integers(*to)], {}, opset) for opset in (11, 13) for x, to in EXPANDED),
    *(row("GatherElements", [x, integers(*at)], {"axis": axis}, 11) for x, at, axis in GATHERED),
    row("TopK", [count(2, 2, 2), integers(1)], {}, 11, outputs=2),
    row("TopK", [count(2, 2, 2), integers(1)], {"axis": -2}, 11, outputs=2),
    row("TopK", [count(3, 3), integers(2)], {}, 11, outputs=2),
    row("Clip", [count(2, 2, 2), np.array(2.8), np.array(7.2)], {}, 12),
    row("Clip", [count(2, 2, 2), np.array(3.8)], {}, 12),
    row("Clip", [count(2, 2, 2)], {}, 12),
    *(
        row(op, [steps(*s, offset=0.002 * i) for i, s in enumerate([(2, 3), *further])], {}, 11)
        for op in ("Min", "Max")
        for further in ([], [(2, 3)], [(3,)], [(2, 3), (2, 3)], [(3,), (2, 1), (2, 3)])
    ),
    *(
        row("Tile", [x, integers(*times)], {}, 11)
        for x, times in [((2, 3), [2, 2]), ((2,), [2]), ((2, 2, 3), [2, 3, 2])]
    ),
    row("Tile", [(2, 2, 3), integers(1, 1, 1)], {}, 11),
    row("Pad", [(2, 4), integers(0, 2, 2, 0)], {}, 11),
    row("Pad", [(2, 4), integers(0, -2, 2, 0)], {"mode": "constant"}, 11),
    row("Pad", [(3, 4), integers(0, 2, 2, 0)], {"mode": "reflect"}, 11),
    row("Pad", [(2, 4), integers(0, 2, 2, 0)], {"mode": "edge"}, 11),
    *(
        row(
            "ScatterND",
            [normal(*np.atleast_1d(x)), integers(*at), normal(*np.atleast_1d(to))],
            {},
            11,
        )
        for x, at, to in SCATTERED
    ),
    row("ScatterElements", [(3, 3), integers([1, 0, 2], [0, 2, 1]), (2, 3)], {}, 13),
    *(
        row("ScatterElements", [(1, 5), integers([1, 3]), (1, 2)], {"axis": axis}, 13)
        for axis in (1, -1)
    ),
    *(
        row("Trilu", [count(3, 4), *k], upper, 14, **more)
        for more in ({}, {"domain": MICROSOFT, **LINEAR})
        for k in ([], *([np.array(k)] for k in range(-3, 4)))
        for upper in ({}, {"upper": 1}, {"upper": 0})
    ),
    row(
        "Resize",
        [(1, 2, 4, 4), np.ones(4, np.float32), np.array([1, 1, 2, 2], np.float32)],
        {
            "coordinate_transformation_mode": "half_pixel",
            "cubic_coeff_a": -0.75,
            "mode": "linear",
            "nearest_mode": "floor",
        },
        18,
        only=[0],
        **LINEAR,
    ),
]

DRAWN = [ROWS[i] for i in sorted(np.random.default_rng(5).permutation(len(ROWS))[:16])]
"""What the quick suite has, next to its cases of all rules."""


def violations_of(rows: Sequence[Case], first: int = 0) -> None:
    """Asserts that rows are right, by turns at static and symbolic shapes."""
    with all_violations() as found:
        for number, each in enumerate(rows, first):
            symbolic = number % 2 == 1
            with found(f"{each} {dict(each.attributes)} at opset {each.opset}, {symbolic=}"):
                check(each, symbolic=symbolic)


@pytest.mark.slow
def test_drawn_cases_of_onnxruntime_training() -> None:
    violations_of(DRAWN)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(2))
@pytest.mark.parametrize("part", range(2))
def test_cases_of_onnxruntime_training(part: int, first: int) -> None:
    violations_of(ROWS[part::2], first)
