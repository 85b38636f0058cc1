"""Steps of convolutions with many counts of channels and groups, against loops in numpy.

With `ORTOPS_SOAK`, all of them; otherwise those that fill a part of a block, and some others.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import onnx
import pytest
from attacks import SOAK
from onnx import helper, numpy_helper
from violations import all_violations

import ortops

SIZE = 5  # of images
ALL = [(channels, channels) for channels in range(1, 41)]
ALL += [
    (channels, group)
    for channels in (8, 12, 24, 40)
    for group in range(1, channels)
    if channels % group == 0
]
FEW = [(4, 4), (8, 8), (12, 12), (12, 3), (20, 20), (24, 24), (28, 28)]
CASES = (
    list(product(ALL, (1, 3, 5)))
    if SOAK > 1
    else [(each, 3) for each in FEW] + [((12, 12), 1), ((12, 12), 5)]
)


def model(w: np.ndarray, group: int) -> onnx.ModelProto:
    channels, _, kernel, _ = w.shape
    pads = [kernel // 2] * 4
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], group=group, pads=pads)]
    nodes += [helper.make_node("Conv", ["c", "v"], ["y"], group=group, pads=pads)]
    shape = ["n", channels, SIZE, SIZE]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(w, "w"), numpy_helper.from_array(w[::-1].copy(), "v")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def windows(x: np.ndarray, kernel: int) -> np.ndarray:
    """Returns [rows, channels, height, width, kernel, kernel] of an image with a border of 0."""
    pad = kernel // 2
    padded = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    return np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (2, 3))


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    return x.reshape(len(x), group, x.shape[1] // group, *x.shape[2:])


def convolve(x: np.ndarray, w: np.ndarray, group: int) -> np.ndarray:
    seen = grouped(windows(x, w.shape[2]), group)
    filters = w.reshape(group, -1, *w.shape[1:])
    return np.einsum("ngchwij,gmcij->ngmhw", seen, filters).reshape(x.shape)


def gradients(
    g: np.ndarray, x: np.ndarray, w: np.ndarray, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cotangents of x and w, of a convolution of odd kernels and as many channels."""
    seen, filters = grouped(windows(x, w.shape[2]), group), w.reshape(group, -1, *w.shape[1:])
    dw = np.einsum("ngchwij,ngmhw->gmcij", seen, grouped(g, group))
    back = grouped(windows(g, w.shape[2]), group)
    dx = np.einsum("ngmhwij,gmcij->ngchw", back, filters[..., ::-1, ::-1])
    return dx.reshape(x.shape), dw.reshape(w.shape)


@pytest.mark.slow
def test_groups() -> None:
    rng = np.random.default_rng(0)
    with all_violations() as check:
        for (channels, group), kernel in CASES:
            x = rng.normal(size=(2, channels, SIZE, SIZE))
            w = rng.normal(size=(channels, channels // group, kernel, kernel))
            v, c = w[::-1], convolve(x, w, group)
            y = convolve(c, v, group)
            dc, dv = gradients(2 * y / y.size, c, v, group)
            _, dw = gradients(dc, x, w, group)
            with check(f"{channels} channels, {group} groups, kernel {kernel}"):
                trainable = ortops.build_training_model(
                    model(w.astype(np.float32), group),
                    loss="MeanSquaredError",
                    optimizer=ortops.optimizers.SGD(learning_rate=1.0),
                    trainable=["w", "v"],
                )
                session = ortops.TrainingSession(trainable)
                batch = {"x": x.astype(np.float32), "targets": np.zeros(x.shape, np.float32)}
                loss = session.step(batch)["loss"]
                np.testing.assert_allclose(loss, np.mean(y * y), rtol=1e-4)
                for name, before, slope in (("w", w, dw), ("v", v, dv)):
                    close = 1e-4 * np.abs(slope).max()
                    moved = before - session.parameters[name]
                    np.testing.assert_allclose(moved, slope, rtol=0, atol=close, err_msg=name)
