"""Round trips: torch → ONNX → training → a checkpoint → torch, with both exporters.

The oracle is torch with the saved checkpoint; what it computes is compared with the trained ONNX
file in stock onnxruntime.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import ortops
from ortops import ModelError, TrainingSession, UnsupportedError

pytestmark = [pytest.mark.torch, pytest.mark.slow]

transformers.logging.set_verbosity_error()

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24}
TOKENS: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 16}
EXPORTERS = ("torchscript", "dynamo")


class First(nn.Module):
    """The first output of a transformers model, as a function of its input."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = {} if x.is_floating_point() else {"attention_mask": torch.ones_like(x)}
        return self.model(x, return_dict=False, **mask, **self.settings)[0]


def bert() -> First:
    return First(
        transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES | TOKENS))
    )


def gpt2(**settings: Any) -> First:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, **settings)
    return First(transformers.GPT2LMHeadModel(config), use_cache=False)


def untied_gpt2() -> First:
    return gpt2(tie_word_embeddings=False)


def llama() -> First:
    config = transformers.LlamaConfig(**SIZES | TOKENS)
    return First(transformers.LlamaForCausalLM(config), use_cache=False)


def vit() -> First:
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=3)
    return First(transformers.ViTForImageClassification(config))


def mobilenet() -> First:
    sizes = {"image_size": 32, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4}
    config = transformers.MobileNetV2Config(**sizes, num_labels=3)
    return First(transformers.MobileNetV2ForImageClassification(config))


def made(build: Callable[[], First], *, random: bool = False) -> tuple[First, torch.Tensor]:
    """Returns a network in evaluation mode and an input.

    Args:
        build: What makes the network.
        random: Whether biases and scales get random numbers, too; else they are zeros and ones,
            equal ones of which exporters merge.
    """
    torch.manual_seed(0)
    module = build()
    if random:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.01 if build is mobilenet else 0.1))
    x = torch.randint(0, 50, (2, 7)) if build in TEXT else torch.randn(8, 3, *IMAGE[build])
    if build is mobilenet:
        with torch.no_grad():
            module.train()(x)  # for the running statistics
    return module.eval(), x


