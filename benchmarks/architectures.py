"""Architectures whose exported files are benchmarks: modules of transformers, and small ones.

Dropout has the ratio 0 everywhere, so that all peers compute the same.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "bert",
    "convnext",
    "efficientnet",
    "folded_mobilenet",
    "gpt2",
    "llama",
    "mobilenet",
    "resnet20",
    "speech",
    "unet",
    "vit",
]


def bert(attention: str) -> torch.nn.Module:
    """Returns a BERT of 6 layers, d 384, with 5 classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1907,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def gpt2(attention: str) -> torch.nn.Module:
    """Returns a GPT-2 of 6 layers, d 512, with a vocabulary of 8192."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=8192,
        n_positions=128,
        n_embd=512,
        n_layer=6,
        n_head=8,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config)


def llama(attention: str) -> torch.nn.Module:
    """Returns a Llama of 6 layers, d 384, with 6 heads that share 2 key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        use_cache=False,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def vit(attention: str) -> torch.nn.Module:
    """Returns a vision transformer of 6 layers, d 192, with patches of 16 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return ViTForImageClassification(config)


def convnext(attention: str) -> torch.nn.Module:
    """Returns a ConvNeXt of widths 48, 96, 192 and 384."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[48, 96, 192, 384], image_size=128, num_labels=10)
    return ConvNextForImageClassification(config)


def mobilenet(attention: str) -> torch.nn.Module:
    """Returns a MobileNetV2 with live batch normalization."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(num_labels=10, classifier_dropout_prob=0.0)
    return MobileNetV2ForImageClassification(config)


def folded_mobilenet(attention: str) -> torch.nn.Module:
    """Returns a MobileNetV2 with folded batch normalization; statistics are of noise."""
    import torch
    from torch.nn.utils import fusion

    network: Any = mobilenet(attention)
    noise = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.train()(noise)
    for layer in network.eval().modules():
        if getattr(layer, "normalization", None) is not None:
            layer.convolution = fusion.fuse_conv_bn_eval(layer.convolution, layer.normalization)
            layer.normalization = None
    return network  # type: ignore[no-any-return]  # transformers carries no type information


def efficientnet(attention: str) -> torch.nn.Module:
    """Returns an EfficientNet-B0, which ends in a pooling with a kernel of 1280 × 1280."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        image_size=128,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        num_labels=10,
    )
    return EfficientNetForImageClassification(config)


def resnet20(attention: str) -> torch.nn.Module:
    """Returns a ResNet-20 for images of 32 × 32, as in He et al., 2015 (arXiv:1512.03385)."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(outputs) for _ in range(2)])
            short = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)]
            self.short = nn.Sequential(*(short if stride > 1 else []))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.norms[0](self.first(x)))
            return torch.relu(self.norms[1](self.second(y)) + self.short(x))

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
            sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2
            sizes += [(32, 64, 2)] + [(64, 64, 1)] * 2
            head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
            self.layers = nn.Sequential(*stem, *(Block(*each) for each in sizes), *head)

        def forward(self, pixel_values: torch.Tensor) -> Any:
            return self.layers(pixel_values)

    return Network()


def unet(attention: str) -> torch.nn.Module:
    """Returns a U-Net of widths 16 to 128, with transposed convolutions and 6 classes."""
    import torch
    from torch import nn

    def double(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for size in (inputs, outputs):
            layers += [nn.Conv2d(size, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)]
            layers += [nn.ReLU()]
        return nn.Sequential(*layers)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = [16, 32, 64, 128]
            pairs = list(itertools.pairwise(sizes))
            self.down = nn.ModuleList([double(3, 16), *(double(a, b) for a, b in pairs)])
            self.wide = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
            self.up = nn.ModuleList(double(2 * a, a) for a, _ in pairs)
            self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(16, 6, 1)

        def forward(self, pixel_values: torch.Tensor) -> Any:
            kept = [self.down[0](pixel_values)]
            for block in list(self.down)[1:]:
                kept.append(block(self.pool(kept[-1])))
            y = kept.pop()
            for wide, block in zip(reversed(self.wide), reversed(self.up), strict=True):
                y = block(torch.cat([wide(y), kept.pop()], 1))
            return self.head(y)

    return Network()


def speech(attention: str) -> torch.nn.Module:
    """Returns a recognizer of frames: 2 convolutions and 2 bidirectional GRUs of d 128."""
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first, second = nn.Conv1d(80, 128, 3, 1, 1), nn.Conv1d(128, 128, 3, 1, 1)
            self.layers = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
            self.gru = nn.GRU(128, 128, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(256, 32)

        def forward(self, frames: torch.Tensor) -> Any:
            x = self.layers(frames.transpose(1, 2)).transpose(1, 2)
            return self.head(self.gru(x)[0])

    return Network()
