"""Gradients in float16, bfloat16 and double, next to those in float32.

The cases of the families' own tests run in other types between casts from and to float32. What
onnxruntime does not run in a type is listed, and asserted to be refused. The tolerance is that of
the type: some rules round a dozen times.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from dot_test import DOMAIN, SEED, Case, with_gradient
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as errors
from packaging.version import Version
from running import run

import ortops

TYPES = {
    "float16": (TensorProto.FLOAT16, 0.05),
    "bfloat16": (TensorProto.BFLOAT16, 0.3),
    "double": (TensorProto.DOUBLE, 1e-3),
}

NO_TYPE = "the standard does not let the operator take the type"
NO_KERNEL = "onnxruntime has no kernel for the type"
NO_REDUCTION = "onnxruntime's kernel has no reduction for the type"

RAISED = {
    NO_TYPE: pytest.RaisesExc(errors.InvalidGraph, match="Type Error"),
    NO_KERNEL: pytest.RaisesExc(errors.NotImplemented, match="Could not find an implementation"),
    NO_REDUCTION: pytest.RaisesExc(errors.RuntimeException, match="data type is not supported"),
}
"""How onnxruntime refuses for a reason."""

REFUSED = {
    "float16": {
        NO_TYPE: "Celu Range",
        NO_REDUCTION: "ScatterElements-add",
    },
    "bfloat16": {
        NO_TYPE: """
            Acos Acosh Asin Asinh Atan Atanh Celu Compress Cos Cosh Det Einsum Elu HardSigmoid
            HardSwish InstanceNormalization LpNormalization Mish NegativeLogLikelihoodLoss OneHot
            Range ReverseSequence Selu Shrink Sin Sinh SoftmaxCrossEntropyLoss Softplus Softsign
            Tan ThresholdedRelu TopK""",
        NO_KERNEL: """
            Abs Add Attention BatchNormalization Clip CumProd CumSum DFT
            DepthToSpace DequantizeLinear Div Erf Exp Expand Gelu-none Gelu-tanh Gemm
            GroupNormalization LRN LeakyRelu Log LogSoftmax MatMul Max Mean
            MeanVarianceNormalization Min Mod Mul Neg PRelu Pad-value Pow RMSNormalization
            Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
            ReduceProd ReduceSum ReduceSumSquare Relu RotaryEmbedding STFT Sigmoid Softmax
            SpaceToDepth Sqrt Sub Sum Swish Tanh Tile Trilu Where""",
        NO_REDUCTION: "ScatterElements-add",
    },
    "double": {
        NO_TYPE: "Celu DequantizeLinear RotaryEmbedding",
        NO_KERNEL: """
            Acos Acosh Asin Asinh Atan Atanh Cosh Det Elu Erf Gelu-none HardSigmoid HardSwish
            InstanceNormalization LRN LeakyRelu Mean MeanVarianceNormalization Mish OneHot PRelu
            Selu Sinh Softplus Softsign Tan ThresholdedRelu""",
    },
}
"""The forms of operators that onnxruntime does not run in a type, by reason."""
if Version(onnxruntime.__version__) < Version("1.32"):
    REFUSED["bfloat16"][NO_KERNEL] += " CenterCropPad Pad-none"

REASONS = {
    (form, type_name): reason
    for type_name, reasons in REFUSED.items()
    for reason, forms in reasons.items()
    for form in forms.split()
}


def form_of(case: Case) -> str:
    """Returns the operator, and the attribute or input on which kernels depend."""
    if case.op == "Pad":  # the gradient of the value that is padded with is a sum
        return "Pad-none" if len(case.inputs) < 3 or case.inputs[2] is None else "Pad-value"
    attribute = {"Gelu": "approximate", "ScatterElements": "reduction"}.get(case.op)
    return f"{case.op}-{case.attributes.get(attribute, 'none')}" if attribute else case.op


def all_cases() -> list[tuple[Case, str]]:
    """Returns the cases of every family, the first few of each operator, in each type."""
    found: list[Case] = []
    seen: dict[tuple[str, str], int] = {}
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for case in getattr(importlib.import_module(path.stem), "CASES", ()):
            if not isinstance(case, Case):
                continue
            key = (case.domain, case.op)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 4:
                found.append(case)
    return [(case, type_name) for case in found for type_name in TYPES]


CASES = all_cases()


def parametrized(*, refused: bool) -> pytest.MarkDecorator:
    chosen = [
        pytest.param(case, type_name, id=f"{case}-{type_name}")
        for case, type_name in CASES
        if ((form_of(case), type_name) in REASONS) == refused
    ]
    return pytest.mark.parametrize(("case", "type_name"), chosen)


def between_casts(case: Case, kind: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of the first output in float32 of an operator in a type, and its feeds."""
    feeds: dict[str, np.ndarray] = {}
    initializers, nodes, inputs, names = [], [], [], []
    for index, array in enumerate(case.inputs):
        name = "" if array is None else f"x{index}"
        names.append(name)
        if array is None:
            continue
        is_float = array.dtype.kind == "f"
        if index in case.constant and not is_float:
            initializers.append(numpy_helper.from_array(array, name))
            continue
        feeds[name] = array.astype(np.float32) if is_float else array
        element = helper.np_dtype_to_tensor_dtype(feeds[name].dtype)
        inputs.append(helper.make_tensor_value_info(name, element, array.shape))
        if is_float:
            nodes.append(helper.make_node("Cast", [name], [f"{name}_cast"], to=kind))
            names[-1] = f"{name}_cast"
    outputs = [f"y{index}" for index in range(case.outputs)]
    nodes.append(helper.make_node(case.op, names, outputs, domain=case.domain, **case.attributes))
    nodes.append(helper.make_node("Cast", ["y0"], ["y"], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes, "types", inputs, [helper.make_tensor_value_info("y", 1, None)], initializers
    )
    opsets = {"": case.opset, DOMAIN: 1, case.domain: 1} | {"": case.opset}
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def differentiated(case: Case, feeds: dict[str, np.ndarray]) -> list[str]:
    return [f"x{index}" for index in case.differentiated if f"x{index}" in feeds]


def gradients(case: Case, kind: int, weight: np.ndarray, names: list[str]) -> list[np.ndarray]:
    model, feeds = between_casts(case, kind)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(helper.make_node("Mul", ["y", "weight"], ["f"]))
    return run(ortops.lower(with_gradient(model, names, "f", "d_")), feeds)


@pytest.mark.slow
@parametrized(refused=False)
def test_gradient_in_another_type(case: Case, type_name: str) -> None:
    kind, tolerance = TYPES[type_name]
    model, feeds = between_casts(case, kind)
    names = differentiated(case, feeds)
    (y,) = run(model, feeds)
    weight = np.random.default_rng(SEED).standard_normal(y.shape).astype(np.float32)
    found = gradients(case, kind, weight, names)
    expected = gradients(case, TensorProto.FLOAT, weight, names)
    largest = max(np.linalg.norm(gradient) for gradient in expected)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        allowed = tolerance * max(np.linalg.norm(theirs), 0.1 * largest) + 1e-2 * tolerance
        assert np.linalg.norm(ours - theirs) <= allowed, name


@pytest.mark.needs("onnxruntime<1.33")  # the list was made with 1.32
@parametrized(refused=True)
def test_onnxruntime_refuses(case: Case, type_name: str) -> None:
    model, feeds = between_casts(case, TYPES[type_name][0])
    with RAISED[REASONS[form_of(case), type_name]]:
        run(model, feeds)
        gradients(case, TYPES[type_name][0], np.ones((), np.float32), differentiated(case, feeds))


def test_every_refused_form_has_a_case() -> None:
    assert set(REASONS) <= {(form_of(case), type_name) for case, type_name in CASES}
