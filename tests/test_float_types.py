"""Gradients in float16, bfloat16 and double, next to those in float32.

The cases of the families' own tests run in other types between casts from and to float32. What
onnxruntime does not run in a type is listed; `scripts/onnxruntime_limits.py` says what has changed
of that in another version. The tolerance is that of the type: some rules round a dozen times.
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
from violations import all_violations

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


def all_cases() -> list[Case]:
    """Returns the cases of every family, the first few of each operator."""
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
    return found


CASES = all_cases()


def by_operator(*, refused: bool) -> dict[str, list[tuple[Case, list[str]]]]:
    """Returns the cases of each operator, with the types in which onnxruntime runs them, or not."""
    found: dict[str, list[tuple[Case, list[str]]]] = {}
    for case in CASES:
        chosen = [name for name in TYPES if ((form_of(case), name) in REASONS) == refused]
        if chosen:
            operator = "::".join(filter(None, (case.domain, case.op)))
            found.setdefault(operator, []).append((case, chosen))
    return found


RUN = by_operator(refused=False)


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


def outcome(case: Case, type_name: str) -> str:
    """Returns why onnxruntime does not run a case or its gradient in a type; "" where it does."""
    kind, _ = TYPES[type_name]
    model, feeds = between_casts(case, kind)
    try:
        (y,) = run(model, feeds)
        gradients(case, kind, np.ones_like(y, np.float32), differentiated(case, feeds))
    except Exception as error:  # each class of onnxruntime's errors is derived from Exception only
        reasons = (reason for reason, raised in RAISED.items() if raised.matches(error))
        return next(reasons, f"{type(error).__name__}: {error}")
    return ""


@pytest.mark.nightly(24)
@pytest.mark.slow
@pytest.mark.parametrize("operator", RUN)
def test_gradient_in_other_types(operator: str) -> None:
    with all_violations() as check:
        for case, type_names in RUN[operator]:
            model, feeds = between_casts(case, TensorProto.FLOAT)
            names = differentiated(case, feeds)
            (y,) = run(model, feeds)
            weight = np.random.default_rng(SEED).standard_normal(y.shape).astype(np.float32)
            expected = gradients(case, TensorProto.FLOAT, weight, names)
            largest = max(np.linalg.norm(gradient) for gradient in expected)
            for type_name in type_names:
                kind, tolerance = TYPES[type_name]
                with check(f"{case}-{type_name}"):
                    found = gradients(case, kind, weight, names)
                    for name, ours, theirs in zip(names, found, expected, strict=True):
                        norm = np.linalg.norm(theirs)
                        allowed = tolerance * max(norm, 0.1 * largest) + 1e-2 * tolerance
                        assert np.linalg.norm(ours - theirs) <= allowed, name


def test_every_refused_form_has_a_case() -> None:
    assert set(REASONS) <= {(form_of(case), name) for case in CASES for name in TYPES}


def test_outcomes_are_told_apart() -> None:
    """So that the script that reads them finds changes."""

    def first(op: str) -> Case:
        return next(case for case in CASES if case.op == op)

    assert outcome(first("Celu"), "float16") == NO_TYPE
    assert outcome(first("Erf"), "double") == NO_KERNEL
    assert outcome(first("Celu"), "bfloat16") == NO_TYPE
    assert outcome(first("Tanh"), "double") == ""
    adds = (case for case in CASES if form_of(case) == "ScatterElements-add")
    assert outcome(next(adds), "float16") == NO_REDUCTION
    assert outcome(Case("NoSuchOperator", first("Tanh").inputs), "double") not in ("", *RAISED)
