"""Steps lowered for WebGPU: what they may not have, and that their numbers are the same on the CPU.

`test_javascript.py` runs them on WebGPU itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from running import CPU
from test_step_graph import batches, drive, trainable
from training_models import Arrays, initializers, op_types

from models.lenet import lenet
from ortops import (
    Tape,
    TrainingSession,
    UnsupportedError,
    build_training_model,
    op,
    step_graph,
)
from ortops.optimizers import SGD

DOUBLE = onnx.TensorProto.DOUBLE


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)


def plain(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=CPU)


def assert_for_webgpu(model: onnx.ModelProto) -> None:
    """Asserts that a graph has nothing that the provider lacks."""
    onnx.checker.check_model(model, full_check=True)
    for node in nodes_of(model.graph):
        attributes = {each.name: each for each in node.attribute}
        assert not node.domain
        assert node.op_type != "MaxUnpool"
        if node.op_type == "MaxPool":
            assert len(node.output) == 1
        if node.op_type == "BatchNormalization":
            assert not ("training_mode" in attributes and attributes["training_mode"].i)
        for attribute in node.attribute:
            assert attribute.t.data_type != DOUBLE
            assert not (attribute.name in ("to", "dtype") and attribute.i == DOUBLE)
    tensors = [*model.graph.initializer]
    assert all(tensor.data_type != DOUBLE for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "Momentum", "AdamW"])
@pytest.mark.parametrize("model", ["classifier", "normalizing"])
def test_numbers_are_those_of_the_training_session(model: str, optimizer: str) -> None:
    given = trainable(model, optimizer)
    step = step_graph(given, target="webgpu")
    assert_for_webgpu(step)
    session = TrainingSession(given)
    feeds = batches(model)
    expected = [session.step(batch) for batch in feeds]
    shown, state = drive(step, plain(step), feeds)
    for found, wanted in zip(shown, expected, strict=True):
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6)
    for name, array in state.items():
        np.testing.assert_allclose(array, session.state[name], rtol=2e-4, atol=5e-6, err_msg=name)


def test_a_convolution_net_trains_alike() -> None:
    given = build_training_model(
        lenet(channels=(4, 8), hidden=16), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1)
    )
    step = step_graph(given, target="webgpu")
    assert_for_webgpu(step)
    rng = np.random.default_rng(0)
    feeds = [
        {
            "images": rng.random((8, 1, 8, 8), np.float32),
            "labels": rng.integers(0, 10, 8),
        }
        for _ in range(4)
    ]
    session = TrainingSession(given)
    for batch in feeds:
        session.step(batch)
    _, state = drive(step, plain(step), feeds)
    for name, array in state.items():
        np.testing.assert_allclose(array, session.state[name], rtol=2e-5, atol=2e-6, err_msg=name)


def pooled(**attributes: Any) -> onnx.ModelProto:
    """The sum of a · MaxPool(x + w), whose gradient with respect to w is that of MaxPool."""
    with Tape(name="pooled") as tape:
        x = tape.input("x", np.float32, ["batch", 2, 6, 7])
        w = tape.initializer("w", np.zeros((1, 2, 6, 7), np.float32))
        tape.output(op.MaxPool(x + w, **attributes), "y")
    return build_training_model(tape.model(), loss="MeanSquaredError", optimizer=SGD(1.0))


def pooled_gradient(x: np.ndarray, cotangent: Any, kernel: Any, attributes: Any) -> np.ndarray:
    """The gradient by its definition: of equal maxima of a window, the first takes all."""
    strides = attributes.get("strides", [1, 1])
    dilations = attributes.get("dilations", [1, 1])
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=-np.inf)
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    rows = range(0, padded.shape[2] - extents[0] + 1, strides[0])
    columns = range(0, padded.shape[3] - extents[1] + 1, strides[1])
    y = np.zeros((*x.shape[:2], len(rows), len(columns)))
    found = []
    for n, c in np.ndindex(x.shape[:2]):
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                places = [
                    (row + a * dilations[0], column + b * dilations[1])
                    for a in range(kernel[0])
                    for b in range(kernel[1])
                ]
                best = max(places, key=lambda place: padded[n, c, *place])  # the first of equals
                y[n, c, i, j] = padded[n, c, *best]
                found.append(((n, c, i, j), (n, c, *best)))
    g = cotangent(y)
    dx = np.zeros(padded.shape)
    for window, best in found:
        dx[best] += g[window]
    return dx[:, :, top : top + x.shape[2], left : left + x.shape[3]]


@pytest.mark.parametrize("integers", [True, False], ids=["ties", "distinct"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2, 2], "strides": [2, 2]},
        {"kernel_shape": [3, 3], "strides": [2, 2]},
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1]},
        {"kernel_shape": [2, 2], "dilations": [2, 3]},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    ],
    ids=["tiles", "overlap", "padded", "dilated", "same"],
)
def test_the_gradient_of_max_pool_needs_no_indices(
    attributes: dict[str, Any], integers: bool
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 2, 6, 7)).astype(np.float32)
    if integers:
        x = np.minimum(np.round(x), 0)  # zeros, which padding must not be taken for
    given = pooled(**attributes)
    step = step_graph(given, target="webgpu")
    assert_for_webgpu(step)
    session = plain(step)
    shape = next(v.shape for v in session.get_outputs() if v.name == "y")
    size = [2, *(d for d in shape[1:])]
    targets = rng.standard_normal(size).astype(np.float32)
    _, state = drive(step, session, [{"x": x, "targets": targets}])
    wanted = pooled_gradient(
        x.astype(np.float64),
        lambda y: 2 * (y - targets) / y.size,
        attributes["kernel_shape"],
        attributes,
    )
    np.testing.assert_allclose(-state["w"], wanted.sum(0, keepdims=True), rtol=1e-5, atol=1e-7)


def test_what_webgpu_cannot_do_is_refused() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"'MaxPool': WebGPU does not support indices of maxima, .* and ceil_mode=0",
    ):
        step_graph(pooled(kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1), target="webgpu")
    with Tape(name="wide") as tape:
        x = tape.input("x", np.float64, ["batch", 1])
        tape.output(x @ tape.initializer("w", np.ones((1, 1))), "y")
    wide = build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(UnsupportedError, match="'x' is float64, which WebGPU does not support"):
        step_graph(wide, target="webgpu")


def adam_factor(step: int, kind: type) -> float:
    """The bias correction of Adam's learning rate, computed in a type."""
    alpha, beta = (np.float32(decay).astype(kind) for decay in (0.9, 0.999))
    one, t = kind(1), kind(step)
    return float(np.sqrt(one - beta**t) / (one - alpha**t))


def test_adams_coefficients_keep_five_digits_in_float32() -> None:
    """What the table in ortops/web/README.md says of them."""
    steps = [*range(1, 200), 1000, 10_000]
    errors = [adam_factor(t, np.float32) / adam_factor(t, np.float64) - 1 for t in steps]
    assert max(map(abs, errors)) < 5e-6


def test_a_step_graph_for_a_target_holds_its_defaults() -> None:
    given = trainable("classifier", "Adam")
    step = step_graph(given, target="webgpu")
    found: Arrays = initializers(step.graph)
    for name, array in TrainingSession(given).state.items():
        np.testing.assert_array_equal(found[name], array)
    assert "Gradient" not in op_types(step.graph)
