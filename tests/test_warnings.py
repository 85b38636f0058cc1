"""Sessions write no warnings of onnxruntime about graphs that the user did not write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import ortops
from ortops import op


def quantized_lstm(folder: Path) -> onnx.ModelProto:
    from onnxruntime.quantization import quantize_dynamic

    rng = np.random.default_rng(0)
    with ortops.Tape(name="lstm") as tape:
        x = tape.input("x", np.float32, ["time", "batch", 4])
        w = tape.initializer("w", rng.standard_normal((1, 32, 4)).astype(np.float32))
        r = tape.initializer("r", rng.standard_normal((1, 32, 8)).astype(np.float32))
        b = tape.initializer("b", rng.standard_normal((1, 64)).astype(np.float32))
        _, last, _ = op.LSTM(x, w, r, b, hidden_size=8, outputs=3)
        head = tape.initializer("head", rng.standard_normal((8, 3)).astype(np.float32))
        tape.output(op.Squeeze(last, [0]) @ head, "scores")
    onnx.save(tape.model(), folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "quantized.onnx")
    return onnx.load(folder / "quantized.onnx")


@pytest.mark.slow
def test_a_quantized_lstm_trains_without_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = quantized_lstm(tmp_path)
    assert "DynamicQuantizeLSTM" in {node.op_type for node in model.graph.node}
    batch = {"x": np.ones((5, 2, 4), np.float32), "labels": np.array([0, 1])}
    capfd.readouterr()
    trainable = ortops.build_training_model(model, loss="cross_entropy", optimizer="adam")
    session = ortops.TrainingSession(trainable)
    session.step(batch)
    session.evaluate(batch, metrics=["accuracy"])
    session.predict({"x": batch["x"]})
    session.gradients(batch)
    assert "onnxruntime" not in capfd.readouterr().err
