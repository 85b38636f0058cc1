"""What PyTorch's exporters write of a module, for tests that compare the files."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from typing import Any

import onnx

EXPORTERS = ("dynamo", "torchscript", "training")
"""The newer exporter, the older one, and the older one for files that are to be trained."""


def exported(module: Any, given: Any, exporter: str) -> onnx.ModelProto:
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
