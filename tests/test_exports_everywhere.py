"""Files of PyTorch's exporters, passed to every public entry: each works, or says why not.

Modules of a few layers, one for each way in which users' files differ: layers that behave otherwise
in training, symbols of every kind, one sequence at a time, a fixed batch, several outputs, integers
in and out, a scalar, float16. Both exporters write them, in evaluation or training mode. No entry
ends in an exception that is not ortops' own, and in one of these only where `REFUSED` says so.

An entry takes a quarter of the files, those of dynamo included; with ORTOPS_ENTRIES=all, all files.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from running import run
from test_exported_models import quiet_exporters  # noqa: F401  a fixture for every test
from torch import nn
from violations import all_violations

import ortops
from ortops import attribution, derivatives, lora, surgery, weights
from ortops.cli import main as command_line
from ortops.losses import L1, MeanSquaredError

pytestmark = [pytest.mark.torch, pytest.mark.slow]

Array = np.ndarray[Any, Any]
Axes = Mapping[str, Mapping[int, Any]]
BATCH, TIME = {0: "batch"}, {0: "batch", 1: "time"}
BOTH = ("evaluation", "training")


# ------------------------------------------------------------------------------------- the modules


class Layers(nn.Module):
    """Convolution, normalization and dropout, which differ in training; ends in a Softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.normal = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.depth, self.drop = nn.Conv2d(4, 4, 3, groups=4), nn.Dropout(0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.normal(self.first(x))), 2)
        return torch.softmax(self.head(self.drop(self.depth(x).mean((2, 3)))), dim=-1)


class Tagger(nn.Module):
    """Attention with a mask, one row of which may be masked entirely, over a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.heads = nn.Embedding(11, 8), nn.Linear(8, 24)
        self.normal = nn.LayerNorm(8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = (
            part.view(*ids.shape, 2, 4).transpose(1, 2) for part in self.heads(x).chunk(3, -1)
        )
        seen = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool())
        return self.normal(x + seen.transpose(1, 2).flatten(2)) @ self.embedding.weight.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x)[0])


class Policy(nn.Module):
    """A scalar factor, a fixed matrix, and a second output that only a weight decides."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(0.7))
        self.log_std = nn.Parameter(torch.zeros(3))
        self.register_buffer("eye", torch.eye(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.mean(x) * self.scale.exp() @ self.eye
        return y, self.log_std.expand_as(y)


class Query(nn.Module):
    """Products with vectors, and an output of integers beside one of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.softmax(self.keys(x) @ self.query, -1)
        y = nn.functional.linear(
            (seen[..., None] * x).sum(1), torch.round(self.keys.weight / 0.1) * 0.1
        )
        return y.argmax(-1), torch.cat([y, y[:, :1]], 1)


class Sequence(nn.Module):
    """One sequence at a time: the batch is 1, and the only symbol is time."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x).flatten()


class Energy(nn.Module):
    """A scalar of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.layer(x)) * z).sum()


class Fixed(nn.Module):
    """A batch of 2, which is also in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).reshape(2, 2, 3).mean(1))


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(2, 2, 1).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x)


