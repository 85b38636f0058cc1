"""DoRA: each output of a layer is scaled by a magnitude over the norm of its weights.

The formula of PEFT is W' = m (W + s B A) / ‖W + s B A‖; here it is written by hand with numpy, and
PEFT itself is the oracle of what exported modules compute and learn.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from lora_models import (
    CASES,
    ROWS,
    Case,
    branches,
    built,
    normal,
    outputs,
    random_adapter,
    values,
    with_values,
)
from running import plain_session

import ortops
from ortops import ModelError, UnsupportedError, lora, op

LINEAR = {name: case for name, case in CASES.items() if case.op_type not in ("Gather", "Conv")}


def weight_of(base: onnx.ModelProto, case: Case, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns W and the bias of a linear layer, from what it makes of the unit vectors."""
    (x,) = case.feeds.values()
    with_a = "transA" in str(base.graph.node)
    rows = np.concatenate([np.zeros((1, size)), np.eye(size)]).astype(x.dtype)
    rows = rows.reshape(*(1 for _ in x.shape[2:]), *rows.shape)
    free = onnx.ModelProto()
    free.CopyFrom(base)
    for each in (*free.graph.input[:1], *free.graph.output):
        for dim in each.type.tensor_type.shape.dim:
            dim.dim_param = ""
            dim.ClearField("dim_value")
    found = outputs(free, {"x": rows.T if with_a else rows})[0].astype(np.float64)
    found = found.reshape(-1, found.shape[-1])
    return found[1:] - found[0], found[0]


