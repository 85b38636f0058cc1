"""ONNX's own nine cases of the domain, through every route."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.node import adagrad, adam, momentum  # noqa: F401  registers the cases
from running import plain_session

import ortops
from ortops.optimizers import OPERATORS

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data" / "simple"
OPTIMIZERS = [
    "test_adagrad",
    "test_adagrad_multiple",
    "test_adam",
    "test_adam_multiple",
    "test_momentum",
    "test_nesterov_momentum",
    "test_momentum_multiple",
]
GRADIENTS = ["test_gradient_of_add", "test_gradient_of_add_and_mul"]


def load(name: str) -> tuple[onnx.ModelProto, list[np.ndarray], list[np.ndarray]]:
    """Returns a case: model, inputs, expected outputs."""
    for case in node_cases._NodeTestCases:
        if case.name == name:
            ((inputs, outputs),) = case.data_sets
            return case.model, list(inputs), list(outputs)
    folder = DATA / name

    def arrays(kind: str) -> list[np.ndarray]:
        files = sorted((folder / "test_data_set_0").glob(f"{kind}_*.pb"))
        return [onnx.numpy_helper.to_array(onnx.load_tensor(file)) for file in files]

    return onnx.load(folder / "model.onnx"), arrays("input"), arrays("output")


def python_kernels(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return ortops.InferenceSession(model, kernels="python")


def lowered_in_ortops(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return ortops.InferenceSession(model, kernels="onnx")


def lowered_in_stock(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    lowered = ortops.lower(model)
    onnx.checker.check_model(lowered, full_check=True)
    return plain_session(lowered)


@pytest.mark.quick(5)
@pytest.mark.parametrize("route", [python_kernels, lowered_in_ortops, lowered_in_stock])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *GRADIENTS])
def test_session(
    name: str, route: Callable[[onnx.ModelProto], onnxruntime.InferenceSession]
) -> None:
    model, inputs, expected = load(name)
    session = route(model)
    feeds = dict(zip([value.name for value in session.get_inputs()], inputs, strict=True))
    for found, wanted in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numpy_kernel(name: str) -> None:
    model, (r, t, *tensors), expected = load(name)
    (node,) = model.graph.node
    operator = OPERATORS[node.op_type]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    attributes = {k: v.decode() if isinstance(v, bytes) else v for k, v in attributes.items()}
    count = len(tensors) // (2 + len(operator.states))
    results = [operator.rule(r, t, *tensors[i::count], **attributes) for i in range(count)]
    found = [result for column in zip(*results, strict=True) for result in column]
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-7)
