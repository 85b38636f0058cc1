"""Layers that are called several times have one adapter, whatever exporters make of their names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lora_models import normal, outputs, random_adapter, values, with_values
from onnx import helper, numpy_helper

import ortops
from ortops import ModelError, lora

ROWS = normal(3, 6)


def chain(*layers: tuple[str, np.ndarray, str]) -> onnx.ModelProto:
    """Products of an input with matrices, by the names of their nodes and of their weights."""
    nodes, weights = [], {}
    for index, (name, weight, stored) in enumerate(layers):
        weights[stored] = weight
        given, made = ("x" if not index else f"h{index}"), f"h{index + 1}"
        nodes.append(helper.make_node("MatMul", [given, stored], [made], name=name))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "chain",
        [info("x", onnx.TensorProto.FLOAT, ["batch", 6])],
        [info(made, onnx.TensorProto.FLOAT, ["batch", 6])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


W, V = normal(6, 6, seed=1), normal(6, 6, seed=2)
CALLS = {
    "numbered": (("/fc/MatMul", W, "w"), ("/fc_1/MatMul", W, "w"), ("/fc_2/MatMul", W, "w")),
    "inside": (("/a/fc/MatMul", W, "w"), ("/a_1/fc/MatMul", W, "w"), ("/a/fc_1/MatMul", W, "w")),
    "from outside": (("/fc/MatMul", W, "w"), ("/a/fc/MatMul", W, "w"), ("/fc_1/MatMul", W, "w")),
    "stored twice": (("/fc/MatMul", W, "w"), ("/fc/MatMul_1", W, "w_1"), ("/fc/MatMul_2", W, "w")),
}


@pytest.mark.parametrize("layers", CALLS.values(), ids=CALLS)
def test_all_calls_of_a_layer_have_one_adapter(layers: Any, tmp_path: Path) -> None:
    name = "a.fc" if any("/a/" in node for node, _, _ in layers) else "fc"
    base = chain(*layers)
    for targets in (None, ["fc"], [layers[1][0].strip("/").rpartition("/")[0].replace("/", ".")]):
        found = lora.add(base, rank=2, targets=targets)
        assert sorted(random_adapter(found)) == [f"{name}.lora_{each}.weight" for each in "AB"]
    found = with_values(found, new := random_adapter(found))
    weight = W + new[f"{name}.lora_A.weight"] @ new[f"{name}.lora_B.weight"]
    expected = ROWS @ weight @ weight @ weight
    lora.to_peft(found, tmp_path)
    for each in (found, lora.merge(found), lora.from_peft(base, tmp_path)):
        np.testing.assert_allclose(outputs(each, {"x": ROWS})[0], expected, rtol=1e-4, atol=1e-4)


def test_other_layers_keep_adapters_of_their_own() -> None:
    """Tied weights, equal weights of layers with numbers, and unequal weights of one name."""
    for layers, names in (
        ((("/one/MatMul", W, "w"), ("/two/MatMul", W, "w")), ["one", "two"]),
        ((("/fc/MatMul", W, "w"), ("/fc_1/MatMul", W, "w_1")), ["fc", "fc_1"]),
        ((("/fc/MatMul", W, "w"), ("/fc/MatMul_1", V, "v")), ["fc", "fc_1"]),
        ((("/a/fc/MatMul", W, "w"), ("/b/fc/MatMul", W, "w")), ["a.fc", "b.fc"]),
    ):
        found = random_adapter(lora.add(chain(*layers), rank=2))
        assert [name for name in found if "lora_A" in name] == [
            f"{name}.lora_A.weight" for name in names
        ]


def test_a_name_that_peft_does_not_know_is_refused(tmp_path: Path) -> None:
    model = lora.add(chain(("/fc/MatMul", W, "w"), ("/fc/MatMul_1", V, "v")), rank=2)
    with pytest.raises(ModelError, match="layer 'fc_1' got a number, as the model has two layers"):
        lora.to_peft(model, tmp_path)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "training"])
def test_calls_of_exported_modules_are_those_of_peft(exporter: str, tmp_path: Path) -> None:
    """A layer that two matrices of different rank are given to, and one that others call."""
    import peft
    import torch
    from torch import nn
    from torch_exports import exported_by

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(40, 40), nn.Linear(40, 40, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.out(torch.tanh(self.fc(x))))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(40, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.head(self.inner(self.inner(x))))
            return self.inner.out(torch.tanh(self.head(x[:, 0])))

    torch.manual_seed(0)
    module, x = Outer().eval(), torch.randn(2, 5, 40)
    base = exported_by(copy.deepcopy(module), x, exporter)
    config = peft.LoraConfig(r=2, target_modules=["inner.fc", "inner.out", "head"])
    wrapped = peft.get_peft_model(copy.deepcopy(module), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 8)
        expected, before = wrapped(x).numpy(), module(x).numpy()
    assert np.abs(expected - before).max() > 0.05
    wrapped.save_pretrained(tmp_path / "given")
    found = lora.from_peft(base, tmp_path / "given")
    assert len(random_adapter(found)) == 6
    feeds = {"x": x.numpy()}
    for each in (found, lora.merge(found)):
        np.testing.assert_allclose(outputs(each, feeds)[0], expected, atol=1e-5)
    added = lora.add(base, rank=2, targets=["inner.fc", "inner.out", "head"])
    added = with_values(added, {n: a / 4 for n, a in random_adapter(added).items()})
    lora.to_peft(added, tmp_path / "written")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "written").eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(x).numpy(), outputs(added, feeds)[0], atol=1e-5)
    assert values(added).keys() > values(base).keys()


def test_an_adapter_of_several_calls_is_no_weight_that_was_merged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B begins with zeros, which in other weights that several nodes read may be no coincidence."""
    model = lora.add(chain(("/fc/MatMul", W, "w"), ("/fc_1/MatMul", W, "w")), rank=2)
    with caplog.at_level("WARNING", "ortops"):
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert "holds one number" not in caplog.text
