"""The GPU of tests marked `gpu`: a provider of onnxruntime that computes on one."""

import functools
import os

import numpy as np
import onnx

import ortops
from ortops.engine.execution.providers import why_unusable
from tests import webgpu

PROVIDER = os.environ.get("ORTOPS_GPU", "cuda")
"""``webgpu`` runs the same tests on a device of WebGPU, also one in software."""

PROVIDER_NAMES = {"cuda": "CUDAExecutionProvider", "webgpu": "WebGpuExecutionProvider"}


@functools.cache
def prepare() -> str:
    """Returns why there is none, or ""."""
    if PROVIDER == "webgpu" and (reason := webgpu.prepare()):
        return reason
    if why := why_unusable(PROVIDER):
        return f"tests on a GPU left out: {why} (pip install onnxruntime-gpu[cuda,cudnn])"
    graph = onnx.parser.parse_graph("double (float[2] x) => (float[2] y) { y = Add (x, x) }")
    imports = [onnx.helper.make_opsetid("", 21)]
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=imports)
    session = ortops.InferenceSession(model, providers=[PROVIDER_NAMES[PROVIDER]])
    (found,) = session.run(None, {"x": np.array([1, 2], np.float32)})
    if found.tolist() != [2, 4]:  # the libraries of benchmarks.cuda_double
        return "tests on a GPU left out: the device computes nothing"
    return ""
