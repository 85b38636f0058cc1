"""Initializers in the places of weights that are constants, and are not trained by default."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
from violations import all_violations

import ortops
from models.detector import STRIDES, detector
from ortops.building.tables import table_kind
from ortops.check import check
from ortops.losses import TaskAligned
from ortops.surgery import before_postprocessing

_DRAW = np.random.default_rng(0)


def _model(text: str, **weights: npt.NDArray[np.float32]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(array), name))
    return model


def _reasons(model: onnx.ModelProto, loss: str = "MeanSquaredError") -> dict[str, str]:
    report = check(model, loss=loss)
    assert not report.problems
    assert not set(report.parameters) & set(report.reasons)
    return report.reasons


# --------------------------------------------------------------------------- single numbers


@pytest.mark.parametrize("under", ["Log (a)", "Sqrt (a)", "Reciprocal (a)", "Pow (a, two)"])
def test_a_number_that_keeps_a_product_from_zero_is_not_trained(under: str) -> None:
    model = _model(
        f"m (float[n, 3] x) => (float[n, 2] y) {{ mel = MatMul (x, w)  b = Add (mel, eps)"
        f"  a = Identity (b)  y = {under} }}",
        w=_DRAW.uniform(0.5, 1, (3, 2)),
        eps=np.array(1e-8),
        two=np.array(2.0),
    )
    reasons = _reasons(model)
    assert reasons["eps"].startswith("is one number, added under ")
    assert "w" not in reasons
    trainable = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    session = ortops.TrainingSession(trainable)
    feeds = {"x": np.ones((2, 3), np.float32), "targets": np.zeros((2, 2), np.float32)}
    for _ in range(3):
        assert np.isfinite(session.step(feeds)["loss"])
    named = check(model, loss="MeanSquaredError", trainable=["w", "eps"])
    assert list(named.parameters) == ["w", "eps"]


def test_a_number_that_is_also_the_bound_of_a_clip_is_not_trained() -> None:
    model = _model(
        "m (float[n, 3] x) => (float[n, 2] y) { p = MatMul (x, w)  q = Add (p, one)"
        "  y = Clip (q, , one) }",
        w=_DRAW.standard_normal((3, 2)),
        one=np.array(1.0),
    )
    assert _reasons(model)["one"].startswith("is one number that 2 nodes read, such as Add")


def test_a_bias_of_one_number_and_slopes_that_nodes_share_are_trained() -> None:
    model = _model(
        "m (float[n, 3] x) => (float[n, 1] y) { p = MatMul (x, w)  q = Add (p, bias)"
        "  r = PRelu (q, slope)  s = MatMul (r, v)  y = PRelu (s, slope) }",
        w=_DRAW.standard_normal((3, 2)),
        bias=np.ones(1),
        slope=np.full(1, 0.25),
        v=np.ones((2, 1)),
    )
    assert not _reasons(model)


def test_a_matrix_that_gather_and_matmul_read_is_trained() -> None:
    model = _model(
        "m (int64[n] i) => (float[n, 9] y) { e = Gather (w, i)  t = Transpose <perm = [1, 0]> (w)"
        "  y = MatMul (e, t) }",
        w=_DRAW.standard_normal((9, 4)),
    )
    assert not _reasons(model)


# --------------------------------------------------------------------------- normalizations


def _normalized(scale: npt.NDArray[np.float32]) -> onnx.ModelProto:
    return _model(
        "m (float[n, 2, 5] x) => (float[n, 2, 5] y) { a = InstanceNormalization (x, scale, zeros)"
        "  b = Conv (a, w)  y = InstanceNormalization (b, scale, zeros) }",
        scale=scale,
        zeros=np.zeros(2),
        w=_DRAW.standard_normal((2, 2, 1)),
    )


def test_ones_and_zeros_that_normalizations_share_are_not_trained() -> None:
    reasons = _reasons(_normalized(np.ones(2, np.float32)))
    assert reasons["scale"].startswith("is all ones, shared by 2 normalizations, such as Inst")
    assert reasons["zeros"].startswith("is all zeros, shared by 2 normalizations, such as Inst")
    assert list(_reasons(_normalized(np.array([1, 2], np.float32)))) == ["zeros"]


def test_ones_of_one_normalization_are_trained() -> None:
    model = _model(
        "m (float[n, 2, 5] x) => (float[n, 2, 5] y) { y = InstanceNormalization (x, s, b) }",
        s=np.ones(2),
        b=np.zeros(2),
    )
    assert not _reasons(model)


# --------------------------------------------------------------------------- tables


def _mel_filters(filters: int, bins: int) -> npt.NDArray[np.float64]:
    """Triangles between equally spaced points of the mel scale (2595 log10(1 + f / 700))."""
    frequencies = np.linspace(0, 8000, bins)
    points = 700 * (10 ** (np.linspace(0, 2840, filters + 2) / 2595) - 1)
    rising = (frequencies - points[:-2, None]) / np.diff(points)[:-1, None]
    falling = (points[2:, None] - frequencies) / np.diff(points)[1:, None]
    return np.maximum(0, np.minimum(rising, falling))


_PHASES = 2 * np.pi / 64 * np.outer(np.arange(33), np.arange(64))
_HANN = 0.5 - 0.5 * np.cos(2 * np.pi / 64 * np.arange(64))
_POSITIONS = np.outer(np.arange(50), 1e4 ** -(np.arange(16) / 16))


def _cells(sizes: tuple[int, int], strides: tuple[int, ...]) -> list[tuple[float, float, int]]:
    """The column, row and size of each cell of the grids of a detector, in its order."""
    return [
        (column, row, stride)
        for stride in strides
        for row in range(sizes[0] // stride)
        for column in range(sizes[1] // stride)
    ]


_CELLS = np.array(_cells((640, 640), (8, 16, 32)))
_WIDE = np.array(_cells((64, 96), (8, 16)))
_TABLES = {
    "anchor points": [
        ((_CELLS[:, :2] + 0.5) * _CELLS[:, 2:]).T,  # in pixels
        (_CELLS[:, :2] + 0.5).T[None],  # in cells, as YOLOv8's exporter writes them
        *(_WIDE[:, :2] * _WIDE[:, 2:], (_WIDE[:, 1::-1] + 0.5) * _WIDE[:, 2:]),
    ],
    "sizes of cells": [_CELLS[:, 2], _WIDE[None, :, 2]],
    "equally spaced numbers": [np.arange(16), 20 * np.arange(360) + 1997.3],
    "a window function": [_HANN, np.hamming(400), np.hanning(512)],
    "the basis of a Fourier transform": [
        *(np.cos(_PHASES), _HANN * np.cos(_PHASES), -_HANN * np.sin(_PHASES)),
        np.concatenate([_HANN * np.cos(_PHASES), _HANN * np.sin(_PHASES)])[:, None],
        np.cos(_PHASES).T,
    ],
    "cosines": [
        np.cos(np.pi / 40 * np.outer(np.arange(13), np.arange(40) + 0.5)),
        np.concatenate([np.sin(_POSITIONS), np.cos(_POSITIONS)], axis=1),
    ],
    "triangular filters": [_mel_filters(40, 257), _mel_filters(80, 201).T],
}


def test_tables_are_recognized() -> None:
    with all_violations() as check:
        for kind, tables in _TABLES.items():
            for number, table in enumerate(tables):
                for dtype in (np.float32, np.float16):
                    with check(f"{kind}, table {number}, {dtype.__name__}"):
                        assert table_kind(table.astype(dtype)) == kind


_OTHERS: list[npt.NDArray[np.float64]] = [
    *(_DRAW.standard_normal(shape) for shape in ((64,), (64, 64), (16, 1, 3, 3), (40, 1, 9))),
    *(_DRAW.standard_normal((2, 64)), np.linspace(-1, 1, 64).reshape(2, 32), np.eye(9)[:, :2]),
    *(np.stack([np.arange(9.0), np.zeros(9)]), np.repeat([1.0, 2.0, 3.0], 8)),
    *(np.repeat([1.0, 2.0], [4, 8]), np.ones((2, 16))),
    *(np.ones(64), np.zeros((16, 16)), np.eye(16), np.tri(16), np.full(16, 0.1)),
    *(np.linspace(-1, 1, 64).reshape(8, 8), np.sin(np.arange(256)).reshape(16, 16)),
    *(2.0 ** -np.arange(8), np.log(np.arange(1, 17)), np.arange(16) ** 2),
    1 + 1e-4 * _DRAW.standard_normal(64),
    np.clip(_DRAW.standard_normal((16, 64)), 0, None),
    *(_HANN * _DRAW.uniform(0.9, 1.1, 64), np.array([1.0, np.inf] * 8), np.full(9, np.nan)),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_other_numbers_are_no_table() -> None:
    with all_violations() as check:
        for number, values in enumerate(_OTHERS):
            for dtype in (np.float32, np.float16):
                with check(f"numbers {number}, {dtype.__name__}"):
                    assert not table_kind(values.astype(dtype))


def test_tables_are_marked_and_trained_when_named() -> None:
    model = _model(
        "m (float[n, 64] x) => (float[n] y) { framed = Mul (x, window)"
        "  spectrum = MatMul (framed, basis)  mel = MatMul (spectrum, filters)"
        "  h = MatMul (mel, w)  p = Add (h, bias)  y = MatMul (p, bins) }",
        window=_HANN,
        basis=np.cos(_PHASES).T,
        filters=_mel_filters(12, 33).T,
        w=_DRAW.standard_normal((12, 8)),
        bias=np.arange(8),
        bins=np.arange(8),
    )
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    reasons = _reasons(model)
    assert {name: text.partition(", in ")[0] for name, text in reasons.items()} == {
        "window": "holds a window function",
        "basis": "holds the basis of a Fourier transform",
        "filters": "holds triangular filters",
        "bins": "holds equally spaced numbers",
    }
    report = check(model, loss="MeanSquaredError", trainable=["w", "basis"])
    assert list(report.parameters) == ["w", "basis"]
    with pytest.raises(ortops.ModelError, match=r"no weight, only 'basis', which holds the basis"):
        ortops.build_training_model(model, loss="L1", optimizer="SGD", trainable=["bas*"])


@pytest.mark.slow
def test_what_a_detector_computes_boxes_with_is_not_trained() -> None:
    report = check(before_postprocessing(detector()), loss=TaskAligned(strides=STRIDES))
    assert report.parameters
    assert all(name[0].isdigit() for name in report.parameters)  # the names of layers


def test_constants_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"loss": "MeanSquaredError", "optimizer": "SGD"}
    ortops.build_training_model(_normalized(np.ones(2, np.float32)), **settings)  # type: ignore[arg-type]
    (said,) = [message for message in caplog.messages if "is all ones" in message]
    assert said.endswith(
        "it is not trained unless trainable names it, or ortops.surgery.untie gives each its own "
        "(2 initializers are constants like it)"
    )
