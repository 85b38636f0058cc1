"""ONNX backends (`onnx.backend.base.Backend`) of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.reference import ReferenceEvaluator

from ortops.reference.traced import Array
from ortops.reference.training import OPS, Evaluator, TrainingEvaluator


class _Rep(BackendRep):
    def __init__(self, evaluator: ReferenceEvaluator) -> None:
        self._evaluator = evaluator

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> tuple[Any, ...]:
        """Returns the outputs, in order."""
        feeds = dict(zip(self._evaluator.input_names, inputs, strict=True))
        return tuple(self._evaluator.run(None, feeds))


class NewOps(Backend):
    """ONNX's ReferenceEvaluator with ``new_ops=OPS``."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in a ReferenceEvaluator."""
        return _Rep(ReferenceEvaluator(model, new_ops=OPS))


class Reference(Backend):
    """`Evaluator`, and `TrainingEvaluator` for models with ``training_info``."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in an Evaluator."""
        return _Rep(Evaluator(model))

    @classmethod
    def prepare_training(cls, model: onnx.ModelProto, device: str = "CPU") -> TrainingEvaluator:
        """Returns the model in a TrainingEvaluator."""
        return TrainingEvaluator(model)
