"""The options of `FineTuning` as axes, crossed with forms of models, and what has to hold.

A language model is one of PyTorch, which both of its exporters write, and the same weights are a
file of onnxruntime-genai. `check` tunes it as a draw says, and once more in PyTorch, in float64,
row by row, with an adapter, losses and schedules that are written down here. Losses of all steps
and the logits in the end have to agree. Then comes the check that a draw names in `also`.
"""

from __future__ import annotations

import functools
import itertools
import math
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from features import Rule, Shown, Space
from onnx import numpy_helper
from torch import nn
from torch_exports import quietly_exported

import ortops
from models import llama
from ortops import lora, losses, schedules
from ortops.engine.check import quiet
from ortops.engine.execution.settings import Settings
from ortops.engine.training import loaded_model
from ortops.llm import FineTuning
from ortops.losses import DPO, NextToken

Array = np.ndarray[Any, Any]

RATE, DECAY, CLIP, BETA, SMOOTHING, ALPHA = 0.02, 0.3, 0.3, 0.5, 0.2, 3
PARTS = {"q_proj": slice(0, 32), "k_proj": slice(32, 48), "v_proj": slice(48, 64)}
"""The columns of the fused layer of attention."""

EXPORTED = tuple(
    f"{kind}{exporter}"
    for kind in ("", "tied ", "twice ", "half ", "bfloat16 ")
    for exporter in ("dynamo", "torchscript", "training")
    if (kind, exporter) not in {("bfloat16 ", "torchscript"), ("bfloat16 ", "training")}
)
ROUNDED = tuple(model for model in EXPORTED if model.startswith(("half", "bfloat16")))

TARGETS: Mapping[str, Any] = {
    "": None,
    "some": ["o_proj", "gate_proj"],
    "parts": ["q_proj", "v_proj"],
    "not some": ["!down_proj", "!lm_head", "!embed_tokens"],
    "ends": ["embed_tokens", "lm_head", "up_proj"],
}
WITHOUT_AXIS = {
    "alpha": "a pattern gives a layer another one",
    "rank_pattern": "the axis patterns",
    "alpha_pattern": "the axis patterns",
    "learning_rate": "the axis rate",
    "clip_norm": "the axis clip",
    "task": "text encoders: tests/test_llm_encoders.py",
    "labels": "the same",
    "adapter": "the values peft and adapter file of the axis also",
    "seed": "it is drawn with the rows",
    "providers": "tests/test_webgpu.py and tests/test_gpu.py",
    "epochs": "two, with other rows in each step",
    "train_on": "tests/test_llm_chats.py",
    "shuffle": "the order is the session's own; see tests/test_llm.py",
    "group_by_length": "tests/test_llm.py",
    "packing": "tests/test_llm_packing.py",
    "validation": "the value evaluated of the axis also",
    "save": "the values interrupted and served of the axis also",
    "save_steps": "tests/test_llm.py",
    "columns": "tests/test_llm_texts.py",
    "label_smoothing": "the axis smoothing",
    "beta": "DPO has one that is not the default",
}
"""Arguments of `FineTuning` and its `fit` without an axis of their own, and why."""

FREE = ("rslora", "dora", "modules_to_save", "dropout", "patterns")
"""Arguments of an adapter that full fine-tuning does not have."""

AXES: Mapping[str, tuple[Any, ...]] = {
    "model": ("grouped", "int4", *EXPORTED),
    "loss": ("NextToken", "DPO"),
    "smoothing": (False, True),
    "rank": (2, 1, None),
    "targets": (*TARGETS,),
    "patterns": (False, True),
    "rslora": (False, True),
    "dora": (False, True),
    "dropout": (False, True),
    "modules_to_save": (None, "lm_head", "embed_tokens"),
    "bias": ("none", "all", "lora_only"),
    "optimizer": ("", "AdamW", "SGD", "Lion", "object"),
    "weight_decay": (False, True),
    "clip": (False, True),
    "rate": ("constant", "warmup_linear", "cosine"),
    "batch_size": (2, 1, 5),
    "accumulate": (1, 2),
    "max_steps": (None, 3),
    "max_length": (512, 4),
    "padding": ("right", "left"),
    "recompute": ("auto", None, "sqrt", 1),
    "embedding": ("in memory", "in file"),
    "also": (
        *("", "interrupted", "served", "merged", "saved merged", "peft", "adapter file"),
        *("evaluated", "entries", "continued"),
    ),
}
"""The values of each option, the simplest one first."""

