"""A fault of older versions of onnxruntime: a cubic Resize between two Transposes.

Its optimizer for Transposes removes both, so that the channels come last. The kernel of a cubic
Resize cannot compute that, and the run fails. It does not happen in a model whose Resize reads a
constant, as that of a vision transformer with interpolated position embeddings does before
training, because constants are folded first.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

import numpy as np
import onnx
import onnx.parser
import onnxruntime

__all__ = ["SENTENCE", "disabled_optimizers", "is_affected", "said"]

logger = logging.getLogger("ortops")

_OPTIMIZER = "TransposeOptimizer_CPUExecutionProvider"

SENTENCE = (
    f"sessions run without onnxruntime's optimizer for Transposes, because the one of version "
    f"{onnxruntime.__version__} breaks a cubic Resize"
)
"""What is said if the optimizer is left out."""


def disabled_optimizers(model: onnx.ModelProto) -> list[str]:
    """Returns the optimizers of onnxruntime that must not run on a model, and logs them once."""
    if not is_affected(model):
        return []
    _say()
    return [_OPTIMIZER]


def is_affected(model: onnx.ModelProto) -> bool:
    """Whether a model has a cubic Resize, and this version of onnxruntime has the fault."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return any(map(_has_cubic, bodies)) and _has_fault()


def _has_cubic(nodes: Iterable[onnx.NodeProto]) -> bool:
    for node in nodes:
        for attribute in node.attribute:
            if node.op_type == "Resize" and attribute.name == "mode" and attribute.s == b"cubic":
                return True
            if attribute.HasField("g") and _has_cubic(attribute.g.node):
                return True
    return False


def said(model: onnx.ModelProto) -> list[str]:
    """Returns what is said about a model: the sentence, or nothing."""
    return [SENTENCE] if is_affected(model) else []


@functools.cache
def _say() -> None:
    logger.warning(SENTENCE)


@functools.cache
def _has_fault() -> bool:
    """Whether a cubic Resize between two Transposes fails."""
    probe = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 21]>
        probe (float[1, 2, 2, 3] x) => (float[1, 3, 3, 3] y) <int64[4] sizes = {1, 3, 3, 3}> {
            first = Transpose <perm = [0, 3, 1, 2]> (x)
            resized = Resize <mode = "cubic"> (first, , , sizes)
            y = Transpose <perm = [0, 2, 3, 1]> (resized)
        }""")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(
            probe.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        run_options = onnxruntime.RunOptions()
        run_options.log_severity_level = 4
        session.run(None, {"x": np.ones((1, 2, 2, 3), np.float32)}, run_options)
    except Exception:  # onnxruntime's classes have no common base class
        return True
    return False
