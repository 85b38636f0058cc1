"""Operators on quantized numbers, straight through, against differences in numpy.

What rounds has no derivative worth the name. So the oracle, in float64, keeps what rounding added
to each number, and which numbers saturated, as they are at the point in question, and takes
differences of the rest. onnxruntime's own kernel says whether the forward values are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from checked import Checked, by_case
from domain_models import DOMAIN, model, node, value
from onnx import TensorProto, helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from running import plain_session, run, run_session
from test_rules_microsoft import convolution, differences, embed, packed, sigmoid, softmax
from test_rules_recurrent import recurrence

import ortops
from models.lenet import lenet
from models.transformer import transformer

MICROSOFT = "com.microsoft"
F = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((41, seed)).standard_normal(shape).astype(F)


@dataclass(frozen=True)
class Quantized:
    """An input that is quantized: the numbers, scale and zero point, which may be along an axis."""

    x: np.ndarray
    scale: Any
    zero: Any
    axis: int = 0


@dataclass(frozen=True)
class Case:
    """An operator: its inputs, and what it does to the real numbers that they stand for.

    Inputs are quantized, or constant arrays, or None. ``y`` has scale and zero point of the output;
    None where that is real. ``arrange`` puts what they give the node (integers, scale and zero
    point of each quantized input, then the output's) into another order.
    """

    op: str
    inputs: Sequence[Quantized | np.ndarray | None]
    y: tuple[Any, Any] | None
    function: Callable[..., np.ndarray]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = MICROSOFT
    arrange: Sequence[int | None] = ()
    name: str = ""
    orders: int = 1
    quick: bool = True

    @property
    def differentiated(self) -> list[int]:
        """The quantized inputs and the scales, in the node's order."""
        places: list[bool] = []
        for given in self.inputs:
            places += [True, True, False] if isinstance(given, Quantized) else [False]
        places += [True, False] if self.y else []
        order = self.arrange or range(len(places))
        return [at for at, place in enumerate(order) if place is not None and places[place]]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}" if self.name else self.op


