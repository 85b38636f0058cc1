"""Language models with experts: MoE and QMoE of onnxruntime, which have no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from models import llama
from ortops import UnsupportedError
from ortops.llm import FineTuning
from ortops.llm.checking import check_folder

EXPERTS = 4
ROWS = [[65, 66, 67, 68], [70, 71, 72]]


def with_experts(folder: Path, kind: str, layer: int) -> Path:
    """Writes a folder in which experts replace the feed-forward part of a layer."""
    llama.write(folder)
    model = onnx.load(folder / "model.onnx")
    graph, rng = model.graph, np.random.default_rng(0)
    scope = f"/model/layers.{layer}"
    parts = [node for node in graph.node if node.name.startswith(f"{scope}/mlp/")]
    place, x, y = list(graph.node).index(parts[0]), parts[0].input[0], parts[-1].output[0]
    for node in parts:
        graph.node.remove(node)

    def stored(name: str, array: Any) -> str:
        graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def weight(name: str, *shape: int) -> str:
        return stored(name, rng.normal(0, 0.2, shape).astype(np.float32))

    def packed(name: str, *shape: int) -> str:
        return stored(name, rng.integers(0, 256, shape).astype(np.uint8))

    hidden, wide = llama.HIDDEN, llama.WIDE
    inputs = [x, "chances", weight("fc1", EXPERTS, wide, hidden), ""]
    inputs += [weight("fc2", EXPERTS, hidden, wide)]
    settings: dict[str, Any] = {"k": 2, "activation_type": "silu", "normalize_routing_weights": 1}
    if kind == "QMoE":
        first = [packed("q1", EXPERTS, wide, hidden // 2), weight("s1", EXPERTS, wide), ""]
        second = [packed("q2", EXPERTS, hidden, wide // 2), weight("s2", EXPERTS, hidden)]
        inputs, settings = [x, "chances", *first, *second], settings | {"expert_weight_bits": 4}
    nodes = [
        helper.make_node("MatMul", [x, weight("router", hidden, EXPERTS)], ["routed"], "router"),
        helper.make_node(
            "Reshape", ["routed", stored("rows", np.array([-1, EXPERTS]))], inputs[1:2]
        ),
        helper.make_node(
            kind, inputs, [y], f"{scope}/moe/{kind}", domain="com.microsoft", **settings
        ),
    ]
    for offset, node in enumerate(nodes):
        graph.node.insert(place + offset, node)
    shape = ["batch_size", "sequence_length", hidden]  # the builder writes it, too
    graph.value_info.append(helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, shape))
    onnx.save(model, folder / "model.onnx")
    return folder


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["MoE", "QMoE"])
@pytest.mark.parametrize("layer", [0, 1])
def test_adapters_in_front_of_experts_are_refused(kind: str, layer: int, tmp_path: Path) -> None:
    folder = with_experts(tmp_path, kind, layer)
    expected = rf"{kind} node '/model/layers.{layer}/moe/{kind}' in layer {layer} \(1 such nodes\)"
    for targets in (None, ["qkv_proj", "o_proj"]):
        with pytest.raises(UnsupportedError, match=rf"{expected}: experts have no gradient"):
            FineTuning(folder, rank=1, targets=targets)
    (problem,) = check_folder(folder).problems
    assert "targets=['lm_head']" in problem


@pytest.mark.slow
@pytest.mark.needs("onnxruntime>=1.24")  # for the kernels
@pytest.mark.parametrize("kind", ["MoE", "QMoE"])
def test_layers_behind_experts_are_adapted(kind: str, tmp_path: Path) -> None:
    folder = with_experts(tmp_path, kind, 0)
    for targets in (["lm_head"], ["/model/layers.1/attn/*"]):
        tuning = FineTuning(folder, rank=2, targets=targets, learning_rate=0.02)
        history = tuning.fit(ROWS, epochs=20, progress=False)
        assert history[-1]["loss"] < 0.8 * history[0]["loss"]
