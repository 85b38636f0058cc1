"""FlexAttention of ONNX's preview domain: it runs as its function body, and is differentiated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from running import run

import ortops
from ortops.reference import Evaluator

pytestmark = pytest.mark.needs("onnx>=1.23")

DOMAIN = "ai.onnx.preview"
SHAPES = {"q": (2, 4, 3, 6), "k": (2, 2, 5, 6), "v": (2, 2, 5, 7)}


def cases() -> dict[str, Any]:
    """Returns ONNX's own cases."""
    from onnx.backend.test.case.node import _NodeTestCases, flexattention  # noqa: F401

    return {
        case.name: case
        for case in _NodeTestCases
        if case.name.startswith("test_flexattention") and "expanded" not in case.name
    }


def modifier(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    """Returns a graph from ``s`` to ``t``."""
    kind = (TensorProto.FLOAT, [None] * 4)
    return helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("s", *kind)],
        [helper.make_tensor_value_info("t", *kind)],
    )


MODIFIERS = {
    "score_mod": modifier(
        "scores",
        helper.make_node("Constant", [], ["half"], value_float=0.5),
        helper.make_node("Mul", ["s", "half"], ["m"]),
        helper.make_node("Tanh", ["m"], ["t"]),
    ),
    "prob_mod": modifier("probabilities", helper.make_node("Mul", ["s", "s"], ["t"])),
}


def model(*, symbolic: bool = False, **attributes: Any) -> onnx.ModelProto:
    """Returns a model of the attention and its gradients, with grouped heads."""
    inputs = [
        helper.make_tensor_value_info(
            name,
            TensorProto.FLOAT,
            [f"{name}_{axis}" for axis in range(4)] if symbolic else shape,
        )
        for name, shape in SHAPES.items()
    ]
    weights = helper.make_tensor_value_info("w", TensorProto.FLOAT, [None] * 4)
    training = "ai.onnx.preview.training"
    names = list(SHAPES)
    nodes = [
        helper.make_node("FlexAttention", names, ["y"], "attention", domain=DOMAIN, **attributes),
        helper.make_node("Mul", ["y", "w"], ["p"]),
        helper.make_node("ReduceSum", ["p"], ["loss"], keepdims=0),
        helper.make_node(
            "Gradient", names, ["dq", "dk", "dv"], domain=training, xs=names, y="loss"
        ),
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in ("y", "dq", "dk", "dv")]
    imports = [helper.make_opsetid("", 23)]
    imports += [helper.make_opsetid(domain, 1) for domain in (DOMAIN, training)]
    graph = helper.make_graph(nodes, "attention", [*inputs, weights], outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def feeds() -> Mapping[str, Any]:
    rng = np.random.default_rng(4)
    shapes = {**SHAPES, "w": (2, 4, 3, 7)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.slow
def test_the_cases_of_onnx() -> None:
    found = cases()
    assert len(found) == 11
    for case in found.values():
        session = ortops.InferenceSession(case.model)
        ((inputs, outputs),) = case.data_sets
        names = [value.name for value in session.get_inputs()]
        for one, two in zip(
            session.run(None, dict(zip(names, inputs, strict=True))), outputs, strict=True
        ):
            assert one.dtype == two.dtype
            np.testing.assert_allclose(one, two, rtol=case.rtol, atol=1e-5, err_msg=case.name)


@pytest.mark.quick(3)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("modified", [False, True])
def test_gradients_agree_with_the_reference(symbolic: bool, modified: bool) -> None:
    made = model(symbolic=symbolic, **(MODIFIERS if modified else {"scale": 0.3}))
    lowered = ortops.lower(made)
    assert {node.domain for node in lowered.graph.node} == {""}
    assert [entry.domain for entry in lowered.opset_import] == [""]
    found = run(lowered, feeds())
    for one, two in zip(found, Evaluator(made).run(None, dict(feeds())), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.torch
def test_gradients_agree_with_torch() -> None:
    import torch

    given = {name: torch.tensor(array) for name, array in feeds().items()}
    q, k, v = (given[name].double().requires_grad_() for name in "qkv")
    heads = [tensor.repeat_interleave(2, dim=1) for tensor in (k, v)]
    scores = torch.tanh(q @ heads[0].transpose(-1, -2) / 6**0.5 * 0.5)
    y = scores.softmax(-1) ** 2 @ heads[1]
    (y * given["w"]).sum().backward()
    wanted = [y.detach(), q.grad, k.grad, v.grad]
    for one, two in zip(run(ortops.lower(model(**MODIFIERS)), feeds()), wanted, strict=True):
        np.testing.assert_allclose(one, two.numpy(), rtol=1e-4, atol=1e-5)


def test_it_trains() -> None:
    made = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23, "ai.onnx.preview": 1]>'
        "net (float[n, 1, 2, 2] x) => (float[n, 1, 2, 2] y)"
        "<float[2, 2] w = {1.0, 0.0, 0.0, 1.0}> {"
        "k = MatMul (x, w) y = ai.onnx.preview.FlexAttention (x, k, k) }"
    )
    trainable = ortops.build_training_model(made, loss="MeanSquaredError", optimizer="SGD")
    session = ortops.TrainingSession(trainable)
    x = np.random.default_rng(1).standard_normal((3, 1, 2, 2), np.float32)
    losses = [float(session.step({"x": x, "targets": 2 * x})["loss"]) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_unknown_operators_of_the_domain_are_refused() -> None:
    made = model()
    made.graph.node[0].op_type = "FlexAtention"
    with pytest.raises(ortops.ModelError, match=r"'ai\.onnx\.preview' has no operator Flex"):
        ortops.lower(made)