Tuning = make_dataclass(
    "Tuning",
    [(name, Any, field(default=values[0])) for name, values in {**AXES, "seed": (0,)}.items()],
    bases=(Shown,),
    frozen=True,
    repr=False,
)

RULES = (
    Rule(
        "full fine-tuning has no adapter",
        lambda rank, targets: rank is None and targets != "",
    ),
    *(
        Rule(
            "full fine-tuning has no adapter",
            eval(f"lambda rank, {name}: rank is None and bool({name})"),
        )
        for name in FREE
    ),
    Rule("it trains biases, too", lambda rank, bias: rank is None and bias != "none"),
    Rule("its reference would be itself", lambda rank, loss: rank is None and loss == "DPO"),
    Rule(
        "quantized weights are not trained, and in 16 bits they are rounded in each step",
        lambda rank, model: rank is None and model in ("int4", *ROUNDED),
    ),
    Rule(
        "a full matrix of 4 bits is not trained",
        lambda modules_to_save, model: modules_to_save == "lm_head" and model == "int4",
    ),
    Rule(
        "rounded in each step",
        lambda modules_to_save, model: modules_to_save is not None and model in ROUNDED,
    ),
    Rule("rounded in each step", lambda bias, model: bias != "none" and model in ROUNDED),
    Rule(
        "one initializer of two modules, or two copies",
        lambda modules_to_save, model: modules_to_save is not None and model.startswith("tied"),
    ),
    Rule(
        "the exporter may write two copies",
        lambda rank, model: rank is None and model.startswith("tied"),
    ),
    Rule(
        "the reference of DPO is the model without the adapter",
        lambda loss, modules_to_save: loss == "DPO" and modules_to_save is not None,
    ),
    Rule(
        "the reference of DPO is the model without the adapter",
        lambda loss, bias: loss == "DPO" and bias != "none",
    ),
    Rule(
        "a module is trained as a whole or has an adapter",
        lambda modules_to_save, targets: modules_to_save is not None and targets == "ends",
    ),
    Rule(
        "these files have no biases",
        lambda model, bias: model in ("grouped", "int4") and bias != "none",
    ),
    Rule(
        "only a file of onnxruntime-genai tells the parts of a fused layer",
        lambda model, targets: targets == "parts" and model not in ("grouped", "int4"),
    ),
    Rule("which has no biases", lambda targets, bias: targets == "parts" and bias != "none"),
    Rule(
        "and counts tokens from the left",
        lambda targets, padding: targets == "parts" and padding == "left",
    ),
    Rule(
        "of other layers",
        lambda patterns, targets: patterns and targets not in ("", "not some"),
    ),
    Rule(
        "SGD has none, and an object has its own",
        lambda optimizer, weight_decay: optimizer in ("SGD", "object") and weight_decay,
    ),
    Rule(
        "an object has its own rate",
        lambda optimizer, rate: optimizer == "object" and rate != "constant",
    ),
    Rule(
        "this operator counts tokens from the left",
        lambda model, padding: model in ("grouped", "int4") and padding == "left",
    ),
    Rule(
        "answers would be cut off",
        lambda loss, max_length: loss == "DPO" and max_length != 512,
    ),
    Rule(
        "PEFT's files have an adapter",
        lambda rank, also: (
            rank is None and also in ("served", "merged", "peft", "adapter file", "entries")
        ),
    ),
    Rule(
        "merging rounds again",
        lambda model, also: (
            model in ("int4", *ROUNDED) and also in ("merged", "saved merged", "peft")
        ),
    ),
    Rule(
        "the exporter may write a copy for each call, which `ortops.surgery.tie` joins",
        lambda rank, model: rank is None and model.startswith("twice"),
    ),
    Rule(
        "onnxruntime does not run it on a CPU",
        lambda model, also: (
            model.startswith("bfloat16")
            and also not in ("interrupted", "evaluated", "entries", "continued")
        ),
    ),
    Rule(
        "signs of gradients that are nearly 0",
        lambda optimizer, model: optimizer == "Lion" and model in ROUNDED,
    ),
)

SPACE = Space(Tuning, AXES, RULES)
"""All combinations of these options."""


