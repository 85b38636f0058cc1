"""Training on onnxruntime's CUDA provider, without a GPU: forms of graphs, and where nodes run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from benchmarks import cuda_double
from models.llama import PAIRS, SIZE, llama
from ortops import Tape, build_training_model, op
from ortops.engine.execution.providers import CUDA, _normalized


def images(
    pool: int = 2, pads: tuple[int, ...] = (1, 1, 1, 1), **convolution: Any
) -> onnx.ModelProto:
    """Returns a classifier with a convolution, live statistics and pooling."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> Any:
        return tape.initializer(name, rng.standard_normal(shape).astype(np.float32) / 3)

    with Tape(name="images") as tape:
        x = tape.input("images", np.float32, ["batch", 3, 8, 8])
        x = op.Conv(x, weight("first", 4, 3, 3, 3), pads=[1, 1, 1, 1])
        scale, bias, mean, variance = (
            tape.initializer(f"norm.{name}", np.full(4, value, np.float32))
            for name, value in {"scale": 1.5, "bias": 0.1, "mean": 0.0, "variance": 1.0}.items()
        )
        x = op.Relu(op.BatchNormalization(x, scale, bias, mean, variance))
        x = op.MaxPool(x, kernel_shape=[pool, pool], strides=[2, 2])
        x = op.Conv(x, weight("second", 5, 4, 3, 3), pads=list(pads), strides=[2, 2], **convolution)
        x = op.ReduceMean(x, [2, 3], keepdims=0)
        tape.output(x @ weight("head", 5, 3), "logits")
    return tape.model()


IMAGES: dict[str, dict[str, Any]] = {
    "windows that tile": {},
    "windows that overlap": {"pool": 3},
    "pads at the beginning": {"pads": (1, 1, 0, 0)},
    "pads at the end": {"pads": (0, 0, 1, 1)},
    "more pads at one end": {"pads": (2, 1, 1, 2)},
    "dilations": {"pads": (2, 2, 1, 1), "dilations": [2, 2]},
}
PARTS = {"equal parts of a tensor": 3, "parts of a tensor": [2, 4, 2]}
LLAMA = {"a llama with an adapter": 32, "a llama in 4 bits with an adapter": 4}
CASES = (*IMAGES, *PARTS, *LLAMA)


def parts(sizes: Any) -> onnx.ModelProto:
    """Returns a classifier that takes a tensor apart, as PyTorch's exporter writes `split`."""
    rng = np.random.default_rng(0)
    with Tape(name="parts") as tape:
        x = tape.input("images", np.float32, ["batch", 3, 8, 8])
        weight = tape.initializer("weight", rng.standard_normal((192, 8)).astype(np.float32) / 9)
        x = op.Flatten(x) @ weight
        sequence = op.SplitToSequence(x, np.array(sizes, np.int64), axis=1)
        ends = [op.SequenceAt(sequence, np.array(place, np.int64)) for place in (0, -1, 2)]
        tape.output(ends[0][:, :2] * ends[1] + op.Sin(ends[2]), "logits")
    return tape.model()


def trainable(case: str) -> onnx.ModelProto:
    if case in PARTS:
        loss = ortops.losses.SoftmaxCrossEntropy()
        return build_training_model(parts(PARTS[case]), loss=loss, optimizer="Adam")
    if case in LLAMA:
        adapted = ortops.lora.add(llama(bits=LLAMA[case], layers=1), rank=2, targets="all-linear")
        loss = ortops.losses.NextToken("logits")
        return build_training_model(adapted, loss=loss, optimizer="AdamW")
    return build_training_model(
        images(**IMAGES[case]),
        loss="SoftmaxCrossEntropy",
        optimizer="Adam",
        batch_normalization="train",
    )


def batch(case: str) -> dict[str, np.ndarray]:
    if case in LLAMA:
        ids = np.arange(12).reshape(2, 6)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    pixels = np.random.default_rng(1).standard_normal((6, 3, 8, 8)).astype(np.float32)
    return {"images": pixels, "labels": np.arange(6) % (2 if case in PARTS else 3)}


def feeds(graph: onnx.ModelProto, case: str) -> dict[str, np.ndarray]:
    """Returns the values of variables that a step graph begins with, a batch, and no past."""
    known = {each.name: onnx.numpy_helper.to_array(each) for each in graph.graph.initializer}
    known |= batch(case)
    names = [value.name for value in graph.graph.input]
    empty = np.zeros((2, PAIRS, 0, SIZE), np.float32)
    known |= {name: empty for name in names if name.startswith("past_key_values")}
    return {name: known[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_for_cuda_compute_the_same(case: str) -> None:
    """On the CPU, which has kernels for both forms."""
    flat = ortops.step_graph(trainable(case))
    graphs = [ortops.lower(flat), ortops.lower(flat, target="cuda")]
    for node in graphs[1].graph.node:
        values = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        assert node.op_type not in ("MaxUnpool", "GroupQueryAttention", "SplitToSequence")
        assert node.op_type != "BatchNormalization" or not values.get("training_mode")
        if node.op_type == "ConvTranspose":
            pads = values.get("pads", [])
            assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    results = []
    for graph in graphs:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
        names = [each.name for each in session.get_outputs()]
        results.append(dict(zip(names, session.run(None, feeds(graph, case)), strict=True)))
    standard, adapted = results
    assert standard.keys() == adapted.keys()
    for name, value in standard.items():
        np.testing.assert_allclose(adapted[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_products_are_float32_unless_the_user_wants_tf32() -> None:
    assert _normalized("cuda") == (CUDA, {"use_tf32": "0"})
    assert _normalized((CUDA, {"use_tf32": 1, "device_id": 1})) == (
        CUDA,
        {"use_tf32": "1", "device_id": "1"},
    )


PLACED = """
import dataclasses, json
from benchmarks.placement import place
from tests.test_cuda import CASES, batch, trainable

found = {case: dataclasses.asdict(place(lambda: trainable(case), batch(case))) for case in CASES}
print(json.dumps(found))
"""

CAPTURED = """
import onnxruntime, ortops
from tests.test_cuda import CASES, trainable

options = onnxruntime.SessionOptions()
options.log_severity_level = 4
for case in CASES:
    graph = ortops.lower(ortops.step_graph(trainable(case)), target="cuda").SerializeToString()
    for more in ({}, {"enable_cuda_graph": "1"}):
        try:
            onnxruntime.InferenceSession(graph, options, [("CUDAExecutionProvider", more)])
        except Exception as error:
            print(f"{case}: {error}")
"""


def in_double(code: str) -> list[str]:
    """Returns the lines that a program prints in a process with CUDA's double."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, **cuda_double.environment()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


with_double = pytest.mark.skipif(
    not cuda_double.is_there(), reason="the CUDA provider is missing (./scripts/cuda_environment)"
)


@with_double
@pytest.mark.slow  # a process
def test_no_node_that_touches_data_runs_on_the_cpu() -> None:
    found = json.loads(in_double(PLACED)[-1])
    for case in CASES:
        assert found[case]["nodes"] > 50
        assert (found[case]["fallen"], found[case]["error"]) == ({}, ""), case


@with_double
@pytest.mark.slow  # a process
def test_onnxruntime_captures_no_step() -> None:
    """So that ``enable_cuda_graph`` is refused with a reason; see `_REFUSED_OPTIONS`."""
    lines = in_double(CAPTURED)
    assert [line.partition(":")[0] for line in lines] == [*CASES]  # each with the option alone
    assert all("cannot use the graph capture feature" in line for line in lines)
