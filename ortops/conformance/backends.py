"""Backends that the suite runs on: runtimes that know nothing of ortops.

A runtime is imported when a model is prepared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.reference import ReferenceEvaluator

from ortops.conformance.case import Array

__all__ = ["OnnxRuntime", "Reference", "Tinygrad"]


class _Rep(BackendRep):
    """A model whose inputs and outputs are lists."""

    def __init__(self, model: onnx.ModelProto, execute: Callable[[dict[str, Any]], Any]) -> None:
        self._inputs = [value.name for value in model.graph.input]
        self._execute = execute

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> tuple[Any, ...]:
        """Returns the outputs."""
        return tuple(self._execute(dict(zip(self._inputs, inputs, strict=True))))


class Reference(Backend):
    """ONNX's reference evaluator as it comes.

    Example:
        >>> from ortops.conformance import cases
        >>> case = next(iter(cases()))
        >>> inputs = list(case.runs[0].inputs.values())
        >>> [array.shape for array in Reference.prepare(case.model).run(inputs)]
        [(2, 3), (2, 3)]
    """

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in an evaluator."""
        evaluator = ReferenceEvaluator(model)
        return _Rep(model, lambda feeds: evaluator.run(None, feeds))


class OnnxRuntime(Backend):
    """onnxruntime as it comes, on the CPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in a session."""
        onnxruntime = importlib.import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return _Rep(model, lambda feeds: session.run(None, feeds))


class Tinygrad(Backend):
    """tinygrad's front end for ONNX. On the CPU, tinygrad needs clang."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in tinygrad's runner."""
        tensor = importlib.import_module("tinygrad").Tensor
        runner = importlib.import_module("tinygrad.nn.onnx").OnnxRunner
        data = np.frombuffer(model.SerializeToString(), np.uint8)
        execute = runner(tensor(data.copy()).to(None))
        names = [value.name for value in model.graph.output]

        def run(feeds: dict[str, Any]) -> list[Array]:
            found = execute({name: tensor(value) for name, value in feeds.items()})
            return [found[name].numpy() for name in names]

        return _Rep(model, run)
