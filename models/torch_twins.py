"""The models of models/ built from PyTorch's own modules, with the same weights by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import onnx
from onnx import numpy_helper

if TYPE_CHECKING:
    import torch


def twin(model: onnx.ModelProto, *, heads: int = 4, dropout: float = 0.0) -> torch.nn.Module:
    """Builds the PyTorch module that computes what a model of models/ computes.

    Sizes are read off the shapes of the initializers, whose values become the module's; the names
    of parameters and buffers are the initializers'.

    Args:
        model: What mlp(), lenet(), resnet() or transformer() returned, perhaps trained since.
        heads: The transformer's number of attention heads, which no shape tells.
        dropout: The dropout ratio of training mode.

    Returns:
        A module in evaluation mode, from the model's input to its logits.
    """
    import torch

    weights = {
        tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy())
        for tensor in model.graph.initializer
    }
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if model.graph.name == "transformer":
        ids = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
        module = _transformer(shapes, heads, dropout, ids)
    else:
        module = {"mlp": _mlp, "lenet": _lenet, "resnet": _resnet}[model.graph.name](
            shapes, dropout
        )
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing), missing
    return module.eval()


Shapes = dict[str, tuple[int, ...]]


def _count(shapes: Shapes, pattern: str) -> int:
    """How many different layers match a pattern with one group."""
    return len({found[1] for name in shapes if (found := re.match(pattern, name))})


def _mlp(shapes: Shapes, dropout: float) -> torch.nn.Module:
    import torch
    from torch import nn

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.depth = _count(shapes, r"fc(\d+)\.weight")
            for number in range(1, self.depth + 1):
                outputs, inputs = shapes[f"fc{number}.weight"]
                setattr(self, f"fc{number}", nn.Linear(inputs, outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(1, self.depth):
                x = torch.relu(getattr(self, f"fc{number}")(x))
            return getattr(self, f"fc{self.depth}")(x)

    return Mlp()


def _lenet(shapes: Shapes, dropout: float) -> torch.nn.Module:
    import torch
    from torch import nn

    class LeNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = _count(shapes, r"conv(\d+)\.weight")
            for number in range(1, self.convolutions + 1):
                outputs, inputs = shapes[f"conv{number}.weight"][:2]
                setattr(self, f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1))
            self.fc1 = nn.Linear(*reversed(shapes["fc1.weight"]))
            self.fc2 = nn.Linear(*reversed(shapes["fc2.weight"]))
            self.dropout = nn.Dropout(dropout)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number in range(1, self.convolutions + 1):
                x = torch.relu(getattr(self, f"conv{number}")(x))
                x = torch.max_pool2d(x, 2)
            x = torch.relu(self.fc1(self.dropout(x.flatten(1))))
            return self.fc2(self.dropout(x))

    return LeNet()


def _resnet(shapes: Shapes, dropout: float) -> torch.nn.Module:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, prefix: str, stride: int) -> None:
            super().__init__()
            outputs, inputs = shapes[f"{prefix}.conv1.weight"][:2]
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            self.downsample = nn.Sequential()
            if f"{prefix}.downsample.0.weight" in shapes:
                self.downsample.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
                self.downsample.append(nn.BatchNorm2d(outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, channels = shapes["conv1.weight"][:2]
            self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.stages = _count(shapes, r"layer(\d+)\.")
            for stage in range(1, self.stages + 1):
                blocks = nn.Sequential()
                for index in range(_count(shapes, rf"layer{stage}\.(\d+)\.")):
                    stride = 2 if stage > 1 and index == 0 else 1
                    blocks.append(Block(f"layer{stage}.{index}", stride))
                setattr(self, f"layer{stage}", blocks)
            self.fc = nn.Linear(*reversed(shapes["fc.weight"]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.bn1(self.conv1(x)))
            for stage in range(1, self.stages + 1):
                x = getattr(self, f"layer{stage}")(x)
            return self.fc(x.mean((2, 3)))

    return ResNet()


def _transformer(shapes: Shapes, heads: int, dropout: float, ids: bool) -> torch.nn.Module:
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            length, width = shapes["positions.weight"]
            self.embedding: Any = (
                nn.Embedding(shapes["embedding.weight"][0], width)
                if ids
                else nn.Linear(shapes["embedding.weight"][1], width)
            )
            self.positions = nn.Embedding(length, width)
            self.dropout = nn.Dropout(dropout)
            layer = nn.TransformerEncoderLayer(
                width,
                heads,
                shapes["encoder.layers.0.linear1.weight"][0],
                dropout,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            self.encoder = nn.TransformerEncoder(
                layer,
                _count(shapes, r"encoder\.layers\.(\d+)\."),
                norm=nn.LayerNorm(width),
                enable_nested_tensor=False,
            )
            self.classifier = nn.Linear(width, shapes["classifier.weight"][0])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
            return self.classifier(self.encoder(self.dropout(x)).mean(1))

    return Transformer()
