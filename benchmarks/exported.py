"""Architectures of the package transformers, and the files that PyTorch's exporters write.

Models are exported in evaluation mode: without dropout, and with batch normalization folded into
convolutions, as both exporters do. All peers train the same parameters.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.task import Array

if TYPE_CHECKING:
    import torch

__all__ = ["EXPORTERS", "NETWORKS", "Network", "export", "initial_weights", "module"]

EXPORTERS = ("TorchScript", "dynamo")


@dataclass(frozen=True)
class Network:
    """A network and its inputs.

    Attributes:
        build: Creates the module of transformers, given an implementation of attention.
        input: The name of its input.
        sample: The shape of the input, without the batch.
        ids: The number of token ids; 0 if samples are floats.
        classes: The number of logits.
        labels: The shape of a sample's labels.
    """

    build: Callable[[str], torch.nn.Module]
    input: str
    sample: tuple[int, ...]
    ids: int
    classes: int
    labels: tuple[int, ...] = ()

    def batch(self, rng: np.random.Generator, size: int) -> dict[str, Array]:
        """Returns a batch of random samples and labels."""
        shape = (size, *self.sample)
        samples = rng.integers(self.ids, size=shape) if self.ids else rng.standard_normal(shape)
        dtype = np.int64 if self.ids else np.float32
        labels = rng.integers(self.classes, size=(size, *self.labels))
        return {self.input: samples.astype(dtype), "labels": labels}


def _bert(attention: str) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1907,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=5,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def _gpt2(attention: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192,
        n_positions=128,
        n_embd=512,
        n_layer=6,
        n_head=8,
        use_cache=False,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config)


def _mobilenet(attention: str) -> torch.nn.Module:
    """Returns the network with folded batch normalization; statistics are those of noise."""
    import torch
    from torch.nn.utils import fusion
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    network = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=10))
    noise = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.train()(noise)
    for layer in network.eval().modules():
        if getattr(layer, "normalization", None) is not None:
            layer.convolution = fusion.fuse_conv_bn_eval(layer.convolution, layer.normalization)
            layer.normalization = None
    return network


NETWORKS: Mapping[str, Network] = {
    "bert": Network(_bert, "input_ids", (64,), 1907, 5),
    "mobilenet": Network(_mobilenet, "pixel_values", (3, 224, 224), 0, 10),
    "gpt2": Network(_gpt2, "input_ids", (128,), 8192, 8192, (128,)),
}
"""The networks by name."""


def _made(name: str, attention: str) -> torch.nn.Module:
    """Returns a module that maps the input to logits, with random weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    network = NETWORKS[name]
    inner = network.build(attention).eval()
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
            return self.inner(**{network.input: samples}).logits

    return Logits()


def initial_weights(name: str) -> dict[str, Array]:
    """Returns the initial weights of a network in `NETWORKS`, by the names of its module.

    A tied weight, for example of embedding and classifier, is listed under both names.
    """
    return {key: each.numpy().copy() for key, each in _made(name, "eager").state_dict().items()}


def module(name: str, weights: Mapping[str, Array]) -> torch.nn.Module:
    """Returns the module of a network with these weights, in evaluation mode.

    Attention is PyTorch's scaled_dot_product_attention, the default of transformers.
    """
    import torch

    made = _made(name, "sdpa")
    made.load_state_dict({key: torch.from_numpy(array) for key, array in weights.items()})
    return made


def export(name: str, exporter: str, path: Path) -> None:
    """Exports an inference model with a dynamic batch size.

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
    else:
        dynamic = ({0: torch.export.Dim("batch")},)
        settings |= {"dynamo": True, "dynamic_shapes": dynamic, "external_data": False}
        settings |= {"verbose": False}
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
