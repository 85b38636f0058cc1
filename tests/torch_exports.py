"""Modules of PyTorch as files of both of its exporters, with a dynamic batch."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import onnx


def exported(
    module: Any, inputs: dict[str, Any], *, dynamo: bool, outputs: tuple[str, ...] = ("y",)
) -> onnx.ModelProto:
    """Returns a module in training mode as a model, with its parameters as initializers.

    Args:
        module: The module.
        inputs: Its inputs by name, in the order of its arguments.
        dynamo: Whether PyTorch's newer exporter writes it.
        outputs: The names of its outputs.
    """
    import torch

    axes = {name: {0: "batch"} for name in inputs}
    settings: dict[str, Any] = {"input_names": [*inputs], "output_names": [*outputs]}
    if dynamo:
        settings |= {"dynamo": True, "optimize": False, "verbose": False}
        settings["dynamic_shapes"] = tuple(axes.values())
    else:
        training = torch.onnx.TrainingMode.TRAINING
        settings |= {"dynamo": False, "training": training, "do_constant_folding": False}
        settings["dynamic_axes"] = axes | {name: {0: "batch"} for name in outputs}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        program = torch.onnx.export(module.train(), tuple(inputs.values()), file, **settings)
    return onnx.load_from_string(file.getvalue()) if program is None else program.model_proto


EXPORTERS = ("dynamo", "torchscript", "training")
"""The newer exporter, the older one, and the older one for files that are to be trained."""


def quietly_exported(
    module: Any, inputs: Mapping[str, Any], *, exporter: str, axes: Mapping[int, str], output: str
) -> onnx.ModelProto:
    """Returns the file of a module whose inputs all have the same free axes.

    Args:
        module: The module.
        inputs: Its inputs by name, in the order of its arguments.
        exporter: One of `EXPORTERS`.
        axes: The names of the free axes.
        output: The name of its output.
    """
    import torch

    names: dict[str, Any] = {"input_names": [*inputs], "output_names": [output]}
    given, stream = tuple(inputs.values()), io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        if exporter == "dynamo":
            dims = {axis: torch.export.Dim(name) for axis, name in axes.items()}
            settings: dict[str, Any] = {"dynamo": True, "verbose": False}
            settings["dynamic_shapes"] = tuple(dims for _ in inputs)
            return torch.onnx.export(module, given, None, **names, **settings).model_proto
        mode = torch.onnx.TrainingMode.TRAINING
        settings = (
            {"training": mode, "do_constant_folding": False} if exporter == "training" else {}
        )
        free = {name: dict(axes) for name in (*inputs, output)}
        settings |= {"dynamo": False, "opset_version": 17, "dynamic_axes": free}
        torch.onnx.export(module, given, stream, **names, **settings)
    return onnx.load_from_string(stream.getvalue())


def exported_by(module: Any, given: Any, exporter: str) -> onnx.ModelProto:
    """Returns the file of a module of an input x with a free batch, and an output y."""
    return quietly_exported(module, {"x": given}, exporter=exporter, axes={0: "batch"}, output="y")


def every_layer() -> Any:
    """Returns a module of all layers that PEFT adapts, one of them called twice.

    Its input is 5 indices below 10 in each row, its output 3 numbers.
    """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.fc = nn.Embedding(10, 6), nn.Linear(6, 8)
            self.twice, self.conv = nn.Linear(8, 8, bias=False), nn.Conv1d(8, 4, 3, padding=1)
            self.head = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.twice(torch.tanh(self.twice(torch.tanh(self.fc(self.emb(x)))))))
            return self.head(torch.relu(self.conv(h.transpose(1, 2))).mean(-1))

    return Net().eval()


def curves_beside_torch(module: Any, trained: Any, session: Any, x: Any) -> list[list[float]]:
    """Returns the losses of 12 steps of Adam on random targets, in PyTorch and in a session.

    Args:
        module: The module.
        trained: Its parameters that are trained.
        session: A session of the same parameters, with mean squared errors and PyTorch's Adam.
        x: The input, 4 rows.
    """
    import torch

    optimizer, targets = torch.optim.Adam(trained, 0.02), torch.randn(4, 3)
    curves: list[list[float]] = [[], []]
    for _ in range(12):
        optimizer.zero_grad()
        loss = ((module(x) - targets) ** 2).mean()
        loss.backward()
        optimizer.step()
        curves[0].append(float(loss.detach()))
        step = session.step({"x": x.numpy(), "targets": targets.numpy()})
        curves[1].append(float(step["loss"]))
    return curves
