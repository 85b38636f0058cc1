"""Initializers in the places of weights that are constants, and are not trained by default."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest
from violations import all_violations

import ortops
from models.detector import STRIDES, detector
from ortops import build_training_model, op
from ortops.engine.building.fixed_values import table_kind
from ortops.engine.building.preparation import prepare_for_training
from ortops.engine.check import check
from ortops.losses import TaskAligned
from ortops.optimizers import SGD
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


@pytest.mark.quick(2)
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
    "multiples of positions": [np.outer(0.5 ** np.arange(1, 5), np.arange(12))[:, None]],
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
        "they are not trained unless trainable= names them, or ortops.surgery.untie gives each its "
        "own"
    )


# --------------------------------------------------------------------------- fixed matrices


_SOBEL = np.outer([1.0, 2, 1], [1.0, 0, -1])
_GAUSS = np.array([1.0, 4, 6, 4, 1]) / 16
_BLUR = np.outer(_GAUSS, _GAUSS)
_LAPLACE = np.array([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
_TRIL = np.tril(np.ones((6, 6)))
_RANDOM = _DRAW.standard_normal


def _sinusoids(positions: int, features: int) -> npt.NDArray[np.float64]:
    angles = np.outer(np.arange(positions), 1e4 ** (-np.arange(0, features, 2) / features))
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(positions, -1)


def _of_grid(side: int, features: int) -> npt.NDArray[np.float64]:
    """Position embeddings of a vision transformer: of rows and of columns, sines before cosines."""
    half = _sinusoids(side, features // 2)
    half = np.concatenate([half[:, ::2], half[:, 1::2]], axis=1)
    rows, columns = np.divmod(np.arange(side * side), side)
    return np.concatenate([half[rows], half[columns]], axis=1)


_CONV = "y = Conv (x, w)"
_GATHER = "i = Cast <to = 7> (x)  y = Gather (w, i)"
_FIXED: dict[str, tuple[str, str, npt.NDArray[np.float64]]] = {
    # How the matrix w is read, what it is said to hold (nothing if it is a weight), and its values.
    "identity": ("y = MatMul (x, w)", "holds the identity", np.eye(6)),
    "identity, a batch of one": ("y = MatMul (x, w)", "holds the identity", np.eye(6)[None]),
    "identity times deviations": ("e = Exp (s)  y = Mul (w, e)", "holds the identity", np.eye(6)),
    "permutation": ("y = MatMul (x, w)", "holds a permutation", np.eye(6)[[2, 0, 1, 3, 5, 4]]),
    "causal mask": ("y = Mul (x, w)", "holds a triangular mask", _TRIL),
    "blocks": ("y = Mul (x, w)", "holds a mask of 0 and 1", np.kron(np.eye(3), np.ones((2, 2)))),
    "mask that is added": ("p = MatMul (x, x)  y = Add (p, w)", "mask of 0 and -1", _TRIL * -1e9),
    "mask of -inf": ("y = Add (x, w)", "and -inf", np.where(_TRIL == 0, -np.inf, 0)),
    "mask that is cut": ("u = Slice (w, n, m)  y = Mul (x, u)", "a triangular mask", _TRIL),
    "mask of a comparison": ("c = Equal (w, x)  y = Where (c, x, s)", "triangular mask", _TRIL),
    "orthogonal": ("y = MatMul (x, w)", "", np.linalg.qr(_RANDOM((6, 6)))[0]),
    "almost the identity": ("y = MatMul (x, w)", "", np.eye(6) + 1e-6),
    "other matrix of 0 and 1": ("y = MatMul (x, w)", "", np.eye(6)[[0, 0, 2, 3, 3, 5]]),
    "sums up to each column": ("y = MatMul (x, w)", "holds a triangular mask", _TRIL.T),
    "small identity": ("a = Slice (x, n, two, two)  y = MatMul (a, w)", "", np.eye(2)),
    "twice the identity": ("y = MatMul (x, w)", "", 2 * np.eye(6)),
    "zeros": ("y = MatMul (x, w)", "", np.zeros((6, 6))),
    "ones": ("y = MatMul (x, w)", "", np.ones((6, 6))),
    "one-hot embedding": (_GATHER, "", np.eye(6)),
    "bias of 0 and 1": ("p = MatMul (x, v)  y = Add (p, w)", "", np.eye(6)[0]),
    "Sobel": (_CONV, "holds the kernel of a filter", np.stack([_SOBEL] * 3)[:, None]),
    "Sobel, both": (_CONV, "the kernel of a filter", np.stack([_SOBEL, _SOBEL.T])[:, None]),
    "Laplace": (
        _CONV,
        "the kernel of a filter",
        _LAPLACE[None, None],
    ),
    "FIR": (_CONV, "the kernel of a filter", _GAUSS[None, None]),
    "blur of some strengths": (
        *(_CONV, "the kernel of a filter"),
        _BLUR * np.array([0.3, 1.7, 0.9]).reshape(3, 1, 1, 1),
    ),
    "box": (_CONV, "the kernel of a filter", np.full((3, 1, 3, 3), 1 / 9)),
    "blur that is expanded": (
        *("u = Expand (w, o)  y = Conv <group = 3> (x, u)", "the kernel of a filter"),
        _BLUR[None, None],
    ),
    "upsampling": ("y = ConvTranspose (x, w)", "the kernel", _BLUR[None, None]),
    "random kernel": (_CONV, "", _RANDOM((4, 3, 3, 3))),
    "almost a blur": (
        _CONV,
        "",
        _BLUR[None, None] + 1e-4 * _RANDOM((1, 1, 5, 5)),
    ),
    "different symmetric kernels": (
        *(_CONV, ""),
        np.stack([_BLUR, np.outer([1, 2, 5, 2, 1], [1, 2, 5, 2, 1.0])])[:, None],
    ),
    "kernels of one element": (_CONV, "", _RANDOM((4, 3, 1, 1))),
    "kernels of zeros": (_CONV, "", np.zeros((4, 3, 3, 3))),
    "sinusoids": ("y = Add (x, w)", "holds cosines", _sinusoids(50, 16)),
    "few sinusoids, after a product": (
        *("p = MatMul (x, v)  y = Add (p, w)", "holds sines and cosines"),
        _sinusoids(7, 6)[None],
    ),
    "sinusoids by Gather": (
        _GATHER,
        "cosines",
        _sinusoids(50, 6),
    ),
    "sinusoids of a grid": (
        *("y = Add (x, w)", "holds sines and cosines"),
        np.concatenate([np.zeros((1, 32)), _of_grid(4, 32)])[None],
    ),
    "sinusoids, features first": (
        *("y = Add (x, w)", "holds sines and cosines"),
        _of_grid(6, 16).T.reshape(1, 16, 6, 6),
    ),
    "signs": ("y = Mul (x, w)", "", np.sign(_RANDOM((16, 8)))),
    "points of circles": (
        *("y = Mul (x, w)", ""),
        _sinusoids(16, 8)[:, :2].repeat(4, axis=1)[_DRAW.permutation(16)] * _RANDOM((16, 1)),
    ),
    "frequencies of positions": (
        "p = Mul (t, w)  y = Sin (p)",
        "holds the freq",
        2.0 ** np.arange(6),
    ),
    "other frequencies of integers": (
        *("i = Cast <to = 1> (k)  p = Mul (i, w)  y = Cos (p)", "holds the frequencies"),
        np.array([1, 0.3, 0.2, 0.01, 0.005, 0.001]),
    ),
    "angles of positions": ("y = Cos (w)", "angles", np.outer(np.arange(7), _DRAW.uniform(size=6))),
    "angles that are learned": ("y = Cos (w)", "", _RANDOM((7, 6))),
    "angles that start at 0": ("y = Sin (w)", "", np.zeros((7, 6))),
    "frequencies that are learned": ("p = Mul (t, w)  y = Sin (p)", "", _RANDOM(6)),
}


def _read_by(nodes: str, values: npt.NDArray[np.float64], *, constant: bool) -> onnx.ModelProto:
    model = _model(
        f"m (float[n, 6, 6] x, float[n, 1] t, int64[n, 1] k) => (float[a, b, c] y) {{ {nodes} }}",
        w=np.asarray(values, np.float32),
        v=_DRAW.standard_normal((6, 6)),
        s=_DRAW.standard_normal(6),
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    if "Conv" in nodes:
        model.graph.input[0].type.tensor_type.shape.ClearField("dim")
        for size in (
            "n",
            values.shape[1] if "group" not in nodes else 3,
            *["h"] * (values.ndim - 2),
        ):
            dim = model.graph.input[0].type.tensor_type.shape.dim.add()
            setattr(dim, "dim_param" if isinstance(size, str) else "dim_value", size)
    for name, value in {"n": [0], "m": [6], "o": [3, 1, 5, 5], "two": [2]}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    if constant:
        tensor = model.graph.initializer[0]
        node = onnx.helper.make_node("Constant", [], ["w"], value=tensor)
        nodes_before = list(model.graph.node)
        del model.graph.node[:], model.graph.initializer[0]
        model.graph.node.extend([node, *nodes_before])
    return model


@pytest.mark.parametrize("constant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_matrices_that_are_fixed_by_their_values(constant: bool) -> None:
    with all_violations() as checked:
        for case, (nodes, expected, values) in _FIXED.items():
            with checked(case):
                work = prepare_for_training(
                    _read_by(nodes, values, constant=constant), None, "auto"
                )
                reason = work.choice.reasons.get("w", "")
                assert expected in reason if expected else not reason, reason
                assert ("w" in work.choice.trained) == (not expected)
                assert ("w" in work.choice.unexpected) == bool(expected)


def test_the_kernel_of_a_filter_that_is_stored_in_another_shape() -> None:
    model = _model(
        "m (float[n, 1, h, w] x) => (float[n, 3, a, b] y)"
        " { k = Reshape (flat, q)  y = Conv (x, k) }",
        flat=np.stack([_SOBEL] * 3).reshape(27),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([3, 1, 3, 3]), "q"))
    reasons = prepare_for_training(model, None, "auto").choice.reasons
    assert "holds the kernel of a filter" in reasons["flat"]


def test_fixed_matrices_are_said_and_trained_by_their_names_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The likelihood of a policy whose deviations an exporter wrote as identity · exp(log_std)."""
    model = _model(
        "m (float[n, 3] x) => (float[n, 2] y, float[2, 2] scale) { y = MatMul (x, w)"
        "  e = Exp (log_std)  scale = Mul (eye, e) }",
        w=_DRAW.standard_normal((3, 2)),
        log_std=np.zeros(2),
        eye=np.eye(2),
    )

    def loss(y: ortops.Tensor, scale: ortops.Tensor) -> ortops.Tensor:
        return op.ReduceMean(y * y, keepdims=0) + op.ReduceMean(scale * scale, keepdims=0)

    said = "'eye' holds the identity, in Mul node 'scale'; it is not trained unless "
    said += "trainable= names it"
    for trainable, found, is_said in (
        (None, {"w", "log_std"}, True),
        (["*"], {"w", "log_std"}, True),
        (["w", "e*"], set(), False),
        (["eye"], {"eye"}, False),
        (["*", "eye"], {"w", "log_std", "eye"}, False),
    ):
        caplog.clear()
        settings: Any = {"loss": loss, "optimizer": "SGD", "trainable": trainable}
        if not found:
            with pytest.raises(ortops.ModelError, match=r"'e\*' matches no weight, only 'eye'"):
                ortops.build_training_model(model, **settings)
            continue
        session = ortops.TrainingSession(ortops.build_training_model(model, **settings))
        assert set(session.parameters) == found
        assert (said in caplog.messages) == is_said


