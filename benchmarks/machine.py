"""The machine: its CPU, its graphics card, versions, and the speed of its matrix products."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from benchmarks.task import threads

__all__ = ["PRODUCTS", "Card", "cpu", "product_speeds", "versions"]

PRODUCTS: Mapping[str, tuple[int, int]] = {"A·B": (0, 0), "A·Bᵀ": (0, 1), "Aᵀ·B": (1, 0)}
"""Whether the factors are transposed: the products of the forward pass, of the gradient of an
activation, and of a weight's, if weights are stored by columns."""


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


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    found = {"Python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class Card:
    """The first NVIDIA card, read through NVML, the library of its driver.

    Attributes:
        name: The name of the card; "" if there is none.
        driver: The version of the driver.
        megabytes: The memory of the card, in 10⁶ bytes.
    """

    class _Memory(ctypes.Structure):
        """What nvmlDeviceGetMemoryInfo writes, in bytes."""

        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    def __init__(self) -> None:
        self.name, self.driver, self.megabytes = "", "", 0.0
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        self._device = ctypes.c_void_p()
        call = self._library.nvmlDeviceGetHandleByIndex_v2
        if self._library.nvmlInit_v2() or call(0, ctypes.byref(self._device)):
            return
        text = ctypes.create_string_buffer(96)
        if not self._library.nvmlDeviceGetName(self._device, text, len(text)):
            self.name = text.value.decode()
        if not self._library.nvmlSystemGetDriverVersion(text, len(text)):
            self.driver = text.value.decode()
        self.megabytes = self._memory().total / 1e6

    def used_megabytes(self) -> float:
        """Returns the memory that all processes use on the card, in 10⁶ bytes; 0 without one."""
        return self._memory().used / 1e6 if self.name else 0.0

    def _memory(self) -> Card._Memory:
        found = self._Memory()
        self._library.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(found))
        return found


_ROUND = 0.1
"""About how many seconds a round of products takes at most."""


def product_speeds(size: int = 1024, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Measures products of square float32 matrices, in GFLOP/s.

    Args:
        size: The number of rows and columns.
        rounds: The number of interleaved rounds, of which the median counts.

    Returns:
        By product, the speed of onnxruntime and, if PyTorch is installed, of PyTorch.
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
            start = time.perf_counter()
            run()
            # A round has 10 products, or fewer where one core computes them.
            count = max(1, min(10, int(_ROUND / max(time.perf_counter() - start, 1e-9))))
            start = time.perf_counter()
            for _ in range(count):
                run()
            seconds[way].append((time.perf_counter() - start) / count)
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
    options.intra_op_num_threads = threads()
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
    torch.set_num_threads(threads())
    left, right = (
        torch.from_numpy(each).T if flag else torch.from_numpy(each)
        for each, flag in zip((a, b), transposed, strict=True)
    )
    return lambda: left @ right
