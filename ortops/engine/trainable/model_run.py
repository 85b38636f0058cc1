"""What a child process with limits does to run a model (see `child_process`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime


def answer(names: Sequence[str], model: bytes) -> tuple[list[Any], list[memoryview]]:
    """Runs a model without inputs, on the CPU and without optimizations.

    Returns:
        The type and shape of each output, and their elements.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    shown, buffers = [], []
    for name, value in zip(names, session.run(names, {}), strict=True):
        if not isinstance(value, np.ndarray) or value.dtype.hasobject:
            raise TypeError(f"output '{name}' must be a tensor of numbers")
        shown.append((value.dtype.str, value.shape))
        whole = np.ascontiguousarray(value)
        buffers.append(whole.data.cast("B") if whole.size else memoryview(b""))
    return shown, buffers