def test_if_nothing_is_left_the_error_lists_all_with_reasons() -> None:
    model = _model(
        "m (float[n, 4] x) => (float[n, 4] y) { a = MatMul (x, eye)  b = Mul (a, factor)"
        "  f = Floor (steps)  y = Add (b, f) }",
        eye=np.eye(4),
        factor=np.array(2.0),
        steps=_DRAW.standard_normal(4),
    )
    expected = (
        "only on 'eye', which holds the identity, in MatMul node 'a'; 'factor', which is one "
        "number, in Mul node 'b'; 'steps', which reaches the loss only through Floor node 'f'"
    )
    with pytest.raises(ortops.ModelError) as raised:
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert expected in str(raised.value)


# --------------------------------------------------------------- what a network does not have


_NORMALIZED = {
    "LayerNormalization": "y = LayerNormalization (x, scale, bias)",
    "InstanceNormalization": "r = Reshape (x, to)  i = InstanceNormalization (r, scale, bias)"
    "  y = Reshape (i, back)",
    "BatchNormalization": "y = BatchNormalization (x, scale, bias, mean, variance)",
}


def test_what_exporters_write_for_normalizations_is_not_trained() -> None:
    """Names tell it from what a module owns: modules are called alike in scale and bias."""
    cases = {
        ("norm.weight", "norm.bias"): set(),
        ("gamma", "beta"): set(),
        ("norm.weight.1", "norm.bias.1"): set(),  # as untie names copies
        ("norm.weight", "/norm/Constant_output_0"): {"bias"},
        ("norm.weight", "zeros_of_4"): {"bias"},
        ("norm.weight", "ortshared_1_1_4_0_token_7"): {"bias"},
        ("val_8", "val_11"): {"scale", "bias"},
        ("/norm/Constant_1_output_0", "/norm/Constant_2_output_0"): {"scale", "bias"},
        ("12", "13"): {"scale", "bias"},
    }
    with all_violations() as checked:
        for kind, text in _NORMALIZED.items():
            for (scale, bias), left_out in cases.items():
                with checked(f"{kind}, {scale}, {bias}"):
                    arrays = {"scale": np.ones(4), "bias": np.zeros(4)}
                    arrays |= {"mean": np.zeros(4) + 0.1, "variance": np.ones(4) + 0.1}
                    model = _model(
                        f"m (float[n, 4] x) => (float[n, 4] z) {{ {text}  z = MatMul (y, w) }}",
                        w=_DRAW.standard_normal((4, 4)),
                        **{name: a for name, a in arrays.items() if name in text},
                    )
                    for name, value in {"to": [0, 4, -1], "back": [-1, 4]}.items():
                        given = onnx.numpy_helper.from_array(np.array(value), name)
                        model.graph.initializer.append(given)
                    for node in model.graph.node:
                        renamed = {"scale": scale, "bias": bias}
                        node.input[:] = [renamed.get(name, name) for name in node.input]
                    for tensor in model.graph.initializer:
                        tensor.name = {"scale": scale, "bias": bias}.get(tensor.name, tensor.name)
                    work = prepare_for_training(model, None, "auto")
                    expected = {{"scale": scale, "bias": bias}[name] for name in left_out}
                    assert expected == {scale, bias} - set(work.choice.trained)
                    assert expected == work.choice.unexpected
                    assert not work.frozen  # a normalization without parameters learns, too


