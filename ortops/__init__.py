"""Training on stock onnxruntime: the ONNX domain ai.onnx.preview.training, and a model builder."""

from ortops import optimizers
from ortops.autodiff import vjp
from ortops.custom_ops import register_custom_ops
from ortops.errors import FeedError, KernelError, ModelError, OrtopsError, UnsupportedError
from ortops.lower import lower
from ortops.session import InferenceSession
from ortops.tensor import Tape, Tensor, op
from ortops.training import TrainingSession, build_training_model, losses, metrics, step_graph

__all__ = [
    "FeedError",
    "InferenceSession",
    "KernelError",
    "ModelError",
    "OrtopsError",
    "Tape",
    "Tensor",
    "TrainingSession",
    "UnsupportedError",
    "build_training_model",
    "losses",
    "lower",
    "metrics",
    "op",
    "optimizers",
    "register_custom_ops",
    "step_graph",
    "vjp",
]
