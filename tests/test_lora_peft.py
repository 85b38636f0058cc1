"""Adapters of PEFT: what it computes itself, and what it reads and writes.

A small encoder and a small decoder get adapters with PEFT; their bases are exported with both of
PyTorch's exporters. What PEFT's module computes is the oracle.

Tolerance: both sides compute in float32 and sum in different orders, so outputs of some 1 differ by
some 1e-6; an adapter changes them by more than 0.1, which is asserted.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import peft
import pytest
import safetensors.numpy
import torch
import transformers
from lora_models import outputs, random_adapter, values, with_values
from torch import nn
from torch_exports import exported_by, quietly_exported

import ortops
from ortops import ModelError, TrainingSession, UnsupportedError, lora

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    # What PEFT asks transformers for.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

IDS = np.random.default_rng(0).integers(0, 50, (2, 7))
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "vocab_size": 50, "max_position_embeddings": 16}
SIZES |= {"initializer_range": 0.3}  # so that what an adapter does shows in the outputs
TARGETS = np.random.default_rng(1).standard_normal((2, 7, 16), np.float32)


class First(nn.Module):
    """The first output of a transformers model, as a function of the numbers of tokens."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.model, self.settings = model, settings

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, return_dict=False, **self.settings)[0]


def encoder() -> First:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, attn_implementation="eager")
    return First(transformers.BertModel(config, add_pooling_layer=False)).eval()


def decoder() -> First:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return First(model, use_cache=False).eval()


def images() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))
    return nn.Sequential(*layers).eval()


@functools.cache
def _exported(make: Callable[[], nn.Module], exporter: str) -> onnx.ModelProto:
    return exported_by(make(), torch.from_numpy(IDS), exporter)


def base_of(make: Callable[[], nn.Module], exporter: str) -> onnx.ModelProto:
    """Returns what an exporter writes of `encoder` or `decoder`, which it does only once."""
    return copy.deepcopy(_exported(make, exporter))


def randomized(module: nn.Module, config: peft.LoraConfig, inner: str = "") -> nn.Module:
    """Wraps a module, or what is in it, with PEFT; the adapter gets random numbers."""
    model = copy.deepcopy(module)
    wrapped = peft.get_peft_model(getattr(model, inner) if inner else model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 2)
    if inner:
        setattr(model, inner, wrapped)
        return model.eval()
    return wrapped.eval()


def computed(module: nn.Module, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(x)).numpy()


ATTENTION = ["query", "value"]
CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION},
    "rslora": {"r": 4, "lora_alpha": 6, "target_modules": ATTENTION, "use_rslora": True},
    "all": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "embeddings": {"r": 4, "lora_alpha": 2, "target_modules": ["word_embeddings", "dense"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [*ATTENTION, "output.dense"],
        "rank_pattern": {"value": 2, "layer.1.attention.self.query": 3},
        "alpha_pattern": {"query": 5, "^encoder.layer.0.output.dense": 1},
        "lora_dropout": 0.1,
    },
}


@pytest.mark.nightly(2)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_an_encoder(
    settings: dict[str, Any], exporter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT's outputs; and back: what is trained here gives the same outputs in PEFT."""
    module = encoder()
    wrapped = randomized(module, peft.LoraConfig(**settings), "model")
    wrapped.model.save_pretrained(tmp_path / "given")
    base = base_of(encoder, exporter)
    model = lora.from_peft(base, tmp_path / "given")
    assert (", dropout 0.1, on" in caplog.text) == ("lora_dropout" in settings)
    expected = computed(wrapped, IDS)
    np.testing.assert_allclose(outputs(model, {"x": IDS})[0], expected, atol=1e-4)
    assert abs(outputs(base, {"x": IDS})[0] - expected).max() > 0.1

    lora.to_peft(model, tmp_path / "same")
    one, other = (
        safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("given", "same")
    )
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=1e-6)

    adam = ortops.optimizers.Adam(learning_rate=0.01)
    built = ortops.build_training_model(model, loss="MeanSquaredError", optimizer=adam)
    session = TrainingSession(built)
    for _ in range(5):
        session.step({"x": IDS, "targets": TARGETS})
    trained = session.inference_model()
    lora.to_peft(trained, tmp_path / "trained")
    module.model = peft.PeftModel.from_pretrained(module.model, tmp_path / "trained").eval()
    (y,) = outputs(trained, {"x": IDS})
    np.testing.assert_allclose(computed(module, IDS), y, atol=1e-4)
    assert abs(y - expected).max() > 0.01
    merged = lora.merge(trained)
    np.testing.assert_allclose(outputs(merged, {"x": IDS})[0], y, atol=1e-4)


