"""Gradients in float16, bfloat16 and double, next to those in float32.

The cases of the families' own tests run in other types between casts from and to float32, where
onnxruntime has the kernel. The tolerance is that of the type: some rules round a dozen times.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dot_test
import numpy as np
import onnx
import pytest
from dot_test import Case
from onnx import TensorProto, helper, numpy_helper
from running import run

import ortops

TYPES = {
    "float16": (TensorProto.FLOAT16, 0.05),
    "bfloat16": (TensorProto.BFLOAT16, 0.3),
    "double": (TensorProto.DOUBLE, 1e-3),
}


def all_cases() -> Iterator[Any]:
    """Yields the cases of every family, the first few of each operator."""
    seen: dict[tuple[str, str], int] = {}
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for case in getattr(importlib.import_module(path.stem), "CASES", ()):
            if not isinstance(case, Case):
                continue
            key = (case.domain, case.op)
            seen[key] = seen.get(key, 0) + 1
            if seen[key] <= 4:
                yield pytest.param(case, id=str(case))


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
    opsets = {"": case.opset, dot_test.DOMAIN: 1, case.domain: 1} | {"": case.opset}
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def gradients(case: Case, kind: int, weight: np.ndarray, names: list[str]) -> list[np.ndarray]:
    model, feeds = between_casts(case, kind)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(helper.make_node("Mul", ["y", "weight"], ["f"]))
    return run(ortops.lower(dot_test.with_gradient(model, names, "f", "d_")), feeds)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("case", list(all_cases()))
def test_gradient_in_another_type(case: Case, type_name: str) -> None:
    kind, tolerance = TYPES[type_name]
    model, feeds = between_casts(case, kind)
    names = [f"x{index}" for index in case.differentiated if f"x{index}" in feeds]
    if not names:
        pytest.skip("nothing to differentiate")
    try:
        (y,) = run(model, feeds)
    except Exception:  # onnxruntime has a class for each of its many ways to say it
        pytest.skip(f"onnxruntime does not run it in {type_name}")
    weight = np.random.default_rng(dot_test.SEED).standard_normal(y.shape).astype(np.float32)
    found = gradients(case, kind, weight, names)
    expected = gradients(case, TensorProto.FLOAT, weight, names)
    largest = max(np.linalg.norm(gradient) for gradient in expected)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        allowed = tolerance * max(np.linalg.norm(theirs), 0.1 * largest) + 1e-2 * tolerance
        assert np.linalg.norm(ours - theirs) <= allowed, name