def with_magnitudes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Gives an adapter random numbers: A, B, and magnitudes near those that it has."""
    new = random_adapter(model)
    first = values(model)
    for name in list(new):
        if "magnitude" in name:
            new[name] = (first[name] * (1 + new[name] / 4)).astype(first[name].dtype)
        elif "lora_scale" in name or "lora_base" in name:
            del new[name]
    return with_values(model, new), new


def trained_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose scales are computed, as training computes them."""
    built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    return ortops.TrainingSession(built_model).inference_model()


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR)
def test_outputs_are_scaled_to_their_magnitude(case: Case, tmp_path: Path) -> None:
    base = case.model()
    model = lora.add(base, rank=3, targets=case.targets, dora=True)
    before = outputs(base, case.feeds)[0]
    half = before.dtype == np.float16
    loose = {"rtol": 5e-3, "atol": 5e-3} if half else {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_array_equal(outputs(model, case.feeds)[0], before)
    computing, new = with_magnitudes(trained_form(model))
    parts = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight")
    a, b, m = (next(v for n, v in new.items() if n.endswith(part)) for part in parts)
    (magnitude,) = (name for name in new if name.endswith(parts[2]))
    weight, bias = weight_of(base, case, len(a))
    merged = weight + a.astype(np.float64) @ b
    first = values(model)[magnitude]
    np.testing.assert_allclose(first, np.linalg.norm(weight, axis=0), rtol=5e-3 if half else 1e-4)
    merged *= m / np.linalg.norm(merged, axis=0)
    x = case.feeds["x"].astype(np.float64)
    expected = (x.T if "transA" in str(base.graph.node) else x) @ merged + bias
    np.testing.assert_allclose(outputs(computing, case.feeds)[0], expected, **loose)
    np.testing.assert_allclose(
        outputs(lora.merge(computing, dequantize=True), case.feeds)[0], expected, **loose
    )
    lora.save_adapter(computing, tmp_path / "a.onnx_adapter")
    again = lora.load_adapter(computing, tmp_path / "a.onnx_adapter")
    np.testing.assert_allclose(outputs(again, case.feeds)[0], expected, **loose)
    # Stock onnxruntime computes with inputs of 8 bits beside weights that DequantizeLinear makes.
    scale = m / np.linalg.norm(weight + a.astype(np.float64) @ b, axis=0)
    expected = (before.astype(np.float64) - bias) * scale + case.added(x, a, b * scale) + bias
    loaded = lora.load_adapter(model, tmp_path / "a.onnx_adapter")
    np.testing.assert_allclose(values(loaded)[magnitude], m, rtol=1e-5)
    lora.to_peft(computing, tmp_path)
    for each in (loaded, lora.from_peft(base, tmp_path)):
        np.testing.assert_allclose(outputs(each, case.feeds)[0], expected, **loose)


def two_layers() -> onnx.ModelProto:
    weights = {"fc.weight": normal(6, 8, seed=1), "out.weight": normal(8, 3, seed=2)}
    names = {name.replace(".", "_"): array for name, array in weights.items()}
    return built(
        ROWS, lambda x, fc_weight, out_weight: op.Tanh(x @ fc_weight) @ out_weight, **names
    )


def test_stock_onnxruntime_serves_files_of_the_scales(tmp_path: Path) -> None:
    base = lora.add(two_layers(), rank=2, dora=True)
    computing, _ = with_magnitudes(trained_form(base))
    expected = outputs(computing, {"x": ROWS})[0]
    assert np.abs(expected - outputs(base, {"x": ROWS})[0]).max() > 0.1
    lora.save_adapter(computing, tmp_path / "a.onnx_adapter")
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    served = plain_session(base).run(None, {"x": ROWS}, options)[0]
    np.testing.assert_allclose(served, expected, atol=1e-5)
    held = onnxruntime.AdapterFormat.read_adapter(str(tmp_path / "a.onnx_adapter"))
    kinds = {name.rpartition("lora_")[2] for name in held.get_parameters()}
    assert kinds == {"A.weight", "B.weight", "scale"}


def test_values_written_to_the_first_file_have_the_scales() -> None:
    base = lora.add(two_layers(), rank=2, dora=True)
    session = ortops.TrainingSession(
        ortops.build_training_model(base, loss="MeanSquaredError", optimizer="Adam")
    )
    session.run_steps([{"x": ROWS, "targets": normal(5, 3)}] * 5)
    expected = outputs(session.inference_model(), {"x": ROWS})[0]
    found = outputs(session.inference_model(original=base), {"x": ROWS})[0]
    np.testing.assert_array_equal(found, expected)
    assert np.abs(expected - outputs(base, {"x": ROWS})[0]).max() > 1e-3


def test_dora_where_it_cannot_be() -> None:
    with pytest.raises(UnsupportedError, match=r"inside a branch .* dora=False"):
        lora.add(branches(), rank=2, dora=True)
    broken = lora.add(two_layers(), rank=2, dora=True)
    kept = [t for t in broken.graph.initializer if "magnitude" not in t.name]
    del broken.graph.initializer[:]
    broken.graph.initializer.extend(kept)
    for act in (lora.merge, trained_form):
        with pytest.raises(
            ModelError, match=r"its adapter has no '.*lora_magnitude_vector.weight'"
        ):
            act(broken)


@pytest.mark.nightly(2)
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "training"])
def test_curves_and_folders_are_those_of_peft(exporter: str, tmp_path: Path) -> None:
    """Linear layers with and without a bias, called twice, an embedding and a convolution."""
    import peft
    import torch
    from torch_exports import curves_beside_torch, every_layer, exported_by

    torch.manual_seed(0)
    module, x = every_layer(), torch.randint(0, 10, (4, 5))
    base = exported_by(copy.deepcopy(module), x, exporter)
    layers = ["emb", "fc", "twice", "conv", "head"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=layers, use_dora=True)
    wrapped = peft.get_peft_model(copy.deepcopy(module), config).eval()
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    assert len(trained) == 15
    with torch.no_grad():
        for each in trained:
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
    curves = curves_beside_torch(wrapped, trained, session, x)
    assert curves[0][-1] < 0.8 * curves[0][0]
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-5)
    lora.to_peft(session.inference_model(), tmp_path / "written")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path / "written").eval()
    with torch.no_grad():
        expected = wrapped(x).numpy()
        np.testing.assert_allclose(back(x).numpy(), expected, atol=1e-4)
    for each in (session.inference_model(), lora.merge(session.inference_model())):
        np.testing.assert_allclose(outputs(each, feeds)[0], expected, atol=1e-4)