def test_a_decoder(tmp_path: Path) -> None:
    module = decoder()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj", "lm_head"])
    wrapped = randomized(module, config, "model")
    wrapped.model.save_pretrained(tmp_path)
    base = base_of(decoder, "dynamo")
    model = lora.from_peft(base, tmp_path)
    expected = computed(wrapped, IDS)
    np.testing.assert_allclose(outputs(model, {"x": IDS})[0], expected, atol=1e-4)
    assert abs(outputs(base, {"x": IDS})[0] - expected).max() > 0.1

    # PEFT has written the embedding and the head of the base too, which have to be the model's.
    file = tmp_path / "adapter_model.safetensors"
    saved = safetensors.numpy.load_file(file)
    whole = [name for name in saved if ".lora_" not in name]
    assert whole
    saved[whole[0]] = saved[whole[0]] + 1
    safetensors.numpy.save_file(saved, file)
    with pytest.raises(
        UnsupportedError,
        match=r"' is not a LoRA matrix, or is a weight of the base that differs from the model's",
    ):
        lora.from_peft(base, tmp_path)


@pytest.mark.parametrize(
    ("make", "exporter"),  # the other exporter cannot export this decoder
    [(encoder, "torchscript"), (encoder, "dynamo"), (decoder, "dynamo")],
)
def test_all_linear_means_the_same_layers(make: Any, exporter: str) -> None:
    module = make()
    base = base_of(make, exporter)
    found = values(lora.add(base, rank=2, targets="all-linear"))
    layers = {name.split(".lora_")[0].removeprefix("model.") for name in found if "lora_A" in name}
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    assert layers == wrapped_layers(peft.get_peft_model(module.model, config))


RATES = {"SGD": 5e-3, "Adam": 3e-3, "AdamW": 3e-3}
STEPS = 20


def losses_in_peft(wrapped: nn.Module, optimizer: str) -> list[float]:
    parameters = [p for p in wrapped.parameters() if p.requires_grad]
    rule = getattr(torch.optim, optimizer)(parameters, lr=RATES[optimizer])
    ids, found = torch.from_numpy(IDS), []
    for _ in range(STEPS):
        logits = wrapped(ids)
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 50), ids[:, 1:].reshape(-1))
        rule.zero_grad()
        loss.backward()
        rule.step()
        found.append(loss.item())
    return found


@pytest.mark.nightly(2)
@pytest.mark.parametrize("optimizer", RATES)
@pytest.mark.parametrize(
    "settings",
    [{"lora_alpha": 1}, {"lora_alpha": 16}, {"lora_alpha": 64}, {"use_rslora": True}],
    ids=str,
)
def test_losses_are_those_of_peft(settings: dict[str, Any], optimizer: str, tmp_path: Path) -> None:
    """Step by step, from the same A, data and rate; rounding grows with the steps."""
    module = decoder()
    config = peft.LoraConfig(r=8, target_modules="all-linear", **settings)
    torch.manual_seed(2)
    module.model = peft.get_peft_model(module.model, config).eval()
    module.model.save_pretrained(tmp_path)
    model = lora.from_peft(base_of(decoder, "dynamo"), tmp_path)
    after = {} if optimizer == "SGD" else {"epsilon_after_correction": True}
    rule = getattr(ortops.optimizers, optimizer)(learning_rate=RATES[optimizer], **after)
    loss = ortops.losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100)
    session = TrainingSession(ortops.build_training_model(model, loss=loss, optimizer=rule))
    labels = np.concatenate([IDS[:, 1:], np.full((2, 1), -100)], 1)
    found = [float(session.step({"x": IDS, "labels": labels})["loss"]) for _ in range(STEPS)]
    expected = losses_in_peft(module, optimizer)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert expected[-1] < expected[0] - 1e-3


