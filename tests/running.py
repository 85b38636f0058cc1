"""How tests run a model: by stock onnxruntime on the CPU, with no library of operators.

Sessions that have a library, or options of their own, are opened where these are what is tested.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as errors

CPU = ["CPUExecutionProvider"]

REFUSALS = (
    errors.Fail,
    errors.InvalidArgument,
    errors.InvalidGraph,
    errors.NotImplemented,
    errors.RuntimeException,
)
"""What onnxruntime raises for a model or a feed that it does not take; they share no class."""

Model = onnx.ModelProto | bytes | str | os.PathLike[str]


def plain_session(
    model: Model, *, optimize: bool = True, **options: Any
) -> onnxruntime.InferenceSession:
    """Opens a session that logs errors only, and has one thread: models of tests are small.

    Args:
        model: A model, its bytes or its file.
        optimize: Whether onnxruntime may rewrite the graph.
        **options: Attributes of onnxruntime's SessionOptions.
    """
    settings = onnxruntime.SessionOptions()
    if not optimize:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for name, value in {"log_severity_level": 3, "intra_op_num_threads": 1, **options}.items():
        setattr(settings, name, value)
    given = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return onnxruntime.InferenceSession(given, settings, providers=CPU)


def run_session(
    session: onnxruntime.InferenceSession,
    feeds: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
) -> list[Any]:
    """Runs an open session.

    Args:
        session: The session.
        feeds: Arrays by name; those that the model does not take are left out.
        outputs: Names of the outputs to return, all in the model's order if None.

    Returns:
        The outputs, in order.
    """
    # Copies: onnxruntime's BatchNormalization in training mode writes over what is fed.
    given = {v.name: np.array(feeds[v.name]) for v in session.get_inputs() if v.name in feeds}
    return list(session.run(outputs, given))


def run(
    model: Model,
    feeds: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    *,
    optimize: bool = True,
) -> list[Any]:
    """Runs a model once; see `plain_session` and `run_session`."""
    return run_session(plain_session(model, optimize=optimize), feeds, outputs)


def run_by_name(model: Model, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a model once and returns all its outputs by name."""
    session = plain_session(model)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, run_session(session, feeds, names), strict=True))


def optimized(model: Model, path: Path) -> onnx.ModelProto:
    """Returns a model as onnxruntime saves it, to a path, after its extended optimizations."""
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # It warns that the file is for machines of this kind.
    plain_session(
        model,
        log_severity_level=4,
        graph_optimization_level=level,
        optimized_model_filepath=str(path),
    )
    return onnx.load(path)
