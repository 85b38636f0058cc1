"""Gradients of models that torch.onnx.export wrote, next to PyTorch's autograd.

Tiny modules with random weights are exported as users export them, with both of PyTorch's
exporters. The gradients of all parameters, of a weighted sum of the first output, are taken from
the file by ortops and from the module by autograd.

Tolerance: both sides compute in float32 and sum in different orders, so entries differ by some 1e-6
of the largest; a few layers carry that to 1e-5 of a gradient's norm. The bound of 1e-3 leaves room
for kernels of other machines, and a wrong coefficient or a missing term exceeds it by far:
`test_the_bound_can_fail` shows it for a gradient scaled by a hundredth more.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from domain_models import node
from onnx import TensorProto, helper, numpy_helper
from running import run
from torch import nn

import ortops

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TOLERANCE = 1e-3
BATCH, LENGTH = 2, 7
Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Export:
    """A module and how to export it.

    Attributes:
        build: Makes the module.
        inputs: Makes the inputs by name, in the order of the module's arguments.
        dynamic: The dynamic axes of each input, with their symbols.
        unused: Parameters that the first output does not depend on, as the start of their names.
        folded: Parameters that an exporter which optimizes folds into others, likewise.
        torchscript: Whether PyTorch's older exporter can write the module.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    dynamic: dict[str, dict[int, str]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    torchscript: bool = True


def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (BATCH, LENGTH))


def masked() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(), "attention_mask": torch.ones(BATCH, LENGTH).long()}


def images(size: int = 16) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


class First(nn.Module):
    """The first output of a transformers model, as a function of named inputs in order."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], **settings: Any) -> None:
        super().__init__()
        self.model, self.names, self.settings = model, names, settings

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.names, values, strict=True))
        return self.model(**given, **self.settings, return_dict=False)[0]


def pretrained(
    name: str, names: tuple[str, ...], *, sub: str = "", **settings: Any
) -> Callable[[], nn.Module]:
    """Returns what makes a transformers model of random weights.

    Args:
        name: The class of the model, such as ``BertModel``.
        names: The names of the inputs.
        sub: An attribute of the model that is exported in its place.
        **settings: What its configuration gets.
    """

    def build() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        kind = getattr(transformers, name)
        model = kind(kind.config_class(**settings))
        if sub:
            model = getattr(model, sub)
        cache = {"use_cache": False} if name in CACHED else {}
        return First(model, names, **cache)

    return build


CACHED = ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL["intermediate_size"] = 24
TOKENS = {"vocab_size": 50, "max_position_embeddings": 16}
SEQUENCE = {0: "batch", 1: "length"}


class Recurrent(nn.Module):
    """Classifies a sequence by the last state of an LSTM or a GRU."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 12)
        self.recurrent = kind(12, 8, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embedding(ids))
        return self.head(states[:, -1])


