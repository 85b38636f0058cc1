"""The models of models/ built from PyTorch modules, with the same weights by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx
    import torch


def twin(model: onnx.ModelProto, *, heads: int = 4, dropout: float = 0.0) -> torch.nn.Module:
    """Builds the PyTorch module that is equivalent to a model of models/.

    Args:
        model: A model from mlp(), lenet(), resnet(), transformer() or lstm(), trained or not.
        heads: The transformer's number of attention heads, which shapes do not show.
        dropout: The dropout ratio of training mode.

    Returns:
        A module in evaluation mode, from the model's input to its logits.
    """
    import onnx

    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer
    }
    ids = model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.INT64
    return module(model.graph.name, weights, heads=heads, dropout=dropout, ids=ids)


def module(
    name: str,
    weights: Mapping[str, npt.NDArray[np.float32]],
    *,
    heads: int = 4,
    dropout: float = 0.0,
    ids: bool = False,
) -> torch.nn.Module:
    """Builds a PyTorch module from the weights of a model of models/.

    Sizes are inferred from the shapes of the weights. Parameters and buffers have the values and
    names of the weights, except for an LSTM (see `lstm_parameters`).

    Args:
        name: The function in models/ that created the weights.
        weights: The initializers by name; they are copied.
        heads: The transformer's number of attention heads, which shapes do not show.
        dropout: The dropout ratio of training mode.
        ids: Whether the transformer's tokens are ids.

    Returns:
        A module in evaluation mode, from the model's input to its logits.
    """
    import torch

    if name == "lstm":
        weights = lstm_parameters(weights)
    tensors = {each: torch.tensor(weight) for each, weight in weights.items()}
    shapes = {each: tuple(tensor.shape) for each, tensor in tensors.items()}
    if name == "transformer":
        built = _transformer(shapes, heads, dropout, ids)
    else:
        makers = {"mlp": _mlp, "lenet": _lenet, "resnet": _resnet, "lstm": _lstm}
        built = makers[name](shapes, dropout)
    missing, unexpected = built.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(each.endswith("num_batches_tracked") for each in missing), missing
    return built.eval()


def lstm_parameters(
    weights: Mapping[str, npt.NDArray[np.float32]],
) -> dict[str, npt.NDArray[np.float32]]:
    """Returns weights or gradients, with PyTorch's names and layout for the LSTM's.

    Args:
        weights: By name, as in lstm(): ``lstm.W``, ``lstm.R`` and ``lstm.B`` have the gates in
            the order input, output, forget, cell.

    Returns:
        ``lstm.weight_ih_l0``, ``lstm.weight_hh_l0``, ``lstm.bias_ih_l0`` and ``lstm.bias_hh_l0``
        with the gates in the order input, forget, cell, output; all others are unchanged.
    """
    import numpy as np

    result = dict(weights)
    of_inputs, of_states = np.split(result.pop("lstm.B")[0], 2)
    laid_out = {
        "weight_ih": result.pop("lstm.W")[0],
        "weight_hh": result.pop("lstm.R")[0],
        "bias_ih": of_inputs,
        "bias_hh": of_states,
    }
    for name, array in laid_out.items():
        i, o, f, c = np.split(array, 4)
        result[f"lstm.{name}_l0"] = np.concatenate([i, f, c, o])
    return result


Shapes = dict[str, tuple[int, ...]]


def _count(shapes: Shapes, pattern: str) -> int:
    """Returns the number of different layers that match a pattern with one group."""
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


def _lstm(shapes: Shapes, dropout: float) -> torch.nn.Module:
    from torch import nn

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            features, width = shapes["lstm.weight_ih_l0"][1], shapes["lstm.weight_hh_l0"][1]
            self.lstm = nn.LSTM(features, width, batch_first=True)
            self.fc = nn.Linear(*reversed(shapes["fc.weight"]))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            _, (last, _) = self.lstm(tokens)
            return self.fc(last[0])

    return Lstm()
