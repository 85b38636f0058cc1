"""Steps of models whose products round activations to 8 bits (MatMulNBits, accuracy_level=4).

onnxruntime 1.32 computes zeros for them where scales are not constant. All kinds of steps and all
optimization levels have to agree with the product that is written out. In float32, steps multiply
as the served model does, whose rounding to 8 bits changes outputs by 0.5 % of the largest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from lora_models import normal
from onnx import helper, numpy_helper

import ortops
from ortops import TrainingSession, lora

Level = onnxruntime.GraphOptimizationLevel
LEVELS = [
    Level.ORT_DISABLE_ALL,
    Level.ORT_ENABLE_BASIC,
    Level.ORT_ENABLE_EXTENDED,
    Level.ORT_ENABLE_ALL,
]
SIZE, OUT, BLOCK = 64, 48, 32
FLOATS = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}
X, TARGETS = normal(5, SIZE), normal(5, OUT, seed=1)
# Of the loss: float16 keeps three digits; rounding to 8 bits changes a mean of squares by less.
TOLERANCE = {"float16": 5e-3, "float32": 2e-3}


def quantized(dtype: str, bits: int, zero_points: bool, level: int = 4) -> onnx.ModelProto:
    """A product between operators without kernels of float16, so that onnxruntime casts scales."""
    rng = np.random.default_rng(0)
    blocks, kind = SIZE // BLOCK, FLOATS[dtype]
    arrays = {
        "q": rng.integers(0, 256, (OUT, blocks, BLOCK * bits // 8)).astype(np.uint8),
        "scales": (rng.random(OUT * blocks) / 10 + 0.01).astype(dtype),
    }
    if zero_points:
        arrays["zeros"] = rng.integers(0, 256, (OUT, -(-blocks * bits // 8))).astype(np.uint8)
    settings: dict[str, Any] = {"K": SIZE, "N": OUT, "bits": bits, "block_size": BLOCK}
    settings |= {"accuracy_level": level, "domain": "com.microsoft", "name": "/fc/MatMul"}
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=kind),
        helper.make_node("Neg", ["h"], ["minus h"]),
        helper.make_node("MatMulNBits", ["minus h", *arrays], ["minus p"], **settings),
        helper.make_node("Neg", ["minus p"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "quantized",
        [info("x", onnx.TensorProto.FLOAT, ["batch", SIZE])],
        [info("y", onnx.TensorProto.FLOAT, ["batch", OUT])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def first_loss(dtype: str, bits: int, zero_points: bool) -> float:
    """Written out in float64, from the specification of MatMulNBits."""
    arrays = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in quantized(dtype, bits, zero_points).graph.initializer
    }
    parts, blocks = 8 // bits, SIZE // BLOCK

    def unpacked(packed: np.ndarray) -> np.ndarray:
        shifts = bits * np.arange(parts)
        return ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(*packed.shape[:-1], -1)

    numbers = unpacked(arrays["q"]).astype(np.float64)
    zeros: Any = 2 ** (bits - 1)
    if zero_points:
        zeros = unpacked(arrays["zeros"])[:, :blocks, None]
    weight = (numbers - zeros) * arrays["scales"].reshape(OUT, blocks, 1)
    y = X.astype(dtype).astype(np.float64) @ weight.reshape(OUT, SIZE).T
    return float(((y - TARGETS) ** 2).mean())


def trainable(dtype: str, bits: int, zero_points: bool) -> onnx.ModelProto:
    model = lora.add(quantized(dtype, bits, zero_points), rank=2)
    adam = ortops.optimizers.Adam(learning_rate=1e-3)
    return ortops.build_training_model(model, loss="MeanSquaredError", optimizer=adam)


BATCH = {"x": X, "targets": TARGETS}
EVERY = [
    pytest.mark.parametrize("dtype", FLOATS),
    pytest.mark.parametrize("bits", [4, 8]),
    pytest.mark.parametrize("zero_points", [False, True]),
]


def each(test: Any) -> Any:
    for mark in EVERY:
        test = mark(test)
    return test


@pytest.mark.nightly
@pytest.mark.slow
@each
def test_several_steps_in_one_run(dtype: str, bits: int, zero_points: bool) -> None:
    model = trainable(dtype, bits, zero_points)
    one, other = TrainingSession(model), TrainingSession(model)
    found = np.ravel(one.run_steps([BATCH] * 4))
    expected = [float(other.step(BATCH)["loss"]) for _ in range(4)]
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(found[0], first_loss(dtype, bits, zero_points), rtol=tolerance)
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    session = onnxruntime.InferenceSession(quantized(dtype, bits, zero_points).SerializeToString())
    served = ((session.run(None, {"x": X})[0] - TARGETS) ** 2).mean()
    np.testing.assert_allclose(found[0], served, rtol=5e-3 if dtype == "float16" else 1e-6)
    assert found[-1] < found[0]
    evaluated = one.evaluate(BATCH)["loss"], other.evaluate(BATCH)["loss"]
    np.testing.assert_allclose(*evaluated, rtol=tolerance)


@pytest.mark.nightly
@pytest.mark.slow
@each
def test_a_step_graph_at_every_optimization_level(dtype: str, bits: int, zero_points: bool) -> None:
    step = ortops.lower(ortops.step_graph(trainable(dtype, bits, zero_points), defaults=True))
    for level in LEVELS:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        cpu = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(step.SerializeToString(), options, providers=cpu)
        loss = session.run(["loss"], BATCH)[0]
        expected = first_loss(dtype, bits, zero_points)
        np.testing.assert_allclose(loss, expected, rtol=TOLERANCE[dtype])


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_served_file_keeps_its_kernel(dtype: str, tmp_path: Path) -> None:
    model = trainable(dtype, 4, False)
    session = TrainingSession(model)
    session.step(BATCH)
    session.save(tmp_path / "saved.onnx")
    for each_model in (model, session.inference_model(), onnx.load(tmp_path / "saved.onnx")):
        (node,) = (n for n in each_model.graph.node if n.op_type == "MatMulNBits")
        keeps = "accuracy_level" in {attribute.name for attribute in node.attribute}
        assert keeps == (dtype == "float32")  # in float16, it is wrong next to an adapter


def test_scales_that_are_fed_as_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in models of more than 2 GB, which do not fit into one message."""
    monkeypatch.setattr("ortops.graph.files.external.MESSAGE_LIMIT", 1000)
    monkeypatch.setattr("ortops.graph.files.external.BIG", 100)
    session = TrainingSession(trainable("float32", 4, zero_points=False))
    expected = first_loss("float32", 4, zero_points=False)
    np.testing.assert_allclose(session.evaluate(BATCH)["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(session.step(BATCH)["loss"], expected, rtol=1e-5)


def test_scales_that_are_trained() -> None:
    model = quantized("float32", 4, zero_points=False)
    built = ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer="SGD", trainable=["scales"]
    )
    expected = first_loss("float32", 4, zero_points=False)
    np.testing.assert_allclose(TrainingSession(built).step(BATCH)["loss"], expected, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantized_weights_that_onnxruntime_fuses(dtype: str, bits: int) -> None:
    """It makes the same node of them."""
    rng = np.random.default_rng(0)
    kind = {4: onnx.TensorProto.INT4, 8: onnx.TensorProto.INT8}[bits]
    numbers = rng.integers(-8, 8, (SIZE, OUT))
    scales = (rng.random((SIZE // BLOCK, OUT)) / 10 + 0.01).astype(dtype)
    node = helper.make_node
    nodes = [
        node("Cast", ["x"], ["h"], to=FLOATS[dtype]),
        node("Neg", ["h"], ["minus h"]),
        node("DequantizeLinear", ["q", "scales"], ["weight"], axis=0, block_size=BLOCK),
        node("MatMul", ["minus h", "weight"], ["minus p"], name="/fc/MatMul"),
        node("Neg", ["minus p"], ["p"]),
        node("Cast", ["p"], ["y"], to=onnx.TensorProto.FLOAT),
    ]
    model = quantized(dtype, 4, zero_points=False)
    del model.graph.node[:], model.graph.initializer[:]
    model.graph.node.extend(nodes)
    given = helper.make_tensor("q", kind, numbers.shape, numbers.reshape(-1).tolist())
    model.graph.initializer.extend([given, numpy_helper.from_array(scales, "scales")])
    built = ortops.build_training_model(
        lora.add(model, rank=2), loss="MeanSquaredError", optimizer="SGD"
    )
    weight = numbers * np.repeat(scales.astype(np.float64), BLOCK, 0)
    expected = ((X.astype(dtype).astype(np.float64) @ weight - TARGETS) ** 2).mean()
    session = TrainingSession(built)
    found = [session.evaluate(BATCH)["loss"], *session.run_steps([BATCH] * 2)[:1]]
    step = ortops.lower(ortops.step_graph(built, defaults=True)).SerializeToString()
    for level in LEVELS:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        found.append(onnxruntime.InferenceSession(step, options).run(["loss"], BATCH)[0])
    np.testing.assert_allclose(np.array(found, float), expected, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_model_with_an_adapter_at_every_optimization_level(dtype: str) -> None:
    """Stock onnxruntime computed zeros, even though the adapter was not active."""
    model = quantized(dtype, 4, zero_points=False)
    given = model.SerializeToString()
    adapted = ortops.lora.add(model, 2, 2, "all-linear")
    assert model.SerializeToString() == given
    exact = stock(quantized(dtype, 4, zero_points=False, level=0), LEVELS[-1])
    for level in LEVELS:  # rounding to 8 bits changes outputs by 0.5 % of the largest
        np.testing.assert_allclose(stock(adapted, level), exact, atol=0.01 * abs(exact).max())


def stock(model: onnx.ModelProto, level: Level) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers)
    found: np.ndarray = session.run(None, {"x": X})[0]
    return found
