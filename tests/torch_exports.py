"""Modules of PyTorch as files of both of its exporters, with a dynamic batch."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
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


def exported_by(module: Any, given: Any, exporter: str) -> onnx.ModelProto:
    """Returns the file of a module of an input x with a free batch, and an output y."""
    import torch

    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    stream = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        if exporter == "dynamo":
            free = ({0: torch.export.Dim("batch")},)
            settings: dict[str, Any] = {"dynamo": True, "verbose": False, "dynamic_shapes": free}
            return torch.onnx.export(module, (given,), None, **names, **settings).model_proto
        mode = torch.onnx.TrainingMode.TRAINING
        settings = (
            {"training": mode, "do_constant_folding": False} if exporter == "training" else {}
        )
        settings |= {"dynamo": False, "opset_version": 17, "dynamic_axes": {"x": {0: "batch"}}}
        torch.onnx.export(module, (given,), stream, **names, **settings)
    return onnx.load_from_string(stream.getvalue())
