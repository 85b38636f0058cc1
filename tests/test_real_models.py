"""Gradients of models that others wrote, against differences of a float64 run.

`python scripts/fetch_models.py` fetches them. The oracle is onnx's reference implementation on the
model in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
from domain_models import node
from onnx import TensorProto, helper, numpy_helper
from running import run

import ortops

FOLDER = Path(__file__).parents[1] / ".models"
STEP = 1e-5
TOLERANCE = 2e-3

FEEDS: dict[str, dict[str, Any]] = {
    "ch_ppocr_mobile_v2.0_cls_mobile.onnx": {"x": (2, 3, 48, 96)},
    "PP-OCRv6_rec_small.onnx": {"x": (2, 3, 48, 64)},
    "PP-OCRv6_det_small.onnx": {"x": (2, 3, 64, 96)},
    "silero_vad_op18_ifless.onnx": {
        "input": (1, 576),
        "state": (2, 1, 128),
        "sr": np.array(16000),
    },
}


def feeds_of(name: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(20)
    return {
        key: rng.standard_normal(given) if isinstance(given, tuple) else given
        for key, given in FEEDS[name].items()
    }


def parameters(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Returns ten weights spread over the depth: initializers, or values of Constant nodes."""
    read = [name for item in model.graph.node for name in item.input]
    found = {t.name: t for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    for item in model.graph.node:
        for attribute in item.attribute:
            if item.op_type == "Constant" and attribute.t.data_type == TensorProto.FLOAT:
                found[item.output[0]] = attribute.t
    inner = [
        name
        for item in model.graph.node
        for attribute in item.attribute
        for child in attribute.g.node
        for name in child.input
    ]
    order = [n for n in dict.fromkeys((*read, *inner)) if n in found and "8k" not in n]
    matrices = [name for name in order if sum(dim > 1 for dim in found[name].dims) > 1]
    weights = matrices if len(matrices) >= 10 else [n for n in order if found[n].dims]
    chosen = [
        weights[i] for i in np.linspace(0, len(weights) - 1, min(10, len(weights)), dtype=int)
    ]
    return {name: numpy_helper.to_array(found[name]) for name in dict.fromkeys(chosen)}


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model in float64."""
    result = onnx.version_converter.convert_version(model, 21)

    def convert(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            double(tensor)
        for described in (*graph.input, *graph.output, *graph.value_info):
            if described.type.tensor_type.elem_type == TensorProto.FLOAT:
                described.type.tensor_type.elem_type = TensorProto.DOUBLE
        for item in graph.node:
            for attribute in item.attribute:
                convert(attribute.g)
                if attribute.HasField("t"):
                    double(attribute.t)
                if item.op_type == "Cast" and attribute.i == TensorProto.FLOAT:
                    attribute.i = TensorProto.DOUBLE

    def double(tensor: onnx.TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    convert(result.graph)
    return result


def with_value(model: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    """Returns a model in which a weight has another value."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name == name:
            tensor.CopyFrom(numpy_helper.from_array(array, name))
    for item in result.graph.node:
        if name in item.output:
            item.attribute[0].t.CopyFrom(numpy_helper.from_array(array))
    return result


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.fetched(FOLDER / file)) for file in FEEDS]
)
def test_gradients(file: str) -> None:
    path = FOLDER / file
    model = onnx.load(path)
    exact = feeds_of(file)
    feeds = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in exact.items()}
    output = model.graph.output[0].name
    (value,) = run(path, feeds, [output])
    rng = np.random.default_rng(1)
    weight = rng.standard_normal(value.shape)
    chosen = parameters(model)
    assert len(chosen) == 10

    trained = onnx.ModelProto()
    trained.CopyFrom(model)
    trained.graph.initializer.append(numpy_helper.from_array(weight.astype(np.float32), "weight"))
    trained.graph.node.extend(
        [
            helper.make_node("Mul", [output, "weight"], ["weighted"]),
            node(
                "Gradient", list(chosen), [f"d_{x}" for x in chosen], xs=list(chosen), y="weighted"
            ),
        ]
    )
    trained.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    trained.ir_version = max(trained.ir_version, 4)
    del trained.graph.output[:]
    trained.graph.output.extend(helper.make_empty_tensor_value_info(f"d_{x}") for x in chosen)
    lowered = ortops.lower(trained)
    gradients = dict(zip(chosen, run(lowered, feeds), strict=True))

    double = in_double(model)
    for name, array in chosen.items():
        direction = rng.standard_normal(array.shape) * np.sqrt(np.mean(np.square(array)))
        ahead, behind = (
            onnx.reference.ReferenceEvaluator(
                with_value(double, name, array + sign * STEP * direction)
            ).run([output], exact)[0]
            for sign in (1, -1)
        )
        expected = np.sum((ahead - behind) * weight) / (2 * STEP)
        terms = gradients[name].astype(np.float64) * direction
        scale = np.abs(terms).sum()
        assert scale > 0, name
        assert abs(terms.sum() - expected) <= TOLERANCE * scale, (name, terms.sum(), expected)