def test_losses_with_decay_schedule_and_padding(tmp_path: Path) -> None:
    """AdamW with a strong decay, a linear warm-up, and batches of rows of different lengths."""
    module = decoder()
    config = peft.LoraConfig(r=8, target_modules="all-linear", lora_alpha=16)
    torch.manual_seed(2)
    module.model = peft.get_peft_model(module.model, config).eval()
    module.model.save_pretrained(tmp_path)
    model = lora.from_peft(base_of(decoder, "dynamo"), tmp_path)
    batches = []
    for seed in range(4):
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, 50, (2, 7))
        inside = np.arange(7) < draw.integers(3, 8, (2, 1))
        batches.append((np.where(inside, ids, 0), np.where(inside, ids, -100)))

    parameters = [p for p in module.parameters() if p.requires_grad]
    rule = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)
    schedule = transformers.get_linear_schedule_with_warmup(rule, 5, STEPS)
    expected = []
    for step in range(STEPS):
        ids, labels = (torch.from_numpy(array) for array in batches[step % 4])
        scores = module(ids)[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
        rule.zero_grad()
        loss.backward()
        rule.step()
        schedule.step()
        expected.append(loss.item())

    session = TrainingSession(
        ortops.build_training_model(
            model,
            loss=ortops.losses.NextToken(ignore_index=-100),
            optimizer=ortops.optimizers.AdamW(
                learning_rate=ortops.schedules.warmup_linear(1e-2, steps=STEPS, warmup=5),
                weight_decay=0.5,
                epsilon_after_correction=True,
            ),
        )
    )
    found = []
    for step in range(STEPS):
        ids, labels = batches[step % 4]
        found.append(float(session.step({"x": ids, "labels": labels})["loss"]))
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert np.mean(expected[-4:]) < np.mean(expected[:4]) - 0.05


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_convolutions(exporter: str, tmp_path: Path) -> None:
    module, x = images(), np.random.default_rng(1).standard_normal((2, 3, 8, 8), np.float32)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], rank_pattern={"2": 2})
    wrapped = randomized(module, config)
    wrapped.save_pretrained(tmp_path / "given")
    base = exported_by(module, torch.from_numpy(x), exporter)
    model = lora.from_peft(base, tmp_path / "given")
    expected = computed(wrapped, x)
    np.testing.assert_allclose(outputs(model, {"x": x})[0], expected, atol=1e-4)
    np.testing.assert_allclose(outputs(lora.merge(model), {"x": x})[0], expected, atol=1e-4)
    lora.to_peft(model, tmp_path / "back")
    loaded = peft.PeftModel.from_pretrained(module, tmp_path / "back").eval()
    np.testing.assert_allclose(computed(loaded, x), expected, atol=1e-4)


def normalized_images() -> nn.Module:
    """Two convolutions, each with a BatchNormalization, and one without."""
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, momentum=0), nn.ReLU()),
        *(nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4, momentum=0), nn.Conv2d(4, 2, 1)),
    )
    for norm in (module[1], module[4]):
        torch.nn.init.uniform_(norm.weight, 2, 4)
        torch.nn.init.uniform_(norm.running_var, 0.1, 0.5)
    return module.eval()


def test_a_folded_batch_normalization(tmp_path: Path) -> None:
    """PEFT's adapter is in front of it, so that the file cannot have the same adapter."""
    module, x = normalized_images(), np.random.default_rng(1).standard_normal((2, 3, 8, 8))
    images = torch.from_numpy(x.astype(np.float32))
    wrapped = randomized(module, peft.LoraConfig(r=2, lora_alpha=8, target_modules=["0", "3"]))
    wrapped.save_pretrained(tmp_path / "given")
    folded = quietly_exported(
        module, {"x": images}, exporter="torchscript", axes={0: "batch"}, output="y"
    )
    assert not any(node.op_type == "BatchNormalization" for node in folded.graph.node)
    with pytest.raises(UnsupportedError, match=r"layer '[03]': a BatchNormalization was folded"):
        lora.from_peft(folded, tmp_path / "given")
    with pytest.raises(UnsupportedError, match=r"layer '3': a BatchNormalization was folded"):
        lora.to_peft(lora.add(folded, rank=2, targets=["3"]), tmp_path / "out")
    whole_layer: dict[str, Any] = {"modules_to_save": ["3"]}
    config = peft.LoraConfig(r=2, target_modules=["5"], **whole_layer)
    peft.get_peft_model(copy.deepcopy(module), config).save_pretrained(tmp_path / "whole")
    with pytest.raises(UnsupportedError, match=r"layer '3': a BatchNormalization was folded"):
        lora.from_peft(folded, tmp_path / "whole")
    model = lora.add(folded, rank=2, targets=["5"], **whole_layer)
    with pytest.raises(UnsupportedError, match=r"layer '3': a BatchNormalization was folded"):
        lora.to_peft(model, tmp_path / "out")
    whole = quietly_exported(
        module, {"x": images}, exporter="training", axes={0: "batch"}, output="y"
    )
    for node in whole.graph.node:  # as it is served
        del node.output[1:]
        for attribute in node.attribute:
            attribute.i = 0 if attribute.name == "training_mode" else attribute.i
    model = lora.from_peft(whole, tmp_path / "given")
    expected = computed(wrapped, images.numpy())
    found = outputs(model, {"x": images.numpy()})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)  # some 500