# -------------------------------------------------------------- what the loss reads without nodes


_MOVES = {
    "none": "spread = Identity (log_std)",
    "Expand": "s = Shape (y)  spread = Expand (log_std, s)",
    "Unsqueeze, Tile": "u = Unsqueeze (log_std, zero)  spread = Tile (u, twice)",
    "Reshape, Cast": "c = Cast <to = 11> (log_std)  d = Cast <to = 1> (c)"
    "  spread = Reshape (d, flat)",
    "Slice": "spread = Slice (log_std, zero, two)",
    "Concat": "s = Shape (y)  e = Expand (log_std, s)  spread = Concat <axis = 1> (y, e)",
    "If": "yes = Constant <value_int = 1> ()  b = Cast <to = 9> (yes)  spread = If (b) <"
    " then_branch = t () => (float[2] p) { p = Identity (log_std) },"
    " else_branch = e () => (float[2] q) { q = Neg (log_std) }>",
}


@pytest.mark.nightly
@pytest.mark.parametrize("case", _MOVES)
@pytest.mark.parametrize("trainable", [None, pytest.param(["*"], marks=pytest.mark.slow)])
def test_a_weight_is_trained_that_only_the_loss_reads(
    case: str, trainable: list[str] | None
) -> None:
    """As the deviations of a policy: the likelihood's derivative by hand."""
    model = _model(
        f"m (float[n, 3] x) => (float[n, 2] y, float[a, b] spread) {{ y = MatMul (x, w)"
        f"  {_MOVES[case]} }}",
        w=_DRAW.standard_normal((3, 2)),
        log_std=np.array([0.5, -0.25]),
    )
    for name, value in {"zero": [0], "two": [2], "twice": [2, 1], "flat": [-1, 2]}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    model.graph.output[1].type.tensor_type.ClearField("shape")

    def loss(y: ortops.Tensor, spread: ortops.Tensor) -> ortops.Tensor:
        return op.ReduceMean(y * y, keepdims=0) + op.ReduceMean(spread[-1:], keepdims=0)

    settings: Any = {"loss": loss, "optimizer": SGD(1.0), "trainable": trainable}
    session = ortops.TrainingSession(ortops.build_training_model(model, **settings))
    assert set(session.parameters) == {"w", "log_std"}
    session.step({"x": np.ones((2, 3), np.float32)})
    moved = session.parameters["log_std"] - np.float32([0.5, -0.25])
    parts = {"Concat": 0.25, "If": 1.0, "none": 1.0, "Slice": 1.0}
    expected = -np.full(2, parts.get(case, 0.5))
    if case in ("none", "Slice", "If"):
        expected = np.array([0.0, -1.0])
    np.testing.assert_allclose(moved, expected, rtol=1e-5)


