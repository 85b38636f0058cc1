"""Weights trained beside an adapter: modules_to_save and bias, with PEFT as the oracle."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from lora_models import ROWS, branches, four_bits, normal, outputs, values
from running import plain_session

import ortops
from ortops import ArgumentError, ModelError, UnsupportedError, lora, op
from ortops.graph.tensor import Tape


def network() -> onnx.ModelProto:
    weights = {
        "fc.weight": normal(6, 8, seed=1),
        "fc.bias": normal(8, seed=3),
        "head.weight": normal(8, 3, seed=2),
        "head.bias": normal(3, seed=4),
    }
    with Tape(name="two_layers") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        fc, fc_bias, head, head_bias = (tape.initializer(*each) for each in weights.items())
        tape.output(op.Identity(op.Tanh(x @ fc + fc_bias) @ head + head_bias), "y")
    return tape.model()


def trained(model: onnx.ModelProto, steps: int = 5) -> ortops.TrainingSession:
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    )
    session.run_steps([{"x": ROWS, "targets": normal(5, 3)}] * steps)
    return session


@pytest.mark.slow
def test_only_the_adapter_and_the_named_weights_are_trained() -> None:
    both = ["fc.lora_A.weight", "fc.lora_B.weight"]
    for settings, expected in (
        ({"modules_to_save": "head"}, ["head.weight", "head.bias"]),
        ({"modules_to_save": ["head"], "bias": "all"}, ["fc.bias", "head.weight", "head.bias"]),
        ({"bias": "lora_only", "targets": ["fc"]}, ["fc.bias"]),
        ({"bias": "all", "targets": ["fc"]}, ["fc.bias", "head.bias"]),
    ):
        base = network()
        model = lora.add(base, rank=2, **settings)
        np.testing.assert_array_equal(outputs(model, {"x": ROWS})[0], outputs(base, {"x": ROWS})[0])
        session = trained(model)
        assert sorted(session.parameters) == sorted(both + expected), settings
        before, after = values(model), values(session.inference_model())
        changed = {name for name in before if not np.array_equal(before[name], after[name])}
        assert changed == {*both, *expected}, settings


@pytest.mark.quick(1)
def test_stock_onnxruntime_serves_files_and_all_forms_agree(tmp_path: Path) -> None:
    model = lora.add(network(), rank=2, modules_to_save=["head"], bias="all")
    session = trained(model)
    result = session.inference_model()
    expected = outputs(result, {"x": ROWS})[0]
    assert np.abs(expected - outputs(model, {"x": ROWS})[0]).max() > 1e-3
    file = tmp_path / "a.onnx_adapter"
    lora.save_adapter(result, file)
    held = onnxruntime.AdapterFormat.read_adapter(str(file)).get_parameters()
    assert {"head.weight", "head.bias", "fc.bias", "fc.lora_A.weight"} <= held.keys()
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(file))
    options.add_active_adapter(adapter)
    served = plain_session(model).run(None, {"x": ROWS}, options)[0]
    np.testing.assert_allclose(served, expected, rtol=1e-6)
    again = lora.load_adapter(model, file)
    lora.to_peft(result, tmp_path / "peft")
    read = lora.from_peft(network(), tmp_path / "peft")
    lora.to_peft(read, tmp_path / "second")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = (Path(tmp_path, each, name).read_bytes() for each in ("peft", "second"))
        assert first == second
    for each in (again, read):
        assert values(each).keys() == values(result).keys()
        for name, array in values(each).items():
            np.testing.assert_array_equal(array, values(result)[name], err_msg=name)
    merged = lora.merge(result)
    assert [value.name for value in merged.graph.input] == ["x"]
    np.testing.assert_allclose(outputs(merged, {"x": ROWS})[0], expected, rtol=1e-5, atol=1e-6)
    other = network()
    other.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(normal(6, 8, seed=9), other.graph.initializer[0].name)
    )
    changed = lora.add(other, rank=2, modules_to_save=["head"], bias="all")
    with pytest.raises(ModelError, match="belongs to another base"):
        lora.load_adapter(changed, file)


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    model = lora.add(network(), rank=2, modules_to_save=["head"], bias="lora_only")
    session = trained(model, 3)
    session.save(tmp_path / "state.onnx")
    again = ortops.TrainingSession(tmp_path / "state.onnx")
    batches = [{"x": ROWS, "targets": normal(5, 3)}] * 3
    for each in (session, again):
        each.run_steps(batches)
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array, err_msg=name)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    def tied() -> onnx.ModelProto:
        with Tape(name="tied") as tape:
            x = tape.input("x", np.int64, ["batch"])
            w, fc = tape.initializer("emb.weight", normal(9, 4)), normal(4, 4)
            y = op.Tanh(op.Gather(w, x) @ tape.initializer("fc.weight", fc))
            tape.output(y @ op.Transpose(w, perm=[1, 0]), "y")
        return tape.model()

    def quantized() -> onnx.ModelProto:
        return four_bits(normal(5, 32), bias=True)

    def with_quantized_bias() -> onnx.ModelProto:
        with Tape(name="quantized_bias") as tape:
            x = tape.input("x", np.float32, ["batch", 4])
            bias = tape.initializer("fc.bias", np.arange(4, dtype=np.int32))
            scale = tape.initializer("scale", np.array(0.5, np.float32))
            product = x @ tape.initializer("fc.weight", normal(4, 4))
            tape.output(product + op.DequantizeLinear(bias, scale), "y")
        return tape.model()

    def norms() -> onnx.ModelProto:
        """Exporters store equal numbers once."""
        with Tape(name="norms") as tape:
            x = tape.input("x", np.float32, ["batch", 4])
            ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
            scale, bias = tape.initializer("n1.weight", ones), tape.initializer("n1.bias", zeros)
            y = op.LayerNormalization(x @ tape.initializer("fc.weight", normal(4, 4)), scale, bias)
            tape.output(op.LayerNormalization(y, scale, bias), "y")
        model = tape.model()
        for node, name in zip(model.graph.node, ("fc/MatMul", "n1/Norm", "n2/Norm"), strict=True):
            node.name = f"/{name}"
        return model

    for make, settings, error, match in (
        (network, {"modules_to_save": ["score"]}, ModelError, "'score' matches no module"),
        (network, {"modules_to_save": 3}, ArgumentError, "must be names of modules, got 3"),
        (network, {"bias": "some"}, ArgumentError, "bias must be .*'lora_only'.* got 'some'"),
        (network, {"modules_to_save": ["fc", "head"]}, ModelError, "no layer is left"),
        (tied, {"modules_to_save": ["emb"]}, UnsupportedError, "'emb.weight' .* is shared by emb"),
        (quantized, {"modules_to_save": ["fc.weight_Q4"]}, UnsupportedError, "Q4' is quantized"),
        (with_quantized_bias, {"bias": "lora_only"}, UnsupportedError, "'fc.bias' .* is quantized"),
        (with_quantized_bias, {"bias": "all"}, UnsupportedError, "'fc.bias' .* is quantized"),
        (branches, {"bias": "all", "modules_to_save": ["b"]}, UnsupportedError, "inside a branch"),
        (norms, {"bias": "all"}, UnsupportedError, "'n1.bias' .* is shared by n1, n2, of which"),
    ):
        with pytest.raises(error, match=match):
            lora.add(make(), rank=2, **settings)


def test_a_model_without_biases(caplog: pytest.LogCaptureFixture) -> None:
    lora.add(four_bits(normal(5, 32)), rank=2, bias="all")
    assert "bias='all' trains none: the file has no biases of these layers" in caplog.messages


SETTINGS = {
    "head": {"modules_to_save": ["head", "norm", "emb"]},
    "all": {"bias": "all", "modules_to_save": ["head"]},
    "lora_only": {"bias": "lora_only", "use_dora": True},
    "overlapping": {"modules_to_save": ["head"], "target_modules": ["fc", "mid", "head"]},
    "convolution": {"modules_to_save": ["conv"], "bias": "all", "target_modules": ["fc", "twice"]},
}


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "training"])
@pytest.mark.parametrize("name", SETTINGS)
def test_curves_and_folders_are_those_of_peft(name: str, exporter: str, tmp_path: Path) -> None:
    import peft
    import torch
    from torch import nn
    from torch_exports import curves_beside_torch, exported_by

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc, self.norm = nn.Embedding(10, 6), nn.Linear(6, 8), nn.LayerNorm(8)
            self.mid, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)
            self.conv, self.head = nn.Conv1d(8, 4, 3, padding=1), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.mid(self.norm(torch.tanh(self.fc(self.emb(x)))))
            h = torch.tanh(self.twice(torch.tanh(self.twice(h))))
            return self.head(torch.relu(self.conv(h.transpose(1, 2))).mean(-1))

    torch.manual_seed(0)
    module, x = Net().eval(), torch.randint(0, 10, (4, 5))
    base = exported_by(copy.deepcopy(module), x, exporter)
    settings: dict[str, Any] = {"target_modules": ["fc", "mid"]} | SETTINGS[name]
    config = peft.LoraConfig(r=2, lora_alpha=3, **settings)
    wrapped = peft.get_peft_model(copy.deepcopy(module), config).eval()
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    with torch.no_grad():
        for each in parameters:
            each.add_(torch.randn_like(each) / 4)
    wrapped.save_pretrained(tmp_path / "given")
    model = lora.from_peft(base, tmp_path / "given")
    feeds: dict[str, Any] = {"x": x.numpy()}
    with torch.no_grad():
        np.testing.assert_allclose(outputs(model, feeds)[0], wrapped(x).numpy(), atol=1e-5)
    adam = ortops.optimizers.Adam(0.02, beta=0.999, epsilon_after_correction=True)
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer=adam)
    )
    names = {"target_modules": "targets", "use_dora": "dora"}
    ours = {names.get(key, key): value for key, value in settings.items()}
    added = lora.add(base, 2, 3, **ours)
    assert values(added).keys() == values(model).keys()
    assert sum(a.size for a in session.parameters.values()) == sum(p.numel() for p in parameters)
    curves = curves_beside_torch(wrapped, parameters, session, x)
    assert curves[0][-1] < 0.95 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    result = session.inference_model()
    lora.to_peft(result, tmp_path / "written")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "written").eval()
    with torch.no_grad():
        expected = wrapped(x).numpy()
        np.testing.assert_allclose(back(x).numpy(), expected, atol=1e-4)
    again = lora.from_peft(base, tmp_path / "written")
    for each in (result, lora.merge(result), again):
        np.testing.assert_allclose(outputs(each, feeds)[0], expected, atol=1e-4)
    config = json.loads(Path(tmp_path, "written", "adapter_config.json").read_text())
    assert config["bias"] == settings.get("bias", "none")