class Rounding:
    """Quantizes and dequantizes; what rounding adds is found the first time and then kept.

    Each evaluation of a function has to begin with `restart`.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        self.place = 0

    def restart(self) -> None:
        self.place = 0

    def __call__(self, x: np.ndarray, scale: np.ndarray, zero: Any, axis: int = 0) -> np.ndarray:
        if np.ndim(scale) == 1:
            shape = [-1 if a == axis % x.ndim else 1 for a in range(x.ndim)]
            scale, zero = np.reshape(scale, shape), np.reshape(zero, shape)
        low, high = np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max
        zero = zero.astype(np.float64)
        if self.place == len(self.kept):
            whole = np.rint(x / scale)
            self.kept.append((whole - x / scale, whole + zero))
        added, integers = self.kept[self.place]
        self.place += 1
        inside = (integers >= low) & (integers <= high)
        return (
            np.where(inside, x / scale + added + zero, np.clip(integers, low, high)) - zero
        ) * scale


X = normal(2, 3, 5, 4)
IMAGE = Quantized(X, F(0.015), np.uint8(120))
KERNEL = Quantized(normal(4, 3, 2, 2, seed=1), F(0.02), np.int8(3))
KERNELS = Quantized(  # of 7 bits: without VNNI, onnxruntime adds two products of 8 bits in 16
    normal(4, 3, 2, 2, seed=1),
    np.array([0.041, 0.053, 0.031, 0.037], F),
    np.array([0, 1, 2, 0], np.int8),
)
ROWS, COLUMNS = normal(2, 4, 3), normal(3, 5, seed=2)
COLUMN_SCALES = Quantized(
    COLUMNS,
    np.array([0.01, 0.02, 0.03, 0.01, 0.015], F),
    np.array([0, 0, 2, 1, 0], np.int8),
    1,
)
A = Quantized(normal(2, 3, 4), F(0.015), np.uint8(110))
B = Quantized(normal(2, 3, 4, seed=3), F(0.018), np.uint8(128))
ROW = Quantized(normal(4, seed=3), F(0.018), np.uint8(128))
SIGNED = Quantized(normal(2, 3, 4), F(0.02), np.int8(0))
CHOICE = np.random.default_rng(5).random((2, 3, 4)) < 0.5
BIAS = np.array([300, -200, 100, 50], np.int32)


CASES = [
    Case("QLinearConv", [IMAGE, KERNEL], (F(0.04), np.uint8(100)), convolution, domain=""),
    Case(
        "QLinearConv",
        [IMAGE, KERNELS, BIAS],
        (F(0.04), np.uint8(100)),
        convolution,
        domain="",
        arrange=[0, 1, 2, 3, 4, 5, 7, 8, 6],
        name="channels-bias",
    ),
    Case(
        "QLinearConv",
        [Quantized(X.transpose(0, 2, 3, 1).copy(), F(0.015), np.uint8(120)), KERNELS, BIAS],
        (F(0.04), np.uint8(100)),
        lambda x, w, b: convolution(x.transpose(0, 3, 1, 2), w, b).transpose(0, 2, 3, 1),
        {"channels_last": 1},
        arrange=[0, 1, 2, 3, 4, 5, 7, 8, 6],
        name="channels-last",
    ),
    Case(
        "QLinearMatMul",
        [Quantized(ROWS, F(0.015), np.uint8(120)), Quantized(COLUMNS, F(0.016), np.uint8(120))],
        (F(0.03), np.uint8(128)),
        np.matmul,
        domain="",
    ),
    Case(
        "QLinearMatMul",
        [
            Quantized(ROWS, F(0.016), np.int8(-3)),
            COLUMN_SCALES,
        ],
        (F(0.03), np.int8(5)),
        np.matmul,
        domain="",
        name="columns",
    ),
    Case("QLinearAdd", [A, B], (F(0.025), np.uint8(120)), np.add),
    Case("QLinearAdd", [A, ROW], (F(0.025), np.uint8(120)), np.add, name="broadcast"),
    Case("QLinearMul", [A, B], (F(0.015), np.uint8(120)), np.multiply),
    Case("QLinearMul", [ROW, B], (F(0.015), np.uint8(120)), np.multiply, name="broadcast"),
    Case("QLinearSigmoid", [A], (F(0.003), np.uint8(0)), sigmoid),
    Case("QLinearSigmoid", [SIGNED], (F(1 / 256), np.int8(-128)), sigmoid, name="signed"),
    Case(
        "QLinearLeakyRelu",
        [Quantized(np.where(abs(A.x) < 0.1, F(0.3), A.x), F(0.015), np.uint8(110))],
        (F(0.0107), np.uint8(40)),
        lambda x: np.where(x > 0, x, 0.25 * x),
        {"alpha": 0.25},
    ),
    Case("QLinearSoftmax", [A], (F(1 / 256), np.uint8(0)), softmax, {"axis": -1, "opset": 13}),
    Case(
        "QLinearSoftmax",
        [A],
        (F(1 / 256), np.uint8(0)),
        lambda x: softmax(x.reshape(2, 12)).reshape(x.shape),
        {"axis": 1, "opset": 12},
        name="flat",
    ),
    Case(
        "QLinearWhere",
        [CHOICE, A, B],
        (F(0.0123), np.uint8(120)),
        lambda c, a, b: np.where(c, a, b),
    ),
    Case(
        "QLinearConcat",
        [A, B],
        (F(0.0123), np.uint8(120)),
        lambda a, b: np.concatenate([a, b], 1),
        {"axis": 1},
        arrange=[6, 7, 0, 1, 2, 3, 4, 5],
    ),
    Case(
        "QLinearGlobalAveragePool",
        [IMAGE],
        (F(0.003), np.uint8(120)),
        lambda x: x.mean((2, 3), keepdims=True),
    ),
    Case(
        "QLinearGlobalAveragePool",
        [Quantized(X.transpose(0, 2, 3, 1).copy(), F(0.015), np.uint8(120))],
        (F(0.003), np.uint8(120)),
        lambda x: x.mean((1, 2), keepdims=True),
        {"channels_last": 1},
        name="channels-last",
    ),
    Case(
        "QLinearAveragePool",
        [IMAGE],
        (F(0.01), np.uint8(120)),
        lambda x: (x[..., :-1, :-1] + x[..., 1:, :-1] + x[..., :-1, 1:] + x[..., 1:, 1:]) / 4,
        {"kernel_shape": [2, 2]},
    ),
    Case(
        "QGemm",
        [Quantized(ROWS[0], F(0.015), np.uint8(120)), Quantized(COLUMNS, F(0.02), np.int8(2))],
        (F(0.03), np.uint8(120)),
        lambda a, b: 0.5 * a @ b,
        {"alpha": 0.5},
        arrange=[0, 1, 2, 3, 4, 5, None, 6, 7],
    ),
    Case(
        "QGemm",
        [
            Quantized(ROWS[0], F(0.015), np.uint8(120)),
            Quantized(
                COLUMNS.T.copy(),
                np.array([0.01, 0.02, 0.03, 0.01, 0.015], F),
                np.array([0, 0, 2, 1, 0], np.int8),
            ),
            np.array([300, -200, 100, 50, 20], np.int32),
        ],
        None,
        lambda a, b, c: a @ b.T + c,
        {"transB": 1},
        name="real",
    ),
    Case(
        "MatMulIntegerToFloat",
        [Quantized(ROWS, F(0.015), np.uint8(120)), COLUMN_SCALES, normal(5, seed=4)],
        None,
        lambda a, b, c: a @ b + c,
        arrange=[0, 3, 1, 4, 2, 5, 6],
    ),
    Case(
        "QAttention",
        [
            Quantized(normal(2, 3, 6), F(0.015), np.uint8(120)),
            Quantized(0.5 * normal(6, 24, seed=1), F(0.01), np.int8(2)),
            normal(24, seed=2),
            np.array([[1, 1, 0], [1, 1, 1]], np.int32),
        ],
        None,
        lambda x, w, b, mask: packed(x, w, b, mask)[0],
        {"num_heads": 2},
        arrange=[0, 3, 6, 1, 4, 7, 2, 5],
    ),
    Case(
        "QEmbedLayerNormalization",
        [
            np.array([[1, 3, 1], [0, 4, 2]], np.int32),
            np.array([[0, 0, 1]] * 2, np.int32),
            *(
                Quantized(normal(*shape, seed=seed), F(0.016), np.uint8(120 + seed))
                for seed, shape in enumerate([(5, 6), (4, 6), (2, 6), (6,), (6,)])
            ),
        ],
        None,
        lambda *inputs: embed(*inputs)[0],
        # Integers of the tables first, then the scales, then the zero points.
        arrange=[0, 1, 2, 5, 8, 11, 14, None, 3, 6, 9, 12, 15, 4, 7, 10, 13, 16],
    ),
]


def build(
    case: Case, symbolic: bool
) -> tuple[list[onnx.NodeProto], list[Any], dict[str, np.ndarray], dict[str, np.ndarray], Any]:
    """Returns nodes, inputs, feeds, initializers, and Σ w · y as a function of the feeds."""
    nodes: list[onnx.NodeProto] = []
    names: list[str] = []
    feeds: dict[str, np.ndarray] = {}
    constants: dict[str, np.ndarray] = {}
    for index, given in enumerate(case.inputs):
        if given is None or isinstance(given, np.ndarray):
            names.append("" if given is None else f"c{index}")
            if given is not None:
                constants[f"c{index}"] = given
            continue
        x, scale, zero, integers = (f"{kind}{index}" for kind in "xszq")
        feeds[x], feeds[scale] = given.x, np.asarray(given.scale)
        constants[zero] = np.asarray(given.zero)
        nodes.append(
            helper.make_node("QuantizeLinear", [x, scale, zero], [integers], axis=given.axis)
        )
        names += [integers, scale, zero]
    output = "y"
    if case.y is not None:
        feeds["sy"], constants["zy"] = np.asarray(case.y[0]), np.asarray(case.y[1])
        output = "q"
        names += ["sy", "zy"]
    if case.arrange:
        names = ["" if place is None else names[place] for place in case.arrange]
    outputs = [output, "index"] if case.op == "QEmbedLayerNormalization" else [output]
    nodes.append(
        helper.make_node(
            case.op, names, outputs, "under_test", domain=case.domain, **case.attributes
        )
    )
    if case.y is not None:
        nodes.append(helper.make_node("DequantizeLinear", ["q", "sy", "zy"], ["y"]))
    rounding = Rounding()

    def evaluate(given: Mapping[str, np.ndarray]) -> np.ndarray:
        rounding.restart()
        reals: list[Any] = []
        scales = []
        for index, part in enumerate(case.inputs):
            if isinstance(part, Quantized):
                scales.append(given[f"s{index}"])
                reals.append(
                    rounding(given[f"x{index}"], scales[-1], np.asarray(part.zero), part.axis)
                )
            elif part is not None:
                reals.append(part)
        if case.op in ("QLinearConv", "QGemm") and len(reals) == 3:
            reals[2] = reals[2] * (scales[0] * scales[1])  # a bias of integers has their scales
        y = case.function(*reals)
        return y if case.y is None else rounding(y, given["sy"], np.asarray(case.y[1]))

    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    weights = normal(*evaluate(wide).shape, seed=9)
    nodes += [
        helper.make_node("Mul", ["y", "w"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["f"], keepdims=0),
    ]
    # onnxruntime wants to know the sizes of embedding tables.
    free = symbolic and case.op != "QEmbedLayerNormalization"
    inputs = [
        value(n, [f"{n}{axis}" for axis in range(a.ndim)] if free and n[0] == "x" else a.shape)
        for n, a in [*feeds.items(), ("w", weights)]
    ]

    def total(arrays: Sequence[np.ndarray]) -> float:
        return float((weights * evaluate(dict(zip(wide, arrays, strict=True)))).sum())

    return nodes, inputs, {**feeds, "w": weights}, constants, (wide, total, evaluate)


@pytest.mark.nightly
@pytest.mark.quick(8)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_straight_through(case: Case, symbolic: bool) -> None:
    nodes, inputs, feeds, constants, (wide, total, evaluate) = build(case, symbolic)
    xs = list(wide)
    gradients = [f"d{x}" for x in xs]
    gradient = node("Gradient", xs, gradients, xs=xs, y="f")
    parts = {"initializers": constants, "imports": [(MICROSOFT, 1)]}
    (expected_y,) = run(model(nodes, inputs, ["y"], **parts), feeds)
    lowered = ortops.lower(model([*nodes, gradient], inputs, ["y", *gradients], **parts))
    y, *found = run(lowered, feeds)
    if case.y is None:
        np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)
    else:  # forward, the operator stays as it is
        assert case.op in [n.op_type for n in lowered.graph.node]
        np.testing.assert_array_equal(y, expected_y)
    step = 1e-4 if case.y is None else 1.01 * float(case.y[0])  # a tie may be rounded otherwise
    np.testing.assert_allclose(y, evaluate(wide), atol=step)
    arrays = list(wide.values())
    for position, result in enumerate(found):
        expected = differences(total, arrays, position)
        assert result.shape == expected.shape
        largest = np.abs(expected).max(initial=1)
        np.testing.assert_allclose(
            result, expected, rtol=1e-3, atol=1e-3 * largest, err_msg=xs[position]
        )


def real_model_gradient(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the gradient of Σ sin(output) with respect to the input."""
    whole = onnx.ModelProto()
    whole.CopyFrom(proto)
    (x,) = feeds
    whole.graph.node.append(helper.make_node("Sin", [whole.graph.output[0].name], ["curved"]))
    whole.graph.node.append(node("Gradient", [x], ["d"], xs=[x], y="curved"))
    del whole.graph.output[:]
    whole.graph.output.append(helper.make_empty_tensor_value_info("d"))
    whole.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    (d,) = run(ortops.lower(whole), feeds)
    return d