@pytest.mark.parametrize("as_output", [False, True])
def test_a_likelihood_reads_a_weight_itself(as_output: bool) -> None:
    model = _model(
        "m (float[n, 3] x) => (float[n, 2] y) { y = MatMul (x, w) }",
        w=_DRAW.standard_normal((3, 2)),
        log_variance=np.zeros((1, 2)),
    )
    if as_output:  # as PyTorch's dynamo writes a tensor that it has computed in advance
        made = onnx.helper.make_tensor_value_info("log_variance", 1, [1, 2])
        model.graph.output.append(made)
    loss = ortops.losses.GaussianNLL("y", log_variance="log_variance")
    report = check(model, loss=loss)
    assert set(report.parameters) == {"w", "log_variance"}
    other = check(model, loss=ortops.losses.MeanSquaredError("y"))
    assert other.reasons["log_variance"] == (
        "has no effect on the loss" if as_output else "is read by no node"
    )


# ----------------------------------------------------------------------- what is left out and said


def test_what_may_be_learned_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Names that exporters give to constants of the source are not said."""
    model = _model(
        "m (float[n, t, 2] x) => (float[n, t, 3] y) { m = MatMul (x, w)  e = Exp (logit_scale)"
        "  s = Mul (m, e)  a = Add (s, val_3)  p = Pow (a, exponent)  k = Clip (p, val_4)"
        "  g, last = GRU <hidden_size = 3> (k, W, R, , , h0)  q = Squeeze (g, one)"
        "  z, l = GRU <hidden_size = 3> (q, W, R, , , val_5)  y = Squeeze (z, one) }",
        w=_DRAW.standard_normal((2, 3)),
        logit_scale=np.array(0.7),
        exponent=np.array([1.0]),
        val_3=np.array(1.0),
        val_4=np.array(0.0),
        val_5=np.zeros((1, 2, 3)),
        h0=_DRAW.standard_normal((1, 2, 3)),
        W=_DRAW.standard_normal((1, 9, 3)),
        R=_DRAW.standard_normal((1, 9, 3)),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    settings: Any = {"loss": "MeanSquaredError", "optimizer": "SGD"}
    built = ortops.build_training_model(model, **settings)
    assert {b.key for b in built.training_info[0].update_binding} == {"w", "W", "R", "step"}
    (said,) = [message for message in caplog.messages if "not trained" in message]
    assert said == (
        "'logit_scale' is one number, in Exp node 'e'; 'exponent' is the Y of Pow node 'p'; 'h0' "
        "is the initial_h of GRU node 'g'; they are not trained unless trainable= names them"
    )
    named = ["w", "logit_scale", "exponent", "h0"]
    assert set(check(model, trainable=named).parameters) == set(named)


_STOPPED = {
    "Round (v)": "Round",
    "Sign (v)": "Sign",
    "Floor (v)": "Floor",
    "Where (c, x, h)": "Greater",
    "Gather (w, j)": "integers, from Cast",
}


def test_weights_behind_rounding_are_said_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with all_violations() as checked:
        for text, stop in _STOPPED.items():
            with checked(text):
                caplog.clear()
                model = _model(
                    "m (float[n, 4] x) => (float[a, b] y) { h = MatMul (x, w)  c = Greater (h, v)"
                    f"  j = Cast <to = 7> (v)  r = {text}  y = Add (r, h) }}",
                    w=_DRAW.standard_normal((4, 4)),
                    v=np.array([0, 1, 3, 2]),
                )
                model.graph.output[0].type.tensor_type.ClearField("shape")
                settings: Any = {"loss": lambda y: op.ReduceMean(y * y, keepdims=0)}
                report = check(model, **settings)
                assert set(report.parameters) == {"w"}
                reason = report.reasons["v"]
                assert reason.startswith("reaches the loss only through ")
                assert stop in reason
                assert f"not trained: 'v' {reason}" in report.said
                assert (f'@ortops.vjp("{stop}")' in reason) == ("integers" not in stop)
                assert reason in str(report)
                with pytest.raises(ortops.ModelError, match="does not depend on 'v'; leave it out"):
                    build_training_model(model, optimizer="SGD", trainable=["v"], **settings)


# ----------------------------------------------------------------- files of PyTorch's exporters


def _policy() -> tuple[Any, Any]:
    """Outputs of a network, and the deviations that it has learned as a matrix."""
    from torch import eye, nn, randn, zeros

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.log_std = nn.Linear(3, 4), nn.Parameter(zeros(4) + 0.1)
            self.register_buffer("eye", eye(4))

        def forward(self, x: Any) -> Any:
            return self.layer(x)[:, None] @ (self.eye * self.log_std.exp())

    return Policy(), randn(2, 3)


def _filtered() -> tuple[Any, Any]:
    """Images behind a Sobel filter, with normalizations that have no parameters, or some."""
    import torch
    from torch import nn

    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.tensor(_SOBEL).float().expand(4, 1, 3, 3).clone())
            self.groups, self.own = nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
            self.bare, self.layer = nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 3)

        def forward(self, x: Any) -> Any:
            x = nn.functional.conv2d(x, self.kernel, groups=4)
            return self.own(self.layer(self.bare(self.groups(x))))

    return Filtered(), torch.randn(2, 4, 9, 9)


def _positions() -> tuple[Any, Any]:
    """Rows with a table of sinusoids, attention that looks back, and a norm without a bias."""
    import torch
    from torch import nn

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor(_sinusoids(20, 6)).float())
            self.register_buffer("causal", torch.tril(torch.ones(20, 20)))
            self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6, bias=False)
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Any) -> Any:
            x = self.layer(x) + self.table[:7]
            scores = (x @ x.transpose(1, 2)) * self.causal[:7, :7]
            return self.norm(scores @ x) * self.scale

    return Positions(), torch.randn(2, 7, 6)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("exporter", ["torchscript", "torchscript training", "dynamo training"])
@pytest.mark.parametrize("build", [_policy, _filtered, _positions])
def test_parameters_of_exported_modules_are_trained_and_nothing_else(
    build: Any, exporter: str
) -> None:
    """What is trained has as many numbers as the module's parameters, but single ones."""
    import torch

    torch.manual_seed(0)
    module, x = build()
    settings: dict[str, Any] = {"dynamo": exporter.startswith("dynamo"), "verbose": False}
    if exporter.endswith("training"):
        module.train()
        settings["training"] = torch.onnx.TrainingMode.TRAINING
        if not settings["dynamo"]:
            settings["do_constant_folding"] = False
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        made = torch.onnx.export(module, (x,), None if settings["dynamo"] else file, **settings)
    model = made.model_proto if made else onnx.load_from_string(file.getvalue())
    report = check(model, loss="MeanSquaredError")
    assert not report.problems
    sizes = [parameter.numel() for parameter in module.parameters()]
    if build is _policy and settings["dynamo"]:  # which computes eye * exp(log_std) in advance
        sizes = [12, 4, 16]
    assert report.parameter_count == sum(size for size in sizes if size > 1)
    scale = [name for name in report.reasons if "scale" in name]
    said = " ".join(report.said)
    assert len(scale) == (build is _positions)
    assert all(f"'{name}' " in said for name in scale)


