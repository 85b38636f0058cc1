"""Interpolated position embeddings train, also where onnxruntime's optimizer breaks the Resize."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops.engine.check import check
from ortops.graph import faults


@pytest.fixture(params=[None, True], ids=["this version", "with the fault"])
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tests with this version of onnxruntime as it is, and as if it had the fault."""
    if request.param:
        monkeypatch.setattr(faults, "_is_present", lambda text: True)
    faults._say.cache_clear()
    return faults.FAULTS["cubic Resize"].is_present()


def model_of(mode: str) -> onnx.ModelProto:
    """Adds to x an embedding [1, 4, 4, 3] that is resized to [1, 6, 6, 3]."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        g (float[batch, 6, 6, 3] x) => (float[batch, 6, 6, 3] z)
        <int64[4] sizes = {{1, 3, 6, 6}}> {{
            t = Transpose <perm=[0,3,1,2]> (embedding)
            y = Resize <mode="{mode}", cubic_coeff_a=-0.75> (t, , , sizes)
            p = Transpose <perm=[0,2,3,1]> (y)
            z = Add (x, p)
        }}""")
    embedding = np.random.default_rng(0).standard_normal((1, 4, 4, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(embedding, "embedding"))
    return model


def trainable(model: onnx.ModelProto) -> onnx.ModelProto:
    return ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer="SGD", trainable=["embedding"]
    )


@pytest.mark.torch
def test_a_resized_embedding_has_the_gradients_of_torch(fault: bool) -> None:
    import torch

    model, rng = model_of("cubic"), np.random.default_rng(1)
    x, targets = rng.standard_normal((2, 2, 6, 6, 3)).astype(np.float32)
    own = ortops.TrainingSession(trainable(model))
    found = own.gradients({"x": x, "targets": targets})
    weight = torch.tensor(own.state["embedding"], requires_grad=True)
    resized = torch.nn.functional.interpolate(weight.permute(0, 3, 1, 2), (6, 6), mode="bicubic")
    prediction = torch.tensor(x) + resized.permute(0, 2, 3, 1)
    ((prediction - torch.tensor(targets)) ** 2).mean().backward()
    assert weight.grad is not None
    np.testing.assert_allclose(found["embedding"], weight.grad.numpy(), rtol=1e-4, atol=1e-6)
    own.step({"x": x, "targets": targets})
    with torch.no_grad():
        weight -= 0.01 * weight.grad
        resized = torch.nn.functional.interpolate(
            weight.permute(0, 3, 1, 2), (6, 6), mode="bicubic"
        )
    expected = x + resized.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(own.predict({"x": x}, outputs="z"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
def test_the_choice_is_logged_once_and_checked(
    fault: bool, caplog: pytest.LogCaptureFixture
) -> None:
    batch = {"x": np.ones((1, 6, 6, 3), np.float32), "targets": np.ones((1, 6, 6, 3), np.float32)}
    with caplog.at_level(logging.WARNING, "ortops"):
        for _ in range(2):
            own = ortops.TrainingSession(trainable(model_of("cubic")))
            own.step(batch)
            own.evaluate(batch)
    said = [each for each in caplog.messages if "breaks a cubic Resize" in each]
    assert len(said) == int(fault)
    assert [each for each in check(model_of("cubic")).said if "cubic" in each] == said
    assert not any("cubic" in each for each in check(model_of("linear")).said)


def test_other_models_are_not_affected(fault: bool) -> None:
    assert faults.disabled_optimizers(model_of("linear")) == []
    assert bool(faults.disabled_optimizers(model_of("cubic"))) == fault


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_a_vision_transformer_of_torch_trains(dynamo: bool, fault: bool) -> None:
    import torch

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = torch.nn.Parameter(torch.randn(1, 4, 4, 8))
            self.patches = torch.nn.Conv2d(3, 8, 4, 4)
            self.head = torch.nn.Linear(8, 3)

        def forward(self, images: Any) -> Any:
            patches = self.patches(images)
            grid, size = self.position.permute(0, 3, 1, 2), patches.shape[2:]
            position = torch.nn.functional.interpolate(grid, size=size, mode="bicubic")
            x = patches.permute(0, 2, 3, 1) + position.permute(0, 2, 3, 1)
            return self.head(torch.tanh(x).mean((1, 2)))

    torch.manual_seed(0)
    module, images = Embedded().eval(), torch.randn(2, 3, 24, 24)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["scores"]}
    if dynamo:  # of dynamic height and width, as constants are folded otherwise
        auto = torch.export.Dim.AUTO
        names["dynamic_shapes"] = ({0: auto, 2: auto, 3: auto},)
    else:
        names["dynamic_axes"] = {"images": {0: "batch", 2: "height", 3: "width"}}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        torch.onnx.export(module, (images,), file, dynamo=dynamo, verbose=False, **names)
    model = onnx.load_from_string(file.getvalue())
    own = ortops.TrainingSession(ortops.build_training_model(model, loss="ce", optimizer="SGD"))
    labels = np.array([0, 2])
    found = own.gradients({"images": images.numpy(), "labels": labels})
    torch.nn.functional.cross_entropy(module(images), torch.tensor(labels)).backward()
    (gradient,) = (each for each in found.values() if each.size == 128)
    if gradient.shape != (1, 4, 4, 8):  # the exporter folded the Transpose
        gradient = gradient.transpose(0, 2, 3, 1)
    expected = module.position.grad
    assert expected is not None
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-3, atol=1e-6)