@dataclass(frozen=True)
class Example:
    """A module, its inputs, and how to export it.

    Attributes:
        build: Makes the module.
        inputs: Makes the inputs.
        axes: The symbols of axes; None is an axis for which the exporter chooses one.
        outputs: The names of the outputs.
        modes: The modes in which the file differs.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    axes: Axes = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    modes: tuple[str, ...] = BOTH[:1]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


EXAMPLES = {
    "layers": Example(Layers, lambda: {"x": normal(2, 3, 8, 8)}, {"x": BATCH}, modes=BOTH),
    "tagger": Example(
        Tagger,
        lambda: {
            "ids": torch.randint(0, 11, (2, 5)),
            "mask": torch.tensor([[1] * 5, [0] * 5]),
        },
        {"ids": TIME, "mask": TIME},
    ),
    "recurrent": Example(
        Recurrent, lambda: {"x": normal(2, 5, 3)}, {"x": {0: None, 1: None}}, modes=BOTH[1:]
    ),
    "policy": Example(Policy, lambda: {"x": normal(2, 4)}, {"x": BATCH}, ("y", "spread")),
    "query": Example(
        Query, lambda: {"x": normal(2, 5, 4)}, {"x": BATCH}, ("best", "y"), modes=BOTH[1:]
    ),
    "sequence": Example(Sequence, lambda: {"x": normal(1, 1, 7)}, {"x": {2: "time"}}),
    "energy": Example(
        Energy, lambda: {"x": normal(2, 4), "z": normal(2, 3)}, {"x": BATCH, "z": BATCH}
    ),
    "fixed": Example(Fixed, lambda: {"x": normal(2, 4)}, modes=BOTH[1:]),
    "half": Example(Half, lambda: {"x": normal(2, 2, 5).half()}, {"x": BATCH}),
}


def exported(
    example: Example, exporter: str, mode: str
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Returns the file of a module, and its inputs as arrays."""
    torch.manual_seed(20)
    inputs, module = example.inputs(), example.build().train(mode == "training")
    settings: dict[str, Any] = {"input_names": [*inputs], "output_names": [*example.outputs]}
    if exporter == "TorchScript":
        axes = {
            n: list(each) if None in each.values() else each for n, each in example.axes.items()
        }
        settings |= {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
        if mode == "training":
            training = torch.onnx.TrainingMode.TRAINING
            settings |= {"training": training, "do_constant_folding": False}
    else:
        chosen: dict[Any, Any] = {None: torch.export.Dim.DYNAMIC}
        chosen |= {symbol: torch.export.Dim(symbol) for symbol in ("batch", "time")}
        shapes = [{k: chosen[v] for k, v in example.axes.get(n, {}).items()} for n in inputs]
        settings |= {"dynamo": True, "verbose": False, "optimize": mode == "evaluation"}
        settings |= {"dynamic_shapes": tuple(shapes)}
    file, said = io.BytesIO(), io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(said):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        made = torch.onnx.export(module, tuple(inputs.values()), file, **settings)
    model = onnx.load_from_string(file.getvalue()) if made is None else made.model_proto
    return model, {name: tensor.numpy() for name, tensor in inputs.items()}


# ------------------------------------------------------------------------------------- the entries


class File:
    """An exported file, and what is made of it once for all entries.

    Attributes:
        model: The model.
        path: Its file.
        feeds: Its inputs.
        outputs: What onnxruntime computes.
        y: Its first floating-point output.
    """

    def __init__(self, model: onnx.ModelProto, feeds: dict[str, Array], path: Path) -> None:
        self.model, self.feeds, self.path = model, feeds, path
        onnx.save(model, path)
        names = [output.name for output in model.graph.output]
        self.outputs = dict(zip(names, run(model, feeds), strict=True))
        self.y = next(name for name, array in self.outputs.items() if array.dtype.kind == "f")

    @cached_property
    def function(self) -> ortops.Function:
        return ortops.Function(self.model, outputs=[self.y])

    @property
    def loss(self) -> MeanSquaredError:
        return MeanSquaredError(self.y)

    @cached_property
    def wrt(self) -> list[str]:
        """What is differentiated: the floating-point inputs, or else a weight."""
        floats = [name for name, array in self.feeds.items() if array.dtype.kind == "f"]
        return floats or [next(n for n, a in self.function.parameters.items() if a.ndim)]

    @cached_property
    def vectors(self) -> tuple[Array, ...]:
        known = {**self.function.parameters, **self.feeds}
        return tuple(np.ones_like(known[name]) for name in self.wrt)

    @cached_property
    def trainable(self) -> onnx.ModelProto:
        return ortops.build_training_model(self.model, loss=self.loss, optimizer="Adam")

    @cached_property
    def session(self) -> ortops.TrainingSession:
        return ortops.TrainingSession(self.trainable)

    @property
    def trained(self) -> str:
        """One of the weights that are trained by default."""
        return next(iter(self.session.parameters))

    @cached_property
    def data(self) -> dict[str, Array]:
        return {**self.feeds, "targets": np.zeros_like(self.outputs[self.y])}

    def beside(self, suffix: str) -> Path:
        return self.path.with_suffix(suffix)

    def runs(self, model: onnx.ModelProto) -> None:
        """Runs a model that was made of this one, with ones for the inputs that it has more."""
        known = {**self.function.parameters, **self.feeds, **self.outputs}
        seeds = {v.name: known.get(v.name.removeprefix("seed_")) for v in model.graph.input}
        run(
            model,
            self.feeds | {n: np.ones_like(a) for n, a in seeds.items() if n not in self.feeds},
        )

    def commands(self, *arguments: str) -> None:
        """Runs the command line, which raises what it would print the traceback of."""
        onnx.save(self.trainable, self.beside(".trainable.onnx"))
        np.savez(self.beside(".npz"), **self.data)
        command, *others = (each.format(self.path.with_suffix("")) for each in arguments)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert command_line([command, "--debug", *others]) in (0, int(command == "check"))


Entry = Callable[[File], Any]


def called(f: File) -> None:
    np.testing.assert_allclose(f.function(**f.feeds), f.outputs[f.y], rtol=1e-3, atol=1e-3)


def pulled_back(f: File) -> None:
    y, pullback = f.function.vjp(**f.feeds, wrt=f.wrt)
    pullback(np.ones_like(y))


def mapped(f: File) -> None:
    f.function.vmap()(**{name: np.stack([array] * 2) for name, array in f.feeds.items()})


def fitted(**settings: Any) -> Entry:
    return lambda f: f.session.fit(f.data, batch_size=2, progress=False, **settings)


def saved(f: File) -> None:
    f.session.save(f.beside(".saved.onnx"))
    ortops.TrainingSession(f.beside(".saved.onnx"))


def exchanged(f: File) -> None:
    weights.save(f.model, f.beside(".safetensors"))
    weights.match(f.model, f.beside(".safetensors"))
    f.runs(weights.load(f.model, f.beside(".safetensors")))


ENTRIES: dict[str, Entry] = {
    "Function()": called,
    "Function.vjp": pulled_back,
    "Function.jvp": lambda f: f.function.jvp(tuple(f.feeds.values()), f.vectors, wrt=f.wrt),
    "Function.jacobian": lambda f: f.function.jacobian(**f.feeds, wrt=f.wrt),
    "Function.value_and_grad": lambda f: f.function.value_and_grad(**f.feeds, wrt=f.wrt),
    "Function.hessian": lambda f: f.function.hessian(**f.feeds, wrt=f.wrt),
    "Function.hvp": lambda f: f.function.hvp(tuple(f.feeds.values()), f.vectors, wrt=f.wrt),
    "Function.vmap": mapped,
    "Function.reading": lambda f: f.function.reading([next(iter(f.function.parameters))]),
    "gradient": lambda f: f.runs(derivatives.gradient(f.model, xs=f.wrt, y=f.y, lowered=True)),
    "vjp": lambda f: f.runs(derivatives.vjp(f.model, xs=f.wrt, y=f.y, lowered=True)),
    "jvp": lambda f: f.runs(derivatives.jvp(f.model, xs=f.wrt, y=f.y, lowered=True)),
    "hvp": lambda f: f.runs(derivatives.hvp(f.model, xs=f.wrt, y=f.y, lowered=True)),
    "jacobian": lambda f: f.runs(derivatives.jacobian(f.model, xs=f.wrt, y=f.y, lowered=True)),
    "vmap": lambda f: derivatives.vmap(f.model),
    "per_sample_gradient": lambda f: derivatives.per_sample_gradient(f.model, loss=f.loss),
    "lower": lambda f: f.runs(ortops.lower(f.model)),
    "lower for onnxruntime": lambda f: ortops.lower(f.trainable, target="onnxruntime"),
    "step_graph": lambda f: ortops.step_graph(f.trainable),
    "build": lambda f: ortops.build_training_model(
        f.model, loss=f.loss, optimizer="AdamW", trainable=["*"], clip_norm=1.0, ema_decay=0.9
    ),
    "add_training": lambda f: ortops.add_training(
        ortops.build_training_model(f.model, loss=f.loss, optimizer="SGD", trainable=[f.trained]),
        name="second",
        loss=L1(f.y, target="others"),
        optimizer="SGD",
    ),
    "step": lambda f: f.session.step(f.data),
    "run_steps": lambda f: f.session.run_steps([f.data, f.data]),
    "gradients and apply": lambda f: f.session.apply(f.session.gradients(f.data)),
    "evaluate": lambda f: f.session.evaluate(f.data, batch_size=2),
    "evaluate a list": lambda f: f.session.evaluate([f.data], metrics=["mae"]),
    "predict": lambda f: f.session.predict(f.feeds, batch_size=2),
    "predict a list": lambda f: f.session.predict([f.feeds]),
    "fit": fitted(metrics=["mae"], train_metrics=True, accumulate=2),
    "fit with validation": fitted(validation_split=0.5, metrics=["mae"]),
    "fit a list": lambda f: f.session.fit([f.data], progress=False),
    "report": lambda f: str(f.session.report()),
    "inference_model": lambda f: f.runs(f.session.inference_model()),
    "inference_model of the original": lambda f: f.runs(f.session.inference_model(f.path)),
    "save": saved,
    "with_trainable": lambda f: f.session.with_trainable([f.trained]),
    "recompute": lambda f: ortops.TrainingSession(f.trainable, recompute="sqrt").step(f.data),
    "find_batch_size": lambda f: ortops.find_batch_size(f.session, f.data, largest=2),
    "find_learning_rate": lambda f: ortops.find_learning_rate(
        f.session, f.data, steps=10, batch_size=2
    ),
    "export_step": lambda f: ortops.export_step(f.trainable, f.beside(".step")),
    "InferenceSession": lambda f: ortops.InferenceSession(f.path).run(None, f.feeds),
    "free_batch": lambda f: f.runs(surgery.free_batch(f.model)),
    "fix_inputs": lambda f: surgery.fix_inputs(f.model, dict(list(f.feeds.items())[:1])),
    "name_output": lambda f: surgery.name_output(f.model, f.model.graph.node[0].output[0]),
    "replace_head": lambda f: f.runs(surgery.replace_head(f.model, classes=7, output=f.y)),
    "prune": lambda f: f.runs(surgery.prune(f.model, 0.5)),
    "untie": lambda f: f.runs(surgery.untie(f.model)),
    "before_postprocessing": lambda f: surgery.before_postprocessing(f.model),
    "lora.add": lambda f: f.runs(lora.add(f.model)),
    "weights": exchanged,
    "saliency": lambda f: f.runs(attribution.saliency(f.model)),
    "integrated_gradients": lambda f: f.runs(attribution.integrated_gradients(f.model, steps=3)),
    "grad_cam": lambda f: f.runs(attribution.grad_cam(f.model)),
    "smooth_grad": lambda f: f.runs(attribution.smooth_grad(f.model, samples=2)),
    "ortops check": lambda f: f.commands("check", "{}.onnx"),
    "ortops check --loss": lambda f: f.commands("check", "--loss", "MeanSquaredError", "{}.onnx"),
    "ortops check of a trainable file": lambda f: f.commands("check", "{}.trainable.onnx"),
    "ortops inspect": lambda f: f.commands("inspect", "{}.onnx"),
    "ortops inspect of a trainable file": lambda f: f.commands("inspect", "{}.trainable.onnx"),
    "ortops eval": lambda f: f.commands(
        "eval", "{}.trainable.onnx", "--data", "{}.npz", "--batch-size", "2"
    ),
    "ortops predict": lambda f: f.commands(
        *("predict", "{}.onnx", "--data", "{}.npz", "--output", "{}.out.npz"),
        *("--outputs", "y", "--batch-size", "2"),
    ),
}

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("Function.value_and_grad", "Function.hessian", "Function.hvp"),
        " ".join(name for name in EXAMPLES if name != "energy"),
    ),
    **dict.fromkeys(("saliency", "integrated_gradients", "smooth_grad"), "tagger recurrent half"),
    "grad_cam": "tagger recurrent policy query energy fixed half",
    "before_postprocessing": " ".join(EXAMPLES),
    "per_sample_gradient": "layers sequence energy fixed",
    "predict": "energy",
    "predict a list": "energy",
    "fit with validation": "fixed",
    "find_batch_size": "fixed",
    "free_batch": "layers energy",
    "replace_head": "policy query sequence energy",
    "prune": "tagger recurrent query sequence energy half",
    "ortops predict": "energy",
}
"""Which files each entry refuses with an OrtopsError, such as the Hessian of several outputs."""

FILES = [(name, mode) for name, example in EXAMPLES.items() for mode in example.modes]
ALL = os.environ.get("ORTOPS_ENTRIES") == "all"
DRAWN = {"TorchScript": (1, 4), "dynamo": (3, 2)}
"""One in how many files is exported, which takes dynamo seconds, and one in how many entries."""


@pytest.mark.parametrize("exporter", DRAWN)
def test_every_entry_takes_every_file(exporter: str, tmp_path: Path) -> None:
    files, entries = (1, 1) if ALL else DRAWN[exporter]
    with all_violations() as check:
        for number, (name, mode) in enumerate(FILES[files - 1 :: files]):
            model, feeds = exported(EXAMPLES[name], exporter, mode)
            file = File(model, feeds, tmp_path / f"{number}.onnx")
            for entry in list(ENTRIES)[number % entries :: entries]:
                with check(f"{entry} of {name} in {mode} mode"):
                    try:
                        ENTRIES[entry](file)
                    except ortops.OrtopsError:
                        if name not in REFUSED.get(entry, "").split():
                            raise