def test_an_adapter_that_began_here(tmp_path: Path) -> None:
    """`add`, then PEFT: layers are called as PyTorch calls them, but for a prefix."""
    module = encoder()
    base = base_of(encoder, "dynamo")
    model = lora.add(
        base, rank=3, targets=["model.encoder.layer.1.*"], rank_pattern={"query": 2}, rslora=True
    )
    built = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    session = TrainingSession(built)
    session.learning_rate = 0.05
    (y,) = outputs(base, {"x": IDS})
    for _ in range(5):
        session.step({"x": IDS, "targets": TARGETS})
    with pytest.raises(
        ModelError, match=r"prefix: layer 'model.encoder.*' does not start with 'bert.'"
    ):
        lora.to_peft(session.inference_model(), tmp_path, prefix="bert.")
    lora.to_peft(session.inference_model(), tmp_path, prefix="model.")
    module.model = peft.PeftModel.from_pretrained(module.model, tmp_path).eval()
    assert len(wrapped_layers(module.model)) == 6
    (expected,) = outputs(session.inference_model(), {"x": IDS})
    np.testing.assert_allclose(computed(module, IDS), expected, atol=1e-4)
    assert abs(expected - y).max() > 0.1


def wrapped_layers(model: nn.Module) -> set[str]:
    """Returns the names of the layers that PEFT has put an adapter into."""
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


class Nested(nn.Module):
    """Layers whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.afc1 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.block = nn.Module()
        self.block.fc1, self.block.fc1x = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.fc1, self.afc1, self.block.fc1, self.block.fc1x):
            x = torch.tanh(layer(x))
        return x


@functools.cache
def nested_base() -> onnx.ModelProto:
    return exported_by(Nested().eval(), torch.ones(2, 6), "dynamo")


@pytest.mark.parametrize("targets", [["fc1"], ["block.fc1"], ["afc1", "block.fc1x"]])
def test_peft_adapts_the_same_layers_and_no_others(targets: list[str], tmp_path: Path) -> None:
    module, x = Nested().eval(), np.random.default_rng(1).standard_normal((2, 6), np.float32)
    model = lora.add(copy.deepcopy(nested_base()), rank=2, targets=targets)
    model = with_values(model, random_adapter(model))
    lora.to_peft(model, tmp_path)
    wrapped = peft.PeftModel.from_pretrained(module, tmp_path).eval()
    assert wrapped_layers(wrapped) == set(targets)
    np.testing.assert_allclose(computed(wrapped, x), outputs(model, {"x": x})[0], atol=1e-5)


def test_layers_that_the_model_does_not_have(tmp_path: Path) -> None:
    module = encoder()
    wrapped = randomized(module, peft.LoraConfig(target_modules=["query"]), "model")
    wrapped.model.save_pretrained(tmp_path)
    other = exported_by(images(), torch.zeros(2, 3, 8, 8), "torchscript")
    with pytest.raises(ModelError, match=r"layer 'encoder.layer...attention.self.query': the mode"):
        lora.from_peft(other, tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_bias": True},
            r"the setting lora_bias=True is not supported, as it is not plain LoRA; train witho",
        ),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights 'pissa' changes the we"),
        (
            {"layer_replication": [[0, 1]]},
            r"the setting layer_replication=.* is not supported, as it is not plain",
        ),
    ],
)
def test_more_than_plain_lora_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    peft.LoraConfig(target_modules=["query"], **settings).save_pretrained(tmp_path)
    base = base_of(encoder, "torchscript")
    with pytest.raises(UnsupportedError, match=message):
        lora.from_peft(base, tmp_path)


def test_names_of_peft_are_kept(tmp_path: Path) -> None:
    module = encoder()
    wrapped = randomized(module, peft.LoraConfig(target_modules=["query"]), "model")
    wrapped.model.save_pretrained(tmp_path)
    base = base_of(encoder, "torchscript")
    added = [name for name in values(lora.from_peft(base, tmp_path)) if ".lora_" in name]
    assert added == [
        f"model.encoder.layer.{layer}.attention.self.query.lora_{which}.weight"
        for layer in (0, 1)
        for which in "AB"
    ]
