"""Networks and the files that PyTorch's exporters write of them.

Most files are as a shipped model is fine-tuned: exported in evaluation mode, without dropout, and
with batch normalization folded into convolutions. The others are exported in training mode, without
any optimization by the exporter: batch normalization is live, and dropouts of ratio 0 are nodes.
All peers train the same parameters.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import architectures
from benchmarks.task import Array

if TYPE_CHECKING:
    import torch

__all__ = ["EXPORTERS", "NETWORKS", "Network", "export", "initial_weights", "module"]

EXPORTERS = ("TorchScript", "dynamo")


@dataclass(frozen=True)
class Network:
    """A network and its inputs.

    Attributes:
        build: Creates the module, given an implementation of attention for transformers.
        input: The name of its input, an argument of the module.
        sample: The shape of the input, without the batch.
        ids: The number of token ids; 0 if samples are floats.
        classes: The number of logits.
        labels: The shape of a sample's labels.
        axis: The axis of the classes.
        training: Whether the module is in training mode, and the exporter optimizes nothing.
    """

    build: Callable[[str], torch.nn.Module]
    input: str
    sample: tuple[int, ...]
    ids: int
    classes: int
    labels: tuple[int, ...] = ()
    axis: int = -1
    training: bool = False

    def batch(self, rng: np.random.Generator, size: int) -> dict[str, Array]:
        """Returns a batch of random samples and labels."""
        shape = (size, *self.sample)
        samples = rng.integers(self.ids, size=shape) if self.ids else rng.standard_normal(shape)
        dtype = np.int64 if self.ids else np.float32
        labels = rng.integers(self.classes, size=(size, *self.labels))
        return {self.input: samples.astype(dtype), "labels": labels}


_PIXELS, _IDS = "pixel_values", "input_ids"
_TRAINED: Mapping[str, Network] = {
    "bert": Network(architectures.bert, _IDS, (64,), 1907, 5),
    "convnext": Network(architectures.convnext, _PIXELS, (3, 128, 128), 0, 10),
    "efficientnet": Network(architectures.efficientnet, _PIXELS, (3, 128, 128), 0, 10),
    "gpt2": Network(architectures.gpt2, _IDS, (128,), 8192, 8192, (128,)),
    "llama": Network(architectures.llama, _IDS, (256,), 8192, 8192, (256,)),
    "mobilenet": Network(architectures.mobilenet, _PIXELS, (3, 224, 224), 0, 10),
    "resnet20": Network(architectures.resnet20, _PIXELS, (3, 32, 32), 0, 10),
    "speech": Network(architectures.speech, "frames", (200, 80), 0, 32, (200,)),
    "unet": Network(architectures.unet, _PIXELS, (3, 96, 96), 0, 6, (96, 96), axis=1),
    "vit": Network(architectures.vit, _PIXELS, (3, 224, 224), 0, 10),
}

NETWORKS: Mapping[str, Network] = {
    "bert": _TRAINED["bert"],
    "mobilenet": replace(_TRAINED["mobilenet"], build=architectures.folded_mobilenet),
    "gpt2": _TRAINED["gpt2"],
    **{f"{name} in training mode": replace(each, training=True) for name, each in _TRAINED.items()},
}
"""The networks by name."""


def _made(name: str, attention: str) -> torch.nn.Module:
    """Returns a module that maps the input to logits, with random weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    network = NETWORKS[name]
    inner = network.build(attention).train(network.training)
    inner.requires_grad_(True)  # also biases created by folding
    with torch.no_grad():  # different values, because exporters merge identical parameters
        for parameter in inner.parameters():
            if parameter.ndim == 1:
                parameter += 0.02 * torch.randn_like(parameter)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, samples: torch.Tensor) -> Any:
            outputs = self.inner(**{network.input: samples})
            return getattr(outputs, "logits", outputs)

    return Logits().train(network.training)


def initial_weights(name: str) -> dict[str, Array]:
    """Returns the initial weights of a network in `NETWORKS`, by the names of its module.

    A tied weight, for example of embedding and classifier, is listed under both names.
    """
    return {key: each.numpy().copy() for key, each in _made(name, "eager").state_dict().items()}


def module(name: str, weights: Mapping[str, Array]) -> torch.nn.Module:
    """Returns the module of a network with these weights, in the mode of the network.

    Attention is PyTorch's scaled_dot_product_attention, the default of transformers.
    """
    import torch

    made = _made(name, "sdpa")
    made.load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})
    return made


def export(name: str, exporter: str, path: Path) -> None:
    """Exports a model with a dynamic batch size.

    Args:
        name: A network in `NETWORKS`.
        exporter: An exporter in `EXPORTERS`.
        path: The file.
    """
    import torch

    network = NETWORKS[name]
    samples = torch.from_numpy(network.batch(np.random.default_rng(0), 4)[network.input])
    settings: dict[str, Any] = {"input_names": [network.input], "output_names": ["logits"]}
    if exporter == "TorchScript":
        axes = {network.input: {0: "batch"}, "logits": {0: "batch"}}
        settings |= {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
        if network.training:
            mode = torch.onnx.TrainingMode.TRAINING
            settings |= {"training": mode, "do_constant_folding": False}
    else:
        dynamic = ({0: torch.export.Dim("batch")},)
        settings |= {"dynamo": True, "dynamic_shapes": dynamic, "external_data": False}
        settings |= {"verbose": False, "optimize": not network.training}
    made = _made(name, "eager")
    with _silence():
        torch.onnx.export(made, (samples,), str(path), **settings)


@contextlib.contextmanager
def _silence() -> Any:
    """Suppresses the exporters' warnings."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