def test_a_scale_that_is_a_running_statistic_too_is_not_updated() -> None:
    """Dynamo stores the ones of a layer without parameters and its first variance once."""
    model = _model(
        "m (float[n, 2] x) => (float[n, 2] y) { h = BatchNormalization (x, n_running_var,"
        "  n_running_mean, n_running_mean, n_running_var)  y = MatMul (h, w) }",
        w=_DRAW.standard_normal((2, 2)),
        n_running_mean=np.zeros(2),
        n_running_var=np.ones(2),
    )
    settings: Any = {"loss": "MeanSquaredError", "optimizer": SGD(0.1)}
    session = ortops.TrainingSession(build_training_model(model, **settings))
    feeds = {"x": 3 + _DRAW.standard_normal((8, 2)).astype(np.float32)}
    feeds["targets"] = np.zeros((8, 2), np.float32)
    session.step(feeds)
    assert set(session.parameters) == {"w"}
    assert "n_running_var" not in session.state
    with pytest.raises(ortops.ModelError, match=r"has 'n_running_mean' as a .*\.untie\(model\)"):
        build_training_model(model, batch_normalization="train", **settings)
    untied = build_training_model(ortops.surgery.untie(model), **settings)
    session = ortops.TrainingSession(untied)
    loss = session.step(feeds)["loss"]
    x = feeds["x"].astype(np.float64)
    h = (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5)
    w = onnx.numpy_helper.to_array(model.graph.initializer[0])
    assert loss == pytest.approx(((h @ w) ** 2).mean(), rel=1e-5)
    assert set(session.parameters) == {"w"}