class Recurrent(nn.Module):
    """The last state of a recurrent layer, classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layer": kind(5, 4, batch_first=True), "head": nn.Linear(4, 3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.model["layer"](x)
        return self.model["head"](states[:, -1])


TEXT = (bert, gpt2, untied_gpt2, llama)
IMAGE = {vit: (16, 16), mobilenet: (32, 32)}


def exported(module: nn.Module, x: torch.Tensor, exporter: str, **more: Any) -> onnx.ModelProto:
    axes = ("batch", "length") if x.ndim == 2 else ("batch",)
    settings: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    stream = io.BytesIO()
    if exporter == "torchscript":
        settings |= {
            "dynamo": False,
            "opset_version": 17,
            "dynamic_axes": {"x": dict(enumerate(axes))},
        }
    else:
        dims = dict.fromkeys(range(len(axes)), torch.export.Dim.DYNAMIC)
        settings |= {"dynamo": True, "verbose": False, "dynamic_shapes": (dims,)}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        target = stream if exporter == "torchscript" else None
        program = torch.onnx.export(module, (x,), target, **settings | more)
    return program.model_proto if program else onnx.load_from_string(stream.getvalue())


def trained(
    model: onnx.ModelProto, x: torch.Tensor, rate: float = 0.05, **settings: Any
) -> TrainingSession:
    """Returns a session after a few steps."""
    built = ortops.build_training_model(
        model,
        loss="MeanSquaredError",
        optimizer=ortops.optimizers.SGD(rate),
        **settings,
    )
    session = TrainingSession(built)
    shape = run(model, x).shape
    targets = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for _ in range(3):
        session.step({"x": x.numpy(), "targets": targets})
    return session


def run(model: onnx.ModelProto, x: torch.Tensor) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found: np.ndarray[Any, Any] = session.run(None, {"x": x.numpy()})[0]
    return found


def reloaded(module: Any, path: Path) -> nn.Module:
    """Returns a copy of a network with the parameters of a file."""
    result: Any = copy.deepcopy(module)
    state = safetensors.torch.load_file(path)
    assert {n: t.dtype for n, t in state.items()} == {
        n: t.dtype for n, t in module.model.state_dict().items()
    }
    result.model.load_state_dict(state)
    return result


def check_round_trip(
    module: Any, model: onnx.ModelProto, x: torch.Tensor, path: Path, **settings: Any
) -> ortops.weights.Names:
    like = module.model.state_dict()
    names = ortops.weights.match(model, like)
    before = run(model, x)
    session = trained(names.attach(model), x, **settings)
    session.save(path / "trained.onnx")
    ortops.weights.save(str(path / "trained.onnx"), path / "tuned.safetensors", like=like)
    result = session.inference_model()
    ortops.weights.save(result, path / "inference.safetensors", like=like)
    assert (path / "inference.safetensors").read_bytes() == (
        path / "tuned.safetensors"
    ).read_bytes()
    after = run(result, x)
    assert np.abs(after - before).max() > 1e-3
    with torch.no_grad():
        found = reloaded(module, path / "tuned.safetensors")(x).numpy()
    np.testing.assert_allclose(found, after, rtol=0, atol=1e-4)
    return names


@pytest.mark.nightly(2)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("build", "random"),
    [(bert, True), (bert, False), (untied_gpt2, True), (llama, True), (vit, True), (vit, False)],
)
def test_round_trips(build: Any, exporter: str, random: bool, tmp_path: Path) -> None:
    module, x = made(build, random=random)
    model = exported(module, x, exporter)
    names = check_round_trip(module, model, x, tmp_path)
    assert names.unmatched_model == {}
    if random:
        assert names.unmatched_checkpoint == {}
        weights = [place for places in names.values() for place in places]
        assert len(set(weights)) == len(weights)


@pytest.mark.nightly(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_tied_embeddings_of_gpt2(exporter: str, tmp_path: Path) -> None:
    """Both exporters write the transposed weight of the head as a copy."""
    module, x = made(gpt2, random=True)
    model = exported(module, x, exporter)
    like = module.model.state_dict()
    names = ortops.weights.match(model, like)
    copies = {place.weight for place in names["lm_head.weight"] + names["transformer.wte.weight"]}
    assert len(copies) == 2
    body = [
        place.weight for places in names.values() for place in places if place.weight not in copies
    ]
    check_round_trip(module, model, x, tmp_path, trainable=body)
    session = trained(names.attach(model), x)
    with pytest.raises(ModelError, match="differ now; freeze both of them"):
        ortops.weights.save(session.inference_model(), tmp_path / "x.safetensors", like=like)


@pytest.mark.nightly(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_mobilenet(exporter: str, tmp_path: Path) -> None:
    module, x = made(mobilenet, random=True)
    folded = exported(module, x, exporter)
    with pytest.raises(UnsupportedError, match=r"Conv node .* folded the BatchNormalization 'mob"):
        ortops.weights.match(folded, module.model.state_dict())
    more = {"optimize": False}
    if exporter == "torchscript":
        more = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    model = exported(module, x, exporter, **more)
    module.eval()
    names = ortops.weights.match(model, module.model.state_dict())
    assert set(names.unmatched_checkpoint.values()) <= {"is int64"}
    check_round_trip(module, model, x, tmp_path, rate=1e-4)


@pytest.mark.nightly(1)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any, exporter: str, tmp_path: Path) -> None:
    """Whose gates have another order in ONNX, and whose biases are one weight."""
    torch.manual_seed(0)
    module, x = Recurrent(kind).eval(), torch.randn(2, 6, 5)
    names = check_round_trip(module, exported(module, x, exporter), x, tmp_path)
    assert names.unmatched_checkpoint == {}


def test_fused_operators(tmp_path: Path) -> None:
    """onnxruntime's tool for transformers moves weights to nodes without scopes."""
    from onnxruntime.transformers.optimizer import optimize_model

    module, x = made(bert, random=True)
    onnx.save(exported(module, x, "torchscript"), tmp_path / "x.onnx")
    optimized = optimize_model(str(tmp_path / "x.onnx"), "bert", num_heads=2, hidden_size=16)
    names = check_round_trip(module, optimized.model, x, tmp_path)
    assert "SkipLayerNormalization" in {node.op_type for node in optimized.model.graph.node}
    assert names.unmatched_model == names.unmatched_checkpoint == {}


@pytest.mark.parametrize("build", [bert, gpt2])
def test_folders_of_transformers(build: Any, tmp_path: Path) -> None:
    """Where a tied tensor is stored once, under one of its names."""
    module, x = made(build, random=True)
    module.model.save_pretrained(tmp_path)
    like = tmp_path / "model.safetensors"
    model = exported(module, x, "torchscript")
    names = ortops.weights.match(model, like)
    assert names.unmatched_model == names.unmatched_checkpoint == {}
    body = [place.weight for places in names.values() if len(places) == 1 for place in places]
    session = trained(names.attach(model), x, trainable=body)
    ortops.weights.save(session.inference_model(), like, like=like)
    loaded = First(type(module.model).from_pretrained(tmp_path), **module.settings).eval()
    with torch.no_grad():
        found = loaded(x).numpy()
    np.testing.assert_allclose(found, run(session.inference_model(), x), rtol=0, atol=1e-4)
    np.testing.assert_allclose(run(model, x), module(x).detach().numpy(), rtol=0, atol=1e-4)
