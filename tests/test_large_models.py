"""Frozen weights exist once: they are neither copied nor dequantized ahead of time."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortops
from benchmarks import language
from models import llama
from ortops.engine.execution.settings import Settings
from ortops.engine.training import loaded_model
from ortops.llm import FineTuning, saving

ROWS = [[104, 105, 33, 97, 98, 99, 256], [104, 111, 33, 100, 256], [120, 121, 122]]
K, N, BLOCK = 64, 48, 16


def unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of 4 or 8 bits along the last axis; the lower bits come first."""
    if bits == 8:
        return packed.astype(float)
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1).astype(float)


def product(bits: int, *, zeros: bool, flat: bool, bias: bool) -> tuple[onnx.ModelProto, Any, Any]:
    """x @ w, MatMulNBits; also its dequantized weights [N, K] and w."""
    generator = np.random.default_rng(bits)
    numbers = generator.integers(0, 256, (N, K // BLOCK, BLOCK * bits // 8), np.uint8)
    scales = generator.uniform(0.01, 0.1, (N, K // BLOCK)).astype(np.float32)
    zero_points = generator.integers(0, 256, (N, K // BLOCK * bits // 8), np.uint8)
    offsets = unpacked(zero_points, bits) if zeros else np.full(scales.shape, 2.0 ** (bits - 1))
    whole = unpacked(numbers, bits).reshape(N, K // BLOCK, BLOCK) - offsets[..., None]
    dequantized = (whole * scales[..., None]).reshape(N, K)
    w = generator.standard_normal((8, K)).astype(np.float32)
    stored = {"w": w, "b": numbers, "scales": scales.reshape(-1) if flat else scales}
    stored |= {"zeros": zero_points.reshape(-1) if flat else zero_points} if zeros else {}
    stored |= {"bias": np.ones(N, np.float32)} if bias else {}
    inputs = ["h", "b", "scales", "zeros" if zeros else "", "", "bias" if bias else ""]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node(
            *("MatMulNBits", inputs, ["y"], "product", None, "com.microsoft"),
            K=K,
            N=N,
            bits=bits,
            block_size=BLOCK,
        ),
    ]
    graph = helper.make_graph(
        nodes,
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3, N])],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), dequantized, w


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("copied", [0, 2**28])
@pytest.mark.parametrize(
    ("bits", "zeros", "flat", "bias"),
    [
        (4, False, False, False),
        (4, True, True, True),
        (8, True, False, False),
        (8, False, True, True),
    ],
)
def test_gradient_through_quantized_weights(
    bits: int, zeros: bool, flat: bool, bias: bool, copied: int
) -> None:
    model, dequantized, w = product(bits, zeros=zeros, flat=flat, bias=bias)
    trainable = ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(1e-6), trainable=["w"]
    )
    session = ortops.TrainingSession(trainable, settings=Settings(copied=copied))
    generator = np.random.default_rng(0)
    x = generator.standard_normal((2, 3, 8)).astype(np.float32)
    targets = generator.standard_normal((2, 3, N)).astype(np.float32)
    y = x.astype(float) @ w.astype(float) @ dequantized.T + bias
    residual = 2 * (y - targets) / targets.size
    expected = np.einsum("abi,abo->io", x, residual @ dequantized)
    found = session.gradients({"x": x, "targets": targets})["w"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    feeds = {"x": x, "targets": targets}
    first, second = session.run_steps([feeds, feeds])
    np.testing.assert_allclose(first, ((y - targets) ** 2).mean(), rtol=1e-5)
    assert second < first
    np.testing.assert_allclose(session.predict({"x": x}, outputs="y").shape, (2, 3, N))


def test_no_dequantized_weights_are_kept(tmp_path: Path) -> None:
    model, _, _ = product(4, zeros=True, flat=False, bias=False)
    trainable = ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ortops.TrainingSession(trainable, sess_options=options)
    optimized = onnx.load(tmp_path / "optimized.onnx").graph
    kinds = {node.op_type for node in optimized.node}
    assert {"MatMulNBits", "GatherBlockQuantized"} <= kinds
    floats = [t for t in optimized.initializer if t.data_type == TensorProto.FLOAT]
    assert max((int(np.prod(t.dims)) for t in floats), default=0) < K * N


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treats all models as large ones."""
    monkeypatch.setattr(loaded_model, "Settings", functools.partial(Settings, copied=0))
    monkeypatch.setattr(saving, "_ONE_FILE", 0)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.usefixtures("large")
def test_a_large_model_trains_saves_and_continues_alike(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama.write(tmp_path / "base", bits=bits)
    settings: dict[str, Any] = {"batch_size": 2, "progress": False}
    large = FineTuning(base, rank=2, learning_rate=0.01, recompute=2)
    losses = large.fit(ROWS, epochs=3, **settings).history["loss"]
    with monkeypatch.context() as patch:
        patch.setattr(loaded_model, "Settings", Settings)
        usual = FineTuning(base, rank=2, learning_rate=0.01)
        np.testing.assert_allclose(
            losses, usual.fit(ROWS, epochs=3, **settings).history["loss"], rtol=1e-5
        )
    large.save(tmp_path / "tuned")
    assert len([*(tmp_path / "tuned").glob("model.onnx.*.data")]) == 1
    again = FineTuning.load(tmp_path / "tuned", recompute=2)
    large.fit(ROWS, epochs=2, seed=1, **settings)
    again.fit(ROWS, epochs=2, seed=1, **settings)
    assert again.session.history == large.session.history
    assert again.evaluate(ROWS) == large.evaluate(ROWS)
    assert again.generate([104, 105]) == large.generate([104, 105])
    before = {file.name for file in (tmp_path / "tuned").iterdir()}
    again.save(tmp_path / "tuned")
    again.save(tmp_path / "tuned")
    assert len({file.name for file in (tmp_path / "tuned").iterdir()}) <= len(before) + 1
    logits = []
    for folder in (base, tmp_path / "tuned"):
        session = onnxruntime.InferenceSession(
            folder / "model.onnx", providers=["CPUExecutionProvider"]
        )
        feeds: dict[str, Any] = {"input_ids": np.array([[1, 2, 3]])}
        feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
        shape = (1, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS)
        caches = [v.name for v in session.get_inputs() if v.name.startswith("past")]
        feeds |= dict.fromkeys(caches, np.zeros(shape, np.float32))
        logits.append(session.run(["logits"], feeds)[0])
    np.testing.assert_array_equal(*logits)


@pytest.mark.slow
def test_the_benchmark_measures_a_tiny_model(tmp_path: Path) -> None:
    sizes = language.Sizes(2, 64, 4, 2, 96, 60, 32)
    language.write(tmp_path, sizes)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")  # stock onnxruntime opens it
    assert len(session.get_inputs()) == 2 + 2 * sizes.layers
    found = language.measure(tmp_path, sizes, "--length", "8", "--steps", "2", "--recompute", "2")
    assert found["megabytes"] > 50
    assert found["tokens"] > 0