# ----------------------------------------------------------------------------- the model in PyTorch


class Linear(nn.Linear):
    """A linear layer that may have adapters."""

    def __init__(self, into: int, out: int, bias: bool = True) -> None:
        super().__init__(into, out, bias=bias)
        self.adapters: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight)
        for adapter in self.adapters:
            y = adapter(x, y)
        return y if self.bias is None else y + self.bias


class Embedding(nn.Embedding):
    """An embedding that may have an adapter."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__(count, size)
        self.adapters: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for adapter in self.adapters:
            y = adapter(x, y)
        return y


class Norm(nn.Module):
    """A root mean square normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(llama.HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    """Attention of two queries to one key, with rotary positions."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        width = (llama.HEADS + 2 * llama.PAIRS) * llama.SIZE
        self.qkv_proj = Linear(llama.HIDDEN, width, bias)
        self.o_proj = Linear(llama.HIDDEN, llama.HIDDEN, bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = x.shape[0], x.shape[1], llama.HEADS + 2 * llama.PAIRS, llama.SIZE
        y = self.qkv_proj(x).view(shape)
        q, k, v = y.transpose(1, 2).split([llama.HEADS, llama.PAIRS, llama.PAIRS], 1)
        half = torch.arange(0, llama.SIZE, 2, dtype=torch.float32) / llama.SIZE
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * 10000.0**-half
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        scores = rotated(q) @ rotated(k).transpose(-1, -2) * llama.SIZE**-0.5 + mask
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        return self.o_proj(y.reshape(x.shape[0], x.shape[1], llama.HIDDEN))


class MLP(nn.Module):
    """A gated layer."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj = Linear(llama.HIDDEN, llama.WIDE, bias)
        self.up_proj = Linear(llama.HIDDEN, llama.WIDE, bias)
        self.down_proj = Linear(llama.WIDE, llama.HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.attn, self.mlp = Attention(bias), MLP(bias)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    """A decoder without its head."""

    def __init__(self, bias: bool, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.embed_tokens = Embedding(llama.WORDS, llama.HIDDEN)
        self.layers = nn.ModuleList([Block(bias)])
        self.norm = Norm()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for _ in range(self.calls):
            x = self.layers[0](x, mask)
        return self.norm(x)


class Decoder(nn.Module):
    """A language model of one layer, which is called once or twice."""

    def __init__(self, bias: bool, calls: int) -> None:
        super().__init__()
        self.model = Inner(bias, calls)
        self.lm_head = Linear(llama.HIDDEN, llama.WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        place, dtype = torch.arange(input_ids.shape[1]), self.lm_head.weight.dtype
        seen = (place[:, None] >= place) & (attention_mask[:, None, None] > 0)
        least = -1e4 if dtype == torch.float16 else -1e9
        mask = torch.zeros(1, dtype=dtype).masked_fill(~seen, least)
        return self.lm_head(self.model(input_ids, mask))


def decoder_of(model: str) -> Decoder:
    """Returns the model in PyTorch, with the numbers that a file has, in float32."""
    torch.manual_seed(0)
    is_file = model in ("grouped", "int4")
    result = Decoder(not is_file, 2 if model.startswith("twice") else 1)
    if is_file:
        stored = {t.name: numpy_helper.to_array(t) for t in file_of(model).graph.initializer}
        result.load_state_dict(dict(_weights(stored)))
        return result
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name.endswith(("layernorm.weight", "norm.weight")):
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name:
                parameter.normal_()
            elif name.endswith("weight"):
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    if model.startswith("tied"):
        result.lm_head.weight = result.model.embed_tokens.weight
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16}.get(model.split()[0])
    return result if dtype is None else result.to(dtype).float()


def _weights(stored: Mapping[str, Array]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the weights of a file of onnxruntime-genai by their names in PyTorch."""
    for name, array in stored.items():
        base, _, kind = name.rpartition(".MatMul.weight")
        if kind == "_Q4":
            scales = stored[f"{base}.MatMul.weight_scales"]
            whole = np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:2], -1)
            values = (whole.astype(np.float32) - 8) * scales.reshape(*array.shape[:2], 1)
            yield f"{base}.weight", torch.from_numpy(values.reshape(len(values), -1).copy())
        elif base and not kind:
            yield f"{base}.weight", torch.from_numpy(array.T.copy())
        elif name.endswith("norm.weight") or "embed" in name:
            known = name.replace("layers.1.final_norm_layernorm", "norm")
            yield known, torch.from_numpy(array.copy())


@functools.cache
def file_of(model: str) -> onnx.ModelProto:
    """Returns the file that a draw is about."""
    if model in ("grouped", "int4"):
        return llama.llama(bits=4 if model == "int4" else 32, layers=1)
    module = decoder_of(model)
    kind, exporter = model.split()[0], model.split()[-1]
    module = {"half": module.half, "bfloat16": module.bfloat16}.get(kind, module.float)()
    ids, mask = torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    return quietly_exported(
        *(module.eval(), {"input_ids": ids, "attention_mask": mask}),
        exporter=exporter,
        axes={0: "batch", 1: "time"},
        output="logits",
    )


# ---------------------------------------------------------------------------- the same in PyTorch


def answers(draw: Any) -> list[dict[str, Any]]:
    """Returns the rows that are trained."""
    rng = np.random.default_rng(draw.seed)

    def tokens(count: int) -> list[int]:
        return [int(each) for each in rng.integers(0, llama.WORDS - 4, count)]

    if draw.loss == "DPO":
        sizes = ((2, 3, 4), (3, 2, 2), (1, 5, 2), (2, 2, 3), (4, 1, 2))
        return [dict(zip(("prompt", "chosen", "rejected"), map(tokens, s))) for s in sizes]  # noqa: B905
    rows = [{"input_ids": tokens(count)} for count in (6, 3, 5, 2, 4)]
    for row in rows[:3]:
        row["labels"] = [-100, *row["input_ids"][1:]]
        row["labels"][-1 if len(row["labels"]) > 4 else 1] = -100
    return rows


class Oracle:
    """The model in PyTorch, in float64, with what is trained.

    Args:
        draw: What is trained, and how.
        first: The first values of what is trained, by the names in the session.

    Attributes:
        parameters: What is trained.
    """

    def __init__(self, draw: Any, first: Mapping[str, Array]) -> None:
        self._draw = draw
        self._module = decoder_of(draw.model).double().requires_grad_(False)
        self.parameters = {
            name: nn.Parameter(torch.from_numpy(array.astype(np.float64)))
            for name, array in first.items()
        }
        self.scales, self.own = dict[str, float](), set[str]()
        own = dict(self._module.named_parameters())
        self._reference = self._module
        if draw.loss == "DPO":
            self._reference = decoder_of(draw.model).double().requires_grad_(False)
        for name, parameter in self.parameters.items():
            layer, _, kind = name.partition(".lora_")
            if kind == "A.weight":
                self._adapt(layer)
            elif not kind:
                self._train(own, name, parameter)
        self.take(first)

    def _train(self, own: dict[str, Any], name: str, parameter: nn.Parameter) -> None:
        """Trains a weight of the model itself, which may be transposed."""
        for key, weight in own.items():
            for turned in {False, parameter.ndim == 2}:
                value = parameter.T if turned else parameter
                if value.shape == weight.shape and torch.equal(value, weight):
                    path, _, last = key.rpartition(".")
                    _replace(self._module.get_submodule(path), last, parameter, turned)
                    self.own.add(key)
                    return
        raise AssertionError(f"'{name}' is trained, but the model has no such weight")

    def _adapt(self, layer: str) -> None:
        path, _, last = layer.rpartition(".")
        part = PARTS.get(last)
        module = self._module.get_submodule(f"{path}.qkv_proj" if part else layer)
        a, b, m = (
            self.parameters.get(f"{layer}.lora_{kind}.weight")
            for kind in ("A", "B", "magnitude_vector")
        )
        rank, alpha = self._settings(last)
        assert a.shape[1] == rank, f"'{layer}' has the rank {a.shape[1]}, not {rank}"
        assert (m is not None) == self._draw.dora
        scale = alpha / (math.sqrt(rank) if self._draw.rslora else rank)
        self.scales[f"{layer}.lora_B.weight"] = scale
        weight = module.weight if isinstance(module, Embedding) else module.weight.T
        weight = weight[:, part] if part else weight

        def adapted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            lower = a[x] if isinstance(module, Embedding) else x @ a
            change = scale * lower @ b
            own = y[..., part] if part else y
            result = own + change
            if m is not None:
                result = result * (m / (weight + scale * a @ b).detach().norm(dim=0))
            if not part:
                return result
            return torch.cat([y[..., : part.start], result, y[..., part.stop :]], -1)

        module.adapters.append(adapted)

    def _settings(self, layer: str) -> tuple[int, float]:
        if self._draw.patterns and layer == "up_proj":
            return 3, ALPHA
        if self._draw.patterns and layer == "o_proj":
            return self._draw.rank, 5
        return self._draw.rank, ALPHA

    def take(self, values: Mapping[str, Array]) -> None:
        """Takes the values of what is trained. In a file, B has the scaling."""
        for name, array in values.items():
            value = torch.from_numpy(array.astype(np.float64)) / self.scales.get(name, 1)
            self.parameters[name].data = value

    def logits(self, ids: list[int], *, plain: bool = False) -> torch.Tensor:
        """Returns the logits of one row."""
        given = torch.tensor([ids])
        module = self._reference if plain else self._module
        return module(given, torch.ones_like(given))[0]

    def of_row(self, row: Any, smoothing: float) -> tuple[torch.Tensor, int]:
        """Returns the sum of the losses of a row, and their number."""
        if self._draw.loss == "DPO":
            margins = [self._ratio(row["prompt"], row[key]) for key in ("chosen", "rejected")]
            margin = BETA * (margins[0] - margins[1])
            log = nn.functional.logsigmoid
            return -(1 - smoothing) * log(margin) - smoothing * log(-margin), 1
        ids = row["input_ids"][: self._draw.max_length]
        labels = torch.tensor(row.get("labels", row["input_ids"])[: len(ids)])[1:]
        settings: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
        loss = nn.functional.cross_entropy(self.logits(ids)[:-1], labels, **settings)
        return loss, int((labels != -100).sum())

    def _ratio(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        found, ids = [], prompt + answer
        for plain in (False, True):
            chosen = self.logits(ids, plain=plain).log_softmax(-1)[:-1]
            each = chosen[range(len(ids) - 1), ids[1:]]
            found.append(each[len(prompt) - 1 :].sum())
        return found[0] - found[1]

    def loss(self, rows: list[Any]) -> torch.Tensor:
        """Returns the mean loss of rows."""
        smoothing = SMOOTHING * self._draw.smoothing
        sums, counts = zip(*(self.of_row(row, smoothing) for row in rows), strict=True)
        return sum(sums) / sum(counts)

    def train(self, steps: list[list[Any]]) -> list[float]:
        """Trains; returns the loss of each step."""
        draw, rate = self._draw, RATE
        parameters = [*self.parameters.values()]
        if draw.optimizer == "SGD":
            optimizer: Any = torch.optim.SGD(parameters, rate)
        elif draw.optimizer == "Lion":
            optimizer = Lion(parameters, rate, DECAY * draw.weight_decay)
        elif draw.optimizer == "object":
            optimizer = torch.optim.AdamW(parameters, rate, (0.8, 0.9), 1e-3, DECAY)
        else:
            decays = draw.optimizer == "AdamW" or draw.weight_decay
            decay = DECAY if draw.weight_decay else 0.01
            optimizer = torch.optim.AdamW(parameters, rate, weight_decay=decay * decays)
        result = []
        for number, rows in enumerate(steps):
            optimizer.param_groups[0]["lr"] = rate * self._factor(number, len(steps))
            optimizer.zero_grad()
            loss = self.loss(rows)
            loss.backward()
            if draw.clip:
                nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            result.append(float(loss.detach()))
        return result

    def _factor(self, number: int, count: int) -> float:
        if self._draw.rate == "cosine":
            return (1 + math.cos(math.pi * number / count)) / 2
        warmup = math.ceil(count * 0.4)
        if self._draw.rate == "warmup_linear":
            return number / warmup if number < warmup else (count - number) / (count - warmup)
        return 1.0


def _replace(module: nn.Module, name: str, parameter: nn.Parameter, turned: bool) -> None:
    """Makes a module read another tensor in place of a parameter of its own."""
    del module._parameters[name]
    read = (lambda self: parameter.T) if turned else (lambda self: parameter)
    module.__class__ = type(type(module).__name__, (type(module),), {name: property(read)})


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, with decoupled weight decay."""

    def __init__(self, parameters: Any, rate: float, decay: float) -> None:
        super().__init__(parameters, {"lr": rate})
        self._decay, self._moments = decay, dict[Any, torch.Tensor]()

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for x in group["params"]:
            m, g = self._moments.get(x, torch.zeros_like(x)), x.grad
            x *= 1 - group["lr"] * self._decay
            x -= group["lr"] * (0.9 * m + 0.1 * g).sign()
            self._moments[x] = 0.99 * m + 0.01 * g


# ------------------------------------------------------------------------------------- the check


def arguments_of(draw: Any) -> dict[str, Any]:
    """Returns the arguments of `FineTuning`."""
    rate: Any = {
        "constant": RATE,
        "cosine": schedules.cosine(RATE),
        "warmup_linear": schedules.warmup_linear(RATE, warmup=0.4),
    }[draw.rate]
    smoothing = SMOOTHING * draw.smoothing
    loss: Any = NextToken(label_smoothing=smoothing)
    if draw.loss == "DPO":
        loss = DPO(beta=BETA, label_smoothing=smoothing)
    given: dict[str, Any] = {"rank": draw.rank, "learning_rate": rate, "loss": loss}
    given |= {"recompute": draw.recompute, "optimizer": draw.optimizer or None}
    if draw.optimizer == "object":
        del given["learning_rate"]
        given["optimizer"] = ortops.optimizers.AdamW(
            RATE, 0.8, 0.9, 1e-3, weight_decay=DECAY, epsilon_after_correction=True
        )
    given |= {"weight_decay": DECAY} if draw.weight_decay else {}
    given |= {"clip_norm": CLIP} if draw.clip else {}
    if draw.rank is None:
        return given
    given |= {"alpha": ALPHA, "targets": TARGETS[draw.targets], "rslora": draw.rslora}
    given |= {"dora": draw.dora, "modules_to_save": draw.modules_to_save, "bias": draw.bias}
    given |= {"dropout": 0.3} if draw.dropout else {}
    given |= {"seed": draw.seed}
    if draw.patterns:
        given |= {"rank_pattern": {"up_proj": 3}, "alpha_pattern": {"o_proj": 5}}
    return given


def settings_of(draw: Any) -> dict[str, Any]:
    """Returns the arguments of its `fit`."""
    names = ("batch_size", "accumulate", "max_steps", "max_length", "padding")
    given = {name: getattr(draw, name) for name in names}
    return given | {"epochs": 2, "shuffle": False, "progress": False}


def steps_of(draw: Any, rows: list[Any]) -> list[list[Any]]:
    """Returns the rows of each step."""
    size = draw.batch_size * draw.accumulate
    epoch = [rows[start : start + size] for start in range(0, len(rows), size)]
    return (epoch * 2)[: draw.max_steps]


class Noting(ortops.callbacks.Callback):
    """Notes the loss of each step, and may interrupt the training."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.losses = after, list[float]()

    def on_step(self, record: Any, session: Any) -> None:
        self.losses.append(record.values["loss"])
        if session.steps_done == self.after:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def base_of(draw: Any) -> Iterator[Path]:
    """Makes a folder of the model, in a folder of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "base")
        path.mkdir()
        if draw.model in ("grouped", "int4"):
            llama.write(path, bits=4 if draw.model == "int4" else 32, layers=1)
        onnx.save(file_of(draw.model), path / "model.onnx")
        yield path


def computed(model: Any, rows: list[list[int]], adapter: Path | None = None) -> list[Array]:
    """Returns the logits of rows that stock onnxruntime computes."""
    given = model if isinstance(model, str) else model.SerializeToString()
    session = onnxruntime.InferenceSession(given, providers=["CPUExecutionProvider"])
    options, active = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    if adapter is not None:
        active.Load(str(adapter))
        options.add_active_adapter(active)
    result = []
    for row in rows:
        feeds: dict[str, Any] = {"input_ids": np.array([row])}
        feeds["attention_mask"] = np.ones_like(feeds["input_ids"])
        for value in session.get_inputs():
            if value.name.startswith("past"):
                feeds[value.name] = np.zeros((1, llama.PAIRS, 0, llama.SIZE), np.float32)
        result.append(session.run(["logits"], feeds, options)[0][0].astype(np.float64))
    return result


def near(found: Any, expected: Any, draw: Any, what: str, size: float = 1) -> None:
    """Asserts that numbers are equal, up to the rounding of the model's type."""
    tolerance = size * (3e-2 if draw.model in ROUNDED else 2e-4)
    np.testing.assert_allclose(found, expected, tolerance, tolerance, err_msg=what)


def expected_names(draw: Any) -> set[str]:
    """Returns what of the model is to be trained: layers with an adapter, and weights."""
    linear = ["attn.qkv_proj", "attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    every = [f"model.layers.0.{layer}" for layer in linear]
    module = decoder_of(draw.model)
    if draw.rank is None:
        return {name for name, _ in module.named_parameters()}
    chosen = TARGETS[draw.targets]
    if draw.targets == "parts":
        names = {f"model.layers.0.attn.{part}" for part in chosen}
    elif draw.targets in ("", "not some"):
        out = {name.lstrip("!") for name in chosen or ()}
        names = {name for name in every if name.rpartition(".")[2] not in out}
    else:
        every += ["model.embed_tokens", "lm_head"]
        names = {name for name in every if name.rpartition(".")[2] in chosen}
    weights = set()
    if draw.modules_to_save is not None:
        inner = "model." * (draw.modules_to_save == "embed_tokens")
        weights = {f"{inner}{draw.modules_to_save}.weight"}
    for name, _ in module.named_parameters():
        owner, _, last = name.rpartition(".")
        if last == "bias" and (draw.bias == "all" or (draw.bias == "lora_only" and owner in names)):
            weights.add(name)
    return names | weights


def check(draw: Any) -> None:
    """Checks a draw.

    Raises:
        AssertionError: If something does not hold.
    """
    least = 1000 if draw.embedding == "in file" else 2**60
    settings = functools.partial(Settings, looked_up=least)
    with quiet(), base_of(draw) as base, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded_model, "Settings", settings)
        _check(draw, base)


def _check(draw: Any, base: Path) -> None:
    rows, given = answers(draw), arguments_of(draw)
    tuning, seen = FineTuning(base, **given), Noting()
    first = {name: np.array(array) for name, array in tuning.session.parameters.items()}
    oracle = Oracle(draw, first)
    layers = {name.partition(".lora_")[0] for name in first if ".lora_" in name}
    assert layers | oracle.own == expected_names(draw)
    tuning.fit(rows, callbacks=[seen], **settings_of(draw))
    steps = steps_of(draw, rows)
    assert tuning.session.steps_done == len(steps) == len(seen.losses)
    expected = oracle.train(steps)
    if draw.dropout:  # whose random numbers are the session's own
        assert np.isfinite(seen.losses).all()
    else:
        near(seen.losses, expected, draw, "losses of steps")
    last = Oracle(draw, first)
    last.take(tuning.session.parameters)
    texts = [[*range(1, 8)], [9, 8, 7]]
    with torch.no_grad():
        logits = [last.logits(text).numpy() for text in texts]
    is_run = not draw.model.startswith("bfloat16")
    plain = computed(str(base / "model.onnx"), texts) if is_run else []
    _CHECKS[draw.also](draw, base, tuning, (texts, logits, plain))


def _compare(found: list[Array], expected: list[Array], draw: Any, what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        near(one, other, draw, what, 10)


def _check_logits(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    _compare(computed(tuning.session.inference_model(), known[0]), known[1], draw, "logits")


def _check_interrupted(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    other, saved = FineTuning(base, **arguments_of(draw)), base.parent / "saved"
    rows, settings = answers(draw), settings_of(draw)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        other.fit(rows, save=saved, callbacks=[Noting(1)], **settings)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, handler)
    again = FineTuning.load(saved, draw.recompute)
    again.fit(rows, save=saved, resume=True, **settings)
    _same(again, tuning)
    _same(FineTuning.load(saved, draw.recompute), tuning)


def _same(found: FineTuning, expected: FineTuning) -> None:
    state = expected.session.state
    assert found.session.state.keys() == state.keys()
    for name, array in found.session.state.items():
        np.testing.assert_array_equal(array, state[name], name)
    found_history, history = ([*each.session.history] for each in (found, expected))
    for one, other in itertools.zip_longest(found_history, history, fillvalue={}):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def _check_served(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    folder, (texts, logits, plain) = base.parent / "tuned", known
    tuning.save(folder)
    file, adapter = str(folder / "model.onnx"), folder / "adapter.onnx_adapter"
    _compare(computed(file, texts, adapter), logits, draw, "with the adapter")
    _compare(computed(file, texts), plain, draw, "without the adapter")
    again = FineTuning.load(folder)
    again.save(base.parent / "again")
    file, adapter = (
        str(base.parent / "again/model.onnx"),
        base.parent / "again/adapter.onnx_adapter",
    )
    _compare(computed(file, texts, adapter), logits, draw, "loaded and saved")
    _compare(computed(file, texts), plain, draw, "loaded and saved, without the adapter")


def _check_merged(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    model = lora.merge(tuning.session.inference_model())
    assert not [t.name for t in model.graph.initializer if ".lora_" in t.name]
    _compare(computed(model, known[0]), known[1], draw, "merged")


def _check_saved_merged(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    tuning.save(base.parent / "merged", merged=True)
    found = computed(str(base.parent / "merged" / "model.onnx"), known[0])
    _compare(found, known[1], draw, "saved merged")


def _check_peft(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    model, folder = tuning.session.inference_model(), base.parent / "peft"
    lora.to_peft(model, folder)
    back = lora.from_peft(file_of(draw.model), folder)
    _compare(computed(back, known[0]), known[1], draw, "from PEFT")
    other = {"loss": arguments_of(draw)["loss"]}
    begun = FineTuning(base, adapter=folder, **other)
    rows = answers(draw)
    near(begun.evaluate(rows)["loss"], tuning.evaluate(rows)["loss"], draw, "begun from PEFT")


def _check_adapter_file(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    model, file = tuning.session.inference_model(), base.parent / "a.onnx_adapter"
    lora.save_adapter(model, file)
    same = lora.load_adapter(model, file)
    _compare(computed(same, known[0]), known[1], draw, "loaded into its model")
    begun = FineTuning(base, adapter=file, **arguments_of(draw))
    rows = answers(draw)
    near(begun.evaluate(rows)["loss"], tuning.evaluate(rows)["loss"], draw, "begun from a file")


def _check_evaluated(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    rows = answers(draw)
    oracle = Oracle(draw, FineTuning(base, **arguments_of(draw)).session.parameters)
    oracle.take(tuning.session.parameters)
    settings = {"batch_size": 3, "max_length": draw.max_length}
    with torch.no_grad():
        expected = float(oracle.loss(rows))
    near(tuning.evaluate(rows, **settings)["loss"], expected, draw, "evaluated")


def _check_entries(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    """A file with another algorithm has the same steps of the first one."""
    model = lora.add(file_of(draw.model), 1, targets=["o_proj"])
    built = ortops.build_training_model(
        model, loss=losses.NextToken("logits"), optimizer="SGD", trainable="*.lora_A.weight"
    )
    both = ortops.add_training(
        built,
        loss=losses.NextToken("logits"),
        optimizer="Adam",
        trainable="*.lora_B.weight",
        name="second",
    )
    session = ortops.TrainingSession(both, outputs=[])
    ids = np.array([[1, 2, 3, 4]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    first = session.step(feeds, entry="second")["loss"]
    assert session.step(feeds, entry="main")["loss"] < first


def _check_continued(draw: Any, base: Path, tuning: FineTuning, known: Any) -> None:
    """A folder that is loaded continues like the training that wrote it."""
    tuning.save(base.parent / "tuned")
    again = FineTuning.load(base.parent / "tuned", draw.recompute)
    settings = settings_of(draw) | {"max_steps": None}
    for each in (tuning, again):
        each.fit(answers(draw), **settings)
    for name, array in again.session.state.items():
        np.testing.assert_array_equal(array, tuning.session.state[name], name)


_CHECKS: Mapping[str, Callable[[Any, Path, FineTuning, Any], None]] = {
    "": _check_logits,
    "interrupted": _check_interrupted,
    "served": _check_served,
    "merged": _check_merged,
    "saved merged": _check_saved_merged,
    "peft": _check_peft,
    "adapter file": _check_adapter_file,
    "evaluated": _check_evaluated,
    "entries": _check_entries,
    "continued": _check_continued,
}
