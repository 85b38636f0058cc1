"""The machine: the name of its CPU, and the speed of its matrix products."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.task import THREADS

__all__ = ["PRODUCTS", "cpu", "product_speeds"]

PRODUCTS: Mapping[str, tuple[int, int]] = {"A·B": (0, 0), "A·Bᵀ": (0, 1), "Aᵀ·B": (1, 0)}
"""Whether the factors are transposed: the products of the forward pass, of the gradient of an
activation, and of that of a weight, if weights are stored by columns."""


def cpu() -> str:
    """Returns the name of the CPU, the number of cores and the architecture."""
    name = platform.processor() or "unknown CPU"
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = " ".join(value.split())
                break
    return f"{name}, {os.cpu_count()} cores, {platform.machine()}"


def product_speeds(size: int = 1024, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Measures products of square float32 matrices, in GFLOP/s.

    Args:
        size: The number of rows and columns.
        rounds: The number of interleaved rounds, of which the median counts.

    Returns:
        By product, the speed of onnxruntime and, if PyTorch is installed, that of PyTorch.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), np.float32) for _ in range(2))
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for name, transposed in PRODUCTS.items():
        ways[name, "onnxruntime"] = _in_onnxruntime(a, b, transposed)
        if (product := _in_torch(a, b, transposed)) is not None:
            ways[name, "torch"] = product
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            run()
            start = time.perf_counter()
            for _ in range(10):
                run()
            seconds[way].append((time.perf_counter() - start) / 10)
    found: dict[str, dict[str, float]] = {name: {} for name in PRODUCTS}
    for (name, library), times in seconds.items():
        found[name][library] = 2e-9 * size**3 / statistics.median(times)
    return found


def _in_onnxruntime(
    a: np.ndarray, b: np.ndarray, transposed: Sequence[int]
) -> Callable[[], object]:
    import onnx
    import onnxruntime

    inputs = [onnx.helper.make_tensor_value_info(name, 1, [None, None]) for name in "ab"]
    output = onnx.helper.make_tensor_value_info("c", 1, [None, None])
    node = onnx.helper.make_node(
        "Gemm", ["a", "b"], ["c"], transA=transposed[0], transB=transposed[1]
    )
    graph = onnx.helper.make_graph([node], "product", inputs, [output])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda: session.run(None, {"a": a, "b": b})


def _in_torch(
    a: np.ndarray, b: np.ndarray, transposed: Sequence[int]
) -> Callable[[], object] | None:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(THREADS)
    left, right = (
        torch.from_numpy(each).T if flag else torch.from_numpy(each)
        for each, flag in zip((a, b), transposed, strict=True)
    )
    return lambda: left @ right
