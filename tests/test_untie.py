"""Shared weights get copies: the same outputs, and gradients of every layer as in PyTorch."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import op
from ortops.surgery import untie


def tied() -> onnx.ModelProto:
    """Two layers with one bias of zeros, and one matrix in both."""
    with ortops.Tape(name="tied") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        weight = np.arange(9, dtype=np.float32).reshape(3, 3) / 9
        w = tape.initializer("w", weight)
        bias = tape.initializer("bias", np.zeros(3, np.float32))
        tape.output(op.Tanh(x @ w + bias) @ w + bias, "y")
    return tape.model()


def names_of(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer}


def test_copies_of_biases_are_trained_separately() -> None:
    before = tied()
    content = before.SerializeToString(deterministic=True)
    after = untie(before)
    assert before.SerializeToString(deterministic=True) == content
    assert names_of(after) == names_of(before) | {"bias.1"}
    rng = np.random.default_rng(0)
    x, targets = rng.standard_normal((2, 5, 3)).astype(np.float32)
    found = []
    for model in (before, after):
        trainable = ortops.build_training_model(model, loss="mse", optimizer="SGD")
        session = ortops.TrainingSession(trainable)
        found.append(
            (session.predict({"x": x})["y"], session.gradients({"x": x, "targets": targets}))
        )
    (y, together), (same, separate) = found
    np.testing.assert_array_equal(y, same)
    w = np.arange(9, dtype=np.float64).reshape(3, 3) / 9  # the formula in float64
    hidden = np.tanh(x.astype(np.float64) @ w)
    cotangent = 2 * (hidden @ w - targets) / targets.size
    inner = ((cotangent @ w.T) * (1 - hidden**2)).sum(0)
    np.testing.assert_allclose(separate["bias"], inner, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(separate["bias.1"], cotangent.sum(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(together["bias"], inner + cotangent.sum(0), rtol=1e-4, atol=1e-6)


def test_building_says_what_is_trained_as_one(caplog: pytest.LogCaptureFixture) -> None:
    ortops.build_training_model(tied(), loss="mse", optimizer="SGD")
    (said,) = [each for each in caplog.messages if "ortops.surgery.untie" in each]
    assert said.startswith("'bias' holds one number and is read by 2 nodes, such as Add node")
    caplog.clear()
    ortops.build_training_model(untie(tied()), loss="mse", optimizer="SGD")
    assert not [each for each in caplog.messages if "ortops.surgery.untie" in each]


def test_named_weights_are_untied() -> None:
    assert names_of(untie(tied(), ["w"])) == names_of(tied()) | {"w.1"}
    assert names_of(untie(tied(), "w")) == names_of(tied()) | {"w.1"}
    assert names_of(untie(untie(tied(), "w"))) == names_of(tied()) | {"w.1", "bias.1"}


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["bais"], ortops.ModelError, "no floating-point initializer 'bais'; did you mean 'bias'"),
        (3, ortops.ArgumentError, "names must be a list of names of initializers, got 3"),
        ([3], ortops.ArgumentError, "names must be names of initializers, got 3"),
    ],
)
def test_wrong_names(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        untie(tied(), names)


def test_weights_of_one_reader_and_trainable_files_are_refused() -> None:
    with pytest.raises(ortops.ModelError, match="fewer than two nodes read 'bias'"):
        untie(untie(tied()), ["bias"])
    with pytest.raises(ortops.ModelError, match="build again"):
        untie(ortops.build_training_model(tied(), loss="mse", optimizer="SGD"))


@pytest.mark.slow
@pytest.mark.torch
def test_a_fresh_export_has_the_gradients_of_torch() -> None:
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(
        *(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Tanh()),
        *(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)),
    ).eval()
    x, file = torch.randn(3, 4), io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporter warns about itself
        torch.onnx.export(
            module, (x,), file, dynamo=True, verbose=False, input_names=["x"], output_names=["y"]
        )
    model = onnx.load_from_string(file.getvalue())
    trainable = ortops.build_training_model(untie(model), loss="mse", optimizer="SGD")
    session = ortops.TrainingSession(trainable)
    assert len(session.parameters) == len(list(module.parameters()))
    targets = torch.randn(3, 4)
    found = session.gradients({"x": x.numpy(), "targets": targets.numpy()})
    torch.nn.functional.mse_loss(module(x), targets).backward()
    expected = [p.grad.numpy() for p in module.parameters() if p.grad is not None]
    for gradient in found.values():
        assert any(
            gradient.shape in (each.shape, each.T.shape)
            and (np.allclose(gradient, each, atol=1e-5) or np.allclose(gradient, each.T, atol=1e-5))
            for each in expected
        )