class Batches(CalibrationDataReader):
    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.batches = iter([{name: normal(*shape, seed=seed)} for seed in range(8)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("form", list(QuantFormat), ids=str)
@pytest.mark.parametrize(
    ("made", "shape"),
    [(lenet(), (2, 1, 8, 8)), (transformer(), (2, 3, 8))],
    ids=["cnn", "transformer"],
)
def test_models_that_onnxruntime_has_quantized(made, shape, form, per_channel, tmp_path) -> None:
    """The gradient points where that of the model before it was quantized does."""
    onnx.save(made, tmp_path / "model.onnx")
    (x,) = (value.name for value in made.graph.input)
    quantize_static(
        tmp_path / "model.onnx",
        tmp_path / "quantized.onnx",
        Batches(x, shape),
        quant_format=form,
        per_channel=per_channel,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        reduce_range=True,  # as onnxruntime advises for CPUs without VNNI
    )
    quantized = onnx.load(tmp_path / "quantized.onnx")
    if form == QuantFormat.QOperator:
        assert "QGemm" in [n.op_type for n in quantized.graph.node]
    feeds = {x: normal(*shape, seed=20)}
    expected, found = (real_model_gradient(proto, feeds) for proto in (made, quantized))
    cosine = (expected * found).sum() / np.linalg.norm(expected) / np.linalg.norm(found)
    assert cosine > 0.95
    assert 0.9 < np.linalg.norm(found) / np.linalg.norm(expected) < 1.1


N = helper.make_node
OTHERS = [
    Checked("DequantizeLinear", 1, [0], MICROSOFT),
    Checked("DynamicQuantizeLSTM", 1, [0, 3, 5, 6], MICROSOFT),
    Checked("DynamicQuantizeMatMul", 1, [0], MICROSOFT),
    Checked("NhwcMaxPool", 1, [0], MICROSOFT),
    Checked("QuantizeLinear", 1, [0], MICROSOFT),
]
MOVES: list[tuple[str, list[onnx.NodeProto], dict[str, np.ndarray]]] = [
    ("MaxPool", [N("MaxPool", ["q"], ["m"], kernel_shape=[2, 2])], {}),
    ("MaxPool-tiles", [N("MaxPool", ["q"], ["m"], kernel_shape=[2, 2], strides=[2, 2])], {}),
    (
        "Concat-Split",
        [
            N("Split", ["q"], ["a", "b"], axis=3, num_outputs=2),
            N("Concat", ["b", "q", "b"], ["m"], axis=3),
        ],
        {},
    ),
    (
        "Slice-Gather",
        [N("Slice", ["q", "one", "three", "two"], ["a"]), N("Gather", ["a", "at"], ["m"], axis=3)],
        {
            "one": np.array([1]),
            "two": np.array([2]),
            "three": np.array([3]),
            "at": np.array([1, 1]),
        },
    ),
    ("Pad", [N("Pad", ["q", "pads"], ["m"])], {"pads": np.array([0, 0, 1, 0, 0, 0, -1, 2])}),
    (
        "Pad-edge-Tile",
        [N("Pad", ["q", "pads"], ["a"], mode="edge"), N("Tile", ["a", "times"], ["m"])],
        {"pads": np.array([0, 0, 1, 0, 0, 0, 0, 2]), "times": np.array([1, 2, 1, 1])},
    ),
    ("Where", [N("Where", ["c", "q", "z"], ["m"])], {"c": CHOICE[0, :1, :4] > 0}),
    (
        "Resize",
        [
            N("Resize", ["q", "", "twice"], ["m"], mode="nearest"),
        ],
        {"twice": np.array([1, 1, 2, 2], F)},
    ),
    (
        "DepthToSpace-Expand",
        [N("SpaceToDepth", ["q"], ["a"], blocksize=2), N("Expand", ["a", "sizes"], ["m"])],
        {"sizes": np.array([2, 8, 2, 2])},
    ),
]


@pytest.mark.quick(24)
@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    ("between", "constants"), [m[1:] for m in MOVES], ids=[m[0] for m in MOVES]
)
def test_quantized_numbers_that_are_moved(between, constants, symbolic, kind) -> None:
    x = np.random.default_rng(3).permutation(32).reshape(1, 2, 4, 4).astype(F) * 2
    shape = ["n", "c", "h", "w"] if symbolic else x.shape
    constants = {**constants, "z": kind(0), "s": F(1)}

    real = [onnx.NodeProto.FromString(n.SerializeToString()) for n in between]
    for moved in real:
        for index, name in enumerate(moved.input):
            moved.input[index] = {"q": "x", "z": "zero"}.get(name, name)
    plain = model(real, [value("x", shape)], ["m"], initializers={**constants, "zero": F(0)})
    w = normal(*run(plain, {"x": x})[0].shape)

    nodes = [
        N("QuantizeLinear", ["x", "s", "z"], ["q"]),
        *between,
        N("DequantizeLinear", ["m", "s", "z"], ["y"]),
        N("Mul", ["y", "weights"], ["p"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="p"),
    ]
    whole = model(nodes, [value("x", shape)], ["d"], initializers={**constants, "weights": w})
    (found,) = run(ortops.lower(whole), {"x": x})
    session = plain_session(plain)
    expected = differences(
        lambda a: float(np.sum(w * run_session(session, {"x": a[0]})[0], dtype=np.float64)),
        [x],
        0,
        0.25,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_pooling_with_the_channels_last() -> None:
    nodes = [
        N("QuantizeLinear", ["x", "s", "z"], ["q"]),
        N("NhwcMaxPool", ["q"], ["m"], domain=MICROSOFT, kernel_shape=[2, 2]),
        N("DequantizeLinear", ["m", "s", "z"], ["y"]),
        N("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="p"),
    ]
    w = np.array([[[[2, 3]], [[5, 7]]]], F)  # two windows, one above the other, of two channels
    parts = {"s": F(1), "z": np.uint8(0), "w": w}
    whole = model(
        nodes, [value("x", [1, 3, 2, 2])], ["d"], initializers=parts, imports=[(MICROSOFT, 1)]
    )
    x = np.array([[[[1, 9], [2, 8]], [[4, 3], [3, 2]], [[0, 5], [1, 6]]]], F)
    (d,) = run(ortops.lower(whole), {"x": x})
    expected = [[[[0, 3], [0, 0]], [[2 + 5, 0], [0, 0]], [[0, 0], [0, 7]]]]
    np.testing.assert_array_equal(d, expected)


def test_dynamically_quantized_product() -> None:
    x, b, w = normal(2, 3, 4), np.arange(-10, 10, dtype=np.int8).reshape(4, 5) * 5, normal(2, 3, 5)
    constants = {"b": b, "sb": F(0.02), "zb": np.int8(3), "bias": normal(5, seed=2), "w": w}
    nodes = [
        N("DynamicQuantizeMatMul", ["x", "b", "sb", "zb", "bias"], ["y"], domain=MICROSOFT),
        N("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="p"),
    ]
    parts = {"initializers": constants, "imports": [(MICROSOFT, 1)]}
    y, d = run(ortops.lower(model(nodes, [value("x", ["n", 3, 4])], ["y", "d"], **parts)), {"x": x})
    (expected_y,) = run(model(nodes[:1], [value("x", ["n", 3, 4])], ["y"], **parts), {"x": x})
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)
    weights = (b.astype(np.float64) - 3) * 0.02
    scale = np.ptp(x) / 255
    added = np.rint(x / scale) - x / scale

    def total(arrays: Sequence[np.ndarray]) -> float:
        rounded = arrays[0] + added * np.ptp(arrays[0]) / 255  # the scale is that of the two ends
        return float((w * (rounded @ weights)).sum())

    expected = differences(total, [x.astype(np.float64)], 0)
    np.testing.assert_allclose(d, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("per_column", [False, True], ids=["tensor", "columns"])
def test_dynamically_quantized_lstm(per_column: bool, direction: str) -> None:
    """The gradient is that of an LSTM with the weights that the integers stand for."""
    directions = 2 if direction == "bidirectional" else 1
    rng = np.random.default_rng(11)
    given = {
        # 7 bits: without VNNI, onnxruntime adds two products of 8 bits in 16.
        "w": rng.integers(-63, 64, (directions, 2, 12)).astype(np.int8),
        "r": rng.integers(-63, 64, (directions, 3, 12)).astype(np.int8),
        "b": 0.3 * normal(directions, 24),
        "h": normal(directions, 2, 3, seed=1),
        "c": normal(directions, 2, 3, seed=2),
    }
    shape = (directions, 12) if per_column else (directions,)
    for name in "wr":
        given[f"s{name}"] = rng.uniform(0.005, 0.01, shape).astype(F)
        given[f"z{name}"] = np.zeros(shape, np.int8)
    x = normal(4, 2, 2, seed=3)
    names = ["x", "w", "r", "b", "", "h", "c", "", "sw", "zw", "sr", "zr"]
    nodes = [
        N(
            "DynamicQuantizeLSTM",
            names,
            ["Y", "Y_h", "Y_c"],
            domain=MICROSOFT,
            hidden_size=3,
            direction=direction,
        ),
        *(N("Mul", [name, f"w_{name}"], [f"p_{name}"]) for name in ("Y", "Y_h", "Y_c")),
        *(N("ReduceSum", [f"p_{n}"], [f"t_{n}"], keepdims=0) for n in ("Y", "Y_h", "Y_c")),
        N("Sum", ["t_Y", "t_Y_h", "t_Y_c"], ["f"]),
    ]

    def real(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        x, b, h, c = arrays
        weights = {}
        for name, key in (("w", "W"), ("r", "R")):
            scale = given[f"s{name}"].astype(np.float64).reshape(directions, 1, -1)
            weights[key] = (given[name] * scale).transpose(0, 2, 1)
        return recurrence(
            "LSTM",
            {"X": x, "B": b, "h": h, "c": c, **weights},
            {"direction": direction},
        )

    xs = ["x", "b", "h", "c"]
    arrays = [a.astype(np.float64) for a in (x, given["b"], given["h"], given["c"])]
    w = {f"w_{n}": normal(*a.shape, seed=5) for n, a in real(arrays).items()}
    gradient = node("Gradient", xs, [f"d{n}" for n in xs], xs=xs, y="f")
    whole = model(
        [*nodes, gradient],
        [value("x", [4, 2, 2])],
        ["Y", *(f"d{n}" for n in xs)],
        initializers={**given, **w},
        imports=[(MICROSOFT, 1)],
    )
    lowered = ortops.lower(whole)
    assert "DynamicQuantizeLSTM" in [n.op_type for n in lowered.graph.node]
    y, *found = run(lowered, {"x": x})
    np.testing.assert_allclose(y, real(arrays)["Y"], atol=0.03)

    def total(arrays: Sequence[np.ndarray]) -> float:
        return float(sum((w[f"w_{n}"] * a).sum() for n, a in real(arrays).items()))

    for position, result in enumerate(found):
        expected = differences(total, arrays, position)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


def test_quantization_operators_of_onnxruntime() -> None:
    x = np.array([[-1.3, 0.2], [0.6, 30], [1, 2]], F)
    nodes = [
        N("QuantizeLinear", ["x", "s", "z"], ["q"], domain=MICROSOFT, axis=1),
        N("DequantizeLinear", ["q", "s", "z"], ["y"], domain=MICROSOFT, axis=1),
        N("Mul", ["y", "w"], ["p"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="p"),
    ]
    w = np.arange(1, 7, dtype=F).reshape(3, 2)
    parts = {"s": np.array([0.001, 0.0001], F), "z": np.zeros(2, np.int16), "w": w}
    whole = model(nodes, [value("x", [3, 2])], ["d"], initializers=parts, imports=[(MICROSOFT, 1)])
    (d,) = run(ortops.lower(whole), {"x": x})
    np.testing.assert_allclose(d, [[1, 2], [3, 0], [5, 6]], rtol=1e-5)  # 30 / 0.0001 saturates


def test_cast_like_carries_the_cotangent_of_integers() -> None:
    nodes = [
        N("QuantizeLinear", ["x", "s"], ["q"]),
        N("CastLike", ["q", "x"], ["f"]),
        N("Mul", ["f", "s"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    whole = model(nodes, [value("x", [2])], ["d"], initializers={"s": F(0.1)})
    (d,) = run(ortops.lower(whole), {"x": np.array([1, 2], F)})
    np.testing.assert_allclose(d, [1, 1], rtol=1e-6)


def test_quantized_attention_that_rotates_is_refused() -> None:
    names = ["x", "w", "b", "s", "s"]
    fused = N("QAttention", names, ["y"], "qa", domain=MICROSOFT, num_heads=2, do_rotary=1)
    kinds = [TensorProto.UINT8, TensorProto.INT8, 1, 1]
    shapes = [[2, 3, 6], [6, 24], [24], []]
    inputs = [value(*given) for given in zip("xwbs", shapes, kinds, strict=True)]
    gradient = node("Gradient", ["b"], ["d"], xs=["b"], y="y")
    whole = model([fused, gradient], inputs, ["d"], imports=[(MICROSOFT, 1)])
    with pytest.raises(
        ortops.UnsupportedError, match=r"QAttention node 'qa': no gradient for do_rotary=1"
    ):
        ortops.lower(whole)
