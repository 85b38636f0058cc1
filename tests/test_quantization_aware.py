"""Weights that are trained through their rounding to integers, and scales that are trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from running import plain_session, run
from training_models import initializers

from ortops import ModelError, TrainingSession, build_training_model
from ortops.optimizers import SGD, Adam

Array = np.ndarray[Any, Any]

SCALE = np.float32(0.125)


def graph_of(
    nodes: list[onnx.NodeProto], values: dict[str, Array], outputs: int
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", outputs])],
        [numpy_helper.from_array(array, name) for name, array in values.items()],
    )
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def aware(w: Array) -> onnx.ModelProto:
    """y = x · round(w / scale) · scale with a float weight w."""
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "scale", "zero"], ["integers"], "quantize"),
        helper.make_node("DequantizeLinear", ["integers", "scale", "zero"], ["rounded"], "back"),
        helper.make_node("MatMul", ["x", "rounded"], ["y"]),
    ]
    return graph_of(nodes, {"w": w, "scale": SCALE, "zero": np.int8(0)}, w.shape[1])


def test_weights_pass_their_gradient_straight_through() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 2)).astype(np.float32)
    w[0, 0] = 20.0  # beyond 127 · scale, where the rounding is constant
    x, targets = (rng.normal(size=(8, n)).astype(np.float32) for n in (4, 2))
    session = TrainingSession(
        build_training_model(aware(w), loss="MeanSquaredError", optimizer=SGD(0.25))
    )
    assert "scale" not in session.state
    expected = w.astype(np.float64)
    for _ in range(20):
        rounded = np.clip(np.round(expected / SCALE), -128, 127) * SCALE
        difference = x @ rounded - targets
        loss = float(session.step({"x": x, "targets": targets})["loss"])
        assert loss == pytest.approx(np.mean(difference**2), rel=1e-5)
        inside = (expected / SCALE >= -128) & (expected / SCALE <= 127)
        expected = expected - 0.25 * inside * (x.T @ difference) * 2 / difference.size
        np.testing.assert_allclose(session.state["w"], expected, rtol=1e-4, atol=1e-5)
    assert session.state["w"][0, 0] == 20.0
    assert not np.array_equal(np.round(expected / SCALE), np.round(w / SCALE))
    # Optimized, onnxruntime rounds x to integers too, where such a weight is a constant.
    (y,) = plain_session(session.inference_model(), optimize=False).run(None, {"x": x})
    rounded = np.clip(np.round(session.state["w"] / SCALE), -128, 127) * SCALE
    np.testing.assert_allclose(y, x @ rounded, rtol=1e-5, atol=1e-5)


def test_onnxruntime_has_nothing_to_warn_of(capfd: pytest.CaptureFixture[str]) -> None:
    model = aware(np.ones((4, 2), np.float32))
    session = TrainingSession(build_training_model(model, loss="MeanSquaredError", optimizer="SGD"))
    session.step({"x": np.ones((8, 4), np.float32), "targets": np.ones((8, 2), np.float32)})
    assert capfd.readouterr().err == ""


def already(w: Array) -> onnx.ModelProto:
    """y = x · (w · scale), w of int8, with a scale for each column; and a bias."""
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["wide"], "back", axis=1),
        helper.make_node("MatMul", ["x", "wide"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    columns = w.shape[1]
    values = {
        "w": w,
        "scale": np.full(columns, SCALE),
        "zero": np.zeros(columns, np.int8),
        "bias": np.zeros(columns, np.float32),
    }
    return graph_of(nodes, values, columns)


def test_what_is_quantized_already_is_said_not_to_be_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    w = np.random.default_rng(0).integers(-50, 50, (4, 2)).astype(np.int8)
    with caplog.at_level(logging.WARNING, "ortops"):
        trainable = build_training_model(already(w), loss="MeanSquaredError", optimizer="Adam")
    said = (
        "quantized weights are not trained (1, such as 'w', which is INT8, read by "
        "DequantizeLinear node 'back'); to train them, train the float model and quantize it again"
    )
    assert [record.getMessage() for record in caplog.records] == [said]
    assert {name for name in TrainingSession(trainable).state if "." not in name} == {
        *("bias", "learning_rate", "step")
    }
    with pytest.raises(ModelError, match="initializer 'w' is of type INT8; only floating-point"):
        build_training_model(already(w), loss="MeanSquaredError", optimizer="Adam", trainable=["w"])


def test_scales_are_trained_where_they_are_named() -> None:
    rng = np.random.default_rng(0)
    w = rng.integers(-50, 50, (4, 2)).astype(np.int8)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    wanted = np.float32([0.25, 0.0625])
    targets = x @ (w * wanted)
    session = TrainingSession(
        build_training_model(
            already(w), loss="MeanSquaredError", optimizer=SGD(1e-4), trainable=["scale"]
        )
    )
    expected = np.full(2, SCALE, np.float64)
    for _ in range(5):
        difference = x @ (w * expected) - targets
        session.step({"x": x, "targets": targets})
        expected -= 1e-4 * ((x @ w) * difference).sum(axis=0) * 2 / difference.size
    np.testing.assert_allclose(session.state["scale"], expected, rtol=1e-5)
    for _ in range(300):
        session.step({"x": x, "targets": targets})
    np.testing.assert_allclose(session.state["scale"], wanted, rtol=1e-3)
    trained = session.inference_model(original=already(w))
    np.testing.assert_array_equal(initializers(trained.graph)["w"], w)


def test_what_onnxruntime_quantizes_with_float_weights(tmp_path: Path) -> None:
    """`AddQDQPairToWeight` leaves the weights float, each before a pair of its own."""
    from onnxruntime import quantization

    rng = np.random.default_rng(0)
    conv = rng.normal(size=(4, 1, 3, 3)).astype(np.float32)
    head = 0.1 * rng.normal(size=(144, 3)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "conv.w"], ["c"], pads=[0, 0, 0, 0]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("MatMul", ["f", "head.w"], ["y"]),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(conv, "conv.w"), numpy_helper.from_array(head, "head.w")],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "float.onnx")
    x = rng.normal(size=(96, 1, 8, 8)).astype(np.float32)
    labels = np.arange(96) % 3
    x[labels == 1, :, ::2] += 1
    x[labels == 2, :, :, ::2] += 1

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"x": x[:32]}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    quantization.quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "aware.onnx",
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        extra_options={"AddQDQPairToWeight": True},
    )
    aware = onnx.load(tmp_path / "aware.onnx")
    assert {"conv.w", "head.w"} <= initializers(aware.graph).keys()
    session = TrainingSession(
        build_training_model(aware, loss="SoftmaxCrossEntropy", optimizer=Adam(0.01))
    )
    assert {name for name in session.state if "." in name} == {
        f"{name}{state}" for name in ("conv.w", "head.w") for state in ("", ".V", ".H")
    }
    data = {"x": x, "labels": labels}
    (before,) = run(aware, {"x": x})
    assert session.evaluate(data)["loss"] == pytest.approx(cross_entropy(before, labels), rel=0.02)
    history = session.fit(data, epochs=20, progress=False)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    trained = session.inference_model(original=aware)
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in aware.graph.node]
    (after,) = run(trained, {"x": x})
    assert cross_entropy(after, labels) < 0.5 * cross_entropy(before, labels)
    assert session.evaluate(data)["loss"] == pytest.approx(cross_entropy(after, labels), rel=0.05)


def cross_entropy(logits: Array, labels: Array) -> float:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-log_p[np.arange(len(labels)), labels].mean())


def test_scales_are_named_where_all_is_quantized() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        quantized (float[n, 2] x) => (float[n, 2] y)
        <int8[2, 2] w = {1, 2, 3, 4}, float s = {0.5}> {
            weight = DequantizeLinear (w, s)
            y = MatMul (x, weight)
        }""")
    message = (
        "train the float model and quantize it again, or name scales of DequantizeLinear in tr"
    )
    with pytest.raises(ModelError, match=message):
        build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    build_training_model(model, loss="MeanSquaredError", optimizer="SGD", trainable=["s"])