class UNet(nn.Module):
    """One level down, and up again by a transposed convolution and by resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU())
        self.pool = nn.MaxPool2d(2)
        self.middle = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.resize = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.join = nn.Conv2d(6 + 6 + 8, 2, 3, padding=1, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above = self.down(x)
        below = self.middle(self.pool(above))
        return self.join(torch.cat([above, self.up(below), self.resize(below)], dim=1))


class Mixed(nn.Module):
    """Layers and functions that convolution nets are made of, beside the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.normal = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.excite = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8), nn.Hardsigmoid())
        self.slope = nn.PReLU(8)
        self.head = nn.Linear(8 * 2 * 2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.hardswish(self.normal(self.first(x)))
        x = self.slope(self.instance(self.depth(x)))
        x = x * self.excite(x.mean((2, 3)))[:, :, None, None]
        x = nn.functional.pixel_shuffle(nn.functional.pixel_unshuffle(x, 2), 2)
        x = nn.functional.avg_pool2d(nn.functional.leaky_relu(x), 3, stride=2, padding=1)
        x = nn.functional.adaptive_avg_pool2d(x, 2)
        return torch.log_softmax(self.head(x.flatten(1)), dim=-1)


class Functions(nn.Module):
    """Functions of a vector that exporters write in several nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bi,ij->bj", x, self.weight)
        y = torch.logsumexp(torch.stack([y, y * self.scale]), dim=0) + y.var(-1, keepdim=True)
        y = y + torch.gather(self.table, 1, torch.argsort(y, dim=1)[:1].expand(6, 6)).sum(0)
        y = torch.where(y > 0, torch.tanh(y), torch.nn.functional.elu(y)).clamp(-0.9, 2.0)
        y = torch.cat([y.cumsum(1), y.flip(1)[:, ::2], y.roll(1, 1)], dim=1)
        best, _ = y.topk(5, dim=1)
        norm = torch.linalg.vector_norm(y, dim=1, keepdim=True)
        return torch.cat([best / norm, y.prod(1, True), y.amax(1, True), torch.tril(y)], dim=1)


EXPORTS = {
    "bert": Export(
        pretrained("BertModel", ("input_ids", "attention_mask"), **SMALL, **TOKENS),
        masked,
        {"input_ids": SEQUENCE, "attention_mask": SEQUENCE},
        unused=("model.pooler",),
    ),
    "gpt2": Export(
        pretrained(
            "GPT2LMHeadModel",
            ("input_ids", "attention_mask"),
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            vocab_size=50,
        ),
        masked,
        {"input_ids": SEQUENCE, "attention_mask": SEQUENCE},
    ),
    "llama": Export(
        pretrained(
            "LlamaForCausalLM",
            ("input_ids", "attention_mask"),
            num_key_value_heads=1,
            **SMALL,
            **TOKENS,
        ),
        masked,
        {"input_ids": SEQUENCE, "attention_mask": SEQUENCE},
    ),
    "t5": Export(
        pretrained(
            "T5ForConditionalGeneration",
            ("input_ids", "decoder_input_ids"),
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            attn_implementation="eager",
        ),
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens()},
        {"input_ids": SEQUENCE, "decoder_input_ids": {0: "batch", 1: "target"}},
    ),
    "vit": Export(
        pretrained("ViTModel", ("pixel_values",), image_size=16, patch_size=8, **SMALL),
        lambda: {"pixel_values": images()},
        {"pixel_values": {0: "batch"}},
        unused=("model.pooler",),
    ),
    "resnet": Export(
        pretrained(
            "ResNetForImageClassification",
            ("pixel_values",),
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            layer_type="basic",
            num_labels=4,
        ),
        lambda: {"pixel_values": images(32)},
        {"pixel_values": {0: "batch", 2: "height", 3: "width"}},
        folded=("model.resnet.",),
    ),
    "whisper": Export(
        pretrained(
            "WhisperModel",
            ("input_features",),
            sub="encoder",
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=10,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        lambda: {"input_features": torch.randn(BATCH, 8, 20)},
        {"input_features": {0: "batch"}},
    ),
    "segformer": Export(
        pretrained(
            "SegformerForSemanticSegmentation",
            ("pixel_values",),
            num_encoder_blocks=2,
            depths=[1, 1],
            hidden_sizes=[8, 16],
            num_attention_heads=[1, 2],
            decoder_hidden_size=8,
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            num_labels=3,
        ),
        lambda: {"pixel_values": images(32)},
        {"pixel_values": {0: "batch"}},
        folded=("model.decode_head",),
    ),
    "wav2vec2": Export(
        pretrained(
            "Wav2Vec2Model",
            ("input_values",),
            vocab_size=20,
            conv_dim=[8, 8],
            conv_stride=[4, 2],
            conv_kernel=[8, 3],
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            num_feat_extract_layers=2,
            **SMALL,
        ),
        lambda: {"input_values": torch.randn(BATCH, 200)},
        {"input_values": {0: "batch"}},
        folded=("model.encoder.pos", "model.feature_extractor.conv_layers.0"),
        unused=("model.masked",),
    ),
    "lstm": Export(
        lambda: Recurrent(nn.LSTM),
        lambda: {"ids": tokens()},
        {"ids": {0: "batch"}},
        folded=("recurrent.",),
    ),
    "gru": Export(
        lambda: Recurrent(nn.GRU),
        lambda: {"ids": tokens()},
        {"ids": {0: "batch"}},
        folded=("recurrent.",),
    ),
    "unet": Export(
        UNet,
        lambda: {"x": images()},
        {"x": {0: "batch", 2: "height", 3: "width"}},
        folded=("down.", "middle.1"),
    ),
    "mixed": Export(
        Mixed,
        lambda: {"x": images()},
        {"x": {0: "batch"}},
        folded=("first", "normal", "slope"),
        torchscript=False,
    ),
    "functions": Export(Functions, lambda: {"x": torch.randn(BATCH, 6)}, {"x": {0: "batch"}}),
}


def built(example: Export) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Returns the module, with no two parameters alike, and its inputs."""
    torch.manual_seed(20)
    module = example.build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # exporters merge equal tensors
        for name, buffer in module.named_buffers():
            if "running_" in name:
                buffer.add_(0.1 * torch.rand_like(buffer))
    return module, example.inputs()


def exported(
    example: Export, module: nn.Module, inputs: dict[str, torch.Tensor], exporter: str
) -> onnx.ModelProto:
    """Exports a module with dynamic axes."""
    names = list(inputs)
    settings: dict[str, Any] = {"input_names": names, "output_names": ["y"]}
    if exporter == "torchscript":
        settings |= {"dynamo": False, "dynamic_axes": example.dynamic, "opset_version": 17}
        if example.folded:  # as for training, so that every parameter is there
            training = torch.onnx.TrainingMode.PRESERVE
            settings |= {"training": training, "do_constant_folding": False}
    else:
        axes = tuple(example.dynamic[name] for name in names)
        forward_takes_a_tuple = isinstance(module, First)
        settings |= {
            "dynamo": True,
            "verbose": False,
            "dynamic_shapes": (axes,) if forward_takes_a_tuple else axes,
            "optimize": exporter != "dynamo as it is",
        }
        if exporter == "dynamo opset 23":
            settings["opset_version"] = 23
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        result = torch.onnx.export(module, tuple(inputs.values()), file, **settings)
    if result is not None:
        return result.model_proto
    return onnx.load_from_string(file.getvalue())


def parameters_of(
    model: onnx.ModelProto, module: nn.Module
) -> dict[str, tuple[str, tuple[int, ...] | None]]:
    """Tells which parameter each initializer is: initializer → (parameter, permutation of axes).

    Exporters rename initializers and fold transposes into them, so that the values decide.
    """
    named = {name: p.detach().numpy() for name, p in module.named_parameters()}
    found: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32:
            continue
        for name, parameter in named.items():
            if array.shape == parameter.shape and np.array_equal(array, parameter):
                found[tensor.name] = name, None
            elif array.shape == parameter.T.shape and np.array_equal(array, parameter.T):
                found[tensor.name] = name, tuple(reversed(range(array.ndim)))
    return found


def gradients_of_torch(
    module: nn.Module, inputs: dict[str, torch.Tensor], weight: np.ndarray
) -> Gradients:
    loss = (module(*inputs.values()) * torch.from_numpy(weight)).sum()
    names, values = zip(
        *((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True
    )
    made = torch.autograd.grad(loss, values, allow_unused=True)
    return {n: g.numpy() for n, g in zip(names, made, strict=True) if g is not None}


def with_gradients(model: onnx.ModelProto, names: list[str], weight: np.ndarray) -> onnx.ModelProto:
    """Adds a Gradient node of Σ weight · y to a model; its outputs are the only ones."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    y = model.graph.output[0].name
    result.graph.initializer.append(numpy_helper.from_array(weight, "weight_of_y"))
    made = [f"gradient_of_{name}" for name in names]
    result.graph.node.extend(
        [
            helper.make_node("Mul", [y, "weight_of_y"], ["weighted"]),
            node("Gradient", names, made, xs=names, y="weighted"),
        ]
    )
    result.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    del result.graph.output[:]
    result.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made
    )
    return result


def compare(
    model: onnx.ModelProto,
    module: nn.Module,
    inputs: dict[str, torch.Tensor],
    left_out: tuple[str, ...],
) -> dict[str, float]:
    """Returns the error of each parameter's gradient, relative to the gradient's norm."""
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    feeds = {value.name: feeds[value.name] for value in model.graph.input}
    value = run(model, feeds, [model.graph.output[0].name])[0]
    with torch.no_grad():
        np.testing.assert_allclose(value, module(*inputs.values()).numpy(), rtol=1e-3, atol=1e-4)
    weight = np.random.default_rng(20).standard_normal(value.shape).astype(np.float32)
    expected = gradients_of_torch(module, inputs, weight)
    known = parameters_of(model, module)
    names = list(known)
    found: Gradients = {}
    lowered = ortops.lower(with_gradients(model, names, weight))
    computed = run(lowered, feeds)
    pairs = zip(names, computed, run(lowered, feeds, optimize=False), strict=True)
    size = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in computed))
    changed = [
        name
        for name, one, other in pairs
        if np.linalg.norm(one - other) > TOLERANCE * max(np.linalg.norm(other), 1e-3 * size)
    ]
    assert not changed, f"onnxruntime's optimizer changes the gradients of {changed}"
    for name, gradient in zip(names, computed, strict=True):
        parameter, axes = known[name]
        if axes is not None:
            gradient = gradient.transpose(axes)
        found[parameter] = found.get(parameter, 0) + gradient  # one parameter in several places
    used = {name for name in expected if name in found or not name.startswith(left_out)}
    assert used <= set(found), f"not among the initializers: {sorted(used - set(found))}"
    total = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()))
    # A key's bias does not change a softmax, nor one before a normalization its result: such a
    # gradient is zero but for rounding, and has no norm of its own to be compared with.
    return {
        name: float(
            np.linalg.norm(found[name] - expected[name])
            / max(np.linalg.norm(expected[name]), 1e-3 * total)
        )
        for name in used
    }


@pytest.fixture(autouse=True)
def quiet_exporters() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


EXPORTERS = ["dynamo", "dynamo as it is", "dynamo opset 23", "torchscript"]
REFUSED = [name for name, example in EXPORTS.items() if not example.torchscript]


@pytest.mark.nightly(4)
@pytest.mark.parametrize(
    ("name", "exporter"),
    [(n, e) for n in EXPORTS for e in EXPORTERS if e != "torchscript" or n not in REFUSED],
)
def test_gradients(name: str, exporter: str) -> None:
    example = EXPORTS[name]
    module, inputs = built(example)
    model = exported(example, module, inputs, exporter)
    if exporter == "dynamo opset 23":  # onnxruntime's RotaryEmbedding takes no other batch here
        inputs = {key: tensor[:1] for key, tensor in inputs.items()}
    optimizes = exporter in ("dynamo", "dynamo opset 23")
    left_out = (*example.unused, *(example.folded if optimizes else ()))
    errors = compare(model, module, inputs, left_out)
    assert errors
    assert max(errors.values()) < TOLERANCE, sorted(errors.items(), key=lambda e: -e[1])[:5]


@pytest.mark.parametrize("name", REFUSED)
def test_the_older_exporter_refuses(name: str) -> None:
    example = EXPORTS[name]
    with pytest.raises(torch.onnx.errors.OnnxExporterError):
        exported(example, *built(example), "torchscript")


def test_the_bound_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    example = EXPORTS["mixed"]
    module, inputs = built(example)
    model = exported(example, module, inputs, "dynamo as it is")
    right = gradients_of_torch

    def wrong(*arguments: Any) -> Gradients:
        return {name: gradient * 1.01 for name, gradient in right(*arguments).items()}

    monkeypatch.setitem(globals(), "gradients_of_torch", wrong)
    errors = compare(model, module, inputs, ())
    assert errors["head.weight"] > TOLERANCE
