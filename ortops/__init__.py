"""Training on stock onnxruntime: the ONNX domain ai.onnx.preview.training, and a model builder."""

from ortops.autodiff import vjp
from ortops.errors import FeedError, KernelError, ModelError, OrtopsError, UnsupportedError
from ortops.lower import lower
from ortops.tensor import Tape, Tensor, op

__all__ = [
    "FeedError",
    "KernelError",
    "ModelError",
    "OrtopsError",
    "Tape",
    "Tensor",
    "UnsupportedError",
    "lower",
    "op",
    "vjp",
]
