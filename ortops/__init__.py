"""Training on stock onnxruntime: the ONNX domain ai.onnx.preview.training, and a model builder.

A name is imported when it is first used, so that a program pays only for what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ortops._common.delayed_imports import delay_signals, delay_sympy
from ortops._common.garbage_collection import pause_collection

if TYPE_CHECKING:
    from ortops import (
        attribution,
        callbacks,
        data,
        derivatives,
        distributed,
        llm,
        lora,
        losses,
        metrics,
        optimizers,
        reference,
        schedules,
        surgery,
        weights,
    )
    from ortops import (
        sklearn as sklearn,  # not in __all__: it needs scikit-learn
    )
    from ortops.callbacks.rate_finder import find_learning_rate
    from ortops.derivatives.function import Function
    from ortops.engine.building.addition import add_training
    from ortops.engine.building.builder import build_training_file, build_training_model
    from ortops.engine.composition.composing import compose
    from ortops.engine.composition.splitting import split
    from ortops.engine.custom_ops import register_custom_ops
    from ortops.engine.inference import InferenceSession
    from ortops.engine.lowering import lower
    from ortops.engine.trainable.step_graph import step_graph
    from ortops.engine.training.batch_size import find_batch_size
    from ortops.engine.training.export import export_step
    from ortops.engine.training.session import TrainingSession
    from ortops.errors import (
        ArgumentError,
        DivergedError,
        FeedError,
        KernelError,
        ModelError,
        OrtopsError,
        UnsupportedError,
    )
    from ortops.graph.autodiff.grad import grad
    from ortops.graph.autodiff.registry import vjp
    from ortops.graph.files.saving import save_model
    from ortops.graph.tensor import Tape, Tensor, op

__version__ = "0.1.0"

delay_sympy()
delay_signals()

__all__ = [
    "ArgumentError",
    "DivergedError",
    "FeedError",
    "Function",
    "InferenceSession",
    "KernelError",
    "ModelError",
    "OrtopsError",
    "Tape",
    "Tensor",
    "TrainingSession",
    "UnsupportedError",
    "add_training",
    "attribution",
    "build_training_file",
    "build_training_model",
    "callbacks",
    "compose",
    "data",
    "derivatives",
    "distributed",
    "export_step",
    "find_batch_size",
    "find_learning_rate",
    "grad",
    "llm",
    "lora",
    "losses",
    "lower",
    "metrics",
    "op",
    "optimizers",
    "reference",
    "register_custom_ops",
    "save_model",
    "schedules",
    "split",
    "step_graph",
    "surgery",
    "vjp",
    "weights",
]

_MODULES = {
    "ArgumentError": "ortops.errors",
    "DivergedError": "ortops.errors",
    "FeedError": "ortops.errors",
    "Function": "ortops.derivatives.function",
    "InferenceSession": "ortops.engine.inference",
    "KernelError": "ortops.errors",
    "ModelError": "ortops.errors",
    "OrtopsError": "ortops.errors",
    "Tape": "ortops.graph.tensor",
    "Tensor": "ortops.graph.tensor",
    "TrainingSession": "ortops.engine.training.session",
    "UnsupportedError": "ortops.errors",
    "attribution": "ortops",
    "add_training": "ortops.engine.building.addition",
    "build_training_file": "ortops.engine.building.builder",
    "build_training_model": "ortops.engine.building.builder",
    "callbacks": "ortops",
    "compose": "ortops.engine.composition.composing",
    "data": "ortops",
    "derivatives": "ortops",
    "distributed": "ortops",
    "export_step": "ortops.engine.training.export",
    "find_batch_size": "ortops.engine.training.batch_size",
    "find_learning_rate": "ortops.callbacks.rate_finder",
    "grad": "ortops.graph.autodiff.grad",
    "llm": "ortops",
    "lora": "ortops",
    "losses": "ortops",
    "lower": "ortops.engine.lowering",
    "metrics": "ortops",
    "op": "ortops.graph.tensor",
    "optimizers": "ortops",
    "reference": "ortops",
    "register_custom_ops": "ortops.engine.custom_ops",
    "save_model": "ortops.graph.files.saving",
    "schedules": "ortops",
    "sklearn": "ortops",
    "split": "ortops.engine.composition.splitting",
    "step_graph": "ortops.engine.trainable.step_graph",
    "surgery": "ortops",
    "vjp": "ortops.graph.autodiff.registry",
    "weights": "ortops",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ortops' has no attribute {name!r}")
    module = _MODULES[name]
    with pause_collection(stays=True):
        if module == "ortops":  # a submodule
            return importlib.import_module(f"ortops.{name}")
        found: Any = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
