"""Heads of YOLOv8's type, as PyTorch's exporters write them."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import TrainingSession, build_training_model
from ortops.engine.check import check
from ortops.losses import TaskAligned


def network() -> Any:
    """Two convolutions, and a head that predicts 3 classes at 64 + 16 points of 64 · 64 pixels."""
    import torch
    from torch import nn

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList([nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 12, 2, 2)])
            self.boxes = nn.ModuleList(nn.Conv2d(channels, 64, 1) for channels in (8, 12))
            self.classes = nn.ModuleList(nn.Conv2d(channels, 3, 1) for channels in (8, 12))
            self.expected = nn.Conv2d(16, 1, 1, bias=False).requires_grad_(False)
            self.expected.weight.data[:] = torch.arange(16.0)[None, :, None, None]

        def forward(self, x: Any) -> Any:
            grids, points, strides = [], [], []
            for number, level in enumerate(self.levels):
                x = torch.nn.functional.silu(level(x))
                found = torch.cat([self.boxes[number](x), self.classes[number](x)], 1)
                grids.append(found.flatten(2))
                sizes = [torch.arange(size) + 0.5 for size in x.shape[2:]]
                rows, columns = torch.meshgrid(*sizes, indexing="ij")
                points.append(torch.stack([columns, rows]).flatten(1))
                strides.append(torch.full((1, rows.numel()), 8.0 * 2**number))
            boxes, classes = torch.cat(grids, 2).split((64, 3), 1)
            shares = boxes.view(boxes.shape[0], 4, 16, -1).transpose(2, 1).softmax(1)
            low, high = self.expected(shares).squeeze(1).chunk(2, 1)
            middle = torch.cat(points, 1).unsqueeze(0)
            low, high = middle - low, middle + high
            joined = torch.cat([(low + high) / 2, high - low], 1) * torch.cat(strides, 1)
            return torch.cat([joined, classes.sigmoid()], 1)

    torch.manual_seed(0)
    return Detector().eval()


def exported(dynamo: bool) -> onnx.ModelProto:
    import torch

    settings: dict[str, Any] = {"dynamic_axes": {"images": {0: "batch"}}, "opset_version": 17}
    if dynamo:
        settings = {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        result = torch.onnx.export(
            *(network(), (torch.zeros(2, 3, 64, 64),), file),
            input_names=["images"],
            output_names=["output0"],
            dynamo=dynamo,
            **settings,
        )
    return onnx.load_from_string(file.getvalue()) if result is None else result.model_proto


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("onnxscript", "export")
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_detector_of_pytorch(dynamo: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its logits are found, its layers are trained, and what computes boxes is not."""
    model, loss = exported(dynamo), TaskAligned(strides=[8, 16], image_size=64)
    layers = {name for name, p in network().named_parameters() if p.requires_grad}
    report = check(model, loss=loss)
    assert set(report.parameters) == layers
    assert "holds equally spaced numbers" in report.reasons["expected.weight"]
    session = TrainingSession(
        build_training_model(model, loss=loss, optimizer=ortops.optimizers.Adam(0.01))
    )
    assert "the logits before Sigmoid node" in caplog.text
    rng = np.random.default_rng(0)
    targets = np.zeros((4, 3, 5), np.float32)
    targets[:, 0], targets[:2, 1] = [1, 30, 30, 20, 24], [2, 10, 40, 18, 18]
    images = rng.normal(size=(4, 3, 64, 64)).astype(np.float32)
    data = {"images": images, "targets": targets}
    before = session.evaluate(data)["loss"]
    session.fit(data, epochs=60, batch_size=4, progress=False)
    found = session.evaluate(data, metrics=["mean_average_precision"])
    assert found["loss"] < before / 5
    assert found["mean_average_precision"] > 0.2
