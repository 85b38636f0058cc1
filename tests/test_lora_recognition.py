"""Adapters that were exported unmerged are recognized, and what only looks like one is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_models import ROWS, built, normal, outputs, random_adapter, values

from ortops import ModelError, lora, op

HALF, ONES = np.float32(0.5), np.ones(2, np.float32)
WEIGHTS = {"w": normal(6, 5, seed=1), "a": normal(6, 2, seed=2), "b": normal(2, 5, seed=3)}


@pytest.mark.parametrize(
    "emit",
    [
        lambda x, w, a, b: x @ w + HALF * ((x @ a) @ b),
        lambda x, w, a, b: (op.Identity(x) @ a) @ b * HALF + (x @ w + np.ones(5, np.float32)),
    ],
    ids=["scaled", "in the other order, with a bias"],
)
def test_a_low_rank_product_beside_a_layer(emit: Any) -> None:
    given = built(ROWS, emit, **WEIGHTS)
    found = lora.recognize(given)
    (a, b) = (array for name, array in random_adapter(found).items())
    assert (a.shape, b.shape) == ((6, 2), (2, 5))
    expected = outputs(given, {"x": ROWS})[0]
    for each in (found, lora.merge(found), lora.recognize(given, layers="*w")):
        np.testing.assert_allclose(outputs(each, {"x": ROWS})[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "emit",
    [
        lambda x, w, a, b: x @ w + op.Relu(x @ a) @ b,
        lambda x, w, a, b: x @ w + (x @ a + ONES) @ b,
        lambda x, w, a, b: x @ w + ((x + HALF) @ a) @ b,
        lambda x, w, a, b: (lambda h: x @ w + h @ b + op.ReduceSum(h, np.array([1])))(x @ a),
    ],
    ids=["nonlinear", "bias", "another input", "read elsewhere"],
)
def test_other_bottlenecks_are_none(emit: Any) -> None:
    given = built(ROWS, emit, **WEIGHTS)
    with pytest.raises(ModelError, match="no layer has the form of an adapter"):
        lora.recognize(given)


def scaled(x: Any, w: Any, a: Any, b: Any, less: float = 1, bias: float = 0) -> Any:
    """An adapter with magnitudes, PEFT's form of DoRA: y + (g - 1) y + s g B A x."""
    g = np.linspace(0.5, 1.5, 5, dtype=np.float32)
    own = np.full(5, 0.3, np.float32)
    y = x @ w + own
    taken = y - np.float32(1 + bias) * own
    return y + ((g - np.float32(less)) * taken + g * ((x @ a) @ b) * HALF)


def test_an_adapter_with_magnitudes() -> None:
    given = built(ROWS, scaled, **WEIGHTS)
    found, expected = lora.recognize(given), outputs(given, {"x": ROWS})[0]
    whole = WEIGHTS["w"] + HALF * WEIGHTS["a"] @ WEIGHTS["b"]
    magnitude = values(found)["fc.w.lora_magnitude_vector.weight"]
    norms = np.linspace(0.5, 1.5, 5) * np.linalg.norm(whole, axis=0)
    np.testing.assert_allclose(magnitude, norms, rtol=1e-5)
    for each in (found, lora.merge(found)):
        np.testing.assert_allclose(outputs(each, {"x": ROWS})[0], expected, atol=1e-5)


@pytest.mark.parametrize("change", [{"less": 0.5}, {"bias": 0.1}], ids=["scale", "bias"])
def test_other_numbers_are_no_magnitudes(change: dict[str, float]) -> None:
    """What is left of an adapter beside others would silently be no part of it."""
    given = built(ROWS, lambda x, w, a, b: scaled(x, w, a, b, **change), **WEIGHTS)
    with pytest.raises(ModelError, match=r"form of an adapter with magnitudes .* \(layers=\)"):
        lora.recognize(given)


def test_an_unknown_form_with_magnitudes_is_refused() -> None:
    scale = np.linspace(0.5, 1.5, 5, dtype=np.float32)
    given = built(ROWS, lambda x, w, a, b: scale * (x @ w) - scale * ((x @ a) @ b), **WEIGHTS)
    with pytest.raises(ModelError, match=r"'fc.w' may have an adapter with magnitudes .*unknown"):
        lora.recognize(given)


def test_what_is_in_doubt_is_asked_for() -> None:
    wide = {"w": normal(6, 5, seed=1), "a": normal(6, 7, seed=2), "b": normal(7, 5, seed=3)}
    given = built(ROWS, lambda x, w, a, b: x @ w + (x @ a) @ b, **wide)
    with pytest.raises(ModelError, match=r"'fc.a' may be no A of an adapter .* \(layers=\)"):
        lora.recognize(given)
    found = lora.recognize(given, layers=["fc.w", "other"])
    expected = outputs(given, {"x": ROWS})[0]
    np.testing.assert_allclose(outputs(lora.merge(found), {"x": ROWS})[0], expected, atol=1e-4)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["plain", "DoRA"])
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript", "training"])
def test_unmerged_models_of_peft(exporter: str, dora: bool, tmp_path: Path) -> None:
    """Linear layers, one called twice, an embedding and a convolution."""
    import peft
    import torch
    from torch_exports import every_layer, exported_by

    torch.manual_seed(0)
    module, x = every_layer(), torch.randint(0, 10, (4, 5))
    layers = ["emb", "fc", "twice", "conv", "head"]
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=layers, lora_dropout=0.1, use_dora=dora
    )
    wrapped = peft.get_peft_model(copy.deepcopy(module), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(
                    torch.randn_like(parameter) / 2 + (0.8 if "magnitude" in name else 0)
                )
        expected = wrapped(x).numpy()
    model = exported_by(wrapped.base_model.model, x, exporter)
    found, feeds = lora.recognize(model), {"x": x.numpy()}
    kinds = ["A.weight", "B.weight", *["magnitude_vector.weight", "scale"] * dora]
    names = {name for name in random_adapter(found) if "lora_base" not in name}
    assert names == {f"{layer}.lora_{kind}" for layer in layers for kind in kinds}
    for each in (found, lora.merge(found)):
        np.testing.assert_allclose(outputs(each, feeds)[0], expected, atol=1e-5)
    lora.to_peft(found, tmp_path)
    lora.save_adapter(found, tmp_path / "a.onnx_adapter")
    back = peft.PeftModel.from_pretrained(copy.deepcopy(module), tmp_path).eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(x).numpy(), expected, atol=1e-5)
        merged = copy.deepcopy(back).merge_and_unload()(x).numpy()
    np.testing.assert_allclose(outputs(lora.merge(found), feeds)[0], merged, atol=1e-5)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_magnitudes_beside_float16(exporter: str) -> None:
    """PEFT computes with A, B and the magnitudes in float32, and rounds the sum."""
    import peft
    import torch
    from torch_exports import every_layer, exported_by

    torch.manual_seed(0)
    layers, x = ["fc", "twice", "head"], torch.randint(0, 10, (4, 5))
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=layers, use_dora=True)
    wrapped = peft.get_peft_model(every_layer().to(torch.float16), config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 4 + ("magnitude" in name))
        expected = wrapped(x).numpy()
    found = lora.recognize(exported_by(wrapped.base_model.model, x, exporter))
    for each in (found, lora.merge(found)):
        np.testing.assert_allclose(outputs(each, {"x": x.numpy()})[0], expected, atol=1e-3)
